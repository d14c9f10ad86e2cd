"""Staircase scoring against one forward a block: `python research/benchmarks/staircase.py [--threads 1]`.

Shapes of the shipped network: 64 responses of 32 tokens after prompts of 9, 8 blocks of 4. "forward" is the body of the network
and the vocabulary head on the response, without a graph; "update" is the same with one backward of the hidden tokens' mean
log-probability. The per-block path keeps no cache: every block recomputes its prompt and past, as each update has to.
"""

from __future__ import annotations

import argparse
import functools

import torch
from speed import seconds

from minidrl import algorithms as alg
from minidrl import denoiser
from minidrl.run import checkpoints

N, PROMPT, LENGTH, BLOCK = 64, 9, 32, 4


def per_block(model: denoiser.Denoiser, prompt, real, clean, noisy, stream: str) -> torch.Tensor:
    """K forwards of [prompt, clean blocks before, noisy block]; the mask is cut out of the staircase's."""
    rows, mask = [], alg.staircase_mask(real[:1], LENGTH, BLOCK, clean=stream)
    for start in range(0, LENGTH, BLOCK):
        keep = torch.cat([torch.arange(PROMPT + start), PROMPT + LENGTH + start + torch.arange(BLOCK)])
        tokens = torch.cat([prompt, clean[:, :start], noisy[:, start : start + BLOCK]], 1)
        visible = mask[:, :, keep][:, :, :, keep]
        h = model.model.model(input_ids=tokens, attention_mask=visible.expand(N, -1, -1, -1), use_cache=False)
        rows.append(h.last_hidden_state[:, -BLOCK:])
    return torch.cat(rows, 1)


def main(threads: int, path: str) -> None:
    torch.set_num_threads(threads)
    model, _ = checkpoints.load(path)
    noise = torch.Generator().manual_seed(0)
    prompt, clean = (torch.randint(3, model.vocab_size, (N, width), generator=noise) for width in (PROMPT, LENGTH))
    hidden, real = torch.rand(clean.shape, generator=noise) < 0.5, torch.ones_like(prompt, dtype=torch.bool)
    data = (prompt, real, clean, clean.masked_fill(hidden, model.mask_token_id))

    def score(encode):
        return model.head(encode()).log_softmax(-1).gather(-1, clean[..., None])[..., 0][hidden].mean()

    for stream in ("block", "causal"):
        one = functools.partial(model.encode_staircase, *data, block_length=BLOCK, clean_stream=stream)
        many = functools.partial(per_block, model, *data, stream)
        with torch.no_grad():
            gap, forward = (one() - many()).abs().max(), [seconds(lambda e=e: score(e)) for e in (many, one)]
        update = [seconds(lambda e=e: score(e).backward()) for e in (many, one)]
        for name, (slow, fast) in {"forward": forward, "update": update}.items():
            print(f"{stream:7}{name:8} {slow * 1e3:7.0f} ms -> {fast * 1e3:6.0f} ms, {slow / fast:.2f} times; gap {gap:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Staircase scoring against one forward a block.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="tiny_configs/bases/countdown_base")
    args = parser.parse_args()
    main(args.threads, args.model)
