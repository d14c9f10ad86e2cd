"""Wrong versions of the equations of laws_zoo.py: TraceRL, MDPO, GDSD."""

from mutant import Mutant

MUTANTS: list[Mutant] = [
    Mutant(
        "3.4",
        '_record(rollout, "one_step").transpose(0, 1)',
        '_record(rollout, "one_step").transpose(0, 1).flip(0)',
        "law_prediction_plan",
    ),
    Mutant("3.4", "weight=scored.shape[-1] / scored.sum(-1)", "weight=1 / scored.sum(-1)", "law_prediction_plan"),
    Mutant(
        "3.4",
        "[..., rollout.prompt.shape[1] :] & plan.valid[..., None]\n    targets",
        "[..., rollout.prompt.shape[1] :]\n    targets",
        "law_prediction_plan",
    ),
    Mutant("5.1", "ll = pairs * (ll * plan.weight", "ll = (ll * plan.weight", "law_pair_reduction"),
    Mutant("5.1", ".unflatten(0, (pairs, -1)).sum(1)", ".unflatten(0, (-1, pairs)).sum(1)", "law_reductions"),
    Mutant(
        "5.1", ".unflatten(0, (pairs, -1)).any(1)", ".unflatten(0, (pairs, -1)).all(1)", "law_pair_reduction", where="entries"
    ),
    Mutant("6.5", "+ 1 + later).unflatten", "+ 1).unflatten", "law_progress_advantage"),
    Mutant(
        "6.5",
        "torch.cat([step_reward * valid, reward[None]])",
        "torch.cat([step_reward * valid, 0 * reward[None]])",
        "law_progress_advantage",
    ),
    Mutant("6.5", ".flip(0).cumsum(0).flip(0)[1:]", ".flip(0).cumsum(0).flip(0)[:-1]", "law_progress_advantage"),
    Mutant(
        "6.5",
        "count = present.sum(2, keepdim=True).clamp(min=1)",
        "count = present.sum(2, keepdim=True)",
        "law_progress_advantage_of_few",
    ),
    Mutant(
        "6.5",
        "count = present.sum(2, keepdim=True).clamp(min=1)",
        "count = present.sum(2, keepdim=True).clamp(min=2)",
        "law_progress_advantage_of_few",
    ),
    Mutant("6.5", "(count - 1).clamp(min=1)", "(count - 1)", "law_progress_advantage_of_few"),
    Mutant("6.5", "(count - 1).clamp(min=1)", "(count - 1).clamp(min=2)", "law_progress_advantage_of_few"),
    Mutant("6.5", "(score * (rank < num_states))", "(score * (rank <= num_states))", "law_progress_advantage"),
    Mutant(
        "6.5",
        "gap.square().sum(2, keepdim=True) / (count - 1)",
        "gap.square().sum(2, keepdim=True) / count",
        "law_methods_of_the_zoo",
    ),
    Mutant("8.14", "return anchor.exp() * ppo_clip(", "return ll.exp() * ppo_clip(", "law_confident_clip"),
    Mutant("8.14", "return anchor.exp() * ppo_clip(", "return ppo_clip(", "law_methods_of_the_zoo"),
    Mutant("8.15", "(change / length - psi * adv).square()", "(change / length + psi * adv).square()", "law_regression"),
    Mutant("8.15", "(change / length - psi * adv).square()", "(change - psi * adv).square()", "law_regression"),
    Mutant(
        "8.15",
        ".clamp(math.log(1 - epsilon_low), math.log(1 + epsilon_high))\n    return (change",
        ".clamp(-epsilon_low, epsilon_high)\n    return (change",
        "law_regression",
    ),
    Mutant("10.1", 'ref = anchor if method.kl.target == "old" else ref', "ref = ref", "law_methods_of_the_zoo"),
    Mutant("6.6", "logits.softmax(1) - (-logits).softmax(1)", "logits.softmax(1) - 1 / 4", "law_softmax_contrast"),
    Mutant("6.6", "logits.softmax(1) - (-logits).softmax(1)", "logits.softmax(0) - (-logits).softmax(0)", "law_softmax_contrast"),
    Mutant("6.6", "psi * (group - group.mean(1, keepdim=True))", "(group - group.mean(1, keepdim=True))", "law_softmax_contrast"),
    Mutant("10.1", "credit=P(softmax_contrast, psi=1.0)", "credit=P(softmax_contrast, psi=2.0)", "law_methods", where="row.wd1"),
]
