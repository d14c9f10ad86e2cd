"""benchmarks/llada_8b.py: its products against a counter of operations, its prediction against arithmetic, a tiny run."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tiny
from minidrl import features as feat
from minidrl import memory, trainer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    return tiny.script("llada_8b")


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole head", "head in parts"])
@pytest.mark.parametrize("again", [True, False])
def test_the_products_of_a_step_are_those_that_are_multiplied(again, in_parts, bench, tmp_path, monkeypatch):
    """torch's counter sees every product; what attention multiplies it sees in the plain implementation."""
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


def test_the_published_shape_is_not_run_on_a_cpu(bench, capsys):
    with pytest.raises(SystemExit) as status:
        bench.main(["--shape", "8b", "--device", "cpu"])
    assert status.value.code == 2 and "no GPU: --predict, or --shape tiny" in capsys.readouterr().err
    bench.main(["--predict", "--device", "cpu", "--rate32", "50"])
    assert "50 in float32 (matmul_precision high)" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def precision():
    """The recipe's matmul_precision is set for the whole process."""
    yield
    torch.set_float32_matmul_precision("highest")
