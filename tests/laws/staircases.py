"""Laws of one forward for all blocks of a response: the mask (4.3), inputs, features and gradients, the head in parts."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import tiny
from laws.blocks import KEPT, plan_of, sampler_of
from laws.registry import judges, rejects
from laws.tools import Watched, close, graph_features, likeliest, normal, positions, refuses, rollout_of, seeded
from minidrl import denoiser, oracle
from minidrl.tasks.countdown import tokenizer


@functools.cache
def networks() -> tuple[Any, Any]:
    """A block-causal network in float64 and a reference, whose answers are far from uniform."""
    found = []
    for seed in (0, 1):
        model = denoiser.build(tiny.SIZES, tokenizer(), seed, block_length=2).eval().double()
        with torch.no_grad():
            model.model.lm_head.weight.mul_(10)
        found.append(tiny.exact(model))
    return found[0], found[1]


@functools.cache
def tables() -> tuple[Any, Any]:
    """Two tables of the same sizes."""
    return tuple(oracle.TabularDenoiser.random(6, 2, seeded(seed)) for seed in (4, 5))


def staircases(alg: Any) -> Iterator[tuple[str, Any, Any, Any, Any]]:
    """(name, model, reference, rollout, plan) for a table and a network, with states of random masks and of a trajectory."""
    for name, (model, reference), tokens in (("table", tables(), 2), ("network", networks(), model_tokens())):
        response = torch.randint(0, tokens, (5, 6), generator=seeded(6))
        within = torch.stack([torch.randperm(2, generator=seeded(i)) for i in range(15)]).view(5, 6)
        steps = within + torch.arange(6) // 2 * 2
        ended = torch.tensor(KEPT).sum(1)[:, None] <= torch.arange(6) // 2 * 2
        fields = {"unmask_step": steps.masked_fill(ended, -1), "sampler": sampler_of(6, 2, "low_confidence")}
        fields["prompt"] = torch.tensor([[3, 5, 4], [7, 6, 8], [4, 4, 3], [5, 9, 7], [3, 3, 8]])
        fields["prompt_mask"] = torch.arange(3) >= torch.tensor([0, 2, 1, 0, 3])[:, None]
        rollout = rollout_of(alg, response, KEPT, **fields)
        if name == "table":
            rollout = replace(rollout, records=likeliest(model, rollout, 2))
        plans = {"masks": plan_of(alg, rollout, num_states=3), "trajectory": alg.block_replay_plan(rollout, seeded())}
        for kind, plan in plans.items():
            model.zero_grad()
            reference.zero_grad()
            yield f"{name}, {kind}", model, reference, rollout, plan


def model_tokens() -> int:
    """The number of ordinary tokens of the network: [MASK] is not drawn."""
    return tokenizer().mask_token_id


ALL = ("logp", "entropy", "order_logp", "position_logp", "kl_ref")


@judges("4.1", "4.2", "2.8", "3.5")
@rejects("2.8", ("| _after_visible_prompt(rollout, later)", ""))
@rejects("4.1", ("rollout.prompt.shape[1] :", ": rollout.response.shape[1]"), where="_staircase")
def law_one_forward_is_all_forwards(alg: Any) -> None:
    """Every feature of a staircase plan is that of its states in a forward each, for any split; 0 where not scored."""
    for name, model, reference, rollout, plan in staircases(alg):
        names = (*ALL, "topk_logp") if rollout.records else ALL
        ask = functools.partial(alg.features, model, rollout, temperature=0.7, names=names, reference=reference)
        truth = ask(replace(plan, block_length=None))
        assert all(float(value.abs().max()) > 0.1 for value in truth.values()), f"{name}: nothing to see"
        for size in (1, 4, 256):
            got = ask(plan, size=size)
            for key in names:
                close(got[key], truth[key], f"{name}, {key}, {size} forwards at a time", 1e-12)
            assert not got["logp"][~plan.scored].any()


def joint_loss(plan: Any) -> Callable[[dict], Tensor]:
    """A function of all features that no sum of their parts gives: exponentials of sequence sums, and products of features."""
    c = normal(len(ALL), *plan.scored.shape, seed=7)

    def loss(feature: dict) -> Tensor:
        parts = [c[i] * feature[name] for i, name in enumerate(ALL)]
        return sum((0.1 * part).sum((0, 2)).exp().sum() for part in parts) + (parts[0] * parts[1]).sum()

    return loss


@judges("4.3")
@rejects(
    "4.3",
    ("None, :] <= rank[:,", "None, :] < rank[:,"),
    ("None, :] < noisy[:,", "None, :] <= noisy[:,"),
    ("None, :] == noisy[:", "None, :] <= noisy[:"),
    ('block if clean == "block" else place', 'place if clean == "block" else block'),
)
@rejects(
    "",
    ("prompt_mask.sum(-1, keepdim=True)", "prompt_mask.shape[1]"),
    ("response, response]", "response, response + length]"),
    where="staircase_positions",
)
@rejects(
    "",
    ("block[:, None, :] <= block", "block[:, None, :] < block"),
    ("visible & attention_mask", "visible | attention_mask"),
    where="block_causal",
)
def law_staircase_mask(alg: Any) -> None:
    """Who sees whom in [prompt; clean; noisy] is as said, no one sees padding, and positions count real tokens."""
    prompt_mask = torch.tensor([[False, True, True], [True, True, True]])
    for length, size, clean in itertools.product((4, 6), (1, 2), ("block", "causal")):
        kind = ["prompt"] * 3 + ["clean"] * length + ["noisy"] * length
        place = [0] * 3 + [*range(length)] * 2
        got = alg.staircase_mask(prompt_mask, length, size, clean=clean)
        assert got.shape == (2, 1, 3 + 2 * length, 3 + 2 * length)
        for n, q, k in itertools.product(range(2), range(len(kind)), range(len(kind))):
            earlier, same = place[k] // size < place[q] // size, place[k] // size == place[q] // size
            upto = earlier or same if clean == "block" else place[k] <= place[q]
            sees = {
                ("prompt", "prompt"): True,
                ("clean", "prompt"): True,
                ("noisy", "prompt"): True,
                ("clean", "clean"): upto,
                ("noisy", "clean"): earlier,
                ("noisy", "noisy"): same,
            }.get((kind[q], kind[k]), False)
            real = kind[k] != "prompt" or bool(prompt_mask[n, k])
            assert bool(got[n, 0, q, k]) == (sees and real), f"{clean}, blocks of {size}: {kind[q]} {q}, {kind[k]} {k}"
        close(alg.staircase_positions(prompt_mask, length)[0, 1:], [0, 1, *[2 + i for i in range(length)] * 2], "positions")
    whole = alg.block_causal(torch.tensor([[0, 0, 1, 1, 2]]), torch.tensor([[False, True, True, True, True]]))
    close(whole[0, 0], [[0, 1, 0, 0, 0]] * 2 + [[0, 1, 1, 1, 0]] * 2 + [[0, 1, 1, 1, 1]], "block-causal")
    for size in (0, 3):
        refuses(lambda size=size: alg.staircase_mask(prompt_mask, 4, size, clean="block"), "block_length", str(size), "4")
    refuses(lambda: alg.staircase_mask(prompt_mask, 4, 2, clean="all"), "clean stream", "'all'", "block", "causal")


@contextmanager
def head_numbers(alg: Any, numbers: int) -> Iterator[None]:
    """Within this context at most so many logits are made at a time."""
    before, alg.HEAD_NUMBERS = alg.HEAD_NUMBERS, numbers
    try:
        yield
    finally:
        alg.HEAD_NUMBERS = before


def kept_logits(loss: Callable[[dict], Tensor], ask: Callable[[Any], dict], model: Any) -> tuple[Tensor, int]:
    """A loss on the features of a model, and the rows of logits that its graph keeps for the way back."""
    kept = []

    def keep(x: Tensor) -> Tensor:
        kept.append(len(x) if x.ndim == 2 and x.shape[1] == model.vocab_size else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        value = loss(ask(model))
    return value, sum(kept)


@judges("4.1", "4.2")
@rejects(
    "4.1", ("if count > 1 and torch.is_grad_enabled():", "if False:"), ("max(1, count)", "min(1, count)"), where="_in_parts"
)
@rejects("4.2", ("len(states) * rollout.sampler.block_length", "int(passed.sum())"), where="_order_logp")
def law_head_in_parts(alg: Any) -> None:
    """With at most HEAD_NUMBERS logits at a time, none of them kept for the way back, features and gradient are the same.

    As many calls of the head for as many states, whichever they are: processes that share weights wait for each other in it.
    """
    for name, model, reference, rollout, plan in staircases(alg):
        names, loss = (*ALL, "topk_logp") if rollout.records else ALL, joint_loss(plan)
        more = {"names": names, "temperature": 0.7, "reference": reference}
        ask = functools.partial(graph_features, alg, rollout=rollout, plan=plan, **more)
        truth, kept = kept_logits(loss, ask, model)
        truth.backward()
        gradient, rows = tiny.gradient(model), Watched(model)
        assert kept > 0 and float(gradient.abs().max()) > 1e-3, f"{name}: nothing to see"
        model.zero_grad()
        with head_numbers(alg, 4 * model.vocab_size):
            value, kept = kept_logits(loss, ask, rows)
            assert len(rows.rows) > 4 and max(rows.rows) <= 4, f"{name}: rows at a time"
            assert kept == 0, f"{name}: logits of {kept} rows kept"
            value.backward()
            calls = set()
            for states in alg.state_chunks(plan, 4):
                if len(states) == 4 * plan.blocks:
                    some = Watched(model)
                    alg.state_features(some, rollout, plan, states, temperature=0.7, names=ALL[:4])
                    calls.add(len(some.rows))
            assert len(calls) == 1, f"{name}: calls of the head {calls}"
        close(value, truth.item(), f"{name}: loss", 1e-12)
        close(tiny.gradient(model), gradient, f"{name}: gradient", 1e-12)
        assert all(p.grad is None for p in reference.parameters()), f"{name}: the reference is data"


class Witness:
    """A network that remembers what it was given and answers at random; it refuses the forward of a single state."""

    mask_token_id = 9

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def encode(self, *given: Any) -> Tensor:
        raise AssertionError("a forward of a state of its own")

    def encode_staircase(self, prompt: Tensor, prompt_mask: Tensor, clean: Tensor, noisy: Tensor, **words: Any) -> Tensor:
        self.seen.append({"prompt": prompt, "prompt_mask": prompt_mask, "clean": clean, "noisy": noisy, **words})
        return torch.ones(*noisy.shape, 4, dtype=torch.float64)

    def head(self, h: Tensor) -> Tensor:
        return normal(len(h), 9, seed=8)


@judges("4.1")
@rejects(
    "4.1",
    ("blocks)).any(1)", "blocks)).all(1)"),
    ("where.unflatten(0, (-1, plan.blocks)).any(1", "torch.ones_like(where.unflatten(0, (-1, plan.blocks))[:, 0]"),
    where="_at",
)
@rejects("4.1", ("plan.block_length is not None", "False"), where="_encode")
def law_staircase_inputs(alg: Any) -> None:
    """A forward gets the response as it is, and each block as its own state shows it; the head sees scored positions only."""
    for name, _, _, rollout, plan in itertools.islice(staircases(alg), 2):
        network, needed = Witness(), (plan.valid & plan.scored.any(-1)).unflatten(0, (-1, 3)).any(1)
        for states in alg.state_chunks(plan, 2):
            asked = plan.scored.flatten(0, 1)[states]
            h = alg._encode(network, rollout, plan, states)
            assert len(alg._at(h, asked, plan)) == int(asked.sum()), f"{name}: rows of the head"
        given = {key: torch.cat([seen[key] for seen in network.seen]) for key in ("prompt", "prompt_mask", "clean", "noisy")}
        forwards = [(j, b) for j in range(len(needed)) for b in range(5) if needed[j, b]]
        assert len(given["noisy"]) == len(forwards) == plan.network_calls, f"{name}: number of forwards"
        assert {(seen["block_length"], seen["clean_stream"]) for seen in network.seen} == {(2, "block")}, name
        for row, (j, b) in enumerate(forwards):
            for key, mine in (("prompt", rollout.prompt), ("prompt_mask", rollout.prompt_mask), ("clean", rollout.response)):
                assert torch.equal(given[key][row], mine[b]), f"{name}: {key}"
            hidden = [bool(plan.hidden[3 * j + i // 2, b, 3 + i]) for i in range(6)]
            noisy = [9 if h else token for h, token in zip(hidden, rollout.response[b].tolist(), strict=True)]
            assert given["noisy"][row].tolist() == noisy, f"{name}: noisy"


def ragged(blocks: int) -> tuple[Any, list]:
    """A plan of 12 states of 4 responses with gaps of every kind, and its states in groups: (forward, row, group)."""
    scored = torch.rand(12, 4, 6, generator=seeded(9)) < 0.25
    valid = torch.rand(12, 4, generator=seeded(10)) < 0.6
    plan = SimpleNamespace(hidden=torch.ones(12, 4, 9).bool(), scored=scored, weight=torch.ones(12, 4), valid=valid)
    groups = [(j, b, [(j * blocks + m) * 4 + b for m in range(blocks)]) for j in range(12 // blocks) for b in range(4)]
    reads = lambda state: bool(valid[state // 4, state % 4] and scored[state // 4, state % 4].any())  # noqa: E731
    return plan, [(j, b, group) for j, b, group in groups if any(reads(state) for state in group)]


@judges()
@rejects("", ("* plan.blocks +", "+"), where="state_chunks")
def law_state_chunks_are_whole_forwards(alg: Any) -> None:
    """A forward's states stay together, block by block, in pieces of at most ``size`` forwards; needless ones are left out."""
    for blocks in (1, 2, 3):
        fields, groups = ragged(blocks)
        plan = alg.Plan(**vars(fields), block_length=6 // blocks)
        assert 0 < len(groups) < 12 // blocks * 4 or blocks == 3, "the fixture leaves nothing out"
        assert plan.blocks == blocks and plan.network_calls == len(groups)
        assert plan.needed.nonzero().tolist() == [[j, b] for j, b, _ in groups], "needed"
        for size in (1, 2, 5, 100):
            chunks = [chunk.tolist() for chunk in alg.state_chunks(plan, size)]
            assert sum(chunks, []) == sum((group for _, _, group in groups), []), "order of the states"
            assert all(len(chunk) == size * blocks for chunk in chunks[:-1]) and 0 < len(chunks[-1]) <= size * blocks
    nothing = alg.Plan(plan.hidden, torch.zeros_like(plan.scored), plan.weight, plan.valid, block_length=2)
    assert nothing.network_calls == 0 and list(alg.state_chunks(nothing, 4)) == []


@judges("4.2")
@rejects("4.2", ("scored).amax(-", "scored).amin(-"), where="_passed_over")
def law_passed_over(alg: Any) -> None:
    """Passed over are the other hidden positions of the block that a state reads; none where it reads nothing or asks
    no confidence.
    """
    for _, _, _, rollout, plan in itertools.islice(staircases(alg), 2):
        states = torch.arange(plan.valid.numel())
        got = alg._passed_over(rollout, plan, states).unflatten(0, plan.valid.shape)
        for k, b in itertools.product(range(len(plan.scored)), range(5)):
            own = {i for j in positions(plan.scored[k, b]) for i in range(j // 2 * 2, j // 2 * 2 + 2)}
            assert positions(got[k, b]) == (own & positions(plan.hidden[k, b, 3:])) - positions(plan.scored[k, b])
        assert (~plan.valid).any() and not got[~plan.valid].any()
        for order in ("random", "left_to_right"):
            other = replace(rollout, sampler=sampler_of(6, 2, order))
            assert not alg._passed_over(other, plan, states).any(), order
