"""A study: a grid of runs, methods x learning rates x updates a rollout x seeds.

    choose   every rate, on seeds and held-out puzzles that the report does not use
    report   for each method and number of updates the rate that did best there, on the seeds of
             the report: paired, since runs of one seed share puzzles, noise and evaluation

A run of the grid is a cell: one line of ledger.csv once it is done, and one line of curves.csv for
each of its evaluations. The same command goes on where it was stopped: a cell of the ledger is not
run again, and one that was interrupted is resumed. Several cells run at a time, each in a process
of its own with one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

import minidrl
from minidrl.run import checkpoints, config, folders, train
from minidrl.run.launch import RunError
from minidrl.run.precheck import method_of
from research import controls
from research.ledger import PHASES, SELF_TRAINING, STORED, Group, Ledger, rate_text

RESULT = "cell.json"
CHOOSE, REPORT = "choose", "report"
FIRST_CHOICE = 1000  # the seeds of the choice; those of the report begin at 0
LABEL = re.compile(r"\w[\w.+-]*", re.ASCII)  # it names folders
# What tells cells apart, and where a study says it.
OF_A_CELL = {"seed": "seeds", "optimizer.learning_rate": "rates", "num_iterations": "updates"}
# Means since the evaluation before, under the names of metrics.jsonl.
MEANS = {"training": "solved", "reward": "reward", "grad_norm": "grad_norm", "ratio_std": "ratio_std"}
MEANS |= {"clip_fraction": "clip_fraction", "entropy": "entropy"}
# What changes no number of a run beyond rounding.
FREE = ("threads", "device", "save_every", "micro_batch", "compile", "tensorboard", "one_pass", "model")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs, as its YAML file has it.

    config      the run that all cells share, a path relative to the study's file
    settings    keys that differ from it in every cell, as on the command line
    methods     names; or labels with the keys in which they differ, ``method`` among them (without
                it: the label). ``self-training`` is one of the controls
    rates       learning rates; where there are several, one is chosen for each method and number
                of updates
    rate_of     the rate of those methods, by label, for which none is chosen any more
    updates     updates a rollout (``num_iterations``)
    seeds       how many the report has, ``first_seed`` the first of them
    choose      the choice of rates: ``seeds`` runs of each, judged on ``n`` held-out puzzles after
                those of the report
    equal       ``updates``: every cell has the config's ``steps``. ``calls``: every method has as
                many as it takes to make the network calls of the first one, by a trial step
    steps_of    the steps that such a trial found before, by label
    """

    config: str
    methods: dict
    settings: dict = field(default_factory=dict)
    rates: list = field(default_factory=list)
    rate_of: dict = field(default_factory=dict)
    updates: list = field(default_factory=lambda: [1])
    seeds: int = 5
    first_seed: int = 0
    choose: dict = field(default_factory=dict)
    equal: str = "updates"
    steps_of: dict = field(default_factory=dict)

    def __post_init__(self):
        if not self.methods or not all(map(LABEL.fullmatch, self.methods)):
            refuse("methods", list(self.methods), "at least one, by names of letters, digits and .+-_")
        for label, keys in {**self.methods, "settings": self.settings}.items():
            for name in OF_A_CELL.keys() & keys.keys():
                refuse(f"{label}.{name}", keys[name], f"{OF_A_CELL[name]} of the study")
        if not self.rates and self.rate_of.keys() != self.methods.keys():
            refuse("rates", self.rates, "at least one")
        if not self.updates or min(self.updates) < 1:
            refuse("updates", self.updates, "whole numbers from 1")
        if not 1 <= self.seeds <= FIRST_CHOICE - self.first_seed:
            refuse("seeds", self.seeds, f"from 1; the seeds of the choice begin at {FIRST_CHOICE}")
        if self.equal not in ("updates", "calls"):
            refuse("equal", self.equal, "updates, calls")
        for key in ("rate_of", "steps_of"):
            if stray := getattr(self, key).keys() - self.methods.keys():
                refuse(key, min(stray), ", ".join(self.methods))

    def rates_of(self, label: str) -> list[float]:
        """The rates of which one is chosen for a method; where it is one, nothing is."""
        return [self.rate_of[label]] if label in self.rate_of else self.rates

    def lines(self) -> list[tuple[str, int]]:
        """(label, updates a rollout): what is compared."""
        return [(label, n) for n in self.updates for label in self.methods]

    def to_choose(self) -> list[tuple[str, int]]:
        """The lines whose rate is chosen."""
        return [line for line in self.lines() if len(self.rates_of(line[0])) > 1]


