"""The RL loop and pre-training: what turns losses into runs.

The trainer knows no method and no task by name. It executes the row of ``METHODS`` it is given:

    problems -> rollout -> rewards -> plans -> credit -> anchors
             -> [ features -> loss -> two-pass backward -> update ] x num_iterations

Read downward: a run, a guarded step, the learner and its step, evaluation, optimiser, pre-training.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from minidrl import algorithms as alg
from minidrl import denoiser, methods, sampler
from minidrl import features as feat
from minidrl.algorithms import Plan, Rollout
from minidrl.features import Network
from minidrl.gradient import one_pass_backward, shared_features, two_pass_backward
from minidrl.methods import Method
from minidrl.run import checkpoints, config, distributed, files, memory, report, runs
from minidrl.run.launch import (
    Interrupted,
    RunError,
    note,
    obey_parent,
    stop_requests,
    tell_notes,
    unheard,
)
from minidrl.run.rehearsal import completions, method_of
from minidrl.run.runs import MetricsLog, keyed_generator, keyed_seed
from minidrl.tasks import Problem, Task, held_out, verdicts
from minidrl.tasks.text import decode, encode_prompts, encode_responses

# ---------------------------------------------------------------------------------------- an RL run


def train(
    settings: config.Train,
    out: Path,
    resume: bool = False,
    kind: Callable[[config.Train], Learner] | None = None,
) -> dict:
    """A whole RL run into ``out``: metrics.jsonl, checkpoints, curve.png; returns summary.json.

    ``kind``: what learns; default Learner.
    """
    try:
        return _train(settings, out, resume, kind or Learner)
    except torch.OutOfMemoryError as error:
        raise memory.out_of_memory(error, settings, out) from None


def _train(
    settings: config.Train, out: Path, resume: bool, kind: Callable[[config.Train], Learner]
) -> dict:
    distributed.collectively(lambda: memory.check(settings))
    judged = settings.evaluate
    distributed.collectively(lambda: held_out(settings.task, judged.n, judged.skip))
    learner = distributed.collectively(lambda: kind(settings))
    with runs.opened(out, settings, resume) as checkpoint, stop_requests() as asked:
        state = {"step": 0, "seconds": 0.0, "solved_before": None, "solved_after": None}
        if checkpoint is not None:
            stored = distributed.collectively(lambda: learner.restore(checkpoint))
            state |= runs.complete(stored, ("seconds", "solved_before"), checkpoint)
        step = state["step"]
        log = distributed.collectively(
            lambda: MetricsLog(out, checkpoint, step, settings.tensorboard)
        )
        if checkpoint is not None:  # which has been read, and is good
            distributed.on_main(lambda: runs.write_config(out, settings))
        if state["solved_before"] is None:
            with checkpoints.blamed(learner.model, settings.model):
                state["solved_before"] = _evaluate_into(log, learner, 0, 0.0)
        tell_notes()
        _announce_cache(settings.sampler.cache)
        _train_on(learner, log, out, state, asked)
        return _finish(learner, log, out, state)


def _train_on(
    learner: Learner, log: MetricsLog, out: Path, state: dict, asked: Callable[[], int]
) -> None:
    """The steps that are left; Interrupted where one was ``asked`` to stop."""
    settings, first = learner.settings, state["step"]
    started = time.perf_counter() - state["seconds"]
    quiet = {} if distributed.is_main() else {"disable": True}  # else as TQDM_DISABLE says
    bar = tqdm(
        range(first, settings.steps),
        desc=learner.method.name,
        initial=first,
        total=settings.steps,
        mininterval=1,
        **quiet,
    )
    for step in bar:
        if signal := distributed.on_main(asked):
            bar.close()
            learner.save(out / f"checkpoint-{step}", state)
            raise stopped(signal, out, step, settings.steps)
        row = _guarded_step(learner, step, out, state)
        if step == first:  # no step needs more than the first
            memory.report_peak(settings, learner.model.device)
        state |= {"step": step + 1, "seconds": time.perf_counter() - started, "solved_after": None}
        bar.set_postfix(reward=f"{row['reward']:.3f}", solved=f"{row['solved']:.1%}")
        log.write(row | {"seconds": state["seconds"]})
        _milestones(learner, log, out, state)


def stopped(signal: int, out: Path, step: int, steps: int) -> Interrupted:
    """What is raised by a run that was asked to stop, once its checkpoint is written."""
    saved = out / f"checkpoint-{step}"
    return Interrupted(f"stopped after {step} of {steps} steps; {saved} is saved", signal)


def _announce_cache(cache: str) -> None:
    if cache in sampler.APPROXIMATE and distributed.is_main():
        said = "rollouts are off-policy; the metric rollout_kl says how far"
        tqdm.write(f"sampler.cache {cache}: {said}", file=sys.stderr)


def _milestones(learner: Learner, log: MetricsLog, out: Path, state: dict) -> None:
    s, step = learner.settings, state["step"]
    if s.evaluate.every and step % s.evaluate.every == 0 and step < s.steps:
        _evaluate_into(log, learner, step, state["seconds"])
    if s.save_every and step % s.save_every == 0 and step < s.steps:
        learner.save(out / f"checkpoint-{step}", state)


def _evaluate_into(log: MetricsLog, learner: Learner, step: int, seconds: float) -> float:
    s = learner.settings
    decoding = dataclasses.replace(s.sampler, temperature=s.evaluate.temperature)
    how = {"n": s.evaluate.n, "skip": s.evaluate.skip, "micro_batch": s.micro_batch}
    with memory.part("evaluation"):
        scores = evaluate(learner.model, learner.tok, learner.task, decoding, **how)
    row = {"step": step, "seconds": seconds, "eval/temperature": s.evaluate.temperature}
    log.write(row | {f"eval/{key}": value for key, value in scores.items()})
    return scores["solved"]


def _finish(learner: Learner, log: MetricsLog, out: Path, state: dict) -> dict:
    s = learner.settings
    if state["solved_after"] is None:  # else the checkpoint is there already
        state["solved_after"] = _evaluate_into(log, learner, s.steps, state["seconds"])
        learner.save(out / f"checkpoint-{s.steps}", state)
    log.close()
    distributed.on_main(lambda: report.can_draw() and report.write_curve(out))
    summary = {
        "method": learner.method.name,
        "seed": s.seed,
        "steps": s.steps,
        "seconds": round(state["seconds"], 1),
        "solved_before": state["solved_before"],
        "solved_after": state["solved_after"],
        "evaluated_on": s.evaluate.n,
        "temperature": s.evaluate.temperature,
    }
    return distributed.on_main(lambda: runs.write_summary(out, summary))


def _guarded_step(learner: Learner, step: int, out: Path, state: dict) -> dict:
    """A step; where a number in it is not finite, a dump of weights and optimiser from before it.

    All randomness is keyed, so that they are all it takes to repeat the step.
    """
    s, folder = learner.settings, out / f"failed-{step}"
    late = s.num_iterations > 1 or may_overflow(s.optimizer)
    with _undone(learner.model, learner.optimizer, late) as failed:
        return learner.step(step)
    learner.save(folder, state)
    how = "minidrl.run.trainer.repeat_step repeats it from them"
    raise RunError(f"{_dumped(step, failed[0], folder)}; {how}")


def _dumped(step: int, error: Exception, folder: Path) -> str:
    held = "weights, optimiser and counters from before that step"
    return f"step {step}: {error}; stopped. {folder} holds {held}"


@contextlib.contextmanager
def _undone(
    model: denoiser.Denoiser, optimizer: torch.optim.Optimizer, late: bool
) -> Iterator[list[Exception]]:
    """What fails inside because a number is not finite is undone, and goes into the list.

    ``late``: it may fail after an update. To undo one takes a copy of weights and optimiser.
    """
    before = _copied([dict(denoiser.trained(model)), optimizer.state_dict()]) if late else None
    failed: list[Exception] = []
    try:
        yield failed
    except (RunError, FloatingPointError) as error:
        failed.append(error)
        if before is not None:
            model.load_state_dict(before[0], strict=False)
            optimizer.load_state_dict(before[1])


def _copied(value: Any) -> Any:
    """A copy in main memory, where there is more room than on a GPU."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def repeat_step(out: Path, failed: Path) -> dict:
    """Repeat a failed step from its dump: problems, noise and plans are keyed by seed and step."""
    learner = Learner(config.of_run(config.Train, out))
    return learner.step(learner.restore(failed)["step"])


