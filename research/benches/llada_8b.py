"""One RL step at the exact shape of LLaDA-8B on one GPU, weights being random: `python -m research.benches.llada_8b`.

The recipe is tiny_configs/llada_8b_lora.yaml: 2 prompts of 200 tokens, 6 responses each, 256 tokens in 128 steps, 12 updates,
3 masks, adapters of rank 128. Loop, sampler and gradient are the shipped ones; weights, tokenizer, prompts and rewards are
made up, and no response ends early. The first step is a warm-up; the second is the one that is reported.

    --predict      nothing is run: products and bytes as predicted, and the seconds that they take at best at given rates
    --shape tiny   the same with a network that a CPU runs in seconds
    --device cpu   one reduced step at full size, from files: `reduced` below; --shape names other models too, among them
                   a2d-0.6b, all of whose weights are trained, by tiny_configs/a2d_06b_24gb.yaml
    --reduced      the same on any device and with any shape

A reduced step writes up to 17 GB for a while. On a CPU without bfloat16 instructions its way back takes hours at full size.

Counted are the products that the method needs. Of a sequence of T tokens of which R rows go through the head, forward:

    base       2 T B          B weights of the layers
    attention  4 T^2 A L      A its width, L layers
    head       2 R V D
    adapters   2 T M          M weights of the adapters, in float32

and backward as much for base and head, whose weights are frozen, and twice as much for attention and adapters. (0.4 % of the
base's nobody needs: gradients of what enters q, k and v of the first layer.) What is repeated is listed apart: the forward of
the layers by gradient checkpointing, that of the head where it is applied in several parts. Float32 products are those of the
recipe's matmul_precision.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minidrl import denoiser, loop
from minidrl import features as feat
from minidrl.run import checkpoints, config, memory, train
from minidrl.run.precheck import blank_rollout, method_of
from minidrl.tasks import Verdict
from research.tables import markdown

RECIPE = Path(__file__).parents[2] / "tiny_configs/llada_8b_lora.yaml"
MIDDLE = RECIPE.with_name("a2d_06b_24gb.yaml")
LLADA = "GSAI-ML/LLaDA-8B-Instruct"

# Other models at full size: config.json as far as it decides what is computed, the id of the mask, and where both were read.
QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
SDAR = {**QWEN, "model_type": "sdar", "architectures": ["SDARForCausalLM"], "attention_bias": False, "head_dim": 128}
SDAR |= {"num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 32768, "eos_token_id": 151643}
SDAR |= {"block_size": 4}  # which the page of SDAR-4B-Chat lacks; JetAstra/SDAR: 4 where a name has no -b8, -b16, ...
SHAPES: dict[str, tuple[dict, int]] = {
    "8b": (checkpoints.PUBLISHED[LLADA], 126336),
    # config.json of apple/DiffuCoder-7B-Instruct (69c039a), which is trained from Dream's format; a copy of Dream-Coder has the
    # same sizes. The page of Dream-v0-Instruct-7B itself was not at hand.
    "dream-7b": (
        {
            **QWEN,
            "model_type": "Dream",
            "architectures": ["DreamModel"],
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "mask_token_id": 151666,
            "eos_token_id": 151643,
        },
        151666,
    ),
    # Sizes of Qwen3-1.7B, on which it was trained (README of JetAstra/SDAR). They make 4.06 GB, as the model.safetensors of
    # JetLM/SDAR-1.7B-Chat has, whose own config.json was not at hand.
    "sdar-1.7b": (
        {**SDAR, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
        151669,
    ),
    # config.json of JetLM/SDAR-4B-Chat.
    "sdar-4b": (
        {**SDAR, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
        151669,
    ),
    # Sizes of Qwen/Qwen3-8B (its config.json). They make 16.4 GB, as the four files of JetLM/SDAR-8B-Chat do; as before.
    "sdar-8b": (
        {**SDAR, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
        151669,
    ),
    "a2d-0.6b": (checkpoints.PUBLISHED["dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1"], 151669),
}
SHARDS = 6  # files of published LLaDA-8B
TINY = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 192, "embedding_size": 500}
TINY |= {"vocab_size": 500, "mask_token_id": 498, "eos_token_id": 497}
END = 1  # the made-up tokenizer's [EOS]
AIMS = {"rollout": 0.60, "update": 0.45}


# ------------------------------------------------------------------------------------------------------------ made up
@dataclasses.dataclass(frozen=True)
class Words:
    """A task of ``prompt_length`` random words, whose reward is a number between 0 and 1 made from the response's letters."""

    prompt_length: int
    prompt_format: str = "plain"

    def problems(self, count: int, rng: np.random.Generator) -> list[SimpleNamespace]:
        words = rng.integers(2, 100, (count, self.prompt_length))
        return [SimpleNamespace(prompt=" ".join(f"w{i}" for i in row)) for row in words]

    def judge(self, problem: Any, response: str) -> Verdict:
        return Verdict(zlib.crc32(response.encode()) / 2**32, False, {})


