"""Generation: from prompts to Rollouts that hold the whole trajectory.

A masked diffusion language model writes a response of L tokens by starting from L [MASK] tokens and
revealing a few of them per network call. The response is cut into blocks of ``block_length``
positions, which are finished from left to right. Inside the current block each step reveals
``tokens_per_step`` tokens, and ``order`` says which ones. Nothing revealed is ever masked again, so
the step at which each token appeared (``Rollout.unmask_step``) gives back every state of the run:
``state_before`` below does it.

How a token is drawn. One uniform number u in float64 per position, then the inverse of the
distribution function: the token is the first v with P(0) + ... + P(v) > u, summed in float64. Rare
tokens therefore keep their probability whatever the dtype of the network is. (Noise drawn in
bfloat16 stops at 255/256, which removes the tail of the vocabulary.) All the uniforms of a call are
drawn before its first step, for the whole batch. What a row becomes, and the state in which the
generator is left, depend neither on the micro-batch, nor on early stopping, nor on when the other
rows end.

Read ``generate``, ``decode`` and ``reveal``, in this order; the rest is what they call. What a
first reading can do without is in decoding.py: the cache of block-causal models, which makes a step
cheaper, and threshold decoding, in which a step reveals as many tokens as are sure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, TopPLogitsWarper

from minidrl import decoding
from minidrl.algorithms import Rollout
from minidrl.features import Network

ORDERS = ("random", "low_confidence", "left_to_right", "right_to_left", "entropy", "margin")
COMPLETIONS = ("one_step", "one_step_sampled", "one_step_proposed")
OF_REST = (*COMPLETIONS, "seen_logp")  # records that look at every hidden position
RECORDS = ("entropy", *COMPLETIONS, "topk", "seen_logp")
CACHES = {"bidirectional": ("none",), "block_causal": ("none", "exact")}
CHUNK = decoding.CHUNK  # the most logits that a record makes at a time
TOP_K = 20  # what inference servers return at most: no method should need more

Rows = Int[Tensor, " R"]  # numbers of rows of the batch, ascending
Ends = int | Sequence[int] | None  # EOS, or all tokens that end a response, EOS first


# ----------------------------------------------------------------------------------------- settings
@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The settings of a decoding run; a Rollout carries the ones that produced it.

    length           L, response positions.
    block_length     W, positions of a block; divides ``length``. W = L: no blocks.
    tokens_per_step  n, tokens revealed per network call (parallel decoding); divides
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
        "right_to_left"   the n highest: working backwards from where the response ends;
        "entropy"         those whose token's distribution has the lowest entropy (Dream's code,
                          arXiv 2508.15487);
        "margin"          those where its two largest probabilities differ most (also there). The
                          distribution of both is that from which a token is drawn, at temperature
                          0 softmax(z): the choice depends on the state, not on what is drawn.
    threshold        tau, from 0 to 1: a step reveals every hidden position of the block whose
                     confidence is at least tau, and at least the one of highest confidence. For
                     the order "low_confidence" with ``tokens_per_step`` 1, the fewest. None: n a
                     step.
    top_p            nucleus sampling: tokens are drawn from the fewest that together have this
                     probability. Below 1 a rollout is off-policy.
    attention        what the network is: "bidirectional" (every token sees every other), or
                     "block_causal" (no token sees a later block, of this block_length).
    cache            keys and values that are kept: "none"; or, for block-causal attention, "exact",
                     which changes only what a step costs. See decoding.py.
    """

    order: str
    temperature: float
    length: int
    block_length: int
    tokens_per_step: int
    attention: str = "bidirectional"
    cache: str = "none"
    threshold: float | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        def check(key: str, right: bool, allowed: str) -> None:
            if not right:
                raise ValueError(f"{key}: got {getattr(self, key)!r}; allowed {allowed}")

        check("order", self.order in ORDERS, ", ".join(ORDERS))
        check("attention", self.attention in CACHES, ", ".join(CACHES))
        caches = CACHES[self.attention]
        check("cache", self.cache in caches, f"{', '.join(caches)} ({self.attention} attention)")
        check("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a positive number")
        check("top_p", 0 < self.top_p <= 1, "above 0, up to 1")
        for key in ("length", "block_length", "tokens_per_step"):
            check(key, getattr(self, key) >= 1, "an integer >= 1")
        for key, whole in (("block_length", "length"), ("tokens_per_step", "block_length")):
            number = getattr(self, whole)
            check(key, number % getattr(self, key) == 0, f"a divisor of {whole} = {number}")
        if self.threshold is not None:
            check("threshold", 0 <= self.threshold <= 1, "a number from 0 to 1")
            check("order", self.order == "low_confidence", "low_confidence with a threshold")
            check("tokens_per_step", self.tokens_per_step == 1, "1 with a threshold, the fewest")

    @property
    def num_blocks(self) -> int:
        return self.length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Network calls that finish one block; with a threshold, at most so many."""
        return self.block_length // self.tokens_per_step

    @property
    def num_steps(self) -> int:
        """T, network calls that finish a response which never ends early; with a threshold, at most
        so many."""
        return self.num_blocks * self.steps_per_block


# --------------------------------------------------------------------------------------- generation
@torch.no_grad()
def generate(
    model: Network,
    prompt: Int[Tensor, "G P"],
    prompt_mask: Bool[Tensor, "G P"],
    settings: Sampler,
    *,
    eos_token_id: Ends,
    num_generations: int = 1,
    generator: torch.Generator | None,
    records: Sequence[str] = (),
    micro_batch: int | None = None,
    rows: Int[Tensor, " R"] | None = None,
    agree: Callable[[Tensor, Tensor], Tensor] = lambda rows, left: left,
) -> Rollout:
    """Draw ``num_generations`` responses per prompt; B = G * num_generations rows, prompt-major.

    Source: LLaDA's semi-autoregressive decoding, ``remasking`` random or low_confidence.

    model         in eval mode; its logits are float32 at least.
    prompt        left-padded; ``prompt_mask`` is True at real tokens.
    eos_token_id  EOS, or several tokens that end a response, EOS first. The blocks after the one
                  that holds a row's first end are not revealed: there ``response`` is EOS,
                  ``unmask_step`` -1, ``logp`` and entropy 0, ``keep`` False. None: nothing ends a
                  response.
    generator     source of all randomness, on any device; unused (None is accepted) when nothing is
                  random, which is temperature 0 with an order other than "random".
    records       what else to keep, below.
    micro_batch   rows per network call; None is all. It changes the memory only.
    rows          the rows to generate, ascending; None: all. The others stay blank. Noise is drawn
                  for all: a row does not depend on which others are generated here, and which by
                  another process.
    agree         (rows of a call, those that have more to write) -> the rows that go on: processes
                  that must work in step add some that have ended, whose further tokens are wiped.
                  Asked once a block, with a threshold after each step; it changes the cost only.

    Records:

    entropy       (B, L), nats: entropy of the distribution from which the token was drawn, at the
                  sampling temperature and at the step that revealed it.
    topk          the keys topk_ids and topk_logp (B, L, M), the min(20, V - 1) likeliest tokens of
                  that distribution, likeliest first; 0 where nothing was revealed. Not at
                  temperature 0.
    one_step      (B, T, L): per step the completion by argmax of every hidden token at once, the
                  revealed ones kept; after a row's end its response.
    one_step_sampled  the same with every hidden token drawn from the sampler's q, by noise that has
                  nothing to do with the trajectory's.
    one_step_proposed  drawn likewise, and what the step reveals is part of it: where the sampler
                  itself drew a token in this step, it is that token, chosen or not.
    seen_logp     (B, T, L), nats: log p of the token that came to stand there, at temperature 1, in
                  the state before each step; 0 where it is visible, and after a row's end. Until
                  the response is known, B T L V numbers are kept: at most CHUNK.

    The last four apply ``head`` to all hidden blocks at every step, and call a block-causal network
    once more for them.

    Returns a Rollout whose ``logp`` is log q[token] in nats, q = softmax(z / T) (of the nucleus,
    with a top_p), in the dtype of the logits. At temperature 0 the behaviour is a point mass:
    ``logp`` and entropy are 0.
    """
    check_attention(model, settings)
    check_positions(getattr(model, "model", None), prompt.shape[1], settings.length)
    for name in {*records} - {*RECORDS}:
        raise ValueError(f"records: got {name!r}; allowed {', '.join(RECORDS)}")

    # Every row begins as its prompt and L times [MASK], with all the randomness it will ever need.
    prompts = prompt, prompt_mask
    prompt, prompt_mask = (x.repeat_interleave(num_generations, 0) for x in prompts)  # (B, P)
    trace = blank_trace(model, prompt, prompt_mask, settings, records)
    trace.noise = draw_noise(settings, len(prompt), generator, prompt.device, records)

    # Without a cache all rows go through a block together, ``size`` of them a network call. With
    # one, a micro-batch is finished before the next begins: only one cache exists at a time.
    rows = torch.arange(len(prompt), device=prompt.device) if rows is None else rows
    size = micro_batch or max(len(rows), 1)
    for part in [rows] if settings.cache == "none" else rows.split(size):
        cache = None
        if settings.cache == "exact":
            cache = decoding.prompt_cache(model, *prompts, part // num_generations)
        decode(model, trace, part, size, eos_token_id, agree, cache)
    return finish(trace, eos_token_id, num_generations)


def decode(
    model: Network,
    trace: Trace,
    rows: Rows,
    size: int,
    eos_token_id: Ends,
    agree: Callable[[Tensor, Tensor], Tensor],
    cache: DynamicCache | None,
) -> None:
    """All steps of ``rows``, ``size`` a call: the blocks from left to right, and in each the steps.

    ``cache``: that of the prompts of ``rows``, which are then at most ``size``; or None.
    """
    settings = trace.settings
    for block in range(settings.num_blocks):
        going = rows
        for within in range(settings.steps_per_block):
            for part in going.split(size):
                reveal(model, trace, block * settings.steps_per_block + within, part, cache)
            # Steps of a fixed number of tokens fill all rows at once; with a threshold, some early.
            if settings.threshold is not None:
                going = decoding.still_going(trace, going, block, agree)
                if len(going) == 0:
                    break
        if eos_token_id is not None:
            left = agree(rows, unfinished(trace, rows, block, eos_token_id))
            if len(left) == 0:
                break
            if cache is not None:
                cache.batch_select_indices(torch.searchsorted(rows, left))
            rows = left


def reveal(
    model: Network, trace: Trace, step: int, rows: Rows, cache: DynamicCache | None = None
) -> None:
    """One network call on ``rows``, which reveals tokens of the block that ``step`` is in."""
    settings, noise = trace.settings, trace.noise
    start = step // settings.steps_per_block * settings.block_length

    # 1. Hidden states of the current block, and of all positions from there to the last.
    h, rest = hidden_states(model, trace, start, rows, cache)  # (R, W, D), (R, M, D)

    # 2. A token for every position at which one may appear in this step: the whole block where the
    #    choice depends on what is drawn, else the next n positions of the order.
    positions = candidates(trace, step, rows)  # (R, C)
    logits = model.head(at(h, positions - start))  # (R, C, V)
    u = None if noise.uniform is None else noise.uniform[step, rows]  # (R, C)
    token, logp, logq = propose(logits, settings, u)

    # 3. Records of the state as it was before this step.
    #    Each row counts its own: with a threshold, one whose block is full waits for the others.
    own = steps_run(trace.unmask_step[rows])
    record_completions(model, trace, step, own, rows, rest, positions, token)
    if "seen_logp" in trace.records:
        seen = trace.records["seen_logp"]  # log p of every token, from the block to the end
        seen[rows, own, -rest.shape[1] :] = model.head(rest).log_softmax(-1).to(seen)

    # 4. Which of the proposals are revealed. An order that is known beforehand proposes no others.
    sure = None  # all of them
    if noise.order is None:
        hidden = trace.unmask_step[rows].gather(1, positions) < 0  # (R, C)
        conf = confidence(logits, token, logq, settings)
        first = most_confident(conf, hidden, settings.tokens_per_step)  # (R, n)
        if settings.threshold is None:
            positions, token, logp = (x.gather(1, first) for x in (positions, token, logp))
            logq = None if logq is None else at(logq, first)
        else:
            sure = decoding.confident(conf, first, hidden, settings.threshold)

    # 5. They are written down, and stay as they are in all later states.
    write(trace, own, rows, positions, token, logp, logq, sure)


# ------------------------------------------------------------------------- what a run starts from
@dataclass(frozen=True)
class Noise:
    """All the randomness of a call; C, where a step draws: n positions, or the block.

    order       position, counted from the start of its block, in the order of revealing; None where
                that depends on what the network predicts, and then C is the block.
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
        where = generator.device
        return torch.rand(shape, generator=generator, device=where, dtype=torch.float64).to(device)

    block, order = (settings.num_blocks, rows, settings.block_length), None
    if settings.order == "random":
        order = uniform(*block).argsort(-1)  # a uniformly random permutation of each block
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


