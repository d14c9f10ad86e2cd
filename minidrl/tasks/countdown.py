"""Countdown: combine the given numbers with + - * / so that the result is the target.

    prompt     5,6,8>46:            the numbers, the target
    response   5*8=40+6=46          a running calculation: each result is the left operand of the
               next operation
           or  (5*8)+6              a bare expression, which the verifier accepts as well

Why a running calculation: a small network cannot evaluate ``(5*8)+6`` in one look, but ``5*8=40``
is local arithmetic. Writing the intermediate result down leaves search as the difficulty, and
search is what reinforcement learning is to teach.

A response is untrusted text: it is never evaluated, but read by two regular expressions and
computed in ``Fraction``, and one of more than ``MAX_CHARACTERS`` is refused unread. The grammar:

    response    running | expression                       no white space, ASCII only
    running     number (op number '=' number)+             each equation is true
    expression  + - * / and brackets, with their usual precedence
    number      0 to 999999, without leading zeros: ``007`` is refused; no sign, no point

A running calculation cannot pass through a fraction or a negative number; an expression can.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from minidrl.tasks import Example, Verdict, arithmetic, d1, rows
from minidrl.tasks.text import check_setting, final_answer
from minidrl.tasks.text import tokenizer as tokenizer_of

CHARACTERS = "0123456789+-*/()=,>:"
MAX_CHARACTERS = 64  # a longer response scores 0 unread
MAX_DRAWS = 100_000  # misses in a row after which a split counts as empty


# ----------------------------------------------------------------------------------------- the task
@dataclass(frozen=True)
class Puzzle:
    """Numbers in the order in which the prompt shows them, and the target."""

    numbers: tuple[int, ...]
    target: int
    wording: str = "ours"
    place: str = field(default="", repr=False, compare=False)  # in a file: its name and the row

    @property
    def prompt(self) -> str:
        return ",".join(map(str, self.numbers)) + f">{self.target}:"

    @property
    def words(self) -> str:
        *most, last = map(str, self.numbers)
        return f"Make {self.target} from {', '.join(most)} and {last}:"

    @property
    def instruction(self) -> str:
        if self.wording != "ours":
            return d1.countdown_words(self.wording, self.numbers, self.target)
        numbers = ", ".join(map(str, self.numbers))
        return (
            f"Combine the numbers {numbers} with the operations +, -, * and / so that the result "
            f"is exactly {self.target}. Use every number exactly once. Think first; then write the "
            "expression alone, without an equals sign, between <answer> and </answer>."
        )

    @property
    def opening(self) -> str:
        return d1.OPENINGS[self.wording]

    @property
    def key(self) -> str:
        """The puzzle whatever the order of its numbers: with one key, the same solutions."""
        return ",".join(map(str, sorted(self.numbers))) + f">{self.target}"


@dataclass(frozen=True, kw_only=True)
class Countdown(rows.Puzzles):
    """The task as a run uses it: difficulty, split, reward.

    Difficulty: ``num_numbers`` numbers drawn from 1..``max_number``; every value on the way, the
    target included, is an integer in 0..``max_value``; the target is at least 1 and at most
    ``max_target`` (0: ``max_value``). Every puzzle is solvable by a running calculation, by
    construction. Split: a hash of the puzzle (its sorted numbers with its target), as a fraction of
    1, decides, so the splits are disjoint whatever is drawn, in whatever order. The lowest
    ``held_out_share`` is held out, the highest ``pretrain_share`` is for pre-training, and RL
    trains on what lies between. Where ``pretrain_share`` is 0, pre-training and RL share a split.
    ``prompt_format: words`` is a sentence (``Make 46 from 5, 6 and 8:``), answered as plain is.
    Of a file (``path``, ``exclude``) the rows have ``input`` (30,100,93) and ``output`` (23).
    """

    name: ClassVar[str] = "countdown"
    about: ClassVar[str] = (
        "combine numbers so that the result is the target; generated, split by a hash of the "
        "puzzle, judged in exact arithmetic"
    )

    reward: Literal["strict", "binary", "any_answer"] = "strict"
    prompt_format: Literal["plain", "words", "chat"] = "plain"
    num_numbers: Literal[2, 3, 4] = 3
    max_number: Annotated[int, Field(ge=1, le=99)] = 9
    max_value: int = 99
    max_target: int = 0
    held_out_share: float = 0.3
    pretrain_share: float = 0.0
    hit_share: rows.Share = 0.2
    late_hit_share: rows.Share = 0.2

    def __post_init__(self):
        super().__post_init__()
        check = partial(check_setting, self)
        most, target, share = self.max_value, self.max_target, self.held_out_share
        check("max_value", self.max_number <= most <= 999, f"max_number ({self.max_number}) to 999")
        check("max_target", 0 <= target <= most, f"0 (max_value) to {most}")
        check("held_out_share", 0 < share < 1, "between 0 and 1")
        below = f"from 0, below 1 - held_out_share ({share:g})"
        check("pretrain_share", 0 <= self.pretrain_share and share + self.pretrain_share < 1, below)

    def drawn(self, count: int, rng: np.random.Generator, split: str) -> list[Puzzle]:
        """Random puzzles: every number is uniform, then the target is uniform over the reachable
        values; a puzzle of another split is drawn again.

        Raises ValueError for a split in which this difficulty has no puzzles.
        """
        out: list[Puzzle] = []
        misses = 0
        while len(out) < count:
            numbers = tuple(int(n) for n in rng.integers(1, self.max_number + 1, self.num_numbers))
            targets = self.targets(numbers)
            puzzle = self._puzzle(numbers, targets[rng.integers(len(targets))]) if targets else None
            if puzzle and self._is_in(puzzle, split):
                out.append(puzzle)
                misses = 0
            elif (misses := misses + 1) == MAX_DRAWS:
                own = split == "pretrain" and self.pretrain_share > 0
                key = "pretrain_share" if own else "held_out_share"
                allowed = f"shares that leave {split} puzzles at this difficulty"
                raise ValueError(f"task.{key}: got {getattr(self, key)}; allowed {allowed}")
        return out

    def puzzles(self, split: str) -> Iterator[Puzzle]:
        """Every puzzle of a split, each key once, with its numbers ascending."""
        each = range(1, self.max_number + 1)
        for numbers in itertools.combinations_with_replacement(each, self.num_numbers):
            every = (self._puzzle(numbers, target) for target in self.targets(numbers))
            yield from (puzzle for puzzle in every if self._is_in(puzzle, split))

    def _puzzle(self, numbers: tuple[int, ...], target: int) -> Puzzle:
        return Puzzle(numbers, target, self.wording)

    def _is_in(self, puzzle: Puzzle, split: str) -> bool:
        left_out = split != "held_out" and puzzle.key in self._excluded_keys
        drawn_from = "train" if split == "pretrain" and not self.pretrain_share else split
        return self.split_of(puzzle) == drawn_from and not left_out

    @functools.cached_property
    def _excluded_keys(self) -> set[str]:
        return {puzzle.key for puzzle in self.excluded}

    def problem_of(self, row: rows.Row) -> Puzzle:
        try:
            numbers = tuple(int(number) for number in str(row["input"]).split(","))
            target = int(str(row["output"]))
        except (KeyError, TypeError, ValueError):
            numbers, target = (), 0
        readable = 2 <= len(numbers) <= 4 and 0 <= min(numbers) and max(numbers) <= 999_999
        if not readable or target not in _reached(tuple(map(Fraction, sorted(numbers)))):
            allowed = "input, 2 to 4 numbers up to 999999 with commas, and output, what they make"
            raise ValueError(f"got {rows.brief(row)}; allowed {allowed}")
        return self._puzzle(numbers, target)

    def split_of(self, puzzle: Puzzle) -> str:
        """The split, from the puzzle alone, whatever seed, platform and Python's hash are."""
        fraction = int.from_bytes(hashlib.sha256(puzzle.key.encode()).digest()[:8], "big") / 2**64
        if fraction < self.held_out_share:
            return "held_out"
        # From the other end, so that neither share moves the other's puzzles.
        return "pretrain" if fraction > 1 - self.pretrain_share else "train"

    def targets(self, numbers: tuple[int, ...]) -> list[int]:
        """Every target that the numbers can reach inside the difficulty's limits, ascending."""
        found = running_calculations(tuple(sorted(numbers)), self.max_value)
        most = self.max_target or self.max_value
        return sorted(value for value in found if 1 <= value <= most)

    def demonstrations(
        self, problems: list[Puzzle], rng: np.random.Generator, progress: float
    ) -> list[str]:
        """``demonstrate`` with the share of hits that is due after ``progress`` (0 to 1)."""
        share = self.hit_share if progress < 0.5 else self.late_hit_share
        return self.demonstrate(problems, rng, share)

    def demonstrate(
        self, puzzles: list[Puzzle], rng: np.random.Generator, hit_share: float
    ) -> list[str]:
        """One true running calculation a puzzle, of its numbers and inside the difficulty's limits.

        With probability ``hit_share`` it is drawn from those that reach the target, else from all
        of them, wherever they end (a few on the target by chance). Demonstrations of mixed quality
        are what a web-scale corpus offers: they teach arithmetic and format well, and the goal only
        weakly. A base model trained on them is capable but unfocused.
        """
        texts = []
        for puzzle in puzzles:
            found = running_calculations(tuple(sorted(puzzle.numbers)), self.max_value)
            hit = rng.random() < hit_share
            chains = found[puzzle.target] if hit else sorted(itertools.chain(*found.values()))
            texts.append(chains[rng.integers(len(chains))])
        return texts

    @property
    def longest_plain(self) -> int:
        """Characters of the longest prompt in the plain format."""
        if self.path:
            return max(len(puzzle.prompt) for puzzle in self.of_path)
        return self.num_numbers * (len(str(self.max_number)) + 1) + len(str(self.max_value)) + 1

    def judge(self, problem: Puzzle, response: str) -> Verdict:
        """Well-formed: the given numbers, each exactly once. Solved: that, and the target's value.

        ``reward``

        strict       1 solved; 0.1 well-formed but of another value; 0 otherwise.
                     The rule as it is usually described.
        binary       1 solved; 0 otherwise.
        any_answer   1 solved; 0.1 for any other answer, wrong numbers and stray characters
                     included. The rule of published code, which pays for an answer tag whatever it
                     holds.
        """
        if self.protocol == "d1":
            right, solved = d1.countdown(response, problem.numbers, problem.target)
            answered, readable = d1.answered(response), d1.is_expression(d1.expression(response))
        else:
            text = chat_text(response) if self.prompt_format == "chat" else response
            answer = without_value(text) if self.prompt_format == "chat" else text
            found = evaluate(answer)
            right = found is not None and Counter(found[1]) == Counter(problem.numbers)
            solved = right and found[0] == problem.target
            answered, readable = isinstance(answer, str) and answer != "", is_calculation(text)
        close = {"strict": right, "binary": False, "any_answer": answered}[self.reward]
        return Verdict(1.0 if solved else 0.1 * close, solved, {"well_formed": right}, readable)

    def score(self, puzzle: Puzzle, response: str) -> float:
        return self.judge(puzzle, response).reward

    def tokenizer(self) -> Any:
        return tokenizer()

    def example(self) -> Example:
        prompt = "7,9,4>64:"
        return Example(prompt, answer="64", text="7+9=16*4=64", before=prompt, length=12)


