"""Every likelihood estimator against the exact values of the oracle: one table, by enumeration.

python -m research.benches.estimators
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch

from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import oracle
from minidrl.sampler import Sampler

ESTIMATOR_COLUMNS = (
    *("estimator", "network calls", "bias to ELBO", "bias to log p", "std"),
    "sampler",
)


def _sdmc(*given: Any, num_states: int, counts: str) -> alg.Plan:
    how = {"num_nodes": num_states, "masks_per_node": 1, "domain": "keep"}
    return alg.quadrature_plan(*given, **how, counts=counts)


def _mean_field(*given: Any, num_states: int) -> alg.Plan:
    return alg.mean_field_plan(*given, p_mask_prompt=0.0)


# The estimators of log p to judge, at equal numbers of network calls.
ESTIMATORS: dict[str, Callable[..., alg.Plan]] = {
    "mean field": _mean_field,
    "ELBO, time": partial(alg.elbo_time_plan, domain="keep", min_t=1e-3),
    "ELBO, count": partial(alg.elbo_count_plan, domain="keep", strata=False),
    "ELBO, count, strata": partial(alg.elbo_count_plan, domain="keep", strata=True),
    "ELBO, arcs": partial(alg.arc_plan, domain="keep"),
    "ELBO, complementary": partial(alg.complementary_plan, domain="keep"),
    "block ELBO": partial(alg.block_elbo_plan, domain="keep", strata=False),
    "SDMC": partial(_sdmc, counts="bernoulli"),
    "SDMC, fixed counts": partial(_sdmc, counts="rounded"),
    "SDMC, as released": partial(_sdmc, counts="floor"),
}
ESTIMATOR_CALLS = {"mean field": (1,), "ELBO, complementary": (2, 4), "SDMC": (1, 2, 3)}


# The law of each of them: what it draws, with probabilities, written once more and without the
# plans. An estimate is a sum of independent draws; each is a list of (probability, value).

Draw = list[tuple[float, float]]
Scores = Mapping[frozenset[int], float]  # S(M), log-probability of the hidden tokens, of every M


def _fixed(scores: Scores, count: int, scale: float) -> Draw:
    """One of the masks that hide ``count`` positions."""
    values = [scale * score for hidden, score in scores.items() if len(hidden) == count]
    return [(1 / len(values), value) for value in values]


def _independent(scores: Scores, t: float, scale: float) -> Draw:
    """Each position hidden with probability t."""
    n = max(map(len, scores))
    return [(t ** len(m) * (1 - t) ** (n - len(m)), scale * score) for m, score in scores.items()]


def _mean_field_law(scores: Scores, calls: int) -> list[Draw]:
    return [_fixed(scores, max(map(len, scores)), 1.0)]


def _time_law(scores: Scores, calls: int, *, min_t: float) -> list[Draw]:
    # The time is integrated by quadrature in log t, in which 1/t is nothing sudden.
    x, w = numpy.polynomial.legendre.leggauss(60)
    draw = []
    for t, weight in zip(min_t ** ((1 - x) / 2), w, strict=True):
        density = -math.log(min_t) / 2 * t / (1 - min_t) * weight
        draw += [(density * p, value) for p, value in _independent(scores, t, 1 / (calls * t))]
    return [draw] * calls


def _stratum(n: int, low: float, high: float) -> dict[int, float]:
    """Count -> probability, for a time uniform from ``low`` to ``high``."""
    share = {l: min(high, l / n) - max(low, (l - 1) / n) for l in range(1, n + 1)}
    return {l: part / (high - low) for l, part in share.items() if part > 0}


def _count_law(scores: Scores, calls: int, *, strata: bool) -> list[Draw]:
    n, law = max(map(len, scores)), []
    for k in range(calls):
        low, high = (k / calls, (k + 1) / calls) if strata else (0.0, 1.0)
        draw = []
        for count, share in _stratum(n, low, high).items():
            draw += [(share * p, value) for p, value in _fixed(scores, count, n / calls / count)]
        law.append(draw)
    return law


def _arc_law(scores: Scores, calls: int) -> list[Draw]:
    # The states share a circle: one draw of all of them.
    everything = max(scores, key=len)
    n, draw = len(everything), []
    strata = [_stratum(n, k / calls, (k + 1) / calls) for k in range(calls)]
    circles = list(itertools.permutations(everything))
    for counts in itertools.product(*strata):
        share = math.prod(law[count] for law, count in zip(strata, counts, strict=True))
        for circle in circles:
            around = itertools.cycle(circle)
            arcs = [frozenset(itertools.islice(around, count)) for count in counts]
            value = sum(n / calls / len(arc) * scores[arc] for arc in arcs)
            draw.append((share / len(circles), value))
    return [draw]


def _pair_law(scores: Scores, calls: int) -> list[Draw]:
    everything, draw = max(scores, key=len), []
    n = len(everything)
    weighted = {m: (n + 1) / calls * score / max(1, len(m)) for m, score in scores.items()}
    for m, value in weighted.items():
        draw.append((1 / (n + 1) / math.comb(n, len(m)), value + weighted[everything - m]))
    return [draw] * (calls // 2)


def _sdmc_law(scores: Scores, calls: int, *, counts: str) -> list[Draw]:
    n, law = max(map(len, scores)), []
    x, w = numpy.polynomial.legendre.leggauss(calls)
    for t, weight in zip((x + 1) / 2, w / 2, strict=True):
        if counts == "bernoulli":
            law.append(_independent(scores, t, weight / t))
        elif counts == "rounded":
            count = math.floor(1.5 + t * (n - 1))
            law.append(_fixed(scores, count, weight * n / count))
        else:
            law.append(_fixed(scores, math.floor(t * n), weight / t))
    return law


LAWS: dict[str, Callable[..., list[Draw]]] = {
    "mean field": _mean_field_law,
    "ELBO, time": partial(_time_law, min_t=1e-3),
    "ELBO, count": partial(_count_law, strata=False),
    "ELBO, count, strata": partial(_count_law, strata=True),
    "ELBO, arcs": _arc_law,
    "ELBO, complementary": _pair_law,
    "block ELBO": partial(_count_law, strata=False),  # of each block
    "SDMC": partial(_sdmc_law, counts="bernoulli"),
    "SDMC, fixed counts": partial(_sdmc_law, counts="rounded"),
    "SDMC, as released": partial(_sdmc_law, counts="floor"),
}


def exact_moments(name: str, model: oracle.TabularDenoiser, response: oracle.State, calls: int) -> tuple[float, float]:
    """Mean and standard deviation (nats) of an estimator, by enumeration of all that it draws.

    The block ELBO has two blocks. Raises KeyError for a name that is not in ``LAWS``.
    """
    sizes = len(response) // 2 if name == "block ELBO" else len(response)
    law = []
    for scores in _scores(model, response, sizes):
        law += LAWS[name](scores, calls)
    moments = [oracle.moments(draw) for draw in law]
    mean, variance = (float(sum(parts)) for parts in zip(*moments, strict=True))
    return mean, math.sqrt(max(0.0, variance))


@torch.no_grad()
def _scores(model: oracle.TabularDenoiser, response: oracle.State, size: int) -> list[Scores]:
    """S(M) of every mask in each block of ``size`` positions, the blocks after it hidden."""
    found = []
    for first in range(0, len(response), size):
        later, scores = frozenset(range(first + size, len(response))), {}
        for chosen in oracle.all_subsets(size):
            hidden = frozenset(first + i for i in chosen)
            logp = oracle.token_logp(model, response, hidden | later)
            scores[chosen] = float(sum(logp[i] for i in hidden))
        found.append(scores)
    return found


def estimator_rows(length: int = 6, vocab_size: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Bias and standard deviation (nats) of every likelihood estimator: exact values.

    The model is a random table of conditionals, small enough to enumerate: its ELBO is computed
    over all masks and its any-order likelihood by the 2^L dynamic programme. Mean and standard
    deviation of each estimator are sums over all that it may draw, at 1, 2 and 4 network calls (one
    that needs pairs starts at 2, one that has a single state stays at 1). Draws would not do: the
    tail of the time form is too heavy for any number of them that is cheap.

    "sampler" says whose log p, and with it which ELBO: of the sampler that reveals one position at
    a time in random order, anywhere or in one block (half of ``length``) after the other. The block
    ELBO estimates the second: `oracle.block_elbo`.
    """
    model = oracle.TabularDenoiser.random(length, vocab_size, torch.Generator().manual_seed(seed))
    response, size = tuple(i % vocab_size for i in range(length)), length // 2
    exact, log_p = oracle.elbo(model, response), oracle.any_order_log_likelihood(model, response)
    anywhere = (exact.item(), log_p.item(), "random order")
    exact = oracle.block_elbo(model, response, size)
    log_p = oracle.block_log_likelihood(model, response, size)
    in_blocks = (exact.item(), log_p.item(), f"random order in blocks of {size}")
    rows = []
    for name in ESTIMATORS:
        for calls in ESTIMATOR_CALLS.get(name, (1, 2, 4)):
            mean, std = exact_moments(name, model, response, calls)
            exact, log_p, order = in_blocks if name == "block ELBO" else anywhere
            values = (name, calls, mean - exact, mean - log_p, std, order)
            rows.append(dict(zip(ESTIMATOR_COLUMNS, values, strict=True)))
    return rows


