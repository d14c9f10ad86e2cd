"""minidrl's losses in a loop of plain torch, one update a rollout: `python examples/forty_lines.py gdpo`."""

import sys
from pathlib import Path

import numpy as np
import torch

from minidrl import features, gradient, methods, sampler
from minidrl.run import checkpoints, trainer
from minidrl.tasks.countdown import Countdown


def backward(network, method, rollout, reward, noise):
    """Leave the gradient of the update in .grad, at the weights that made the rollout."""
    how = {"names": method.features, "temperature": rollout.sampler.temperature if method.temperature == "sampling" else 1.0}
    plan, anchor = methods.draw(method, rollout, noise), None  # which masked states are scored; what a ratio is taken against
    if method.anchor == "behaviour":
        anchor = methods.behaviour_anchor(method, plan, rollout)
    elif method.anchor == "old":
        masks = methods.draw(method, rollout, noise) if method.refresh == "independent" else plan
        anchor = methods.reduced(method, masks, rollout, features.features(network, rollout, masks, **how))
    told = methods.advantages(method, plan, rollout, reward), anchor, None  # no KL to a reference policy
    gradient.two_pass_backward(network, rollout, plan, lambda f: methods.method_loss(method, plan, rollout, f, *told), **how)


def main(name="gdpo", steps=20):
    """Train the shipped tiny base, and print the mean reward of each rollout."""
    network, tok = checkpoints.load(Path(__file__).parents[1] / "tiny_configs/bases" / "countdown_base")
    task, method = Countdown(held_out_share=0.3), methods.METHODS[name]
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4)
    settings = sampler.Sampler(order="low_confidence", temperature=1.0, length=12, block_length=12, tokens_per_step=1)
    noise, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    how = {"eos_token_id": tok.eos_token_id, "num_generations": 8, "records": ["entropy", *method.needs], "generator": noise}
    for _ in range(steps):
        puzzles = task.problems(16, rng)
        prompts = trainer.encode_prompts(tok, puzzles, task.prompt_length, "cpu", task.prompt_format)
        rollout = sampler.generate(network, *prompts, settings, **how)
        texts = enumerate(trainer.decode(tok, rollout.response))
        reward = torch.tensor([task.judge(puzzles[i // 8], text).reward for i, text in texts])
        backward(network, method, rollout, reward, noise)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"reward {float(reward.mean()):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
