"""Of an evaluation of Countdown: what was solved by what a puzzle needs, and how the other answers fail.

`python -m research.benches.answers CONFIG A.json B.json ..`: files of `minidrl evaluate --config CONFIG --out`, a column each.
A rise in one operation alone is a preference that was learnt, not arithmetic; a total does not tell the two apart.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pandas as pd

from minidrl.run import config
from minidrl.tasks import held_out
from minidrl.tasks.countdown import Countdown, Puzzle, equations, evaluate
from research.benches.orders import CLASSES, class_of
from research.tables import markdown

NEEDS = ("sums", "differences", "products or quotients")


def needs(puzzle: Puzzle, max_value: int) -> str:
    """What the easiest of a puzzle's running calculations needs beyond the one before it in ``NEEDS``."""
    return NEEDS[CLASSES.index(class_of(puzzle, max_value))]


def kind(puzzle: Puzzle, response: str, solved: bool) -> str:
    """Solved, or how an answer fails: in what it says, in its numbers, or in its form."""
    found, running = evaluate(response), equations(response)
    if solved:
        return "solved"
    if found is None and running is None:
        return "no calculation"
    used = found[1] if found else [running[0], *(number for _, number, _ in running[1])]
    if Counter(used) != Counter(puzzle.numbers):
        return "other numbers"
    if found:
        return "true, of another value"
    ends = running[1][-1][2] == puzzle.target
    return "false, ends in the target" if ends else "false, ends elsewhere"


def counted(task: Countdown, path: Path) -> dict[str, str]:
    """A column: solved by need as ``87 of 163``, the mean of these rates, then the share of each kind of answer."""
    (evaluation,) = json.loads(path.read_text(encoding="utf-8"))["evaluations"]
    asked = evaluation["protocol"]
    puzzles = held_out(task, asked["n"], asked["skip"])
    each = [(puzzles[row["problem"]], row["text"], row["solved"]) for row in evaluation["rows"]]
    needed = [(needs(puzzle, task.max_value), solved) for puzzle, _, solved in each]
    of, right = Counter(need for need, _ in needed), Counter(need for need, solved in needed if solved)
    kinds = Counter(kind(*one) for one in each)
    column = {f"solved, {need}": f"{right[need]} of {of[need]}" for need in NEEDS if of[need]}
    column["solved, needs balanced"] = f"{100 * sum(right[need] / of[need] for need in of) / len(of):.1f} %"
    return column | {name: f"{100 * count / len(each):.1f} %" for name, count in kinds.most_common()}


def table(settings: config.Train, paths: list[Path]) -> pd.DataFrame:
    """A row for each need and each kind of answer, a column for each file."""
    return pd.DataFrame({path.stem: counted(settings.task, path) for path in paths}).fillna("0")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answers to Countdown, by need and by kind of error.")
    parser.add_argument("config", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    print(markdown(table(config.load(config.Train, args.config), args.files).rename_axis("").reset_index()))
