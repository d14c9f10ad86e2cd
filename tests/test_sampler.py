"""Laws of generation. Each law takes the implementation (`generate`), so that the mutants at the end can break it."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidrl import sampler
from minidrl.oracle import TabularDenoiser, token_logp, trajectories
from minidrl.sampler import RECORDS, TOP_K, Sampler, network_calls, steps_run

ORDERS = ("random", "low_confidence", "left_to_right", "right_to_left")
GREEDY_RECORDS = tuple(name for name in RECORDS if name != "topk")  # those that temperature 0 has


# --------------------------------------------------------------------------------------------------- models and helpers
class ContextDenoiser(torch.nn.Module):
    """Logits that depend on every visible token, on the prompt too, and on the position counted from the end."""

    def __init__(self, vocab_size=5, width=6, seed=3, dtype=torch.float64):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.vocab_size, self.mask_token_id = vocab_size, vocab_size - 1
        self.embedding = torch.randn(vocab_size, width, generator=g, dtype=dtype)
        self.place = torch.randn(64, width, generator=g, dtype=dtype)
        self.mix = torch.randn(width, width, generator=g, dtype=dtype)
        self.out = torch.randn(width, vocab_size, generator=g, dtype=dtype)

    def encode(self, tokens, attention_mask):
        e = self.embedding[tokens] * self.place[: tokens.shape[1]].flip(0) * attention_mask[..., None]
        context = e.sum(1, keepdim=True) / attention_mask.sum(1)[:, None, None].sqrt()
        return torch.tanh(e + self.place[: tokens.shape[1]].flip(0) + context @ self.mix)

    def head(self, h):
        logits = h @ self.out
        return logits.masked_fill(torch.arange(self.vocab_size) == self.mask_token_id, -torch.inf)


class FixedDenoiser(torch.nn.Module):
    """The same logits everywhere; [MASK] is the last id, with -inf."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.cat([logits, logits.new_tensor([-torch.inf])])
        self.vocab_size, self.mask_token_id = len(self.logits), len(logits)

    def encode(self, tokens, attention_mask):
        return self.logits.new_zeros(*tokens.shape, 1)

    def head(self, h):
        return self.logits.expand(*h.shape[:-1], -1)


class Spy(torch.nn.Module):
    """Passes everything on and notes what was asked."""

    def __init__(self, model):
        super().__init__()
        self.model, self.mask_token_id, self.vocab_size = model, model.mask_token_id, model.vocab_size
        self.states, self.masks, self.positions = [], [], []

    def encode(self, tokens, attention_mask):
        self.states.append(tokens.clone())
        self.masks.append(attention_mask.clone())
        return self.model.encode(tokens, attention_mask)

    def head(self, h):
        self.positions.append(h.shape[:-1].numel())
        return self.model.head(h)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def settings_of(order, temperature=1.0, length=4, block_length=4, tokens_per_step=1):
    return Sampler(
        order=order, temperature=temperature, length=length, block_length=block_length, tokens_per_step=tokens_per_step
    )


def empty_prompt(groups=1):
    return torch.zeros(groups, 0, dtype=torch.long), torch.ones(groups, 0, dtype=torch.bool)


def prompts():
    """Three prompts of 4, 2 and 3 tokens, left-padded with token 0."""
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    return torch.tensor([[1, 2, 3, 1], [0, 0, 3, 2], [0, 2, 2, 1]]), mask


