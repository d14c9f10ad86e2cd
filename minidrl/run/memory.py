"""How many bytes RL or fine-tuning will need, part by part, from its settings and a config.json.

Resident are the weights, adapters, AdamW's two moments of what is trained, a reference where a
method compares with one and no adapters can be switched off, and the copy that a sampler of its own
dtype has. Transient are, of a micro-batch of N tokens:

    activations  what autograd keeps of the body (``layer_bytes``); recomputed layers keep an input
    layer        one layer on its way back; with several GPUs also what is gathered for it
    logits       float32 arrays of R x V, R the rows to which the head is applied at a time, hidden
                 states and their gradient; the gradient of a head that is trained
    rollout      a layer's forward, or the sampler's arrays of V; the cache
    gradients    of what is trained; earlier: those of the micro-batches before, if there are any
    step         the optimiser's temporary copy, on a GPU

The peak is what is resident + the most of the rollout; earlier + activations + max(layer, logits),
where the way back begins; and gradients + max(layer, step), where it ends.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from minidrl import features as feat
from minidrl import sampler
from minidrl.algorithms import Plan
from minidrl.methods import Method, draw
from minidrl.run import adapters, checkpoints, config, distributed, evaluate, folders
from minidrl.run.launch import LocalError
from minidrl.run.precheck import blank_rollout, method_of

RESIDENT = ("weights", "adapters", "optimizer", "reference", "rollout_weights")
TRANSIENT = ("activations", "layer", "logits", "rollout", "gradients", "earlier", "step")
FLOAT = 4  # bytes
# Float32 arrays of R x V that are alive at once, counted on a call of the head and its backward
# pass; a feature adds.
ARRAYS = {"logp": 3.0, "entropy": 2.25, "kl_ref": 4.25, "topk_logp": 1.0}
ARRAYS |= {"order_logp": 2.25, "position_logp": 1.0}
# Bytes a token of the vocabulary while the sampler draws: logits, log-probs and probs in float32,
# their sums in float64. Greedily two arrays suffice.
DRAW, GREEDY = 20, 8


class _Run(NamedTuple):
    # What a prediction is made from. ``size``, ``weight``: bytes of a number in the arithmetic,
    # and of a weight.
    settings: config.Train
    method: Method
    plan: Plan
    network: nn.Module
    size: int
    weight: int
    gpus: int


def predicted_memory(settings: config.Train | config.Pretrain, gpus: int = 1) -> dict[str, int]:
    """Bytes by part (``RESIDENT``, ``TRANSIENT``) that a run will need on each of ``gpus`` GPUs.

    They are those of a rollout in which no response ends early. Weights, gradients and moments are
    cut evenly; fine-tuning has one GPU. ValueError for a model whose config.json cannot be had.
    """
    if isinstance(settings, config.Pretrain):
        return _fine_tuning(settings)
    method = method_of(settings)
    rollout = blank_rollout(method, settings, settings.num_prompts)
    network, stored = _blank(settings.model)
    if settings.task.prompt_format != "chat":  # whose prompts may be shorter than they are allowed
        sampler.check_positions(network, settings.task.prompt_length, settings.sampler.length)
    stored = checkpoints.arithmetic(stored, settings.device)
    dtype = checkpoints.dtype_of(settings.dtype) or stored
    own = settings.compute_dtype != "weights"
    size = (getattr(torch, settings.compute_dtype) if own else dtype).itemsize
    plan = draw(method, rollout, torch.Generator().manual_seed(settings.seed))
    run = _Run(settings, method, plan, network, size, dtype.itemsize, gpus)
    parts = _resident(run) | _transient(run)
    grown, on_gpu = parts["optimizer"] // 2, torch.device(settings.device).type == "cuda"
    several = _share(plan.network_calls, gpus) > settings.micro_batch
    return parts | {"gradients": grown, "earlier": grown * several, "step": grown * on_gpu}


def peak(parts: dict[str, int]) -> int:
    """Bytes at the worst moment of a run."""
    begins = parts["earlier"] + parts["activations"] + max(parts["layer"], parts["logits"])
    ends = parts["gradients"] + max(parts["layer"], parts["step"])
    return sum(parts[name] for name in RESIDENT) + max(parts["rollout"], begins, ends)


def table(parts: dict[str, int]) -> str:
    """The parts and their peak, one a line, in decimal gigabytes."""
    rows = [(name, parts[name]) for name in (*RESIDENT, *TRANSIENT)] + [("peak", peak(parts))]
    return "\n".join(f"{name:<16}{size / 1e9:>10.3f} GB" for name, size in rows)


def measured(device: torch.device) -> int | None:
    """The most bytes allocated on a GPU since the run began; None on a CPU: nobody counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# ----------------------------------------------------------------------------------------- resident
