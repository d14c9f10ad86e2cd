"""curve.png: the solved rate of a run, from its metrics.jsonl.

Light dots are training rollouts, the line is their running mean, big markers are held-out
evaluations, a marker for each temperature. The upper axis is the time. Nothing here needs a
display, and matplotlib's global state is not touched.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minidrl.run import folders
from minidrl.run.folders import read_metrics

if TYPE_CHECKING:  # whoever draws imports it: nothing else needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, INK, GRID = "#0072B2", "#D55E00", "#333333", "#E4E4E4"
STEPS = (1, 2, 5, 10)  # distances between ticks, times a power of ten
MARKERS = "oD^sv"  # one for each evaluation temperature, lowest first
# From so many seconds on: the seconds of a unit, and its name.
UNITS = ((2 * 3600, 3600, "hours"), (10 * 60, 60, "minutes"), (0, 1, "seconds"))
STYLE = {"font.size": 11, "axes.labelsize": 12, "axes.edgecolor": INK, "axes.labelcolor": INK}
STYLE |= {"text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.8}
STYLE |= {"legend.fontsize": 10}


def can_draw() -> bool:
    """True where matplotlib is there; a remark where it is not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    said = "matplotlib is missing: no figure is drawn; pip install matplotlib"
    logging.getLogger("minidrl").warning(said)
    return False


def write_curve(run: str | Path, path: str | Path | None = None) -> Path:
    """Draw the solved rate of a run to ``path`` (default run/curve.png), which is returned."""
    figure, path = draw_curve(read_metrics(run)), Path(path or Path(run) / "curve.png")
    figure.savefig(drawn := io.BytesIO(), format="png")
    folders.write(path, drawn.getvalue())
    return path


def style() -> Any:
    """Our settings, inside ``with``; what was set before comes back."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of ``key``, in order of the step, the last value of each."""
    values = {row["step"]: float(row[key]) for row in rows if math.isfinite(row.get(key, math.nan))}
    return sorted(values), [values[step] for step in sorted(values)]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over the ``width`` values (an odd number) around each; at the ends, of what exists."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]


def draw_curve(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The solved rate against the number of updates, from the lines of metrics.jsonl.

    800 x 600 pixels, with letters large enough to be read at 400 x 300. ValueError without a rate.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4, 3), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        drawn = _draw_training(axes, rows) + _draw_evaluations(axes, rows)
        if not drawn:
            raise ValueError("metrics.jsonl: got no line with a solved rate")
        _finish(axes, drawn)
        _time_axis(axes, *series(rows, "seconds"))
    return figure


def _draw_training(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Dots and running mean of the training rollouts; returns the points (step, percent)."""
    steps, solved = series(rows, "solved")
    percent = [100 * value for value in solved]
    width = 2 * (len(steps) // 24) + 1  # about a twelfth of the run
    alpha = min(0.5, max(0.08, 75 / max(1, len(steps))))  # many dots must not hide the line
    name, dots = "training rollouts", {"s": 14, "color": BLUE, "alpha": alpha, "linewidths": 0}
    if steps:
        axes.scatter(steps, percent, label=name if width == 1 else None, zorder=2, **dots)
    if width > 1:
        line = {"color": BLUE, "linewidth": 2.2, "zorder": 3}
        axes.plot(steps, running_mean(percent, width), label=name, **line)
    return list(zip(steps, percent, strict=True))


def _draw_evaluations(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """A marker for each held-out evaluation; returns the points (step, percent)."""
    rows = [row for row in rows if "eval/solved" in row]
    known = {row.get("eval/temperature", -1.0) for row in rows}
    line = {"color": ORANGE, "linewidth": 1.2, "linestyle": (0, (1, 1.5))}
    line |= {"zorder": 4, "clip_on": False}
    filled = {"markersize": 9, "markeredgecolor": "white"}
    hollow = {"markersize": 8, "markerfacecolor": "white", "markeredgewidth": 1.8}
    points = []
    for number, t in enumerate(sorted(known)):
        own = [row for row in rows if row.get("eval/temperature", -1.0) == t]
        steps, solved = series(own, "eval/solved")
        percent = [100 * value for value in solved]
        label = "held-out" if t < 0 else f"held-out, T = {t:g}"
        marker = {"marker": MARKERS[number % len(MARKERS)], **(hollow if number else filled)}
        axes.plot(steps, percent, label=label, **line, **marker)
        points += zip(steps, percent, strict=True)
    return points


def _finish(axes: Axes, drawn: list[tuple[float, float]]) -> None:
    """Axes that start at 0 percent, their labels, grid and legend."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    first, last = min(drawn)[0], max(drawn)[0]
    highest = max(percent for _, percent in drawn)
    margin = 0.02 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    axes.set_ylim(0, 100 if highest > 70 else max(1.25 * highest, 5))
    axes.set_xlabel("updates")
    axes.set_ylabel("solved")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=STEPS))
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=" %"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False, handlelength=1.4, borderaxespad=0.2, labelspacing=0.35)


def _time_axis(axes: Axes, steps: list[float], seconds: list[float]) -> None:
    """The time along the top, where the log has one that goes on."""
    from matplotlib.ticker import MaxNLocator

    if steps and steps[0] > 0 and seconds[0] > 0:  # the clock started before any update
        steps, seconds = [0, *steps], [0.0, *seconds]
    if len(steps) < 2 or np.diff(seconds).min() <= 0:
        axes.spines["top"].set_visible(False)
        return
    unit, name = next((unit, name) for start, unit, name in UNITS if seconds[-1] >= start)
    times = np.array(seconds) / unit
    there, back = (lambda x: np.interp(x, steps, times)), (lambda t: np.interp(t, times, steps))
    top = axes.secondary_xaxis("top", functions=(there, back))
    top.set_xlabel(name)
    top.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, prune="both"))  # none beyond the data
