"""Laws of the features, section 4, and of the two backward passes that make them a gradient."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    KEEPS,
    MODEL,
    RESPONSE,
    Watched,
    close,
    experience,
    graph_features,
    likeliest,
    normal,
    positions,
    refuses,
    rollout_of,
    seeded,
    tabular,
)
from minidrl import oracle


@judges()
@rejects("", ("return self.keep.sum(-1)", "return self.keep.sum(-1) - 1"), where="Rollout.lengths")
@rejects("", ("self.needed.sum", "self.valid.sum"), where="Plan.network_calls")
@rejects("", ("(self.valid & self.scored.any(-1)", "self.scored.any(-1"), where="Plan.needed")
def law_lengths_and_calls(alg: Any) -> None:
    """A response counts its kept tokens; a plan calls the network for valid states that score something."""
    rollout = rollout_of(alg, [[1, 2, 0], [2, 2, 2]], [[1, 1, 0], [1, 0, 0]])
    close(rollout.lengths, [2, 1])
    scored = torch.tensor([[[1, 0, 0], [1, 1, 0]], [[0, 0, 0], [0, 1, 0]]]).bool()
    valid = torch.tensor([[True, True], [True, False]])
    plan = alg.Plan(torch.ones(2, 2, 6, dtype=torch.bool), scored, torch.ones(2, 2), valid)
    assert plan.network_calls == 2
    assert [chunk.tolist() for chunk in alg.state_chunks(plan, 1)] == [[0], [1]]
    assert [chunk.tolist() for chunk in alg.state_chunks(plan, 5)] == [[0, 1]]


def mixed_batch(alg: Any) -> tuple[oracle.TabularDenoiser, Any, Any]:
    """A model, and a batch of different responses, lengths and masks."""
    model = tabular(*MODEL)
    responses = [list(RESPONSE), [2, 2, 0, 0], [0, 1, 2, 1]]
    rollout = rollout_of(alg, responses, KEEPS, prompt=torch.tensor([[0, 1, 2], [2, 2, 1], [1, 0, 0]]))
    hidden = torch.rand(4, 3, 7, generator=seeded(12)) < 0.6
    scored = hidden[..., 3:] & (torch.rand(4, 3, 4, generator=seeded(13)) < 0.8)
    plan = alg.Plan(hidden, scored, torch.ones(4, 3, dtype=torch.float64), scored.any(-1))
    assert not plan.valid.all(), "the fixture has no empty state"
    return model, rollout, plan


@judges("4.1")
@rejects(
    "4.1", ("torch.ones_like(rollout.keep)", "rollout.keep"), ("masked_fill(plan", "masked_fill(~plan"), where="plan_inputs"
)
def law_network_inputs(alg: Any) -> None:
    """[MASK] stands exactly where a position is hidden, the prompt's included, and only padding of the prompt is not
    attended.
    """
    _, rollout, plan = mixed_batch(alg)
    states = torch.tensor([5, 0, 11, 7])
    tokens, attention = alg.plan_inputs(rollout, plan, states, 9)
    for row, number in enumerate(states.tolist()):
        k, b = divmod(number, 3)
        text = rollout.prompt[b].tolist() + rollout.response[b].tolist()
        hidden = plan.hidden[k, b].tolist()
        assert tokens[row].tolist() == [9 if h else token for h, token in zip(hidden, text, strict=True)]
        assert attention[row].tolist() == [False, True, True, True, True, True, True]


@judges("4.1")
@rejects("4.1", ("prompt.shape[1] :]", "prompt.shape[1] - 1 : -1]"), where="_encode")
def law_features_are_those_of_the_model(alg: Any) -> None:
    """logp and entropy of every scored position equal the oracle's at any temperature, and are 0 elsewhere."""
    model, rollout, plan = mixed_batch(alg)
    for temperature in (1.0, 0.6):
        got = alg.features(model, rollout, plan, temperature=temperature, names=("logp", "entropy"))
        for k, b in itertools.product(range(4), range(3)):
            response, hidden = tuple(rollout.response[b].tolist()), positions(plan.hidden[k, b, 3:])
            logp = oracle.token_logp(model, response, hidden, temperature)
            state = tuple(model.mask_token_id if i in hidden else token for i, token in enumerate(response))
            p = (model.logits_at(state) / temperature).softmax(-1)
            scored = positions(plan.scored[k, b])
            close(got["logp"][k, b], [logp[i].item() if i in scored else 0.0 for i in range(4)], "logp")
            entropy = [-sum(v * math.log(v) for v in p[i].tolist()) if i in scored else 0.0 for i in range(4)]
            close(got["entropy"][k, b], entropy, "entropy")


