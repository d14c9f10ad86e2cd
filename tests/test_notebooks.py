r"""Static rules for notebooks/*.ipynb, and the tools that notebooks use. No kernel is started here.

nbval compares the stored outputs; it does not see a notebook whose outputs were stripped, a marker that switches the
comparison off, or an equation without a check. These rules close the holes. Each rule is a function from a notebook
(and the names that minidrl ships) to a list of violations, and each is shown to catch its own violation.
"""

import ast
import copy
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "notebooks"))  # a notebook's kernel starts in its folder

import nbtools  # noqa: E402
from minidrl import index  # noqa: E402

ALLOWED_OUTPUTS = {"text/plain", "text/markdown", "text/latex", "image/png"}
FORBIDDEN_TAGS = {"nbval-ignore-output", "nbval-skip", "nbval-raises-exception", "raises-exception"}
MAX_CELL_LINES = 30
# Columns of a line of code, in the notebooks that keep to it: a cell of 88 needs no scrolling beside its output.
WIDTHS = {"00a_build_a_model.ipynb": 88, "00b_build_its_policy_gradient.ipynb": 88}


def text_of(value: str | list[str]) -> str:
    """A notebook stores text as one string or as a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tree_of(cell: dict) -> ast.Module:
    """The parsed cell; an empty module where it is not plain Python, which rule `plain_python` reports."""
    try:
        return ast.parse(text_of(cell["source"]))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def executed_in_order(notebook: dict, shipped: set[str]) -> list[str]:
    counts = [cell.get("execution_count") for cell in code_cells(notebook)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts {counts}"]


def no_stored_error(notebook: dict, shipped: set[str]) -> list[str]:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return [f"error {output.get('ename')}" for output in outputs if output["output_type"] == "error"]


def no_stderr(notebook: dict, shipped: set[str]) -> list[str]:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return [text_of(output["text"]) for output in outputs if output.get("name") == "stderr"]


def png_only(notebook: dict, shipped: set[str]) -> list[str]:
    """Text, Markdown, LaTeX and PNG: HTML and SVG carry random identifiers, and do not print."""
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return [f"output of type {kind}" for output in outputs for kind in output.get("data", {}) if kind not in ALLOWED_OUTPUTS]


def calls_of(cell: dict, *names: str) -> list[ast.Call]:
    """The calls of some functions in a code cell."""
    calls = [node for node in ast.walk(tree_of(cell)) if isinstance(node, ast.Call) and node.args]
    return [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", None)) in names]


def checked_tags(cell: dict) -> set[str]:
    """The literal tags of the calls to check and check_le in a code cell; where it calls check_rows, those of its keys."""
    calls = calls_of(cell, "check", "check_le")
    tags = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    if not calls_of(cell, "check_rows"):
        return tags
    firsts = [node.elts[0] for node in ast.walk(tree_of(cell)) if isinstance(node, ast.Tuple) and len(node.elts) == 2]
    return tags | {first.value for first in firsts if isinstance(first, ast.Constant)}


def every_tag_is_checked(notebook: dict, shipped: set[str]) -> list[str]:
    found, cells = [], notebook["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        following = next((later for later in cells[number + 1 :] if later["cell_type"] == "code"), None)
        checked = checked_tags(following) if following else set()
        tags = re.findall(r"\\tag\*?\s*\{([^}]*)\}", text_of(cell["source"]))
        found += [f"({tag}) is not checked in the next code cell" for tag in tags if tag not in checked]
    return found


def no_shipped_definition(notebook: dict, shipped: set[str]) -> list[str]:
    """A pasted copy would drift from the module; `show` displays the shipped source instead."""
    defined = set()
    for node in (node for cell in code_cells(notebook) for node in ast.walk(tree_of(cell))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return [f"defines {name}, which minidrl ships" for name in sorted(defined & shipped)]


def no_nbval_markers(notebook: dict, shipped: set[str]) -> list[str]:
    found = []
    for number, cell in enumerate(code_cells(notebook), 1):
        tags = FORBIDDEN_TAGS & set(cell["metadata"].get("tags", []))
        found += [f"code cell {number} is tagged {tag}" for tag in sorted(tags)]
        if re.search(r"nbval_|pytest_validate", text_of(cell["source"]), re.IGNORECASE):
            found.append(f"code cell {number} has an nbval marker")
    return found


def short_cells(notebook: dict, shipped: set[str]) -> list[str]:
    lengths = [len(text_of(cell["source"]).splitlines()) for cell in code_cells(notebook)]
    return [f"code cell {n} has {length} lines" for n, length in enumerate(lengths, 1) if length > MAX_CELL_LINES]


def plain_python(notebook: dict, shipped: set[str]) -> list[str]:
    """No magics, no shell, no empty code cell."""
    numbered = enumerate(code_cells(notebook), 1)
    return [f"code cell {number} is empty or not plain Python" for number, cell in numbered if not tree_of(cell).body]


def no_machine_metadata(notebook: dict, shipped: set[str]) -> list[str]:
    """What `make notebooks` leaves out: times and the Python version would change on every machine."""
    found = ["language_info.version"] if "version" in notebook["metadata"].get("language_info", {}) else []
    timed = [number for number, cell in enumerate(code_cells(notebook), 1) if "execution" in cell["metadata"]]
    return found + [f"execution times in code cell {number}" for number in timed]


RULES: dict[str, Callable[[dict, set[str]], list[str]]] = {
    rule.__name__: rule
    for rule in (
        executed_in_order,
        no_stored_error,
        no_stderr,
        png_only,
        every_tag_is_checked,
        no_shipped_definition,
        no_nbval_markers,
        short_cells,
        plain_python,
        no_machine_metadata,
    )
}


def shipped_names() -> set[str]:
    """Public functions and classes at the top level of any module of minidrl."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "minidrl").rglob("*.py")]
    return {node.name for tree in trees for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}


