"""Laws of block diffusion: states of single blocks, one forward for all blocks of a response, and the rows built on it.

They register themselves in laws.LAWS. The truth is minidrl.oracle (block_elbo, block_log_likelihood, trajectories of the block
sampler) for a table, and for a network the forward of every state on its own.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import tiny
from laws import (
    KEEPS,
    MODEL,
    RESPONSE,
    Formula,
    close,
    count_noise,
    formula,
    frequencies_agree,
    graph_features,
    judges,
    likeliest,
    ll_of,
    mean_is,
    noise,
    normal,
    positions,
    recorded,
    refuses,
    replay_gradient,
    rollout_of,
    seeded,
    subset_number,
    tabular,
    walk,
    walk_gradient,
)
from laws_stabledrl import eubo_by_loops, weighted
from minidrl import denoiser, oracle
from minidrl.sampler import Sampler, generate
from minidrl.tasks.countdown import tokenizer

# Kept positions of responses of length 6: all, an EOS at the end of a block and inside one, and in the first block.
KEPT = ((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 0, 0), (1, 1, 1, 1, 1, 0), (1, 0, 0, 0, 0, 0), (1, 1, 1, 0, 0, 0))


def sampler_of(length: int, size: int, order: str = "random", tokens: int = 1, temperature: float = 0.7) -> Sampler:
    """A block-wise sampler."""
    return Sampler(order=order, temperature=temperature, length=length, block_length=size, tokens_per_step=tokens)


def blocked(alg: ModuleType, responses: list, keep: Any, size: int) -> Any:
    """A Rollout whose sampler works in blocks."""
    return rollout_of(alg, responses, keep, sampler=sampler_of(len(responses[0]), size))


def plan_of(alg: ModuleType, rollout: Any, seed: int = 1, **options: Any) -> Any:
    """(2.8), kept positions only unless it is said otherwise."""
    return alg.block_elbo_plan(rollout, seeded(seed), **{"num_states": 1, "domain": "keep", "strata": False, **options})


def own_positions(inside: Any, size: int) -> list[list[int]]:
    """The positions of each block that are inside the domain."""
    flags = list(inside)
    return [[i for i in range(m, m + size) if flags[i]] for m in range(0, len(flags), size)]


def block_elbo_on(model: oracle.TabularDenoiser, response: tuple, keep: tuple, size: int) -> float:
    """Sum over blocks and l of the mean over |M| = l of S(M)/l; hidden are M, what is not kept, and all later blocks."""
    total = 0.0
    for m, own in enumerate(own_positions(keep, size)):
        rest = frozenset(i for i in range(len(keep)) if not keep[i] or i >= (m + 1) * size)
        for count in range(1, len(own) + 1):
            masks = list(itertools.combinations(own, count))
            for mask in masks:
                logp = oracle.token_logp(model, response, rest.union(mask))
                total += sum(logp[i].item() for i in mask) / (count * len(masks))
    return total


# ============================================================================================ 2.8 The ELBO of every block


@judges("2.8")
def law_block_elbo_states(alg: ModuleType) -> None:
    """State jM + m hides 1 .. n_m of block m's n_m positions, all later blocks and what is not kept; weight n_m / (K count)."""
    for size, states, (domain, strata) in itertools.product((1, 2, 3, 6), (1, 3), (("keep", True), ("all", False))):
        rollout, blocks = blocked(alg, [[0] * 6] * 10, KEPT * 2, size), 6 // size
        plan = plan_of(alg, rollout, num_states=states, domain=domain, strata=strata)
        assert plan.scored.shape == (states * blocks, 10, 6) and plan.hidden.shape == (states * blocks, 10, 9)
        assert plan.block_length == size and not plan.replay and plan.targets is None
        assert plan.weight.dtype == torch.float64 and not plan.hidden[..., :3].any(), "prompt hidden"
        for k, b in itertools.product(range(states * blocks), range(10)):
            inside, m = KEPT[b % 5] if domain == "keep" else (1,) * 6, k % blocks
            own, scored = set(own_positions(inside, size)[m]), positions(plan.scored[k, b])
            assert scored <= own and bool(scored) == bool(own) == bool(plan.valid[k, b]), "scored"
            rest = {i for i in range(6) if not inside[i] or i >= (m + 1) * size}
            assert positions(plan.hidden[k, b, 3:]) == scored | rest, "hidden"
            if own:
                close(plan.weight[k, b], len(own) / (states * len(scored)), "weight")


