"""What the loop works on, and what it reports: nothing here moves a weight.

``Run`` is what a run is made of, ``Experience`` one rollout with its rewards, ``Clock`` counts, and
``of_step`` makes the row of metrics.jsonl. The names of metrics are TRL's where it has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidrl import algorithms as alg
from minidrl import methods
from minidrl.algorithms import Plan, Rollout
from minidrl.features import Network
from minidrl.gradient import Alone
from minidrl.methods import Method
from minidrl.sampler import is_end
from minidrl.tasks import Problem, Task
from minidrl.tasks.text import end_ids


@dataclass
class Clock:
    """Seconds and network calls (sequences) by phase of a step; ``now``: the phase it is in."""

    seconds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    now: str = ""

    @contextlib.contextmanager
    def phase(self, name: str):
        """What happens inside is charged to the phase. A GPU has done its work before and after."""
        self.now, started = name, _time()
        yield
        self.now = ""
        self.seconds[name] += _time() - started

    def row(self) -> dict[str, float]:
        """Columns of the log."""
        row = {f"seconds/{name}": value for name, value in self.seconds.items()}
        return row | {f"network_calls/{name}": value for name, value in self.calls.items()}


def _time() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Run:
    """What a run works on. run/train.py makes one from settings; a notebook may do so by hand.

    settings    numbers: steps, num_prompts, num_generations, num_iterations, micro_batch, seed,
                sampler, optimizer, ... (run/config.py, Train)
    model       the network that is trained, and reference the one that a penalty compares it with
    network     as model, perhaps compiled; actor: the same, perhaps rounded, for rollouts
    processes   how work is shared: gradient.Alone, or run/distributed.py
    updates     optimiser steps so far
    """

    settings: Any
    task: Task
    method: Method
    model: nn.Module
    tok: Any
    optimizer: torch.optim.Optimizer
    reference: Network | None = None
    network: Any = None
    actor: Any = None
    processes: Any = Alone
    updates: int = 0
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self):
        self.network = self.model if self.network is None else self.network
        self.actor = self.network if self.actor is None else self.actor


@dataclass
class Experience:
    """One rollout and what the task said about it; a problem for each prompt.

    ``readable``: where the verifier found an answer to judge. ``updates``: how many updates the
    weights had seen that sampled it, if it is the policy of the trained weights; else None.
    """

    problems: Sequence[Problem]  # G
    rollout: Rollout
    texts: list[str]  # B
    reward: Tensor  # (B,)
    solved: Tensor  # (B,)
    readable: Tensor  # (B,)
    updates: int | None = None


# ----------------------------------------------------------------------------------------- metrics


def of_step(run: Run, step: int, experience: Experience, rows: list[dict]) -> dict:
    """The metrics of a step: of its rollout, the mean of its updates' rows, and the clock's."""
    reward, rollout = experience.reward, experience.rollout
    groups = reward.unflatten(0, (-1, rollout.num_generations))  # (G, N)
    several, alike = groups.shape[1] > 1, (groups == groups[:, :1]).all(1)
    ended = is_end(rollout.response, end_ids(run.tok)).any(1)
    found = {
        "step": step + 1,
        "reward": float(reward.mean()),
        "reward_std": float(groups.std(1).mean()) if several else 0.0,
        "solved": float(experience.solved.double().mean()),
        "frac_reward_zero_std": float(alike.double().mean()),
        "completions/mean_length": float(rollout.lengths.double().mean()),
        "completions/tokens": int(rollout.lengths.sum()),
        "completions/clipped_ratio": 1.0 - float(ended.double().mean()),
        "completions/readable": float(experience.readable.double().mean()),
        "entropy": float(rollout.records["entropy"][rollout.keep].mean()),
    }
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        found[name] = max(values) if name == "ratio_max" else float(np.mean(values))
    return found | run.clock.row()


def of_update(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    adv: Tensor,
    anchor: Tensor | None,
    ref: Tensor | None,
    feature: dict[str, Tensor],
) -> dict[str, float]:
    """What the ratios and the penalty of an update look like, at the features before it."""
    row = {}
    if "order_logp" in feature:
        row["order_impossible"] = _impossible(plan, feature["order_logp"])
    ratios, old = method, anchor
    if method.linear and plan.replay:  # it has no anchor: the sampler's record stands in for one
        ratios = dataclasses.replace(method, features=("logp",))
        recorded = {"logp": rollout.logp.expand(plan.scored.shape)}
        old = methods.reduced(ratios, plan, rollout, recorded)
    if old is not None:
        row |= methods.ratio_diagnostics(ratios, plan, rollout, feature, old, adv)
    # The KL that the method penalises: k3 (7.2), whatever its form, or the exact one. (``kl.of``
    # per_token divides the penalty by the normaliser, and not this number.)
    if method.kl:
        if method.kl.form == "exact":
            kl, present = feature["kl_ref"], plan.scored
        else:
            ll = methods.kl_target(method, plan, rollout, feature)
            kl = alg.kl_term(ll, anchor if ref is None else ref, form="k3")
            present = alg.entries(plan, method.reduction)[0].expand_as(ll)
        if present.any():
            row["kl"] = float(kl[present].mean())
    return row


def _impossible(plan: Plan, order_logp: Tensor) -> float:
    """Share of states whose recorded positions the present weights could not have chosen: the
    product of F in (4.2) is 0 in float32."""
    states = order_logp.sum(-1)[plan.valid & plan.scored.any(-1)]
    least = math.log(torch.finfo(torch.float32).tiny) + 0.1
    return float((states <= least).double().mean()) if len(states) else 0.0
