"""Run settings: typed, nested, checked by pydantic; from a YAML file and from ``--any.key value``.

Each class below is a section of a config file, each field a key of it, or of the command line as
``--section.key value``. A wrong setting is a ValueError of one line that names the key, the value
and what is allowed.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import logging
import re
import typing
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic.dataclasses import dataclass

from minidrl.methods import METHODS, RENAMED, has_option
from minidrl.sampler import Sampler
from minidrl.tasks import DEFAULT, TASKS, Task, task_class

log = logging.getLogger("minidrl")
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
Share = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["highest", "high"]
Norm = Annotated[float, Field(gt=0, allow_inf_nan=True)]
Names = Annotated[list[str], Field(min_length=1)]
LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
NAMES = 2  # in a run's config.yaml: what a bare name of a method means, see ``_named``
DATA_PATHS = ("path", "train_path", "held_out_path", "exclude")  # of a task: files of problems
# Keys of older configs, and what took their places.
SUCCESSORS = {key: f"task.{key}" for key in ("hit_share", "late_hit_share")}

# ----------------------------------------------------------------------------------------- sections


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Network:
    """Sizes of a network trained from scratch."""

    hidden_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 3
    num_attention_heads: PositiveInt = 4
    intermediate_size: PositiveInt = 256


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optimizer:
    """AdamW."""

    learning_rate: PositiveFloat = 3e-4
    beta1: Share = 0.9
    beta2: Share = 0.99
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: Norm = 1.0  # .inf: no clipping
    warmup: NonNegativeInt = 0  # updates in which the rate rises linearly
    schedule: Literal["constant", "cosine"] = "constant"  # after that; cosine falls to a tenth


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluation:
    """Evaluation on held-out problems."""

    n: PositiveInt = 512
    temperature: NonNegativeFloat = 1.0  # 1: the policy that is trained; 0: greedy
    every: NonNegativeInt = 0  # steps; 0: only before and after
    skip: NonNegativeInt = 0  # problems left for another purpose, such as the choice of a rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lora:
    """Low-rank adapters, trained instead of the weights.

    The reference policy is the network with its adapters off; checkpoints are adapter folders in
    the format of peft. There is no dropout.
    """

    rank: NonNegativeInt = 0  # 0: no adapters
    alpha: PositiveFloat = 64.0  # alpha / rank is their scale
    target_modules: Names = field(default_factory=lambda: list(LINEAR))  # their layers


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Pretrain:
    """Supervised training: of a fresh network, or fine-tuning of a checkpoint.

    It learns from the task's demonstrations, or from the rows of a file. ``compute_dtype`` auto:
    products in bfloat16 where the device has instructions for it; weights, gradients and the
    optimiser's moments are float32 whatever it is. ``loss`` next_token teaches a checkpoint of
    ``convert --shift`` as the causal model that it was, and judges it as that.
    """

    init: str = ""  # a checkpoint to start from, with its tokenizer; "": fresh, of ``network``
    loss: Literal["elbo", "next_token"] = "elbo"
    data: str = ""  # a file of rows with prompt (or question) and answer; "": demonstrations
    compute_dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    task: SkipValidation[Task] = field(default_factory=task_class(DEFAULT))
    network: Network = field(default_factory=Network)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sampler: Sampler
    evaluate: Evaluation = field(default_factory=Evaluation)
    steps: PositiveInt = 1000
    stop_after: NonNegativeInt = 0  # steps, fewer than scheduled: RL needs a base that can learn
    batch_size: PositiveInt = 128
    save_every: NonNegativeInt = 0  # steps; 0: only at the end
    seed: int = 0
    device: str = "cpu"
    threads: NonNegativeInt = 0  # 0: torch's choice
    workers: NonNegativeInt = 0  # processes that draw the demonstrations, so that a GPU never waits
    matmul_precision: Precision = "highest"  # high: TensorFloat-32
    compile: bool = False

    def __post_init__(self):
        if not self.data and not hasattr(self.task, "demonstrations"):
            got = f"{self.task.name!r}, which has no demonstrations"
            raise ValueError(f"task.name: got {got}; allowed a task that has, or data, a file")
        if not self.init and not hasattr(self.task, "tokenizer"):
            got = f"'' with task {self.task.name}, which has no alphabet of its own"
            raise ValueError(f"init: got {got}; allowed a checkpoint")
        if self.loss == "next_token" and not self.init:
            got = "'next_token' for a fresh network"
            raise ValueError(f"loss: got {got}; allowed elbo, or init, a checkpoint")
        if self.init and self.network != Network():
            raise ValueError("network: got sizes; allowed none beside init, which has its own")
        if self.stop_after > self.steps:
            allowed = f"up to {self.steps}, that of steps"
            raise ValueError(f"stop_after: got {self.stop_after}; allowed {allowed}")
        _check_device(self.device)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Train:
    """One RL run.

    A step is a rollout of num_prompts x num_generations responses and num_iterations updates on it.
    Some settings make a run off-policy on purpose: ``num_iterations`` above 1 (stale rollouts),
    ``rollout_dtype`` bfloat16 (a rounded sampler), ``sampler.top_p`` below 1 (a nucleus), and a
    ``sampler.temperature`` at which the method does not score.
    ``compute_dtype`` bfloat16 is for several processes that train all weights in float32: forwards
    and backwards are of bfloat16 copies, made for one layer at a time.
    """

    model: str = ""  # a folder (relative to the config file), or a name on the Hub
    dtype: Literal["stored", "float32", "bfloat16"] = "stored"
    compute_dtype: Literal["weights", "bfloat16"] = "weights"
    quantize: bool = False  # the base's linear layers in 4 bits, below adapters only (QLoRA)
    lora: Lora = field(default_factory=Lora)
    gradient_checkpointing: bool = False  # activations are computed again in the backward pass
    task: SkipValidation[Task] = field(default_factory=task_class(DEFAULT))
    sampler: Sampler
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluate: Evaluation = field(default_factory=Evaluation)
    method: str = "reinforce"
    method_options: dict[str, Any] = field(default_factory=dict)  # see `minidrl methods NAME`
    steps: PositiveInt = 100
    num_prompts: PositiveInt = 16
    num_generations: PositiveInt = 12  # responses to each prompt: a group
    num_iterations: PositiveInt = 1  # updates on each rollout
    micro_batch: PositiveInt = 128  # sequences that go through the network at a time
    one_pass: bool = True  # where all states of an update fit one micro-batch, in one process
    rollout_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    save_every: NonNegativeInt = 0  # steps; 0: only at the end
    device: str = "cpu"
    threads: NonNegativeInt = 0  # 0: torch's choice
    matmul_precision: Precision = "highest"  # high: TensorFloat-32
    compile: bool = False
    tensorboard: bool = False

    def __post_init__(self):
        _check_device(self.device)
        whole = (self.dtype, self.rollout_dtype, self.lora.rank) == ("float32", "float32", 0)
        if self.compute_dtype != "weights" and not whole:
            allowed = "weights, or dtype and rollout_dtype float32 and lora.rank 0"
            raise ValueError(f"compute_dtype: got {self.compute_dtype!r}; allowed {allowed}")
        if self.quantize and not (self.lora.rank and self.rollout_dtype == "float32"):
            allowed = "with lora.rank from 1 and without a rollout_dtype"
            allowed += ": 4 bits cannot be trained, nor rounded again"
            raise ValueError(f"quantize: got True; allowed {allowed}")
        if self.gradient_checkpointing and self.compile:
            allowed = "one of the two"
            raise ValueError(f"gradient_checkpointing: got True with compile; allowed {allowed}")


def _check_device(device: str) -> None:
    if not re.fullmatch(r"cpu|meta|cuda(:\d+)?", device):
        raise ValueError(f"device: got {device!r}; allowed cpu, cuda, cuda:0 and so on")


# ------------------------------------------------------------------------------------- from a file


def load(kind: type, path: str | Path, overrides: dict[str, Any] | None = None) -> Any:
    """The settings of a YAML file, with overrides on top. Paths in the file are relative to it.

    Where the overrides name another method than the file, the file's ``method_options`` that this
    method does not have are left out, and a remark says which. Where they name another task, of the
    file's settings of its task those stay that say how a model is asked.
    """
    path, overrides = Path(path), overrides or {}
    of_a_run = path.name == "config.yaml" and (path.parent / "metrics.jsonl").is_file()
    data, overrides = _named(read(path), of_a_run), _named(overrides | {"names": NAMES})
    for key in {"model", "init"} & data.keys():
        if isinstance(data[key], str) and data[key]:
            data[key] = _model(path.parent, data[key])
    if data.get("data"):
        data["data"] = str((path.parent / str(data["data"])).resolve())
    if isinstance(task := data.get("task"), dict):
        for key in {*DATA_PATHS} & task.keys():
            task[key] = str((path.parent / str(task[key])).resolve()) if task[key] else task[key]
    if "method" in overrides and "method_options" not in overrides:
        _leave_out_options(data, overrides["method"])
    if "task.name" in overrides:
        _leave_out_settings(data, overrides["task.name"])
    for key, value in overrides.items():
        value = _of_user(key, value)
        # A copy: a later key is written into a section that an earlier one gave.
        _set(data, key, parsed(key, value) if isinstance(value, str) else copy.deepcopy(value))
    return from_dict(kind, data)


class Loader(yaml.SafeLoader):
    """Reads 1e-4 as the number that it is; PyYAML alone takes it for text."""


_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read(path: Path) -> dict:
    """The mapping in a YAML file."""
    if not path.is_file():
        shipped = "the configs that ship are in tiny_configs/"
        raise ValueError(f"config: got {str(path)!r}, which is no file; {shipped}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        what = f"{path} holds {type(data).__name__}"
        raise ValueError(f"config: {what}; allowed a mapping of keys to values")
    return data


def _model(parent: Path, name: str) -> str:
    # A path relative to the config, made absolute; what can only be a name on the Hub as it is.
    known = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not (parent / name).parent.is_dir()
    return name if known else str((parent / name).resolve())


def _named(data: dict, of_a_run: bool = False) -> dict:
    """The same settings with the present name of their method, and without the mark ``names``.

    Names were given anew (methods.RENAMED), some to another method. In the config.yaml of a run
    from before, which has no mark, they mean what they meant; elsewhere what they mean today.
    """
    name, marked = data.get("method"), "names" in data
    data = {key: value for key, value in data.items() if key != "names"}
    if not isinstance(name, str) or name not in RENAMED:
        return data
    if name in METHODS and (marked or not of_a_run):
        if not marked:
            meant = f"follows the code of its authors; what had this name before is {RENAMED[name]}"
            _remark(f"method: {name} {meant}")
        return data
    _remark(f"method: what was called {name} is now {RENAMED[name]}")
    return data | {"method": RENAMED[name]}


@functools.cache  # once a process
def _remark(text: str) -> None:
    log.warning(text)


def _leave_out_options(data: dict, name: Any) -> None:
    own, options = data.get("method", Train.method), data.get("method_options")
    if name != own and name in METHODS and isinstance(options, dict):
        left = [key for key in options if not has_option(METHODS[name], key)]
        data["method_options"] = {key: options[key] for key in options if key not in left}
        if left:
            said = f"{name} has no {', '.join(left)}, which the file sets for {own}: left out"
            log.warning("method_options: %s", said)


def _leave_out_settings(data: dict, name: Any) -> None:
    settings = data.get("task") or {}
    if not isinstance(settings, dict):
        return  # refused below
    own = settings.get("name", DEFAULT)
    if name != own and name in TASKS:
        # How a model is asked stays, in every task that has a choice of it.
        stay = {"prompt_format", "max_prompt_length"} & task_class(name).__dataclass_fields__.keys()
        left = [key for key in settings if key not in stay | {"name"}]
        data["task"] = {key: settings[key] for key in settings if key in stay}
        if left:
            said = f"{', '.join(left)} of the file are settings of {own}: left out for {name}"
            log.warning("task: %s", said)


def parsed(key: str, text: str) -> Any:
    """The value that a text of the command line stands for."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        raise ValueError(f"{key}: got {text!r}; allowed a value in YAML") from None


