"""Checkpoints: loading and saving. No code of a checkpoint is ever downloaded or run.

What tells one family from another stands in families.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as their_log

from minidrl.denoiser import Denoiser
from minidrl.run.adapters import has_adapters, inject_adapters, peft
from minidrl.run.distributed import sharded_like
from minidrl.run.families import FAMILIES, OWN, PUBLISHED, Family, own_name, stored_name
from minidrl.run.launch import one_line

# transformers' bars and reports: of no interest, or raised here as one line.
their_log.set_verbosity(logging.CRITICAL)
their_log.disable_progress_bar()
log = logging.getLogger("minidrl")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
INDEX = "model.safetensors.index.json"
CONSTANTS = "control_variate.json"
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


FOUR_BITS = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.bfloat16,
}


# ------------------------------------------------------------------------------------------ loading
def load(
    source: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    quantize: bool = False,
) -> tuple[Denoiser, PreTrainedTokenizerBase]:
    """(denoiser in eval mode, tokenizer) of what ``save`` wrote, or of a published ``Family``.

    source         a folder, or the name of a model on the Hub ("GSAI-ML/LLaDA-8B-Instruct"): its
                   weights as safetensors, its configuration and tokenizer files are downloaded
                   once; its code is not. A folder of adapters is loaded with the base that it
                   names.
    dtype          of weights and activations; None: the one the weights are stored in, as far as
                   the device has ``arithmetic`` for it.
    quantize       True: the linear layers in 4 bits (NF4 with double quantisation, by
                   bitsandbytes), to be used and not to be trained; embedding, head and norms in
                   ``dtype``.

    The ids of [MASK], end and padding and the chat template are the files'; the tokenizer carries
    them, and pads on the left. A head that is not the embedding stays apart from it, whatever
    config.json says. Raises ValueError in one line when the folder is no such checkpoint, or when a
    weight is missing, unknown, of another shape or not what the file holds: transformers would only
    warn and leave it random.
    """
    folder = folder_of(source)
    if (folder / ADAPTER_CONFIG).is_file():
        return _load_adapters(folder, device, dtype)
    raw, family = _read_config(folder)
    block_length = _block_length(folder, raw, family)
    tokenizer = _read_tokenizer(folder, raw, family)
    with reading(folder):
        config = _network_config(raw, family, tokenizer.mask_token_id)
        stored = _stored_dtype(folder)
    size, mask, tokens = config.vocab_size, tokenizer.mask_token_id, len(tokenizer)
    if mask >= size or tokens > size:
        got = f" with {tokens} tokens in its tokenizer and mask_token_id {mask}"
        raise _refused(folder, f"{got}; allowed what fits its vocabulary of {size}")
    if dtype is None and (dtype := arithmetic(stored, device)) != stored:
        log.warning(f"{folder}: computed in float32, as this CPU has no bfloat16 of its own")
    model = _read_network(folder, config, family, dtype, device if quantize else None)
    names = [name for name in FILES if family is not OWN and (folder / name).is_file()]
    files = {name: (folder / name).read_bytes() for name in names}
    model = model if quantize else model.to(device)
    return Denoiser(model, family, block_length, files).eval(), tokenizer


def describe(source: str | Path) -> tuple[PreTrainedConfig, Family, torch.dtype]:
    """(configuration, family, dtype of the stored weights) by config.json alone: no weight is read.

    Those of ``PUBLISHED`` are known without a file. Raises ValueError for a folder or a name
    without a config.json.
    """
    if source in PUBLISHED and not Path(source).exists():
        raw, family = PUBLISHED[source], FAMILIES[PUBLISHED[source]["model_type"]]
    else:
        raw, family = _read_config(folder_of(source, ["config.json"]))
    with reading(source):
        shape = _network_config(raw, family, raw.get("mask_token_id") or 0)
        shape._attn_implementation = "sdpa"
        stored = raw.get("dtype") or raw.get("torch_dtype") or "float32"
        return shape, family, getattr(torch, stored)


def dtype_of(name: str) -> torch.dtype | None:
    """What the setting ``dtype`` asks for; None for stored."""
    return None if name == "stored" else getattr(torch, name)


def arithmetic(stored: torch.dtype, device: str | torch.device) -> torch.dtype:
    """The dtype in which weights are best computed with: float32 for bfloat16 on a CPU without
    instructions for it (AVX512-bf16 or AMX), where its products take some 90 times as long."""
    probes = (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported)
    slow = stored == torch.bfloat16 and torch.device(device).type == "cpu"
    return torch.float32 if slow and not any(probe() for probe in probes) else stored


def in_bfloat16(compute_dtype: str, device: str | torch.device) -> bool:
    """Whether products of float32 weights are to be bfloat16: where asked, or auto and fast."""
    if compute_dtype != "auto":
        return compute_dtype == "bfloat16"
    return arithmetic(torch.bfloat16, device) == torch.bfloat16


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint here, as ``load`` returns it; ValueError as there."""
    return _read_tokenizer(folder, *_read_config(folder))


