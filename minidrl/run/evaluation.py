"""Evaluation with its protocol: what was asked, how it was decoded, what was answered.

    protocol   what decides a number beside the weights: problems, prompts, length, steps, order,
               cache, temperature, seed. Two results whose protocols are equal can be compared
    made_by    version, commit, libraries, device, weights: named, and allowed to differ
    rows       a line for each response: solved, reward, marks, tokens generated, text

A response does not depend on the batch in which it was made. Prompts are padded to the width of
the whole set, and noise is drawn for the whole set and sliced, so that any batch, and an evaluation
that was stopped and goes on, sees what one batch of all would have seen. What is left is the
rounding of products of other shapes, which can turn a tie.

While an evaluation runs, its rows stand in OUT.LENGTH.rows, one line each; the same command goes on
from there. The result is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

import minidrl
from minidrl import sampler
from minidrl.keyed import keyed_generator
from minidrl.run import files, intervals, untrusted
from minidrl.run.untrusted import Kind
from minidrl.sampler import Sampler, check_positions
from minidrl.tasks import Problem, Task, held_out
from minidrl.tasks.text import decode, encode_prompts

LIBRARIES = ("torch", "transformers", "math-verify", "datasets")
MOST_BYTES = 2**30  # of a result file
_ROW = {
    "problem": untrusted.whole(0, untrusted.WHOLE),
    "sample": untrusted.whole(0, untrusted.WHOLE),
}
_ROW |= {"solved": untrusted.FLAG, "tokens": untrusted.whole(0, untrusted.WHOLE)}
_KEPT = _ROW | {"reward": untrusted.NUMBER, "calls": untrusted.whole(0, untrusted.WHOLE)}
_KEPT |= {"text": Kind(lambda x: isinstance(x, str), "text")}
_RESULT = ("solved", "low", "high", "n", "tokens", "calls")  # columns that no mark may have
_MARK = Kind(lambda x: re.fullmatch("[a-z_]{1,40}", x) and x not in _RESULT, "names of marks")
_KEPT |= {"marks": untrusted.mapping_to(untrusted.SHARE, _MARK)}

Row = dict[str, Any]


# ------------------------------------------------------------------------------------ what is asked
def with_length(settings: Sampler, length: int) -> Sampler:
    """The sampler at another length; where a response was one block, it is one again."""
    block = length if settings.block_length == settings.length else settings.block_length
    return dataclasses.replace(settings, length=length, block_length=block)


def protocol(
    task: Task,
    problems: Sequence[Problem],
    prompt: Tensor,
    mask: Tensor,
    settings: Sampler,
    *,
    skip: int,
    seed: int,
    samples: int,
) -> dict[str, Any]:
    """All that decides the numbers beside the weights, as plain data.

    ``problems`` and ``prompts`` are hashes: of the problems with what their answers are judged by,
    and of the token ids that the model is given, padding left out, which cover template,
    tokenizer, wording and few-shot examples.
    """
    asked = [ids[kept].tolist() for ids, kept in zip(prompt, mask, strict=True)]
    return {
        "task": task.name,
        "n": len(problems),
        "skip": skip,
        "samples": samples,
        "shots": getattr(task, "shots", 0),
        "prompt_format": task.prompt_format,
        "problems": _hash([repr(problem) for problem in problems]),
        "prompts": _hash(asked),
        "prompt_width": prompt.shape[1],
        "length": settings.length,
        "steps": settings.num_steps,
        "tokens_per_step": settings.tokens_per_step,
        "block_length": settings.block_length,
        "order": settings.order,
        "temperature": float(settings.temperature),
        "attention": settings.attention,
        "cache": settings.cache,
        "seed": seed,
    }


def made_by(name: str, model: Any) -> dict[str, Any]:
    """Who computed it: beside the weights, nothing of this may change a number but by rounding."""
    return {
        "model": name,
        "weights": weights_mark(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": torch.device(model.device).type,
        "minidrl": minidrl.__version__,
        "commit": _commit(),
        **{library: _version(library) for library in LIBRARIES},
    }


def weights_mark(model: Any) -> str:
    """A hash of name, shape and up to 64 numbers, evenly spaced, of every parameter."""
    found = []
    for name, value in sorted(model.named_parameters()):
        flat = value.detach().flatten()
        some = flat[:: max(1, -(-flat.numel() // 64))].to("cpu", torch.float64)
        found.append([name, list(value.shape), some.tolist()])
    return _hash(found)


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    # Of the repository that this package stands in; with a + where its files differ from it.
    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # another's repository, in which an environment happens to lie
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


# --------------------------------------------------------------------------------- what is answered
@torch.no_grad()
def evaluate(
    model: Any,
    tok: Any,
    task: Task,
    settings: Sampler,
    *,
    n: int,
    skip: int = 0,
    seed: int = 0,
    samples: int = 1,
    batch: int = 128,
    name: str = "",
    out: Path | None = None,
) -> dict[str, Any]:
    """``n`` held-out problems after the first ``skip``, ``samples`` responses to each.

    Returns protocol, made_by, result and rows. ``batch``: responses at a time; ``out``: where the
    result will stand, beside which the rows are kept while they are made. Raises ValueError where
    the model has fewer positions than prompt and response, and where the rows that are kept are of
    another protocol or other weights.
    """
    model.eval()
    problems = held_out(task, n, skip)
    where = (task.prompt_length, model.device, task.prompt_format)
    prompt, mask = encode_prompts(tok, problems, *where)
    check_positions(model.model, prompt.shape[1], settings.length)
    how = protocol(task, problems, prompt, mask, settings, skip=skip, seed=seed, samples=samples)
    made = made_by(name, model)
    kept = Kept(out and out.with_name(f"{out.name}.{settings.length}.rows"), how, made["weights"])
    missing = [i for i in range(n * samples) if (i // samples, i % samples) not in kept.rows]
    words = {"total": n * samples, "initial": len(kept.rows), "desc": f"length {how['length']}"}
    with tqdm(**words, disable=None) as bar:  # in a terminal only
        for first in range(0, len(missing), batch):
            started, chosen = time.perf_counter(), missing[first : first + batch]
            rollout = sampler.generate(
                model,
                prompt,
                mask,
                settings,
                eos_token_id=tok.eos_token_id,
                num_generations=samples,
                generator=keyed_generator(seed, 0, "evaluate"),
                rows=torch.tensor(chosen, device=prompt.device),
            )
            made_here = _rows(tok, task, problems, rollout, chosen, samples)
            kept.add(made_here, time.perf_counter() - started)
            bar.update(len(chosen))
    rows = [kept.rows[key] for key in sorted(kept.rows)]
    result = scores(rows, n, samples) | {"seconds": round(kept.seconds, 3)}
    return {"protocol": how, "made_by": made, "result": result, "rows": rows}


def _rows(
    tok: Any, task: Task, problems: Sequence[Problem], rollout: Any, chosen: list[int], samples: int
) -> list[Row]:
    texts, steps = decode(tok, rollout.response[chosen]), sampler.steps_run(rollout.unmask_step)
    found = []
    for i, text in zip(chosen, texts, strict=True):
        verdict = task.judge(problems[i // samples], text)
        marks = {mark: float(value) for mark, value in verdict.marks.items()}
        found.append(
            {
                "problem": i // samples,
                "sample": i % samples,
                "solved": bool(verdict.solved),
                "reward": float(verdict.reward),
                "marks": marks,
                "tokens": int(rollout.keep[i].sum()),
                "calls": int(steps[i]),
                "text": text,
            }
        )
    return found


def scores(rows: Sequence[Row], n: int, samples: int) -> dict[str, Any]:
    """Shares, the interval of the share solved, and what was generated.

    ``low`` and ``high``: Wilson's 95 % interval over the problems; with more than one sample of
    each, Student's over the problems' own shares. ``tokens``: generated ones up to and with the
    first end token; the prompt's are never counted.
    """
    solved = shares(rows, n)
    result: dict[str, Any] = {"solved": statistics.fmean(solved)}
    for mark in rows[0]["marks"]:
        result[mark] = statistics.fmean(row["marks"][mark] for row in rows)
    if samples == 1:
        interval = intervals.wilson(sum(row["solved"] for row in rows), n)
    else:
        interval = intervals.mean_interval(solved) if n > 1 else (0.0, 0.0, 1.0)
        result[f"pass@{samples}"] = statistics.fmean(share > 0 for share in solved)
    result |= {"low": max(0.0, interval[1]), "high": min(1.0, interval[2]), "n": n}
    return result | {key: sum(row[key] for row in rows) for key in ("tokens", "calls")}


def shares(rows: Sequence[Row], n: int) -> list[float]:
    """Of each problem the share of its responses that solve it."""
    solved: list[list[bool]] = [[] for _ in range(n)]
    for row in rows:
        solved[row["problem"]].append(row["solved"])
    return [statistics.fmean(each) for each in solved]


# --------------------------------------------------------------------- the rows while they are made
class Kept:
    """Rows that have been made: in memory, and in a file if there is one, below a header.

    The header holds the protocol and the mark of the weights; an unfinished last line, of a process
    that was ended, is not read and is written over.
    """

    def __init__(self, path: Path | None, how: dict[str, Any], weights: str):
        self.path, self.how, self.rows, self.seconds = path, how, {}, 0.0
        header = {"protocol": how, "weights": weights}
        if path is None:
            return
        if not path.exists():
            files.write(path, json.dumps(header) + "\n")
            return
        text = untrusted.decoded(path)
        if "\n" not in text:
            allowed = "another --out, or remove that file"
            raise ValueError(f"{path} line 1: got no header; allowed {allowed}")
        first, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1]
        self._check(untrusted.parsed_json(first, f"{path} line 1"), header)
        if not text.endswith("\n"):
            files.write(path, "\n".join([first, *lines]) + "\n")
        for number, line in enumerate(lines, 2):
            where = f"{path} line {number}"
            self._read(untrusted.parsed_json(line, where), where)

    def _check(self, stored: Any, header: dict[str, Any]) -> None:
        if stored == header:
            return
        stored = stored.get("protocol") if isinstance(stored, dict) else {}
        stored = stored if isinstance(stored, dict) else {}
        named = differing(stored, header["protocol"]) or ["weights"]
        got = f"{str(self.path)!r}, an evaluation that differs in {', '.join(named)}"
        raise ValueError(f"out: got {got}; allowed another --out, or remove that file")

    def _read(self, line: Any, where: str) -> None:
        """A line of the file, which a stranger may have written."""
        known = isinstance(line, dict) and isinstance(line.get("rows"), list)
        if not known or not untrusted.FROM_0.good(line.get("seconds")):
            raise ValueError(f"{where}: got {untrusted.brief(line)}; allowed rows and seconds")
        for row in line["rows"]:
            if not self._fits(row):
                got = f"{where}: got the row {untrusted.brief(row)}"
                raise ValueError(f"{got}; allowed those of this evaluation, each once")
            self._take([row])
        self.seconds += line["seconds"]

    def _fits(self, row: Any) -> bool:
        if not isinstance(row, dict) or not all(k.good(row.get(n)) for n, k in _KEPT.items()):
            return False
        place, others = (row["problem"], row["sample"]), next(iter(self.rows.values()), row)
        inside = place[0] < self.how["n"] and place[1] < self.how["samples"]
        return inside and place not in self.rows and row["marks"].keys() == others["marks"].keys()

    def _take(self, rows: list[Row]) -> None:
        self.rows |= {(row["problem"], row["sample"]): row for row in rows}

    def add(self, rows: list[Row], seconds: float) -> None:
        """The rows of a batch; ValueError where those of the file have other marks."""
        known, own = next(iter(self.rows.values()), rows[0])["marks"], rows[0]["marks"]
        if known.keys() != own.keys():
            got = f"{self.path}: got rows with the marks {list(known)}"
            raise ValueError(f"{got}; allowed {list(own)}, or another --out")
        if self.path is not None:
            files.append(self.path, json.dumps({"rows": rows, "seconds": seconds}))
        self._take(rows)
        self.seconds += seconds


# ------------------------------------------------------------------------------------- result files
@contextlib.contextmanager
def opened(out: Path | None) -> Iterator[None]:
    """Inside, no other process writes to ``out``; ValueError where a result is there already."""
    if out is None:
        yield
        return
    files.check_writable(out)  # or all is made before it is refused
    lock = FileLock(f"{out}.lock")
    files.acquire(lock, "out", out)
    own = not Path(lock.lock_file).stat().st_size  # else it is somebody's, and stays
    try:
        if out.exists():
            got = f"{str(out)!r}, which is there already"
            raise ValueError(f"out: got {got}; allowed another --out")
        yield
    finally:
        lock.release()
        if own:
            Path(lock.lock_file).unlink(missing_ok=True)


def write(out: Path, found: Sequence[dict[str, Any]]) -> None:
    """The result file, in place of the rows that were kept beside it."""
    files.write(out, json.dumps({"evaluations": list(found)}, indent=1) + "\n")
    for evaluation in found:
        length = evaluation["protocol"]["length"]
        out.with_name(f"{out.name}.{length}.rows").unlink(missing_ok=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The evaluations in a result file; ValueError where it is none."""
    allowed = "a file that evaluate --out has written"
    if not path.is_file():
        raise ValueError(f"compare: got {str(path)!r}, which is no file; allowed {allowed}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes; allowed up to {MOST_BYTES}")
    data = untrusted.parsed_json(untrusted.decoded(path), str(path))
    found = data.get("evaluations") if isinstance(data, dict) else None
    if not isinstance(found, list) or not found or not all(map(_is_evaluation, found)):
        got = f"{str(path)!r}, which holds no evaluation"
        raise ValueError(f"compare: got {got}; allowed {allowed}")
    return found


