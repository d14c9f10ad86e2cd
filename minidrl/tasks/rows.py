"""Rows of a data set, from a file (.jsonl, .json, .csv, .parquet) or from the Hub at one revision;
and what tasks have in common whose problems are rows (``Listed``), or may be (``Puzzles``).

Errors are ValueErrors of one line that names file, row (from 1) and field. Data sets of the Hub are
read by the package ``datasets``, which runs no code of theirs.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt

from minidrl.tasks import Problem, Task
from minidrl.tasks.text import check_lengths, check_setting

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_REPEATS = 20_000  # repeated puzzles in a row after which no new one is expected
SHOWN = 60  # characters of a value in a message
SPLITS = ("held_out", "train")  # in this order: what is held out is not trained on

Row = dict[str, Any]
Wording = Literal["ours", "d1", "d1-eval"]  # the words in which is asked: ours, or d1's
Protocol = Literal["ours", "d1"]  # how an answer is read: by our rule, or as d1's evaluation does
Share = Annotated[float, Field(ge=0, le=1)]


def of_file(key: str, path: str | Path) -> list[Row]:
    """The rows of a file; ``key``: the setting that names it."""
    path = Path(path)
    if path.suffix not in SUFFIXES or not path.is_file():
        what = "which is no file" if path.suffix in SUFFIXES else "whose ending is another"
        raise ValueError(f"{key}: got {str(path)!r}, {what}; allowed {', '.join(SUFFIXES)} files")
    rows = _of_parquet(path) if path.suffix == ".parquet" else _of_text(path)
    if not rows:
        raise ValueError(f"{path}: got no row; allowed one or more")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path} row {number}: got {type(row).__name__}; allowed an object")
    return rows


def _of_text(path: Path) -> list[Any]:
    """A list of objects in a .json file, lines under a header in .csv; else an object a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            return [*csv.DictReader(io.StringIO(text, newline=""))]
        if path.suffix == ".json" and text.lstrip()[:1] == "[":
            return json.loads(text)
    except (ValueError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(filter(str.strip, text.split("\n")), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} row {number} cannot be read: {error}") from None
    return rows


def _of_parquet(path: Path) -> list[Any]:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {brief(error)}") from None


def of_hub(repo: str, subset: str, revision: str, split: str) -> list[Row]:
    """The rows of a split of a data set on the Hub, at a commit; from the cache where it can."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what went wrong is one line of ours
    try:
        return datasets.load_dataset(repo, subset or None, revision=revision, split=split).to_list()
    except Exception as error:  # the Hub's, the network's and pyarrow's
        got = f"{repo!r} at revision {revision[:12]}, of which {split!r} cannot be loaded"
        allowed = "a data set of the Hub, or task.path, a file with the same columns"
        raise ValueError(f"task.repo: got {got} ({brief(error)}); allowed {allowed}") from None


def made(read: list[Row], where: str, of: Callable[[Row], Any]) -> list[Any]:
    """What ``of`` makes of each row; its ValueErrors, which name a field, are told with the row."""
    found = []
    for number, row in enumerate(read, 1):
        try:
            found.append(of(row))
        except ValueError as error:
            raise ValueError(f"{where} row {number}: {error}") from None
    return found


def texts(row: Row, *names: str) -> list[str]:
    """The fields of a row that are named, which must be text that is not blank."""
    for name in names:
        if name not in row:
            fields = ", ".join(map(str, row)) or "no field"
            raise ValueError(f"{name}: missing; the row has {fields}")
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{name}: got {brief(row[name])}; allowed text that is not blank")
    return [row[name] for name in names]


def checked(task: Task, path: str, problems: Sequence[Problem], tok: Any, rows: str) -> str:
    """What was found in a file: how many ``rows``, in words, and how long the longest prompt is,
    without a tokenizer in characters. ValueError for one that the task has no room for."""
    if tok is None:
        longest = max((len(problem.instruction) for problem in problems), default=0)
        measured = f"{longest} characters; with --model they are counted in tokens"
    else:
        longest = check_lengths(tok, problems, task.prompt_length, task.prompt_format)
        measured = f"{longest} tokens"
    found = f"{rows} can be asked and judged by {task.name}"
    return f"{path}: {found}; the longest prompt has {measured}"


def first(held_out: list[Any], count: int) -> list[Any]:
    """The first ``count`` of those held out; ValueError where there are not so many."""
    if not 1 <= count <= len(held_out):
        allowed = f"1 to {len(held_out)}, as are held out"
        raise ValueError(f"evaluate.n: got {count}; allowed {allowed}")
    return held_out[:count]


def brief(value: Any) -> str:
    """A value in one short line, for a message."""
    text = " ".join(str(value).split()) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."


class OfRows:
    """A task whose problems are, or may be, rows: it has ``problem_of``, that of a row, with a
    ValueError for one that cannot be asked and judged."""

    def read(self, key: str, path: str) -> list[Any]:
        """The problems of a file; ``key``: what names it."""
        return self.placed(of_file(key, path), path)

    def placed(self, read: list[Row], where: str) -> list[Any]:
        found = enumerate(made(read, where, self.problem_of), 1)
        return [dataclasses.replace(row, place=f"{where} row {number}") for number, row in found]

    def check(self, path: str, tok: Any = None) -> str:
        """What was found in a file whose rows can all be asked and judged; ``tok`` counts tokens.

        Raises ValueError, one line with file, row and field, for the first row that cannot.
        """
        found = self.read("check", path)
        return checked(self, path, found, tok, f"{len(found)} rows; all")


class Listed(OfRows):
    """A task whose problems are those of the files ``path``, held out, and ``train_path``. With
    other sources it has its own ``of_split`` or splits; ``source`` names those to train on."""

    source: ClassVar[str] = "train_path"

    def of_split(self, split: str) -> list[Any]:
        if split == "train":
            return self.read("task.train_path", self.train_path) if self.train_path else []
        return self.read("task.path", self.path)

    @cached_property
    def splits_of_files(self) -> dict[str, list[Any]]:
        """The problems of each split, each once; what is held out is not trained on."""
        found = [(problem, split) for split in SPLITS for problem in self.of_split(split)]
        kept: dict[str, tuple[Any, str]] = {}
        for problem, split in found:
            kept.setdefault(problem.key, (problem, split))
        if removed := len(found) - len(kept):
            said = f"removed {removed} problems that are held out or stand there twice"
            logging.getLogger("minidrl").warning(f"task {self.name}: {said}")
        return {split: [p for p, of in kept.values() if of == split] for split in SPLITS}

    def problems(self, count: int, rng: np.random.Generator, split: str = "train") -> list[Any]:
        """Any split but "held_out" is that for training. ValueError for an empty one."""
        pool = self.splits_of_files["held_out" if split == "held_out" else "train"]
        check_setting(self, self.source, pool != [], f"a file with problems to {split}")
        return [pool[i] for i in rng.integers(len(pool), size=count)]

    def held_out(self, count: int) -> list[Any]:
        return first(self.splits_of_files["held_out"], count)

    def from_files(self) -> list[Any]:
        return [problem for split in self.splits_of_files.values() for problem in split]

    @property
    def prompt_length(self) -> int:
        return self.max_prompt_length


@dataclass(frozen=True, kw_only=True)
class Puzzles(OfRows):
    """A task of generated puzzles that can also be asked those of a file.

    reward             what an answer is paid: see ``judge``
    prompt_format      plain, a notation of the task's own and a bare response, or chat, whose
                       prompts may have ``max_prompt_length`` tokens
    wording, protocol  its words and how answers are read, ours or d1's (``tasks.d1``)
    path               a file whose puzzles are the held-out ones
    exclude            a file whose puzzles are not trained on; those of ``path`` never are

    A task has ``drawn``, random puzzles of a split, and ``longest_plain``, the characters of its
    longest prompt.
    """

    reward: str = "strict"
    wording: Wording = "ours"
    protocol: Protocol = "ours"
    prompt_format: Literal["plain", "chat"] = "plain"
    max_prompt_length: PositiveInt = 200
    path: str = ""
    exclude: str = ""

    def __post_init__(self):
        if (self.wording, self.protocol) != ("ours", "ours"):
            allowed = "chat with d1's prompts and rule"
            check_setting(self, "prompt_format", self.prompt_format == "chat", allowed)

    @cached_property
    def of_path(self) -> list[Any]:
        return self.read("task.path", self.path) if self.path else []

    @cached_property
    def excluded(self) -> list[Any]:
        return self.of_path + (self.read("task.exclude", self.exclude) if self.exclude else [])

    def from_files(self) -> list[Any]:
        return self.of_path

    def problems(self, count: int, rng: np.random.Generator, split: str = "train") -> list[Any]:
        if split == "held_out" and self.path:
            return [self.of_path[i] for i in rng.integers(len(self.of_path), size=count)]
        return self.drawn(count, rng, split)

    def held_out(self, count: int) -> list[Any]:
        if self.path:
            return first(self.of_path, count)
        found: dict[str, Any] = {}
        rng, misses = np.random.default_rng(0), 0
        while len(found) < count and misses < MAX_REPEATS:
            puzzle = self.drawn(1, rng, "held_out")[0]
            misses = misses + 1 if puzzle.key in found else 0
            found.setdefault(puzzle.key, puzzle)
        return first(list(found.values()), count)

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt; in the plain format a character is one."""
        return self.longest_plain if self.prompt_format == "plain" else self.max_prompt_length
