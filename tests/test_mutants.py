"""Wrong versions of every equation, each of which a named law must reject.

A mutant is the source of the modules that the laws judge (judged.ROOMS) with one passage replaced: a weight, an axis, a sign,
a detach, a side of a clip or of a mask, an off-by-one. A law that no mutant fails judges nothing.
"""

import importlib
from pathlib import Path

import pytest

import judged
import laws
from mutant import Mutant

# A wrong result, or an error that the law provokes. NameError, TypeError and the like would mean a broken mutant.
KILLED = (AssertionError, ValueError, RuntimeError)

COUNT = "(u * n).floor().long() + 1, n)"  # what draws the counts of (2.3)


MUTANTS = [
    # --------------------------------------------------------------------------------------- rollout, plan, shared parts
    Mutant("", "return self.keep.sum(-1)", "return self.keep.sum(-1) - 1", "law_lengths_and_calls", where="Rollout.lengths"),
    Mutant(
        "", "return int(self.needed.sum())", "return int(self.valid.sum())", "law_lengths_and_calls", where="Plan.network_calls"
    ),
    Mutant(
        "",
        "return (self.valid & self.scored.any(-1)).",
        "return self.scored.any(-1).",
        "law_lengths_and_calls",
        where="Plan.needed",
    ),
    Mutant(
        "2.3",
        "_after_visible_prompt(rollout, masked | ~domain)",
        "_after_visible_prompt(rollout, masked)",
        "law_response_plan_states",
        where="_response_plan",
    ),
    Mutant(
        "2.2",
        "weight.to(rollout.logp.dtype), masked.any(-1))",
        "weight.to(rollout.logp.dtype), masked.any(-1) | True)",
        "law_response_plan_states",
        where="_response_plan",
    ),
    Mutant(
        "2.4",
        'return rollout.keep if domain == "keep"',
        'return rollout.keep if domain == "all"',
        "law_response_plan_states",
        where="_domain",
    ),
    Mutant("2.3", 'if domain not in ("keep", "all"):', "if False:", "law_plan_refusals", where="_domain"),
    Mutant("2.4", "or value < least:", "or value < 0:", "law_plan_refusals", where="_check_count"),
    # ------------------------------------------------------------------------------------------------------- 2.1 mean field
    Mutant("2.1", "(noise < p_mask_prompt)", "(noise > p_mask_prompt)", "law_mean_field_states"),
    Mutant("2.1", "(noise < p_mask_prompt)", "(noise > p_mask_prompt)", "law_mean_field_frequencies"),
    Mutant("2.1", "(noise < p_mask_prompt) & rollout.prompt_mask", "(noise < p_mask_prompt)", "law_mean_field_states"),
    Mutant("2.1", "torch.ones_like(rollout.keep)], -1)[None]", "rollout.keep], -1)[None]", "law_mean_field_states"),
    Mutant(
        "2.1",
        "scored = rollout.keep[None]",
        "scored = torch.ones_like(rollout.keep)[None]",
        "law_mean_field_is_integrand_at_one",
    ),
    Mutant(
        "2.1",
        "_uniform(tuple(rollout.prompt.shape), generator",
        "_uniform((1, rollout.prompt.shape[1]), generator",
        "law_mean_field_frequencies",
    ),
    Mutant("2.1", "if not 0 <= p_mask_prompt < 1:", "if not 0 <= p_mask_prompt <= 1:", "law_plan_refusals"),
    # -------------------------------------------------------------------------------------------------- 2.2 ELBO, time form
    Mutant("2.2", "inside, 1 / (num_states * t))", "inside, 1 / t)", "law_time_plan_expectation"),
    Mutant("2.2", "inside, 1 / (num_states * t))", "inside, 0 * t + 1 / num_states)", "law_time_plan_frequencies"),
    Mutant("2.2", "t = min_t + (1 - min_t) * u", "t = min_t + u", "law_time_plan_expectation"),
    Mutant("2.2", "t = min_t + (1 - min_t) * u", "t = 2 * min_t + (1 - 2 * min_t) * u", "law_time_plan_bias"),
    Mutant("2.2", "(noise < t[..., None]) & inside", "(noise > t[..., None]) & inside", "law_time_plan_expectation"),
    Mutant("2.2", "u = _uniform((num_states,", "u = _uniform((1,", "law_time_plan_frequencies"),
    Mutant("2.2", "_uniform((num_states, *inside.shape)", "_uniform((1, *inside.shape)", "law_time_plan_frequencies"),
    Mutant(
        "2.2",
        "_uniform((num_states, *inside.shape)",
        "_uniform((num_states, *inside.shape[:1], 1)",
        "law_time_plan_frequencies",
    ),
    Mutant("2.2", "if not 0 <= min_t < 1:", "if not 0 <= min_t <= 1:", "law_plan_refusals"),
    # ------------------------------------------------------------------------------------------------- 2.3 ELBO, count form
    Mutant("2.3", "/ (num_states * count)", "/ num_states + 0 * count", "law_count_plan_weights"),
    Mutant("2.3", "/ (num_states * count)", "/ count", "law_count_plan_expectation"),
    Mutant("2.3", COUNT, COUNT.replace("floor().long() + 1", "floor().long().clamp(min=1)"), "law_count_plan_expectation"),
    Mutant("2.3", COUNT, COUNT.replace("floor().long() + 1", "round().long().clamp(min=1)"), "law_count_plan_expectation"),
    Mutant("2.3", COUNT, COUNT.replace("u * n", "u.square() * n"), "law_count_plan_is_exact_for_consistent_models"),
    Mutant("2.3", "n = inside.sum(-1)\n    u =", "n = inside.sum(-1) * 0 + inside.shape[1]\n    u =", "law_count_plan_weights"),
    Mutant(
        "2.3",
        "n = inside.sum(-1)\n    u =",
        "n = inside.sum(-1) * 0 + inside.shape[1]\n    u =",
        "law_single_position_is_exact",
    ),
    Mutant(
        "2.3",
        "inside.device)\n    if strata:",
        "inside.device)\n    if not strata:",
        "law_strata_do_not_raise_the_variance",
    ),
    Mutant("", "(part + u)", "(part + u[:1])", "law_count_plan_frequencies", where="_in_strata"),
    Mutant("", "(part + u)", "(part + 0.5 + 0 * u)", "law_count_plan_frequencies", where="_in_strata"),
    Mutant(
        "2.3", "_uniform((num_states, *inside.shape)", "_uniform((1, *inside.shape)", "law_strata_do_not_raise_the_variance"
    ),
    Mutant(
        "2.3",
        "return (rank < count[..., None]) & domain",
        "return (rank <= count[..., None]) & domain",
        "law_count_plan_weights",
        where="_random_subset",
    ),
    Mutant(
        "2.3",
        "return (rank < count[..., None]) & domain",
        "return (rank >= count[..., None]) & domain",
        "law_count_plan_frequencies",
        where="_random_subset",
    ),
    Mutant(
        "2.3",
        "noise.masked_fill(~domain, torch.inf).argsort",
        "noise.argsort",
        "law_count_plan_frequencies",
        where="_random_subset",
    ),
    Mutant("2.3", COUNT, COUNT.replace("+ 1, n)", "+ 1, 0 * n + 99)"), "law_count_plan_at_the_edge"),
    # ---------------------------------------------------------------------------------------------- 2.4 complementary pairs
    Mutant("2.4", "* (n + 1)).floor()", "* n).floor()", "law_complementary_expectation"),
    Mutant("2.4", "* (n + 1)).floor()", "* n).floor()", "law_complementary_frequencies"),
    Mutant("2.4", "weight = (n + 1).double()", "weight = n.double()", "law_complementary_expectation"),
    Mutant(
        "2.4",
        '"ELBO, complementary": partial(alg.complementary_plan',
        '"ELBO, complementary": partial(alg.elbo_time_plan, min_t=0.5',
        "law_estimators",
        where="ESTIMATORS",
    ),
    Mutant(
        "2.1",
        "_fixed(scores, max(map(len, scores)), 1.0)",
        "_fixed(scores, 1, 1.0)",
        "law_the_table_of_estimators",
        where="_mean_field_law",
    ),
    Mutant("2.2", "1 / (calls * t)", "1 / calls", "law_the_table_of_estimators", where="_time_law"),
    Mutant("2.2", "* t / (1 - min_t) * weight", "/ (1 - min_t) * weight", "law_the_table_of_estimators", where="_time_law"),
    Mutant("2.2", "leggauss(60)", "leggauss(4)", "law_the_table_of_estimators", where="_time_law"),
    Mutant("2.3", "n / calls / count", "(n + 1) / calls / count", "law_the_table_of_estimators", where="_count_law"),
    Mutant(
        "2.3", "if strata else (0.0, 1.0)", "if not strata else (0.0, 1.0)", "law_the_table_of_estimators", where="_count_law"
    ),
    Mutant("2.4", "(n + 1) / calls * score", "n / calls * score", "law_the_table_of_estimators", where="_pair_law"),
    Mutant("2.4", "value + weighted[everything - m]", "2 * value", "law_the_table_of_estimators", where="_pair_law"),
    Mutant(
        "2.6",
        "law.append(_independent(scores, t, weight / t))",
        "law.append(_independent(scores, t, weight))",
        "law_the_table_of_estimators",
        where="_sdmc_law",
    ),
    Mutant(
        "2.6", "math.floor(1.5 + t * (n - 1))", "math.floor(1 + t * (n - 1))", "law_the_table_of_estimators", where="_sdmc_law"
    ),
    Mutant("2.8", "hidden | later)", "hidden)", "law_the_table_of_estimators", where="_scores"),
    Mutant("2.4", "(num_states * both.sum(-1)", "(pairs * both.sum(-1)", "law_complementary_states"),
    Mutant("2.4", "(num_states * both.sum(-1)", "(pairs * both.sum(-1)", "law_single_position_is_exact"),
    Mutant("2.4", "[masked, inside & ~masked]", "[masked, ~masked]", "law_complementary_states"),
    Mutant("2.4", "[masked, inside & ~masked]", "[masked, masked]", "law_complementary_variance"),
    Mutant("2.4", "_uniform((pairs, *inside.shape)", "_uniform((1, *inside.shape)", "law_complementary_expectation"),
    Mutant("2.4", "if num_states % 2:", "if False:", "law_plan_refusals"),
    # ----------------------------------------------------------------------------------------------------------- 3.1 replay
    Mutant(
        "3.1",
        "return rollout.unmask_step.masked_fill(~rollout.keep, -1)",
        "return rollout.unmask_step",
        "law_replay_states",
        where="_last_deciding_step",
    ),
    Mutant(
        "3.1",
        "return rollout.unmask_step.masked_fill(~rollout.keep, -1)",
        "return rollout.unmask_step",
        "law_replay_leaves_out_decided_steps",
        where="_last_deciding_step",
    ),
    Mutant("3.1", "valid = steps <= last", "valid = steps < last", "law_replay_gradient_is_the_policy_gradient"),
    Mutant("3.1", "valid = steps <= last", "valid = steps < last", "law_replay_reproduces_the_sampler"),
    Mutant(
        "3.1",
        "masked = (unmask >= steps[..., None])",
        "masked = (unmask > steps[..., None])",
        "law_replay_gradient_is_the_policy_gradient",
        where="_replay_states",
    ),
    Mutant(
        "3.1",
        "masked = (unmask >= steps[..., None])",
        "masked = (unmask > steps[..., None])",
        "law_replay_of_confident_samplers_is_token_only",
        where="_replay_states",
    ),
    Mutant(
        "3.1",
        "masked = (unmask >= steps[..., None]) | (unmask < 0)",
        "masked = unmask >= steps[..., None]",
        "law_replay_reproduces_the_sampler",
        where="_replay_states",
    ),
    Mutant(
        "3.1",
        "scored = (unmask == steps[..., None])",
        "scored = (unmask >= steps[..., None])",
        "law_replay_states",
        where="_replay_states",
    ),
    Mutant(
        "3.1",
        "(unmask == steps[..., None]) & valid[..., None]",
        "(unmask == steps[..., None]) & rollout.keep",
        "law_replay_states",
        where="_replay_states",
    ),
    Mutant(
        "3.1",
        "scale.expand(steps.shape), valid, step=steps)",
        "scale.expand(steps.shape), valid)",
        "law_replay_states",
        where="_replay_states",
    ),
    Mutant(
        "3.1",
        "available.clamp(min=1, max=num_states)",
        "available.clamp(min=1)",
        "law_replay_subset_is_unbiased",
        where="_choose",
    ),
    Mutant("3.1", "available.clamp(min=1, max=num_states)", "num_states", "law_replay_subset_is_unbiased", where="_choose"),
    Mutant(
        "3.1",
        "noise.masked_fill(~valid, torch.inf).argsort(0)",
        "noise.argsort(0)",
        "law_replay_subset_is_unbiased",
        where="_choose",
    ),
    Mutant(
        "3.1",
        "noise = _uniform(tuple(valid.shape), generator",
        "noise = _uniform((valid.shape[0], 1), generator",
        "law_replay_subset_frequencies",
        where="_choose",
    ),
    Mutant(
        "3.1", "return order[:num_states]", "return order[: num_states - 1]", "law_replay_subset_frequencies", where="_choose"
    ),
    Mutant("3.1", ">= min_entropy)", "> min_entropy)", "law_replay_entropy_threshold"),
    Mutant("3.1", ">= min_entropy)", "< min_entropy)", "law_replay_entropy_loss_is_bounded"),
    Mutant("3.1", "masked_fill(rollout.unmask_step < 0, 0)", "clone()", "law_replay_entropy_threshold", where="_step_entropy"),
    Mutant(
        "3.1",
        "scatter_add_(0, step.T, entropy.T)",
        "scatter_(0, step.T, entropy.T)",
        "law_replay_entropy_threshold",
        where="_step_entropy",
    ),
    Mutant(
        "3.1",
        "        _check_num_states(rollout, num_states)\n        steps, scale",
        "        steps, scale",
        "law_plan_refusals",
    ),
    Mutant("3.1", "valid = valid & (entropy[", "valid = (entropy[", "law_replay_entropy_threshold"),
    Mutant("3.1", "entropy[: steps.shape[0]] >= min_entropy", "entropy[:1] >= min_entropy", "law_replay_entropy_threshold"),
    # --------------------------------------------------------------------------------------------------------- 4.1 features
    Mutant(
        "4.1",
        "log_p = (logits / temperature).log_softmax(-1)",
        "log_p = logits.log_softmax(-1)",
        "law_features_are_those_of_the_model",
    ),
    Mutant(
        "4.1",
        "log_p = (logits / temperature).log_softmax(-1)",
        "log_p = (logits * temperature).log_softmax(-1)",
        "law_features_have_the_right_gradient",
    ),
    Mutant(
        "4.1",
        "attention_mask)[:, rollout.prompt.shape[1] :]",
        "attention_mask)[:, rollout.prompt.shape[1] - 1 : -1]",
        "law_features_are_those_of_the_model",
        where="_encode",
    ),
    Mutant(
        "4.1",
        "rollout.prompt_mask, torch.ones_like(rollout.keep)], 1)",
        "rollout.prompt_mask, rollout.keep], 1)",
        "law_network_inputs",
        where="plan_inputs",
    ),
    Mutant(
        "4.1",
        "masked_fill(plan.hidden.flatten(0, 1)[states]",
        "masked_fill(~plan.hidden.flatten(0, 1)[states]",
        "law_network_inputs",
        where="plan_inputs",
    ),
    Mutant(
        "4.1",
        "row = states % rollout.response.shape[0]",
        "row = states // rollout.response.shape[0] % rollout.response.shape[0]",
        "law_network_inputs",
        where="plan_inputs",
    ),
    Mutant(
        "4.1",
        "targets = rollout.response[row] if",
        "targets = rollout.response[0 * row] if",
        "law_features_are_those_of_the_model",
        where="state_features",
    ),
    Mutant("4.1", "= -_expectation(log_p, log_p)", "= _expectation(log_p, log_p)", "law_features_are_those_of_the_model"),
    Mutant(
        "4.1",
        "value.masked_fill(log_probs == -torch.inf, 0)",
        "value",
        "law_features_have_the_right_gradient",
        where="_expectation",
    ),
    Mutant(
        "4.1",
        "out.setdefault(name, blank)[states] = value",
        "out.setdefault(name, blank)[: len(states)] = value",
        "law_features_do_not_depend_on_the_split",
        where="features",
    ),
    # ------------------------------------------------------------------------------------------------------- 5.1 reductions
    Mutant("5.1", "ll = logp * plan.scored", "ll = logp", "law_reductions"),
    Mutant("5.1", "ll = ll.sum(-1, keepdim=True)", "ll = ll.mean(-1, keepdim=True)", "law_reductions"),
    Mutant("5.1", "ll = ll.sum(-1, keepdim=True)", "ll = ll.mean(-1, keepdim=True)", "law_mean_field_is_integrand_at_one"),
    Mutant(
        "5.1",
        "parts * (ll * plan.weight[..., None]).unflatten(0, (parts, -1)).sum(1)",
        "(ll * plan.weight[..., None]).mean(0, keepdim=True)",
        "law_count_plan_expectation",
    ),
    Mutant("5.1", "(ll * plan.weight[..., None]).unflatten(", "ll.unflatten(", "law_complementary_expectation"),
    Mutant("5.1", "else ll / normalizer[..., None]", "else ll * normalizer[..., None]", "law_reductions"),
    Mutant("5.1", "if level not in LEVELS:", "if False:", "law_reductions"),
    Mutant("5.1", ".unflatten(0, (parts, -1)).any(1)", ".unflatten(0, (parts, -1)).all(1)", "law_entries", where="entries"),
    Mutant(
        "5.1",
        "weight = torch.ones_like(plan.weight[:parts, :, None])",
        "weight = plan.weight.sum(0)[None, :, None]",
        "law_entries",
        where="entries",
    ),
    # ----------------------------------------------------------------------------------------------------------- 6 credit
    Mutant(
        "6.1",
        "return (group - _average(group)).flatten()",
        "return (group - group.mean(0, keepdim=True)).flatten()",
        "law_advantages",
    ),
    Mutant(
        "6.1",
        "return (group - _average(group)).flatten()",
        "return (group - group.mean()).flatten()",
        "law_advantages",
    ),
    Mutant(
        "6.1",
        "return (group - _average(group)).flatten()",
        "return (_average(group) - group).flatten()",
        "law_leave_one_out_is_unbiased",
    ),
    Mutant(
        "6.1",
        "return (group - _average(group)).flatten()",
        "return (group - group.median(1, keepdim=True).values).flatten()",
        "law_advantages_scale",
    ),
    Mutant("6.3", "= group[..., :1], ", "= 0 * group[..., :1], ", "law_equal_rewards_are_silent", where="_average"),
    Mutant("6.1", "return first + (", "return (", "law_advantages", where="_average"),
    Mutant("6.1", "if reward.requires_grad:", "if False:", "law_credit_refusals", where="_groups"),
    Mutant(
        "6.1",
        "if num_generations < 1 or reward.shape[0] % num_generations:",
        "if num_generations < 1:",
        "law_credit_refusals",
        where="_groups",
    ),
    Mutant(
        "6.1",
        "return reward.unflatten(0, (-1, num_generations))",
        "return reward.unflatten(0, (num_generations, -1)).T",
        "law_advantages",
        where="_groups",
    ),
    Mutant("6.2", "correction=ddof", "correction=0", "law_z_score_scale"),
    Mutant("6.2", "correction=ddof", "correction=1", "law_advantages"),
    Mutant(
        "6.2", "group.std(1, keepdim=True, correction=ddof)", "group.std(0, keepdim=True, correction=ddof)", "law_advantages"
    ),
    Mutant("6.2", "(std + eps)", "std.clamp(min=eps)", "law_advantages"),
    Mutant("6.2", "(std + eps)", "(std.square() + eps)", "law_z_score_scale"),
    Mutant("6.2", "if not 0 <= ddof < num_generations:", "if not 0 <= ddof <= num_generations:", "law_credit_refusals"),
    Mutant(
        "6.3",
        "scale = num_generations / (num_generations - 1)",
        "scale = (num_generations - 1) / num_generations",
        "law_advantages",
    ),
    Mutant("6.3", "scale = num_generations / (num_generations - 1)", "scale = 1.0", "law_leave_one_out_is_unbiased"),
    Mutant("6.3", "scale = num_generations / (num_generations - 1)", "scale = 1.0", "law_advantages_scale"),
    Mutant("6.3", "if num_generations < 2:", "if num_generations < 1:", "law_credit_refusals"),
    # ------------------------------------------------------------------------------------------------------ 7 ratios and KL
    Mutant("7.1", "return ll - anchor", "return anchor - ll", "law_log_ratio"),
    Mutant("7.1", "return ll - anchor", "return (ll - anchor).expm1()", "law_log_ratio"),
    Mutant("7.1", "return ll - anchor", "return ll.detach() - anchor + 0 * ll", "law_log_ratio"),
    Mutant("7.1", "return ll - anchor", "return (ll - anchor).clamp(max=0.5)", "law_fresh_masks_inflate_the_ratio"),
    Mutant("7.1", "if anchor.requires_grad:", "if False:", "law_log_ratio"),
    Mutant("7.1", "if anchor.requires_grad:", "if False:", "law_objective_refusals"),
    Mutant("7.2", "u = ll - ref\n", "u = ref - ll\n", "law_kl_by_enumeration"),
    Mutant("7.2", "torch.expm1(-u) + u", "torch.expm1(u) - u", "law_kl_by_enumeration"),
    Mutant("7.2", "torch.expm1(-u) + u", "torch.expm1(-u) - u", "law_kl_sign"),
    Mutant("7.2", "torch.expm1(-u) + u", "(torch.expm1(-u) + u).float().double()", "law_kl_by_enumeration"),
    Mutant("7.2", "torch.expm1(-u) + u", "torch.exp(-u).float() - 1 + u", "law_kl_sign"),
    Mutant("7.2", "u.square() / 2", "u.square()", "law_kl_by_enumeration"),
    Mutant("7.2", 'if form == "k1":\n        return u', 'if form == "k1":\n        return u.abs()', "law_kl_by_enumeration"),
    Mutant("7.2", "if ref.requires_grad:", "if False:", "law_kl_sign"),
    # --------------------------------------------------------------------------------------------------------- 8 objectives
    Mutant("8.1", "_surrogate(-adv * (ll if", "_surrogate(adv * (ll if", "law_reinforce_gradient"),
    Mutant("8.1", "_surrogate(-adv * (ll if", "_surrogate(-adv * (ll.exp() if", "law_reinforce_gradient"),
    Mutant("8.1", "_surrogate(-adv * (ll if", "_surrogate(-adv.abs() * (ll if", "law_ppo_on_policy_is_reinforce"),
    Mutant("8.1", "_surrogate(-adv * (ll if", "_surrogate(adv * (ll if", "law_replay_gradient_is_the_policy_gradient"),
    Mutant("8.2", "-torch.minimum(", "-torch.maximum(", "law_ppo_gradient"),
    Mutant("8.2", "-torch.minimum(", "torch.minimum(", "law_ppo_on_policy_is_reinforce"),
    Mutant(
        "8.2",
        "clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)",
        "clipped = ratio.clamp(1 - epsilon_high, 1 + epsilon_low)",
        "law_ppo_gradient",
    ),
    Mutant(
        "8.2",
        "torch.minimum(ratio * adv, clipped",
        "torch.minimum(clipped * adv, clipped",
        "law_ppo_gradient",
    ),
    Mutant(
        "8.2",
        "torch.minimum(ratio * adv, clipped",
        "torch.minimum(ratio.clamp(max=1e3) * adv, clipped",
        "law_self_normalized_gradient_is_bounded",
    ),
    Mutant(
        "8.2",
        "ratio = log_ratio(ll, anchor).exp()",
        "ratio = 1 + log_ratio(ll, anchor)",
        "law_ppo_gradient",
    ),
    Mutant(
        "8.2",
        "ratio = log_ratio(ll, anchor).exp()",
        "ratio = log_ratio(ll, anchor).exp().detach() + 0 * ll",
        "law_ppo_on_policy_is_reinforce",
    ),
    Mutant("8.3", "capped = log_ratios.clamp(max=log_cap)", "capped = log_ratios", "law_self_normalized_weights"),
    Mutant(
        "8.3", "capped = log_ratios.clamp(max=log_cap)", "capped = log_ratios.clamp(min=log_cap)", "law_self_normalized_weights"
    ),
    Mutant(
        "8.3",
        "capped = log_ratios.clamp(max=log_cap)",
        "capped = log_ratios.clamp(-log_cap, log_cap)",
        "law_self_normalized_weights",
    ),
    Mutant(
        "8.3",
        "capped = log_ratios.clamp(max=log_cap)",
        "capped = log_ratios.clamp(max=0.0)",
        "law_self_normalized_weights_stay_in_the_group",
    ),
    Mutant(
        "8.3",
        "log_cap).unflatten(1, (-1, num_generations))",
        "log_cap).unflatten(1, (1, -1))",
        "law_self_normalized_weights_stay_in_the_group",
    ),
    Mutant("8.3", "return capped.softmax(2)", "return capped.softmax(1)", "law_self_normalized_weights_stay_in_the_group"),
    Mutant(
        "8.3",
        "return capped.softmax(2)",
        "return capped.exp().div(capped.exp().sum(2, keepdim=True))",
        "law_self_normalized_weights",
    ),
    Mutant(
        "8.4",
        "log_ratio(ll.detach(), anchor), math",
        "log_ratio(ll, anchor), math",
        "law_self_normalized_gradient",
    ),
    Mutant("8.4", "math.log(cap)", "math.log(1 + cap)", "law_self_normalized_gradient"),
    Mutant(
        "8.4",
        "loss = -weights * adv * (ll",
        "loss = -weights * adv.clamp(min=0) * (ll",
        "law_self_normalized_gradient",
    ),
    Mutant(
        "8.4",
        "loss = -weights * adv * (ll",
        "loss = weights * adv * (ll",
        "law_self_normalized_on_policy_is_reinforce",
    ),
    Mutant(
        "8.4",
        "loss = -weights * adv * (ll",
        "loss = -num_generations * weights * adv * (ll",
        "law_self_normalized_on_policy_is_reinforce",
    ),
    Mutant(
        "8.4",
        "loss = -weights * adv * (ll if score is None else score)",
        "loss = -log_ratio(ll, anchor).exp() * adv",
        "law_self_normalized_gradient_is_bounded",
    ),
    Mutant("8.4", '_check_above("cap", cap, 0)', '_check_above("cap", cap, -1)', "law_objective_refusals"),
    # ------------------------------------------------------------------------------------------------------ 9.1 aggregation
    Mutant("9.1", "total = (loss * weight * present).sum((0, 2))", "total = (loss * present).sum((0, 2))", "law_aggregation"),
    Mutant(
        "9.1",
        "total = (loss * weight * present).sum((0, 2))",
        "total = (loss * weight).sum((0, 2))",
        "law_aggregation_invariances",
    ),
    Mutant(
        "9.1",
        "total = (loss * weight * present).sum((0, 2))",
        "total = (loss * weight * present).mean((0, 2))",
        "law_aggregation",
    ),
    Mutant("9.1", "(total / rollout.lengths).mean()", "(total / rollout.lengths).sum()", "law_aggregation_of_prompts"),
    Mutant(
        "9.1",
        "(total / rollout.lengths).mean()",
        "(total / rollout.keep.shape[1]).mean()",
        "law_aggregation_invariances",
    ),
    Mutant("9.1", "total.sum() / rollout.lengths.sum()", "total.mean() / rollout.lengths.sum()", "law_aggregation"),
    Mutant(
        "9.1",
        "total.sum() / rollout.lengths.sum()",
        "(total / rollout.lengths).mean()",
        "law_aggregation_of_prompts",
    ),
    Mutant(
        "9.1",
        "total.mean() / rollout.keep.shape[1]",
        "total.mean() / rollout.lengths.max()",
        "law_aggregation_invariances",
    ),
    Mutant(
        "9.1",
        "total.sum() / (total.shape[0] / rollout.num_generations)",
        "total.sum() / rollout.num_generations",
        "law_aggregation_of_prompts",
    ),
    Mutant("9.1", "total.sum() / (total.shape[0] / rollout.num_generations)", "total.sum()", "law_aggregation"),
    # ---------------------------------------------------------------------------------------------------------- 10 methods
    Mutant(
        "10.1",
        "surrogate + beta * penalty",
        "surrogate - beta * penalty",
        "law_method_loss_adds_the_penalty",
    ),
    Mutant("10.1", "surrogate + beta * penalty", "surrogate + penalty", "law_methods"),
    Mutant("10.1", "target, form=method.kl.form)", 'target, form="k2")', "law_method_loss_adds_the_penalty", where="penalty"),
    Mutant("10.1", "alg.kl_term(ll, target, form=", "alg.kl_term(ll.detach(), target, form=", "law_methods", where="penalty"),
    Mutant("10.1", "adv.to(ll.dtype)[..., None]", "-adv.to(ll.dtype)[..., None]", "law_methods", where="surrogate"),
    Mutant("10.1", '"how": method.aggregation', '"how": "sequence_mean"', "law_methods", where="method_loss"),
    Mutant("10.1", '"how": method.aggregation', '"how": "token_mean"', "law_methods_treat_prompts_apart", where="method_loss"),
    Mutant(
        "10.1",
        "anchor, adv, rollout.num_generations, **extra)",
        "anchor, adv, adv.shape[1], **extra)",
        "law_methods_treat_prompts_apart",
        where="surrogate",
    ),
    Mutant(
        "10.1",
        "rollout.logp.expand(plan.scored.shape)})",
        "0 * rollout.logp.expand(plan.scored.shape)})",
        "law_methods",
        where="behaviour_anchor",
    ),
    Mutant(
        "10.1",
        'if not plan.replay or method.temperature != "sampling"',
        'if method.temperature != "sampling"',
        "law_normalizers",
        where="behaviour_anchor",
    ),
    Mutant("10.1", "if value not in allowed:", "if False:", "law_order_of_a_row", where="Method.__post_init__"),
    Mutant(
        "10.1",
        '"padded_length": torch.full_like(rollout.lengths, rollout.keep.shape[1])',
        '"padded_length": rollout.lengths',
        "law_normalizers",
        where="normalizer",
    ),
    Mutant(
        "10.1",
        "P(alg.group_z_score, ddof=1",
        "P(alg.group_z_score, ddof=0",
        "law_methods",
        where="row.grpo",
    ),
    Mutant(
        "10.1",
        "epsilon_low=0.5, epsilon_high=0.5",
        "epsilon_low=0.5, epsilon_high=0.2",
        "law_clips_of_the_rows",
        where="row.diffu-grpo-released",
    ),
    Mutant("10.1", 'KL("k3", 0.04)', 'KL("k2", 0.04)', "law_methods", where="row.diffu-grpo-released"),
    Mutant("10.1", 'normalizer="kept_length"', 'normalizer="padded_length"', "law_methods", where="row.grpo"),
    Mutant("10.1", 'normalizer="kept_length"', 'normalizer="padded_length"', "law_methods", where="row.stabledrl-released"),
    Mutant("10.1", 'normalizer="kept_length"', 'normalizer="padded_length"', "law_methods", where="row.stabledrl-elbo"),
    Mutant("10.1", 'normalizer="kept_length"', 'normalizer="padded_length"', "law_methods", where="row.gspo"),
    Mutant(
        "10.1",
        "P(alg.self_normalized_clip, cap=6.0)",
        "P(alg.self_normalized_clip, cap=5.0)",
        "law_clips_of_the_rows",
        where="row.stabledrl",
    ),
    Mutant(
        "10.1",
        "self.objective.func.linear and self.kl is None",
        "self.kl is None",
        "law_rows_are_what_their_parts_declare",
        where="Method.linear",
    ),
    # ---------------------------------------------------------------------------------------------------------- diagnostics
    Mutant(
        "",
        "present = alg.entries(plan, method.reduction)[0].expand_as(ll)",
        "present = torch.ones_like(ll, dtype=torch.bool)",
        "law_diagnostics",
        where="ratio_diagnostics",
    ),
    Mutant(
        "",
        '"bypass_fraction": bypass[present]',
        '"bypass_fraction": cut[present]',
        "law_diagnostics",
        where="ratio_diagnostics",
    ),
    Mutant(
        "", "torch.exp(2 * logs.logsumexp(0) -", "torch.exp(logs.logsumexp(0) -", "law_diagnostics", where="ratio_diagnostics"
    ),
    Mutant(
        "8.2",
        "((adv > 0) & above) | ((adv < 0) & below)",
        "above | below",
        "law_diagnostics",
    ),
    Mutant("10.1", "adv.to(ll.dtype)[..., None]", "adv[..., None]", "law_single_precision_stays_single", where="surrogate"),
    Mutant(
        "2.2",
        "weight.to(rollout.logp.dtype), masked",
        "weight.double(), masked",
        "law_single_precision_stays_single",
        where="_response_plan",
    ),
    # ----------------------------------------------------------------------- levels position and state, a mean over entries
    Mutant("5.1", 'if level not in ("token", "position"):', 'if level != "token":', "law_reductions"),
    Mutant("5.1", 'if level not in ("token", "step"):', 'if level not in ("token", "step", "position"):', "law_reductions"),
    Mutant("5.1", 'if level not in ("token", "step"):', 'if level not in ("token", "step", "state"):', "law_reductions"),
    Mutant("5.1", '{"state": states,', '{"state": 1,', "law_reductions", where="_parts"),
    Mutant("5.1", '{"state": states,', '{"state": 1,', "law_entries", where="_parts"),
    Mutant("5.1", 'whole = level in ("token", "position")', 'whole = level == "token"', "law_entries", where="entries"),
    Mutant("5.1", 'if level in ("token", "step"):', 'if level in ("token", "step", "state"):', "law_entries", where="entries"),
    Mutant(
        "5.1", 'if level in ("token", "step"):', 'if level in ("token", "step", "position"):', "law_entries", where="entries"
    ),
    Mutant(
        "5.1",
        'return present, weight / parts if level == "state" else weight',
        "return present, weight",
        "law_entries",
        where="entries",
    ),
    Mutant(
        "9.1",
        '"entry_mean": total.sum() / present.sum().clamp(min=1)',
        '"entry_mean": total.sum() / present.numel()',
        "law_aggregation",
    ),
    Mutant(
        "9.1",
        '"entry_mean": total.sum() / present.sum().clamp(min=1)',
        '"entry_mean": total.sum() / (present * weight).sum()',
        "law_aggregation",
    ),
    Mutant(
        "9.1",
        '"entry_mean": total.sum() / present.sum().clamp(min=1)',
        '"entry_mean": total.sum() / rollout.lengths.sum()',
        "law_aggregation",
    ),
    Mutant(
        "9.1",
        '"entry_mean": total.sum() / present.sum().clamp(min=1)',
        '"entry_mean": (total / present.sum((0, 2)).clamp(min=1)).mean()',
        "law_aggregation",
    ),
    # ------------------------------------------------------------- a penalty divided once, a plan that is told, an order
    Mutant(
        "10.1",
        "kl / normalizer(method, plan, rollout).to(kl.dtype)[..., None]",
        "kl / normalizer(method, plan, rollout).to(kl.dtype)[..., None].square()",
        "law_penalty_of_whole_likelihoods",
        where="penalty",
    ),
    Mutant(
        "10.1",
        'if method.kl.of != "per_token":',
        'if method.kl.of == "ratio":',
        "law_penalty_of_whole_likelihoods",
        where="penalty",
    ),
    Mutant(
        "10.1",
        'if method.kl.of == "ratio" else plain',
        'if method.kl.of != "log_likelihood" else plain',
        "law_penalty_of_whole_likelihoods",
        where="kl_target",
    ),
    Mutant("10.1", "update / max(1, updates - 1)", "update / max(1, updates)", "law_draw", where="draw"),
    Mutant("10.1", "update / max(1, updates - 1)", "(update + 1) / updates", "law_draw", where="draw"),
    Mutant("10.1", "schedule=schedule)", "schedule=generator)", "law_draw", where="draw"),
    Mutant("10.1", 'if method.refresh != "scheduled":', 'if method.refresh == "fixed":', "law_draw", where="draw"),
    Mutant("10.1", '"left_to_right", "right_to_left")', '"left_to_right")', "law_order_of_a_row", where="CHOICES"),
    Mutant("10.1", 'order: str = "any"', 'order: str = "random"', "law_order_of_a_row", where="Method.order"),
    Mutant("", "if not len(logs):", "if False:", "law_diagnostics", where="ratio_diagnostics"),
    Mutant("8.4", '_check_above("cap", cap, 0)', '_check_above("cap", cap, 1)', "law_self_normalized_gradient"),
]

