"""The published loss of every method, written once more as loops over responses, states and single tokens.

A method of the table needs one function here, under @formula with its name, which returns the loss as a scalar with a graph.
What f.rows, f.states, f.tokens and so on are is said in the class `Formula`. The order is that of the table.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from laws.blocks import last_step, own_positions
from laws.credit import progress
from laws.quadrature import rule
from laws.reductions import eubo_by_loops, spg_eubo
from laws.sampler_order import position_logps
from laws.tools import models, normal, positions, surrogate, token_logps
from laws.trust_regions import kl_outside, partition_divergence, tv_outside
from minidrl import oracle


class Formula:
    """What a published loss reads: eight responses of two prompts, the states of a plan, and three models by the oracle.

    rows          the responses b = 0..7; 0..3 have one prompt, 4..7 the other
    states        the states k of the plan
    old, new, ref the models before and after an update, and the reference; gradients are taken in the table of the new one
    length        kept tokens of each response, up to and with the first EOS; the padded length is 4
    reward        of each response; step_reward[k][b] is that of the completion of a state
    ratios        (ratio, advantage) of every entry that `clipped` has seen, or that a formula appends: the laws want some of
                  them beyond each side of the method's clip
    rollout, plan everything else: records, weights, what is hidden
    """

    def __init__(self, rollout: Any, plan: Any, reward: Tensor) -> None:
        self.old, self.new, self.ref = models()
        self.rollout, self.plan, self.reward = rollout, plan, reward.tolist()
        self.states, self.rows = range(plan.scored.shape[0]), range(8)
        self.length = [int(row.sum()) for row in rollout.keep]
        self.step_reward = normal(len(self.states), 8, seed=48).abs().tolist()
        self.ratios: list[tuple[float, float]] = []

    def group(self, b: int) -> list[float]:
        """The rewards of the four responses to the prompt of response b."""
        return self.reward[4 * (b // 4) : 4 * (b // 4) + 4]

    def centred(self, b: int) -> float:
        """The reward less its group's mean."""
        return self.reward[b] - sum(self.group(b)) / 4

    def z_score(self, b: int, eps: float = 1e-4) -> float:
        """The centred reward over its group's standard deviation, which has three degrees of freedom."""
        mean = sum(self.group(b)) / 4
        return self.centred(b) / (math.sqrt(sum((r - mean) ** 2 for r in self.group(b)) / 3) + eps)

    def tokens(self, model: Any, k: int, b: int, temperature: float = 1.0) -> dict[int, Tensor]:
        """The log-probability of each position that state k scores; the laws' rollout was sampled at temperature 0.8."""
        return token_logps(model, self.rollout, self.plan, k, b, temperature)

    def elbo(self, model: Any, b: int) -> Tensor:
        """The ELBO in its count form: the mean over the states of n / count times the sum of their tokens."""
        n, total = self.length[b], 0.0
        for k in self.states:
            logp = self.tokens(model, k, b)
            total = total + n / len(logp) * sum(logp.values()) / len(self.states)
        return total

    def clipped(self, ratio: Tensor, adv: float, low: float, high: float) -> Tensor:
        """PPO's loss of one entry, clipped below 1 - low and above 1 + high."""
        self.ratios.append((ratio.item(), adv))
        return surrogate(ratio, adv, low, high)


FORMULAS: dict[str, Callable[[Formula], Tensor]] = {}
CLIPS: dict[str, tuple[tuple[float, float] | None, tuple[float, float] | None]] = {}
REACH: dict[str, dict[str, float]] = {}


def formula(
    name: str,
    *,
    clip: tuple[float, float] | None = None,
    weights: tuple[float, float] | None = None,
    reach: dict[str, float] | None = None,
) -> Callable[[Callable[[Formula], Tensor]], Callable[[Formula], Tensor]]:
    """Register the published loss of a method, written as loops.

    clip      the ratios (low, high) beyond which an entry stops learning, on the side to which its advantage pushes it
    weights   the ratios (low, high) at which the method's weights are cut off, whatever the advantage
    reach     options of the method with which ratios of the laws' rollout lie beyond both sides of its clip
    """

    def register(function: Callable[[Formula], Tensor]) -> Callable[[Formula], Tensor]:
        assert name not in FORMULAS, f"{name} has a formula already"
        FORMULAS[name], CLIPS[name], REACH[name] = function, (clip, weights), reach or {}
        return function

    return register


