"""docs/main_job.png, README's first figure, from results/: `python research/benchmarks/main_figure.py`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from minidrl.run import intervals
from minidrl.run.report import BLUE, INK, ORANGE, write_png
from research.ledger import course, groups, read_courses, read_ledger

ROOT = Path(__file__).parents[2]
LEDGER, CURVES = ROOT / "research" / "results" / "ledger.csv", ROOT / "results" / "curves.csv"
STUDY, BEST_DECODER = "main_job", 0.295
LINES = {"reinforce": ("RL (REINFORCE)", BLUE), "self-training": ("self-training", ORANGE)}


def draw() -> Figure:
    """Held-out puzzles against steps, mean and band over seeds, and the training rollouts of RL."""
    found = {group.method: group for group in groups(read_ledger(LEDGER), STUDY)}
    courses = read_courses(CURVES, STUDY)
    figure = Figure(figsize=(5.6, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for method, (label, colour) in LINES.items():
        cells = found[method].cells
        held_out = course(courses, cells, "held_out")
        bands = [intervals.mean_interval(values) for values in held_out.values()]
        axes.plot(list(held_out), [band[0] for band in bands], "o-", color=colour, ms=4, label=f"{label}, held-out puzzles")
        axes.fill_between(list(held_out), [b[1] for b in bands], [b[2] for b in bands], color=colour, alpha=0.15, lw=0)
    training = course(courses, found["reinforce"].cells, "training")
    training = {step: fmean(values) for step, values in training.items() if values}
    axes.plot(list(training), list(training.values()), ":", color=BLUE, label=f"{LINES['reinforce'][0]}, training rollouts")
    axes.axhline(BEST_DECODER, color=INK, lw=1, ls="--", label=f"best decoder of the base, {100 * BEST_DECODER:.1f} %")
    axes.set(xlabel="steps of 256 responses", ylabel="puzzles solved", ylim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    seeds = {len(group.cells) for group in (found[method] for method in LINES)}
    (count,) = seeds  # the bands of both lines are over as many runs
    band = Patch(color=INK, alpha=0.15, lw=0, label=f"bands: 95 % intervals of the mean, {count} seeds")
    axes.legend(handles=[*axes.get_legend_handles_labels()[0], band], frameon=False, fontsize=8, loc="lower right")
    return figure


if __name__ == "__main__":
    write_png(draw(), ROOT / "docs" / "main_job.png")
