"""How many bytes a run will need, part by part, from its settings and a config.json: before anything is loaded.

Resident during the whole run, for n weights of which m are trained (adapters only, where there are any):

    weights          n bytes times the element size; in 4 bits a linear layer takes 1/2 + 1/64 + 1/4096 bytes a weight:
                     two in a byte, an 8-bit scale for 64, a float32 for 256 scales. Embedding and head stay as they are
    adapters         r (inputs + outputs) for each linear layer, in float32 over whatever base
    gradients        m times the element size; they exist from the first backward pass of an update on
    optimizer        2 m, AdamW's two moments in the element size of what is trained
    reference        n, only if a method compares with one and there are no adapters to switch off
    rollout_weights  n, only for a sampler of its own dtype

Transient. N tokens are a micro-batch of sequences; D, A, F, V the widths of hidden state, attention, MLP and vocabulary; e the
element size. The parts below are sums of the tensors that transformers' layers keep for a backward pass:

    activations      what autograd keeps of the body. A layer keeps N times
                         norms      2 (4 D + [2 e D]), the float32 copy, [the two factors of the scale]
                         attention  4 e A + 4 heads + e T, queries, keys, values, result; log of the normaliser; mask
                         MLP        3 e F [+ e F]
                         adapters   4 r + their input in float32, each (one tensor for several where it is float32 already)
                     ([...]: only where the base is trained.) With gradient checkpointing a layer keeps its input, e D, instead
    layer            one layer on its way back: two gradients of width F, and with checkpointing what it had not kept; over 4
                     bits, D F unpacked weights
    logits           float32 arrays of R x V, R the rows to which the head is applied at a time: logits, log-probabilities,
                     the rows that are read, a gradient; more for more features
    rollout          the larger of one layer's forward and the sampler's arrays of V, in float64 where it sums; the cache
    step             the optimiser's temporary copy of what it updates, on a GPU

The peak is what is resident + max(activations + max(layer, logits), rollout, step).

The vocabulary head is not cut into recomputed chunks, on purpose. A row of 126,464 logits costs 2 MB in the update, so that a
state of 256 rows costs 0.5 GB, and ``micro_batch`` says how many there are at a time. A micro-batch of one sequence is
already larger than the 295 tokens or so from which an H100 computes rather than waits for weights: memory that chunks
would save could only buy larger micro-batches, which are not faster.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedConfig

from minidrl import algorithms as alg
from minidrl import config, denoiser

RESIDENT = ("weights", "adapters", "gradients", "optimizer", "reference", "rollout_weights")
TRANSIENT = ("activations", "layer", "logits", "rollout", "step")
FLOAT = 4  # bytes
# Float32 arrays of R x V that are alive at once, counted on algorithms.state_features and its backward pass; a feature adds.
ARRAYS = {"logp": 4.0, "entropy": 2.25, "kl_ref": 4.25, "topk_logp": 1.0, "order_logp": 1.5}
DRAW = 20  # bytes a token of the vocabulary while the sampler draws: logits, log-probs, probs in float32, their sums in float64


def predict(settings: config.Train, method: alg.Method, rollout: alg.Rollout, gpus: int = 1) -> dict[str, int]:
    """Bytes by part (``RESIDENT``, ``TRANSIENT``), on each of ``gpus`` GPUs.

    ``rollout`` is a made-up one of the run's shape in which no response ends early: the rows of the head are those of the plan
    that the method draws on it. Several GPUs: weights, gradients and moments are cut evenly (minidrl/distributed.py); what is
    put together for a forward or backward at a time is counted under ``layer`` and ``rollout``.
    Raises ValueError for a model whose config.json cannot be had, and for a LoRA target that matches no module.
    """
    shape, family, stored = denoiser.describe(settings.model)
    with torch.device("meta"):
        network = family.network(shape)
    dtype = stored if settings.dtype == "stored" else getattr(torch, settings.dtype)
    resident = _resident(settings, method, network, dtype, gpus)
    parts = resident | _transient(settings, method, rollout, network, dtype, gpus)
    copied = torch.device(settings.device).type == "cuda"
    return parts | {"step": resident["gradients"] if copied else 0}


def peak(parts: dict[str, int]) -> int:
    """Bytes at the worst moment of a step."""
    update = parts["activations"] + max(parts["layer"], parts["logits"])
    return sum(parts[name] for name in RESIDENT) + max(update, parts["rollout"], parts["step"])


def table(parts: dict[str, int]) -> str:
    """The parts and their peak, one a line, in decimal gigabytes."""
    rows = [(name, parts[name]) for name in (*RESIDENT, *TRANSIENT)] + [("peak", peak(parts))]
    return "\n".join(f"{name:<16}{size / 1e9:>10.3f} GB" for name, size in rows)


def measured(device: torch.device) -> int | None:
    """The most bytes that were allocated on a GPU since the run began; None on a CPU, where nobody counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# ------------------------------------------------------------------------------------------------------------- resident
def _count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def adapter_count(network: nn.Module, lora: config.Lora) -> int:
    """Parameters of the adapters; ValueError for a target that matches no module."""
    denoiser.refuse_targets(network, lora.target_modules)
    return sum(lora.rank * (m.in_features + m.out_features) for m in _targeted(network, lora))


def _targeted(network: nn.Module, lora: config.Lora) -> list[nn.Linear]:
    linear = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return [m for name, m in linear if any(f".{name}".endswith(f".{target}") for target in lora.target_modules)]