@formula("reinforce")
def reinforce(f: Formula) -> Tensor:
    per_step = [-f.centred(b) * sum(f.tokens(f.new, k, b, 0.8).values()) for b in f.rows for k in f.states]
    return sum(per_step) / 8


def decisions(f: Formula) -> Iterator[tuple[Tensor, float, float]]:
    """(log pi of the new model, mu of the sampler, adv) of every revealed token."""
    for b, k in itertools.product(f.rows, f.states):
        for i, logp in f.tokens(f.new, k, b, 0.8).items():
            yield logp, math.exp(f.rollout.logp[b, i].item()), f.centred(b)


def total(f: Formula, rule: Callable[[Tensor, float, float], Tensor], tokens: bool) -> Tensor:
    """The sum of a loss per token, divided by the kept tokens or by B L."""
    return sum(rule(logp, mu, adv) for logp, mu, adv in decisions(f)) / (sum(f.length) if tokens else 8 * 4)


@formula("ppo", clip=(0.8, 1.2))
def ppo(f: Formula) -> Tensor:
    return total(f, lambda logp, mu, adv: f.clipped(logp.exp() / mu, adv, 0.2, 0.2), tokens=False)


def masked(outside: Callable[[float, float, float, float], bool], delta: float) -> Callable[[Tensor, float, float], Tensor]:
    """The loss of a token is -ratio adv where the mask is 1."""
    return lambda logp, mu, adv: logp.exp() * (0.0 if outside(logp.exp().item(), mu, adv, delta) else -adv / mu)


@formula("dppo-tv")
def dppo_tv(f: Formula) -> Tensor:
    assert {tv_outside(logp.exp().item(), mu, adv, 0.15) for logp, mu, adv in decisions(f)} == {True, False}
    return total(f, masked(tv_outside, 0.15), tokens=False)


@formula("dppo-kl")
def dppo_kl(f: Formula) -> Tensor:
    assert {kl_outside(logp.exp().item(), mu, adv, 0.05) for logp, mu, adv in decisions(f)} == {True, False}
    return total(f, masked(kl_outside, 0.05), tokens=False)


def shift_penalty(delta: float) -> Callable[[Tensor, float, float], Tensor]:
    """DRPO's eq. 8 in its probability form: the penalty is |adv| (pi - mu)^2 / (2 delta mu)."""
    return lambda logp, mu, adv: (-adv * logp.exp() + abs(adv) / (2 * delta) * (logp.exp() - mu) ** 2) / mu


@formula("drpo")
def drpo(f: Formula) -> Tensor:
    return total(f, shift_penalty(0.15), tokens=False)


@formula("grpo", clip=(0.8, 1.2))
def grpo(f: Formula) -> Tensor:
    total = 0.0
    for b in f.rows:
        change = (f.elbo(f.new, b) - f.elbo(f.old, b).detach()) / f.length[b]
        total = total + f.clipped(change.exp(), f.z_score(b), 0.2, 0.2)
    return total / 8


@formula("diffu-grpo", clip=(0.5, 1.5))
def diffu_grpo_released(f: Formula) -> Tensor:
    """As the paper's loss, averaged over all tokens of the batch."""
    total = 0.0
    for b in f.rows:
        new, old, ref = (f.tokens(model, 0, b) for model in (f.new, f.old, f.ref))
        for i in new:
            gap = ref[i].detach() - new[i]
            total = total + f.clipped((new[i] - old[i].detach()).exp(), f.centred(b), 0.5, 0.5) + 0.04 * (gap.exp() - gap - 1)
    return total / sum(f.length)


