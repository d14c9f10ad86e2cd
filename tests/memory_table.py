"""Measured peak memory of the two backward passes: ``python tests/memory_table.py`` prints the table.

Counted are the bytes that autograd has saved for a backward pass and still holds, weights left out, a storage once; the peak
is their largest sum at any moment. Activations dominate a GPU in the same way, but this number is exact and needs none.
"""

import dataclasses
from collections import Counter
from functools import partial

import torch

import tiny
from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import gradient, methods, sampler

STATES = (1, 2, 4, 8, 16)
LAYOUT = sampler.Sampler(order="random", temperature=1.0, length=16, block_length=16, tokens_per_step=1)


class SavedBytes:
    """Within ``with``: ``peak``, the largest number of bytes held at once for a backward pass."""

    def __init__(self, model: torch.nn.Module):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.users, self.held, self.peak = Counter(), 0, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(partial(_Held, self), lambda held: held.tensor)

    def __enter__(self) -> "SavedBytes":
        self.hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)

    def count(self, storage: torch.UntypedStorage, change: int) -> None:
        """A user of a storage appears (+1) or disappears (-1); the bytes count while there is one."""
        key = storage.data_ptr()
        if key in self.weights:
            return
        before = self.users[key] > 0
        self.users[key] += change
        self.held += ((self.users[key] > 0) - before) * storage.nbytes()
        self.peak = max(self.peak, self.held)


class _Held:
    """A tensor that autograd keeps; it counts until autograd lets it go."""

    def __init__(self, meter: SavedBytes, tensor: torch.Tensor):
        self.meter, self.tensor = meter, tensor
        meter.count(tensor.untyped_storage(), +1)

    def __del__(self):
        self.meter.count(self.tensor.untyped_storage(), -1)


def joint_backward(model, rollout, plan, loss_of, *, temperature=1.0, names=("logp",), **more) -> torch.Tensor:
    """The reference path: one graph over all states of the plan, each a forward of its own."""
    states, plan = torch.arange(plan.valid.numel()), dataclasses.replace(plan, block_length=None)
    feature = feat.state_features(model, rollout, plan, states, temperature=temperature, names=names, **more)
    loss = loss_of({name: value.unflatten(0, plan.valid.shape) for name, value in feature.items()})
    loss.backward()
    return loss.detach()


def peak_memory(num_states: int, two_pass: bool) -> int:
    """Peak bytes of a PPO update on K steps of each of 12 trajectories, one state a trajectory at a time in the second pass.

    Each trajectory has a prompt of its own: a network computes equal states once.
    """
    model, rows = tiny.network(), tiny.GROUPS * tiny.GENERATIONS
    prompt = torch.cartesian_prod(*[torch.arange(3)] * 5)[:rows]
    rollout = sampler.generate(
        model,
        prompt,
        torch.ones_like(prompt, dtype=torch.bool),
        LAYOUT,
        eos_token_id=None,
        generator=torch.Generator().manual_seed(0),
    )
    plan = alg.replay_plan(rollout, torch.Generator().manual_seed(1), num_states=num_states, min_entropy=0.0)
    method = methods.METHODS["replay-grpo"]
    anchor, adv = methods.behaviour_anchor(method, plan, rollout), torch.linspace(-1, 1, rows)
    backward = partial(gradient.two_pass_backward, size=rows) if two_pass else joint_backward
    with SavedBytes(model) as meter:
        backward(model, rollout, plan, lambda f: methods.method_loss(method, plan, rollout, f, adv, anchor, None))
    return meter.peak


def table() -> str:
    """Markdown: peak memory in KiB by the number of plan states."""
    lines = ["| plan states K | joint graph (KiB) | two-pass (KiB) |", "|---:|---:|---:|"]
    lines += [f"| {k} | {peak_memory(k, False) / 1024:,.0f} | {peak_memory(k, True) / 1024:,.0f} |" for k in STATES]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
