"""The task `code`: three formats, rows that cannot be judged, splits, prompts, verdicts, a run. All rows here are our own."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import test_chat
import test_loading
from minidrl import loop, tasks
from minidrl.run import checkpoints, config
from minidrl.run.cli import main
from minidrl.tasks import code, sandbox
from minidrl.tasks.code import Code

HERE = pytest.mark.skipif(sandbox.refusal() != "", reason=sandbox.refusal())

MBPP = {
    "task_id": 1,
    "text": "Write a function to count the vowels of a word.",
    "code": "def spare(word):\n    return word\n\n"
    "def vowels(word, which='aeiou'):\n    return sum(c in which for c in spare(word))",
    "test_setup_code": "",
    "test_list": ["assert vowels('banana') == 3", "assert vowels('') == 0", "assert vowels('rhythm', 'y') == 1"],
    "challenge_test_list": [],
}
ROUND = {
    "prompt": "Write a function to find the side of a square from its area.",
    "code": "def side(area):\n    return area ** 0.5",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(side(2), math.sqrt(2), rel_tol=0.001)", "assert side(9) == 3"],
}
HUMANEVAL = {
    "task_id": "Own/0",
    "prompt": "from typing import List\n\n\ndef double(x: int) -> int:\n    return 2 * x\n\n\n"
    'def doubles(numbers: List[int]) -> List[int]:\n    """ Every number twice as large.\n    >>> doubles([1, 2])\n'
    '    [2, 4]\n    """\n',
    "entry_point": "doubles",
    "canonical_solution": "    return [double(x) for x in numbers]\n",
    "test": "METADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    few = [1, 2]\n    assert candidate(few) == [2, 4]\n"
    "    for n in range(3):\n        assert candidate([n]) == [double(n)]\n    assert candidate([]) == []\n    done = True\n",
}
ROWS = {"mbpp": [MBPP, ROUND], "humaneval": [HUMANEVAL]}
EACH = pytest.mark.parametrize(("form", "row"), [(form, row) for form, rows in ROWS.items() for row in rows])


def written(path: Path, rows: list) -> Path:
    """The rows as a list, or a row a line."""
    lines = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows), encoding="utf-8")
    return path


def exercise(form: str, row: dict, show_tests: bool = False) -> code.Exercise:
    return code.FORMATS[form][1](row, show_tests)


def tagged(program: str) -> str:
    return f"Let me see.\n<answer>\n{program}\n</answer>"


# ---------------------------------------------------------------------------------------------------------- formats
def test_a_row_becomes_what_its_format_says():
    """As read from its format by hand."""
    asked, square = exercise("mbpp", MBPP), exercise("mbpp", ROUND)
    assert asked.names == ("vowels",) and asked.tests == tuple(MBPP["test_list"])
    assert "def vowels(word, which='aeiou'):" in asked.instruction and "spare" not in asked.instruction
    assert square.names == ("side",) and square.setup.strip() == "import math" and ROUND["prompt"] in square.instruction
    asked = exercise("humaneval", HUMANEVAL)
    assert asked.names == ("doubles",) and asked.before == HUMANEVAL["prompt"] and asked.tests == ("check(doubles)",)
    assert HUMANEVAL["test"] in asked.setup
    assert asked.solution == HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    for form, (row, *_) in ROWS.items():
        assert "assert" not in exercise(form, row).instruction and "assert" in exercise(form, row, True).instruction


@HERE
@EACH
def test_the_reference_passes_and_a_stub_does_not(form, row):
    task, asked = Code(format=form, reward="share", seconds=1), exercise(form, row)
    record = task.run(asked, asked.solution)
    assert (record.passed, record.reason) == (len(asked.tests), "")
    for stub in ("", "x = 1", f"def {asked.names[0]}(*_): return None", f"def {asked.names[0]}(*_): raise KeyError"):
        assert task.run(asked, stub).passed == 0


WRONG = {  # format, program -> tests that it passes
    ("mbpp", "def vowels(word, which=''):\n    return 3 if word else 0"): 2,
    ("humaneval", "def doubles(numbers):\n    return [2, 4]"): 0,
    ("humaneval", "def doubles(numbers):\n    return list(map(double, numbers))"): 1,
    ("humaneval", "def double(x):\n    return 0\ndef doubles(numbers):\n    return [0 for x in numbers]"): 0,
}


