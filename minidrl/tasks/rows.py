"""Rows of a data set: from a file, or from the Hub at one revision; checked field by field.

    .jsonl     one JSON object a line; empty lines are skipped
    .json      a list of objects, or lines as above
    .parquet   read by the package ``datasets``, as are data sets of the Hub

A file may come from a stranger: it is read within limits, and of a row only the fields that a task
names are looked at. Errors are ValueErrors of one line that names file, row (from 1) and field.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minidrl.run import untrusted
from minidrl.run.launch import one_line
from minidrl.run.untrusted import Kind, brief
from minidrl.tasks import Problem, Task
from minidrl.tasks.text import prompt_lengths

SUFFIXES = (".jsonl", ".json", ".parquet")
LARGEST = 512 * untrusted.MIB
MOST = 2**20  # rows
REVISION = Kind(
    lambda x: re.fullmatch("[0-9a-f]{40}", x, re.ASCII) is not None,
    "a commit of the data set, 40 hexadecimal digits",
)

Row = dict[str, Any]


def of_file(key: str, path: str | Path) -> list[Row]:
    """The rows of a file; ``key``: the setting that names it."""
    path = Path(path)
    if path.suffix not in SUFFIXES or not path.is_file():
        what = "which is no file" if path.suffix in SUFFIXES else "whose ending is another"
        raise ValueError(f"{key}: got {str(path)!r}, {what}; allowed {', '.join(SUFFIXES)} files")
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"{path} has {size} bytes; allowed up to {LARGEST}")
    rows = _of_parquet(key, path) if path.suffix == ".parquet" else _of_json(path)
    if not rows:
        raise ValueError(f"{path}: got no row; allowed one or more")
    if len(rows) > MOST:
        raise ValueError(f"{path}: got {len(rows)} rows; allowed up to {MOST}")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path} row {number}: got {type(row).__name__}; allowed an object")
    return rows


def _of_json(path: Path) -> list[Any]:
    text = untrusted.decoded(path)
    if path.suffix == ".json" and text.lstrip()[:1] == "[":
        return untrusted.parsed_json(text, str(path))
    lines = [line for line in text.split("\n") if line.strip()]
    return [untrusted.parsed_json(line, f"{path} row {i}") for i, line in enumerate(lines, 1)]


def _of_parquet(key: str, path: Path) -> list[Any]:
    datasets = _datasets(f"{key} {path}")
    try:
        with tempfile.TemporaryDirectory() as cache:  # no copy stays in the user's
            return datasets.Dataset.from_parquet(str(path), cache_dir=cache).to_list()
    except Exception as error:  # pyarrow has many
        raise ValueError(f"{path} cannot be read as parquet: {one_line(error)}") from None


def of_hub(task: str, repo: str, subset: str, revision: str, split: str) -> list[Row]:
    """The rows of a split of a data set on the Hub, at a commit; from the cache where it is there.

    No code of the data set is run: ``datasets`` has not been able to since its version 4.
    """
    datasets = _datasets(f"task {task}")
    try:
        loaded = datasets.load_dataset(repo, subset or None, revision=revision, split=split)
        return loaded.to_list()
    except Exception as error:  # the Hub's, the network's and pyarrow's
        got = f"{repo!r} at revision {revision[:12]}, of which {split!r} cannot be loaded"
        allowed = "a data set of the Hub, or task.path, a file with the same columns"
        raise ValueError(f"task.repo: got {got} ({one_line(error)}); allowed {allowed}") from None


def _datasets(what: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{what} needs datasets: pip install 'minidrl[math]'")
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what went wrong is one line of ours
    return datasets


def longest_prompt(task: Task, path: str, asked: Mapping[int, Problem], tok: Any, at: str) -> str:
    """How long the longest prompt is, in words; ``asked``: of each row of a file, by its number.

    Without a tokenizer in characters. ValueError, which names the field ``at``, for a prompt of
    more tokens than the task has room for.
    """
    if tok is None:
        longest = max((len(problem.instruction) for problem in asked.values()), default=0)
        unit = "characters; with --model they are counted in tokens"
        return f"the longest prompt has {longest} {unit}"
    lengths = prompt_lengths(tok, list(asked.values()), task.prompt_format)
    for number, length in zip(asked, lengths, strict=True):
        if length > task.prompt_length:
            got, allowed = f"a prompt of {length} tokens", "up to task.max_prompt_length"
            where = f"{path} row {number}: {at}"
            raise ValueError(f"{where}: got {got}; allowed {allowed}, {task.prompt_length}")
    return f"the longest prompt has {max(lengths, default=0)} tokens"


def texts(rows: Iterable[Row], fields: Mapping[str, Kind], where: str) -> list[dict[str, str]]:
    """Of each row the fields that are named, which the table allows; others are not looked at."""
    return [_texts(row, fields, f"{where} row {i}") for i, row in enumerate(rows, 1)]


def _texts(row: Row, fields: Mapping[str, Kind], where: str) -> dict[str, str]:
    for name, kind in fields.items():
        if name not in row:
            had = ", ".join(sorted(map(str, row))) or "no field"
            raise ValueError(f"{where}: {name}: missing; the row has {brief(had)}")
        if not kind.good(row[name]):
            raise ValueError(f"{where}: {name}: got {brief(row[name])}; allowed {kind.allowed}")
    return {name: row[name] for name in fields}
