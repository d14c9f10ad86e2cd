"""A method of METHODS in TRL: its GRPOTrainer, with the rollouts, the likelihood and the loss of a masked diffusion model.

    pip install -e ".[trl]" && python docs/trl_trainer.py [METHOD]

TRL keeps what it does well: the data set, reward functions, optimiser, schedule, logging, checkpoints. Replaced is one method,
`training_step`: there, TRL would let the model continue a prompt from left to right and score the continuation token by token.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from plain_torch import backward, prepare
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

from minidrl import methods, sampler
from minidrl.run import checkpoints
from minidrl.tasks.countdown import Countdown, Puzzle
from minidrl.tasks.text import decode

BASE = Path(__file__).parents[1] / "tiny_configs/bases" / "countdown_base"


class DiffusionGRPOTrainer(GRPOTrainer):
    """One update a rollout of one batch, on one process. network: a Denoiser whose model is the one that is trained."""

    def __init__(self, network: nn.Module, method: methods.Method, decoding: sampler.Sampler, **words):
        super().__init__(model=network.model, **words)
        if self.args.gradient_accumulation_steps != 1:
            got = self.args.gradient_accumulation_steps
            raise ValueError(f"gradient_accumulation_steps: got {got}; allowed 1, as a step makes its own gradient")
        self.network, self.method, self.decoding = network, method, decoding
        self.noise = torch.Generator(self.accelerator.device).manual_seed(self.args.seed)

    def rollout(self, batch: list[dict]) -> tuple[sampler.Rollout, Tensor]:
        """TRL's batch has each prompt once for each response; returns the rollout and its rewards."""
        tok, each, prompts = self.processing_class, self.num_generations, [example["prompt"] for example in batch]
        asked = tok(prompts[::each], padding=True, padding_side="left", return_tensors="pt").to(self.network.device)
        how = {"eos_token_id": tok.eos_token_id, "records": sorted({*self.method.needs, "entropy"}), "generator": self.noise}
        prompt = asked.input_ids, asked.attention_mask.bool()
        made = sampler.generate(self.network, *prompt, self.decoding, num_generations=each, **how)
        texts = decode(tok, made.response)
        rewards = self._calculate_rewards(batch, prompts, texts, made.response.tolist())
        return made, (rewards * self.reward_weights.to(rewards)).nansum(1)

    def training_step(self, model: nn.Module, inputs: list[dict], num_items_in_batch: int | None = None) -> Tensor:
        model.train()
        rollout, reward = self.rollout(inputs)
        self._metrics["train"]["reward"].append(float(reward.mean()))
        self._step += 1
        (update,) = prepare(self.network, self.method, rollout, reward, self.noise)
        return backward(self.network, self.method, rollout, update)


def countdown(count: int, task: Countdown) -> Dataset:
    """Prompts, and what the reward function needs to know of each."""
    puzzles = task.problems(count, np.random.default_rng(0))
    columns = {"prompt": [p.prompt for p in puzzles], "numbers": [p.numbers for p in puzzles]}
    table = InMemoryTable.from_pydict(columns | {"target": [p.target for p in puzzles]})
    return Dataset(table, fingerprint="countdown")  # named, as datasets 5.2 can't hash a table of pyarrow 24 to 26


def main(name: str = "gdpo-sequence", steps: int = 20, out: str = "runs/trl") -> list[float]:
    """Mean rewards of a short training."""
    task, (network, tok) = Countdown(held_out_share=0.3), checkpoints.load(BASE)

    def reward(completions: list[str], numbers: list, target: list, **_) -> list[float]:
        puzzles = map(Puzzle, map(tuple, numbers), target)
        return [task.judge(puzzle, text).reward for puzzle, text in zip(puzzles, completions, strict=True)]

    arguments = GRPOConfig(
        out,
        per_device_train_batch_size=128,
        num_generations=8,
        max_steps=steps,
        learning_rate=3e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    decoding = sampler.Sampler(order="low_confidence", temperature=1.0, length=12, block_length=12, tokens_per_step=1)
    trainer = DiffusionGRPOTrainer(
        network,
        methods.METHODS[name],
        decoding,
        reward_funcs=reward,
        args=arguments,
        processing_class=tok,
        train_dataset=countdown(16 * steps, task),
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    main(*sys.argv[1:2])
