"""research/benches/position_factor.py: its gradients are those of the trainer, its statistics plain arithmetic."""

import dataclasses
import itertools
import statistics

import pytest
import torch

import tiny
from minidrl import loop
from research.benches import position_factor as bench

G = 2 + torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
H = G + 1 + torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_lengths_and_spreads_are_those_of_all_pairs_and_of_each_weight():
    pairs = [float(G[i] @ G[j]) for i, j in itertools.permutations(range(6), 2)]
    assert bench.across(G @ G.T) == pytest.approx(statistics.mean(pairs))
    assert bench.spread(G @ G.T) == pytest.approx(float(G.var(0).sum()))


def test_the_measures_are_what_they_are_called():
    found = bench.Products.of(G, H)
    length, gap = bench.across(H @ H.T), bench.across((G - H) @ (G - H).T)
    bias, token, exact, noise, level = (measure(found) for measure in bench.MEASURES.values())
    assert bias**2 * length == pytest.approx(max(gap, 0.0))
    assert token**2 * length == pytest.approx(float(G.var(0).sum()))
    assert exact**2 * length == pytest.approx(float(H.var(0).sum()))
    assert noise == pytest.approx(exact / token)
    # at this many batches the token score's bias and noise are the exact score's noise
    assert gap + float(G.var(0).sum()) / level == pytest.approx(float(H.var(0).sum()) / level)


def test_the_jackknife_of_a_mean_has_students_interval():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    found = bench.Products(*(torch.diag(values),) * 3)
    value, low, high = bench.jackknife(lambda p: float(p.t.diagonal().mean()), found)
    wanted = bench.stats.mean_interval(values.tolist())
    assert (value, low, high) == pytest.approx(wanted)


@pytest.mark.parametrize("name", bench.rows())
def test_a_gradient_is_that_of_the_trainers_update(name, monkeypatch):
    run = tiny.run_on(monkeypatch, tiny.network(torch.float64), method="reinforce", num_iterations=1)
    row = bench.rows()[name]
    assert row.linear and set(row.features) == ({"logp"} if name == "tokens" else {"logp", "order_logp"})
    experience = dataclasses.replace(tiny.experience(run), updates=0)
    found = bench.gradient(run, row, experience, 0)
    run.method = row
    run.model.zero_grad()
    ((plan, adv),) = loop.plans(run, 0, experience)
    (anchor,) = loop.anchors(run, 0, [plan], experience.rollout)
    monkeypatch.setattr(loop, "optimizer_step", lambda *_: 1.0)
    loop.update(run, experience, plan, adv, anchor)
    applied = tiny.gradient(run.model)
    assert found.norm() > 1e-4 and (found - applied).norm() < 1e-12 * found.norm()
