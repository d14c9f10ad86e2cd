"""How a process was launched, what ends a run, and in what words. It needs no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger("minidrl")


class RunError(Exception):
    """A run that had to stop; the message says why and what is on disk."""


class LocalError(ValueError):
    """What only this process has to report; other errors that end a run are the same in all."""


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop, and did where it can go on; the message says where.

    ``signal``: the number of the signal that asked.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal


def one_line(error: BaseException | str) -> str:
    """The message of an error, however many lines a library gave it."""
    return " ".join(str(error).split())


def show_remarks() -> None:
    """The remarks of the package's logger become lines on stderr, of the first process only."""
    handler = logging.StreamHandler() if launched_rank() == 0 else logging.NullHandler()
    handler.setFormatter(logging.Formatter("minidrl: %(message)s"))
    log.handlers = [handler]


def launched_processes() -> int:
    """The number of processes that torchrun says it started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1


def launched_rank() -> int:
    """This process's number among those, from 0."""
    return int(os.environ["RANK"]) if launched_processes() > 1 else 0


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Inside, Ctrl-C and SIGTERM only ask for a stop; the second one of a kind acts as ever.

    Yields a function that returns the number of the signal that asked, 0 if none has: the caller
    grants it where nothing is lost. Signals that the process ignores stay ignored, as under nohup;
    outside the main thread Python catches none.
    """
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        before = {}

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(number, before[number])
        said = "stopping after this step and saving; once more stops at once, without\n"
        os.write(2, f"\nminidrl: {said}".encode())  # print may have been interrupted itself

    for number, how in before.items():
        signal.signal(number, how if how is signal.SIG_IGN else ask)
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, how in before.items():
            signal.signal(number, how)
