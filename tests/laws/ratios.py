"""Laws of ratios and KL, section 7, and of what ratios of a recorded trajectory mean."""

import itertools
import math
from typing import Any

import numpy
import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    RESPONSE,
    Walk,
    close,
    count_noise,
    double,
    ll_of,
    noise,
    normal,
    recorded,
    refuses,
    repeated,
    seeded,
    tabular,
    walk,
)
from minidrl import oracle


@judges("7.1")
@rejects("7.1", ("if anchor.requires_grad:", "if False:"))
def law_log_ratio(alg: Any) -> None:
    """It is ll - anchor with gradient 1 in ll, and the anchor must be data."""
    ll, anchor = normal(2, 3, seed=19).requires_grad_(), normal(2, 3, seed=20)
    got = alg.log_ratio(ll, anchor)
    close(got, [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(ll.tolist(), anchor.tolist(), strict=True)])
    close(torch.autograd.grad(got.sum(), ll)[0], torch.ones(2, 3), "gradient")
    refuses(lambda: alg.log_ratio(ll, anchor.clone().requires_grad_()), "anchor", "gradient")


@judges("7.1")
@rejects("7.1", ("return ll - anchor", "return (ll - anchor).clamp(max=0.5)"))
def law_fresh_masks_inflate_the_ratio(alg: Any) -> None:
    """At equal weights the log-ratio is 0 with shared masks, and with independent ones the mean ratio exceeds 1."""
    model, response = tabular(3, 3), RESPONSE[:3]
    u, order = count_noise(3, 3, 1)
    rollout = repeated(alg, response, (1, 1, 1), u.shape[1])
    with noise(alg, u, order):
        plan = alg.elbo_count_plan(rollout, seeded(), num_states=1, domain="keep", strata=False)
    ll = ll_of(alg, model, rollout, plan)[0, :, 0]
    close(alg.log_ratio(ll, ll.clone()), torch.zeros(ll.shape), "shared masks")
    pairs = alg.log_ratio(ll.repeat_interleave(len(ll)), ll.repeat(len(ll)))
    weights = [(1 / (3 * math.comb(3, len(m))), m) for m in oracle.all_subsets(3)[1:]]
    draws = [(p, 3 / len(m) * sum(v.item() for v in oracle.token_logp(model, response, m).values())) for p, m in weights]
    truth = sum(p * q * math.exp(x - y) for (p, x), (q, y) in itertools.product(draws, repeat=2))
    close(pairs.exp().mean(), truth, "mean ratio")
    assert truth > 1.1


@judges("7.2")
@rejects(
    "7.2",
    ("u = ll - ref\n    if", "u = ref - ll\n    if"),
    ("u.square() / 2", "u.square()"),
    (":\n        return u", ":\n        return u.abs()"),
)
def law_kl_by_enumeration(alg: Any) -> None:
    """k1 and k3 have the mean KL(pi || ref). The gradients of k1, k2, k3 are 0, that of it, and of KL(ref || pi)."""
    z, q = normal(4, seed=21).requires_grad_(), normal(4, seed=22).log_softmax(-1)
    logp = z.log_softmax(-1)
    p = logp.exp()
    forward, backward = (p * (logp - q)).sum(), (q.exp() * (q - logp)).sum()
    target = {"k1": 0 * forward, "k2": forward, "k3": backward}
    for form, kl in target.items():
        penalty = alg.kl_term(logp, q, form=form)
        (got,) = torch.autograd.grad((p.detach() * penalty).sum(), z, retain_graph=True)
        (truth,) = torch.autograd.grad(kl, z, retain_graph=True)
        close(got, truth, f"{form}: gradient")
        value = sum(a * b for a, b in zip(p.tolist(), penalty.tolist(), strict=True))
        if form != "k2":
            close(value, forward.item(), f"{form}: value")
    second = sum(a * b * b / 2 for a, b in zip(p.tolist(), (logp - q).tolist(), strict=True))
    close((p * alg.kl_term(logp, q, form="k2")).sum(), second, "k2: value")
    assert abs(second - forward.item()) > 1e-3, "k2 is not biased on this fixture"


@judges("7.2")
@rejects("7.2", ("torch.expm1(-u) + u", "torch.expm1(-u) - u"))
def law_kl_sign(alg: Any) -> None:
    """k2 and k3 are at least 0, and 0 only at ll = ref. Small differences keep their digits, and the reference is data."""
    u = double([-3.0, -0.1, 0.0, 0.2, 2.0])
    for form in ("k2", "k3"):
        value = alg.kl_term(u, torch.zeros(5, dtype=torch.float64), form=form)
        assert bool((value >= 0).all()) and [v == 0 for v in value.tolist()] == [False, False, True, False, False], form
    tiny = alg.kl_term(double([1e-6]), double([0.0]), form="k3")
    close(tiny * 1e12, [0.5], "k3 near 0", 1e-3)
    refuses(lambda: alg.kl_term(u, u.clone().requires_grad_(), form="k3"), "ref", "gradient")
    refuses(lambda: alg.kl_term(u, u, form="k4"), "kl.form", "'k4'", "k3")


