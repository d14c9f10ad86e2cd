"""What ``minidrl methods``, ``where`` and ``--help`` print, read off the sources."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidrl.methods import Method

PACKAGE = Path(__file__).parents[1]


def method_list(everything: bool = False) -> str:
    """The methods of this project's papers, a line each; or all that there are."""
    from minidrl.methods import METHODS

    shown = [m for m in METHODS.values() if everything or m.family == "main"]
    lines = [f"{m.name:<20} {f'{m.family:<9}' if everything else ''}{m.title}" for m in shown]
    if rest := len(METHODS) - len(shown):
        lines += ["", f"{rest} more with --all; `methods NAME` says what a method does"]
    return "\n".join(lines)


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


def card(name: str) -> str:
    """What a method does, part by part, in the words of each part's docstring."""
    from minidrl.methods import METHODS, RENAMED, choices

    if name not in {*METHODS, *RENAMED}:
        near = difflib.get_close_matches(name, METHODS, 5, 0.3) or list(METHODS)
        raise ValueError(f"methods: got {name!r}; allowed {', '.join(near)}, ..")
    method = METHODS[name]
    lines = [f"{method.name}: {method.title}"]
    lines += [f"Source: {method.source}", f"Differs: {method.differs}"]
    for name, value in fields(method).items():
        if name in ("name", "family", "title", "source", "differs") or value in (None, "none"):
            continue
        part = getattr(method, name, None)
        said = inspect.getdoc(part.func) if isinstance(part, partial) else ""
        said = " ".join(said.split("\n\n")[0].split())
        words = ", ".join(value) if isinstance(value, tuple) else str(value)
        lines.append(f"  {name:<24} {words:<24} {said}".rstrip())
    options = ", ".join([*settings(method), *choices(method)])
    return "\n".join([*lines, f"Options, as --method_options.KEY value: {options}"])


def settings_help(kind: str) -> str:
    """The settings of a run as they stand in the sources: type, default, and what they do."""
    classes = {}
    for path in (PACKAGE / "run/config.py", PACKAGE / "sampler.py"):
        source = path.read_text(encoding="utf-8")
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


def where(words: Sequence[str]) -> list[str]:
    """The functions and classes of the core in whose name or docstring all words stand, those that
    open with them first: ``file:line  name  first line``. An equation is asked for as 2.3."""
    asked, found = [word.lower() for word in words], []
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                opening, _, rest = (ast.get_docstring(node) or "").partition("\n")
                head = f"{node.name.replace('_', ' ')} {opening}".lower()
                if all(word in f"{head} {rest.lower()}" for word in asked):
                    place = f"minidrl/{path.name}:{node.lineno}"
                    first = not all(word in head for word in asked)
                    found.append((first, f"{place:<28} {node.name:<26} {opening}"))
    return [line for _, line in sorted(found, key=lambda pair: pair[0])]
