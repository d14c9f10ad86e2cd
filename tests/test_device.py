"""What must hold on the device that a run uses: parity, replay, resume, compile.

The device is MINIDRL_DEVICE, else cuda; without it everything here is skipped. `research/benches/gpu.sh tests` runs this file.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import test_loading
import tiny
from minidrl import algorithms as alg
from minidrl import denoiser, loop, sampler
from minidrl import features as feat
from minidrl.run import checkpoints, report, train

DEVICE = torch.device(os.environ.get("MINIDRL_DEVICE", "cuda"))
GPU = DEVICE.type == "cuda"
on_a_gpu = pytest.mark.skipif(not GPU, reason="graphs of kernels are CUDA's; the compiler is tested in test_lora.py")
pytestmark = [
    pytest.mark.skipif(
        GPU and not torch.cuda.is_available(), reason="torch finds no GPU (MINIDRL_DEVICE names another device)"
    ),
    pytest.mark.filterwarnings("default"),  # a GPU's libraries warn of what is none of ours
]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32 products in another order


@pytest.fixture(autouse=True)
def float32():
    """As a run of its own begins."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("device") / "base")


def tokens(model: denoiser.Denoiser) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (3, 12) and their mask, left-padded, on the model's device."""
    ids = torch.randint(3, model.vocab_size - 1, (3, 12), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device), (torch.arange(12) >= torch.tensor([[0], [4], [1]])).to(model.device)


# ---------------------------------------------------------------------------------------------------------------- parity
def test_llada_is_the_released_code(tmp_path):
    test_loading.llada(tmp_path)
    model, _ = checkpoints.load(tmp_path, DEVICE)
    logits = model.model.lm_head(model.encode(test_loading.INPUTS["ids"].to(DEVICE), None))
    torch.testing.assert_close(logits.cpu(), test_loading.EXPECTED["logits_full"], **CLOSE)


@pytest.mark.parametrize("family", test_loading.MAKERS)
@torch.no_grad()
def test_every_family_answers_as_on_a_cpu(family, tmp_path):
    test_loading.MAKERS[family](tmp_path)
    here, there = (checkpoints.load(tmp_path, device, torch.float32)[0] for device in (DEVICE, "cpu"))
    real = tokens(there)[1]
    found, expected = (
        model.head(model.encode(*tokens(model)))[mask] for model, mask in ((here, real.to(DEVICE)), (there, real))
    )
    torch.testing.assert_close(found.cpu(), expected, **CLOSE)


@pytest.mark.parametrize("method", ["grpo", "gdpo-sequence", "egspo-accounts"])
def test_the_gradient_is_that_of_a_cpu(method, base):
    """Of one rollout, drawn on the CPU and moved; float32, in other orders of summation."""
    found = {}
    for device in ("cpu", str(DEVICE)):
        experience = tiny.experience(train.start(tiny.settings(base, method=method, num_iterations=1)))
        experience.rollout = moved(experience.rollout, device)
        experience.reward = experience.reward.to(device)
        run = train.start(tiny.settings(base, method=method, num_iterations=1, device=device))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "collect", lambda run, step, made=experience: made)
            patch.setattr(loop, "optimizer_step", lambda model, *_: found.setdefault(len(found), tiny.gradient(model)).norm())
            loop.take_step(run, 0)
    one, other = (gradient.cpu() for gradient in found.values())
    assert one.norm() > 0 and (one - other).norm() < 1e-3 * one.norm()


def moved(rollout: alg.Rollout, device: str) -> alg.Rollout:
    """The same rollout elsewhere."""
    tensors = {name: value.to(device) for name, value in vars(rollout).items() if torch.is_tensor(value)}
    records = {name: value.to(device) for name, value in rollout.records.items()}
    return dataclasses.replace(rollout, **tensors, records=records)


# ---------------------------------------------------------------------------------------------------------------- replay
@pytest.mark.parametrize("order", sampler.ORDERS)
@torch.no_grad()
def test_the_replay_of_a_rollout_has_its_log_probabilities(order):
    """Every state of the trajectory, computed again: what a ratio of 1 rests on."""
    model = tiny.network().to(DEVICE)
    settings = sampler.Sampler(order=order, temperature=0.8, length=8, block_length=4, tokens_per_step=2)
    prompt, mask = (x[:, :5] for x in tokens(model))
    words = {"eos_token_id": 2, "num_generations": 4, "generator": torch.Generator().manual_seed(1)}
    rollout = sampler.generate(model, prompt, mask, settings, **words)
    plan = alg.replay_plan(rollout, torch.Generator().manual_seed(2), num_states=None, min_entropy=0.0)
    logp = feat.features(model, rollout, plan, temperature=0.8)["logp"].sum(0)
    assert rollout.response.device.type == DEVICE.type and rollout.keep.any()
    torch.testing.assert_close(logp[rollout.keep], rollout.logp[rollout.keep], **CLOSE)


# ---------------------------------------------------------------------------------------------------------------- resume
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(base, tmp_path, monkeypatch):
    """In torch's deterministic mode: a sum that a GPU forms in any order has no bits to compare."""
    monkeypatch.setattr(report, "write_curve", lambda out: None)
    settings = tiny.settings(base, steps=4, save_every=2, method="grpo", device=str(DEVICE))
    take, torch_mode = loop.take_step, torch.are_deterministic_algorithms_enabled()

    def stop(run, step):
        return take(run, step) if step < 3 else (_ for _ in ()).throw(KeyboardInterrupt)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train.train(settings, tmp_path / "whole")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(loop, "take_step", stop)
            train.train(settings, tmp_path / "parts")
        train.train(settings, tmp_path / "parts", resume=True)
    finally:
        torch.use_deterministic_algorithms(torch_mode)
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, parts = (load_file(tmp_path / name / "checkpoint-4" / file) for name in ("whole", "parts"))
        far = {name: float((whole[name].double() - parts[name].double()).abs().max()) for name in whole}
        assert whole.keys() == parts.keys() and not any(far.values()), f"{file}: largest difference {max(far.values()):.3g}"


# --------------------------------------------------------------------------------------------------- ---------------compile
@on_a_gpu
def test_a_compiled_network_is_the_network():
    model = tiny.network().to(DEVICE)
    network = denoiser.compiled(model)
    for _ in range(2):
        found = {}
        for name, one in {"plain": model, "compiled": network}.items():
            logits = one.head(one.encode(*tokens(model)))
            logits[..., : model.mask_token_id].square().mean().backward()
            found[name] = (logits.detach()[tokens(model)[1]], tiny.gradient(model))
        for plain, fast in zip(*found.values(), strict=True):
            torch.testing.assert_close(fast, plain, **CLOSE)
        tiny.perturb(model, 0.1)


@on_a_gpu
def test_a_compiled_run_learns_as_the_plain_one(base, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write_curve", lambda out: None)
    losses = {}
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        train.train(tiny.settings(base, method="grpo", device=str(DEVICE), compile=compiled), out)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[compiled] = [row["grad_norm"] for row in rows if "grad_norm" in row]
    assert losses[True] == pytest.approx(losses[False], rel=1e-2, abs=1e-5)
