"""Predicted bytes against counted ones: parameters of LLaDA-8B, what autograd keeps, the peak of a whole step.

A CPU has no counter of allocated memory. ``PeakBytes`` is one: it sees every tensor that an operation returns.
"""

import dataclasses
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from memory_table import SavedBytes
from minidrl import denoiser, gradient, sampler
from minidrl import features as feat
from minidrl.run import checkpoints, config, distributed, memory, rehearsal, report, runs, trainer
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
    shape, family, _ = checkpoints.describe(LLADA)
    with torch.device("meta"):
        return denoiser.Denoiser(family.network(shape))


def run(**changes) -> config.Train:
    """LLaDA-8B as the published recipes run it."""
    decoding = sampler.Sampler(order="low_confidence", temperature=0.9, length=256, block_length=32, tokens_per_step=2)
    words = {"model": LLADA, "sampler": decoding, "method": "reinforce", "num_prompts": 1, "num_generations": 8}
    return config.Train(**{**words, "micro_batch": 4, **changes})


def test_the_weights_of_llada_8b_are_as_many_as_its_index_says():
    parts = memory.predicted_memory(run())
    assert parts["weights"] == 16_031_162_368  # total_size in the published model.safetensors.index.json
    assert memory.predicted_memory(run(dtype="float32"))["weights"] == 2 * 16_031_162_368


