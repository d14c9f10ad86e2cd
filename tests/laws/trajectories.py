"""Laws of the plans on a recorded trajectory, section 3: all steps, some steps, merged steps, what a state predicts."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    RESPONSE,
    WALKS,
    Walk,
    all_orders,
    close,
    double,
    frequencies_agree,
    graph_logp,
    keep_of,
    noise,
    positions,
    recorded,
    refuses,
    replay_gradient,
    rollout_of,
    seeded,
    settings_of,
    subset_number,
    tabular,
    walk,
    walk_gradient,
    with_entropy,
)
from minidrl import oracle
from minidrl.sampler import ORDERS, Sampler, generate


@judges("3.1")
@rejects("3.1", ("(unmask == steps", "(unmask >= steps"), where="_replay_states")
def law_replay_states(alg: Any) -> None:
    """State s hides what was not revealed before step s, and scores what step s revealed, up to the last kept token."""
    for case in WALKS:
        _, paths, _, _ = walk(case)
        rollout = recorded(alg, paths, case.eos)
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        assert plan.replay and not plan.hidden[..., :3].any()
        for b, path in enumerate(paths):
            kept = keep_of(path.response, case.eos)
            last = max(s for s, flag in zip(path.unmask_step, kept, strict=True) if flag)
            for s in range(plan.hidden.shape[0]):
                revealed = frozenset(i for i, step in enumerate(path.unmask_step) if step == s)
                assert positions(plan.hidden[s, b, 3:]) == oracle.hidden_before(path, s), "hidden"
                assert positions(plan.scored[s, b]) == (revealed if s <= last else frozenset()), "scored"
                assert bool(plan.valid[s, b]) == (s <= last), "valid"
        close(plan.weight, torch.ones(plan.weight.shape), "weight")


@judges("3.1", "3.5", "4.1")
@rejects("3.1", ("(unmask >= steps[..., None]) | (unmask < 0)", "unmask >= steps[..., None]"), where="_replay_states")
@rejects("3.5", ("by_block.amin(1), by_block", "by_block.amax(1), by_block"))
@rejects("", ("return place // rollout", "return place // 2 // rollout"), where="block_numbers")
def law_replay_reproduces_the_sampler(alg: Any) -> None:
    """At the sampling temperature, the states of a rollout give back the log-probabilities that the sampler recorded.

    In one forward a step, and in one a step of a block; with several tokens a step, and with a threshold.
    """
    model, prompt = tabular(4, 3), torch.tensor([[0, 1, 0], [2, 0, 1]])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    cases = [Walk(4, 3, order, tokens, 2) for order, tokens in itertools.product(ORDERS, (1, 2))]
    cases += [Walk(4, 3, "low_confidence", 1, 2, threshold=threshold) for threshold in (0.35, 0.5)]
    for case in cases:
        settings = settings_of(case, 0.6)
        drawn = generate(model, prompt, mask, settings, eos_token_id=2, num_generations=30, generator=seeded(3))
        rollout = alg.Rollout(**vars(drawn))
        steps = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        for plan in (steps, alg.block_replay_plan(rollout, seeded())):
            logp = alg.features(model, rollout, plan, temperature=0.6)["logp"]
            assert bool((plan.scored.sum(0) <= 1).all()), "a token is scored at most once"
            close(logp.sum(0), torch.where(plan.scored.any(0), drawn.logp, 0.0), f"{case}")
            assert bool((plan.scored.any(0) | ~rollout.keep).all()), "every kept token is scored"


@judges("3.1", "8.1")
@rejects("3.1", ("valid = steps <= last", "valid = steps < last"))
def law_replay_gradient_is_the_policy_gradient(alg: Any) -> None:
    """Over all trajectories E[reward grad ll] is the policy gradient where the order looks at no drawn token.

    Random and fixed orders, entropy and margin; with later steps left out.
    """
    for case in WALKS:
        model, paths, chance, reward = walk(case)
        rollout = recorded(alg, paths, case.eos)
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        got = replay_gradient(alg, model, rollout, plan, chance * reward)
        close(got, walk_gradient(case), f"{case}")
        logp = graph_logp(alg, model, rollout, plan, 0.7)
        ll = alg.reduce_logp(logp, plan, level="step", normalizer=None)
        loss = alg.reinforce(ll, None, (chance * reward)[None, :, None].expand_as(ll), 1).loss.sum()
        close(oracle.table_gradient(model, loss), -walk_gradient(case), f"loss, {case}")


def token_score(model: Any, path: oracle.Trajectory, temperature: float) -> Tensor:
    """The log-probabilities of the tokens of a trajectory, each in the state before its own step; of no position."""
    steps = enumerate(path.unmask_step)
    return sum(oracle.token_logp(model, path.response, oracle.hidden_before(path, s), temperature)[i] for i, s in steps)


@judges("3.1")
@rejects("3.1", ("unmask >= steps", "unmask > steps"), where="_replay_states")
def law_replay_of_confident_samplers_is_token_only(alg: Any) -> None:
    """By confidence the gradient is that of the token-only score, and not the policy gradient."""
    case = Walk(3, 2, "low_confidence", 1, 3)
    model, rollout, chance, reward = with_entropy(alg, case)
    paths = walk(case)[1]
    plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
    got = replay_gradient(alg, model, rollout, plan, chance * reward)
    score = sum(p * r * token_score(model, path, 0.7) for p, r, path in zip(chance, reward, paths, strict=True))
    close(got, oracle.table_gradient(model, score))
    assert float((got - walk_gradient(case)).abs().max()) > 1e-3, "the bias that the docstring states is gone"


@judges("3.1")
@rejects("3.1", ("1, max=num_states", "1"), where="_choose")
def law_replay_subset_is_unbiased(alg: Any) -> None:
    """k steps have weight T/k. On average over every choice each token is scored with total weight 1, in its own state."""
    for case, states in itertools.product(WALKS[:3], (1, 2, 3)):
        _, paths, _, _ = walk(case)
        full = alg.replay_plan(recorded(alg, paths, case.eos), seeded(), num_states=None, min_entropy=0.0)
        if states > full.hidden.shape[0]:
            continue
        orders = all_orders(full.hidden.shape[0])
        rollout = recorded(alg, [path for path in paths for _ in orders], case.eos)
        with noise(alg, double(orders).T.repeat(1, len(paths))):
            plan = alg.replay_plan(rollout, seeded(), num_states=states, min_entropy=0.0)
        assert plan.hidden.shape[0] == min(states, full.hidden.shape[0]) and plan.replay
        assert plan.weight.dtype == torch.float64
        total = (plan.weight[..., None] * plan.scored).sum(0).unflatten(0, (len(paths), -1))
        close(total.mean(1), full.scored.any(0), f"total weight, k={states}")
        drawn = plan.scored.any(-1)
        assert torch.equal(drawn, plan.valid), "valid"
        close(drawn.sum(0), full.valid.sum(0).clamp(max=states).repeat_interleave(len(orders)), "steps taken")
        step = torch.where(plan.scored, rollout.unmask_step, -1).max(-1).values
        hidden = (rollout.unmask_step >= step[..., None]) | (rollout.unmask_step < 0)
        assert torch.equal(plan.hidden[..., 3:][drawn], hidden[drawn]), "state of a chosen step"


@judges("3.1")
@rejects("3.1", ("tuple(valid.shape", "(valid.shape[0], 1"), where="_choose")
def law_replay_subset_frequencies(alg: Any) -> None:
    """The real noise takes every pair of steps equally often, row by row, and never one twice."""
    rollout = rollout_of(alg, [RESPONSE] * 3000, unmask_step=torch.tensor([[2, 0, 3, 1]]).expand(3000, -1))
    plan = alg.replay_plan(rollout, seeded(10), num_states=2, min_entropy=0.0)
    taken = subset_number(plan.scored.any(0))
    chance = double([1 / 6 if bin(i).count("1") == 2 else 0 for i in range(16)])
    frequencies_agree(taken, chance, "pairs of steps")
    close(plan.weight, torch.full((2, 3000), 2.0), "weight T/k")


@judges("3.1")
@rejects("3.1", ("masked_fill(rollout.unmask_step < 0, 0)", "clone()"), ("scatter_add_(0", "scatter_(0"), where="_step_entropy")
@rejects("3.1", ("valid = valid & (entropy[", "valid = (entropy["))
def law_replay_entropy_threshold(alg: Any) -> None:
    """Exactly the steps are kept whose tokens' entropies sum to the threshold or more, and weights count those steps only."""
    steps = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 0, 1, 0, -1, -1], [0, 1, 0, 1, 2, 2]])
    entropy = double([[0.1, 0.2, 0.25, 0.25, 0.5, 0.1], [0.3, 0.1, 0.25, 0.1, 9.0, 9.0], [0.4, 0.1, 0.4, 0.1, 0.7, 0.7]])
    keep = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    rollout = rollout_of(alg, [[0, 1, 0, 1, 0, 1]] * 3, keep, unmask_step=steps, records={"entropy": entropy})
    plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.5)
    close(plan.valid, [[0, 0, 1], [1, 1, 0], [1, 0, 0]], "steps kept: uncertain ones, before the reward is decided")
    close(plan.scored.any(-1), plan.valid, "scored where kept")
    close(plan.weight, torch.ones(3, 3), "weight")
    one = alg.replay_plan(rollout, seeded(), num_states=1, min_entropy=0.5)
    close(one.weight, [[2, 1, 1]], "weight: 2 of row 0's steps are left, 1 of the others'")
    assert bool(one.valid.all()) and positions(one.scored[0, 1]) == {0, 2}
    short = {"unmask_step": steps[2:], "records": {"entropy": entropy[2:]}}
    alone = alg.replay_plan(
        rollout_of(alg, [[0, 1, 0, 1, 0, 1]], keep[2:], **short), seeded(), num_states=None, min_entropy=0.5
    )
    close(alone.valid, [[1], [0]], "a batch in which every reward is decided before the last step")


