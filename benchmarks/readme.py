"""Rewrite the generated parts of README.md (between <!-- name --> and <!-- /name -->): `python benchmarks/readme.py`."""

from __future__ import annotations

import re
from pathlib import Path

from minidrl import report

README = Path(__file__).parent.parent / "README.md"
MAP_COLUMNS = ("method", "likelihood", "ratio", "anchor", "masks", "objective", "advantage", "KL")


def parts() -> dict[str, str]:
    """The generated tables by the name of their place."""
    return {
        "estimators": report.estimator_table(report.estimator_rows()),
        "methods": report.markdown_table(report.method_rows(), MAP_COLUMNS),
    }


def between(text: str, name: str) -> str:
    """What stands in README.md at a place."""
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL).group(1)


if __name__ == "__main__":
    text = README.read_text()
    for name, table in parts().items():
        text = text.replace(between(text, name), table)
    README.write_text(text)
