"""Laws of the plans on random masks, section 2: mean field, the two forms of the ELBO, pairs, and growing masks."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy
import torch

from laws.registry import judges, rejects
from laws.tools import (
    KEEPS,
    MODEL,
    RESPONSE,
    Walk,
    close,
    count_noise,
    double,
    elbo_on,
    frequencies_agree,
    joint_noise,
    ll_of,
    mean_is,
    noise,
    normal,
    positions,
    refuses,
    repeated,
    rollout_of,
    scored_values,
    seeded,
    settings_of,
    subset_number,
    subset_scores,
    tabular,
    variance,
)
from minidrl import oracle


@judges("2.1")
@rejects("2.1", ("& rollout.prompt_mask", ""), ("torch.ones_like(rollout.keep)", "rollout.keep"))
def law_mean_field_states(alg: Any) -> None:
    """One state of weight 1 hides the response and prompt tokens whose noise is below p, never padding; kept tokens
    are scored.
    """
    rollout = rollout_of(alg, [RESPONSE] * 3, KEEPS)
    p, below, above = 0.3, 0.3 - 1e-9, 0.3 + 1e-9
    drawn = double([[below, above, below], [above, below, below], [below, above, above]])
    with noise(alg, drawn):
        plan = alg.mean_field_plan(rollout, seeded(), p_mask_prompt=p)
    close(plan.hidden[0, :, :3], [[0, 0, 1], [0, 1, 1], [0, 0, 0]], "hidden prompt")
    assert bool(plan.hidden[0, :, 3:].all()) and plan.hidden.shape[0] == 1 and not plan.replay
    close(plan.scored[0], KEEPS, "scored")
    close(plan.weight, [[1, 1, 1]], "weight")
    assert bool(plan.valid.all())


@judges("2.1")
@rejects("2.1", ("(noise < p_mask_prompt)", "(noise > p_mask_prompt)"))
def law_mean_field_frequencies(alg: Any) -> None:
    """Each prompt token of each row is hidden with probability p, independently of the others, and none is at p = 0."""
    rollout, p = rollout_of(alg, [RESPONSE] * 4000), 0.3
    plan = alg.mean_field_plan(rollout, seeded(), p_mask_prompt=p)
    frequencies_agree(subset_number(plan.hidden[0, :, 1:3]), double([0.49, 0.21, 0.21, 0.09]), "hidden prompt tokens")
    assert not alg.mean_field_plan(rollout, seeded(), p_mask_prompt=0.0).hidden[..., :3].any()


def gauss(nodes: int, low: float) -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes for a uniform variable on (low, 1), and weights that sum to 1, exact to degree 2 nodes - 1."""
    x, w = numpy.polynomial.legendre.leggauss(nodes)
    return [low + (1 - low) * (v + 1) / 2 for v in x.tolist()], [v / 2 for v in w.tolist()]


def time_mean(model: oracle.TabularDenoiser, response: tuple, min_t: float) -> float:
    """The mean of g(t) over t ~ U(min_t, 1)."""
    return sum(w * oracle.elbo_integrand(model, response, t).item() for t, w in zip(*gauss(6, min_t), strict=True))


def time_expectation(alg: Any, model: oracle.TabularDenoiser, min_t: float, states: int) -> float:
    """The plan's mean over every mask pattern, and over t by quadrature, which is exact: the mean given t is a polynomial."""
    length, u, chance, draws = model.length, [], [], []
    for (x, w), pattern in itertools.product(zip(*gauss(4, 0.0), strict=True), itertools.product((0, 1), repeat=model.length)):
        t = min_t + (1 - min_t) * x
        u.append(x)
        chance.append(w * t ** sum(pattern) * (1 - t) ** (length - sum(pattern)))
        draws.append([t - 1e-9 if hidden else t + 1e-9 for hidden in pattern])
    rollout = repeated(alg, RESPONSE[:length], (1,) * length, len(u))
    with noise(alg, double(u).expand(states, -1), double(draws).expand(states, -1, -1)):
        plan = alg.elbo_time_plan(rollout, seeded(), num_states=states, domain="keep", min_t=min_t)
    return float((double(chance) * ll_of(alg, model, rollout, plan)[0, :, 0]).sum())


