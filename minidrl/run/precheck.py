"""What a run is refused for is found out before anything is loaded or written.

The method of the run, with its options, takes one dry step on made-up numbers in the run's shapes.
"""

from __future__ import annotations

import torch

from minidrl import methods, sampler
from minidrl.algorithms import Rollout
from minidrl.methods import METHODS, Method
from minidrl.run import config


def method_of(settings: config.Train) -> Method:
    """The method that a run asks for, with its options. ValueError where the two do not go
    together, or with the run's sampler."""
    if settings.method not in METHODS:
        allowed = ", ".join(METHODS)
        raise ValueError(f"method: got {settings.method!r}; allowed {allowed}")
    try:
        method = methods.with_options(METHODS[settings.method], settings.method_options)
        _check_sampler(method, settings.sampler)
        dry_step(method, settings)
    except ValueError as error:  # a plan or an objective knows its options by their names alone
        key = str(error).partition(":")[0]
        named = methods.has_option(METHODS[settings.method], key)
        raise ValueError(f"method_options.{error}" if named else str(error)) from None
    return method


def _check_sampler(method: Method, s: sampler.Sampler) -> None:
    if method.temperature == "sampling" and s.temperature == 0:
        allowed = f"above 0, {method.name} scores at the sampling temperature"
        raise ValueError(f"sampler.temperature: got 0; allowed {allowed}")
    if method.order not in ("any", s.order):
        allowed = f"{method.order}, which {method.name} is about"
        raise ValueError(f"sampler.order: got {s.order!r}; allowed {allowed}")
    why = f"whose choice of positions {method.name} scores"
    scores_it = {"order_logp", "position_logp"} & {*method.features}
    if scores_it and s.order in ("entropy", "margin"):
        allowed = "random, low_confidence, left_to_right, right_to_left"
        raise ValueError(f"sampler.order: got {s.order!r}; allowed {allowed}, {why}")
    if "order_logp" in scores_it and s.top_p < 1:
        raise ValueError(f"sampler.top_p: got {s.top_p}; allowed 1, {why}")


def dry_step(method: Method, settings: config.Train) -> None:
    """The method's plan, credit and loss on a made-up group; a number that is wrong is refused."""
    made = blank_rollout(method, settings)
    reward = torch.zeros(settings.num_generations)
    plan = methods.draw(method, made, torch.Generator().manual_seed(0))
    if plan.block_length is not None and settings.sampler.attention != "block_causal":
        allowed = f"block_causal, as {method.name} scores all blocks at once"
        got = settings.sampler.attention
        raise ValueError(f"sampler.attention: got {got!r}; allowed {allowed}")
    if method.anchor == "old" and method.refresh == "independent":
        other = methods.draw(method, made, torch.Generator().manual_seed(1))
        new, old = plan.scored, other.scored
        if method.reduction == "position":
            new, old = new.any(0), old.any(0)
        # A token that the other plan shows has no old value: its ratio would be its probability.
        if method.reduction in ("token", "step", "position") and not torch.equal(new, old):
            allowed = f"fixed, paired, as a {method.reduction} needs an old value of its own"
            raise ValueError(f"refresh: got 'independent'; allowed {allowed}")
    adv = methods.advantages(method, plan, made, reward, reward.expand(plan.valid.shape))
    feature = {name: torch.zeros(plan.scored.shape) for name in method.features}
    if "topk_logp" in feature:
        feature["topk_logp"] = feature["topk_logp"][..., None]
    anchor = methods.reduced(method, plan, made, feature)
    if method.anchor == "behaviour":
        anchor = methods.behaviour_anchor(method, plan, made)
    ref = methods.kl_target(method, plan, made, feature) if method.kl else None
    methods.method_loss(method, plan, made, feature, adv, anchor, ref)


def blank_rollout(method: Method, settings: config.Train, prompts: int = 1) -> Rollout:
    """A made-up Rollout of ``prompts`` groups on the CPU, with the records of the method.

    Responses (B, L) as long as the run's. Every token, log-probability and record is 0, but for the
    entropy, which is so high that no plan leaves a step out for it; no response ends early,
    positions are revealed from left to right, and the prompts have one token. Plans, losses and
    memory can be worked out on it before a network is loaded.
    """
    s, rows = settings.sampler, settings.num_generations * prompts
    ids, logp = torch.zeros(rows, s.length, dtype=torch.long), torch.zeros(rows, s.length)
    every_step = ids[:, None].expand(-1, s.num_steps, -1)
    known = {name: {name: every_step} for name in sampler.COMPLETIONS}
    known["entropy"] = {"entropy": logp + 100}
    known["topk"] = {"topk_ids": ids[..., None], "topk_logp": logp[..., None]}
    known["seen_logp"] = {"seen_logp": 0.0 * every_step, "solved": ids[:, 0] > 0}
    records = {k: v for need in ("entropy", *method.needs) for k, v in known[need].items()}
    steps = (torch.arange(s.length) // s.tokens_per_step).expand(rows, -1)
    prompt, n = ids[:, :1], settings.num_generations
    return Rollout(prompt, prompt == 0, ids, ids == 0, steps, logp, n, s, records)
