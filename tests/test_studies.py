"""A study's grid, its ledger, and the runner: every cell once, the same numbers whatever was interrupted."""

import csv
import dataclasses
import functools
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import tiny
from minidrl.run import config, report, trainer
from minidrl.run.launch import Interrupted, RunError
from minidrl.tasks.countdown import Countdown
from minidrl.tasks.text import encode_prompts
from research import controls, studies
from research import ledger as ledgers

LEDGER = Path("research/results/ledger.csv")
FEW = {"steps": 2, "num_prompts": 2, "num_generations": 2, "evaluate.n": 4, "evaluate.every": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("studies") / "base")


@pytest.fixture
def folder(base, tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.to_dict(tiny.settings(base))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "write_curve", lambda out: None)  # tested elsewhere, and slow
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    return tmp_path


def study(folder: Path, **changes) -> studies.Study:
    data = {"config": "run.yaml", "settings": FEW, "methods": ["reinforce", "drpo"], "rates": [1e-4, "3e-4"], "seeds": 2}
    return studies.study_of(folder / "study.yaml", data | {"choose": {"n": 4}} | changes, {})


def ran(folder: Path, name: str = "all", jobs: int = 1, **changes) -> tuple[studies.Grid, ledgers.Ledger]:
    grid, ledger = studies.Grid("trial", study(folder, **changes)), ledgers.Ledger(folder / name / "ledger.csv")
    studies.run(grid, folder / name, ledger, jobs)
    return grid, ledger


def numbers(path: Path) -> list[dict]:
    """The lines without what a clock said."""
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in csv.DictReader(file)]


# ------------------------------------------------------------------------------------------------------------ the grid


def test_the_choice_shares_no_seed_and_no_puzzle_with_the_report(folder):
    grid = studies.Grid("trial", study(folder, choose={"seeds": 2, "n": 3}, updates=[1, 8]))
    choices, reports = grid.choices(), grid.reports(dict.fromkeys(grid.lines(), 3e-4))
    assert len(choices) == 2 * 2 * 2 * 2 and len(reports) == 2 * 2 * 2
    assert not {cell.settings.seed for cell in choices} & {cell.settings.seed for cell in reports}
    held_out = choices[0].settings.task.held_out(7)
    judged = [held_out[s.skip : s.skip + s.n] for s in (cells[0].settings.evaluate for cells in (choices, reports))]
    assert len(judged[0]) == 3 and len(judged[1]) == 4 and not {p.key for p in judged[0]} & {p.key for p in judged[1]}
    assert [cell.name for cell in reports][:3] == ["reinforce-3e-4-1-0", "drpo-3e-4-1-0", "reinforce-3e-4-8-0"]
    assert len({cell.key for cell in choices + reports}) == len(choices + reports)


def test_skipped_puzzles_are_not_judged(folder, base):
    settings = tiny.settings(base)
    model, tok = tiny.network(), tiny.tokenizer()
    held_out, met = settings.task.held_out(6), []

    class Watched(Countdown):
        def judge(self, problem, text):
            met.append(problem)
            return super().judge(problem, text)

    task = Watched(**vars(settings.task))
    assert trainer.evaluate(model, tok, task, settings.sampler, n=4, skip=2)["n"] == 4
    assert met == held_out[2:] and encode_prompts(tok, met, task.prompt_length, "cpu")[0].shape[0] == 4


def line(rate: float, after: float | None, method: str = "drpo", updates: int = 1, stage: str = "choose") -> dict:
    return {"stage": stage, "method": method, "updates": updates, "rate": rate, "after": after, "status": "finished"}


def test_the_best_rate_is_chosen_by_its_mean_and_a_failed_cell_counts_as_nothing_solved(folder):
    asked = study(folder, methods=["drpo"], updates=[1, 8], rates=[1e-4, 3e-4, 1e-3], choose={"seeds": 2})
    rows = [line(1e-4, 0.25), line(1e-4, 0.25), line(3e-4, 0.5), line(3e-4, None), line(1e-3, 0.2), line(1e-3, 0.2)]
    other = [line(1e-4, 0.9, stage="report"), line(1e-3, 0.9, method="ppo"), line(1e-3, 0.9, updates=8), line(1e-2, 0.9)]
    assert studies.chosen(asked, rows + other) == {("drpo", 1): 1e-4}, "of equal ones the lowest; 8 updates: unfinished"
    assert studies.chosen(asked, rows[1:] + other) == {}
    alone = study(folder, rates=[2e-4])
    assert studies.chosen(alone, []) == dict.fromkeys(alone.lines(), 2e-4)