@judges("2.2")
@rejects("2.2", ("inside, 1 / (num_states * t))", "inside, 1 / t)"), ("(noise < t[...", "(noise > t[..."))
def law_time_plan_expectation(alg: Any) -> None:
    """The mean is that of g over (min_t, 1) for any number of states, and the ELBO at min_t = 0."""
    model = tabular(3, 3)
    for min_t, states in ((0.0, 1), (0.0, 2), (0.2, 3)):
        close(time_expectation(alg, model, min_t, states), time_mean(model, RESPONSE[:3], min_t), f"min_t {min_t}")
    close(time_mean(model, RESPONSE[:3], 0.0), oracle.elbo(model, RESPONSE[:3]).item(), "integral of g")


@judges("2.2")
@rejects("2.2", ("= min_t + (1 -", "= 2 * min_t + (1 - 2 *"))
def law_time_plan_bias(alg: Any) -> None:
    """To first order the bias is min_t (B - g(0)), in sign and size, and the rest shrinks as min_t squared."""
    model, response = tabular(3, 3), RESPONSE[:3]
    bound = oracle.elbo(model, response).item()
    at_zero = 3 * oracle.mean_logp_by_count(model, response)[0].item()
    assert abs(bound - at_zero) > 0.1, "the fixture has no first-order bias"
    rest = []
    for min_t in (0.02, 0.01):
        bias, first = time_expectation(alg, model, min_t, 1) - bound, min_t * (bound - at_zero)
        assert bias * first > 0 and abs(bias - first) < 0.2 * abs(first), f"bias {bias}, first order {first}"
        rest.append(abs(bias - first))
    assert 3 < rest[0] / rest[1] < 5, f"second-order terms {rest}"


@judges("2.2")
@rejects("2.2", ("u = _uniform((num_states,", "u = _uniform((1,"))
def law_time_plan_frequencies(alg: Any) -> None:
    """1/(K weight) is uniform on (min_t, 1); given it, positions are hidden independently with that probability."""
    model, states, min_t = tabular(3, 3), 2, 0.2
    rollout = repeated(alg, RESPONSE[:3], (1, 1, 1), 6000)
    plan = alg.elbo_time_plan(rollout, seeded(1), num_states=states, domain="keep", min_t=min_t)
    t = 1 / (states * plan.weight)
    share = (t - min_t) / (1 - min_t)
    assert plan.weight.shape == (states, 6000) and bool(((share >= 0) & (share <= 1)).all())
    tenth = (share * 10).floor().long().clamp(max=9)
    frequencies_agree(tenth, torch.full((10,), 0.1, dtype=torch.float64), "t")
    frequencies_agree(tenth[0] * 10 + tenth[1], torch.full((100,), 0.01, dtype=torch.float64), "t of two states")
    excess = plan.scored.double() - t[..., None]
    for i in range(3):
        mean_is(excess[..., i], 0.0, f"hidden share of position {i}")
        mean_is((excess[..., i] * share).flatten(), 0.0, f"dependence of position {i} on t")
        mean_is(excess[..., i] * excess[..., i - 1], 0.0, "covariance of two positions")
    mean_is(excess[0, :, 0] * excess[1, :, 0], 0.0, "covariance of two states")
    values = scored_values(plan, subset_scores(model, RESPONSE[:3], frozenset(range(3))))
    mean_is(values, time_mean(model, RESPONSE[:3], min_t), "estimate")


@judges("2.2", "2.3", "2.4")
@rejects("2.3", ("masked | ~domain", "masked"), where="_response_plan")
@rejects("2.2", ("masked.any(-1))", "masked.any(-1) | True)"), where="_response_plan")
@rejects("2.4", ('domain == "keep"', 'domain == "all"'), where="_domain")
def law_response_plan_states(alg: Any) -> None:
    """The prompt is visible, and what lies outside the domain is hidden and never scored; domain all ignores keep."""
    rollout = rollout_of(alg, [RESPONSE] * 60, KEEPS * 20)
    plans = {
        "time": functools.partial(alg.elbo_time_plan, num_states=4, min_t=0.1),
        "count": functools.partial(alg.elbo_count_plan, num_states=4, strata=False),
        "strata": functools.partial(alg.elbo_count_plan, num_states=4, strata=True),
        "pairs": functools.partial(alg.complementary_plan, num_states=4),
    }
    for (name, make), domain in itertools.product(plans.items(), ("keep", "all")):
        inside = rollout.keep if domain == "keep" else torch.ones_like(rollout.keep)
        plan = make(rollout, seeded(2), domain=domain)
        response = plan.hidden[..., 3:]
        assert plan.scored.shape == (4, 60, 4) and not plan.replay and plan.hidden.shape == (4, 60, 7), name
        assert not plan.hidden[..., :3].any(), f"{name}: prompt hidden"
        assert not (plan.scored & ~inside).any() and bool((response | inside).all()), f"{name}: outside the domain"
        assert torch.equal(response & inside, plan.scored), f"{name}: scored is what is hidden inside"
        assert torch.equal(plan.valid, plan.scored.any(-1)), f"{name}: valid"
        assert plan.weight.dtype == torch.float64 and bool((plan.weight > 0).all()), f"{name}: weight"


