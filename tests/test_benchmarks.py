"""benchmarks/llada_8b.py: its products against a counter of operations, its prediction against arithmetic, a tiny run."""

import contextlib
import json
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tiny
from minidrl import checkpoints, memory, trainer
from minidrl import features as feat
from minidrl.denoiser import Denoiser

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    return tiny.script("llada_8b")


@pytest.mark.parametrize(
    ("again", "in_parts"),
    [(True, True), (False, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, False), (False, True)))],
)
def test_the_products_of_a_step_are_those_that_are_multiplied(again, in_parts, bench, tmp_path, monkeypatch):
    """torch's counter sees every product; what attention multiplies it sees in the plain implementation.

    The prediction counts all rows of a forward, as if none were equal to another."""
    monkeypatch.setattr(Denoiser, "encode", Denoiser._encode)
    settings = bench.settings_of("tiny", "cpu", tmp_path)
    settings = type(settings)(**{**vars(settings), "gradient_checkpointing": again})
    if in_parts:
        monkeypatch.setattr(feat, "HEAD_NUMBERS", 20 * 500)  # 20 rows of its vocabulary
    learner, counted, plain = bench.learner_of(settings), {}, trainer.Clock

    class Counter(plain):
        @contextlib.contextmanager
        def phase(self, name: str):
            with FlopCounterMode(display=False) as counter, super().phase(name):
                yield
            counted[name] = counted.get(name, 0) + counter.get_total_flops()

    monkeypatch.setattr(trainer, "Clock", Counter)
    with sdpa_kernel(SDPBackend.MATH):
        row = learner.step(0)
    assert row["completions/mean_length"] == settings.sampler.length, "no response ends early"
    assert (
        learner.model.head(learner.model.encode(torch.full((1, 9), 7), None))[..., learner.tok.eos_token_id] == -torch.inf
    ).all()
    work = bench.work(settings)
    assert counted.keys() == work.keys() == bench.AIMS.keys() | {"scoring"}
    for name, (calls, one) in work.items():
        assert row[f"network_calls/{name}"] == pytest.approx(calls, rel=0.1)  # a state may by chance hide nothing
        repeated = one.again_half + one.again_single
        # Nothing needs the gradients of what enters q, k and v of the first layer; checkpointing computes them all the same.
        spared = 2 * 52 * 3 * (64 * 64 + 4 * 64) if name == "update" and not again else 0
        expected = row[f"network_calls/{name}"] * (one.needed + repeated - spared)
        assert counted[name] == pytest.approx(expected, rel=0.003)
        assert bool(repeated) == ((again or in_parts) and name == "update")
    assert work["rollout"][0] * work["rollout"][1].needed == counted["rollout"]


def test_the_prediction_is_the_published_shape(bench, tmp_path):
    """By hand: 32 layers of 4 x 4096 x 4096 and 3 x 4096 x 12288, of 456 tokens; 128 steps of 12 responses."""
    layers, tokens, rank = 32, 456, 128
    base = layers * (4 * 4096**2 + 3 * 4096 * 12288)
    adapters = layers * rank * (4 * (4096 + 4096) + 3 * (4096 + 12288))
    attention, head = 4 * tokens**2 * 4096 * layers, 2 * 126464 * 4096
    settings = bench.settings_of("8b", "cuda", tmp_path)
    work = bench.work(settings)
    calls, one = work["rollout"]
    assert (calls, one.half, one.single) == (12 * 128, 2 * tokens * base + attention + 32 * head, 2 * tokens * adapters)
    calls, one = work["update"]
    rows = (one.half - 4 * tokens * base - 3 * attention) / (2 * head)
    assert calls == 12 * 36 and one.single == 6 * tokens * adapters and rows == pytest.approx(128, abs=2)  # half of 256
    assert (one.again_half, one.again_single) == (2 * tokens * base + attention + rows * head, 2 * tokens * adapters)
    rows = {row["phase"]: row for row in bench.predicted_rows(settings, 7e14, 5e13)}
    assert rows["rollout"]["seconds at best"] == pytest.approx(14.29 + 9.4, abs=0.05)
    assert rows["rollout"]["seconds at the aim"] == pytest.approx(1.047e16 / 7e14 / 0.6, rel=1e-3)
    peak = memory.peak(memory.predicted_memory(settings))
    assert 16.03e9 + 4 * 4 * adapters < peak < 40e9
    text = bench.predict(settings, 7e14, 5e13)
    assert text.startswith("PREDICTION, nothing was measured.") and f"peak: {peak / 1e9:.3g} GB" in text


