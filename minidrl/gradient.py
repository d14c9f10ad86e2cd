"""The gradient at any size: the two-pass backward that the loop calls.

A loss is a function of the features of K states a response, often not a linear one (a ratio of
ELBOs, a softmax over a group). Keeping the graph of all states until the loss is known costs memory
proportional to K B. Instead:

    pass 1   compute all features without a graph; the loss on them gives their cotangents
             c = d loss / d feature
    pass 2   recompute the features, a micro-batch of states at a time, and back-propagate
             sum <c, feature>

By the chain rule this is the gradient, exactly, provided both passes compute the same function:
dropout would break that. ``backward``, which the loop calls, saves a pass where that is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from minidrl import sampler
from minidrl.algorithms import Plan, Rollout
from minidrl.features import Network, features, state_chunks, state_features

if TYPE_CHECKING:
    from minidrl.bookkeeping import Experience, Run

Loss = Callable[[dict[str, Tensor]], Tensor]  # of the features of a plan


class Alone:
    """One process, which shares nothing. run/distributed.py has these functions for several."""

    generate = staticmethod(lambda *given, **how: sampler.generate(*given, **how))
    num_processes = staticmethod(lambda: 1)
    on_main = staticmethod(lambda call: call())  # in process 0 alone, its result in all
    share_plan = staticmethod(lambda plan: (plan, None))  # a process's forwards, its own states
    keep_own = staticmethod(lambda values, own: values)
    sum_shares = staticmethod(lambda values, own: values)
    from_main = staticmethod(lambda values: values)
    full_tensor = staticmethod(lambda value: value)


class Backward(NamedTuple):
    """What a backward found.

    loss    at the features of pass 1
    seen    the features that the graph met; 0 at the states that pass 2 skipped
    calls   sequences that went through the network with a graph, and of the reference beside them
    """

    loss: Tensor
    seen: dict[str, Tensor]
    calls: int


def two_pass_backward(
    model: Network,
    rollout: Rollout,
    plan: Plan,
    loss_of: Loss,
    *,
    temperature: float = 1.0,
    names: tuple[str, ...] = ("logp",),
    size: int = 256,
    reference: Network | None = None,
    feature: dict[str, Tensor] | None = None,
    processes: Any = Alone,
) -> Backward:
    """Accumulate d loss_of(features) / d weights, with memory constant in the number of states.

    ``size`` states go through the network at a time. ``feature``: what pass 1 would find, or
    anything at which ``loss_of`` has the same gradient; None: pass 1 is made. Raises
    FloatingPointError for a loss that is not finite, ValueError for a network with dropout.
    """
    refuse_random_modules(model)
    # Pass 1: the features as numbers, and what the loss would have of each of them.
    how = {"temperature": temperature, "size": size, "reference": reference, "processes": processes}
    if feature is None:
        feature = shared_features(model, rollout, plan, names=names, **how)
    loss, cotangent = cotangents(loss_of, feature)
    _check_finite(loss)
    # Pass 2: the same features with a graph, micro-batch after micro-batch.
    seen, calls = second_pass(model, rollout, plan, cotangent, **how)
    return Backward(loss, seen, calls * (2 if "kl_ref" in cotangent else 1))


def cotangents(loss_of: Loss, feature: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and d loss / d feature for every feature that it depends on."""
    leaves = {name: value.detach().requires_grad_() for name, value in feature.items()}
    loss = loss_of(leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return loss.detach(), found


def second_pass(
    model: Network,
    rollout: Rollout,
    plan: Plan,
    cotangent: dict[str, Tensor],
    *,
    size: int,
    processes: Any = Alone,
    **how,
) -> tuple[dict[str, Tensor], int]:
    """Back-propagate sum <cotangent, feature>; states whose cotangents are all 0 are skipped.

    Returns the features it met (0 at skipped states) and the sequences that went through the
    network.
    """
    cotangent = processes.from_main(cotangent)
    # A state whose cotangents are all 0 adds nothing. (nan is not 0, so that it is not lost.)
    needed = torch.stack([(c != 0).flatten(2).any(2) for c in cotangent.values()]).any(0)
    plan = dataclasses.replace(plan, valid=plan.valid & needed)
    # Each process takes its share of the states. What they add up to is sum <cotangent, feature>,
    # whose gradient by the weights is that of the loss; a micro-batch's graph goes before the next.
    share, own = processes.share_plan(plan)
    flat = {name: c.flatten(0, 1) for name, c in processes.keep_own(cotangent, own).items()}
    seen = {name: torch.zeros_like(c) for name, c in flat.items()}
    for states in state_chunks(share, size):
        value = state_features(model, rollout, plan, states, names=tuple(flat), **how)
        sum((flat[name][states] * value[name]).sum() for name in flat).backward()
        for name in flat:
            seen[name][states] = value[name].detach()
    seen = {name: value.unflatten(0, plan.valid.shape) for name, value in seen.items()}
    return processes.sum_shares(seen, own), plan.network_calls


def shared_features(
    model: Network, rollout: Rollout, plan: Plan, *, processes: Any = Alone, **how
) -> dict[str, Tensor]:
    """``features``, each process doing its share of the forwards."""
    share, own = processes.share_plan(plan)
    return processes.sum_shares(features(model, rollout, share, **how), own)


def refuse_random_modules(model: nn.Module) -> None:
    """ValueError if a module would draw random numbers: the two passes would then see different
    networks."""
    dropouts = nn.modules.dropout._DropoutNd
    for name, module in model.named_modules():
        p = module.p if isinstance(module, dropouts) else getattr(module, "attention_dropout", 0.0)
        if module.training and p:
            allowed = "0 (or eval mode): both passes must agree"
            raise ValueError(f"model: dropout {p} in {name or 'the network'}; allowed {allowed}")


def _check_finite(loss: Tensor) -> None:
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {float(loss.detach())}")


def one_pass_backward(
    model: Network,
    rollout: Rollout,
    plan: Plan,
    loss_of: Loss,
    *,
    names: tuple[str, ...] = ("logp",),
    **how,
) -> Backward:
    """`two_pass_backward` with the graph of all states: each is computed once, and memory grows
    with them.

    For one process. ``how``: words of `features`. Raises as `two_pass_backward` does.
    """
    refuse_random_modules(model)
    # All features with a graph, the loss of them, and straight back.
    found = features(model, rollout, plan, names=names, graph=True, **how)
    loss = loss_of(found)
    _check_finite(loss)
    loss.backward()
    seen = {name: value.detach() for name, value in found.items()}
    return Backward(loss.detach(), seen, plan.network_calls * (2 if "kl_ref" in names else 1))


# ----------------------------------------------------------------------------------------- of a run


def backward(
    run: Run,
    experience: Experience,
    plan: Plan,
    anchor: Tensor | None,
    loss_of: Loss,
) -> tuple[Tensor, dict[str, Tensor], Plan]:
    """Accumulate d loss_of(features) / d weights in the cheapest way that is exact.

    That is the two-pass backward. Pass 1 is left out where its result is known, and both passes are
    one where all states fit a micro-batch. Returns the loss, the features before the update, and
    the plan of their states: where pass 1 was left out, without those that pass 2 has skipped.
    """
    # Where the loss has the same slope at features that are known beforehand, pass 1 is left out.
    rollout, how = experience.rollout, scoring(run)
    given = (run.network, rollout, plan, loss_of)
    known = known_features(run, experience, plan, anchor)
    alone = run.processes.num_processes() == 1
    fits = run.settings.one_pass and alone and plan.network_calls <= run.settings.micro_batch
    # Where the graph of all states fits into memory, one pass does for both.
    if known is None and fits:
        with run.clock.phase("update"):
            done = one_pass_backward(*given, names=run.method.features, **how)
        feature = done.seen
    else:
        feature = score(run, rollout, plan) if known is None else known
        with run.clock.phase("update"):
            done = two_pass_backward(*given, feature=feature, processes=run.processes, **how)
    run.clock.calls["update"] += done.calls
    if known is None:
        return done.loss, feature, plan
    # Stand-ins are no log-probabilities, as those on record are: for the log the loss is computed
    # once more, at those that pass 2 has met. (What it skipped adds nothing, but is counted.)
    recorded = run.method.on_record and not run.method.linear
    loss = done.loss if recorded else loss_of(done.seen).detach()
    met = (done.seen["logp"] != 0).any(-1, keepdim=True)
    return loss, done.seen, dataclasses.replace(plan, scored=plan.scored & met)


def known_features(
    run: Run, experience: Experience, plan: Plan, anchor: Tensor | None
) -> dict[str, Tensor] | None:
    """Features that can stand in for those of pass 1: d loss / d feature is the same at them. None:
    there are none, and pass 1 is needed.

    Three cases. A loss that is linear in the features has one slope everywhere. The log-
    probabilities of the weights that sampled are on record. And where ll is its own anchor, the
    ratio is 1 whatever ll is, and so is the slope of some objectives (``linear_on_policy``); but
    then no later update may need this ll.
    """
    method, logp = run.method, experience.rollout.logp
    blank = torch.zeros(plan.scored.shape, dtype=logp.dtype, device=logp.device)
    anything = dict.fromkeys(method.features, blank)
    if method.linear:
        return anything
    if method.on_record:
        sampled_now = experience.updates == run.updates
        return {"logp": logp * plan.scored} if sampled_now and not method.has_reference else None
    its_own_anchor = method.anchor == "old" and anchor is None
    only_update = run.settings.num_iterations == 1
    return anything if its_own_anchor and only_update and method.linear_on_policy else None


def score(run: Run, rollout: Rollout, plan: Plan) -> dict[str, Tensor]:
    """The features (section 4) of the method's loss, (K, B, L) each, without a graph."""
    return _counted_features(run, run.network, rollout, plan, run.method.features)


def likelihood(run: Run, network: Network, rollout: Rollout, plan: Plan) -> dict[str, Tensor]:
    """Those features of which an ll is made: all that an anchor or a reference needs."""
    made_of = ("logp", "order_logp", "position_logp")
    names = tuple(name for name in run.method.features if name in made_of)
    return _counted_features(run, network, rollout, plan, names)


def _counted_features(
    run: Run, network: Network, rollout: Rollout, plan: Plan, names: tuple[str, ...]
) -> dict[str, Tensor]:
    run.clock.calls["scoring"] += plan.network_calls * (2 if "kl_ref" in names else 1)
    with run.clock.phase("scoring"):
        how = scoring(run) | {"names": names, "processes": run.processes}
        return shared_features(network, rollout, plan, **how)


def scoring(run: Run) -> dict[str, Any]:
    """At which temperature features are computed, how many states at a time, and beside whom."""
    sampling = run.method.temperature == "sampling"
    temperature = run.settings.sampler.temperature if sampling else 1.0
    return {
        "temperature": temperature,
        "size": run.settings.micro_batch,
        "reference": run.reference,
    }
