"""Laws of chosen steps, merged steps, the exact kernel of the low-confidence sampler, and stepwise credit.

They register themselves in laws.LAWS. The truth is minidrl.oracle: transitions, trajectories and policy gradients as sums.
"""

import dataclasses
import functools
import itertools
import math
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import laws
from laws import (
    WALKS,
    Formula,
    close,
    double,
    experience,
    formula,
    graph_logp,
    judges,
    likeliest,
    normal,
    positions,
    recorded,
    refuses,
    replay_gradient,
    reward_of,
    rollout_of,
    seeded,
    surrogate,
    tabular,
    walk,
    walk_entropy,
    walk_gradient,
)
from minidrl import methods, oracle
from minidrl.sampler import Sampler, most_confident

# ====================================================================================== 3.2 The most uncertain steps

# Four trajectories of T = 4 steps, n = 2 tokens a step. Row 1 is decided after step 1 (kept: the first three positions), row 2
# after step 0, row 3 ends early: its last two steps were never run. In row 0 steps 0 and 1 have
# equal entropies, to the bit: its numbers are sums of powers of 2.
STEPS = ((0, 1, 0, 2, 3, 1, 2, 3), (0, 1, 1, 0, 3, 2, 3, 2), (0, 0, 1, 2, 1, 3, 3, 2), (1, 0, 1, 0, -1, -1, -1, -1))
KEPT = ((1,) * 8, (1, 1, 1, 0, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 0))
ENTROPY = (
    (0.375, 0.3125, 0.25, 0.5, 0.125, 0.3125, 0.25, 0.0625),
    (0.1, 0.4, 0.3, 0.15, 0.9, 0.8, 0.7, 0.9),
    (0.2, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9),
    (0.3, 0.1, 0.2, 0.2, 7.0, 7.0, 7.0, 7.0),
)


def four_steps(alg: ModuleType, keep: Any = KEPT, **given: Any) -> Any:
    """The fixture above; two prompts of two responses."""
    settings = Sampler(order="low_confidence", temperature=0.8, length=8, block_length=8, tokens_per_step=2)
    fields = {"unmask_step": torch.tensor(STEPS), "records": {"entropy": double(ENTROPY)}, "sampler": settings}
    return rollout_of(alg, [[0] * 8] * 4, keep, num_generations=2, **{**fields, **given})


def steps_of(b: int) -> tuple[list[float], int]:
    """Entropy of each of the four steps of row b, and its last deciding step, by loops."""
    entropy = [sum(h for h, s in zip(ENTROPY[b], STEPS[b], strict=True) if s == t) for t in range(4)]
    return entropy, max(s for s, kept in zip(STEPS[b], KEPT[b], strict=True) if kept)


def ranked(b: int, entropy: list[float]) -> list[int]:
    """Deciding steps by decreasing entropy, equal ones in order of time; then those after the deciding one."""
    last = steps_of(b)[1]
    return sorted(range(last + 1), key=lambda t: -entropy[t]) + list(range(last + 1, 4))


@judges("3.2")
def law_entropy_plan_takes_the_most_uncertain_steps(alg: ModuleType) -> None:
    """Each trajectory's K steps of highest summed entropy, in decreasing order; a step after the deciding one is not valid.

    Of equal ones the earlier comes first.
    """
    tied, last = steps_of(0)
    assert tied[0] == tied[1] < tied[2] and last >= 2, "in the fixture a tie decides which of two steps is the second of K = 2"
    for states in (1, 2, 3, 4):
        plan = alg.entropy_plan(four_steps(alg), seeded(), num_states=states, shared=False, weight="sum")
        assert plan.replay and plan.hidden.shape == (states, 4, 11) and not plan.hidden[..., :3].any()
        for b in range(4):
            entropy, last = steps_of(b)
            order = ranked(b, entropy)[:states]
            for k, t in enumerate(order):
                assert bool(plan.valid[k, b]) == (t <= last), f"valid: row {b}, rank {k}"
                if t <= last:
                    assert int(plan.step[k, b]) == t, f"step: row {b}, rank {k}: {int(plan.step[k, b])}, not {t}"
                    assert positions(plan.hidden[k, b, 3:]) == frozenset(i for i, s in enumerate(STEPS[b]) if s >= t or s < 0)
                revealed = frozenset(i for i, s in enumerate(STEPS[b]) if s == t) if t <= last else frozenset()
                assert positions(plan.scored[k, b]) == revealed, f"scored: row {b}, rank {k}"
    assert plan.network_calls == 4 + 2 + 1 + 2


@judges("3.2")
def law_entropy_plan_shared(alg: ModuleType) -> None:
    """shared: the K steps of highest mean entropy over the batch, decided ones counting 0; the same for every response.

    No other fixed set of K steps leaves out less entropy.
    """
    sums = [[steps_of(b)[0][t] if t <= steps_of(b)[1] else 0.0 for t in range(4)] for b in range(4)]
    mean = [sum(row[t] for row in sums) / 4 for t in range(4)]
    for states in (1, 2, 3):
        plan = alg.entropy_plan(four_steps(alg), seeded(), num_states=states, shared=True, weight="sum")
        for b in range(4):
            order = ranked(b, mean)[:states]
            found = [(int(t), bool(v)) for t, v in zip(plan.step[:, b], plan.valid[:, b], strict=True)]
            assert [t for t, v in found if v] == [t for t in order if t <= steps_of(b)[1]], f"row {b}: {found}"
        full = [int(t) for t in plan.step[:, 0]]
        left_out = {chosen: sum(mean) - sum(mean[t] for t in chosen) for chosen in itertools.combinations(range(4), states)}
        assert left_out[tuple(sorted(full))] <= min(left_out.values()) + 1e-12, "another set leaves out less"
    each = alg.entropy_plan(four_steps(alg), seeded(), num_states=1, shared=False, weight="sum").step
    assert each[0].tolist() != plan.step[0].tolist(), "the fixture does not tell shared from individual choice"


@judges("3.2")
def law_entropy_plan_weights(alg: ModuleType) -> None:
    """sum: 1; mean: 1/K; token_mean: 1/(K tokens of the step); whatever else is valid; finite where nothing is scored."""
    uneven = torch.tensor([[0, 0, 0, 1, 2, 2, 3, 3], *STEPS[1:]])
    for states in (2, 3):
        for weight in ("sum", "mean", "token_mean"):
            rollout = four_steps(alg, unmask_step=uneven)
            plan = alg.entropy_plan(rollout, seeded(), num_states=states, shared=False, weight=weight)
            assert plan.weight.dtype == torch.float64 and plan.weight.shape == (states, 4)
            for k, b in itertools.product(range(states), range(4)):
                if plan.valid[k, b]:
                    tokens = sum(int(s) == int(plan.step[k, b]) for s in uneven[b])
                    expected = {"sum": 1.0, "mean": 1 / states, "token_mean": 1 / (states * tokens)}[weight]
                    close(plan.weight[k, b], expected, f"{weight}, row {b}, rank {k}")
            assert bool(plan.weight.isfinite().all()) and not plan.scored.any(-1).all(), "also where nothing is scored"
            loss = alg.aggregate(torch.ones(states, 4, 1).double(), plan, rollout, level="step", how="sequence_mean")
            close(loss, (plan.weight * plan.valid).sum() / 4, "which adds nothing to a loss")
    sizes = {int(n) for n in plan.scored.sum(-1).flatten()}
    assert {1, 2, 3} <= sizes, f"the fixture has steps of {sizes} tokens"