KNOWN = {  # what their config.json on the Hub says, under transformers' names; of A2D that of Qwen/Qwen3-0.6B
    LLADA: {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"intermediate_size": 12288, "vocab_size": 126464, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    | {"tie_word_embeddings": False, "eos_token_id": 126081},
    checkpoints.A2D_06B: {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
    | {"tie_word_embeddings": True, "eos_token_id": 151645, "head_dim": 128},
}
MASKS = {LLADA: 126336, checkpoints.A2D_06B: 151668 + 1}  # <|mdm_mask|>; the id after the last one of Qwen3's tokenizer
ROTATION = {LLADA: 500000.0, checkpoints.A2D_06B: 1000000.0}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_without_a_file_is_what_the_published_config_says(name):
    shape, _, dtype = checkpoints.describe(name)
    assert {key: getattr(shape, key) for key in KNOWN[name]} == KNOWN[name]
    assert (shape.mask_token_id, dtype) == (MASKS[name], torch.bfloat16)
    assert shape.rope_parameters["rope_theta"] == ROTATION[name]


@pytest.mark.parametrize(("targets", "millions"), [(ALL, 335.5), (ATTENTION, 134.2), (["gate_proj"], 67.1)])
def test_adapters_are_as_many_as_peft_makes(published, targets, millions):
    predicted = memory.adapter_count(published.model, lora(128, targets))
    assert predicted / 1e6 == pytest.approx(millions, abs=0.05)
    model = tiny.network()  # a smaller one, into which peft puts them
    expected_of = memory.adapter_count(model.model, lora(3, targets))
    denoiser.add_adapters(model, rank=3, alpha=1.0, target_modules=targets, seed=0, base="x")
    assert expected_of == sum(p.numel() for _, p in denoiser.trained(model))


def test_trained_weights_need_gradients_and_two_moments():
    whole, adapted = memory.predicted_memory(run(dtype="float32")), memory.predicted_memory(run(lora=lora(128)))
    assert whole["gradients"] == whole["weights"] and whole["optimizer"] == 2 * whole["weights"]
    assert whole["weights"] + whole["gradients"] + whole["optimizer"] == pytest.approx(128.2e9, rel=1e-3)
    assert adapted["adapters"] + adapted["gradients"] + adapted["optimizer"] == pytest.approx(5.37e9, rel=1e-3)


def test_a_reference_costs_a_copy_and_nothing_with_adapters():
    options = {"kl.form": "k3", "kl.beta": 0.1}
    assert memory.predicted_memory(run(method_options=options))["reference"] == 16_031_162_368
    assert memory.predicted_memory(run(method_options=options, lora=lora(8)))["reference"] == 0
    assert memory.predicted_memory(run())["reference"] == 0


def test_several_gpus_share_what_is_resident():
    one, eight = (memory.predicted_memory(run(), gpus) for gpus in (1, 8))
    assert all(eight[name] * 8 == pytest.approx(one[name], abs=8) for name in (*memory.RESIDENT, "gradients"))
    assert eight["layer"] > one["layer"] and eight["activations"] == one["activations"]


def test_four_bits_are_what_bitsandbytes_stores(tmp_path):
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    checkpoints.save(denoiser.build(sizes, tokenizer(), 0), tokenizer(), tmp_path)
    model, _ = checkpoints.load(tmp_path, "cpu", torch.bfloat16, quantize=True)
    stored = 0
    for p in model.parameters():
        stored += p.numel() * p.element_size()
        if (state := getattr(p, "quant_state", None)) is not None:
            stored += state.absmax.numel() * state.absmax.element_size() + state.state2.absmax.numel() * 4
    settings = tiny.settings(tmp_path, dtype="bfloat16", quantize=True, lora=lora(2))
    assert memory.predicted_memory(settings)["weights"] == pytest.approx(stored, rel=0.01)


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
    assert memory.layer_bytes(config_of, dtype.itemsize, adapters, WIDTH) == counted  # to the byte


@pytest.mark.parametrize(("adapters", "megabytes"), [(lora(0), 0.197), (lora(128), None)], ids=["none", "all, rank 128"])
def test_a_layer_of_llada_8b_keeps_what_is_predicted(adapters, megabytes):
    shape, _, dtype = checkpoints.describe(LLADA)
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
    assert memory.predicted_memory(cached)["rollout"] > memory.predicted_memory(plain)["rollout"] + 1e8


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
    checkpoints.save(denoiser.Denoiser(LlamaForCausalLM(LlamaConfig(**words))), tok, folder)
    return folder


@pytest.fixture(autouse=True)
def varied_rewards(monkeypatch):
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    monkeypatch.setattr(report, "write_curve", lambda out: None)


def measured(settings: config.Train) -> int:
    """The peak of a run's first step: weights and moments, and whatever the step makes, all of which it leaves behind."""
    learner = trainer.Learner(settings)
    models = {id(m.model): m for m in (learner.model, learner.reference, learner.actor) if m is not None}
    tensors = [p for m in models.values() for p in m.parameters()]
    tensors += [value for slot in learner.optimizer.state.values() for value in slot.values()]
    with PeakBytes() as meter:
        learner.step(0)
    assert meter.live < 100_000
    return sum(p.numel() * p.element_size() for p in tensors) + meter.peak


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
ONCE = {"micro_batch": 64}  # the forwards of an update are fewer
FEW = {"num_prompts": 1, "num_generations": 2, "num_iterations": 1, "gradient_checkpointing": True}
STEPS |= {f"{case}, at once": (STEPS[case][0], STEPS[case][1] | ONCE) for case in ("all weights", "the order of positions")}
STEPS |= {
    "gradients above activations, at once": ("wide", FEW | ONCE),
    "rollouts without gradients": ("wide", FEW | {"sampler": dataclasses.replace(DECODING, block_length=16), "micro_batch": 2}),
}
SLOW = ("adapters in bfloat16", "a rounded sampler", "all weights, at once", "rollouts without gradients")  # each has a sibling
PARTS_OF_A_HEAD = ["all weights", "adapters in bfloat16, layers recomputed", "an exact penalty", "the order of positions"]


def of_step(case: str, request, monkeypatch) -> config.Train:
    shape, changes = STEPS[case]
    rewards = lambda texts: torch.arange(len(texts)).double() / len(texts)  # noqa: E731
    monkeypatch.setattr(trainer.Learner, "judge", lambda self, problems, texts: (rewards(texts), rewards(texts) == 1))
    words = {"sampler": DECODING, "num_prompts": 2, "num_generations": 4, "num_iterations": 2, "micro_batch": 4}
    words |= {"method": "stabledrl-elbo", "method_options": {}}
    return tiny.settings(request.getfixturevalue(shape), **{**words, **changes})


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in STEPS])
def test_the_peak_of_a_step_is_within_15_percent_of_the_prediction(case, request, monkeypatch):
    settings = of_step(case, request, monkeypatch)
    parts = memory.predicted_memory(settings)
    assert memory.peak(parts) == pytest.approx(measured(settings), rel=0.15)
    if case.startswith("rollouts"):
        assert parts["rollout"] > parts["activations"] + max(parts["layer"], parts["logits"])
    assert (parts["earlier"] == 0) == case.endswith("at once") and parts["gradients"] > 0


