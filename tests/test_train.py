"""A run in its folder: watched, stopped, resumed to the bit. And pre-training, from which runs start."""

import dataclasses
import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from minidrl import loop
from minidrl.run import checkpoints, config, pretrain, train
from minidrl.run.launch import Interrupted, RunError
from minidrl.tasks import Verdict
from minidrl.tasks.countdown import Countdown, tokenizer


@pytest.fixture(autouse=True)
def varied_rewards(monkeypatch, blank_curve):
    monkeypatch.setattr(Countdown, "judge", tiny.varied_judge)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("train") / "base")


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def untimed(out: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in metrics(out)]


def updates(out: Path) -> list[dict]:
    return [row for row in metrics(out) if "reward" in row]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_tensors(a: Path, b: Path) -> None:
    first, second = load_file(a), load_file(b)
    assert first.keys() == second.keys() and first
    assert all(torch.equal(first[name], second[name]) for name in first)


def stop():
    raise KeyboardInterrupt


def pretrained_whole_and_in_parts(settings, folder: Path, monkeypatch) -> None:
    """Pre-training, and the same asked to stop in its third update and resumed, are one: weights and metrics."""
    pretrain.pretrain(settings, folder / "whole")
    step, count = loop.optimizer_step, []

    def asked(*words):
        count.append(1)
        if len(count) == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(*words)

    said = "^stopped after 3 of 4 steps; .*checkpoint-3 is saved$"
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=said):
        patch.setattr(loop, "optimizer_step", asked)
        pretrain.pretrain(settings, folder / "parts")
    pretrain.pretrain(settings, folder / "parts", resume=True)
    assert_same_tensors(folder / "whole/model.safetensors", folder / "parts/model.safetensors")
    assert untimed(folder / "whole") == untimed(folder / "parts")


def interrupt_at(monkeypatch, step: int) -> None:
    """Ctrl-C during a step."""
    take = loop.take_step
    monkeypatch.setattr(loop, "take_step", lambda run, n: stop() if n == step else take(run, n))


# --------------------------------------------------------------------------------------------------------------- a run


