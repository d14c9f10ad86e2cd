"""A run on disk: its folder, checkpoints, log and resumption; and random numbers that repeat.

Every random draw is keyed by (seed, step, purpose). A run that is resumed therefore repeats the
uninterrupted one to the bit, and no two draws of a run share a stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from minidrl import checkpoints, config, distributed
from minidrl.denoiser import has_adapters, trained

# ------------------------------------------------------------------------------------------- seeds


def keyed_seed(seed: int, step: int, purpose: str) -> int:
    """A seed of its own for (seed, step, purpose)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()[:7], "big")


def keyed_generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """A CPU generator of its own for (seed, step, purpose)."""
    return torch.Generator().manual_seed(keyed_seed(seed, step, purpose))


# ------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    folder: Path, model: Any, tok: Any, optimizer: torch.optim.Optimizer, state: dict
) -> None:
    """Network, tokenizer, optimiser (safetensors) and counters; the folder appears whole or not."""
    names = [name for name, _ in trained(model)]
    slots = optimizer.state_dict()["state"].items()
    tensors = {f"{names[i]}/{key}": value for i, slot in slots for key, value in slot.items()}
    tensors, model = distributed.gather_to_main(tensors), distributed.unsharded_copy(model)
    distributed.on_main(lambda: _write_checkpoint(folder, model, tok, tensors, state))


def _write_checkpoint(
    folder: Path, model: Any, tok: Any, tensors: dict[str, Tensor], state: dict
) -> None:
    partial_folder = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial_folder, ignore_errors=True)
    checkpoints.save(model, tok, partial_folder)
    save_file(tensors, partial_folder / "optimizer.safetensors")
    (partial_folder / "state.json").write_text(json.dumps(state))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial_folder, folder)


def load_checkpoint(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's weights and optimiser state back; returns its counters."""
    if has_adapters(model):
        stored = distributed.empty_copy(model)
        checkpoints.read_adapters(stored, folder)
    else:
        stored, _ = checkpoints.load(folder)  # on the CPU: beside the network a GPU may be full
    distributed.load_weights(model, stored)
    return load_optimizer(folder, model, optimizer)


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's optimiser state back; returns its counters."""
    tensors = load_file(folder / "optimizer.safetensors")
    for name, p in trained(model):
        for key, value in optimizer.state[p].items():
            stored = tensors.get(f"{name}/{key}")
            if stored is not None:  # older versions wrote none before the first update
                value.copy_(distributed.sharded_like(stored, value))
    return json.loads((folder / "state.json").read_text())


def checkpoint_folders(out: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted(out.glob("checkpoint-*[0-9]"), key=_checkpoint_step)


def _checkpoint_step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def has_checkpoint(out: Path) -> bool:
    """True when a run in ``out`` can be resumed."""
    return bool(checkpoint_folders(out))


# ------------------------------------------------------------------------------------------ folder


def open_run(out: Path, settings: Any, resume: bool) -> Path | None:
    """Create or re-open a folder; returns the checkpoint to resume from. Overwrites nothing."""
    found = checkpoint_folders(out)
    if resume:
        if not found:
            what = f"{str(out)!r}, which holds no checkpoint"
            raise ValueError(f"resume: got {what}; start without --resume, or set save_every")
        _check_resumable(out, settings, _checkpoint_step(found[-1]))
        _write_config(out, settings)
        return found[-1]
    if out.is_file():
        raise ValueError(f"out: got {str(out)!r}, which is a file; allowed a folder")
    if out.exists() and any(out.iterdir()):
        allowed = "another --out, or --resume to continue it"
        raise ValueError(f"out: got {str(out)!r}, which already holds a run; allowed {allowed}")
    out.mkdir(parents=True, exist_ok=True)
    _write_config(out, settings)
    return None


def _write_config(out: Path, settings: Any) -> None:
    (out / "config.yaml").write_text(yaml.safe_dump(config.to_dict(settings), sort_keys=False))


# What may differ when a run is continued: how long, how observed, on what machine.
_FREE_ON_RESUME = ("steps", "save_every", "evaluate", "micro_batch", "gradient_checkpointing")
_FREE_ON_RESUME += ("device", "threads", "compile", "tensorboard")


def _check_resumable(out: Path, settings: Any, step: int) -> None:
    config.check_unchanged(settings, out, free=_FREE_ON_RESUME)
    if step > settings.steps or (step == settings.steps and (out / "summary.json").exists()):
        allowed = f"above {step}, where the run in {out} stands"
        raise ValueError(f"steps: got {settings.steps}; allowed {allowed}")


def write_summary(out: Path, summary: dict) -> dict:
    """summary.json of a run; returns what it wrote."""
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


# --------------------------------------------------------------------------------------------- log


class MetricsLog:
    """metrics.jsonl, one JSON object a line; TensorBoard's event files where they are asked for.

    On resume, lines from after the checkpoint are dropped.
    """

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = False):
        self.path, self.writer = folder / "metrics.jsonl", None
        if not distributed.is_main():
            return
        lines = _lines(self.path) if first_step else []
        kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        self.path.write_text("".join(line + "\n" for line in kept))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                allowed = "false, or pip install tensorboard"
                raise ValueError(f"tensorboard: got true, it is missing; {allowed}") from None
            self.writer = SummaryWriter(folder / "tensorboard")

    def write(self, row: dict) -> None:
        """One line; floats with seven digits."""
        if not distributed.is_main():
            return
        short = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in row.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(short) + "\n")
        if self.writer is not None:
            for key, value in row.items():
                if isinstance(value, float):
                    self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """End the event file."""
        if self.writer is not None:
            self.writer.close()


def _lines(path: Path) -> list[str]:
    # What follows the last newline is empty, or was left unfinished by a run that was killed.
    return path.read_text().split("\n")[:-1] if path.exists() else []
