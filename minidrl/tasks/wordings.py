r"""In which words a question of mathematics is asked: ours, or published ones.

    ours       at the end of the question, by the reward: what to write between which tags
    d1         the training prompts of diffu-GRPO (arXiv 2504.12216)
    d1-eval    its evaluation prompts, which write the first tag of the answer's turn themselves

The published texts are quoted, blanks and all, from dllm-reasoning/d1 at commit 837888f
(diffu-grpo/data_utils.py, eval/gsm8k.py, eval/math500.py; Apache License 2.0). The quotation mark
and the blank after the last tag of ``d1-eval`` on MATH-500 stand there, too. Blanks around a
question itself are removed.
"""

from __future__ import annotations

from typing import NamedTuple

OURS, D1, D1_EVAL = "ours", "d1", "d1-eval"
WORDINGS = (OURS, D1, D1_EVAL)


class Wording(NamedTuple):
    """What stands before a question, and how the answer's turn begins."""

    before: str
    opening: str = ""


_EXPERT = "You are a math expert. You will be given a question to solve. Solve it step by step. "
_EXPERT += r"Wrap the final answer in a \boxed{}."
_FORMAT = (
    "\nRespond in the following format:\n<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>"
)
_TAGS = _FORMAT.format("...", "...") + "\n"
_BOXED = _FORMAT.format("Your reasoning here", r"\boxed{...}")

# task -> wording -> text
PUBLISHED = {
    "gsm8k": {
        D1: Wording(f"{_TAGS}\n\n"),
        D1_EVAL: Wording(f"{_EXPERT} {_BOXED}\n\n", opening="<reasoning>"),
    },
    "math500": {
        D1: Wording(f"{_TAGS}\n\n{_EXPERT} \n\n"),
        D1_EVAL: Wording(f'{_EXPERT}{_BOXED}" \n\n\n', opening="<reasoning>"),
    },
}
