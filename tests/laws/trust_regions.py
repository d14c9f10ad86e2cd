"""Laws of trust regions, in section 8: objectives with one ratio a token.

Notation as there: mu = exp(anchor), pi = exp(ll), r = pi/mu, s = sign(adv). The coefficient of grad ll is written -adv r w, so
that w is the weight relative to the surrogate without a trust region; w = 1 on policy for all of them.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import close, coefficients, double, normal, of, refuses, rollout_of, seeded

DELTAS = (0.05, 0.15, 0.5, 2.5, 12.5)


def points(count: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities pi and mu in (0.001, 0.999), and normal advantages."""
    drawn = torch.rand(2, count, generator=seeded(60), dtype=torch.float64) * 0.998 + 0.001
    return drawn[0], drawn[1], normal(count, seed=61)


def weight(objective: Callable, pi: Any, mu: Any, adv: Any) -> Tensor:
    """The weight w of an objective: its coefficient over -adv r."""
    pi, mu, adv = double(pi), double(mu), double(adv)
    pi, mu, adv = torch.broadcast_tensors(pi, mu, adv)
    got = coefficients(lambda ll: objective(ll, mu.log(), adv, 1).loss, pi.log())
    return got / (-adv * pi / mu)


def tv_outside(pi: float, mu: float, adv: float, delta: float) -> bool:
    """True where DPPO's mask is 0, by the signed form: the shift in the direction of adv exceeds delta."""
    return (pi - mu if adv > 0 else mu - pi) > delta and adv != 0


def binary_kl(mu: float, pi: float) -> float:
    """The KL divergence of the two-point distributions."""
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def kl_outside(pi: float, mu: float, adv: float, delta: float) -> bool:
    """True where the same mask is 0 by the binary KL divergence."""
    return binary_kl(mu, pi) > delta and adv * (pi - mu) > 0


@judges("8.6")
@rejects("8.6", ("where(adv < 0,", "where(adv > 0,"))
def law_dual_clip_gradient(alg: Any) -> None:
    """The gradient is that of (8.2), and 0 as well where adv < 0 and ratio > bound; the loss is at most -bound adv there."""
    low, high, bound = 0.2, 0.5, 3.0
    ratios = [0.1, 0.7, 0.79, 0.81, 1.0, 1.3, 1.49, 1.51, 2.9, 3.1, 40.0, 1e6]
    cases = [(ratio, adv) for ratio in ratios for adv in (2.0, -3.0, 0.0)]
    anchor, adv = normal(len(cases), seed=62), double([a for _, a in cases])
    ll = anchor + double([math.log(r) for r, _ in cases])
    loss = of(alg.dual_clip, epsilon_low=low, epsilon_high=high, bound=bound)
    got = coefficients(lambda x: loss(x, anchor, adv, 1), ll)
    dead = [(a > 0 and r > 1 + high) or (a < 0 and (r < 1 - low or r > bound)) for r, a in cases]
    close(got, [0.0 if off else -a * r for off, (r, a) in zip(dead, cases, strict=True)], "coefficients", 1e-9)
    values = [-min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in cases]
    expected = [min(v, -bound * a) if a < 0 else v for v, (_, a) in zip(values, cases, strict=True)]
    close(loss(ll, anchor, adv, 1).loss, expected, "loss")
    refuses(
        lambda: alg.dual_clip(ll, anchor, adv, 1, epsilon_low=low, epsilon_high=high, bound=1.0).loss, "objective.bound", "1.0"
    )