def _blank(model: str) -> tuple[nn.Module, torch.dtype]:
    """The network that a config.json describes, without its weights; and the dtype they have."""
    shape, family, stored = checkpoints.describe(model)
    with torch.device("meta"):
        return family.network(shape), stored


def _count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def adapter_count(network: nn.Module, lora: config.Lora) -> int:
    """Parameters of the adapters; ValueError for a target that matches no module."""
    layers = adapters.targeted(network, lora.target_modules)
    return lora.rank * sum(layer.in_features + layer.out_features for layer in layers)


def _resident(run: _Run) -> dict[str, int]:
    s, count, size = run.settings, _count(run.network), run.weight
    added = adapter_count(run.network, s.lora) if s.lora.rank else 0
    own = getattr(torch, s.rollout_dtype).itemsize if s.rollout_dtype != "float32" else 0
    parts = {
        "weights": _quantized(run.network, size) if s.quantize else size * count,
        "adapters": FLOAT * added,
        "optimizer": 2 * (FLOAT * added or size * count),
        "reference": size * count * (run.method.has_reference and not added),
        "rollout_weights": own * (count + added),
    }
    return {name: math.ceil(value / run.gpus) for name, value in parts.items()}


def _quantized(network: nn.Module, size: int) -> float:
    # NF4: half a byte a weight; 64 weights share a scale of one byte, and 256 scales one of four.
    head = network.get_output_embeddings()
    linear = [m for m in network.modules() if isinstance(m, nn.Linear) and m is not head]
    small = sum(module.weight.numel() for module in linear)
    return small * (1 / 2 + 1 / 64 + 1 / 4096) + size * (_count(network) - small)


# ---------------------------------------------------------------------------------------- transient
def _transient(run: _Run) -> dict[str, int]:
    s, shape, lora, size = run.settings, run.network.config, run.settings.lora, run.size
    asked = s.task.prompt_length + s.sampler.length  # tokens of a sequence
    width = asked if run.plan.block_length is None else asked + s.sampler.length
    tokens = min(s.micro_batch, _share(run.plan.network_calls, run.gpus)) * width
    # Answers that are written at a time, in a rollout or to be judged.
    written = min(s.micro_batch, _share(s.num_prompts * s.num_generations, run.gpus))
    judged = min(s.micro_batch, _share(s.evaluate.n, run.gpus))
    drawn = max(written, judged)

    # One layer, a token: what it keeps for its way back; what it takes at its widest without a
    # graph (gate, up and their product, or the result of an adapter in float32, before and after
    # its scale); and what its way back makes of the two branches of the MLP.
    kept, mlp = layer_bytes(shape, size, lora, width), shape.intermediate_size
    widest = 2 * size + 2 * FLOAT if lora.rank else 3 * size
    forward = widest * mlp + 2 * size * shape.hidden_size
    back = mlp * (size + (FLOAT if lora.rank else size))
    if s.gradient_checkpointing:
        kept, back = size * shape.hidden_size, back + kept
    aside = forward if "kl_ref" in run.method.features else 0

    unpacked = s.quantize * size * shape.hidden_size * shape.intermediate_size
    there, returning = _gathered(run) if run.gpus > 1 else (0, 0)
    whole_block = any(name.startswith("one_step") for name in run.method.needs)
    how = (s.sampler, shape, whole_block)
    drawing = written * _drawing(s.sampler.temperature, *how)
    drawing = max(drawing, judged * _drawing(s.evaluate.temperature, *how))
    cache = 0
    if s.sampler.cache != "none":
        cache = 2 * size * shape.num_hidden_layers * shape.num_key_value_heads * _head_dim(shape)
        cache *= drawn * asked
    return {
        "activations": tokens * (shape.num_hidden_layers * kept + _norm(shape, size, lora)),
        "layer": tokens * max(back, aside) + returning + unpacked,
        "logits": _logits(run),
        "rollout": max(drawn * asked * forward, drawing) + there + unpacked + cache,
    }