def test_a_rate_that_is_given_is_not_chosen_and_seeds_begin_where_they_are_told(folder):
    asked = study(folder, rate_of={"drpo": "2e-3"}, first_seed=5)
    grid = studies.Grid("trial", asked)
    assert [cell.name for cell in grid.choices()] == ["reinforce-1e-4-1-1000", "reinforce-3e-4-1-1000"]
    assert studies.chosen(asked, []) == {("drpo", 1): 2e-3}, "that of reinforce waits for its choice"
    reports = grid.reports({("drpo", 1): 2e-3, ("reinforce", 1): 1e-4})
    lines = "reinforce-1e-4", "drpo-2e-3"
    assert [cell.name for cell in reports] == [f"{line}-1-{seed}" for seed in (5, 6) for line in lines]
    assert asked.size() == len(grid.choices()) + len(reports) == 2 + 4


def test_all_rates_given_need_no_others_and_picking_and_rates_by_hand_go_before(folder):
    given = {"config": "run.yaml", "methods": ["reinforce", "drpo"], "rate_of": {"reinforce": 1e-3, "drpo": "2e-3"}}
    asked = studies.study_of(folder / "study.yaml", given, {})
    assert not asked.rates and studies.chosen(asked, []) == {("reinforce", 1): 1e-3, ("drpo", 1): 2e-3}
    picked = studies.study_of(folder / "study.yaml", given, {}, ["drpo"])
    assert picked.rate_of == {"drpo": 2e-3}
    by_hand = studies.study_of(folder / "study.yaml", given, {"rates": "[5e-4]"})
    assert by_hand.rates == [5e-4] and studies.chosen(by_hand, []) == dict.fromkeys(by_hand.lines(), 5e-4)


def test_a_cell_that_stops_for_another_reason_is_no_result(folder, monkeypatch):
    def out_of_memory(*how):
        raise RunError("out of memory")

    monkeypatch.setattr(trainer, "train", out_of_memory)
    with pytest.raises(RunError, match="out of memory"):
        ran(folder)
    assert not (folder / "all/ledger.csv").exists()


def test_labels_differ_in_what_they_say(folder):
    methods = {"a": {"method": "drpo", "method_options.objective.delta": 0.3}, "drpo": None, "self-training": {}}
    grid = studies.Grid("trial", study(folder, methods=methods))
    a, plain, imitation = grid.reports(dict.fromkeys(grid.lines(), 1e-4))[:3]
    assert a.settings.method_options == {"objective.delta": 0.3} and a.label == "a" and a.settings.method == "drpo"
    assert plain.settings.method_options == {} and not plain.imitates and a.key != plain.key
    assert imitation.imitates and imitation.settings.method == "reinforce" and imitation.settings.method_options == {}


def test_a_setting_that_a_later_version_adds_leaves_the_ledger_valid(folder):
    """At its default it changes no number, so no key; with any other value it does."""
    cell = studies.Grid("trial", study(folder)).choices()[0]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(type(cell.settings)):
        added: str = "off"

    later = {name: Later(**vars(cell.settings), added=name) for name in ("off", "on")}
    keys = {name: dataclasses.replace(cell, settings=settings).key for name, settings in later.items()}
    assert keys["off"] == cell.key != keys["on"]


@pytest.mark.parametrize("name", sorted({row["study"] for row in csv.DictReader(LEDGER.read_text().splitlines())}))
def test_the_shipped_ledger_can_be_gone_on_with(name):
    """A line of other settings than its study has now would be refused after a user's first command."""
    path, ledger = Path("research/studies") / f"{name}.yaml", ledgers.Ledger(LEDGER)
    grid = studies.Grid(name, studies.study_of(path, config.read(path), {}))
    assert studies._done(ledger, [*grid.choices(), *grid.cells(studies.REPORT, ledger)], grid.bed())


