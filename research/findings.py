"""What a grid of runs shows: tables and a leaderboard from its ledger and its curves.

Cells of the report share their seeds: methods are compared by differences within a seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from minidrl.run import intervals
from minidrl.run.tables import markdown_table
from research.ledger import (
    COLLAPSE,
    Courses,
    Group,
    course,
    groups,
    rate_text,
    read_courses,
    read_ledger,
    single,
)

LEVEL = 0.05  # of the adjusted p-values
MANY = 30  # pairs from which on the surest differences come first
GOALS = (0.1, 0.2)  # of the leaderboard, above the best decoder of the base
BUDGETS = (50_000, 100_000, 250_000, 500_000, 750_000)  # of its comparison, in network calls
SPENT = {"calls": "network calls", "updates": "updates", "seconds": "seconds"}
SPENT_IN_ALL, AT_THE_END, GREEDY = "calls spent", "at the end", "greedy, at the end"
FACTS = ("method", "rate", "updates", "seed", "steps", "before", "after", "calls")  # of one run
GOAL_HEAD = f"""## Until a goal

Spent until the mean over seeds is there for the first time (it may fall again); in brackets the \
lowest and highest of the seeds' own curves. A seed that failed or stayed below has "not \
reached", and one that failed is not in the mean. Calls spent: of the whole run, the mean over \
seeds. Runs differ in length: "not reached within" so many calls does not say what more would \
have done, and a longer run that got there is not thereby the better method. Lines that did not \
get there are sorted by where they end, which is no comparison at equal cost. Collapsed: the mean \
ends more than {100 * COLLAPSE:.0f} points below the base."""
WHO = ("study", "method", "responses a step", "updates a rollout", "rate")
COMMAND = "python -m minidrl compare research/studies/{study}.yaml --methods {method}"


# ------------------------------------------------------------------------------------------- tables
def study_report(ledger: str | Path, curves: str | Path, study: str, planned: Iterable[str] | None = None) -> str:
    """A study in Markdown: a line for each method and number of updates, then all their pairs.

    ``planned``: names of the cells that were to be run. Nothing that was planned or run is left
    out: what failed, and what was not run, is named.
    Raises: ValueError as ``read_ledger``, ``groups`` and ``course`` do.
    """
    found = groups(read_ledger(ledger), study, planned or ())
    courses = read_courses(curves, study)
    rows = [r for g in found for r in (*g.choose, *g.report, *g.unchosen)]
    failed = sum(row["status"] != "finished" for row in rows)
    absent = sum(len(group.absent) for group in found)
    said = {name: _listed(row[name] for row in rows) for name in ("judged", "bed", "version")}
    steps = _listed(row["steps"] for group in found for row in group.report) or "none"
    head = f"""{len(rows) + absent} cells: {len(rows) - failed} finished, {failed} failed, \
{absent} not run. Held-out puzzles: {said["judged"]}; bed {said["bed"]}; steps of a run of \
the report: {steps}; version {said["version"]}.

Solved rates in percent. After: the mean over seeds [95 % interval, Student]. Tried: the mean \
after of each rate under the seeds of the choice, where a failed cell counts 0. Training: rollouts \
of the last tenth. Calls (network calls, forward equivalents) and seconds: of a run, the mean. \
Collapsed: the mean ends more than {100 * COLLAPSE:.0f} points below the base."""
    lines = [_line(group, courses) for group in found]
    table = markdown_table(lines, list(lines[0]))
    return f"## {study}\n\n{head}\n\n{table}\n\n{_compared(found)}\n"


def _line(group: Group, courses: Courses) -> dict[str, str]:
    after = [row["after"] for row in group.ended.values()]
    tried = (f"{rate_text(rate)}: {_percent(mean)}" for rate, mean in group.tried.items())
    seeds = {row["seed"]: row["status"].partition(":")[0] for row in group.report}
    seeds |= {seed: _percent(row["after"]) for seed, row in group.ended.items()}
    return {
        "method": group.name,
        "updates": str(group.updates),
        "rate": rate_text(group.rate) if group.rate else "",
        "tried": ", ".join(tried),
        "before": _percent(group.mean("before")),
        "after": _mean(after) or _without(group),
        "each seed": ", ".join(f"{seed}: {text}" for seed, text in sorted(seeds.items())),
        "greedy after": _percent(group.mean("greedy_after")),
        "training": _percent(group.mean("train_end")),
        "calls": _count(group.mean("calls")),
        "seconds": _count(group.mean("seconds")),
        "notes": "; ".join(_notes(group, courses)),
    }


