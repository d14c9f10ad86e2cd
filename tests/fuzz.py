"""Hostile outputs for the verifiers: `python tests/fuzz.py`, part of `make chaos`; `make test` takes a sample.

Each task is given texts as they could come out of a model, or out of somebody who attacks it, in the plain format, in a chat,
and as tokens, special ones among them, through the decoding of the trainer. A verdict must not raise, must not take 10 ms of
processor time, and must be that of a checker that shares no code with the task: the one of test_countdown.py, whose parser is
Python's, and the solver of test_sudoku.py.

Of the task `code` the outputs are programs, fewer, for each starts two sandboxes. What a program deserves is known by how it
was made: right and decorated, wrong, noise, a cheat or a bomb of test_sandbox.py.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import test_countdown
import test_sandbox
import test_sudoku
from minidrl.tasks import Verdict, sandbox
from minidrl.tasks.code import Code, Exercise
from minidrl.tasks.countdown import MAX_RESPONSE, Countdown
from minidrl.tasks.sudoku import Puzzle, Sudoku
from minidrl.tasks.text import decode

SECONDS = 0.01  # of processor time, for one verdict
SPECIAL = ("[PAD]", "[MASK]", "[EOS]")
NO_TEXT = [None, 46, 4.6, b"5*8+6", ["5", "*", "8"], float("nan"), object(), "", "\ud800", "\0"]
BLANKS = ["", " ", "  ", "\n", "\t", "\u00a0", "\r\n"]
Expected = tuple[float, bool, dict[str, float]]


class Case(NamedTuple):
    """A response to a problem of a task, and the verdict that it deserves."""

    task: Any
    problem: Any
    response: Any
    expected: Expected


# ------------------------------------------------------------------------------------------------------------ three forms
def tagged(response: Any) -> str:
    """What stands between the only pair of tags, read by one regular expression; "" where there is no such pair."""
    if not isinstance(response, str) or len(response) > MAX_RESPONSE:
        return ""
    pieces = re.split("(</?answer>)", response)
    return pieces[2] if pieces[1::2] == ["<answer>", "</answer>"] else ""


def in_a_chat(rng: random.Random, text: str) -> str:
    """An answer between tags, as it should be or with tags missing, doubled, turned round or broken."""
    blank, said = rng.choice(BLANKS), rng.choice(["", "Let me see: 5*8 < 41. ", "\ud800", "2314", "[EOS]", "\n"])
    forms = ["{s}<answer>{b}{t}{b}</answer>{s}"] * 12 + ["<answer>{t}", "{t}</answer>", "</answer>{t}<answer>", "{t}", "{b}"]
    forms += [
        "<answer>{t}</answer><answer>{t}</answer>",
        "<answer><answer>{t}</answer></answer>",
        "<answer>{t}</answer></answer>",
    ]
    forms += ["<Answer>{t}</Answer>", "<answer >{t}</answer>", "<answer>{b}</answer>{t}", "<answer>{t}<answer>"]
    return rng.choice(forms).format(s=said, b=blank, t=text)


@functools.cache
def alphabet(task: Any) -> tuple[Any, tuple[str, ...]]:
    """The task's tokenizer, and its tokens in the order of their ids."""
    tok = task.tokenizer()
    return tok, tuple(tok.convert_ids_to_tokens(range(len(tok))))


def as_tokens(rng: random.Random, task: Any, text: str) -> tuple[str, str]:
    """(what the trainer's decoding makes of a row of tokens, the tokens before the first [EOS]): a damaged text with an end."""
    tok, tokens = alphabet(task)
    row = [tokens.index(c) for c in text if c in tokens][:40]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
        place = rng.randrange(len(row) + 1)
        row[place : place + rng.randrange(2)] = [rng.choice([tokens.index(rng.choice(SPECIAL)), rng.randrange(len(tokens))])]
    row += [tok.eos_token_id] * rng.choice([0, 1, 3]) + [rng.randrange(len(tokens)) for _ in range(rng.randrange(3))]
    said = "".join(tokens[i] for i in itertools.takewhile(lambda i: i != tok.eos_token_id, row))
    return decode(tok, torch.tensor([row], dtype=torch.long))[0], said


