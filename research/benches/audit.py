"""How noisy a ratio of likelihoods is on real weights, and how far training moves it: forward passes only.

    python -m research.benches.audit answers CONFIG --trained DIR ..   the model's own answers: equal weights, then trained ones
    python -m research.benches.audit text FILE MODEL                   answers of a file, cut to 10, 20, 40 and 80 tokens
    python -m research.benches.audit rows FILE MODEL OUT.jsonl         such texts, to fine-tune MODEL on (`pretrain --data`)
    python -m research.benches.audit picture

GRPO's clip and StableDRL's weights are `grpo` and `stabledrl-elbo`, both on the ELBO (2.3), here of ``--states`` states in as
many strata of time. ``PLANS`` plans are drawn for each response. Any two of them are masks drawn separately for old and new;
one and the same is shared masks. Products are in bfloat16, ``check`` in the result repeats some in float32. Intervals: 95 %, by
bootstrap of prompts. A run that was stopped goes on from what ``--out`` holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minidrl import algorithms as alg
from minidrl import features, loop, methods
from minidrl.keyed import keyed_generator
from minidrl.methods import METHODS
from minidrl.run import checkpoints, config
from minidrl.run.report import BLUE, GRID, INK, ORANGE, STYLE
from minidrl.run.train import start
from minidrl.tasks.rows import of_file

RESULT = Path(__file__).parents[1] / "results" / "audit.json"
CLIP, WEIGHTS = METHODS["grpo"], METHODS["stabledrl-elbo"]
LEVELS = {"token mean": {"normalizer": "kept_length"}, "sequence": {"normalizer": "none"}}
PLANS = 4
LENGTHS, QUESTION, GROUP = (10, 20, 40, 80), 64, 8  # tokens of a text and at most of its question; texts that make a group
CHECKED = 8  # responses that are scored in float32, too

Table = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------ likelihoods
@torch.no_grad()
def likelihoods(model, rollout: alg.Rollout, plans: list[alg.Plan], path: Path | None = None) -> dict[str, Tensor]:
    """The ll of each plan as ratios take it, (P, B) for each of ``LEVELS``, and those of its single states, (P, K, B).

    ``path``: what the network says is kept there, and read there if it was.
    """
    found = {name: [] for name in (*LEVELS, "state")}
    for i, plan in enumerate(plans):
        file = path and path.with_name(f"{path.name}, plan {i}.pt")
        feature = kept(file, lambda plan=plan: features.features(model, rollout, plan, temperature=1.0))
        for name, lls in found.items():
            method = methods.with_options(CLIP, LEVELS.get(name, {"reduction": "state"}))
            lls.append(methods.reduced(method, plan, rollout, feature)[..., 0].double())
    return {name: torch.stack(lls) if name == "state" else torch.cat(lls) for name, lls in found.items()}


def kept(file: Path | None, make: Callable[[], Any]) -> Any:
    """What ``make`` gives; with a file, only the first time."""
    if file is None or not file.exists():
        made = make()
        if file is None:
            return made
        torch.save(made, part := file.with_suffix(".part"))
        part.rename(file)
    return torch.load(file, weights_only=True)


def drawn(rollout: alg.Rollout, count: int, states: int) -> list[alg.Plan]:
    """``count`` plans of the methods' estimator."""
    method = methods.with_options(CLIP, {"plan.num_states": states})
    return [method.plan(rollout, keyed_generator(0, i, f"audit, {states} states")) for i in range(count)]


def separate(new: Float[Tensor, "P B"], old: Float[Tensor, "P B"]) -> Float[Tensor, "PP B"]:
    """Log-ratios of all ordered pairs of different plans."""
    return torch.stack([alg.log_ratio(new[i], old[j]) for i, j in itertools.permutations(range(len(old)), 2)])


# --------------------------------------------------------------------------------------------------- of each response (B,)
def inside(logs: Float[Tensor, "R B"]) -> Float[Tensor, " B"]:
    """The share of ratios that GRPO's clip leaves as they are, whatever the advantage."""
    clip = CLIP.objective.keywords
    return ((logs.exp() >= 1 - clip["epsilon_low"]) & (logs.exp() <= 1 + clip["epsilon_high"])).double().mean(0)


def group_size(logs: Float[Tensor, "R B"], num_generations: int) -> Float[Tensor, " G"]:
    """The effective group size of StableDRL's weights, 1 / sum w^2: all of the group where weights are equal."""
    cap = math.log(WEIGHTS.objective.keywords["cap"])
    weights = alg.self_normalized_weights(logs[..., None], num_generations, log_cap=cap)
    return (1 / weights.unflatten(1, (-1, num_generations)).square().sum(2))[..., 0].mean(0)