def test_a_tiny_step_is_measured_by_the_same_code(bench, capsys, monkeypatch):
    rate, precisions = bench.rate, []
    monkeypatch.setattr(bench, "rate", lambda *a: precisions.append(torch.get_float32_matmul_precision()) or rate(*a))
    bench.main(["--shape", "tiny", "--device", "cpu"])
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in cells] == ["rollout", "scoring", "update"] and "not measured on a CPU" in out
    assert "float32 (matmul_precision high)" in out and precisions == ["high", "high"]
    assert out.startswith("CPU, torch") and "whole step:" in out
    half = 1e12 * float(out.split(" TFLOP/s in bfloat16")[0].rpartition(" ")[2])
    for _, sequences, needed, seconds, share in cells:
        assert int(sequences) > 50 and float(seconds) > 0
        assert float(share) == pytest.approx(1e12 * float(needed) / half / float(seconds), rel=0.02)


def test_seconds_are_those_of_the_second_step_and_wait_for_the_device(bench, tmp_path, monkeypatch):
    waited, steps = [], []
    monkeypatch.setattr(bench, "wait", lambda device: waited.append(device))
    step = trainer.Learner.step
    monkeypatch.setattr(trainer.Learner, "step", lambda self, i: steps.append(i) or step(self, i))
    row, seconds = bench.measured(bench.settings_of("tiny", "cpu", tmp_path))
    assert steps == [0, 1] and row["step"] == 2
    phases = sum(value for key, value in row.items() if key.startswith("seconds/"))
    assert 0.5 * seconds < phases < seconds
    assert len(waited) == 2, "before and after the second step; the phases have the trainer's clock"


# ------------------------------------------------------------------------------------------------------ a reduced step
TINY_QWEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
TINY_QWEN |= {"intermediate_size": 48, "max_position_embeddings": 64}
SMALLER = {"8b": {}, "dream-7b": {**TINY_QWEN, "mask_token_id": 299}, "sdar-4b": {**TINY_QWEN, "head_dim": 8}}
SMALLER["a2d-0.6b"] = {**TINY_QWEN, "head_dim": 8, "mask_token_id": 299, "eos_token_id": 1}


def smaller(bench, name: str) -> tuple[dict, int]:
    """A model's config.json with sizes for a test, and its mask."""
    raw = bench.SHAPES[name][0] | (bench.TINY if name == "8b" else SMALLER[name])
    return raw, raw.get("mask_token_id", 299)


