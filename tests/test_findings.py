"""Tables, leaderboard and figures of made-up grids, against sums worked out here."""

import csv
import itertools
import math
import subprocess
import types
from pathlib import Path

import matplotlib
import pytest
from matplotlib import image

import tiny
from minidrl import figures, findings, ledger

STEPS = (0, 50, 100)


def cell(method: str, seed: int, after: float | None, **given) -> dict:
    """A line of the ledger. Costs: ten calls a rollout of each phase, half a second of each."""
    row = {"study": "s", "stage": "report", "method": method, "options": "{}", "rate": 3e-4, "updates": 8, "seed": seed}
    row |= {"steps": 100, "bed": "ab12cd34", "key": "k", "status": "finished", "judged": "512 from 0", "version": "1"}
    row |= {"before": 0.1, "after": after, "greedy_after": "", "train_end": 0.25, "calls": 3000, "seconds": 150, **given}
    row |= {f"calls_{phase}": 1000 for phase in ledger.PHASES} | {f"seconds_{phase}": 50 for phase in ledger.PHASES}
    name = f"{method}-{row['rate']:.0e}-{row['updates']}-{seed}".replace("e-0", "e-")
    return {"cell": name, **row, "after": "" if after is None else after}


def failed(method: str, seed: int, **given) -> dict:
    return cell(method, seed, None, status="failed: the loss is nan", **given)


def course(row: dict, held_out: list[float] | None = None) -> list[dict]:
    """Lines of the curves: straight from 0.1 to what the ledger says, unless given; a failed cell has two."""
    held_out = held_out or ([0.1, 0.12] if row["after"] == "" else [0.1, (0.1 + row["after"]) / 2, row["after"]])
    lines = []
    for step, held in zip(STEPS, held_out, strict=False):
        line = {"study": row["study"], "cell": row["cell"], "step": step, "held_out": held, "updates": 8 * step}
        line |= {"calls": 30 * step, "seconds": 1.5 * step + 10 * row["seed"]}
        measured = {"training": 0.2, "reward": 0.1, "grad_norm": 2.0, "ratio_std": 0.5, "clip_fraction": 0.1, "entropy": 1}
        lines.append(line | dict.fromkeys(measured, "") | (measured if step else {}))
    return lines


