"""The two CSV files of a grid of runs: what their columns hold, and their lines by method.

the ledger   a line for each cell, which is one run: a method at a learning rate, with a number
             of updates a rollout, under a seed. Cells of the stage choose served to choose the
             rate, under seeds of their own; results rest on the stage report
the curves   a line for each cell and held-out evaluation
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from filelock import FileLock

from minidrl.run import files, untrusted

SELF_TRAINING = "self-training"  # on the base's own correct samples; no row of METHODS
COLLAPSE = 0.05  # a method collapsed if its mean ends by more than this below the base
PHASES = ("rollout", "scoring", "update")
PLANNED = re.compile(r"(.+?)-(\d[\d.]*(?:e[+-]?\d+)?)-(\d+)-(\d+)")  # METHOD-RATE-UPDATES-SEED

Row = dict[str, Any]
Courses = dict[str, list[Row]]


# ------------------------------------------------------------------------------------------ columns
class Kind(NamedTuple):
    """What a column holds: how it is read, what is allowed, and that in words."""

    read: Callable[[str], Any]
    good: Callable[[Any], bool]
    allowed: str


TEXT = Kind(str, lambda x: True, "text")
NAME = Kind(str, lambda x: x.isprintable() and x != "", "a name")
STAGE = Kind(str, {"choose", "report"}.__contains__, "choose, report")
STATUS = Kind(str, re.compile("finished|failed: .+").fullmatch, "finished, failed: reason")
OBJECT = Kind(json.loads, lambda x: isinstance(x, dict), "a JSON object")
COUNT = Kind(int, lambda x: x >= 0, "a whole number >= 0")
RATE = Kind(float, lambda x: 0 < x < math.inf, "a number > 0")
COST = Kind(lambda s: float(s) if s else None, lambda x: x is None or 0 <= x < math.inf, "nothing, >= 0")
AMOUNT = Kind(float, COST.good, "a number >= 0")
SHARE = Kind(COST.read, lambda x: x is None or 0 <= x <= 1, "nothing, a number of 0 to 1")
SOLVED = Kind(float, SHARE.good, "a number of 0 to 1")
MEASURE = Kind(COST.read, lambda x: True, "nothing, or a number")  # nan and inf, too, are measured

COSTS = [f"{of}{phase}" for of in ("calls", "seconds") for phase in ("", *(f"_{p}" for p in PHASES))]
LEDGER = {"study": NAME, "cell": NAME, "stage": STAGE, "method": NAME, "options": OBJECT}
LEDGER |= {"rate": RATE, "updates": COUNT, "seed": COUNT, "steps": COUNT, "bed": NAME, "key": TEXT}
LEDGER |= {"status": STATUS, "judged": TEXT}
LEDGER |= dict.fromkeys(("before", "after", "greedy_after", "train_end"), SHARE)
LEDGER |= dict.fromkeys(COSTS, COST) | {"version": TEXT}
CURVES = {"study": NAME, "cell": NAME, "step": COUNT}
CURVES |= dict.fromkeys(("updates", "calls", "seconds"), AMOUNT)
CURVES |= {"held_out": SOLVED, "training": SHARE}
CURVES |= dict.fromkeys(("reward", "grad_norm", "ratio_std", "clip_fraction", "entropy"), MEASURE)


# ------------------------------------------------------------------------------- reading and adding
class Ledger:
    """ledger.csv and curves.csv in one folder: each is written whole, by one process at a time."""

    def __init__(self, path: Path):
        self.path, self.curves = path, path.with_name("curves.csv")
        if path.name == self.curves.name:
            got = f"{str(path)!r}, the name of the curves beside it"
            raise ValueError(f"ledger: got {got}; allowed another")

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, no other process writes to it."""
        for path in (self.path, self.curves):
            files.check_writable(path)
        lock = FileLock(f"{self.path}.lock")
        files.acquire(lock, "ledger", self.path)
        try:
            yield
        finally:
            lock.release()

    def rows(self, study: str) -> list[Row]:
        """The lines of a study; none where there is no file."""
        rows = read_ledger(self.path) if self.path.exists() else []
        return [row for row in rows if row["study"] == study]

    def add(self, line: Row, courses: Sequence[Row]) -> None:
        """A cell that is done, and its evaluations."""
        _put(self.curves, CURVES, courses)
        _put(self.path, LEDGER, [line])  # last: what it names is there


