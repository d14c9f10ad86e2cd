"""What can be checked by reading the repository: imports, docstrings, size limits, examples, links, pins, private paths.

Each check is a function from source text to a list of problems. It runs on the files that exist, and on small wrong
examples that it must reject.
"""

import ast
import dataclasses
import doctest
import importlib.util
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import yaml
from jaxtyping import TypeCheckError, install_import_hook
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "minidrl"
# What these import of the package, and nothing else: the equations and their judge nothing, features and rows the equations.
FOUNDATIONS = {f"{PACKAGE}.{name}": set() for name in ("algorithms", "oracle", "launch", "tables", "tasks")}
FOUNDATIONS |= {f"{PACKAGE}.{name}": {f"{PACKAGE}.algorithms"} for name in ("features", "methods")}
FOUNDATIONS |= {f"{PACKAGE}.sampler": {f"{PACKAGE}.algorithms", f"{PACKAGE}.features"}}  # what a network is, it has from there
# These use the rest, and nothing below uses them; a loop uses those before it only.
LOOPS = tuple(f"{PACKAGE}.{name}" for name in ("trainer", "controls", "studies", "verify", "__main__"))
WIDTH, WIDTHS = 100, {f"{PACKAGE}.algorithms": 88}  # columns
MAX_BODY, MIN_PROSE = 20, 1 / 3


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
PACKAGES = {module_name(path) for path in (ROOT / PACKAGE).rglob("__init__.py")}

# ------------------------------------------------------------------------------------------------------------ imports


