"""What the laws judge: several modules of minidrl as if they were one, as they are or with one passage replaced.

A law reads `alg.features`, `alg.METHODS`, `alg._uniform` and need not know which module of ROOMS holds the name. A mutant is
found by the name of its place (mutant.py), never by the whole text of a file: code added elsewhere, and another way to break
the lines, leave it as it is.
"""

import __future__

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import pytest

from laws.registry import Mutant

# The modules under judgement, in the order in which they import each other.
ROOMS = (
    "minidrl.algorithms",
    "minidrl.features",
    "minidrl.gradient",
    "minidrl.methods",
)

ROOT = Path(__file__).parent.parent
TAG = re.compile(r"\((\d+\.\d+)\) ")
FLAGS = __future__.annotations.compiler_flag

Maker = Callable[[ModuleType], Callable]  # of the module up to and with the function that it replaces


class Stale(Exception):
    """A mutant whose passage is not there (any more), or is there more than once."""


class Definition(NamedTuple):
    """A name at the top of a module, Class.member, or row.NAME: its lines, from 1, and the number of its statement."""

    name: str
    first: int
    last: int
    statement: int
    tag: str = ""


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    for number, node in enumerate(body):
        match = TAG.match((isinstance(node, ast.FunctionDef) and ast.get_docstring(node)) or "")
        for name in _names(node):
            yield Definition(name, _first(node), node.end_lineno, number, match.group(1) if match else "")
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            for name in _names(member):
                yield Definition(f"{node.name}.{name}", _first(member), member.end_lineno, number)
        for call in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):  # a method of the table
                yield Definition(f"row.{call.args[0].value}", call.lineno, call.end_lineno, number)


def passage(old: str) -> re.Pattern:
    """Finds a passage in a source; line ends, comments and the comma of a line break are no matter."""
    pieces, gap = re.findall(r"\w+|[^\w\s]", old), r"(?:\s|#[^\n]*\n)*"
    closing = [rf",?{gap}{re.escape(piece)}" if piece in ")]}" else re.escape(piece) for piece in pieces[1:]]
    return re.compile(gap.join([re.escape(pieces[0]), *closing]))


class Room:
    """The source of one module: its statements, compiled one by one, and where each name is defined."""

    def __init__(self, name: str):
        self.name, self.module = name, importlib.import_module(name)
        self.path = Path(self.module.__file__)
        self.source = self.path.read_text(encoding="utf-8")
        self.body = ast.parse(self.source).body
        self.definitions = list(_definitions(self.body))
        self.names = {definition.name: definition for definition in self.definitions}

    @cached_property
    def codes(self) -> list[CodeType]:
        """The statements."""
        return [self.compiled(ast.Module([node], [])) for node in self.body]

    def compiled(self, tree: ast.Module | str) -> CodeType:
        return compile(tree, str(self.path), "exec", flags=FLAGS, dont_inherit=True)

    def source_of(self, first: int, last: int) -> str:
        """Its lines, from 1."""
        return "".join(self.source.splitlines(keepends=True)[first - 1 : last])

    def replaced(self, definition: Definition, old: str, new: str) -> CodeType:
        """The definition's statement with new in the place of old, without the white space around it."""
        new = new.lstrip() if old[0].isspace() else new
        new = new.rstrip() if old[-1].isspace() else new
        node, own = self.body[definition.statement], self.source_of(definition.first, definition.last)
        before = self.source_of(_first(node), definition.first - 1)
        after = self.source_of(definition.last + 1, node.end_lineno)
        return self.compiled("\n" * (_first(node) - 1) + before + passage(old).sub(lambda _: new, own) + after)


ROOM = {name: Room(name) for name in ROOMS}


def equations() -> list[tuple[str, str, str]]:
    """(tag, name of the function, file:line) of every function whose docstring opens with a tag, in reading order."""
    return [(d.tag, d.name, f"{room.path}:{d.first}") for room in ROOM.values() for d in room.definitions if d.tag]


def _short(path: Any) -> str:
    return str(path).removeprefix(f"{ROOT}/")


