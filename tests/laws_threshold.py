"""Laws of threshold decoding: the exact kernel (4.5), its score, and the plans on trajectories whose steps differ in number.

They register themselves in laws.LAWS. The truth is minidrl.oracle, which enumerates every proposal of every step.
"""

import dataclasses
import functools
import itertools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from laws import (
    close,
    double,
    graph_features,
    judges,
    normal,
    recorded,
    reward_of,
    rollout_of,
    seeded,
    surrogate,
    tabular,
    walk_entropy,
)
from laws_steps import open_states, state_of, tied
from minidrl import methods, oracle
from minidrl.sampler import Sampler, generate

CASES = (
    # length, vocabulary, block, tau, temperature
    (3, 2, 3, 0.6, 0.7),
    (3, 3, 3, 0.5, 1.0),
    (3, 3, 3, 0.4, 1.3),
    (4, 2, 2, 0.7, 0.8),
    (3, 2, 3, 1.0, 0.7),
    (3, 2, 3, 0.0, 0.7),
)


def settings_of(length: int, block_length: int, threshold: float | None, temperature: float) -> Sampler:
    """Threshold decoding."""
    words = {"temperature": temperature, "length": length, "block_length": block_length, "tokens_per_step": 1}
    return Sampler(order="low_confidence", threshold=threshold, **words)


def one_step(alg: ModuleType, state: tuple, block: range, vocab: int, settings: Sampler) -> tuple[Any, Any, list]:
    """Every set of hidden positions with every choice of tokens: the rollout, the plan that scores them, the next states."""
    hidden = [i for i in block if state[i] == vocab]
    sets = [where for n in range(1, len(hidden) + 1) for where in itertools.combinations(hidden, n)]
    shown = [dict(zip(s, what, strict=True)) for s in sets for what in itertools.product(range(vocab), repeat=len(s))]
    following = [tuple(new.get(i, token) for i, token in enumerate(state)) for new in shown]
    response = [[0 if token == vocab else token for token in row] for row in following]
    rollout = rollout_of(alg, response, sampler=settings)
    masked = torch.tensor([[False] * 3 + [token == vocab for token in state]]).expand(1, len(shown), -1)
    scored = torch.tensor([[[i in new for i in range(settings.length)] for new in shown]])
    return rollout, alg.Plan(masked, scored, torch.ones(scored.shape[:2]), scored.any(-1)), following


def check_kernel(alg: ModuleType, model: Any, case: tuple) -> float:
    """Values and gradients of every transition of every state are those of the oracle; the largest sum of tokens alone."""
    length, vocab, width, tau, temperature = case
    settings, most = settings_of(length, width, tau, temperature), 0.0
    for state, block in open_states(vocab, settings):
        rollout, plan, following = one_step(alg, state, block, vocab, settings)
        names = ("logp", "order_logp")
        found = alg.state_features(model, rollout, plan, torch.arange(len(following)), temperature=temperature, names=names)
        tokens = found["logp"].sum(-1)
        kernel = (tokens + found["order_logp"].sum(-1)).exp()
        truth = oracle.transition(model, state, block, "low_confidence", temperature, 1, tau)
        close(kernel, [truth[s].item() if s in truth else 0.0 for s in following], f"{case}, state {state}")
        close(kernel.sum(), 1.0, "sum of the kernel")
        possible = torch.tensor([s in truth for s in following])
        most = max(most, float(tokens.detach().exp()[possible].sum()))
        weight = normal(len(following), seed=62)
        expected = sum(c * truth[s] for c, s in zip(weight, following, strict=True) if s in truth)
        got = oracle.table_gradient(model, (weight * kernel).sum())
        close(got, oracle.table_gradient(model, expected), f"gradient, {case}, state {state}")
    return most


@judges("4.5")
def law_threshold_kernel(alg: ModuleType) -> None:
    """exp(logp + order_logp) is the transition of threshold decoding: it sums to 1 over all sets, the tokens alone to more."""
    for case in CASES:
        most = check_kernel(alg, tabular(case[0], case[1], 17), case)
        assert (most > 1.2) == (case[3] > 0), f"{case}: the tokens of the possible sets alone sum to {most} at most"


@judges("4.5")
def law_threshold_kernel_on_ties(alg: ModuleType) -> None:
    """Confidences that are equal to each other, and to tau: at tau a token is revealed; below, the lower position wins."""
    for length, vocab, tau in ((3, 2, 0.5), (3, 2, 0.9), (2, 4, 0.25), (3, 3, 0.6)):
        check_kernel(alg, tied(length, vocab), (length, vocab, length, tau, 0.7))
    flat = oracle.TabularDenoiser(torch.zeros(27, 3, 2, dtype=torch.float64))
    steps = {path.unmask_step for path in oracle.trajectories(flat, "low_confidence", 1.0, 1, threshold=0.5)}
    assert steps == {(0, 0, 0)}, "the fixture has no confidence that is equal to tau"


