"""Wrong versions of what laws_papers.py judges."""

from mutant import Mutant

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------------------------------------------ JustGRPO
    Mutant(
        "10.1", "credit=P(alg.group_z_score, ddof=1", "credit=P(alg.group_z_score, ddof=0", "law_methods", where="row.justgrpo"
    ),
    Mutant("10.1", 'temperature="sampling"', 'temperature="one"', "law_methods", where="row.reinforce"),
    # ---------------------------------------------------------------------------------------------------------------- ESPO
    Mutant("10.1", 'of="per_token"', 'of="log_likelihood"', "law_methods", where="row.espo"),
    Mutant("10.1", 'normalizer="padded_length"', 'normalizer="kept_length"', "law_methods", where="row.espo"),
    Mutant("10.1", "credit=P(alg.leave_one_out)", "credit=P(alg.group_mean)", "law_methods", where="row.espo"),
    # ---------------------------------------------------------------------------------------------------------------- EBPO
    Mutant("10.1", 'reduction="sequence"', 'reduction="step"', "law_methods", where="row.ebpo-block"),
    Mutant(
        "10.1",
        "credit=P(alg.group_z_score, ddof=1",
        "credit=P(alg.group_z_score, ddof=0",
        "law_methods",
        where="row.ebpo-block",
    ),
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
    Mutant("10.1", "credit=P(alg.leave_one_out)", "credit=P(alg.group_mean)", "law_methods", where="row.mask-aware"),
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
