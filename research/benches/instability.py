"""What noise in the ratio does to a run of 1,000 updates: `python -m research.benches.instability`.

A network of two layers writes 12 of 8 letters; letter i should be (prompt + i) mod 8, and the reward is the share of letters
that are. It starts from masked denoising on texts whose letters are right with probability 0.4, the others uniform. Then each
rollout (4 prompts x 16 responses) is used for 4 updates, with one masked state a response for the likelihood, and no gradient
clip. All lines share the network, the prompts and noise of each rollout, the advantage (reward minus the mean of its group)
and the optimiser. What differs is what the ratio is taken of (``scale``: the ELBO of the sequence, or its mean a token; or one
look with everything hidden, the mean field), against which masks, and what is done with it. Lines with "two states" in their
name and that of SPG have two masked states, as published. Writes instability.json, one line a run, downsampled; runs that are
there are not repeated, so the study can be stopped and resumed. A run takes about a minute of one CPU thread.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minidrl import algorithms as alg
from minidrl import denoiser, methods, sampler
from minidrl import features as feat
from minidrl.keyed import keyed_generator
from minidrl.loop import optimizer_step
from minidrl.run import config
from minidrl.run.train import make_optimizer

LETTERS, LENGTH, PROMPTS, GENERATIONS, REUSE, EVERY = 8, 12, 4, 16, 4, 10
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
SCALES = {"token mean": "kept_length", "sequence": "none"}  # of the log ratio: what divides the ELBO
PROMPT_MASKING = {"": 0.0, ", prompt masking": 0.15}  # of diffu-GRPO: the chance that a prompt token is hidden
RESULTS = Path(__file__).parents[1] / "results"
SETTINGS = sampler.Sampler(order="random", temperature=1.0, length=LENGTH, block_length=LENGTH, tokens_per_step=2)
OPTIMIZER = config.Optimizer(learning_rate=3e-4, weight_decay=0.1, max_grad_norm=math.inf)
CLIPPED = ", norm 0.2"  # lines of this name have the clip of the gradient norm of StableDRL's released code
BOUND = 3.0  # of dual-clip PPO, as in verl: a bad answer whose ratio is larger has no gradient
DUAL = ", dual clip"
FREE = ", no clip"  # the ratio as it is, of good and bad answers alike: no clip, so no bypass either
GOOD = ", good clipped"  # of no clip the good answers above 1.2, as GRPO's clip, and nothing of the bad ones
BAD = ", bad clipped"  # of no clip the bad answers above the bound, as the dual clip, and nothing of the good ones


class Alphabet:
    """What ``denoiser.build`` asks of a tokenizer: the letters and [MASK], no end of text."""

    eos_token_id, mask_token_id = None, LETTERS

    def __len__(self) -> int:
        return LETTERS + 1


def rows(scale: str) -> dict[str, methods.Method]:
    """The lines: rows made equal in everything but the ratio: one state, centred rewards, the same normaliser of the ELBO.

    All have StableDRL's credit, which does not divide by the group's deviation as the row `grpo` does: a line would differ
    in more than its ratio. With one state the EUBO (5.2) is the ELBO plus a constant, so that the sandwich (5.3) is the
    ELBO for the gradient; it acts in StableDRL's and SPG's lines with two states alone. "reinforce" is therefore REINFORCE
    on an ELBO of one state, and the lines of SPG are its row. "stabledrl" is the method stabledrl-sequence, which had that
    name when the stored runs were made.
    """
    table, one = methods.METHODS, {"plan.num_states": 1, "normalizer": SCALES[scale]}
    line = lambda name, **words: methods.with_options(table[name], one | words)  # noqa: E731
    centred, stable = (
        replace(line("grpo"), credit=table["stabledrl-sequence"].credit, refresh="independent"),
        line("stabledrl-sequence"),
    )
    found = {
        "grpo, fresh masks": centred,
        "stabledrl": stable,
        "grpo, shared masks": replace(centred, refresh="paired"),
        "clip-only": line("clip-only"),
        "self-norm-only": line("self-norm-only"),
        "reinforce": replace(stable, objective=partial(alg.reinforce), anchor="none", aggregation="sequence_mean"),
        "grpo, one plan": replace(centred, refresh="fixed"),
        "stabledrl, shared masks": replace(stable, refresh="paired"),
    }
    two = methods.with_options(table["stabledrl-sequence"], {"normalizer": SCALES[scale]})
    found["stabledrl, two states"] = two
    found["stabledrl, two states, no sandwich"] = replace(two, extra=None)
    own = {"normalizer": SCALES[scale], "plan.block_length": LENGTH, "refresh": "independent"}
    found["spg"] = methods.with_options(table["spg"], own)  # blocks are the sampler's; its code draws masks for each update
    for masked, p in PROMPT_MASKING.items():
        look = partial(alg.mean_field_plan, p_mask_prompt=p)
        found |= {f"grpo, mean field{masked}": replace(centred, plan=look)}
        found |= {f"stabledrl, mean field{masked}": replace(stable, plan=look)}
    found["grpo, mean field, shared holes"] = replace(centred, plan=look, refresh="paired")  # as d1 has them
    dual = partial(alg.dual_clip, epsilon_low=0.2, epsilon_high=0.2, bound=BOUND)
    free = partial(alg.ppo_clip, epsilon_low=math.inf, epsilon_high=math.inf)
    good = partial(alg.ppo_clip, epsilon_low=math.inf, epsilon_high=0.2)
    bad = partial(alg.dual_clip, epsilon_low=math.inf, epsilon_high=math.inf, bound=BOUND)
    for name in ("grpo, fresh masks", "grpo, mean field, prompt masking"):
        found |= {name + CLIPPED: found[name], name + DUAL: replace(found[name], objective=dual)}
        for what, objective in ((FREE, free), (GOOD, good), (BAD, bad)):
            found |= {name + what: replace(found[name], objective=objective)}
    return found


def optimizer_of(name: str) -> config.Optimizer:
    """The optimiser of a line: with the clip of the gradient norm where its name says so."""
    return replace(OPTIMIZER, max_grad_norm=0.2) if name.endswith(CLIPPED) else OPTIMIZER


def goal(prompt: Tensor) -> Tensor:
    """The right answer (B, L) to prompts (B, 1)."""
    return (prompt + torch.arange(LENGTH)) % LETTERS


def texts(prompt: Tensor, response: Tensor, generations: int) -> alg.Rollout:
    """Demonstrations in the shape of a Rollout, so that the plans can be used on them."""
    every = torch.ones_like(response, dtype=torch.bool)
    step, logp = torch.full_like(response, -1), torch.zeros(response.shape, dtype=torch.float64)
    return alg.Rollout(prompt, torch.ones_like(prompt, dtype=torch.bool), response, every, step, logp, generations, SETTINGS)


HOW = {"temperature": 1.0, "size": 1 << 20, "graph": True}  # of features: at this size all graphs fit


def base(steps: int = 500, rate: float = 1e-2, seed: int = 0) -> denoiser.Denoiser:
    """The network after masked denoising on texts whose letters are right with probability 0.4, the others uniform."""
    model = denoiser.build(SIZES, Alphabet(), seed).double()
    optimizer = make_optimizer(model, OPTIMIZER)
    for step in range(steps):
        noise = keyed_generator(seed, step, "texts")
        prompt = torch.randint(LETTERS, (128, 1), generator=noise)
        uniform = torch.randint(LETTERS, (128, LENGTH), generator=noise)
        right = torch.rand(128, LENGTH, generator=noise) < 0.4
        rollout = texts(prompt, torch.where(right, goal(prompt), uniform), 1)
        plan = alg.elbo_count_plan(rollout, noise, num_states=1, domain="keep", strata=True)
        (-(feat.features(model, rollout, plan, **HOW)["logp"].sum(-1) * plan.weight).mean() / LENGTH).backward()
        optimizer_step(model, optimizer, OPTIMIZER, rate * (1 - step / steps))
    return model.eval()


def collect(model: denoiser.Denoiser, seed: int, step: int) -> tuple[alg.Rollout, Tensor]:
    """4 prompts x 16 responses, and their rewards."""
    noise = keyed_generator(seed, step, "rollout")
    prompt = torch.randint(LETTERS, (PROMPTS, 1), generator=noise)
    mask = torch.ones_like(prompt, dtype=torch.bool)
    given = {"eos_token_id": None, "num_generations": GENERATIONS, "generator": noise}
    rollout = sampler.generate(model, prompt, mask, SETTINGS, **given)
    return rollout, (rollout.response == goal(rollout.prompt)).double().mean(-1)


def updates(
    model, method: methods.Method, rollout: alg.Rollout, reward: Tensor, optimizer, seed: int, step: int, settings=OPTIMIZER
):
    """Yield plan, features, anchor, adv and gradient norm of each update on a rollout; plans as the row's ``refresh`` says."""
    draw = lambda purpose: method.plan(rollout, keyed_generator(seed, step, purpose))  # noqa: E731
    score = lambda plan: methods.reduced(method, plan, rollout, feat.features(model, rollout, plan, temperature=1.0))  # noqa: E731
    plans = [draw(f"plan {0 if method.refresh == 'fixed' else i}") for i in range(REUSE)]
    if method.refresh == "independent":
        anchors = [score(draw("plan of the old value"))] * REUSE
    else:
        anchors = [score(plan) for plan in plans]
    for plan, anchor in zip(plans, anchors, strict=True):
        adv, feature = methods.advantages(method, plan, rollout, reward), feat.features(model, rollout, plan, **HOW)
        methods.method_loss(method, plan, rollout, feature, adv, None if method.anchor == "none" else anchor, None).backward()
        norm = optimizer_step(model, optimizer, settings, settings.learning_rate)
        yield plan, {name: value.detach() for name, value in feature.items()}, anchor, adv, norm


