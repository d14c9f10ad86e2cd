"""Does everything work with these weights? ``python -m minidrl verify PATH``: seven checks.

Each says one line and a number:

    load      every weight of the files, and no other
    loss      of hidden tokens of a text: far below ln V, where a network that was left at its
              initialisation is
    answer    to a question whose answer is known, greedily, through the checkpoint's chat template
              where it has one
    reload    the checkpoint written under its own names, and every tensor of its files compared
              with the network: none missing, none extra, equal to the bit
    step      one RL step with adapters by the trainer: rollout, scoring, two updates
    memory    the peak that minidrl/run/memory.py predicts for that step, and the one that the GPU
              counted; on a CPU what the process grew by, without a verdict: it counts pages
    adapters  as trained, written in peft's format and read again on their base: equal to the bit

There is never more than one network in memory.

A checkpoint with random weights must fail at loss and answer: telling it from a trained one is what
these two are for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minidrl import denoiser, loop, sampler
from minidrl.denoiser import Denoiser
from minidrl.run import checkpoints, config, memory, train
from minidrl.run.launch import RunError, one_line
from minidrl.tasks import DEFAULT, TASKS, Example, Task, Verdict, task_class
from minidrl.tasks.text import chats, decode, encode_prompts

TOLERANCE = 0.15  # of a predicted peak
LIBRARIES = 100e6  # bytes that GPU libraries keep for themselves
SHORTEST = 8  # tokens of a text whose loss says something
SENTENCE = (
    "The capital of France is Paris, the capital of Italy is Rome, "
    "and the capital of Spain is Madrid."
)
QUESTIONS = {
    "chat": Example("What is 2+2?", "4", SENTENCE, before="", length=32),
    # For a base model, to be continued.
    "words": Example("1+1=2, 1+2=3, 2+2=", "4", SENTENCE, before="", length=32),
}


@dataclass(frozen=True)
class Check:
    """What was found: ``status`` is ok, FAILED, or n/a for what cannot be asked here."""

    name: str
    status: str
    said: str

    def __str__(self) -> str:
        return f"{self.status:<8}{self.name:<10}{self.said}"


class Failed(Exception):
    """A check that ran, and whose number is wrong."""


class NotApplicable(Exception):
    """A check that cannot be asked here."""


def verify(
    source: str,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    text: str | None = None,
    device: str = "cpu",
    dtype: str = "stored",
    out: str | None = None,
) -> Iterator[Check]:
    """The checks of a checkpoint, each when it is done; only the first if no network loads.

    source         a folder, or the name of a model on the Hub
    prompt, answer, text
                   instead of those of ``QUESTIONS``; a prompt comes with its answer, which must
                   occur as a whole word
    out            where the checkpoint is written for a moment (16 GB for LLaDA-8B); None: the
                   system's temporary folder

    Raises ValueError for what is no checkpoint, for options that are not allowed, and for a text of
    less than 8 tokens.
    """
    checkpoints.describe(source)
    settings = _settings(source, device, dtype)
    train.prepare(settings)
    if (prompt is None) != (answer is None) or answer == "":
        got = f"{answer!r} with prompt {prompt!r}"
        allowed = "both or none, and a word that is not empty"
        raise ValueError(f"answer: got {got}; allowed {allowed}")
    if out is not None and not _takes_files(Path(out)):
        raise ValueError(f"out: got {out!r}; allowed a folder that can be written to")
    made: dict[str, Any] = {}
    yield _checked("load", lambda: _load(settings, made))
    if "model" not in made:
        return
    model, tok = made.pop("model"), made["tok"]
    question = _question(tok, prompt, answer, text)
    settings = _fitted(settings, model, tok, question)
    yield _checked("loss", lambda: _loss(model, tok, question))
    yield _checked("answer", lambda: _answer(model, tok, question))
    yield _checked("reload", lambda: _reload(model, tok, out))
    del model  # the trainer loads one of its own, and a GPU may not hold two
    yield _checked("step", lambda: _step(settings, made))
    yield _checked("memory", lambda: _memory(settings, made))
    yield _checked("adapters", lambda: _adapters(made, out))


def _checked(name: str, call: Callable[[], str]) -> Check:
    # A user's machine and files can do all of these; anything else is a mistake of the program,
    # and is raised.
    refused = (Failed, RunError, ValueError, OSError, RuntimeError, SafetensorError)
    try:
        return Check(name, "ok", call())
    except NotApplicable as reason:
        return Check(name, "n/a", one_line(reason))
    except (*refused, FloatingPointError) as error:
        return Check(name, "FAILED", one_line(error))


# ----------------------------------------------------------------------------------------- settings
def _settings(source: str, device: str, dtype: str) -> config.Train:
    """A small RL step with adapters; method, rate, order and temperature as published."""
    decoding = sampler.Sampler(
        order="low_confidence", temperature=0.9, length=32, block_length=32, tokens_per_step=2
    )
    return config.Train(
        model=str(source),
        dtype=dtype,
        device=device,
        lora=config.Lora(rank=8, alpha=16.0),
        gradient_checkpointing=True,
        sampler=decoding,
        method="gdpo",
        num_prompts=2,
        num_generations=4,
        num_iterations=2,
        micro_batch=4,
        optimizer=config.Optimizer(learning_rate=3e-7),
    )


def _fitted(settings: config.Train, model: Denoiser, tok: Any, question: Example) -> config.Train:
    """The step for this network's attention and tokenizer."""
    words = vars(settings.sampler) | _blocks(model, question.length)
    words["tokens_per_step"] = 2 - words["block_length"] % 2
    task = _task_of(tok) or task_class(DEFAULT)()
    if tok.chat_template is not None:
        longest, _ = encode_prompts(tok, task.held_out(64), 2**20, prompt_format="chat")
        width = longest.shape[1] + 16  # other problems may be longer
        task = dataclasses.replace(task, prompt_format="chat", max_prompt_length=width)
    changed = vars(settings) | {"sampler": sampler.Sampler(**words), "task": task}
    return config.Train(**changed)


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


