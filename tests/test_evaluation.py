"""Evaluation by a protocol: batches, stops, lengths, intervals, files, comparison; and files that are checked row by row."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import tiny
from minidrl import sampler
from minidrl.run import cli, evaluation, files, intervals, trainer
from minidrl.run.cli import main
from minidrl.tasks.countdown import tokenizer
from minidrl.tasks.text import encode_prompts
from test_cli import refused, run

HOW = {"n": 9, "samples": 2, "seed": 3}


@pytest.fixture(scope="module")
def model():
    return tiny.network()


def evaluated(model, **changes) -> dict:
    settings = changes.pop("settings", tiny.SAMPLER)
    return evaluation.evaluate(model, tokenizer(), tiny.TASK, settings, **(HOW | changes))


def without_clock(found: dict) -> dict:
    return found | {"result": {key: value for key, value in found["result"].items() if key != "seconds"}}


# --------------------------------------------------------------------------------------------------------- what is invariant
ORDERS = [("random", 1.0), ("low_confidence", 0.7), ("left_to_right", 1.3), ("low_confidence", 0.0)]


@pytest.mark.parametrize(("order", "temperature"), ORDERS)
def test_the_batch_changes_nothing(order, temperature, model):
    settings = dataclasses.replace(tiny.SAMPLER, order=order, temperature=temperature, length=8, block_length=4)
    found = [without_clock(evaluated(model, settings=settings, batch=batch)) for batch in (18, 1, 3, 8)]
    assert found[0] == found[1] == found[2] == found[3]
    assert temperature == 0 or len({row["text"] for row in found[0]["rows"]}) > 3


def test_in_a_chat_the_width_is_that_of_the_whole_set(tmp_path):
    """Prompts of several lengths: padded to the longest of all, whoever is in the batch."""
    pytest.importorskip("math_verify")
    task, tok, net = chat_task(tmp_path), chat_tokenizer(), chat_network()
    settings = dataclasses.replace(tiny.SAMPLER, order="low_confidence", length=8)
    how = {"n": 5, "seed": 1}
    found = [without_clock(evaluation.evaluate(net, tok, task, settings, batch=b, **how)) for b in (5, 1, 3)]
    assert found[0] == found[1] == found[2]
    lengths = {len(tok(q.instruction).input_ids) for q in task.held_out(5)}
    assert len(lengths) == 5 and found[0]["protocol"]["prompt_width"] > max(lengths)


def test_the_numbers_are_those_of_the_evaluation_during_training(model):
    settings = dataclasses.replace(tiny.SAMPLER, order="random")
    told = trainer.evaluate(model, tokenizer(), tiny.TASK, settings, n=20, seed=2, samples=2)
    found = evaluation.evaluate(model, tokenizer(), tiny.TASK, settings, n=20, seed=2, samples=2, batch=7)
    assert {key: found["result"][key] for key in told} == pytest.approx(told)


def test_tokens_are_those_generated_up_to_the_end_and_never_the_prompts(model):
    settings = dataclasses.replace(tiny.SAMPLER, order="random", length=8)
    found = evaluated(model, settings=settings, n=30, samples=1)
    prompt, mask = encode_prompts(tokenizer(), tiny.TASK.held_out(30), tiny.TASK.prompt_length)
    generator = trainer.keyed_generator(3, 0, "evaluate")
    made = sampler.generate(model, prompt, mask, settings, eos_token_id=2, generator=generator)
    for row, response in zip(found["rows"], made.response.tolist(), strict=True):
        assert row["tokens"] == (response.index(2) + 1 if 2 in response else 8)
    assert found["result"]["tokens"] == sum(row["tokens"] for row in found["rows"])
    assert {row["tokens"] for row in found["rows"]} > {8}


# ------------------------------------------------------------------------------------------------------------- the protocol
CHANGES = {
    "n": {"n": 8},
    "skip": {"skip": 1},
    "samples": {"samples": 1},
    "seed": {"seed": 4},
    "order": {"settings": dataclasses.replace(tiny.SAMPLER, order="random")},
    "temperature": {"settings": dataclasses.replace(tiny.SAMPLER, temperature=0.5)},
    "length": {"settings": evaluation.with_length(tiny.SAMPLER, 6)},
    "steps": {"settings": dataclasses.replace(tiny.SAMPLER, tokens_per_step=2)},
    "block_length": {"settings": dataclasses.replace(tiny.SAMPLER, block_length=2)},
    "cache": {"settings": dataclasses.replace(tiny.SAMPLER, cache="prefix")},
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_decides_a_number_is_in_the_protocol(key, model):
    before, after = evaluated(model)["protocol"], evaluated(model, **CHANGES[key])["protocol"]
    assert key in evaluation.differing(before, after)


def test_other_problems_and_other_words_change_the_hashes(tmp_path):
    pytest.importorskip("math_verify")
    task, tok = chat_task(tmp_path), chat_tokenizer()

    def hashes(task, tok):
        problems = task.held_out(3)
        asked = encode_prompts(tok, problems, task.prompt_length, "cpu", "chat")
        how = evaluation.protocol(task, problems, *asked, tiny.SAMPLER, skip=0, seed=0, samples=1)
        return how["problems"], how["prompts"], how["shots"]

    before = hashes(task, tok)
    other = chat_task(tmp_path, [row | {"answer": "#### 5"} for row in ROWS])  # another known answer, the same question
    assert hashes(other, tok)[0] != before[0] and hashes(other, tok)[1] == before[1]
    tok.chat_template += "."
    assert hashes(task, tok)[0] == before[0] and hashes(task, tok)[1] != before[1]


def test_the_result_file_says_who_made_it(model):
    found = evaluated(model)["made_by"]
    head = subprocess.run(["git", "-C", str(tiny.ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert (found["commit"] or "").removesuffix("+") == head and found["torch"] == torch.__version__
    assert (found["device"], found["dtype"]) == ("cpu", "float32")
    other = tiny.network()
    before = evaluation.weights_mark(other)
    assert before == evaluation.weights_mark(tiny.network()) == found["weights"]
    with torch.no_grad():
        other.model.lm_head.weight += 1e-3
    assert evaluation.weights_mark(other) != before


def test_a_task_without_examples_has_no_shots_in_its_protocol(model):
    assert evaluated(model)["protocol"]["shots"] == 0


def test_the_commit_has_a_plus_where_the_files_differ_from_it(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(evaluation, "__file__", str(tmp_path / "evaluation.py"))
    assert evaluation._commit() is None
    (tmp_path / "evaluation.py").write_text("")
    git("init")
    assert evaluation._commit() is None
    git("add", ".")
    git("commit", "-m", "x")
    assert evaluation._commit() == git("rev-parse", "HEAD")
    (tmp_path / "evaluation.py").write_text("x = 1")
    assert evaluation._commit() == git("rev-parse", "HEAD") + "+"


# Newcombe (1998), Statistics in Medicine 17, table I, method 3: the score method without correction.
NEWCOMBE = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}


@pytest.mark.parametrize("counts", NEWCOMBE)
def test_wilsons_interval_is_the_printed_one(counts):
    found = intervals.wilson(*counts)
    assert found[1:] == pytest.approx(NEWCOMBE[counts], abs=5.1e-5) and found.mean == counts[0] / counts[1]
    mirrored = intervals.wilson(counts[1] - counts[0], counts[1])
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx(found[1:])


def test_wilsons_interval_of_one_puzzle_by_hand():
    """p = 1, n = 1: (1 + z^2 / 2 -+ z^2 / 2) / (1 + z^2) is 1 / (1 + z^2), or 1; at 95 % z^2 = 3.8415."""
    assert intervals.wilson(1, 1) == pytest.approx((1, 1 / 4.8415, 1), abs=1e-5)
    assert intervals.wilson(0, 1) == pytest.approx((0, 0, 3.8415 / 4.8415), abs=1e-5)


def test_wilsons_interval_refuses_what_is_no_share():
    for counts in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="successes: got"):
            intervals.wilson(*counts)


# ------------------------------------------------------------------------------------------------------- stopping, going on


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_an_evaluation_that_was_killed_goes_on_where_it_was(batches, model, tmp_path, monkeypatch):
    whole = without_clock(evaluated(model, batch=4, out=tmp_path / "whole.json"))
    calls, generate = [], sampler.generate

    def counted(*args, **words):
        calls.append(words["rows"].tolist())
        return generate(*args, **words)

    def broken(path, line):
        if len(calls) > batches:  # the batch is computed, half of its line is written
            with path.open("a") as file:
                file.write(line[: len(line) // 2])
            raise Killed
        files_append(path, line)

    files_append = files.append
    monkeypatch.setattr(sampler, "generate", counted)
    monkeypatch.setattr(files, "append", broken)
    with pytest.raises(Killed):
        evaluated(model, batch=4, out=tmp_path / "a.json")
    monkeypatch.setattr(files, "append", files_append)
    calls.clear()
    again = evaluated(model, batch=5, out=tmp_path / "a.json")
    assert without_clock(again) == whole
    assert sorted(sum(calls, [])) == list(range(4 * batches, 18))


def test_rows_of_another_protocol_or_other_weights_are_refused(model, tmp_path):
    evaluated(model, out=tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"an evaluation that differs in seed; allowed another --out"):
        evaluated(model, out=tmp_path / "a.json", seed=4)
    with pytest.raises(ValueError, match="an evaluation that differs in weights"):
        evaluated(tiny.network(seed=1), out=tmp_path / "a.json")
    path = tmp_path / "a.json.4.rows"
    path.write_text(path.read_text() + "5\n")
    with pytest.raises(ValueError, match="a.json.4.rows line 3: got 5; allowed rows"):
        evaluated(model, out=tmp_path / "a.json")


def test_a_process_that_is_killed_leaves_rows_and_the_same_command_finishes(tmp_path):
    base = str(tiny.ROOT / "tiny_configs/bases/countdown_base")
    words = [sys.executable, "-m", "minidrl", "evaluate", base, "--n", "20", "--batch", "1", "--out", "a.json"]
    env = os.environ | {"PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    rows = tmp_path / "a.json.12.rows"
    deadline = time.monotonic() + 240
    while not (rows.exists() and rows.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = rows.read_text().count("\n") - 1
    assert 3 <= left < 20 and not (tmp_path / "a.json").exists()
    subprocess.run(words, cwd=tmp_path, env=env, check=True, stdout=subprocess.DEVNULL)
    [found] = evaluation.read(tmp_path / "a.json")
    assert len(found["rows"]) == 20 and not rows.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# -------------------------------------------------------------------------------------------------- command line, comparison


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tiny.checkpoint(tmp_path / "base")
    data = {"task": {"num_numbers": 2}, "sampler": dataclasses.asdict(tiny.SAMPLER)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lengths_are_evaluated_one_by_one_and_two_files_are_compared(folder, capfd):
    words = ["evaluate", "base", "--config", "run.yaml", "--n", "12"]
    status, out, _ = run(capfd, *words, "--length", "4,8", "--out", "a.json")
    assert status == 0 and [line.partition(":")[0] for line in out.splitlines()] == ["length 4", "length 8"]
    run(capfd, *words, "--length", "8,6", "--out", "b.json")
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "base", "run.yaml"]
    status, out, _ = run(capfd, "evaluate", "--compare", "a.json", "b.json")
    assert status == 0 and out.startswith("length 8: ") and "+0.0 points" in out and "made by the same" in out
    run(capfd, *words, "--length", "8", "--seed", "5", "--sampler.order", "random", "--out", "c.json")
    said = refused(capfd, "evaluate", "--compare", "a.json", "c.json")
    assert "not comparable: got a.json and c.json, which differ in order ('left_to_right', 'random'), seed (0, 5)" in said
    run(capfd, *words, "--length", "6", "--out", "d.json")
    assert "with lengths 4, 8, d.json with 6; allowed" in refused(capfd, "evaluate", "--compare", "a.json", "d.json")


def result(folder: Path, name: str, solved: list[int]) -> Path:
    rows = [{"problem": i, "sample": 0, "solved": bool(x), "tokens": 1} for i, x in enumerate(solved)]
    how = {"n": len(solved), "samples": 1, "length": 4}
    found = {"protocol": how, "made_by": {"model": name}, "result": {"solved": sum(solved) / len(solved)}, "rows": rows}
    (folder / name).write_text(json.dumps({"evaluations": [found]}))
    return folder / name


def test_the_difference_is_paired_and_its_interval_that_of_student(tmp_path):
    """Differences 1, 1, 1, 0, 0, 0, 0, -1 by hand: mean 1/4, variance (3.5) / 7, t(7) = 2.365 of the printed table."""
    a = result(tmp_path, "a.json", [0, 0, 0, 0, 1, 0, 1, 1])
    b = result(tmp_path, "b.json", [1, 1, 1, 0, 1, 0, 1, 0])
    half = 2.365 * (0.5 / 8) ** 0.5
    said = evaluation.compare(a, b)
    assert "37.5% and 62.5%; second less first +25.0 points" in said
    assert f"[{100 * (0.25 - half):.1f}, {100 * (0.25 + half):.1f}]" in said
    assert "of 8 problems the first solves 1 more often, the second 3; made by another model" in said


def test_of_one_problem_there_is_no_interval_and_of_two_there_is(tmp_path):
    """Differences 0 and 1: 1/2 and 12.706 of t(1) times 1/2; p = 1/2, as the distribution is Cauchy's."""
    one = [result(tmp_path, f"{i}.json", [i]) for i in (0, 1)]
    assert "; second less first" not in evaluation.compare(*one)
    two = [result(tmp_path, f"{i}.json", [0, i]) for i in (0, 1)]
    assert "; second less first +50.0 points, 95 % interval [-585.3, 685.3], p = 0.5;" in evaluation.compare(*two)


