"""What a mutant is; the tables are in test_mutants.py and, one a family of methods, in mutants_*.py."""

# How to write one: Mutant("8.2", "ratio > 1 + epsilon_high", "ratio > 1 + epsilon_low", "law_clips_of_the_rows").
#   tag    "8.2": the number that opens the docstring of the equation; every one has two mutants at least
#   old    a passage that stands once in that function; white space, line breaks, comments and docstrings do not count
#   new    the mistake that somebody might make: a sign, a side, an axis, a detach; valid Python, with the same names
#   law    the law that has to fail: by an assertion, a ValueError or a RuntimeError, never by a NameError or TypeError
#   where  if the passage is elsewhere: "_with_rest", "Plan.needed", "Method.linear", "RECORDS"; "row.gdpo" for a row of the
#          table (minidrl/methods.py); "report.ESTIMATORS", with its module, where two modules have the name
# Run it: pytest tests/test_mutants.py -k "kills and law_clips_of_the_rows". A mutant that survives shows that a law is missing:
# strengthen the law, not the mutant. One that cannot be seen by any law (the same function, written otherwise) is no mutant.

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """One passage of the source replaced by another, and the law that must then fail.

    tag      the equation that is wrong then; "" for what carries no number
    old      the passage: once in its place, however the lines are broken (white space does not count)
    new      what stands there instead
    law      the name of the law that must fail
    where    the place: a function, a class or one of its members (Plan.needed), or a name that is assigned (_GRPO), at the
             top of a module of judged.ROOMS. "": the function whose docstring opens with the tag. Where two modules have such
             a name: with the module, as in report.ESTIMATORS
    """

    tag: str
    old: str
    new: str
    law: str
    where: str = ""
    at: str = field(default="", compare=False)  # file:line of its row

    def __post_init__(self):
        row = sys._getframe(2)  # whoever called __init__
        object.__setattr__(self, "at", f"{row.f_code.co_filename}:{row.f_lineno}")
