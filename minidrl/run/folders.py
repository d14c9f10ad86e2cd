"""The folder of a run, in which nothing that was saved is ever lost.

    config.yaml      the settings
    metrics.jsonl    one JSON object a line: an update, an evaluation, or both
    summary.json     of a run that has finished
    checkpoint-N     network, tokenizer, optimiser and counters after N steps, with copies of
                     config.yaml and metrics.jsonl as they stood then; it is never written twice

A file or a checkpoint is written under another name (NAME.part), flushed to the disk and renamed.
A rename happens or does not: what has its name is whole, whatever ends the process or the machine.
``--resume`` goes on from the newest checkpoint, and repeats what an interruption took.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from minidrl.denoiser import trained
from minidrl.run import checkpoints, config, distributed
from minidrl.run.adapters import has_adapters
from minidrl.run.launch import one_line

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
PART = ".part"
# What may differ when a run is continued: how long, how observed, on what machine.
FREE_ON_RESUME = ("steps", "save_every", "evaluate.every", "micro_batch", "gradient_checkpointing")
FREE_ON_RESUME += ("stop_after", "device", "threads", "workers", "compile", "tensorboard")
FREE_ON_RESUME += ("task.max_prompt_length",)  # which all prompts are checked to fit

log = logging.getLogger("minidrl")


# ------------------------------------------------------------------------------ whole or not at all
def write(path: Path, content: str | bytes) -> None:
    """A file as a whole; where that fails, the one that was there stays."""
    part = path.with_name(path.name + PART)
    with _writing(path):
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)


def append(path: Path, line: str) -> None:
    """A line at the end of a file; what is not flushed yet may go with the machine."""
    with _writing(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; at the end of the block it has its name."""
    with _filled(path.with_name(path.name + PART)) as part:
        yield part
        _sync(*part.rglob("*"), part)
        os.replace(part, path)
        _sync(path.parent)


@contextlib.contextmanager
def into(path: Path) -> Iterator[Path]:
    """A folder to fill, whose files then replace those of their names in ``path``, each whole."""
    with _filled(path / f"files{PART}") as part:
        yield part
        for file in part.iterdir():
            _sync(file)
            os.replace(file, path / file.name)
        _sync(path)


@contextlib.contextmanager
def _filled(part: Path) -> Iterator[Path]:
    # Empty at first; what still has that name at the end was not finished.
    with _writing(part.with_suffix("")):
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    # The libraries that write weights and tokenizers raise exceptions of their own for a full disk.
    try:
        yield
    except Exception as error:
        raise OSError(f"{path} cannot be written: {one_line(error)}") from error


def _sync(*paths: Path) -> None:
    # What was written to a file, or the names in a folder, reach the disk.
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -------------------------------------------------------------------------------------- checkpoints
def save_checkpoint(
    out: Path, model: Any, tok: Any, optimizer: torch.optim.Optimizer, state: dict
) -> Path:
    """All that a run goes on from: network, tokenizer, optimiser, counters, settings and log.

    One that is there already is of the same step of the same run, and stays. Returns its folder.
    """
    path = out / f"checkpoint-{state['step']}"
    gathered = get_optimizer_state_dict(model, optimizer, options=distributed.WHOLE)
    slots = gathered.get("state", {}).items()  # nothing but in process 0
    tensors = {f"{name}/{key}": value for name, slot in slots for key, value in slot.items()}
    weights = distributed.whole_weights(model)

    def save() -> None:
        if path.exists():
            return
        with folder(path) as part:
            checkpoints.save(model, tok, part, weights)
            save_file(tensors, part / OPTIMIZER)
            (part / STATE).write_text(json.dumps(state), encoding="utf-8")
            for name in (CONFIG, METRICS):
                shutil.copyfile(out / name, part / name)

    distributed.on_main(save)
    return path