@HERE
@pytest.mark.parametrize(("form", "program"), WRONG)
def test_each_test_of_a_row_counts_for_itself(form, program):
    """By the tests as they stand in the row; a helper that the program redefines stays the tests' own."""
    asked, response = exercise(form, ROWS[form][0]), tagged(program)
    passed, total = WRONG[form, program], len(asked.tests)
    for reward in ("all", "share"):
        verdict = Code(format=form, reward=reward).judge(asked, response)
        assert verdict.marks == {"answered": True, "tests": passed / total} and verdict.solved == (passed == total)
        assert verdict.reward == (passed / total if reward == "share" else float(passed == total))


# ------------------------------------------------------------------------------------------- rows that cannot be judged
UNFIT = {
    "the tests use a class": ("mbpp", {"code": "class P: pass\ndef f(): return P()", "test_list": ["assert f() == P()"]}),
    "the tests call no function of the solution": ("mbpp", {"test_list": ["assert 1 == 1"]}),
    "the solution has no function": ("mbpp", {"code": "vowels = len"}),
    "the solution is no Python": ("mbpp", {"code": "print 'x'"}),
    "the test is no Python": ("mbpp", {"test_list": ["assert vowels('a') ="]}),
    "the prompt has no function of the name entry_point": ("humaneval", {"entry_point": "triples"}),
}


@pytest.mark.parametrize("why", UNFIT)
def test_a_row_that_needs_more_is_left_out_and_counted(why, tmp_path, caplog):
    form, change = UNFIT[why]
    base = ROWS[form][0]
    path = written(tmp_path / "rows.jsonl", [base, base | change, base])
    assert [e.key for e in Code(path=str(path), format=form)._rows("path")] == [exercise(form, base).key]
    left = ", ".join(f"1 ({reason})" for reason in sorted([why, "the question is there already"]))
    assert caplog.messages == [f"task code: {path}: 3 rows, left out: {left}"]


@HERE
def test_every_row_of_a_file_that_cannot_be_used_is_named(tmp_path, capfd):
    """In place, or with an object: what no look at the text tells."""
    in_place = {
        "text": "Sort in place.",
        "code": "def f(x):\n    x.sort()",
        "test_list": ["x = [2, 1]\nf(x)\nassert x == [1, 2]"],
    }
    generator = {"text": "Count.", "code": "def f(n):\n    yield from range(n)", "test_list": ["assert list(f(2)) == [0, 1]"]}
    path = written(tmp_path / "rows.json", [MBPP, in_place, generator, ROUND, MBPP, MBPP | {"text": "No.", "code": "x = 1"}])
    assert main(["tasks", "code", "--check", str(path)]) == 0
    *rows, last = capfd.readouterr().out.splitlines()
    assert rows == [
        "row 2 its own solution fails: AssertionError",
        "row 3 its own solution fails: Lost: generator is no plain data",
        "row 5 left out: the question is there already",
        "row 6 left out: the solution has no function",
    ]
    longest = max(len(asked.instruction) for asked in code.read(path, "mbpp")[0].values())
    said = f"{path}: 6 rows, 2 of which can be asked and judged by code; the longest prompt has {longest} characters; "
    assert last == said + "with --model they are counted in tokens"


@HERE
def test_a_file_without_a_row_to_use_is_refused(tmp_path, capfd):
    path = written(tmp_path / "rows.json", [MBPP | {"code": "x = 1"}])
    assert main(["tasks", "code", "--check", str(path)]) == 2
    line = capfd.readouterr().err
    assert f"{path}: got no row to use (row 1 left out: the solution has no function); allowed one whose own solution" in line


@HERE
def test_a_prompt_that_is_too_long_is_named_with_its_row(tmp_path):
    path = str(written(tmp_path / "rows.json", [MBPP, ROUND | {"text": "A long question. " * 40}]))
    (tmp_path / "model").mkdir()
    test_loading.llada(tmp_path / "model")
    test_chat.letters(tmp_path / "model")
    tok = checkpoints.load_tokenizer(tmp_path / "model")
    with pytest.raises(ValueError) as caught:
        Code(max_prompt_length=600).check(path, tok)
    assert str(caught.value).startswith("task.max_prompt_length: got 600; allowed from ")
    assert str(caught.value).endswith(f"as {path} row 2 has")
    assert Code(max_prompt_length=2000).check(path, tok).endswith(" tokens")