@judges("4.5")
def law_threshold_impossible_sets(alg: ModuleType) -> None:
    """Several tokens of which one is below tau: log of the smallest number, in equal shares, gradient 0; alone it may be."""
    tau, tokens = math.log(0.6), torch.tensor([[True, True, False], [True, True, False], [False, True, False]])
    for dtype in (torch.float64, torch.float32):
        order = (-normal(3, 3, seed=5).abs().to(dtype) * tokens).requires_grad_()
        confidence = torch.tensor([[tau + 0.1, tau - 0.1, 0.0], [tau + 0.1, tau + 0.2, 0.0], [0.0, tau - 0.3, 0.0]])
        got = alg.threshold_logp(order, confidence, tokens, threshold=0.6)
        least = math.log(torch.finfo(dtype).tiny) / 2
        close(got, [[least, least, 0.0], *order[1:].tolist()], "log F", 1e-6)
        assert got.dtype == dtype
        slope = torch.autograd.grad(got.sum(), order)[0]
        close(slope, [[0.0] * 3, [1.0] * 3, [1.0] * 3], "gradient")


WALKS = (
    # length, vocabulary, block, EOS, tau
    (3, 2, 3, None, 0.6),
    (3, 3, 3, None, 0.5),
    (4, 2, 2, 1, 0.65),
    (4, 2, 4, 1, 0.6),
)


@functools.cache
def walk(case: tuple, temperature: float) -> tuple[Any, list, Tensor, Tensor, Tensor]:
    """Model, every trajectory of threshold decoding, its probability, its reward, the exact policy gradient."""
    length, vocab, block, eos, tau = case
    model, reward = tabular(length, vocab, 11), lambda y: reward_of(y, eos)
    paths = oracle.trajectories(model, "low_confidence", temperature, 1, block, eos, tau)
    truth = oracle.policy_gradient(model, "low_confidence", temperature, 1, reward, block, eos, tau)
    assert len({max(path.unmask_step) for path in paths}) > 1, "the fixture always takes as many steps"
    return model, paths, torch.stack([p.prob.detach() for p in paths]), double([reward(p.response) for p in paths]), truth


def with_entropy(alg: ModuleType, case: tuple, temperature: float) -> tuple[Any, Any, Tensor, Tensor, Tensor]:
    """Model, rollout of every trajectory, probability, reward, policy gradient."""
    model, paths, chance, reward, truth = walk(case, temperature)
    entropy = double([walk_entropy(model, path, temperature) for path in paths])
    settings = settings_of(case[0], case[2], case[4], temperature)
    return model, recorded(alg, paths, case[3], records={"entropy": entropy}, sampler=settings), chance, reward, truth


@judges("4.5", "10.1")
def law_threshold_score_is_the_policy_gradient(alg: ModuleType) -> None:
    """E[reward grad(logp + order_logp)] = dJ/dtable, E[its gradient] = 0; the tokens alone miss both by more than 0.05."""
    for case, temperature in itertools.product(WALKS, (0.7, 1.0)):
        model, rollout, chance, reward, truth = with_entropy(alg, case, temperature)
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        feature = graph_features(alg, model, rollout, plan, ("logp", "order_logp"), temperature)
        for names, exact in ((("logp", "order_logp"), True), (("logp",), False)):
            method = dataclasses.replace(alg.METHODS["reinforce"], features=names)
            ll = alg.reduced(method, plan, rollout, feature).sum((0, 2))
            got, mean = (oracle.table_gradient(model, (chance * value * ll).sum()) for value in (reward, 1.0))
            gap, leak = float((got - truth).norm() / truth.norm()), float(mean.norm())
            good = gap < 1e-9 and leak < 1e-9 if exact else gap > 0.05 and leak > 0.05
            assert good, f"{case} at {temperature}, {names}: off by {gap} of the gradient, mean score {leak}"
    direction, value = normal(27, 3, 2, seed=63), []
    for h in (-1e-5, 1e-5):
        moved = oracle.TabularDenoiser(tabular(3, 2, 11).table.detach() + h * direction)
        paths = oracle.trajectories(moved, "low_confidence", 0.7, 1, threshold=0.6)
        value.append(oracle.expected_reward(paths, lambda y: reward_of(y, None)).item())
    truth = walk(WALKS[0], 0.7)[-1]
    close((truth * direction).sum(), (value[1] - value[0]) / 2e-5, "finite difference of J", 1e-7)


