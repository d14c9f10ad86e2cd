r"""Static rules for notebooks/*.ipynb, and the tools that notebooks use. No kernel is started here.

nbval compares the stored outputs; it does not see a notebook whose outputs were stripped, a marker that switches the
comparison off, or an equation without a check. These rules close the holes. Each rule is a function from a notebook
(and the names that minidrl ships) to a list of violations, and each is shown to catch its own violation.
"""

import ast
import copy
import functools
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "notebooks"))  # a notebook's kernel starts in its folder

import nbtools  # noqa: E402
import train_00a  # noqa: E402
from minidrl import algorithms as alg  # noqa: E402
from minidrl import index  # noqa: E402

ALLOWED_OUTPUTS = {"text/plain", "text/markdown", "text/latex", "image/png"}
FORBIDDEN_TAGS = {"nbval-ignore-output", "nbval-skip", "nbval-raises-exception", "raises-exception"}
MAX_CELL_LINES, MAX_CHECKS = 30, 15
WIDTH = 88  # columns of a line of code: a cell needs no scrolling beside its output


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


def every_check_has_names(notebook: dict, shipped: set[str]) -> list[str]:
    """A verdict without the two numbers shows nothing. A table of checks has its names as the first argument."""
    calls = [call for cell in code_cells(notebook) for call in calls_of(cell, "check", "check_le")]
    bare = [call for call in calls if "names" not in {keyword.arg for keyword in call.keywords}]
    return [f"no names: {ast.unparse(call)}" for call in bare]


def few_checks(notebook: dict, shipped: set[str]) -> list[str]:
    """More than these are not read."""
    calls = [call for cell in code_cells(notebook) for call in calls_of(cell, "check", "check_le", "check_rows")]
    return [f"{len(calls)} calls of a check; allowed {MAX_CHECKS}"] if len(calls) > MAX_CHECKS else []


def narrow_code(notebook: dict, shipped: set[str]) -> list[str]:
    texts = (text_of(cell["source"]).splitlines() for cell in code_cells(notebook))
    return [f"{len(line)} columns: {line}" for lines in texts for line in lines if len(line) > WIDTH]


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


def made_by_name(notebook: dict, shipped: set[str]) -> list[str]:
    """`Rollout.of` and `Plan.of` take one tensor and names; the constructors take six to nine tensors in an order."""
    calls = [call for cell in code_cells(notebook) for call in ast.walk(tree_of(cell)) if isinstance(call, ast.Call)]
    names = [getattr(call.func, "id", getattr(call.func, "attr", None)) for call in calls]
    return [f"calls {name}; allowed {name}.of" for name in names if name in ("Rollout", "Plan")]


RULES: dict[str, Callable[[dict, set[str]], list[str]]] = {
    rule.__name__: rule
    for rule in (
        made_by_name,
        executed_in_order,
        no_stored_error,
        no_stderr,
        png_only,
        every_tag_is_checked,
        every_check_has_names,
        few_checks,
        narrow_code,
        no_shipped_definition,
        no_nbval_markers,
        short_cells,
        plain_python,
        no_machine_metadata,
    )
}


