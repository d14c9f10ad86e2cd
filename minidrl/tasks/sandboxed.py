"""What runs in the two sandboxes of ``sandbox``: a judge with the tests, a candidate without them.

    candidate   executes a stranger's program, then answers calls of its functions
    judge       executes the tests; in them each function of the program is a stand-in that asks the
                candidate, over a pipe, and gets plain data back (``packed``)

A program can therefore neither read its tests, nor change what compares, nor write a verdict. A
value whose ``__eq__`` is always true does not get across. This file is a script for an interpreter
without packages; it imports nothing but the library.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import sys
import types
from collections.abc import Callable

TYPE_CHECKING = False  # importing typing takes a tenth of the time that a sandbox takes to start
if TYPE_CHECKING:
    from typing import Any, BinaryIO

LONGEST = 2**20  # bytes of a message
SAID = 200  # characters of a reason
OPEN_FILES, FILE_BYTES = 32, 2**20


class Lost(BaseException):
    """A call without an answer that counts; no ``except Exception`` of a test takes it for one."""


class Ended(Lost):
    """The candidate is gone, or no longer to be understood: no later call has an answer either."""


# --------------------------------------------------------------------------------------- plain data
_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def packed(value: Any) -> Any:
    """Plain data as JSON: a container is a list that begins with its kind; TypeError for others.

    Subclasses, such as Counter or a named tuple, go as what they are built on; large numbers in
    hexadecimal digits, of which Python reads and writes any number.
    """
    if isinstance(value, int) and abs(value) >= 2**63:
        return ["int", hex(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", *([packed(k), packed(v)] for k, v in value.items())]
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return [name, *map(packed, value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    raise TypeError(f"{type(value).__name__} is no plain data")


def unpacked(found: Any) -> Any:
    """The plain data that ``packed`` made the JSON of; an error of some kind for other JSON."""
    if not isinstance(found, list):
        return found
    kind, *rest = found
    if kind == "dict":
        return {unpacked(key): unpacked(value) for key, value in rest}
    if kind == "int":
        return int(*rest, 16)
    if kind == "bytes":
        return bytes.fromhex(*rest)
    if kind == "complex":
        return complex(*rest)
    return _KINDS[kind](map(unpacked, rest))


def send(stream: BinaryIO, message: Any) -> None:
    """One message, a line of ASCII."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message; Ended where there is none, or one that is too long or no JSON."""
    line = stream.readline(LONGEST)
    if not line.endswith(b"\n"):
        raise Ended("an answer is too long" if line else "the program has ended")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Ended("an answer is no JSON") from None


# ------------------------------------------------------------------------------------ the candidate
def candidate(requests: BinaryIO, answers: BinaryIO) -> None:
    """Says that it is there, takes a program, answers calls until nobody asks."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module

    def load(program: str) -> None:
        exec(compile(program, "solution.py", "exec"), vars(module))

    def call(name: str, words: Any, keywords: Any) -> Any:
        return getattr(module, name)(*unpacked(words), **unpacked(keywords))

    send(answers, "ready")
    send(answers, answered(load, receive(requests)))
    while True:
        send(answers, answered(call, *receive(requests)))


def answered(run: Callable, *given: Any) -> list:
    """["value", plain data], ["error", names of its built-in classes, its text], or ["lost", why]
    for a value that is no plain data."""
    try:
        value = run(*given)
    except BaseException as error:
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return ["error", names, str(error)[:SAID]]
    try:
        return ["value", packed(value)]
    except (TypeError, RecursionError):
        return ["lost", f"{type(value).__name__[:SAID]} is no plain data"]


# ---------------------------------------------------------------------------------------- the judge
def judge(job: dict, requests: BinaryIO, answers: BinaryIO, verdicts: BinaryIO) -> None:
    """Runs the tests one after the other; says [number, passed, why not] of each as it ends.

    Once the candidate has ended no test passes any more, not even one that would not ask it.
    """
    if receive(answers) != "ready":
        return
    send(verdicts, "ready")
    send(requests, job["program"])
    why = _attempt(lambda: _value(receive(answers)))
    space = {"__name__": "tests"}
    stand_ins = {name: _stand_in(name, requests, answers) for name in job["names"]}
    sys.modules["solution"] = solution = types.ModuleType("solution")
    vars(solution).update(stand_ins)
    space.update(stand_ins)
    why = why or _attempt(lambda: exec(compile(job["setup"], "setup.py", "exec"), space))
    space.update(stand_ins)  # a setup may hold a stub of the function that is asked for
    for number, test in enumerate(job["tests"]):
        lost = why
        if not lost:
            lost = _attempt(lambda test=test: exec(compile(test, "test.py", "exec"), space))
            why = lost if lost.startswith(Ended.__name__) else ""
        send(verdicts, [number, not lost, lost])


def _attempt(run: Callable[[], Any]) -> str:
    # Empty, or why it failed.
    try:
        run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:SAID]
    return ""


def _stand_in(name: str, requests: BinaryIO, answers: BinaryIO) -> Callable:
    def ask(*words: Any, **keywords: Any) -> Any:
        try:
            asked = [name, packed(words), packed(keywords)]
        except (TypeError, RecursionError):
            raise Lost(f"an argument of {name} is no plain data") from None
        try:
            send(requests, asked)
        except BrokenPipeError:
            raise Ended("the program has ended") from None
        return _value(receive(answers))

    ask.__name__ = name
    return ask


def _value(answer: Any) -> Any:
    # What the candidate returned, or the built-in exception that is nearest to what it raised.
    try:
        kind, *rest = answer
        if kind == "value":
            return unpacked(*rest)
        if kind == "lost":
            raise Lost(str(*rest))
        names, text = rest
        kinds = [getattr(builtins, name, None) for name in names if isinstance(name, str)]
        errors = [k for k in kinds if isinstance(k, type) and issubclass(k, Exception)]
        error = errors[0](text)
    except Exception:  # whatever a stranger sends
        error = Lost("an answer is no plain data")
    raise error


# ---------------------------------------------------------------------------------------- the start
def limit(seconds: int, megabytes: int) -> None:
    """Of a process, for good, and here of the whole sandbox: it can start no other."""
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: megabytes << 20,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        low = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (low, low))


def _main(role: str, seconds: str, megabytes: str, *pipes: str) -> None:
    first, second = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a program reads and prints is nobody's
        os.dup2(nothing, stream)
    limit(int(seconds), int(megabytes))
    try:
        if role == "candidate":
            candidate(first, second)
        else:
            requests, answers = int(pipes[0]), int(pipes[1])
            pair = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")
            judge(json.loads(first.read()), *pair, second)
    except (Ended, BrokenPipeError):  # the other has ended
        pass
    os._exit(0)  # threads, exit handlers and buffers have no part in it


if __name__ == "__main__":
    _main(*sys.argv[1:])