BAD = [
    ([], "{path}: got no row; allowed one or more"),
    ([MBPP, 5], "{path} row 2: got int; allowed an object"),
    ([MBPP, MBPP | {"code": 5}], "{path} row 2: code: got 5; allowed text"),
    ([MBPP | {"test_list": "assert f()"}], "{path} row 1: test_list: got 'assert f()'; allowed a list of texts"),
    ([MBPP | {"text": None}], "{path} row 1: prompt: missing; the row has task_id, text, code, "),
    ([HUMANEVAL], "{path} row 1: code: missing; the row has task_id, prompt, "),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_a_wrong_file_is_one_line_that_names_file_row_and_field(data, message, tmp_path):
    path = written(tmp_path / "rows.json", data)
    with pytest.raises(ValueError) as error:
        code.read(path, "mbpp")
    assert str(error.value).startswith(message.format(path=path)) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------- answers
ANSWERS = {
    "<answer>f = 1</answer>": "f = 1",
    "So: <answer>\n    f = 1\n</answer> Done.": "    f = 1",
    "<answer>```python\nf = 1\n```</answer>": "f = 1",
    "<answer>\n```\nf = 1\n\n```\n</answer>": "f = 1\n",
    "<answer>```python\nf = '- 1'\n</answer>": "f = '- 1'",
    "```python\nf = 1\n```": "f = 1",
    "<answer>f = 1": "f = 1",
    "Here:\n```\nf = 0\n```\nBetter:\n``` Python3 \r\nf = 1\r\n```<|eot_id|>": "f = 1",
    "<answer>```Python 3.11\nf = 1\n```</answer>": "f = 1",
    'Here:\n```{.python title="f"}\nf = 1\n```': "f = 1",
    "<answer>The program:\n```py\nf = 1\n```\nDone.</answer>": "f = 1",
    "f = 1": "",
    "</answer>f = 1<answer>": "",
    "<answer>f = 1</answer><answer>f = 1</answer>": "f = 1",
    "<answer>f = 1</answer><answer>f = 2</answer>": "",
    "<answer>\n \n</answer>": "",
    "": "",
}


def test_the_program_is_what_stands_between_the_tags():
    assert {response: code.answer(response) for response in ANSWERS} == ANSWERS
    assert code.answer("<answer>" + "x" * 100_000 + "</answer>") == code.answer(None) == ""


# -------------------------------------------------------------------------------------------------- splits and settings
def many(count: int) -> list[dict]:
    return [MBPP | {"text": f"Write function number {n}."} for n in range(count)]


@pytest.fixture
def assumed(monkeypatch):
    """As if there were a sandbox: rows and splits need none."""
    monkeypatch.setattr(sandbox, "refusal", lambda: "")


def test_splits_share_nothing_whatever_the_order_of_the_file(tmp_path, assumed):
    rows = many(200)
    found = []
    for order in (rows, rows[::-1]):
        task = Code(path=str(written(tmp_path / "rows.jsonl", order)))
        held_out = {asked.key for asked in task.held_out(1)}
        while len(held_out) < 200:
            try:
                held_out = {asked.key for asked in task.held_out(len(held_out) + 1)}
            except ValueError as error:
                assert str(error) == f"evaluate.n: got {len(held_out) + 1}; allowed 1 to {len(held_out)}, as are held out"
                break
        train = {asked.key for asked in task.problems(3000, np.random.default_rng(0))}
        assert not held_out & train and len(held_out | train) == 200 and 30 < len(held_out) < 90
        assert train == {asked.key for asked in task.problems(3000, np.random.default_rng(1), "pretrain")}
        assert {asked.key for asked in task.problems(3000, np.random.default_rng(1), "held_out")} == held_out
        found.append(held_out)
    assert found[0] == found[1]
    assert task.problems(9, np.random.default_rng(3)) == Code(path=task.path).problems(9, np.random.default_rng(3))
    assert task.held_out(5) == task.held_out(9)[:5]


def test_a_file_of_held_out_rows_is_taken_out_of_the_others(tmp_path, assumed):
    rows = many(20)
    spaced = [row | {"text": row["text"].replace(" ", "  ")} for row in rows[:5]]
    words = {"path": str(written(tmp_path / "a.json", rows)), "held_out_path": str(written(tmp_path / "b.json", spaced))}
    task = Code(**words)
    assert len(task.held_out(5)) == 5
    assert {asked.key for asked in task.problems(999, np.random.default_rng(0))} == {row["text"] for row in rows[5:]}


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"format": "apps"}, "task.format: got 'apps'; allowed 'mbpp' or 'humaneval'"),
        ({"held_out_share": 0.0}, "task.held_out_share: got 0.0; allowed greater than 0"),
        ({"seconds": 0}, "task.seconds: got 0; allowed greater than 0"),
        ({"prompt_format": "plain"}, "task.prompt_format: got 'plain'; allowed 'chat'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(setting, message):
    with pytest.raises(ValueError) as error:
        config.from_dict(Code, setting, "task.")
    assert str(error.value) == message


def test_no_file_and_an_empty_split_are_named(tmp_path, assumed):
    rng = np.random.default_rng(0)
    with pytest.raises(
        ValueError, match="^task.path: got '.', whose ending is another; allowed .jsonl, .json, .csv, .parquet files$"
    ):
        Code().problems(1, rng)
    path = str(written(tmp_path / "rows.json", [MBPP]))
    with pytest.raises(ValueError, match="^task.path: got .*; allowed a file with problems to train$"):
        Code(path=path, held_out_path=path).problems(1, rng)


# -------------------------------------------------------------------------------------------------- refusals and a run
RUN = {
    "task": {"name": "code", "path": "rows.jsonl", "reward": "share", "max_prompt_length": 500},
    "sampler": {"order": "low_confidence", "temperature": 0.9, "length": 8, "block_length": 8, "tokens_per_step": 4},
    "steps": 1,
    "num_prompts": 1,
    "num_generations": 3,
    "evaluate": {"n": 2},
}


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with a tiny LLaDA checkpoint, rows and a config that names both."""
    (tmp_path / "model").mkdir()
    test_loading.llada(tmp_path / "model")
    test_chat.letters(tmp_path / "model")
    test_chat.with_positions(tmp_path / "model")
    written(tmp_path / "rows.jsonl", many(12))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"model": "model"}), encoding="utf-8")
    return tmp_path


def test_without_a_sandbox_a_run_is_refused_before_it_starts(place, monkeypatch, capfd):
    """One line, exit status 2, nothing written: no fallback."""
    sandbox.refusal.cache_clear()
    monkeypatch.setenv("PATH", "")
    before = sorted(place.rglob("*"))
    assert main(["train", str(place / "run.yaml"), "--out", str(place / "out")]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == f"minidrl: task code: {sandbox.NEEDS}"
    assert [path for path in sorted(place.rglob("*")) if path not in before and path.is_file()] == []
    sandbox.refusal.cache_clear()


@HERE
def test_a_run_from_prompts_to_rewards(place, monkeypatch, capfd):
    """An untrained network writes no program: decoding gives each group one that is right and others."""
    right, wrong = tagged(MBPP["code"]), tagged("def vowels(word, which=''): return 3")
    monkeypatch.setattr(loop, "decode", lambda tok, responses: [(right, wrong, "")[i % 3] for i in range(len(responses))])
    assert main(["train", str(place / "run.yaml"), "--out", str(place / "out")]) == 0
    rows = [json.loads(line) for line in (place / "out/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert rewards == pytest.approx([(1 + 1 / 3) / 3])


def test_a_failing_sandbox_is_no_verdict(monkeypatch):
    """Not a reward of 0, from which a run would learn."""
    monkeypatch.setattr(sandbox, "START", 0.5)
    monkeypatch.setattr(sandbox, "CLOCK", 0)
    monkeypatch.setattr(sandbox, "command", lambda *words: [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(OSError, match="apt install bubblewrap"):
        Code().judge(exercise("mbpp", MBPP), tagged("x = 1"))


def test_verdicts_side_by_side_are_those_one_after_the_other(monkeypatch):
    class Slow:
        at_once = 4

        def judge(self, problem, response):
            return problem, response

    expected = [(problem, f"{problem}{i}") for problem in "abc" for i in range(5)]
    responses = [response for _, response in expected]
    assert tasks.verdicts(Slow(), "abc", responses) == expected
    monkeypatch.setattr(Slow, "at_once", 1)
    assert tasks.verdicts(Slow(), "abc", responses) == expected
