"""Does everything work with these weights? ``python -m minidrl verify PATH``: five checks.

Each says one line and a number:

    load      every weight of the files, and no other
    loss      of hidden tokens of a text: far below ln V, where a network that was left at its
              initialisation is
    answer    to a question whose answer is known, greedily, through the checkpoint's chat template
              where it has one
    reload    the checkpoint written under its own names holds what is in memory, to the bit
    step      one RL step with adapters by the loop: rollout, scoring, two updates; and the memory
              that it took on a GPU, beside what memory.py predicts

A checkpoint with random weights must fail at loss and answer: telling it from a trained one is what
these two are for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minidrl import denoiser, loop, sampler
from minidrl.denoiser import Denoiser
from minidrl.run import checkpoints, config, memory, train
from minidrl.run.launch import one_line
from minidrl.tasks import DEFAULT, TASKS, Example, Task, Verdict, task_class
from minidrl.tasks.text import chats, decode, encode_prompts, end_ids

SENTENCE = (
    "The capital of France is Paris, the capital of Italy is Rome, "
    "and the capital of Spain is Madrid."
)
QUESTIONS = {
    "chat": Example("What is 2+2?", "4", SENTENCE, before="", length=32),
    # For a base model, to be continued.
    "words": Example("1+1=2, 1+2=3, 2+2=", "4", SENTENCE, before="", length=32),
}


FAULTS = (ValueError, OSError, RuntimeError, FloatingPointError)


@dataclass(frozen=True)
class Check:
    """What was found: ``status`` is ok or FAILED."""

    name: str
    status: str
    said: str

    def __str__(self) -> str:
        return f"{self.status:<8}{self.name:<10}{self.said}"


def verify(source: str, device: str = "cpu", dtype: str = "stored") -> Iterator[Check]:
    """The checks of a checkpoint, a folder or the name of a model on the Hub, each when it is done;
    only the first if no network loads.

    There is never more than one network in memory. The checkpoint is written for a moment into the
    system's temporary folder (16 GB for LLaDA-8B; TMPDIR names another). Raises ValueError for
    what is no checkpoint.
    """
    checkpoints.describe(source)
    started = time.perf_counter()
    try:
        model, tok = checkpoints.load(source, device, checkpoints.dtype_of(dtype))
    except FAULTS as error:
        yield Check("load", "FAILED", one_line(error))
        return
    yield Check("load", "ok", f"{_size(model)}, {time.perf_counter() - started:.1f} s")
    task = _task_of(tok)
    question = task.example() if task else QUESTIONS["chat" if tok.chat_template else "words"]
    how = {"model": str(source), "dtype": dtype, "device": device}
    settings = _settings(model, tok, task, question.length, **how)
    yield _checked("loss", lambda: _loss(model, tok, question))
    yield _checked("answer", lambda: _answer(model, tok, question))
    yield _checked("reload", lambda: _reload(model, tok))
    del model  # the step loads one of its own, and a GPU may not hold two
    yield _checked("step", lambda: _step(settings))


def _checked(name: str, call: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", call())
    except FAULTS as error:
        return Check(name, "FAILED", one_line(error))


# ----------------------------------------------------------------------------------------- settings
def _settings(
    network: Denoiser, tok: Any, task: Task | None, length: int, **how: str
) -> config.Train:
    """A small RL step with adapters; method, rate, order and temperature as published for GDPO."""
    blocks = _blocks(network, length)
    words = {"order": "low_confidence", "temperature": 0.9, **blocks}
    layers = network.model.model.layers.named_modules()
    linear = sorted({name.split(".")[-1] for name, x in layers if isinstance(x, torch.nn.Linear)})
    task = task or task_class(DEFAULT)()
    if tok.chat_template is not None:
        longest, _ = encode_prompts(tok, task.held_out(64), 2**20, prompt_format="chat")
        width = longest.shape[1] + 16  # other problems may be longer
        task = dataclasses.replace(task, prompt_format="chat", max_prompt_length=width)
    return config.Train(
        **how,
        lora=config.Lora(rank=8, alpha=16.0, target_modules=linear),
        gradient_checkpointing=True,
        sampler=sampler.Sampler(tokens_per_step=2 - blocks["block_length"] % 2, **words),
        task=task,
        method="gdpo-sequence",
        num_prompts=2,
        num_generations=4,
        num_iterations=2,
        micro_batch=4,
        optimizer=config.Optimizer(learning_rate=3e-7),
    )


def _blocks(model: Denoiser, length: int) -> dict[str, Any]:
    own = model.block_length
    if own is None:
        return {"length": length, "block_length": length, "attention": "bidirectional"}
    whole = own * math.ceil(length / own)
    return {"length": whole, "block_length": own, "attention": "block_causal"}


def _task_of(tok: Any) -> Task | None:
    """The task whose own alphabet the tokenizer has: a network that was trained on nothing else."""
    made = [task_class(name)() for name in TASKS]
    own = [task for task in made if hasattr(task, "tokenizer")]
    return next((task for task in own if task.tokenizer().get_vocab() == tok.get_vocab()), None)


# ------------------------------------------------------------------------------------------- checks
def _size(model: Denoiser) -> str:
    kind, stored = type(model.model).__name__, str(model.model.dtype).removeprefix("torch.")
    return f"{model.num_parameters():,} weights, {stored}, as {kind} on {model.device}"


def _loss(model: Denoiser, tok: Any, question: Example) -> str:
    loss = denoiser.probe_loss(model, tok, question.text, question.before)
    uniform = math.log(model.vocab_size)
    return f"{loss:.3f} nats a hidden token; ln V is {uniform:.2f}, allowed below half of it"


def _answer(model: Denoiser, tok: Any, question: Example) -> str:
    text = question.prompt
    if tok.chat_template is not None:
        (text,) = chats(tok, [text])
    batch = tok([text], add_special_tokens=False, return_tensors="pt").to(model.device)
    how = {"order": "low_confidence", "temperature": 0.0, "tokens_per_step": 1}
    greedy = sampler.Sampler(**how, **_blocks(model, question.length))
    words = {"eos_token_id": end_ids(tok), "generator": None}
    made = sampler.generate(model, batch.input_ids, batch.attention_mask.bool(), greedy, **words)
    reply = decode(tok, made.response)[0]
    if not re.search(rf"(?<!\w){re.escape(question.answer)}(?!\w)", reply):
        raise ValueError(f"{question.prompt!r} -> {reply!r}, which lacks {question.answer!r}")
    return f"{question.prompt!r} -> {reply!r}, with {question.answer!r}"


def _reload(model: Denoiser, tok: Any) -> str:
    with tempfile.TemporaryDirectory() as place:
        checkpoints.save(model, tok, folder := Path(place))
        files, own = model.files.items(), model.model
        changed = [name for name, x in files if (folder / name).read_bytes() != x]
        if checkpoints.load_tokenizer(folder).get_vocab() != tok.get_vocab():
            changed.append("the tokenizer")
        count, size = 0, 0
        left = own.state_dict().keys() - checkpoints.not_stored(own)
        for path in checkpoints.shards(folder):
            names, wrong = checkpoints.compared(own, path, model.family, whole=True)
            changed, left = changed + wrong, left - names
            count, size = count + len(names), size + path.stat().st_size
        if changed or left:
            named = ", ".join([*changed, *sorted(left)][:3])
            raise ValueError(f"{len(changed)} came back different, {len(left)} not at all: {named}")
        return f"{count} tensors, {size / 1e9:.3f} GB written, equal to the bit"


class _Spread:
    """A task whose rewards differ within a group: where all fail, there would be no gradient."""

    def __init__(self, task: Task):
        self.task, self.count = task, itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def judge(self, problem: Any, response: str) -> Verdict:
        """The task's own verdict, and a made-up part of the reward."""
        verdict = self.task.judge(problem, response)
        return verdict._replace(reward=verdict.reward + next(self.count) / 7)


def _step(settings: config.Train) -> str:
    if torch.device(settings.device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(settings.device)
    started, run = time.perf_counter(), train.start(settings)
    run.task = _Spread(run.task)
    before = {name: p.detach().clone() for name, p in denoiser.trained(run.model)}
    row = loop.take_step(run, 0)
    same = [name for name, p in denoiser.trained(run.model) if torch.equal(p, before[name])]
    # A moves from the second update on, and only if that is not clipped.
    stuck = [name for name in same if ".lora_B." in name]
    norm = f"gradient norm {row['grad_norm']:.3g}"
    if stuck or not row["grad_norm"] > 0:
        raise ValueError(f"{norm}; {len(stuck)} adapters did not move: {', '.join(stuck[:2])}")
    moved = f"{settings.num_iterations} updates: {norm}, {len(before) // 2} adapters moved"
    took = f"{time.perf_counter() - started:.1f} s with loading"
    return f"{settings.method}, {moved}, {took}; memory {memory.compared(settings)}"