def write(folder: Path, cells: list[dict], lines: list[dict] | None = None) -> tuple[Path, Path]:
    lines = [line for row in cells for line in course(row)] if lines is None else lines
    for name, rows, columns in (("ledger", cells, ledger.LEDGER), ("curves", lines, ledger.CURVES)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    return folder / "ledger.csv", folder / "curves.csv"


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a Markdown text, each as a list of lines by column."""
    found, lines = [], [line[1:-1].split("|") if line.startswith("|") else None for line in text.splitlines()]
    for before, line in zip([None, *lines], lines, strict=False):
        if line and not before:
            found.append([])
        if line:
            found[-1].append([part.strip() for part in line])
    return [[dict(zip(table[0], line, strict=False)) for line in table[2:]] for table in found]


def report(folder: Path, cells: list[dict], **given) -> tuple[str, list[dict], list[dict]]:
    text = findings.study_report(*write(folder, cells), "s", **given)
    first, second = (tables(text) + [[]])[:2]
    return text, first, second


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("column", "value", "allowed"),
    [
        ("rate", "fast", "a number > 0"),
        ("rate", "0", "a number > 0"),
        ("seed", "1.5", "a whole number >= 0"),
        ("stage", "test", "choose, report"),
        ("status", "failed", "finished, failed: reason"),
        ("after", "41.2", "nothing, a number of 0 to 1"),
        ("after", "1.2", "nothing, a number of 0 to 1"),
        ("options", "[1]", "a JSON object"),
        ("options", "{", "a JSON object"),
        ("calls", "-1", "nothing, >= 0"),
        ("method", "", "a name"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, column, value, allowed):
    path, _ = write(tmp_path, [cell("a", 0, 0.3), cell("a", 1, 0.3) | {column: value}], [])
    with pytest.raises(ValueError) as error:
        ledger.read_ledger(path)
    assert str(error.value) == f"{path} line 3: {column}: got {value!r}; allowed: {allowed}"


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [("method", "b", "b-3e-4-8-1"), ("rate", 1e-3, "a-1e-3-8-1"), ("updates", 1, "a-3e-4-1-1"), ("seed", 2, "a-3e-4-8-2")],
)
def test_a_cell_whose_name_says_something_else_than_its_columns_is_named(tmp_path, column, value, named):
    path, _ = write(tmp_path, [cell("a", 0, 0.3), cell("a", 1, 0.3) | {column: value}], [])
    with pytest.raises(ValueError) as error:
        ledger.read_ledger(path)
    said = f"{path} line 3: cell: got 'a-3e-4-8-1'; allowed: {named}, by its method, rate, updates and seed"
    assert str(error.value) == said


def test_wrong_curves_are_named(tmp_path):
    lines = course(cell("a", 0, 0.3))
    for change, message in (
        ({"held_out": ""}, "held_out: got ''"),
        ({"calls": "inf"}, "calls: got 'inf'"),
        ({"step": 50}, "step: got 50 again"),
    ):
        path = write(tmp_path, [], [*lines[:2], lines[2] | change])[1]
        with pytest.raises(ValueError, match=f"curves.csv line 4: {message}; allowed"):
            ledger.read_courses(path, "s")


def test_a_measurement_may_be_nan_and_is_left_out(tmp_path):
    lines = course(cell("a", 0, 0.3)) + course(cell("a", 1, 0.3))
    lines[1]["grad_norm"], lines[2]["grad_norm"] = "nan", "inf"
    courses = ledger.read_courses(write(tmp_path, [], lines)[1], "s")
    assert ledger.course(courses, ["a-3e-4-8-0", "a-3e-4-8-1"], "grad_norm") == {0: [], 50: [2.0], 100: [2.0]}


def test_a_mean_over_cells_is_taken_where_all_have_a_line(tmp_path):
    lines = course(cell("a", 0, 0.3)) + course(cell("a", 1, 0.5))[::2]
    courses = ledger.read_courses(write(tmp_path, [], lines)[1], "s")
    assert ledger.course(courses, ["a-3e-4-8-0", "a-3e-4-8-1"], "held_out") == {0: [0.1, 0.1], 100: [0.3, 0.5]}


def test_a_line_with_more_values_than_columns_is_named(tmp_path):
    path, _ = write(tmp_path, [])
    path.write_text(path.read_text() + "," * (len(ledger.LEDGER) + 1) + "\n")
    with pytest.raises(ValueError, match=f"line 2: got {len(ledger.LEDGER) + 2} fields; allowed {len(ledger.LEDGER)}$"):
        ledger.read_ledger(path)


def test_columns_that_are_missing_and_lines_that_are_short_are_named(tmp_path):
    path, _ = write(tmp_path, [cell("a", 0, 0.3)])
    path.write_text(path.read_text().replace("rate,", "speed,"))
    with pytest.raises(ValueError, match="ledger.csv line 1: got no column rate; required are study, cell, "):
        ledger.read_ledger(path)
    path, _ = write(tmp_path, [cell("a", 0, 0.3)])
    path.write_text(path.read_text() + "s,a-1,report,a\n")
    with pytest.raises(ValueError, match=f"ledger.csv line 3: got 4 fields; allowed {len(ledger.LEDGER)}$"):
        ledger.read_ledger(path)


@pytest.mark.parametrize("name", ["ledger.csv", "curves.csv"])
@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_a_file_whose_last_line_was_cut_is_named_and_not_written_over(name, cut, tmp_path):
    """Whatever is left of it may look like a line: a number that was cut is one, too."""
    write(tmp_path, [cell("a", 0, 0.3), cell("a", 1, 0.3)])
    path = tmp_path / name
    path.write_bytes(whole := path.read_bytes().replace(b"\r\n", b"\n")[:-cut])
    said = f"{name} line {whole.count(10) + 1}: got no new line at its end, where it may have been cut"
    with pytest.raises(ValueError, match=said):
        ledger._put(path, ledger.LEDGER if name == "ledger.csv" else ledger.CURVES, [cell("a", 2, 0.3)])
    with pytest.raises(ValueError, match=said):
        ledger.read_ledger(path) if name == "ledger.csv" else ledger.read_courses(path, "s")
    assert path.read_bytes() == whole
    path.write_bytes(short := whole[: -25 - whole[-25::-1].index(b",")] + b"\n")  # the line has an end, and fewer fields
    with pytest.raises(ValueError, match=rf"{name} line \d: got \d+ fields; allowed \d+$"):
        ledger._put(path, ledger.LEDGER if name == "ledger.csv" else ledger.CURVES, [cell("a", 2, 0.3)])
    assert path.read_bytes() == short


def test_a_cell_stands_once(tmp_path):
    with pytest.raises(ValueError, match="line 4: cell: got 'a-3e-4-8-0' again; allowed is once"):
        ledger.read_ledger(write(tmp_path, [cell("a", 0, 0.3), cell("a", 1, 0.3), failed("a", 0)])[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bed": "ffffffff"}, "bed: got 'ab12cd34' and 'ffffffff' in s; allowed is one"),
        ({"judged": "64 from 0"}, "judged: got '512 from 0' and '64 from 0' in s; allowed is one"),
        ({"rate": 1e-3, "cell": "a-1e-3-8-1"}, "rate: got 3e-4, 1e-3 for a with 8 updates in the stage report; allowed is one"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        report(tmp_path, [cell("a", 0, 0.3), cell("a", 1, 0.3) | change])


def test_an_unknown_study_is_refused(tmp_path):
    with pytest.raises(ValueError, match="study: got 't'; allowed: s"):
        findings.study_report(*write(tmp_path, [cell("a", 0, 0.3)]), "t")


def test_cells_of_a_rate_that_is_no_longer_chosen_are_named_and_not_compared(tmp_path):
    """A choice by more seeds took another rate: what was run before stays in the ledger, apart from the comparison."""
    tried = [cell("a", seed, after, rate=rate, stage="choose") for seed, rate, after in [(9, 1e-4, 0.3), (10, 1e-4, 0.2)]]
    tried += [cell("a", seed, after, rate=3e-4, stage="choose") for seed, after in [(9, 0.25), (10, 0.4)]]
    early = [cell("a", seed, 0.2, rate=1e-4) for seed in (0, 1)]
    now = [cell("a", seed, 0.5) for seed in (0, 1)] + [cell("b", seed, 0.4) for seed in (0, 1)]
    text, lines, _ = report(tmp_path, [*tried, *early, *now])
    (line,) = [line for line in lines if line["method"] == "a"]
    assert line["rate"] == "3e-4" and line["each seed"] == "0: 50.0, 1: 50.0"
    assert "2 more at 1e-4, not the best rate tried: 20.0" in line["notes"] and text.startswith("## s\n\n10 cells: 10 finished")


# ------------------------------------------------------------------------------------------------- a line for a method


def test_mean_interval_and_seeds(tmp_path):
    """40, 41, 42, 43: mean 41.5, s = 1.291; half of 3.182 s is 2.054. Cells of the choice have no part in it."""
    cells = [cell("a", seed, 0.40 + 0.01 * seed, greedy_after=0.5) for seed in (2, 0, 3, 1)]
    cells += [cell("a", 100, 0.9, stage="choose")]
    _, (line,), _ = report(tmp_path, cells)
    assert line["after"] == "41.5 [39.4, 43.6]"
    assert line["each seed"] == "0: 40.0, 1: 41.0, 2: 42.0, 3: 43.0"
    assert (line["before"], line["greedy after"], line["training"]) == ("10.0", "50.0", "25.0")
    assert (line["calls"], line["seconds"], line["updates"], line["notes"]) == ("3,000", "150", "8", "")


def test_rates_tried_and_a_failed_cell_that_counts_as_nothing(tmp_path):
    tried = [cell("a", 100, 0.2, rate=1e-4), cell("a", 101, 0.3, rate=1e-4), cell("a", 100, 0.5, rate=1e-3)]
    cells = [row | {"stage": "choose"} for row in [*tried, failed("a", 101, rate=1e-3)]]
    _, (line,), _ = report(tmp_path, [*cells, cell("a", 0, 0.3, rate=1e-3)])
    assert (line["rate"], line["tried"], line["after"]) == ("1e-3", "1e-4: 25.0, 1e-3: 25.0", "30.0 (one seed)")
    assert line["notes"] == "a-1e-3-8-101 failed: the loss is nan (last held out 12.0 at rollout 50)"
    _, (line,), _ = report(tmp_path, [*cells, cell("a", 102, 0.4, rate=1e-4, stage="choose"), cell("a", 0, 0.3, rate=1e-3)])
    assert line["tried"] == "1e-4: 30.0, 1e-3: 25.0"
    assert line["notes"].startswith("the rate is not the best one tried; ")


def test_a_rate_of_the_report_that_nobody_tried_is_not_the_best_one_tried(tmp_path):
    tried = [cell("a", 100, 0.2, rate=1e-4, stage="choose")]
    _, (line,), _ = report(tmp_path, [*tried, cell("a", 0, 0.3, rate=1e-3)])
    assert (line["rate"], line["tried"], line["notes"]) == ("1e-3", "1e-4: 20.0", "the rate is not the best one tried")


def test_collapse_is_more_than_five_points_below_the_base(tmp_path):
    cells = [cell(name, seed, after + 0.1 * seed, before=0.5) for name, after in (("a", 0.4), ("b", 0.398)) for seed in (0, 1)]
    lines = [line for row in cells for line in course(row, [0.5, 0.7 + 0.02 * row["seed"], row["after"]])]
    first, second = tables(findings.study_report(*write(tmp_path, cells, lines), "s"))[0]
    assert (first["method"], first["notes"]) == ("a", "")
    assert second["notes"] == "collapsed: 5.2 points below the base (best 71.0 at rollout 50)"


def test_nothing_is_left_out(tmp_path):
    cells = [cell("a", 0, 0.3), failed("a", 1), failed("b-2", 0), cell("c", 100, 0.2, stage="choose"), cell("e", 0, None)]
    planned = [row["cell"] for row in cells] + ["a-3e-4-8-2", "b-2-3e-4-8-1", "d-0.5-1-0"]
    text, lines, _ = report(tmp_path, cells, planned=planned)
    a, b, c, d, e = sorted(lines, key=lambda line: line["method"])
    assert "8 cells: 3 finished, 2 failed, 3 not run. " in text
    assert (a["after"], a["each seed"]) == ("30.0 (one seed)", "0: 30.0, 1: failed")
    assert a["notes"] == "a-3e-4-8-1 failed: the loss is nan (last held out 12.0 at rollout 50); not run: a-3e-4-8-2"
    assert (b["method"], b["after"], b["each seed"]) == ("b-2", "failed", "0: failed")
    assert b["notes"].endswith("not run: b-2-3e-4-8-1")
    assert (c["after"], c["rate"], c["tried"]) == ("not run", "3e-4", "3e-4: 20.0")
    assert (d["rate"], d["before"]) == ("", "")
    assert (d["updates"], d["after"], d["notes"]) == ("1", "not run", "not run: d-0.5-1-0")
    assert (e["after"], e["notes"]) == ("not evaluated", "e-3e-4-8-0 finished without a held-out evaluation")


def test_a_planned_name_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="planned: got 'a-0'; allowed: METHOD-RATE-UPDATES-SEED"):
        report(tmp_path, [cell("a", 0, 0.3)], planned=["a-0"])


@pytest.mark.parametrize(
    ("name", "method", "updates"),
    [("drpo-3e-4-8-0", "drpo", 8), ("wd1-0.001-1-12", "wd1", 1), ("egspo-3-3e-4-8-0", "egspo-3", 8), ("a-1e-05-2-3", "a", 2)],
)
def test_names_of_cells_are_taken_apart(tmp_path, name, method, updates):
    found = ledger.groups(ledger.read_ledger(write(tmp_path, [cell("z", 0, 0.3)])[0]), "s", [name])
    assert [(group.method, group.updates) for group in found if group.absent] == [(method, updates)]


def test_the_best_comes_first_and_the_control_is_called_one(tmp_path):
    cells = [cell("a", 0, 0.2), cell("self-training", 0, 0.3), cell("b", 0, 0.4), cell("a", 0, 0.1, updates=1)]
    cells += [cell("z", 0, 0.0), failed("c", 0)]
    _, lines, _ = report(tmp_path, cells)
    expected = [("1", "a"), ("8", "b"), ("8", "self-training (control)"), ("8", "a"), ("8", "z"), ("8", "c")]
    assert [(line["updates"], line["method"]) for line in lines] == expected


# --------------------------------------------------------------------------------------------------------------- pairs


def test_pairs_by_hand(tmp_path):
    """Three seeds, two degrees of freedom: p = 1 - t / sqrt(t^2 + 2), and Holm's factors 3, 2, 1."""
    after = {"a": (0.40, 0.42, 0.44), "b": (0.305, 0.325, 0.335), "c": (0.01, 0.09, 0.02)}
    text, _, lines = report(tmp_path, [cell(m, seed, x) for m, values in after.items() for seed, x in enumerate(values)])

    def p(t):
        return 1 - t / math.sqrt(t * t + 2)

    # 9.5, 9.5, 10.5: s^2 = 1/3. 39, 33, 42: s^2 = 21. 29.5, 23.5, 31.5: s^2 = 52/3.
    raw = [p(59 / 6 * 3), p(38 / math.sqrt(7)), p(169 / 6 / math.sqrt(52 / 9))]
    holm = [3 * raw[0], 2 * raw[1], 2 * raw[1]]
    assert 3 * raw[0] < 2 * raw[1] and raw[1] < raw[2] < 2 * raw[1]
    assert [line["p (Holm)"] for line in lines] == [f"{x:.4f}" for x in holm]
    assert lines[0]["A - B"] == "+9.8 [+8.4, +11.3]"  # 4.303 / 3 = 1.434
    assert [line["verdict"] for line in lines] == ["a above b", "a above c", "b above c"]
    assert [line["flag"] for line in lines] == ["", "c collapsed", "c collapsed"]
    assert "1 of 3 pairs of methods are told apart (adjusted p < 0.05) with neither collapsed, 2 more " in text


def test_what_is_alike_is_not_told_apart(tmp_path):
    after = {"a": (0.40, 0.42), "b": (0.40, 0.42), "c": (0.35, 0.45)}
    text, _, lines = report(tmp_path, [cell(m, seed, x) for m, values in after.items() for seed, x in enumerate(values)])
    assert {line["verdict"] for line in lines} == {"not distinguishable"}
    assert {line["p (Holm)"] for line in lines} == {"1.0000"}
    assert "0 of 3 pairs" in text


def test_pairs_share_their_seeds_and_their_updates(tmp_path):
    """b lost seed 0, so that a's 0.9 does not count; c has one seed in common; d has other updates."""
    cells = [cell("a", 0, 0.9), cell("a", 1, 0.3), cell("a", 2, 0.3), failed("b", 0), cell("b", 1, 0.4), cell("b", 2, 0.4)]
    cells += [cell("c", 1, 0.2), cell("d", 1, 0.2, updates=1), cell("d", 2, 0.2, updates=1)]
    text, _, (ab, ac, bc) = report(tmp_path, cells)
    assert (ab["A"], ab["B"], ab["seeds"], ab["A - B"]) == ("a", "b", "2", "-10.0 [-10.0, -10.0]")
    assert (ab["p (Holm)"], ab["verdict"], ab["flag"]) == ("< 0.0001", "b above a", "b lost 1 of 3 seeds")
    for line in (ac, bc):
        assert (line["seeds"], line["p (Holm)"]) == ("1", "")
        assert line["verdict"] == "not tested: fewer than two seeds in common"
    assert "1 of 1 pairs" in text


def test_many_pairs_are_sorted_by_p(tmp_path):
    noise = (0.0, 0.013, -0.009)
    cells = [cell(f"m{k}", s, 0.2 + 0.01 * k + noise[(s + k * k) % 3]) for k in range(9) for s in range(3)]
    lines = report(tmp_path, cells)[2]
    p = [float(line["p (Holm)"].strip("< ")) for line in lines]
    assert len(lines) == 36 and p == sorted(p) and p[0] < p[-1]
    fewer = report(tmp_path, [row for row in cells if row["method"] != "m8"])[2]
    p = [float(line["p (Holm)"].strip("< ")) for line in fewer]
    assert len(fewer) == 28 and p != sorted(p) and len({line["A"] for line in fewer[:7]}) == 1


def test_of_many_pairs_those_without_a_test_come_last(tmp_path):
    """Of nine methods the first has one seed: its eight pairs have no test."""
    cells = [cell(f"m{k}", s, 0.2 + 0.01 * k + 0.001 * (s + k) ** 2) for k in range(9) for s in range(3) if k or not s]
    lines = report(tmp_path, cells)[2]
    assert [line["verdict"].startswith("not tested") for line in lines] == [False] * 28 + [True] * 8


# --------------------------------------------------------------------------------------------------------- leaderboard


def board(folder: Path, cells: list[dict], best: float, lines: list[dict] | None = None, **given) -> list[list[dict]]:
    jobs = given.pop("jobs", dict.fromkeys(("s", "t"), ("random", 128)))
    found = tables(findings.leaderboard(*write(folder, cells, lines), best, jobs, **given))
    return [table for table in found if "seeds there" in table[0] or "command" in table[0]]


def test_at_equal_calls_each_seed_is_read_on_its_own_line(tmp_path, monkeypatch):
    """0.1 to 0.5 and to 0.3 in 3,000 calls: at 600 0.18 and 0.14, at 3,000 the ends. b goes half as far and is nearer."""
    monkeypatch.setattr(findings, "BUDGETS", (600, 1500, 3000, 3001))
    b = cell("b", 0, 0.3), cell("b", 1, 0.3)
    cells = [cell("a", 0, 0.5), cell("a", 1, 0.3), *b, failed("c", 0), cell("c", 1, 0.9)]
    lines = [line for row in cells for line in (course(row, [0.1, 0.28]) if row in b else course(row))]
    text = findings.leaderboard(*write(tmp_path, cells, lines), 0.15, {"s": ("random", 128)})
    first, *_ = tables(text)
    assert list(first[0])[-6:] == [
        "solved before",
        "600",
        "1,500",
        "3,000",
        "at the end",
        "greedy, at the end",
    ]  # nobody spent 3,001
    by = {line["method"]: line for line in first}
    assert by["a"]["600"].startswith("16.0 [") and by["a"]["3,000"].startswith("40.0 [")
    assert by["b"]["600"].startswith("17.2 [") and by["b"]["3,000"] == ""
    assert (by["c"]["600"], by["c"]["solved before"]) == ("", "10.0")
    text = findings.leaderboard(*write(tmp_path, cells[:4], lines), 0.15, {"s": ("random", 128)})
    assert [line["method"] for line in tables(text)[0]] == ["a", "b"]  # by where they end


def test_the_shipped_board_at_equal_calls_is_that_of_the_shipped_ledger(monkeypatch):
    """LEADERBOARD.md, up to the goals, which need the rate of the best decoder; its columns are the budgets that it quotes."""
    monkeypatch.syspath_prepend(tiny.ROOT / "benchmarks")
    script = tiny.script("leaderboard")
    page = findings.leaderboard(script.LEDGER, script.CURVES, 0.0, script.jobs())
    made, shipped = (text.split("\n## ")[1] for text in (page, (tiny.ROOT / "LEADERBOARD.md").read_text(encoding="utf-8")))
    assert made.startswith("At equal network calls") and made == shipped, "run python benchmarks/leaderboard.py"


def test_runs_that_a_larger_line_has_too_are_shown_once(tmp_path):
    """Seed 0 of study t is that of s; its b has one seed more than s knows, its c ends elsewhere."""
    both = [cell(name, seed, 0.4 + seed / 10) for name in "abc" for seed in (0, 1)]
    again = [cell("a", 0, 0.4, study="t"), cell("b", 2, 0.4, study="t"), cell("c", 0, 0.3, study="t")]
    text = findings.leaderboard(*write(tmp_path, both + again), 0.15, {"s": ("random", 128), "t": ("random", 64)})
    for table in (tables(text)[0], tables(text)[-1]):
        assert sorted((line["study"], line["method"]) for line in table) == [("s", x) for x in "abc"] + [("t", "b"), ("t", "c")]


def test_who_a_line_is(tmp_path):
    """The label of the study, its row where that has another name, the responses of a step; lines with the same runs."""
    cells = [cell(name, seed, 0.3) for name in "ab" for seed in (0, 1)] + [cell("c", 0, 0.4), cell("c", 0, 0.3, study="t")]
    cells[0] |= {"options": '{"method": "egspo"}'}
    text = findings.leaderboard(*write(tmp_path, cells), 0.15, {"s": ("random", 128), "t": ("random", 64)})
    found = [(line["study"], line["method"], line["responses a step"]) for line in tables(text)[0]]
    assert sorted(found) == [("s", "a (egspo)", "128"), ("s", "b", "128"), ("s", "c", "128"), ("t", "c", "64")]
    assert "Alike to the last digit, one computation: s, 8 updates a rollout: a, b.\n- Held-out" in text


def test_greedy_decoding_stands_beside_the_other(tmp_path):
    cells = [cell("a", 0, 0.5) | {"greedy_after": 0.3}, cell("a", 1, 0.5) | {"greedy_after": 0.4}]
    text = findings.leaderboard(*write(tmp_path, cells), 0.15, {"s": ("random", 128)})
    assert tables(text)[0][0]["greedy, at the end"] == "35.0"


def test_what_is_spent_until_a_goal(tmp_path):
    """0.1 to 0.5 and to 0.3 in 100 rollouts, mean 0.1 + 0.3 x: 0.25 at x = 1/2, by the seeds at 3/8 and 3/4."""
    cells = [cell("a", 0, 0.5), cell("a", 1, 0.3), cell("b", 0, 0.2)]
    near, far, commands = board(tmp_path, cells, 0.15)
    assert [line["method"] for line in near] == ["a", "b"]
    assert (near[0]["network calls"], near[0]["updates"]) == ("1,500 [1,125, 2,250]", "400 [300, 600]")
    # 10 seconds before the first rollout of seed 1: 150 x + 5 of both, 150 x and 150 x + 10 of each.
    assert near[0]["seconds"] == "80 [56, 122]"
    assert (near[0]["seeds there"], near[0]["at the end"]) == ("2 of 2", "40.0")
    # 0.35 is at 5/6 of the mean, at 5/8 of seed 0; seed 1 does not come so far.
    assert (far[0]["network calls"], far[0]["seeds there"]) == ("2,500 [1,875, not reached]", "1 of 2")
    assert (near[1]["network calls"], near[1]["seeds there"]) == ("not reached within 3,000", "0 of 1")
    assert (near[1]["updates"], near[1]["seconds"]) == ("not reached within 800", "not reached within 150")
    assert [line["calls spent"] for line in near] == ["3,000", "3,000"]
    assert [line["solved before"] for line in near] == ["10.0", "10.0"]
    assert [line["seeds"] for line in commands] == ["0, 1", "0"]
    assert commands[0]["command"] == "`python -m minidrl compare studies/s.yaml --methods a`"


def test_the_first_time_counts_even_if_it_falls_again(tmp_path):
    row = cell("a", 0, 0.0)
    near, far, _ = board(tmp_path, [row], 0.1, course(row, [0.1, 0.3, 0.0]))
    assert near[0]["network calls"] == "750 [750, 750]" and far[0]["network calls"] == "1,500 [1,500, 1,500]"
    assert near[0]["at the end"] == "0.0 (collapsed)"


def test_a_goal_that_the_base_has_reached_costs_nothing(tmp_path):
    assert board(tmp_path, [cell("a", 0, 0.5)], 0.0)[0][0]["network calls"] == "0 [0, 0]"


def test_a_failed_seed_has_not_reached_it(tmp_path):
    near = board(tmp_path, [cell("a", 0, 0.5), failed("a", 1), failed("b", 0)], 0.15)[0]
    assert (near[0]["network calls"], near[0]["seeds there"]) == ("1,125 [1,125, not reached]", "1 of 2")
    assert (near[1]["method"], near[1]["network calls"], near[1]["seeds there"]) == ("b", "not reached", "0 of 1")
    assert (near[1]["calls spent"], near[1]["solved before"]) == ("", "")


def test_the_cheapest_comes_first_and_a_command_can_be_given(tmp_path):
    cells = [cell("a", 0, 0.3), cell("b", 0, 0.5), cell("c", 0, 0.4, updates=1), cell("d", 0, 0.12), cell("e", 0, 0.14)]
    near, *_, commands = board(tmp_path, cells, 0.1, command="train --method {method} --rate {rate}")
    assert [line["method"] for line in near] == ["b", "c", "a", "e", "d"]
    assert {line["command"] for line in commands if line["method"] == "b"} == {"`train --method b --rate 0.0003`"}


def test_runs_of_two_orders_are_in_two_tables(tmp_path):
    """a ends above the first goal 0.25, in its order only; nothing comes to 0.35."""
    cells = [cell("a", 0, 0.3), cell("b", 0, 0.2, study="t"), cell("c", 0, 0.22, study="u", before=0.2)]
    orders = {"s": ("random", 128), "t": ("right-to-left", 128), "u": ("random", 256), "v": ("random", 1)}
    files = write(tmp_path, cells)
    text = findings.leaderboard(*files, 0.15, orders)
    equal, other, first, _ = tables(text)
    assert [[line["method"] for line in table] for table in (equal, other, first)] == [["a", "c"], ["b"], ["a", "c"]]
    assert [line["solved before"] for line in first] == ["10.0", "20.0"]
    near, far = text.split("\n## ")[2].split("\n### ")[1:3]
    assert near.index("#### Decoding in random order") < near.index("Decoding in right-to-left order: no seed of these runs")
    assert far.startswith("20 points above: 35.0 %") and "|" not in far
    for order in ("random", "right-to-left"):
        assert f"Decoding in {order} order: no seed of these runs got there." in far
    known = {"s": ("random", 128), "u": ("random", 128)}
    assert "Other studies of the ledger: none." in text
    assert "Other studies of the ledger: t." in findings.leaderboard(*files, 0.15, known)
    with pytest.raises(ValueError, match="jobs: got none of t; required is one for each study"):
        findings.leaderboard(*files, 0.15, known, ["s", "t"])


def test_the_order_of_a_study_is_that_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(tiny.ROOT / "benchmarks")  # one script imports another
    found = tiny.script("leaderboard").jobs()
    assert found["main_job"] == ("low-confidence", 256) and found["reuse_confidence"] == (
        "low-confidence",
        128,
    )  # of the config, which both leave as it is
    assert (found["arcs"], found["reuse_left_to_right"]) == (("random", 128), ("left-to-right", 128))
    assert not {"blocks", "likelihoods_again"} & {*found}, "of another base, and judged by other puzzles"


@pytest.fixture
def line(monkeypatch, tmp_path):
    """The script of the board, which writes to another folder, and what it did."""
    monkeypatch.syspath_prepend(tiny.ROOT / "benchmarks")
    script, done = tiny.script("leaderboard"), []
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "laws_pass", lambda: done.append("laws") or True)
    monkeypatch.setattr(script, "best_decoder", lambda: done.append("decoder") or 0.3)
    return script, done, tmp_path / "LEADERBOARD.md"


