"""Pre-training and the RL loop: what turns losses into runs that can be watched, stopped and resumed.

The trainer knows no method by name. It executes the row of ``METHODS`` it is given:

    puzzles -> rollout -> rewards -> plans -> credit -> anchors
            -> [ features -> loss -> two-pass backward -> update ] x num_iterations

Every random draw is keyed by (seed, step, purpose). A run that is resumed therefore repeats the uninterrupted one to the bit,
and no two draws of a run share a stream.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from minidrl import algorithms as alg
from minidrl import config, denoiser, distributed, memory, report, sampler
from minidrl.diagnostics import ratio_diagnostics
from minidrl.tasks.countdown import Puzzle, tokenizer


class RunError(Exception):
    """A run that had to stop; the message says why and what is on disk."""


def keyed_generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """A CPU generator of its own for (seed, step, purpose)."""
    return torch.Generator().manual_seed(_key(seed, step, purpose))


def _key(seed: int, step: int, purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()[:7], "big")


# ------------------------------------------------------------------------------------------------------- text to tensors


def encode_prompts(
    tok: Any, puzzles: list[Puzzle], width: int, device: Any = "cpu", prompt_format: str = "plain"
) -> tuple[Tensor, Tensor]:
    """Prompts (G, width), left-padded, and their mask (True = real token). In a chat the longest of them sets the width."""
    if prompt_format == "chat":
        batch = tok(chats(tok, [p.instruction for p in puzzles]), add_special_tokens=False, padding=True, return_tensors="pt")
        if batch.input_ids.shape[1] > width:
            raise ValueError(f"task.max_prompt_length: got {width}; allowed from {batch.input_ids.shape[1]}, as a prompt has")
    else:
        batch = tok([p.prompt for p in puzzles], padding="max_length", max_length=width, return_tensors="pt")
    return batch.input_ids.to(device), batch.attention_mask.bool().to(device)


def chats(tok: Any, questions: list[str]) -> list[str]:
    """Each question as a user's turn, and the opening of the answer's, as the checkpoint's template has them."""
    if tok.chat_template is None:
        raise ValueError("task.prompt_format: got 'chat'; allowed plain, the model's tokenizer has no chat template")
    turns = [[{"role": "user", "content": question}] for question in questions]
    return tok.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def encode_responses(tok: Any, texts: list[str], length: int) -> Tensor:
    """Responses (B, length), filled up with [EOS]: a masked diffusion model learns where a text ends from its padding."""
    ids = [row[:length] + [tok.eos_token_id] * (length - len(row)) for row in tok(texts).input_ids]
    return torch.tensor(ids)


def decode(tok: Any, responses: Tensor) -> list[str]:
    """The text of each response (B, L), up to its first [EOS]."""
    rows = responses.masked_fill(~sampler.keep_mask(responses, tok.eos_token_id), tok.eos_token_id)
    return tok.batch_decode(rows, skip_special_tokens=True)


# ------------------------------------------------------------------------------------------- the gradient, at any size
#
# A loss is a function of the features of K states a sequence, often not a linear one (a ratio of ELBOs, a softmax over a
# group). Keeping the graph of all states until the loss is known costs memory proportional to K B. Instead:
#
#     pass 1   compute all features without a graph; the loss on them gives their cotangents c = d loss / d feature
#     pass 2   recompute the features state by state and back-propagate  sum <c, feature>
#
# By the chain rule this is the gradient, exactly, provided both passes compute the same function: dropout would break that.


def refuse_random_modules(model: nn.Module) -> None:
    """ValueError if a module would draw random numbers: the two passes would then see different networks."""
    for name, module in model.named_modules():
        p = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "attention_dropout", 0.0)
        if module.training and p:
            raise ValueError(f"model: dropout {p} in {name or 'the network'}; allowed 0 (or eval mode): both passes must agree")