def _resident(settings: config.Train, method: alg.Method, network: nn.Module, dtype: torch.dtype, gpus: int) -> dict[str, int]:
    count, size = _count(network), dtype.itemsize
    adapters = adapter_count(network, settings.lora) if settings.lora.rank else 0
    trained = FLOAT * adapters if adapters else size * count
    compared = method.kl is not None and method.kl.target == "reference" and not adapters
    rounded = torch.finfo(getattr(torch, settings.rollout_dtype)).bits // 8 if settings.rollout_dtype != "float32" else 0
    parts = {
        "weights": _quantized(network, size) if settings.quantize else size * count,
        "adapters": FLOAT * adapters,
        "gradients": trained,
        "optimizer": 2 * trained,
        "reference": size * count * compared,
        "rollout_weights": rounded * (count + adapters),
    }
    return {name: math.ceil(value / gpus) for name, value in parts.items()}


def _quantized(network: nn.Module, size: int) -> float:
    head = network.get_output_embeddings()
    small = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear) and m is not head)
    return small * (1 / 2 + 1 / 64 + 1 / 4096) + size * (_count(network) - small)


# ------------------------------------------------------------------------------------------------------------ transient
def _transient(settings: config.Train, method: alg.Method, rollout: alg.Rollout, network: nn.Module, dtype, gpus: int) -> dict:
    shape, lora, size = network.config, settings.lora, dtype.itemsize
    plan = method.plan(rollout, torch.Generator().manual_seed(settings.seed))
    length = settings.sampler.length
    width = settings.task.prompt_length + (length if plan.block_length is None else 2 * length)
    tokens = settings.micro_batch * width
    layer, again = layer_bytes(shape, size, lora, width), settings.gradient_checkpointing
    arrays = FLOAT * sum(ARRAYS[name] for name in method.features)
    kept = size * shape.hidden_size if again else layer
    whole = _gathered(network, size, gpus) + settings.quantize * size * shape.hidden_size * shape.intermediate_size
    drawn = settings.micro_batch * _candidates(settings, method) * DRAW * shape.vocab_size
    parts = {
        "activations": tokens * (shape.num_hidden_layers * kept + _norm(shape, size, lora)),
        "layer": tokens * (_gradients(shape, size, lora) + layer * again) + whole,
        "logits": _rows(settings, method, plan) * arrays * shape.vocab_size,
        "rollout": max(tokens * _forward(shape, size, lora), drawn) + whole + tokens * _cache(settings, shape, size),
    }
    return {name: math.ceil(value) for name, value in parts.items()}


def layer_bytes(shape: PreTrainedConfig, size: int, lora: config.Lora, width: int) -> int:
    """Bytes a token that one layer keeps for its backward pass, in sequences of ``width`` tokens."""
    hidden, mlp, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    attention = heads * (getattr(shape, "head_dim", None) or hidden // heads)
    kept = 2 * _norm(shape, size, lora) + 4 * size * attention + FLOAT * heads + size * width + 3 * size * mlp
    if not lora.rank:
        return kept + size * mlp
    # What goes into the adapters, in float32: a copy for each where the network is not. Where it is, one tensor goes into
    # several of them; that of o_proj is the result of the attention, which has been counted.
    into = {("q_proj", "k_proj", "v_proj"): hidden, ("gate_proj", "up_proj"): hidden, ("down_proj",): mlp}
    into |= {("o_proj",): attention} if size < FLOAT else {}
    for names, inputs in into.items():
        hits = sum(target.endswith(names) for target in lora.target_modules)
        kept += FLOAT * inputs * (hits if size < FLOAT else min(hits, 1))
    return kept + FLOAT * lora.rank * len(lora.target_modules)


def _norm(shape: PreTrainedConfig, size: int, lora: config.Lora) -> int:
    return shape.hidden_size * (FLOAT + (0 if lora.rank else 2 * size)) + 2 * FLOAT


def _gradients(shape: PreTrainedConfig, size: int, lora: config.Lora) -> int:
    # Of the two branches of the MLP; an adapter's is float32.
    return shape.intermediate_size * (size + (FLOAT if lora.rank else size))


def _forward(shape: PreTrainedConfig, size: int, lora: config.Lora) -> int:
    # A layer without a graph, at its widest: gate, up and their product; with adapters the float32 of base and adapter.
    wide = 3 * size if not lora.rank or size == FLOAT else 2 * size + 2 * FLOAT
    return shape.intermediate_size * wide + 2 * size * shape.hidden_size


def _cache(settings: config.Train, shape: PreTrainedConfig, size: int) -> int:
    # Keys and values of every layer.
    heads = shape.num_attention_heads
    width = shape.num_key_value_heads * (getattr(shape, "head_dim", None) or shape.hidden_size // heads)
    return 0 if settings.sampler.cache == "none" else 2 * size * shape.num_hidden_layers * width


def _gathered(network: nn.Module, size: int, gpus: int) -> int:
    # A layer, the next one, the gradient of the first; the embedding or the head.
    embedding = network.config.vocab_size * network.config.hidden_size
    return size * (3 * _count(network.model.layers[0]) + embedding) if gpus > 1 else 0


def _candidates(settings: config.Train, method: alg.Method) -> int:
    """Positions of a sequence at which a step of the sampler applies the head."""
    block = settings.sampler.order == "low_confidence" or any(name.startswith("one_step") for name in method.needs)
    return settings.sampler.block_length if block else settings.sampler.tokens_per_step


def _rows(settings: config.Train, method: alg.Method, plan: alg.Plan) -> int:
    """The most rows to which the head is applied in one micro-batch of the plan."""
    count = plan.scored.flatten(0, 1).sum(-1)
    if "order_logp" in method.features:  # and the positions that the step passed over
        hidden = plan.hidden.flatten(0, 1)[:, -settings.sampler.length :].sum(-1)
        count = hidden.clamp(max=settings.sampler.block_length)
    return max((int(count[states].sum()) for states in alg.state_chunks(plan, settings.micro_batch)), default=0)