def test_one_command_tries_the_laws_runs_the_study_and_writes_the_page(line, monkeypatch):
    """Without a study the page alone; nothing after laws that fail, or runs that stop."""
    script, done, page = line
    verb = ["make", "-n", "--no-print-directory", "leaderboard", "STUDY=studies/arcs.yaml", "METHODS=a,b"]
    told = subprocess.run(verb, cwd=tiny.ROOT, capture_output=True, text=True)
    command = told.stdout.strip().splitlines()[-1].split()
    assert command[1] == "benchmarks/leaderboard.py"
    status = [0]

    def ran(words, **_):
        done.append(words[1:])
        return types.SimpleNamespace(returncode=status[0])

    monkeypatch.setattr(script.subprocess, "run", ran)
    study = str(tiny.ROOT / "studies" / "arcs.yaml")
    compare = ["-m", "minidrl", "compare", study, "--methods", "a,b"]
    monkeypatch.chdir(tiny.ROOT)
    assert script.main(command[2:]) == 0 and done == ["laws", compare, "decoder"]
    assert "make leaderboard STUDY=" in page.read_text()
    page.unlink()
    done.clear()
    assert script.main([]) == 0 and done == ["laws", "decoder"] and page.exists()
    page.unlink()
    status[0] = 130
    assert script.main(command[2:]) == 130 and not page.exists()
    monkeypatch.setattr(script, "laws_pass", lambda: False)
    done.clear()
    assert script.main(command[2:]) == 1 and done == []


