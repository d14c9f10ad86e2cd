"""Unbiased ELBO estimators against GDPO's SDMC (2.6) at the same number of network calls:

    python -m research.benches.elbo_error tiny_configs/bases/countdown20_base tiny_configs/countdown20_cpu.yaml --tables t.pt

Responses of the base to puzzles of the RL split, in random and in low-confidence order, are tabulated: log p of every hidden
token under all masks, or under `--masks` of each count. What is tabulated is the population: errors are sums over it, not
draws. Constants are fitted on the other puzzles. Notebooks 5 and 5a have the derivation. `--rehearse` does all of it for 8
positions, in seconds; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from minidrl import algorithms as alg
from minidrl import sampler
from minidrl.run import checkpoints, config
from minidrl.tasks import text as texts
from research.tables import markdown

SHOWN = "{:.3f} [{:.3f}, {:.3f}]".format
ORDERS, CALLS, LONGEST, GENERATIONS = ("random", "low_confidence"), (2, 3, 4, 6, 8), 16, 8
FLOOR, ROUNDED = "SDMC, floor(tn) hidden (biased, as released)", "SDMC, rounded counts (biased)"
STRATA, ARCS = "strata (2.3)", "arcs (2.11)"


# --------------------------------------------------------------------------------------------------------------- tables
@dataclass(frozen=True)
class Table:
    """A response under the masks of its n kept positions, and what its rollout has computed anyway.

    hidden  (M, n)  the masks; all 2^n - 1 of them, or as many of each count as were asked for
    logp    (M, n)  log p of its tokens there, 0 where visible
    seen    (T, n)  log p of its tokens in the state before each step of the rollout
    step    (n,)    the step at which each position was revealed, one a step
    """

    puzzle: str
    text: str
    order: str
    solved: bool
    hidden: np.ndarray
    logp: np.ndarray
    seen: np.ndarray
    step: np.ndarray

    n = property(lambda self: self.hidden.shape[1])
    inside = property(lambda self: torch.ones(1, self.n, dtype=torch.bool))
    complete = property(lambda self: len(self.hidden) == 2**self.n - 1)

    @cached_property
    def l(self) -> np.ndarray:  # noqa: E743
        """(M,) hidden positions of each mask."""
        return self.hidden.sum(1)

    @cached_property
    def p(self) -> np.ndarray:
        """(M,) the law of (2.3): uniform counts, and masks uniform given their count."""
        return 1 / (self.n * np.bincount(self.l)[self.l])

    @cached_property
    def Z(self) -> np.ndarray:
        """(M,) what (2.3) averages: n/l sum of logp over the mask."""
        return self.n / self.l * self.logp.sum(1)

    @cached_property
    def B(self) -> float:
        """The ELBO."""
        return float(self.p @ self.Z)

    @cached_property
    def size(self) -> float:
        """Variance of Z: how much a response counts in the fits, divided by it."""
        return float(self.p @ (self.Z - self.B) ** 2)

    @cached_property
    def known(self) -> alg.Visited:
        """What the states of the rollout say, as ``control_variate_plan`` (2.12) reads them."""
        words = {"unmask_step": torch.tensor(self.step)[None], "records": {"seen_logp": torch.tensor(self.seen)[None]}}
        return alg.visited(dataclasses.replace(alg.Rollout.of([[0] * self.n]), **words), self.inside)

    def by_count(self, values: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """(n,) sums over the masks of each count."""
        return np.bincount(self.l, weight * values, self.n + 1)[1:]


@torch.no_grad()
def logp_under(model, rollout: alg.Rollout, row: int, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
    """(S, L) log p of a response's tokens when the positions ``hidden`` (S, L) are masked."""
    prompt, found = rollout.prompt[row][rollout.prompt_mask[row]], []
    for part in hidden.split(64):
        response = rollout.response[row].expand(len(part), -1)
        tokens = torch.cat([prompt.expand(len(part), -1), response.masked_fill(part, model.mask_token_id)], 1)
        logp = (model.head(model.encode(tokens, None)[:, len(prompt) :]) / temperature).log_softmax(-1)
        found.append(logp.gather(-1, response[..., None])[..., 0])
    return torch.cat(found)