def test_equal_calls(folder):
    asked = study(folder, methods=["reinforce", "diffu-grpo"], equal="calls", settings=FEW | {"steps": 20, "evaluate.every": 5})
    grid = studies.Grid("trial", asked)
    reinforce, mean_field = grid.reports(dict.fromkeys(grid.lines(), 1e-4))[:2]
    assert reinforce.settings.steps == 20 and mean_field.settings.steps > 20
    assert mean_field.settings.evaluate.every == round(5 * mean_field.settings.steps / 20)
    spent = []
    for cell in (reinforce, mean_field):
        row = trainer.Learner(dataclasses.replace(cell.settings, seed=studies.FIRST_CHOICE)).step(0)
        forward = row["network_calls/rollout"] + row.get("network_calls/scoring", 0)
        spent.append(cell.settings.steps * (forward + 3 * row["network_calls/update"]))
    assert abs(spent[0] - spent[1]) <= 0.5 * spent[1] / mean_field.settings.steps + 1, "as near as whole steps come"


def test_steps_that_a_trial_once_found_are_kept_and_other_settings_ask_for_a_new_one(folder, monkeypatch):
    def no_trial(*_):
        raise AssertionError("a trial step")

    given = {"config": "run.yaml", "methods": ["reinforce", "drpo"], "rates": [1e-4], "equal": "calls"}
    given |= {"steps_of": {"reinforce": 20, "drpo": 31}}
    asked = functools.partial(studies.study_of, folder / "study.yaml", given)
    with monkeypatch.context() as patched:
        patched.setattr(trainer.Learner, "step", no_trial)
        grid = studies.Grid("trial", asked({"seeds": "3", "rates": "[5e-4]"}))
        assert {cell.label: cell.settings.steps for cell in grid.reports(dict.fromkeys(grid.lines(), 1e-4))} == given[
            "steps_of"
        ]
        assert studies.Grid("trial", asked({}, ["drpo"])).steps == {("drpo", 1): 31}
        for other in ({"num_prompts": 2}, {"settings.num_prompts": 2}, {}):
            more = None if other else ["reinforce", "ppo"]
            with pytest.raises(AssertionError, match="a trial step"):
                studies.Grid("trial", asked(other, more))
    assert studies.Grid("trial", asked({"equal": "updates"})).steps == {}
    assert not studies.rehearsed(asked({})).steps_of


AT_ONE_RATE = {"arcs", "nodes", "gdpo_clip_rate"}  # the question is what plan or clip change and nothing else
CHOSEN_BEFORE = {"likelihoods_again", "anchor_bfloat16", "steps_by_lot"}  # each at the rate that another study chose for it
STUDIES = sorted((Path(__file__).parents[1] / "studies").glob("*.yaml"))