@dataclass
class Trace:
    """What has happened to every row so far, written in place; float64 until ``finish``."""

    settings: Sampler
    tokens: Int[Tensor, "B PL"]  # prompt and response
    attention_mask: Bool[Tensor, "B PL"]
    unmask_step: Int[Tensor, "B L"]
    logp: Float[Tensor, "B L"]
    records: dict[str, Tensor] = field(default_factory=dict)
    noise: Noise | None = None
    dtype: torch.dtype = torch.float32


def blank_trace(
    model: Network, prompt: Tensor, prompt_mask: Tensor, settings: Sampler, records: Sequence[str]
) -> Trace:
    """The state before step 0: the prompt, then L times [MASK]; and room for the records."""
    shape = rows, length = len(prompt), settings.length
    trace = Trace(
        settings,
        tokens=torch.cat([prompt, prompt.new_full(shape, model.mask_token_id)], 1),
        attention_mask=torch.cat([prompt_mask, prompt_mask.new_ones(shape)], 1),
        unmask_step=prompt.new_full(shape, -1),
        logp=torch.zeros(shape, dtype=torch.float64, device=prompt.device),
    )
    if "entropy" in records:
        trace.records["entropy"] = torch.zeros_like(trace.logp)
    for name in COMPLETIONS:
        if name in records:
            trace.records[name] = prompt.new_zeros(rows, settings.num_steps, length)
    if "topk" in records:
        count = min(TOP_K, model.vocab_size - 1)  # [MASK], of probability 0, is not among them
        trace.records["topk_ids"] = prompt.new_zeros(*shape, count)
        trace.records["topk_logp"] = trace.logp.new_zeros(*shape, count)
    if "seen_logp" in records:
        decoding.add_seen(trace, model.vocab_size)
    return trace


