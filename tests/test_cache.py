"""Approximate caches: what a step computes from keys and values that are out of date, and what a run says of it.

The judge is a transformer written out below, one row without padding at a time: it keeps the keys and values of a block's first
state by name, and puts together for every later step which are new and which are old. It has the network's weights and rotary
tables, and nothing else in common with the sampler: no cache class, no mask, no batch. Networks have random weights of order 1,
so that a key that should not be there, or should be newer, moves a probability by order 1. Each law is asked of networks that
predict in place and of those that predict the token after a position (Dream).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tiny
from minidrl import bookkeeping, decoding, denoiser, loop, sampler
from minidrl.run import checkpoints, train
from minidrl.sampler import APPROXIMATE, Sampler, network_calls, steps_run
from minidrl.tasks.countdown import Countdown, tokenizer
from test_block_sampler import L, Spy, law_the_cost_changes_nothing, network, prompts, run, same
from test_sampler import EVERYONE, install, seeded

T = 0.7
SHIFTED = checkpoints.FAMILIES["Dream"]
each_family = pytest.mark.parametrize("family", ["llama", "Dream"])


def settings_of(cache: str, block_length=4, tokens_per_step=1, order="low_confidence", temperature=T) -> Sampler:
    words = {"order": order, "temperature": temperature, "length": L, "tokens_per_step": tokens_per_step}
    return Sampler(**words, block_length=block_length, cache=cache)


# ------------------------------------------------------------------------------------------------ the network, written out
def forward(model, tokens: list[int], fresh: list[int], old: list[tuple[Tensor, Tensor]] | None) -> tuple[Tensor, list]:
    """Logits (V,) by place in ``fresh``; and keys and values (T, heads, size) of each layer, elsewhere those of ``old``."""
    body, config, new = model.model.model, model.model.config, []
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    h = body.embed_tokens.weight[torch.tensor(tokens)[fresh]]
    cos, sin = (x[0, :, None] for x in body.rotary_emb(h, torch.tensor(fresh)[None]))
    for number, layer in enumerate(body.layers):
        x, attention = layer.input_layernorm(h), layer.self_attn
        q, k, v = (F.linear(x, p.weight).view(-1, heads, size) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = (z * cos + torch.cat([-z[..., size // 2 :], z[..., : size // 2]], -1) * sin for z in (q, k))
        keys, values = (torch.empty(len(tokens), heads, size, dtype=h.dtype) for _ in range(2))
        for i in range(len(tokens)):
            keys[i], values[i] = (k[fresh.index(i)], v[fresh.index(i)]) if i in fresh else (x[i] for x in old[number])
        weight = torch.einsum("qhd,khd->hqk", q, keys).div(math.sqrt(size)).softmax(-1)
        h = h + F.linear(torch.einsum("hqk,khd->qhd", weight, values).flatten(1), attention.o_proj.weight)
        x, mlp = layer.post_attention_layernorm(h), layer.mlp
        h = h + F.linear(F.silu(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)
        new.append((keys, values))
    logits = F.linear(body.norm(h), model.model.lm_head.weight)
    logits[:, model.mask_token_id] = -torch.inf
    return dict(zip(fresh, logits, strict=True)), new


@torch.no_grad()
def stale_logits(model, out, row: int) -> list[dict[int, Tensor]]:
    """By step, the logits of a row for the response positions that are computed anew, each where the network predicts it."""
    prompt, found, settings = out.prompt[row][out.prompt_mask[row]].tolist(), [], out.sampler
    everything, width, shift = range(len(prompt) + settings.length), settings.block_length, model.family is SHIFTED
    for step, (block, within) in enumerate(places(out, row)):
        response = out.response[row].masked_fill(sampler.hidden_before(out, step)[row], model.mask_token_id).tolist()
        start = len(prompt) + block * width
        if within == 0:
            logits, old = forward(model, prompt + response, list(everything), None)
        else:
            end = start + width if settings.cache == "dual" else everything.stop
            logits, _ = forward(model, prompt + response, list(range(max(start - shift, 0), end)), old)
        found.append({i - len(prompt): logits[max(i - shift, 0)] for i in logits if i >= start})
    return found


def places(out, row: int) -> list[tuple[int, int]]:
    """By step of the row, its block and its number within it: by what it revealed, as blocks may differ in steps."""
    found = []
    for step in range(int(steps_run(out.unmask_step)[row])):
        block = int((out.unmask_step[row] == step).nonzero()[0]) // out.sampler.block_length
        found.append((block, sum(b == block for b, _ in found)))
    return found


# ----------------------------------------------------------------------------------------------------------------- laws
def law_steps_are_those_of_stale_keys(model, settings: Sampler, given=None, records=("entropy",), **words) -> None:
    """Tokens, their choice, logp, entropy and completions of every step, by the network written out."""
    out = run(model, settings, given, records=records, **words)
    noise = sampler.draw_noise(settings, len(out.response), seeded(), torch.device("cpu"), records)
    for row in range(len(out.response)):
        for step, (logits, (block, within)) in enumerate(zip(stale_logits(model, out, row), places(out, row), strict=True)):
            now, drawn_at = (out.unmask_step[row] == step).nonzero()[:, 0].tolist(), block * settings.steps_per_block + within
            agrees_on_tokens(out, noise, row, drawn_at, now, logits)
            if settings.order == "low_confidence" and settings.temperature == 0:
                best = {i: z.log_softmax(-1).max() for i, z in logits.items() if out.unmask_step[row, i] >= step}
                block = [i for i in best if i // settings.block_length == now[0] // settings.block_length]
                block.sort(key=lambda i: (-round(float(best[i]), 6), i))  # without a prompt, all are alike at first
                assert sorted(block[: len(now)]) == now
            for name in set(records) & set(sampler.COMPLETIONS):
                u = noise.completion[drawn_at, row] if name != "one_step" and settings.temperature else None
                told = completed(out, row, step, logits, u)
                if name == "one_step_proposed" and settings.temperature:
                    told |= proposed(out, noise, row, step, drawn_at, logits)
                assert out.records[name][row, step].tolist() == [told[i] for i in range(settings.length)]


def agrees_on_tokens(out, noise, row: int, step: int, now: list[int], logits: dict[int, Tensor]) -> None:
    settings = out.sampler
    for i in now:
        if settings.temperature == 0:
            assert logits[i].argmax() == out.response[row, i] and out.logp[row, i] == 0
            continue
        logq = (logits[i] / settings.temperature).log_softmax(-1)
        assert out.logp[row, i].item() == pytest.approx(logq[out.response[row, i]].item(), abs=1e-10)
        assert out.records["entropy"][row, i].item() == pytest.approx(torch.special.entr(logq.exp()).sum().item(), abs=1e-10)
        assert drawn(logq, noise.uniform[step, row, place_of(out, noise, row, i)]) == out.response[row, i]


def drawn(logq: Tensor, u: Tensor) -> int:
    return int((logq.exp().cumsum(-1) <= u).sum())


def proposed(out, noise, row: int, step: int, drawn_at: int, logits: dict[int, Tensor]) -> dict[int, int]:
    """What the step drew where it might have revealed a token: in its block by confidence, else where it did."""
    settings, hidden = out.sampler, sampler.hidden_before(out, step)[row].nonzero()[:, 0].tolist()
    now = (out.unmask_step[row] == step).nonzero()[:, 0].tolist()
    if settings.order == "low_confidence":
        now = [i for i in hidden if i // settings.block_length == now[0] // settings.block_length]
    chances = {i: (logits[i] / settings.temperature).log_softmax(-1) for i in now}
    return {i: drawn(logq, noise.uniform[drawn_at, row, place_of(out, noise, row, i)]) for i, logq in chances.items()}


def place_of(out, noise, row: int, i: int) -> int:
    """Where the noise of a position stands in its step."""
    place, block = i % out.sampler.block_length, i // out.sampler.block_length
    return place if noise.order is None else noise.order[block, row].tolist().index(place) % out.sampler.tokens_per_step


def completed(out, row: int, step: int, logits: dict[int, Tensor], u: Tensor | None) -> dict[int, int]:
    """The row's response with its hidden positions filled in; none is hidden outside of ``logits``."""
    filled = dict(enumerate(out.response[row].tolist()))
    for i in sampler.hidden_before(out, step)[row].nonzero()[:, 0].tolist():
        filled[i] = int(logits[i].argmax()) if u is None else drawn((logits[i] / out.sampler.temperature).log_softmax(-1), u[i])
    return filled


