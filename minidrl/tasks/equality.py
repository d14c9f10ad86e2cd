r"""Are two answers equal as mathematics? math-verify is asked, in a limited process of its own.

An answer is untrusted text, and a short one can ask for endless work: brackets inside one another,
each of which the grammar reads in several ways, or ``9^{9^{9^9}}``. The operating system bounds it:
an answer has ``SECONDS`` of CPU time and ``BYTES`` of memory, and, on a crowded machine,
``PATIENCE`` seconds of wall time. What needs more is not equal.

The process is started once and kept. It reads math-verify once, and forks: the child answers one
question after the other until one of them ends it, and the next child takes its place at once.
Nothing is written there, and no text is evaluated: only the LaTeX grammar of math-verify is used,
not its reader of plain expressions, which hands them to Python's ``eval``.

Stricter than math-verify in three places, where it would pay for less than an answer:

    a number    where the known answer is one, the answer has to be one, too: ``9+9`` or a sum that
                is left to the judge is not 18. Signs, fractions, percents, ``x=18`` are as always
    braces      have to be balanced, so that nothing leaves the box that is put around an answer
    a blank     between digits makes no number: ``1 8`` would be read as 1 + 8
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS, BYTES = 2, 2**30
PATIENCE = 120  # seconds of wall time that the CPU time of one answer may take
START = 120  # and reading math-verify
LONGEST = 400  # characters of an answer; a longer one is refused unread
_APART = re.compile(r"\d\s+\d")
_DONE = 17  # exit status of a child whose questions have ended
_FENCES = (("**", "**"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def equal(gold: str, answer: str) -> bool:
    """True if an answer is the known one; False where that cannot be found out in the limits."""
    gold, answer = plain(gold), plain(answer)
    if not answer or not _readable(answer):
        return False
    return answer == gold or JUDGE.ask(gold, answer)["equal"]


def parses(text: str) -> bool:
    """True if math-verify can read it as a known answer."""
    text = plain(text)
    return _readable(text) and JUDGE.ask(text, text)["gold"]


def plain(text: str) -> str:
    """An answer without what is put around it: blanks, ``**``, dollar signs, a point at its end."""
    before = None
    while text != before:
        before, text = text, text.strip().removesuffix(".").strip()
        for opening, closing in _FENCES:
            if len(text) > len(opening + closing) and text.startswith(opening):
                inside = text[len(opening) : len(text) - len(closing)]
                text = inside if text.endswith(closing) and opening not in inside else text
    return text


def needs(task: str) -> None:
    """ValueError unless math-verify is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"task {task} needs math-verify: pip install 'minidrl[math]'")


def _readable(text: str) -> bool:
    if not 0 < len(text) <= LONGEST or _APART.search(text):
        return False
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


class Judge:
    """The process that is asked: started with the first question, and again when it has ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.starts = 0
        self.said: list[str] = []

    def ask(self, gold: str, answer: str) -> dict[str, Any]:
        """``equal``; ``gold``, ``answer``: could it be read; ``failed``: the limit that was met."""
        for _ in range(2):  # an idle process that somebody has ended is no limit of the answer's
            idle = self.process is not None
            told = self._asked(json.dumps([gold, answer]))
            if told is not None:
                return told
            self.stop()
            if not idle:
                break
        return {"equal": False, "gold": False, "answer": False, "failed": "process"}

    def _asked(self, question: str) -> dict[str, Any] | None:
        process = self.process or self._start()
        try:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            line = _line(process, PATIENCE)
        except TimeoutError:
            self.stop()
            return {"equal": False, "gold": False, "answer": False, "failed": "wall time"}
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def _start(self) -> subprocess.Popen:
        kept = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
        command = [sys.executable, "-P", str(Path(__file__))]
        # Of a session of its own: Ctrl-C is the caller's, who lets go of it.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"} | kept,
            start_new_session=True,
        )
        self.starts += 1
        try:
            ready = _line(self.process, START)
        except TimeoutError:
            ready = b""
        if ready != b"ready\n":
            self.stop()
            said = self.said[-1:] or [f"it was not ready after {START} s"]
            raise OSError(f"math-verify cannot be started: {said[0]}")
        return self.process

    def stop(self) -> None:
        """The process and its child end, whatever they do."""
        process, self.process = self.process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        _, said = process.communicate()
        self.said = said.decode(errors="replace").strip().splitlines()


def _line(process: subprocess.Popen, seconds: float) -> bytes:
    # What the process writes up to a new line, or up to its end; TimeoutError after ``seconds``.
    handle, line, end = process.stdout.fileno(), b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
        if not (piece := os.read(handle, 2**16)):
            break
        line += piece
    return line


JUDGE = Judge()
atexit.register(JUDGE.stop)


# ------------------------------------------------------------------------------- the other process
def _verdict(gold: str, answer: str) -> dict[str, Any]:
    from math_verify import verify
    from sympy import Number
    from sympy.core.random import seed

    seed(0)
    known, said = _read(gold), _read(answer)
    found = {"equal": False, "gold": bool(known), "answer": bool(said)}
    if known and said and not (isinstance(known[0], Number) and not _is_literal(said[0])):
        found["equal"] = bool(verify(known, said, timeout_seconds=None))
    return found


def _read(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    how = {"fallback_mode": "no_fallback", "extraction_mode": "first_match"}
    only = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(rf"\boxed{{{text}}}", only, **how, parsing_timeout=None)


def _is_literal(found: Any) -> bool:
    # A number as it is written down: no operation is left to do but a sign and a percent.
    from sympy import Eq, FiniteSet, Mul, Number, Rational, Symbol
    from sympy.core.expr import UnevaluatedExpr

    if isinstance(found, Eq):
        return isinstance(found.lhs, Symbol) and _is_literal(found.rhs)
    if isinstance(found, FiniteSet):
        return len(found.args) == 1 and _is_literal(found.args[0])
    if isinstance(found, Mul):
        free = [x for x in found.args if x not in (-1, UnevaluatedExpr(Rational(1, 100)))]
        return len(free) == 1 and isinstance(free[0], Number)
    return isinstance(found, Number)


def _answer_all() -> None:
    # In the child: until the questions end, or one of them ends the process.
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends a process
        told = json.dumps(_verdict(*json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, told.encode() + b"\n")
    os._exit(_DONE)


def _limit() -> None:
    for name, most in {"RLIMIT_AS": BYTES, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        low = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (low, hard))


def _main() -> None:
    import logging

    _limit()
    logging.disable(logging.CRITICAL)
    _verdict("1", r"\frac{1}{2}")  # reads math-verify, and builds its grammar once for all children
    os.write(1, b"ready\n")
    while True:
        child = os.fork()
        if child == 0:
            try:
                _answer_all()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == _DONE:
            return
        failed = "CPU time" if os.waitstatus_to_exitcode(status) == -signal.SIGPROF else "memory"
        told = {"equal": False, "gold": False, "answer": False, "failed": failed}
        os.write(1, json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    _main()
