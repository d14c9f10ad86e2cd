"""Block-causal generation with and without its cache:

    python -m research.benches.block_generation [--threads 1] [--device cpu]

A network of the shipped size with fresh weights (no cost depends on them): prompts of 9 tokens, responses of 32 in 8 blocks of
4, one token a step, 8 responses a prompt, no early stop. "none" computes the prompt and the blocks up to the current one,
"exact" the current block; these two give the same tokens. Seconds are those of the processor, all threads together, or on a GPU
those of the clock. --rows and --repeats make it smaller.
"""

from __future__ import annotations

import argparse
import statistics
import time

import pandas as pd
import torch

from minidrl import denoiser, sampler
from minidrl.tasks.countdown import tokenizer
from research.tables import markdown

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


def row(rows: int, order: str, repeats: int, device: str) -> dict:
    """Seconds of one batch each way, medians; the ways take turns, because the speed of a shared machine drifts."""
    network = denoiser.build(SIZES, tokenizer(), 0, BLOCK).eval().to(device)
    words = {"order": order, "temperature": 1.0, "length": LENGTH, "block_length": BLOCK, "tokens_per_step": 1}
    prompt = torch.randint(3, network.vocab_size, (rows // GENERATIONS, PROMPT), generator=torch.Generator().manual_seed(0))
    prompt = prompt.to(device)
    mask = torch.ones_like(prompt, dtype=torch.bool)

    def generate(cache: str) -> torch.Tensor:
        settings, noise = sampler.Sampler(**words, attention="block_causal", cache=cache), torch.Generator().manual_seed(1)
        how = {"eos_token_id": None, "num_generations": GENERATIONS, "generator": noise}
        return sampler.generate(network, prompt, mask, settings, **how).response

    assert torch.equal(generate("none"), generate("exact"))  # a warm-up, too
    times = [[seconds(lambda cache=cache: generate(cache), device) for cache in ("none", "exact")] for _ in range(repeats)]
    none, exact = map(statistics.median, zip(*times, strict=True))
    return {"rows": rows, "order": order, "none": none, "exact": exact}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256], help="responses of a batch")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches = [(count, order) for count in args.rows for order in ("left_to_right", "low_confidence")]
    print(markdown(pd.DataFrame([row(*batch, args.repeats, args.device) for batch in batches])))


if __name__ == "__main__":
    main()
