"""How many bytes a run will need, part by part, before anything is loaded.

Known are its settings and a config.json. Resident during the whole run, for n weights of which m
are trained (adapters only, where there are any):

    weights          n bytes times the element size; in 4 bits a linear layer takes 1/2 + 1/64 +
                     1/4096 bytes a weight: two in a byte, an 8-bit scale for 64, a float32 for 256
                     scales. Embedding and head stay as they are
    adapters         r (inputs + outputs) for each linear layer, in float32 over whatever base
    optimizer        2 m, AdamW's two moments in the element size of what is trained
    reference        n, only if a method compares with one and there are no adapters to switch off
    rollout_weights  n, only for a sampler of its own dtype

Transient. N tokens are a micro-batch of sequences, or all that there are where that is less; D, A,
F, V the widths of hidden state, attention, MLP and vocabulary; e the element size of the
arithmetic: of ``compute_dtype``, or of the weights. The parts below are sums of the tensors that
transformers' layers keep for a backward pass:

    activations      what autograd keeps of the body. A layer keeps N times
                         norms      2 (4 D + 4 + [2 e D]), the float32 copy, one number, [the two
                                    factors of the scale]
                         attention  4 e A + 4 heads + e T, queries, keys, values, result; log of
                                    the normaliser; mask
                         MLP        3 e F [+ e F]
                         adapters   4 r + their input in float32, each (one tensor for several
                                    where it is float32 already)
                     ([...]: only where the base is trained.) With gradient checkpointing a layer
                     keeps its input, e D, instead
    layer            one layer on its way back: two gradients of width F, and with checkpointing
                     what it had not kept; over 4 bits, D F unpacked weights. Or a layer of the
                     reference on its way there, with an exact penalty. Several GPUs: what is
                     gathered for it, see ``_gathered``
    logits           float32 arrays of R x V, R the rows to which the head is applied at a time:
                     logits, log-probabilities, a gradient; more for more features. The hidden
                     states of all rows of the micro-batch and their gradient. Where the head is
                     trained, its gradient e D V; with more than one part three, while two are
                     added up
    rollout          the larger of one layer's forward and the sampler's arrays of V, in float64
                     where it sums; the cache
    gradients        m times the element size; they grow in an update's first backward pass, and
                     the update removes them
    earlier          gradients of the micro-batches before this one: all, or none where an update is
                     one micro-batch
    step             the optimiser's temporary copy of what it updates, on a GPU

The peak is what is resident + the most of

    rollout                                     without gradients; scoring needs less than an update
    earlier + activations + max(layer, logits)  the way back begins
    gradients + layer                           it ends: activations went, gradients came
    gradients + step

The vocabulary head is applied to R rows at a time, R x V at most about feat.HEAD_NUMBERS. The
arrays of a part are made again in the backward pass, so that those of one part exist at once,
whatever ``micro_batch``: 12 bytes for each of 2^24 logits are 0.2 GB, where the 256 rows of one
sequence of LLaDA-8B took 0.4 GB. It costs a second product with the head. For LLaDA-8B (7.0 billion
weights in the layers, 0.52 in the head) and R of T tokens scored, forward and backward through
frozen weights are 2 (6.98 T + 0.52 R) billion multiplications: 0.52 R more are 2.0 % for R = 256 of
T = 456, and never above 3.5 %.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig

from minidrl import denoiser, sampler
from minidrl import features as feat
from minidrl.algorithms import Plan, Rollout
from minidrl.methods import Method, draw
from minidrl.run import checkpoints, config, distributed, runs
from minidrl.run.launch import LocalError, one_line
from minidrl.run.precheck import blank_rollout, method_of

RESIDENT = ("weights", "adapters", "optimizer", "reference", "rollout_weights")
TRANSIENT = ("activations", "layer", "logits", "rollout", "gradients", "earlier", "step")
FLOAT = 4  # bytes
# Float32 arrays of R x V that are alive at once, counted on a call of the head and its backward
# pass; a feature adds.
ARRAYS = {"logp": 3.0, "entropy": 2.25, "kl_ref": 4.25, "topk_logp": 1.0}
ARRAYS |= {"order_logp": 0.0, "position_logp": 1.0}
# And where R are the positions that a step passed over, of which these are made.
PASSED = {"order_logp": 5.25, "position_logp": 2.5}
ADDED = 3  # gradients of a trained head while two are added up: both and their sum
# Bytes a token of the vocabulary while the sampler draws: logits, log-probs and probs in float32,
# their sums in float64.
DRAW = 20


def predict(settings: config.Train, method: Method, rollout: Rollout, gpus: int) -> dict[str, int]:
    """Bytes by part (``RESIDENT``, ``TRANSIENT``), on each of ``gpus`` GPUs.

    ``rollout`` is a made-up one of the run's shape in which no response ends early: the rows of the
    head are those of the plan that the method draws on it. Several GPUs: weights, gradients and
    moments are cut evenly (minidrl/run/distributed.py); what is put together for a forward or backward
    at a time is counted under ``layer`` and ``rollout``. Raises ValueError for a model whose
    config.json cannot be had, and for a LoRA target that matches no module.
    """
    shape, family, stored = checkpoints.describe(settings.model)
    with torch.device("meta"):
        network = family.network(shape)
    if settings.task.prompt_format != "chat":  # whose prompts may be shorter than they are allowed
        sampler.check_positions(network, settings.task.prompt_length, settings.sampler.length)
    dtype = stored if settings.dtype == "stored" else getattr(torch, settings.dtype)
    own = settings.compute_dtype != "weights"
    compute = getattr(torch, settings.compute_dtype) if own else dtype
    plan = draw(method, rollout, torch.Generator().manual_seed(settings.seed))
    parts = _resident(settings, method, network, dtype, gpus)
    sizes = compute.itemsize, dtype.itemsize
    parts |= _transient(settings, method, rollout, plan, network, sizes, gpus)
    grown, copied = parts["optimizer"] // 2, torch.device(settings.device).type == "cuda"
    several = _share(plan.network_calls, gpus) > settings.micro_batch
    return parts | {"gradients": grown, "earlier": grown * several, "step": grown * copied}


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


class Resident:
    """The main memory of this process on Linux: its peak from now on, less what it holds now.

    Pages in main memory are counted (VmHWM and VmRSS of /proc/self/status), not tensors. Weights
    that are mapped from their files count as far as they were read: of an embedding, the rows of
    the tokens that occurred. What libraries take for themselves counts too, and memory that was
    freed before may be used again without being counted.
    """

    def __init__(self) -> None:
        self.before = None
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM falls to VmRSS
            self.before = _status("VmRSS")

    def peak(self) -> int | None:
        """Bytes; None where the system has no such counters."""
        return None if self.before is None else _status("VmHWM") - self.before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])  # kB, which are KiB


# ----------------------------------------------------------------------------------------- resident
def _count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def adapter_count(network: nn.Module, lora: config.Lora) -> int:
    """Parameters of the adapters; ValueError for a target that matches no module."""
    denoiser.refuse_targets(network, lora.target_modules)
    return sum(lora.rank * (m.in_features + m.out_features) for m in _targeted(network, lora))


def _targeted(network: nn.Module, lora: config.Lora) -> list[nn.Linear]:
    ends = tuple(f".{target}" for target in lora.target_modules)
    named = [(f".{name}", m) for name, m in network.named_modules() if isinstance(m, nn.Linear)]
    return [module for name, module in named if name.endswith(ends)]


def _resident(
    settings: config.Train, method: Method, network: nn.Module, dtype: torch.dtype, gpus: int
) -> dict[str, int]:
    count, size = _count(network), dtype.itemsize
    adapters = adapter_count(network, settings.lora) if settings.lora.rank else 0
    trained = FLOAT * adapters if adapters else size * count
    compared = method.kl is not None and method.kl.target == "reference" and not adapters
    own = settings.rollout_dtype != "float32"  # the sampler's dtype
    parts = {
        "weights": _quantized(network, size) if settings.quantize else size * count,
        "adapters": FLOAT * adapters,
        "optimizer": 2 * trained,
        "reference": size * count * compared,
        "rollout_weights": own
        * getattr(torch, settings.rollout_dtype).itemsize
        * (count + adapters),
    }
    return {name: math.ceil(value / gpus) for name, value in parts.items()}


def _quantized(network: nn.Module, size: int) -> float:
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    head = network.get_output_embeddings()
    small = sum(module.weight.numel() for module in linear if module is not head)
    return small * (1 / 2 + 1 / 64 + 1 / 4096) + size * (_count(network) - small)


# ---------------------------------------------------------------------------------------- transient
def _transient(
    settings: config.Train,
    method: Method,
    rollout: Rollout,
    plan: Plan,
    network: nn.Module,
    sizes: tuple[int, int],
    gpus: int,
) -> dict[str, int]:
    # ``sizes``: bytes of a number in the arithmetic, and of a weight.
    shape, lora, size = network.config, settings.lora, sizes[0]
    asked = settings.task.prompt_length + settings.sampler.length  # tokens of a sequence
    width = asked if plan.block_length is None else asked + settings.sampler.length
    tokens = min(settings.micro_batch, _share(plan.network_calls, gpus)) * width
    responses = max(len(rollout.response), settings.evaluate.n)
    drawn = min(settings.micro_batch, _share(responses, gpus))  # sequences of a rollout's call

    # One layer, a token: what it keeps, what its way back makes, what a reference's way there does.
    whole, forward = layer_bytes(shape, size, lora, width), _forward(shape, size, lora)
    kept, back, aside = whole, _gradients(shape, size, lora), 0
    if settings.gradient_checkpointing:
        kept, back = size * shape.hidden_size, back + whole
    if "kl_ref" in method.features:
        aside = forward

    unpacked = settings.quantize * size * shape.hidden_size * shape.intermediate_size
    there, returning = _gathered(network, *sizes, trained=not lora.rank) if gpus > 1 else (0, 0)
    body = drawn * asked * forward
    drawing = drawn * _candidates(settings, method) * DRAW * shape.vocab_size
    cache = drawn * asked * _cache(settings, shape, size)
    return {
        "activations": tokens * (shape.num_hidden_layers * kept + _norm(shape, size, lora)),
        "layer": tokens * max(back, aside) + returning + unpacked,
        "logits": _logits(settings, method, plan, shape, sizes, gpus),
        "rollout": max(body, drawing) + there + unpacked + cache,
    }


def layer_bytes(shape: PreTrainedConfig, size: int, lora: config.Lora, width: int) -> int:
    """Bytes a token that a layer keeps for its backward pass, in sequences of ``width`` tokens."""
    hidden, mlp, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    attention = heads * _head_dim(shape)
    kept = 2 * _norm(shape, size, lora) + 4 * size * attention + FLOAT * heads + size * width
    kept += 3 * size * mlp
    if not lora.rank:
        return kept + size * mlp
    # What goes into the adapters, in float32: a copy for each where the network is not. Where it
    # is, one tensor goes into several of them; that of o_proj is the result of the attention, which
    # has been counted.
    into = {("q_proj", "k_proj", "v_proj"): hidden, ("gate_proj", "up_proj"): hidden}
    into |= {("down_proj",): mlp} | ({("o_proj",): attention} if size < FLOAT else {})
    for names, inputs in into.items():
        hits = sum(target.endswith(names) for target in lora.target_modules)
        kept += FLOAT * inputs * (hits if size < FLOAT else min(hits, 1))
    return kept + FLOAT * lora.rank * len(lora.target_modules)


def _norm(shape: PreTrainedConfig, size: int, lora: config.Lora) -> int:
    # The last number is the norm's scale of the token, in float32.
    return shape.hidden_size * (FLOAT + (0 if lora.rank else 2 * size)) + FLOAT


def _gradients(shape: PreTrainedConfig, size: int, lora: config.Lora) -> int:
    # Of the two branches of the MLP; an adapter's is float32.
    return shape.intermediate_size * (size + (FLOAT if lora.rank else size))


def _forward(shape: PreTrainedConfig, size: int, lora: config.Lora) -> int:
    # A layer without a graph, at its widest: gate, up and their product; or, while the adapter of
    # one of them is added, what is there and its result in float32, before and after its scale.
    there = {"gate_proj": size, "up_proj": 2 * size}
    adapted = lora.target_modules if lora.rank else []
    wide = [there[name] + 2 * FLOAT for name in there if any(x.endswith(name) for x in adapted)]
    return shape.intermediate_size * max([3 * size, *wide]) + 2 * size * shape.hidden_size


def _head_dim(shape: PreTrainedConfig) -> int:
    own = getattr(shape, "head_dim", None)
    return own or shape.hidden_size // shape.num_attention_heads


def _cache(settings: config.Train, shape: PreTrainedConfig, size: int) -> int:
    # Keys and values of every layer.
    width = shape.num_key_value_heads * _head_dim(shape)
    return 0 if settings.sampler.cache == "none" else 2 * size * shape.num_hidden_layers * width


def _gathered(network: nn.Module, size: int, weight: int, *, trained: bool) -> tuple[int, int]:
    """Bytes of whole tensors on each GPU, the most on the way there and on the way back.

    There: a layer, the next one, the embedding (or the head, which is as large); or the embedding
    and what it is copied from. Back: the first three, the layer's gradient and that of the layer
    before, on its way to the sum, ``weight`` bytes a number. At the end the embedding, its gradient
    and that of a layer; then only its own gradient, twice. All the while the gradient of the head,
    on its way to the sum, which FSDP2 keeps until the backward has ended.
    """
    layer = _count(network.model.layers[0])
    embedding = network.config.vocab_size * network.config.hidden_size
    there = size * (max(2 * layer, embedding) + embedding)
    if not trained:
        return there, there
    middle = (3 * size + weight) * layer + size * embedding
    end = max(2 * size * embedding + weight * layer, (size + weight) * embedding)
    return there, max(there, middle, end) + weight * embedding


def _candidates(settings: config.Train, method: Method) -> int:
    # Positions of a sequence at which a step of the sampler applies the head.
    completes = any(name.startswith("one_step") for name in method.needs)
    block = completes or settings.sampler.order == "low_confidence"
    return settings.sampler.block_length if block else settings.sampler.tokens_per_step


def _share(total: int, gpus: int) -> int:
    # As distributed.share_of cuts.
    return -(-total // gpus)


class _Call(NamedTuple):
    """A use of the head: on which rows of a state's (at most ``most``), and what is made of them.

    ``arrays``: float32 arrays of V a row, counted in ``ARRAYS`` and ``PASSED``.
    """

    rows: Int[Tensor, " S"]
    most: int
    arrays: float


def _calls(settings: config.Train, method: Method, plan: Plan) -> list[_Call]:
    scored = plan.scored.flatten(0, 1)
    rows = scored.sum(-1)
    if settings.sampler.threshold is not None and plan.replay:  # the most that a step may reveal
        rows = settings.sampler.block_length * (rows > 0)
    calls = [_Call(rows, int(rows.max()), sum(ARRAYS[name] for name in method.features))]
    for name in PASSED.keys() & set(method.features):
        block, chooses = settings.sampler.block_length, settings.sampler.order == "low_confidence"
        left = plan.hidden.flatten(0, 1)[:, -settings.sampler.length :] & ~scored
        current = scored.unflatten(1, (-1, block)).any(-1)
        passed = left.unflatten(1, (-1, block)).sum(-1) * current
        calls.append(_Call(passed.sum(-1) * chooses, block, PASSED[name]))
    return calls


def _logits(
    settings: config.Train,
    method: Method,
    plan: Plan,
    shape: PreTrainedConfig,
    sizes: tuple[int, int],
    gpus: int,
) -> int:
    # Of the micro-batch that needs the most: what the head makes of its rows, and its gradient
    # where it is trained; between several GPUs that is summed in the dtype of the weights, when the
    # head that was gathered has gone.
    size, weight = sizes
    array, head = FLOAT * shape.vocab_size, size * shape.vocab_size * shape.hidden_size
    calls, gradient = _calls(settings, method, plan), 0 if settings.lora.rank else head
    most = 0
    for states in feat.state_chunks(plan, settings.micro_batch):
        rows = [int(call.rows[states].sum()) for call in calls]
        cut = [feat.head_parts(len(states) * call.most, shape.vocab_size) for call in calls]
        parts = [max(1, count) for count in cut]
        at_once = [math.ceil(count / part) for count, part in zip(rows, parts, strict=True)]

        # A part as it is read, beside the gradient that earlier parts have left. The first call's
        # log-probabilities stay while the second is made.
        read = [count * call.arrays * array for count, call in zip(at_once, calls, strict=True)]
        kept = array * rows[0] if parts[0] == 1 else 0
        read = max(read[:1] + [kept + other for other in read[1:]])
        reading = read + (gradient if max(parts) > 1 else 0)
        # The head's own way back: a gradient of the logits, and two of its weights being added up;
        # that of a second call waits for the first one's.
        added = at_once[: 1 if parts[-1] == 1 else None]
        adding = array * max(added) + gradient * (ADDED if sum(parts) > 1 else 1)
        hidden = sum(rows) * 2 * size * shape.hidden_size
        summing = gradient // size * weight * (gpus > 1)
        most = max(most, math.ceil(max(reading, adding, summing)) + hidden)
    return most + head * (gpus > 1)


# ----------------------------------------------------------------------------------------- of a run
def predicted_memory(settings: config.Train, gpus: int = 1) -> dict[str, int]:
    """Bytes by part that the run will need on each GPU."""
    distributed.check_compute_dtype(settings, gpus)
    method = method_of(settings)
    made = blank_rollout(method, settings, settings.num_prompts)
    return predict(settings, method, made, gpus)


def check(settings: config.Train) -> None:
    """ValueError for a run whose predicted peak is beyond the memory of its device."""
    processes = distributed.num_processes()
    parts = predicted_memory(settings, processes)
    largest = max(parts, key=parts.get)
    said = f"{largest} alone {parts[largest] / 1e9:.1f}; python -m minidrl memory lists the parts"
    _refuse(peak(parts), settings.device, processes, said)


def check_pretraining(settings: config.Pretrain) -> None:
    """ValueError for a network, or a batch, that the device cannot hold.

    Weights, gradients and two moments in float32, and what the layers keep of a batch.
    """
    sizes, width = settings.network, settings.task.prompt_length + settings.sampler.length
    square = 4 * sizes.hidden_size**2 + 3 * sizes.hidden_size * sizes.intermediate_size
    kept = layer_bytes(sizes, FLOAT, config.Lora(), width)
    layers, tokens = sizes.num_hidden_layers, settings.batch_size * width
    asked = layers * (4 * FLOAT * square + tokens * kept)
    said = f"{layers} layers of {sizes.hidden_size}, {tokens} tokens a batch"
    _refuse(asked, settings.device, 1, said)


def main_memory() -> int:
    """Bytes of main memory that this process may have: the machine's, or those of its container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    told = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(whole, int(told)) if told.isdecimal() else whole


