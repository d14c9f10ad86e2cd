"""How much of a task a network solves: the one evaluator, and the file of ``minidrl evaluate``.

``evaluate`` is asked by training, pre-training and studies, and returns shares. ``record`` says
with them what was asked, how it was decoded and what was answered, for a JSON file:

    protocol   what decides a number beside the weights: problems, prompts, length, steps, order,
               cache, temperature, seed. Two results whose protocols are equal can be compared
    made_by    model, weights, versions, device: named, and allowed to differ
    result     the shares, an interval, and what was generated
    rows       for each response: solved, reward, marks, tokens generated, text

A response does not depend on the batch in which it was made: prompts are padded to the width of the
whole set, and noise is drawn for the whole set and sliced. So an evaluation that was stopped goes
on where it was, in any batch. What is left is the rounding of products of other shapes, which can
turn a tie.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

import minidrl
from minidrl import sampler
from minidrl.keyed import keyed_generator
from minidrl.run import distributed, folders
from minidrl.sampler import Sampler, check_positions
from minidrl.tasks import Task, held_out, verdicts
from minidrl.tasks.text import decode, encode_prompts, end_ids

Row = dict[str, Any]
Z = statistics.NormalDist().inv_cdf(0.975)  # of a 95 % interval
AT_A_TIME = 128  # answers, unless told otherwise


# ----------------------------------------------------------------------------------- the evaluator
def evaluate(model: Any, tok: Any, task: Task, settings: Sampler, *, n: int, **how: int) -> dict:
    """Shares of ``n`` held-out problems: solved, and the task's marks.

    ``settings.temperature`` is the policy that is judged; 0 is greedy. ``how``: skip, the first
    problems to leave out; seed; micro_batch; samples: with k > 1 also pass@k, the share of problems
    solved by at least one of k samples.
    """
    asked = _Asked(model, tok, task, settings, n, **how)
    return _shares(asked.responses(range(n * asked.samples)), n)


def evaluate_run(settings: Any, model: Any, tok: Any, **how: int) -> dict:
    """`evaluate` as the settings of a run have it."""
    how |= {"n": settings.evaluate.n, "skip": settings.evaluate.skip}
    decoding = dataclasses.replace(settings.sampler, temperature=settings.evaluate.temperature)
    return evaluate(model, tok, settings.task, decoding, **how)


@dataclass
class _Asked:
    """An evaluation, with its problems, and prompts as wide as the longest of all."""

    model: Any
    tok: Any
    task: Task
    settings: Sampler
    n: int
    skip: int = 0
    seed: int = 0
    samples: int = 1
    micro_batch: int = AT_A_TIME

    def __post_init__(self):
        self.model.eval()
        self.problems, task = held_out(self.task, self.n, self.skip), self.task
        where = (task.prompt_length, self.model.device, task.prompt_format)
        self.prompt, self.mask = encode_prompts(self.tok, self.problems, *where)
        network = getattr(self.model, "model", None)
        check_positions(network, self.prompt.shape[1], self.settings.length)

    @torch.no_grad()
    def responses(self, chosen: Sequence[int]) -> list[Row]:
        """A row for each of the ``chosen`` responses, of n x samples."""
        rollout = distributed.processes().generate(
            self.model,
            self.prompt,
            self.mask,
            self.settings,
            eos_token_id=end_ids(self.tok),
            num_generations=self.samples,
            generator=keyed_generator(self.seed, 0, "evaluate"),
            micro_batch=self.micro_batch,
            rows=torch.tensor(chosen, device=self.prompt.device),
        )
        texts = decode(self.tok, rollout.response[list(chosen)])
        steps = sampler.steps_run(rollout.unmask_step)
        found = verdicts(self.task, [self.problems[i // self.samples] for i in chosen], texts)
        return [
            {
                "problem": i // self.samples,
                "sample": i % self.samples,
                "solved": bool(verdict.solved),
                "reward": float(verdict.reward),
                "marks": {mark: float(value) for mark, value in verdict.marks.items()},
                "tokens": int(rollout.keep[i].sum()),  # up to and with the first end token
                "calls": int(steps[i]),
                "text": text,
            }
            for i, verdict, text in zip(chosen, found, texts, strict=True)
        ]

    def protocol(self) -> dict[str, Any]:
        """What decides a number beside the weights.

        Hashes: of the problems with what their answers are judged by, and of the token ids that the
        model is given, which cover template, tokenizer and wording.
        """
        task, s = self.task, self.settings
        ids = [row[real].tolist() for row, real in zip(self.prompt, self.mask, strict=True)]
        keys = ("length", "tokens_per_step", "block_length", "order", "threshold", "attention")
        return {
            "task": task.name,
            "n": self.n,
            "skip": self.skip,
            "samples": self.samples,
            "seed": self.seed,
            "shots": 0,  # as in the files of before
            "prompt_format": task.prompt_format,
            "problems": _hash([repr(problem) for problem in self.problems]),
            "prompts": _hash(ids),
            "prompt_width": self.prompt.shape[1],
            "steps": s.num_steps,
            "temperature": float(s.temperature),
            "cache": s.cache,
            **{key: getattr(s, key) for key in keys},
            **({"top_p": s.top_p} if s.top_p < 1 else {}),
            **{  # by which rule, where it is not the usual one
                rule.name: getattr(task, rule.name)
                for rule in dataclasses.fields(task)
                if rule.name in ("protocol", "seconds", "megabytes")
                and getattr(task, rule.name) != rule.default
            },
        }


def _shares(rows: Sequence[Row], n: int) -> dict[str, Any]:
    solved, samples = _solved(rows, n), len(rows) // n
    result: dict[str, Any] = {"solved": float(np.mean([row["solved"] for row in rows]))}
    for mark in rows[0]["marks"]:
        result[mark] = float(np.mean([row["marks"][mark] for row in rows]))
    result["n"] = n
    return result | ({f"pass@{samples}": float((solved > 0).mean())} if samples > 1 else {})


def _solved(rows: Sequence[Row], n: int) -> np.ndarray:
    # Of each problem the share of its responses that solve it.
    solved = [[] for _ in range(n)]
    for row in rows:
        solved[row["problem"]].append(row["solved"])
    return np.mean(solved, axis=1)


def interval(shares: np.ndarray) -> tuple[float, float]:
    """95 % of the mean of the problems' shares: Wilson's where each is solved or not, else the
    normal one of their mean."""
    n, p = len(shares), float(shares.mean())
    if set(shares) <= {0.0, 1.0}:
        middle, half = p + Z * Z / (2 * n), Z * (p * (1 - p) / n + (Z / (2 * n)) ** 2) ** 0.5
        low, high = (middle - half) / (1 + Z * Z / n), (middle + half) / (1 + Z * Z / n)
    else:
        half = Z * float(shares.std(ddof=1)) / n**0.5 if n > 1 else 1.0
        low, high = p - half, p + half
    return max(0.0, low), min(1.0, high)


# -------------------------------------------------------------------- with protocol, and resumable
def record(
    model: Any,
    tok: Any,
    task: Task,
    settings: Sampler,
    *,
    n: int,
    name: str = "",
    out: Path | None = None,
    **how: int,
) -> dict[str, Any]:
    """protocol, made_by, result and rows of an evaluation; ``how`` as for `evaluate`.

    ``out``: where the result will stand; while rows are made they are kept beside it, in OUT.rows,
    and the same call goes on from there. ValueError for kept rows of another protocol or other
    weights.
    """
    asked = _Asked(model, tok, task, settings, n, **how)
    samples, micro_batch = asked.samples, asked.micro_batch
    protocol, made = asked.protocol(), _made_by(name, model)
    path = out and _rows_beside(out)
    rows, seconds = _kept(path, {"protocol": protocol, "weights": made["weights"]})
    done = {row["problem"] * samples + row["sample"] for row in rows}
    missing = [i for i in range(n * samples) if i not in done]
    words = {"total": n * samples, "initial": len(done), "desc": f"length {settings.length}"}
    with tqdm(**words, disable=None) as bar:  # in a terminal only
        for first in range(0, len(missing), micro_batch):
            started, chosen = time.perf_counter(), missing[first : first + micro_batch]
            new = asked.responses(chosen)
            took = time.perf_counter() - started
            if path is not None:
                folders.append(path, json.dumps({"rows": new, "seconds": took}))
            rows, seconds = rows + new, seconds + took
            bar.update(len(chosen))
    rows.sort(key=lambda row: (row["problem"], row["sample"]))
    low, high = interval(_solved(rows, n))
    result = _shares(rows, n) | {"low": low, "high": high, "seconds": round(seconds, 3)}
    result |= {key: sum(row[key] for row in rows) for key in ("tokens", "calls")}
    return {"protocol": protocol, "made_by": made, "result": result, "rows": rows}


def _made_by(name: str, model: Any) -> dict[str, Any]:
    # Of the weights a hash of name, shape and up to 64 numbers, evenly spaced, of every parameter.
    found = []
    for key, value in sorted(model.named_parameters()):
        flat = value.detach().flatten()
        some = flat[:: max(1, -(-flat.numel() // 64))].to("cpu", torch.float64)
        found.append([key, list(value.shape), some.tolist()])
    made = {"model": name, "weights": _hash(found), "minidrl": minidrl.__version__}
    made |= {"torch": torch.__version__, "transformers": transformers.__version__}
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return made | {"dtype": dtype, "device": torch.device(model.device).type}


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _kept(path: Path | None, header: dict[str, Any]) -> tuple[list[Row], float]:
    # Rows and seconds of a file of rows; the last line of a process that was ended is cut off.
    if path is None:
        return [], 0.0
    whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    folders.write(path, "\n".join([*(whole or [json.dumps(header)]), ""]))
    stored, *lines = [json.loads(line) for line in whole] or [header]
    if stored != header:
        named = differing(stored["protocol"], header["protocol"]) or ["weights"]
        got = f"{str(path)!r}, an evaluation that differs in {', '.join(named)}"
        raise ValueError(f"out: got {got}; allowed another --out, or remove that file")
    return sum((line["rows"] for line in lines), []), sum(line["seconds"] for line in lines)


def _rows_beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.rows")


def write(out: Path, found: dict[str, Any]) -> None:
    """The result file, in place of the rows that were kept beside it."""
    folders.write(out, json.dumps({"evaluations": [found]}, indent=1) + "\n")
    _rows_beside(out).unlink(missing_ok=True)


def in_words(found: dict[str, Any]) -> str:
    """The result of an evaluation in a line."""
    result, responses = found["result"], len(found["rows"])
    other = ("low", "high", "n", "tokens", "calls", "seconds")
    said = ", ".join(f"{key} {value:.1%}" for key, value in result.items() if key not in other)
    interval = f"95 % interval of solved {result['low']:.1%} to {result['high']:.1%}"
    each = f"{result['tokens'] / responses:.1f} tokens a response"
    return f"{said}; {interval}, {each}, on {result['n']} held-out problems"


# --------------------------------------------------------------------------------------- comparison
def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys whose values are not equal, or that one of the two lacks."""
    return [key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key]]


def compare(a: Path, b: Path) -> str:
    """The paired difference of two result files."""
    first, second = _read(a), _read(b)
    how, other = first["protocol"], second["protocol"]
    if keys := differing(how, other):
        told = ", ".join(f"{key} ({how.get(key)}, {other.get(key)})" for key in keys)
        got = f"{a} and {b}, which differ in {told}"
        raise ValueError(f"compare: got {got}; allowed results of one protocol")
    before, after = (_solved(one["rows"], how["n"]) for one in (first, second))
    gap = 100 * (after - before)
    error = Z * float(gap.std(ddof=1)) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
    points = f"{gap.mean():+.1f} points, 95 % interval {gap.mean() - error:.1f} to"
    said = f"{before.mean():.1%} and {after.mean():.1%}, {points} {gap.mean() + error:.1f}"
    return f"{said}; of {len(gap)} problems each"


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["evaluations"][0]
    except (OSError, ValueError, KeyError, TypeError):
        got = f"{str(path)!r}, which holds no evaluation"
        raise ValueError(f"compare: got {got}; allowed a file of evaluate --out") from None
