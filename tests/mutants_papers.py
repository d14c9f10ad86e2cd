"""Wrong versions of what laws_papers.py judges."""

from mutant import Mutant

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------------------------------------------ JustGRPO
    Mutant("10.1", "credit=P(group_z_score, ddof=1", "credit=P(group_z_score, ddof=0", "law_methods", where="row.justgrpo"),
    Mutant("10.1", 'temperature="sampling"', 'temperature="one"', "law_methods", where="row.justgrpo"),
    # ---------------------------------------------------------------------------------------------------------------- ESPO
    Mutant("10.1", 'of="per_token"', 'of="log_likelihood"', "law_methods", where="row.espo"),
    Mutant("10.1", 'normalizer="padded_length"', 'normalizer="kept_length"', "law_methods", where="row.espo"),
    Mutant("10.1", "credit=P(leave_one_out)", "credit=P(group_mean)", "law_methods", where="row.espo"),
]
