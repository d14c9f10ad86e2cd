"""Files and checkpoints of users: what is too long, has changed, never ends or cannot be read is told, and nothing is lost."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml

import test_loading
import tiny
from minidrl import denoiser, sampler
from minidrl.run import checkpoints, folders
from minidrl.run.cli import main
from minidrl.tasks import code, countdown, rows, sudoku, text
from minidrl.tasks.countdown import tokenizer
from minidrl.tasks.mathematics import Gsm8k, Math500, Question

LIMIT = 220
RUN = {"model": "chat", "steps": 4, "num_prompts": 2, "num_generations": 3, "save_every": 2, "evaluate": {"n": 2}}
RUN |= {"sampler": {"order": "left_to_right", "temperature": 1.0, "length": 4, "block_length": 4, "tokens_per_step": 2}}


def question(words: int) -> dict:
    return {"question": "How many are " + " and ".join(["1"] * words) + "?", "answer": f"So.\n#### {words}"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A model that knows letters, rows of which the twelfth is too long, and a config."""
    pytest.importorskip("math_verify", reason='needs pip install -e ".[math]"')
    tok = tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tok.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}\nA:"
    checkpoints.save(denoiser.build(tiny.SIZES | {"max_position_embeddings": 512}, tok, 0), tok, tmp_path / "chat")
    (tmp_path / "test.json").write_text(json.dumps([question(n) for n in (1, 2)]))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(question(n)) + "\n" for n in (*range(3, 9), 40, 9, 10)))
    task = {"name": "gsm8k", "path": "test.json", "train_path": "train.jsonl", "max_prompt_length": LIMIT}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"task": task}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(capfd, *words: str) -> tuple[int, str]:
    capfd.readouterr()
    status = main(["train", "run.yaml", "--out", "run", *words])
    return status, capfd.readouterr().err


def test_a_quoted_field_of_csv_may_hold_a_line_break(tmp_path):
    (tmp_path / "rows.csv").write_text('question,answer\n"One\ntwo?","So.\n#### 3"\n')
    assert rows.of_file("data", tmp_path / "rows.csv") == [{"question": "One\ntwo?", "answer": "So.\n#### 3"}]


def test_the_longest_prompt_is_named_before_the_first_step(folder, capfd):
    status, said = train(capfd)
    line = "train.jsonl row 7 has\n"
    assert status == 2 and said.startswith(f"minidrl: task.max_prompt_length: got {LIMIT}; allowed from ")
    assert said.endswith(line) and not (folder / "run").exists()
    needed = int(said.split("from ")[1].split(",")[0])
    assert train(capfd, "--task.max_prompt_length", str(needed - 1))[0] == 2
    assert train(capfd, "--task.max_prompt_length", str(needed), "--steps", "1")[0] == 0


@pytest.mark.parametrize(("name", "file", "rows"), [
    ("sudoku", "puzzles.csv", "Puzzle\n3000000000000000\n3142243142131320\n"),
    ("countdown", "puzzles.jsonl", '{"input": "30,100", "output": "130"}\n{"input": "30,100,93", "output": "23"}\n'),
    ("gsm8k", "test.json", json.dumps([question(3), question(30)])),
])  # fmt: skip
def test_every_task_with_files_names_the_row(name, file, rows, folder, capfd):
    (folder / file).write_text(rows)
    words = ["--task.name", name, "--task.path", file, "--task.prompt_format", "chat", "--task.max_prompt_length", "20"]
    status, said = train(capfd, *words, *(["--task.train_path", "train.jsonl"] if name == "gsm8k" else []))
    assert status == 2 and said.splitlines()[-1].startswith("minidrl: task.max_prompt_length: got 20; allowed from ")
    assert f"{'train.jsonl row 7' if name == 'gsm8k' else file + ' row '}" in said


