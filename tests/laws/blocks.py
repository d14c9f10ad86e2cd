"""Laws of the plans of block-wise samplers: (2.7), the ELBO of every block (2.8), and a trajectory as a staircase (3.5)."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    KEEPS,
    MODEL,
    RESPONSE,
    Walk,
    all_orders,
    close,
    count_noise,
    double,
    frequencies_agree,
    ll_of,
    mean_is,
    midpoints,
    noise,
    normal,
    positions,
    recorded,
    repeated,
    rollout_of,
    seeded,
    settings_of,
    subset_number,
    tabular,
    walk,
)
from minidrl import oracle
from minidrl.sampler import Sampler

# Kept positions of responses of length 6: all, an EOS at the end of a block and inside one, and in the first block.
KEPT = ((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 0, 0), (1, 1, 1, 1, 1, 0), (1, 0, 0, 0, 0, 0), (1, 1, 1, 0, 0, 0))


def sampler_of(length: int, size: int, order: str = "random", tokens: int = 1, temperature: float = 0.7) -> Sampler:
    """This is a block-wise sampler of that order."""
    return Sampler(order=order, temperature=temperature, length=length, block_length=size, tokens_per_step=tokens)


def blocked(alg: Any, responses: list, keep: Any, size: int) -> Any:
    """A Rollout whose sampler works in blocks."""
    return rollout_of(alg, responses, keep, sampler=sampler_of(len(responses[0]), size))


def plan_of(alg: Any, rollout: Any, seed: int = 1, **options: Any) -> Any:
    """The plan (2.8), of one state and of kept positions unless it is said otherwise."""
    return alg.block_elbo_plan(rollout, seeded(seed), **{"num_states": 1, "domain": "keep", "strata": False, **options})


def own_positions(inside: Any, size: int) -> list[list[int]]:
    """The positions of each block that are inside the domain."""
    flags = list(inside)
    return [[i for i in range(m, m + size) if flags[i]] for m in range(0, len(flags), size)]


def block_elbo_on(model: oracle.TabularDenoiser, response: tuple, keep: tuple, size: int) -> float:
    """The ELBO of every block, summed. Hidden are the block's mask, what is not kept, and all later blocks."""
    total = 0.0
    for m, own in enumerate(own_positions(keep, size)):
        rest = frozenset(i for i in range(len(keep)) if not keep[i] or i >= (m + 1) * size)
        for count in range(1, len(own) + 1):
            masks = list(itertools.combinations(own, count))
            for mask in masks:
                logp = oracle.token_logp(model, response, rest.union(mask))
                total += sum(logp[i].item() for i in mask) / (count * len(masks))
    return total


@judges("2.8")
@rejects("2.8", ("block > number", "block >= number"))
@rejects("", ("return place // rollout", "return place % rollout"), where="block_numbers")
def law_block_elbo_states(alg: Any) -> None:
    """State jM + m hides 1 .. n_m positions of block m, all later blocks and what is not kept; weight n_m / (K count)."""
    for size, states, (domain, strata) in itertools.product((1, 2, 3, 6), (1, 3), (("keep", True), ("all", False))):
        rollout, blocks = blocked(alg, [[0] * 6] * 10, KEPT * 2, size), 6 // size
        plan = plan_of(alg, rollout, num_states=states, domain=domain, strata=strata)
        assert plan.scored.shape == (states * blocks, 10, 6) and plan.hidden.shape == (states * blocks, 10, 9)
        assert plan.block_length == size and not plan.replay and plan.targets is None
        assert plan.weight.dtype == torch.float64 and not plan.hidden[..., :3].any(), "prompt hidden"
        for k, b in itertools.product(range(states * blocks), range(10)):
            inside, m = KEPT[b % 5] if domain == "keep" else (1,) * 6, k % blocks
            own, scored = set(own_positions(inside, size)[m]), positions(plan.scored[k, b])
            assert scored <= own and bool(scored) == bool(own) == bool(plan.valid[k, b]), "scored"
            rest = {i for i in range(6) if not inside[i] or i >= (m + 1) * size}
            assert positions(plan.hidden[k, b, 3:]) == scored | rest, "hidden"
            if own:
                close(plan.weight[k, b], len(own) / (states * len(scored)), "weight")