@formula("gdpo", clip=(0.5, 1.5), reach={"objective.epsilon_low": 0.05, "objective.epsilon_high": 0.05})
def gdpo_released(f: Formula) -> Tensor:
    """All four positions count; two of them are hidden at t = 1/2, three at 0.887, none at 0.113; ratio to the power 1/4.

    `sized` narrows the clip: powers 1/4 of this experience's ratios do not reach the published one on both sides.
    """
    t, w = rule(3)
    total = 0.0
    for b in f.rows:
        hidden = [len(f.tokens(f.new, k, b)) for k in range(3)]
        assert hidden == [0, 2, 3], hidden
        new, old = (sum(w[k] / t[k] * sum(f.tokens(m, k, b).values()) for k in (1, 2)) for m in (f.new, f.old))
        total = total + f.clipped(((new - old.detach()) / 4).exp(), f.centred(b), 0.05, 0.05)
    return total / 8


def scores(f: Formula, lengths: bool) -> tuple[list[Tensor], list[float]]:
    """SPG's score of each response (the ELBO, or half EUBO and half ELBO where adv <= 0), and its ELBO ratio to the
    old model.
    """
    score, ratio = [], []
    for b in f.rows:
        n = f.length[b] if lengths else 1
        lower = f.elbo(f.new, b) / n
        states = [f.tokens(f.new, k, b) for k in f.states]
        upper = f.length[b] * spg_eubo(states, f.length[b], 1.5) / n
        score.append(lower if f.centred(b) > 0 else 0.5 * upper + 0.5 * lower)
        ratio.append(math.exp(lower.item() - f.elbo(f.old, b).item() / n))
        f.ratios.append((ratio[-1], f.centred(b)))
    return score, ratio


def weighted(f: Formula, weight: list[float], score: list[Tensor]) -> Tensor:
    """The sum of -weight adv score."""
    return sum(-w * f.centred(b) * score[b] for b, w in zip(f.rows, weight, strict=True))