def refuse(key: str, got: Any, allowed: str) -> None:
    raise ValueError(f"{key}: got {got!r}; allowed {allowed}")


def number(key: str, value: Any) -> float:
    """A learning rate: YAML reads 3e-4 as a text."""
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = 0.0
    if not rate > 0:
        refuse(key, value, "numbers above 0")
    return rate


def study_of(path: Path, names: Sequence[str] = (), **changes: Any) -> Study:
    """The study of a file; or, of a run's config, that of the methods ``names``.

    ``names``: of a study's methods only these; one that it does not have is a row of METHODS.
    ``changes``: other values of its keys.
    """
    if not path.is_file():
        refuse("config", str(path), "the file of a study, or of a run")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "methods" not in data:  # a run
        if not names:
            refuse("methods", "none", f"--methods, as {path} is no study")
        rate = config.load(config.Train, path, {"method": "reinforce"}).optimizer.learning_rate
        data = {"config": path.name, "methods": list(names), "rates": [rate], "seeds": 3}
    if unknown := data.keys() - {f.name for f in dataclasses.fields(Study)}:
        refuse("study", min(unknown), ", ".join(f.name for f in dataclasses.fields(Study)))
    given = {key: value for key, value in changes.items() if value is not None}
    data |= given | {"settings": (data.get("settings") or {}) | given.get("settings", {})}
    if given.keys() & {"settings", "equal"}:
        data["steps_of"] = {}  # they were found with other settings
    if "rates" in given:
        data["rate_of"] = {}
    methods = data["methods"]
    methods = {label: how or {} for label, how in methods.items()} if isinstance(methods, dict) else dict.fromkeys(methods, {})
    data["methods"] = {label: methods.get(label, {}) for label in names} if names else methods
    for key in ("rate_of", "steps_of"):
        data[key] = {label: value for label, value in data.get(key, {}).items() if label in data["methods"] or not names}
    data["rates"] = [number("rates", rate) for rate in data.get("rates", [])]
    data["rate_of"] = {label: number("rate_of", rate) for label, rate in data["rate_of"].items()}
    return Study(**data | {"config": str((path.parent / data["config"]).resolve())})


def rehearsed(study: Study) -> Study:
    """The study in a minute or so: every method and number of updates, few of everything else."""
    small = {"steps": 1, "num_prompts": 2, "num_generations": 2, "evaluate.n": 4, "evaluate.every": 0}
    how = {"settings": study.settings | small, "rates": study.rates[:1], "seeds": 2, "steps_of": {}}
    return dataclasses.replace(study, **how)


# --------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    study: str
    stage: str
    label: str
    settings: config.Train
    imitates: bool = False  # self-training

    @property
    def name(self) -> str:
        """METHOD-RATE-UPDATES-SEED."""
        s = self.settings
        return f"{self.label}-{rate_text(s.optimizer.learning_rate)}-{s.num_iterations}-{s.seed}"

    @property
    def key(self) -> str:
        """A hash of all settings that could change its numbers, without those at their defaults:
        a line of the ledger stays valid when a later version adds a setting."""
        s = self.settings
        kept = {key: value for key, value in without_defaults(s).items() if key not in FREE}
        if "method" in kept:
            kept["method"] = STORED.get(kept["method"], kept["method"])
        kept |= {"one_pass": True} if s.one_pass else {}  # not the default of a cell
        return short_hash(json.dumps([kept, self.imitates], sort_keys=True).encode())


