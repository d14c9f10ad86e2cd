"""Decoding at less cost: a cache of keys and values, and steps that reveal all that is sure.

sampler.py calls these functions where ``Sampler.cache``, ``Sampler.threshold`` or a record asks.

cache "exact", for block-causal attention. No token sees a later block, so finished blocks never
    change: their keys and values are kept, and a step computes its own block alone. The same
    states, the same noise and the same distributions; only what a step costs is another matter.
record "seen_logp". log p of every token of the response in every state of the run, for credit that
    is given step by step.
threshold tau (Fast-dLLM's confidence-aware parallel decoding, arXiv 2505.22618). A step reveals
    every hidden position of the block whose drawn token has confidence tau or more, and at least
    the one of highest confidence. How many steps a block takes differs by row: tau = 1 is nearly
    one token a step, tau = 0 the whole block at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from minidrl.algorithms import log_threshold

if TYPE_CHECKING:
    from minidrl.sampler import Trace

CHUNK = 2**26  # the most logits that a record makes at a time, 512 MiB in float64


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
        take_out(cache, int(model.shift))  # whose last state predicts the response's first token
        cache.batch_select_indices(place)
    return cache


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
    goes on changing; and with it the token before, where its state predicts the block's first.
    """
    if tokens.shape[1] == width:  # an empty prompt, and so no past yet
        return model.encode(tokens, attention_mask)
    h = model.extend(tokens[:, cache.get_seq_length() :], attention_mask, cache)[:, -width:]
    take_out(cache, width + model.shift)
    return h


def take_out(cache: DynamicCache, tokens: int) -> None:
    """The last tokens leave the cache; one that is empty then takes rows of any number."""
    if tokens:
        cache.crop(-tokens)
    if cache.get_seq_length() == 0:
        cache.layers.clear()


# ---------------------------------------------------------------------------------------- threshold
def confident(
    conf: Float[Tensor, "R C"],
    first: Int[Tensor, "R 1"],
    hidden: Bool[Tensor, "R C"],
    threshold: float,
) -> Bool[Tensor, "R C"]:
    """The hidden candidates of tau or more, at least the ``first``; none where nothing is hidden.

    Fast-dLLM's code drops those below tau: one that is equal stays.
    """
    return (conf >= log_threshold(threshold)).scatter(1, first, True) & hidden


def still_going(
    trace: Trace, rows: Int[Tensor, " R"], block: int, agree: Callable[[Tensor, Tensor], Tensor]
) -> Int[Tensor, " S"]:
    """The rows that go on with the block: those in which something of it is hidden, and those that
    ``agree`` adds.

    With a cache none leave before all are full: the next block needs the keys and values of every
    row.
    """
    step = trace.unmask_step[rows].unflatten(1, (trace.settings.num_blocks, -1))[:, block]
    left = agree(rows, rows[(step < 0).any(1)])
    return rows if len(left) and trace.settings.cache == "exact" else left


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


def seen_of(
    seen: Float[Tensor, "B T L V"], response: Int[Tensor, "B L"], unmask_step: Int[Tensor, "B L"]
) -> Float[Tensor, "B T L"]:
    """Of the tokens of the response, in the states in which they were hidden; 0 elsewhere."""
    token = response[:, None, :, None].expand(*seen.shape[:3], 1)
    step = torch.arange(seen.shape[1], device=seen.device)[:, None]
    return seen.gather(-1, token)[..., 0].masked_fill(unmask_step[:, None] < step, 0.0)
