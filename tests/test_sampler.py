"""Laws of generation, and at the end mutants: a passage of the sampler replaced, and the law that notices."""

import copy
import inspect
import textwrap
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import judged
from minidrl import sampler
from minidrl.oracle import TabularDenoiser, policy, token_logp, trajectories
from minidrl.sampler import ORDERS, RECORDS, TOP_K, Sampler, network_calls, steps_run

LOW, LEFT = "low_confidence", "left_to_right"
EVERYONE = {"agree": lambda rows, left: rows}  # no row stops early
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
        return self.logits.float().expand(*h.shape[:-1], -1)


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


def settings_of(order, temperature=1.0, length=4, block_length=4, tokens_per_step=1, threshold=None, **more):
    words = {"length": length, "block_length": block_length, "tokens_per_step": tokens_per_step}
    return Sampler(order=order, temperature=temperature, threshold=threshold, **words, **more)


def empty_prompt(groups=1):
    return torch.zeros(groups, 0, dtype=torch.long), torch.ones(groups, 0, dtype=torch.bool)


def prompts():
    """Three prompts of 4, 2 and 3 tokens, left-padded with token 0."""
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    return torch.tensor([[1, 2, 3, 1], [0, 0, 3, 2], [0, 2, 2, 1]]), mask


def run(model, settings, given=None, **words):
    """A Rollout of three prompts, or of no prompt at all where the model is a table or fixed, by the noise of seed 0."""
    given = given or (prompts() if isinstance(model, (ContextDenoiser, Spy)) else empty_prompt())
    return sampler.generate(model, *given, settings, **{"eos_token_id": None, "generator": seeded()} | words)


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


def assert_law(out, paths):
    """(response, unmask_step) of the rows have the distribution that enumeration gives, and so has the response alone."""
    joint, response = Counter(), Counter()
    for path in paths:
        joint[tuple(path.response), tuple(path.unmask_step)] += float(path.prob.detach())
        response[tuple(path.response)] += float(path.prob.detach())
    assert sum(joint.values()) == pytest.approx(1)
    rows = [(tuple(r), tuple(s)) for r, s in zip(out.response.tolist(), out.unmask_step.tolist(), strict=True)]
    assert chi_square_p(Counter(rows), joint) > 1e-4
    assert chi_square_p(Counter(r for r, _ in rows), response) > 1e-4


@torch.no_grad()
def assert_replayed(out, model):
    """logp, entropy, topk and one_step equal what the network says of the replayed states, by plain calls at full length."""
    temperature, top_p, taken = out.sampler.temperature, out.sampler.top_p, steps_run(out.unmask_step)
    logp, entropy = torch.zeros_like(out.logp), torch.zeros_like(out.logp)
    for step in range(out.sampler.num_steps):
        logits, now = replayed(out, model, step), out.unmask_step == step
        assert torch.equal(now.any(1), step < taken), "each step of a row reveals something"
        if "one_step" in out.records:
            completion = torch.where(sampler.hidden_before(out, step), logits.argmax(-1), out.response)
            completion = torch.where((step < taken)[:, None], completion, out.response)
            assert torch.equal(out.records["one_step"][:, step], completion)
        if temperature == 0:
            assert torch.equal(logits.argmax(-1)[now], out.response[now])
            continue
        logq = torch.stack([policy(row, temperature, top_p) for row in logits.to(logp.dtype)]).log()
        logp[now] = logq.gather(-1, out.response[..., None])[..., 0][now]
        entropy[now] = torch.special.entr(logq.exp()).sum(-1)[now]
        assert_topk(out, logq, now)
    torch.testing.assert_close(out.logp, logp)
    torch.testing.assert_close(out.records["entropy"], entropy)


def states_of(rollout, mask_token_id):
    """The states before all steps, (T, B, P + L)."""
    return torch.stack([sampler.state_before(rollout, step, mask_token_id) for step in range(rollout.sampler.num_steps)])