@judges("7.1")
@rejects("7.1", ("    return ll - anchor\n", "    return ll - anchor.mean()\n"))
def law_noise_makes_log_normal_ratios(alg: Any) -> None:
    """At equal weights noise of deviation s gives ratios of mean exp(s^2) and variance exp(2 s^2) (exp(2 s^2) - 1)."""
    x, w = (double(v) for v in numpy.polynomial.hermite_e.hermegauss(60))
    chance = (w / w.sum())[:, None] * (w / w.sum())
    for s in (0.1, 0.5, 1.0):
        ll, anchor = ((-7.0 + s * x)[:, None].expand(60, 60), (-7.0 + s * x)[None].expand(60, 60))
        ratio = alg.log_ratio(ll, anchor).exp()
        close((chance * ratio).sum(), math.exp(s * s), f"mean at {s}", 1e-8)
        second = (chance * ratio.square()).sum() - math.exp(2 * s * s)
        close(second, math.exp(2 * s * s) * math.expm1(2 * s * s), f"variance at {s}", 1e-6)


def changed(model: oracle.TabularDenoiser, scale: float = 0.7) -> oracle.TabularDenoiser:
    """The model after an update."""
    return oracle.TabularDenoiser(model.table.detach() + normal(*model.table.shape, seed=74, scale=scale))


def sampled(model: Any, paths: list, temperature: float) -> Tensor:
    """The log-probability with which each token of each trajectory was drawn, in the state before its step, by the oracle."""
    rows = []
    for path in paths:
        at = {s: oracle.token_logp(model, path.response, oracle.hidden_before(path, s), temperature) for s in path.unmask_step}
        rows.append([at[s][i].item() for i, s in enumerate(path.unmask_step)])
    return double(rows)


def token_ratios(
    alg: Any, order: str, scored: float = 0.7, drawn: float = 0.7, scale: float = 0.7
) -> tuple[Tensor, Tensor, list]:
    """The chance of every trajectory, its token ratios (B, L) anchored on the recorded logp, and the trajectories."""
    model, paths, chance, _ = walk(Walk(3, 2, order, 1, 3))
    rollout = recorded(alg, paths, None, logp=sampled(model, paths, drawn))
    method = alg.METHODS["ppo"]
    plan = method.plan(rollout, seeded())
    ll = alg.reduced(method, plan, rollout, alg.features(changed(model, scale), rollout, plan, temperature=scored))
    u = alg.log_ratio(ll, alg.behaviour_anchor(method, plan, rollout))
    return chance, (u.exp() * plan.scored).sum(0), paths


@judges("7.1", "3.1")
@rejects("3.1", ("masked = (unmask >= steps", "masked = (unmask > steps"), where="_replay_states")
def law_token_ratios_have_mean_one(alg: Any) -> None:
    """E_mu[r] is 1 at every position for random and fixed orders, and 1.018, 0.997, 0.980 in this model by confidence."""
    for order in ("random", "left_to_right", "right_to_left"):
        chance, r, _ = token_ratios(alg, order)
        close(chance @ r, [1.0] * 3, order)
        assert float(r.max() - r.min()) > 1, "the policies differ"
    chance, r, paths = token_ratios(alg, "low_confidence")
    model = walk(Walk(3, 2, "low_confidence", 1, 3))[0]
    truth = chance @ (sampled(changed(model), paths, 0.7) - sampled(model, paths, 0.7)).exp()
    close(chance @ r, truth, "by the oracle")
    close(truth, [1.018, 0.997, 0.980], "biased", 1e-3)
    for order in ("random", "low_confidence"):
        close(token_ratios(alg, order, scale=0.0)[1], torch.ones_like(token_ratios(alg, order)[1]), "the same weights: all 1")


@judges("7.1", "4.1")
@rejects("4.1", ("logits / temperature", "logits * temperature"))
def law_token_ratios_at_the_wrong_temperature(alg: Any) -> None:
    """Scored at 1.3 and drawn at 0.7, the mean ratio is not 1, and with the policy alone not at equal weights."""
    chance, r, paths = token_ratios(alg, "random", scored=1.3, drawn=1.3)
    model = walk(Walk(3, 2, "random", 1, 3))[0]
    truth = chance @ (sampled(changed(model), paths, 1.3) - sampled(model, paths, 1.3)).exp()
    close(chance @ r, truth, "both")
    assert bool(((truth - 1).abs() > 0.01).all()), truth.tolist()
    same = token_ratios(alg, "random", scored=1.3, scale=0.0)[1]
    assert float((same - 1).abs().max()) > 0.1, "the policy alone"
