"""research/benches/audit.py: with shared masks and equal weights each ratio is 1, and its moments have no bias."""

import itertools

import pytest
import torch

import tiny
from minidrl import algorithms as alg
from research.benches import audit


def test_shared_masks_at_equal_weights_are_ratio_one_and_separate_ones_are_not():
    model, noise = tiny.network(), torch.Generator().manual_seed(0)
    rollout = alg.Rollout.of(torch.randint(3, model.vocab_size, (8, 6), generator=noise), num_generations=4)
    old, new = (audit.likelihoods(model, rollout, audit.drawn(rollout, 3, 2)) for _ in range(2))
    for level in audit.LEVELS:
        shared, separate = alg.log_ratio(new[level], old[level]), audit.separate(new[level], old[level])
        assert shared.eq(0).all() and audit.inside(shared).eq(1).all() and audit.group_size(shared, 4).eq(4).all()
        assert separate.std() > 0.01 and audit.group_size(separate, 4).max() < 4
    assert torch.allclose(6 * old["token mean"], old["sequence"])


def test_drift_and_noise_are_those_of_all_draws():
    pairs = torch.tensor([[-1.0, 0.5], [0.0, 0.2], [3.0, 2.3]]).double()  # old and new value of three plans, equally likely
    draws = [torch.stack(two) for two in itertools.product(pairs, repeat=2)]  # two plans, drawn independently
    found = torch.stack([torch.stack(audit.squares(draw[:, 1:], draw[:, :1])) for draw in draws]).mean(0).flatten()
    old, new = pairs.T
    wanted = [(new - old).mean() ** 2, (new - old).var(correction=0), new.var(correction=0) + old.var(correction=0)]
    assert found.tolist() == pytest.approx([float(x) for x in wanted])


def test_the_share_of_the_time_is_that_of_all_draws():
    strata = torch.tensor([[0.0, 2.0], [5.0, 9.0], [1.0, 1.0]]).double()  # two equally likely values in each of three
    draws = itertools.product(*(itertools.product(s, repeat=2) for s in strata))
    z = torch.tensor(list(draws)).double().permute(2, 1, 0)  # (2, 3, draws)
    between, total = (x.mean().item() for x in audit.time_parts(z))
    assert (between, total) == pytest.approx((strata.mean(1).var(correction=0).item(), strata.var(correction=0).item()))


def test_an_estimate_is_a_ratio_of_sums_over_prompts():
    top, bottom, prompt = torch.tensor([4.0, 0.0, 8.0]).double(), torch.ones(3).double(), torch.tensor([0, 0, 1])
    assert audit.estimate(top, bottom, prompt)[0] == 4 and audit.estimate(top, bottom, prompt, root=True)[0] == 2
    assert audit.estimate(top, bottom, prompt) == [4, 2, 8]  # each of the two prompts alone