# Four trajectories of T = 4 steps, n = 2 tokens a step. Row 1 is decided after step 1 (kept: the first three positions), row 2
# after step 0, row 3 ends early: its last two steps were never run. In row 0 steps 0 and 1 have
# equal entropies, to the bit: its numbers are sums of powers of 2.
STEPS = ((0, 1, 0, 2, 3, 1, 2, 3), (0, 1, 1, 0, 3, 2, 3, 2), (0, 0, 1, 2, 1, 3, 3, 2), (1, 0, 1, 0, -1, -1, -1, -1))


KEPT = ((1,) * 8, (1, 1, 1, 0, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 0))


ENTROPY = (
    (0.375, 0.3125, 0.25, 0.5, 0.125, 0.3125, 0.25, 0.0625),
    (0.1, 0.4, 0.3, 0.15, 0.9, 0.8, 0.7, 0.9),
    (0.2, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9),
    (0.3, 0.1, 0.2, 0.2, 7.0, 7.0, 7.0, 7.0),
)


def four_steps(alg: Any, keep: Any = KEPT, **given: Any) -> Any:
    """The rollout of the fixture above: two prompts of two responses."""
    settings = Sampler(order="low_confidence", temperature=0.8, length=8, block_length=8, tokens_per_step=2)
    fields = {"unmask_step": torch.tensor(STEPS), "records": {"entropy": double(ENTROPY)}, "sampler": settings}
    return rollout_of(alg, [[0] * 8] * 4, keep, num_generations=2, **{**fields, **given})


