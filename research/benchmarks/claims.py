"""The ledger of claims: `python research/benchmarks/claims.py` writes CLAIMS.md; with `--check` it exits with 1 if the file is stale.

A claim is a sentence, a number that decides it, and a criterion for that number. The number of a claim is computed here, by
enumeration or by the shipped functions on small tensors (seconds); or it is read from results/instability.json and claims.json,
where the runs that take long are recorded with their command; or nobody has run it. No verdict is typed in: `verdict` derives
it from the number, its interval and the criterion.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import operator
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import instability as study
import instability_page as page
import torch
from torch import Tensor
from weight_signal import mask_variances, solved

from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import methods, oracle, sampler
from minidrl.run import estimators, intervals, tables
from research import findings
from research.findings import after
from research.ledger import Courses, Group, groups, read_courses, read_ledger

ROOT = Path(__file__).parents[2]
HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "not distinguishable", "not run here"
UNSEEN = "not seen here"

# ============================================================================================== numbers, criteria, verdicts


@dataclass(frozen=True)
class Found:
    """A number and its interval. ``cases``: low and high are reached, by a case each; otherwise they are 95 % limits."""

    value: float
    low: float
    high: float
    cases: bool

    def __post_init__(self):
        if not self.low <= self.value <= self.high:  # nan is in no order, and must not become a verdict
            raise ValueError(f"found: got {self.value} in [{self.low}, {self.high}]; allowed low <= value <= high")


def cases(values: Iterable[float]) -> Found:
    """Median, lowest and highest of a number that was computed for several cases. Rounding errors become 0."""
    values = [round(float(value), 8) + 0.0 for value in values]
    return Found(statistics.median(values), min(values), max(values), cases=True)


def runs(values: list[float]) -> Found:
    """Mean over seeds with Student's 95 % interval."""
    return Found(*intervals.mean_interval(values), cases=False)


def percent_difference(a: float, b: float, puzzles: int) -> Found:
    """a - b in points, of one run each: 95 % by the binomial error of the two evaluations alone."""
    half = 1.96 * math.sqrt((a * (100 - a) + b * (100 - b)) / puzzles)
    return Found(a - b, a - b - half, a - b + half, cases=False)


def share(count: int, total: int) -> Found:
    """A share with Wilson's 95 % interval."""
    z2 = 1.96**2
    middle, half = (count + z2 / 2) / (total + z2), math.sqrt(z2 * (count * (total - count) / total + z2 / 4)) / (total + z2)
    low, high = (round(x, 8) + 0.0 for x in (middle - half, middle + half))
    return Found(count / total, low, high, cases=False)


SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def verdict(found: Found | None, criterion: str) -> str:
    """Holds if the whole interval satisfies the criterion, which is a sign and a bound.

    A case that does not is a counter-example. An estimate is refuted if its whole interval lies on the other side, and decides
    nothing if it contains the bound.
    """
    if found is None:
        return NOT_RUN
    sign, bound = criterion.split()
    ends = [SIGNS[sign](x, float(bound)) for x in (found.low, found.high)]
    return HOLDS if all(ends) else FAILS if found.cases or not any(ends) else UNDECIDED


@dataclass(frozen=True)
class Claim:
    """A line of the ledger.

    source       where it is stated, or what it is about
    decided_by   the tests, notebooks or commands that show it at length
    number       what is measured, with its unit; why not, where measure is None
    criterion    of `verdict`
    can_happen   the sentence says that something happens, not that it always does: a setting without it refutes nothing
    """

    text: str
    source: str
    decided_by: str
    seeds: str
    number: str
    measure: Callable[[], Found] | None
    criterion: str
    can_happen: bool = False


def judged(claim: Claim, found: Found | None) -> str:
    """The `verdict` on a claim; of what can happen, that it was not seen."""
    said = verdict(found, claim.criterion)
    return UNSEEN if claim.can_happen and said == FAILS else said


def happens(*claims: Claim) -> tuple[Claim, ...]:
    """Claims of what can happen."""
    return tuple(replace(claim, can_happen=True) for claim in claims)


def not_run(text: str, source: str, why: str) -> Claim:
    """A claim that nothing here decides, and why."""
    return Claim(text, source, "", "", why, None, "")


# ======================================================================================================= random tables
#
# A table of random conditionals is a model that no theorem favours: what holds for all of them holds by construction, and one
# that fails is a counter-example. Estimators are judged on tables of 6 positions and 3 tokens, gradients on 3 positions.

LENGTH, VOCAB, TABLES = 6, 3, 20


def table(seed: int, length: int = LENGTH, vocab: int = VOCAB) -> oracle.TabularDenoiser:
    """Independent normal logits for every state."""
    return oracle.TabularDenoiser.random(length, vocab, torch.Generator().manual_seed(seed))


def over_tables(measure: Callable[[int], float], count: int = TABLES) -> Found:
    """A number of each of the tables 0, 1, ..."""
    return cases(measure(seed) for seed in range(count))


def text_of(seed: int) -> oracle.State:
    """The response that is looked at in table ``seed``."""
    return tuple((seed + i) % VOCAB for i in range(LENGTH))


@torch.no_grad()
def hidden_sums(model: oracle.TabularDenoiser, response: oracle.State) -> dict[frozenset[int], float]:
    """S(M), the log-probability of the hidden tokens, of every set M of hidden positions."""
    masks = oracle.all_subsets(model.length)
    return {m: float(sum(oracle.token_logp(model, response, m).values())) for m in masks}


@functools.cache
def sums(seed: int) -> dict[frozenset[int], float]:
    """`hidden_sums` of table ``seed``."""
    return hidden_sums(table(seed), text_of(seed))


def variance(chance: Tensor, value: Tensor) -> float:
    """Of a finite distribution."""
    return float((chance * value.square()).sum() - (chance * value).sum() ** 2)


def one_call(seed: int) -> dict[int, Tensor]:
    """All values (L / l) S(M) of one call of the count form, by the number l of hidden tokens."""
    by_count: dict[int, list[float]] = {count: [] for count in range(1, LENGTH + 1)}
    for mask, total in sums(seed).items():
        if mask:
            by_count[len(mask)].append(LENGTH / len(mask) * total)
    return {count: torch.tensor(values, dtype=torch.float64) for count, values in by_count.items()}


def count_and_mask(seed: int) -> tuple[float, float]:
    """The two parts of the variance of one call: of the mean given the count, and the mean of the variance given it."""
    values = one_call(seed).values()
    return statistics.pvariance([float(v.mean()) for v in values]), statistics.mean(float(v.var(correction=0)) for v in values)


def share_of_first(parts: tuple[float, float]) -> float:
    """Of the sum."""
    return parts[0] / sum(parts)


# Two models that can be solved for any length. In the first every second hidden token costs 2 a(l), the others nothing: mean
# a(l), and a standard deviation of that size: `weight_signal.py` has it.
# In the second all hidden tokens cost the same while one key token is hidden, and nothing once it is visible.


def count_and_mask_solved(length: int) -> tuple[float, float]:
    """`count_and_mask` of the solved model."""
    a = solved(length)
    return length**2 * statistics.pvariance(a), statistics.mean(mask_variances(a))


def count_and_mask_key_token(length: int) -> tuple[float, float]:
    """`count_and_mask` of the model with a key token: -length where it is hidden, which has chance l / length."""
    chance = [count / length for count in range(1, length + 1)]
    return length**2 * statistics.pvariance(chance), length**2 * statistics.mean(p * (1 - p) for p in chance)


@functools.cache
def random_times(smallest: float = 1e-3, cells: int = 400) -> list[tuple[float, float]]:
    """(chance, t): a grid that is even in log t, for t uniform from ``smallest`` on; without one V_Bern is infinite (20.4)."""
    ends = [smallest ** (1 - i / cells) for i in range(cells + 1)]
    return [((high - low) / (1 - smallest), math.sqrt(low * high)) for low, high in itertools.pairwise(ends)]


def time_and_bernoulli(moments: list[tuple[float, float]]) -> tuple[float, float]:
    """V_time and V_Bern of (50.1), one call of the time form; moments: mean and mean square of S, for l = 1, 2, ... hidden."""
    mean, of_time, total = 0.0, 0.0, 0.0
    for chance, t in random_times():
        given, square = at_time(t, moments)
        mean, of_time, total = mean + chance * given, of_time + chance * given**2, total + chance * square
    return of_time - mean**2, total - of_time