@judges("8.7")
@rejects(
    "8.7",
    ("detach().exp(), -torch.expm1(ll.detach()", "exp(), -torch.expm1(ll"),
    ("(drawn, token,", "(token, drawn,"),
    ("(), -torch.expm1(ll.", "(), 0 * (ll."),
    ("(), -torch.expm1(anchor)", "(), 0 * (anchor)"),
)
def law_binary_divergence(alg: Any) -> None:
    """It is |pi - mu|, or the KL of two-point distributions: 0 only on policy, data, and finite for certain tokens."""
    pi, mu, _ = points()
    ll = pi.log().requires_grad_()
    tv, kl = (alg.binary_divergence(ll, mu.log(), form=form) for form in ("tv", "kl"))
    assert not tv.requires_grad and not kl.requires_grad, "the divergence is data"
    pairs = list(zip(pi.tolist(), mu.tolist(), strict=True))
    close(tv, [abs(p - m) for p, m in pairs], "tv")
    close(kl, [binary_kl(m, p) for p, m in pairs], "kl")
    assert bool((tv <= (kl / 2).sqrt() + 1e-12).all()), "Pinsker"
    close(alg.binary_divergence(mu.log(), mu.log(), form="kl"), torch.zeros_like(mu), "on policy")
    certain = double([0.0, 0.0, -1e-9, -800.0, -800.0, -0.5])
    drawn = double([0.0, -1e-9, 0.0, -800.0, -0.5, 0.0])
    for form, dtype in itertools.product(("tv", "kl"), (torch.float64, torch.float32)):
        got = alg.binary_divergence(certain.to(dtype), drawn.to(dtype), form=form)
        assert bool(got.isfinite().all()) and bool((got >= -1e-6).all()), f"{form}: {got.tolist()}"
        close(got[[0, 3]], [0.0, 0.0], f"{form}: equal and certain")
    refuses(lambda: alg.binary_divergence(ll, mu.log(), form="js"), "form", "'js'", "tv, kl")


def partition_divergence(mu: list[float], pi: list[float], items: set[int], form: str) -> float:
    """The divergence over the items and one bucket for the rest."""
    pairs = [(mu[a], pi[a]) for a in sorted(items)] + [(1 - sum(mu[a] for a in items), 1 - sum(pi[a] for a in items))]
    if form == "tv":
        return sum(abs(m - p) for m, p in pairs) / 2
    return sum(m * math.log(m / p) for m, p in pairs if m > 1e-12)


def topk_of(alg: Any, rollout: Any, feature: dict[str, Tensor], form: str) -> Tensor:
    """(8.8) with the arguments that it does not read left empty."""
    ll, one = feature["logp"], torch.ones_like(rollout.logp[:, 0])
    return alg.topk_divergence(ll, torch.ones_like(ll), feature, None, rollout, one, form=form)["divergence"]


@judges("8.8")
@rejects("8.8", ('if form not in ("tv", "kl"):', "if False:"), where="_divergence")
@rejects(
    "8.8",
    ("= (~listed).expand", "= (listed | True).expand"),
    ('.detach(), feature["logp"].detach()', ', feature["logp"]'),
    ("None]).any(-1)", "None]).all(-1)"),
)
def law_topk_divergence(alg: Any) -> None:
    """Each decision of a plan has its own divergence, whether the drawn token is among the M or not. It is data."""
    new, old = normal(2, 3, 4, 7, seed=66, scale=1.5).log_softmax(-1), normal(3, 4, 7, seed=67, scale=1.5).log_softmax(-1)
    best = old.topk(3)
    response = torch.randint(7, (3, 4), generator=seeded(68))
    drawn = old.gather(-1, response[..., None])[..., 0]
    record = {"topk_ids": best.indices, "topk_logp": best.values}
    rollout = rollout_of(alg, response, logp=drawn, records=record)
    logp = new.gather(-1, response.expand(2, 3, 4)[..., None])[..., 0].requires_grad_()
    feature = {"logp": logp, "topk_logp": new.gather(-1, best.indices.expand(2, 3, 4, 3)).requires_grad_()}
    inside = (best.indices == response[..., None]).any(-1)
    assert bool(inside.any()) and not bool(inside.all()), "the fixture has both"
    for form in ("tv", "kl"):
        got = topk_of(alg, rollout, feature, form)
        assert not got.requires_grad, "the divergence is data"
        for k, b, i in itertools.product(range(2), range(3), range(4)):
            items = {*best.indices[b, i].tolist(), int(response[b, i])}
            expected = partition_divergence(old[b, i].exp().tolist(), new[k, b, i].exp().tolist(), items, form)
            close(got[k, b, i], expected, f"{form}: {k}, {b}, {i}")
        sure = rollout_of(alg, response, logp=0 * drawn, records=record | {"topk_logp": best.values - 900.0})
        gone = {"logp": logp.detach() - 900.0, "topk_logp": feature["topk_logp"].detach()}
        assert bool(topk_of(alg, sure, gone, form).isfinite().all()), f"{form}: extremes"
    bare = rollout_of(alg, response, logp=drawn)
    refuses(lambda: topk_of(alg, bare, feature, "tv"), "records", "topk_ids")
    refuses(lambda: topk_of(alg, rollout, feature, "js"), "form", "'js'", "tv, kl")


