"""A rehearsal: what a run is refused for is found out before anything is loaded or written.

The row of the run, with its options, on made-up numbers in the shapes of the run.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from minidrl import methods, sampler
from minidrl.algorithms import Rollout
from minidrl.methods import METHODS, Method
from minidrl.run import config
from minidrl.run.untrusted import brief


def method_of(settings: config.Train) -> Method:
    """The row that a run asks for, with its options; what it refuses, it refuses here."""
    if settings.method not in METHODS:
        raise ValueError(f"method: got {brief(settings.method)}; allowed {', '.join(METHODS)}")
    try:
        return _checked(settings)
    except ValueError as error:  # a row knows its options by their names alone
        key = str(error).partition(":")[0]
        named = methods.has_option(METHODS[settings.method], key)
        raise ValueError(f"method_options.{error}" if named else str(error)) from None


def _checked(settings: config.Train) -> Method:
    method = methods.with_options(METHODS[settings.method], settings.method_options)
    if method.temperature == "sampling" and settings.sampler.temperature == 0:
        allowed = f"above 0, {method.name} scores at the sampling temperature"
        raise ValueError(f"sampler.temperature: got 0; allowed {allowed}")
    if method.order not in ("any", settings.sampler.order):
        allowed = f"{method.order}, which {method.name} is about"
        raise ValueError(f"sampler.order: got {settings.sampler.order!r}; allowed {allowed}")
    sampler.check_records(method.needs, settings.sampler)
    check_size(method, settings)
    rehearse(method, settings)
    return method


def check_size(method: Method, settings: config.Train) -> None:
    """ValueError for numbers whose arrays this machine cannot hold, before any array is made.

    A lower bound, from the sizes alone: tokens, steps, log-probabilities and noise of a rollout,
    with the completions that the row asks for; of a plan masks and three features.
    """
    s, rows = settings.sampler, settings.num_prompts * settings.num_generations
    key, states = _states(method, s)
    if (most := config.MOST // rows) < states:
        raise ValueError(f"{key}: got {states}; allowed up to {most} with {rows} responses a step")
    completions = sum(name in sampler.COMPLETIONS for name in method.needs)
    rollout = rows * s.length * (8 + 8 + 4 + 8 + 8 * completions * s.num_steps)
    plan = rows * states * (settings.task.prompt_length + s.length * (2 + 3 * 4))
    if (asked := rollout + plan) > (room := main_memory()):
        got = f"{s.length} with {rows} responses a step and {states} states of each"
        needed = f"{asked / 1e9:.1f} GB or more, and this machine has {room / 1e9:.1f} GB"
        raise ValueError(f"sampler.length: got {got}; allowed what fits: it takes {needed}")


def _states(method: Method, s: sampler.Sampler) -> tuple[str, int]:
    # Of a plan: how many it has, and the option that says so.
    words = method.plan.keywords
    for name in ("num_states", "num_nodes"):
        if name in words:
            if words[name] is None:
                return "sampler.length", s.num_steps
            return f"method_options.plan.{name}", words[name] if type(words[name]) is int else 1
    return "sampler.length", 1


def main_memory() -> int:
    """Bytes of main memory that this process may have: the machine's, or those of its container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    told = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(whole, int(told)) if told.isdecimal() else whole


def rehearse(method: Method, settings: config.Train) -> None:
    """The method's plan, credit and loss on a made-up group; a number that is wrong is refused."""
    made = blank_rollout(method, settings)
    reward = torch.zeros(settings.num_generations)
    plan = methods.draw(method, made, torch.Generator().manual_seed(0))
    if plan.block_length is not None and settings.sampler.attention != "block_causal":
        allowed = f"block_causal, as {method.name} scores all blocks at once"
        got = settings.sampler.attention
        raise ValueError(f"sampler.attention: got {got!r}; allowed {allowed}")
    if method.step_value != "none":
        completions(method, made)
    adv = methods.advantages(method, plan, made, reward, reward.expand(plan.valid.shape))
    feature = {name: torch.zeros(plan.scored.shape) for name in method.features}
    if "topk_logp" in feature:
        feature["topk_logp"] = feature["topk_logp"][..., None]
    behaviour = method.anchor == "behaviour"
    ll = methods.reduced(method, plan, made, feature)
    anchor = methods.behaviour_anchor(method, plan, made) if behaviour else ll
    ref = methods.kl_target(method, plan, made, feature) if method.kl else None
    methods.method_loss(method, plan, made, feature, adv, anchor, ref)


def completions(method: Method, rollout: Rollout) -> Tensor:
    """The record (B, T, L) of what each state would become in one step."""
    words = ("greedy", "sampled", "proposed")
    name = dict(zip(words, sampler.COMPLETIONS, strict=True))[method.step_value]
    if name not in rollout.records:
        what = f"the rollout holds no record {name!r}"
        raise ValueError(f"records: {what}; {method.name} must ask the sampler for it (needs)")
    return rollout.records[name]


def blank_rollout(method: Method, settings: config.Train, prompts: int = 1) -> Rollout:
    """A made-up Rollout of ``prompts`` groups on the CPU, with the records of the method.

    Response (B, L) as long as the run's. Every token, log-probability and record is 0, no response
    ends early, positions are revealed from left to right, and the prompts have one token. It is
    what plans, losses and memory can be worked out on before a network is loaded.
    """
    s, rows = settings.sampler, settings.num_generations * prompts
    ids, logp = torch.zeros(rows, s.length, dtype=torch.long), torch.zeros(rows, s.length)
    every_step = ids[:, None].expand(-1, s.num_steps, -1)
    known = {name: {name: every_step} for name in sampler.COMPLETIONS}
    known["entropy"] = {"entropy": logp}
    known["topk"] = {"topk_ids": ids[..., None], "topk_logp": logp[..., None]}
    known["seen_logp"] = {"seen_logp": 0.0 * every_step, "solved": ids[:, 0] > 0}
    records = {k: v for need in ("entropy", *method.needs) for k, v in known[need].items()}
    steps = (torch.arange(s.length) // s.tokens_per_step).expand(rows, -1)
    prompt, n = ids[:, :1], settings.num_generations
    return Rollout(prompt, prompt == 0, ids, ids == 0, steps, logp, n, s, records)