# ------------------------------------------------------------------------------- inside one step
def hidden_states(
    model: Network, trace: Trace, start: int, rows: Rows, cache: DynamicCache | None
) -> tuple[Float[Tensor, "R W D"], Float[Tensor, "R M D"]]:
    """Hidden states of the W positions from ``start``, the current block; and of all M positions
    from there to the last, where the step computes them or a record looks at them."""
    settings, width = trace.settings, trace.settings.block_length
    first = trace.tokens.shape[1] - settings.length + start  # where the block starts in the text
    tokens, attention_mask = trace.tokens[rows], trace.attention_mask[rows]
    if settings.attention == "bidirectional":
        rest = model.encode(tokens, attention_mask)[:, first:]
        return rest[:, :width], rest
    # No token of a block-causal model sees a later block: the text ends here.
    shown, seen = tokens[:, : first + width], attention_mask[:, : first + width]
    if cache is not None:
        h = decoding.block_states(model, shown, seen, width, cache)
    else:
        h = model.encode(shown, seen)[:, -width:]
    looks = any(name in trace.records for name in OF_REST)
    return h, model.encode(tokens, attention_mask)[:, first:] if looks else h


def candidates(trace: Trace, step: int, rows: Rows) -> Int[Tensor, "R C"]:
    """Response positions that need logits: the block, or the n that the order gives beforehand."""
    settings, order = trace.settings, trace.noise.order
    block, within = divmod(step, settings.steps_per_block)
    start, n = block * settings.block_length, settings.tokens_per_step
    if order is None:
        place = torch.arange(start, start + settings.block_length, device=rows.device)
        return place.expand(len(rows), -1)
    return start + order[block, rows, within * n : (within + 1) * n]


