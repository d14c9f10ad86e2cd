"""How much a weight still says about the ratio: `python research/benchmarks/weight_signal.py` (half a minute) writes weight_signal.json.

A response has the true log-ratio delta; a method sees u = delta + noise and turns it into w = min(exp(u), CAP) / (sum over its
group). Two responses, one with delta = +d and one with -d, should be told apart by their weights.

The noise is that of the ELBO in its count form (2.3) with K states in K strata, on the model that notebook 05 solves: the
log-probability of a token has the mean a(l) = -(0.2 + 1.8 (l / L)^2) when l of L tokens are hidden, and a standard deviation
of the same size over the tokens of a response. The l hidden ones are drawn without replacement, so that

    Var[Z | l] = (L / l)^2 l a(l)^2 (L - l) / (L - 1),    Var[estimate] = sum over the strata k of Var_k[Z] / K^2,

where Var_k has the mean of Var[Z | l] and the variance of L a(l), both over the counts l of stratum k. The noise is taken as
normal with this variance s^2.

    fresh    old and new value have masks of their own: noise sqrt(2) s, whatever delta
    shared   both have the same masks. ASSUMED: the update scales the log-probability of every token, in every state, by the
             same factor. Then the estimated log-ratio is delta / B times the estimate of the ELBO B, and its noise is
             s abs(delta / B): none at delta = 0

The scales: "sequence" takes u in nats of the response, "token mean" divides it by L before the exponential.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor

LENGTHS, STATES = (6, 12, 24, 64, 128, 256), (1, 2, 4, 8)
SCALES, MASKS = ("token mean", "sequence"), ("fresh", "shared")
DRIFTS = {"1 nat a response": lambda length: 1.0, "0.1 nat a token": lambda length: 0.1 * length}  # d, nats of the response
GROUP, CAP, NOTHING = 16, 6.0, 0.01  # responses; of stabledrl (epsilon = 5); a weight below this share of 1 / GROUP is nothing
GROUPS = 1 << 16
PHI = NormalDist().cdf


def solved(length: int) -> list[float]:
    """a(1) .. a(length): the mean log-probability of a hidden token, nats."""
    return [-(0.2 + 1.8 * (count / length) ** 2) for count in range(1, length + 1)]


def stratum(length: int, states: int, k: int) -> list[float]:
    """P(l = 1) .. P(l = length): l = floor(u length) + 1, u uniform in the k-th of ``states`` equal parts of (0, 1]."""
    low, high = k / states, (k + 1) / states
    inside = [max(0.0, min(high, (i + 1) / length) - max(low, i / length)) for i in range(length)]
    return [states * x for x in inside]


def mask_variances(a: list[float]) -> list[float]:
    """Var[Z | l] for l = 1 .. length, nats squared."""
    length = len(a)
    return [(length * x) ** 2 / l * ((length - l) / max(1, length - 1)) for l, x in enumerate(a, 1)]


def estimator_variance(a: list[float], states: int) -> float:
    """Of the count form with ``states`` states, one in each stratum, nats squared."""
    length, mask, total = len(a), mask_variances(a), 0.0
    for k in range(states):
        chance = stratum(length, states, k)
        mean = sum(p * length * x for p, x in zip(chance, a, strict=True))
        total += sum(p * ((length * x - mean) ** 2 + v) for p, x, v in zip(chance, a, mask, strict=True))
    return total / states**2


def deviation(length: int, states: int, masks: str, delta: float) -> float:
    """Standard deviation of the estimated log-ratio of a response whose true one is delta, nats."""
    s = math.sqrt(estimator_variance(solved(length), states))
    return math.sqrt(2) * s if masks == "fresh" else s * abs(delta / sum(solved(length)))


def auc(delta: float, spread: float, edge: float) -> float:
    """P(weight of +delta > weight of -delta), ties half; both log-ratios normal with this deviation, cut at ``edge``.

    Two log-ratios beyond the edge have the same weight: the pairs that stood in order there become ties.
    """
    if not spread:
        return 0.5 if -delta >= edge else 1.0
    both, above = beyond(delta, spread, edge) * beyond(-delta, spread, edge), PHI(math.sqrt(2) * delta / spread)
    x = torch.linspace(edge, max(edge, delta + 8 * spread), 2001, dtype=torch.float64)  # of the better one: trapezium rule
    density = torch.exp(-(((x - delta) / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
    lower = torch.special.ndtr((x + delta) / spread) - PHI((edge + delta) / spread)
    return above - float(torch.trapezoid(density * lower, x)) + both / 2


def beyond(mean: float, spread: float, edge: float) -> float:
    """P(x >= edge) of a normal x, or of a number."""
    return 1 - PHI((edge - mean) / spread) if spread else float(mean >= edge)


def weights(normal: Tensor, delta: float, own: float, others: float, divisor: float) -> Tensor:
    """(groups, GROUP): the weight of each response where its log-ratio is delta and that of the others 0, with this noise.

    normal (groups, GROUP); own, others: deviations of the log-ratios in nats of the response; divisor: 1 or the length.
    Each response is in turn the one that moved: one that did not move has the mean weight 1 / GROUP exactly, whatever the
    draw, and sixteen weights of a group have less error than one.
    """
    edge = math.log(CAP)
    rest = (others * normal / divisor).clamp(max=edge)
    largest = rest.amax(1, keepdim=True)
    still = (rest - largest).exp()
    moved = (((delta + own * normal) / divisor).clamp(max=edge) - largest).exp()
    return moved / (still.sum(1, keepdim=True) - still + moved)


def signal(length: int, states: int, scale: str, masks: str, drift: str, normal: Tensor) -> dict:
    """What a weight says: one line of the result."""
    d, divisor = DRIFTS[drift](length), float(length) if scale == "token mean" else 1.0
    edge, own, rest = math.log(CAP) * divisor, deviation(length, states, masks, d), deviation(length, states, masks, 0.0)
    found = {sign: weights(normal, sign * d, own if sign else rest, rest, divisor) for sign in (-1, 0, 1)}
    mean = {sign: float(w.mean()) for sign, w in found.items()}
    return {
        "length": length,
        "states": states,
        "scale": scale,
        "masks": masks,
        "drift": drift,
        "deviation": own / divisor,  # of the log-ratio of a response with delta = d or -d
        "auc": auc(d, own, edge),
        "mean_weight": [mean[-1], mean[0], mean[1]],
        "mean_weight_error": max(float(found[sign].mean(1).std()) for sign in (-1, 1)) / math.sqrt(len(normal)),  # standard
        "exact_weight": [float(weights(torch.zeros_like(normal[:1]), x * d, 0.0, 0.0, divisor)[0, 0]) for x in (-1, 0, 1)],
        "at_cap": beyond(0.0, rest, edge),
        "nothing": float((found[0] * GROUP < NOTHING).double().mean()),
        "effective_size": effective_size(normal, rest / divisor),
    }


def effective_size(normal: Tensor, spread: float) -> float:
    """Mean of 1 / sum w^2 over the groups at delta = 0: GROUP where all weights are equal."""
    w = (spread * normal).clamp(max=math.log(CAP)).softmax(1)
    return float((1 / w.square().sum(1)).mean())


def measured(lengths=LENGTHS, states=STATES, groups: int = GROUPS) -> list[dict]:
    """Every case, with the same normal numbers."""
    normal = torch.randn(groups, GROUP, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    every = itertools.product(DRIFTS, SCALES, MASKS, lengths, states)
    return [signal(length, k, scale, masks, drift, normal) for drift, scale, masks, length, k in every]


def rounded(line: dict) -> dict:
    """Five digits."""
    digits = lambda x: [digits(y) for y in x] if isinstance(x, list) else float(f"{x:.5g}") if isinstance(x, float) else x  # noqa: E731
    return {key: digits(value) for key, value in line.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "weight_signal.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.write_text("".join(json.dumps(rounded(line)) + "\n" for line in measured()))


if __name__ == "__main__":
    main()