QUICK = {"main_job", "arcs"}  # of few cells; the other rehearsals take up to half a minute


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in STUDIES]
)
def test_a_rehearsal_of_each_study_does_all_of_its_cells(path, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write_curve", lambda out: None)
    asked = studies.study_of(path, config.read(path), {})
    grid = studies.Grid(path.stem, studies.rehearsed(asked))
    ledger = ledgers.Ledger(tmp_path / "ledger.csv")
    studies.run(grid, tmp_path, ledger, jobs=1)
    rows = ledger.rows(path.stem)
    assert [row["cell"] for row in rows] == grid.planned(ledger) and len(rows) == 2 * len(grid.lines())
    assert {row["status"] for row in rows} == {"finished"}
    assert asked.seeds >= 5 and (len(asked.rates) > 1 or path.stem in AT_ONE_RATE | CHOSEN_BEFORE)


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_there_are_the_puzzles_that_a_study_judges_by(path):
    """Of the report, and others to choose the rates by: a rehearsal, judged on four, would not miss them."""
    grid = studies.Grid(path.stem, studies.study_of(path, config.read(path), {}))
    cell = (grid.choices() or grid.reports(dict.fromkeys(grid.lines(), 1e-4)))[0].settings
    wanted = cell.evaluate.skip + cell.evaluate.n
    assert sum(1 for _ in itertools.islice(cell.task.puzzles("held_out"), wanted)) == wanted


def test_a_rehearsal_is_of_two_groups_and_judged_before_and_after(folder):
    grid = studies.Grid("trial", studies.rehearsed(study(folder)))
    small = grid.reports(dict.fromkeys(grid.lines(), 1e-4))
    for settings in (cell.settings for cell in small):
        assert (settings.steps, settings.num_prompts, settings.num_generations) == (1, 2, 2)
        assert (settings.evaluate.n, settings.evaluate.every) == (4, 0)
    assert [cell.settings.seed for cell in small] == [0, 0, 1, 1]


# ----------------------------------------------------------------------------------------------------------- the runner


def test_every_cell_is_one_line_and_says_what_its_run_says(folder):
    grid, ledger = ran(folder)
    rows = ledger.rows("trial")
    assert [row["cell"] for row in rows] == grid.planned(ledger) and len(rows) == 4 + 4
    for row in rows:
        run = folder / "all" / row["cell"]
        summary, steps = report.read_summary(run), [r for r in report.read_metrics(run) if "solved" in r]
        assert (row["before"], row["after"]) == (summary["solved_before"], summary["solved_after"])
        assert row["calls_update"] == 3 * sum(r["network_calls/update"] for r in steps)
        parts = [row[f"calls_{phase}"] for phase in studies.PHASES]
        assert row["calls"] == sum(parts) and row["status"] == "finished" and row["steps"] == len(steps) == 2
        assert row["train_end"] == pytest.approx(steps[-1]["solved"])
        drawn = [c for c in numbers(ledger.curves) if c["cell"] == row["cell"]]
        assert [int(c["step"]) for c in drawn] == [0, 1, 2] and [int(c["updates"]) for c in drawn] == [0, 1, 2]
        assert float(drawn[-1]["grad_norm"]) == pytest.approx(steps[-1]["grad_norm"], rel=1e-5) and drawn[0]["grad_norm"] == ""
        assert int(drawn[-1]["calls"]) == row["calls"]


def test_what_the_ledger_holds_is_not_done_again(folder, monkeypatch):
    _, ledger = ran(folder)
    before = ledger.path.read_bytes(), ledger.curves.read_bytes()
    monkeypatch.setattr(studies, "run_cell", lambda *_: pytest.fail("this cell is in the ledger"))
    ran(folder)
    assert (ledger.path.read_bytes(), ledger.curves.read_bytes()) == before


def test_processes_give_the_numbers_of_one_and_an_interrupted_grid_those_of_a_whole_one(folder, monkeypatch):
    monkeypatch.undo()  # other processes have the true reward, which these responses never earn
    monkeypatch.chdir(folder)
    how = {"methods": ["reinforce"], "rates": [1e-3]}
    _, whole = ran(folder, "whole", **how)
    _, shared = ran(folder, "shared", jobs=2, **how)
    assert sorted(map(str, numbers(shared.path))) == sorted(map(str, numbers(whole.path)))
    step, calls = trainer.Learner.step, []

    def stopped(learner, number):
        calls.append(number)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(learner, number)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="reinforce-1e-3-1-1/checkpoint-1 is saved"):
        patch.setattr(trainer.Learner, "step", stopped)
        ran(folder, "parts", **how)
    _, parts = ran(folder, "parts", **how)
    assert numbers(parts.path) == numbers(whole.path) and numbers(parts.curves) == numbers(whole.curves)


def test_a_folder_with_the_run_of_another_cell_is_no_result(folder):
    grid, ledger = ran(folder, methods=["reinforce"], rates=[1e-4], seeds=1)
    (cell,) = grid.cells(studies.REPORT, ledger)
    studies.run_cell(cell, folder / "all" / cell.name)
    other = dataclasses.replace(cell, settings=dataclasses.replace(cell.settings, num_prompts=3))
    with pytest.raises(ValueError, match="^num_prompts: got 3; allowed 2, with which the run in"):
        studies.run_cell(other, folder / "all" / cell.name)


CALLS = [f"network_calls/{phase}" for phase in studies.PHASES]


@pytest.mark.parametrize(("seconds", "told"), [([1.26, 12.34], 12.3), ([], 0.0)])
def test_a_cell_took_what_the_clock_said_at_its_last_step(seconds, told, folder):
    grid = studies.Grid("trial", study(folder, methods=["reinforce"], rates=[1e-4], seeds=1))
    (cell,) = grid.reports(dict.fromkeys(grid.lines(), 1e-4))
    steps = [{"step": n, "seconds": s, "solved": 0.5} | dict.fromkeys(CALLS, 1) for n, s in enumerate(seconds)]
    metrics = [{"step": 0, "seconds": 0.01, "eval/solved": 0.5}, *steps, {"step": 2, "seconds": 99.0, "eval/solved": 0.5}]
    assert studies.ledger_line(cell, {"status": "failed: x"}, metrics, "bed")["seconds"] == told