def law_equal_to_none(model, settings: Sampler, given=None, **words) -> None:
    same(run(model, settings, given, **words), run(model, replace(settings, cache="none"), given, **words))


def gap(model, settings: Sampler, given=None) -> float:
    """The largest difference of a recorded logp to that of the exact network in the same state."""
    out, found = run(model, settings, given, records=()), 0.0
    for step in range(settings.num_steps):
        state, now = sampler.state_before(out, step, model.mask_token_id), out.unmask_step == step
        logits = model.head(model.encode(state, sampler.attention_mask(out))[:, -L:]).detach()
        logp = (logits / settings.temperature).log_softmax(-1).gather(-1, out.response[..., None])[..., 0]
        found = max(found, float((out.logp - logp)[now].abs().max()) if now.any() else 0.0)
    return found


# -------------------------------------------------------------------------------------------------------------- a rollout
@pytest.mark.parametrize("cache", APPROXIMATE)
@pytest.mark.parametrize("order, temperature", [("random", T), ("low_confidence", T), ("low_confidence", 0.0)])
@each_family
def test_steps_are_those_of_stale_keys(family, order, temperature, cache):
    """Left-padded prompts, one of them alone with its padding; rows end at different blocks. And no prompt at all."""
    model, deep = network(None, family=family), network(None, 3, family=family)
    law_steps_are_those_of_stale_keys(model, settings_of(cache, 4, 2, order, temperature), num_generations=2)
    law_steps_are_those_of_stale_keys(deep, settings_of(cache, 4, 1, order, temperature), prompts((0, 3)))
    law_steps_are_those_of_stale_keys(deep, settings_of(cache, 8, 1, order, temperature), prompts((0, 0)), num_generations=2)


