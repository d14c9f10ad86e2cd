"""What a mutant is; the tables are in test_mutants.py and, one a family of methods, in mutants_*.py."""

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