def _set(data: dict, key: str, value: Any) -> None:
    options = key.startswith("method_options.")  # whose own keys have points
    *parents, last = key.split(".", 1) if options else key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ValueError(f"{key}: got a value below {parent!r}, which is no section")
    data[last] = value


# -------------------------------------------------------------------------------- from plain data


def from_dict(kind: type, data: dict, where: str = "") -> Any:
    """A settings dataclass from plain data; refuses unknown keys and values of the wrong type."""
    if kind is Train:
        data = {key: value for key, value in data.items() if key != "names"}
        if data.get("filter_groups") is False:  # a key of older runs, which hardly any had set
            del data["filter_groups"]
    if kind in (Train, Pretrain) and "task" in data:
        task = data["task"]
        if not isinstance(task, dict):
            raise ValueError(f"task: got {task!r}; allowed a section with the key name and others")
        settings = {key: value for key, value in task.items() if key != "name"}
        if settings.get("cut") == "relabelling":  # a key of older runs of Sudoku
            del settings["cut"]
        chosen = task_class(task.get("name", DEFAULT))
        data = data | {"task": from_dict(chosen, settings, "task.")}
    if not hasattr(kind, "__pydantic_config__"):
        with_config(STRICT)(kind)  # a task: a plain dataclass, which is checked here
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise ValueError(in_one_line(error, kind, where)) from None


