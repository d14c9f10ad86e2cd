"""Self-training: what a rise of the solved rate by RL is to be compared with.

It is supervised fine-tuning on the base's own correct samples, with as many rollouts and updates.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minidrl import loop
from minidrl.bookkeeping import Clock, of_step
from minidrl.denoiser import Denoiser
from minidrl.keyed import keyed_generator
from minidrl.run import checkpoints, config, folders
from minidrl.run.evaluate import evaluate
from minidrl.run.train import start
from research.ledger import SELF_TRAINING


def solved(model: Denoiser, tok: Any, s: config.Train, temperature: float, **changes: Any) -> dict:
    """Held-out scores at a temperature.

    ``changes``: other sampler settings. Another order has no confidence, and so no threshold.
    """
    if changes.get("order", "low_confidence") != "low_confidence":
        changes = {"threshold": None} | changes
    decoding = dataclasses.replace(s.sampler, temperature=temperature, **changes)
    return evaluate(model, tok, s.task, decoding, n=s.evaluate.n, skip=s.evaluate.skip)


# ------------------------------------------------------------------------------------- self-training


def steps_of(settings: config.Train, imitates: bool = False, renew: int = 0) -> tuple[loop.Run, Iterator[dict]]:
    """A run, and its steps: of RL, or of self-training.

    Self-training scores the states that ``reinforce`` would score; of its options those of the settings are kept.
    ``renew`` > 0: it is iterated, and every so many steps the samples come from what the run has become.
    """
    if not imitates:
        run = start(settings)
        return run, loop.train(run)
    if settings.method != "reinforce":
        settings = dataclasses.replace(settings, method="reinforce", method_options={})
    run, base = start(settings), start(settings)

    def step_of(step: int) -> dict:
        if renew and step % renew == 0:
            base.model.load_state_dict(run.model.state_dict())
        return imitate(run, base, step)

    return run, map(step_of, range(settings.steps))


def imitate(run: loop.Run, base: loop.Run, step: int) -> dict:
    """Supervised fine-tuning on correct samples of the base, with the run's other settings.

    Also known as rejection-sampling fine-tuning; a round of expert iteration. Each update
    maximises the log-probability of the solved rollouts of one step. That is REINFORCE with reward
    1 for solved, no baseline, and a sampler that never learns.
    """
    run.clock = base.clock = Clock()
    experience, rows = loop.collect(base, step), []
    correct = experience.solved.to(experience.reward)
    for i in range(run.settings.num_iterations):
        if not correct.any():
            rows.append(loop.skip(run))
            continue
        noise = keyed_generator(run.settings.seed, step, f"plan {i}")
        plan, weights = run.method.plan(experience.rollout, noise), correct * len(correct) / correct.sum()
        rows.append(loop.update(run, experience, plan, weights, None)[0])
    return of_step(run, step, experience, rows)


def imitation(settings: config.Train, out: Path, renew: int = 0) -> tuple[Denoiser, Any]:
    """A run of self-training, iterated with ``renew`` > 0, in ``out``; returns what it has learned.

    metrics.jsonl and, at the end, checkpoint-N, as of a run of RL. One that was interrupted begins anew.
    """
    if (out / folders.CONFIG).exists():
        raise ValueError(f"out: got {str(out)!r}, which holds a run; allowed another --out")
    s, began = settings.evaluate, time.perf_counter()
    run, steps = steps_of(settings, imitates=True, renew=renew)
    out.mkdir(parents=True, exist_ok=True)
    (path := out / "metrics.jsonl").write_text("")

    def write(row: dict) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row | {"seconds": time.perf_counter() - began}) + "\n")

    def judge(step: int) -> None:
        found = solved(run.model, run.tok, settings, s.temperature)
        write({"step": step} | {f"eval/{key}": value for key, value in found.items()})

    judge(0)
    for step, row in enumerate(tqdm(steps, desc=SELF_TRAINING, total=settings.steps), 1):
        write(row)
        if step == settings.steps or (s.every and step % s.every == 0):
            judge(step)
    checkpoints.save(run.model, run.tok, out / f"checkpoint-{settings.steps}")
    return run.model, run.tok
