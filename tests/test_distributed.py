"""Two processes do what one does: the same rollouts, losses, gradients, weights and checkpoints.

Both processes are started once, connected by gloo, and run every scenario of this file; the tests compare what they found with
what the same scenario finds here, in a single process.
"""

import contextlib
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import shutil
import socket
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tiny
from minidrl import algorithms as alg
from minidrl import denoiser, gradient, sampler
from minidrl import features as feat
from minidrl.run import checkpoints, config, distributed, memory, trainer
from minidrl.run.cli import _report, main
from minidrl.run.launch import LocalError, RunError
from minidrl.tasks.countdown import Countdown
from test_memory import PeakBytes, saved

WORLD, PATIENCE = 2, 400
DTYPES = {"float32": (torch.float32, 1e-6), "float64": (torch.float64, 1e-12)}
EXACT_KL = {"kl.form": "exact", "kl.beta": 0.1}
ADAPTERS = {"lora": config.Lora(rank=2, alpha=4.0, target_modules=["q_proj", "down_proj"]), "gradient_checkpointing": True}
# A linear row; ELBO ratios of a sequence; old masks of their own; a KL to a reference, paired plans; a staircase of blocks,
# with the sampler as anchor and without; other features: the order, the likeliest tokens, a KL over the vocabulary;
# adapters, whose reference is the network without them; and with logits of a few rows at a time.
ROWS = {
    "reinforce": {},
    "grpo": {},
    "stabledrl": {},
    "diffu-grpo": {},
    "trace-block": {},
    "stabledrl-block": {},
    "egspo-exact": {},
    "dppo-topk": {},
    "spg": {"method_options": EXACT_KL},
    "adapters": {"method": "diffu-grpo", **ADAPTERS},
    "adapters, in parts": {"method": "diffu-grpo", **ADAPTERS},
    "order, in parts": {"method": "egspo-exact"},
    "layers recomputed": {"method": "grpo", "gradient_checkpointing": True},
}


# ------------------------------------------------------------------------------------------------------------ scenarios
#
# Each returns numbers. A single process and every one of two processes must return the same; what may differ by process is
# under the key "calls": the number of sequences in each forward.


@contextlib.contextmanager
def patched():
    """Rewards that an untrained network can earn, and a list of the forwards that this process does."""
    calls, encode, staircase = [], denoiser.Denoiser.encode, denoiser.Denoiser.encode_staircase
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Countdown, "score", tiny.varied_score)
        patch.setattr(denoiser.Denoiser, "encode", lambda self, x, mask: calls.append(len(x)) or encode(self, x, mask))
        counted = lambda self, x, *a, **words: calls.append(len(x)) or staircase(self, x, *a, **words)  # noqa: E731
        patch.setattr(denoiser.Denoiser, "encode_staircase", counted)
        yield patch, calls


def learner_of(patch, row: str, stored: str, /, **changes) -> trainer.Learner:
    words = {"method": row, "num_prompts": 4, **ROWS[row], **changes}
    if "in parts" in row:
        patch.setattr(feat, "HEAD_NUMBERS", 100)
    return tiny.learner_on(patch, tiny.network(DTYPES[stored][0]), **words)


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([distributed.full_tensor(g).flatten() for g in grads]).double()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([distributed.full_tensor(p.detach()).flatten() for p in model.parameters()]).double()


def given_rollouts(folder: Path, row: str, dtype: str, spoil: Callable = lambda patch, learner: None) -> dict:
    """A step of two updates on 3 x 4 given responses, ten forwards at a time."""
    with patched() as (patch, calls):
        learner = learner_of(patch, row, dtype, micro_batch=10)
        experience, found = tiny.experience(learner), []
        patch.setattr(learner, "collect", lambda *_: experience)
        step = trainer.optimizer_step
        see = lambda model, *rest: found.append(gradient_of(model)) or step(model, *rest)  # noqa: E731
        patch.setattr(trainer, "optimizer_step", see)
        spoil(patch, learner)
        calls.clear()
        logged = learner.step(0)
        metrics = {name: value for name, value in logged.items() if "seconds" not in name}
        return {"calls": list(calls), "metrics": metrics, "gradients": found, "weights": weights(learner.model)}


