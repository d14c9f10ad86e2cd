"""What a file from elsewhere may hold: read within limits, checked before anything is built of it.

Checkpoints, settings and logs may come from strangers. No file is read that is larger than
``LARGEST`` says; it is UTF-8; and what stands in it is a table here:

    a table    key -> Kind, which says what is allowed, in code and in words
    absent     a key that is not there, or null, is the business of the reader
    other      keys that a table does not name are not looked at, and have no effect

YAML is read with the numbers of its version 1.2 (2e-2 is one, 010 is ten, 1:30 is text), no key
twice, at most ``DEEPEST`` levels and ``WIDEST`` values after its anchors are resolved. All errors
are ValueErrors of one line that names the file, the key, the value and what is allowed.
"""

from __future__ import annotations

import base64
import json
import math
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEEPEST, WIDEST = 20, 20_000
WHOLE = 2**63  # whole numbers are below it, as in every format that they are written to
MIB = 2**20
LARGEST = {"tokenizer.json": 256 * MIB, "vocab.json": 256 * MIB, "merges.txt": 256 * MIB}
LARGEST |= {"model.safetensors.index.json": 64 * MIB, ".yaml": MIB // 4}
OTHERS = 4 * MIB
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def brief(value: Any) -> str:
    """A value in a message, however long it is."""
    return _SHORT.repr(value)


# -------------------------------------------------------------------------------------------- kinds
class Kind(NamedTuple):
    """What is allowed, and that in words."""

    good: Callable[[Any], bool]
    allowed: str


def whole(low: int, high: int) -> Kind:
    """A whole number, both ends included; true and false are none."""
    return Kind(lambda x: type(x) is int and low <= x <= high, f"whole numbers {low} to {high}")


def one_of(*words: Any) -> Kind:
    """One of these, of the same type."""
    known = [(type(word), word) for word in words]
    return Kind(lambda x: (type(x), x) in known, ", ".join(map(str, words)))


def either(one: Kind, other: Kind) -> Kind:
    """What one of two allows."""
    return Kind(lambda x: one.good(x) or other.good(x), f"{one.allowed}; or {other.allowed}")


def list_of(kind: Kind) -> Kind:
    """A list, not empty, of what another allows."""
    return Kind(
        lambda x: isinstance(x, list) and x != [] and all(map(kind.good, x)),
        f"a list of {kind.allowed}",
    )


def mapping_to(kind: Kind, key: Kind | None = None) -> Kind:
    """An object of what another allows."""
    name = key or TEXT

    def good(x: Any) -> bool:
        return isinstance(x, dict) and all(map(name.good, x)) and all(map(kind.good, x.values()))

    keys = f" ({name.allowed})" if key else ""
    return Kind(good, f"an object of keys{keys} to {kind.allowed}")


def table_of(table: Mapping[str, Kind]) -> Kind:
    """An object whose keys obey a table."""
    said = "; ".join(f"{key}: {kind.allowed}" for key, kind in table.items())
    return Kind(lambda x: isinstance(x, dict) and not _wrong(x, table), f"an object with {said}")


def number(written: Any) -> float:
    """What a number or its text stands for; ValueError for text in digits of other scripts."""
    if isinstance(written, str) and not written.isascii():
        raise ValueError(f"got {brief(written)}; allowed digits 0 to 9")
    return float(written)


def _number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x)


TEXT = Kind(  # without half of a pair of surrogates, which no tokenizer and no file takes
    lambda x: isinstance(x, str) and not re.search("[\ud800-\udfff]", x), "Unicode text"
)
FLAG = Kind(lambda x: isinstance(x, bool), "true, false")
NUMBER = Kind(_number, "finite numbers")
ABOVE_0 = Kind(lambda x: _number(x) and x > 0, "finite numbers above 0")
FROM_0 = Kind(lambda x: _number(x) and x >= 0, "finite numbers from 0")
SHARE = Kind(lambda x: _number(x) and 0 <= x <= 1, "numbers 0 to 1")
BELOW_1 = Kind(lambda x: _number(x) and 0 <= x < 1, "numbers from 0, below 1")
ID = whole(0, 2**24 - 1)
NOTHING = Kind(lambda x: x is None, "null")
SHARD = Kind(
    lambda x: isinstance(x, str) and re.fullmatch(r"\w[\w.-]*\.safetensors", x, re.A) is not None,
    "the plain name of a .safetensors file in this folder",
)
LAYER = Kind(
    lambda x: isinstance(x, str) and re.fullmatch(r"\w[\w.]*", x, re.A) is not None,
    "names of layers",
)