def _without(group: Group) -> str:
    # Why there is no mean.
    failed = any(row["status"] != "finished" for row in group.report)
    return "failed" if failed else "not evaluated" if group.report else "not run"


def _notes(group: Group, courses: Courses) -> list[str]:
    notes = []
    if group.collapsed:
        means = _means(courses, group.cells, "held_out")
        step = max(means, key=means.get)
        best = f"best {_percent(means[step])} at rollout {step}"
        notes.append(f"collapsed: {100 * group.fall:.1f} points below the base ({best})")
    for rate in sorted({row["rate"] for row in group.unchosen}):
        after = [row["after"] or 0.0 for row in group.unchosen if row["rate"] == rate]
        told = f"{len(after)} more at {rate_text(rate)}, not the best rate tried"
        notes.append(f"{told}: {_percent(fmean(after))}")
    highest = max(group.tried.values(), default=0.0)
    if group.report and group.tried and group.tried.get(group.rate, -1.0) < highest:
        notes.append("the rate is not the best one tried")
    for row in (*group.choose, *group.report):
        if row["status"] != "finished":
            last = courses.get(row["cell"], [])[-1:]
            at = [f" (last held out {_percent(r['held_out'])} at rollout {r['step']})" for r in last]
            notes.append(f"{row['cell']} {row['status']}{''.join(at)}")
        elif None in (row["before"], row["after"]):
            notes.append(f"{row['cell']} finished without a held-out evaluation")
    return notes + ([f"not run: {', '.join(group.absent)}"] if group.absent else [])


class Pair(NamedTuple):
    """Two groups with one number of updates, and their test over the seeds that both ended."""

    a: Group
    b: Group
    seeds: int
    found: intervals.Paired | None  # None for fewer than two seeds
    p: float = math.nan  # adjusted

    @property
    def apart(self) -> bool:
        return self.p < LEVEL


def after(row: Mapping[str, Any]) -> float:
    """Solved at the end of a run."""
    return row["after"]


def pairs(found: Sequence[Group], measure: Callable[[Mapping[str, Any]], float] = after) -> list[Pair]:
    """All pairs with one number of updates, by what ``measure`` reads of a run; p-values adjusted
    (Holm) over all that have one."""
    made = []
    for a, b in itertools.combinations([group for group in found if group.ended], 2):
        if a.updates == b.updates:
            seeds = sorted(a.ended.keys() & b.ended.keys())
            ends = ([measure(group.ended[seed]) for seed in seeds] for group in (a, b))
            made.append(Pair(a, b, len(seeds), intervals.paired(*ends) if seeds[1:] else None))
    adjusted = iter(intervals.holm([pair.found.p for pair in made if pair.found]))
    made = [pair._replace(p=next(adjusted)) if pair.found else pair for pair in made]
    if len(made) > MANY:
        made.sort(key=lambda pair: (pair.found is None, pair.p if pair.found else 0.0))
    return made


def _compared(found: Sequence[Group]) -> str:
    every = pairs(found)
    tested, apart = [p for p in every if p.found], [p for p in every if p.apart]
    healthy = sum(not (pair.a.collapsed or pair.b.collapsed) for pair in apart)
    text = f"{healthy} of {len(tested)} pairs of methods are told apart (adjusted p < {LEVEL:g}) \
with neither collapsed, {len(apart) - healthy} more where one or both collapsed."
    if not every:
        return text
    text += " Differences: A - B after training, in points, over the seeds that both ended \
[95 % interval of this pair alone]; p: Student's paired test, after Holm over all these pairs."
    lines = [_pair_line(pair) for pair in every]
    return f"{text}\n\n{markdown_table(lines, list(lines[0]))}"


