"""The tasks whose answers are masks and their weights: notebooks 01, 02, 04, 05, 07."""

import itertools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from judge import Missed, demand, fmt, same, task
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
    return mask(*["1110"] * 6), torch.full((1, 6), u, dtype=torch.float64), noise


# ------------------------------------------------------------------------ 01 count form


def _count_plan(alg: ModuleType, answer: Callable) -> Callable:
    def elbo_count_plan(rollout, generator, *, num_states, domain, strata):
        alg._check_count("plan.num_states", num_states)
        inside = alg._domain(rollout, domain)
        shape, device = (num_states, *inside.shape), inside.device
        u = alg._uniform(shape[:2], generator, device)
        if strata:  # which may round to 1: the answer is promised less
            u = (torch.arange(num_states, device=device)[:, None] + u) / num_states
            u = u.clamp(max=1 - 2**-53)
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
    if not same(answer(keep, u, noise)[0], masked):
        raise Missed(
            "the same keep, u and noise twice: two different masks. Draw nothing "
            "yourself: all that is random comes in u and noise."
        )
    keep, u, noise = in_every_order(1 - 2**-53)
    demand(
        "keep 1110, u = 1 - 2^-53, noise of the last position 0.01, kept ones hidden",
        answer(keep, u, noise)[0][0, :, :3].sum(-1),
        answer(keep[:, :3], u, noise[..., :3])[0][0].sum(-1),
        "Expected is what the same draws give without the last position, which takes "
        "no place: rank the noise of the kept ones only.",
    )
    return "keep 1110 never hides the last position, and it takes no place"


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
    noise = double([0.6, 0.4, 0.55, 0.99]).expand(1, 3, 4)
    because = "u is uniform on [0, 1); floor(u n) + 1 is uniform on 1 .. n."
    demand(
        "keep 111 (n = 3), u = 1/6, 1/2, 5/6, noise 0.6 0.4 0.55, positions hidden",
        answer(keep[:, :3], u, noise[..., :3])[0].sum(-1)[0],
        [1, 2, 3],
        because,
        u_n_is_rounded_down_and_1_is_missing=[0, 1, 2],
        count_0_is_turned_into_1=[1, 1, 2],
        the_count_is_taken_from_1_less_u=[3, 2, 1],
        l_is_drawn_from_0_to_n=[0, 2, 3],
        each_position_is_hidden_with_probability_u__as_in_the_time_form=[0, 1, 3],
        noise_is_compared_with_l_over_n__which_hides_l_only_on_average=[0, 3, 3],
    )
    demand(
        "keep 1110 (n = 3), the same u and noise, positions hidden",
        answer(keep, u, noise)[0].sum(-1)[0],
        [1, 2, 3],
        because,
        n_is_L=[1, 3, 3],
        n_is_L_=[1, 3, 4],
    )
    return "n = 3, u = 1/6, 1/2, 5/6 hide 1, 2, 3"


