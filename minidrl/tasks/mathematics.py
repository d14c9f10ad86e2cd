r"""What tasks with questions of mathematics share: rows, splits, the answer in a response, rewards.

A task of this kind asks a question whose answer is known, and reads the answer of a response

    between <answer> and </answer>    where there is one of each, in this order; or
    in the last \boxed{..}            where there is neither

so that a response cannot offer two answers. Whether it is the known one, ``equality`` says.

Splits are fixed by file. A training question that is a held-out question as well, whatever its case
and its blanks, is removed, and a line says how many were.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from minidrl.run.launch import note
from minidrl.run.untrusted import TEXT, Kind, brief
from minidrl.tasks import Verdict, equality, rows
from minidrl.tasks.countdown import MAX_RESPONSE, PROMPT_FORMATS, check_choice
from minidrl.tasks.wordings import D1_EVAL, OURS, PUBLISHED, WORDINGS

SPLITS = ("train", "held_out")
REWARDS = ("correctness", "d1")
MOST_SHOTS = 16
OPENING, CLOSING, BOXED = "<answer>", "</answer>", r"\boxed{"
WRITTEN = Kind(lambda x: TEXT.good(x) and bool(x.strip()), "Unicode text that is not blank")
_TURN = re.compile(r"</reasoning>\s*<answer>")


@dataclass(frozen=True)
class Question:
    """A question, its known answer, a worked solution, the words in which it is asked, and those
    with which the answer's turn begins."""

    text: str
    gold: str
    solution: str
    instruction: str = ""
    opening: str = ""

    @property
    def prompt(self) -> str:
        """In the plain format: the same words, and a new line."""
        return f"{self.instruction}\n{self.opening}"

    @property
    def key(self) -> str:
        """The question whatever its case and its blanks."""
        return " ".join(self.text.split()).casefold()


