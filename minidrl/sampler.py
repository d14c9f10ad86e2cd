"""Generation: from prompts to Rollouts that hold the whole trajectory.

A masked diffusion language model writes a response of L tokens by starting from L [MASK] tokens and
revealing a few of them per network call. The response is cut into blocks of ``block_length``
positions, finished from left to right; inside the current block each step reveals
``tokens_per_step`` tokens, and ``order`` says which ones; with a ``threshold``, all tokens that are
confident enough. Nothing revealed is ever masked again, so the step at which each token appeared
(``Rollout.unmask_step``) gives back every state of the run: ``states`` below does it.

How a token is drawn. One uniform number u in float64 per position, then the inverse of the
distribution function: the token is the first v with P(0) + ... + P(v) > u, summed in float64. Rare
tokens therefore keep their probability whatever the dtype of the network (noise drawn in bfloat16
stops at 255/256, which removes the tail of the vocabulary). All the uniforms of a call are drawn
before its first step, for the whole batch: what a row becomes, and the state in which the generator
is left, depend neither on the micro-batch, nor on early stopping, nor on when the other rows end.

Block-causal attention. No token sees a later block, so a step needs the prompt and the blocks up to
its own, and of these the finished ones never change: with cache "exact" their keys and values are
kept, and a step computes its own block alone. The same states, the same noise and the same
distributions; only what a step costs is another matter.

Bidirectional attention. Every token revealed changes the keys and values of all others, so what is
kept is out of date from the second step of a block on. The caches "prefix" and "dual" accept that,
and the tokens are drawn from other distributions than the network's own: ``logp`` says from which,
and to a trainer such rollouts are off-policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from minidrl.algorithms import Rollout, log_threshold
from minidrl.features import Network

ATTENTIONS = ("bidirectional", "block_causal")
COLDEST, HOTTEST = 1e-6, 1e6  # beyond them logits or their noise leave float32
TEMPERATURES = f"0 (greedy), and numbers from {COLDEST:g} to {HOTTEST:,.0f}"
ORDERS = ("random", "low_confidence", "left_to_right", "right_to_left")
RECORDS = ("entropy", "one_step", "one_step_sampled", "one_step_proposed", "topk", "seen_logp")
COMPLETIONS = ("one_step", "one_step_sampled", "one_step_proposed")
OF_REST = (*COMPLETIONS, "seen_logp")  # records that look at every hidden position
APPROXIMATE = ("prefix", "dual")
CACHES = {"bidirectional": ("none", *APPROXIMATE), "block_causal": ("none", "exact")}
CHUNK = 2**26  # the most logits that a record makes at a time, 256 MiB in float32
TOP_K = 20  # what inference servers return at most: no method should need more
LOOK_EVERY = 4  # steps between two looks at which rows of a block are done, with a threshold


# ----------------------------------------------------------------------------------------- settings
@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The settings of a decoding run; a Rollout carries the ones that produced it.

    length           L, response positions.
    block_length     positions of a block; divides ``length``. ``block_length=length``: no blocks.
    tokens_per_step  tokens revealed per network call, n (parallel decoding); divides
                     ``block_length``.
    temperature      T of softmax(z / T); 0 is greedy decoding (argmax, lowest token id on ties).
    order            the unmasking order, which n hidden positions of the block a step reveals:
        "random"          the next n of a uniformly random permutation of the block;
        "low_confidence"  LLaDA's rule, called ``remasking="low_confidence"`` in the field, where it
                          is said the other way round: propose a token at every hidden position of
                          the block, leave the positions of lowest confidence masked, reveal the n
                          of highest confidence. Confidence is the probability of the proposal at
                          temperature 1 whatever ``temperature`` is, compared as float32 logarithms;
                          on ties the lower position goes first;
        "left_to_right"   the n lowest hidden positions;
        "right_to_left"   the n highest: working backwards from where the response ends.
    threshold        tau, from 0 to 1; None: none. Threshold decoding (Fast-dLLM, arXiv 2505.22618):
                     a step reveals every hidden position of the block whose confidence is tau or
                     more, and at least the one of highest confidence. Confidence as in
                     "low_confidence", the only order that has one: that of the token drawn. How
                     many tokens a step reveals is not known beforehand: ``tokens_per_step`` is 1,
                     the fewest. tau = 1 is nearly n = 1 (a token of float32 probability 1 is
                     revealed beside others), tau = 0 is n = ``block_length``.

    attention        what the network must be: "bidirectional" (every token sees every other), or
                     "block_causal" (no token sees a later block; trained that way, with this
                     block_length).
    cache            keys and values that are kept, so that a step computes fewer positions:
        "none"            none;
        "exact"           with block_causal attention, those of the prompt and of finished blocks: a
                          step computes its own block alone. The same result up to rounding;
        "prefix"          with bidirectional attention: a block's first step computes all positions,
                          its other steps the block and what follows it, and take the keys and
                          values before the block as they were at the first;
        "dual"            the same, and those after the block too: these compute the block alone.

    "prefix" and "dual" (Fast-dLLM, arXiv 2505.22618) are approximations. They make rollouts
    off-policy: the tokens, and the ``logp`` recorded for them, are those of another policy than the
    network's, and a trainer has to treat them so (an evaluation judges that policy, too). With one
    step a block they equal "none". Block k = 0, 1, ... of W positions computes all P + L once, and
    at each further step L - k W ("prefix") or W ("dual"); of a model whose predictions are shifted
    by one position (Dream), the position before these as well, which predicts the first of them.

    Errors: ValueError naming the key, the value and what is allowed.
    """

    order: str
    temperature: float
    length: int
    block_length: int
    tokens_per_step: int
    attention: str = "bidirectional"
    cache: str = "none"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: got {self.order!r}; allowed {', '.join(ORDERS)}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention: got {self.attention!r}; allowed {', '.join(ATTENTIONS)}")
        if self.cache not in CACHES[self.attention]:
            got = f"{self.cache!r} with attention {self.attention}"
            raise ValueError(f"cache: got {got}; allowed {', '.join(CACHES[self.attention])}")
        if not is_temperature(self.temperature):
            raise ValueError(f"temperature: got {self.temperature!r}; allowed {TEMPERATURES}")
        for key in ("length", "block_length", "tokens_per_step"):
            _check_count(key, getattr(self, key))
        for key, whole in (("block_length", "length"), ("tokens_per_step", "block_length")):
            if getattr(self, whole) % getattr(self, key):
                allowed = f"a divisor of {whole} = {getattr(self, whole)}"
                raise ValueError(f"{key}: got {getattr(self, key)}; allowed {allowed}")
        if self.threshold is not None:
            self._check_threshold()

    def _check_threshold(self) -> None:
        tau = self.threshold
        if not _is_real(tau) or not 0 <= tau <= 1:
            raise ValueError(f"threshold: got {tau!r}; allowed None or a number from 0 to 1")
        if self.order != "low_confidence":
            allowed = "low_confidence, the order that has a confidence"
            raise ValueError(f"order: got {self.order!r} with threshold {tau}; allowed {allowed}")
        if self.tokens_per_step != 1:
            got, allowed = self.tokens_per_step, "1, the fewest tokens that a step reveals"
            raise ValueError(f"tokens_per_step: got {got} with threshold {tau}; allowed {allowed}")

    @property
    def num_blocks(self) -> int:
        """Blocks of a response."""
        return self.length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Network calls that finish one block; with a threshold, at most so many."""
        return self.block_length // self.tokens_per_step

    @property
    def num_steps(self) -> int:
        """T: network calls that finish a response which never ends early; with a threshold, at most
        so many."""
        return self.num_blocks * self.steps_per_block


def is_temperature(value: Any) -> bool:
    """True for one of ``TEMPERATURES``."""
    return _is_real(value) and (value == 0 or COLDEST <= value <= HOTTEST)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_count(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}: got {value!r}; allowed an integer >= 1")


# --------------------------------------------------------------------------------------- generation
@torch.no_grad()
def generate(
    model: Network,
    prompt: Int[Tensor, "G P"],
    prompt_mask: Bool[Tensor, "G P"],
    settings: Sampler,
    *,
    eos_token_id: int | None,
    num_generations: int = 1,
    generator: torch.Generator | None,
    records: Sequence[str] = (),
    early_stop: bool = True,
    micro_batch: int | None = None,
    rows: Int[Tensor, " R"] | None = None,
    agree: Callable[[Tensor, Tensor], Tensor] = lambda rows, left: left,
) -> Rollout:
    """Draw ``num_generations`` responses per prompt; B = G * num_generations rows, prompt-major.

    Source: the semi-autoregressive decoding of LLaDA (block by block, ``remasking`` random or
    low_confidence).

    model         in eval mode. It always sees the full length P + L; ``head`` is applied only where
                  a token may be revealed. A block-causal model says so by its block_length, and
                  sees no more than the blocks up to the current one. A cache needs a ``Denoiser``.
    prompt        left-padded; ``prompt_mask`` is True at real tokens.
    eos_token_id  the blocks after the one that holds a row's first EOS are not revealed: there
                  ``response`` is EOS, ``unmask_step`` -1, ``logp`` and entropy 0, ``keep`` False.
                  None: nothing ends a response.
    generator     source of all randomness, on any device; unused (None is accepted) when nothing is
                  random, which is temperature 0 with an order other than "random".
    records       what else to keep, below.
    early_stop    finished rows leave the batch, asked once per block. With a threshold, rows whose
                  block is full leave it until the next block, asked every LOOK_EVERY steps: a host
                  that asked at each would wait for each. Changes the cost, never the result.
    micro_batch   rows per network call; None is all. Changes the memory, never the noise. With a
                  cache, one micro-batch is finished before the next begins: only one cache exists
                  at a time.
    rows          the rows to generate, ascending; None: all. The others stay blank. Noise is drawn
                  for all: a row does not depend on which others are generated here, and which by
                  another process.
    agree         (rows of a call, those without an end) -> the rows that go on: processes that must
                  work in step add rows that have ended, so that all have as many. What becomes of
                  these is wiped.

    Records:

    entropy       (B, L), nats: entropy of the distribution from which the token was drawn, at the
                  sampling temperature and at the step that revealed it.
    one_step      (B, T, L): per step the completion by argmax of every hidden token at once, the
                  revealed ones kept; after a row's end its response.
    one_step_sampled  the same with every hidden token drawn from softmax(z / T), by noise that has
                  nothing to do with the trajectory's.
    one_step_proposed  drawn likewise, and what the step reveals is part of it: where the sampler
                  itself drew a token in this step, it is that token, chosen or not.
                  These three apply ``head`` to the hidden blocks, the current one and those after
                  it, at every step: (L + W) / 2 positions on average, where a step without them
                  needs n or W. Of their logits at most CHUNK exist at a time (rows x V, if that is
                  more), and none are kept. They need the rest of the response at every step: not
                  with block_causal attention or cache "dual".
    topk          the keys topk_ids and topk_logp (B, L, M), the min(20, V - 1) likeliest tokens of
                  the distribution from which the token was drawn, likeliest first; 0 where nothing
                  was revealed. Not at temperature 0.
    seen_logp     (B, T, L), nats: log p of the token that came to stand there, at temperature 1, in
                  the state before each step; 0 where it is visible, and after a row's end. Until
                  the response is known, B T L V numbers are kept: at most CHUNK. It looks at the
                  rest of the response as completions do, and what they cannot do with it cannot.

    ``unmask_step`` counts the network calls that a row needed, its own: with a threshold, rows of a
    batch stand at different steps, and one whose block is full waits without counting.

    Returns a Rollout whose ``logp`` is log softmax(z / T)[token] in nats, float32 (float64 for
    float64 logits). At temperature 0 the behaviour is a point mass: ``logp`` and entropy are 0.
    Errors: ValueError on arguments; FloatingPointError when the logits hold NaN or +inf.
    """
    asked = (eos_token_id, num_generations, generator, records, micro_batch)
    _check_request(model, prompt, prompt_mask, settings, *asked)
    check_positions(getattr(model, "model", None), prompt.shape[1], settings.length)
    prompts = prompt, prompt_mask
    prompt, prompt_mask = (x.repeat_interleave(num_generations, 0) for x in prompts)
    trace = blank_trace(prompt, prompt_mask, settings, model.mask_token_id, records)
    if "topk" in records:  # [MASK], of probability 0, is not among them
        add_topk(trace, min(TOP_K, model.vocab_size - 1))
    if "seen_logp" in records:
        add_seen(trace, settings, model.vocab_size)
    noise = draw_noise(settings, len(prompt), generator, prompt.device, records)
    rows = torch.arange(len(prompt), device=prompt.device) if rows is None else rows
    stop_at = eos_token_id if early_stop else None
    size, cache = micro_batch or max(len(rows), 1), None
    for part in [rows] if settings.cache == "none" else rows.split(size):
        if settings.cache == "exact":
            cache = prompt_cache(model, *prompts, part // num_generations)
        decode(model, settings, trace, noise, part, size, stop_at, agree, cache, early_stop)
    return finish(trace, prompt, prompt_mask, settings, eos_token_id, num_generations)


def decode(
    model: Network,
    settings: Sampler,
    trace: Trace,
    noise: Noise,
    rows: Int[Tensor, " R"],
    size: int,
    stop_at: int | None,
    agree: Callable[[Tensor, Tensor], Tensor],
    cache: DynamicCache | None = None,
    early_stop: bool = True,
) -> None:
    """All steps of ``rows``, ``size`` a call; after a block, those with token ``stop_at`` leave.

    ``cache``: that of the prompts of ``rows``, where it is exact. With a cache of any kind,
    ``rows`` are at most ``size``.
    """
    look = agree if early_stop and settings.threshold is not None else None
    for block in range(settings.num_blocks):
        if settings.cache in APPROXIMATE:
            cache = DynamicCache()  # a block begins with nothing kept
        decode_block(model, settings, trace, noise, block, rows, size, look, cache)
        if stop_at is not None:
            left = agree(rows, unfinished(trace, rows, block, settings, stop_at))
            if len(left) == 0:
                break
            if settings.cache == "exact":  # their places among ``rows``, which ascend
                cache.batch_select_indices(torch.searchsorted(rows, left))
            rows = left


def decode_block(
    model: Network,
    settings: Sampler,
    trace: Trace,
    noise: Noise,
    block: int,
    rows: Int[Tensor, " R"],
    size: int,
    look: Callable[[Tensor, Tensor], Tensor] | None,
    cache: DynamicCache | None,
) -> None:
    """The steps of a block. With ``look`` (``agree`` of ``generate``), rows in which nothing of it
    is hidden leave it, asked every LOOK_EVERY steps.

    Until then a step computes them in vain and reveals nothing there. Of an exact cache none leave
    before all are done: the next block needs the keys and values of every row.
    """
    count = settings.steps_per_block
    for within in range(count):
        for part in rows.split(size):
            reveal(model, settings, trace, noise, block * count + within, part, cache)
        if look is None or (within + 1) % LOOK_EVERY or within + 1 == count:
            continue
        left = look(rows, still_open(trace, rows, block, settings))
        if len(left) == 0:
            break
        if settings.cache == "exact":
            continue
        if cache is not None:
            cache.batch_select_indices(torch.searchsorted(rows, left))
        rows = left


def check_positions(network: Any, width: int, length: int) -> None:
    """ValueError where a network of transformers was made for fewer positions than prompt and
    response have: it would run, on positions that it has never met. Others have no such number."""
    most = getattr(getattr(network, "config", None), "max_position_embeddings", None)
    if most is not None and width + length > most:
        got = f"{length} after prompts of {width} tokens"
        allowed = f"up to {most - width}, as the model has {most} positions"
        if most <= width:
            allowed = f"a model of more than its {most} positions"
        raise ValueError(f"sampler.length: got {got}; allowed {allowed}")


def check_attention(model: Network, settings: Sampler) -> None:
    """ValueError unless ``settings`` describe the model's own attention: its blocks, or none.

    A network that was trained one way still runs the other way, and answers worse without a word.
    """
    own = getattr(model, "block_length", None)
    if own is None and settings.attention == "block_causal":
        got = "'block_causal' for a bidirectional model"
        raise ValueError(f"attention: got {got}; allowed bidirectional")
    if own is not None and settings.attention == "bidirectional":
        got = "'bidirectional' for a block-causal model"
        raise ValueError(f"attention: got {got}; allowed block_causal, block_length {own}")
    if own is not None and settings.block_length != own:
        allowed = f"{own}, that of the model's attention"
        raise ValueError(f"block_length: got {settings.block_length}; allowed {allowed}")


def _check_request(
    model: Network,
    prompt: Tensor,
    prompt_mask: Tensor,
    settings: Sampler,
    eos: int | None,
    num_generations: int,
    generator: torch.Generator | None,
    records: Sequence[str],
    micro_batch: int | None,
) -> None:
    if prompt.ndim != 2 or prompt.shape != prompt_mask.shape or prompt_mask.dtype != torch.bool:
        got = f"{tuple(prompt.shape)} and {prompt_mask.dtype} {tuple(prompt_mask.shape)}"
        raise ValueError(f"prompt, prompt_mask: got {got}; allowed (G, P) and bool (G, P)")
    check_attention(model, settings)
    _check_count("num_generations", num_generations)
    if micro_batch is not None:
        _check_count("micro_batch", micro_batch)
    check_records(records, settings)
    if eos is not None and (not 0 <= eos < model.vocab_size or eos == model.mask_token_id):
        other = f"below {model.vocab_size} other than [MASK] = {model.mask_token_id}"
        raise ValueError(f"eos_token_id: got {eos}; allowed None or a token id {other}")
    if generator is None and (settings.temperature > 0 or settings.order == "random"):
        needs = f"order {settings.order!r} at temperature {settings.temperature}"
        raise ValueError(f"generator: got None; allowed a torch.Generator ({needs} is random)")


def check_records(records: Sequence[str], settings: Sampler) -> None:
    """ValueError for a record that does not exist, or that decoding by ``settings`` cannot fill."""
    for name in records:
        if name not in RECORDS:
            raise ValueError(f"records: got {name!r}; allowed {', '.join(RECORDS)}")
        if name in OF_REST and settings.cache == "dual":
            allowed = ", ".join(other for other in RECORDS if other not in OF_REST)
            allowed += ", which need no later block"
            raise ValueError(f"records: got {name!r} with cache dual; allowed {allowed}")
    if "topk" in records and settings.temperature == 0:
        allowed = "above 0, where more than one token has a probability"
        raise ValueError(f"records: got 'topk' at temperature 0; allowed {allowed}")


@dataclass
class Trace:
    """What has happened to every row so far, written in place; float64 until ``finish``."""

    tokens: Int[Tensor, "B PL"]
    attention_mask: Bool[Tensor, "B PL"]
    unmask_step: Int[Tensor, "B L"]
    logp: Float[Tensor, "B L"]
    records: dict[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


def blank_trace(
    prompt, prompt_mask, settings: Sampler, mask_token_id: int, records: Sequence[str]
) -> Trace:
    """The state before step 0: the prompt, then L times [MASK]."""
    shape = (prompt.shape[0], settings.length)
    trace = Trace(
        tokens=torch.cat([prompt, prompt.new_full(shape, mask_token_id)], 1),
        attention_mask=torch.cat([prompt_mask, prompt_mask.new_ones(shape)], 1),
        unmask_step=prompt.new_full(shape, -1),
        logp=torch.zeros(shape, dtype=torch.float64, device=prompt.device),
    )
    if "entropy" in records:
        trace.records["entropy"] = torch.zeros_like(trace.logp)
    for name in COMPLETIONS:
        if name in records:
            trace.records[name] = prompt.new_zeros(shape[0], settings.num_steps, shape[1])
    return trace


def add_topk(trace: Trace, count: int) -> None:
    """Room for the likeliest ``count`` tokens of each position."""
    shape = (*trace.unmask_step.shape, count)
    trace.records["topk_ids"] = trace.unmask_step.new_zeros(shape)
    trace.records["topk_logp"] = trace.logp.new_zeros(shape)


def add_seen(trace: Trace, settings: Sampler, vocab_size: int) -> None:
    """Room for the log-probability of every token at every position in every state. Raises:
    ValueError for more than CHUNK of them."""
    rows, length = trace.unmask_step.shape
    shape = (rows, settings.num_steps, length, vocab_size)
    if (numbers := math.prod(shape)) > CHUNK:
        got = f"'seen_logp' of {rows} responses, {numbers:,} numbers"
        raise ValueError(f"records: got {got}; allowed up to {CHUNK:,} of them")
    trace.records["seen_logp"] = trace.logp.new_zeros(shape)


# -------------------------------------------------------------------------------------------- noise
@dataclass(frozen=True)
class Noise:
    """All the randomness of a call; C, where a step draws: the block for low_confidence, else n.

    order       position, counted from the start of its block, in the order of revealing; None for
                low_confidence.
    uniform     in [0, 1), one per step, row and drawn position; None at temperature 0.
    completion  in [0, 1), one per step, row and position, for completions that are drawn; None
                without them.
    """

    order: Int[Tensor, "blocks B W"] | None
    uniform: Float[Tensor, "T B C"] | None
    completion: Float[Tensor, "T B L"] | None = None


def draw_noise(
    settings: Sampler,
    rows: int,
    generator: torch.Generator | None,
    device: torch.device,
    records: Sequence[str] = (),
) -> Noise:
    """Draw it for the whole batch at once, on the generator's device: a CPU's serves a GPU as well.

    That of the records comes last: what is recorded does not change what is generated.
    """

    def uniform(*shape: int) -> Tensor:
        how = {"generator": generator, "device": generator.device, "dtype": torch.float64}
        return torch.rand(shape, **how).to(device)

    block, order = (settings.num_blocks, rows, settings.block_length), None
    if settings.order == "random":
        order = permutations(uniform(*block))
    elif settings.order == "left_to_right":
        order = torch.arange(settings.block_length, device=device).expand(block)
    elif settings.order == "right_to_left":
        order = torch.arange(settings.block_length, device=device).flip(0).expand(block)
    width = settings.block_length if order is None else settings.tokens_per_step
    drawn = completion = None
    if settings.temperature > 0:
        drawn = uniform(settings.num_steps, rows, width)
        if {"one_step_sampled", "one_step_proposed"} & {*records}:
            completion = uniform(settings.num_steps, rows, settings.length)
    return Noise(order, drawn, completion)


def permutations(priority: Float[Tensor, "blocks B W"]) -> Int[Tensor, "blocks B W"]:
    """The order of independent uniform priorities: a uniformly random permutation of each block."""
    return priority.argsort(-1)


# ----------------------------------------------------------------------------------------- one step
def reveal(
    model: Network,
    settings: Sampler,
    trace: Trace,
    noise: Noise,
    step: int,
    rows: Int[Tensor, " R"],
    cache: DynamicCache | None = None,
) -> None:
    """One network call on ``rows`` at ``step`` of the batch; n tokens of the current block are
    revealed, or with a threshold all that are confident enough."""
    start = step // settings.steps_per_block * settings.block_length
    if settings.attention == "block_causal":
        h = encode_block(model, settings, trace, start, rows, cache)
        looks = any(name in trace.records for name in OF_REST)
        rest = encode_rest(model, settings, trace, start, rows, None) if looks else h
    else:
        rest = encode_rest(model, settings, trace, start, rows, cache)
        h = rest[:, : settings.block_length]
    chooses = settings.order == "low_confidence"
    positions = candidates(settings, noise, step, rows)
    logits = model.head(at(h, positions - start))
    u = None if noise.uniform is None else noise.uniform[step, rows]
    proposal = propose(logits, settings.temperature, u, chooses)
    record_completions(model, settings, trace, noise, step, rows, rest, positions, proposal.token)
    if "seen_logp" in trace.records:
        record_seen(model, settings, trace, step, rows, rest)
    if chooses:
        hidden = trace.unmask_step[rows].gather(1, positions) < 0
        if settings.threshold is not None:
            sure = confident(proposal.confidence, hidden, settings.threshold)
            proposal = replace(proposal, chosen=sure)
        else:
            chosen = most_confident(proposal.confidence, hidden, settings.tokens_per_step)
            positions, proposal = positions.gather(1, chosen), proposal.pick(chosen)
    write(trace, settings, step, rows, positions, proposal)


def own_step(
    trace: Trace, settings: Sampler, step: int, rows: Int[Tensor, " R"]
) -> int | Int[Tensor, " R"]:
    """Steps that each row has taken: ``step`` of the batch, unless a threshold lets rows wait."""
    return step if settings.threshold is None else trace.unmask_step[rows].amax(1) + 1


def encode_block(
    model: Network,
    settings: Sampler,
    trace: Trace,
    start: int,
    rows: Int[Tensor, " R"],
    cache: DynamicCache | None,
) -> Float[Tensor, "R W D"]:
    """Hidden states of the W positions from ``start``, the current block of a block-causal model.

    The exact, block-level KV cache of block diffusion: ``cache`` holds a past of ``rows`` that does
    not change any more: the prompt, and the finished blocks but the last, which is computed, and
    stays, with the first step of the block after it. The current block is taken out again: it goes
    on changing.
    """
    width = settings.block_length
    end = trace.tokens.shape[1] - settings.length + start + width
    tokens, attention_mask = trace.tokens[rows, :end], trace.attention_mask[rows, :end]
    if cache is None or end == width:  # the second: an empty prompt, and so no past yet
        return model.encode(tokens, attention_mask)[:, -width:]
    h = model.extend(tokens[:, cache.get_seq_length() :], attention_mask, cache)[:, -width:]
    cache.crop(-width)
    return h


def encode_rest(
    model: Network,
    settings: Sampler,
    trace: Trace,
    start: int,
    rows: Int[Tensor, " R"],
    cache: DynamicCache | None,
) -> Float[Tensor, "R M D"]:
    """Hidden states of the M response positions from ``start`` to the last (dual: the block's).

    The approximate KV caches of Fast-dLLM: prefix cache and dual cache. ``cache`` is empty before
    the first step of a block, which computes all positions, these M at the end. They are taken out
    again, so that the later steps meet the others' keys and values as the first one left them:
    attention does not mind in which order keys are given, and their positions are in them. Where
    predictions are shifted, all of this is so of the position before the M, too.
    """
    tokens, attention_mask = trace.tokens[rows], trace.attention_mask[rows]
    first = tokens.shape[1] - settings.length + start
    if cache is None:
        return model.encode(tokens, attention_mask)[:, first:]
    width = settings.block_length if settings.cache == "dual" else settings.length - start
    lead = min(first, int(model.shift))
    column = torch.arange(tokens.shape[1], device=tokens.device)
    order = ((column >= first - lead) & (column < first + width)).long().argsort(stable=True)
    h = model.extend(tokens[:, order[cache.get_seq_length() :]], attention_mask, cache, order)
    cache.crop(-width - lead)
    return h[:, -width:]


def prompt_cache(
    model: Network,
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


def candidates(
    settings: Sampler, noise: Noise, step: int, rows: Int[Tensor, " R"]
) -> Int[Tensor, "R C"]:
    """Response positions that need logits: the block, or the n that the order gives beforehand."""
    block, within = divmod(step, settings.steps_per_block)
    start, n = block * settings.block_length, settings.tokens_per_step
    if noise.order is None:
        place = torch.arange(start, start + settings.block_length, device=rows.device)
        return place.expand(len(rows), -1)
    return start + noise.order[block, rows, within * n : (within + 1) * n]


def at(h: Float[Tensor, "R L D"], positions: Int[Tensor, "R C"]) -> Float[Tensor, "R C D"]:
    """The rows of ``h`` at each sequence's own positions."""
    return h.gather(1, positions[..., None].expand(-1, -1, h.shape[-1]))


@dataclass(frozen=True)
class Proposal:
    """A drawn token per candidate position.

    logp        log-prob of the token under the distribution from which it was drawn, nats.
    logq        that distribution, log-probs; None at temperature 0, where it is a point mass.
    confidence  log-prob of the token at temperature 1, float32; None if the order needs none.
    chosen      True where the token is revealed; None: everywhere.
    """

    token: Int[Tensor, "R C"]
    logp: Float[Tensor, "R C"]
    logq: Float[Tensor, "R C V"] | None
    confidence: Float[Tensor, "R C"] | None
    chosen: Bool[Tensor, "R C"] | None = None

    def pick(self, chosen: Int[Tensor, "R n"]) -> Proposal:
        """The proposals that are revealed."""
        token, logp = self.token.gather(1, chosen), self.logp.gather(1, chosen)
        return Proposal(token, logp, None if self.logq is None else at(self.logq, chosen), None)

    def entropy(self) -> Float[Tensor, "R C"]:
        """-sum_v q(v) log q(v), nats; a token of probability 0 adds 0."""
        if self.logq is None:
            return torch.zeros_like(self.logp)
        return torch.special.entr(self.logq.exp()).sum(-1)


def propose(
    logits: Float[Tensor, "R C V"],
    temperature: float,
    u: Float[Tensor, "R C"] | None,
    with_confidence: bool,
) -> Proposal:
    """token ~ softmax(logits / temperature), in float32 at least; the argmax at temperature 0.

    The distribution of LLaDA's Gumbel-max sampling, drawn through the inverse CDF instead.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        best, token = z.max(-1)
        # 0 for a point mass; NaN for broken logits, so that finish sees it
        logq, logp = None, best - best
    else:
        logq = (z / temperature).log_softmax(-1)
        token = inverse_cdf(logq, u)
        logp = logq.gather(-1, token[..., None])[..., 0]
    return Proposal(token, logp, logq, confidence(z, token) if with_confidence else None)


def inverse_cdf(logq: Float[Tensor, "*S V"], u: Float[Tensor, "*S"]) -> Int[Tensor, "*S"]:
    """First token whose cumulative probability exceeds u (relative to the total, nearly 1).

    A token of probability 0, [MASK] among them, adds nothing to the sum and is never the first to
    exceed. Past the end is NaN alone: the index stays legal until ``finish`` raises.
    """
    cdf = logq.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, u[..., None] * cdf[..., -1:], right=True)[..., 0]
    return token.clamp_max(logq.shape[-1] - 1)


def confidence(z: Float[Tensor, "R C V"], token: Int[Tensor, "R C"]) -> Float[Tensor, "R C"]:
    """log softmax(z)[token]: as LLaDA's rule has it, at temperature 1 whatever the sampler's."""
    return (z.gather(-1, token[..., None])[..., 0] - z.logsumexp(-1)).float()


def most_confident(
    conf: Float[Tensor, "R C"], hidden: Bool[Tensor, "R C"], n: int
) -> Int[Tensor, "R n"]:
    """Low-confidence remasking: the n hidden candidates of highest confidence, ties to the lower.

    ``topk`` promises no order on ties.
    """
    ranked = conf.masked_fill(~hidden, -math.inf).sort(dim=1, descending=True, stable=True)
    return ranked.indices[:, :n]


def confident(
    conf: Float[Tensor, "R C"], hidden: Bool[Tensor, "R C"], threshold: float
) -> Bool[Tensor, "R C"]:
    """Confidence threshold decoding: the hidden candidates of tau or more, at least the first.

    Source: confidence-aware parallel decoding of Fast-dLLM (arXiv 2505.22618), whose code drops
    those below tau: one that is equal stays. A row with nothing hidden has none.
    """
    first = most_confident(conf, hidden, 1)
    return (conf >= log_threshold(threshold)).scatter(1, first, True) & hidden


def record_completions(
    model: Network,
    settings: Sampler,
    trace: Trace,
    noise: Noise,
    step: int,
    rows: Int[Tensor, " R"],
    h: Float[Tensor, "R M D"],
    positions: Int[Tensor, "R C"],
    proposed: Int[Tensor, "R C"],
) -> None:
    """The completions asked for of the state before ``step``; ``h``: from the block to the end.

    ``proposed``: what the step drew at its ``positions``; it counts where they are hidden.
    """
    for name in (name for name in COMPLETIONS if name in trace.records):
        u = None if name == "one_step" or noise.completion is None else noise.completion[step, rows]
        guess = one_step_completion(model, h, trace.tokens[rows], settings, u)
        if name == "one_step_proposed":
            hidden = trace.unmask_step[rows].gather(1, positions) < 0
            token = torch.where(hidden, proposed, guess.gather(1, positions))
            guess = guess.scatter(1, positions, token)
        trace.records[name][rows, own_step(trace, settings, step, rows)] = guess


def record_seen(
    model: Network,
    settings: Sampler,
    trace: Trace,
    step: int,
    rows: Int[Tensor, " R"],
    h: Float[Tensor, "R M D"],
) -> None:
    """log p of every token in the state before ``step``; ``h``: from the block to the end."""
    seen, own = trace.records["seen_logp"], own_step(trace, settings, step, rows)
    seen[rows, own, -h.shape[1] :] = model.head(h).log_softmax(-1).to(seen)


def seen_of(
    seen: Float[Tensor, "B T L V"],
    response: Int[Tensor, "B L"],
    unmask_step: Int[Tensor, "B L"],
    over: Bool[Tensor, "B L"],
) -> Float[Tensor, "B T L"]:
    """Of the tokens of the response, where they were hidden; 0 elsewhere, and after the end."""
    token = response[:, None, :, None].expand(*seen.shape[:3], 1)
    every, own = torch.arange(seen.shape[1], device=seen.device)[:, None], unmask_step[:, None]
    hidden = ((own >= every) | (own < 0)) & ~over[:, None]
    ran = every < steps_run(unmask_step)[:, None, None]
    return seen.gather(-1, token)[..., 0].masked_fill(~(hidden & ran), 0.0)


def one_step_completion(
    model: Network,
    h: Float[Tensor, "R M D"],
    tokens: Int[Tensor, "R PL"],
    settings: Sampler,
    u: Float[Tensor, "R L"] | None,
) -> Int[Tensor, "R L"]:
    """Every hidden position filled in given this state alone, by argmax or drawn by ``u``.

    The hidden positions are among the last M. Logits of a block at a time, or of fewer positions
    where a block's are more than ``CHUNK``; what is kept of them is a token id each.
    """
    rest = h.shape[1]
    width = min(settings.block_length, max(1, CHUNK // (max(1, len(h)) * model.vocab_size)))
    parts = []
    for start in range(0, rest, width):
        logits = model.head(h[:, start : start + width])
        if u is None:
            parts.append(logits.argmax(-1))
        else:
            share = u[:, -rest:][:, start : start + width]
            parts.append(propose(logits, settings.temperature, share, False).token)
    done, current = tokens[:, -settings.length :].split([settings.length - rest, rest], 1)
    guess = torch.cat(parts, 1)
    return torch.cat([done, torch.where(current == model.mask_token_id, guess, current)], 1)


def write(
    trace: Trace,
    settings: Sampler,
    step: int,
    rows: Int[Tensor, " R"],
    positions: Int[Tensor, "R n"],
    proposal: Proposal,
) -> None:
    """Put the revealed tokens, their step and their log-probs into the trace.

    What is revealed stays as it is in all later states: MDLM's carry-over unmasking.
    """
    where, start = (rows[:, None], positions), trace.tokens.shape[1] - settings.length

    def put(into: Tensor, at: tuple[Tensor, Tensor], value: Tensor | int) -> None:
        if proposal.chosen is not None:  # the others keep what they have; no host is asked which
            shape = proposal.chosen.shape + (1,) * (into.ndim - 2)
            value = torch.where(proposal.chosen.view(shape), value, into[at])
        into[at] = value

    step = own_step(trace, settings, step, rows)
    put(trace.tokens, (rows[:, None], start + positions), proposal.token)
    put(trace.unmask_step, where, step if isinstance(step, int) else step[:, None])
    put(trace.logp, where, proposal.logp.double())
    trace.dtype = proposal.logp.dtype
    if "entropy" in trace.records:
        put(trace.records["entropy"], where, proposal.entropy().double())
    if "topk_ids" in trace.records:
        best = proposal.logq.topk(trace.records["topk_ids"].shape[-1], -1)
        put(trace.records["topk_ids"], where, best.indices)
        put(trace.records["topk_logp"], where, best.values.double())


# ------------------------------------------------------------------------------------------- ending
def unfinished(
    trace: Trace, rows: Int[Tensor, " R"], block: int, settings: Sampler, eos_token_id: int
) -> Int[Tensor, " S"]:
    """The rows without EOS up to the block just finished.

    Without a threshold the sampler's only host synchronisation of a block. ``Denoiser.encode`` adds
    two to each forward: whether a row is padded at all, and which rows are equal.
    """
    start = trace.tokens.shape[1] - settings.length
    written = trace.tokens[rows, start : start + (block + 1) * settings.block_length]
    return rows[~(written == eos_token_id).any(1)]


def still_open(
    trace: Trace, rows: Int[Tensor, " R"], block: int, settings: Sampler
) -> Int[Tensor, " S"]:
    """The rows in which a position of the block is hidden; a host synchronisation, as above."""
    step = trace.unmask_step[rows].unflatten(1, (settings.num_blocks, -1))[:, block]
    return rows[(step < 0).any(1)]


def after_end(
    response: Int[Tensor, "B L"], block_length: int, eos_token_id: int | None
) -> Bool[Tensor, "B L"]:
    """True in the blocks that follow the one with the first EOS."""
    if eos_token_id is None:
        return torch.zeros_like(response, dtype=torch.bool)
    has_eos = (response == eos_token_id).unflatten(1, (-1, block_length)).any(-1).int()
    return (has_eos.cumsum(1) - has_eos > 0).repeat_interleave(block_length, 1)


def keep_mask(response: Int[Tensor, "B L"], eos_token_id: int | None) -> Bool[Tensor, "B L"]:
    """True up to and including the first EOS; everywhere when there is none."""
    if eos_token_id is None:
        return torch.ones_like(response, dtype=torch.bool)
    is_eos = (response == eos_token_id).int()
    return is_eos.cumsum(1) - is_eos == 0


def finish(
    trace: Trace,
    prompt: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    settings: Sampler,
    eos_token_id: int | None,
    num_generations: int,
) -> Rollout:
    """Trace -> Rollout; after the end all is wiped: early stopping can't change the result."""
    response = trace.tokens[:, -settings.length :]
    over = after_end(response, settings.block_length, eos_token_id)
    response = response if eos_token_id is None else response.masked_fill(over, eos_token_id)
    step, logp = trace.unmask_step.masked_fill(over, -1), trace.logp.masked_fill(over, 0.0)
    if not torch.isfinite(logp).all():
        raise FloatingPointError("logits: the model returned NaN or +inf")
    records = {}
    ended = torch.arange(settings.num_steps, device=step.device) >= steps_run(step)[:, None]
    for name, value in trace.records.items():
        if name in COMPLETIONS:
            records[name] = torch.where(ended[..., None], response[:, None], value)
        elif name == "seen_logp":
            records[name] = seen_of(value, response, step, over).to(trace.dtype)
        else:
            wiped = value.masked_fill(over if value.ndim == 2 else over[..., None], 0)
            records[name] = wiped.to(trace.dtype) if value.is_floating_point() else wiped
    keep, logp = keep_mask(response, eos_token_id), logp.to(trace.dtype)
    made = (response, keep, step, logp, num_generations, settings, records)
    return Rollout(prompt, prompt_mask, *made)


# ------------------------------------------------------------------------------------------- replay
def steps_run(unmask_step: Int[Tensor, "B L"]) -> Int[Tensor, " B"]:
    """Steps until each row's end: those that a sampler with early stopping evaluates."""
    return unmask_step.amax(1) + 1


def network_calls(rollout: Rollout) -> int:
    """Number of (row, step) states that the network evaluates under early stopping.

    With a threshold, those that the rows needed. What it costs that a row waits for its batch is
    not counted: up to LOOK_EVERY - 1 steps a block; with the exact cache, until all rows are done.

    It counts states, whatever one costs: also those that equal another of the same forward, which a
    ``Denoiser`` computes once. Of a bidirectional model that is a forward of P + L
    tokens; of a block-causal one, of the prompt and the blocks up to the current one; with the
    exact cache, of the W tokens of a block, and of the prompt and each block but the last once more
    for their keys and values. What the others save is in ``Sampler``.
    """
    return int(steps_run(rollout.unmask_step).sum())


def hidden_before(rollout: Rollout, step: int) -> Bool[Tensor, "B L"]:
    """The response positions that are [MASK] before ``step``: not yet revealed, or never."""
    return (rollout.unmask_step < 0) | (rollout.unmask_step >= step)


def state_before(rollout: Rollout, step: int, mask_token_id: int) -> Int[Tensor, "B PL"]:
    """The tokens, prompt and response, that the network saw at ``step``; T: the final state."""
    response = rollout.response.masked_fill(hidden_before(rollout, step), mask_token_id)
    return torch.cat([rollout.prompt, response], 1)


def states(rollout: Rollout, mask_token_id: int) -> Int[Tensor, "T B PL"]:
    """``state_before`` for every step; past ``steps_run``, a row repeats its final state."""
    steps = range(rollout.sampler.num_steps)
    return torch.stack([state_before(rollout, step, mask_token_id) for step in steps])


def attention_mask(rollout: Rollout) -> Bool[Tensor, "B PL"]:
    """What ``encode`` takes beside a state: False at the padding of the prompt only."""
    return torch.cat([rollout.prompt_mask, torch.ones_like(rollout.keep)], 1)
