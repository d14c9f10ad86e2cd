"""Real answers of LLaDA-8B-Instruct, read by the published rule and by ours; and the forms that they taught us.

The files are those of dllm-reasoning/d1 (eval/eval_baselines, Apache License 2.0) and no part of this repository:
MINIDRL_REAL_TEXT names their folder. docs/real_text.md has the table.
"""

import dataclasses
import hashlib
import json
import os
import re
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from minidrl.tasks import d1, equality
from minidrl.tasks.countdown import Countdown
from minidrl.tasks.countdown import Puzzle as Numbers
from minidrl.tasks.mathematics import Gsm8k, Math500, Question
from minidrl.tasks.sudoku import Puzzle as Grid
from minidrl.tasks.sudoku import Sudoku, completions
from minidrl.tasks.text import final_answer, last_box

needs_mathverify = pytest.mark.skipif(find_spec("math_verify") is None, reason='needs pip install -e ".[math]"')
FOLDER = os.environ.get("MINIDRL_REAL_TEXT", "")
needs_files = pytest.mark.skipif(not FOLDER, reason="MINIDRL_REAL_TEXT does not name the folder of real answers")

# ------------------------------------------------------------------------------------------------------- the published rule
COUNTDOWN = {  # of 5, 6, 8 and 46, by the published code: right numbers, solved
    "so \\boxed{5 \\times 8 + 6}": (True, True),
    "<answer>\\boxed{5*8+6}<|eot_id|>": (True, True),
    "<answer>5*8+6</answer>": (True, False),  # without a box the text is read whole, tags and all
    "\\boxed{5*8+6": (True, False),
    "\\boxed{17<answer>5*8+6</answer>": (True, True),
    "\\boxed{5*8+6 = 46}": (True, True),
    "\\boxed{5*8+6=46=40}": (True, True),
    "5*8=40, 5 * 8 + 6 = 46": (False, False),  # the first equation of the text: 5*8
    "\\boxed{05*8-(-6)}": (True, False),
    "\\boxed{5*8-(-6)}": (True, True),
    "\\boxed{5*6+8}": (True, False),
    "\\boxed{6*8/5}": (True, False),
    "\\boxed{5*8+6+0}": (False, False),
    "\\boxed{5*(8+6)/(5-5)}": (False, False),
    "\\boxed{__import__('os')+5+6+8}": (True, False),
    "": (False, False),
}
NUMBERS = {  # of GSM8K
    "\\boxed{18}": "18",
    "\\boxed{...} \\boxed{17} \\boxed{18}": "17",
    "\\boxed{1,080}": "1",
    "\\boxed{\\text{18 eggs}": "18",
    "<answer>16 and 18</answer>": "18",
    "<answer>\\boxed{18</answer>": "18",
    "\\boxed{}<answer>-2.5 degrees</answer>": "-2.5",
    "18": "",
}
TEXTS = {  # of MATH: an answer and the known one, compared as text
    ("\\dfrac12", "\\frac{1}{2}"): True,
    ("1/2", "\\frac{1}{2}"): True,
    ("0.5", "\\frac{1}{2}"): True,
    ("0.25", "\\frac{1}{4}"): False,
    ("x = 5\\text{ cm}", "5"): True,
    ("\\left( 3, \\sqrt2 \\right)", "(3,\\sqrt{2})"): True,
    ("60^\\circ", "60"): True,
    ("60\\%", "60"): True,
    (".5", "0.5"): True,
    ("58500", "58,500"): False,
    ("x/2", "x /2"): False,  # what is no fraction of integers is compared as it stands
}
GRIDS = {
    "<answer>\n2314412332411432\n</answer>": "2314412332411432",
    "<answer>```\n2314\n4123\n3241\n1432```": "2314412332411432",
    "<answer>2314<|eot_id|>": "2314000000000000",
    "<answer>23144123324114329</answer>": "2314412332411432",
    "</answer> 2314412332411432": "2314412332411432",
    "I see 2314412332411432": "2314412332411432",
    "2314": "",
}


def test_the_published_rules_on_answers_made_by_hand():
    """As eval/parse_and_get_acc.py at commit 837888f reads them, which was run on each."""
    assert {text: d1.countdown(text, (5, 6, 8), 46) for text in COUNTDOWN} == COUNTDOWN
    assert {text: d1.number(text) for text in NUMBERS} == NUMBERS
    assert {text: d1.grid(text) for text in GRIDS} == GRIDS
    assert [pair for pair, same in TEXTS.items() if d1.same_text(*pair) != same] == []
    assert [d1.mathematics(t) for t in ("\\boxed{\\frac{1}{2}}", "\\boxed{1<answer>2</answer>")] == ["\\frac{1}{2}", "2"]