@functools.cache
def shipped_names() -> set[str]:
    """Public functions and classes at the top level of any module of minidrl."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "minidrl").rglob("*.py")]
    return {node.name for tree in trees for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}


@pytest.mark.parametrize("path", index.linked(), ids=lambda path: path.name)
def test_links_to_the_source_show_the_line(path: Path):
    text = path.read_text(encoding="utf-8")
    assert index.relinked(text, index.entries()) == text, "the lines of its links have moved: run `make pages`"


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


EXAMPLE_CHECKS = 'check("1.1", 1, 1, names="a = b")\ncheck_le("1.2", 1, 2, names="b <= c")'


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
            code(EXAMPLE_CHECKS, 2, stream("stdout", "(1.1)  a 1   b 1   ok\n")),
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
    "another tag": ("every_tag_is_checked", source(EXAMPLE_CHECKS.replace("1.2", "1.3"), 3)),
    "one tag of two": ("every_tag_is_checked", source(EXAMPLE_CHECKS.splitlines()[0], 3)),
    "check in a comment": ("every_tag_is_checked", source(EXAMPLE_CHECKS.replace("check_le", "# check_le"), 3)),
    "another function": ("every_tag_is_checked", source(EXAMPLE_CHECKS.replace("check_le", "print"), 3)),
    "check one cell late": ("every_tag_is_checked", changed(("cells", 2), code("x = 1", 2))),
    "no names": ("every_check_has_names", source('check("1.3", 1, 1)')),
    "an inequality without names": ("every_check_has_names", source('nbtools.check_le("1.3", 1, 1, 0.5)')),
    "too many checks": ("few_checks", source('check_rows("a = b", rows)\n' * (MAX_CHECKS - 1))),
    "wide line": ("narrow_code", source("y" * (WIDTH + 1))),
    "pasted function": ("no_shipped_definition", source("def group_advantage(x):\n    return x")),
    "pasted class": ("no_shipped_definition", source("class Rollout:\n    pass")),
    "pasted lambda": ("no_shipped_definition", source("group_advantage = lambda x: x")),
    "nested copy": ("no_shipped_definition", source("if True:\n    def group_advantage(x):\n        return x")),
    "a rollout by position": ("made_by_name", source("alg.Rollout(prompt, seen, row, keep, step, logp, 1, None)")),
    "a plan, imported": ("made_by_name", source("plan = Plan(hidden=a, scored=b, weight=c, valid=d)")),
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


def test_what_is_at_a_limit_is_allowed():
    assert short_cells(source("x = 1\n" * MAX_CELL_LINES), set()) == []
    assert few_checks(source('check_rows("a = b", rows)\n' * (MAX_CHECKS - 2)), set()) == []
    assert narrow_code(source("y" * WIDTH), set()) == []


# ------------------------------------------------------------------------------------------------------------- lessons
# Notebooks 01 to 09 have one form: what is needed, the lesson, three sentences to take away, the exercise notebook; and
# the letters of docs/glossary.md, each with one meaning, which hold in notebook 10 as well. What a lesson leaves out is in
# its companion, which has the same form and leads back to the lesson.

LESSONS = [name for name in CASES if re.match(r"0[1-9]_", name)]
COMPANIONS = [name for name in CASES if re.match(r"0[1-9]a_", name)]
AFTER = ["10_the_map.ipynb", "10a_more_rows.ipynb", "10b_which_rows_are_one.ipynb"]
WITH_SYMBOLS = [*LESSONS, *COMPANIONS, *AFTER]
MOST_NEEDS, MOST_SENTENCE = 40, 50  # words
Symbols = dict[str, str]  # {"L": "positions of a response"}


def markdown_of(notebook: dict) -> str:
    return "\n\n".join(text_of(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def starts_with_needs(name: str, notebook: dict) -> list[str]:
    head = next((line for line in text_of(notebook["cells"][0]["source"]).splitlines() if line.startswith("> ")), "")
    short = len(head.split()) <= MOST_NEEDS
    return [] if head.startswith("> **Needs.** ") and short else [f"first quoted line {head!r}"]


def ends_with_three_sentences(name: str, notebook: dict) -> list[str]:
    last = text_of(notebook["cells"][-1]["source"])
    if notebook["cells"][-1]["cell_type"] != "markdown" or not last.startswith("## To take away\n"):
        return ["the last cell is not '## To take away'"]
    items = re.findall(r"^(\d)\. (.*)$", last, flags=re.MULTILINE)
    found = [] if [number for number, _ in items] == ["1", "2", "3"] else [f"{len(items)} sentences to take away"]
    for number, item in items:
        ends = len(re.findall(r"[.!?](?=\s|$)", item))
        if ends != 1 or not item.endswith(".") or len(item.split()) > MOST_SENTENCE:
            found.append(f"item {number} has {ends} sentences, {len(item.split())} words")
    return found


def lesson_of(companion: str) -> str:
    """05a_gdpo_measured.ipynb belongs to 05_gdpo.ipynb; one with a name of its own, as 07a, to the lesson of its number."""
    measured = re.fullmatch(r"(0[1-9])a_([a-z_]*)_measured\.ipynb", companion)
    if measured:
        return f"{measured[1]}_{measured[2]}.ipynb"
    return next((name for name in LESSONS if companion.startswith(f"{name[:2]}a_")), companion)


def ends_with_links(name: str, notebook: dict) -> list[str]:
    last, lesson = text_of(notebook["cells"][-1]["source"]), lesson_of(name)
    wanted = ["../docs/glossary.md", f"../exercises/{name}" if lesson == name else lesson]
    return [f"no link to {path} at the end" for path in wanted if f"]({path})" not in last]


def symbol_rows(text: str) -> Symbols:
    """The rows of all tables with the heading `symbol | meaning`, once or twice side by side."""
    found, inside = {}, False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.replace(r"\|", "&#124;").strip().strip("|").split("|")]
        if cells[:2] == ["symbol", "meaning"]:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not set(cells[0]) <= set("-: "):
            found |= {cells[k].strip("$"): cells[k + 1] for k in range(0, len(cells) - 1, 2) if cells[k]}
    return found


def glossary() -> Symbols:
    return symbol_rows((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))


def symbols_in(latex: str, listed: Symbols) -> set[str]:
    """Which of the listed symbols a formula uses. Not letters in words, in other alphabets, or as `V` with an index."""
    words = r"text|mathtt|mathrm|operatorname\*?|mathcal|mathbb|mathbf|begin|end|tag"
    latex = re.sub(rf"\\({words})\s*\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}", " ", latex)
    latex = re.sub(r"\\(mathtt|mathrm|mathcal|mathbb|mathbf)\s*\\?[A-Za-z0-9]", " ", latex)
    latex = re.sub(r"\\rm\s+\w+|\{l+\}|\bV_", " ", latex)
    commands = {name for name in re.findall(r"\\[A-Za-z]+", latex)} & set(listed)
    latex = re.sub(r"\\[A-Za-z]+", " ", latex)
    plain = {key for key in listed if re.fullmatch(r"[A-Za-z]", key) and key in latex}
    calls = {key for key in listed if re.fullmatch(r"[A-Za-z]\(\w\)", key) and re.search(rf"(?<![A-Za-z]){key[0]}\(", latex)}
    calls |= {"S(M)"} & set(listed) if "S" in latex else set()  # S alone would be another thing
    return commands | plain | calls


def symbols_are_listed(name: str, notebook: dict) -> list[str]:
    """Every symbol of the glossary that a numbered equation uses is in the notebook's own table."""
    text, listed = markdown_of(notebook), glossary()
    formulas = [formula for formula in re.findall(r"\$\$(.*?)\$\$", text, flags=re.DOTALL) if r"\tag" in formula]
    used = set().union(*(symbols_in(formula, listed) for formula in formulas)) if formulas else set()
    return [f"${symbol}$ is in a numbered equation and in no table" for symbol in sorted(used - set(symbol_rows(text)))]


