"""README.md shows what the module says today."""

import re
from pathlib import Path

import pytest

import laws
import tiny
from test_mutants import MUTANTS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def readme():
    return tiny.script("readme")


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_tables_are_current(readme):
    """The map to the letter; the estimators' Monte-Carlo values within what their own standard errors allow."""
    text, parts = readme.README.read_text(), readme.parts()
    assert readme.between(text, "methods") == parts["methods"]
    written, now = cells(readme.between(text, "estimators")), cells(parts["estimators"])
    assert [row[:2] for row in written] == [row[:2] for row in now]
    for old, new in zip(written, now, strict=True):
        slack = 6 * float(old[5]) + 0.02
        assert abs(float(old[2]) - float(new[2])) <= slack and abs(float(old[3]) - float(new[3])) <= slack, (old, new)


def test_a_stale_table_is_seen(readme):
    assert readme.between("<!-- methods -->\n| x |\n<!-- /methods -->", "methods") != readme.parts()["methods"]


def test_the_counts_are_current(readme):
    """N equations, N laws, N mutants; test_laws asserts that all equations have laws, test_mutants that none survives."""
    equations = {tag for tags in laws.TAGS.values() for tag in tags}
    text = " ".join(readme.README.read_text().split())
    for words in (f"{len(equations)} equations, {len(laws.LAWS)} laws", f"{len(MUTANTS)} wrong versions"):
        assert words in text, f"README.md: write {words!r} under Laws and mutants, which is what tests/ holds now"


def test_nothing_is_left_to_fill_in():
    assert "@@" not in (ROOT / "README.md").read_text()


def shown_by() -> list[str]:
    """The tests that ERRATA.md names."""
    text = (ROOT / "ERRATA.md").read_text(encoding="utf-8")
    return re.findall(r"`(law_\w+|\w+\.py::test_\w+|tests/\w+\.py|benchmarks/\w+\.py)`", text)


def test_errata_names_tests_that_exist():
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py")}
    everything = "\n".join(sources.values())
    named = shown_by()
    assert len(named) > 60
    for name in named:
        file, _, test = name.partition("::")
        if name.startswith("law_"):
            assert f"def {name}(" in everything, name
        elif test:
            assert f"def {test}(" in sources[file], name
        else:
            assert (ROOT / name).is_file(), name
