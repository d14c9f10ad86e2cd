"""Laws of three methods from outside the main families (TraceRL, MDPO, GDSD); they register themselves in laws.LAWS."""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from laws import (
    Formula,
    close,
    coefficients,
    double,
    experience,
    formula,
    judges,
    loose_plan,
    normal,
    oracle,
    positions,
    refuses,
    rollout_of,
    seeded,
)

# ------------------------------------------------------------------------------------------------ 3.4, what a state predicts


@judges("3.4")
def law_prediction_plan(alg: ModuleType) -> None:
    """Every state scores all its hidden positions against its own completion, weight L / hidden; none after the decision."""
    steps = torch.tensor([[0, 2, 1, 3], [1, 0, -1, -1]])
    completions = torch.randint(0, 3, (2, 4, 4), generator=seeded(60))
    rollout = rollout_of(alg, [[1, 2, 0, 1], [2, 1, 0, 0]], [[1] * 4, [1, 1, 0, 0]], unmask_step=steps, records={})
    refuses(lambda: alg.prediction_plan(rollout, seeded()), "records", "'one_step_proposed'")
    rollout.records["one_step_proposed"] = completions
    plan = alg.prediction_plan(rollout, seeded())
    for k in range(4):
        for b, last in enumerate((3, 1)):
            hidden = [int(u >= k or u < 0) for u in steps[b].tolist()]
            close(plan.scored[k, b], hidden if k <= last else [0] * 4, "scored")
            assert torch.equal(plan.targets[k, b], completions[b, k]), "targets"
            assert bool(plan.valid[k, b]) == (k <= last)
            if k <= last:
                close(plan.hidden[k, b, 3:], hidden, "hidden")
                close(plan.weight[k, b], 4 / sum(hidden), "weight")


# ------------------------------------------------------------------------------------------------------------- 5.1, mask pairs


@judges("5.1")
def law_pair_reduction(alg: ModuleType) -> None:
    """Each pair is the estimate that its two states alone would give; the mean over the pairs is the sequence's."""
    rollout, plan, _ = loose_plan(alg)
    both = torch.cat([plan.scored, plan.scored[:1]])
    weight = torch.cat([plan.weight, plan.weight[:1]])
    four = alg.Plan(torch.cat([plan.hidden, plan.hidden[:1]]), both, weight, both.any(-1))
    logp = normal(4, 4, 5, seed=61)
    got = alg.reduce_logp(logp, four, level="pair", normalizer=rollout.lengths.double())
    for j in range(2):
        for b in range(4):
            total = sum(2 * weight[k, b] * logp[k, b, i] for k in (2 * j, 2 * j + 1) for i in positions(both[k, b]))
            close(got[j, b, 0], total / int(rollout.lengths[b]), f"pair {j} of row {b}")
    sequence = alg.reduce_logp(logp, four, level="sequence", normalizer=rollout.lengths.double())
    close(got.mean(0, keepdim=True), sequence, "mean of the pairs")
    present, ones = alg.entries(four, "pair")
    assert present.shape == (2, 4, 1) and bool((ones == 1).all())
    close(present[..., 0], [[float((both[2 * j, b] | both[2 * j + 1, b]).any()) for b in range(4)] for j in range(2)])


# ------------------------------------------------------------------------------------------------------------- 6.5, progress


def progress(reward: list, steps: list, valid: list, n: int, keep: int, eps: float) -> list[list[float]]:
    """The advantages by loops."""
    k_max, rows = len(steps), len(reward)
    value = [[0.0] * rows for _ in range(k_max)]
    for b in range(rows):
        for k in range(k_max):
            later = [steps[s][b] for s in range(k + 1, k_max) if valid[s][b]] or [reward[b]]
            value[k][b] = steps[k][b] - (steps[k - 1][b] if k else 0.0) + 1 + sum(later) / len(later)
    out = [[0.0] * rows for _ in range(k_max)]
    for g in range(0, rows, n):
        for k in range(k_max):
            members = [b for b in range(g, g + n) if valid[k][b]]
            mean = sum(value[k][b] for b in members) / max(len(members), 1)
            spread = math.sqrt(sum((value[k][b] - mean) ** 2 for b in members) / max(len(members) - 1, 1))
            for b in members:
                out[k][b] = (value[k][b] - mean) / (spread + eps)
        size = [sum(abs(out[k][b]) for b in range(g, g + n)) for k in range(k_max)]
        for k in sorted(range(k_max), key=lambda k: (-size[k], k))[keep:]:
            for b in range(g, g + n):
                out[k][b] = 0.0
    return out