def symbols_mean_one_thing(name: str, notebook: dict) -> list[str]:
    """A table gives a symbol of the glossary in the glossary's words; more may follow, after a semicolon."""
    own, listed = symbol_rows(markdown_of(notebook)), glossary()
    both = sorted(set(own) & set(listed))
    return [f"${key}$: {own[key]!r}; allowed {listed[key]!r}" for key in both if own[key].split("; here ")[0] != listed[key]]


DEFINES = r"(?:[Ll]et|[Ww]rite|[Ww]ith) \$([^$]+)\$ (?:be|for|the|a|of) ([^.:;,()]*)"


def prose_agrees(name: str, notebook: dict) -> list[str]:
    """Where prose says "Write $J$ for the ...", it has a word of the glossary's meaning."""
    listed, found = glossary(), []
    for symbol, said in re.findall(DEFINES, markdown_of(notebook)):
        key = next((key for key in (symbol, re.sub(r"\\hat |_\{?\w+\}?|\(.*", "", symbol)) if key in listed), None)
        stems = {word[:5].lower() for word in re.findall(r"[A-Za-z]{4,}", listed.get(key, ""))}
        if key and not stems & {word[:5].lower() for word in re.findall(r"[A-Za-z]{4,}", said)}:
            found.append(f"${symbol}$ {said!r}; the glossary has {listed[key]!r}")
    return found