def at_time(t: float, moments: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and mean square of S / t where each position is hidden with probability t; moments: as above."""
    length = len(moments)
    law = [math.comb(length, l) * t**l * (1 - t) ** (length - l) for l in range(1, length + 1)]
    mean, square = (sum(p * values[i] for p, values in zip(law, moments, strict=True)) for i in (0, 1))
    return mean / t, square / t**2


def moments_of_sums(seed: int) -> list[tuple[float, float]]:
    """Of S, by count, in table ``seed``."""
    by_count = [[x for mask, x in sums(seed).items() if len(mask) == count] for count in range(1, LENGTH + 1)]
    return [(statistics.fmean(values), statistics.fmean(x * x for x in values)) for values in by_count]


def moments_solved(length: int) -> list[tuple[float, float]]:
    """Of S, by count, in the solved model."""
    a = solved(length)
    return [(l * x, (l * x) ** 2 + (l / length) ** 2 * v) for l, (x, v) in enumerate(zip(a, mask_variances(a), strict=True), 1)]


def moments_key_token(length: int) -> list[tuple[float, float]]:
    """Of S, by count, in the model with a key token: -l where it is hidden."""
    return [(-l * l / length, l**3 / length) for l in range(1, length + 1)]


def rollout_of(rows: list, **given) -> alg.Rollout:
    """Responses without prompts, of which every token counts, as one group."""
    row = torch.tensor(rows)
    empty, keep = torch.zeros(len(row), 0, dtype=torch.long), torch.ones_like(row, dtype=torch.bool)
    blank = torch.zeros(row.shape, dtype=torch.float64)
    return replace(alg.Rollout(empty, empty.bool(), row, keep, torch.full_like(row, -1), blank, len(row), None), **given)


# ==================================================================================== ELBO: LLaDA, LLaDA 1.5 (VRPO), ESPO


def slack_of_the_bound(seed: int) -> float:
    """log p - ELBO, of random order."""
    model, response = table(seed), text_of(seed)
    with torch.no_grad():
        return float(oracle.any_order_log_likelihood(model, response) - oracle.elbo(model, response))


@torch.no_grad()
def slack_for_confident_samplers() -> Found:
    """log p - ELBO, where p is the low-confidence sampler's: every response of small tables."""
    found = []
    for seed in range(TABLES):
        model = table(seed, 3, 2)
        likelihood = oracle.response_distribution(oracle.trajectories(model, "low_confidence", 1.0, 1))
        found += [float(p.log() - oracle.elbo(model, response)) for response, p in likelihood.items()]
    return cases(found)


def spread_over_times(seed: int) -> float:
    """Two calls: variance with two masks at one time over that with one mask at each of two times."""
    given = one_call(seed)
    pair = {l: (z[:, None] + z[None]).flatten() / 2 for l, z in given.items()}
    chance = torch.cat([torch.full_like(z, 1 / LENGTH / len(z)) for z in pair.values()])
    single = torch.cat([torch.full_like(z, 1 / LENGTH / len(z)) for z in given.values()])
    z = torch.cat(list(given.values()))
    apart = variance(torch.outer(single, single).flatten(), (z[:, None] + z[None]).flatten() / 2)
    return variance(chance, torch.cat(list(pair.values()))) / apart


def pairs_over_singles(seed: int) -> float:
    """Two calls: variance of a mask with its complement, (2.4), over that of two independent masks of the same law."""
    chance, z = espo_masks(seed)
    everyone = frozenset(range(LENGTH))
    pair = torch.tensor([(z[m] + z[everyone - m]) / 2 for m in z], dtype=torch.float64)
    single = torch.tensor(list(z.values()), dtype=torch.float64)
    return variance(chance, pair) / (variance(chance, single) / 2)


def pairs_over_the_count_form(seed: int) -> float:
    """The same pair over two independent masks of (2.3), which never hides nothing."""
    chance, z = espo_masks(seed)
    everyone = frozenset(range(LENGTH))
    pair = torch.tensor([(z[m] + z[everyone - m]) / 2 for m in z], dtype=torch.float64)
    return variance(chance, pair) / (sum(count_and_mask(seed)) / 2)


def espo_masks(seed: int) -> tuple[torch.Tensor, dict[frozenset, float]]:
    """(chance, estimate) of each mask where the count is uniform on 0..L, as in ESPO's code."""
    s = sums(seed)
    chance = torch.tensor([1 / (LENGTH + 1) / math.comb(LENGTH, len(m)) for m in s], dtype=torch.float64)
    return chance, {m: (LENGTH + 1) / len(m) * s[m] if m else 0.0 for m in s}


def pairs_in_the_solved_model(length: int) -> float:
    """`pairs_over_the_count_form` of the solved model, by (20.14)."""
    a = [0.0, *solved(length)]
    h = [(length + 1) * x for x in a]
    level = statistics.pvariance([(x + y) / 2 for x, y in zip(h, reversed(h), strict=True)])
    gaps = {n: a[n] / n - a[length - n] / (length - n) for n in range(1, length)}
    masks = sum(n * (length - n) * gap**2 for n, gap in gaps.items())
    pair = level + (length + 1) / (4 * (length - 1)) * masks
    return pair / (sum(count_and_mask_solved(length)) / 2)


# ======================================================================================================= d1 / diffu-GRPO


def mean_field_misses_the_ratio() -> Found:
    """Two bits that agree nine times in ten become two bits that differ nine times in ten; nats of the log-ratio."""
    bits = list(itertools.product(range(2), repeat=2))
    nets = [oracle.consistent_denoiser(torch.tensor(joint)) for joint in ([[9.0, 1], [1, 9]], [[1.0, 9], [9, 1]])]
    rollout = rollout_of(bits)
    plan = alg.mean_field_plan(rollout, torch.Generator(), p_mask_prompt=0.0)
    old, new = (feat.features(net, rollout, plan, temperature=1.0)["logp"].sum((0, 2)) for net in nets)
    before, after = ([oracle.any_order_log_likelihood(net, y).item() for y in bits] for net in nets)
    return cases(abs(n - o - (a - b)) for n, o, a, b in zip(new, old, after, before, strict=True))


# ================================================================================================================== GDPO


def bias_of_three_nodes(seed: int) -> float:
    """|mean of quadrature with three nodes - ELBO|, nats."""
    t, w = alg.gauss_legendre(3)
    model, response = table(seed), text_of(seed)
    with torch.no_grad():
        estimate = sum(w[n] * oracle.elbo_integrand(model, response, t[n].item()) for n in range(3))
        return abs(float(estimate - oracle.elbo(model, response)))


def quadrature_variance(moments: list[tuple[float, float]]) -> float:
    """Of three calls of SDMC with Bernoulli masks (50.7); moments: of S, by count."""
    nodes = zip(*(x.tolist() for x in alg.gauss_legendre(3)), strict=True)
    at = [(w, *at_time(t, moments)) for t, w in nodes]
    return sum(w**2 * (square - mean**2) for w, mean, square in at)


def quadrature_error(seed: int) -> float:
    """Three calls: error of quadrature (unbiased here) over that of independent calls of the count form."""
    return math.sqrt(quadrature_variance(moments_of_sums(seed)) / (sum(count_and_mask(seed)) / 3))


def quadrature_over_double_monte_carlo(seed: int) -> float:
    """Three calls: standard deviation of quadrature over that of three random times from 0.001 on, a mask at each."""
    both = (estimators.exact_moments(name, table(seed), text_of(seed), 3)[1] for name in ("SDMC", "ELBO, time"))
    return operator.truediv(*both)


def quadrature_error_solved(length: int) -> float:
    """`quadrature_error` on the solved model, whose a(l) is a polynomial that three nodes integrate exactly."""
    return math.sqrt(quadrature_variance(moments_solved(length)) / (sum(count_and_mask_solved(length)) / 3))


def lost_by_floor_counts(length: int) -> float:
    """The lost share of the log-likelihood of a model whose tokens all have the same log-probability."""
    words = {"num_nodes": 3, "masks_per_node": 1, "counts": "floor", "domain": "keep"}
    plan = alg.quadrature_plan(rollout_of([[0] * length]), torch.Generator().manual_seed(0), **words)
    return 1 - float((plan.weight * plan.scored.sum(-1)).sum()) / length


# ====================================================================================================== StableDRL and SPG


def mean_ratio_of_fresh_masks() -> Found:
    """Mean of exp(difference of two estimates with masks of their own) at equal weights: every response of a table."""
    model, found = table(0, 3, 3), []
    for response in itertools.product(range(3), repeat=3):
        masks = [(1 / (3 * math.comb(3, len(m))), 3 / len(m) * s) for m, s in hidden_sums(model, response).items() if m]
        found.append(math.prod(sum(p * math.exp(sign * z) for p, z in masks) for sign in (1, -1)))
    return cases(found)


def ratio_of_shared_masks() -> Found:
    """|ratio - 1| at equal weights, the plan of the row scored twice."""
    method, model = methods.METHODS["stabledrl"], table(0, 3, 3)
    rollout = rollout_of(list(itertools.product(range(3), repeat=3)))
    plan = method.plan(rollout, torch.Generator().manual_seed(0))
    ll, anchor = (
        methods.reduced(method, plan, rollout, feat.features(model, rollout, plan, temperature=1.0, size=n)) for n in (256, 5)
    )
    return cases((alg.log_ratio(ll, anchor).exp() - 1).abs().flatten())


def weight_of_one_nat(length: int = 256, group: int = 16, groups: int = 20_000) -> Found:
    """Weights (8.3), cap 6, in the solved model, two stratified states, fresh masks: what one response's mean weight gains
    from log-ratio -1 to +1, over what it would gain without noise."""
    a, noise = torch.tensor(solved(length), dtype=torch.float64), torch.Generator().manual_seed(0)
    mask_std = torch.tensor(mask_variances(a.tolist()), dtype=torch.float64).sqrt()

    def estimate() -> Tensor:
        shape = (2, groups, group)
        u = (torch.arange(2)[:, None, None] + torch.rand(shape, generator=noise, dtype=torch.float64)) / 2
        count = (u * length).long()
        return (length * a[count] + mask_std[count] * torch.randn(shape, generator=noise, dtype=torch.float64)).mean(0)

    logs, answer = estimate() - estimate(), torch.zeros(group, dtype=torch.float64)
    answer[0] = 1.0
    logs = torch.cat([torch.zeros(1, group, dtype=torch.float64), logs])  # the first group has no noise
    up, down = ((logs + sign * answer).clamp(max=math.log(6.0)).softmax(1)[:, 0] for sign in (1, -1))
    change = (up - down)[1:] / (up - down)[0]
    half = 1.96 * float(change.std()) / math.sqrt(groups)
    return Found(float(change.mean()), float(change.mean()) - half, float(change.mean()) + half, cases=False)


def coefficients(objective: Callable, log_ratio: Tensor, adv: Tensor) -> Tensor:
    """What multiplies adv grad ll in the ascent direction, for the responses of one group."""
    ll = log_ratio.clone().requires_grad_()
    loss = objective(ll[None, :, None], torch.zeros_like(ll)[None, :, None], adv[None, :, None], len(ll)).loss.sum()
    return -torch.autograd.grad(loss, ll)[0] / adv


GROUP_ADV = torch.tensor([1.0, -1.5, 1.0, -0.5], dtype=torch.float64)


@functools.cache
def group_gradients() -> Tensor:
    """Exact gradients of the ELBO of four responses of a table."""
    model, responses = table(0, 3, 3), list(itertools.product(range(3), repeat=3))[1:5]
    return torch.stack([oracle.table_gradient(model, oracle.elbo(model, y)).flatten() for y in responses])


def group_step(objective: Callable, log_ratio: list[float]) -> Tensor:
    """The update of this group: sum of coefficient adv grad ll."""
    ratio = torch.tensor(log_ratio, dtype=torch.float64)
    return (coefficients(objective, ratio, GROUP_ADV) * GROUP_ADV) @ group_gradients()


def step_over_bound(name: str, log_ratios: tuple[float, ...]) -> Found:
    """Length of the update over max |adv| |grad ll|, where a bad response has this ratio and a good one its inverse."""
    method, g = methods.METHODS[name], group_gradients()
    limit, n = (GROUP_ADV.abs() * g.norm(dim=1)).max(), 1 if method.aggregation == "group_sum" else len(g)
    return cases(group_step(method.objective, [0.1, x, -x, 0.2]).norm() / n / limit for x in log_ratios)


@torch.no_grad()
def eubo_below_log_p(beta: float = 1.5, models: int = 200) -> Found:
    """Share of random models whose EUBO, over all masks, lies below log p."""
    masks, responses = oracle.all_subsets(3)[1:], list(itertools.product(range(3), repeat=3))
    scored = torch.tensor([[[i in m for i in range(3)]] for m in masks])
    weight = torch.tensor([[1 / (len(m) * math.comb(3, len(m)))] for m in masks], dtype=torch.float64)
    plan, below = alg.Plan(scored, scored, weight, scored.any(-1)), 0
    for seed in range(models):
        model, response = table(1000 + seed, 3, 3), responses[seed % 27]
        logp = feat.features(model, rollout_of([response]), plan, temperature=1.0)["logp"]
        below += bool(alg.eubo(logp, plan, beta=beta) < oracle.any_order_log_likelihood(model, response))
    return share(below, models)


@torch.no_grad()
def blocks_of_one_token(seed: int) -> float:
    """|block ELBO - log-likelihood from left to right|, of the shipped plan, nats."""
    settings = sampler.Sampler(order="left_to_right", temperature=1.0, length=LENGTH, block_length=1, tokens_per_step=1)
    rollout, model = rollout_of([text_of(seed)], sampler=settings), table(seed)
    plan = alg.block_elbo_plan(rollout, torch.Generator().manual_seed(0), num_states=1, domain="keep", strata=False)
    logp = feat.features(model, rollout, plan, temperature=1.0)["logp"]
    ll = alg.reduce_logp(logp, plan, level="sequence", normalizer=None)
    steps = [oracle.token_logp(model, text_of(seed), frozenset(range(i, LENGTH)))[i] for i in range(LENGTH)]
    return abs(float(ll.sum() - sum(steps)))


# ============================================================================================= trajectories: EGSPO, TraceRL


@dataclass(frozen=True)
class Walks:
    """Every trajectory of a sampler on a small table, as a batch of the module; adv: rewards less their mean."""

    model: oracle.TabularDenoiser
    order: str
    rollout: alg.Rollout
    chance: Tensor
    adv: Tensor

    def update(self, weight: Tensor, names: tuple[str, ...] = ("logp",), plan: alg.Plan | None = None) -> Tensor:
        """Gradient of the sum of weight times log pi(step), by the shipped features."""
        plan = every_step(self.rollout) if plan is None else plan
        states = torch.arange(plan.valid.numel())
        found = feat.state_features(self.model, self.rollout, plan, states, temperature=1.0, names=names)
        log_pi = sum(found.values()).sum(-1).unflatten(0, plan.valid.shape)
        return oracle.table_gradient(self.model, (weight * log_pi).sum())

    @functools.cached_property
    def gradient(self) -> Tensor:
        """Of the expected reward, by enumeration."""
        return oracle.policy_gradient(self.model, self.order, 1.0, 1, accepted)


def accepted(response: oracle.State) -> float:
    """Exactly two ones."""
    return float(sum(token == 1 for token in response) == 2)


def every_step(rollout: alg.Rollout) -> alg.Plan:
    """(3.1), nothing left out."""
    return alg.replay_plan(rollout, torch.Generator(), num_states=None, min_entropy=0.0)


@functools.cache
def walks(seed: int, order: str, vocab: int = 2) -> Walks:
    """Three positions, one token a step."""
    model = table(seed, 3, vocab)
    paths = oracle.trajectories(model, order, 1.0, 1)
    settings = sampler.Sampler(order=order, temperature=1.0, length=3, block_length=3, tokens_per_step=1)
    steps = torch.tensor([path.unmask_step for path in paths])
    rollout = rollout_of([path.response for path in paths], unmask_step=steps, sampler=settings)
    entropy = feat.features(model, rollout, every_step(rollout), temperature=1.0, names=("entropy",))["entropy"].sum(0)
    chance = torch.stack([path.prob.detach() for path in paths])
    reward = torch.tensor([accepted(path.response) for path in paths], dtype=torch.float64)
    return Walks(model, order, replace(rollout, records={"entropy": entropy}), chance, reward - (chance * reward).sum())


def gradient_error(seed: int, order: str, names: tuple[str, ...] = ("logp",), merge: int = 0) -> float:
    """Relative error of the expected update with the score ``names``, or with ``merge`` steps scored as one."""
    w = walks(seed, order)
    plan = alg.merged_plan(w.rollout, torch.Generator(), merge=merge) if merge else None
    return float((w.update(w.chance * w.adv, names, plan) - w.gradient).norm() / w.gradient.norm())


def merged_over_mean_field(seed: int) -> float:
    """Error of the gradient with two of the three steps scored as one, over that with all three."""
    return gradient_error(seed, "random", merge=2) / gradient_error(seed, "random", merge=3)


def loss_over_entropy_bound() -> Found:
    """What leaving out steps costs over 2 max|adv| times their expected entropy: five tables, every fixed set of steps."""
    found = []
    for seed in range(5):
        w = walks(seed, "random", 3)
        for left_out in oracle.all_subsets(3)[1:]:
            outside = torch.tensor([[float(s in left_out)] for s in range(3)], dtype=torch.float64)
            lost = w.update(w.chance * w.adv * outside).norm()
            entropy = (w.chance[:, None] * w.rollout.records["entropy"] * outside.flatten()[w.rollout.unmask_step]).sum()
            found.append(lost / (2 * w.adv.abs().max() * entropy))
    return cases(found)


def mean_score_of_selected_steps(seed: int) -> float:
    """Length of the mean score of each trajectory's most uncertain step, over that of the gradient; 0 for a fixed step."""
    w = walks(seed, "random")
    plan = alg.entropy_plan(w.rollout, torch.Generator(), num_states=1, shared=False, weight="sum")
    return float(w.update(w.chance, plan=plan).norm() / w.gradient.norm())


@torch.no_grad()
def last_step_values() -> Found:
    """|mean reward of drawn one-step completions - value| in all states of a table with one hidden token."""
    model, found = table(0, 3, 3), []
    for state in (s for s in itertools.product(range(4), repeat=3) if s.count(3) == 1):
        kernel = oracle.transition(model, state, range(3), "low_confidence", 1.0, 1)
        value = sum(p * accepted(response) for response, p in kernel.items())
        drawn = oracle.proposals(model, state, [state.index(3)], 1.0)
        filled = [(tuple(tokens.get(i, token) for i, token in enumerate(state)), p) for tokens, p in drawn]
        found.append(abs(sum(p * accepted(response) for response, p in filled) - value))
    return cases(found)


# ========================================================================================================= trust regions


def weights(name: str, pi: Tensor, mu: Tensor, adv: Tensor) -> Tensor:
    """w in -grad loss = adv (pi / mu) w grad log pi, of a row's objective."""
    ll = pi.log().requires_grad_()
    loss = methods.METHODS[name].objective(ll, mu.log(), adv, 1).loss.sum()
    return torch.autograd.grad(loss, ll)[0] / (-adv * pi / mu)


def tokens_on_a_grid() -> tuple[Tensor, Tensor, Tensor]:
    """pi, mu and the sign of the advantage, on a grid of (0, 1)."""
    side = torch.arange(1, 100, dtype=torch.float64) / 100
    axes = (side - 0.0037, side - 0.0061, torch.tensor([1.0, -1.0], dtype=torch.float64))  # never on a boundary
    return tuple(x.flatten() for x in torch.meshgrid(*axes, indexing="ij"))


def two_tokens() -> Found:
    """A rare token that became less rare, a likely bad one that lost a fifth: how many of four weights are as stated."""
    mu, pi, adv = torch.tensor([[1e-4, 0.99], [1e-2, 0.80], [1.0, -1.0]], dtype=torch.float64)
    found = torch.cat([weights(name, pi, mu, adv) for name in ("ppo", "dppo-tv")])
    return cases([torch.isclose(found, torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)).sum()])