@judges("8.9")
@rejects(
    "8.9",
    ("log_ratios > 0", "log_ratios < 0"),
    ("log_ratios > 0", "log_ratios >= 0"),
    ("(outside & (torch.sign(adv) * log_ratios > 0))", "outside"),
)
def law_trust_mask(alg: Any) -> None:
    """It is False only outside and on the way out, whatever the divergence. PPO's clip is the one with |r - 1| > epsilon."""
    table = {(a, u, out): not (out and a * u > 0) for a in (2.0, -2.0, 0.0) for u in (0.3, -0.3, 0.0) for out in (True, False)}
    adv, u, outside = (torch.tensor(column) for column in zip(*table, strict=True))
    got = alg.trust_mask(u.double(), adv.double(), outside)
    assert got.dtype == torch.bool and got.tolist() == list(table.values())
    pi, mu, adv = points()
    r = pi / mu
    mask = alg.trust_mask(r.log(), adv, (r - 1).abs() > 0.2)
    ppo = [not ((a > 0 and x > 1.2) or (a < 0 and x < 0.8)) for x, a in zip(r.tolist(), adv.tolist(), strict=True)]
    assert mask.tolist() == ppo


@judges("8.10", "8.9", "8.7")
@rejects("8.10", ("return _surrogate", "inside = trust_mask(u.detach(), adv, divergence < delta)\n    return _surrogate"))
def law_dppo_gradient(alg: Any) -> None:
    """The coefficient is -adv r where the mask lets it through and 0 elsewhere, in either form and at any delta."""
    pi, mu, adv = points()
    for form, outside in (("tv", tv_outside), ("kl", kl_outside)):
        for delta in DELTAS:
            rows = list(zip(pi.tolist(), mu.tolist(), adv.tolist(), strict=True))
            expected = [0.0 if outside(p, m, a, delta) else -a * p / m for p, m, a in rows]
            objective = of(alg.dppo, delta=delta, form=form)
            got = coefficients(lambda ll, objective=objective: objective(ll, mu.log(), adv, 1).loss, pi.log())
            close(got, expected, f"{form}, {delta}")
            close(objective(pi.log(), mu.log(), adv, 1).loss, expected, f"{form}, {delta}: value")
    refuses(lambda: alg.dppo(pi.log(), mu.log(), adv, 1, delta=0.1, form="js").loss, "form", "'js'")
    refuses(lambda: alg.dppo(pi.log(), mu.log().requires_grad_(), adv, 1, delta=0.1, form="tv").loss, "anchor", "gradient")


@judges("8.10", "8.9")
@rejects(
    "8.10",
    (
        "divergence is None:\n        divergence = binary_divergence(ll, anchor, form=form",
        "True:\n        divergence = binary_divergence(ll, anchor, form=form or 'tv'",
    ),
)
def law_dppo_examples(alg: Any) -> None:
    """The paper's two tokens come out as there, the boundary itself is inside, and the way back is never barred."""
    tv, kl = of(alg.dppo, delta=0.15, form="tv"), of(alg.dppo, delta=0.05, form="kl")
    for objective in (tv, kl):
        close(weight(objective, [1e-2, 0.8], [1e-4, 0.99], [1.0, -1.0]), [1.0, 0.0], "rare and likely token")
        close(weight(objective, [1e-2, 0.8], [0.99, 1e-4], [1.0, -1.0]), [1.0, 1.0], "on the way back")
    ppo = of(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2)
    close(weight(ppo, [1e-2, 0.8], [1e-4, 0.99], [1.0, -1.0]), [0.0, 1.0], "PPO")
    supplied = functools.partial(alg.dppo, delta=0.25, form="tv")
    close(weight(supplied, [0.75, 0.7500001, 0.25], [0.5] * 3, [1.0, 1.0, -1.0]), [1.0, 0.0, 1.0], "the boundary is inside")
    larger = functools.partial(alg.dppo, delta=0.25, form=None, divergence=double([0.3, 0.2, 0.3]))
    close(weight(larger, [0.6, 0.9, 0.6], [0.5] * 3, [1.0, 1.0, -1.0]), [0.0, 1.0, 1.0], "another divergence replaces it")
    refuses(
        lambda: weight(functools.partial(larger, form="kl"), [0.6] * 3, [0.5] * 3, [1.0] * 3), "objective.form", "'kl'", "None"
    )