def _refuse(asked: int, device: str, processes: int, said: str) -> None:
    room, name = main_memory() // processes, "this machine"
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        room, name = torch.cuda.get_device_properties(device).total_memory, device
    if asked > room:
        got = f"{asked / 1e9:.1f} GB predicted at the peak ({said})"
        raise ValueError(f"memory: got {got}; allowed the {room / 1e9:.1f} GB of {name}")


def report_peak(settings: config.Train, device: torch.device) -> None:
    """One line: the peak that was predicted and the one that was measured."""
    predicted = peak(predicted_memory(settings, distributed.num_processes())) / 1e9
    found = measured(device)
    told = "not measured on a CPU" if found is None else f"measured {found / 1e9:.3f} GB"
    if distributed.is_main():
        tqdm.write(f"memory: predicted {predicted:.3f} GB at its peak, {told}", file=sys.stderr)


_LOWER = {  # where memory runs out -> what to change
    "loading": "dtype bfloat16, or quantize true with lora.rank from 1",
    "evaluation": "a smaller micro_batch",
    "rollout": "a smaller micro_batch",
    "rollout_kl": "a smaller micro_batch",
    "scoring": "a smaller micro_batch",
    "update": "a smaller micro_batch or lora.rank, or gradient_checkpointing true",
}


def out_of_memory(
    error: torch.OutOfMemoryError, settings: config.Train, out: Path, phase: str
) -> LocalError:
    """The line for it: in which phase of a step, what to lower, and what is kept."""
    name = phase or "loading"
    found = runs.checkpoint_folders(out)
    kept = f"{found[-1]} is kept, --resume goes on" if found else "no checkpoint was due yet"
    said, size = one_line(error).partition(". GPU")[0], settings.micro_batch
    where = f"out of memory in the {name} ({said})"
    return LocalError(f"micro_batch: got {size}, {where}; try {_LOWER[name]}; {kept}")
