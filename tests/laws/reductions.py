"""Laws of reductions and of the EUBO, section 5, and of aggregation, section 9."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    KEEPS,
    MODEL,
    RESPONSE,
    close,
    double,
    graph_logp,
    ll_of,
    loose_plan,
    normal,
    positions,
    refuses,
    repeated,
    rollout_of,
    seeded,
    tabular,
    token_logps,
)
from minidrl import oracle


@judges("5.1")
@rejects("5.1", ("ll = logp * plan.scored", "ll = logp"), ("ll = ll.sum(-1,", "ll = ll.mean(-1,"))
@rejects("5.1", ('{"state": states,', '{"state": 1,'), where="_parts")
def law_reductions(alg: Any) -> None:
    """Every level is as by loops. What is not scored adds nothing, and the normaliser divides each sequence."""
    _, plan, logp = loose_plan(alg)
    length = double([5, 2, 3, 1])
    token = [[[logp[k, b, i] * plan.scored[k, b, i] for i in range(5)] for b in range(4)] for k in range(3)]
    step = [[[sum(token[k][b])] for b in range(4)] for k in range(3)]
    sequence = [[[sum(plan.weight[k, b] * step[k][b][0] for k in range(3))] for b in range(4)]]
    state = [[[3 * plan.weight[k, b] * step[k][b][0]] for b in range(4)] for k in range(3)]
    position = [[[sum(plan.weight[k, b] * token[k][b][i] for k in range(3)) for i in range(5)] for b in range(4)]]
    levels = {"token": token, "step": step, "sequence": sequence, "state": state, "position": position}
    for level, expected in levels.items():
        close(alg.reduce_logp(logp, plan, level=level, normalizer=None), expected, level)
        scaled = [[[v / length[b] for v in row] for b, row in enumerate(state)] for state in expected]
        close(alg.reduce_logp(logp, plan, level=level, normalizer=length), scaled, f"{level}, normalised")
    refuses(lambda: alg.reduce_logp(logp, plan, level="word", normalizer=None), "reduction", "'word'", "token")
    refuses(lambda: alg.reduce_logp(logp, plan, level="pair", normalizer=None), "reduction", "'pair'", "3 states make no pairs")


@judges("5.1", "9.1")
@rejects(
    "5.1",
    ("parts, -1)).any(1)", "parts, -1)).all(1)"),
    ("torch.ones_like(plan.weight[:parts, :, None])", "plan.weight.sum(0)[None, :, None]"),
    where="entries",
)
def law_entries(alg: Any) -> None:
    """Which entries exist at each level, and the weight of each; a sequence has absorbed its weights."""
    _, plan, _ = loose_plan(alg)
    present, weight = alg.entries(plan, "token")
    close(present, plan.scored.tolist(), "token")
    close(weight[..., 0], plan.weight, "token weight")
    present, weight = alg.entries(plan, "step")
    close(present, [[[any(row)] for row in state] for state in plan.scored.tolist()], "step")
    close(weight[..., 0], plan.weight, "step weight")
    present, weight = alg.entries(plan, "sequence")
    close(present, [[[True]] * 4], "sequence")
    close(weight, [[[1.0]] * 4], "sequence weight")
    present, weight = alg.entries(plan, "state")
    close(present, [[[any(row)] for row in state] for state in plan.scored.tolist()], "state")
    close(weight, [[[1 / 3]] * 4] * 3, "state weight: a mean over the states")
    present, weight = alg.entries(plan, "position")
    close(present[0], plan.scored.any(0).tolist(), "position")
    close(weight, [[[1.0]] * 4], "position weight")
    silent = alg.Plan(plan.hidden, plan.scored & (torch.arange(4) != 1)[:, None], plan.weight, plan.valid)
    close(alg.entries(silent, "sequence")[0], [[[True], [False], [True], [True]]], "a sequence without scored tokens")


def by_hand(how: str, sums: list[float], lengths: list[int], width: int, group: int, entries: int) -> float:
    """The normalisers of (9.1) in plain arithmetic."""
    rows = len(sums)
    return {
        "sequence_mean": sum(sums) / rows,
        "sequence_mean_token_mean": sum(s / n for s, n in zip(sums, lengths, strict=True)) / rows,
        "token_mean": sum(sums) / sum(lengths),
        "fixed_length": sum(sums) / (rows * width),
        "length_weighted": sum(s * n for s, n in zip(sums, lengths, strict=True)) / sum(lengths),
        "group_sum": sum(sums) / (rows / group),
        "entry_mean": sum(sums) / entries,
    }[how]


@judges("9.1")
@rejects("9.1", ("total.sum() / rollout", "total.mean() / rollout"))
def law_aggregation(alg: Any) -> None:
    """Each way at each level is as by loops: the entries that exist, each with its weight, and then the normaliser."""
    rollout, plan, loss = loose_plan(alg)
    lengths = [5, 2, 3, 1]
    for how in alg.AGGREGATIONS:
        sums = {"token": [], "step": [], "sequence": []}
        for b in range(4):
            weighted = [(k, i) for k in range(3) for i in range(5) if plan.scored[k, b, i]]
            sums["token"].append(sum(float(plan.weight[k, b] * loss[k, b, i]) for k, i in weighted))
            steps = sorted({k for k, _ in weighted})
            sums["step"].append(sum(float(plan.weight[k, b] * loss[k, b, 0]) for k in steps))
            sums["sequence"].append(float(loss[0, b, 0]))
        for level, entry in (("token", loss), ("step", loss[..., :1]), ("sequence", loss[:1, :, :1])):
            got = alg.aggregate(entry, plan, rollout, level=level, how=how)
            count = {"token": plan.scored, "step": plan.scored.any(-1), "sequence": plan.scored.any(-1).any(0)}[level].sum()
            close(got, by_hand(how, sums[level], lengths, 5, 2, int(count)), f"{how}, {level}")
    refuses(lambda: alg.aggregate(loss, plan, rollout, level="token", how="mean"), "aggregation", "'mean'", "token_mean")


@judges("9.1")
@rejects("9.1", ("weight * present", "weight"), (".keep.shape[1]", ".lengths.max()"))
def law_aggregation_invariances(alg: Any) -> None:
    """Order inside a group and padding do not matter, except that fixed_length divides by the padded length."""
    rollout, plan, loss = loose_plan(alg)
    order, pad = torch.tensor([1, 0, 3, 2]), torch.nn.functional.pad
    shuffled = rollout_of(alg, rollout.response[order], rollout.keep[order], num_generations=2)
    moved = alg.Plan(plan.hidden[:, order], plan.scored[:, order], plan.weight[:, order], plan.valid[:, order])
    longer = rollout_of(alg, pad(rollout.response, (0, 3)), pad(rollout.keep, (0, 3)), num_generations=2)
    wide = alg.Plan(pad(plan.hidden, (0, 3), value=True), pad(plan.scored, (0, 3)), plan.weight, plan.valid)
    for how in alg.AGGREGATIONS:
        value = alg.aggregate(loss, plan, rollout, level="token", how=how)
        close(alg.aggregate(loss[:, order], moved, shuffled, level="token", how=how), value, f"{how}: order")
        padded = alg.aggregate(pad(loss, (0, 3), value=9.0), wide, longer, level="token", how=how)
        close(padded, value * 5 / 8 if how == "fixed_length" else value, f"{how}: padding")


def eubo_by_loops(logp: list[dict[int, Any]], weight: list[float], beta: float) -> Any:
    """The EUBO of one response, n/(beta h) sum_i log sum_k weight_k 1[i hidden in k] p_ik^beta."""
    seen = sorted({i for state in logp for i in state})
    n = sum(w * len(state) for w, state in zip(weight, logp, strict=True))
    total = 0.0
    for i in seen:
        inner = sum(w * torch.as_tensor(state[i]).exp() ** beta for w, state in zip(weight, logp, strict=True) if i in state)
        total = total + inner.log()
    return n * total / (beta * len(seen))


def spg_eubo(logp: list[dict[int, Any]], n: int, beta: float) -> Any:
    """SPG's own words, per token: (1/beta) mean_i log[(1/K) sum_k 1[i in k] p_ik^beta / t_k], t_k = hidden share of state k."""
    seen = sorted({i for state in logp for i in state})
    terms = []
    for i in seen:
        inner = sum(torch.as_tensor(state[i]).exp() ** beta / (len(state) / n) for state in logp if i in state)
        terms.append((inner / len(logp)).log())
    return sum(terms) / (beta * len(terms))