def control_variate(source: str | Path, order: str) -> torch.Tensor | None:
    """(2, 57): the constants of (2.12) for rollouts in this order, of unsolved and of solved
    responses; None for a base without them."""
    path = Path(source) / CONSTANTS
    found = read_json(path).get(order) if path.exists() else None
    if found is None:
        return None
    return torch.tensor([found["unsolved"], found["solved"]], dtype=torch.float64)


def folder_of(
    source: str | Path, patterns: Sequence[str] = (*FILES, "*.safetensors", INDEX)
) -> Path:
    """A folder here as it is, or the download of what can only be a model on the Hub."""
    folder = Path(source)
    if folder.parent.is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return folder
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        got = f"{source!r}, no folder here, and the Hub does not give it"
        raise ValueError(f"model: got {got}: {one_line(error)}") from None


def read_json(path: Path) -> dict:
    """The object in a file; ValueError for another content."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} holds no JSON object: {error}") from None


def _read_config(folder: Path) -> tuple[dict, Family]:
    """config.json of a checkpoint, and the family that can compute it."""
    if not (folder / "config.json").is_file():
        allowed = "a folder written by pretrain or train, or a published checkpoint"
        raise _refused(folder, f", which holds no config.json; allowed {allowed}")
    with reading(folder):
        raw = {"is_causal": True} | read_json(folder / "config.json")
    name = raw.get("model_type")
    if name not in list(FAMILIES):
        raise _refused(folder, f" with model_type {name!r}; allowed {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    for key, value in family.must.items():
        if (raw.get(key) or False) != (value or False):
            allowed = f"{value!r}, which transformers' {family.network.__name__} computes"
            got = f" with {key} {raw.get(key)!r}"
            raise _refused(folder, f"{got}; allowed for {name} is {allowed}")
    # ``convert`` writes the key shift.
    return raw, dataclasses.replace(family, shift=True) if raw.get("shift") else family


def _block_length(folder: Path, raw: dict, family: Family) -> int | None:
    """Tokens of a block where attention is block-causal; None where it is bidirectional."""
    length = raw.get(family.block_key)
    by_bd3lm = family.block_key == "block_size" and "bd3lm" in str(folder).lower()
    if length is None and not (family.in_blocks or by_bd3lm):
        return None
    if type(length) is not int or length < 1:
        allowed = f"integers from 1, in its config.json as {family.block_key}"
        raise ValueError(f"block_length: got {length!r} for {str(folder)!r}; allowed {allowed}")
    return length


_NOT_OURS = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype")


def _network_config(raw: dict, family: Family, mask_token_id: int) -> PreTrainedConfig:
    """The network's configuration, by its own class.

    ``pad_token_id`` stays None: as ``padding_idx`` it would silently freeze one embedding row, in
    LLaDA that of the end token.
    """
    ids = {"bos_token_id": None, "pad_token_id": None, "mask_token_id": mask_token_id}
    kind = family.network.config_class
    if family is OWN:
        return kind.from_dict(raw | ids)
    words = {key: value for key, value in raw.items() if key not in _NOT_OURS}
    if family.fields:
        words = {"rope_theta": raw["rope_theta"], "eos_token_id": raw.get("eos_token_id")}
        for ours, keys in family.fields.items():
            words[ours] = next((raw[key] for key in keys if raw.get(key) is not None), None)
            if words[ours] is None:
                raise ValueError(f"config.json gives no {keys[0]}")
    return kind.from_dict({**words, **ids, "is_causal": False, "use_cache": False})


def _read_tokenizer(folder: Path, raw: dict, family: Family) -> PreTrainedTokenizerBase:
    """The tokenizer, padding on the left, with the tokens that only other files name.

    [MASK] is config.json's, else the tokenizer's, else the family's mask token.
    """
    whole = (folder / "tokenizer.json").is_file()
    generation = folder / "generation_config.json"
    with reading(folder):
        kind = PreTrainedTokenizerFast if whole else family.tokenizer
        tokenizer = kind.from_pretrained(folder, padding_side="left")
        told = read_json(generation) if generation.is_file() else {}
    masks = (raw.get("mask_token_id"), tokenizer.mask_token_id)
    mask = next((i for i in masks if i is not None), tokenizer.get_vocab().get(family.mask_token))
    named = raw | told | {"mask_token_id": mask}
    for name in ("mask_token", "eos_token", "pad_token"):
        index = named.get(f"{name}_id")
        index = index[0] if isinstance(index, list) and index else index
        if getattr(tokenizer, name) is None and isinstance(index, int) and index < len(tokenizer):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))
    if mask is None or (found := tokenizer.mask_token_id) != mask:
        allowed = f"the id of one of its tokenizer's {len(tokenizer)} tokens"
        allowed = allowed if mask is None or found is None else f"{found}, as its tokenizer says"
        raise _refused(folder, f" with mask_token_id {mask}; allowed {allowed}")
    tokenizer.template_words = dict(family.template_words)
    ends = told.get("eos_token_id") or []  # one, or several: each ends an answer (text.end_ids)
    tokenizer.more_ends = [ends] if isinstance(ends, int) else ends
    return tokenizer


def _read_network(
    folder: Path,
    config: PreTrainedConfig,
    family: Family,
    dtype: torch.dtype,
    quantize_on: Any = None,
) -> PreTrainedModel:
    """The network with every weight of the files, no other; in 4 bits on ``quantize_on``."""
    how = {}
    with reading(folder):
        if quantize_on is not None:
            how = {"quantization_config": BitsAndBytesConfig(**FOUR_BITS)}
            how["device_map"] = {"": str(quantize_on)}
        model, info = family.network.from_pretrained(
            folder,
            config=config,
            key_mapping={re.escape(theirs): ours for theirs, ours in family.keys.items()} or None,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **how,
        )
    wrong = {}
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            wrong[kind] = sorted(stored_name(str(key), family) for key in info[kind])[:3]
    if wrong:
        raise _refused(folder, f", whose weights do not match its config: {wrong}")
    with reading(folder):
        other = [name for path in shards(folder) for name in compared(model, path, family)[1]]
    if other:
        raise _refused(folder, f", of which transformers did not read {', '.join(other[:3])}")
    return model


def shards(folder: Path) -> list[Path]:
    """The weight files: one, or those that the index names."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    names = read_json(folder / INDEX)["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def _stored_dtype(folder: Path) -> torch.dtype:
    with safe_open(shards(folder)[0], framework="pt") as file:
        return file.get_slice(next(iter(file.keys())))[:1].dtype