@judges("2.8")
def law_block_elbo_noise(alg: ModuleType) -> None:
    """Each block has its own count, floor(u n_m) + 1 with u in its stratum, and the positions of smallest noise."""
    rollout = blocked(alg, [[0] * 6] * 10, KEPT * 2, 3)
    for strata, edge in itertools.product((False, True), (False, True)):
        u, place = normal(3, 2, 10, seed=2).sigmoid(), normal(3, 2, 10, 6, seed=3).sigmoid()
        u = torch.full_like(u, 1 - 2.0**-53) if edge else u  # adding a stratum rounds it up to a whole number
        with noise(alg, u, place):
            plan = plan_of(alg, rollout, num_states=3, strata=strata)
        for j, m, b in itertools.product(range(3), range(2), range(10)):
            own = own_positions(KEPT[b % 5], 3)[m]
            x = (j + u[j, m, b].item()) / 3 if strata else u[j, m, b].item()
            count = min(math.floor(x * len(own)) + 1, len(own))
            chosen = sorted(own, key=lambda i: place[j, m, b, i].item())[:count]  # noqa: B023
            assert positions(plan.scored[2 * j + m, b]) == set(chosen), f"strata {strata}, edge {edge}"
            if own:
                close(plan.weight[2 * j + m, b], len(own) / (3 * count), f"weight, strata {strata}, edge {edge}")


