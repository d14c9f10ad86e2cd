"""The two CSV files of the studies, and their lines by method.

ledger.csv   a line for each run: a method at a learning rate, with a number of updates a rollout,
             under a seed. Runs of the stage ``choose`` served to choose the rate, under seeds of
             their own; results rest on the stage ``report``
curves.csv   beside it, a line for each run and held-out evaluation
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from minidrl.methods import RENAMED
from minidrl.run import folders

# Names of methods as the files have them, and as they are called today: both ways, so that a line
# that is added has the names of the lines that are there.
PRESENT = RENAMED
STORED = {present: stored for stored, present in PRESENT.items()}

SELF_TRAINING = "self-training"  # a control, and no row of METHODS
COLLAPSE = 0.05  # a method collapsed if its mean ends by more than this below the base
PHASES = ("rollout", "scoring", "update")
CELL = re.compile(r"(.+?)-(\d[\d.]*(?:e[+-]?\d+)?-\d+-\d+)")  # METHOD-RATE-UPDATES-SEED

COSTS = [f"{of}{phase}" for of in ("calls", "seconds") for phase in ("", *(f"_{p}" for p in PHASES))]
LEDGER = ["study", "cell", "stage", "method", "options", "rate", "updates", "seed", "steps", "bed", "key"]
LEDGER += ["status", "judged", "before", "after", "greedy_after", "train_end", *COSTS, "version"]
CURVES = ["study", "cell", "step", "updates", "calls", "seconds", "held_out", "training"]
CURVES += ["reward", "grad_norm", "ratio_std", "clip_fraction", "entropy"]
TEXTS = ("study", "cell", "stage", "method", "options", "bed", "key", "status", "judged", "version")

Row = dict[str, Any]
Courses = dict[str, pd.DataFrame]  # by cell


# --------------------------------------------------------------------------------------------- reading


def read_ledger(path: str | Path) -> pd.DataFrame:
    """Every run, with the present names of the methods; ``options`` are dicts."""
    frame = _read(path, LEDGER)
    frame["method"] = [PRESENT.get(method, method) for method in frame["method"]]
    frame["options"] = frame["options"].map(json.loads)
    for options in frame["options"]:
        options["method"] = PRESENT.get(options["method"], options["method"])
    return frame


def read_courses(path: str | Path, study: str) -> Courses:
    """Of each run of a study its evaluations, by step."""
    frame = _read(path, CURVES)
    frame = frame[frame["study"] == study].sort_values("step", kind="stable")
    return dict(list(frame.groupby("cell", sort=False)))


def _read(path: str | Path, columns: Sequence[str]) -> pd.DataFrame:
    if not Path(path).is_file():
        raise ValueError(f"ledger: got {str(path)!r}, which is no file; allowed ledger.csv with curves.csv beside it")
    numbers = {name: [""] for name in columns if name not in TEXTS}
    how = {"dtype": dict.fromkeys(TEXTS, str), "keep_default_na": False, "na_values": numbers}
    frame = pd.read_csv(path, **how)
    if missing := [name for name in columns if name not in frame]:
        raise ValueError(f"ledger: got no column {missing[0]} in {path}; required are {', '.join(columns)}")
    frame["cell"] = [_renamed(cell, PRESENT) for cell in frame["cell"]]
    return frame


def _renamed(cell: str, names: dict[str, str]) -> str:
    method, rest = CELL.fullmatch(cell).groups()
    return f"{names.get(method, method)}-{rest}"


def course(courses: Courses, cells: Sequence[str], column: str) -> dict[int, list[float]]:
    """By step: the finite values of these runs, at the steps that all of them have."""
    if missing := [cell for cell in cells if cell not in courses]:
        raise ValueError(f"curves: got no line for {missing[0]}; allowed are some for each run that finished")
    lines = [dict(zip(courses[cell]["step"], courses[cell][column], strict=True)) for cell in cells]
    steps = sorted(set.intersection(*map(set, lines))) if lines else []
    return {step: [line[step] for line in lines if math.isfinite(line[step])] for step in steps}


# ---------------------------------------------------------------------------------------------- adding


class Ledger:
    """ledger.csv and curves.csv in one folder: each is written whole, by one process at a time."""

    def __init__(self, path: Path):
        self.path, self.curves = path, path.with_name("curves.csv")

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, no other process writes to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{self.path}.lock", timeout=0):
                yield
        except Timeout:
            raise ValueError(f"ledger: {self.path} is being written by another process; allowed another --ledger") from None

    def rows(self, study: str) -> list[Row]:
        """The lines of a study; none where there is no file."""
        frame = read_ledger(self.path) if self.path.exists() else pd.DataFrame(columns=LEDGER)
        return records(frame[frame["study"] == study])

    def add(self, line: Row, courses: Sequence[Row]) -> None:
        """A run that is done, and its evaluations."""
        _put(self.curves, CURVES, courses)
        _put(self.path, LEDGER, [line])  # last: a run that is named here has its curve


def _put(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    # What is there stays as it is, byte for byte, but for lines of the same runs: a process that
    # was ended between the two files left some.
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    rows = [{name: row.get(name, "") for name in columns} for row in rows]
    for row in rows:
        row["cell"] = _renamed(row["cell"], STORED)
        if "method" in row:
            row["method"] = STORED.get(row["method"], row["method"])
            options = row["options"]
            row["options"] = json.dumps(options | {"method": STORED.get(options["method"], options["method"])})
    new = {(row["study"], row["cell"]) for row in rows}
    with path.open(newline="") if path.exists() else io.StringIO() as file:
        writer.writerows(row for row in csv.DictReader(file) if (row["study"], row["cell"]) not in new)
    writer.writerows(rows)
    folders.write(path, text.getvalue())


def records(frame: pd.DataFrame) -> list[Row]:
    """Its lines as dicts, None where nothing stands."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


