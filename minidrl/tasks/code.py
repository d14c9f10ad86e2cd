"""Code: write Python that passes tests, from files in the format of MBPP or HumanEval.

    format      fields of a row                                      one test is
    mbpp        text (or prompt), code, test_list,                   an assertion of test_list
                test_setup_code or test_imports where it has them
    humaneval   task_id, prompt, entry_point, canonical_solution,    the whole of ``check``
                test

Rows come from a file of the user's, ``task.path``. Responses and tests run in the sandboxes of
``minidrl.tasks.sandbox``; here they are only parsed. Tests call functions of the program and see
plain data come back. A row that needs more, such as a class, is left out, and a remark counts such
rows. What the text does not tell ``check`` finds: it runs each row's own solution.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt
from tqdm import tqdm

from minidrl.tasks import Verdict, rows, sandbox
from minidrl.tasks.text import CLOSING, OPENING, between_tags, turn

FENCE = re.compile(r"```[^`\n]*\n(.*?)\n?[ \t]*(?:```|\Z)", re.DOTALL)


# --------------------------------------------------------------------------------------- a problem
@dataclass(frozen=True)
class Exercise:
    """A row in one form, whatever its format.

    ``before`` stands before the answer in the program; ``setup`` and ``tests`` are the judge's, and
    call the functions ``names``.
    """

    question: str
    names: tuple[str, ...]
    tests: tuple[str, ...]
    setup: str
    before: str
    solution: str
    shown: str = ""
    place: str = field(default="", repr=False, compare=False)  # in a file: its name and the row

    @property
    def instruction(self) -> str:
        return (
            f"{self.question.strip()}\n\n{self.shown}There is Python's standard library and "
            "nothing else: no input, no files, no processes, no threads. Think first; then write "
            f"the program alone, without tests, between {OPENING} and {CLOSING}."
        )

    prompt = instruction  # there is no form without words

    @property
    def key(self) -> str:
        return " ".join(self.question.split())


class _Unfit(Exception):
    """Why a row cannot be judged; never leaves this file."""


# ------------------------------------------------------------------------------------- the formats
def _tree(source: str, what: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in a stranger's strings
            return ast.parse(source)
    except (SyntaxError, ValueError):
        raise _Unfit(f"the {what} is no Python") from None


def _functions(source: str) -> dict[str, ast.FunctionDef]:
    body = _tree(source, "solution").body
    if not (found := {node.name: node for node in body if isinstance(node, ast.FunctionDef)}):
        raise _Unfit("the solution has no function")
    return found


def _signatures(functions: dict[str, ast.FunctionDef], names: tuple[str, ...]) -> str:
    heads = (f"def {name}({ast.unparse(functions[name].args)}):" for name in names)
    return "It is called by this name, with these arguments:\n" + "\n".join(heads) + "\n\n"


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _mbpp(row: dict, show_tests: bool) -> Exercise:
    functions, tests = _functions(row["code"]), row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(x, str) for x in tests):
        raise ValueError(f"test_list: got {rows.brief(tests)}; allowed a list of texts")
    setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
    used = set().union(*(_used(_tree(text, "test")) for text in [*tests, setup]))
    classes = {n.name for n in _tree(row["code"], "solution").body if isinstance(n, ast.ClassDef)}
    if used & classes:
        raise _Unfit("the tests use a class")
    if not (names := tuple(name for name in functions if name in used)):
        raise _Unfit("the tests call no function of the solution")
    shown = "It should pass these tests:\n" + "\n".join(tests) + "\n\n"
    shown = shown if show_tests else _signatures(functions, names)
    question = row.get("text") or row["prompt"]
    return Exercise(question, names, tuple(tests), setup, "", row["code"], shown)


def _humaneval(row: dict, show_tests: bool) -> Exercise:
    name, prompt, test = row["entry_point"], row["prompt"], row["test"]
    if name not in _functions(prompt):
        raise _Unfit("the prompt has no function of the name entry_point")
    setup, solution = f"{prompt}\n{test}", prompt + row["canonical_solution"]
    shown = "Write the whole function.\n\n"
    if show_tests:
        shown += f"It should pass this test:\n{test.strip()}\n\n"
    return Exercise(prompt, (name,), (f"check({name})",), setup, prompt, solution, shown)


# format -> (fields of text that a row must have, how it is read)
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[dict, bool], Exercise]]] = {
    "mbpp": (("code",), _mbpp),
    "humaneval": (("prompt", "entry_point", "canonical_solution", "test"), _humaneval),
}


# ---------------------------------------------------------------------------------------- the file
def read(
    path: str, form: str, show_tests: bool = False, key: str = "task.path"
) -> tuple[dict[int, Exercise], dict[int, str]]:
    """By their numbers from 1: the rows of a file that can be judged, and why others cannot.

    Raises ValueError in one line that names file, row and field; ``key`` is what names the file.
    """
    fields, exercise_of = FORMATS[form]

    def fit(row: rows.Row) -> Exercise | str:
        rows.texts(row, *fields, "text" if row.get("text") else "prompt")
        try:
            return exercise_of(row, show_tests)
        except _Unfit as why:
            return str(why)

    fitting: dict[int, Exercise] = {}
    left: dict[int, str] = {}
    keys: set[str] = set()
    for number, found in enumerate(rows.made(rows.of_file(key, path), path, fit), 1):
        if isinstance(found, str):
            left[number] = found
        elif found.key in keys:
            left[number] = "the question is there already"
        else:
            fitting[number] = dataclasses.replace(found, place=f"{path} row {number}")
            keys.add(found.key)
    return fitting, left


# ---------------------------------------------------------------------------------------- the task
@dataclass(frozen=True, kw_only=True)
class Code(rows.Listed):
    """The task as a run uses it: file, split, reward, limits.

    ``path``: a file of rows in the format ``format``. Split: ``held_out_path``, if given, is a file
    of held-out rows, and what it asks is taken out of ``path``; without it a hash of the question
    holds out ``held_out_share`` of the rows. Pre-training and RL share a split. ``reward``: all (1
    if every test passes) or share (of the tests). ``show_tests``: the prompt has the tests, as
    published prompts for MBPP have, rather than name and arguments alone. A program has ``seconds``
    of CPU time and ``megabytes`` of memory for all its tests. Chat only; a prompt may have
    ``max_prompt_length`` tokens.
    """

    name: ClassVar[str] = "code"
    about: ClassVar[str] = (
        "write Python that passes tests; files in the format of MBPP or HumanEval, run in a "
        "sandbox (bubblewrap)"
    )

    source: ClassVar[str] = "path"

    path: str = ""
    format: Literal["mbpp", "humaneval"] = "mbpp"
    held_out_path: str = ""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.3
    reward: Literal["all", "share"] = "all"
    show_tests: bool = False
    seconds: PositiveInt = 2
    megabytes: Annotated[int, Field(ge=64)] = 256
    prompt_format: Literal["chat"] = "chat"
    max_prompt_length: PositiveInt = 512

    @functools.cached_property
    def splits_of_files(self) -> dict[str, list[Exercise]]:
        if why := sandbox.refusal():  # before anything is trained
            raise ValueError(why)
        exercises = self._rows("path")
        if self.held_out_path:
            held_out = self._rows("held_out_path")
        else:
            held_out = [exercise for exercise in exercises if self._is_held_out(exercise)]
        known = {exercise.key for exercise in held_out}
        train = [exercise for exercise in exercises if exercise.key not in known]
        return {"train": train, "held_out": held_out}

    def _rows(self, key: str) -> list[Exercise]:
        path = getattr(self, key)
        fitting, left = read(path, self.format, self.show_tests, f"task.{key}")
        if left:
            said = ", ".join(f"{n} ({why})" for why, n in sorted(Counter(left.values()).items()))
            text = f"task code: {path}: {len(fitting) + len(left)} rows, left out: {said}"
            logging.getLogger("minidrl").warning(text)
        return [*fitting.values()]

    def _is_held_out(self, exercise: Exercise) -> bool:
        digest = hashlib.sha256(exercise.key.encode("utf-8", "backslashreplace")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < self.held_out_share

    @property
    def at_once(self) -> int:
        """One sandbox a core that this process may use."""
        return len(os.sched_getaffinity(0))

    def judge(self, problem: Exercise, response: str) -> Verdict:
        """Solved: every test passes. OSError where no sandbox starts: that is no verdict."""
        program = answer(response)
        marks = {"answered": program != "", "tests": 0.0}
        if not program:
            return Verdict(0.0, False, marks, readable=False)
        record = self.run(problem, program)
        marks["tests"] = record.passed / record.total
        solved = record.passed == record.total
        return Verdict(float(solved) if self.reward == "all" else marks["tests"], solved, marks)

    def run(self, problem: Exercise, program: str) -> sandbox.Record:
        limits = {"seconds": self.seconds, "megabytes": self.megabytes}
        whole = f"{problem.before}\n{program}" if problem.before else program
        return sandbox.run(whole, problem.names, problem.tests, problem.setup, **limits)

    def check(self, path: str, tok: Any = None) -> str:
        """What was found in a file: the rows that cannot be used, each with its reason; among them
        those whose own solution fails its tests here. ``tok`` counts tokens.

        Raises ValueError, one line with file, row and field, for a row of another schema and for a
        prompt that is too long; also where no row is left, and where there is no sandbox.
        """
        if why := sandbox.refusal():
            raise ValueError(why)
        fitting, left = read(path, self.format, self.show_tests, "check")
        with ThreadPoolExecutor(self.at_once) as pool:
            told = pool.map(lambda row: self.run(row, row.solution).reason, fitting.values())
            reasons = [*tqdm(told, total=len(fitting), desc="solutions", disable=None)]
        fails = {n: why.strip(": ") for n, why in zip(fitting, reasons, strict=True) if why}
        wrong = {row: f"left out: {why}" for row, why in left.items()}
        wrong |= {row: f"its own solution fails: {why}" for row, why in fails.items()}
        count = len(fitting) + len(left)
        if count == len(wrong):
            row, why = min(wrong.items())
            allowed = "one whose own solution passes its tests"
            raise ValueError(f"{path}: got no row to use (row {row} {why}); allowed {allowed}")
        counted = f"{count} rows, {count - len(wrong)} of which"
        told = [f"row {row} {why}" for row, why in sorted(wrong.items())]
        return "\n".join([*told, rows.checked(self, path, [*fitting.values()], tok, counted)])


def answer(response: str) -> str:
    """The program of a response: what the last fence holds, between the tags where there are any;
    between tags without a fence, all of it. "" for none."""
    found = between_tags(response)
    held = (turn(response) if found is None else found).replace("\r\n", "\n")
    if fenced := FENCE.findall(held):
        return fenced[-1]
    return (found or "").strip("\r\n") if (found or "").strip() else ""