@pytest.mark.parametrize("once", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["several micro-batches", "one"])
@pytest.mark.parametrize("case", PARTS_OF_A_HEAD)
def test_the_peak_of_a_step_whose_head_is_applied_in_parts(case, once, request, monkeypatch):
    """A few rows at a time: it needs less than all of them at once, as was predicted, and no more than that."""
    settings = of_step(case, request, monkeypatch)
    settings = dataclasses.replace(settings, **ONCE) if once else settings
    whole = memory.predicted_memory(settings)["logits"]
    monkeypatch.setattr(feat, "HEAD_NUMBERS", 8 * 2000)
    parts = memory.predicted_memory(settings)
    assert memory.peak(parts) == pytest.approx(measured(settings), rel=0.15)
    assert parts["logits"] < whole / 5 or not settings.lora.rank, "a head that is trained has a gradient as well"


EXACT = {"kl.form": "exact", "kl.beta": 0.1}
FEATURES = {
    "logp": ("grpo", {}),
    "kl_ref": ("grpo", EXACT),
    "topk_logp": ("dppo-topk", {}),
    "order_logp": ("egspo-exact", {"plan.num_states": 4}),
    "position_logp": ("mask-aware", {"plan.num_states": 4}),
}


@pytest.mark.parametrize("rows", [10**6, 8, 3])
@pytest.mark.parametrize("adapters", [0, 2], ids=["trained", "frozen"])
@pytest.mark.parametrize("feature", FEATURES)
def test_what_the_head_needs_is_predicted(feature, adapters, rows, tmp_path, monkeypatch):
    """By itself: with a vocabulary beside which the rest of the network is nothing, and an embedding that is not trained."""
    the_head_needs_what_is_predicted(feature, adapters, rows, 16, tmp_path, monkeypatch)


def test_two_calls_of_a_head_with_wide_rows_need_what_is_predicted(tmp_path, monkeypatch):
    """Where the head is large beside its logits: three times its gradient, while those of the two calls are added up."""
    the_head_needs_what_is_predicted("order_logp", 0, 10**6, 1024, tmp_path, monkeypatch)


def the_head_needs_what_is_predicted(feature, adapters, rows, hidden, tmp_path, monkeypatch):
    name, options = FEATURES[feature]
    folder = saved(tmp_path / "head", hidden_size=hidden, intermediate_size=16, vocab_size=20_000, num_hidden_layers=1)
    words = {"sampler": DECODING, "method": name, "method_options": options, "lora": lora(adapters), "micro_batch": 4}
    settings = tiny.settings(folder, **words, num_prompts=1)
    method = rehearsal.method_of(settings)
    made = rehearsal.blank_rollout(method, settings)
    plan = method.plan(made, torch.Generator().manual_seed(settings.seed))
    monkeypatch.setattr(feat, "HEAD_NUMBERS", rows * 20_000)
    model = trainer.load_policy(settings, method)[0]
    model.model.get_input_embeddings().requires_grad_(False)
    one = torch.ones(plan.scored.shape) * plan.scored
    cotangent = {key: one[..., None] if key == "topk_logp" else one for key in method.features}
    reference = trainer.load_policy(settings, method)[2] if "kl_ref" in method.features else None
    with PeakBytes() as meter:
        gradient.second_pass(model, made, plan, cotangent, temperature=0.9, size=4, reference=reference)
    parts = memory.predicted_memory(settings)
    earlier = 4 * hidden * 20_000 * (not adapters and plan.network_calls > 4)  # its gradient from the micro-batch before
    assert parts["logits"] + earlier == pytest.approx(meter.peak, rel=0.15)


def test_the_head_of_llada_8b_is_applied_to_132_rows_at_a_time_however_many_there_are():
    """3 arrays of float32 of at most 2^24 logits; beside them the hidden states of 256 rows a sequence, and their gradient."""
    for size in (1, 4, 64):
        for name in ("reinforce", "diffu-grpo", "gdpo"):
            rows = size * 256 * 2 * 2 * 4096
            logits = memory.predicted_memory(run(method=name, micro_batch=size, lora=lora(8)))["logits"]
            assert 0 < logits <= 3 * 4 * (2**24 + 126464) + rows
    assert logits > 0.9 * 3 * 4 * 2**23