# Those of the method families: every file mutants_*.py beside this one.
for path in sorted(Path(__file__).parent.glob("mutants_*.py")):
    MUTANTS += importlib.import_module(path.stem).MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.tag or 'helper'}-{mutant.law}")
def test_the_law_kills_the_mutant(mutant):
    assert mutant.new != mutant.old
    wrong = judged.mutated(mutant)
    with pytest.raises(KILLED):
        laws.LAWS[mutant.law](wrong)


@pytest.mark.parametrize("name", laws.LAWS)
def test_the_law_accepts_the_unmutated_source(name):
    """What kills a mutant is its change and nothing else."""
    laws.LAWS[name](judged.unmutated())


def test_every_mutant_is_of_an_equation_and_has_a_law():
    tags, wrong = {tag for tag, _, _ in judged.equations()} | {""}, []
    for mutant in MUTANTS:
        if mutant.tag not in tags:
            wrong.append(f"{mutant.at}: no docstring of {', '.join(judged.ROOMS)} opens with ({mutant.tag}): drop the mutant")
        if mutant.law not in laws.LAWS:
            wrong.append(f"{mutant.at}: there is no law {mutant.law}: name another one, or drop the mutant")
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_law_kills_something():
    killing = {mutant.law for mutant in MUTANTS}
    idle = [
        f"{law.__code__.co_filename}:{law.__code__.co_firstlineno}: {name} kills no mutant: add one to tests/mutants_*.py"
        for name, law in laws.LAWS.items()
        if name not in killing
    ]
    assert not idle, "\n" + "\n".join(idle)


def test_no_mutant_is_listed_twice():
    first, twice = {}, []
    for mutant in MUTANTS:
        if first.setdefault(mutant, mutant) is not mutant:
            twice.append(f"{mutant.at}: this mutant is that of {first[mutant].at}: drop one")
    assert not twice, "\n" + "\n".join(twice)
