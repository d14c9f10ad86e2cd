"""The one evaluator: batches, stops, lengths, intervals, the file of results, and a file of problems of one's own."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import tiny
from minidrl import denoiser, sampler
from minidrl.run import checkpoints, cli, folders
from minidrl.run import evaluate as evaluator
from minidrl.tasks.countdown import Countdown, tokenizer

HOW = {"n": 9, "samples": 2, "seed": 3}


@pytest.fixture(scope="module")
def model():
    return tiny.network()


LONG = ["--sampler.length", "8", "--sampler.block_length", "8"]


def recorded(model, **changes) -> dict:
    settings = changes.pop("settings", tiny.SAMPLER)
    found = evaluator.record(model, tokenizer(), tiny.TASK, settings, **(HOW | changes))
    found["result"].pop("seconds")
    return found


def run(capfd, *words: str) -> tuple[int, str, str]:
    capfd.readouterr()
    status = cli.main(list(words))
    return status, *capfd.readouterr()


# --------------------------------------------------------------------------------------------------------- what is invariant
@pytest.mark.parametrize(("order", "temperature"), [("random", 1.0), ("low_confidence", 0.7), ("low_confidence", 0.0)])
def test_the_batch_changes_nothing(order, temperature, model):
    settings = dataclasses.replace(tiny.SAMPLER, order=order, temperature=temperature, length=8, block_length=4)
    found = [recorded(model, settings=settings, micro_batch=batch) for batch in (18, 1, 8)]
    assert found[0] == found[1] == found[2]
    assert temperature == 0 or len({row["text"] for row in found[0]["rows"]}) > 3


def test_the_numbers_are_those_of_the_evaluation_during_training(model):
    settings = dataclasses.replace(tiny.SAMPLER, order="random")
    how = {"n": 20, "seed": 2, "samples": 2}
    told = evaluator.evaluate(model, tokenizer(), tiny.TASK, settings, **how)
    found = recorded(model, settings=settings, micro_batch=7, **how)
    assert told == {key: found["result"][key] for key in told} and told.keys() >= {"solved", "well_formed", "n", "pass@2"}
    rows = found["rows"]
    solved = np.array([row["solved"] for row in rows]).reshape(20, 2)
    assert (told["solved"], told["pass@2"]) == (solved.mean(), solved.any(1).mean())


CHANGES = {
    "n": {"n": 8},
    "skip": {"skip": 1},
    "samples": {"samples": 1},
    "seed": {"seed": 4},
    "order": {"settings": dataclasses.replace(tiny.SAMPLER, order="random")},
    "temperature": {"settings": dataclasses.replace(tiny.SAMPLER, temperature=0.5)},
    "length": {"settings": dataclasses.replace(tiny.SAMPLER, length=6, block_length=6)},
    "steps": {"settings": dataclasses.replace(tiny.SAMPLER, tokens_per_step=2)},
    "block_length": {"settings": dataclasses.replace(tiny.SAMPLER, block_length=2)},
    "top_p": {"settings": dataclasses.replace(tiny.SAMPLER, top_p=0.5)},
}


def test_what_decides_a_number_is_in_the_protocol(model):
    before = recorded(model)
    for key, change in CHANGES.items():
        assert key in evaluator.differing(before["protocol"], recorded(model, **change)["protocol"])
    other = recorded(tiny.network(seed=1))
    assert other["protocol"] == before["protocol"] and evaluator.differing(before["made_by"], other["made_by"]) == ["weights"]


# Newcombe (1998), Statistics in Medicine 17, table I, method 3: the score method without correction.
NEWCOMBE = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}


@pytest.mark.parametrize("counts", NEWCOMBE)
def test_wilsons_interval_is_the_printed_one(counts):
    solved, n = counts
    found = evaluator.interval(np.arange(n) < solved)
    assert found == pytest.approx(NEWCOMBE[counts], abs=5.1e-5)


def test_with_several_samples_the_interval_is_that_of_a_mean_over_problems():
    shares = np.array([0.0, 0.5, 1.0, 0.5, 0.25])
    half = 1.959964 * shares.std(ddof=1) / 5**0.5
    assert evaluator.interval(shares) == pytest.approx((0.45 - half, 0.45 + half))


# ------------------------------------------------------------------------------------------------------- stopping, going on
@pytest.mark.parametrize("batches", [0, 3])
def test_an_evaluation_that_was_killed_goes_on_where_it_was(batches, model, tmp_path, monkeypatch):
    whole = recorded(model, micro_batch=4, out=tmp_path / "whole.json")
    calls, generate, append = [], sampler.generate, folders.append

    def counted(*args, **words):
        calls.append(words["rows"].tolist())
        return generate(*args, **words)

    def broken(path, line):
        if len(calls) > batches:  # the batch is computed, half of its line is written
            with path.open("a") as file:
                file.write(line[: len(line) // 2])
            raise KeyboardInterrupt
        append(path, line)

    monkeypatch.setattr(sampler, "generate", counted)
    monkeypatch.setattr(folders, "append", broken)
    with pytest.raises(KeyboardInterrupt):
        recorded(model, micro_batch=4, out=tmp_path / "a.json")
    monkeypatch.setattr(folders, "append", append)
    calls.clear()
    assert recorded(model, micro_batch=5, out=tmp_path / "a.json") == whole
    assert sorted(sum(calls, [])) == list(range(4 * batches, 18))


def test_rows_of_another_protocol_or_other_weights_are_refused(model, tmp_path):
    recorded(model, out=tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"an evaluation that differs in seed; allowed another --out"):
        recorded(model, out=tmp_path / "a.json", seed=4)
    with pytest.raises(ValueError, match="an evaluation that differs in weights"):
        recorded(tiny.network(seed=1), out=tmp_path / "a.json")


# ------------------------------------------------------------------------------------------------------------- command line
@pytest.fixture
def folder(tmp_path, monkeypatch):
    tiny.checkpoint(tmp_path / "base")
    data = {"task": {"num_numbers": 2}, "sampler": dataclasses.asdict(tiny.SAMPLER)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_files_are_compared(folder, capfd):
    words = ["evaluate", "base", "--config", "run.yaml", "--n", "12"]
    for name, seed in {"a": "0", "b": "0", "c": "5"}.items():
        assert run(capfd, *words, "--seed", seed, "--out", f"{name}.json")[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "base", "c.json", "run.yaml"]
    status, out, _ = run(capfd, "evaluate", "--compare", "a.json", "b.json")
    assert status == 0 and "+0.0 points, 95 % interval 0.0 to 0.0" in out
    status, _, said = run(capfd, "evaluate", "--compare", "a.json", "c.json")
    assert status == 2 and "got a.json and c.json, which differ in seed (0, 5); allowed results of one protocol" in said
    assert run(capfd, *words, "--out", "a.json")[::2] == (
        2,
        "minidrl: out: got 'a.json', which is there already; allowed another --out\n",
    )
    assert "run.yaml', which holds no evaluation" in run(capfd, "evaluate", "--compare", "run.yaml", "a.json")[2]
    most = tiny.network().model.config.max_position_embeddings
    long = [word for key in ("length", "block_length") for word in (f"--sampler.{key}", str(most))]
    assert "length: got" in run(capfd, "evaluate", "base", "--config", "run.yaml", "--n", "2", *long)[2]


def test_the_difference_is_paired(tmp_path):
    """Differences 1, 1, 1, 0, 0, 0, 0, -1 by hand: mean 1/4, variance 3.5 / 7."""
    for name, solved in (("a", [0, 0, 0, 0, 1, 0, 1, 1]), ("b", [1, 1, 1, 0, 1, 0, 1, 0])):
        rows = [{"problem": i, "sample": 0, "solved": bool(x)} for i, x in enumerate(solved)]
        found = {"protocol": {"n": 8, "length": 4}, "rows": rows}
        (tmp_path / name).write_text(json.dumps({"evaluations": [found]}))
    half = 195.9964 * (0.5 / 8) ** 0.5
    said = evaluator.compare(tmp_path / "a", tmp_path / "b")
    assert said.startswith("37.5% and 62.5%, +25.0 points")
    assert f"interval {25 - half:.1f} to {25 + half:.1f}; of 8 problems" in said


@pytest.mark.parametrize("base", ["countdown20", "countdown", "countdown_block", "sudoku"])
def test_a_shipped_base_is_asked_by_the_first_config_that_trains_it(base):
    folder = tiny.ROOT / "tiny_configs/bases" / f"{base}_base"
    assert cli._config_of(str(folder)).name == f"{base}_cpu.yaml"


def test_a_shipped_config_that_asks_other_problems_goes_behind_the_models_own(tmp_path, monkeypatch):
    words = {"sampler": {"order": "random", "temperature": 1.0, "length": 12, "block_length": 12, "tokens_per_step": 1}}
    (tmp_path / "shipped.yaml").write_text(json.dumps(words | {"model": "base", "task": {"num_numbers": 2}}))
    monkeypatch.setattr(cli, "SHIPPED", tmp_path / "other.yaml")
    (tmp_path / "base").mkdir()
    for numbers, name in ((2, "shipped.yaml"), (3, "config.yaml")):
        (tmp_path / "base/config.yaml").write_text(json.dumps(words | {"task": {"num_numbers": numbers}}))
        assert cli._config_of(str(tmp_path / "base")).name == name


# ---------------------------------------------------------------------------------------- mathematics, from a file of one's own
ROWS = [{"question": "How many are " + " and ".join(["1"] * i) + "?", "answer": f"One by one.\n#### {i}"} for i in range(1, 6)]


@pytest.fixture
def own(folder) -> Path:
    """A model that knows letters, and a file of one's own."""
    pytest.importorskip("math_verify", reason='needs pip install -e ".[math]"')
    tok = tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tok.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}\nA:"
    net = denoiser.build(tiny.SIZES, tok, 0)
    with torch.no_grad():
        net.model.lm_head.weight.mul_(10)
    checkpoints.save(net, tok, folder / "chat")
    (folder / "own.json").write_text(json.dumps(ROWS))
    return folder


