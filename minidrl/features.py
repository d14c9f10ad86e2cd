"""From a network to features: the small per-token tensors through which alone a loss touches it.

Section 4 of algorithms.py says what they are. Here states become inputs, hidden states are selected
before the vocabulary head, and go through it in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minidrl import algorithms as alg
from minidrl.algorithms import Plan, Rollout

FEATURES = ("logp", "entropy", "order_logp", "position_logp", "topk_logp", "kl_ref")
# Logits that exist at a time: 67 MB in float32, the rows of 132 positions of LLaDA.
HEAD_NUMBERS = 1 << 24
States = Int[Tensor, " S"]  # flat numbers k*B + b of a plan's states


class Network(Protocol):
    """What estimators and sampler need of a network: its body, its head, and two numbers.

    ``Denoiser`` is one, from 0.3 M parameters to LLaDA-8B; so is the oracle's table. A block-causal
    one has ``block_length`` and ``encode_staircase``, too, and ``extend`` where the sampler keeps
    keys and values.
    """

    mask_token_id: int
    vocab_size: int

    def encode(
        self, tokens: Int[Tensor, "S PL"], attention_mask: Bool[Tensor, "S PL"] | None
    ) -> Float[Tensor, "S PL D"]:
        """Hidden states of every position; the one at position i predicts token i."""

    def head(self, h: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Logits, float32 at least; [MASK] has -inf."""


def plan_inputs(
    rollout: Rollout, plan: Plan, states: States, mask_token_id: int
) -> tuple[Tensor, Tensor]:
    """Network inputs (tokens, attention mask), both (S, P+L), of the flat state numbers k*B + b."""
    # State k*B + b is the text of answer b with what its k-th state hides.
    row = states % rollout.response.shape[0]
    text = torch.cat([rollout.prompt, rollout.response], 1)[row]
    tokens = text.masked_fill(plan.hidden.flatten(0, 1)[states], mask_token_id)
    return tokens, torch.cat([rollout.prompt_mask, torch.ones_like(rollout.keep)], 1)[row]


def state_chunks(plan: Plan, size: int) -> Iterator[States]:
    """The plan's flat state numbers that need the network, in pieces of at most ``size``
    forwards."""
    # A forward serves M = plan.blocks states of one answer (1, but for a staircase): the states
    # forward * M .. forward * M + M - 1, whose flat numbers are k*B + b.
    forward, row = plan.needed.nonzero(as_tuple=True)
    states = forward[:, None] * plan.blocks + torch.arange(plan.blocks, device=row.device)
    if len(row):  # the split of nothing is one empty part
        for part in (states * plan.valid.shape[1] + row[:, None]).split(size):
            yield part.flatten()


def features(
    model: Network,
    rollout: Rollout,
    plan: Plan,
    *,
    temperature: float,
    names: tuple[str, ...] = ("logp",),
    size: int = 256,
    reference: Network | None = None,
    graph: bool = False,
) -> dict[str, Float[Tensor, "K B L *M"]]:
    """All features of a plan. Without a ``graph``: what anchors, references and the first of two
    passes need."""
    shape = plan.scored.shape
    how = {"temperature": temperature, "names": names, "reference": reference}
    out: dict[str, Tensor] = {}
    with torch.set_grad_enabled(graph):
        for states in state_chunks(plan, size):
            for name, value in state_features(model, rollout, plan, states, **how).items():
                blank = value.new_zeros((shape[0] * shape[1], *value.shape[1:]))
                out.setdefault(name, blank)[states] = value
    nothing = rollout.logp.new_zeros(shape).flatten(0, 1)  # of a plan that needs no forward
    return {name: out.get(name, nothing).unflatten(0, shape[:2]) for name in names}


