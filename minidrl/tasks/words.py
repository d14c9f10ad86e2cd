"""A sentence with three given words: a task of language whose answers a rule can judge.

A file has a row per problem: ``words``, the list of those asked for, and for demonstrations
``answer``, a sentence that holds them. ``path`` names what is held out, ``train_path`` what is
trained on; research/benches/sentences.py lets a language model write both.

The rule reads the whole response. It must be one sentence, from a capital letter to a full stop;
hold each word that is asked for once, as it is given; repeat no word of four letters or more; and
have at least as many other words. It does not judge whether the sentence makes sense: read some, or
ask a language model how likely they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from minidrl.tasks import Verdict, rows
from minidrl.tasks.text import check_setting

SENTENCE = re.compile(r"[A-Z][A-Za-z]*(?:'[a-z]+)?(?:,? [A-Za-z]+(?:'[a-z]+)?)*\.")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def in_order(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return WORD.findall(text.lower())


@dataclass(frozen=True)
class Request:
    """The words that are asked for, and a sentence that holds them."""

    wanted: tuple[str, ...]
    answer: str = ""
    place: str = field(default="", repr=False, compare=False)  # in a file: its name and the row

    @property
    def words(self) -> str:
        return f"{', '.join(self.wanted)}:"

    @property
    def instruction(self) -> str:
        return f"Write one sentence with the words {', '.join(self.wanted)}."

    prompt = words

    @property
    def key(self) -> str:
        return " ".join(sorted(self.wanted))


@dataclass(frozen=True, kw_only=True)
class Words(rows.Listed):
    """The settings and the behaviour of the task.

    path, train_path   files of held-out and of training rows
    reward             strict (1 or 0), or share: of a sentence that breaks no other part of the
                       rule, the share of the words asked for that it holds
    prompt_format      words (``rain, door, old:``) or chat, in at most ``max_prompt_length`` tokens
    """

    name: ClassVar[str] = "words"
    about: ClassVar[str] = (
        "write a sentence with three given words; rows of your own or of a model's, judged by rule"
    )

    path: str = ""
    train_path: str = ""
    reward: Literal["strict", "share"] = "strict"
    prompt_format: Literal["words", "chat"] = "words"
    max_prompt_length: PositiveInt = 16

    def problem_of(self, row: rows.Row) -> Request:
        wanted = row.get("words")
        if not isinstance(wanted, list) or not wanted or not all(map(_is_word, wanted)):
            allowed = "a list of one or more words in small letters"
            raise ValueError(f"words: got {rows.brief(wanted)}; allowed {allowed}")
        return Request(tuple(wanted), str(row.get("answer") or ""))

    def demonstrations(
        self, problems: Sequence[Request], rng: np.random.Generator, progress: float
    ) -> list[str]:
        lacking = [request.place for request in problems if not request.answer]
        allowed = f"a file with an answer in each row; {', '.join(lacking[:1])} has none"
        check_setting(self, "train_path", not lacking, allowed)
        return [f" {request.answer}" for request in problems]

    def judge(self, problem: Request, response: str) -> Verdict:
        """The verdict by the rule above; marks: the share of words that are there, one sentence."""
        text = response.strip()
        found = in_order(text)
        held = sum(found.count(word) == 1 for word in problem.wanted)
        sentence = SENTENCE.fullmatch(text) is not None
        long = [word for word in found if len(word) > 3]
        plain = len(long) == len(set(long)) and len(found) >= 2 * len(problem.wanted)
        share = held / len(problem.wanted)
        solved = sentence and plain and share == 1
        reward = share * (sentence and plain) if self.reward == "share" else float(solved)
        return Verdict(reward, solved, {"words": share, "sentence": float(sentence)}, sentence)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and WORD.fullmatch(value) is not None
