"""How a law and the mutants that it must reject are registered.

A law is a function of the code under judgement. It raises AssertionError where that code is wrong:

    @judges("6.2")
    @rejects("6.2", ("correction=ddof", "correction=0"), ("(std + eps)", "(std.square() + eps)"))
    def law_z_score_scale(alg: Any) -> None:
        ...

The second line lists mutants: passages of the function whose docstring opens with (6.2), each with the mistake that somebody
might make in its place (a sign, a side, an axis, a detach). Every equation has at least one law and two mutants, and
every law rejects at least one. A mutant that survives shows that a law is missing: strengthen the law, not the mutant.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Law = Callable[..., None]
LAWS: dict[str, Law] = {}
TAGS: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Mutant:
    """One passage of the source replaced by another, and the law that must then fail.

    tag     the number of the equation that is wrong then; "" for code that carries no number
    old     a passage that stands once in its place; white space, line breaks, comments and docstrings do not count
    new     what stands there instead: valid Python with the same names
    law     the name of the law that must fail by an assertion, a ValueError or a RuntimeError
    where   the place, if it is not the function whose docstring opens with the tag: a function, a class or one of its members
            ("Plan.needed"), a name that is assigned ("RECORDS"), or a method of the table ("row.gdpo")
    """

    tag: str
    old: str
    new: str
    law: str
    where: str = ""
    at: str = field(default="", compare=False)  # file:line where it is listed


MUTANTS: list[Mutant] = []


def judges(*tags: str) -> Callable[[Law], Law]:
    """Register a law with the numbers of the equations that it judges; without numbers for a helper that carries none."""

    def register(law: Law) -> Law:
        assert law.__name__ not in LAWS, f"{law.__name__} exists already"
        LAWS[law.__name__], TAGS[law.__name__] = law, tags
        return law

    return register


def rejects(tag: str, *changes: tuple[str, str], where: str = "") -> Callable[[Law], Law]:
    """The law must fail once the first passage of a change is replaced by the second; see `Mutant` for tag and where."""
    caller = sys._getframe(1)
    at = f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def register(law: Law) -> Law:
        MUTANTS.extend(Mutant(tag, old, new, law.__name__, where, at) for old, new in changes)
        return law

    return register


def for_each_method(law: Callable[[Any, str, Any], None]) -> Law:
    """A law of (alg, name, method) as one of the whole table; ``only`` names the methods to judge, where a few are enough."""

    def of_the_table(alg: Any, only: tuple[str, ...] = ()) -> None:
        for name in only or alg.METHODS:
            law(alg, name, alg.METHODS[name])

    of_the_table.__name__, of_the_table.__doc__, of_the_table.one = law.__name__, law.__doc__, law
    return of_the_table