def test_the_published_rule_pays_as_diffu_grpo_does():
    task = {kind: Countdown(prompt_format="chat", protocol="d1", reward=kind) for kind in ("strict", "binary", "any_answer")}
    paid = {"<answer>\\boxed{5*8+6}</answer>": (1, 1, 1), "<answer>\\boxed{5+8+6}</answer>": (0.1, 0, 0.1), "?": (0, 0, 0)}
    paid["<answer>no</answer>"] = (0, 0, 0.1)
    for text, expected in paid.items():
        assert tuple(t.judge(Numbers((5, 6, 8), 46), text).reward for t in task.values()) == expected, text
    grid, some = "2314412332411432", "23144.2.3.4.1.3."
    cells = Sudoku(prompt_format="chat", protocol="d1", reward="cells")
    assert cells.judge(Grid(some, grid), f"<answer>{grid[:8]}</answer>").reward == 2 / 6
    assert cells.judge(Grid(some, grid), f"<answer>{grid}1</answer>").solved and not cells.judge(Grid(some, grid), None).solved
    with pytest.raises(ValueError, match="^task.prompt_format: got 'plain'; allowed chat with d1's prompts and rule$"):
        Countdown(protocol="d1")


# sha256 of the prompts that the constants of dllm-reasoning/d1 at 837888f make of 30, 100, 93 and 23, and of this grid.
PROMPTS = {"d1": ("bc134344e840aa8c", "d745579cb96531c6"), "d1-eval": ("47d40f5a510e91ed", "d745579cb96531c6")}


@pytest.mark.parametrize("wording", PROMPTS)
def test_the_prompts_are_those_of_the_released_code_to_the_blank(wording):
    asked = Numbers((30, 100, 93), 23, wording), Grid("3102200002100320".replace("0", "."), wording=wording)
    said = tuple(hashlib.sha256(puzzle.instruction.encode()).hexdigest()[:16] for puzzle in asked)
    assert said == PROMPTS[wording] and {puzzle.opening for puzzle in asked} == {"<reasoning>" * (wording == "d1-eval")}