@pytest.mark.parametrize("words", [["--study", "studies/blocks.yaml"], ["--study", "tiny_configs/countdown20_cpu.yaml"]])
def test_a_study_that_would_add_no_line_is_refused_before_it_runs(words, line, capsys, monkeypatch):
    script, done, _ = line
    monkeypatch.chdir(tiny.ROOT)
    assert script.main(words) == 2 and done == []
    assert f"study: got {words[1]}; allowed a file of studies/ with the base" in capsys.readouterr().err
    assert script.main(["--methods", "ppo"]) == 2 and "methods: got ppo without --study" in capsys.readouterr().err


def test_a_method_whose_rate_is_still_being_chosen_is_not_on_the_board(tmp_path):
    cells = [cell("a", 0, 0.3), cell("b", 1000, 0.4, stage="choose"), cell("c", 1000, 0.4, stage="choose", study="t")]
    text = findings.leaderboard(*write(tmp_path, cells), 0.15, {"s": ("random", 128), "t": ("left-to-right", 128)})
    assert {line["method"] for table in tables(text) for line in table} == {"a"} and "left-to-right" not in text


def test_a_later_goal_has_a_table_where_one_seed_got_there(tmp_path):
    """Means 0.25 and 0.2: the first goal, 0.25, is that of the mean of a; 0.35 only of its seed 0."""
    cells = [cell("a", 0, 0.4), cell("a", 1, 0.1), cell("b", 0, 0.2, study="t")]
    jobs = {"s": ("random", 128), "t": ("left-to-right", 128)}
    near, far, _ = board(tmp_path, cells, 0.15, jobs=jobs)
    assert [line["seeds there"] for line in far] == ["1 of 2"]
    assert far[0]["network calls"] == "not reached within 3,000 [2,500, not reached]"
    assert far[0]["at the end"] == near[0]["at the end"] == "25.0"