def masks_of(n: int, count: int, seed: int) -> torch.Tensor:
    """(M, n) masks: ``count`` of each number of hidden positions, or all where there are no more (0: all).

    Of more than LONGEST positions they are drawn, not listed, and a mask that comes twice is kept once.
    """
    noise = torch.Generator().manual_seed(seed)
    if n > LONGEST:
        ranks = torch.rand(n, count, n, generator=noise).argsort(-1).argsort(-1)
        return torch.cat([(ranks[l - 1] < l).unique(dim=0) for l in range(1, n + 1)])
    every = (torch.arange(1, 2**n)[:, None] >> torch.arange(n)) & 1 == 1
    by = [every[every.sum(1) == l] for l in range(1, n + 1)]
    return every if not count else torch.cat([m[torch.randperm(len(m), generator=noise)[:count]] for m in by])


def chosen(solved: list[bool], count: int, generations: int) -> list[tuple[int, int]]:
    """(number, row): ``count`` rows of each verdict, of each puzzle the first with it."""
    first: dict[tuple[bool, int], int] = {}
    for row, verdict in enumerate(solved):
        first.setdefault((verdict, row // generations), row)
    return [pair for v in (True, False) for pair in list(enumerate(row for (w, _), row in first.items() if v == w))[:count]]


def tabulate(model, tok, settings: config.Train, order: str, given: argparse.Namespace) -> list[dict]:
    """Responses in one order with their tables; the first ``given.complete`` of each verdict with all masks."""
    how, task, noise = dataclasses.replace(settings.sampler, order=order), settings.task, torch.Generator()
    problems = list({p.key: p for p in task.problems(given.puzzles, np.random.default_rng(given.seed))}.values())
    prompt, mask = texts.encode_prompts(tok, problems, task.prompt_length, "cpu", task.prompt_format)
    each = given.generations
    words = {"eos_token_id": tok.eos_token_id, "num_generations": each, "generator": noise.manual_seed(given.seed)}
    rollout, found = sampler.generate(model, prompt, mask, how, **words), []
    answers = texts.decode(tok, rollout.response)
    solved = [bool(task.judge(problems[i // each], answer).solved) for i, answer in enumerate(answers)]
    for number, row in tqdm(chosen(solved, given.responses, each), desc=order):
        n, step = int(rollout.keep[row].sum()), rollout.unmask_step[row]
        hidden = masks_of(n, 0 if number < given.complete else given.masks, row)
        tail = torch.ones(len(hidden), how.length - n, dtype=torch.bool)  # after the end: hidden in every state
        logp = logp_under(model, rollout, row, torch.cat([hidden, tail], 1), how.temperature)[:, :n]
        visited = torch.stack([(step >= t) | (step < 0) for t in range(how.length)])
        seen = logp_under(model, rollout, row, visited, how.temperature)[:, :n]
        facts = {"puzzle": str(problems[row // each].key), "text": answers[row], "order": order, "solved": solved[row]}
        arrays = {"hidden": hidden, "logp": logp.masked_fill(~hidden, 0), "seen": seen, "step": step[:n]}
        found.append(facts | arrays)
    return found


def table_of(stored: dict) -> Table:
    """In float64."""
    arrays = {key: v.numpy() if isinstance(v, torch.Tensor) else v for key, v in stored.items()}
    return Table(**{**arrays, "logp": arrays["logp"].astype(float), "seen": arrays["seen"].astype(float)})


def tables_of(settings: config.Train, given: argparse.Namespace) -> tuple[list[dict], list[Table]]:
    """(what was asked for, the tables of all orders): made, and stored in ``given.tables``; or read there."""
    if given.tables and given.tables.exists():
        tabulated = torch.load(given.tables, weights_only=True)
    else:
        model, tok = checkpoints.load(settings.model)
        model.eval().requires_grad_(False)
        drawn = {key: getattr(given, key) for key in ("responses", "complete", "masks", "puzzles", "seed")}
        rows = [r for order in ORDERS for r in tabulate(model, tok, settings, order, given)]
        tabulated = {"draws": [drawn], "responses": rows}
        if given.tables:
            torch.save(tabulated, given.tables)
    return tabulated["draws"], [table_of(r) for r in tabulated["responses"]]


# -------------------------------------------------------------------------------------------------- surrogate and its law
def terms(table: Table) -> np.ndarray:
    """(M, 20) the terms of H (2.13)."""
    return alg.surrogate_terms(table.known, torch.tensor(table.hidden)[:, None], table.inside)[:, 0].numpy()


def mean_terms(table: Table) -> np.ndarray:
    """(20,) their means under the law of (2.3), closed."""
    return alg.surrogate_means(table.known, table.inside)[0].numpy()


def scale_terms(table: Table) -> np.ndarray:
    """(n, 10): what the mean square of the residual at a position may grow with, the scales of (2.14)."""
    first, at_reveal, lowest = (x[0].numpy() for x in table.known[:3])
    effects = table.known.effects[:, 0].numpy()
    both, last = effects.sum(0), effects[3]
    squares = [(m**2).mean(1) for m in (both, np.minimum(both, 0), last)]
    columns = [0 * first + 0.01, first**2, at_reveal**2, lowest**2, -first, -at_reveal, *squares, last.sum(1) ** 2 / table.n]
    return np.stack(columns, 1)


def law_terms(table: Table, hidden: np.ndarray) -> np.ndarray:
    """(M, 30) terms of v(M), the predicted mean square: (n/l)^2 sum over M of ``scale_terms`` times (1, x, (1 - x)^4)."""
    x = hidden.mean(1)[:, None]
    sums = hidden @ scale_terms(table) / x**2
    return np.concatenate([sums, sums * x, sums * (1 - x) ** 4], 1)


def law_of_counts(table: Table, constants: np.ndarray) -> np.ndarray:
    """(n,) q(l) of (2.14)."""
    return alg.law_of_counts(table.known, table.inside, torch.tensor(constants)[None])[0].numpy()


# ----------------------------------------------------------------------------------------------------------------- fits
def ridge(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares, 0.1 % of the diagonal added."""
    return np.linalg.solve(gram + np.diag(1e-3 * np.diag(gram) + 1e-9), target)


def non_negative(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares over constants >= 0, by 60 rounds of coordinate descent."""
    scale = np.sqrt(np.diag(gram)) + 1e-12
    gram, target, found = gram / scale[:, None] / scale + 1e-6 * np.eye(len(gram)), target / scale, np.zeros(len(gram))
    for _, f in itertools.product(range(60), range(len(found))):
        found[f] = max(0.0, found[f] - (gram[f] @ found - target[f]) / gram[f, f])
    return found / scale


Problem = tuple[list, list, list]  # of each response the features of its cases, their targets, their weights


def fitted(found: list[Table], keys: list, problem: Problem, solve) -> list[np.ndarray]:
    """Constants for each response, from those of its key to other puzzles: weighted least squares of targets on features."""
    parts = normal_equations(problem)
    result = []
    for table, key in zip(found, keys, strict=True):
        others = [p for p, t, k in zip(parts, found, keys, strict=True) if k == key and t.puzzle != table.puzzle]
        result.append(solved_of(others, solve))
    return result


def pooled(keys: list, problem: Problem, solve) -> dict[Any, np.ndarray]:
    """Constants of each key, from all its responses: for responses that are none of these."""
    parts = normal_equations(problem)
    return {key: solved_of([p for p, k in zip(parts, keys, strict=True) if k == key], solve) for key in set(keys)}


def normal_equations(problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each response the matrix and the right side."""
    return [((x * w[:, None]).T @ x, (x * w[:, None]).T @ y) for x, y, w in zip(*problem, strict=True)]


def solved_of(parts: list[tuple[np.ndarray, np.ndarray]], solve) -> np.ndarray:
    """The constants of the sum of normal equations."""
    return solve(sum(gram for gram, _ in parts), sum(target for _, target in parts))


def centre_terms(table: Table) -> np.ndarray:
    """(1, 7): what c is linear in, sums over the visited states."""
    return alg.centre_terms(table.known, torch.tensor([table.n])).numpy()


def centre_problem(found: list[Table]) -> Problem:
    """c: a prediction of B without any call."""
    return [centre_terms(t) for t in found], [np.array([t.B]) for t in found], [np.array([1 / t.size]) for t in found]


def surrogate_problem(found: list[Table]) -> Problem:
    """H - E H against Z - B. E H is the closed one where all masks are there, else that of the population."""
    x = [terms(t) for t in found]
    means = [mean_terms(t) if t.complete else t.p @ every for t, every in zip(found, x, strict=True)]
    x = [every - mean for every, mean in zip(x, means, strict=True)]
    return x, [t.Z - t.B for t in found], [t.p / t.size for t in found]


def law_problem(found: list[Table], residuals: list[np.ndarray]) -> Problem:
    """v against the squares of the residuals; a mask counts (l/n)^2 p, for squares spread as (n/l)^2 does."""
    x = [law_terms(t, t.hidden) / t.size for t in found]
    squares = [r**2 / t.size for t, r in zip(found, residuals, strict=True)]
    return x, squares, [t.p * (t.l / t.n) ** 2 for t in found]


def fit_centre(found: list[Table], keys: list) -> list[float]:
    """c of each response."""
    problem = centre_problem(found)
    return [float((row @ c)[0]) for row, c in zip(problem[0], fitted(found, keys, problem, ridge), strict=True)]


def fit_surrogate(found: list[Table], keys: list) -> list[np.ndarray]:
    """Z - H + E H (M,) of each response."""
    problem = surrogate_problem(found)
    constants = fitted(found, keys, problem, ridge)
    return [t.Z - every @ c for t, every, c in zip(found, problem[0], constants, strict=True)]


def fit_law(found: list[Table], keys: list, residuals: list[np.ndarray]) -> list[np.ndarray]:
    """Constants of v."""
    return fitted(found, keys, law_problem(found, residuals), non_negative)


def constants_of(found: list[Table]) -> dict[str, dict[str, list[float]]]:
    """What ``control_variate_plan`` (2.12) needs, by order and verdict: 20 constants of the surrogate, 30 of the law, 7 of c.

    The squares that the law is fitted to are those of residuals whose constants come from other puzzles.
    """
    keys = [(t.order, t.solved) for t in found]
    rest = [v - c for v, c in zip(fit_surrogate(found, keys), fit_centre(found, keys), strict=True)]
    parts = [pooled(keys, surrogate_problem(found), ridge), pooled(keys, law_problem(found, rest), non_negative)]
    parts.append(pooled(keys, centre_problem(found), ridge))
    result: dict[str, dict[str, list[float]]] = {}
    for order, solved in sorted(set(keys)):
        numbers = np.concatenate([part[order, solved] for part in parts])
        result.setdefault(order, {})["solved" if solved else "unsolved"] = [float(f"{v:.9g}") for v in numbers]
    return result


# ------------------------------------------------------------------------------------ root mean square errors, in nats
def sdmc(table: Table, calls: int, counts: str) -> float:
    """Of (2.6) with one mask a node; the bias of the quadrature or of the rounding is part of it."""
    n, l = table.n, np.arange(1, table.n + 1)
    mean, square = (table.by_count(table.Z**power, n * table.p) for power in (1, 2))
    total, variance = 0.0, 0.0
    for t, w in zip(*(v.tolist() for v in alg.gauss_legendre(calls)), strict=True):
        if counts == "bernoulli":  # n/l times this is 1/t
            share, scale = np.array([math.comb(n, k) * t**k * (1 - t) ** (n - k) for k in l]), l / n / t
        elif counts == "floor":  # as released: the same weight, and no state where floor(t n) is 0
            share, scale = (l == math.floor(t * n)).astype(float), l / n / t
        else:
            share, scale = (l == min(math.floor(1.5 + t * (n - 1)), n)).astype(float), 1.0
        first = (share * scale * mean).sum()
        total, variance = total + w * first, variance + w**2 * ((share * scale**2 * square).sum() - first**2)
    return math.sqrt(variance + (total - table.B) ** 2)


def strata_of(q: np.ndarray, calls: int) -> np.ndarray:
    """(K, n) the law of the count of each state: K equal strata of the law q."""
    edge = np.append(0, q.cumsum() / q.sum())
    low, high = np.arange(calls)[:, None] / calls, np.arange(1, calls + 1)[:, None] / calls
    return np.clip(np.minimum(edge[1:], high) - np.maximum(edge[:-1], low), 0, None) * calls


def strata(table: Table, values: np.ndarray, q: np.ndarray, calls: int, centre: float = 0.0) -> float:
    """Of centre + the mean of p/q times values over independent states, one in each stratum of q (M,)."""
    of_count = table.by_count(1.0, q)
    mean, square = (table.by_count((table.p / q * values) ** power, q) / of_count for power in (1, 2))
    law = strata_of(of_count, calls)
    variance = (law @ square - (law @ mean) ** 2).sum() / calls**2
    return math.sqrt(max(variance, 0) + (centre + (law @ mean).mean() - table.B) ** 2)


def pair_means(table: Table, values: np.ndarray) -> np.ndarray:
    """(n+1, n+1, n+1) mean of values(M) values(M') over the pairs of a and of b positions that share o, for all a, b, o.

    With F_a(U) the sum of values over the masks M of a positions that contain U, the sum over |U| = u of F_a(U) F_b(U) is the
    sum over pairs of C(o, u) values(M) values(M'): a binomial inversion gives each o. Needs all masks.
    """
    n = table.n
    above = np.zeros((n + 1, 2**n))
    above[table.l, table.hidden @ 2 ** np.arange(n)] = values
    for i in range(n):
        halves = above.reshape(n + 1, -1, 2, 2**i)
        halves[:, :, 0] += halves[:, :, 1]
    size = np.array([bin(u).count("1") for u in range(2**n)])
    moments = [above[:, size == u] @ above[:, size == u].T for u in range(n + 1)]
    found = np.zeros((n + 1, n + 1, n + 1))
    for a, b, o in itertools.product(range(n + 1), repeat=3):
        if o <= min(a, b) and a + b - o <= n:
            total = sum((-1) ** (u - o) * math.comb(u, o) * moments[u][a, b] for u in range(o, min(a, b) + 1))
            found[a, b, o] = total / (math.comb(n, a) * math.comb(a, o) * math.comb(n - a, b - o))
    return found


def arcs(table: Table, values: np.ndarray, q: np.ndarray, calls: int, centre: float = 0.0, pairs=None) -> float:
    """Of (2.11) with the law of counts q (n,): state k hides the l_k positions of a random circle that follow those of k - 1.

    Two arcs of a random circle are a random pair of their overlap, which the counts between them decide, modulo n.
    ``pairs``: ``pair_means`` of the values.
    """
    n, law = table.n, strata_of(q, calls)
    pairs = pair_means(table, values) if pairs is None else pairs
    count = np.arange(1, n + 1)
    a, b, start = count[:, None, None], count[None, :, None], np.arange(n)
    overlap = np.maximum(np.minimum(a, start + b) - start, 0) + np.maximum(np.minimum(a, start + b - n), 0)
    product = pairs[a, b, overlap] / (n * q[:, None, None]) / (n * q[None, :, None])
    mean, square = (table.by_count(values**power, n * table.p) / (n * q) ** power for power in (1, 2))
    total = (law @ square).sum()
    for j in range(calls):
        between = np.eye(n)[0]  # the law of the sum of the counts between two states, modulo n
        for k in range(j + 1, calls):
            begin = np.stack([np.roll(between, int(l)) for l in count])
            total += 2 * np.einsum("a,b,as,abs->", law[j], law[k], begin, product)
            between = sum(law[k, l - 1] * np.roll(between, l) for l in count)
    first = law @ mean
    return math.sqrt(max(total - first.sum() ** 2, 0) / calls**2 + (centre + first.mean() - table.B) ** 2)


# -------------------------------------------------------------------------------------------------------------- judging
def errors(found: list[Table]) -> dict[tuple[int, str], np.ndarray]:
    """RMSE over that of SDMC with Bernoulli masks, one number a response, by calls and estimator; NaN: all masks are needed.

    A law other than p weighs what is averaged with p/q: a constant c, known before, is taken off first and added after."""
    keys = {"surrogate": [t.order for t in found], "by verdict: surrogate": [(t.order, t.solved) for t in found]}
    centre = {name: fit_centre(found, key) for name, key in keys.items()}
    rest = {name: [v - c for v, c in zip(fit_surrogate(found, keys[name]), centre[name], strict=True)] for name in keys}
    laws = {name: fit_law(found, key, rest[name]) for name, key in keys.items()}
    rows = {}
    for i, t in enumerate(found):
        pairs = {name: pair_means(t, v) for name, v in {"": t.Z, **{n: r[i] for n, r in rest.items()}}.items() if t.complete}
        for calls in CALLS:
            row, flat = {}, np.full(t.n, 1 / t.n)
            row[FLOOR] = sdmc(t, calls, "floor")
            row[ROUNDED] = sdmc(t, calls, "rounded")
            row[STRATA] = strata(t, t.Z, t.p, calls)
            row[ARCS] = arcs(t, t.Z, flat, calls, 0.0, pairs[""]) if pairs else math.nan
            for name in keys:
                r, c, q = rest[name][i], centre[name][i], law_of_counts(t, laws[name][i])
                row[name] = strata(t, r, t.p, calls, c)
                row[f"{name}, law of counts"] = strata(t, r, t.p * t.n * q[t.l - 1], calls, c)
                row[f"{name}, law of counts, arcs"] = arcs(t, r, q, calls, c, pairs[name]) if pairs else math.nan
            reference = sdmc(t, calls, "bernoulli")
            for name, error in row.items():
                rows.setdefault((calls, name), []).append(error / reference)
    return {key: np.array(values) for key, values in rows.items()}


@lru_cache
def resamples(puzzles: tuple[str, ...], draws: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """(responses,) puzzle of each, and (draws, puzzles) how often each is drawn."""
    names, index = np.unique(puzzles, return_inverse=True)
    return index, np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), draws)


def interval(values: np.ndarray, puzzles: np.ndarray) -> list[float]:
    """Mean and 95 % bootstrap interval: puzzles are drawn anew, with all their responses."""
    index, times = resamples(tuple(puzzles))
    means = times @ np.bincount(index, values) / (times @ np.bincount(index))
    return [round(float(v), 4) for v in (values.mean(), *np.percentile(means, [2.5, 97.5]))]


def cells(found: list[Table]) -> dict[str, np.ndarray]:
    """Which responses a column is about; columns without a response are left out."""
    every = {"all": np.ones(len(found), dtype=bool)}
    for order, solved in itertools.product(ORDERS, (True, False)):
        of_cell = np.array([t.order == order and t.solved == solved for t in found])
        every[f"{order.replace('_', ' ')}, {'solved' if solved else 'unsolved'}"] = of_cell
    return {name: rows for name, rows in every.items() if rows.any()}


def judged(found: list[Table], facts: dict, verdicts: bool = True) -> list[dict]:
    """The rows of the result: facts and counts, then errors of all responses, and of those with all masks.

    ``verdicts``: False where nothing can be solved.
    """
    keys = [(t.order, t.solved) for t in found]
    puzzles_of = {key: {t.puzzle for t, k in zip(found, keys, strict=True) if k == key} for key in keys}
    found = [t for t, key in zip(found, keys, strict=True) if len(puzzles_of[key]) > 1]  # else there is nothing to fit on
    complete, puzzles, columns = np.array([t.complete for t in found]), np.array([t.puzzle for t in found]), cells(found)
    groups = {"all": complete | True, "all masks": complete}

    def summary(values: np.ndarray, rows: np.ndarray) -> dict[str, list[float]]:
        return {c: interval(values[rows & of], puzzles[rows & of]) for c, of in columns.items() if (rows & of).any()}

    ratio = errors(found)
    if not verdicts:  # "by verdict" is then the same once more
        columns = {name.removesuffix(", unsolved"): rows for name, rows in columns.items()}
        ratio = {(calls, name.removeprefix("by verdict: ")): values for (calls, name), values in ratio.items()}
    responses = {g: {c: int((rows & of).sum()) for c, of in columns.items()} for g, rows in groups.items()}
    result = [{**facts, "responses": responses, "puzzles": len(set(puzzles.tolist()))}]
    for (group, rows), ((calls, name), values) in itertools.product(groups.items(), ratio.items()):
        if rows.any() and not np.isnan(values[rows]).any():
            result.append({"group": group, "calls": calls, "estimator": name, **summary(values, rows)})
    return result


def table_by_calls(rows: list[dict], group: str) -> str:
    """Markdown: all responses of a group, a column for each number of calls."""
    lines: dict[str, dict[str, str]] = {}
    for row in (r for r in rows[1:] if r["group"] == group):
        lines.setdefault(row["estimator"], {"estimator": row["estimator"]})[f"{row['calls']} calls"] = SHOWN(*row["all"])
    return markdown(pd.DataFrame(list(lines.values())))


def table_by_cell(rows: list[dict], group: str, counts: dict[str, int], calls: int) -> str:
    """Markdown: one number of calls, a column for each order and verdict, with the number of responses."""
    found = [r for r in rows[1:] if (r["group"], r["calls"]) == (group, calls)]
    names = {c: f"{c} ({counts[c]})" for c in counts if counts[c]}
    lines = [{"estimator": r["estimator"]} | {name: SHOWN(*r[c]) for c, name in names.items()} for r in found]
    return markdown(pd.DataFrame(lines))


def page(rows: list[dict], calls: int = 3) -> str:
    """The tables of one result; where every response has all masks, the two groups are one."""
    parts, counts, puzzles = [], rows[0]["responses"], rows[0]["puzzles"]
    titles = {"all": f"responses to {puzzles} puzzles", "all masks": "responses with all masks tabulated"}
    if counts["all"] == counts["all masks"]:
        titles = {"all masks": f"responses to {puzzles} puzzles, all masks tabulated"}
    for group, title in titles.items():
        if counts[group]["all"]:
            parts += [f"{counts[group]['all']} {title}, by network calls:", table_by_calls(rows, group)]
            parts += [f"The same at {calls} calls, by order and verdict:", table_by_cell(rows, group, counts[group], calls)]
    return "\n\n".join(parts)


def report(rows: list[dict], out: Path | None) -> list[dict]:
    """The rows, which are written to ``out`` if there is one, and printed as tables."""
    if out:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(page(rows))
    return rows


def settings_of(given: argparse.Namespace) -> config.Train:
    """The config of an RL run with this base. Raises: ValueError for a sampler whose responses cannot be tabulated."""
    changes = {"model": given.base} | ({"sampler.length": 8, "sampler.block_length": 8} if given.rehearse else {})
    settings = config.load(config.Train, given.config, changes)
    how = settings.sampler
    allowed = {
        "length": how.length <= LONGEST or (given.complete == 0 and given.masks > 0),
        "block_length": how.num_blocks == 1,
        "tokens_per_step": how.tokens_per_step == 1,
    }
    for key, right in (allowed | {"temperature": how.temperature > 0}).items():
        if not right:
            length = f"length to {LONGEST} (beyond: with --complete 0 --masks above 0)"
            words = f"{length}, one block, one token a step, temperature above 0"
            raise ValueError(f"sampler.{key}: got {getattr(how, key)}; allowed {words}")
    return settings


def main(words: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description="RMSE of unbiased ELBO estimators over that of SDMC.")
    parser.add_argument("base")
    parser.add_argument("config")
    parser.add_argument("--responses", type=int, default=24, help="of each order and verdict")
    parser.add_argument("--complete", type=int, default=4, help="of these with all masks")
    parser.add_argument("--masks", type=int, default=80, help="of each count, of the others; 0: all")
    parser.add_argument("--puzzles", type=int, default=100, help=f"{GENERATIONS} responses to each, of which some are chosen")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--tables", type=Path, help="made if it is not there, else read")
    parser.add_argument("--out", type=Path, help="JSON lines")
    use = "JSON: the constants of (2.12), from all responses, for the base's folder"
    parser.add_argument("--constants", type=Path, help=use)
    parser.add_argument("--rehearse", action="store_true")
    parser.set_defaults(generations=GENERATIONS)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    if given.rehearse:
        given.responses, given.complete, given.masks, given.puzzles = 4, 2, 12, 6
    try:
        settings = settings_of(given)
    except ValueError as error:
        parser.error(str(error))
    draws, found = tables_of(settings, given)
    if given.constants:
        given.constants.write_text(json.dumps(constants_of(found), indent=1) + "\n", encoding="utf-8")
    facts = {"base": Path(given.base).name, "config": Path(given.config).name, "length": settings.sampler.length}
    return report(judged(found, {**facts, "draws": draws}), given.out)


if __name__ == "__main__":
    main()