def refuses_a_loss_that_is_no_number(backward: Callable, model: Any, rollout: Any, plan: Any) -> None:
    """A loss that is infinite or nan raises FloatingPointError before anything is added to the gradient."""
    for bad in (math.inf, math.nan):
        try:
            backward(model, rollout, plan, lambda f, bad=bad: f["logp"].sum() * bad, temperature=0.7)
        except FloatingPointError:
            assert model.table.grad is None, f"{bad}: before anything is added to the gradient"
        else:
            raise AssertionError(f"a loss of {bad} is not refused")


@judges("4.1")
@rejects("", (".any(2) for c in", ".all(2) for c in"), (".values()]).any(0)", ".values()]).all(0)"), where="second_pass")
@rejects(
    "",
    ("zip(leaves, grads, strict", "zip(leaves, grads[::-1], strict"),
    (".requires_grad_", ".square().requires_grad_"),
    where="cotangents",
)
@rejects("", ("if feature is None:", "if True:"), ("    _check_finite(loss)\n", ""), where="two_pass_backward")
@rejects("", ("if not torch.isfinite(loss):", "if torch.isnan(loss):"), where="_check_finite")
@rejects("", ("if module.training and p:", "if p:"), where="refuse_random_modules")
def law_two_pass_backward(alg: Any) -> None:
    """The gradient is that of one graph, at the features of pass 1 or at those given in its place; the report is true."""
    _, rollout, plan = mixed_batch(alg)
    model, reference = (oracle.TabularDenoiser.random(4, 3, seeded(seed)) for seed in (91, 92))
    names = ("logp", "entropy", "kl_ref")
    how = {"temperature": 0.7, "names": names, "reference": reference}
    c = normal(3, *plan.scored.shape, seed=93)
    needed = plan.valid & plan.scored.any(-1)
    k, b = needed.nonzero()[2].tolist()
    c[:, k, b], needed[k, b] = 0, False  # a state in which the loss has no slope
    c[1:, *needed.nonzero()[3].tolist()] = 0  # one in which it has a slope in logp only

    def loss(feature: dict) -> Tensor:
        x, y, z = (c[i] * feature[name] for i, name in enumerate(names))
        return (0.3 * x + y).sum((0, 2)).exp().sum() + (x * z).sum() + feature["logp"].detach().sum()

    graph = graph_features(alg, model, rollout, plan, **how)
    for size in (1, 256):
        found = alg.two_pass_backward(model, rollout, plan, loss, size=size, **how)
        close(found.loss, loss(graph), "loss")
        assert not found.loss.requires_grad, "the loss is a number"
        close(model.table.grad, oracle.table_gradient(model, loss(graph)), f"gradient, {size} states at a time")
        assert found.calls == 2 * int(needed.sum()), f"{found.calls} calls, the reference's included"
        for name in names:
            close(found.seen[name], graph[name] * needed[..., None], f"seen: {name}")
        model.zero_grad()
    alone = alg.two_pass_backward(model, rollout, plan, lambda f: (c[0] * f["logp"]).sum().exp(), temperature=0.7)
    assert alone.calls == int(needed.sum()), "calls without a reference"
    model.zero_grad()

    leaves = {name: (value.detach() + 0.1).requires_grad_() for name, value in graph.items()}
    slopes = torch.autograd.grad(loss(leaves), list(leaves.values()))
    truth = oracle.table_gradient(model, sum((g * graph[name]).sum() for name, g in zip(leaves, slopes, strict=True)))
    watched = Watched(model)
    found = alg.two_pass_backward(watched, rollout, plan, loss, feature=leaves, **how)
    assert sum(watched.sequences) == int(needed.sum()), f"{watched.sequences} sequences, where pass 1 is given"
    close(found.loss, loss(leaves), "loss at what is given")
    close(model.table.grad, truth, "gradient at what is given")
    model.zero_grad()

    refuses_a_loss_that_is_no_number(alg.two_pass_backward, model, rollout, plan)
    cotangent = torch.zeros_like(plan.scored, dtype=torch.float64)
    cotangent[tuple(plan.scored.nonzero()[0])] = math.nan
    _, calls = alg.second_pass(model, rollout, plan, {"logp": cotangent}, temperature=0.7, size=1)
    assert calls == 1 and bool(model.table.grad.isnan().any()), "a cotangent that is not a number is not 0"
    model.drop = torch.nn.Dropout(0.1)
    refuses(lambda: alg.two_pass_backward(model, rollout, plan, loss, **how), "model", "dropout 0.1", "drop")
    alg.refuse_random_modules(model.eval())


