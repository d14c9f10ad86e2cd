"""Laws of the objectives, section 8. An objective is judged by its gradient; its value means nothing."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import close, coefficients, double, normal, of, refuses, rollout_of


@judges("8.1")
@rejects("8.1", ("_surrogate(-adv * (ll if", "_surrogate(adv * (ll if"))
def law_reinforce_gradient(alg: Any) -> None:
    """The coefficient is -adv, whatever ll is."""
    adv = double([1.0, -2.0, 0.5, 0.0])
    for seed in (23, 24):
        close(coefficients(lambda ll: alg.reinforce(ll, None, adv, 2).loss, normal(4, seed=seed)), [-1.0, 2.0, -0.5, 0.0])


@judges("8.2")
@rejects("8.2", ("-torch.minimum(", "-torch.maximum("))
def law_ppo_gradient(alg: Any) -> None:
    """The coefficient is -adv ratio, but 0 above 1 + epsilon_high where adv > 0, and below 1 - epsilon_low where adv < 0."""
    low, high = 0.2, 0.5
    ratios = [0.1, 0.7, 0.79, 0.81, 0.95, 1.0, 1.1, 1.3, 1.49, 1.51, 3.0, 1e6]
    cases = [(ratio, adv) for ratio in ratios for adv in (2.0, -3.0, 0.0)]
    anchor = normal(len(cases), seed=25)
    adv = double([a for _, a in cases])
    loss = functools.partial(alg.ppo_clip, anchor=anchor, adv=adv, num_generations=1, epsilon_low=low, epsilon_high=high)
    got = coefficients(loss, anchor + double([math.log(r) for r, _ in cases]))
    dead = [(a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) for r, a in cases]
    close(got, [0.0 if off else -a * r for off, (r, a) in zip(dead, cases, strict=True)], atol=1e-9)
    assert abs(got[-2].item()) > 1e6, "with adv < 0 a large ratio passes unbounded"


@judges("8.2", "8.4", "8.5", "8.6", "8.10", "8.11", "8.12", "8.13")
@rejects("8.4", ('_check_above("cap", cap, 0)', '_check_above("cap", cap, -1)'))
@rejects("8.10", ("if not value > least:", "if value < least:"), where="_check_above")
def law_objective_refusals(alg: Any) -> None:
    """Refused by name: anchors with a gradient, and regions, caps and bounds that are empty or no numbers."""
    x = normal(1, 4, 1, seed=28)
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.2}
    for objective in (
        of(alg.ppo_clip, **clip),
        of(alg.self_normalized_clip, cap=5.0),
        of(alg.truncated_is, floor=0.0, cap=5.0),
    ):
        refuses(lambda f=objective: f(x, x.clone().requires_grad_(), x, 2).loss, "anchor", "gradient")
    for objective, key, wrong in (
        *((of(alg.self_normalized_clip), "cap", cap) for cap in (0.0, -1.0)),
        (of(alg.dual_clip, **clip), "bound", 1.0),
        *((of(alg.dppo, form="tv"), "delta", delta) for delta in (0.0, -0.15, math.nan)),
        *((of(alg.dppo_released, form="tv", cap=20.0), "delta", delta) for delta in (0.0, -0.15, math.nan)),
        *((of(alg.spo), "epsilon", epsilon) for epsilon in (0.0, -0.15, math.nan)),
        *((of(alg.drpo), "delta", delta) for delta in (0.0, -0.15, math.nan)),
    ):
        refuses(lambda f=objective, o={key: wrong}: f(x, x, x, 2, **o).loss, f"objective.{key}", str(wrong))
    for floor, cap in ((-0.1, 5.0), (2.0, 2.0), (0.0, 0.0)):
        call = of(alg.truncated_is, floor=floor, cap=cap)
        refuses(lambda f=call: f(x, x, x, 2).loss, "objective", f"floor {floor}", f"cap {cap}")


def weights_of(alg: Any, log_ratios: Tensor, group: int, cap: float) -> Tensor:
    """The weights (8.3) of a flat vector."""
    return alg.self_normalized_weights(log_ratios[None, :, None], group, log_cap=math.log(cap))[0, :, 0]


@judges("8.3")
@rejects("8.3", ("capped.softmax(2)", "capped.exp().div(capped.exp().sum(2, keepdim=True))"))
def law_self_normalized_weights(alg: Any) -> None:
    """A weight is min(ratio, cap) over the group's sum of these. It has the published values and no extremes break it."""
    golden = double([1.0, 2.0, 10.0, 0.25]).log()
    close(weights_of(alg, golden, 4, 5.0), [1 / 8.25, 2 / 8.25, 5 / 8.25, 0.25 / 8.25], "cap 5")
    close(weights_of(alg, golden, 4, 6.0), [1 / 9.25, 2 / 9.25, 6 / 9.25, 0.25 / 9.25], "cap 6")
    logs = normal(12, seed=29, scale=2.0)
    linear = []
    for g in range(3):
        capped = [min(math.exp(v), 3.0) for v in logs[4 * g : 4 * g + 4].tolist()]
        linear += [c / sum(capped) for c in capped]
    close(weights_of(alg, logs, 4, 3.0), linear, "log space = linear space")
    for extreme in ([1e4, -1e4, 0.0, 3.0], [-1e4, -1e4, -1e4, -1e4], [1e4, 1e4, 1e4, 1e4]):
        w = weights_of(alg, double(extreme), 4, 5.0)
        assert bool(w.isfinite().all()) and bool((w >= 0).all())
        close(w.sum(), 1.0, "sum")
    close(weights_of(alg, double([0.7] * 4), 4, 5.0), [0.25] * 4, "equal ratios")
    close(weights_of(alg, double([2.0, 9.0, 3.0, 70.0]), 4, 5.0), [0.25] * 4, "all above the cap")
    close(weights_of(alg, logs, 1, 5.0), torch.ones(12), "a group of one")