# ----------------------------------------------------------------------------- what a step works on


def now() -> float:
    """Seconds, once a GPU has done its work: else a phase would be charged with the one before."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclasses.dataclass
class Clock:
    """Seconds and network calls (sequences) by phase."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str):
        """What happens inside is charged to the phase."""
        started = now()
        with memory.part(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + now() - started

    def count(self, name: str, calls: int) -> None:
        """Network calls of a phase."""
        self.calls[name] = self.calls.get(name, 0) + calls

    def row(self) -> dict[str, float]:
        """Columns for the log."""
        row = {f"seconds/{name}": value for name, value in self.seconds.items()}
        return row | {f"network_calls/{name}": value for name, value in self.calls.items()}


@dataclasses.dataclass
class Experience:
    """One rollout with what the task said about it; a problem for each prompt.

    ``updates``: how many updates the weights that sampled it had seen, if they are the weights that
    are trained and their policy was not approximated; else None. ``kl``: KL of the sampler's policy
    to the trained one, where the sampler approximated; None elsewhere.
    """

    problems: Sequence[Problem]
    rollout: Rollout
    texts: list[str]
    reward: Tensor
    solved: Tensor
    updates: int | None = None
    kl: float | None = None

    @property
    def groups(self) -> Tensor:
        """Rewards (G, N)."""
        return self.reward.unflatten(0, (-1, self.rollout.num_generations))

    def select(self, prompts: Tensor) -> Experience:
        """The prompts where the mask (G,) is True, with all their responses."""
        rows = prompts.repeat_interleave(self.rollout.num_generations).nonzero()[:, 0]
        tensors = {k: v[rows] for k, v in vars(self.rollout).items() if torch.is_tensor(v)}
        records = {name: value[rows] for name, value in self.rollout.records.items()}
        return dataclasses.replace(
            self,
            problems=[self.problems[i] for i in prompts.nonzero()[:, 0].tolist()],
            rollout=dataclasses.replace(self.rollout, **tensors, records=records),
            texts=[self.texts[i] for i in rows.tolist()],
            reward=self.reward[rows],
            solved=self.solved[rows],
        )


# The anchor of an update is a tensor, None for a row without one, or one of these two.
OWN = "the ll of this update's own plan, before it"
FIRST = "the ll of the first update on this rollout, before it"
Anchor = Tensor | str | None


# -------------------------------------------------------------------------------------- the learner


class Learner:
    """Network, optimiser and method of one RL run; ``step`` does one rollout and its updates."""

    def __init__(self, settings: config.Train):
        self.settings, self.task = settings, settings.task
        self.method = method_of(settings)  # raises before anything is loaded or written
        distributed.check_settings(settings)
        prepare(settings)
        self.model, self.tok, self.reference = load_policy(settings, self.method)
        self.method = with_constants(self.method, settings)
        if self.task.prompt_format == "chat":  # what it refuses, it refuses here
            longest = self.task.prompt_length
            encode_prompts(self.tok, self.task.held_out(1), longest, prompt_format="chat")
        else:
            width, length = self.task.prompt_length, settings.sampler.length
            sampler.check_positions(getattr(self.model, "model", None), width, length)
        sampler.check_attention(self.model, settings.sampler)
        self.network = self.actor = self._compiled(self.model)
        if settings.rollout_dtype != "float32":
            rounded = denoiser.rounded(self.model, getattr(torch, settings.rollout_dtype))
            self.actor = self._compiled(rounded)
        networks = (self.model, self.reference, self.actor)
        distributed.shard(*networks, compute_dtype=settings.compute_dtype)
        self.optimizer = make_optimizer(self.model, settings.optimizer)
        self.updates = 0

    def _compiled(self, model: denoiser.Denoiser) -> denoiser.Denoiser:
        return denoiser.compiled(model) if self.settings.compile else model

    def save(self, folder: Path, state: dict) -> None:
        """A checkpoint."""
        runs.save_checkpoint(folder, self.model, self.tok, self.optimizer, state)

    def restore(self, checkpoint: Path) -> dict:
        """Continue from a checkpoint: weights, optimiser, updates; returns its counters."""
        state = runs.load_checkpoint(checkpoint, self.model, self.optimizer)
        self.updates = state["step"] * self.settings.num_iterations
        return state

    def generator(self, step: int, purpose: str) -> torch.Generator:
        """The run's own random numbers for one purpose of one step."""
        return keyed_generator(self.settings.seed, step, purpose)

    def step(self, step: int) -> dict:
        """One rollout, ``num_iterations`` updates; returns the metrics row.

        With ``filter_groups`` zero-variance groups are left out of the updates: the filter of
        dynamic sampling (DAPO), without sampling anew.
        """
        s, clock = self.settings, Clock()
        collected = experience = self.collect(step, clock)
        if s.filter_groups:
            experience = collected.select((collected.groups != collected.groups[:, :1]).any(1))
        if not len(experience.reward):  # every group was filtered out
            rows = [self._no_update(clock) for _ in range(s.num_iterations)]
            return self._metrics(step, collected, rows, clock)
        credited = self.plans(step, experience)
        anchors = self.anchors(step, [plan for plan, _ in credited], experience.rollout, clock)
        rows, first = [], OWN
        for (plan, adv), anchor in zip(credited, anchors, strict=True):
            anchor = first if anchor is FIRST else anchor
            row, ll = self.update(experience, plan, adv, anchor, clock)
            first = ll if first is OWN and ll is not None else first
            rows.append(row)
        return self._metrics(step, collected, rows, clock)

    # -------------------------------------------------------------------------------------- rollout

    def collect(self, step: int, clock: Clock) -> Experience:
        """Problems, rollout, rewards."""
        s, task = self.settings, self.task
        if self.actor is not self.network:
            self.actor.load_state_dict(self.model.state_dict())  # casts to the rollouts' dtype
        rng = np.random.default_rng(keyed_seed(s.seed, step, "puzzles"))
        problems = task.problems(s.num_prompts, rng)
        with clock.phase("rollout"):
            where = (task.prompt_length, self.model.device, task.prompt_format)
            prompt, mask = encode_prompts(self.tok, problems, *where)
            rollout = distributed.generate(
                self.actor,
                prompt,
                mask,
                s.sampler,
                eos_token_id=self.tok.eos_token_id,
                num_generations=s.num_generations,
                generator=self.generator(step, "rollout"),
                records=sorted({*self.method.needs, "entropy"}),  # entropy is always logged
                micro_batch=s.micro_batch,
            )
        clock.count("rollout", sampler.network_calls(rollout))
        texts = decode(self.tok, rollout.response)
        reward, solved = self.judge(problems, texts)
        if "seen_logp" in rollout.records:  # constants differ by verdict (2.12)
            rollout.records["solved"] = solved
        experience = Experience(problems, rollout, texts, reward.to(rollout.logp), solved)
        if s.sampler.cache in sampler.APPROXIMATE:
            experience.kl = self.rollout_kl(step, rollout, clock)
        elif self.actor is self.network:
            experience.updates = self.updates
        return experience

    def rollout_kl(self, step: int, rollout: Rollout, clock: Clock) -> float | None:
        """KL(policy of the sampler || policy of the network) of a kept token given its state, nats.

        Two steps of each response, drawn uniformly, are scored as the network has them: 2 / T of
        the calls of the rollout, in a phase of their own. An estimate, unbiased for the mean over
        the kept tokens where the order does not depend on the tokens (k3 of algorithms.kl_term).
        With low_confidence the revealed tokens are a selection, and the number is that of the
        selection. None at temperature 0, where the policy is a point mass and most KLs are infinite
        or 0.
        """
        s = self.settings.sampler
        if s.temperature == 0:
            return None
        chosen = {"num_states": min(2, s.num_steps), "min_entropy": 0.0}
        plan = alg.replay_plan(rollout, self.generator(step, "rollout_kl"), **chosen)
        clock.count("rollout_kl", plan.network_calls)
        with clock.phase("rollout_kl"):
            how = {"temperature": s.temperature, "size": self.settings.micro_batch}
            found = shared_features(self.network, rollout, plan, **how)
        kl = alg.kl_term(rollout.logp.expand_as(found["logp"]), found["logp"], form="k3")
        drawn = plan.weight[..., None] * (plan.scored & rollout.keep)
        return float((drawn * kl).sum() / rollout.keep.sum())

    def judge(self, problems: Sequence[Problem], texts: list[str]) -> tuple[Tensor, Tensor]:
        """(rewards, solved), both (B,), of responses to the problems, the same number for each."""

        def judged() -> list[tuple[float, bool]]:
            found = verdicts(self.task, problems, texts)
            return [(verdict.reward, verdict.solved) for verdict in found]

        rewards, solved = zip(*distributed.on_main(judged), strict=True)
        return torch.tensor(rewards, dtype=torch.float64), torch.tensor(solved)

    # ---------------------------------------------------------------------------- plans and anchors

    def plans(self, step: int, experience: Experience) -> list[tuple[Plan, Tensor]]:
        """A plan and its advantages for each update.

        Groups without any advantage are left out where they cannot contribute.
        """
        rollout, updates = experience.rollout, self.settings.num_iterations
        count = 1 if self.method.refresh == "fixed" else updates
        drawn = [self._plan(step, rollout, i, count) for i in range(count)]
        credited = [(plan, self.advantages(experience, plan)) for plan in drawn]
        if self.method.kl is None and self.method.objective.func.needs_advantage:
            credited = [(self._audible(plan, adv), adv) for plan, adv in credited]
        return credited * (updates // count)

    def _plan(self, step: int, rollout: Rollout, update: int, updates: int) -> Plan:
        noise, schedule = self.generator(step, f"plan {update}"), self.generator(step, "schedule")
        told = {"update": update, "updates": updates, "schedule": schedule}
        return methods.draw(self.method, rollout, noise, **told)

    def _audible(self, plan: Plan, adv: Tensor) -> Plan:
        groups = adv.reshape(-1, adv.shape[-1]).unflatten(1, (-1, self.settings.num_generations))
        silent = groups.abs().sum((0, 2)) == 0
        speaks = ~silent.repeat_interleave(self.settings.num_generations)
        scored = plan.scored & speaks[:, None]
        return dataclasses.replace(plan, valid=plan.valid & speaks, scored=scored)

    def advantages(self, experience: Experience, plan: Plan) -> Tensor:
        """The method's credit for this plan: (B,), or (K, B) where states have their own values."""
        rollout, step_reward = experience.rollout, None
        if self.method.step_value != "none":
            record = completions(self.method, rollout)
            place = plan.step[..., None].expand(-1, -1, record.shape[-1])
            guesses = [decode(self.tok, row) for row in record.transpose(0, 1).gather(0, place)]
            rewards = [self.judge(experience.problems, texts)[0] for texts in guesses]
            step_reward = torch.stack(rewards).to(experience.reward)
        return methods.advantages(self.method, plan, rollout, experience.reward, step_reward)

    def anchors(self, step: int, plans: list[Plan], rollout: Rollout, clock: Clock) -> list[Anchor]:
        """What each update's ratio is taken against: the old policy (pi_old).

        ``refresh`` says with which masks: those of the update, shared masks (fixed, paired: common
        random numbers), or a plan of the old value's own (independent).
        """
        method = self.method
        if method.anchor == "none":
            return [None] * len(plans)
        if method.anchor == "behaviour":
            return [methods.behaviour_anchor(method, plan, rollout) for plan in plans]
        if method.refresh == "fixed":
            return [OWN] + [FIRST] * (len(plans) - 1)

        def old(plan: Plan) -> Tensor:
            scored = self.likelihood(self.network, rollout, plan, clock)
            return methods.reduced(method, plan, rollout, scored)

        if method.refresh == "independent":
            own = method.plan(rollout, self.generator(step, "plan of the old value"))
            return [old(own)] * len(plans)
        return [OWN] + [old(plan) for plan in plans[1:]]

    # ------------------------------------------------------------------------------------- features

    def score(self, rollout: Rollout, plan: Plan, clock: Clock) -> dict[str, Tensor]:
        """The features of the method's loss."""
        return self._features(self.network, rollout, plan, clock, self.method.features)

    def likelihood(
        self, model: Network, rollout: Rollout, plan: Plan, clock: Clock
    ) -> dict[str, Tensor]:
        """Those features of which an ll is made: all that an anchor or a reference needs."""
        made_of = ("logp", "order_logp", "position_logp")
        names = tuple(name for name in self.method.features if name in made_of)
        return self._features(model, rollout, plan, clock, names)

    def _features(
        self, model: Network, rollout: Rollout, plan: Plan, clock: Clock, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        clock.count("scoring", plan.network_calls * (2 if "kl_ref" in names else 1))
        with clock.phase("scoring"):
            return shared_features(model, rollout, plan, names=names, **self._how())

    def _how(self) -> dict[str, Any]:
        sampling = self.method.temperature == "sampling"
        temperature = self.settings.sampler.temperature if sampling else 1.0
        size = self.settings.micro_batch
        return {"temperature": temperature, "size": size, "reference": self.reference}

    # --------------------------------------------------------------------------------------- update

    def update(
        self, experience: Experience, plan: Plan, adv: Tensor, anchor: Anchor, clock: Clock
    ) -> tuple[dict, Tensor | None]:
        """One optimiser step; returns its metrics and the ll before it (None: not scored)."""
        method, rollout = self.method, experience.rollout
        if not plan.network_calls:
            return self._no_update(clock), None
        feature = assumed = self._without_pass_1(experience, plan, anchor)
        at_once = assumed is None and self._in_one_pass(plan)
        if assumed is None and not at_once:
            feature = self.score(rollout, plan, clock)
        ref = self._reference(rollout, plan, clock)

        def against(found: dict[str, Tensor]) -> Tensor | None:
            data = {name: value.detach() for name, value in found.items()}
            return methods.reduced(method, plan, rollout, data) if anchor is OWN else anchor

        def loss_of(found: dict[str, Tensor]) -> Tensor:
            return methods.method_loss(method, plan, rollout, found, adv, against(found), ref)

        with clock.phase("update"):
            backward, how = two_pass_backward, {"feature": feature}
            if at_once:
                backward, how = one_pass_backward, {"names": method.features}
            found = backward(self.network, rollout, plan, loss_of, **self._how(), **how)
            rate = self._learning_rate(self.updates)
            norm = optimizer_step(self.model, self.optimizer, self.settings.optimizer, rate)
        clock.count("update", found.calls)
        self.updates += 1
        loss, ll = found.loss, None
        if at_once:
            feature = found.seen
        if assumed is None:
            ll = methods.reduced(method, plan, rollout, feature)
        else:  # what is logged is what pass 2 met
            feature = found.seen
            met = (feature["logp"] != 0).any(-1, keepdim=True)
            plan = dataclasses.replace(plan, scored=plan.scored & met)
            loss = loss_of(feature)
        row = {"loss": float(loss), "grad_norm": norm, "learning_rate": rate}
        row |= self._ratios(rollout, plan, adv, against(feature), feature)
        return row | self._penalty(rollout, plan, against(feature), ref, feature), ll

    def _in_one_pass(self, plan: Plan) -> bool:
        alone = distributed.num_processes() == 1
        return self.settings.one_pass and alone and plan.network_calls <= self.settings.micro_batch

    def _no_update(self, clock: Clock) -> dict:
        # Nothing to learn from: weights and optimiser stay, the schedule goes on, as when resumed.
        clock.count("update", 0)
        self.updates += 1
        rate = self._learning_rate(self.updates - 1)
        return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate}

    def _learning_rate(self, update: int) -> float:
        s = self.settings
        return learning_rate(s.optimizer, update, s.steps * s.num_iterations)

    def _reference(self, rollout: Rollout, plan: Plan, clock: Clock) -> Tensor | None:
        if self.reference is None or self.method.kl.form == "exact":
            return None
        scored = self.likelihood(self.reference, rollout, plan, clock)
        return methods.kl_target(self.method, plan, rollout, scored)

    def _without_pass_1(
        self, experience: Experience, plan: Plan, anchor: Anchor
    ) -> dict[str, Tensor] | None:
        """Features at which the loss has the gradient of the true ones, where they cost nothing.

        Any will do if the loss is linear. If the present weights are those that sampled, their
        log-probabilities are on record. And a ratio of ll to itself is 1 whatever ll is: any will
        do where the row says so (``linear_on_policy``), unless a later update needs the old ll.
        None: the update needs its first pass.
        """
        method, logp = self.method, experience.rollout.logp
        blank = torch.zeros(plan.scored.shape, dtype=logp.dtype, device=logp.device)
        anything = dict.fromkeys(method.features, blank)
        if method.linear:
            return anything
        if method.on_record:
            sampled_now = experience.updates == self.updates
            against_reference = method.kl is not None and method.kl.target == "reference"
            return {"logp": logp * plan.scored} if sampled_now and not against_reference else None
        only_update = self.settings.num_iterations == 1
        return anything if anchor is OWN and only_update and method.linear_on_policy else None

    # -------------------------------------------------------------------------------------- metrics

    def _ratios(
        self, rollout: Rollout, plan: Plan, adv: Tensor, anchor: Tensor | None, feature: dict
    ) -> dict:
        method, row = self.method, {}
        if "order_logp" in feature:
            row["order_impossible"] = _impossible(plan, feature["order_logp"])
        if method.linear and plan.replay:  # the record stands in for the anchor that it lacks
            method = dataclasses.replace(method, features=("logp",))
            recorded = {"logp": rollout.logp.expand(plan.scored.shape)}
            anchor = methods.reduced(method, plan, rollout, recorded)
        if anchor is not None:
            row |= methods.ratio_diagnostics(method, plan, rollout, feature, anchor, adv)
        return row

    def _penalty(
        self,
        rollout: Rollout,
        plan: Plan,
        anchor: Tensor | None,
        ref: Tensor | None,
        feature: dict,
    ) -> dict:
        method = self.method
        if method.kl is None:
            return {}
        if method.kl.form == "exact":
            present = plan.scored
            return {"kl": float(feature["kl_ref"][present].mean())} if present.any() else {}
        ll = methods.kl_target(method, plan, rollout, feature)
        present = alg.entries(plan, method.reduction)[0].expand_as(ll)
        kl = alg.kl_term(ll, anchor if ref is None else ref, form="k3")
        return {"kl": float(kl[present].mean())}

    def _metrics(self, step: int, experience: Experience, rows: list[dict], clock: Clock) -> dict:
        reward, rollout, groups = experience.reward, experience.rollout, experience.groups
        several, alike = self.settings.num_generations > 1, (groups == groups[:, :1]).all(1)
        metrics = {
            "step": step + 1,
            "reward": float(reward.mean()),
            "reward_std": float(groups.std(1).mean()) if several else 0.0,
            "solved": float(experience.solved.double().mean()),
            "frac_reward_zero_std": float(alike.double().mean()),
            "completions/mean_length": float(rollout.lengths.double().mean()),
            "completions/tokens": int(rollout.lengths.sum()),
            "entropy": float(rollout.records["entropy"][rollout.keep].mean()),
        }
        if experience.kl is not None:
            metrics["rollout_kl"] = experience.kl
        if self.settings.filter_groups:
            metrics["groups_filtered"] = int(alike.sum())
        for name in {name: None for row in rows for name in row}:
            values = [row[name] for row in rows if name in row]
            metrics[name] = max(values) if name == "ratio_max" else float(np.mean(values))
        return metrics | clock.row()


def _impossible(plan: Plan, order_logp: Tensor) -> float:
    """Share of states in which the present weights could not have chosen the recorded positions.

    That is F = 0 in (4.2).
    """
    states = order_logp.sum(-1)[plan.valid & plan.scored.any(-1)]
    # In float64 the logarithm of the smallest number is lower still.
    least = math.log(torch.finfo(torch.float32).tiny) + 0.1
    return float((states <= least).double().mean()) if len(states) else 0.0


def prepare(settings: config.Train | config.Pretrain) -> None:
    """Set torch up as a run asks for: threads, and precision of float32 products.

    Both hold for the whole process. The precision is set in any case, so that a run does not
    inherit that of the one before; ``threads`` 0 leaves the number as it is. Raises ValueError for
    a device that is not there.
    """
    try:
        torch.empty(0, device=settings.device).tolist()  # meta has no numbers
    except (RuntimeError, AssertionError):
        allowed = "cpu, and cuda where torch finds a GPU"
        raise ValueError(f"device: got {settings.device!r}; allowed {allowed}") from None
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.set_float32_matmul_precision(settings.matmul_precision)


def with_constants(method: Method, settings: config.Train) -> Method:
    """The row; where its plan has a control variate (2.12), with the constants of the base's file.

    A base without constants is no error: the plan is unbiased without them, and a note says so.
    """
    if "constants" not in method.plan.keywords:
        return method
    order = settings.sampler.order
    found = checkpoints.control_variate(settings.model, order)
    if found is None:
        where = f"no control variate: {Path(settings.model) / checkpoints.CONSTANTS}"
        note(
            f"{where} has none for {order} order (research/benchmarks/elbo_error.py --constants fits it)"
        )
    return dataclasses.replace(method, plan=partial(method.plan, constants=found))


def load_policy(settings: config.Train, method: Method) -> tuple[Any, Any, Any]:
    """(network to train, tokenizer, reference policy or None).

    With adapters the reference is the same network with its adapters off; otherwise it is a second
    copy. A method that compares with none has none.
    """
    lora = settings.lora
    dtype = None if settings.dtype == "stored" else getattr(torch, settings.dtype)
    how = (settings.model, settings.device, dtype)
    more = {"quantize": True} if settings.quantize else {}
    model, tok = checkpoints.load(*how, **more)
    if denoiser.has_adapters(model):
        allowed = "a base (--resume continues a run)"
        raise ValueError(f"model: got {settings.model!r}, which holds adapters; allowed {allowed}")
    if lora.rank:
        if lora.rank > (widest := model.model.config.hidden_size):
            allowed = f"up to {widest}, the width of the network"
            raise ValueError(f"lora.rank: got {lora.rank}; allowed {allowed}")
        words = dataclasses.asdict(lora)
        denoiser.add_adapters(model, **words, seed=settings.seed, base=settings.model)
    if settings.gradient_checkpointing:
        denoiser.checkpoint_activations(model)
    if method.kl is None or method.kl.target != "reference":
        return model, tok, None
    return model, tok, denoiser.without_adapters(model) if lora.rank else checkpoints.load(*how)[0]


# --------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(
    model: Any,
    tok: Any,
    task: Task,
    settings: sampler.Sampler,
    *,
    n: int,
    skip: int = 0,
    seed: int = 0,
    samples: int = 1,
    micro_batch: int = 128,
) -> dict:
    """Shares of ``n`` held-out problems, after the first ``skip``: solved, and the task's marks.

    ``settings.temperature`` is the policy that is judged; 0 is greedy. With ``samples`` k > 1 also
    pass@k: the share of problems solved by at least one of k samples.
    """
    model.eval()
    problems = held_out(task, n, skip)
    where = (task.prompt_length, model.device, task.prompt_format)
    prompt, mask = encode_prompts(tok, problems, *where)
    rollout = distributed.generate(
        model,
        prompt,
        mask,
        settings,
        eos_token_id=tok.eos_token_id,
        num_generations=samples,
        generator=keyed_generator(seed, 0, "evaluate"),
        micro_batch=micro_batch,
    )
    texts = decode(tok, rollout.response)
    found = verdicts(task, problems, texts)
    solved = np.array([verdict.solved for verdict in found]).reshape(n, samples)
    result = {"solved": float(solved.mean())}
    for mark in found[0].marks:
        result[mark] = float(np.mean([verdict.marks[mark] for verdict in found]))
    result["n"] = n
    return result | ({f"pass@{samples}": float(solved.any(1).mean())} if samples > 1 else {})


# ---------------------------------------------------------------------------------------- optimiser


def make_optimizer(model: nn.Module, settings: config.Optimizer) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained: all of them, or the adapters.

    Its moments are there from the start: the zeros that AdamW would make in its first update, in
    the dtype and on the device of each parameter, and sharded as it is. So the first step of a run
    needs as much memory as any other.
    """
    parameters = [p for _, p in denoiser.trained(model)]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    moments = ("exp_avg", "exp_avg_sq")
    zeros = [{key: torch.zeros_like(p) for key in moments} for p in parameters]
    slots = {i: {"step": torch.tensor(0.0)} | slot for i, slot in enumerate(zeros)}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": slots})
    return optimizer


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """Linear warm-up, then constant or a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup))
    cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max(1, steps)))
    return settings.learning_rate * warm * (cosine if settings.schedule == "cosine" else 1.0)


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: config.Optimizer, lr: float
) -> float:
    """One update at rate ``lr``, after gradient clipping by global norm; returns the norm before.

    Raises RunError for a gradient that is not finite and for a rate beyond float32, which are not
    applied, and for weights that are not finite afterwards.
    """
    clipped = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    norm = float(distributed.full_tensor(clipped))
    if not math.isfinite(norm):
        raise RunError(f"gradient norm is {norm}")
    if max(lr / (1 - settings.beta1), lr * settings.weight_decay) > torch.finfo(torch.float32).max:
        raise RunError(f"learning rate {lr:g} is too large for an update in float32")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    weights = nn.utils.get_total_norm([p for _, p in denoiser.trained(model)], math.inf)
    if not math.isfinite(largest := float(distributed.full_tensor(weights.detach()))):
        raise RunError(f"the largest weight is {largest} after an update at rate {lr:g}")
    return norm


