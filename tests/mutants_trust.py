"""Wrong versions of the equations of laws_trust.py: trust regions."""

from mutant import Mutant

DUAL = "torch.where(adv < 0, torch.minimum(loss, -bound * adv), loss)"
TRUNCATED = "ratio = log_ratio(ll.detach(), anchor).exp()\n    loss = -ratio.clamp(floor, cap) * adv"
TOKEN = "token = torch.stack([ll.detach().exp(), -torch.expm1(ll.detach())], -1)"
DRAWN = "drawn = torch.stack([anchor.exp(), -torch.expm1(anchor)], -1)"
CLAMPED = "mu.clamp(min=tiny) / pi.clamp(min=tiny)"
MASK = "return ~(outside & (torch.sign(adv) * log_ratios > 0))"
DPPO = "inside = trust_mask(u.detach(), adv, divergence > delta)\n    return _surrogate(-u.exp() * adv * inside, ~inside)"
RELEASED = "weights = u.exp().clamp(max=cap) * inside\n    return _surrogate(-weights * adv * ll,"
SPO = "penalty = adv.abs() * (ratio - 1).square() / (2 * epsilon)"
DRPO = "penalty = adv.abs() * mu * (ratio - 1).square() / (2 * delta)"

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------------------------------- 8.5, 8.6 clips
    Mutant("8.5", TRUNCATED, TRUNCATED.replace("floor, cap", "max=cap"), "law_truncated_weights_keep_teaching"),
    Mutant("8.5", TRUNCATED, TRUNCATED.replace("ll.detach()", "ll"), "law_truncated_weights_keep_teaching"),
    Mutant("8.5", "if not 0 <= floor < cap:", "if floor > cap:", "law_truncated_weights_keep_teaching"),
    Mutant("8.6", DUAL, DUAL.replace("adv < 0", "adv > 0"), "law_dual_clip_gradient"),
    Mutant("8.6", DUAL, DUAL.replace("minimum", "maximum"), "law_dual_clip_gradient"),
    Mutant("8.6", DUAL, DUAL.replace("-bound * adv", "-(1 + bound) * adv"), "law_dual_clip_gradient"),
    Mutant("8.6", DUAL, "torch.minimum(loss, -bound * adv)", "law_dual_clip_gradient"),
    Mutant("8.6", DUAL, DUAL.replace("minimum", "maximum"), "law_on_policy_all_are_reinforce"),
    Mutant("8.6", '_check_above("bound", bound, 1)', '_check_above("bound", bound, 0)', "law_dual_clip_gradient"),
    # ------------------------------------------------------------------------------------------- 8.7, 8.8 divergences
    Mutant("8.7", TOKEN, TOKEN.replace("ll.detach()", "ll"), "law_binary_divergence"),
    Mutant("8.7", "_divergence(drawn, token, form)", "_divergence(token, drawn, form)", "law_binary_divergence"),
    Mutant("8.7", TOKEN, TOKEN.replace("-torch.expm1(", "0 * ("), "law_binary_divergence"),
    Mutant("8.7", DRAWN, DRAWN.replace("-torch.expm1(", "0 * ("), "law_binary_divergence"),
    Mutant("8.7", CLAMPED, "mu / pi", "law_binary_divergence", where="_divergence"),
    Mutant(
        "8.7",
        "return (pi - mu).abs().sum(-1) / 2",
        "return (pi - mu).abs().sum(-1)",
        "law_divergence_chain",
        where="_divergence",
    ),
    Mutant("8.7", 'if form not in ("tv", "kl"):', "if False:", "law_binary_divergence", where="_divergence"),
    Mutant("8.8", 'if form not in ("tv", "kl"):', "if False:", "law_topk_divergence", where="_divergence"),
    Mutant("8.8", "drawn = (~listed).expand(ll.shape)", "drawn = listed.expand(ll.shape)", "law_divergence_chain"),
    Mutant(
        "8.8",
        "drawn = (~listed).expand(ll.shape)",
        "drawn = (listed | True).expand(ll.shape)",
        "law_topk_divergence",
    ),
    Mutant("8.8", "1 - p.sum(-1, keepdim=True)", "0 * p[..., :1]", "law_divergence_chain", where="_with_rest"),
    Mutant(
        "8.8",
        '_with_rest(feature["topk_logp"].detach(), feature["logp"].detach(), drawn)',
        '_with_rest(feature["topk_logp"], feature["logp"], drawn)',
        "law_topk_divergence",
    ),
    Mutant("8.8", "rollout.response[..., None]).any(-1)", "rollout.response[..., None]).all(-1)", "law_topk_divergence"),
    Mutant("8.8", CLAMPED, "mu / pi", "law_topk_divergence", where="_divergence"),
    # ----------------------------------------------------------------------------------------------------- 8.9 the mask
    Mutant("8.9", MASK, MASK.replace("> 0", "< 0"), "law_trust_mask"),
    Mutant("8.9", MASK, MASK.replace("> 0", ">= 0"), "law_trust_mask"),
    Mutant("8.9", MASK, "return ~outside", "law_trust_mask"),
    Mutant("8.9", MASK, "return ~outside", "law_dppo_examples"),
    Mutant("8.9", MASK, MASK.replace("torch.sign(adv) * ", ""), "law_dppo_gradient"),
    Mutant("8.9", MASK, MASK.replace("torch.sign(adv) * ", ""), "law_the_boundary_must_be_a_probability"),
    # -------------------------------------------------------------------------------------------------------- 8.10 DPPO
    Mutant("8.10", DPPO, DPPO.replace("divergence > delta", "divergence < delta"), "law_dppo_gradient"),
    Mutant("8.10", DPPO, DPPO.replace("divergence > delta", "divergence >= delta"), "law_dppo_examples"),
    Mutant("8.10", DPPO, DPPO.replace("u.exp()", "u.exp().detach()"), "law_dppo_gradient"),
    Mutant("8.10", DPPO, DPPO.replace("-u.exp() * adv", "-u.exp() * adv.abs()"), "law_dppo_is_ppo_with_its_own_clip"),
    Mutant("8.10", DPPO, DPPO.replace("divergence > delta", "divergence > delta * adv.abs()"), "law_advantage_is_a_scale"),
    Mutant("8.10", DPPO, DPPO.replace("divergence > delta", "divergence > delta / 2"), "law_drpo_turns_back_where_dppo_stops"),
    Mutant(
        "8.10",
        "if divergence is None:\n        divergence = binary_divergence(ll, anchor, form=form)",
        "if True:\n        divergence = binary_divergence(ll, anchor, form=form or 'tv')",
        "law_dppo_examples",
    ),
    Mutant("8.10", "if not value > least:", "if value < least:", "law_trust_refusals", where="_check_above"),
    # ----------------------------------------------------------------------------------------------- 8.11 DPPO, released
    Mutant("8.11", RELEASED, RELEASED.replace(".clamp(max=cap)", ""), "law_dppo_released"),
    Mutant("8.11", RELEASED, RELEASED.replace(" * inside", ""), "law_dppo_released"),
    Mutant(
        "8.11", RELEASED, RELEASED.replace("weights = u.exp()", "weights = (u + ll - ll.detach()).exp()"), "law_dppo_released"
    ),
    Mutant("8.11", RELEASED, RELEASED.replace("adv * ll", "adv * u"), "law_dppo_released"),
    Mutant("8.11", RELEASED, RELEASED.replace("(max=cap)", "(max=cap / 25)"), "law_on_policy_all_are_reinforce"),
    # --------------------------------------------------------------------------------------------------------- 8.12 SPO
    Mutant("8.12", SPO, SPO.replace("adv.abs()", "adv"), "law_spo_gradient"),
    Mutant("8.12", SPO, SPO.replace("(2 * epsilon)", "epsilon"), "law_spo_gradient"),
    Mutant("8.12", SPO, SPO.replace("(ratio - 1)", "ratio"), "law_on_policy_all_are_reinforce"),
    Mutant("8.12", SPO, SPO.replace("adv.abs()", "adv.square()"), "law_advantage_is_a_scale"),
    Mutant("8.12", SPO, SPO.replace("adv.abs() *", "adv.abs() * anchor.exp() *"), "law_penalties_in_expectation"),
    Mutant("8.12", '_check_above("epsilon", epsilon, 0)', '_check_above("epsilon", abs(epsilon), 0)', "law_trust_refusals"),
    # -------------------------------------------------------------------------------------------------------- 8.13 DRPO
    Mutant("8.13", DRPO, DRPO.replace("adv.abs()", "adv"), "law_drpo_gradient"),
    Mutant("8.13", DRPO, DRPO.replace("mu", "ll.exp()"), "law_drpo_gradient"),
    Mutant("8.13", DRPO, DRPO.replace("mu * ", ""), "law_drpo_bounds_the_weight_not_the_coefficient"),
    Mutant("8.13", DRPO, DRPO.replace("(2 * delta)", "delta"), "law_drpo_turns_back_where_dppo_stops"),
    Mutant("8.13", DRPO, DRPO.replace("(2 * delta)", "(2 * delta * adv.abs())"), "law_advantage_is_a_scale"),
    Mutant("8.13", "-(ratio * adv - penalty)", "-(ratio * adv + penalty)", "law_drpo_optimum_on_the_simplex"),
    Mutant("8.13", DRPO, DRPO.replace("mu * ", "mu.square() * "), "law_drpo_is_spo_with_its_own_epsilon"),
    Mutant("8.13", DRPO, DRPO.replace("(ratio - 1).square()", "(ratio - 1).abs()"), "law_penalties_in_expectation"),
    Mutant("8.13", DRPO, DRPO.replace("(2 * delta)", "(2 * min(delta, 0.9))"), "law_the_boundary_must_be_a_probability"),
    # ------------------------------------------------------------------------------------ ratios of a recorded trajectory
    Mutant(
        "3.1", "masked = (unmask >= steps", "masked = (unmask > steps", "law_token_ratios_have_mean_one", where="_replay_states"
    ),
    Mutant("7.1", "return ll - anchor", "return anchor - ll", "law_token_ratios_have_mean_one"),
    Mutant("7.1", "return ll - anchor", "return (ll - anchor) / 2", "law_left_to_right_ratios_are_importance_weights"),
    Mutant(
        "4.1",
        "log_p = (logits / temperature)",
        "log_p = (logits * temperature)",
        "law_token_ratios_at_the_wrong_temperature",
    ),
    Mutant(
        "10.1",
        '"kept_length": rollout.lengths,',
        '"kept_length": torch.full_like(rollout.lengths, 4),',
        "law_gspo_moves_a_sequence_as_one",
        where="normalizer",
    ),
    # ---------------------------------------------------------------------------------------------------------- rows
    Mutant("10.1", "P(alg.drpo, delta=0.15)", "P(alg.drpo, delta=0.16)", "law_methods", where="row.drpo"),
    Mutant(
        "10.1", 'P(alg.topk_divergence, form="tv")', 'P(alg.topk_divergence, form="kl")', "law_methods", where="row.dppo-topk"
    ),
    Mutant("10.1", "floor=0.8, cap=1.28", "floor=0.0, cap=1.28", "law_methods", where="row.cispo-released"),
    Mutant("10.1", "epsilon_high=0.2, bound=3.0", "epsilon_high=0.2, bound=4.0", "law_methods", where="row.ppo-released"),
    # ----------------------------------------------------------------------------------------------------- diagnostics
    Mutant(
        "",
        '"clip_fraction": cut[present]',
        '"clip_fraction": (~cut)[present]',
        "law_trust_diagnostics",
        where="ratio_diagnostics",
    ),
    Mutant("8.10", "~inside)", "divergence > delta)", "law_trust_diagnostics"),
    Mutant("8.6", "cut | beyond", "cut", "law_trust_diagnostics"),
    Mutant("8.13", "torch.sign(adv) * (pi - mu) > delta)", "(pi - mu).abs() > delta)", "law_trust_diagnostics"),
]