def test_a_limit_may_be_raised_at_resume_and_a_changed_file_may_not(folder, capfd):
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(line for line in lines if len(line) < LIMIT))
    assert train(capfd, "--steps", "2")[0] == 0
    status, said = train(capfd, "--resume", "--task.max_prompt_length", "400", "--task.reward", "d1")
    assert (
        status == 2
        and "task.reward: got 'd1'; allowed 'correctness', with which the run in run/checkpoint-2 was started" in said
    )
    shutil.copy(folder / "train.jsonl", folder / "kept")
    for key, file in (("train_path", "train.jsonl"), ("path", "test.json")):
        before = (folder / file).read_bytes()
        (folder / file).write_bytes(before.replace(b"are 1", b"are  1"))
        status, said = train(capfd, "--resume", "--steps", "3")
        assert status == 2 and f"task.{key}: got '{folder / file}', which has changed since run/checkpoint-2 was" in said
        assert said.endswith("allowed the file as it was, or another --out, for a new run from run/checkpoint-2\n")
        (folder / file).write_bytes(before)
    assert train(capfd, "--resume", "--steps", "3", "--task.max_prompt_length", "400")[0] == 0
    assert [row["step"] for row in folders.read_metrics("run") if "reward" in row] == [1, 2, 3]
    # Of an older version, whose state knows no data.
    state = folder / "run/checkpoint-3/state.json"
    state.write_text(json.dumps({key: value for key, value in json.loads(state.read_text()).items() if key != "data"}))
    (folder / "train.jsonl").write_text("".join(lines[:3]))
    assert train(capfd, "--resume", "--task.max_prompt_length", "400")[0] == 0


def test_answers_that_cannot_be_read_are_told_once(folder, capfd):
    status, said = train(capfd, "--task.max_prompt_length", "400")
    rows = [row for row in folders.read_metrics("run") if "reward" in row]
    assert status == 0 and all(row["completions/readable"] == 0 for row in rows) and "readable=0.0%" in said
    assert said.count("can be read by the verifier of gsm8k") == 1
    assert "see sampler.length, task.prompt_format, task.wording, task.protocol" in said


