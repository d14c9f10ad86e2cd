"""What a mutant is; the tables are in test_mutants.py and, one a family of methods, in mutants_*.py."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """An equation ("" for what carries no number), a passage of the source, its replacement, the law that must fail."""

    tag: str
    old: str
    new: str
    law: str
    count: int = 1  # how often the passage occurs