def steps_of(b: int) -> tuple[list[float], int]:
    """The entropy of each of the four steps of row b, and its last deciding step, by loops."""
    entropy = [sum(h for h, s in zip(ENTROPY[b], STEPS[b], strict=True) if s == t) for t in range(4)]
    return entropy, max(s for s, kept in zip(STEPS[b], KEPT[b], strict=True) if kept)


def ranked(b: int, entropy: list[float]) -> list[int]:
    """The deciding steps by decreasing entropy, equal ones in order of time, and then those after the deciding one."""
    last = steps_of(b)[1]
    return sorted(range(last + 1), key=lambda t: -entropy[t]) + list(range(last + 1, 4))


@judges("3.2")
@rejects("3.2", ("descending=True,", "descending=False,"))
def law_entropy_plan_takes_the_most_uncertain_steps(alg: Any) -> None:
    """Each trajectory gives its K steps of highest summed entropy, in decreasing order.

    A step after the deciding one is not valid.

    Of equal ones the earlier comes first.
    """
    tied, last = steps_of(0)
    assert tied[0] == tied[1] < tied[2] and last >= 2, "in the fixture a tie decides which of two steps is the second of K = 2"
    for states in (1, 2, 3, 4):
        plan = alg.entropy_plan(four_steps(alg), seeded(), num_states=states, shared=False, weight="sum")
        assert plan.replay and plan.hidden.shape == (states, 4, 11) and not plan.hidden[..., :3].any()
        for b in range(4):
            entropy, last = steps_of(b)
            order = ranked(b, entropy)[:states]
            for k, t in enumerate(order):
                assert bool(plan.valid[k, b]) == (t <= last), f"valid: row {b}, rank {k}"
                if t <= last:
                    assert int(plan.step[k, b]) == t, f"step: row {b}, rank {k}: {int(plan.step[k, b])}, not {t}"
                    assert positions(plan.hidden[k, b, 3:]) == frozenset(i for i, s in enumerate(STEPS[b]) if s >= t or s < 0)
                revealed = frozenset(i for i, s in enumerate(STEPS[b]) if s == t) if t <= last else frozenset()
                assert positions(plan.scored[k, b]) == revealed, f"scored: row {b}, rank {k}"
    assert plan.network_calls == 4 + 2 + 1 + 2