@pytest.mark.parametrize("cache", APPROXIMATE)
@each_family
def test_equal_where_nothing_is_out_of_date(family, cache):
    model, flat = network(None, family=family), network(None, layers=1, family=family)
    law_equal_to_none(model, settings_of(cache, 4, 4))  # one step a block
    law_equal_to_none(flat, settings_of(cache, 4, 2))  # keys of the first layer are those of the token
    law_equal_to_none(model, settings_of(cache, 8, 1), prompts((0, 0)))  # all of the text is in the block


@pytest.mark.parametrize("cache", APPROXIMATE)
@each_family
def test_and_nowhere_else(family, cache):
    model = network(None, family=family)
    assert gap(model, settings_of(cache, 4, 1, "random")) > 0.01
    assert gap(model, settings_of("none", 4, 1, "random")) < 1e-10


@pytest.mark.parametrize("cache", APPROXIMATE)
@each_family
def test_the_cost_changes_nothing(family, cache):
    law_the_cost_changes_nothing(network(None, family=family), settings_of(cache, 2, 1, "low_confidence", 1.5))


@pytest.mark.parametrize("temperature", [0.0, T])
def test_completions(temperature):
    """Of stale keys as well; and those of "none" where nothing is out of date."""
    records, model = ("entropy", *sampler.COMPLETIONS), network(None)
    law_steps_are_those_of_stale_keys(model, settings_of("prefix", 4, 1, "random", temperature), records=records)
    law_equal_to_none(model, settings_of("prefix", 4, 4, temperature=temperature), records=records)


@each_family
def test_all_tokens_in_any_order_are_encode(family):
    """Padding and positions go with the tokens: of one whole call, and of the last of two calls on the same text."""
    prompt, mask = prompts()
    tokens, mask = torch.cat([prompt, prompt], 1), torch.cat([mask, mask | True], 1)
    order = torch.randperm(10, generator=seeded(1))
    for block_length in (None,) if family == "Dream" else (None, 5):
        model = network(block_length, family=family)
        h = model.encode(tokens, mask)
        cache = sampler.DynamicCache()
        again = model.extend(tokens[:, order], mask, cache, order)
        real = mask[:, order]
        torch.testing.assert_close(again[real], h[:, order][real], atol=1e-10, rtol=0)
        cache.crop(-3)
        again = model.extend(tokens[:, order[-3:]], mask, cache, order)
        known = real[:, -3:] & torch.tensor([family == "llama" or int(i) - 1 in order[-3:] for i in order[-3:]])
        torch.testing.assert_close(again[known], h[:, order[-3:]][known], atol=1e-10, rtol=0)
        assert cache.get_seq_length() == 10


