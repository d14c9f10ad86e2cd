"""Every likelihood estimator, judged by the exact values of the oracle: one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import oracle
from minidrl.sampler import Sampler
from minidrl.tables import markdown_table

ERROR = "std error of the bias"
ESTIMATOR_COLUMNS = (
    *("estimator", "network calls", "bias to ELBO", "bias to log p", "std", ERROR),
    "sampler",
)


def _sdmc(*given: Any, num_states: int, counts: str) -> alg.Plan:
    how = {"num_nodes": num_states, "masks_per_node": 1, "domain": "keep"}
    return alg.quadrature_plan(*given, **how, counts=counts)


def _mean_field(*given: Any, num_states: int) -> alg.Plan:
    return alg.mean_field_plan(*given, p_mask_prompt=0.0)


# The estimators of log p to judge, at equal numbers of network calls.
ESTIMATORS: dict[str, Callable[..., alg.Plan]] = {
    "mean field": _mean_field,
    "ELBO, time": partial(alg.elbo_time_plan, domain="keep", min_t=1e-3),
    "ELBO, count": partial(alg.elbo_count_plan, domain="keep", strata=False),
    "ELBO, count, strata": partial(alg.elbo_count_plan, domain="keep", strata=True),
    "ELBO, complementary": partial(alg.complementary_plan, domain="keep"),
    "block ELBO": partial(alg.block_elbo_plan, domain="keep", strata=False),
    "SDMC": partial(_sdmc, counts="bernoulli"),
    "SDMC, fixed counts": partial(_sdmc, counts="rounded"),
    "SDMC, as released": partial(_sdmc, counts="floor"),
}
ESTIMATOR_CALLS = {"mean field": (1,), "ELBO, complementary": (2, 4), "SDMC": (1, 2, 3)}


def estimator_rows(
    draws: int = 20_000, length: int = 6, vocab_size: int = 3, seed: int = 0
) -> list[dict[str, Any]]:
    """Bias and standard deviation (nats) of every likelihood estimator, judged by the oracle.

    The model is a random table of conditionals, small enough to enumerate: its ELBO is computed
    over all masks and its any-order likelihood by the 2^L dynamic programme. Each estimator is the
    shipped code, run on ``draws`` copies of one response at 1, 2 and 4 network calls (one that
    needs pairs starts at 2, one that has a single state stays at 1).

    "sampler" says whose log p, and with it which ELBO: of the sampler that reveals one position at
    a time in random order, anywhere or in one block (half of ``length``) after the other. The block
    ELBO estimates the second: `oracle.block_elbo`.
    """
    model = oracle.TabularDenoiser.random(length, vocab_size, torch.Generator().manual_seed(seed))
    response = tuple(i % vocab_size for i in range(length))
    rollout = _copies(response, draws)
    size = rollout.sampler.block_length
    exact, log_p = oracle.elbo(model, response), oracle.any_order_log_likelihood(model, response)
    anywhere = (exact.item(), log_p.item(), "random order")
    exact = oracle.block_elbo(model, response, size)
    log_p = oracle.block_log_likelihood(model, response, size)
    in_blocks = (exact.item(), log_p.item(), f"random order in blocks of {size}")
    rows = []
    for name, make_plan in ESTIMATORS.items():
        for calls in ESTIMATOR_CALLS.get(name, (1, 2, 4)):
            plan = make_plan(rollout, torch.Generator().manual_seed(seed), num_states=calls)
            exact, log_p, order = anywhere if plan.block_length is None else in_blocks
            logp = feat.features(model, rollout, plan, temperature=1.0, size=1 << 16)["logp"]
            ll = alg.reduce_logp(logp, plan, level="sequence", normalizer=None).flatten()
            mean, std = float(ll.mean()), float(ll.std())
            values = (name, calls, mean - exact, mean - log_p, std, std / math.sqrt(draws), order)
            rows.append(dict(zip(ESTIMATOR_COLUMNS, values, strict=True)))
    return rows


def _copies(response: tuple[int, ...], count: int) -> alg.Rollout:
    """Of one response, by a sampler with two blocks; only the block ELBO looks at it."""
    sizes = {"length": len(response), "block_length": len(response) // 2, "tokens_per_step": 1}
    sampler = Sampler(order="random", temperature=1.0, **sizes)
    row = torch.tensor(response).expand(count, -1)
    keep = torch.ones_like(row, dtype=torch.bool)
    empty, never = torch.zeros(count, 0, dtype=torch.long), torch.full_like(row, -1)
    logp = torch.zeros(row.shape).double()
    return alg.Rollout(empty, empty.bool(), row, keep, never, logp, 1, sampler)


def estimator_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """``estimator_rows`` as Markdown, rounded to what the standard error supports."""

    def cell(key: str, value: Any) -> Any:
        if key == ERROR:
            return round(value, 3)
        return round(value, 2) + 0.0 if isinstance(value, float) else value

    shown = [{key: cell(key, value) for key, value in row.items()} for row in rows]
    return markdown_table(shown, ESTIMATOR_COLUMNS)
