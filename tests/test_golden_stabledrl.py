"""Parity of the rows ``spg`` and ``stabledrl-released`` with the code of SPG and StableDRL, through the rows themselves.

What the official code does and the rows reproduce: token means over the hidden kept tokens, sequences weighted by their length
(SPG) or by detached weights that sum to 1 (StableDRL, cap 5), A = 0 in the branch of the EUBO. Each case holds one prompt, so
that the official softmax over the rows of a call is the prompt's own.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

import laws
from judged import SHIPPED
from laws import double
from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import methods
from minidrl.oracle import TabularDenoiser, table_gradient
from parity import FOLDER, cases, one_prompt, same

OMEGA = {"mix": 0.5, "eubo": 1.0, "elbo": 0.0}


def masked(rollout, masks):
    """The plan of given masks (K, G, L): what is hidden and kept is scored, weight n / (K hidden); after EOS all is hidden."""
    masks = torch.tensor(masks).bool()
    scored = masks & rollout.keep
    hidden = torch.cat([torch.zeros(*masks.shape[:2], 3).bool(), masks | ~rollout.keep], -1)
    return alg.Plan(hidden, scored, rollout.lengths.double() / (len(masks) * scored.sum(-1)), scored.any(-1))


def sandwiched(name, given):
    """The row with the case's numbers in its sandwich."""
    omega = OMEGA[given["negative_bound"]] if "negative_bound" in given else given["omega"]
    return methods.with_options(methods.METHODS[name], {"extra.omega": omega, "extra.eubo_beta": given["eubo_beta"]})


def credited(method, plan, rollout, given, out):
    """The row's advantages, which are the official ones."""
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    return adv


def bounds(method, plan, rollout, logp, adv):
    """ELBO, EUBO and score as the row's loss sees them: per token of the response."""
    scale = methods.normalizer(method, rollout)
    ll, wide = methods.reduced(method, plan, rollout, {"logp": logp}), adv[None, :, None]
    upper = alg.eubo(logp, plan, beta=method.extra.keywords["eubo_beta"]) / scale[:, None]
    score = method.extra(ll, wide, {"logp": logp}, plan, rollout, scale)["score"]
    return (value[0, :, 0] for value in (ll, upper, score))


# --------------------------------------------------------------------------------------------------------------------- SPG


@cases("spg", "spg_loss")
def test_spg_loss(case):
    """The bound of a response is handed over as the same log-probability for each of its tokens, in one state without hiding.

    Both bounds of such a state are that number, whichever branch the advantage takes.
    """
    given, out = case["inputs"], case["outputs"]
    method, (rollout, plan) = methods.METHODS["spg"], one_prompt(given["keep"])
    bound = double(given["bound_new"]).requires_grad_()
    logp = bound[:, None].expand(-1, given["L"])[None]
    adv = credited(method, plan, rollout, given, out)
    loss = methods.method_loss(method, plan, rollout, {"logp": logp}, adv, None, None)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, bound)[0], out["grad_bound_new"], "gradient")


@cases("spg", "spg_end_to_end")
def test_spg_from_the_table(case):
    """ELBO, EUBO, mixture, loss and gradients on the official masks; mix, eubo and elbo are omega 1/2, 1 and 0."""
    given, out = case["inputs"], case["outputs"]
    method = sandwiched("spg", given)
    rollout, _ = one_prompt(given["keep"], torch.tensor(given["x"]))
    plan, model = masked(rollout, given["masks"]), TabularDenoiser.from_hidden_table(double(given["table_new"]))
    logp, adv = laws.graph_logp(SHIPPED, model, rollout, plan), credited(method, plan, rollout, given, out)
    elbo, eubo, bound = bounds(method, plan, rollout, logp, adv)
    same(elbo, out["elbo"], "ELBO")
    same(eubo, out["eubo"], "EUBO")
    same((elbo + eubo) / 2, out["mix"], "mixture")
    same(bound, out["bound"], "bound")
    same(table_gradient(model, eubo.sum()), out["grad_table_of_sum_eubo"], "gradient of the EUBO")
    logp = laws.graph_logp(SHIPPED, model, rollout, plan)
    loss = methods.method_loss(method, plan, rollout, {"logp": logp}, adv, None, None)
    same(loss, out["loss"], "loss")
    same(table_gradient(model, loss), out["grad_table_new"], "gradient")


# --------------------------------------------------------------------------------------------------------------- StableDRL


def given_bound(case):
    """Row, rollout, plan and ll of a case whose ELBOs and bound are three unrelated numbers a response.

    The row's sandwich is replaced by the given bound, which no pair of ELBO and EUBO could be; everything else is the row's.
    """
    given = case["inputs"]
    rollout, plan = one_prompt([[1, 1, 1]] * given["G"])
    bound = double(given["bound_new"]).requires_grad_()
    method = methods.with_options(methods.METHODS["stabledrl-released"], {"objective.cap": given["cap"]})
    method = replace(method, extra=lambda *_: {"score": bound[None, :, None]})
    new, old = (double(given[name])[None, :, None].expand(-1, -1, 3) for name in ("elbo_new", "elbo_old"))
    return method, rollout, plan, new, methods.reduced(method, plan, rollout, {"logp": old}), bound