@judges("8.11", "8.9")
@rejects("8.11", (".clamp(max=cap)", ""))
def law_dppo_released(alg: Any) -> None:
    """The coefficient is -min(r, cap) M adv, with nothing through the weight; below the cap it is that of (8.10)."""
    pi, mu, adv = points()
    for form, delta, outside in (("tv", 0.15, tv_outside), ("kl", 0.05, kl_outside)):
        for cap in (1.5, 20.0):
            rows = list(zip(pi.tolist(), mu.tolist(), adv.tolist(), strict=True))
            expected = [0.0 if outside(p, m, a, delta) else -a * min(p / m, cap) for p, m, a in rows]
            released = of(alg.dppo_released, delta=delta, form=form, cap=cap)
            got = coefficients(lambda ll, released=released: released(ll, mu.log(), adv, 1), pi.log())
            close(got, expected, f"{form}, {cap}")
            close(released(pi.log(), mu.log(), adv, 1).loss, double(expected) * pi.log(), f"{form}, {cap}: value")
            bare = coefficients(lambda ll, f=form, d=delta: alg.dppo(ll, mu.log(), adv, 1, delta=d, form=f).loss, pi.log())
            below = pi / mu < cap
            close(got[below], bare[below], f"{form}: below the cap")
            assert bool((got != bare)[~below].any())


@judges("8.12")
@rejects("8.12", ("= adv.abs() * (", "= adv * ("))
def law_spo_gradient(alg: Any) -> None:
    """The weight is w = 1 - s (r - 1)/epsilon: a line in r, 0 at 1 + s epsilon, corrective beyond, without any bound."""
    pi, mu, adv = points()
    s, r = adv.sign(), pi / mu
    for epsilon in (0.2, 1.0, 12.5):
        objective = of(alg.spo, epsilon=epsilon)
        close(weight(objective, pi, mu, adv), 1 - s * (r - 1) / epsilon, f"{epsilon}")
        values = [-(x * a - abs(a) / (2 * epsilon) * (x - 1) ** 2) for x, a in zip(r.tolist(), adv.tolist(), strict=True)]
        close(objective(pi.log(), mu.log(), adv, 1).loss, values, f"{epsilon}: value")
    for a, e in itertools.product((1.0, -1.0), (0.2, 0.5)):
        edge = 0.3 * (1 + a * e)
        inside, at, beyond = weight(of(alg.spo, epsilon=e), [edge - a * 0.01, edge, edge + a * 0.01], 0.3, a).tolist()
        assert inside > 0 > beyond and abs(at) < 1e-12, "zero and change of sign"
    close(weight(of(alg.spo, epsilon=0.2), 1e-2, 1e-4, 1.0), -494.0, "no bound")


@judges("8.13")
@rejects("8.13", ("= adv.abs() * mu", "= adv * mu"))
def law_drpo_gradient(alg: Any) -> None:
    """The weight is w = 1 - s (pi - mu)/delta = 1 - sign(adv (r - 1)) |pi - mu|/delta, a line in pi of slope -s/delta."""
    pi, mu, adv = points()
    s, r = adv.sign(), pi / mu
    for delta in DELTAS:
        objective = of(alg.drpo, delta=delta)
        close(weight(objective, pi, mu, adv), 1 - s * (pi - mu) / delta, f"{delta}")
        close(weight(objective, pi, mu, adv), 1 - (adv * (r - 1)).sign() * (pi - mu).abs() / delta, f"{delta}: other form")
        penalty = adv.abs() * (pi - mu).square() / (2 * delta * mu)
        close(objective(pi.log(), mu.log(), adv, 1).loss, -adv * r + penalty, f"{delta}: value")
        for m, a in itertools.product((0.01, 0.4, 0.99), (1.3, -0.7)):
            steps = weight(objective, torch.linspace(0.001, 0.999, 40, dtype=torch.float64), m, a).diff()
            close(steps, [-math.copysign(1, a) / delta * 0.998 / 39] * 39, f"{delta}: one slope everywhere")


