"""Rewrite the generated parts of README.md (between <!-- name --> and <!-- /name -->): `python benchmarks/readme.py`."""

from __future__ import annotations

import re
from pathlib import Path

from minidrl import report

README = Path(__file__).parent.parent / "README.md"
MAP_COLUMNS = ("method", "likelihood", "ratio", "anchor", "objective", "advantage", "source")


def map_rows() -> list[dict[str, str]]:
    """The map without numbers and without the rows that reproduce released code."""
    rows = [row for row in report.method_rows() if not row["method"].endswith("-released")]
    short = {key: lambda text: re.sub(r"\([^)]*\)", "", text) for key in ("likelihood", "objective", "advantage")}
    short["source"] = lambda text: ", ".join(re.findall(r"arXiv (\d{4}\.\d{5})", text))
    return [{key: short.get(key, str)(row[key]) for key in MAP_COLUMNS} for row in rows]


def parts() -> dict[str, str]:
    """The generated tables by the name of their place."""
    return {
        "estimators": report.estimator_table(report.estimator_rows()),
        "methods": report.markdown_table(map_rows(), MAP_COLUMNS),
    }


def between(text: str, name: str) -> str:
    """What stands in README.md at a place."""
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL).group(1)


if __name__ == "__main__":
    text = README.read_text()
    for name, table in parts().items():
        text = text.replace(between(text, name), table)
    README.write_text(text)