def test_gradients_of_earlier_micro_batches_are_there_if_there_are_any():
    """128 states of 8 responses, two processes or one."""
    for gpus, size, several in ((1, 1024, False), (1, 1023, True), (2, 512, False), (2, 511, True), (1, 4096, False)):
        parts = memory.predicted_memory(run(micro_batch=size), gpus)
        assert parts["gradients"] > 0 and parts["earlier"] == (parts["gradients"] if several else 0)
    tokens = 1024 * (256 + run().task.prompt_length)
    shape, _, dtype = checkpoints.describe(LLADA)
    kept = memory.layer_bytes(shape, dtype.itemsize, config.Lora(), tokens // 1024)
    assert parts["activations"] == pytest.approx(32 * kept * tokens, rel=0.01), "of as many sequences as there are"


def test_the_peak_is_the_worst_moment_and_not_the_sum():
    parts = dict.fromkeys((*memory.RESIDENT, *memory.TRANSIENT), 0) | {"weights": 5}
    update = {"activations": 2, "layer": 3, "logits": 4, "gradients": 3}
    assert memory.peak(parts | update) == 5 + 2 + 4, "the way back begins, with nothing accumulated"
    assert memory.peak(parts | update | {"layer": 5}) == 5 + 3 + 5, "it ends, with the last layer's"
    assert memory.peak(parts | update | {"earlier": 3}) == 5 + 3 + 2 + 4, "the second micro-batch finds gradients"
    assert memory.peak(parts | update | {"step": 4}) == 5 + 3 + 4, "the update"
    assert memory.peak(parts | update | {"earlier": 3, "rollout": 10}) == 5 + 10, "a rollout has no gradients"


def test_the_table_names_every_part():
    parts = memory.predicted_memory(run())
    text = memory.table(parts)
    assert all(name in text for name in (*memory.RESIDENT, *memory.TRANSIENT, "peak")) and "16.031 GB" in text


def bare(hidden: int, mlp: int, words: int, layers: int = 2) -> LlamaForCausalLM:
    """A network without values, as transformers makes it."""
    shape = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, vocab_size=words, num_hidden_layers=layers, num_attention_heads=2
    )
    with torch.device("meta"):
        return LlamaForCausalLM(shape)


@pytest.mark.parametrize(("size", "weight"), [(2, 4), (4, 4), (2, 2)])
@pytest.mark.parametrize(("mlp", "words"), [(512, 8), (8, 4096)], ids=["wide layers", "wide embedding"])
def test_whole_tensors_of_several_gpus_are_those_of_the_worst_moment(mlp, words, size, weight):
    net = bare(32, mlp, words)
    layer = sum(p.numel() for p in net.model.layers[0].parameters())
    embedding = net.get_input_embeddings().weight.numel()
    there, back = memory._gathered(net, size, weight, trained=True)
    assert there == size * (max(layer + layer, embedding) + embedding)
    assert memory._gathered(net, size, weight, trained=False) == (there, there)
    moments = [
        there,
        size * (layer + layer + embedding) + size * layer + weight * layer,  # a layer's gradient, and that of the one before
        size * (embedding + embedding) + weight * layer,  # the embedding and its gradient, and a layer's
        size * embedding + weight * embedding,  # its gradient, as it came and as it is summed
    ]
    assert back == max(moments) + weight * embedding  # all the while that of the head


def test_the_head_is_whole_on_each_of_several_gpus():
    """Frozen, of a micro-batch of as many sequences, it is all that two GPUs need beside one's."""
    settings = run(lora=lora(8), micro_batch=1)
    one, two = (memory.predicted_memory(settings, gpus)["logits"] for gpus in (1, 2))
    assert two - one == 2 * 126464 * 4096


def test_a_layer_in_four_bits_is_unpacked_while_it_computes():
    plain = run(lora=lora(8))
    small, large = (memory.predicted_memory(dataclasses.replace(plain, quantize=q)) for q in (True, False))
    for part in ("layer", "rollout"):
        assert small[part] - large[part] == 2 * 4096 * 12288  # its widest matrix, in bfloat16


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_a_share_is_the_one_that_is_cut(gpus, monkeypatch):
    monkeypatch.setattr(distributed, "num_processes", lambda: gpus)
    for total in range(gpus, 20):
        start, stop = distributed.share_of(total, 0)
        assert type(memory._share(total, gpus)) is int and memory._share(total, gpus) == stop - start


