"""Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table with the given columns; columns of numbers are aligned to the right.

    A float is written with four significant digits, None and a missing key as an empty cell.
    """
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    numeric = [_is_numeric([row.get(column) for row in rows]) for column in columns]
    header = [_cell(column) for column in columns]
    widths = [max(3, *(len(row[i]) for row in [header, *cells])) for i in range(len(columns))]
    ends = [":" if right else "-" for right in numeric]
    rule = ["-" * (width - 1) + end for width, end in zip(widths, ends, strict=True)]
    return "\n".join(_line(row, widths, numeric) for row in (header, rule, *cells))


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    columns = zip(cells, widths, right, strict=True)
    padded = (cell.rjust(width) if r else cell.ljust(width) for cell, width, r in columns)
    return "| " + " | ".join(padded) + " |"


def _cell(value: Any) -> str:
    """Text of one cell; a bar or a line break would end the cell."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _is_numeric(values: Sequence[Any]) -> bool:
    """True if all cells that are not empty are numbers, or their text, perhaps with a range."""
    present = [value for value in values if value is not None]
    return bool(present) and all(_number(value) for value in present)


def _number(value: Any) -> bool:
    try:
        float(str(value).split(" [")[0])
    except ValueError:
        return False
    return not isinstance(value, bool)
