"""The families of published checkpoints, and how each becomes one of transformers' own classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformers import (
    LlamaForCausalLM,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3ForCausalLM,
)


@dataclass(frozen=True)
class Family:
    """How the checkpoints of one ``model_type`` become one of transformers' own classes.

    network       this class; its configuration reads config.json
    tokenizer     the class that reads vocab.json and merges.txt, where there is no tokenizer.json
    fields        fields of the configuration -> keys of a config.json with words of its own, the
                  first that has a value
    must          settings that ``network`` has no word for -> the only value that it computes
    keys          parts of weight names, the checkpoint's -> transformers'; every one that occurs is
                  replaced, in order
    shift         True: the network's output at position i - 1 predicts token i
    block_key     key of config.json that holds the block length of block-causal attention; where a
                  checkpoint has none it is bidirectional
    in_blocks     True: no checkpoint is bidirectional
    mask_token    the mask token's text, for a checkpoint whose files mark no token as the mask
    template_words  names that the chat template is given beside the special tokens
    """

    network: type[PreTrainedModel]
    tokenizer: type[PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    must: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    shift: bool = False
    block_key: str | None = None
    in_blocks: bool = False
    mask_token: str | None = None
    template_words: Mapping[str, Any] = field(default_factory=dict)


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
    # The vocabulary head comes first: the blocks have an ff_out of their own.
    "model.transformer.ff_out.": "lm_head.",
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
# transformers' Qwen has sliding windows, which no code of these families looks at in its masks.
_WHOLE = {"use_sliding_window": False}
# Made bidirectional by dllm. Source: the folder dllm/pipelines/a2d of ZHZisZZ/dllm, commit ca17675:
# transformers' own network under a mask of padding only, position i predicts token i. Its tokenizer
# adds <|mask|>, and Qwen's chats are opened with enable_thinking false. A checkpoint that its bd3lm
# trainer made is block-causal, and its config.json does not say so: whoever loads one adds
# block_size. There, too, prompts are padded on the left until a response begins a block.
_A2D = {"block_key": "block_size", "mask_token": "<|mask|>"}
_A2D_QWEN = _A2D | {
    "tokenizer": Qwen2Tokenizer,
    "must": _WHOLE,
    "template_words": {"enable_thinking": False},
}
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # minidrl's own checkpoints; is_causal false is the bidirectional switch.
        "llama": Family(LlamaForCausalLM, must={"is_causal": False}, block_key="block_length"),
        # LLaDA-8B-Base, -Instruct and LLaDA-1.5. Source: modeling_llada.py of ML-GSAI/LLaDA, commit
        # 5975047, run on the checkpoint of tests/golden/llada_tiny. Under bfloat16 the released
        # code rotates queries and keys in float32 and transformers in bfloat16, which moves logits
        # by no more than bfloat16 itself does.
        "llada": Family(
            LlamaForCausalLM,
            fields=LLADA_FIELDS,
            must=LLADA_MUST,
            keys=LLADA_KEYS,
            mask_token="<|mdm_mask|>",
        ),
        # Dream-7B, Dream-Coder, DiffuCoder. Source: generation_utils.py of DreamLM/Dream, which
        # shifts the logits by torch.cat([logits[:, :1], logits[:, :-1]], 1). A Dream of
        # another architecture is another network, in blocks and without a shift.
        "Dream": Family(
            Qwen2ForCausalLM,
            Qwen2Tokenizer,
            must={"architectures": ["DreamModel"], **_WHOLE},
            shift=True,
            mask_token="<|mask|>",
        ),
        # SDAR, TraDo. Source: generate.py of JetAstra/SDAR, whose texts are whole blocks. There the
        # end of a prompt that is not stands in one block with the first tokens of the response.
        # Here the response begins a block and the prompt's first block is the shorter one, as in
        # the code that trained TraDo (train/rl_sdar.py of Gen-Verse/dLLM-RL, commit 10b4fd1).
        "sdar": Family(
            Qwen3ForCausalLM,
            Qwen2Tokenizer,
            must=_WHOLE,
            block_key="block_size",
            in_blocks=True,
            mask_token="<|MASK|>",
        ),
        "a2d-llama": Family(LlamaForCausalLM, **_A2D),
        "a2d-qwen2": Family(Qwen2ForCausalLM, **_A2D_QWEN),
        "a2d-qwen3": Family(Qwen3ForCausalLM, **_A2D_QWEN),
        # ModernBERT, and dllm's chats made of it (dllm-hub/ModernBERT-large-chat-v0.1): an encoder,
        # used as it is. Source: examples/bert of ZHZisZZ/dllm, commit ca17675.
        "modernbert": Family(ModernBertForMaskedLM),
    }
)


OWN = FAMILIES["llama"]


def own_name(name: str, family: Family) -> str:
    """The name that transformers has for a weight of a checkpoint."""
    for theirs, ours in family.keys.items():
        name = name.replace(theirs, ours)
    return name


def stored_name(name: str, family: Family) -> str:
    """The name that a checkpoint has for a weight of transformers'."""
    for theirs, ours in family.keys.items():
        name = name.replace(ours, theirs)
    return name


# What config.json says of models whose memory is predicted without a file. Source: the folders of
# LLaDA-8B-Base, -Instruct and -1.5 on the Hub.
_LLADA = {"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32}
_LLADA |= {"mlp_hidden_size": 12288, "embedding_size": 126464, "vocab_size": 126464}
_LLADA |= {"max_sequence_length": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_LLADA |= {"weight_tying": False, "mask_token_id": 126336, "eos_token_id": 126081}
_NAMES = ("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5")
PUBLISHED = dict.fromkeys(_NAMES, LLADA_MUST | _LLADA | {"torch_dtype": "bfloat16"})
# Sizes of Qwen/Qwen3-0.6B (its config.json), and the id of the token that is added to its 151,669.
_A2D_06B = {"model_type": "a2d-qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
_A2D_06B |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_A2D_06B |= {"intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960}
_A2D_06B |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_A2D_06B |= {"attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
_A2D_06B |= {"mask_token_id": 151669, "eos_token_id": 151645}
PUBLISHED["dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1"] = _A2D_06B