def cotangents(loss_of: Callable[[dict[str, Tensor]], Tensor], feature: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and d loss / d feature for every feature that it depends on."""
    leaves = {name: value.detach().requires_grad_() for name, value in feature.items()}
    loss = loss_of(leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def second_pass(
    model: Any, rollout: alg.Rollout, plan: alg.Plan, cotangent: dict[str, Tensor], *, temperature: float, size: int, **more
) -> tuple[dict[str, Tensor], int]:
    """Back-propagate sum <cotangent, feature>, ``size`` states at a time; states whose cotangents are all 0 are skipped.

    Returns the features it met (0 at skipped states) and the number of sequences that went through the network.
    """
    refuse_random_modules(model)
    cotangent = distributed.agreed(cotangent)
    needed = torch.stack([(c != 0).flatten(2).any(2) for c in cotangent.values()]).any(0)  # nan is not 0: the gradient needs it
    plan = dataclasses.replace(plan, valid=plan.valid & needed)
    share, own = distributed.share_plan(plan)
    flat = {name: c.flatten(0, 1) for name, c in distributed.only(cotangent, own).items()}
    seen = {name: torch.zeros_like(c) for name, c in flat.items()}
    for states in alg.state_chunks(share, size):
        value = alg.state_features(model, rollout, plan, states, temperature=temperature, names=tuple(flat), **more)
        sum((flat[name][states] * value[name]).sum() for name in flat).backward()
        for name in flat:
            seen[name][states] = value[name].detach()
    seen = {name: value.unflatten(0, plan.valid.shape) for name, value in seen.items()}
    return distributed.summed(seen, own), plan.network_calls


def shared_features(model: Any, rollout: alg.Rollout, plan: alg.Plan, **how) -> dict[str, Tensor]:
    """``algorithms.features``, each process doing its share of the forwards."""
    share, own = distributed.share_plan(plan)
    return distributed.summed(alg.features(model, rollout, share, **how), own)


def two_pass_backward(
    model: Any,
    rollout: alg.Rollout,
    plan: alg.Plan,
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    *,
    temperature: float = 1.0,
    names: tuple[str, ...] = ("logp",),
    size: int = 256,
    **more,
) -> Tensor:
    """Accumulate d loss_of(features) / d weights with memory constant in the number of states; returns the loss."""
    refuse_random_modules(model)
    feature = alg.features(model, rollout, plan, temperature=temperature, names=names, size=size, **more)
    loss, cotangent = cotangents(loss_of, feature)
    second_pass(model, rollout, plan, cotangent, temperature=temperature, size=size, **more)
    return loss


# ----------------------------------------------------------------------------------------------------- optimiser and state


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of those that an optimiser updates, in its order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def make_optimizer(model: nn.Module, settings: config.Optimizer) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained: all of them, or the adapters.

    Its moments are there from the start: the zeros that AdamW would make in its first update, in the dtype and on the device of
    each parameter, and sharded as it is. So the first step of a run needs as much memory as any other.
    """
    optimizer = torch.optim.AdamW(
        [p for _, p in trained(model)],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    moments = ("exp_avg", "exp_avg_sq")
    slots = [{"step": torch.tensor(0.0)} | {key: torch.zeros_like(p) for key in moments} for _, p in trained(model)]
    optimizer.load_state_dict(optimizer.state_dict() | {"state": dict(enumerate(slots))})
    return optimizer


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """Linear warm-up, then constant or a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup))
    cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max(1, steps)))
    return settings.learning_rate * warm * (cosine if settings.schedule == "cosine" else 1.0)


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, settings: config.Optimizer, lr: float) -> float:
    """One update at rate ``lr``; returns the gradient norm before clipping. A non-finite gradient raises, unapplied."""
    norm = float(distributed.whole(nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)))
    if not math.isfinite(norm):
        raise RunError(f"gradient norm is {norm}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm


def save_checkpoint(folder: Path, model: Any, tok: Any, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Network, tokenizer, optimiser and counters, as safetensors and JSON; the folder appears whole or not at all."""
    names = [name for name, _ in trained(model)]
    tensors = {f"{names[i]}/{key}": value for i, slot in optimizer.state_dict()["state"].items() for key, value in slot.items()}
    tensors, model = distributed.collected(tensors), distributed.unsharded(model)
    distributed.first(lambda: _write_checkpoint(folder, model, tok, tensors, state))


def _write_checkpoint(folder: Path, model: Any, tok: Any, tensors: dict[str, Tensor], state: dict) -> None:
    partial_folder = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial_folder, ignore_errors=True)
    denoiser.save(model, tok, partial_folder)
    save_file(tensors, partial_folder / "optimizer.safetensors")
    (partial_folder / "state.json").write_text(json.dumps(state))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial_folder, folder)


def load_checkpoint(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's weights and optimiser state back; returns its counters."""
    if denoiser.has_adapters(model):
        stored = distributed.blank(model)
        denoiser.read_adapters(stored, folder)
    else:
        stored = denoiser.load(folder)[0]  # on the CPU: beside the network, a GPU may have no room for it
    distributed.fill(model, stored)
    return load_optimizer(folder, model, optimizer)


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict:
    """Put a checkpoint's optimiser state back; returns its counters."""
    tensors = load_file(folder / "optimizer.safetensors")
    for name, p in trained(model):
        for key, value in optimizer.state[p].items():
            if (stored := tensors.get(f"{name}/{key}")) is not None:  # older versions wrote none before the first update
                value.copy_(distributed.like(stored, value))
    return json.loads((folder / "state.json").read_text())


def _checkpoint_step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _checkpoints(out: Path) -> list[Path]:
    return sorted(out.glob("checkpoint-*[0-9]"), key=_checkpoint_step)


def has_checkpoint(out: Path) -> bool:
    """True when a run in ``out`` can be resumed."""
    return bool(_checkpoints(out))


def open_run(out: Path, settings: Any, resume: bool) -> Path | None:
    """Create or re-open a run's folder; returns the checkpoint to resume from. Nothing that exists is overwritten."""
    checkpoints = _checkpoints(out)
    if resume:
        if not checkpoints:
            raise ValueError(f"resume: got {str(out)!r}, which holds no checkpoint; start without --resume, or set save_every")
        _check_resumable(out, settings, _checkpoint_step(checkpoints[-1]))
        _write_config(out, settings)
        return checkpoints[-1]
    if out.is_file():
        raise ValueError(f"out: got {str(out)!r}, which is a file; allowed a folder")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out: got {str(out)!r}, which already holds a run; allowed another --out, or --resume to continue it")
    out.mkdir(parents=True, exist_ok=True)
    _write_config(out, settings)
    return None


def _write_config(out: Path, settings: Any) -> None:
    (out / "config.yaml").write_text(yaml.safe_dump(config.to_dict(settings), sort_keys=False))


# What may differ when a run is continued: how long, how observed, on what machine.
_FREE_ON_RESUME = ("steps", "save_every", "evaluate", "micro_batch", "gradient_checkpointing")
_FREE_ON_RESUME += ("device", "threads", "compile", "tensorboard")


def _check_resumable(out: Path, settings: Any, step: int) -> None:
    config.check_unchanged(settings, out, free=_FREE_ON_RESUME)
    if step > settings.steps or (step == settings.steps and (out / "summary.json").exists()):
        raise ValueError(f"steps: got {settings.steps}; allowed above {step}, where the run in {out} stands")


class MetricsLog:
    """metrics.jsonl, one JSON object a line; on resume, lines from after the checkpoint are dropped. Optional TensorBoard."""

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = False):
        self.path, self.writer = folder / "metrics.jsonl", None
        if not distributed.is_first():
            return
        kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= first_step] if first_step else []
        self.path.write_text("".join(line + "\n" for line in kept))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("tensorboard: got true, but the package is missing; pip install tensorboard") from None
            self.writer = SummaryWriter(folder / "tensorboard")

    def write(self, row: dict) -> None:
        if not distributed.is_first():
            return
        with self.path.open("a") as file:
            file.write(json.dumps({k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in row.items()}) + "\n")
        if self.writer is not None:
            for key, value in row.items():
                if isinstance(value, float):
                    self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _lines(path: Path) -> list[str]:
    # What follows the last newline is empty, or was left unfinished by a run that was killed.
    return path.read_text().split("\n")[:-1] if path.exists() else []