def few_forwards(folder: Path, forwards: int, method: str, spoil: Callable = lambda patch, learner: None) -> dict:
    """A plan of which so few forwards are valid that a process has nothing of its own to do."""
    with patched() as (patch, calls):
        learner = learner_of(patch, method, "float64", micro_batch=1)
        rollout = tiny.experience(learner).rollout
        plan = learner.method.plan(rollout, torch.Generator().manual_seed(5))
        chosen = torch.zeros(plan.needed.numel(), dtype=torch.bool)
        chosen[torch.tensor([7, 2, 20])[:forwards]] = True
        plan = dataclasses.replace(plan, valid=plan.valid & chosen.view_as(plan.needed).repeat_interleave(plan.blocks, 0))
        spoil(patch, learner)
        calls.clear()
        feature = learner.score(rollout, plan, trainer.Clock())
        cotangent = {"logp": torch.linspace(-1, 1, plan.scored.numel()).view(plan.scored.shape).double() * plan.scored}
        seen, count = gradient.second_pass(learner.network, rollout, plan, cotangent, temperature=1.0, size=1)
        found = {"feature": feature["logp"], "seen": seen["logp"], "gradients": gradient_of(learner.model), "count": count}
        return {"calls": list(calls), **found}


# Rows that end early and at different blocks; 3 x 3 of them, which 2 processes cannot share evenly.
SAMPLERS = {
    "blocks": sampler.Sampler(order="left_to_right", temperature=1.0, length=8, block_length=2, tokens_per_step=1),
    "random": sampler.Sampler(order="random", temperature=0.7, length=8, block_length=4, tokens_per_step=2),
    "confident": sampler.Sampler(order="low_confidence", temperature=1.0, length=8, block_length=2, tokens_per_step=1),
    "greedy": sampler.Sampler(order="low_confidence", temperature=0.0, length=8, block_length=2, tokens_per_step=2),
    "cache": sampler.Sampler(
        order="left_to_right",
        temperature=1.0,
        length=8,
        block_length=2,
        tokens_per_step=1,
        attention="block_causal",
        cache="exact",
    ),
}


def rollouts(folder: Path, name: str) -> dict:
    """What the sampler makes of three prompts, left-padded."""
    settings = SAMPLERS[name]
    with patched() as (_, calls):
        model = tiny.network(torch.float64)
        with torch.no_grad():
            model.model.lm_head.weight[2] *= 2  # [EOS] early in some rows
        model = denoiser.Denoiser(model.model, block_length=2) if settings.cache == "exact" else model
        distributed.shard(model)
        noise = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, model.vocab_size, (3, 4), generator=noise)
        mask = torch.arange(4) >= torch.tensor([[0], [2], [0]])
        completions = ["one_step", "one_step_sampled"] * (settings.cache != "exact")
        records = ["entropy"] + ["topk"] * (settings.temperature > 0) + completions
        words = {"eos_token_id": 2, "num_generations": 3, "generator": noise, "micro_batch": 2, "records": records}
        made = distributed.generate(model, prompt, mask, settings, **words)
        fields = {key: value for key, value in vars(made).items() if torch.is_tensor(value)} | made.records
        return {"calls": list(calls), "rollout": fields, "next": torch.rand(3, generator=noise)}


def settings_of(folder: Path, row: str, **changes) -> config.Train:
    words = {"num_prompts": 4, "micro_batch": 3, "save_every": 1, "evaluate": config.Evaluation(n=5), "threads": 1}
    return tiny.settings(folder / "base", **{"method": row, **words, **ROWS[row], **changes})


def run(out: Path, settings: config.Train, resume: bool = False) -> dict:
    with patched():
        summary = trainer.train(settings, out, resume)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    return {"metrics": numbers, "summary": {k: v for k, v in summary.items() if k != "seconds"}}


def whole_run(folder: Path, row: str) -> dict:
    """Two steps, with a checkpoint after each."""
    return run(folder / f"{row}-{distributed.num_processes()}", settings_of(folder, row))


