"""What a base solves in every order of decoding at several temperatures.

`python -m research.benches.decoders CONFIG [--model DIR]`. CONFIG is that of an RL run: task, sampler and, without --model, the
base. The error is one binomial standard error, in points; all decoders are judged on the same puzzles.
"""

from __future__ import annotations

import argparse
import math

import pandas as pd

from minidrl import sampler
from minidrl.run import checkpoints, config
from research import controls
from research.tables import markdown

TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)


def rates(settings: config.Train) -> dict[str, dict[float, float]]:
    """Share of the first ``evaluate.n`` held-out puzzles solved, by order and temperature."""
    model, tok = checkpoints.load(settings.model)
    return {
        order: {t: controls.solved(model, tok, settings, t, order=order)["solved"] for t in TEMPERATURES}
        for order in sampler.ORDERS
    }


def table(found: dict[str, dict[float, float]], n: int) -> str:
    """Markdown, in percent, and the best decoder with its error below."""
    rows = [{"order": order} | {f"{t:g}": f"{100 * rate:.1f}" for t, rate in by.items()} for order, by in found.items()]
    best, order, t = max((rate, order, t) for order, by in found.items() for t, rate in by.items())
    error = math.sqrt(best * (1 - best) / n)
    name = f"{order} at temperature {t:g}: {100 * best:.1f} % +- {100 * error:.1f} of {n} held-out puzzles"
    return markdown(pd.DataFrame(rows)) + f"\n\nbest: {name}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Solved rates of a base in every order of decoding.")
    parser.add_argument("config")
    parser.add_argument("--model", default="", help="default: that of the config")
    parser.add_argument("--n", type=int, default=512, help="held-out puzzles")
    args = parser.parse_args()
    settings = config.load(config.Train, args.config, {"evaluate.n": args.n} | ({"model": args.model} if args.model else {}))
    print(table(rates(settings), args.n))
