"""Several processes, usually one a GPU: each keeps a share of every weight (FSDP2).

    torchrun --nproc-per-node 2 -m minidrl train CONFIG

All randomness is keyed by (seed, step, purpose) and drawn for the global batch: every process works
out the same puzzles, plans, advantages and loss for itself. The forwards are shared:

    rollout     rows of the batch (``generate``); then every process gets every row
    features    forwards of a plan (``share_plan``); then a sum (``sum_shares``): they are 0 where
                another process computed them
    pass 2      forwards with a cotangent; then a sum, not a mean: the cotangents are those of the
                global loss

A forward of a sharded network needs all processes at once. So the shares have the same size: the
last are filled up with forwards that another process does as well, and these count with weight 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from minidrl import sampler
from minidrl.algorithms import Plan, Rollout
from minidrl.denoiser import Denoiser
from minidrl.features import Network
from minidrl.gradient import Alone
from minidrl.run.launch import LocalError, launched_processes, launched_rank


# --------------------------------------------------------------------------------------- processes
@contextlib.contextmanager
def process_group(device: str):
    """The processes of torchrun, connected: by gloo on the CPU, by nccl on GPUs.

    ``device`` cuda is then the process's own. Nothing happens without torchrun.
    """
    if launched_processes() == 1:
        yield
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    agreed_end = True
    try:
        yield
    except (RuntimeError, LocalError):
        # The others may be anywhere: leaving must not wait for them, and torchrun ends them.
        agreed_end = False
        raise
    finally:
        if agreed_end:
            dist.destroy_process_group()


def num_processes() -> int:
    """The number of processes that are connected."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else launched_rank()


def processes() -> Any:
    """What shares the work of a run: this module, or `gradient.Alone` in a single process."""
    return sys.modules[__name__] if num_processes() > 1 else Alone


def is_main() -> bool:
    """True in the one process that prints and writes."""
    return rank() == 0


def check_settings(settings: Any) -> None:
    """ValueError where the settings of a run do not go with the number of processes."""
    count, prompts = num_processes(), settings.num_prompts
    if prompts % count:
        raise ValueError(f"num_prompts: got {prompts}; allowed multiples of the {count} processes")
    for key in ("compile", "quantize"):
        if getattr(settings, key) and count > 1:
            got = f"True with {count} processes"
            raise ValueError(f"{key}: got {got}; allowed False, or one process")
    if settings.compute_dtype != "weights" and count == 1:  # which gathers no weights
        got = f"{settings.compute_dtype!r} with one process"
        raise ValueError(f"compute_dtype: got {got}; allowed weights, or several processes")


def collectively(call: Callable[[], Any]) -> Any:
    """``call()`` in every process; if one of them refuses, all raise what it raised.

    Nobody then waits for a process that has left. An error that is no refusal ends the process, and
    torchrun the rest.
    """
    if num_processes() == 1:
        return call()
    result = error = None
    try:
        result = call()
    except (ValueError, OSError, FloatingPointError) as raised:
        error = raised
    errors: list[Any] = [None] * num_processes()
    dist.all_gather_object(errors, error)
    for raised in errors:
        if raised is not None:
            raise raised
    return result


def on_main(call: Callable[[], Any]) -> Any:
    """The result of ``call()`` in process 0, which alone does it; its error is everyone's."""
    result = [collectively(lambda: call() if is_main() else None)]
    if num_processes() > 1:
        dist.broadcast_object_list(result)
    return result[0]


