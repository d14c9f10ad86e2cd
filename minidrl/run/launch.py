"""How a process was launched, what ends one, and in what words: known before torch is imported."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker


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


LONGEST = 4000  # characters of a message


def shown(text: str) -> str:
    """A text for a terminal: what is neither printable nor a new line is escaped, as in Python.

    Names and values of files that a stranger wrote could otherwise move the cursor, change the
    title, or write from right to left.
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException | str) -> str:
    """The message of an error, however many lines a library gave it; of a long one both ends."""
    said = " ".join(str(error).split())
    if len(said) > LONGEST:
        said = f"{said[: LONGEST // 2]} .. {said[-LONGEST // 4 :]}"
    return shown(said)


def is_panic(error: BaseException) -> bool:
    """True for what a library in Rust raises when it breaks off, which is no Exception."""
    return type(error).__name__ == "PanicException"


def lost_partner(error: RuntimeError) -> bool:
    """True for what gloo and NCCL raise in a process when another one of the run has ended."""
    said = str(error).lower()
    return launched_processes() > 1 and any(word in said for word in ("gloo", "nccl"))


def tell(said: BaseException | str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError):  # a full disk behind it changes no exit status
        print(f"minidrl: {one_line(said)}", file=sys.stderr)


_KEPT: list[str] | None = None  # notes that wait


def note(said: str) -> None:
    """What a user should know of a run, as one line on stderr; inside ``kept_notes`` it waits."""
    if _KEPT is None:
        tell(said)
    else:
        _KEPT.append(said)


def tell_notes() -> None:
    """The notes that wait: nothing is refused any more."""
    while _KEPT:
        tell(_KEPT.pop(0))


@contextlib.contextmanager
def kept_notes() -> Iterator[None]:
    """Inside, notes wait for ``tell_notes`` or the end; what is refused is one line, without."""
    global _KEPT
    _KEPT = []
    try:
        yield
        tell_notes()
    except (RunError, FloatingPointError, KeyboardInterrupt):  # something was run
        tell_notes()
        raise
    finally:
        _KEPT = None


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """What a library writes there past Python, in Rust when it panics or in C++, goes nowhere."""
    try:
        kept = os.dup(2)
    except OSError:  # closed by who started this
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def launched_processes() -> int:
    """The number of processes that torchrun says it started; 1 without it."""
    told = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()
    return _told("WORLD_SIZE", 1) if told else 1


def launched_rank() -> int:
    """This process's number among those, from 0."""
    return _told("RANK", 0) if launched_processes() > 1 else 0


def check_address() -> None:
    """LocalError for a place among several processes that cannot be one."""
    if launched_processes() > 1:
        _told("LOCAL_RANK", 0)
        if "MASTER_PORT" in os.environ:
            _told("MASTER_PORT", 1, 65535)
        patience()


def patience() -> int:
    """Seconds for which a process waits until all have been started: MINIDRL_WAIT, or 5 minutes."""
    return _told("MINIDRL_WAIT", 1) if "MINIDRL_WAIT" in os.environ else 300


def _told(name: str, low: int, high: int = 999_999) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit() and len(text) < 7 and low <= int(text) <= high):
        allowed = f"integers from {low} to {high:,}"
        raise LocalError(f"{name}: got {text!r} in the environment; allowed {allowed}")
    return int(text)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Processes that are started inside do not hear Ctrl-C and SIGTERM, which reach whole groups of
    processes: what follows from them is for this one to say. One that calls ``obey_parent`` can
    still be ended by it."""
    resource_tracker.ensure_running()  # which, when it is started, unblocks both
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent(_: int = 0) -> None:
    """In a process that was started ``unheard``: a SIGTERM of its parent's ends it, no other."""

    def wait() -> None:
        while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Inside, Ctrl-C and SIGTERM only ask for a stop; the second one of a kind acts as ever.

    Yields a function that returns the number of the signal that asked, 0 if none has: the caller
    grants it where nothing is lost. Signals that the process ignores stay ignored, and outside the
    main thread, where Python cannot catch any, nothing changes.
    """
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    in_main = threading.current_thread() is threading.main_thread()
    caught = {n: how for n, how in before.items() if in_main and how not in (signal.SIG_IGN, None)}

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(number, caught[number])
        said = "stopping after this step and saving; once more stops at once, without\n"
        os.write(2, f"\nminidrl: {said}".encode())  # print may have been interrupted itself

    for number in caught:
        signal.signal(number, ask)
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, how in caught.items():
            signal.signal(number, how)
    # What came too late for this run is for who started it, such as a study with more of them.
    outer = caught[asked[0]] if asked else signal.SIG_DFL
    if outer not in (signal.default_int_handler, signal.SIG_DFL):
        outer(asked[0], None)