def replayed(rollout, model, step):
    """Logits at every response position of the state before `step`."""
    state = sampler.state_before(rollout, step, model.mask_token_id)
    return model.head(model.encode(state, sampler.attention_mask(rollout))[:, -rollout.response.shape[1] :])


# ----------------------------------------------------------------------------------------------------------------- laws
def law_exact_distribution(order, temperature, tokens_per_step=1, block_length=4, vocab=2, eos=None, draws=20_000, top_p=1.0):
    """(response, unmask_step) has the distribution that enumeration gives, and so has the response alone."""
    model = TabularDenoiser.random(4, vocab, seeded(7), scale=1.5)
    settings = settings_of(order, temperature, 4, block_length, tokens_per_step, top_p=top_p)
    out = run(model, settings, eos_token_id=eos, num_generations=draws)
    with torch.no_grad():
        assert_law(out, trajectories(model, order, temperature, tokens_per_step, block_length, eos, top_p=top_p))


def law_scores_replay(order, temperature=0.7, model=None, threshold=None, eos=0, top_p=1.0):
    """logp, entropy, topk and one_step equal what the network says of the replayed states."""
    model, records = model or ContextDenoiser(), RECORDS if temperature else GREEDY_RECORDS
    settings = settings_of(order, temperature, 6, 3, 1, threshold, top_p=top_p)
    out = run(model, settings, eos_token_id=eos, num_generations=6, records=records)
    assert_replayed(out, model)
    assert eos is None or temperature == 0 or (out.unmask_step == -1).any(), "a row that ended early"
    for name in ("topk_ids", "topk_logp") if temperature else ():
        assert (out.records[name][out.unmask_step == -1] == 0).all()


def assert_topk(out, logq, now):
    """The records of the positions revealed `now` are the sorted head of their distributions; [MASK] is not in it."""
    ids, logp = out.records["topk_ids"][now], out.records["topk_logp"][now]
    assert ids.shape[-1] == min(TOP_K, logq.shape[-1] - 1)
    exact = logq[now].sort(descending=True)
    torch.testing.assert_close(logp, exact.values[:, : ids.shape[-1]])
    torch.testing.assert_close(logq[now].gather(-1, ids), logp)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def law_completions_are_drawn(order, temperature=0.7, draws=20_000, record="one_step_sampled"):
    """A drawn completion of a state has the product law of its hidden tokens at the temperature, by the oracle."""
    model = TabularDenoiser.random(3, 3, seeded(8), scale=1.5)
    settings = settings_of(order, temperature, 3, 3, 1)
    out = run(model, settings, num_generations=draws, records=[record])
    states = states_of(out, model.mask_token_id).tolist()
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


def law_the_step_is_taken_from_its_proposals(order):
    """What a step reveals stands in its completion; by confidence, it is the n tokens that are surest there."""
    model = TabularDenoiser.random(4, 3, seeded(13), scale=1.5)
    out = run(model, settings_of(order, 0.7, 4, 4, 2), num_generations=200, records=["one_step_proposed"])
    proposed, states = out.records["one_step_proposed"], states_of(out, model.mask_token_id)
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


def law_completions_have_noise_of_their_own(order):
    """Given the state before the last step, its completion has the law of the response, and is independent of it."""
    model = TabularDenoiser.random(2, 2, seeded(9))
    out = run(model, settings_of(order, 0.8, 2, 2, 1), num_generations=20_000, records=["one_step_sampled"])
    state = sampler.state_before(out, 1, model.mask_token_id)
    for one in sorted(set(map(tuple, state.tolist()))):  # its only hidden position j has the largest id, [MASK]
        j, rows = one.index(max(one)), (state == torch.tensor(one)).all(1).nonzero()[:, 0]
        own, other = out.response[rows].tolist(), out.records["one_step_sampled"][rows, 1].tolist()
        share = sum(row[j] for row in own) / len(own)  # tokens are 0 and 1
        pairs = Counter((a[j], b[j]) for a, b in zip(own, other, strict=True))
        exact = float(token_logp(model, tuple(own[0]), frozenset([j]), 0.8)[j].detach().exp())
        exact = exact if own[0][j] else 1 - exact
        assert abs(share - exact) < 5 * (exact * (1 - exact) / len(own)) ** 0.5
        joint = {(a, b): (exact if a else 1 - exact) * (exact if b else 1 - exact) for a in (0, 1) for b in (0, 1)}
        assert chi_square_p(pairs, joint) > 1e-4


