"""Hostile answers for the judge of mathematics: `python tests/fuzz_mathematics.py`, part of `make chaos`.

Three kinds of answers to a known number: it, or another, in a notation whose value Fraction knows; LaTeX put together at
random, up to a hundred brackets deep; and texts without an end. A verdict must not raise, must come within the limits of CPU
and wall time, must be right where the value is known, and must never be yes for a text in which the known number cannot be
read. `make test` takes a sample.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import os
import random
import re
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from minidrl.tasks import equality
from minidrl.tasks.gsm8k import Gsm8k
from minidrl.tasks.mathematics import Question

PIECES = [*"0123456789+-*/^_=<>()[]{}|!,;:.&%$# \n\tabcxyzeiπ²٣①", "\\frac", "\\sqrt", "\\sum_{i=1}^{", "\\int_0^", "\\text{"]
PIECES += ["\\left(", "\\right)", "\\{", "\\}", "\\begin{pmatrix}", "\\end{pmatrix}", "\\cdot", "\\pi", "\\infty", "\\\\", "&"]
PIECES += ["\\boxed{", "}", "{", "\\log", "\\binom", "9^9^9", "10^{10^{10}}", "!", "1e999", "\ud800", "\0", "or", "and", "\\pm"]
PIECES += ["__import__('os')", "lambda:0", "</answer>", "<answer>", "\u202e", "\\input{/etc/passwd}", "\\def\\a{\\a\\a}\\a"]
ENDLESS = [
    "9^{9^{9^{9}}}",
    "10^{10^{10}}!",
    "(9!)!",
    "\\prod_{i=1}^{10^9} i",
    "\\int_0^1 x^x dx",
    "\\sum_{i=1}^\\infty \\frac1{i^i}",
]
ENDLESS += [
    "x^{x^{x^{x}}}+y^{y^{y}}",
    "\\sin(\\cos(\\tan(x^{99})))",
    "(x+y+z)^{99}",
    "\\sqrt{2}" * 20,
    "\\frac{1}{" * 15 + "2" + "}" * 15,
]
SHOWN = 100


class Case(NamedTuple):
    """A response to a question whose answer is ``gold``, and whether it is right; None where the value is not known."""

    gold: str
    response: Any
    right: bool | None


def notations(rng: random.Random, value: Fraction) -> str:
    """The number as it may be written down."""
    whole, sign = abs(value), "-" if value < 0 else ""
    if value.denominator != 1:
        k = rng.choice([1, 1, 2, 3])
        a, b = whole.numerator * k, whole.denominator * k
        return sign + rng.choice([f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\dfrac{{{a}}}{{{b}}}"])
    n = whole.numerator
    forms = [f"{n}", f"{n:,}", f"{n}.0", f"{n}.00", f"0{n}", f"\\frac{{{2 * n}}}{{2}}", f"{3 * n}/3", f"{n}\\text{{ eggs}}"]
    return sign + rng.choice(forms)


def wrapped(rng: random.Random, text: str) -> str:
    """What does not change an answer."""
    if rng.random() < 0.1:
        text = "x=" + text.replace(",", "")  # x=1,269 is a list
    for around in rng.sample(["${}$", "\\boxed{{{}}}", " {} ", "**{}**", "\n{}\n", "{}."], rng.choice([0, 0, 1, 2])):
        text = around.format(text)
    return text


def cases(seed: int) -> Iterator[Case]:
    """Without end."""
    rng = random.Random(seed)
    while True:
        gold = Fraction(rng.randrange(-999, 9999), rng.choice([1, 1, 1, 2, 3, 7]))
        known = str(gold.numerator) if gold.denominator == 1 else f"\\frac{{{gold.numerator}}}{{{gold.denominator}}}"
        kind = rng.random()
        if kind < 0.5:
            right = rng.random() < 0.5
            other = gold + rng.choice([1, -1, 10, Fraction(1, 2), -2 * gold if gold else 1])
            text = wrapped(rng, notations(rng, gold if right else other))
            yield Case(known, f"<answer>{text}</answer>", right)
        elif kind < 0.981:
            text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 16)))
            if rng.random() < 0.4:
                place = rng.randrange(len(text) + 1)
                text = text[:place] + known + text[place:]
            depth = rng.choice([0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3])
            yield Case(known, f"<answer>{'(' * depth}{text}{')' * depth}</answer>", None)
        elif kind < 0.984:
            yield Case(known, f"<answer>{rng.choice(ENDLESS)}</answer>", None)
        elif kind < 0.985:
            opening, closing = rng.choice([("(", ")"), ("{", "}"), ("\\frac{", "}{2}"), ("\\left(", "\\right)")])
            depth = rng.choice([10, 30, 100])
            yield Case(known, f"<answer>{opening * depth}{known}{closing * depth}</answer>", None)
        else:
            nothing = [None, 18, b"18", "", "\0", "\ud800", known, f"<answer>{known}", f"{known}</answer>", "x" * 10**6]
            nothing += [f"<answer>{known}</answer>" * 2, f"<answer>{known * 200}</answer>", "<answer></answer>", "{" * 10**5]
            yield Case(known, rng.choice(nothing), False)


def readable(gold: str, response: str) -> bool:
    """Can the known number be read in a text, in one of its notations? A lenient reader that shares no code with the judge."""
    text = response.partition("<answer>")[2].partition("</answer>")[0]
    value = Fraction(re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", gold))
    text = re.sub(
        r"\\[dt]?frac\s*\{?\s*(-?\d+)\s*\}?\s*\{?\s*(\d+)\s*\}?", r" \1/\2 ", re.sub(r"(?<=\d)(\{,\}|,)(?=\d{3})", "", text)
    )
    text = text.replace("\u2212", "-").replace(" ", "")
    found = []
    for number in re.findall(r"\d*\.?\d+(?:/\d+)?", text):
        top, _, below = number.partition("/")
        if not (below and int(below) == 0):
            found.append(Fraction(top) / int(below or 1))
    sums = {abs(x) for x in found} | {abs(x) / 100 for x in found} | {abs(x / y) for x in found for y in found if y}
    return abs(value) in sums


def fuzz(count: int, seed: int = 0) -> dict:
    """How many of ``count`` answers were right, wrong, noise; the slowest verdict in s. AssertionError for a false one."""
    seen, slowest, task = collections.Counter(), 0.0, Gsm8k()
    for case in itertools.islice(cases(seed), count):
        started = time.monotonic()
        verdict = task.judge(Question("?", case.gold, ""), case.response)
        seconds = time.monotonic() - started
        shown = f"{case.gold!r}: {case.response!r:.{SHOWN}}"
        assert seconds < equality.PATIENCE + equality.START, f"{seconds:.0f} s: {shown}"
        assert case.right in (None, verdict.solved), f"{verdict}, expected {case.right}: {shown}"
        assert not verdict.solved or readable(case.gold, case.response), f"{verdict}, but no such number is there: {shown}"
        seen[verdict.solved, case.right] += 1
        slowest = max(slowest, seconds)
    assert equality.JUDGE.starts == 1, "the process had to be started again"
    solved, noise = seen[True, True], seen[True, None]
    return {"solved": solved, "refused": seen[False, False], "noise": noise + seen[False, None], "slowest_s": round(slowest, 2)}


def main(argv: list[str] | None = None) -> int:
    """Print a line; 1 if a verdict was wrong or slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="answers")
    parser.add_argument("--seed", type=int, default=0, help="of the first part; the others have those that follow")
    parser.add_argument("--parts", type=int, default=len(os.sched_getaffinity(0)), help="processes, each with its own judge")
    arguments = parser.parse_args(argv)
    count, parts = arguments.count, arguments.parts
    counts = [count // parts + (part < count % parts) for part in range(parts)]
    seeds = range(arguments.seed, arguments.seed + parts)
    with concurrent.futures.ProcessPoolExecutor(parts) as pool:
        parts = [pool.submit(fuzz, count, seed) for count, seed in zip(counts, seeds, strict=True)]
    failed = False
    for count, part in zip(counts, parts, strict=True):
        failed |= part.exception() is not None
        print(f"mathematics: {count} hostile answers, {part.exception() or part.result()}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
