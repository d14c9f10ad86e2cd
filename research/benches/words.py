"""RL of sentences with three given words: answers of a model by decoder, and iterated self-training beside it.

    python -m research.benches.words answers CONFIG MODEL --causal runs/smollm2_135m --out base.json
    python -m research.benches.words imitate CONFIG --seed 0 --out runs/imitation-0

``answers`` asks a checkpoint every held-out request by each of DECODERS and says how answers fail. ``imitate``
is self-training in rounds: the sampler becomes what was learnt, every ROUND steps; steps, samples and updates
are those of RL with the same config. It keeps a checkpoint for ``answers``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from minidrl.denoiser import Denoiser
from minidrl.run import checkpoints, config, folders
from minidrl.run.evaluate import evaluate, interval, record
from minidrl.run.train import start
from minidrl.tasks.words import Request, in_order
from research.benches.sentences import causal_model, nats
from research.controls import imitate

ROUND = 10  # steps of self-training before its sampler is renewed
# name -> temperature, tokens a call, order
DECODERS = {
    "sampled, 3 a call": (1.0, 3, "low_confidence"),
    "greedy, 3 a call": (0.0, 3, "low_confidence"),
    "greedy, 1 a call": (0.0, 1, "low_confidence"),
    "greedy, left to right": (0.0, 1, "left_to_right"),
}


def kind(request: Request, text: str, solved: bool, sentence: bool) -> str:
    """Solved, or the first thing that is wrong with an answer."""
    found = in_order(text)
    if solved:
        return "solved"
    if any(word not in found for word in request.wanted):
        return "a word is missing"
    if not sentence:
        return "no whole sentence"
    return "too short" if len(found) < 2 * len(request.wanted) else "a word stands twice"


def answered(model: Denoiser, tok: Any, s: config.Train, decoder: str, causal: tuple | None) -> dict[str, Any]:
    """What one decoder makes of every held-out request: shares, kinds, texts; nats a token of the solved ones."""
    temperature, each, order = DECODERS[decoder]
    decoding = dataclasses.replace(s.sampler, temperature=temperature, tokens_per_step=each, order=order)
    requests = s.task.splits_of_files["held_out"]
    rows = record(model, tok, s.task, decoding, n=len(requests))["rows"]
    kinds = Counter(kind(requests[row["problem"]], row["text"], row["solved"], row["marks"]["sentence"] > 0) for row in rows)
    solved = [row["text"].strip() for row in rows if row["solved"]]
    openings = Counter(" ".join(in_order(text)[:2]) for text in solved)
    facts = {"solved": len(solved) / len(rows), "n": len(rows), "kinds": dict(kinds.most_common())}
    facts["interval"] = interval(np.array([float(row["solved"]) for row in rows]))
    facts["openings"] = openings.most_common(5)
    facts["words"] = float(np.mean([len(in_order(text)) for text in solved])) if solved else None
    if causal and solved:
        found = nats(*causal, solved)
        facts["nats"] = {"mean": float(np.mean(found)), "of": len(found)}
    return facts | {"texts": [row["text"] for row in rows]}


def imitation(settings: config.Train, out: Path) -> None:
    """Self-training in rounds; metrics.jsonl and a checkpoint in ``out``."""
    run, base = start(settings), start(settings)
    out.mkdir(parents=True)
    with (out / "metrics.jsonl").open("w") as log:
        for step in tqdm(range(settings.steps), desc="self-training"):
            if step and step % ROUND == 0:
                base.model.load_state_dict(run.model.state_dict())
            log.write(json.dumps(imitate(run, base, step)) + "\n")
            log.flush()
            every = settings.evaluate.every
            if (step + 1) % every == 0:
                how = dataclasses.replace(settings.sampler, temperature=settings.evaluate.temperature)
                scores = evaluate(run.model, run.tok, settings.task, how, n=settings.evaluate.n)
                log.write(json.dumps({"step": step + 1} | {f"eval/{k}": v for k, v in scores.items()}) + "\n")
    with folders.folder(out / f"checkpoint-{settings.steps}") as part:
        checkpoints.save(run.model, run.tok, part)


def curve(folder: Path) -> list[tuple[int, float]]:
    """(step, share solved) of a run's evaluations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["eval/solved"]) for row in rows if "eval/solved" in row]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    asked = verbs.add_parser("answers")
    asked.add_argument("config", type=Path)
    asked.add_argument("model", type=Path)
    asked.add_argument("--causal", type=Path, help="what `minidrl convert` wrote, as the judge of how likely a sentence is")
    asked.add_argument("--only", choices=DECODERS, action="append")
    asked.add_argument("--out", type=Path, required=True)
    tried = verbs.add_parser("imitate")
    tried.add_argument("config", type=Path)
    tried.add_argument("--seed", type=int, default=0)
    tried.add_argument("--rate", type=float)
    tried.add_argument("--out", type=Path, required=True)
    args, others = parser.parse_known_args(argv)
    changes = dict(zip((word.removeprefix("--") for word in others[::2]), others[1::2], strict=True))
    settings = config.load(config.Train, args.config, changes)
    if args.verb == "imitate":
        rate = args.rate or settings.optimizer.learning_rate
        optimizer = dataclasses.replace(settings.optimizer, learning_rate=rate)
        imitation(dataclasses.replace(settings, seed=args.seed, optimizer=optimizer), args.out)
        return
    model, tok = checkpoints.load(args.model, dtype=torch.bfloat16 if settings.dtype == "bfloat16" else None)
    causal = causal_model(args.causal) if args.causal else None
    found = {name: answered(model, tok, settings, name, causal) for name in args.only or DECODERS}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