# ------------------------------------------------------------------------------------------- tables
# Under transformers' names; a family's own names for them stand in checkpoints.py.
NETWORK = {
    "vocab_size": whole(1, 2**24),
    "hidden_size": whole(1, 2**20),
    "num_hidden_layers": whole(1, 1024),
    "num_attention_heads": whole(1, 2**12),
    "num_key_value_heads": whole(1, 2**12),
    "head_dim": whole(1, 2**12),
    "intermediate_size": whole(1, 2**22),
    "hidden_act": one_of("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "rms_norm_eps": ABOVE_0,
    "max_position_embeddings": whole(1, 2**30),
    "tie_word_embeddings": FLAG,
}
# Of every config.json, whatever the family.
CONFIG = {
    "model_type": TEXT,
    "architectures": list_of(TEXT),
    "mask_token_id": ID,
    "eos_token_id": either(ID, list_of(ID)),
    "pad_token_id": ID,
    "rope_theta": ABOVE_0,
    "rope_parameters": table_of({"rope_type": one_of("default"), "rope_theta": ABOVE_0}),
    "dtype": one_of("float32", "bfloat16", "float16", "float64"),
    "torch_dtype": one_of("float32", "bfloat16", "float16", "float64"),
    "quantization_config": Kind(lambda x: False, "none, weights as they were trained"),
}
# What minidrl's own config.json may say beside NETWORK; what is not named here has no effect.
OWN = {
    "rope_scaling": NOTHING,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "attention_dropout": BELOW_1,
    "initializer_range": FROM_0,
    "is_causal": FLAG,
    "use_cache": FLAG,
    "block_length": whole(1, 2**20),
}
GENERATION = {f"{name}_token_id": either(ID, list_of(ID)) for name in ("mask", "eos", "pad")}
_TOKEN = either(TEXT, table_of({"content": TEXT}))
TOKENIZER = {
    "tokenizer_class": TEXT,
    "model_input_names": list_of(one_of("input_ids", "attention_mask", "token_type_ids")),
    "model_max_length": either(ABOVE_0, NOTHING),
    "chat_template": either(TEXT, list_of(mapping_to(TEXT))),
    "added_tokens_decoder": mapping_to(
        table_of({"content": TEXT}), Kind(lambda x: re.fullmatch("[0-9]{1,8}", x), "numbers")
    ),
    "additional_special_tokens": Kind(
        lambda x: isinstance(x, list) and all(map(_TOKEN.good, x)), "a list of tokens"
    ),
    **{f"{name}_token": _TOKEN for name in ("bos", "eos", "pad", "unk", "mask", "cls", "sep")},
    # Would be opened in the place of this folder's.
    **{f"{name}_file": NOTHING for name in ("tokenizer", "vocab", "merges", "added_tokens")},
}
# Of tokenizer.json: its steps, with the key under which one holds others; what a part may say, and
# how many characters it makes of one where its words do not tell.
STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
STEPS |= {"post_processor": "processors", "decoder": "decoders"}
MOST_PARTS, MOST_GROWTH = 32, 512
_IDS = mapping_to(table_of({"ids": Kind(lambda x: isinstance(x, list), "a list of ids")}))
_BASE64 = Kind(
    lambda x: (
        isinstance(x, str)
        and len(x) % 4 == 0
        and re.fullmatch("[A-Za-z0-9+/]*={0,2}", x) is not None
    ),
    "base64",
)
PART = {"type": TEXT, "content": TEXT, "prepend": TEXT, "precompiled_charsmap": _BASE64}
PART |= {"pattern": either(TEXT, mapping_to(TEXT))}
PART |= {"single": list_of(mapping_to(table_of({"id": TEXT}))), "special_tokens": _IDS}
_LONGER = {"ByteLevel": 5, "Metaspace": 2}  # with the blank or the mark that they put before it
# Work that grows with a text's square: the parts of a long word, long pieces at each character.
MODEL = {"max_input_chars_per_word": whole(0, 1000)}
MODEL |= {"vocab": Kind(lambda x: all(len(p) <= 256 for p in _pieces(x)), "pieces of 256 or less")}
PADDING = {"strategy": either(TEXT, mapping_to(whole(0, 2**20)))}
TOKENIZER_JSON = {"model": table_of(MODEL), "padding": table_of(PADDING)}
WEIGHT_INDEX = {"weight_map": mapping_to(SHARD)}
MOST_RANK, MOST_ALPHA = 2**16, 1e6  # of adapters, here and in settings
_MISSING = Kind(lambda x: x in (None, False, [], {}, ""), "nothing: plain LoRA")
ADAPTERS = {
    "base_model_name_or_path": TEXT,
    "peft_type": TEXT,
    "r": whole(1, MOST_RANK),
    "lora_alpha": Kind(lambda x: _number(x) and 0 < x <= MOST_ALPHA, "numbers above 0, up to 1e6"),
    "target_modules": list_of(LAYER),
    "use_rslora": FLAG,
    "lora_dropout": BELOW_1,
    "bias": one_of("none"),
    # Each of these would change what is computed, or is a pattern that is matched with the layers.
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layers_pattern"), _MISSING),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "exclude_modules"), _MISSING),
    **dict.fromkeys(("layer_replication", "target_parameters", "use_dora", "lora_bias"), _MISSING),
    **dict.fromkeys(("trainable_token_indices", "fan_in_fan_out", "auto_mapping"), _MISSING),
}
STATE = {
    "step": whole(0, WHOLE - 1),
    "seconds": FROM_0,
    "solved_before": SHARE,
    "solved_after": SHARE,
    "met": Kind(lambda x: isinstance(x, list) and all(map(TEXT.good, x)), "a list of text"),
}


def check(data: Mapping[str, Any], table: Mapping[str, Kind], where: str) -> None:
    """ValueError for the first key of ``data`` whose value the table does not allow."""
    for key in _wrong(data, table):
        got = f"{where} has {key} {brief(data[key])}"
        raise ValueError(f"{got}; allowed {table[key].allowed}")


def _wrong(data: Mapping[str, Any], table: Mapping[str, Kind]) -> list[str]:
    given = (key for key in table if data.get(key) is not None)
    return [key for key in given if not table[key].good(data[key])]


# -------------------------------------------------------------------------------------------- files
def text(path: Path) -> str:
    """A file's text; ValueError where it is too large or no UTF-8, OSError where there is none."""
    check_size(path)
    return decoded(path)


def check_size(path: Path) -> None:
    """ValueError for a file that is larger than any of its kind."""
    most = LARGEST.get(path.name, LARGEST.get(path.suffix, OTHERS))
    check_regular(path)
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size} bytes; allowed up to {most}")


