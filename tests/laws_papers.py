"""Laws and published losses of papers that came by the path of CONTRIBUTING.md; they register themselves in laws.LAWS."""

import itertools
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
    features_of,
    formula,
    graph_features,
    judges,
    mean_is,
    noise,
    normal,
    oracle,
    positions,
    recorded,
    refuses,
    rollout_of,
    seeded,
    walk,
)
from minidrl import methods
from minidrl.sampler import Sampler

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


# ---------------------------------------------------------------------------------------------------------------- BGPO


@judges("8.16")
def law_tangent(alg: ModuleType) -> None:
    """Its mean over masks lies below adv exp(mean d), with equality at d = 0 in value and gradient; dual clip by hand."""
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


@formula("bgpo")
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


# ------------------------------------------------------------------------------------------------------------- UniGRPO


@judges("2.10")
def law_scheduled_plan(alg: ModuleType) -> None:
    """Hidden where the noise is below t_0 + progress (1 - t_0), and scored there; everything at the last update."""
    rollout = rollout_of(alg, [[1, 0, 2, 1]] * 2, [[1, 1, 1, 1], [1, 1, 1, 0]])
    u, start = double([[0.1, 0.69, 0.71, 0.9], [0.9, 0.71, 0.69, 0.1]]), 0.2 + 0.8 * 0.25
    for progress, domain in itertools.product((0.0, 0.5, 1.0), ("all", "keep")):
        with noise(alg, double([0.25]), u):
            plan = alg.scheduled_plan(rollout, seeded(), min_t=0.2, domain=domain, progress=progress)
        inside = rollout.keep if domain == "keep" else rollout.keep | True
        masked = (u < start + progress * (1 - start)) & inside
        close(plan.scored, masked[None], "scored")
        close(plan.hidden[0], torch.cat([torch.zeros(2, 3).bool(), masked | ~inside], 1), "hidden")
        close(plan.weight, [[1.0, 1.0]], "weight")
        assert bool(masked.all()) == (progress == 1.0 and domain == "all") and not plan.replay
    many = rollout_of(alg, [[1, 0, 2, 1]] * 4000)
    same = [alg.scheduled_plan(many, seeded(i), min_t=0.1, domain="all", progress=0.0, schedule=seeded(9)) for i in (1, 2)]
    share = 0.1 + 0.9 * torch.rand(1, generator=seeded(9), dtype=torch.float64).item()
    for plan in same:
        mean_is(plan.scored.double() - share, 0.0, "the share comes from the schedule")
    assert not torch.equal(same[0].scored, same[1].scored), "the masks do not"
    refuses(lambda: alg.scheduled_plan(rollout, seeded(), min_t=1.0, domain="all", progress=0.0), "plan.min_t", "1.0")


@formula("unigrpo")
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


# ---------------------------------------------------------------------------------- 4.4, the position part of Mask-Aware PG


def share(own: Tensor, best: list[Tensor]) -> Tensor:
    """Log of the share of the first in a softmax with the others."""
    return own - torch.stack([own, *best]).exp().sum().log()


@judges("4.4")
def law_position_logp(alg: ModuleType) -> None:
    """By loops on made-up logits; each of several scored tokens competes with those passed over alone; 0 without any."""
    own, best = normal(4, 5, seed=70).requires_grad_(), normal(5, seed=71, scale=2.0).requires_grad_()
    scored = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0] * 5]).bool()
    passed = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 0], [0] * 5, [0, 0, 0, 0, 1]]).bool()
    rivals, c = [[best[0], best[1]], [best[2], best[3]], [], [best[4]]], normal(4, 5, seed=72)
    zero = own.sum() * 0
    truth = [share(own[s, i], rivals[s]) if scored[s, i] else zero for s, i in itertools.product(range(4), range(5))]
    truth, got = torch.stack(truth).unflatten(0, (4, 5)), alg.position_logp(own, best, scored, passed)
    close(got, truth, "value")
    for name, x in (("own", own), ("best", best)):
        slopes = (torch.autograd.grad((c * value).sum(), x, retain_graph=True)[0] for value in (got, truth))
        close(*slopes, f"gradient in {name}")


