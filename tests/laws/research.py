"""Laws of this project's own plans: arcs of one circle (2.11), and the control variate from the rollout's states (2.12)."""

import itertools
import math
from typing import Any

import numpy as np
import torch

from laws.registry import judges, rejects
from laws.tools import (
    KEEPS,
    MODEL,
    RESPONSE,
    all_orders,
    close,
    double,
    elbo_on,
    frequencies_agree,
    ll_of,
    midpoints,
    noise,
    normal,
    positions,
    refuses,
    repeated,
    rollout_of,
    seeded,
    subset_number,
    tabular,
)
from minidrl import oracle


@judges("2.11")
@rejects("", ("< count[..., None", "<= count[..., None"), where="_arcs")
@rejects("2.11", ('_check_count("plan.num_states", num_states)', ""))
def law_arc_plan_states(alg: Any) -> None:
    """Each count lies in its stratum, with weight n / (K count). All positions are hidden equally often, or once more."""
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
@rejects("", ("% n < count", "< count"), where="_arcs")
@rejects(
    "2.11",
    ("n.double() / (num_states * count)", "n.double() / count"),
    ("n.double() / (num_states * count)", "1 / u / num_states"),
)
def law_arc_plan_expectation(alg: Any) -> None:
    """The mean is the ELBO of the domain for every K, by enumeration of counts and orders."""
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
@rejects("", ("(part + u)", "(0 * part + u)"), where="_in_strata")
def law_arc_plan_frequencies(alg: Any) -> None:
    """Counts are independent, each in its stratum. Given its count every state is a uniform subset, and rows differ."""
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


STEPS = ((2, 0, 3, 1), (0, 1, 2, 3), (1, 0, 0, 1))  # the step of each position; the last reveals two a step


CONSTANTS = normal(2, 57, seed=5)


CONSTANTS[:, 20:50] = CONSTANTS[:, 20:50].abs()


def seen_of(seed: int) -> np.ndarray:
    """(T, L) log-probabilities that no model gave."""
    return -normal(4, 4, seed=seed).abs().numpy()


def remembered(alg: Any, keep: tuple, step: tuple, rows: int, solved: bool = True, seed: int = 7) -> Any:
    """The same response in every row, with a record of what its rollout saw."""
    seen = double(seen_of(seed)).expand(rows, -1, -1)
    records = {"seen_logp": seen, "solved": torch.full((rows,), solved)}
    steps = torch.tensor([step] * rows)
    return rollout_of(alg, [RESPONSE] * rows, [keep] * rows, unmask_step=steps, records=records)


class ByHand:
    """(2.12) to (2.14) for one response, as loops over positions and masks."""

    def __init__(self, keep: tuple, step: tuple, constants: Any, seed: int = 7):
        self.kept, self.step, self.seen = sorted(positions(keep)), step, seen_of(seed)
        self.n, own = len(self.kept), np.asarray(constants)
        self.of_terms, self.of_law, self.of_centre = own[:20], own[20:50], own[50:]
        self.masks = [m for l in range(1, self.n + 1) for m in itertools.combinations(self.kept, l)]

    def effect(self, j: int, i: int) -> float:
        """What revealing j did to i, 0 unless j came first."""
        later = self.step[j] < self.step[i]
        return float(self.seen[self.step[j] + 1, i] - self.seen[self.step[j], i]) if later else 0.0

    def four(self, i: int, j: int) -> list[float]:
        """A+, A-, C+, C- of (i, j)."""
        mine, other = self.effect(j, i), self.effect(i, j)
        return [max(mine, 0.0), min(mine, 0.0), max(other, 0.0), min(other, 0.0)]

    def guess(self, mask: tuple) -> float:
        """H(M)."""
        sums, x = np.zeros(6), len(mask) / self.n
        for i in mask:
            sums[:2] += self.seen[0, i], self.seen[self.step[i], i]
            for j in set(self.kept) - set(mask):
                sums[2:] += self.four(i, j)
        terms = [s / x * x**power for s in sums for power in range(3)] + [self.n * x, self.n * x**2]
        return float(np.dot(terms, self.of_terms))

    def mean_over_counts(self, values: dict) -> float:
        """The mean, under (2.3), of what each mask has."""
        return sum(v / math.comb(self.n, len(m)) for m, v in values.items()) / self.n

    @property
    def mean_guess(self) -> float:
        """The mean of H over all masks."""
        return self.mean_over_counts({m: self.guess(m) for m in self.masks})

    def scale(self, i: int) -> list[float]:
        """The ten scales of a position."""
        pairs = np.array([self.four(i, j) for j in self.kept])
        both, first, reveal = pairs.sum(1), self.seen[0, i], self.seen[self.step[i], i]
        lowest = min(self.seen[t, i] for t in range(self.step[i] + 1))
        squares = [np.mean(both**2), np.mean(np.minimum(both, 0) ** 2), np.mean(pairs[:, 3] ** 2)]
        return [0.01, first**2, reveal**2, lowest**2, -first, -reveal, *squares, pairs[:, 3].sum() ** 2 / self.n]

    @property
    def law(self) -> list[float]:
        """q(1), .., q(n)."""
        v = np.zeros(self.n)
        for mask in self.masks:
            x = len(mask) / self.n
            three = np.array([[s, s * x, s * (1 - x) ** 4] for s in np.sum([self.scale(i) for i in mask], 0) / x**2])
            v[len(mask) - 1] += float(three.T.flatten() @ self.of_law) / math.comb(self.n, len(mask))
        q = np.sqrt(v + 0.03 * v.mean())
        return (q / q.sum()).tolist()

    @property
    def centre(self) -> float:
        """c."""
        first = sum(float(self.seen[0, i]) for i in self.kept)
        reveal = sum(float(self.seen[self.step[i], i]) for i in self.kept)
        lowest = sum(min(float(self.seen[t, i]) for t in range(self.step[i] + 1)) for i in self.kept)
        signs = [sum(self.four(i, j)[s] for i in self.kept for j in self.kept) for s in range(2)]
        return float(np.dot([1, self.n, reveal, first, lowest, *signs], self.of_centre))

    def shift(self, masks: list[tuple]) -> float:
        """What the estimate of these states has beside log p."""
        q, mean, c = self.law, self.mean_guess, self.centre
        parts = [(mean - self.guess(m) - c) / (self.n * q[len(m) - 1]) for m in masks]
        return c + sum(parts) / len(masks)


