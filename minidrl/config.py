"""Run settings: typed, nested, checked. A YAML file and ``--any.key value`` on the command line fill the same fields."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from minidrl import algorithms as alg
from minidrl.sampler import Sampler
from minidrl.tasks.countdown import Countdown


def _one_of(key: str, value: Any, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{key}: got {value!r}; allowed {', '.join(allowed)}")


def _at_least(settings: Any, section: str, **lowest: float) -> None:
    for name, low in lowest.items():
        if getattr(settings, name) < low:
            raise ValueError(f"{section}{name}: got {getattr(settings, name)}; allowed from {low}")


_PRECISIONS = ("highest", "high")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Sizes of a network trained from scratch."""

    hidden_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    intermediate_size: int = 256

    def __post_init__(self):
        _at_least(self, "network.", hidden_size=1, num_hidden_layers=1, num_attention_heads=1, intermediate_size=1)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW. ``warmup`` updates rise linearly to ``learning_rate``; ``schedule`` constant or cosine (to a tenth) follows."""

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup: int = 0
    schedule: str = "constant"

    def __post_init__(self):
        _one_of("optimizer.schedule", self.schedule, "constant", "cosine")
        if not 0 < self.learning_rate < math.inf or self.max_grad_norm <= 0:
            raise ValueError(
                f"optimizer: got learning_rate {self.learning_rate}, max_grad_norm {self.max_grad_norm}; allowed above 0, "
                "learning_rate finite"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}: got {getattr(self, name)}; allowed 0 up to, not including, 1")
        _at_least(self, "optimizer.", weight_decay=0, warmup=0)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out evaluation: ``n`` puzzles at ``temperature`` (1 = the policy that is trained), every ``every`` updates (0: only
    before and after)."""

    n: int = 512
    temperature: float = 1.0
    every: int = 0

    def __post_init__(self):
        _at_least(self, "evaluate.", n=1, temperature=0, every=0)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on the linear layers named by ``target_modules``, instead of training all weights; ``rank`` 0: none.

    ``alpha`` over ``rank`` is their scale. The reference policy is the network with its adapters off; checkpoints are adapter
    folders in the format of peft. There is no dropout.
    """

    rank: int = 0
    alpha: float = 64.0
    target_modules: list = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )

    def __post_init__(self):
        _at_least(self, "lora.", rank=0)
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha: got {self.alpha}; allowed finite numbers above 0")
        if not self.target_modules or not all(isinstance(name, str) for name in self.target_modules):
            raise ValueError(f"lora.target_modules: got {self.target_modules!r}; allowed names of linear layers, at least one")


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Supervised training of the tiny masked diffusion LM itself, on demonstrations of mixed quality.

    ``hit_share`` of the demonstrations aim at the target, ``late_hit_share`` of them in the second half of the training;
    the others are true calculations that end anywhere. ``stop_after`` ends the training before its schedule of ``steps``
    has run out (0: not): reinforcement learning needs a base that can still learn. ``matmul_precision`` as in ``Train``.
    """

    task: Countdown = field(default_factory=Countdown)
    network: Network = field(default_factory=Network)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sampler: Sampler
    evaluate: Evaluation = field(default_factory=Evaluation)
    hit_share: float = 0.2
    late_hit_share: float = 0.2
    steps: int = 1000
    stop_after: int = 0
    batch_size: int = 128
    save_every: int = 0
    seed: int = 0
    device: str = "cpu"
    threads: int = 0
    matmul_precision: str = "highest"
    compile: bool = False

    def __post_init__(self):
        for name in ("hit_share", "late_hit_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed 0 to 1")
        _at_least(self, "", steps=1, stop_after=0, batch_size=1, save_every=0, threads=0)
        _one_of("matmul_precision", self.matmul_precision, *_PRECISIONS)


