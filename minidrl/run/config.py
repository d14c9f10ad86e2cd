"""Run settings: typed, nested, checked; from a YAML file and from ``--any.key value``."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from minidrl.methods import METHODS, has_option
from minidrl.run import untrusted
from minidrl.run.launch import launched_rank, note
from minidrl.run.untrusted import MOST_ALPHA, MOST_RANK, WHOLE, brief
from minidrl.sampler import TEMPERATURES, Sampler, is_temperature
from minidrl.tasks import DEFAULT, TASKS, Task, task_class

ASKED = ("prompt_format", "max_prompt_length")  # settings that every task with chats has
MOST = 2**20  # sequences of a rollout, a batch, an evaluation: beyond it no step would end
LONGEST_PATH, LONGEST_NAME = 4096, 255  # bytes, of the systems that this runs on
MOST_LAYERS, MOST_UPDATES, MOST_THREADS = 1024, 4096, 256


def _one_of(key: str, value: Any, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{key}: got {value!r}; allowed {', '.join(allowed)}")


def _at_most(key: str, value: int, most: int, of: str = "") -> None:
    if value > most:
        raise ValueError(f"{key}: got {value}; allowed up to {most}{of}")


def _check_machine(device: str, threads: int) -> None:
    if not re.fullmatch("cpu|meta|cuda(:[0-9]{1,2})?", device, re.ASCII):
        raise ValueError(f"device: got {device!r}; allowed cpu, cuda, cuda:0 and so on")
    _at_most("threads", threads, max(MOST_THREADS, os.cpu_count() or 1))


def _at_least(settings: Any, section: str, **lowest: float) -> None:
    for name, low in lowest.items():
        if getattr(settings, name) < low:
            raise ValueError(f"{section}{name}: got {getattr(settings, name)}; allowed from {low}")


def check_length(task: Task, length: int) -> None:
    """ValueError where no response of this length can be a solution."""
    shortest = getattr(task, "shortest_response", 1)
    if length < shortest:
        allowed = f"from {shortest}, as the shortest response to {task.name} has"
        raise ValueError(f"sampler.length: got {length}; allowed {allowed}")


_PRECISIONS = ("highest", "high")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Sizes of a network trained from scratch."""

    hidden_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    intermediate_size: int = 256

    def __post_init__(self):
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        _at_least(self, "network.", **dict.fromkeys(names, 1))
        _at_most("network.num_hidden_layers", self.num_hidden_layers, MOST_LAYERS)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW. ``warmup`` updates rise linearly to ``learning_rate``; ``schedule`` constant or cosine
    (to a tenth) follows."""

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup: int = 0
    schedule: str = "constant"

    def __post_init__(self):
        _one_of("optimizer.schedule", self.schedule, "constant", "cosine")
        for name, most in {"learning_rate": "finite numbers", "max_grad_norm": "numbers"}.items():
            value = getattr(self, name)
            if value <= 0 or (value == math.inf and name == "learning_rate"):
                raise ValueError(f"optimizer.{name}: got {value}; allowed {most} above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                allowed = "0 up to, not including, 1"
                raise ValueError(f"optimizer.{name}: got {getattr(self, name)}; allowed {allowed}")
        _at_least(self, "optimizer.", weight_decay=0, warmup=0)
        if self.weight_decay == math.inf:
            raise ValueError("optimizer.weight_decay: got inf; allowed finite numbers from 0")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out evaluation: ``n`` puzzles at ``temperature`` (1 = the policy that is trained), every
    ``every`` steps (0: only before and after). ``skip``: held-out puzzles that come before them and
    are left for another purpose, such as the choice of a learning rate."""

    n: int = 512
    temperature: float = 1.0
    every: int = 0
    skip: int = 0

    def __post_init__(self):
        _at_least(self, "evaluate.", n=1, temperature=0, every=0, skip=0)
        if not is_temperature(self.temperature):
            raise ValueError(
                f"evaluate.temperature: got {self.temperature}; allowed {TEMPERATURES}"
            )
        _at_most("evaluate.n", self.n, MOST)
        _at_most("evaluate.skip", self.skip, MOST)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on the linear layers named by ``target_modules``, instead of training all
    weights; ``rank`` 0: none.

    ``alpha`` over ``rank`` is their scale. The reference policy is the network with its adapters
    off; checkpoints are adapter folders in the format of peft. There is no dropout.
    """

    rank: int = 0
    alpha: float = 64.0
    target_modules: list = field(
        default_factory=lambda: [
            f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
        ]
    )

    def __post_init__(self):
        _at_least(self, "lora.", rank=0)
        _at_most("lora.rank", self.rank, MOST_RANK)
        if not 0 < self.alpha <= MOST_ALPHA:
            allowed = f"numbers above 0, up to {MOST_ALPHA:g}"
            raise ValueError(f"lora.alpha: got {self.alpha}; allowed {allowed}")
        names = self.target_modules
        if not names or not all(isinstance(name, str) for name in names):
            allowed = "names of linear layers, at least one"
            raise ValueError(f"lora.target_modules: got {names!r}; allowed {allowed}")


def _default_task() -> Task:
    return task_class(DEFAULT)()


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Supervised training of the tiny masked diffusion LM itself, on the task's demonstrations.

    ``stop_after`` ends the training before its schedule of ``steps`` has run out (0: not):
    reinforcement learning needs a base that can still learn. ``matmul_precision`` as in ``Train``.
    ``workers``: processes that make the demonstrations of the next steps (0: none, each step makes
    its own), for a GPU, which learns faster than one process can draw; the numbers are the same.
    """

    task: Task = field(default_factory=_default_task)
    network: Network = field(default_factory=Network)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sampler: Sampler
    evaluate: Evaluation = field(default_factory=Evaluation)
    steps: int = 1000
    stop_after: int = 0
    batch_size: int = 128
    save_every: int = 0
    seed: int = 0
    device: str = "cpu"
    threads: int = 0
    workers: int = 0
    matmul_precision: str = "highest"
    compile: bool = False

    def __post_init__(self):
        if not hasattr(self.task, "demonstrations"):
            got = f"{self.task.name!r}, which has no demonstrations"
            raise ValueError(f"task.name: got {got}; allowed a task that has (minidrl/tasks)")
        _at_least(self, "", steps=1, stop_after=0, batch_size=1, save_every=0, threads=0, workers=0)
        if self.stop_after > self.steps:
            allowed = f"up to steps ({self.steps}), or 0 for all of them"
            raise ValueError(f"stop_after: got {self.stop_after}; allowed {allowed}")
        _at_most("batch_size", self.batch_size, MOST)
        _at_most("workers", self.workers, MOST_THREADS)
        _check_machine(self.device, self.threads)
        _one_of("matmul_precision", self.matmul_precision, *_PRECISIONS)
        check_length(self.task, self.sampler.length)


