"""Parity of the row coupled-grpo with the numbers of the official code (apple/ml-diffucoder)."""

import dataclasses

import torch

import laws
from judged import SHIPPED as alg
from laws import double
from minidrl import methods
from minidrl.oracle import TabularDenoiser, table_gradient
from parity import cases, one_prompt, same


def row(given):
    """The row with the case's clip and the weight of its KL term."""
    clip = {f"objective.epsilon_{side}": given["clip"] for side in ("low", "high")}
    method = methods.with_options(methods.METHODS["coupled-grpo"], clip)
    return dataclasses.replace(method, kl=methods.KL("k3", given["beta"]) if given["beta"] else None)


@cases("coupled_grpo", "coupled_loss")
def test_loss(case):
    """From the estimates of the tokens on: one state of weight 1 gives them as they are."""
    given, out = case["inputs"], case["outputs"]
    rollout, plan = one_prompt(given["keep"])
    method = row(given)
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    new = double(given["logp_new"])[None].requires_grad_()
    anchor, ref = (double(given[f"logp_{name}"])[None] * plan.scored for name in ("old", "ref"))
    loss = methods.method_loss(method, plan, rollout, {"logp": new}, adv, anchor, ref if method.kl else None)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, new)[0][0], out["grad_logp_new"], "gradient")


@cases("coupled_grpo", "coupled_end_to_end")
def test_from_the_network_on(case):
    """The plan (2.9) on the official masks, which are of one share t, and the loss without its KL term."""
    given, out = case["inputs"], case["outputs"]
    masks, rows = torch.tensor(given["masks"]).bool(), given["G"]
    rollout = laws.rollout_of(alg, given["x"], given["keep"], num_generations=rows)
    t = given["t"]
    u = torch.where(masks[1], t / 2, (1 + t) / 2).double()
    with laws.noise(alg, double([0.5]), u):
        plan = alg.coupled_plan(rollout, laws.seeded(), low=t, high=t)
    ll = {}
    for name in ("new", "old"):
        model = TabularDenoiser.from_hidden_table(double(given[f"table_{name}"]))
        logp = laws.graph_logp(alg, model, rollout, plan)
        ll[name] = alg.reduce_logp(logp, plan, level="position", normalizer=None)
        same(ll[name][0] * rollout.keep, (double(out[f"logp_{name}"]) * rollout.keep).tolist(), name)
        if name == "new":
            method, kept, feature = row(given), model, {"logp": logp}
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    loss = methods.method_loss(method, plan, rollout, feature, adv, ll["old"].detach(), None)
    same(loss, out["loss"], "loss")
    same(table_gradient(kept, loss), out["grad_table_new"], "gradient")
