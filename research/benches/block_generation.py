"""Generation in blocks with and without a cache: `python -m research.benches.block_generation [--threads 1] [--device cpu]`.

A network of the shipped size with fresh weights (no cost depends on them): prompts of 9 tokens, responses of 32 in 8 blocks of
4, one token a step, 8 responses a prompt, no early stop. Seconds are those of the processor, all threads together, or on a GPU
those of the clock.

Bidirectional attention: "none" computes all 41 tokens at every step; "prefix" and "dual" do so at the first of a block's four
steps, and then the block and what follows it, or the block. Block-causal attention: "none" computes the prompt and the blocks
up to the current one, "exact" the current block; these two give the same tokens.

The last table is what the approximations change on the shipped base (length 12, blocks of 4, one token a step, temperature 1;
32 puzzles, 32 responses each): KL(policy of the sampler || policy of the network) of a kept token, nats, with the standard
error over tokens; and the share of responses that solve their puzzle.

It takes minutes: a bar counts the calls, and each row of the first table goes to stderr as soon as it is there. --rows,
--repeats and --puzzles make it smaller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from minidrl import algorithms as alg
from minidrl import denoiser, sampler
from minidrl import features as feat
from minidrl.run import checkpoints, config
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import tokenizer
from research.tables import markdown

ROOT = Path(__file__).parents[2]

SIZES = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
PROMPT, LENGTH, BLOCK, GENERATIONS = 9, 32, 4, 8


def seconds(call, device: str) -> float:
    """Processor time of a call, in which what else runs on a shared machine is not; on a GPU time until it is done."""
    gpu = torch.device(device).type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    started = clock()
    call()
    if gpu:
        torch.cuda.synchronize()
    return clock() - started


def row(rows: int, order: str, repeats: int, device: str, bar: tqdm) -> dict:
    """Seconds of one batch each way, medians; the ways take turns, because the speed of a shared machine drifts."""
    network = denoiser.build(SIZES, tokenizer(), 0, BLOCK).eval().to(device)
    words = {"order": order, "temperature": 1.0, "length": LENGTH, "block_length": BLOCK, "tokens_per_step": 1}
    prompt = torch.randint(3, network.vocab_size, (rows // GENERATIONS, PROMPT), generator=torch.Generator().manual_seed(0))
    prompt = prompt.to(device)
    mask = torch.ones_like(prompt, dtype=torch.bool)

    def loop(model: denoiser.Denoiser, **attention):
        settings, noise = sampler.Sampler(**words, **attention), torch.Generator().manual_seed(1)
        return sampler.generate(model, prompt, mask, settings, eos_token_id=None, num_generations=GENERATIONS, generator=noise)

    ways = {
        **{f"bidirectional, {c}": partial(loop, denoiser.Denoiser(network.model), cache=c) for c in ("none", "prefix", "dual")},
        **{f"block-causal, {c}": partial(loop, network, attention="block_causal", cache=c) for c in ("none", "exact")},
    }

    def timed(way) -> float:
        bar.update()
        return seconds(way, device)

    times, made = [], []
    for way in ways.values():  # a warm-up
        made.append(way())
        bar.update()
    assert torch.equal(made[-2].response, made[-1].response)
    times = [[timed(way) for way in ways.values()] for _ in range(repeats)]
    return {"rows": rows, "order": order} | dict(zip(ways, map(statistics.median, zip(*times, strict=True)), strict=True))


@torch.no_grad()
def kl_row(order: str, cache: str, count: int, device: str) -> dict:
    """The KL of all steps of the responses to ``count`` puzzles, as bookkeeping.rollout_kl estimates it from two each."""
    s = config.load(config.Train, ROOT / "tiny_configs/countdown_cpu.yaml")
    model, tok = checkpoints.load(s.model, device)
    settings = sampler.Sampler(order=order, temperature=1.0, length=12, block_length=4, tokens_per_step=1, cache=cache)
    puzzles = s.task.problems(count, np.random.default_rng(0))
    prompt = texts.encode_prompts(tok, puzzles, s.task.prompt_length, device)
    words = {"eos_token_id": tok.eos_token_id, "num_generations": 32, "generator": torch.Generator().manual_seed(1)}
    rollout = sampler.generate(model.eval(), *prompt, settings, **words)
    plan = alg.replay_plan(rollout, torch.Generator(), num_states=None, min_entropy=0.0)
    exact = feat.features(model, rollout, plan, temperature=1.0)["logp"].sum(0)
    kl = alg.kl_term(rollout.logp, exact, form="k3")[rollout.keep].double()
    replies = texts.decode(tok, rollout.response)
    solved = np.mean([s.task.score(puzzles[i // 32], text) == 1 for i, text in enumerate(replies)])
    error = float(kl.std() / len(kl) ** 0.5)
    return {"order": order, "cache": cache, "KL, nats a token": float(kl.mean()), "+-": error, "solved": float(solved)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256], help="responses of a batch")
    parser.add_argument("--puzzles", type=int, default=32, help="of the last table, with 32 responses each")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report(arguments)


def report(arguments: Any) -> None:
    """Print each row when it is measured, then the tables."""
    how, device = arguments.repeats, arguments.device
    batches = [(count, order) for count in arguments.rows for order in ("left_to_right", "low_confidence")]
    policies = [(order, cache) for order in sampler.ORDERS for cache in sampler.CACHES["bidirectional"]]
    with tqdm(total=5 * (how + 1) * len(batches) + len(policies), unit="call") as bar:
        rows = []
        for batch in batches:
            rows.append(row(*batch, how, device, bar))
            bar.write(str(rows[-1]), file=sys.stderr)
        print(markdown(pd.DataFrame(rows)), "\n", flush=True)
        rows = []
        for policy in policies:
            rows.append(kl_row(*policy, arguments.puzzles, device))
            bar.update()
    print(markdown(pd.DataFrame(rows)))


if __name__ == "__main__":
    main()
