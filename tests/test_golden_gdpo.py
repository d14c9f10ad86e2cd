"""Parity with the official code of GDPO and of d1 (diffu-GRPO), through the rows that carry their names.

Sources and formulas are in the files themselves; each test names the quirks that it handles outside the row.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

import laws
from judged import SHIPPED
from laws import double
from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import methods
from minidrl.methods import with_options
from minidrl.oracle import TabularDenoiser, table_gradient
from parity import cases, one_prompt, same, sequence_rollout


def order_noise(masks):
    """Noise that makes the hidden positions of every mask the ones of lowest rank."""
    return torch.where(masks, 0.25, 0.75) + torch.arange(masks.shape[-1], dtype=torch.float64) / 100


def clipped(name, given):
    """The released row with the case's clip."""
    clip = {"objective.epsilon_low": given["clip"], "objective.epsilon_high": given["clip"]}
    return with_options(methods.METHODS[name], clip)


# ------------------------------------------------------------------------------------------------- GDPO: gdpo-released


def gdpo_method(given):
    """The row; its KL term, off in the published runs, is k3 of the un-normalised log-likelihood to the reference."""
    kl = methods.KL("k3", given["beta"], of="log_likelihood") if given["beta"] else None
    return replace(clipped("gdpo-released", given), kl=kl)


@cases("gdpo", "gdpo_loss")
def test_gdpo_loss(case):
    """From likelihoods on: ratio to the power 1/L with the padded L, clip, k3 without that power, one mean over sequences.

    The inputs are whole-sequence values; a plan of one state that scores all L positions carries each as L equal shares.
    """
    given, out = case["inputs"], case["outputs"]
    method, length = gdpo_method(given), given["L"]
    rollout, plan = sequence_rollout(given["G"], length)
    new = double(given["seq_logp_new"]).requires_grad_()
    logp = {"new": new} | {name: double(given[f"seq_logp_{name}"]) for name in ("old", "ref")}
    feature = {name: {"logp": (value[:, None] / length).expand(-1, length)[None]} for name, value in logp.items()}
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    ll, anchor = (methods.reduced(method, plan, rollout, feature[name]) for name in ("new", "old"))
    same(alg.log_ratio(ll, anchor).exp()[0, :, 0], out["ratio"], "ratio")
    ref = methods.kl_target(method, plan, rollout, feature["ref"]) if method.kl else None
    loss = methods.method_loss(method, plan, rollout, feature["new"], adv, anchor, ref)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, new)[0], out["grad_seq_logp_new"], "gradient")


def official_plan(method, rollout, given, masks):
    """The row's plan, made to hide what the official code hid. Its nodes are listed in another order there."""
    order = torch.tensor(given["nodes"]).argsort()
    with laws.noise(SHIPPED, order_noise(torch.tensor(masks).bool())[order]):
        plan = method.plan(rollout, laws.seeded())
    assert torch.equal(plan.scored, torch.tensor(masks).bool()[order]), "the plan hides floor(t L) positions"
    w = double(given["node_weights"]) / double(given["nodes"])
    same(plan.weight, w[order][:, None].expand_as(plan.weight), "weights")
    return plan


def monte_carlo_plan(method, rollout, given):
    """The official ``mc`` mode is (2.3): weight L / (K count), every position counts. Its counts are an input here."""
    masks = torch.tensor(given["masks"]).bool()
    u = (masks.sum(-1) - 0.5) / given["L"]
    with laws.noise(SHIPPED, u.double(), order_noise(masks)):
        plan = method.plan(rollout, laws.seeded())
    assert torch.equal(plan.scored, masks)
    same(plan.weight, given["mask_weights"], "weights")
    return plan


def check_end_to_end(method, rollout, plan, old_plan, given, out):
    """Estimates, their gradient, advantages, loss and its gradient in the table."""
    new, old = (TabularDenoiser.from_hidden_table(double(given[f"table_{name}"])) for name in ("new", "old"))
    feature = {"logp": laws.graph_logp(SHIPPED, new, rollout, plan)}
    plain = replace(method, normalizer="none")
    estimate = methods.reduced(plain, plan, rollout, feature)[0, :, 0]
    same(estimate, out["seq_logp_new"], "new")
    same(table_gradient(new, estimate.sum()), out["grad_table_of_sum_estimate"], "gradient of the estimate")
    theirs = feat.features(old, rollout, old_plan, temperature=1.0)
    same(methods.reduced(plain, old_plan, rollout, theirs)[0, :, 0], out["seq_logp_old"], "old")
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    anchor = methods.reduced(method, old_plan, rollout, theirs)
    loss = methods.method_loss(method, plan, rollout, feature, adv, anchor, None)
    same(loss, out["loss"], "loss")
    same(table_gradient(new, loss), out["grad_table_new"], "gradient")