def _question(tok: Any, prompt: str | None, answer: str | None, text: str | None) -> Example:
    known = QUESTIONS["chat" if tok.chat_template is not None else "words"]
    if (task := _task_of(tok)) is not None:
        known = task.example()
    given = {"prompt": prompt, "answer": answer, "text": text}
    asked = known._replace(**{key: value for key, value in given.items() if value})
    if text:
        asked = asked._replace(before="")
    count = len(tok(asked.text, add_special_tokens=False).input_ids)
    if count < SHORTEST:
        raise ValueError(f"text: got {asked.text!r}, {count} tokens; allowed from {SHORTEST}")
    return asked


# ------------------------------------------------------------------------------------------- checks
def _load(settings: config.Train, made: dict) -> str:
    started = time.perf_counter()
    dtype = None if settings.dtype == "stored" else getattr(torch, settings.dtype)
    made["model"], made["tok"] = checkpoints.load(settings.model, settings.device, dtype)
    model, seconds = made["model"], time.perf_counter() - started
    kind, stored = type(model.model).__name__, str(model.model.dtype).removeprefix("torch.")
    weights = f"{model.num_parameters():,} weights, {stored}"
    return f"{weights}, as {kind} on {model.device}, {seconds:.1f} s"


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
    words = {"eos_token_id": tok.eos_token_id, "generator": None}
    made = sampler.generate(model, batch.input_ids, batch.attention_mask.bool(), greedy, **words)
    reply = decode(tok, made.response)[0]
    if not re.search(rf"(?<!\w){re.escape(question.answer)}(?!\w)", reply):
        raise Failed(f"{question.prompt!r} -> {reply!r}, which lacks {question.answer!r}")
    size = model.block_length or 1
    said = f"{question.prompt!r} -> {reply!r}, with {question.answer!r}"
    if over := batch.input_ids.shape[1] % size:
        said += f"; of the prompt's blocks of {size} the first has {over} tokens"
    return said


def _reload(model: Denoiser, tok: Any, out: str | None) -> str:
    with _folder(out, _bytes(model.named_parameters())) as folder:
        checkpoints.save(model, tok, folder)
        _refuse(differing(model, folder))
        _refuse_files(model, tok, folder)
        return _equal(len(model.state_dict()), folder)


def _refuse_files(model: Denoiser, tok: Any, folder: Path) -> None:
    """Raises Failed unless the files beside the weights say what those that were loaded said."""
    files = model.files.items()
    changed = [name for name, content in files if (folder / name).read_bytes() != content]
    if changed:
        raise Failed(f"{', '.join(changed)} changed")
    # Read again, by what loads them: a format of minidrl's own has no files to compare.
    shape, family, _ = checkpoints.describe(folder)
    with torch.device("meta"):
        made = family.network(shape).state_dict()
    sizes = {name: p.shape for name, p in model.model.state_dict().items()}
    if {name: p.shape for name, p in made.items()} != sizes:
        raise Failed("config.json describes another network")
    if checkpoints.load_tokenizer(folder).get_vocab() != tok.get_vocab():
        raise Failed("the tokenizer came back different")


def _bytes(named: Iterable[tuple[str, Tensor]]) -> int:
    return sum(p.numel() * p.element_size() for _, p in named)


class _Spread:
    """A task whose rewards differ within a group: where all fail, there would be no gradient."""

    def __init__(self, task: Task):
        self.task, self.judged = task, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def judge(self, problem: Any, response: str) -> Verdict:
        """The task's verdict, its reward raised by a made-up part."""
        found, self.judged = self.task.judge(problem, response), self.judged + 1
        return found._replace(reward=found.reward + 0.01 * self.judged)


