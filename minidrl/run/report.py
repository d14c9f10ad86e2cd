"""curve.png: the solved rate of a run, from its metrics.jsonl.

Light dots are training rollouts, the line is their running mean, big markers are held-out
evaluations. Nothing here needs a display, and matplotlib's global state is not touched.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minidrl.run import folders

if TYPE_CHECKING:  # it takes a second to import, and only whoever draws needs it
    from matplotlib.figure import Figure

BLUE, ORANGE, INK, GRID = "#0072B2", "#D55E00", "#333333", "#E4E4E4"
STYLE = {"font.size": 11, "axes.labelsize": 12, "axes.edgecolor": INK, "axes.labelcolor": INK}
STYLE |= {"text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.8}
STYLE |= {"legend.fontsize": 10}


def write_curve(run: str | Path) -> Path:
    """Draw the solved rate of a run to curve.png in its folder; returns the path."""
    figure, path = draw_curve(folders.read_metrics(run)), Path(run) / "curve.png"
    figure.savefig(drawn := io.BytesIO(), format="png")
    folders.write(path, drawn.getvalue())
    return path


def percents(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], np.ndarray]:
    """Steps and finite values of ``key`` in percent, the last value of each step."""
    known = {row["step"]: row[key] for row in rows if math.isfinite(row.get(key, math.nan))}
    return sorted(known), 100 * np.array([known[step] for step in sorted(known)])


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over the ``width`` values (an odd number) around each; at the ends, of what exists."""
    ones = np.ones(width)
    inside = slice(width // 2, width // 2 + len(values))
    return np.convolve(values, ones)[inside] / np.convolve(np.ones(len(values)), ones)[inside]


def draw_curve(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The solved rate against the number of steps, from the lines of metrics.jsonl; 800 x 600."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with rc_context(STYLE):  # what was set before comes back
        figure = Figure(figsize=(4, 3), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        steps, solved = percents(rows, "solved")
        if steps:
            alpha = min(0.5, max(0.08, 75 / len(steps)))  # many dots must not hide the line
            axes.scatter(steps, solved, s=14, color=BLUE, alpha=alpha, linewidths=0)
            mean = running_mean(solved, 2 * (len(steps) // 24) + 1)  # about a twelfth of the run
            axes.plot(steps, mean, color=BLUE, linewidth=2.2, label="training rollouts")
        marker = {"marker": "o", "markersize": 9, "markeredgecolor": "white", "clip_on": False}
        held_out = percents(rows, "eval/solved")
        axes.plot(*held_out, ":", color=ORANGE, label="held-out", zorder=4, **marker)
        highest = max([*solved, *held_out[1]], default=0.0)
        axes.set_ylim(0, 100 if highest > 70 else max(1.25 * highest, 5))
        axes.set(xlabel="steps", ylabel="solved")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=" %"))
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, handlelength=1.4)
    return figure