def boundaries_that_differ() -> Found:
    """Share of the grid on which DRPO pulls back and DPPO does not stop, or the other way round."""
    pi, mu, adv = tokens_on_a_grid()
    return cases([((weights("drpo", pi, mu, adv) > 0) != (weights("dppo-tv", pi, mu, adv) > 0)).double().mean()])


def smallest_weight(name: str) -> Found:
    """On the grid."""
    return cases([weights(name, *tokens_on_a_grid()).min()])


def settle(name: str, mu: float, sign: float, rate: float = 0.05, momentum: float = 0.9, steps: int = 400) -> float:
    """Distance from mu + sign 0.15 after some steps on one sample: a softmax of 20 tokens, momentum."""
    z = torch.full((20,), (1 - mu) / 19, dtype=torch.float64)
    z[0] = mu
    z, velocity, start = z.log(), torch.zeros(20, dtype=torch.float64), math.log(mu)
    for _ in range(steps):
        z.requires_grad_()
        ll = z.log_softmax(0)[0]
        loss = methods.METHODS[name].objective(ll, torch.tensor(start).double(), torch.tensor(sign).double(), 1).loss
        velocity = momentum * velocity - torch.autograd.grad(loss, z)[0]
        z = z.detach() + rate * velocity
    return abs(float(z.softmax(0)[0]) - (mu + sign * 0.15))


def settled(name: str, tokens: tuple[tuple[float, float], ...]) -> Found:
    """Tokens (mu, sign of the advantage)."""
    return cases(settle(name, mu, sign) for mu, sign in tokens)


COMMON = ((0.02, 1.0), (0.5, 1.0), (0.5, -1.0), (0.95, -1.0))  # one good and rarer, one good and likely, two bad and likely
SPREAD = COMMON + ((0.1, 1.0), (0.8, 1.0), (0.2, -1.0), (0.99, -1.0))
RARE = ((0.003, 1.0), (0.002, 1.0), (0.001, 1.0))
NEARLY_CERTAIN = ((0.849, 1.0), (0.995, -1.0))


def regression_on_policy() -> Found:
    """|coefficient of GDSD's loss at ratio 1 over 2 psi / L, less 1|."""
    objective, adv = methods.METHODS["gdsd"].objective, torch.tensor([0.7, -0.3, 0.1, -0.5], dtype=torch.float64)
    found = coefficients(partial(objective, length=LENGTH), torch.zeros(4, dtype=torch.float64), adv)
    return cases((found / (2 * objective.keywords["psi"] / LENGTH) - 1).abs())


# ========================================================================================== runs that take minutes: recorded

RECORDED = json.loads((Path(__file__).parent / "claims.json").read_text())


