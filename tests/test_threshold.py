"""Threshold decoding in the sampler: its exact distribution by the oracle, replay, cost, and what is refused.

At the end mutants, and the laws that notice them.
"""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import test_block_sampler
from minidrl import decoding, sampler
from minidrl.oracle import TabularDenoiser, trajectories
from minidrl.sampler import RECORDS, Noise, Sampler, network_calls, steps_run
from test_sampler import (
    EVERYONE,
    ContextDenoiser,
    FixedDenoiser,
    Spy,
    assert_law,
    assert_same,
    empty_prompt,
    install,
    law_rows_are_independent,
    law_scores_replay,
    prompts,
    run,
    seeded,
)


def settings_of(threshold=0.5, temperature=0.7, length=6, block_length=3, **more) -> Sampler:
    words = {"temperature": temperature, "length": length, "block_length": block_length, "tokens_per_step": 1}
    return Sampler(order="low_confidence", threshold=threshold, **words, **more)


def drawn(model=None, settings=None, records=(), rows=6, eos=0, **more):
    return run(
        model or ContextDenoiser(),
        settings or settings_of(),
        prompts(),
        eos_token_id=eos,
        num_generations=rows,
        records=records,
        **more,
    )


# ----------------------------------------------------------------------------------------------------------------- laws
def cells(model, state, block, temperature):
    """[(a number u for each position of the block, probability)]: one in each cell of the draws at its hidden positions."""
    mask, choices = model.mask_token_id, []
    logits = model.logits_at(state).detach()
    for i in block:
        if state[i] != mask:
            choices.append([(0.5, 1.0)])
        elif temperature == 0:
            choices.append([(0.5, 1.0)])
        else:
            p = (logits[i] / temperature).softmax(-1)
            choices.append(list(zip((p.cumsum(-1) - p / 2).tolist(), p.tolist(), strict=True)))
    for draw in itertools.product(*choices):
        chance = 1.0
        for _, p in draw:
            chance *= p
        yield [u for u, _ in draw], chance


def law_exact_law_of_the_trajectory(tau, temperature=0.7, length=4, block_length=4, vocab=2, scale=1.5):
    """P(response, unmask_step), with every draw summed over step by step, is the oracle's: no sampling, to 1e-12."""
    model = TabularDenoiser.random(length, vocab, seeded(7), scale=scale)
    settings = settings_of(tau, temperature, length, block_length)
    paths = {((vocab,) * length, (-1,) * length): 1.0}
    for step in range(settings.num_steps):
        start = step // settings.steps_per_block * block_length
        block, longer, rows = range(start, start + block_length), Counter(), []
        for (state, steps), chance in paths.items():
            rows += [(state, steps, u, chance * p) for u, p in cells(model, state, block, temperature)]
        states, steps, u, chance = zip(*rows, strict=True)
        trace = sampler.blank_trace(model, *empty_prompt(len(rows)), settings, ())
        trace.tokens, trace.unmask_step = torch.tensor(states), torch.tensor(steps)
        uniform = torch.zeros(settings.num_steps, len(rows), block_length, dtype=torch.float64)
        uniform[step] = torch.tensor(u, dtype=torch.float64)
        trace.noise = Noise(None, uniform if temperature else None)
        sampler.reveal(model, trace, step, torch.arange(len(rows)))
        for state, at, p in zip(trace.tokens.tolist(), trace.unmask_step.tolist(), chance, strict=True):
            longer[tuple(state), tuple(at)] += p
        paths = longer
    exact = trajectories(model, "low_confidence", temperature, 1, block_length, None, tau)
    exact = {(path.response, path.unmask_step): float(path.prob.detach()) for path in exact}
    assert paths.keys() == exact.keys(), "other trajectories"
    assert sum(exact.values()) == pytest.approx(1, abs=1e-12)
    for key, p in exact.items():
        assert paths[key] == pytest.approx(p, abs=1e-12), key
    return Counter(max(steps) + 1 for _, steps in exact)


def law_drawn_from_it(eos=1, tau=0.6, draws=20_000):
    """The same through `generate`, with two blocks and an EOS, by a chi-square test."""
    model = TabularDenoiser.random(4, 3, seeded(7), scale=1.5)
    out = run(model, settings_of(tau, 0.7, 4, 2), eos_token_id=eos, num_generations=draws)
    assert_law(out, trajectories(model, "low_confidence", 0.7, 1, 2, eos, tau))