@judges("2.3")
@rejects("2.3", ("long() + 1, n)", "long() + 1, 0 * n + 99)"))
def law_count_plan_at_the_edge(alg: Any) -> None:
    """The largest uniform number below 1 hides all n positions with weight 1/K, although adding a stratum rounds it to K."""
    rollout = rollout_of(alg, [RESPONSE] * 3, KEEPS)
    edge = torch.full((2, 3), 1 - 2.0**-53, dtype=torch.float64)
    with noise(alg, edge, normal(2, 3, 4).sigmoid()):
        plan = alg.elbo_count_plan(rollout, seeded(), num_states=2, domain="keep", strata=True)
    assert torch.equal(plan.scored[1], rollout.keep)
    close(plan.weight[1], [0.5, 0.5, 0.5], "weight")


@judges("2.3", "5.1")
@rejects(
    "5.1",
    (
        "parts * (ll * plan.weight[..., None]).unflatten(0, (parts, -1)).sum(1",
        "(ll * plan.weight[..., None]).mean(0, keepdim=True",
    ),
)
def law_count_plan_expectation(alg: Any) -> None:
    """The mean is the ELBO of the domain for every K, with and without strata, also where K does not divide n."""
    model = tabular(*MODEL)
    close(elbo_on(model, RESPONSE, frozenset(range(4))), oracle.elbo(model, RESPONSE).item(), "two forms of the ELBO")
    for keep, states, strata in itertools.product(KEEPS, (1, 2, 3), (False, True)):
        u, order = count_noise(sum(keep), 4, states)
        rollout = repeated(alg, RESPONSE, keep, u.shape[1])
        with noise(alg, u, order):
            plan = alg.elbo_count_plan(rollout, seeded(), num_states=states, domain="keep", strata=strata)
        got = ll_of(alg, model, rollout, plan)[0, :, 0].mean()
        close(got, elbo_on(model, RESPONSE, positions(keep)), f"n={sum(keep)} K={states} strata={strata}")


@judges("2.3")
@rejects("2.3", ("masked_fill(~domain, torch.inf).", ""), where="_random_subset")
def law_count_plan_frequencies(alg: Any) -> None:
    """Counts are uniform, and the subsets of a count too; states are independent, or each in its stratum."""
    model, states = tabular(*MODEL), 2
    for keep, strata in itertools.product(KEEPS[:2], (False, True)):
        rollout, n = repeated(alg, RESPONSE, keep, 4000), sum(keep)
        plan = alg.elbo_count_plan(rollout, seeded(4), num_states=states, domain="keep", strata=strata)
        count, pair = plan.scored.sum(-1) - 1, torch.zeros(n, n, dtype=torch.float64)
        edges = [[k / states, (k + 1) / states] if strata else [0.0, 1.0] for k in range(states)]
        law = double([[max(0.0, min(b, (c + 1) / n) - max(a, c / n)) / (b - a) for c in range(n)] for a, b in edges])
        pair = law[0][:, None] * law[1][None]
        frequencies_agree(count[0] * n + count[1], pair.flatten(), f"counts of two states, n={n} strata={strata}")
        for k in range(states):
            chance = torch.zeros(16, dtype=torch.float64)
            for chosen in oracle.all_subsets(4)[1:]:
                if chosen <= positions(keep):
                    chance[sum(2**i for i in chosen)] = law[k][len(chosen) - 1] / math.comb(n, len(chosen))
            frequencies_agree(subset_number(plan.scored[k]), chance, f"subsets of state {k}, n={n}")
        mean_is(
            scored_values(plan, subset_scores(model, RESPONSE, positions(keep))),
            elbo_on(model, RESPONSE, positions(keep)),
            "estimate",
        )


