"""Wrong versions of the equations of laws_steps.py: chosen steps, the exact kernel, stepwise credit."""

from mutant import Mutant

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------------------------ 3.2 most uncertain steps
    Mutant(
        "3.2",
        "-torch.inf).argsort(dim=0, descending=True, stable=True)",
        "-torch.inf).argsort(dim=0, descending=False, stable=True)",
        "law_entropy_plan_takes_the_most_uncertain_steps",
    ),
    Mutant(
        "3.2",
        "entropy.masked_fill(decided, -torch.inf).argsort(",
        "entropy.argsort(",
        "law_entropy_plan_takes_the_most_uncertain_steps",
    ),
    Mutant(
        "3.2",
        "[:, None] > last\n    if shared",
        "[:, None] >= last\n    if shared",
        "law_entropy_plan_takes_the_most_uncertain_steps",
    ),
    Mutant(
        "3.2",
        "stable=True)[:num_states]\n",
        "stable=True)[:num_states].sort(0).values\n",
        "law_entropy_plan_takes_the_most_uncertain_steps",
    ),
    Mutant(
        "3.2",
        "masked_fill(rollout.unmask_step < 0, 0)\n",
        "clone()\n",
        "law_entropy_plan_takes_the_most_uncertain_steps",
    ),
    Mutant(
        "3.2",
        "_replay_states(rollout, order, ~decided.gather(0, order)",
        "_replay_states(rollout, order, torch.ones_like(order).bool()",
        "law_entropy_plan_takes_the_most_uncertain_steps",
    ),
    Mutant("3.2", "    if shared:\n", "    if not shared:\n", "law_entropy_plan_shared"),
    Mutant(
        "3.2", "entropy.masked_fill(decided, 0).sum(1, keepdim=True)", "entropy.sum(1, keepdim=True)", "law_entropy_plan_shared"
    ),
    Mutant(
        "3.2",
        "masked_fill(decided, 0).sum(1, keepdim=True)",
        "masked_fill(decided, 0).sum(0, keepdim=True)",
        "law_entropy_plan_shared",
    ),
    Mutant("3.2", "plan.weight / (num_states * tokens)", "plan.weight / num_states", "law_entropy_plan_weights"),
    Mutant("3.2", "plan.weight / (num_states * tokens)", "plan.weight / tokens", "law_entropy_plan_weights"),
    Mutant("3.2", 'return plan if weight == "sum"', 'return plan if weight == "mean"', "law_entropy_plan_weights"),
    Mutant(
        "3.2",
        "plan.weight / (num_states * tokens)",
        "plan.weight / (plan.valid.sum(0) * tokens)",
        "law_entropy_plan_weights",
    ),
    Mutant("3.2", 'if weight not in ("sum", "mean", "token_mean"):', "if False:", "law_step_plan_refusals"),
    Mutant("3.2", "    _check_num_states(rollout, num_states)\n    if weight", "    if weight", "law_step_plan_refusals"),
    Mutant("3.2", "if name not in rollout.records:", "if False:", "law_step_plan_refusals"),
    Mutant("3.2", "    if shared:\n", "    if True:\n", "law_selection_by_trajectory_is_biased"),
    Mutant("3.2", "    if shared:\n", "    if False:\n", "law_selection_by_trajectory_is_biased"),
    Mutant(
        "4.1",
        'values["entropy"] = -_expectation(read, read)',
        'values["entropy"] = -_expectation(read, read) / 64',
        "law_entropy_bounds_what_a_fixed_selection_loses",
    ),
    Mutant(
        "4.1",
        'values["entropy"] = -_expectation(read, read)',
        'values["entropy"] = -_expectation(read, read) / 2',
        "law_entropy_bounds_the_score",
    ),
    Mutant(
        "4.1",
        'values["entropy"] = -_expectation(read, read)',
        'values["entropy"] = -_expectation(read, read) / math.log(2)',  # bits
        "law_entropy_bounds_the_score",
    ),
    Mutant(
        "4.1",
        "read = (logits / temperature).log_softmax(-1)",
        "read = logits.log_softmax(-1)",
        "law_score_at_another_temperature",
    ),
    # --------------------------------------------------------------------------------------------------- 3.3 merged steps
    Mutant("3.3", 'merge, rounding_mode="floor")', 'merge, rounding_mode="trunc")', "law_merged_states"),
    Mutant(
        "3.3",
        "torch.div(rollout.unmask_step, merge, rounding_mode",
        "torch.div(rollout.unmask_step + 1, merge, rounding_mode",
        "law_merged_states",
    ),
    Mutant("3.3", "min_entropy=0.0), step=None)", "min_entropy=0.0))", "law_merged_states"),
    Mutant("3.3", "min_entropy=0.0), step=None)", "min_entropy=0.0))", "law_merged_plan_between_replay_and_mean_field"),
    Mutant(
        "3.3",
        "torch.div(rollout.unmask_step, merge, rounding_mode",
        "torch.div(rollout.unmask_step, merge + 1, rounding_mode",
        "law_merged_plan_between_replay_and_mean_field",
    ),
    Mutant("3.3", '    _check_count("plan.merge", merge)\n', "", "law_step_plan_refusals"),
    # --------------------------------------------------------------------------------- 4.1 targets, top tokens, exact KL
    Mutant(
        "4.1",
        "rollout.response[row] if plan.targets is None else plan.targets.flatten(0, 1)[states]",
        "rollout.response[row]",
        "law_targets_override_the_response",
    ),
    Mutant(
        "4.1",
        "else plan.targets.flatten(0, 1)[states]",
        "else plan.targets[0][row]",
        "law_targets_override_the_response",
    ),
    Mutant(
        "4.1",
        "rollout.response[row] if plan.targets is None else plan.targets.flatten(0, 1)[states]",
        "rollout.response[row]",
        "law_one_step_values",
    ),
    Mutant("4.1", '"topk_ids")[row][scored]', '"topk_ids")[row * 0][scored]', "law_topk_logp"),
    Mutant("4.1", 'values["topk_logp"] = read.gather(', 'values["topk_logp"] = read.exp().gather(', "law_topk_logp"),
    Mutant("4.1", "_expectation(read, read - theirs)", "_expectation(theirs, read - theirs)", "law_exact_kl"),
    Mutant("4.1", "_expectation(read, read - theirs)", "_expectation(read, theirs - read)", "law_exact_kl"),
    Mutant("4.1", "_expectation(read, read - theirs)", "_expectation(read.detach(), read - theirs)", "law_exact_kl"),
    Mutant(
        "4.1",
        "        with torch.no_grad():\n            theirs",
        "        with torch.enable_grad():\n            theirs",
        "law_head_in_parts",
    ),
    Mutant("4.1", "(reference.head(their_h) / temperature)", "reference.head(their_h)", "law_exact_kl"),
    Mutant("4.1", "value.masked_fill(log_probs == -torch.inf, 0)", "value", "law_exact_kl"),
    Mutant(
        "4.1",
        "_expectation(read, read - theirs)",
        "_expectation(read, theirs.exp() - read.exp())",
        "law_exact_kl_is_the_mean_of_k3",
    ),
    Mutant("7.2", "torch.expm1(-u) + u", "torch.expm1(u) - u", "law_exact_kl_is_the_mean_of_k3"),
    Mutant(
        "10.1",
        'reduce_logp(feature["kl_ref"], plan, level=method.reduction, normalizer=scale)',
        'reduce_logp(feature["kl_ref"], plan, level=method.reduction, normalizer=None)',
        "law_exact_kl_in_the_loss",
    ),
    Mutant(
        "10.1",
        "loss = loss + method.kl.beta * reduce_logp(",
        "loss = loss + reduce_logp(",
        "law_exact_kl_in_the_loss",
    ),
    Mutant(
        "10.1",
        'ref = anchor if method.kl.target == "old" else ref',
        'ref = anchor if method.kl.target != "old" else ref',
        "law_exact_kl_in_the_loss",
    ),
    Mutant(
        "10.1",
        '"step_tokens": plan.scored.sum(-1).clamp(min=1)',
        '"step_tokens": plan.scored.any(-1).sum(0).clamp(min=1)',
        "law_step_tokens_normalizer",
    ),
    Mutant(
        "5.1",
        "ll if normalizer is None else ll / normalizer[..., None]",
        "ll if normalizer is None else ll * normalizer[..., None]",
        "law_step_tokens_normalizer",
    ),
    # ------------------------------------------------------------------------------------------------- 4.2 exact kernel
    Mutant(
        "4.2",
        "mine, log_probs = _confidence(logits), (",
        "mine, log_probs = (logits / temperature).log_softmax(-1).float(), (",
        "law_order_kernel",
    ),
    Mutant("4.2", "(log_probs.exp() * (", "(mine.exp() * (", "law_order_kernel"),
    Mutant(
        "4.2",
        "lowest = chosen.amin(-1, keepdim=True)",
        "lowest = chosen.masked_fill(~scored, -torch.inf).amax(-1, keepdim=True)",
        "law_order_kernel",
    ),
    Mutant("4.2", "((mine < limit) |", "((mine > limit) |", "law_order_kernel"),
    Mutant("4.2", "(total / scored.sum(-1).clamp(min=1))[:, None]", "total[:, None]", "law_order_kernel"),
    Mutant("4.2", "return hidden & (block ==", "return hidden | (block !=", "law_order_kernel"),
    Mutant(
        "4.2",
        "hidden & (block == (block * scored).amax(-1, keepdim=True)) & scored.any(-1, keepdim=True)",
        "hidden",
        "law_order_kernel",
    ),
    Mutant("4.2", "states) & ~scored, _spread", "states), _spread", "law_order_kernel"),
    Mutant(
        "4.2",
        "place[:, None] > last[state]",
        "place[:, None] < last[state]",
        "law_order_kernel_on_ties",
    ),
    Mutant(
        "4.2",
        "((mine < limit) | ((mine == limit) & later))",
        "(mine < limit)",
        "law_order_kernel_on_ties",
    ),
    Mutant(
        "4.2",
        "((mine < limit) | ((mine == limit) & later))",
        "(mine <= limit)",
        "law_order_kernel_on_ties",
    ),
    Mutant(
        "4.2",
        "position.where(chosen == lowest, -1).amax(-1, keepdim=True)",
        "position.where(chosen == lowest, len(position)).amin(-1, keepdim=True)",
        "law_order_kernel_on_ties",
    ),
    Mutant(
        "4.2",
        'feature["logp"] + feature["order_logp"] if "order_logp"',
        'feature["logp"] if "order_logp"',
        "law_exact_score_is_the_policy_gradient",
    ),
    Mutant(
        "4.2",
        'feature["logp"] + feature["order_logp"] if "order_logp"',
        'feature["logp"] - feature["order_logp"] if "order_logp"',
        "law_exact_score_is_the_policy_gradient",
    ),
    Mutant(
        "4.2", '{"log_f": probability.clamp(', '{"log_f": probability.detach().clamp(', "law_exact_score_is_the_policy_gradient"
    ),
    Mutant(
        "4.2",
        "(log_probs.exp() * (",
        "(log_probs.exp().detach() * (",
        "law_mean_score_is_zero_with_the_order_only",
    ),
    Mutant("4.2", "return scored * (total /", "return 0 * scored * (total /", "law_mean_score_is_zero_with_the_order_only"),
    Mutant("4.2", "((mine < limit) |", "((mine > limit) |", "law_objective_jumps_where_confidences_cross"),
    Mutant(
        "4.2",
        "((mine < limit) |",
        "(torch.sigmoid(50 * (mine - limit).neg()) +",
        "law_objective_jumps_where_confidences_cross",
    ),  # smoothed
    Mutant(
        "4.2", "probability.clamp(min=torch.finfo(probability.dtype).tiny).log()", "probability.log()", "law_impossible_orders"
    ),
    Mutant(
        "4.2",
        "probability.clamp(min=torch.finfo(probability.dtype).tiny).log()",
        "(probability + 1e-8).log()",
        "law_impossible_orders",
    ),
    Mutant(
        "4.2",
        'if rollout.sampler.order != "low_confidence":',
        'if rollout.sampler.order == "random":',
        "law_other_orders_have_no_position_factor",
    ),
    Mutant(
        "4.2",
        'if rollout.sampler.order != "low_confidence":',
        'if rollout.sampler.order == "left_to_right":',
        "law_other_orders_have_no_position_factor",
    ),
    Mutant("4.2", "total / scored.sum(-1).clamp(min=1)", "total / scored.sum(-1)", "law_other_orders_have_no_position_factor"),
    Mutant("4.2", "states) & ~scored, _spread", "states) | scored, _spread", "law_exact_kernel_costs_rows_of_the_head_only"),
    Mutant(
        "4.2",
        "_at(h, scored, plan), ",
        "_at(h, scored | True, plan), ",
        "law_exact_kernel_costs_rows_of_the_head_only",
    ),
    Mutant(
        "4.2",
        'feature["logp"] + feature["order_logp"] if "order_logp"',
        'feature["logp"] + feature["order_logp"].detach() if "order_logp"',
        "law_egspo_exact_row",
    ),
    # ---------------------------------------------------------------------------------------------- 6.4 stepwise credit
    Mutant(
        "6.4",
        "gain, total = lams * (reward - step_reward)",
        "gain, total = lams * (step_reward - reward)",
        "law_stepwise_advantage",
    ),
    Mutant("6.4", 'lam * time if schedule == "linear"', 'lam * (1 - time) if schedule == "linear"', "law_stepwise_advantage"),
    Mutant("6.4", "1 + lams if normalize else", "1 + lams if not normalize else", "law_stepwise_advantage"),
    Mutant(
        "6.4", "mean = (group * present).sum(2, keepdim=True)", "mean = group.sum(2, keepdim=True)", "law_stepwise_advantage"
    ),
    Mutant("6.4", "gain / total)\n", "gain)\n", "law_stepwise_advantage"),
    Mutant(
        "6.4", "/ present.sum(2, keepdim=True).clamp(min=1)\n", "/ present.sum(2, keepdim=True)\n", "law_stepwise_advantage"
    ),
    Mutant("6.4", '(0 if center == "rank" else gain / total)', "0", "law_stepwise_advantage_algebra"),
    Mutant("6.4", "return (group - mean).flatten(1, 2)", "return group.flatten(1, 2)", "law_stepwise_advantage_algebra"),
    Mutant(
        "6.4",
        "/ present.sum(2, keepdim=True).clamp(min=1)\n",
        "/ (present.sum(2, keepdim=True) - 1).clamp(min=1)\n",
        "law_stepwise_advantage_algebra",
    ),
    Mutant(
        "6.4",
        "(centred / total).unflatten(1, (-1, num_generations))",
        "(centred / total).unflatten(1, (num_generations, -1)).transpose(1, 2)",
        "law_stepwise_groups_stay_apart",
    ),
    Mutant(
        "6.4",
        "mean = (group * present).sum(2, keepdim=True)",
        "mean = group.sum(2, keepdim=True)",
        "law_stepwise_groups_stay_apart",
    ),
    Mutant(
        "6.4",
        "mean = (group * present).sum(2, keepdim=True) /",
        "mean = (group * present).sum((1, 2), keepdim=True) /",
        "law_stepwise_groups_stay_apart",
    ),
    Mutant(
        "6.4",
        "plan.step.to(reward.dtype) / _num_steps(rollout)",
        "(plan.step + 1).to(reward.dtype) / _num_steps(rollout)",
        "law_stepwise_time",
    ),
    Mutant(
        "6.4",
        "plan.step.to(reward.dtype) / _num_steps(rollout)",
        "plan.step.to(reward.dtype) / plan.step.shape[0] * 2",
        "law_stepwise_time",
    ),
    Mutant("6.4", "    if lam < 0:\n", "    if lam < -1:\n", "law_stepwise_refusals"),
    Mutant("6.4", "        if value not in allowed:\n", "        if False:\n", "law_stepwise_refusals"),
    Mutant("6.4", "1 + lams if normalize else", "1 + 2 * lams if normalize else", "law_stepwise_advantage_is_unbiased"),
    Mutant("6.4", "reward.expand_as(gain) + gain if center", "gain if center", "law_stepwise_advantage_is_unbiased"),
    Mutant(
        "6.4",
        "gain, total = lams * (reward - step_reward)",
        "gain, total = lams * (reward + step_reward)",
        "law_one_step_values",
    ),
]