def _step(settings: config.Train, made: dict) -> str:
    if torch.device(settings.device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(settings.device)
    started, made["resident"] = time.perf_counter(), memory.Resident()
    run = train.start(settings)
    run.task = _Spread(run.task)
    before = {name: p.detach().clone() for name, p in denoiser.trained(run.model)}
    row = loop.take_step(run, 0)
    made["grown"] = made.pop("resident").peak()
    made["run"] = run
    same = [name for name, p in denoiser.trained(run.model) if torch.equal(p, before[name])]
    # A moves from the second update on, and only if that is not clipped.
    stuck = [name for name in same if ".lora_B." in name]
    norm = f"gradient norm {row['grad_norm']:.3g}"
    if stuck or not row["grad_norm"] > 0:
        raise Failed(f"{norm}; {len(stuck)} adapters did not move: {', '.join(stuck[:2])}")
    tokens, seconds = row["completions/tokens"], time.perf_counter() - started
    return (
        f"{settings.method}, {settings.num_iterations} updates: {norm}, {len(before) // 2} "
        f"adapters moved, {tokens} tokens drawn, {seconds:.1f} s with loading"
    )


def _memory(settings: config.Train, made: dict) -> str:
    if "run" not in made:
        raise NotApplicable("there was no step")
    predicted = memory.peak(memory.predicted_memory(settings))
    found = memory.measured(torch.device(settings.device))
    said = f"predicted {predicted / 1e9:.3f} GB at its peak"
    if found is None:
        grown = made["grown"]
        told = "nobody counts" if grown is None else f"the process grew by {grown / 1e9:.3f} GB"
        raise NotApplicable(f"{said}; on a CPU {told}")
    said = f"{said}, measured {found / 1e9:.3f} GB"
    if abs(found - predicted) > TOLERANCE * predicted + LIBRARIES:
        raise Failed(said)
    return said


def _adapters(made: dict, out: str | None) -> str:
    if "run" not in made:
        raise NotApplicable("there was no step")
    run = made.pop("run")
    model, tok, dtype = run.model, run.tok, _dtype(run.model)
    with _folder(out, _bytes(denoiser.trained(model))) as folder:
        checkpoints.save(model, tok, folder)
        before = marks(model)
        del run, model  # the one that is read brings its base with it
        after = marks(checkpoints.load(folder, "cpu", dtype)[0])
        changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
        _refuse(sorted((before.keys() ^ after.keys()) | changed))
        return _equal(len(before), folder)


# ---------------------------------------------------------------------------------- save and reload
def _takes_files(folder: Path) -> bool:
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:  # /proc says of itself that it can be written to
        return False


@contextlib.contextmanager
def _folder(out: str | None, size: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=out) as folder:
        free = shutil.disk_usage(folder).free
        if free < 1.05 * size:
            room = f"{size / 1e9:.1f} GB to write, {free / 1e9:.1f} GB free in {folder}"
            raise Failed(f"{room}; --out names another folder")
        yield Path(folder)


def _refuse(different: list[str]) -> None:
    if different:
        raise Failed(f"{len(different)} tensors came back different: {', '.join(different[:3])}")


def _equal(count: int, folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{count} tensors, {size / 1e9:.3f} GB written, equal to the bit"


def _dtype(model: Denoiser) -> torch.dtype:
    """That of the base; adapters are float32 on any."""
    return model.model.get_input_embeddings().weight.dtype


def differing(model: Denoiser, folder: Path) -> list[str]:
    """Names of the tensors in which a network and the weight files of a folder are not the same.

    That is: which only one of them has, which two files have, or which differ in dtype, shape or a
    bit. Of the files one tensor is in memory at a time.
    """
    own, seen, wrong = model.model.state_dict(), set(), []
    for path in checkpoints.shards(folder):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():
                name = checkpoints.own_name(stored, model.family)
                again, known = name in seen, name in own
                if again or not known or not _same(own[name], file.get_tensor(stored)):
                    wrong.append(name)
                seen.add(name)
    if model.model.config.tie_word_embeddings:
        seen.add("lm_head.weight")  # the embedding, which is stored once
    return sorted({*wrong, *(own.keys() - seen)})


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(a: Tensor) -> Tensor:
    # As bytes nan equals nan, and 0 is not -0.
    return a.detach().cpu().contiguous().flatten().view(torch.uint8)


def marks(model: nn.Module) -> dict[str, tuple]:
    """Name -> (dtype, shape, hash of the bits) of each tensor, to compare two networks in turn."""

    def mark(a: Tensor) -> tuple:
        return a.dtype, a.shape, hashlib.sha256(_bits(a).numpy()).hexdigest()

    return {name: mark(value) for name, value in model.state_dict().items()}
