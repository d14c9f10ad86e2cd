"""What a run logs of its ratios: their spread, and how much of the batch the clip of the method acts on."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from minidrl.algorithms import Entries, Method, Plan, Rollout, binary_divergence, entries, log_ratio, trust_mask


def clip_bounds(method: Method) -> tuple[float, float]:
    """(low, high) outside which a ratio counts as clipped; (0, inf) without a clip."""
    words = method.objective.keywords
    if "cap" in words:
        return float(words.get("floor", 0.0)), float(words["cap"])
    return 1 - words.get("epsilon_low", 1.0), 1 + words.get("epsilon_high", math.inf)


def _clipped(method: Method, ll: Tensor, anchor: Tensor, adv: Tensor) -> Tensor:
    # Entries whose gradient the clip changes; for a trust region (delta), those that are beyond it.
    words, (low, high), ratio = method.objective.keywords, clip_bounds(method), log_ratio(ll, anchor).exp()
    if "delta" in words:
        outside = binary_divergence(ll, anchor, form=words.get("form", "tv")) > words["delta"]
        return ~trust_mask(log_ratio(ll, anchor), adv, outside)
    if "cap" in words:
        return (ratio > high) | (ratio < low)
    beyond = (ratio < low) | (ratio > words.get("bound", math.inf))
    return ((adv > 0) & (ratio > high)) | ((adv < 0) & beyond)


@torch.no_grad()
def ratio_diagnostics(
    method: Method, plan: Plan, rollout: Rollout, ll: Entries, anchor: Entries, adv: Float[Tensor, "*K B"]
) -> dict[str, float]:
    """What the ratios look like: spread, clipped share, bypass share, effective sample size (share of the entries).

    Bypass: adv < 0 and ratio above the clip, the entries that PPO's conditional clip lets through with an unbounded
    coefficient. Effective sample size: (sum ratio)^2 / (n sum ratio^2), 1 when all ratios agree.
    """
    present = entries(plan, method.reduction)[0].expand_as(ll)
    logs, adv = log_ratio(ll, anchor)[present], adv[..., None].expand_as(ll)
    ratio = logs.exp()
    if not len(logs):
        return {}
    values = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_std": ratio.std(correction=0),
        "log_ratio_std": logs.std(correction=0),
        "clip_fraction": _clipped(method, ll, anchor, adv)[present].double().mean(),
        "bypass_fraction": ((adv[present] < 0) & (ratio > clip_bounds(method)[1])).double().mean(),
        "effective_sample_size": torch.exp(2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)) / len(logs),
    }
    return {name: float(value) for name, value in values.items()}