# -------------------------------------------------------------------------------------- shared work
def share_of(total: int, process: int) -> tuple[int, int]:
    """(start, stop) of a process's share of ``total`` pieces of work: as many for each.

    The last may therefore overlap: its own are those from ``process`` x size on; the ones before
    them are another's, and only fill the share up.
    """
    size = -(-total // num_processes())
    start = min(process * size, total - size)
    return start, start + size


def share_plan(plan: Plan) -> tuple[Plan, Bool[Tensor, "K B"]]:
    """(the plan of this process's forwards, its own states among them).

    The M states of a staircase stay together: they are one forward.
    """
    forwards = plan.needed.flatten().nonzero()[:, 0]
    start, stop = share_of(len(forwards), rank())
    own = forwards[rank() * (stop - start) : stop]

    def states(chosen: Int[Tensor, " F"]) -> Bool[Tensor, "K B"]:
        mask = torch.zeros_like(plan.needed).flatten().index_fill(0, chosen, True)
        return mask.view_as(plan.needed).repeat_interleave(plan.blocks, 0)

    return dataclasses.replace(plan, valid=plan.valid & states(forwards[start:stop])), states(own)


def keep_own(values: dict[str, Tensor], own: Bool[Tensor, "K B"]) -> dict[str, Tensor]:
    """``values`` (K, B, ...) with 0 at all states but ``own``, whatever stood there, NaN too."""

    def kept(value: Tensor) -> Tensor:
        return value.masked_fill(~own.view(*own.shape, *[1] * (value.ndim - 2)), 0)

    return {name: kept(value) for name, value in values.items()}


def sum_shares(values: dict[str, Tensor], own: Bool[Tensor, "K B"]) -> dict[str, Tensor]:
    """``values`` (K, B, ...), each state's from the process whose own it is; nobody's are 0."""
    values = keep_own(values, own)
    for value in values.values():
        dist.all_reduce(value)
    return values


def from_main(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of process 0.

    Elsewhere a sum may have another last digit, and what is 0 decides who runs what.
    """
    values = {name: value.contiguous() for name, value in values.items()}
    for value in values.values():
        dist.broadcast(value, 0)
    return values


def generate(
    model: Network,
    prompt: Tensor,
    prompt_mask: Tensor,
    settings: sampler.Sampler,
    *,
    num_generations: int = 1,
    **more,
) -> Rollout:
    """``sampler.generate``, each process for its rows: the Rollout knows no number of processes."""
    start, stop = share_of(len(prompt) * num_generations, rank())
    more |= {"rows": torch.arange(start, stop, device=prompt.device), "agree": even_out}
    more["num_generations"] = num_generations
    rollout = collectively(lambda: sampler.generate(model, prompt, prompt_mask, settings, **more))
    names = ("response", "keep", "unmask_step", "logp")
    found: dict[str, Any] = {name: gather_rows(getattr(rollout, name)) for name in names}
    found["records"] = {name: gather_rows(value) for name, value in rollout.records.items()}
    return dataclasses.replace(rollout, **found)


def even_out(rows: Int[Tensor, " R"], left: Int[Tensor, " S"]) -> Int[Tensor, " N"]:
    """``left`` and some of the other ``rows``: as many as in the process that has the most left."""
    most = torch.tensor(len(left), device=rows.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    others = rows[~torch.isin(rows, left)]
    return torch.cat([left, others[: int(most) - len(left)]]).sort().values


def gather_rows(value: Tensor) -> Tensor:
    """``value`` (B, ...), each row from the process whose share it is."""
    start, stop = share_of(len(value), rank())
    parts = [torch.empty_like(value[start:stop]) for _ in range(num_processes())]
    dist.all_gather(parts, value[start:stop].contiguous())
    out = torch.empty_like(value)
    for process, part in enumerate(parts):
        out[slice(*share_of(len(value), process))] = part
    return out


# ---------------------------------------------------------------------------------- sharded weights
# How torch gathers what is trained: whole, on the CPU of process 0 and nowhere else, one tensor at
# a time. What is loaded does not go through torch's counterpart: it would need all moments, whole,
# in main memory, and a second share of the weights beside the first.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def shard(*denoisers: Denoiser | None, compute_dtype: str = "weights") -> None:
    """In place, each process keeps a share of each weight (FSDP2); None and twins are passed over.

    A layer, the rest of the body, or the head is gathered at a time. Gradients are summed.
    ``compute_dtype`` bfloat16: what is gathered is rounded to it, by torch's own policy of mixed
    precision; gradients are summed over backwards and processes in float32.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype != "weights":
        policy = MixedPrecisionPolicy(getattr(torch, compute_dtype), reduce_dtype=torch.float32)
    for denoiser in denoisers if num_processes() > 1 else ():
        if denoiser is not None and not isinstance(denoiser.model.model, FSDPModule):
            _shard(denoiser, policy)


def _shard(denoiser: Denoiser, policy: MixedPrecisionPolicy) -> None:
    network = denoiser.model
    if network.config.tie_word_embeddings:
        got = f"tied embeddings with {num_processes()} processes"
        raise ValueError(f"model: got {got}; allowed one process")
    mesh = init_device_mesh(denoiser.device.type, (num_processes(),))
    for module in (*network.model.layers, network.model, network.get_output_embeddings()):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the default is a mean over the processes
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no reduction that divides


def full_tensor(value: Tensor) -> Tensor:
    """All of a sharded tensor; every process has to ask. Any other tensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_weights(denoiser: Denoiser) -> dict[str, Tensor] | None:
    """What is trained of a sharded network, for ``checkpoints.save``; None for any other network.

    All of it is in process 0, and nothing elsewhere.
    """
    if num_processes() == 1:
        return None
    found = get_model_state_dict(denoiser.model, options=WHOLE)
    # On a CPU a tensor of uneven shares is a view of a larger one, which safetensors refuses.
    views = {key for key, x in found.items() if x.nbytes < x.untyped_storage().nbytes()}
    return found | {key: found[key].clone() for key in views}


def sharded_like(value: Tensor, present: Tensor) -> Tensor:
    """``value``, sharded as ``present`` is; as it is where that is not sharded."""
    if not isinstance(present, DTensor) or value.shape != present.shape:
        return value
    value, mesh = value.to(present.device), present.device_mesh
    return distribute_tensor(value, mesh, present.placements, src_data_rank=None)
