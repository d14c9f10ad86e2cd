"""Training, end to end: the gradient is the gradient, a run can be watched, stopped, resumed and replayed.

Laws take the implementation (`backward`) as an argument, so that the mutants beside them can break it.
"""

import ast
import copy
import dataclasses
import json
import math
import multiprocessing.queues
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import memory_table
import tiny
from minidrl import algorithms as alg
from minidrl import denoiser, gradient, methods, sampler
from minidrl import features as feat
from minidrl.run import checkpoints, config, files, rehearsal, runs, trainer
from minidrl.run.launch import RunError
from minidrl.tasks import Verdict
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import Countdown, tokenizer

METHODS = tuple(methods.METHODS)


def of_each_kind() -> list:
    """Every row; `make test` has the first of those that ask the network for the same, `make chaos` the others."""
    seen, rows = set(), []
    for name, row in methods.METHODS.items():
        kind = row.plan.func, row.features, row.step_value
        rows.append(pytest.param(name, marks=pytest.mark.slow) if kind in seen else name)
        seen.add(kind)
    return rows


KINDS = of_each_kind()


@pytest.fixture(autouse=True)
def varied_rewards(monkeypatch, blank_curve):
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("trainer") / "base")


# ---------------------------------------------------------------------------------- the two-pass backward is the gradient


@dataclasses.dataclass
class Problem:
    """A gradient to be computed: everything that the second update of a step would be given."""

    model: nn.Module
    rollout: alg.Rollout
    plan: alg.Plan
    loss_of: Callable
    temperature: float = 1.0
    names: tuple[str, ...] = ("logp",)
    reference: nn.Module | None = None


@dataclasses.dataclass
class Second:
    """What the second update of a step is given, after a first one that has moved the weights."""

    plan: alg.Plan
    adv: torch.Tensor
    anchor: torch.Tensor | None
    ref: torch.Tensor | None


def second_update(learner: trainer.Learner, experience: trainer.Experience) -> Second:
    method, rollout, clock = learner.method, experience.rollout, trainer.Clock()
    credited = learner.plans(0, experience)
    anchor = learner.anchors(0, [plan for plan, _ in credited], rollout, clock)[1]
    if anchor is trainer.FIRST:
        first = credited[0][0]
        anchor = methods.reduced(method, first, rollout, learner.score(rollout, first, clock))
    tiny.perturb(learner.model, 0.1)
    (plan, adv), ref = credited[1], None
    if learner.reference is not None and method.kl.form != "exact":
        ref = methods.kl_target(method, plan, rollout, learner.likelihood(learner.reference, rollout, plan, clock))
    return Second(plan, adv, anchor, ref)


def method_problem(learner: trainer.Learner) -> tuple[Problem, Callable[[], object]]:
    """The problem of a method's second update, and that update itself."""
    experience, method = tiny.experience(learner), learner.method
    at, rollout = second_update(learner, experience), experience.rollout

    def loss_of(feature):
        return methods.method_loss(method, at.plan, rollout, feature, at.adv, at.anchor, at.ref)

    problem = Problem(
        learner.model, rollout, at.plan, loss_of, learner._how()["temperature"], method.features, learner.reference
    )
    return problem, lambda: learner.update(experience, at.plan, at.adv, at.anchor, trainer.Clock())


