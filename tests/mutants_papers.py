"""Wrong versions of what laws_papers.py judges."""

from mutant import Mutant

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------------------------------------------ JustGRPO
    Mutant("10.1", "credit=P(group_z_score, ddof=1", "credit=P(group_z_score, ddof=0", "law_methods", where="row.justgrpo"),
    Mutant("10.1", 'temperature="sampling"', 'temperature="one"', "law_methods", where="row.justgrpo"),
]