# -------------------------------------------------------------------------------------------------------------- countdown
def countdown_verdict(numbers: list[int], target: int, answer: Any) -> Expected:
    """Solved or well-formed, by the evaluator that walks Python's own syntax tree."""
    found = test_countdown.judge(answer) if isinstance(answer, str) and answer else None
    right = found is not None and sorted(found[1]) == numbers
    solved = right and found[0] == target
    return 1.0 if solved else 0.1 if right else 0.0, solved, {"well_formed": right}


def countdown_cases(seed: int) -> Iterator[Case]:
    """Without end: noise, damaged and true calculations, and texts of a million characters."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    puzzle, plain, chat = test_countdown.FUZZED, Countdown(), Countdown(prompt_format="chat")
    expected = functools.partial(countdown_verdict, sorted(puzzle.numbers), puzzle.target)
    while True:
        text, form = test_countdown.hostile(noise), rng.choice(["plain", "chat", "tokens", "tokens"])
        if rng.random() < 0.003:
            nothing = rng.choice(NO_TEXT)
            yield Case(
                task := rng.choice([plain, chat]), puzzle, nothing, expected(tagged(nothing) if task is chat else nothing)
            )
        elif form == "tokens" and len(text) < 100:
            response, said = as_tokens(rng, plain, text)
            yield Case(plain, puzzle, response, expected(said))
        elif form == "chat":
            spread = re.sub("([-+*/()=])", lambda m: rng.choice(["", " "]) + m[0] + rng.choice(["", "  "]), text[:200])
            response = in_a_chat(rng, spread if len(text) < 100 else text)
            answer = tagged(response).strip()
            yield Case(chat, puzzle, response, expected(re.sub(" *([-+*/()=]) *", r"\1", answer.strip(" "))))
        else:
            yield Case(plain, puzzle, text, expected(text))


# ----------------------------------------------------------------------------------------------------------------- sudoku
def sudoku_verdict(clues: str, answer: Any) -> Expected:
    """Solved, well-formed and the share of cells, by the solver that fills cell by cell."""
    grid = isinstance(answer, str) and re.fullmatch("[1-4]{16}", answer) is not None
    kept = grid and all(answer[i] == clues[i] for i in range(16) if clues[i] != ".")
    solved = grid and answer in test_sudoku.solve(clues)
    near = [
        sum(a == b and c == "." for a, b, c in zip(answer, g, clues, strict=True)) for g in test_sudoku.solve(clues) if grid
    ]
    marks = {"well_formed": kept, "cells": max(near, default=0) / clues.count(".")}
    return 1.0 if solved else 0.1 if kept else 0.0, solved, marks


def damaged_grid(rng: random.Random, clues: str) -> str:
    """A completion, or any valid grid, with digits swapped, replaced, lost or added, or noise."""
    kind = rng.random()
    if kind < 0.1:
        return "".join(rng.choice([*"1234.:5", *test_countdown.PIECES]) for _ in range(rng.randrange(20)))
    if kind < 0.13:
        unit = rng.choice(["1", "1234", "2314412332411432", ".", " ", "\n", "\ud800", "😀", "٣", "[PAD]"])
        return unit * rng.choice([2, 4, 16, 1000, 10**6 // len(unit)])
    grid = [*rng.choice(sorted(test_sudoku.solve(clues)) if kind < 0.8 else sorted(test_sudoku.EVERY))]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        a, b = rng.randrange(16), rng.randrange(16)
        grid[a], grid[b] = rng.choice([(grid[b], grid[a]), (rng.choice("1234"), grid[b])])
    if rng.random() < 0.25:
        place = rng.randrange(17)
        grid[place : place + rng.randrange(2)] = rng.choice(["", "1", ".", " ", "\n", "[PAD]", "２", "²", "0", "5", "\0"])
    return "".join(grid)


def sudoku_cases(seed: int) -> Iterator[Case]:
    """Without end: to puzzles of few and of many clues, whose completions are one or several."""
    rng = random.Random(seed)
    plain, chat = Sudoku(), Sudoku(prompt_format="chat")
    puzzles = [p for k in (4, 5, 6, 10) for p in Sudoku(min_clues=k, max_clues=k).problems(10, np.random.default_rng(seed))]
    puzzles += [Puzzle("." * 16), Puzzle("12........34...."), Puzzle("11" + "." * 14)]
    while True:
        puzzle, form = rng.choice(puzzles), rng.choice(["plain", "chat", "tokens", "tokens"])
        text = damaged_grid(rng, puzzle.clues if test_sudoku.solve(puzzle.clues) else "." * 16)
        expected = functools.partial(sudoku_verdict, puzzle.clues)
        if rng.random() < 0.003:
            nothing = rng.choice(NO_TEXT)
            yield Case(
                task := rng.choice([plain, chat]), puzzle, nothing, expected(tagged(nothing) if task is chat else nothing)
            )
        elif form == "tokens" and len(text) < 100:
            response, said = as_tokens(rng, plain, text)
            yield Case(plain, puzzle, response, expected(said))
        elif form == "chat":
            between = rng.choice(["", "", " ", "\n", "|"]) if len(text) < 100 else ""
            response = in_a_chat(rng, between.join(text))
            answer = tagged(response).strip()
            short = re.sub(" *([-+*/()=]) *", r"\1", answer)  # blanks beside signs go before an answer is measured
            yield Case(
                chat, puzzle, response, expected("".join(c for c in short if c not in " \t\r\n") if len(short) <= 64 else "")
            )
        else:
            yield Case(plain, puzzle, text, expected(text))


# --------------------------------------------------------------------------------------------------------------- the test
CASES: dict[str, Callable[[int], Iterator[Case]]] = {"countdown": countdown_cases, "sudoku": sudoku_cases}


def timed(case: Case) -> tuple[Verdict, float]:
    """The verdict and its seconds of processor time: the least of three where the first time is too long."""
    seconds = []
    while not seconds or (min(seconds) >= SECONDS and len(seconds) < 3):
        started = time.thread_time()
        verdict = case.task.judge(case.problem, case.response)
        seconds.append(time.thread_time() - started)
    return verdict, min(seconds)


def fuzz(name: str, count: int, seed: int = 0) -> dict:
    """What ``count`` verdicts were: of each reward how many, the slowest in ms. AssertionError for a wrong or slow one."""
    paid, slowest = collections.Counter(), 0.0
    gc.collect()
    gc.disable()  # what others have left behind is not part of a verdict
    try:
        for case in itertools.islice(CASES[name](seed), count):
            verdict, seconds = timed(case)
            shown = f"{case.task.prompt_format} {case.problem}: {case.response!r:.200}"
            assert seconds < SECONDS, f"{1000 * seconds:.1f} ms: {shown}"
            assert same(verdict, case.expected), f"{verdict}, expected {case.expected}: {shown}"
            paid[verdict.reward], slowest = paid[verdict.reward] + 1, max(slowest, seconds)
    finally:
        gc.enable()
    return {"rewards": dict(sorted(paid.items())), "slowest_ms": round(1000 * slowest, 2)}


# --------------------------------------------------------------------------------------------------------------- programs
SQUARE = Exercise("Square a number.", ("f",), test_sandbox.SQUARE, test_sandbox.SETUP, "", "f = lambda x: x * x")
RIGHT = [
    "f = lambda x: x * x",
    "def f(x):\n    return x ** 2",
    "f = {2: 4, 3: 9}.get",
    "f = lambda x: sum(x for _ in range(x))",
]
WRONG = [
    "f = lambda x: x + x",
    "def f(x):\n    x * x",
    "f = lambda: 4",
    "f = 4",
    "def f(x) return x * x",
    "f = lambda x: [x * x]",
]
WRONG += [
    "f = lambda x: str(x * x)",
    "def F(x): return x * x",
    "f = lambda x: (x * x, )",
    "f = lambda x: print(x * x)",
    "f = len",
]
ORNAMENTS = ["# √ x² 😀", "x = '</answer '", "print('PASSED')", "import math, json", "class A:\n    pass", "", "ℝ = 'a\\ud800'"]
ORNAMENTS += ["if __name__ == '__main__':\n    1 / 0", "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", "assert True"]
PIECES = [
    "f",
    "=",
    "lambda x:",
    "x",
    "def ",
    "(",
    ")",
    "[",
    "\n",
    "    ",
    "return ",
    "*",
    "2",
    '"""',
    "'",
    "\\",
    "\0",
    "\ud800",
]
PIECES += ["😀", "async ", "import os", "while True", ":", "{", "@", "match ", "*" * 500, "(" * 300, "9" * 5000, "\f", "\r"]
PIECES += ["raise ", "yield ", "f'{x!r:", "\ufeff"]