@judges()
@rejects("", ("    _check_finite(loss)\n", ""), ("    refuse_random_modules(model)\n", ""), where="one_pass_backward")
@rejects("", ("set_grad_enabled(graph)", "set_grad_enabled(True)"), where="features")
def law_one_pass_backward(alg: Any) -> None:
    """Gradient, loss and features are those of one graph, however it is cut, and all that is needed is computed once."""
    _, rollout, plan = mixed_batch(alg)
    model, reference = (oracle.TabularDenoiser.random(4, 3, seeded(seed)) for seed in (94, 95))
    names = ("logp", "entropy", "kl_ref")
    how = {"temperature": 0.7, "names": names, "reference": reference}
    c = normal(3, *plan.scored.shape, seed=96)

    def loss(feature: dict) -> Tensor:
        x, y, z = (c[i] * feature[name] for i, name in enumerate(names))
        return (0.3 * x + y).sum((0, 2)).exp().sum() + (x * z).sum()

    graph = graph_features(alg, model, rollout, plan, **how)
    for size in (1, 256):
        watched = Watched(model)
        found = alg.one_pass_backward(watched, rollout, plan, loss, size=size, **how)
        close(found.loss, loss(graph), "loss")
        close(model.table.grad, oracle.table_gradient(model, loss(graph)), f"gradient, {size} states at a time")
        assert not found.loss.requires_grad and not found.seen["logp"].requires_grad, "what it tells is numbers"
        for name in names:
            close(found.seen[name], graph[name], f"seen: {name}")
        assert sum(watched.sequences) == plan.network_calls, f"{watched.sequences} sequences, {plan.network_calls} are needed"
        assert found.calls == 2 * plan.network_calls, f"{found.calls} calls, the reference's included"
        model.zero_grad()
    alone = alg.one_pass_backward(model, rollout, plan, lambda f: f["logp"].sum().exp(), temperature=0.7)
    assert alone.calls == plan.network_calls, "calls without a reference"
    assert not alg.features(model, rollout, plan, temperature=0.7)["logp"].requires_grad, "no graph unless it is asked for"
    model.zero_grad()
    refuses_a_loss_that_is_no_number(alg.one_pass_backward, model, rollout, plan)
    model.drop = torch.nn.Dropout(0.1)
    refuses(lambda: alg.one_pass_backward(model, rollout, plan, loss, **how), "model", "dropout 0.1", "drop")