def without_defaults(settings: Any) -> dict:
    """As config.to_dict, but for what has the default of its field."""
    found = {}
    for f in dataclasses.fields(settings):
        value, made = getattr(settings, f.name), f.default_factory
        if dataclasses.is_dataclass(value):
            value = without_defaults(value) | ({"name": value.name} if f.name == "task" else {})
        elif value == (f.default if made is dataclasses.MISSING else made()):
            continue
        found[f.name] = value
    return {name: value for name, value in found.items() if value != {}}


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


LATER = ("wording", "protocol", "path", "exclude")  # settings of a task that are newer than the ledger


def bed_of(settings: config.Train) -> str:
    """A hash of what is trained and of what it is judged by: weights and task."""
    weights = Path(settings.model) / "model.safetensors"
    task = config.to_dict(settings)["task"]
    used = without_defaults(settings).get("task", {})
    task = {key: value for key, value in task.items() if key not in LATER or key in used}
    return short_hash(weights.read_bytes() + json.dumps(task, sort_keys=True).encode())


class Grid:
    """The cells of a study, as far as they are known: those of the report wait for the choice."""

    def __init__(self, name: str, study: Study):
        self.name, self.study = name, study
        self.steps: dict[tuple[str, int], int] = {}
        cells = [self.first(line) for line in study.lines()]
        for cell in cells:  # what is wrong must not surface after hours of other cells
            method_of(cell.settings)
        self.bed = bed_of(cells[0].settings)
        if len({(bed_of(c.settings), c.settings.evaluate.n, c.settings.evaluate.skip) for c in cells}) > 1:
            refuse("methods", list(study.methods), "one base, one task and the same held-out puzzles for all")
        if len({cell.key for cell in cells}) < len(cells):
            refuse("methods", list(study.methods), "methods that differ in their settings")
        if study.equal == "calls":
            self.equalize()

    def choices(self) -> list[Cell]:
        """The cells of the choice; none where there is one rate."""
        count = self.study.choose.get("seeds", 1)
        return [
            self.cell(CHOOSE, *line, rate, seed)
            for seed in range(FIRST_CHOICE, FIRST_CHOICE + count)
            for rate in self.study.rates
            for line in self.study.to_choose()
        ]

    def reports(self, rates: dict[tuple[str, int], float]) -> list[Cell]:
        """The cells of the report, for the lines whose rate is known."""
        first = self.study.first_seed
        return [
            self.cell(REPORT, *line, rates[line], seed)
            for seed in range(first, first + self.study.seeds)
            for line in self.study.lines()
            if line in rates
        ]

    def first(self, line: tuple[str, int], seed: int = 0) -> Cell:
        """A cell of a line, to be looked at before any is run."""
        return self.cell(REPORT, *line, self.study.rates_of(line[0])[0], seed)

    def cell(self, stage: str, label: str, updates: int, rate: float, seed: int) -> Cell:
        s = self.study
        # Two passes, so that calls do not depend on the micro-batch.
        keys = {"method": label, "one_pass": False} | s.settings | s.methods[label]
        if imitates := keys["method"] == SELF_TRAINING:
            keys |= {"method": "reinforce", "method_options": {}}
        keys |= {"num_iterations": updates, "optimizer.learning_rate": rate, "seed": seed}
        with contextlib.redirect_stderr(io.StringIO()):  # the ledger says what options a cell had
            settings = config.load(config.Train, s.config, keys)
        judged = settings.evaluate
        if stage == CHOOSE:
            n = s.choose.get("n", 512)
            judged = dataclasses.replace(judged, skip=judged.skip + judged.n, n=n)
        if steps := self.steps.get((label, updates)):
            every = max(1, round(judged.every * steps / settings.steps)) if judged.every else 0
            judged = dataclasses.replace(judged, every=every)
            settings = dataclasses.replace(settings, steps=steps)
        settings = dataclasses.replace(settings, evaluate=judged, threads=1)
        return Cell(self.name, stage, label, settings, imitates)

    def equalize(self) -> None:
        """Steps for each line that make the network calls of the first one: a trial step each,
        where the study does not say them."""
        lines, known = self.study.lines(), self.study.steps_of
        self.steps = {line: known[line[0]] for line in lines if line[0] in known}
        budget = None
        for line in lines if len(self.steps) < len(lines) else ():
            cell = self.first(line, FIRST_CHOICE)
            calls = sum(calls_of(next(controls.steps_of(cell.settings, cell.imitates)[1])).values())
            budget = budget or calls * cell.settings.steps
            self.steps.setdefault(line, max(1, round(budget / calls)))


