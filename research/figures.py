"""Figures of a study: learning curves, what the updates were like, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, PercentFormatter

from minidrl.run import intervals
from minidrl.run.report import BLUE, GRID, INK, ORANGE, STEPS, style, write_png
from research.ledger import PHASES, Courses, Group, course, groups, read_courses, read_ledger

# Okabe and Ito's colours, which the colour-blind tell apart, with a dark one for their yellow; and
# for those who see none four dashes, first without and then with a marker.
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", INK)
DASHES, MARKERS = ("-", "--", "-.", ":") * 2, ("",) * 4 + ("o",) * 4
GREYS, HATCHES = ("#444444", "#888888", "#C4C4C4"), ("", "////", "....")  # of the phases
PANELS = {"grad_norm": "gradient norm", "ratio_std": "spread of the ratio (std)"}
PANELS |= {"clip_fraction": "clipped", "entropy": "entropy (nats)"}
IN_PERCENT = ("clip_fraction",)
WIDE, DECADES = ("grad_norm", "ratio_std"), 30  # logarithmic where largest over smallest is more
LINES = 8  # of a panel


def write_figures(curves: str | Path, ledger: str | Path, study: str, folder: str | Path) -> list[Path]:
    """Draw a study to ``folder``: STUDY-UPDATES.png for each number of updates a rollout.

    Methods without a cell that finished have no line. Where there are more than eight, the next
    ones are in STUDY-UPDATES-2.png, and so on, best first, all with the same axis. The PNGs are to
    be shown 800 pixels wide.
    Raises: ValueError as ``read_ledger``, ``groups`` and ``course`` do.
    """
    found = [group for group in groups(read_ledger(ledger), study) if group.ended]
    courses, written = read_courses(curves, study), []
    Path(folder).mkdir(parents=True, exist_ok=True)
    names = sorted({group.method for group in found})
    for updates in dict.fromkeys(group.updates for group in found):
        same = [group for group in found if group.updates == updates]
        highest = max(_highest(course(courses, group.cells, "held_out")) for group in same)
        for number, part in enumerate(_parts(same), 1):
            # A method has one colour in all figures, where there are colours for all methods.
            known = names if len(names) <= LINES else [group.method for group in part]
            lines = {known.index(group.method): group for group in part}
            title = f"{study}, updates a rollout: {updates}"
            name = f"{study}-{updates}{f'-{number}' if number > 1 else ''}.png"
            written.append(write_png(draw(lines, courses, title, highest), Path(folder) / name))
    return written


def _highest(values: Mapping[int, list[float]]) -> float:
    return max(map(fmean, values.values()), default=0.0)


def _parts(found: Sequence[Group]) -> list[Sequence[Group]]:
    """As few parts as there can be, of nearly equal length."""
    length = math.ceil(len(found) / math.ceil(len(found) / LINES))
    return [found[i : i + length] for i in range(0, len(found), length)]


def draw(lines: Mapping[int, Group], courses: Courses, title: str, highest: float = 1.0) -> Figure:
    """At most eight groups: held-out curves with 95 % bands, updates in four panels, costs.

    ``lines``: the groups by the number of their colour. ``highest``: the solved rate, as a
    fraction, that the axis has room for.
    """
    with style():
        figure = Figure(figsize=(8, 11), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        # Two parts, as the names at the bars would narrow all panels.
        top, bottom = figure.subfigures(2, 1, height_ratios=(8.4 - 0.16 * len(lines), 0.8 + 0.16 * len(lines)))
        places = [["held_out"] * 2, ["grad_norm", "ratio_std"], ["clip_fraction", "entropy"]]
        axes = top.subplot_mosaic(places, height_ratios=(2, 1, 1))
        _draw_held_out(axes["held_out"], lines, courses, highest)
        for column, label in PANELS.items():
            _draw_panel(axes[column], lines, courses, column, label)
        legend = {"frameon": False, "handlelength": 4}
        labels = axes["held_out"].get_legend_handles_labels()
        where = {"loc": "outside upper center", "ncols": 2}
        top.legend(*labels, title=title, title_fontsize="large", **where, **legend)
        left, right = bottom.subplots(1, 2, sharey=True)
        _draw_bars(left, list(lines.values()), "seconds")
        _draw_bars(right, list(lines.values()), "calls")
        labels = left.get_legend_handles_labels()
        bottom.legend(*labels, loc="outside lower center", ncols=3, **legend)
    return figure


def _draw_held_out(axes: Axes, lines: Mapping[int, Group], courses: Courses, highest: float) -> None:
    before = 100 * fmean(group.mean("before") for group in lines.values())
    axes.axhline(before, color=INK, linewidth=0.8, zorder=1)
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": "small"}
    axes.text(1, before, " base", **beside)
    for number, group in lines.items():
        values = course(courses, group.cells, "held_out")
        label = f"{group.name}, {len(group.ended)} of {len(group.report)} seeds"
        _draw_line(axes, values, number, label, 100)
        bands = {n: intervals.mean_interval(v) for n, v in values.items() if len(v) > 1}
        low, high = ([100 * band[end] for band in bands.values()] for end in (1, 2))
        axes.fill_between(list(bands), low, high, color=COLOURS[number], alpha=0.13, linewidth=0)
    axes.set_ylim(0, min(100, max(125 * highest, 5)))
    _finish(axes, "held-out puzzles solved: mean over seeds, 95 % band", percent=True)


def _draw_panel(axes: Axes, lines: Mapping[int, Group], courses: Courses, column: str, label: str) -> None:
    scale = 100 if column in IN_PERCENT else 1
    for number, group in lines.items():
        _draw_line(axes, course(courses, group.cells, column), number, group.name, scale)
    drawn = [y for line in axes.get_lines() for y in line.get_ydata()]
    if not drawn:
        text = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "no method here has one", **text)
    positive = [y for y in drawn if y > 0]
    if column in WIDE and positive and max(positive) > DECADES * min(positive):
        if len(positive) == len(drawn):
            axes.set_yscale("log", subs=[])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        else:  # 0 is drawn, too
            floor = max(min(positive), 1e-6 * max(positive))
            axes.set_yscale("symlog", linthresh=floor)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, None if positive else 1)
        axes.yaxis.set_major_locator(MaxNLocator("auto", steps=STEPS))
    _finish(axes, label, percent=column in IN_PERCENT)


def _draw_line(axes: Axes, values: Mapping[int, list[float]], number: int, label: str, scale: float) -> None:
    means = {step: scale * fmean(found) for step, found in values.items() if found}
    if means:
        drawn = {
            "color": COLOURS[number],
            "linestyle": DASHES[number],
            "marker": MARKERS[number],
            "markersize": 4,
            "clip_on": False,
        }
        axes.plot(list(means), list(means.values()), label=label, **drawn)


def _draw_bars(axes: Axes, found: Sequence[Group], of: str) -> None:
    # Phases of a run, one after the other, means over seeds.
    ends = [0.0] * len(found)
    for phase, colour, hatch in zip(PHASES, GREYS, HATCHES, strict=True):
        widths = [group.mean(f"{of}_{phase}") or 0.0 for group in found]
        drawn = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axes.barh(range(len(found)), widths, left=ends, label=phase, **drawn)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(range(len(found)), [group.name for group in found])
    axes.set_ylim(len(found) - 0.5, -0.5)  # the first at the top
    axes.set_xlabel("seconds a run" if of == "seconds" else "network calls a run")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=STEPS))
    axes.spines[["top", "right"]].set_visible(False)


def _finish(axes: Axes, label: str, percent: bool) -> None:
    axes.set_title(label, fontsize="medium", loc="left")
    axes.set_xlabel("rollouts")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=STEPS))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(symbol=" %"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