def law_records_change_nothing(order, temperature):
    """The trajectory with records is that without, for the same generator; each record is what it is without the others."""
    settings, how = settings_of(order, temperature, 6, 3, 1), {"eos_token_id": 0, "num_generations": 4}
    bare, every = run(ContextDenoiser(), settings, **how), run(ContextDenoiser(), settings, records=RECORDS, **how)
    assert_same(replace(every, records={}), bare)
    for name in RECORDS:
        alone = run(ContextDenoiser(), settings, records=[name], **how)
        assert_same(replace(every, records={key: every.records[key] for key in alone.records}), alone)


def law_seen_logp_by_the_oracle(order):
    """log p of the response's tokens, at temperature 1, in every state before a row's end; 0 where they are visible."""
    model = TabularDenoiser.random(4, 3, seeded(5), scale=1.5)
    settings = settings_of(order, 0.7, 4, 2, 1)
    out = run(model, settings, eos_token_id=2, num_generations=90, records=["seen_logp"])
    seen, states, ends = out.records["seen_logp"], states_of(out, model.mask_token_id), steps_run(out.unmask_step)
    over = sampler.after_end(out.response, 2, 2)
    for b, t, i in product(range(90), range(4), range(4)):
        row = tuple(states[t, b].tolist())
        if t < ends[b] and row[i] == model.mask_token_id and not over[b, i]:
            exact = model.logits_at(row)[i].log_softmax(-1)[out.response[b, i]].detach()
            torch.testing.assert_close(seen[b, t, i], exact)
        else:
            assert seen[b, t, i] == 0
    assert over.any() and seen.dtype == out.logp.dtype


def law_topk_is_short():
    """Of a large vocabulary, 20 tokens."""
    model = FixedDenoiser(torch.linspace(0, 3, 500))
    out = run(model, settings_of("left_to_right", 1.0, 4, 4, 2), records=["topk"])
    assert torch.equal(out.records["topk_ids"][0, 0], torch.arange(499, 479, -1))


def law_states_replay(order):
    """The network saw exactly the states that unmask_step gives back, at full length, with the prompt's padding."""
    model = Spy(ContextDenoiser())
    out = run(model, settings_of(order, 1.0, 6, 3, 1), eos_token_id=0, num_generations=4)
    states = states_of(out, model.mask_token_id)
    for step, (seen, mask) in enumerate(zip(model.states, model.masks, strict=True)):
        rows = (step < steps_run(out.unmask_step)).nonzero()[:, 0]
        assert torch.equal(seen, states[step][rows])
        assert torch.equal(mask, sampler.attention_mask(out)[rows])
    assert sum(len(seen) for seen in model.states) == network_calls(out) < out.unmask_step.shape[0] * 6