@judges("4.1")
@rejects("4.1", ('"topk_ids")[row][scored]', '"topk_ids")[row * 0][scored]'), where="state_features")
def law_topk_logp(alg: Any) -> None:
    """It is the new log-probability of the sampler's M likeliest tokens where scored, and the recorded one at equal weights."""
    drawn, old, new, _, _ = experience()
    for count in (1, 2, 3):
        rollout = alg.Rollout(**{**vars(drawn), "records": likeliest(old, drawn, count)})
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        for model in (old, new):
            got = alg.features(model, rollout, plan, temperature=0.8, names=("logp", "topk_logp"))["topk_logp"]
            assert got.shape == (*plan.scored.shape, count)
            for k, b, i in itertools.product(range(plan.scored.shape[0]), range(8), range(4)):
                masked = positions(plan.hidden[k, b, 3:])
                state = tuple(3 if j in masked else int(t) for j, t in enumerate(rollout.response[b]))
                logp = (model.logits_at(state)[i] / 0.8).log_softmax(-1)[rollout.records["topk_ids"][b, i]].tolist()
                close(got[k, b, i], logp if plan.scored[k, b, i] else [0.0] * count, "topk_logp")
            if model is old:
                same = torch.where(plan.scored[..., None], rollout.records["topk_logp"].expand_as(got) - got, 0.0)
                close(same, torch.zeros_like(got), "at the sampler's weights")
    bare = alg.Rollout(**{**vars(drawn), "records": {}})
    refuses(
        lambda: alg.features(old, bare, plan, temperature=0.8, names=("logp", "topk_logp")), "records", "'topk_ids'", "needs"
    )


def kl_by_hand(model: Any, ref: Any, rollout: Any, plan: Any, k: int, b: int, temperature: float) -> dict[int, Tensor]:
    """KL(model || ref) of each scored position, over the whole vocabulary."""
    masked = positions(plan.hidden[k, b, 3:])
    state = tuple(model.mask_token_id if i in masked else int(t) for i, t in enumerate(rollout.response[b]))
    p, q = ((m.logits_at(state) / temperature).log_softmax(-1) for m in (model, ref))
    return {i: (p[i].exp() * (p[i] - q[i].detach())).sum() for i in sorted(positions(plan.scored[k, b]))}


@judges("4.1")
@rejects("4.1", ("else reference.head(their_h)", "else model.head(their_h)"), where="state_features")
def law_exact_kl(alg: Any) -> None:
    """kl_ref is KL(policy || reference) over the vocabulary in value and gradient. The reference is data; at it the KL is 0."""
    drawn, _, new, ref, _ = experience()
    rollout = alg.Rollout(**vars(drawn))
    plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
    weight, states = normal(*plan.scored.shape, seed=60), torch.arange(plan.scored.shape[0] * 8)
    for temperature in (1.0, 0.6):
        ask = partial(alg.state_features, new, rollout, plan, states, temperature=temperature, names=("kl_ref",))
        got = ask(reference=ref)["kl_ref"].unflatten(0, plan.scored.shape[:2])
        total = torch.zeros((), dtype=torch.float64)
        for k, b in itertools.product(range(plan.scored.shape[0]), range(8)):
            truth = kl_by_hand(new, ref, rollout, plan, k, b, temperature)
            close(got[k, b], [truth[i].item() if i in truth else 0.0 for i in range(4)], "kl_ref")
            total = total + sum(weight[k, b, i] * value for i, value in truth.items())
        found = (weight * got).sum()
        close(oracle.table_gradient(new, found), oracle.table_gradient(new, total), "gradient")
        close(oracle.table_gradient(ref, found), torch.zeros_like(ref.table), "the reference is data")
        close(ask(reference=new)["kl_ref"], torch.zeros(len(states), 4), "KL(p || p)")
        half = oracle.TabularDenoiser(ref.table.detach() / 2)
        half.head = lambda h: ref.head(2 * h)
        close(ask(reference=half)["kl_ref"].unflatten(0, got.shape[:2]), got, "read by the reference's own head")
