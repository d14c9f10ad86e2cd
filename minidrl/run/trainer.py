"""The evaluator of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minidrl import sampler
from minidrl.keyed import keyed_generator
from minidrl.run import distributed
from minidrl.tasks import Task, held_out, verdicts
from minidrl.tasks.text import decode, encode_prompts


@torch.no_grad()
def evaluate(
    model: Any,
    tok: Any,
    task: Task,
    settings: sampler.Sampler,
    *,
    n: int,
    skip: int = 0,
    seed: int = 0,
    samples: int = 1,
    micro_batch: int = 128,
) -> dict:
    """Shares of ``n`` held-out problems, after the first ``skip``: solved, and the task's marks.

    ``settings.temperature`` is the policy that is judged; 0 is greedy. With ``samples`` k > 1 also
    pass@k: the share of problems solved by at least one of k samples.
    """
    model.eval()
    problems = held_out(task, n, skip)
    where = (task.prompt_length, model.device, task.prompt_format)
    prompt, mask = encode_prompts(tok, problems, *where)
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
    found = verdicts(task, problems, texts)
    solved = np.array([verdict.solved for verdict in found]).reshape(n, samples)
    result = {"solved": float(solved.mean())}
    for mark in found[0].marks:
        result[mark] = float(np.mean([verdict.marks[mark] for verdict in found]))
    result["n"] = n
    return result | ({f"pass@{samples}": float(solved.any(1).mean())} if samples > 1 else {})
