"""Rewrite the generated tables of README.md and docs/*.md, and docs/index.md: `python research/benchmarks/readme.py`.

A table stands between <!-- name --> and <!-- /name -->, on any one of these pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import elbo_error

from minidrl.run import cards, estimators, index, tables

ROOT = Path(__file__).parents[2]
MAP_COLUMNS = ("method", "likelihood", "ratio", "anchor", "objective", "advantage", "source")


def pages() -> list[Path]:
    """The pages on which generated tables may stand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def map_rows() -> list[dict[str, str]]:
    """The map without numbers and without the rows that reproduce released code."""
    rows = [row for row in cards.method_rows() if not row["method"].endswith("-released")]
    short = {key: lambda text: re.sub(r"\([^)]*\)", "", text) for key in ("likelihood", "objective", "advantage")}
    short["source"] = lambda text: ", ".join(dict.fromkeys(index.ARXIV.findall(text)))
    cited = [row | {"source": f"{row['source']} {row['differs']}"} for row in rows]
    return [{key: short.get(key, str)(row[key]) for key in MAP_COLUMNS} for row in cited]


def parts() -> dict[str, str]:
    """The generated tables by the name of their place."""
    return {
        "elbo_error": elbo_error.stored_page(),
        "estimators": estimators.estimator_table(estimators.estimator_rows()),
        "methods": tables.markdown_table(map_rows(), MAP_COLUMNS),
    }


def page_of(name: str, pages: list[Path]) -> Path:
    """The page that holds a place. Raises: ValueError when there is none, or more than one."""
    found = [page for page in pages if page.read_text(encoding="utf-8").count(f"<!-- {name} -->\n") == 1]
    if len(found) != 1:
        raise ValueError(f"<!-- {name} -->: got {len(found)} pages that hold it once; allowed 1")
    return found[0]


def between(text: str, name: str) -> str:
    """What stands in a page at a place."""
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL).group(1)


def written(text: str, name: str, table: str) -> str:
    """The page with another table at a place."""
    head, mark, rest = text.partition(f"<!-- {name} -->\n")
    return head + mark + table + rest[rest.index(f"\n<!-- /{name} -->") :]


if __name__ == "__main__":
    for name, table in parts().items():
        page = page_of(name, pages())
        page.write_text(written(page.read_text(encoding="utf-8"), name, table), encoding="utf-8")
    index.PAGE.write_text(index.page(), encoding="utf-8")