def at(h: Float[Tensor, "R L D"], positions: Int[Tensor, "R C"]) -> Float[Tensor, "R C D"]:
    """The rows of ``h`` at each sequence's own positions."""
    return h.gather(1, positions[..., None].expand(-1, -1, h.shape[-1]))


def propose(
    logits: Float[Tensor, "R C V"], settings: Sampler, u: Float[Tensor, "R C"] | None
) -> tuple[Int[Tensor, "R C"], Float[Tensor, "R C"], Float[Tensor, "R C V"] | None]:
    """token ~ q of ``log_policy``; the argmax at temperature 0.

    The distribution of LLaDA's Gumbel-max sampling, drawn through the inverse CDF instead. Returns
    the token, log q(token) and log q, the distribution from which it was drawn; at temperature 0
    that is a point mass, with log q(token) = 0 and None for log q.
    """
    if settings.temperature == 0:
        best, token = logits.max(-1)
        return token, best - best, None  # 0; NaN for broken logits, so that ``finish`` sees it
    logq = log_policy(logits, settings)
    token = inverse_cdf(logq, u)
    return token, logq.gather(-1, token[..., None])[..., 0], logq


def log_policy(logits: Float[Tensor, "R C V"], settings: Sampler) -> Float[Tensor, "R C V"]:
    """log q = log softmax(z / T), of its nucleus where there is a top_p; T = 1 at temperature 0."""
    logq = (logits / (settings.temperature or 1.0)).log_softmax(-1)
    if settings.top_p == 1:
        return logq
    nucleus = TopPLogitsWarper(settings.top_p)(None, logq.flatten(0, 1))
    return nucleus.view_as(logq).log_softmax(-1)


