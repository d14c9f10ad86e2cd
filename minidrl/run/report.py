"""Figures and tables of what a run writes.

    metrics.jsonl   one JSON object a line. An update has {"step", "solved", "reward", "seconds",
                    ...}, a held-out evaluation {"step", "eval/solved", "eval/temperature"}; both
                    may share a line. `solved` is a fraction, `seconds` the time since the start of
                    the run.
    summary.json    one JSON object: method, seed, steps, seconds, solved_before, solved_after
                    (fractions), ...

Nothing here needs a display, and matplotlib's global state is not touched.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidrl.run import files, untrusted
from minidrl.run.launch import tell

if TYPE_CHECKING:  # whoever draws imports it: nothing else needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, INK, GRID = "#0072B2", "#D55E00", "#333333", "#E4E4E4"
STEPS = (1, 2, 5, 10)  # distances between ticks, times a power of ten
MARKERS = "oD^sv"  # one for each evaluation temperature, lowest first
# From so many seconds on: the seconds of a unit, and its name.
UNITS = ((2 * 3600, 3600, "hours"), (10 * 60, 60, "minutes"), (0, 1, "seconds"))

STYLE = {
    "font.size": 11,
    "axes.labelsize": 12,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "legend.fontsize": 10,
}

CURVE = "curve.png"
SUMMARY = {"method": untrusted.TEXT, "seed": untrusted.whole(-untrusted.WHOLE, untrusted.WHOLE)}
SUMMARY |= {"steps": untrusted.whole(1, untrusted.WHOLE), "seconds": untrusted.FROM_0}
SUMMARY |= dict.fromkeys(("solved_before", "solved_after"), untrusted.SHARE)


# Of a line of metrics.jsonl; the other values are numbers, finite or not.
METRICS = {"step": untrusted.whole(0, untrusted.WHOLE), "seconds": untrusted.FROM_0}
METRICS |= {"solved": untrusted.SHARE, "eval/solved": untrusted.SHARE}
METRICS |= {"eval/temperature": untrusted.FROM_0}


# ------------------------------------------------------------------------------------------ reading
def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of run/metrics.jsonl in order of writing.

    An unfinished last line, left by a run that was stopped, is not read.
    Raises: ValueError when there is no such file or another line is not a JSON object.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        got = f"{str(run)!r}, which holds no metrics.jsonl"
        raise ValueError(f"run: got {got}; allowed are folders written by train")
    # What follows the last newline is empty or unfinished.
    rows, lines = [], untrusted.decoded(path).split("\n")[:-1]
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_measured(line, f"{path} line {number}"))
    return rows


def _measured(line: str, where: str) -> dict[str, Any]:
    row = _json_object(line, where)
    untrusted.check(row, METRICS, where)
    for key, value in row.items():
        whole = type(value) is int and abs(value) < untrusted.WHOLE
        if not whole and not isinstance(value, float):
            raise ValueError(f"{where} has {key} {untrusted.brief(value)}; allowed numbers")
    return row


def read_summary(run: str | Path) -> dict[str, Any]:
    """run/summary.json.

    Raises: ValueError when it is missing, is not a JSON object, lacks a required key, or has a
    value that is not allowed.
    """
    path = Path(run) / "summary.json"
    if not path.is_file():
        got = f"{str(run)!r}, which holds no summary.json"
        raise ValueError(f"run: got {got}; allowed are folders of finished runs")
    summary = _json_object(untrusted.text(path), str(path))
    missing = ", ".join(key for key in SUMMARY if summary.get(key) is None)
    if missing:
        raise ValueError(f"{path}: got no {missing}; required are {', '.join(SUMMARY)}")
    untrusted.check(summary, SUMMARY, str(path))
    return summary


def series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of `key`, in order of the step.

    A step that was written twice, before a stop and after the resumption, counts once, with its
    last value.
    """
    values = {row["step"]: row[key] for row in rows if "step" in row and _finite(row.get(key))}
    steps = sorted(values)
    return steps, [float(values[step]) for step in steps]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over the `width` values (an odd number) around each one; at the ends, of what exists."""
    if width < 1 or width % 2 == 0:
        raise ValueError(f"width: got {width}; allowed are odd numbers >= 1")
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


# ------------------------------------------------------------------------------------------- figure
def can_draw() -> bool:
    """True where matplotlib is there; a line on stderr where it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        tell("matplotlib is missing: no figure is drawn; pip install matplotlib")
        return False
    try:
        importlib.import_module("matplotlib")
    except ValueError:  # it reads the name of its backend when it is imported
        got = f"{os.environ.get('MPLBACKEND', '')!r}, which matplotlib does not know"
        tell(f"MPLBACKEND: got {got}; allowed agg, or leave it out: no figure is drawn")
        return False
    return True


