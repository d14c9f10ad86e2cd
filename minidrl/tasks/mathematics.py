r"""Questions of mathematics whose answer is known: GSM8K and MATH-500.

    GSM8K     arXiv 2110.14168: word problems of grade school, whose answers are numbers. A row has
              ``question`` and ``answer``, a worked solution whose last line is ``#### 72``. The
              Hub's split ``test`` is held out
    MATH-500  500 test problems of MATH (arXiv 2103.03874), the choice of arXiv 2305.20050. A row
              has ``problem``, ``solution`` and ``answer`` in LaTeX. All are held out; to train,
              name a file of other problems of MATH as ``train_path``

The data are not part of this repository. They come from the Hub at a pinned commit, or from files
with the same columns. ``text.final_answer`` says which answer a response gives, ``equality``
whether it is the known one. A training question that is a held-out question as well, whatever its
case and its blanks, is removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt
from tqdm import tqdm

from minidrl.tasks import Verdict, d1, equality, rows
from minidrl.tasks.rows import brief
from minidrl.tasks.text import (
    CLOSING,
    OPENING,
    check_setting,
    final_answer,
    last_box,
    turn,
)

_CALCULATOR = re.compile("<<[^<>]*>>")
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
# The published patterns, with . for a new line as well, as they were meant.
_SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
_STRICT = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question, its known answer, a worked solution, the words in which it is asked, and those
    with which the answer's turn begins."""

    text: str
    gold: str
    solution: str = ""
    instruction: str = ""
    opening: str = ""
    place: str = field(default="", repr=False, compare=False)  # in a file: its name and the row

    @property
    def prompt(self) -> str:
        return f"{self.instruction}\n{self.opening}"

    @property
    def key(self) -> str:
        return " ".join(self.text.split()).casefold()


@dataclass(frozen=True, kw_only=True)
class Mathematics(rows.Listed):
    """The settings and the behaviour of such a task.

    path, train_path   files of held-out and of training questions in the place of the Hub's; with
                       a ``path`` alone there is nothing to train on
    repo, subset, revision   the data set on the Hub, and its commit
    reward             correctness (1 or 0), or d1, what the code of diffu-GRPO pays (``shape``)
    prompt_format      chat, whose prompts may have ``max_prompt_length`` tokens, or plain
    wording            ours, or d1 and d1-eval: the published prompts (``tasks.d1``)
    protocol           ours, or d1, the published reading of an answer, whatever is asked

    Each task has ``shape``, the reward d1, and ``published``, the answer and whether it is the
    known one, by d1's evaluation.
    """

    splits: ClassVar[dict[str, str]]  # ours -> the data set's on the Hub
    what: ClassVar[str]  # what is asked for

    path: str = ""
    train_path: str = ""
    repo: str
    subset: str = ""
    revision: str
    reward: Literal["correctness", "d1"] = "correctness"
    prompt_format: Literal["plain", "chat"] = "chat"
    wording: rows.Wording = "ours"
    protocol: rows.Protocol = "ours"
    max_prompt_length: PositiveInt

    def __post_init__(self) -> None:
        if self.wording == "d1-eval":
            allowed = "correctness with wording d1-eval, whose prompt has the first tag"
            check_setting(self, "reward", self.reward != "d1", allowed)

    # ----------------------------------------------------------------------------------- the splits
    def demonstrations(
        self, problems: Sequence[Question], rng: np.random.Generator, progress: float
    ) -> list[str]:
        """The worked solutions, each with its answer between tags."""
        return [f"{q.solution}\n{OPENING}{q.gold}{CLOSING}" for q in problems]

    def of_split(self, split: str) -> list[Question]:
        equality.needs(self.name)
        if self.path or (split == "train" and self.train_path) or split not in self.splits:
            return super().of_split(split)
        source = (self.repo, self.subset, self.revision, self.splits[split])
        return self.placed(rows.of_hub(*source), f"{self.repo} {source[-1]}")

    def asked(self, text: str, gold: str, solution: str) -> Question:
        """A question in the words of the settings."""
        opening = d1.OPENINGS[self.wording]
        if self.wording != "ours":
            words = d1.BEFORE[self.name, self.wording] + text
        elif self.reward == "d1":
            words = (
                f"{text}\n\nWrite your reasoning between <reasoning> and </reasoning>, then "
                f"{self.what} between <answer> and </answer>, each tag on a line of its own."
            )
        else:
            request = f"Think step by step; then write {self.what} between <answer> and </answer>."
            words = f"{text}\n\n{request}"
        return Question(text, gold, solution, words, opening)

    # ---------------------------------------------------------------------------------- the verdict
    def judge(self, problem: Question, response: str) -> Verdict:
        """Solved if the answer is the known one; marks: whether there is one answer."""
        response = turn(response)
        if self.protocol == "d1":
            answer, solved = self.published(problem.gold, response)
        else:
            answer = final_answer(response)
            solved = equality.equal(problem.gold, answer)
        paid = self.shape(response, answer, solved) if self.reward == "d1" else float(solved)
        # Without a box d1 takes the whole text for an answer of MATH.
        found = solved or answer not in ("", response)
        return Verdict(paid, solved, {"well_formed": bool(answer)}, found)

    def check(self, path: str, tok: Any = None) -> str:
        equality.needs(self.name)
        found = self.read("check", path)
        said = rows.checked(self, path, found, tok, f"{len(found)} rows; all")
        for question in tqdm(found, desc="answers", disable=None):
            if not equality.parses(question.gold):
                got, allowed = brief(question.gold), "an answer that math-verify can read"
                raise ValueError(f"{question.place}: answer: got {got}; allowed {allowed}")
        return said