def _put(path: Path, columns: Mapping[str, Kind], rows: Sequence[Row]) -> None:
    # In the place of those of the same cell, which a process that was ended between the two left.
    text, cells = io.StringIO(), {(row["study"], row["cell"]) for row in rows}
    before = []
    if path.exists():
        with _reading(path) as lines:
            before = [line for _, line in _whole(path, lines)]
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for row in before if (row["study"], row["cell"]) not in cells)
    started = text.tell()
    writer.writerows(rows)
    for line in csv.DictReader(io.StringIO(text.getvalue()[started:], newline=""), list(columns)):
        for name, kind in columns.items():  # what could not be read again would lock the file
            _value(line[name], kind, f"{path}: the line of {line['cell']}", name)
    files.write(path, text.getvalue())


def read_ledger(path: str | Path) -> list[Row]:
    """The lines of the ledger; columns that ``LEDGER`` does not name are not looked at.

    Raises: ValueError, one line, for a column that is missing, a value that is not allowed, a cell
    that stands there twice, or one that is not named by its method, rate, updates and seed.
    """
    return _read(path, LEDGER, ("study", "cell"))


def cell_name(row: Row) -> str:
    """METHOD-RATE-UPDATES-SEED."""
    return f"{row['method']}-{rate_text(row['rate'])}-{row['updates']}-{row['seed']}"


def read_courses(path: str | Path, study: str) -> Courses:
    """Of each cell of a study: its lines of the curves, by step. Raises as ``read_ledger`` does."""
    courses: Courses = {}
    for row in sorted(_read(path, CURVES, ("study", "cell", "step")), key=lambda row: row["step"]):
        if row["study"] == study:
            courses.setdefault(row["cell"], []).append(row)
    return courses


def _read(path: str | Path, columns: Mapping[str, Kind], once: Sequence[str]) -> list[Row]:
    rows, seen = [], set()
    with _reading(Path(path)) as lines:
        if missing := [name for name in columns if name not in (lines.fieldnames or ())]:
            got = f"got no column {', '.join(missing)}"
            raise ValueError(f"{path} line 1: {got}; required are {', '.join(columns)}")
        for where, line in _whole(path, lines):
            rows.append({name: _value(line[name], columns[name], where, name) for name in columns})
            if columns is LEDGER and rows[-1]["cell"] != (named := cell_name(rows[-1])):
                allowed = f"{named}, by its method, rate, updates and seed"
                raise ValueError(f"{where}: cell: got {rows[-1]['cell']!r}; allowed: {allowed}")
            known = tuple(rows[-1][name] for name in once)
            if known in seen:
                raise ValueError(f"{where}: {once[-1]}: got {known[-1]!r} again; allowed is once")
            seen.add(known)
    return rows


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[csv.DictReader]:
    # The lines of a CSV file, by column.
    if not path.is_file():
        allowed = "ledger.csv and curves.csv in one folder, as compare writes them"
        raise ValueError(f"ledger: got {str(path)!r}, which is no file; allowed {allowed}")
    text = untrusted.decoded(path)
    if text and not text.endswith("\n"):
        got = "got no new line at its end, where it may have been cut"
        raise ValueError(f"{path} line {text.count(chr(10)) + 1}: {got}; allowed are whole lines")
    lines = csv.DictReader(io.StringIO(text, newline=""))
    try:
        yield lines
    except csv.Error as error:
        raise ValueError(f"{path} line {lines.line_num}: {error}; allowed is CSV") from None


def _whole(path: Path, lines: csv.DictReader) -> Iterator[tuple[str, Row]]:
    # The place and the values of each line: as many as there are columns.
    most = len(lines.fieldnames or ())
    for line in lines:
        more, missing = len(line.get(None, ())), list(line.values()).count(None)
        where = f"{path} line {lines.line_num}"
        if more or missing:
            raise ValueError(f"{where}: got {most + more - missing} fields; allowed {most}")
        yield where, line