def compared(
    model: PreTrainedModel, path: Path, family: Family, whole: bool = False
) -> tuple[set[str], list[str]]:
    """(names of a file's weights, as the network's; those of which the first row, or the whole,
    is not what is in the network): loading reports, this looks."""
    state, names, wrong = model.state_dict(), set(), []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            names.add(ours := own_name(name, family))
            stored, read = file.get_slice(name)[: None if whole else 1], state[ours]
            read = read[: len(stored)].to(stored.device)
            if read.dtype == torch.uint8:  # in 4 bits, which hold something near it
                continue
            if not torch.allclose(read, stored.to(read.dtype), rtol=0, atol=0, equal_nan=True):
                wrong.append(name)
    return names, wrong


def not_stored(model: PreTrainedModel) -> set[str]:
    """The names of weights that are another's: a head that is the embedding."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return set(model._tied_weights_keys) if tied else set()


# ----------------------------------------------------------------------------------------- adapters
_PREFIX = "base_model.model."  # which peft writes before the name of a weight


def _load_adapters(
    folder: Path, device: Any, dtype: torch.dtype | None
) -> tuple[Denoiser, PreTrainedTokenizerBase]:
    """The base that the folder's config names, with the folder's adapters."""
    with reading(folder):
        config = peft().PeftConfig.from_pretrained(folder)
    base, kind = str(config.base_model_name_or_path), config.peft_type
    if kind != "LORA" or (Path(base) / ADAPTER_CONFIG).is_file():
        allowed = "LORA for a plain base"
        raise _refused(folder, f", adapters of type {kind} for {base!r}; allowed {allowed}")
    if (first := config.init_lora_weights) not in (True, False, "gaussian"):
        got = f", adapters that began as {first!r}, which changed the base"
        raise _refused(folder, f"{got}; allowed those that left it as it was")
    denoiser, tokenizer = load(base, device, dtype)
    with reading(folder):
        config.inference_mode, config.init_lora_weights = False, True  # what is drawn is read over
        inject_adapters(denoiser, config, 0)
    read_adapters(denoiser, folder)
    return denoiser.eval(), tokenizer


def read_adapters(denoiser: Denoiser, folder: Path) -> None:
    """The saved values into a network's adapters; ValueError unless names and shapes agree."""
    with reading(folder):
        stored = load_file(Path(folder) / ADAPTER_WEIGHTS)
        weights = {name.removeprefix(_PREFIX): value for name, value in stored.items()}
        own = peft().get_peft_model_state_dict(denoiser.model, save_embedding_layers=False)
    shapes = [{name: tuple(value.shape) for name, value in x.items()} for x in (weights, own)]
    if wrong := sorted(dict(shapes[0].items() ^ shapes[1].items())):
        got = f"{wrong[0]} {shapes[0].get(wrong[0], 'missing')}"
        raise _refused(folder, f", whose adapters do not fit the network: {got}")
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(sharded_like(value, own[name]))