def run(name: str, scale: str, model: denoiser.Denoiser, seed: int, count: int) -> dict:
    """One run: a list a curve, one entry an update. A gradient that is not finite ends it (``stopped``)."""
    method, judge = rows(scale)[name], rows(scale)["grpo, fresh masks"]  # for all alike: what the clip of GRPO lets through
    optimizer, stopped, started = make_optimizer(model, OPTIMIZER), None, time.perf_counter()
    curves: dict[str, list[float]] = {"reward": [], "spread": [], "bypass": [], "norm": [], "ess": []}
    for step in range(count // REUSE):
        rollout, reward = collect(model, seed, step)
        try:
            steps = updates(model, method, rollout, reward, optimizer, seed, step, optimizer_of(name))
            for plan, feature, anchor, adv, norm in steps:
                seen = methods.ratio_diagnostics(judge, plan, rollout, feature, anchor, adv)
                values = (float(reward.mean()), seen["log_ratio_std"], seen["bypass_fraction"], norm)
                for key, value in zip(curves, (*values, seen["effective_sample_size"]), strict=True):
                    curves[key].append(value)
        except FloatingPointError:
            stopped = len(curves["norm"])
            break
    facts = {"method": name, "scale": scale, "seed": seed, "updates": len(curves["norm"]), "stopped": stopped}
    return {**facts, "seconds": time.perf_counter() - started, **curves}


def summary(result: dict) -> dict:
    """The run in one line: means over EVERY updates, the largest gradient norm among them, and a few numbers of the whole."""
    norm, last = result["norm"], result["reward"][-100:]
    parts = range(0, len(norm), EVERY)
    mean = lambda curve: [round(sum(curve[i : i + EVERY]) / len(curve[i : i + EVERY]), 4) for i in parts]  # noqa: E731
    curves = {key: mean(result[key]) for key in ("reward", "spread", "bypass", "ess")}
    curves["norm"] = [float(f"{max(norm[i : i + EVERY]):.4g}") for i in parts]
    facts = {
        "final_reward": round(sum(last) / len(last), 4),
        "norm_median": float(f"{sorted(norm)[len(norm) // 2]:.4g}"),
        "norm_max": float(f"{max(norm):.4g}"),
        "seconds": round(result["seconds"], 1),
    }
    kept = {key: result[key] for key in ("method", "scale", "seed", "updates", "stopped")}
    return kept | {"every": EVERY} | facts | curves


def stored(path: Path) -> list[dict]:
    """One dict a run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing(done: list[dict], names: list[str], scales: list[str], seeds: int) -> list[tuple[str, str, int]]:
    """(scale, line, seed) of the runs that are not there: seed by seed, so that an early end leaves lines of equal length."""
    there = {(r["scale"], r["method"], r["seed"]) for r in done}
    jobs = [(scale, name, seed) for scale in scales for seed in range(seeds) for name in names]
    return [job for job in jobs if job not in there]


def study(path: Path, names: list[str], scales: list[str], seeds: int, updates: int, start: dict | None = None) -> None:
    """Run what is missing. Each run is appended when it is done: an end in between loses one run."""
    jobs = missing(stored(path), names, scales, seeds)
    start = base().state_dict() if jobs and start is None else start
    for scale, name, seed in jobs:
        model = denoiser.build(SIZES, Alphabet(), 0).double().eval()
        model.load_state_dict(start)
        line = summary(run(name, scale, model, seed, updates))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print({key: value for key, value in line.items() if not isinstance(value, list)}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--methods", nargs="*", default=list(rows("sequence")), choices=list(rows("sequence")))
    parser.add_argument("--scales", nargs="*", default=list(SCALES), choices=list(SCALES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    study(given.out / "instability.json", given.methods, given.scales, given.seeds, given.updates)


if __name__ == "__main__":
    main()