# -------------------------------------------------------------- the generator: running calculations
def _combine(left: int, right: int, max_value: int) -> Iterator[tuple[str, int]]:
    """(operator, value) for every operation whose value is an integer in 0..max_value."""
    found = (("+", left + right), ("-", left - right), ("*", left * right))
    yield from ((op, v) for op, v in found if 0 <= v <= max_value)
    if right and left % right == 0:
        yield "/", left // right


def _running(value: int, rest: tuple[int, ...], max_value: int) -> Iterator[tuple[str, int]]:
    """(text after ``value``, final value) of every way to go on with the remaining numbers."""
    if not rest:
        yield "", value
    for i, number in enumerate(rest):
        for op, result in _combine(value, number, max_value):
            for tail, final in _running(result, rest[:i] + rest[i + 1 :], max_value):
                yield f"{op}{number}={result}{tail}", final


@functools.lru_cache(maxsize=1024)  # an entry of four numbers takes about 0.1 MB
def running_calculations(numbers: tuple[int, ...], max_value: int) -> dict[int, tuple[str, ...]]:
    """Every running calculation of all the numbers through integers in 0..max_value, by its value.

    The dictionary is shared: do not change it.
    """
    # Tuples, since Python's collector of garbage walks through every list that is kept.
    by_value: dict[int, set[str]] = {}
    for i, first in enumerate(numbers):
        for text, value in _running(first, numbers[:i] + numbers[i + 1 :], max_value):
            by_value.setdefault(value, set()).add(f"{first}{text}")
    return {value: tuple(sorted(texts)) for value, texts in by_value.items()}


