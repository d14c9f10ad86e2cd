"""What RL changes in two orders of writing: `python -m research.benches.orders`.

The main job (tiny_configs/countdown20_cpu.yaml), trained and decoded in low-confidence order and from left to right, five
seeds each. Then greedy answers of the base and of every run to 894 held-out puzzles. Each answer is of one of the KINDS:

    solved   the verifier says so
    miss     a true calculation with the given numbers, which ends at another number
    bent     the same numbers, and only the last equation is false: its result is the target
    false    the same numbers, and false in some other way
    other    other numbers, or no calculation

Each puzzle is of one of the CLASSES: some solution has sums only; none has, but one has sums and differences; all need a
product or a quotient. ``chance`` is the share of solutions among all true calculations with the numbers of a puzzle. ``place``
says when the characters of a part of the answer are written, 0 first and 1 last, on average over answers of two equations.

``crossed``: the weights that were trained in an order, answering in the other one.

A run takes some minutes of one CPU thread. Those that have finished are not repeated. `--order` trains one of the orders, so
that two processes can share the work; without it, results/orders.json and orders.png are written at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from minidrl import sampler
from minidrl.run import checkpoints, config, folders, train
from minidrl.tasks import held_out, verdicts
from minidrl.tasks.countdown import Countdown, Puzzle, equations, running_calculations
from minidrl.tasks.text import decode, encode_prompts
from research import stats

CONFIG = "tiny_configs/countdown20_cpu.yaml"
RESULTS = Path(__file__).parents[1] / "results"
ORDERS = ("low_confidence", "left_to_right")
KINDS = ("solved", "miss", "bent", "false", "other")
CLASSES = ("sums", "differences", "products")
PUZZLES, EXAMPLES = 894, 24  # the first held-out puzzles; those whose answers are kept
TWO_EQUATIONS = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)([-+*/])(\d+)=(\d+)")
NAMES = dict(
    zip(KINDS, ("solved", "true, another number", "last equation bent to the target", "false elsewhere", "other"), strict=True)
)
COLORS = dict(zip(KINDS, ("#009E73", "#9ecae1", "#D55E00", "#bbbbbb", "#666666"), strict=True))
PARTS = ("first operand", "first operator", "second operand", "first result", "second operator", "third operand", "result")


def settings_of(order: str, seed: int = 0) -> config.Train:
    # Evaluations between take time and change nothing.
    return config.load(config.Train, CONFIG, {"sampler.order": order, "seed": seed, "evaluate.every": 0})


def trained(order: str, seed: int, runs: Path) -> Path:
    """The checkpoint of a run, which is made where it is missing."""
    out, settings = runs / f"{order}-{seed}", settings_of(order, seed)
    last = out / f"checkpoint-{settings.steps}"
    if not (out / folders.SUMMARY).exists():
        train.train(settings, out, resume=out.exists())
    return last


# ------------------------------------------------------------------------------------------------------------- one answer
def kind_of(puzzle: Puzzle, text: str, solved: bool) -> str:
    if solved:
        return "solved"
    if (found := equations(text)) is None:
        return "other"
    left, steps = found
    if sorted([left, *(number for _, number, _ in steps)]) != sorted(puzzle.numbers):
        return "other"
    true = []
    for op, right, result in steps:
        values = {"+": left + right, "-": left - right, "*": left * right}
        true.append(right and left == result * right if op == "/" else values[op] == result)
        left = result
    if all(true):
        return "miss"
    return "bent" if all(true[:-1]) and left == puzzle.target else "false"


def class_of(puzzle: Puzzle, max_value: int) -> str:
    solutions = running_calculations(puzzle.numbers, max_value)[puzzle.target]
    used = [set(re.findall(r"[-+*/]", solution)) for solution in solutions]
    if any(ops <= {"+"} for ops in used):
        return "sums"
    return "differences" if any(ops <= {"+", "-"} for ops in used) else "products"


def chance(puzzle: Puzzle, task: Countdown) -> float:
    by_value = running_calculations(puzzle.numbers, task.max_value)
    return len(by_value[puzzle.target]) / sum(map(len, by_value.values()))


def places(text: str, unmask_step: list[int]) -> dict[str, float]:
    """The mean place of each part in the order of writing; nothing for an answer of another form."""
    found = TWO_EQUATIONS.fullmatch(text)
    if not found:
        return {}
    order = sorted(range(len(text)), key=lambda i: unmask_step[i])
    rank = {i: k / (len(text) - 1) for k, i in enumerate(order)}
    return {part: statistics.fmean(rank[i] for i in range(*found.span(group))) for group, part in enumerate(PARTS, start=1)}


# ---------------------------------------------------------------------------------------------------------------- a model
@torch.no_grad()
def answers(model: Path, settings: config.Train) -> dict:
    """Greedy answers of a checkpoint to all held-out puzzles, counted."""
    network, tok = checkpoints.load(model)
    network.eval()
    problems = held_out(settings.task, PUZZLES)
    prompt, mask = encode_prompts(tok, problems, settings.task.prompt_length)
    greedy = dataclasses.replace(settings.sampler, temperature=0.0)
    told = {"eos_token_id": tok.eos_token_id, "generator": None, "micro_batch": 128}
    rollout = sampler.generate(network, prompt, mask, greedy, **told)
    texts = decode(tok, rollout.response)
    solved = [verdict.solved for verdict in verdicts(settings.task, problems, texts)]
    kinds = Counter(map(kind_of, problems, texts, solved))
    classes = [class_of(puzzle, settings.task.max_value) for puzzle in problems]
    by_class = {c: statistics.fmean(s for s, k in zip(solved, classes, strict=True) if k == c) for c in CLASSES}
    placed = [found for found in map(places, texts, rollout.unmask_step.tolist()) if found]
    return {
        "kinds": {kind: kinds[kind] / PUZZLES for kind in KINDS},
        "solved in class": by_class,
        "place": {part: statistics.fmean(found[part] for found in placed) for part in PARTS},
        "texts": texts,
    }


def answered(out: Path, model: Path, order: str) -> dict:
    """``answers``, kept in the file ``out``."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        folders.write(out, json.dumps(answers(model, settings_of(order))))
    return json.loads(out.read_text(encoding="utf-8"))