@judges("8.3")
@rejects("8.3", ("-1, num_generations", "1, -1"))
def law_self_normalized_weights_stay_in_the_group(alg: Any) -> None:
    """Other prompts do not matter, nor the order in a group, nor a shift below the cap. States and positions stay apart."""
    logs = normal(8, seed=30)
    w, changed = weights_of(alg, logs, 4, 50.0), logs.clone()
    changed[4:] += double([3.0, -1.0, 0.0, 2.0])
    close(weights_of(alg, changed, 4, 50.0)[:4], w[:4], "other prompts")
    order = torch.tensor([2, 0, 3, 1, 4, 5, 7, 6])
    close(weights_of(alg, logs[order], 4, 50.0), w[order], "permutation")
    close(weights_of(alg, logs + double([1.0, -2.0]).repeat_interleave(4), 4, 50.0), w, "shift")
    grid = normal(2, 8, 3, seed=31)
    full = alg.self_normalized_weights(grid, 4, log_cap=1.0)
    for k, i in itertools.product(range(2), range(3)):
        close(full[k, :, i], weights_of(alg, grid[k, :, i], 4, math.e), "each state and position on its own")


@judges("8.4")
@rejects("8.4", ("log_ratio(ll.detach(),", "log_ratio(ll,"), ("math.log(cap)", "math.log(1 + cap)"))
def law_self_normalized_gradient(alg: Any) -> None:
    """The coefficient is -w adv: clipped samples still learn, and nothing flows through the ratio or the normaliser."""
    ratio, adv = [1.0, 2.0, 10.0, 0.25, 7.0, 8.0, 0.5, 1.0], [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1.0, -1.0]
    anchor = normal(8, seed=32)
    for cap in (0.6, 5.0, 6.0):

        def loss(ll: Tensor, sign: float = 1.0, cap: float = cap) -> Tensor:
            given = (ll[None, :, None], anchor[None, :, None], sign * double(adv)[None, :, None], 4)
            return alg.self_normalized_clip(*given, cap=cap).loss

        got = coefficients(loss, anchor + double(ratio).log())
        capped = [min(r, cap) for r in ratio]
        w = [c / sum(capped[4 * (j // 4) : 4 * (j // 4) + 4]) for j, c in enumerate(capped)]
        close(got, [-a * b for a, b in zip(w, adv, strict=True)], f"cap {cap}")
        assert bool((got != 0).all()), "clipped samples learn"
        other = coefficients(functools.partial(loss, sign=-1.0), anchor + double(ratio).log())
        close(other, -got, "weights do not see the sign of adv")


SIDES = {"epsilon_low": 0.2, "epsilon_high": 0.3}


def never(slope: Tensor, ratio: Tensor, adv: Tensor) -> Tensor:
    """No entry is cut."""
    return torch.zeros_like(slope, dtype=torch.bool)


def stops(slope: Tensor, ratio: Tensor, adv: Tensor) -> Tensor:
    """An entry that is cut has no gradient."""
    return slope == 0


def turns_back(slope: Tensor, ratio: Tensor, adv: Tensor) -> Tensor:
    """An entry that is cut is pushed against its advantage."""
    return slope * adv > 0


def weighs_otherwise(slope: Tensor, ratio: Tensor, adv: Tensor) -> Tensor:
    """An entry that is cut has another weight than its ratio."""
    return (slope / -adv - ratio).abs() > 1e-9


class Case(NamedTuple):
    """An objective of section 8, by the name of its function, with numbers that act on the points of the laws below.

    words    its keywords
    cut      what must hold of the entries that it says are cut: never, stops, turns_back, weighs_otherwise, or your own
    passes   bad answers with a ratio above 1.3 are let through up to this one
    """

    words: dict[str, Any]
    cut: Callable[[Tensor, Tensor, Tensor], Tensor] = stops
    passes: float = 1.3


CASES = {
    "reinforce": Case({}, never),
    "ppo_clip": Case(SIDES, passes=math.inf),
    "self_normalized_clip": Case({"cap": 1.4}, lambda slope, ratio, adv: ratio > 1.4),
    "truncated_is": Case({"floor": 0.7, "cap": 1.4}, weighs_otherwise),
    "dual_clip": Case({**SIDES, "bound": 1.6}, passes=1.6),
    "dppo": Case({"delta": 0.05, "form": "tv"}),
    "dppo_released": Case({"delta": 0.05, "form": "kl", "cap": 1.5}, weighs_otherwise),
    "spo": Case({"epsilon": 0.25}, turns_back),
    "drpo": Case({"delta": 0.05}, turns_back),
    "confident_clip": Case(SIDES, passes=math.inf),
    "tangent": Case({**SIDES, "bound": 1.6}, passes=1.6),
    "regression": Case({**SIDES, "psi": 0.1, "length": 3}),
}


def objectives(alg: Any) -> dict[str, Callable]:
    """Every objective that a method uses, with the numbers of its case."""
    for name, method in alg.METHODS.items():
        objective = method.objective.func.__name__
        assert objective in CASES, f"{objective}, the objective of {name}: add a Case to CASES of tests/laws/objectives.py"
    return {name: functools.partial(getattr(alg, name), **case.words) for name, case in CASES.items()}


@judges("8.1", "8.2", "8.4", "8.5", "8.6", "8.10", "8.11", "8.12", "8.13", "8.14", "8.15", "8.16")
@rejects("8.1", ("None else score))", "None else score), adv < 0)"))
@rejects(
    "8.5",
    ("(ratio > cap) | (ratio < floor)", "ratio > cap"),
    ("-ratio.clamp(floor, cap)", "-ratio.clamp(max=cap)"),
    ("log_ratio(ll.detach(),", "log_ratio(ll,"),
)
@rejects(
    "8.6", ("beyond = (adv < 0) &", "beyond = (adv > 0) &"), (".exp() > bound)", ".exp() > 1 + bound)"), ("cut | beyond", "cut")
)
@rejects("8.11", ("~inside | (u.exp() > cap)", "u.exp() > cap"))
@rejects("8.12", ("torch.sign(adv) * (ratio - 1", "(ratio - 1).abs("))
@rejects("8.14", ("* loss, cut, bypass)", "* loss, cut & (anchor > -1), bypass)"))
@rejects("8.15", ("(u < low) | (u > high)", "u > high"))
@rejects(
    "",
    ("in (cut, bypass", "in (~never if cut is None else cut, bypass"),
    ("in (cut, bypass)", "in (cut, ~never if bypass is None else bypass)"),
    where="_surrogate",
)
@rejects("8.16", ("((adv < 0) & below) | beyond", "((adv < 0) & below)"))
def law_cut_is_what_the_clip_does(alg: Any) -> None:
    """cut: the gradient is 0, no longer the ratio's, or turned back. bypass: a bad answer above the clip is not cut."""
    anchor, adv = normal(1, 60, 1, seed=90, scale=0.7) - 1.2, normal(1, 60, 1, seed=91)
    anchor = anchor.clamp(max=-0.6)
    ll = (anchor + normal(1, 60, 1, seed=92, scale=0.5)).clamp(max=-1e-3)
    ratio = (ll - anchor).exp()
    for name, objective in objectives(alg).items():
        result, case = objective(ll, None if name == "reinforce" else anchor, adv, 4), CASES[name]
        expected = case.cut(coefficients(lambda x, f=objective: f(x, anchor, adv, 4).loss, ll), ratio, adv)
        assert bool(expected.any()) == (case.cut is not never) and not expected.all(), f"{name}: its Case shows nothing"
        assert torch.equal(result.cut, expected), f"{name}: what it calls cut is not what its gradient does (CASES)"
        passed = (adv < 0) & (ratio > 1.3) & (ratio <= case.passes)
        assert torch.equal(result.bypass, passed), f"{name}: it should let bad answers through up to {case.passes} (CASES)"


@judges("8.1", "8.2", "8.4", "8.5", "8.6", "8.10", "8.11", "8.12", "8.13", "8.14", "8.15")
@rejects("8.1", ("True, reinforce_on_policy=True", "True"))
@rejects("8.11", ("(reinforce_on_policy", "(linear=True, reinforce_on_policy"))
@rejects("8.14", ("@declares()", "@declares(reinforce_on_policy=True)"))
@rejects("8.15", (", needs_advantage=False", ""), ("reinforce_on_policy=True, ", ""))
@rejects(
    "", ("linear = linear", "linear = reinforce_on_policy"), ("= needs_advantage", "= not needs_advantage"), where="declares"
)
@rejects("8.16", ("@declares(reinforce_on_policy=True)", "@declares()"))
def law_objectives_are_what_they_declare(alg: Any) -> None:
    """linear: coefficients that do not depend on ll. reinforce_on_policy: at ll = anchor they are a constant times -adv.

    needs_advantage: they are 0 where adv is 0. Each declaration is true, and what is not declared is not so.
    """
    anchor, adv = -normal(1, 8, 1, seed=93).abs() - 0.7, normal(1, 8, 1, seed=94)
    adv = (adv.view(2, 4) - adv.view(2, 4).mean(1, keepdim=True)).view(1, 8, 1)  # centred, as some of them need
    ll = anchor + normal(1, 8, 1, seed=95, scale=0.1)
    for name, objective in objectives(alg).items():
        told = objective.func

        def slope(x: Tensor, against: Tensor, a: Tensor, f: Callable = objective) -> Tensor:
            return coefficients(lambda y: f(y, against, a, 4).loss, x)

        moved = torch.equal(slope(ll, anchor, adv), slope(ll - 0.05, anchor, adv))
        assert told.linear == moved, f"{name}: mend linear of its @declares"
        factors = [slope(x, x, adv) / -adv for x in (anchor, anchor - 0.5)]
        constant = bool((torch.stack(factors) - factors[0].flatten()[0]).abs().max() < 1e-12)
        assert told.reinforce_on_policy == constant, f"{name}: mend reinforce_on_policy of its @declares"
        silent = not slope(ll, anchor, 0 * adv).any()
        assert told.needs_advantage == silent, f"{name}: mend needs_advantage of its @declares"


@judges("8.16")
@rejects("8.16", ("torch.where(adv > 0, 1 + d, d.exp())", "d.exp()"), ("torch.minimum(loss, -bound * adv)", "loss"))
def law_tangent(alg: Any) -> None:
    """Its mean over masks lies below adv exp(mean d), with equality at d = 0 in value and gradient; it has (8.6)'s clip."""
    wide = {"epsilon_low": 1e9, "epsilon_high": 1e9, "bound": 1e9}
    d = normal(6, 5, seed=110, scale=0.7)
    for a in (1.5, -2.0):
        adv = torch.full_like(d, a)
        below = -alg.tangent(d, 0 * d, adv, 1, **wide).loss.mean(0)
        assert bool((below <= a * d.mean(0).exp() + 1e-12).all()), f"adv {a}: no bound"
        close(coefficients(lambda x, adv=adv: alg.tangent(x, 0 * d, adv, 1, **wide), 0 * d), -adv, "on policy")
    cases = [(r, a) for r in (-0.5, 0.1, 0.7, 1.0, 1.25, 2.5, 4.0) for a in (2.0, -3.0, 0.0)]
    at = double([r - 1 if a > 0 else math.log(abs(r)) for r, a in cases])
    adv = double([a for _, a in cases])
    found = coefficients(lambda x: alg.tangent(x, 0 * x.detach(), adv, 1, epsilon_low=0.2, epsilon_high=0.3, bound=3.0), at)
    for (r, a), slope in zip(cases, found.tolist(), strict=True):
        r = r if a > 0 else abs(r)
        dead = (a > 0 and r > 1.3) or (a < 0 and (r < 0.8 or r > 3.0))
        close(slope, 0.0 if dead else -a * (1 if a > 0 else r), f"ratio {r}, adv {a}")
    refuses(lambda: alg.tangent(at, at, adv, 1, **{**wide, "bound": 1.0}), "objective.bound", "1.0")


@judges("8.4", "8.2", "8.5")
@rejects("8.2", ("minimum(ratio *", "minimum(ratio.clamp(max=1e3) *"))
def law_one_large_ratio(alg: Any) -> None:
    """Where adv < 0 GRPO's gradient grows with the ratio, a clipped one stops at the cap, and a normalised one at adv g."""
    g, adv = normal(4, 3, seed=71), double([1.0, -1.5, 0.5, -1.0])
    zero, limit = torch.zeros(4, dtype=torch.float64), (adv[:, None] * g).norm(dim=1).max().item()
    norms = {"grpo": [], "clip": [], "stable": [], "normalised": []}
    for ratio in (1e2, 1e5, 1e8):
        ll = double([0.1, math.log(ratio), -0.3, -0.2])
        wide, flat = (zero[None, :, None], adv[None, :, None]), {"anchor": zero, "adv": adv, "num_generations": 4}
        loss = {
            "grpo": lambda x, flat=flat: alg.ppo_clip(x, **flat, epsilon_low=0.2, epsilon_high=0.2).loss / 4,
            "clip": lambda x, flat=flat: alg.truncated_is(x, **flat, floor=0.0, cap=6.0).loss / 4,
            "stable": lambda x, wide=wide: alg.self_normalized_clip(x[None, :, None], *wide, 4, cap=6.0).loss,
            "normalised": lambda x, wide=wide: alg.self_normalized_clip(x[None, :, None], *wide, 4, cap=math.inf).loss,
        }
        for name in norms:
            norms[name].append((coefficients(loss[name], ll) @ g).norm().item())
    close(norms["grpo"][2] / norms["grpo"][1], 1000.0, "linear in the ratio", 1e-3)
    assert max(norms["clip"]) <= 6 * limit and norms["clip"][0] == norms["clip"][2], "stops at the cap"
    assert max(norms["stable"]) <= limit and max(norms["normalised"]) <= limit, "in the hull, whatever the cap"
    close(norms["normalised"][2], (adv[1] * g[1]).norm().item(), "without a cap one answer is the whole gradient", 1e-4)


@judges("8.14")
@rejects("8.14", ("Surrogate(anchor.exp() * loss", "Surrogate(ll.exp() * loss"))
def law_confident_clip(alg: Any) -> None:
    """The gradient is PPO's times exp(anchor), which is data."""
    ll, anchor, adv = -normal(20, seed=64).abs(), -normal(20, seed=65).abs() - 0.1, normal(20, seed=66)
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.3}
    got = coefficients(lambda x: alg.confident_clip(x, anchor, adv, 4, **clip).loss, ll)
    for j in range(20):
        ratio = math.exp(float(ll[j] - anchor[j]))
        stopped = (adv[j] > 0 and ratio > 1.3) or (adv[j] < 0 and ratio < 0.8)
        close(got[j], 0.0 if stopped else -float(adv[j]) * ratio * math.exp(float(anchor[j])), f"entry {j}")


@judges("8.15")
@rejects("8.15", ("/ length - psi", "/ length + psi"))
def law_regression(alg: Any) -> None:
    """The gradient is 2 (u/L - psi adv)/L inside the clip and 0 outside, so that the least loss is at u = L psi adv."""
    anchor, adv, psi, length = normal(9, seed=67), normal(9, seed=68), 0.7, 5
    u = double([-0.5, -0.21, -0.1, 0.0, 0.05, 0.1, 0.2, 0.4, 3.0])
    options = {"psi": psi, "epsilon_low": 0.2, "epsilon_high": 0.3, "length": length}
    got = coefficients(lambda x: alg.regression(x, anchor, adv, 3, **options).loss, anchor + u)
    for j in range(9):
        inside = math.log(0.8) < u[j] < math.log(1.3)
        close(got[j], 2 * (float(u[j]) / length - psi * float(adv[j])) / length if inside else 0.0, f"u = {float(u[j])}")
    goal = double([length * psi * 0.01])
    still = coefficients(lambda x: alg.regression(x, double([0.0]), double([0.01]), 1, **options).loss, goal)
    close(still, [0.0], "at the target")
    assert alg.response_length(None, None, None, None, rollout_of(alg, [[1, 2, 0]]), None) == {"length": 3}