@functools.cache
def instability() -> list[dict]:
    """One dict a run of research/benchmarks/instability.py."""
    return study.stored(study.RESULTS / "instability.json")


def of_line(name: str, scale: str) -> list[dict]:
    """Its runs, by seed."""
    return study.of_line(instability(), scale, name)


def reward_gained(name: str, scale: str = "sequence") -> Found:
    """Mean reward of the last hundred updates less that of the first ten."""
    return runs([study.gained(run) for run in of_line(name, scale)])


def below_the_peak(name: str, scale: str) -> Found:
    """The highest mean reward of a hundred updates in a row less that of the last hundred."""
    return runs([study.fallen(run) for run in of_line(name, scale)])


def growth_of_spread(name: str, scale: str) -> Found:
    """Standard deviation of the log-ratio, nats: mean of the last hundred updates less that of the first hundred."""
    return runs([statistics.mean(run["spread"][-10:]) - statistics.mean(run["spread"][:10]) for run in of_line(name, scale)])


def growth_of_gradients(name: str, scale: str) -> Found:
    """The largest gradient norm of ten updates: its mean over the last hundred updates, over that of the first hundred."""
    return runs([statistics.mean(run["norm"][-10:]) / statistics.mean(run["norm"][:10]) for run in of_line(name, scale)])


def reward_above(name: str, other: str, scale: str) -> Found:
    """Reward at the end, by common seeds: of a line less that of another; of a pair of the page, with Holm's correction.

    The interval is at the level that the correction leaves to this pair: it contains 0 where the corrected p is 0.05 or more.
    """
    (found,) = (pair for pair in page.paired_lines(instability(), scale) if pair[:2] == (name, other))
    _, _, values, pair, adjusted = found
    return Found(*intervals.mean_interval(values, 1 - page.LEVEL * pair.p / adjusted), cases=False)


RACE = "`python research/benchmarks/instability.py`, docs/instability_measured.md"


def of_runs(text: str, source: str, names: str | tuple[str, str], scale: str | None, measure: Callable, words: str) -> Claim:
    """A claim about a line of the study, or two, with the seeds that are there. words: what is measured, and the criterion.

    scale: of the ratio; None for a line that has no ratio, whose runs are stored under one of them.
    """
    names = (names,) if isinstance(names, str) else names
    text = f"{text} (ratio of the {scale})." if scale else f"{text} (no ratio, so no scale)."
    scale = scale or next((scale for scale in study.SCALES if of_line(names[0], scale)), "sequence")
    seeds = set.intersection(*({run["seed"] for run in of_line(name, scale)} for name in names))
    if len(seeds) < 2:
        return not_run(
            text, source, f"needs two seeds of {' and of '.join(names)}, `python research/benchmarks/instability.py`"
        )
    number, _, criterion = words.partition(": ")
    made = f"{len(seeds)} seeds x {max(run['updates'] for run in of_line(names[0], scale)):,} updates"
    return Claim(text, source, RACE, made, number, lambda: measure(*names, scale), criterion)


def rl_less_self_training(of: str, decoding: str = "temperature 1") -> Found:
    """Points, seed by seed, of the recorded controls ``of`` a job."""
    solved_by = RECORDED[of]["solved"]
    pairs = zip(solved_by[f"after RL, {decoding}"], solved_by[f"self-training, {decoding}"], strict=True)
    return runs([a - b for a, b in pairs])


@functools.cache
def of_study(study: str) -> dict[tuple[str, int], Group]:
    """A study's methods by (name, updates a rollout), from research/results/ledger.csv; none where it has not been run."""
    path = ROOT / "research" / "results" / "ledger.csv"
    rows = [row for row in read_ledger(path) if row["study"] == study] if path.exists() else []
    return {(group.method, group.updates): group for group in groups(rows, study)} if rows else {}


def by_seed(study: str, line: tuple[str, int], measure: Callable[[dict], float]) -> dict[int, float]:
    """A number of each run of the report that ended, in points. line: method, updates a rollout."""
    found = of_study(study).get(line)
    return {seed: 100 * measure(row) for seed, row in found.ended.items()} if found else {}


def in_study(
    text: str,
    study: str,
    methods: tuple[str, ...],
    words: str,
    measure: Callable[[dict], float],
    source: str = "minidrl",
    updates: int = 1,
) -> Claim:
    """A claim about a method's runs of a study, or about those of two, paired by seed. words: what is measured: criterion."""
    runs_of = [by_seed(study, (method, updates), measure) for method in methods]
    seeds = sorted(set.intersection(*map(set, runs_of)))
    if len(methods) == 2:
        one, other = ((method, updates) for method in methods)
        found = functools.partial(difference, study, one, other, measure)
    else:
        found = functools.partial(runs, [runs_of[0][seed] for seed in seeds])
    return of_seeds(text, source, study, seeds, words, found)


def of_seeds(text: str, source: str, study: str, seeds: list[int], words: str, found: Callable[[], Found]) -> Claim:
    """A claim that these seeds of a study decide; not run with fewer than two."""
    command = f"python -m minidrl compare research/studies/{study}.yaml"
    if len(seeds) < 2:
        return not_run(text, source, f"needs two seeds of `{command}`")
    number, _, criterion = words.partition(": ")
    puzzles = next(iter(of_study(study).values())).report[0]["judged"].partition(" ")[0]
    made = f"{len(seeds)} seeds, {int(puzzles):,} puzzles"
    return Claim(text, source, f"`{command}`", made, number, found, criterion)


def reused(text: str, study: str, method: str) -> Claim:
    """A claim that 8 updates on each rollout solve more than one, seed by seed; the rate of each was chosen for it."""
    many, one = (by_seed(study, (method, updates), after) for updates in (8, 1))
    seeds = sorted(many.keys() & one.keys())
    found = functools.partial(runs, [many[seed] - one[seed] for seed in seeds])
    return of_seeds(text, "minidrl", study, seeds, "points: > 0", found)


# Studies whose results were looked at before their last runs were made, and how often in all.
LOOKS = {"likelihoods": 3}
# Lines that are another line once more, run for run: with lambda 0 egspo-sa is egspo. No pair of theirs is a comparison.
TWINS = {"steps": {("sa-0", 1)}}


def difference(study: str, one: tuple[str, int], other: tuple[str, int], measure: Callable[[dict], float]) -> Found:
    """Points, by common seeds: of a line of a study less another, with Holm's correction over all pairs of the study that are
    measured so and have one number of updates each, and p times the number of ``LOOKS``.

    The interval is at the level that the correction leaves to this pair: it contains 0 where the corrected p is 0.05 or more.
    """
    lines = {line: group for line, group in of_study(study).items() if line not in TWINS.get(study, ())}
    asked = [lines[one], lines[other]]
    found = next(pair for pair in findings.pairs(list(lines.values()), measure) if pair.a in asked and pair.b in asked)
    ends, others = (by_seed(study, line, measure) for line in (one, other))
    values = [ends[seed] - others[seed] for seed in sorted(ends.keys() & others.keys())]
    adjusted = min(1.0, LOOKS.get(study, 1) * found.p)
    return Found(*intervals.mean_interval(values, 1 - findings.LEVEL * found.found.p / adjusted), cases=False)


def greedy(run: dict) -> float:
    """Solved at the end at temperature 0, in the order of the study, a share."""
    return run["greedy_after"]


@functools.cache
def courses_of(study: str) -> Courses:
    """The curves of a study's runs."""
    return read_courses(ROOT / "research/results/curves.csv", study)


def at_the_calls_of_self_training(run: dict) -> float:
    """Solved once the network calls of the shortest run of self-training are spent; linear between evaluations."""
    spent = [line["calls"] for line in of_study("main_job")["self-training", 1].ended.values()]
    return findings.solved_after(courses_of("main_job"), run["cell"], min(spent))


def gained(run: dict) -> float:
    """Of it, what the base had not."""
    return run["after"] - run["before"]


def gained_greedily(run: dict) -> float:
    """Solved greedily in random order at the end, less what the base solves so."""
    return run["greedy_after"] - GREEDY_IN_RANDOM_ORDER


def best(name: str) -> float:
    """Percent solved by a method, at the better of its recorded learning rates."""
    return max(x for rate in ("3e-4", "1e-3") if (x := RECORDED["methods"]["solved"][name][rate]) is not None)


def points(name: str, other: str | None = None) -> Found:
    """Of a method less those of another, or of the base."""
    words = RECORDED["methods"]
    return percent_difference(best(name), best(other) if other else words["base"], words["puzzles"])


# ============================================================================================================ the ledger

TABLE_SEEDS, GRID = f"exact, {TABLES} tables", "exact, grid of 19,602 tokens"
KERNEL = ("logp", "order_logp")
ACCOUNTS, FRESH = "accounts of arXiv 2603.06743", "grpo, fresh masks"
NOISY_FIELD = "grpo, mean field, prompt masking"


def both(text: str, source: str, names: str | tuple[str, str], words: str, measure: Callable = reward_gained) -> list[Claim]:
    """The claim at each scale of the ratio."""
    return [of_runs(text, source, names, scale, measure, words) for scale in ("sequence", "token mean")]


COMPARE = "docs/results.md (command 2)"
GREEDY_IN_RANDOM_ORDER = 0.1953  # of countdown20_base, 100 of 512: the command of the next line
BEST_DECODER = (
    0.295  # of countdown20_base: its model card, `python research/benchmarks/decoders.py tiny_configs/countdown20_cpu.yaml`
)
ONE_RUN = "1 run each, 512 puzzles"