def _pair_line(pair: Pair) -> dict[str, str]:
    a, b, mean = pair.a, pair.b, pair.found.mean if pair.found else 0.0
    above = f"{a.method} above {b.method}" if mean > 0 else f"{b.method} above {a.method}"
    verdict = above if pair.apart else "not distinguishable"
    p = "< 0.0001" if pair.p < 1e-4 else f"{pair.p:.4f}"
    return {
        "updates": str(a.updates),
        "A": a.name,
        "B": b.name,
        "seeds": str(pair.seeds),
        "A - B": "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in pair.found[:3])) if pair.found else "",
        "p (Holm)": p if pair.found else "",
        "verdict": verdict if pair.found else "not tested: fewer than two seeds in common",
        "flag": "; ".join(_flags(a) + _flags(b)),
    }


def _flags(group: Group) -> list[str]:
    lost = len(group.report) - len(group.ended)
    flags = [f"{group.method} collapsed"] if group.collapsed else []
    return flags + ([f"{group.method} lost {lost} of {len(group.report)} seeds"] if lost else [])


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f}"


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{_percent(value)} (one seed)" for value in values)
    mean, low, high = map(_percent, intervals.mean_interval(values))
    return f"{mean} [{low}, {high}]"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


# -------------------------------------------------------------------------------------- leaderboard
def leaderboard(
    ledger: str | Path,
    curves: str | Path,
    best_decoder: float,
    jobs: Mapping[str, tuple[str, int]],
    studies: Sequence[str] | None = None,
    command: str = COMMAND,
) -> str:
    """What each method solves at equal network calls, and what it spends until it is 10 and 20
    points above the best decoder of the base.

    ``best_decoder``: the solved fraction of the base under its best sampler, on the held-out
    puzzles of the ledger. ``jobs``: of each study that may count the order in which it decodes, and
    the responses of a step; each order has tables of its own. ``studies``: those that count, by
    default all of ``jobs``; they share one bed and its puzzles. Others of the ledger are named.
    ``command``: makes a cell, with names of columns of the ledger in braces.
    Raises: ValueError as ``study_report`` does, for a fraction that is none, for several beds, or
    for a study whose job is not told.
    """
    if not 0 <= best_decoder <= 1:
        raise ValueError(f"best_decoder: got {best_decoder}; allowed are fractions of 0 to 1")
    rows = read_ledger(ledger)
    known = dict.fromkeys(row["study"] for row in rows)
    studies = list(studies or (study for study in known if study in jobs))
    if untold := [study for study in studies if study not in jobs]:
        raise ValueError(f"jobs: got none of {untold[0]}; required is one for each study")
    reported = [r for r in rows if r["study"] in studies and r["stage"] == "report"]
    for column in ("bed", "judged"):
        single(column, (row[column] for row in reported), "the leaderboard")
    every: dict[str, list[tuple[Group, Courses]]] = {}
    for study in studies:
        courses = read_courses(curves, study)
        # a method without a reported run has no rate yet
        found = [(group, courses) for group in groups(rows, study) if group.report]
        if found:
            every.setdefault(jobs[study][0], []).extend(found)
    every = {order: _once(found) for order, found in every.items()}
    goals = " and ".join(f"{100 * goal:.0f}" for goal in GOALS)
    others = ", ".join(study for study in known if study not in studies)
    head = f"""# Leaderboard

First what each method solves of held-out puzzles once it has spent so many network calls; then \
what it spends until it is {goals} points above {_percent(best_decoder)} %, the rate of the base \
with its best decoder, whatever order the runs have.

- **Compare lines of one study**, within a table. Studies differ in more than the method: in the \
responses of a step, in updates and in length. Runs of different orders start from different rates.
- **Calls** are forward equivalents, which can be compared between machines as seconds cannot. \
Between two evaluations a curve is taken as straight.
- **Names** are those of the study's file; the row of the table of methods stands in brackets \
where it is another. Runs that are among those of a line with more seeds, digit for digit, are \
shown in that one. {_alike(every)}
- Held-out puzzles: {_listed(row["judged"] for row in reported)}; \
bed {_listed(row["bed"] for row in reported)}. Other studies of the ledger: {others or "none"}.
- Who leads among many stands too high: on new seeds the mean of a leader falls back. Studies that \
were repeated are in docs/results.md, both samples side by side.
- **To add a line**, add a method to a file of research/studies/, or a file like them, and run `make \
leaderboard STUDY=research/studies/NAME.yaml`: it tries the laws, runs what the ledger lacks of the study, \
and writes this page. `METHODS=a,b`: only these. Commit the page with what was added to results/."""
    sizes = {study: responses for study, (_, responses) in jobs.items()}
    parts = [_goal(every, goal, best_decoder + goal, sizes) for goal in GOALS]
    found = [group for of_order in every.values() for group, _ in of_order]
    ends = [GOAL_HEAD, *parts, _commands(found, command, sizes)]
    return "\n\n".join([head, _equal_calls(every, sizes), *ends]) + "\n"


