"""Tasks with questions of mathematics: rows, splits, the answer of a response, equality in its limits, rewards."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import tiny
from minidrl.run import config
from minidrl.tasks import equality, mathematics, rows
from minidrl.tasks.mathematics import Gsm8k, Math500
from minidrl.tasks.text import final_answer

pytest.importorskip("math_verify", reason='needs pip install -e ".[math]"')

GSM8K = [
    {"question": "Ann has 3 boxes of 6 eggs. How many eggs?", "answer": "3 boxes hold 3*6=<<3*6=18>>18 eggs.\n#### 18"},
    {"question": "A house costs $1,000 and 80 more. What is that?", "answer": "1000+80=<<1000+80=1080>>1080\n#### 1,080"},
    {"question": "It is 5 degrees and gets 7 colder. How cold is it?", "answer": "5-7=-2\n#### -2"},
]
MATH = [
    {"problem": "Compute $\\frac{1}{2}+1$.", "solution": "It is $\\boxed{\\frac{3}{2}}$.", "answer": "\\frac{3}{2}"},
    {"problem": "Convert $(0,3)$.", "solution": "..", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)"},
    {"problem": "Which way?", "solution": "..", "answer": "\\text{east}"},
]
MATH = [row | {"subject": "Algebra", "level": 2, "unique_id": f"test/algebra/{i}.json"} for i, row in enumerate(MATH)]


def written(folder, name: str, data: list) -> str:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, data)) + "\n" if path.suffix == ".jsonl" else json.dumps(data))
    return str(path)


# --------------------------------------------------------------------------------------------------------------- equality
# By arithmetic, or by what the notation means.
EQUAL = {
    "18": [
        "18",
        " 18 ",
        "$18$",
        "$18",
        "**18**",
        "18.",
        "\\$18",
        "18.0",
        "018",
        "+18",
        "x=18",
        "36/2",
        "\\frac{36}{2}",
        "\\boxed{18}",
        "18 dollars",
        "18\\text{ cm}",
        "18 \\text{ cm}^2",
        "18 cm^2",
        "18 sheets per month",
    ],
    "-2": ["-2", "-2.0", "- 2", "-\\frac{4}{2}"],
    "1080": ["1080", "1,080", "1{,}080", "1080.00"],
    "0.5": ["0.5", ".5", "1/2", "\\frac12", "50\\%"],
    "\\frac{3}{2}": ["3/2", "1.5", "\\dfrac{3}{2}", "\\tfrac32", "\\frac{6}{4}"],
    "\\left( 3, \\frac{\\pi}{2} \\right)": ["(3, \\pi/2)", "(3,\\frac{\\pi}{2})"],
    "x^2-1": ["(x-1)(x+1)", "-1+x^2", "x^2 - 1"],
    "\\sqrt{8}": ["2\\sqrt{2}", "\\sqrt 8"],
    "\\text{east}": ["east", "\\text{east}"],
    "3, 5, 7": ["3,5,7", "\\{3, 5, 7\\}", "\\{3,5,7\\}"],
    "13": ["\\text{13}", "\\textbf{13}", "\\mathbf{13}", "\\mathrm{13}", "= 13", "\\approx 13", "AB=13", "f(2)=13"],
    "-5": ["\\text{-5}"],
    "\\frac12": ["\\text{0.5}"],
    "90": ["90°", "90^\\circ"],
    "90^\\circ": ["90"],
    "10080": ["10\\,080"],
    "60": ["60\\%"],
    "5": ["5 changes/day"],
    "8400": ["\\$8,400"],
    "11,\\! 111,\\! 100": ["11111100"],
    "34": ["42_8"],
    "52_8": ["52", "52_{8}"],
    "3,5": ["5,3"],
    "(2,\\infty)": ["x \\in (2,\\infty)"],
    "(3,4)": ["\\left(3,4\\right)"],
    "\\frac{2^{10}}{2^{11}}": ["\\frac12"],
    "0.0000001": ["0.00000010"],
    "\\frac{\\pi}{10^{20}}": ["\\pi \\cdot 10^{-20}"],
    "east": ["\\text{east}"],
}
DIFFERENT = {
    "18": [
        "",
        "17",
        "-18",
        "180",
        "1 8",
        "18 19",
        "17 or 18",
        "17, 18",
        "18, 17",
        "\\{17,18\\}",
        "18\\pm1",
        "18=17",
        "17=18",
        "17, or the final answer is $18$. I hope",
        "$18$ or $17$",
        "$17$, $18$",
        "**18** or **17**",
        "18 or 19",
        "17 dollars",
        "18 pi",
        "18 minus one",
        "18 ab",
        "18abc",
        "18\\text{ hundred}",
        "18 sin x",
        "2x=18",
        "18x",
        "18 or",
        "18\\text{ or } 19",
    ],
    "1": ["$18", "**18"],
    "9": [
        "1 8",
        "3^2",
        "3\\cdot3",
        "\\sqrt{81}",
        "4+5",
        "\\sum_{i=1}^{9}1",
        "9!",
        "9!/8!",
        "x",
        "nine",
        "٩",
        "⑨",
        "9}{",
        "}9{",
    ],
    "\\frac{3}{2}": ["\\frac{2}{3}", "3", "2", "1+\\frac12"],
    "x^2-1": ["x^2+1", "(x-1)^2", "y^2-1", "x"],
    "\\left( 3, \\frac{\\pi}{2} \\right)": ["(\\frac{\\pi}{2}, 3)", "3", "(3, \\frac{\\pi}{3})"],
    "\\text{east}": ["west", "\\text{west}", "1"],
    "52_8": ["52_9"],
    "204_5": ["204_{10}"],
    "42": ["42_8"],
    "101": ["101_2"],
    "29_8": ["29_8+0"],
    "0.0000001": ["0.0000002"],
    "\\frac{1}{2^{99}}": ["\\frac{1}{2^{98}}"],
    "\\frac{1}{20!}": ["\\frac{1}{19!}"],
    "\\frac{\\pi}{10^{20}}": ["\\frac{\\pi}{10^{19}}", "\\frac{3}{10^{20}}"],
    "(2,4)": ["\\{2,4\\}"],
    "(3,4)": ["(4,3)"],
    "\\left(\\frac16\\right)^{50}": ["\\left(\\frac16\\right)^{49}"],
    "(-2,1)": ["\\{-2,1\\}"],
    "(2,\\infty)": ["2,\\infty"],
    "\\frac{2^{2005}+1}{3 \\cdot 2^{2006}}": ["\\frac{1}{2^{2006}}"],
    "east": ["seat"],
    "5": ["5 hundred", "5 trillion dollars"],
    "2": ["2\\pi", "2 dozen eggs", "2 squared", "2 thirds"],
}


@pytest.mark.parametrize(("cases", "same"), [(EQUAL, True), (DIFFERENT, False)])
def test_what_means_the_same_is_equal_and_what_leaves_the_work_to_the_judge_is_not(cases, same):
    pairs = [(gold, answer) for gold, answers in cases.items() for answer in answers]
    assert [pair for pair in pairs if equality.equal(*pair) != same] == []


def test_endless_work_ends_and_the_next_answer_is_judged():
    """Of each bracket the grammar tries several readings, in all of which 2,000 sums are read again; 2^(2^35) has 4 GB."""
    assert equality.equal("18", "36/2")
    first = equality._judge.pid
    assert equality._ask("x", "(" * 12 + "1+" * 2000 + "1" + ")" * 12) == {"equal": False, "gold": False}
    assert not equality._ask("x", "2^{2^{35}}+y")["equal"]
    assert equality.equal("18", "36/2") and equality._judge.pid != first
    limits = Path(f"/proc/{equality._judge.pid}/limits").read_text()
    assert re.search(f"Max address space +{equality.BYTES} ", limits) and re.search("Max file size +0 ", limits)


def test_after_an_interrupt_the_next_answer_gets_its_own_verdict():
    """It got that of the question before, and so did every answer from then on."""
    assert equality.equal("18", "36/2")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        equality._ask("x", "(" * 12 + "1+" * 2000 + "1" + ")" * 12)
    signal.signal(signal.SIGALRM, before)
    assert [equality.equal("18", answer) for answer in ("36/2", "35/2", "36/2")] == [True, False, True]


@pytest.mark.slow
def test_no_process_outlives_the_one_that_asked():
    code = "from minidrl.tasks import equality; equality.equal('18', '36/2'); print(equality._judge.pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 10
    while (path := Path(f"/proc/{done.stdout.strip()}/stat")).exists() and path.read_text().rpartition(")")[2].split()[
        0
    ] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_of_an_answer_is_evaluated(tmp_path):
    trap = tmp_path / "trap"
    for text in (f"__import__('pathlib').Path('{trap}').touch()", f"open('{trap}','w')", f"\\text{{open('{trap}','w')}}"):
        assert not equality.equal("18", text) and not trap.exists()


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch, tmp_path):
    task = Gsm8k(path=written(tmp_path, "a.jsonl", GSM8K))
    monkeypatch.setattr(equality.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^task gsm8k needs math-verify: pip install 'minidrl\[math\]'$"):
        task.held_out(1)


def test_what_is_no_answer_solves_nothing():
    task = Gsm8k()
    for nothing in (None, 18, b"18", "", "\0", "18", "<answer>17<answer>18", "{" * 10**5, "\\boxed{" * 20_000):
        assert not task.judge(mathematics.Question("?", "18"), nothing).solved
    for endless in ("9^{9^{9^{9}}}", "(9!)!", "(x+y+z)^{99}"):
        assert not task.judge(mathematics.Question("?", "18"), f"<answer>{endless}</answer>").solved


# ---------------------------------------------------------------------------------------------------- the answer, rewards
ANSWERS = {
    "3*6=18. <answer>18</answer>": "18",
    "<answer>\n 18 \n</answer> done": "18",
    "<answer>\\boxed{18}</answer>": "18",
    "so \\boxed{17}, no: \\boxed{\\frac{3}{2}}": "\\frac{3}{2}",
    "\\boxed{\\{1,2\\}}": "\\{1,2\\}",
    "\\boxed{17}<answer>18</answer>": "18",
    "18": "",
    "#### 18": "",
    "<answer>17</answer><answer>18</answer>": "",
    "<answer><answer>18</answer>": "18",
    "</answer>18<answer>": "",
    "<answer>18": "18",
    "<answer>17</answer> no: <answer>\\boxed{18}</answer>": "",
    "<answer>\n</reasoning>\n<answer>\n\\boxed{18}\n</answer>": "18",
    "<answer></answer>\\boxed{18}": "18",
    "<answer>boxed{18}</answer>": "18",
    "<answer>\\boxed{}18</answer>": "18",
    "<answer>18<|eot_id|>17</answer>": "18",
    "<answer>\\boxed{18}": "18",
    "\\boxed{18": "18",
    "\\boxed{18\\}": "18\\}",
    "": "",
    "<answer></answer>": "",
    "<answer>18</answer>" + " " * 100_000: "",
}


@pytest.mark.parametrize("response", ANSWERS, ids=lambda text: repr(text[:30]))
def test_a_response_has_one_answer_or_none(response):
    assert final_answer(response) == ANSWERS[response]


NEAT = "<reasoning>\n3*6\n=18\n</reasoning>\n<answer>\n18\n</answer>\n"
D1 = {  # 2 right, 0.5 digits, 0.5 strict, 0.5 soft, 4 * 0.125 tags; by hand
    NEAT: 4.0,
    NEAT.rstrip("\n"): 4.0,
    NEAT.replace("18\n</", "17\n</"): 2.0,
    NEAT + "x" * 100: 4.0 - 0.5 - 0.1,
    NEAT + "x" * 10_000: 3.0,
    "<reasoning>3*6</reasoning> <answer>18</answer>": 3.0,
    "<answer>18</answer>": 2.5,
    "<answer>18.0</answer>": 2.0,
    "<answer>1,8</answer>": 0.0,
    NEAT.rstrip("\n") + "<|eot_id|>": 4.0,
    "<answer>²</answer>": 0.0,
    "18": 0.0,
    "": 0.0,
}


@pytest.mark.parametrize("response", D1, ids=lambda text: repr(text[:40]))
def test_the_reward_of_d1_on_gsm8k(response):
    task, question = Gsm8k(reward="d1"), mathematics.Question("?", "18")
    assert task.judge(question, response).reward == pytest.approx(D1[response], abs=1e-12)


def test_the_reward_of_d1_on_math500():
    task, question = Math500(reward="d1"), mathematics.Question("?", "\\frac{3}{2}")
    paid = {"<answer>\\boxed{1.5}</answer>": 3.0, "<answer>1.5</answer>": 2.75, "\\boxed{1.5}": 2.5, "1.5": 0.25}
    paid |= {"<answer>\\boxed{1}</answer>": 1.0, "<answer>1</answer>": 0.75, "\\boxed{1}": 0.5, "": 0.25}
    assert {response: task.judge(question, response).reward for response in paid} == paid


@pytest.mark.parametrize("kind", [Gsm8k, Math500])
def test_reasoning_tags_are_asked_for_where_they_are_paid_for(kind):
    """In the instruction of a question, after its text."""
    asked = {reward: kind(reward=reward).asked("1+1?", "2", "").instruction for reward in ("d1", "correctness")}
    assert {reward: "<reasoning>" in text for reward, text in asked.items()} == {"d1": True, "correctness": False}
    assert all(text.startswith("1+1?\n\n") and "<answer>" in text for text in asked.values())


# ------------------------------------------------------------------------------------------------------- rows and splits


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_file_of_each_kind_gives_the_same_rows_as_the_package_datasets(name, tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / name
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(MATH).to_parquet(str(path))
    else:
        written(tmp_path, name, MATH)
    kind = "parquet" if path.suffix == ".parquet" else "json"
    loaded = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.of_file("task.path", path) == loaded.to_list() == MATH
    assert [q.gold for q in Math500(path=str(path)).held_out(3)] == [row["answer"] for row in MATH]


def test_a_data_set_in_the_layout_of_the_hub_is_read_by_split(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for split, data in {"train": GSM8K[:2], "test": GSM8K[2:]}.items():
        written(tmp_path / "set", f"{split}.jsonl", data)
    source = (str(tmp_path / "set"), "", Gsm8k.revision)
    assert rows.of_hub(*source, "test") == GSM8K[2:]
    assert rows.of_hub(*source, "train") == GSM8K[:2]
    with pytest.raises(ValueError, match="'validation' cannot be loaded .*; allowed a data set of the Hub, or task.path"):
        rows.of_hub(*source, "validation")


def test_the_default_is_a_pinned_commit_of_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(rows, "of_hub", lambda *source: asked.append(source) or GSM8K[len(asked) - 1 :])
    assert len(Gsm8k().held_out(1)) == 1
    assert asked == [("openai/gsm8k", "main", Gsm8k.revision, split) for split in ("test", "train")]
    asked.clear()
    monkeypatch.setattr(rows, "of_hub", lambda *source: asked.append(source) or MATH)
    assert len(Math500().held_out(3)) == 3 and [source[-1] for source in asked] == ["test"]
    with pytest.raises(ValueError, match="^task.train_path: got ''; allowed a file with problems to train$"):
        Math500().problems(1, np.random.default_rng(0))


def test_training_questions_that_are_held_out_are_removed_and_counted(tmp_path, caplog):
    again = {"question": GSM8K[0]["question"].upper().replace(" ", "\n "), "answer": "#### 18"}
    train = written(tmp_path, "train.jsonl", [again, GSM8K[1], GSM8K[1], again])
    test = written(tmp_path, "test.jsonl", [GSM8K[0], GSM8K[2], GSM8K[0]])
    task = Gsm8k(path=test, train_path=train)
    assert {q.text for q in task.problems(50, np.random.default_rng(0))} == {GSM8K[1]["question"]}
    assert [q.text for q in task.held_out(2)] == [GSM8K[0]["question"], GSM8K[2]["question"]]
    assert caplog.messages == ["task gsm8k: removed 4 problems that are held out or stand there twice"]
    with pytest.raises(ValueError, match="^task.train_path: got .*; allowed a file with problems to train$"):
        Gsm8k(path=test, train_path=test).problems(1, np.random.default_rng(0))


def test_held_out_is_a_prefix_and_ends_where_the_file_ends(tmp_path):
    task = Gsm8k(path=written(tmp_path, "test.jsonl", GSM8K))
    assert task.held_out(3)[:2] == task.held_out(2) and [q.gold for q in task.held_out(3)] == ["18", "1080", "-2"]
    for count, said in {
        0: "evaluate.n: got 0; allowed 1 to 3, as are held out",
        4: "evaluate.n: got 4; allowed 1 to 3, as are held out",
    }.items():
        with pytest.raises(ValueError, match=said):
            task.held_out(count)


# sha256 of the prompts that dllm-reasoning/d1 at 837888f makes of the question "What is 2+2?", by running its own code.
PUBLISHED = {
    (Gsm8k, "d1"): "efb3960963d31507",
    (Math500, "d1"): "c3579e22035c0d07",
    (Gsm8k, "d1-eval"): "d4ab9d7c5ae9f325",
    (Math500, "d1-eval"): "c068c6ebc4d6df10",
}


@pytest.mark.parametrize(("kind", "wording"), PUBLISHED)
def test_published_wordings_are_those_of_the_released_code_to_the_blank(kind, wording, tmp_path):
    asked = {"question": " What is 2+2?\n", "problem": "What is 2+2?", "answer": "#### 4", "solution": ".."}
    task = kind(path=written(tmp_path, "a.jsonl", [asked]), wording=wording)
    (question,) = task.held_out(1)
    assert hashlib.sha256(question.instruction.encode()).hexdigest()[:16] == PUBLISHED[kind, wording]
    assert question.opening == ("<reasoning>" if wording == "d1-eval" else "")
    assert question.prompt == f"{question.instruction}\n{question.opening}"


def test_a_wording_that_a_reward_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="^task.reward: got 'd1'; allowed correctness with wording d1-eval"):
        Gsm8k(wording="d1-eval", reward="d1")


WRONG = {
    "task.path: got '{0}/a.txt', whose ending is another; allowed .jsonl, .json, .csv, .parquet files": ("a.txt", "x"),
    "{0}/a.jsonl: got no row": ("a.jsonl", "\n\n"),
    "{0}/a.jsonl row 2: got list; allowed an object": ("a.jsonl", '{"question": "?", "answer": "#### 1"}\n[1]'),
    "{0}/a.jsonl row 1: question: missing; the row has problem": ("a.jsonl", '{"problem": 1}'),
    "{0}/a.jsonl row 1: question: got 5; allowed text that is not blank": ("a.jsonl", '{"question": 5, "answer": ""}'),
    "{0}/a.jsonl row 1: answer: got '18'; allowed a solution that ends": ("a.jsonl", '{"question": "?", "answer": "18"}'),
    "{0}/a.json row 1: answer: got '#### 1,00'": ("a.json", '[{"question": "?", "answer": "#### 1,00"}]'),
    "{0}/a.jsonl row 2 cannot be read": ("a.jsonl", '{"question": "?", "answer": "#### 1"}\n{"question": "'),
    "{0}/a.jsonl cannot be read": ("a.jsonl", b"\xff"),
    "{0}/a.parquet cannot be read as parquet": ("a.parquet", b"PAR1"),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_file_is_named_with_row_and_field(said, tmp_path):
    name, content = WRONG[said]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        Gsm8k(path=str(tmp_path / name)).held_out(1)
    assert said.format(tmp_path) in str(caught.value)


def test_a_wrong_setting_is_named_with_what_is_allowed():
    allowed = {"reward": "'correctness' or 'd1'", "wording": "'ours', 'd1' or 'd1-eval'", "protocol": "'ours' or 'd1'"}
    for setting, words in allowed.items():
        with pytest.raises(ValueError, match=f"^task.{setting}: got 'x'; allowed {words}$"):
            config.from_dict(Math500, {setting: "x"}, "task.")


def test_a_config_names_files_beside_itself(tmp_path):
    written(tmp_path, "test.jsonl", GSM8K)
    sampler = {"order": "random", "temperature": 1.0, "length": 4, "block_length": 4, "tokens_per_step": 1}
    data = {"task": {"name": "gsm8k", "path": "test.jsonl", "reward": "d1"}, "sampler": sampler}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    task = config.load(config.Train, tmp_path / "run.yaml").task
    assert task == Gsm8k(path=str(tmp_path / "test.jsonl"), reward="d1") and len(task.held_out(3)) == 3
    with pytest.raises(ValueError, match="init: got '' with task gsm8k, which has no alphabet of its own"):
        tiny.pretraining(task=task)