def squares(new: Float[Tensor, "P B"], old: Float[Tensor, "P B"]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean squares of a log-ratio without bias: what the weights moved, the noise of shared masks, that of separate ones."""
    moved, count = alg.log_ratio(new, old), len(old)
    drift = (moved.sum(0).square() - moved.square().sum(0)) / (count * (count - 1))  # products of different plans
    return drift, moved.var(0), separate(new, old).square().mean(0) - drift


def time_parts(z: Float[Tensor, "P S B"]) -> tuple[Tensor, Tensor]:
    """The variance of one state's estimate between S strata of times, and in all, from P states in each; without bias."""
    each, strata, _ = z.shape
    within = z.var(0).mean(0)
    between = z.mean(0).var(0, correction=0) - (1 - 1 / strata) * within / each
    return between, between + within


# --------------------------------------------------------------------------------------------------------------- summaries
def estimate(top: Tensor, bottom: Tensor | None = None, prompt: Tensor | None = None, root: bool = False) -> list[float]:
    """sum top / sum bottom, or its root, with an interval; without more, the mean over prompts of one value each."""
    bottom = torch.ones_like(top) if bottom is None else bottom
    prompt = torch.arange(len(top)) if prompt is None else prompt
    _, place = prompt.unique(return_inverse=True)
    sums = torch.stack([torch.zeros(int(place.max()) + 1).double().index_add(0, place, x) for x in (top, bottom)], 1).numpy()
    count = len(sums)
    times = np.vstack([np.ones(count), np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), 2000)])
    value, *others = (lambda s: s[:, 0] / s[:, 1])(times @ sums)
    found = np.array([value, *np.percentile(others, [2.5, 97.5])]).clip(min=0 if root else None)
    return [round(float(x), 5) for x in (np.sqrt(found) if root else found)]


def equal_weights(ll: dict[str, Tensor], prompt: Tensor, subsets: dict[str, Tensor], num_generations: int) -> Table:
    """The log-ratio of masks drawn separately where no weight has changed."""
    found = {}
    for level in LEVELS:
        logs, found[level] = separate(ll[level], ll[level]), {}
        for name, rows in subsets.items():
            part, of = logs[:, rows], prompt[rows]
            sd = estimate(part.square().mean(0), prompt=of, root=True)
            found[level][name] = {"sd": sd, "inside": estimate(inside(part), prompt=of)}
        found[level]["group size"] = estimate(group_size(logs, num_generations))
    return found


def moved_weights(new: dict[str, Tensor], old: dict[str, Tensor], prompt: Tensor, num_generations: int) -> Table:
    """What a ratio says of weights that have changed, by shared and by separate masks."""
    found = {}
    for level in LEVELS:
        drift, *noises = squares(new[level], old[level])
        found[level] = {"drift": estimate(drift, prompt=prompt, root=True)}
        logs = {"shared": alg.log_ratio(new[level], old[level]), "separate": separate(new[level], old[level])}
        for (name, values), noise in zip(logs.items(), noises, strict=True):
            found[level][name] = {
                "noise": estimate(noise, prompt=prompt, root=True),
                "drift in the square": estimate(drift, drift + noise, prompt),
                "inside": estimate(inside(values), prompt=prompt),
                "group size": estimate(group_size(values, num_generations)),
            }
    return found


def time_share(ll: dict[str, Tensor], prompt: Tensor, subsets: dict[str, Tensor]) -> Table:
    """The share of a state's variance that the stratum of its time explains."""
    between, total = time_parts(ll["state"])
    return {name: estimate(between[rows], total[rows], prompt[rows]) for name, rows in subsets.items()}


# --------------------------------------------------------------------------------------------------------------- responses
FIELDS = ("prompt", "prompt_mask", "response", "keep", "unmask_step", "logp")


def first(rollout: alg.Rollout, count: int) -> alg.Rollout:
    """Its first responses."""
    return dataclasses.replace(rollout, **{name: getattr(rollout, name)[:count] for name in FIELDS}, records={})


