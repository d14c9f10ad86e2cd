"""The gradient, at any size: the two-pass backward that the training loop calls.

A loss is a function of the features of K states a sequence, often not a linear one (a ratio of
ELBOs, a softmax over a group). Keeping the graph of all states until the loss is known costs memory
proportional to K B. Instead:

    pass 1   compute all features without a graph; the loss on them gives their cotangents
             c = d loss / d feature
    pass 2   recompute the features state by state and back-propagate  sum <c, feature>

By the chain rule this is the gradient, exactly, provided both passes compute the same function:
dropout would break that. Where all states fit one micro-batch, `one_pass_backward` saves pass 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidrl.algorithms import Plan, Rollout
from minidrl.features import Network, features, state_chunks, state_features
from minidrl.run import distributed

Loss = Callable[[dict[str, Tensor]], Tensor]  # of the features of a plan


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
) -> Backward:
    """Accumulate d loss_of(features) / d weights, with memory constant in the number of states.

    Gradients accumulate over the states; as in gradient checkpointing, what pass 1 did not keep is
    computed again. ``size`` states go through the network at a time. ``feature``: what pass 1 would
    find, or anything at which ``loss_of`` has the same gradient, where that can be had for less;
    None: pass 1 is made. Raises FloatingPointError for a loss that is not finite, ValueError for a
    network that draws random numbers.
    """
    refuse_random_modules(model)
    how = {"temperature": temperature, "size": size, "reference": reference}
    if feature is None:
        feature = shared_features(model, rollout, plan, names=names, **how)
    loss, cotangent = cotangents(loss_of, feature)
    _check_finite(loss)
    seen, calls = second_pass(model, rollout, plan, cotangent, **how)
    return Backward(loss, seen, calls * (2 if "kl_ref" in cotangent else 1))


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
    found = features(model, rollout, plan, names=names, graph=True, **how)
    loss = loss_of(found)
    _check_finite(loss)
    loss.backward()
    seen = {name: value.detach() for name, value in found.items()}
    return Backward(loss.detach(), seen, plan.network_calls * (2 if "kl_ref" in names else 1))


def _check_finite(loss: Tensor) -> None:
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {float(loss.detach())}")


def cotangents(loss_of: Loss, feature: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and d loss / d feature for every feature that it depends on."""
    leaves = {name: value.detach().requires_grad_() for name, value in feature.items()}
    loss = loss_of(leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return loss.detach(), found


def second_pass(
    model: Network, rollout: Rollout, plan: Plan, cotangent: dict[str, Tensor], *, size: int, **how
) -> tuple[dict[str, Tensor], int]:
    """Back-propagate sum <cotangent, feature>; states whose cotangents are all 0 are skipped.

    Returns the features it met (0 at skipped states) and the sequences that went through the
    network.
    """
    cotangent = distributed.from_main(cotangent)
    # nan is not 0: the gradient needs it
    needed = torch.stack([(c != 0).flatten(2).any(2) for c in cotangent.values()]).any(0)
    plan = dataclasses.replace(plan, valid=plan.valid & needed)
    share, own = distributed.share_plan(plan)
    flat = {name: c.flatten(0, 1) for name, c in distributed.keep_own(cotangent, own).items()}
    seen = {name: torch.zeros_like(c) for name, c in flat.items()}
    for states in state_chunks(share, size):
        value = state_features(model, rollout, plan, states, names=tuple(flat), **how)
        sum((flat[name][states] * value[name]).sum() for name in flat).backward()
        for name in flat:
            seen[name][states] = value[name].detach()
    seen = {name: value.unflatten(0, plan.valid.shape) for name, value in seen.items()}
    return distributed.sum_shares(seen, own), plan.network_calls


def shared_features(model: Network, rollout: Rollout, plan: Plan, **how) -> dict[str, Tensor]:
    """``features``, each process doing its share of the forwards."""
    share, own = distributed.share_plan(plan)
    return distributed.sum_shares(features(model, rollout, share, **how), own)


def refuse_random_modules(model: nn.Module) -> None:
    """ValueError if a module would draw random numbers: the two passes would then see different
    networks."""
    dropouts = nn.modules.dropout._DropoutNd
    for name, module in model.named_modules():
        p = module.p if isinstance(module, dropouts) else getattr(module, "attention_dropout", 0.0)
        if module.training and p:
            allowed = "0 (or eval mode): both passes must agree"
            raise ValueError(f"model: dropout {p} in {name or 'the network'}; allowed {allowed}")
