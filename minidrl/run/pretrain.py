"""Supervised training: the tiny masked diffusion LM itself, or fine-tuning of a checkpoint.

One loss serves both, the ELBO of written answers: a task's demonstrations, or the rows of a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from tqdm import tqdm

from minidrl import algorithms as alg
from minidrl import denoiser, loop, sampler
from minidrl import features as feat
from minidrl.algorithms import Rollout
from minidrl.features import Network
from minidrl.keyed import keyed_generator, keyed_seed
from minidrl.run import checkpoints, config, folders, memory
from minidrl.run.evaluate import evaluate_run
from minidrl.run.folders import MetricsLog
from minidrl.run.launch import RunError, stop_requests
from minidrl.run.train import make_optimizer, prepare, until_asked
from minidrl.tasks import Problem, held_out, rows
from minidrl.tasks.text import encode_prompts, encode_responses

remarks = logging.getLogger("minidrl")


def pretrain(settings: config.Pretrain, out: Path, resume: bool = False) -> dict:
    """Train a network by maximising the ELBO (count form, padding included).

    The loss is -ELBO / L: the mean negative log-probability of a hidden token, every count of
    hidden tokens equally likely. Returns and writes the summary.
    """
    prepare(settings)
    if settings.init:
        memory.check(settings)
    held_out(settings.task, settings.evaluate.n, settings.evaluate.skip)  # not after all the steps
    if settings.data:
        _exchanges(settings.data)
    with folders.opened(out, settings, resume) as (checkpoint, sums), stop_requests() as asked:
        return _pretrain(settings, out, checkpoint, sums, asked)


def _pretrain(
    settings: config.Pretrain,
    out: Path,
    checkpoint: Path | None,
    sums: dict[str, str],
    asked: Callable[[], int],
) -> dict:
    state = {"step": 0, "seconds": 0.0}
    model, tok = _begun(settings)
    seen, rule = as_taught(settings, model)
    network = denoiser.compiled(seen) if settings.compile else seen
    optimizer = make_optimizer(model, settings.optimizer, fused=bool(settings.init))
    if checkpoint is not None:
        state |= folders.load_checkpoint(checkpoint, model, optimizer)
    log = MetricsLog(out, settings, checkpoint)
    started = time.perf_counter() - state["seconds"]
    log_every = 1 if settings.init else 50
    last = settings.stop_after or settings.steps
    steps = range(state["step"], last)

    def save() -> Path:
        facts = {"seconds": time.perf_counter() - started, "data": sums}
        return folders.save_checkpoint(out, model, tok, optimizer, state | facts)

    def judged() -> dict:
        with precision(settings):
            scores = evaluate_run(dataclasses.replace(settings, sampler=rule), seen, tok)
        if settings.evaluate.every:
            reached = {"step": state["step"], "seconds": time.perf_counter() - started}
            log.write(reached | {f"eval/{key}": value for key, value in scores.items()})
        return scores

    batches = demonstration_rollouts(settings, tok, steps)
    bar = tqdm(desc="pretrain", initial=state["step"], total=last, mininterval=2)
    for step in until_asked(asked, bar, steps, save):
        _, rollout = next(batches)
        lr = loop.learning_rate(settings.optimizer, step, settings.steps)
        with precision(settings):
            if settings.loss == "next_token":
                loss = next_token_loss(network, rollout)
            else:
                loss = elbo_loss(network, rollout, settings, step)
            loss.backward()
        try:
            norm = loop.optimizer_step(model, optimizer, settings.optimizer, lr)
        except FloatingPointError as error:
            raise RunError(f"step {step}: {error}; stopped, {save()} is from before it") from None
        state["step"] = step + 1
        if step % log_every == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
            measured = {"loss": loss.item(), "grad_norm": norm, "learning_rate": lr}
            log.write({"step": step + 1} | measured)
        if (every := settings.evaluate.every) and (step + 1) % every == 0 and step + 1 < last:
            judged()
        if settings.save_every and (step + 1) % settings.save_every == 0:
            save()
    bar.close()
    facts = {
        "steps": last,
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": model.num_parameters(),
    }
    with folders.into(out) as part:
        checkpoints.save(model, tok, part)
    return folders.write_summary(out, facts | {"held_out": judged()})


def _begun(settings: config.Pretrain) -> tuple[denoiser.Denoiser, Any]:
    """(network, tokenizer): the checkpoint's, or a fresh one's with the task's alphabet."""
    if settings.init:
        model, tok = checkpoints.load(settings.init, settings.device, torch.float32)
        sampler.check_attention(model, settings.sampler)
        if settings.loss == "next_token" and not model.shift:
            got = "'next_token' for a model that predicts in place"
            raise ValueError(f"loss: got {got}; allowed elbo, or a checkpoint of convert --shift")
        said = "bfloat16" if _in_bfloat16(settings) else "float32"
        remarks.warning(f"{settings.init}: weights in float32, products in {said}")
        return model, tok
    tok = settings.task.tokenizer()
    block_causal = settings.sampler.attention == "block_causal"
    block_length = settings.sampler.block_length if block_causal else None
    sizes = dataclasses.asdict(settings.network)
    return denoiser.build(sizes, tok, settings.seed, block_length).to(settings.device), tok


