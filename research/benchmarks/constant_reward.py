"""Where nothing can be learnt: `python research/benchmarks/constant_reward.py` (4 minutes) writes results/constant_reward.json.

Reward 1 for every response, no centring, 8 plain gradient steps on fresh responses of the Countdown model that ships, in
low-confidence order. A line a seed: the mean entropy of a response (nats) before each step, without updates, with the score
of the revealed tokens (4.1), and with the exact score of the sampler, tokens and positions (4.2). As a control, a coin, +1 or
-1, replaces the reward 1 in front of the tokens' score: updates of the same size, of mean zero. BENCHMARKS.md has the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from minidrl import algorithms as alg
from minidrl.gradient import second_pass
from minidrl.run import config, trainer

CONFIG = Path(__file__).parents[2] / "tiny_configs" / "countdown20_cpu.yaml"
SCORES = {"no update": (), "tokens only": ("logp",), "exact": ("logp", "order_logp"), "coins": ("logp",)}
SEEDS, STEPS, COUNT, RATE = 12, 8, 20, 0.01


def course(name: str, seed: int, steps: int = STEPS) -> list[float]:
    """Mean entropy of a response before each of ``steps`` updates of the line ``name``."""
    own = {"method": "egspo", "method_options": {}, "micro_batch": 128, "seed": seed}
    own |= {"num_prompts": COUNT, "num_generations": 1}
    run, sure, toss = trainer.Learner(config.load(config.Train, CONFIG, own)), [], torch.Generator().manual_seed(seed)
    for i in range(steps):
        rollout = run.collect(i, trainer.Clock()).rollout
        sure.append(rollout.records["entropy"].sum(1).mean().item())
        if names := SCORES[name]:
            plan = alg.replay_plan(rollout, torch.Generator(), num_states=None, min_entropy=0.0)
            for p in run.model.parameters():
                p.grad = torch.zeros_like(p)
            reward = torch.ones(COUNT) if name != "coins" else 2.0 * torch.randint(2, (COUNT,), generator=toss) - 1
            # the loss is minus the mean of reward times score
            cotangent = dict.fromkeys(names, plan.scored * (-reward / COUNT)[:, None])
            second_pass(run.model, rollout, plan, cotangent, temperature=1.0, size=128)
            torch.optim.SGD(run.model.parameters(), lr=RATE).step()
    return sure


def line(seed: int) -> dict:
    """The courses of a seed, four decimals."""
    return {"seed": seed} | {name: [round(x, 4) for x in course(name, seed)] for name in SCORES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "constant_reward.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.write_text("".join(json.dumps(line(seed)) + "\n" for seed in range(SEEDS)))


if __name__ == "__main__":
    main()
