"""research/: a study's grid, its ledger, and the runner: every cell once, the same numbers whatever was interrupted."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml

import tiny
from minidrl.run import config, folders
from minidrl.run.launch import RunError
from minidrl.tasks import Verdict
from minidrl.tasks.countdown import Countdown, Puzzle
from research import controls, grid, ledger, tables
from research.__main__ import main
from research.benches import answers

ROOT = Path(__file__).parents[1]
RESULTS, STUDIES = ROOT / "research/results", sorted((ROOT / "research/studies").glob("*.yaml"))
FEW = {"steps": 2, "num_prompts": 2, "num_generations": 2, "evaluate.n": 4, "evaluate.every": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("studies") / "base")


@pytest.fixture
def folder(base, tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.to_dict(tiny.settings(base))))
    monkeypatch.setattr("minidrl.run.report.write_curve", lambda out: None)  # tested elsewhere, and slow
    monkeypatch.setattr(Countdown, "judge", tiny.varied_judge)
    return tmp_path


def study(folder: Path, **changes) -> grid.Study:
    data = {"config": "run.yaml", "settings": FEW, "methods": ["reinforce", "drpo"], "rates": [1e-4, "3e-4"], "seeds": 2}
    (folder / "study.yaml").write_text(yaml.safe_dump(data | {"choose": {"n": 4}} | changes))
    return grid.study_of(folder / "study.yaml")


def ran(folder: Path, name: str = "all", jobs: int = 1, **changes) -> ledger.Ledger:
    kept = ledger.Ledger(folder / name / "ledger.csv")
    grid.run(grid.Grid("trial", study(folder, **changes)), folder / name, kept, jobs)
    return kept


def untimed(path: Path) -> list[dict]:
    """The lines without what a clock said."""
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in csv.DictReader(file)]


# ------------------------------------------------------------------------------------------------------------ the grid


def test_the_choice_shares_no_seed_and_no_puzzle_with_the_report(folder):
    made = grid.Grid("trial", study(folder, choose={"seeds": 2, "n": 3}, updates=[1, 8]))
    choices, reports = made.choices(), made.reports(dict.fromkeys(made.study.lines(), 3e-4))
    assert len(choices) == 2 * 2 * 2 * 2 and len(reports) == 2 * 2 * 2
    assert not {cell.settings.seed for cell in choices} & {cell.settings.seed for cell in reports}
    held_out = choices[0].settings.task.held_out(7)
    judged = [held_out[s.skip : s.skip + s.n] for s in (cells[0].settings.evaluate for cells in (choices, reports))]
    assert len(judged[0]) == 3 and len(judged[1]) == 4 and not {p.key for p in judged[0]} & {p.key for p in judged[1]}
    assert [cell.name for cell in reports][:3] == ["reinforce-3e-4-1-0", "drpo-3e-4-1-0", "reinforce-3e-4-8-0"]
    assert len({cell.key for cell in choices + reports}) == len(choices + reports)


def test_the_best_rate_is_chosen_by_its_mean_and_a_failed_cell_counts_as_nothing_solved(folder):
    def line(rate: float, after: float | None, method: str = "drpo", updates: int = 1, stage: str = "choose") -> dict:
        told = {"rate": rate, "after": after, "status": "finished"}
        return told | {"method": method, "updates": updates, "stage": stage}

    asked = study(folder, methods=["drpo"], updates=[1, 8], rates=[1e-4, 3e-4, 1e-3], choose={"seeds": 2})
    rows = [line(1e-4, 0.25), line(1e-4, 0.25), line(3e-4, 0.5), line(3e-4, None), line(1e-3, 0.2), line(1e-3, 0.2)]
    other = [line(1e-4, 0.9, stage="report"), line(1e-3, 0.9, method="ppo"), line(1e-3, 0.9, updates=8), line(1e-2, 0.9)]
    assert grid.chosen(asked, rows + other) == {("drpo", 1): 1e-4}, "of equal ones the lowest; 8 updates: unfinished"
    assert grid.chosen(asked, rows[1:] + other) == {}


def test_a_rate_that_is_given_is_not_chosen_and_seeds_begin_where_they_are_told(folder):
    made = grid.Grid("trial", study(folder, rate_of={"drpo": "2e-3"}, first_seed=5))
    assert [cell.name for cell in made.choices()] == ["reinforce-1e-4-1-1000", "reinforce-3e-4-1-1000"]
    assert grid.chosen(made.study, []) == {("drpo", 1): 2e-3}, "that of reinforce waits for its choice"
    names = [cell.name for cell in made.reports({("drpo", 1): 2e-3, ("reinforce", 1): 1e-4})]
    assert names == [f"{line}-1-{seed}" for seed in (5, 6) for line in ("reinforce-1e-4", "drpo-2e-3")]


def test_labels_differ_in_what_they_say_and_options_are_not_left_to_the_next(folder):
    methods = {"a": {"method": "drpo", "method_options.objective.delta": 0.3}, "drpo": None, "self-training": {}}
    made = grid.Grid("trial", study(folder, methods=methods))
    a, plain, imitation = made.reports(dict.fromkeys(made.study.lines(), 1e-4))[:3]
    assert (a.label, a.settings.method, a.settings.method_options) == ("a", "drpo", {"objective.delta": 0.3})
    assert plain.settings.method_options == {} and not plain.imitates and a.key != plain.key
    assert imitation.imitates and (imitation.settings.method, imitation.settings.method_options) == ("reinforce", {})
    assert ran(folder, methods=methods, rates=[1e-4]).rows("trial")[0]["options"] == {"method": "drpo", "objective.delta": 0.3}


def test_equal_calls(folder):
    made = grid.Grid(
        "trial", study(folder, methods=["reinforce", "diffu-grpo-paper"], equal="calls", settings=FEW | {"steps": 20})
    )
    first, second = made.reports(dict.fromkeys(made.study.lines(), 1e-4))[:2]
    assert first.settings.steps == 20 < second.settings.steps
    each = [next(controls.steps_of(dataclasses.replace(c.settings, seed=grid.FIRST_CHOICE))[1]) for c in (first, second)]
    spent = [c.settings.steps * sum(grid.calls_of(row).values()) for c, row in zip((first, second), each, strict=True)]
    assert abs(spent[0] - spent[1]) <= 0.5 * sum(grid.calls_of(each[1]).values()) + 1, "as near as whole steps come"
    told = grid.Grid("trial", study(folder, equal="calls", steps_of={"reinforce": 20, "drpo": 31}))
    assert [cell.settings.steps for cell in told.reports(dict.fromkeys(told.study.lines(), 1e-4))] == [20, 31, 20, 31]
    assert grid.study_of(folder / "study.yaml", settings={"num_prompts": 3}).steps_of == {}, "found with other settings"


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_a_shipped_study_has_its_puzzles_and_its_ledger_can_be_gone_on_with(path):
    made, kept = grid.Grid(path.stem, grid.study_of(path)), ledger.Ledger(RESULTS / "ledger.csv")
    rows = kept.rows(path.stem)
    cells = [*made.choices(), *made.reports(grid.chosen(made.study, rows))]
    assert rows and not grid.missing(cells, rows, made.bed, kept.path)
    wanted = cells[0].settings.evaluate.skip + cells[0].settings.evaluate.n
    assert sum(1 for _ in islice(cells[0].settings.task.puzzles("held_out"), wanted)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["main_job", "blocks_masks"])  # with a control; and labels with options of their own
def test_a_rehearsal_of_a_study_does_all_of_its_cells(name, tmp_path):
    path = ROOT / f"research/studies/{name}.yaml"
    main(["study", str(path), "--rehearse", "--jobs", "1", "--out", str(tmp_path)])
    rows = ledger.Ledger(tmp_path / "ledger.csv").rows(path.stem)
    assert len(rows) == 2 * len(grid.study_of(path).lines()) and {row["status"] for row in rows} == {"finished"}


# ----------------------------------------------------------------------------------------------------------- the runner


def test_every_cell_is_one_line_and_says_what_its_run_says(folder, monkeypatch):
    kept = ran(folder)
    rows, curves = kept.rows("trial"), untimed(kept.curves)
    assert len(rows) == 4 + 4 and len({row["cell"] for row in rows}) == 8
    for row in rows:
        run = folder / "all" / row["cell"]
        summary, steps = folders.read_summary(run), [r for r in folders.read_metrics(run) if "solved" in r]
        assert (row["before"], row["after"]) == (summary["solved_before"], summary["solved_after"])
        assert row["calls_update"] == 3 * sum(r["network_calls/update"] for r in steps)
        assert row["calls"] == sum(row[f"calls_{phase}"] for phase in ledger.PHASES)
        assert (row["status"], row["steps"], len(steps)) == ("finished", 2, 2)
        drawn = [c for c in curves if c["cell"] == row["cell"]]
        assert [int(c["step"]) for c in drawn] == [int(c["updates"]) for c in drawn] == [0, 1, 2]
        assert float(drawn[-1]["grad_norm"]) == pytest.approx(steps[-1]["grad_norm"], rel=1e-5) and not drawn[0]["grad_norm"]
        assert int(drawn[-1]["calls"]) == row["calls"]
    before = kept.path.read_bytes(), kept.curves.read_bytes()
    monkeypatch.setattr(grid, "run_cell", lambda *_: pytest.fail("this cell is in the ledger"))
    ran(folder)
    assert (kept.path.read_bytes(), kept.curves.read_bytes()) == before


def test_an_interrupted_grid_has_the_numbers_of_a_whole_one(folder, monkeypatch):
    whole, run_cell, made = ran(folder, "whole"), grid.run_cell, []

    def stopped(*how):
        made.append(how)
        run_cell(*how)
        if len(made) == 3:  # its folder is complete, and no line says so yet
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(grid, "run_cell", stopped)
        ran(folder, "parts")
    parts = ran(folder, "parts")
    assert untimed(parts.path) == untimed(whole.path) and untimed(parts.curves) == untimed(whole.curves)
    lines = parts.path.read_text().splitlines(keepends=True)
    parts.path.write_text("".join(lines[:-1]))  # ended between the two files: the curve of the last cell is there
    ran(folder, "parts")
    assert untimed(parts.path) == untimed(whole.path) and untimed(parts.curves) == untimed(whole.curves)


@pytest.mark.slow
def test_processes_give_the_numbers_of_one_and_are_resumed_after_a_signal(base, tmp_path):
    """Without a patch of the reward: what an untrained network writes is solved or not alike in all processes."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.to_dict(tiny.settings(base))))
    steps, how = FEW | {"steps": 30, "evaluate.every": 0}, {"methods": ["reinforce"], "rates": [1e-3]}
    whole = ran(tmp_path, "whole", settings=steps, **how)
    words = [sys.executable, "-m", "research", "study", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "trial")]
    words += ["--ledger", str(tmp_path / "trial/ledger.csv")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=ROOT, env=environment)
    while not any(path.stat().st_size > 1000 for path in tmp_path.glob("trial/*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert list(tmp_path.glob("trial/*/checkpoint-*")) and not (tmp_path / "trial/ledger.csv").exists()
    assert subprocess.run(words, cwd=ROOT, env=environment).returncode == 0
    cells = [sorted(untimed(path), key=lambda row: row["cell"]) for path in (tmp_path / "trial/ledger.csv", whole.path)]
    assert [[row | {"study": ""} for row in rows] for rows in cells][0] == [row | {"study": ""} for row in cells[1]]


def test_a_cell_whose_numbers_are_not_finite_is_a_result_and_one_without_memory_is_none(folder, monkeypatch):
    def failing(settings, out, resume):
        if settings.optimizer.learning_rate == 3e-4:
            out.mkdir(parents=True)
            (out / "metrics.jsonl").write_text(json.dumps({"step": 0, "seconds": 0.1, "eval/solved": 0.25}) + "\n")
            raise RunError("step 1: gradient norm is nan; stopped, there is no checkpoint")
        return train(settings, out, resume)

    train = grid.train.train
    monkeypatch.setattr(grid.train, "train", failing)
    rows = {row["cell"]: row for row in ran(folder, methods=["reinforce"]).rows("trial")}
    failed = rows["reinforce-3e-4-1-1000"]
    assert (failed["status"], failed["before"], failed["after"]) == ("failed: step 1: gradient norm is nan", 0.25, None)
    assert {name for name, row in rows.items() if row["stage"] == "report"} == {f"reinforce-1e-4-1-{seed}" for seed in (0, 1)}

    def out_of_memory(*_):
        raise RunError("out of memory")

    monkeypatch.setattr(grid.train, "train", out_of_memory)
    with pytest.raises(RunError, match="out of memory"):
        ran(folder, "other")
    assert not (folder / "other/ledger.csv").exists()


# --------------------------------------------------------------------------------------------------------- self-training


def test_self_training_imitates_what_its_frozen_base_solved(base, monkeypatch, tmp_path):
    settings = tiny.settings(base, steps=1, num_iterations=2, evaluate=config.Evaluation(n=2))
    monkeypatch.setattr(Countdown, "judge", lambda task, puzzle, text: verdict_of(sum(map(ord, text)) % 2 == 0))
    start = controls.steps_of(settings)[0].model
    trained, _ = controls.imitation(settings, tmp_path / "some")
    rows = folders.read_metrics(tmp_path / "some")
    assert [("eval/solved" in row, row["step"]) for row in rows] == [(True, 0), (False, 1), (True, 1)]
    assert 0 < rows[1]["solved"] < 1 and rows[1]["network_calls/update"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), trained.parameters(), strict=True))
    monkeypatch.setattr(Countdown, "judge", lambda *_: verdict_of(False))
    same, _ = controls.imitation(settings, tmp_path / "none")
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), same.parameters(), strict=True)), "nothing to imitate"


def verdict_of(solved: bool) -> Verdict:
    return Verdict(float(solved), solved, {"well_formed": True})


# ------------------------------------------------------------------------------------------------------ ledger and tables


def test_a_line_is_added_without_touching_the_others_and_old_names_are_read_as_the_present_ones(tmp_path):
    kept, shipped = ledger.Ledger(tmp_path / "ledger.csv"), RESULTS / "ledger.csv"
    kept.path.write_bytes(shipped.read_bytes())
    kept.curves.write_bytes((RESULTS / "curves.csv").read_bytes())
    row = [row for row in kept.rows("likelihoods") if row["method"] == "gdpo-sequence"][-1]
    assert row["cell"].startswith("gdpo-sequence-") and row["options"]["method"] == "gdpo-sequence"
    assert {row["method"] for row in kept.rows("likelihoods_reuse")} >= {"gdpo", "gdpo-sequence", "stabledrl"}
    courses = ledger.read_courses(kept.curves, "likelihoods")
    blank = [{k: "" if v is None else v for k, v in line.items()} for line in ledger.records(courses[row["cell"]])]
    kept.add({k: "" if v is None else v for k, v in row.items()}, blank)
    for path, original in ((kept.path, shipped), (kept.curves, RESULTS / "curves.csv")):
        assert sorted(path.read_bytes().splitlines()) == sorted(original.read_bytes().splitlines())


def test_pairs_and_boards_are_plain_arithmetic(tmp_path):
    frame = ledger.read_ledger(RESULTS / "ledger.csv")
    found = {group.method: group for group in ledger.groups(frame, "main_job")}
    compared = tables.pairs(list(found.values()))
    gaps = [found["reinforce"].ended[s]["after"] - found["self-training"].ended[s]["after"] for s in range(8)]
    assert compared["A - B"].item().startswith(f"{100 * sum(gaps) / 8:+.1f} [") and compared["seeds"].item() == 8
    board = tables.leaderboard(RESULTS / "ledger.csv", RESULTS / "curves.csv", 0.395, {"main_job": "low-confidence"})
    assert board["method"].tolist() == ["reinforce", "self-training (control)"]
    spent = float(board["calls to 39.5"][0].replace(",", ""))
    courses = ledger.read_courses(RESULTS / "curves.csv", "main_job")
    held = ledger.course(courses, found["reinforce"].cells, "held_out")
    calls = ledger.course(courses, found["reinforce"].cells, "calls")
    above = next(step for step in held if sum(held[step]) / 8 >= 0.395)
    assert sum(calls[above - 20]) / 8 < spent <= sum(calls[above]) / 8 and board["calls to 39.5"][1] == ""
    assert "## main_job" in tables.study_report(RESULTS / "ledger.csv", RESULTS / "curves.csv", "main_job")
    (figure,) = tables.write_figures(RESULTS / "ledger.csv", RESULTS / "curves.csv", "main_job", tmp_path)
    assert figure.read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------------------------------------------------- refusals


def test_cells_of_another_base_or_with_other_settings_are_refused_twice_and_run_never(folder, monkeypatch):
    kept = ran(folder, methods=["reinforce"], rates=[1e-4])
    before = kept.path.read_bytes()
    monkeypatch.setattr(grid, "run_cell", lambda *_: pytest.fail("a cell was run"))
    tiny.checkpoint(folder / "other")
    weights = (folder / "other/model.safetensors").read_bytes()
    (folder / "other/model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\0")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"ledger: got '.*with reinforce-1e-4-1-0 of bed \w{8}'; allowed bed \w{8}"):
            ran(folder, methods=["reinforce"], rates=[1e-4], settings=FEW | {"model": str(folder / "other")})
        with pytest.raises(ValueError, match="cell: got 'reinforce-1e-4-1-0 with other settings than in"):
            ran(folder, methods=["reinforce"], rates=[1e-4], settings=FEW | {"num_prompts": 1})
    assert kept.path.read_bytes() == before


def test_two_writers(folder):
    with ledger.Ledger(folder / "all/ledger.csv").opened(), pytest.raises(ValueError, match="written by another process"):
        ran(folder)


BAD = {
    "rates: got 'much'; allowed numbers above 0": {"rates": ["much"]},
    "rates: got []; allowed at least one": {"rates": []},
    "updates: got [0]; allowed whole numbers from 1": {"updates": [0]},
    "seeds: got 0; allowed from 1": {"seeds": 0},
    "equal: got 'time'; allowed updates, calls": {"equal": "time"},
    "method: got 'pppo'; allowed reinforce": {"methods": ["pppo"]},
    "study: got 'speed'; allowed config, methods": {"speed": 3},
    "rate_of: got 'ppo'; allowed reinforce, drpo": {"rate_of": {"ppo": 1e-3}},
    "settings.seed: got 1; allowed seeds of the study": {"settings": FEW | {"seed": 1}},
    "methods: got ['drpo', 'near']; allowed methods that differ": {"methods": {"near": {"method": "drpo"}, "drpo": {}}},
}


@pytest.mark.parametrize("message", BAD)
def test_refused(folder, message):
    with pytest.raises(ValueError) as error:
        grid.Grid("trial", study(folder, **BAD[message]))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_wrong_call_is_one_line_and_status_2(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(folder / "run.yaml")])
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2 and said.startswith("minidrl: methods: got 'none'; allowed --methods") and said.count("\n") == 1
    )


def test_answers_are_counted_by_what_a_puzzle_needs_and_by_how_they_fail(tmp_path):
    puzzle = Puzzle((35, 13), 48)
    for text, kind in {
        "35+13=48": "solved",
        "35-13=48": "false, ends in the target",
        "35-13=22": "true, of another value",
        "35+13=44": "false, ends elsewhere",
        "35+14=49": "other numbers",
        "35*13=48=": "no calculation",
    }.items():
        assert answers.kind(puzzle, text, kind == "solved") == kind, text
    asked = {"sums": Puzzle((5, 6, 8), 19), "differences": Puzzle((5, 6, 8), 7), "products or quotients": Puzzle((5, 6, 8), 46)}
    assert all(answers.needs(one, 99) == need for need, one in asked.items())
    task = Countdown(num_numbers=2, max_number=9, max_value=81)
    rows = [{"problem": i, "text": one.prompt, "solved": i < 5} for i, one in enumerate(task.held_out(20))]
    found = {"evaluations": [{"protocol": {"n": 20, "skip": 0}, "rows": rows}]}
    (tmp_path / "a.json").write_text(json.dumps(found))
    column = answers.counted(task, tmp_path / "a.json")
    solved = [column[f"solved, {need}"] for need in answers.NEEDS if f"solved, {need}" in column]
    assert sum(int(value.split(" of ")[0]) for value in solved) == 5 and column["solved"] == "25.0 %"
    assert sum(int(value.split(" of ")[1]) for value in solved) == 20 and column["no calculation"] == "75.0 %"