@judges("3.5", "3.1")
def law_threshold_staircase(alg: ModuleType) -> None:
    """Blocks of different numbers of steps: the staircase scores each token once, where the sampler drew it, and as (3.1)."""
    for case in ((4, 2, 2, 1, 0.65), (4, 2, 2, None, 0.65), (4, 2, 2, None, 0.55)):
        model, rollout, chance, reward, truth = with_entropy(alg, case, 0.7)
        steps = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        plan = alg.block_replay_plan(rollout, seeded())
        assert plan.network_calls < steps.network_calls and bool((plan.scored.sum(0) <= 1).all())
        assert torch.equal(plan.scored.any(0), steps.scored.any(0)), "the tokens that are scored"
        names = ("logp", "order_logp")
        one, many = (graph_features(alg, model, rollout, p, names, 0.7) for p in (plan, steps))
        for name in names:
            close(one[name].sum(0), many[name].sum(0), name)
        ll = (one["logp"] + one["order_logp"]).sum((0, 2))
        close(oracle.table_gradient(model, (chance * reward * ll).sum()), truth, "policy gradient")


@judges("3.1", "3.5")
def law_threshold_replay_reproduces_the_sampler(alg: ModuleType) -> None:
    """The states of a drawn trajectory give back the log-probabilities that the sampler recorded, in one forward a step or
    one a step of a block."""
    model, prompt = tabular(4, 3), torch.tensor([[0, 1, 0], [2, 0, 1]])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    for tau in (0.35, 0.5):
        settings = settings_of(4, 2, tau, 0.6)
        drawn = generate(model, prompt, mask, settings, eos_token_id=2, num_generations=30, generator=seeded(3))
        assert len({tuple(row) for row in drawn.unmask_step.tolist()}) >= 4, "the fixture always reveals alike"
        rollout = alg.Rollout(**vars(drawn))
        for plan in (
            alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0),
            alg.block_replay_plan(rollout, seeded()),
        ):
            logp = alg.features(model, rollout, plan, temperature=0.6)["logp"]
            close(logp.sum(0), torch.where(plan.scored.any(0), drawn.logp, 0.0), f"tau {tau}")
            assert bool((plan.scored.any(0) | ~rollout.keep).all()), "every kept token is scored"


@judges("4.5", "10.1", "3.2")
def law_egspo_exact_row_with_a_threshold(alg: ModuleType) -> None:
    """egspo-exact on rollouts of threshold decoding: a chosen step's clipped ratio of transition probabilities."""
    case = WALKS[0]
    old, paths, chance, _, _ = walk(case, 0.7)
    likely = [paths[i] for i in chance.argsort(descending=True)[:8]]
    new = oracle.TabularDenoiser(old.table.detach() + normal(*old.table.shape, seed=69, scale=0.3))
    entropy = double([walk_entropy(old, path, 0.7) for path in likely])
    settings = settings_of(3, 3, case[4], 0.7)
    rollout = recorded(alg, likely, None, num_generations=4, records={"entropy": entropy}, sampler=settings)
    method = methods.with_options(alg.METHODS["egspo-exact"], {"plan.num_states": 2})
    plan = method.plan(rollout, seeded())
    anchor = alg.reduced(method, plan, rollout, alg.features(old, rollout, plan, temperature=0.7, names=method.features))
    reward = [reward_of(path.response, None) for path in likely]
    adv = alg.advantages(method, plan, rollout, double(reward))
    feature = graph_features(alg, new, rollout, plan, method.features, 0.7)
    got = oracle.table_gradient(new, alg.method_loss(method, plan, rollout, feature, adv, anchor, None))
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for b, path in enumerate(likely):
        centred = reward[b] - sum(reward[4 * (b // 4) : 4 * (b // 4) + 4]) / 4
        of_step = [
            sum(float(entropy[b, i]) for i in range(3) if path.unmask_step[i] == t) for t in range(max(path.unmask_step) + 1)
        ]
        for t in sorted(range(len(of_step)), key=lambda t, e=of_step: -e[t])[:2]:
            state, following = state_of(old, path, t), state_of(old, path, t + 1)
            step = [oracle.transition(m, state, range(3), "low_confidence", 0.7, 1, case[4]).get(following) for m in (new, old)]
            ratios.append(0.0 if step[0] is None else (step[0] / step[1].detach()).item())
            ratio = torch.zeros(()).double() if step[0] is None else step[0] / step[1].detach()
            total = total + surrogate(ratio, centred, 0.2, 0.5)
    close(got, oracle.table_gradient(new, total / 8), "gradient")
    assert max(ratios) > 1.2 and min(ratios) < 0.9 and len({max(path.unmask_step) for path in likely}) > 1, f"ratios {ratios}"
