r"""Are two answers equal as mathematics? math-verify is asked, in a limited process of its own.

An answer is untrusted text, and a short one can ask for endless work: brackets inside one another,
each of which the grammar reads in several ways, or ``9^{9^{9^9}}``. The operating system bounds it:
an answer has ``SECONDS`` of CPU time and ``BYTES`` of memory, and what needs more is not equal. No
text is evaluated: only the LaTeX grammar of math-verify is used, not its reader of plain
expressions, which hands them to Python's ``eval``.

Stricter than math-verify, where it would pay for less than an answer:

    a number    where the known answer is one, the answer has to be one, too: ``9+9`` or a sum that
                is left to the judge is not 18. Signs, fractions, percents, units are as always
    exactly     two fractions or two decimals are equal or not, however small they are
    a base      ``52_8`` is not ``52_9``; without a base the digits are in that of the known answer
    brackets    ``(2,4)`` is no ``\\{2,4\\}``, and ``2,\infty`` no interval; braces are balanced
    a blank     between digits makes no number: ``1 8`` would be read as 1 + 8
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import re
import signal
import subprocess
import sys
from typing import Any

SECONDS, BYTES = 2, 2**30
LONGEST = 400  # characters of an answer; a longer one is refused unread
_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_BASED = re.compile(r"(\d[0-9A-Fa-f]*)(?:_\{?(\d+)\}?)?", re.ASCII)
_NO_UNIT = (
    r"(?!\s*(?:or|and|to|is|not|if|pi|plus|minus|times|multiplied|over|divided|mod|sqrt|sin|cos|tan|"
    r"log|squared|cubed|factorial|dozens?|hundred|thousand|(?:m|b|tr)illion|half|halves|thirds?|"
    r"quarters?|(?:ten|hundred|thousand)ths?)\b)"
)
_UNIT = re.compile(  # of a number: a word, in text or not, and what it is counted by
    rf"(\d)(?:\s*\\text\{{{_NO_UNIT}[a-zA-Z /.]+\}}(?:\^\{{?[23]\}}?)?"
    rf"|{_NO_UNIT}\s+[a-zA-Z]{{3,}}(?:[ /][a-zA-Z]+){{0,4}}"
    r"|\s*(?:kg|m[lg]|ft|oz|lb|mph|[ckm]?m(?:\^?[23])?))\s*$"
)
_NO_NUMBER = re.compile(r"\d\s*(?:[a-zA-Z]+|\\text\b.*)$")  # what is left of it says another thing
_NOISE = (  # what is put around an answer, or between its digits
    (re.compile(r"\\(?:text|textbf|mathbf|mathrm|textrm|mbox)\{([^{}A-Za-z]*)\}"), r"\1"),
    (re.compile(r"(?<=\d)(?:\\[,!;:]| ?, ?\\! ?)(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\s*(?:°|\^\{?\\circ\}?|\\degree)|^(?:=|≈|\\approx(?![a-zA-Z]))|\.$"), ""),
    (re.compile(r"^(\*\*|\$\$?)(?!\$)((?:(?!\1).)+)\1$|^\\[(\[](.+)\\[)\]]$", re.DOTALL), r"\2\3"),
    (re.compile(r"^([a-zA-Z]{3,}(?: [a-zA-Z]+)*)$"), r"\\text{\1}"),
)
_APART = re.compile(r"\d\s+\d")


def equal(gold: str, answer: str) -> bool:
    """True if an answer is the known one; False where that cannot be found out in the limits."""
    gold, answer = plain(gold), plain(answer)
    if _DECIMAL.fullmatch(gold):
        answer = plain(_UNIT.sub(r"\1", answer))
        answer = "" if _NO_NUMBER.search(answer) else answer
    if not _readable(answer):
        return False
    if (based := _based(gold, answer)) is not None:
        return based
    return answer == gold or _ask(gold, answer)["equal"]


def _based(gold: str, answer: str) -> bool | None:
    """For numbers one of which has a base: are they one number? None for others."""
    known, said = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if not known or not said or not (known[2] or said[2]):
        return None
    try:
        return int(known[1], int(known[2] or 10)) == int(said[1], int(said[2] or known[2]))
    except ValueError:  # a digit that the base does not have
        return False


def parses(text: str) -> bool:
    """True if math-verify can read it as a known answer."""
    text = plain(text)
    return _readable(text) and _ask(text, text)["gold"]


def plain(text: str) -> str:
    """An answer without what is put around it: blanks, ``**``, dollar signs, ``\\text{..}`` of a
    number, a point at its end, = or an approximation before it, thin spaces, marks of degrees."""
    before = None
    while text != before and len(text) <= LONGEST:
        before, text = text, text.strip()
        for noise, kept in _NOISE:
            text = noise.sub(kept, text.strip())
    return text


def needs(task: str) -> None:
    """ValueError unless math-verify is installed, and its process can be limited."""
    if sys.platform == "darwin":
        raise ValueError(f"task {task} needs Linux, as macOS limits no process's memory")
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"task {task} needs math-verify: pip install 'minidrl[math]'")


def _readable(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0 and 0 < len(text) <= LONGEST and not _APART.search(text)


# ------------------------------------------------------------------------------------- this process
_judge: subprocess.Popen | None = None  # started with the first question, again after it has ended


def _ask(gold: str, answer: str) -> dict[str, bool]:
    """``equal``, and ``gold``: can the known answer be read. All False where a limit was met."""
    global _judge
    _judge = _judge or _started()
    told = b""
    try:
        _judge.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
        _judge.stdin.flush()
        told = _judge.stdout.readline()
    except BrokenPipeError:
        pass
    finally:
        if not told:  # interrupted, too: the next question would be told the answer to this one
            _stop()
    return json.loads(told) if told else {"equal": False, "gold": False}


def _started() -> subprocess.Popen:
    # It ends when its questions do. A session of its own: Ctrl-C is the caller's.
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-P", __file__], **pipes)
    if process.stdout.readline() != b"ready\n":
        process.communicate()
        raise OSError("math-verify cannot be started")
    return process


def _stop() -> None:
    """Let go of the process, which then ends."""
    global _judge
    process, _judge = _judge, None
    if process is not None:
        process.communicate()


atexit.register(_stop)


# ------------------------------------------------------------------------------- the other process
def _verdict(gold: str, answer: str) -> dict[str, bool]:
    from math_verify import verify
    from sympy.core.random import seed

    seed(0)
    known, said = _read(gold), _read(answer)
    same = known and said and _comparable(known[0], said[0])
    same = same and verify(known, said, timeout_seconds=None)
    same = same and ("%" in gold + answer or _exactly(known[0], said[0]))
    return {"equal": bool(same), "gold": bool(known)}


def _read(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    how = {"fallback_mode": "no_fallback", "extraction_mode": "first_match"}
    only = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(rf"\boxed{{{text}}}", only, **how, parsing_timeout=None)


def _comparable(known: Any, said: Any) -> bool:
    # A number asks for a number, and what is in order for what is.
    from sympy import FiniteSet, Interval, Number, Tuple

    if isinstance(known, Number):
        return _is_literal(said)
    kinds = [[isinstance(x, kind) for x in (known, said)] for kind in (FiniteSet, Interval | Tuple)]
    return not (any(kinds[0]) and any(kinds[1]))


def _is_literal(found: Any) -> bool:
    # A number as it is written down: no operation is left to do but a sign and a percent.
    from sympy import Eq, FiniteSet, Mul, Number, Rational, Symbol
    from sympy.core.expr import UnevaluatedExpr
    from sympy.core.function import AppliedUndef

    if isinstance(found, Eq):  # x=13, AB=13, f(2)=13
        name = found.lhs.args if isinstance(found.lhs, Mul) else [found.lhs]
        return all(isinstance(x, Symbol | AppliedUndef) for x in name) and _is_literal(found.rhs)
    if isinstance(found, FiniteSet):
        return len(found.args) == 1 and _is_literal(found.args[0])
    if isinstance(found, Mul):
        free = [x for x in found.args if x not in (-1, UnevaluatedExpr(Rational(1, 100)))]
        return len(free) == 1 and isinstance(free[0], Number)
    return isinstance(found, Number)


def _exactly(known: Any, said: Any) -> bool:
    # math-verify compares to 15 decimals, or 6; two fractions or two decimals are equal or not, and
    # other numbers that are exact have the ratio 1.
    from sympy import Expr, Float, Rational

    if isinstance(known, Expr) and isinstance(said, Expr):
        known, said = known.doit(), said.doit()
        for kind in (Rational, Float):
            if isinstance(known, kind) and isinstance(said, kind):
                return known == said
        if known.is_number and said.is_number and not (known.has(Float) or said.has(Float)):
            return known == said or abs((said / known).evalf() - 1) < 1e-9
    return True


def _main() -> None:
    import logging
    import os
    import resource

    for name, most in {"RLIMIT_AS": BYTES, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    logging.disable(logging.CRITICAL)
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    _verdict("1", r"\frac{1}{2}")  # reads math-verify and builds its grammar
    os.write(out, b"ready\n")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
        try:
            told = _verdict(*json.loads(line))
        except Exception:  # MemoryError, RecursionError, and what sympy raises
            told = {"equal": False, "gold": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(out, json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    _main()
