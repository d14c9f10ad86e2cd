"""Laws of quadrature, (2.5) and (2.6).

All that a quadrature plan leaves to chance is a mask, or a rounding, per state. `outcomes` hands out all of them, one a row of
the batch, together with their probabilities; these differ between the states of a plan, because their times do.
"""

import functools
import itertools
import math
from typing import Any

import numpy
import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    KEEPS,
    RESPONSE,
    all_orders,
    close,
    double,
    frequencies_agree,
    ll_of,
    noise,
    positions,
    refuses,
    repeated,
    rollout_of,
    scored_values,
    seeded,
    subset_number,
    subset_scores,
    tabular,
)
from minidrl import oracle

COUNTS = ("bernoulli", "rounded", "floor")


@functools.cache
def rule(nodes: int) -> tuple[list[float], list[float]]:
    """Gauss-Legendre on (0, 1) from scratch: the roots of the Legendre polynomial P_N, and 1 / ((1 - x^2) P_N'(x)^2)."""
    legendre = numpy.polynomial.legendre.Legendre.basis(nodes)
    x = sorted(legendre.roots().real.tolist())
    for _ in range(3):  # Newton: the roots of the companion matrix are good to 1e-13 only
        x = [v - legendre(v) / legendre.deriv()(v) for v in x]
    return [(v + 1) / 2 for v in x], [float(1 / ((1 - v * v) * legendre.deriv()(v) ** 2)) for v in x]


def node_draws(t: float, n: int, how: str) -> list[tuple[float, float, frozenset]]:
    """(probability, weight without w, hidden positions) of every outcome at time t, for a response of n tokens."""
    if how == "bernoulli":
        return [(t ** len(m) * (1 - t) ** (n - len(m)), 1 / t, m) for m in oracle.all_subsets(n)]
    count = math.floor(t * n) if how == "floor" else math.floor(1 + t * (n - 1) + 0.5)
    scale = 1 / t if how == "floor" else n / count
    return [(1 / math.comb(n, count), scale, m) for m in oracle.subsets_of_size(n, count)]


def node_moments(model: Any, keep: tuple, t: float, how: str) -> tuple[float, float]:
    """The mean and variance of one state's estimate at time t, from the oracle's scores."""
    n = sum(keep)
    scores = subset_scores(model, RESPONSE[: model.length], positions(keep))
    draws = [(p, scale * scores[sum(2**i for i in m)].item() if m else 0.0) for p, scale, m in node_draws(t, n, how)]
    mean = sum(p * x for p, x in draws)
    return mean, sum(p * (x - mean) ** 2 for p, x in draws)


def expected(model: Any, keep: tuple, nodes: int, how: str) -> float:
    """What the estimator must give on average."""
    return sum(w * node_moments(model, keep, t, how)[0] for t, w in zip(*rule(nodes), strict=True))


def state_noise(t: float, n: int, length: int, how: str) -> list[tuple[float, list[float]]]:
    """(probability, noise of the positions) of every outcome of one state."""
    if how == "bernoulli":
        kept = [(t ** sum(m) * (1 - t) ** (n - sum(m)), m) for m in itertools.product((0, 1), repeat=n)]
        return [(p, [t - 1e-9 if v else t + 1e-9 for v in m] + [0.5] * (length - n)) for p, m in kept]
    orders = all_orders(length)
    return [(1 / len(orders), order) for order in orders]


def scripted(alg: Any, rollout: Any, nodes: int, masks: int, how: str, place: Tensor, domain: str) -> Any:
    """The plan with this noise (K, R, L) for the positions."""
    with noise(alg, place):
        return alg.quadrature_plan(rollout, seeded(), num_nodes=nodes, masks_per_node=masks, counts=how, domain=domain)


def outcomes(alg: Any, keep: tuple, nodes: int, masks: int, how: str, domain: str = "keep") -> tuple[Any, Any, Tensor]:
    """(rollout, plan, chance (K, R)): every outcome of a state is a row, in all states at once."""
    n, length = sum(keep) if domain == "keep" else len(keep), len(keep)
    drawn = [state_noise(t, n, length, how) for t in rule(nodes)[0] for _ in range(masks)]
    chance, place = (double([[outcome[part] for outcome in state] for state in drawn]) for part in range(2))
    rollout = repeated(alg, (RESPONSE * 2)[:length], keep, chance.shape[1])
    return rollout, scripted(alg, rollout, nodes, masks, how, place, domain), chance


