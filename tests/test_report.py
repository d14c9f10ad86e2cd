"""curve.png: what is drawn, in a file that is the same each time."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from minidrl.run import folders, report

UPDATES = [{"step": s, "solved": 0.2 + 0.001 * s, "seconds": 2.0 * s} for s in range(1, 101)]
EVALUATIONS = [{"step": s, "eval/solved": 0.3, "eval/temperature": 1.0} for s in (0, 100)]


def write_run(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_an_unfinished_last_line_is_not_read(tmp_path):
    run = write_run(tmp_path, UPDATES[:2])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "so')
    assert folders.read_metrics(run) == UPDATES[:2]


def test_a_step_that_was_written_twice_counts_once_and_what_is_not_finite_not_at_all():
    rows = [{"step": 2, "x": 1.0}, {"step": 1, "x": 5.0}, {"step": 2, "x": 3.0}, {"step": 3, "x": float("nan")}, {"step": 4}]
    steps, values = report.percents(rows, "x")
    assert (steps, list(values)) == ([1, 2], [500.0, 300.0])
    assert list(report.running_mean(np.array([1.0, 2.0, 6.0]), 3)) == [1.5, 3.0, 4.0]


@pytest.mark.parametrize("rows", [UPDATES + EVALUATIONS, UPDATES[:1], EVALUATIONS[:1]])
def test_the_file_is_a_png_of_fixed_size_and_the_same_each_time(tmp_path, rows):
    run = write_run(tmp_path / "run", rows)
    path = report.write_curve(run)
    pixels = image.imread(path)
    assert path == run / "curve.png" and pixels.shape == (600, 800, 4) and pixels[..., :3].std() > 0.01
    before = path.read_bytes()
    assert report.write_curve(run).read_bytes() == before