DAMAGED = [
    "",
    "{",
    "[]",
    "{}",
    '{"evaluations": []}',
    '{"evaluations": [1]}',
    '{"evaluations": [{"protocol": {}}]}',
    "[" * 9999,
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:20])
def test_what_is_no_result_is_refused(text, folder, capfd):
    (folder / "a.json").write_text(text)
    assert "a.json" in refused(capfd, "evaluate", "--compare", "a.json", "a.json")


@pytest.mark.parametrize("share", [0.5, float("nan"), "x", None])
def test_a_solved_rate_that_is_not_that_of_the_rows_is_refused(share, tmp_path):
    path = result(tmp_path, "a.json", [0, 1, 1])
    data = json.loads(path.read_text())
    assert evaluation.read(path) == data["evaluations"]
    data["evaluations"][0]["result"]["solved"] = share
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="which holds no evaluation"):
        evaluation.read(path)


@pytest.mark.parametrize("wrong", [{"problem": 3}, {"problem": 1}, {"solved": 1}, {"tokens": -1}, {"sample": None}])
def test_rows_that_do_not_fit_the_protocol_are_refused(wrong, tmp_path):
    path = result(tmp_path, "a.json", [0, 1, 1])
    data = json.loads(path.read_text())
    data["evaluations"][0]["rows"][0] |= wrong
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="which holds no evaluation"):
        evaluation.read(path)