@pytest.mark.parametrize(
    "adapters", [lora(0), lora(2, ["gate_proj"]), lora(2, ["up_proj"]), lora(2, ["gate_proj", "up_proj", "down_proj"])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_a_graph_needs_what_is_predicted(dtype, adapters):
    """Of an MLP beside which the rest is little: both branches and their product; an adapter's result in float32, twice."""
    model = network(16, 4096, 2, 1, dtype, adapters)
    tokens, mask = torch.full((4, WIDTH), 2), torch.ones(4, WIDTH, dtype=torch.bool)
    tokens[:, 0] = torch.arange(4)  # equal rows would be computed once
    with torch.no_grad(), PeakBytes() as meter:
        model.encode(tokens, mask)
    predicted = memory._forward(model.model.config, dtype.itemsize, adapters) * tokens.numel()
    assert meter.peak == pytest.approx(predicted, rel=0.15)


def test_pretraining_is_predicted_by_its_weights_and_its_batch(monkeypatch):
    """Four numbers a weight of the layers, and of each layer what it keeps of every token."""
    asked = []
    monkeypatch.setattr(memory, "_refuse", lambda most, *_: asked.append(most))
    settings = config.load(config.Pretrain, Path(__file__).parents[1] / "tiny_configs" / "countdown20_base.yaml", {})
    for rows in (1, 2):
        memory.check_pretraining(dataclasses.replace(settings, batch_size=rows))
    sizes, width = settings.network, settings.task.prompt_length + settings.sampler.length
    a_row = asked[1] - asked[0]
    assert a_row == sizes.num_hidden_layers * width * memory.layer_bytes(sizes, 4, config.Lora(), width)
    net = bare(sizes.hidden_size, sizes.intermediate_size, 8, sizes.num_hidden_layers)
    matrices = sum(p.numel() for p in net.model.layers.parameters() if p.dim() == 2)
    assert asked[0] - a_row == 4 * 4 * matrices


@pytest.mark.skipif(torch.cuda.is_available(), reason="judges a machine without a GPU")
def test_without_a_gpu_its_memory_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(memory, "main_memory", lambda: 10**9)
    memory._refuse(10**9, "cuda", 1, "all")
    with pytest.raises(ValueError, match="allowed the 1.0 GB of this machine"):
        memory._refuse(10**9 + 1, "cuda", 1, "all")


# ------------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize("name", ["reinforce", "gdpo", "egspo-sa"])
def test_a_run_is_refused_from_the_bytes_that_its_arrays_have(name, monkeypatch):
    """Counted on the arrays of a made-up rollout, its noise, and the masks and three features of its plan."""
    settings = tiny.settings(method=name, num_prompts=3)
    method = rehearsal.method_of(settings)
    made = rehearsal.blank_rollout(method, settings, settings.num_prompts)
    plan = method.plan(made, torch.Generator())
    records = sum(8 * made.records[key].numel() for key in sampler.COMPLETIONS if key in made.records)
    noise, features = 8 * made.response.numel(), 3 * 4 * plan.scored.numel()
    rollout = made.response.nbytes + made.unmask_step.nbytes + made.logp.nbytes + noise + records
    asked = rollout + plan.valid.numel() * settings.task.prompt_length + plan.scored.numel() * 2 + features
    monkeypatch.setattr(rehearsal, "main_memory", lambda: asked)
    rehearsal.check_size(method, settings)
    monkeypatch.setattr(rehearsal, "main_memory", lambda: asked - 1)
    with pytest.raises(ValueError, match="sampler.length: got .* responses a step and .* states of each; allowed what fits"):
        rehearsal.check_size(method, settings)


def test_a_made_up_rollout_has_prompts_of_one_token():
    settings = tiny.settings()
    made = rehearsal.blank_rollout(rehearsal.method_of(settings), settings)
    assert made.prompt.shape == (settings.num_generations, 1) and made.prompt_mask.all() and made.keep.all()


def test_a_target_that_matches_no_module_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="lora.target_modules: got 'attn_out', which matches no module; allowed q_proj"):
        memory.predicted_memory(run(lora=lora(8, ["attn_out"])))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which holds no config.json"):
        memory.predicted_memory(run(model=str(tmp_path)))


def test_a_config_is_enough(tmp_path):
    shape = checkpoints.PUBLISHED[LLADA] | {"n_layers": 1, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    parts = memory.predicted_memory(run(model=str(tmp_path)))
    assert parts["weights"] == 4 * (2 * 126464 * 4096 + 4 * 4096**2 + 3 * 4096 * 12288 + 3 * 4096)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.90 GiB. GPU 0 has a total capacity of 23.6 GiB")


PARTS = {  # what runs out of memory, and what the line must say
    "loading": (checkpoints, "load", "try dtype bfloat16, or quantize"),
    "evaluation": (trainer, "evaluate", "try a smaller micro_batch"),
    "rollout": (trainer.distributed, "generate", "try a smaller micro_batch"),
    "scoring": (gradient, "features", "try a smaller micro_batch"),
    "update": (gradient, "second_pass", "or lora.rank, or gradient_checkpointing true"),
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


def test_a_run_says_what_was_predicted_once_and_measures_nothing_on_a_cpu(wide, tmp_path, capfd, monkeypatch):
    settings = tiny.settings(wide, steps=3, save_every=1)
    line = f"memory: predicted {memory.peak(memory.predicted_memory(settings)) / 1e9:.3f} GB at its peak, not measured on a CPU"
    step, told = trainer.Learner.step, []

    def second_fails(learner, number: int) -> dict:
        told.append(said(capfd))
        return out_of_memory() if number == 1 else step(learner, number)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="out of memory"):
        patch.setattr(trainer.Learner, "step", second_fails)
        trainer.train(settings, tmp_path / "run")
    assert told == [[], [line]], "after the first step"
    trainer.train(settings, tmp_path / "run", resume=True)
    assert said(capfd) == [line], "once, and where a run goes on, too"


def said(capfd) -> list[str]:
    return [line for line in capfd.readouterr().err.replace("\r", "\n").splitlines() if line.startswith("memory:")]


# ------------------------------------------------------------------------------------------- moments from the start
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_that_are_there_from_the_start_are_those_that_adamw_would_make(dtype):
    """Same weights, same state, to the bit, after the first update and after the third."""
    settings = config.Optimizer(learning_rate=1e-2, weight_decay=0.1)
    words = {"lr": 1e-2, "betas": (settings.beta1, settings.beta2), "weight_decay": 0.1}
    early, late = tiny.network(dtype), tiny.network(dtype)
    pairs = [(early, trainer.make_optimizer(early, settings)), (late, torch.optim.AdamW(late.parameters(), **words))]
    assert not state(pairs[1]) and not any(value.any() for slot in state(pairs[0]).values() for value in slot.values())
    for update in range(3):
        for model, optimizer in pairs:
            noise = torch.Generator().manual_seed(update)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=noise).to(p)
            trainer.optimizer_step(model, optimizer, settings, 1e-2)
        assert_same(state(pairs[0]), state(pairs[1]))
        assert_same({0: early.state_dict()}, {0: late.state_dict()})


def state(pair) -> dict:
    return pair[1].state_dict()["state"]


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys() and len(one) > 0
    for key, slot in one.items():
        assert slot.keys() == other[key].keys()
        for name, value in slot.items():
            assert value.dtype == other[key][name].dtype and torch.equal(value, other[key][name]), name


def test_the_first_step_leaves_no_more_behind_than_the_second(wide):
    learner = trainer.Learner(tiny.settings(wide))
    for step in range(2):
        with PeakBytes() as meter:
            learner.step(step)
        assert meter.live < 10_000  # AdamW would have kept 2 x 4 bytes for each of 270,000 weights


def test_a_checkpoint_from_before_the_first_update_has_moments_and_one_without_is_read(tmp_path):
    model = tiny.network()
    optimizer = trainer.make_optimizer(model, config.Optimizer())
    runs.save_checkpoint(tmp_path / "new", model, tokenizer(), optimizer, {"step": 0})
    stored = load_file(tmp_path / "new/optimizer.safetensors")
    names = [name for name, _ in model.named_parameters()]
    assert stored.keys() == {f"{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    save_file({key: torch.ones_like(value) for key, value in stored.items()}, tmp_path / "new/optimizer.safetensors")
    assert runs.load_optimizer(tmp_path / "new", model, optimizer) == {"step": 0}
    assert all((value == 1).all() for slot in optimizer.state.values() for value in slot.values())
    optimizer = trainer.make_optimizer(model, config.Optimizer())
    save_file({}, tmp_path / "new/optimizer.safetensors")  # as older versions wrote it
    assert runs.load_optimizer(tmp_path / "new", model, optimizer) == {"step": 0}
    assert all((value == 0).all() for slot in optimizer.state.values() for value in slot.values())


# ----------------------------------------------------------------------------------------------- main memory of a process
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts pages, other systems do not")
def test_the_peak_of_a_process_begins_when_it_is_asked_for():
    megabytes = 2**20
    resident = memory.Resident()
    torch.ones(64 * megabytes)  # 256 MiB, gone at once
    assert 250 * megabytes < resident.peak() < 300 * megabytes
    assert memory.Resident().peak() < 50 * megabytes, "what was before is not counted"


def test_a_system_that_does_not_count_pages_is_not_asked(monkeypatch):
    def missing(self, text):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "write_text", missing)
    assert memory.Resident().peak() is None
