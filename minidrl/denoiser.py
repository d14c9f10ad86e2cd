"""The network: transformers' own classes made bidirectional, from 0.3 M parameters to LLaDA-8B.

A masked diffusion language model needs no architecture of its own. It is a Llama without the causal
mask that predicts, at every [MASK], the token that belongs there (in place: the logit at position i
scores token i). What a published checkpoint needs to become that stands in run/families.py.

Read ``encode`` and ``head``: sampler, estimators and pre-training need no more. ``extend`` serves
a cache, ``encode_staircase`` the likelihoods that score all blocks of a response in one forward.
The network without its adapters (run/adapters.py), and layers that are computed twice to save
memory, come last. N rows of T tokens, D numbers in a hidden state, V tokens in the vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from minidrl.algorithms import block_causal, staircase_mask, staircase_positions

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


# -------------------------------------------------------------------------------------- the network
class Denoiser(nn.Module):
    """A bidirectional transformer in the two calls that sampler, estimators and pre-training share.

    ``encode`` runs the network body; ``head`` turns hidden states into logits. They are separate so
    that the vocabulary head is applied to the needed positions only: at 126k tokens it is the
    logits, not the body, that fill a GPU. In every family the hidden state of position i is the one
    that predicts token i.

    block_length   tokens of a block where attention is block-causal (SDAR); None: every token sees
                   every other. The last token of a text ends a block, and its first block is the
                   one that may be shorter: after a prompt of any length, the blocks are those of
                   the response.
    files          the files of the checkpoint beside its weights, for ``save``; empty for
                   minidrl's own format.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Any = None,
        block_length: int | None = None,
        files: dict[str, bytes] | None = None,
    ):
        super().__init__()
        self.model, self.family = model, family
        self.block_length, self.files = block_length, files or {}
        self.mask_token_id: int = model.config.mask_token_id
        self.vocab_size: int = model.config.vocab_size

    @property
    def shift(self) -> bool:
        """True where the network's output at position i - 1 predicts token i."""
        return self.family is not None and self.family.shift

    @property
    def device(self) -> torch.device:
        return self.model.device

    def encode(
        self, tokens: Int[Tensor, "N T"], attention_mask: Bool[Tensor, "N T"] | None
    ) -> Float[Tensor, "N T D"]:
        """Hidden states of every position; ``attention_mask``: False at padding, None: no padding.

        Equal rows are computed once. The responses of a prompt begin as one text and part as tokens
        are revealed: more than half of a rollout's states, and of the states of an update, can be
        repetitions. Exact up to rounding, gradient included: that of a shared row is the sum over
        the rows that share it.
        """
        if attention_mask is not None and attention_mask.all():
            attention_mask = None  # one table of positions serves all rows
        # What stands under padding tells no rows apart: there -1.
        text = tokens if attention_mask is None else tokens.masked_fill(~attention_mask, -1)
        distinct, place = text.unique(dim=0, return_inverse=True)  # (M, T), (N,)
        if len(distinct) == len(text):
            return self._encode(tokens, attention_mask)
        real = None if attention_mask is None else distinct >= 0
        return self._encode(distinct.clamp(min=0), real).index_select(0, place)

    def _encode(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        # Positions count real tokens only. Attention depends on their differences, so this changes
        # nothing in exact arithmetic; but the rotary tables are float32, and a shift by the padding
        # would be visible in the digits of a ratio.
        position, visible = None, attention_mask
        if attention_mask is not None:
            position = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        if self.block_length is not None:  # SDAR: a block sees itself and the earlier ones
            column = torch.arange(tokens.shape[1], device=self.device)[None]
            place = column if position is None else position
            visible = block_causal(self._blocks(place), attention_mask)
        h = self._body(tokens, visible, position)
        return shifted(h, attention_mask) if self.shift else h  # Dream: i - 1 predicts i

    def head(self, h: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Logits, float32 at least. [MASK] has -inf: no denoiser answers with the question.

        The zero masking probabilities of MDLM's SUBS parameterization (arXiv 2406.07524).
        """
        logits = self.model.get_output_embeddings()(h)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        banned = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(banned, -torch.inf)

    def extend(
        self,
        tokens: Int[Tensor, "N W"],
        attention_mask: Bool[Tensor, "N T"],
        cache: DynamicCache,
    ) -> Float[Tensor, "N W D"]:
        """Hidden states of the last W of T tokens, the others being in ``cache``, to which the W
        are added: a forward with a KV cache, which ``crop`` undoes.

        For block-causal attention over whole blocks, where it is exact: no token sees a later
        block, so the past never changes. Where predictions are shifted, the first of the W has its
        own state, as the one before it is not computed.
        """
        now, position = tokens.shape[1], (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        visible = block_causal(self._blocks(position), attention_mask)  # of all T: (N, 1, T, T)
        h = self._body(tokens, visible[:, :, -now:], position[:, -now:], cache)
        return shifted(h, attention_mask[:, -now:]) if self.shift else h

    def encode_staircase(
        self,
        prompt: Int[Tensor, "N P"],
        prompt_mask: Bool[Tensor, "N P"],
        clean: Int[Tensor, "N L"],
        noisy: Int[Tensor, "N L"],
        *,
        block_length: int,
        clean_stream: str,
    ) -> Float[Tensor, "N L D"]:
        """Hidden states of ``noisy``, each block after the prompt and the earlier ``clean`` blocks.

        One forward of P + 2 L tokens that equals L / block_length forwards of [prompt, clean blocks
        before k, noisy block k], in which prompt and clean tokens see what ``staircase_mask`` says
        of them under clean = ``clean_stream``. Position i of the result predicts token i.

        A block-causal model takes its own block length and clean_stream "block"; its prompt stays
        block-causal, and each of the forwards is then ``encode``.
        """
        start, length = prompt.shape[1], clean.shape[1]
        visible = staircase_mask(prompt_mask, length, block_length, clean=clean_stream)
        position = staircase_positions(prompt_mask, length)
        if self.block_length is not None:
            blocks = self._blocks(position[:, :start])
            visible[..., :start, :start] &= block_causal(blocks, prompt_mask)
        tokens = torch.cat([prompt, clean, noisy], 1)  # (N, P + 2 L)
        h = self._body(tokens, visible, position)
        noisy = h[:, start + length :]
        if not self.shift:
            return noisy
        # The state before a token predicts it: within a block a noisy one, and at its beginning the
        # last that the block sees, which is clean, or the prompt's.
        place = torch.arange(length, device=h.device)
        begins = (place % block_length == 0) & ((place > 0) | prompt_mask.any(1, keepdim=True))
        before = h.roll(1, 1)[:, start : start + length]
        return torch.where(begins[..., None], before, shifted(noisy, None))

    def _body(
        self,
        tokens: Tensor,
        visible: Tensor | None,
        position: Tensor | None,
        cache: DynamicCache | None = None,
    ) -> Float[Tensor, "N T D"]:
        config = self.model.config
        if config._attn_implementation != "sdpa":  # eager adds a boolean mask as 0 and 1
            got = f"{config._attn_implementation!r}; allowed 'sdpa', which honours every mask"
            raise ValueError(f"attn_implementation: got {got}")
        if getattr(config, "is_causal", True):
            allowed = "False, a denoiser sees both sides of a [MASK]"
            raise ValueError(f"is_causal: got True; allowed {allowed}")
        head = getattr(self.model, "head", None)  # ModernBERT's, in front of the vocabulary's
        where = {"attention_mask": visible, "position_ids": position}
        kept = {"past_key_values": cache, "use_cache": cache is not None}
        with _recomputing(self.model.model):
            h = self.model.model(input_ids=tokens, **where, **kept).last_hidden_state
        return h if head is None else head(h)

    def _blocks(self, position: Int[Tensor, "#N T"]) -> Int[Tensor, "#N T"]:
        """The number of each token's block: -1 for the last W real tokens, -2 for those before."""
        return (position - position[:, -1:] - 1).div(self.block_length, rounding_mode="floor")

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def shifted(
    h: Float[Tensor, "N T D"], attention_mask: Bool[Tensor, "N T"] | None
) -> Float[Tensor, "N T D"]:
    """Logit shift by one, as in Dream: the state of i - 1 at position i; the first token keeps its
    own.

    Dream's code takes the first column for the first token. Here it is the first real token, so
    that a padded row equals the row alone.
    """
    before = torch.cat([h[:, :1], h[:, :-1]], 1)
    if attention_mask is None:
        return before
    first = attention_mask & (attention_mask.long().cumsum(-1) == 1)
    return torch.where(first[..., None], h, before)


def compiled(denoiser: Denoiser) -> Denoiser:
    """The same network (shared weights) through torch.compile; a new shape takes seconds."""
    other = copy.copy(denoiser)
    for name in ("_encode", "encode_staircase"):
        other.__dict__[name] = torch.compile(getattr(denoiser, name))
    return other


def causal(denoiser: Denoiser) -> Denoiser:
    """The same network (shared weights) under a causal mask: blocks of one token. Where predictions
    are shifted, that is the language model from which the checkpoint was converted."""
    other = copy.copy(denoiser)
    other.block_length = 1
    return other


def rounded(denoiser: Denoiser, dtype: torch.dtype) -> Denoiser:
    """A copy in another dtype. Buffers (the frequencies of the positions) keep theirs."""
    other = copy.deepcopy(denoiser)
    for p in other.parameters():
        p.data = p.data.to(dtype)
    return other.requires_grad_(False)


def build(
    sizes: dict, tokenizer: PreTrainedTokenizerBase, seed: int, block_length: int | None = None
) -> Denoiser:
    """A freshly initialised network of ``sizes``, which has the keys ``SIZES``; with a
    ``block_length``, block-causal. The caller's global random state is untouched."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if hidden % (2 * heads):
        allowed = f"multiples of 2 x num_attention_heads ({heads})"
        raise ValueError(f"network.hidden_size: got {hidden}; allowed {allowed}")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **{key: sizes[key] for key in SIZES},
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=None,  # as padding_idx it would silently freeze one embedding row
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
        is_causal=False,  # the bidirectional switch of transformers >= 5.2
        attn_implementation="sdpa",
        **({} if block_length is None else {"block_length": block_length}),
    )
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed every GPU as well.
        torch.default_generator.manual_seed(seed)
        return Denoiser(LlamaForCausalLM(config), block_length=block_length)


@torch.no_grad()
def probe_loss(
    denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, text: str, prompt: str = ""
) -> float:
    """Mean -log p (nats) of the tokens of ``text``, every fourth hidden: were the weights read?

    A network that was silently left at its initialisation scores about ln V whatever it is asked;
    one that was trained on text like ``text`` is far below. ValueError from half of ln V on.
    ``prompt`` stands before the text and is never hidden: not every network learnt to write it.
    """
    before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, text))
    ids = torch.tensor([before + after], device=denoiser.device).expand(4, -1)
    place = torch.arange(ids.shape[1], device=ids.device) - len(before)
    hidden = (place >= 0) & (place % 4 == torch.arange(4, device=ids.device)[:, None])
    h = denoiser.encode(ids.masked_fill(hidden, denoiser.mask_token_id), None)
    loss = float(F.cross_entropy(denoiser.head(h[hidden]), ids[hidden]))
    bound = math.log(denoiser.vocab_size) / 2
    if not loss < bound:
        allowed = f"below {bound:.2f}, half of ln V: is it trained?"
        raise ValueError(f"model: masked-token loss {loss:.2f} nats; allowed {allowed}")
    return loss


# ------------------------------------------- the network as it was, and memory traded for time
def without_adapters(denoiser: Denoiser) -> Denoiser:
    """The same network (shared weights) with its adapters off during a call: the base, to the bit.

    The reference policy of a run with adapters needs no second copy of 8 billion weights.
    """
    other = copy.copy(denoiser)
    for name in ("encode", "encode_staircase", "head"):
        other.__dict__[name] = partial(_switched_off, denoiser, name)
    return other


@torch.no_grad()
def _switched_off(denoiser: Denoiser, name: str, *args: Any, **words: Any) -> Tensor:
    layers = [module for module in denoiser.model.modules() if hasattr(module, "base_layer")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        return getattr(denoiser, name)(*args, **words)
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def checkpoint_activations(denoiser: Denoiser) -> None:
    """Keep a hidden state a layer, and compute the rest again on the way back: the same gradient.

    Gradient checkpointing by transformers' own switch, at the cost of one more forward.
    """
    model = denoiser.model
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # its name before transformers 5.20 or so
        model.gradient_checkpointing_enable({"use_reentrant": False})


@contextlib.contextmanager
def _recomputing(body: nn.Module):
    """transformers checkpoints a layer in training mode: they are, for a forward with a graph. What
    is in them stays in its mode, and so does sampling, where checkpointing would drop the cache.
    """
    graph = torch.is_grad_enabled()
    layers = [layer for layer in body.layers if graph and layer.gradient_checkpointing]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of those that an optimiser updates, in its order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