def inverse_cdf(logq: Float[Tensor, "*S V"], u: Float[Tensor, "*S"]) -> Int[Tensor, "*S"]:
    """First token whose cumulative probability exceeds u (relative to the total, nearly 1).

    A token of probability 0, [MASK] among them, adds nothing to the sum and is never the first.
    """
    cdf = logq.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, u[..., None] * cdf[..., -1:], right=True)[..., 0]
    return token.clamp_max(logq.shape[-1] - 1)  # past the end: of NaN, on which ``finish`` raises


def confidence(
    logits: Float[Tensor, "R C V"],
    token: Int[Tensor, "R C"],
    logq: Float[Tensor, "R C V"] | None,
    settings: Sampler,
) -> Float[Tensor, "R C"]:
    """How sure a candidate is. LLaDA's rule: log softmax(z)[token], at temperature 1 whatever the
    sampler's. Dream's: minus the entropy of q, or the margin between its two largest numbers."""
    if settings.order == "low_confidence":
        return (logits.gather(-1, token[..., None])[..., 0] - logits.logsumexp(-1)).float()
    q = (log_policy(logits, settings) if logq is None else logq).exp()
    if settings.order == "entropy":
        return -torch.special.entr(q).sum(-1).float()
    first, second = q.topk(2, -1).values.unbind(-1)
    return (first - second).float()


def most_confident(
    conf: Float[Tensor, "R C"], hidden: Bool[Tensor, "R C"], n: int
) -> Int[Tensor, "R n"]:
    """The n hidden candidates of highest confidence, ties to the lower. (``topk`` promises no order
    on ties.)"""
    ranked = conf.masked_fill(~hidden, -math.inf).sort(dim=1, descending=True, stable=True)
    return ranked.indices[:, :n]