# ------------------------------------------------------------------------------------------------------------ evaluation


@torch.no_grad()
def evaluate(
    model: Any,
    tok: Any,
    task: Any,
    settings: sampler.Sampler,
    *,
    n: int,
    seed: int = 0,
    samples: int = 1,
    micro_batch: int = 128,
) -> dict:
    """Solved and well-formed fractions on the first ``n`` held-out puzzles.

    ``settings.temperature`` is the policy that is judged; 0 is greedy. With ``samples`` k > 1 also pass@k: the share of
    puzzles solved by at least one of k samples.
    """
    model.eval()
    puzzles = task.held_out(n)
    prompt, mask = encode_prompts(tok, puzzles, task.prompt_length, model.device, task.prompt_format)
    rollout = distributed.generate(
        model,
        prompt,
        mask,
        settings,
        eos_token_id=tok.eos_token_id,
        num_generations=samples,
        generator=keyed_generator(seed, 0, "evaluate"),
        micro_batch=micro_batch,
    )
    texts = decode(tok, rollout.response)
    rows = [puzzles[i // samples] for i in range(len(texts))]
    strict = dataclasses.replace(task, reward="strict")
    scores = np.array([strict.score(p, text) for p, text in zip(rows, texts, strict=True)])
    solved = (scores == 1).reshape(n, samples)
    result = {"solved": float(solved.mean()), "well_formed": float((scores >= 0.1).mean()), "n": n}
    return result | ({f"pass@{samples}": float(solved.any(1).mean())} if samples > 1 else {})


# ---------------------------------------------------------------------------------------------------------- pre-training


def demonstration_rollout(task: Any, tok: Any, settings: config.Pretrain, step: int) -> alg.Rollout:
    """A batch of demonstrations in the shape of a Rollout, so that the ELBO's plan can be used on it as it is."""
    rng = np.random.default_rng(_key(settings.seed, step, "demonstrations"))
    puzzles = task.puzzles(settings.batch_size, rng)
    hit_share = settings.hit_share if 2 * step < settings.steps else settings.late_hit_share
    prompt, prompt_mask = encode_prompts(tok, puzzles, task.prompt_length, settings.device, task.prompt_format)
    response = encode_responses(tok, task.demonstrations(puzzles, rng, hit_share), settings.sampler.length)
    response = response.to(settings.device)
    nothing = torch.full_like(response, -1)
    keep, logp = torch.ones_like(response, dtype=torch.bool), torch.zeros_like(response, dtype=torch.float32)
    return alg.Rollout(prompt, prompt_mask, response, keep, nothing, logp, 1, settings.sampler)


def pretrain(settings: config.Pretrain, out: Path, resume: bool = False) -> dict:
    """Train a fresh network by maximising the ELBO (count form, padding included); returns and writes the summary.

    The loss is -ELBO / L: the mean negative log-probability of a hidden token, every count of hidden tokens equally likely.
    """
    prepare(settings)
    checkpoint = open_run(out, settings, resume)
    tok, state = tokenizer(), {"step": 0, "seconds": 0.0}
    block_length = settings.sampler.block_length if settings.sampler.attention == "block_causal" else None
    model = denoiser.build(dataclasses.asdict(settings.network), tok, settings.seed, block_length).to(settings.device)
    network = denoiser.compiled(model) if settings.compile else model
    optimizer = make_optimizer(model, settings.optimizer)
    if checkpoint is not None:
        state |= load_checkpoint(checkpoint, model, optimizer)
    log, started = MetricsLog(out, state["step"]), time.perf_counter() - state["seconds"]
    last = settings.stop_after or settings.steps
    bar = tqdm(range(state["step"], last), desc="pretrain", initial=state["step"], total=last, mininterval=2)
    for step in bar:
        loss = elbo_loss(network, demonstration_rollout(settings.task, tok, settings, step), settings, step)
        loss.backward()
        lr = learning_rate(settings.optimizer, step, settings.steps)
        norm = optimizer_step(model, optimizer, settings.optimizer, lr)
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
            log.write({"step": step + 1, "loss": loss.item(), "grad_norm": norm, "learning_rate": lr})
        if settings.save_every and (step + 1) % settings.save_every == 0:
            save_checkpoint(out / f"checkpoint-{step + 1}", model, tok, optimizer, _progress(step, started))
    seconds = time.perf_counter() - started
    scores = evaluate(model, tok, settings.task, settings.sampler, n=settings.evaluate.n)
    denoiser.save(model, tok, out)
    summary = {"steps": last, "seconds": round(seconds, 1), "parameters": model.num_parameters()}
    return _write_summary(out, summary | {"held_out": scores})


def _progress(step: int, started: float) -> dict:
    return {"step": step + 1, "seconds": time.perf_counter() - started}


def elbo_loss(model: Any, rollout: alg.Rollout, settings: config.Pretrain, step: int) -> Tensor:
    """-ELBO / L of a batch, one masked state a sequence; of a block-causal model one a block, all in one forward."""
    plan_of = alg.block_elbo_plan if settings.sampler.attention == "block_causal" else alg.elbo_count_plan
    plan = plan_of(rollout, keyed_generator(settings.seed, step, "masks"), num_states=1, domain="all", strata=False)
    (states,) = alg.state_chunks(plan, len(rollout.response))
    feature = alg.state_features(model, rollout, plan, states, temperature=1.0)
    logp = torch.zeros_like(plan.scored, dtype=feature["logp"].dtype).flatten(0, 1).index_copy(0, states, feature["logp"])
    ll = alg.reduce_logp(logp.view_as(plan.scored), plan, level="sequence", normalizer=None)
    return -ll.mean() / rollout.response.shape[1]


def prepare(settings: config.Train | config.Pretrain) -> None:
    """Set torch up as a run asks for: number of threads, precision of float32 products. Both hold for the whole process.

    The precision is set in any case, so that a run does not inherit that of the one before; ``threads`` 0 leaves the number
    as it is. Raises ValueError for a device that is not there.
    """
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device: got {settings.device!r}; allowed cpu, and cuda where torch finds a GPU") from None
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.set_float32_matmul_precision(settings.matmul_precision)


def _write_summary(out: Path, summary: dict) -> dict:
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


# ----------------------------------------------------------------------------------------------------------- the RL loop


_LOWER = {  # where memory runs out -> what to change
    "loading": "dtype bfloat16, or quantize true with lora.rank from 1",
    "evaluation": "a smaller micro_batch",
    "rollout": "a smaller micro_batch",
    "rollout_kl": "a smaller micro_batch",
    "scoring": "a smaller micro_batch",
    "update": "a smaller micro_batch or lora.rank, or gradient_checkpointing true",
}


@contextlib.contextmanager
def part(name: str):
    """Running out of GPU memory inside is remembered as something that happened in this part of a step."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(name)
        raise


def _out_of_memory(error: torch.OutOfMemoryError, settings: config.Train, out: Path) -> ValueError:
    """The line for it: where, what to lower, and what is kept."""
    name = error.__notes__[0] if getattr(error, "__notes__", None) else "loading"
    kept = f"{_checkpoints(out)[-1]} is kept, --resume goes on" if has_checkpoint(out) else "no checkpoint was due yet"
    said, size = denoiser.one_line(error).partition(". GPU")[0], settings.micro_batch
    return distributed.Alone(f"micro_batch: got {size}, out of memory in the {name} ({said}); try {_LOWER[name]}; {kept}")


def _report_memory(learner: Learner) -> None:
    """One line: the peak that was predicted and the one that was measured."""
    predicted = memory.peak(predicted_memory(learner.settings, distributed.count())) / 1e9
    found = memory.measured(learner.model.device)
    told = "not measured on a CPU" if found is None else f"measured {found / 1e9:.3f} GB"
    if distributed.is_first():
        tqdm.write(f"memory: predicted {predicted:.3f} GB at its peak, {told}", file=sys.stderr)


def _now() -> float:
    """Seconds, once a GPU has done what it was given: otherwise a phase would be charged with the work of the one before."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclasses.dataclass
class Clock:
    """Seconds and network calls (sequences) by phase."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str):
        started = _now()
        with part(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + _now() - started

    def count(self, name: str, calls: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + calls

    def row(self) -> dict[str, float]:
        return {f"seconds/{k}": v for k, v in self.seconds.items()} | {f"network_calls/{k}": v for k, v in self.calls.items()}


@dataclasses.dataclass
class Experience:
    """One rollout with what the task said about it; a puzzle for each prompt.

    ``updates``: how many updates the weights that sampled it had seen, if they are the weights that are trained and their
    policy was not approximated; else None.
    ``kl``: KL of the sampler's policy to the trained one, where the sampler approximated; None elsewhere.
    """

    puzzles: list[Puzzle]
    rollout: alg.Rollout
    texts: list[str]
    reward: Tensor
    updates: int | None = None
    kl: float | None = None

    @property
    def groups(self) -> Tensor:
        """Rewards (G, N)."""
        return self.reward.unflatten(0, (-1, self.rollout.num_generations))

    def select(self, prompts: Tensor) -> Experience:
        """The prompts where the mask (G,) is True, with all their responses."""
        rows = prompts.repeat_interleave(self.rollout.num_generations).nonzero()[:, 0]
        cut = {name: value[rows] for name, value in vars(self.rollout).items() if torch.is_tensor(value)}
        records = {name: value[rows] for name, value in self.rollout.records.items()}
        puzzles = [self.puzzles[i] for i in prompts.nonzero()[:, 0].tolist()]
        rollout = dataclasses.replace(self.rollout, **cut, records=records)
        return Experience(puzzles, rollout, [self.texts[i] for i in rows.tolist()], self.reward[rows], self.updates, self.kl)


def method_of(settings: config.Train) -> alg.Method:
    """The row of ``METHODS`` that a run asks for, with its options; what it refuses, it refuses here."""
    if settings.method not in alg.METHODS:
        raise ValueError(f"method: got {settings.method!r}; allowed {', '.join(alg.METHODS)}")
    method = config.with_options(alg.METHODS[settings.method], settings.method_options)
    if method.temperature == "sampling" and settings.sampler.temperature == 0:
        raise ValueError(f"sampler.temperature: got 0; allowed above 0, {method.name} scores at the sampling temperature")
    sampler.check_records(method.needs, settings.sampler)
    rehearse(method, settings)
    return method


def rehearse(method: alg.Method, settings: config.Train) -> None:
    """The method's plan, credit and loss on a made-up group, whose shapes are those of the run and whose numbers are all 0.

    A number that a function of the row refuses is thereby refused before a network is loaded or a file is written.
    """
    made = blank_rollout(method, settings)
    reward = torch.zeros(settings.num_generations)
    plan = method.plan(made, torch.Generator().manual_seed(0))
    if plan.block_length is not None and settings.sampler.attention != "block_causal":
        now = settings.sampler.attention
        raise ValueError(f"sampler.attention: got {now!r}; allowed block_causal, as {method.name} scores all blocks at once")
    if method.step_value != "none":
        completions(method, made)
    adv = alg.advantages(method, plan, made, reward, reward.expand(plan.valid.shape))
    feature = {name: torch.zeros(plan.scored.shape) for name in method.features}
    if "topk_logp" in feature:
        feature["topk_logp"] = feature["topk_logp"][..., None]
    ll = alg.reduced(method, plan, made, feature)
    anchor = alg.behaviour_anchor(method, plan, made) if method.anchor == "behaviour" else ll
    ref = alg.kl_target(method, plan, made, feature) if method.kl else None
    alg.method_loss(method, plan, made, feature, adv, anchor, ref)


def completions(method: alg.Method, rollout: alg.Rollout) -> Tensor:
    """The record (B, T, L) that holds what each state would become in one step, greedy or drawn as the row says."""
    name = {"greedy": "one_step", "sampled": "one_step_sampled"}[method.step_value]
    if name not in rollout.records:
        raise ValueError(f"records: the rollout holds no record {name!r}; {method.name} must ask the sampler for it (needs)")
    return rollout.records[name]


def predicted_memory(settings: config.Train, gpus: int = 1) -> dict[str, int]:
    """Bytes by part that the run will need on each GPU; see minidrl/memory.py."""
    method = method_of(settings)
    return memory.predict(settings, method, blank_rollout(method, settings, settings.num_prompts), gpus)


def blank_rollout(method: alg.Method, settings: config.Train, prompts: int = 1) -> alg.Rollout:
    """A made-up Rollout of ``prompts`` groups on the CPU: response (B, L) as long as the run's, and the records of the method.

    Every token, log-probability and record is 0, no response ends early, positions are revealed from left to right, and the
    prompts have one token. It is what plans, losses and memory can be worked out on before a network is loaded.
    """
    s, rows = settings.sampler, settings.num_generations * prompts
    ids, logp = torch.zeros(rows, s.length, dtype=torch.long), torch.zeros(rows, s.length)
    known = {name: {name: ids[:, None].expand(-1, s.num_steps, -1)} for name in sampler.COMPLETIONS}
    known |= {"entropy": {"entropy": logp}, "topk": {"topk_ids": ids[..., None], "topk_logp": logp[..., None]}}
    records = {key: value for need in ("entropy", *method.needs) for key, value in known[need].items()}
    steps = (torch.arange(s.length) // s.tokens_per_step).expand(rows, -1)
    prompt = ids[:, :1]
    return alg.Rollout(prompt, prompt == 0, ids, ids == 0, steps, logp, settings.num_generations, s, records)


def load_policy(settings: config.Train, method: alg.Method) -> tuple[Any, Any, Any]:
    """(network to train, tokenizer, reference policy): the network as it is loaded, or None for a method without one.

    With adapters the reference is the same network with its adapters off; otherwise it is a second copy.
    """
    lora, dtype = settings.lora, None if settings.dtype == "stored" else getattr(torch, settings.dtype)
    how = (settings.model, settings.device, dtype)
    model, tok = denoiser.load(*how, quantize=True) if settings.quantize else denoiser.load(*how)
    if denoiser.has_adapters(model):
        raise ValueError(f"model: got {settings.model!r}, which holds adapters; allowed a base (--resume continues a run)")
    if lora.rank:
        denoiser.add_adapters(model, **dataclasses.asdict(lora), seed=settings.seed, base=settings.model)
    if settings.gradient_checkpointing:
        denoiser.checkpoint_activations(model)
    if method.kl is None or method.kl.target != "reference":
        return model, tok, None
    return model, tok, denoiser.without_adapters(model) if lora.rank else denoiser.load(*how)[0]


class Learner:
    """Network, optimiser and method of one RL run; ``step`` does one rollout and its updates."""

    def __init__(self, settings: config.Train):
        self.settings, self.task = settings, settings.task
        self.method = method_of(settings)  # raises before anything is loaded or written
        distributed.check(settings)
        prepare(settings)
        self.model, self.tok, self.reference = load_policy(settings, self.method)
        if self.task.prompt_format == "chat":  # what it refuses, it refuses here
            encode_prompts(self.tok, self.task.held_out(1), self.task.prompt_length, prompt_format="chat")
        sampler.check_attention(self.model, settings.sampler)
        self.network = self.actor = denoiser.compiled(self.model) if settings.compile else self.model
        if settings.rollout_dtype != "float32":
            self.actor = denoiser.rounded(self.model, getattr(torch, settings.rollout_dtype))
            self.actor = denoiser.compiled(self.actor) if settings.compile else self.actor
        distributed.shard(self.model, self.reference, self.actor)
        self.optimizer = make_optimizer(self.model, settings.optimizer)
        self.updates = 0

    def restore(self, checkpoint: Path) -> dict:
        """Continue from a checkpoint: weights, optimiser, number of updates; returns its counters."""
        state = load_checkpoint(checkpoint, self.model, self.optimizer)
        self.updates = state["step"] * self.settings.num_iterations
        return state

    def generator(self, step: int, purpose: str) -> torch.Generator:
        return keyed_generator(self.settings.seed, step, purpose)

    def collect(self, step: int, clock: Clock) -> Experience:
        """Puzzles, rollout, rewards."""
        s = self.settings
        if self.actor is not self.network:
            self.actor.load_state_dict(self.model.state_dict())  # casts to the dtype of the rollouts
        puzzles = self.task.puzzles(s.num_prompts, np.random.default_rng(_key(s.seed, step, "puzzles")))
        with clock.phase("rollout"):
            width, kind = self.task.prompt_length, self.task.prompt_format
            prompt, mask = encode_prompts(self.tok, puzzles, width, self.model.device, kind)
            rollout = distributed.generate(
                self.actor,
                prompt,
                mask,
                s.sampler,
                eos_token_id=self.tok.eos_token_id,
                num_generations=s.num_generations,
                generator=self.generator(step, "rollout"),
                records=sorted({*self.method.needs, "entropy"}),  # entropy is logged for every method
                micro_batch=s.micro_batch,
            )
        clock.count("rollout", sampler.network_calls(rollout))
        texts = decode(self.tok, rollout.response)
        reward = self.verify(puzzles, texts).to(rollout.logp)
        if s.sampler.cache in sampler.APPROXIMATE:
            return Experience(puzzles, rollout, texts, reward, None, self.rollout_kl(step, rollout, clock))
        return Experience(puzzles, rollout, texts, reward, self.updates if self.actor is self.network else None)

    def rollout_kl(self, step: int, rollout: alg.Rollout, clock: Clock) -> float | None:
        """KL(policy of the sampler || policy of the network) of a kept token given its state, nats, estimated.

        Two steps of each response, drawn uniformly, are scored as the network has them: 2 / T of the calls of the rollout, in
        a phase of their own. Unbiased for the mean over the kept tokens where the order does not depend on the tokens (k3 of
        algorithms.kl_term). With low_confidence the revealed tokens are a selection, and the number is that of the selection.
        None at temperature 0, where the policy is a point mass and most KLs are infinite or 0.
        """
        s = self.settings.sampler
        if s.temperature == 0:
            return None
        plan = alg.replay_plan(rollout, self.generator(step, "rollout_kl"), num_states=min(2, s.num_steps), min_entropy=0.0)
        clock.count("rollout_kl", plan.network_calls)
        with clock.phase("rollout_kl"):
            size, temperature = self.settings.micro_batch, s.temperature
            found = shared_features(self.network, rollout, plan, temperature=temperature, size=size)
        kl = alg.kl_term(rollout.logp.expand_as(found["logp"]), found["logp"], form="k3")
        drawn = plan.weight[..., None] * (plan.scored & rollout.keep)
        return float((drawn * kl).sum() / rollout.keep.sum())

    def verify(self, puzzles: list[Puzzle], texts: list[str]) -> Tensor:
        """Rewards (B,) of responses to the puzzles, the same number for each."""
        each = len(texts) // len(puzzles)
        scores = distributed.first(lambda: [self.task.score(puzzles[i // each], text) for i, text in enumerate(texts)])
        return torch.tensor(scores, dtype=torch.float64)

    def advantages(self, experience: Experience, plan: alg.Plan) -> Tensor:
        """The method's credit for this plan: (B,), or (K, B) where the states of the plan have values of their own."""
        rollout, step_reward = experience.rollout, None
        if self.method.step_value != "none":
            record = completions(self.method, rollout)
            guesses = record.transpose(0, 1).gather(0, plan.step[..., None].expand(-1, -1, record.shape[-1]))
            rows = [self.verify(experience.puzzles, decode(self.tok, guess)) for guess in guesses]
            step_reward = torch.stack(rows).to(experience.reward)
        return alg.advantages(self.method, plan, rollout, experience.reward, step_reward)

    def score(self, model: Any, rollout: alg.Rollout, plan: alg.Plan, clock: Clock) -> dict[str, Tensor]:
        """The features of the method's loss."""
        return self._features(model, rollout, plan, clock, self.method.features)

    def likelihood(self, model: Any, rollout: alg.Rollout, plan: alg.Plan, clock: Clock) -> dict[str, Tensor]:
        """Those features of which an ll is made: all that an anchor or a reference needs."""
        names = tuple(name for name in self.method.features if name in ("logp", "order_logp"))
        return self._features(model, rollout, plan, clock, names)

    def _features(self, model, rollout, plan, clock, names: tuple[str, ...]) -> dict[str, Tensor]:
        clock.count("scoring", plan.network_calls * (2 if "kl_ref" in names else 1))
        with clock.phase("scoring"):
            return shared_features(model, rollout, plan, names=names, size=self.settings.micro_batch, **self._how())

    def _how(self) -> dict:
        return {"temperature": self._temperature(), "reference": self.reference}

    def _temperature(self) -> float:
        return 1.0 if self.method.temperature == "one" else self.settings.sampler.temperature

    def plans(self, step: int, experience: Experience) -> list[tuple[alg.Plan, Tensor]]:
        """A plan and its advantages for each update; groups without any advantage are left out where they cannot contribute."""
        count = 1 if self.method.refresh == "fixed" else self.settings.num_iterations
        drawn = [self.method.plan(experience.rollout, self.generator(step, f"plan {i}")) for i in range(count)]
        credited = [(plan, self.advantages(experience, plan)) for plan in drawn]
        if self.method.kl is None and self._silent_without_advantage():
            credited = [(self._audible(plan, adv), adv) for plan, adv in credited]
        return credited * (self.settings.num_iterations // count)

    def _silent_without_advantage(self) -> bool:
        # True of every objective that is a multiple of adv, and not of a regression on adv.
        ll = torch.linspace(-1, -0.5, self.settings.num_generations)[None, :, None]
        return not self.method.objective(ll, ll - 0.1, 0 * ll, self.settings.num_generations).any()

    def _audible(self, plan: alg.Plan, adv: Tensor) -> alg.Plan:
        silent = adv.reshape(-1, adv.shape[-1]).unflatten(1, (-1, self.settings.num_generations)).abs().sum((0, 2)) == 0
        speaks = ~silent.repeat_interleave(self.settings.num_generations)
        return dataclasses.replace(plan, valid=plan.valid & speaks, scored=plan.scored & speaks[:, None])

    def anchors(self, step: int, plans: list[alg.Plan], rollout: alg.Rollout, clock: Clock) -> list[Tensor | None]:
        """The ll that each update's ratio is taken against; None where pass 1 of that very update supplies it."""
        method = self.method
        if method.anchor == "behaviour":
            return [alg.behaviour_anchor(method, plan, rollout) for plan in plans]
        if method.anchor == "none" or method.refresh == "fixed":
            return [None] * len(plans)
        if method.refresh == "independent":
            own = method.plan(rollout, self.generator(step, "plan of the old value"))
            return [alg.reduced(method, own, rollout, self.likelihood(self.network, rollout, own, clock))] * len(plans)
        return [None] + [
            alg.reduced(method, plan, rollout, self.likelihood(self.network, rollout, plan, clock)) for plan in plans[1:]
        ]

    def step(self, step: int) -> dict:
        """One rollout, ``num_iterations`` updates; returns the metrics row."""
        s, clock = self.settings, Clock()
        collected = experience = self.collect(step, clock)
        if s.filter_groups:
            experience = collected.select((collected.groups != collected.groups[:, :1]).any(1))
        if not len(experience.reward):  # every group was filtered out
            return self._metrics(step, collected, [self._no_update(clock) for _ in range(s.num_iterations)], clock)
        credited = self.plans(step, experience)
        anchors = self.anchors(step, [plan for plan, _ in credited], experience.rollout, clock)
        rows, old = [], None
        for (plan, adv), anchor in zip(credited, anchors, strict=True):
            row, ll = self.update(experience, plan, adv, old if anchor is None else anchor, clock)
            old = ll if old is None and self.method.anchor == "old" else old
            rows.append(row)
        return self._metrics(step, collected, rows, clock)

    def _no_update(self, clock: Clock) -> dict:
        # Nothing to learn from: weights and optimiser stay as they are, the schedule goes on, as it does in a resumed run.
        clock.count("update", 0)
        self.updates += 1
        return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": self._learning_rate(self.updates - 1)}

    def _learning_rate(self, update: int) -> float:
        s = self.settings
        return learning_rate(s.optimizer, update, s.steps * s.num_iterations)

    def update(
        self, experience: Experience, plan: alg.Plan, adv: Tensor, anchor: Tensor | None, clock: Clock
    ) -> tuple[dict, Tensor | None]:
        """One optimiser step by the two-pass backward; returns its metrics and the ll before it (None: it was not scored)."""
        method, rollout = self.method, experience.rollout
        if not plan.network_calls:
            return self._no_update(clock), None
        feature = assumed = self._without_pass_1(experience, plan, adv, anchor)
        if assumed is None:
            feature = self.score(self.network, rollout, plan, clock)
        ref = None
        if self.reference is not None and method.kl.form != "exact":
            ref = alg.kl_target(method, plan, rollout, self.likelihood(self.reference, rollout, plan, clock))
        ll = alg.reduced(method, plan, rollout, feature)
        anchor = ll if anchor is None and method.anchor == "old" else anchor
        loss, cotangent = cotangents(lambda f: alg.method_loss(method, plan, rollout, f, adv, anchor, ref), feature)
        if not torch.isfinite(loss):
            raise RunError(f"loss is {float(loss)}")
        with clock.phase("update"):
            size = self.settings.micro_batch
            seen, calls = second_pass(self.network, rollout, plan, cotangent, size=size, **self._how())
            lr = self._learning_rate(self.updates)
            norm = optimizer_step(self.model, self.optimizer, self.settings.optimizer, lr)
        clock.count("update", calls * (2 if "kl_ref" in cotangent else 1))
        self.updates += 1
        if assumed is not None:  # what is logged is what pass 2 met
            feature, ll = seen, None
            plan = dataclasses.replace(plan, scored=plan.scored & (seen["logp"] != 0).any(-1, keepdim=True))
            anchor = alg.reduced(method, plan, rollout, seen) if method.anchor == "old" else anchor
            loss = alg.method_loss(method, plan, rollout, seen, adv, anchor, ref)
        row = {"loss": float(loss), "grad_norm": norm, "learning_rate": lr}
        return row | self._ratios(rollout, plan, adv, anchor, feature) | self._penalty(rollout, plan, anchor, ref, feature), ll

    def _without_pass_1(
        self, experience: Experience, plan: alg.Plan, adv: Tensor, anchor: Tensor | None
    ) -> dict[str, Tensor] | None:
        """Features at which the loss has the gradient that it has at the true ones, where they can be had for nothing.

        Any will do if the loss is linear. If the present weights are those that sampled, their log-probabilities are on record.
        And a ratio of ll to itself is 1 whatever ll is: if two made-up scores, each its own anchor, give the same gradient,
        so does the true one. None: the update needs its first pass.
        """
        method, logp = self.method, experience.rollout.logp
        blank = dict.fromkeys(method.features, torch.zeros(plan.scored.shape, dtype=logp.dtype, device=logp.device))
        if method.linear:
            return blank
        if method.kl is not None and method.kl.target == "reference":
            return None
        if method.anchor == "behaviour":
            on_policy = experience.updates == self.updates and method.features == ("logp",)
            return {"logp": logp * plan.scored} if on_policy else None
        if anchor is not None or method.anchor != "old" or self.settings.num_iterations > 1:  # later updates need the old ll
            return None
        other = {name: torch.linspace(-3, -0.1, value.numel()).to(value).view_as(value) for name, value in blank.items()}
        slopes = [self._slope_on_policy(experience, plan, adv, made) for made in (blank, other)]
        return blank if all(map(torch.equal, *(slope.values() for slope in slopes))) else None

    def _slope_on_policy(self, experience: Experience, plan: alg.Plan, adv: Tensor, feature: dict) -> dict[str, Tensor]:
        method, rollout = self.method, experience.rollout
        anchor = alg.reduced(method, plan, rollout, feature)
        return cotangents(lambda f: alg.method_loss(method, plan, rollout, f, adv, anchor, None), feature)[1]

    def _ratios(self, rollout: alg.Rollout, plan: alg.Plan, adv: Tensor, anchor: Tensor | None, known: dict) -> dict:
        method, row = self.method, {}
        if "order_logp" in known:
            row["order_impossible"] = _impossible(plan, known["order_logp"])
        if method.linear and plan.replay:  # what the sampler recorded stands in for the anchor that the row does not have
            method = dataclasses.replace(method, features=("logp",))
            anchor = alg.reduced(method, plan, rollout, {"logp": rollout.logp.expand(plan.scored.shape)})
        if anchor is not None:
            row |= ratio_diagnostics(method, plan, rollout, alg.reduced(method, plan, rollout, known), anchor, adv)
        return row

    def _penalty(self, rollout: alg.Rollout, plan: alg.Plan, anchor: Tensor | None, ref: Tensor | None, known: dict) -> dict:
        method = self.method
        if method.kl is None:
            return {}
        if method.kl.form == "exact":
            return {"kl": float(known["kl_ref"][plan.scored].mean())} if plan.scored.any() else {}
        ll = alg.kl_target(method, plan, rollout, known)
        present = alg.entries(plan, method.reduction)[0].expand_as(ll)
        return {"kl": float(alg.kl_term(ll, anchor if ref is None else ref, form="k3")[present].mean())}

    def _metrics(self, step: int, experience: Experience, rows: list[dict], clock: Clock) -> dict:
        reward, rollout, groups = experience.reward, experience.rollout, experience.groups
        metrics = {
            "step": step + 1,
            "reward": float(reward.mean()),
            "reward_std": float(groups.std(1).mean()) if self.settings.num_generations > 1 else 0.0,
            "solved": float((reward == 1).double().mean()),
            "frac_reward_zero_std": float((groups == groups[:, :1]).all(1).double().mean()),
            "completions/mean_length": float(rollout.lengths.double().mean()),
            "completions/tokens": int(rollout.lengths.sum()),
            "entropy": float(rollout.records["entropy"][rollout.keep].mean()),
        }
        if experience.kl is not None:
            metrics["rollout_kl"] = experience.kl
        if self.settings.filter_groups:
            metrics["groups_filtered"] = int((groups == groups[:, :1]).all(1).sum())
        for name in {name: None for row in rows for name in row}:
            values = [row[name] for row in rows if name in row]
            metrics[name] = max(values) if name == "ratio_max" else float(np.mean(values))
        return metrics | clock.row()


def _impossible(plan: alg.Plan, order_logp: Tensor) -> float:
    """Share of the plan's states in which the present weights could not have chosen the recorded positions: F = 0 in (4.2)."""
    states = order_logp.sum(-1)[plan.valid & plan.scored.any(-1)]
    least = math.log(torch.finfo(torch.float32).tiny) + 0.1  # in float64 the logarithm of the smallest number is lower still
    return float((states <= least).double().mean()) if len(states) else 0.0


def train(settings: config.Train, out: Path, resume: bool = False) -> dict:
    """A whole RL run into ``out``: metrics.jsonl, checkpoints, curve.png, summary.json. Returns the summary."""
    try:
        return _train(settings, out, resume)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(error, settings, out) from None


def _train(settings: config.Train, out: Path, resume: bool) -> dict:
    learner = distributed.together(lambda: Learner(settings))
    checkpoint = distributed.first(lambda: open_run(out, settings, resume))
    state = {"step": 0, "seconds": 0.0, "solved_before": None}
    if checkpoint is not None:
        state |= distributed.together(lambda: learner.restore(checkpoint))
    log, cache = MetricsLog(out, state["step"], settings.tensorboard), settings.sampler.cache
    if cache in sampler.APPROXIMATE and distributed.is_first():
        tqdm.write(f"sampler.cache {cache}: rollouts are off-policy; the metric rollout_kl says how far", file=sys.stderr)
    if state["solved_before"] is None:
        state["solved_before"] = _evaluate_into(log, learner, 0, 0.0)
    started, first = time.perf_counter() - state["seconds"], state["step"]
    bar = tqdm(
        range(first, settings.steps),
        desc=learner.method.name,
        initial=first,
        total=settings.steps,
        mininterval=1,
        disable=not distributed.is_first(),
    )
    for step in bar:
        row = _guarded_step(learner, step, out, state)
        if step == first:  # no step needs more than the first
            _report_memory(learner)
        state |= {"step": step + 1, "seconds": time.perf_counter() - started}
        bar.set_postfix(reward=f"{row['reward']:.3f}", solved=f"{row['solved']:.1%}")
        log.write(row | {"seconds": state["seconds"]})
        _milestones(learner, log, out, state)
    return _finish(learner, log, out, state)


def _guarded_step(learner: Learner, step: int, out: Path, state: dict) -> dict:
    """A step; where a logit, loss or gradient is not finite, weights and optimiser from before the step are left as a dump.

    All randomness is keyed, so that they are all it takes to repeat the step. With several updates a step, that costs a copy
    of both: the failure may come after the first of them.
    """
    several = learner.settings.num_iterations > 1
    before = _copied([dict(trained(learner.model)), learner.optimizer.state_dict()]) if several else None
    try:
        return learner.step(step)
    except (RunError, FloatingPointError) as error:
        if several:
            learner.model.load_state_dict(before[0], strict=False)
            learner.optimizer.load_state_dict(before[1])
        folder = out / f"failed-{step}"
        save_checkpoint(folder, learner.model, learner.tok, learner.optimizer, state)
        raise RunError(
            f"step {step}: {error}; stopped. {folder} holds weights, optimiser and counters from before that step; "
            "minidrl.trainer.replay repeats the step from them"
        ) from None


def _copied(value: Any) -> Any:
    """A copy in main memory, where there is more room than on a GPU."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def replay(out: Path, failed: Path) -> dict:
    """Repeat a failed step from its dump, with the same puzzles, noise and plans (all keyed by seed and step)."""
    learner = Learner(config.of_run(config.Train, out))
    return learner.step(learner.restore(failed)["step"])


def _evaluate_into(log: MetricsLog, learner: Learner, step: int, seconds: float) -> float:
    s = learner.settings
    settings = dataclasses.replace(s.sampler, temperature=s.evaluate.temperature)
    with part("evaluation"):
        scores = evaluate(learner.model, learner.tok, learner.task, settings, n=s.evaluate.n, micro_batch=s.micro_batch)
    log.write(
        {"step": step, "seconds": seconds, "eval/temperature": s.evaluate.temperature}
        | {f"eval/{key}": value for key, value in scores.items()}
    )
    return scores["solved"]


def _milestones(learner: Learner, log: MetricsLog, out: Path, state: dict) -> None:
    s, step = learner.settings, state["step"]
    if s.evaluate.every and step % s.evaluate.every == 0 and step < s.steps:
        _evaluate_into(log, learner, step, state["seconds"])
    if s.save_every and step % s.save_every == 0 and step < s.steps:
        save_checkpoint(out / f"checkpoint-{step}", learner.model, learner.tok, learner.optimizer, state)


def _finish(learner: Learner, log: MetricsLog, out: Path, state: dict) -> dict:
    s = learner.settings
    solved_after = _evaluate_into(log, learner, s.steps, state["seconds"])
    log.close()
    save_checkpoint(out / f"checkpoint-{s.steps}", learner.model, learner.tok, learner.optimizer, state)
    distributed.first(lambda: report.write_curve(out))
    summary = {
        "method": learner.method.name,
        "seed": s.seed,
        "steps": s.steps,
        "seconds": round(state["seconds"], 1),
        "solved_before": state["solved_before"],
        "solved_after": solved_after,
        "evaluated_on": s.evaluate.n,
        "temperature": s.evaluate.temperature,
    }
    return distributed.first(lambda: _write_summary(out, summary))