def test_one_best_decoder_is_of_one_bed(tmp_path):
    cells = [cell("a", 0, 0.3), cell("a", 0, 0.3, study="t", bed="ffffffff")]
    with pytest.raises(ValueError, match="bed: got 'ab12cd34' and 'ffffffff' in the leaderboard; allowed is one"):
        board(tmp_path, cells, 0.1)
    assert {line["study"] for line in board(tmp_path, cells, 0.1, studies=["t"])[0]} == {"t"}
    with pytest.raises(ValueError, match="best_decoder: got 13.0; allowed are fractions of 0 to 1"):
        board(tmp_path, cells, 13.0)


def test_a_finished_cell_without_a_curve_is_named(tmp_path):
    with pytest.raises(ValueError, match="curves: got no line for a-3e-4-8-0; allowed are some for each cell"):
        board(tmp_path, [cell("a", 0, 0.3)], 0.1, [])


# ------------------------------------------------------------------------------------------------------------- figures


def drawn(folder: Path, cells: list[dict], lines: list[dict] | None = None) -> dict[str, matplotlib.axes.Axes]:
    """The panels by their title, the bars by their label."""
    path, curves = write(folder, cells, lines)
    found = dict(enumerate(ledger.groups(ledger.read_ledger(path), "s")))
    figure = figures.draw(found, ledger.read_courses(curves, "s"), "title")
    top, bottom = figure.subfigs
    return {axes.get_title("left"): axes for axes in top.axes} | {axes.get_xlabel(): axes for axes in bottom.axes}