def cells(q: list[float], states: int) -> list[list[tuple[float, float]]]:
    """For each state the (u, chance) of every count that its stratum of q holds."""
    edge = [0.0, *np.cumsum(q).tolist()]
    found: list[list[tuple[float, float]]] = []
    for k in range(states):
        low, high = k / states, (k + 1) / states
        parts = [(max(a, low), min(b, high)) for a, b in itertools.pairwise(edge)]
        found.append([((a + b) / 2 * states - k, (b - a) * states) for a, b in parts if b - a > 1e-12])
    return found


@judges("2.12", "2.13")
@rejects("2.12", ("record(rollout", "1 - record(rollout"), ("own.split([20,", "own.flip(-1).split([20,"))
@rejects(
    "",
    ("known.effects[:2]", "known.effects[1:3]"),
    ("(known.at_reveal, known.first", "(known.first, known.first"),
    where="centre_terms",
)
@rejects("2.13", ("x**power for s", "x ** (power + 1) for s"), ("(~masked)", "masked"), ("n * x, n * x**2]", "x, x**2]"))
@rejects("", ("(place + 1)", "place"), ("& inside[..., None] & inside[:, None]", ""), where="visited")
def law_control_variate_by_hand(alg: Any) -> None:
    """Weight and shift are as by hand, with the constants of the verdict, and only the sequence's ll has the shift."""
    for keep, step, (states, solved) in itertools.product(KEEPS, STEPS, ((1, False), (3, True))):
        rollout, by_hand = remembered(alg, keep, step, 8, solved), ByHand(keep, step, CONSTANTS[int(solved)])
        words = {"num_states": states, "domain": "keep", "constants": CONSTANTS}
        plan, q = alg.control_variate_plan(rollout, seeded(3), **words), by_hand.law
        assert plan.shift is not None
        assert not plan.hidden[..., :3].any() and not (plan.scored & ~rollout.keep).any() and not plan.replay
        for b in range(8):
            masks = [tuple(sorted(positions(plan.scored[k, b]))) for k in range(states)]
            close(plan.weight[:, b], [1 / (states * q[len(m) - 1] * len(m)) for m in masks], "weight")
            close(plan.shift[b], by_hand.shift(masks), f"shift n={by_hand.n}", atol=1e-9)
        logp = normal(states, 8, 4, seed=1)
        for level in alg.LEVELS[:-2]:
            close(
                alg.reduce_logp(logp, plan, level=level, normalizer=None),
                alg.reduce_logp(logp, alg.replace(plan, shift=None), level=level, normalizer=None),
                level,
            )
        bare = alg.reduce_logp(logp, alg.replace(plan, shift=None), level="sequence", normalizer=None)
        whole = alg.reduce_logp(logp, plan, level="sequence", normalizer=double([2.0] * 8))
        close(whole[0, :, 0], (bare[0, :, 0] + plan.shift) / 2, "a normaliser divides the shift, too")


@judges("2.13")
@rejects("2.13", ("s / x * x**power", "s * x**power"))
@rejects("", ("(n - count) / (n - 1)", "(n - count) / n"), ("(v * exists).sum(-1)", "v.sum(-1)"), where="surrogate_means")
def law_means_of_the_terms(alg: Any) -> None:
    """The closed means of the twenty terms are their means over all masks."""
    for keep, step in itertools.product(KEEPS, STEPS):
        rollout, kept = remembered(alg, keep, step, 1), sorted(positions(keep))
        known = alg.visited(rollout, rollout.keep)
        masks = [m for l in range(1, len(kept) + 1) for m in itertools.combinations(kept, l)]
        masked = torch.tensor([[[i in m for i in range(4)]] for m in masks])
        chance = double([1 / (len(kept) * math.comb(len(kept), len(m))) for m in masks])
        terms = alg.surrogate_terms(known, masked, rollout.keep)[:, 0]
        close(alg.surrogate_means(known, rollout.keep)[0], chance @ terms, "means")


