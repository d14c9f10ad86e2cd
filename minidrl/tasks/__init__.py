"""Tasks: what a run trains on and is judged by. One file a task; this one says what a task is.

A task is a frozen dataclass whose fields are its settings: the section ``task`` of a config, whose
key ``name`` says which one. Nothing outside this folder knows a task by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

# name -> module and class; the module is imported when the task is asked for.
TASKS = {
    "countdown": "minidrl.tasks.countdown:Countdown",
    "sudoku": "minidrl.tasks.sudoku:Sudoku",
    "code": "minidrl.tasks.code:Code",
    "gsm8k": "minidrl.tasks.mathematics:Gsm8k",
    "math500": "minidrl.tasks.mathematics:Math500",
    "words": "minidrl.tasks.words:Words",
}
DEFAULT = "countdown"


class Problem(Protocol):
    """One question, in the forms in which it can be asked; Countdown's also has ``words``."""

    prompt: str  # for a network that was trained on this task: the text before the response
    instruction: str  # for a chat: the user's turn, in words
    key: str  # problems with one key are one problem, however it is asked


class Verdict(NamedTuple):
    """What a task's verifier says of a response: verifiable rewards, which no model judges."""

    reward: float  # what reinforcement learning maximises
    solved: bool  # whether the problem is solved, whatever the reward pays for
    marks: dict[str, float]  # further marks, from 0 to 1; their means are columns of an evaluation
    readable: bool = True  # whether the rule found an answer to judge, right or wrong


class Example(NamedTuple):
    """What ``verify`` asks a network that was trained on the task alone.

    The greedy reply to ``prompt``, of ``length`` tokens, must hold the word ``answer``. ``text``,
    after ``before``, is one whose tokens such a network finds likely.
    """

    prompt: str
    answer: str
    text: str
    before: str
    length: int


class Task(Protocol):
    """What sampler, loop, evaluation and command line need of a task.

    The splits "train" (for RL) and "held_out" share no problem. That is decided by the problem
    alone, so that no seed and no order of drawing can mix them.

    A task may also have ``at_once``, how many verdicts are worth waiting for together, where they
    are other processes'; ``from_files()``, all problems of files that may be asked, each with its
    ``place`` there; and ``check(path, tok)``, what was found in a file.
    A task on which a network is pre-trained from scratch has a third split, "pretrain", and
    ``demonstrations(problems, rng, progress)``, a text to learn from for each problem;
    ``tokenizer()``, one of the task's own alphabet; and ``example()``, an Example.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line: what is asked, how it is judged, where the data are from
    prompt_format: str  # "plain", "words" or "chat", as far as the task has them
    prompt_length: int  # tokens of the longest prompt

    def problems(
        self, count: int, rng: np.random.Generator, split: str = "train"
    ) -> Sequence[Problem]:
        """``count`` random problems of a split, each drawn anew."""

    def held_out(self, count: int) -> Sequence[Problem]:
        """The first ``count`` held-out problems, each once: a prefix of every larger test set."""

    def judge(self, problem: Any, response: str) -> Verdict:
        """The verdict on a response, which is untrusted text: never evaluated, never raises."""


def verdicts(task: Task, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
    """The verdict on each response, in their order; each problem has the same number of them."""
    each = len(responses) // len(problems)
    pairs = [(problems[i // each], response) for i, response in enumerate(responses)]
    if (at_once := getattr(task, "at_once", 1)) == 1:
        return [task.judge(*pair) for pair in pairs]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda pair: task.judge(*pair), pairs))


def held_out(task: Task, n: int, skip: int = 0) -> Sequence[Problem]:
    """``n`` held-out problems after the first ``skip``; ValueError where there are not so many."""
    return task.held_out(skip + n)[skip:]


def task_class(name: str) -> type:
    """The class of a task; ValueError for an unknown name."""
    if name not in TASKS:
        raise ValueError(f"task.name: got {name!r}; allowed {', '.join(TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