def self_normalised(f: Formula, cap: float, lengths: bool) -> Tensor:
    """Each prompt's weights sum to 1, and the mean is over the two prompts. Some ratio must reach the cap."""
    score, ratio = scores(f, lengths)
    capped = [min(r, cap) for r in ratio]
    assert cap == math.inf or lengths or capped != ratio, "no ratio above the cap"
    return weighted(f, [c / sum(capped[4 * (b // 4) : 4 * (b // 4) + 4]) for b, c in enumerate(capped)], score) / 2


@formula("stabledrl", weights=(0.0, 5.0))
def stabledrl_released(f: Formula) -> Tensor:
    """Cap 5, token means over block-wise states."""
    return self_normalised(f, 5.0, lengths=True)


@formula("stabledrl-sequence", weights=(0.0, 6.0))
def stabledrl(f: Formula) -> Tensor:
    """Cap 6, whole-sequence ELBOs."""
    return self_normalised(f, 6.0, lengths=False)


@formula("stabledrl-block", weights=(0.0, 6.0))
def stabledrl_block(f: Formula) -> Tensor:
    """stabledrl-sequence with the ELBO of every block: cap 6, each prompt's weights sum to 1, mean over the two prompts."""
    score, ratio = [], []
    for b in f.rows:
        states = {model: [f.tokens(model, k, b) for k in f.states] for model in (f.new, f.old)}
        owned = [len(own) for own in own_positions(f.rollout.keep[b], 2)]
        weight = [owned[k % 2] / (2 * len(state)) if state else 0.0 for k, state in enumerate(states[f.new])]
        new, old = (sum(w * sum(s.values()) for w, s in zip(weight, states[m], strict=True)) for m in (f.new, f.old))
        upper = eubo_by_loops(states[f.new], weight, 1.5)
        score.append(new if f.centred(b) > 0 else 0.5 * upper + 0.5 * new)
        ratio.append(math.exp(new.item() - old.item()))
        f.ratios.append((ratio[-1], f.centred(b)))
    capped = [min(r, 6.0) for r in ratio]
    assert capped != ratio, "no ratio above the cap"
    return weighted(f, [c / sum(capped[4 * (b // 4) : 4 * (b // 4) + 4]) for b, c in enumerate(capped)], score) / 2


def scored_steps(f: Formula) -> list[tuple[int, int]]:
    """The pairs (k, b) of the plan's states that exist."""
    return [(k, b) for k in f.states for b in f.rows if f.plan.valid[k, b]]


def step_clip_released(f: Formula, credit: Any) -> Tensor:
    """Scored at temperature 1 against the old weights, with k3 of weight 0.04, divided by K and by the step's tokens."""
    total = 0.0
    for k, b in scored_steps(f):
        new, old, ref = (sum(f.tokens(model, k, b).values()) for model in (f.new, f.old, f.ref))
        gap = ref.detach() - new
        loss = f.clipped((new - old.detach()).exp(), credit(k, b), 0.2, 0.5) + 0.04 * (gap.exp() - gap - 1)
        total = total + loss / (len(f.states) * len(f.tokens(f.new, k, b)))
    return total / 8


@formula("egspo", clip=(0.8, 1.5))
def egspo_released(f: Formula) -> Tensor:
    """The released code: see step_clip_released."""
    return step_clip_released(f, lambda _, b: f.centred(b))


def stepwise(f: Formula, k: int, b: int) -> float:
    """lam = 0.5, normalised: R = (1.5 reward - 0.5 step reward) / 1.5, less its mean over the rank's valid members."""
    value = lambda j: (1.5 * f.reward[j] - 0.5 * f.step_reward[k][j]) / 1.5  # noqa: E731
    mates = [j for j in range(4 * (b // 4), 4 * (b // 4) + 4) if f.plan.valid[k, j]]
    return value(b) - sum(map(value, mates)) / len(mates)


@formula("egspo-sa", clip=(0.8, 1.5))
def egspo_sa_released(f: Formula) -> Tensor:
    """The same with stepwise advantages."""
    return step_clip_released(f, partial(stepwise, f))


@formula("diffu-grpo-paper", clip=(0.5, 1.5))
def diffu_grpo(f: Formula) -> Tensor:
    total = 0.0
    for b in f.rows:
        new, old, ref = (f.tokens(model, 0, b) for model in (f.new, f.old, f.ref))
        for i in new:
            loss = f.clipped((new[i] - old[i].detach()).exp(), f.centred(b), 0.5, 0.5)
            gap = ref[i].detach() - new[i]
            total = total + (loss + 0.04 * (gap.exp() - gap - 1)) / f.length[b]
    return total / 8


@formula("gdpo-sequence", clip=(0.5, 1.5))
def gdpo(f: Formula) -> Tensor:
    """eq. 5 and 6: three nodes, weight w/t; one ratio of whole-sequence ELBOs, each response's loss over its length."""
    t, w = rule(3)
    total = 0.0
    for b in f.rows:
        new, old = (sum(w[k] / t[k] * sum(f.tokens(m, k, b).values()) for k in range(3)) for m in (f.new, f.old))
        total = total + f.clipped((new - old.detach()).exp(), f.centred(b), 0.5, 0.5) / f.length[b]
    return total / 8


@formula("stabledrl-elbo", weights=(0.0, 6.0))
def stabledrl_elbo(f: Formula) -> Tensor:
    total, score, capped = 0.0, [], []
    for b in f.rows:
        score.append(f.elbo(f.new, b) / f.length[b])
        ratio = math.exp(score[b].item() - f.elbo(f.old, b).item() / f.length[b])
        f.ratios.append((ratio, f.centred(b)))
        capped.append(min(ratio, 6.0))
    for b in f.rows:
        share = capped[b] / sum(capped[4 * (b // 4) : 4 * (b // 4) + 4])
        total = total - share * f.centred(b) * score[b]
    return total / 2


@formula("clip-only", weights=(0.0, 6.0))
def clip_only(f: Formula) -> Tensor:
    """The capped ratio over N = 4, mean over the two prompts."""
    score, ratio = scores(f, lengths=False)
    assert max(ratio) > 6, "no ratio above the cap"
    return weighted(f, [min(r, 6.0) / 4 for r in ratio], score) / 2


@formula("self-norm-only")
def self_norm_only(f: Formula) -> Tensor:
    """No cap."""
    return self_normalised(f, math.inf, lengths=False)


def step_clip(f: Formula, credit: Any, behaviour: bool) -> Tensor:
    """One clipped ratio for each chosen step, 0.2 below and 0.5 above; a sum over the steps, a mean over the responses."""
    total = 0.0
    for k, b in scored_steps(f):
        logp = f.tokens(f.new, k, b, 0.8)
        drawn = {i: f.rollout.logp[b, i] for i in logp} if behaviour else f.tokens(f.old, k, b, 0.8)
        change = sum(logp[i] - drawn[i].detach() for i in logp)
        total = total + f.clipped(change.exp(), credit(k, b), 0.2, 0.5)
    return total / 8


@formula("egspo-accounts", clip=(0.8, 1.5))
def egspo(f: Formula) -> Tensor:
    """Against the sampler's own log-probabilities, the reward centred on its group."""
    return step_clip(f, lambda _, b: f.centred(b), behaviour=True)


@formula("egspo-sa-accounts", clip=(0.8, 1.5))
def egspo_sa(f: Formula) -> Tensor:
    """egspo-accounts with a value of its own for each state."""
    return step_clip(f, partial(stepwise, f), behaviour=True)


def distribution(f: Formula, model: oracle.TabularDenoiser, k: int, b: int, i: int) -> list[float]:
    """The model's distribution of one token of one state, at the sampling temperature."""
    hidden, response = f.plan.hidden[k, b, f.rollout.prompt.shape[1] :], f.rollout.response[b]
    state = tuple(model.mask_token_id if hidden[j] else int(token) for j, token in enumerate(response))
    return (model.logits_at(state)[i] / 0.8).softmax(-1).tolist()


@formula("dppo-topk")
def dppo_topk(f: Formula) -> Tensor:
    """The M = 1 likeliest token of the old model, the drawn one, and the rest."""
    loss, differs = 0.0, False
    for b, k in itertools.product(f.rows, f.states):
        for i, logp in f.tokens(f.new, k, b, 0.8).items():
            mu, pi = (distribution(f, model, k, b, i) for model in (f.old, f.new))
            drawn, adv = int(f.rollout.response[b, i]), f.centred(b)
            far = partition_divergence(mu, pi, {mu.index(max(mu)), drawn}, "tv") > 0.15
            out = far and adv * (pi[drawn] - mu[drawn]) > 0
            differs = differs or out != tv_outside(pi[drawn], mu[drawn], adv, 0.15)
            loss = loss + logp.exp() * (0.0 if out else -adv / mu[drawn])
    assert differs, "the fixture does not tell this mask from the binary one"
    return loss / (8 * 4)


def released(outside: Callable, delta: float) -> Callable[[Tensor, float, float], Tensor]:
    """The masked and truncated ratio as data, times log pi."""

    def rule(logp: Tensor, mu: float, adv: float) -> Tensor:
        pi = logp.exp().item()
        return -(0.0 if outside(pi, mu, adv, delta) else min(pi / mu, 20.0)) * adv * logp

    return rule


@formula("dppo-tv-verl", weights=(0.0, 20.0))
def dppo_tv_released(f: Formula) -> Tensor:
    return total(f, released(tv_outside, 0.15), tokens=True)


@formula("dppo-kl-verl", weights=(0.0, 20.0))
def dppo_kl_released(f: Formula) -> Tensor:
    return total(f, released(kl_outside, 0.05), tokens=True)


@formula("drpo-published")
def drpo_released(f: Formula) -> Tensor:
    return total(f, shift_penalty(12.5), tokens=False)


@formula("ppo-verl", clip=(0.8, 1.2))
def ppo_released(f: Formula) -> Tensor:
    def rule(logp: Tensor, mu: float, adv: float) -> Tensor:
        ratio = logp.exp() / mu
        return 0 * ratio if adv < 0 and ratio.item() > 3.0 else f.clipped(ratio, adv, 0.2, 0.2)

    loss = total(f, rule, tokens=True)
    assert any(adv < 0 and logp.exp().item() / mu > 3.0 for logp, mu, adv in decisions(f)), "no token beyond the bound"
    return loss


@formula("replay-grpo", clip=(0.8, 1.2))
def replay_grpo(f: Formula) -> Tensor:
    total = 0.0
    for b, k in itertools.product(f.rows, f.states):
        logp = f.tokens(f.new, k, b, 0.8)
        if logp:
            drawn = sum(f.rollout.logp[b, i] for i in logp)
            total = total + f.clipped((sum(logp.values()) - drawn).exp(), f.z_score(b), 0.2, 0.2)
    return total / (8 * 4)


@formula("trace-block", clip=(0.8, 1.2))
def trace_block(f: Formula) -> Tensor:
    """PPO's clip on every step up to the one that decides the reward, straight from the recorded trajectory."""
    total = 0.0
    for b in f.rows:
        steps, response = f.rollout.unmask_step[b].tolist(), tuple(f.rollout.response[b].tolist())
        for s in range(last_step(f.rollout, b) + 1):
            hidden = frozenset(i for i, u in enumerate(steps) if u >= s or u < 0)
            logp = oracle.token_logp(f.new, response, hidden, 0.8)
            change = sum(logp[i] - f.rollout.logp[b, i] for i, u in enumerate(steps) if u == s)
            total = total + f.clipped(change.exp(), f.z_score(b), 0.2, 0.2)
    return total / (8 * 4)


@formula("replay-uniform")
def replay_uniform(f: Formula) -> Tensor:
    """-adv log pi of each drawn step, times (deciding steps) / (steps drawn of them)."""
    total = 0.0
    for k, b in scored_steps(f):
        deciding = 1 + max(int(s) for s, kept in zip(f.rollout.unmask_step[b], f.rollout.keep[b], strict=True) if kept)
        drawn = sum(bool(f.plan.valid[j, b]) for j in f.states)
        total = total - deciding / drawn * f.centred(b) * sum(f.tokens(f.new, k, b, 0.8).values())
    return total / 8


@formula("clip-higher", clip=(0.8, 1.28))
def clip_higher(f: Formula) -> Tensor:
    return total(f, lambda logp, mu, adv: f.clipped(logp.exp() / mu, adv, 0.2, 0.28), tokens=True)


@formula("gspo", clip=(0.9997, 1.0004))
def gspo(f: Formula) -> Tensor:
    loss = 0.0
    for b in f.rows:
        change = 0.0
        for k in f.states:
            change = change + sum(logp - f.rollout.logp[b, i] for i, logp in f.tokens(f.new, k, b, 0.8).items())
        loss = loss + f.clipped((change / f.length[b]).exp(), f.centred(b), 3e-4, 4e-4)
    return loss / 8


def clipped_weight(floor: float, cap: float) -> Callable[[Tensor, float, float], Tensor]:
    """-clip(ratio) adv log pi, the ratio as data."""
    return lambda logp, mu, adv: -min(max(logp.exp().item() / mu, floor), cap) * adv * logp


@formula("cispo", weights=(0.0, 5.0))
def cispo(f: Formula) -> Tensor:
    return total(f, clipped_weight(0.0, 5.0), tokens=True)


@formula("cispo-verl", weights=(0.8, 1.28))
def cispo_released(f: Formula) -> Tensor:
    return total(f, clipped_weight(0.8, 1.28), tokens=True)


@formula("tis", weights=(0.0, 2.0))
def tis(f: Formula) -> Tensor:
    return total(f, clipped_weight(0.0, 2.0), tokens=False)


@formula("spo", clip=(0.8, 1.2))
def spo(f: Formula) -> Tensor:
    def rule(logp: Tensor, mu: float, adv: float) -> Tensor:
        ratio = logp.exp() / mu
        return -ratio * adv + abs(adv) / 0.4 * (ratio - 1) ** 2

    return total(f, rule, tokens=False)


@formula("justgrpo")
def justgrpo(f: Formula) -> Tensor:
    """-A log p of every revealed token, A the z-score, over B L."""
    logp = [(b, sum(f.tokens(f.new, k, b, 0.8).values())) for b in f.rows for k in f.states]
    return sum(-f.z_score(b) * total for b, total in logp) / (8 * 4)


@formula("mask-aware", clip=(0.9997, 1.0004))
def mask_aware(f: Formula) -> Tensor:
    """GSPO on the tokens plus GSPO on their positions, each clipped by itself, with the leave-one-out advantage."""

    def tokens(model: Any, k: int, b: int) -> dict[int, Tensor]:
        return f.tokens(model, k, b)

    def places(model: Any, k: int, b: int) -> dict[int, Tensor]:
        return position_logps(model, f.rollout, f.plan, k, b, 4)

    total = 0.0
    for b, of in itertools.product(f.rows, (tokens, places)):
        change = sum(
            sum(of(f.new, k, b).values()) - sum(of(f.old, k, b).values()).detach() for k in f.states if of(f.old, k, b)
        )
        total = total + f.clipped((change / f.length[b]).exp(), f.centred(b) * 4 / 3, 3e-4, 4e-4)
    return total / 8


@formula("tracerl", clip=(0.8, 1.2))
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


@formula("mdpo", clip=(0.8, 1.2))
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


@formula("spg")
def spg(f: Formula) -> Tensor:
    """No ratio; each response counts with its share of the tokens."""
    score, _ = scores(f, lengths=True)
    return weighted(f, [n / sum(f.length) for n in f.length], score)


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


@formula("espo", clip=(0.8, 1.2))
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


@formula("gdsd", weights=(0.8, 1.28), reach={"objective.epsilon_low": 0.5, "objective.epsilon_high": 1.0})
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


@formula("ebpo-block", clip=(0.8, 1.2))
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


@formula("coupled-grpo", clip=(0.5, 1.5))
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


@formula("bgpo-dare")
def bgpo(f: Formula) -> Tensor:
    """Mask by mask: d = change of n/count sum log p over L, clipped 1 + d or exp d; mean of the masks, weighted by tokens."""
    total, count = 0.0, len(f.states)
    for b, k in itertools.product(f.rows, f.states):
        new, old = (f.tokens(model, k, b) for model in (f.new, f.old))
        d = f.length[b] / len(new) * (sum(new.values()) - sum(old.values()).detach()) / 4
        adv = f.z_score(b, 1e-6)
        ratio = 1 + d if adv > 0 else d.exp()
        clipped = f.clipped(ratio, adv, 0.2, 0.2) if ratio.item() <= 3.0 or adv > 0 else 0 * ratio
        total = total + f.length[b] * clipped / count
    return total / sum(f.length)


@formula("unigrpo-igpo", clip=(0.8, 1.2))
def unigrpo(f: Formula) -> Tensor:
    """A clipped ratio a hidden token, and k3, over the number of hidden tokens."""
    total, count = 0.0, 0
    for b in f.rows:
        new, old, ref = (f.tokens(model, 0, b) for model in (f.new, f.old, f.ref))
        for i in new:
            gap = ref[i].detach() - new[i]
            loss = f.clipped((new[i] - old[i].detach()).exp(), f.centred(b), 0.2, 0.2)
            total, count = total + loss + 0.01 * (gap.exp() - gap - 1), count + 1
    return total / count


@formula("gdpo-arcs", clip=(0.5, 1.5))
def gdpo_arcs(f: Formula) -> Tensor:
    """The loss of GDPO's eq. 5 and 6 at its three calls, with the count form of the ELBO."""
    assert len(f.states) == 3
    total = 0.0
    for b in f.rows:
        ratio = (f.elbo(f.new, b) - f.elbo(f.old, b).detach()).exp()
        total = total + f.clipped(ratio, f.centred(b), 0.5, 0.5) / f.length[b]
    return total / 8


@formula("stabledrl-cv", weights=(0.0, 6.0))
def stabledrl_cv(f: Formula) -> Tensor:
    """The loss of `stabledrl-elbo` at three calls: on tables nobody fitted constants, and the estimate is that of arcs."""
    assert len(f.states) == 3
    return stabledrl_elbo(f)


@formula("egspo-exact", clip=(0.8, 1.5))
def egspo_exact(f: Formula) -> Tensor:
    """Against the old weights; in random order, as here, the choice of positions adds nothing: law_egspo_exact_row."""
    return step_clip(f, lambda _, b: f.centred(b), behaviour=False)