@dataclass(frozen=True, kw_only=True)
class Train:
    """One RL run. A step is a rollout of num_prompts x num_generations responses and num_iterations updates on it.

    ``filter_groups`` leaves out the prompts whose responses all earned the same, so that means are over the others.
    Three ways to be off-policy on purpose: ``num_iterations`` above 1 (stale rollouts), ``rollout_dtype`` bfloat16 (the
    sampler's weights and activations are rounded, the trained ones are not), and ``sampler.cache`` prefix or dual (the sampler
    reads keys and values that are out of date; the metric ``rollout_kl`` says how far that takes it, in nats a token).

    Memory (``python -m minidrl memory CONFIG`` adds it up): ``dtype`` of the network, float32, bfloat16 or as stored;
    ``quantize``: the weights of the linear layers in 4 bits, below adapters only; ``gradient_checkpointing``: the activations
    of a layer are computed again in the backward pass; ``micro_batch`` sequences go through the network at a time.

    Speed: ``matmul_precision``, in the words of torch.set_float32_matmul_precision, is that of float32 products. With high a
    GPU may round their factors to 10 bits after the point (TensorFloat-32); without, float32 runs beside its tensor cores.
    """

    model: str = ""
    dtype: str = "stored"
    quantize: bool = False
    lora: Lora = field(default_factory=Lora)
    gradient_checkpointing: bool = False
    task: Countdown = field(default_factory=Countdown)
    sampler: Sampler
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluate: Evaluation = field(default_factory=Evaluation)
    method: str = "reinforce"
    method_options: dict = field(default_factory=dict)
    steps: int = 100
    num_prompts: int = 16
    num_generations: int = 12
    num_iterations: int = 1
    micro_batch: int = 128
    filter_groups: bool = False
    rollout_dtype: str = "float32"
    seed: int = 0
    save_every: int = 0
    device: str = "cpu"
    threads: int = 0
    matmul_precision: str = "highest"
    compile: bool = False
    tensorboard: bool = False

    def __post_init__(self):
        _at_least(self, "", steps=1, num_prompts=1, num_generations=1, num_iterations=1, micro_batch=1)
        _at_least(self, "", save_every=0, threads=0)
        _one_of("rollout_dtype", self.rollout_dtype, "float32", "bfloat16")
        _one_of("dtype", self.dtype, "stored", "float32", "bfloat16")
        _one_of("matmul_precision", self.matmul_precision, *_PRECISIONS)
        if self.quantize and not (self.lora.rank and self.rollout_dtype == "float32"):
            allowed = "with lora.rank from 1 and without a rollout_dtype: 4 bits cannot be trained, nor rounded again"
            raise ValueError(f"quantize: got True; allowed {allowed}")
        if self.gradient_checkpointing and self.compile:
            raise ValueError("gradient_checkpointing: got True with compile; allowed one of the two")
        if self.filter_groups and self.num_generations == 1:
            raise ValueError("filter_groups: got True with num_generations 1; allowed from 2 (a group of one would always go)")


def load(kind: type, path: str | Path, overrides: dict[str, str] | None = None) -> Any:
    """The settings of a YAML file with command-line overrides on top. Paths in the file are relative to the file.

    Raises ValueError, in one line that names the key, the value and what is allowed.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config: got {str(path)!r}, which is no file; the configs that ship are in tiny_configs/")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"config: {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"config: {path} holds {type(data).__name__}; allowed a mapping of keys to values")
    if isinstance(data.get("model"), str):
        data["model"] = _model(path.parent, data["model"])
    for key, value in (overrides or {}).items():
        _set(data, key, _parsed(key, value) if isinstance(value, str) else value)
    return from_dict(kind, data)


def _model(parent: Path, name: str) -> str:
    """A path relative to the config as an absolute one; what can only be the name of a model on the Hub as it is."""
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not (parent / name).parent.is_dir()
    return name if is_hub_name else str((parent / name).resolve())


def _parsed(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{key}: got {text!r}; allowed a value in YAML") from None


def _set(data: dict, key: str, value: Any) -> None:
    *parents, last = key.split(".") if not key.startswith("method_options.") else ("method_options", key.split(".", 1)[1])
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ValueError(f"{key}: got a value below {parent!r}, which is no section")
    data[last] = value


def from_dict(kind: type, data: dict, where: str = "") -> Any:
    """A settings dataclass from plain data; unknown keys and values of the wrong type are refused."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f" (did you mean {where}{near[0]}?)" if near else ""
            raise ValueError(f"{where}{key}: unknown key{hint}; allowed {', '.join(fields)}")
    required = [name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    for key in required:
        if key not in data:
            raise ValueError(f"{where}{key}: missing; it has no default")
    return kind(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in data.items()})


