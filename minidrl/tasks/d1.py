r"""How the published evaluation of d1 reads answers, and its prompts: the choice ``protocol: d1``.

GDPO, EGSPO and StableDRL inherit both. d1 is arXiv 2504.12216; the rules are those of
dllm-reasoning/d1 at commit 837888f (eval/parse_and_get_acc.py), in code of our own: nothing is
evaluated. What they pay for is kept, although a person would not always: in GSM8K the first box
counts and ``1,080`` is 1, in Countdown a text without a box is read whole.

The prompts are quoted, blanks and all (diffu-grpo/data_utils.py, eval/; Apache License 2.0): "d1",
those of its training, and "d1-eval", whose answers begin with <reasoning>.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from minidrl.tasks import arithmetic
from minidrl.tasks.text import CLOSING, MAX_RESPONSE, OPENING

_NUMBER = re.compile(r"-?\d+\.?\d*")
_BOX = re.compile(r"\\boxed\{([^}\n]*+)\}")  # up to the first brace that closes, on its line
_LATEX = {r"\div": "/", r"\times": "*", r"\cdot": "*"}
_EXPRESSION = re.compile(r"[0-9+\-*/().\s]+")
# From the first of the signs on that stand before an equals sign and a number.
_LEFT = re.compile(r"(?<![0-9+\-*/() ])([0-9+\-*/() ]++)=[0-9. ]")

# --------------------------------------------------------------------------------------- prompts
_FORMAT = "Respond in the following format:\n<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>"
_TAGS = "\n" + _FORMAT.format("...", "...") + "\n"
_BOXED = _FORMAT.format("Your reasoning here", r"\boxed{...}")
_EXPERT = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    r"Wrap the final answer in a \boxed{}."
)
_COUNTDOWN = (
    "Using only the provided numbers, create an arithmetic expression that evaluates to exactly "
    "the provided target number. You may use the operations +, -, *, and / as needed, but each "
    "number must be used exactly once. Think step-by-step. After reasoning, provide only your "
    r"final expression inside \boxed{} tags without including an equals sign or the target "
    r"number. For example: \boxed{a + b * c}"
)
_COUNTDOWN_TRAINING = (
    "Using only the numbers {}, create an arithmetic expression that evaluates to exactly {}. You "
    "must use all numbers from the list, and each number must be used exactly once. You may use "
    "the operations +, -, *, and / as needed. After reasoning, provide only your final expression "
    "inside <answer></answer> tags without including an equals sign or the target number. For "
    "example, if the numbers are [2, 3, 4] and the target is 5, a valid answer is: <answer>\n"
    "2*4-3\n</answer>"
)
_SUDOKU = """
Please solve the following 4x4 Sudoku puzzle. The puzzle is provided as a 16-character string \
reading left-to-right, top-to-bottom, where '0' represents empty cells.

Rules:
- Fill empty cells with digits 1-4
- Each row must contain digits 1-4 exactly once
- Each column must contain digits 1-4 exactly once
- Each 2x2 box must contain digits 1-4 exactly once

Important: Your solution must be a COMPLETE 16-character string with only the digits 1-4, \
representing your final solved grid.

Respond in this exact format:
<reasoning>
Your step-by-step solving process
</reasoning>
<answer>
[16-character solution string with no spaces or separators]
</answer>