@judges("2.3")
@rejects("2.3", ("device)\n    if strata:", "device)\n    if not strata:"))
def law_strata_do_not_raise_the_variance(alg: Any) -> None:
    """K independent states have a K-th of the variance of one, which splits into counts and subsets. Strata never have more."""
    for seed, n in ((0, 3), (1, 3), (2, 2)):
        model, response, found = tabular(3, 3, seed), RESPONSE[:3], {}
        keep = (1,) * n + (0,) * (3 - n)
        scores = subset_scores(model, response, positions(keep))
        for strata in (False, True):
            u, order = joint_noise(n, 3, 2)
            with noise(alg, u, order):
                rollout = repeated(alg, response, keep, u.shape[1])
                plan = alg.elbo_count_plan(rollout, seeded(), num_states=2, domain="keep", strata=strata)
            found[strata] = variance(scored_values(plan, scores))
        draws = [
            (1 / (n * math.comb(n, len(chosen))), n / len(chosen) * scores[sum(2**i for i in chosen)].item())
            for chosen in oracle.all_subsets(n)[1:]
        ]
        mean = sum(p * x for p, x in draws)
        exact = sum(p * (x - mean) ** 2 for p, x in draws)
        close(found[False], exact / 2, "variance of two independent states")
        assert found[True] < found[False] - 1e-6, f"strata {found[True]}, independent {found[False]}"


