"""Trains the model of lesson 00a with the reader's update: `practise(update)`.

First the update is tried on one rollout, with plain gradient descent, and what it did
to the weights is compared with the policy gradient. A mistake that can be seen there is
named, and nothing is trained. Then come 30 rollouts, and a curve that has to rise.
"""

import sys
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Generator, Tensor, nn
from torch.nn.functional import cosine_similarity

from judge import CLONES
from minidrl.algorithms import group_mean

LESSONS = CLONES[0].parent / "notebooks"
sys.path.append(str(LESSONS))

from nbtools import BLUE, GREY, lines_of, style  # noqa: E402

GROUPS, N, ROLLOUTS = 48, 4, 30
RISE = 15  # points, from the first five rollouts to the last five

# Model, task and sampler of lesson 00a, rollout and replay of lesson 00b.
LINES = {
    "00a_build_a_model.ipynb": "task VOCAB PAD P ID to_ids to_text turned Layer "
    "Transformer hidden_logp fill_in",
    "00b_build_its_policy_gradient.ipynb": "play replayed",
}
IMPORTS = """
import math
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from minidrl.tasks.countdown import Countdown
"""
lesson: dict = {}
exec(IMPORTS, lesson)
for notebook, names in LINES.items():
    exec(lines_of(LESSONS / notebook, *names.split()), lesson)

Update = Callable[..., None]


class Rollout:
    """48 puzzles, 4 answers each: B = 192, written one token a call in random order."""

    def __init__(self, model: nn.Module, rng: np.random.Generator, noise: Generator):
        puzzles = lesson["task"].problems(GROUPS, rng)
        found = lesson["play"](model, puzzles, N, noise)
        self.tokens, self.step_of, _, self.reward = found

    def logp(self, model: nn.Module) -> Tensor:
        """(B, L): log pi of each token in the state of its step; has a gradient."""
        return lesson["replayed"](model, self.tokens, self.step_of)


def base() -> nn.Module:
    model = lesson["Transformer"]()
    model.load_state_dict(load_file(LESSONS / "model_00a.safetensors"))
    return model


def moves(model: nn.Module) -> Tensor:
    """How far the weights are from where they began, as one vector."""
    pairs = zip(model.parameters(), base().parameters(), strict=True)
    return torch.cat([(now - start).detach().flatten() for now, start in pairs])


def uphill(rollout: Rollout, adv: Tensor) -> Tensor:
    """The policy gradient of the base with these advantages."""
    model = base()
    value = (adv * rollout.logp(model).sum(1)).mean()
    grads = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def missed(update: Update) -> str:
    """What the first two updates show, in one line; nothing if they are right."""
    model, generator = base(), torch.Generator().manual_seed(0)
    rollout = Rollout(model, np.random.default_rng(0), generator)
    right = uphill(rollout, group_mean(rollout.reward, N))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    try:
        update(model, optimizer, rollout, N)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    if line := off(moves(model), right, rollout):
        return line
    model.load_state_dict(base().state_dict())
    update(model, optimizer, rollout, N)
    if not torch.allclose(moves(model), right, atol=1e-4):
        return "the second update is not the first again: optimizer.zero_grad()?"
    return ""


def off(found: Tensor, right: Tensor, rollout: Rollout) -> str:
    """What is wrong with the direction or the length of a step."""
    if not found.any():
        return (
            "the weights did not move: is there a backward() and an optimizer.step()?"
        )
    cosine, size = cosine_similarity(found, right, 0), found.norm() / right.norm()
    if cosine < -0.9:
        return "the step goes against the policy gradient: an optimiser goes *down*"
    if cosine < 0.99:
        line = f"its cosine with the policy gradient is {cosine:.2f}, and should be 1."
        slips = {
            "Take the mean over the group, not over the batch.": rollout.reward.mean(),
            "Is the mean of the group subtracted?": 0,
        }
        for advice, baseline in slips.items():
            slip = uphill(rollout, rollout.reward - baseline)
            if cosine_similarity(found, slip, 0) > 0.99:
                line += f" {advice}"
        return line
    if abs(size - 1) > 0.01:
        count = len(rollout.reward)
        return (
            f"the step is {size:.3g} times too long: take the mean over {count} answers"
        )
    return ""


def practise(update: Update) -> None:
    """Judge an update, and train with it if it is right so far."""
    if not update.__code__.co_names:  # nothing is called in it
        return print("update: open. Write it above, then run both cells again")
    if line := missed(update):
        return print(f"update: missed\n  {line}")
    model, generator = base(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    puzzles, solved = np.random.default_rng(1), []
    for _ in range(ROLLOUTS):
        rollout = Rollout(model, puzzles, generator)
        update(model, optimizer, rollout, N)
        solved.append(100 * (rollout.reward == 1).double().mean().item())
    draw(solved)
    first, last = np.mean(solved[:5]), np.mean(solved[-5:])
    print("update: right" if last - first > RISE else "update: missed")
    print(
        f"  solved in the first five rollouts {first:.0f} %, in the last {last:.0f} %"
    )


def draw(solved: list[float]) -> None:
    style()
    _, ax = plt.subplots(figsize=(5.6, 2.6))
    ax.plot(range(1, len(solved) + 1), solved, ".-", color=BLUE)
    ax.axhline(np.mean(solved[:3]), color=GREY, ls=":", label="first three rollouts")
    ax.set(xlabel="rollout, one update each", ylabel="answers that solve, %")
    ax.set(ylim=(0, 100))
    ax.legend(loc="lower right")
    plt.show()