@judges("2.8")
@rejects("2.8", ("(block == number", "(block <= number"))
def law_block_elbo_noise(alg: Any) -> None:
    """Each block has its own count, floor(u n_m) + 1 with u in its stratum, and the positions of smallest noise."""
    rollout = blocked(alg, [[0] * 6] * 10, KEPT * 2, 3)
    for strata, edge in itertools.product((False, True), (False, True)):
        u, place = normal(3, 2, 10, seed=2).sigmoid(), normal(3, 2, 10, 6, seed=3).sigmoid()
        u = torch.full_like(u, 1 - 2.0**-53) if edge else u  # adding a stratum rounds it up to a whole number
        with noise(alg, u, place):
            plan = plan_of(alg, rollout, num_states=3, strata=strata)
        for j, m, b in itertools.product(range(3), range(2), range(10)):
            own = own_positions(KEPT[b % 5], 3)[m]
            x = (j + u[j, m, b].item()) / 3 if strata else u[j, m, b].item()
            count = min(math.floor(x * len(own)) + 1, len(own))
            chosen = sorted(own, key=lambda i: place[j, m, b, i].item())[:count]  # noqa: B023
            assert positions(plan.scored[2 * j + m, b]) == set(chosen), f"strata {strata}, edge {edge}"
            if own:
                close(plan.weight[2 * j + m, b], len(own) / (3 * count), f"weight, strata {strata}, edge {edge}")


