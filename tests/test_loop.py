"""The loop: its gradient is the gradient, its draws are keyed, and what a method asks for it gets.

Most laws are judged on one method of each kind (plan, features, step value); those that a new method could break, on all.
"""

import copy
import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import tiny
from minidrl import algorithms as alg
from minidrl import bookkeeping, gradient, loop, methods, sampler
from minidrl import features as feat
from minidrl.keyed import keyed_generator, keyed_seed
from minidrl.run import config, train
from minidrl.tasks import Verdict
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import Countdown

METHODS = tuple(methods.METHODS)
KINDS = list({(row.plan.func, row.features, row.step_value): name for name, row in reversed(methods.METHODS.items())}.values())


@pytest.fixture(autouse=True)
def varied_rewards(monkeypatch):
    monkeypatch.setattr(Countdown, "judge", tiny.varied_judge)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("loop") / "base")


def start(base, **changes) -> loop.Run:
    return train.start(tiny.settings(base, **changes))


def untimed(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("seconds")}


def same_weights(model: nn.Module, before: dict) -> bool:
    return all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def rows_of_updates(run: loop.Run, monkeypatch) -> list[dict]:
    """The metrics of each update of step 0."""
    rows, update = [], loop.update
    monkeypatch.setattr(loop, "update", lambda *a: rows.append(update(*a)) or rows[-1])
    loop.take_step(run, 0)
    return [row for row, _ in rows]


# ------------------------------------------------------------------------------------------------------- the gradient


def joint_backward(model, rollout, plan, loss_of, *, temperature=1.0, names=("logp",), reference=None) -> None:
    """The reference path: one graph over all states of the plan, each a forward of its own."""
    states, plan = torch.arange(plan.valid.numel()), dataclasses.replace(plan, block_length=None)
    how = {"temperature": temperature, "names": names, "reference": reference}
    feature = feat.state_features(model, rollout, plan, states, **how)
    loss_of({name: value.unflatten(0, plan.valid.shape) for name, value in feature.items()}).backward()


def second_update(run: loop.Run, experience: loop.Experience):
    """(plan, adv, anchor, ref) of the second update, after a first one that has moved the weights."""
    method, rollout = run.method, experience.rollout
    credited = loop.plans(run, 0, experience)
    anchor = loop.anchors(run, 0, [plan for plan, _ in credited], rollout)[1]
    if anchor is None and method.anchor == "old":
        anchor = methods.reduced(method, credited[0][0], rollout, loop.score(run, rollout, credited[0][0]))
    tiny.perturb(run.model, 0.1)
    (plan, adv), ref = credited[1], None
    if run.reference is not None and method.kl.form != "exact":
        ref = methods.kl_target(method, plan, rollout, gradient.likelihood(run, run.reference, rollout, plan))
    return plan, adv, anchor, ref


WITH_KL = {"grpo, exact penalty": {"method": "grpo", "method_options": {"kl.form": "exact", "kl.beta": 0.3}}}


@pytest.mark.parametrize("network", ["tiny denoiser, float64", "tabular denoiser, float64"])
@pytest.mark.parametrize("changes", [*({"method": name} for name in KINDS), *WITH_KL.values()], ids=[*KINDS, *WITH_KL])
def test_two_passes_and_an_update_have_the_gradient_of_the_joint_graph(changes, network, monkeypatch):
    build, tolerance = tiny.NETWORKS[network]
    run = tiny.run_on(monkeypatch, build(), **changes)
    experience = tiny.experience(run)
    plan, adv, anchor, ref = second_update(run, experience)
    given = (run.model, experience.rollout, plan, lambda f: methods.method_loss(run.method, plan, *made(f)))

    def made(feature):
        return experience.rollout, feature, adv, anchor, ref

    how = {"temperature": gradient.scoring(run)["temperature"], "names": run.method.features, "reference": run.reference}
    joint_backward(*given, **how)
    exact = tiny.gradient(run.model)
    assert exact.norm() > 1e-4, "a gradient that vanishes can't be judged"
    gradient.two_pass_backward(*given, **how, size=3)
    monkeypatch.setattr(loop, "optimizer_step", lambda *_: 1.0)
    passes = tiny.gradient(run.model)
    loop.update(run, experience, plan, adv, anchor)
    for found in (passes, tiny.gradient(run.model)):
        assert (found - exact).norm() < tolerance * exact.norm()