def imports_of(name: str, source: str, modules: Iterable[str], packages: Iterable[str] = (PACKAGE,)) -> set[str]:
    """The modules of this package that module `name` imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: len(name.split(".")) - node.level + (name in packages)]
                base = ".".join([*parents, base] if base else parents)
            # `from package import x` means the module package.x where there is one, otherwise the package itself
            found |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return {module for module in found if module.split(".")[0] == PACKAGE and module != name}


def import_problems(graph: dict[str, set[str]]) -> list[str]:
    """Imports that do not point one way: __main__ -> trainer -> runs, memory, rehearsal -> features, methods -> algorithms."""
    found = []
    for name in sorted(set(FOUNDATIONS) & set(graph)):
        found += [f"{name} imports {other}" for other in sorted(graph[name] - FOUNDATIONS[name])]
    for name in sorted(graph):
        above = LOOPS[LOOPS.index(name) :] if name in LOOPS else LOOPS
        found += [f"{name} imports {loop}" for loop in above if loop in graph[name]]
    remaining = dict(graph)
    while free := [name for name, imports in remaining.items() if not imports & set(remaining)]:
        for name in free:
            del remaining[name]
    return found + ([f"import cycle among {sorted(remaining)}"] if remaining else [])


def test_imports_point_one_way():
    graph = {name: imports_of(name, source, SOURCES, PACKAGES) for name, source in SOURCES.items()}
    assert import_problems(graph) == []


@pytest.mark.parametrize(
    "line",
    [
        "import minidrl.sampler",
        "from minidrl.sampler import generate",
        "from minidrl import sampler",
        "from . import sampler",
        "from .sampler import generate",
        "def f():\n    from minidrl import sampler",
    ],
)
def test_every_form_of_import_is_seen(line: str):
    modules = {"minidrl", "minidrl.sampler", "minidrl.algorithms"}
    assert imports_of("minidrl.algorithms", line, modules) == {"minidrl.sampler"}
    assert import_problems({"minidrl.algorithms": {"minidrl.sampler"}, "minidrl.sampler": set()}) != []


def test_relative_imports_inside_a_subpackage():
    modules, packages = {"minidrl", "minidrl.tasks", "minidrl.tasks.a", "minidrl.sampler"}, {"minidrl", "minidrl.tasks"}
    assert imports_of("minidrl.tasks", "from .a import x", modules, packages) == {"minidrl.tasks.a"}
    assert imports_of("minidrl.tasks.a", "from ..sampler import x", modules, packages) == {"minidrl.sampler"}
    assert imports_of("minidrl.tasks.a", "from .. import __version__", modules, packages) == {"minidrl"}
    assert imports_of("minidrl.tasks.a", "import torch\nfrom json import loads", modules, packages) == set()


@pytest.mark.parametrize(
    "graph",
    [
        {"minidrl.sampler": {"minidrl.tasks"}, "minidrl.tasks": {"minidrl.sampler"}},
        {"minidrl.sampler": {"minidrl.trainer"}, "minidrl.trainer": set()},
        {"minidrl.trainer": {"minidrl.__main__"}, "minidrl.__main__": set()},
        {"minidrl.oracle": {"minidrl.algorithms"}, "minidrl.algorithms": set()},
        {"minidrl.oracle": {"minidrl"}, "minidrl": set()},
        {"minidrl.features": {"minidrl.methods"}, "minidrl.methods": set()},
        {"minidrl.methods": {"minidrl.features"}, "minidrl.features": set()},
        {"minidrl.methods": {"minidrl.oracle"}, "minidrl.oracle": set()},
        {"minidrl.sampler": {"minidrl.methods"}, "minidrl.methods": set()},
        {"minidrl.tasks": {"minidrl.sampler"}, "minidrl.sampler": set()},
        {"minidrl.runs": {"minidrl.trainer"}, "minidrl.trainer": set()},
        {"minidrl.memory": {"minidrl.trainer"}, "minidrl.trainer": set()},
        {"minidrl.rehearsal": {"minidrl.verify"}, "minidrl.verify": set()},
        {"minidrl.trainer": {"minidrl.controls"}, "minidrl.controls": set()},
        {"minidrl.trainer": {"minidrl.trainer"}},
    ],
)
def test_a_wrong_import_graph_is_rejected(graph: dict):
    assert import_problems(graph) != []


# --------------------------------------------------------------------------------------------------------- docstrings


def undocumented(source: str) -> list[str]:
    """The module itself, and public functions and classes at its top level, that have no docstring."""
    tree = ast.parse(source)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    missing = [node.name for node in public if not (ast.get_docstring(node) or "").strip()]
    return missing if (ast.get_docstring(tree) or "").strip() else ["the module", *missing]


@pytest.mark.parametrize("name", SOURCES)
def test_everything_public_has_a_docstring(name: str):
    assert undocumented(SOURCES[name]) == []


def test_a_missing_docstring_is_found():
    source = '"""Doc."""\ndef f(): pass\nclass C: pass\ndef _g(): pass\ndef h():\n    """Doc."""\nasync def k(): ""\n'
    assert undocumented(source) == ["f", "C", "k"]
    assert undocumented("x = 1") == ["the module"]


# ------------------------------------------------------------------------------------------------- settings and records

WORKING = {"Trace", "Clock", "Experience"}  # filled while a step goes on; everything else that is passed around stays as it is
SETTINGS = {"Sampler", "Method", "Network", "Optimizer", "Evaluation", "Lora", "Pretrain", "Train", "Choice", "Study"}


def test_records_and_settings_cannot_be_changed_and_settings_are_given_by_name():
    modules = [importlib.import_module(name) for name in SOURCES]
    kinds = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    found = [kind for kind in kinds if dataclasses.is_dataclass(kind) and kind.__module__.startswith(PACKAGE)]
    classes = {kind.__name__: kind for kind in found}
    assert {name for name, kind in classes.items() if not kind.__dataclass_params__.frozen} == WORKING
    by_name = {name for name, kind in classes.items() if all(field.kw_only for field in dataclasses.fields(kind))}
    assert by_name == SETTINGS


# -------------------------------------------------------------------------------------------- the size of algorithms.py


def docstring_lines(tree: ast.Module) -> set[int]:
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node) is not None:
                lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def comment_lines(source: str) -> set[int]:
    """Lines that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the end, blank lines and comments included."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - statements[0].lineno + 1 if statements else 0


def size_problems(source: str) -> list[str]:
    """Bodies of at most 20 lines; a third of the lines that are not blank is prose."""
    tree, lines = ast.parse(source), source.splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [f"{f.name}: {body_lines(f)} lines" for f in functions if body_lines(f) > MAX_BODY]
    written = {number for number, line in enumerate(lines, 1) if line.strip()}
    prose = written & (docstring_lines(tree) | comment_lines(source))
    return found + ([f"{len(prose)} of {len(written)} lines are prose"] if len(prose) < MIN_PROSE * len(written) else [])


PROSE = '"""' + "One line of prose.\n" * 20 + '"""\n'
READABLE = PROSE + 'def f():\n    """Doc."""\n' + "    x = 1\n" * MAX_BODY
LIMITED = {"example": READABLE} | {f"{PACKAGE}.algorithms": s for n, s in SOURCES.items() if n.endswith(".algorithms")}