LEDGER: dict[str, list[Claim]] = {
    "The ELBO: LLaDA, LLaDA 1.5 (VRPO), ESPO": [
        Claim("The ELBO is at most the log-likelihood of the sampler that reveals one random position at a time.",
            "arXiv 2502.09992, eq. 6", "`tests/test_oracle.py`", TABLE_SEEDS,
            "log p - ELBO, nats", lambda: over_tables(slack_of_the_bound), ">= 0"),
        Claim("The ELBO is at most the log-likelihood of the low-confidence sampler, which usually makes the rollouts.",
            "minidrl, on ELBO ratios with such rollouts", "`research/benchmarks/claims.py`", f"exact, {TABLES} tables x 8 responses",
            "log p - ELBO, nats", slack_for_confident_samplers, ">= 0"),
        Claim("With two calls, one mask at each of two times has no more variance than two masks at one time.",
            "arXiv 2505.19223, Prop. 1", "`law_total_variance_and_its_allocation`, notebook 05 (50.1)", TABLE_SEEDS,
            "variance, one time over two", lambda: over_tables(spread_over_times), ">= 1"),
        Claim("A mask and its complement have less variance than two independent masks of the same law.",
            "practice of arXiv 2512.03759 (code)", "`law_complementary_variance`, notebook 02 (20.7)", TABLE_SEEDS,
            "variance, pair over two masks", lambda: over_tables(pairs_over_singles), "< 1"),
        Claim("A mask and its complement have less variance than two masks of the count form: 6 positions.",
            "practice of arXiv 2512.03759 (code)", "`law_complementary_variance`, notebook 02 (20.7)", TABLE_SEEDS,
            "variance, pair over two masks", lambda: over_tables(pairs_over_the_count_form), "< 1"),
        Claim("A mask and its complement have less variance than two masks of the count form: solved model.",
            "practice of arXiv 2512.03759 (code)", "notebook 02 (20.14)", "exact, solved models, L = 6, 64, 256",
            "variance, pair over two masks", lambda: cases([pairs_in_the_solved_model(n) for n in (6, 64, 256)]), "< 1"),
    ],
    "d1 / diffu-GRPO": [
        Claim("On two bits that agree, then differ, the ratio of one-step mean fields follows that of the likelihoods.",
            "minidrl, on arXiv 2504.12216, eq. 4: made to fail", "notebook 04 (40.3)", "exact, 4 responses",
            "error of the log-ratio, nats", mean_field_misses_the_ratio, "<= 0.1"),
        Claim("diffu-GRPO raises the share of Countdown puzzles that are solved: right to left.",
            "arXiv 2504.12216", COMPARE, ONE_RUN,
            "points above the base, the rate chosen on the same puzzles", lambda: points("diffu-grpo"), "> 0"),
        in_study("The same: random order, the rate chosen on other puzzles by two other seeds.",
            "likelihoods", ("diffu-grpo",), "points above the base: > 0", gained, "arXiv 2504.12216"),
        in_study("The same runs, base and result decoded greedily; the paper's greedy decoding is in low-confidence order.",
            "likelihoods", ("diffu-grpo",), "points above the base: > 0", gained_greedily, "arXiv 2504.12216"),
        in_study("diffu-GRPO solves as much as wd1, which has its masks, and no ratio, no KL term, no reference calls.",
            "likelihoods", ("diffu-grpo", "wd1"), "points: >= 0", after, "minidrl, on arXiv 2504.12216"),
    ],
    "GDPO": [
        Claim("Nearly all variance of the time form (2.2) is that of the time: 256 positions, each with costs of its own.",
            "accounts of arXiv 2510.08554 (0.9 and t from 0.001 on are ours)", "notebook 05a (50.2)", "exact, solved model",
            "share of the time", lambda: cases([share_of_first(time_and_bernoulli(moments_solved(256)))]), ">= 0.9"),
        Claim("The same: 256 positions, one of which decides for all.",
            "minidrl, on accounts of arXiv 2510.08554 (0.9 and t from 0.001 on are ours)", "notebook 02 (20.13)",
            "exact, key token",
            "share of the time", lambda: cases([share_of_first(time_and_bernoulli(moments_key_token(256)))]), ">= 0.9"),
        Claim("The same: responses of 6 positions.",
            "minidrl, on accounts of arXiv 2510.08554 (0.9 and t from 0.001 on are ours)", "notebook 05 (50.1)", TABLE_SEEDS,
            "share of the time", lambda: over_tables(lambda seed: share_of_first(time_and_bernoulli(moments_of_sums(seed)))),
            ">= 0.9"),
        Claim("Nearly all variance of the count form (2.3) is that of the count: 256 positions, each with costs of its own.",
            "minidrl, on arXiv 2510.08554 (0.9 is ours)",
            "`law_two_models_with_known_variances`, notebook 05a (50.2)", "exact, solved model",
            "share of the count", lambda: cases([share_of_first(count_and_mask_solved(256))]), ">= 0.9"),
        Claim("The same: 256 positions, one of which decides for all.",
            "minidrl, on arXiv 2510.08554 (0.9 is ours)",
            "`law_two_models_with_known_variances`, notebook 02 (20.13)", "exact, key token",
            "share of the count", lambda: cases([share_of_first(count_and_mask_key_token(256))]), ">= 0.9"),
        Claim("The same: responses of 6 positions.",
            "minidrl, on arXiv 2510.08554 (0.9 is ours)",
            "`law_total_variance_and_its_allocation`, notebook 05 (50.1)", TABLE_SEEDS,
            "share of the count", lambda: over_tables(lambda seed: share_of_first(count_and_mask(seed))), ">= 0.9"),
        Claim("Quadrature has no bias from half as many nodes as positions on.",
            "minidrl, on arXiv 2510.08554", "`law_quadrature_is_exact_from_half_the_length`, notebook 05 (50.6)", TABLE_SEEDS,
            "bias of 3 nodes at 6 positions, nats", lambda: over_tables(bias_of_three_nodes), "<= 1e-8"),
        Claim("At three calls SDMC has less variance than double Monte Carlo, a random time from 0.001 on and a mask a call.",
            "arXiv 2510.08554, abstract (0.001 is ours)", "`research/benchmarks/claims.py`, notebook 05 (50.11)", TABLE_SEEDS,
            "standard deviation, SDMC over the time form", lambda: over_tables(quadrature_over_double_monte_carlo), "< 1"),
        Claim("It also has a smaller error than three draws of the count form, not the paper's baseline: 6 positions.",
            "minidrl, on arXiv 2510.08554", "`law_quadrature_variance`, notebook 05 (50.7)", TABLE_SEEDS,
            "error, SDMC over the count form", lambda: over_tables(quadrature_error), "< 1"),
        Claim("The same at 16 to 256 positions, for an a(l) quadratic in l, which two nodes integrate exactly.",
            "minidrl, on arXiv 2510.08554", "notebook 05a (50.16)", "exact, solved models, L = 16, 64, 256",
            "error, SDMC over the count form", lambda: cases(quadrature_error_solved(n) for n in (16, 64, 256)), "< 1"),
        Claim("Floor counts with weight 1/t keep the scale of a log-likelihood to 2 %: 256 positions, as the code has.",
            "minidrl, on the code of arXiv 2510.08554", "`law_constant_models_show_the_scale`, notebook 05a (50.9)", "exact",
            "lost share", lambda: cases([lost_by_floor_counts(256)]), "<= 0.02"),
        Claim("The same at 8 and 16 positions, which the code was not written for.",
            "minidrl, on the code of arXiv 2510.08554", "`law_constant_models_show_the_scale`, notebook 05a (50.9)",
            "exact, L = 8, 16",
            "lost share", lambda: cases(lost_by_floor_counts(n) for n in (8, 16)), "<= 0.02"),
        Claim("GDPO solves more Countdown puzzles than diffu-GRPO: right to left, one update a rollout.",
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)", COMPARE, ONE_RUN,
            "points, each rate chosen on the same puzzles", lambda: points("gdpo", "diffu-grpo"), "> 0"),
        in_study("The same: random order, equal network calls, rates chosen by two other seeds.",
            "likelihoods", ("gdpo", "diffu-grpo"), "points: > 0", after,
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)"),
        in_study("The same runs, judged by greedy decoding; rates were chosen at temperature 1.",
            "likelihoods", ("gdpo", "diffu-grpo"), "points: > 0", greedy,
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)"),
        in_study("GDPO against diffu-GRPO at temperature 1 once more: new seeds and puzzles, rates as before, looked at once.",
            "likelihoods_again", ("gdpo", "diffu-grpo"), "points: > 0", after,
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)"),
        in_study("GDPO against diffu-GRPO once more, judged by greedy decoding: rates chosen at temperature 1.",
            "likelihoods_again", ("gdpo", "diffu-grpo"), "points: > 0", greedy,
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)"),
        in_study("GDPO against diffu-GRPO with 12 updates on a rollout, as both publish: random order, temperature 1.",
            "likelihoods_reuse", ("gdpo", "diffu-grpo"), "points: > 0", after,
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)", updates=12),
        in_study("GDPO against diffu-GRPO with 12 updates on a rollout, judged by greedy decoding.",
            "likelihoods_reuse", ("gdpo", "diffu-grpo"), "points: > 0", greedy,
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)", updates=12),
        in_study("There GDPO's released code, as gdpo-released has it, solves more than diffu-GRPO.",
            "likelihoods_reuse", ("gdpo-released", "diffu-grpo"), "points: > 0", after,
            "accounts of arXiv 2510.08554 (its abstract: most benchmarks)", updates=12),
        in_study("There it solves more than the base.",
            "likelihoods_reuse", ("gdpo-released",), "points above the base: > 0", gained,
            "accounts of arXiv 2510.08554 (its abstract: consistent gains)", updates=12),
        in_study("GDPO solves more Countdown puzzles than the base: random order, temperature 1.",
            "likelihoods", ("gdpo",), "points above the base: > 0", gained,
            "accounts of arXiv 2510.08554 (its abstract: consistent gains)"),
        in_study("The same, both decoded greedily; the rate was chosen at temperature 1.",
            "likelihoods", ("gdpo",), "points above the base: > 0", gained_greedily,
            "accounts of arXiv 2510.08554 (its abstract: consistent gains)"),
        in_study("GDPO solves more Countdown puzzles than coupled-GRPO: random order, equal network calls.",
            "likelihoods", ("gdpo", "coupled-grpo"), "points: > 0", after, "accounts of arXiv 2510.08554 (a table)"),
        in_study("The same runs, judged by greedy decoding.",
            "likelihoods", ("gdpo", "coupled-grpo"), "points: > 0", greedy, "accounts of arXiv 2510.08554 (a table)"),
        in_study("GDPO against coupled-GRPO at temperature 1 once more: new seeds and puzzles, looked at once.",
            "likelihoods_again", ("gdpo", "coupled-grpo"), "points: > 0", after, "accounts of arXiv 2510.08554 (a table)"),
        in_study("GDPO against coupled-GRPO once more, judged by greedy decoding: rates chosen at temperature 1.",
            "likelihoods_again", ("gdpo", "coupled-grpo"), "points: > 0", greedy, "accounts of arXiv 2510.08554 (a table)"),
        in_study("GDPO solves more than wd1, which has the masks of diffu-GRPO and no KL term either: random order.",
            "likelihoods", ("gdpo", "wd1"), "points: > 0", after, "minidrl, on arXiv 2510.08554"),
        in_study("SDMC trains better than double Monte Carlo: GDPO's row, three masks, random order, one rate, equal calls.",
            "nodes", ("sdmc-3", "double-3"), "points: > 0", after, "accounts of arXiv 2510.08554"),
        in_study("The same runs, judged by greedy decoding.",
            "nodes", ("sdmc-3", "double-3"), "points: > 0", greedy, "accounts of arXiv 2510.08554"),
        in_study("More nodes train better than fewer at equal calls: three against two.",
            "nodes", ("sdmc-3", "sdmc-2"), "points: > 0", after, "accounts of arXiv 2510.08554"),
        in_study("The same: four against three.",
            "nodes", ("sdmc-4", "sdmc-3"), "points: > 0", after, "accounts of arXiv 2510.08554"),
        in_study("Arcs (2.11) instead of SDMC make GDPO solve more: random order, one rate for both.",
            "arcs", ("gdpo-arcs", "gdpo"), "points: > 0", after),
        in_study("The same: rates chosen for each, equal network calls; five seeds of SDMC are those of the line above.",
            "likelihoods", ("gdpo-arcs", "gdpo"), "points: > 0", after),
        in_study("Arcs against SDMC once more: new seeds and puzzles, looked at once.",
            "likelihoods_again", ("gdpo-arcs", "gdpo"), "points: > 0", after),
    ],
    "StableDRL": [
        Claim("Masks of their own for old and new are noise in the ratio: of equal weights its mean is above 1.01.",
            "arXiv 2603.06743, abstract (the noise)", "`law_fresh_masks_inflate_the_ratio`, notebook 06 (60.1)",
            "exact, 27 responses",
            "mean ratio", mean_ratio_of_fresh_masks, "> 1.01"),
        Claim("With fresh masks at 256 positions, weights of sequence ratios keep a tenth of what 1 nat should do to them.",
            "minidrl, on arXiv 2603.06743", "notebook 06a (60.10)", "solved model, 20,000 groups",
            "gain of the mean weight, over that without noise", weight_of_one_nat, ">= 0.1"),
        Claim("With shared masks for old and new, the ratio of equal weights is 1.",
            "minidrl, on arXiv 2603.06743", "`law_shared_masks_make_the_first_update_on_policy`, notebook 06a (60.14)",
            "exact, 27 responses",
            "abs(ratio - 1)", ratio_of_shared_masks, "<= 1e-8"),
        Claim("GRPO's clip is conditional: noise in the ratio passes it.",
            "arXiv 2603.06743, abstract", "`law_one_large_ratio`, notebook 06 (60.6)", "exact, ratios e^3, e^10, e^30",
            "update over max abs(adv) norm(grad ll)", lambda: step_over_bound("grpo", (3.0, 10.0, 30.0)), "> 1"),
        Claim("Self-normalised weights keep a group's update below its largest adv grad ll, whatever the ratios.",
            "accounts of arXiv 2603.06743", "`law_one_large_ratio`, notebook 06 (8.4)",
            "exact, ratios to e^30",
            "update over max abs(adv) norm(grad ll)", lambda: step_over_bound("stabledrl", (0.0, 3.0, 10.0, 30.0)), "<= 1"),
        *happens(*both("GRPO with noisy ratios collapses: it ends below where it began",
            "arXiv 2603.06743, abstract", FRESH, "reward gained: < 0")),
        *happens(of_runs("GRPO with noisy ratios rises, then falls back: it ends more than 0.03 below its peak",
            "arXiv 2603.06743, abstract", FRESH, "token mean", below_the_peak, "peak less end: > 0.03")),
        of_runs("StableDRL rises, then falls back: it ends more than 0.03 below its peak",
            "minidrl, on arXiv 2603.06743", "stabledrl",
            "sequence", below_the_peak, "peak less end: > 0.03"),
        *happens(of_runs("GRPO's log-ratios spread further while it trains, one step of the loop",
            "arXiv 2603.06743, abstract", FRESH,
            "token mean", growth_of_spread, "spread, end less start: > 0")),
        *happens(of_runs("GRPO's log-ratios spread further while it trains, one step of the loop",
            "arXiv 2603.06743, abstract", FRESH,
            "sequence", growth_of_spread, "spread, end less start: > 0")),
        *happens(of_runs("GRPO's largest gradients grow while it trains, one step of the loop",
            "arXiv 2603.06743, abstract", FRESH,
            "token mean", growth_of_gradients, "largest norm of ten updates, end over start: > 1")),
        *happens(of_runs("GRPO's largest gradients grow while it trains, one step of the loop",
            "arXiv 2603.06743, abstract", FRESH,
            "sequence", growth_of_gradients, "largest norm of ten updates, end over start: > 1")),
        *happens(*both("GRPO with noisy mean fields (prompts masked anew) collapses: it ends below where it began",
            "arXiv 2603.06743, abstract (mean-field proxies)", NOISY_FIELD, "reward gained: < 0")),
        *happens(of_runs("GRPO with noisy mean fields rises, then falls back: it ends more than 0.03 below its peak",
            "arXiv 2603.06743, abstract (mean-field proxies)", NOISY_FIELD, "token mean", below_the_peak,
            "peak less end: > 0.03")),
        *both("StableDRL, with fresh masks as well, ends above where it began",
            "arXiv 2603.06743, abstract", "stabledrl", "reward gained: > 0"),
        *both("GRPO with PPO's dual clip at 3, with fresh masks as well, ends above where it began",
            "minidrl, on arXiv 1912.09729", FRESH + study.DUAL, "reward gained: > 0"),
        *happens(*both("StableDRL's clip alone collapses", ACCOUNTS, "clip-only", "reward gained: < 0")),
        *happens(*both("StableDRL's self-normalisation alone collapses",
            ACCOUNTS, "self-norm-only", "reward gained: < 0")),
        *happens(*both("StableDRL with epsilon = 1000 collapses",
            ACCOUNTS, "stabledrl, epsilon 1000", "reward gained: < 0")),
        *both("With mean fields of prompts masked anew StableDRL ends above GRPO",
            "arXiv 2603.06743, abstract (mean-field proxies)",
            ("stabledrl, mean field, prompt masking", NOISY_FIELD),
            "difference of rewards: > 0", reward_above),
        *both("The published epsilon = 5 ends above epsilon = 1", ACCOUNTS,
            ("stabledrl", "stabledrl, epsilon 1"), "difference of rewards: > 0", reward_above),
        *both("StableDRL ends above GRPO with masks that old and new share", "minidrl, on arXiv 2603.06743",
            ("stabledrl", "grpo, shared masks"), "difference of rewards: > 0", reward_above),
        not_run("StableDRL beats other methods on mathematics, with full attention and with blocks.",
            "arXiv 2603.06743, ICML abstract", "needs 8B weights"),
        in_study("With 12 updates on a rollout stabledrl-released, its code's row, solves more puzzles than the base.",
            "likelihoods_reuse", ("stabledrl-released",), "points above the base: > 0", gained,
            "arXiv 2603.06743, abstract", updates=12),
        in_study("There it solves more than diffu-GRPO, whose old and new value share the noise.",
            "likelihoods_reuse", ("stabledrl-released", "diffu-grpo"), "points: > 0", after,
            "minidrl, on accounts of arXiv 2603.06743", updates=12),
        in_study("A control variate (2.12), where old and new have masks of their own, makes StableDRL's row solve more.",
            "control_variate", ("stabledrl-cv", "arcs"), "points: > 0", after),
        in_study("The same row with masks that both sides share solves more than with masks of their own.",
            "control_variate", ("shared", "arcs"), "points: > 0", after),
    ],
    "SPG": [
        Claim("SPG's evidence upper bound as it is computed, without its constant, lies above the log-likelihood (beta = 1.5).",
            "name in the code of arXiv 2510.09541", "`law_eubo_is_a_surrogate_not_a_bound`, notebook 06 (60.13)",
            "200 random models, all masks",
            "share below log p", eubo_below_log_p, "<= 0"),
        *happens(of_runs("SPG, its row with two states and the sandwich, collapses where each rollout is used for four updates",
            ACCOUNTS, "spg", None, reward_gained, "reward gained: < 0")),
    ],
    "Block diffusion": [
        Claim("Blocks of one token make the block ELBO exact.",
            "minidrl, on arXiv 2503.09573", "`law_blocks_of_one_token_are_exact`, notebook 07 (70.8)", TABLE_SEEDS,
            "error, nats", lambda: over_tables(blocks_of_one_token), "<= 1e-8"),
        in_study("StableDRL on blocks, four updates on a rollout, solves more Countdown puzzles than the base.",
            "blocks", ("stabledrl-block",), "points above the base: > 0", gained, "minidrl, on accounts of arXiv 2603.06743",
            updates=4),
        in_study("There it solves more than the recorded run of the sampler with PPO's clip, trace-block.",
            "blocks", ("stabledrl-block", "trace-block"), "points: > 0", after, "minidrl, on accounts of arXiv 2603.06743",
            updates=4),
        in_study("The same with one update on a rollout.",
            "blocks", ("stabledrl-block", "trace-block"), "points: > 0", after, "minidrl, on accounts of arXiv 2603.06743"),
        in_study("With shared masks, drawn anew for each of four updates, StableDRL on blocks solves more than with its own.",
            "blocks_masks", ("paired", "fresh"), "points: > 0", after, "minidrl, on accounts of arXiv 2603.06743",
            updates=4),
        in_study("With such masks it solves more than trace-block.",
            "blocks_masks", ("paired", "trace-block"), "points: > 0", after, "minidrl, on accounts of arXiv 2603.06743",
            updates=4),
        in_study("With four updates eight draws of masks a response train better than one.",
            "blocks", ("stabledrl-block-8", "stabledrl-block-1"), "points: > 0", after, "minidrl, on arXiv 2603.06743",
            updates=4),
    ],
    "Trajectories: EGSPO, TraceRL, MDPO": [
        Claim("The sum over steps of advantage times score is the policy gradient: random order.",
            "arXiv 2603.12554, abstract", "`law_replay_gradient_is_the_policy_gradient`, notebook 08 (80.3)", TABLE_SEEDS,
            "relative error", lambda: over_tables(lambda seed: gradient_error(seed, "random")), "<= 1e-8"),
        Claim("That sum is the policy gradient in low-confidence order, with the tokens' score alone, rewards centred.",
            "minidrl, on the code of arXiv 2603.12554, 2509.06949",
            "`law_replay_of_confident_samplers_is_token_only`, notebook 08 (80.9)", TABLE_SEEDS,
            "relative error", lambda: over_tables(lambda seed: gradient_error(seed, "low_confidence")), "<= 1e-8"),
        Claim("That sum is the policy gradient in low-confidence order, with the factor (4.2), rewards centred.",
            "minidrl, on arXiv 2603.12554", "`law_exact_score_is_the_policy_gradient`, notebook 08 (80.9)", TABLE_SEEDS,
            "relative error", lambda: over_tables(lambda seed: gradient_error(seed, "low_confidence", KERNEL)), "<= 1e-8"),
        Claim("Leaving out a fixed set of steps costs at most 2 max abs(adv) times their expected entropy.",
            "minidrl, on accounts of arXiv 2603.12554", "`law_entropy_bounds_what_a_fixed_selection_loses`, notebook 08 (80.5)",
            "exact, 5 tables x 7 sets",
            "loss over bound", loss_over_entropy_bound, "<= 1"),
        Claim("The most uncertain step of each trajectory has a score of mean 0, as a fixed step has.",
            "minidrl, on the code of arXiv 2603.12554", "`law_selection_by_trajectory_is_biased`, notebook 08 (80.6)",
            TABLE_SEEDS, "mean score over gradient", lambda: over_tables(mean_score_of_selected_steps), "<= 1e-8"),
        Claim("At the last step, drawn one-step completions give the value of the state.",
            "minidrl, on arXiv 2603.12554", "`law_one_step_values`, notebook 08 (80.7)", "exact, 27 states",
            "error", last_step_values, "<= 1e-8"),
        Claim("The 4 most uncertain of 12 steps train within 2 points of all of them: right to left, one token a step.",
            "minidrl, on arXiv 2603.12554", COMPARE, ONE_RUN,
            "points, egspo less reinforce", lambda: points("egspo, 4 of 12 steps", "reinforce"), ">= -2"),
        in_study("The 4 most uncertain of 14 steps solve more than 4 drawn uniformly from those above 0.02 nats: low "
            "confidence, equal network calls.",
            "steps", ("entropy", "uniform"), "points: > 0", after, "minidrl, on accounts of arXiv 2603.12554"),
        in_study("The 4 most uncertain of 14 steps solve more than 4 by lot of all: low confidence, equal calls, one rate.",
            "steps_by_lot", ("entropy", "lot"), "points: > 0", after, "accounts of arXiv 2603.12554"),
        in_study("In those runs they solve more than 4 drawn uniformly from the steps above 0.02 nats.",
            "steps_by_lot", ("entropy", "uniform"), "points: > 0", after, "minidrl, on accounts of arXiv 2603.12554"),
        in_study("The 4 most uncertain of 14 steps solve more than all that have above 0.02 nats: low confidence, equal calls.",
            "steps", ("entropy", "all"), "points: > 0", after),
        in_study("Scoring positions, too (4.2), solves more than tokens alone: low confidence, the 4 most uncertain steps.",
            "steps", ("exact", "entropy"), "points: > 0", after, "minidrl, on arXiv 2603.12554"),
        in_study("Stepwise advantages, lambda = 0.5, solve more than EGSPO without them: low confidence, equal network calls.",
            "steps", ("sa-0.5", "entropy"), "points: > 0", after, "accounts of arXiv 2603.12554"),
        Claim("Stepwise advantages solve more Countdown puzzles than EGSPO without them: right to left, one token a step.",
            "accounts of arXiv 2603.12554", COMPARE, ONE_RUN,
            "points, egspo-sa less egspo", lambda: points("egspo-sa, 4 of 12 steps", "egspo, 4 of 12 steps"), "> 0"),
        Claim("Scoring two steps as one is nearer to the policy gradient than scoring all at once (the mean field).",
            "practice of arXiv 2509.06949, 2509.21474 (code)",
            "`research/benchmarks/claims.py`", TABLE_SEEDS,
            "error, merge 2 over merge 3", lambda: over_tables(merged_over_mean_field), "< 1"),
        not_run("Verifying every intermediate completion makes RL better at equal updates.",
            "accounts of arXiv 2508.13148", "no run of `mdpo` was made"),
    ],
    "Trust regions: DPPO, DRPO, GDSD": [
        Claim("PPO stops a rare token that hardly moved and passes a likely one that moved far; DPPO does the reverse.",
            "arXiv 2602.04879", "`law_dppo_examples`, notebook 09 (90.3)", "exact, 2 tokens",
            "weights as stated, of 4", two_tokens, ">= 4"),
        Claim("DRPO turns back exactly the tokens that DPPO stops, at delta = 0.15.",
            "code of arXiv 2606.09821, quoting it", "`law_drpo_turns_back_where_dppo_stops`, notebook 09 (8.13)", GRID,
            "share that differs", boundaries_that_differ, "<= 0"),
        Claim("By SGD at steps of 0.05, momentum 0.9, DRPO's tokens settle on the boundary: good 0.02 to 0.8, bad 0.2 to 0.99.",
            "minidrl, on arXiv 2606.09821", "notebook 09 (90.15), `research/benchmarks/claims.py`", "exact, 8 tokens",
            "distance after 400 steps", lambda: settled("drpo", SPREAD), "<= 0.01"),
        Claim("By SGD at steps of 0.05, momentum 0.9, DRPO's tokens settle on the boundary: good 0.001 to 0.003.",
            "minidrl, on arXiv 2606.09821", "`research/benchmarks/claims.py`", "exact, 3 tokens",
            "distance after 400 steps", lambda: settled("drpo", RARE), "<= 0.01"),
        Claim("By SGD at steps of 0.05, momentum 0.9, DRPO's tokens settle on the boundary: a good 0.849, a bad 0.995.",
            "minidrl, on arXiv 2606.09821", "`research/benchmarks/claims.py`", "exact, 2 tokens",
            "distance after 400 steps", lambda: settled("drpo", NEARLY_CERTAIN), "<= 0.01"),
        Claim("By SGD at steps of 0.05, momentum 0.9, DPPO's tokens stop at the boundary.",
            "minidrl, on arXiv 2602.04879", "notebook 09 (90.15)", "exact, 4 tokens",
            "distance after 400 steps", lambda: settled("dppo-tv", COMMON), "<= 0.01"),
        Claim("At steps of 0.0005 with momentum 0.9 DPPO's tokens stop at the boundary: a good token of 0.5.",
            "minidrl, on arXiv 2602.04879", "`research/benchmarks/claims.py`", "exact, 1 token",
            "distance after 2,000 steps", lambda: cases([settle("dppo-tv", 0.5, 1.0, rate=0.0005, steps=2_000)]), "<= 0.01"),
        Claim("At delta = 12.5, the released recipe's, DRPO turns some token back, as its authors' README says of a boundary.",
            "minidrl, on the code of arXiv 2606.09821", "`law_the_boundary_must_be_a_probability`, notebook 09 (90.13)", GRID,
            "smallest weight", lambda: smallest_weight("drpo-released"), "< 0"),
        Claim("On the first update GDSD's regression is REINFORCE, times 2 psi / L.",
            "minidrl, on the code of arXiv 2605.29398", "`law_regression`, notebook 10a (100.16)", "exact, 4 advantages",
            "relative error", regression_on_policy, "<= 1e-8"),
        in_study("With one update a rollout DRPO (delta 0.15) solves more Countdown puzzles than REINFORCE: low confidence.",
            "reuse_confidence", ("drpo", "reinforce"), "points: > 0", after, "minidrl, on arXiv 2606.09821"),
        in_study("With 8 updates a rollout PPO solves more Countdown puzzles than REINFORCE: low confidence, "
            "both at 1e-4, the lower of two rates.",
            "reuse_confidence", ("ppo", "reinforce"), "points: > 0", after, "arXiv 1707.06347", updates=8),
        in_study("With 8 updates a rollout DPPO solves more Countdown puzzles than PPO: low confidence.",
            "reuse_confidence", ("dppo-tv", "ppo"), "points: > 0", after, "arXiv 2602.04879", updates=8),
        in_study("With 8 updates a rollout DRPO at delta 0.15 (published: 12.5) solves more Countdown puzzles than DPPO: low "
            "confidence.",
            "reuse_confidence", ("drpo", "dppo-tv"), "points: > 0", after, "minidrl, on accounts of arXiv 2606.09821",
            updates=8),
        *happens(in_study("REINFORCE, without a trust region, collapses with 8 updates a rollout: it ends below the base, low "
            "confidence.",
            "reuse_confidence", ("reinforce",), "points above the base: < 0", gained, "minidrl, on arXiv 2602.04879",
            updates=8)),
        *happens(in_study("The same from left to right: it collapses, it ends below the base.",
            "reuse_left_to_right", ("reinforce",), "points above the base: < 0", gained, "minidrl, on arXiv 2602.04879",
            updates=8)),
        in_study("With 8 updates a rollout PPO solves more Countdown puzzles than REINFORCE: left to right.",
            "reuse_left_to_right", ("ppo", "reinforce"), "points: > 0", after, "arXiv 1707.06347", updates=8),
        in_study("With 8 updates a rollout DPPO solves more Countdown puzzles than PPO: left to right.",
            "reuse_left_to_right", ("dppo-tv", "ppo"), "points: > 0", after, "arXiv 2602.04879", updates=8),
        in_study("With 8 updates a rollout DRPO at its authors' delta, 12.5, solves more Countdown puzzles than DPPO: left to "
            "right.",
            "reuse_left_to_right", ("drpo-released", "dppo-tv"), "points: > 0", after, "accounts of arXiv 2606.09821",
            updates=8),
        in_study("DRPO at delta 0.15 solves more Countdown puzzles than at 12.5: left to right, 8 updates a rollout.",
            "reuse_left_to_right", ("drpo", "drpo-released"), "points: > 0", after, "minidrl, on arXiv 2606.09821", updates=8),
        reused("Eight updates on a rollout solve more Countdown puzzles than one, rollouts equal: PPO, left to right.",
            "reuse_left_to_right", "ppo"),
        reused("The same: PPO, low confidence.", "reuse_confidence", "ppo"),
        *happens(in_study("REINFORCE collapses with 8 updates on a rollout that was sampled in bfloat16: it ends below the "
            "base, low confidence.",
            "reuse_bfloat16", ("reinforce",), "points above the base: < 0", gained, "minidrl, on arXiv 2602.04879",
            updates=8)),
        in_study("With 8 updates on a rollout sampled in bfloat16 PPO solves more Countdown puzzles than REINFORCE: low "
            "confidence.",
            "reuse_bfloat16", ("ppo", "reinforce"), "points: > 0", after, "arXiv 1707.06347", updates=8),
        in_study("There DPPO solves more Countdown puzzles than PPO.",
            "reuse_bfloat16", ("dppo-tv", "ppo"), "points: > 0", after, "arXiv 2602.04879", updates=8),
        in_study("There DRPO at delta 0.15 (published: 12.5) solves more Countdown puzzles than DPPO.",
            "reuse_bfloat16", ("drpo", "dppo-tv"), "points: > 0", after, "minidrl, on accounts of arXiv 2606.09821",
            updates=8),
        in_study("With one update on a rollout sampled in bfloat16 PPO solves more Countdown puzzles than REINFORCE: low "
            "confidence.",
            "reuse_bfloat16", ("ppo", "reinforce"), "points: > 0", after, "minidrl, on arXiv 2602.04879"),
        in_study("There DPPO anchored on the sampler's record solves more than anchored on probabilities computed anew.",
            "anchor_bfloat16", ("dppo-tv", "dppo-tv-old"), "points: > 0", after, "minidrl, on arXiv 2602.04879", updates=8),
        in_study("There PPO anchored on the sampler's record solves more than anchored on probabilities computed anew.",
            "anchor_bfloat16", ("ppo", "ppo-old"), "points: > 0", after, "minidrl, on arXiv 2602.04879", updates=8),
        not_run("Anchoring on the rollout policy, not on recomputed probabilities, prevents collapse.",
            "arXiv 2602.04879", "needs long runs with reuse and low precision"),
    ],
    "All of them, against the simplest control": [
        Claim("RL solves more Countdown puzzles than fine-tuning on the base's own correct samples, rollouts and updates "
            "equal: numbers to 9, right to left, from a base that has met the puzzles of RL.",
            "minidrl", "docs/results.md (command 1)", "3 seeds, 512 puzzles",
            "points", lambda: rl_less_self_training("countdown"), "> 0"),
        in_study("The same, each at the best of three rates by another seed: numbers to 20, confidence order, "
            "from a base that has met none of them.",
            "main_job", ("reinforce", "self-training"), "points: > 0", after),
        in_study("The same at equal network calls, those of the shortest run of self-training: RL with fewer updates.",
            "main_job", ("reinforce", "self-training"), "points: > 0", at_the_calls_of_self_training),
        Claim("The same where responses are decoded in blocks of four tokens, at the rate of RL.",
            "minidrl", "docs/results.md (command 3)", "3 seeds, 512 puzzles",
            "points", lambda: rl_less_self_training("blocks"), "> 0"),
        Claim("The same, both decoded greedily.",
            "minidrl", "docs/results.md (command 3)", "3 seeds, 512 puzzles",
            "points", lambda: rl_less_self_training("blocks", "greedy"), "> 0"),
        in_study("There RL ends 20 points above the best decoder of its base, any order and temperature (29.5 %).",
            "main_job", ("reinforce",), "points: >= 20", lambda run: run["after"] - BEST_DECODER),
        in_study("There rollouts of the last tenth of training and held-out puzzles end within 5 points (the bound is ours).",
            "main_job", ("reinforce",), "points, rollouts less held out: <= 5", lambda run: run["train_end"] - run["after"]),
    ],
}  # fmt: skip