def test_lines_are_means_and_bands_are_student_intervals(tmp_path):
    """At rollout 100 0.30, 0.32, 0.34: mean 32, s = 2, half 4.303 2 / sqrt(3) = 4.969."""
    panels = drawn(tmp_path, [cell("a", seed, 0.30 + 0.02 * seed) for seed in range(3)] + [failed("a", 3)])
    axes = panels["held-out puzzles solved: mean over seeds, 95 % band"]
    base, line = axes.get_lines()
    assert base.get_ydata() == pytest.approx([10, 10])
    assert line.get_xydata().ravel() == pytest.approx([0, 10, 50, 21, 100, 32])
    assert line.get_label() == "a, 3 of 4 seeds"
    last = [y for x, y in axes.collections[0].get_paths()[0].vertices if x == 100]
    assert (min(last), max(last)) == pytest.approx((32 - 4.969, 32 + 4.969), abs=1e-3)
    assert panels["gradient norm"].get_lines()[0].get_xydata().ravel() == pytest.approx([50, 2, 100, 2])
    assert panels["clipped"].get_lines()[0].get_ydata() == pytest.approx([10, 10])


def test_bars_stand_one_after_the_other(tmp_path):
    bars = drawn(tmp_path, [cell("a", 0, 0.3), cell("b", 0, 0.2)])["network calls a run"].containers
    assert [bar.get_label() for bar in bars] == list(ledger.PHASES)
    assert [[(b.get_x(), b.get_width()) for b in bar] for bar in bars] == [[(1000.0 * k, 1000.0)] * 2 for k in range(3)]