def joint_outcomes(alg: Any, length: int, nodes: int, masks: int, how: str) -> tuple[Any, Any, Tensor]:
    """(rollout, plan, chance (R,)): every combination of the outcomes of independent states is a row."""
    drawn = [state_noise(t, length, length, how) for t in rule(nodes)[0] for _ in range(masks)]
    rows = list(itertools.product(*drawn))
    place = double([[row[k][1] for row in rows] for k in range(len(drawn))])
    rollout = repeated(alg, RESPONSE[:length], (1,) * length, len(rows))
    plan = scripted(alg, rollout, nodes, masks, how, place, "keep")
    return rollout, plan, double([math.prod(state[0] for state in row) for row in rows])


def mean_of(plan: Any, chance: Tensor, ll: Tensor) -> float:
    """sum_k E[weight_k ll_k]: the states' probabilities differ, so the mean is taken state by state."""
    return float((chance * plan.weight * ll).sum())


def own_costs(a: list[float]) -> oracle.TabularDenoiser:
    """Every second hidden token costs 2 a(l) nats, the others nothing: mean a(l), and a standard deviation of that size.

    The text is 0, 0, ..: a denoiser, and one for which a mask that hides everything has no choice left.
    """
    length = len(a)
    table = torch.zeros(2**length, length, 2, dtype=torch.float64)
    table[:, 1::2, 1] = -50.0
    for row in range(1, 2**length):
        cost = 2 * a[row.bit_count() - 1]
        table[row, ::2] = double([cost, math.log(-math.expm1(cost))])
    return oracle.TabularDenoiser.from_hidden_table(table)


def key_token(length: int, cost: float) -> oracle.TabularDenoiser:
    """Every hidden token has log-probability -cost while position 0 is hidden, and is certain once it is visible."""
    table = torch.zeros(2**length, length, 2, dtype=torch.float64)
    table[::2, :, 1] = -50.0
    table[1::2] = double([-cost, math.log(-math.expm1(-cost))])
    return oracle.TabularDenoiser.from_hidden_table(table)


def quadrature_mean(alg: Any, model: Any, response: tuple, nodes: int) -> float:
    """The exact mean of the Bernoulli form on any model of that length."""
    rollout, plan, chance = outcomes(alg, (1,) * model.length, nodes, 1, "bernoulli")
    rollout = rollout_of(alg, [response] * len(rollout.response))
    return mean_of(plan, chance, ll_of(alg, model, rollout, plan, level="step")[..., 0])


@judges("2.5")
@rejects("2.5", ("torch.from_numpy(w / 2)", "torch.from_numpy(w)"), ("from_numpy((x + 1)", "from_numpy((1 - x)"))
def law_gauss_legendre(alg: Any) -> None:
    """Nodes ascend in (0, 1), are symmetric, and have positive weights that sum to 1, with the published numbers."""
    for nodes in range(1, 9):
        t, w = alg.gauss_legendre(nodes)
        assert t.dtype == w.dtype == torch.float64 and t.shape == w.shape == (nodes,)
        close(t, rule(nodes)[0], f"{nodes} nodes", 1e-13)
        close(w, rule(nodes)[1], f"{nodes} weights", 1e-13)
        close(t + t.flip(0), torch.ones(nodes), "symmetric nodes", 1e-13)
        close(w - w.flip(0), torch.zeros(nodes), "symmetric weights", 1e-13)
        close(w.sum(), 1.0, "sum of the weights", 1e-13)
    close(alg.gauss_legendre(2)[0], [0.2113248654, 0.7886751346], "two nodes", 1e-9)
    close(alg.gauss_legendre(3)[0], [0.1127016654, 0.5, 0.8872983346], "three nodes", 1e-9)
    close(alg.gauss_legendre(3)[1], [5 / 18, 4 / 9, 5 / 18], "three weights")
    for wrong in (0, -1, 2.0):
        refuses(lambda wrong=wrong: alg.gauss_legendre(wrong), "plan.num_nodes", str(wrong), "1")


@judges("2.6", "5.1")
@rejects("2.6", ("(1 + t * (n - 1) + 0.5).floor()", "(t * n + 0.5).floor()"), where="_count_at")
def law_quadrature_expectation(alg: Any) -> None:
    """The mean is the sum of w times the mean at t, for every kind of count, every n, and one mask or two."""
    model = tabular(4, 3)
    for how, keep, nodes, masks in itertools.product(COUNTS, KEEPS, (1, 2, 3), (1, 2)):
        rollout, plan, chance = outcomes(alg, keep, nodes, masks, how)
        close(chance.sum(1), torch.ones(nodes * masks), "the outcomes are all there")
        got = mean_of(plan, chance, ll_of(alg, model, rollout, plan, level="step")[..., 0])
        close(got, expected(model, keep, nodes, how), f"{how}, n={sum(keep)}, {nodes} nodes, {masks} masks")
    integrand = [w * oracle.elbo_integrand(model, RESPONSE, t).item() for t, w in zip(*rule(2), strict=True)]
    close(expected(model, KEEPS[0], 2, "bernoulli"), sum(integrand), "bernoulli is the rule on g")