@pytest.mark.parametrize("start", ["gdpo_gauss", "gdpo_mc"])
def test_every_case_has_a_kind(start):
    """The two tests below and the one above divide the file among them."""
    names = [case["name"] for case in cases("gdpo").args[1]]
    assert len(names) == 15 and any(name.startswith(start) for name in names)
    assert all(name.startswith(("gdpo_loss", "gdpo_gauss", "gdpo_mc")) for name in names)


@cases("gdpo", "gdpo_gauss")
def test_gdpo_from_the_table(case):
    """One to five nodes, nodes that hide nothing included; with ``masks_old`` the old value is that of other masks.

    That is how the released trainer pairs them, and what the row's refresh ``independent`` says.
    """
    given, out = case["inputs"], case["outputs"]
    method = with_options(gdpo_method(given), {"plan.num_nodes": given["K"]})
    rollout = laws.rollout_of(SHIPPED, given["x"], num_generations=given["G"])
    plan = official_plan(method, rollout, given, given["masks"])
    assert (torch.tensor(given["masks"]).sum(-1) == torch.tensor(given["counts"])[:, None]).all()
    old_plan = official_plan(method, rollout, given, given["masks_old"]) if "masks_old" in given else plan
    assert method.refresh == "independent" and method.anchor == "old"
    check_end_to_end(method, rollout, plan, old_plan, given, out)


@cases("gdpo", "gdpo_mc")
def test_gdpo_with_double_monte_carlo(case):
    """The release's other estimator in the same row. Its counts, systematic over the batch there, are an input here."""
    given, out = case["inputs"], case["outputs"]
    count = partial(alg.elbo_count_plan, num_states=given["K"], domain="all", strata=False)
    method = replace(gdpo_method(given), plan=count)
    rollout = laws.rollout_of(SHIPPED, given["x"], num_generations=given["G"])
    plan = monte_carlo_plan(method, rollout, given)
    check_end_to_end(method, rollout, plan, plan, given, out)


# -------------------------------------------------------------------------------------- diffu-GRPO: diffu-grpo-released


def d1_method(given):
    """The row with the case's clip and KL weight; 0 removes the KL term."""
    return with_options(clipped("diffu-grpo-released", given), {"kl.beta": given["beta"]})


@cases("d1", "d1_loss")
def test_diffu_grpo(case):
    """Loss and gradient; the token mean is over one micro-batch there and over the same rows here; k3 is inside that mean."""
    given, out = case["inputs"], case["outputs"]
    method = d1_method(given)
    rollout, plan = one_prompt(given["keep"])
    logp = double(given["logp_new"]).requires_grad_()
    anchor, ref = (
        methods.reduced(method, plan, rollout, {"logp": double(given[f"logp_{name}"])[None]}) for name in ("old", "ref")
    )
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    loss = methods.method_loss(method, plan, rollout, {"logp": logp[None]}, adv, anchor, ref)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, logp)[0], out["grad_logp_new"], "gradient")


@cases("d1", "d1_end_to_end")
def test_diffu_grpo_from_the_table(case):
    """From the network on: one state with the whole response hidden, then the loss above without a KL term."""
    given, out = case["inputs"], case["outputs"]
    method = d1_method(given)
    rollout, plan = one_prompt(given["keep"], torch.tensor(given["x"]))
    new, old = (TabularDenoiser.from_hidden_table(double(given[name])) for name in ("table_new", "table_old"))
    same(plan.hidden[..., 3:], given["masks"], "masks")
    feature = {"logp": laws.graph_logp(SHIPPED, new, rollout, plan)}
    theirs = feat.features(old, rollout, plan, temperature=1.0)
    for name, logp in (("logp_new", feature["logp"]), ("logp_old", theirs["logp"])):
        same(logp[0] * rollout.keep, double(out[name]) * rollout.keep, name)
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    loss = methods.method_loss(method, plan, rollout, feature, adv, methods.reduced(method, plan, rollout, theirs), None)
    same(loss, out["loss"], "loss")
    same(table_gradient(new, loss), out["grad_table_new"], "gradient")