def may_overflow(settings: config.Optimizer) -> bool:
    """True where one update can make finite weights infinite.

    AdamW divides by no less than its epsilon of 1e-8, and clipping bounds what it divides. Decay
    makes weights larger once rate times decay is above 2.
    """
    longest = settings.learning_rate * settings.max_grad_norm / 1e-8
    return longest > 1e30 or settings.learning_rate * settings.weight_decay > 2


# ------------------------------------------------------------------------------------- pre-training


def pretrain(settings: config.Pretrain, out: Path, resume: bool = False) -> dict:
    """Train a fresh network by maximising the ELBO (count form, padding included).

    The loss is -ELBO / L: the mean negative log-probability of a hidden token, every count of
    hidden tokens equally likely. Returns and writes the summary; its ``distinct_problems`` are
    those met so far, each key once.
    """
    prepare(settings)
    held_out(settings.task, settings.evaluate.n, settings.evaluate.skip)  # not after all the steps
    memory.check_pretraining(settings)
    with runs.opened(out, settings, resume) as checkpoint, stop_requests() as asked:
        try:
            return _pretrain(settings, out, checkpoint, asked)
        except (RuntimeError, ConnectionError, EOFError) as error:
            lost = not isinstance(error, RuntimeError) or "DataLoader worker" in str(error)
            if not settings.workers or not lost:
                raise
            said = "a process that makes demonstrations was ended from outside (out of memory?)"
            raise RunError(f"{said}; --resume goes on from the last checkpoint") from None


