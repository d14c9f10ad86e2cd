"""Wrong versions of the equations of laws_zoo.py: TraceRL, MDPO, GDSD."""

from mutant import Mutant

MUTANTS: list[Mutant] = [
    Mutant(
        "3.4",
        'record(rollout, "one_step_proposed").transpose(0, 1)',
        'record(rollout, "one_step_proposed").transpose(0, 1).flip(0)',
        "law_prediction_plan",
    ),
    Mutant("3.4", "weight=scored.shape[-1] / scored.sum(-1)", "weight=1 / scored.sum(-1)", "law_prediction_plan"),
    Mutant(
        "3.4",
        "[..., rollout.prompt.shape[1] :] & plan.valid[..., None]\n    drawn",
        "[..., rollout.prompt.shape[1] :]\n    drawn",
        "law_prediction_plan",
    ),
    Mutant("5.1", "ll = parts * (ll * plan.weight", "ll = (ll * plan.weight", "law_pair_reduction"),
    Mutant("5.1", ".unflatten(0, (parts, -1)).sum(1)", ".unflatten(0, (-1, parts)).sum(1)", "law_reductions"),
    Mutant(
        "5.1", ".unflatten(0, (parts, -1)).any(1)", ".unflatten(0, (parts, -1)).all(1)", "law_pair_reduction", where="entries"
    ),
    Mutant("6.5", "+ 1 + later", "+ 1", "law_progress_advantage"),
    Mutant("6.5", "rewards = step_reward * valid", "rewards = step_reward", "law_progress_advantage"),
    Mutant("6.5", "torch.where(following > 0, later, reward)", "later", "law_progress_advantage"),
    Mutant("6.5", "(_from_here_on(rewards) - rewards)", "_from_here_on(rewards)", "law_progress_advantage"),
    Mutant("6.5", "_average(value, present)", "_average(value)", "law_progress_advantage_of_few"),
    Mutant("6.5", ".clamp(min=1)\n    return", ".clamp(min=2)\n    return", "law_progress_advantage_of_few", where="_average"),
    Mutant("6.5", "- 1).clamp(min=1)", "- 1)", "law_progress_advantage_of_few"),
    Mutant("6.5", "- 1).clamp(min=1)", "- 1).clamp(min=2)", "law_progress_advantage_of_few"),
    Mutant("6.5", "(score * (rank < num_states))", "(score * (rank <= num_states))", "law_progress_advantage"),
    Mutant(
        "6.5",
        "gap.square().sum(2, keepdim=True) / others",
        "gap.square().sum(2, keepdim=True) / present.sum(2, keepdim=True)",
        "law_methods_of_the_zoo",
    ),
    Mutant("8.14", "Surrogate(anchor.exp() * loss", "Surrogate(ll.exp() * loss", "law_confident_clip"),
    Mutant("8.14", "Surrogate(anchor.exp() * loss", "Surrogate(loss", "law_methods_of_the_zoo"),
    Mutant(
        "8.15",
        "(u.clamp(low, high) / length - psi * adv).square()",
        "(u.clamp(low, high) / length + psi * adv).square()",
        "law_regression",
    ),
    Mutant(
        "8.15",
        "(u.clamp(low, high) / length - psi * adv).square()",
        "(u.clamp(low, high) - psi * adv).square()",
        "law_regression",
    ),
    Mutant(
        "8.15",
        "low, high = math.log(1 - epsilon_low), math.log(1 + epsilon_high)",
        "low, high = -epsilon_low, epsilon_high",
        "law_regression",
    ),
    Mutant(
        "10.1",
        'target = anchor if method.kl.target == "old" else ref',
        "target = ref",
        "law_methods_of_the_zoo",
        where="penalty",
    ),
    Mutant(
        "6.5",
        "_from_here_on(valid.to(reward.dtype)) - valid.to(reward.dtype)",
        "_from_here_on(valid.to(reward.dtype))",
        "law_progress_advantage",
    ),
    Mutant("6.5", "x.flip(0).cumsum(0).flip(0)", "x.cumsum(0)", "law_progress_advantage", where="_from_here_on"),
    Mutant("6.5", "step_reward[:-1]])", "step_reward[1:]])", "law_progress_advantage"),
    Mutant("6.6", "logits.softmax(1) - (-logits).softmax(1)", "logits.softmax(1) - 1 / 4", "law_softmax_contrast"),
    Mutant(
        "6.6", "logits.softmax(1) - (-logits).softmax(1)", "logits.softmax(0) - (-logits).softmax(0)", "law_softmax_contrast"
    ),
    Mutant("6.6", "psi * (group - _average(group))", "(group - _average(group))", "law_softmax_contrast"),
    Mutant(
        "10.1",
        "credit=P(alg.softmax_contrast, psi=1.0)",
        "credit=P(alg.softmax_contrast, psi=2.0)",
        "law_methods",
        where="row.wd1",
    ),
]