@dataclass(frozen=True, kw_only=True)
class Gsm8k(Mathematics):
    """GSM8K; the settings are those of ``Mathematics``."""

    name: ClassVar[str] = "gsm8k"
    about: ClassVar[str] = (
        "word problems of grade school, from the Hub or a file; the answer is a number, judged by "
        "math-verify"
    )
    splits: ClassVar[dict[str, str]] = {"train": "train", "held_out": "test"}
    what: ClassVar[str] = "the number alone, without a unit,"

    repo: str = "openai/gsm8k"
    subset: str = "main"
    revision: str = "740312add88f781978c0658806c59bc2815b9866"
    max_prompt_length: PositiveInt = 512

    def problem_of(self, row: rows.Row) -> Question:
        text, answer = rows.texts(row, "question", "answer")
        solution, mark, gold = answer.rpartition("####")
        gold = gold.strip()
        if not mark or "####" in solution or not _NUMBER.fullmatch(gold):
            allowed = "a solution that ends with one #### and a number"
            raise ValueError(f"answer: got {brief(answer[-50:])}; allowed {allowed}")
        worked = _CALCULATOR.sub("", solution).strip()
        return self.asked(text.strip(), gold.replace(",", ""), worked)

    def shape(self, response: str, answer: str, solved: bool) -> float:
        """2 for the right answer, 0.5 for one of digits alone, 0.5 and 0.5 for tags in the right
        order and on lines of their own, up to 0.5 for counted tags: 0 to 4."""
        digits = re.fullmatch("[0-9]+", answer) is not None
        form = bool(_SOFT.match(response)) + bool(_STRICT.fullmatch(response))
        return 2.0 * solved + 0.5 * digits + 0.5 * form + count_tags(response)

    def published(self, gold: str, response: str) -> tuple[str, bool]:
        answer = d1.number(response)
        return answer, bool(answer) and float(answer) == float(gold)


@dataclass(frozen=True, kw_only=True)
class Math500(Mathematics):
    """MATH-500; the settings are those of ``Mathematics``."""

    name: ClassVar[str] = "math500"
    about: ClassVar[str] = (
        "500 problems of MATH, from the Hub or a file; the answer is LaTeX, judged by math-verify"
    )
    splits: ClassVar[dict[str, str]] = {"held_out": "test"}
    what: ClassVar[str] = "the answer alone, in LaTeX,"

    repo: str = "HuggingFaceH4/MATH-500"
    revision: str = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
    max_prompt_length: PositiveInt = 1024

    def problem_of(self, row: rows.Row) -> Question:
        """Without an answer the last box of the solution has it."""
        if not row.get("answer"):
            row = row | {"answer": last_box(str(row.get("solution", "")))}
        return self.asked(*map(str.strip, rows.texts(row, "problem", "answer", "solution")))

    def shape(self, response: str, answer: str, solved: bool) -> float:
        """As that code means it: 2 for the right answer, and for the form 1 with answer tags and a
        box, 0.75 with tags alone, 0.5 with a box alone, 0.25 with neither."""
        _, opened, rest = response.partition(OPENING)
        inside, closed, _ = rest.partition(CLOSING)
        tags = bool(opened and closed)
        boxed = r"\boxed{" in (inside if tags else response)
        return 2.0 * solved + 0.5 * (tags + (1.0 if boxed else 0.5))

    def published(self, gold: str, response: str) -> tuple[str, bool]:
        answer = d1.mathematics(response)
        return answer, d1.same_text(answer, gold)


# ------------------------------------------------------------------- the form of a response
def count_tags(response: str) -> float:
    """0.125 for each of the four tags that is there once, on a line of its own.

    Less 0.001 for each character after </answer>, one new line excepted; never below 0.
    """
    tags = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    paid = 0.125 * sum(response.count(tag) == 1 for tag in tags)
    _, closed, rest = response.rpartition(tags[-1])
    tail = len(rest.removeprefix("\n")) if closed else 0
    return max(0.0, paid - 0.001 * tail)