@judges("2.6", "2.5")
@rejects(
    "2.5",
    ("numpy.polynomial.legendre.leggauss(", "(numpy.arange(num_nodes) + 0.5) * 2 / num_nodes - 1, numpy.full(num_nodes, 2 / "),
)
def law_quadrature_is_exact_from_half_the_length(alg: Any) -> None:
    """With bernoulli counts the mean is the ELBO itself once N >= n/2, because g has degree n - 1."""
    for length, seed in ((3, 0), (4, 0), (6, 1)):
        model = tabular(length, 2, seed)
        response = ((1, 0) * 3)[:length]
        truth = oracle.elbo(model, response).item()
        enough = math.ceil(length / 2)
        for nodes in (enough, enough + 1):
            close(quadrature_mean(alg, model, response, nodes), truth, f"n={length}, {nodes} nodes")
        for nodes in range(1, enough):
            gap = abs(quadrature_mean(alg, model, response, nodes) - truth)
            assert 1e-4 < gap, f"n={length}: {nodes} nodes are exact, by accident of the fixture"


@judges("2.6")
@rejects("2.6", ("(1 / t).expand(-1, len(n)", "n / (t * n).floor("), where="_count_at")
def law_constant_models_show_the_scale(alg: Any) -> None:
    """Where logp is c everywhere, fixed counts give n c, and floor gives sum of w floor(t n)/(t n) of it."""
    published = {(4, 2): 0.475, (4, 3): 0.679, (8, 2): 0.771, (8, 3): 0.718, (16, 3): 0.872, (64, 2): 0.976, (256, 3): 0.9916}
    for (length, nodes), scale in published.items():
        rollout = rollout_of(alg, torch.ones(2, length, dtype=torch.long))
        for how in ("rounded", "floor"):
            options = {"num_nodes": nodes, "masks_per_node": 1, "counts": how, "domain": "keep"}
            plan = alg.quadrature_plan(rollout, seeded(61), **options)
            got = (plan.weight * plan.scored.sum(-1)).sum(0) / length
            exact = sum(w * math.floor(t * length) / (t * length) for t, w in zip(*rule(nodes), strict=True))
            close(got, [exact if how == "floor" else 1.0] * 2, f"{how}, n={length}, {nodes} nodes")
        close(exact, scale, "published factor", 6e-4)
    plan = alg.quadrature_plan(
        rollout_of(alg, [[1] * 8]), seeded(), num_nodes=3, masks_per_node=1, counts="floor", domain="all"
    )
    assert plan.scored.any(-1).tolist() == [[False], [True], [True]] and plan.network_calls == 2, "the first node is lost"


@judges("2.6")
@rejects("2.6", ("w = w / masks_per_node", "w = w**2 / masks_per_node"))
def law_quadrature_variance(alg: Any) -> None:
    """The variance is the sum of w^2 Var(.|t) / masks. The times add nothing, and twice the masks halve it."""
    model, length = tabular(3, 3), 3
    scores = subset_scores(model, RESPONSE[:length], frozenset(range(length)))
    for how in ("bernoulli", "rounded", "floor"):
        found = {}
        for masks in (1, 2):
            _, plan, chance = joint_outcomes(alg, length, 2, masks, how)
            values = scored_values(plan, scores)
            mean = float((chance * values).sum())
            found[masks] = float((chance * (values - mean).square()).sum())
            each = [node_moments(model, (1,) * length, t, how)[1] for t in rule(2)[0]]
            close(found[masks], sum(w * w * v for w, v in zip(rule(2)[1], each, strict=True)) / masks, f"{how}, {masks} masks")
        close(found[2], found[1] / 2, f"{how}: twice the masks")


