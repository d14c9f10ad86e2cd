"""Block-causal generation, with and without a cache: the same trajectories, and the law that enumeration gives.

Two judges. Plain ``encode`` calls on full-width states, which know of no cache and no cut: what the sampler recorded must be
what they say. And the oracle's enumeration of the block sampler, on a table filled by such calls. Networks have random
weights of order 1, so that a key or value that should not be there moves a probability by order 1.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tiny
from minidrl import algorithms as alg
from minidrl import decoding, denoiser, sampler
from minidrl import features as feat
from minidrl.oracle import TabularDenoiser, trajectories
from minidrl.sampler import Sampler, network_calls, steps_run
from test_sampler import EVERYONE, assert_law, assert_replayed, install, seeded, states_of

L, N, EOS = 8, 4, 1
CUTS = [(1, 1), (2, 1), (4, 2), (4, 1), (8, 1)]  # block_length, tokens_per_step


# ------------------------------------------------------------------------------------------------------------- networks
class Alphabet:
    """All that ``build`` asks of a tokenizer; [MASK] is the last id."""

    def __init__(self, size: int):
        self.size, self.mask_token_id, self.eos_token_id = size, size - 1, EOS

    def __len__(self) -> int:
        return self.size


SHIFTED = SimpleNamespace(shift=True)  # all that is asked of a family here


def network(block_length: int | None, layers=2, vocab: int = 7, family=None) -> denoiser.Denoiser:
    model = denoiser.build(tiny.SIZES | {"num_hidden_layers": layers}, Alphabet(vocab), 0).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=noise) * 1.5 / p.shape[1] ** 0.5)
    return denoiser.Denoiser(tiny.exact(model.double()).model, family, block_length)


class Spy(torch.nn.Module):
    """Passes everything on and notes the shapes that were asked for."""

    def __init__(self, model):
        super().__init__()
        self.model, self.shapes = model, []
        for name in ("mask_token_id", "vocab_size", "block_length", "shift", "head"):
            setattr(self, name, getattr(model, name))

    def encode(self, tokens, attention_mask):
        self.shapes.append(tuple(tokens.shape))
        return self.model.encode(tokens, attention_mask)

    def extend(self, tokens, attention_mask, *more):
        self.shapes.append(tuple(tokens.shape))
        return self.model.extend(tokens, attention_mask, *more)


def prompts(lengths=(5, 2, 4)) -> tuple[Tensor, Tensor]:
    """Left-padded, with something in the padding."""
    width = max(lengths)
    tokens = torch.randint(0, 6, (len(lengths), width), generator=seeded(9))
    return tokens, torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def settings_of(block_length=4, tokens_per_step=1, order="low_confidence", temperature=0.7, length=L, cache="exact") -> Sampler:
    words = {"order": order, "temperature": temperature, "length": length, "tokens_per_step": tokens_per_step}
    return Sampler(**words, block_length=block_length, attention="block_causal", cache=cache)


def run(model, settings: Sampler, given=None, **words):
    records = ("entropy", "topk") if settings.temperature else ("entropy",)
    words = {"eos_token_id": EOS, "num_generations": N, "generator": seeded(), "records": records, **words}
    return sampler.generate(model, *(given or prompts()), settings, **words)


def same(a, b, atol: float = 1e-10) -> None:
    """The same trajectories; their log-probabilities and records up to rounding."""
    for name in ("prompt", "prompt_mask", "response", "keep", "unmask_step"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    torch.testing.assert_close(a.logp, b.logp, atol=atol, rtol=0)
    assert a.records.keys() == b.records.keys()
    for name in a.records:
        torch.testing.assert_close(a.records[name], b.records[name], atol=atol, rtol=0, msg=name)


# ----------------------------------------------------------------------------------------------------------------- laws
def law_the_cache_changes_nothing(model, settings: Sampler, given=None, atol: float = 1e-10, **words) -> None:
    same(run(model, settings, given, **words), run(model, replace(settings, cache="none"), given, **words), atol)


def law_scores_replay(model, settings: Sampler, given=None, **words) -> None:
    """Tokens, logp, entropy and topk are what plain calls on the whole states say, later blocks and all."""
    assert_replayed(run(model, settings, given, **words), model)


def law_the_cost_changes_nothing(model, settings: Sampler, given=None) -> None:
    """Who goes on and micro_batch, one that divides the rows of a prompt and others; and the generator is left the same."""
    outs, ends = [], set()
    for words in ({**agree, "micro_batch": size} for agree in ({}, EVERYONE) for size in (None, 1, 5)):
        g = seeded(3)
        outs.append(run(model, settings, given, generator=g, **words))
        ends.add(float(torch.rand((), generator=g, dtype=torch.float64)))
    assert len(ends) == 1 and len(set(steps_run(outs[0].unmask_step).tolist())) > 1, "rows should end at different steps"
    for other in outs[1:]:
        same(outs[0], other)


def law_exact_distribution(order: str, cache: str = "exact", tokens_per_step: int = 1, draws: int = 8_000) -> None:
    """Two blocks of two positions, three tokens and [MASK], one of the tokens EOS: (response, unmask_step) by the oracle."""
    model, settings = network(2, vocab=4), settings_of(2, tokens_per_step, order, length=4, cache=cache)
    prompt, mask = torch.tensor([[2, 0, 2]]), torch.tensor([[False, True, True]])
    out = run(model, settings, (prompt, mask), num_generations=draws, records=())
    with torch.no_grad():
        exact = trajectories(tabulated(model, prompt, mask), order, 0.7, tokens_per_step, 2, EOS)
    assert_law(out, exact)


def tabulated(model, prompt: Tensor, mask: Tensor) -> TabularDenoiser:
    """The network's logits in each of the 4**4 states after this prompt, by one plain call."""
    states = torch.arange(4**4)[:, None] // 4 ** torch.arange(4) % 4
    tokens = torch.cat([prompt.expand(len(states), -1), states], 1)
    real = torch.cat([mask.expand(len(states), -1), torch.ones_like(states, dtype=torch.bool)], 1)
    return TabularDenoiser(model.head(model.encode(tokens, real)[:, -4:])[..., :3].detach())