@dataclass(frozen=True, kw_only=True)
class Train:
    """One RL run. A step is a rollout of num_prompts x num_generations responses and num_iterations
    inner updates on it.

    ``filter_groups`` leaves out the prompts whose responses all earned the same (zero-variance
    groups, zero advantage), so that means are over the others: the filter of DAPO's dynamic
    sampling, without sampling anew. Three ways to be off-policy on purpose: ``num_iterations``
    above 1 (stale rollouts), ``rollout_dtype`` bfloat16 (the sampler's weights and activations are
    rounded, the trained ones are not), and ``sampler.cache`` prefix or dual (the sampler reads keys
    and values that are out of date; the metric ``rollout_kl`` says how far that takes it, in nats a
    token).

    ``compute_dtype`` bfloat16, for several processes that train all weights in float32: forwards
    and backwards, rollouts included, are of bfloat16 copies of the weights, made for one layer at a
    time. The weights, the sum of their gradients and the moments stay float32. weights: the
    arithmetic is in the dtype of the weights.

    Memory (``python -m minidrl memory CONFIG`` adds it up): ``dtype`` of the network, float32,
    bfloat16 or as stored; ``quantize``: the weights of the linear layers in 4 bits, below adapters
    only (QLoRA); ``gradient_checkpointing``: the activations of a layer are computed again in the
    backward pass; ``micro_batch`` sequences go through the network at a time.

    Speed: ``one_pass``: an update whose masked states fit one micro-batch, in one process, computes
    them once, with their graph, where it would make two passes (minidrl/gradient.py). A first pass
    is then neither made nor counted as network calls, so that what is counted depends on
    ``micro_batch``; the cells of a study make two passes unless they say otherwise.
    ``matmul_precision``, in the words of torch.set_float32_matmul_precision, is that of
    float32 products. With high a GPU may round their factors to 10 bits after the point
    (TensorFloat-32); without, float32 runs beside its tensor cores.
    """

    model: str = ""
    dtype: str = "stored"
    compute_dtype: str = "weights"
    quantize: bool = False
    lora: Lora = field(default_factory=Lora)
    gradient_checkpointing: bool = False
    task: Task = field(default_factory=_default_task)
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
    one_pass: bool = True
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
        _at_least(
            self, "", steps=1, num_prompts=1, num_generations=1, num_iterations=1, micro_batch=1
        )
        _at_least(self, "", save_every=0, threads=0)
        _at_most("num_iterations", self.num_iterations, MOST_UPDATES)
        most = MOST // min(self.num_generations, MOST)
        _at_most("num_generations", self.num_generations, MOST)
        _at_most("num_prompts", self.num_prompts, most, f" with {self.num_generations} generations")
        _check_machine(self.device, self.threads)
        _one_of("rollout_dtype", self.rollout_dtype, "float32", "bfloat16")
        _one_of("dtype", self.dtype, "stored", "float32", "bfloat16")
        _one_of("compute_dtype", self.compute_dtype, "weights", "bfloat16")
        self._check_compute_dtype()
        _one_of("matmul_precision", self.matmul_precision, *_PRECISIONS)
        check_length(self.task, self.sampler.length)
        if self.quantize and not (self.lora.rank and self.rollout_dtype == "float32"):
            allowed = "with lora.rank from 1 and without a rollout_dtype"
            allowed += ": 4 bits cannot be trained, nor rounded again"
            raise ValueError(f"quantize: got True; allowed {allowed}")
        if self.gradient_checkpointing and self.compile:
            raise ValueError(
                "gradient_checkpointing: got True with compile; allowed one of the two"
            )
        if self.filter_groups and self.num_generations == 1:
            allowed = "from 2 (a group of one would always go)"
            raise ValueError(f"filter_groups: got True with num_generations 1; allowed {allowed}")

    def _check_compute_dtype(self) -> None:
        if self.compute_dtype == "weights":
            return
        needed = {"dtype": self.dtype, "rollout_dtype": self.rollout_dtype}
        for key, value in needed.items():
            if value != "float32":
                got = f"{self.compute_dtype!r} with {key} {value}"
                raise ValueError(f"compute_dtype: got {got}; allowed weights, or {key} float32")
        if self.lora.rank:
            got = f"{self.compute_dtype!r} with lora.rank {self.lora.rank}"
            allowed = "weights: the dtype of the base is that of the arithmetic"
            raise ValueError(f"compute_dtype: got {got}; allowed {allowed}")