def answers(given: argparse.Namespace) -> Table:
    """Of the config's model: its answers, true and false, under its own weights and under those of ``given.trained``."""
    keys = {"dtype": "bfloat16", "num_prompts": given.prompts, "method": "grpo", "method_options": {}}
    settings = config.load(config.Train, given.config, keys | ({"model": given.model} if given.model else {}))
    run, each, out, states = start(settings), settings.num_generations, given.out, given.states

    def collected() -> dict[str, Tensor]:
        experience = loop.collect(run, 0)
        return {name: getattr(experience.rollout, name) for name in FIELDS} | {"solved": experience.solved}

    stored = kept(out / "answers, rollout.pt", collected)
    solved = stored.pop("solved")
    rollout = alg.Rollout(**stored, num_generations=each, sampler=settings.sampler)
    prompt, plans = torch.arange(len(solved)) // each, drawn(rollout, PLANS, states)
    verdicts = {"all": solved | True, "true": solved, "false": ~solved}
    lengths = {str(n): rollout.lengths == n for n in rollout.lengths.unique().tolist()}
    old = likelihoods(run.model, rollout, plans, out / f"answers, base, {states} states")
    found = {
        "states": states,
        "prompts": given.prompts,
        "responses": {name: int(rows.sum()) for name, rows in (verdicts | lengths).items()},
        "nats a token": estimate(-old["token mean"].mean(0), prompt=prompt),
        "equal weights": equal_weights(old, prompt, verdicts | lengths, each),
        "time share": time_share(old, prompt, verdicts),
        "trained": {},
    }
    some, found["check"] = first(rollout, CHECKED), {}
    networks = {"bfloat16": run.model, "float32": checkpoints.load(settings.model, dtype=torch.float32)[0]}
    for name, model in networks.items():
        ll = likelihoods(model, some, drawn(some, PLANS, states), out / f"answers, base, {name}")
        found["check"][name] = equal_weights(ll, prompt[:CHECKED], {"all": prompt[:CHECKED] >= 0}, each)
    for folder in given.trained:
        checkpoints.read_adapters(run.model, folder)
        new = likelihoods(run.model, rollout, plans, out / f"answers, {folder.name}, {states} states")
        found["trained"][folder.name] = moved_weights(new, old, prompt, each)
    return found


