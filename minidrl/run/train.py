"""An RL run in a folder: what drives minidrl/loop.py.

``train`` opens the folder, builds what the loop works on (``start``), evaluates before, between
and after, writes a line of metrics a step, and saves checkpoints; a resumed run goes on from the
newest.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from minidrl import denoiser, loop, sampler
from minidrl.methods import Method
from minidrl.run import adapters, checkpoints, config, distributed, folders, memory, report
from minidrl.run.evaluate import evaluate_run
from minidrl.run.folders import MetricsLog
from minidrl.run.launch import Interrupted, RunError, stop_requests
from minidrl.run.precheck import method_of
from minidrl.tasks import held_out
from minidrl.tasks.text import check_lengths, encode_prompts

log = logging.getLogger("minidrl")
SHARES = {  # of the answers, in the progress bar
    "solved": "solved",
    "readable": "completions/readable",
    "clipped": "completions/clipped_ratio",
}
LEAST_READABLE = 0.05  # share of a step's answers, below which a remark is due


def train(settings: config.Train, out: Path, resume: bool = False) -> dict:
    """A whole RL run into ``out``: metrics.jsonl, checkpoints, curve.png; returns summary.json."""
    together = distributed.collectively
    together(lambda: held_out(settings.task, settings.evaluate.n, settings.evaluate.skip))
    together(lambda: folders.check(out, settings, resume))
    together(lambda: memory.check(settings))
    run = None
    try:
        run = together(lambda: start(settings))
        return _train(run, out, resume)
    except torch.OutOfMemoryError as error:
        raise memory.out_of_memory(error, settings, out, run.clock.now if run else "") from None


def _train(run: loop.Run, out: Path, resume: bool) -> dict:
    settings = run.settings
    with folders.opened(out, settings, resume) as (checkpoint, sums), stop_requests() as asked:
        state = {"step": 0, "seconds": 0.0, "solved_before": None, "solved_after": None}
        if checkpoint is not None:
            kept = (checkpoint, run.model, run.optimizer)
            state |= distributed.collectively(lambda: folders.load_checkpoint(*kept))
            run.updates = state["step"] * settings.num_iterations
        state["data"] = sums
        rows = MetricsLog(out, settings, checkpoint)
        if state["solved_before"] is None:
            state["solved_before"] = _evaluate(run, rows, 0, 0.0)
        _steps(run, rows, out, state, asked)
        return _finish(run, rows, out, state)


def _steps(
    run: loop.Run, rows: MetricsLog, out: Path, state: dict, asked: Callable[[], int]
) -> None:
    """The steps that are left, each with its line."""
    s, first = run.settings, state["step"]
    started = time.perf_counter() - state["seconds"]
    words = {"desc": run.method.name, "initial": first, "total": s.steps, "mininterval": 1}
    quiet = {} if distributed.is_main() else {"disable": True}  # else as TQDM_DISABLE says
    warned = False
    with tqdm(**words, **quiet) as bar:
        steps = loop.train(run, first)
        saves = partial(folders.save_checkpoint, out, run.model, run.tok, run.optimizer, state)
        for step in until_asked(asked, bar, range(first, s.steps), saves):
            try:
                row = next(steps)
            except FloatingPointError as error:
                kept = folders.checkpoint_folders(out)
                last = f"{kept[-1]} is the last checkpoint" if kept else "there is no checkpoint"
                raise RunError(f"step {step}: {error}; stopped, {last}") from None
            on_gpu = run.model.device.type == "cuda"
            if step == first and on_gpu and distributed.is_main():  # no step needs more
                tqdm.write(f"memory: {memory.compared(s)}", file=sys.stderr)
            seconds = time.perf_counter() - started
            state |= {"step": step + 1, "seconds": seconds, "solved_after": None}
            shares = {word: f"{row[key]:.1%}" for word, key in SHARES.items()}
            bar.set_postfix({"reward": f"{row['reward']:.3f}"} | shares)
            warned = warned or _warn_unreadable(run, row)
            rows.write(row | {"seconds": seconds})
            if step + 1 < s.steps:
                if s.evaluate.every and (step + 1) % s.evaluate.every == 0:
                    _evaluate(run, rows, step + 1, seconds)
                if s.save_every and (step + 1) % s.save_every == 0:
                    saves()


def until_asked(
    asked: Callable[[], int], bar: tqdm, steps: range, save: Callable[[], Path]
) -> Iterator[int]:
    """The steps; where one was ``asked`` to stop, Interrupted, once a checkpoint is written."""
    for step in steps:
        if signal := distributed.on_main(asked):
            bar.close()
            told = f"stopped after {step} of {steps.stop} steps; {save()} is saved"
            raise Interrupted(told, signal)
        yield step
        bar.update()


def _warn_unreadable(run: loop.Run, row: dict) -> bool:
    """One line, once, where the verifier can read next to no answer: nothing would be learned."""
    if row["completions/readable"] >= LEAST_READABLE:
        return False
    share = f"{row['completions/readable']:.1%} of the answers of step {row['step']}"
    why = f"{row['completions/clipped_ratio']:.1%} never ended"
    keys = [key for key in ("prompt_format", "wording", "protocol") if hasattr(run.task, key)]
    look = ", ".join(["sampler.length", *(f"task.{key}" for key in keys)])
    log.warning(f"only {share} can be read by the verifier of {run.task.name} ({why}); see {look}")
    return True


def _evaluate(run: loop.Run, rows: MetricsLog, step: int, seconds: float) -> float:
    s = run.settings
    with run.clock.phase("evaluation"):
        scores = evaluate_run(s, run.model, run.tok, micro_batch=s.micro_batch)
    row = {"step": step, "seconds": seconds, "eval/temperature": s.evaluate.temperature}
    rows.write(row | {f"eval/{key}": value for key, value in scores.items()})
    return scores["solved"]


def _finish(run: loop.Run, rows: MetricsLog, out: Path, state: dict) -> dict:
    s = run.settings
    saves = partial(folders.save_checkpoint, out, run.model, run.tok, run.optimizer, state)
    if state["solved_after"] is None:  # else the checkpoint is there already
        try:
            state["solved_after"] = _evaluate(run, rows, s.steps, state["seconds"])
        except Exception:  # the steps are kept, whatever the evaluation meets
            if run.processes.num_processes() == 1:  # of several, others may still be at it
                saves()
            raise
        saves()
    rows.close()
    distributed.on_main(lambda: report.write_curve(out))
    summary = {
        "method": run.method.name,
        "seed": s.seed,
        "steps": s.steps,
        "seconds": round(state["seconds"], 1),
        "solved_before": state["solved_before"],
        "solved_after": state["solved_after"],
        "evaluated_on": s.evaluate.n,
        "temperature": s.evaluate.temperature,
    }
    return distributed.on_main(lambda: folders.write_summary(out, summary))


# ------------------------------------------------------------------------- what a run is built from


def start(settings: config.Train) -> loop.Run:
    """All that the loop works on, from settings: networks, method, optimiser."""
    method = method_of(settings)  # raises before anything is loaded or written
    distributed.check_settings(settings)
    prepare(settings)
    model, tok, reference = load_policy(settings, method)
    _check_fits(model, tok, settings)

    def compiled(network: denoiser.Denoiser) -> denoiser.Denoiser:
        return denoiser.compiled(network) if settings.compile else network

    network = actor = compiled(model)
    if settings.rollout_dtype != "float32":
        actor = compiled(denoiser.rounded(model, getattr(torch, settings.rollout_dtype)))
    distributed.shard(model, reference, actor, compute_dtype=settings.compute_dtype)
    return loop.Run(
        settings=settings,
        task=settings.task,
        method=_with_constants(method, settings),
        model=model,
        tok=tok,
        optimizer=make_optimizer(model, settings.optimizer),
        reference=reference,
        network=network,
        actor=actor,
        processes=distributed.processes(),
    )


def prepare(settings: config.Train | config.Pretrain) -> None:
    """Threads and the precision of float32 products, for the whole process.

    ``threads`` 0 leaves the number as it is. Raises ValueError for a device that is not there.
    """
    check_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.set_float32_matmul_precision(settings.matmul_precision)


def check_device(device: str) -> None:
    """ValueError for a device that is not there."""
    try:
        torch.empty(0, device=device).tolist()  # meta has no numbers
    except (RuntimeError, AssertionError):
        allowed = "cpu, and cuda where torch finds a GPU"
        raise ValueError(f"device: got {device!r}; allowed {allowed}") from None


def load_policy(settings: config.Train, method: Method) -> tuple[Any, Any, Any]:
    """(network to train, tokenizer, reference policy or None).

    With adapters the reference is the same network with its adapters off; otherwise it is a second
    copy. A method that compares with none has none.
    """
    lora = settings.lora
    how, dtype = (settings.model, settings.device), checkpoints.dtype_of(settings.dtype)
    model, tok = checkpoints.load(*how, dtype, quantize=settings.quantize)
    if adapters.has_adapters(model):
        allowed = "a base (--resume continues a run)"
        raise ValueError(f"model: got {settings.model!r}, which holds adapters; allowed {allowed}")
    if lora.rank:
        words = dataclasses.asdict(lora)
        adapters.add_adapters(model, **words, seed=settings.seed, base=settings.model)
    if settings.gradient_checkpointing:
        denoiser.checkpoint_activations(model)
    if not method.has_reference:
        return model, tok, None
    if lora.rank:
        return model, tok, denoiser.without_adapters(model)
    return model, tok, checkpoints.load(*how, next(model.parameters()).dtype)[0]


def _check_fits(model: denoiser.Denoiser, tok: Any, settings: config.Train) -> None:
    """ValueError where prompts, positions or attention of the run do not fit the network."""
    width, length = settings.task.prompt_length, settings.sampler.length
    if problems := getattr(settings.task, "from_files", list)():  # all that the run may ask
        check_lengths(tok, problems, width, settings.task.prompt_format)
    if (asked := settings.task.prompt_format) != "plain":  # what it refuses, it refuses here
        encode_prompts(tok, settings.task.held_out(1), width, prompt_format=asked)
    else:
        sampler.check_positions(getattr(model, "model", None), width, length)
    sampler.check_attention(model, settings.sampler)


def _with_constants(method: Method, settings: config.Train) -> Method:
    """The method; where its plan has a control variate (2.12), with the constants of the base."""
    if "constants" not in method.plan.keywords:
        return method
    found = checkpoints.control_variate(settings.model, settings.sampler.order)
    if found is None:  # the plan is unbiased without them
        path = Path(settings.model) / checkpoints.CONSTANTS
        log.warning(f"no control variate: {path} has none for {settings.sampler.order} order")
    return dataclasses.replace(method, plan=partial(method.plan, constants=found))


def make_optimizer(
    model: nn.Module, settings: config.Optimizer, fused: bool | None = None
) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained: all of them, or the adapters.

    ``fused``: in one kernel, which is faster for large networks and rounds differently.

    Its moments are there from the start, so that the first step needs as much memory as any other.
    """
    parameters = [p for _, p in denoiser.trained(model)]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=fused,
    )
    moments = ("exp_avg", "exp_avg_sq")
    zeros = [{key: torch.zeros_like(p) for key in moments} for p in parameters]
    slots = {i: {"step": torch.tensor(0.0)} | slot for i, slot in enumerate(zeros)}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": slots})
    return optimizer
