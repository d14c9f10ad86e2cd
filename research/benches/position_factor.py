"""Tokens only, or tokens and positions? `python -m research.benches.position_factor [CONFIG]` (four minutes of one CPU thread).

Two estimates of the policy gradient of the low-confidence sampler, on the same rollouts of the config's model: the score of the
drawn tokens (`reinforce`), which leaves out that the choice of positions depends on the weights, and the score of tokens and
positions (4.2), which is exact. All steps of a trajectory are scored. One batch is what the config takes for an update. With
t_i and x_i the two gradients of batch i, means <a, b> over pairs of different batches, which noise does not bias,

    bias     |E t - E x| / |E x|                           <t - x, t - x>^(1/2) / <x, x>^(1/2)
    noise    (tr Var t)^(1/2) / |E x|, and that of x       (mean |t_i|^2 - <t, t>)^(1/2) / <x, x>^(1/2)
    level    (tr Var x - tr Var t) / |E t - E x|^2         batches of this size from which on the exact score has less error

where errors are mean squares, |estimate - E x|^2. Intervals: 95 %, jackknife over batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from tqdm import trange

from minidrl import bookkeeping, loop, methods
from minidrl.gradient import two_pass_backward
from minidrl.keyed import keyed_generator
from minidrl.run import config
from minidrl.run.train import start
from research import stats
from research.tables import markdown

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tiny_configs" / "countdown20_cpu.yaml"
ALL_STEPS = {"plan.min_entropy": 0.0}


def rows() -> dict[str, methods.Method]:
    """REINFORCE by either score; its loss is linear in both."""
    tokens = methods.with_options(methods.METHODS["reinforce"], ALL_STEPS)
    return {"tokens": tokens, "tokens and positions": dataclasses.replace(tokens, features=("logp", "order_logp"))}


def gradient(run: loop.Run, row: methods.Method, experience: bookkeeping.Experience, step: int) -> Tensor:
    """The gradient that an update by this row would apply, as one vector of doubles."""
    rollout = experience.rollout
    plan = row.plan(rollout, keyed_generator(run.settings.seed, step, "plan 0"))
    adv = methods.advantages(row, plan, rollout, experience.reward)
    blank = dict.fromkeys(row.features, torch.zeros(plan.scored.shape, dtype=rollout.logp.dtype))
    run.model.zero_grad(set_to_none=True)
    two_pass_backward(
        run.network,
        rollout,
        plan,
        lambda feature: methods.method_loss(row, plan, rollout, feature, adv, None, None),
        temperature=run.settings.sampler.temperature,
        size=run.settings.micro_batch,
        feature=blank,
    )
    return torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]).double()


@dataclass(frozen=True)
class Products:
    """<t_i, t_j>, <x_i, x_j> and <t_i - x_i, t_j - x_j>, (batches, batches) each."""

    t: Tensor
    x: Tensor
    gap: Tensor

    @classmethod
    def of(cls, t: Tensor, x: Tensor) -> Products:
        return cls(t @ t.T, x @ x.T, (t - x) @ (t - x).T)

    def without(self, batch: int) -> Products:
        """Of the other batches."""
        keep = torch.arange(len(self.t)) != batch
        return Products(*(each[keep][:, keep] for each in (self.t, self.x, self.gap)))


def across(products: Tensor) -> float:
    """The mean over pairs of different batches: the square of the length of the mean, without bias."""
    count = len(products)
    return float((products.sum() - products.trace()) / (count * (count - 1)))


def spread(products: Tensor) -> float:
    """tr Var, without bias."""
    return float(products.diagonal().mean()) - across(products)


def root(a: float, b: float) -> float:
    """(a / b)^(1/2); not a number where noise hides what b is the square of."""
    return math.sqrt(max(a, 0.0) / b) if b > 0 else math.nan


MEASURES: dict[str, Callable[[Products], float]] = {
    "bias of the token score, over the length of the gradient": lambda p: root(across(p.gap), across(p.x)),
    "noise of the token score, over the length of the gradient": lambda p: root(spread(p.t), across(p.x)),
    "noise of the exact score, over the length of the gradient": lambda p: root(spread(p.x), across(p.x)),
    "noise, exact over token": lambda p: root(spread(p.x), spread(p.t)),
    "batches of this size at which both have one error": lambda p: (spread(p.x) - spread(p.t)) / across(p.gap),
}


def jackknife(measure: Callable[[Products], float], products: Products) -> tuple[float, float, float]:
    """The number, and its 95 % interval from leaving out each batch once."""
    count, value = len(products.t), measure(products)
    without = torch.tensor([measure(products.without(i)) for i in range(count)], dtype=torch.float64)
    error = math.sqrt((count - 1) / count * float((without - without.mean()).square().sum()))
    half = stats.student(0.975, count - 1) * error
    return value, value - half, value + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG)
    parser.add_argument("--batches", type=int, default=80)
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = config.load(config.Train, given.config, {"method": "reinforce"})
    if given.batches < 3:
        parser.error(f"--batches: got {given.batches}; allowed integers from 3")
    if (order := settings.sampler.order) != "low_confidence":
        parser.error(f"sampler.order: got {order!r} in {given.config}; allowed low_confidence")
    run, found = start(settings), {name: [] for name in rows()}
    for step in trange(given.batches, desc="batches", file=sys.stderr):
        experience = loop.collect(run, step)
        for name, row in rows().items():
            found[name].append(gradient(run, row, experience, step))
    products = Products.of(*(torch.stack(each) for each in found.values()))
    lines = [
        {"measure": name, "found [95 %]": "{:.2f} [{:.2f}, {:.2f}]".format(*jackknife(measure, products))}
        for name, measure in MEASURES.items()
    ]
    size = settings.num_prompts * settings.num_generations
    print(f"{given.batches} batches of {size} responses\n\n{markdown(pd.DataFrame(lines))}")


if __name__ == "__main__":
    main()
