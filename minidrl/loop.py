"""Reinforcement learning for a masked diffusion language model: the whole loop, in one file.

    problems -> rollout -> rewards -> plans -> advantages -> anchors
             -> [ features -> loss -> two-pass backward -> optimiser step ] x num_iterations

What differs from PPO on an autoregressive model: a diffusion model predicts hidden tokens, in any
order, and the likelihood of an answer cannot be computed. It is estimated from the predictions in K
masked states of the answer, some of its tokens hidden in each. A *plan* says which states; the
estimate, in nats, is called *ll*; a policy ratio is exp(ll - anchor), where the *anchor* is the ll
of an older policy.

``train(run)`` yields the metrics of one step after the other. It knows no folder, no checkpoint and
no command line: minidrl/run/train.py drives it. It knows no method by name either. What tells one
paper from another is a field of ``run.method``, a row of the table in methods.py; every equation is
in algorithms.py, and numbers such as (2.3) are its tags.

Read it from top to bottom. The two passes of the gradient are in gradient.py; ``Run`` and
``Experience``, which the loop works on, and the metrics in bookkeeping.py. Lines that end with
``# bookkeeping`` count seconds and network calls, and can be skipped. Shapes: B = G x N responses
(G prompts, N generations of each), L positions of a response, K masked states of each response.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidrl import bookkeeping, methods, sampler
from minidrl.algorithms import Plan, Rollout
from minidrl.bookkeeping import Clock, Experience, Run
from minidrl.gradient import Alone, backward, likelihood, score
from minidrl.keyed import keyed_generator, keyed_seed
from minidrl.tasks import Problem, verdicts
from minidrl.tasks.text import decode, encode_prompts, end_ids

__all__ = ["Experience", "Run", "collect", "score", "take_step", "train"]


def train(run: Run, first: int = 0) -> Iterator[dict]:
    """Yield the metrics of each step, from step ``first`` (counted from 0) to the last."""
    for step in range(first, run.settings.steps):
        yield take_step(run, step)


def take_step(run: Run, step: int) -> dict:
    """One rollout and ``num_iterations`` updates of the weights on it; returns the metrics."""
    run.clock = Clock()  # bookkeeping

    # Every prompt is answered N times, and a verifier pays each answer: there is no value network.
    experience = collect(run, step)

    # A plan for each update, and what each answer was worth against the others of its prompt.
    credited = plans(run, step, experience)
    # What each update's ratio is taken against, as far as it must be known before the weights move.
    old = anchors(run, step, [plan for plan, _ in credited], experience.rollout)

    rows = []
    for i, (plan, adv) in enumerate(credited):
        row, ll = update(run, experience, plan, adv, old[i])
        rows.append(row)
        # One plan for all updates: the ll before the first is the old policy's for the others.
        if i == 0 and run.method.anchor == "old" and run.method.refresh == "fixed":
            old = [ll] * len(old)
    return bookkeeping.of_step(run, step, experience, rows)


def collect(run: Run, step: int) -> Experience:
    """Ask, answer, verify. Random numbers are keyed by (seed, step, purpose), so that any step of
    a run can be repeated, or gone on from, alone."""
    s, method = run.settings, run.method
    rng = np.random.default_rng(keyed_seed(s.seed, step, "puzzles"))
    problems = run.task.problems(s.num_prompts, rng)

    # The rollout: every answer, the step at which each of its tokens was revealed, the log-
    # probability with which it was drawn, and what else the method wants recorded.
    if run.actor is not run.network:  # rollouts by a copy, rounded to bfloat16 for example
        run.actor.load_state_dict(run.model.state_dict())
    with run.clock.phase("rollout"):  # bookkeeping
        prompt, mask = encode_prompts(
            run.tok, problems, run.task.prompt_length, run.model.device, run.task.prompt_format
        )
        rollout = run.processes.generate(
            run.actor,
            prompt,
            mask,
            s.sampler,
            eos_token_id=end_ids(run.tok),
            num_generations=s.num_generations,
            generator=keyed_generator(s.seed, step, "rollout"),
            records=sorted({*method.needs, "entropy"}),  # the entropy is always logged
            micro_batch=s.micro_batch,
        )
    run.clock.calls["rollout"] += sampler.network_calls(rollout)  # bookkeeping

    # The rewards: a verifier reads the text of each answer.
    texts = decode(run.tok, rollout.response)
    reward, solved, readable = judge(run, problems, texts)
    if "seen_logp" in rollout.records:  # the control variate (2.12) asks which answers were right
        rollout.records["solved"] = solved
    experience = Experience(problems, rollout, texts, reward.to(rollout.logp), solved, readable)
    # If the trained weights drew these tokens themselves, what they gave to each is on record.
    if run.actor is run.network and s.sampler.top_p == 1:
        experience.updates = run.updates
    return experience


def judge(run: Run, problems: Sequence[Problem], texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """(reward, solved, readable), each (B,), of ``texts``: answers, as many to each problem."""
    found = run.processes.on_main(lambda: verdicts(run.task, problems, texts))
    reward = torch.tensor([verdict.reward for verdict in found], dtype=torch.float64)
    solved = torch.tensor([verdict.solved for verdict in found])
    return reward, solved, torch.tensor([verdict.readable for verdict in found])


def plans(run: Run, step: int, experience: Experience) -> list[tuple[Plan, Tensor]]:
    """A plan and its advantages for each update.

    A plan (algorithms.py, sections 2 and 3) is the K masked states in which the likelihood of each
    answer is looked at. ``refresh`` fixed: one plan serves all updates; else each has its own.
    """
    s, method, rollout = run.settings, run.method, experience.rollout
    count = 1 if method.refresh == "fixed" else s.num_iterations
    found = []
    for i in range(count):
        noise = keyed_generator(s.seed, step, f"plan {i}")
        schedule = keyed_generator(s.seed, step, "schedule")
        plan = methods.draw(method, rollout, noise, update=i, updates=count, schedule=schedule)
        adv = advantages(run, experience, plan)  # (B,) or (K, B)
        # Prompts whose answers all have advantage 0 have no gradient, unless a penalty gives one.
        # (A mean over entries divides by their number: there they count all the same.)
        silent = method.kl is None and method.objective.func.needs_advantage
        if silent and method.aggregation != "entry_mean":
            plan = speaking(plan, adv, s.num_generations)
        found.append((plan, adv))
    return found * (s.num_iterations // count)


def advantages(run: Run, experience: Experience, plan: Plan) -> Tensor:
    """From rewards to advantages, section 6: (B,), or (K, B) where each state has its own.

    Stepwise credit (6.4) also asks what a state was worth before its step: the reward of the text
    that it would become if all its hidden tokens were revealed at once.
    """
    method, rollout, step_reward = run.method, experience.rollout, None
    if method.step_value != "none":
        record = methods.completions(method, rollout)  # (B, T, L): one text for each step
        # Of these the texts of the plan's own K states, which are steps of the trajectory.
        place = plan.step[..., None].expand(-1, -1, record.shape[-1])
        texts = [decode(run.tok, row) for row in record.transpose(0, 1).gather(0, place)]
        worth = [judge(run, experience.problems, some)[0] for some in texts]
        step_reward = torch.stack(worth).to(experience.reward)  # (K, B)
    return methods.advantages(method, plan, rollout, experience.reward, step_reward)


def speaking(plan: Plan, adv: Tensor, num_generations: int) -> Plan:
    """The plan without the prompts whose answers all have advantage 0."""
    groups = adv.reshape(-1, adv.shape[-1]).unflatten(1, (-1, num_generations))  # (K, G, N)
    speaks = (groups != 0).any(2).any(0).repeat_interleave(num_generations)  # (B,)
    scored = plan.scored & speaks[:, None]
    return dataclasses.replace(plan, valid=plan.valid & speaks, scored=scored)


def anchors(run: Run, step: int, drawn: list[Plan], rollout: Rollout) -> list[Tensor | None]:
    """For each update the ll that its ratio is taken against, section 7: pi_old or the sampler's.

    None where nothing has to be computed beforehand: the method takes no ratio, or the old policy
    is the present one on the update's own plan, whose ll pass 1 of the update finds anyway.
    ``refresh`` says in which states the old ll is estimated: in those of the update (fixed, paired:
    both sides of a ratio share their masks), or in states of its own (independent), which makes the
    ratio noise even before the first update.
    """
    method = run.method

    def old(plan: Plan) -> Tensor:
        return methods.reduced(method, plan, rollout, likelihood(run, run.network, rollout, plan))

    if method.anchor == "behaviour":  # what the sampler wrote down when it drew the tokens
        return [methods.behaviour_anchor(method, plan, rollout) for plan in drawn]
    if method.anchor == "old" and method.refresh == "independent":
        noise = keyed_generator(run.settings.seed, step, "plan of the old value")
        found = old(method.plan(rollout, noise))
        # Of answers that an update does not score, both sides of the ratio are 0.
        return [found * plan.valid.any(0)[:, None] for plan in drawn]
    if method.anchor == "old" and method.refresh != "fixed":  # all plans, by the first weights
        return [None] + [old(plan) for plan in drawn[1:]]
    return [None] * len(drawn)


def update(
    run: Run, experience: Experience, plan: Plan, adv: Tensor, anchor: Tensor | None
) -> tuple[dict, Tensor | None]:
    """One optimiser step; returns its metrics, and the ll before it (None: it was not needed)."""
    method, rollout, s = run.method, experience.rollout, run.settings
    if not plan.network_calls:
        return skip(run), None

    # The ll of the reference policy, for a KL penalty (7.2).
    ref = None
    if method.has_reference and method.kl.form != "exact":
        found = likelihood(run, run.reference, rollout, plan)
        ref = methods.kl_target(method, plan, rollout, found)

    # Without an anchor from before, the old policy is the present one: its ll, as a constant.
    def against(feature: dict[str, Tensor], states: Plan) -> Tensor | None:
        if anchor is not None or method.anchor == "none":
            return anchor
        constant = {name: value.detach() for name, value in feature.items()}
        return methods.reduced(method, states, rollout, constant)

    # The loss (10.1): features to ll (5.1), objective of (ll, anchor, adv), penalty, aggregation.
    def loss_of(feature: dict[str, Tensor]) -> Tensor:
        old = against(feature, plan)
        return methods.method_loss(method, plan, rollout, feature, adv, old, ref)

    # The gradient in two passes: the features of all K states without a graph give d loss / d
    # feature; then each micro-batch of states goes through the network again and back.
    loss, feature, met = backward(run, experience, plan, anchor, loss_of)
    rate = learning_rate(s.optimizer, run.updates, s.steps * s.num_iterations)
    norm = optimizer_step(run.model, run.optimizer, s.optimizer, rate, run.processes)
    run.updates += 1

    # (Of all states: those that were skipped have no ll.)
    ll = methods.reduced(method, plan, rollout, feature) if met is plan else None
    row = {"loss": float(loss), "grad_norm": norm, "learning_rate": rate}
    old = against(feature, met)  # bookkeeping
    row |= bookkeeping.of_update(method, met, rollout, adv, old, ref, feature)
    return row, ll


def skip(run: Run) -> dict:
    """An update with nothing to learn from. The schedule of the learning rate goes on all the same,
    as a resumed run counts updates by steps."""
    s = run.settings
    rate = learning_rate(s.optimizer, run.updates, s.steps * s.num_iterations)
    run.clock.calls["update"] += 0  # bookkeeping: the column is there all the same
    run.updates += 1
    return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate}


def optimizer_step(
    model: nn.Module, optimizer: Any, settings: Any, rate: float, processes: Any = Alone
) -> float:
    """One update of AdamW after clipping the gradient's norm; returns the norm before.

    FloatingPointError for a gradient that is not finite: it is not applied.
    """
    # The gradient of all weights, as one vector, is made no longer than max_grad_norm.
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    norm = float(processes.full_tensor(norm))
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm}")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


def learning_rate(settings: Any, update: int, updates: int) -> float:
    """Of an update, counted from 0: the rate rises linearly over ``warmup`` updates. ``schedule``
    cosine also lowers it, from the whole at update 0 to a tenth at the last."""
    warm = min(1.0, (update + 1) / max(1, settings.warmup))
    cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, update / max(1, updates)))
    return settings.learning_rate * warm * (cosine if settings.schedule == "cosine" else 1.0)
