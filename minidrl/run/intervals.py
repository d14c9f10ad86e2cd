"""Intervals and tests for means over a few seeds, Student's t and Holm's; Wilson's for a share.

Seeds are taken as independent draws, and their values as normal around the mean. Nothing here needs
more than the standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

ROUNDING = 1e-12  # relative to the largest value: below it a difference is an error of floats


class Interval(NamedTuple):
    """A mean and the limits of its confidence interval."""

    mean: float
    low: float
    high: float


class Paired(NamedTuple):
    """The mean of paired differences, its interval, and the two-sided p-value against mean 0."""

    mean: float
    low: float
    high: float
    p: float


def p_value(t: float, dof: int) -> float:
    """Two-sided p-value P(abs(T) > abs(t)) of Student's t, dof a whole number.

    With x = atan(abs(t) / sqrt(dof)) and c = cos(x)^2, for an even dof

        1 - p = sin(x) (1 + 1/2 c + (1 3)/(2 4) c^2 + .. + c^(dof/2 - 1))
    and for an odd one
        1 - p = 2/pi (x + sin(x) cos(x) (1 + 2/3 c + (2 4)/(3 5) c^2 + .. + c^((dof - 3)/2)))

    where only the first factors are written out (Abramowitz and Stegun, 26.7.3 and 26.7.4). The
    absolute error is about 1e-15.
    Raises: ValueError for a dof that is not a whole number >= 1, or a t that is not a number.
    """
    if not isinstance(dof, int) or dof < 1:
        raise ValueError(f"dof: got {dof!r}; allowed are whole numbers >= 1")
    if math.isnan(t):
        raise ValueError(f"t: got {t}; allowed are numbers")
    x, odd = math.atan(abs(t) / math.sqrt(dof)), dof % 2
    term, total = 1.0, 0.0
    for k in range(dof // 2):
        total += term
        term *= (2 * k + 1 + odd) / (2 * k + 2 + odd) * math.cos(x) ** 2
    inside = 2 / math.pi * (x + math.sin(x) * math.cos(x) * total) if odd else math.sin(x) * total
    return min(1.0, max(0.0, 1 - inside))


def student(p: float, dof: int) -> float:
    """Quantile of Student's t: the number that T stays below with probability p, 0 < p < 1.

    By bisection of the angle of ``p_value``; for 1e-9 < p < 1 - 1e-9 good to six digits or more.
    """
    if not 0 < p < 1:
        raise ValueError(f"p: got {p}; allowed 0 < p < 1")
    if p < 0.5:
        return -student(1 - p, dof)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        t = math.sqrt(dof) * math.tan(middle)
        low, high = (middle, high) if p_value(t, dof) > 2 * (1 - p) else (low, middle)
    return math.sqrt(dof) * math.tan(low)


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """mean +- t s / sqrt(n), with the sample's standard deviation s and n - 1 degrees of freedom.

    Raises: ValueError for fewer than two values, or one that is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"values: got {list(values)}; allowed are two or more finite numbers")
    mean, quantile = statistics.fmean(values), student((1 + level) / 2, len(values) - 1)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """The share successes / n, and Wilson's score interval (1927) for what it estimates.

    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), with p = successes / n and
    z the quantile of the normal distribution. It stays inside 0 to 1, and is no point at 0 or n.
    Raises: ValueError unless 0 <= successes <= n and n >= 1.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes: got {successes} of {n}; allowed 0 to n, and n from 1")
    p, z = successes / n, statistics.NormalDist().inv_cdf((1 + level) / 2)
    middle, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
    low, high = ((middle + side * width) / (1 + z * z / n) for side in (-1, 1))
    return Interval(p, max(0.0, low), min(1.0, high))


def paired(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Paired:
    """Student's paired test of a - b, where a[i] and b[i] share their seed.

    Pairs without any spread have no t: p is 1 where all differences are 0, and 0 where all are the
    same other number. What is below the rounding error of the values counts as 0.
    Raises: ValueError for unequal lengths, and as ``mean_interval`` does.
    """
    if len(a) != len(b):
        raise ValueError(f"pairs: got {len(a)} and {len(b)} values; allowed are equal numbers")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, low, high = mean_interval(differences, level)
    rounding = ROUNDING * max(map(abs, (*a, *b)))
    if max(differences) - min(differences) <= rounding:
        return Paired(mean, mean, mean, 1.0 if abs(mean) <= rounding else 0.0)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Paired(mean, low, high, p_value(mean / error, len(differences) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979), in the order given.

    The i-th smallest of m, i from 0, becomes max over j <= i of min(1, (m - j) p_j). To reject
    where it is below a level keeps the chance of any false rejection below that level, whatever the
    dependence of the tests.
    """
    adjusted, running = [0.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
