"""Predicted bytes against counted ones: parameters of LLaDA-8B, what autograd keeps, the peak of a whole step.

A CPU has no counter of allocated memory. ``PeakBytes`` is one: it sees every tensor that an operation returns.
"""

import dataclasses
import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from memory_table import SavedBytes
from minidrl import config, denoiser, memory, report, sampler, trainer
from minidrl.tasks.countdown import Countdown, tokenizer

ALL = config.Lora().target_modules
ATTENTION = ALL[:4]
LLADA = "GSAI-ML/LLaDA-8B-Instruct"


class PeakBytes(TorchDispatchMode):
    """Within ``with``: ``peak``, the most bytes that were alive at once, of tensors made inside; a storage counts once."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self.see(x.untyped_storage(), given)
        return out

    def see(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in given:  # a view, or the result of something in place
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def test_the_counter_counts():
    x = torch.ones(1000, requires_grad=True)
    with PeakBytes() as meter:
        y = (x * 2).exp()  # x * 2 is freed, exp keeps its result
        assert (meter.live, meter.peak) == (4000, 8000)
        y.view(10, 100).add_(1)
        z = y.clone()
        assert meter.live == 8000
        del z
        assert meter.live == 4000


# ------------------------------------------------------------------------------------------------------------- resident
def lora(rank: int, targets: list[str] = ALL) -> config.Lora:
    return config.Lora(rank=rank, target_modules=targets)


@pytest.fixture(scope="module")
def published() -> denoiser.Denoiser:
    shape, family, _ = denoiser.describe(LLADA)
    with torch.device("meta"):
        return denoiser.Denoiser(family.network(shape))


def run(**changes) -> config.Train:
    """LLaDA-8B as the published recipes run it."""
    decoding = sampler.Sampler(order="low_confidence", temperature=0.9, length=256, block_length=32, tokens_per_step=2)
    words = {"model": LLADA, "sampler": decoding, "method": "reinforce", "num_prompts": 1, "num_generations": 8}
    return config.Train(**{**words, "micro_batch": 4, **changes})


def test_the_weights_of_llada_8b_are_as_many_as_its_index_says():
    parts = trainer.predicted_memory(run())
    assert parts["weights"] == 16_031_162_368  # total_size in the published model.safetensors.index.json
    assert trainer.predicted_memory(run(dtype="float32"))["weights"] == 2 * 16_031_162_368


@pytest.mark.parametrize(("targets", "millions"), [(ALL, 335.5), (ATTENTION, 134.2), (["gate_proj"], 67.1)])
def test_adapters_are_as_many_as_peft_makes(published, targets, millions):
    predicted = memory.adapter_count(published.model, lora(128, targets))
    assert predicted / 1e6 == pytest.approx(millions, abs=0.05)
    model = tiny.network()  # a smaller one, into which peft puts them
    expected_of = memory.adapter_count(model.model, lora(3, targets))
    denoiser.add_adapters(model, rank=3, alpha=1.0, target_modules=targets, seed=0, base="x")
    assert expected_of == sum(p.numel() for _, p in trainer.trained(model))


def test_trained_weights_need_gradients_and_two_moments():
    whole, adapted = trainer.predicted_memory(run(dtype="float32")), trainer.predicted_memory(run(lora=lora(128)))
    assert whole["gradients"] == whole["weights"] and whole["optimizer"] == 2 * whole["weights"]
    assert whole["weights"] + whole["gradients"] + whole["optimizer"] == pytest.approx(128.2e9, rel=1e-3)
    assert adapted["adapters"] + adapted["gradients"] + adapted["optimizer"] == pytest.approx(5.37e9, rel=1e-3)


def test_a_reference_costs_a_copy_and_nothing_with_adapters():
    options = {"kl.form": "k3", "kl.beta": 0.1}
    assert trainer.predicted_memory(run(method_options=options))["reference"] == 16_031_162_368
    assert trainer.predicted_memory(run(method_options=options, lora=lora(8)))["reference"] == 0
    assert trainer.predicted_memory(run())["reference"] == 0


def test_several_gpus_share_what_is_resident():
    one, eight = (trainer.predicted_memory(run(), gpus) for gpus in (1, 8))
    assert all(eight[name] * 8 == pytest.approx(one[name], abs=8) for name in memory.RESIDENT)
    assert eight["layer"] > one["layer"] and eight["activations"] == one["activations"]


def test_four_bits_are_what_bitsandbytes_stores(tmp_path):
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    denoiser.save(denoiser.build(sizes, tokenizer(), 0), tokenizer(), tmp_path)
    model, _ = denoiser.load(tmp_path, "cpu", torch.bfloat16, quantize=True)
    stored = 0
    for p in model.parameters():
        stored += p.numel() * p.element_size()
        if (state := getattr(p, "quant_state", None)) is not None:
            stored += state.absmax.numel() * state.absmax.element_size() + state.state2.absmax.numel() * 4
    settings = tiny.settings(tmp_path, dtype="bfloat16", quantize=True, lora=lora(2))
    assert trainer.predicted_memory(settings)["weights"] == pytest.approx(stored, rel=0.01)


# ----------------------------------------------------------------------------------------------------------- activations
WIDTH = 12
SHAPES = {  # hidden, MLP, heads
    "llada": (64, 192, 4),
    "wide MLP": (32, 256, 2),
    "narrow MLP": (96, 64, 3),
}


def network(hidden: int, mlp: int, heads: int, layers: int, dtype: torch.dtype, adapters: config.Lora) -> denoiser.Denoiser:
    """Weights without values: bytes do not depend on them."""
    shape = LlamaConfig(
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        mask_token_id=1,
        is_causal=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = denoiser.Denoiser(LlamaForCausalLM(shape).to(dtype))
    model = model.to_empty(device="cpu").eval()
    if adapters.rank:
        denoiser.add_adapters(model, **dataclasses.asdict(adapters), seed=0, base="x")
    return model


def kept(*words, rows: int = 2, width: int = WIDTH) -> float:
    """Bytes a token that autograd keeps of a forward over padded rows."""
    model = network(*words)
    tokens, mask = torch.full((rows, width), 2), torch.ones(rows, width, dtype=torch.bool)
    mask[0, 0] = False
    with SavedBytes(model) as meter:
        h = model.encode(tokens, mask)
        held = meter.held
    assert h.requires_grad
    return held / (rows * width)


ADAPTERS = {"none": lora(0), "all": lora(3), "attention": lora(5, ATTENTION), "two": lora(4, ["v_proj", "up_proj"])}


@pytest.mark.parametrize("adapters", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_layer_keeps_what_is_predicted(shape, dtype, adapters):
    counted = kept(*shape, 3, dtype, adapters) - kept(*shape, 2, dtype, adapters)
    config_of = network(*shape, 1, dtype, adapters).model.config
    assert memory.layer_bytes(config_of, dtype.itemsize, adapters, WIDTH) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(("adapters", "megabytes"), [(lora(0), 0.197), (lora(128), None)], ids=["none", "all, rank 128"])
def test_a_layer_of_llada_8b_keeps_what_is_predicted(adapters, megabytes):
    shape, _, dtype = denoiser.describe(LLADA)
    words = (shape.hidden_size, shape.intermediate_size, shape.num_attention_heads)
    counted = kept(*words, 1, dtype, adapters, rows=1, width=8)
    predicted = memory.layer_bytes(shape, dtype.itemsize, adapters, 8)
    assert predicted == pytest.approx(counted, rel=0.15)  # the counted bytes are also those of the last norm
    if megabytes:
        assert predicted / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_a_cache_of_keys_and_values_is_counted():
    model, plain = tiny.network(), run()
    cache = model.model.model(input_ids=torch.full((2, WIDTH), 3), use_cache=True).past_key_values
    stored = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
    cached = dataclasses.replace(plain, sampler=dataclasses.replace(plain.sampler, cache="dual"))
    assert memory._cache(cached, model.model.config, 4) * 2 * WIDTH == stored
    assert memory._cache(plain, model.model.config, 4) == 0
    assert trainer.predicted_memory(cached)["rollout"] > trainer.predicted_memory(plain)["rollout"] + 1e8


# ------------------------------------------------------------------------------------------------------------- the peak
@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A network whose vocabulary is large for its body, as LLaDA's is."""
    return saved(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=192, vocab_size=2000)


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    """A network of whose bytes most are activations."""
    return saved(tmp_path_factory.mktemp("deep"), hidden_size=32, intermediate_size=96, vocab_size=30, num_hidden_layers=6)