LETTERS = {rule.__name__: rule for rule in (symbols_are_listed, symbols_mean_one_thing, prose_agrees)}
FORM = {rule.__name__: rule for rule in (starts_with_needs, ends_with_three_sentences, ends_with_links)} | LETTERS


@pytest.mark.parametrize("rule", FORM)
@pytest.mark.parametrize("name", [*LESSONS, *COMPANIONS])
def test_a_lesson_has_the_form_of_all(name: str, rule: str):
    assert FORM[rule](name, CASES[name][0]) == []


@pytest.mark.parametrize("rule", LETTERS)
@pytest.mark.parametrize("name", AFTER)
def test_a_letter_means_the_same_after_the_lessons(name: str, rule: str):
    assert LETTERS[rule](name, CASES[name][0]) == []


def test_every_lesson_is_there_with_its_exercises():
    assert [name[:2] for name in LESSONS] == [f"{k:02}" for k in range(1, 10)]
    assert all((ROOT / "exercises" / name).exists() for name in LESSONS)


def test_a_companion_and_its_lesson_name_each_other():
    assert {lesson_of(name) for name in COMPANIONS} <= set(LESSONS)
    for name in COMPANIONS:
        assert f"]({name}" in markdown_of(CASES[lesson_of(name)][0]) and f"]({lesson_of(name)})" in markdown_of(CASES[name][0])


def test_a_companion_leads_back_to_its_lesson():
    last = markdown("## To take away\n\n[a](../docs/glossary.md), [b](01_x.ipynb)")
    assert ends_with_links("01a_x_measured.ipynb", {"cells": [last]}) == []
    other = markdown("## To take away\n\n[a](../docs/glossary.md), [b](02_x.ipynb)")
    assert ends_with_links("01a_x_measured.ipynb", {"cells": [other]}) == ["no link to 01_x.ipynb at the end"]


def test_a_companion_with_a_name_of_its_own_belongs_to_the_lesson_of_its_number():
    assert lesson_of("07a_stabledrl_on_blocks.ipynb") == "07_staircase_attention.ipynb"
    assert [lesson_of(name) for name in LESSONS] == LESSONS


LESSON = [
    "# 1. Title\n\n> **Needs.** Notebook 1.\n\n| symbol | meaning | symbol | meaning |\n|---|---|---|---|\n"
    "| $L$ | positions of a response | $l$ | number of hidden positions; here drawn |\n| $c$ | a constant | | |\n",
    "Write $J$ for the expected reward of a model. $$L+l=c \\tag{1.1}$$ and $$\\mathcal N=V_{\\text{mask}}\\,n$$",
    "## To take away\n\n1. One is 0.5.\n2. Two is more.\n3. Three.\n\n[a](../docs/glossary.md), [b](../exercises/01_x.ipynb)",
]
BAD_LESSONS = {
    "needs later": ("starts_with_needs", 0, "> **Needs.**", "> **Asks.** What?\n>\n> **Needs.**"),
    "needs a page": ("starts_with_needs", 0, "Notebook 1.", "word " * MOST_NEEDS),
    "no ending": ("ends_with_three_sentences", 2, "## To take away", "## The end"),
    "two sentences": ("ends_with_three_sentences", 2, "3. Three.\n", ""),
    "two in one": ("ends_with_three_sentences", 2, "Two is more.", "Two is more. It is."),
    "a long one": ("ends_with_three_sentences", 2, "Two is more.", "word " * MOST_SENTENCE + "more."),
    "no glossary": ("ends_with_links", 2, "../docs/glossary.md", "../docs/faq.md"),
    "another exercise": ("ends_with_links", 2, "01_x", "02_x"),
    "a symbol in no table": ("symbols_are_listed", 1, "L+l", "L+W"),
    "a function in no table": ("symbols_are_listed", 1, "L+l", "a(l)"),
    "a Greek letter in no table": ("symbols_are_listed", 1, "L+l", r"\hat\rho_j"),
    "a letter as an index": ("symbols_are_listed", 1, "L+l", r"\sum_{k=1}^K"),
    "two meanings": ("symbols_mean_one_thing", 0, "positions of a response", "layers of the network"),
    "defined as another": ("prose_agrees", 1, "expected reward of a model", "Jacobian of the network"),
}


