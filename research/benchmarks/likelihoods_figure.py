"""docs/likelihoods.png, both samples of the study of likelihoods, from results/: `python research/benchmarks/likelihoods_figure.py`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, PercentFormatter

from minidrl.run import intervals
from minidrl.run.report import BLUE, INK, ORANGE, write_png
from research.ledger import Group, groups, read_ledger

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "research" / "results" / "ledger.csv"
SAMPLES = {
    "likelihoods": ("first sample, looked at three times", ORANGE, 0.16),
    "likelihoods_again": ("second sample, other seeds and puzzles", BLUE, -0.16),
}
GREEDY_BASE = {"likelihoods": 0.1953, "likelihoods_again": 0.1807}  # solved by the base, random order: 100 of 512, 185 of 1,024
PANELS = {"after": "temperature 1", "greedy_after": "greedy"}


def draw() -> Figure:
    """Solved at the end, mean and 95 % interval over seeds, of the methods of the second sample."""
    rows = read_ledger(LEDGER)
    found = {study: {group.method: group for group in groups(rows, study)} for study in SAMPLES}
    names = sorted(found["likelihoods_again"], key=lambda name: found["likelihoods_again"][name].mean("after"))
    figure = Figure(figsize=(7.2, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        for study, (label, colour, up) in SAMPLES.items():
            mark(axes, [found[study][name] for name in names], column, up, color=colour, label=label)
            base = GREEDY_BASE[study] if column == "greedy_after" else found[study]["gdpo"].mean("before")
            axes.axvline(base, color=colour, lw=1, ls="--")
        axes.set(title=title, xlabel="held-out puzzles solved", yticks=range(len(names)), yticklabels=names)
        axes.xaxis.set_major_locator(MultipleLocator(0.02))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="x", color=INK, alpha=0.15, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    labels = [f"{text}: mean and 95 % interval of 10 seeds; dashed: the base" for text in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=1, frameon=False, fontsize=8)
    return figure


def mark(axes: Axes, lines: list[Group], column: str, up: float, **how) -> None:
    """A mean with its interval for each line, ``up`` above its place."""
    ends = [intervals.mean_interval([row[column] for row in line.ended.values()]) for line in lines]
    sides = [[end.mean - end.low for end in ends], [end.high - end.mean for end in ends]]
    places = [place + up for place in range(len(lines))]
    axes.errorbar([end.mean for end in ends], places, xerr=sides, fmt="o", ms=4, capsize=2, lw=1.2, **how)


if __name__ == "__main__":
    write_png(draw(), ROOT / "docs" / "likelihoods.png")
