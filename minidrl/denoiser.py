"""The network: transformers' own classes made bidirectional, from 0.3 M parameters on a laptop to LLaDA-8B.

A masked diffusion language model needs no architecture of its own. It is a Llama without the causal mask that predicts,
at every [MASK], the token that belongs there (in place: the logit at position i scores token i). ``FAMILIES`` says what
else a published checkpoint needs to become that: other names for the same weights (LLaDA), a shift by one position
(Dream), attention that stops at the end of a token's block (SDAR). No code of a checkpoint is ever downloaded or run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
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
        # minidrl's own checkpoints, in transformers' own format; is_causal false is the bidirectional switch.
        "llama": Family(LlamaConfig, LlamaForCausalLM, must={"is_causal": False}),
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
        # SDAR, TraDo. Source: generate.py of JetAstra/SDAR: blocks are counted from the first token of the prompt.
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

    block_length   tokens of a block where attention is block-causal (SDAR); None: every token sees every other.
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
            count = torch.arange(tokens.shape[1], device=tokens.device)[None] if position is None else position
            visible = block_causal(count, attention_mask, self.block_length)
        h = self.model.model(input_ids=tokens, attention_mask=visible, position_ids=position, use_cache=False).last_hidden_state
        return shifted(h, attention_mask) if self.family.shift else h

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

        A block-causal model takes its own block length, clean_stream "block" and prompts of whole blocks; its prompt stays
        block-causal, and each of the forwards is then ``encode``. Raises ValueError for anything else, for a family that
        shifts its predictions, for lengths that do not divide, and for any attention implementation but sdpa.
        """
        _refuse_attention(self.model.config)
        start, length = prompt.shape[1], clean.shape[1]
        visible = staircase_mask(prompt_mask, length, block_length, clean=clean_stream)
        position = staircase_positions(prompt_mask, length)
        if self.family.shift:
            raise ValueError("shift: got True; allowed False, the row before a noisy block belongs to the clean stream")
        if self.block_length is not None:
            _refuse_blocks(self.block_length, prompt_mask, block_length, clean_stream)
            visible[..., :start, :start] &= block_causal(position[:, :start], prompt_mask, block_length)
        tokens = torch.cat([prompt, clean, noisy], 1)
        h = self.model.model(input_ids=tokens, attention_mask=visible, position_ids=position, use_cache=False).last_hidden_state
        return h[:, start + length :]

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


def block_causal(
    position: Int[Tensor, "#N T"], attention_mask: Bool[Tensor, "N T"] | None, block_length: int
) -> Bool[Tensor, "#N 1 T T"]:
    """[n, 0, q, k] True: q sees k, a real token of q's own block of ``block_length`` positions or of an earlier one.

    Blocks are counted from the first real token, as SDAR counts them: a prompt that ends inside a block shares this block
    with the first tokens of the response.
    """
    block = position // block_length
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


def _refuse_blocks(own: int, prompt_mask: Bool[Tensor, "N P"], block_length: int, clean_stream: str) -> None:
    """A block-causal model was trained with one block length, counted from the first token of the prompt."""
    if block_length != own:
        raise ValueError(f"block_length: got {block_length}; allowed {own}, that of the model's attention")
    if clean_stream != "block":
        raise ValueError(f"clean stream: got {clean_stream!r}; allowed 'block', as the model's attention")
    partial = [n for n in prompt_mask.sum(1).tolist() if n % own]
    if partial:
        raise ValueError(f"prompt: got {partial[0]} tokens; allowed multiples of the model's block_length {own}, whole blocks")


def shifted(h: Float[Tensor, "N T D"], attention_mask: Bool[Tensor, "N T"] | None) -> Float[Tensor, "N T D"]:
    """The state of position i - 1 at position i; the first token keeps its own, as in Dream's released code.

    That code takes the first column for the first token. Here it is the first real token, so that a padded row equals the
    row alone; on rows without padding both are the same, and elsewhere they differ in this one position of the prompt.
    """
    before = torch.cat([h[:, :1], h[:, :-1]], 1)
    if attention_mask is None:
        return before
    first = attention_mask & (attention_mask.long().cumsum(-1) == 1)
    return torch.where(first[..., None], h, before)


