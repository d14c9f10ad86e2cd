"""Laws and published losses of papers that came by the path of CONTRIBUTING.md; they register themselves in laws.LAWS."""

import itertools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from laws import (
    Formula,
    close,
    experience,
    features_of,
    formula,
    graph_features,
    judges,
    normal,
    oracle,
    positions,
    recorded,
    refuses,
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