def wide_lines(notebook: dict, width: int) -> list[str]:
    """Lines of code that are longer than the notebook may have them."""
    texts = (text_of(cell["source"]).splitlines() for cell in code_cells(notebook))
    return [line for lines in texts for line in lines if len(line) > width]


@pytest.mark.parametrize("name", WIDTHS)
def test_no_line_of_code_is_too_long(name: str):
    assert wide_lines(CASES[name][0], WIDTHS[name]) == []


def test_a_line_of_code_that_is_too_long_is_found():
    notebook = source("x = 1\n" + "y" * 88 + "\n" + "z" * 89)
    assert wide_lines(notebook, 88) == ["z" * 89]


@pytest.mark.parametrize("path", index.linked(), ids=lambda path: path.name)
def test_links_to_the_source_show_the_line(path: Path):
    text = path.read_text(encoding="utf-8")
    assert index.relinked(text, index.entries()) == text, "python -m minidrl.index"


def test_a_link_follows_its_name():
    entry = next(e for e in index.entries() if e.name == "group_mean")
    at = "[`group_mean`](../minidrl/algorithms.py#L{})"
    assert index.relinked(f"see {at.format(1)}.", [entry]) == f"see {at.format(entry.line)}."
    with pytest.raises(ValueError, match="allowed a name that minidrl/algorithms.py defines"):
        index.relinked("[`group_mena`](../minidrl/algorithms.py#L1)", [entry])


def markdown(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source: str, count: int | None, *outputs: dict) -> dict:
    return {
        "cell_type": "code",
        "metadata": {},
        "source": source.splitlines(keepends=True),  # as nbformat writes it
        "execution_count": count,
        "outputs": list(outputs),
    }


def stream(name: str, text: str) -> dict:
    return {"output_type": "stream", "name": name, "text": [text]}