def _convert(hint: Any, value: Any, key: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if value is None else _convert(typing.get_args(hint)[0], value, key)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(
                f"{key}: got {value!r}; allowed a section with keys {', '.join(f.name for f in dataclasses.fields(hint))}"
            )
        return from_dict(hint, value, f"{key}.")
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)  # YAML reads 3e-4 as a string
        except ValueError:
            number = math.nan
        if not math.isnan(number):
            return number
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{key}: got {value!r}; allowed a value of type {hint.__name__}")


def to_dict(settings: Any) -> dict:
    """Plain data, as written to a run's config.yaml."""
    return dataclasses.asdict(settings)


def of_run(kind: type, folder: Path) -> Any:
    """The settings with which the run in ``folder`` was started."""
    return from_dict(kind, yaml.safe_load((folder / "config.yaml").read_text()))


def check_unchanged(settings: Any, folder: Path, free: tuple[str, ...] = ()) -> None:
    """ValueError if a key outside ``free`` differs from the config.yaml with which the run in ``folder`` was started."""
    started = to_dict(of_run(type(settings), folder))  # a key that is newer than the run had its default
    for key, value in to_dict(settings).items():
        if key not in free and started[key] != value:
            raise ValueError(f"{key}: got {value!r}; allowed {started[key]!r}, with which the run in {folder} was started")


# ------------------------------------------------------------------------------------------------------- method options

_PARTS = ("plan", "credit", "objective", "extra")
_WORDS = ("aggregation", "refresh", "normalizer", "reduction")
_CREDITS = {"group_mean": {}, "leave_one_out": {}, "group_z_score": {"ddof": 1, "eps": 1e-4}}
_KL_WORDS = {"form": ("k1", "k2", "k3", "exact"), "of": ("ratio", "log_likelihood"), "target": ("reference", "old")}
# Below these (or on them) an option has no meaning, and the objective would not always say so.
_ABOVE = dict.fromkeys(("delta", "epsilon", "epsilon_low", "epsilon_high", "cap", "eubo_beta"), 0) | {"bound": 1}


def with_options(method: alg.Method, options: dict[str, Any]) -> alg.Method:
    """The row with some of its numbers replaced: {"plan.num_states": 4, "objective.epsilon_high": 0.3, "kl.beta": 0.0}.

    Keys: a component and one of its keywords (plan, credit, objective, extra, kl), or a choice by name (reduction, normalizer,
    refresh, aggregation, and credit: group_mean, leave_one_out, group_z_score; where states have values of their own,
    step_value: greedy, sampled). ``kl.beta`` 0 removes the KL term, and with it the reference model; ``kl.form`` and
    ``kl.beta`` together give a row the term that it lacks.
    Raises ValueError for a key that the method does not have, and for a value of another kind than the present one.
    """
    penalty = {key.removeprefix("kl."): value for key, value in options.items() if key.startswith("kl.")}
    for key in sorted((key for key in options if not key.startswith("kl.")), key=lambda key: "." in key):
        value, (part, _, name) = options[key], key.partition(".")
        component = getattr(method, part) if part in _PARTS else None
        if key == "credit":
            method = dataclasses.replace(method, credit=_credit(method, value))
        elif key == "step_value" and method.step_value != "none":
            method = _with_step_value(method, value)
        elif key in _WORDS:
            method = dataclasses.replace(method, **{part: value})
        elif component is not None and name in component.keywords:
            _check_like(key, value, component.keywords[name])
            method = dataclasses.replace(method, **{part: partial(component.func, **{**component.keywords, name: value})})
        else:
            raise ValueError(f"method_options.{key}: no such option of {method.name}; allowed {', '.join(_options(method))}")
    return _with_kl(method, penalty) if penalty else method