# -------------------------------------------------------------------------------------------- grouping


@dataclass(frozen=True)
class Group:
    """A method with a number of updates a rollout: its runs of a study.

    ``unchosen``: those of the report at a rate that a choice by more runs no longer takes.
    """

    method: str
    updates: int
    choose: list[Row] = field(default_factory=list)
    report: list[Row] = field(default_factory=list)
    unchosen: list[Row] = field(default_factory=list)

    @cached_property
    def name(self) -> str:
        return f"{self.method} (control)" if self.method == SELF_TRAINING else self.method

    @cached_property
    def ended(self) -> dict[int, Row]:
        """By seed: the runs of the report that have a held-out evaluation at their end."""
        whole = [row for row in self.report if row["status"] == "finished" and row["after"] is not None]
        return {row["seed"]: row for row in sorted(whole, key=lambda row: row["seed"])}

    @cached_property
    def cells(self) -> list[str]:
        """The names of those."""
        return [row["cell"] for row in self.ended.values()]

    @cached_property
    def tried(self) -> dict[float, float]:
        """Of each rate of the choice, the mean solved rate after; a run that failed has 0."""
        after: dict[float, list[float]] = {}
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

    @property
    def at_an_end(self) -> bool:
        """True where the rate was chosen and is the smallest or the largest of those tried."""
        return bool(self.tried) and self.rate in (min(self.tried), max(self.tried))

    def values(self, column: str) -> list[float]:
        """Of the runs that ended and have a value, by seed."""
        return [row[column] for row in self.ended.values() if row[column] is not None]

    def mean(self, column: str) -> float | None:
        """Their mean."""
        return fmean(values) if (values := self.values(column)) else None

    @cached_property
    def collapsed(self) -> bool:
        """More than 5 points below the base, 1e-9 for rounding."""
        return bool(self.ended) and self.mean("before") - self.mean("after") > COLLAPSE + 1e-9


def groups(ledger: pd.DataFrame, study: str) -> list[Group]:
    """The groups of a study: fewest updates first, within them the best mean first.

    ValueError for a study without a line, or runs that were judged differently and cannot be
    compared.
    """
    rows = records(ledger[ledger["study"] == study])
    if not rows:
        raise ValueError(f"study: got {study!r}; allowed: {', '.join(ledger['study'].unique()) or 'none: no line'}")
    for column in ("bed", "judged"):
        single(column, {row[column] for row in rows if row["stage"] == "report"}, study)
    found: dict[tuple[str, int], Group] = {}
    for row in rows:
        key = row["method"], row["updates"]
        getattr(found.setdefault(key, Group(*key)), row["stage"]).append(row)
    for group in found.values():
        best = max(group.tried, key=group.tried.get, default=None)
        if best in {row["rate"] for row in group.report}:
            group.unchosen.extend(row for row in group.report if row["rate"] != best)
            group.report[:] = [row for row in group.report if row["rate"] == best]
    return sorted(found.values(), key=lambda g: (g.updates, not g.ended, -(g.mean("after") or 0.0), g.method))


def single(column: str, values: set[str], where: str) -> None:
    """ValueError unless all values are equal."""
    if len(values) > 1:
        got = " and ".join(map(repr, sorted(values)))
        raise ValueError(f"{column}: got {got} in {where}; allowed is one, as results are compared")


def rate_text(rate: float) -> str:
    """As in the name of a cell: 3e-4."""
    digits, exponent = f"{rate:.6e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"