class Process:
    """One that has not ended, until it is given a status."""

    def __init__(self):
        self.status, self.sentinel, self.asked = None, object(), 0

    @property
    def exitcode(self) -> int | None:
        self.asked += 1
        assert self.asked < 100, "asked again and again"
        return self.status

    def terminate(self) -> None:
        self.status = -signal.SIGTERM

    def join(self) -> None:
        assert self.status is not None


@pytest.mark.parametrize("log", ["first\nsecond\nthe reason\n", "the reason", ""])
@pytest.mark.parametrize(("status", "error"), [(2, ValueError), (1, RunError)])
def test_a_process_that_failed_is_named_with_the_last_line_it_wrote(status, error, log, folder, monkeypatch):
    """Until one ends nothing is computed: it is waited for, not asked again and again."""
    grid, waited = studies.Grid("trial", study(folder, rates=[1e-4])), []
    cells = grid.reports(dict.fromkeys(grid.lines(), 1e-4))[:3]
    made = {cell.name: Process() for cell in cells}

    def waiting(sentinels, timeout):
        waited.append((sentinels, timeout))
        made[cells[1].name].status = status

    monkeypatch.setattr(studies, "_start", lambda cell, out: made[cell.name])
    monkeypatch.setattr(studies, "wait", waiting)
    (folder / f"{cells[1].name}.log").write_text(log)
    work = studies._Work(grid, folder, None, jobs=2)
    with pytest.raises(error, match=f"cell {cells[1].name} ended with status {status}: {'the reason' if log else 'nothing'}$"):
        list(work._finished(cells))
    assert waited == [([made[cell.name].sentinel for cell in cells[:2]], 0.5)]
    assert made[cells[0].name].status == -signal.SIGTERM, "no process is left"


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("4", "4")])
def test_processes_of_a_study_have_one_thread_each_unless_the_user_says_otherwise(given, found, monkeypatch):
    started, threads = [], "OMP_NUM_THREADS"
    monkeypatch.setenv(threads, given or "")
    if given is None:
        monkeypatch.delenv(threads)

    class Spawned:
        def __init__(self, target, args):
            self.what = target, args

        def start(self) -> None:
            started.append((self.what, os.environ.get(threads)))

    monkeypatch.setattr(studies.multiprocessing, "get_context", lambda kind: SimpleNamespace(Process=Spawned))
    studies._start("cell", "out")
    assert started == [((studies._in_process, ("cell", "out")), found)]


def test_a_cell_whose_numbers_are_not_finite_is_a_result(folder, monkeypatch):
    step = trainer.Learner.step

    def failing(learner, number):
        if learner.settings.optimizer.learning_rate == 3e-4 and number == 1:
            raise RunError("gradient norm is nan")
        return step(learner, number)

    monkeypatch.setattr(trainer.Learner, "step", failing)
    _, ledger = ran(folder, methods=["reinforce"])
    rows = {row["cell"]: row for row in ledger.rows("trial")}
    failed = rows["reinforce-3e-4-1-1000"]
    assert failed["status"] == "failed: step 1: gradient norm is nan" and failed["after"] is None and failed["before"] == 0.0
    assert {name for name, row in rows.items() if row["stage"] == "report"} == {f"reinforce-1e-4-1-{seed}" for seed in (0, 1)}


# --------------------------------------------------------------------------------------------------------- self-training


def test_self_training_imitates_what_its_frozen_base_solved(base):
    settings = tiny.settings(base, steps=1, num_iterations=2)
    learner = controls.SelfTraining(settings)
    before, seen = tiny.weights(learner.base.model), []
    collect, update = learner.base.collect, learner.update

    def half_solved(step, clock):
        made = collect(step, clock)
        return dataclasses.replace(made, solved=torch.arange(len(made.solved)) % 2 == 0)

    def watched(experience, plan, adv, anchor, clock):
        seen.append((plan, adv))
        return update(experience, plan, adv, anchor, clock)

    asked, noise = [], learner.generator
    learner.generator = lambda *key: asked.append(key) or noise(*key)
    learner.base.collect, learner.update = half_solved, watched
    row = learner.step(0)
    assert asked == [(0, "plan 0"), (0, "plan 1")], "the noise of the run's own updates"
    assert row["solved"] == 0.5 and len(seen) == 2 and row["network_calls/update"] > 0
    for _, adv in seen:
        assert set(adv.tolist()) == {0.0, 2.0} and adv.mean() == 1.0, "the mean over the solved ones"
    after = learner.base.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert any(not torch.equal(learner.model.state_dict()[name], value) for name, value in before.items())


