"""Laws of credit, section 6: rewards to advantages, for a whole trajectory or for each of its states."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    Walk,
    close,
    double,
    graph_logp,
    normal,
    recorded,
    refuses,
    reward_of,
    rollout_of,
    seeded,
    settings_of,
    state_of,
    tabular,
    walk,
    walk_gradient,
)
from laws.trajectories import STEPS, four_steps
from minidrl import methods, oracle

REWARDS = [[1.0, 0.0, 0.25, 2.0], [0.5, 0.5, 0.5, 0.5], [3.0, -1.0, -1.0, 0.0]]


def credit_rules(alg: Any) -> dict[str, tuple[Callable, Callable]]:
    """For each rule of credit the function under judgement, and the same by loops over one group."""

    def centred(group: list[float]) -> list[float]:
        return [r - sum(group) / len(group) for r in group]

    def z_score(group: list[float], ddof: int, eps: float) -> list[float]:
        std = math.sqrt(sum(a * a for a in centred(group)) / (len(group) - ddof))
        return [a / (std + eps) for a in centred(group)]

    def others(group: list[float]) -> list[float]:
        return [r - (sum(group) - r) / (len(group) - 1) for r in group]

    rules = {"group_mean": (alg.group_mean, centred), "leave_one_out": (alg.leave_one_out, others)}
    for ddof, eps in ((0, 1e-4), (1, 1e-4), (1, 0.3)):
        options = {"ddof": ddof, "eps": eps}
        rules[f"z_score {options}"] = (
            functools.partial(alg.group_z_score, **options),
            functools.partial(z_score, **options),
        )
    return rules


@judges("6.1", "6.2", "6.3")
@rejects("6.1", ("_average(group", "group.mean(0, keepdim=True"), ("_average(group", "group.mean("))
@rejects("6.1", ("return first + (", "return ("), where="_average")
@rejects("6.2", (".std(1, keepdim", ".std(0, keepdim"), ("(std + eps)", "std.clamp(min=eps)"))
@rejects("6.3", ("num_generations / (num_generations - 1)", "(num_generations - 1) / num_generations"))
def law_advantages(alg: Any) -> None:
    """Advantages are those of loops over each prompt's group. They sum to 0 and do not see a constant added to a group."""
    flat = double(REWARDS).flatten()
    for name, (credit, by_hand) in credit_rules(alg).items():
        got = credit(flat, 4)
        close(got, [a for group in REWARDS for a in by_hand(group)], name)
        close(got.unflatten(0, (3, 4)).sum(1), [0, 0, 0], f"{name}: sum")
        close(got[4:8], [0, 0, 0, 0], f"{name}: equal rewards")
        shift = double([10.0, -3.0, 0.5]).repeat_interleave(4)
        close(credit(flat + shift, 4), got, f"{name}: shift", 1e-9)
        order = torch.tensor([2, 0, 3, 1, 4, 5, 6, 7, 11, 8, 9, 10])
        close(credit(flat[order], 4), got[order], f"{name}: permutation inside a group")
        close(credit(flat[4:], 4), got[4:], f"{name}: other prompts")


@judges("6.2", "6.3", "6.4", "6.5", "6.6")
@rejects("6.3", ("= group[..., :1], ", "= 0 * group[..., :1], "), where="_average")
def law_equal_rewards_are_silent(alg: Any) -> None:
    """Equal rewards have advantages of exactly 0 under every method's credit: the loop leaves out the states of such a group.

    (6.1) is judged here, too; an exercise's answer to it may round.
    """
    reward = torch.tensor([0.1] * 8 + [0.3] * 8 + [1.0] + [0.1] * 7)
    worth = reward.repeat(2, 1)
    steps = {"step_reward": worth, "valid": torch.ones_like(worth).bool(), "time": torch.zeros_like(worth)}
    for name, method in alg.METHODS.items():
        adv = method.credit(reward, 8)[None] if method.step_value == "none" else method.credit(reward, 8, **steps)
        assert (adv[:, :16] == 0).all(), f"{name}: equal rewards have advantages {adv[:, :16].unique().tolist()}"
        assert (adv[:, 16:] != 0).any(1).all(), f"{name}: no advantage where rewards differ"


