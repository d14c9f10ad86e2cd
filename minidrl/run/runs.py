"""A run on disk: its folder, checkpoints, log and resumption."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from minidrl.denoiser import has_adapters, trained
from minidrl.keyed import keyed_generator, keyed_seed  # noqa: F401 (old place; goes with runs.py)
from minidrl.run import checkpoints, config, distributed, files, report, untrusted
from minidrl.run.launch import note, one_line

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
_NAME = re.compile(r"checkpoint-[0-9]+")
_FOLDERS = re.compile(r"(checkpoint|failed)-[0-9]+(\.part|\.old)?|files\.part")
_NUMBERED = ("checkpoint-*[0-9]", "failed-*[0-9]")  # folders, as in Path.glob

# ------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    folder: Path, model: Any, tok: Any, optimizer: torch.optim.Optimizer, state: dict
) -> None:
    """All that a run goes on from, whole or not at all: see ``minidrl.run.files``.

    Network, tokenizer, optimiser (safetensors), counters; and settings and log of the run so far,
    from the folder above.
    """
    gathered = get_optimizer_state_dict(model, optimizer, options=distributed.WHOLE)
    slots = gathered.get("state", {}).items()  # nothing but in process 0
    tensors = {f"{name}/{key}": value for name, slot in slots for key, value in slot.items()}
    model = distributed.unsharded_copy(model)
    distributed.on_main(lambda: _write_checkpoint(folder, model, tok, tensors, state))


def _write_checkpoint(
    folder: Path, model: Any, tok: Any, tensors: dict[str, Tensor], state: dict
) -> None:
    with files.folder(folder) as part:
        checkpoints.save(model, tok, part)
        save_file(tensors, part / "optimizer.safetensors")
        (part / "state.json").write_text(json.dumps(state), encoding="utf-8")
        for name in (CONFIG, METRICS):
            if (folder.parent / name).is_file():
                shutil.copyfile(folder.parent / name, part / name)


def load_checkpoint(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's weights and optimiser state back; returns its counters."""
    if has_adapters(model):
        stored = distributed.empty_copy(model)
        checkpoints.read_adapters(stored, folder)
    else:
        stored, _ = checkpoints.load(folder)  # on the CPU: beside the network a GPU may be full
    checkpoints.check_finite(stored, folder)
    distributed.load_weights(model, stored)
    return load_optimizer(folder, model, optimizer)


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's optimiser state back; returns its counters.

    ValueError, before anything is changed, unless the file has the tensors of this optimiser, no
    other, in their shapes, and the counters are those of the step that the folder is named for.
    """
    path, state = folder / "optimizer.safetensors", _counters(folder)
    untrusted.check_regular(path)
    slots = {
        f"{name}/{key}": value
        for name, p in trained(model)
        for key, value in optimizer.state[p].items()
    }
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            if not stored and not state["step"]:  # older versions: none before the first update
                return state
            _check_slots(path, stored, {name: tuple(slot.shape) for name, slot in slots.items()})
            for name, slot in slots.items():
                _check_slot(path, name, file, slot.dtype)
            for name, slot in slots.items():
                slot.copy_(distributed.sharded_like(file.get_tensor(name), slot))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from None
    return state


def complete(state: dict, keys: tuple[str, ...], folder: Path) -> dict:
    """A checkpoint's counters; ValueError where one that the run goes on from is missing."""
    if missing := [key for key in keys if state.get(key) is None]:
        allowed = f"{', '.join(('step', *keys))}"
        raise ValueError(f"{folder / 'state.json'} has no {missing[0]}; required are {allowed}")
    return state


def _check_slots(path: Path, stored: dict[str, tuple], own: dict[str, tuple]) -> None:
    for name in sorted(stored.keys() | own.keys()):
        if stored.get(name) != own.get(name):
            got = f"{name} of shape {stored.get(name, 'missing')}"
            allowed = f"shape {own[name]}" if name in own else "no such tensor, for this network"
            raise ValueError(f"{path} has {got}; allowed {allowed}")


