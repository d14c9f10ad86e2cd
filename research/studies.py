"""A study: a grid of runs, methods x learning rates x updates a rollout x seeds, and its ledger.

    choose   every rate, on seeds and held-out puzzles that the report does not use
    report   for each method and number of updates the rate that did best there, on the seeds of
             the report: paired, since runs of one seed share puzzles, noise and evaluation

A run of the grid is a cell. A cell that is done is one line of ``ledger.csv`` and one line of
``curves.csv`` beside it for each of its evaluations; the same command does what is missing. Several
cells run at a time, each in a process of its own with one thread: two that share two cores with two
threads each are many times slower than one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

import minidrl
from minidrl.run import checkpoints, config, files, rehearsal, report, runs, trainer, untrusted
from minidrl.run.launch import Interrupted, RunError, one_line, stop_requests, tell, tell_notes
from minidrl.run.untrusted import brief
from research import controls
from research.ledger import PHASES, PLANNED, SELF_TRAINING, Group, Ledger, cell_name, rate_text

CELL = "cell.json"
CHOOSE, REPORT = "choose", "report"
MOST_CELLS = 10_000
LABEL = re.compile(r"\w[\w.+-]{0,99}", re.ASCII)  # it names folders
FIRST_CHOICE = 1000  # the seeds of the choice; those of the report begin at 0
EQUAL = ("updates", "calls")
# Means since the evaluation before, under the names of metrics.jsonl.
MEANS = {
    "training": "solved",
    "reward": "reward",
    "grad_norm": "grad_norm",
    "ratio_std": "ratio_std",
    "clip_fraction": "clip_fraction",
    "entropy": "entropy",
}
# What tells the cells of a line apart, and where a study says it.
OF_A_CELL = {"seed": "seeds", "optimizer.learning_rate": "rates", "num_iterations": "updates"}
# Keys of a study that change no call of a step.
_OF_NO_STEP = ("rates", "rate_of", "seeds", "first_seed", "choose", "steps_of", "hours")
# What changes no number of a run beyond rounding.
_FREE = ("threads", "device", "save_every", "micro_batch", "compile", "tensorboard", "one_pass")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of rates: ``seeds`` runs of each, judged on ``n`` held-out puzzles after those of
    the report."""

    seeds: int = 1
    n: int = 512

    def __post_init__(self):
        for name in ("seeds", "n"):
            if getattr(self, name) < 1:
                raise ValueError(f"choose.{name}: got {getattr(self, name)}; allowed from 1")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs.

    config     the run that all cells share, a path relative to the study's file
    settings   keys that differ from it in every cell, as on the command line
    methods    names; or a mapping of labels to the keys in which this label differs, ``method``
               among them (without: the label). ``self-training`` is one of ``controls``
    rates      learning rates; where there are several, one is chosen for each method and number
               of updates
    rate_of    the rate of those methods, by label, for which none is chosen any more
    updates    updates a rollout (``num_iterations``)
    seeds      how many the report has
    first_seed the first of them
    equal      ``updates``: every cell has the config's ``steps``. ``calls``: every method has as
               many as it takes to make the network calls of the first one, by a trial step
    steps_of   the steps of those methods, by label, for which a trial found them before: cells stay
               the same when a version makes other calls. Given by hand, other settings leave it out
    hours      the grid is refused where the first cells say that it will need more
    """

    config: str
    settings: dict = field(default_factory=dict)
    methods: dict
    rates: list = field(default_factory=list)
    rate_of: dict = field(default_factory=dict)
    updates: list = field(default_factory=lambda: [1])
    seeds: int = 5
    first_seed: int = 0
    choose: Choice = field(default_factory=Choice)
    equal: str = "updates"
    steps_of: dict = field(default_factory=dict)
    hours: float = 8.0

    def __post_init__(self):
        for label, how in self.methods.items():
            if not isinstance(label, str) or not isinstance(how, dict) or not LABEL.fullmatch(label):
                allowed = "a name of letters, digits and .+-_ with a mapping of settings"
                raise ValueError(f"methods: got {brief(label)}: {brief(how)}; allowed {allowed}")
        if not self.methods:
            raise ValueError("methods: got none; allowed at least one")
        _refuse_own_keys("settings", self.settings)
        for label, how in self.methods.items():
            _refuse_own_keys(f"methods.{label}", how)
        self._check_rates()
        _all_numbers("updates", self.updates, _from_1, "whole, from 1")
        for name, low in {"seeds": 1, "first_seed": 0, "hours": 0}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed from {low}")
        if self.equal not in EQUAL:
            raise ValueError(f"equal: got {self.equal!r}; allowed {', '.join(EQUAL)}")
        self._check_steps()
        if (cells := self.size()) > MOST_CELLS:
            got = f"{self.seeds}, {self.choose.seeds} in choose: {cells} runs"
            raise ValueError(f"seeds: got {got}; allowed up to {MOST_CELLS} runs")
        if (after := self.first_seed + self.seeds) > FIRST_CHOICE:
            allowed = f"below {FIRST_CHOICE}, where those of the choice begin"
            raise ValueError(f"first_seed: got seeds up to {after - 1}; allowed {allowed}")

    def _refuse_strays(self, key: str) -> None:
        if stray := [label for label in getattr(self, key) if label not in self.methods]:
            raise ValueError(f"{key}: got {brief(stray[0])}; allowed {', '.join(self.methods)}")

    def _check_rates(self) -> None:
        self._refuse_strays("rate_of")
        for label, rate in self.rate_of.items():
            _all_numbers(f"rate_of.{label}", [rate], _above_0, "above 0")
        if self.rates or self.rate_of.keys() != self.methods.keys():
            _all_numbers("rates", self.rates, _above_0, "above 0")
        if len(set(map(rate_text, self.rates))) < len(self.rates):  # they name cells
            allowed = "numbers that differ in their first digits"
            raise ValueError(f"rates: got {brief(self.rates)}; allowed {allowed}")

    def _check_steps(self) -> None:
        self._refuse_strays("steps_of")
        if self.steps_of and (self.equal != "calls" or len(self.updates) > 1):
            got = f"steps with equal {self.equal}, updates {brief(self.updates)}"
            raise ValueError(f"steps_of: got {got}; allowed with equal calls, one number of updates")
        for label, steps in self.steps_of.items():
            _all_numbers(f"steps_of.{label}", [steps], _from_1, "whole, from 1")

    def rates_of(self, label: str) -> list[float]:
        """The rates of which one is chosen for a method; where it is one, nothing is."""
        return [self.rate_of[label]] if label in self.rate_of else self.rates

    def lines(self) -> list[tuple[str, int]]:
        """(label, updates a rollout): what is told apart."""
        return [(label, n) for n in self.updates for label in self.methods]

    def to_choose(self) -> list[tuple[str, int]]:
        """The lines whose rate is chosen."""
        return [line for line in self.lines() if len(self.rates_of(line[0])) > 1]

    def size(self) -> int:
        """How many runs there are, known or not."""
        choices = len(self.to_choose()) * self.choose.seeds * len(self.rates)
        return len(self.lines()) * self.seeds + choices


def _above_0(number: Any) -> bool:
    return isinstance(number, float) and number > 0


def _from_1(number: Any) -> bool:
    return type(number) is int and number > 0


def _refuse_own_keys(key: str, settings: dict) -> None:
    for name, instead in OF_A_CELL.items():
        section, _, last = name.rpartition(".")
        inner = settings.get(section) if section else None
        if name in settings or (isinstance(inner, dict) and last in inner):
            allowed = f"{instead} of the study, which every cell takes from there"
            raise ValueError(f"{key}.{name}: got a value; allowed {allowed}")


def _all_numbers(key: str, values: list, right: Callable[[Any], bool], allowed: str) -> None:
    if not values or not all(map(right, values)) or len({*values}) < len(values):
        raise ValueError(f"{key}: got {brief(values)}; allowed different numbers, each {allowed}")


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    study: str
    stage: str
    label: str
    settings: config.Train
    imitates: bool  # self-training

    @property
    def name(self) -> str:
        """METHOD-RATE-UPDATES-SEED."""
        s = self.settings
        parts = {"method": self.label, "rate": s.optimizer.learning_rate}
        return cell_name(parts | {"updates": s.num_iterations, "seed": s.seed})

    @property
    def key(self) -> str:
        """A hash of all settings that could change its numbers, without those at their defaults:
        a line of the ledger stays valid when a later version adds a setting."""
        plain = config.without_defaults(self.settings)
        kept = {key: value for key, value in plain.items() if key not in (*_FREE, "model")}
        kept |= {"one_pass": True} if self.settings.one_pass else {}  # not the default of a cell
        return _short_hash(json.dumps([kept, self.imitates], sort_keys=True).encode())


# ---------------------------------------------------------------------------------------- the grid


def study_of(path: Path, data: dict, overrides: dict[str, Any], names: Sequence[str] | None = None) -> Study:
    """A study from the plain data of the file ``path``, to which its ``config`` is relative.

    The overrides are the study's own keys or, all others, settings of every cell. ``names``: of its
    methods only these; one that it does not have is a row of METHODS.
    """
    own, data = {f.name for f in dataclasses.fields(Study)}, dict(data)
    if "methods" not in data:
        allowed = "the file of a study, or --methods with that of a run"
        raise ValueError(f"methods: {path} names none; allowed {allowed}")
    # A section is replaced before a key of it is.
    for key, value in sorted(overrides.items(), key=lambda pair: "." in pair[0]):
        value = config.parsed(key, value) if isinstance(value, str) else value
        if key in own:
            data[key] = value
        elif key.startswith("choose."):
            data["choose"] = _section(data, "choose") | {key.removeprefix("choose."): value}
        else:
            data["settings"] = _section(data, "settings") | {key.removeprefix("settings."): value}
    if any(key not in _OF_NO_STEP and not key.startswith("choose.") for key in overrides):
        data["steps_of"] = {}  # they were found with other settings
    if isinstance(data["methods"], list):
        if not all(isinstance(label, str) for label in data["methods"]):
            raise ValueError(f"methods: got {brief(data['methods'])}; allowed a list of names")
        _refuse_twice(data["methods"])
        data["methods"] = dict.fromkeys(data["methods"])
    if isinstance(data["methods"], dict):  # what follows a label may be left out
        data["methods"] = {label: how or {} for label, how in data["methods"].items()}
        if names:
            _refuse_twice(names)
            data["methods"] = {label: data["methods"].get(label, {}) for label in names}
            for section in ("rate_of", "steps_of"):
                own = _section(data, section)
                data[section] = {label: own[label] for label in names if label in own}
    if isinstance(data.get("rates"), list):  # YAML reads 3e-4 as a string
        data["rates"] = [_number(rate) for rate in data["rates"]]
    own = {} if "rates" in overrides else _section(data, "rate_of")
    data["rate_of"] = {label: _number(rate) for label, rate in own.items()}
    for section in ("choose", "settings", "steps_of"):
        _section(data, section)
    study = config.from_dict(Study, data)
    config.check_path("config", study.config)
    return dataclasses.replace(study, config=str((path.parent / study.config).resolve()))


def _refuse_twice(names: Sequence[str]) -> None:
    if len({*names}) < len(names):
        raise ValueError(f"methods: got {brief(list(names))}; allowed each name once")


def _section(data: dict, key: str) -> dict:
    if not isinstance(data.get(key, {}), dict):
        raise ValueError(f"{key}: got {brief(data[key])}; allowed a section")
    return data.get(key, {})


def _number(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else untrusted.number(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _check_alike(cells: Sequence[Cell]) -> None:
    """ValueError for methods that are not trained and judged on the same."""
    first, shared = cells[0].label, _shared(cells[0])
    for cell in cells:
        if differing := [key for key, value in _shared(cell).items() if value != shared[key]]:
            got = f"{cell.label!r} with another {differing[0]} than {first!r}"
            raise ValueError(f"methods: got {got}; allowed one for all, or a study of its own")
    labels: dict[str, str] = {}
    for cell in cells:
        if (twin := labels.setdefault(cell.key, cell.label)) != cell.label:
            got = f"{twin!r} and {cell.label!r}, which have the same settings"
            raise ValueError(f"methods: got {got}; allowed methods that differ")


def _shared(cell: Cell) -> dict[str, Any]:
    s = cell.settings
    judged = {"evaluate.n": s.evaluate.n, "evaluate.skip": s.evaluate.skip}
    return {"model": s.model, "task": s.task} | judged


class Grid:
    """The cells of a study, as far as they are known: those of the report wait for the choice."""

    def __init__(self, name: str, study: Study):
        self.name, self.study = name, study
        self.steps: dict[tuple[str, int], int] = {}
        # What is wrong must not surface after hours of other cells.
        cells = [self._first(line) for line in study.lines()]
        for cell in cells:
            rehearsal.method_of(cell.settings)
        _check_alike(cells)
        if study.equal == "calls":
            self._equalize()

    def lines(self) -> list[tuple[str, int]]:
        return self.study.lines()

    def choices(self) -> list[Cell]:
        """The cells of the choice; none where there is one rate."""
        s = self.study
        return [
            self._cell(CHOOSE, *line, rate, seed)
            for seed in range(FIRST_CHOICE, FIRST_CHOICE + s.choose.seeds)
            for rate in s.rates
            for line in s.to_choose()
        ]

    def cells(self, stage: str, ledger: Ledger) -> list[Cell]:
        """The cells of a stage, as far as the ledger lets them be known."""
        if stage == CHOOSE:
            return self.choices()
        return self.reports(chosen(self.study, ledger.rows(self.name)))

    def planned(self, ledger: Ledger) -> list[str]:
        """The names of all cells that are known."""
        return [cell.name for stage in (CHOOSE, REPORT) for cell in self.cells(stage, ledger)]

    def bed(self) -> str:
        """That of every cell."""
        return bed_of(self._first(self.lines()[0]).settings)

    def reports(self, rates: dict[tuple[str, int], float]) -> list[Cell]:
        """The cells of the report, for the lines whose rate is known."""
        first = self.study.first_seed
        return [
            self._cell(REPORT, *line, rates[line], seed)
            for seed in range(first, first + self.study.seeds)
            for line in self.lines()
            if line in rates
        ]

    def _first(self, line: tuple[str, int], seed: int = 0) -> Cell:
        """A cell of a line, to be looked at before any is run."""
        return self._cell(REPORT, *line, self.study.rates_of(line[0])[0], seed)

    def _cell(self, stage: str, label: str, updates: int, rate: float, seed: int) -> Cell:
        s = self.study
        # Two passes, so that calls do not depend on the micro-batch.
        keys = {"method": label, "one_pass": False} | s.settings | s.methods[label]
        imitates = keys["method"] == SELF_TRAINING
        if imitates:
            keys |= {"method": "reinforce", "method_options": {}}
        keys |= {"num_iterations": updates, "optimizer.learning_rate": rate, "seed": seed}
        with contextlib.redirect_stderr(io.StringIO()):  # the ledger says what options a cell had
            settings = config.load(config.Train, s.config, keys)
        judged = settings.evaluate
        if stage == CHOOSE:
            judged = dataclasses.replace(judged, skip=judged.skip + judged.n, n=s.choose.n)
        if steps := self.steps.get((label, updates)):
            every = max(1, round(judged.every * steps / settings.steps)) if judged.every else 0
            judged = dataclasses.replace(judged, every=every)
            settings = dataclasses.replace(settings, steps=steps)
        settings = dataclasses.replace(settings, evaluate=judged, threads=1)
        return Cell(self.name, stage, label, settings, imitates)

    def _equalize(self) -> None:
        """Steps for each line that make the network calls of the first one: a trial step each,
        where the study does not say them."""
        lines, known = self.lines(), self.study.steps_of
        self.steps = {line: known[line[0]] for line in lines if line[0] in known}
        if len(self.steps) == len(lines):
            return
        budget = None
        for line in lines:
            if budget and line in self.steps:
                continue
            cell = self._first(line, FIRST_CHOICE)
            calls = sum(_calls(_learner(cell)(cell.settings).step(0)).values())
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
    whole = study.choose.seeds * len(study.rates)
    groups = [Group(*line, choose=own) for line, own in made.items() if len(own) == whole]
    told = {line: study.rates_of(line[0])[0] for line in study.lines() if line not in made}
    return told | {(group.method, group.updates): group.rate for group in groups}


# ------------------------------------------------------------------------------------------- a cell


def run_cell(cell: Cell, out: Path) -> None:
    """Train and judge a cell in its folder, or go on with it; cell.json is written last.

    A run that had to stop because a number in it is not finite is a result, too.
    """
    if runs.read_summary(out):
        config.check_unchanged(cell.settings, out)
    else:
        try:
            trainer.train(cell.settings, out, runs.has_checkpoint(out), _learner(cell))
        except RunError as error:
            if not any(out.glob("failed-*")):
                raise
            why = one_line(error).partition(";")[0]  # what follows says where on this disk
            files.write(out / CELL, json.dumps({"status": f"failed: {why}"}))
            return
    model, tok = checkpoints.load(out / f"checkpoint-{cell.settings.steps}")
    greedy = controls.solved(model, tok, cell.settings, 0.0)["solved"]
    files.write(out / CELL, json.dumps({"status": "finished", "greedy_after": greedy}))


def _learner(cell: Cell) -> type[trainer.Learner]:
    return controls.SelfTraining if cell.imitates else trainer.Learner


def _calls(row: dict) -> dict[str, int]:
    # Forward equivalents: a backward counts twice.
    calls = {phase: row.get(f"network_calls/{phase}", 0) for phase in (*PHASES, "rollout_kl")}
    both = calls["rollout"] + calls["rollout_kl"]
    return {"rollout": both, "scoring": calls["scoring"], "update": 3 * calls["update"]}


def _measured(run: Path) -> list[dict]:
    """The lines of a cell's log, of which the ledger needs these."""
    metrics, path = report.read_metrics(run), run / "metrics.jsonl"
    for number, row in enumerate(metrics, 1):
        needed = ("step", "seconds") if row.keys() & {"solved", "eval/solved"} else ()
        if missing := [key for key in needed if row.get(key) is None]:
            raise ValueError(f"{path} line {number} has no {missing[0]}; required for the ledger")
    if not any("eval/solved" in row for row in metrics):
        raise ValueError(f"{path}: got no line with eval/solved; required is one")
    return metrics