@judges("3.2", "3.3")
def law_step_plan_refusals(alg: ModuleType) -> None:
    """A wrong option names its key and its value; without the record there is no choice to make."""
    rollout = four_steps(alg)
    options = {"num_states": 2, "shared": False, "weight": "sum"}
    for key, value, words in (
        ("num_states", 0, ("plan.num_states", "0")),
        ("num_states", 5, ("plan.num_states", "got 5", "4 steps")),
        ("num_states", 1.0, ("plan.num_states", "1.0")),
        ("weight", "max", ("plan.weight", "'max'", "token_mean")),
    ):
        refuses(lambda key=key, value=value: alg.entropy_plan(rollout, seeded(), **{**options, key: value}), *words)
    refuses(lambda: alg.entropy_plan(four_steps(alg, records={}), seeded(), **options), "records", "'entropy'", "needs")
    refuses(lambda: alg.merged_plan(rollout, seeded(), merge=0), "plan.merge", "0")
    refuses(lambda: alg.merged_plan(rollout, seeded(), merge=1.5), "plan.merge", "1.5")


def with_entropy(alg: ModuleType, case: tuple, temperature: float = 0.7) -> tuple:
    """Model, rollout of every trajectory with its entropies, probability, reward."""
    model, paths, chance, reward = walk(case, temperature)
    entropy = double([walk_entropy(model, path, temperature) for path in paths])
    settings = Sampler(order=case[2], temperature=temperature, length=case[0], block_length=case[4], tokens_per_step=case[3])
    return model, recorded(alg, paths, case[-1], records={"entropy": entropy}, sampler=settings), chance, reward


@judges("3.2")
def law_selection_by_trajectory_is_biased(alg: ModuleType) -> None:
    """The mean score of a fixed step is 0; that of each trajectory's most uncertain step is not, although the order is random.

    Its norm is measured against that of the policy gradient: it is no small number.
    """
    for case in (WALKS[0], (3, 3, "random", 1, 3, None), WALKS[3]):
        model, rollout, chance, _ = with_entropy(alg, case)
        plan = partial(alg.entropy_plan, rollout, seeded(), num_states=1, weight="sum")
        fixed = replay_gradient(alg, model, rollout, plan(shared=True), chance)
        close(fixed, torch.zeros_like(fixed), "mean score of a fixed step")
        chosen = replay_gradient(alg, model, rollout, plan(shared=False), chance)
        share = float(chosen.norm() / walk_gradient(case).norm())
        assert share > 0.05, f"mean score of the chosen step: {share} of the policy gradient's norm"


@judges("3.2", "4.1")
def law_entropy_bounds_what_a_fixed_selection_loses(alg: ModuleType) -> None:
    """For EVERY fixed set S: |grad J - g_S| <= 2 G max|A| sum over t not in S of the expected entropy of the step's tokens.

    G = 1/T is the largest gradient of a scaled logit of the table. The best bound is that of the most uncertain steps.
    """
    for case, temperature in ((WALKS[0], 0.7), (WALKS[3], 0.4), (WALKS[1], 0.7)):
        model, rollout, chance, reward = with_entropy(alg, case, temperature)
        full = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        entropy = alg.features(model, rollout, full, temperature=temperature, names=("entropy",))["entropy"]
        expected = (chance[:, None] * entropy).sum((1, 2)).tolist()
        adv, steps = reward - float((chance * reward).sum()), range(len(expected))
        truth, bounds = walk_gradient(case, temperature), {}
        for chosen in oracle.all_subsets(len(expected)):
            inside = torch.tensor([t in chosen for t in steps])[:, None, None]
            plan = dataclasses.replace(full, scored=full.scored & inside)
            lost = (truth - replay_gradient(alg, model, rollout, plan, chance * adv, temperature)).norm()
            outside = sum(expected[t] for t in steps if t not in chosen)
            bounds[chosen] = 2 / temperature * float(adv.abs().max()) * outside
            assert float(lost) <= bounds[chosen] + 1e-10, f"{case}, S = {sorted(chosen)}: {float(lost)} > {bounds[chosen]}"
        close(lost, 0.0, "all steps")
        best = frozenset(sorted(steps, key=lambda t: -expected[t])[:1])
        assert bounds[best] == min(bound for chosen, bound in bounds.items() if len(chosen) == 1)


@judges("4.1")
def law_entropy_bounds_the_score(alg: ModuleType) -> None:
    """With H the feature: 1 - |p|^2 <= H; E|e_a - p|_1 = 2 (1 - |p|^2) <= 2 H; E|e_a - p|_2 <= 2 (1 - |p|^2), pointwise."""
    model, rollout = tabular(4, 3, 21), rollout_of(alg, [[1, 0, 2, 1]])
    plan = alg.mean_field_plan(rollout, seeded(), p_mask_prompt=0.0)
    for temperature in (2.0, 1.0, 0.3, 0.05):
        entropy = alg.features(model, rollout, plan, temperature=temperature, names=("entropy",))["entropy"][0, 0]
        p = (model.logits_at((3,) * 4) / temperature).softmax(-1).tolist()
        for h, row in zip(entropy.tolist(), p, strict=True):
            rest = 1 - sum(v * v for v in row)
            apart = [[float(a == v) - row[v] for v in range(3)] for a in range(3)]
            one = sum(row[a] * sum(abs(x) for x in apart[a]) for a in range(3))
            two = sum(row[a] * math.sqrt(sum(x * x for x in apart[a])) for a in range(3))
            close(one, 2 * rest, "mean 1-norm of the score")
            assert rest <= h + 1e-15 and one <= 2 * h + 1e-15 and two <= 2 * rest + 1e-15
            assert h <= math.log(3) + 1e-12, "nats"


@judges("4.1", "3.1")
def law_score_at_another_temperature(alg: ModuleType) -> None:
    """Sampled at 0.8: the score at 0.8 gives the policy gradient; the score at 1 misses it by more than 5 per cent."""
    for case in WALKS[:3]:
        model, paths, chance, reward = walk(case, 0.8)
        rollout = recorded(alg, paths, case[-1])
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        truth = walk_gradient(case, 0.8)
        for temperature, low, high in ((0.8, 0.0, 1e-8), (1.0, 0.05, math.inf)):
            got = replay_gradient(alg, model, rollout, plan, chance * reward, temperature)
            error = float((got - truth).norm() / truth.norm())
            assert low <= error <= high, f"{case}, scored at {temperature}: relative error {error}"


# ================================================================================================= 3.3 Merged steps