# ============================================================================================================= the document

COLUMNS = ("claim", "stated in", "decided by", "seeds", "result", "holds if", "verdict")
Results = dict[str, list[tuple[Claim, Found | None]]]


def number(x: float) -> str:
    """Three digits: no verdict hangs on more, and machines differ in the last ones."""
    return f"{x:,.0f}" if 100 <= abs(x) < 1e6 else f"{x:.3g}"


def shown(found: Found) -> str:
    """A number, and its interval where it has one."""
    value, low, high = map(number, (found.value, found.low, found.high))
    return value if low == high else f"{value} [{low}, {high}]"


def row(claim: Claim, found: Found | None) -> dict[str, str]:
    """A claim as a line of a table."""
    words = (claim.text, claim.source, claim.decided_by, claim.seeds)
    if found is None:
        return dict(zip(COLUMNS, (*words, "", "", f"{NOT_RUN}: {claim.number}"), strict=True))
    ends = (f"{claim.number}: {shown(found)}", claim.criterion, judged(claim, found))
    return dict(zip(COLUMNS, (*words, *ends), strict=True))


def measured(ledger: dict[str, list[Claim]]) -> Results:
    """Every claim with what was found."""
    return {title: [(claim, claim.measure and claim.measure()) for claim in claims] for title, claims in ledger.items()}


