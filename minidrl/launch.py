"""How a process was launched, and the errors that end one: known before torch is imported."""

from __future__ import annotations

import os


class RunError(Exception):
    """A run that had to stop; the message says why and what is on disk."""


class LocalError(ValueError):
    """What only this process has to report; other errors that end a run are the same in all."""


def launched_processes() -> int:
    """The number of processes that torchrun says it started; 1 without it."""
    told = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if told else 1


def launched_rank() -> int:
    """This process's number among those, from 0."""
    return int(os.environ["RANK"]) if launched_processes() > 1 else 0