def law_same_whatever_the_cost(block_length=12, tau=0.6):
    """micro_batch and who else goes on change neither the Rollout nor the state of the generator."""
    ends = set()
    outs, calls = [], []
    agree = lambda rows, left: torch.cat([left, rows[~torch.isin(rows, left)][:1]]).sort().values if len(left) else left  # noqa: E731
    variants = [{**everyone, "micro_batch": size} for everyone in ({}, EVERYONE) for size in (None, 1, 4)]
    for words in [*variants, {"agree": agree}, {"agree": agree, "micro_batch": 4}]:
        g, model = seeded(5), Spy(ContextDenoiser())
        settings = settings_of(tau, 0.7, 24, block_length)
        outs.append(drawn(model, settings, RECORDS, rows=4, generator=g, **words))
        ends.add(float(torch.rand((), generator=g, dtype=torch.float64)))
        calls.append(sum(map(len, model.states)))
    for other in outs[1:]:
        assert_same(outs[0], other)
    assert len(ends) == 1 and len(set(steps_run(outs[0].unmask_step).tolist())) > 1
    assert network_calls(outs[0]) == calls[0] < calls[3], calls


# --------------------------------------------------------------------------------------------- the laws hold in minidrl
@pytest.mark.parametrize("tau, block_length, vocab, temperature", [(0.6, 4, 2, 0.7), (0.45, 2, 3, 0.7), (0.5, 4, 3, 0.0)])
def test_exact_law_of_the_trajectory(tau, block_length, vocab, temperature):
    lengths = law_exact_law_of_the_trajectory(tau, temperature, 4, block_length, vocab)
    assert temperature == 0 or len(lengths) > 1, "trajectories of one length only"


def test_the_ends_of_tau_are_fixed_steps():
    """tau 0: the block at once; tau 1: one token a step, where no token is certain. Texts, steps, scores and the generator."""
    for tau, tokens in ((0.0, 3), (1.0, 1)):
        fixed = drawn(settings=replace(settings_of(None), tokens_per_step=tokens, order="low_confidence"), records=("entropy",))
        own = drawn(settings=settings_of(tau), records=("entropy",))
        if tokens == 1:
            assert_same(replace(own, sampler=None), replace(fixed, sampler=None))
        else:
            assert torch.equal(own.unmask_step, fixed.unmask_step)  # its noise is drawn for more steps


def test_drawn_from_it():
    law_drawn_from_it()


@pytest.mark.parametrize("eos", [0, None])
def test_scores_replay(eos):
    law_scores_replay("low_confidence", threshold=0.5, eos=eos)
    law_scores_replay("low_confidence", 0.0, ContextDenoiser(dtype=torch.float32), 0.5, eos)


def test_same_whatever_the_cost():
    law_same_whatever_the_cost()


def test_rows_are_independent():
    law_rows_are_independent(settings_of(0.6, 0.7, 12, 6))


def test_at_tau_is_revealed():
    """Probabilities of exactly a half: all at once, at tau 1/2; one by one from the left, above."""
    model = FixedDenoiser(torch.zeros(2))
    out = drawn(model, settings_of(0.5, 1.0, 8, 8), eos=None)
    assert not out.unmask_step.any()
    out = drawn(model, settings_of(0.51, 1.0, 8, 8), eos=None)
    assert torch.equal(out.unmask_step, torch.arange(8).expand_as(out.unmask_step))


def test_with_the_exact_cache():
    block, model = test_block_sampler, test_block_sampler.network(4)
    settings = replace(block.settings_of(4, 1), threshold=0.6)
    block.law_the_cache_changes_nothing(model, settings)
    block.law_scores_replay(model, settings)
    block.law_the_cost_changes_nothing(model, settings)


# -------------------------------------------------------------------------------------------------------------- mutants
exact, cost = partial(law_exact_law_of_the_trajectory, tau=0.6), law_same_whatever_the_cost
scores = partial(law_scores_replay, "low_confidence", threshold=0.5)
OWN = "steps_run(trace.unmask_step[rows])"
MUTANTS = {  # what is wrong: (where, a passage of it, its replacement), the law that notices
    "only those above": ((decoding, "confident", ".scatter(1, first, True)", ""), exact),
    "what is shown, too": ((decoding, "confident", "& hidden", ""), law_drawn_from_it),
    "strictly above": (
        (decoding, "confident", "conf >=", "conf >"),
        partial(law_exact_law_of_the_trajectory, tau=0.5, scale=0.0),
    ),
    "the threshold for its logarithm": ((decoding, "confident", "log_threshold(threshold)", "threshold - 1"), exact),
    "the batch's step": ((sampler, "reveal", OWN, "torch.full_like(rows, step)"), scores),
    "steps of the first row": (
        (sampler, "reveal", OWN, "steps_run(trace.unmask_step[rows[:1]]).expand(len(rows))"),
        partial(scores, eos=None),
    ),
    "dropped too early": ((decoding, "still_going", "any(1)]", "any(1)][1:]"), cost),
    "of the first block": ((decoding, "still_going", "[:, block]", "[:, 0]"), cost),
    "noise of the other rows' steps": (
        (
            sampler,
            "reveal",
            "noise.uniform[step, rows]",
            "noise.uniform[trace.unmask_step[rows].sum() % settings.num_steps, rows]",
        ),
        partial(law_rows_are_independent, settings_of(0.6, 0.7, 12, 6)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, monkeypatch):
    where, law = MUTANTS[name]
    install(monkeypatch, *where)
    with pytest.raises(AssertionError):
        law()
