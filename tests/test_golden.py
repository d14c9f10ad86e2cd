"""Parity with published implementations: their own numbers on small inputs, through the functions of minidrl.

The files under tests/golden/objectives hold inputs and outputs that the official code produced in float64; `source` names
repository, path and commit. Each test says which quirk of that code is part of the comparison. Error is
|a - b| / (1 + |b|), at most 1e-8.
"""

import torch

import laws
from judged import SHIPPED
from laws import double
from minidrl import algorithms as alg
from minidrl.oracle import TabularDenoiser, table_gradient
from parity import cases, one_prompt, same, sequence_rollout

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


# ------------------------------------------------------------------------------------------------ aggregation (9.1) and KL


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
    rollout = laws.rollout_of(SHIPPED, [given["x"]])
    u = (masks.sum(-1) - 0.5) / given["L"]
    with laws.noise(SHIPPED, u.double(), order_noise(masks)):
        plan = alg.elbo_count_plan(rollout, laws.seeded(), num_states=given["K"], domain="all", strata=False)
    assert torch.equal(plan.scored, masks)
    model = TabularDenoiser.from_hidden_table(double(given["table"]))
    same(laws.ll_of(SHIPPED, model, rollout, plan), [[[out["estimate"]]]], "estimate")


@cases("llada_elbo")
def test_exact_elbo_is_the_mean_of_the_plan(case):
    """Enumerated by others from the same table; here the mean over every draw of the plan, with strata and without."""
    given, out = case["inputs"], case["outputs"]
    length = given["L"]
    model = TabularDenoiser.from_hidden_table(double(given["table"]))
    u, order = laws.count_noise(length, length, 2)
    rollout = laws.rollout_of(SHIPPED, [given["x"]] * u.shape[1])
    with laws.noise(SHIPPED, u, order):
        plan = alg.elbo_count_plan(rollout, laws.seeded(), num_states=2, domain="all", strata=True)
    same(laws.ll_of(SHIPPED, model, rollout, plan).mean(), out["exact_elbo"], "ELBO")
    same(sum(out["mean_logp_by_count"]), out["exact_elbo"], "the file agrees with itself")


@cases("espo", "espo_end_to_end")
def test_complementary_estimate(case):
    """The plan (2.4) on the official masks: counts 0 .. L, weights (L+1)/l and (L+1)/(L-l), half the sum.

    The official code scores all L positions, padding after EOS included: domain all.
    """
    given, out = case["inputs"], case["outputs"]
    masks, complement = (torch.tensor(given[name]).bool() for name in ("masks", "masks_complement"))
    rollout = laws.rollout_of(SHIPPED, given["x"], num_generations=given["G"])
    u = (masks.sum(-1) + 0.5) / (given["L"] + 1)
    with laws.noise(SHIPPED, u.double(), order_noise(masks)):
        plan = alg.complementary_plan(rollout, laws.seeded(), num_states=2 * given["K"], domain="all")
    assert torch.equal(plan.scored[0::2], masks) and torch.equal(plan.scored[1::2], complement)
    for name in ("new", "old"):
        model = TabularDenoiser.from_hidden_table(double(given[f"table_{name}"]))
        same(laws.ll_of(SHIPPED, model, rollout, plan)[0, :, 0], out[f"seq_logp_{name}"], name)
    model = TabularDenoiser.from_hidden_table(double(given["table_new"]))
    ll = alg.reduce_logp(laws.graph_logp(SHIPPED, model, rollout, plan), plan, level="sequence", normalizer=None)
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
    loss = alg.ppo_clip(new / length, old / length, adv, rows, **clip).loss[None, :, None]
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