def sample(name: str, model: oracle.TabularDenoiser, response: oracle.State, calls: int, draws: int) -> torch.Tensor:
    """That many estimates by the shipped plan, which the law of its name must describe."""
    rollout = _copies(response, draws)
    plan = ESTIMATORS[name](rollout, torch.Generator().manual_seed(0), num_states=calls)
    logp = feat.features(model, rollout, plan, temperature=1.0, size=1 << 16)["logp"]
    return alg.reduce_logp(logp, plan, level="sequence", normalizer=None).flatten()


def _copies(response: tuple[int, ...], count: int) -> alg.Rollout:
    """Of one response, by a sampler with two blocks; only the block ELBO looks at it."""
    sizes = {"length": len(response), "block_length": len(response) // 2, "tokens_per_step": 1}
    sampler = Sampler(order="random", temperature=1.0, **sizes)
    row = torch.tensor(response).expand(count, -1)
    keep = torch.ones_like(row, dtype=torch.bool)
    empty, never = torch.zeros(count, 0, dtype=torch.long), torch.full_like(row, -1)
    logp = torch.zeros(row.shape).double()
    return alg.Rollout(empty, empty.bool(), row, keep, never, logp, 1, sampler)


if __name__ == "__main__":
    import pandas

    print(pandas.DataFrame(estimator_rows()).to_string(index=False, float_format="{:.2f}".format))