def position_logps(model: Any, rollout: Any, plan: Any, k: int, b: int, block_length: int) -> dict[int, Tensor]:
    """The position part of the scored positions of one state, from the table; rivals: hidden, same block, not scored."""
    hidden, scored = positions(plan.hidden[k, b, 3:]), positions(plan.scored[k, b])
    response = rollout.response[b].tolist()
    logits = model.logits_at(tuple(model.mask_token_id if i in hidden else token for i, token in enumerate(response)))
    block = {i // block_length for i in scored}
    best = [logits[j].max() for j in sorted(hidden - scored) if j // block_length in block]
    return {i: share(logits[i, response[i]], best) for i in sorted(scored)}


@judges("4.4", "4.1")
def law_position_feature(alg: ModuleType) -> None:
    """On a table, low-confidence order: the loops, at temperature 1 whatever the sampler's; other orders: 0. And two passes:
    the gradient of one graph."""
    for length, tokens, block, order in ((4, 1, 4, "low_confidence"), (4, 1, 2, "low_confidence"), (3, 1, 3, "random")):
        model, paths = oracle.TabularDenoiser.random(length, 2, seeded(11)), walk((length, 2, order, tokens, block, None))[1]
        settings = Sampler(order=order, temperature=0.7, length=length, block_length=block, tokens_per_step=tokens)
        rollout = recorded(alg, paths[::5], None, sampler=settings)
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        how = {"temperature": 0.7, "names": ("logp", "position_logp")}
        c, truth = normal(*plan.scored.shape, seed=73), torch.zeros(plan.scored.shape, dtype=torch.float64)
        for k, b in plan.valid.nonzero().tolist() if order == "low_confidence" else ():
            for i, value in position_logps(model, rollout, plan, k, b, block).items():
                truth = truth.index_put((torch.tensor(k), torch.tensor(b), torch.tensor(i)), value)
        graph = graph_features(alg, model, rollout, plan, how["names"], 0.7)
        close(graph["position_logp"], truth, f"{order}, blocks of {block}")

        def loss(feature: dict, c=c) -> Tensor:
            return ((c * feature["position_logp"]).sum((0, 2)).exp() * feature["logp"].sum((0, 2))).sum()

        expected = oracle.table_gradient(model, loss(graph | {"position_logp": truth}))
        for size in (1, 256):
            alg.two_pass_backward(model, rollout, plan, loss, size=size, **how)
            close(model.table.grad, expected, f"{order}, blocks of {block}: gradient")
            model.zero_grad()


# ------------------------------------------------------------------------------------------------------ Mask-Aware PG


@formula("mask-aware")
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


@judges("10.1", "4.4")
def law_mask_aware_options(alg: ModuleType) -> None:
    """Its two ratios are those of a sequence, no other word is allowed; an exact KL is added once, to the tokens."""
    row = alg.METHODS["mask-aware"]
    for word in ("token", "step", "pair"):
        refuses(lambda word=word: methods.dataclasses.replace(row, reduction=word), "reduction", repr(word), "sequence")
    drawn, old, new, _, reward = experience("mask-aware")
    rollout, method = alg.Rollout(**vars(drawn)), methods.with_options(row, {"kl.form": "exact", "kl.beta": 0.5})
    plan = row.plan(rollout, seeded())
    feature = alg.features(new, rollout, plan, temperature=1.0, names=method.features, reference=old)
    anchor = alg.reduced(row, plan, rollout, features_of(alg, row, old, rollout, plan))
    adv = alg.advantages(row, plan, rollout, reward)
    loss = [alg.method_loss(m, plan, rollout, feature, adv, anchor, None) for m in (method, row)]
    close(loss[0] - loss[1], 0.5 * (feature["kl_ref"].sum((0, 2)) / rollout.lengths).mean(), "exact KL")