def texts(path: Path, tok: Any, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the first ``count`` questions and answers that are short and long enough; notes as <<1+1=2>> are left out."""
    found = []
    for row in of_file("file", path):
        question, answer = (tok(text).input_ids for text in (f"{row['question']}\n", re.sub("<<.*?>>", "", row["answer"])))
        answer = answer[: LENGTHS[-1]]
        if len(question) <= QUESTION and len(tok(tok.decode(answer)).input_ids) == LENGTHS[-1] == len(answer):
            found.append((question, answer))
    questions, answers = zip(*found[:count], strict=True)
    return list(questions), list(answers)


def text(given: argparse.Namespace) -> Table:
    """Answers of a file at each length, under equal weights."""
    model, tok = checkpoints.load(given.model, dtype=torch.bfloat16)
    questions, written = texts(given.file, tok, given.prompts)
    batch = tok.pad({"input_ids": questions}, return_tensors="pt")
    words = {"prompt": batch.input_ids, "prompt_mask": batch.attention_mask.bool(), "num_generations": GROUP}
    prompt, states = torch.arange(len(written)), given.states
    found, every = {"states": states, "texts": len(written), "by length": {}}, {"all": prompt >= 0}
    for length in LENGTHS:
        rollout = alg.Rollout.of(torch.tensor(written)[:, :length], **words)
        plans, path = drawn(rollout, PLANS, states), given.out / f"text, {length} tokens, {states} states"
        ll = likelihoods(model, rollout, plans, path)
        found["by length"][length] = {
            "plans": len(plans),
            "nats a token": estimate(-ll["token mean"].mean(0)),
            "equal weights": equal_weights(ll, prompt, every, GROUP),
            "time share": time_share(ll, prompt, every),
        }
    return found


def rows(given: argparse.Namespace) -> None:
    """The texts of ``text`` as rows of prompt and answer."""
    tok = checkpoints.load_tokenizer(given.model)
    pairs = zip(*texts(given.file, tok, given.prompts), strict=True)
    lines = [json.dumps(dict(zip(("prompt", "answer"), map(tok.decode, pair), strict=True))) for pair in pairs]
    given.to.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------------ picture
def picture(result: Table, to: Path) -> None:
    """The noise by length, what clip and weights leave of it, and noise beside drift."""
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
        for level, color in (("token mean", BLUE), ("sequence", ORANGE)):
            draw_by_length(*axes[:2], result, level, color)
        axes[0].axhspan(0, 0.2, color=GRID, zorder=0)
        axes[0].set(
            xscale="log",
            yscale="log",
            ylabel="sd of the log-ratio, nats",
            title="equal weights, separate masks",
            ylim=(0.05, 2000),
        )
        axes[1].set(xscale="log", ylim=(0, 103), ylabel="%", title="what is left of ratios of 1")
        for ax in axes[:2]:
            ax.set_xticks(LENGTHS, LENGTHS)
            ax.minorticks_off()
            ax.set_xlabel("tokens of an answer")
            ax.legend(frameon=False, fontsize=8, loc="upper right")
        draw_moved(axes[2], result["answers"]["trained"])
        figure.savefig(to, dpi=110)


def draw_by_length(noise: Any, left: Any, result: Table, level: str, color: str) -> None:
    """Two panels, a line for the texts and markers for the model's own answers."""
    by_length = {int(n): part["equal weights"][level] for n, part in result["text"]["by length"].items()}

    def line(ax: Any, values: list[list[float]], scale: float, how: str, label: str) -> None:
        middle, low, high = scale * np.array(values).T
        ax.errorbar(list(by_length), middle, (middle - low, high - middle), fmt=how, color=color, capsize=2, label=label)

    line(noise, [part["all"]["sd"] for part in by_length.values()], 1, "o-", f"{level}, GSM8K's answers")
    line(left, [part["all"]["inside"] for part in by_length.values()], 100, "o-", f"{level}: inside the clip")
    line(left, [part["group size"] for part in by_length.values()], 100 / GROUP, "s--", f"{level}: effective group / {GROUP}")
    own, counts = result["answers"]["equal weights"][level], result["answers"]["responses"]
    length = sum(int(n) * count for n, count in counts.items() if n.isdigit()) / counts["all"]
    for verdict, face in (("true", color), ("false", "white")):
        noise.plot(
            length, own[verdict]["sd"][0], "D", color=color, markerfacecolor=face, label=f"{level}, own answers, {verdict}"
        )


def draw_moved(ax: Any, trained: Table) -> None:
    """Bars for each checkpoint: drift, and the noise of a ratio with shared and with separate masks; of token means."""
    parts = {name: found["token mean"] for name, found in trained.items()}
    bars = {
        "what training moved": [part["drift"] for part in parts.values()],
        "noise, shared masks": [part["shared"]["noise"] for part in parts.values()],
        "noise, separate masks": [part["separate"]["noise"] for part in parts.values()],
    }
    for k, ((label, values), color) in enumerate(zip(bars.items(), (INK, BLUE, ORANGE), strict=True)):
        middle, low, high = np.array(values).T
        place = np.arange(len(parts)) + 0.27 * (k - 1)
        ax.bar(place, middle, 0.25, yerr=(middle - low, high - middle), color=color, capsize=2, label=label)
    ax.set_xticks(range(len(parts)), [name.replace("checkpoint-", "after ") + " updates" for name in parts])
    ax.set(ylabel="log-ratio, root mean square, nats", title="token means, own answers")
    ax.legend(frameon=False, fontsize=8)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    parts = {name: verbs.add_parser(name) for name in ("answers", "text", "rows", "picture")}
    parts["answers"].add_argument("config", type=Path)
    parts["answers"].add_argument("--model", default="", help="default: that of the config")
    parts["answers"].add_argument("--trained", type=Path, nargs="*", default=[], help="checkpoints of a run with the config")
    for name in ("text", "rows"):
        parts[name].add_argument("file", type=Path, help="rows of question and answer, as GSM8K's")
        parts[name].add_argument("model", type=Path)
    parts["rows"].add_argument("to", type=Path)
    for name, prompts in {"answers": 16, "text": 8, "rows": 10_000}.items():
        parts[name].add_argument("--prompts", type=int, default=prompts)
        parts[name].add_argument("--states", type=int, default=4, help="of a plan (default 4)")
        parts[name].add_argument("--out", type=Path, default=Path("runs/audit"), help="what is computed is kept there")
    given = parser.parse_args(words)
    if given.verb == "rows":
        return rows(given)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if given.verb != "picture":
        torch.set_num_threads(1)
        given.out.mkdir(parents=True, exist_ok=True)
        result[given.verb] = {"answers": answers, "text": text}[given.verb](given)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if result.keys() >= {"answers", "text"}:
        picture(result, RESULT.parents[1] / "audit.png")


if __name__ == "__main__":
    main()
