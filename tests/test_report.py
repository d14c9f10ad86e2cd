"""Figures and tables: what is drawn and written is what the files of the run say."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib import image

from minidrl.run import report, tables

UPDATES = [{"step": s, "solved": s / 200, "reward": 0.1, "seconds": 2.0 * s} for s in range(1, 101)]
EVALUATIONS = [{"step": s, "eval/solved": s / 250, "eval/temperature": 0.0} for s in (0, 50, 100)]


def write_run(folder: Path, rows: list[dict], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def write_summary(folder: Path, **values) -> Path:
    base = {"method": "grpo", "seed": 0, "steps": 10, "seconds": 60.0, "solved_before": 0.1, "solved_after": 0.3}
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({**base, **values}))
    return folder


# ------------------------------------------------------------------------------------------------------------- reading


def test_metrics_come_back_as_written_and_an_unfinished_line_is_left_out(tmp_path):
    assert report.read_metrics(write_run(tmp_path, UPDATES + EVALUATIONS, '{"step": 101, "sol')) == UPDATES + EVALUATIONS


@pytest.mark.parametrize("line", ["{broken", "[1, 2]", "3"])
def test_a_broken_line_is_named(tmp_path, line):
    with pytest.raises(ValueError, match="metrics.jsonl line 3: got .*; allowed is a JSON object"):
        report.read_metrics(write_run(tmp_path, UPDATES[:2], line + "\n"))


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        report.read_metrics(tmp_path)
    with pytest.raises(ValueError, match="holds no summary.json"):
        report.read_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"method": "grpo", "seed": 0, "steps": 1, "seconds": 1}')
    with pytest.raises(ValueError, match="got no solved_before, solved_after; required are"):
        report.read_summary(tmp_path)


def test_series_is_sorted_finite_and_keeps_the_last_value_of_a_step():
    rows = [{"step": 2, "kl": 5.0}, {"step": 1, "kl": 1}, {"step": 3, "kl": float("nan")}, {"step": 4, "kl": None}]
    rows += [{"step": 2, "kl": 2.0}, {"kl": 7.0}, {"step": 5, "reward": 1.0}]
    assert report.series(rows, "kl") == ([1, 2], [1.0, 2.0])


def test_running_mean_by_hand():
    assert report.running_mean([0, 3, 6, 0], 3) == [1.5, 3.0, 3.0, 3.0]
    assert report.running_mean([4, 2], 1) == [4, 2]
    assert report.running_mean([1, 2, 3], 9) == [2.0, 2.0, 2.0]
    assert report.running_mean([], 3) == []


@pytest.mark.parametrize("width", [0, 2, -1])
def test_a_running_mean_needs_an_odd_width(width):
    with pytest.raises(ValueError, match=f"width: got {width}"):
        report.running_mean([1.0], width)


# -------------------------------------------------------------------------------------------------------------- figure


def drawn(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()}


def test_what_is_drawn_is_what_was_measured():
    warm = [{"step": s, "eval/solved": 0.1, "eval/temperature": 1.0} for s in (0, 100)]
    axes = report.draw_curve(UPDATES + EVALUATIONS + warm).axes[0]
    dots = axes.collections[0].get_offsets().tolist()
    assert dots == [pytest.approx((s, s / 2)) for s in range(1, 101)]
    lines = drawn(axes)
    assert set(lines) == {"training rollouts", "held-out, T = 0", "held-out, T = 1"}
    assert lines["held-out, T = 0"] == [(0, 0.0), (50, 20.0), (100, 40.0)]
    assert lines["held-out, T = 1"] == [(0, 10.0), (100, 10.0)]
    assert lines["training rollouts"][49] == pytest.approx((50, 25.0))  # the mean of a straight line, away from its ends
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("updates", "solved")
    assert axes.get_ylim()[0] == 0


def test_the_frame_is_lighter_than_the_curve_and_the_legend_smaller_than_the_labels_and_its_lines_apart():
    figure = report.draw_curve(UPDATES + EVALUATIONS)
    axes = figure.axes[0]
    figure.draw_without_rendering()
    frame, curve = axes.spines["bottom"].get_linewidth(), max(line.get_linewidth() for line in axes.lines)
    assert frame <= curve / 2 and frame <= axes.yaxis.get_gridlines()[0].get_linewidth()
    texts = axes.get_legend().get_texts()
    boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.y0)
    assert len(boxes) > 1 and all(low.y1 <= high.y0 for low, high in zip(boxes, boxes[1:], strict=False))
    assert all(text.get_fontsize() < axes.xaxis.label.get_fontsize() - 1 for text in texts)


def test_labels_tell_a_fraction_as_percent():
    axes = report.draw_curve(UPDATES).axes[0]
    assert axes.yaxis.get_major_formatter()(20.0) == "20 %"


@pytest.mark.parametrize(("scale", "unit", "size"), [(2.0, "seconds", 1), (20.0, "minutes", 60), (200.0, "hours", 3600)])
def test_ticks_of_the_time_axis_stand_where_the_time_was_reached(scale, unit, size):
    lower, top = report.draw_curve([{**row, "seconds": scale * row["step"]} for row in UPDATES]).axes
    assert top.get_xlabel() == unit
    assert top.get_xlim() == lower.get_xlim()
    ticks = {float(label.get_text()) * size: x for label, x in zip(top.get_xticklabels(), top.get_xticks(), strict=True)}
    assert len(ticks) >= 3
    for seconds, x in ticks.items():
        assert x == pytest.approx(seconds / scale)


def test_the_time_axis_reaches_from_the_first_time_that_is_known_to_the_end():
    top = report.draw_curve(UPDATES).axes[1]
    assert max(float(label.get_text()) for label in top.get_xticklabels()) >= 150  # of 200 seconds
    late = [{"step": s, "solved": 0.1, "seconds": 80.0 + s} for s in range(0, 101)]
    top = report.draw_curve(late).axes[1]
    assert min(float(label.get_text()) for label in top.get_xticklabels()) >= 80


def test_dots_lie_under_the_line_and_fade_as_they_become_many_and_the_frame_is_open():
    seldom, often = (
        report.draw_curve([{"step": s, "solved": 0.5, "seconds": 1.0 * s} for s in range(1, n)] + EVALUATIONS[1:]).axes
        for n in (101, 501)
    )
    dots, lines = seldom[0].collections[0], seldom[0].get_lines()
    assert dots.zorder < lines[0].zorder < lines[1].zorder
    assert 0.2 > often[0].collections[0].get_alpha() < dots.get_alpha() <= 0.5
    assert [axes.spines["right"].get_visible() for axes in seldom] == [False, False]


def test_time_that_does_not_increase_is_not_an_axis():
    assert len(report.draw_curve([{**row, "seconds": 1.5} for row in UPDATES]).axes) == 1
    assert len(report.draw_curve([{"step": row["step"], "solved": row["solved"]} for row in UPDATES]).axes) == 1


def test_the_axis_of_rates_holds_everything_that_is_drawn():
    for top in (0.0, 0.004, 0.3, 0.69, 0.71, 1.0):
        limit = report.draw_curve([{"step": 1, "solved": 0.0}, {"step": 2, "solved": top}]).axes[0].get_ylim()[1]
        assert 100 * top <= limit <= 100


@pytest.mark.parametrize("rows", [UPDATES + EVALUATIONS, UPDATES[:1], EVALUATIONS[:1], EVALUATIONS, UPDATES[:5]])
def test_the_file_is_a_png_of_fixed_size_and_the_same_each_time(tmp_path, rows):
    run = write_run(tmp_path / "run", rows)
    path = report.write_curve(run)
    assert path == run / "curve.png"
    pixels = image.imread(path)
    assert pixels.shape == (600, 800, 4)
    assert pixels[..., :3].std() > 0.01  # not a blank sheet
    assert report.write_curve(run, tmp_path / "other.png").read_bytes() == path.read_bytes()


def test_the_users_settings_neither_matter_nor_change(tmp_path):
    run = write_run(tmp_path, UPDATES)
    expected = report.write_curve(run).read_bytes()
    with matplotlib.rc_context({"font.size": 30, "savefig.bbox": "tight", "axes.facecolor": "black"}):
        assert report.write_curve(run, tmp_path / "other.png").read_bytes() == expected
        assert matplotlib.rcParams["font.size"] == 30


def test_no_window_system_is_touched(tmp_path):
    run = write_run(tmp_path, UPDATES)
    program = "import sys; from minidrl import report; report.write_curve(sys.argv[1]); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True)
    assert "matplotlib.backends.backend_agg" in result.stdout.split()
    assert "matplotlib.pyplot" not in result.stdout.split()


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="got no line with a solved rate"):
        report.draw_curve([{"step": 1, "reward": 0.5}])


# -------------------------------------------------------------------------------------------------------------- tables


def test_markdown_table():
    rows = [{"name": "a|b", "value": 0.123456, "n": 3}, {"name": None, "n": 12, "unused": 1}]
    assert tables.markdown_table(rows, ["name", "value", "n"]) == (
        "| name |  value |   n |\n| ---- | -----: | --: |\n| a\\|b | 0.1235 |   3 |\n|      |        |  12 |"
    )


def test_a_column_in_which_one_cell_is_text_is_a_column_of_text():
    assert tables.markdown_table([{"a": 1}, {"a": "none"}], ["a"]).splitlines()[1:] == ["| ---- |", "| 1    |", "| none |"]


def test_a_column_of_means_and_ranges_is_a_column_of_numbers():
    assert tables.markdown_table([{"a": "1.5 [1, 2]"}, {"a": "2.0"}], ["a"]).splitlines()[1] == "| ---------: |"


def test_a_table_without_rows_has_a_header():
    assert tables.markdown_table([], ["a", "b"]) == "| a   | b   |\n| --- | --- |"
