"""research/stats.py against printed tables and worked examples; Holm against its definition as a closed test."""

import itertools
import random

import pytest

from research import stats


def test_an_interval_by_hand():
    """Of 1, 2, 3: s / sqrt(3) = 0.57735, and t of 2 degrees of freedom is 4.303."""
    assert stats.mean_interval([1, 2, 3]) == pytest.approx((2, 2 - 4.303 * 0.57735, 2 + 4.303 * 0.57735), abs=1e-3)


def test_sleep_of_ten_patients():
    """Student (1908), as R's documentation of t.test prints it: t = 4.0621, p = 0.002833, 0.7001142 to 2.4598858."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = stats.paired(second, first)
    assert found == pytest.approx((1.58, 0.7001142, 2.4598858, 0.002833), abs=5e-7)
    assert stats.paired(first, second) == pytest.approx((-1.58, -2.4598858, -0.7001142, 0.002833), abs=5e-7)
    assert stats.mean_interval([y - x for x, y in zip(first, second, strict=True)]) == pytest.approx(found[:3])


def test_pairs_without_spread():
    assert stats.paired([0.3, 0.4, 0.1], [0.3, 0.4, 0.1]) == (0, 0, 0, 1)
    assert stats.paired([0.3, 0.4], [0.1, 0.2]) == pytest.approx((0.2, 0.2, 0.2, 0))  # 0.3 - 0.1 != 0.4 - 0.2 in floats
    assert stats.paired([0.1 + 0.2, 0.0], [0.3, 0.0]).p == 1  # nor is 0.1 + 0.2 = 0.3
    assert 0.2 < stats.paired([1e-9, 3e-9], [0.0, 0.0]).p < 0.4  # small is not nothing


def test_holm_by_hand():
    """0.005 4 = 0.02; 0.01 3 = 0.03; 0.03 2 = 0.06; 0.04 is below the one before it and becomes 0.06."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.6, 0.9]) == [1, 1] and stats.holm([]) == []


def test_holm_is_the_closed_test_of_bonferroni():
    """A hypothesis is rejected if every set of hypotheses that holds it is, by Bonferroni."""
    noise = random.Random(0)
    for _ in range(30):
        p = [round(noise.random() ** 3, 2) for _ in range(6)]
        sets = [s for n in range(1, 7) for s in itertools.combinations(range(6), n)]
        closed = [max(min(1, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(6)]
        assert stats.holm(p) == pytest.approx(closed)


def test_values_that_make_no_interval_are_refused():
    for values in ([1.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="allowed are two or more finite numbers"):
            stats.mean_interval(values)