def test_a_run_leaves_its_files_and_a_config_that_is_that_run(base, tmp_path):
    evaluation = config.Evaluation(n=4, every=2)
    settings = tiny.settings(base, steps=4, save_every=2, evaluate=evaluation)
    summary = train.train(settings, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")}
    assert names == {"config.yaml", "metrics.jsonl", "summary.json", "curve.png", "checkpoint-2", "checkpoint-4"}
    assert json.loads((tmp_path / "run/summary.json").read_text()) == summary
    assert summary.keys() >= {"method", "seed", "steps", "seconds", "solved_before", "solved_after", "evaluated_on"}
    assert [row["step"] for row in metrics(tmp_path / "run") if "eval/solved" in row] == [0, 2, 4]
    assert config.load(config.Train, tmp_path / "run/config.yaml") == settings
    train.train(config.load(config.Train, tmp_path / "run/config.yaml"), tmp_path / "again")
    assert untimed(tmp_path / "again") == untimed(tmp_path / "run")


OFF_POLICY = {"rollout_dtype": "bfloat16", "method": "egspo-sa-accounts"}


@pytest.mark.parametrize("changes", [{"method": "grpo"}, OFF_POLICY], ids=["grpo", "bfloat16"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(changes, base, tmp_path):
    optimizer = config.Optimizer(learning_rate=1e-3, schedule="cosine", warmup=5)
    evaluation = config.Evaluation(n=4, every=1)
    settings = tiny.settings(base, steps=4, save_every=2, optimizer=optimizer, evaluate=evaluation, **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(settings, whole)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 3)
        train.train(settings, parts)
    assert [row["step"] for row in updates(parts)] == [1, 2, 3]
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')  # a line that was being written
    train.train(settings, parts, resume=True)
    assert untimed(parts) == untimed(whole)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(whole / "checkpoint-4" / file, parts / "checkpoint-4" / file)
    times = [row["seconds"] for row in updates(parts)]
    assert times == sorted(times)


def test_a_run_in_which_nothing_could_be_learned_can_be_resumed(base, tmp_path, monkeypatch):
    monkeypatch.setattr(Countdown, "judge", lambda *_: Verdict(0.25, False, {}))
    settings = tiny.settings(base, steps=1)
    train.train(settings, tmp_path / "run")
    train.train(dataclasses.replace(settings, steps=2), tmp_path / "run", resume=True)
    assert_same_tensors(base / "model.safetensors", tmp_path / "run/checkpoint-2/model.safetensors")


def test_tensorboard_has_the_numbers_of_the_log(base, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train.train(tiny.settings(base, tensorboard=True), tmp_path / "run")
    found = events.EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in found.Scalars("reward")]
    assert rewards == [(row["step"], pytest.approx(row["reward"])) for row in updates(tmp_path / "run")]


def test_a_number_that_is_not_finite_stops_the_run_and_names_the_last_checkpoint(base, tmp_path, monkeypatch):
    backward = loop.backward

    def poisoned(run, *given):
        done = backward(run, *given)
        if run.updates == 3:
            next(run.model.parameters()).grad[0] = math.nan
        return done

    monkeypatch.setattr(loop, "backward", poisoned)
    with pytest.raises(RunError, match=r"^step 1: gradient norm is nan; stopped, .*checkpoint-1 is the last checkpoint"):
        train.train(tiny.settings(base, save_every=1), tmp_path / "run")
    before = content(tmp_path / "run/checkpoint-1")
    monkeypatch.setattr(loop, "backward", backward)
    train.train(tiny.settings(base, save_every=1), tmp_path / "run", resume=True)
    assert content(tmp_path / "run/checkpoint-1") == before and (tmp_path / "run/checkpoint-2").is_dir()


def test_constants_of_a_control_variate_lie_beside_the_base(base, tmp_path):
    given = tmp_path / "base"
    shutil.copytree(base, given)
    stored = Path(__file__).parents[1] / "tiny_configs/bases/countdown20_base" / checkpoints.CONSTANTS
    shutil.copyfile(stored, given / checkpoints.CONSTANTS)
    order = dataclasses.replace(tiny.SAMPLER, order="low_confidence")
    settings = tiny.settings(given, method="stabledrl-cv", sampler=order)
    found = train.start(settings).method.plan.keywords["constants"]
    assert found is not None and found.shape == (2, 57)
    assert train.start(dataclasses.replace(settings, model=str(base))).method.plan.keywords["constants"] is None


# -------------------------------------------------------------------------------------------------------- pre-training


def pretraining(**changes) -> config.Pretrain:
    return tiny.pretraining(**{"batch_size": 16, "evaluate": config.Evaluation(n=4), **changes})


def test_pretraining_learns_and_writes_a_network_that_a_run_can_start_from(tmp_path):
    out = tmp_path / "base"
    settings = pretraining(steps=51, save_every=50, optimizer=config.Optimizer(learning_rate=1e-2))
    summary = pretrain.pretrain(settings, out)
    first, last = metrics(out)
    assert (first["step"], last["step"]) == (1, 51) and last["loss"] < first["loss"] - 0.5
    assert first["loss"] == pytest.approx(math.log(22), rel=0.1)
    assert json.loads((out / "summary.json").read_text()) == summary and summary["held_out"]["n"] == 4
    assert (out / "checkpoint-50" / "model.safetensors").is_file()
    assert checkpoints.load(out)[0].num_parameters() == summary["parameters"]


def test_resumed_pretraining_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    settings = pretraining(steps=4, save_every=2, optimizer=config.Optimizer(schedule="cosine", warmup=3))
    pretrained_whole_and_in_parts(settings, tmp_path, monkeypatch)


def test_a_longer_run_that_was_stopped_at_its_end_is_not_taken_for_the_shorter_one_that_finished(tmp_path, monkeypatch):
    settings = pretraining(steps=2, save_every=1)
    pretrain.pretrain(settings, tmp_path)
    longer = dataclasses.replace(settings, steps=3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pretrain.folders, "into", lambda _: stop())
        pretrain.pretrain(longer, tmp_path, resume=True)
    assert pretrain.pretrain(longer, tmp_path, resume=True)["steps"] == 3
    assert_same_tensors(tmp_path / "model.safetensors", tmp_path / "checkpoint-3/model.safetensors")


def test_pretraining_meets_its_own_problems_and_rl_meets_others(base, tmp_path):
    task = dataclasses.replace(tiny.TASK, pretrain_share=0.3)
    settings = pretraining(task=task, steps=4, stop_after=3)
    drawn = list(pretrain.demonstration_rollouts(settings, tokenizer(), range(3)))
    met = {(*sorted(problem.numbers), problem.target) for problems, _ in drawn for problem in problems}
    assert met <= {(*problem.numbers, problem.target) for problem in task.puzzles("pretrain")}
    run = train.start(tiny.settings(base, task=task))
    trained_on = [problem for step in range(3) for problem in loop.collect(run, step).problems]
    assert {task.split_of(problem) for problem in trained_on} == {"train"}


@pytest.mark.slow
def test_worker_processes_make_the_demonstrations_that_the_run_would_make():
    settings, before = pretraining(), torch.get_rng_state()
    alone, helped = (
        list(pretrain.demonstration_rollouts(dataclasses.replace(settings, workers=n), tokenizer(), range(1, 4)))
        for n in (0, 2)
    )
    assert [problems for problems, _ in helped] == [problems for problems, _ in alone] and len(alone) == 3
    for (_, one), (_, other) in zip(alone, helped, strict=True):
        assert torch.equal(one.prompt, other.prompt) and torch.equal(one.response, other.response)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_split_without_problems_is_one_line():
    settings = pretraining(task=dataclasses.replace(tiny.TASK, pretrain_share=1e-9))
    with pytest.raises(ValueError, match=r"^task.pretrain_share: got 1e-09; allowed shares that leave pretrain puzzles .*"):
        next(pretrain.demonstration_rollouts(settings, tokenizer(), [0]))