@judges("6.1", "6.3")
@rejects("6.1", ("group - _average(group)", "_average(group) - group"))
def law_leave_one_out_is_unbiased(alg: Any) -> None:
    """Over all groups of three draws the mean of adv grad log pi is grad J, and 2/3 of it with group_mean."""
    z = normal(3, seed=18).requires_grad_()
    reward, n = double([1.0, -0.5, 2.0]), 3
    groups = torch.tensor(list(itertools.product(range(3), repeat=n)))
    logp = z.log_softmax(-1)
    (truth,) = torch.autograd.grad((logp.exp() * reward).sum(), z, retain_graph=True)
    chance = logp.detach()[groups].sum(1).exp()
    for credit, factor in ((alg.leave_one_out, 1.0), (alg.group_mean, 2 / 3)):
        adv = credit(reward[groups].flatten(), n).unflatten(0, (-1, n))
        (got,) = torch.autograd.grad((chance * (adv * logp[groups]).mean(1)).sum(), z, retain_graph=True)
        close(got, factor * truth)


@judges("6.1", "6.2", "6.3", "6.4")
@rejects("6.1", ("if reward.requires_grad:", "if False:"), ("or reward.shape[0] % num_generations", ""), where="_groups")
@rejects("6.2", ("< num_generations", "<= num_generations"))
@rejects("6.3", ("if num_generations < 2:", "if num_generations < 1:"))
def law_credit_refusals(alg: Any) -> None:
    """Refused are rewards with a gradient, groups that do not divide, too few degrees of freedom, and unknown words."""
    reward = double([1.0, 0.0, 2.0, 1.0])
    for _, (credit, _) in credit_rules(alg).items():
        refuses(lambda credit=credit: credit(reward.clone().requires_grad_(), 2), "reward", "gradient")
        refuses(lambda credit=credit: credit(reward, 3), "num_generations", "3", "4")
        refuses(lambda credit=credit: credit(reward, 0), "num_generations", "0")
    refuses(lambda: alg.group_z_score(reward, 2, ddof=2, eps=0.0), "credit.ddof", "got 2", "num_generations - 1 = 1")
    refuses(lambda: alg.group_z_score(reward, 1, ddof=1, eps=0.0), "credit.ddof", "got 1")
    refuses(lambda: alg.group_z_score(reward, 2, ddof=-1, eps=0.0), "credit.ddof", "-1")
    refuses(lambda: alg.leave_one_out(reward, 1), "num_generations", "got 1")
    given, *of_steps = credit_case()
    for key, value, allowed in (("schedule", "cosine", "linear"), ("center", "all", "rank"), ("lam", -0.5, "0")):
        options = {**CREDIT, key: value}
        refuses(lambda o=options: alg.stepwise_advantage(given, N, *of_steps, **o), f"credit.{key}", repr(value), allowed)


N, K = 4, 3


CREDIT = {"lam": 0.5, "schedule": "constant", "normalize": True, "center": "rank"}