@judges("6.5")
def law_progress_advantage(alg: ModuleType) -> None:
    """By loops: the step's gain, the mean of what came later, a z-score per state and group, the K strongest states kept."""
    reward, steps = normal(6, seed=62).tolist(), normal(4, 6, seed=63).tolist()
    valid = [[1] * 6, [1] * 6, [1, 1, 1, 1, 0, 1], [1, 0, 0, 1, 0, 1]]
    for keep in (1, 2, 4):
        time = torch.zeros(4, 6, dtype=torch.float64)
        options = {"num_states": keep, "eps": 1e-4}
        got = alg.progress_advantage(double(reward), 3, double(steps), torch.tensor(valid).bool(), time, **options)
        close(got, progress(reward, steps, valid, 3, keep, 1e-4), f"{keep} states")
        assert int((got.unflatten(1, (2, 3)).abs().sum(2) > 0).sum(0).max()) <= keep


@judges("6.5")
def law_progress_advantage_of_few(alg: ModuleType) -> None:
    """A group that a state has lost altogether, or but for one member, has advantage 0 there, and the other one its own."""
    reward, steps = normal(6, seed=64).tolist(), normal(4, 6, seed=65).tolist()
    valid = [[1] * 6, [1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0], [0] * 6]
    options = {"num_states": 4, "eps": 1e-4}
    time = torch.zeros(4, 6, dtype=torch.float64)
    got = alg.progress_advantage(double(reward), 3, double(steps), torch.tensor(valid).bool(), time, **options)
    close(got, progress(reward, steps, valid, 3, 4, 1e-4))
    close(got[1:, 3:], [[0.0] * 3] * 3, "one of three, none, none")
    assert bool((got[0] != 0).all()) and bool((got[1, :3] != 0).all()), "where there are members to compare"


# ---------------------------------------------------------------------------------------------------------- 8.14, 8.15 losses


@judges("8.14")
def law_confident_clip(alg: ModuleType) -> None:
    """PPO's gradient times exp(anchor), which is data."""
    ll, anchor, adv = -normal(20, seed=64).abs(), -normal(20, seed=65).abs() - 0.1, normal(20, seed=66)
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.3}
    got = coefficients(lambda x: alg.confident_clip(x, anchor, adv, 4, **clip).loss, ll)
    for j in range(20):
        ratio = math.exp(float(ll[j] - anchor[j]))
        stopped = (adv[j] > 0 and ratio > 1.3) or (adv[j] < 0 and ratio < 0.8)
        close(got[j], 0.0 if stopped else -float(adv[j]) * ratio * math.exp(float(anchor[j])), f"entry {j}")


@judges("8.15")
def law_regression(alg: ModuleType) -> None:
    """d/d ll of (clip(u)/L - psi adv)^2: 2 (u/L - psi adv)/L inside the clip, 0 outside; least where u = L psi adv."""
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


# ---------------------------------------------------------------------------------------------------------------- the formulas


@formula("tracerl")
def tracerl(f: Formula) -> Tensor:
    """Steps 0 and 1 of every row taken for one: all revealed tokens scored in the first state; penalty against the anchor."""
    total = 0.0
    for b in f.rows:
        for k in f.states:
            new, old = (f.tokens(model, k, b, 0.8) for model in (f.new, f.old))
            for i in new:
                gap = old[i].detach() - new[i]
                loss = f.clipped((new[i] - old[i].detach()).exp(), f.z_score(b), 0.2, 0.2)
                total = total + (loss + 0.01 * (gap.exp() - gap - 1)) / f.length[b]
    return total / 8