def test_names_stand_at_the_left_bars_and_the_first_is_at_the_top(tmp_path):
    bars = drawn(tmp_path, [cell(name, 0, 0.3) for name in "ab"])
    left, right = bars["seconds a run"], bars["network calls a run"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]
    assert left.get_ylim() == right.get_ylim() == (1.5, -0.5)
    assert left.get_shared_y_axes().joined(left, right) and not left.spines["top"].get_visible()
    assert left.figure.legends[0]._ncols == len(ledger.PHASES)


@pytest.mark.parametrize(("highest", "top"), [(1.0, 100), (0.4, 50), (0.01, 5)])
def test_the_axis_of_solved_puzzles_has_room_above_the_highest_and_no_more_than_all(tmp_path, highest, top):
    path, curves = write(tmp_path, [cell("a", 0, 0.3)])
    found = dict(enumerate(ledger.groups(ledger.read_ledger(path), "s")))
    axes = figures.draw(found, ledger.read_courses(curves, "s"), "title", highest).subfigs[0].axes[0]
    assert axes.get_ylim() == (0, top)
    assert axes.texts[0].get_position() == (1, pytest.approx(10)) and not axes.spines["right"].get_visible()


def test_a_method_has_one_colour_and_dash_by_its_number(tmp_path):
    for axes in list(drawn(tmp_path, [cell(name, 0, 0.3) for name in "ab"]).values())[:5]:
        lines = axes.get_lines()[-2:]
        assert [line.get_color() for line in lines] == list(figures.COLOURS[:2])
        assert [line.get_linestyle() for line in lines] == list(figures.DASHES[:2])
        assert [line.get_marker() for line in lines] == list(figures.MARKERS[:2])


def test_rates_start_at_zero_and_a_panel_of_zeros_has_room(tmp_path):
    row = cell("a", 0, 0.3)
    panels = drawn(tmp_path, [row], [line | {"clip_fraction": 0.0} for line in course(row)])
    assert panels["clipped"].get_ylim() == (0, 1)
    assert panels["entropy (nats)"].get_ylim()[0] == 0


@pytest.mark.parametrize(("largest", "scale"), [(30, "linear"), (30.5, "log")])
def test_a_range_is_wide_beyond_thirty_fold(tmp_path, largest, scale):
    row = cell("a", 0, 0.3)
    lines = [line | {"grad_norm": x} for line, x in zip(course(row), (1, 1, largest), strict=True)]
    assert drawn(tmp_path, [row], lines)["gradient norm"].get_yscale() == scale


@pytest.mark.parametrize(("least", "linear"), [(1.0, 1.0), (1e-9, 5e-4)])
def test_beside_a_zero_the_scale_is_linear_to_the_least_value_or_a_millionth_of_the_largest(tmp_path, least, linear):
    rows = [cell(name, 0, 0.3) for name in "ab"]
    spreads = ((0.0, 0.0, 0.0), (0.0, least, 500.0))
    lines = [
        line | {"ratio_std": x} for row, xs in zip(rows, spreads, strict=True) for line, x in zip(course(row), xs, strict=True)
    ]
    assert drawn(tmp_path, rows, lines)["spread of the ratio (std)"].yaxis.get_transform().linthresh == pytest.approx(linear)


def test_wide_ranges_are_logarithmic_and_keep_a_zero(tmp_path):
    rows, lines = [cell("a", 0, 0.3), cell("b", 0, 0.2)], []
    for row, spreads in zip(rows, ((0.0, 0.0, 0.0), (0.0, 1.0, 500.0)), strict=True):
        changed = ({"ratio_std": x, "grad_norm": x + 1, "entropy": ""} for x in spreads)
        lines += [line | change for line, change in zip(course(row), changed, strict=True)]
    panels = drawn(tmp_path, rows, lines)
    assert panels["spread of the ratio (std)"].get_yscale() == "symlog"
    assert panels["gradient norm"].get_yscale() == "log"
    assert panels["clipped"].get_yscale() == "linear"
    assert [text.get_text() for text in panels["entropy (nats)"].texts] == ["no method here has one"]


def bars(tmp_path: Path, methods: int) -> list:
    """The two axes of costs, laid out, of a figure with so many lines."""
    path, curves = write(tmp_path, [cell(f"m{k}", 0, 0.3) for k in range(methods)])
    lines = dict(enumerate(ledger.groups(ledger.read_ledger(path), "s")))
    figure = figures.draw(lines, ledger.read_courses(curves, "s"), "title")
    figure.canvas.draw()
    return figure.subfigs[1].axes