def load(kind: type, path: str | Path, overrides: dict[str, Any] | None = None) -> Any:
    """The settings of a YAML file, with overrides on top. Paths in the file are relative to it.

    Where the overrides name another method than the file, the file's ``method_options`` that this
    method does not have are left out, and a line on stderr says which. Where they name another
    task, of the file's settings of its task those stay that say how a model is asked.
    Raises ValueError, in one line that names the key, the value and what is allowed.
    """
    path, overrides = Path(path), overrides or {}
    data = read(path)
    if isinstance(data.get("model"), str):
        check_path("model", data["model"])
        data["model"] = _model(path.parent, data["model"])
    _make_paths_absolute(path.parent, data.get("task"))
    notes = []
    if "method" in overrides and "method_options" not in overrides:
        notes.append(_leave_out_options(data, overrides["method"]))
    if "task.name" in overrides:
        notes.append(_leave_out_settings(data, overrides["task.name"]))
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ValueError(f"settings: got the key {brief(key)}; allowed text")
        # A copy: a later key is written into a section that an earlier one gave.
        _set(data, key, parsed(key, value) if isinstance(value, str) else copy.deepcopy(value))
    settings = from_dict(kind, data)
    for said in filter(None, notes):
        if launched_rank() == 0:
            note(said)
    return settings