def as_taught(
    settings: config.Pretrain, model: denoiser.Denoiser
) -> tuple[denoiser.Denoiser, sampler.Sampler]:
    """The network as its loss sees it, and the sampler that asks it so: a causal one writes from
    left to right, a token at a time."""
    if settings.loss == "elbo":
        return model, settings.sampler
    changes = {"attention": "block_causal", "block_length": 1, "tokens_per_step": 1}
    return denoiser.causal(model), dataclasses.replace(settings.sampler, **changes)


def _in_bfloat16(settings: config.Pretrain) -> bool:
    return checkpoints.in_bfloat16(settings.compute_dtype, settings.device)


@contextlib.contextmanager
def precision(settings: config.Pretrain) -> Iterator[None]:
    """Products in bfloat16 where ``compute_dtype`` asks for them, the rest in float32.

    Attention in short texts, and its gradient above all, is faster without the fused kernel.
    """
    kind, fast = torch.device(settings.device).type, _in_bfloat16(settings)
    plain = sdpa_kernel(SDPBackend.MATH) if fast and kind == "cpu" else contextlib.nullcontext()
    with plain, torch.autocast(kind, torch.bfloat16, enabled=fast):
        yield


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """What step ``i`` of a pre-training learns from, item ``i``: problems of the pre-training
    split, their prompts and mask, and a response to each; in main memory."""

    settings: config.Pretrain
    tok: Any

    @functools.cached_property
    def rows(self) -> list[Exchange]:
        """Those of the file ``data``."""
        return _exchanges(self.settings.data)

    def __getitem__(self, step: int) -> tuple[Sequence[Problem], Tensor, Tensor, Tensor]:
        settings, task = self.settings, self.settings.task
        rng = np.random.default_rng(keyed_seed(settings.seed, step, "demonstrations"))
        if settings.data:  # its rows, each drawn anew
            chosen = rng.integers(len(self.rows), size=settings.batch_size)
            problems = [self.rows[i] for i in chosen]
            texts = [exchange.answer for exchange in problems]
        else:
            problems = task.problems(settings.batch_size, rng, "pretrain")
            texts = task.demonstrations(problems, rng, step / settings.steps)
        where = (task.prompt_length, "cpu", task.prompt_format)
        prompt, prompt_mask = encode_prompts(self.tok, problems, *where)
        response = encode_responses(self.tok, texts, settings.sampler.length)
        return problems, prompt, prompt_mask, response


class Exchange(NamedTuple):
    """A row of a file: a prompt, in whatever format it is asked, and the answer to it."""

    prompt: str
    answer: str

    @property
    def instruction(self) -> str:
        return self.prompt

    words = key = instruction


def _exchanges(path: str) -> list[Exchange]:
    """The rows of a file: each has ``prompt`` or, as GSM8K's, ``question``; and ``answer``."""
    found = rows.of_file("data", path)
    asked = "prompt" if "prompt" in found[0] else "question"
    return rows.made(found, path, lambda row: Exchange(*rows.texts(row, asked, "answer")))


def demonstration_rollouts(
    settings: config.Pretrain, tok: Any, steps: Sequence[int]
) -> Iterator[tuple[Sequence[Problem], Rollout]]:
    """The problems of each step, and their demonstrations in the shape of a Rollout.

    ``workers`` processes make them ahead: a GPU learns from a batch sooner than one process makes
    the next. Which numbers are drawn depends on the step alone.
    """
    items = DataLoader(
        Demonstrations(settings, tok),
        batch_size=None,
        sampler=steps,
        collate_fn=tuple,  # as it is
        num_workers=settings.workers,
        # A forked process would hold the run's lock after the run's death.
        multiprocessing_context="spawn" if settings.workers else None,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # else a number is drawn from torch's own
    )
    with _deaf_children() if settings.workers else contextlib.nullcontext():
        made = iter(items)
    for problems, *tensors in made:
        prompt, prompt_mask, response = (x.to(settings.device) for x in tensors)
        words = {"prompt": prompt, "prompt_mask": prompt_mask, "sampler": settings.sampler}
        yield problems, Rollout.of(response, **words)


def _begin_worker(number: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one thread


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    # Processes that begin inside inherit that Ctrl-C is blocked: it is for the run, which saves.
    resource_tracker.ensure_running()  # to start it would end the block
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def elbo_loss(model: Network, rollout: Rollout, settings: config.Pretrain, step: int) -> Tensor:
    """-ELBO / L of a batch, one masked state a sequence; of a block-causal model one a block."""
    block_causal = settings.sampler.attention == "block_causal"
    plan_of = alg.block_elbo_plan if block_causal else alg.elbo_count_plan
    noise = keyed_generator(settings.seed, step, "masks")
    plan = plan_of(rollout, noise, num_states=1, domain="all", strata=False)
    how = {"temperature": 1.0, "size": len(rollout.response), "graph": True}
    logp = feat.features(model, rollout, plan, **how)["logp"]
    ll = alg.reduce_logp(logp, plan, level="sequence", normalizer=None)
    return -ll.mean() / rollout.response.shape[1]


def next_token_loss(network: Network, rollout: Rollout) -> Tensor:
    """-log p / L of a batch under ``denoiser.causal``: what -ELBO / L bounds, in one forward."""
    tokens = torch.cat([rollout.prompt, rollout.response], 1)  # (B, P + L)
    real = torch.cat([rollout.prompt_mask, torch.ones_like(rollout.keep)], 1)
    h = network.encode(tokens, real)[:, rollout.prompt.shape[1] :]  # (B, L, D)
    return F.cross_entropy(network.head(h).flatten(0, 1), rollout.response.flatten())