@judges("2.8", "5.1")
def law_block_elbo_expectation(alg: ModuleType) -> None:
    """E = sum of the blocks' ELBOs for every K, with and without strata; of the whole response: oracle.block_elbo."""
    model = tabular(*MODEL)
    for keep, size, states, strata in itertools.product(KEEPS, (1, 2, 4), (1, 2), (False, True)):
        truth, counts = block_elbo_on(model, RESPONSE, keep, size), [len(own) for own in own_positions(keep, size) if own]
        u, order = count_noise(math.lcm(*counts), 4, states)
        for domain in ("keep", "all") if sum(keep) == 4 else ("keep",):
            rollout = blocked(alg, [RESPONSE] * u.shape[1], [keep] * u.shape[1], size)
            shape = (states, 4 // size, u.shape[1])
            with noise(alg, u[:, None].expand(shape), order[:, None].expand(*shape, 4)):
                plan = plan_of(alg, rollout, num_states=states, domain=domain, strata=strata)
            got = ll_of(alg, model, rollout, plan)[0, :, 0].mean()
            close(got, truth, f"blocks of {size}, n={sum(keep)}, K={states}, strata {strata}")
        if sum(keep) == 4:
            close(truth, oracle.block_elbo(model, RESPONSE, size).item(), "two forms of the block ELBO")


@judges("2.8")
def law_block_elbo_frequencies(alg: ModuleType) -> None:
    """Counts and subsets are uniform, independent between blocks, between states, or each in its stratum; the mean is right."""
    model, rollout = tabular(*MODEL), blocked(alg, [RESPONSE] * 4000, [KEEPS[0]] * 4000, 2)
    one, two, either = (torch.tensor(p).double() for p in ([0, 0.5, 0.5, 0], [0, 0, 0, 1.0], [0, 0.25, 0.25, 0.5]))
    for strata, chance in ((False, (either, either)), (True, (one, two))):
        plan = plan_of(alg, rollout, num_states=2, strata=strata)
        subset = subset_number(plan.scored.unflatten(-1, (2, 2)))  # (K M, B, M): of which state, in which block
        drawn = {(j, m): subset[2 * j + m, :, m] for j in range(2) for m in range(2)}
        for (a, x), (b, y) in itertools.combinations(drawn.items(), 2):
            pair = (chance[a[0]][:, None] * chance[b[0]]).flatten()
            frequencies_agree(4 * x + y, pair, f"state and block {a} and {b}, strata {strata}")
        truth = oracle.block_elbo(model, RESPONSE, 2).item()
        mean_is(ll_of(alg, model, rollout, plan)[0, :, 0], truth, "estimate")


@judges("2.8", "2.3")
def law_one_long_block_is_the_elbo(alg: ModuleType) -> None:
    """A block of the whole length: the states of (2.3), from the same noise."""
    rollout = blocked(alg, [[0] * 6] * 10, KEPT * 2, 6)
    for states, domain, strata in itertools.product((1, 3), ("keep", "all"), (False, True)):
        options = {"num_states": states, "domain": domain, "strata": strata}
        blocks, whole = plan_of(alg, rollout, **options), alg.elbo_count_plan(rollout, seeded(1), **options)
        for name in ("hidden", "scored", "valid"):
            assert torch.equal(getattr(blocks, name), getattr(whole, name)), name
        close(blocks.weight, whole.weight, "weight")  # n / l / K is rounded otherwise than n / (K l)


@judges("2.8")
def law_blocks_of_one_token_are_exact(alg: ModuleType) -> None:
    """Every draw is the likelihood from left to right; with an EOS, of the tokens up to it."""
    model = tabular(*MODEL)
    chain = [oracle.token_logp(model, RESPONSE, frozenset(range(i, 4)))[i].item() for i in range(4)]
    close(sum(chain), oracle.block_log_likelihood(model, RESPONSE, 1).item(), "two forms of the chain")
    rollout = blocked(alg, [RESPONSE] * 3, KEEPS, 1)
    for states, strata, seed in itertools.product((1, 3), (False, True), range(3)):
        got = ll_of(alg, model, rollout, plan_of(alg, rollout, seed, num_states=states, strata=strata))[0, :, 0]
        close(got, [sum(chain[: sum(keep)]) for keep in KEEPS], f"K={states}, seed {seed}")


def mean_over_noise(alg: ModuleType, model: oracle.TabularDenoiser, response: tuple, size: int) -> float:
    """The exact expectation of the estimator of one state."""
    u, order = count_noise(size, len(response), 1)
    shape = (1, len(response) // size, u.shape[1])
    rollout = blocked(alg, [response] * u.shape[1], [(1,) * len(response)] * u.shape[1], size)
    with noise(alg, u[:, None].expand(shape), order[:, None].expand(*shape, len(response))):
        plan = plan_of(alg, rollout)
    return ll_of(alg, model, rollout, plan)[0, :, 0].mean().item()


@judges("2.8")
def law_block_elbo_is_a_bound(alg: ModuleType) -> None:
    """Of the exact log-likelihood of the block sampler; equal for conditionals of one joint distribution."""
    for seed, size in itertools.product(range(8), (2, 4)):
        model = tabular(4, 3, seed)
        bound = mean_over_noise(alg, model, RESPONSE, size)
        assert bound < oracle.block_log_likelihood(model, RESPONSE, size).item() - 1e-3, f"seed {seed}, blocks of {size}"
    joint, response = normal(2, 2, 2, 2, seed=5).exp(), (1, 0, 1, 1)
    for size in (1, 2, 4):
        got = mean_over_noise(alg, oracle.consistent_denoiser(joint), response, size)
        close(got, math.log(joint[response] / joint.sum()), f"one joint distribution, blocks of {size}")


@judges("2.8")
def law_block_elbo_refusals(alg: ModuleType) -> None:
    """A wrong option names its key and its value."""
    rollout = blocked(alg, [RESPONSE], KEEPS[:1], 2)
    refuses(lambda: plan_of(alg, rollout, num_states=0), "plan.num_states", "0")
    refuses(lambda: plan_of(alg, rollout, num_states=1.5), "plan.num_states", "1.5")
    refuses(lambda: plan_of(alg, rollout, domain="eos"), "plan.domain", "'eos'")


@judges("2.8")
def law_block_estimator(alg: ModuleType) -> None:
    """The entry of the table of estimators: as many forwards as states asked for, with the mean oracle.block_elbo."""
    model, rollout = tabular(*MODEL), blocked(alg, [RESPONSE] * 2000, [KEEPS[0]] * 2000, 2)
    for states in alg.ESTIMATOR_CALLS.get("block ELBO", (1, 2, 4)):
        plan = alg.ESTIMATORS["block ELBO"](rollout, seeded(9), num_states=states)
        assert plan.network_calls == states * 2000 and plan.scored.shape == (2 * states, 2000, 4)
        mean_is(ll_of(alg, model, rollout, plan)[0, :, 0], oracle.block_elbo(model, RESPONSE, 2).item(), f"{states} states")


# ======================================================================================= 3.5 The trajectory as a staircase

# As laws.WALKS: length, vocabulary, order, tokens per step, block length, EOS. Choices of positions that ask no model first.
BLOCK_WALKS = (
    (4, 2, "random", 1, 2, 1),
    (4, 2, "random", 1, 2, None),
    (4, 2, "left_to_right", 1, 2, 1),
    (4, 2, "right_to_left", 1, 2, 1),
    (4, 2, "random", 2, 2, 1),
    (4, 2, "random", 1, 1, 1),
    (4, 2, "random", 2, 4, 1),
    (6, 2, "left_to_right", 1, 2, 1),
    (4, 2, "low_confidence", 1, 2, 1),
)


def walked(alg: ModuleType, case: tuple) -> tuple[Any, list]:
    """All trajectories of a block sampler, and the rollout that holds them."""
    length, _, order, tokens, size, eos = case
    _, paths, _, _ = walk(case)
    return recorded(alg, paths, eos, sampler=sampler_of(length, size, order, tokens)), paths


def last_step(rollout: Any, b: int) -> int:
    """The step that revealed the last kept token."""
    return max(s for s, kept in zip(rollout.unmask_step[b].tolist(), rollout.keep[b].tolist(), strict=True) if kept)


@judges("3.5", "3.1")
def law_block_replay_states(alg: ModuleType) -> None:
    """State jM + m is step j of block m: it hides what was not revealed before, and scores what was revealed by it."""
    for case in BLOCK_WALKS:
        rollout, paths = walked(alg, case)
        plan, (length, _, _, tokens, size, _) = alg.block_replay_plan(rollout, seeded()), case
        blocks, of_block = length // size, size // tokens
        assert plan.replay and plan.block_length == size and not plan.hidden[..., :3].any()
        assert plan.scored.shape == (blocks * of_block, len(paths), length)
        close(plan.weight, torch.ones(plan.weight.shape), "weight")
        for b, path in enumerate(paths):
            for j, m in itertools.product(range(of_block), range(blocks)):
                k, s = j * blocks + m, m * of_block + j
                revealed = frozenset(i for i, step in enumerate(path.unmask_step) if step == s)
                assert positions(plan.hidden[k, b, 3:]) == oracle.hidden_before(path, s), "hidden"
                assert positions(plan.scored[k, b]) == (revealed if s <= last_step(rollout, b) else frozenset()), "scored"
                assert bool(plan.valid[k, b]) == (s <= last_step(rollout, b)) and int(plan.step[k, b]) == s, "valid"


@judges("3.5", "4.1")
def law_block_replay_reproduces_the_sampler(alg: ModuleType) -> None:
    """At the sampling temperature one forward a step of a block gives back the log-probabilities that the sampler recorded."""
    model, prompt = tabular(4, 3), torch.tensor([[0, 1, 0], [2, 0, 1]])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    for order, tokens in itertools.product(oracle.ORDERS, (1, 2)):
        settings = sampler_of(4, 2, order, tokens, 0.6)
        drawn = generate(model, prompt, mask, settings, eos_token_id=2, num_generations=6, generator=seeded(3))
        rollout = alg.Rollout(**vars(drawn))
        plan = alg.block_replay_plan(rollout, seeded())
        logp = alg.features(model, rollout, plan, temperature=0.6)["logp"]
        assert bool(((logp != 0).sum(0) <= 1).all()), "a token is scored at most once"
        close(logp.sum(0), torch.where(plan.scored.any(0), drawn.logp, 0.0), f"{order}, {tokens} tokens")
        assert bool((plan.scored.any(0) | ~rollout.keep).all()), "every kept token is scored"


@judges("3.5", "4.1")
def law_block_replay_gradient_is_the_policy_gradient(alg: ModuleType) -> None:
    """E[reward grad ll] over all trajectories of the block sampler = dJ/dtable, for orders that ask no model."""
    for case in BLOCK_WALKS[:-1]:
        (model, _, chance, reward), (rollout, _) = walk(case), walked(alg, case)
        plan = alg.block_replay_plan(rollout, seeded())
        close(replay_gradient(alg, model, rollout, plan, chance * reward), walk_gradient(case), f"{case}")


@judges("3.5", "4.2")
def law_exact_kernel_of_a_block(alg: ModuleType) -> None:
    """Low-confidence order: with order_logp read off the same forward, E[reward grad ll] = dJ/dtable; without it, it is not."""
    case = BLOCK_WALKS[-1]
    (model, _, chance, reward), (rollout, _) = walk(case), walked(alg, case)
    plan = alg.block_replay_plan(rollout, seeded())
    feature = graph_features(alg, model, rollout, plan, ("logp", "order_logp"), 0.7)
    for names, exact in ((("logp", "order_logp"), True), (("logp",), False)):
        ll = alg.reduce_logp(sum(feature[name] for name in names), plan, level="sequence", normalizer=None)
        got = oracle.table_gradient(model, (chance * reward * ll[0, :, 0]).sum())
        gap = float((got - walk_gradient(case)).abs().max())
        assert gap < 1e-10 if exact else gap > 1e-3, f"{names}: off by {gap}"


@judges("3.5")
def law_block_replay_costs_the_steps_of_a_block(alg: ModuleType) -> None:
    """A forward for each j at which some block decides something: never more than a block has steps; (3.1) has M times that."""
    for case in BLOCK_WALKS:
        rollout, paths = walked(alg, case)
        blocks, of_block = case[0] // case[4], case[4] // case[3]
        expected = 0
        for b in range(len(paths)):
            expected += sum(any(m * of_block + j <= last_step(rollout, b) for m in range(blocks)) for j in range(of_block))
        plan, steps = (make(rollout, seeded()) for make in (alg.block_replay_plan, every_step(alg)))
        assert plan.network_calls == expected <= of_block * len(paths), f"{case}: {plan.network_calls}, not {expected}"
        assert case[-1] is not None or steps.network_calls == blocks * plan.network_calls


def every_step(alg: ModuleType) -> Callable:
    """(3.1), all steps."""
    return functools.partial(alg.replay_plan, num_states=None, min_entropy=0.0)


# ============================================================================================= 4. One forward for all blocks


@functools.cache
def networks() -> tuple[Any, Any]:
    """A block-causal network in float64, and a reference; answers far from uniform."""
    found = []
    for seed in (0, 1):
        model = denoiser.build(tiny.SIZES, tokenizer(), seed, block_length=2).eval().double()
        with torch.no_grad():
            model.model.lm_head.weight.mul_(10)
        found.append(tiny.exact(model))
    return found[0], found[1]


@functools.cache
def tables() -> tuple[Any, Any]:
    """The same as tables."""
    return tuple(oracle.TabularDenoiser.random(6, 2, seeded(seed)) for seed in (4, 5))


def staircases(alg: ModuleType) -> Iterator[tuple[str, Any, Any, Any, Any]]:
    """(name, model, reference, rollout, plan): a table and a network, states of random masks and of a trajectory."""
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
    """Ordinary tokens of the network: [MASK] is not drawn."""
    return tokenizer().mask_token_id


ALL = ("logp", "entropy", "order_logp", "position_logp", "kl_ref")


@judges("4.1", "4.2", "2.8", "3.5")
def law_one_forward_is_all_forwards(alg: ModuleType) -> None:
    """Every feature of a staircase plan is that of the same states in a forward each; for any split; zero where not scored."""
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


@judges("4.1")
def law_staircase_features_are_those_of_the_model(alg: ModuleType) -> None:
    """logp and entropy of a table's staircase by the oracle, state by state."""
    for name, model, _, rollout, plan in itertools.islice(staircases(alg), 2):
        got = alg.features(model, rollout, plan, temperature=0.6, names=("logp", "entropy"))
        for k, b in itertools.product(range(len(plan.scored)), range(5)):
            response, hidden = tuple(rollout.response[b].tolist()), positions(plan.hidden[k, b, 3:])
            logp, scored = oracle.token_logp(model, response, hidden, 0.6), positions(plan.scored[k, b])
            close(got["logp"][k, b], [logp[i].item() if i in scored else 0.0 for i in range(6)], f"{name}: logp")
            state = tuple(model.mask_token_id if i in hidden else token for i, token in enumerate(response))
            p = (model.logits_at(state).detach() / 0.6).softmax(-1)
            entropy = [-float((p[i] * p[i].log()).sum()) if i in scored else 0.0 for i in range(6)]
            close(got["entropy"][k, b], entropy, f"{name}: entropy")


def joint_loss(plan: Any) -> Callable[[dict], Tensor]:
    """A function of all features that no sum of their parts gives: exponentials of sequence sums, and products of features."""
    c = normal(len(ALL), *plan.scored.shape, seed=7)

    def loss(feature: dict) -> Tensor:
        parts = [c[i] * feature[name] for i, name in enumerate(ALL)]
        return sum((0.1 * part).sum((0, 2)).exp().sum() for part in parts) + (parts[0] * parts[1]).sum()

    return loss


@judges("4.3")
def law_staircase_mask(alg: ModuleType) -> None:
    """Who sees whom in [prompt; clean; noisy], token by token; padding is seen by no one; positions count real tokens."""
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


@judges("4.1", "4.2", "2.8", "3.5")
def law_two_passes_of_a_staircase_are_the_joint_graph(alg: ModuleType) -> None:
    """The gradient in all weights, of a loss of all features, is that of one graph over a forward a state; for any split."""
    for name, model, reference, rollout, plan in staircases(alg):
        loss, more = joint_loss(plan), {"temperature": 0.7, "names": ALL, "reference": reference}
        feature = graph_features(alg, model, rollout, replace(plan, block_length=None), ALL, 0.7, reference=reference)
        value = loss(feature)
        value.backward()
        truth = tiny.gradient(model)
        assert float(truth.abs().max()) > 0.1, f"{name}: no gradient"
        for size in (1, 4, 256):
            close(alg.two_pass_backward(model, rollout, plan, loss, size=size, **more).loss, value, f"{name}: loss", 1e-12)
            close(tiny.gradient(model), truth, f"{name}: gradient, {size} forwards at a time", 1e-12)
        assert not any(p.grad is not None and bool(p.grad.any()) for p in reference.parameters()), "the reference is data"


@judges("4.1")
def law_second_pass_skips_whole_forwards(alg: ModuleType) -> None:
    """A forward is done if one of its states has a cotangent, and not otherwise; the gradient is that of these states."""
    for name, model, _, rollout, plan in itertools.islice(staircases(alg), 2, 4):
        chosen = torch.zeros_like(plan.scored)
        chosen[4, 0], chosen[1, 2], chosen[2, 2] = plan.scored[4, 0], plan.scored[1, 2], plan.scored[2, 2]
        feature = graph_features(alg, model, rollout, replace(plan, block_length=None), ("logp",), 0.7)
        (feature["logp"] * chosen).sum().backward()
        truth = tiny.gradient(model)
        cotangent = {"logp": chosen.double()}
        _, calls = alg.second_pass(model, rollout, plan, cotangent, temperature=0.7, size=1)
        assert calls == 2, f"{name}: {calls} forwards"
        close(tiny.gradient(model), truth, f"{name}: gradient", 1e-12)


@contextmanager
def head_numbers(alg: ModuleType, numbers: int) -> Iterator[None]:
    """At most this many logits at a time."""
    before, alg.HEAD_NUMBERS = alg.HEAD_NUMBERS, numbers
    try:
        yield
    finally:
        alg.HEAD_NUMBERS = before


class Watched:
    """A model that remembers how many rows of logits each call of its head makes."""

    def __init__(self, model: Any) -> None:
        self.model, self.rows = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def head(self, h: Tensor) -> Tensor:
        self.rows.append(len(h))
        return self.model.head(h)


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
def law_head_in_parts(alg: ModuleType) -> None:
    """At most HEAD_NUMBERS logits at a time, none kept for the way back: the same features, the same gradient.

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
    """A network that remembers what it was given, and answers at random; a state's own forward is refused."""

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
def law_staircase_inputs(alg: ModuleType) -> None:
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
def law_state_chunks_are_whole_forwards(alg: ModuleType) -> None:
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
def law_candidates(alg: ModuleType) -> None:
    """The hidden positions of the block that a state reads; none where it reads nothing, or the order asks no confidence."""
    for _, _, _, rollout, plan in itertools.islice(staircases(alg), 2):
        states = torch.arange(plan.valid.numel())
        got = alg._candidates(rollout, plan, states).unflatten(0, plan.valid.shape)
        for k, b in itertools.product(range(len(plan.scored)), range(5)):
            own = {i for j in positions(plan.scored[k, b]) for i in range(j // 2 * 2, j // 2 * 2 + 2)}
            assert positions(got[k, b]) == own & positions(plan.hidden[k, b, 3:]), "candidates"
        assert (~plan.valid).any() and not got[~plan.valid].any()
        for order in ("random", "left_to_right"):
            other = replace(rollout, sampler=sampler_of(6, 2, order))
            assert not alg._candidates(other, plan, states).any(), order


# ==================================================================================================== formulas of the rows


@formula("stabledrl-block")
def stabledrl_block(f: Formula) -> Tensor:
    """stabledrl with the ELBO of every block: cap 6, each prompt's weights sum to 1, mean over the two prompts."""
    score, ratio = [], []
    for b in f.rows:
        states = {model: [f.tokens(model, k, b) for k in f.states] for model in (f.new, f.old)}
        owned = [len(own) for own in own_positions(f.rollout.keep[b], 2)]
        weight = [owned[k % 2] / (2 * len(state)) if state else 0.0 for k, state in enumerate(states[f.new])]
        new, old = (sum(w * sum(s.values()) for w, s in zip(weight, states[m], strict=True)) for m in (f.new, f.old))
        upper = eubo_by_loops(states[f.new], weight, 1.5)
        score.append(new if f.centred(b) > 0 else 0.5 * upper + 0.5 * new)
        ratio.append(math.exp(new.item() - old.item()))
        f.ratios.append((ratio[-1], f.centred(b)))
    capped = [min(r, 6.0) for r in ratio]
    assert capped != ratio, "no ratio above the cap"
    return weighted(f, [c / sum(capped[4 * (b // 4) : 4 * (b // 4) + 4]) for b, c in enumerate(capped)], score) / 2


@formula("trace-block")
def trace_block(f: Formula) -> Tensor:
    """PPO's clip on every step up to the one that decides the reward, straight from the recorded trajectory."""
    total = 0.0
    for b in f.rows:
        steps, response = f.rollout.unmask_step[b].tolist(), tuple(f.rollout.response[b].tolist())
        for s in range(last_step(f.rollout, b) + 1):
            hidden = frozenset(i for i, u in enumerate(steps) if u >= s or u < 0)
            logp = oracle.token_logp(f.new, response, hidden, 0.8)
            change = sum(logp[i] - f.rollout.logp[b, i] for i, u in enumerate(steps) if u == s)
            total = total + f.clipped(change.exp(), f.z_score(b), 0.2, 0.2)
    return total / (8 * 4)