@pytest.mark.parametrize(("platform", "line"), [
    ("win32", "minidrl: Windows itself cannot run this; under WSL 2 everything works"),
    ("darwin", "minidrl: task gsm8k needs Linux, as macOS limits no process's memory"),
])  # fmt: skip
def test_where_it_cannot_run_one_line_says_so(platform, line, folder, capfd, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    assert train(capfd) == (2, line + "\n") and not (folder / "run").exists()


COUNTDOWN_CHAT = countdown.Countdown(prompt_format="chat")
COUNTDOWN_D1 = countdown.Countdown(prompt_format="chat", protocol="d1")
SUM = Question("?", "18")
CLUES = countdown.Puzzle((5, 6, 8), 46), sudoku.Puzzle("23144.2.3.4.1.3.")
READ = [  # task, problem, response: can it be read?
    (countdown.Countdown(), CLUES[0], "5*8=40+6=46", True),
    (countdown.Countdown(), CLUES[0], "5*8=40+", False),
    (countdown.Countdown(), CLUES[0], "21-22=1", True),
    (countdown.Countdown(), CLUES[0], "<answer>5+6</answer>", False),
    (countdown.Countdown(), CLUES[0], None, False),
    (COUNTDOWN_CHAT, CLUES[0], "<answer>5+6</answer>", True),
    (COUNTDOWN_CHAT, CLUES[0], "<answer>5*8+6=47</answer>", True),
    (COUNTDOWN_CHAT, CLUES[0], "<answer>the answer is 5*8+6</answer>", False),
    (COUNTDOWN_CHAT, CLUES[0], "5*8+6", False),
    (COUNTDOWN_D1, CLUES[0], "<answer>\\boxed{5+6}</answer>", True),
    (COUNTDOWN_D1, CLUES[0], "<answer>5*8+6</answer>", False),  # without a box that rule reads the tags, too
    (sudoku.Sudoku(), CLUES[1], "1" * 16, True),
    (sudoku.Sudoku(), CLUES[1], "4" * 16, True),  # no clue kept, no cell right
    (sudoku.Sudoku(), CLUES[1], "3" * 15, False),
    (sudoku.Sudoku(prompt_format="chat", protocol="d1"), CLUES[1], "<answer>2314</answer>", True),
    (sudoku.Sudoku(prompt_format="chat", protocol="d1"), CLUES[1], "<answer>no idea</answer>", False),
    (code.Code(), None, "I cannot.", False),
    (Gsm8k(), SUM, "<answer>17</answer>", True),
    (Gsm8k(), SUM, "It is 18.", False),
    (Gsm8k(protocol="d1"), SUM, "<answer>seventeen</answer>", False),
    (Math500(protocol="d1"), SUM, "so \\boxed{17}", True),
    (Math500(protocol="d1"), SUM, "It is 18.", False),
]


@pytest.mark.parametrize(("task", "problem", "response", "readable"), READ)
def test_what_a_verifier_can_read(task, problem, response, readable):
    assert task.judge(problem, response).readable == readable


@pytest.mark.parametrize("words", ["ours", "d1"])
def test_an_endless_answer_and_nested_tags_earn_nothing_in_bounded_time(words):
    made, started = {"prompt_format": "chat", "protocol": words}, time.perf_counter()
    asked = [(countdown.Countdown(**made), CLUES[0]), (sudoku.Sudoku(**made), CLUES[1])]
    asked += [(kind(**made), SUM) for kind in (Gsm8k, Math500)]
    for task, problem in asked:
        for inside in (
            "18" * 50_000,
            "<answer>" * 2000 + "</answer>" * 2000,
            "\\boxed{" * 2000 + "}" * 2000,
            "<answer></answer>" * 2000,
        ):
            verdict = task.judge(problem, f"<answer>{inside}</answer>")
            assert (verdict.reward, verdict.solved) == (0, False)
    assert time.perf_counter() - started < 10


# ------------------------------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize("told", [[260, 258], 258, [258], None])
def test_every_end_of_tokenizer_and_generation_config_ends_an_answer(told, tmp_path):
    """A2D whose tokenizer ends with <|im_end|> (260): <|endoftext|> (258) does so where generation_config.json names it."""
    test_loading.a2d(tmp_path)
    if told is not None:
        test_loading.write(tmp_path / "generation_config.json", {"eos_token_id": told})
    _, tok = checkpoints.load(tmp_path)
    ends = text.end_ids(tok)
    assert ends == ([260] if told is None else [260, 258])
    response = torch.tensor([[65, 66, 258, 258, 258, 260], [65, 66, 67, 260, 258, 258], [65, 66, 67, 68, 69, 70]])
    kept = sampler.keep_mask(response, ends).sum(1).tolist()
    texts = text.decode(tok, response)
    assert kept == ([6, 4, 6] if told is None else [3, 4, 6])
    assert texts[1] == tok.decode([65, 66, 67]) and ("<|endoftext|>" in texts[0]) == (told is None)


def test_a_rollout_stops_at_any_end_and_the_rest_is_the_first():
    """Blocks after one with either end are not revealed: the network is asked less, and the tokens there are EOS."""
    model, words = tiny.tabular(), {"num_generations": 40, "generator": torch.Generator().manual_seed(0)}
    settings = sampler.Sampler(order="left_to_right", temperature=1.0, length=4, block_length=1, tokens_per_step=1)
    prompt = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool)
    made = sampler.generate(model, *prompt, settings, eos_token_id=[2, 0], **words)
    assert {0, 2} <= set(made.response[made.unmask_step == 0].tolist()) and (made.unmask_step == -1).any()
    for row, kept, step in zip(made.response.tolist(), made.lengths.tolist(), made.unmask_step.tolist(), strict=True):
        first = next((i for i, token in enumerate(row) if token in (0, 2)), 3)
        assert kept == first + 1 and step == [*range(kept), *[-1] * (4 - kept)] and row[kept:] == [2] * (4 - kept)


def test_math_rows_of_a_training_file_are_measured_too(tmp_path):
    """The neighbour: LaTeX, whose training file is another than the one that is held out."""
    pytest.importorskip("math_verify", reason='needs pip install -e ".[math]"')
    row = {"problem": "What is $1+1$?", "solution": r"It is $\boxed{2}$.", "answer": "2"}
    for name, given in {"test": [row], "train": [row | {"problem": f"What is ${n}$?"} for n in (3, 4)]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(given))
    paths = {"path": str(tmp_path / "test.json"), "train_path": str(tmp_path / "train.json")}
    found = Math500(**paths).from_files()
    assert [problem.place.rpartition("/")[2] for problem in found] == [
        "test.json row 1",
        "train.json row 1",
        "train.json row 2",
    ]