def credit_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reward, step rewards, valid states and times of two groups of four at three ranks; the last rank lacks the
    second group.
    """
    reward = double([1.0, 0.0, 0.25, 2.0, 0.5, -0.5, 1.5, 1.0])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0, 0, 0]]).bool()
    time = torch.rand(3, 8, generator=seeded(65), dtype=torch.float64)
    time[0, 0] = 0.0  # the first step
    return reward, normal(3, 8, seed=66), valid, time


def credit_by_hand(reward: Tensor, value: Tensor, valid: Tensor, time: Tensor, options: dict) -> list[list[float]]:
    """The definition of (6.4) by loops; nan where a rank does not exist."""
    out = [[math.nan] * 8 for _ in range(K)]
    for k, b in itertools.product(range(K), range(8)):
        lam = [options["lam"] * (time[k, j].item() if options["schedule"] == "linear" else 1.0) for j in range(8)]
        scale = [1 + lam[j] if options["normalize"] else 1.0 for j in range(8)]
        gain = [lam[j] * (reward[j].item() - value[k, j].item()) / scale[j] for j in range(8)]
        first = [reward[j].item() / scale[j] for j in range(8)]
        total = [x + y for x, y in zip(first, gain, strict=True)] if options["center"] == "rank" else first
        mates = [j for j in range(4 * (b // 4), 4 * (b // 4) + 4) if valid[k, j]]
        if valid[k, b]:
            out[k][b] = total[b] - sum(total[j] for j in mates) / len(mates)
            out[k][b] += gain[b] if options["center"] == "reward" else 0.0
    return out


@judges("6.4")
@rejects("6.4", ("+ lam_k) * reward -", "- lam_k) * reward +"))
def law_stepwise_advantage(alg: Any) -> None:
    """Every combination of options gives what loops give, centred rank by rank over the members that have a state there."""
    reward, value, valid, time = credit_case()
    for lam, schedule, normalize, center in itertools.product(
        (0.0, 0.5, 2.0), alg.SCHEDULES, (False, True), ("rank", "reward")
    ):
        options = {"lam": lam, "schedule": schedule, "normalize": normalize, "center": center}
        got = alg.stepwise_advantage(reward, N, value, valid, time, **options)
        expected = double(credit_by_hand(reward, value, valid, time, options))
        close(torch.where(valid, got, 0.0), torch.where(valid, expected, 0.0), f"{options}")
        assert bool(got.isfinite().all()), "ranks without a member"


@judges("6.4", "10.1")
@rejects(
    "6.4",
    ("plan.step.to(reward", "(plan.step + 1).to(reward"),
    ("alg.num_steps(rollout)", "plan.step.shape[0] * 2"),
    where="advantages",
)
def law_stepwise_time(alg: Any) -> None:
    """The time of a state is step / T. With the linear schedule the first step has lam 0, and the last (T - 1)/T of lam."""
    row = dataclasses.replace(
        alg.METHODS["egspo-sa-accounts"], credit=partial(alg.stepwise_advantage, **{**CREDIT, "schedule": "linear"})
    )
    row = methods.with_options(row, {"plan.num_states": 4})
    rollout = four_steps(alg, keep=torch.ones(4, 8, dtype=torch.bool), unmask_step=torch.tensor(STEPS[:3] + STEPS[:1]))
    plan = row.plan(rollout, seeded())
    reward, value = double([1.0, 0.0, 0.3, 2.0]), normal(4, 4, seed=67)
    got = alg.advantages(row, plan, rollout, reward, value)
    for k, b in itertools.product(range(4), range(4)):
        total = []
        for j in (2 * (b // 2), 2 * (b // 2) + 1):
            lam = 0.5 * int(plan.step[k, j]) / 4
            total.append(((1 + lam) * reward[j] - lam * value[k, j]) / (1 + lam))
        close(got[k, b], total[b % 2] - sum(total) / 2, f"rank {k}, row {b}")
    assert bool((plan.step == 0).any()) and bool((plan.step == 3).any())


def greedy_completion(model: Any, state: tuple) -> tuple:
    """The likeliest token at every hidden position of a state."""
    logits = model.logits_at(state).tolist()
    return tuple(
        max(range(len(row)), key=lambda v: row[v]) if t == len(row) else t for t, row in zip(state, logits, strict=True)
    )


@judges("6.4", "6.1")
@rejects("6.4", ("1 + lam_k if normalize", "1 + 2 * lam_k if normalize"))
def law_stepwise_advantage_is_unbiased(alg: Any) -> None:
    """Over all pairs of trajectories in random order the mean of sum_t adv_t grad log pi_t is (1 - 1/N) dJ for every lam.

    Not normalised it is (1 - 1/N) sum_t (1 + lam_t) g_t, g_t the share of step t, also with lam_t = lam t/T. With center
    reward only the reward pays for containing itself: sum_t ((1 - 1/N) + lam) g_t / (1 + lam).
    """
    case = Walk(2, 3, "random", 1, 2)
    model, paths, chance, reward = walk(case)
    first, second = (torch.tensor(rows) for rows in zip(*itertools.product(range(len(paths)), repeat=2), strict=True))
    rows = torch.stack([first, second], 1).flatten()
    rollout = recorded(alg, [paths[b] for b in rows.tolist()], None, num_generations=2)
    plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
    ll = alg.reduce_logp(graph_logp(alg, model, rollout, plan, 0.7), plan, level="step", normalizer=None)[..., 0]
    steps, time = range(2), torch.tensor([[0.0], [0.5]], dtype=torch.float64).expand(2, len(rows))
    value = double([[reward_of(greedy_completion(model, state_of(model, path, s)), None) for path in paths] for s in steps])
    share = []
    for s in steps:
        score = lambda path, s=s: sum(  # noqa: E731
            oracle.token_logp(model, path.response, oracle.hidden_before(path, s), 0.7)[i]
            for i, at in enumerate(path.unmask_step)
            if at == s
        )
        mean = sum(p * reward_of(path.response, None) * score(path) for p, path in zip(chance, paths, strict=True))
        share.append(oracle.table_gradient(model, mean))
    close(sum(share), walk_gradient(case), "the shares of the steps make the policy gradient")
    pair = (chance[first] * chance[second]).repeat_interleave(2) / 2
    for lam, schedule, normalize, center in itertools.product(
        (0.0, 0.5, 3.0), alg.SCHEDULES, (True, False), ("rank", "reward")
    ):
        options = {"lam": lam, "schedule": schedule, "normalize": normalize, "center": center}
        adv = alg.stepwise_advantage(reward[rows], 2, value[:, rows], plan.valid, time, **options)
        got = oracle.table_gradient(model, (pair * adv * ll).sum())
        lams = [lam * (t if schedule == "linear" else 1.0) for t in (0.0, 0.5)]
        inside = [(1 + x) * 0.5 if center == "rank" else 0.5 + x for x in lams]
        expected = sum(w / (1 + x if normalize else 1) * g for w, x, g in zip(inside, lams, share, strict=True))
        close(got, expected, f"{options}")


@judges("6.4", "4.1")
@rejects("6.4", ("- lam_k * step_reward)", "+ lam_k * step_reward)"))
def law_one_step_values(alg: Any) -> None:
    """A state is worth what its completions in one step are worth; the plan's targets give their probabilities.

    Drawn: exact before the last step, not before. Greedy: off by at most (range of rewards) (1 - p of that completion).
    So the advantage of a trajectory against the drawn value of its last state has mean 0 there.
    """
    model, vocab, settings = tabular(3, 2, 11), 2, settings_of(Walk(3, 2, "random", 1, 3))
    reward = {y: reward_of(y, None) for y in itertools.product(range(vocab), repeat=3)}
    spread, wrong = max(reward.values()) - min(reward.values()), 0.0
    for state in itertools.product(range(vocab + 1), repeat=3):
        hidden = [i for i, token in enumerate(state) if token == vocab]
        if not hidden:
            continue
        full = [y for y in reward if all(token in (vocab, y[i]) for i, token in enumerate(state))]
        rollout = rollout_of(alg, [[0 if token == vocab else token for token in state]] * len(full), sampler=settings)
        scored = torch.tensor([[token == vocab for token in state]]).expand(1, len(full), -1)
        masked = torch.cat([torch.zeros(1, len(full), 3).bool(), scored], -1)
        plan = alg.Plan(masked, scored, torch.ones(1, len(full)), scored.any(-1), targets=torch.tensor([full]))
        logp = alg.features(model, rollout, plan, temperature=0.7)["logp"][0]
        chance = dict(zip(full, logp.sum(-1).exp().tolist(), strict=True))
        drawn = sum(p * reward[y] for y, p in chance.items())
        truth = worth(model, state, reward)
        credit = partial(alg.stepwise_advantage, lam=1.0, schedule="constant", normalize=False, center="reward")
        one = torch.ones(1, 1, dtype=torch.float64)
        gain = sum(p * credit(double([reward[y]]), 1, one * drawn, one.bool(), one).item() for y, p in chance.items())
        if len(hidden) == 1:
            close(drawn, truth, "drawn value before the last step")
            close(gain, 0.0, "mean advantage against it")
        wrong = max(wrong, abs(drawn - truth))
        guess = greedy_completion(model, state)
        p_max = math.prod(max((model.logits_at(state)[i] / 0.7).softmax(-1).tolist()) for i in hidden)
        close(chance[guess], p_max, "the greedy completion is the likeliest")
        if len(hidden) == 1:
            assert abs(reward[guess] - truth) <= spread * (1 - chance[guess]) + 1e-12, f"greedy value of {state}"
            assert abs(reward[guess] - truth) > 1e-3, "the greedy value is exact on this fixture"
    assert wrong > 0.01, "the drawn value is exact in every state of this fixture"


def worth(model: Any, state: tuple, reward: dict) -> float:
    """The expected reward from a state on, in random order at temperature 0.7."""
    if model.mask_token_id not in state:
        return reward[state]
    kernel = oracle.transition(model, state, range(len(state)), "random", 0.7, 1)
    return sum(p.item() * worth(model, following, reward) for following, p in kernel.items())


def progress(reward: list, steps: list, valid: list, n: int, keep: int, eps: float) -> list[list[float]]:
    """The advantages of (6.5) by loops."""
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
@rejects(
    "6.5",
    ("+ 1 + later", "+ 1"),
    ("rewards = step_reward * valid", "rewards = step_reward"),
    ("torch.where(following > 0, later, reward)", "later"),
)
@rejects("6.5", ("x.flip(0).cumsum(0).flip(0)", "x.cumsum(0)"), where="_from_here_on")
def law_progress_advantage(alg: Any) -> None:
    """By loops: a step's gain, the mean of what came later, a z-score per state and group, and the K strongest states."""
    reward, steps = normal(6, seed=62).tolist(), normal(4, 6, seed=63).tolist()
    valid = [[1] * 6, [1] * 6, [1, 1, 1, 1, 0, 1], [1, 0, 0, 1, 0, 1]]
    for keep in (1, 2, 4):
        time = torch.zeros(4, 6, dtype=torch.float64)
        options = {"num_states": keep, "eps": 1e-4}
        got = alg.progress_advantage(double(reward), 3, double(steps), torch.tensor(valid).bool(), time, **options)
        close(got, progress(reward, steps, valid, 3, keep, 1e-4), f"{keep} states")
        assert int((got.unflatten(1, (2, 3)).abs().sum(2) > 0).sum(0).max()) <= keep


@judges("6.6")
@rejects(
    "6.6",
    ("(-logits).softmax(1)", "1 / 4"),
    ("1) - (-logits).softmax(1", "0) - (-logits).softmax(0"),
    ("psi * (group - _average(group))", "(group - _average(group))"),
)
def law_softmax_contrast(alg: Any) -> None:
    """Loops over each group give the same. Equal rewards give 0, and small ones 2 psi (reward - mean) / N."""
    reward, psi = double([1.0, 0.0, 0.25, 2.0, 0.5, 0.5, 0.5, 0.5]), 1.5
    got = alg.softmax_contrast(reward, 4, psi=psi)
    for g in (0, 4):
        a = [r - sum(reward.tolist()[g : g + 4]) / 4 for r in reward.tolist()[g : g + 4]]
        plus, minus = ([math.exp(sign * psi * x) for x in a] for sign in (1, -1))
        close(got[g : g + 4], [p / sum(plus) - m / sum(minus) for p, m in zip(plus, minus, strict=True)])
    small = alg.softmax_contrast(1e-5 * reward, 4, psi=psi)
    close(small / 1e-5, 2 * psi * alg.group_mean(reward, 4) / 4, "small rewards", 1e-6)
