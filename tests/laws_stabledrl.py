"""Laws of StableDRL and SPG: block-wise states, the EUBO, the sandwich, truncated weights, and what a noisy ratio does.

They register themselves in laws.LAWS. The formulas of the rows stabledrl, stabledrl-released, clip-only, self-norm-only and spg
are at the end.
"""

import functools
import itertools
import math
import statistics
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from laws import (
    KEEPS,
    MODEL,
    RESPONSE,
    Formula,
    all_orders,
    close,
    coefficients,
    count_noise,
    double,
    elbo_on,
    experience,
    formula,
    frequencies_agree,
    graph_logp,
    judges,
    ll_of,
    midpoints,
    noise,
    normal,
    positions,
    refuses,
    repeated,
    rollout_of,
    seeded,
    sized,
    subset_number,
    tabular,
    token_logps,
    weights_of,
)
from minidrl import oracle

# ================================================================================================= 2.7 states of block samplers


def block_state(draw: dict, keep: tuple[int, ...], size: int, p: float) -> set[int]:
    """The hidden response positions up to EOS of one state, from the noise that decides it, by loops."""
    n = sum(keep)
    used = math.ceil(n / size)
    order = sorted(range(used), key=lambda c: draw["order"][c])
    chosen = order[draw["k"] % used]
    inside = [i for i in range(n) if i // size == chosen]
    count = 1 + math.floor(draw["count"] * len(inside))
    hidden = set(sorted(inside, key=lambda i: draw["noise"][i])[:count])
    hidden |= {i for i in range(n) if i // size > chosen}
    return hidden | {i for i in range(n) if i // size < chosen and draw["drop"][i] < p}


def block_noise(rows: int, length: int, size: int, states: int, prompt: int, seed: int) -> tuple[Tensor, ...]:
    """Everything that the plan draws: order of the blocks, counts, positions, earlier tokens, prompt tokens."""
    shapes = ((rows, -(-length // size)), (states, rows), (states, rows, length), (states, rows, length))
    return tuple(normal(*shape, seed=seed + i).sigmoid() for i, shape in enumerate((*shapes, (states, rows, prompt))))


BLOCK_KEEPS = ((1, 1, 1, 1, 1), (1, 1, 1, 0, 0), (1, 0, 0, 0, 0), (1, 1, 1, 1, 0))


@judges("2.7")
def law_block_states(alg: ModuleType) -> None:
    """By loops: which block, how much of it, all after it, p_mask of what lies before; weight n/(K hidden)."""
    length, prompt = 5, 3
    rollout = rollout_of(alg, [(1, 0, 2, 1, 0)] * 40, BLOCK_KEEPS * 10)
    for size, states, p in ((2, 2, 0.4), (2, 4, 0.7), (3, 1, 0.0), (1, 6, 0.5), (5, 2, 0.3), (8, 2, 0.3)):
        drawn = block_noise(40, length, size, states, prompt, 7 * size)
        with noise(alg, *drawn):
            plan = alg.block_plan(rollout, seeded(), num_states=states, block_length=size, p_mask=p)
        order, count, position, drop, hide = (x.tolist() for x in drawn)
        for k, b in itertools.product(range(states), range(40)):
            draw = {"k": k, "order": order[b], "count": count[k][b], "noise": position[k][b], "drop": drop[k][b]}
            keep = BLOCK_KEEPS[b % 4]
            hidden = block_state(draw, keep, size, p)
            assert positions(plan.scored[k, b]) == hidden, f"block_length {size}, state {k}: scored"
            after = {i for i in range(length) if not keep[i]}
            assert positions(plan.hidden[k, b, prompt:]) == hidden | after, f"block_length {size}, state {k}: hidden"
            masked = [float(hide[k][b][i] < p and i > 0) for i in range(prompt)]  # position 0 is padding
            close(plan.hidden[k, b, :prompt], masked, "hidden prompt")
            close(plan.weight[k, b], sum(keep) / (states * len(hidden)), "weight")
        assert bool(plan.valid.all()) and not plan.replay and plan.weight.dtype == torch.float64


@judges("2.7")
def law_block_rows_are_their_own(alg: ModuleType) -> None:
    """The states of a response depend on its own length and noise only: the same in any batch and at any padding."""
    for size, p in ((2, 0.4), (3, 0.2)):
        rollout = rollout_of(alg, [(1, 0, 2, 1, 0)] * 4, BLOCK_KEEPS)
        drawn = block_noise(4, 5, size, 3, 3, 60)
        with noise(alg, *drawn):
            whole = alg.block_plan(rollout, seeded(), num_states=3, block_length=size, p_mask=p)
        for b, keep in enumerate(BLOCK_KEEPS):
            for width in (5, 9):
                blocks = -(-width // size)
                mine = [drawn[0][[b]], drawn[1][:, [b]], drawn[2][:, [b]], drawn[3][:, [b]], drawn[4][:, [b]]]
                mine[0] = torch.nn.functional.pad(mine[0], (0, blocks - mine[0].shape[1]), value=0.001)
                mine[2:4] = (torch.nn.functional.pad(x, (0, width - 5), value=0.001) for x in mine[2:4])
                single = rollout_of(alg, [(1,) * width], [keep + (0,) * (width - 5)])
                with noise(alg, *mine):
                    alone = alg.block_plan(single, seeded(), num_states=3, block_length=size, p_mask=p)
                close(alone.scored[:, 0, :5], whole.scored[:, b], f"row {b} at width {width}")
                close(alone.weight[:, 0], whole.weight[:, b], f"row {b} at width {width}: weight")
                assert not alone.scored[..., 5:].any() and bool(alone.hidden[..., 3 + 5 :].all()), "padding"


def block_law(n: int, size: int, chosen: int, p: float, length: int) -> Tensor:
    """Probability of every set of hidden kept positions, given the chosen block, by enumeration."""
    chance = torch.zeros(2**length, dtype=torch.float64)
    inside = [i for i in range(n) if i // size == chosen]
    before = [i for i in range(n) if i // size < chosen]
    later = sum(2**i for i in range(n) if i // size > chosen)
    for count in range(1, len(inside) + 1):
        for subset in itertools.combinations(inside, count):
            for drop in itertools.product((0, 1), repeat=len(before)):
                number = later + sum(2**i for i in subset) + sum(2**i for i, d in zip(before, drop, strict=True) if d)
                weight = 1 / (len(inside) * math.comb(len(inside), count))
                chance[number] += weight * math.prod(p if d else 1 - p for d in drop)
    return chance


@judges("2.7")
def law_block_frequencies(alg: ModuleType) -> None:
    """With real noise: blocks without replacement while they last, then again in the same order; the rest independent."""
    length, size, p = 4, 2, 0.3
    for n, rows in ((4, 8000), (3, 8000), (2, 3000)):
        rollout = repeated(alg, RESPONSE, (1,) * n + (0,) * (4 - n), rows)
        plan = alg.block_plan(rollout, seeded(12), num_states=3, block_length=size, p_mask=p)
        number, used = subset_number(plan.scored), math.ceil(n / size)
        given = [block_law(n, size, c, p, length) for c in range(used)]
        pairs = {(0, 1): [(c, d) for c in range(used) for d in range(used) if c != d or used == 1]}
        pairs[0, 2] = [(c, c) for c in range(used)] if used < 3 else []
        for (j, k), allowed in pairs.items():
            joint = sum(given[c][:, None] * given[d][None] for c, d in allowed) / len(allowed)
            frequencies_agree(number[j] * 16 + number[k], joint.flatten(), f"n = {n}, states {j} and {k}")
        prompt = subset_number(plan.hidden[0, :, 1:3]) * 4 + subset_number(plan.hidden[1, :, 1:3])
        one = double([0.49, 0.21, 0.21, 0.09])
        frequencies_agree(prompt, (one[:, None] * one).flatten(), "prompt tokens of two states")
        assert not plan.hidden[..., 0].any(), "padding of the prompt"
    once = alg.block_plan(repeated(alg, RESPONSE, (1,) * 4, 4000), seeded(13), num_states=4, block_length=1, p_mask=0.0)
    first = 4 - once.scored.sum(-1)  # block_length 1, nothing hidden before: the chosen block is where the hidden part begins
    close(first.sort(0).values, torch.arange(4)[:, None].expand(-1, 4000), "every block once")
    frequencies_agree(first[0] * 4 + first[1], ((1 - torch.eye(4)).double() / 12).flatten(), "two blocks")


@judges("2.7", "5.1")
def law_one_block_is_the_elbo(alg: ModuleType) -> None:
    """One block as long as the response and no dropping before it: the count form of the ELBO, exactly."""
    model = tabular(*MODEL)
    for keep, states in itertools.product(KEEPS, (1, 2)):
        u, order = count_noise(sum(keep), 4, states)
        rows = u.shape[1]
        rollout = repeated(alg, RESPONSE, keep, rows)
        empty = torch.full((states, rows, 4), 0.5, dtype=torch.float64)
        with noise(alg, torch.full((rows, 1), 0.5, dtype=torch.float64), u, order, empty, empty[..., :3]):
            plan = alg.block_plan(rollout, seeded(), num_states=states, block_length=4, p_mask=0.0)
        got = ll_of(alg, model, rollout, plan)[0, :, 0].mean()
        close(got, elbo_on(model, RESPONSE, positions(keep)), f"n = {sum(keep)}, K = {states}")


def block_mean(model: oracle.TabularDenoiser, response: tuple, size: int) -> float:
    """Expectation of the estimate at p_mask 0: mean over blocks, counts and subsets of n/hidden times the sum, by loops."""
    n, total = len(response), 0.0
    blocks = math.ceil(n / size)
    for chosen in range(blocks):
        inside = [i for i in range(n) if i // size == chosen]
        later = frozenset(i for i in range(n) if i // size > chosen)
        for count in range(1, len(inside) + 1):
            for subset in itertools.combinations(inside, count):
                logp = oracle.token_logp(model, response, frozenset(subset) | later)
                mean = sum(v.item() for v in logp.values()) / len(logp)
                total += n * mean / (blocks * len(inside) * math.comb(len(inside), count))
    return total


@judges("2.7", "5.1")
def law_block_expectation(alg: ModuleType) -> None:
    """The mean over all draws is the published average of token means; it may lie above log p, where an ELBO never is."""
    above = {1: 0, 2: 0}
    for size, seed in itertools.product((1, 2), range(12)):
        model = tabular(4, 3, seed)
        blocks = 4 // size
        draws = list(itertools.product(range(blocks), midpoints(size), all_orders(4)))
        rollout = repeated(alg, RESPONSE, (1,) * 4, len(draws))
        order = double([[float(c != first) for c in range(blocks)] for first, _, _ in draws])
        count, position = double([[u for _, u, _ in draws]]), double([[o for _, _, o in draws]])
        rest = torch.full((1, len(draws), 4), 0.5, dtype=torch.float64)
        with noise(alg, order, count, position, rest, rest[..., :3]):
            plan = alg.block_plan(rollout, seeded(), num_states=1, block_length=size, p_mask=0.0)
        got = ll_of(alg, model, rollout, plan)[0, :, 0].mean()
        close(got, block_mean(model, RESPONSE, size), f"block_length {size}, model {seed}")
        above[size] += got.item() > oracle.any_order_log_likelihood(model, RESPONSE).item()
    assert all(0 < number < 12 for number in above.values()), f"a bound on log p after all? {above}"


@judges("2.7")
def law_block_refusals(alg: ModuleType) -> None:
    """Numbers of states and positions from 1, a probability."""
    make = functools.partial(alg.block_plan, rollout_of(alg, [RESPONSE]), seeded())
    refuses(lambda: make(num_states=0, block_length=2, p_mask=0.1), "plan.num_states", "0")
    refuses(lambda: make(num_states=1, block_length=0, p_mask=0.1), "plan.block_length", "0")
    refuses(lambda: make(num_states=1, block_length=2, p_mask=1.5), "plan.p_mask", "1.5")
    refuses(lambda: make(num_states=1, block_length=2, p_mask=-0.1), "plan.p_mask", "-0.1")


# ============================================================================================================= 5.2 the EUBO


def eubo_by_loops(logp: list[dict[int, Any]], weight: list[float], beta: float) -> Any:
    """n/(beta h) sum_i log sum_k weight_k 1[i hidden in k] p_ik^beta of one response."""
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


def sampled_plans(alg: ModuleType) -> tuple[Any, list]:
    """Three lengths, five rows each, and a count plan and a block plan of 1 and 3 states on them."""
    rollout = rollout_of(alg, [RESPONSE] * 15, KEEPS * 5)
    plans = []
    for states in (1, 3):
        plans.append(alg.elbo_count_plan(rollout, seeded(20), num_states=states, domain="keep", strata=False))
        plans.append(alg.block_plan(rollout, seeded(21), num_states=states, block_length=2, p_mask=0.3))
    return rollout, plans


def states_of(model: Any, rollout: Any, plan: Any, b: int) -> list[dict[int, Tensor]]:
    """logp of the scored positions of every state of a response, by the oracle."""
    return [token_logps(model, rollout, plan, k, b, 1.0) for k in range(plan.scored.shape[0])]


@judges("5.2")
def law_eubo(alg: ModuleType) -> None:
    """Value and gradient by loops, for any beta; with weights n/(K hidden) it is the published formula times n."""
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
def law_eubo_gradient_is_a_soft_maximum(alg: ModuleType) -> None:
    """d eubo / d logp_ik = n/h times softmax over the states of (log weight + beta logp): each token's shares sum to 1."""
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


@judges("5.2")
def law_eubo_of_one_state(alg: ModuleType) -> None:
    """K = 1: the ELBO of that state plus n/beta log(n/hidden), a constant: the same gradient for every beta."""
    model = tabular(*MODEL)
    rollout, plans = sampled_plans(alg)
    for plan in (plan for plan in plans if len(plan.scored) == 1):
        ll = ll_of(alg, model, rollout, plan)[0, :, 0]
        slope = oracle.table_gradient(model, (graph_logp(alg, model, rollout, plan).sum((0, 2)) * plan.weight[0]).sum())
        for beta in (0.5, 2.0):
            logp = graph_logp(alg, model, rollout, plan)
            got = alg.eubo(logp, plan, beta=beta)[0, :, 0]
            n, hidden = rollout.keep.sum(-1).tolist(), plan.scored[0].sum(-1).tolist()
            close(got - ll, [m / beta * math.log(m / h) for m, h in zip(n, hidden, strict=True)], f"beta {beta}")
            close(oracle.table_gradient(model, got.sum()), slope, f"beta {beta}: gradient")


@judges("5.2")
def law_eubo_reads_hidden_tokens_only(alg: ModuleType) -> None:
    """What is not scored has neither value nor gradient, even -inf; a token hidden in no state leaves the mean."""
    rollout, plans = sampled_plans(alg)
    for plan in plans:
        logp = -normal(*plan.scored.shape, seed=63).abs()
        value = alg.eubo(logp, plan, beta=1.5)
        for rubbish in (-torch.inf, -1e9, 3.0):
            other = logp.masked_fill(~plan.scored, rubbish).requires_grad_()
            got = alg.eubo(other, plan, beta=1.5)
            close(got, value, f"{rubbish} where nothing is read")
            gradient = torch.autograd.grad(got.sum(), other)[0]
            assert bool(gradient.isfinite().all()) and not gradient[~plan.scored].any(), f"{rubbish}: gradient"
    scored = torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]]]).bool()
    plan = alg.Plan(torch.ones(2, 1, 7).bool(), scored, double([[2.0], [1.0]]), scored.any(-1))
    logp = double([[[-1.0, 0, 0, 0]], [[-2.0, -3.0, 0, 0]]])
    inner = math.log(2 * math.exp(-2) + math.exp(-4)), math.log(math.exp(-6))
    close(alg.eubo(logp, plan, beta=2.0), [[[4 / (2 * 2) * sum(inner)]]], "two of four tokens seen")


def all_states(alg: ModuleType, response: tuple) -> tuple[Any, Any]:
    """Every mask as a state of one plan, weighted by its probability times n/hidden: estimators become expectations."""
    masks, n = oracle.all_subsets(len(response))[1:], len(response)
    scored = torch.tensor([[[i in mask for i in range(n)]] for mask in masks])
    weight = double([[n / len(m) / (n * math.comb(n, len(m)))] for m in masks])
    hidden = torch.cat([torch.zeros(len(masks), 1, 3).bool(), scored], -1)
    return rollout_of(alg, [response]), alg.Plan(hidden, scored, weight, scored.any(-1))


@judges("5.2")
def law_eubo_over_all_states(alg: ModuleType) -> None:
    """In expectation inside the log it rises with beta, from the ELBO at beta -> 0 to the sum of each token's best logp."""
    response = RESPONSE[:3]
    for seed in range(6):
        model = tabular(3, 3, seed)
        rollout, plan = all_states(alg, response)
        logp = alg.features(model, rollout, plan, temperature=1.0)["logp"]
        ladder = [alg.eubo(logp, plan, beta=beta).item() for beta in (1e-7, 0.5, 1.0, 2.0, 4.0, 300.0)]
        assert all(low < high for low, high in itertools.pairwise(ladder)), "not rising with beta"
        close(ladder[0], oracle.elbo(model, response).item(), "beta -> 0", 1e-5)
        every = [oracle.token_logp(model, response, mask) for mask in oracle.all_subsets(3)[1:]]
        best = sum(max(logp[i].item() for logp in every if i in logp) for i in range(3))
        close(ladder[-1], best, "beta -> inf", 0.05)


@judges("5.2")
def law_eubo_is_a_surrogate_not_a_bound(alg: ModuleType) -> None:
    """Of 60 random models, how often it is at least log p: never always at beta 1, more often as beta grows.

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


# ============================================================================================================ 5.3 the sandwich


@judges("5.3")
def law_sandwich(alg: ModuleType) -> None:
    """adv > 0: ll itself; adv = 0 and below: omega EUBO / normaliser + (1 - omega) ll, in value and in gradient."""
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


@judges("5.3", "8.4", "10.1")
def law_weights_use_the_elbo_only(alg: ModuleType) -> None:
    """omega and beta move the score and never the weights: the loss is linear in omega, with slope -sum w adv (EUBO - ELBO)."""
    drawn, old, new, _, reward = experience()
    rollout, adv = alg.Rollout(**vars(drawn)), reward.unflatten(0, (2, 4))
    adv = (adv - adv.mean(1, keepdim=True)).flatten().tolist()
    for name in ("stabledrl", "stabledrl-released"):
        row = sized(alg.METHODS[name])
        plan = row.plan(rollout, seeded(44))
        feature, ours = ({"logp": alg.features(model, rollout, plan, temperature=1.0)["logp"]} for model in (old, new))
        anchor, loss = alg.reduced(row, plan, rollout, feature), {}
        ll = alg.reduced(row, plan, rollout, ours)[0, :, 0].tolist()
        cap = row.objective.keywords["cap"]
        capped = [min(math.exp(a - float(b)), cap) for a, b in zip(ll, anchor.flatten(), strict=True)]
        weight = [c / sum(capped[4 * (b // 4) : 4 * (b // 4) + 4]) for b, c in enumerate(capped)]
        for omega, beta in itertools.product((0.0, 0.5, 1.0), (1.0, 2.0)):
            method = with_extra(alg, row, omega, beta)
            loss[omega, beta] = alg.method_loss(method, plan, rollout, ours, double(adv), anchor, None).item()
            expected = 0.0
            for b in range(8):
                states, n = states_of(new, rollout, plan, b), int(rollout.keep[b].sum())
                upper = eubo_by_loops(states, plan.weight[:, b].tolist(), beta) / (1 if name == "stabledrl" else n)
                score = ll[b] if adv[b] > 0 else omega * upper.item() + (1 - omega) * ll[b]
                expected -= weight[b] * adv[b] * score / 2
            close(loss[omega, beta], expected, f"{name}, omega {omega}, beta {beta}")
        close(loss[0.0, 1.0], loss[0.0, 2.0], "omega 0")


def with_extra(alg: ModuleType, row: Any, omega: float, beta: float) -> Any:
    """The row with other numbers in its sandwich."""
    return replace(row, extra=functools.partial(alg.sandwich, eubo_beta=beta, omega=omega))


# ==================================================================================================== 8. weights, clips, noise


@judges("8.5")
def law_truncated_weights(alg: ModuleType) -> None:
    """Coefficient -clip(ratio, floor, cap) adv: detached, capped on either sign of adv, floored, and 0 only where adv is."""
    ratios, cases = [1e-4, 0.1, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 4.9, 5.1, 1e6], [1.0, -2.0, 0.0]
    adv = double([a for _ in ratios for a in cases])
    anchor = normal(len(adv), seed=65)
    ll = anchor + double([math.log(r) for r in ratios for _ in cases])
    for floor, cap in ((0.0, 5.0), (0.8, 1.28), (0.0, math.inf), (0.3, 0.6)):
        loss = functools.partial(alg.truncated_is, anchor=anchor, adv=adv, num_generations=3, floor=floor, cap=cap)
        weight = [min(max(r, floor), cap) for r in ratios for _ in cases]
        got = coefficients(loss, ll)
        close(got, [-w * a for w, a in zip(weight, adv.tolist(), strict=True)], f"floor {floor}, cap {cap}", 1e-9)
        assert bool(((got != 0) == (adv != 0)).all()), "a sample that teaches nothing"
        close(loss(ll).loss, -double(weight) * adv * ll, "value: weight times ll", 1e-9)
    free = functools.partial(alg.truncated_is, anchor=anchor, adv=adv, num_generations=3, floor=0.0, cap=math.inf)
    close(coefficients(free, ll), coefficients(lambda x: -(x - anchor).exp() * adv, ll), "no clip: ratio adv", 1e-9)
    on_policy = coefficients(lambda x: alg.truncated_is(x, ll, adv, 3, floor=0.8, cap=1.28).loss, ll)
    close(on_policy, coefficients(lambda x: alg.reinforce(x, None, adv, 3).loss, ll), "at ratio 1: reinforce")


@judges("8.5")
def law_truncated_refusals(alg: ModuleType) -> None:
    """A floor below 0 or not below the cap; an anchor with a gradient."""
    x = normal(4, seed=66)
    call = functools.partial(alg.truncated_is, x, x, x, 2)
    refuses(lambda: call(floor=-0.1, cap=5.0), "objective", "-0.1")
    refuses(lambda: call(floor=2.0, cap=2.0), "objective", "floor 2.0", "cap 2.0")
    refuses(lambda: call(floor=0.0, cap=0.0), "objective", "cap 0.0")
    refuses(lambda: alg.truncated_is(x, x.clone().requires_grad_(), x, 2, floor=0.0, cap=5.0).loss, "anchor", "gradient")


@judges("8.1", "8.4", "8.5")
def law_score_carries_the_gradient(alg: ModuleType) -> None:
    """Where a row scores something else, the whole gradient flows through that, and none through ll."""
    anchor, adv = normal(1, 8, 1, seed=67), normal(1, 8, 1, seed=68)
    ratio = [0.2, 1.0, 3.0, 9.0, 0.5, 2.0, 0.01, 30.0]
    capped = [min(r, 5.0) for r in ratio]
    share = [c / sum(capped[4 * (j // 4) : 4 * (j // 4) + 4]) for j, c in enumerate(capped)]
    calls = {
        "reinforce": (lambda ll, s: alg.reinforce(ll, None, adv, 4, score=s).loss, [1.0] * 8),
        "truncated": (lambda ll, s: alg.truncated_is(ll, anchor, adv, 4, floor=0.0, cap=5.0, score=s).loss, capped),
        "self-normalised": (lambda ll, s: alg.self_normalized_clip(ll, anchor, adv, 4, cap=5.0, score=s).loss, share),
    }
    for name, (call, weight) in calls.items():
        ll = (anchor + double(ratio).log()[None, :, None]).requires_grad_()
        score = normal(1, 8, 1, seed=69).requires_grad_()
        through = torch.autograd.grad(call(ll, score).sum(), (ll, score), allow_unused=True)
        assert through[0] is None or not through[0].any(), f"{name}: a gradient through the ratio"
        close(through[1], -double(weight)[None, :, None] * adv, name)


@judges("8.3", "8.4", "8.2")
def law_published_vector(alg: ModuleType) -> None:
    """Ratios 1, 2, 10, 1/4 with adv 1, -1, 1/2, -1/2: the weighted sum is 1/6 at cap 5, and GRPO's coefficients beside it.

    The weighted advantages do not sum to 0 although the advantages do: the weights move the baseline.
    """
    ratio, adv = double([1.0, 2.0, 10.0, 0.25]), double([1.0, -1.0, 0.5, -0.5])
    anchor = torch.zeros(1, 4, 1, dtype=torch.float64)
    loss = lambda x: alg.self_normalized_clip(x[None, :, None], anchor, adv[None, :, None], 4, cap=5.0).loss  # noqa: E731
    weighted = -coefficients(loss, ratio.log())
    close(weighted, [4 / 33, -8 / 33, 10 / 33, -1 / 66], "cap 5")
    close(weighted.sum(), 1 / 6, "sum")
    clip = functools.partial(alg.ppo_clip, anchor=anchor[0, :, 0], adv=adv, num_generations=4)
    grpo = lambda x: clip(x, epsilon_low=0.2, epsilon_high=0.2).loss / 4  # noqa: E731
    close(-coefficients(grpo, ratio.log()), [0.25, -0.5, 0.0, 0.0], "GRPO")


@judges("8.3")
def law_weights_and_the_cap(alg: ModuleType) -> None:
    """A cap above all ratios is plain self-normalisation, one below all of them makes the weights equal; sign-blind to adv."""
    logs = normal(8, seed=70)
    ratio = logs.exp().tolist()
    plain = [r / sum(ratio[4 * (j // 4) : 4 * (j // 4) + 4]) for j, r in enumerate(ratio)]
    for cap in (max(ratio), 50.0, math.inf):
        close(weights_of(alg, logs, 4, cap), plain, f"cap {cap}")
    for cap in (min(ratio), 1e-3, 1e-30):
        close(weights_of(alg, logs, 4, cap), [0.25] * 8, f"cap {cap}")


@judges("8.3")
def law_concentration_needs_a_floor(alg: ModuleType) -> None:
    """Ratios in [low, cap]: the largest weight and the effective sample size are bounded. Without a floor they are not.

    Largest: cap / (cap + (N-1) low). Effective sample size 1 / sum w^2: at least 4 low cap N / (low + cap)^2 (Kantorovich).
    """
    for group, low, cap, seed in itertools.product((4, 8), (0.1, 0.5), (2.0, 6.0), range(5)):
        u = normal(group, seed=seed, scale=3.0).sigmoid()
        ends = double([1.0] + [0.0] * (group - 1)) if seed == 0 else u.round() if seed == 1 else u
        logs = (low + (2 * cap - low) * ends).log()  # some of them above the cap
        w = weights_of(alg, logs, group, cap)
        size = 1 / w.square().sum().item()
        assert w.max().item() <= cap / (cap + (group - 1) * low) + 1e-12, "the largest weight"
        assert 4 * low * cap * group / (low + cap) ** 2 - 1e-9 <= size <= group + 1e-9, "effective sample size"
        if seed == 0:
            close(w.max(), cap / (cap + (group - 1) * low), "the bound is reached")
    alone = weights_of(alg, double([1e6, 1e-9, 1e-9, 1e-9]).log(), 4, 6.0)
    assert alone.max().item() > 1 - 1e-8, "the cap bounds no share"


@judges("8.4", "8.2", "8.5")
def law_one_large_ratio(alg: ModuleType) -> None:
    """adv < 0 and a ratio that grows: GRPO's gradient grows with it, clipped ones stop at the cap, normalised ones at adv g."""
    g, adv = normal(4, 3, seed=71), double([1.0, -1.5, 0.5, -1.0])
    zero, limit = torch.zeros(4, dtype=torch.float64), (adv[:, None] * g).norm(dim=1).max().item()
    norms = {"grpo": [], "clip": [], "stable": [], "normalised": []}
    for ratio in (1e2, 1e5, 1e8):
        ll = double([0.1, math.log(ratio), -0.3, -0.2])
        wide, flat = (zero[None, :, None], adv[None, :, None]), {"anchor": zero, "adv": adv, "num_generations": 4}
        loss = {
            "grpo": lambda x, flat=flat: alg.ppo_clip(x, **flat, epsilon_low=0.2, epsilon_high=0.2).loss / 4,
            "clip": lambda x, flat=flat: alg.truncated_is(x, **flat, floor=0.0, cap=6.0).loss / 4,
            "stable": lambda x, wide=wide: alg.self_normalized_clip(x[None, :, None], *wide, 4, cap=6.0).loss,
            "normalised": lambda x, wide=wide: alg.self_normalized_clip(x[None, :, None], *wide, 4, cap=math.inf).loss,
        }
        for name in norms:
            norms[name].append((coefficients(loss[name], ll) @ g).norm().item())
    close(norms["grpo"][2] / norms["grpo"][1], 1000.0, "linear in the ratio", 1e-3)
    assert max(norms["clip"]) <= 6 * limit and norms["clip"][0] == norms["clip"][2], "stops at the cap"
    assert max(norms["stable"]) <= limit and max(norms["normalised"]) <= limit, "in the hull, whatever the cap"
    close(norms["normalised"][2], (adv[1] * g[1]).norm().item(), "without a cap one answer is the whole gradient", 1e-4)


@judges("7.1", "8.4")
def law_common_noise_cancels(alg: ModuleType) -> None:
    """Noise that a group shares leaves its normalised weights alone below the cap; clipped weights move with it."""
    logs, adv = normal(8, seed=72, scale=0.3), normal(8, seed=73)
    anchor = torch.zeros(8, dtype=torch.float64)
    stable = lambda x: alg.self_normalized_clip(x[None, :, None], anchor[None, :, None], adv[None, :, None], 4, cap=50.0).loss  # noqa: E731
    clip = lambda x: alg.truncated_is(x, anchor, adv, 4, floor=0.0, cap=50.0).loss  # noqa: E731
    for shift in (-2.0, 1.5):
        close(coefficients(stable, logs + shift), coefficients(stable, logs), "normalised")
        close(coefficients(clip, logs + shift), math.exp(shift) * coefficients(clip, logs), "clipped", 1e-9)


@judges("7.1")
def law_noise_makes_log_normal_ratios(alg: ModuleType) -> None:
    """Equal weights, noise of deviation s in each ELBO: mean exp(s^2), variance exp(2 s^2) (exp(2 s^2) - 1), by quadrature."""
    x, w = (double(v) for v in numpy.polynomial.hermite_e.hermegauss(60))
    chance = (w / w.sum())[:, None] * (w / w.sum())
    for s in (0.1, 0.5, 1.0):
        ll, anchor = ((-7.0 + s * x)[:, None].expand(60, 60), (-7.0 + s * x)[None].expand(60, 60))
        ratio = alg.log_ratio(ll, anchor).exp()
        close((chance * ratio).sum(), math.exp(s * s), f"mean at {s}", 1e-8)
        second = (chance * ratio.square()).sum() - math.exp(2 * s * s)
        close(second, math.exp(2 * s * s) * math.expm1(2 * s * s), f"variance at {s}", 1e-6)


@judges()
def law_bypass_rate_of_noise(alg: ModuleType) -> None:
    """The share of bad answers beyond the clip is erfc(log(1 + epsilon) / 2 s) / 2; good answers bypass nothing.

    The noise of a ratio is given as its quantiles, so that shares are exact up to one over their number.
    """
    count = 20000
    normal_quantile = statistics.NormalDist().inv_cdf
    noise_of_ratio = double([normal_quantile((i + 0.5) / count) for i in range(count)])
    rollout = rollout_of(alg, [[1]] * count)
    one = torch.ones(1, count, 1, dtype=torch.bool)
    plan = alg.Plan(torch.zeros(1, count, 4).bool(), one, torch.ones(1, count, dtype=torch.float64), one[..., 0])
    anchor = torch.full((1, count, 1), -3.0, dtype=torch.float64)
    known = {(0.3, 0.2): 0.3337, (0.1, 0.2): 0.0987, (1.0, 0.2): 0.4487, (1.0, 4.0): 0.1275}
    for (s, epsilon), share in known.items():
        clip = functools.partial(alg.ppo_clip, epsilon_low=0.2, epsilon_high=epsilon)
        method = replace(alg.METHODS["grpo"], objective=clip)
        truth = math.erfc(math.log1p(epsilon) / (2 * s)) / 2
        close(truth, share, "the constant", 1e-4)
        ll = anchor + math.sqrt(2) * s * noise_of_ratio[None, :, None]
        for adv, expected in ((-1.0, truth), (1.0, 0.0), (0.0, 0.0)):
            signs = torch.full((count,), adv, dtype=torch.float64)
            seen = alg.ratio_diagnostics(method, plan, rollout, {"logp": ll}, anchor, signs)
            close(seen["bypass_fraction"], expected, f"deviation {s}, epsilon {epsilon}, adv {adv}", 1e-4)
        close(seen["log_ratio_std"], math.sqrt(2) * s, "spread", 1e-3)


# ========================================================================================================= formulas of the rows


def scores(f: Formula, lengths: bool) -> tuple[list[Tensor], list[float]]:
    """SPG's score of each response (ELBO where adv > 0, else half EUBO, half ELBO), and its ELBO ratio to the old model."""
    score, ratio = [], []
    for b in f.rows:
        n = f.length[b] if lengths else 1
        lower = f.elbo(f.new, b) / n
        states = [f.tokens(f.new, k, b) for k in f.states]
        upper = f.length[b] * spg_eubo(states, f.length[b], 1.5) / n
        score.append(lower if f.centred(b) > 0 else 0.5 * upper + 0.5 * lower)
        ratio.append(math.exp(lower.item() - f.elbo(f.old, b).item() / n))
        f.ratios.append((ratio[-1], f.centred(b)))
    return score, ratio


def weighted(f: Formula, weight: list[float], score: list[Tensor]) -> Tensor:
    """-sum of weight adv score."""
    return sum(-w * f.centred(b) * score[b] for b, w in zip(f.rows, weight, strict=True))


def self_normalised(f: Formula, cap: float, lengths: bool) -> Tensor:
    """Each prompt's weights sum to 1; mean over the two prompts. The fixture must reach the cap."""
    score, ratio = scores(f, lengths)
    capped = [min(r, cap) for r in ratio]
    assert cap == math.inf or lengths or capped != ratio, "no ratio above the cap"
    return weighted(f, [c / sum(capped[4 * (b // 4) : 4 * (b // 4) + 4]) for b, c in enumerate(capped)], score) / 2


@formula("stabledrl")
def stabledrl(f: Formula) -> Tensor:
    """Cap 6, whole-sequence ELBOs."""
    return self_normalised(f, 6.0, lengths=False)


@formula("stabledrl-released")
def stabledrl_released(f: Formula) -> Tensor:
    """Cap 5, token means over block-wise states."""
    return self_normalised(f, 5.0, lengths=True)


@formula("self-norm-only")
def self_norm_only(f: Formula) -> Tensor:
    """No cap."""
    return self_normalised(f, math.inf, lengths=False)


@formula("clip-only")
def clip_only(f: Formula) -> Tensor:
    """The capped ratio over N = 4, mean over the two prompts."""
    score, ratio = scores(f, lengths=False)
    assert max(ratio) > 6, "no ratio above the cap"
    return weighted(f, [min(r, 6.0) / 4 for r in ratio], score) / 2


@formula("spg")
def spg(f: Formula) -> Tensor:
    """No ratio; each response counts with its share of the tokens."""
    score, _ = scores(f, lengths=True)
    return weighted(f, [n / sum(f.length) for n in f.length], score)
