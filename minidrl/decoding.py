"""What a first reading of sampler.py can do without: a cache of keys and values, and a record.

cache "exact", for block-causal attention. No token sees a later block, so finished blocks never
    change: their keys and values are kept, and a step computes its own block alone. The same
    states, the same noise and the same distributions; only what a step costs is another matter.
record "seen_logp". log p of every token of the response in every state of the run, for the control
    variate (2.12).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

if TYPE_CHECKING:
    from minidrl.sampler import Trace

CHUNK = 2**26  # the most logits that a record makes at a time, 256 MiB in float32


# -------------------------------------------------------------------------------------------- cache
def prompt_cache(
    model: Any,
    prompt: Int[Tensor, "G P"],
    prompt_mask: Bool[Tensor, "G P"],
    owner: Int[Tensor, " R"],
) -> DynamicCache:
    """Keys and values of the prompts of R rows, each computed once; ``owner``: which is whose."""
    cache = DynamicCache()
    if prompt.shape[1]:
        own, place = owner.unique(return_inverse=True)
        model.extend(prompt[own], prompt_mask[own], cache)
        cache.batch_select_indices(place)
    return cache


def keep_rows(cache: DynamicCache, rows: Int[Tensor, " R"], left: Int[Tensor, " S"]) -> None:
    """The cache of ``rows``, which ascend, becomes that of those ``left``."""
    cache.batch_select_indices(torch.searchsorted(rows, left))


def block_states(
    model: Any,
    tokens: Int[Tensor, "R E"],
    attention_mask: Bool[Tensor, "R E"],
    width: int,
    cache: DynamicCache,
) -> Float[Tensor, "R W D"]:
    """Hidden states of a text's last W positions, the current block of a block-causal model.

    The exact, block-level KV cache of block diffusion. ``cache`` holds a past of the rows that does
    not change any more: the prompt, and the finished blocks but the last. That one is computed, and
    stays, with the first step of the block after it. The current block is taken out again, since it
    goes on changing.
    """
    if tokens.shape[1] == width:  # an empty prompt, and so no past yet
        return model.encode(tokens, attention_mask)
    h = model.extend(tokens[:, cache.get_seq_length() :], attention_mask, cache)[:, -width:]
    cache.crop(-width)
    return h


# -------------------------------------------------------------------- log p in every state of a run
def add_seen(trace: Trace, vocab_size: int) -> None:
    """Room for log p of every token at every position in every state: until the response is known,
    all are kept."""
    rows, length = trace.unmask_step.shape
    shape = (rows, trace.settings.num_steps, length, vocab_size)
    if (numbers := math.prod(shape)) > CHUNK:
        got = f"'seen_logp' of {rows} responses, {numbers:,} numbers"
        raise ValueError(f"records: got {got}; allowed up to {CHUNK:,} of them")
    trace.records["seen_logp"] = trace.logp.new_zeros(shape)


def record_seen(
    model: Any, trace: Trace, step: int, rows: Int[Tensor, " R"], rest: Float[Tensor, "R M D"]
) -> None:
    """log p of every token in the state before a step; ``rest``: from the block to the end."""
    seen = trace.records["seen_logp"]
    seen[rows, step, -rest.shape[1] :] = model.head(rest).log_softmax(-1).to(seen)


def seen_of(
    seen: Float[Tensor, "B T L V"], response: Int[Tensor, "B L"], unmask_step: Int[Tensor, "B L"]
) -> Float[Tensor, "B T L"]:
    """Of the tokens of the response, in the states in which they were hidden; 0 elsewhere."""
    token = response[:, None, :, None].expand(*seen.shape[:3], 1)
    step = torch.arange(seen.shape[1], device=seen.device)[:, None]
    return seen.gather(-1, token)[..., 0].masked_fill(unmask_step[:, None] < step, 0.0)
