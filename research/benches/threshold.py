"""Threshold decoding against fixed steps: calls and solved rate, and what the tokens' score leaves out.

    python -m research.benches.threshold selection
    python -m research.benches.threshold decoding CONFIG [--model DIR] [--temperature 1] [--seeds 5] [--n 512]

`selection`: ten enumerable models (random tables, 4 positions, 2 tokens, one block, temperature 1; reward 1 for half of the
texts, centred by its mean). A step of the low-confidence sampler draws a token for every hidden position, and the tokens decide
which of them are revealed. Its log-probability is that of the revealed tokens plus that of the selection: (4.2) for a fixed
number of tokens a step, (4.5) for a threshold. For each sampler:

    calls           expected network calls of a response
    selection       E[-sum of log selection factors], nats a response
    share of it     that over E[-log P(trajectory)]
    total           sum of exp(tokens' log-probability) over all trajectories; 1 for a distribution
    cosine, error   of E[centred reward x grad log p(tokens)] and the policy gradient: cosine, and relative error
    exact           the largest relative error with the selection factor, of all tables

`decoding`: one base on the task of CONFIG, with its length and block length. Each seed is other noise on the same held-out
puzzles; at temperature 0 there is no noise, and one seed is all. `calls` are those that a response needs; `batch`, what the
batch computes, rows that wait included. Student intervals over seeds; differences are taken pair by pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys

import pandas as pd
import torch

from minidrl import algorithms as alg
from minidrl import features, oracle, sampler
from minidrl.keyed import keyed_generator
from minidrl.run import checkpoints, config
from minidrl.tasks import held_out, verdicts
from minidrl.tasks import text as texts
from research import stats
from research.tables import markdown

TABLES, LENGTH, VOCAB = 10, 4, 2
TAUS = (0.5, 0.7, 0.9, 0.95)
FIXED = (1, 2, 4, 7)


# ------------------------------------------------------------------------------------------- what the tokens' score leaves out
def of_length(
    tokens: int, tau: float | None, length: int, temperature: float = 1.0, block: int | None = None
) -> sampler.Sampler:
    words = {"temperature": temperature, "length": length, "block_length": block or length, "tokens_per_step": tokens}
    return sampler.Sampler(order="low_confidence", threshold=tau, **words)


@functools.cache
def world(seed: int) -> tuple[oracle.TabularDenoiser, dict]:
    """A table whose confidences reach from 0 to nearly 1, and a reward."""
    generator = torch.Generator().manual_seed(seed)
    model = oracle.TabularDenoiser.random(LENGTH, VOCAB, generator, scale=2.0)
    texts = list(itertools.product(range(VOCAB), repeat=LENGTH))
    solved = torch.randperm(len(texts), generator=generator) < len(texts) // 2
    return model, dict(zip(texts, solved.double().tolist(), strict=True))


def selection(seed: int, tokens: int, tau: float | None) -> dict[str, float]:
    """One table, one sampler: the numbers that the head of this file explains."""
    model, reward = world(seed)
    paths = oracle.trajectories(model, "low_confidence", 1.0, tokens, None, None, tau)
    truth = oracle.table_gradient(model, oracle.expected_reward(paths, reward.__getitem__))
    steps = torch.tensor([path.unmask_step for path in paths])
    settings = of_length(tokens, tau, LENGTH)
    rollout = alg.Rollout.of([path.response for path in paths], unmask_step=steps, sampler=settings)
    rollout = dataclasses.replace(rollout, logp=rollout.logp.double())
    plan = alg.replay_plan(rollout, torch.Generator(), num_states=None, min_entropy=0.0)
    every = torch.cat(list(features.state_chunks(plan, 1 << 20)))
    found = features.state_features(model, rollout, plan, every, temperature=1.0, names=("logp", "order_logp"))
    row = every % len(paths)
    total = {k: torch.zeros(len(paths)).double().index_add(0, row, v.double().sum(-1)) for k, v in found.items()}
    chance = torch.stack([path.prob.detach() for path in paths])
    value = torch.tensor([reward[path.response] for path in paths]).double()
    weight = chance * (value - (chance * value).sum())

    def gap(ll: torch.Tensor) -> tuple[float, float]:
        got = oracle.table_gradient(model, (weight * ll).sum())
        return float((got * truth).sum() / got.norm() / truth.norm()), float((got - truth).norm() / truth.norm())

    left_out, whole = ((chance * -ll.detach()).sum() for ll in (total["order_logp"], sum(total.values())))
    cosine, error = gap(total["logp"])
    return {
        "calls": float((chance * (steps.amax(1) + 1)).sum()),
        "selection": float(left_out),
        "share of it": float(left_out / whole),
        "total": float(total["logp"].detach().exp().sum()),
        "cosine": cosine,
        "error": error,
        "exact": gap(sum(total.values()))[1],
    }


def selection_table() -> str:
    """Markdown: mean and 95 % interval over the tables, sampler by sampler."""
    rows = []
    for tokens, tau in [(n, None) for n in FIXED if LENGTH % n == 0] + [(1, tau) for tau in TAUS]:
        found = [selection(seed, tokens, tau) for seed in range(TABLES)]
        cells = {key: _interval([one[key] for one in found]) for key in found[0] if key != "exact"}
        exact = f"{max(one['exact'] for one in found):.0e}"
        rows.append({"sampler": _name(tokens, tau)} | cells | {"exact": exact})
    return markdown(pd.DataFrame(rows))


def _name(tokens: int, tau: float | None) -> str:
    return f"{tokens} a step" if tau is None else f"threshold {tau:g}"


def _interval(values: list[float], digits: int = 2) -> str:
    mean, low, high = stats.mean_interval(values)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


# ---------------------------------------------------------------------------------------------------- calls and solved rate
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
        decoding = of_length(tokens, tau, s.length, temperature, s.block_length)
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
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("selection", help="what the tokens' score leaves out, on enumerable models")
    one = verbs.add_parser("decoding", help="calls and solved rate of a base")
    one.add_argument("config")
    one.add_argument("--model", default="", help="default: that of the config")
    one.add_argument("--temperature", type=float, default=1.0)
    one.add_argument("--seeds", type=int, default=5)
    one.add_argument("--n", type=int, default=512, help="held-out puzzles")
    args = parser.parse_args()
    if args.verb == "selection":
        print(selection_table())
    else:
        given = {"evaluate.n": args.n} | ({"model": args.model} if args.model else {})
        print(decoding_table(config.load(config.Train, args.config, given), args.temperature, args.seeds))
