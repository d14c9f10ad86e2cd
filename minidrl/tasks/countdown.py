"""Countdown: combine the given numbers with + - * / so that the result is the target.

    prompt     5,6,8>46:            the numbers, the target
    response   5*8=40+6=46          a running calculation: each result is the left operand of the
               next operation
           or  (5*8)+6              a bare expression, which the verifier accepts as well

Why a running calculation: a small network cannot evaluate ``(5*8)+6`` in one look, but ``5*8=40``
is local arithmetic. Writing the intermediate result down leaves search as the difficulty, and
search is what reinforcement learning is to teach.

The verifier never calls ``eval``: a response is untrusted text. A text of more than
``MAX_CHARACTERS`` is refused unread; the others are tokenised by one regular expression, parsed
with a bounded depth and computed in ``Fraction``. The grammar:

    response    running | expression                       no white space, ASCII only
    running     number op number '=' number (op number '=' number)*
    expression  term (('+' | '-') term)*                   left-associative, * and / bind tighter
    term        atom (('*' | '/') atom)*
    atom        number | '(' expression ')'                at most MAX_DEPTH parentheses inside one
                another
    number      0 to 999999, without leading zeros: ``007`` is refused; no sign, no point

For a network that was trained on words, ``prompt_format: words`` asks in a few (``Make 46 from 5, 6
and 8:``) for the same bare response, and ``chat`` asks through the tokenizer's chat template, and
reads the answer between the one <answer> and the one </answer> of
the response; blanks beside operators do not count there.

One operation between two ``=``: ``5*8=40+6=46`` is a response and ``5*8+6=46`` is not, nor is an
equation that is false. A running calculation can therefore not pass through a fraction or a
negative number; a bare expression can.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

import numpy as np

from minidrl.tasks import Example, Verdict, d1, rows
from minidrl.tasks.text import check_asked, check_choice, check_setting, final_answer
from minidrl.tasks.text import tokenizer as tokenizer_of

CHARACTERS = "0123456789+-*/()=,>:"
MAX_CHARACTERS = 64  # a longer response scores 0 unread
MAX_DEPTH = 8  # nested parentheses
MAX_DRAWS = 100_000  # misses in a row after which a split counts as empty
MAX_REPEATS = 20_000  # repeated puzzles in a row after which no new one is expected
REWARDS = ("strict", "binary", "any_answer")
SPLITS = ("pretrain", "train", "held_out")


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
        """The puzzle in the plain format: the numbers, the target."""
        return ",".join(map(str, self.numbers)) + f">{self.target}:"

    @property
    def words(self) -> str:
        """The puzzle in a few words."""
        *most, last = map(str, self.numbers)
        return f"Make {self.target} from {', '.join(most)} and {last}:"

    @property
    def instruction(self) -> str:
        """The puzzle in words, for a chat."""
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
        """How the answer's turn begins."""
        return d1.OPENINGS[self.wording]

    @property
    def key(self) -> str:
        """The puzzle whatever the order of its numbers: with one key, the same solutions."""
        return ",".join(map(str, sorted(self.numbers))) + f">{self.target}"