def _is_evaluation(data: Any) -> bool:
    parts = {"protocol": dict, "made_by": dict, "result": dict, "rows": list}
    if not isinstance(data, dict) or not all(isinstance(data.get(k), parts[k]) for k in parts):
        return False
    how, rows = data["protocol"], data["rows"]
    n, samples, count = how.get("n"), how.get("samples"), untrusted.whole(1, untrusted.WHOLE)
    if how.get("length") is not None and not count.good(how["length"]):
        return False
    if not count.good(n) or not count.good(samples) or len(rows) != n * samples:
        return False
    if not all(isinstance(row, dict) for row in rows):
        return False
    kinds = all(kind.good(row.get(key)) for row in rows for key, kind in _ROW.items())
    # As many different ones as there are places for.
    inside = kinds and all(row["problem"] < n and row["sample"] < samples for row in rows)
    if not inside or len({(row["problem"], row["sample"]) for row in rows}) < len(rows):
        return False
    told, found = data["result"].get("solved"), statistics.fmean(shares(rows, n))
    return untrusted.SHARE.good(told) and math.isclose(told, found, abs_tol=1e-9)


# --------------------------------------------------------------------------------------- comparison
def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys whose values are not equal, or that one of the two lacks."""
    keys = dict.fromkeys([*a, *b])
    return [key for key in keys if key not in a or key not in b or a[key] != b[key]]


def compare(a: Path, b: Path) -> str:
    """The paired difference of two result files, a line for each length that both have.

    ValueError, one line with the keys that differ, where the protocols of two are not equal.
    """
    first, second = ({e["protocol"].get("length"): e for e in read(path)} for path in (a, b))
    lengths = [length for length in first if length in second]
    if not lengths and len(first) == len(second) == 1:
        lengths = [None]
        first, second = {None: next(iter(first.values()))}, {None: next(iter(second.values()))}
    if not lengths:
        got = f"{a} with lengths {_list(first)}, {b} with {_list(second)}"
        raise ValueError(f"compare: got {got}; allowed results with a length in common")
    return "\n".join(_compared(first[length], second[length], (a, b)) for length in lengths)


def _list(found: dict) -> str:
    return ", ".join(map(str, found))


def _compared(a: dict, b: dict, names: tuple[Path, Path]) -> str:
    if keys := differing(a["protocol"], b["protocol"]):
        values = {key: [untrusted.brief(e["protocol"].get(key)) for e in (a, b)] for key in keys}
        told = (f"{key} ({one[:20]}, {other[:20]})" for key, (one, other) in values.items())
        got = f"{names[0]} and {names[1]}, which differ in {', '.join(told)}"
        raise ValueError(f"compare: not comparable: got {got}; allowed results of one protocol")
    n = a["protocol"]["n"]
    one, other = (shares(e["rows"], n) for e in (a, b))
    said = f"length {a['protocol'].get('length')}: "
    said += f"{statistics.fmean(one):.1%} and {statistics.fmean(other):.1%}"
    if n > 1:
        gap = intervals.paired(other, one)
        mean, low, high = (100 * x for x in (gap.mean, gap.low, gap.high))
        points = f"{mean:+.1f} points, 95 % interval [{low:.1f}, {high:.1f}]"
        said += f"; second less first {points}, p = {gap.p:.3g}"
    more = sum(x > y for x, y in zip(one, other, strict=True))
    less = sum(x < y for x, y in zip(one, other, strict=True))
    said += f"; of {n} problems the first solves {more} more often, the second {less}"
    others = differing(a["made_by"], b["made_by"])
    return said + (f"; made by another {', '.join(others)}" if others else "; made by the same")