def program_cases(seed: int) -> Iterator[tuple[str, bool]]:
    """Without end: responses, and whether they solve ``SQUARE``."""
    rng = random.Random(seed)
    quick = [*test_sandbox.CHEATS.values(), test_sandbox.BOMBS["a long answer"], test_sandbox.BOMBS["a deep answer"]]
    while True:
        kind = rng.choice(["right", "right", "wrong", "cheat", "noise", "untagged"])
        made = rng.choice({"right": RIGHT, "untagged": RIGHT, "wrong": WRONG, "cheat": quick, "noise": [""]}[kind])
        if kind == "noise":
            made = "".join(rng.choices(PIECES, k=rng.randrange(30)))
        program = "\n".join([*rng.choices(ORNAMENTS, k=rng.randrange(3)), made, *rng.choices(ORNAMENTS, k=rng.randrange(3))])
        forms = ["<answer>{p}</answer>", "So: <answer>\n```python\n{p}\n```\n</answer> ```", "\ud800<answer>\n{p}\n</answer>\0"]
        broken = ["{p}", "<answer>{p}", "<answer>{p}</answer></answer>", "```python\n{p}\n```"]
        yield rng.choice(broken if kind == "untagged" else forms).replace("{p}", program), kind == "right"


def fuzz_programs(count: int, seed: int = 0) -> dict:
    """How many of ``count`` programs solved their exercise. AssertionError for a verdict that a program does not deserve."""
    task, found, cases = Code(seconds=1), collections.Counter(), list(itertools.islice(program_cases(seed), count))
    with ThreadPoolExecutor(len(sandbox.cores())) as pool:  # the work is in the sandboxes' processes
        verdicts = pool.map(lambda case: task.judge(SQUARE, case[0]), cases)
        for (response, expected), verdict in zip(cases, tqdm(verdicts, total=count, leave=False, mininterval=5), strict=True):
            assert verdict.solved == expected == (verdict.reward == 1.0), f"{verdict}, expected {expected}: {response!r:.500}"
            found[verdict.solved] += 1
    return {"solved": found[True], "not solved": found[False]}


