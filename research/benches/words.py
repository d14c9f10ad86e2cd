"""A sentence with three given words: what a checkpoint answers by each decoder, and how answers fail.

    python -m research.benches.words CONFIG MODEL --causal runs/smollm2_135m --out answers.json

Every held-out request is asked once by each of DECODERS, or by those that --by names. How likely a solved
sentence is, is judged by the causal model. Other settings of the config follow as --KEY VALUE.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from minidrl.denoiser import Denoiser
from minidrl.run import checkpoints, config
from minidrl.run.evaluate import interval, record
from minidrl.tasks.words import Request, in_order
from research.benches.sentences import causal_model, nats

# name -> temperature, tokens a call, order
DECODERS = {
    "sampled, 3 a call": (1.0, 3, "low_confidence"),
    "greedy, 3 a call": (0.0, 3, "low_confidence"),
    "greedy, 1 a call": (0.0, 1, "low_confidence"),
    "greedy, left to right": (0.0, 1, "left_to_right"),
    "sampled at 0.7, left to right": (0.7, 1, "left_to_right"),
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
    facts = {"solved": len(solved) / len(rows), "n": len(rows), "kinds": dict(kinds.most_common())}
    facts["interval"] = interval(np.array([float(row["solved"]) for row in rows]))
    facts["words"] = float(np.mean([len(in_order(text)) for text in solved])) if solved else None
    if causal and solved:
        found = nats(*causal, solved)
        facts["nats"] = {"mean": float(np.mean(found)), "of": len(found)}
    return facts | {"texts": [row["text"] for row in rows]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--causal", type=Path, help="what `minidrl convert` wrote, as the judge of how likely a sentence is")
    parser.add_argument("--by", action="append", choices=DECODERS, help="a decoder; may stand several times (default all)")
    parser.add_argument("--out", type=Path, required=True)
    args, others = parser.parse_known_args(argv)
    changes = dict(zip((word.removeprefix("--") for word in others[::2]), others[1::2], strict=True))
    settings = config.load(config.Train, args.config, changes)
    model, tok = checkpoints.load(args.model, dtype=checkpoints.dtype_of(settings.dtype))
    causal = causal_model(args.causal) if args.causal else None
    found = {name: answered(model, tok, settings, name, causal) for name in args.by or DECODERS}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
