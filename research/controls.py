"""What a rise of the solved rate is to be compared with: the controls of an RL run.

All on the same held-out puzzles:

base, best temperature    the policy may only have become sharper: does it beat the base at its best
                          temperature?
greedy before and after   what the network knows, without the luck of sampling
pass@8 before and after   what it can reach at all
base, other orders        the same network may know more than the order of this run lets it say
self-training             supervised fine-tuning on the base's own correct samples, with as many
                          rollouts and updates
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minidrl import sampler
from minidrl.denoiser import Denoiser
from minidrl.run import checkpoints, config, files, tables, trainer, untrusted
from research.ledger import SELF_TRAINING

CONTROLS = "controls.json"
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)


def solved(
    model: Denoiser,
    tok: Any,
    settings: config.Train,
    temperature: float,
    samples: int = 1,
    **changes: Any,
) -> dict:
    """Held-out scores at a temperature; with samples > 1 also pass@samples.

    ``changes``: other sampler settings. Another order has no confidence, and so no threshold.
    """
    if changes.get("order", "low_confidence") != "low_confidence":
        changes = {"threshold": None} | changes
    decoding = dataclasses.replace(settings.sampler, temperature=temperature, **changes)
    how = {"n": settings.evaluate.n, "skip": settings.evaluate.skip, "samples": samples}
    return trainer.evaluate(model, tok, settings.task, decoding, **how)


class SelfTraining(trainer.Learner):
    """Supervised fine-tuning on correct samples of the frozen base, with the run's other settings.

    Also known as rejection-sampling fine-tuning; one round of expert iteration.

    Each update maximises the log-probability of the solved rollouts of one step. That is REINFORCE
    with reward 1 for solved, no baseline, and a sampler that never learns: the difference to the RL
    run is that the data are not on-policy.
    """

    def __init__(self, settings: config.Train):
        settings = dataclasses.replace(settings, method="reinforce", method_options={})
        super().__init__(settings)
        self.method = dataclasses.replace(self.method, name=SELF_TRAINING)
        self.base = trainer.Learner(settings)

    def step(self, step: int) -> dict:
        """One rollout of the base, ``num_iterations`` updates; returns the metrics row."""
        clock = trainer.Clock()
        experience = self.base.collect(step, clock)
        updates = range(self.settings.num_iterations)
        rows = [self._imitate(step, i, experience, clock) for i in updates]
        return self._metrics(step, experience, rows, clock)

    def _imitate(self, step: int, update: int, experience: trainer.Experience, clock: trainer.Clock) -> dict:
        correct = experience.solved.to(experience.reward)
        if not correct.any():
            return self._no_update(clock)
        plan = self.method.plan(experience.rollout, self.generator(step, f"plan {update}"))
        weights = correct * len(correct) / correct.sum()
        return self.update(experience, plan, weights, None, clock)[0]


def self_training(settings: config.Train) -> SelfTraining:
    """What ``SelfTraining`` has learned after the steps of a run; nothing is written."""
    learner = SelfTraining(settings)
    for step in tqdm(range(settings.steps), desc=SELF_TRAINING):
        learner.step(step)
    return learner


def measure(run: Path) -> dict:
    """All controls of a finished run; written to controls.json in its folder."""
    files.check_writable(run / CONTROLS)
    settings = config.of_run(config.Train, run)
    before, tok = checkpoints.load(settings.model)
    checkpoint = run / f"checkpoint-{settings.steps}"
    after, _ = checkpoints.load(checkpoint)

    def rate(model: Denoiser, t: float, samples: int = 1, **changes: Any) -> float:
        key = "solved" if samples == 1 else f"pass@{samples}"
        with checkpoints.blamed(model, checkpoint if model is after else settings.model):
            return solved(model, tok, settings, t, samples, **changes)[key]

    rows = {f"base, temperature {t:g}": rate(before, t) for t in TEMPERATURES}
    for order in (order for order in sampler.ORDERS if order != settings.sampler.order):
        for t in (0.0, 1.0):
            rows[f"base, {order}, temperature {t:g}"] = rate(before, t, order=order)
    trained = self_training(settings).model
    rows |= {
        "after RL, temperature 1": rate(after, 1.0),
        "after RL, greedy": rate(after, 0.0),
        "base, pass@8": rate(before, 1.0, 8),
        "after RL, pass@8": rate(after, 1.0, 8),
        "self-training, temperature 1": rate(trained, 1.0),
        "self-training, greedy": rate(trained, 0.0),
    }
    files.write(run / CONTROLS, json.dumps(rows, indent=2) + "\n")
    return rows


def read(run: Path) -> dict:
    """The controls of a run, from its folder; empty where they have not been measured, or the file
    was cut short.

    ValueError for a JSON file that ``measure`` has not written: it is not written over.
    """
    path = run / CONTROLS
    if not path.exists():
        return {}
    untrusted.check_size(path)
    try:
        row = untrusted.parsed_json(untrusted.decoded(path), str(path))
    except ValueError:
        return {}
    if not isinstance(row, dict) or not row or not all(map(untrusted.SHARE.good, row.values())):
        allowed = "a share from 0 to 1 for each control, or no such file: it is then measured"
        raise ValueError(f"{path}: got {untrusted.brief(row)}; allowed {allowed}")
    return row


def check_once(runs: list[Path]) -> None:
    """ValueError for a folder that is there twice, by whatever path."""
    if len({run.resolve() for run in runs}) < len(runs):
        got = ", ".join(map(str, runs))
        raise ValueError(f"runs: got {untrusted.brief(got)}; allowed each folder once")


def table(runs: list[Path]) -> str:
    """Markdown table of several runs' controls (percent): one column a seed, and the mean."""
    check_once(runs)
    rows = [read(run) for run in runs]
    columns = [run.name for run in runs]
    if len(set(columns)) < len(columns):
        columns = list(map(str, runs))
    for run, row in zip(runs, rows, strict=True):
        if row.keys() != rows[0].keys():
            allowed = f"a share for each of {', '.join(rows[0])}"
            raise ValueError(f"{run / CONTROLS}: got {untrusted.brief(row)}; allowed {allowed}")
    out = []
    for name in rows[0]:
        values = [100 * row[name] for row in rows]
        cells = {column: f"{value:.1f}" for column, value in zip(columns, values, strict=True)}
        out.append({"solved (%)": name} | cells | {"mean": f"{sum(values) / len(values):.1f}"})
    return tables.markdown_table(out, ("solved (%)", *columns, "mean"))
