"""The tasks whose answers are masks and their weights: notebooks 01, 02, 04, 05, 07."""

import itertools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from judge import Missed, demand, fmt, task
from minidrl import oracle

ORDERS = [[(r + 1) / 4 for r in order] for order in itertools.permutations(range(3))]


def double(values: object) -> Tensor:
    """Numbers as float64."""
    return torch.as_tensor(values, dtype=torch.float64)


def mask(*rows: str) -> Tensor:
    """mask("1110"): a row of True, True, True, False."""
    return torch.tensor([[letter == "1" for letter in row] for row in rows])


def in_every_order(u: float) -> tuple[Tensor, Tensor, Tensor]:
    """keep 1110 in six rows, one u, every order of the noise of the three kept tokens;
    the noise of the last position, which does not count, is the smallest."""
    noise = double([[*order, 0.01] for order in ORDERS])[None]
    return mask(*["1110"] * 6), torch.full((1, 6), u).double(), noise


# ------------------------------------------------------------------------ 01 count form


def _count_plan(alg: ModuleType, answer: Callable) -> Callable:
    def elbo_count_plan(rollout, generator, *, num_states, domain, strata):
        alg._check_count("plan.num_states", num_states)
        inside = alg._domain(rollout, domain)
        shape, device = (num_states, *inside.shape), inside.device
        u = alg._uniform(shape[:2], generator, device)
        if strata:
            u = (torch.arange(num_states, device=device)[:, None] + u) / num_states
        noise = alg._uniform(shape, generator, device)
        masked, weight = answer(inside, u, noise)
        return alg._response_plan(rollout, masked, inside, weight)

    return elbo_count_plan


MASKS = ("keep bool B L", "u float K B", "noise float K B L")
PLAN = ("masked bool K B L", "weight float K B")
count_form = task("count_form", "2.3", "elbo_count_plan", MASKS, PLAN, _count_plan)


def inside_only(answer: Callable) -> str:
    """No position after EOS is hidden, although its noise is the smallest."""
    keep, u, noise = in_every_order(0.5)
    masked = answer(keep, u, noise)[0]
    demand(
        "keep 1110, noise of the last position 0.01, is it hidden",
        masked[0, :, 3],
        [False] * 6,
        "Positions after EOS are no part of the response: rank the noise of the kept "
        "ones only.",
    )
    return "keep 1110 never hides the last position"


def own_draws(answer: Callable) -> str:
    """A state of a plan is what it would be alone."""
    keep, u = mask("1111", "1100"), double([[0.3, 0.3], [0.3, 0.9]])
    noise = double([[[0.1, 0.2, 0.3, 0.4]] * 2, [[0.4, 0.3, 0.2, 0.1]] * 2])
    both = answer(keep, u, noise)[0]
    for k, b in itertools.product(range(2), range(2)):
        one = answer(keep[b : b + 1], u[k : k + 1, b : b + 1], noise[k, b][None, None])
        demand(
            f"two states of two responses, state {k} of row {b}",
            both[k, b],
            one[0][0, 0],
            "Expected is what the same draws give alone. Each state has its own u and "
            "noise, each row its own n.",
        )
    return "2 states of 2 responses, each as if alone"


count_form.has("hides kept positions only")(inside_only)


@count_form.has("every count from 1 to n")
def _(answer: Callable) -> str:
    keep, u = mask("1110", "1110", "1110"), double([[1, 3, 5]]) / 6
    noise = double([0.75, 0.25, 0.5, 0.01]).expand(1, 3, 4)
    demand(
        "keep 1110 (n = 3), u = 1/6, 1/2, 5/6, positions hidden",
        answer(keep, u, noise)[0].sum(-1)[0],
        [1, 2, 3],
        "u is uniform on [0, 1); floor(u n) + 1 is uniform on 1 .. n.",
        u_n_is_rounded_down_and_1_is_missing=[0, 1, 2],
        count_0_is_turned_into_1=[1, 1, 2],
        n_is_L_=[1, 3, 3],
    )
    return "n = 3, u = 1/6, 1/2, 5/6 hide 1, 2, 3"


@count_form.has("every set of a size equally often")
def _(answer: Callable) -> str:
    masked = answer(*in_every_order(0.5))[0][0, :, :3]
    seen = [int((masked == row).all(-1).sum()) for row in mask("110", "101", "011")]
    demand(
        "two of three hidden, in all 6 orders of the noise; times 110, 101, 011",
        torch.tensor(seen),
        [2, 2, 2],
        "Hide the positions with the l smallest noises.",
    )
    return "in 6 orders of the noise 110, 101, 011 twice each"


count_form.has("own draws for every state and row")(own_draws)


@count_form.has("weight n / (K l)")
def _(answer: Callable) -> str:
    keep, u = mask("1110", "1110", "1110"), double([[1, 3, 5]]) / 6
    noise = double([0.75, 0.25, 0.5, 0.01]).expand(1, 3, 4)
    one = answer(keep, u, noise)[1]
    demand(
        "keep 1110, K = 1, 1, 2, 3 hidden",
        one,
        [[3, 1.5, 1]],
        "n = 3 positions are kept; the sum over l hidden ones stands for all n.",
        n_is_L_=[[4, 2, 4 / 3]],
        the_weight_is_upside_down=[[1 / 3, 2 / 3, 1]],
        the_weight_is_that_of_l_from_0_to_n_=[[4, 2, 4 / 3]],
        there_is_no_weight=[[1, 1, 1]],
        the_sum_became_a_mean=[[1, 1 / 2, 1 / 3]],
    )
    two = answer(keep, u.expand(2, -1), noise.expand(2, -1, -1))[1]
    demand(
        "the same with K = 2 states, weight of state 0",
        two[0],
        [1.5, 0.75, 0.5],
        "The K states are averaged: a factor 1/K in each weight.",
    )
    edge = answer(keep[:1], double([[1 - 2**-53]]), noise[:, :1])[1]
    demand(
        "n = 3, u = 1 - 2^-53 (the largest that is drawn), K = 1",
        edge,
        [[1]],
        "In float64 u n is rounded to 3 there: take the minimum of the count and n.",
    )
    return "n = 3, l = 1, 2, 3: 3, 1.5, 1, and half of it with K = 2"


@count_form.has("the mean is the ELBO")
def _(answer: Callable) -> str:
    model = oracle.TabularDenoiser.random(3, 2, torch.Generator().manual_seed(0))
    draws, total = [(u, order) for u in (1, 3, 5) for order in ORDERS], 0.0
    u = double([[u / 6 for u, _ in draws]])
    noise = double([[order for _, order in draws]])
    masked, weight = answer(mask("111").expand(18, -1), u, noise)
    for hidden, w in zip(masked[0], weight[0], strict=True):
        chosen = frozenset(hidden.nonzero().flatten().tolist())
        logp = oracle.token_logp(model, (0, 1, 1), chosen)
        total += w.item() * sum(value.item() for value in logp.values())
    mean, truth = double(total / 18), oracle.elbo(model, (0, 1, 1)).detach()
    demand(
        "a table of 3 tokens, mean over all 18 draws",
        mean,
        truth,
        "Law of l and weight belong together.",
        the_law_of_l_goes_with_another_weight=0.75 * truth,
    )
    return f"3 tokens, all 18 draws: {fmt(mean)}, exact {fmt(truth)}"