@pytest.mark.parametrize("wrong", [{"n": 4}, {"n": 2}, {"n": None}, {"n": "3"}, {"samples": 2}, {"samples": None}])
def test_another_number_of_rows_than_the_protocol_says_is_refused(wrong, tmp_path):
    path = result(tmp_path, "a.json", [0, 1, 1])
    data = json.loads(path.read_text())
    data["evaluations"][0]["protocol"] |= wrong
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="which holds no evaluation"):
        evaluation.read(path)


def test_a_length_that_the_model_cannot_hold_is_refused(folder, capfd):
    most = tiny.network().model.config.max_position_embeddings
    said = refused(capfd, "evaluate", "base", "--config", "run.yaml", "--n", "2", "--length", str(most))
    width = tiny.TASK.prompt_length
    assert f"length: got {most} after prompts of {width} tokens; allowed up to {most - width}" in said


# ---------------------------------------------------------------------------------------- mathematics, from a file of one's own
ROWS = [{"question": "How many are " + " and ".join(["1"] * i) + "?", "answer": f"One by one.\n#### {i}"} for i in range(1, 6)]


def chat_task(folder: Path, rows: list | None = None):
    from minidrl.tasks.gsm8k import Gsm8k

    path = folder / f"rows-{len(list(folder.glob('rows-*')))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    return Gsm8k(path=str(path))