def in_one_line(error: ValidationError, kind: type, where: str = "") -> str:
    """The first of pydantic's errors as ``key: got value; allowed ..``."""
    found = sorted(error.errors(), key=lambda e: e["type"] != "unexpected_keyword_argument")[0]
    *parents, name = map(str, found["loc"] or ("",))
    key = where + ".".join(map(str, found["loc"]))
    if found["type"] == "unexpected_keyword_argument":
        if key in SUCCESSORS:
            return f"{key}: no key any more; allowed in its place {SUCCESSORS[key]}"
        for parent in parents:
            kind = typing.get_type_hints(kind)[parent]
        known = [f.name for f in dataclasses.fields(kind)]
        near = difflib.get_close_matches(name, known, 1)
        hint = f" (did you mean {key.removesuffix(name)}{near[0]}?)" if near else ""
        return f"{key}: unknown key{hint}; allowed {', '.join(known)}"
    if found["type"] == "missing":
        return f"{key}: missing; it has no default"
    if found["type"] == "value_error":  # of a __post_init__, which may not know where it stands
        said = str(found["ctx"]["error"])
        prefix = key and f"{key.removesuffix('.')}."
        return said if said.startswith(prefix) else prefix + said
    allowed = found["msg"].removeprefix("Input should be ")
    return f"{key}: got {found['input']!r}; allowed {allowed[0].lower()}{allowed[1:]}"