def table(name: str, runs: list[dict]) -> str:
    """Percentages of one order, with Student's interval over seeds where there are several."""

    def told(values: list[float], digits: int = 1, scale: int = 100) -> str:
        if len(values) < 2:
            return f"{scale * values[0]:.{digits}f}"
        mean, low, high = (scale * x for x in stats.mean_interval(values))
        return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    kinds = ", ".join(f"{kind} {told([run['kinds'][kind] for run in runs])}" for kind in KINDS)
    classes = ", ".join(f"{c} {told([run['solved in class'][c] for run in runs])}" for c in CLASSES)
    result = told([run["place"]["result"] for run in runs], 2, 1)
    return f"{name}, {len(runs)}: {kinds}; {classes}; the result is written at {result}"


def draw(ax: Any, result: dict) -> None:
    """The kinds of answer as four bars, before and after in each order; means over seeds, in percent."""
    bars = []
    for order, name in (("left_to_right", "from left to right"), ("low_confidence", "surest first")):
        after = {kind: statistics.fmean(run["kinds"][kind] for run in result["RL"][order]) for kind in KINDS}
        bars += [(f"{name}, base", result["base"][order]["kinds"]), (f"{name}, after RL", after)]
    places = (0, 0.8, 2, 2.8)
    for y, (_, shares) in zip(places, bars, strict=True):
        left = 0.0
        for kind in KINDS:
            wide = 100 * shares[kind]
            ax.barh(y, wide, left=left, height=0.7, color=COLORS[kind], label=NAMES[kind] if y == 0 else None)
            if wide >= 4:
                color = "white" if kind in ("solved", "bent") else "black"
                ax.text(left + wide / 2, y, f"{wide:.0f}", ha="center", va="center", color=color, fontsize=9)
            left += wide
    ax.set_yticks(places, [name for name, _ in bars])
    ax.invert_yaxis()
    ax.set(xlim=(0, 100), xlabel=f"answers to {PUZZLES} held-out puzzles, %")
    ax.grid(visible=False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/orders"), help="where runs stand (default runs/orders)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--order", choices=ORDERS, help="work on this order only, and write no result")
    asked = parser.parse_args()
    runs, base = asked.runs, Path(settings_of("low_confidence").model)
    before, after, crossed = {}, {}, {}
    for order in ORDERS if asked.order is None else (asked.order,):
        before[order] = answered(runs / f"base-{order}.json", base, order)
        models = {seed: trained(order, seed, runs) for seed in range(asked.seeds)}
        after[order] = [answered(runs / f"{order}-{seed}.json", model, order) for seed, model in models.items()]
        (other,) = set(ORDERS) - {order}
        crossed[order] = [answered(runs / f"{order}-{seed}-crossed.json", model, other) for seed, model in models.items()]
    if asked.order is not None:
        return

    task = settings_of("low_confidence").task
    problems = held_out(task, PUZZLES)
    classes = [class_of(puzzle, task.max_value) for puzzle in problems]
    for order in ORDERS:
        print(table(f"base, {order}", [before[order]]), table(f"RL, {order}", after[order]), sep="\n")
        print(table(f"RL, {order}, crossed", crossed[order]))
    first = {f"base, {order}": before[order]["texts"] for order in ORDERS}
    first |= {f"RL, {order}": after[order][0]["texts"] for order in ORDERS}
    result = {
        "command": "python -m research.benches.orders",
        "puzzles": {c: classes.count(c) for c in CLASSES},
        "chance": {
            c: statistics.fmean(chance(p, task) for p, k in zip(problems, classes, strict=True) if k == c) for c in CLASSES
        },
        "base": {order: _counts(before[order]) for order in ORDERS},
        "RL": {order: [_counts(run) for run in after[order]] for order in ORDERS},
        "crossed": {order: [_counts(run) for run in crossed[order]] for order in ORDERS},
        "examples": [
            {"prompt": problems[i].prompt, **{name: texts[i] for name, texts in first.items()}} for i in range(EXAMPLES)
        ],
    }
    (RESULTS / "orders.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    picture(result)


def picture(result: dict) -> None:
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
    draw(ax, result)
    figure.savefig(RESULTS.parent / "orders.png", dpi=110)


def _counts(found: dict) -> dict:
    return {key: {name: round(value, 4) for name, value in part.items()} for key, part in found.items() if key != "texts"}


if __name__ == "__main__":
    main()
