"""Parity of the row gdsd with the numbers of the official code (GaryBall/GDSD)."""

import dataclasses

import torch

import laws
from judged import SHIPPED
from laws import double
from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import methods
from minidrl.oracle import TabularDenoiser, table_gradient
from parity import cases, same, sequence_rollout


def row(given):
    """The row with the case's numbers. The code divides its k2 term by G K L and sums over draws; here beta carries 1/(K L)."""
    options = {
        "objective.psi": given["psi"],
        "objective.epsilon_low": given["clip_low"],
        "objective.epsilon_high": given["clip_high"],
    }
    method = methods.with_options(methods.METHODS["gdsd"], options)
    penalty = methods.KL("k2", given["beta"] / (given["K"] * given["L"]))
    return dataclasses.replace(method, kl=penalty if given["beta"] else None)


def plan_of(masks, complements, weight):
    """The states of K draws, each mask followed by its complement."""
    scored = torch.stack([masks, complements], 1).flatten(0, 1)
    hidden = torch.cat([torch.zeros(*scored.shape[:2], 3, dtype=torch.bool), scored], -1)
    return alg.Plan(hidden, scored, weight, scored.any(-1))


@cases("gdsd", "gdsd_loss")
def test_loss(case):
    """From the estimates per draw: each is put into one token of the pair's first state, with the weight that gives it back."""
    given, out = case["inputs"], case["outputs"]
    draws, rows, length = given["K"], given["G"], given["L"]
    rollout, _ = sequence_rollout(rows, length)
    first = torch.zeros(draws, rows, length, dtype=torch.bool)
    first[..., 0] = True
    plan = plan_of(first, torch.zeros_like(first), torch.full((2 * draws, rows), 1 / draws, dtype=torch.float64))
    method = row(given)

    def feature(name):
        logp = torch.zeros(2 * draws, rows, length, dtype=torch.float64)
        logp[0::2, :, 0] = double(given[name])
        return {"logp": logp}

    new = {"logp": feature("seq_logp_new")["logp"].requires_grad_()}
    anchor = methods.reduced(method, plan, rollout, feature("seq_logp_old"))
    ref = methods.kl_target(method, plan, rollout, feature("seq_logp_ref")) if method.kl else None
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    loss = methods.method_loss(method, plan, rollout, new, adv, anchor, ref)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, new["logp"])[0][0::2, :, 0], out["grad_seq_logp_new"], "gradient")


@cases("gdsd", "gdsd_end_to_end")
def test_from_the_table(case):
    """From the network on. Weights none: half of both sums; weights count: the plan (2.4)'s own, (L+1)/(2 hidden)."""
    given, out = case["inputs"], case["outputs"]
    masks, complements = (torch.tensor(given[name]).bool() for name in ("masks", "masks_complement"))
    rollout = laws.rollout_of(SHIPPED, given["x"], num_generations=given["G"])
    blank = torch.ones(2 * given["K"], given["G"], dtype=torch.float64)
    plan = plan_of(masks, complements, blank)
    count = plan.scored.sum(-1).clamp(min=1) if given["weights"] == "count" else given["L"] + 1
    plan = dataclasses.replace(plan, weight=blank * (given["L"] + 1) / (2 * given["K"] * count))
    new, old = (TabularDenoiser.from_hidden_table(double(given[name])) for name in ("table_new", "table_old"))
    method = row(given)
    feature = {"logp": laws.graph_logp(SHIPPED, new, rollout, plan)}
    anchor = methods.reduced(method, plan, rollout, feat.features(old, rollout, plan, temperature=1.0))
    same(methods.reduced(method, plan, rollout, feature)[..., 0], out["seq_logp_new"], "estimate")
    same(anchor[..., 0], out["seq_logp_old"], "old estimate")
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    loss = methods.method_loss(method, plan, rollout, feature, adv, anchor, None)
    same(loss, out["loss"], "loss")
    same(table_gradient(new, loss), out["grad_table_new"], "gradient")