def state_features(
    model: Network,
    rollout: Rollout,
    plan: Plan,
    states: States,
    *,
    temperature: float,
    names: tuple[str, ...] = ("logp",),
    reference: Network | None = None,
) -> dict[str, Float[Tensor, "S L *M"]]:
    """The features (4.1) at the scored positions of S states, 0 elsewhere; order_logp (4.2), with
    a threshold (4.5), and position_logp (4.4).

    The vocabulary head is applied where it is needed only, to some rows at a time. S flat state
    numbers k*B + b, in any order (of a staircase: a forward's M states in a row, as `state_chunks`
    gives them). How S is cut changes nothing. Units: nats.
    """
    # 1. Which token stands at each scored position: that of the answer, or the plan's own.
    row, scored = states % rollout.response.shape[0], plan.scored.flatten(0, 1)[states]
    targets = rollout.response[row] if plan.targets is None else plan.targets.flatten(0, 1)[states]
    # 2. The network, and of its hidden states those at scored positions (R of them). ``most``, how
    #    many there may be, is a number of the plan: all processes split the head alike.
    h = _encode(model, rollout, plan, states)
    most = len(states) * int(plan.scored.sum(-1).amax())
    rows = {"h": _at(h, scored, plan), "target": targets[scored]}
    if "topk_logp" in names:
        rows["topk_ids"] = alg.record(rollout, "topk_ids")[row][scored]
    if "kl_ref" in names:
        with torch.no_grad():
            rows["their_h"] = _at(_encode(reference, rollout, plan, states), scored, plan)

    # 3. The vocabulary head, a part of the rows at a time, and what is read off its logits. The
    #    choice of positions also compares the confidence of each revealed token (4.2), or its
    #    logit (4.4).
    needs = {"order_logp": "confidence", "position_logp": "logit"}
    wanted = (*names, *(extra for name, extra in needs.items() if name in names))

    def read(*, h: Tensor, target: Tensor, topk_ids=None, their_h=None) -> dict[str, Tensor]:
        with torch.no_grad():
            theirs = None if their_h is None else reference.head(their_h)
        how = {"temperature": temperature, "names": wanted}
        how |= {"topk_ids": topk_ids, "reference_logits": theirs}
        return alg.token_features(model.head(h), target, **how)

    values = _in_parts(read, rows, head_parts(most, model.vocab_size))
    # 4. The factors of the choice of positions look at the hidden positions that were *not* chosen.
    if "order_logp" in names:
        confidence = _spread(values.pop("confidence"), scored)
        order = _order_logp(model, rollout, plan, states, h, confidence, temperature)
        values["order_logp"] = order[scored]
    if "position_logp" in names:
        own = _spread(values.pop("logit"), scored)
        values["position_logp"] = _position_logp(model, rollout, plan, states, h, own)[scored]
    # 5. Back to the places in the answer, 0 elsewhere.
    return {name: _spread(values[name], scored) for name in names}


def _encode(model: Network, rollout: Rollout, plan: Plan, states: States) -> Float[Tensor, "J L D"]:
    if plan.block_length is not None:
        return _staircase(model, rollout, plan, states)
    tokens, attention_mask = plan_inputs(rollout, plan, states, model.mask_token_id)
    return model.encode(tokens, attention_mask)[:, rollout.prompt.shape[1] :]


def _staircase(
    model: Network, rollout: Rollout, plan: Plan, states: States
) -> Float[Tensor, "J L D"]:
    # Each forward's noisy response: block m hides what the m-th of its M states hides there.
    hidden = plan.hidden.flatten(0, 1)[states][:, rollout.prompt.shape[1] :]
    by_block = hidden.unflatten(0, (-1, plan.blocks))
    own = alg.block_numbers(rollout).expand(len(by_block), 1, -1)
    hidden = by_block.gather(1, own)[:, 0]
    row = states[:: plan.blocks] % len(rollout.response)
    prompt, prompt_mask = rollout.prompt[row], rollout.prompt_mask[row]
    clean = rollout.response[row]
    noisy = clean.masked_fill(hidden, model.mask_token_id)
    how = {"block_length": plan.block_length, "clean_stream": "block"}
    return model.encode_staircase(prompt, prompt_mask, clean, noisy, **how)


def _at(h: Float[Tensor, "J L D"], where: Bool[Tensor, "S L"], plan: Plan) -> Float[Tensor, "R D"]:
    # A staircase's forward has each block at that block's own state.
    return h[where.unflatten(0, (-1, plan.blocks)).any(1)]