# ---------------------------------------------------------------------------------- to plain data


def to_dict(settings: Any) -> dict:
    """Plain data, as written to a run's config.yaml."""
    data = dataclasses.asdict(settings)
    return data | {"task": {"name": settings.task.name} | data["task"]}


def dumped(settings: Any) -> str:
    """The text of a run's config.yaml."""
    mark = {"names": NAMES} if hasattr(settings, "method") else {}
    return yaml.safe_dump(to_dict(settings) | mark, sort_keys=False)


def of_run(kind: type, folder: Path) -> Any:
    """The settings with which the run in ``folder`` was started."""
    path = folder / "config.yaml"
    data = _named(read(path), of_a_run=True)
    try:
        return from_dict(kind, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_user(key: str, value: Any) -> Any:
    """A file that an option names, made absolute: a run's config is read elsewhere, too."""
    of_a_file = key == "data" or key in {f"task.{name}" for name in DATA_PATHS}
    return str(Path(str(value)).resolve()) if value and of_a_file else value


def check_unchanged(settings: Any, folder: Path, free: tuple[str, ...] = ()) -> None:
    """ValueError if a key outside ``free`` differs from those with which the run was started."""
    # A key newer than the run had its default.
    started, now = (_flat(to_dict(s)) for s in (of_run(type(settings), folder), settings))
    for key in started | now:
        is_free = key in free or key.partition(".")[0] in free
        # Earlier runs kept such a file as the user had named it.
        before, after = (_of_user(key, values.get(key)) for values in (started, now))
        if not is_free and before != after:
            allowed = f"{started.get(key)!r}, with which the run in {folder} was started"
            raise ValueError(f"{key}: got {now.get(key)!r}; allowed {allowed}")


def _flat(data: dict, where: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in data.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{where}{key}.") if inner else {where + key: value}
    return flat