@judges("2.4", "5.1")
@rejects("2.4", ("weight = (n + 1).double()", "weight = n.double()"))
def law_complementary_expectation(alg: Any) -> None:
    """The mean is the ELBO of the domain, and each half alone is unbiased too."""
    model = tabular(*MODEL)
    for keep, states in itertools.product(KEEPS, (2, 4)):
        u, order = count_noise(sum(keep) + 1, 4, states // 2)
        rollout = repeated(alg, RESPONSE, keep, u.shape[1])
        with noise(alg, u, order):
            plan = alg.complementary_plan(rollout, seeded(), num_states=states, domain="keep")
        truth = elbo_on(model, RESPONSE, positions(keep))
        close(ll_of(alg, model, rollout, plan)[0, :, 0].mean(), truth, f"n={sum(keep)} K={states}")
        halves = ll_of(alg, model, rollout, plan, level="step")[..., 0] * plan.weight * states
        close(halves.mean(1), [truth] * states, "a state alone")


@judges("2.4")
@rejects("2.4", ("* (n + 1)).floor()", "* n).floor()"))
def law_complementary_frequencies(alg: Any) -> None:
    """The count of a mask is uniform on 0..n, its subset uniform given the count; pairs are independent."""
    model = tabular(*MODEL)
    for keep in KEEPS[:2]:
        rollout, n = repeated(alg, RESPONSE, keep, 4000), sum(keep)
        plan = alg.complementary_plan(rollout, seeded(8), num_states=4, domain="keep")
        chance = torch.zeros(16, dtype=torch.float64)
        for chosen in oracle.all_subsets(4):
            if chosen <= positions(keep):
                chance[sum(2**i for i in chosen)] = 1 / ((n + 1) * math.comb(n, len(chosen)))
        for k in range(4):
            frequencies_agree(subset_number(plan.scored[k]), chance, f"subsets of state {k}, n={n}")
        count = plan.scored.sum(-1)
        uniform = torch.full(((n + 1) ** 2,), 1 / (n + 1) ** 2, dtype=torch.float64)
        frequencies_agree(count[0] * (n + 1) + count[2], uniform, "counts of two pairs")
        truth = elbo_on(model, RESPONSE, positions(keep))
        mean_is(scored_values(plan, subset_scores(model, RESPONSE, positions(keep))), truth, "estimate")


@judges("2.4", "2.3")
@rejects("2.4", ("[masked, inside & ~masked]", "[masked, masked]"))
def law_complementary_variance(alg: Any) -> None:
    """One mask on {0..n} has the variance (1 + 1/n) Var{1..n} + B^2/n; a pair, per token, half of it minus v^2/2."""
    model, response, n = tabular(3, 3), RESPONSE[:3], 3
    u, order = count_noise(n + 1, n, 1)
    rollout = repeated(alg, response, (1, 1, 1), u.shape[1])
    with noise(alg, u, order):
        plan = alg.complementary_plan(rollout, seeded(), num_states=2, domain="keep")
    logp = alg.features(model, rollout, plan, temperature=1.0)["logp"]
    single = 2 * plan.weight[0] * logp[0].sum(-1)
    cells, orders = count_noise(n, n, 1)
    iid = repeated(alg, response, (1, 1, 1), cells.shape[1])
    with noise(alg, cells, orders):
        plain = alg.elbo_count_plan(iid, seeded(), num_states=1, domain="keep", strata=False)
    base = variance(ll_of(alg, model, iid, plain)[0, :, 0])
    bound = oracle.elbo(model, response).item()
    close(variance(single), (1 + 1 / n) * base + bound**2 / n, "variance of one mask on {0..n}")
    for i in range(n):
        token, pair = 2 * plan.weight[0] * logp[0, :, i], (plan.weight[..., None] * logp).sum(0)[:, i]
        close(variance(pair), variance(token) / 2 - pair.mean().item() ** 2 / 2, f"variance of token {i}")


@judges("2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "2.8", "3.1", "3.2", "3.3")
@rejects("2.3", ('if domain not in ("keep", "all"):', "if False:"), where="_domain")
@rejects("2.4", ("or value < least:", "or value < 0:"), where="_check_count")
@rejects("3.1", ("_check_num_states(rollout, num_states)", ""))
@rejects("3.2", ("if name not in rollout.records:", "if False:"), where="record")
@rejects("3.3", ('    _check_count("plan.merge", merge)\n', ""))
def law_plan_refusals(alg: Any) -> None:
    """A wrong option of a plan is refused in one line that names its key, its value and, where it has to, what is allowed."""
    steps, settings = torch.tensor([[0, 1, 2, 3]]), settings_of(Walk(4, 3, "random", 1, 2))
    rollout = rollout_of(alg, [RESPONSE], unmask_step=steps, sampler=settings)
    recorded = dataclasses.replace(rollout, records={"entropy": torch.ones(1, 4).double()})
    elbo, quadrature = (
        {"num_states": 2, "domain": "keep"},
        {"num_nodes": 2, "masks_per_node": 1, "counts": "floor", "domain": "keep"},
    )
    right = {
        alg.mean_field_plan: (rollout, {"p_mask_prompt": 0.3}),
        alg.elbo_time_plan: (rollout, {**elbo, "min_t": 0.1}),
        alg.elbo_count_plan: (rollout, {**elbo, "strata": True}),
        alg.complementary_plan: (rollout, elbo),
        alg.quadrature_plan: (rollout, quadrature),
        alg.block_plan: (rollout, {"num_states": 1, "block_length": 2, "p_mask": 0.1}),
        alg.block_elbo_plan: (rollout, {**elbo, "strata": False}),
        alg.replay_plan: (rollout, {"num_states": 2, "min_entropy": 0.0}),
        alg.entropy_plan: (recorded, {"num_states": 2, "shared": False, "weight": "sum"}),
        alg.merged_plan: (rollout, {"merge": 2}),
    }
    for make, key, wrong, *words in (
        (alg.mean_field_plan, "p_mask_prompt", 1.0),
        (alg.mean_field_plan, "p_mask_prompt", -0.25),
        (alg.elbo_time_plan, "min_t", 1.0),
        (alg.elbo_time_plan, "min_t", -0.5),
        (alg.elbo_time_plan, "num_states", 0),
        (alg.elbo_time_plan, "domain", "eos"),
        (alg.elbo_count_plan, "num_states", 0),
        (alg.elbo_count_plan, "num_states", 2.0),
        (alg.elbo_count_plan, "domain", "eos"),
        (alg.complementary_plan, "num_states", 3, "even"),
        (alg.complementary_plan, "num_states", 1),
        (alg.complementary_plan, "domain", "eos"),
        (alg.quadrature_plan, "num_nodes", 0, "1"),
        (alg.quadrature_plan, "num_nodes", 2.0, "1"),
        (alg.quadrature_plan, "masks_per_node", 0, "1"),
        (alg.quadrature_plan, "counts", "ceil", "rounded"),
        (alg.quadrature_plan, "domain", "eos", "keep"),
        (alg.block_plan, "num_states", 0),
        (alg.block_plan, "block_length", 0),
        (alg.block_plan, "p_mask", 1.5),
        (alg.block_plan, "p_mask", -0.1),
        (alg.block_elbo_plan, "num_states", 1.5),
        (alg.block_elbo_plan, "domain", "eos"),
        (alg.replay_plan, "num_states", 0),
        (alg.replay_plan, "num_states", 5, "4 steps"),
        (alg.entropy_plan, "num_states", 1.0),
        (alg.entropy_plan, "num_states", 5, "4 steps"),
        (alg.entropy_plan, "weight", "max", "token_mean"),
        (alg.merged_plan, "merge", 0),
        (alg.merged_plan, "merge", 1.5),
    ):
        on, options = right[make]
        make(on, seeded(), **options)
        refuses(lambda: make(on, seeded(), **{**options, key: wrong}), f"plan.{key}", repr(wrong), *words)  # noqa: B023
    refuses(lambda: alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.1), "records", "'entropy'")
    refuses(lambda: alg.entropy_plan(rollout, seeded(), **right[alg.entropy_plan][1]), "records", "'entropy'", "needs")


@judges("2.9", "5.1")
@rejects(
    "2.9",
    ("[1.0, 1 / r, 1 / (1 - r)]", "[1.0, 1 / (1 - r), 1 / r]"),
    ("keep & ~chosen", "keep & chosen"),
    ("chosen, ~chosen])", "chosen, chosen])"),
    ("(high - low) * float(", "high * float("),
)
def law_coupled_plan(alg: Any) -> None:
    """Its states hide everything, S, and the complement of S, padding too, with weights 1/2, 1/2r and 1/2(1-r)."""
    rollout = rollout_of(alg, [[1, 0, 2, 1]] * 2, [[1, 1, 1, 1], [1, 1, 1, 0]])
    u, r = double([[0.1, 0.9, 0.34, 0.36], [0.36, 0.34, 0.1, 0.9]]), 0.2 + 0.6 * 0.25
    with noise(alg, double([0.25]), u):
        plan = alg.coupled_plan(rollout, seeded(), low=0.2, high=0.8)
    inside = u < r
    close(plan.scored, torch.stack([rollout.keep, rollout.keep & inside, rollout.keep & ~inside]), "scored")
    close(plan.hidden[..., 3:], torch.stack([inside | True, inside, ~inside]), "hidden")
    assert not plan.hidden[..., :3].any() and not plan.replay
    close(plan.weight, double([[0.5] * 2, [0.5 / r] * 2, [0.5 / (1 - r)] * 2]), "weight")
    drawn = alg.coupled_plan(rollout_of(alg, [[1, 0, 2, 1]] * 4000), seeded(3), low=0.5, high=0.5)
    for i in range(4):
        mean_is(drawn.scored[1, :, i].double() - 0.5, 0.0, "share of S")
    for low, high in ((0.0, 0.5), (0.6, 0.5), (0.5, 1.0)):
        refuses(lambda low=low, high=high: alg.coupled_plan(rollout, seeded(), low=low, high=high), "plan.low", str(low))


@judges("2.10")
@rejects(
    "2.10",
    ("start + progress * (1 - start)", "start"),
    ("schedule or generator", "generator"),
    ("min_t + (1 - min_t) * u", "min_t + u"),
    ("inside.device) < t)", "inside.device) > t)"),
)
def law_scheduled_plan(alg: Any) -> None:
    """A position is hidden and scored where its noise is below t_0 + progress (1 - t_0): in the end everything is."""
    rollout = rollout_of(alg, [[1, 0, 2, 1]] * 2, [[1, 1, 1, 1], [1, 1, 1, 0]])
    u, start = double([[0.1, 0.69, 0.71, 0.9], [0.9, 0.71, 0.69, 0.1]]), 0.2 + 0.8 * 0.25
    for progress, domain in itertools.product((0.0, 0.5, 1.0), ("all", "keep")):
        with noise(alg, double([0.25]), u):
            plan = alg.scheduled_plan(rollout, seeded(), min_t=0.2, domain=domain, progress=progress)
        inside = rollout.keep if domain == "keep" else rollout.keep | True
        masked = (u < start + progress * (1 - start)) & inside
        close(plan.scored, masked[None], "scored")
        close(plan.hidden[0], torch.cat([torch.zeros(2, 3).bool(), masked | ~inside], 1), "hidden")
        close(plan.weight, [[1.0, 1.0]], "weight")
        assert bool(masked.all()) == (progress == 1.0 and domain == "all") and not plan.replay
    many = rollout_of(alg, [[1, 0, 2, 1]] * 4000)
    same = [alg.scheduled_plan(many, seeded(i), min_t=0.1, domain="all", progress=0.0, schedule=seeded(9)) for i in (1, 2)]
    share = 0.1 + 0.9 * torch.rand(1, generator=seeded(9), dtype=torch.float64).item()
    for plan in same:
        mean_is(plan.scored.double() - share, 0.0, "the share comes from the schedule")
    assert not torch.equal(same[0].scored, same[1].scored), "the masks do not"
    refuses(lambda: alg.scheduled_plan(rollout, seeded(), min_t=1.0, domain="all", progress=0.0), "plan.min_t", "1.0")