def predicted(f: Formula, model: Any, k: int, b: int) -> dict[int, Tensor]:
    """Log-probabilities of the state's own completion at its hidden positions."""
    step = int(f.plan.step[k, b])
    target, hidden = tuple(f.rollout.records["one_step_proposed"][b, step].tolist()), positions(f.plan.hidden[k, b, 3:])
    logp = oracle.token_logp(model, target, hidden, 0.8)
    return {i: logp[i] for i in hidden}


@formula("mdpo")
def mdpo(f: Formula) -> Tensor:
    """Confidence x L / hidden x clipped ratio for each predicted token, with the progress advantage; k2 to the reference."""
    valid = f.plan.valid.tolist()
    adv = progress(f.reward, f.step_reward, valid, 4, 2, 1e-4)
    total = 0.0
    for b in f.rows:
        for k in f.states:
            if not valid[k][b]:
                continue
            new, old, ref = (predicted(f, model, k, b) for model in (f.new, f.old, f.ref))
            for i in new:
                loss = f.clipped((new[i] - old[i].detach()).exp(), adv[k][b], 0.2, 0.2) * old[i].detach().exp()
                penalty = 0.02 * (new[i] - ref[i].detach()) ** 2 / 2
                total = total + 4 / len(new) * (loss + penalty)
    return total / (8 * 4)


@formula("gdsd")
def gdsd(f: Formula) -> Tensor:
    """Per pair of complementary masks: squared distance of the clipped change of the ELBO, over L, to the advantage."""
    total = 0.0
    for b in f.rows:
        others = [r for j, r in enumerate(f.group(b)) if j != b % 4]
        adv = f.reward[b] - sum(others) / 3
        for pair in range(len(f.states) // 2):
            change = 0.0
            for k in (2 * pair, 2 * pair + 1):
                for model, sign in ((f.new, 1), (f.old, -1)):
                    logp = f.tokens(model, k, b)
                    estimate = (4 + 1) / (2 * len(logp)) * sum(logp.values()) if logp else 0.0
                    change = change + sign * (estimate if sign > 0 or not logp else estimate.detach())
            ratio = change.exp().item()
            f.ratios.append((ratio, adv))
            if 0.5 < ratio < 2:
                total = total + (change / 4 - adv) ** 2
    return total / 8


@judges("10.1", "3.3", "3.4", "6.5", "8.14", "8.15", "5.1", "6.3")
def law_methods_of_the_zoo(alg: ModuleType) -> None:
    """The three rows against their formulas (law_methods judges all rows; this one alone is quick)."""
    from laws import judge_row

    assert experience() is not None
    for name in ("tracerl", "mdpo", "gdsd"):
        judge_row(alg, name, alg.METHODS[name])


# --------------------------------------------------------------------------------------------------------------- wd1


@judges("6.6")
def law_softmax_contrast(alg: ModuleType) -> None:
    """By loops over each group; equal rewards give 0; for small rewards 2 psi (reward - mean) / N."""
    reward, psi = double([1.0, 0.0, 0.25, 2.0, 0.5, 0.5, 0.5, 0.5]), 1.5
    got = alg.softmax_contrast(reward, 4, psi=psi)
    for g in (0, 4):
        a = [r - sum(reward.tolist()[g : g + 4]) / 4 for r in reward.tolist()[g : g + 4]]
        plus, minus = ([math.exp(sign * psi * x) for x in a] for sign in (1, -1))
        close(got[g : g + 4], [p / sum(plus) - m / sum(minus) for p, m in zip(plus, minus, strict=True)])
    small = alg.softmax_contrast(1e-5 * reward, 4, psi=psi)
    close(small / 1e-5, 2 * psi * alg.group_mean(reward, 4) / 4, "small rewards", 1e-6)


@formula("wd1")
def wd1(f: Formula) -> Tensor:
    """-(w+ - w-) times the mean-field log-likelihood, summed over a group, averaged over the prompts."""
    total = 0.0
    for b in f.rows:
        mean = sum(f.group(b)) / 4
        plus, minus = (sum(math.exp(sign * (r - mean)) for r in f.group(b)) for sign in (1, -1))
        weight = math.exp(f.centred(b)) / plus - math.exp(-f.centred(b)) / minus
        total = total - weight * sum(f.tokens(f.new, 0, b).values())
    return total / 2