def _drawing(
    temperature: float, rule: sampler.Sampler, shape: PreTrainedConfig, whole_block: bool = False
) -> int:
    """Bytes a sequence, at the positions where a step of the sampler applies the head."""
    whole_block = whole_block or rule.order in ("low_confidence", "entropy", "margin")
    candidates = rule.block_length if whole_block else rule.tokens_per_step
    return candidates * (DRAW if temperature else GREEDY) * shape.vocab_size


def _fine_tuning(settings: config.Pretrain) -> dict[str, int]:
    """The parts of supervised training: a masked state of each row, and a rollout to judge it.

    Weights, gradients and moments are float32. Where products are bfloat16, a copy of the weights
    lives as long as a step; some activations are in either, and their mean is taken.
    """
    if not settings.init:
        raise ValueError("init: got ''; allowed a checkpoint: a fresh network is small")
    s, rule = settings, settings.sampler
    network, _ = _blank(s.init)
    shape, count = network.config, _count(network)
    head = FLOAT * shape.vocab_size * shape.hidden_size
    fast = checkpoints.in_bfloat16(s.compute_dtype, s.device)
    in_blocks = rule.attention == "block_causal" and s.loss == "elbo"
    width = s.task.prompt_length + rule.length * (2 if in_blocks else 1)
    sizes, whole = ((2, FLOAT) if fast else (FLOAT,)), config.Lora(rank=0)
    kept = [
        shape.num_hidden_layers * layer_bytes(shape, size, whole, width) + _norm(shape, size, whole)
        for size in sizes
    ]
    # Half of an answer is hidden on average, and only that is scored.
    asked = rule.length if s.loss == "next_token" else (rule.length + 1) / 2
    array = s.batch_size * asked * FLOAT * shape.vocab_size
    judged = min(evaluate.AT_A_TIME, s.evaluate.n)
    on_gpu = torch.device(s.device).type == "cuda"
    return dict.fromkeys((*RESIDENT, *TRANSIENT), 0) | {
        "weights": (FLOAT + 2 * fast) * count,
        "optimizer": 2 * FLOAT * count,
        "activations": s.batch_size * width * sum(kept) // len(kept),
        # The gradient of a tied head is that of the embedding, too: both, and their sum.
        "layer": 2 * head * shape.tie_word_embeddings,
        "logits": math.ceil(max(ARRAYS["logp"] * array, array + head)),
        "rollout": judged * _drawing(s.evaluate.temperature, rule, shape),
        "gradients": FLOAT * count,
        "step": FLOAT * count * on_gpu,
    }


def layer_bytes(shape: PreTrainedConfig, size: int, lora: config.Lora, width: int) -> int:
    """Bytes a token that a layer keeps for its backward pass, in sequences of ``width`` tokens."""
    hidden, mlp, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    attention = heads * _head_dim(shape)
    # Norms; queries, keys, values, result, log of the normaliser and mask; arrays of the MLP.
    kept = 2 * _norm(shape, size, lora) + 4 * size * attention + FLOAT * heads + size * width
    kept += 3 * size * mlp
    if not lora.rank:
        return kept + size * mlp
    # What goes into the adapters, in float32: a copy for each where the network is not; where it
    # is, two of the layer's inputs and the MLP's product, each for several adapters.
    copies = 2 * hidden + mlp
    if size < FLOAT:
        inputs = {"o_proj": attention, "down_proj": mlp}
        names = (target.rpartition(".")[2] for target in lora.target_modules)
        copies = sum(inputs.get(name, hidden) for name in names)
    return kept + FLOAT * (copies + lora.rank * len(lora.target_modules))


def _norm(shape: PreTrainedConfig, size: int, lora: config.Lora) -> int:
    # The float32 copy, the two factors of the scale where it is trained, and the token's scale.
    return shape.hidden_size * (FLOAT + (0 if lora.rank else 2 * size)) + FLOAT


def _head_dim(shape: PreTrainedConfig) -> int:
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads


