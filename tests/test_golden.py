"""Parity with published implementations: their own numbers on small inputs, through the functions of minidrl.

The files under tests/golden/objectives hold inputs and outputs that the official code produced in float64; `source` names
repository, path and commit. Each test says which quirk of that code is part of the comparison. Error is
|a - b| / (1 + |b|), at most 1e-8.
"""

import json
import math
from pathlib import Path

import pytest
import torch

import laws
from laws import double
from minidrl import algorithms as alg
from minidrl.oracle import TabularDenoiser, table_gradient

FOLDER = Path(__file__).parent / "golden" / "objectives"


def cases(family, start=""):
    """The cases of a file whose name begins with `start`, as parameters with readable ids."""
    found = [case for case in json.loads((FOLDER / f"{family}.json").read_text()) if case["name"].startswith(start)]
    assert found, f"{family}: no case {start}"
    return pytest.mark.parametrize("case", found, ids=lambda case: case["name"])


def same(got, expected, what="value"):
    got, expected = double(got).detach(), double(expected)
    assert got.shape == expected.shape, what
    error = ((got - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= 1e-8, f"{what}: error {error:.3g}"


def one_prompt(keep, response=None):
    """A rollout with the rows of one prompt, and the plan that scores the kept tokens with everything hidden."""
    keep = torch.tensor(keep).bool()
    responses = torch.zeros(keep.shape, dtype=torch.long) if response is None else response
    rollout = laws.rollout_of(alg, responses, keep, num_generations=len(keep))
    return rollout, alg.mean_field_plan(rollout, laws.seeded(), p_mask_prompt=0.0)


def sequence_rollout(rows, length):
    """Rows without padding, for losses on one number per sequence."""
    return one_prompt([[1] * length] * rows)


# ------------------------------------------------------------------------------------------------- advantages (6.1) - (6.3)


@cases("advantages")
def test_advantages(case):
    """Statistics per prompt, standard deviations with n - 1; the official constants are added to the deviation."""
    n, out = case["inputs"]["G"], case["outputs"]
    flat = double(case["inputs"]["rewards"]).flatten()
    deviation = (alg.leave_one_out(flat, n) / (n / (n - 1))).unflatten(0, (-1, n)).square().sum(1).div(n - 1).sqrt() + 1e-4
    for name, got in {
        "mean_centred": alg.group_mean(flat, n),
        "verl_mean_centred": alg.group_mean(flat, n),
        "leave_one_out": alg.leave_one_out(flat, n),
        "verl_rloo": alg.leave_one_out(flat, n),
        "z_score_1em6": alg.group_z_score(flat, n, ddof=1, eps=1e-6),
        "leave_one_out_over_std_1em4": alg.leave_one_out(flat, n) / deviation.repeat_interleave(n),
    }.items():
        same(got.unflatten(0, (-1, n)), out[name], name)
    scaled = n / (n - 1) * alg.group_z_score(flat, n, ddof=1, eps=1e-4)
    same(scaled.unflatten(0, (-1, n)), out["leave_one_out_over_std_1em4"], "leave-one-out over std is a scaled z-score")


# ---------------------------------------------------------------------------------------------- ratios and clips (8.2), KL


@cases("token_family", "gspo")
def test_gspo(case):
    """GSPO = sequence reduction, normaliser kept_length, clip (8.2), one mean over the sequences.

    The official code spreads the same loss over the tokens with a stop-gradient trick and averages back: no difference.
    """
    given, out = case["inputs"], case["outputs"]
    rollout, plan = one_prompt(given["keep"])
    logp = double(given["logp_new"]).requires_grad_()
    lengths = rollout.lengths.double()
    ll, anchor = (
        alg.reduce_logp(x[None], plan, level="sequence", normalizer=lengths) for x in (logp, double(given["logp_old"]))
    )
    adv = double(given["adv"])[None, :, None]
    clip = {"epsilon_low": given["clip_low"], "epsilon_high": given["clip_high"]}
    loss = alg.ppo_clip(ll, anchor, adv, len(lengths), **clip)
    loss = alg.aggregate(loss, plan, rollout, level="sequence", how="sequence_mean")
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, logp)[0], out["grad_logp_new"], "gradient")


