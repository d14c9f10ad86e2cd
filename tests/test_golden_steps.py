"""Parity with the released code of EGSPO (chosen steps, stepwise credit) and of d2 (merged steps)."""

import dataclasses
import itertools
from functools import partial

import torch

import laws
from judged import SHIPPED
from laws import double
from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import methods
from minidrl.oracle import TabularDenoiser, table_gradient
from parity import cases, same


def released(given, states=1, name="egspo-released"):
    """The row with a case's numbers; ``agg`` mean: weight 1/K instead of 1/(K tokens), of features as `shared` gives them."""
    options = {
        "plan.num_states": states,
        "plan.weight": "token_mean" if given["agg"] == "sum" else "mean",
        "objective.epsilon_low": given["clip_low"],
        "objective.epsilon_high": given["clip_high"],
        "kl.beta": given["beta"],
    }
    return methods.with_options(methods.METHODS[name], options)


def shared(given, plan, feature):
    """``agg`` mean: no row divides ll by the step's tokens; each token then has its share of the mean over them."""
    tokens = 1 if given["agg"] == "sum" else plan.scored.sum(-1, keepdim=True).clamp(min=1)
    return {name: value / tokens for name, value in feature.items()}


def walked(unmask_step, chosen, response=None, **given):
    """A rollout with these steps whose entropies rank the chosen steps (B, K) first, in this order."""
    unmask_step, chosen = torch.tensor(unmask_step), torch.tensor(chosen)
    rank = (unmask_step[:, None] == chosen[..., None]) * torch.arange(chosen.shape[1], 0, -1)[:, None]
    tokens = int((unmask_step[0] == 0).sum())
    entropy = rank.sum(1).double() / tokens
    response = torch.zeros_like(unmask_step) if response is None else torch.tensor(response)
    fields = {"unmask_step": unmask_step, "records": {"entropy": entropy}, "num_generations": len(response)}
    return laws.rollout_of(SHIPPED, response, **{**fields, **given})


@cases("egspo", "egspo_loss")
def test_egspo_loss(case):
    """One chosen step a sequence, given as the aggregate over its tokens: loss and gradient, KL term included.

    A sum over n tokens is divided by n in the loss, its KL as well; a mean over them is not.
    """
    given, out = case["inputs"], case["outputs"]
    n, rows, method = given["n_tokens_per_step"], given["G"], released(given)
    rollout = walked([[0] * n] * rows, [[0]] * rows)
    plan = method.plan(rollout, laws.seeded())
    tokens = lambda values: {"logp": (values / n)[None, :, None].expand(1, rows, n)}  # noqa: E731
    new = double(given["step_logp_new"]).requires_grad_()
    anchor, ref = (
        methods.reduced(method, plan, rollout, tokens(double(given[f"step_logp_{name}"]))) for name in ("old", "ref")
    )
    loss = methods.method_loss(method, plan, rollout, tokens(new), double(given["adv"]), anchor, ref)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, new)[0], out["grad_step_logp_new"], "gradient")


@cases("egspo", "egspo_advantages")
def test_stepwise_advantages(case):
    """Centred over the group rank by rank, itself included, no standard deviation; ``standard_grpo_returns``: center reward."""
    given, out = case["inputs"], case["outputs"]
    options = {
        "plan.num_states": given["K"],
        "credit.lam": given["lam"],
        "credit.normalize": given["normalize"],
        "credit.center": "reward" if given["standard_grpo_returns"] else "rank",
    }
    method = methods.with_options(methods.METHODS["egspo-sa-released"], options)
    steps = list(range(given["K"]))
    rollout = walked([steps] * given["G"], [steps] * given["G"])
    plan = method.plan(rollout, laws.seeded())
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]), double(given["step_rewards"]).T)
    same(adv.T, out["adv"], "adv")
    if given["lam"] == 0:
        plain = methods.advantages(methods.METHODS["egspo-released"], plan, rollout, double(given["rewards"]))
        same(plain[:, None].expand(-1, given["K"]), out["adv"], "adv of egspo-released")


def network_of(logits):
    """A denoiser with these logits (T, n, V) for the tokens of step t, in the state before it; and when each appears."""
    steps, n, vocab = logits.shape
    table = torch.zeros(2 ** (steps * n), steps * n, vocab, dtype=torch.float64)
    for t in range(steps):
        table[sum(2**i for i in range(t * n, steps * n)), t * n : (t + 1) * n] = logits[t]
    return TabularDenoiser.from_hidden_table(table), [t for t in range(steps) for _ in range(n)]


@cases("egspo", "egspo_selection")
def test_selection(case):
    """Entropies of the revealed tokens and the K steps they choose.

    The released code takes log(p + 1e-8), which lowers an entropy by V 1e-8 to first order, and the mean over the step's
    tokens where the plan takes the sum: the same choice, because every step reveals n tokens.
    """
    given, out = case["inputs"], case["outputs"]
    n, total = given["n_tokens_per_step"], given["T"]
    for b, logits in enumerate(double(given["logits"])):
        model, steps = network_of(logits)
        rollout = laws.rollout_of(SHIPPED, [[0] * len(steps)], unmask_step=torch.tensor([steps]))
        every = alg.replay_plan(rollout, laws.seeded(), num_states=None, min_entropy=0.0)
        entropy = feat.features(model, rollout, every, temperature=1.0, names=("entropy",))["entropy"].sum(0)
        mean = alg._step_entropy(dataclasses.replace(rollout, records={"entropy": entropy}), total)[:, 0] / n
        same(mean - given["V"] * 1e-8, out["entropy"][b], "entropy")
        rollout = dataclasses.replace(rollout, records={"entropy": entropy})
        row = methods.with_options(methods.METHODS["egspo-released"], {"plan.num_states": given["K"]})
        assert row.plan(rollout, laws.seeded()).step[:, 0].tolist() == out["steps"][b]