def _alike(every: Mapping[str, Sequence[tuple[Group, Courses]]]) -> str:
    # Methods of a study that end at the same numbers, seed by seed: one computation, several names.
    same: dict[tuple, list[str]] = {}
    for group, _ in itertools.chain(*every.values()):
        runs = tuple(tuple(row[name] for name in FACTS[1:]) for row in group.ended.values())
        same.setdefault((_study(group), group.updates, runs), []).append(group.name)
    told = [
        f"{study}, {updates} update{'s' * (updates > 1)} a rollout: {', '.join(names)}"
        for (study, updates, _), names in same.items()
        if names[1:]
    ]
    return f"Alike to the last digit, one computation: {'; '.join(told)}." if told else ""


def _once(found: Sequence[tuple[Group, Courses]]) -> list[tuple[Group, Courses]]:
    # Without lines all of whose runs another line has, too.
    runs = [{tuple(row[name] for name in FACTS) for row in g.ended.values()} for g, _ in found]
    return [pair for pair, own in zip(found, runs, strict=True) if not any(own and own < o for o in runs)]


def _equal_calls(every: Mapping[str, Sequence[tuple[Group, Courses]]], sizes: Mapping[str, int]) -> str:
    # Sorted by where a line ends.
    text = """## At equal network calls

Solved, in percent: the mean over seeds [95 % interval, Student]; blank where a seed's run ended \
before, or failed. Sorted by the mean at the end of the runs, which differ in length.

- An interval is of one line; pairs are compared, seed by seed, in docs/results.md.
- Temperature 1, for which the rates were chosen, but for the column "greedy": temperature 0 after \
the last update, where the ranks are others.
- With one update a rollout nothing is stale: a method made for reuse (a clip, a trust region, \
StableDRL's weights) shows there what it costs and not what it is for."""
    parts = [text]
    for order, found in every.items():
        solved = [[solved_at(c, g, budget) for budget in BUDGETS] for g, c in found]
        lines = []
        for (group, _), values in zip(found, solved, strict=True):
            cells = {_count(budget): _mean(x) for budget, x in zip(BUDGETS, values, strict=True)}
            before = {"solved before": _percent(group.mean("before"))}
            end = group.mean("after")
            cells |= {AT_THE_END: _percent(end), GREEDY: _percent(group.mean("greedy_after"))}
            lines.append((-(end or 0.0), _who(group, sizes) | before | cells))
        lines = [line for _, line in sorted(lines, key=lambda pair: pair[0])]
        met = [_count(b) for b in BUDGETS if any(line[_count(b)] for line in lines)]
        table = markdown_table(lines, (*WHO, "solved before", *met, AT_THE_END, GREEDY))
        parts.append(f"### Decoding in {order} order\n\n{table}")
    return "\n\n".join(parts)


def solved_at(courses: Courses, group: Group, budget: float) -> list[float]:
    """Of each seed the held-out rate after ``budget`` network calls, linear between evaluations.

    Empty where a seed spent less, or failed.
    """
    if len(group.cells) < len(group.report):
        return []
    found = [solved_after(courses, cell, budget) for cell in group.cells]
    return [] if None in found else found


def solved_after(courses: Courses, cell: str, budget: float) -> float | None:
    """The held-out rate of one run after ``budget`` network calls; None where it spent less."""
    calls, held = ([values[0] for values in course(courses, [cell], column).values()] for column in ("calls", "held_out"))
    return float(np.interp(budget, calls, held)) if calls[-1] >= budget else None