def _value(text: str | None, kind: Kind, where: str, column: str) -> Any:
    try:
        value = kind.read(text)
        good = kind.good(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        good = False
    if not good:
        got = "nothing" if text is None else repr(text)
        raise ValueError(f"{where}: {column}: got {got}; allowed: {kind.allowed}")
    return value


# ----------------------------------------------------------------------------------------- grouping
@dataclass(frozen=True)
class Group:
    """A line of the tables: a method with a number of updates a rollout.

    ``choose``, ``report``: its lines of the ledger; ``absent``: names of planned cells without one;
    ``unchosen``: cells of the report at a rate that a choice by more cells no longer takes.
    """

    method: str
    updates: int
    choose: list[Row] = field(default_factory=list)
    report: list[Row] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    unchosen: list[Row] = field(default_factory=list)

    @cached_property
    def name(self) -> str:
        return f"{self.method} (control)" if self.method == SELF_TRAINING else self.method

    @cached_property
    def ended(self) -> dict[int, Row]:
        """By seed: the cells of the report with a held-out evaluation at their end."""
        ended = [row for row in self.report if row["status"] == "finished"]
        ended = [row for row in ended if None not in (row["before"], row["after"])]
        return {row["seed"]: row for row in sorted(ended, key=lambda row: row["seed"])}

    @cached_property
    def cells(self) -> list[str]:
        """The names of those."""
        return [row["cell"] for row in self.ended.values()]

    @cached_property
    def tried(self) -> dict[float, float]:
        """Of each rate of the stage choose, the mean solved rate after; a failed cell has 0."""
        after = {}
        for row in sorted(self.choose, key=lambda row: row["rate"]):
            solved = row["after"] if row["status"] == "finished" else None
            after.setdefault(row["rate"], []).append(solved or 0.0)
        return {rate: fmean(values) for rate, values in after.items()}

    @cached_property
    def rate(self) -> float | None:
        """Of the report; the best one tried where there is none."""
        rates = sorted({row["rate"] for row in self.report})
        if len(rates) > 1:
            got = f"{', '.join(map(rate_text, rates))} for {self.method} with {self.updates} updates"
            raise ValueError(f"rate: got {got} in the stage report; allowed is one")
        return rates[0] if rates else max(self.tried, key=self.tried.get, default=None)

    def mean(self, column: str) -> float | None:
        """Over the seeds that ended and have a value."""
        values = [row[column] for row in self.ended.values() if row[column] is not None]
        return fmean(values) if values else None

    @cached_property
    def fall(self) -> float:
        """Points of 1 by which the mean ends below the base."""
        return self.mean("before") - self.mean("after") if self.ended else 0.0

    @cached_property
    def collapsed(self) -> bool:
        """More than 5 points below the base, 1e-9 for rounding."""
        return self.fall > COLLAPSE + 1e-9


def groups(ledger: Sequence[Row], study: str, planned: Iterable[str] = ()) -> list[Group]:
    """The groups of a study: fewest updates first, within them the best mean first.

    Raises: ValueError for a study without a line, a planned name that is none, or cells of the
    report that were judged differently and cannot be compared.
    """
    rows = [row for row in ledger if row["study"] == study]
    if not rows:
        allowed = ", ".join(dict.fromkeys(row["study"] for row in ledger)) or "none: no line"
        raise ValueError(f"study: got {study!r}; allowed: {allowed}")
    for column in ("bed", "judged"):
        single(column, (row[column] for row in rows if row["stage"] == "report"), study)
    found: dict[tuple[str, int], Group] = {}
    for row in rows:
        key = row["method"], row["updates"]
        getattr(found.setdefault(key, Group(*key)), row["stage"]).append(row)
    for cell in sorted(set(planned) - {row["cell"] for row in rows}):
        if not (parts := PLANNED.fullmatch(cell)):
            raise ValueError(f"planned: got {cell!r}; allowed: METHOD-RATE-UPDATES-SEED")
        key = parts[1], int(parts[3])
        found.setdefault(key, Group(*key)).absent.append(cell)
    for group in found.values():
        _set_apart(group)
    return sorted(found.values(), key=_order)


def _set_apart(group: Group) -> None:
    best = max(group.tried, key=group.tried.get, default=None)
    if best in {row["rate"] for row in group.report}:
        group.unchosen.extend(row for row in group.report if row["rate"] != best)
        group.report[:] = [row for row in group.report if row["rate"] == best]


def _order(group: Group) -> tuple:
    return group.updates, not group.ended, -(group.mean("after") or 0.0), group.method


def course(courses: Courses, cells: Sequence[str], column: str) -> dict[int, list[float]]:
    """By step: the finite values of these cells, at the steps that all of them have.

    Raises: ValueError where the curves have no line for one of them.
    """
    if missing := [cell for cell in cells if cell not in courses]:
        allowed = "some for each cell that finished"
        raise ValueError(f"curves: got no line for {missing[0]}; allowed are {allowed}")
    lines = [{row["step"]: row[column] for row in courses[cell]} for cell in cells]
    steps = sorted(set.intersection(*map(set, lines))) if lines else []
    found = {step: [line[step] for line in lines if line[step] is not None] for step in steps}
    return {step: [x for x in values if math.isfinite(x)] for step, values in found.items()}


def rate_text(rate: float) -> str:
    """As in the name of a cell: 3e-4."""
    digits, exponent = f"{rate:.6e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def single(column: str, values: Iterable[str], where: str) -> None:
    """Raises: ValueError unless all values, which are compared with each other, are equal."""
    if len(different := sorted(set(values))) > 1:
        got = " and ".join(map(repr, different))
        raise ValueError(f"{column}: got {got} in {where}; allowed is one, as results are compared")