def halfway(source: Path, target: Path) -> Path:
    """A run as it was when it was stopped after its first checkpoint."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoint-2", "summary.json", "curve.png"))
    return target


def resumed(folder: Path, row: str) -> dict:
    """The second step, from the checkpoint that a single process left."""
    out = folder / f"{row}-resumed-{distributed.num_processes()}"
    distributed.on_main(lambda: halfway(folder / f"{row}-1", out))
    return run(out, settings_of(folder, row), resume=True)


def rounded_sampler(folder: Path) -> dict:
    """The weights that sample, which are bfloat16 copies of the ones that are trained, after these have changed."""
    with patched() as (patch, _):
        learner = learner_of(patch, "reinforce", "float32", rollout_dtype="bfloat16")
        with torch.no_grad():
            for p in learner.model.parameters():
                p.mul_(1.1)
        learner.collect(0, trainer.Clock())
        return {"same": torch.equal(weights(learner.actor), weights(learner.model).bfloat16().double())}


# ------------------------------------------------------------------------------- bfloat16, below weights in float32

HALF = {"dtype": "float32", "compute_dtype": "bfloat16"}


def alone_in_bfloat16(learner: trainer.Learner) -> None:
    """In one process: the network is a bfloat16 copy; what a backward leaves in its gradients is added up in float32."""
    learner.network = learner.actor = denoiser.rounded(learner.model, torch.bfloat16).requires_grad_(True)

    def add(master: torch.nn.Parameter, p: torch.nn.Parameter) -> None:
        master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
        p.grad = None

    for master, p in zip(learner.model.parameters(), learner.network.parameters(), strict=True):
        p.register_post_accumulate_grad_hook(functools.partial(add, master))


def half_learner(patch, method: str = "grpo", **changes) -> trainer.Learner:
    """Sequences go through the network one at a time: what is rounded then depends on no number of processes."""
    several = distributed.num_processes() > 1
    words = {"micro_batch": 1, "dtype": "float32", **(HALF if several else {}), **changes}
    learner = learner_of(patch, method, "float32", **words)
    if not several:
        alone_in_bfloat16(learner)
    return learner


def in_bfloat16(folder: Path, row: str, spoil: Callable = lambda patch, learner: None, half: bool = True) -> dict:
    """Features of both passes, and gradients; not ``half``: all in float32."""
    with patched() as (patch, _):
        rollout = tiny.experience(learner_of(patch, row, "float32")).rollout
        spoil(patch, None)
        learner = half_learner(patch, row) if half else learner_of(patch, row, "float32", micro_batch=1)
        plan = learner.method.plan(rollout, torch.Generator().manual_seed(5))
        feature = learner.score(rollout, plan, trainer.Clock())
        noise = torch.Generator().manual_seed(6)
        cotangent = {name: torch.randn(value.shape, generator=noise) * (value != 0) for name, value in feature.items()}
        seen, _ = gradient.second_pass(learner.network, rollout, plan, cotangent, temperature=1.0, size=1)
        parameters = list(learner.model.parameters())
        dtypes = {str(value.dtype) for p in parameters for value in (p, p.grad)} | {str(v.dtype) for v in feature.values()}
        return {"feature": feature, "seen": seen, "gradients": gradient_of(learner.model), "dtypes": sorted(dtypes)}


def bfloat16_rollout(folder: Path) -> dict:
    """What the sampler of a run records, and the same log-probabilities scored by the network that is trained."""
    with patched() as (patch, _):
        learner = half_learner(patch)
        experience = learner.collect(0, trainer.Clock())
        rollout = experience.rollout
        states = {"num_states": rollout.sampler.num_steps, "min_entropy": 0.0}
        plan = alg.replay_plan(rollout, torch.Generator().manual_seed(5), **states)
        scored = learner.score(rollout, plan, trainer.Clock())["logp"]
        again = (scored * plan.scored).sum(0)
        found = {"logp": rollout.logp * rollout.keep, "again": again * rollout.keep}
        return found | {"response": rollout.response, "updates": experience.updates}


def small_updates(folder: Path) -> dict:
    """Shares of the weights that an update of 1e-6 of their size changes: in float32, and rounded to bfloat16."""
    with patched() as (patch, _):
        optimizer = config.Optimizer(learning_rate=1e-6, weight_decay=1.0, warmup=1, max_grad_norm=1e-20)
        learner = half_learner(patch, num_iterations=1, optimizer=optimizer)
        experience = tiny.experience(learner)
        patch.setattr(learner, "collect", lambda *_: experience)
        before = weights(learner.model)
        learner.step(0)
        after = weights(learner.model)
        changed = ((after / before - 1).abs() > 5e-7).double().mean()
        coarse = (after.bfloat16() != before.bfloat16()).double().mean()
        return {"share": float(changed), "coarse": float(coarse), "weights": after}


def half_run(folder: Path) -> dict:
    """Two steps in bfloat16, with a checkpoint after each; the second step again, from the first checkpoint."""
    out, again = folder / "half", folder / "half-resumed"
    settings = settings_of(folder, "stabledrl", **HALF)
    whole = run(out, settings)
    distributed.on_main(lambda: halfway(out, again))
    return {"whole": whole, "resumed": run(again, settings, resume=True)}


def half_checkpoint(folder: Path) -> dict:
    """A saved checkpoint, and what its network says: two processes in bfloat16, or a rounded copy of what one of them loads."""
    with patched() as (patch, _):
        if distributed.num_processes() > 1:
            learner = half_learner(patch)
            with torch.no_grad():
                for p in learner.model.parameters():
                    p.mul_(1 + 2**-12)  # nothing that bfloat16 could hold
            model = learner.model
            learner.save(folder / "half-saved-0", {"step": 0})
            saved = weights(model)
        else:
            loaded, _ = checkpoints.load(folder / "half-saved-0")
            model, saved = denoiser.rounded(loaded, torch.bfloat16), weights(loaded)
        tokens = torch.arange(3, 11).view(2, 4)
        with torch.no_grad():
            logits = model.head(model.encode(tokens, None)[:, 2:])
        return {"weights": saved, "logits": logits.nan_to_num(neginf=0.0)}


class ShardedBytes(PeakBytes):
    """``PeakBytes`` with storages whose size changes while they are alive, as those of gathered weights do."""

    def __init__(self):
        super().__init__()
        self.held = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come here after it
        out = super().__torch_dispatch__(func, types, args, kwargs)
        sizes = [storage.nbytes() for held in list(self.held.values()) if (storage := held()) is not None]
        self.peak = max(self.peak, sum(sizes))
        return out

    def see(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key not in self.held and key not in given:
            self.held[key] = weakref.ref(storage)
            weakref.finalize(storage, self.held.pop, key, None)


# Most bytes are of layers, or of embedding and head.
SHAPES = {
    "layers": {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 30, "num_hidden_layers": 4},
    "vocabulary": {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 3000, "num_hidden_layers": 2},
}


def needed_memory(folder: Path, shape: str, compute_dtype: str) -> dict:
    """The peak of a process's step, counted and predicted; its share of weights and moments."""
    base = distributed.on_main(lambda: str(saved(folder / shape, **SHAPES[shape])))
    words = {"dtype": "float32", "compute_dtype": compute_dtype, "gradient_checkpointing": True, "method": "stabledrl-elbo"}
    words |= {"num_prompts": 2, "num_generations": 2, "micro_batch": 2, "num_iterations": 1}
    settings = tiny.settings(base, **words, method_options={})
    with patched() as (patch, _):
        rewards = lambda texts: torch.arange(len(texts)).double() / len(texts)  # noqa: E731
        patch.setattr(trainer.Learner, "judge", lambda self, problems, texts: (rewards(texts), rewards(texts) == 1))
        learner = trainer.Learner(settings)
        tensors = [*learner.model.parameters(), *(x for slot in learner.optimizer.state.values() for x in slot.values())]
        local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
        with ShardedBytes() as meter:
            learner.step(0)
    parts = memory.predicted_memory(settings, WORLD)
    resident = sum(x.numel() * x.element_size() for x in local)
    return {"counted": resident + meter.peak, "predicted": memory.peak(parts), "resident": resident}