@judges("8.13", "8.12")
@rejects("8.13", ("() * mu * (ratio -", "() * (ratio -"))
def law_drpo_bounds_the_weight_not_the_coefficient(alg: Any) -> None:
    """|w - 1| <= max(mu, 1 - mu)/delta, but r w peaks at (delta + mu)^2/(4 delta mu): no bound in mu."""
    pi, mu, adv = points(2000)
    for delta in DELTAS:
        gap = (weight(of(alg.drpo, delta=delta), pi, mu, adv) - 1).abs()
        assert bool((gap <= torch.maximum(mu, 1 - mu) / delta + 1e-12).all()) and bool((gap <= 1 / delta).all()), f"{delta}"
        assert gap.max() > 0.9 / delta, f"{delta}: the bound is nearly reached"
    published = weight(
        of(alg.drpo, delta=12.5), *(double(x) for x in ([1e-9, 1 - 1e-9] * 2, [1 - 1e-9, 1e-9] * 2, [1, 1, -1, -1]))
    )
    close(published, [1.08, 0.92, 0.92, 1.08], "delta 12.5", 1e-9)
    assert (weight(of(alg.spo, epsilon=0.2), pi, mu, adv) - 1).abs().max() > 100, "SPO has no such bound"
    for delta, m, peak in ((0.15, 0.1, 1.0417), (0.15, 0.01, 4.2667), (0.15, 1e-4, 375.5), (0.5, 0.3, 1.0667)):
        top = (delta + m) / 2
        grid = double([top - 0.01, top, top + 0.01])
        got = -coefficients(
            lambda ll, d=delta, m=m: alg.drpo(ll, double([m] * 3).log(), double([1.0] * 3), 1, delta=d).loss, grid.log()
        )
        close(got[1], (delta + m) ** 2 / (4 * delta * m), "peak")
        assert got[1] > got[0] and got[1] > got[2] and abs(got[1] - peak) < 1e-3 * peak


@judges("8.13", "8.10")
@rejects("8.9", ("torch.sign(adv) *", ""))
def law_the_boundary_must_be_a_probability(alg: Any) -> None:
    """DRPO turns back, and DPPO-tv masks, somewhere in (0, 1) iff adv > 0 and mu < 1 - delta, or adv < 0 and mu > delta.

    DPPO-kl stops every token somewhere: KL(mu || pi) has no bound as pi goes to 0 or 1.
    """
    pi = torch.cat([torch.logspace(-9, -1, 60, dtype=torch.float64), torch.linspace(0.1, 1 - 1e-9, 2000, dtype=torch.float64)])
    for delta, mu, a in itertools.product(
        (0.15, 0.5, 0.9, 1.0, 2.5, 12.5), (1e-3, 0.1, 0.2, 0.49, 0.51, 0.8, 0.9, 0.999), (1.0, -2.0)
    ):
        reachable = mu < 1 - delta if a > 0 else mu > delta
        where = f"delta {delta}, mu {mu}, adv {a}"
        assert bool((weight(of(alg.drpo, delta=delta), pi, mu, a) < 0).any()) == reachable, where
        assert bool((weight(of(alg.dppo, delta=delta, form="tv"), pi, mu, a) == 0).any()) == reachable, where
    far = double([-1e-300, -600.0])  # log pi: certain, and all but impossible
    for mu, delta, a in itertools.product((0.001, 0.1, 0.9, 0.999), (0.05, 0.5), (1.0, -1.0)):
        got = coefficients(
            lambda ll, d=delta, m=mu, a=a: alg.dppo(ll, double([m] * 2).log(), double([a] * 2), 1, delta=d, form="kl").loss, far
        )
        close(got[0 if a > 0 else 1], 0.0, f"kl stops every token: mu {mu}, delta {delta}, adv {a}", 0.0)


def family(alg: Any) -> dict[str, Callable]:
    """Every objective of the section that takes an anchor and one token."""
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.28}
    released = {name: of(alg.dppo_released, delta=0.15, form=name, cap=20.0) for name in ("tv", "kl")}
    masks = {name: of(alg.dppo, delta=0.15, form=name) for name in ("tv", "kl")}
    return {
        "ppo": of(alg.ppo_clip, **clip),
        "dual": of(alg.dual_clip, **clip, bound=3.0),
        "cispo": of(alg.truncated_is, floor=0.0, cap=5.0),
        "spo": of(alg.spo, epsilon=0.2),
        **masks,
        **{f"{name} released": row for name, row in released.items()},
        **{f"drpo {delta}": of(alg.drpo, delta=delta) for delta in DELTAS},
    }