def test_the_rule_by_which_answers_are_read_is_in_the_protocol(own):
    net, tok = checkpoints.load(own / "chat")
    tasks = [Countdown(prompt_format="chat", protocol=rule, max_prompt_length=300) for rule in ("ours", "d1")]
    assert evaluator.differing(*(evaluator._Asked(net, tok, task, tiny.SAMPLER, 4).protocol() for task in tasks)) == [
        "protocol"
    ]


def test_a_file_of_ones_own_is_checked_and_asked_in_any_batch(own, capfd):
    """Prompts of several lengths: padded to the longest of all, whoever is in the batch."""
    status, out, _ = run(capfd, "tasks", "gsm8k", "--check", "own.json", "--model", "chat")
    assert status == 0 and out.startswith("own.json: 5 rows; all can be asked and judged by gsm8k")
    words = ["evaluate", "chat", "--task.name", "gsm8k", "--task.path", "own.json", "--n", "5", *LONG]
    for out, batch in (("a.json", "5"), ("b.json", "2")):
        assert run(capfd, *words, "--batch", batch, "--out", out)[0] == 0
    a, b = (json.loads((own / name).read_text())["evaluations"][0] for name in ("a.json", "b.json"))
    assert (a["protocol"], a["rows"]) == (b["protocol"], b["rows"]) and a["protocol"]["task"] == "gsm8k"
    assert a["protocol"]["prompt_width"] > len(ROWS[4]["question"])
    (own / "own.json").write_text(json.dumps([{"question": "?", "answer": "three"}]))
    assert "own.json row 1: answer: got" in run(capfd, "tasks", "gsm8k", "--check", "own.json")[2]