def place(mutant: Mutant) -> tuple[Room, Definition]:
    """Where the mutant says that its passage is."""
    if mutant.where:
        found = [(room, room.names[mutant.where]) for room in ROOM.values() if mutant.where in room.names]
        what = f"where={mutant.where!r}"
    else:
        found = [(room, d) for room in ROOM.values() for d in room.definitions if d.tag == mutant.tag != ""]
        what = f"function whose docstring opens with ({mutant.tag})" if mutant.tag else "where for a mutant without a tag"
    if len(found) == 1:
        return found[0]
    rooms = ", ".join(room.name for room, _ in found)
    if found:
        raise Stale(f"{_short(mutant.at)}: {what} is defined in {rooms}: rename one of them")
    raise Stale(
        f"{_short(mutant.at)}: there is no {what} in {', '.join(ROOMS)}: mend where, or drop the mutant\n    {mutant.old}"
    )


def located(mutant: Mutant) -> tuple[Room, Definition, CodeType]:
    """The place of the mutant's passage, and the statement there with the passage replaced."""
    room, definition = place(mutant)
    times = len(passage(mutant.old).findall(room.source_of(definition.first, definition.last)))
    if times == 1:
        return room, definition, room.replaced(definition, mutant.old, mutant.new)
    home = f"{definition.name} ({_short(room.path)}:{definition.first})"
    said = f"is {times} times in {home}: write more of it" if times else f"is not in {home} any more: write it as it is now"
    raise Stale(f"{_short(mutant.at)}: the passage {said}, or drop the mutant\n    {mutant.old}")


class Judged:
    """The rooms as one module. Reading finds a name where it is defined; writing reaches all rooms that import it too."""

    def __init__(self, modules: list[ModuleType]):
        self.__dict__["_modules"] = modules

    def _owner(self, name: str) -> ModuleType:
        own = [module for module, room in zip(self._modules, ROOM.values(), strict=True) if name in room.names]
        if len(own) > 1:
            raise LookupError(f"{name} is defined in {' and in '.join(module.__name__ for module in own)}: rename one of them")
        for module in own or self._modules:
            if name in vars(module):
                return module
        raise AttributeError(f"{name} is in none of {', '.join(ROOMS)} (judged.ROOMS)")

    def __getattr__(self, name: str) -> Any:
        return vars(self._owner(name))[name]

    def __setattr__(self, name: str, value: Any) -> None:
        old = getattr(self, name)
        for module in self._modules:
            if vars(module).get(name) is old:
                setattr(module, name, value)


def _executed(known: list[ModuleType], change: dict[int, CodeType], given: dict[str, Maker] | None = None) -> Judged:
    """The rooms, the first ones known already, the others made of their statements: the next one with a change.

    A name that is given has, from its own statement on, what its maker makes of the module as it is then.
    """
    modules, rooms, given = list(known), list(ROOM.values()), given or {}
    with pytest.MonkeyPatch.context() as patch:
        for number, room in enumerate(rooms):
            if number >= len(known):
                modules.append(ModuleType(room.name))
                modules[-1].__file__ = str(room.path)
            package, _, short = room.name.rpartition(".")  # what the next rooms import
            patch.setitem(sys.modules, room.name, modules[number])
            patch.setattr(sys.modules[package], short, modules[number])
            makers = {room.names[name].statement: (name, make) for name, make in given.items() if name in room.names}
            for at, code in enumerate(room.codes if number >= len(known) else ()):
                exec(change.get(at, code) if number == len(known) else code, modules[number].__dict__)
                if at in makers:
                    name, make = makers[at]
                    setattr(modules[number], name, make(modules[number]))
    return Judged(modules)


@cache
def unmutated() -> Judged:
    """The rooms made in the way in which mutants are, without a change."""
    return _executed([], {})


def mutated(mutant: Mutant) -> Judged:
    """The rooms with the passage replaced; those before it do not know of it."""
    room, definition, wrong = located(mutant)
    return _executed(unmutated()._modules[: list(ROOM.values()).index(room)], {definition.statement: wrong})


def replaced(given: dict[str, Maker]) -> Judged:
    """The rooms with functions of another's making: what follows them, the rows of the table included, uses these."""
    for name in given:
        if not any(name in room.names for room in ROOM.values()):
            raise LookupError(f"{name} is defined in none of {', '.join(ROOMS)}")
    return _executed([], {}, given)


SHIPPED = Judged([room.module for room in ROOM.values()])