@judges("2.8", "5.1")
@rejects("", ("part + u) / len(u)", "part + u) / (len(u) + 1)"), where="_in_strata")
def law_block_elbo_expectation(alg: Any) -> None:
    """The mean is the sum of the blocks' ELBOs for every K and domain, with and without strata."""
    model = tabular(*MODEL)
    for keep, size, states, strata in itertools.product(KEEPS, (1, 2, 4), (1, 2), (False, True)):
        truth, counts = block_elbo_on(model, RESPONSE, keep, size), [len(own) for own in own_positions(keep, size) if own]
        u, order = count_noise(math.lcm(*counts), 4, states)
        for domain in ("keep", "all") if sum(keep) == 4 else ("keep",):
            rollout = blocked(alg, [RESPONSE] * u.shape[1], [keep] * u.shape[1], size)
            shape = (states, 4 // size, u.shape[1])
            with noise(alg, u[:, None].expand(shape), order[:, None].expand(*shape, 4)):
                plan = plan_of(alg, rollout, num_states=states, domain=domain, strata=strata)
            got = ll_of(alg, model, rollout, plan)[0, :, 0].mean()
            close(got, truth, f"blocks of {size}, n={sum(keep)}, K={states}, strata {strata}")
        if sum(keep) == 4:
            close(block_elbo_on(model, RESPONSE, keep, 4), oracle.elbo(model, RESPONSE).item(), "one block is (2.3)")


@judges("2.8")
@rejects("2.8", ("device)\n    if strata:", "device)\n    if False:"))
def law_block_elbo_frequencies(alg: Any) -> None:
    """Counts and subsets are uniform, and independent between blocks and states, or each in its stratum."""
    model, rollout = tabular(*MODEL), blocked(alg, [RESPONSE] * 4000, [KEEPS[0]] * 4000, 2)
    one, two, either = (torch.tensor(p).double() for p in ([0, 0.5, 0.5, 0], [0, 0, 0, 1.0], [0, 0.25, 0.25, 0.5]))
    for strata, chance in ((False, (either, either)), (True, (one, two))):
        plan = plan_of(alg, rollout, num_states=2, strata=strata)
        subset = subset_number(plan.scored.unflatten(-1, (2, 2)))  # (K M, B, M): of which state, in which block
        drawn = {(j, m): subset[2 * j + m, :, m] for j in range(2) for m in range(2)}
        for (a, x), (b, y) in itertools.combinations(drawn.items(), 2):
            pair = (chance[a[0]][:, None] * chance[b[0]]).flatten()
            frequencies_agree(4 * x + y, pair, f"state and block {a} and {b}, strata {strata}")
        truth = block_elbo_on(model, RESPONSE, KEEPS[0], 2)
        mean_is(ll_of(alg, model, rollout, plan)[0, :, 0], truth, "estimate")


# As WALKS: length, vocabulary, order, tokens per step, block length, EOS. Choices of positions that ask no model first.
BLOCK_WALKS = (
    Walk(4, 2, "random", 1, 2, eos=1),
    Walk(4, 2, "random", 1, 2),
    Walk(4, 2, "left_to_right", 1, 2, eos=1),
    Walk(4, 2, "right_to_left", 1, 2, eos=1),
    Walk(4, 2, "random", 2, 2, eos=1),
    Walk(4, 2, "random", 1, 1, eos=1),
    Walk(4, 2, "random", 2, 4, eos=1),
    Walk(6, 2, "left_to_right", 1, 2, eos=1),
    Walk(4, 2, "low_confidence", 1, 2, eos=1),  # the only order here whose choice of positions depends on the weights
)


def walked(alg: Any, case: Walk) -> tuple[Any, list]:
    """The rollout that holds all trajectories of a block sampler, and the trajectories."""
    paths = walk(case)[1]
    return recorded(alg, paths, case.eos, sampler=settings_of(case)), paths


def last_step(rollout: Any, b: int) -> int:
    """The step that revealed the last kept token."""
    return max(s for s, kept in zip(rollout.unmask_step[b].tolist(), rollout.keep[b].tolist(), strict=True) if kept)


@judges("3.5", "3.1")
@rejects("3.5", ("* len(depth)", ""))
def law_block_replay_states(alg: Any) -> None:
    """State jM + m is step j of block m. It hides what was not revealed before that step, and scores what the step revealed."""
    for case in BLOCK_WALKS:
        rollout, paths = walked(alg, case)
        plan, length, tokens, size = alg.block_replay_plan(rollout, seeded()), case.length, case.tokens, case.block
        blocks, of_block = length // size, size // tokens
        assert plan.replay and plan.block_length == size and not plan.hidden[..., :3].any()
        assert plan.scored.shape == (blocks * of_block, len(paths), length)
        close(plan.weight, torch.ones(plan.weight.shape), "weight")
        for b, path in enumerate(paths):
            for j, m in itertools.product(range(of_block), range(blocks)):
                k, s = j * blocks + m, m * of_block + j
                revealed = frozenset(i for i, step in enumerate(path.unmask_step) if step == s)
                assert positions(plan.hidden[k, b, 3:]) == oracle.hidden_before(path, s), "hidden"
                assert positions(plan.scored[k, b]) == (revealed if s <= last_step(rollout, b) else frozenset()), "scored"
                assert bool(plan.valid[k, b]) == (s <= last_step(rollout, b)) and int(plan.step[k, b]) == s, "valid"


def every_step(alg: Any) -> Callable:
    """The plan (3.1) of all steps."""
    return functools.partial(alg.replay_plan, num_states=None, min_entropy=0.0)


def block_state(draw: dict, keep: tuple[int, ...], size: int, p: float) -> set[int]:
    """The hidden positions up to the EOS of one state, by loops from the noise that decides it."""
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
    """Everything that the plan draws: the order of the blocks, counts, positions, earlier tokens, and prompt tokens."""
    shapes = ((rows, -(-length // size)), (states, rows), (states, rows, length), (states, rows, length))
    return tuple(normal(*shape, seed=seed + i).sigmoid() for i, shape in enumerate((*shapes, (states, rows, prompt))))


BLOCK_KEEPS = ((1, 1, 1, 1, 1), (1, 1, 1, 0, 0), (1, 0, 0, 0, 0), (1, 1, 1, 1, 0))


@judges("2.7")
@rejects("2.7", ("prompt & rollout.prompt_mask", "prompt"))
@rejects("2.7", ("(rollout.lengths - 1)", "rollout.lengths"), (".masked_fill(unused, torch.inf)", ""), where="_distinct_blocks")
def law_block_states(alg: Any) -> None:
    """By loops: the chosen block, what of it is hidden, all after it, p_mask of what lies before, and the weight n/(K
    hidden).
    """
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


def block_law(n: int, size: int, chosen: int, p: float, length: int) -> Tensor:
    """The probability of every set of hidden kept positions, given the chosen block, by enumeration."""
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
@rejects("2.7", (", block > chosen", ", block >= chosen"))
def law_block_frequencies(alg: Any) -> None:
    """The real noise takes blocks without replacement while they last, then again in that order; all else is independent."""
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


def block_mean(model: oracle.TabularDenoiser, response: tuple, size: int) -> float:
    """The mean of the estimate at p_mask 0, by loops over blocks, counts and subsets of n/hidden times the sum."""
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
@rejects("2.7", ("(block < chosen) & dropped", "(block < chosen) & ~dropped"))
def law_block_expectation(alg: Any) -> None:
    """The mean over all draws is the published average of token means. It may lie above log p, where an ELBO never is."""
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