@pytest.mark.parametrize("name", LIMITED)
def test_the_module_stays_readable(name: str):
    assert size_problems(LIMITED[name]) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (READABLE + "    x = 1\n", "f: 21 lines"),
        (READABLE + "    # why\n\n    x = 1\n", "f: 23 lines"),
        (PROSE + "class C:\n    def f(self):\n" + "        x = 1\n" * 21, "f: 21 lines"),
        ("# prose\n" + "x = 1  # not prose\n" * 2 + "\n\ny = '# not prose'\n", "1 of 4 lines are prose"),
    ],
)
def test_a_module_that_grew_is_rejected(source: str, problem: str):
    assert size_problems(source) == [problem]


# --------------------------------------------------------------------------------------------------------------- columns


def wide_lines(name: str, source: str) -> list[str]:
    """Lines that are longer than the module may have them; it is read in the terminal, two files side by side."""
    most = WIDTHS.get(name, WIDTH)
    return [f"line {i}: {len(line)} columns" for i, line in enumerate(source.splitlines(), 1) if len(line) > most]


@pytest.mark.parametrize("name", SOURCES)
def test_no_line_is_too_long(name: str):
    assert set(WIDTHS) <= set(SOURCES) and wide_lines(name, SOURCES[name]) == []


def test_a_line_that_is_too_long_is_found():
    assert wide_lines("minidrl.algorithms", "x" * 88 + "\n" + "x" * 89) == ["line 2: 89 columns"]
    assert wide_lines("minidrl.features", "x" * 100 + "\n" + "x" * 101) == ["line 2: 101 columns"]


# --------------------------------------------------------------------------------------------------------------- shapes


EXAMPLE = """
import torch
from jaxtyping import Float
from torch import Tensor
from typing import Literal

def weighted(
    x: Float[Tensor, "B L"], w: Float[Tensor, " L"], kind: Literal["sum"], scale: float
) -> Float[Tensor, " B"]:
    if kind not in ("sum", "wrong shape"):
        raise ValueError(f"kind: got {kind}; allowed sum")
    return scale * (x * w).sum(1) if kind == "sum" else x
"""