def refused(folder: Path, *arguments: str) -> dict:
    """What the command line says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main([str(a).replace("FOLDER", str(folder)) for a in arguments])
    return {"status": status, "said": said.getvalue()}


def failing(folder: Path) -> dict:
    """Logits that are not finite in one process of two."""
    out, finish = folder / f"failing-{distributed.num_processes()}", sampler.finish

    def broken(*given):
        if distributed.rank() == distributed.num_processes() - 1:
            raise FloatingPointError("logits: the model returned NaN or +inf")
        return finish(*given)

    with patched() as (patch, _):
        evaluated = lambda *_, **__: {"solved": 0.0, "well_formed": 0.0, "n": 1}  # noqa: E731
        patch.setattr(trainer, "evaluate", evaluated)
        patch.setattr(sampler, "finish", broken)
        with pytest.raises(RunError) as raised:
            trainer.train(settings_of(folder, "reinforce"), out)
    return {"error": str(raised.value).replace(str(out), "OUT"), "dump": sorted(p.name for p in out.glob("failed-0/*"))}


# -------------------------------------------------------------------------------------------------------- wrong versions


def mean_gradient(patch, learner) -> None:
    """FSDP's default: the mean over the processes."""
    for module in learner.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(distributed.num_processes()))


def own_features(patch, learner) -> None:
    """Each process makes its loss of what it has computed itself."""
    patch.setattr(distributed, "sum_shares", distributed.keep_own)


def double_fill(patch, learner) -> None:
    """Forwards that fill up a share count like the others."""
    patch.setattr(distributed, "keep_own", lambda values, own: values)


def another_policy(where: Callable, **policy) -> Callable:
    """Another policy of mixed precision, in the modules of which ``where`` is true."""

    def spoil(patch, learner) -> None:
        def sharded(module, *, mp_policy, **words):
            return fully_shard(module, mp_policy=MixedPrecisionPolicy(**policy) if where(module) else mp_policy, **words)

        patch.setattr(distributed, "fully_shard", sharded)

    return spoil