def words_tokenizer(size: int, mask: int) -> PreTrainedTokenizerFast:
    """Every token a word; [MASK] where the network has it, and an [EOS] that the network never draws."""
    special = {0: "[PAD]", END: "[EOS]", mask: "[MASK]"}
    raw = Tokenizer(models.WordLevel({special.get(i, f"w{i}"): i for i in range(size)}, unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "[PAD]", "eos_token": "[EOS]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, padding_side="left", **named)


def network(source: str, device: str) -> denoiser.Denoiser:
    """The shape of a config.json on the device, with the random weights of its class. [EOS] has probability 0."""
    shape, family, dtype = checkpoints.describe(source)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = denoiser.Denoiser(family.network(shape), family).eval()
    finally:
        torch.set_default_dtype(before)
    head, end = model.head, torch.tensor([END], device=device)

    def endless(h: torch.Tensor) -> torch.Tensor:
        return head(h).index_fill(-1, end, -torch.inf)

    model.head = endless
    return model


def settings_of(shape: str, device: str, folder: Path) -> config.Train:
    """The recipe on the shape: that of the published config.json, or a tiny one of which the folder gets a config.json."""
    recipe = dataclasses.replace(config.load(config.Train, RECIPE), device=device)
    if shape == "8b":
        return dataclasses.replace(recipe, model=LLADA, task=Words(recipe.task.max_prompt_length))
    (folder / "config.json").write_text(json.dumps(checkpoints.PUBLISHED[LLADA] | TINY))
    decoding = dataclasses.replace(recipe.sampler, length=32, block_length=8)
    lora = dataclasses.replace(recipe.lora, rank=4)
    return dataclasses.replace(recipe, model=str(folder), task=Words(20), sampler=decoding, lora=lora, num_iterations=3)


def run_of(settings: config.Train) -> loop.Run:
    """The shipped run, which finds a network of random weights where it would load a checkpoint."""
    model = network(settings.model, settings.device)
    tok = words_tokenizer(model.vocab_size, model.mask_token_id)
    with mock.patch.object(checkpoints, "load", lambda *_, **__: (model, tok)):
        return train.start(settings)


# ----------------------------------------------------------------------------------------------------------- the count
@dataclasses.dataclass(frozen=True)
class Products:
    """Floating-point operations of matrix products: in the dtype of the base, in float32, and repeated by checkpointing."""

    half: float = 0.0
    single: float = 0.0
    again_half: float = 0.0
    again_single: float = 0.0

    def __add__(self, other: Products) -> Products:
        return Products(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: float) -> Products:
        return Products(*(times * a for a in dataclasses.astuple(self)))

    @property
    def needed(self) -> float:
        return self.half + self.single

    def seconds(self, half_rate: float, single_rate: float) -> float:
        """At these rates, if nothing else took any time."""
        return (self.half + self.again_half) / half_rate + (self.single + self.again_single) / single_rate


def products(settings: config.Train, rows: float, *, backward: bool, in_parts: bool = False) -> Products:
    """Of one sequence of the run, of which ``rows`` positions go through the head, all at once or in parts."""
    shape, family, _ = checkpoints.describe(settings.model)
    with torch.device("meta"):
        model = family.network(shape)
    width = settings.task.prompt_length + settings.sampler.length
    heads = shape.num_attention_heads
    wide = heads * (getattr(shape, "head_dim", None) or shape.hidden_size // heads)
    base = 2 * width * sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)
    attention = 4 * width**2 * wide * shape.num_hidden_layers
    head = 2 * rows * shape.vocab_size * shape.hidden_size
    adapters = 2 * width * memory.adapter_count(model, settings.lora)
    forward = Products(base + attention + head, adapters)
    if not backward:
        return forward
    back = Products(base + 2 * attention + head, 2 * adapters)
    again = settings.gradient_checkpointing
    return forward + back + Products(again_half=again * (base + attention) + in_parts * head, again_single=again * adapters)


def work(settings: config.Train) -> dict[str, tuple[int, Products]]:
    """Phase -> (sequences that go through the network, products of one of them)."""
    method = method_of(settings)
    plan = method.plan(blank_rollout(method, settings, settings.num_prompts), torch.Generator().manual_seed(0))
    states, drawn = int(plan.valid.sum()), settings.num_prompts * settings.num_generations * settings.sampler.num_steps
    rows, most = int(plan.scored.sum()) / states, min(settings.micro_batch, states) * int(plan.scored.sum(-1).max())
    in_parts = feat.head_parts(most, checkpoints.describe(settings.model)[0].vocab_size) > 1
    return {
        "rollout": (drawn, products(settings, settings.sampler.block_length, backward=False)),
        "scoring": (settings.num_iterations * states, products(settings, rows, backward=False)),
        "update": (settings.num_iterations * states, products(settings, rows, backward=True, in_parts=in_parts)),
    }


# ---------------------------------------------------------------------------------------------------------- the clock
def wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def rate(device: str, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations a second of a large product, the median of 20 after 3."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(23):
        wait(device)
        started = time.perf_counter()
        a @ b
        wait(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times[3:])


def measured(settings: config.Train) -> tuple[dict, float]:
    """(metrics of the second step, its seconds)."""
    run = run_of(settings)
    loop.take_step(run, 0)
    wait(settings.device)
    started = time.perf_counter()
    row = loop.take_step(run, 1)
    wait(settings.device)
    return row, time.perf_counter() - started


# ----------------------------------------------------------------------------------------------------- the reduced step
def write_checkpoint(raw: dict, mask: int, folder: Path, shards: int = SHARDS) -> int:
    """config.json, a tokenizer of words, and random weights under the family's names; returns their bytes.

    Matrices hold one block of normal numbers again and again: what is measured depends on shapes and not on values. Its length
    is odd, so that no two rows are the same. Norms are 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    words_tokenizer(raw["vocab_size"], mask).save_pretrained(folder)
    shape, family, dtype = checkpoints.describe(folder)
    with torch.device("meta"):
        sizes = {name: p.shape for name, p in family.network(shape).named_parameters()}
    block = torch.empty(2**22 + 1).normal_(0, 0.02, generator=torch.Generator().manual_seed(0)).to(dtype)
    most, index = -(-sum(map(np.prod, sizes.values())) // shards), {}
    for number, names in enumerate(files_of(sizes, most), 1):
        path = folder / f"model-{number:05}.safetensors"
        made = {checkpoints.stored_name(name, family): filled(name, sizes[name], block) for name in names}
        save_file(made, path, metadata={"format": "pt"})
        index |= dict.fromkeys(made, path.name)
    (folder / checkpoints.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def files_of(sizes: dict[str, torch.Size], most: int) -> list[list[str]]:
    """The names in order, cut into files of at most ``most`` numbers, or of one tensor."""
    files, room = [], 0
    for name, size in sizes.items():
        if not files or size.numel() > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size.numel()
    return files


def filled(name: str, size: torch.Size, block: torch.Tensor) -> torch.Tensor:
    """1 for a norm, else the block's numbers again and again."""
    if "norm" in name:
        return torch.ones(size, dtype=block.dtype)
    return block.repeat(-(-size.numel() // len(block)))[: size.numel()].view(size)


def reduced(raw: dict, folder: Path, device: str) -> config.Train:
    """The recipe's step in its smallest form: adapters of rank 8, a prompt of 4 tokens, 2 responses of 8 in 2 steps, 2 updates.

    The row's 3 masked states and gradient checkpointing stay, and where the recipe has no adapters, there are none. Two
    passes are made, so that scoring is measured, too.
    """
    recipe = config.load(config.Train, MIDDLE if raw["model_type"] == "a2d-qwen3" else RECIPE)
    recipe = dataclasses.replace(recipe, device=device)
    own = raw.get("block_size")
    attention = {"block_length": own, "attention": "block_causal"} if own else {"block_length": 8}
    decoding = dataclasses.replace(recipe.sampler, length=8, tokens_per_step=4, **attention)
    small = {"num_prompts": 1, "num_generations": 2, "num_iterations": 2, "micro_batch": 6, "one_pass": False}
    lora = dataclasses.replace(recipe.lora, rank=min(8, recipe.lora.rank))
    return dataclasses.replace(recipe, model=str(folder), task=Words(4), sampler=decoding, lora=lora, **small)


def measure_reduced(raw: dict, mask: int, folder: Path, device: str) -> str:
    """Write the checkpoint, load it as any other, do one step: no warm-up, so that the first use of everything is in it."""
    settings = reduced(raw, folder, device)
    started = time.perf_counter()
    size = write_checkpoint(raw, mask, folder)
    written, files = time.perf_counter() - started, len(list(folder.glob("*.safetensors")))
    gpu = torch.device(device).type == "cuda"

    # What stands before the network, on either device, is not the network's.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    run = train.start(settings)
    wait(device)
    loaded, started = time.perf_counter() - started, time.perf_counter()
    row = loop.take_step(run, 0)
    wait(device)
    took = time.perf_counter() - started
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident)  # KiB on Linux
    found = memory.measured(torch.device(device)) if gpu else grown

    if not np.isfinite([row["loss"], row["grad_norm"], row["entropy"]]).all():
        raise SystemExit(f"not finite: loss {row['loss']}, gradient norm {row['grad_norm']}, entropy {row['entropy']}")
    peak = memory.peak(memory.predicted_memory(settings))
    counted = "not measured" if found is None else f"measured {found / 1e9:.3g} GB"
    what = "allocated on the GPU" if gpu else "resident (by how much the peak of the process grew)"
    phases = [name for name in ("rollout", "scoring", "update") if f"seconds/{name}" in row]
    rows = [{"phase": p, "sequences": row[f"network_calls/{p}"], "seconds": row[f"seconds/{p}"]} for p in phases]
    adapters = sum(p.numel() for name, p in run.model.named_parameters() if "lora" in name)
    base = run.model.num_parameters() - adapters
    return (
        f"{torch.cuda.get_device_name() if gpu else f'CPU, {torch.get_num_threads()} threads'}, torch {torch.__version__}: "
        f"{base:,} random weights in {raw['torch_dtype']}, written in {written:.0f} s as {files} files of {size / 1e9:.3g} GB, "
        f"loaded by checkpoints.load{' with adapters' if adapters else ''} in {loaded:.1f} s\n\n{table(rows)}\n\n"
        f"whole step: {took:.1f} s (loss {row['loss']:.3g}, gradient norm {row['grad_norm']:.3g}, "
        f"entropy {row['entropy']:.3g} of ln V = {np.log(raw['vocab_size']):.3g})\n"
        f"peak {what}: predicted {peak / 1e9:.3g} GB, {counted}"
    )


# ------------------------------------------------------------------------------------------------------------- reports
def predicted_rows(settings: config.Train, half: float, single: float) -> list[dict]:
    """A row a phase: products, seconds at best, the share of ``half`` that this would be, and the seconds at the aims."""
    rows = []
    for name, (calls, one) in work(settings).items():
        total = one * calls
        least = total.seconds(half, single)
        rows.append(
            {
                "phase": name,
                "sequences": calls,
                "needed, TFLOP": total.needed / 1e12,
                "of it in float32": total.single / 1e12,
                "repeated, TFLOP": (total.again_half + total.again_single) / 1e12,
                "seconds at best": least,
                "share at best": total.needed / half / least,
                "seconds at the aim": total.needed / half / AIMS.get(name, AIMS["rollout"]),
            }
        )
    return rows


def measured_rows(settings: config.Train, row: dict, half: float) -> list[dict]:
    """A row a phase: products, seconds, and their share of the rate of a large product."""
    rows = []
    for name, (_, one) in work(settings).items():
        took, calls = row[f"seconds/{name}"], row[f"network_calls/{name}"]
        needed = one.needed * calls
        share = needed / half / took
        rows.append({"phase": name, "sequences": calls, "needed, TFLOP": needed / 1e12, "seconds": took, "share": share})
    return rows


def table(rows: list[dict]) -> str:
    """Markdown."""
    return markdown(pd.DataFrame(rows))


def predict(settings: config.Train, half: float, single: float) -> str:
    """What is expected of a GPU that was not at hand."""
    rows, peak = predicted_rows(settings, half, single), memory.peak(memory.predicted_memory(settings))
    least, aimed = (sum(r[name] for r in rows) for name in ("seconds at best", "seconds at the aim"))
    return (
        f"PREDICTION, nothing was measured. Assumed: {half / 1e12:g} TFLOP/s in bfloat16, {single / 1e12:g} in float32 "
        f"(matmul_precision {settings.matmul_precision}).\n\n"
        f"{table(rows)}\n\nwhole step: {least:.1f} s at best, {aimed:.1f} s at the aims\npeak: {peak / 1e9:.3g} GB"
    )


def measure(settings: config.Train) -> str:
    """What this machine does."""
    device, size = settings.device, 8192 if torch.device(settings.device).type == "cuda" else 512
    train.prepare(settings)  # the rates are those of its precision
    name = torch.cuda.get_device_name() if size == 8192 else "CPU"
    half, single = (rate(device, dtype, size) for dtype in (torch.bfloat16, torch.float32))
    row, seconds = measured(settings)
    peak, found = memory.peak(memory.predicted_memory(settings)), memory.measured(torch.device(device))
    said = f"measured {found / 1e9:.3g} GB" if found is not None else "not measured on a CPU"
    return (
        f"{name}, torch {torch.__version__}: large products at {half / 1e12:.3g} TFLOP/s in bfloat16, {single / 1e12:.3g} in "
        f"float32 (matmul_precision {settings.matmul_precision})\n\n{table(measured_rows(settings, row, half))}\n\n"
        f"whole step: {seconds:.1f} s\npeak: predicted {peak / 1e9:.3g} GB, {said}"
    )


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=(*SHAPES, "tiny"), default="8b", help="8b: LLaDA's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--reduced", action="store_true", help="one reduced step from files")
    parser.add_argument("--dir", help="where a reduced step's checkpoint is written for a while; default: the temporary folder")
    parser.add_argument("--rate", type=float, default=700.0, help="TFLOP/s in bfloat16, for --predict")
    parser.add_argument("--rate32", type=float, default=400.0, help="TFLOP/s of float32 products, for --predict")
    arguments = parser.parse_args(argv)
    full = arguments.shape != "tiny"
    small = arguments.reduced or (full and (arguments.device == "cpu" or arguments.shape != "8b"))
    if arguments.predict and arguments.shape not in ("8b", "tiny"):
        parser.error(f"--predict: got --shape {arguments.shape}; allowed 8b, tiny")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        rates = (arguments.rate * 1e12, arguments.rate32 * 1e12)
        if arguments.predict:
            print(predict(settings_of(arguments.shape, "cuda", Path(folder)), *rates))
        elif small:
            raw, mask = SHAPES[arguments.shape] if full else (SHAPES["8b"][0] | TINY, TINY["mask_token_id"])
            print(measure_reduced(raw, mask, Path(folder), arguments.device))
        else:
            print(measure(settings_of(arguments.shape, arguments.device, Path(folder))))


if __name__ == "__main__":
    main()
