"""Threshold decoding against fixed steps: calls and solved rate of one base.

    python -m research.benches.threshold CONFIG [--model DIR] [--temperature 1] [--seeds 5] [--n 512]

The task is that of CONFIG, with its length and block length. Each seed is other noise on the same held-out puzzles; at
temperature 0 there is no noise, and one seed is all. `calls` are those that a response needs; `batch`, what the batch computes,
rows that wait included. Student intervals over seeds; differences are taken pair by pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import pandas as pd

from minidrl import sampler
from minidrl.keyed import keyed_generator
from minidrl.run import checkpoints, config
from minidrl.tasks import held_out, verdicts
from minidrl.tasks import text as texts
from research import stats
from research.tables import markdown

TAUS = (0.5, 0.7, 0.9, 0.95)
FIXED = (1, 2, 4, 7)


def _name(tokens: int, tau: float | None) -> str:
    return f"{tokens} a step" if tau is None else f"threshold {tau:g}"


def _interval(values: list[float], digits: int) -> str:
    mean, low, high = stats.mean_interval(values)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


class Counted:
    """A network that counts the sequences that go through it."""

    def __init__(self, model) -> None:
        self.model, self.calls = model, 0

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def encode(self, tokens, attention_mask):
        self.calls += len(tokens)
        return self.model.encode(tokens, attention_mask)


def judged(model, tok, settings: config.Train, decoding: sampler.Sampler, seed: int) -> dict[str, float]:
    """Solved (percent), calls that a response needs, calls that the batch makes, a response; as a run is judged."""
    task, n, counted = settings.task, settings.evaluate.n, Counted(model)
    problems = held_out(task, n)
    prompt, mask = texts.encode_prompts(tok, problems, task.prompt_length, model.device, task.prompt_format)
    noise = keyed_generator(seed, 0, "evaluate")
    rollout = sampler.generate(counted, prompt, mask, decoding, eos_token_id=tok.eos_token_id, generator=noise, micro_batch=128)
    solved = sum(verdict.solved for verdict in verdicts(task, problems, texts.decode(tok, rollout.response)))
    return {"solved (%)": 100 * solved / n, "calls": sampler.network_calls(rollout) / n, "batch": counted.calls / n}


def decoding_table(settings: config.Train, temperature: float, seeds: int) -> str:
    """Markdown: one row a sampler; the first is what the others are compared with."""
    model, tok = checkpoints.load(settings.model)
    s, rows, first = settings.sampler, [], None
    seeds = seeds if temperature else 1
    for tokens, tau in [(n, None) for n in FIXED if s.block_length % n == 0] + [(1, tau) for tau in reversed(TAUS)]:
        words = {"tokens_per_step": tokens, "threshold": tau, "temperature": temperature, "order": "low_confidence"}
        decoding = dataclasses.replace(s, **words)
        found = [judged(model, tok, settings, decoding, seed) for seed in range(seeds)]
        rate = [one["solved (%)"] for one in found]
        first = first or rate
        difference = [a - b for a, b in zip(rate, first, strict=True)]
        print(f"{_name(tokens, tau)}: {', '.join(f'{value:.1f}' for value in rate)}", file=sys.stderr, flush=True)
        rows.append({
            "sampler": _name(tokens, tau),
            "calls": _shown([one["calls"] for one in found], 2),
            "batch": f"{sum(one['batch'] for one in found) / seeds:.2f}",
            "solved (%)": _shown(rate, 1),
            "minus the first": "" if rate is first else _shown(difference, 1),
        })  # fmt: skip
    return markdown(pd.DataFrame(rows))


def _shown(values: list[float], digits: int) -> str:
    return _interval(values, digits) if len(values) > 1 else f"{values[0]:.{digits}f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Threshold decoding against fixed steps.")
    parser.add_argument("config")
    parser.add_argument("--model", default="", help="default: that of the config")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--n", type=int, default=512, help="held-out puzzles")
    args = parser.parse_args()
    given = {"evaluate.n": args.n} | ({"model": args.model} if args.model else {})
    print(decoding_table(config.load(config.Train, args.config, given), args.temperature, args.seeds))