def saved(folder: Path, **sizes) -> Path:
    tok = tokenizer()
    words = {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 64, **sizes}
    words |= {"eos_token_id": tok.eos_token_id, "mask_token_id": tok.mask_token_id, "pad_token_id": None, "bos_token_id": None}
    words |= {"tie_word_embeddings": False, "is_causal": False, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    denoiser.save(denoiser.Denoiser(LlamaForCausalLM(LlamaConfig(**words))), tok, folder)
    return folder


@pytest.fixture(autouse=True)
def varied_rewards(monkeypatch):
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    monkeypatch.setattr(report, "write_curve", lambda out: None)


def measured(settings: config.Train) -> int:
    """The peak of a step whose second update finds the optimiser's state: weights, and whatever the step makes."""
    learner = trainer.Learner(settings)
    models = {id(m.model): m for m in (learner.model, learner.reference, learner.actor) if m is not None}
    resident = sum(p.numel() * p.element_size() for m in models.values() for p in m.parameters())
    with PeakBytes() as meter:
        learner.step(0)
    return resident + meter.peak


DECODING = sampler.Sampler(order="low_confidence", temperature=0.9, length=16, block_length=8, tokens_per_step=2)
KL = {"kl.beta": 0.1, "kl.form": "exact"}
STEPS = {
    "all weights": ("wide", {}),
    "all weights, layers recomputed": ("deep", {"gradient_checkpointing": True, "micro_batch": 8}),
    "adapters": ("deep", {"lora": lora(4)}),
    "adapters in bfloat16": ("deep", {"lora": lora(4), "dtype": "bfloat16"}),
    "adapters in bfloat16, layers recomputed": ("wide", {"lora": lora(4), "dtype": "bfloat16", "gradient_checkpointing": True}),
    "a reference": ("deep", {"method": "grpo", "method_options": KL | {"kl.form": "k3"}}),
    "an exact penalty": ("wide", {"method": "grpo", "method_options": KL, "lora": lora(4)}),
    "the order of positions": ("wide", {"method": "egspo-exact", "method_options": {"plan.num_states": 4}}),
    "a rounded sampler": ("deep", {"rollout_dtype": "bfloat16"}),
    "rollouts above all": ("wide", {"method": "replay-grpo", "gradient_checkpointing": True, "lora": lora(4)}),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_peak_of_a_step_is_within_15_percent_of_the_prediction(case, request, monkeypatch):
    shape, changes = STEPS[case]
    monkeypatch.setattr(trainer.Learner, "verify", lambda self, puzzles, texts: torch.arange(len(texts)).double() / len(texts))
    words = {"sampler": DECODING, "num_prompts": 2, "num_generations": 4, "num_iterations": 2, "micro_batch": 4}
    words |= {"method": "stabledrl-elbo", "method_options": {}}
    settings = tiny.settings(request.getfixturevalue(shape), **{**words, **changes})
    parts = trainer.predicted_memory(settings)
    assert memory.peak(parts) == pytest.approx(measured(settings), rel=0.15)
    if case == "rollouts above all":
        assert parts["rollout"] > parts["activations"] + max(parts["layer"], parts["logits"])


def test_the_peak_is_the_worst_moment_and_not_the_sum():
    parts = dict.fromkeys((*memory.RESIDENT, *memory.TRANSIENT), 0)
    assert memory.peak(parts | {"weights": 5, "rollout": 7, "step": 6, "activations": 2, "layer": 3, "logits": 4}) == 12
    assert memory.peak(parts | {"weights": 5, "rollout": 7, "step": 6, "activations": 5, "layer": 3, "logits": 4}) == 14


def test_the_table_names_every_part():
    parts = trainer.predicted_memory(run())
    text = memory.table(parts)
    assert all(name in text for name in (*memory.RESIDENT, *memory.TRANSIENT, "peak")) and "16.031 GB" in text


# ------------------------------------------------------------------------------------------------------------- mistakes
def test_a_target_that_matches_no_module_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="lora.target_modules: got 'attn_out', which matches no module; allowed q_proj"):
        trainer.predicted_memory(run(lora=lora(8, ["attn_out"])))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which holds no config.json"):
        trainer.predicted_memory(run(model=str(tmp_path)))


def test_a_config_is_enough(tmp_path):
    shape = denoiser.PUBLISHED[LLADA] | {"n_layers": 1, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    parts = trainer.predicted_memory(run(model=str(tmp_path)))
    assert parts["weights"] == 4 * (2 * 126464 * 4096 + 4 * 4096**2 + 3 * 4096 * 12288 + 3 * 4096)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.90 GiB. GPU 0 has a total capacity of 23.6 GiB")


PARTS = {  # what runs out of memory, and what the line must say
    "loading": (denoiser, "load", "try dtype bfloat16, or quantize"),
    "evaluation": (trainer, "evaluate", "try a smaller micro_batch"),
    "rollout": (trainer.distributed, "generate", "try a smaller micro_batch"),
    "scoring": (trainer.alg, "features", "try a smaller micro_batch"),
    "update": (trainer, "second_pass", "or lora.rank, or gradient_checkpointing true"),
}


@pytest.mark.parametrize("part", PARTS)
def test_out_of_memory_is_one_line_that_says_where_and_what_to_lower(part, wide, tmp_path, monkeypatch):
    module, name, advice = PARTS[part]
    words = {"method": "replay-grpo", "steps": 2, "save_every": 1, "micro_batch": 7}
    if part == "rollout":  # the evaluation before it generates as well
        monkeypatch.setattr(trainer, "evaluate", lambda *_, **__: {"solved": 0.0})
    monkeypatch.setattr(module, name, out_of_memory)
    with pytest.raises(ValueError) as error:
        trainer.train(tiny.settings(wide, **words), tmp_path / "run")
    line = str(error.value)
    assert line.startswith(f"micro_batch: got 7, out of memory in the {part} (CUDA out of memory. Tried to allocate 1.90 GiB)")
    assert advice in line and line.endswith("no checkpoint was due yet") and "\n" not in line


def test_an_evaluation_needs_no_more_memory_than_a_rollout(wide, tmp_path, monkeypatch):
    seen, generate = set(), trainer.distributed.generate

    def spied(*words, **more):
        seen.add(more["micro_batch"])
        return generate(*words, **more)

    monkeypatch.setattr(trainer.distributed, "generate", spied)
    trainer.train(tiny.settings(wide, steps=1, micro_batch=3), tmp_path / "run")
    assert seen == {3}


def test_out_of_memory_leaves_the_last_checkpoint(wide, tmp_path, monkeypatch):
    words, step = {"steps": 3, "save_every": 1}, trainer.Learner.step

    def third(learner, number: int) -> dict:
        return out_of_memory() if number == 2 else step(learner, number)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Learner, "step", third)
        with pytest.raises(ValueError, match="checkpoint-2 is kept, --resume goes on"):
            trainer.train(tiny.settings(wide, **words), tmp_path / "run")
    assert trainer.train(tiny.settings(wide, **words), tmp_path / "run", resume=True)["steps"] == 3


def test_a_run_says_what_was_predicted_once_and_measures_nothing_on_a_cpu(wide, tmp_path, capfd):
    settings = tiny.settings(wide, steps=3)
    trainer.train(settings, tmp_path / "run")
    predicted = memory.peak(trainer.predicted_memory(settings)) / 1e9
    lines = [line for line in capfd.readouterr().err.replace("\r", "\n").splitlines() if line.startswith("memory:")]
    assert lines == [f"memory: predicted {predicted:.3f} GB at its peak, not measured on a CPU"]