@cases("stabledrl", "stabledrl_loss")
def test_stabledrl_loss(case):
    """Weights capped from above only, detached, of the ELBO; the loss is their sum over the group, without 1/N.

    The case without weights (cap null) is SPG's loss, sequences weighted by their length. Shared masks or not is no question
    here: both ELBOs are given.
    """
    given, out = case["inputs"], case["outputs"]
    if given["cap"] is None:
        return test_spg_loss(case)
    method, rollout, plan, new, anchor, bound = given_bound(case)
    logp = new.clone().requires_grad_()
    adv = credited(method, plan, rollout, given, out)
    loss = methods.method_loss(method, plan, rollout, {"logp": logp}, adv, anchor, None)
    same(loss, out["loss"], "loss")
    gradient, through = torch.autograd.grad(loss, (bound, logp), allow_unused=True)
    same(gradient, out["grad_bound_new"], "gradient")
    assert through is None or not through.any(), "a gradient through the ratio"
    assert not any(out["grad_elbo_new"])
    ll = methods.reduced(method, plan, rollout, {"logp": new})
    weights = alg.self_normalized_weights(alg.log_ratio(ll, anchor), given["G"], log_cap=math.log(given["cap"]))
    same(weights[0, :, 0], out["weights"], "weights")


@cases("stabledrl", "stabledrl_end_to_end")
def test_stabledrl_from_the_table(case):
    """Official masks, the old value on masks of its own in two of three cases (``refresh`` independent): the row as it is."""
    given, out = case["inputs"], case["outputs"]
    method = methods.with_options(sandwiched("stabledrl-released", given), {"objective.cap": given["cap"]})
    rollout, _ = one_prompt(given["keep"], torch.tensor(given["x"]))
    plan, own = masked(rollout, given["masks_new"]), masked(rollout, given["masks_old"])
    new, old = (TabularDenoiser.from_hidden_table(double(given[f"table_{name}"])) for name in ("new", "old"))
    anchor = methods.reduced(method, own, rollout, feat.features(old, rollout, own, temperature=1.0))
    same(anchor[0, :, 0], out["elbo_old"], "old ELBO")
    logp, adv = laws.graph_logp(SHIPPED, new, rollout, plan), credited(method, plan, rollout, given, out)
    elbo, eubo, bound = bounds(method, plan, rollout, logp, adv)
    same(elbo, out["elbo_new"], "ELBO")
    same(eubo, out["eubo_new"], "EUBO")
    same((1 - given["omega"]) * elbo + given["omega"] * eubo, out["mix_new"], "mixture")
    same(bound, out["bound_new"], "bound")
    loss = methods.method_loss(method, plan, rollout, {"logp": logp}, adv, anchor, None)
    same(loss, out["loss"], "loss")
    same(table_gradient(new, loss), out["grad_table_new"], "gradient")


def test_the_cases_separate_what_they_should():
    """Caps that bind, shared and unshared masks, every variant of SPG, zero advantages: otherwise the tests above see less."""
    stable = {case["name"]: case for case in json.loads((FOLDER / "stabledrl.json").read_text())}
    spg = json.loads((FOLDER / "spg.json").read_text())
    assert len(stable) == 10 and len(spg) == 9
    assert {case["inputs"].get("negative_bound") for case in spg} == {None, *OMEGA}
    ends = [case["inputs"] for name, case in stable.items() if "end_to_end" in name]
    assert [given["masks_new"] == given["masks_old"] for given in ends] == [True, False, False]
    ratios = [given for case in stable.values() if "elbo_new" in (given := case["inputs"])]
    over = [
        max(a - b for a, b in zip(g["elbo_new"], g["elbo_old"], strict=True)) > torch.tensor(g["cap"]).log() for g in ratios
    ]
    assert any(over) and not all(over)


@pytest.mark.parametrize("name", ["spg", "stabledrl-released"])
def test_the_shipped_rows_have_the_published_numbers(name):
    """What the tests above replace by the numbers of a case is, in the row, what the shipped configurations say."""
    row = methods.METHODS[name]
    assert row.extra.keywords == {"eubo_beta": 1.5, "omega": 0.5}
    assert row.plan.keywords == {"num_states": 2, "block_length": 32, "p_mask": 0.15}
    assert row.objective.keywords == ({} if name == "spg" else {"cap": 5.0})
    assert row.refresh == ("paired" if name == "spg" else "independent")  # random_masking: new masks for each update