def read(path: Path) -> dict:
    """The mapping in a YAML file; ValueError where there is none."""
    check_path("config", str(path))
    if not path.is_file():
        shipped = "the configs that ship are in tiny_configs/"
        raise ValueError(f"config: got {str(path)!r}, which is no file; {shipped}")
    data = untrusted.parsed_yaml(untrusted.text(path), f"config: {path}")
    if not isinstance(data, dict):
        what = f"{path} holds {type(data).__name__}"
        raise ValueError(f"config: {what}; allowed a mapping of keys to values")
    return data


def _leave_out_options(data: dict, name: Any) -> str:
    # Those that the file has for its own method, and that the method ``name`` does not have.
    # Returns what a user should know.
    own, options = data.get("method", Train.method), data.get("method_options")
    known = isinstance(name, str) and name in METHODS
    if name == own or not known or not isinstance(options, dict):
        return ""
    words = [key for key in options if isinstance(key, str)]
    left = [key for key in words if not has_option(METHODS[name], key)]
    data["method_options"] = {key: value for key, value in options.items() if key not in left}
    said = f"{name} has no {', '.join(left)}, which the file sets for {own}: left out"
    return f"method_options: {said}" if left else ""


def _leave_out_settings(data: dict, name: Any) -> str:
    # Those that the file has for its own task, but for how the model is asked. Returns as above.
    settings = data.get("task") or {}
    own = settings.get("name", DEFAULT) if isinstance(settings, dict) else name
    if name == own or name not in TASKS:
        return ""
    stay = {key for key in ASKED if key in task_class(name).__dataclass_fields__}
    left = [str(key) for key in settings if key not in stay | {"name"}]
    data["task"] = {key: value for key, value in settings.items() if key in stay}
    said = f"{', '.join(left)} of the file are settings of {own}: left out for {name}"
    return f"task: {said}" if left else ""


def check_path(key: str, name: str) -> None:
    """ValueError for what no file system can have as a name."""
    try:
        fits = b"\0" not in os.fsencode(name) and len(os.fsencode(name)) < LONGEST_PATH
        fits = fits and all(len(os.fsencode(part)) <= LONGEST_NAME for part in Path(name).parts)
    except UnicodeEncodeError:  # half of a pair of surrogates
        fits = False
    if not fits:
        raise ValueError(f"{key}: got {brief(name)}; allowed what can be the name of a file")


def _model(parent: Path, name: str) -> str:
    # A path relative to the config, made absolute; what can only be a name on the Hub as it is.
    known = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not (parent / name).parent.is_dir()
    return name if known else str((parent / name).resolve())


def _make_paths_absolute(parent: Path, task: Any) -> None:
    for key in ("path", "train_path", "held_out_path"):
        if isinstance(task, dict) and isinstance(task.get(key), str) and task[key]:
            check_path(f"task.{key}", task[key])
            task[key] = str((parent / task[key]).resolve())


def parsed(key: str, text: str) -> Any:
    """The value that a text of the command line stands for."""
    try:
        return untrusted.parsed_yaml(text, key)
    except ValueError:
        raise ValueError(f"{key}: got {brief(text)}; allowed a value in YAML") from None