def chosen(study: Study, rows: Sequence[dict]) -> dict[tuple[str, int], float]:
    """The best rate of each line: the highest mean of ``after`` over the seeds of the choice.

    A cell that failed counts as nothing solved; of equal rates the lowest is taken. A line without
    all of its cells has no entry.
    """
    made: dict[tuple[str, int], list[dict]] = {line: [] for line in study.to_choose()}
    for row in rows:
        line = row["method"], row["updates"]
        if row["stage"] == CHOOSE and row["rate"] in study.rates and line in made:
            made[line].append(row)
    whole = study.choose.get("seeds", 1) * len(study.rates)
    told = {line: study.rates_of(line[0])[0] for line in study.lines() if line not in made}
    return told | {line: Group(*line, choose=own).rate for line, own in made.items() if len(own) == whole}


def run_cell(settings: config.Train, imitates: bool, out: Path) -> None:
    """Train and judge a cell in its folder, or go on with it; cell.json is written last.

    A run that had to stop because a number in it is not finite is a result, too.
    """
    try:
        if imitates:
            model, tok = controls.imitation(settings, out)
        else:
            if folders.read_summary(out):
                config.check_unchanged(settings, out)
            else:
                train.train(settings, out, bool(folders.checkpoint_folders(out)))
            model, tok = checkpoints.load(out / f"checkpoint-{settings.steps}")
    except (RunError, FloatingPointError) as error:
        if not (said := re.match(r"(step \d+: [^;]*)", str(error))):
            raise
        folders.write(out / RESULT, json.dumps({"status": f"failed: {said[1]}"}))
        return
    greedy = controls.solved(model, tok, settings, 0.0)["solved"]
    folders.write(out / RESULT, json.dumps({"status": "finished", "greedy_after": greedy}))


# --------------------------------------------------------------------------- from a run to its lines


def calls_of(row: dict) -> dict[str, int]:
    """Network calls of a step in forward equivalents: a backward counts twice."""
    calls = {phase: row.get(f"network_calls/{phase}", 0) for phase in PHASES}
    return calls | {"update": 3 * calls["update"]}


def curve(cell: Cell, metrics: list[dict]) -> list[dict]:
    """A line of curves.csv for each evaluation of a run."""
    lines, since, calls = [], [], 0
    for row in metrics:
        if "solved" in row:
            since.append(row)
            calls += sum(calls_of(row).values())
        if "eval/solved" in row:
            step = row["step"]
            spent = {"updates": step * cell.settings.num_iterations, "calls": calls, "seconds": round(row["seconds"], 1)}
            means = {name: mean([r[key] for r in since if key in r]) for name, key in MEANS.items()}
            place = {"study": cell.study, "cell": cell.name, "step": step}
            lines.append(place | spent | {"held_out": row["eval/solved"]} | means)
            since = []
    return lines


def mean(values: Sequence[float]) -> float | str:
    return float(f"{sum(values) / len(values):.6g}") if values else ""