def sampled_plans(alg: Any) -> tuple[Any, list]:
    """A rollout of three lengths with five rows each, and on it a count plan and a block plan of one and of three states."""
    rollout = rollout_of(alg, [RESPONSE] * 15, KEEPS * 5)
    plans = []
    for states in (1, 3):
        plans.append(alg.elbo_count_plan(rollout, seeded(20), num_states=states, domain="keep", strata=False))
        plans.append(alg.block_plan(rollout, seeded(21), num_states=states, block_length=2, p_mask=0.3))
    return rollout, plans


def states_of(model: Any, rollout: Any, plan: Any, b: int) -> list[dict[int, Tensor]]:
    """The logp of the scored positions of every state of a response, by the oracle."""
    return [token_logps(model, rollout, plan, k, b, 1.0) for k in range(plan.scored.shape[0])]


@judges("5.2")
@rejects("5.2", ("mean = total / beta / seen", "mean = total / seen"))
def law_eubo(alg: Any) -> None:
    """Value and gradient are as by loops for any beta. With weights n/(K hidden) it is the published formula times n."""
    model = tabular(*MODEL)
    rollout, plans = sampled_plans(alg)
    for plan, beta in itertools.product(plans, (0.5, 1.0, 1.1, 4.0)):
        got = alg.eubo(graph_logp(alg, model, rollout, plan), plan, beta=beta)
        states = [states_of(model, rollout, plan, b) for b in range(15)]
        truth = [eubo_by_loops(states[b], plan.weight[:, b].tolist(), beta) for b in range(15)]
        close(got, [[[value.item()] for value in truth]], f"beta {beta}")
        published = [sum(KEEPS[b % 3]) * spg_eubo(states[b], sum(KEEPS[b % 3]), beta) for b in range(15)]
        close(got, [[[value.item()] for value in published]], f"beta {beta}: with t = hidden / n")
        weights = normal(15, seed=61)
        mine = oracle.table_gradient(model, (weights * got[0, :, 0]).sum())
        close(mine, oracle.table_gradient(model, sum(w * v for w, v in zip(weights, truth, strict=True))), "gradient")