def lesson(cell: int = 0, old: str = "", new: str = "") -> dict:
    texts = [text.replace(old, new, 1) if k == cell and old else text for k, text in enumerate(LESSON)]
    return {"cells": [markdown(text) for text in texts]}


def test_the_example_of_a_lesson_keeps_the_form():
    assert {rule: function("01_x.ipynb", lesson()) for rule, function in FORM.items()} == {rule: [] for rule in FORM}


@pytest.mark.parametrize("name", BAD_LESSONS)
def test_a_broken_form_is_seen(name: str):
    rule, cell, old, new = BAD_LESSONS[name]
    assert old in LESSON[cell]
    assert {rule} == {key for key, function in FORM.items() if function("01_x.ipynb", lesson(cell, old, new))}


def test_every_rule_of_the_form_is_broken_once():
    assert {rule for rule, *_ in BAD_LESSONS.values()} == set(FORM)


# ------------------------------------------------------------------------------------------------------------ glossary


def glossary_rows() -> list[list[str]]:
    """The cells of the rows of words, without the heading."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Symbols")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(words: str, text: str) -> bool:
    """True where a text has one of the words; one that stands in backticks, as code or in a formula."""
    for word in re.sub(r"\[(.*?)\]\([^)]*\)", r"\1", words).split(", "):
        bare = re.escape(word.strip("`"))
        found = rf"`{bare}`|mathtt\{{{bare}\}}" if word[0] == "`" else rf"(?i)\b{bare}s?\b"
        if re.search(found, text):
            return True
    return False


@pytest.mark.parametrize("row", glossary_rows(), ids=lambda row: row[0])
def test_a_word_is_met_first_where_the_glossary_says(row: list[str]):
    words, _, _, met, _ = row
    texts = {name.partition("_")[0]: markdown_of(notebook) for name, (notebook, _) in CASES.items() if name[0].isdigit()}
    assert met == next((number for number, text in texts.items() if names(words, text)), ""), words


def test_a_word_is_found_as_a_word():
    assert names("plan", "Two plans.") and names("[`Plan`](../x.py), plan", "a Plan") and names("`ll`", "its `ll`")
    assert names("`ll`", r"$\mathtt{ll}_b$") and not names("`ll`", "all, ll") and not names("plan", "planned")


# ---------------------------------------------------------------------------------------------------- pictures of plans


@pytest.fixture
def ax():
    figure, axes = plt.subplots(layout="constrained")
    yield axes
    plt.close(figure)


def two_states() -> alg.Plan:
    """A prompt of two tokens, a response of three whose last is padding: hidden in both states, scored in none."""
    hidden = [[[True, False, True, False, True]], [[False, False, False, False, True]]]
    return alg.Plan.of([[[True, False, False]], [[False] * 3]], hidden=hidden, weight=[[1.5], [0.25]])


def texts_of(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_plan_is_drawn_as_what_is_hidden_scored_and_weighed(ax):
    nbtools.draw_plan(ax, two_states(), "abcde", title="two states")
    (cells,) = ax.collections
    assert cells.get_array().tolist() == [[1, 0, 2, 0, 1], [0, 0, 0, 0, 1]]
    colors = [to_hex(color) for color in cells.get_cmap().colors]
    assert [to_hex(patch.get_facecolor()) for patch in ax.figure.legends[0].get_patches()] == colors
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()] == ["visible", "hidden only", "hidden and scored"]
    # what the network does not see and nobody asks for is not written; the second state scores nothing
    assert texts_of(ax) == ["b", "c", "d", "a", "b", "c", "d", "1.50", "no call", "weight"]
    assert (ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel()) == ("two states", "prompt | position", "state")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "3"] and ax.get_xticks().tolist() == [2.5, 4.5]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["1", "2"] and ax.get_ylim() == (2, 0)
    assert [line.get_xdata()[0] for line in ax.lines] == [2]  # the prompt ends


def test_the_prompt_is_left_out_where_the_text_is_the_response(ax):
    nbtools.draw_plan(ax, two_states(), ["c", "d", "e"])
    assert ax.collections[0].get_array().tolist() == [[2, 0, 1], [0, 0, 1]]
    assert texts_of(ax)[:2] == ["c", "d"] and ax.get_xlabel() == "position" and len(ax.lines) == 0


def test_another_response_of_a_plan_is_drawn(ax):
    plan = alg.Plan.of([[[True, False], [False, True]]], weight=[[1.0, 3.0]])
    nbtools.draw_plan(ax, plan, answer=1)
    assert ax.collections[0].get_array().tolist() == [[0, 2]] and texts_of(ax) == ["3.00", "weight"]


def test_a_replay_is_labelled_by_its_steps_and_a_figure_has_one_legend(ax):
    plan = alg.Plan.of([[[True, False]], [[False, True]]], step=torch.tensor([[7], [4]]))
    nbtools.draw_plan(ax, plan)
    nbtools.draw_plan(ax, plan)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["7", "4"] and ax.get_ylabel() == "state before step"
    assert len(ax.figure.legends) == 1


def test_a_staircase_is_ruled_by_blocks_and_forwards(ax):
    scored = torch.eye(4).repeat(2, 1)[:, None] > 0  # 8 states of 4 blocks of one token: two forwards
    nbtools.draw_plan(ax, alg.Plan.of(scored, block_length=1))
    across = [line.get_ydata()[0] for line in ax.lines if line.get_xdata() == [0, 1]]
    assert across == [4] and [line.get_xdata()[0] for line in ax.lines if line.get_ydata() == [0, 1]] == [1, 2, 3]


@pytest.mark.parametrize("text", ["ab", "abcd", "abcdef"])
def test_a_text_of_another_length_is_refused(ax, text: str):
    with pytest.raises(ValueError, match=f"text: got {len(text)} tokens; allowed 3 of the response, 5 with the prompt"):
        nbtools.draw_plan(ax, two_states(), text)


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


def test_numbers_to_the_right_of_a_column_are_settled_with_their_spaces():
    stored, other = "clip    9.5    100\n", "clip   10.4     90\n"
    assert tolerances().settled(other, stored, 1) == "clip    9.5     90\n"
    assert tolerances().settled(other, stored, 10) == stored
    elsewhere = stored.replace("    100", "      100")
    assert tolerances().settled(elsewhere, stored, 10) == elsewhere


@pytest.mark.parametrize("tags", [["tolerance"], ["tolerance=0"], ["tolerance=x"], ["tolerance=1", "tolerance=2"]])
def test_a_tolerance_is_one_number_above_nothing(tags):
    with pytest.raises(ValueError, match="tags: got"):
        tolerances().tolerance(tags)


# ------------------------------------------------------------------------------------------------------------ nbtools


def test_a_check_prints_both_sides_and_not_the_residual(capsys):
    nbtools.check("2.1", torch.tensor([1.0, 2.0 + 3e-12], dtype=torch.float64), [1.0, 2.0], names="a = b")
    nbtools.check("2.2", 1.0, 1.01, atol=0.05, names="a = b")
    nbtools.check("2.3", [float("-inf"), 0.0], [float("-inf"), 0.0], names="a = b")
    nbtools.check("2.4", torch.zeros(2, 3), 0, names="a = b")
    nbtools.check_le("2.5", torch.tensor([1.0, 2.0]), [1.0, 2.5], names="a <= b")
    nbtools.check_le("2.6", 1.0 + 1e-13, 1.0, atol=1e-12, names="a <= b")
    assert capsys.readouterr().out.splitlines() == [
        "(2.1)  a [1, 2]   b [1, 2]   ok",
        "(2.2)  a 1   b 1.01   ok",
        "(2.3)  a [-inf, 0]   b [-inf, 0]   ok",
        "(2.4)  a 0   b 0   ok",
        "(2.5)  a [1, 2]   <=   b [1, 2.5]   ok",
        "(2.6)  a 1   <=   b 1   ok",
    ]


@pytest.mark.parametrize("names", ["", "a", "a = ", "a=b", "a <= b", "a = b = c"])
def test_a_check_names_both_sides(names, capsys):
    with pytest.raises(ValueError, match="names: got '.*'; allowed 'one = another'"):
        nbtools.check("2.1", 1, 1, names=names)
    with pytest.raises(ValueError, match="names: got '.*'; allowed 'one = another'"):
        nbtools.check_rows(names, {})
    with pytest.raises(ValueError, match="names: got '.*'; allowed 'one <= another'"):
        nbtools.check_le("2.1", 1, 1, names=names.replace("<=", "="))
    assert capsys.readouterr().out == ""


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
    rows = {("2.3", "Bernoulli"): (-8.31274, -8.31274), ("20.15", "strata"): (torch.tensor(2.0), 2)}
    nbtools.check_rows("E[Z] = B", rows)
    assert capsys.readouterr().out.splitlines() == [
        "                       E[Z]        B",
        "(2.3)    Bernoulli  -8.3127  -8.3127",
        "(20.15)  strata           2        2",
        "all 2 ok",
    ]
    nbtools.check_rows("a = b", {("2.3", "alone"): (1.0, 1.0)})
    assert capsys.readouterr().out.splitlines()[1:] == ["(2.3)  alone  1  1", "ok"]


def test_a_table_of_equations_and_bounds_prints_the_signs(capsys):
    rows = {("2.3", "mean"): (-0.5, -0.5), ("2.4", "bias"): (0.1, "<=", torch.tensor(13000.12)), ("2.4", "slack"): (1, "<=", 1)}
    nbtools.check_rows("left = right", rows)
    assert capsys.readouterr().out.splitlines() == [
        "              left       right",
        "(2.3)  mean   -0.5  =     -0.5",
        "(2.4)  bias    0.1  <=  13,000",
        "(2.4)  slack     1  <=       1",
        "all 3 ok",
    ]


def test_a_bound_in_a_table_is_judged(capsys):
    with pytest.raises(AssertionError, match=r"\(2\.4, second\) fails: max \(a-b\) = 1\.000e"):
        nbtools.check_rows("a = b", {("2.3", "first"): (1.0, 1.0), ("2.4", "second"): (2.0, "<=", 1.0)})
    with pytest.raises(ValueError, match=r"\(2\.4\), second: got the sign '<'; allowed = and <="):
        nbtools.check_rows("a = b", {("2.4", "second"): (1.0, "<", 2.0)})
    assert capsys.readouterr().out == ""


def test_a_table_with_a_false_row_prints_nothing(capsys):
    with pytest.raises(AssertionError, match=r"\(2\.4, second\) fails: max \|a-b\| = 1\.000e"):
        nbtools.check_rows("a = b", {("2.3", "first"): (1.0, 1.0), ("2.4", "second"): (1.0, 2.0)})
    assert capsys.readouterr().out == ""


def test_what_is_compared_with_itself_is_no_check():
    x = torch.ones(2)
    with pytest.raises(ValueError, match=r"\(2\.1\): got one object on both sides"):
        nbtools.check("2.1", x, x, names="a = b")


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
        nbtools.check("2.1", a, b, names="a = b")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("a", "b"), [(2.0, 1.0), ([0.0, 2.0], [1.0, 1.0]), (float("nan"), 1.0), (0.0, float("nan"))])
def test_check_le_fails_with_the_excess(a, b, capsys):
    with pytest.raises(AssertionError, match=r"\(2\.1\) fails: max \(a-b\) = "):
        nbtools.check_le("2.1", a, b, names="a <= b")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("verdict", "names"), [(nbtools.check, "a = b"), (nbtools.check_le, "a <= b")])
@pytest.mark.parametrize(("a", "b"), [([], []), (torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(1), torch.zeros(2))])
def test_a_check_that_compares_nothing_or_broadcasts_is_an_error(verdict, names, a, b):
    with pytest.raises(ValueError, match=r"\(2\.1\): (shapes differ|nothing to compare)"):
        verdict("2.1", a, b, names=names)


def test_a_wide_check_stands_on_two_lines(capsys):
    nbtools.check("2.1", [1.0] * 9, [1.0] * 9, names=f"{'a' * 50} = {'b' * 50}")
    nbtools.check_le("2.1", [1.0] * 9, [2.0] * 9, names=f"{'a' * 50} <= {'b' * 50}")
    one, other, low, high = capsys.readouterr().out.splitlines()
    assert one.startswith("(2.1)  aaa") and other.startswith("       bbb") and other.endswith("   ok")
    assert low.startswith("(2.1)  aaa") and high.startswith("       <=   bbb") and high.endswith("   ok")


@pytest.mark.parametrize("atol", [-1.0, float("nan"), float("inf")])
def test_a_meaningless_tolerance_is_an_error(atol):
    with pytest.raises(ValueError, match="atol: got"):
        nbtools.check("2.1", 1.0, 1.0, atol, names="a = b")


def test_claims_are_those_of_the_ledger(monkeypatch):
    shown = []
    monkeypatch.setattr(nbtools, "display", shown.append)
    nbtools.claims("GDPO")
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in shown[0].data.splitlines()]
    assert rows[0] == ["claim", "stated in", "seeds", "result", "holds if", "verdict", "decided by"]
    assert len(rows) == 37 and {len(row) for row in rows} == {7}
    found = {row[0]: row for row in rows[2:]}
    bias = found["Quadrature has no bias from half as many nodes as positions on."]
    assert bias[2] == "exact, 20 tables" and bias[4:6] == ["<= 1e-8", "holds"]
    assert bias[6].replace("<wbr>", "") == "<code>law_quadrature_is_exact_from_half_the_length</code>, notebook 05 (50.6)"
    assert "<code>law_<wbr>quadrature_<wbr>is" in bias[6], "a name as wide as its column cannot be broken"
    with pytest.raises(ValueError, match="section: got 'PPO'; allowed The ELBO"):
        nbtools.claims("PPO")


def test_claims_may_be_chosen_by_how_they_begin(monkeypatch):
    shown = []
    monkeypatch.setattr(nbtools, "display", shown.append)
    nbtools.claims("GDPO")
    nbtools.claims("GDPO", "Quadrature has no bias", "SDMC")
    whole, chosen = (page.data.splitlines() for page in shown)
    starts = ("| Quadrature has no bias", "| SDMC")
    assert chosen[2:] == [line for line in whole[2:] if line.startswith(starts)] and 1 < len(chosen[2:]) < len(whole[2:])
    with pytest.raises(ValueError, match="starts: got 'quadrature'; allowed how a claim of GDPO begins"):
        nbtools.claims("GDPO", "Quadrature", "quadrature")


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


def test_lines_of_another_notebook_run_as_they_stand_there(monkeypatch, tmp_path, capsys):
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
    into = {"functools": functools}
    nbtools.borrow("other.ipynb", into, "twice B")
    assert capsys.readouterr().out == expected + "\n" and into["twice"](into["B"]) == 4
    monkeypatch.setattr(nbtools, "display", lambda shown: print(shown.data))
    nbtools.borrow("other.ipynb", into, "A", folded="Two numbers")
    head = "<details><summary>Two numbers (<code>A</code>)</summary>"
    assert capsys.readouterr().out == f"{head}\n\n```python\nA, B = 1, 2  # two names\n```\n\n</details>\n"
    assert into["A"] == 1
    for name in ("row2", "math", "x"):
        with pytest.raises(ValueError, match=f"names: got {name}; allowed what other.ipynb defines"):
            nbtools.lines_of("other.ipynb", "A", name)


def test_docstrings_of_methods_go_and_comments_stay():
    text = 'class A:\n    """Doc.\n\n    More."""\n\n    # why\n    def f(self):\n        "Doc."\n        return "a"\n'
    assert nbtools.without_docstrings(text) == 'class A:\n    # why\n    def f(self):\n        return "a"'
    only = 'def f():\n    """Doc."""'
    assert nbtools.without_docstrings(only) == only


@pytest.mark.slow
def test_the_stored_model_of_00a_is_the_one_that_its_lines_train():
    """On another processor the sums have another order: not the same weights, as good ones."""
    found = train_00a.notebook()
    models = train_00a.trained(found), found["Transformer"]()
    models[1].load_state_dict(load_file(train_00a.STORED))
    rng, masks = np.random.default_rng(1), torch.Generator().manual_seed(1)
    tokens = found["to_ids"](*found["demonstrations"](2000, rng))
    hidden = found["hide"](2000, masks)
    with torch.no_grad():
        new, stored = (found["minus_elbo"](model, tokens, *hidden).mean().item() for model in models)
    assert stored == pytest.approx(new, abs=0.15)