@judges("2.3", "2.6")
@rejects("2.3", ("inside, count)", "inside, torch.minimum(count + 1, n))"))
def law_two_models_with_known_variances(alg: Any) -> None:
    """Two models have variances by formula: with costs of its own V_mask = L sum a^2/l (L-l)/(L-1); with a key token the masks
    have 2/3 of all.

    The factor is that of drawing l of L positions without replacement: nothing is left to choose at l = L.
    """
    length = 4
    a = [-(0.2 + 1.8 * (count / length) ** 2) for count in range(1, length + 1)]
    orders = double(all_orders(length))
    pick = torch.cartesian_prod(torch.arange(length), torch.arange(len(orders))).T
    zeros = repeated(alg, (0,) * length, (1,) * length, pick.shape[1])
    with noise(alg, (pick[:1].double() + 0.5) / length, orders[pick[1:]]):
        plan = alg.elbo_count_plan(zeros, seeded(), num_states=1, domain="keep", strata=False)
    found = {}
    for name, model in (("own", own_costs(a)), ("key", key_token(length, 1.5))):
        by_count = ll_of(alg, model, zeros, plan)[0, :, 0].detach().unflatten(0, (length, -1))
        found[name] = by_count.mean(1).var(correction=0).item(), by_count.var(1, correction=0).mean().item()
    within = [(length - count) / (length - 1) for count in range(1, length + 1)]
    of_mask = length * sum(x * x / count * w for count, (x, w) in enumerate(zip(a, within, strict=True), 1))
    close(found["own"], [length**2 * double(a).var(correction=0), of_mask], "tokens with costs of their own")
    close(found["key"], [1.5**2 * (length**2 - 1) / 12, 1.5**2 * (length**2 - 1) / 6], "one token that decides")
    for how in ("bernoulli", "rounded"):
        rollout, plan, chance = outcomes(alg, (1,) * length, 2, 1, how)
        rollout = rollout_of(alg, [(0,) * length] * len(rollout.response))
        value = plan.weight * ll_of(alg, own_costs(a), rollout, plan, level="step")[..., 0].detach()
        got = (chance * value.square()).sum(1) - (chance * value).sum(1).square()
        for k, (t, w) in enumerate(zip(*rule(2), strict=True)):
            if how == "rounded":
                count = math.floor(1.5 + t * (length - 1))
                close(got[k], (w * length * a[count - 1]) ** 2 / count * within[count - 1], f"{how}, t = {t}")
                continue
            law = [(math.comb(length, c) * t**c * (1 - t) ** (length - c), c, a[c - 1]) for c in range(1, length + 1)]
            second = sum(p * ((c * x / t) ** 2 + c * x * x / t**2 * within[c - 1]) for p, c, x in law)
            close(got[k], w * w * (second - sum(p * c * x / t for p, c, x in law) ** 2), f"{how}, t = {t}")


@judges("2.6")
@rejects("2.6", ("+ 0.5).floor()", "+ 0.0).floor()"), where="_count_at")
def law_quadrature_states(alg: Any) -> None:
    """States are node-major with weights w/t or w n/k over the masks, and hide and score the domain only."""
    rollout = rollout_of(alg, [RESPONSE] * 30, KEEPS * 10)
    for how, domain in itertools.product(COUNTS, ("keep", "all")):
        inside = rollout.keep if domain == "keep" else torch.ones_like(rollout.keep)
        options = {"num_nodes": 3, "masks_per_node": 2, "counts": how, "domain": domain}
        plan = alg.quadrature_plan(rollout, seeded(62), **options)
        assert plan.scored.shape == (6, 30, 4) and plan.weight.shape == (6, 30) and not plan.replay
        assert not plan.hidden[..., :3].any(), f"{how}: prompt hidden"
        assert not (plan.scored & ~inside).any() and bool((plan.hidden[..., 3:] | inside).all()), f"{how}: outside the domain"
        assert torch.equal(plan.hidden[..., 3:] & inside, plan.scored), f"{how}: scored is what is hidden inside"
        assert torch.equal(plan.valid, plan.scored.any(-1)), f"{how}: valid"
        for k, b in itertools.product(range(6), range(30)):
            t, w, n = rule(3)[0][k // 2], rule(3)[1][k // 2], int(inside[b].sum())
            count = int(plan.scored[k, b].sum())
            by_time = how in ("bernoulli", "floor")
            close(plan.weight[k, b], w / 2 / t if by_time else w / 2 * n / count, f"{how}: weight")
            assert how == "bernoulli" or count in {len(m) for _, _, m in node_draws(t, n, how)}, f"{how}: {count} hidden of {n}"


@judges("2.6")
@rejects("2.6", ("_uniform((len(t),", "_uniform((1,"))
def law_quadrature_frequencies(alg: Any) -> None:
    """With real noise the hidden sets have their probabilities, and states are independent, also those of one node."""
    for how, keep in itertools.product(COUNTS, KEEPS[:2]):
        rollout, n = repeated(alg, RESPONSE, keep, 4000), sum(keep)
        options = {"num_nodes": 2, "masks_per_node": 2, "counts": how, "domain": "keep"}
        plan = alg.quadrature_plan(rollout, seeded(63), **options)
        chance = torch.zeros(4, 16, dtype=torch.float64)
        for k in range(4):
            for p, _, hidden in node_draws(rule(2)[0][k // 2], n, how):
                chance[k, sum(2**i for i in hidden)] += p
            frequencies_agree(subset_number(plan.scored[k]), chance[k], f"{how}, n={n}, state {k}")
        for a, b in ((0, 1), (2, 3), (1, 2)):
            pair = subset_number(plan.scored[a]) * 16 + subset_number(plan.scored[b])
            frequencies_agree(pair, (chance[a][:, None] * chance[b]).flatten(), f"{how}, n={n}, states {a} and {b}")