def _check_slot(path: Path, name: str, file: Any, dtype: torch.dtype) -> None:
    # AdamW divides by what it computes from the number of its updates, and by roots of exp_avg_sq.
    value, signed = file.get_tensor(name), name.endswith("/exp_avg")
    if value.dtype != dtype:
        got = f"{name} of dtype {_plain(value.dtype)}"
        raise ValueError(f"{path} has {got}; allowed {_plain(dtype)}, as in this run")
    if not value.isfinite().all() or not (signed or value.min() >= 0):
        got = f"{name} {value.item():g}" if value.numel() == 1 else f"{name} with other numbers"
        allowed = "finite numbers" if signed else "finite numbers from 0"
        raise ValueError(f"{path} has {got}; allowed {allowed}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counters(folder: Path) -> dict:
    path = folder / "state.json"
    state, named = untrusted.json_object(path, untrusted.STATE), folder.name.rpartition("-")[2]
    step, known = state.get("step"), named.isdecimal() and named.isascii()
    if step is None or (known and step != int(named)):
        allowed = f"{named}, as the folder is named" if known else "whole numbers from 0"
        raise ValueError(f"{path} has step {step}; allowed {allowed}")
    return state


def checkpoint_folders(out: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    found = [path for path in out.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_checkpoint_step)


def _checkpoint_step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def has_checkpoint(out: Path) -> bool:
    """True when a run in ``out`` has a checkpoint, be it one whose writing was interrupted."""
    return any(_NAME.match(path.name) for path in out.glob("checkpoint-*"))


# ------------------------------------------------------------------------------------------ folder


@contextlib.contextmanager
def opened(out: Path, settings: Any, resume: bool) -> Iterator[Path | None]:
    """The folder of a run, to which no other process writes; the checkpoint to go on from, or None.

    Overwrites no run. The lock is the kernel's: it goes with the process, however that ends.
    """
    lock, made, new = FileLock(out / ".lock"), not out.exists(), not _contents(out)
    try:
        checkpoint = distributed.on_main(lambda: _open(out, settings, resume, lock))
        try:
            yield checkpoint
        except ValueError:
            if new and distributed.is_main():
                _leave(out, made)
            raise
    finally:
        lock.release()


def _leave(out: Path, made: bool) -> None:
    """What a run wrote whose settings were refused before its log had a line goes, for the run
    with the corrected ones; the folder, too, if that run ``made`` it."""
    log = out / METRICS
    if has_checkpoint(out) or (log.is_file() and log.stat().st_size):
        return
    for path in (out / CONFIG, log, *([out / ".lock"] if made else [])):
        path.unlink(missing_ok=True)
    if made:
        with contextlib.suppress(OSError):  # others may have put something there
            out.rmdir()


def _open(out: Path, settings: Any, resume: bool, lock: FileLock) -> Path | None:
    _refuse_other_folders(out, resume)
    files.acquire(lock, "out", out)
    for pattern in _NUMBERED:
        files.settle(out, pattern)
    if checkpoint_folders(out):
        if not resume:
            allowed = "another --out, or --resume to continue it"
            raise ValueError(f"out: got {str(out)!r}, which already holds a run; allowed {allowed}")
        return _resumed(out, settings)
    _refuse_set_aside(out)
    if _contents(out):
        _check_startable(out, settings)
        note(f"{out} holds a run that ended before its first checkpoint; it starts at step 0 again")
    write_config(out, settings)
    return None


def _refuse_other_folders(out: Path, resume: bool) -> None:
    # Before anything is written, the lock included.
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: got {str(out)!r}, which is a file; allowed a folder")
    content = _contents(out)
    for name in (CONFIG, METRICS, SUMMARY, report.CURVE):
        if (out / name).exists() and not (out / name).is_file():
            allowed = "a file of that name, or none"
            raise ValueError(f"out: got {str(out)!r}, where {name} is no file; allowed {allowed}")
        files.check_writable(out / name)
    for path in sorted(out.glob("*")):
        if files.is_plain(path) and _FOLDERS.fullmatch(path.name):
            got = f"{str(out)!r}, where {path.name} is a file"
            raise ValueError(f"out: got {got}; allowed a folder of that name, or none")
    if CONFIG in content or has_checkpoint(out):
        return
    if resume:
        got = f"{str(out)!r}, which holds no checkpoint"
        raise ValueError(f"resume: got {got}; allowed the folder of a run")
    if content:
        got = f"{str(out)!r}, which already holds a run or other files"
        raise ValueError(f"out: got {got}; allowed another --out")


def _refuse_set_aside(out: Path) -> None:
    # All that is left of a run's checkpoints: one that starts again would write over its log, too.
    aside = sorted(out.glob(_NUMBERED[0] + files.OLD))
    damaged = [f"{path} {files.damage(path) or 'is a link'}" for path in aside]
    if damaged:
        allowed = "a run with a whole checkpoint, or another --out"
        raise ValueError(f"out: got {str(out)!r}, where {'; '.join(damaged)}; allowed {allowed}")


def _contents(out: Path) -> list[str]:
    names = (path.name for path in out.iterdir()) if out.is_dir() else ()
    return [name for name in names if name != ".lock" and not name.endswith(files.PART)]


def _resumed(out: Path, settings: Any) -> Path:
    """The newest whole checkpoint, if these settings may continue it."""
    damaged = []
    for checkpoint in reversed(checkpoint_folders(out)):
        found = files.damage(checkpoint)
        if not found:
            break
        damaged.append(f"{checkpoint} {found}")
    else:
        allowed = "a run with a whole checkpoint, or another --out"
        raise ValueError(f"resume: got {str(out)!r}, where {'; '.join(damaged)}; allowed {allowed}")
    step = _checkpoint_step(checkpoint)
    if damaged:
        note(f"skipped: {'; '.join(damaged)}. The run goes on from {checkpoint}")
    config.check_unchanged(settings, checkpoint, free=_FREE_ON_RESUME)
    if step > settings.steps or (step == settings.steps and read_summary(out)):
        allowed = f"above {step}, where the run in {out} stands"
        raise ValueError(f"steps: got {settings.steps}; allowed {allowed}")
    return checkpoint


def _check_startable(out: Path, settings: Any) -> None:
    """ValueError unless the folder holds the beginning of this very run, and nothing to lose."""
    ended = [path.name for path in (out / SUMMARY, *sorted(out.glob("failed-*"))) if path.exists()]
    if ended:
        got = f"{str(out)!r}, which already holds a run with {ended[0]} and no checkpoint"
        raise ValueError(f"out: got {got}; allowed another --out")
    config.check_unchanged(settings, out)


def write_config(out: Path, settings: Any) -> None:
    """config.yaml of a run; of one that goes on, once its checkpoint has been read."""
    files.write(out / CONFIG, config.dumped(settings))


# What may differ when a run is continued: how long, how observed, on what machine.
_FREE_ON_RESUME = ("steps", "save_every", "evaluate", "micro_batch", "gradient_checkpointing")
_FREE_ON_RESUME += ("device", "threads", "workers", "compile", "tensorboard")


def write_summary(out: Path, summary: dict) -> dict:
    """summary.json of a run; returns what it wrote."""
    files.write(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(out: Path) -> dict:
    """summary.json of a finished run; empty if there is none, or none that can be read."""
    return files.read_object(out / SUMMARY)


# --------------------------------------------------------------------------------------------- log


def _logged(checkpoint: Path, step: int) -> str:
    # What a run goes on from must not be found unreadable when its steps are done.
    written, rows = untrusted.decoded(checkpoint / METRICS), report.read_metrics(checkpoint)
    if step and not rows:
        raise ValueError(f"{checkpoint / METRICS}: got no line; allowed those of {step} steps")
    for key in ("loss", "solved", "eval/solved"):  # an update and an evaluation may share a step
        steps = [row["step"] for row in rows if key in row and row.get("step") is not None]
        for before, after in itertools.pairwise(steps):
            if after <= before:
                got = f"{key} of step {after} after that of step {before}"
                raise ValueError(f"{checkpoint / METRICS}: got {got}; allowed rising steps")
    return written if written.endswith("\n") or not written else f"{written}\n"


def _event_writer() -> type:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        allowed = "false, or pip install tensorboard"
        raise ValueError(f"tensorboard: got true, it is missing; {allowed}") from None
    return SummaryWriter


class MetricsLog:
    """metrics.jsonl, one JSON object a line; TensorBoard's event files where they are asked for.

    A resumed run begins with the lines that its checkpoint holds.
    """

    def __init__(self, folder: Path, checkpoint: Path | None, step: int, tensorboard: bool = False):
        self.path, self.writer = folder / METRICS, None
        if not distributed.is_main():
            return
        writer = _event_writer() if tensorboard else None
        files.write(self.path, _logged(checkpoint, step) if checkpoint else "")
        if writer is not None:
            self.writer = writer(folder / "tensorboard", purge_step=step + 1)

    def write(self, row: dict) -> None:
        """One line; floats with seven digits."""
        distributed.on_main(lambda: self._write(row))

    def _write(self, row: dict) -> None:
        short = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in row.items()}
        files.append(self.path, json.dumps(short))
        if self.writer is not None:
            for key, value in row.items():
                if isinstance(value, float):
                    self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """End the event file."""
        if self.writer is not None:
            self.writer.close()