def write_curve(run: str | Path, path: str | Path | None = None) -> Path:
    """Draw the solved rate of a run to `path` (default run/curve.png), which is returned.

    The PNG has 800 x 600 pixels and letters large enough to be read at 400 x 300.
    Raises: ValueError when metrics.jsonl is missing, is malformed, or has no solved rate.
    """
    rows, path = read_metrics(run), Path(path or Path(run) / CURVE)
    return write_png(draw_curve(rows), path)


def write_png(figure: Figure, path: Path) -> Path:
    """The figure as a PNG at `path`, which is returned."""
    with style():
        figure.savefig(drawn := io.BytesIO(), format="png")
    files.write(path, drawn.getvalue())
    return path


def draw_curve(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The solved rate against the number of updates, from the lines of metrics.jsonl.

    Light dots are training rollouts, the line is their running mean, big markers are held-out
    evaluations, a marker for each temperature. The upper axis shows the time where the lines have
    it and it increases. Raises: ValueError when no line has a solved rate.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4, 3), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        drawn = _draw_training(axes, rows) + _draw_evaluations(axes, rows)
        if not drawn:
            got, allowed = "no line with a solved rate", '"solved" and "eval/solved"'
            raise ValueError(f"metrics.jsonl: got {got}; allowed are {allowed}")
        _finish(axes, rows, drawn)
    return figure


@contextmanager
def style() -> Iterator[None]:
    """Our settings, whatever the user's matplotlibrc says; what was set before comes back."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _draw_training(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Dots and running mean of the training rollouts; returns the points (step, percent)."""
    steps, solved = series(rows, "solved")
    if not steps:
        return []
    percent = [100 * value for value in solved]
    width = 2 * (len(steps) // 24) + 1  # about a twelfth of the run
    alpha = min(0.5, max(0.08, 75 / len(steps)))  # many dots overlap and must not hide the line
    name, dots = "training rollouts", {"s": 14, "color": BLUE, "alpha": alpha, "linewidths": 0}
    axes.scatter(steps, percent, label=name if width == 1 else None, zorder=2, **dots)
    if width > 1:
        line = {"color": BLUE, "linewidth": 2.2, "zorder": 3}
        axes.plot(steps, running_mean(percent, width), label=name, **line)
    return list(zip(steps, percent, strict=True))


def _draw_evaluations(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """A marker for each held-out evaluation; returns the points (step, percent)."""
    rows = [row for row in rows if _finite(row.get("eval/solved"))]
    known = {row.get("eval/temperature") for row in rows}
    line = {"color": ORANGE, "linewidth": 1.2, "linestyle": (0, (1, 1.5))}
    line |= {"zorder": 4, "clip_on": False}
    filled = {"markersize": 9, "markeredgecolor": "white"}
    hollow = {"markersize": 8, "markerfacecolor": "white", "markeredgewidth": 1.8}
    points = []
    for number, t in enumerate(sorted(known, key=lambda t: -1.0 if t is None else t)):
        own = [row for row in rows if row.get("eval/temperature") == t]
        steps, solved = series(own, "eval/solved")
        percent = [100 * value for value in solved]
        label = "held-out" if t is None else f"held-out, T = {t:g}"
        marker = {"marker": MARKERS[number % len(MARKERS)], **(hollow if number else filled)}
        axes.plot(steps, percent, label=label, **line, **marker)
        points += zip(steps, percent, strict=True)
    return points


def _finish(
    axes: Axes, rows: Sequence[Mapping[str, Any]], drawn: list[tuple[float, float]]
) -> None:
    """Axes that start at 0 percent, their labels, grid, legend, and the time along the top."""
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
    if not _time_axis(axes, *series(rows, "seconds")):
        axes.spines["top"].set_visible(False)


def _time_axis(axes: Axes, steps: list[float], seconds: list[float]) -> bool:
    """Ticks at round times along the top, where updates reach them; False without times."""
    from matplotlib.ticker import MaxNLocator

    if steps and steps[0] > 0 and seconds[0] > 0:  # the clock started before any update
        steps, seconds = [0, *steps], [0.0, *seconds]
    if len(steps) < 2 or any(b <= a for a, b in zip(seconds, seconds[1:], strict=False)):
        return False
    unit, name = next((unit, name) for start, unit, name in UNITS if seconds[-1] >= start)
    ticks = MaxNLocator(5, steps=STEPS).tick_values(0, seconds[-1] / unit)
    ticks = [t for t in ticks if seconds[0] <= t * unit <= seconds[-1]]
    top = axes.twiny()
    places = [_interpolate(t * unit, seconds, steps) for t in ticks]
    top.set_xticks(places, labels=[f"{t:g}" for t in ticks])
    top.set_xlim(axes.get_xlim())  # last: ticks may widen the limits
    top.set_xlabel(name)
    top.tick_params(length=3)
    top.spines["right"].set_visible(False)
    return True


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Piecewise linear y at x, for increasing xs that enclose x."""
    i = next(i for i in range(1, len(xs)) if x <= xs[i])
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


# ------------------------------------------------------------------------------------------ numbers
def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got {text.strip()[:40]!r}; allowed is a JSON object") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {type(value).__name__}; allowed is a JSON object")
    return value