def write(
    trace: Trace,
    own: Int[Tensor, " R"],
    rows: Rows,
    positions: Int[Tensor, "R n"],
    token: Int[Tensor, "R n"],
    logp: Float[Tensor, "R n"],
    logq: Float[Tensor, "R n V"] | None,
    sure: Bool[Tensor, "R n"] | None,
) -> None:
    """Put the revealed tokens, their step, their log-probs and their records into the trace.

    MDLM's carry-over unmasking. ``sure``: True where a token is revealed; None: everywhere.
    """

    def put(into: Tensor, value: Tensor, start: int = 0) -> None:
        at = rows[:, None], start + positions
        if sure is not None:  # the others keep what they have, chosen on the device
            value = torch.where(sure.view(*sure.shape, *[1] * (into.ndim - 2)), value, into[at])
        into[at] = value

    put(trace.tokens, token, start=trace.tokens.shape[1] - trace.settings.length)
    put(trace.unmask_step, own[:, None])
    put(trace.logp, logp.double())
    trace.dtype = logp.dtype
    if "entropy" in trace.records:  # a token of probability 0 adds 0
        point = torch.zeros_like(logp) if logq is None else torch.special.entr(logq.exp()).sum(-1)
        put(trace.records["entropy"], point.double())
    if "topk_ids" in trace.records:
        best = logq.topk(trace.records["topk_ids"].shape[-1], -1)
        put(trace.records["topk_ids"], best.indices)
        put(trace.records["topk_logp"], best.values.double())


# --------------------------------------------------------------------------- completions of a state
def record_completions(
    model: Network,
    trace: Trace,
    step: int,
    own: Int[Tensor, " R"],
    rows: Rows,
    rest: Float[Tensor, "R M D"],
    positions: Int[Tensor, "R C"],
    proposed: Int[Tensor, "R C"],
) -> None:
    """The completions asked for of the state before ``step``, in which it drew ``proposed``."""
    # Each is the text that the state becomes in one step: by argmax, or drawn by noise of its own.
    noise = trace.noise.completion
    for name in (name for name in COMPLETIONS if name in trace.records):
        u = None if name == "one_step" or noise is None else noise[step, rows]
        guess = one_step_completion(model, rest, trace.tokens[rows], trace.settings, u)
        # Where the sampler drew a token in this very step, that token stands there.
        if name == "one_step_proposed":
            hidden = trace.unmask_step[rows].gather(1, positions) < 0
            token = torch.where(hidden, proposed, guess.gather(1, positions))
            guess = guess.scatter(1, positions, token)
        trace.records[name][rows, own] = guess


def one_step_completion(
    model: Network,
    h: Float[Tensor, "R M D"],
    tokens: Int[Tensor, "R PL"],
    settings: Sampler,
    u: Float[Tensor, "R L"] | None,
) -> Int[Tensor, "R L"]:
    """Every hidden position filled in given this state alone, by argmax or drawn by ``u``.

    The hidden positions are among the last M. Logits exist for a block at a time, or for fewer
    positions where a block's are more than ``CHUNK``.
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
            parts.append(propose(logits, settings, share)[0])
    done, current = tokens[:, -settings.length :].split([settings.length - rest, rest], 1)
    guess = torch.cat(parts, 1)
    return torch.cat([done, torch.where(current == model.mask_token_id, guess, current)], 1)


# ------------------------------------------------------------------------------------------- ending
def is_end(tokens: Int[Tensor, "..."], eos_token_id: Ends) -> Bool[Tensor, "..."]:
    """True at the tokens that end a response."""
    ends = [] if eos_token_id is None else eos_token_id
    return torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype, device=tokens.device))


def unfinished(trace: Trace, rows: Rows, block: int, eos_token_id: Ends) -> Int[Tensor, " S"]:
    """The rows without EOS up to the block just finished: the only question of a block that the
    host waits for (``Denoiser.encode`` adds two to each forward; a threshold has its own)."""
    start = trace.tokens.shape[1] - trace.settings.length
    written = trace.tokens[rows, start : start + (block + 1) * trace.settings.block_length]
    return rows[~is_end(written, eos_token_id).any(1)]


def after_end(
    response: Int[Tensor, "B L"], block_length: int, eos_token_id: Ends
) -> Bool[Tensor, "B L"]:
    """True in the blocks that follow the one with the first EOS."""
    has_eos = is_end(response, eos_token_id).unflatten(1, (-1, block_length)).any(-1).int()
    return (has_eos.cumsum(1) - has_eos > 0).repeat_interleave(block_length, 1)


def keep_mask(response: Int[Tensor, "B L"], eos_token_id: Ends) -> Bool[Tensor, "B L"]:
    """True up to and including the first EOS; everywhere when there is none."""
    is_eos = is_end(response, eos_token_id).int()
    return is_eos.cumsum(1) - is_eos == 0


def finish(trace: Trace, eos_token_id: Ends, num_generations: int) -> Rollout:
    """Trace -> Rollout; after the end all is wiped: early stopping can't change the result."""
    settings = trace.settings
    response = trace.tokens[:, -settings.length :]
    over = after_end(response, settings.block_length, eos_token_id)
    if eos_token_id is not None:
        eos = eos_token_id if isinstance(eos_token_id, int) else eos_token_id[0]
        response = response.masked_fill(over, eos)
    step, logp = trace.unmask_step.masked_fill(over, -1), trace.logp.masked_fill(over, 0.0)
    if not torch.isfinite(logp).all():
        raise FloatingPointError("logits: the model returned NaN or +inf")
    records = {}
    ended = torch.arange(settings.num_steps, device=step.device) >= steps_run(step)[:, None]
    for name, value in trace.records.items():
        if name in COMPLETIONS:
            value = torch.where(ended[..., None], response[:, None], value)
        elif name == "seen_logp":
            value = decoding.seen_of(value, response, step)
        else:
            value = value.masked_fill(over if value.ndim == 2 else over[..., None], 0)
        records[name] = value.to(trace.dtype) if value.is_floating_point() else value
    prompt, prompt_mask = (x[:, : -settings.length] for x in (trace.tokens, trace.attention_mask))
    keep, logp = keep_mask(response, eos_token_id), logp.to(trace.dtype)
    return Rollout(
        prompt, prompt_mask, response, keep, step, logp, num_generations, settings, records
    )