def test_shapes_are_checked_and_other_annotations_left_to_the_function(tmp_path, monkeypatch):
    (tmp_path / "shape_example.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    with install_import_hook("shape_example", "conftest.shapes_only"):
        from shape_example import weighted
    x, w = torch.ones(2, 3), torch.ones(3)
    assert weighted(x, w, "sum", 2).tolist() == [6.0, 6.0]
    for wrong in ((x, w[:2], "sum", 1.0), (x[0], w, "sum", 1.0), (x.long(), w, "sum", 1.0), (x, w, "wrong shape", 1.0)):
        with pytest.raises(TypeCheckError):
            weighted(*wrong)
    with pytest.raises(ValueError, match="kind: got mean; allowed sum"):
        weighted(x, w, "mean", 1.0)


@pytest.mark.parametrize("name", ["algorithms", "features", "methods"])
def test_the_hook_is_on(name: str):
    loader = importlib.util.find_spec(f"{PACKAGE}.{name}").loader
    assert type(loader).__module__.startswith("jaxtyping")


# ------------------------------------------------------------------------------------------- paths, pins, pages, packaging


def repository_files() -> list[Path]:
    """Tracked files and files that git would add; without git, everything but environments, caches and runs."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [ROOT / name for name in set(listed) if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        ignored = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", "runs", "build", "dist"}
        paths = [path for path in ROOT.rglob("*") if not ignored & set(path.relative_to(ROOT).parts)]
    return sorted(path for path in paths if path.is_file())


FORBIDDEN = ["/" + "work" + "/", ".." + "/" + "shared", "." + "library"]


def private_paths(data: bytes) -> list[str]:
    """The paths of somebody's machine that occur in a file."""
    return [word for word in FORBIDDEN if word.encode() in data]


def test_no_file_mentions_a_private_path():
    files = repository_files()
    assert Path(__file__).resolve() in files
    found = {str(path.relative_to(ROOT)): private_paths(path.read_bytes()) for path in files}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("word", FORBIDDEN)
def test_a_private_path_is_found(word: str):
    assert private_paths(b"\xff see " + word.encode() + b"x") == [word]


def requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def test_requirements_are_exact_public_pins():
    for requirement in requirements():
        assert re.fullmatch(r"==\d+(\.\d+)*", str(requirement.specifier)), requirement
        assert requirement.url is None and requirement.marker is None, requirement


def test_pins_lie_in_the_ranges_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = [*project["dependencies"], *extras["dev"], *extras["tensorboard"], *extras["lora"], *extras["math"]]
    ranges = [Requirement(line) for line in tested]
    pins = {pin.name.lower(): next(iter(pin.specifier)).version for pin in requirements()}
    assert {requirement.name.lower() for requirement in ranges} == set(pins)
    for requirement in ranges:
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def run_examples(text: str, name: str) -> doctest.TestResults:
    """Run the `>>>` examples of a Markdown text, all in one namespace; a closing fence ends the expected output."""
    text = re.sub(r"^\s*(```|~~~).*$", "", text, flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    return runner.run(test)


DOCUMENTS = {"example": "```python\n>>> x = 1 + 1\n>>> x\n2\n```\n\n    $ make test\n"} | {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_examples_in_the_pages_hold(name: str, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run_examples(DOCUMENTS[name], name).failed == 0


def test_a_wrong_example_is_found():
    assert run_examples("```\n>>> 1 + 1\n3\n```\n", "wrong") == doctest.TestResults(failed=1, attempted=1)
    assert run_examples(DOCUMENTS["example"], "example") == doctest.TestResults(failed=0, attempted=2)


LINK = re.compile(r"""\]\(<?([^)\s>]+)>?[^)]*\)|(?:src|href)=["']([^"']+)["']""")


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links of a Markdown text, images included, that lead to no file; code is left out."""
    text = re.sub(r"^\s*(```|~~~).*?^\s*\1|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = [a or b for a, b in LINK.findall(text)]
    files = [target.partition("#")[0] for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]
    return [file for file in files if file and (file.startswith("/") or not (folder / file).exists())]


def test_relative_links_lead_somewhere():
    pages = [path for path in repository_files() if path.suffix == ".md"]
    assert {ROOT / "README.md", ROOT / "docs" / "results.md"} <= set(pages)
    found = {str(path.relative_to(ROOT)): broken_links(path.read_text(encoding="utf-8"), path.parent) for path in pages}
    assert {name: links for name, links in found.items() if links} == {}


def test_a_broken_link_is_found():
    text = '[a](docs/a.md) [b](README.md#top) [c](https://x.org/y.md) [d](#top) `[e](e.md)` <img src="f.png"> [g](/README.md)'
    assert broken_links(text + '\n```\n[h](h.md)\n```\n![i](i.png "title")', ROOT) == [
        "docs/a.md",
        "f.png",
        "/README.md",
        "i.png",
    ]


README_LINES, README_WIDTH = 120, 400


def length_problems(text: str) -> list[str]:
    """What makes a README longer than two screens."""
    lines = text.splitlines()
    found = [f"{len(lines)} lines"] if len(lines) > README_LINES else []
    return found + [f"line {i}: {len(line)} characters" for i, line in enumerate(lines, 1) if len(line) > README_WIDTH]


def test_the_readme_fits_on_two_screens():
    assert length_problems((ROOT / "README.md").read_text(encoding="utf-8")) == []


def test_a_readme_that_grew_is_rejected():
    assert length_problems("\n" * 120) == [] and length_problems("\n" * 121) == ["121 lines"]
    assert length_problems("x\n" + "x" * 401) == ["line 2: 401 characters"]


def test_one_version_everywhere():
    version = importlib.import_module(PACKAGE).__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == (version, str(citation["date-released"])) and citation["version"] == version
    assert citation["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= set(citation)


def test_the_console_command_is_the_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"][PACKAGE].split(":")
    assert module == f"{PACKAGE}.__main__" and callable(getattr(importlib.import_module(module), name))


def test_ci_runs_the_oldest_and_the_newest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = [line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    assert project["requires-python"] == f">={supported[0]}"
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == [supported[0], supported[-1]]
    namespaces, *commands = [step["run"].removeprefix("sudo ") for step in job["steps"] if "run" in step]
    assert namespaces == "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0", "of a machine that is thrown away"
    assert commands == (ROOT / ".ci" / "run").read_text().splitlines()[-5:]
    assert commands == [".ci/bubblewrap", "make lint", "make extras", "make test", "make chaos"]
    assert f"Python {supported[0]} to {supported[-1]}" in (ROOT / "README.md").read_text()


def test_what_the_faq_says_is_shown_is_there():
    """Each answer names a test, a law, a notebook or a page; the names exist."""
    text = (ROOT / "docs" / "faq.md").read_text()
    answers = re.split(r"^\*\*(?=\S)", text, flags=re.MULTILINE)[1:]
    assert len(answers) > 15
    shown = [answer for answer in answers if "*Shown by*" in answer]
    assert len(shown) >= len(answers) - 3, "three answers only point elsewhere"
    names = set(re.findall(r"`((?:test|law)_\w+)`", text))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    assert names and [name for name in sorted(names) if f"def {name}(" not in sources] == []
    assert all(re.search(r"`(?:test|law)_|notebook \d\d|docs/", answer.split("*Shown by*")[1]) for answer in shown)
