"""research/benches/rows_against_oracle.py: its truth by the oracle, its updates draw by draw, its estimates."""

import dataclasses
import math

import pytest
import torch

from minidrl import features as feat
from minidrl import methods, oracle
from minidrl.keyed import keyed_generator
from research import stats
from research.benches import rows_against_oracle as bench

EACH = bench.PROMPTS * bench.GENERATIONS


def perturbed(number: int) -> oracle.TabularDenoiser:
    """A table with other ends than those of ``base_table``."""
    noise = torch.Generator().manual_seed(number)
    return oracle.TabularDenoiser.random(bench.LENGTH, bench.TOKENS, noise)


@pytest.mark.parametrize(
    ("order", "block"),
    [("left_to_right", 4), ("right_to_left", 4), ("random", 2), ("low_confidence", 2), ("low_confidence", 4), ("random", 4)],
)
def test_the_truth_is_that_of_the_oracle_for_each_of_several_tables(order, block):
    several = [perturbed(i) for i in range(1 if block == 4 else 2)]
    value, gradient = bench.Truth(order, block).gradient(torch.stack([m.table for m in several] * 2))
    for i, model in enumerate(several * 2):
        outcomes = oracle.trajectories(model, order, 1.0, 1, block, bench.END)
        judge = oracle.expected_reward(outcomes, bench.accepted_text)
        torch.testing.assert_close(value[i], judge.detach(), rtol=1e-12, atol=0)
        if i < len(several):
            exact = oracle.table_gradient(model, judge).flatten()
            torch.testing.assert_close(gradient[i], exact, rtol=1e-9, atol=1e-14)
    assert torch.equal(gradient[: len(several)], gradient[len(several) :])


@pytest.fixture(scope="module")
def world():
    """A table, and rollouts of three draws by each sampler that a row asks for."""
    model, rollouts = bench.base_table(0), {}
    for name in bench.names():
        for order in bench.orders_of(name):
            kind = (order, bench.block_of(name))
            rollouts.setdefault(kind, bench.collect(model, *kind, 3, 0))
    return model, rollouts


def alone(row, model, base, rollout, plan, own, reward) -> torch.Tensor:
    """Minus the gradient of `methods.method_loss` of one rollout by one table."""

    def read(network, plan, names):
        states = torch.cat(list(feat.state_chunks(plan, 1 << 20)))
        found = feat.state_features(network, rollout, plan, states, temperature=1.0, names=names)
        blank = {k: v.new_zeros(plan.valid.numel(), *v.shape[1:]) for k, v in found.items()}
        return {k: blank[k].index_copy(0, states, v).unflatten(0, plan.valid.shape) for k, v in found.items()}

    parts = tuple(name for name in row.features if name != "topk_logp")
    anchor = ref = None
    if row.anchor == "behaviour":
        anchor = methods.behaviour_anchor(row, plan, rollout)
    if row.anchor == "old":
        where = own if row.refresh == "independent" else plan
        anchor = methods.reduced(row, where, rollout, read(base, where, parts)).detach()
    if row.kl and row.kl.target == "reference":
        ref = methods.kl_target(row, plan, rollout, read(base, plan, parts)).detach()
    values = None
    if row.step_value != "none":
        guesses = methods.completions(row, rollout)
        judged = [[bench.accepted_text(guesses[b, k].tolist()) for b in range(EACH)] for k in range(guesses.shape[1])]
        values = torch.tensor(judged, dtype=torch.float64).gather(0, plan.step)
    adv = methods.advantages(row, plan, rollout, reward, values)
    loss = methods.method_loss(row, plan, rollout, read(model, plan, row.features), adv, anchor, ref)
    return -oracle.table_gradient(model, loss).flatten()


def columns(plan, draw: int):
    """The plan of one draw."""
    rows = slice(draw * EACH, (draw + 1) * EACH)
    names = ("hidden", "scored", "weight", "valid", "step", "targets")
    return dataclasses.replace(plan, **{n: getattr(plan, n)[:, rows] for n in names if getattr(plan, n) is not None})