@cases("token_family", "vanilla")
def test_token_clip(case):
    """Token ratios, token mean. The official loss is dual-clip: with adv < 0 it is capped at -3 adv, with gradient 0.

    So the two differ at the kept tokens with adv < 0 and ratio > 3, by -adv (ratio - 3) each, and nowhere else.
    """
    given, out = case["inputs"], case["outputs"]
    rollout, plan = one_prompt(given["keep"])
    logp, old = double(given["logp_new"]).requires_grad_(), double(given["logp_old"])
    adv = double(given["adv"])[:, None].expand_as(old)
    clip = {"epsilon_low": given["clip_low"], "epsilon_high": given["clip_high"]}
    loss = alg.ppo_clip(logp[None], old[None], adv[None], len(adv), **clip)
    loss = alg.aggregate(loss, plan, rollout, level="token", how="token_mean")
    (gradient,) = torch.autograd.grad(loss, logp)
    ratio = (logp.detach() - old).exp()
    beyond = rollout.keep & (adv < 0) & (ratio > given["dual_clip"])
    tokens = sum(map(sum, given["keep"]))
    passed = (-adv * (ratio - given["dual_clip"]))[beyond].sum() / tokens
    same(loss - passed, out["loss"], "loss")
    same(torch.where(beyond, gradient + adv * ratio / tokens, gradient), out["grad_logp_new"], "gradient")


def test_dual_clip_separates_some_of_these_cases():
    """Otherwise the test above would not see the bypass of (8.2)."""
    found = [case for case in json.loads((FOLDER / "token_family.json").read_text()) if case["name"].startswith("vanilla")]
    reached = []
    for case in found:
        given = case["inputs"]
        ratio = (double(given["logp_new"]) - double(given["logp_old"])).exp()
        low = double(given["adv"])[:, None] < 0
        reached.append(bool((double(given["keep"]).bool() & low & (ratio > given["dual_clip"])).any()))
    assert any(reached) and not all(reached)


@cases("token_family", "aggregation")
def test_aggregation(case):
    """Four of the five modes of (9.1). The official token mean per sequence adds 1e-8 to the length."""
    given, out = case["inputs"], case["outputs"]
    rollout, plan = one_prompt(given["keep"])
    names = {
        "token_mean": "token_mean",
        "seq_mean_token_sum": "sequence_mean",
        "seq_mean_token_sum_norm": "fixed_length",
        "seq_mean_token_mean": "sequence_mean_token_mean",
    }
    for official, how in names.items():
        loss = double(given["loss_matrix"])[None]
        same(alg.aggregate(loss, plan, rollout, level="token", how=how), out[official], how)


@cases("token_family", "kl")
def test_kl(case):
    """Values and gradients of k1, k2 and k3. The official k3 is clamped to [-10, 10]: one input exceeds it, with gradient 0."""
    given, out = case["inputs"], case["outputs"]
    for form in ("k1", "k2", "k3"):
        logp = double(given["logp"]).requires_grad_()
        value = alg.kl_term(logp, double(given["logp_ref"]), form=form)
        value = value.clamp(-10, 10) if form == "k3" else value
        same(value, out[form], form)
        same(torch.autograd.grad(value.sum(), logp)[0], out[f"grad_sum_{form}"], f"{form}: gradient")


@cases("espo", "espo_kl")
def test_kl_of_espo(case):
    """k2 and k3 agree. The official k1 carries a score term: its gradient is 1 + d, that of the penalty is 1."""
    given, out = case["inputs"], case["outputs"]
    for form in ("k1", "k2", "k3"):
        logp = double(given["logp"]).requires_grad_()
        value = alg.kl_term(logp, double(given["logp_ref"]), form=form)
        extra = value.detach() if form == "k1" else torch.zeros_like(value)
        same(value, out[form], form)
        same(torch.autograd.grad(value.sum(), logp)[0] + extra, out[f"grad_sum_{form}"], f"{form}: gradient")


# -------------------------------------------------------------------------------------------------- diffu-GRPO: d1's release


def d1_method(given):
    """The row with the release's token mean over the micro-batch, where the paper (and the row) take 1/|o| per sequence."""
    options = {
        "aggregation": "token_mean",
        "objective.epsilon_low": given["clip"],
        "objective.epsilon_high": given["clip"],
        "kl.beta": given["beta"],
    }
    return alg.with_options(alg.METHODS["diffu-grpo"], options)