def recorded(words: dict) -> str:
    """How the numbers of an entry of claims.json were made, and where they stand."""
    seeds, puzzles = ", ".join(map(str, words["seeds"])), f"{words['puzzles']} held-out puzzles"
    return f"{words['where']}: `{words['command']}`{words['also']} (`{words['config']}`, seeds {seeds}, {puzzles})"


# Where a claim comes from, by how its source begins.
ORIGINS = {
    "stated in a paper or its abstract": ("arXiv",),
    "known from accounts of one": ("accounts",),
    "practice, code or names": ("practice", "code", "name"),
    "this project's own": ("minidrl",),
}


def origins(results: Results) -> str:
    """Verdicts by where the claims come from, as a table."""
    verdicts, lines = (HOLDS, FAILS, UNSEEN, UNDECIDED, NOT_RUN), []
    pairs = [pair for rows in results.values() for pair in rows]
    for origin, starts in ORIGINS.items():
        own = [judged(claim, found) for claim, found in pairs if claim.source.startswith(starts)]
        lines.append({"claims": origin} | {name: own.count(name) for name in verdicts})
    if sum(sum(line[name] for name in verdicts) for line in lines) != len(pairs):
        raise ValueError(f"source: got one of another beginning; allowed {', '.join(itertools.chain(*ORIGINS.values()))}")
    return tables.markdown_table(lines, ("claims", *verdicts))