def ledger_line(cell: Cell, told: dict, metrics: list[dict], bed: str) -> dict:
    """The line of ledger.csv of a cell that is done; ``told``: its cell.json."""
    s = cell.settings
    rows = [row for row in metrics if "solved" in row]
    held_out = [row["eval/solved"] for row in metrics if "eval/solved" in row]
    calls = {phase: sum(calls_of(row)[phase] for row in rows) for phase in PHASES}
    line = {
        "study": cell.study,
        "cell": cell.name,
        "stage": cell.stage,
        "method": cell.label,
        "options": {"method": s.method} | s.method_options,
        "rate": s.optimizer.learning_rate,
        "updates": s.num_iterations,
        "seed": s.seed,
        "steps": s.steps,
        "bed": bed,
        "key": cell.key,
        "status": told["status"],
        "judged": f"{s.evaluate.n} from {s.evaluate.skip}",
        "before": held_out[0],
        "after": held_out[-1] if told["status"] == "finished" else "",
        "greedy_after": told.get("greedy_after", ""),
        "train_end": mean([row["solved"] for row in rows[-max(1, len(rows) // 10) :]]),
        "calls": sum(calls.values()),
        "seconds": round(rows[-1]["seconds"], 1) if rows else 0.0,
        "version": minidrl.__version__,
    }
    for phase in PHASES:
        spent = sum(row.get(f"seconds/{phase}", 0.0) for row in rows)
        line |= {f"calls_{phase}": calls[phase], f"seconds_{phase}": round(spent, 1)}
    return line


# --------------------------------------------------------------------------------------- the runner


def run(grid: Grid, out: Path, ledger: Ledger, jobs: int = 2) -> None:
    """Do what the ledger lacks of a study, ``jobs`` cells at a time; 1: in this process."""
    with ledger.opened():
        for stage in (CHOOSE, REPORT):
            rows = ledger.rows(grid.name)
            cells = grid.choices() if stage == CHOOSE else grid.reports(chosen(grid.study, rows))
            left = missing(cells, rows, grid.bed, ledger.path)
            with tqdm(total=len(cells), initial=len(cells) - len(left), desc=f"{grid.name}, {stage}") as bar:
                for cell in in_this_process(left, out) if jobs == 1 else in_processes(left, out, jobs):
                    told = json.loads((out / cell.name / RESULT).read_text())
                    metrics = folders.read_metrics(out / cell.name)
                    line = ledger_line(cell, told, metrics, grid.bed)
                    ledger.add(line, curve(cell, metrics))
                    bar.update()
                    bar.set_postfix_str(f"{cell.name}: {line['after'] or told['status']}")


def missing(cells: Sequence[Cell], rows: Sequence[dict], bed: str, path: Path) -> list[Cell]:
    """Those that the ledger lacks.

    ValueError where it holds one of another bed, or of the same name with other settings.
    """
    known = {row["cell"]: row for row in rows}
    for row in rows:
        if row["bed"] != bed:
            refuse("ledger", f"{path} with {row['cell']} of bed {row['bed']}", f"bed {bed}, or another --ledger")
    for cell in cells:
        if cell.name in known and known[cell.name]["key"] != cell.key:
            refuse("cell", f"{cell.name} with other settings than in {path}", "the same, or another --ledger")
    return [cell for cell in cells if cell.name not in known]


def in_this_process(cells: Sequence[Cell], out: Path) -> Iterator[Cell]:
    for cell in cells:
        run_cell(cell.settings, cell.imitates, out / cell.name)
        yield cell


def in_processes(cells: Sequence[Cell], out: Path, jobs: int) -> Iterator[Cell]:
    """Each cell when it is done. When this ends early, no process is left: each is asked to save."""
    waiting, running = list(cells), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                running[cell.name] = cell, started(cell, out)
            time.sleep(0.2)
            for cell, process in [pair for pair in running.values() if pair[1].poll() is not None]:
                del running[cell.name]
                if process.returncode:
                    said = (out / f"{cell.name}.log").read_text(errors="replace").strip().splitlines()
                    last = said[-1] if said else "nothing"
                    raise RunError(f"cell {cell.name} ended with status {process.returncode}: {last}")
                yield cell
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()


def started(cell: Cell, out: Path) -> subprocess.Popen:
    """``python -m research cell`` on the settings of a cell, with what it prints in CELL.log."""
    out.mkdir(parents=True, exist_ok=True)
    settings = out / f"{cell.name}.json"
    settings.write_text(json.dumps(config.to_dict(cell.settings)))
    words = ["-m", "research", "cell", str(settings), *(["--self-training"] if cell.imitates else [])]
    with (out / f"{cell.name}.log").open("a") as log:
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        return subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment)