@pytest.mark.parametrize("name", SMALLER)
def test_a_reduced_step_loads_random_files_of_every_family(name, bench, tmp_path, monkeypatch):
    raw, mask = smaller(bench, name)
    load, loaded = checkpoints.load, []
    monkeypatch.setattr(checkpoints, "load", lambda *words: loaded.append(load(*words)) or loaded[-1])
    text = bench.measure_reduced(raw, mask, tmp_path, "cpu")
    ((model, tok),) = loaded
    assert model.family is checkpoints.FAMILIES[raw["model_type"]] and tok.mask_token_id == mask
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and model.block_length == raw.get("block_size")
    base = sum(p.numel() for n, p in model.named_parameters() if "lora" not in n)
    assert f"{base:,} random weights in bfloat16" in text and "loaded by checkpoints.load" in text
    rows = re.findall(r"^\| (\w+) +\| +(\d+) \| +([\d.]+) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["rollout", "scoring", "update"] and all(float(row[2]) > 0 for row in rows)
    assert int(rows[0][1]) == 2 * 2 and 0 < int(rows[1][1]) <= 2 * 3 * 2, "2 responses in 2 steps; 2 updates of 3 states each"
    assert re.search(r"peak resident .*: predicted [\d.e-]+ GB, measured [\d.e-]+ GB$", text) or not Path("/proc").is_dir()


@pytest.mark.parametrize("name", ["8b", "dream-7b", "sdar-1.7b", "sdar-4b", "sdar-8b", "a2d-0.6b"])
def test_the_shapes_have_the_sizes_of_the_published_files(name, bench, tmp_path):
    """Bytes of the weights on the Hub, GB: the files of LLaDA-8B-Instruct, SDAR-1.7B-, 4B- and 8B-Chat; 7.6 B of Qwen2.5.

    The middle rung trains all its weights, in float32: the 0.44 B that Qwen3-0.6B has without embeddings, and its embeddings.
    """
    published = {"8b": 2.11 + 2.95 + 2.99 + 2.95 + 2.92 + 2.11, "dream-7b": 15.2}
    published |= {"sdar-1.7b": 4.06, "sdar-4b": 4.97 + 3.86, "sdar-8b": 4.9 + 4.92 + 4.98 + 1.58}
    published["a2d-0.6b"] = 4 * (0.44 + 151936 * 1024 / 1e9)
    raw, _ = bench.SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    parts = memory.predicted_memory(bench.reduced(raw, tmp_path, "cpu"))
    assert parts["weights"] / 1e9 == pytest.approx(published[name], abs=0.05)


def test_random_files_have_rows_of_their_own_and_norms_of_one(bench, tmp_path):
    raw, mask = smaller(bench, "dream-7b")
    size = bench.write_checkpoint(raw, mask, tmp_path, shards=3)
    model, _ = checkpoints.load(tmp_path)
    weights = model.model.state_dict()
    assert size == pytest.approx(2 * model.num_parameters(), rel=0.1)
    for name, weight in weights.items():
        assert weight.isfinite().all() and ((weight == 1).all() if "norm" in name else weight.float().std() > 0.01)
        assert weight.ndim == 1 or len(weight.unique(dim=0)) == len(weight)


def test_files_hold_what_they_may(bench):
    sizes = {name: torch.Size([n]) for name, n in {"a": 3, "b": 4, "c": 9, "d": 1, "e": 1}.items()}
    assert bench.files_of(sizes, 7) == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize("bias", [False, True])
def test_the_way_back_in_float32_is_the_gradient(bias, bench):
    """Of frozen weights with more rows than a part has; torch's own is as far from it as bfloat16 is."""
    noise = torch.Generator().manual_seed(0)
    x, weight, out = (torch.randn(*s, generator=noise).bfloat16() for s in ((2, 3, 8), (5000, 8), (2, 3, 5000)))
    extra = torch.ones(5000).bfloat16() if bias else None
    x.requires_grad_()
    found = bench.linear(x, weight, extra)
    assert torch.equal(found, torch.nn.functional.linear(x, weight, extra))
    found.backward(out)
    expected = out.float() @ weight.float()
    torch.testing.assert_close(x.grad.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("short", ["memory", "disk"])
def test_a_full_size_needs_room(short, bench, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(bench, "available", lambda: 10**9 if short == "memory" else 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 10**9 if short == "disk" else 10**12))
    with pytest.raises(SystemExit, match=rf"^{short}: got 1\.0 GB free; allowed from 1[67]\.\d GB$"):
        bench.main(["--shape", "8b", "--device", "cpu"])


def test_predictions_are_made_anywhere(bench, capsys):
    bench.main(["--predict", "--device", "cpu", "--rate32", "50"])
    assert "50 in float32 (matmul_precision high)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as status:
        bench.main(["--predict", "--shape", "sdar-4b"])
    assert status.value.code == 2 and "--predict: got --shape sdar-4b; allowed 8b, tiny" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def precision():
    """The recipe's matmul_precision is set for the whole process."""
    yield
    torch.set_float32_matmul_precision("highest")