@judges("5.2")
@rejects("5.2", ("sum(-1).clamp(min=1)", "shape[-1]"))
def law_eubo_gradient_is_a_soft_maximum(alg: Any) -> None:
    """Its gradient in logp_ik is n/h times a softmax over the states of log weight + beta logp."""
    rollout, plans = sampled_plans(alg)
    for plan, beta in itertools.product(plans, (1e-6, 1.5, 60.0)):
        logp = (-normal(*plan.scored.shape, seed=62).abs() - 0.1).requires_grad_()
        got = torch.autograd.grad(alg.eubo(logp, plan, beta=beta).sum(), logp)[0]
        for b in range(15):
            n, seen = sum(KEEPS[b % 3]), positions(plan.scored[:, b].any(0))
            for i in range(4):
                states = [k for k in range(len(got)) if plan.scored[k, b, i]]
                share = [float(plan.weight[k, b]) * math.exp(beta * logp[k, b, i].item()) for k in states]
                for k in range(len(got)):
                    expected = n / len(seen) * share[states.index(k)] / sum(share) if k in states else 0.0
                    close(got[k, b, i], expected, f"beta {beta}")


def all_states(alg: Any, response: tuple) -> tuple[Any, Any]:
    """Every mask as a state of one plan, weighted by its probability times n/hidden: estimators become expectations."""
    masks, n = oracle.all_subsets(len(response))[1:], len(response)
    scored = torch.tensor([[[i in mask for i in range(n)]] for mask in masks])
    weight = double([[n / len(m) / (n * math.comb(n, len(m)))] for m in masks])
    hidden = torch.cat([torch.zeros(len(masks), 1, 3).bool(), scored], -1)
    return rollout_of(alg, [response]), alg.Plan(hidden, scored, weight, scored.any(-1))