def test_hostile_answers_are_read_in_bounded_time():
    started = time.perf_counter()
    for piece in ("\\boxed{", "<answer>", "```\n", "1" * 15 + " ", "=", "(", "5*8+6=", "</answer>", "{", "<answer>```1"):
        for text in (piece * (100_000 // len(piece)), piece * (39_000 // len(piece)), "<answer>" + piece * 3000 + "</answer>"):
            for read in (lambda text: d1.countdown(text, (5, 6, 8), 46), d1.grid, d1.number, d1.mathematics, final_answer):
                read(text)
    assert time.perf_counter() - started < 10


# ----------------------------------------------------------------------------------------------------- files of other people
PUZZLES = '{"input": "30,100,93", "output": "23"}\n{"input": "3,3,8,8", "output": 24}\n'
CSV = "Puzzle,Solution\n3102200002100320,3142243142131324\n1200000034000000,\n"


def test_puzzles_of_a_file_are_asked_and_never_trained_on(tmp_path):
    (tmp_path / "a.jsonl").write_text(PUZZLES), (tmp_path / "a.csv").write_text(CSV)
    task = Countdown(path=str(tmp_path / "a.jsonl"), prompt_format="chat")
    assert [(p.numbers, p.target) for p in task.held_out(2)] == [((30, 100, 93), 23), ((3, 3, 8, 8), 24)]
    assert task.judge(task.held_out(1)[0], "<answer>100-93+30</answer>").reward == 0.1
    assert task.judge(task.held_out(2)[1], "<answer>8/(3-8/3)</answer>").solved
    grids = Sudoku(path=str(tmp_path / "a.csv"), prompt_format="chat", protocol="d1")
    first, second = grids.held_out(2)
    assert first.clues == "3102200002100320".replace("0", ".")
    assert second.solution == "" and grids.judge(first, "<answer>3142243142131324</answer>").solved
    with pytest.raises(ValueError, match="^evaluate.n: got 3; allowed 1 to 2, as are held out$"):
        task.held_out(3)
    for kind, name in ((Countdown, "a.jsonl"), (Sudoku, "a.csv")):
        said = kind().check(str(tmp_path / name))
        assert said.startswith(f"{tmp_path / name}: 2 rows; all can be asked and judged by {kind.name}; the longest prompt has")


def test_what_a_file_excludes_is_not_trained_on_and_the_held_out_puzzles_stay(tmp_path):
    easy = Countdown(num_numbers=2, max_number=4)
    drawn = easy.problems(300, np.random.default_rng(0))
    left_out = sorted({p.key for p in drawn})[::2]
    rows = [{"input": key.split(">")[0], "output": key.split(">")[1]} for key in left_out]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    apart = dataclasses.replace(easy, exclude=str(tmp_path / "x.jsonl"))
    kept = {p.key for p in apart.problems(300, np.random.default_rng(0))}
    assert kept == {p.key for p in drawn} - {*left_out} and apart.held_out(4) == easy.held_out(4)
    puzzles = Sudoku().problems(20, np.random.default_rng(0))
    known = set().union(*(completions(p.clues) for p in puzzles))
    (tmp_path / "x.csv").write_text("Puzzle\n" + "\n".join(p.clues.replace(".", "0") for p in puzzles))
    others = Sudoku(exclude=str(tmp_path / "x.csv")).problems(200, np.random.default_rng(1))
    assert not any(completions(p.clues) & known for p in others)
    every = "\n".join(["Puzzle", *("1" + "0" * 15, "2" + "0" * 15, "3" + "0" * 15, "4" + "0" * 15)])
    (tmp_path / "x.csv").write_text(every)
    with pytest.raises(ValueError, match="^task.exclude: got .*; allowed a file that leaves grids to train on$"):
        Sudoku(exclude=str(tmp_path / "x.csv")).problems(1, np.random.default_rng(0))


WRONG = {
    '{"nums": [1, 2], "target": 3}': "row 1: got {'nums': [1, 2], 'target': 3}; allowed input, 2 to 4 numbers",
    '{"input": "1,2", "output": "3"}\n{"input": "1,1", "output": "7"}': "row 2: got {'input': '1,1', 'output': '7'}; allowed",
    '{"input": "1,2,3,4,5", "output": "15"}': "row 1: got {'input': '1,2,3,4,5', 'output': '15'}; allowed input",
    '{"input": "30,100,93", "output": 23.5}': "row 1: got {'input': '30,100,93', 'output': 23.5}; allowed input, 2 to 4",
    '{"input": "' + "1," * 50_000 + '1"}': "row 1: got {'input': '" + "1," * 24 + "1..; allowed input, 2 to 4 numbers",
}
WRONG_GRIDS = {
    "Puzzle,Solution\n1100000000000000,": "row 1: Puzzle: got '1100000000000000'; allowed sixteen digits, 0 in an empty cell",
    "Puzzle\n" + "1" * 100_000: "row 1: Puzzle: got '" + "1" * 59 + "..; allowed sixteen digits",
    "Clues\n3102200002100320": "row 1: Puzzle: got None; allowed sixteen digits",
    "Puzzle,Solution\n3102200002100320,3142243142131342": "row 1: Solution: got '3142243142131342'; allowed one of the puzzle",
}


@pytest.mark.parametrize(("kind", "name", "wrong"), [(Countdown, "a.jsonl", WRONG), (Sudoku, "a.csv", WRONG_GRIDS)])
def test_a_wrong_file_is_one_line_with_its_row(kind, name, wrong, tmp_path):
    for text, said in wrong.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError) as error:
            kind(path=str(tmp_path / name)).held_out(1)
        assert str(error.value).startswith(f"{tmp_path / name} {said}")


def test_a_row_of_math_whose_answer_stands_in_the_box_of_its_solution_is_read(tmp_path):
    row = {"problem": "1/2+1?", "solution": "So $\\boxed{1}$, no: $\\boxed{\\frac{3}{2}}$."}
    assert [q.gold for q in Math500().placed([row, row | {"answer": "4"}], "x")] == ["\\frac{3}{2}", "4"]
    with pytest.raises(ValueError, match="^x row 1: answer: got ''; allowed text that is not blank$"):
        Math500().placed([{"problem": "?", "solution": "none"}], "x")


# ------------------------------------------------------------------------------------------------------------ the real files
# Solved by the published rule (counted by running the published code on them), of how many: answers, or cells of Sudoku.
PUBLISHED = {
    "countdown": {128: (53, 256), 256: (50, 256), 512: (41, 256)},
    "gsm8k": {128: (783, 1130), 256: (863, 1130), 512: (883, 1130)},
    "math500": {128: (130, 500), 256: (162, 500), 512: (181, 500)},
    "sudoku": {128: (240, 2048), 256: (137, 2048), 512: (112, 2048)},
}
OURS = {
    "countdown": {128: 54, 256: 51, 512: 41},
    "gsm8k": {128: 790, 256: 869, 512: 887},
    "math500": {128: 146, 256: 179, 512: 197},
    "sudoku": {128: 80, 256: 14, 512: 11},
}
# Why the two rules differ on an answer, and how often: (the published rule pays, or pays more; ours does).
KINDS = {
    "countdown": {"no box": (0, 1), "a box that is not closed": (0, 1)},
    "gsm8k": {
        "thousands with a separator": (0, 13),
        "a box that is not closed, or its backslash missing": (1, 9),
        "a fraction to reduce": (1, 1),
        "several boxes: the first or the last": (1, 1),
        "the number in a sentence or a time of day": (2, 0),
        "a worked solution between the tags, the box after them": (2, 0),
    },
    "math500": {"another form of the answer": (0, 42), "a box that is not closed, or empty": (0, 7)},
    "sudoku": {"no whole grid": (223, 0), "another completion is nearer": (0, 3)},
}


def answers(task: str, length: int):
    for path in sorted(Path(FOLDER).glob(f"{task}_instruct_{length}_*_generations.json")):
        yield from json.loads(path.read_text())["generations"]


def asked(task: str, row: dict):
    if task == "countdown":
        return Numbers(tuple(row["ground_truth"][0]), row["ground_truth"][1])
    if task == "sudoku":
        return Grid(row["question"].split()[-1].replace("0", "."), row["ground_truth"])
    return Question(row["question"], str(row["ground_truth"]).removesuffix(".0"))


def worth(task: str, rule, row: dict) -> int:
    verdict = rule.judge(asked(task, row), row["generations"])
    return round(verdict.marks["cells"] * 8) if task == "sudoku" else int(verdict.solved)


def why(task: str, text: str) -> str:
    """The kind of an answer on which the rules differ."""
    said = final_answer(text)
    if task == "sudoku":
        return "another completion is nearer" if re.fullmatch("[1-4]{16}", re.sub(r"[\s|,.`]", "", said)) else "no whole grid"
    if task == "math500":
        alike = d1.mathematics(text).strip() == said
        return "another form of the answer" if alike else "a box that is not closed, or empty"
    if "boxed" not in text:
        return "no box"
    if task == "countdown":
        return "a box that is not closed"
    boxes = re.findall(r"\\boxed{([^{}\n]*)}", text)
    if re.search(r"\\boxed{[^{}\n]*\d{1,3}(?:,|\\,)\d{3}", text):
        return "thousands with a separator"
    if "<answer>" in text and len(said) > 100:
        return "a worked solution between the tags, the box after them"
    if "frac" in said or "/" in said and re.fullmatch(r"\d+/\d+", said):
        return "a fraction to reduce"
    if len({*boxes} - {""}) > 1:
        return "several boxes: the first or the last"
    if len(said.split()) > 3 or ":" in said:
        return "the number in a sentence or a time of day"
    return "a box that is not closed, or its backslash missing"


@needs_files
@needs_mathverify
@pytest.mark.parametrize("task", PUBLISHED)
def test_the_published_rule_is_reproduced_and_every_difference_to_ours_has_a_kind(task):
    kind = {"countdown": Countdown, "gsm8k": Gsm8k, "math500": Math500, "sudoku": Sudoku}[task]
    published, ours = (kind(prompt_format="chat", protocol=name) for name in ("d1", "ours"))
    more, fewer, found = Counter(), Counter(), 0
    for length, (solved, total) in PUBLISHED[task].items():
        rows = list(answers(task, length))
        if not rows:  # a part of the files
            continue
        found += 1
        readable = [row for row in rows if row["ground_truth"] is not None]  # without, the published rule pays nothing
        pairs = [(worth(task, published, row), worth(task, ours, row), row) for row in readable]
        assert (sum(p for p, _, _ in pairs), len(rows) * (8 if task == "sudoku" else 1)) == (solved, total)
        assert sum(o for _, o, _ in pairs) == OURS[task][length]
        for p, o, row in pairs:
            if p != o:
                (more if p > o else fewer)[why(task, row["generations"])] += 1
    if not found:
        pytest.skip(f"MINIDRL_REAL_TEXT has no answers to {task}")
    assert found < 3 or {name: (more[name], fewer[name]) for name in more | fewer} == KINDS[task]


@needs_mathverify
def test_the_answers_of_math500_are_read_and_found_in_their_solutions():
    """The file of HuggingFaceH4/MATH-500, as math500.jsonl in the folder."""
    path = Path(FOLDER) / "math500.jsonl"
    if not FOLDER or not path.is_file():
        pytest.skip("MINIDRL_REAL_TEXT names no folder with math500.jsonl")
    assert "500 rows; all can be asked and judged" in Math500().check(str(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["answer"] for row in rows if not equality.equal(row["answer"], last_box(row["solution"]))] == []