def check_regular(path: Path) -> None:
    """ValueError for a pipe, a device or a folder: to read of one may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no regular file; allowed a file, or a link to one")


def decoded(path: Path) -> str:
    """The text of a file of any size; ValueError where it is no UTF-8."""
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise ValueError(f"{path} is no UTF-8 text: {wrong}; allowed UTF-8") from None


def json_object(path: Path, table: Mapping[str, Kind] | None = None) -> dict:
    """The object in a JSON file, whose values the table allows."""
    found = parsed_json(text(path), str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}; allowed an object")
    check(found, table or {}, str(path))
    return found


def check_tokenizer(path: Path) -> None:
    """ValueError for a tokenizer.json whose steps would make a text too long to work on.

    Each may be small: forty that double a text make a trillion characters of one, and nothing stops
    the library on its way.
    """
    data, growth = json_object(path, TOKENIZER_JSON), 1
    for step, inside in STEPS.items():
        parts = [data[step]] if data.get(step) is not None else []
        for part in parts:  # grows on the way
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                got = f"{path} has {step} with {brief(part)}"
                raise ValueError(f"{got}; allowed objects with a type")
            check(part, PART, f"{path}: {step}")
            held = part.get(inside)
            parts += held if isinstance(held, list) else []
            if len(parts) > MOST_PARTS:
                got = f"{path} has {step} of {len(parts)} parts or more"
                raise ValueError(f"{got}; allowed up to {MOST_PARTS}")
            growth *= _growth(part, step)
            if growth > MOST_GROWTH:
                got = f"{path} has {step} with {brief(part)}, which makes a text {growth} times"
                raise ValueError(f"{got} as long with what is before; allowed up to {MOST_GROWTH}")


def _pieces(vocabulary: Any) -> list[str]:
    # Of a Unigram model, whose vocabulary is a list of pairs.
    pairs = vocabulary if isinstance(vocabulary, list) else []
    return [pair[0] for pair in pairs if isinstance(pair, list) and isinstance(pair[0], str)]


def _growth(part: dict, step: str) -> int:
    """Of one character, or token, a part makes at most so many."""
    between = "Regex" in (part.get("pattern") or "")  # it may match where there is no character
    content = len(part.get("content") or "") + between
    before = 1 + len(part.get("prepend") or "")
    own = _LONGER.get(part["type"], 1) if step in ("normalizer", "pre_tokenizer") else 1
    data = base64.b64decode(part.get("precompiled_charsmap") or "")
    words = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")  # after a trie and its size
    tokens, known = 0, part.get("special_tokens") or {}
    for piece in part.get("single") or []:
        token = known.get(piece.get("SpecialToken", {}).get("id"))
        tokens += 1 if token is None else len(token.get("ids") or [])
    return max(1, content, before, own, tokens, *map(len, words))


def parsed_json(written: str, where: str) -> Any:
    """The value that a JSON text stands for, without a key that is there twice."""
    try:
        return json.loads(written, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        said = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{where} is no JSON: {said}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):  # which one counts would be a matter of luck
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {brief(twice)} is there twice; allowed once")
    return found


# --------------------------------------------------------------------------------------------- YAML
_INT = re.compile(r"[-+]?(?:0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"


class Loader(yaml.SafeLoader):
    """Plain data, in the limits and with the numbers that the module's docstring names."""

    level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Counts the levels on the way down."""
        self.level += 1
        if self.level > DEEPEST:
            raise yaml.YAMLError(f"nested more than {DEEPEST} levels deep")
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Refuses what would not end: an anchor inside itself, anchors of anchors of anchors."""
        node = super().get_single_node()
        if node is not None and _size(node, {}) > WIDEST:
            raise yaml.YAMLError(f"more than {WIDEST} values once its anchors are resolved")
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Refuses a key that is there already: which one counts would be a matter of luck."""
        node, seen = super().compose_mapping_node(anchor), set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen and key.tag != f"{_TAG}merge":
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: key {key.value} is there twice")
            seen.add((key.tag, key.value))
        return node


class Dumper(yaml.SafeDumper):
    """Writes text in quotes that ``Loader``, or a reader of YAML 1.1, would not take for text."""


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    # Values below a node, a shared one as often as it is met; 0 while it is being counted.
    if (size := known.get(id(node))) is not None:
        if size == 0:
            raise yaml.YAMLError("an anchor inside itself")
        return size
    known[id(node)] = 0
    below = node.value if isinstance(node, yaml.CollectionNode) else []
    children = [x for child in below for x in (child if isinstance(child, tuple) else (child,))]
    known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]


def _whole(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    written = node.value.replace("_", "")
    base = {"0o": 8, "0x": 16}.get(written.lstrip("+-")[:2], 10)
    return int(written, base)


def _use_numbers(kind: Any, instead: tuple[str, ...]) -> None:
    dropped = {f"{_TAG}{name}" for name in instead}
    known = yaml.SafeLoader.yaml_implicit_resolvers.items()
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in dropped]
        for first, pairs in known
    }
    for name, pattern in (("int", _INT), ("float", _FLOAT)):
        whole_text = re.compile(f"(?:{pattern.pattern})$")
        kind.add_implicit_resolver(f"{_TAG}{name}", whole_text, list("-+.0123456789"))


_use_numbers(Loader, instead=("int", "float", "timestamp"))
_use_numbers(Dumper, instead=())  # others may read as YAML 1.1 what it writes
Loader.add_constructor(f"{_TAG}int", _whole)


def parsed_yaml(written: str, where: str) -> Any:
    """The plain data that a YAML text stands for."""
    try:
        return yaml.load(written, Loader)
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError) as error:
        said = " ".join(str(error).split())  # the last two: a tag such as !!bool on another value
        raise ValueError(f"{where} is no YAML that can be used: {said}") from None
