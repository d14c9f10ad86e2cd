"""What the studies show: tables, a leaderboard and a figure from the ledger and the curves.

Runs of the report share their seeds: methods are compared by differences within a seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from minidrl.run.report import BLUE, INK, ORANGE, STYLE
from research import stats
from research.ledger import Courses, Group, course, groups, rate_text, read_courses, read_ledger, single

LEVEL = 0.05  # of the adjusted p-values
BUDGETS = (50_000, 100_000, 250_000, 500_000, 750_000)  # network calls, of the leaderboard
# Okabe and Ito's colours, which the colour-blind tell apart, with a dark one for their yellow.
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", INK)


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; a float has four digits, and nothing stands where there is no number."""
    lines = [list(map(str, frame.columns))]
    for row in frame.astype(object).itertuples(index=False):
        lines.append([(f"{x:.4g}" if x == x else "") if isinstance(x, float) else str(x) for x in row])
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) + " |" for line in lines)


def percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f}"


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval in percent."""
    if len(values) < 2:
        return "".join(f"{percent(value)} (one seed)" for value in values)
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in stats.mean_interval(values)))


def points(test: stats.Paired) -> str:
    """Mean difference and its 95 % interval in points, of fractions."""
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in test[:3]))


# ------------------------------------------------------------------------------------------- a study


def study_report(ledger: str | Path, curves: str | Path, study: str) -> str:
    """A study in Markdown: a line for each method and number of updates, then all their pairs."""
    found, courses = groups(read_ledger(ledger), study), read_courses(curves, study)
    rows = [row for group in found for row in (*group.choose, *group.report, *group.unchosen)]
    failed = [row for row in rows if row["status"] != "finished"]
    judged = ", ".join(dict.fromkeys(row["judged"] for row in rows))
    compared = pairs(found)
    tested = compared[compared["p (Holm)"].notna()] if len(compared) else compared
    apart = int((tested["p (Holm)"] < LEVEL).sum()) if len(tested) else 0
    shown = compared.assign(**{"p (Holm)": compared["p (Holm)"].map(lambda p: "< 0.0001" if p < 1e-4 else f"{p:.4f}")})
    failures = "".join(f"\n- {row['cell']} {row['status']}{last(courses, row['cell'])}" for row in failed)
    return f"""## {study}

{len(rows)} runs, of which {len(failed)} failed. Held-out puzzles: {judged}. Solved rates in percent; after: the \
mean over seeds [95 % interval, Student]; tried: the mean of each rate under the seeds of the choice, where a run \
that failed counts 0; an end: the rate taken is the smallest or the largest of these, and a better one may lie \
beyond; training: rollouts of the last tenth; calls: network calls of a run in forward equivalents.

{markdown(lines(found))}

{apart} of {len(tested)} pairs of methods differ significantly (p < {LEVEL:g} after Holm over all these pairs). A - B in \
points, over the seeds that both ended [95 % interval of this pair alone]; Student's paired test.