def _credit(method: alg.Method, name: Any) -> partial:
    if method.step_value != "none":
        now = method.credit.func.__name__
        raise ValueError(
            f"method_options.credit: got {name!r}; allowed {now}, {method.name} gives each state a value of its own"
        )
    if name not in tuple(_CREDITS):  # a list cannot be looked up
        raise ValueError(f"method_options.credit: got {name!r}; allowed {', '.join(_CREDITS)}")
    return partial(getattr(alg, name), **_CREDITS[name])


def _with_step_value(method: alg.Method, value: Any) -> alg.Method:
    """The row with values from greedy or from sampled completions, and the record that they are read from."""
    if value not in ("greedy", "sampled"):
        raise ValueError(f"method_options.step_value: got {value!r}; allowed greedy, sampled")
    needs = (*method.needs, "one_step_sampled") if value == "sampled" else method.needs
    return dataclasses.replace(method, step_value=value, needs=needs)


def _with_kl(method: alg.Method, given: dict[str, Any]) -> alg.Method:
    """The row with another KL term, a new one, or none (beta 0)."""
    for name, value in given.items():
        if name not in alg.KL._fields:
            raise ValueError(
                f"method_options.kl.{name}: no such option of {method.name}; allowed {', '.join(_options(method))}"
            )
        if name in _KL_WORDS and value not in _KL_WORDS[name]:
            raise ValueError(f"method_options.kl.{name}: got {value!r}; allowed {', '.join(_KL_WORDS[name])}")
        if name == "beta" and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf):
            raise ValueError(f"method_options.kl.beta: got {value!r}; allowed numbers from 0")
    if method.kl is None and not {"form", "beta"} <= given.keys():
        name, value = next(iter(given.items()))
        raise ValueError(
            f"method_options.kl.{name}: got {value!r}; allowed with kl.form and kl.beta both, {method.name} has no KL term"
        )
    kl = alg.KL(**{**(method.kl._asdict() if method.kl else {}), **given})
    features = tuple(name for name in method.features if name != "kl_ref")
    if kl.beta == 0:
        return dataclasses.replace(method, kl=None, features=features)
    _check_kl(method, kl)
    return dataclasses.replace(method, kl=kl, features=features + (("kl_ref",) if kl.form == "exact" else ()))


def _check_kl(method: alg.Method, kl: alg.KL) -> None:
    # The old policy is present as the ll of the ratio only: not as a network, not under another normaliser.
    if kl.of != "ratio" and (kl.form == "exact" or kl.target == "old"):
        raise ValueError(f"method_options.kl.of: got {kl.of!r} with form {kl.form}, target {kl.target}; allowed ratio")
    if kl.target == "old" and (kl.form == "exact" or method.anchor == "none"):
        raise ValueError(f"method_options.kl.target: got 'old' with form {kl.form}, anchor {method.anchor}; allowed reference")


def _check_like(key: str, value: Any, present: Any) -> None:
    # An option keeps its kind: a number stays a number, a word a word. The number of states may be None, which is every step.
    kinds = (str,) if isinstance(present, str) else (bool,) if isinstance(present, bool) else (int, float)
    kinds += (type(None),) if key == "plan.num_states" else ()
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"method_options.{key}: got {value!r}; allowed a value like {present!r}")
    low = _ABOVE.get(key.partition(".")[2])
    if low is not None and not value > low:
        raise ValueError(f"method_options.{key}: got {value!r}; allowed above {low}")


def _options(method: alg.Method) -> list[str]:
    words = [f"{p}.{name}" for p in _PARTS if getattr(method, p) for name in getattr(method, p).keywords]
    credit = ["credit"] if method.step_value == "none" else ["step_value"]
    return words + [f"kl.{name}" for name in alg.KL._fields] + credit + list(_WORDS)