def _gathered(run: _Run) -> tuple[int, int]:
    """Bytes of whole tensors on each GPU, on the way there (two layers, and embedding or head) and
    back (their gradients, too: FSDP2 keeps that of the head to the end)."""
    size, weight, shape = run.size, run.weight, run.network.config
    layer, embedding = _count(run.network.model.layers[0]), shape.vocab_size * shape.hidden_size
    there = size * (2 * layer + embedding)
    trained = (size + weight) * layer + weight * embedding
    return there, there if run.settings.lora.rank else there + trained


def _share(total: int, gpus: int) -> int:
    return -(-total // gpus)  # as distributed.share_of cuts


def _logits(run: _Run) -> int:
    """Of the micro-batch with the most rows: what the head makes of them, and its gradient."""
    s, shape = run.settings, run.network.config
    array, head = FLOAT * shape.vocab_size, run.size * shape.vocab_size * shape.hidden_size
    rows = run.plan.scored.flatten(0, 1).sum(-1)
    passed_over = {"order_logp", "position_logp"} & set(run.method.features)
    if (s.sampler.threshold is not None and run.plan.replay) or passed_over:
        rows = s.sampler.block_length * (rows > 0)  # the most that a step may reveal
    chunks = feat.state_chunks(run.plan, s.micro_batch)
    states = max(chunks, key=lambda states: int(rows[states].sum()))
    count, widest = int(rows[states].sum()), int(rows.max())
    parts = max(1, feat.head_parts(len(states) * widest, shape.vocab_size))
    once = math.ceil(count / parts)  # rows to which the head is applied at a time
    # A part as it is read, beside the gradient that earlier parts have left; or the head's own way
    # back: a gradient of the logits, and that of its weights, three of these while two are added.
    gradient = 0 if s.lora.rank else head
    reading = once * array * sum(ARRAYS[name] for name in run.method.features)
    reading += gradient * (parts > 1)
    adding = once * array + gradient * (3 if parts > 1 else 1)
    hidden = count * 2 * run.size * shape.hidden_size
    return math.ceil(max(reading, adding)) + hidden + head * (run.gpus > 1)


# ----------------------------------------------------------------------------------------- of a run
def check(settings: config.Train | config.Pretrain) -> None:
    """ValueError for a run whose predicted peak is beyond the memory of its device."""
    processes = distributed.num_processes()
    asked = peak(predicted_memory(settings, processes))
    what = "predicted at the peak (python -m minidrl memory has the parts)"
    check_room(asked, what, settings.device, processes)


def check_room(asked: int, what: str, device: str, processes: int = 1) -> None:
    """ValueError for more bytes than a GPU has, or one of the processes on this machine."""
    room, name = main_memory() // processes, "this machine"
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        room, name = torch.cuda.get_device_properties(device).total_memory, device
    if asked > room:
        got, allowed = f"{asked / 1e9:.1f} GB {what}", f"the {room / 1e9:.1f} GB of {name}"
        raise ValueError(f"memory: got {got}; allowed {allowed}")


def main_memory() -> int:
    """Bytes of main memory that this process may have: the machine's, or those of its container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    told = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(whole, int(told)) if told.isdecimal() else whole


def compared(settings: config.Train) -> str:
    """The peak that was predicted and the one that was measured, in words."""
    predicted = peak(predicted_memory(settings, distributed.num_processes())) / 1e9
    found = measured(torch.device(settings.device))
    told = "not measured on a CPU" if found is None else f"measured {found / 1e9:.3f} GB"
    return f"predicted {predicted:.3f} GB at its peak, {told}"


def out_of_memory(
    error: torch.OutOfMemoryError, settings: config.Train, out: Path, phase: str
) -> LocalError:
    """The line for it: in which phase of a step, what to lower, and what is kept."""
    found = folders.checkpoint_folders(out)
    kept = f"{found[-1]} is kept, --resume goes on" if found else "no checkpoint was due yet"
    where = f"out of memory in the {phase or 'loading'} ({str(error).partition('. GPU')[0]})"
    smaller = "gradient_checkpointing true, dtype bfloat16, or lora.rank from 1 and quantize true"
    got = f"{settings.micro_batch}, {where}"
    return LocalError(f"micro_batch: got {got}; try a smaller one, {smaller}; {kept}")