def chat_tokenizer():
    tok = tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tok.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}\nA:"
    return tok


def chat_network():
    from minidrl import denoiser

    net = denoiser.build(tiny.SIZES, chat_tokenizer(), 0).eval()
    with torch.no_grad():
        net.model.lm_head.weight.mul_(10)
    return net


@pytest.fixture
def own(folder):
    """A model that knows letters, and a file of one's own."""
    from minidrl.run import checkpoints

    pytest.importorskip("math_verify", reason='needs pip install -e ".[math]"')
    checkpoints.save(chat_network(), chat_tokenizer(), folder / "chat")
    (folder / "own.json").write_text(json.dumps(ROWS))
    return folder


def test_a_file_of_ones_own_in_three_commands(own, capfd):
    """Check, evaluate, compare, as docs/commands.md has them."""
    words = ["evaluate", "chat", "--task", "gsm8k", "--task.path", "own.json", "--n", "5", "--temperature", "0"]
    status, out, _ = run(capfd, "tasks", "gsm8k", "--check", "own.json", "--model", "chat")
    request = "Think step by step; then write the number alone, without a unit, between <answer> and </answer>."
    longest = len(
        chat_tokenizer()(f"{ROWS[4]['question']}\n\n{request}A:").input_ids
    )  # a template's new line after a block goes
    assert status == 0 and out.startswith("own.json: 5 rows; all can be asked and judged by gsm8k")
    assert f"the longest prompt has {longest} tokens" in out
    assert run(capfd, *words, "--length", "8", "--out", "a.json")[0] == 0
    assert run(capfd, *words, "--length", "8", "--out", "b.json")[0] == 0
    status, out, _ = run(capfd, "evaluate", "--compare", "a.json", "b.json")
    assert status == 0 and out.startswith("length 8: 0.0% and 0.0%; second less first +0.0 points")
    assert evaluation.read(own / "a.json")[0]["protocol"]["task"] == "gsm8k"


