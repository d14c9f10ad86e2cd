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
    # ---------------------------------------------------------------------------------- 4.4, the position part of Mask-Aware PG
    Mutant("4.4", "own - torch.logaddexp(own, rivals)", "torch.logaddexp(own, rivals) - own", "law_position_logp"),
    Mutant("4.4", "own - torch.logaddexp(own, rivals)", "own - rivals", "law_position_logp"),
    Mutant("4.4", "rivals)) * scored", "rivals))", "law_position_logp"),
    Mutant("4.4", "masked_scatter(passed, best)", "masked_scatter(passed, best.detach())", "law_position_logp"),
    Mutant("4.4", "torch.finfo(own.dtype).min", "0.0", "law_position_logp"),
    Mutant("4.4", "head(h).max(-1).values", "head(h).mean(-1)", "law_position_feature", where="_position_logp"),
    Mutant("4.4", "states) & ~scored", "states)", "law_position_feature", where="_position_logp"),
    Mutant(
        "4.4",
        "_candidates(rollout, plan, states)",
        "plan.hidden.flatten(0, 1)[states][:, rollout.prompt.shape[1] :]",
        "law_position_feature",
        where="_position_logp",
    ),
    Mutant(
        "4.4",
        "len(states) * rollout.sampler.block_length",
        "int(passed.sum())",
        "law_head_in_parts",
        where="_position_logp",
    ),
    Mutant(
        "4.4",
        '["logit"] = logits.gather(',
        '["logit"] = logits.detach().gather(',
        "law_position_feature",
        where="token_features",
    ),
    Mutant(
        "4.4",
        '["logit"] = logits.gather(',
        '["logit"] = (logits / temperature).gather(',
        "law_position_feature",
        where="token_features",
    ),
    # ------------------------------------------------------------------------------------------------------ Mask-Aware PG
    Mutant("10.1", "epsilon_low=3e-4", "epsilon_low=4e-4", "law_clips_of_the_rows", where="row.mask-aware"),
    Mutant("10.1", "credit=P(leave_one_out)", "credit=P(group_mean)", "law_methods", where="row.mask-aware"),
    Mutant("10.1", 'normalizer="kept_length"', 'normalizer="none"', "law_methods", where="row.mask-aware"),
    Mutant("10.1", 'features=("logp", "position_logp")', 'features=("logp",)', "law_methods", where="row.mask-aware"),
    Mutant("10.1", 'logp, feature["position_logp"]]', 'logp + feature["position_logp"]]', "law_methods", where="reduced"),
    Mutant("10.1", '("sequence",)', "alg.LEVELS", "law_mask_aware_options", where="Method.__post_init__"),
    Mutant(
        "10.1",
        '{"logp": feature["kl_ref"]}',
        '{"logp": feature["kl_ref"], "position_logp": feature["kl_ref"]}',
        "law_mask_aware_options",
        where="penalty",
    ),
]