# ---------------------------------------------------------------------------------------- the laws hold, however it is cut
@pytest.mark.parametrize("order, temperature", [("random", 0.7), ("low_confidence", 0.7), ("low_confidence", 0.0)])
def test_the_same_with_and_without_cache(order, temperature):
    for block_length, tokens_per_step in CUTS:
        settings = settings_of(block_length, tokens_per_step, order, temperature)
        for family in (None, SHIFTED):
            model = network(block_length, 3, family=family)
            law_the_cache_changes_nothing(model, settings, eos_token_id=EOS if temperature else None)


@pytest.mark.parametrize("order, temperature", [("random", 0.7), ("low_confidence", 0.7), ("low_confidence", 0.0)])
def test_scores_replay(order, temperature):
    settings = settings_of(4, 2, order, temperature)
    law_scores_replay(network(4), settings)
    law_scores_replay(network(4), replace(settings, cache="none"))


@pytest.mark.parametrize("order, cache", [("random", "exact"), ("low_confidence", "exact"), ("low_confidence", "none")])
def test_exact_distribution(order, cache):
    law_exact_distribution(order, cache)


@pytest.mark.parametrize("cache", ["exact", "none"])
def test_the_cost_changes_nothing(cache):
    law_the_cost_changes_nothing(network(2), settings_of(2, 1, cache=cache))


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 3), (4, 8, 0), (1, 1)])
def test_prompts_of_other_lengths(lengths):
    """None at all, one that is nothing but padding, whole blocks, and a single token."""
    for family, size in ((None, 2), (SHIFTED, 2), (SHIFTED, 1)):
        model, settings = network(size, family=family), settings_of(size)
        law_the_cache_changes_nothing(model, settings, prompts(lengths))
        law_scores_replay(model, settings, prompts(lengths))


@pytest.mark.parametrize("order, cache, family", [("random", "exact", None), ("low_confidence", "none", SHIFTED)])
def test_the_trajectory_replays_as_a_staircase(order, cache, family):
    """What the trainer scores, all blocks in one forward, is what the sampler saw."""
    model = network(4, family=family)
    out = run(model, settings_of(4, 2, order, cache=cache))
    plan = alg.block_replay_plan(out, seeded())
    logp = feat.features(model, out, plan, temperature=0.7)["logp"]
    torch.testing.assert_close(logp.sum(0), out.logp.masked_fill(~plan.scored.any(0), 0), atol=1e-10, rtol=0)
    assert plan.scored.sum(0).max() == 1 and (plan.scored.any(0) | ~out.keep).all() and not out.keep.all()


# ----------------------------------------------------------------------------------------------------------------- cost
def test_a_step_computes_its_block_alone():
    """Each prompt once; then W tokens of the rows still running, and in a later block's first step the block before it too."""
    model = Spy(network(4))
    out = run(model, settings_of(4, 2, "random"))
    rows = (steps_run(out.unmask_step) > 2).sum().item()
    assert model.shapes == [(3, 5), (12, 4), (12, 4), (rows, 8), (rows, 4)] and 0 < rows < 12
    assert sum(n for n, _ in model.shapes[1:]) == network_calls(out)
    model.shapes.clear()
    run(model, settings_of(4, 2, "random"), micro_batch=5, **EVERYONE)
    assert model.shapes == [(2, 5), *[(5, 4)] * 2, (5, 8), (5, 4)] * 2 + [(1, 5), *[(2, 4)] * 2, (2, 8), (2, 4)]


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (lambda: network(None), {}, "attention: got 'block_causal' for a bidirectional model; allowed bidirectional"),
        (
            lambda: network(4),
            {"attention": "bidirectional", "cache": "none"},
            "attention: got 'bidirectional' for a block-causal model; allowed block_causal, block_length 4",
        ),
        (lambda: network(2), {}, "block_length: got 4; allowed 2, that of the model's attention"),
    ],
)
def test_a_model_of_another_attention(model, change, message):
    with pytest.raises(ValueError) as error:
        run(model(), replace(settings_of(), **change), records=())
    assert str(error.value) == message


