"""Laws of the table of estimators (research/benches/estimators.py): what each draws, and its exact mean and deviation."""

import itertools
import math
from typing import Any

from laws.quadrature import expected
from laws.registry import judges, rejects
from laws.tools import MODEL, RESPONSE, close, seeded, subset_scores, tabular
from minidrl import oracle


@judges("2.1", "2.2", "2.3", "2.4", "2.6", "2.8")
@rejects("2.4", ("complementary_plan", "elbo_time_plan, min_t=0.5"), where="ESTIMATORS")
@rejects("2.1", ("max(map(len, scores))", "1"), where="_mean_field_law")
@rejects("2.2", ("1 / (calls * t)", "1 / calls"), ("* t / (1 - min_t) * weight", "/ (1 - min_t) * weight"), where="_time_law")
@rejects(
    "2.3",
    ("n / calls / count", "(n + 1) / calls / count"),
    ("if strata else (0.0, 1.0)", "if not strata else (0.0, 1.0)"),
    where="_count_law",
)
@rejects(
    "2.4",
    ("(n + 1) / calls * score", "n / calls * score"),
    ("value + weighted[everything - m]", "2 * value"),
    where="_pair_law",
)
@rejects(
    "2.6",
    ("t, weight / t))", "t, weight))"),
    ("math.floor(1.5 + t * (n - 1))", "math.floor(1 + t * (n - 1))"),
    where="_sdmc_law",
)
@rejects("2.8", ("hidden | later)", "hidden)"), where="_scores")
@rejects("2.8", ("block_elbo_plan", "elbo_count_plan"), where="ESTIMATORS")
def law_the_table_of_estimators(alg: Any) -> None:
    """The exact mean and deviation of each entry: against enumeration, and against draws of its plan (5 errors, 6 %).

    Each makes as many forwards as calls are asked for.
    """
    model, response = tabular(*MODEL), RESPONSE
    assert alg.LAWS.keys() == alg.ESTIMATORS.keys()
    truth = {"mean field": oracle.elbo_integrand(model, response, 1.0), "block ELBO": oracle.block_elbo(model, response, 2)}
    counts = {"SDMC": "bernoulli", "SDMC, fixed counts": "rounded", "SDMC, as released": "floor"}
    for name in alg.ESTIMATORS:
        for calls in alg.ESTIMATOR_CALLS.get(name, (1, 2, 4)):
            what = f"{name}, {calls} calls"
            plan = alg.ESTIMATORS[name](alg._copies(response, 2), seeded(), num_states=calls)
            assert len(plan.weight) == calls * plan.blocks, what
            mean, std = alg.exact_moments(name, model, response, calls)
            if "time" in name:
                low, bound = oracle.elbo_integrand(model, response, 0.0).item(), oracle.elbo(model, response).item()
                close(mean, bound + 1e-3 * (bound - low), f"{what}: bias to first order", 1e-4)
                close(std * math.sqrt(calls), time_form_std(model, response, 1e-3), f"{what}: deviation", 1e-6)
                continue
            if name in counts:
                close(mean, expected(model, (1,) * 4, calls, counts[name]), f"{what}: mean")
            else:
                close(mean, truth.get(name, oracle.elbo(model, response)).item(), f"{what}: mean")
            drawn = alg.sample(name, model, response, calls, 3000)
            assert abs(drawn.mean().item() - mean) <= 5 * std / 3000**0.5 + 1e-9, f"{what}: mean {drawn.mean()}, not {mean}"
            assert abs(drawn.std().item() - std) <= 0.06 * std + 1e-9, f"{what}: deviation {drawn.std()}, not {std}"


def time_form_std(model: Any, response: tuple, least: float) -> float:
    """The deviation of one call with t ~ U(least, 1), every power of t integrated by hand."""
    n, moment = len(response), {1: 0.0, 2: 0.0}
    scores = subset_scores(model, response, frozenset(range(n)))
    for hidden, order in itertools.product(oracle.all_subsets(n)[1:], (1, 2)):
        for j in range(n - len(hidden) + 1):
            power = len(hidden) - order + j
            integral = -math.log(least) if power == -1 else (1 - least ** (power + 1)) / (power + 1)
            factor = (-1) ** j * math.comb(n - len(hidden), j) * integral / (1 - least)
            moment[order] += factor * scores[sum(2**i for i in hidden)].item() ** order
    return math.sqrt(moment[2] - moment[1] ** 2)