# ------------------------------------------------------------------------------------------- replay
def steps_run(unmask_step: Int[Tensor, "B L"]) -> Int[Tensor, " B"]:
    """Steps until each row's end: those that a sampler with early stopping evaluates."""
    return unmask_step.amax(1) + 1


def network_calls(rollout: Rollout) -> int:
    """Number of (row, step) states that the network evaluates under early stopping.

    It counts states, whatever one costs: a ``Denoiser`` computes equal ones once, and a cache
    fewer positions of each.
    """
    return int(steps_run(rollout.unmask_step).sum())


def hidden_before(rollout: Rollout, step: int) -> Bool[Tensor, "B L"]:
    """The response positions that are [MASK] before ``step``: not yet revealed, or never."""
    return (rollout.unmask_step < 0) | (rollout.unmask_step >= step)


def state_before(rollout: Rollout, step: int, mask_token_id: int) -> Int[Tensor, "B PL"]:
    """The tokens, prompt and response, that the network saw at ``step``; from a row's last on, its
    final state."""
    response = rollout.response.masked_fill(hidden_before(rollout, step), mask_token_id)
    return torch.cat([rollout.prompt, response], 1)


def attention_mask(rollout: Rollout) -> Bool[Tensor, "B PL"]:
    """What ``encode`` takes beside a state: False at the padding of the prompt only."""
    return torch.cat([rollout.prompt_mask, torch.ones_like(rollout.keep)], 1)


# ------------------------------------------------------------------------------- what is refused
def check_positions(network: Any, width: int, length: int) -> None:
    """ValueError where prompt and response have more positions than the network was made for: it
    would run, on positions that it has never met."""
    most = getattr(getattr(network, "config", None), "max_position_embeddings", None)
    if most is not None and width + length > most:
        got = f"{length} after prompts of {width} tokens"
        allowed = f"up to {most - width}, as the model has {most} positions"
        raise ValueError(f"sampler.length: got {got}; allowed {allowed}")


def check_attention(model: Network, settings: Sampler) -> None:
    """ValueError unless ``settings`` describe the model's own attention, blocks or none: trained
    one way, it would run the other way, too, and answer worse without a word."""
    width = getattr(model, "block_length", None)
    own = "bidirectional" if width is None else "block_causal"
    if settings.attention != own:
        blocks = "" if width is None else f", block_length {width}"
        got = f"{settings.attention!r} for a {own.replace('_', '-')} model"
        raise ValueError(f"attention: got {got}; allowed {own}{blocks}")
    if width is not None and settings.block_length != width:
        allowed = f"{width}, that of the model's attention"
        raise ValueError(f"block_length: got {settings.block_length}; allowed {allowed}")