def test_a_forward_with_a_cache_counts_positions_as_one_without_does():
    """From 0 at the first real token: bfloat16 rounds the sines of other positions in another way."""
    (tokens, mask), model, seen = prompts(), network(None), []
    model.model.model.register_forward_pre_hook(lambda _, args, words: seen.append(words["position_ids"]), with_kwargs=True)
    model.encode(tokens, mask)
    model.extend(tokens, mask, sampler.DynamicCache())
    assert seen[0].equal(seen[1]) and seen[0].tolist()[1] == [0, 0, 0, 0, 1]


# ----------------------------------------------------------------------------------------------------------------- cost
def test_a_step_computes_what_it_says():
    """All positions at a block's first step; then the block and what follows it, or the block."""
    prefix, dual = [13, 8, 8, 8, 13, 4, 4, 4], [13, 4, 4, 4, 13, 4, 4, 4]
    shifted = [[13, 9, 9, 9, 13, 5, 5, 5], [13, 5, 5, 5, 13, 5, 5, 5]]  # and the position that predicts the first of them
    for cache, family, widths in zip(
        APPROXIMATE * 2, ("llama", "llama", "Dream", "Dream"), (prefix, dual, *shifted), strict=True
    ):
        model = Spy(network(None, family=family))
        run(model, settings_of(cache), records=(), **EVERYONE)
        assert model.shapes == [(12, width) for width in widths]
        model.shapes.clear()
        out = run(model, settings_of(cache), micro_batch=5)
        assert {width for _, width in model.shapes} == set(widths) and max(n for n, _ in model.shapes) == 5
        assert sum(n for n, _ in model.shapes) == network_calls(out)


class Heads(Spy):
    """Notes the rows that the head is applied to, too."""

    def __init__(self, model):
        super().__init__(model)
        self.heads, self.head = [], self.counted

    def counted(self, h):
        self.heads.append(math.prod(h.shape[:-1]))
        return self.model.head(h)


def test_completions_in_chunks(monkeypatch):
    """Never more rows of logits than fit in CHUNK, or one a sequence; those of hidden blocks only; and the same tokens."""
    settings, words = settings_of("prefix", 4, 2, "random"), {"records": sampler.COMPLETIONS, **EVERYONE}
    whole = run(network(None), settings, **words)
    for chunk, largest in ((3 * 12 * 7, 36), (1, 24), (2**26, 48)):
        monkeypatch.setattr(sampler, "CHUNK", chunk)
        model = Heads(network(None))
        same(run(model, settings, **words), whole)
        # 4 steps draw 2 positions a row each; the three completions see 8 positions at 2 steps, then 4 at 2 steps
        assert sum(model.heads) == 12 * (4 * 2 + 3 * (2 * 8 + 2 * 4)) and max(model.heads) == largest


# ------------------------------------------------------------------------------------------------------------- refusals
def test_a_method_that_needs_the_rest_of_the_response_is_refused_with_dual():
    cut = Sampler(order="random", temperature=1.0, length=4, block_length=2, tokens_per_step=1, cache="dual")
    with pytest.raises(ValueError, match="records: got 'one_step' with cache dual"):
        train.start(tiny.settings("no such model", method="egspo-sa-accounts", sampler=cut))


# ---------------------------------------------------------------------------------------------------------------- a run
def a_run(monkeypatch, cache: str, method="ppo", temperature=T, family="llama", **changes) -> loop.Run:
    settings = Sampler(order="random", temperature=temperature, length=L, block_length=4, tokens_per_step=1, cache=cache)
    changes = {"sampler": replace(settings, **changes.pop("cut", {})), "num_iterations": 1, "micro_batch": 7, **changes}
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    return tiny.run_on(monkeypatch, network(None, words=tokenizer(), family=family), method=method, **changes)


