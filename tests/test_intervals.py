"""Student's t against printed tables and a numerical integral, Holm against its definition as a closed test."""

import itertools
import math
import random

import pytest

from minidrl.run import intervals

# Tables of textbooks: degrees of freedom, two-sided p, t.
TABLE = [(1, 0.05, 12.706), (2, 0.05, 4.303), (3, 0.05, 3.182), (4, 0.05, 2.776), (5, 0.05, 2.571), (7, 0.05, 2.365)]
TABLE += [(10, 0.05, 2.228), (30, 0.05, 2.042), (120, 0.05, 1.980), (1, 0.01, 63.657), (4, 0.01, 4.604), (9, 0.01, 3.250)]
TABLE += [(15, 0.01, 2.947), (2, 0.001, 31.599), (6, 0.001, 5.959), (20, 0.2, 1.325), (3, 0.5, 0.765)]


@pytest.mark.parametrize(("dof", "p", "t"), TABLE)
def test_the_tables_of_textbooks(dof, p, t):
    assert intervals.student(1 - p / 2, dof) == pytest.approx(t, abs=5.1e-4)
    assert intervals.student(p / 2, dof) == pytest.approx(-t, abs=5.1e-4)
    assert intervals.p_value(t, dof) == intervals.p_value(-t, dof) == pytest.approx(p, rel=1e-3)


def tail(t: float, dof: int, pieces: int = 2000) -> float:
    """1 - 2 times Simpson's integral of the density from 0 to t."""
    constant = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(dof * math.pi)
    at = [constant * (1 + (t * i / pieces) ** 2 / dof) ** (-(dof + 1) / 2) for i in range(pieces + 1)]
    return 1 - 2 * t / pieces / 3 * (at[0] + at[-1] + 4 * sum(at[1:-1:2]) + 2 * sum(at[2:-1:2]))


@pytest.mark.parametrize("dof", [*range(1, 13), 29, 30, 101])
def test_p_is_the_integral_of_the_density(dof):
    for t in (0.0, 0.1, 1.0, 2.5, 7.0):
        assert intervals.p_value(t, dof) == pytest.approx(tail(t, dof), abs=1e-9)


def test_quantile_and_p_are_inverse_and_the_ends_are_right():
    for dof, p in itertools.product((1, 2, 3, 8, 31), (0.5, 0.6, 0.9, 0.999, 1 - 1e-7)):
        assert intervals.p_value(intervals.student(p, dof), dof) == pytest.approx(2 * (1 - p), rel=1e-6)
    assert [intervals.p_value(math.inf, dof) for dof in (1, 2, 5)] == pytest.approx([0, 0, 0], abs=1e-15)
    assert intervals.p_value(0.0, 4) == 1


def test_sleep_of_ten_patients():
    """Student (1908), as R's documentation of t.test prints it: t = 4.0621, p = 0.002833, 0.7001142 to 2.4598858."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = intervals.paired(second, first)
    assert found == pytest.approx((1.58, 0.7001142, 2.4598858, 0.002833), abs=5e-7)
    assert intervals.paired(first, second) == pytest.approx((-1.58, -2.4598858, -0.7001142, 0.002833), abs=5e-7)
    assert intervals.mean_interval([y - x for x, y in zip(first, second, strict=True)]) == pytest.approx(found[:3])


def test_a_wider_level_is_a_wider_interval():
    """Of 1, 2, 3: s / sqrt(3) = 0.57735; t of 2 degrees of freedom is 4.303 and 9.925."""
    assert intervals.mean_interval([1, 2, 3]) == pytest.approx((2, 2 - 4.303 * 0.57735, 2 + 4.303 * 0.57735), abs=1e-3)
    assert intervals.mean_interval([1, 2, 3], 0.99).high == pytest.approx(2 + 9.925 * 0.57735, abs=1e-3)


def test_pairs_without_spread():
    assert intervals.paired([0.3, 0.4, 0.1], [0.3, 0.4, 0.1]) == (0, 0, 0, 1)
    assert intervals.paired([0.3, 0.4], [0.1, 0.2]) == pytest.approx((0.2, 0.2, 0.2, 0))  # 0.3 - 0.1 != 0.4 - 0.2 in floats
    assert intervals.paired([0.1 + 0.2, 1.0], [0.3, 1.0]).p == 1  # nor is 0.1 + 0.2 = 0.3
    assert intervals.paired([0.1 + 0.2, 0.0], [0.3, 0.0]).p == 1  # beside a pair of seeds that solved nothing
    assert intervals.paired([1e-9, 3e-9], [0.0, 0.0]).p == pytest.approx(intervals.p_value(2.0, 1))  # small is not nothing


def test_holm_by_hand():
    """0.005 4 = 0.02; 0.01 3 = 0.03; 0.03 2 = 0.06; 0.04 is below the one before it and becomes 0.06."""
    assert intervals.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert intervals.holm([0.6, 0.9]) == [1, 1]
    assert intervals.holm([0.2]) == [0.2]
    assert intervals.holm([]) == []


def test_holm_is_the_closed_test_of_bonferroni():
    """A hypothesis is rejected if every set of hypotheses that holds it is, by Bonferroni."""
    noise = random.Random(0)
    for _ in range(30):
        p = [round(noise.random() ** 3, 2) for _ in range(6)]
        sets = [s for n in range(1, 7) for s in itertools.combinations(range(6), n)]
        closed = [max(min(1, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(6)]
        assert intervals.holm(p) == pytest.approx(closed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: intervals.p_value(1.0, 0), "dof: got 0; allowed are whole numbers >= 1"),
        (lambda: intervals.p_value(1.0, 2.5), "dof: got 2.5; allowed are whole numbers >= 1"),
        (lambda: intervals.p_value(math.nan, 2), "t: got nan; allowed are numbers"),
        (lambda: intervals.student(1.0, 2), "p: got 1.0; allowed 0 < p < 1"),
        (lambda: intervals.mean_interval([1.0]), r"values: got \[1.0\]; allowed are two or more finite numbers"),
        (lambda: intervals.mean_interval([1.0, math.nan]), r"values: got \[1.0, nan\]; allowed"),
        (lambda: intervals.paired([1, 2], [1, 2, 3]), "pairs: got 2 and 3 values; allowed are equal numbers"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