Solve the following Sudoku puzzle: """
OPENINGS = {"ours": "", "d1": "", "d1-eval": "<reasoning>"}  # how the answer's turn begins
BEFORE = {  # (task, wording) -> what stands before a question
    ("gsm8k", "d1"): f"{_TAGS}\n\n",
    ("gsm8k", "d1-eval"): f"{_EXPERT} \n{_BOXED}\n\n",
    ("math500", "d1"): f"{_TAGS}\n\n{_EXPERT} \n\n",
    ("math500", "d1-eval"): f'{_EXPERT}\n{_BOXED}" \n\n\n',
}


def countdown_words(wording: str, numbers: Sequence[int], target: int) -> str:
    """The prompt of Countdown."""
    if wording == "d1":
        return f"{_TAGS}\n{_COUNTDOWN_TRAINING.format([*numbers], target)}"
    return f"{_COUNTDOWN}{_BOXED}\n\nNumbers: {[*numbers]}\nTarget: {target}"


def sudoku_words(clues: str) -> str:
    """The prompt of Sudoku, in training and evaluation; an empty cell is a 0."""
    return f"{_SUDOKU}{clues}\n"


# --------------------------------------------------------------------------------------- answers
def last_box(text: str) -> str | None:
    """What the last box holds; the whole text where there is none, None where it is not closed."""
    if r"\boxed " in text:
        return text.split(r"\boxed ")[-1].split("$")[0]
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox") if r"\boxed" not in text else -1)
    if start < 0:
        return text
    depth = 0
    for i, sign in enumerate(text[start:], start):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "}" and depth == 0:
            box = text[start : i + 1]
            return box[len(r"\boxed{") : -1] if box.startswith(r"\boxed{") else box
    return None


def _bounded(response: str) -> str:
    return response if isinstance(response, str) and len(response) <= MAX_RESPONSE else ""


def _tagged(response: str) -> str | None:
    answer, closed, _ = response.partition(OPENING)[2].partition(CLOSING)
    return answer.strip() if closed else None


def answered(response: str) -> bool:
    """Whether there is an answer between tags: what its reward for Countdown pays 0.1 for."""
    return _tagged(_bounded(response)) is not None


def expression(response: str) -> str:
    """What is read of an answer to Countdown."""
    response = _bounded(response)
    text = last_box(response)
    if text is None:
        tagged = _tagged(response)
        text = response if tagged is None else tagged
    for word, sign in _LATEX.items():
        text = text.replace(word, sign)
    left = _LEFT.search(text)
    return (left[1] if left else text).strip()


def is_expression(text: str) -> bool:
    """Whether there are numbers, and signs of arithmetic alone."""
    return _EXPRESSION.fullmatch(text) is not None and re.search("[0-9]", text) is not None


def countdown(response: str, numbers: Sequence[int], target: int) -> tuple[bool, bool]:
    """Whether an answer has the given numbers, and whether its value is the target to 1e-5."""
    text = expression(response)
    found = [digits.lstrip("0") or "0" for digits in re.findall(r"\d+", text)]
    right = sorted(found) == sorted(map(str, numbers))
    value = arithmetic.value(text) if right and is_expression(text) else None
    return right, value is not None and abs(value - target) < Fraction(1, 100_000)


def number(response: str) -> str:
    """The answer to a question of GSM8K: the number of the first box that has one, else the last
    of the first tagged answer; "" for none."""
    response = _bounded(response)
    for box in _BOX.findall(response):
        if found := _first_or_whole(box.strip(), 0):
            return found
    return _first_or_whole(_tagged(response) or "", -1)


def _first_or_whole(text: str, which: int) -> str:
    try:
        float(text)
        return text
    except ValueError:
        numbers = _NUMBER.findall(text)
        return numbers[which] if numbers else ""


def mathematics(response: str) -> str:
    """The answer to a question of MATH: in the last box, else between the first tags."""
    response = _bounded(response)
    if boxed := last_box(response):
        return boxed
    return _tagged(response) or ""


def same_text(answer: str, gold: str) -> bool:
    """Whether two answers are the same LaTeX after the published normalisation; where that fails
    on one of them, as they stand."""
    try:
        return _normal(answer) == _normal(gold)
    except ValueError:
        return answer == gold


def _normal(text: str) -> str:
    """Without lines, blanks, sizes, degrees, percents, a unit at the end and the ``x=`` before;
    fractions and roots in braces. ValueError where that code stumbles, and compares as it stands.
    """
    text = re.sub(r"\n|\\!", "", text).replace("\\\\", "\\")
    text = re.sub(r"[td]frac", "frac", text)
    text = re.sub(r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$", "", text)
    text, *units = text.split(r"\text{ ")
    text = text.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, *values = text.split("=")
    text = values[0] if len(values) == 1 and len(name) <= 2 else text
    if len(units) > 1 or text.endswith((r"\sqrt", r"\frac")):
        raise ValueError
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])(\{|.)", _in_braces, text)
    if text == "0.5":
        return r"\frac{1}{2}"
    if text.count("/") == 1:
        above, below = map(int, text.split("/"))
        return rf"\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
    return text


def _in_braces(found: re.Match) -> str:
    above, below = found[1], found[2]
    return rf"\frac{{{above}}}" + (below if below == "{" else f"{{{below}}}")


def grid(response: str) -> str:
    """The sixteen signs of a Sudoku, filled up with 0 or cut; "" for none."""
    response = _bounded(response)
    answer = response.partition(OPENING)[2]
    after = response.partition(CLOSING)[2]
    ends = re.compile(r"<\|eot_id\|>|<\|endoftext\|>|" + CLOSING)
    tries = (
        re.search(r"```([\d\s]+)```", answer),
        ends.search(answer) and re.match("(.*)", ends.split(answer)[0], re.DOTALL),
        re.match("(.*)", re.split(r"<\|eot_id\|>|<\|endoftext\|>", after)[0], re.DOTALL),
        re.search(rf"(\d{{16}})\s*{CLOSING}", response),
        re.search(r"\b(\d{16})\b", response),
    )
    found = next((match[1] for match in tries if match and match[1].strip()), "")
    return re.sub(r"\s", "", found).ljust(16, "0")[:16] if found else ""