# A wrong version, and the scenario that must notice it.
MUTANTS = {
    "mean gradient": ("given grpo float64", mean_gradient),
    "own features": ("given grpo float64", own_features),
    "double fill": ("few 3 reinforce", double_fill),
    "no policy": ("bfloat16 grpo", another_policy(lambda module: True)),
    "a head in float32": ("bfloat16 grpo", another_policy(lambda m: isinstance(m, torch.nn.Linear), param_dtype=torch.float32)),
    "sums in bfloat16": ("bfloat16 grpo", another_policy(lambda module: True, param_dtype=torch.bfloat16)),
}


# ------------------------------------------------------------------------------------------------------------ processes

RUNS = ("stabledrl", "adapters")
QUICK_ROWS = ("reinforce", "stabledrl", "trace-block", "spg", "adapters", "adapters, in parts")
BEFORE = {f"run {row}": (whole_run, row) for row in RUNS}  # in one process first: their checkpoints are continued by two
# Adapters are float32 whatever their base is.
GIVEN = [(row, "float64") for row in ROWS if "adapters" not in row and row != "layers recomputed"]
GIVEN += [(row, "float32") for row in ("reinforce", "stabledrl", "adapters", "adapters, in parts")]
SCENARIOS = {f"given {row} {dtype}": (given_rollouts, row, dtype) for row, dtype in GIVEN}
SCENARIOS |= {f"few {n} {m}": (few_forwards, n, m) for n in (1, 3) for m in ("reinforce", "trace-block")}
SCENARIOS |= {f"rollouts {name}": (rollouts, name) for name in SAMPLERS}
SCENARIOS |= {"rounded": (rounded_sampler,), "failing": (failing,)}
HALVES = ("grpo", "order, in parts", "layers recomputed")
SCENARIOS |= {f"bfloat16 {row}": (in_bfloat16, row) for row in HALVES}
SCENARIOS |= {"bfloat16 rollout": (bfloat16_rollout,), "small updates": (small_updates,)}
PAIRED = {f"resumed {row}": (resumed, row) for row in RUNS}
PAIRED |= {"half run": (half_run,), "half checkpoint": (half_checkpoint,)}
NEEDED = [(shape, dtype) for shape in SHAPES for dtype in ("weights", "bfloat16")]
PAIRED |= {f"memory {shape} {dtype}": (needed_memory, shape, dtype) for shape, dtype in NEEDED}
PAIRED |= {f"mutant {name}": (*SCENARIOS[scenario], spoil) for name, (scenario, spoil) in MUTANTS.items()}
SLOW = {f"{kind} adapters" for kind in ("run", "resumed")}
SLOW |= {name for name in SCENARIOS | PAIRED if name.startswith(("bfloat16", "small", "half", "memory", "mutant"))}
SLOW |= {f"given {row} {dtype}" for row, dtype in GIVEN if row not in QUICK_ROWS}
COMMANDS = {
    "groups": ("train", "FOLDER/config.yaml", "--num_prompts", "3", "--out", "FOLDER/refused"),
    "twice": ("train", "FOLDER/config.yaml", "--out", "FOLDER/stabledrl-1"),
    "compile": ("train", "FOLDER/config.yaml", "--out", "FOLDER/refused", "--compile", "true"),
    "compute": ("train", "FOLDER/config.yaml", "--out", "FOLDER/refused", "--compute_dtype", "bfloat16"),
    "evaluate": ("evaluate", "FOLDER/base"),
}


def looked_at(scenarios: dict, quick: bool) -> dict:
    """Without slow tests, without what only they look at."""
    return {name: how for name, how in scenarios.items() if not (quick and name in SLOW)}


def marked(cases: tuple | list, name_of: Callable[..., str]) -> list:
    """The parameters of a test, slow where it looks at a slow scenario."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=pytest.mark.slow if name_of(*row) in SLOW else ()) for row in rows]


def work(rank: int, ports: list[int], folder: Path, quick: bool) -> None:
    """Everything that a process of two has to do, and what it found, in a file."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    found = {}
    for name, arguments in COMMANDS.items():
        os.environ["MASTER_PORT"] = str(ports.pop())
        found[name] = refused(folder, *arguments)
    os.environ["MASTER_PORT"] = str(ports.pop())
    with distributed.process_group("cpu"):
        for name, (scenario, *given) in looked_at(BEFORE | SCENARIOS | PAIRED, quick).items():
            started = time.perf_counter()
            try:
                found[name] = scenario(folder, *given)
            except Exception:  # the other process must not wait: what went wrong is looked at where results are compared
                found[name] = {"error in the process": traceback.format_exc()}
            found[name]["seconds"] = time.perf_counter() - started
    torch.save(found, folder / f"found-{rank}.pt")


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    tiny.checkpoint(folder / "base")
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict(settings_of(folder, "reinforce"))))
    return folder


