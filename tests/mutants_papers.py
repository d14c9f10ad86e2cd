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
    # ---------------------------------------------------------------------------------------------------------------- EBPO
    Mutant("10.1", 'reduction="sequence"', 'reduction="step"', "law_methods", where="row.ebpo-block"),
    Mutant("10.1", "credit=P(group_z_score, ddof=1", "credit=P(group_z_score, ddof=0", "law_methods", where="row.ebpo-block"),
    # --------------------------------------------------------------------------------------------------------- coupled-GRPO
    Mutant("2.9", "[1.0, 1 / r, 1 / (1 - r)]", "[1.0, 1 / (1 - r), 1 / r]", "law_coupled_plan"),
    Mutant("2.9", "[1.0, 1 / r, 1 / (1 - r)]", "[0.0, 1 / r, 1 / (1 - r)]", "law_coupled_plan"),
    Mutant("2.9", "keep & chosen, keep & ~chosen", "keep & chosen, keep & chosen", "law_coupled_plan"),
    Mutant("2.9", "chosen, ~chosen])", "chosen, chosen])", "law_coupled_plan"),
    Mutant("2.9", "(high - low) * float(", "high * float(", "law_coupled_plan"),
    Mutant("10.1", 'reduction="position"', 'reduction="token"', "law_methods", where="row.coupled-grpo"),
    # ---------------------------------------------------------------------------------------------------------------- BGPO
    Mutant("8.16", "torch.where(adv > 0, 1 + d, d.exp())", "d.exp()", "law_tangent"),
    Mutant("8.16", "torch.where(adv > 0, 1 + d, d.exp())", "torch.where(adv > 0, d.exp(), 1 + d)", "law_tangent"),
    Mutant("8.16", "torch.minimum(loss, -bound * adv)", "loss", "law_tangent"),
    Mutant("8.16", "((adv < 0) & below) | beyond", "((adv < 0) & below)", "law_cut_is_what_the_clip_does"),
    Mutant("8.16", "@declares(reinforce_on_policy=True)", "@declares()", "law_objectives_are_what_they_declare"),
    Mutant("10.1", 'reduction="state"', 'reduction="sequence"', "law_methods", where="row.bgpo"),
    # ------------------------------------------------------------------------------------------------------------- UniGRPO
    Mutant("2.10", "start + progress * (1 - start)", "start", "law_scheduled_plan"),
    Mutant("2.10", "schedule or generator", "generator", "law_scheduled_plan"),
    Mutant("2.10", "min_t + (1 - min_t) * u", "min_t + u", "law_scheduled_plan"),
    Mutant("2.10", "inside.device) < t)", "inside.device) > t)", "law_scheduled_plan"),
    Mutant("10.1", 'aggregation="entry_mean"', 'aggregation="token_mean"', "law_methods", where="row.unigrpo"),
]