def load_checkpoint(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's weights and optimiser state back, to the bit; returns its counters."""
    with _whole(path):
        if has_adapters(model):
            checkpoints.read_adapters(model, path)
        else:
            # On the CPU: beside the network a GPU may be full.
            stored, _ = checkpoints.load(path, dtype=model.model.dtype)
            weights = dict(stored.named_parameters())
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(distributed.sharded_like(weights[name], p))
        load_optimizer(path / OPTIMIZER, model, optimizer)
        return _state(path)


def _state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def load_optimizer(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The moments and counts of a file into an optimiser; ValueError unless the names agree."""
    slots = {
        f"{name}/{key}": value
        for name, p in trained(model)
        for key, value in optimizer.state[p].items()
    }
    with safe_open(path, framework="pt") as file:
        if not (names := set(file.keys())):  # of older versions, before the first update
            return
        if strange := sorted(names ^ slots.keys()):
            raise ValueError(f"{path}: {strange[0]} is in the file or in this run, not in both")
        for name, slot in slots.items():
            slot.copy_(distributed.sharded_like(file.get_tensor(name), slot))


def checkpoint_folders(out: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    found = [path for path in out.glob("checkpoint-*") if re.fullmatch(r"\w+-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of steps after which it was written, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


@contextlib.contextmanager
def _whole(checkpoint: Path) -> Iterator[None]:
    # No crash leaves a damaged one here; a copy that was cut short does, and a disk may.
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        why = one_line(error).rpartition("which cannot be read: ")[2]  # of the first who said it
        got = f"{str(checkpoint)!r}, which cannot be read: {why}"
        allowed = "a whole one: without this folder, the checkpoint before it is taken"
        raise ValueError(f"resume: got {got}; allowed {allowed}") from None


# ------------------------------------------------------------------------------ a run and its end
@contextlib.contextmanager
def opened(out: Path, settings: Any, resume: bool) -> Iterator[tuple[Path | None, dict[str, str]]]:
    """The folder of a run, for this process alone; yields the checkpoint to go on from, or None,
    and the sums of the data files, which a checkpoint keeps.

    No run is overwritten. The lock is the kernel's: it goes with the process, however that ends.
    """
    lock = FileLock(out / ".lock")
    try:
        yield distributed.on_main(lambda: _open(out, settings, resume, lock))
    finally:
        lock.release()


def check(out: Path, settings: Any, resume: bool) -> dict[str, str]:
    """ValueError where no run of these settings may begin in ``out``, or go on: asked before
    anything is loaded. Returns the sums of the data files."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: got {str(out)!r}, which is a file; allowed a folder")
    names = [path.name for path in out.iterdir()] if out.exists() else []
    names = [name for name in names if name != ".lock" and not name.endswith(PART)]
    found = checkpoint_folders(out)
    begun = CONFIG in names or found
    if resume and not begun:
        got = f"{str(out)!r}, which holds no checkpoint"
        raise ValueError(f"resume: got {got}; allowed the folder of a run")
    ended = SUMMARY in names and not found  # without a checkpoint there is nothing to go on from
    if (found and not resume) or (names and not begun) or ended:
        got = f"{str(out)!r}, which already holds a run or other files"
        allowed = "another --out" + (", or --resume to continue it" if found else "")
        raise ValueError(f"out: got {got}; allowed {allowed}")
    sums = data_sums(settings)
    if found:
        _check_resumed(out, found[-1], settings, sums)
    return sums


def _open(
    out: Path, settings: Any, resume: bool, lock: FileLock
) -> tuple[Path | None, dict[str, str]]:
    sums = check(out, settings, resume)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        got = f"{str(out)!r}, to which another process is writing"
        raise ValueError(f"out: got {got}; allowed another --out, or wait for it") from None
    except OSError as error:
        raise OSError(f"out: {out} cannot be written to: {error}") from None
    for part in out.glob(f"checkpoint-*{PART}"):  # of a write that was interrupted
        shutil.rmtree(part)
    if found := checkpoint_folders(out):
        (out / SUMMARY).unlink(missing_ok=True)  # it goes on, and has not finished
        return found[-1], sums
    if (out / METRICS).is_file() and (out / METRICS).stat().st_size:
        config.check_unchanged(settings, out)
        log.warning(f"{out} holds a run that ended before its first checkpoint; it starts again")
    return None, sums


def _check_resumed(out: Path, checkpoint: Path, settings: Any, sums: dict[str, str]) -> None:
    """ValueError unless these settings and data may continue the run."""
    config.check_unchanged(settings, checkpoint, free=FREE_ON_RESUME)
    with _whole(checkpoint):
        known = _state(checkpoint).get("data", {})  # an older version says nothing of its data
    for key, digest in sums.items():
        if digest != known.get(key, digest):
            section, name = (settings, key) if key == "data" else (settings.task, f"task.{key}")
            got = f"{getattr(section, key)!r}, which has changed since {checkpoint} was written"
            allowed = f"the file as it was, or another --out, for a new run from {checkpoint}"
            raise ValueError(f"{name}: got {got}; allowed {allowed}")
    step, key = step_of(checkpoint), "stop_after" if getattr(settings, "stop_after", 0) else "steps"
    last = getattr(settings, key)
    if step > last or (step == last and read_summary(out)):
        allowed = f"above {step}, where the run in {out} stands"
        raise ValueError(f"{key}: got {last}; allowed {allowed}")


def data_sums(settings: Any) -> dict[str, str]:
    """The SHA-256 of each data file of a run, by its setting."""
    files = {key: getattr(settings.task, key, "") for key in config.DATA_PATHS}
    files["data"] = getattr(settings, "data", "")
    sums = {}
    for key, path in files.items():
        if path:
            with open(path, "rb") as file:
                sums[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def write_summary(out: Path, summary: dict) -> dict:
    """summary.json of a run; returns what it wrote."""
    write(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(out: Path) -> dict:
    """summary.json of a finished run; empty if there is none, or none that can be read."""
    try:
        return dict(json.loads((out / SUMMARY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


# ---------------------------------------------------------------------------------------------- log
def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; an unfinished last one, of a stopped run, is left out."""
    lines = (Path(run) / METRICS).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


class MetricsLog:
    """metrics.jsonl, and TensorBoard's event files where they are asked for.

    With it a run begins: its settings are written. A resumed run begins with the lines that its
    checkpoint holds; later ones are written again.
    """

    def __init__(self, out: Path, settings: Any, checkpoint: Path | None):
        self.path, self.writer = out / METRICS, None
        distributed.on_main(lambda: self._begin(out, settings, checkpoint))

    def _begin(self, out: Path, settings: Any, checkpoint: Path | None) -> None:
        if tensorboard := getattr(settings, "tensorboard", False):
            from torch.utils.tensorboard import SummaryWriter
        write(out / CONFIG, config.dumped(settings))
        write(self.path, (checkpoint / METRICS).read_bytes() if checkpoint else "")
        if tensorboard:
            step = step_of(checkpoint) if checkpoint else 0
            self.writer = SummaryWriter(out / "tensorboard", purge_step=step + 1)

    def write(self, row: dict) -> None:
        """One line; floats with seven digits."""
        distributed.on_main(lambda: self._write(row))

    def _write(self, row: dict) -> None:
        short = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in row.items()}
        append(self.path, json.dumps(short))
        if self.writer is not None:
            for key, value in row.items():
                if isinstance(value, float):
                    self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """End the event file."""
        if self.writer is not None:
            self.writer.close()