@pytest.fixture(scope="module")
def quick(request) -> bool:
    """Whether slow tests are left out, as `make test` does."""
    return request.config.getoption("markexpr") == "not slow"


def alone(folder: Path, scenarios: dict, quick: bool) -> dict:
    return {name: scenario(folder, *given) for name, (scenario, *given) in looked_at(scenarios, quick).items()}


@pytest.fixture(scope="module")
def processes(folder, quick):
    """Two of them at work, and what a single one has found before they began. One that waits for ever is ended."""
    found, context, ports = alone(folder, BEFORE, quick), multiprocessing.get_context("spawn"), free_ports(len(COMMANDS) + 1)
    workers = [context.Process(target=work, args=(rank, ports, folder, quick)) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    yield workers, found
    for worker in workers:
        worker.kill()
        worker.join()


@pytest.fixture(scope="module")
def single(folder, processes, quick) -> dict:
    """Each scenario in this process alone."""
    return processes[1] | alone(folder, SCENARIOS, quick)


@pytest.fixture(scope="module")
def pair(folder, processes, single) -> list[dict]:
    """What each of two processes found."""
    deadline = time.monotonic() + PATIENCE
    for worker in processes[0]:
        worker.join(max(0.0, deadline - time.monotonic()))
    assert [worker.exitcode for worker in processes[0]] == [0] * WORLD, "None: still waiting when its time was over"
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(WORLD)]


def differences(found: object, expected: object, tolerance: float, where: str = "") -> list[str]:
    """Where two results differ by more than ``tolerance``, of the largest number of a tensor, of 1 for small numbers."""
    if isinstance(expected, dict):
        keys, other = (set(x) - {"calls", "seconds"} for x in (expected, found))
        lines = [] if keys == other else [f"{where}: {found}"]
        shared = sorted(keys & other)
        return lines + [line for k in shared for line in differences(found[k], expected[k], tolerance, f"{where}/{k}")]
    if isinstance(expected, list):
        lines = [] if len(found) == len(expected) else [f"{where}: {len(found)} entries"]
        pairs = enumerate(zip(found, expected, strict=False))
        return lines + [line for i, (a, b) in pairs for line in differences(a, b, tolerance, f"{where}/{i}")]
    if torch.is_tensor(expected) and expected.is_floating_point() or isinstance(expected, float):
        a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
        scale = max(1.0, float(b.abs())) if b.ndim == 0 else float(b.abs().max())
        close = a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)
        return [] if close else [f"{where}: {a} instead of {b}"]
    same = torch.equal(found, expected) if torch.is_tensor(expected) else found == expected
    return [] if same else [f"{where}: {found} instead of {expected}"]


def assert_same(pair: list[dict], single: dict, name: str, tolerance: float) -> None:
    for found in pair:
        assert differences(found[name], single[name], tolerance) == []


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("row, dtype", marked(GIVEN, "given {} {}".format))
def test_given_rollouts_loss_and_gradients_are_those_of_one_process(row, dtype, pair, single):
    name = f"given {row} {dtype}"
    assert_same(pair, single, name, DTYPES[dtype][1])
    assert all(g.abs().max() > 1e-3 for g in single[name]["gradients"])


@pytest.mark.parametrize("row, dtype", marked(GIVEN, "given {} {}".format))
def test_every_process_runs_the_same_number_of_forwards_of_the_same_size(row, dtype, pair, single):
    name = f"given {row} {dtype}"
    first, second = (found[name]["calls"] for found in pair)
    assert first == second
    alone = sum(single[name]["calls"])
    assert alone <= 2 * sum(first) < alone + 2 * len(first)  # shared out, and filled up by less than one a batch of forwards