@judges("3.2")
@rejects("3.2", ("masked_fill(decided, 0).", ""))
def law_entropy_plan_shared(alg: Any) -> None:
    """shared takes the K steps of highest mean entropy over the batch, decided ones counting 0, the same for every response.

    No other fixed set of K steps leaves out less entropy.
    """
    sums = [[steps_of(b)[0][t] if t <= steps_of(b)[1] else 0.0 for t in range(4)] for b in range(4)]
    mean = [sum(row[t] for row in sums) / 4 for t in range(4)]
    for states in (1, 2, 3):
        plan = alg.entropy_plan(four_steps(alg), seeded(), num_states=states, shared=True, weight="sum")
        for b in range(4):
            order = ranked(b, mean)[:states]
            found = [(int(t), bool(v)) for t, v in zip(plan.step[:, b], plan.valid[:, b], strict=True)]
            assert [t for t, v in found if v] == [t for t in order if t <= steps_of(b)[1]], f"row {b}: {found}"
        full = [int(t) for t in plan.step[:, 0]]
        left_out = {chosen: sum(mean) - sum(mean[t] for t in chosen) for chosen in itertools.combinations(range(4), states)}
        assert left_out[tuple(sorted(full))] <= min(left_out.values()) + 1e-12, "another set leaves out less"
    each = alg.entropy_plan(four_steps(alg), seeded(), num_states=1, shared=False, weight="sum").step
    assert each[0].tolist() != plan.step[0].tolist(), "the fixture does not tell shared from individual choice"


@judges("3.2")
@rejects("3.2", ("(num_states * tokens)", "num_states"))
def law_entropy_plan_weights(alg: Any) -> None:
    """The weights sum, mean and token_mean are 1, 1/K and 1/(K tokens of the step), and finite where nothing is scored."""
    uneven = torch.tensor([[0, 0, 0, 1, 2, 2, 3, 3], *STEPS[1:]])
    for states in (2, 3):
        for weight in ("sum", "mean", "token_mean"):
            rollout = four_steps(alg, unmask_step=uneven)
            plan = alg.entropy_plan(rollout, seeded(), num_states=states, shared=False, weight=weight)
            assert plan.weight.dtype == torch.float64 and plan.weight.shape == (states, 4)
            for k, b in itertools.product(range(states), range(4)):
                if plan.valid[k, b]:
                    tokens = sum(int(s) == int(plan.step[k, b]) for s in uneven[b])
                    expected = {"sum": 1.0, "mean": 1 / states, "token_mean": 1 / (states * tokens)}[weight]
                    close(plan.weight[k, b], expected, f"{weight}, row {b}, rank {k}")
            assert bool(plan.weight.isfinite().all()) and not plan.scored.any(-1).all(), "also where nothing is scored"
            loss = alg.aggregate(torch.ones(states, 4, 1).double(), plan, rollout, level="step", how="sequence_mean")
            close(loss, (plan.weight * plan.valid).sum() / 4, "which adds nothing to a loss")
    sizes = {int(n) for n in plan.scored.sum(-1).flatten()}
    assert {1, 2, 3} <= sizes, f"the fixture has steps of {sizes} tokens"


@judges("3.2")
@rejects("3.2", ("    if shared:\n", "    if True:\n"))
def law_selection_by_trajectory_is_biased(alg: Any) -> None:
    """The mean score of a fixed step is 0; that of each trajectory's most uncertain step is not, although the order is random.

    Its norm is measured against that of the policy gradient: it is no small number.
    """
    for case in (WALKS[0], Walk(3, 3, "random", 1, 3), WALKS[3]):
        model, rollout, chance, _ = with_entropy(alg, case)
        plan = partial(alg.entropy_plan, rollout, seeded(), num_states=1, weight="sum")
        fixed = replay_gradient(alg, model, rollout, plan(shared=True), chance)
        close(fixed, torch.zeros_like(fixed), "mean score of a fixed step")
        chosen = replay_gradient(alg, model, rollout, plan(shared=False), chance)
        share = float(chosen.norm() / walk_gradient(case).norm())
        assert share > 0.05, f"mean score of the chosen step: {share} of the policy gradient's norm"