def _save_adapters(
    denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: dict[str, Any]
) -> None:
    # ``peft.PeftModel.from_pretrained(base, folder)`` opens it, base being ``denoiser.model``
    # without adapters.
    (config,) = denoiser.model.peft_config.values()
    config.save_pretrained(folder)
    how = {"state_dict": weights, "save_embedding_layers": False}
    found = peft().get_peft_model_state_dict(denoiser.model, **how)
    found = {_PREFIX + name: value.contiguous() for name, value in found.items()}
    save_file(found, folder / ADAPTER_WEIGHTS)
    if not denoiser.files:
        _save_tokenizer(tokenizer, folder)
    # The base's configuration stays away: with it, this would seem to be a base.
    of_base = ("config.json", "generation_config.json")
    _write({name: words for name, words in denoiser.files.items() if name not in of_base}, folder)


def merged(source: Path) -> tuple[Denoiser, PreTrainedTokenizerBase]:
    """The base of a folder of adapters, in its own dtype, with these added to its weights.

    ``save`` writes it in its own format, which the released code of its family loads.
    """
    if not (source / ADAPTER_CONFIG).is_file():
        raise _refused(source, ", which holds no adapters; allowed those of a run with LoRA")
    with reading(source):
        base = peft().PeftConfig.from_pretrained(source).base_model_name_or_path
    denoiser, tokenizer = load(source, dtype=_stored_dtype(folder_of(base)))
    model, layer_class = denoiser.model, peft().tuners.tuners_utils.BaseTunerLayer
    for name, layer in [x for x in model.named_modules() if isinstance(x[1], layer_class)]:
        plain = layer.get_base_layer()
        plain.weight = torch.nn.Parameter(plain.weight.detach().clone())  # not a tied embedding's
        layer.merge()
        model.set_submodule(name, plain)
    del model.peft_config
    return denoiser, tokenizer


# ------------------------------------------------------------------------------------------- saving
def save(
    denoiser: Denoiser,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    weights: dict[str, Any] | None = None,
) -> None:
    """Network (safetensors) and tokenizer, in the format that they came in.

    minidrl's own format is transformers'. A checkpoint of another family goes back under its own
    weight names, in its own dtype or the one it was loaded with, with its config.json and its
    tokenizer files byte for byte; ``tokenizer`` is then not asked. Code files were never read and
    are not written: beside a copy of them, the released code loads the folder. Of a network with
    adapters only these are written, in peft's format, with the name of their base. ``weights``:
    those of a network that is cut up; None: its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = denoiser.model.state_dict() if weights is None else weights
    if has_adapters(denoiser):
        _save_adapters(denoiser, tokenizer, folder, weights)
    elif not denoiser.files:
        denoiser.model.save_pretrained(folder, state_dict=weights)
        _save_tokenizer(tokenizer, folder)
    else:
        for name in not_stored(denoiser.model):
            del weights[name]
        weights = {stored_name(name, denoiser.family): value for name, value in weights.items()}
        save_torch_state_dict(weights, folder, metadata={"format": "pt"})
        _write(denoiser.files, folder)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    # The padding of its last call is a state of transformers' tokenizer, and would be written.
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        backend.no_padding()
    tokenizer.save_pretrained(folder)


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def save_as_llada(
    denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """A checkpoint of minidrl's own under LLaDA's names and keys, to rehearse what is done with it.

    Both are the same Llama: only the words of config.json and the names of the weights differ.
    """
    ours, family = denoiser.model.config, FAMILIES["llada"]
    words = PUBLISHED["GSAI-ML/LLaDA-8B-Base"] | {
        **{keys[0]: getattr(ours, name) for name, keys in family.fields.items()},
        **{name: getattr(ours, name) for name in ("vocab_size", "mask_token_id", "eos_token_id")},
        "pad_token_id": tokenizer.pad_token_id,
        "rope_theta": ours.rope_parameters["rope_theta"],
        "torch_dtype": str(denoiser.model.dtype).removeprefix("torch."),
    }
    _save_tokenizer(tokenizer, folder)
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    files["config.json"] = json.dumps(words, indent=2).encode()
    save(Denoiser(denoiser.model, family, None, files), tokenizer, folder)


# ----------------------------------------------------------------------------------------- mistakes
def _refused(folder: str | Path, found: str) -> ValueError:
    return ValueError(f"model: got {str(folder)!r}{found}")


@contextlib.contextmanager
def reading(folder: str | Path, key: str = "model"):
    """What a library has to say about a file becomes one line that names the folder; ``key``: the
    setting that does.

    Running out of a GPU's memory is not about the file, and the caller knows what to lower.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        got = f"{str(folder)!r}, which cannot be read: {one_line(error)}"
        raise ValueError(f"{key}: got {got}") from None