@cases("d1", "d1_loss")
def test_diffu_grpo(case):
    """Loss and gradient; token mean over the micro-batch (the release); the k3 term is inside that mean."""
    given, out = case["inputs"], case["outputs"]
    method = d1_method(given)
    rollout, plan = one_prompt(given["keep"])
    logp = double(given["logp_new"]).requires_grad_()
    anchor, ref = (alg.reduced(method, plan, rollout, double(given[name])[None]) for name in ("logp_old", "logp_ref"))
    adv = method.credit(double(given["rewards"]), rollout.num_generations)
    same(adv, out["adv"], "adv")
    loss = alg.method_loss(method, plan, rollout, {"logp": logp[None]}, adv, anchor, ref)
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
    logp = laws.graph_logp(alg, new, rollout, plan)
    anchor = alg.features(old, rollout, plan, temperature=1.0)["logp"]
    same(logp[0] * rollout.keep, double(out["logp_new"]) * rollout.keep, "logp_new")
    same(anchor[0] * rollout.keep, double(out["logp_old"]) * rollout.keep, "logp_old")
    adv = method.credit(double(given["rewards"]), rollout.num_generations)
    loss = alg.method_loss(method, plan, rollout, {"logp": logp}, adv, alg.reduced(method, plan, rollout, anchor), None)
    same(loss, out["loss"], "loss")
    same(table_gradient(new, loss), out["grad_table_new"], "gradient")


# --------------------------------------------------------------------------------------------------------------- StableDRL


def stable_cases():
    """All cases with self-normalised weights (one switches them off)."""
    found = json.loads((FOLDER / "stabledrl.json").read_text())
    return [case for case in found if case["inputs"]["cap"] is not None]


@pytest.mark.parametrize("case", stable_cases(), ids=lambda case: case["name"])
def test_self_normalized_weights(case):
    """The release caps the ratio at 5 (the paper's 1 + eps would be 6), clips no side from below, detaches everything."""
    given, out = case["inputs"], case["outputs"]
    source = given if "elbo_new" in given else out
    change = double(source["elbo_new"]) - double(source["elbo_old"])
    weights = alg.self_normalized_weights(change[None, :, None], len(change), log_cap=math.log(given["cap"]))
    same(weights[0, :, 0], out["weights"], "weights")
    same(alg.group_mean(double(given["rewards"]), len(change)), out["adv"], "adv")


@cases("stabledrl", "stabledrl_loss")
def test_self_normalized_loss(case):
    """The official loss weighs another bound than the one in its ratio; where both are the ELBO it is (8.4) exactly.

    `bound_new` stands for that other bound: -w adv bound, summed over the group, is reinforce times the weights.
    """
    given, out = case["inputs"], case["outputs"]
    if given["cap"] is None:
        return plain_loss(given, out)
    rows = len(given["elbo_new"])
    rollout, plan = sequence_rollout(rows, 3)
    new, old, bound = (double(given[name])[None, :, None] for name in ("elbo_new", "elbo_old", "bound_new"))
    adv = alg.group_mean(double(given["rewards"]), rows)[None, :, None]
    weights = alg.self_normalized_weights(new - old, rows, log_cap=math.log(given["cap"]))
    bound.requires_grad_()
    loss = weights * alg.reinforce(bound, None, adv, rows)
    loss = alg.aggregate(loss, plan, rollout, level="sequence", how="group_sum")
    same(loss, out["loss"], "loss")
    gradient = torch.autograd.grad(loss, bound)[0]
    same(gradient[0, :, 0], out["grad_bound_new"], "gradient")
    new.requires_grad_()
    own = alg.aggregate(
        alg.self_normalized_clip(new, old, adv, rows, cap=given["cap"]), plan, rollout, level="sequence", how="group_sum"
    )
    same(torch.autograd.grad(own, new)[0], gradient, "the shipped objective has the same coefficients")


def plain_loss(given, out):
    """Weights off: every sequence counts with its kept length, so this is the token mean of length times -adv bound."""
    rollout, plan = one_prompt(given["keep"])
    bound = double(given["bound_new"]).requires_grad_()
    adv = alg.group_mean(double(given["rewards"]), len(bound))
    loss = rollout.lengths * alg.reinforce(bound, None, adv, len(bound))
    loss = alg.aggregate(loss[None, :, None], plan, rollout, level="sequence", how="token_mean")
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, bound)[0], out["grad_bound_new"], "gradient")


# --------------------------------------------------------------------------------------------------- the ELBO, both forms


def order_noise(masks):
    """Noise that makes the hidden positions of every mask the ones of lowest rank."""
    return torch.where(masks, 0.25, 0.75) + torch.arange(masks.shape[-1], dtype=torch.float64) / 100


