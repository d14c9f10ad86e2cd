"""What implements a word (``minidrl where``), which methods there are and what each one does
(``minidrl methods``): read off the docstrings, so that nothing is said twice.

``where`` parses the sources and imports none of them: it answers faster than torch loads.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from minidrl.methods import Method

PACKAGE = Path(__file__).parents[1]
# What a reader looks for is most often in one of these, in this order.
FIRST = ("algorithms", "methods", "loop", "features", "sampler", "decoding", "denoiser", "oracle")
MOST = 12  # answers that are shown

# ------------------------------------------------------------------------------------------- where


class Entry(NamedTuple):
    """A function, class, module or method: its place, and what is said of it."""

    path: Path
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        place = f"{self.path.relative_to(PACKAGE.parent)}:{self.line}"
        return f"{place:<30} {self.name:<24} {first_line(self.text)}".rstrip()


def first_line(text: str | None) -> str:
    """The first sentence of a docstring, or as much of it as stands before a blank line."""
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=\w\w\.)\s|(?<=\)\.)\s", paragraph)[0]


def where(query: str) -> list[Entry]:
    """What implements an equation's tag, a term, an arXiv number, a function or a method; the best
    first. ValueError, with the nearest names, where nothing does."""
    known = _entries()
    ranked = sorted((rank, entry) for entry in known if (rank := _rank(query, entry)))
    if not ranked:
        names = {entry.name for entry in known}
        near = ", ".join(difflib.get_close_matches(query, names, 5, 0.5)) or "a word of a docstring"
        raise ValueError(f"where: got {query!r}, which no docstring holds; allowed {near}")
    return [entry for _, entry in ranked[:MOST]]


@cache
def _entries() -> list[Entry]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(Entry(path, node.lineno, node.name, ast.get_docstring(node) or ""))
            elif isinstance(node, ast.Module):
                found.append(Entry(path, 1, path.stem, ast.get_docstring(node) or ""))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "row":
                words = {word.arg: word.value for word in node.keywords}
                said = [words[key] for key in ("title", "source", "differs") if key in words]
                texts = [text.value for text in said if isinstance(text, ast.Constant)]
                found.append(Entry(path, node.lineno, node.args[0].value, "\n\n".join(texts)))
    return found


def _rank(query: str, entry: Entry) -> tuple | None:
    """How well an entry answers, the smallest best: None where it does not."""
    room = FIRST.index(entry.path.stem) if entry.path.stem in FIRST else len(FIRST)
    place = (entry.line == 1, room, entry.line)
    private = entry.name.startswith("_")  # a helper stands after what calls it
    if number := re.fullmatch(r"\(?(\d+\.\d+)\)?", query):  # a tag, or an arXiv number
        if entry.text.startswith(f"({number[1]})"):
            return (private, 0, *place)
        found = re.search(rf"(?<![\d.]){re.escape(number[1])}(?!\d)", entry.text)
        return (private, 1, *place) if found else None
    asked, name = _stems(query), _stems(entry.name)
    first, text = _stems(first_line(entry.text)), _stems(entry.text)
    tests = [asked == name, asked in name, asked in first, asked in text]
    tests += [_all_in(asked, name + first), _all_in(asked, name + text)]
    return (private, tests.index(True), *place) if True in tests else None


def _stems(text: str) -> str:
    """A text as words without case and endings: " self normal clip " of self_normalized_clip."""
    ending = r"(?<=\w{3})(i[sz](ation|ed?|ing)|ations?|ing|ed|es?|s|al)$"
    words = (re.sub(ending, "", word) for word in re.findall(r"[a-z0-9]+", text.lower()))
    return " " + " ".join(re.sub(r"(.)\1$", r"\1", word) for word in words) + " "


def _all_in(asked: str, text: str) -> bool:
    return all(f" {word} " in text for word in asked.split())


# ------------------------------------------------------------------------------------------ methods


def method_list(everything: bool = False) -> str:
    """The methods of this project's papers, a line each; or all that there are."""
    from minidrl.methods import METHODS

    shown = [m for m in METHODS.values() if everything or m.family == "main"]
    lines = [f"{m.name:<20} {f'{m.family:<9}' if everything else ''}{m.title}" for m in shown]
    if rest := len(METHODS) - len(shown):
        lines += ["", f"{rest} more with --all; `methods NAME` says what a method does"]
    return "\n".join(lines)


def method_named(name: str) -> Method:
    """A method of the table; ValueError, with the nearest names, where there is none."""
    from minidrl.methods import METHODS, RENAMED

    if name not in {*METHODS, *RENAMED}:
        near = difflib.get_close_matches(name, METHODS, 5, 0.3) or list(METHODS)
        raise ValueError(f"methods: got {name!r}; allowed {', '.join(near)}, ..")
    return METHODS[name]


def fields(method: Method) -> dict[str, Any]:
    """A method as plain data: {"plan": "quadrature_plan", "plan.num_nodes": 3, ..}."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if isinstance(value, partial):
            flat[field.name] = value.func.__name__
            flat |= {f"{field.name}.{key}": word for key, word in value.keywords.items()}
        elif field.name == "kl" and value:
            flat |= {f"kl.{key}": word for key, word in value._asdict().items()}
        else:
            flat[field.name] = value
    return flat


def settings(method: Method) -> dict[str, Any]:
    """The numbers and words of a method, each under its key in ``--method_options``."""
    from minidrl.methods import numbers

    options = numbers(method)
    return {k: v for k, v in fields(method).items() if k in options or k.startswith("kl.")}


def card(method: Method) -> str:
    """What a method does, component by component, in the words of their docstrings."""
    from minidrl.methods import choices

    lines = [
        f"{method.name}: {method.title}",
        f"Source: {method.source}",
        f"Differs: {method.differs}",
    ]
    for name, value in fields(method).items():
        if name in ("name", "family", "title", "source", "differs") or value in (None, "none"):
            continue
        part = getattr(method, name, None)
        said = first_line(inspect.getdoc(part.func)) if isinstance(part, partial) else ""
        words = ", ".join(value) if isinstance(value, tuple) else str(value)
        lines.append(f"  {name:<24} {words:<24} {said}".rstrip())
    options = ", ".join([*settings(method), *choices(method)])
    return "\n".join([*lines, f"Options, as --method_options.KEY value: {options}"])


# ------------------------------------------------------------------------------------------- --help


def settings_help(kind: str) -> str:
    """The settings of a run as they stand in the sources: type, default, and what they do."""
    sources = [PACKAGE / "run/config.py", PACKAGE / "sampler.py"]
    classes = {}
    for source in (path.read_text(encoding="utf-8") for path in sources):
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                lines = {f.target.id: source.splitlines()[f.lineno - 1].strip() for f in fields}
                classes[node.name] = lines
    shown = [f"settings, in the config or as --key value ({kind} in minidrl/run/config.py):"]
    for key, line in classes[kind].items():
        if key == "task":
            line = "task.KEY: those of the task's class; `minidrl tasks` lists the tasks"
        section = re.sub(r"\W.*", "", line.partition(": ")[2])
        below = classes.get(section, {})
        shown += [f"  --{key}.{inner}" for inner in below.values()] or [f"  --{line}"]
    return "\n".join(shown)