def law_completions_are_those_of_each_state(model, settings: sampler.Sampler) -> None:
    """Of every state of the run the argmax of the network on all of it; what is recorded changes nothing of the run."""
    completions = run(model, settings, records=("entropy", *sampler.COMPLETIONS))
    plain = run(model, settings, records=("entropy",))
    for name in ("response", "unmask_step", "logp", "keep"):
        assert torch.equal(getattr(completions, name), getattr(plain, name)), name
    assert torch.equal(completions.records["entropy"], plain.records["entropy"])
    mask, begin, over = sampler.attention_mask(completions), completions.prompt.shape[1], 0
    for step, state in enumerate(states_of(completions, model.mask_token_id)):
        present = step < sampler.steps_run(completions.unmask_step)
        best = model.head(model.encode(state, mask)[:, begin:]).argmax(-1)
        hidden = state[:, begin:] == model.mask_token_id
        guess = torch.where(hidden, best, state[:, begin:])
        wanted = torch.where(present[:, None], guess, completions.response)
        assert torch.equal(completions.records["one_step"][:, step], wanted), f"step {step}"
        drawn = completions.records["one_step_sampled"][:, step]
        assert torch.equal(drawn.masked_fill(hidden & present[:, None], -1), wanted.masked_fill(hidden & present[:, None], -1))
        over += int((drawn != wanted).sum())
    assert (over > 0) == (settings.temperature > 0), "drawn, not the argmax"


@pytest.mark.parametrize("cache, temperature", [("exact", 0.7), ("none", 0.0)])
def test_completions_in_one_step_look_at_later_blocks(temperature, cache):
    """In blocks a step sees none of them, and needs none; the completion of its state is made by a forward of its own."""
    settings = settings_of(4, 2, temperature=temperature, cache=cache)
    law_completions_are_those_of_each_state(network(4), settings)


# -------------------------------------------------------------------------------------------------------------- mutants
MUTANTS = {  # what is wrong: (where, a passage of it, its replacement)
    "no crop": (decoding, "block_states", "take_out(cache, width + model.shift)", ""),
    "the block before": (decoding, "block_states", "cache)[:, -width:]", "cache)[:, :width]"),
    "padding is seen": (sampler, "hidden_states", "trace.attention_mask[rows]", "trace.attention_mask[rows] | True"),
    "a block sees the future": (denoiser, "block_causal", "<= block[:, :, None]", "<= block[:, :, None] + 1"),
    "a later row's prompt": (decoding, "prompt_cache", "(place)", "(place.flip(0))"),
    "padding in the prompt's cache": (decoding, "prompt_cache", "prompt_mask[own]", "prompt_mask[own] | True"),
    "the rows of another prompt": (sampler, "generate", "part // num_generations", "part % len(prompts[0])"),
    "the cache keeps the first rows": (sampler, "decode", "torch.searchsorted(rows, left)", "torch.arange(len(left))"),
    "positions start again": (denoiser.Denoiser, "extend", "position[:, -now:]", "position[:, :now]"),
    "the mask of other rows": (denoiser.Denoiser, "extend", "[:, :, -now:]", "[:, :, :now]"),
    "no state before a block": (decoding, "block_states", "+ model.shift", ""),
    "no state before the response": (decoding, "prompt_cache", "int(model.shift)", "0"),
    "no shift with a cache": (denoiser.Denoiser, "extend", "if self.shift", "if False"),
}


def laws() -> None:
    """Rows end at different blocks, prompts are padded, and a block takes two steps."""
    for law in (law_scores_replay, law_the_cache_changes_nothing, law_the_cost_changes_nothing):
        law(network(4), settings_of(4, 2, "left_to_right"))
        for order in ("left_to_right", "right_to_left"):  # its first token in the first step, and in a later one
            law(network(4, family=SHIFTED), settings_of(4, 2, order))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_laws_kill(name, monkeypatch):
    install(monkeypatch, *MUTANTS[name])
    with pytest.raises((AssertionError, RuntimeError)):  # the second: keys that do not fit their mask, or each other
        laws()