def same(verdict: Verdict, expected: Expected) -> bool:
    """Equal, but for rounding in the share of cells."""
    reward, solved, marks = expected
    near = verdict.marks.keys() == marks.keys() and all(abs(verdict.marks[key] - marks[key]) < 1e-12 for key in marks)
    return (verdict.reward, verdict.solved) == (reward, solved) and near


def main(argv: list[str] | None = None) -> int:
    """Print a line a task; 1 if a verdict was wrong or slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="outputs for each task")
    parser.add_argument("--programs", type=int, default=2000, help="outputs for the task code (`make test` has 200)")
    parser.add_argument("--seed", type=int, default=0, help="other outputs with each")
    arguments = parser.parse_args(argv)
    count, failed = arguments.count, 0
    for name in CASES:
        try:
            print(f"{name}: {count} hostile outputs, {fuzz(name, count, arguments.seed)}", flush=True)
        except AssertionError as error:
            failed = 1
            print(f"{name}: {error}", flush=True)
    if why := sandbox.refusal():
        print(f"code: skipped: {why}")
        return failed
    try:
        print(f"code: {arguments.programs} programs, {fuzz_programs(arguments.programs, arguments.seed)}", flush=True)
    except AssertionError as error:
        failed = 1
        print(f"code: {error}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