def test_numbers_at_the_bars_do_not_touch(tmp_path):
    for axes in bars(tmp_path, 3):
        low, high = axes.get_xlim()
        boxes = [text.get_window_extent() for text in axes.get_xticklabels() if low <= text.get_position()[0] <= high]
        assert len(boxes) >= 3 and all(b.x0 - a.x1 > a.height / 2 for a, b in itertools.pairwise(boxes))


def test_bars_are_as_thick_in_every_figure_and_their_names_do_not_touch(tmp_path):
    thick = {}
    for methods in (1, 2, 4, 8):
        axes = bars(tmp_path, methods)[0]
        thick[methods] = axes.patches[0].get_window_extent().height
        boxes = [text.get_window_extent() for text in axes.get_yticklabels()]
        assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(boxes))
        curves, costs = axes.get_figure(root=True).subfigs
        assert curves.bbox.height > 1.5 * costs.bbox.height
    assert max(thick.values()) < 1.3 * min(thick.values())


def test_a_panel_has_its_axis_named_lines_behind_the_curves_and_whole_rollouts(tmp_path):
    panels = drawn(tmp_path, [cell("a", 0, 0.3), cell("b", 0, 0.2)])
    for axes in list(panels.values())[:5]:
        assert axes.get_xlabel() == "rollouts" and axes.get_axisbelow() is True
        assert all(line.get_visible() for line in axes.get_ygridlines())
        assert all(tick == round(tick) for tick in axes.get_xticks())


def test_the_base_is_a_line_above_the_grid_and_below_the_curves(tmp_path):
    panel = next(iter(drawn(tmp_path, [cell("a", 0, 0.3)]).values()))
    base, *curves = panel.get_lines()
    assert base.get_linewidth() > 0 and panel.yaxis.get_zorder() < base.get_zorder()
    assert all(base.get_zorder() < line.get_zorder() for line in curves)
    assert all(base.get_linewidth() < line.get_linewidth() and not line.get_clip_on() for line in curves)


def test_shares_are_in_per_cent_and_the_panels_of_updates_are_alike(tmp_path):
    panels = drawn(tmp_path, [cell("a", 0, 0.3)])
    solved, *others = list(panels.values())[:5]
    for axes in (solved, *others):
        axes.get_figure(root=True).canvas.draw()
        shown = [text.get_text() for text in axes.get_yticklabels()]
        assert all(text.endswith(" %") == (axes in (solved, panels["clipped"])) for text in shown)
    heights = {round(axes.get_window_extent().height) for axes in others}
    assert len(heights) == 1 and solved.get_window_extent().height > 1.5 * max(heights)


def test_a_bar_is_as_long_as_its_number_without_an_edge(tmp_path):
    for axes in bars(tmp_path, 2):
        assert {patch.get_linewidth() for patch in axes.patches} == {0}


def test_eight_methods_keep_their_colours(tmp_path, called):
    cells = [cell(f"m{k}", 0, 0.3) for k in range(8)] + [cell("m7", 0, 0.3, updates=1)]
    path, curves = write(tmp_path, cells)
    figures.write_figures(curves, path, "s", tmp_path)
    assert called["s-1.png"][0] == {"m7": 7}


def test_a_decade_has_two_ticks_and_what_is_missing_is_said_inside(tmp_path):
    row = cell("a", 0, 0.3)
    lines = [line | {"grad_norm": x, "entropy": ""} for line, x in zip(course(row), (1.0, 10.0, 100.0), strict=True)]
    panels = drawn(tmp_path, [row], lines)
    ticks = panels["gradient norm"].get_yticks()
    assert {f"{tick:.0e}"[0] for tick in ticks} == {"1", "3"}
    (text,) = panels["entropy (nats)"].texts
    assert all(0 < x < 1 for x in text.get_position())


def test_what_is_written_is_a_picture(tmp_path):
    path, curves = write(tmp_path, [cell("a", 0, 0.3), failed("a", 0, updates=4)])
    with matplotlib.rc_context({"font.size": 30}):
        (found,) = figures.write_figures(curves, path, "s", tmp_path / "new" / "figures")
        assert matplotlib.rcParams["font.size"] == 30
    assert found == tmp_path / "new" / "figures" / "s-8.png"
    assert image.imread(found).shape[1] == 1200


@pytest.fixture
def called(monkeypatch):
    """Name of each figure, its methods with the number of their colour, and the highest mean that it has room for."""
    seen = {}
    monkeypatch.setattr(figures, "draw", lambda lines, _, title, highest: ({g.method: n for n, g in lines.items()}, highest))
    monkeypatch.setattr(figures, "write_png", lambda figure, path: seen.update({path.name: figure}))
    return seen


def test_a_figure_for_each_number_of_updates_with_eight_lines_at_most(tmp_path, called):
    cells = [cell(f"m{k}", s, 0.2 + 0.01 * k) for k in range(9) for s in (0, 1)] + [cell("m0", 0, 0.3, updates=1)]
    path, curves = write(tmp_path, cells)
    figures.write_figures(curves, path, "s", tmp_path)
    assert {name: "".join(lines) for name, (lines, _) in called.items()} == {
        "s-1.png": "m0",
        "s-8.png": "m8m7m6m5m4",
        "s-8-2.png": "m3m2m1m0",
    }
    assert [highest for _, highest in called.values()] == pytest.approx([0.3, 0.28, 0.28])


def test_a_method_keeps_its_colour(tmp_path, called):
    cells = [cell("a", 0, 0.3), cell("b", 0, 0.2), cell("b", 0, 0.4, updates=1), cell("c", 0, 0.3, updates=1)]
    path, curves = write(tmp_path, cells)
    figures.write_figures(curves, path, "s", tmp_path)
    assert [lines for lines, _ in called.values()] == [{"b": 1, "c": 2}, {"a": 0, "b": 1}]
    without_colour = {*zip(figures.DASHES, figures.MARKERS, strict=True)}
    assert len({*figures.COLOURS}) == len(without_colour) == figures.LINES == 8


def test_parts_are_even():
    assert [[len(part) for part in figures._parts(range(n))] for n in (1, 8, 9, 12, 17)] == [
        [1],
        [8],
        [5, 4],
        [6, 6],
        [6, 6, 5],
    ]
