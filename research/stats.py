"""Means over a few seeds: Student's t and Holm's correction.

Seeds are taken as independent draws, and their values as normal around the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t

ROUNDING = 1e-12  # relative to the largest value: a difference below it is an error of floats


class Interval(NamedTuple):
    """A mean and the limits of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


class Paired(NamedTuple):
    """The mean of paired differences, its 95 % interval, and the two-sided p-value against mean 0."""

    mean: float
    low: float
    high: float
    p: float


def student(p: float, dof: int) -> float:
    """Quantile of Student's t: the number that T stays below with probability p."""
    return float(t.ppf(p, dof))


def mean_interval(values: Sequence[float]) -> Interval:
    """mean +- t s / sqrt(n), with the sample's standard deviation s and n - 1 degrees of freedom.

    ValueError for fewer than two values, or one that is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"values: got {list(values)}; allowed are two or more finite numbers")
    mean, n = float(np.mean(values)), len(values)
    half = student(0.975, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Student's paired test of a - b, where a[i] and b[i] share their seed.

    Without any spread there is no t: p is 1 where all differences are 0, and 0 where all are the
    same other number.
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, low, high = mean_interval(differences)
    rounding = ROUNDING * max(map(abs, (*a, *b)))
    if max(differences) - min(differences) <= rounding:
        return Paired(mean, mean, mean, 1.0 if abs(mean) <= rounding else 0.0)
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return Paired(mean, low, high, float(2 * t.sf(abs(mean / error), len(differences) - 1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979), in the order given.

    The i-th smallest of m, i from 0, becomes the maximum over j <= i of min(1, (m - j) p_j). To
    reject where it is below a level keeps the chance of any false rejection below that level,
    whatever the dependence of the tests.
    """
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
