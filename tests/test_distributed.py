"""Two processes do what one does: the same rollouts, losses, gradients, weights and checkpoints.

Both processes are started once, connected by gloo, and run every scenario of this file; the tests compare what they found with
what the same scenario finds here, in a single process.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from minidrl import denoiser, loop, sampler
from minidrl import features as feat
from minidrl.run import checkpoints, config, distributed, train
from minidrl.tasks.countdown import Countdown

WORLD, PATIENCE = 2, 300
ADAPTERS = {"lora": config.Lora(rank=2, alpha=4.0, target_modules=["q_proj", "down_proj"]), "gradient_checkpointing": True}
# A linear method; ELBO ratios; old masks of their own; a reference and paired plans; staircases of blocks, with and without the
# sampler as anchor; other features: the order, the likeliest tokens; adapters, whose reference is the network without them.
CASES = {
    "reinforce": {},
    "grpo": {},
    "stabledrl-sequence": {},
    "diffu-grpo-paper": {},
    "trace-block": {},
    "stabledrl-block": {},
    "egspo-exact": {},
    "dppo-topk": {},
    "adapters": {"method": "diffu-grpo-paper", **ADAPTERS},
}
RUNS = ("diffu-grpo-paper", "stabledrl-block")


@contextlib.contextmanager
def patched():
    """Rewards that an untrained network can earn, and a list of the forwards that this process does."""
    calls, encode = [], denoiser.Denoiser.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Countdown, "judge", tiny.varied_judge)
        patch.setattr(denoiser.Denoiser, "encode", lambda self, x, mask: calls.append(len(x)) or encode(self, x, mask))
        yield patch, calls


def whole(tensors) -> torch.Tensor:
    return torch.cat([distributed.full_tensor(t.detach()).flatten() for t in tensors]).double()


def given_rollouts(folder: Path, case: str) -> dict:
    """A step of two updates on 3 x 4 given responses, ten forwards at a time, logits of a few rows at a time."""
    with patched() as (patch, _):
        patch.setattr(feat, "HEAD_NUMBERS", 100)
        words = {"method": case, "num_prompts": 4, "micro_batch": 10, **CASES[case]}
        run = tiny.run_on(patch, tiny.network(torch.float64), **words)
        experience, gradients, step = tiny.experience(run), [], loop.optimizer_step
        patch.setattr(loop, "collect", lambda *_: experience)

        def seen(model, *rest):
            gradients.append(whole(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()))
            return step(model, *rest)

        patch.setattr(loop, "optimizer_step", seen)
        row = loop.take_step(run, 0)
        metrics = {name: value for name, value in row.items() if "seconds" not in name}
        return {"metrics": metrics, "gradients": gradients, "weights": whole(run.model.parameters())}


def rollouts(folder: Path, order: str, attention: str) -> dict:
    """What the sampler makes of three prompts, left-padded; some responses end early."""
    with patched() as (_, calls):
        model = tiny.network(torch.float64)
        with torch.no_grad():
            model.model.lm_head.weight[2] *= 2  # [EOS]
        if attention == "block_causal":
            model = denoiser.Denoiser(model.model, block_length=2)
        distributed.shard(model)
        noise = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, model.vocab_size, (3, 4), generator=noise)
        mask = torch.arange(4) >= torch.tensor([[0], [2], [0]])
        words = {"order": order, "attention": attention, "length": 8, "block_length": 2, "tokens_per_step": 1}
        settings = sampler.Sampler(temperature=1.0, **words)
        how = {"eos_token_id": 2, "num_generations": 3, "generator": noise, "micro_batch": 2, "records": ["entropy", "topk"]}
        made = distributed.processes().generate(model, prompt, mask, settings, **how)
        fields = {key: value for key, value in vars(made).items() if torch.is_tensor(value)} | made.records
        return {"rollout": fields, "next": torch.rand(3, generator=noise)}


def settings_of(folder: Path, method: str, base: str = "base", **changes) -> config.Train:
    words = {"num_prompts": 4, "micro_batch": 3, "save_every": 1, "evaluate": config.Evaluation(n=5), "threads": 1}
    return tiny.settings(folder / base, **{"method": method, **words, **changes})


def run_into(out: Path, settings: config.Train, resume: bool = False) -> dict:
    with patched():
        summary = train.train(settings, out, resume)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    return {"metrics": numbers, "summary": {k: v for k, v in summary.items() if k != "seconds"}}


def whole_run(folder: Path, method: str) -> dict:
    """Two steps, with a checkpoint after each."""
    return run_into(folder / f"{method}-{distributed.num_processes()}", settings_of(folder, method))


def resumed(folder: Path, method: str) -> dict:
    """The second step, from the checkpoint that a single process left."""
    out, left = folder / f"{method}-resumed-{distributed.num_processes()}", ("checkpoint-2", "summary.json", "curve.png")
    distributed.on_main(lambda: shutil.copytree(folder / f"{method}-1", out, ignore=shutil.ignore_patterns(*left)) and None)
    return run_into(out, settings_of(folder, method), resume=True)


def again_by_two(folder: Path, name: str, **changes) -> dict:
    """A run of two processes, and its second step again, from the checkpoint that they left."""
    settings = settings_of(folder, "stabledrl-sequence", **changes)
    found = run_into(folder / name, settings)
    left = shutil.ignore_patterns("checkpoint-2", "summary.json", "curve.png")
    distributed.on_main(lambda: shutil.copytree(folder / name, folder / f"{name}-resumed", ignore=left) and None)
    return {"whole": found, "resumed": run_into(folder / f"{name}-resumed", settings, resume=True)}


def refused(folder: Path, **changes) -> dict:
    try:
        train.train(settings_of(folder, "reinforce", **changes), folder / "refused")
    except ValueError as error:
        return {"said": str(error), "left": (folder / "refused").exists()}
    return {"said": "", "left": True}


REFUSED = {"num_prompts: got 3; allowed multiples of the 2": {"num_prompts": 3}, "compile: got True": {"compile": True}}
SAMPLERS = [("low_confidence", "bidirectional"), ("random", "bidirectional"), ("low_confidence", "block_causal")]
BEFORE = {f"run {method}": (whole_run, {"method": method}) for method in RUNS}
SCENARIOS = {f"given {case}": (given_rollouts, {"case": case}) for case in CASES}
SCENARIOS |= {f"rollouts {o} {a}": (rollouts, {"order": o, "attention": a}) for o, a in SAMPLERS}
SCENARIOS |= {f"resumed {method}": (resumed, {"method": method}) for method in RUNS}
AGAIN = {"half": {"dtype": "float32", "compute_dtype": "bfloat16"}, "adapted": {"dtype": "bfloat16", **ADAPTERS}}
AGAIN |= {"published": {"base": "llada"}}
PAIRED = {name: (again_by_two, {"name": name, **changes}) for name, changes in AGAIN.items()}
PAIRED |= {said: (refused, changes) for said, changes in REFUSED.items()}


def work(rank: int, port: int, folder: Path) -> None:
    """Everything that a process of two has to do, and what it found, in a file."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"], found = str(port), {}
    with distributed.process_group("cpu"):
        for name, (scenario, given) in (BEFORE | SCENARIOS | PAIRED).items():
            try:
                found[name] = scenario(folder, **given)
            except Exception:  # the other process must not wait: what went wrong is looked at where results are compared
                found[name] = {"error in the process": traceback.format_exc()}
    torch.save(found, folder / f"found-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    tiny.checkpoint(folder / "base")
    (folder / "llada").mkdir()
    checkpoints.save_as_llada(*checkpoints.load(folder / "base"), folder / "llada")
    return folder


@pytest.fixture(scope="module")
def results(folder) -> tuple[dict, list[dict]]:
    """What a single process found, and each of two. One that waits for ever is ended."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    single = {name: scenario(folder, **given) for name, (scenario, given) in BEFORE.items()}
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(rank, port, folder)) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    single |= {name: scenario(folder, **given) for name, (scenario, given) in SCENARIOS.items()}
    for worker in workers:
        worker.join(PATIENCE)
        worker.kill()
    assert [worker.exitcode for worker in workers] == [0] * WORLD, "a process failed, or was still waiting"
    return single, [torch.load(folder / f"found-{rank}.pt") for rank in range(WORLD)]


def differences(found: object, expected: object, tolerance: float, where: str = "") -> list[str]:
    """Where two results differ by more than ``tolerance``, of the largest number of a tensor, of 1 for small numbers."""
    if isinstance(expected, dict):
        lines = [] if found.keys() == expected.keys() else [f"{where}: {found}"]
        shared = sorted(found.keys() & expected.keys())
        return lines + [line for k in shared for line in differences(found[k], expected[k], tolerance, f"{where}/{k}")]
    if isinstance(expected, list):
        lines = [] if len(found) == len(expected) else [f"{where}: {len(found)} entries"]
        pairs = enumerate(zip(found, expected, strict=False))
        return lines + [line for i, (a, b) in pairs for line in differences(a, b, tolerance, f"{where}/{i}")]
    if torch.is_tensor(expected) and expected.is_floating_point() or isinstance(expected, float):
        a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
        scale = max(1.0, float(b.abs().max()))
        close = a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)
        return [] if close else [f"{where}: {a} instead of {b}"]
    same = torch.equal(found, expected) if torch.is_tensor(expected) else found == expected
    return [] if same else [f"{where}: {found} instead of {expected}"]


def same_checkpoints(found: Path, expected: Path) -> None:
    for path in sorted(expected.glob("checkpoint-*/*.safetensors")):
        a, b = load_file(found / path.relative_to(expected)), load_file(path)
        assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-5, rtol=0) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_find_what_one_finds(name, results, folder):
    single, pair = results
    tolerance = 1e-5 if name.startswith("resumed") else 1e-12
    tolerance = 1e-6 if name == "given adapters" else tolerance  # which are float32
    for found in pair:
        assert differences(found[name], single[name], tolerance) == []
    if name.startswith("given"):
        assert all(g.abs().max() > 1e-3 for g in single[name]["gradients"])


@pytest.mark.slow
@pytest.mark.parametrize("method", RUNS)
def test_a_run_of_two_processes_is_the_run_of_one(method, results, folder):
    single, pair = results
    for found in pair:
        assert differences(found[f"run {method}"], single[f"run {method}"], 1e-5) == []
    same_checkpoints(folder / f"{method}-2", folder / f"{method}-1")


@pytest.mark.slow
@pytest.mark.parametrize("method", RUNS)
def test_a_run_of_two_processes_is_continued_by_one(method, results, folder, tmp_path):
    single, _ = results
    left = shutil.ignore_patterns("checkpoint-2", "summary.json", "curve.png")
    shutil.copytree(folder / f"{method}-2", tmp_path / "run", ignore=left)
    found = run_into(tmp_path / "run", settings_of(folder, method), resume=True)
    assert differences(found, single[f"run {method}"], 1e-5) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_other_arithmetic_adapters_or_names_keep_float32_weights_and_resume_to_the_bit(name, results, folder):
    for found in results[1]:
        assert found[name]["whole"] == found[name]["resumed"]
    (path,) = (folder / name / "checkpoint-2").glob("*model.safetensors")
    whole, again = load_file(path), load_file(folder / f"{name}-resumed/checkpoint-2" / path.name)
    assert all(value.dtype == torch.float32 and torch.equal(value, again[key]) for key, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("said", REFUSED)
def test_what_two_processes_cannot_do_is_refused_by_both(said, results):
    for found in results[1]:
        assert found[said]["said"].startswith(said) and not found[said]["left"]


def test_shares_have_one_size_and_cover_everything_once(monkeypatch):
    for world in (1, 2, 3, 7):
        monkeypatch.setattr(distributed, "num_processes", lambda world=world: world)
        for total in (0, 1, 2, 5, 6, 7, 8, 30):
            spans = [distributed.share_of(total, process) for process in range(world)]
            size = -(-total // world)
            assert all(0 <= start and stop <= total and stop - start == size for start, stop in spans)
            own = [i for process, (_, stop) in enumerate(spans) for i in range(process * size, stop)]
            assert own == list(range(total))