def test_self_training_has_the_steps_of_the_run(base, monkeypatch):
    seen = []
    monkeypatch.setattr(controls.SelfTraining, "step", lambda self, step: seen.append((self, step)))
    learner = controls.self_training(tiny.settings(base, steps=3))
    assert seen == [(learner, 0), (learner, 1), (learner, 2)]


def test_self_training_without_a_solved_answer_changes_nothing(base):
    learner = controls.SelfTraining(tiny.settings(base, steps=1))
    before, collect = tiny.weights(learner.model), learner.base.collect
    learner.base.collect = lambda *how: dataclasses.replace(made := collect(*how), solved=torch.zeros_like(made.solved))
    assert learner.step(0)["grad_norm"] == 0.0
    assert all(torch.equal(learner.model.state_dict()[name], value) for name, value in before.items())


# -------------------------------------------------------------------------------------------------------------- refusals


def test_a_ledger_of_another_bed(folder):
    _, ledger = ran(folder, methods=["reinforce"], rates=[1e-4])
    tiny.checkpoint(folder / "other")
    weights = (folder / "other/model.safetensors").read_bytes()
    (folder / "other/model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\0")
    before = ledger.path.read_bytes()
    with pytest.raises(
        ValueError, match=r"ledger: got .*ledger.csv with cell reinforce-1e-4-1-0 of bed \w{8}; allowed bed \w{8}"
    ):
        ran(folder, methods=["reinforce"], rates=[1e-4], settings=FEW | {"model": str(folder / "other")})
    assert ledger.path.read_bytes() == before


def test_two_cells_of_one_name_with_other_settings(folder):
    _, ledger = ran(folder, methods=["reinforce"], rates=[1e-4])
    before = ledger.path.read_bytes()
    with pytest.raises(ValueError, match="cell: got reinforce-1e-4-1-0 with other settings than in"):
        ran(folder, methods=["reinforce"], rates=[1e-4], settings=FEW | {"num_prompts": 1})
    assert ledger.path.read_bytes() == before


def test_a_grid_that_cannot_finish_in_time(folder):
    above_0 = r"(0\.0*[1-9]\d*|[1-9][\d.]*e-\d+)"  # which of the two, the machine's speed decides
    with pytest.raises(ValueError, match=rf"hours: got 1e-05, the grid needs {above_0} by the first 2 cells; allowed more"):
        ran(folder, hours=1e-5)
    assert len(ledgers.Ledger(folder / "all/ledger.csv").rows("trial")) == 2, "what is done is kept"


@pytest.mark.parametrize("name", ["drpo-3e-4-1-1", "reinforce-1e-4-1-1000", ""])
def test_a_file_in_the_place_of_a_cells_folder_is_known_before_the_first_cell(name, folder, monkeypatch):
    """Also where the cell is one of the report, whose rate is not chosen yet; what is named like none is a user's."""
    monkeypatch.setattr(studies, "run_cell", lambda *_: pytest.fail("a cell was run"))
    if name:
        (folder / "all").mkdir()
        (folder / "all/notes-1e-4-1-0").write_text("mine")
    (folder / "all" / name).write_text("mine")
    with pytest.raises(ValueError, match=f"out: got '{(folder / 'all' / name)}', which is a file; allowed a folder$"):
        ran(folder)


def test_what_a_process_left_between_the_two_files_is_replaced(folder):
    _, ledger = ran(folder, methods=["reinforce"], rates=[1e-4])
    whole, curves = ledger.path.read_bytes(), numbers(ledger.curves)
    last = whole.rstrip(b"\n").rpartition(b"\n")[0] + b"\n"
    ledger.path.write_bytes(last)  # the curves of the last cell are there already
    ran(folder, methods=["reinforce"], rates=[1e-4])
    assert numbers(ledger.curves) == curves and ledger.path.read_bytes() == whole


def test_two_writers(folder):
    ledger = ledgers.Ledger(folder / "all/ledger.csv")
    with ledger.opened(), pytest.raises(ValueError, match="to which another process is writing"):
        ran(folder)