@judges("5.2")
@rejects("5.2", ("terms = beta * logp + plan", "terms = beta * logp - plan"))
def law_eubo_is_a_surrogate_not_a_bound(alg: Any) -> None:
    """Over 60 random models it is at least log p in some at beta 1, and in more of them as beta grows.

    The expectation is exact (all masks inside the logarithm). With two sampled states it may also lie below the ELBO of the
    very same states, because a mean of two inside a logarithm is biased down.
    """
    response, reached = RESPONSE[:3], {1.0: 0, 1.5: 0, 2.0: 0, 4.0: 0}
    below, draws = {1.5: 0, 4.0: 0}, repeated(alg, response, (1, 1, 1), 50)
    for seed in range(60):
        model = tabular(3, 3, 100 + seed)
        rollout, plan = all_states(alg, response)
        logp = alg.features(model, rollout, plan, temperature=1.0)["logp"]
        truth = oracle.any_order_log_likelihood(model, response).item()
        states = states_of(model, rollout, plan, 0)
        for beta in reached:
            value = alg.eubo(logp, plan, beta=beta).item()
            close(value, eubo_by_loops(states, plan.weight[:, 0].tolist(), beta), f"beta {beta}")
            reached[beta] += value >= truth
        if seed < 6:
            two = alg.elbo_count_plan(draws, seeded(22), num_states=2, domain="keep", strata=False)
            logp, ll = alg.features(model, draws, two, temperature=1.0)["logp"], ll_of(alg, model, draws, two)
            for beta in below:
                below[beta] += int((alg.eubo(logp, two, beta=beta) < ll - 1e-9).sum())
    shares = [reached[beta] / 60 for beta in (1.0, 1.5, 2.0, 4.0)]
    assert shares == sorted(shares) and 0.2 < shares[0] < 0.8 and shares[1] < 1 and shares[3] > 0.9, shares
    assert all(0 < number < 300 for number in below.values()), f"never below the ELBO of its own states: {below}"


@judges("5.3")
@rejects("5.3", ("omega * upper + (1 - omega)", "(1 - omega) * upper + omega"))
def law_sandwich(alg: Any) -> None:
    """Where adv > 0 it is ll itself, elsewhere omega EUBO / normaliser + (1 - omega) ll, in value and in gradient."""
    rollout, plans = sampled_plans(alg)
    adv = double([1.0, -1.0, 0.0, 0.3, -0.2] * 3)[None, :, None]
    normalizer = rollout.keep.sum(-1).double()
    for plan, beta, omega in itertools.product(plans, (1.0, 1.5), (0.0, 0.3, 1.0)):
        logp = (-normal(*plan.scored.shape, seed=64).abs() * plan.scored).requires_grad_()
        ll = alg.reduce_logp(logp, plan, level="sequence", normalizer=normalizer)
        got = alg.sandwich(ll, adv, {"logp": logp}, plan, rollout, normalizer, eubo_beta=beta, omega=omega)
        assert set(got) == {"score"} and got["score"].shape == (1, 15, 1)
        truth = []
        for b in range(15):
            states = [{i: logp[k, b, i] for i in positions(plan.scored[k, b])} for k in range(len(plan.scored))]
            weight, n = plan.weight[:, b].tolist(), sum(KEEPS[b % 3])
            lower = sum(w * sum(state.values()) for w, state in zip(weight, states, strict=True)) / n
            upper = eubo_by_loops(states, weight, beta) / n
            truth.append(lower if adv[0, b, 0] > 0 else omega * upper + (1 - omega) * lower)
        close(got["score"][0, :, 0], torch.stack(truth), f"omega {omega}")
        slope = [torch.autograd.grad(v.sum(), logp, retain_graph=True)[0] for v in (got["score"], torch.stack(truth))]
        close(*slope, f"omega {omega}: gradient")
        plain = ll if omega == 0 else torch.where(adv > 0, ll, got["score"])
        assert torch.equal(got["score"], plain), "good answers, or omega 0: ll exactly"