@judges("3.2", "4.1")
@rejects("4.1", ("(log_p, log_p)", "(log_p, log_p) / 64"))
def law_entropy_bounds_what_a_fixed_selection_loses(alg: Any) -> None:
    """For EVERY fixed set S: |grad J - g_S| <= 2 G max|A| sum over t not in S of the expected entropy of the step's tokens.

    G = 1/T is the largest gradient of a scaled logit of the table. The best bound is that of the most uncertain steps.
    """
    for case, temperature in ((WALKS[0], 0.7), (WALKS[3], 0.4), (WALKS[1], 0.7)):
        model, rollout, chance, reward = with_entropy(alg, case, temperature)
        full = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        entropy = alg.features(model, rollout, full, temperature=temperature, names=("entropy",))["entropy"]
        expected = (chance[:, None] * entropy).sum((1, 2)).tolist()
        adv, steps = reward - float((chance * reward).sum()), range(len(expected))
        truth, bounds = walk_gradient(case, temperature), {}
        for chosen in oracle.all_subsets(len(expected)):
            inside = torch.tensor([t in chosen for t in steps])[:, None, None]
            plan = dataclasses.replace(full, scored=full.scored & inside)
            lost = (truth - replay_gradient(alg, model, rollout, plan, chance * adv, temperature)).norm()
            outside = sum(expected[t] for t in steps if t not in chosen)
            bounds[chosen] = 2 / temperature * float(adv.abs().max()) * outside
            assert float(lost) <= bounds[chosen] + 1e-10, f"{case}, S = {sorted(chosen)}: {float(lost)} > {bounds[chosen]}"
        close(lost, 0.0, "all steps")
        best = frozenset(sorted(steps, key=lambda t: -expected[t])[:1])
        assert bounds[best] == min(bound for chosen, bound in bounds.items() if len(chosen) == 1)


@judges("3.3")
@rejects("3.3", ('rounding_mode="floor")', 'rounding_mode="trunc")'), ("rollout.unmask_step,", "rollout.unmask_step + 1,"))
def law_merged_states(alg: Any) -> None:
    """Segment m takes the steps m s .. m s + s - 1 for one: all its tokens are scored in the state before its first step."""
    for merge in (1, 2, 3, 4):
        plan = alg.merged_plan(four_steps(alg), seeded(), merge=merge)
        assert not plan.replay and plan.step is None, "the sampler did not draw a segment in one state"
        for b in range(4):
            last = steps_of(b)[1] // merge
            for k in range(plan.hidden.shape[0]):
                inside = frozenset(i for i, s in enumerate(STEPS[b]) if s >= 0 and s // merge == k)
                masked = frozenset(i for i, s in enumerate(STEPS[b]) if s >= merge * k or s < 0)
                assert positions(plan.hidden[k, b, 3:]) == masked, f"hidden: merge {merge}, segment {k}, row {b}"
                assert positions(plan.scored[k, b]) == (inside if k <= last else frozenset()), f"scored: merge {merge}"
                assert bool(plan.valid[k, b]) == (k <= last), "valid"
        assert plan.hidden.shape[0] == -(-4 // merge) and not plan.hidden[..., :3].any()
        close(plan.weight, torch.ones(plan.weight.shape), "weight")


@judges("3.4")
@rejects("3.4", ("transpose(0, 1)", "transpose(0, 1).flip(0)"), ("scored.shape[-1]", "1"), ("& plan.valid[..., None]", ""))
def law_prediction_plan(alg: Any) -> None:
    """Every state scores its hidden positions against its own completion, with weight L / hidden, none after the decision."""
    steps = torch.tensor([[0, 2, 1, 3], [1, 0, -1, -1]])
    completions = torch.randint(0, 3, (2, 4, 4), generator=seeded(60))
    rollout = rollout_of(alg, [[1, 2, 0, 1], [2, 1, 0, 0]], [[1] * 4, [1, 1, 0, 0]], unmask_step=steps, records={})
    refuses(lambda: alg.prediction_plan(rollout, seeded()), "records", "'one_step_proposed'")
    rollout.records["one_step_proposed"] = completions
    plan = alg.prediction_plan(rollout, seeded())
    for k in range(4):
        for b, last in enumerate((3, 1)):
            hidden = [int(u >= k or u < 0) for u in steps[b].tolist()]
            close(plan.scored[k, b], hidden if k <= last else [0] * 4, "scored")
            assert torch.equal(plan.targets[k, b], completions[b, k]), "targets"
            assert bool(plan.valid[k, b]) == (k <= last)
            if k <= last:
                close(plan.hidden[k, b, 3:], hidden, "hidden")
                close(plan.weight[k, b], 4 / sum(hidden), "weight")