def test_a_file_that_is_no_ledger(folder):
    (folder / "all").mkdir()
    (folder / "all/ledger.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"ledger.csv line 1: got no column study, cell, .*; required are study, "):
        ran(folder)
    assert (folder / "all/ledger.csv").read_text() == "a,b\n1,2\n"


BAD = {
    "rates: got [0.0001, 0.0001]; allowed different numbers, each above 0": {"rates": [1e-4, 1e-4]},
    "rates: got ['much']; allowed different numbers, each above 0": {"rates": ["much"]},
    "rates: got []; allowed": {"rates": []},
    "updates: got [0]; allowed different numbers, each whole, from 1": {"updates": [0]},
    "seeds: got 0; allowed from 1": {"seeds": 0},
    "equal: got 'time'; allowed updates, calls": {"equal": "time"},
    "methods: got 'drpo': 3; allowed a name of letters, digits and .+-_ with a mapping of settings": {"methods": {"drpo": 3}},
    "method: got 'pppo'; allowed reinforce": {"methods": ["pppo"]},
    "speed: unknown key": {"speed": 3},
    "choose.seeds: got 0; allowed from 1": {"choose": {"seeds": 0}},
    "rate_of: got 'ppo'; allowed reinforce, drpo": {"rate_of": {"ppo": 1e-3}},
    "rate_of: got [1]; allowed a section": {"rate_of": [1]},
    "rate_of.drpo: got ['much']; allowed different numbers, each above 0": {"rate_of": {"drpo": "much"}},
    "rates: got []; allowed different numbers, each above 0": {"rates": [], "rate_of": {"drpo": 1e-3}},
    "steps_of: got 'ppo'; allowed reinforce, drpo": {"steps_of": {"ppo": 3}, "equal": "calls"},
    "steps_of: got [1]; allowed a section": {"steps_of": [1], "equal": "calls"},
    "steps_of.drpo: got [0]; allowed different numbers, each whole, from 1": {"steps_of": {"drpo": 0}, "equal": "calls"},
    "steps_of: got steps with equal updates, updates [1]; allowed with equal calls": {"steps_of": {"drpo": 3}},
    "methods: got 'near' and 'drpo', which have the same settings; allowed methods that differ": {
        "methods": {"near": {"method": "drpo"}, "drpo": {}}
    },
    "first_seed: got -1; allowed from 0": {"first_seed": -1},
    "first_seed: got seeds up to 1001; allowed below 1000, where those of the choice begin": {"first_seed": 1000},
}


@pytest.mark.parametrize("message", BAD)
def test_refused(folder, message):
    with pytest.raises(ValueError) as error:
        studies.Grid("trial", study(folder, **BAD[message]))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_run_is_no_study(folder):
    with pytest.raises(ValueError, match="methods: run.yaml names none; allowed the file of a study, or --methods"):
        studies.study_of(Path("run.yaml"), config.read(Path("run.yaml")), {})


def test_overrides_are_the_studys_own_keys_or_settings(folder):
    data = {"config": "run.yaml", "methods": {"drpo": None, "near": {"method": "drpo"}}, "rates": [1e-4]}
    given = {"rates": "[1e-3, 2e-3]", "choose.n": "7", "steps": "5", "settings.evaluate.n": "3"}
    found = studies.study_of(folder / "study.yaml", data, given)
    assert found.rates == [1e-3, 2e-3] and found.choose.n == 7 and found.settings == {"steps": 5, "evaluate.n": 3}
    picked = studies.study_of(folder / "study.yaml", data, {}, ["near", "ppo"])
    assert picked.methods == {"near": {"method": "drpo"}, "ppo": {}}


def test_an_option_of_one_method_is_not_left_to_the_next(folder):
    """Also where the study gives all of them one section to begin with."""
    methods = {"a": {"method_options.plan.num_states": 3}, "b": {"method_options.plan.min_entropy": 0.5}}
    methods = {label: {"method": "replay-uniform"} | given for label, given in methods.items()}
    grid = studies.Grid("trial", study(folder, methods=methods, settings=FEW | {"method_options": {}}))
    found = {cell.label: cell.settings.method_options for cell in grid.choices()}
    assert found == {"a": {"plan.num_states": 3}, "b": {"plan.min_entropy": 0.5}}


def test_options_of_a_cell_are_in_the_ledger(folder):
    _, ledger = ran(folder, methods={"near": {"method": "drpo", "method_options.objective.delta": 0.3}}, rates=[1e-4])
    assert ledger.rows("trial")[0]["options"] == {"method": "drpo", "objective.delta": 0.3}