def nonlinear_loss(feature: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every feature multiplies every other, each state with a weight of its own: no cotangent can be left out or mixed up."""
    weight = torch.arange(1, len(feature["logp"]) + 1)[:, None, None]
    parts = [weight * feature[name].flatten(2) / math.prod(feature[name].shape[3:]) for name in feat.FEATURES]
    sums = torch.stack([part.sum((0, 2)) / 6 for part in parts])
    return sums.tanh().prod(0).sum() + (sums / 5).sum(0).logsumexp(0) + sums.prod(0).mean()


def nonlinear_problem(model: nn.Module) -> Problem:
    """All features of most of the states of a confidence-ordered sampler, among them those that say how it chose."""
    settings = dataclasses.replace(tiny.SAMPLER, order="low_confidence")
    made = tiny.rollout(model, settings, records=("entropy", "topk"))
    plan = alg.replay_plan(made, torch.Generator().manual_seed(4), num_states=3, min_entropy=0.0)
    reference = copy.deepcopy(model)
    tiny.perturb(reference, 0.5)
    return Problem(model, made, plan, nonlinear_loss, temperature=0.8, names=feat.FEATURES, reference=reference)


def gradient_of(backward: Callable, problem: Problem, **options) -> torch.Tensor:
    words = {"temperature": problem.temperature, "names": problem.names, "reference": problem.reference}
    backward(problem.model, problem.rollout, problem.plan, problem.loss_of, **words, **options)
    return tiny.gradient(problem.model)


def relative_errors(backwards: list[Callable], problem: Problem) -> list[float]:
    """The distance of each to the gradient of the joint graph, in units of that gradient's norm."""
    exact = gradient_of(memory_table.joint_backward, problem)
    assert exact.norm() > 1e-4, "a gradient that vanishes can't be judged"
    return [float((gradient_of(backward, problem) - exact).norm() / exact.norm()) for backward in backwards]


def relative_error(backward: Callable, problem: Problem) -> float:
    return relative_errors([backward], problem)[0]


# A KL term by choice: of every form, on a row that has none; kl_ref is the only feature that asks the reference.
WITH_KL = {
    f"grpo, kl {form}": {"method": "grpo", "method_options": {"kl.form": form, "kl.beta": 0.3}} for form in ("k2", "exact")
}
ROWS = {name: {"method": name} for name in METHODS} | WITH_KL


@pytest.mark.parametrize("network", tiny.NETWORKS)
@pytest.mark.parametrize("name", ROWS)
def test_two_passes_and_an_update_have_the_gradient_of_every_method(name, network, monkeypatch):
    build, tolerance = tiny.NETWORKS[network]
    problem, update = method_problem(tiny.learner_on(monkeypatch, build(), **ROWS[name]))
    monkeypatch.setattr(trainer, "optimizer_step", lambda *_: 1.0)
    for error in relative_errors([gradient.two_pass_backward, lambda *_, **__: update()], problem):
        assert error < tolerance


@pytest.mark.parametrize("network", tiny.NETWORKS)
def test_two_passes_give_the_gradient_of_a_loss_that_mixes_all_features(network):
    build, tolerance = tiny.NETWORKS[network]
    assert relative_error(gradient.two_pass_backward, nonlinear_problem(build())) < tolerance


def only_logp(loss_of, feature):
    """The other features are taken for data."""
    logp = feature["logp"].detach().requires_grad_()
    loss = loss_of({**feature, "logp": logp})
    return loss.detach(), {"logp": torch.autograd.grad(loss, logp)[0]}


def one_leaf_at_a_time(loss_of, feature):
    """The loss is taken for a sum of functions of one feature each."""
    grads = {}
    for name in feature:
        leaf = feature[name].detach().requires_grad_()
        loss = loss_of({other: leaf if other == name else torch.zeros_like(feature[other]) for other in feature})
        grads[name] = torch.autograd.grad(loss, leaf)[0]
    return loss.detach(), grads


def reversed_states(loss_of, feature):
    """The cotangent of another state."""
    loss, grads = gradient.cotangents(loss_of, feature)
    return loss, {name: value.flip(0) for name, value in grads.items()}


def backward_with(cotangents: Callable) -> Callable:
    """``two_pass_backward`` with another middle."""

    def backward(model, rollout, plan, loss_of, *, names, **how):
        feature = feat.features(model, rollout, plan, names=names, **how)
        gradient.second_pass(model, rollout, plan, cotangents(loss_of, feature)[1], size=256, **how)

    return backward


def first_chunk_only(model, rollout, plan, loss_of, *, names, **how):
    """The second pass ends after its first micro-batch."""
    feature = feat.features(model, rollout, plan, names=names, **how)
    states = torch.arange(plan.valid.numel()).view(plan.valid.shape)
    plan = dataclasses.replace(plan, valid=plan.valid & (states < plan.valid.numel() // 2))
    cotangent = gradient.cotangents(loss_of, feature)[1]
    gradient.second_pass(model, rollout, plan, cotangent, size=4, **how)


def without(name):
    """One feature is taken for data."""

    def cotangents(loss_of, feature):
        loss, grads = gradient.cotangents(loss_of, feature)
        return loss, {other: value for other, value in grads.items() if other != name}

    return cotangents


MUTANTS = {
    "only logp is a leaf": backward_with(only_logp),
    "one leaf at a time": backward_with(one_leaf_at_a_time),
    "cotangents of other states": backward_with(reversed_states),
    "half of the states": first_chunk_only,
} | {f"{name} is data": backward_with(without(name)) for name in feat.FEATURES}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_law_kills_a_mutant(name):
    assert relative_error(backward_with(gradient.cotangents), nonlinear_problem(tiny.tabular())) < 1e-12
    assert relative_error(MUTANTS[name], nonlinear_problem(tiny.tabular())) > 1e-3


@pytest.mark.parametrize("network", ["tiny denoiser, float64", "tabular denoiser, float64"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_micro_batch_size_does_not_change_the_gradient(size, network):
    problem = nonlinear_problem(tiny.NETWORKS[network][0]())
    whole = gradient_of(gradient.two_pass_backward, problem, size=1000)
    parts = gradient_of(gradient.two_pass_backward, problem, size=size)
    assert (parts - whole).norm() < 1e-12 * whole.norm()


def test_states_without_cotangent_are_skipped_and_the_gradient_is_the_same():
    problem = nonlinear_problem(tiny.network(torch.float64))
    problem.loss_of = lambda f: nonlinear_loss({name: value[1:2, ::2] for name, value in f.items()})
    needed = int(problem.plan.valid[1, ::2].sum())
    how = {"temperature": 0.8, "reference": problem.reference}
    feature = feat.features(problem.model, problem.rollout, problem.plan, names=problem.names, **how)
    cotangent = gradient.cotangents(problem.loss_of, feature)[1]
    seen, calls = gradient.second_pass(problem.model, problem.rollout, problem.plan, cotangent, size=4, **how)
    skipping, exact = tiny.gradient(problem.model), gradient_of(memory_table.joint_backward, problem)
    assert calls == needed < problem.plan.network_calls
    assert (skipping - exact).norm() < 1e-12 * exact.norm()
    torch.testing.assert_close(seen["logp"][1, ::2], feature["logp"][1, ::2])
    assert seen["logp"][0].abs().sum() == 0


def test_what_the_backward_is_given_and_what_it_returns_is_data():
    """A graph that stayed on either would keep every state in memory."""
    problem = nonlinear_problem(tiny.tabular())
    how = {"temperature": problem.temperature, "names": problem.names, "reference": problem.reference}
    feature = feat.features(problem.model, problem.rollout, problem.plan, **how)
    done = gradient.two_pass_backward(problem.model, problem.rollout, problem.plan, problem.loss_of, feature=feature, **how)
    assert not any(value.requires_grad for value in [done.loss, *done.seen.values(), *feature.values()])


def test_a_feature_that_the_loss_does_not_read_has_no_cotangent():
    feature = {name: torch.linspace(-2, -1, 6).view(1, 2, 3) for name in ("entropy", "logp", "value")}
    _, found = gradient.cotangents(lambda given: given["logp"].square().sum(), feature)
    assert list(found) == ["logp"] and torch.equal(found["logp"], 2 * feature["logp"])


def test_the_temperature_of_a_backward_is_1_if_none_is_given():
    problem = nonlinear_problem(tiny.tabular())
    words = {"names": problem.names, "reference": problem.reference}
    gradient.two_pass_backward(problem.model, problem.rollout, problem.plan, problem.loss_of, **words)
    found, problem.temperature = tiny.gradient(problem.model), 1.0
    assert found.equal(gradient_of(gradient.two_pass_backward, problem))


@pytest.mark.parametrize("name", ["logp", "order_logp", "position_logp"])
@pytest.mark.parametrize("rows", [10**6, 20, 7])
def test_logits_are_made_in_as_few_parts_as_the_limit_allows_and_only_those_of_several_parts_again(name, rows, monkeypatch):
    """The number of parts is that of the fullest state, for all states: all processes call the head equally often."""
    problem, met = nonlinear_problem(tiny.tabular()), []
    model, plan, head = problem.model, problem.plan, problem.model.head
    monkeypatch.setattr(feat, "HEAD_NUMBERS", limit := rows * model.vocab_size)
    monkeypatch.setattr(model, "head", lambda h: met.append(h.shape[:-1].numel()) or head(h))
    (states,) = feat.state_chunks(plan, 256)
    most = [len(states) * int(plan.scored.sum(-1).amax())]  # and, if the choice of positions is scored, all of a block
    most += [len(states) * problem.rollout.sampler.block_length] if name != "logp" else []
    parts = [math.ceil(count * model.vocab_size / limit) for count in most]
    value = feat.state_features(model, problem.rollout, plan, states, temperature=1.0, names=(name,))[name]
    assert len(met) == sum(parts) and max(met) <= rows
    value.sum().backward()
    again = parts[1:] if name == "order_logp" else parts  # the confidences that others must beat are data
    assert len(met) == sum(parts) + sum(count for count in again if count > 1)


def test_one_state_of_many_positions_has_its_logits_made_in_parts_too(monkeypatch):
    problem, met = nonlinear_problem(tiny.tabular()), []
    model, head = problem.model, problem.model.head
    plan = alg.mean_field_plan(problem.rollout, torch.Generator().manual_seed(4), p_mask_prompt=0.0)
    monkeypatch.setattr(feat, "HEAD_NUMBERS", 7 * model.vocab_size)
    monkeypatch.setattr(model, "head", lambda h: met.append(h.shape[:-1].numel()) or head(h))
    feat.features(model, problem.rollout, plan, temperature=1.0)
    assert max(met) <= 7 and sum(met) == int(plan.scored.sum())


def with_attention_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.05
    return model


def with_dropout_module(model: nn.Module) -> nn.Module:
    model.extra = nn.Dropout(0.05)
    return model


@pytest.mark.parametrize("add_dropout", [with_attention_dropout, with_dropout_module])
def test_dropout_is_refused_in_training_mode_only(add_dropout):
    model = add_dropout(tiny.network())
    problem = nonlinear_problem(model)
    model.train()
    with pytest.raises(ValueError, match="model: dropout 0.05 in .*; allowed 0"):
        gradient_of(gradient.two_pass_backward, problem)
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    assert gradient_of(gradient.two_pass_backward, problem).norm() > 0


def test_training_mode_without_dropout_is_allowed():
    problem = nonlinear_problem(tiny.network().train())
    assert relative_error(gradient.two_pass_backward, problem) < 1e-5


# -------------------------------------------------------------------------------------------------------------- memory


def test_the_memory_of_two_passes_is_constant_in_the_number_of_states_and_that_of_the_joint_graph_is_not():
    two_pass = {k: memory_table.peak_memory(k, two_pass=True) for k in memory_table.STATES}
    joint = {k: memory_table.peak_memory(k, two_pass=False) for k in memory_table.STATES}
    assert all(peak == pytest.approx(two_pass[1], rel=0.01) for peak in two_pass.values())
    assert all(peak == pytest.approx(k * joint[1], rel=0.05) for k, peak in joint.items())
    assert two_pass[1] == pytest.approx(joint[1], rel=0.05) and joint[1] > 100_000


# ------------------------------------------------------------------------------------------------------- reading a run


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def untimed(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]


def updates(out: Path) -> list[dict]:
    return [row for row in metrics(out) if "reward" in row]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_tensors(a: Path, b: Path) -> None:
    first, second = load_file(a), load_file(b)
    assert first.keys() == second.keys() and first
    assert all(torch.equal(first[name], second[name]) for name in first)


# -------------------------------------------------------------------------------------------------------- pre-training


def pretrain_settings(**changes) -> config.Pretrain:
    return tiny.pretraining(**{"batch_size": 16, "evaluate": config.Evaluation(n=4), **changes})


def test_pretraining_writes_a_run_and_a_network_that_train_can_start_from(tmp_path):
    out = tmp_path / "base"
    summary = trainer.pretrain(pretrain_settings(save_every=2), out)
    assert config.load(config.Pretrain, out / "config.yaml").steps == 3
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["steps"] == 3 and summary["held_out"]["n"] == 4 and summary["parameters"] > 1000
    assert metrics(out)[0]["step"] == 1 and metrics(out)[0]["loss"] == pytest.approx(math.log(22), rel=0.1)
    assert (out / "checkpoint-2" / "model.safetensors").is_file()
    assert checkpoints.load(out)[0].num_parameters() == summary["parameters"]


def test_pretraining_saves_after_every_so_many_steps_with_the_seconds_that_it_took(tmp_path, monkeypatch):
    saved, clock = [], (1000 + 0.3 * tick for tick in range(10**6))
    monkeypatch.setattr(runs, "save_checkpoint", lambda folder, *rest: saved.append((folder.name, rest[-1])))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(clock))
    summary = trainer.pretrain(pretrain_settings(steps=7, save_every=3), tmp_path / "base")
    assert [(name, state["step"]) for name, state in saved] == [("checkpoint-3", 3), ("checkpoint-6", 6)]
    assert 0 < saved[0][1]["seconds"] < saved[1][1]["seconds"] < summary["seconds"] + 0.05 < 100


def test_a_demonstration_was_not_revealed_by_any_step():
    assert (next(trainer.demonstration_rollouts(pretrain_settings(), tokenizer(), [0]))[1].unmask_step == -1).all()


def test_one_sample_a_problem_needs_no_second_number_and_is_drawn_in_eval_mode(base):
    model, tok = checkpoints.load(base)
    result = trainer.evaluate(model.train(), tok, tiny.TASK, tiny.SAMPLER, n=4)
    assert {key for key in result if "@" in key} == set() and not model.training


def test_one_response_a_problem_has_no_spread(base):
    row = trainer.Learner(tiny.settings(base, num_generations=1)).step(0)
    assert row["reward_std"] == 0 and row["frac_reward_zero_std"] == 1


@pytest.mark.parametrize(("threads", "expected"), [(0, []), (3, [3])])
def test_threads_are_set_where_they_are_asked_for(threads, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    trainer.prepare(pretrain_settings(threads=threads))
    assert asked == expected


def test_pretraining_learns(tmp_path):
    settings = pretrain_settings(steps=51, optimizer=config.Optimizer(learning_rate=1e-2))
    trainer.pretrain(settings, tmp_path / "base")
    first, last = metrics(tmp_path / "base")
    assert (first["step"], last["step"]) == (1, 51) and last["loss"] < first["loss"] - 0.5


def test_pretraining_meets_its_own_problems_and_counts_them_and_rl_meets_others(base, tmp_path):
    task = dataclasses.replace(tiny.TASK, pretrain_share=0.3)
    settings = pretrain_settings(task=task, steps=4, stop_after=3)
    drawn = list(trainer.demonstration_rollouts(settings, tokenizer(), range(3)))
    prompts = [tokenizer().decode(row[keep]) for _, r in drawn for row, keep in zip(r.prompt, r.prompt_mask, strict=True)]
    assert prompts == [problem.prompt for problems, _ in drawn for problem in problems]
    met = {(*sorted(problem.numbers), problem.target) for problems, _ in drawn for problem in problems}
    assert met <= {(*problem.numbers, problem.target) for problem in task.puzzles("pretrain")}
    assert trainer.pretrain(settings, tmp_path / "base")["distinct_problems"] == len(met) < 3 * 16
    learner = trainer.Learner(tiny.settings(model=str(base), task=task))
    trained_on = [problem for step in range(3) for problem in learner.collect(step, trainer.Clock()).problems]
    assert {task.split_of(problem) for problem in trained_on} == {"train"}


def test_demonstrations_are_made_on_the_device_of_the_network():
    ((_, made),) = trainer.demonstration_rollouts(pretrain_settings(device="meta"), tokenizer(), [0])
    tensors = [getattr(made, f.name) for f in dataclasses.fields(made) if torch.is_tensor(getattr(made, f.name))]
    assert {x.device.type for x in tensors} == {"meta"} and len(tensors) == 6


@pytest.mark.slow
def test_worker_processes_make_the_demonstrations_that_the_run_would_make(monkeypatch):
    """And nothing of them is left, however slowly the threads end that fed their queues."""
    feed = multiprocessing.queues.Queue._feed
    monkeypatch.setattr(multiprocessing.queues.Queue, "_feed", staticmethod(lambda *a: (feed(*a), time.sleep(0.2))))
    settings, before = pretrain_settings(), torch.get_rng_state()
    alone, helped = (
        list(trainer.demonstration_rollouts(dataclasses.replace(settings, workers=n), tokenizer(), range(1, 4))) for n in (0, 2)
    )
    assert [problems for problems, _ in helped] == [problems for problems, _ in alone] and len(alone) == 3
    for (_, one), (_, other) in zip(alone, helped, strict=True):
        assert torch.equal(one.prompt, other.prompt) and torch.equal(one.response, other.response)
    assert torch.equal(torch.get_rng_state(), before)
    assert not [thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_split_without_problems_is_one_line_whoever_looks(workers):
    settings = pretrain_settings(task=dataclasses.replace(tiny.TASK, pretrain_share=1e-9), workers=workers)
    with pytest.raises(ValueError, match=r"^task.pretrain_share: got 1e-09; allowed shares that leave pretrain puzzles .*"):
        next(trainer.demonstration_rollouts(settings, tokenizer(), [0]))


def test_demonstrations_change_their_aim_in_the_second_half(monkeypatch):
    shares, demonstrate = [], Countdown.demonstrate
    monkeypatch.setattr(Countdown, "demonstrate", lambda *a: shares.append(a[-1]) or demonstrate(*a))
    settings = pretrain_settings(task=dataclasses.replace(tiny.TASK, hit_share=0.1, late_hit_share=0.9), steps=4)
    list(trainer.demonstration_rollouts(settings, tokenizer(), range(4)))
    assert shares == [0.1, 0.1, 0.9, 0.9]


def test_resumed_pretraining_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    settings = pretrain_settings(steps=4, save_every=2, optimizer=config.Optimizer(schedule="cosine", warmup=3))
    trainer.pretrain(settings, tmp_path / "whole")
    step, count = trainer.optimizer_step, []

    def interrupted(*arguments):
        count.append(1)
        return step(*arguments) if len(count) < 4 else stop()

    monkeypatch.setattr(trainer, "optimizer_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.pretrain(settings, tmp_path / "parts")
    monkeypatch.setattr(trainer, "optimizer_step", step)
    trainer.pretrain(settings, tmp_path / "parts", resume=True)
    assert_same_tensors(tmp_path / "whole/model.safetensors", tmp_path / "parts/model.safetensors")
    assert untimed(metrics(tmp_path / "whole")) == untimed(metrics(tmp_path / "parts"))
    whole, parts = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts"))
    assert whole["distinct_problems"] == parts["distinct_problems"]


def stop():
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------------------- a run

ALWAYS = {"step", "reward", "reward_std", "solved", "frac_reward_zero_std", "completions/mean_length", "completions/tokens"}
ALWAYS |= {"loss", "grad_norm", "learning_rate", "entropy", "seconds", "seconds/rollout", "seconds/update"}
ALWAYS |= {"network_calls/rollout", "network_calls/update"}
RATIOS = {"ratio_mean", "ratio_max", "ratio_std", "log_ratio_std", "clip_fraction", "bypass_fraction", "effective_sample_size"}


def test_a_run_leaves_its_files_and_nothing_else(base, tmp_path, capfd):
    out = tmp_path / "run"
    trainer.train(tiny.settings(base), out)
    expected = {".lock", "config.yaml", "metrics.jsonl", "curve.png", "summary.json", "checkpoint-2"}
    assert {path.name for path in out.iterdir()} == expected
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs(name, base, tmp_path):
    """Two rollouts with two updates each: it learns, and says all that there is to be said about it."""
    out = tmp_path / "run"
    summary = trainer.train(tiny.settings(base, method=name), out)
    wanted = {"method": name, "seed": 0, "steps": 2, "evaluated_on": 4, "temperature": 1.0}
    assert {key: summary[key] for key in wanted} == wanted and json.loads((out / "summary.json").read_text()) == summary
    assert 0 <= summary["solved_before"] <= 1 and 0 <= summary["solved_after"] <= 1 and summary["seconds"] >= 0
    rows, method = updates(out), methods.METHODS[name]
    keys = ALWAYS | (RATIOS if method.anchor != "none" or "sampling" in method.temperature else set())
    keys |= ({"kl"} if method.kl else set()) | ({"order_impossible"} if "order_logp" in method.features else set())
    assert [row["step"] for row in rows] == [1, 2] and [row["step"] for row in metrics(out)] == [0, 1, 2, 2]
    for row in rows:
        assert row.keys() - {"seconds/scoring", "network_calls/scoring"} == keys
        assert all(math.isfinite(value) for value in row.values()) and row["grad_norm"] > 0
        if "ratio_max" in keys:
            assert 0 < row["effective_sample_size"] <= 1 + 1e-6 and row["ratio_max"] >= row["ratio_mean"] > 0
    assert not torch.equal(*(load_file(f / "model.safetensors")["lm_head.weight"] for f in (base, out / "checkpoint-2")))


def test_no_method_is_named_in_the_trainer():
    words = {n.value for n in ast.walk(ast.parse(Path(trainer.__file__).read_text())) if isinstance(n, ast.Constant)}
    assert len(words) > 50 and words.isdisjoint(METHODS)


def test_a_config_written_by_a_run_is_that_run(base, tmp_path):
    settings = tiny.settings(base, steps=1, method_options={"plan.min_entropy": 0.01}, optimizer=config.Optimizer(beta2=0.95))
    trainer.train(settings, tmp_path / "run")
    assert config.load(config.Train, tmp_path / "run/config.yaml") == settings


def test_tensorboard_has_the_numbers_of_the_log_and_after_a_resume_no_step_twice(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def logged(checkpoint: Path | None, step: int, rewards: dict[int, float]) -> None:
        log = runs.MetricsLog(tmp_path, checkpoint, step, tensorboard=True)
        for step, reward in rewards.items():
            log.write({"step": step, "reward": reward, "tokens": 7})
        log.close()

    logged(None, 0, {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0})
    (tmp_path / "checkpoint-2").mkdir()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "checkpoint-2/metrics.jsonl").write_text("".join(lines[:2]))
    logged(tmp_path / "checkpoint-2", 2, {3: 0.125})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward"]
    shown = [(event.step, event.value) for event in events.Scalars("reward")]
    assert shown == [(1, 0.25), (2, 0.5), (3, 0.125)] == [(row["step"], row["reward"]) for row in metrics(tmp_path)]
    runs.MetricsLog(tmp_path / "checkpoint-2", None, 0)
    assert [path.name for path in (tmp_path / "checkpoint-2").iterdir()] == ["metrics.jsonl"]


def test_tensorboard_has_all_steps_as_soon_as_a_run_has_ended(base, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer.train(tiny.settings(base, tensorboard=True), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    steps = [row["step"] for row in metrics(tmp_path / "run") if "reward" in row]
    assert [event.step for event in events.Scalars("reward")] == steps != []
    writing = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("tensorboard")]
    assert writing == [], "the end of the process would cut off what it has not written"


def test_a_small_learning_rate_is_not_rounded_away(base, tmp_path):
    trainer.train(tiny.settings(base, steps=1, optimizer=config.Optimizer(learning_rate=3e-8)), tmp_path / "run")
    assert updates(tmp_path / "run")[0]["learning_rate"] == pytest.approx(3e-8)


# -------------------------------------------------------------------------------------------------- stopping and resuming


def interrupt_at(monkeypatch, step: int) -> None:
    """Ctrl-C during a step."""
    run = trainer.Learner.step
    monkeypatch.setattr(trainer.Learner, "step", lambda learner, n: stop() if n == step else run(learner, n))


SHIPPED = Path(__file__).parents[1] / "tiny_configs/bases" / "countdown20_base"
OFF_POLICY = {"rollout_dtype": "bfloat16", "filter_groups": True, "method": "egspo-sa"}


@pytest.mark.parametrize("changes", [{"method": "grpo"}, OFF_POLICY], ids=["grpo", "bfloat16, filtered"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(changes, base, tmp_path):
    optimizer = config.Optimizer(learning_rate=1e-3, schedule="cosine", warmup=5)
    evaluation = config.Evaluation(n=4, every=1)
    settings = tiny.settings(base, steps=4, save_every=2, optimizer=optimizer, evaluate=evaluation, **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer.train(settings, whole)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 3)
        trainer.train(settings, parts)
    assert [row["step"] for row in updates(parts)] == [1, 2, 3]
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')  # a line that was being written
    trainer.train(settings, parts, resume=True)
    assert untimed(metrics(parts)) == untimed(metrics(whole))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(whole / "checkpoint-4" / file, parts / "checkpoint-4" / file)
    times = [row["seconds"] for row in updates(parts)]
    assert times == sorted(times)


def test_the_optimizer_state_matters_for_that(base, tmp_path, monkeypatch):
    settings = tiny.settings(base, steps=2, save_every=1)
    trainer.train(settings, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 1)
        trainer.train(settings, tmp_path / "parts")
    state = json.loads((tmp_path / "parts/checkpoint-1/state.json").read_text())
    monkeypatch.setattr(runs, "load_optimizer", lambda *_: state)
    trainer.train(settings, tmp_path / "parts", resume=True)
    name = "lm_head.weight"
    a, b = (load_file(tmp_path / run / "checkpoint-2/model.safetensors")[name] for run in ("whole", "parts"))
    assert not torch.allclose(a, b, atol=1e-4)


def test_a_folder_that_holds_a_run_is_left_as_it_is(base, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    before = content(tmp_path)
    for resume, message in ((False, "already holds a run"), (True, "holds no checkpoint")):
        with pytest.raises(ValueError, match=message):
            trainer.train(tiny.settings(base), tmp_path / "run", resume)
        with pytest.raises(ValueError, match=message):
            trainer.pretrain(pretrain_settings(), tmp_path / "run", resume)
    with pytest.raises(ValueError, match="which is a file"):
        trainer.train(tiny.settings(base), tmp_path / "run/notes.txt")
    assert content(tmp_path) == before


def test_a_run_is_not_resumed_as_another_one(base, tmp_path):
    out, settings = tmp_path / "run", tiny.settings(base)
    trainer.train(settings, out)
    before = content(out)
    for changes, message in (
        ({"method": "grpo"}, "method: got 'grpo'; allowed 'reinforce'"),
        ({"seed": 1}, "seed: got 1; allowed 0"),
        ({"rollout_dtype": "bfloat16"}, "rollout_dtype: got 'bfloat16'; allowed 'float32'"),
        ({"steps": 1}, "steps: got 1; allowed above 2"),
        ({}, "steps: got 2; allowed above 2"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.train(dataclasses.replace(settings, **changes), out, resume=True)
        assert content(out) == before
    trainer.train(dataclasses.replace(settings, steps=3, micro_batch=5), out, resume=True)
    assert [row["step"] for row in updates(out)] == [1, 2, 3]
    assert config.load(config.Train, out / "config.yaml").steps == 3


def test_interrupted_writing_leaves_no_half_checkpoint(base, tmp_path, monkeypatch):
    settings, out, save = tiny.settings(base, steps=3, save_every=1), tmp_path / "run", runs.save_file
    monkeypatch.setattr(runs, "save_file", lambda tensors, path: stop() if "checkpoint-2" in str(path) else save(tensors, path))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(settings, out)
    assert {path.name for path in out.glob("checkpoint*")} == {"checkpoint-1"}
    monkeypatch.setattr(runs, "save_file", save)
    trainer.train(settings, out, resume=True)
    assert {path.name for path in out.glob("checkpoint*")} == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}


def test_the_last_checkpoint_is_the_one_with_the_highest_number(tmp_path, base):
    settings = tiny.settings(base, steps=20)
    with runs.opened(tmp_path / "run", settings, False) as none:
        assert none is None
    for step in (9, 10):
        with files.folder(tmp_path / f"run/checkpoint-{step}") as part:
            shutil.copy(tmp_path / "run/config.yaml", part)
    for name in ("checkpoint-11.part", "failed-12", "checkpoint-abc13"):
        (tmp_path / "run" / name).mkdir()
    with runs.opened(tmp_path / "run", settings, True) as checkpoint:
        assert checkpoint.name == "checkpoint-10"


# --------------------------------------------------------------------------------------------------- what is not finite


def assert_dump(error: pytest.ExceptionInfo, out: Path, step: int, weights: Path) -> None:
    """The message names the dump, which holds the weights of ``weights``."""
    folder = out / f"failed-{step}"
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    assert_same_tensors(folder / "model.safetensors", weights / "model.safetensors")
    assert json.loads((folder / "state.json").read_text())["step"] == step


def poison(model: nn.Module) -> nn.Module:
    """A network whose gradient, and nothing else, is nan."""
    next(model.parameters()).register_hook(lambda grad: grad * torch.nan)
    return model


def test_a_gradient_that_is_nan_stops_the_run_and_can_be_replayed(base, tmp_path, monkeypatch):
    load = checkpoints.load
    monkeypatch.setattr(checkpoints, "load", lambda *where: (poison(load(*where)[0]), tokenizer()))
    with pytest.raises(RunError, match="step 0: gradient norm is nan; stopped") as error:
        trainer.train(tiny.settings(base), tmp_path / "run")
    assert_dump(error, tmp_path / "run", 0, base)
    with pytest.raises(RunError, match="^gradient norm is nan"):
        trainer.repeat_step(tmp_path / "run", tmp_path / "run/failed-0")
    monkeypatch.setattr(checkpoints, "load", load)
    assert trainer.repeat_step(tmp_path / "run", tmp_path / "run/failed-0")["step"] == 1, "the repaired network passes"


def test_a_failure_in_the_second_update_is_replayed_from_before_the_first(base, tmp_path, monkeypatch):
    """The second update sees weights that the first has made infinite: only from before the step does it come again."""
    settings = tiny.settings(base, method="grpo", optimizer=config.Optimizer(learning_rate=1e30))
    with pytest.raises(RunError, match="step 0: loss is nan; stopped") as error:
        trainer.train(settings, tmp_path / "run")
    assert_dump(error, tmp_path / "run", 0, base)
    rates, step = [], trainer.optimizer_step
    monkeypatch.setattr(trainer, "optimizer_step", lambda *a: rates.append(a[-1]) or step(*a))
    with pytest.raises(FloatingPointError, match="^loss is nan"):
        trainer.repeat_step(tmp_path / "run", tmp_path / "run/failed-0")
    assert rates == [1e30], "one update passed, the second failed"


def test_a_failure_in_a_later_step_is_dumped_with_its_optimizer(base, tmp_path, monkeypatch):
    settings = tiny.settings(base, steps=3, save_every=1, num_iterations=1, optimizer=config.Optimizer(schedule="cosine"))
    clip, norms = nn.utils.clip_grad_norm_, []

    def broken_clip(*arguments):
        norms.append(clip(*arguments))
        return norms[-1] if len(norms) < 3 else torch.tensor(torch.inf)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", broken_clip)
    with pytest.raises(RunError, match="step 2: gradient norm is inf") as error:
        trainer.train(settings, tmp_path / "run")
    out = tmp_path / "run"
    assert_dump(error, out, 2, out / "checkpoint-2")
    assert_same_tensors(out / "failed-2/optimizer.safetensors", out / "checkpoint-2/optimizer.safetensors")
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip)
    row = trainer.repeat_step(out, out / "failed-2")
    assert row["grad_norm"] == float(norms[-1]), "the same puzzles, noise, plan and weights"
    assert row["learning_rate"] == trainer.learning_rate(settings.optimizer, 2, 3)


def test_logits_that_are_nan_stop_the_run_before_and_within_a_step(base, tmp_path, monkeypatch):
    load = checkpoints.load

    def broken(*where):
        model, tok = load(*where)
        model.model.lm_head.weight.data[5] = torch.nan
        return model, tok

    said = "whose weights model.lm_head.weight are not all finite .logits: the model returned NaN"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=said):
        patch.setattr(checkpoints, "load", broken)
        trainer.train(tiny.settings(base), tmp_path / "before")
    settings = tiny.settings(base, num_iterations=1, optimizer=config.Optimizer(learning_rate=1e30))
    with pytest.raises(RunError, match="step 1: logits: the model returned NaN"):
        trainer.train(settings, tmp_path / "within")
    assert (tmp_path / "within/failed-1/optimizer.safetensors").is_file()


@pytest.mark.parametrize("name", METHODS)
def test_a_gradient_that_is_nan_is_no_gradient_of_zero(name, monkeypatch):
    """The loss is 0, its derivative is nan: a state whose cotangent is nan must not pass for one that can be skipped."""
    _, update = method_problem(tiny.learner_on(monkeypatch, tiny.network(), method=name))
    monkeypatch.setattr(methods, "method_loss", lambda *a: (a[3]["logp"] * 0).sqrt().sum())
    with pytest.raises(RunError, match="gradient norm is nan"):
        update()


# ----------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("name", KINDS)
def test_the_micro_batch_changes_neither_metrics_nor_weights(name, monkeypatch):
    results = []
    for size in (3, 1000):
        learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), method=name, micro_batch=size)
        results.append((learner.step(0), tiny.weights(learner.model)))
    (row, weights), (other_row, other_weights) = results
    assert untimed([row])[0] == pytest.approx(untimed([other_row])[0], rel=1e-6, abs=1e-9)
    assert all(torch.allclose(weights[key], other_weights[key], atol=1e-6, rtol=0) for key in weights)
    assert any(not torch.equal(weights[key], value) for key, value in tiny.network(torch.float64).state_dict().items())


@pytest.mark.parametrize("name", KINDS)
def test_a_step_leaves_the_global_generators_alone(name, base):
    def states():
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002

    before = states()
    trainer.Learner(tiny.settings(base, method=name)).step(0)
    assert states() == before


def test_a_step_depends_on_seed_and_step_and_not_on_global_state(base):
    def row(seed: int, step: int) -> dict:
        return untimed([trainer.Learner(tiny.settings(base, seed=seed)).step(step)])[0]

    first = row(0, 0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        assert row(0, 0) == first
    assert row(1, 0) != first and row(0, 1) != first


def test_seeds_are_the_same_in_every_version():
    """The first seven bytes of what `printf 7/3/rollout | sha256sum` says: as many as every generator takes."""
    assert f"{runs.keyed_seed(7, 3, 'rollout'):x}" == "fa0414d9064bf3"


def test_draws_of_one_run_share_no_stream():
    drawn = [
        float(torch.rand((), generator=runs.keyed_generator(seed, step, purpose), dtype=torch.float64))
        for seed in (0, 1, 11)
        for step in (0, 1, 10)
        for purpose in ("rollout", "plan 0", "plan 1")
    ]
    assert len(set(drawn)) == 27


def test_every_draw_of_a_step_is_keyed_by_seed_step_and_what_it_is_for(base, monkeypatch):
    keyed, drawn = runs.keyed_seed, []
    for module in (runs, trainer):
        monkeypatch.setattr(module, "keyed_seed", lambda *key: drawn.append(key) or keyed(*key))
    trainer.Learner(tiny.settings(base, method=refreshed("independent")[0], seed=5)).step(3)
    purposes = {"puzzles", "rollout", "plan 0", "plan 1", "schedule", "plan of the old value"}
    assert {*drawn} == {(5, 3, purpose) for purpose in purposes}


# -------------------------------------------------------------------------------------------------- groups without signal


def half_silent(experience: trainer.Experience) -> trainer.Experience:
    """The first group's rewards made equal, those of its completions in one step too."""
    reward = experience.reward.clone()
    reward[: tiny.GENERATIONS] = 0.5
    return dataclasses.replace(experience, reward=reward)


@pytest.mark.parametrize("name", METHODS)
def test_groups_of_equal_rewards_are_left_out_where_they_cannot_contribute(name, monkeypatch):
    """Of the second update: there the ratios are not 1, and what a group without advantages contributes would show."""
    learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), method=name)
    experience = half_silent(tiny.experience(learner))
    monkeypatch.setattr(Countdown, "score", lambda *_: 0.5)  # of the completions in one step
    second = learner.method.refresh != "fixed"  # else the plan of the first update is that of the second
    noise, schedule = learner.generator(0, f"plan {int(second)}"), learner.generator(0, "schedule")
    told = {"update": int(second), "updates": 2, "schedule": schedule}
    drawn = methods.draw(learner.method, experience.rollout, noise, **told)
    at, rows = second_update(learner, experience), tiny.GENERATIONS
    assert drawn.valid[:, :rows].any(), "there was something to leave out"
    assert torch.equal(at.plan.scored[:, rows:], drawn.scored[:, rows:])
    assert torch.equal(at.plan.valid[:, rows:], drawn.valid[:, rows:])
    if learner.method.kl or name == "gdsd":  # a penalty, or a regression on an advantage of 0
        assert torch.equal(at.plan.valid, drawn.valid) and torch.equal(at.plan.scored, drawn.scored)
        return
    assert not at.plan.valid[:, :rows].any() and not at.plan.scored[:, :rows].any()
    monkeypatch.setattr(trainer, "optimizer_step", lambda *_: 1.0)
    gradients = []
    for which in (at.plan, drawn):
        learner.update(experience, which, at.adv, at.anchor, trainer.Clock())
        gradients.append(tiny.gradient(learner.model))
    assert (gradients[0] - gradients[1]).norm() < 1e-12 * gradients[1].norm()


def test_a_group_without_advantages_contributes_to_a_regression(monkeypatch):
    """So the trainer must not leave it out, and tells such an objective by what it does."""
    learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), method="gdsd")
    assert not learner.method.objective.func.needs_advantage
    experience = half_silent(tiny.experience(learner))
    at = second_update(learner, experience)
    monkeypatch.setattr(trainer, "optimizer_step", lambda *_: 1.0)
    gradients = []
    for which in (at.plan, learner._audible(at.plan, at.adv)):
        learner.update(experience, which, at.adv, at.anchor, trainer.Clock())
        gradients.append(tiny.gradient(learner.model))
    assert (gradients[0] - gradients[1]).norm() > 1e-3 * gradients[0].norm()


def test_groups_of_equal_rewards_are_counted(base, monkeypatch):
    monkeypatch.setattr(Countdown, "score", score_of_even_targets)
    learner = trainer.Learner(tiny.settings(base, num_prompts=8, method="replay-grpo"))
    groups = learner.collect(0, trainer.Clock()).reward.view(8, tiny.GENERATIONS)
    silent = sum(len(set(group)) == 1 for group in groups.tolist())
    row = learner.step(0)
    assert 0 < silent < 8 and row["frac_reward_zero_std"] == silent / 8
    assert row["reward_std"] == pytest.approx(float(groups.std(1).mean()))


@pytest.mark.parametrize("name", METHODS)
def test_equal_rewards_change_no_weight(name, base, monkeypatch):
    monkeypatch.setattr(Countdown, "score", lambda *_: 0.25)
    learner = trainer.Learner(tiny.settings(base, method=name))
    before, row = tiny.weights(learner.model), learner.step(0)
    assert all(torch.equal(before[key], value) for key, value in learner.model.state_dict().items())
    assert row["frac_reward_zero_std"] == 1 and row["grad_norm"] == 0 and row["network_calls/update"] == 0


def test_a_run_in_which_nothing_could_be_learned_can_be_resumed(base, tmp_path, monkeypatch):
    monkeypatch.setattr(Countdown, "score", lambda *_: 0.25)
    settings = tiny.settings(base, steps=1)
    trainer.train(settings, tmp_path / "run")
    trainer.train(dataclasses.replace(settings, steps=2), tmp_path / "run", resume=True)
    assert_same_tensors(base / "model.safetensors", tmp_path / "run/checkpoint-2/model.safetensors")


# ------------------------------------------------------------------------------------------------------ filtered groups


def score_of_even_targets(task, puzzle, response) -> float:
    return tiny.varied_score(task, puzzle, response) if puzzle.target % 2 else 0.25


def whole_experience(learner: trainer.Learner) -> trainer.Experience:
    return learner.collect(0, trainer.Clock())


def test_selected_prompts_keep_everything_that_is_theirs(base):
    learner = trainer.Learner(tiny.settings(base, method="egspo-sa"))
    whole, n = whole_experience(learner), tiny.GENERATIONS
    some = whole.select(torch.tensor([True, False, True]))
    rows = [*range(n), *range(2 * n, 3 * n)]
    assert some.problems == [whole.problems[0], whole.problems[2]] and some.texts == [whole.texts[i] for i in rows]
    assert torch.equal(some.reward, whole.reward[rows]) and some.rollout.num_generations == n
    for name, value in {**vars(whole.rollout), **whole.rollout.records}.items():
        if torch.is_tensor(value):
            cut = some.rollout.records[name] if name in whole.rollout.records else getattr(some.rollout, name)
            assert torch.equal(cut, value[rows]), name
    reward, solved = learner.judge(some.problems, some.texts)
    assert torch.equal(reward.to(some.reward), some.reward)
    assert torch.equal(solved, some.solved) and torch.equal(some.solved, whole.solved[rows])


@pytest.mark.parametrize("name", ["reinforce", "ppo-released", "stabledrl", "egspo-sa", "tracerl"])
def test_filtered_groups_leave_the_means_to_the_others(name, base, monkeypatch):
    """The update is that of the experience that holds the other prompts only."""
    monkeypatch.setattr(Countdown, "score", score_of_even_targets)
    settings = tiny.settings(base, method=name, num_prompts=8, num_iterations=1, filter_groups=True)
    learner, other = trainer.Learner(settings), trainer.Learner(settings)
    whole = whole_experience(other)
    speaks = torch.tensor([len(set(group)) > 1 for group in whole.groups.tolist()])
    row = learner.step(0)
    assert 0 < speaks.sum() < 8 and row["groups_filtered"] == 8 - int(speaks.sum())
    assert row["reward"] == pytest.approx(float(whole.reward.mean())), "what was rolled out is reported whole"
    experience = whole.select(speaks)
    [(plan, adv)] = other.plans(0, experience)
    [anchor] = other.anchors(0, [plan], experience.rollout, trainer.Clock())
    other.update(experience, plan, adv, anchor, trainer.Clock())
    assert all(torch.equal(value, other.model.state_dict()[key]) for key, value in learner.model.state_dict().items())
    unfiltered = trainer.Learner(dataclasses.replace(settings, filter_groups=False))
    full = unfiltered.step(0)
    assert "groups_filtered" not in full and full["grad_norm"] != pytest.approx(row["grad_norm"], rel=1e-3)


def test_filtering_scales_a_mean_over_responses_by_the_share_that_is_left(base, monkeypatch):
    monkeypatch.setattr(Countdown, "score", score_of_even_targets)
    norms = {}
    for filtered in (True, False):
        settings = tiny.settings(base, num_prompts=8, num_iterations=1, filter_groups=filtered)
        norms[filtered] = trainer.Learner(settings).step(0)
    share = 1 - norms[True]["groups_filtered"] / 8
    assert norms[False]["grad_norm"] == pytest.approx(share * norms[True]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_where_every_group_is_filtered_nothing_is_updated_and_the_row_is_complete(name, base, monkeypatch):
    monkeypatch.setattr(Countdown, "score", lambda *_: 0.25)
    learner = trainer.Learner(tiny.settings(base, method=name, filter_groups=True))
    before, row = tiny.weights(learner.model), learner.step(0)
    assert all(torch.equal(before[key], value) for key, value in learner.model.state_dict().items())
    assert row["groups_filtered"] == tiny.GROUPS and row["grad_norm"] == row["loss"] == row["network_calls/update"] == 0
    assert row.keys() >= ALWAYS - {"seconds", "seconds/update"} and learner.updates == 2
    assert not any(value.any() for slot in learner.optimizer.state.values() for value in slot.values())


def test_a_step_that_filters_everything_does_not_stop_the_schedule(base, monkeypatch):
    """A resumed run counts updates by steps, so that an uninterrupted one must as well."""
    monkeypatch.setattr(Countdown, "score", lambda *_: 0.25)
    optimizer = config.Optimizer(learning_rate=1e-3, schedule="cosine")
    learner = trainer.Learner(tiny.settings(base, steps=3, filter_groups=True, optimizer=optimizer))
    rates = [learner.step(step)["learning_rate"] for step in range(3)]
    expected = [np.mean([trainer.learning_rate(optimizer, 2 * k + i, 6) for i in (0, 1)]) for k in range(3)]
    assert rates == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------------------- ratios


def rows_of_updates(learner: trainer.Learner) -> list[dict]:
    """The metrics of each update of step 0."""
    rows, update = [], learner.update

    def spy(*arguments):
        row, ll = update(*arguments)
        rows.append(row)
        return row, ll

    learner.update = spy
    learner.step(0)
    return rows


def refreshed(name: str) -> list[str]:
    found = [m.name for m in methods.METHODS.values() if m.refresh == name and m.anchor == "old"]
    assert found, "the table has such a row"
    return found


@pytest.mark.parametrize("name", refreshed("fixed") + refreshed("paired"))
def test_old_and_new_share_their_masks_so_the_first_ratio_is_exactly_one(name, base):
    first, second = rows_of_updates(trainer.Learner(tiny.settings(base, method=name)))
    assert (first["ratio_mean"], first["ratio_max"], first["ratio_std"]) == (1, 1, 0)
    assert second["ratio_std"] > 1e-3, "the first update moved the weights"


@pytest.mark.parametrize("name", refreshed("paired"))
def test_paired_anchors_come_from_the_old_weights(name, base):
    """With a step size of next to nothing, the second ratio is 1 as well: its masks are new, but both sides see them."""
    still = config.Optimizer(learning_rate=1e-12)
    second = rows_of_updates(trainer.Learner(tiny.settings(base, method=name, optimizer=still)))[1]
    assert second["log_ratio_std"] < 1e-4 and second["ratio_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", refreshed("independent"))
def test_independent_masks_make_the_first_ratio_noise(name, base):
    first = rows_of_updates(trainer.Learner(tiny.settings(base, method=name)))[0]
    assert first["log_ratio_std"] > 1e-2 and first["ratio_mean"] != 1


def test_the_choice_of_the_position_jumps_between_two_precisions_and_the_tokens_do_not():
    """In bfloat16 confidences that are close change their order, in few states: that is nearly all of the difference."""
    model, tok = checkpoints.load(SHIPPED)
    settings = sampler.Sampler(order="low_confidence", temperature=1.0, length=14, block_length=14, tokens_per_step=1)
    task = Countdown(max_number=20, held_out_share=0.15, pretrain_share=0.45)
    prompt = texts.encode_prompts(tok, task.held_out(48), task.prompt_length)
    how = {"eos_token_id": tok.eos_token_id, "num_generations": 4, "generator": torch.Generator().manual_seed(0)}
    with torch.no_grad():
        rollout = sampler.generate(model, *prompt, settings, **how)
        plan = alg.replay_plan(rollout, None, num_states=None, min_entropy=0.0)
        names = ("logp", "order_logp")
        exact = feat.features(model, rollout, plan, temperature=1.0, names=names)
        rounded = feat.features(denoiser.rounded(model, torch.bfloat16), rollout, plan, temperature=1.0, names=names)
    off = {name: (rounded[name] - exact[name])[plan.scored].abs() for name in names}
    jumps = off["order_logp"] > 0.1
    assert off["logp"].max() < 0.2 < 3 < off["order_logp"].max()
    assert jumps.float().mean() < 0.05
    assert off["order_logp"][jumps].square().sum() > 0.95 * off["order_logp"].square().sum()


# ----------------------------------------------------------------------------------------- first passes that are left out

# With one update on a rollout, these read more off the score than its ratio to itself, or to what the sampler recorded.
NEED_A_FIRST_PASS = {"diffu-grpo", "diffu-grpo-released", "egspo-released", "egspo-sa-released", "mdpo", "dppo-topk", "spg"}
NEED_A_FIRST_PASS |= {"gdpo-released", "stabledrl", "stabledrl-released", "stabledrl-elbo", "stabledrl-cv", "stabledrl-block"}
NEED_A_FIRST_PASS |= {"clip-only", "self-norm-only", "espo", "coupled-grpo", "unigrpo"}


def one_update(monkeypatch, name: str, updates: int | None, always: bool = False, **words) -> tuple[torch.Tensor, dict, bool]:
    """(gradient, metrics, was there a first pass?) of the first update on a rollout; ``always``: with a first pass."""
    learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), method=name, num_iterations=1, **words)
    experience = dataclasses.replace(tiny.experience(learner), updates=updates)
    ((plan, adv),) = learner.plans(0, experience)
    (anchor,) = learner.anchors(0, [plan], experience.rollout, trainer.Clock())
    score, scored = learner.score, []
    learner.score = lambda *a: scored.append(1) or score(*a)
    if always:
        learner._without_pass_1 = lambda *_: None
    monkeypatch.setattr(trainer, "optimizer_step", lambda *_: 1.0)
    row, _ = learner.update(experience, plan, adv, anchor, trainer.Clock())
    return tiny.gradient(learner.model), row, bool(scored)


@pytest.mark.parametrize("name", METHODS)
def test_a_first_pass_is_left_out_where_it_would_find_out_nothing_and_only_there(name, monkeypatch):
    gradient, row, scored = one_update(monkeypatch, name, updates=0)
    exact, wanted, _ = one_update(monkeypatch, name, updates=0, always=True)
    assert scored == (name in NEED_A_FIRST_PASS)
    assert exact.norm() > 1e-4 and (gradient - exact).norm() < 1e-12 * exact.norm()
    assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_an_update_in_one_pass_is_that_of_two(name, monkeypatch):
    exact, wanted, _ = one_update(monkeypatch, name, updates=None, always=True)
    for size, scored in ((1, True), (1000, False)):  # a sequence at a time: two passes all the same
        gradient, row, found = one_update(monkeypatch, name, None, always=True, one_pass=True, micro_batch=size)
        assert found == scored
        assert exact.norm() > 1e-4 and (gradient - exact).norm() < 1e-12 * exact.norm()
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_one_pass_counts_no_first_pass(base):
    """Where there would be one: not in an update whose loss is linear."""
    words = {"num_iterations": 2, "one_pass": True, "micro_batch": 1000}
    for name in ("ppo", "reinforce"):
        row = trainer.Learner(tiny.settings(base, method=name, **words)).step(0)
        assert "network_calls/scoring" not in row and row["network_calls/update"] > 0


@pytest.mark.parametrize("name", [m.name for m in methods.METHODS.values() if m.anchor == "behaviour" and not m.extra])
@pytest.mark.parametrize("updates", [1, None])
def test_a_record_of_other_weights_does_not_stand_in_for_a_first_pass(name, updates, monkeypatch):
    """None: weights that are not the trained ones, those of a rounded sampler for example."""
    assert one_update(monkeypatch, name, updates)[2]


@pytest.mark.parametrize("name", ["ppo", "grpo", "replay-grpo", "egspo-exact"])
def test_which_update_is_the_first_on_its_rollout(name, base):
    """Behaviour anchors: the second update is scored. Old ones: with two updates the first is, for the second needs its ll."""
    calls = [row.get("network_calls/scoring") for row in (sampled(base, name, 0.7).step(0), two_updates(base, name).step(0))]
    assert calls[0] is None and calls[1] > 0
    rounded = sampled(base, name, 0.7, rollout_dtype="bfloat16").step(0)
    assert ("network_calls/scoring" in rounded) == (methods.METHODS[name].anchor == "behaviour")


def two_updates(base: Path, name: str) -> trainer.Learner:
    return trainer.Learner(tiny.settings(base, method=name))


def sampled(base: Path, name: str, temperature: float, **changes) -> trainer.Learner:
    settings = tiny.sampler_of(name, temperature=temperature)
    return trainer.Learner(tiny.settings(base, method=name, num_iterations=1, sampler=settings, **changes))


@pytest.mark.parametrize("name", [m.name for m in methods.METHODS.values() if m.temperature == "sampling"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sampler_and_the_trainer_agree_on_what_was_drawn(name, temperature, base, monkeypatch):
    """Same padding, same temperature, same states: the ratio to the behaviour policy is 1, in silent groups too."""
    monkeypatch.setattr(Countdown, "score", score_of_even_targets)
    row = sampled(base, name, temperature, num_prompts=8).step(0)
    assert 0 < row["frac_reward_zero_std"] < 1
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-5) and row["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert row["log_ratio_std"] < 1e-5


@pytest.mark.parametrize("name", ["replay-grpo", "ppo", "drpo", "egspo"])
def test_a_rounded_sampler_is_another_policy(name, base):
    """At equal weights the ratios of bfloat16 rollouts are not 1, and close to it; those of float32 are 1."""
    exact, rounded = (sampled(base, name, 0.7, rollout_dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert exact.actor is exact.network and {p.dtype for p in rounded.actor.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}
    same, other = exact.step(0), rounded.step(0)
    assert same["ratio_mean"] == pytest.approx(1, abs=1e-5) and same["log_ratio_std"] < 1e-5
    assert 1e-4 < other["log_ratio_std"] < 0.3 and other["ratio_mean"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("name", ["ppo", "drpo", "trace-block"])
def test_what_the_sampler_recorded_does_not_matter_where_it_is_scored_anew(name, base, monkeypatch):
    """Weights after two updates, from the record and from one that is off by half a nat: alike with `anchor: old` alone."""
    collect, off = trainer.Learner.collect, [0.0]

    def collect_wrongly(learner, *given):
        made = collect(learner, *given)
        noise = torch.randn(made.rollout.logp.shape, generator=torch.Generator().manual_seed(0))
        made.rollout = dataclasses.replace(made.rollout, logp=made.rollout.logp + off[0] * noise)
        return made

    monkeypatch.setattr(trainer.Learner, "collect", collect_wrongly)
    monkeypatch.setattr(Countdown, "score", score_of_even_targets)
    differs = {}
    for anchor in ("behaviour", "old"):
        weights = []
        for off[0] in (0.0, 0.5):
            learner = trainer.Learner(tiny.settings(base, method=name, method_options={"anchor": anchor}, num_prompts=8))
            learner.step(0)
            weights.append(torch.cat([p.detach().flatten() for p in learner.model.parameters()]))
        differs[anchor] = not torch.equal(*weights)
    assert differs == {"behaviour": True, "old": False}


def test_a_rounded_sampler_follows_the_weights(base):
    """Every rollout is that of the present weights, rounded; its records are float32."""
    learner = trainer.Learner(tiny.settings(base, method="dppo-topk", rollout_dtype="bfloat16"))
    for step in range(2):
        learner.step(step)
        made = whole_experience(learner)
        truth = learner.model.state_dict()
        assert all(torch.equal(value, truth[key].bfloat16()) for key, value in learner.actor.state_dict().items())
        kinds = {value.dtype for value in (made.rollout.logp, made.rollout.records["topk_logp"], made.reward)}
        assert kinds == {torch.float32} and made.rollout.records["entropy"].dtype == torch.float32


def test_positions_are_not_rounded():
    """The frequencies of the rotary embedding are buffers: a sampler that rounds them would misplace late positions."""
    model = tiny.network()
    rounded = denoiser.rounded(model, torch.bfloat16)
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(value, buffers[name]) for name, value in rounded.named_buffers())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    logits = rounded.head(rounded.encode(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)))
    assert logits.dtype == torch.float32


def test_that_agreement_can_fail(base, monkeypatch):
    how = trainer.Learner._how
    monkeypatch.setattr(trainer.Learner, "_how", lambda learner: how(learner) | {"temperature": 1.0})
    assert sampled(base, "replay-grpo", 0.7).step(0)["log_ratio_std"] > 1e-2


def test_a_temperature_of_zero_cannot_be_scored_and_is_refused_before_anything_is_written(base, tmp_path):
    greedy = dataclasses.replace(tiny.SAMPLER, temperature=0.0)
    with pytest.raises(ValueError, match="sampler.temperature: got 0; allowed above 0"):
        trainer.train(tiny.settings(base, sampler=greedy), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------- what a row asks for, it gets


def test_the_exact_penalty_is_the_divergence_over_the_vocabulary(base):
    """Logged as the mean over the scored tokens: 0 before the first update, positive after it; both networks are counted."""
    options = {"kl.form": "exact", "kl.beta": 0.5}
    learner = trainer.Learner(tiny.settings(base, method="ppo", method_options=options))
    first, second = rows_of_updates(learner)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-6
    experience, clock = whole_experience(learner), trainer.Clock()
    plan = learner.method.plan(experience.rollout, learner.generator(0, "plan 0"))
    feature = learner.score(experience.rollout, plan, clock)
    assert clock.calls["scoring"] == 2 * plan.network_calls and (feature["kl_ref"][plan.scored] > 0).all()


def test_a_penalty_against_the_old_weights_needs_no_reference(base):
    learner = trainer.Learner(tiny.settings(base, method="tracerl"))
    assert learner.reference is None
    first, second = rows_of_updates(learner)
    assert first["kl"] == 0 and second["kl"] > 0


def test_impossible_orders_are_counted(monkeypatch):
    """By the oracle's definition: no token of some passed-over position is below the lowest chosen confidence."""
    model, log_tiny = tiny.network(), math.log(torch.finfo(torch.float32).tiny)
    learner = tiny.learner_on(monkeypatch, model, method="egspo-exact")
    experience = tiny.experience(learner)
    assert rows_of_updates(learner)[0]["order_impossible"] == 0, "the sampler itself has chosen so"
    plan = learner.method.plan(experience.rollout, learner.generator(0, "plan 0"))
    present = (plan.valid & plan.scored.any(-1)).nonzero().tolist()
    order = torch.zeros(plan.scored.shape)
    assert trainer._impossible(plan, order) == 0
    for k, b in present[:2]:
        order[k, b][plan.scored[k, b]] = (log_tiny - 0.5) / plan.scored[k, b].sum()
    assert trainer._impossible(plan, order) == pytest.approx(2 / len(present))
    order[:] = -20.0 / tiny.SAMPLER.length
    assert trainer._impossible(plan, order) == 0
    nobody = dataclasses.replace(plan, valid=torch.zeros_like(plan.valid))
    assert trainer._impossible(nobody, order) == 0


def test_orders_become_impossible_when_the_weights_move_far(monkeypatch):
    learner = tiny.learner_on(monkeypatch, tiny.network(), method="egspo-exact")
    experience = tiny.experience(learner)
    at = second_update(learner, experience)
    tiny.perturb(learner.model, 3.0)
    row, _ = learner.update(experience, at.plan, at.adv, at.anchor, trainer.Clock())
    assert 0 < row["order_impossible"] <= 1


def test_step_rewards_are_those_of_the_completions(base):
    """State k of response b: what its completion in one step would earn."""
    learner = trainer.Learner(tiny.settings(base, method="egspo-sa"))
    experience = whole_experience(learner)
    rollout, credit = experience.rollout, {}
    learner.method = dataclasses.replace(learner.method, credit=lambda reward, n, step, *_: credit.update(step=step) or step)
    plan = learner.method.plan(rollout, learner.generator(0, "plan 0"))
    learner.advantages(experience, plan)
    for k, b in plan.valid.nonzero().tolist():
        text = texts.decode(learner.tok, rollout.records["one_step"][b, plan.step[k, b]][None])[0]
        score = tiny.varied_score(tiny.TASK, experience.problems[b // tiny.GENERATIONS], text)
        assert float(credit["step"][k, b]) == score
    assert credit["step"].std() > 0


def test_a_sampled_step_value_reads_its_own_record(base, monkeypatch):
    row = dataclasses.replace(methods.METHODS["egspo-sa"], step_value="sampled")
    monkeypatch.setitem(methods.METHODS, "egspo-sa", row)
    learner = trainer.Learner(tiny.settings(base, method="egspo-sa"))
    made = whole_experience(learner).rollout
    assert set(made.records) == {"entropy", "one_step_sampled"}
    assert rehearsal.completions(learner.method, made) is made.records["one_step_sampled"]
    assert learner.step(0)["grad_norm"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_rehearsal_asks_for_the_records_that_the_row_names(name, monkeypatch):
    """A row that reads a record it did not ask for is refused before anything is loaded."""
    row, settings = methods.METHODS[name], tiny.settings(method=name)
    assert rehearsal.method_of(settings).name == name
    for word in {row.step_value, *row.features} & set(methods.RECORDS):  # what the words of the row ask for
        if not (asked := methods.RECORDS[word]):
            continue
        (record,) = asked
        assert record in row.needs
        monkeypatch.setitem(methods.RECORDS, word, ())
        with pytest.raises(ValueError, match=f"records: the rollout holds no record '{record}"):
            rehearsal.method_of(settings)


def test_a_record_that_the_sampler_cannot_keep_is_refused_before_anything_is_loaded():
    settings = tiny.settings("no folder", method="mdpo")
    settings = dataclasses.replace(settings, sampler=dataclasses.replace(settings.sampler, cache="dual"))
    with pytest.raises(ValueError, match="records: got 'one_step_proposed' with cache dual"):
        rehearsal.method_of(settings)


ORDER = tiny.SAMPLER.order


def with_constants(base: Path, folder: Path, **given) -> Path:
    shutil.copytree(base, folder)
    (folder / checkpoints.CONSTANTS).write_text(json.dumps(given))
    return folder


def test_constants_of_a_control_variate_lie_beside_the_base(base, tmp_path, capsys):
    """Those of the run's order, unsolved first. Without the file the plan is arcs, and a note says so."""
    unsolved, solved = ([x / 100 for x in range(first, first + 57)] for first in (1, 2))
    own = with_constants(base, tmp_path / "base", **{ORDER: {"unsolved": unsolved, "solved": solved}})
    learner = trainer.Learner(tiny.settings(own, method="stabledrl-cv"))
    assert learner.method.plan.keywords["constants"].tolist() == [unsolved, solved]
    made = whole_experience(learner)
    assert set(made.rollout.records) == {"entropy", "seen_logp", "solved"}
    assert torch.equal(made.rollout.records["solved"], made.solved)
    (plan, _), _ = learner.plans(0, made)
    assert bool(plan.shift.any()) and learner.step(0)["grad_norm"] > 0
    assert not capsys.readouterr().err
    learner = trainer.Learner(tiny.settings(base, method="stabledrl-cv"))
    assert learner.method.plan.keywords["constants"] is None
    said = f"no control variate: {base / checkpoints.CONSTANTS} has none for {ORDER} order ("
    assert said in capsys.readouterr().err
    assert learner.plans(0, whole_experience(learner))[0][0].shift is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({ORDER: {"solved": [0.0] * 57}}, f"has {ORDER} {{'solved': [0.0, "),
        ({ORDER: {"solved": [0.0] * 57, "unsolved": [0.0] * 56}}, "each 57 finite numbers, of which the 21st to 50th"),
        ({ORDER: {"solved": [0.0] * 57, "unsolved": [-1.0] * 57}}, "each 57 finite numbers, of which the 21st to 50th"),
        ({ORDER: {"solved": [0.0] * 57, "unsolved": ["0"] * 57}}, "each 57 finite numbers, of which the 21st to 50th"),
    ],
)
def test_a_file_that_holds_no_such_constants_is_one_line(given, said, base, tmp_path):
    own = with_constants(base, tmp_path / "base", **given)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        trainer.Learner(tiny.settings(own, method="stabledrl-cv"))
    assert str(own / "control_variate.json") in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------ the pieces


def test_learning_rate_by_hand():
    warm = config.Optimizer(learning_rate=2.0, warmup=4)
    assert [trainer.learning_rate(warm, step, 100) for step in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = config.Optimizer(learning_rate=2.0, schedule="cosine")
    assert [trainer.learning_rate(cosine, step, 10) for step in (0, 5, 10)] == pytest.approx([2.0, 1.1, 0.2])


def test_without_a_warm_up_and_with_one_of_1_the_first_update_has_the_whole_rate():
    for warmup in (0, 1):
        assert trainer.learning_rate(config.Optimizer(learning_rate=2.0, warmup=warmup), 0, 100) == 2.0


def test_the_schedule_counts_updates_from_the_first_one(base, tmp_path):
    """Two updates a step, of which a row logs the mean; the warm-up ends at the eighth update."""
    settings = tiny.settings(base, optimizer=config.Optimizer(learning_rate=8e-3, warmup=8))
    trainer.train(settings, tmp_path / "run")
    rates = [row["learning_rate"] for row in updates(tmp_path / "run")]
    assert rates == pytest.approx([(1e-3 + 2e-3) / 2, (3e-3 + 4e-3) / 2])


def test_a_run_is_evaluated_and_saved_once_at_each_milestone_and_at_its_end(base, tmp_path, monkeypatch):
    saved, save = [], trainer.Learner.save
    monkeypatch.setattr(
        trainer.Learner, "save", lambda self, folder, state: saved.append(folder.name) or save(self, folder, state)
    )
    evaluation = config.Evaluation(n=4, every=2)
    trainer.train(tiny.settings(base, steps=4, save_every=2, evaluate=evaluation), tmp_path / "run")
    assert [row["step"] for row in metrics(tmp_path / "run") if "eval/solved" in row] == [0, 2, 4]
    assert saved == ["checkpoint-2", "checkpoint-4"]


def test_a_phase_ends_when_the_gpu_is_done_with_it(monkeypatch):
    """What was only queued would be counted in the phase that waits for it."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    with trainer.Clock().phase("update"):
        done.append("work")
    assert done == ["waited", "work", "waited"]


def test_the_rollout_sees_the_micro_batch(base, monkeypatch):
    sizes, generate = [], sampler.generate
    monkeypatch.setattr(sampler, "generate", lambda *a, **words: sizes.append(words["micro_batch"]) or generate(*a, **words))
    trainer.Learner(tiny.settings(base, micro_batch=5)).collect(0, trainer.Clock())
    assert sizes == [5]


def test_evaluation_counts_by_hand(base, monkeypatch):
    model, tok = checkpoints.load(base)
    scores = iter([1.0, 0.0, 0.1, 1.0, 0.0, 0.0, 1.0, 1.0])  # 4 puzzles x 2 samples
    verdicts = (Verdict(score, score == 1, {"well_formed": score >= 0.1}) for score in scores)
    monkeypatch.setattr(Countdown, "judge", lambda *_: next(verdicts))
    result = trainer.evaluate(model, tok, tiny.TASK, tiny.SAMPLER, n=4, samples=2)
    assert result == {"solved": 4 / 8, "well_formed": 5 / 8, "n": 4, "pass@2": 3 / 4}


def test_prompts_are_padded_on_the_left_and_responses_filled_with_eos():
    tok = tokenizer()
    puzzle = tiny.TASK.held_out(1)[0]
    ids, mask = texts.encode_prompts(tok, [puzzle], 12)
    start = 12 - len(puzzle.prompt)
    assert mask[0].tolist() == [False] * start + [True] * len(puzzle.prompt)
    assert tok.decode(ids[0, start:]) == puzzle.prompt
    response = texts.encode_responses(tok, ["5*8=40", "1"], 4)
    assert tok.decode(response[0]) == "5*8=" and response[1].tolist() == [*tok("1").input_ids, *[tok.eos_token_id] * 3]


@pytest.mark.parametrize("name", [m.name for m in methods.METHODS.values() if m.kl and m.kl.target == "reference"])
def test_the_reference_stays_where_it_was_while_the_policy_moves(name, base):
    learner = trainer.Learner(tiny.settings(base, method=name))
    before = tiny.weights(learner.reference)
    learner.step(0)
    assert all(torch.equal(before[key], value) for key, value in learner.reference.state_dict().items())
    assert any(not torch.equal(before[key], value) for key, value in learner.model.state_dict().items())
