"""minidrl's plans, features and losses in a loop of your own, on any `model(input_ids, attention_mask) -> logits`.

    python docs/plain_torch.py [METHOD] [UPDATES]

It goes on training the shipped tiny base by a method (gdpo-sequence unless told), with so many updates on each rollout (1
unless told), and prints the reward. What is yours to replace: the model, the prompts, the reward, and the rollout (see
`recorded`).
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minidrl import methods
from minidrl.algorithms import Plan, Rollout
from minidrl.features import features
from minidrl.gradient import two_pass_backward
from minidrl.run import checkpoints
from minidrl.sampler import Sampler, generate
from minidrl.tasks.countdown import Countdown
from minidrl.tasks.text import decode, encode_prompts

BASE = Path(__file__).parents[1] / "tiny_configs/bases/countdown_base"


class Logits(nn.Module):
    """Any model as minidrl sees a network: its logits are taken for hidden states, and the head removes [MASK].

    Logits then exist at every position; a network with a head of its own makes them only where a plan scores.
    """

    def __init__(self, model: nn.Module, mask_token_id: int, vocab_size: int):
        super().__init__()
        self.model, self.mask_token_id, self.vocab_size = model, mask_token_id, vocab_size

    def encode(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.model(tokens, attention_mask)

    def head(self, logits: Tensor) -> Tensor:
        mask = torch.arange(self.vocab_size, device=logits.device) == self.mask_token_id
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(mask, -torch.inf)


def recorded(made: dict[str, Tensor], group: int, sampler: Sampler) -> Rollout:
    """A rollout from what a sampler of your own wrote down: B responses of L positions, ``group`` of them a prompt."""
    return Rollout.of(
        made["response"],  # (B, L) tokens; the responses to a prompt stand one after the other
        prompt=made["prompt"],  # (B, P) tokens, padded on the left
        prompt_mask=made["prompt_mask"],  # (B, P) False at padding
        keep=made["keep"],  # (B, L) True up to and including the first EOS
        unmask_step=made["unmask_step"],  # (B, L) the step that revealed the token, from 0
        logp=made["logp"],  # (B, L) log-probability of its draw, at the sampling temperature, in the state before that step
        num_generations=group,
        sampler=sampler,  # the settings it had: order, temperature, length, block_length, tokens_per_step
        records={"entropy": made["entropy"]},  # (B, L) entropy of the distribution of that draw, nats
    )


class Update(NamedTuple):
    """What an update needs beside the weights."""

    plan: Plan  # which masked states are scored
    adv: Tensor  # advantages
    anchor: Tensor | None  # what the ratio is taken against


def temperature(method: methods.Method, rollout: Rollout) -> float:
    """The temperature at which a method's log-probabilities are taken."""
    return rollout.sampler.temperature if method.temperature == "sampling" else 1.0


def prepare(
    network: nn.Module, method: methods.Method, rollout: Rollout, reward: Tensor, noise: torch.Generator, updates: int = 1
) -> list[Update]:
    """All updates on a rollout; to be called once, while the weights are those that sampled it."""

    def old_value(plan: Plan) -> Tensor:
        how = {"names": method.features, "temperature": temperature(method, rollout)}
        return methods.reduced(method, plan, rollout, features(network, rollout, plan, **how))

    count = 1 if method.refresh == "fixed" else updates  # fixed: one plan serves all updates
    seed = int(torch.randint(2**31, (1,), generator=noise, device=noise.device))  # one schedule for all updates
    plans = []
    for i in range(count):
        schedule = torch.Generator().manual_seed(seed)
        plans.append(methods.draw(method, rollout, noise, update=i, updates=count, schedule=schedule))
    refuse(network, method, rollout, plans[0])
    anchors = [None] * count
    if method.anchor == "behaviour":  # the sampler's own log-probabilities
        anchors = [methods.behaviour_anchor(method, plan, rollout) for plan in plans]
    elif method.anchor == "old" and method.refresh == "independent":  # masks of its own
        anchors = [old_value(methods.draw(method, rollout, noise))] * count
    elif method.anchor == "old":
        anchors = [old_value(plan) for plan in plans]
    advs = [methods.advantages(method, plan, rollout, reward) for plan in plans]
    return [Update(*parts) for parts in zip(plans, advs, anchors, strict=True)] * (updates // count)


def backward(network: nn.Module, method: methods.Method, rollout: Rollout, update: Update) -> Tensor:
    """Leave the gradient of an update in .grad, at the weights as they are now; returns the loss, which has no graph."""
    plan, adv, anchor = update

    def loss_of(found: dict[str, Tensor]) -> Tensor:
        return methods.method_loss(method, plan, rollout, found, adv, anchor, None)

    how = {"names": method.features, "temperature": temperature(method, rollout)}
    return two_pass_backward(network, rollout, plan, loss_of, **how).loss


def refuse(network: nn.Module, method: methods.Method, rollout: Rollout, plan: Plan) -> None:
    """ValueError for what would run, and learn nothing or something else."""
    prompt, group, kept, name = rollout.prompt, rollout.num_generations, rollout.keep, method.name
    traced = plan.replay or method.temperature == "sampling"  # a method about the recorded trajectory
    if method.step_value != "none" or (method.kl and method.kl.target == "reference"):
        raise ValueError(f"method: {name} values steps or has a reference policy, which this loop has not")
    if method.order not in ("any", getattr(rollout.sampler, "order", None)):
        raise ValueError(f"sampler.order: {name} is about {method.order}")
    if plan.block_length is not None and not hasattr(network, "encode_staircase"):
        raise ValueError(f"network: {name} is about block diffusion and needs encode_staircase")
    if group < 2 or len(prompt) % group or (prompt != prompt[::group].repeat_interleave(group, 0)).any():
        raise ValueError(f"num_generations: got {group}; the responses to a prompt must stand one after the other, 2 or more")
    if traced and (rollout.sampler is None or (rollout.unmask_step[kept] < 0).any()):
        raise ValueError(f"rollout: {name} reads sampler and unmask_step, which are missing")
    if method.anchor == "behaviour" and not rollout.logp[kept].any():
        raise ValueError(f"rollout: {name} reads logp, which is missing")


class Model(nn.Module):
    """The model of this example, as you would write it: tokens in, logits out."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.network.head(self.network.encode(input_ids, attention_mask))


def main(name: str = "gdpo-sequence", updates: int = 1, steps: int = 20) -> list[float]:
    """Mean rewards of a short training."""
    task, method = Countdown(held_out_share=0.3), methods.METHODS[name]
    base, tok = checkpoints.load(BASE)
    network = Logits(Model(base), tok.mask_token_id, len(tok))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4)
    sampler = Sampler(order="low_confidence", temperature=1.0, length=12, block_length=12, tokens_per_step=1)
    noise, rng, rewards = torch.Generator().manual_seed(0), np.random.default_rng(0), []
    how = {"eos_token_id": tok.eos_token_id, "num_generations": 8, "records": ["entropy", *method.needs], "generator": noise}
    for step in range(steps):
        puzzles = task.problems(16, rng)
        prompt, prompt_mask = encode_prompts(tok, puzzles, task.prompt_length)
        rollout = generate(network, prompt, prompt_mask, sampler, **how)
        texts = decode(tok, rollout.response)
        reward = torch.tensor([task.judge(puzzles[i // 8], text).reward for i, text in enumerate(texts)])
        for update in prepare(network, method, rollout, reward, noise, updates):
            loss = backward(network, method, rollout, update)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        rewards.append(float(reward.mean()))
        print(f"step {step + 1:2}   loss {loss:+.4f}   reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