def example() -> dict:
    """A notebook that keeps every rule."""
    return {
        "metadata": {"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
        "cells": [
            code("from nbtools import check, check_le\n\nshift = lambda x: x + 1", 1),
            markdown("Prose and $$a = b \\tag{1.1}$$ and $$b \\le c \\tag{1.2}$$"),
            markdown("More prose."),
            code('check("1.1", 1, 1)\ncheck_le("1.2", 1, 2)', 2, stream("stdout", "ok (1.1): |a-b| <= 1e-10\n")),
            code("plot()", 3, {"output_type": "display_data", "data": {"image/png": "iVBO", "text/plain": "<Figure>"}}),
        ],
    }


SHIPPED_IN_EXAMPLE = {"group_advantage", "Rollout"}
CASES = {"example": (example(), SHIPPED_IN_EXAMPLE)} | {
    path.name: (json.loads(path.read_text(encoding="utf-8")), shipped_names())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_notebook_keeps_rule(name: str, rule: str):
    notebook, shipped = CASES[name]
    assert RULES[rule](notebook, shipped) == []


def changed(path: tuple, value: object) -> dict:
    """The example with the entry at `path` set to `value`."""
    notebook = copy.deepcopy(example())
    place = notebook
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return notebook


def tagged(tag: str) -> dict:
    return changed(("cells", 4, "metadata"), {"tags": [tag]})


def output(*outputs: dict) -> dict:
    return changed(("cells", 4, "outputs"), list(outputs))


def source(text: str, cell: int = 4) -> dict:
    return changed(("cells", cell, "source"), text)


BAD = {
    "stripped": ("executed_in_order", changed(("cells", 3, "execution_count"), None)),
    "out of order": ("executed_in_order", changed(("cells", 3, "execution_count"), 7)),
    "started at 2": ("executed_in_order", changed(("cells", 0, "execution_count"), 2)),
    "stored error": ("no_stored_error", output({"output_type": "error", "ename": "E", "evalue": "", "traceback": []})),
    "a warning": ("no_stderr", output(stream("stderr", "UserWarning"))),
    "SVG": ("png_only", output({"output_type": "display_data", "data": {"image/svg+xml": "<svg/>"}})),
    "HTML": ("png_only", output({"output_type": "execute_result", "data": {"text/html": "<table/>"}})),
    "JPEG": ("png_only", output({"output_type": "display_data", "data": {"image/jpeg": "/9j/"}})),
    "tag without code": ("every_tag_is_checked", changed(("cells", slice(5, None)), [markdown(r"$$x \tag{1.3}$$")])),
    "another tag": ("every_tag_is_checked", source('check("1.2", 1, 1)\ncheck_le("1.3", 1, 2)', 3)),
    "one tag of two": ("every_tag_is_checked", source('check("1.1", 1, 1)', 3)),
    "check in a comment": ("every_tag_is_checked", source('check("1.1", 1, 1)\n# check_le("1.2", 1, 2)', 3)),
    "another function": ("every_tag_is_checked", source('check("1.1", 1, 1)\nprint("1.2", 1, 2)', 3)),
    "check one cell late": ("every_tag_is_checked", changed(("cells", 2), code("x = 1", 2))),
    "pasted function": ("no_shipped_definition", source("def group_advantage(x):\n    return x")),
    "pasted class": ("no_shipped_definition", source("class Rollout:\n    pass")),
    "pasted lambda": ("no_shipped_definition", source("group_advantage = lambda x: x")),
    "nested copy": ("no_shipped_definition", source("if True:\n    def group_advantage(x):\n        return x")),
    "marker": ("no_nbval_markers", source("plot()  # NBVAL_" + "IGNORE_OUTPUT")),
    "long cell": ("short_cells", source("x = 1\n" * (MAX_CELL_LINES + 1))),
    "magic": ("plain_python", source("%%time\nplot()")),
    "shell": ("plain_python", source("!ls")),
    "empty cell": ("plain_python", source("")),
    "Python version": ("no_machine_metadata", changed(("metadata", "language_info"), {"version": "3.11.7"})),
    "times": ("no_machine_metadata", changed(("cells", 4, "metadata"), {"execution": {"iopub.status.idle": "x"}})),
} | {f"tag {tag}": ("no_nbval_markers", tagged(tag)) for tag in sorted(FORBIDDEN_TAGS)}


@pytest.mark.parametrize("name", BAD)
def test_rule_catches_its_violation(name: str):
    expected, notebook = BAD[name]
    caught = {rule for rule, function in RULES.items() if function(notebook, SHIPPED_IN_EXAMPLE)}
    # moving a cell also disturbs the order of execution: only the named rule has to fire there
    assert expected in caught
    assert caught <= {expected, "executed_in_order"}


def test_every_rule_has_a_violation():
    assert {rule for rule, _ in BAD.values()} == set(RULES)


def test_a_cell_of_the_maximal_length_is_allowed():
    assert short_cells(source("x = 1\n" * MAX_CELL_LINES), set()) == []


# ---------------------------------------------------------------------------------------------------------- tolerances


def tolerances():
    """notebooks/conftest.py, which nbval loads."""
    spec = importlib.util.spec_from_file_location("notebooks_conftest", ROOT / "notebooks" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("reward 0.51, 1,002 calls", "reward 0.50, 1,002 calls"),
        ("reward 0.53, 1,002 calls", "reward 0.53, 1,002 calls"),
        ("reward 0.51, 1,003 calls", "reward 0.50, 1,003 calls"),
        ("reward 0.51", "reward 0.51"),
    ],
)
def test_a_number_within_the_tolerance_is_settled(text, settled):
    assert tolerances().settled(text, "reward 0.50, 1,002 calls", 0.02) == settled


@pytest.mark.parametrize("tags", [["tolerance"], ["tolerance=0"], ["tolerance=x"], ["tolerance=1", "tolerance=2"]])
def test_a_tolerance_is_one_number_above_nothing(tags):
    with pytest.raises(ValueError, match="tags: got"):
        tolerances().tolerance(tags)


# ------------------------------------------------------------------------------------------------------------ nbtools


def test_check_prints_the_bound_and_not_the_residual(capsys):
    nbtools.check("2.1", torch.tensor([1.0, 2.0 + 3e-12], dtype=torch.float64), [1.0, 2.0])
    nbtools.check("2.2", 1.0, 1.01, atol=0.05)
    nbtools.check("2.3", [float("-inf"), 0.0], [float("-inf"), 0.0])
    nbtools.check("2.4", torch.zeros(2, 3), 0)
    assert capsys.readouterr().out == (
        "ok (2.1): |a-b| <= 1e-10\nok (2.2): |a-b| <= 0.05\nok (2.3): |a-b| <= 1e-10\nok (2.4): |a-b| <= 1e-10\n"
    )


def test_check_le_prints_the_inequality(capsys):
    nbtools.check_le("2.1", torch.tensor([1.0, 2.0]), [1.0, 2.5])
    nbtools.check_le("2.2", 1.0 + 1e-13, 1.0, atol=1e-12)
    assert capsys.readouterr().out == "ok (2.1): a <= b\nok (2.2): a <= b + 1e-12\n"


def test_a_check_with_names_prints_both_sides(capsys):
    nbtools.check("2.1", -8.31274, -8.31274 + 1e-12, names="E[Z] = B")
    nbtools.check("2.2", torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5]), [1, 2, 3, 4, 0.5], names="a = b")
    nbtools.check("2.3", torch.zeros(2, 3), 1e-17, names="bias = nothing")
    nbtools.check_le("2.4", 0.1, 13000.12, names="gap <= bias")
    nbtools.check_le("2.5", float("-inf"), 1e-6, names="a <= b")
    assert capsys.readouterr().out.splitlines() == [
        "(2.1)  E[Z] -8.3127   B -8.3127   ok",
        "(2.2)  a [1, 2, 3, 4, ... 5 values]   b [1, 2, 3, 4, ... 5 values]   ok",
        "(2.3)  bias 0   nothing 0   ok",
        "(2.4)  gap 0.1   <=   bias 13,000   ok",
        "(2.5)  a -inf   <=   b 1.000e-06   ok",
    ]


