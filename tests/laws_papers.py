"""Laws and published losses of papers that came by the path of CONTRIBUTING.md; they register themselves in laws.LAWS."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from laws import Formula, close, double, formula, judges, mean_is, noise, refuses, rollout_of, seeded

# ------------------------------------------------------------------------------------------------------------ JustGRPO


@formula("justgrpo")
def justgrpo(f: Formula) -> Tensor:
    """-A log p of every revealed token, A the z-score, over B L."""
    logp = [(b, sum(f.tokens(f.new, k, b, 0.8).values())) for b in f.rows for k in f.states]
    return sum(-f.z_score(b) * total for b, total in logp) / (8 * 4)


# ---------------------------------------------------------------------------------------------------------------- ESPO


@formula("espo")
def espo(f: Formula) -> Tensor:
    """PPO on exp(ELBO change / L), and beta (ELBO - ELBO of the reference)^2 / (2 L): L counts padding, L = 4 here."""

    def elbo(model: Any, b: int) -> Tensor:
        states = [f.tokens(model, k, b) for k in f.states]
        return sum(5 / len(logp) * sum(logp.values()) for logp in states if logp) / len(f.states)

    total = 0.0
    for b in f.rows:
        new, old, ref = (elbo(model, b) for model in (f.new, f.old, f.ref))
        ratio = ((new - old.detach()) / 4).exp()
        total = total + f.clipped(ratio, f.centred(b) * 4 / 3, 0.2, 0.2) + 0.01 * (new - ref.detach()).square() / 8
    return total / 8


# ---------------------------------------------------------------------------------------------------------------- EBPO


@formula("ebpo-block")
def ebpo_block(f: Formula) -> Tensor:
    """PPO on exp(change of the sum over the blocks of their ELBOs); blocks of two positions."""

    def elbo(model: Any, b: int) -> Tensor:
        total, count = 0.0, len(f.states) // 2
        for k in f.states:
            logp = f.tokens(model, k, b)
            if logp:
                block = next(iter(logp)) // 2
                n = int(f.rollout.keep[b, 2 * block : 2 * block + 2].sum())
                total = total + n / (count * len(logp)) * sum(logp.values())
        return total

    return sum(f.clipped((elbo(f.new, b) - elbo(f.old, b).detach()).exp(), f.z_score(b, 1e-6), 0.2, 0.2) for b in f.rows) / 8


# --------------------------------------------------------------------------------------------------------- coupled-GRPO


@judges("2.9", "5.1")
def law_coupled_plan(alg: ModuleType) -> None:
    """All hidden, S, complement, padding too; a kept token is scored in two; weights 1/2, 1/2r, 1/2(1-r); r by its noise."""
    rollout = rollout_of(alg, [[1, 0, 2, 1]] * 2, [[1, 1, 1, 1], [1, 1, 1, 0]])
    u, r = double([[0.1, 0.9, 0.34, 0.36], [0.36, 0.34, 0.1, 0.9]]), 0.2 + 0.6 * 0.25
    with noise(alg, double([0.25]), u):
        plan = alg.coupled_plan(rollout, seeded(), low=0.2, high=0.8)
    inside = u < r
    close(plan.scored, torch.stack([rollout.keep, rollout.keep & inside, rollout.keep & ~inside]), "scored")
    close(plan.hidden[..., 3:], torch.stack([inside | True, inside, ~inside]), "hidden")
    assert not plan.hidden[..., :3].any() and not plan.replay
    close(plan.weight, double([[0.5] * 2, [0.5 / r] * 2, [0.5 / (1 - r)] * 2]), "weight")
    drawn = alg.coupled_plan(rollout_of(alg, [[1, 0, 2, 1]] * 4000), seeded(3), low=0.5, high=0.5)
    for i in range(4):
        mean_is(drawn.scored[1, :, i].double() - 0.5, 0.0, "share of S")
    for low, high in ((0.0, 0.5), (0.6, 0.5), (0.5, 1.0)):
        refuses(lambda low=low, high=high: alg.coupled_plan(rollout, seeded(), low=low, high=high), "plan.low", str(low))


@formula("coupled-grpo")
def coupled_grpo(f: Formula) -> Tensor:
    """A clipped ratio a token of 1/2 [log p (all hidden) + 1/r or 1/(1-r) times log p (its mask hidden)], k3, token mean."""
    total = 0.0
    for b in f.rows:
        at = {
            name: [f.tokens(model, k, b) for k in f.states] for name, model in (("new", f.new), ("old", f.old), ("ref", f.ref))
        }
        for i in at["new"][0]:
            new, old, ref = (
                sum(f.plan.weight[k, b] * state[i] for k, state in enumerate(states) if i in state) for states in at.values()
            )
            gap = ref.detach() - new
            adv = f.centred(b) * 4 / 3
            total = total + f.clipped((new - old.detach()).exp(), adv, 0.5, 0.5) + 0.01 * (gap.exp() - gap - 1)
    return total / sum(f.length)
