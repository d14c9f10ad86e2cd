"""Sudoku 4x4: fill a grid so that every row, column and 2x2 box holds 1, 2, 3 and 4.

    prompt     3..1.4....43.13.:    sixteen cells row by row, a dot where there is no clue
    response   3421143221434132     the whole grid, its clues included

There are 288 valid grids, in 12 classes of 24, whose grids differ in the names of the digits.
Puzzles split at random would be trained and tested on the same grids with other clues, or on
renamed ones. Here every third class is held out, and a puzzle belongs to a split if all its
completions do: no grid that solves a held-out puzzle, and no renaming of it, was ever shown.

Any valid completion of the clues is a solution. The verifier compares sixteen digits with the rules
and with the clues; a response of another length is refused unread.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from minidrl.tasks import Example, Verdict, d1, rows
from minidrl.tasks.text import check_setting, final_answer, tokenizer

SIZE, CELLS, DIGITS, EMPTY = 4, 16, "1234", "."
ROWS = [tuple(range(first, first + 4)) for first in (0, 4, 8, 12)]
COLUMNS = [tuple(range(first, 16, 4)) for first in range(4)]
BOXES = [(first, first + 1, first + 4, first + 5) for first in (0, 2)]  # of a band
FEWEST = 4  # clues; with fewer, some completion of every puzzle is in a class that is not held out
MAX_ANSWER = 128  # characters of an answer in a chat, blanks included; a longer one is refused


# -------------------------------------------------------------------------- grids and their classes
@functools.cache
def grids() -> tuple[str, ...]:
    """All 288 valid grids, ascending: of two bands, whose rows and boxes are whole, each pair whose
    columns are."""
    rows = ["".join(row) for row in itertools.permutations(DIGITS)]
    pairs = [top + row for top in rows for row in rows]
    bands = [band for band in pairs if all(_is_whole(band, box) for box in BOXES)]
    whole = (top + band for top in bands for band in bands)
    return tuple(grid for grid in whole if all(_is_whole(grid, column) for column in COLUMNS))


def _is_whole(cells: str, unit: tuple[int, ...]) -> bool:
    return {cells[i] for i in unit} == {*DIGITS}


def relabelled(grid: str) -> str:
    """The grid of its class whose first row is 1234: the digits renamed. 12 values."""
    return grid.translate(str.maketrans(grid[:SIZE], DIGITS))


@functools.cache
def _grids_held_out() -> frozenset[str]:
    classes = sorted({relabelled(grid) for grid in grids()})
    return frozenset(grid for grid in grids() if relabelled(grid) in classes[::3])


@functools.cache
def _grids_with(cell: int, digit: str) -> frozenset[str]:
    return frozenset(grid for grid in grids() if grid[cell] == digit)


@functools.cache
def _rows_with(clues: str) -> list[str]:
    rows = map("".join, itertools.permutations(DIGITS))
    return [row for row in rows if all(c in (EMPTY, d) for c, d in zip(clues, row, strict=True))]


def completions(clues: str) -> frozenset[str]:
    """Every valid grid that has these clues; ``clues``: sixteen digits or dots."""
    given = [_grids_with(i, digit) for i, digit in enumerate(clues) if digit != EMPTY]
    return frozenset(grids()).intersection(*given)


# ----------------------------------------------------------------------------------------- the task
@dataclass(frozen=True)
class Puzzle:
    """Sixteen cells row by row: the clues, and a dot in every empty cell."""

    clues: str
    solution: str = ""  # the one that a file names
    wording: str = "ours"
    place: str = field(default="", repr=False, compare=False)  # in a file: its name and the row

    @property
    def prompt(self) -> str:
        return f"{self.clues}:"

    @property
    def instruction(self) -> str:
        if self.wording != "ours":
            return d1.sudoku_words(self.clues.replace(EMPTY, "0"))
        rows = "\n".join(self.clues[first : first + SIZE] for first in range(0, CELLS, SIZE))
        return (
            "Complete this 4x4 Sudoku: every row, every column and every 2x2 box holds the digits "
            f"1, 2, 3 and 4. A dot is an empty cell.\n{rows}\nThink first; then write all four "
            "rows, clues included, between <answer> and </answer>."
        )

    @property
    def opening(self) -> str:
        return d1.OPENINGS[self.wording]

    @property
    def key(self) -> str:
        return self.clues


@dataclass(frozen=True, kw_only=True)
class Sudoku(rows.Puzzles):
    """The task as a run uses it: difficulty, split, reward.

    Difficulty: ``min_clues`` to ``max_clues`` of the sixteen cells are given. Split: every third of
    the 12 classes is held out, in ascending order. A puzzle is in the split that has all its
    completions; a puzzle with completions in both is in none. Pre-training and RL share a split.
    ``hit_share``: the share of demonstrations that are solutions. Of a file the rows have
    ``Puzzle``, with 0 in an empty cell, and may have ``Solution``; ``exclude`` leaves out all
    puzzles of its grids.
    """

    name: ClassVar[str] = "sudoku"
    about: ClassVar[str] = (
        "complete a 4x4 Sudoku; generated, split by the classes of its 288 grids, any valid "
        "completion counts"
    )

    longest_plain: ClassVar[int] = CELLS + 1
    reward: Literal["strict", "binary", "cells"] = "strict"
    min_clues: int = 6
    max_clues: int = 6
    hit_share: rows.Share = 0.2

    def __post_init__(self):
        super().__post_init__()
        check = partial(check_setting, self)
        fewer, least = "with fewer no puzzle can be held out", self.min_clues
        check("min_clues", FEWEST <= least < CELLS, f"{FEWEST} to {CELLS - 1}; {fewer}")
        allowed = f"min_clues ({least}) to {CELLS - 1}"
        check("max_clues", least <= self.max_clues < CELLS, allowed)

    def drawn(self, count: int, rng: np.random.Generator, split: str) -> list[Puzzle]:
        """Random puzzles: the number of clues, a grid of the split and the cells that are shown are
        uniform; for a puzzle with a completion outside the split, grid and cells are drawn again.
        """
        held_out = _grids_held_out()
        pool = [grid for grid in grids() if (grid in held_out) == (split == "held_out")]
        numbers = rng.integers(self.min_clues, self.max_clues + 1, count)
        left_out = frozenset() if split == "held_out" else self._excluded_grids
        return [self._one(pool, int(number), rng, left_out) for number in numbers]

    def _one(
        self, pool: list[str], clues: int, rng: np.random.Generator, left_out: frozenset[str]
    ) -> Puzzle:
        for _ in range(rows.MAX_REPEATS):  # with FEWEST clues or more every split has puzzles
            grid = pool[rng.integers(len(pool))]
            shown = set(rng.permutation(CELLS)[:clues].tolist())
            kept = "".join(d if i in shown else EMPTY for i, d in enumerate(grid))
            puzzle = Puzzle(kept, wording=self.wording)
            if self.split_of(puzzle) is not None and not (left_out & completions(kept)):
                return puzzle
        got = self.exclude or self.path
        raise ValueError(f"task.exclude: got {got!r}; allowed a file that leaves grids to train on")

    @functools.cached_property
    def _excluded_grids(self) -> frozenset[str]:
        known = [[p.solution] if p.solution else completions(p.clues) for p in self.excluded]
        return frozenset(itertools.chain.from_iterable(known))

    def problem_of(self, row: rows.Row) -> Puzzle:
        clues, solution = str(row.get("Puzzle")), str(row.get("Solution") or "")
        clues = clues.replace("0", EMPTY)
        found = completions(clues) if re.fullmatch("[1-4.]{16}", clues) else frozenset()
        if not found:
            allowed = "sixteen digits, 0 in an empty cell, of a puzzle that can be solved"
            raise ValueError(f"Puzzle: got {rows.brief(row.get('Puzzle'))}; allowed {allowed}")
        if solution and solution not in found:
            raise ValueError(f"Solution: got {rows.brief(solution)}; allowed one of the puzzle")
        return Puzzle(clues, solution, self.wording)

    def split_of(self, puzzle: Puzzle) -> str | None:
        """The split, from the puzzle alone; None for one with completions in both, or without."""
        found, held_out = completions(puzzle.clues), _grids_held_out()
        if not found or 0 < len(found & held_out) < len(found):
            return None
        return "held_out" if found <= held_out else "train"

    def demonstrations(
        self, problems: Sequence[Puzzle], rng: np.random.Generator, progress: float
    ) -> list[str]:
        """A grid for each puzzle that keeps its clues.

        With probability ``hit_share`` a solution, else rows that hold 1, 2, 3 and 4 each, drawn
        apart from one another, so that columns and boxes are right by chance only.
        """
        return [self._demonstration(p, rng, rng.random() < self.hit_share) for p in problems]

    def _demonstration(self, puzzle: Puzzle, rng: np.random.Generator, hit: bool) -> str:
        if hit:
            found = sorted(completions(puzzle.clues))
            return found[rng.integers(len(found))]
        choices = [_rows_with(puzzle.clues[row[0] : row[-1] + 1]) for row in ROWS]
        return "".join(rows[rng.integers(len(rows))] for rows in choices)

    def judge(self, problem: Puzzle, response: str) -> Verdict:
        """Solved by the rules and the clues; by d1's rule, if every empty cell is right.

        Marks: whether sixteen digits 1 to 4 keep the clues, and the share of the empty cells that
        are right, by the completion that is nearest. d1 takes cells of any answer, and the one
        solution of the file where the puzzle is of a file.
        """
        answer, known = self._answer(response), completions(problem.clues)
        found = isinstance(answer, str) and len(answer) == CELLS and {*answer} <= {*DIGITS}
        keeps = found and all(c in (EMPTY, d) for c, d in zip(problem.clues, answer, strict=True))
        if self.protocol == "d1":
            known = [problem.solution] if problem.solution else known
            right, readable = _cells(problem, answer, known), answer.isdigit()
            solved = right == 1
        else:
            right, readable = _cells(problem, answer, known) if found else 0.0, found
            solved = found and answer in known
        paid = {"strict": 1.0 if solved else 0.1 * keeps, "binary": float(solved), "cells": right}
        marks = {"well_formed": keeps, "cells": right}
        return Verdict(paid[self.reward], solved, marks, readable)

    def _answer(self, response: str) -> str:
        if self.prompt_format == "plain":
            return response
        if self.protocol == "d1":
            return d1.grid(response)
        answer = final_answer(response).strip()
        return re.sub("[ \t\r\n|,.`]", "", answer) if len(answer) <= MAX_ANSWER else ""

    def tokenizer(self) -> Any:
        return tokenizer(f"{DIGITS}{EMPTY}:")

    def example(self) -> Example:
        prompt, grid = "23144.2.3.4.1.3.:", "2314412332411432"
        return Example(prompt, answer=grid, text=grid, before=prompt, length=CELLS)


def _cells(puzzle: Puzzle, answer: str, known: Iterable[str]) -> float:
    # The share of the empty cells in which an answer agrees with the nearest of the known grids.
    empty = [i for i, clue in enumerate(puzzle.clues) if clue == EMPTY]
    right = [sum(grid[i] == answer[i : i + 1] for i in empty) for grid in known]
    return max(right, default=0) / max(1, len(empty))