@judges("2.14")
@rejects(
    "2.14",
    ("0.03 * v.sum", "0.3 * v.sum"),
    (".sqrt() * (count <= n)", "* (count <= n)"),
    ("both.clamp(max=0)", "both.clamp(min=0)"),
    ("known.effects[3]", "known.effects[2]"),
)
def law_of_the_law_of_counts(alg: Any) -> None:
    """The law q is as by loops over masks. It sums to 1, and no count is left out."""
    for keep, step, v in itertools.product(KEEPS, STEPS, (0, 1)):
        rollout, by_hand = remembered(alg, keep, step, 1), ByHand(keep, step, CONSTANTS[v])
        known = alg.visited(rollout, rollout.keep)
        q = alg.law_of_counts(known, rollout.keep, CONSTANTS[v : v + 1, 20:50])[0]
        close(q[: by_hand.n], by_hand.law, "q")
        assert not q[by_hand.n :].any() and min(by_hand.law) > 0
        close(q.sum(), 1.0, "sum")


@judges("2.12", "5.1")
@rejects("2.12", (".sum(-1) + 1, n)", ".sum(-1).clamp(min=1), n)"))
def law_control_variate_expectation(alg: Any) -> None:
    """The mean is the ELBO of the domain, whatever the constants, by enumeration of counts and orders."""
    model = tabular(*MODEL)
    for keep, step, states in itertools.product(KEEPS, STEPS, (1, 2)):
        q = ByHand(keep, step, CONSTANTS[1]).law
        draws = list(itertools.product(*cells(q, states), all_orders(4)))
        u = double([[cell[0] for cell in draw[:-1]] for draw in draws]).T
        chance = double([math.prod(cell[1] for cell in draw[:-1]) / 24 for draw in draws])
        rollout = remembered(alg, keep, step, len(draws))
        with noise(alg, u, double([draw[-1] for draw in draws])):
            plan = alg.control_variate_plan(rollout, seeded(), num_states=states, domain="keep", constants=CONSTANTS)
        close(chance.sum(), 1.0, "chances")
        got = chance @ ll_of(alg, model, rollout, plan)[0, :, 0]
        close(got, elbo_on(model, RESPONSE, positions(keep)), f"n={sum(keep)} K={states}", atol=1e-9)


@judges("2.12")
@rejects("", ("tuple(inside.shape", "(1, inside.shape[1]"), where="_arcs")
def law_control_variate_frequencies(alg: Any) -> None:
    """The counts of two states are independent, each with the law q within its half, and rows differ."""
    keep, step, rows = KEEPS[0], STEPS[0], 4000
    q = ByHand(keep, step, CONSTANTS[1]).law
    rollout = remembered(alg, keep, step, rows)
    plan = alg.control_variate_plan(rollout, seeded(4), num_states=2, domain="keep", constants=CONSTANTS)
    edge = [0.0, *np.cumsum(q).tolist()]
    half = [[max(0.0, min(b, (k + 1) / 2) - max(a, k / 2)) * 2 for a, b in itertools.pairwise(edge)] for k in range(2)]
    count = plan.scored.sum(-1) - 1
    both = (double(half[0])[:, None] * double(half[1])[None]).flatten()
    frequencies_agree(count[0] * 4 + count[1], both, "counts of two states")
    frequencies_agree(plan.scored[0].double().argmax(-1)[count[0] == 0], double([0.25] * 4), "a position alone")


@judges("2.12")
@rejects("2.12", ("domain=domain", "domain='keep'"))
def law_without_constants_it_is_arcs(alg: Any) -> None:
    """Without constants it has the states and weights of arcs, no shift, and reads no record; errors are named."""
    rollout = rollout_of(alg, [RESPONSE] * 30, KEEPS * 10)
    for states, domain in itertools.product((1, 3), ("keep", "all")):
        words = {"num_states": states, "domain": domain}
        plan = alg.control_variate_plan(rollout, seeded(3), **words, constants=None)
        arcs = alg.arc_plan(rollout, seeded(3), **words)
        assert plan.shift is None and torch.equal(plan.hidden, arcs.hidden) and torch.equal(plan.scored, arcs.scored)
        close(plan.weight, arcs.weight, "weight")
    run = {"domain": "keep", "constants": CONSTANTS}
    refuses(lambda: alg.control_variate_plan(rollout, seeded(), num_states=2, **run), "seen_logp")
    for wrong, constants in itertools.product((0, 1.5), (None, CONSTANTS)):
        words = {"num_states": wrong, "domain": "keep", "constants": constants}
        refuses(lambda words=words: alg.control_variate_plan(rollout, seeded(), **words), "num_states", str(wrong))