def head_parts(rows: int, vocab_size: int) -> int:
    """In how many parts the vocabulary head is applied to so many rows; 0 for none."""
    return math.ceil(rows * vocab_size / HEAD_NUMBERS)


def _in_parts(
    read: Callable[..., dict[str, Tensor]], rows: dict[str, Tensor], count: int
) -> dict[str, Tensor]:
    # ``count`` is known of the whole plan: where processes share weights, all must call the head
    # equally often. With a graph, the logits of a part are computed again on the way back, so that
    # those of one part exist at a time.
    if count > 1 and torch.is_grad_enabled():
        read = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False)
    columns = (column.tensor_split(max(1, count)) for column in rows.values())
    values = [read(**dict(zip(rows, part, strict=True))) for part in zip(*columns, strict=True)]
    return {name: torch.cat([value[name] for value in values]) for name in values[0]}


def _order_logp(
    model: Network,
    rollout: Rollout,
    plan: Plan,
    states: States,
    h,
    confidence: Float[Tensor, "S L"],
    temperature: float,
) -> Float[Tensor, "S L"]:
    # (4.2) The step revealed the scored positions and passed over the other candidates: each must
    # have proposed a token less confident than the least confident that was revealed (``limit``;
    # ties go to the earlier position), or than tau, with a threshold (4.5).
    scored = plan.scored.flatten(0, 1)[states]
    passed = _passed_over(rollout, plan, states)
    limit, later = alg.confidence_to_beat(confidence, scored, passed)
    tau = rollout.sampler.threshold
    if tau is not None:
        limit, later = alg.threshold_to_beat(limit, later, threshold=tau)

    def read(*, h: Tensor, limit: Tensor, later: Tensor) -> dict[str, Tensor]:
        return {"log_f": alg.log_passed_over(model.head(h), limit, later, temperature=temperature)}

    # log F of each: the chance of such a proposal, from its own logits.
    most = len(states) * rollout.sampler.block_length
    rows = {"h": _at(h, passed, plan), "limit": limit, "later": later}
    log_f = _in_parts(read, rows, head_parts(most, model.vocab_size))["log_f"]
    order = alg.order_logp(log_f, scored, passed)
    if tau is None:
        return order
    return alg.threshold_logp(order, confidence, scored, threshold=tau)


def _position_logp(
    model: Network, rollout: Rollout, plan: Plan, states: States, h, own: Float[Tensor, "S L"]
) -> Float[Tensor, "S L"]:
    # (4.4) A softmax over positions: the revealed token's logit against the largest logit of each
    # candidate that was passed over.
    scored = plan.scored.flatten(0, 1)[states]
    passed = _passed_over(rollout, plan, states)
    most, rows = len(states) * rollout.sampler.block_length, {"h": _at(h, passed, plan)}

    def read(*, h: Tensor) -> dict[str, Tensor]:
        return {"best": model.head(h).max(-1).values}

    best = _in_parts(read, rows, head_parts(most, model.vocab_size))["best"]
    return alg.position_logp(own, best, scored, passed)


def _passed_over(rollout: Rollout, plan: Plan, states: States) -> Bool[Tensor, "S L"]:
    # Where the step drew a token and did not reveal it: the other hidden positions of the current
    # block, in the order that compares these tokens.
    hidden = plan.hidden.flatten(0, 1)[states][:, rollout.prompt.shape[1] :]
    if rollout.sampler.order != "low_confidence":
        return torch.zeros_like(hidden)
    block, scored = alg.block_numbers(rollout), plan.scored.flatten(0, 1)[states]
    current = (block * scored).amax(-1, keepdim=True)
    return hidden & (block == current) & scored.any(-1, keepdim=True) & ~scored


def _spread(values: Float[Tensor, "R *M"], where: Bool[Tensor, "S L"]) -> Float[Tensor, "S L *M"]:
    out = values.new_zeros((*where.shape, *values.shape[1:]))
    return out.masked_scatter(where.reshape(*where.shape, *(1 for _ in values.shape[1:])), values)