@cases("llada_elbo")
def test_elbo_of_the_official_masks(case):
    """The plan (2.3), made to hide what the official code hid, gives its estimate: weights n / (K count).

    The official counts come from a rounded, evenly spaced sequence; they are an input here, not part of the comparison.
    """
    given, out = case["inputs"], case["outputs"]
    masks = torch.tensor(given["masks"]).bool()[:, None]
    rollout = laws.rollout_of(alg, [given["x"]])
    u = (masks.sum(-1) - 0.5) / given["L"]
    with laws.noise(alg, u.double(), order_noise(masks)):
        plan = alg.elbo_count_plan(rollout, laws.seeded(), num_states=given["K"], domain="all", strata=False)
    assert torch.equal(plan.scored, masks)
    model = TabularDenoiser.from_hidden_table(double(given["table"]))
    same(laws.ll_of(alg, model, rollout, plan), [[[out["estimate"]]]], "estimate")


@cases("llada_elbo")
def test_exact_elbo_is_the_mean_of_the_plan(case):
    """Enumerated by others from the same table; here the mean over every draw of the plan, with strata and without."""
    given, out = case["inputs"], case["outputs"]
    length = given["L"]
    model = TabularDenoiser.from_hidden_table(double(given["table"]))
    u, order = laws.count_noise(length, length, 2)
    rollout = laws.rollout_of(alg, [given["x"]] * u.shape[1])
    with laws.noise(alg, u, order):
        plan = alg.elbo_count_plan(rollout, laws.seeded(), num_states=2, domain="all", strata=True)
    same(laws.ll_of(alg, model, rollout, plan).mean(), out["exact_elbo"], "ELBO")
    same(sum(out["mean_logp_by_count"]), out["exact_elbo"], "the file agrees with itself")


@cases("espo", "espo_end_to_end")
def test_complementary_estimate(case):
    """The plan (2.4) on the official masks: counts 0 .. L, weights (L+1)/l and (L+1)/(L-l), half the sum.

    The official code scores all L positions, padding after EOS included: domain all.
    """
    given, out = case["inputs"], case["outputs"]
    masks, complement = (torch.tensor(given[name]).bool() for name in ("masks", "masks_complement"))
    rollout = laws.rollout_of(alg, given["x"], num_generations=given["G"])
    u = (masks.sum(-1) + 0.5) / (given["L"] + 1)
    with laws.noise(alg, u.double(), order_noise(masks)):
        plan = alg.complementary_plan(rollout, laws.seeded(), num_states=2 * given["K"], domain="all")
    assert torch.equal(plan.scored[0::2], masks) and torch.equal(plan.scored[1::2], complement)
    for name in ("new", "old"):
        model = TabularDenoiser.from_hidden_table(double(given[f"table_{name}"]))
        same(laws.ll_of(alg, model, rollout, plan)[0, :, 0], out[f"seq_logp_{name}"], name)
    model = TabularDenoiser.from_hidden_table(double(given["table_new"]))
    ll = alg.reduce_logp(laws.graph_logp(alg, model, rollout, plan), plan, level="sequence", normalizer=None)
    same(table_gradient(model, ll.sum()), out["grad_table_of_sum_estimate"], "gradient of the estimate")
    loss = espo_loss(ll[0, :, 0], double(out["seq_logp_old"]), given, out)
    same(table_gradient(model, loss), out["grad_table_new"], "gradient of the loss")


def espo_loss(new, old, given, out):
    """Leave-one-out credit, ratio exponent 1/L with the padded L, and k2 of the un-normalised ll divided by L."""
    rows, length = given["G"], given["L"]
    rollout, plan = sequence_rollout(rows, length)
    adv = alg.leave_one_out(double(given["rewards"]), rows)
    same(adv, out["adv"], "adv")
    clip = {"epsilon_low": given["clip_low"], "epsilon_high": given["clip_high"]}
    loss = alg.ppo_clip(new / length, old / length, adv, rows, **clip)[None, :, None]
    penalty = alg.kl_term(new, double(given["seq_logp_ref"]), form="k2")[None, :, None]
    loss = alg.aggregate(loss, plan, rollout, level="sequence", how="sequence_mean")
    return loss + given["beta"] * alg.aggregate(penalty, plan, rollout, level="sequence", how="fixed_length")


@cases("espo", "espo_loss")
def test_espo_loss(case):
    """One ratio a sequence; composed of the shipped parts, because no row of the table makes these choices."""
    given, out = case["inputs"], case["outputs"]
    new = double(given["seq_logp_new"]).requires_grad_()
    loss = espo_loss(new, double(given["seq_logp_old"]), given, out)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, new)[0], out["grad_seq_logp_new"], "gradient")