def kept_kl(model, rollout) -> Tensor:
    """ratio - 1 - log ratio of every kept token, (B, L), by plain calls on all states; ratio = exact / recorded."""
    found = torch.zeros_like(rollout.logp)
    for step in range(rollout.sampler.num_steps):
        state, now = sampler.state_before(rollout, step, model.mask_token_id), rollout.unmask_step == step
        logits = model.head(model.encode(state, sampler.attention_mask(rollout))[:, -L:]).detach()
        logp = (logits / rollout.sampler.temperature).log_softmax(-1).gather(-1, rollout.response[..., None])[..., 0]
        found[now] = ((logp - rollout.logp).exp() - 1 - (logp - rollout.logp))[now]
    return found.masked_fill(~rollout.keep, 0)


def with_ends(monkeypatch, cache: str, **changes) -> tuple[loop.Run, sampler.Rollout]:
    """[EOS] is a token that is often drawn: rows end early, with tokens that are not kept."""
    run = a_run(monkeypatch, cache, num_prompts=2, **changes)
    run.tok.eos_token_id = int(loop.collect(run, 0).rollout.response.mode().values.mode().values)
    rollout = loop.collect(run, 0).rollout
    assert len(set(rollout.lengths.tolist())) > 2 and (~rollout.keep & (rollout.unmask_step >= 0)).any()
    return run, rollout


def law_the_kl_of_two_steps(monkeypatch, cache: str, family: str = "llama") -> None:
    """With two steps a response there is nothing to draw: every state is scored, and the number is that of all kept tokens."""
    run, rollout = with_ends(monkeypatch, cache, family=family, cut={"block_length": 8, "tokens_per_step": 4})
    wanted = float(kept_kl(run.model, rollout).sum() / rollout.keep.sum())
    assert bookkeeping.rollout_kl(run, 0, rollout) == pytest.approx(wanted, rel=1e-10) and wanted > 1e-3


def law_the_kl_is_estimated_without_bias(monkeypatch, draws: int = 300) -> None:
    """Its mean over many draws of the steps is that of all steps."""
    run, rollout = with_ends(monkeypatch, "dual")
    assert (rollout.unmask_step < 0).any()
    each, run.clock = kept_kl(run.model, rollout), bookkeeping.Clock()
    found = torch.tensor([bookkeeping.rollout_kl(run, step, rollout) for step in range(draws)], dtype=torch.float64)
    assert abs(found.mean() - each.sum() / rollout.keep.sum()) < 4.5 * found.std() / math.sqrt(draws)
    assert found.std() < found.mean() * 3 and found.min() >= 0
    last = rollout.unmask_step.masked_fill(~rollout.keep, -1).amax(1) + 1
    assert run.clock.calls == {"rollout_kl": draws * int(last.clamp(max=2).sum())}


def test_the_kl_is_estimated_without_bias(monkeypatch):
    law_the_kl_is_estimated_without_bias(monkeypatch)


@pytest.mark.parametrize("cache", APPROXIMATE)
@each_family
def test_the_kl_of_two_steps(family, cache, monkeypatch):
    law_the_kl_of_two_steps(monkeypatch, cache, family)


@each_family
def test_what_a_step_says(family, monkeypatch):
    """Zero where nothing is out of date, above it elsewhere, absent where nothing is approximated or drawn."""
    rows = {
        name: loop.take_step(a_run(monkeypatch, cache, family=family, **words), 0)
        for name, cache, words in (
            ("none", "none", {}),
            ("prefix", "prefix", {}),
            ("dual", "dual", {}),
            ("one step a block", "dual", {"cut": {"tokens_per_step": 4}}),
            ("greedy", "dual", {"method": "diffu-grpo-paper", "temperature": 0.0}),
        )
    }
    keys = {"rollout_kl", "seconds/rollout_kl", "network_calls/rollout_kl"}
    for name, row in rows.items():
        assert keys & row.keys() == (set() if name in ("none", "greedy") else keys), name
    assert rows["prefix"]["rollout_kl"] > 1e-3 and rows["dual"]["rollout_kl"] > 1e-3
    assert abs(rows["one step a block"]["rollout_kl"]) < 1e-12
    assert rows["none"]["log_ratio_std"] < 1e-10 and rows["one step a block"]["log_ratio_std"] < 1e-10
    assert rows["prefix"]["log_ratio_std"] > 1e-2 and rows["dual"]["log_ratio_std"] > 1e-2
    assert "network_calls/scoring" in rows["prefix"] and "network_calls/scoring" not in rows["none"]