def law_each_step_reveals_n(order):
    """Every step turns n [MASK] of its block into tokens and leaves all else as it is."""
    model, n = Spy(ContextDenoiser()), 2
    settings = settings_of(order, 1.0, 8, 4, n)
    out = run(model, settings, num_generations=5)
    seen = [*model.states, torch.cat([out.prompt, out.response], 1)]
    assert len(model.states) == settings.num_steps and out.keep.all()
    assert (seen[0][:, 4:] == model.mask_token_id).all() and (out.response != model.mask_token_id).all()
    for step, (before, after) in enumerate(zip(seen, seen[1:], strict=False)):
        changed = before != after
        block = slice(4 + 4 * (step // 2), 8 + 4 * (step // 2))
        assert (changed.sum(1) == n).all() and (changed[:, block].sum(1) == n).all()
        assert (before[changed] == model.mask_token_id).all() and (after[changed] != model.mask_token_id).all()


def law_same_whatever_the_cost(order, temperature):
    """Who goes on and micro_batch change neither the Rollout nor the state in which the generator is left."""
    settings, records = settings_of(order, temperature, 6, 2, 1), RECORDS if temperature else GREEDY_RECORDS
    outs, ends = [], set()
    for everyone, size in product(({}, EVERYONE), (None, 1, 4)):
        g, model = seeded(5), TabularDenoiser.random(6, 3, seeded(1))
        how = {"eos_token_id": 2, "num_generations": 2, "generator": g, "records": records}
        outs.append(run(model, settings, empty_prompt(7), micro_batch=size, **everyone, **how))
        ends.add(float(torch.rand((), generator=g, dtype=torch.float64)))
    assert len(ends) == 1
    for other in outs[1:]:
        assert_same(outs[0], other)


def law_rows_are_independent(settings):
    """A row does not change when the prompts of the other rows do, nor when those end at other times."""
    prompt, mask = prompts()
    how = {"eos_token_id": 0, "num_generations": 4, "records": RECORDS}
    a = run(ContextDenoiser(), settings, generator=seeded(2), **how)
    changed = prompt.clone()
    changed[0, -1], changed[2] = 2, torch.tensor([1, 3, 3, 3])
    b = run(ContextDenoiser(), settings, (changed, mask), generator=seeded(2), **how)
    assert not torch.equal(steps_run(a.unmask_step), steps_run(b.unmask_step))
    for x, y in ((a.response, b.response), (a.unmask_step, b.unmask_step), *((a.records[n], b.records[n]) for n in a.records)):
        assert torch.equal(x[4:8], y[4:8])


def law_ties_go_to_the_lower_position(temperature):
    """Equal confidences everywhere: low_confidence reveals from the left, n at a time."""
    settings = settings_of("low_confidence", temperature, 32, 32, 2)
    model = FixedDenoiser(torch.zeros(4))
    out = run(model, settings, num_generations=3)
    assert torch.equal(out.unmask_step, (torch.arange(32) // 2).expand(3, -1))


def law_tail_is_reached(dtype):
    """2,000 tokens that share a probability of 0.1 are drawn with that frequency (within 5 standard errors)."""
    probs = torch.cat([torch.tensor([0.7]), torch.full((20,), 0.2 / 20), torch.full((2000,), 0.1 / 2000)])
    model = FixedDenoiser(probs.log().to(dtype))
    mass = model.logits.float().softmax(-1)[21:].sum().item()
    settings = settings_of("left_to_right", 1.0, 50, 50, 50)
    out = run(model, settings, num_generations=200, micro_batch=50)
    tail = (out.response >= 21).float().mean().item()
    assert mass == pytest.approx(0.1, abs=0.01)
    assert abs(tail - mass) < 5 * (mass * (1 - mass) / out.response.numel()) ** 0.5
    assert out.logp.dtype == torch.float32
    exact = model.logits.float().log_softmax(-1)[out.response]
    torch.testing.assert_close(out.logp, exact)


def law_impossible_tokens_stay_impossible():
    """Not even u = 0 or the largest u below 1 draws a token of probability 0."""
    logq = torch.tensor([-torch.inf, 0.3, -torch.inf, 0.7, -torch.inf]).log_softmax(-1).expand(2, 5)
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sampler.inverse_cdf(logq, u).tolist() == [1, 3]


def law_end_of_text(order="left_to_right"):
    """keep ends with the first EOS; the blocks after it are EOS, never revealed, and count nothing."""
    eos, width, rows = 2, 2, 100
    settings = settings_of(order, 1.0, 8, width, 1)
    model = TabularDenoiser.random(8, 3, seeded(4), scale=0.3)
    out = run(model, settings, eos_token_id=eos, num_generations=rows, records=RECORDS)
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


def law_greedy_needs_no_noise(order):
    """Temperature 0: the argmax; the generator is neither needed nor moved; logp and entropy are 0."""
    g = seeded()
    before = g.get_state()
    model = ContextDenoiser()
    a, b = (run(model, settings_of(order, 0.0, 6, 3, 1), generator=noise, records=GREEDY_RECORDS) for noise in (g, None))
    assert_same(a, b)
    assert torch.equal(g.get_state(), before)
    assert (a.logp == 0).all() and (a.records["entropy"] == 0).all()
    assert torch.equal(a.records["one_step_sampled"], a.records["one_step"]), "softmax(z / 0) is the argmax"
    for step in range(6):
        now = a.unmask_step == step
        assert torch.equal(replayed(a, model, step).argmax(-1)[now], a.response[now])


def law_host_is_asked_once_a_block(order):
    """No data-dependent host value inside a block: one for early stopping per block, one for the final check."""
    settings = settings_of(order, 1.0, 8, 4, 1)
    with HostQuestions() as questions:
        run(ContextDenoiser(), settings, eos_token_id=0, records=RECORDS, micro_batch=2)
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


def law_head_sees_only_what_it_must(order):
    """Positions given to head: the n revealed ones where the order is known beforehand, else the block."""
    model = Spy(ContextDenoiser())
    run(model, settings_of(order, 1.0, 8, 4, 2))
    assert model.positions == [3 * (2 if order in ("random", LEFT, "right_to_left") else 4)] * 4


# ------------------------------------------------------------------------------------------------------- the laws hold
each_order = pytest.mark.parametrize("order", ORDERS)


@each_order
def test_exact_distribution(order):
    law_exact_distribution(order, 1.0, 1, 4, vocab=2)
    law_exact_distribution(order, 0.7, 2, 4, vocab=4)


@each_order
def test_exact_distribution_with_eos_and_greedy(order):
    law_exact_distribution(order, 0.7, 1, 2, vocab=3, eos=1)
    law_exact_distribution(order, 0.0, 1, 4, vocab=4, draws=500)
    law_exact_distribution(order, 0.7, 2, 4, vocab=4, top_p=0.6)


@each_order
def test_scores_replay(order):
    law_scores_replay(order)
    law_scores_replay(order, 1.0, ContextDenoiser(dtype=torch.float32), eos=None, top_p=0.8)


@each_order
def test_completions(order):
    law_completions_are_drawn(order)
    law_completions_are_drawn(order, record="one_step_proposed")
    law_the_step_is_taken_from_its_proposals(order)
    law_completions_have_noise_of_their_own(order)


def test_completions_in_chunks(monkeypatch):
    """Never more rows of logits than fit in CHUNK, or one a sequence; those of hidden blocks only; and the same tokens."""
    settings, words = settings_of("random", 0.7, 8, 4, 2), {"records": sampler.COMPLETIONS, "num_generations": 2}
    whole = run(ContextDenoiser(), settings, **words)
    for chunk, largest in ((3 * 6 * 5, 18), (1, 12), (2**26, 24)):
        monkeypatch.setattr(sampler, "CHUNK", chunk)
        model = Spy(ContextDenoiser())
        assert_same(run(model, settings, **words), whole)
        # 4 steps draw 2 positions a row each; the three completions see 8 positions at 2 steps, then 4 at 2 steps
        assert sum(model.positions) == 6 * (4 * 2 + 3 * (2 * 8 + 2 * 4)) and max(model.positions) == largest


@each_order
def test_records(order):
    law_records_change_nothing(order, 0.7)
    law_seen_logp_by_the_oracle(order)


def test_topk_is_short():
    law_topk_is_short()


@each_order
def test_what_a_step_does(order):
    law_states_replay(order)
    law_each_step_reveals_n(order)
    law_rows_are_independent(settings_of(order, 1.0, 6, 2, 1))
    law_end_of_text(order)
    law_host_is_asked_once_a_block(order)
    law_head_sees_only_what_it_must(order)


@pytest.mark.parametrize("order, temperature", [("random", 1.0), (LOW, 1.0), (LOW, 0.0)])
def test_same_whatever_the_cost(order, temperature):
    law_same_whatever_the_cost(order, temperature)


def test_ties_tails_and_greedy():
    for temperature in (0.0, 0.7):
        law_ties_go_to_the_lower_position(temperature)
    for dtype in (torch.float32, torch.bfloat16):
        law_tail_is_reached(dtype)
    law_impossible_tokens_stay_impossible()
    for order in (LOW, LEFT):
        law_greedy_needs_no_noise(order)


# ------------------------------------------------------------------------------------------------------------- examples
@pytest.mark.parametrize("order", ["random", LOW])
def test_left_padding_changes_nothing(order, monkeypatch):
    """A batch of prompts of unequal length gives what each prompt gives alone, with the same share of the noise."""
    model, (prompt, mask), settings = ContextDenoiser(), prompts(), settings_of(order, 1.0, 6, 3, 1)
    together = run(model, settings, eos_token_id=0, num_generations=4)
    noise = sampler.draw_noise(settings, 12, seeded(), prompt.device)
    for g in range(3):
        rows = slice(4 * g, 4 * g + 4)
        share = sampler.Noise(*(None if x is None else x[:, rows] for x in (noise.order, noise.uniform)))
        monkeypatch.setattr(sampler, "draw_noise", lambda *_, share=share: share)
        bare = prompt[g, mask[g]][None]
        alone = run(model, settings, (bare, torch.ones_like(bare, dtype=torch.bool)), eos_token_id=0, num_generations=4)
        assert torch.equal(alone.response, together.response[rows])
        assert torch.equal(alone.unmask_step, together.unmask_step[rows])
        torch.testing.assert_close(alone.logp, together.logp[rows])
    assert len({tuple(r) for r in together.response.tolist()}) > 4


def test_rows_are_prompt_major():
    out = run(ContextDenoiser(), settings_of("random"), num_generations=2)
    assert torch.equal(out.prompt, prompts()[0][[0, 0, 1, 1, 2, 2]])
    assert torch.equal(out.prompt_mask, prompts()[1][[0, 0, 1, 1, 2, 2]])


def test_global_random_state_is_untouched():
    before = torch.get_rng_state()
    for order in ORDERS:
        run(ContextDenoiser(), settings_of(order), eos_token_id=0, records=RECORDS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("order, temperature, bad", [("random", 1.0, torch.nan), (LOW, 0.0, torch.nan), (LOW, 1.0, torch.inf)])
def test_broken_logits_raise(order, temperature, bad):
    model = FixedDenoiser(torch.tensor([0.0, bad, 1.0]))
    with pytest.raises(FloatingPointError, match=r"^logits: the model returned NaN or \+inf$"):
        run(model, settings_of(order, temperature), eos_token_id=0)


VALID = settings_of("random", 1.0, 8, 4, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"order": "confidence"}, f"order: got 'confidence'; allowed {', '.join(ORDERS)}"),
        ({"top_p": 0.0}, "top_p: got 0.0; allowed above 0, up to 1"),
        ({"temperature": -0.1}, "temperature: got -0.1; allowed 0 (greedy) or a positive number"),
        ({"length": 0}, "length: got 0; allowed an integer >= 1"),
        ({"tokens_per_step": 3}, "tokens_per_step: got 3; allowed a divisor of block_length = 4"),
        ({"attention": "causal"}, "attention: got 'causal'; allowed bidirectional, block_causal"),
        ({"cache": "exact"}, "cache: got 'exact'; allowed none (bidirectional attention)"),
        ({"threshold": 1.5, "order": LOW}, "threshold: got 1.5; allowed a number from 0 to 1"),
        ({"threshold": 0.5}, "order: got 'random'; allowed low_confidence with a threshold"),
        ({"threshold": 0.5, "order": LOW}, "tokens_per_step: got 2; allowed 1 with a threshold, the fewest"),
    ],
)
def test_settings_errors(change, message):
    with pytest.raises(ValueError) as error:
        replace(VALID, **change)
    assert str(error.value) == message


def test_a_record_that_does_not_exist():
    with pytest.raises(ValueError, match="^records: got 'entropies'; allowed entropy, one_step, one_step_sampled, "):
        run(ContextDenoiser(), VALID, eos_token_id=0, records=["entropies"])


# -------------------------------------------------------------------------------------------------------------- mutants
def install(monkeypatch, owner, function: str, *passages: str) -> None:
    """A function of a module or a class with passages replaced: old, new, old, new, ..."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, function)))
    space = copy.copy(vars(inspect.getmodule(owner)) if inspect.isclass(owner) else vars(owner))
    for old, new in zip(passages[::2], passages[1::2], strict=True):
        source, times = judged.passage(old).subn(lambda _, new=new: new, source)
        assert times == 1, f"{times} times in the source: {old}"
    exec("from __future__ import annotations\n" + source, space)
    monkeypatch.setattr(owner, function, space[function])


exact, scores, drawn, cost = law_exact_distribution, law_scores_replay, law_completions_are_drawn, law_same_whatever_the_cost
proposals, seen = law_the_step_is_taken_from_its_proposals, law_seen_logp_by_the_oracle
GUMBEL = """noise = torch.rand(logq.shape, generator=torch.Generator().manual_seed(1)).bfloat16().clamp(1 / 256, 255 / 256)
    return (logq.bfloat16() - (-noise.log()).log()).argmax(-1)"""
ROTATIONS = (
    "uniform(*block).mul(0).add(torch.arange(block[2]) + uniform(*block)[..., :1].mul(block[2]).long()).long() % block[2]"
)
TIES = "conf.shape[1] - 1 - conf.flip(1).masked_fill(~hidden.flip(1), -math.inf).argsort(1, descending=True)[:, :n]"
MUTANTS = {  # what is wrong: (function of the sampler, a passage of it, its replacement), the law that notices
    "confidence at the sampling temperature": (
        ("reveal", "confidence(logits,", "confidence(logits / settings.temperature,"),
        partial(exact, LOW, 0.7, 2, vocab=4),
    ),
    "most entropy first": (("confidence", "-torch.special", "torch.special"), partial(exact, "entropy", 0.7, 2, vocab=4)),
    "entropy of all tokens": (
        ("confidence", "log_policy(logits, settings) if logq is None else logq", "logits.log_softmax(-1)"),
        partial(exact, "entropy", 0.7, 2, 4, vocab=4, top_p=0.6),
    ),
    "no second best": (("confidence", "first - second", "first"), partial(exact, "margin", 0.7, vocab=4)),
    "narrow margins first": (("confidence", "first - second", "second - first"), partial(exact, "margin", 0.7, vocab=4)),
    "a nucleus too small": (
        ("log_policy", "(settings.top_p)", "(settings.top_p / 2)"),
        partial(exact, LEFT, 1.0, top_p=0.8),
    ),
    "a nucleus that is not a distribution": (
        ("log_policy", "view_as(logq).log_softmax(-1)", "view_as(logq)"),
        partial(scores, LEFT, top_p=0.8),
    ),
    "rotations only": (("draw_noise", "uniform(*block).argsort(-1)", ROTATIONS), partial(exact, "random", 1.0)),
    "scores at temperature 1": (("propose", "logq.gather(-1", "logits.log_softmax(-1).gather(-1"), partial(scores, LEFT)),
    "entropy at temperature 1": (("propose", "[..., 0], logq", "[..., 0], logits.log_softmax(-1)"), partial(scores, LEFT)),
    "topk of the least likely": (("write", "logq.topk(", "(-logq).topk("), partial(scores, "random")),
    "topk without a limit": (("blank_trace", "min(TOP_K, model.vocab_size - 1)", "model.vocab_size - 1"), law_topk_is_short),
    "noise by the place in the micro-batch": (
        ("reveal", "noise.uniform[step, rows]", "noise.uniform[step, : len(rows)]"),
        partial(cost, LEFT, 1.0),
    ),
    "dropped too early": (("unfinished", "any(1)]", "any(1)][:-1]"), partial(cost, LEFT, 1.0)),
    "the host is asked at every step": (
        ("reveal", "write(", "assert trace.logp.sum().item() <= 0\n    write("),
        partial(law_host_is_asked_once_a_block, LEFT),
    ),
    "Gumbel noise in bfloat16": (("inverse_cdf", "cdf =", f"{GUMBEL}\n    cdf ="), partial(law_tail_is_reached, torch.float32)),
    "search from the left": (("inverse_cdf", "right=True", "right=False"), law_impossible_tokens_stay_impossible),
    "the last block is not hidden": (
        ("blank_trace", "return trace", "trace.tokens[:, -settings.block_length :] = 0\n    return trace"),
        partial(law_states_replay, "random"),
    ),
    "hidden one step too late": (
        ("hidden_before", "rollout.unmask_step >= step", "rollout.unmask_step > step"),
        partial(law_states_replay, LEFT),
    ),
    "ties to the higher position": (
        ("most_confident", "ranked.indices[:, :n]", f"ranked.indices[:, :n] * 0 + {TIES}"),
        partial(law_ties_go_to_the_lower_position, 1.0),
    ),
    "revealed again": (("most_confident", "~hidden", "hidden & False"), partial(law_each_step_reveals_n, LOW)),
    "nothing is over": (("after_end", "- has_eos > 0", "- has_eos > 99"), law_end_of_text),
    "kept without EOS": (("keep_mask", "is_eos.cumsum(1) - is_eos", "is_eos.cumsum(1)"), law_end_of_text),
    "a completion forgets the revealed": (
        ("one_step_completion", "torch.where(current == model.mask_token_id, guess, current)", "guess"),
        partial(drawn, "random"),
    ),
    "a greedy completion": (("one_step_completion", "if u is None", "if True"), partial(drawn, LEFT)),
    "proposals without the step's": (
        ("record_completions", 'name == "one_step_proposed"', "False"),
        partial(proposals, "random"),
    ),
    "proposals of the chosen only": (
        ("record_completions", "where(hidden,", "where(hidden & (hidden.cumsum(1) < 2),"),
        partial(proposals, LOW),
    ),
    "completions by the trajectory's noise": (
        ("draw_noise", "uniform(settings.num_steps, rows, settings.length)", "drawn.expand(-1, -1, settings.length)"),
        partial(law_completions_have_noise_of_their_own, LEFT),
    ),
    "noise of the records first": (
        ("draw_noise", "drawn = uniform", "uniform(len([*records]) + 1)\n        drawn = uniform"),
        partial(law_records_change_nothing, LEFT, 1.0),
    ),
    "seen: of another token": (("finish", "seen_of(value,", "seen_of(value.roll(1, -1),"), partial(seen, "random")),
    "seen: a step late": (("finish", "seen_of(value,", "seen_of(value.roll(1, 1),"), partial(seen, LOW)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, monkeypatch):
    (function, *passages), law = MUTANTS[name]
    install(monkeypatch, sampler, function, *passages)
    with pytest.raises(AssertionError):
        law()
