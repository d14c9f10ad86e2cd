"""A causal language model becomes a masked diffusion model that fine-tuning can start from.

Nothing is trained here. Llama, Qwen2 and Qwen3 keep every weight; their attention loses its causal
mask, a token that their texts never hold becomes [MASK], and predictions are made in place, or with
``shift`` as the causal model made them, by the state before the token (as Dream and DiffuLLaMA,
arXiv 2410.17891). The result is an A2D checkpoint, as the folder
dllm/pipelines/a2d of ZHZisZZ/dllm makes them, which ``pretrain`` reads as ``init``.

A source is a folder, the name of a model on the Hub, or a GGUF file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from minidrl.run import checkpoints, folders

CAUSAL = ("llama", "qwen2", "qwen3")  # their bidirectional siblings are families, as a2d-llama
# Names of tokens that are reserved, or that stand in no text: Llama 3's, Gemma's, SmolLM2's.
FREE = ("<|mask|>", "<|reserved_special_token_0|>", "<unused0>", "<reponame>")


def convert(source: str, out: Path, *, shift: bool = False, mask_token: str = "") -> str:
    """Write the checkpoint; returns what was made, and the mask token, in one line.

    source       a folder, a name on the Hub, or a .gguf file
    shift        True: the state of position i - 1 predicts token i
    mask_token   the tokenizer's token that becomes [MASK]; "": its own mask token, or the first of
                 ``FREE`` that it has or that its embedding has room for

    ValueError for a source that cannot be read, of another architecture, or without a free token,
    and for an ``out`` that is there already.
    """
    if out.exists():
        raise ValueError(f"out: got {str(out)!r}, which is there already; allowed another --out")
    model, tok = _read(source)
    tok.mask_token = _free_token(tok, model.config.vocab_size, mask_token)
    with folders.folder(out) as part:
        _write(model, tok, shift, part)
    kind = f"{model.num_parameters():,} weights of a {model.config.model_type}"
    place = "by the state before a token" if shift else "in place"
    mask = f"mask token {tok.mask_token} ({tok.mask_token_id})"
    return f"{out}: {kind}, bidirectional, predicting {place}, {mask}"


def _read(source: str) -> tuple[Any, Any]:
    """(model, tokenizer) by transformers; ValueError where a weight is missing."""
    path = Path(source)
    if path.suffix == ".gguf":  # which transformers dequantises
        where, how = path.parent, {"gguf_file": path.name}
    else:
        where, how = checkpoints.folder_of(source), {}
    with checkpoints.reading(path):
        tok = AutoTokenizer.from_pretrained(where, padding_side="left", **how)
        how |= {"dtype": torch.float32 if how else "auto", "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(where, **how)
    kind = model.config.model_type
    if kind not in CAUSAL:
        got = f"{source!r} of architecture {kind!r}"
        raise ValueError(f"source: got {got}; allowed {', '.join(CAUSAL)}")
    wrong = sorted(map(str, info["missing_keys"] | info["mismatched_keys"]))
    if wrong:
        raise ValueError(f"source: got {source!r}, which lacks {', '.join(wrong[:3])}")
    if getattr(model.config, "use_sliding_window", False):
        raise ValueError(f"source: got {source!r} with a sliding window; allowed full attention")
    return model, tok


# ------------------------------------------------------------------------------ what becomes of it
def _free_token(tok: Any, vocab_size: int, asked: str) -> str:
    """The text of the mask token; ValueError where no token is free for it."""
    known = tok.get_vocab()
    chosen = asked or tok.mask_token or next((name for name in FREE if name in known), FREE[0])
    if chosen in (tok.eos_token, tok.pad_token, tok.bos_token, tok.unk_token):
        got = f"{chosen!r}, which has a meaning already"
        raise ValueError(f"mask_token: got {got}; allowed a token that no text holds")
    if chosen not in known and len(tok) >= vocab_size:
        special = ", ".join(map(str, list(tok.added_tokens_decoder.values())[:20])) or "none"
        got = f"{chosen!r}, which the tokenizer lacks, and its {vocab_size} rows are all taken"
        raise ValueError(f"mask_token: got {got}; allowed --mask-token, such as {special}")
    return chosen


def _write(model: Any, tok: Any, shift: bool, folder: Path) -> None:
    """Weights and tokenizer as they are, and a config.json that says what they have become."""
    gone = ("architectures", "auto_map", "quantization_config", "_name_or_path")
    config = {key: value for key, value in model.config.to_dict().items() if key not in gone}
    config |= {"model_type": f"a2d-{config['model_type']}", "is_causal": False, "use_cache": False}
    config |= {"mask_token_id": tok.mask_token_id, "eos_token_id": tok.eos_token_id}
    config |= {"dtype": str(model.dtype).removeprefix("torch."), "shift": shift}
    weights = model.state_dict()
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    tok.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