def _goal(
    every: Mapping[str, Sequence[tuple[Group, Courses]]],
    goal: float,
    target: float,
    sizes: Mapping[str, int],
) -> str:
    # A table for each order in which a seed got there.
    parts = [f"### {100 * goal:.0f} points above: {_percent(target)} %"]
    for order, found in every.items():
        lines = _goal_lines(found, target, sizes)
        there = any(not line["seeds there"].startswith("0 of") for line in lines)
        columns = (*WHO, "solved before", "seeds there", *SPENT.values(), SPENT_IN_ALL, AT_THE_END)
        none = f"Decoding in {order} order: no seed of these runs got there."
        table = f"#### Decoding in {order} order\n\n{markdown_table(lines, columns)}"
        parts.append(table if there else none)
    return "\n\n".join(parts)


def _goal_lines(found: Sequence[tuple[Group, Courses]], target: float, sizes: Mapping[str, int]) -> list[dict[str, str]]:
    # Fewest calls first; what does not get there comes last, the best of it first.
    rows = [(group, courses, reached(courses, group.cells, target)) for group, courses in found]
    rows.sort(key=lambda r: (r[2]["calls"] if r[2] else math.inf, -(r[0].mean("after") or 0)))
    return [_who(row[0], sizes) | _goal_line(*row, target) for row in rows]


def _goal_line(group: Group, courses: Courses, mean: dict[str, float] | None, target: float) -> dict[str, str]:
    own = [reached(courses, [cell], target) for cell in group.cells]
    own += [None] * (len(group.report) - len(own))
    there = [found for found in own if found]
    line = {"seeds there": f"{len(there)} of {len(own)}"}
    line["solved before"] = _percent(group.mean("before"))
    end = _percent(group.mean("after"))
    line[AT_THE_END] = f"{end} (collapsed)" if group.collapsed else end
    for column, name in SPENT.items():
        values = sorted(found[column] for found in there)
        ends = [*map(_count, values), *["not reached"] * (len(own) - len(there))]
        spread = f" [{ends[0]}, {ends[-1]}]" if there else ""
        last = [*_means(courses, group.cells, column).values()][-1:]
        within = "".join(f" within {_count(spent)}" for spent in last)
        line[name] = (_count(mean[column]) if mean else f"not reached{within}") + spread
        line |= {SPENT_IN_ALL: "".join(map(_count, last))} if column == "calls" else {}
    return line


def reached(courses: Courses, cells: Sequence[str], target: float) -> dict[str, float] | None:
    """What was spent when the mean over cells of the held-out rate first came to ``target``.

    Linear between the evaluations around it; None where it stays below, or without cells.
    """
    held, before = _means(courses, cells, "held_out"), None
    for step, value in held.items():
        if value >= target - 1e-12:  # for rounding
            spent = {column: _means(courses, cells, column) for column in SPENT}
            if before is None:
                return {column: means[step] for column, means in spent.items()}
            part = (target - held[before]) / (value - held[before])
            return {c: m[before] + part * (m[step] - m[before]) for c, m in spent.items()}
        before = step
    return None


def _means(courses: Courses, cells: Sequence[str], column: str) -> dict[int, float]:
    return {step: fmean(values) for step, values in course(courses, cells, column).items()}


def _commands(found: Sequence[Group], command: str, sizes: Mapping[str, int]) -> str:
    lines = [
        _who(group, sizes)
        | {"seeds": _listed(sorted(row["seed"] for row in group.report))}
        | {"command": f"`{command.format_map(group.report[0])}`"}
        for group in found
    ]
    text = "Each does what the ledger lacks of a method: to run it again, name another --ledger."
    return f"## Commands\n\n{text}\n\n{markdown_table(lines, (*WHO, 'seeds', 'command'))}"


def _study(group: Group) -> str:
    return (group.report or group.choose)[0]["study"]  # without planned cells one is there


def _who(group: Group, sizes: Mapping[str, int]) -> dict[str, str]:
    row = group.report[0]["options"].get("method", group.method)
    other = f" ({row})" if row != group.method and group.name == group.method else ""
    return {
        "study": _study(group),
        "method": group.name + other,
        "responses a step": str(sizes[_study(group)]),
        "updates a rollout": str(group.updates),
        "rate": rate_text(group.rate) if group.rate else "",
    }