@pytest.mark.parametrize("cache", APPROXIMATE)
def test_the_rollout_is_not_taken_for_the_networks_own(cache, monkeypatch):
    """Its record does not stand in for the first pass, and the gradient is that of the ratio to the sampler's policy."""
    experience = loop.collect(a_run(monkeypatch, cache), 0)
    assert experience.updates is None and experience.kl > 0
    assert loop.collect(a_run(monkeypatch, "none"), 0).updates == 0


# -------------------------------------------------------------------------------------------------------------- mutants
ROLLOUT = {  # what is wrong: (where, a passage of it, its replacement)
    "not refreshed at a new block": (sampler, "decode", "in APPROXIMATE:", "in APPROXIMATE and block == 0:"),
    "refreshed at every step": (sampler, "decode", "within, part, cache)", "within, part, DynamicCache())"),
    "prefix is dual, and dual prefix": (decoding, "stale_states", 'settings.cache == "dual"', 'settings.cache == "prefix"'),
    "the block lacks its last position": (decoding, "stale_states", "(column < first +", "(column < first - 1 +"),
    "no position before the block": (decoding, "stale_states", "min(first, int(model.shift))", "0"),
    "the position before the block stays": (decoding, "stale_states", "crop(-width - lead)", "crop(-width)"),
    "predictions as they stand": (denoiser.Denoiser, "extend", " if self.shift else h", " if False else h"),
    "the token after for the one before": (denoiser, "shifted", "column[None, :] + 1", "column[None, :] - 1"),
    "the first column for the first token": (denoiser, "shifted", "cumsum(-1) == 1)", "cumsum(-1) == -1)"),
    "the end of the response for the block": (
        sampler,
        "hidden_states",
        "first, cache) return rest[:, :width]",
        "first, cache)\n        return rest[:, -width:]",
    ),
    "positions as they stand": (denoiser.Denoiser, "extend", "position[:, now]", "position[:, -tokens.shape[1] :]"),
    "the mask as it stands": (denoiser.Denoiser, "extend", "[..., order]", ""),
    "completions by the noise of the first positions": (sampler, "one_step_completion", "u[:, -rest:]", "u[:, :rest]"),
}
KL = {
    "unkept tokens count": ("(plan.scored & rollout.keep)", "plan.scored"),
    "as if all steps were drawn": ("plan.weight[..., None] *", "torch.ones_like(plan.weight)[..., None] *"),
    "over all positions": ("rollout.keep.sum()", "rollout.keep.numel()"),
    "the first steps only": ('keyed_generator(run.settings.seed, step, "rollout_kl")', "torch.Generator().manual_seed(0)"),
}


def rollout_laws() -> None:
    for model in (network(None), network(None, family="Dream")):
        for cache in APPROXIMATE:
            law_steps_are_those_of_stale_keys(model, settings_of(cache, 4, 2, "left_to_right"), num_generations=2)
        law_steps_are_those_of_stale_keys(model, settings_of("dual", 4, 2, "left_to_right"), prompts((0, 3)))
        records = ("entropy", *sampler.COMPLETIONS)
        law_steps_are_those_of_stale_keys(model, settings_of("prefix", 4, 1), num_generations=1, records=records)
        test_all_tokens_in_any_order_are_encode("Dream" if model.family is SHIFTED else "llama")


@pytest.mark.parametrize("name", ROLLOUT)
def test_the_laws_kill(name, monkeypatch):
    install(monkeypatch, *ROLLOUT[name])
    with pytest.raises((AssertionError, RuntimeError, IndexError)):  # keys that do not fit their mask, or each other
        rollout_laws()


@pytest.mark.parametrize("name", KL)
def test_the_law_of_the_kl_kills(name, monkeypatch):
    install(monkeypatch, bookkeeping, "rollout_kl", *KL[name])
    with pytest.raises(AssertionError):
        law_the_kl_of_two_steps(monkeypatch, "dual")
        law_the_kl_is_estimated_without_bias(monkeypatch)