def _reached(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value of an expression with all the numbers."""
    if len(numbers) == 1:
        return {*numbers}
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(number for k, number in enumerate(numbers) if k not in (i, j))
        left, right = numbers[i], numbers[j]
        made = [left + right, left - right, left * right] + ([left / right] if right else [])
        found = found.union(*(_reached((*rest, value)) for value in made))
    return found


# ------------------------------------------------------------------------------------- the verifier
_NUMBER, _OPERATOR = "(?:0|[1-9][0-9]{0,5})", "[-+*/]"
_STEP = re.compile(f"({_OPERATOR})([0-9]+)=([0-9]+)")
_EQUATIONS = re.compile(f"[0-9]+(?:{_STEP.pattern})+")
_RUNNING = re.compile(f"{_NUMBER}(?:{_OPERATOR}{_NUMBER}={_NUMBER})+")
_EXPRESSION = re.compile(rf"\(*{_NUMBER}\)*(?:{_OPERATOR}\(*{_NUMBER}\)*)*")
_CALCULATION = re.compile(f"{_RUNNING.pattern}|{_EXPRESSION.pattern}(?:=-?[0-9/]+)?")
_SIGN = re.compile(r"([-+*/()=])")
_LATEX = {r"\div": "/", r"\times": "*", r"\cdot": "*", "÷": "/", "×": "*", "−": "-"}
_LATEX |= dict.fromkeys((r"\left", r"\right", r"\[", r"\]"), "") | {r"\(": "", r"\)": ""}


def evaluate(response: str) -> tuple[Fraction, list[int]] | None:
    """(value, numbers used, in order) of a response, exactly; None if malformed or false.

    That is: not in the grammar, or stating a false equation. A division by zero, a text of more
    than ``MAX_CHARACTERS`` and an object that is no text are None as well.
    """
    if not isinstance(response, str) or len(response) > MAX_CHARACTERS:
        return None
    if _RUNNING.fullmatch(response):
        return _evaluate_running(response)
    if not _EXPRESSION.fullmatch(response) or (value := arithmetic.value(response)) is None:
        return None
    return value, [int(number) for number in re.findall("[0-9]+", response)]


def _evaluate_running(text: str) -> tuple[Fraction, list[int]] | None:
    value, steps = equations(text)
    numbers = [value]
    for operator, number, result in steps:
        value = arithmetic.value(f"{value}{operator}{number}")
        if value != result:  # which is the next left operand
            return None
        numbers.append(number)
    return value, numbers


def equations(text: str) -> tuple[int, list[tuple[str, int, int]]] | None:
    """Of a running calculation, true or false: its first number, then of each equation operator,
    number and what it is said to make. None for other texts."""
    if not _EQUATIONS.fullmatch(text):
        return None
    steps = [(op, int(number), int(made)) for op, number, made in _STEP.findall(text)]
    return int(re.match("[0-9]+", text)[0]), steps


def is_calculation(text: str) -> bool:
    """Whether there is a calculation to judge, true or false."""
    short = isinstance(text, str) and len(text) <= MAX_CHARACTERS
    return short and _CALCULATION.fullmatch(text) is not None


def chat_text(response: str) -> str:
    """The answer in a chat, its LaTeX written as the grammar has it.

    Blanks at its ends and beside an operator, bracket or = are taken out; ``4 4`` keeps its blank,
    and is no number. After MAX_CHARACTERS of these signs, where no expression can be read any more,
    they stay.
    """
    answer = final_answer(response).strip("$` \n")
    for word, sign in _LATEX.items():
        answer = answer.replace(word, sign)
    return "".join(part.strip(" ") for part in _SIGN.split(answer.strip(), MAX_CHARACTERS))


def without_value(answer: str) -> str:
    """An expression without the value stated after it (``5*8+6=46``); "" if that is false."""
    expression, equals, stated = answer.partition("=")
    if equals and evaluate(answer) is None and (found := evaluate(expression)):
        return expression if stated == str(found[0]) else ""
    return answer


# ------------------------------------------------------------------------------------ the tokenizer
def tokenizer(characters: str = CHARACTERS) -> Any:
    """Of the characters of prompts and calculations."""
    return tokenizer_of(characters)