@pytest.mark.parametrize("method", ["reinforce", "trace-block"])
@pytest.mark.parametrize("forwards", [1, 3])
def test_a_process_without_forwards_of_its_own_runs_some_that_do_not_count(forwards, method, pair, single):
    name = f"few {forwards} {method}"
    assert_same(pair, single, name, 1e-12)
    assert len(single[name]["calls"]) == 2 * forwards == 2 * single[name]["count"]
    for found in pair:
        assert len(found[name]["calls"]) == 2 * -(-forwards // WORLD)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_rollout_does_not_depend_on_the_number_of_processes(name, pair, single):
    assert_same(pair, single, f"rollouts {name}", 1e-12)
    first, second = (found[f"rollouts {name}"]["calls"] for found in pair)
    assert first == second
    steps = single[f"rollouts {name}"]["rollout"]["unmask_step"].amax(1) + 1
    assert len(set(steps.tolist())) > 1  # rows end at different blocks
    if name != "cache":  # whose prompts are computed apart
        running = [(share[:, None] > torch.arange(steps.max())).sum(0) for share in (steps[:5], steps[4:])]
        assert sum(first) == int(torch.maximum(*running).sum())


def test_a_row_that_fills_up_a_share_does_not_come_to_life_again():
    settings, tokens = SAMPLERS["blocks"], torch.tensor([[5, 2, 4, 4, 4, 4, 4, 4], [5, 4, 4, 2, 4, 4, 4, 4], [5] * 8])
    trace = sampler.Trace(torch.cat([torch.full((3, 2), 2), tokens], 1), *[torch.empty(0)] * 3)  # prompts of [EOS] end nothing
    left = [sampler.unfinished(trace, torch.arange(3), block, settings, 2).tolist() for block in range(3)]
    assert left == [[1, 2], [2], [2]]


@pytest.mark.parametrize("row", marked(RUNS, "run {}".format))
def test_a_run_of_two_processes_is_the_run_of_one(row, pair, single, folder):
    assert_same(pair, single, f"run {row}", 1e-5)
    same_checkpoints(folder / f"{row}-2", folder / f"{row}-1")


def same_checkpoints(found: Path, expected: Path) -> None:
    names = [{file.relative_to(out) for file in out.rglob("*")} for out in (found, expected)]
    assert names[0] == names[1]
    for file in expected.rglob("*.safetensors"):
        ours, theirs = load_file(found / file.relative_to(expected)), load_file(file)
        assert differences(ours, theirs, 1e-5) == []


@pytest.mark.parametrize("row", marked(RUNS, "run {}".format))
def test_a_run_of_one_process_is_continued_by_two(row, pair, single, folder):
    assert_same(pair, {f"resumed {row}": single[f"run {row}"]}, f"resumed {row}", 1e-5)
    same_checkpoints(folder / f"{row}-resumed-2" / "checkpoint-2", folder / f"{row}-1" / "checkpoint-2")


@pytest.mark.parametrize("row", marked(RUNS, "run {}".format))
def test_a_run_of_two_processes_is_continued_by_one(row, pair, single, folder, tmp_path):
    out = halfway(folder / f"{row}-2", tmp_path / "run")
    assert differences(run(out, settings_of(folder, row), resume=True), single[f"run {row}"], 1e-5) == []
    same_checkpoints(out / "checkpoint-2", folder / f"{row}-1" / "checkpoint-2")


def test_the_sampler_of_another_dtype_gets_the_present_weights(pair, single):
    assert single["rounded"]["same"] and all(found["rounded"]["same"] for found in pair)


@pytest.mark.slow
@pytest.mark.parametrize("row", HALVES)
def test_bfloat16_in_two_processes_is_a_rounded_copy_in_one_whose_gradients_are_added_up_in_float32(row, pair, single):
    name = f"bfloat16 {row}"
    assert_same(pair, single, name, 1e-6)
    for found in (pair[0][name], single[name]):
        assert found["dtypes"] == ["torch.float32"], "weights, gradients, features"
        assert differences(found["seen"], found["feature"], 0) == [], "both passes compute one function"
        assert found["gradients"].abs().max() > 1e-3


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_bfloat16_is(pair, folder):
    """2**-9 is the error of one rounding; the bound is 16 of them, of the largest number of a tensor."""
    exact, found = in_bfloat16(folder, "grpo", half=False), pair[0]["bfloat16 grpo"]
    for name in ("feature", "gradients"):
        assert differences(found[name], exact[name], 16 * 2**-9) == []
        assert differences(found[name], exact[name], 2**-14), "and no nearer"


@pytest.mark.slow
def test_a_rollout_in_bfloat16_records_what_is_scored_in_bfloat16(pair, single):
    assert_same(pair, single, "bfloat16 rollout", 1e-6)
    found = pair[0]["bfloat16 rollout"]
    assert found["updates"] == 0 and differences(found["again"], found["logp"].float(), 1e-6) == []


@pytest.mark.slow
def test_an_update_that_bfloat16_would_round_away_changes_the_weights(pair, single):
    assert_same(pair, single, "small updates", 1e-7)
    found = pair[0]["small updates"]
    assert found["share"] > 0.99 and found["coarse"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("shape, compute_dtype", NEEDED)
def test_a_process_of_two_needs_what_was_predicted(shape, compute_dtype, pair):
    found = pair[0][f"memory {shape} {compute_dtype}"]
    assert found["predicted"] == pytest.approx(found["counted"], rel=0.1)
    assert found["counted"] > 1.5 * found["resident"], "gathered weights and gradients are much of it"


@pytest.mark.slow
def test_bfloat16_halves_what_is_gathered_and_nothing_that_is_kept(pair):
    for shape in SHAPES:
        single, half = (pair[0][f"memory {shape} {dtype}"] for dtype in ("weights", "bfloat16"))
        assert single["resident"] == half["resident"] and half["counted"] < 0.9 * single["counted"]


@pytest.mark.slow
def test_a_run_in_bfloat16_that_is_resumed_is_the_uninterrupted_one(pair, folder):
    for found in (found["half run"] for found in pair):
        assert found["resumed"] == found["whole"]
    for file in (folder / "half" / "checkpoint-2").rglob("*.safetensors"):
        ours, theirs = load_file(folder / "half-resumed" / "checkpoint-2" / file.name), load_file(file)
        assert differences(ours, theirs, 0) == [] and {value.dtype for value in theirs.values()} == {torch.float32}


@pytest.mark.slow
def test_a_checkpoint_of_a_run_in_bfloat16_is_float32_and_loads_in_one_process(pair, folder):
    expected = half_checkpoint(folder)
    for found in pair:
        assert differences(found["half checkpoint"], expected, 0) == []
    assert not torch.equal(expected["weights"].bfloat16().double(), expected["weights"])


def test_a_failure_in_one_process_stops_all_and_leaves_a_dump(pair, single):
    assert_same(pair, single, "failing", 0)
    assert single["failing"]["error"].startswith("step 0: logits: the model returned NaN")
    assert "optimizer.safetensors" in single["failing"]["dump"]


@pytest.mark.parametrize("name, line", [
    ("groups", "num_prompts: got 3; allowed multiples of the 2 processes"),
    ("twice", "which already holds a run"),
    ("compile", "compile: got True with 2 processes"),
    ("compute", "compute_dtype: got 'bfloat16' with dtype stored; allowed weights, or dtype float32"),
    ("evaluate", "evaluate: got 2 processes; allowed 1"),
])  # fmt: skip
def test_what_two_processes_cannot_do_is_one_line_and_status_2(name, line, pair, folder):
    first, second = (found[name] for found in pair)
    assert (first["status"], second["status"]) == (2, 2)
    assert first["said"].count("\n") == 1 and line in first["said"] and second["said"] == ""
    assert not (folder / "refused").exists()


def test_weights_that_two_modules_share_are_refused(monkeypatch):
    model = tiny.network()
    model.model.config.tie_word_embeddings = True
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    with pytest.raises(ValueError, match="tied embeddings with 2 processes; allowed one process"):
        distributed.shard(model)


def test_what_all_have_to_say_is_said_once_and_what_one_has_to_say_by_that_one(monkeypatch, capsys):
    for key, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    assert _report("all", 2, ValueError()) == _report("out of memory", 2, LocalError()) == 2
    assert capsys.readouterr().err == "minidrl: out of memory\n"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_version_is_noticed(mutant, pair, single):
    expected = single[MUTANTS[mutant][0]]
    assert all(differences(found[f"mutant {mutant}"], expected, 1e-6) for found in pair)
    assert not any("error in the process" in found[f"mutant {mutant}"] for found in pair)


def test_shares_have_one_size_and_cover_everything_once(monkeypatch):
    for world in (1, 2, 3, 7):
        monkeypatch.setattr(distributed, "num_processes", lambda world=world: world)
        for total in (0, 1, 2, 5, 6, 7, 8, 30):
            spans = [distributed.share_of(total, process) for process in range(world)]
            size = -(-total // world)
            assert all(0 <= start and stop <= total and stop - start == size for start, stop in spans)
            own = [i for process, (_, stop) in enumerate(spans) for i in range(process * size, stop)]
            assert own == list(range(total))


def test_without_torchrun_nothing_is_connected_and_nothing_copied():
    model, plan = object(), alg.Plan(*[torch.ones(1, 2, 1, dtype=torch.bool)] * 2, torch.ones(1, 2), torch.ones(1, 2).bool())
    values = {"logp": torch.ones(1, 2, 1)}
    with distributed.process_group("cpu"):
        assert (distributed.num_processes(), distributed.rank(), torch.distributed.is_initialized()) == (1, 0, False)
        assert distributed.share_plan(plan) == (plan, None)
        assert (
            distributed.sum_shares(values, None)
            is distributed.keep_own(values, None)
            is distributed.from_main(values)
            is values
        )
        assert distributed.unsharded_copy(model) is distributed.empty_copy(model) is model
