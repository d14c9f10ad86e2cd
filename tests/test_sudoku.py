"""Sudoku: grids, classes, splits, generator and verifier, judged by a solver of their own.

``solve`` below shares nothing with the task: it fills cell by cell and looks at pairs of cells that see one another.
"""

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from minidrl.tasks import rows, sudoku
from minidrl.tasks.sudoku import Puzzle, Sudoku

SIX, FEW = Sudoku(), Sudoku(min_clues=4, max_clues=4)
WIDE = Sudoku(min_clues=4, max_clues=10, hit_share=0.3)
BOTH = pytest.mark.parametrize("task", [WIDE, FEW], ids=["four to ten clues", "four clues"])


# ------------------------------------------------------------------------------------------------ the independent solver


def see(a: int, b: int) -> bool:
    """Two different cells in one row, column or box."""
    (i, j), (k, m) = divmod(a, 4), divmod(b, 4)
    return a != b and (i == k or j == m or (i // 2, j // 2) == (k // 2, m // 2))


SEEN = [[other for other in range(16) if see(cell, other)] for cell in range(16)]


@functools.cache
def solve(clues: str) -> frozenset[str]:
    """Every completion, cell by cell; empty where the clues contradict one another."""
    if any(clues[a] == clues[b] != "." for a in range(16) for b in SEEN[a]):
        return frozenset()
    if "." not in clues:
        return frozenset([clues])
    cell = clues.index(".")
    free = [d for d in "1234" if all(clues[other] != d for other in SEEN[cell])]
    return frozenset().union(*(solve(clues[:cell] + d + clues[cell + 1 :]) for d in free))


EVERY = solve("." * 16)


def renamed(grid: str) -> set[str]:
    """The 24 grids that renaming its digits makes."""
    return {grid.translate(str.maketrans("1234", "".join(names))) for names in itertools.permutations("1234")}


CLASSES = sorted({frozenset(renamed(grid)) for grid in EVERY}, key=lambda members: min(m for m in members if m[:4] == "1234"))
HELD_OUT = frozenset().union(*CLASSES[::3])


def test_the_grids_and_their_classes_are_those_of_the_independent_solver():
    """288 grids; 12 classes of 24 under renaming."""
    assert list(sudoku.grids()) == sorted(EVERY) and len(EVERY) == 288
    assert sorted(map(len, CLASSES)) == [24] * 12
    names = [{sudoku.relabelled(grid) for grid in members} for members in CLASSES]
    assert all(len(found) == 1 and found <= EVERY for found in names) and len(set().union(*names)) == 12
    assert all(sudoku.relabelled(grid)[:4] == "1234" for grid in EVERY)


def test_completions_are_those_of_the_independent_solver():
    rng = np.random.default_rng(0)
    for task in (WIDE, FEW):
        for puzzle in task.problems(60, rng) + task.problems(20, rng, "held_out"):
            assert sudoku.completions(puzzle.clues) == solve(puzzle.clues) != frozenset()
    assert sudoku.completions("." * 16) == EVERY and sudoku.completions("11" + "." * 14) == frozenset()
    assert len(sudoku.completions("1" + "." * 15)) == 72


# --------------------------------------------------------------------------------------------- difficulty and the splits


def test_a_wrong_difficulty_is_named_with_what_is_allowed():
    with pytest.raises(ValueError, match="^task.min_clues: got 3; allowed 4 to 15; with fewer no puzzle can be held out$"):
        Sudoku(min_clues=3)


def split_by_hand(clues: str) -> str | None:
    """Every third class in ascending order; a puzzle goes where all its completions are."""
    sides = {grid in HELD_OUT for grid in solve(clues)}
    return {(True,): "held_out", (False,): "train"}.get(tuple(sides))


def test_the_splits_share_no_class_and_no_puzzle():
    """A puzzle is where all its completions are, 96 grids are held out, and no class is on both sides."""
    rng, task = np.random.default_rng(1), sudoku.Sudoku(min_clues=4, max_clues=8)
    found = {s: task.problems(80, rng, s) for s in ("pretrain", "train", "held_out")}
    grids = {s: frozenset().union(*(solve(p.clues) for p in puzzles)) for s, puzzles in found.items()}
    for s, puzzles in found.items():
        expected = "held_out" if s == "held_out" else "train"
        assert {task.split_of(p) for p in puzzles} == {split_by_hand(p.clues) for p in puzzles} == {expected}
    for members in CLASSES:
        assert not (members & grids["held_out"] and members & (grids["train"] | grids["pretrain"]))
    sides = Counter(task.split_of(sudoku.Puzzle(grid)) for grid in EVERY)
    assert sides == {"train": 192, "held_out": 96}
    assert task.split_of(sudoku.Puzzle("." * 16)) is None and task.split_of(sudoku.Puzzle("11" + "." * 14)) is None


@BOTH
def test_puzzles_have_the_clues_of_the_difficulty_and_a_completion(task):
    puzzles = task.problems(300, np.random.default_rng(2)) + task.problems(60, np.random.default_rng(2), "held_out")
    counts = {16 - p.clues.count(".") for p in puzzles}
    assert counts == set(range(task.min_clues, task.max_clues + 1))
    assert all(len(p.clues) == 16 and set(p.clues) <= set("1234.") and solve(p.clues) for p in puzzles)
    assert {len(p.prompt) for p in puzzles} == {task.prompt_length} and {p.key for p in puzzles} == {p.clues for p in puzzles}
    assert len({i for p in puzzles for i in range(16) if p.clues[i] != "."}) == 16


def test_held_out_are_the_puzzles_that_the_generator_of_seed_0_draws_one_after_the_other():
    """Results on other puzzles could not be compared with those there are; 15 clues: 1536 puzzles, so that some come twice."""
    for task in (SIX, Sudoku(min_clues=15, max_clues=15)):
        rng = np.random.default_rng(0)
        drawn = [task.problems(1, rng, "held_out")[0] for _ in range(300)]
        first = list(dict.fromkeys(drawn))
        assert task.held_out(len(first)) == first
    assert len(first) < 300


def test_held_out_counts_that_do_not_exist_are_named(monkeypatch):
    monkeypatch.setattr(rows, "MAX_REPEATS", 2000)
    full = Sudoku(min_clues=15, max_clues=15)  # 96 grids, with one of 16 cells empty
    assert len(full.held_out(96 * 16)) == 96 * 16
    with pytest.raises(ValueError, match="^evaluate.n: got 1537; allowed 1 to 1536, as are held out$"):
        full.held_out(96 * 16 + 1)


def test_demonstrations_keep_the_clues_and_are_solutions_by_their_share():
    """The clues are kept and every row is whole; ``hit_share`` are solutions, of all of them, the others by chance."""
    rng = np.random.default_rng(3)
    for share in (0.0, 0.3, 1.0):
        task = sudoku.Sudoku(min_clues=4, max_clues=8, hit_share=share)
        puzzles, expected, variance = task.problems(500, rng), 0.0, 0.0
        hits = 0
        for puzzle, text in zip(puzzles, task.demonstrations(puzzles, rng, 0.5), strict=True):
            assert all(c in (".", d) for c, d in zip(puzzle.clues, text, strict=True))
            assert all(sorted(text[i : i + 4]) == [*"1234"] for i in (0, 4, 8, 12))
            hits += text in solve(puzzle.clues)
            rows = math.prod(math.factorial(puzzle.clues[i : i + 4].count(".")) for i in (0, 4, 8, 12))
            chance = share + (1 - share) * len(solve(puzzle.clues)) / rows
            expected, variance = expected + chance, variance + chance * (1 - chance)
        assert abs(hits - expected) <= 5 * math.sqrt(variance) + 1e-6, share
    several = sudoku.Puzzle("12........34....")
    asked = sudoku.Sudoku(hit_share=1.0).demonstrations([several] * 200, rng, 0.0)
    assert len(solve(several.clues)) > 2 and set(asked) == solve(several.clues)


# --------------------------------------------------------------------------------------------------------- the verifier

PUZZLE = Puzzle("23144.2.3.4.1.3.")
ANSWER = "2314412332411432"
SEVERAL = Puzzle("12........34....")
LOOSE = Puzzle("1" + "." * 15)
NOT_A_RESPONSE = ["", None, 46, 4.6, b"2314412332411432", [*ANSWER], float("nan")]
TABLE = [  # puzzle, response, (strict, binary, cells)
    (PUZZLE, ANSWER, (1.0, 1.0, 1.0)),
    (PUZZLE, "2314412332411423", (0.0, 0.0, 5 / 6)),  # a clue lost, and the cell beside it wrong
    (PUZZLE, "2314412332411234", (0.1, 0.0, 4 / 6)),  # clues kept, two cells wrong
    (PUZZLE, "3214412332411432", (0.0, 0.0, 1.0)),  # empty cells right, a clue lost
    (PUZZLE, "1234341221434321", (0.0, 0.0, 0.0)),  # a valid grid of other clues
    (PUZZLE, ANSWER[:15], (0.0, 0.0, 0.0)),
    (PUZZLE, ANSWER + "1", (0.0, 0.0, 0.0)),
    (PUZZLE, "23144.2332411432", (0.0, 0.0, 0.0)),
    (PUZZLE, "231441233241143２", (0.0, 0.0, 0.0)),
    (PUZZLE, "23144123[PAD]32411432", (0.0, 0.0, 0.0)),
    (PUZZLE, ANSWER * 60_000, (0.0, 0.0, 0.0)),
    *[(SEVERAL, grid, (1.0, 1.0, 1.0)) for grid in sorted(solve(SEVERAL.clues))],
]


def nearest(clues: str, response: str) -> float:
    """Of the empty cells, the share in which the completion nearest to the response agrees with it."""
    empty = [i for i in range(16) if clues[i] == "."]
    return max(sum(grid[i] == response[i] for i in empty) for grid in solve(clues)) / len(empty)


# Two of the three rules kept: boxes, rows, columns broken.
BROKEN = ["1234234134124123", "1212343421214343", "1324241313242413"]
TABLE += [(LOOSE, grid, (0.1, 0.0, nearest(LOOSE.clues, grid))) for grid in BROKEN]


def test_the_table_of_rewards():
    """The table of rewards, under the three names; what is solved does not depend on the name."""
    for puzzle, response, expected in TABLE + [(PUZZLE, nothing, (0.0, 0.0, 0.0)) for nothing in NOT_A_RESPONSE]:
        asked = sudoku.Puzzle(puzzle.clues)
        verdicts = [sudoku.Sudoku(reward=kind).judge(asked, response) for kind in ("strict", "binary", "cells")]
        assert tuple(v.reward for v in verdicts) == pytest.approx(expected), (puzzle, str(response)[:80])
        for v in verdicts:
            assert v.solved == (expected[1] == 1.0) and v.marks["well_formed"] == (expected[0] > 0)
            assert v.marks["cells"] == pytest.approx(expected[2])
    assert len(solve(PUZZLE.clues)) == 1 and len(solve(SEVERAL.clues)) > 2


CHAT = {
    f"Row by row: <answer>{ANSWER}</answer>": True,
    "<answer>\n2314\n4123\n3241\n1432\n</answer> done": True,
    "<answer>2 3 1 4\r\n4 1 2 3\n\t3 2 4 1\n1 4 3 2</answer>": True,
    ANSWER: False,
    f"<answer>{ANSWER}": True,
    f"<answer>{ANSWER}</answer><answer>{ANSWER}</answer>": True,
    "<answer>2314|4123|3241|1432</answer>": True,
    "<answer>| 2 | 3 | 1 | 4 |\n| 4 | 1 | 2 | 3 |\n| 3 | 2 | 4 | 1 |\n| 1 | 4 | 3 | 2 |</answer>": True,
    f"<answer>```\n{ANSWER}\n```</answer>": True,
    f"<answer>\\boxed{{{ANSWER}}}</answer>": True,
    f"<answer>{ANSWER}</answer><answer>{ANSWER[::-1]}</answer>": False,
    "<answer>2314\u00a0412332411432</answer>": False,
    f"<answer>{ANSWER[:15]}{' ' * 120}{ANSWER[15]}</answer>": False,
    "": False,
}


def test_in_a_chat_the_answer_is_what_stands_between_the_tags():
    for response, expected in CHAT.items():
        chat = sudoku.Sudoku(prompt_format="chat", reward="binary")
        assert chat.judge(sudoku.Puzzle(PUZZLE.clues), response).solved == expected, response
    assert sudoku.Sudoku().judge(sudoku.Puzzle(PUZZLE.clues), ANSWER).solved
    assert not sudoku.Sudoku().judge(sudoku.Puzzle(PUZZLE.clues), f"<answer>{ANSWER}</answer>").solved
    asked = PUZZLE.instruction
    assert "2314\n4.2.\n3.4.\n1.3.\n" in asked and "<answer>" in asked and "</answer>" in asked