{markdown(shown)}
{failures}"""


def last(courses: Courses, cell: str) -> str:
    """Where a run that failed was evaluated last."""
    if cell not in courses:
        return ""
    row = courses[cell].iloc[-1]
    return f" (last held out {percent(row['held_out'])} at rollout {row['step']})"


def lines(found: Sequence[Group]) -> pd.DataFrame:
    """A line for each method and number of updates."""
    return pd.DataFrame(
        {
            "method": group.name,
            "updates": group.updates,
            "rate": rate_text(group.rate) + " (an end)" * group.at_an_end if group.rate else "",
            "tried": ", ".join(f"{rate_text(rate)}: {percent(mean)}" for rate, mean in group.tried.items()),
            "before": percent(group.mean("before")),
            "after": interval(group.values("after")) + (" collapsed" if group.collapsed else ""),
            "seeds": f"{len(group.ended)} of {len(group.report)}",
            "greedy after": percent(group.mean("greedy_after")),
            "training": percent(group.mean("train_end")),
            "calls": f"{group.mean('calls') or 0:,.0f}",
            "seconds": f"{group.mean('seconds') or 0:,.0f}",
        }
        for group in found
    )


def pairs(found: Sequence[Group], column: str = "after") -> pd.DataFrame:
    """All pairs with one number of updates; p-values adjusted (Holm) over all that have one."""
    rows = []
    for a, b in itertools.combinations([group for group in found if group.ended], 2):
        if a.updates != b.updates:
            continue
        seeds = sorted(a.ended.keys() & b.ended.keys())
        row = {"updates": a.updates, "A": a.name, "B": b.name, "seeds": len(seeds), "A - B": "", "p (Holm)": math.nan}
        if len(seeds) > 1:
            test = stats.paired(*([group.ended[seed][column] for seed in seeds] for group in (a, b)))
            row |= {"A - B": points(test), "p (Holm)": test.p}
        rows.append(row)
    frame = pd.DataFrame(rows, columns=["updates", "A", "B", "seeds", "A - B", "p (Holm)"])
    tested = frame["p (Holm)"].notna()
    frame.loc[tested, "p (Holm)"] = stats.holm(frame.loc[tested, "p (Holm)"].tolist())
    return frame.sort_values("p (Holm)", kind="stable")


# -------------------------------------------------------------------------------------- leaderboard


def leaderboard(ledger: str | Path, curves: str | Path, goal: float, studies: Mapping[str, str]) -> pd.DataFrame:
    """What each method solves once it has spent so many network calls, and what it spends until the
    mean over its seeds first comes to ``goal``.

    ``studies``: names of studies that may be compared, with the order in which each decodes. They
    share one base and its held-out puzzles. Compare lines of one study: studies differ in more than
    the method. Runs differ in length, so that a blank at a budget says nothing.
    """
    frame = read_ledger(ledger)
    reported = frame[frame["study"].isin(list(studies)) & (frame["stage"] == "report")]
    for column in ("bed", "judged"):
        single(column, set(reported[column]), "the leaderboard")
    rows = []
    for study in reported["study"].unique():
        courses = read_courses(curves, study)
        rows += [board_line(group, courses, goal, study, studies[study]) for group in groups(frame, study) if group.report]
    return pd.DataFrame(sorted(rows, key=lambda row: (row["order"], row["study"], -float(row["at the end"] or 0))))


def board_line(group: Group, courses: Courses, goal: float, study: str, order: str) -> dict[str, Any]:
    own = group.report[0]["options"].get("method", group.method)
    name = group.name if own == group.method or group.name != group.method else f"{group.method} ({own})"
    row = {"order": order, "study": study, "method": name, "updates": group.updates, "rate": rate_text(group.rate)}
    row |= {"seeds": f"{len(group.ended)} of {len(group.report)}", "before": percent(group.mean("before"))}
    row |= {f"{budget:,}": interval(solved_at(courses, group, budget)) for budget in BUDGETS}
    spent = reached(courses, group.cells, goal)
    row |= {"at the end": percent(group.mean("after")), "greedy": percent(group.mean("greedy_after"))}
    return row | {f"calls to {percent(goal)}": "" if spent is None else f"{spent:,.0f}"}


def solved_at(courses: Courses, group: Group, budget: float) -> list[float]:
    """Of each seed the held-out rate after ``budget`` network calls, linear between evaluations.

    Empty where a seed spent less, or failed.
    """
    curves = [courses[cell] for cell in group.cells]
    if len(curves) < len(group.report) or any(c["calls"].iloc[-1] < budget for c in curves):
        return []
    return [float(np.interp(budget, c["calls"], c["held_out"])) for c in curves]


def reached(courses: Courses, cells: Sequence[str], goal: float) -> float | None:
    """Network calls when the mean over runs of the held-out rate first comes to ``goal``, linear
    between the evaluations around it; None where it stays below."""
    if not cells:
        return None
    held, calls = ([fmean(v) for v in course(courses, cells, column).values()] for column in ("held_out", "calls"))
    for i, value in enumerate(held):
        if value >= goal - 1e-12:  # for rounding
            return calls[0] if i == 0 else float(np.interp(goal, held[i - 1 : i + 1], calls[i - 1 : i + 1]))
    return None


# --------------------------------------------------------------------------------------------- figure


def write_figures(ledger: str | Path, curves: str | Path, study: str, folder: Path) -> Iterator[Path]:
    """Held-out curves with 95 % bands: STUDY-UPDATES.png for each number of updates a rollout."""
    found, courses = [group for group in groups(read_ledger(ledger), study) if group.ended], read_courses(curves, study)
    folder.mkdir(parents=True, exist_ok=True)
    for updates in dict.fromkeys(group.updates for group in found):
        with rc_context(STYLE):
            figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
            draw(figure.add_subplot(), [group for group in found if group.updates == updates], courses)
            if len({group.updates for group in found}) > 1:
                figure.suptitle(f"{updates} updates a rollout")
        FigureCanvasAgg(figure).print_png(path := folder / f"{study}-{updates}.png")
        yield path


def draw(axes: Any, found: Sequence[Group], courses: Courses) -> None:
    """A line for each group, over its rollouts."""
    axes.axhline(fmean(group.mean("before") for group in found), color=INK, lw=0.8, label="before RL")
    for i, group in enumerate(found):
        colour, dash = COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--"
        values = {step: v for step, v in course(courses, group.cells, "held_out").items() if v}
        axes.plot(
            list(values), list(map(fmean, values.values())), dash, color=colour, label=f"{group.name} ({len(group.cells)})"
        )
        bands = {step: stats.mean_interval(v) for step, v in values.items() if len(v) > 1}
        axes.fill_between(
            list(bands),
            *zip(*(b[1:] for b in bands.values()), strict=True) if bands else ([], []),
            color=colour,
            alpha=0.13,
            lw=0,
        )
    axes.set(xlabel="rollouts", ylabel="held-out puzzles solved", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", title="method (seeds); band: 95 %", loc="lower right")
