r"""MATH-500: 500 test problems of MATH (arXiv 2103.03874), the choice of arXiv 2305.20050.

    problem    text with LaTeX
    solution   a worked solution
    answer     the known answer in LaTeX: \frac{3}{2}, \left( 3, \frac{\pi}{2} \right), \text{east}
    subject, level, unique_id are in the data set too, and not looked at

The data are not part of this repository: they come from the Hub (``HuggingFaceH4/MATH-500``) at a
pinned commit, or from a file with these columns. All 500 are held out. To train, name a file of
other problems of MATH as ``train_path``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidrl.run.untrusted import Kind
from minidrl.tasks import rows
from minidrl.tasks.mathematics import BOXED, CLOSING, OPENING, WRITTEN, Mathematics, Question


@dataclass(frozen=True)
class Math500(Mathematics):
    """The task as a run uses it: where the data are, reward, prompt.

    ``path``: a file of held-out problems in the place of the Hub's, ``train_path`` one of training
    problems, which the data set has none of. ``revision``: the commit of the data set. ``shots``:
    worked examples before a question, the first training ones. ``reward``: correctness (1 or 0), or
    d1, as the code of diffu-GRPO (arXiv 2504.12216) means it: 2 for the right answer, and for the
    form 1 with answer tags and a box, 0.75 with tags alone, 0.5 with a box alone, 0.25 with
    neither. ``prompt_format``: chat, whose prompts may have ``max_prompt_length`` tokens, or plain.
    ``wording``: ours, d1 or d1-eval (``minidrl.tasks.wordings``).
    """

    name: ClassVar[str] = "math500"
    about: ClassVar[str] = (
        "500 problems of MATH, from the Hub or a file; the answer is LaTeX, judged by math-verify"
    )
    fields: ClassVar[dict[str, Kind]] = dict.fromkeys(("problem", "solution", "answer"), WRITTEN)
    splits: ClassVar[dict[str, str]] = {"held_out": "test"}
    question_field: ClassVar[str] = "problem"
    what: ClassVar[str] = "the answer alone, in LaTeX,"

    path: str = ""
    train_path: str = ""
    repo: str = "HuggingFaceH4/MATH-500"
    subset: str = ""
    revision: str = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
    shots: int = 0
    reward: str = "correctness"
    prompt_format: str = "chat"
    wording: str = "ours"
    max_prompt_length: int = 1024

    def questions_of(self, read: Sequence[rows.Row], where: str) -> list[Question]:
        """Rows as questions."""
        found = rows.texts(read, self.fields, where)
        return [
            Question(*(row[key].strip() for key in ("problem", "answer", "solution")))
            for row in found
        ]

    def shape(self, response: str, answer: str, solved: bool) -> float:
        """The reward d1, 0.25 to 3."""
        _, opened, rest = response.partition(OPENING)
        inside, closed, _ = rest.partition(CLOSING)
        tags = bool(opened and closed)
        boxed = BOXED in (inside if tags else response)
        return 2.0 * solved + 0.5 * (tags + (1.0 if boxed else 0.5))
