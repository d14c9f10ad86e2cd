"""GSM8K (arXiv 2110.14168): word problems of grade school, whose answers are numbers.

    question   Natalia sold clips to 48 of her friends in April, and then ..
    answer     a worked solution, whose last line is ``#### 72``

The data are not part of this repository: they come from the Hub (``openai/gsm8k``) at a pinned
commit, or from files with the same two columns. The Hub's split ``test`` is held out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidrl.run.untrusted import Kind, brief
from minidrl.tasks import rows
from minidrl.tasks.mathematics import (
    WRITTEN,
    Mathematics,
    Question,
    count_tags,
    soft_format,
    strict_format,
)

_GOLD = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_CALCULATOR = re.compile("<<[^<>]*>>")


@dataclass(frozen=True)
class Gsm8k(Mathematics):
    """The task as a run uses it: where the data are, reward, prompt.

    ``path``: a file of held-out questions in the place of the Hub's test split, ``train_path`` one
    of training questions; with a ``path`` alone there is nothing to train on. ``revision``: the
    commit of the data set. ``shots``: worked examples before a question, the first training ones.
    ``reward``: correctness (1 or 0), or d1, the sum that the code of diffu-GRPO (arXiv 2504.12216)
    pays: 2 for the right answer, 0.5 for an answer of digits alone, 0.5 and 0.5 for tags in the
    right order and on lines of their own, up to 0.5 for counted tags. ``prompt_format``: chat,
    whose prompts may have ``max_prompt_length`` tokens, or plain. ``wording``: ours, d1 or d1-eval
    (``minidrl.tasks.wordings``).
    """

    name: ClassVar[str] = "gsm8k"
    about: ClassVar[str] = (
        "word problems of grade school, from the Hub or a file; the answer is a number, judged by "
        "math-verify"
    )
    fields: ClassVar[dict[str, Kind]] = {"question": WRITTEN, "answer": WRITTEN}
    splits: ClassVar[dict[str, str]] = {"train": "train", "held_out": "test"}
    question_field: ClassVar[str] = "question"
    what: ClassVar[str] = "the number alone, without a unit,"

    path: str = ""
    train_path: str = ""
    repo: str = "openai/gsm8k"
    subset: str = "main"
    revision: str = "740312add88f781978c0658806c59bc2815b9866"
    shots: int = 0
    reward: str = "correctness"
    prompt_format: str = "chat"
    wording: str = "ours"
    max_prompt_length: int = 512

    def questions_of(self, read: Sequence[rows.Row], where: str) -> list[Question]:
        """Rows as questions; ValueError for one without a number after its one ``####``."""
        found = []
        for number, row in enumerate(rows.texts(read, self.fields, where), 1):
            solution, mark, gold = row["answer"].rpartition("####")
            gold = gold.strip()
            if not mark or "####" in solution or not _GOLD.fullmatch(gold):
                allowed = "a solution that ends with one #### and a number"
                got = brief(row["answer"][-80:])
                raise ValueError(f"{where} row {number}: answer: got {got}; allowed {allowed}")
            worked = _CALCULATOR.sub("", solution).strip()
            found.append(Question(row["question"].strip(), gold.replace(",", ""), worked))
        return found

    def shape(self, response: str, answer: str, solved: bool) -> float:
        """The reward d1, 0 to 4."""
        digits = re.fullmatch("[0-9]+", answer) is not None
        form = strict_format(response) + soft_format(response)
        return 2.0 * solved + 0.5 * digits + 0.5 * form + count_tags(response)
