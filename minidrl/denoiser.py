"""The network: transformers' own classes made bidirectional, from 0.3 M parameters on a laptop to LLaDA-8B.

A masked diffusion language model needs no architecture of its own. It is a Llama without the causal mask that predicts,
at every [MASK], the token that belongs there (in place: the logit at position i scores token i). ``FAMILIES`` says what
else a published checkpoint needs to become that: other names for the same weights (LLaDA), a shift by one position
(Dream), attention that stops at the end of a token's block (SDAR). No code of a checkpoint is ever downloaded or run.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BitsAndBytesConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
INDEX = "model.safetensors.index.json"
FILES = (  # of a checkpoint, beside its weights: no code, nothing pickled
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


# ------------------------------------------------------------------------------------------------------------ families
@dataclass(frozen=True)
class Family:
    """How the checkpoints of one ``model_type`` become one of transformers' own classes.

    config, network   these classes
    tokenizer         the class that reads vocab.json and merges.txt, where there is no tokenizer.json
    fields            fields of ``config`` -> keys of config.json, the first that has a value; empty: the file is ``config``'s
    must              settings that ``network`` has no word for -> the only value that it computes
    keys              parts of weight names, the checkpoint's -> transformers'; every one that occurs is replaced, in order
    shift             True: the network's output at position i - 1 predicts token i
    block_key         key of config.json that holds the block length of block-causal attention; None: bidirectional
    mask_token        the mask token's text, for a checkpoint whose files mark no token as the mask
    """

    config: type[PreTrainedConfig]
    network: type[PreTrainedModel]
    tokenizer: type[PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    must: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    shift: bool = False
    block_key: str | None = None
    mask_token: str | None = None


LLADA_FIELDS = {
    "vocab_size": ("embedding_size", "vocab_size"),
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "num_key_value_heads": ("n_kv_heads", "n_heads"),
    "intermediate_size": ("mlp_hidden_size",),
    "hidden_act": ("activation_type",),
    "rms_norm_eps": ("rms_norm_eps",),
    "max_position_embeddings": ("max_sequence_length",),
    "tie_word_embeddings": ("weight_tying",),
}
LLADA_MUST = {
    "architectures": ["LLaDAModelLM"],
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
    **dict.fromkeys(("alibi", "scale_logits", "attention_layer_norm", "input_emb_norm"), False),
    **dict.fromkeys(("include_bias", "include_qkv_bias", "bias_for_layer_norm"), False),
    **dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.0),
}
LLADA_KEYS = {
    "model.transformer.ff_out.": "lm_head.",  # the vocabulary head comes first: the blocks have an ff_out of their own
    "model.transformer.wte.": "model.embed_tokens.",
    "model.transformer.ln_f.": "model.norm.",
    "model.transformer.blocks.": "model.layers.",
    ".attn_norm.": ".input_layernorm.",
    ".ff_norm.": ".post_attention_layernorm.",
    ".q_proj.": ".self_attn.q_proj.",
    ".k_proj.": ".self_attn.k_proj.",
    ".v_proj.": ".self_attn.v_proj.",
    ".attn_out.": ".self_attn.o_proj.",
    ".ff_proj.": ".mlp.gate_proj.",  # the one that goes through SiLU
    ".up_proj.": ".mlp.up_proj.",
    ".ff_out.": ".mlp.down_proj.",
}
QWEN_FIELDS = {
    **{key: (key,) for key in ("vocab_size", *SIZES, "hidden_act", "rms_norm_eps", "max_position_embeddings")},
    "num_key_value_heads": ("num_key_value_heads", "num_attention_heads"),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
QWEN_MUST = {"rope_scaling": None, "use_sliding_window": False, "attention_dropout": 0.0}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # minidrl's own checkpoints, in transformers' own format; is_causal false is the bidirectional switch, and a
        # block_length makes attention block-causal.
        "llama": Family(LlamaConfig, LlamaForCausalLM, must={"is_causal": False}, block_key="block_length"),
        # LLaDA-8B-Base, -Instruct and LLaDA-1.5. Source: modeling_llada.py of ML-GSAI/LLaDA, commit 5975047, run on the
        # checkpoint of tests/golden/llada_tiny. Under bfloat16 the released code rotates queries and keys in float32 and
        # transformers in bfloat16, which moves logits by no more than bfloat16 itself does.
        "llada": Family(
            LlamaConfig,
            LlamaForCausalLM,
            fields=LLADA_FIELDS,
            must=LLADA_MUST,
            keys=LLADA_KEYS,
            mask_token="<|mdm_mask|>",
        ),
        # Dream-7B, Dream-Coder, DiffuCoder. Source: generation_utils.py of DreamLM/Dream, which shifts the logits by
        # torch.cat([logits[:, :1], logits[:, :-1]], 1).
        "Dream": Family(
            Qwen2Config,
            Qwen2ForCausalLM,
            Qwen2Tokenizer,
            fields=QWEN_FIELDS,
            must={"architectures": ["DreamModel"], **QWEN_MUST},
            shift=True,
            mask_token="<|mask|>",
        ),
        # SDAR, TraDo. Source: generate.py of JetAstra/SDAR, whose texts are whole blocks. There the end of a prompt that is not
        # stands in one block with the first tokens of the response. Here the response begins a block and the prompt's first
        # block is the shorter one, as in the code that trained TraDo (train/rl_sdar.py of Gen-Verse/dLLM-RL, commit 10b4fd1).
        "sdar": Family(
            Qwen3Config,
            Qwen3ForCausalLM,
            Qwen2Tokenizer,
            fields={**QWEN_FIELDS, "head_dim": ("head_dim",)},
            must={"architectures": ["SDARForCausalLM"], "attention_bias": False, **QWEN_MUST},
            block_key="block_size",
            mask_token="<|MASK|>",
        ),
    }
)


def _ours(name: str, family: Family) -> str:
    for theirs, ours in family.keys.items():
        name = name.replace(theirs, ours)
    return name


def _theirs(name: str, family: Family) -> str:
    for theirs, ours in family.keys.items():
        name = name.replace(ours, theirs)
    return name


# --------------------------------------------------------------------------------------------------------- the network
class Denoiser(nn.Module):
    """A bidirectional transformer in the two calls that sampler, estimators and pre-training share.

    ``encode`` runs the network body; ``head`` turns hidden states into logits. They are separate so that the vocabulary
    head is applied to the needed positions only: at 126k tokens it is the logits, not the body, that fill a GPU. In every
    family the hidden state of position i is the one that predicts token i.

    block_length   tokens of a block where attention is block-causal (SDAR); None: every token sees every other. The last token
                   of a text ends a block, and its first block is the one that may be shorter: after a prompt of any length,
                   the blocks are those of the response.
    files          the files of the checkpoint beside its weights, for ``save``; empty for minidrl's own format.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family = FAMILIES["llama"],
        block_length: int | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ):
        super().__init__()
        self.model, self.family, self.block_length, self.files = model, family, block_length, dict(files)
        self.mask_token_id: int = model.config.mask_token_id
        self.vocab_size: int = model.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    def encode(self, tokens: Int[Tensor, "N T"], attention_mask: Bool[Tensor, "N T"] | None) -> Float[Tensor, "N T D"]:
        """Hidden states of every position; ``attention_mask`` False marks padding, None says that there is none.

        Positions count real tokens only. Attention depends on their differences, so this changes nothing in exact arithmetic;
        but the rotary tables are float32, and a shift by the padding would be visible in the digits of a ratio.
        """
        _refuse_attention(self.model.config)
        position = None if attention_mask is None else (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        visible = attention_mask
        if self.block_length is not None:
            place = torch.arange(tokens.shape[1], device=self.device)[None] if position is None else position
            visible = block_causal(self._blocks(place), attention_mask)
        h = self._body(input_ids=tokens, attention_mask=visible, position_ids=position)
        return shifted(h, attention_mask) if self.family.shift else h

    def extend(
        self,
        tokens: Int[Tensor, "N W"],
        attention_mask: Bool[Tensor, "N T"],
        cache: DynamicCache,
        order: Int[Tensor, " T"] | None = None,
    ) -> Float[Tensor, "N W D"]:
        """Hidden states of W of T tokens, the others being in ``cache``; the W are added to it (``crop`` undoes that).

        ``order`` lists the T places in a text: first those in the cache, as they came there, then those of ``tokens``; None: as
        they stand. Exact for block-causal attention over whole blocks: no token sees a later block, so the past never changes,
        and the result is that of ``encode`` on all T tokens. Under bidirectional attention it is that where all T are computed
        (W = T); otherwise the cache holds keys and values of the texts from which it was computed, not of this one.
        In a family that shifts its predictions, token i is predicted at position i - 1, which must be among the W: the first
        position of a stretch of them is of no use, unless it is the text's. Block-causal models of that kind are refused.
        """
        _refuse_attention(self.model.config)
        if self.family.shift and self.block_length is not None:
            raise ValueError("cache: got a block-causal model whose predictions are shifted by one position; allowed none")
        position = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        visible = attention_mask[:, None, None].expand(-1, -1, attention_mask.shape[1], -1)
        if self.block_length is not None:
            visible = block_causal(self._blocks(position), attention_mask)
        order = torch.arange(attention_mask.shape[1], device=self.device) if order is None else order
        now = order[-tokens.shape[1] :]
        h = self.model.model(
            input_ids=tokens,
            attention_mask=visible[:, :, now][..., order],
            position_ids=position[:, now],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return shifted(h, attention_mask, now) if self.family.shift else h

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
        """Hidden states of ``noisy``, each block of it after the prompt and the blocks of ``clean`` before its own.

        One forward of P + 2 L tokens that equals L / block_length forwards of [prompt, clean blocks before k, noisy block k],
        in which prompt and clean tokens see what ``staircase_mask`` says of them under clean = ``clean_stream``. Position i of
        the result predicts token i.

        A block-causal model takes its own block length and clean_stream "block"; its prompt stays block-causal, and each of the
        forwards is then ``encode``. Raises ValueError for anything else, for a family that shifts its predictions, for lengths
        that do not divide, and for any attention implementation but sdpa.
        """
        _refuse_attention(self.model.config)
        start, length = prompt.shape[1], clean.shape[1]
        visible = staircase_mask(prompt_mask, length, block_length, clean=clean_stream)
        position = staircase_positions(prompt_mask, length)
        if self.family.shift:
            raise ValueError("shift: got True; allowed False, the row before a noisy block belongs to the clean stream")
        if self.block_length is not None:
            if block_length != (own := self.block_length):
                raise ValueError(f"block_length: got {block_length}; allowed {own}, that of the model's attention")
            if clean_stream != "block":
                raise ValueError(f"clean stream: got {clean_stream!r}; allowed 'block', as the model's attention")
            visible[..., :start, :start] &= block_causal(self._blocks(position[:, :start]), prompt_mask)
        tokens = torch.cat([prompt, clean, noisy], 1)
        return self._body(input_ids=tokens, attention_mask=visible, position_ids=position)[:, start + length :]

    def _body(self, **inputs: Tensor) -> Float[Tensor, "N T D"]:
        with _recomputing(self.model.model):
            return self.model.model(**inputs, use_cache=False).last_hidden_state

    def _blocks(self, position: Int[Tensor, "#N T"]) -> Int[Tensor, "#N T"]:
        """The number of each token's block: -1 for the last W real tokens, -2 for those before."""
        return (position - position[:, -1:] - 1).div(self.block_length, rounding_mode="floor")

    def head(self, h: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Logits in float32 at least. [MASK] gets -inf: a denoiser never answers with the question."""
        logits = self.model.lm_head(h)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        banned = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(banned, -torch.inf)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def _refuse_attention(config: PreTrainedConfig) -> None:
    """Only what is known to honour every mask: eager attention adds a boolean mask as 0 and 1, without a word."""
    if config._attn_implementation != "sdpa":
        raise ValueError(f"attn_implementation: got {config._attn_implementation!r}; allowed 'sdpa', which honours every mask")
    if getattr(config, "is_causal", True):
        raise ValueError("is_causal: got True; allowed False, a denoiser sees both sides of a [MASK]")


def block_causal(block: Int[Tensor, "#N T"], attention_mask: Bool[Tensor, "N T"] | None) -> Bool[Tensor, "#N 1 T T"]:
    """[n, 0, q, k] True: q sees k, a real token of q's own block or of an earlier one; ``block`` numbers the tokens' blocks."""
    visible = block[:, None, :] <= block[:, :, None]
    return (visible if attention_mask is None else visible & attention_mask[:, None, :])[:, None]


def staircase_mask(prompt_mask: Bool[Tensor, "N P"], length: int, block_length: int, *, clean: str) -> Bool[Tensor, "N 1 T T"]:
    """[n, 0, q, k] True: q sees k, in [prompt; clean response; noisy response], T = P + 2 ``length``. b counts blocks.

        clean q,  clean k     b_k <= b_q (clean "block"), or k no later than q (clean "causal")
        noisy q,  clean k     b_k < b_q: the stairs. With <= a noisy block would read its own answer
        noisy q,  noisy k     b_k == b_q
        clean q,  noisy k     never

    The prompt sees itself from both sides, and nothing else; all of the response sees it. Padding of the prompt is seen by
    no one; the rows of padding are of no use, and finite. Rows without padding have P^2 + 2 L P + L (L + block_length) pairs
    (clean "block"). What the clean stream sees has to be what it saw when the sampler computed its cache.

    Source: BD3-LM, arXiv 2503.09573 ([noisy; clean] there; the order is immaterial where positions are right) and the code of
    TraceRL, arXiv 2509.06949, which cuts the prompt into blocks too, have the stream "block". Accounts of StableDRL,
    arXiv 2603.06743, have "causal"; the paper itself was not read, and its released code has no staircase.
    Raises ValueError when the blocks do not divide the response, and for an unknown clean stream.
    """
    if block_length < 1 or length % block_length:
        raise ValueError(f"block_length: got {block_length}; allowed divisors of the response's length {length}")
    if clean not in ("block", "causal"):
        raise ValueError(f"clean stream: got {clean!r}; allowed 'block', 'causal'")
    prompt_length, device = prompt_mask.shape[1], prompt_mask.device
    place = torch.arange(-prompt_length, length, device=device).clamp(min=-1)  # the prompt is one block, the one before 0
    block = place.div(block_length, rounding_mode="floor")
    rank, noisy = block if clean == "block" else place, block[prompt_length:]
    context = rank[None, :] <= rank[:, None]
    stairs = block[None, :] < noisy[:, None]
    diagonal = noisy[None, :] == noisy[:, None]
    upper = torch.cat([context, context.new_zeros(len(block), length)], 1)
    pattern = torch.cat([upper, torch.cat([stairs, diagonal], 1)])
    return (pattern & F.pad(prompt_mask, (0, 2 * length), value=True)[:, None, :])[:, None]


def staircase_positions(prompt_mask: Bool[Tensor, "N P"], length: int) -> Int[Tensor, "N T"]:
    """Positions for ``staircase_mask``: real tokens are counted, and noisy token i stands where clean token i stands."""
    prompt = (prompt_mask.long().cumsum(-1) - 1).clamp(min=0)
    response = prompt_mask.sum(-1, keepdim=True) + torch.arange(length, device=prompt_mask.device)
    return torch.cat([prompt, response, response], 1)


def shifted(
    h: Float[Tensor, "N W D"], attention_mask: Bool[Tensor, "N T"] | None, column: Int[Tensor, " W"] | None = None
) -> Float[Tensor, "N W D"]:
    """The state of position i - 1 at position i; the first token keeps its own, as in Dream's released code.

    That code takes the first column for the first token. Here it is the first real token, so that a padded row equals the
    row alone; on rows without padding both are the same, and elsewhere they differ in this one position of the prompt.
    ``column`` says which W of the T columns ``h`` holds, in any order; None: all, in theirs. Where i - 1 is not among them,
    i keeps its own.
    """
    if column is None:
        before = torch.cat([h[:, :1], h[:, :-1]], 1)
    else:
        is_before = column[:, None] == column[None, :] + 1  # [i, j] True: j stands before i
        before = torch.where(is_before.any(1)[:, None], h[:, is_before.long().argmax(1)], h)
    if attention_mask is None:
        return before
    first = attention_mask & (attention_mask.long().cumsum(-1) == 1)
    return torch.where((first if column is None else first[:, column])[..., None], h, before)


def compiled(denoiser: Denoiser) -> Denoiser:
    """The same network (shared weights) whose body runs through torch.compile; the first call of a shape takes seconds."""
    other = copy.copy(denoiser)
    for name in ("encode", "encode_staircase"):
        other.__dict__[name] = torch.compile(getattr(denoiser, name))
    return other


def rounded(denoiser: Denoiser, dtype: torch.dtype) -> Denoiser:
    """A copy with weights and activations of another dtype. Buffers (the frequencies of the positions) keep theirs."""
    other = copy.deepcopy(denoiser)
    for p in other.parameters():
        p.data = p.data.to(dtype)
    return other.requires_grad_(False)


def build(sizes: dict, tokenizer: PreTrainedTokenizerBase, seed: int, block_length: int | None = None) -> Denoiser:
    """A freshly initialised network. ``sizes``: hidden_size, num_hidden_layers, num_attention_heads, intermediate_size.

    ``block_length``: tokens of a block, for block-causal attention; None: bidirectional.

    ``pad_token_id`` stays None: as ``padding_idx`` it would silently freeze one embedding row. Initialisation draws from a
    forked generator, so that the caller's global random state is untouched.
    """
    if sizes["hidden_size"] % (2 * sizes["num_attention_heads"]):
        raise ValueError(
            f"network.hidden_size: got {sizes['hidden_size']}; "
            f"allowed multiples of 2 x num_attention_heads ({sizes['num_attention_heads']})"
        )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **{key: sizes[key] for key in SIZES},
        num_key_value_heads=sizes["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
        is_causal=False,  # the bidirectional switch of transformers >= 5.2
        attn_implementation="sdpa",
        **({} if block_length is None else {"block_length": block_length}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU as well
        return Denoiser(LlamaForCausalLM(config), block_length=block_length)


@torch.no_grad()
def probe_loss(denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, text: str, prompt: str = "") -> float:
    """Mean -log p in nats of the tokens of ``text``, every fourth of them hidden at a time: were the weights really read?

    A network that was silently left at its initialisation scores about ln V whatever it is asked; one that was trained on
    text like ``text`` is far below. ``prompt`` stands before it and is never hidden, for a network that never had to write
    its prompts. Raises ValueError from half of ln V on, and for less than 8 tokens.
    """
    before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, text))
    if len(after) < 8:
        raise ValueError(f"text: got {text!r}, {len(after)} tokens; allowed from 8")
    ids = torch.tensor([before + after], device=denoiser.device).expand(4, -1)
    place = torch.arange(ids.shape[1], device=ids.device) - len(before)
    hidden = (place >= 0) & (place % 4 == torch.arange(4, device=ids.device)[:, None])
    h = denoiser.encode(ids.masked_fill(hidden, denoiser.mask_token_id), None)
    loss, bound = float(F.cross_entropy(denoiser.head(h[hidden]), ids[hidden])), math.log(denoiser.vocab_size) / 2
    if not loss < bound:
        raise ValueError(f"model: masked-token loss {loss:.2f} nats; allowed below {bound:.2f}, half of ln V: is it trained?")
    return loss


# ------------------------------------------------------------------------------- adapters, and memory traded for time
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
_PREFIX = "base_model.model."  # which peft writes before the name of a weight


def add_adapters(denoiser: Denoiser, *, rank: int, alpha: float, target_modules: list[str], seed: int, base: str) -> None:
    """LoRA into the network, in place: W x becomes W x + (alpha / rank) B A x, and only A and B are trained from here on.

    A is drawn from a generator of its own, B is 0: nothing has changed yet. Both are float32 whatever the base is stored in:
    in bfloat16 an update of 1e-6 would vanish. No dropout: the passes of the gradient must see one network.
    target_modules are names of linear layers; ``base`` is written down for whoever opens the saved adapters.
    Source: arXiv 2106.09685, as peft computes it. Raises ValueError for a target that matches no layer.
    """
    refuse_targets(denoiser.model, target_modules)
    words = {"r": rank, "lora_alpha": alpha, "target_modules": target_modules, "base_model_name_or_path": str(base)}
    _inject(denoiser, _peft().LoraConfig(**words, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"), seed)


def _inject(denoiser: Denoiser, config: Any, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        _peft().inject_adapter_in_model(config, denoiser.model)
    for p in denoiser.model.parameters():
        if p.requires_grad:  # the adapters, and nothing else
            p.data = p.data.float()


def refuse_targets(model: nn.Module, target_modules: list[str]) -> None:
    """ValueError for a target that is the name of no linear layer of the network; peft minds only if none of them is."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            allowed = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise ValueError(f"lora.target_modules: got {target!r}, which matches no module; allowed {allowed}")


def has_adapters(denoiser: nn.Module) -> bool:
    """True of a network with adapters."""
    return bool(getattr(getattr(denoiser, "model", None), "peft_config", None))


def without_adapters(denoiser: Denoiser) -> Denoiser:
    """The same network (shared weights) with its adapters switched off for the time of each call: the base, to the bit.

    It is the reference policy of a run with adapters, which therefore needs no second copy of 8 billion weights.
    """
    other = copy.copy(denoiser)
    for name in ("encode", "encode_staircase", "head"):
        other.__dict__[name] = partial(_switched_off, denoiser, name)
    return other


@torch.no_grad()
def _switched_off(denoiser: Denoiser, name: str, *args: Any, **words: Any) -> Tensor:
    layers = [module for module in denoiser.model.modules() if isinstance(module, _peft().tuners.tuners_utils.BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        return getattr(denoiser, name)(*args, **words)
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def checkpoint_activations(denoiser: Denoiser) -> None:
    """Keep one hidden state a layer for the backward pass and compute the rest of the layer again: the same gradient.

    transformers' own switch. It costs one more forward; ``Denoiser`` sees to it that only a forward with a graph pays.
    """
    model = denoiser.model
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # its name before transformers 5.20 or so
        model.gradient_checkpointing_enable({"use_reentrant": False})


@contextlib.contextmanager
def _recomputing(body: nn.Module):
    """transformers checkpoints a layer that is in training mode. The layers are, for a forward that builds a graph.

    What is in them stays in its mode, and so do sampling and scoring, where checkpointing would drop the cache.
    """
    layers = [layer for layer in body.layers if layer.gradient_checkpointing] if torch.is_grad_enabled() else []
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError("lora: adapters need the package peft, which is missing; pip install 'minidrl[lora]'") from None
    return peft


def _save_adapters(denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A folder that ``peft.PeftModel.from_pretrained(base, folder)`` opens, base being ``denoiser.model`` without adapters."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (config,) = denoiser.model.peft_config.values()
    config.save_pretrained(folder)
    weights = _peft().get_peft_model_state_dict(denoiser.model, save_embedding_layers=False)
    save_file({_PREFIX + name: value.contiguous() for name, value in weights.items()}, Path(folder) / ADAPTER_WEIGHTS)
    if not denoiser.files:
        tokenizer.save_pretrained(folder)
    for name, content in denoiser.files.items():
        if name not in ("config.json", "generation_config.json"):  # those of the base; with them, this would seem to be one
            (Path(folder) / name).write_bytes(content)


def _load_adapters(folder: Path, device: Any, dtype: torch.dtype | None) -> tuple[Denoiser, PreTrainedTokenizerBase]:
    """The base that the folder's config names, with the folder's adapters."""
    with _reading(folder):
        raw = json.loads((folder / ADAPTER_CONFIG).read_text())
        base, kind = str(raw.get("base_model_name_or_path")), raw.get("peft_type")
        config = _peft().LoraConfig.from_pretrained(folder) if kind == "LORA" else None
    if config is None or (Path(base) / ADAPTER_CONFIG).is_file():
        raise ValueError(f"model: got {str(folder)!r}, adapters of type {kind} for {base!r}; allowed LORA for a plain base")
    try:
        denoiser, tokenizer = load(base, device, dtype)
    except ValueError as error:
        raise ValueError(f"model: got {str(folder)!r}, adapters of a base that cannot be loaded: {error}") from None
    with _reading(folder):
        _inject(denoiser, config, 0)
    read_adapters(denoiser, folder)
    return denoiser.eval(), tokenizer


def read_adapters(denoiser: Denoiser, folder: Path) -> None:
    """The saved values into a network's adapters; ValueError unless they are the same weights in the same shapes."""
    with _reading(folder):
        weights = {name.removeprefix(_PREFIX): value for name, value in load_file(Path(folder) / ADAPTER_WEIGHTS).items()}
        own = _peft().get_peft_model_state_dict(denoiser.model, save_embedding_layers=False)
    wrong = {name: tuple(w.shape) for name, w in weights.items() if name not in own or own[name].shape != w.shape}
    wrong |= {name: "missing" for name in own if name not in weights}
    if wrong:
        raise ValueError(f"model: got {str(folder)!r}, whose adapters do not fit the network: {dict(list(wrong.items())[:2])}")
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)


# ------------------------------------------------------------------------------------------------------ save and load
def save(denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Network (safetensors) and tokenizer, in the format that they came in.

    minidrl's own format is transformers'. A checkpoint of another family goes back under its own weight names, in its own
    dtype or the one it was loaded with, with its config.json and its tokenizer files byte for byte; ``tokenizer`` is then not
    asked. Code files were never read and are not written: beside a copy of them, the released code loads the folder.
    Of a network with adapters only these are written, in peft's format, with the name of their base.
    """
    if has_adapters(denoiser):
        _save_adapters(denoiser, tokenizer, folder)
        return
    if not denoiser.files:
        with _quiet():
            denoiser.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    weights = denoiser.model.state_dict()
    if denoiser.model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    weights = {_theirs(name, denoiser.family): value for name, value in weights.items()}
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    for name, content in denoiser.files.items():
        (Path(folder) / name).write_bytes(content)


def load(
    source: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    block_length: int | None = None,
    quantize: bool = False,
) -> tuple[Denoiser, PreTrainedTokenizerBase]:
    """(denoiser in eval mode, tokenizer) of a folder written by ``save``, or of a LLaDA, Dream or SDAR checkpoint.

    source         a folder, or the name of a model on the Hub ("GSAI-ML/LLaDA-8B-Instruct"): its weights as safetensors,
                   its configuration and tokenizer files are downloaded once; its code is not. A folder of adapters is
                   loaded with the base that it names.
    dtype          of weights and activations: torch.float32, bfloat16 or float64; None: the one the weights are stored in.
    block_length   SDAR only: tokens of a block; None: what config.json says.
    quantize       True: the linear layers in 4 bits (NF4 with double quantisation, by bitsandbytes), to be used and not to be
                   trained; embedding, head and norms in ``dtype``.

    The ids of [MASK], end and padding and the chat template are the files'; the tokenizer carries them, and pads on the left.
    Raises ValueError in one line when the folder is no such checkpoint, or when a weight is missing, unknown, of another
    shape or not what the file holds: transformers would only warn and leave it random.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype: got {dtype}; allowed {', '.join(map(str, DTYPES))}")
    folder = _folder(source)
    if (folder / ADAPTER_CONFIG).is_file():
        return _load_adapters(folder, device, dtype)
    raw = _read_config(folder)
    family = FAMILIES[raw["model_type"]]
    block_length = _block_length(folder, raw, family, block_length)
    tokenizer = _read_tokenizer(folder, raw, family)
    with _reading(folder):
        config = _network_config(folder, raw, family, tokenizer.mask_token_id)
    _check_vocabulary(folder, config, tokenizer)
    model = _read_network(folder, config, family, dtype, device if quantize else None)
    files = {name: (folder / name).read_bytes() for name in FILES if family.fields and (folder / name).is_file()}
    return Denoiser(model if quantize else model.to(device), family, block_length, files).eval(), tokenizer


# The keys of config.json that say how large LLaDA-8B is. Source: the folders of -Base, -Instruct and LLaDA-1.5 on the Hub.
_LLADA_8B = {**LLADA_MUST, "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32}
_LLADA_8B |= {"n_kv_heads": 32, "mlp_hidden_size": 12288, "embedding_size": 126464, "vocab_size": 126464, "rms_norm_eps": 1e-5}
_LLADA_8B |= {"rope_theta": 500000.0, "max_sequence_length": 4096, "activation_type": "silu", "weight_tying": False}
_LLADA_8B |= {"mask_token_id": 126336, "eos_token_id": 126081, "torch_dtype": "bfloat16"}
PUBLISHED = dict.fromkeys(("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"), _LLADA_8B)


def describe(source: str | Path) -> tuple[PreTrainedConfig, Family, torch.dtype]:
    """(configuration, family, dtype of the stored weights) of a checkpoint, from its config.json alone: no weight is read.

    The published LLaDA-8B are known without a file. Raises ValueError for a folder or a name without a config.json.
    """
    known = source in PUBLISHED and not Path(source).exists()
    folder = Path(source) if known else _folder(source, ["config.json"])
    raw = PUBLISHED[source] if known else _read_config(folder)
    family = FAMILIES[raw["model_type"]]
    with _reading(folder):
        shape = _network_config(folder, raw, family, raw.get("mask_token_id") or 0)
        shape._attn_implementation = "sdpa"
        return shape, family, getattr(torch, raw.get("dtype") or raw.get("torch_dtype") or "float32")


def _folder(source: str | Path, patterns: Sequence[str] = (*FILES, "*.safetensors", INDEX)) -> Path:
    """A folder here as it is, or the download of what can only be the name of a model on the Hub."""
    folder = Path(source)
    if folder.parent.is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return folder
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise ValueError(f"model: got {source!r}, no folder here, and the Hub does not give it: {one_line(error)}") from None


def _read_config(folder: Path) -> dict:
    """config.json of a checkpoint that one of ``FAMILIES`` can compute."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model: got {str(folder)!r}, which holds no config.json; "
            "allowed a folder written by pretrain or train, or a checkpoint of LLaDA, Dream or SDAR"
        )
    try:
        raw = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"model: got {str(folder)!r}, whose config.json is no JSON: {error}") from None
    raw = {"is_causal": True, **raw} if isinstance(raw, dict) else {}
    name = raw.get("model_type")
    if name not in FAMILIES:
        allowed = f"a bidirectional llama (is_causal false), {', '.join(key for key in FAMILIES if key != 'llama')}"
        raise ValueError(f"model: got {str(folder)!r} with model_type {name!r}; allowed {allowed}")
    for key, value in FAMILIES[name].must.items():
        if (raw.get(key) or False) != (value or False):
            allowed = f"{value!r}, which transformers' {FAMILIES[name].network.__name__} computes"
            raise ValueError(f"model: got {str(folder)!r} with {key} {raw.get(key)!r}; allowed for {name} is {allowed}")
    return raw


def _block_length(folder: Path, raw: dict, family: Family, asked: int | None) -> int | None:
    own = not family.fields  # minidrl's own checkpoint: block-causal where it says so
    if asked is not None and (family.block_key is None or own):
        allowed = "None, its config.json says what its attention is" if own else "None, its attention has no blocks"
        raise ValueError(f"block_length: got {asked} for a {raw['model_type']}; allowed {allowed}")
    if family.block_key is None or (own and raw.get(family.block_key) is None):
        return None
    length = raw.get(family.block_key) if asked is None else asked
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"block_length: got {length!r} for {str(folder)!r}; allowed integers from 1 ({family.block_key})")
    return length


def _network_config(folder: Path, raw: dict, family: Family, mask_token_id: int) -> PreTrainedConfig:
    """The network's configuration, spelled out: what config.json says beside it cannot switch anything on.

    ``pad_token_id`` stays None: as ``padding_idx`` it would silently freeze one embedding row, in LLaDA that of the end token.
    """
    if not family.fields:
        config = family.config.from_pretrained(folder)
        config.mask_token_id = mask_token_id
        return config
    values = {ours: next((raw[key] for key in keys if raw.get(key) is not None), None) for ours, keys in family.fields.items()}
    for ours in values:
        if values[ours] is None:
            raise ValueError(f"config.json gives no {family.fields[ours][0]}")
    if raw.get("rope_theta") is None:
        raise ValueError("config.json gives no rope_theta")
    return family.config(
        **values,
        rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
        eos_token_id=raw.get("eos_token_id"),
        bos_token_id=None,
        pad_token_id=None,
        mask_token_id=mask_token_id,
        is_causal=False,
        use_cache=False,
    )


def _read_tokenizer(folder: Path, raw: dict, family: Family) -> PreTrainedTokenizerBase:
    """The tokenizer, padding on the left, with the tokens that only the other files of the checkpoint name."""
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else family.tokenizer
    with _reading(folder):
        tokenizer = kind.from_pretrained(folder, padding_side="left")
        generation = folder / "generation_config.json"
        named = raw | (json.loads(generation.read_text()) if generation.is_file() else {})
    named["mask_token_id"] = _mask_token_id(folder, raw, tokenizer, family)
    for name in ("mask_token", "eos_token", "pad_token"):
        index = named.get(f"{name}_id")
        index = index[0] if isinstance(index, list) and index else index
        if getattr(tokenizer, name) is None and isinstance(index, int) and index < len(tokenizer):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))
    return tokenizer


def _mask_token_id(folder: Path, raw: dict, tokenizer: PreTrainedTokenizerBase, family: Family) -> int:
    """As config.json has it, else as the tokenizer has it, else the id of the family's mask token."""
    config, told = raw.get("mask_token_id"), tokenizer.mask_token_id
    if config is not None and told not in (None, config):
        raise ValueError(f"model: got {str(folder)!r} with mask_token_id {config}; allowed {told}, as its tokenizer says")
    index = next((i for i in (config, told, tokenizer.get_vocab().get(family.mask_token)) if i is not None), None)
    if not isinstance(index, int) or not 0 <= index < len(tokenizer):
        allowed = f"the id of one of its tokenizer's {len(tokenizer)} tokens"
        raise ValueError(f"model: got {str(folder)!r} with mask_token_id {index}; allowed {allowed}")
    return index


def _check_vocabulary(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    size, mask = config.vocab_size, tokenizer.mask_token_id
    if mask >= size:
        raise ValueError(f"model: got {str(folder)!r} with mask_token_id {mask}; allowed from 0 to {size - 1}, its vocabulary")
    if len(tokenizer) > size:
        raise ValueError(f"model: got {str(folder)!r} with {len(tokenizer)} tokens in its tokenizer; allowed up to {size}")


def _read_network(
    folder: Path, config: PreTrainedConfig, family: Family, dtype: torch.dtype | None, quantize_on: Any = None
) -> PreTrainedModel:
    """The network with every weight of the files and no other; in 4 bits on the device ``quantize_on``."""
    shards = _shards(folder)
    how = {} if quantize_on is None else {"quantization_config": _four_bits(), "device_map": {"": str(quantize_on)}}
    with _reading(folder):
        model, info = family.network.from_pretrained(
            folder,
            config=config,
            key_mapping={re.escape(theirs): ours for theirs, ours in family.keys.items()} or None,
            dtype=dtype or "auto",
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **how,
        )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {kind: sorted(_theirs(str(key), family) for key in info[kind])[:3] for kind in kinds if info[kind]}
    if wrong:
        raise ValueError(f"model: got {str(folder)!r}, whose weights do not match its config: {wrong}")
    with _reading(folder):
        other = [name for path in shards for name in _misread(model, path, family)]
    if other:
        raise ValueError(f"model: got {str(folder)!r}, of which transformers did not read {', '.join(other[:3])}")
    return model


def _four_bits() -> BitsAndBytesConfig:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("quantize: 4 bits need the package bitsandbytes, which is missing; pip install 'minidrl[quantized]'")
    words = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    return BitsAndBytesConfig(load_in_4bit=True, **words)


def _shards(folder: Path) -> list[Path]:
    """The weight files; the ones that the index names must all be there."""
    if (folder / "model.safetensors").is_file() or not (folder / INDEX).is_file():
        return [folder / "model.safetensors"]
    with _reading(folder):
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"model: got {str(folder)!r}, which lacks {', '.join(missing)}, named by its {INDEX}")
    return [folder / name for name in names]


def _misread(model: PreTrainedModel, path: Path, family: Family) -> list[str]:
    """Weights of a file whose first row is not in the network: loading reports what it thinks it did, this looks."""
    state, wrong = model.state_dict(), []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            stored, read = file.get_slice(name)[:1], state[_ours(name, family)][:1]
            if read.dtype == torch.uint8:  # in 4 bits, which hold something near it
                continue
            if not torch.allclose(read, stored.to(read.dtype), rtol=0, atol=0, equal_nan=True):
                wrong.append(name)
    return wrong


@contextlib.contextmanager
def _reading(folder: Path):
    """What a library has to say about a file becomes one line."""
    try:
        with _quiet():
            yield
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"model: got {str(folder)!r}, which cannot be read: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """The message of an error, however many lines a library gave it."""
    return " ".join(str(error).split())


@contextlib.contextmanager
def _quiet():
    """Without transformers' progress bars and reports: what they say is either of no interest or raised as one line."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