def curve(cell: Cell, metrics: list[dict]) -> list[dict]:
    """A line of curves.csv for each evaluation of a run."""
    lines, since, calls = [], [], 0
    for row in metrics:
        if "solved" in row:
            since.append(row)
            calls += sum(_calls(row).values())
        if "eval/solved" in row:
            step = row["step"]
            place = {"study": cell.study, "cell": cell.name, "step": step}
            place["updates"] = step * cell.settings.num_iterations
            spent = {"calls": calls, "seconds": round(row["seconds"], 1)}
            means = {name: _mean([r[key] for r in since if key in r]) for name, key in MEANS.items()}
            lines.append(place | spent | {"held_out": row["eval/solved"]} | means)
            since = []
    return lines


def _mean(values: Sequence[float]) -> float | str:
    return float(f"{sum(values) / len(values):.6g}") if values else ""


def ledger_line(cell: Cell, told: dict, metrics: list[dict], bed: str) -> dict:
    """The line of ledger.csv of a cell that is done; ``told``: its cell.json."""
    s = cell.settings
    rows = [row for row in metrics if "solved" in row]
    held_out = [row["eval/solved"] for row in metrics if "eval/solved" in row]
    finished = told["status"] == "finished"
    calls = {phase: sum(_calls(row)[phase] for row in rows) for phase in PHASES}
    line = {
        "study": cell.study,
        "cell": cell.name,
        "stage": cell.stage,
        "method": cell.label,
        "options": json.dumps({"method": s.method} | s.method_options),
        "rate": s.optimizer.learning_rate,
        "updates": s.num_iterations,
        "seed": s.seed,
        "steps": s.steps,
        "bed": bed,
        "key": cell.key,
        "status": told["status"],
        "judged": f"{s.evaluate.n} from {s.evaluate.skip}",
        "before": held_out[0] if held_out else "",
        "after": held_out[-1] if finished else "",
        "greedy_after": told.get("greedy_after", ""),
        "train_end": _mean([row["solved"] for row in rows[-max(1, len(rows) // 10) :]]),
        "calls": sum(calls.values()),
        "seconds": round(rows[-1]["seconds"], 1) if rows else 0.0,
        "version": minidrl.__version__,
    }
    for phase in PHASES:
        spent = sum(row.get(f"seconds/{phase}", 0.0) for row in rows)
        line |= {f"calls_{phase}": calls[phase], f"seconds_{phase}": round(spent, 1)}
    return line


def bed_of(settings: config.Train) -> str:
    """A hash of what is trained and of what it is judged by: weights and task."""
    weights = Path(settings.model) / "model.safetensors"
    task = json.dumps(config.to_dict(settings)["task"], sort_keys=True)
    return _short_hash(weights.read_bytes() + task.encode())


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


# --------------------------------------------------------------------------------------- the runner


def run(grid: Grid, out: Path, ledger: Ledger, jobs: int = 2) -> None:
    """Do what the ledger lacks of a study, ``jobs`` cells at a time; 1: in this process."""
    _check_folders(grid, out)
    with ledger.opened():
        work = _Work(grid, out, ledger, jobs)
        _done(ledger, [*grid.choices(), *grid.cells(REPORT, ledger)], work.bed)  # or nothing is run
        tell_notes()
        for stage in (CHOOSE, REPORT):
            cells = grid.cells(stage, ledger)
            done = _done(ledger, cells, work.bed)
            work.do(stage, [cell for cell in cells if cell.name not in done], len(done))


def _check_folders(grid: Grid, out: Path) -> None:
    # Those of all cells, also of such as are not known yet.
    for path in (out, *sorted(out.glob("*"))):
        name = PLANNED.fullmatch(path.name)
        cell = name is not None and name[1] in grid.study.methods
        if (path == out or cell) and path.exists() and not path.is_dir():
            raise ValueError(f"out: got {str(path)!r}, which is a file; allowed a folder")


def _done(ledger: Ledger, cells: Sequence[Cell], bed: str) -> set[str]:
    """The names of those cells that the ledger holds.

    ValueError where it holds one of another bed, or of the same name with other settings.
    """
    rows = {row["cell"]: row for row in ledger.rows(cells[0].study)} if cells else {}
    for row in rows.values():
        if row["bed"] != bed:
            got = f"{ledger.path} with cell {row['cell']} of bed {row['bed']}"
            allowed = f"bed {bed}, that of this config, or another --ledger"
            raise ValueError(f"ledger: got {got}; allowed {allowed}")
    for cell in cells:
        if cell.name in rows and rows[cell.name]["key"] != cell.key:
            got = f"{cell.name} with other settings than in {ledger.path}"
            allowed = "the same, another name of the study, or another --ledger"
            raise ValueError(f"cell: got {got}; allowed {allowed}")
    return {cell.name for cell in cells} & set(rows)


class _Work:
    """The cells of a stage, several at a time."""

    def __init__(self, grid: Grid, out: Path, ledger: Ledger, jobs: int):
        self.grid, self.out, self.ledger, self.jobs = grid, out, ledger, jobs
        self.bed, self.started = grid.bed(), time.perf_counter()

    def do(self, stage: str, cells: list[Cell], done: int) -> None:
        if not cells:
            return
        total = len(cells) + done
        with tqdm(total=total, initial=done, desc=f"{self.grid.name}, {stage}", smoothing=0) as bar:
            for cell, left in self._finished(cells):
                told = files.read_object(self.out / cell.name / CELL)
                metrics = _measured(self.out / cell.name)
                line = ledger_line(cell, told, metrics, self.bed)
                self.ledger.add(line, curve(cell, metrics))
                bar.update()
                after = f"{float(line['after']):.1%}" if line["after"] != "" else line["status"]
                bar.set_postfix_str(f"{cell.name}: {after}")
                self._check_time(left)

    def _finished(self, cells: list[Cell]) -> Iterator[tuple[Cell, list[Cell]]]:
        """Each cell when it is done, and those that are not."""
        if self.jobs == 1:
            for i, cell in enumerate(cells):
                run_cell(cell, self.out / cell.name)
                yield cell, cells[i + 1 :]
            return
        waiting, running = list(cells), {}
        with stop_requests() as asked, _all_ended(running):
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    cell = waiting.pop(0)
                    running[cell.name] = cell, _start(cell, self.out / cell.name)
                wait([process.sentinel for _, process in running.values()], timeout=0.5)
                if signal := asked():
                    raise Interrupted(f"stopped with {len(waiting) + len(running)} cells left", signal)
                for cell in self._ended_cells(running):
                    yield cell, waiting + [cell for cell, _ in running.values()]

    def _ended_cells(self, running: dict) -> list[Cell]:
        over = [cell for cell, process in running.values() if process.exitcode is not None]
        for cell in over:
            _, process = running.pop(cell.name)
            if process.exitcode:
                log = _log(self.out / cell.name)
                written = log.read_text(encoding="utf-8", errors="replace")
                said = (written.strip().splitlines() or ["nothing"])[-1]
                message = f"cell {cell.name} ended with status {process.exitcode}: {said}"
                raise ValueError(message) if process.exitcode == 2 else RunError(message)
        return over

    def _check_time(self, left: list[Cell]) -> None:
        # What the cells that are done took is what the others will take.
        lines, hours = self.grid.lines(), self.grid.study.hours
        rows = self.ledger.rows(self.grid.name)
        rows = [row for row in rows if (row["method"], row["updates"]) in lines]
        mean = sum(row["seconds"] for row in rows) / len(rows)
        needed = mean * max(len(left), self.grid.study.size() - len(rows)) / self.jobs
        spent = time.perf_counter() - self.started
        if len(rows) >= 2 * self.jobs and spent + needed > 3600 * hours:
            need = f"{(spent + needed) / 3600:.3g} by the first {len(rows)} cells"
            allowed = "more hours, fewer cells or steps; what is done is kept"
            raise ValueError(f"hours: got {hours:g}, the grid needs {need}; allowed {allowed}")


def _start(cell: Cell, out: Path) -> multiprocessing.Process:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a process first imports torch
    process = multiprocessing.get_context("spawn").Process(target=_in_process, args=(cell, out))
    process.start()
    return process


def _log(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def _in_process(cell: Cell, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with _log(out).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        run_cell(cell, out)
    except Interrupted as asked:
        sys.exit(128 + asked.signal)
    except (ValueError, OSError, RunError) as error:
        tell(error)
        sys.exit(2)


@contextlib.contextmanager
def _all_ended(running: dict) -> Iterator[None]:
    """Afterwards no process is left; each was asked to save first."""
    try:
        yield
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


# ---------------------------------------------------------------------------------------- rehearsal


def rehearsed(study: Study) -> Study:
    """The study in a minute or so: every method and number of updates, few of everything else."""
    small = {"steps": 1, "num_prompts": 2, "num_generations": 2}
    small |= {"evaluate.n": 4, "evaluate.every": 0}
    how = {"settings": study.settings | small, "rates": study.rates[:1], "seeds": 2, "hours": 1.0}
    return dataclasses.replace(study, **how, steps_of={})