def test_alike_checks_form_a_table_of_values(capsys):
    rows = {("2.3", "Bernoulli"): (-8.31274, -8.31274), ("20.14", "strata"): (torch.tensor(2.0), 2)}
    nbtools.check_rows("E[Z] = B", rows)
    assert capsys.readouterr().out.splitlines() == [
        "                       E[Z]        B",
        "(2.3)    Bernoulli  -8.3127  -8.3127  ok",
        "(20.14)  strata           2        2  ok",
    ]


def test_a_table_with_a_false_row_prints_nothing(capsys):
    with pytest.raises(AssertionError, match=r"\(2\.4, second\) fails: max \|a-b\| = 1\.000e"):
        nbtools.check_rows("a = b", {("2.3", "first"): (1.0, 1.0), ("2.4", "second"): (1.0, 2.0)})
    assert capsys.readouterr().out == ""


def test_what_is_compared_with_itself_is_no_check():
    x = torch.ones(2)
    with pytest.raises(ValueError, match=r"\(2\.1\): got one object on both sides"):
        nbtools.check("2.1", x, x)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1.0, 1.0 + 2e-10),
        (1.0, -1.0),
        ([0.0, 0.0], [0.0, 1.0]),
        (float("nan"), float("nan")),
        ([0.0, float("nan")], [0.0, 0.0]),
        (float("inf"), float("-inf")),
        (float("inf"), 1.0),
    ],
)
def test_check_fails_with_the_residual(a, b, capsys):
    with pytest.raises(AssertionError, match=r"\(2\.1\) fails: max \|a-b\| = (\d\.\d{3}e|nan|inf).* > 1e-10"):
        nbtools.check("2.1", a, b)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("a", "b"), [(2.0, 1.0), ([0.0, 2.0], [1.0, 1.0]), (float("nan"), 1.0), (0.0, float("nan"))])