def _pretrain(
    settings: config.Pretrain, out: Path, checkpoint: Path | None, asked: Callable[[], int]
) -> dict:
    tok, state = settings.task.tokenizer(), {"step": 0, "seconds": 0.0, "met": []}
    model = _untrained(settings, tok)
    network = denoiser.compiled(model) if settings.compile else model
    optimizer = make_optimizer(model, settings.optimizer)
    if checkpoint is not None:
        stored = runs.load_checkpoint(checkpoint, model, optimizer)
        state |= runs.complete(stored, ("seconds", "met"), checkpoint)
    log = MetricsLog(out, checkpoint, state["step"])
    if checkpoint is not None:
        runs.write_config(out, settings)
    tell_notes()
    started = time.perf_counter() - state["seconds"]
    last, met = settings.stop_after or settings.steps, set(state["met"])
    steps = range(state["step"], last)

    def save(step: int, name: str = "checkpoint") -> Path:
        reached = {"step": step, "seconds": time.perf_counter() - started, "met": sorted(met)}
        runs.save_checkpoint(out / f"{name}-{step}", model, tok, optimizer, reached)
        return out / f"{name}-{step}"

    batches = demonstration_rollouts(settings, tok, steps)
    bar = tqdm(steps, desc="pretrain", initial=state["step"], total=last, mininterval=2)
    with contextlib.closing(batches):  # whose processes end with it
        for step in bar:
            if signal := asked():
                bar.close()
                save(step)
                raise stopped(signal, out, step, last)
            problems, rollout = next(batches)
            lr = learning_rate(settings.optimizer, step, settings.steps)
            with _undone(model, optimizer, may_overflow(settings.optimizer)) as failed:
                loss = elbo_loss(network, rollout, settings, step)
                loss.backward()
                norm = optimizer_step(model, optimizer, settings.optimizer, lr)
            if failed:
                raise RunError(_dumped(step, failed[0], save(step, "failed")))
            met.update(problem.key for problem in problems)
            if step % 50 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")
                measured = {"loss": loss.item(), "grad_norm": norm, "learning_rate": lr}
                log.write({"step": step + 1} | measured)
            if settings.save_every and (step + 1) % settings.save_every == 0:
                save(step + 1)
    facts = {
        "steps": last,
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": model.num_parameters(),
        "distinct_problems": len(met),
    }
    return _pretrained(settings, out, model, tok, facts)