def test_reinforcement_learning_runs_on_it(own):
    """One step, judged by the reward of d1, on questions that are not held out."""
    from minidrl.tasks.gsm8k import Gsm8k

    held_out, train = own / "held-out.json", own / "train.json"
    held_out.write_text(json.dumps(ROWS[:2]))
    train.write_text(json.dumps(ROWS[1:]))
    task = Gsm8k(path=str(held_out), train_path=str(train), reward="d1", shots=1)
    settings = tiny.settings(own / "chat", task=task, steps=1, evaluate=tiny.config.Evaluation(n=2))
    summary = trainer.train(settings, own / "run")
    assert (summary["steps"], summary["evaluated_on"]) == (1, 2)
    assert yaml.safe_load((own / "run/config.yaml").read_text())["task"]["name"] == "gsm8k"


def test_a_model_without_a_template_is_refused_for_a_chat_before_anything_is_computed(own):
    from minidrl.run import checkpoints
    from minidrl.tasks.gsm8k import Gsm8k

    tok = chat_tokenizer()
    tok.chat_template = None
    checkpoints.save(chat_network(), tok, own / "mute")
    task = Gsm8k(path=str(own / "own.json"))
    with pytest.raises(ValueError, match="^task.prompt_format: got 'chat'; allowed plain, the tokenizer of .*mute has no chat"):
        trainer.Learner(tiny.settings(own / "mute", task=task))


