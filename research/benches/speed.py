"""Seconds against the arithmetic floor.

    python -m research.benches.speed [--threads 2] [--compile] [--methods all] [--device cpu]

With `--config tiny_configs/countdown_gpu.yaml --random tiny_configs/countdown_gpu_base.yaml` the same for the network of 12 M
parameters that is meant for a GPU: with random weights, since none ship, and made-up rewards; on a CPU 16 responses a step.

For the model of 135 M parameters, fine-tuned by the commands in docs/real_weights.md, at 32 responses a step:

    python -m research.benches.speed --config tiny_configs/smollm2_135m_rl.yaml --methods reinforce --threads 1 \
      --set dtype=bfloat16 --set num_prompts=4

The floor of a phase is the matrix products of the network's layers divided by the rate at which this machine multiplies large
matrices of the weights' dtype; the vocabulary head is left out. It counts only network calls that the method needs, and equal
texts of a phase once: one forward for a rolled-out state and for a state that old weights or a reference score; for a state
of the update also the way back, of two products for each of the forward, or of one where the weights are frozen. With
adapters an update's state thus costs about two forwards, otherwise three. A graph-free first pass is overhead, not floor. The
rate is measured before every row, because that of a shared machine drifts. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from tqdm import tqdm

from minidrl import algorithms as alg
from minidrl import denoiser, loop, methods, sampler
from minidrl.run import checkpoints, config, memory
from minidrl.run.train import start
from minidrl.tasks import Verdict
from minidrl.tasks.countdown import tokenizer
from research.tables import markdown


def seconds(call, repeats: int = 7) -> float:
    """Median wall time of a call, after one warm-up; a GPU is waited for."""
    call()
    times = []
    for _ in range(repeats):
        started = now()
        call()
        times.append(now() - started)
    return statistics.median(times)


def now() -> float:
    """The time, once a GPU has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def machine_rate(device: torch.device, quick: bool = False, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations a second of a large matrix product."""
    size = 64 if quick else 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, 30)


def forward_flops(model: denoiser.Denoiser, width: int) -> float:
    """Matrix products of one sequence's body: 2 a weight a token, and 4 width hidden a token and layer for attention."""
    c = model.model.config
    body = sum(p.numel() for p in model.model.model.layers.parameters())
    return width * (2 * body + 4 * width * c.hidden_size * c.num_hidden_layers)


def update_flops(model: denoiser.Denoiser, width: int) -> float:
    """Of a forward with its backward: a product of two factors has two gradients, and frozen weights need none."""
    frozen = sum(p.numel() for p in model.model.model.layers.parameters() if not p.requires_grad)
    return 3 * forward_flops(model, width) - 2 * width * frozen


@torch.no_grad()
def fewest_operations(model: denoiser.Denoiser, tokens: torch.Tensor) -> torch.Tensor:
    """The hidden states of rows without padding, in as few operations as torch has for them: what a forward could take."""
    c, h = model.model.config, F.embedding(tokens, model.model.model.embed_tokens.weight)
    heads, place = c.num_attention_heads, torch.arange(tokens.shape[1], device=tokens.device)[None]
    cos, sin = (table[:, :, None] for table in model.model.model.rotary_emb(h, place))
    sin = torch.cat([-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]], -1)
    norm = functools.partial(F.rms_norm, normalized_shape=h.shape[-1:], eps=c.rms_norm_eps)
    for layer in model.model.model.layers:
        a, mlp = layer.self_attn, layer.mlp
        inputs = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        gates = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        x = norm(h, weight=layer.input_layernorm.weight)
        qk, v = F.linear(x, inputs).unflatten(-1, (3 * heads, -1)).split([2 * heads, heads], 2)
        qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
        q, k, v = (y.transpose(1, 2) for y in (*qk.chunk(2, 2), v))
        h = h + a.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = F.linear(norm(h, weight=layer.post_attention_layernorm.weight), gates).chunk(2, -1)
        h = h + mlp.down_proj(F.silu(gate) * up)
    return norm(h, weight=model.model.model.norm.weight)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """float32 as such: TensorFloat-32, which a config may ask for, rounds factors to 11 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def forward_rows(run: loop.Run, rate: float, count: int, repeats: int) -> list[dict]:
    """Forwards of ``count`` rows, an eighth or a half at a time: by transformers' layers, and in the fewest operations."""
    width, rows = run.task.prompt_length + run.settings.sampler.length, []
    floor, encode = count * forward_flops(run.model, width) / rate, torch.no_grad()(run.network.encode)
    for size in (max(1, count // 8), count // 2):
        tokens = torch.randint(5, (size, width), device=run.model.device)
        everything = torch.ones_like(tokens, dtype=torch.bool)
        with full_precision():
            expected = encode(tokens, everything)
            torch.testing.assert_close(fewest_operations(run.model, tokens), expected, atol=1e-4, rtol=1e-4)
        calls = {
            "transformers": lambda t=tokens, e=everything: encode(t, e),
            "fewest": lambda t=tokens: fewest_operations(run.model, t),
        }
        for name, call in calls.items():
            rows.append(table_row(f"forward, {name}, {size} rows", count / size * seconds(call, 6 * repeats), floor))
    return rows


def table_row(phase: str, took: float, floor: float) -> dict:
    """Seconds of a phase against those of its floor."""
    return {"phase": phase, "ms": 1000 * took, "floor, ms": 1000 * floor, "share of floor": floor / took}


def sampler_row(run: loop.Run, rate: float, order: str, count: int, repeats: int) -> dict:
    """One rollout of ``count`` responses of a prompt without padding, and the bare forwards that it needs."""
    s = dataclasses.replace(run.settings.sampler, order=order)
    width = run.task.prompt_length + s.length
    device = run.model.device
    prompt = torch.full((count, run.task.prompt_length), 5, device=device)
    mask, tokens = torch.ones_like(prompt, dtype=torch.bool), torch.full((count, width), 5, device=device)
    everything = torch.ones_like(tokens, dtype=torch.bool)

    def loop():
        return sampler.generate(
            run.network,
            prompt,
            mask,
            s,
            eos_token_id=None,
            generator=torch.Generator().manual_seed(0),
            micro_batch=run.settings.micro_batch,
        )

    @torch.no_grad()
    def bare():
        for _ in range(s.num_steps):
            run.network.encode(tokens, everything)

    floor = count * s.num_steps * forward_flops(run.model, width) / rate
    took, forwards = seconds(loop, repeats), seconds(bare, repeats)
    return table_row(f"rollout, {order}", took, floor) | {"bare forwards, ms": 1000 * forwards}


def step_row(run: loop.Run, rate: float, steps: int) -> dict:
    """An RL step of the config: rollout, scoring, update; on a GPU also its peak, predicted and counted."""
    gpu = run.model.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    rows, needed = [], []
    for i in range(steps):
        with texts_seen(run) as texts:
            rows.append(loop.take_step(run, i))
        needed.append(needed_flops(run, rows[-1], texts))
    rows, floor = rows[1:], statistics.median(needed[1:]) / rate
    took = statistics.median(sum(v for k, v in r.items() if k.startswith("seconds/")) for r in rows)
    row = table_row(f"RL step, {run.method.name}", took, floor)
    if gpu:
        row["predicted, GB"] = memory.peak(memory.predicted_memory(run.settings)) / 1e9
        row["counted, GB"] = memory.measured(run.model.device) / 1e9
    return row


@contextlib.contextmanager
def texts_seen(run: loop.Run) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """What ``encode`` is given meanwhile, (phase, texts) of each call."""
    seen, encode = [], denoiser.Denoiser.encode

    def noted(network: denoiser.Denoiser, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        seen.append((run.clock.now, tokens))
        return encode(network, tokens, mask)

    denoiser.Denoiser.encode = noted
    try:
        yield seen
    finally:
        denoiser.Denoiser.encode = encode


def needed_flops(run: loop.Run, row: dict, texts: list[tuple[str, torch.Tensor]]) -> float:
    """What a step needs. The first pass scores the states of the update once more: that much scoring is overhead."""
    calls = {phase: row.get(f"network_calls/{phase}", 0) for phase in ("rollout", "scoring", "update")}
    for phase, given in texts:
        calls[phase] -= len(given) - len(given.unique(dim=0))
    s = run.settings.sampler
    prompt = max([given.shape[1] - s.length for _, given in texts], default=run.task.prompt_length)
    drawn = scored = forward_flops(run.model, prompt + s.length)
    updated = update_flops(run.model, prompt + s.length)
    if run.model.block_length is not None:  # a rollout sees the blocks up to the current one, a staircase two responses
        ends = range(s.block_length, s.length + 1, s.block_length)
        drawn = statistics.mean(forward_flops(run.model, prompt + end) for end in ends)
        scored = forward_flops(run.model, prompt + 2 * s.length)
        updated = update_flops(run.model, prompt + 2 * s.length)
    more = max(calls["scoring"] - calls["update"], 0)
    return calls["rollout"] * drawn + calls["update"] * updated + more * scored


def block_wise(name: str) -> bool:
    """Whether a row asks for a block-causal network."""
    return methods.METHODS[name].plan.func in (alg.block_elbo_plan, alg.block_replay_plan)


def blocks_of(name: str, length: int) -> dict[str, Any]:
    """The sampler's settings of a row that asks for a block-causal network: three blocks."""
    return {"sampler.attention": "block_causal", "sampler.block_length": length // 3} if block_wise(name) else {}


def changes_of(name: str) -> dict[str, Any]:
    """What a row changes in the config: the method, and the order that it is about."""
    order = methods.METHODS[name].order
    return {"method": name, "method_options": {}} | ({} if order == "any" else {"sampler.order": order})


def run_of(arguments: argparse.Namespace, **changes) -> loop.Run:
    """The config's run; with --random that of a network of random weights, block-causal where the row asks for it."""
    overrides = {"threads": arguments.threads, "compile": arguments.compile, "device": arguments.device, **changes}
    overrides |= {"num_prompts": 1} if arguments.quick else {}
    overrides |= dict(text.split("=", 1) for text in arguments.set)
    if arguments.random:
        network, task = config.load(config.Pretrain, arguments.random), config.load(config.Train, arguments.config)
        blocks = blocks_of(changes.get("method", task.method), network.sampler.length)
        size = blocks.get("sampler.block_length")
        model = denoiser.build(dataclasses.asdict(network.network), tokenizer(), 0, block_length=size)
        checkpoints.save(model, tokenizer(), arguments.folder)
        overrides |= {"model": arguments.folder, **blocks}
        overrides |= {"num_prompts": 2, "micro_batch": 64} if arguments.device == "cpu" else {}
    run = start(config.load(config.Train, arguments.config, overrides))
    if arguments.random:  # which solves nothing: without rewards there is no update
        object.__setattr__(run.task, "judge", made_up_verdict)
    return run


def made_up_verdict(puzzle: Any, text: str) -> Verdict:
    """A reward for each answer, of no meaning."""
    return Verdict(zlib.crc32(text.encode()) % 1000 / 999, False, {})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="tiny_configs/countdown_cpu.yaml")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--methods", default="", help="RL steps of these rows instead (comma-separated, or all)")
    parser.add_argument("--steps", type=int, default=6, help="RL steps of a row; the first is not counted")
    parser.add_argument(
        "--random", help="a config of pretrain: its network with random weights, in the place of the config's base"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the config")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="8 rows once: only to see that everything runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as arguments.folder:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Print the table."""
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision(config.load(config.Train, arguments.config).matmul_precision)
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{arguments.threads} threads"
    count, repeats, steps = (8, 1, 2) if arguments.quick else (256, 5, arguments.steps)
    print(f"{name}, products at {machine_rate(device, arguments.quick) / 1e9:.0f} GFLOP/s, compile: {arguments.compile}\n")
    if arguments.methods:
        # The config's base is what it is.
        names = [name for name in methods.METHODS if arguments.random or not block_wise(name)]
        names = names if arguments.methods == "all" else arguments.methods.split(",")
        rows = []
        for name in tqdm(names):
            run = run_of(arguments, **changes_of(name))
            rate = machine_rate(device, arguments.quick, run.model.model.dtype)
            rows.append(step_row(run, rate, steps))
            numbers = (f"{key} {value:.4g}" for key, value in rows[-1].items() if key != "phase")
            tqdm.write(f"{name}: {', '.join(numbers)}")  # at once: what comes after may fail
    else:
        run = run_of(arguments)
        rows = forward_rows(run, machine_rate(device, arguments.quick), count, repeats)
        rows += [sampler_row(run, machine_rate(device, arguments.quick), order, count, repeats) for order in sampler.ORDERS]
        rows.append(step_row(run, machine_rate(device, arguments.quick), steps))
    columns = ("phase", "ms", "bare forwards, ms", "floor, ms", "share of floor", "predicted, GB", "counted, GB")
    print(markdown(pd.DataFrame(rows, columns=columns if device.type == "cuda" else columns[:5])))


if __name__ == "__main__":
    main()