def test_check_le_fails_with_the_excess(a, b, capsys):
    with pytest.raises(AssertionError, match=r"\(2\.1\) fails: max \(a-b\) = "):
        nbtools.check_le("2.1", a, b)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verdict", [nbtools.check, nbtools.check_le])
@pytest.mark.parametrize(("a", "b"), [([], []), (torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(1), torch.zeros(2))])
def test_a_check_that_compares_nothing_or_broadcasts_is_an_error(verdict, a, b):
    with pytest.raises(ValueError, match=r"\(2\.1\): (shapes differ|nothing to compare)"):
        verdict("2.1", a, b)


@pytest.mark.parametrize("atol", [-1.0, float("nan"), float("inf")])
def test_a_meaningless_tolerance_is_an_error(atol):
    with pytest.raises(ValueError, match="atol: got"):
        nbtools.check("2.1", 1.0, 1.0, atol)


def test_claims_are_those_of_the_ledger(monkeypatch):
    shown = []
    monkeypatch.setattr(nbtools, "display", shown.append)
    nbtools.claims("GDPO")
    rows = [line.strip("| ").split(" | ") for line in shown[0].data.splitlines()]
    assert rows[0] == ["claim", "stated in", "result", "verdict"] and len(rows) == 10
    assert [row[3] for row in rows[2:]].count("holds") == 3
    with pytest.raises(ValueError, match="section: got 'PPO'; allowed The ELBO"):
        nbtools.claims("PPO")


def test_show_leaves_out_docstrings_and_nothing_else(monkeypatch):
    shown = []
    monkeypatch.setattr(nbtools, "display", shown.append)
    nbtools.show(tree_of)
    assert shown[0].data == (
        "```python\n"
        "def tree_of(cell: dict) -> ast.Module:\n"
        "    try:\n"
        '        return ast.parse(text_of(cell["source"]))\n'
        "    except SyntaxError:\n"
        "        return ast.Module(body=[], type_ignores=[])\n"
        "```"
    )


def test_lines_of_another_notebook_run_as_they_stand_there(monkeypatch, tmp_path):
    cells = [
        code("import math\n\nA, B = 1, 2  # two names\nrow = [0, 0]\nrow[A] = 5\nprint(A)", 1),
        markdown("twice = 7"),
        code("@math.floor\ndef not_wanted():\n    pass", 2),
        code("import functools\n\n\n@functools.cache\ndef twice(x):\n    # why\n    return 2 * x", 3),
    ]
    (tmp_path / "other.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(nbtools, "__file__", str(tmp_path / "nbtools.py"))
    expected = "A, B = 1, 2  # two names\n@functools.cache\ndef twice(x):\n    # why\n    return 2 * x"
    assert nbtools.lines_of("other.ipynb", "twice", "B") == expected
    for name in ("row2", "math", "x"):
        with pytest.raises(ValueError, match=f"names: got {name}; allowed what other.ipynb defines"):
            nbtools.lines_of("other.ipynb", "A", name)


def test_docstrings_of_methods_go_and_comments_stay():
    text = 'class A:\n    """Doc.\n\n    More."""\n\n    # why\n    def f(self):\n        "Doc."\n        return "a"\n'
    assert nbtools.without_docstrings(text) == 'class A:\n    # why\n    def f(self):\n        return "a"'
    only = 'def f():\n    """Doc."""'
    assert nbtools.without_docstrings(only) == only