class Mathematics:
    """The behaviour of such a task; its settings are the fields of a dataclass below it.

    A subclass has ``fields`` of a row, ``what`` is asked for, ``questions_of`` rows, and ``shape``:
    the reward d1 of a response.
    """

    name: ClassVar[str]
    fields: ClassVar[dict[str, Kind]]
    splits: ClassVar[dict[str, str]]  # ours -> the data set's on the Hub
    answer_field: ClassVar[str] = "answer"
    question_field: ClassVar[str]

    def __post_init__(self) -> None:
        def check(key: str, right: bool, allowed: str) -> None:
            if not right:
                raise ValueError(f"task.{key}: got {brief(getattr(self, key))}; allowed {allowed}")

        check("repo", bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", self.repo)), "owner/name")
        check("revision", rows.REVISION.good(self.revision), rows.REVISION.allowed)
        check("shots", 0 <= self.shots <= MOST_SHOTS, f"0 to {MOST_SHOTS}")
        check("max_prompt_length", self.max_prompt_length >= 1, "from 1")
        check_choice("task.reward", self.reward, REWARDS)
        check_choice("task.prompt_format", self.prompt_format, PROMPT_FORMATS)
        check_choice("task.wording", self.wording, WORDINGS)
        if self.wording != OURS:
            check("shots", self.shots == 0, f"0 with wording {self.wording}, which has none")
        if self.wording == D1_EVAL:
            allowed = f"correctness with wording {D1_EVAL}, whose prompt has the first tag"
            check("reward", self.reward != "d1", allowed)

    # ----------------------------------------------------------------------------------- the splits

    def problems(
        self, count: int, rng: np.random.Generator, split: str = "train"
    ) -> list[Question]:
        """``count`` random questions of a split (``SPLITS``), each drawn anew."""
        check_choice("split", split, SPLITS)
        pool = self._split(split)
        return [pool[i] for i in rng.integers(len(pool), size=count)]

    def held_out(self, count: int) -> list[Question]:
        """The first ``count`` held-out questions in the order of the file.

        Raises ValueError if ``count`` is below 1, or above the number of held-out questions.
        """
        if count < 1:
            raise ValueError(f"evaluate.n: got {count}; allowed 1 or more")
        pool = self._split("held_out")
        if count > len(pool):
            allowed = f"at most {len(pool)}, the held-out questions of {self._place('held_out')}"
            raise ValueError(f"evaluate.n: got {count}; allowed {allowed}")
        return pool[:count]

    def _split(self, split: str) -> list[Question]:
        if self._place(split) is None:
            allowed = "a file of training questions"
            raise ValueError(f"task.train_path: got ''; allowed {allowed}")
        return self._questions[split]

    def _place(self, split: str) -> str | None:
        # Where the rows of a split are; None where there are none.
        own = self.train_path if split == "train" else self.path
        on_hub = split in self.splits and not self.path
        return own or (f"{self.repo} at {self.revision[:12]}" if on_hub else None)

    @cached_property
    def _questions(self) -> dict[str, list[Question]]:
        equality.needs(self.name)
        found = {split: self._read(split) for split in SPLITS if self._place(split)}
        found = self._without_repetitions(found)
        shots = self._shots(found.get("train", []))
        return {split: [self._asked(q, shots) for q in found[split]] for split in found}

    def _read(self, split: str) -> list[Question]:
        path = self.train_path if split == "train" else self.path
        if path:
            read = rows.of_file("task.train_path" if split == "train" else "task.path", path)
            return self.questions_of(read, path)
        source = (self.repo, self.subset, self.revision, self.splits[split])
        return self.questions_of(rows.of_hub(self.name, *source), f"{self.repo} {source[-1]}")

    def _without_repetitions(self, found: dict[str, list[Question]]) -> dict[str, list[Question]]:
        kept = {"held_out": _each_once(found["held_out"])}
        removed = {"held-out repetitions": len(found["held_out"]) - len(kept["held_out"])}
        if "train" in found:
            known = {question.key for question in kept["held_out"]}
            others = [question for question in found["train"] if question.key not in known]
            kept["train"] = _each_once(others)
            removed["training questions that are held out"] = len(found["train"]) - len(others)
            removed["training repetitions"] = len(others) - len(kept["train"])
            if not kept["train"]:
                got = f"{self._place('train')!r}, whose questions are all held out"
                raise ValueError(f"task.train_path: got {got}; allowed others")
        if any(removed.values()):
            counts = ", ".join(f"{count} {what}" for what, count in removed.items() if count)
            note(f"task {self.name}: removed {counts}")
        return kept

    # --------------------------------------------------------------------------------- the question

    def _shots(self, train: Sequence[Question]) -> str:
        if self.shots > len(train):
            allowed = f"up to {len(train)}, the training questions that there are"
            raise ValueError(f"task.shots: got {self.shots}; allowed {allowed}")
        worked = (
            f"Question: {q.text}\n{q.solution}\n{OPENING}{q.gold}{CLOSING}\n\n"
            for q in train[: self.shots]
        )
        return "".join(worked)

    def _asked(self, question: Question, shots: str) -> Question:
        if self.wording != OURS:
            before, opening = PUBLISHED[self.name][self.wording]
            words = before + question.text
            return dataclasses.replace(question, instruction=words, opening=opening)
        label = "Question: " if shots else ""
        words = f"{shots}{label}{question.text}\n\n{self._request()}"
        return dataclasses.replace(question, instruction=words)

    def _request(self) -> str:
        if self.reward == "d1":
            return (
                "Write your reasoning between <reasoning> and </reasoning>, then "
                f"{self.what} between <answer> and </answer>, each tag on a line of its own."
            )
        return f"Think step by step; then write {self.what} between <answer> and </answer>."

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return self.max_prompt_length

    # ---------------------------------------------------------------------------------- the verdict

    def judge(self, problem: Question, response: str) -> Verdict:
        """Solved if the answer is the known one; marks: whether there is one answer."""
        response = response if isinstance(response, str) else ""
        answer = final_answer(response)
        solved = equality.equal(problem.gold, answer)
        paid = self.shape(response, answer, solved) if self.reward == "d1" else float(solved)
        return Verdict(paid, solved, {"well_formed": bool(answer)})

    # ------------------------------------------------------------------------- a file, row by row

    def check(self, path: str, tok: Any = None) -> str:
        """What was found in a file whose rows can all be asked and judged; ``tok`` counts tokens.

        Raises ValueError, one line with file, row and field, for the first row that cannot.
        """
        equality.needs(self.name)
        found = self.questions_of(rows.of_file("check", path), path)
        asked = {i: self._asked(question, "") for i, question in enumerate(found, 1)}
        measured = rows.longest_prompt(self, path, asked, tok, self.question_field)
        for number, question in tqdm(asked.items(), desc="answers", disable=None):
            if not equality.parses(question.gold):
                where = f"{path} row {number}: {self.answer_field}"
                allowed = "an answer that math-verify can read"
                raise ValueError(f"{where}: got {brief(question.gold)}; allowed {allowed}")
        twice = len(asked) - len({question.key for question in asked.values()})
        more = f", {twice} of them questions that stand there twice" if twice else ""
        said = f"{path}: {len(asked)} rows{more}; all can be asked and judged by {self.name}"
        return f"{said}; {measured}"


def _each_once(questions: Sequence[Question]) -> list[Question]:
    found: dict[str, Question] = {}
    for question in questions:
        found.setdefault(question.key, question)
    return list(found.values())


def final_answer(response: str) -> str:
    """The one answer of a response, blanks at its ends removed; "" where there is none, or several.

    A response of more than ``MAX_RESPONSE`` characters has none.
    """
    if len(response) > MAX_RESPONSE:
        return ""
    if OPENING not in response and CLOSING not in response:
        return _last_box(response)
    if response.count(OPENING) != 1 or response.count(CLOSING) != 1:
        return ""
    answer, closing, _ = response.partition(OPENING)[2].partition(CLOSING)
    answer = answer.strip()
    boxed = _last_box(answer)
    return (boxed or answer) if closing else ""


def _last_box(text: str) -> str:
    # What the last \boxed{ holds up to the brace that closes it.
    start = text.rfind(BOXED)
    if start < 0:
        return ""
    start, depth = start + len(BOXED), 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()].strip()
    return ""


# ------------------------------------------------------------------ shapes of rewards, as published
def soft_format(response: str) -> bool:
    """A pair of reasoning tags at the start, then, after blanks only, a pair of answer tags."""
    turn = _TURN.search(response, len("<reasoning>"))
    opened = response.startswith("<reasoning>") and turn is not None
    return opened and CLOSING in response[turn.end() :]


def strict_format(response: str) -> bool:
    """The four tags, each on a line of its own, and nothing before or after them."""
    first, turn, last = "<reasoning>\n", "\n</reasoning>\n<answer>\n", "\n</answer>"
    text = response.removesuffix("\n")
    if not (text.startswith(first) and text.endswith(last)):
        return False
    place = text.find(turn, len(first))
    return place >= 0 and place + len(turn) <= len(text) - len(last)


def count_tags(response: str) -> float:
    """0.125 for each of the four tags that is there once, on a line of its own.

    Less 0.001 for each character after </answer>, one new line excepted; never below 0.
    """
    tags = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    paid = 0.125 * sum(response.count(tag) == 1 for tag in tags)
    _, closed, rest = response.rpartition(tags[-1])
    tail = len(rest.removeprefix("\n")) if closed else 0
    return max(0.0, paid - 0.001 * tail)