def one_script(results: Results) -> str:
    """What the reader of the section on StableDRL has to know first."""
    rest = {
        title: sum("research/benchmarks/instability.py" in claim.decided_by for claim, _ in rows)
        for title, rows in results.items()
    }
    return ONE_SCRIPT.format(own=rest["StableDRL"], total=len(results["StableDRL"]), spg=rest["SPG"])


ONE_SCRIPT = """{own} of these {total} claims, and {spg} of the section on SPG, rest on one script, `research/benchmarks/instability.py`:
one toy of some 50,000 weights. Its setting was searched for until GRPO with fresh masks failed, and the trials were not
recorded, so that no row says how often GRPO fails. The criteria are this project's, not the paper's: "collapses" means that a
run ends below where it began, and the two scales of the ratio are two readings of the method. GRPO has StableDRL's advantages
in all these runs. All but those of SPG have one masked state, with which the sandwich (5.3) has the gradient of the ELBO."""


def is_identity(claim: Claim) -> bool:
    """True for a claim that a number is 0 but for rounding."""
    sign, _, bound = claim.criterion.partition(" ")
    return sign == "<=" and 0 < float(bound) <= 1e-8


def document(results: Results) -> str:
    """CLAIMS.md."""
    every = [judged(claim, found) for rows in results.values() for claim, found in rows]
    words = {HOLDS: "hold", FAILS: "do not hold", UNSEEN: "were not seen here"}
    words |= {UNDECIDED: "are not distinguishable", NOT_RUN: "were not run here"}
    count = ", ".join(f"{every.count(name)} {word}" for name, word in words.items())
    found = {title: tables.markdown_table([row(*pair) for pair in rows], COLUMNS) for title, rows in results.items()}
    found["StableDRL"] = f"{one_script(results)}\n\n{found['StableDRL']}"
    commands = "\n".join(f"{i}. {recorded(words)}" for i, words in enumerate(RECORDED.values(), 1))
    pairs = itertools.chain(*results.values())
    exact = sum(is_identity(claim) and judged(claim, found) == HOLDS for claim, found in pairs)
    head = INTRODUCTION.format(total=len(every), count=count, identities=exact, commands=commands, origins=origins(results))
    return "\n\n".join([head, *(f"## {title}\n\n{table}" for title, table in found.items())]) + "\n"


INTRODUCTION = """# Claims

What papers state or take for granted, as far as a tiny model can test it, and what was found.
{total} claims: {count}.
Of those that hold {identities} are identities, checked to 1e-8: they say that the algebra is right, not what a method does.

Generated by `python research/benchmarks/claims.py` (`--check`: is this file current?). No verdict is typed in: it follows from the
number, its interval and the criterion of its row. A verdict is about that number, on models of this size; it says nothing about
eight billion weights.

{origins}

- **stated in**: an arXiv number alone means that the statement was read in the paper or its abstract; "accounts of" that it is
  known second hand; "code of" and "practice of" speak of what is done; "minidrl" marks a statement of this project.
- **result**: of exact rows the median [lowest, highest] over the cases, and one case that fails is a counter-example. Of runs
  with several seeds the mean [95 % interval, Student]. Of single runs the difference [95 % by the binomial error of the two
  evaluations]; what another seed of the training would change is not in it.
- **several tests**: where two lines of `research/benchmarks/instability.py` are compared, the interval is at the level that Holm's
  correction over all pairs of that scale leaves, and contains 0 where the corrected test does not reject. So it is where two
  methods of a study of `compare` are, over all its pairs with one number of updates a rollout. Where runs were added
  after others had been looked at, p is multiplied by the number of looks as well (`likelihoods`: 3). All other rows are judged
  each for itself, without a correction for their number.
- **not distinguishable**: the interval contains both answers.
- **not seen here**: the sentence says that something happens, such as a collapse, and in this setting it does not. One setting
  refutes no such sentence.

Recorded runs, of which `research/benchmarks/claims.json` and `research/benchmarks/results/instability.json` hold the numbers:

{commands}"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write CLAIMS.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if CLAIMS.md is not what would be written")
    parser.add_argument("--out", type=Path, default=ROOT / "CLAIMS.md")
    given = parser.parse_args(arguments)
    text = document(measured(LEDGER))
    if not given.check:
        given.out.write_text(text)
    elif not given.out.exists() or given.out.read_text() != text:
        sys.exit(f"{given.out.name} is not current: run python research/benchmarks/claims.py")


if __name__ == "__main__":
    main()