CHECKED = {
    "own.json row 2: question: missing": ({1: {"problem": "?", "answer": "#### 2"}}, []),
    "own.json row 3: answer: got": ({2: {"question": "?", "answer": "three"}}, []),
    "own.json row 1: question: got ' '": ({0: {"question": "  ", "answer": "#### 1"}}, []),
    "own.json row 5: question: got a prompt of 149 tokens; allowed up to task.max_prompt_length, 148": (
        {},
        ["--model", "chat", "--task.max_prompt_length", "148"],
    ),
    "own.json: got no row; allowed one or more": (None, []),
}


@pytest.mark.parametrize("said", CHECKED)
def test_a_row_that_cannot_be_used_is_named_with_file_row_and_field(said, own, capfd):
    changes, words = CHECKED[said]
    rows = [] if changes is None else [changes.get(i, row) for i, row in enumerate(ROWS)]
    (own / "own.json").write_text(json.dumps(rows))
    if "tokens" in said:
        length = int(run(capfd, "tasks", "gsm8k", "--check", "own.json", "--model", "chat")[1].split()[-2])
        words = [*words[:-1], str(length - 1)]
        said = said.replace("149", str(length)).replace("148", str(length - 1))
    assert said in refused(capfd, "tasks", "gsm8k", "--check", "own.json", *words)


def test_a_prompt_may_be_as_long_as_the_room_for_it(own, capfd):
    words = ["tasks", "gsm8k", "--check", "own.json", "--model", "chat"]
    _, told, _ = run(capfd, *words)
    assert run(capfd, *words, "--task.max_prompt_length", told.split()[-2])[:2] == (0, told)


def test_a_known_answer_that_cannot_be_read_is_named(own, capfd):
    rows = [{"problem": "?", "solution": "..", "answer": text} for text in ("\\frac{1}{2}", "\\frac{1}{")]
    (own / "own.json").write_text(json.dumps(rows))
    said = refused(capfd, "tasks", "math500", "--check", "own.json")
    assert "own.json row 2: answer: got '\\\\frac{1}{'; allowed an answer that math-verify can read" in said


def test_the_tasks_are_listed_and_one_is_named(capfd):
    assert main(["tasks", "math500"]) == 0
    assert capfd.readouterr().out.startswith("math500     500 problems of MATH")


@pytest.mark.parametrize("base", ["countdown20", "countdown", "countdown_block", "sudoku"])
def test_a_shipped_base_is_asked_by_the_first_config_that_trains_it(base):
    folder = tiny.ROOT / "tiny_configs/bases" / f"{base}_base"
    assert cli._config_of(str(folder)).name == f"{base}_cpu.yaml"


def test_what_a_run_has_made_is_asked_by_the_settings_of_the_run(tmp_path):
    own = tmp_path / "run" / "config.yaml"
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    own.write_text("model: elsewhere\n")
    assert cli._config_of(str(tmp_path / "run")) == own == cli._config_of(str(tmp_path / "run" / "checkpoint-3"))
    own.write_text("network: {}\n")  # of pretrain, which has no evaluation of its own
    assert cli._config_of(str(tmp_path / "run")).name == "countdown_cpu.yaml" == cli._config_of("who/knows").name