def _pretrained(
    settings: config.Pretrain, out: Path, model: denoiser.Denoiser, tok: Any, facts: dict
) -> dict:
    """The base is written, judged on held-out problems, and summed up."""
    with files.into(out) as part:
        checkpoints.save(model, tok, part)
    how = {"n": settings.evaluate.n, "skip": settings.evaluate.skip}
    judged = evaluate(model, tok, settings.task, settings.sampler, **how)
    return runs.write_summary(out, facts | {"held_out": judged})


def _untrained(settings: config.Pretrain, tok: Any) -> denoiser.Denoiser:
    block_causal = settings.sampler.attention == "block_causal"
    block_length = settings.sampler.block_length if block_causal else None
    sizes = dataclasses.asdict(settings.network)
    return denoiser.build(sizes, tok, settings.seed, block_length).to(settings.device)


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """What step ``i`` of a pre-training learns from, item ``i``: problems of the pre-training
    split, their prompts and mask, and a response to each; in main memory. Or why there is none: an
    error that a worker process raises would reach the run with its traceback for a message."""

    settings: config.Pretrain
    tok: Any

    def __getitem__(self, step: int) -> tuple | ValueError:
        try:
            return self._made(step)
        except ValueError as error:
            return error

    def _made(self, step: int) -> tuple[Sequence[Problem], Tensor, Tensor, Tensor]:
        settings, task = self.settings, self.settings.task
        rng = np.random.default_rng(keyed_seed(settings.seed, step, "demonstrations"))
        problems = task.problems(settings.batch_size, rng, "pretrain")
        where = (task.prompt_length, "cpu", task.prompt_format)
        prompt, prompt_mask = encode_prompts(self.tok, problems, *where)
        texts = task.demonstrations(problems, rng, step / settings.steps)
        response = encode_responses(self.tok, texts, settings.sampler.length)
        return problems, prompt, prompt_mask, response