def _set(data: dict, key: str, value: Any) -> None:
    options = key.startswith("method_options.")  # whose own keys have points
    *parents, last = key.split(".", 1) if options else key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ValueError(f"{key}: got a value below {parent!r}, which is no section")
    data[last] = value


def from_dict(kind: type, data: dict, where: str = "") -> Any:
    """A settings dataclass from plain data; refuses unknown keys and values of the wrong type."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f" (did you mean {where}{near[0]}?)" if near else ""
            raise ValueError(f"{where}{key}: unknown key{hint}; allowed {', '.join(fields)}")
    for name, f in fields.items():
        if f.default is f.default_factory is dataclasses.MISSING and name not in data:
            raise ValueError(f"{where}{name}: missing; it has no default")
    values = {key: _convert(hints[key], data[key], f"{where}{key}") for key in data}
    try:
        return kind(**values)
    except ValueError as error:  # a section of its own knows nothing of where it stands
        told = str(error)
        raise ValueError(told if told.startswith(where) else f"{where}{told}") from None


def _convert(hint: Any, value: Any, key: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if value is None else _convert(typing.get_args(hint)[0], value, key)
    if hint is Task and isinstance(value, dict):
        if not isinstance(value.get("name", DEFAULT), str):
            raise ValueError(f"{key}.name: got {brief(value['name'])}; allowed text")
        settings = {name: setting for name, setting in value.items() if name != "name"}
        return from_dict(task_class(value.get("name", DEFAULT)), settings, f"{key}.")
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value, f"{key}.")
    if dataclasses.is_dataclass(hint) or hint is Task:
        kind = task_class(DEFAULT) if hint is Task else hint
        names = ", ".join(f.name for f in dataclasses.fields(kind))
        raise ValueError(f"{key}: got {brief(value)}; allowed a section with keys {names}")
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = untrusted.number(value)  # "3e-4" in quotes is one, too
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isnan(number):
            return number
    elif hint is int:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and -WHOLE < value < WHOLE and value == int(value):  # 1e3 is a whole number
            return int(value)
    elif isinstance(value, hint):
        return value
    raise ValueError(f"{key}: got {brief(value)}; allowed a value of type {hint.__name__}")


def to_dict(settings: Any) -> dict:
    """Plain data, as written to a run's config.yaml."""
    data = dataclasses.asdict(settings)
    return data | {"task": {"name": settings.task.name} | data["task"]}


def without_defaults(settings: Any) -> dict:
    """As ``to_dict``, but for what has the default of its field: a key that a later version adds
    changes nothing here until it is used."""
    data = _beyond_defaults(settings)
    return data | {"task": {"name": settings.task.name} | data.get("task", {})}


def _beyond_defaults(settings: Any) -> dict:
    found = {}
    for f in dataclasses.fields(settings):
        value, made = getattr(settings, f.name), f.default_factory
        if dataclasses.is_dataclass(value):
            found[f.name] = _beyond_defaults(value)
        elif value != (f.default if made is dataclasses.MISSING else made()):
            found[f.name] = value
    return {name: value for name, value in found.items() if value != {}}


def dumped(settings: Any) -> str:
    """The text of a run's config.yaml."""
    return yaml.dump(to_dict(settings), Dumper=untrusted.Dumper, sort_keys=False)


def of_run(kind: type, folder: Path) -> Any:
    """The settings with which the run in ``folder`` was started."""
    path = folder / "config.yaml"
    data = read(path)
    try:
        return from_dict(kind, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_unchanged(settings: Any, folder: Path, free: tuple[str, ...] = ()) -> None:
    """ValueError if a key outside ``free`` differs from those with which the run was started."""
    started = to_dict(of_run(type(settings), folder))  # a key newer than the run had its default
    for key, value in to_dict(settings).items():
        if key not in free and started[key] != value:
            allowed = f"{started[key]!r}, with which the run in {folder} was started"
            raise ValueError(f"{key}: got {value!r}; allowed {allowed}")