ONE_OF_A_KIND = [
    "reinforce",
    "grpo",
    "diffu-grpo-paper",
    "stabledrl-sequence",
    "stabledrl-block",
    "egspo-exact",
    "egspo-sa-accounts",
    "ppo",
]
ONE_OF_A_KIND += ["gspo", "unigrpo-igpo"]


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_every_draw_has_the_update_that_it_would_have_alone(name, world):
    """At the weights that sampled, and where each draw has weights of its own."""
    base, rollouts = world
    row, order = bench.method_of(name), bench.orders_of(name)[-1]
    rollout = rollouts[order, bench.block_of(name)]
    reward = bench.accepted(rollout.response)
    many = bench.Updates(row, base, rollout, reward, seed=5)
    for update in (0, 2):
        if update:
            scale = 0.1 * torch.arange(3).view(3, 1, 1, 1)
            many.table = many.table + scale * torch.randn(many.table.shape, generator=torch.Generator().manual_seed(1))
        found = many.direction(update, 3)
        plan = bench.draw_plan(row, rollout, 5, 0 if row.refresh == "fixed" else update, 3)
        own = methods.draw(row, rollout, keyed_generator(5, 0, "plan of the old value"))
        for draw in (0, 2):
            model, mine = oracle.TabularDenoiser(many.table[draw]), slice(draw * EACH, (draw + 1) * EACH)
            given = bench.part(rollout, mine), columns(plan, draw), columns(own, draw), reward[mine]
            exact = alone(row, model, base, *given)
            torch.testing.assert_close(found[draw], exact, rtol=1e-9, atol=1e-13)
            assert exact.abs().max() > 1e-4, "nothing was learned: the comparison says nothing"


def test_noise_does_not_bias_the_estimates():
    """g = a + noise and G = b + noise: the cosine of a and b, although |mean g| is mostly noise."""
    noise, size = torch.Generator().manual_seed(0), 500
    a, b = torch.zeros(2, size, dtype=torch.float64)
    a[:2], b[0] = torch.tensor([0.6, 0.8]), 2.0
    found, naive = [], []
    for _ in range(40):
        g = a + 3 * torch.randn(64, size, generator=noise, dtype=torch.float64) / math.sqrt(size)
        truth = b + torch.randn(64, size, generator=noise, dtype=torch.float64) / math.sqrt(size)
        found.append(bench.with_error(g, truth))
        naive.append(torch.cosine_similarity(g.mean(0), truth.mean(0), dim=0).item())
    cosine, error = torch.tensor([[x["cosine"], x["error"]] for x in found]).T
    assert abs(cosine.mean() - 0.6) < 4 * cosine.std() / math.sqrt(40) < 0.02
    assert 0.5 < error.mean() / cosine.std() < 2
    assert sum(naive) / len(naive) < 0.6 * 0.97


@pytest.mark.slow
def test_the_rehearsal_finds_numbers_for_every_row():
    """REINFORCE in random order has the cosine 1, and the control is off the truth, each within its interval."""
    found = bench.rehearsal()
    expected = {bench.key_of(name, order) for name in methods.METHODS for order in bench.orders_of(name)}
    assert set(found) == expected | {f"control, {order}" for order in bench.orders_of("control")}
    assert not any(math.isnan(row["cosine"]) for row in found.values())
    student, exact, off = stats.student(0.975, bench.PARTS - 1), found["reinforce, random"], found["control, random"]
    assert abs(exact["cosine"] - 1) <= student * exact["error"] <= 0.2
    assert abs(off["cosine"]) + student * off["error"] < 0.5


def test_the_control_is_off_by_as_much_as_arithmetic_says():
    """The gradient in other weights, with signs s: its cosine is sum s_i G_place(i) G_i / |G|^2."""
    model = bench.base_table(1)
    truth = bench.Truth("random", bench.LENGTH)
    exact = truth.gradient(model.table[None])[1][0]
    place, sign = bench.control_direction(1)
    known = float((sign * exact[place] * exact).sum() / exact.square().sum())
    assert abs(known) < 0.3 and sorted(place.tolist()) == list(range(len(exact))) and set(sign.tolist()) == {-1.0, 1.0}
    rollout = bench.collect(model, "random", bench.LENGTH, 64, 1)
    data = (model, rollout, bench.accepted(rollout.response))
    found = bench.measure(bench.CONTROL, "random", 1, data, truth)
    assert abs(found["cosine"] - known) < 3 * found["error"] < 0.3