@cases("egspo", "egspo_end_to_end")
def test_egspo_from_the_table(case):
    """From the network on, rank by rank and all ranks together: the released code's K losses are averaged.

    States, step log-probabilities, loss and gradient; k3 on the aggregate, or the exact KL over the vocabulary.
    """
    given, out = case["inputs"], case["outputs"]
    new, old, ref = (TabularDenoiser.from_hidden_table(double(given[f"table_{name}"])) for name in ("new", "old", "ref"))
    chosen = torch.tensor(given["steps"])
    parts = [slice(k, k + 1) for k in range(given["K"])] + [slice(None)]
    losses, gradients = out["loss_per_rank"], double(out["grad_table_new_per_rank"])
    for ranks in parts:
        method = released(given, states=len(range(given["K"])[ranks]))
        if given["kl"] == "exact":
            method = dataclasses.replace(method, kl=methods.KL("exact", given["beta"]), features=("logp", "kl_ref"))
        rollout = walked(given["unmask_step"], chosen[:, ranks].tolist(), given["x"])
        plan = method.plan(rollout, laws.seeded())
        assert plan.step.T.tolist() == chosen[:, ranks].tolist(), "steps"
        for k, b in itertools.product(range(len(plan.step)), range(given["G"])):
            assert plan.hidden[k, b, 3:].tolist() == [bool(h) for h in given["hidden_states"][plan.step[k, b]][b]]
        feature = laws.features_of(SHIPPED, dataclasses.replace(method, features=("logp",)), new, rollout, plan, graph=True)
        if given["kl"] == "exact":
            states = torch.arange(plan.scored.shape[0] * given["G"])
            more = feat.state_features(new, rollout, plan, states, temperature=1.0, names=("kl_ref",), reference=ref)
            feature["kl_ref"] = more["kl_ref"].unflatten(0, plan.scored.shape[:2])
        feature = shared(given, plan, feature)
        anchor, target = (
            methods.reduced(method, plan, rollout, shared(given, plan, feat.features(model, rollout, plan, temperature=1.0)))
            for model in (old, ref)
        )
        for name, value in (("new", methods.reduced(method, plan, rollout, feature)), ("old", anchor), ("ref", target)):
            same(value[..., 0], out[f"step_logp_{name}"][ranks], name)
        adv = double(given["adv"]).T[ranks]
        loss = methods.method_loss(method, plan, rollout, feature, adv, anchor, target)
        same(loss, sum(losses[ranks]) / len(losses[ranks]), "loss")
        same(table_gradient(new, loss), gradients[ranks].mean(0), "gradient")


@cases("d2_stepmerge")
def test_step_merge(case):
    """The row of d1's released code on merged states: one state a segment of T/N steps, and the sum of the segments' losses.

    The released code draws one segment and multiplies its loss by N; the row's loss is the mean of these over the segments.
    It scores kept tokens only, where the plan scores all that a segment revealed: padding after EOS leaves the plan here.
    """
    given, out = case["inputs"], case["outputs"]
    steps = 1 + max(max(row) for row in given["unmask_step"])
    merge = steps // given["N"]
    options = {"objective.epsilon_low": given["clip"], "objective.epsilon_high": given["clip"], "kl.beta": given["beta"]}
    method = dataclasses.replace(
        methods.with_options(methods.METHODS["diffu-grpo-released"], options), plan=partial(alg.merged_plan, merge=merge)
    )
    keep = torch.tensor(given["keep"]).bool()
    rollout = laws.rollout_of(
        SHIPPED, given["x"], keep, unmask_step=torch.tensor(given["unmask_step"]), num_generations=given["G"]
    )
    plan = method.plan(rollout, laws.seeded())
    for k, b in itertools.product(range(given["N"]), range(given["G"])):
        inside = [s == k for s in given["segment"][b]] if plan.valid[k, b] else [False] * given["L"]
        assert plan.scored[k, b].tolist() == inside, "segment"
    plan = dataclasses.replace(plan, scored=plan.scored & keep)
    new, old, ref = (TabularDenoiser.from_hidden_table(double(given[f"table_{name}"])) for name in ("new", "old", "ref"))
    feature = {"logp": laws.graph_logp(SHIPPED, new, rollout, plan)}
    anchor, target = (feat.features(model, rollout, plan, temperature=1.0)["logp"] for model in (old, ref))
    for name, value in (("new", feature["logp"]), ("old", anchor), ("ref", target)):
        same(value.sum(0) * keep, double(out[f"logp_{name}"]) * keep, name)
    adv = methods.advantages(method, plan, rollout, double(given["rewards"]))
    same(adv, out["adv"], "adv")
    loss_on = lambda part: methods.method_loss(method, part, rollout, feature, adv, anchor, target)  # noqa: E731
    for k in range(given["N"]):
        alone = dataclasses.replace(plan, scored=plan.scored & (torch.arange(given["N"]) == k)[:, None, None])
        same(given["N"] * loss_on(alone), out["loss_per_segment"][k], f"segment {k}")
        gradient = table_gradient(new, given["N"] * loss_on(alone))
        same(gradient, out["grad_table_new_per_segment"][k], f"segment {k}: gradient")
    same(loss_on(plan), sum(out["loss_per_segment"]) / given["N"], "loss")