def compiled(denoiser: Denoiser) -> Denoiser:
    """The same network (shared weights) whose body runs through torch.compile; the first call of a shape takes seconds."""
    other = copy.copy(denoiser)
    other.__dict__["encode"] = torch.compile(denoiser.encode)
    return other


def rounded(denoiser: Denoiser, dtype: torch.dtype) -> Denoiser:
    """A copy with weights and activations of another dtype. Buffers (the frequencies of the positions) keep theirs."""
    other = copy.deepcopy(denoiser)
    for p in other.parameters():
        p.data = p.data.to(dtype)
    return other.requires_grad_(False)


def build(sizes: dict, tokenizer: PreTrainedTokenizerBase, seed: int) -> Denoiser:
    """A freshly initialised network. ``sizes``: hidden_size, num_hidden_layers, num_attention_heads, intermediate_size.

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
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU as well
        return Denoiser(LlamaForCausalLM(config))


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


# ------------------------------------------------------------------------------------------------------ save and load
def save(denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Network (safetensors) and tokenizer, in the format that they came in.

    minidrl's own format is transformers'. A checkpoint of another family goes back under its own weight names, in its own
    dtype or the one it was loaded with, with its config.json and its tokenizer files byte for byte; ``tokenizer`` is then not
    asked. Code files were never read and are not written: beside a copy of them, the released code loads the folder.
    """
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
) -> tuple[Denoiser, PreTrainedTokenizerBase]:
    """(denoiser in eval mode, tokenizer) of a folder written by ``save``, or of a LLaDA, Dream or SDAR checkpoint.

    source         a folder, or the name of a model on the Hub ("GSAI-ML/LLaDA-8B-Instruct"): its weights as safetensors,
                   its configuration and tokenizer files are downloaded once; its code is not.
    dtype          of weights and activations: torch.float32, bfloat16 or float64; None: the one the weights are stored in.
    block_length   SDAR only: tokens of a block; None: what config.json says.

    The ids of [MASK], end and padding and the chat template are the files'; the tokenizer carries them, and pads on the left.
    Raises ValueError in one line when the folder is no such checkpoint, or when a weight is missing, unknown, of another
    shape or not what the file holds: transformers would only warn and leave it random.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype: got {dtype}; allowed {', '.join(map(str, DTYPES))}")
    folder = _folder(source)
    raw = _read_config(folder)
    family = FAMILIES[raw["model_type"]]
    block_length = _block_length(folder, raw, family, block_length)
    tokenizer = _read_tokenizer(folder, raw, family)
    with _reading(folder):
        config = _network_config(folder, raw, family, tokenizer.mask_token_id)
    _check_vocabulary(folder, config, tokenizer)
    model = _read_network(folder, config, family, dtype)
    files = {name: (folder / name).read_bytes() for name in FILES if family.fields and (folder / name).is_file()}
    return Denoiser(model.to(device), family, block_length, files).eval(), tokenizer


def _folder(source: str | Path) -> Path:
    """A folder here as it is, or the download of what can only be the name of a model on the Hub."""
    folder = Path(source)
    if folder.parent.is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return folder
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*FILES, "*.safetensors", INDEX]))
    except (OSError, ValueError) as error:
        raise ValueError(f"model: got {source!r}, no folder here, and the Hub does not give it: {_line(error)}") from None


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
    if family.block_key is None:
        if asked is not None:
            raise ValueError(f"block_length: got {asked} for a {raw['model_type']}; allowed None, its attention has no blocks")
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


def _read_network(folder: Path, config: PreTrainedConfig, family: Family, dtype: torch.dtype | None) -> PreTrainedModel:
    """The network with every weight of the files and no other."""
    shards = _shards(folder)
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
        raise ValueError(f"model: got {str(folder)!r}, which cannot be read: {_line(error)}") from None


def _line(error: Exception) -> str:
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