@dataclass(frozen=True)
class Countdown(rows.Puzzles):
    """The task as a run uses it: difficulty, split, reward.

    Difficulty: ``num_numbers`` numbers drawn from 1..``max_number``; every value on the way, the
    target included, is an integer in 0..``max_value``; the target is at least 1 and at most
    ``max_target`` (0: ``max_value``). Every puzzle is solvable by a running calculation, by
    construction. Split: a hash of the puzzle (its sorted numbers with its target), as a fraction of
    1, decides, so the splits are disjoint whatever is drawn, in whatever order. The lowest
    ``held_out_share`` is held out, the highest ``pretrain_share`` is for pre-training, and RL
    trains on what lies between. Where ``pretrain_share`` is 0, pre-training and RL share a split.
    ``prompt_format``: plain (``5,6,8>46:`` and a bare response), words (and the same) or chat;
    prompts of the last two may have ``max_prompt_length`` tokens. ``wording`` and ``protocol``: a
    chat's words and how answers are read, ours or d1's (``tasks.d1``). ``path``: held-out puzzles
    of a file, whose rows have ``input`` (30,100,93) and ``output`` (23); ``exclude``: a file whose
    puzzles are not trained on.
    """

    name: ClassVar[str] = "countdown"
    about: ClassVar[str] = (
        "combine numbers so that the result is the target; generated, split by a hash of the "
        "puzzle, judged in exact arithmetic"
    )

    num_numbers: int = 3
    max_number: int = 9
    max_value: int = 99
    max_target: int = 0
    held_out_share: float = 0.3
    pretrain_share: float = 0.0
    reward: str = "strict"
    wording: str = "ours"
    protocol: str = "ours"
    prompt_format: str = "plain"
    max_prompt_length: int = 200
    hit_share: float = 0.2
    late_hit_share: float = 0.2
    path: str = ""
    exclude: str = ""

    def __post_init__(self):
        check = partial(check_setting, self)
        most, target, share = self.max_value, self.max_target, self.held_out_share
        check("num_numbers", self.num_numbers in (2, 3, 4), "2, 3, 4")
        check("max_number", 1 <= self.max_number <= 99, "1 to 99")
        check("max_value", self.max_number <= most <= 999, f"max_number ({self.max_number}) to 999")
        check("max_target", 0 <= target <= most, f"0 (max_value) to {most}")
        check("held_out_share", 0 < share < 1, "between 0 and 1")
        below = f"from 0, below 1 - held_out_share ({share:g})"
        check("pretrain_share", 0 <= self.pretrain_share and share + self.pretrain_share < 1, below)
        for name in ("hit_share", "late_hit_share"):
            check(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        check_asked(self, REWARDS, ("plain", "words", "chat"))
        if (self.wording, self.protocol) != ("ours", "ours"):
            check("prompt_format", self.prompt_format == "chat", "chat with d1's prompts and rule")

    def problems(self, count: int, rng: np.random.Generator, split: str = "train") -> list[Puzzle]:
        """``count`` random puzzles of a split (``SPLITS``), each drawn anew.

        Every number is uniform, then the target is uniform over the reachable values; a puzzle of
        another split is drawn again. Raises ValueError for another split, and for one in which
        this difficulty has no puzzles.
        """
        wanted = self._drawn_from(split)
        if wanted == "held_out" and self.path:
            return [self.of_path[i] for i in rng.integers(len(self.of_path), size=count)]
        out: list[Puzzle] = []
        misses = 0
        while len(out) < count and misses < MAX_DRAWS:
            numbers = tuple(int(n) for n in rng.integers(1, self.max_number + 1, self.num_numbers))
            targets = self.targets(numbers)
            puzzle = self._puzzle(numbers, targets[rng.integers(len(targets))]) if targets else None
            if puzzle and self._is_in(puzzle, wanted):
                out.append(puzzle)
                misses = 0
            else:
                misses += 1
        if len(out) < count:
            raise self._empty(split, wanted)
        return out

    def _puzzle(self, numbers: tuple[int, ...], target: int) -> Puzzle:
        return Puzzle(numbers, target, self.wording)

    def _empty(self, split: str, wanted: str) -> ValueError:
        key = "held_out_share" if wanted != "pretrain" else "pretrain_share"
        allowed = f"shares that leave {split} puzzles at this difficulty"
        return ValueError(f"task.{key}: got {getattr(self, key)}; allowed {allowed}")

    def puzzles(self, split: str) -> Iterator[Puzzle]:
        """Every puzzle of a split, each key once, with its numbers ascending."""
        wanted = self._drawn_from(split)
        each = range(1, self.max_number + 1)
        for numbers in itertools.combinations_with_replacement(each, self.num_numbers):
            every = (self._puzzle(numbers, target) for target in self.targets(numbers))
            yield from (puzzle for puzzle in every if self._is_in(puzzle, wanted))

    def _is_in(self, puzzle: Puzzle, split: str) -> bool:
        left_out = split != "held_out" and puzzle.key in self._excluded_keys
        return self.split_of(puzzle) == split and not left_out

    @functools.cached_property
    def _excluded_keys(self) -> set[str]:
        return {puzzle.key for puzzle in self.excluded}

    def puzzle_of(self, row: rows.Row) -> Puzzle:
        """A row of a file."""
        try:
            numbers = tuple(int(number) for number in str(row["input"]).split(","))
            target = int(row["output"])
        except (KeyError, TypeError, ValueError):
            allowed = "input, numbers with commas, and output, a number"
            raise ValueError(f"got {rows.brief(row)}; allowed {allowed}") from None
        if not 2 <= len(numbers) <= 4 or min(numbers) < 0 or max(numbers) > 999_999:
            raise ValueError(f"input: got {row['input']!r}; allowed 2 to 4 numbers up to 999999")
        if target not in _reached(tuple(map(Fraction, sorted(numbers)))):
            raise ValueError(f"output: got {target}; allowed what {row['input']} can make")
        return self._puzzle(numbers, target)

    def _drawn_from(self, split: str) -> str:
        check_choice("split", split, SPLITS)
        return "train" if split == "pretrain" and not self.pretrain_share else split

    def held_out(self, count: int) -> list[Puzzle]:
        """The first ``count`` held-out puzzles, each key once: a prefix of every larger test set.

        Raises ValueError if ``count`` is below 1, or above the number of held-out puzzles.
        """
        if count < 1:
            raise ValueError(f"evaluate.n: got {count}; allowed 1 or more")
        if self.path:
            return rows.first(self.of_path, count)
        # To list those that exist is fast; to draw until nothing new comes takes seconds.
        exist = sum(1 for _ in itertools.islice(self.puzzles("held_out"), count))
        if not exist:
            raise self._empty("held_out", "held_out")
        found = self._distinct(count) if exist == count else []
        if len(found) < count:
            most = len(found) or exist
            allowed = f"at most {most}, the held-out puzzles found at this difficulty"
            raise ValueError(f"evaluate.n: got {count}; allowed {allowed}")
        return found

    def _distinct(self, count: int) -> list[Puzzle]:
        # As many, or fewer where some are too rare to be drawn.
        seen: dict[str, Puzzle] = {}
        rng, misses = np.random.default_rng(0), 0
        while len(seen) < count and misses < MAX_REPEATS:
            puzzle = self.problems(1, rng, "held_out")[0]
            misses = misses + 1 if puzzle.key in seen else 0
            seen.setdefault(puzzle.key, puzzle)
        return list(seen.values())

    def split_of(self, puzzle: Puzzle) -> str:
        """The split, from the puzzle alone, whatever seed, platform and Python's hash are."""
        fraction = int.from_bytes(hashlib.sha256(puzzle.key.encode()).digest()[:8], "big") / 2**64
        if fraction < self.held_out_share:
            return "held_out"
        # From the other end, so that neither share moves the other's puzzles.
        return "pretrain" if fraction > 1 - self.pretrain_share else "train"

    def targets(self, numbers: tuple[int, ...]) -> list[int]:
        """Every target that the numbers can reach inside the difficulty's limits, ascending."""
        found = _values(tuple(sorted(numbers)), self.max_value)
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
        Raises ValueError for a share outside 0..1 and for a puzzle without a running calculation to
        its target.
        """
        if not 0 <= hit_share <= 1:
            raise ValueError(f"hit_share: got {hit_share}; allowed 0 to 1")
        return [self._demonstration(p, rng, rng.random() < hit_share) for p in puzzles]

    def _demonstration(self, puzzle: Puzzle, rng: np.random.Generator, hit: bool) -> str:
        by_value = running_calculations(puzzle.numbers, self.max_value)
        if puzzle.target not in by_value:
            got = f"{puzzle.prompt} with max_value {self.max_value}"
            raise ValueError(f"puzzle: got {got}; allowed targets {sorted(by_value)}")
        chains = by_value[puzzle.target]
        if not hit:
            chains = _all_chains(tuple(sorted(puzzle.numbers)), self.max_value)
        return chains[rng.integers(len(chains))]

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt; in the plain format a character is one."""
        if self.prompt_format != "plain":
            return self.max_prompt_length
        if self.path:
            return max(len(puzzle.prompt) for puzzle in self.of_path)
        return self.num_numbers * (len(str(self.max_number)) + 1) + len(str(self.max_value)) + 1

    @property
    def shortest_response(self) -> int:
        """Tokens without which nothing can be solved: each number and the operators between them,
        such as ``5+8+6``; in a chat or of a file unknown, and 1."""
        return 1 if self.prompt_format != "plain" or self.path else 2 * self.num_numbers - 1

    def judge(self, problem: Puzzle, response: str) -> Verdict:
        """Solved and well-formed by the protocol, whatever ``reward`` pays for."""
        if self.protocol == "d1":
            return self._published(problem, response)
        strict = reward(problem, self._answer(response), "strict")
        marks = {"well_formed": strict >= 0.1}
        return Verdict(self.score(problem, response), strict == 1, marks)

    def _published(self, puzzle: Puzzle, response: str) -> Verdict:
        right, solved = d1.countdown(response, puzzle.numbers, puzzle.target)
        any_answer = self.reward == "any_answer" and d1.answered(response)
        close = any_answer or self.reward == "strict" and right
        return Verdict(1.0 if solved else 0.1 * close, solved, {"well_formed": right})

    def score(self, puzzle: Puzzle, response: str) -> float:
        """Reward of a response, in a chat of the answer in it: see ``reward``."""
        if self.protocol == "d1":
            return self._published(puzzle, response).reward
        return reward(puzzle, self._answer(response), self.reward)

    def _answer(self, response: str) -> str:
        return chat_answer(response) if self.prompt_format == "chat" else response

    def tokenizer(self) -> Any:
        """The characters of prompts and calculations."""
        return tokenizer()

    def example(self) -> Example:
        """A puzzle with one of its solutions."""
        prompt = "7,9,4>64:"
        return Example(prompt, answer="64", text="7+9=16*4=64", before=prompt, length=12)


# -------------------------------------------------------------- the generator: running calculations
def running_calculations(numbers: tuple[int, ...], max_value: int) -> dict[int, tuple[str, ...]]:
    """Every running calculation of all the numbers through integers in 0..max_value, by its value.

    The dictionary is shared: do not change it.
    """
    return _chains_by_value(tuple(sorted(numbers)), max_value)


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


@functools.lru_cache(maxsize=4096)  # an entry of four numbers takes about 0.1 MB
def _chains_by_value(numbers: tuple[int, ...], max_value: int) -> dict[int, tuple[str, ...]]:
    # Tuples, since Python's collector of garbage walks through every list that is kept.
    by_value: dict[int, set[str]] = {}
    for i, first in enumerate(numbers):
        for text, value in _running(first, numbers[:i] + numbers[i + 1 :], max_value):
            by_value.setdefault(value, set()).add(f"{first}{text}")
    return {value: tuple(sorted(texts)) for value, texts in by_value.items()}


@functools.lru_cache(maxsize=4096)  # of subsets, too, which many numbers share
def _values(numbers: tuple[int, ...], max_value: int) -> frozenset[int]:
    """The keys of ``running_calculations``, without its texts: of four numbers 17 times as fast."""
    if len(numbers) == 1:
        return frozenset(numbers)
    found = set()
    for i, number in enumerate(numbers):
        for left in _values(numbers[:i] + numbers[i + 1 :], max_value):
            found.update(value for _, value in _combine(left, number, max_value))
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _all_chains(numbers: tuple[int, ...], max_value: int) -> tuple[str, ...]:
    every = itertools.chain.from_iterable(_chains_by_value(numbers, max_value).values())
    return tuple(sorted(every))


def _reached(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value of an expression with all the numbers."""
    if len(numbers) == 1:
        return {*numbers}
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(number for k, number in enumerate(numbers) if k not in (i, j))
        for op in "+-*/" if numbers[j] else "+-*":
            found |= _reached((*rest, _apply(numbers[i], op, numbers[j])))
    return found


# ------------------------------------------------------------------------------------- the verifier
_TOKEN = re.compile(r"0|[1-9][0-9]{0,5}|[-+*/()]")  # 007: three numbers in a row, which none allows
_SIGN = re.compile(r"([-+*/()=])")
_LATEX = {r"\div": "/", r"\times": "*", r"\cdot": "*", "÷": "/", "×": "*", "−": "-"}
_LATEX |= dict.fromkeys((r"\left", r"\right", r"\[", r"\]"), "") | {r"\(": "", r"\)": ""}
_END = "end"  # follows the last token


class _Malformed(Exception):
    """The response is not in the grammar; never leaves this file."""


def _tokens(text: str) -> list[str]:
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:  # findall skips what is no token
        raise _Malformed
    return tokens


def _apply(left: Fraction, op: str, right: Fraction) -> Fraction:
    if op == "/":
        return left / right
    return left + right if op == "+" else left - right if op == "-" else left * right


class _Parser:
    """Value and numbers of a bare expression; takes each token once, depth at most MAX_DEPTH."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.position, self.numbers = [*tokens, _END], 0, []

    def parse(self) -> tuple[Fraction, list[int]]:
        value = self._expression(0)
        if self._take() != _END:
            raise _Malformed
        return value, self.numbers

    def _take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1]

    def _expression(self, depth: int) -> Fraction:
        return self._left_associative(lambda: self._term(depth), "+-")

    def _term(self, depth: int) -> Fraction:
        return self._left_associative(lambda: self._atom(depth), "*/")

    def _left_associative(self, operand: Callable[[], Fraction], operators: str) -> Fraction:
        value = operand()
        while self.tokens[self.position] in operators:
            value = _apply(value, self._take(), operand())
        return value

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token.isdigit():
            self.numbers.append(int(token))
            return Fraction(int(token))
        if token != "(" or depth == MAX_DEPTH:
            raise _Malformed
        value = self._expression(depth + 1)
        if self._take() != ")":
            raise _Malformed
        return value


def _whole(tokens: list[str]) -> int:
    if len(tokens) != 1 or not tokens[0].isdigit():
        raise _Malformed
    return int(tokens[0])


def _evaluate_running(text: str) -> tuple[Fraction, list[int]]:
    """Value and numbers of ``5*8=40+6=46``: true equations, each result the next left operand."""
    first, *parts = [_tokens(part) for part in text.split("=")]
    numbers = [_whole(first[:1])]
    value, step = Fraction(numbers[0]), first[1:]  # a step follows a result: operator, number
    for part in parts:
        if not step or step[0] not in "+-*/":
            raise _Malformed
        numbers.append(_whole(step[1:]))
        value = _apply(value, step[0], Fraction(numbers[-1]))
        if value != _whole(part[:1]):
            raise _Malformed
        step = part[1:]
    if step:
        raise _Malformed
    return value, numbers


def evaluate(response: str) -> tuple[Fraction, list[int]] | None:
    """(value, numbers used, in order) of a response, exactly; None if malformed or false.

    That is: not in the grammar, or stating a false equation. A division by zero, a text of more
    than ``MAX_CHARACTERS`` and an object that is no text are None as well. Never raises, never
    evaluates code. The work is bounded: at most MAX_CHARACTERS
    tokens, each taken once, and at most as many operations on fractions whose terms stay below
    2^256 (the product of the literals times 2 an operation).
    """
    if not isinstance(response, str) or not 0 < len(response) <= MAX_CHARACTERS:
        return None
    try:
        if "=" in response:
            return _evaluate_running(response)
        return _Parser(_tokens(response)).parse()
    except (_Malformed, ZeroDivisionError):
        return None


def chat_answer(response: str) -> str:
    """The expression in a chat, its LaTeX written as the grammar has it; "" if there is not one.

    Blanks at its ends and beside an operator, bracket or = are taken out; ``4 4`` keeps its blank,
    and is no number. After MAX_CHARACTERS of these signs, where no expression can be read any more,
    they stay. What follows one =, if it is true, is taken off: ``5*8+6=46``.
    """
    answer = final_answer(response).strip("$` \n")
    for word, sign in _LATEX.items():
        answer = answer.replace(word, sign)
    answer = "".join(part.strip(" ") for part in _SIGN.split(answer.strip(), MAX_CHARACTERS))
    expression, equals, stated = answer.partition("=")
    if equals and evaluate(answer) is None and (found := evaluate(expression)):
        answer = expression if stated == str(found[0]) else ""
    return answer


def reward(puzzle: Puzzle, response: str, kind: str) -> float:
    """Reward of a response, the answer without tags, by a rule; ValueError for another rule.

    strict       1 solved; 0.1 well-formed with each given number exactly once but another value; 0
                 otherwise. The rule as it is usually described.
    binary       1 solved; 0 otherwise.
    any_answer   1 solved; 0.1 for any other non-empty text, wrong numbers and stray characters
                 included; 0 for no answer. The rule of published code, which pays for an answer tag
                 whatever it holds. Such code computes the value with ``eval`` and allows 1e-5; what
                 is solved is exact here, under each of the three names.
    """
    check_choice("task.reward", kind, REWARDS)
    result = evaluate(response)
    right_numbers = result is not None and Counter(result[1]) == Counter(puzzle.numbers)
    if right_numbers and result[0] == puzzle.target:
        return 1.0
    if kind == "strict":
        return 0.1 if right_numbers else 0.0
    return 0.1 if kind == "any_answer" and isinstance(response, str) and response else 0.0


# ------------------------------------------------------------------------------------ the tokenizer
def tokenizer(characters: str = CHARACTERS) -> Any:
    """Of the characters of prompts and calculations."""
    return tokenizer_of(characters)