def _unchanged(item: Any) -> Any:
    return item


def _begin_worker(number: int) -> None:
    """Each worker is one thread: a tokenizer takes as many as there are cores, unless told."""
    obey_parent(number)  # first: a worker that then fails must still be one that can be ended
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def demonstration_rollouts(
    settings: config.Pretrain, tok: Any, steps: Sequence[int]
) -> Iterator[tuple[Sequence[Problem], Rollout]]:
    """The problems of each step, and their demonstrations in the shape of a Rollout.

    ``workers`` processes make them ahead: a GPU learns from a batch sooner than one process makes
    the next. Which numbers are drawn depends on the step alone.
    """
    items = DataLoader(
        Demonstrations(settings, tok),
        batch_size=None,
        sampler=steps,
        collate_fn=_unchanged,
        num_workers=settings.workers,
        # A forked process would hold the run's lock after the run's death.
        multiprocessing_context="spawn" if settings.workers else None,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # else a number is drawn from torch's own
    )
    with unheard() if settings.workers else contextlib.nullcontext():
        made = iter(items)
    try:
        for item in made:
            if isinstance(item, ValueError):
                raise item
            problems, *tensors = item
            prompt, prompt_mask, response = (x.to(settings.device) for x in tensors)
            words = {"prompt": prompt, "prompt_mask": prompt_mask, "sampler": settings.sampler}
            yield problems, Rollout.of(response, **words)
    finally:
        del made
        _join_feeders()


def _join_feeders() -> None:
    """Wait for the threads that fed a DataLoader's queues. One that lets go of a semaphore while
    the interpreter ends can die halfway, and a warning would follow a run's last line."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=5)


def elbo_loss(model: Network, rollout: Rollout, settings: config.Pretrain, step: int) -> Tensor:
    """-ELBO / L of a batch, one masked state a sequence; of a block-causal model one a block."""
    block_causal = settings.sampler.attention == "block_causal"
    plan_of = alg.block_elbo_plan if block_causal else alg.elbo_count_plan
    noise = keyed_generator(settings.seed, step, "masks")
    plan = plan_of(rollout, noise, num_states=1, domain="all", strata=False)
    (states,) = feat.state_chunks(plan, len(rollout.response))
    found = feat.state_features(model, rollout, plan, states, temperature=1.0)["logp"]
    logp = torch.zeros_like(plan.scored, dtype=found.dtype).flatten(0, 1)
    logp = logp.index_copy(0, states, found).view_as(plan.scored)
    ll = alg.reduce_logp(logp, plan, level="sequence", normalizer=None)
    return -ll.mean() / rollout.response.shape[1]
