"""Laws of the ELBO from arcs of one circle (2.11); they register themselves in laws.LAWS."""

import itertools
import math
from types import ModuleType

import torch
from torch import Tensor

from laws import (
    KEEPS,
    MODEL,
    RESPONSE,
    Formula,
    all_orders,
    close,
    double,
    elbo_on,
    formula,
    frequencies_agree,
    judges,
    ll_of,
    midpoints,
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
    variance,
)
from minidrl import oracle


def positions_model(values: list[float]) -> oracle.TabularDenoiser:
    """A model whose token 0 has log-probability values[i] at position i, whatever else is hidden."""
    row = [[v, math.log(-math.expm1(v))] for v in values]
    return oracle.TabularDenoiser.from_hidden_table(double([row] * 2 ** len(values)))


@judges("2.11")
def law_arc_plan_states(alg: ModuleType) -> None:
    """Each count in its stratum, weight n / (K count); all positions are hidden equally often, or once more; prompt visible."""
    rollout = rollout_of(alg, [RESPONSE] * 90, KEEPS * 30)
    for states, domain in itertools.product((1, 2, 3, 5), ("keep", "all")):
        plan = alg.arc_plan(rollout, seeded(3), num_states=states, domain=domain)
        inside = rollout.keep if domain == "keep" else torch.ones_like(rollout.keep)
        assert plan.scored.shape == (states, 90, 4) and not plan.hidden[..., :3].any() and not plan.replay
        assert not (plan.scored & ~inside).any() and torch.equal(plan.hidden[..., 3:], plan.scored | ~inside)
        assert torch.equal(plan.valid, plan.scored.any(-1)) and plan.weight.dtype == torch.float64
        for b in range(90):
            n, times = int(inside[b].sum()), plan.scored[:, b].sum(0)[inside[b]]
            assert int(times.max() - times.min()) <= 1, f"{times.tolist()} times hidden, {states} states"
            for k in range(states):
                count = int(plan.scored[k, b].sum())
                assert k * n / states < count < (k + 1) * n / states + 1, f"count {count} of {n} in stratum {k} of {states}"
                close(plan.weight[k, b], n / (states * count), "weight")
    for wrong in (0, 1.5):
        refuses(lambda wrong=wrong: alg.arc_plan(rollout, seeded(), num_states=wrong, domain="keep"), "num_states", str(wrong))


@judges("2.11", "5.1")
def law_arc_plan_expectation(alg: ModuleType) -> None:
    """E = ELBO of the domain for every K, by enumeration of counts and orders."""
    model = tabular(*MODEL)
    for keep, states in itertools.product(KEEPS, (1, 2, 3)):
        draws = list(itertools.product(midpoints(sum(keep)), all_orders(4)))
        u, order = double([u for u, _ in draws]).expand(states, -1), double([order for _, order in draws])
        rollout = repeated(alg, RESPONSE, keep, len(draws))
        with noise(alg, u, order):
            plan = alg.arc_plan(rollout, seeded(), num_states=states, domain="keep")
        got = ll_of(alg, model, rollout, plan)[0, :, 0].mean()
        close(got, elbo_on(model, RESPONSE, positions(keep)), f"n={sum(keep)} K={states}")


@judges("2.11")
def law_arc_plan_frequencies(alg: ModuleType) -> None:
    """Counts independent, each in its stratum; given its count, every state is a uniform subset; rows differ."""
    n, states, rows = 3, 2, 4000
    plan = alg.arc_plan(repeated(alg, RESPONSE, KEEPS[1], rows), seeded(4), num_states=states, domain="keep")
    law = double([[max(0.0, min((k + 1) / 2, (c + 1) / n) - max(k / 2, c / n)) * 2 for c in range(n)] for k in range(states)])
    count = plan.scored.sum(-1) - 1
    frequencies_agree(count[0] * n + count[1], (law[0][:, None] * law[1][None]).flatten(), "counts of two states")
    for k in range(states):
        chance = torch.zeros(16, dtype=torch.float64)
        for chosen in oracle.all_subsets(4)[1:]:
            if chosen <= positions(KEEPS[1]):
                chance[sum(2**i for i in chosen)] = law[k][len(chosen) - 1] / math.comb(n, len(chosen))
        frequencies_agree(subset_number(plan.scored[k]), chance, f"subsets of state {k}")


@judges("2.11")
def law_arcs_do_not_raise_the_variance_of_positions(alg: ModuleType) -> None:
    """Log-probabilities of the position alone, two states: a variance below that of the strata of (2.3)."""
    for values in ([-0.1, -2.0, -0.5], [-1.0, -1.5, -0.2, -3.0]):
        n = len(values)
        cells = list(itertools.product(midpoints(n), repeat=2))
        scores = subset_scores(positions_model(values), (0,) * n, frozenset(range(n)))
        draws = list(itertools.product(cells, all_orders(n)))
        u, order = double([u for u, _ in draws]).T, double([order for _, order in draws])
        with noise(alg, u, order):
            plan = alg.arc_plan(repeated(alg, (0,) * n, (1,) * n, len(draws)), seeded(), num_states=2, domain="keep")
        arcs = scored_values(plan, scores)
        # The strata by hand: two independent states, every count of a stratum as likely as its share of it.
        means, apart = [], 0.0
        for k in range(2):
            share = [max(0.0, min((k + 1) / 2, (c + 1) / n) - max(k / 2, c / n)) * 2 for c in range(n)]
            states = [
                (share[len(m) - 1] / math.comb(n, len(m)), n / len(m) * scores[sum(2**i for i in m)].item() / 2)
                for m in oracle.all_subsets(n)[1:]
            ]
            mean, spread = (float(v) for v in oracle.moments(states))
            means.append(mean)
            apart += spread
        close(arcs.mean(), sum(means), "mean")
        assert variance(arcs) < apart - 1e-6, f"arcs {variance(arcs)}, strata {apart}"


@formula("gdpo-arcs")
def gdpo_arcs(f: Formula) -> Tensor:
    """The loss of GDPO's eq. 5 and 6 at its three calls, with the count form of the ELBO."""
    assert len(f.states) == 3
    total = 0.0
    for b in f.rows:
        ratio = (f.elbo(f.new, b) - f.elbo(f.old, b).detach()).exp()
        total = total + f.clipped(ratio, f.centred(b), 0.5, 0.5) / f.length[b]
    return total / 8