def nonlinear_loss(feature: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every feature multiplies every other, each state with a weight of its own: no cotangent can be left out or mixed up."""
    weight = torch.arange(1, len(feature["logp"]) + 1)[:, None, None]
    parts = [weight * feature[name].flatten(2) / math.prod(feature[name].shape[3:]) for name in feat.FEATURES]
    sums = torch.stack([part.sum((0, 2)) / 6 for part in parts])
    return sums.tanh().prod(0).sum() + (sums / 5).sum(0).logsumexp(0) + sums.prod(0).mean()


@pytest.mark.parametrize("network", tiny.NETWORKS)
def test_two_passes_give_the_gradient_of_a_loss_that_mixes_all_features(network):
    build, tolerance = tiny.NETWORKS[network]
    model = build()
    made = tiny.rollout(model, dataclasses.replace(tiny.SAMPLER, order="low_confidence"), records=("entropy", "topk"))
    plan = alg.replay_plan(made, torch.Generator().manual_seed(4), num_states=3, min_entropy=0.0)
    reference = copy.deepcopy(model)
    tiny.perturb(reference, 0.5)
    how = {"temperature": 0.8, "names": feat.FEATURES, "reference": reference}
    joint_backward(model, made, plan, nonlinear_loss, **how)
    exact = tiny.gradient(model)
    for size in (1, 3, 256):
        gradient.two_pass_backward(model, made, plan, nonlinear_loss, size=size, **how)
        assert (tiny.gradient(model) - exact).norm() < tolerance * exact.norm()


def one_update(monkeypatch, name: str, updates: int | None, always: bool = False, silent: bool = False, **words) -> tuple:
    """(gradient, metrics, was there a first pass?) of the first update on a rollout; ``always``: with a first pass."""
    run = tiny.run_on(monkeypatch, tiny.network(torch.float64), method=name, num_iterations=1, **words)
    experience = dataclasses.replace(tiny.experience(run), updates=updates)
    experience = half_silent(experience) if silent else experience
    ((plan, adv),) = loop.plans(run, 0, experience)
    (anchor,) = loop.anchors(run, 0, [plan], experience.rollout)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "optimizer_step", lambda *_: 1.0)
        before = run.clock.calls.get("scoring", 0) + plan.network_calls * (run.reference is not None)
        if always:
            patch.setattr(gradient, "known_features", lambda *_: None)
        row, _ = loop.update(run, experience, plan, adv, anchor)
    return tiny.gradient(run.model), row, run.clock.calls.get("scoring", 0) > before


@pytest.mark.parametrize("name", METHODS)
def test_a_first_pass_is_left_out_only_where_it_changes_neither_gradient_nor_metrics(name, monkeypatch):
    found, row, _ = one_update(monkeypatch, name, updates=0)
    exact, wanted, scored = one_update(monkeypatch, name, updates=0, always=True)
    assert scored and exact.norm() > 1e-4 and (found - exact).norm() < 1e-12 * exact.norm()
    assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
def test_a_loss_whose_first_pass_was_left_out_counts_the_states_without_a_gradient(name, monkeypatch):
    words = {"silent": True, "method_options": {"aggregation": "entry_mean"}}
    _, row, _ = one_update(monkeypatch, name, updates=0, **words)
    _, wanted, _ = one_update(monkeypatch, name, updates=0, always=True, **words)
    assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-9)


@pytest.mark.parametrize("updates", [1, None])
def test_a_record_of_other_weights_does_not_stand_in_for_a_first_pass(updates, monkeypatch):
    """None: weights that are not the trained ones, those of a rounded sampler for example."""
    assert not one_update(monkeypatch, "ppo", 0)[2] and one_update(monkeypatch, "ppo", updates)[2]


def test_a_nucleus_makes_a_rollout_off_policy(monkeypatch):
    """Its record is of other distributions than the network's, and does not stand in for a first pass."""
    for top_p, updates in ((1.0, 0), (0.5, None)):
        run = tiny.run_on(monkeypatch, tiny.network(), method="ppo", sampler=tiny.sampler_of("ppo", top_p=top_p))
        assert loop.collect(run, 0).updates == updates


@pytest.mark.parametrize("name", KINDS)
def test_an_update_in_one_pass_is_that_of_two(name, monkeypatch):
    exact, wanted, _ = one_update(monkeypatch, name, updates=None, always=True)
    found, row, scored = one_update(monkeypatch, name, None, always=True, one_pass=True, micro_batch=1000)
    assert not scored and exact.norm() > 1e-4 and (found - exact).norm() < 1e-12 * exact.norm()
    assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_the_micro_batch_changes_neither_metrics_nor_weights(name, monkeypatch):
    results = []
    for size in (3, 1000):
        run = tiny.run_on(monkeypatch, tiny.network(torch.float64), method=name, micro_batch=size)
        results.append((loop.take_step(run, 0), tiny.weights(run.model)))
    (row, weights), (other_row, other_weights) = results
    assert untimed(row) == pytest.approx(untimed(other_row), rel=1e-6, abs=1e-9)
    assert all(torch.allclose(weights[key], other_weights[key], atol=1e-6, rtol=0) for key in weights)


# ------------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("name", METHODS)
def test_a_step_of_every_method_has_all_metrics_and_leaves_the_global_generators_alone(name, base):
    def states():
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002

    before, run = states(), start(base, method=name)
    row = loop.take_step(run, 0)
    assert states() == before and run.updates == 2
    always = {"step", "reward", "reward_std", "solved", "frac_reward_zero_std", "completions/mean_length", "entropy", "loss"}
    always |= {
        "completions/tokens",
        "completions/clipped_ratio",
        "completions/readable",
        "grad_norm",
        "learning_rate",
        "seconds/rollout",
        "network_calls/update",
    }
    assert row.keys() >= always and all(math.isfinite(value) for value in row.values())
    assert ("kl" in row) == (run.method.kl is not None)
    if run.method.anchor != "none":
        assert row.keys() >= {"ratio_mean", "ratio_max", "log_ratio_std", "clip_fraction", "effective_sample_size"}


def test_a_step_depends_on_seed_and_step_and_not_on_global_state(base):
    def row(seed: int, step: int) -> dict:
        return untimed(loop.take_step(start(base, seed=seed), step))

    first = row(0, 0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        assert row(0, 0) == first
    assert row(1, 0) != first and row(0, 1) != first


def test_seeds_are_the_same_in_every_version():
    """The first seven bytes of what `printf 7/3/rollout | sha256sum` says: as many as every generator takes."""
    assert f"{keyed_seed(7, 3, 'rollout'):x}" == "fa0414d9064bf3"


def test_every_draw_of_a_step_is_keyed_by_seed_step_and_what_it_is_for(base, monkeypatch):
    drawn = []
    for name in ("keyed_seed", "keyed_generator"):
        make = getattr(loop, name)
        monkeypatch.setattr(loop, name, lambda *key, make=make: drawn.append(key) or make(*key))
    loop.take_step(start(base, method="gdpo", seed=5), 3)
    purposes = {"puzzles", "rollout", "plan 0", "plan 1", "schedule", "plan of the old value"}
    assert {*drawn} == {(5, 3, purpose) for purpose in purposes}


# ------------------------------------------------------------------------------------------------ groups without signal


def half_silent(experience: loop.Experience) -> loop.Experience:
    """The first group's rewards made equal."""
    reward = experience.reward.clone()
    reward[: tiny.GENERATIONS] = 0.5
    return dataclasses.replace(experience, reward=reward)


@pytest.mark.parametrize("name", METHODS)
def test_groups_of_equal_rewards_are_left_out_where_they_cannot_contribute(name, monkeypatch):
    """Of the second update: there the ratios are not 1, and what a group without advantages contributes would show."""
    run, rows = tiny.run_on(monkeypatch, tiny.network(torch.float64), method=name), tiny.GENERATIONS
    experience = half_silent(tiny.experience(run))
    monkeypatch.setattr(Countdown, "judge", lambda *_: Verdict(0.5, False, {}))  # of the completions in one step
    update = int(run.method.refresh != "fixed")  # else the plan of the first update is that of the second
    noise, schedule = keyed_generator(0, 0, f"plan {update}"), keyed_generator(0, 0, "schedule")
    drawn = methods.draw(run.method, experience.rollout, noise, update=update, updates=2, schedule=schedule)
    plan, adv, anchor, _ = second_update(run, experience)
    assert torch.equal(plan.scored[:, rows:], drawn.scored[:, rows:]) and drawn.valid[:, :rows].any()
    if run.method.kl or not run.method.objective.func.needs_advantage:  # a penalty, or a regression on an advantage of 0
        assert torch.equal(plan.valid, drawn.valid) and torch.equal(plan.scored, drawn.scored)
        return
    assert not plan.valid[:, :rows].any() and not plan.scored[:, :rows].any()
    monkeypatch.setattr(loop, "optimizer_step", lambda *_: 1.0)
    gradients = []
    for which in (plan, drawn):
        loop.update(run, experience, which, adv, anchor)
        gradients.append(tiny.gradient(run.model))
    assert (gradients[0] - gradients[1]).norm() < 1e-12 * gradients[1].norm()


def test_a_group_that_is_left_out_has_no_old_value_either(monkeypatch):
    """Else its ratio, of nothing to all of a likelihood, would overflow and the loss be nan."""
    run = tiny.run_on(monkeypatch, tiny.network(), method="gdpo-sequence", method_options={"refresh": "independent"})
    _, _, anchor, _ = second_update(run, half_silent(tiny.experience(run)))
    assert not anchor[:, : tiny.GENERATIONS].any() and anchor[:, tiny.GENERATIONS :].all()


def test_a_mean_over_entries_counts_the_groups_of_equal_rewards(monkeypatch):
    """Without them it would divide by fewer, and the others would be pushed more."""
    run = tiny.run_on(monkeypatch, tiny.network(), method="ppo", method_options={"aggregation": "entry_mean"})
    plan, *_ = second_update(run, half_silent(tiny.experience(run)))
    assert plan.scored[:, : tiny.GENERATIONS].any()


@pytest.mark.parametrize("name", KINDS)
def test_equal_rewards_change_no_weight_and_the_schedule_goes_on(name, base, monkeypatch):
    monkeypatch.setattr(Countdown, "judge", lambda *_: Verdict(0.25, False, {}))
    run = start(base, method=name)
    before, row = tiny.weights(run.model), loop.take_step(run, 0)
    assert same_weights(run.model, before) and run.updates == 2
    assert row["frac_reward_zero_std"] == 1 and row["grad_norm"] == row["network_calls/update"] == 0


# --------------------------------------------------------------------------------------------------------------- ratios


def refreshed(name: str) -> list[str]:
    return [m.name for m in methods.METHODS.values() if m.refresh == name and m.anchor == "old"]


@pytest.mark.parametrize("name", refreshed("fixed") + refreshed("paired"))
def test_old_and_new_share_their_masks_so_the_first_ratio_is_exactly_one(name, base, monkeypatch):
    first, second = rows_of_updates(start(base, method=name), monkeypatch)
    assert (first["ratio_mean"], first["ratio_max"], first["ratio_std"]) == (1, 1, 0)
    assert second["ratio_std"] > 1e-3, "the first update moved the weights"


@pytest.mark.parametrize("name", refreshed("paired"))
def test_paired_anchors_come_from_the_old_weights(name, base, monkeypatch):
    """With a step size of next to nothing, the second ratio is 1 as well: its masks are new, but both sides see them."""
    still = config.Optimizer(learning_rate=1e-12)
    second = rows_of_updates(start(base, method=name, optimizer=still), monkeypatch)[1]
    assert second["log_ratio_std"] < 1e-4 and second["ratio_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", refreshed("independent"))
def test_independent_masks_make_the_first_ratio_noise(name, base, monkeypatch):
    first = rows_of_updates(start(base, method=name), monkeypatch)[0]
    assert first["log_ratio_std"] > 1e-2 and first["ratio_mean"] != 1


def sampled(base, name: str, temperature: float, **changes) -> loop.Run:
    settings = tiny.sampler_of(name, temperature=temperature)
    return start(base, method=name, num_iterations=1, sampler=settings, **changes)


@pytest.mark.parametrize("name", [m.name for m in methods.METHODS.values() if m.temperature == "sampling"])
def test_the_sampler_and_the_loop_agree_on_what_was_drawn(name, base):
    """Same padding, same temperature, same states: the ratio to the behaviour policy is 1."""
    row = loop.take_step(sampled(base, name, 0.7), 0)
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-5) and row["log_ratio_std"] < 1e-5


def test_a_rounded_sampler_is_another_policy_that_follows_the_weights(base):
    """At equal weights the ratios of bfloat16 rollouts are not 1, and close to it."""
    run = sampled(base, "dppo-topk", 0.7, rollout_dtype="bfloat16")
    assert {p.dtype for p in run.actor.parameters()} == {torch.bfloat16}
    row = loop.take_step(run, 0)
    assert 1e-4 < row["log_ratio_std"] < 0.3 and row["ratio_mean"] == pytest.approx(1, abs=0.2)
    made, truth = loop.collect(run, 1).rollout, run.model.state_dict()
    assert all(torch.equal(value, truth[key].bfloat16()) for key, value in run.actor.state_dict().items())
    assert made.logp.dtype == made.records["topk_logp"].dtype == torch.float32


@pytest.mark.parametrize("name", ["ppo", "trace-block"])
def test_what_the_sampler_recorded_does_not_matter_where_it_is_scored_anew(name, base, monkeypatch):
    """Weights after two updates, from the record and from one that is off by half a nat: alike with `anchor: old` alone."""
    collect, off = loop.collect, [0.0]

    def collect_wrongly(run, step):
        made = collect(run, step)
        noise = torch.randn(made.rollout.logp.shape, generator=torch.Generator().manual_seed(0))
        made.rollout = dataclasses.replace(made.rollout, logp=made.rollout.logp + off[0] * noise)
        return made

    monkeypatch.setattr(loop, "collect", collect_wrongly)
    differs = {}
    for anchor in ("behaviour", "old"):
        runs = []
        for off[0] in (0.0, 0.5):
            runs.append(start(base, method=name, method_options={"anchor": anchor}))
            loop.take_step(runs[-1], 0)
        differs[anchor] = not same_weights(runs[0].model, runs[1].model.state_dict())
    assert differs == {"behaviour": True, "old": False}


# ------------------------------------------------------------------------------------------- what a row asks for, it gets


def test_the_exact_penalty_is_the_divergence_over_the_vocabulary(base, monkeypatch):
    """0 before the first update, positive after it; both networks are counted."""
    run = start(base, method="ppo", method_options={"kl.form": "exact", "kl.beta": 0.5})
    first, second = rows_of_updates(run, monkeypatch)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-6
    rollout, run.clock = loop.collect(run, 0).rollout, loop.Clock()
    plan = run.method.plan(rollout, keyed_generator(0, 0, "plan 0"))
    feature = loop.score(run, rollout, plan)
    assert run.clock.calls["scoring"] == 2 * plan.network_calls and (feature["kl_ref"][plan.scored] > 0).all()


def test_a_penalty_against_the_old_weights_needs_no_reference(base, monkeypatch):
    run = start(base, method="tracerl")
    first, second = rows_of_updates(run, monkeypatch)
    assert run.reference is None and first["kl"] == 0 and second["kl"] > 0


@pytest.mark.parametrize("name", [m.name for m in methods.METHODS.values() if m.kl and m.kl.target == "reference"])
def test_the_reference_stays_where_it_was_while_the_policy_moves(name, base):
    run = start(base, method=name)
    before = tiny.weights(run.reference)
    loop.take_step(run, 0)
    assert same_weights(run.reference, before) and not same_weights(run.model, before)


def test_impossible_orders_are_counted(monkeypatch):
    """By the oracle's definition: no token of some passed-over position is below the lowest chosen confidence."""
    run, log_tiny = tiny.run_on(monkeypatch, tiny.network(), method="egspo-exact"), math.log(torch.finfo(torch.float32).tiny)
    plan = run.method.plan(tiny.experience(run).rollout, keyed_generator(0, 0, "plan 0"))
    present, order = (plan.valid & plan.scored.any(-1)).nonzero().tolist(), torch.zeros(plan.scored.shape)
    assert bookkeeping._impossible(plan, order) == 0
    for k, b in present[:2]:
        order[k, b][plan.scored[k, b]] = (log_tiny - 0.5) / plan.scored[k, b].sum()
    assert bookkeeping._impossible(plan, order) == pytest.approx(2 / len(present))


def test_step_rewards_are_those_of_the_completions(base):
    """State k of response b: what its completion in one step would earn."""
    run, credit = start(base, method="egspo-sa-accounts"), {}
    experience = loop.collect(run, 0)
    run.method = dataclasses.replace(run.method, credit=lambda reward, n, step, *_: credit.update(step=step) or step)
    plan = run.method.plan(experience.rollout, keyed_generator(0, 0, "plan 0"))
    loop.advantages(run, experience, plan)
    for k, b in plan.valid.nonzero().tolist():
        text = texts.decode(run.tok, experience.rollout.records["one_step"][b, plan.step[k, b]][None])[0]
        score = tiny.varied_score(text)
        assert float(credit["step"][k, b]) == score
    assert credit["step"].std() > 0


def test_learning_rate_by_hand():
    warm = config.Optimizer(learning_rate=2.0, warmup=4)
    assert [loop.learning_rate(warm, step, 100) for step in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = config.Optimizer(learning_rate=2.0, schedule="cosine")
    assert [loop.learning_rate(cosine, step, 10) for step in (0, 5, 10)] == pytest.approx([2.0, 1.1, 0.2])
    assert loop.learning_rate(config.Optimizer(learning_rate=2.0), 0, 100) == 2.0


def test_the_rollout_sees_the_micro_batch(base, monkeypatch):
    sizes, generate = [], sampler.generate
    monkeypatch.setattr(sampler, "generate", lambda *a, **words: sizes.append(words["micro_batch"]) or generate(*a, **words))
    loop.collect(start(base, micro_batch=5), 0)
    assert sizes == [5]