@count_form.has("the smallest noises, as in the example")
def _(answer: Callable) -> str:
    noise = double([0.75, 0.25, 0.5, 0.01]).expand(1, 2, 4)
    demand(
        "keep 1110, u = 1/2 and 1/6, noise 0.75 0.25 0.5 0.01",
        answer(mask("1110", "1110"), double([[1 / 2, 1 / 6]]), noise)[0][0],
        mask("0110", "0100"),
        "Hide the kept positions whose noise is smallest.",
        argsort_was_taken_once=mask("1010", "0010"),
        the_largest_noises_were_taken=mask("1010", "1000"),
    )
    return "noise 0.75 0.25 0.5: 0110 and 0100"


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
    keep, u = mask("11100", "11100", "11100"), double([[1, 3, 5]]) / 6
    noise = double([0.75, 0.25, 0.5, 0.99, 0.01]).expand(1, 3, 5)
    one = answer(keep, u, noise)[1]
    demand(
        "keep 11100 (n = 3), K = 1, 1, 2, 3 hidden",
        one,
        [[3, 1.5, 1]],
        "n = 3 positions are kept; the sum over l hidden ones stands for all n.",
        n_is_L_=[[5, 2.5, 5 / 3]],
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
    edge = answer(keep[:2], double([[0, 1 - 2**-53]]), noise[:, :2])[1]
    demand(
        "n = 3, u = 0 and 1 - 2^-53 (the least and the largest that is drawn), K = 1",
        edge,
        [[3, 1]],
        "l = 1 and l = 3.",
    )
    return "n = 3, l = 1, 2, 3: 3, 1.5, 1, and half of it with K = 2"


@count_form.has("the mean is the ELBO")
def _(answer: Callable) -> str:
    model, y = oracle.TabularDenoiser.random(3, 2, _seed(0)), (0, 1, 1)
    # Twelve u: each l from 1 to 3 equally often, and each from 0 to 3 if drawn so.
    draws = [(u, order) for u in range(1, 24, 2) for order in ORDERS]
    u = double([[u / 24 for u, _ in draws]])
    noise = double([[order for _, order in draws]])
    plan = answer(mask("111").expand(72, -1), u, noise)
    mean, truth = _mean(model, y, *plan), oracle.elbo(model, y).detach()
    demand(
        "a table of 3 tokens, mean over 72 draws, 12 u in 6 orders",
        mean,
        truth,
        "Law of l and weight belong together.",
        the_law_of_l_goes_with_another_weight=0.75 * truth,
    )
    return f"3 tokens, 72 draws: {fmt(mean)}, exact {fmt(truth)}"


# ---------------------------------------------------------------- 02 strata, and a pair


def _strata_plan(alg: ModuleType, answer: Callable) -> Callable:
    original = alg.elbo_count_plan

    def elbo_count_plan(rollout, generator, *, num_states, domain, strata):
        if not strata or not isinstance(num_states, int) or num_states < 1:
            options = {"num_states": num_states, "domain": domain, "strata": strata}
            return original(rollout, generator, **options)
        inside = alg._domain(rollout, domain)
        n, shape = inside.sum(-1), (num_states, *inside.shape)
        points = answer(alg._uniform(shape[:2], generator, inside.device))
        count = torch.minimum((points * n).floor().long() + 1, n)
        noise = alg._uniform(shape, generator, inside.device)
        masked = alg._random_subset(noise, inside, count)
        weight = n.double() / (num_states * count)
        return alg._response_plan(rollout, masked, inside, weight)

    return elbo_count_plan


strata = task(
    "strata",
    "2.3",
    "elbo_count_plan",
    ("u float K B",),
    ("points float K B",),
    _strata_plan,
)


@strata.has("state k draws in the k-th of K intervals")
def _(answer: Callable) -> str:
    demand(
        "K = 4, all u = 0.2",
        answer(double([[0.2]] * 4))[:, 0],
        [0.05, 0.3, 0.55, 0.8],
        "State k, from 0, draws uniformly from k/K to (k+1)/K.",
        every_state_has_the_first_interval=[0.05] * 4,
        u_is_not_used_and_the_middle_taken=[0.125, 0.375, 0.625, 0.875],
        u_is_not_divided_by_K_=[0.2, 0.45, 0.7, 0.95],
        k_is_counted_from_1=[0.3, 0.55, 0.8, 1.05],
        nothing_was_done=[0.2] * 4,
    )
    return "K = 4, u = 0.2: 0.05 0.3 0.55 0.8"


@strata.has("every state and row has its own draw")
def _(answer: Callable) -> str:
    demand(
        "K = 2, u = 0.1 0.3 in state 0 and 0.9 0.7 in state 1",
        answer(double([[0.1, 0.3], [0.9, 0.7]])),
        [[0.05, 0.15], [0.95, 0.85]],
        "One shared draw ties the states together: the mean stays, the variance grows.",
        all_states_share_the_draw_of_state_0=[[0.05, 0.15], [0.55, 0.65]],
    )
    return "K = 2: 0.05 0.15 0.95 0.85"


@strata.has("the mixture of the states is uniform")
def _(answer: Callable) -> str:
    u = double([[1, 3, 5, 7]]).expand(3, -1) / 8
    got = answer(u).flatten().sort().values
    demand(
        "K = 3, u = 1/8, 3/8, 5/8, 7/8 in each, sorted and times 24",
        24 * got,
        [float(2 * i + 1) for i in range(12)],
        "Together the states must cover (0, 1) evenly, or the estimate is biased.",
    )
    return "K = 3, 12 points at equal distances"


@strata.has("the mean stays, the variance falls")
def _(answer: Callable) -> str:
    model, y = oracle.TabularDenoiser.random(6, 3, _seed(0)), (0, 1, 2, 0, 1, 2)
    means, spread = zip(*(_given_count(model, y, l) for l in range(1, 7)), strict=True)
    draws = list(itertools.product([(2 * i + 1) / 12 for i in range(6)], repeat=2))
    counts = (6 * answer(double(draws).T)).floor().long().clamp(0, 5)
    mean, spread = double(means), double(spread)
    total = mean[counts].mean(0)  # of two states, given their counts
    got = total.var(correction=0) + spread[counts].sum(0).mean() / 4
    truth = oracle.elbo(model, y).detach()
    demand("a table of 6 tokens, mean", total.mean(), truth, "Strata add no bias.")
    alone = mean.var(correction=0) + spread.mean()
    slices = mean.view(2, 3).var(1, correction=0).mean() + spread.mean()
    demand(
        "a table of 6 tokens, K = 2, variance",
        got,
        slices / 2,
        "What is left is the variance inside the two halves of the counts, (20.3).",
        the_states_are_independent=alone / 2,
    )
    return f"6 tokens, K = 2: {fmt(got)}, independent states {fmt(alone / 2)}"


def _seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _given_count(
    model: oracle.TabularDenoiser, y: tuple, l: int
) -> tuple[float, float]:
    """Mean and variance of (n / l) S(M) over the sets of l positions."""
    sets = oracle.subsets_of_size(len(y), l)
    sums = [
        sum(v.item() for v in oracle.token_logp(model, y, M).values()) for M in sets
    ]
    z = double(sums) * len(y) / l
    return z.mean().item(), z.var(correction=0).item()


def _pair_plan(alg: ModuleType, answer: Callable) -> Callable:
    original = alg.complementary_plan

    def complementary_plan(rollout, generator, *, num_states, domain):
        if not isinstance(num_states, int) or num_states < 2 or num_states % 2:
            return original(rollout, generator, num_states=num_states, domain=domain)
        inside = alg._domain(rollout, domain)
        shape = (num_states // 2, *inside.shape)
        u = alg._uniform(shape[:2], generator, inside.device)
        noise = alg._uniform(shape, generator, inside.device)
        masked, weight = answer(inside, u, noise)
        return alg._response_plan(rollout, masked, inside, weight)

    return complementary_plan


pairs = task(
    "pairs",
    "2.4",
    "complementary_plan",
    ("keep bool B L", "u float J B", "noise float J B L"),
    ("masked bool 2J B L", "weight float 2J B"),
    _pair_plan,
)


def _one_pair(answer: Callable, u: list[float]) -> tuple[Tensor, Tensor]:
    """keep 1110 in each row, noise 0.75 0.25 0.5 0.01, J = 1."""
    noise = double([0.75, 0.25, 0.5, 0.01]).expand(1, len(u), 4)
    return answer(mask(*["1110"] * len(u)), double([u]), noise)


@pairs.has("counts from 0 to n")
def _(answer: Callable) -> str:
    noise = double([0.6, 0.35, 0.55, 0.01]).expand(1, 4, 4)
    u = double([[0.125, 0.375, 0.625, 0.875]])
    masked, _ = answer(mask(*["1110"] * 4), u, noise)
    demand(
        "keep 1110 (n = 3), u = 1/8, 3/8, 5/8, 7/8, noise 0.6 0.35 0.55, hidden in "
        "the mask",
        masked[0].sum(-1),
        [0, 1, 2, 3],
        "l and n - l must have the same law: floor(u (n + 1)), 0 included.",
        the_counts_are_those_of_the_count_form=[1, 2, 2, 3],
        u_is_multiplied_by_n_=[0, 1, 1, 2],
        each_position_is_hidden_with_probability_u__as_in_the_time_form=[0, 1, 3, 3],
        noise_is_compared_with_l_over_n__which_hides_l_only_on_average=[0, 0, 3, 3],
    )
    return "n = 3, u = 1/8, 3/8, 5/8, 7/8 hide 0, 1, 2, 3"


@pairs.has("each kept position once in a pair")
def _(answer: Callable) -> str:
    both, _ = _one_pair(answer, [0.625, 0.375])
    demand(
        "keep 1110, u = 5/8 and 3/8, noise 0.75 0.25 0.5 0.01, masks",
        both[0],
        mask("0110", "0100"),
        "Hide the kept positions whose noise is smallest.",
        argsort_was_taken_once=mask("1010", "0010"),
        the_largest_noises_were_taken=mask("1010", "1000"),
        the_noise_of_the_last_position_counts=mask("0100", "0000"),
    )
    demand(
        "the same, u = 5/8, mask and complement",
        both[:, 0],
        mask("0110", "1000"),
        "The complement is taken inside keep: 1000, and never 1001.",
        the_complement_has_positions_after_EOS=mask("0110", "1001"),
        the_mask_stands_there_twice=mask("0110", "0110"),
    )
    return "keep 1110: 0110 and 1000"


@pairs.has("pairs are neighbours, with their own draws")
def _(answer: Callable) -> str:
    noise = double([[[0.1, 0.2, 0.3, 0.4]], [[0.4, 0.3, 0.2, 0.1]]])
    masked, _ = answer(mask("1111"), double([[0.5], [0.3]]), noise)
    demand(
        "two pairs: noise 0.1 0.2 0.3 0.4 with u = 0.5, then reversed with u = 0.3",
        masked[:, 0],
        mask("1100", "0011", "0001", "1110"),
        "States 2j and 2j + 1 are pair j: stack on a new axis 1, then flatten.",
        first_all_masks_came__then_all_complements=mask("1100", "0001", "0011", "1110"),
        all_pairs_share_their_noise=mask("1100", "0011", "1000", "0111"),
    )
    return "1100 0011, 0001 1110"


@pairs.has("weight (n + 1) / (K l)")
def _(answer: Callable) -> str:
    _, weight = _one_pair(answer, [0.375, 0.625, 0.125])
    if not bool(weight.isfinite().all()):
        raise Missed(
            f"n = 3, an empty mask: weights {fmt(weight[:, 2])}. Its sum is 0, and "
            "infinity times 0 is no number: clamp l to 1."
        )
    demand(
        "keep 1110, K = 2, masks of 1 and 2, complements of 2 and 1",
        weight[:, :2],
        [[2.0, 1.0], [1.0, 2.0]],
        "n + 1 = 4 counts are possible, and l = 0 adds nothing: (2.2) with t "
        "integrated out.",
        the_weight_is_n_over_K_l_=[[1.5, 0.75], [0.75, 1.5]],
        K_is_the_number_of_pairs=[[4.0, 2.0], [2.0, 4.0]],
        the_complement_has_the_weight_of_its_mask=[[2.0, 1.0], [2.0, 1.0]],
    )
    return "n = 3, K = 2, l = 1, 2: 2, 1"


@pairs.has("the mean is the ELBO")
def _(answer: Callable) -> str:
    model, y = oracle.TabularDenoiser.random(3, 2, _seed(0)), (0, 1, 1)
    draws = list(itertools.product((0.125, 0.375, 0.625, 0.875), ORDERS))
    u = double([[u for u, _ in draws]])
    noise = double([[order for _, order in draws]])
    plan = answer(mask("111").expand(len(draws), -1), u, noise)
    mean, truth = _mean(model, y, *plan), oracle.elbo(model, y).detach()
    demand(
        "a table of 3 tokens, mean over all 24 draws",
        mean,
        truth,
        "Law of l and weight belong together.",
        the_weight_n_over_l_meets_counts_from_0=0.75 * truth,
    )
    return f"3 tokens, all 24 draws: {fmt(mean)}, exact {fmt(truth)}"


def _mean(
    model: oracle.TabularDenoiser, y: tuple, masked: Tensor, weight: Tensor
) -> Tensor:
    """The mean over the rows of sum_k weight S(masked)."""
    total = 0.0
    for hidden, w in zip(masked.flatten(0, 1), weight.flatten(), strict=True):
        chosen = frozenset(hidden.nonzero().flatten().tolist())
        logp = oracle.token_logp(model, y, chosen) if chosen else {}
        total += w.item() * sum(value.item() for value in logp.values())
    return double(total / masked.shape[1])


# -------------------------------------------------------- 04 the mean field, two means


def _mean_field_plan(alg: ModuleType, answer: Callable) -> Callable:
    original = alg.mean_field_plan

    def mean_field_plan(rollout, generator, *, p_mask_prompt):
        if not 0 <= p_mask_prompt < 1:
            return original(rollout, generator, p_mask_prompt=p_mask_prompt)
        shape, device = tuple(rollout.prompt.shape), rollout.prompt.device
        noise = alg._uniform(shape, generator, device)
        given = (rollout.prompt_mask, noise, rollout.keep, p_mask_prompt)
        hidden, scored = answer(*given)
        weight = torch.ones_like(scored[None, :, 0], dtype=rollout.logp.dtype)
        return alg.Plan(hidden[None], scored[None], weight, scored[None].any(-1))

    return mean_field_plan


mean_field = task(
    "mean_field",
    "2.1",
    "mean_field_plan",
    ("prompt_mask bool B P", "noise float B P", "keep bool B L", "p number"),
    ("hidden bool B P+L", "scored bool B L"),
    _mean_field_plan,
)


def _looked_at(answer: Callable, p: float) -> tuple[Tensor, Tensor]:
    noise = double([[0.1, 0.2, 0.6]])
    return answer(mask("011"), noise, mask("1100"), p)


@mean_field.has("the whole response is hidden")
def _(answer: Callable) -> str:
    hidden, _ = _looked_at(answer, 0.0)
    demand(
        "keep 1100, p = 0, hidden in the response",
        hidden[0, 3:],
        mask("1111")[0],
        "Positions after EOS are hidden too: what stands there would tell the length.",
        only_what_counts_is_hidden=mask("1100")[0],
    )
    return "keep 1100: 1111"


@mean_field.has("prompt tokens are hidden where noise < p")
def _(answer: Callable) -> str:
    hidden, _ = _looked_at(answer, 0.3)
    demand(
        "prompt_mask 011, noise 0.1 0.2 0.6, p = 0.3, hidden in the prompt",
        hidden[0, :3],
        mask("010")[0],
        "0.2 < 0.3 hides the second token; the first is padding and stays padding.",
        padding_is_hidden=mask("110")[0],
        the_comparison_is_turned_round=mask("001")[0],
        prompt_tokens_are_never_hidden=mask("000")[0],
    )
    none, _ = _looked_at(answer, 0.0)
    demand("p = 0, hidden in the prompt", none[0, :3], [False] * 3, "Nothing is.")
    return "prompt_mask 011, noise 0.1 0.2 0.6, p = 0.3: 010"


@mean_field.has("kept tokens are scored")
def _(answer: Callable) -> str:
    _, scored = _looked_at(answer, 0.3)
    demand(
        "keep 1100, scored",
        scored[0],
        mask("1100")[0],
        "The likelihood is that of the tokens up to and including EOS.",
        padding_after_EOS_is_scored=mask("1111")[0],
    )
    return "keep 1100: 1100"


@mean_field.has("each row has noise of its own")
def _(answer: Callable) -> str:
    noise = double([[0.1, 0.2, 0.6], [0.6, 0.2, 0.1]])
    hidden, _ = answer(mask("111", "111"), noise, mask("1100", "1100"), 0.3)
    demand(
        "two rows, noise 0.1 0.2 0.6 and 0.6 0.2 0.1, p = 0.3, hidden in the prompt",
        hidden[:, :3],
        mask("110", "011"),
        "Row b of `noise` is for prompt b.",
        the_mask_of_the_first_row_serves_all_rows=mask("110", "110"),
    )
    return "noise 0.1 0.2 0.6 and 0.6 0.2 0.1: 110 and 011"


def _two_of_seven(alg: ModuleType, answer: Callable) -> Callable:
    original = alg.aggregate
    names = ("token_mean", "sequence_mean_token_mean")

    def aggregate(loss, plan, rollout, *, level, how):
        if how not in names:
            return original(loss, plan, rollout, level=level, how=how)
        present, weight = alg.entries(plan, level)
        total = (loss * weight * present).sum((0, 2))
        return answer(total, rollout.lengths)[names.index(how)]

    return aggregate


two_means = task(
    "two_means",
    "9.1",
    "aggregate",
    ("total float B", "lengths int B"),
    ("token_mean float", "answer_mean float"),
    _two_of_seven,
)
_TWO = (double([10.0, -1.0]), torch.tensor([10, 2]))


def _both_of_two(answer: Callable) -> tuple[Tensor, Tensor]:
    """Both means of the example, unless they were exchanged."""
    one, other = answer(*_TWO)
    if same(one, 1 / 4) and same(other, 9 / 12):
        raise Missed(
            "10 tokens of loss 1 and 2 tokens of loss -1/2: yours 0.25 and 0.75, "
            "expected 0.75 and 0.25. It looks as if you return them in the other order."
        )
    return one, other


@two_means.has("token mean: all tokens count alike")
def _(answer: Callable) -> str:
    demand(
        "10 tokens of loss 1 and 2 tokens of loss -1/2, token mean",
        _both_of_two(answer)[0],
        9 / 12,
        "9 in sum, over 12 tokens.",
        both_means_are_the_one_over_answers=1 / 4,
        the_sum_was_divided_by_the_answers=9 / 2,
        the_lengths_were_averaged=9 / 6,
    )
    return "10 tokens of loss 1, 2 of loss -1/2: 9 / 12 = 0.75"


@two_means.has("mean over answers: all answers count alike")
def _(answer: Callable) -> str:
    demand(
        "10 tokens of loss 1 and 2 tokens of loss -1/2, mean over answers",
        _both_of_two(answer)[1],
        1 / 4,
        "Each answer's mean first, 1 and -1/2; then the mean of the two.",
        both_means_are_the_one_over_tokens=9 / 12,
        the_means_were_added_and_the_factor_1_over_B_is_missing=1 / 2,
        the_sum_was_divided_by_the_answers=9 / 2,
    )
    return "the same: (1 - 1/2) / 2 = 0.25"


@two_means.has("what a token of each answer weighs")
def _(answer: Callable) -> str:
    total = _TWO[0].clone().requires_grad_()
    means = answer(total, _TWO[1])
    if not all(mean.requires_grad for mean in means):
        raise Missed("the means carry no gradient: keep them a function of total")
    got = torch.stack(
        [torch.autograd.grad(m, total, retain_graph=True)[0] for m in means]
    )
    demand(
        "lengths 10 and 2, slope in a token's loss: token mean, then mean over answers",
        got,
        [[1 / 12, 1 / 12], [1 / 20, 1 / 4]],
        "In the second a token of the short answer counts five times as much.",
    )
    return "1/12 and 1/12; 1/20 and 1/4"


# ------------------------------------------------------------------------------ 05 SDMC


def _nodes(alg: ModuleType, answer: Callable) -> Callable:
    def gauss_legendre(num_nodes):
        alg._check_count("plan.num_nodes", num_nodes)
        return answer(num_nodes)

    return gauss_legendre


nodes = task(
    "nodes",
    "2.5",
    "gauss_legendre",
    ("num_nodes number Q",),
    ("t float Q", "w float Q"),
    _nodes,
)


@nodes.has("nodes in (0, 1)")
def _(answer: Callable) -> str:
    root = 1 / 3**0.5
    demand(
        "Q = 2, t",
        answer(2)[0],
        [(1 - root) / 2, (1 + root) / 2],
        "The nodes of Gauss-Legendre, moved from (-1, 1): t = (x + 1) / 2.",
        the_nodes_are_those_of_minus_1_to_1=[-root, root],
        the_nodes_stand_at_the_middles_of_Q_intervals=[0.25, 0.75],
    )
    return "Q = 2: 0.2113 0.7887"


@nodes.has("weights sum to 1")
def _(answer: Callable) -> str:
    demand(
        "Q = 3, w",
        answer(3)[1],
        [5 / 18, 4 / 9, 5 / 18],
        "(0, 1) has half the length of (-1, 1).",
        the_weights_are_those_of_minus_1_to_1=[5 / 9, 8 / 9, 5 / 9],
        all_weights_are_equal=[1 / 3] * 3,
    )
    return "Q = 3: 5/18 4/9 5/18"


@nodes.has("exact up to degree 2Q - 1")
def _(answer: Callable) -> str:
    t, w = answer(2)
    demand("Q = 2, integral of t^3", (w * t**3).sum(), 0.25, "It is 1/4.")
    demand("Q = 2, sum for t^4", (w * t**4).sum(), 7 / 36, "1/5 - 1/180 is 7/36.")
    return "Q = 2: t^3 gives 0.25; t^4 gives 0.1944, the integral is 0.2"


def _bernoulli_plan(alg: ModuleType, answer: Callable) -> Callable:
    original = alg.quadrature_plan

    def quadrature_plan(
        rollout, generator, *, num_nodes, masks_per_node, counts, domain
    ):
        if counts != "bernoulli" or not isinstance(masks_per_node, int):
            given = {"counts": counts, "domain": domain, "num_nodes": num_nodes}
            return original(rollout, generator, masks_per_node=masks_per_node, **given)
        alg._check_count("plan.masks_per_node", masks_per_node)
        inside = alg._domain(rollout, domain)
        rule = alg.gauss_legendre(num_nodes)
        t, w = (x.repeat_interleave(masks_per_node) for x in rule)
        noise = alg._uniform((len(t), *inside.shape), generator, inside.device)
        masked, weight = answer(inside, t, w / masks_per_node, noise)
        return alg._response_plan(rollout, masked, inside, weight)

    return quadrature_plan


sdmc = task(
    "sdmc",
    "2.6",
    "quadrature_plan",
    ("keep bool B L", "t float Q", "w float Q", "noise float Q B L"),
    ("masked bool Q B L", "weight float Q B"),
    _bernoulli_plan,
)


@sdmc.has("hidden where noise < t")
def _(answer: Callable) -> str:
    noise = double([0.1, 0.5, 0.9, 0.01]).expand(2, 1, 4)
    masked, _ = answer(mask("1110"), double([0.2, 0.7]), double([0.5, 0.5]), noise)
    demand(
        "keep 1110, noise 0.1 0.5 0.9 0.01, t = 0.2 and 0.7",
        masked[:, 0],
        mask("1000", "1100"),
        "Each kept position is hidden with probability t; the last one never.",
        positions_after_EOS_are_hidden=mask("1001", "1101"),
        the_comparison_is_turned_round=mask("0110", "0010"),
        t_is_not_the_one_of_the_state=mask("1000", "1000"),
    )
    return "keep 1110, t = 0.2, 0.7: 1000, 1100"


@sdmc.has("weight w / t")
def _(answer: Callable) -> str:
    noise = double([0.1, 0.5, 0.9, 0.01]).expand(2, 1, 4)
    _, weight = answer(mask("1110"), double([0.2, 0.8]), double([0.5, 0.5]), noise)
    demand(
        "t = 0.2 and 0.8, w = 0.5",
        weight[:, 0],
        [2.5, 0.625],
        "1/t of the time form, times the weight of the node; no mean over the K = Q "
        "states: the w sum to 1.",
        the_average_over_K_was_taken_as_well=[1.25, 0.3125],
        w_is_missing=[5.0, 1.25],
        the_factor_1_over_t_is_missing=[0.5, 0.5],
        n_over_the_count_stands_for_1_over_t_=[1.5, 0.75],
    )
    return "t = 0.2, 0.8, w = 0.5: 2.5, 0.625"


@sdmc.has("no quadrature error from Q = n / 2 on")
def _(answer: Callable) -> str:
    model, y = oracle.TabularDenoiser.random(3, 2, _seed(0)), (0, 1, 1)
    truth, found = oracle.elbo(model, y).detach(), {}
    for times, weights in (([0.5], [1.0]), (None, [0.5, 0.5])):
        t = double(times or [(1 - 3**-0.5) / 2, (1 + 3**-0.5) / 2])
        patterns = list(itertools.product((0, 1), repeat=3))
        hide = double(patterns)
        chance = torch.stack(
            [x ** hide.sum(1) * (1 - x) ** (3 - hide.sum(1)) for x in t]
        )
        noise = t[:, None, None] + (1 - 2 * hide) * 1e-6  # below t where hidden
        keep = mask("111").expand(8, -1)
        masked, weight = answer(keep, t, double(weights), noise)
        found[len(t)] = _mean(model, y, masked, 8 * chance * weight)
    demand(
        "a table of 3 tokens, two nodes, mean over all masks",
        found[2],
        truth,
        "The integrand has degree n - 1 = 2, and two nodes are exact to degree 3.",
    )
    return (
        f"3 tokens: 2 nodes {fmt(found[2])}, 1 node {fmt(found[1])}, exact {fmt(truth)}"
    )


def _rounded(alg: ModuleType, answer: Callable) -> Callable:
    original = alg._count_at

    def _count_at(t, n, counts):
        if counts != "rounded":
            return original(t, n, counts)
        count, scale = answer(t[:, 0], n)
        return count.double(), scale

    return _count_at


fixed_count = task(
    "fixed_count",
    "2.6",
    "_count_at",
    ("t float Q", "n int B"),
    ("count int Q B", "scale float Q B"),
    _rounded,
)


@fixed_count.has("what a hidden position sees on average")
def _(answer: Callable) -> str:
    demand(
        "n = 11, t = 0.1, 0.5, 0.92",
        answer(double([0.1, 0.5, 0.92]), torch.tensor([11]))[0][:, 0],
        [2, 6, 10],
        "A hidden position has t (n - 1) hidden ones beside it: 1 + t (n - 1) in all.",
        the_count_is_t_n_=[1, 6, 10],
        t_n_was_rounded_down=[1, 5, 10],
        the_position_itself_is_missing=[1, 5, 9],
    )
    return "n = 11, t = 0.1, 0.5, 0.92: 2, 6, 10"


@fixed_count.has("halves are rounded up")
def _(answer: Callable) -> str:
    demand(
        "t = 0.5, n = 2, 4, 6: 1.5, 2.5, 3.5 rounded",
        answer(double([0.5]), torch.tensor([2, 4, 6]))[0][0],
        [2, 3, 4],
        "floor(x + 0.5).",
        torch_round_was_used__which_rounds_halves_to_even=[2, 2, 4],
        it_was_rounded_down=[1, 2, 3],
    )
    return "t = 0.5, n = 2, 4, 6: 2, 3, 4"


@fixed_count.has("from 1 to n")
def _(answer: Callable) -> str:
    count, _ = answer(double([1e-3, 0.999]), torch.tensor([1, 8]))
    demand(
        "n = 1 and 8, t = 0.001 and 0.999",
        count,
        [[1, 1], [1, 8]],
        "A state that hides nothing is a call for nothing.",
    )
    return "n = 1, 8, t = 0.001, 0.999: 1 1, 1 8"


@fixed_count.has("scale n / count")
def _(answer: Callable) -> str:
    demand(
        "n = 11, t = 0.1, 0.5",
        answer(double([0.1, 0.5]), torch.tensor([11]))[1][:, 0],
        [5.5, 11 / 6],
        "The count is no longer random: the sum over it stands for n tokens.",
        the_scale_is_1_over_t_=[10.0, 2.0],
        the_scale_is_upside_down=[2 / 11, 6 / 11],
    )
    return "n = 11, counts 2, 6: 5.5, 1.833"


# --------------------------------------------------------------------- 07 the staircase


def _staircase(alg: ModuleType, answer: Callable) -> Callable:
    original = alg.staircase_mask

    def staircase_mask(prompt_mask, length, block_length, *, clean):
        if clean != "block" or block_length < 1 or length % block_length:
            return original(prompt_mask, length, block_length, clean=clean)
        return answer(prompt_mask, length, block_length)[:, None]

    return staircase_mask


staircase = task(
    "staircase",
    "4.3",
    "staircase_mask",
    ("prompt_mask bool N P", "length number L", "block_length number"),
    ("sees bool N P+2L P+2L",),
    _staircase,
)
# Two prompt positions, the first padding; four tokens in two blocks.
_PARTS = [("padding", 0), ("prompt", 0)]
_PARTS += [(kind, i) for kind in ("clean", "noisy") for i in range(4)]


def _quadrant(
    answer: Callable, rows: str, columns: str, rule: Callable, because: str
) -> str:
    """Every entry of a part of the mask, or a line about the first that is wrong."""
    sees = answer(mask("01"), 4, 2)[0]
    for (q, (row, i)), (k, (column, j)) in itertools.product(
        enumerate(_PARTS), repeat=2
    ):
        if row != rows or column != columns:
            continue
        due, got = rule(i // 2, j // 2), bool(sees[q, k])
        if due != got:
            names = [f"{row} token {i}", f"{column} token {j}"]
            if "prompt" not in (rows, columns) and "padding" not in (rows, columns):
                names = [
                    f"{a} (block {x // 2})" for a, x in zip(names, (i, j), strict=True)
                ]
            raise Missed(
                f"prompt_mask 01, 4 tokens in blocks of 2, does {names[0]} see "
                f"{names[1]}: yours {got}, expected {due}.",
                because,
            )
    return ""


@staircase.has("not the right table transposed or in another order")
def _(answer: Callable) -> None:
    sees = answer(mask("1"), 2, 1)[0]
    right = mask("10000", "11000", "11100", "10010", "11001")
    example = "the example above, P = 1, L = 2, blocks of 1"
    if same(sees, right.mT):
        raise Missed(
            f"{example}: rows and columns are exchanged. sees[n, q, k]: the query is "
            "the row, as in b[None, :] <= b[:, None]."
        )
    parts = {"prompt": [0], "clean": [1, 2], "noisy": [3, 4]}
    for names in list(itertools.permutations(parts))[1:]:
        order = torch.tensor(sum((parts[name] for name in names), []))
        if same(sees, right[order][:, order]):
            raise Missed(
                f"{example}: the order is {', '.join(names)}. Here it is prompt, "
                "clean, noisy, in rows and columns."
            )


@staircase.has("padding is seen by no one")
def _(answer: Callable) -> None:
    for rows in ("prompt", "clean", "noisy"):
        told = "prompt_mask is False there: mask its column."
        _quadrant(answer, rows, "padding", lambda *_: False, told)


@staircase.has("all see the prompt, and the prompt sees itself alone")
def _(answer: Callable) -> None:
    for rows in ("prompt", "clean", "noisy"):
        told = "The prompt is visible context for every token."
        _quadrant(answer, rows, "prompt", lambda *_: True, told)
    for columns in ("clean", "noisy"):
        told = "The prompt must not depend on the response."
        _quadrant(answer, "prompt", columns, lambda *_: False, told)
    demand(
        "prompt_mask 111, what the first of the three prompt tokens sees of the prompt",
        answer(mask("111"), 4, 2)[0, 0, :3],
        mask("111")[0],
        "The prompt is one block, and a block sees itself from both sides.",
        the_prompt_is_causal=mask("100")[0],
    )


@staircase.has("clean tokens see their own block and earlier ones")
def _(answer: Callable) -> None:
    told = "Within its block a clean token sees later tokens too: b_k <= b_q."
    _quadrant(answer, "clean", "clean", lambda q, k: k <= q, told)


@staircase.has("clean tokens see no noisy ones")
def _(answer: Callable) -> None:
    told = (
        "Else the clean stream depends on the masks, and is not common to all blocks."
    )
    _quadrant(answer, "clean", "noisy", lambda *_: False, told)


@staircase.has("noisy tokens see clean ones of earlier blocks only")
def _(answer: Callable) -> None:
    told = "b_k < b_q. With <= a noisy block reads its own answer."
    _quadrant(answer, "noisy", "clean", lambda q, k: k < q, told)


@staircase.has("noisy tokens see their own noisy block")
def _(answer: Callable) -> None:
    told = "b_k == b_q: other blocks are read from the clean stream, or not at all."
    _quadrant(answer, "noisy", "noisy", lambda q, k: k == q, told)


@staircase.has("number of pairs")
def _(answer: Callable) -> str:
    pairs = answer(mask("111"), 6, 2).sum((0, 1)).split([3, 6, 6])
    demand(
        "P = 3, L = 6, blocks of 2, pairs whose key is in the prompt, clean, noisy",
        torch.stack([part.sum() for part in pairs]),
        [45, 36, 12],
        "Together P^2 + 2 L P + L (L + b) = 9 + 36 + 48.",
    )
    return "P = 3, L = 6, b = 2: 93 of 225"


def _positions(alg: ModuleType, answer: Callable) -> Callable:
    return lambda prompt_mask, length: answer(prompt_mask, length)


positions = task(
    "positions",
    "4.3",
    "staircase_positions",
    ("prompt_mask bool N P", "length number L"),
    ("place int N P+2L",),
    _positions,
)


@positions.has("real tokens are counted, padding is not")
def _(answer: Callable) -> str:
    demand(
        "prompt_mask 011, 2 tokens: the prompt's real tokens and the clean response",
        answer(mask("011"), 2)[0, 1:5],
        [0, 1, 2, 3],
        "A left-padded prompt must have the positions that it has without padding.",
        padding_is_counted=[1, 2, 3, 4],
        the_response_starts_at_0=[0, 1, 0, 1],
        the_response_starts_after_P_positions=[0, 1, 3, 4],
    )
    if not 0 <= int(answer(mask("011"), 2)[0, 0]):
        raise Missed("prompt_mask 011: padding has a negative position; clamp it to 0")
    return "prompt_mask 011, 2 tokens: 0 1 2 3"


@positions.has("a noisy token stands where its clean one stands")
def _(answer: Callable) -> str:
    demand(
        "prompt_mask 011, 2 tokens: the noisy response",
        answer(mask("011"), 2)[0, 5:],
        [2, 3],
        "Both are the same token of the text.",
        the_positions_go_on=[4, 5],
        they_start_at_0=[0, 1],
    )
    return "noisy 2 3, as clean"


@positions.has("each row has its own prompt")
def _(answer: Callable) -> str:
    demand(
        "prompt_masks 011 and 111, 2 tokens: the responses",
        answer(mask("011", "111"), 2)[:, 3:],
        [[2, 3, 2, 3], [3, 4, 3, 4]],
        "Count the real tokens of each row.",
    )
    return "prompt_masks 011, 111: 2 3, 3 4"