def assert_same(a, b):
    """Bit-equal Rollouts, records included."""
    for name in ("prompt", "prompt_mask", "response", "keep", "unmask_step", "logp"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.records.keys() == b.records.keys()
    for name in a.records:
        assert torch.equal(a.records[name], b.records[name]), name


def chi_square_p(counts, probs):
    """p-value of counts against exact probabilities; cells that expect fewer than 5 draws join the next larger."""
    assert set(counts) <= set(probs), "an outcome of probability 0 was drawn"
    total, pooled, rest = sum(counts.values()), [], (0, 0.0)
    for key, prob in sorted(probs.items(), key=lambda item: item[1]):
        rest = (rest[0] + counts[key], rest[1] + total * prob)
        if rest[1] >= 5:
            pooled, rest = [*pooled, rest], (0, 0.0)
    if len(pooled) == 1:
        return 1.0  # one outcome is certain, and nothing else was drawn
    statistic = sum((c - e) ** 2 / e for c, e in pooled)
    half = torch.tensor([(len(pooled) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def replayed(rollout, model, step):
    """Logits at every response position of the state before `step`."""
    state = sampler.state_before(rollout, step, model.mask_token_id)
    return model.head(model.encode(state, sampler.attention_mask(rollout))[:, -rollout.response.shape[1] :])


# ----------------------------------------------------------------------------------------------------------------- laws
def law_exact_distribution(generate, order, temperature, tokens_per_step=1, block_length=4, vocab=2, eos=None, draws=20_000):
    """(response, unmask_step) has the distribution that enumeration gives, and so has the response alone."""
    model = TabularDenoiser.random(4, vocab, seeded(7), scale=1.5)
    settings = settings_of(order, temperature, 4, block_length, tokens_per_step)
    out = generate(model, *empty_prompt(), settings, eos_token_id=eos, num_generations=draws, generator=seeded())
    with torch.no_grad():
        exact = trajectories(model, order, temperature, tokens_per_step, block_length=block_length, eos_token_id=eos)
    joint, response = Counter(), Counter()
    for path in exact:
        joint[tuple(path.response), tuple(path.unmask_step)] += float(path.prob)
        response[tuple(path.response)] += float(path.prob)
    assert sum(joint.values()) == pytest.approx(1)
    rows = [(tuple(r), tuple(s)) for r, s in zip(out.response.tolist(), out.unmask_step.tolist(), strict=True)]
    assert chi_square_p(Counter(rows), joint) > 1e-4
    assert chi_square_p(Counter(r for r, _ in rows), response) > 1e-4


def law_scores_replay(generate, order, temperature=0.7, model=None):
    """logp, entropy, topk and one_step equal what the network says of the replayed states."""
    model = model or ContextDenoiser()
    settings = settings_of(order, temperature, 6, 3, 1)
    out = generate(model, *prompts(), settings, eos_token_id=0, num_generations=6, generator=seeded(), records=RECORDS)
    logp, entropy = torch.zeros_like(out.logp), torch.zeros_like(out.logp)
    for step in range(settings.num_steps):
        logits = replayed(out, model, step)
        logq = (logits.to(logp.dtype) / temperature).log_softmax(-1)
        now = out.unmask_step == step
        logp[now] = logq.gather(-1, out.response[..., None])[..., 0][now]
        entropy[now] = -(logq.exp() * logq.clamp_min(-1e9)).sum(-1)[now]
        completion = torch.where(sampler.hidden_before(out, step), logits.argmax(-1), out.response)
        completion = torch.where((step < steps_run(out.unmask_step))[:, None], completion, out.response)
        assert torch.equal(out.records["one_step"][:, step], completion)
        assert_topk(out, logq, now)
    torch.testing.assert_close(out.logp, logp)
    torch.testing.assert_close(out.records["entropy"], entropy)
    assert (out.unmask_step == -1).any() and (out.logp < 0).sum() == (out.unmask_step >= 0).sum()
    for name in ("topk_ids", "topk_logp"):
        assert (out.records[name][out.unmask_step == -1] == 0).all()
    assert out.records["topk_ids"].dtype == torch.int64 and out.records["topk_logp"].dtype == out.logp.dtype


def assert_topk(out, logq, now):
    """The records of the positions revealed `now` are the sorted head of their distributions; [MASK] is not in it."""
    ids, logp = out.records["topk_ids"][now], out.records["topk_logp"][now]
    assert ids.shape[-1] == min(TOP_K, logq.shape[-1] - 1)
    exact = logq[now].sort(descending=True)
    torch.testing.assert_close(logp, exact.values[:, : ids.shape[-1]])
    torch.testing.assert_close(logq[now].gather(-1, ids), logp)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def law_completions_are_drawn(generate, order, temperature=0.7, draws=20_000, record="one_step_sampled"):
    """A drawn completion of a state has the product law of its hidden tokens at the temperature, by the oracle."""
    model = TabularDenoiser.random(3, 3, seeded(8), scale=1.5)
    settings = settings_of(order, temperature, 3, 3, 1)
    out = generate(
        model,
        *empty_prompt(),
        settings,
        eos_token_id=None,
        num_generations=draws,
        generator=seeded(),
        records=[record],
    )
    states = sampler.states(out, model.mask_token_id).tolist()
    for step in range(settings.num_steps):
        drawn = Counter(map(tuple, out.records[record][:, step].tolist()))
        law = Counter()
        for state, count in Counter(map(tuple, states[step])).items():
            hidden = frozenset(i for i, token in enumerate(state) if token == model.mask_token_id)
            for filling in product(range(3), repeat=len(hidden)):
                text = list(state)
                for i, token in zip(sorted(hidden), filling, strict=True):
                    text[i] = token
                logp = token_logp(model, tuple(text), hidden, temperature)
                law[tuple(text)] += count / draws * float(torch.stack([*logp.values()]).detach().sum().exp())
        assert chi_square_p(drawn, law) > 1e-4


def law_the_step_is_taken_from_its_proposals(generate, order, tau=None):
    """What a step reveals stands in its completion; by confidence, it is what is surest there: n tokens, or all above tau."""
    model = TabularDenoiser.random(4, 3, seeded(13), scale=1.5)
    settings = replace(settings_of(order, 0.7, 4, 4, 2), threshold=tau, **({"tokens_per_step": 1} if tau else {}))
    how = {"num_generations": 200, "generator": seeded(), "records": ["one_step_proposed"]}
    out = generate(model, *empty_prompt(), settings, eos_token_id=None, **how)
    proposed, states = out.records["one_step_proposed"], sampler.states(out, model.mask_token_id)
    for b, step in product(range(200), range(int(out.unmask_step.max()) + 1)):
        now, told = out.unmask_step[b] == step, proposed[b, step]
        assert torch.equal(told[now], out.response[b][now]), "what was revealed"
        hidden = states[step, b] == model.mask_token_id
        assert torch.equal(told[~hidden], states[step, b][~hidden]), "what was known"
        if order == LOW and now.any():
            logits = model.logits_at(tuple(states[step, b].tolist()))
            conf = logits.log_softmax(-1).gather(1, told[:, None])[:, 0].detach()
            left = hidden & ~now
            assert not left.any() or conf[now].min() >= conf[left].max()
            assert tau is None or not left.any() or conf[left].max() < math.log(tau), "the others were not sure enough"


def law_completions_have_noise_of_their_own(generate, order):
    """Given the state before the last step, its completion has the law of the response, and is independent of it."""
    model = TabularDenoiser.random(2, 2, seeded(9))
    out = generate(
        model,
        *empty_prompt(),
        settings_of(order, 0.8, 2, 2, 1),
        eos_token_id=None,
        num_generations=20_000,
        generator=seeded(),
        records=["one_step_sampled"],
    )
    state = sampler.state_before(out, 1, model.mask_token_id)
    for (_, j), rows in groups(state):
        own, other = out.response[rows].tolist(), out.records["one_step_sampled"][rows, 1].tolist()
        share = sum(row[j] for row in own) / len(own)  # tokens are 0 and 1
        pairs = Counter((a[j], b[j]) for a, b in zip(own, other, strict=True))
        exact = float(token_logp(model, tuple(own[0]), frozenset([j]), 0.8)[j].detach().exp())
        exact = exact if own[0][j] else 1 - exact
        assert abs(share - exact) < 5 * (exact * (1 - exact) / len(own)) ** 0.5
        joint = {(a, b): (exact if a else 1 - exact) * (exact if b else 1 - exact) for a in (0, 1) for b in (0, 1)}
        assert chi_square_p(pairs, joint) > 1e-4


def groups(state):
    """((state, its only hidden position), its rows) for every distinct state."""
    for one in sorted(set(map(tuple, state.tolist()))):
        rows = (state == torch.tensor(one)).all(1).nonzero()[:, 0]
        yield (one, one.index(max(one))), rows  # [MASK] is the largest id


def law_records_change_nothing(generate, order, temperature):
    """The trajectory with records is that without, for the same generator; each record is what it is without the others."""
    run = partial(generate, ContextDenoiser(), *prompts(), settings_of(order, temperature, 6, 3, 1), eos_token_id=0)
    bare = run(num_generations=4, generator=seeded(3))
    for records in [[name] for name in RECORDS] + [RECORDS]:
        seen = run(num_generations=4, generator=seeded(3), records=records)
        assert_same(replace(seen, records={}), bare)
        alone = run(num_generations=4, generator=seeded(3), records=["one_step_sampled"])
        if "one_step_sampled" in records:
            assert torch.equal(seen.records["one_step_sampled"], alone.records["one_step_sampled"])


def law_topk_by_the_oracle(generate, order, temperature=0.7):
    """Each revealed position lists the tokens of its distribution in the state before its step, likeliest first."""
    model = TabularDenoiser.random(4, 3, seeded(5), scale=1.5)
    settings = settings_of(order, temperature, 4, 2, 1)
    out = generate(model, *empty_prompt(), settings, eos_token_id=2, num_generations=50, generator=seeded(), records=["topk"])
    assert out.records["topk_ids"].shape == (50, 4, 3)
    states = sampler.states(out, model.mask_token_id)
    for b in range(50):
        for i in range(4):
            if out.unmask_step[b, i] >= 0:
                row = tuple(states[out.unmask_step[b, i], b].tolist())
                exact = (model.logits_at(row)[i] / temperature).log_softmax(-1).detach()
                torch.testing.assert_close(out.records["topk_logp"][b, i], exact.sort(descending=True).values)
                assert out.records["topk_ids"][b, i].tolist() == exact.argsort(descending=True).tolist()
            else:
                assert not out.records["topk_ids"][b, i].any() and not out.records["topk_logp"][b, i].any()
    assert (out.unmask_step < 0).any(), "a row that ended early"


def law_seen_logp_by_the_oracle(generate, order):
    """log p of the response's tokens, at temperature 1, in every state before a row's end; 0 where they are visible."""
    model = TabularDenoiser.random(4, 3, seeded(5), scale=1.5)
    settings = settings_of(order, 0.7, 4, 2, 1)
    how = {"eos_token_id": 2, "num_generations": 90, "generator": seeded(), "records": ["seen_logp"]}
    out = generate(model, *empty_prompt(), settings, **how)
    seen, states, ends = out.records["seen_logp"], sampler.states(out, model.mask_token_id), steps_run(out.unmask_step)
    over = sampler.after_end(out.response, 2, 2)
    for b, t, i in product(range(90), range(4), range(4)):
        row = tuple(states[t, b].tolist())
        if t < ends[b] and row[i] == model.mask_token_id and not over[b, i]:
            exact = model.logits_at(row)[i].log_softmax(-1)[out.response[b, i]].detach()
            torch.testing.assert_close(seen[b, t, i], exact)
        else:
            assert seen[b, t, i] == 0
    assert over.any() and seen.dtype == out.logp.dtype


def law_topk_is_short(generate):
    """Of a large vocabulary, 20 tokens."""
    model = FixedDenoiser(torch.linspace(0, 3, 500))
    settings = settings_of("left_to_right", 1.0, 4, 4, 2)
    out = generate(model, *empty_prompt(), settings, eos_token_id=None, generator=seeded(), records=["topk"])
    assert torch.equal(out.records["topk_ids"][0, 0], torch.arange(499, 479, -1))


def law_states_replay(generate, order, early_stop=True):
    """The network saw exactly the states that unmask_step gives back, at full length, with the prompt's padding."""
    model = Spy(ContextDenoiser())
    out = generate(
        model,
        *prompts(),
        settings_of(order, 1.0, 6, 3, 1),
        eos_token_id=0,
        num_generations=4,
        generator=seeded(),
        early_stop=early_stop,
    )
    states = sampler.states(out, model.mask_token_id)
    for step, (seen, mask) in enumerate(zip(model.states, model.masks, strict=True)):
        if early_stop:
            rows = (step < steps_run(out.unmask_step)).nonzero()[:, 0]
            assert torch.equal(seen, states[step][rows])
            assert torch.equal(mask, sampler.attention_mask(out)[rows])
        else:
            rows = step < steps_run(out.unmask_step)
            assert torch.equal(seen[rows], states[step][rows])
    if early_stop:
        assert sum(len(seen) for seen in model.states) == network_calls(out) < out.unmask_step.shape[0] * 6


def test_finished_rows_leave_the_batch_if_nothing_is_said():
    model, settings = Spy(ContextDenoiser()), settings_of("left_to_right", 1.0, 6, 3, 1)
    out = sampler.generate(model, *prompts(), settings, eos_token_id=0, num_generations=4, generator=seeded())
    assert sum(map(len, model.states)) == network_calls(out) < len(out.response) * settings.num_steps


def law_each_step_reveals_n(generate, order):
    """Every step turns n [MASK] of its block into tokens and leaves all else as it is."""
    model, n = Spy(ContextDenoiser()), 2
    settings = settings_of(order, 1.0, 8, 4, n)
    out = generate(model, *prompts(), settings, eos_token_id=None, num_generations=5, generator=seeded())
    seen = [*model.states, torch.cat([out.prompt, out.response], 1)]
    assert len(model.states) == settings.num_steps and out.keep.all()
    assert (seen[0][:, 4:] == model.mask_token_id).all() and (out.response != model.mask_token_id).all()
    for step, (before, after) in enumerate(zip(seen, seen[1:], strict=False)):
        changed = before != after
        block = slice(4 + 4 * (step // 2), 8 + 4 * (step // 2))
        assert (changed.sum(1) == n).all() and (changed[:, block].sum(1) == n).all()
        assert (before[changed] == model.mask_token_id).all() and (after[changed] != model.mask_token_id).all()


def law_same_whatever_the_cost(generate, order, temperature):
    """early_stop and micro_batch change neither the Rollout nor the state in which the generator is left."""
    settings, records = settings_of(order, temperature, 6, 2, 1), RECORDS if temperature else GREEDY_RECORDS
    variants = [{"early_stop": stop, "micro_batch": size} for stop in (True, False) for size in (None, 1, 4)]
    outs = []
    for variant in variants:
        g = seeded(5)
        model = TabularDenoiser.random(6, 3, seeded(1))
        outs.append(
            generate(
                model,
                *empty_prompt(7),
                settings,
                eos_token_id=2,
                num_generations=2,
                generator=g,
                records=records,
                **variant,
            )
        )
        assert torch.equal(torch.rand(4, generator=g), torch.rand(4, generator=after_one_call(generate, settings, records)))
    for other in outs[1:]:
        assert_same(outs[0], other)
    return outs[0]


def after_one_call(generate, settings, records):
    """The generator as a call with the same shapes leaves it, whatever was sampled."""
    g = seeded(5)
    model = TabularDenoiser.random(6, 3, seeded(2))
    generate(model, *empty_prompt(14), settings, eos_token_id=None, generator=g, records=records)
    return g


def law_rows_are_independent(generate, order):
    """A row does not change when the prompts of the other rows do, nor when those end at other times."""
    prompt, mask = prompts()
    run = partial(generate, ContextDenoiser(), settings=settings_of(order, 1.0, 6, 2, 1), eos_token_id=0, num_generations=4)
    a = run(prompt, mask, generator=seeded(2))
    changed = prompt.clone()
    changed[0, -1], changed[2] = 2, torch.tensor([1, 3, 3, 3])
    b = run(changed, mask, generator=seeded(2))
    middle = slice(4, 8)
    assert not torch.equal(steps_run(a.unmask_step), steps_run(b.unmask_step))
    assert torch.equal(a.response[middle], b.response[middle])
    assert torch.equal(a.unmask_step[middle], b.unmask_step[middle])


def law_ties_go_to_the_lower_position(generate, temperature):
    """Equal confidences everywhere: low_confidence reveals from the left, n at a time."""
    settings = settings_of("low_confidence", temperature, 32, 32, 2)
    model = FixedDenoiser(torch.zeros(4))
    out = generate(model, *empty_prompt(), settings, eos_token_id=None, num_generations=3, generator=seeded())
    assert torch.equal(out.unmask_step, (torch.arange(32) // 2).expand(3, -1))


def law_tail_is_reached(generate, dtype):
    """2,000 tokens that share a probability of 0.1 are drawn with that frequency (within 5 standard errors)."""
    probs = torch.cat([torch.tensor([0.7]), torch.full((20,), 0.2 / 20), torch.full((2000,), 0.1 / 2000)])
    model = FixedDenoiser(probs.log().to(dtype))
    mass = model.logits.float().softmax(-1)[21:].sum().item()
    settings = settings_of("left_to_right", 1.0, 50, 50, 50)
    out = generate(model, *empty_prompt(), settings, eos_token_id=None, num_generations=200, generator=seeded(), micro_batch=50)
    tail = (out.response >= 21).float().mean().item()
    assert mass == pytest.approx(0.1, abs=0.01)
    assert abs(tail - mass) < 5 * (mass * (1 - mass) / out.response.numel()) ** 0.5
    assert out.logp.dtype == torch.float32
    exact = model.logits.float().log_softmax(-1)[out.response]
    torch.testing.assert_close(out.logp, exact)


def law_impossible_tokens_stay_impossible(generate):
    """Not even u = 0 or the largest u below 1 draws a token of probability 0."""
    logq = torch.tensor([-torch.inf, 0.3, -torch.inf, 0.7, -torch.inf]).log_softmax(-1).expand(2, 5)
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sampler.inverse_cdf(logq, u).tolist() == [1, 3]


def law_end_of_text(generate, order="left_to_right"):
    """keep ends with the first EOS; the blocks after it are EOS, never revealed, and count nothing."""
    eos, width, rows = 2, 2, 100
    settings = settings_of(order, 1.0, 8, width, 1)
    model = TabularDenoiser.random(8, 3, seeded(4), scale=0.3)
    out = generate(
        model, *empty_prompt(), settings, eos_token_id=eos, num_generations=rows, generator=seeded(), records=RECORDS
    )
    endings = Counter()
    for b in range(rows):
        response = out.response[b].tolist()
        first = response.index(eos) if eos in response else 8
        stop = min(8, (first // width + 1) * width)
        endings[stop] += 1
        assert out.keep[b].tolist() == [l <= first for l in range(8)]
        assert (out.unmask_step[b, :stop] >= 0).all() and (out.logp[b, :stop] < 0).all()
        for dead in (out.response[b, stop:] - eos, out.unmask_step[b, stop:] + 1, out.logp[b, stop:]):
            assert (dead == 0).all()
        assert (out.records["entropy"][b, stop:] == 0).all()
    assert len(endings) == 4 and network_calls(out) == sum(stop * count for stop, count in endings.items())


def law_greedy_needs_no_noise(generate, order):
    """Temperature 0: the argmax; the generator is neither needed nor moved; logp and entropy are 0."""
    g = seeded()
    before = g.get_state()
    model = ContextDenoiser()
    run = partial(generate, model, *prompts(), settings_of(order, 0.0, 6, 3, 1), eos_token_id=None, records=GREEDY_RECORDS)
    a, b = run(generator=g), run(generator=None)
    assert_same(a, b)
    assert torch.equal(g.get_state(), before)
    assert (a.logp == 0).all() and (a.records["entropy"] == 0).all()
    assert torch.equal(a.records["one_step_sampled"], a.records["one_step"]), "softmax(z / 0) is the argmax"
    for step in range(6):
        now = a.unmask_step == step
        assert torch.equal(replayed(a, model, step).argmax(-1)[now], a.response[now])


def law_host_is_asked_once_a_block(generate, order):
    """No data-dependent host value inside a block: one for early stopping per block, one for the final check."""
    settings = settings_of(order, 1.0, 8, 4, 1)
    with HostQuestions() as questions:
        generate(ContextDenoiser(), *prompts(), settings, eos_token_id=0, generator=seeded(), records=RECORDS, micro_batch=2)
    assert 1 <= questions.count <= settings.num_blocks + 1


class HostQuestions(TorchDispatchMode):
    """Counts the operations that make the host wait for a device: .item(), nonzero, indexing by a boolean mask."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        waits = any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique"))
        indices = args[1] if name.startswith(("index.Tensor", "index_put")) else ()
        waits |= any(index is not None and index.dtype == torch.bool for index in indices)
        self.count += waits
        return func(*args, **(kwargs or {}))


def law_head_sees_only_what_it_must(generate, order):
    """Positions given to head: the block for low_confidence, the n revealed ones for the other orders."""
    model = Spy(ContextDenoiser())
    generate(model, *prompts(), settings_of(order, 1.0, 8, 4, 2), eos_token_id=None, generator=seeded())
    assert model.positions == [3 * (4 if order == "low_confidence" else 2)] * 4


# --------------------------------------------------------------------------------------------- the laws hold in minidrl
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab, tokens_per_step, block_length", [(2, 1, 4), (4, 2, 4), (3, 1, 2)])
def test_exact_distribution(order, temperature, vocab, tokens_per_step, block_length):
    law_exact_distribution(sampler.generate, order, temperature, tokens_per_step, block_length, vocab)


@pytest.mark.parametrize("order", ORDERS)
def test_exact_distribution_with_eos(order):
    law_exact_distribution(sampler.generate, order, 0.7, 1, 2, vocab=3, eos=1)


@pytest.mark.parametrize("order", ORDERS)
def test_exact_distribution_greedy(order):
    law_exact_distribution(sampler.generate, order, 0.0, 1, 4, vocab=2, draws=500)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_replay(order, temperature):
    law_scores_replay(sampler.generate, order, temperature)
    law_scores_replay(sampler.generate, order, temperature, ContextDenoiser(dtype=torch.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_completions(order):
    law_completions_are_drawn(sampler.generate, order)
    law_completions_are_drawn(sampler.generate, order, record="one_step_proposed")
    law_the_step_is_taken_from_its_proposals(sampler.generate, order)
    law_completions_have_noise_of_their_own(sampler.generate, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_records_change_nothing(order, temperature):
    law_records_change_nothing(sampler.generate, order, temperature)


@pytest.mark.parametrize("order", ORDERS)
def test_topk(order):
    law_topk_by_the_oracle(sampler.generate, order)
    law_topk_is_short(sampler.generate)


@pytest.mark.parametrize("order", ORDERS)
def test_seen_logp(order):
    law_seen_logp_by_the_oracle(sampler.generate, order)


def test_more_of_seen_logp_than_there_is_room_for_is_refused(monkeypatch):
    monkeypatch.setattr(sampler, "CHUNK", 6 * 6 * 6 * ContextDenoiser().vocab_size - 1)
    how = {"eos_token_id": None, "generator": seeded(), "records": ["seen_logp"]}
    run = partial(sampler.generate, ContextDenoiser(), *prompts(), settings_of("random", 1.0, 6, 3, 1), **how)
    assert run(num_generations=1).records["seen_logp"].shape == (3, 6, 6)
    with pytest.raises(ValueError, match="^records: got 'seen_logp' of 6 responses, .* numbers; allowed up to"):
        run(num_generations=2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_states_replay(order, early_stop):
    law_states_replay(sampler.generate, order, early_stop)


@pytest.mark.parametrize("order", ORDERS)
def test_each_step_reveals_n(order):
    law_each_step_reveals_n(sampler.generate, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_whatever_the_cost(order, temperature):
    out = law_same_whatever_the_cost(sampler.generate, order, temperature)
    if temperature:
        assert len(set(steps_run(out.unmask_step).tolist())) > 1, "rows should end at different steps"


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_independent(order):
    law_rows_are_independent(sampler.generate, order)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_ties(temperature):
    law_ties_go_to_the_lower_position(sampler.generate, temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tail(dtype):
    law_tail_is_reached(sampler.generate, dtype)


def test_impossible_tokens():
    law_impossible_tokens_stay_impossible(sampler.generate)


@pytest.mark.parametrize("order", ORDERS)
def test_end_of_text(order):
    law_end_of_text(sampler.generate, order)


@pytest.mark.parametrize("order", ["low_confidence", "left_to_right"])
def test_greedy(order):
    law_greedy_needs_no_noise(sampler.generate, order)


@pytest.mark.parametrize("order", ORDERS)
def test_host_questions(order):
    law_host_is_asked_once_a_block(sampler.generate, order)


@pytest.mark.parametrize("order", ORDERS)
def test_head_positions(order):
    law_head_sees_only_what_it_must(sampler.generate, order)


# ------------------------------------------------------------------------------------------------------------- examples
@pytest.mark.parametrize("order", ORDERS)
def test_left_padding_changes_nothing(order, monkeypatch):
    """A batch of prompts of unequal length gives what each prompt gives alone, with the same share of the noise."""
    model, (prompt, mask), settings = ContextDenoiser(), prompts(), settings_of(order, 1.0, 6, 3, 1)
    together = sampler.generate(model, prompt, mask, settings, eos_token_id=0, num_generations=4, generator=seeded())
    noise = sampler.draw_noise(settings, 12, seeded(), prompt.device)
    for g in range(3):
        rows = slice(4 * g, 4 * g + 4)
        share = sampler.Noise(*(None if x is None else x[:, rows] for x in (noise.order, noise.uniform)))
        monkeypatch.setattr(sampler, "draw_noise", lambda *_, share=share: share)
        bare = prompt[g, mask[g]][None]
        alone = sampler.generate(
            model,
            bare,
            torch.ones_like(bare, dtype=torch.bool),
            settings,
            eos_token_id=0,
            num_generations=4,
            generator=seeded(),
        )
        assert torch.equal(alone.response, together.response[rows])
        assert torch.equal(alone.unmask_step, together.unmask_step[rows])
        torch.testing.assert_close(alone.logp, together.logp[rows])
    assert len({tuple(r) for r in together.response.tolist()}) > 4


def test_rows_are_prompt_major():
    out = sampler.generate(
        ContextDenoiser(), *prompts(), settings_of("random"), eos_token_id=None, num_generations=2, generator=seeded()
    )
    assert torch.equal(out.prompt, prompts()[0][[0, 0, 1, 1, 2, 2]])
    assert torch.equal(out.prompt_mask, prompts()[1][[0, 0, 1, 1, 2, 2]])
    assert out.num_generations == 2 and out.sampler == settings_of("random") and out.records == {}


def test_global_random_state_is_untouched():
    before = torch.get_rng_state()
    for order in ORDERS:
        sampler.generate(ContextDenoiser(), *prompts(), settings_of(order), eos_token_id=0, generator=seeded(), records=RECORDS)
    assert torch.equal(torch.get_rng_state(), before)


def test_result_can_enter_a_graph_but_carries_none():
    model = TabularDenoiser.random(4, 2, seeded())
    out = sampler.generate(model, *empty_prompt(), settings_of("random"), eos_token_id=None, generator=seeded())
    assert not out.logp.requires_grad and not out.logp.is_inference()
    weight = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    (weight * out.logp).sum().backward()
    assert torch.equal(weight.grad, out.logp)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_raise(order, temperature, bad):
    model = FixedDenoiser(torch.tensor([0.0, bad, 1.0]))
    with pytest.raises(FloatingPointError, match=r"^logits: the model returned NaN or \+inf$"):
        sampler.generate(model, *empty_prompt(), settings_of(order, temperature), eos_token_id=0, generator=seeded())


VALID = settings_of("random", 1.0, 8, 4, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"order": "confidence"}, "order: got 'confidence'; allowed random, low_confidence, left_to_right, right_to_left"),
        ({"temperature": -0.1}, "temperature: got -0.1; allowed 0 (greedy), and numbers from 1e-06 to 1,000,000"),
        ({"temperature": float("nan")}, "temperature: got nan; allowed 0 (greedy), and numbers from 1e-06 to 1,000,000"),
        ({"temperature": float("inf")}, "temperature: got inf; allowed 0 (greedy), and numbers from 1e-06 to 1,000,000"),
        ({"temperature": "hot"}, "temperature: got 'hot'; allowed 0 (greedy), and numbers from 1e-06 to 1,000,000"),
        ({"length": 0}, "length: got 0; allowed an integer >= 1"),
        ({"length": 8.0}, "length: got 8.0; allowed an integer >= 1"),
        ({"tokens_per_step": True}, "tokens_per_step: got True; allowed an integer >= 1"),
        ({"block_length": 3}, "block_length: got 3; allowed a divisor of length = 8"),
        ({"block_length": 16}, "block_length: got 16; allowed a divisor of length = 8"),
        ({"tokens_per_step": 3}, "tokens_per_step: got 3; allowed a divisor of block_length = 4"),
    ],
)
def test_settings_errors(change, message):
    with pytest.raises(ValueError) as error:
        replace(VALID, **change)
    assert str(error.value) == message


def test_settings_count_the_steps():
    assert (VALID.num_blocks, VALID.steps_per_block, VALID.num_steps) == (2, 2, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"records": ["entropies"]},
            "records: got 'entropies'; allowed entropy, one_step, one_step_sampled, one_step_proposed, topk, seen_logp",
        ),
        (
            {"records": ["topk"], "settings": replace(VALID, temperature=0)},
            "records: got 'topk' at temperature 0; allowed above 0, where more than one token has a probability",
        ),
        ({"num_generations": 0}, "num_generations: got 0; allowed an integer >= 1"),
        ({"micro_batch": 0}, "micro_batch: got 0; allowed an integer >= 1"),
        ({"eos_token_id": 4}, "eos_token_id: got 4; allowed None or a token id below 5 other than [MASK] = 4"),
        ({"eos_token_id": -1}, "eos_token_id: got -1; allowed None or a token id below 5 other than [MASK] = 4"),
        (
            {"generator": None},
            "generator: got None; allowed a torch.Generator (order 'random' at temperature 1.0 is random)",
        ),
        (
            {"prompt_mask": torch.ones(3, 4)},
            "prompt, prompt_mask: got (3, 4) and torch.float32 (3, 4); allowed (G, P) and bool (G, P)",
        ),
    ],
)
def test_argument_errors(change, message):
    prompt, mask = prompts()
    arguments = {"prompt": prompt, "prompt_mask": mask, "settings": VALID, "eos_token_id": 0, "generator": seeded()}
    with pytest.raises(ValueError) as error:
        sampler.generate(ContextDenoiser(), **arguments | change)
    assert str(error.value) == message


# -------------------------------------------------------------------------------------------------------------- mutants
ORIGINAL = {name: value for name, value in vars(sampler).items() if callable(value)}


def confidence_at_sampling_t(logits, temperature, u, with_confidence):
    proposal = ORIGINAL["propose"](logits, temperature, u, with_confidence)
    return replace(proposal, confidence=proposal.logp.float() if with_confidence else None)


def scores_at_temperature_one(logits, temperature, u, with_confidence):
    proposal = ORIGINAL["propose"](logits, temperature, u, with_confidence)
    logq = logits.log_softmax(-1)
    return replace(proposal, logp=logq.gather(-1, proposal.token[..., None])[..., 0])


def entropy_at_temperature_one(logits, temperature, u, with_confidence):
    proposal = ORIGINAL["propose"](logits, temperature, u, with_confidence)
    return replace(proposal, logq=logits.log_softmax(-1))


def temperature_forgotten(logits, temperature, u, with_confidence):
    return ORIGINAL["propose"](logits, 1.0, u, with_confidence)


def temperature_inverted(logits, temperature, u, with_confidence):
    return ORIGINAL["propose"](logits, 1 / temperature, u, with_confidence)


def order_reversed(settings, rows, generator, device, records):
    noise = ORIGINAL["draw_noise"](settings, rows, generator, device, records)
    return replace(noise, order=noise.order.flip(-1))


def noise_shared_by_the_rows(settings, rows, generator, device, records):
    noise = ORIGINAL["draw_noise"](settings, rows, generator, device, records)
    return replace(noise, uniform=noise.uniform[:, :1].expand(-1, rows, -1))


def records_drawn_first(settings, rows, generator, device, records):
    noise = ORIGINAL["draw_noise"](settings, rows, generator, device, records)
    return noise if noise.completion is None else ORIGINAL["draw_noise"](settings, rows, generator, device, records)


def noise_of_the_trajectory(settings, rows, generator, device, records):
    noise = ORIGINAL["draw_noise"](settings, rows, generator, device, records)
    return replace(noise, completion=noise.uniform.expand(-1, -1, settings.length))


def noise_by_place_in_the_part(model, settings, trace, noise, step, rows, cache):
    uniform = noise.uniform[:, : len(rows)]
    padded = noise.uniform.clone()
    padded[:, rows] = uniform
    ORIGINAL["reveal"](model, settings, trace, replace(noise, uniform=padded), step, rows, cache)


def gumbel_in_bfloat16(logq, u):
    noise = torch.rand(logq.shape, generator=seeded(1)).bfloat16().clamp(1 / 256, 255 / 256)
    return (logq.bfloat16() - (-noise.log()).log()).argmax(-1)


def search_from_the_left(logq, u):
    cdf = logq.exp().cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, u[..., None] * cdf[..., -1:], right=False)[..., 0]


def rotations_only(priority):
    width = priority.shape[-1]
    return (torch.arange(width) + priority[..., :1].mul(width).long()) % width


def never_revealed_is_visible(prompt, prompt_mask, settings, mask_token_id, records):
    trace = ORIGINAL["blank_trace"](prompt, prompt_mask, settings, mask_token_id, records)
    trace.tokens[:, -settings.block_length :] = 0
    return trace


def padding_is_visible(prompt, prompt_mask, settings, mask_token_id, records):
    return ORIGINAL["blank_trace"](prompt, torch.ones_like(prompt_mask), settings, mask_token_id, records)


def ties_to_the_higher_position(conf, hidden, n):
    flipped = ORIGINAL["most_confident"](conf.flip(1), hidden.flip(1), n)
    return conf.shape[1] - 1 - flipped


def least_confident(conf, hidden, n):
    return ORIGINAL["most_confident"](-conf, hidden, n)


def revealed_again(conf, hidden, n):
    return ORIGINAL["most_confident"](conf, torch.ones_like(hidden), n)


def nothing_is_over(response, block_length, eos_token_id):
    return torch.zeros_like(response, dtype=torch.bool)


def over_right_after_eos(response, block_length, eos_token_id):
    return ORIGINAL["after_end"](response, 1, eos_token_id)


def last_eos_counts(response, block_length, eos_token_id):
    later = (response == eos_token_id).flip(1).cumsum(1).flip(1) > 0
    return ~later & (response == eos_token_id).any(1, keepdim=True)


def keep_without_eos(response, eos_token_id):
    return (response == eos_token_id).cumsum(1) == 0


def dropped_too_early(trace, rows, block, settings, eos_token_id):
    return ORIGINAL["unfinished"](trace, rows, block, settings, eos_token_id)[:-1]


def never_dropped(trace, rows, block, settings, eos_token_id):
    return rows


def asked_at_every_step(model, settings, trace, noise, step, rows, cache):
    ORIGINAL["reveal"](model, settings, trace, noise, step, rows, cache)
    assert trace.logp.sum().item() <= 0


def hidden_one_step_too_late(rollout, step):
    return (rollout.unmask_step < 0) | (rollout.unmask_step > step)


def never_revealed_comes_back(rollout, step):
    return rollout.unmask_step >= step


def completion_forgets_the_revealed(model, h, tokens, settings, u):
    return ORIGINAL["one_step_completion"](model, h, torch.full_like(tokens, model.mask_token_id), settings, u)


def completion_at_temperature_one(model, h, tokens, settings, u):
    return ORIGINAL["one_step_completion"](model, h, tokens, replace(settings, temperature=1.0), u)


def completion_is_greedy(model, h, tokens, settings, u):
    return ORIGINAL["one_step_completion"](model, h, tokens, settings, None)


def completion_by_one_number(model, h, tokens, settings, u):
    return ORIGINAL["one_step_completion"](model, h, tokens, settings, None if u is None else u[:, :1].expand_as(u))


def proposals_without_their_noise(model, settings, trace, noise, step, rows, h, positions, proposed):
    ORIGINAL["record_completions"](model, settings, trace, noise, step, rows, h, positions[:, :0], proposed[:, :0])


def proposals_of_the_revealed(model, settings, trace, noise, step, rows, h, positions, proposed):
    ORIGINAL["record_completions"](model, settings, trace, noise, step, rows, h, positions, proposed.flip(1))


def proposals_of_the_chosen_only(model, settings, trace, noise, step, rows, h, positions, proposed):
    logits = model.head(sampler.at(h, positions - (trace.unmask_step.shape[1] - h.shape[1])))
    hidden, conf = trace.unmask_step[rows].gather(1, positions) < 0, sampler.confidence(logits, proposed)
    chosen = sampler.most_confident(conf, hidden, settings.tokens_per_step)
    few = (positions.gather(1, chosen), proposed.gather(1, chosen))
    ORIGINAL["record_completions"](model, settings, trace, noise, step, rows, h, *few)


def completion_noise_by_place_in_the_part(model, settings, trace, noise, step, rows, cache):
    completion = noise.completion.clone()
    completion[:, rows] = noise.completion[:, : len(rows)]
    ORIGINAL["reveal"](model, settings, trace, replace(noise, completion=completion), step, rows, cache)


def topk_of_the_next_position(trace, settings, step, rows, positions, proposal):
    ORIGINAL["write"](trace, settings, step, rows, positions, proposal)
    if "topk_ids" in trace.records:
        trace.records["topk_ids"] = trace.records["topk_ids"].roll(1, 1)


def topk_least_likely(trace, settings, step, rows, positions, proposal):
    turned = replace(proposal, logq=-proposal.logq)
    ORIGINAL["write"](trace, settings, step, rows, positions, turned)


def topk_of_the_confidence(trace, settings, step, rows, positions, proposal):
    warm = (proposal.logq * settings.temperature).log_softmax(-1)
    ORIGINAL["write"](trace, settings, step, rows, positions, replace(proposal, logq=warm))


def topk_without_limit(trace, count):
    ORIGINAL["add_topk"](trace, count + 1)


def topk_of_what_was_over(trace, prompt, prompt_mask, settings, eos_token_id, num_generations):
    out = ORIGINAL["finish"](trace, prompt, prompt_mask, settings, eos_token_id, num_generations)
    out.records.update({name: trace.records[name] for name in ("topk_ids", "topk_logp") if name in trace.records})
    return out


def seen_of_the_next_token(trace, prompt, prompt_mask, settings, eos_token_id, num_generations):
    wrong = trace.records["seen_logp"].roll(1, -1)
    trace = replace(trace, records={"seen_logp": wrong})
    return ORIGINAL["finish"](trace, prompt, prompt_mask, settings, eos_token_id, num_generations)


def seen_one_step_late(trace, prompt, prompt_mask, settings, eos_token_id, num_generations):
    wrong = trace.records["seen_logp"].roll(1, 1)
    trace = replace(trace, records={"seen_logp": wrong})
    return ORIGINAL["finish"](trace, prompt, prompt_mask, settings, eos_token_id, num_generations)


LOW, LEFT = "low_confidence", "left_to_right"
exact, scores = law_exact_distribution, law_scores_replay
MUTANTS = [
    ("propose", confidence_at_sampling_t, partial(exact, order=LOW, temperature=0.7, tokens_per_step=2, vocab=4)),
    ("propose", scores_at_temperature_one, partial(scores, order=LEFT)),
    ("propose", entropy_at_temperature_one, partial(scores, order=LEFT)),
    ("propose", temperature_forgotten, partial(exact, order=LEFT, temperature=0.7)),
    ("propose", temperature_inverted, partial(exact, order=LEFT, temperature=0.7)),
    ("draw_noise", order_reversed, partial(exact, order=LEFT, temperature=1.0)),
    ("draw_noise", noise_shared_by_the_rows, partial(exact, order=LEFT, temperature=1.0)),
    ("reveal", noise_by_place_in_the_part, partial(law_same_whatever_the_cost, order=LEFT, temperature=1.0)),
    ("reveal", asked_at_every_step, partial(law_host_is_asked_once_a_block, order=LEFT)),
    ("inverse_cdf", gumbel_in_bfloat16, partial(law_tail_is_reached, dtype=torch.float32)),
    ("inverse_cdf", search_from_the_left, law_impossible_tokens_stay_impossible),
    ("permutations", rotations_only, partial(exact, order="random", temperature=1.0)),
    ("blank_trace", never_revealed_is_visible, partial(law_states_replay, order="random")),
    ("blank_trace", padding_is_visible, partial(law_states_replay, order="random")),
    ("most_confident", ties_to_the_higher_position, partial(law_ties_go_to_the_lower_position, temperature=1.0)),
    ("most_confident", least_confident, partial(exact, order=LOW, temperature=1.0)),
    ("most_confident", revealed_again, partial(law_each_step_reveals_n, order=LOW)),
    ("after_end", nothing_is_over, partial(law_same_whatever_the_cost, order=LEFT, temperature=1.0)),
    ("after_end", over_right_after_eos, law_end_of_text),
    ("after_end", last_eos_counts, law_end_of_text),
    ("keep_mask", keep_without_eos, law_end_of_text),
    ("unfinished", dropped_too_early, partial(law_same_whatever_the_cost, order=LEFT, temperature=1.0)),
    ("unfinished", never_dropped, partial(law_states_replay, order=LEFT)),
    ("hidden_before", hidden_one_step_too_late, partial(law_states_replay, order=LEFT)),
    ("hidden_before", never_revealed_comes_back, partial(law_states_replay, order=LEFT, early_stop=False)),
    ("one_step_completion", completion_forgets_the_revealed, partial(scores, order=LEFT)),
    ("one_step_completion", completion_forgets_the_revealed, partial(law_completions_are_drawn, order="random")),
    ("one_step_completion", completion_at_temperature_one, partial(law_completions_are_drawn, order=LEFT)),
    ("one_step_completion", completion_is_greedy, partial(law_completions_are_drawn, order=LEFT)),
    ("one_step_completion", completion_by_one_number, partial(law_completions_are_drawn, order=LEFT)),
    ("record_completions", proposals_without_their_noise, partial(law_the_step_is_taken_from_its_proposals, order="random")),
    ("record_completions", proposals_of_the_revealed, partial(law_the_step_is_taken_from_its_proposals, order="random")),
    ("record_completions", proposals_of_the_chosen_only, partial(law_the_step_is_taken_from_its_proposals, order=LOW)),
    ("draw_noise", noise_of_the_trajectory, partial(law_completions_have_noise_of_their_own, order=LEFT)),
    ("draw_noise", records_drawn_first, partial(law_records_change_nothing, order=LEFT, temperature=1.0)),
    ("reveal", completion_noise_by_place_in_the_part, partial(law_same_whatever_the_cost, order=LEFT, temperature=1.0)),
    ("write", topk_of_the_next_position, partial(law_topk_by_the_oracle, order=LEFT)),
    ("write", topk_least_likely, partial(law_topk_by_the_oracle, order="random")),
    ("write", topk_of_the_confidence, partial(law_topk_by_the_oracle, order=LOW)),
    ("add_topk", topk_without_limit, law_topk_is_short),
    ("finish", seen_of_the_next_token, partial(law_seen_logp_by_the_oracle, order="random")),
    ("finish", seen_one_step_late, partial(law_seen_logp_by_the_oracle, order=LOW)),
    ("finish", topk_of_what_was_over, partial(law_same_whatever_the_cost, order=LEFT, temperature=1.0)),
]


@pytest.mark.parametrize("attribute, mutant, law", MUTANTS, ids=[mutant.__name__ for _, mutant, _ in MUTANTS])
def test_mutant_is_killed(attribute, mutant, law, monkeypatch):
    law(sampler.generate)
    monkeypatch.setattr(sampler, attribute, mutant)
    with pytest.raises(AssertionError):
        law(sampler.generate)
