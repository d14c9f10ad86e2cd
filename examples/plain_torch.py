"""minidrl's plans, features and losses in a loop of your own, on any `model(input_ids, attention_mask) -> logits`.

    python examples/plain_torch.py [METHOD]

It continues the shipped tiny base with a row of METHODS (by default gdpo) and prints the reward. What is yours to replace:
`model`, the prompts, the reward.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from minidrl import checkpoints, methods
from minidrl.features import features
from minidrl.gradient import two_pass_backward
from minidrl.sampler import Sampler, generate
from minidrl.tasks.countdown import Countdown
from minidrl.trainer import decode, encode_prompts

BASE = Path(__file__).parents[1] / "tiny_models" / "countdown_base"


class Logits(nn.Module):
    """Any model as minidrl sees a network: the logits are its hidden states, and its head removes [MASK].

    The price: logits exist at every position, where a head of its own would make them only where a plan scores.
    """

    def __init__(self, model: nn.Module, mask_token_id: int, vocab_size: int):
        super().__init__()
        self.model, self.mask_token_id, self.vocab_size = model, mask_token_id, vocab_size

    def encode(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.model(tokens, attention_mask)

    def head(self, logits: Tensor) -> Tensor:
        masked = torch.arange(self.vocab_size, device=logits.device) == self.mask_token_id
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(masked, -torch.inf)


def backward(network, method, rollout, reward: Tensor, noise: torch.Generator) -> Tensor:
    """Accumulate the gradient of a row's first update on a rollout; returns the loss."""
    if method.step_value != "none" or (method.kl and method.kl.target == "reference"):
        raise ValueError(f"method: got {method.name}; allowed here one without step values and without a reference policy")
    scored = {"temperature": rollout.sampler.temperature if method.temperature == "sampling" else 1.0}
    plan = methods.draw(method, rollout, noise)  # which states are looked at: hidden, scored, weight
    adv = methods.advantages(method, plan, rollout, reward)
    anchor = None  # what the ratio is taken against
    if method.anchor == "behaviour":
        anchor = methods.behaviour_anchor(method, plan, rollout)
    elif method.anchor == "old":
        own = methods.draw(method, rollout, noise) if method.refresh == "independent" else plan
        before = features(network, rollout, own, names=method.features, **scored)
        anchor = methods.reduced(method, own, rollout, before)

    def loss_of(found: dict[str, Tensor]) -> Tensor:
        return methods.method_loss(method, plan, rollout, found, adv, anchor, None)

    return two_pass_backward(network, rollout, plan, loss_of, names=method.features, **scored).loss


class Model(nn.Module):
    """The model of this example, as you would write it: tokens in, logits out."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.network.head(self.network.encode(input_ids, attention_mask))


def main(name: str = "gdpo", steps: int = 20) -> list[float]:
    """Mean rewards of a short training."""
    task, method = Countdown(held_out_share=0.3), methods.METHODS[name]
    base, tok = checkpoints.load(BASE)
    network = Logits(Model(base), tok.mask_token_id, len(tok))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4)
    sampler = Sampler(order="low_confidence", temperature=1.0, length=12, block_length=12, tokens_per_step=1)
    noise, rng, rewards = torch.Generator().manual_seed(0), np.random.default_rng(0), []
    for step in range(steps):
        puzzles = task.problems(16, rng)
        prompt, prompt_mask = encode_prompts(tok, puzzles, task.prompt_length, "cpu", task.prompt_format)
        how = {"eos_token_id": tok.eos_token_id, "num_generations": 8, "records": sorted(method.needs)}
        rollout = generate(network, prompt, prompt_mask, sampler, generator=noise, **how)
        texts = decode(tok, rollout.response)
        reward = torch.tensor([task.judge(puzzles[i // 8], text).reward for i, text in enumerate(texts)])
        loss = backward(network, method, rollout, reward, noise)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(reward.mean()))
        print(f"step {step + 1:2}   loss {loss:+.4f}   reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2])