@judges("3.3")
def law_merged_states(alg: ModuleType) -> None:
    """Segment m: the steps m s .. m s + s - 1 for one. All its tokens are scored in the state before its first step."""
    for merge in (1, 2, 3, 4):
        plan = alg.merged_plan(four_steps(alg), seeded(), merge=merge)
        assert not plan.replay and plan.step is None, "the sampler did not draw a segment in one state"
        for b in range(4):
            last = steps_of(b)[1] // merge
            for k in range(plan.hidden.shape[0]):
                inside = frozenset(i for i, s in enumerate(STEPS[b]) if s >= 0 and s // merge == k)
                masked = frozenset(i for i, s in enumerate(STEPS[b]) if s >= merge * k or s < 0)
                assert positions(plan.hidden[k, b, 3:]) == masked, f"hidden: merge {merge}, segment {k}, row {b}"
                assert positions(plan.scored[k, b]) == (inside if k <= last else frozenset()), f"scored: merge {merge}"
                assert bool(plan.valid[k, b]) == (k <= last), "valid"
        assert plan.hidden.shape[0] == -(-4 // merge) and not plan.hidden[..., :3].any()
        close(plan.weight, torch.ones(plan.weight.shape), "weight")


@judges("3.3", "3.1", "2.1")
def law_merged_plan_between_replay_and_mean_field(alg: ModuleType) -> None:
    """merge = 1 scores as the replay does, without its behaviour anchor; merge = T as the mean field, at one call a row."""
    for case in WALKS:
        model, paths, _, _ = walk(case)
        rollout = recorded(alg, paths, case[-1])
        total = max(max(path.unmask_step) for path in paths) + 1
        value = lambda plan: alg.features(model, rollout, plan, temperature=0.7)["logp"].sum(0)  # noqa: E731, B023
        replay = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        one, all_at_once = (alg.merged_plan(rollout, seeded(), merge=merge) for merge in (1, total))
        close(value(one), value(replay), "merge = 1")
        assert torch.equal(one.hidden, replay.hidden) and torch.equal(one.valid, replay.valid)
        refuses(lambda: alg.behaviour_anchor(alg.METHODS["ppo"], one, rollout), "anchor", "ppo", "replay")  # noqa: B023
        assert all_at_once.network_calls == len(paths) < one.network_calls
        for b, path in enumerate(paths):
            field = oracle.token_logp(model, path.response, frozenset(range(case[0])), 0.7)
            shown = [field[i].item() if s >= 0 else 0.0 for i, s in enumerate(path.unmask_step)]
            close(value(all_at_once)[b], shown, f"merge = T, {case}")


# ===================================================================================== 4.1 Targets, top tokens, exact KL


@judges("4.1")
def law_targets_override_the_response(alg: ModuleType) -> None:
    """logp of the plan's own targets, state by state, where it names some; the network still sees the response."""
    model, rollout = tabular(4, 3), rollout_of(alg, [[1, 0, 2, 1], [2, 2, 0, 0]])
    hidden = torch.rand(3, 2, 7, generator=seeded(5)) < 0.6
    scored, target = hidden[..., 3:], torch.randint(0, 3, (3, 2, 4), generator=seeded(6))
    plan = alg.Plan(hidden, scored, torch.ones(3, 2), scored.any(-1), targets=target)
    got = alg.features(model, rollout, plan, temperature=0.7)["logp"]
    for k, b in itertools.product(range(3), range(2)):
        masked = positions(hidden[k, b, 3:])
        state = tuple(3 if i in masked else int(t) for i, t in enumerate(rollout.response[b]))
        logp = (model.logits_at(state) / 0.7).log_softmax(-1)
        close(got[k, b], [logp[i, target[k, b, i]].item() if i in masked else 0.0 for i in range(4)], "logp of the targets")
    own = dataclasses.replace(plan, targets=rollout.response.expand(3, -1, -1))
    plain = alg.features(model, rollout, dataclasses.replace(plan, targets=None), temperature=0.7)["logp"]
    close(alg.features(model, rollout, own, temperature=0.7)["logp"], plain, "targets = response")
    assert float((got - plain).abs().max()) > 0.1, "the targets are the response"


@judges("4.1")
def law_topk_logp(alg: ModuleType) -> None:
    """The new log-probabilities of the sampler's M likeliest tokens, where scored; its own at its own weights."""
    drawn, old, new, _, _ = experience()
    for count in (1, 2, 3):
        rollout = alg.Rollout(**{**vars(drawn), "records": likeliest(old, drawn, count)})
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        for model in (old, new):
            got = alg.features(model, rollout, plan, temperature=0.8, names=("logp", "topk_logp"))["topk_logp"]
            assert got.shape == (*plan.scored.shape, count)
            for k, b, i in itertools.product(range(plan.scored.shape[0]), range(8), range(4)):
                masked = positions(plan.hidden[k, b, 3:])
                state = tuple(3 if j in masked else int(t) for j, t in enumerate(rollout.response[b]))
                logp = (model.logits_at(state)[i] / 0.8).log_softmax(-1)[rollout.records["topk_ids"][b, i]].tolist()
                close(got[k, b, i], logp if plan.scored[k, b, i] else [0.0] * count, "topk_logp")
            if model is old:
                same = torch.where(plan.scored[..., None], rollout.records["topk_logp"].expand_as(got) - got, 0.0)
                close(same, torch.zeros_like(got), "at the sampler's weights")
    bare = alg.Rollout(**{**vars(drawn), "records": {}})
    refuses(
        lambda: alg.features(old, bare, plan, temperature=0.8, names=("logp", "topk_logp")), "records", "'topk_ids'", "needs"
    )


def kl_by_hand(model: Any, ref: Any, rollout: Any, plan: Any, k: int, b: int, temperature: float) -> dict[int, Tensor]:
    """KL(model || ref) of each scored position, over the whole vocabulary."""
    masked = positions(plan.hidden[k, b, 3:])
    state = tuple(model.mask_token_id if i in masked else int(t) for i, t in enumerate(rollout.response[b]))
    p, q = ((m.logits_at(state) / temperature).log_softmax(-1) for m in (model, ref))
    return {i: (p[i].exp() * (p[i] - q[i].detach())).sum() for i in sorted(positions(plan.scored[k, b]))}


@judges("4.1")
def law_exact_kl(alg: ModuleType) -> None:
    """kl_ref = KL(policy || reference) over the vocabulary: value, gradient in the policy, none in the reference; 0 at it."""
    drawn, _, new, ref, _ = experience()
    rollout = alg.Rollout(**vars(drawn))
    plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
    weight, states = normal(*plan.scored.shape, seed=60), torch.arange(plan.scored.shape[0] * 8)
    for temperature in (1.0, 0.6):
        ask = partial(alg.state_features, new, rollout, plan, states, temperature=temperature, names=("kl_ref",))
        got = ask(reference=ref)["kl_ref"].unflatten(0, plan.scored.shape[:2])
        total = torch.zeros((), dtype=torch.float64)
        for k, b in itertools.product(range(plan.scored.shape[0]), range(8)):
            truth = kl_by_hand(new, ref, rollout, plan, k, b, temperature)
            close(got[k, b], [truth[i].item() if i in truth else 0.0 for i in range(4)], "kl_ref")
            total = total + sum(weight[k, b, i] * value for i, value in truth.items())
        found = (weight * got).sum()
        close(oracle.table_gradient(new, found), oracle.table_gradient(new, total), "gradient")
        close(oracle.table_gradient(ref, found), torch.zeros_like(ref.table), "the reference is data")
        close(ask(reference=new)["kl_ref"], torch.zeros(len(states), 4), "KL(p || p)")
        half = oracle.TabularDenoiser(ref.table.detach() / 2)
        half.head = lambda h: ref.head(2 * h)
        close(ask(reference=half)["kl_ref"].unflatten(0, got.shape[:2]), got, "read by the reference's own head")


@judges("4.1", "7.2")
def law_exact_kl_is_the_mean_of_k3(alg: ModuleType) -> None:
    """Tokens of a step drawn from the policy: the mean of k3 on the step's sum is the sum of the tokens' exact KL."""
    _, _, new, ref, _ = experience()
    hidden = frozenset({0, 1, 3})
    rows = [(a, b, 2, c) for a, b, c in itertools.product(range(3), repeat=3)]
    rollout = rollout_of(alg, rows)
    scored = torch.tensor([[[1, 1, 0, 1]] * 27]).bool()
    plan = alg.Plan(torch.cat([torch.zeros(1, 27, 3).bool(), scored], -1), scored, torch.ones(1, 27), scored.any(-1))
    read = partial(alg.features, rollout=rollout, plan=plan, temperature=0.8)
    mine = read(new, names=("logp", "kl_ref"), reference=ref)
    ll, other = mine["logp"].sum(-1), read(ref)["logp"].sum(-1)
    chance = double([math.exp(sum(oracle.token_logp(new, y, hidden, 0.8).values()).item()) for y in rows])
    close(chance.sum(), 1.0, "the outcomes of the step")
    close((chance * alg.kl_term(ll, other, form="k3")).sum(), mine["kl_ref"].sum(-1).mean(), "k3 and the exact KL")


def released(alg: ModuleType, **parts: Any) -> Any:
    """egspo-released with two states a trajectory and some parts replaced."""
    return dataclasses.replace(methods.with_options(alg.METHODS["egspo-released"], {"plan.num_states": 2}), **parts)


def graph_features(alg: ModuleType, method: Any, model: Any, rollout: Any, plan: Any, reference: Any = None) -> dict:
    """All features of a row with their graph, at its temperature."""
    temperature = rollout.sampler.temperature if method.temperature == "sampling" else 1.0
    more = {} if reference is None else {"reference": reference}
    return laws.graph_features(alg, model, rollout, plan, method.features, temperature, **more)


@judges("10.1")
def law_exact_kl_in_the_loss(alg: ModuleType) -> None:
    """KL("exact"): beta times the kl_ref summed over the step, divided by the length where ll is. target old: the anchor."""
    drawn, old, new, ref, reward = experience()
    rollout = alg.Rollout(**vars(drawn))
    for normalizer in ("none", "kept_length"):
        exact = released(alg, kl=alg.KL("exact", 0.3), features=("logp", "kl_ref"), normalizer=normalizer)
        plan = exact.plan(rollout, seeded())
        feature = graph_features(alg, exact, new, rollout, plan, ref)
        anchor = alg.reduced(exact, plan, rollout, alg.features(old, rollout, plan, temperature=1.0))
        adv = alg.advantages(exact, plan, rollout, reward)
        other = alg.reduced(exact, plan, rollout, alg.features(ref, rollout, plan, temperature=1.0))
        loss = lambda method: alg.method_loss(method, plan, rollout, feature, adv, anchor, other)  # noqa: E731, B023
        free, expected = loss(dataclasses.replace(exact, kl=None)), 0.0
        for k, b in itertools.product(range(2), range(8)):
            truth = kl_by_hand(new, ref, rollout, plan, k, b, 1.0)
            if truth:
                tokens = int(rollout.lengths[b]) if normalizer == "kept_length" else 1
                expected = expected + 0.3 * sum(truth.values()) / tokens / (2 * len(truth)) / 8
        penalty = loss(exact) - free
        close(penalty, expected, f"exact KL, {normalizer}")
        close(oracle.table_gradient(new, penalty), oracle.table_gradient(new, expected), "gradient")
        ll, by_old = alg.reduced(exact, plan, rollout, feature), 0.0
        for k, b in plan.valid.nonzero().tolist():
            gap = (ll[k, b, 0] - anchor[k, b, 0]).item()
            by_old += 0.3 * (math.exp(-gap) - 1 + gap) * float(plan.weight[k, b]) / 8
        close(loss(dataclasses.replace(exact, kl=alg.KL("k3", 0.3, target="old"))) - free, by_old, "target old")


# ======================================================================= 4.2 The exact kernel of the low-confidence sampler


@functools.cache
def tied(length: int, vocab_size: int) -> oracle.TabularDenoiser:
    """Logits from a short list of numbers: many states in which tokens of different positions are equally confident."""
    rows = ((vocab_size + 1) ** length, length)
    order = torch.rand(*rows, vocab_size, generator=seeded(31)).argsort(-1)
    levels = double([0.0, 0.75, 0.75, 1.5])[:vocab_size]
    flat = (torch.rand(*rows, 1, generator=seeded(32)) < 0.5).double()
    return oracle.TabularDenoiser(levels[order] * flat)


def settings_of(length: int, block_length: int, tokens: int, temperature: float, order: str = "low_confidence") -> Sampler:
    """A sampler of that order."""
    return Sampler(order=order, temperature=temperature, length=length, block_length=block_length, tokens_per_step=tokens)


def open_states(vocab_size: int, settings: Sampler) -> list[tuple[tuple, range]]:
    """Every state in which a step may be taken, with its block: earlier blocks shown, later ones hidden."""
    found = []
    for start in range(0, settings.length, settings.block_length):
        block = range(start, start + settings.block_length)
        later = (vocab_size,) * (settings.length - block.stop)
        for before in itertools.product(range(vocab_size), repeat=start):
            for inside in itertools.product(range(vocab_size + 1), repeat=settings.block_length):
                hidden = inside.count(vocab_size)
                if hidden and hidden % settings.tokens_per_step == 0:
                    found.append(((*before, *inside, *later), block))
    return found


def one_step(alg: ModuleType, state: tuple, block: range, vocab_size: int, settings: Sampler) -> tuple[Any, Any, list]:
    """Every outcome of one step: the rollout whose rows they are, the plan that scores what each reveals, the next states."""
    hidden = [i for i in block if state[i] == vocab_size]
    chosen = itertools.combinations(hidden, settings.tokens_per_step)
    tokens = list(itertools.product(range(vocab_size), repeat=settings.tokens_per_step))
    shown = [dict(zip(where, what, strict=True)) for where, what in itertools.product(chosen, tokens)]
    following = [tuple(new.get(i, token) for i, token in enumerate(state)) for new in shown]
    response = [[0 if token == vocab_size else token for token in row] for row in following]
    rollout = rollout_of(alg, response, sampler=settings)
    masked = torch.tensor([[False] * 3 + [token == vocab_size for token in state]]).expand(1, len(shown), -1)
    scored = torch.tensor([[[i in new for i in range(settings.length)] for new in shown]])
    return rollout, alg.Plan(masked, scored, torch.ones(scored.shape[:2]), scored.any(-1)), following


def outcomes(alg: ModuleType, model: Any, state: tuple, block: range, settings: Sampler) -> tuple[Tensor, Tensor, list]:
    """(log-probability of the tokens, of the choice of positions, next state) of every outcome of a step."""
    rollout, plan, following = one_step(alg, state, block, model.mask_token_id, settings)
    found = alg.state_features(
        model, rollout, plan, torch.arange(len(following)), temperature=settings.temperature, names=("logp", "order_logp")
    )
    return found["logp"].sum(-1), found["order_logp"].sum(-1), following


KERNELS = (
    # length, vocabulary, block, tokens a step, temperature
    (3, 2, 3, 1, 0.7),
    (3, 3, 3, 1, 1.0),
    (4, 3, 4, 2, 0.6),
    (4, 2, 2, 1, 1.3),
    (4, 2, 4, 2, 0.8),
)


def check_kernel(alg: ModuleType, model: Any, case: tuple) -> None:
    """Values and gradients of every transition of every state are those of the oracle."""
    length, vocab, width, tokens, temperature = case
    settings = settings_of(length, width, tokens, temperature)
    for state, block in open_states(vocab, settings):
        logp, order, following = outcomes(alg, model, state, block, settings)
        truth = oracle.transition(model, state, block, "low_confidence", temperature, tokens)
        kernel = (logp + order).exp()
        close(kernel, [truth[s].item() if s in truth else 0.0 for s in following], f"{case}, state {state}")
        close(kernel.sum(), 1.0, "sum of the kernel")
        hidden = sum(state[i] == vocab for i in block)
        close(logp.exp().sum(), math.comb(hidden, tokens), "sum of the token probabilities alone")
        weight = normal(len(following), seed=62)
        expected = sum(c * truth[s] for c, s in zip(weight, following, strict=True) if s in truth)
        got = oracle.table_gradient(model, (weight * kernel).sum())
        close(got, oracle.table_gradient(model, expected), f"gradient, {case}, state {state}")


@judges("4.2", "4.1")
def law_order_kernel(alg: ModuleType) -> None:
    """exp(logp + order_logp) is the sampler's transition, state by state: it sums to 1, the tokens alone to C(m, n)."""
    for case in KERNELS:
        check_kernel(alg, tabular(case[0], case[1], 17), case)


@judges("4.2")
def law_order_kernel_on_ties(alg: ModuleType) -> None:
    """Equal confidences: the lower position wins, as in the sampler's own choice, proposal by proposal."""
    for case in KERNELS:
        check_kernel(alg, tied(case[0], case[1]), case)
    model, settings = tied(3, 2), settings_of(3, 3, 1, 0.7)
    state, count, equal = (2, 2, 2), {}, 0
    logits = model.logits_at(state).detach()
    confidence = (logits - logits.logsumexp(-1, keepdim=True)).float()
    for proposed in itertools.product(range(2), repeat=3):
        values = confidence[range(3), list(proposed)]
        equal += len(set(values.tolist())) < 3
        i = int(most_confident(values[None], torch.ones(1, 3).bool(), 1))
        chance = math.prod((logits / 0.7).softmax(-1)[j, token].item() for j, token in enumerate(proposed))
        shown = tuple(proposed[j] if j == i else 2 for j in range(3))
        count[shown] = count.get(shown, 0.0) + chance
    logp, order, following = outcomes(alg, model, state, range(3), settings)
    close((logp + order).exp(), [count.get(s, 0.0) for s in following], "the sampler's own rule")
    assert equal >= 4, "the fixture has no ties"


CONFIDENT = (
    # length, vocabulary, order, tokens per step, block length, EOS
    (3, 2, "low_confidence", 1, 3, None),
    (3, 3, "low_confidence", 1, 3, None),
    (4, 2, "low_confidence", 2, 4, None),
    (4, 2, "low_confidence", 1, 2, 1),
)


def confident_gradients(alg: ModuleType, case: tuple, temperature: float) -> tuple[Tensor, Tensor]:
    """E[reward grad score], with the position factor and without it."""
    model, rollout, chance, reward = with_entropy(alg, case, temperature)
    found = []
    for names in (("logp", "order_logp"), ("logp",)):
        method = dataclasses.replace(alg.METHODS["reinforce"], features=names)
        plan = method.plan(rollout, seeded())
        ll = alg.reduced(method, plan, rollout, graph_features(alg, method, model, rollout, plan))
        loss = method.objective(ll, None, (chance * reward)[None, :, None].expand_as(ll), 1).loss
        found.append(-oracle.table_gradient(model, loss.sum()))
    return found[0], found[1]


@judges("4.2", "10.1")
def law_exact_score_is_the_policy_gradient(alg: ModuleType) -> None:
    """Low-confidence order: E[reward grad(logp + order_logp)] = dJ/dtable; without order_logp it misses by more than 0.1.

    Also where an EOS decides the reward early, several tokens appear at once, and tokens are drawn at another temperature
    than confidence is measured at. The derivative itself is checked against finite differences of J.
    """
    for case, temperature in itertools.product(CONFIDENT, (0.7, 1.0)):
        truth = walk_gradient(case, temperature)
        exact, tokens_only = confident_gradients(alg, case, temperature)
        close(exact, truth, f"{case} at {temperature}")
        error = float((tokens_only - truth).norm() / truth.norm())
        assert error > 0.1, f"{case} at {temperature}: the token-only score misses by {error} only"
    case = CONFIDENT[0]
    direction, value = normal(27, 3, 2, seed=63), []
    for h in (-1e-5, 1e-5):
        moved = oracle.TabularDenoiser(tabular(3, 2, 11).table.detach() + h * direction)
        paths = oracle.trajectories(moved, case[2], 0.7, case[3], case[4], None)
        value.append(oracle.expected_reward(paths, lambda y: reward_of(y, None)).item())
    exact, _ = confident_gradients(alg, case, 0.7)
    close((exact * direction).sum(), (value[1] - value[0]) / 2e-5, "finite difference of J", 1e-7)


@judges("4.2")
def law_mean_score_is_zero_with_the_order_only(alg: ModuleType) -> None:
    """E[grad(logp + order_logp)] = 0 in every state; E[grad logp] alone is not: a constant in the reward would leak in."""
    leak = 0.0
    for case in KERNELS[:3]:
        model, settings = tabular(case[0], case[1], 17), settings_of(case[0], case[2], case[3], case[4])
        for state, block in open_states(case[1], settings):
            logp, order, _ = outcomes(alg, model, state, block, settings)
            chance = (logp + order).exp().detach()
            mean = oracle.table_gradient(model, (chance * (logp + order)).sum())
            close(mean, torch.zeros_like(mean), "mean score")
            leak = max(leak, float(oracle.table_gradient(model, (chance * logp).sum()).norm()))
    assert leak > 0.1, f"mean of the token-only score: {leak}"


def crossing(shift: float) -> oracle.TabularDenoiser:
    """Two positions, three tokens: token 0 of position 0 is more confident than token 0 of position 1 iff shift > 0."""
    table = normal(16, 2, 3, seed=64)
    table[15] = double([[1.5 + shift, 0.3, -0.4], [1.5, 0.3, -0.4]])
    return oracle.TabularDenoiser(table)


@judges("4.2")
def law_objective_jumps_where_confidences_cross(alg: ModuleType) -> None:
    """J on a path of tables: on each side it is the module's kernel and smooth; at the crossing it jumps.

    The jump is P(both tokens are proposed) times the difference of what the two following states are worth, as the kernel
    has it. No gradient sees it: the score is exact almost everywhere, and J is not continuous.
    """
    temperature, settings = 0.7, settings_of(2, 2, 1, 0.7)
    reward = lambda y: reward_of(y, None)  # noqa: E731

    def objective(shift: float) -> float:
        """sum over all responses and both orders of exp(logp + order_logp) reward, by the module."""
        model = crossing(shift)
        paths = [
            oracle.Trajectory(torch.ones(()), y, order)
            for y, order in itertools.product(itertools.product(range(3), repeat=2), ((0, 1), (1, 0)))
        ]
        rollout = recorded(alg, paths, None, sampler=settings)
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        found = alg.features(model, rollout, plan, temperature=temperature, names=("logp", "order_logp"))
        chance = (found["logp"] + found["order_logp"]).sum((0, 2)).exp()
        truth = oracle.expected_reward(oracle.trajectories(model, "low_confidence", temperature, 1), reward)
        got = sum(p * reward(path.response) for p, path in zip(chance.tolist(), paths, strict=True))
        close(got, truth.item(), f"J at {shift}")
        return got

    h = 1e-4
    above, below = (3 * objective(s * h) - 3 * objective(2 * s * h) + objective(3 * s * h) for s in (1, -1))
    p = (crossing(0.0).table[15] / temperature).softmax(-1).detach()
    worth = []  # of the state with token 0 at one position, the other one hidden
    for i in range(2):
        state = (0, 3) if i == 0 else (3, 0)
        q = (crossing(0.0).logits_at(state)[1 - i] / temperature).softmax(-1).tolist()
        worth.append(sum(q[v] * reward((0, v) if i == 0 else (v, 0)) for v in range(3)))
    # The other two pairs of equal tokens cross the other way: raising one logit makes the other tokens of that row less likely.
    back = []
    for v in (1, 2):
        q = [(crossing(0.0).logits_at(s)[j] / temperature).softmax(-1).tolist() for s, j in (((v, 3), 1), ((3, v), 0))]
        back.append([sum(q[0][w] * reward((v, w)) for w in range(3)), sum(q[1][w] * reward((w, v)) for w in range(3))])
    jump = float(p[0, 0] * p[1, 0]) * (worth[0] - worth[1])
    jump += sum(float(p[0, v] * p[1, v]) * (there - here) for v, (here, there) in zip((1, 2), back, strict=True))
    assert abs(jump) > 0.01, "the fixture does not jump"
    close(above - below, jump, "jump of J", 1e-8)


@judges("4.2")
def law_impossible_orders(alg: ModuleType) -> None:
    """A choice that the present weights never make: log of the smallest number, gradient 0, probability 0, nothing nan."""
    table = torch.zeros(16, 2, 3, dtype=torch.float64)
    table[15] = double([[6.0, 5.9, 5.8], [6.0, -9.0, -9.0]])  # every token of position 1 but the first is below position 0
    for dtype in (torch.float64, torch.float32):
        model, settings = oracle.TabularDenoiser(table.to(dtype)), settings_of(2, 2, 1, 0.7)
        rollout = rollout_of(alg, [[0, 1]], sampler=settings)
        scored = torch.tensor([[[False, True]]])
        plan = alg.Plan(torch.tensor([[[False] * 3 + [True, True]]]), scored, torch.ones(1, 1), scored.any(-1))
        found = alg.state_features(model, rollout, plan, torch.arange(1), temperature=0.7, names=("logp", "order_logp"))
        close(found["order_logp"], [[0.0, math.log(torch.finfo(dtype).tiny)]], "log F", 1e-6)
        assert torch.equal(oracle.table_gradient(model, found["order_logp"].sum()), torch.zeros_like(model.table)), "gradient"
        both = oracle.table_gradient(model, (found["logp"] + found["order_logp"]).exp().sum())
        assert bool(both.isfinite().all()) and float(both.abs().max()) < 1e-30


@judges("4.2", "4.1")
def law_other_orders_have_no_position_factor(alg: ModuleType) -> None:
    """Random and fixed orders: order_logp is 0 whatever the weights, and reads nothing; also with nothing scored."""
    for order in ("random", "left_to_right", "right_to_left"):
        model, settings = tabular(3, 2, 17), settings_of(3, 3, 1, 0.7, order)
        rollout, plan, following = one_step(alg, (2, 2, 1), range(3), 2, settings)
        names = ("logp", "order_logp")
        found = alg.state_features(model, rollout, plan, torch.arange(len(following)), temperature=0.7, names=names)
        close(found["order_logp"], torch.zeros(len(following), 3), order)
    empty = alg.Plan(plan.hidden, torch.zeros_like(plan.scored), plan.weight, plan.valid)
    rollout = dataclasses.replace(rollout, sampler=settings_of(3, 3, 1, 0.7))
    nothing = alg.state_features(model, rollout, empty, torch.arange(len(following)), temperature=0.7, names=names)
    close(nothing["order_logp"], torch.zeros(len(following), 3), "nothing scored")
    gradient = oracle.table_gradient(model, nothing["order_logp"].sum())
    close(gradient, torch.zeros_like(model.table), "nothing scored: gradient")
    log_f, none = torch.ones(6, dtype=torch.float64, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    passed = alg.order_logp(log_f, none, ~none)
    close(passed, torch.zeros(2, 3), "candidates, and nothing scored")
    close(torch.autograd.grad(passed.sum(), log_f)[0], torch.zeros(6), "candidates, and nothing scored: gradient")


class Counting:
    """A model that counts the states it encodes and the rows that its vocabulary head turns into logits."""

    def __init__(self, model: Any) -> None:
        self.model, self.mask_token_id, self.vocab_size = model, model.mask_token_id, model.vocab_size
        self.states = self.rows = 0

    def encode(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        self.states += len(tokens)
        return self.model.encode(tokens, attention_mask)

    def head(self, h: Tensor) -> Tensor:
        self.rows += h.shape[:-1].numel()
        return self.model.head(h)


@judges("4.2", "4.1")
def law_exact_kernel_costs_rows_of_the_head_only(alg: ModuleType) -> None:
    """Network calls: plan.network_calls with order_logp and without. Head rows: the block's hidden positions for the former."""
    model, paths, _, _ = walk((4, 2, "low_confidence", 1, 2, 1))
    rollout = recorded(alg, paths, 1, sampler=settings_of(4, 2, 1, 0.7))
    plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
    scored = candidates = 0
    for k, b in plan.valid.nonzero().tolist():
        block = range(0, 2) if min(positions(plan.scored[k, b])) < 2 else range(2, 4)
        scored += int(plan.scored[k, b].sum())
        candidates += len(positions(plan.hidden[k, b, 3:]) & set(block))
    for names, rows in ((("logp",), scored), (("logp", "order_logp"), candidates)):
        counting = Counting(model)
        alg.features(counting, rollout, plan, temperature=0.7, names=names)
        assert counting.states == plan.network_calls, f"{names}: {counting.states} calls, not {plan.network_calls}"
        assert counting.rows == rows, f"{names}: {counting.rows} rows of logits, not {rows}"
    assert scored < candidates < scored * 2


# =================================================================================================== 6.4 Stepwise credit

N, K = 4, 3
CREDIT = {"lam": 0.5, "schedule": "constant", "normalize": True, "center": "rank"}


def credit_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(reward, step rewards, valid, time) of two groups of four at three ranks; at the last, the second group has no member."""
    reward = double([1.0, 0.0, 0.25, 2.0, 0.5, -0.5, 1.5, 1.0])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0, 0, 0]]).bool()
    time = torch.rand(3, 8, generator=seeded(65), dtype=torch.float64)
    time[0, 0] = 0.0  # the first step
    return reward, normal(3, 8, seed=66), valid, time


def credit_by_hand(reward: Tensor, value: Tensor, valid: Tensor, time: Tensor, options: dict) -> list[list[float]]:
    """The definition by loops; nan where the rank does not exist."""
    out = [[math.nan] * 8 for _ in range(K)]
    for k, b in itertools.product(range(K), range(8)):
        lam = [options["lam"] * (time[k, j].item() if options["schedule"] == "linear" else 1.0) for j in range(8)]
        scale = [1 + lam[j] if options["normalize"] else 1.0 for j in range(8)]
        gain = [lam[j] * (reward[j].item() - value[k, j].item()) / scale[j] for j in range(8)]
        first = [reward[j].item() / scale[j] for j in range(8)]
        total = [x + y for x, y in zip(first, gain, strict=True)] if options["center"] == "rank" else first
        mates = [j for j in range(4 * (b // 4), 4 * (b // 4) + 4) if valid[k, j]]
        if valid[k, b]:
            out[k][b] = total[b] - sum(total[j] for j in mates) / len(mates)
            out[k][b] += gain[b] if options["center"] == "reward" else 0.0
    return out


@judges("6.4")
def law_stepwise_advantage(alg: ModuleType) -> None:
    """By loops, for every combination of options: centred rank by rank over the members that have a state there."""
    reward, value, valid, time = credit_case()
    for lam, schedule, normalize, center in itertools.product(
        (0.0, 0.5, 2.0), alg.SCHEDULES, (False, True), ("rank", "reward")
    ):
        options = {"lam": lam, "schedule": schedule, "normalize": normalize, "center": center}
        got = alg.stepwise_advantage(reward, N, value, valid, time, **options)
        expected = double(credit_by_hand(reward, value, valid, time, options))
        close(torch.where(valid, got, 0.0), torch.where(valid, expected, 0.0), f"{options}")
        assert bool(got.isfinite().all()), "ranks without a member"


@judges("6.4", "6.1")
def law_stepwise_advantage_algebra(alg: ModuleType) -> None:
    """Sum 0 per rank and group; blind to a constant in all rewards; lam = 0: group_mean in every row; and three identities."""
    reward, value, _, time = credit_case()
    valid = torch.ones(K, 8, dtype=torch.bool)
    credit = lambda r, v, **changed: alg.stepwise_advantage(r, N, v, valid, time, **{**CREDIT, **changed})  # noqa: E731
    sums = lambda x: x.unflatten(1, (2, N)).sum(-1)  # noqa: E731
    by_group = reward.unflatten(0, (2, N))
    centred = (by_group - by_group.mean(1, keepdim=True)).flatten()
    for normalize, schedule in itertools.product((False, True), alg.SCHEDULES):
        got = credit(reward, value, normalize=normalize, schedule=schedule)
        close(sums(got), torch.zeros(K, 2), "sum over the group")
        if not normalize or schedule == "constant":  # else R counts a constant 1 / (1 + lam_k) times, unlike for each member
            close(credit(reward + 3, value + 3, normalize=normalize, schedule=schedule), got, "a constant in all rewards")
        close(credit(reward, value, lam=0.0, normalize=normalize, schedule=schedule), centred.expand(K, -1), "lam = 0")
    close(credit(reward, reward.expand(K, -1), normalize=True), (centred / 1.5).expand(K, -1), "step reward = reward")
    control = reward - 0.5 / 1.5 * value  # R = reward - lam/(1 + lam) step reward
    mean = control.unflatten(1, (2, N)).mean(-1, keepdim=True)
    close(credit(reward, value), (control.unflatten(1, (2, N)) - mean).flatten(1), "control variate of coefficient 1/3")
    apart = credit(reward, value, center="reward")
    close(sums(apart) * 1.5, 0.5 * sums(reward - value), "center reward: the second part keeps its mean")


@judges("6.4")
def law_stepwise_groups_stay_apart(alg: ModuleType) -> None:
    """Other prompts do not matter; members in another order get the same numbers; invalid states do not count."""
    reward, value, valid, time = credit_case()
    credit = partial(alg.stepwise_advantage, **CREDIT)
    got = credit(reward, N, value, valid, time)
    alone = credit(reward[4:], N, value[:, 4:], valid[:, 4:], time[:, 4:])
    close(torch.where(valid[:, 4:], got[:, 4:] - alone, 0.0), torch.zeros(K, 4), "other prompts")
    order = torch.tensor([2, 0, 3, 1, 5, 4, 7, 6])
    moved = credit(reward[order], N, value[:, order], valid[:, order], time[:, order])
    close(torch.where(valid[:, order], moved - got[:, order], 0.0), torch.zeros(K, 8), "order")
    other = credit(reward, N, torch.where(valid, value, 1e6), valid, time)
    close(torch.where(valid, other - got, 0.0), torch.zeros(K, 8), "values of states that do not exist")


@judges("6.4", "10.1")
def law_stepwise_time(alg: ModuleType) -> None:
    """A row's time is step / T: with the linear schedule the first step has lam 0, the last (T - 1)/T of lam."""
    row = dataclasses.replace(
        alg.METHODS["egspo-sa"], credit=partial(alg.stepwise_advantage, **{**CREDIT, "schedule": "linear"})
    )
    row = methods.with_options(row, {"plan.num_states": 4})
    rollout = four_steps(alg, keep=torch.ones(4, 8, dtype=torch.bool), unmask_step=torch.tensor(STEPS[:3] + STEPS[:1]))
    plan = row.plan(rollout, seeded())
    reward, value = double([1.0, 0.0, 0.3, 2.0]), normal(4, 4, seed=67)
    got = alg.advantages(row, plan, rollout, reward, value)
    for k, b in itertools.product(range(4), range(4)):
        total = []
        for j in (2 * (b // 2), 2 * (b // 2) + 1):
            lam = 0.5 * int(plan.step[k, j]) / 4
            total.append(((1 + lam) * reward[j] - lam * value[k, j]) / (1 + lam))
        close(got[k, b], total[b % 2] - sum(total) / 2, f"rank {k}, row {b}")
    assert bool((plan.step == 0).any()) and bool((plan.step == 3).any())


@judges("6.4")
def law_stepwise_refusals(alg: ModuleType) -> None:
    """A wrong option names its key and its value."""
    credit = lambda **changed: alg.stepwise_advantage(*credit_case()[:1], N, *credit_case()[1:], **{**CREDIT, **changed})  # noqa: E731
    refuses(lambda: credit(schedule="cosine"), "credit.schedule", "'cosine'", "linear")
    refuses(lambda: credit(center="all"), "credit.center", "'all'", "rank")
    refuses(lambda: credit(lam=-0.5), "credit.lam", "-0.5")


def greedy_completion(model: Any, state: tuple) -> tuple:
    """The likeliest token at every hidden position of a state."""
    logits = model.logits_at(state).tolist()
    return tuple(
        max(range(len(row)), key=lambda v: row[v]) if t == len(row) else t for t, row in zip(state, logits, strict=True)
    )


def state_of(model: Any, path: Any, step: int) -> tuple:
    """The state of a trajectory before a step."""
    hidden = oracle.hidden_before(path, step)
    return tuple(model.mask_token_id if i in hidden else token for i, token in enumerate(path.response))


@judges("6.4", "6.1")
def law_stepwise_advantage_is_unbiased(alg: ModuleType) -> None:
    """All pairs of trajectories, random order: the mean of sum_t adv_t grad log pi_t is (1 - 1/N) dJ for every lam.

    Not normalised it is (1 - 1/N) sum_t (1 + lam_t) g_t, g_t the share of step t, also with lam_t = lam t/T. With center
    reward only the reward pays for containing itself: sum_t ((1 - 1/N) + lam) g_t / (1 + lam).
    """
    case = (2, 3, "random", 1, 2, None)
    model, paths, chance, reward = walk(case)
    first, second = (torch.tensor(rows) for rows in zip(*itertools.product(range(len(paths)), repeat=2), strict=True))
    rows = torch.stack([first, second], 1).flatten()
    rollout = recorded(alg, [paths[b] for b in rows.tolist()], None, num_generations=2)
    plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
    ll = alg.reduce_logp(graph_logp(alg, model, rollout, plan, 0.7), plan, level="step", normalizer=None)[..., 0]
    steps, time = range(2), torch.tensor([[0.0], [0.5]], dtype=torch.float64).expand(2, len(rows))
    value = double([[reward_of(greedy_completion(model, state_of(model, path, s)), None) for path in paths] for s in steps])
    share = []
    for s in steps:
        score = lambda path, s=s: sum(  # noqa: E731
            oracle.token_logp(model, path.response, oracle.hidden_before(path, s), 0.7)[i]
            for i, at in enumerate(path.unmask_step)
            if at == s
        )
        share.append(oracle.table_gradient(model, oracle.score_expectation(paths, score, lambda y: reward_of(y, None))))
    close(sum(share), walk_gradient(case), "the shares of the steps make the policy gradient")
    pair = (chance[first] * chance[second]).repeat_interleave(2) / 2
    for lam, schedule, normalize, center in itertools.product(
        (0.0, 0.5, 3.0), alg.SCHEDULES, (True, False), ("rank", "reward")
    ):
        options = {"lam": lam, "schedule": schedule, "normalize": normalize, "center": center}
        adv = alg.stepwise_advantage(reward[rows], 2, value[:, rows], plan.valid, time, **options)
        got = oracle.table_gradient(model, (pair * adv * ll).sum())
        lams = [lam * (t if schedule == "linear" else 1.0) for t in (0.0, 0.5)]
        inside = [(1 + x) * 0.5 if center == "rank" else 0.5 + x for x in lams]
        expected = sum(w / (1 + x if normalize else 1) * g for w, x, g in zip(inside, lams, share, strict=True))
        close(got, expected, f"{options}")


@judges("6.4", "4.1")
def law_one_step_values(alg: ModuleType) -> None:
    """The value of a state by completing it in one step, its probability read off through the plan's targets.

    Drawn: exact before the last step, not before. Greedy: off by at most (range of rewards) (1 - p of that completion).
    So the advantage of a trajectory against the drawn value of its last state has mean 0 there.
    """
    model, vocab, settings = tabular(3, 2, 11), 2, settings_of(3, 3, 1, 0.7, "random")
    reward = {y: reward_of(y, None) for y in itertools.product(range(vocab), repeat=3)}
    spread, wrong = max(reward.values()) - min(reward.values()), 0.0
    for state in itertools.product(range(vocab + 1), repeat=3):
        hidden = [i for i, token in enumerate(state) if token == vocab]
        if not hidden:
            continue
        full = [y for y in reward if all(token in (vocab, y[i]) for i, token in enumerate(state))]
        rollout = rollout_of(alg, [[0 if token == vocab else token for token in state]] * len(full), sampler=settings)
        scored = torch.tensor([[token == vocab for token in state]]).expand(1, len(full), -1)
        masked = torch.cat([torch.zeros(1, len(full), 3).bool(), scored], -1)
        plan = alg.Plan(masked, scored, torch.ones(1, len(full)), scored.any(-1), targets=torch.tensor([full]))
        logp = alg.features(model, rollout, plan, temperature=0.7)["logp"][0]
        chance = dict(zip(full, logp.sum(-1).exp().tolist(), strict=True))
        drawn = sum(p * reward[y] for y, p in chance.items())
        truth = worth(model, state, reward)
        credit = partial(alg.stepwise_advantage, lam=1.0, schedule="constant", normalize=False, center="reward")
        one = torch.ones(1, 1, dtype=torch.float64)
        gain = sum(p * credit(double([reward[y]]), 1, one * drawn, one.bool(), one).item() for y, p in chance.items())
        if len(hidden) == 1:
            close(drawn, truth, "drawn value before the last step")
            close(gain, 0.0, "mean advantage against it")
        wrong = max(wrong, abs(drawn - truth))
        guess = greedy_completion(model, state)
        p_max = math.prod(max((model.logits_at(state)[i] / 0.7).softmax(-1).tolist()) for i in hidden)
        close(chance[guess], p_max, "the greedy completion is the likeliest")
        if len(hidden) == 1:
            assert abs(reward[guess] - truth) <= spread * (1 - chance[guess]) + 1e-12, f"greedy value of {state}"
            assert abs(reward[guess] - truth) > 1e-3, "the greedy value is exact on this fixture"
    assert wrong > 0.01, "the drawn value is exact in every state of this fixture"


def worth(model: Any, state: tuple, reward: dict) -> float:
    """Expected reward from a state on, random order at temperature 0.7."""
    if model.mask_token_id not in state:
        return reward[state]
    kernel = oracle.transition(model, state, range(len(state)), "random", 0.7, 1)
    return sum(p.item() * worth(model, following, reward) for following, p in kernel.items())


# ======================================================================================================== Formulas of rows


def scored_steps(f: Formula) -> list[tuple[int, int]]:
    """(k, b) of the plan's states that exist."""
    return [(k, b) for k in f.states for b in f.rows if f.plan.valid[k, b]]


def stepwise(f: Formula, k: int, b: int) -> float:
    """lam = 0.5, normalised: R = (1.5 reward - 0.5 step reward) / 1.5, less its mean over the rank's valid members."""
    value = lambda j: (1.5 * f.reward[j] - 0.5 * f.step_reward[k][j]) / 1.5  # noqa: E731
    mates = [j for j in range(4 * (b // 4), 4 * (b // 4) + 4) if f.plan.valid[k, j]]
    return value(b) - sum(map(value, mates)) / len(mates)


def step_clip(f: Formula, credit: Any, behaviour: bool) -> Tensor:
    """One clipped ratio a chosen step, 0.2 below and 0.5 above; summed over the steps, averaged over the responses."""
    total = 0.0
    for k, b in scored_steps(f):
        logp = f.tokens(f.new, k, b, 0.8)
        drawn = {i: f.rollout.logp[b, i] for i in logp} if behaviour else f.tokens(f.old, k, b, 0.8)
        change = sum(logp[i] - drawn[i].detach() for i in logp)
        total = total + f.clipped(change.exp(), credit(k, b), 0.2, 0.5)
    return total / 8


def step_clip_released(f: Formula, credit: Any) -> Tensor:
    """Temperature 1, against the old weights; k3 of weight 0.04 on the step's sum; divided by K and by the step's tokens."""
    total = 0.0
    for k, b in scored_steps(f):
        new, old, ref = (sum(f.tokens(model, k, b).values()) for model in (f.new, f.old, f.ref))
        gap = ref.detach() - new
        loss = f.clipped((new - old.detach()).exp(), credit(k, b), 0.2, 0.5) + 0.04 * (gap.exp() - gap - 1)
        total = total + loss / (len(f.states) * len(f.tokens(f.new, k, b)))
    return total / 8


@formula("replay-uniform")
def replay_uniform(f: Formula) -> Tensor:
    """-adv log pi of each drawn step, times (deciding steps) / (steps drawn of them)."""
    total = 0.0
    for k, b in scored_steps(f):
        deciding = 1 + max(int(s) for s, kept in zip(f.rollout.unmask_step[b], f.rollout.keep[b], strict=True) if kept)
        drawn = sum(bool(f.plan.valid[j, b]) for j in f.states)
        total = total - deciding / drawn * f.centred(b) * sum(f.tokens(f.new, k, b, 0.8).values())
    return total / 8


@formula("egspo")
def egspo(f: Formula) -> Tensor:
    """Against the sampler's own log-probabilities, the reward centred on its group."""
    return step_clip(f, lambda _, b: f.centred(b), behaviour=True)


@formula("egspo-sa")
def egspo_sa(f: Formula) -> Tensor:
    """egspo with a value of its own for each state."""
    return step_clip(f, partial(stepwise, f), behaviour=True)


@formula("egspo-exact")
def egspo_exact(f: Formula) -> Tensor:
    """Against the old weights; in random order, as here, the choice of positions adds nothing: law_egspo_exact_row."""
    return step_clip(f, lambda _, b: f.centred(b), behaviour=False)


@formula("egspo-released")
def egspo_released(f: Formula) -> Tensor:
    """The released code: see step_clip_released."""
    return step_clip_released(f, lambda _, b: f.centred(b))


@formula("egspo-sa-released")
def egspo_sa_released(f: Formula) -> Tensor:
    """The same with stepwise advantages."""
    return step_clip_released(f, partial(stepwise, f))


@judges("10.1", "4.2", "3.2")
def law_egspo_exact_row(alg: ModuleType) -> None:
    """egspo-exact on low-confidence trajectories: a chosen step's clipped ratio of transition probabilities."""
    case = CONFIDENT[0]
    old, paths, chance, _ = walk(case)
    likely = [paths[i] for i in chance.argsort(descending=True)[:8]]
    new = oracle.TabularDenoiser(old.table.detach() + normal(*old.table.shape, seed=68, scale=0.6))
    entropy = double([walk_entropy(old, path, 0.7) for path in likely])
    rollout = recorded(alg, likely, None, num_generations=4, records={"entropy": entropy}, sampler=settings_of(3, 3, 1, 0.7))
    method = methods.with_options(alg.METHODS["egspo-exact"], {"plan.num_states": 2})
    plan = method.plan(rollout, seeded())
    anchor = alg.reduced(method, plan, rollout, alg.features(old, rollout, plan, temperature=0.7, names=method.features))
    reward = [reward_of(path.response, None) for path in likely]
    adv = alg.advantages(method, plan, rollout, double(reward))
    feature = graph_features(alg, method, new, rollout, plan)
    got = oracle.table_gradient(new, alg.method_loss(method, plan, rollout, feature, adv, anchor, None))
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for b, path in enumerate(likely):
        centred = reward[b] - sum(reward[4 * (b // 4) : 4 * (b // 4) + 4]) / 4
        for t in sorted(range(3), key=lambda t, b=b, path=path: -float(entropy[b, path.unmask_step.index(t)]))[:2]:
            state, following = state_of(old, path, t), state_of(old, path, t + 1)
            step = [oracle.transition(m, state, range(3), "low_confidence", 0.7, 1).get(following) for m in (new, old)]
            if step[0] is not None:
                ratios.append((step[0] / step[1].detach()).item())
                total = total + surrogate(step[0] / step[1].detach(), centred, 0.2, 0.5)
    close(got, oracle.table_gradient(new, total / 8), "gradient")
    assert max(ratios) > 1.5 and min(ratios) < 0.8, f"ratios {ratios}"
