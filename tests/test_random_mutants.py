"""The engine of the random mutants, on a package of one module: who kills, who lives, what is never executed, what hangs."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import random_mutants

pytestmark = pytest.mark.slow  # nothing else runs this engine but a campaign by hand

SCRIPT = Path(__file__).with_name("random_mutants.py")
MODULE = """LIMIT = 3


def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result


def clipped(x):
    return LIMIT if x > LIMIT else x


def nobody(x):
    return x + y


def down(n):
    while n > 0:
        n -= 1
    return n


def table():
    return TABLE


TABLE = total((LIMIT, total([1])))
"""
TESTS = """import subprocess
import sys

import pytest
from example.sums import clipped, down, table, total


@pytest.fixture(scope="module")
def made():
    return clipped(2), clipped(7)


def test_total():
    assert total([1, 2]) == 3 and total([1, 1]) == 2


def test_first(made):
    assert made[0] == 2


def test_second(made):
    assert made[1] == 3


def test_down_in_another_process():
    program = "from example.sums import down; assert down(2) == 0"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_table():
    assert table() == 4


def test_that_fails():
    assert False
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name, text in {"example/__init__.py": "", "example/sums.py": MODULE, "tests/test_sums.py": TESTS}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def run(project: Path, *words: str) -> str:
    command = [sys.executable, str(SCRIPT), "example/sums.py", "--out", "out.jsonl", "--patience", "2", *words]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + (project / "out.log").read_text()
    return done.stdout


@pytest.fixture(scope="module")
def verdicts(project) -> dict[tuple[str, str], str]:
    """(function, after) -> who killed the mutant, of all mutants of the module."""
    assert run(project, "--count", "5").count(" -> ") == 5
    run(project, "--count", "1000")  # goes on where the first one stopped
    lines = [json.loads(line) for line in (project / "out.jsonl").read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) > 15, "none is tried twice"
    return {(line["function"], line["after"]): line["by"] for line in lines}


def test_a_test_that_executes_the_line_kills(verdicts):
    assert verdicts["down", "while (n < 0): n -= 1"] == "tests/test_sums.py::test_down_in_another_process"
    assert "test_that_fails" not in " ".join(verdicts.values())


def test_what_only_a_shared_fixture_executes_is_judged_by_all_its_tests(verdicts):
    both = ("tests/test_sums.py::test_first", "tests/test_sums.py::test_second")  # the quicker one is asked first
    assert verdicts["clipped", "return LIMIT if (x < LIMIT) else x"] in both
    assert verdicts["", "LIMIT = 4"] in ("tests/test_sums.py::test_second", "tests/test_sums.py::test_table")


def test_a_survivor_is_found(verdicts):
    assert verdicts["clipped", "return LIMIT if (x >= LIMIT) else x"] == "survived"


def test_a_line_that_no_test_executes(verdicts):
    assert verdicts["nobody", "return (x - y)"] == "survived"


def test_a_hang_in_a_process_that_a_test_starts(verdicts):
    assert verdicts["down", "pass"] == "time: tests/test_sums.py::test_down_in_another_process"


def test_what_runs_at_import_is_imported_anew(verdicts):
    assert verdicts["", "TABLE = total((LIMIT, total([2])))"] == "tests/test_sums.py::test_table"
    assert verdicts["total", "result = 1"] in ("tests/test_sums.py::test_table", "tests/test_sums.py::test_total")


def test_survivors_are_tried_again_and_the_killed_are_not(project, verdicts):
    before = random_mutants.results(project / "out.jsonl")
    text = (project / "tests/test_sums.py").read_text()
    new = "\n\ndef test_nobody():\n    import example.sums\n\n    example.sums.y = 1\n    assert example.sums.nobody(1) == 2\n"
    (project / "tests/test_sums.py").write_text(text + new)
    said = run(project, "--count", "1000", "--again")
    assert said.count(" -> ") == sum(row["by"] == "survived" for row in before) > 0
    assert "return (x - y): tests/test_sums.py::test_nobody" in said
    command = [sys.executable, str(SCRIPT), "--report", "--out", "out.jsonl"]
    table = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    assert f"| example/sums.py | {len(before)} |" in table and "not judged" in table


LEFT_ALONE = '''"""A module."""

__all__ = ["total"][:1]


def total(numbers: {1: list}[1]) -> {1: int}[1]:
    """The sum of 1 or 2 numbers."""
    if numbers:
        allowed = 2 + 2
        raise ValueError(f"{n + 1}: allowed {allowed}")
    return f"{1 + 1}"
'''


def test_what_is_left_alone():
    """Docstrings, annotations, messages, what only builds a message, and ``__all__``: of all this, the condition remains."""
    found = [mutant.before for mutant in random_mutants.drawn("sums.py", LEFT_ALONE, seed=0)]
    assert len(found) == 1 and found[0].startswith("if numbers:")


def test_a_mutant_is_another_program_on_as_many_lines():
    for mutant in random_mutants.drawn("sums.py", MODULE, seed=0):
        wrong = random_mutants.mutated(MODULE, mutant)
        assert wrong.count("\n") == MODULE.count("\n")
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(MODULE))


def test_a_draw_is_a_matter_of_the_seed():
    first, again, other = (list(random_mutants.drawn("sums.py", MODULE, seed)) for seed in (0, 0, 1))
    assert first == again != other and {*first} == {*other}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"(a <= b)", "(a > b)"}),
        ("x = a and b", {"(a or b)"}),
        ("x = f(a, b)", {"(f(b, a))"}),
        ("x = max(a, b, c)", {"(min(a, b, c))"}),
        ("x = a[i]", {"(i + 1)", "(i - 1)"}),
        ("x = a[i:]", {"(i + 1)", "(i - 1)"}),
        ("x = a.detach()", {"(a)"}),
        ("x = True", {"False"}),
        ("x = 0.5", {"1.5", "-0.5"}),
        ("f()", {"pass"}),
        ("x -= y", {"pass"}),
        ("assert not x", {"(x)"}),
        ("y = [x for x in z if w]", {"(not w)"}),
    ],
)
def test_changes(source, expected):
    assert {mutant.new for mutant in random_mutants.drawn("x.py", source, seed=0)} == expected
