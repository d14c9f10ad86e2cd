"""Two pages and their figures from stored numbers: `python research/benchmarks/instability_page.py` (`--check`: are they current?).

docs/instability.md is the short one, for who asks why noise in the ratio should collapse training; docs/instability_measured.md
has every line, for who doubts the first.

Reads results/instability.json (research/benchmarks/instability.py) and results/weight_signal.json (research/benchmarks/weight_signal.py) and runs
nothing. No sentence of a reading is typed in with its verdict: it is chosen by the numbers that it quotes.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import textwrap
from pathlib import Path

import instability as study
import weight_signal as weight
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minidrl.run import cards, intervals, tables

ROOT = Path(__file__).parents[2]


FRESH = "grpo, fresh masks"
MASKING = "mean field, prompt masking"
PAIRS = {  # what differs between the two lines
    ("grpo, shared masks", FRESH): "the noise of fresh masks",
    ("grpo, one plan", FRESH): "the same noise; one plan for all updates",
    ("stabledrl", FRESH): "cap and self-normalisation, under noise",
    ("stabledrl", "clip-only"): "self-normalisation, under noise",
    ("stabledrl", "self-norm-only"): "the cap, under noise",
    ("stabledrl", "reinforce"): "weights at all, under noise",
    ("grpo, shared masks", "clip-only"): "noise taken out, or capped",
    ("stabledrl", "grpo, shared masks"): "noise borne, or taken out",
    ("stabledrl, shared masks", "stabledrl"): "the noise, in StableDRL",
    ("stabledrl", "stabledrl, epsilon 1"): "a cap of 6, or of 2",
    ("stabledrl", "stabledrl, epsilon 100"): "a cap of 6, or of 101",
    ("stabledrl", "stabledrl, epsilon 1000"): "a cap of 6, or of 1,001",
    ("grpo, mean field", FRESH): "a likelihood without noise",
    (f"stabledrl, {MASKING}", f"grpo, {MASKING}"): "cap and self-normalisation, mean field, under noise of the prompt",
}
ONE_MORE, PLAIN, SANDWICHED = "grpo, two states", "stabledrl, two states, no sandwich", "stabledrl, two states"
TWO_PAIRS = {  # run later, and corrected among themselves
    (ONE_MORE, FRESH): "a second masked state, in GRPO",
    (PLAIN, "stabledrl"): "a second masked state, in StableDRL",
    (SANDWICHED, PLAIN): "the sandwich",
    (PLAIN, ONE_MORE): "cap and self-normalisation, with two states",
}
NO_SCALE = ("reinforce", "spg")  # no ratio: dividing the loss by the length divides its gradient, which AdamW takes out
SLOW = 0.03  # a reward that ends further than this below its peak is past it
LEVEL = 0.05


# ================================================================================================================ the runs


def interval(values: list[float]) -> str:
    """Mean [Student's 95 %]; of one run its number."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return "{:.3f} [{:.3f}, {:.3f}]".format(*intervals.mean_interval(values))


def largest(runs: list[dict]) -> str:
    """The largest gradient norm of the line, and the updates, counted from 1, of which it is the largest."""
    worst = max(runs, key=lambda r: r["norm_max"])
    before = max(range(len(worst["norm"])), key=lambda i: worst["norm"][i]) * worst["every"]
    return f"{worst['norm_max']:.3g} in updates {before + 1} to {before + worst['every']}"


COLUMNS = (
    "line",
    "seeds",
    "reward at the end",
    "gained",
    "runs that end below their start",
    "below the peak",
    "largest gradient norm",
    "spread, first and last hundred",
)


def table_row(name: str, runs: list[dict]) -> dict:
    """A line of the table of a scale."""
    return {
        "line": name,
        "seeds": ", ".join(str(r["seed"]) for r in runs),
        "reward at the end": interval([r["final_reward"] for r in runs]),
        "gained": interval([study.gained(r) for r in runs]),
        "runs that end below their start": f"{sum(study.gained(r) < 0 for r in runs)} of {len(runs)}",
        "below the peak": f"{statistics.mean(map(study.fallen, runs)):.3f}",
        "largest gradient norm": largest(runs),
        "spread, first and last hundred": "{:.2f}, {:.2f}".format(*trend(runs, "spread")),
    }


def paired_lines(
    results: list[dict], scale: str, pairs: dict[tuple[str, str], str] = PAIRS
) -> list[tuple[str, str, list[float], intervals.Paired, float]]:
    """The pairs of which both lines ran with two common seeds or more: differences of the reward at the end, test, Holm's p."""
    found = []
    for a, b in pairs:
        left, right = ({r["seed"]: r["final_reward"] for r in study.of_line(results, scale, name)} for name in (a, b))
        ends = [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]
        if len(ends) >= 2:
            found.append((a, b, [x - y for x, y in ends], intervals.paired(*zip(*ends, strict=True))))
    adjusted = intervals.holm([pair.p for *_, pair in found])
    return [(*line, p) for line, p in zip(found, adjusted, strict=True)]


def differences(results: list[dict], scale: str, pairs: dict[tuple[str, str], str] = PAIRS) -> list[dict]:
    """The same as rows of a table."""
    return [
        {
            "pair": f"{a} - {b}",
            "what differs": pairs[a, b],
            "seeds": len(values),
            "difference": f"{pair.mean:.3f} [{pair.low:.3f}, {pair.high:.3f}]",
            "p": f"{pair.p:.2g}",
            "p, Holm": f"{p:.2g}",
            "mean": pair.mean,
            "adjusted": p,
        }
        for a, b, values, pair, p in paired_lines(results, scale, pairs)
    ]


def trend(runs: list[dict], key: str) -> tuple[float, float]:
    """Mean of a curve over the first and over the last hundred updates."""
    ends = [(statistics.mean(r[key][:10]), statistics.mean(r[key][-10:])) for r in runs]
    return statistics.mean(a for a, _ in ends), statistics.mean(b for _, b in ends)


def verdict_of(runs: list[dict]) -> str:
    """What became of a line, in words that its numbers choose."""
    below, slow, n = sum(study.gained(r) < 0 for r in runs), sum(study.fallen(r) > SLOW for r in runs), len(runs)
    if below == n:
        return "collapses: every run ends below its start"
    if below:
        return f"collapses in {below} of {n} runs"
    if slow == n:
        return f"rises and falls back: every run ends more than {SLOW} below its peak"
    if slow:
        return f"rises; {slow} of {n} runs end more than {SLOW} below their peak"
    return f"rises, and no run ends more than {SLOW} below its peak"


NOISY = 0.2  # nats of spread in the first hundred updates, from which on a line has a noisy ratio
SHARED, FIXED = "grpo, shared masks", "grpo, one plan"
CHAIN = (FRESH, "stabledrl", SHARED, f"grpo, {MASKING}", f"stabledrl, {MASKING}")


def link_row(scale: str, name: str, runs: list[dict]) -> dict:
    """What the four links of the argument are, in one line."""
    first, last = trend(runs, "spread")
    return {
        "ratio": scale,
        "line": name,
        "spread, first hundred": f"{first:.2f}",
        "bypass, first hundred": f"{100 * trend(runs, 'bypass')[0]:.0f} %",
        "largest gradient norm": largest(runs),
        "spread, last hundred": f"{last:.2f}",
        "what became of it": verdict_of(runs),
    }


Lines = dict[tuple[str, str], list[dict]]  # by scale and name, the runs


def unclipped(results: list[dict]) -> Lines:
    """The lines of the argument: without those with another clip, which were run after all others."""
    lines = [(scale, name) for scale in study.SCALES for name in study.rows(scale) if not name.endswith(study.LATER)]
    return {(scale, name): study.of_line(results, scale, name) for scale, name in lines}


def chain(results: list[dict]) -> str:
    """The argument link by link: a table of five lines, and what all lines without a clip of the norm say of each link."""
    found = unclipped(results)
    rows = [link_row(*key, found[key]) for key in itertools.product(study.SCALES, CHAIN) if found.get(key)]
    links = "\n".join(bullet(text) for text in (passed(found), moved(found), grown(found)))
    return f"{tables.markdown_table(rows, list(rows[0]))}\n\n{links}{falls(found)}"


def bullet(text: str) -> str:
    """One item of a list, broken into lines."""
    return textwrap.fill(text, 125, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def bypass_range(lines: list[list[dict]]) -> str:
    """The share that passes GRPO's clip in the first hundred updates of several lines."""
    shares = [100 * trend(runs, "bypass")[0] for runs in lines]
    return f"{min(shares):.2g} to {max(shares):.2g} %"


def noisy_and_quiet(found: Lines) -> tuple[list[list[dict]], list[list[dict]]]:
    """Of the lines of the argument those whose masks are fresh, and those whose masks are shared."""
    fresh, shared = [], []
    for scale, name in itertools.product(study.SCALES, CHAIN):
        (shared if name == SHARED else fresh).extend([runs] if (runs := found[scale, name]) else [])
    return fresh, shared


PASSED = """**The tail passes the clip** where masks are fresh: {fresh} of the responses in the first hundred updates of
the lines above. Where they are shared it is {shared}, but not nothing: `{name}` on the {scale} has up to {most:.1f} % in ten
updates and a gradient of {norm}; {slow} of its {runs} runs end more than {limit} below their peak."""


def passed(found: Lines) -> str:
    """The first link: how much passes the clip where masks are fresh, and where they are shared."""
    fresh, shared = noisy_and_quiet(found)
    runs = max(shared, key=lambda line: trend(line, "bypass")[0])
    return PASSED.format(
        fresh=bypass_range(fresh),
        shared=bypass_range(shared),
        name=SHARED,
        scale=runs[0]["scale"],
        most=100 * max(max(r["bypass"]) for r in runs),
        norm=largest(runs),
        slow=sum(study.fallen(r) > SLOW for r in runs),
        runs=len(runs),
        limit=SLOW,
    )


def below_start(runs: list[dict]) -> bool:
    """True if a run of the line ends below its start."""
    return any(study.gained(r) < 0 for r in runs)


FALL, NEARBY = 0.1, (0.05, 0.2)  # ten updates whose reward is this far below the best hundred are a fall


def fall(run: dict, depth: float = FALL) -> int | None:
    """The place of the first ten updates, from the best hundred on, whose reward is more than ``depth`` below theirs."""
    count = min(100 // run["every"], len(run["reward"]))
    means = [statistics.mean(run["reward"][i : i + count]) for i in range(len(run["reward"]) - count + 1)]
    peak = means.index(max(means))
    return next((i for i in range(peak, len(run["reward"])) if run["reward"][i] < means[peak] - depth), None)


def rises_and_falls(runs: list[dict]) -> bool:
    """True if the best hundred updates of every run are above its start by more than FALL, and a fall follows them."""
    return all(r["final_reward"] + study.fallen(r) - r["reward"][0] > FALL and fall(r) for r in runs)


def norms(run: dict, depth: float = FALL) -> tuple[float, float, float]:
    """The largest gradient norm of the first hundred updates, of those before the fall, and of the fall and what follows."""
    at = fall(run, depth) or 0
    return max(run["norm"][:10]), max(run["norm"][:at]), max(run["norm"][at:])


def spikes_row(run: dict) -> dict:
    """Gradient norms of a run before and after its fall."""
    (first, before, after), at = norms(run), run["every"] * (fall(run) or 0)
    return {
        "seed": run["seed"],
        "largest norm, first hundred": f"{first:.2g}",
        "before the fall": f"{before:.3g}",
        "first updates of the fall": f"{at + 1} to {at + run['every']}",
        "from there on": f"{after:.3g}",
        "reward, best hundred": f"{run['final_reward'] + study.fallen(run):.2f}",
        "at the end": f"{run['final_reward']:.2f}",
    }


def spikes(runs: list[dict], depth: float = FALL) -> tuple[str, int]:
    """Norms before the fall over the largest of the first hundred updates; in how many runs the largest follows."""
    found = [norms(run, depth) for run in runs]
    return spanned([before / first for first, before, _ in found]), sum(after > before for _, before, after in found)


def spanned(values: list[float]) -> str:
    """From the least to the largest."""
    return f"{min(values):,.0f} to {max(values):,.0f}"


MOVED = "**One large gradient moves the policy**: {lost} lines have a run that ends below its start."
ROSE = """ Of these `{name}` on the {scale} rises first. Spikes precede its fall (the first ten updates more than {depth} below
the best hundred), norms of up to {times} times the largest of the first hundred updates. The largest of all follow it, in
{after} of {runs} runs (table; {nearby}). That a spike makes a run fall, these runs do not show."""
LARGE = """ And the size of a norm does not tell which run is lost: those of `{name}` on the {scale} reach {times} times the
largest of the first hundred, and none of its runs ends below its start."""


def moved(found: Lines) -> str:
    """The second link: gradients before and after the fall of the lines that rise first, and where others are as large."""
    there = {key: runs for key, runs in found.items() if runs}
    lost = [key for key in there if below_start(there[key])]
    said, least = MOVED.format(lost=len(lost)), 0.0
    for scale, name in (key for key in lost if rises_and_falls(there[key])):
        runs = there[scale, name]
        (times, after), near = spikes(runs), {depth: spikes(runs, depth) for depth in NEARBY}
        nearby = "; ".join(f"with {depth}: {told} times, {count} of {len(runs)}" for depth, (told, count) in near.items())
        words = {"depth": FALL, "times": times, "after": after, "runs": len(runs), "nearby": nearby}
        said += ROSE.format(name=name, scale=scale, **words)
        least = max(before / first for first, before, _ in map(norms, runs))
    for scale, name in there:
        times = [r["norm_max"] / max(r["norm"][:10]) for r in there[scale, name]]
        if 0 < least <= min(times) and (scale, name) not in lost:
            said += LARGE.format(times=spanned(times), name=name, scale=scale)
    return said


def falls(found: Lines) -> str:
    """The runs of the lines that rise and then have one below its start."""
    lines = [runs for runs in found.values() if runs and below_start(runs) and rises_and_falls(runs)]
    rows = [spikes_row(run) for runs in lines for run in runs]
    head = "Gradient norms of `{method}` on the {scale}:".format(**lines[0][0]) if lines else ""
    return f"\n\n{head}\n\n{tables.markdown_table(rows, list(rows[0]))}" if rows else ""


GROWN = """**A policy that has moved has noisier ratios**: of the {noisy} lines that have a ratio whose spread is above {limit}
nats in the first hundred updates, it grows in {grown}, in {every} of them in every run{shown}. Growth alone does not
predict ruin: of these {grown}, {grown_lost} with a run that ends below its start, of the {fallen} others
{fallen_lost}. Nor does the spread show the link by itself: noise and what the policy really moved are both in it, and
after a fall the last hundred updates are those of a ruined policy."""


def grown(found: Lines) -> str:
    """The last link: in how many lines with a noisy ratio the spread grows, and what became of them."""
    noisy = {key: runs for key, runs in found.items() if runs and key[1] not in NO_SCALE and trend(runs, "spread")[0] > NOISY}
    more = {key: runs for key, runs in noisy.items() if spread_grows(runs)}
    every = [key for key in more if all(spread_grows([r]) for r in more[key])]
    shown = [key for key in every if key[1] in CHAIN and key[1].startswith("grpo")]
    said = ["`{}` on the {} ({:.2f} to {:.2f} nats)".format(*key[::-1], *trend(more[key], "spread")) for key in shown]
    lost = [key for key in noisy if below_start(noisy[key])]
    return GROWN.format(
        limit=NOISY,
        noisy=len(noisy),
        grown=len(more),
        every=len(every),
        shown=f", {' and '.join(said)} among these" if said else "",
        grown_lost=sum(key in more for key in lost),
        fallen=len(noisy) - len(more),
        fallen_lost=sum(key not in more for key in lost),
    )


def spread_grows(runs: list[dict]) -> bool:
    """True if the last hundred updates have more of it than the first."""
    first, last = trend(runs, "spread")
    return last > first


TWO = """## Two masked states

Lines that draw two stratified states a response, as the row `stabledrl` does, for twice the network calls. `grpo, two states`
and `stabledrl, two states, no sandwich` were run after all others, to tell variance and sandwich apart; Holm's correction is
over these pairs of a scale.

{tables}

Of two numbers the first is for the ratio of the token mean, the second for that of the sequence.

- **Less noise.** In the first hundred updates the log-ratios of GRPO spread by {noise} nats, with one state by {noise_one}.
- **GRPO** ends at {grpo} with two states, at {grpo_one} with one: {grpo_gain}. Of its runs with two, {grpo_lost} end below
their start; the largest gradient norms are {grpo_norm}, with one state {grpo_norm_one}.
- **StableDRL without its sandwich** ends at {plain} with two states, at {plain_one} with one: {plain_gain}.
- **The sandwich**, with two states, lifts it to {both}: {both_gain}.
- **What the cure is worth then**: StableDRL without its sandwich less GRPO, both with two states, is {cure_gain}."""


def two_states(results: list[dict]) -> str:
    """What a second state does, what the sandwich does, and what the cure is worth with both; "" where a line has not run."""
    there = {name: [study.of_line(results, scale, name) for scale in study.SCALES] for pair in TWO_PAIRS for name in pair}
    if not all(len(runs) > 1 for lines in there.values() for runs in lines):
        return ""
    rows = [differences(results, scale, TWO_PAIRS) for scale in study.SCALES]
    columns = ("pair", "what differs", "seeds", "difference", "p", "p, Holm")
    told = {pair: " and ".join(map(judged, lines)) for pair, lines in zip(TWO_PAIRS, zip(*rows, strict=True), strict=True)}
    end = {name: " and ".join(interval([r["final_reward"] for r in runs]) for runs in lines) for name, lines in there.items()}
    words = {"grpo": end[ONE_MORE], "grpo_one": end[FRESH], "plain": end[PLAIN], "plain_one": end["stabledrl"]}
    words |= dict(zip(("grpo_gain", "plain_gain", "both_gain", "cure_gain"), told.values(), strict=True))
    for key, name in (("", ONE_MORE), ("_one", FRESH)):
        words[f"noise{key}"] = " and ".join(f"{trend(runs, 'spread')[0]:.2f}" for runs in there[name])
        words[f"grpo_norm{key}"] = " and ".join(f"{max(r['norm_max'] for r in runs):.3g}" for runs in there[name])
    words["grpo_lost"] = " and ".join(f"{sum(study.gained(r) < 0 for r in runs)} of {len(runs)}" for runs in there[ONE_MORE])
    head, *items = TWO.split("\n- ")
    said = "\n".join(bullet(item.format(both=end[SANDWICHED], **words)) for item in items)
    return head.format(tables=by_scale(rows, columns)) + "\n" + said + "\n\n"


def by_scale(rows: list[list[dict]], columns: tuple[str, ...]) -> str:
    """A table of pairs a scale."""
    parts = zip(study.SCALES, rows, strict=True)
    return "\n\n".join(f"Ratio of the {scale}:\n\n{tables.markdown_table(pairs, columns)}" for scale, pairs in parts)


def judged(row: dict) -> str:
    """A difference, and whether Holm's correction leaves it."""
    told = f"Holm p = {row['p, Holm']}"
    return f"{row['difference']} ({told if row['adjusted'] < LEVEL else f'undecided, {told}'})"


def ends(results: list[dict]) -> str:
    """What follows for a user, with the differences that it rests on."""
    words = {"n": study.REUSE, "rate": study.OPTIMIZER.learning_rate}
    for key, (name, other) in FOLLOWS.items():
        both = [study.of_line(results, scale, name) for scale in study.SCALES]
        words |= {f"{key}_ends": " and ".join(interval([r["final_reward"] for r in runs]) for runs in both)}
        words |= {f"{key}_lost": sum(study.gained(r) < 0 for runs in both for r in runs), f"{key}_runs": sum(map(len, both))}
        words |= {f"{key}_calls": forwards(name)}
        words |= {f"{key}_norms": " and ".join(f"{max(r['norm_max'] for r in runs):.3g}" for runs in both)}
        if other:
            words |= {f"{key}_lifts": " and ".join(lifted(results, scale, (name, other)) for scale in study.SCALES)}
    words |= without_ratio(results)
    said = [item.format(**words) for item in ENDS.split("\n- ")[1:]]
    return ENDS.partition("- ")[0] + "\n".join(bullet(text) for text in said if text)


CASES = [(scale, name) for scale in study.SCALES for name in (FRESH, f"grpo, {MASKING}")]  # GRPO with a noisy ratio
FURTHER = """## A further clip

Two clips that users of GRPO have anyway, and no clip at all, on its noisy lines; run after all others, so that Holm's
correction is over the pairs of a table here alone.

{clips}

{tables}

What follows from it is in [notebook 06](../notebooks/06_stabledrl.ipynb#Whose-large-ratios?-Two-by-two).

"""
WHOSE = """## Whose large ratios?

Each half of the dual clip by itself, in GRPO without any other clip; run after the lines above, with a correction of its own.

{clips}

{tables}

"""


FURTHER_CLIPS = {
    study.CLIPPED: "the gradient's norm is clipped at 0.2, as in StableDRL's released code",
    study.DUAL: f"PPO's repair of the bypass (8.6): bad answers of ratios above {study.BOUND:g}, verl's, have no gradient",
    study.FREE: "every answer counts by its ratio, good ones, too: the same noise, and no bypass for the bad ones alone",
}


HALVES = {
    study.GOOD: "good answers of ratios above 1.2 have no gradient, as in GRPO; every bad one counts by its ratio",
    study.BAD: f"bad answers of ratios above {study.BOUND:g} have no gradient; every good one counts by its ratio",
}


def further(results: list[dict], template: str, clips: dict[str, str], pairs: dict[tuple[str, str], str]) -> str:
    """What further clips make of GRPO; "" where a line has not run."""
    lines = {clip: [study.of_line(results, scale, name + clip) for scale, name in CASES] for clip in clips}
    if not all(len(runs) > 1 for each in lines.values() for runs in each):
        return ""
    columns = ("pair", "what differs", "difference", "p", "p, Holm")
    rows = [differences(results, scale, pairs) for scale in study.SCALES]
    said = "\n".join(bullet(f"**{clip[2:]}**: {clips[clip]}. {collapsed(each)}") for clip, each in lines.items())
    return template.format(clips=said, tables=by_scale(rows, columns))


def further_clips(results: list[dict]) -> str:
    """What a clip of the gradient norm, the dual clip and no clip make of GRPO, and each half of the dual clip."""
    return further(results, FURTHER, FURTHER_CLIPS, further_pairs()) + further(results, WHOSE, HALVES, half_pairs())


def half_pairs() -> dict[tuple[str, str], str]:
    """Each half of the dual clip less no clip, and the dual clip less the half that drops bad answers."""
    pairs = {}
    for name in (FRESH, f"grpo, {MASKING}"):
        pairs[name + study.GOOD, name + study.FREE] = "large ratios of good answers dropped"
        pairs[name + study.BAD, name + study.FREE] = "large ratios of bad answers dropped"
        pairs[name + study.DUAL, name + study.BAD] = "those of good answers as well"
    return pairs


def further_pairs() -> dict[tuple[str, str], str]:
    """Each further change of the clip less GRPO's own, and StableDRL less GRPO with the dual clip."""
    pairs = {}
    for name, stable in ((FRESH, "stabledrl"), (f"grpo, {MASKING}", f"stabledrl, {MASKING}")):
        pairs[name + study.CLIPPED, name] = "a clip of the gradient's norm"
        pairs[name + study.DUAL, name] = "the dual clip"
        pairs[name + study.FREE, name] = "no clip"
        pairs[stable, name + study.DUAL] = "StableDRL's weights, or the dual clip"
    return pairs


def collapsed(lines: list[list[dict]]) -> str:
    """How many runs of some lines collapse, and the largest norm among them."""
    lost = sum(study.gained(r) < 0 for runs in lines for r in runs)
    norm = max(r["norm_max"] for runs in lines for r in runs)
    return f"Of {sum(map(len, lines))} runs {lost} collapse; the largest gradient norm is {norm:.2g}."


def without_ratio(results: list[dict]) -> dict:
    """What the line without a ratio cost and reached, and how far StableDRL with fresh masks is from it."""
    runs = study.of_line(results, "sequence", "reinforce")
    *_, gap, p = next(x for x in paired_lines(results, "sequence") if x[:2] == ("stabledrl", "reinforce"))
    return {
        "none_calls": forwards("reinforce"),
        "none_end": interval([r["final_reward"] for r in runs]),
        "none_norm": max(r["norm_max"] for r in runs),
        "none_gap": f"{gap.mean:.3f} [{gap.low:.3f}, {gap.high:.3f}]",
        "none_p": p,
    }


def lifted(results: list[dict], scale: str, pair: tuple[str, str]) -> str:
    """The difference of a pair, and whether it is left after Holm's correction."""
    *_, gap, p = next(found for found in paired_lines(results, scale) if found[:2] == pair)
    return f"{gap.mean:.3f} [{gap.low:.3f}, {gap.high:.3f}]" + ("" if p < LEVEL else ", not told apart after Holm")


def forwards(name: str) -> str:
    """What a line costs after the rollout at the study's number of updates, in forwards of K states: (2 n + 1) K = 9 K."""
    told = cards.calls(study.rows("sequence")[name])["n updates"]
    total = sum(cards.count(term, T=0, K=1, n=study.REUSE) for term in told.values())
    return f"{cards.total(told).removeprefix('T + ')} = {total} K"


FOLLOWS = {  # of each line its reward at the end and its cost; of pairs the difference
    "fresh": (FRESH, ""),
    "paired": (SHARED, FRESH),
    "fixed": (FIXED, FRESH),
    "stable": ("stabledrl", FRESH),
    "both": ("stabledrl, shared masks", ""),
    "clip": ("clip-only", ""),
    "norm": ("self-norm-only", ""),
    "dual": (FRESH + study.DUAL, ""),
    "short": (FRESH + study.CLIPPED, ""),
}
ENDS = """## What follows

Of two numbers the first is for the ratio of the token mean, the second for that of the sequence.

- **Take the noise out first.** Masks that old and new weights share lift GRPO: a new plan for each update (`refresh:
paired`) by {paired_lifts}, one plan for all updates (`refresh: fixed`) by {fixed_lifts}. They end at {paired_ends}, and
at {fixed_ends}; these two were not tested against each other.
- **What that costs**, by the cards of the rows, in forwards a response after the rollout, with K states and n = {n}
updates: fresh masks {fresh_calls}; `paired`, where the old weights score every plan, {paired_calls}; `fixed`
{fixed_calls}.
- **Where it cannot be taken out, bear it**: cap and self-normalisation lift GRPO by {stable_lifts}.
- **Both together**: StableDRL with shared masks (`refresh: paired`) ends at {both_ends}, with gradient norms of at most
{both_norms}, where GRPO with shared masks has up to {paired_norms}. Sharing takes out the noise; what the weights have moved
is still in the ratio, and a bound on the gradient is another thing.
- **A further clip** ([table](#a-further-clip)): with fresh masks GRPO and PPO's dual clip end at {dual_ends}, GRPO and a clip
of the gradient's norm at 0.2 at {short_ends}, GRPO with neither at {fresh_ends}.
- **Or no ratio at all.** On the sequence `reinforce`, without an old score, for n K = 4 K forwards ({none_calls} as run, with a
first pass for a sandwich that one state makes idle), ends at {none_end} with norms of at most {none_norm:.2g}; `stabledrl`
less it is {none_gap}, Holm p = {none_p:.2g}. Its price is that of the {n} updates on a rollout all
but the first are off policy; and this is one toy, at one learning rate, {rate:g},
that was not tuned for any line: another rate could change who is ahead.
- **Each half alone.** By accounts of the paper both collapse: the cap alone in a "boundary-hitting regime", in which the
scale of the gradient swings between the bounds of the clip and spoils the moments of AdamW; self-normalisation alone
because one outlier takes nearly all the weight. Here `clip-only` ends at {clip_ends}, `self-norm-only` at {norm_ends}; of
their {clip_runs} and {norm_runs} runs {clip_lost} and {norm_lost} end below their start. **These are verdicts at {n}
updates on a rollout, with one masked state and no clip of the gradient norm, not of the published setting**: that has 2
updates, two states of blocks and a clip at 0.2, and no line here has all three. The moments of AdamW were not recorded.
- All of it in one toy whose setting was searched for. How noisy the ratios of a network of full size are was not measured."""


def not_run(results: list[dict]) -> str:
    """One sentence on the lines that have no runs, at both scales or at one."""
    left = {scale: [n for n in study.rows(scale) if not study.of_line(results, scale, n)] for scale in study.SCALES}
    everywhere = [name for name in next(iter(left.values())) if all(name in names for names in left.values())]
    left = {scale: [name for name in names if name not in NO_SCALE] for scale, names in left.items()}
    said = [*everywhere]
    for scale, names in left.items():
        said += [f"{name} (ratio of the {scale})" for name in names if name not in everywhere]
    return f"Not run: {'; '.join(said)}.\n\n" if said else ""


def section(results: list[dict], scale: str) -> str:
    """A scale: table, pairs, reading."""
    lines = {name: study.of_line(results, scale, name) for name in study.rows(scale)}
    rows = [table_row(name, runs) for name, runs in lines.items() if runs]
    pairs = differences(results, scale)
    columns = ("pair", "what differs", "seeds", "difference", "p", "p, Holm")
    parts = [f"## Ratio of the {scale}", tables.markdown_table(rows, COLUMNS)]
    parts += ["Paired by seed:", tables.markdown_table(pairs, columns)] if pairs else []
    return "\n\n".join(parts)


def by_seed(results: list[dict], scale: str) -> str:
    """The reward at the end of every run of a scale."""
    lines = {name: study.of_line(results, scale, name) for name in study.rows(scale)}
    seeds = sorted({r["seed"] for runs in lines.values() for r in runs})
    cells = {name: {f"seed {r['seed']}": f"{r['final_reward']:.3f}" for r in runs} for name, runs in lines.items() if runs}
    rows = [{"line": name} | ends for name, ends in cells.items()]
    return f"Ratio of the {scale}:\n\n{tables.markdown_table(rows, ('line', *(f'seed {seed}' for seed in seeds)))}"


# ====================================================================================================== what a weight says

PUBLISHED = 256


def case(lines: list[dict], **words) -> dict:
    """The one line with these values."""
    (found,) = (line for line in lines if all(line[key] == value for key, value in words.items()))
    return found


def signal_row(lines: list[dict], length: int, states: int, scale: str, masks: str) -> dict:
    """A case under both drifts."""
    nat, token = (case(lines, length=length, states=states, scale=scale, masks=masks, drift=d) for d in weight.DRIFTS)
    ratio = lambda w: f"{w[2] / w[0]:.3g}" if w[2] < 1e4 * w[0] else "> 10,000"  # noqa: E731
    return {
        "ratio": scale,
        "masks": masks,
        "tokens": length,
        "states": states,
        "std of the log-ratio": f"{nat['deviation']:.3g}",
        "AUC, 1 nat a response": f"{nat['auc']:.3f}",
        "AUC, 0.1 nat a token": f"{token['auc']:.3f}",
        "mean weight, +1 over -1": ratio(nat["mean_weight"]),
        "the same without noise": ratio(nat["exact_weight"]),
        "ratios at the cap": f"{100 * nat['at_cap']:.0f} %",
        "weights of nothing": f"{100 * nat['nothing']:.0f} %",
        "effective size": f"{nat['effective_size']:.1f}",
    }


def signal_tables(lines: list[dict]) -> str:
    """At the published length, and over the lengths at two states with fresh masks."""
    cells = [(scale, masks, k) for scale in weight.SCALES for masks in weight.MASKS for k in weight.STATES]
    at = [signal_row(lines, PUBLISHED, k, scale, masks) for scale, masks, k in cells]
    over = [signal_row(lines, length, 2, scale, "fresh") for scale in weight.SCALES for length in weight.LENGTHS]
    return "\n\n".join(
        [
            f"At {PUBLISHED} tokens:",
            tables.markdown_table(at, tuple(at[0])),
            "Two states, fresh masks, as the length grows:",
            tables.markdown_table(over, tuple(over[0])),
        ]
    )


READING = """- **Sequence, fresh masks, two states**, the row `stabledrl` as it is: the log-ratio has a deviation of
  {blind[deviation]:.0f} nats. {blind[at_cap]:.0%} of the weights are at the cap and {blind[nothing]:.0%} are nothing:
  a group of {group} counts as one of {blind[effective_size]:.1f}. A true log-ratio of +1 instead of -1 moves the mean
  weight from {low:.5f} to {high:.5f} (standard error {blind[mean_weight_error]:.6f}; without noise from {low_exact:.4f}
  to {high_exact:.4f}), and the better response has the larger weight with probability {blind[auc]:.3f}.
- **Token mean, fresh masks**: no weight is lost ({mean[at_cap]:.0%} at the cap, {mean[nothing]:.0%} nothing,
  effective size {mean[effective_size]:.1f}). But a division by the length shows nothing that was hidden:
  {mean[auc]:.3f} at one nat a response, {far[auc]:.3f} at 0.1 nat a token. That these weights move little is so in this
  model; a trained network is noisier (**Measured**, below). Eight states, four times the calls, make the second number
  {many[auc]:.3f}.
- **Token mean, shared masks**: {shared[auc]:.3f} in both, under the assumption above. The masks decide what a weight
  says, the scale decides whether the cap cuts it off: at 0.1 nat a token the sequence's weights are {all_low:.4f} and
  {all_high:.4f} even without noise, those of the token mean {mean_low:.4f} and {mean_high:.4f}.
  `tiny_configs/llada_8b_full.yaml` therefore has `normalizer: kept_length` and `refresh: paired`."""


def signal_reading(lines: list[dict]) -> str:
    """What follows for the config of full size, with the numbers of the tables."""
    at = lambda drift, **words: case(lines, length=PUBLISHED, drift=drift, **words)  # noqa: E731
    nat, token = weight.DRIFTS
    blind, mean = (at(nat, states=2, masks="fresh", scale=scale) for scale in ("sequence", "token mean"))
    far, many = (at(token, states=k, masks="fresh", scale="token mean") for k in (2, 8))
    both = [at(drift, states=2, masks="shared", scale="token mean") for drift in weight.DRIFTS]
    shared = min(both[::-1], key=lambda line: line["auc"])  # of equal ones that of the larger drift
    exact = at(token, states=2, masks="shared", scale="sequence")["exact_weight"]
    return READING.format(
        group=weight.GROUP,
        **{"blind": blind, "mean": mean, "far": far, "many": many, "shared": shared},
        **{"low": blind["mean_weight"][0], "high": blind["mean_weight"][2]},
        **{"low_exact": blind["exact_weight"][0], "high_exact": blind["exact_weight"][2]},
        **{"all_low": exact[0], "all_high": exact[2]},
        **{"mean_low": shared["exact_weight"][0], "mean_high": shared["exact_weight"][2]},
    )


# What notebook 06 prints of a trained network: nats, of K states; with the ratio of the token mean, and how many of 8 count.
TRAINED = {1: "15.80 [13.22, 18.39]", 2: "12.35 [9.74, 14.96]"}
TRAINED_MEANS = {"ELBO, K = 2": ("1.10 [0.88, 1.32]", "5.7"), "blocks of 4, K = 2": ("1.81 [1.66, 1.96]", "4.3")}


def measured_reading(results: list[dict], lines: list[dict]) -> str:
    """What the runs say of the model and of its assumption: the spread of log-ratios in the first hundred updates."""
    fresh, shared = (trend(study.of_line(results, "sequence", name), "spread")[0] for name in (FRESH, "grpo, shared masks"))
    drift = next(iter(weight.DRIFTS))
    at = lambda states: case(lines, drift=drift, length=study.LENGTH, states=states, scale="sequence", masks="fresh")  # noqa: E731
    model, two = (at(states)["deviation"] for states in (1, 2))
    means = [case(lines, drift=drift, length=n, states=2, scale="token mean", masks="fresh") for n in (study.LENGTH, PUBLISHED)]
    (short, long), (mean, blocks) = (line["deviation"] for line in means), TRAINED_MEANS.values()
    return (
        f"- **Measured**: in the first hundred updates of the runs above, {study.LENGTH} tokens and one state, the log-ratios\n"
        f"  of `grpo` on the sequence spread by {fresh:.2f} nats with fresh masks, where this model has {model:.1f}, and by\n"
        f"  {shared:.2f} with shared ones, what the policy really moved included: {fresh / shared:.0f} times less. A trained\n"
        "  model has more noise than this one, by redraws at equal weights on answers of 10 to 12 tokens, from right to\n"
        f"  left ([notebook 06](../notebooks/06_stabledrl.ipynb)): {TRAINED[1]} nats with one state, {TRAINED[2]} with two,\n"
        f"  where this model has {model:.2f} and {two:.2f}. Of token means, the scale that the released code exponentiates,\n"
        f"  two states of the ELBO have {mean[0]} nats, and its blocks {blocks[0]}, where this model has {short:.2f} at\n"
        f"  {study.LENGTH} tokens and {long:.2f} at {PUBLISHED}: of a group of 8, cap 5, then {mean[1]} and {blocks[1]}\n"
        "  count (effective size). No number here says that this noise is gone at the published length."
    )


COLOURS = ("#56B4E9", "#0072B2", "#009E73", "#000000")


def signal_figure(lines: list[dict], path: Path) -> None:
    """AUC over the length for both drifts and both scales, and the effective group size."""
    fig = Figure(figsize=(9.0, 3.6), dpi=110, layout="constrained")
    axes = fig.subplots(1, 3)
    for axis, drift in zip(axes, weight.DRIFTS, strict=False):
        for k, colour in zip(weight.STATES, COLOURS, strict=True):
            curve(axis, lines, "auc", colour, f"fresh, {k} state" + "s" * (k > 1), drift=drift, states=k, masks="fresh")
            curve(axis, lines, "auc", colour, None, ":", "sequence", drift=drift, states=k, masks="fresh")
        curve(axis, lines, "auc", "#D55E00", "shared, 2 states (assumed)", "--", drift=drift, states=2, masks="shared")
        axis.plot([], [], ":", color="#000000", lw=1.3, label="dotted: fresh, ratio of the sequence")
        axis.set(title=f"drift of\n{drift}", ylabel="P(better response weighs more)", ylim=(0.45, 1.02))
    for scale, colour in zip(weight.SCALES, ("#CC79A7", "#999999"), strict=True):
        drift = next(iter(weight.DRIFTS))
        curve(axes[2], lines, "effective_size", colour, scale, drift=drift, states=2, masks="fresh", scale=scale)
    axes[2].set(title=f"group of {weight.GROUP},\nfresh masks, 2 states", ylabel="effective size", ylim=(0, weight.GROUP + 0.5))
    for axis in axes:
        axis.set(xscale="log", xlabel="tokens")
        axis.set_xticks(weight.LENGTHS, list(map(str, weight.LENGTHS)))
        axis.minorticks_off()
        axis.grid(color="#dddddd", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    axes[2].legend(frameon=False, fontsize=8, title="ratio of the", title_fontsize=8)
    FigureCanvasAgg(fig).print_png(path)


def curve(axis, lines: list[dict], key: str, colour: str, label: str | None, style="-", scale="token mean", **words) -> None:
    """A quantity over the lengths."""
    y = [case(lines, length=length, scale=scale, **words)[key] for length in weight.LENGTHS]
    axis.plot(weight.LENGTHS, y, style, marker="o", ms=3, lw=1.3, color=colour, label=label)


# ========================================================================================================== the short page

CHANGED = {  # the lines of the short table, and what is changed in the first
    FRESH: "nothing",
    SHARED: "masks shared",
    FIXED: "masks shared, one draw for all updates",
    "clip-only": f"ratio cut at {weight.CAP:g}",
    "self-norm-only": "ratio over the sum",
    "stabledrl": "cut and sum",
    "stabledrl, two states": "cut, sum, sandwich, two states",
    "reinforce": "no ratio",
    "grpo, mean field": "mean field, prompts as they are",
    f"grpo, {MASKING}": "mean field",
    f"stabledrl, {MASKING}": "mean field, cut and sum",
}
COMPARED = {  # the pairs of the short table, in short
    (SHARED, FRESH): "`grpo`, shared masks - fresh",
    ("stabledrl", FRESH): "`stabledrl` - `grpo`, fresh masks",
    ("stabledrl", "clip-only"): "`stabledrl` - cut alone",
    ("stabledrl", "self-norm-only"): "`stabledrl` - sum alone",
    ("stabledrl", SHARED): "`stabledrl` - `grpo`, shared masks",
    ("stabledrl", "reinforce"): "`stabledrl` - no ratio",
}


def computed_table(lines: list[dict]) -> str:
    """What a weight says at the published length with two states."""
    rows = []
    for scale, masks in itertools.product(weight.SCALES[::-1], weight.MASKS):
        nat = case(lines, length=PUBLISHED, states=2, scale=scale, masks=masks, drift=next(iter(weight.DRIFTS)))
        row = {
            "ratio": scale,
            "masks": masks,
            "spread, nats": f"{nat['deviation']:.3g}",
            "better weighs more": f"{nat['auc']:.3f}",
        }
        rows.append(
            row | {"at the cut": f"{nat['at_cap']:.0%}", f"effective size, of {weight.GROUP}": f"{nat['effective_size']:.1f}"}
        )
    return tables.markdown_table(rows, tuple(rows[0]))


def reward_table(results: list[dict]) -> str:
    """Rewards at the end of a few lines at both scales."""
    rows = []
    for name, changed in CHANGED.items():
        there = {scale: study.of_line(results, scale, name) for scale in study.SCALES}
        row = {"line": f"`{name}`", "changed": changed}
        row |= {scale: interval([r["final_reward"] for r in runs]) if runs else "" for scale, runs in there.items()}
        lost = [f"{sum(study.gained(r) < 0 for r in runs)}/{len(runs)}" for runs in there.values() if runs]
        rows.append(row | {"collapse": ", ".join(lost)})
    return tables.markdown_table(rows, tuple(rows[0]))


def compared_table(results: list[dict]) -> str:
    """Differences of a few pairs at both scales, each with what Holm's correction leaves of it."""
    rows = []
    for pair, words in COMPARED.items():
        row = {"compared": words}
        for scale in study.SCALES:
            one = next((x for x in differences(results, scale) if x["pair"] == " - ".join(pair)), None)
            row[scale] = one["difference"] if one else ""
            row[f"p, {scale}"] = one["p, Holm"] + ("" if one["adjusted"] < LEVEL else ", undecided") if one else ""
        rows.append(row)
    return tables.markdown_table(rows, tuple(rows[0]))


def loop_words(results: list[dict]) -> dict:
    """What the runs say of the links, in numbers."""
    found = unclipped(results)
    fresh, shared = noisy_and_quiet(found)
    grpo = {key: runs for key, runs in found.items() if runs and key[1].startswith("grpo")}
    noisy = {key: runs for key, runs in grpo.items() if trend(runs, "spread")[0] > NOISY}
    more = [key for key in noisy if spread_grows(noisy[key])]
    field = found["token mean", f"grpo, {MASKING}"]
    best = [r["final_reward"] + study.fallen(r) for r in field]
    times = [r["norm_max"] / max(r["norm"][:10]) for r in found["sequence", SHARED]]
    return {
        "passed": bypass_range(fresh),
        "passed_shared": bypass_range(shared),
        "noisy_lines": len(fresh),
        "worst": largest(found["sequence", FRESH]),
        "best": f"{min(best):.2f} to {max(best):.2f}",
        "spikes": spikes(field)[0],
        "near": spikes(field, NEARBY[0])[0],
        "unfallen": spanned([r["norm_max"] / max(r["norm"][:10]) for r in found["token mean", f"stabledrl, {MASKING}"]]),
        "field_end": interval([r["final_reward"] for r in field]),
        "field_lost": f"{sum(study.gained(r) < 0 for r in field)} of {len(field)}",
        "shared_times": spanned(times),
        "shared_lost": f"{sum(study.gained(r) < 0 for r in found['sequence', SHARED])} of {len(times)}",
        "noisy": len(noisy),
        "grown": len(more),
        "grown_lost": sum(below_start(noisy[key]) for key in more),
        "others": len(noisy) - len(more),
        "others_lost": sum(below_start(noisy[key]) for key in noisy if key not in more),
    }


def rest_words(results: list[dict]) -> dict:
    """The numbers of what follows."""
    calls = {"paired": SHARED, "fixed": FIXED, "fresh": FRESH, "none": "reinforce"}
    words = {f"{key}_calls": forwards(name).rpartition("= ")[2].replace(" ", "") for key, name in calls.items()}
    for key, name in (("shared", SHARED), ("both", "stabledrl, shared masks")):
        runs = study.of_line(results, "sequence", name)
        words |= {
            f"{key}_norm": f"{max(r['norm_max'] for r in runs):,.0f}",
            f"{key}_end": interval([r["final_reward"] for r in runs]),
        }
        words |= {f"{key}_slow": f"{sum(study.fallen(r) > SLOW for r in runs)} of {len(runs)}"}
    for key, clip in (("clip", study.CLIPPED), ("dual", study.DUAL), ("free", study.FREE)):
        gaps = (differences(results, scale, {(FRESH + clip, FRESH): ""}) for scale in study.SCALES)
        words |= {key: " and ".join(gap["difference"] for (gap,) in gaps)}
    more = (x for scale in study.SCALES for x in differences(results, scale, TWO_PAIRS) if x["pair"] == f"{ONE_MORE} - {FRESH}")
    return words | {"bound": study.BOUND, "second": " and ".join(map(judged, more))}


SHORT = """# Noise in the ratio

A method that reuses a rollout weighs each response by a *ratio*: its likelihood under the new weights over that under the
old. A masked diffusion model's likelihood is only estimated, from random masks: the ratio is the exponential of an estimate,
with its noise. **Why would noise collapse training, and what helps?**

**In short**, from one toy of {seeds} seeds: let old and new weights share their masks, or take no ratio at all; where the
noise must be borne, StableDRL's weights bear it, best with two states, and so does PPO's dual clip. That a
loop of noise and large gradients ruins the runs is not shown.

StableDRL (arXiv 2603.06743) answers with such a loop:

1. the exponential gives the noise a long tail;
2. the tail passes GRPO's clip: with a negative advantage a ratio above 1.2 keeps its whole gradient;
3. one large gradient moves the policy;
4. a policy that has moved has noisier ratios.

By its abstract a second cause joins in: division by a fixed group size lets the gradient's length fluctuate with the
weights. So it cuts the ratios, and divides by their sum.

Every line, run, caution: [measured](instability_measured.md); the argument: [notebook 06](../notebooks/06_stabledrl.ipynb).
Written by `python research/benchmarks/instability_page.py`.

## The words

- **Masked state**: the response with random positions hidden. From such states the ELBO is estimated, in place of the
  likelihood. The **mean field** hides the whole response; *prompt masking* hides prompt tokens, too, here anew for old and
  new (diffu-GRPO gives both the same).
- **Masks**: *fresh*, if old and new likelihood have their own; *shared*, if the same: then the noise of equal weights
  cancels.
- **Ratio** of the *sequence*, or of the *token mean*: its log divided by the length. The released code has token means.
- **Spread**: standard deviation of the log-ratio over responses, in nats.
- **Cut and sum**, StableDRL's weights: the ratio is cut at {cap:g} (released code: 5), then divided by the sum over
  the prompt's responses. The line `clip-only` has the cut alone, `self-norm-only` the sum alone.
- **Effective size**: how many responses of a group count, 1 over the sum of squared weights.
- **Collapse**, here: a run ends below its first ten updates.

## What noise leaves of a weight

Computed by `python research/benchmarks/weight_signal.py` for {published} tokens, two states, groups of {group}, cut and sum. Of two
responses whose true log-ratios are +1 and -1 nat, how often does the better weigh more? Ties count half.

{computed}

With fresh masks token means keep most of the group, and hardly the signal; shared masks keep both. If they lie 0.1 nat a token,
25.6 nats, to either side, fresh masks have {far[0]:.3f} (sequence) and {far[1]:.3f} (token mean). These integrals
have no interval; the last column is over {groups:,} groups. It is *assumed* that the noise is that of a [solved
model](instability_measured.md#how-much-a-weight-says), and, for shared masks, that an update scales all log-probabilities
alike. At 10 to 12 tokens, two states and the sequence that model has {model:.2f} nats, a trained network {trained}
(notebook 06: 16 puzzles, jackknife, from right to left; in low-confidence order 6.62 [4.50, 8.74]; medians 8.0 and 3.0).

## What was tried

`python research/benchmarks/instability.py`: a network of 50,000 weights learns to write {length} letters. Reward: the share that is
right, 0.125 by chance and {start:.2f} before training, one network for all.
{updates} updates, {reuse} a rollout of {batch} responses; one state,
fresh masks, AdamW at {rate:g}, no clip of the gradient norm, unless the second column says otherwise. All advantages are
rewards less the group's mean. Rewards of the last hundred updates, Student's 95 % intervals over {seeds} seeds, and the runs
that collapse (token mean, sequence):

{rewards}

![Largest gradient norm of each ten updates, and rewards; one line a run; right: the mean field](instability_short.png)

## What happened

Paired by seed; 95 % intervals, not corrected; p after Holm's correction over all pairs of the measured page with that ratio.

{compared}

On sequences GRPO with fresh masks {verdict}. On token means, the released scale, it {verdict_mean}. The loop:

- **The tail passes the clip**: {passed} of the responses in the first hundred updates of the {noisy_lines} lines that the
  [measured page](instability_measured.md#the-argument-link-by-link) names, {passed_shared} with shared masks.
- **One large gradient**: on sequences GRPO's norms reach {worst}; its reward sinks at once.
  In the noisy mean field, on token means, it learns, to {best}, then ends at {field_end}, {field_lost} runs below the start;
  spikes come before, {spikes} times the first hundred's largest norm (fall of 0.05: {near}; StableDRL, unfallen at 0.1:
  {unfallen}). That they cause it is not shown: GRPO with shared masks, on sequences, has {shared_times} times, and
  {shared_lost} runs collapse.
- **Noisier ratios**: of {noisy} lines of GRPO with a noisy ratio the spread grows in {grown}, of which {grown_lost} has a run
  that collapses; of the {others} others {others_lost} have. In the spread noise and movement are one.

## What follows here

- **Share the masks**. K states and n updates cost a response (3n - 1)K forwards, backwards not counted, if each update has new
  masks (`refresh: paired`; the first update needs no old value): {paired_calls} here;
  2nK = {fixed_calls} with one draw (`fixed`, line `grpo, one plan`); fresh ones (2n + 1)K = {fresh_calls}.
- **Or take no ratio**: nK = 4K, {none_calls} as run, with a first pass for a sandwich that is idle; off policy from the
  second update on.
- **Or bear it**: cut and sum; on token means either is not told from both.
- **Sharing bounds no gradient**: on sequences norms reach {shared_norm}; {shared_slow} runs end over {slow} below their best.
  StableDRL with shared masks has at most {both_norm}, and ends at {both_end}.
- **PPO's dual clip** drops bad answers whose ratio is above {bound:g}: GRPO gains {dual}; by **a clip of the norm**, 0.2,
  {clip}; by **no clip**
  {free} (token means, sequences; [corrected](instability_measured.md#a-further-clip)).
- **A second state**, for twice the calls: by {second}, of four pairs.

## What was not shown

- How often GRPO fails: the setting was searched for; the trials were not recorded.
- StableDRL's own setting: two updates a rollout, two states of blocks, a third part (the sandwich, idle with one state),
  norms clipped at 0.2. By accounts each half alone collapses, and so does SPG, which has no ratio; not here,
  which refutes nothing.
- Another learning rate.
- The noise of a full-size network.
- That undecided pairs are equal.
"""


MEASURED = """# Noise in the ratio, measured

For a reader who doubts [the short page](instability.md): what was run, the results, then run by run. StableDRL (arXiv
2603.06743) gives a reason why reinforcement learning of diffusion language models collapses: the ratio is
the exponential of an estimate, so that its noise has a long tail; the tail passes GRPO's clip; one large gradient moves
the policy; and a policy that has moved has noisier ratios. Below: the [runs](#what-was-run), [what follows](#what-follows), the
argument [link by link](#the-argument-link-by-link), [two masked states](#two-masked-states), [what a weight can
say](#how-much-a-weight-says) about the ratio, computed; then all lines with the ratio of the [token
mean](#ratio-of-the-token-mean) and of the [sequence](#ratio-of-the-sequence), and [each run](#run-by-run). The argument itself
is in [notebook 06](../notebooks/06_stabledrl.ipynb), what is measured beside in
[06a](../notebooks/06a_stabledrl_measured.ipynb).

Written by `python research/benchmarks/instability_page.py` from `research/benchmarks/results/instability.json` and `weight_signal.json`.

## What was run

`python research/benchmarks/instability.py` trains a network of 50,000 weights to write {length} letters: {updates} updates,
{reuse} on each rollout of {batch} responses. It is not the setting of StableDRL's released code: one masked state a
response, where the code and the row `stabledrl` have two, the code's of blocks; no clip of the gradient norm, where the code
has 0.2 (but for the lines `norm 0.2`); {reuse} updates on a rollout, where the code has two. All lines have AdamW at one rate,
{rate:g}, tuned for none. The setting was searched for, and the trials were not recorded:
the comparison is made where plain GRPO with fresh masks fails, and says nothing about how often it does. Lines with [two
states](#two-masked-states) have a part of their own. "Collapse" is this project's criterion: a run ends below its start. The
same command runs what is not run yet.

**One state leaves the sandwich out.** With one masked state the EUBO (5.2) is the ELBO plus a constant: their gradients are
equal, and the sandwich (5.3) does nothing. What these lines weigh is the ELBO; the sandwich of StableDRL's code acts in
`stabledrl, two states` and `spg` alone. **GRPO has StableDRL's credit**, reward less the group's mean without a division by
the deviation, so that no line differs from another in its advantages.

{not_run}- **fresh**: new masks for each update, and others for the old value. **shared**: new masks for each update, which the
  old weights score as well (`refresh: paired`). **one plan**: one draw for all updates on a rollout, shared by old
  and new (`refresh: fixed`).
- **epsilon**: of StableDRL's clip, a cap of 1 + epsilon on the ratio. `stabledrl` has the 5 of accounts of the paper.
- **mean field**: one look with the whole response hidden, as diffu-GRPO has it. **prompt masking** hides a prompt
  token with probability 0.15, drawn afresh for each update. Without it nothing is random, and masks cannot be fresh.
- **reinforce**: no ratio; REINFORCE on the ELBO of one state, StableDRL's without its weights. It is not SPG, whose
  surrogate needs two states. **spg**: the row `spg`, two states of its block-wise masks and its sandwich; the blocks
  are the sampler's, here one of {length}, and the masks new for each update, as in its code. Lines without a ratio have no
  scale of one: with token means loss and gradient are divided by {length}, which AdamW takes out. The runs of `reinforce`
  are in the table of the sequence, those of `spg`, whose row has token means, in that of the token mean.
- **two states**: of StableDRL the row `stabledrl` as it is but for the scale of the ratio, with twice the network calls of
  the line `stabledrl`; **no sandwich**: the same with the ELBO as its score. `grpo, two states` is `grpo, fresh masks` with
  two.
- **norm 0.2**, **dual clip**: the same line with a [further clip](#a-further-clip), run after all others: no pair and no count
  of the argument below has them. The largest norm is that before the clip.
- **spread of the log-ratio**: its standard deviation over the responses of an update, at the scale of the table: noise of
  the estimate, and what the weights have moved. Lines without a ratio have one for this purpose, too.
- **bypass** (in the figure): the share of responses with a negative advantage and a ratio above 1.2, which GRPO's clip lets
  through.
- **gained**: mean reward of the last hundred updates less that of the first ten. In brackets Student's 95 % interval
  over seeds.
- **below the peak**: the highest mean reward of a hundred updates in a row less that of the last hundred, on average over
  seeds.
- **spread, first and last hundred**: of the updates, the mean over seeds.
- **p**: Student's paired test over common seeds; Holm's correction is over the pairs of a scale.

{ends}

## The argument, link by link

{chain}

{two_states}{further}## How much a weight says

`python research/benchmarks/weight_signal.py`. A response has the true log-ratio delta. A method sees delta + noise and makes
it a weight: the ratio, cut at {cap:g}, over the sum of its group of {group}, the others with delta = 0. The noise is
that of the ELBO in its count form, one state in each of K strata, on the model that [notebook
02](../notebooks/02_estimators.ipynb) solves, hidden tokens drawn without replacement. It is taken as normal. The model is
chosen, not fitted to a network: its token costs {cost:.2f} nats on average, and no network's noise was measured at {published}
tokens. By accounts of the paper single ratios reach about 1e5, 11.5 nats; of which scale, they do not say. As the largest of
a thousand to a million ratios of sequences, noise of 3.7 to 2.4 nats would do; a trained model has 12, from right to left, at a
twentieth of this length (**Measured**, below). [Notebook 06a](../notebooks/06a_stabledrl_measured.ipynb) has what such noise
leaves of a weight.

- **fresh**: old and new value have masks of their own. **shared**: they have the same. For these it is *assumed* that
  the update scales the log-probability of every token in every state by one factor; the noise of a real update was
  not measured here.
- **std of the log-ratio**: at delta = +-1 nat, after the division by the length where there is one.
- **AUC**: the probability that of two responses, delta = +d and -d, the first has the larger weight, ties half. d is
  1 nat a response, or 0.1 nat a token. A coin has 0.5.
- **mean weight, +1 over -1**: of one response with delta = 1 nat over the same with -1, in {groups:,} groups in which each
  response in turn is this one; beside it what it would be without noise.
- **weights of nothing**: those below {nothing:g} / {group}. Their share, that of ratios at the cap and the effective size
  1 / sum w^2 are at delta = 0.

{signal}

![Chance that the better of two responses weighs more, and effective group size, over the length](weight_signal.png)

Solid: the ratio of the token mean. Dotted, in the same colours: that of the sequence, with fresh masks.

Reading:

{signal_reading}

{sections}

## Run by run

![Spread of the log-ratio, bypass, gradient norm and reward over the updates](instability.png)

A line is a run. Third column: `grpo` and `stabledrl` on mean fields of prompts masked anew, with the ratio of the token mean.
Axes of spread and gradient norm are each column's own.

Mean reward of the last hundred updates of each run.

{by_seed}
"""


def measured_page(results: list[dict], lines: list[dict]) -> str:
    """docs/instability_measured.md."""
    return MEASURED.format(
        cap=weight.CAP,
        cost=-statistics.mean(weight.solved(PUBLISHED)),
        published=PUBLISHED,
        group=weight.GROUP,
        groups=weight.GROUPS,
        nothing=weight.NOTHING,
        signal=signal_tables(lines),
        signal_reading=signal_reading(lines) + "\n" + measured_reading(results, lines),
        not_run=not_run(results),
        chain=chain(results),
        two_states=two_states(results),
        further=further_clips(results),
        ends=ends(results),
        sections="\n\n".join(section(results, scale) for scale in study.SCALES),
        by_seed="\n\n".join(by_seed(results, scale) for scale in study.SCALES),
        **setting(results),
    )


def setting(results: list[dict]) -> dict:
    """The numbers of the study that both pages quote."""
    return {
        "length": study.LENGTH,
        "reuse": study.REUSE,
        "batch": study.PROMPTS * study.GENERATIONS,
        "rate": study.OPTIMIZER.learning_rate,
        "updates": f"{max(r['updates'] for r in results):,}",
    }


def short_page(results: list[dict], lines: list[dict]) -> str:
    """docs/instability.md."""
    nat, token = weight.DRIFTS
    model = case(lines, drift=nat, length=study.LENGTH, states=2, scale="sequence", masks="fresh")["deviation"]
    words = setting(results) | loop_words(results) | rest_words(results)
    text = SHORT.format(
        cap=weight.CAP,
        published=PUBLISHED,
        group=weight.GROUP,
        groups=weight.GROUPS,
        computed=computed_table(lines),
        trained=TRAINED[2],
        model=model,
        far=[case(lines, drift=token, length=PUBLISHED, states=2, scale=x, masks="fresh")["auc"] for x in weight.SCALES[::-1]],
        start=statistics.mean(r["reward"][0] for r in results),
        seeds=len({r["seed"] for r in results}),
        rewards=reward_table(results),
        compared=compared_table(results),
        verdict=verdict_of(study.of_line(results, "sequence", FRESH)),
        verdict_mean=verdict_of(study.of_line(results, "token mean", FRESH)),
        slow=SLOW,
        **words,
    )
    return "\n\n".join(map(wrapped, text.split("\n\n")))


def wrapped(block: str) -> str:
    """A paragraph or list of the short page broken into lines anew, with its numbers in; tables and headings as they are."""
    if block.startswith(("|", "#", "!")):
        return block
    items = re.split(r"\n(?=- |\d\. )", block.rstrip("\n"))
    told = []
    for item in items:
        mark = re.match(r"(- |\d\. )?", item)[0]
        text = " ".join(item.split())
        told.append(textwrap.fill(text, 127, subsequent_indent=" " * len(mark), break_on_hyphens=False, break_long_words=False))
    return "\n".join(told) + "\n" * block.endswith("\n")


def documents(results: list[dict], lines: list[dict]) -> dict[str, str]:
    """Both pages by their file's name."""
    return {"instability.md": short_page(results, lines), "instability_measured.md": measured_page(results, lines)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write docs/instability.md, docs/instability_measured.md and their figures.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not what would be written")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args(arguments)
    results, lines = (study.stored(study.RESULTS / f"{name}.json") for name in ("instability", "weight_signal"))
    for name, text in documents(results, lines).items():
        path = given.out / name
        if not given.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} is not current: run python research/benchmarks/instability_page.py")
    if not given.check:
        study.figure(results, given.out / "instability.png")
        study.figure(results, given.out / "instability_short.png", ("norm", "reward"), 4.4)
        signal_figure(lines, given.out / "weight_signal.png")


if __name__ == "__main__":
    main()
