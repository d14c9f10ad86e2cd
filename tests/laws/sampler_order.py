"""Laws of which positions a step reveals: the exact kernels (4.2) and (4.5), and the position part (4.4)."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from laws.registry import judges, rejects
from laws.tools import (
    Walk,
    close,
    double,
    features_of,
    graph_features,
    normal,
    positions,
    recorded,
    reward_of,
    rollout_of,
    seeded,
    settings_of,
    state_of,
    surrogate,
    tabular,
    walk,
    walk_entropy,
    walk_gradient,
    with_entropy,
)
from minidrl import methods, oracle
from minidrl.sampler import Sampler, most_confident


@functools.cache
def tied(length: int, vocab_size: int) -> oracle.TabularDenoiser:
    """Logits from a short list of numbers: many states in which tokens of different positions are equally confident."""
    rows = ((vocab_size + 1) ** length, length)
    order = torch.rand(*rows, vocab_size, generator=seeded(31)).argsort(-1)
    levels = double([0.0, 0.75, 0.75, 1.5])[:vocab_size]
    flat = (torch.rand(*rows, 1, generator=seeded(32)) < 0.5).double()
    return oracle.TabularDenoiser(levels[order] * flat)


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


def one_step(alg: Any, state: tuple, block: range, vocab: int, settings: Sampler) -> tuple[Any, Any, list]:
    """Every outcome of one step: the rollout whose rows they are, the plan that scores what each reveals, the next states.

    With a threshold any number of positions may be revealed, and all sets of them are outcomes.
    """
    hidden = [i for i in block if state[i] == vocab]
    sizes = [settings.tokens_per_step] if settings.threshold is None else range(1, len(hidden) + 1)
    sets = [where for n in sizes for where in itertools.combinations(hidden, n)]
    shown = [dict(zip(s, what, strict=True)) for s in sets for what in itertools.product(range(vocab), repeat=len(s))]
    following = [tuple(new.get(i, token) for i, token in enumerate(state)) for new in shown]
    response = [[0 if token == vocab else token for token in row] for row in following]
    rollout = rollout_of(alg, response, sampler=settings)
    masked = torch.tensor([[False] * 3 + [token == vocab for token in state]]).expand(1, len(shown), -1)
    scored = torch.tensor([[[i in new for i in range(settings.length)] for new in shown]])
    return rollout, alg.Plan(masked, scored, torch.ones(scored.shape[:2]), scored.any(-1)), following


def outcomes(alg: Any, model: Any, state: tuple, block: range, settings: Sampler) -> tuple[Tensor, Tensor, list]:
    """(log-probability of the tokens, of the choice of positions, next state) of every outcome of a step."""
    rollout, plan, following = one_step(alg, state, block, model.mask_token_id, settings)
    states, names = torch.arange(len(following)), ("logp", "order_logp")
    found = alg.state_features(model, rollout, plan, states, temperature=settings.temperature, names=names)
    return found["logp"].sum(-1), found["order_logp"].sum(-1), following


def kernel(length: int, vocab: int, block: int, tokens: int = 1, threshold: float | None = None) -> Walk:
    """A sampler by confidence."""
    return Walk(length, vocab, "low_confidence", tokens, block, threshold=threshold)


KERNELS = (
    (kernel(3, 2, 3), 0.7),
    (kernel(3, 3, 3), 1.0),
    (kernel(4, 3, 4, tokens=2), 0.6),
    (kernel(4, 2, 2), 1.3),
    (kernel(4, 2, 4, tokens=2), 0.8),
)
THRESHOLDS = (
    (kernel(3, 2, 3, threshold=0.6), 0.7),
    (kernel(3, 3, 3, threshold=0.5), 1.0),
    (kernel(3, 3, 3, threshold=0.4), 1.3),
    (kernel(4, 2, 2, threshold=0.7), 0.8),
    (kernel(3, 2, 3, threshold=1.0), 0.7),
    (kernel(3, 2, 3, threshold=0.0), 0.7),
)


def check_kernel(alg: Any, model: Any, case: Walk, temperature: float) -> float:
    """Values and gradients of every transition of every state are those of the oracle.

    Returned is the largest sum, over the outcomes that are possible, of the probabilities of their tokens alone.
    """
    settings, most = settings_of(case, temperature), 0.0
    for state, block in open_states(case.vocab, settings):
        logp, order, following = outcomes(alg, model, state, block, settings)
        truth = oracle.transition(model, state, block, case.order, temperature, case.tokens, case.threshold)
        chance = (logp + order).exp()
        close(chance, [truth[s].item() if s in truth else 0.0 for s in following], f"{case}, state {state}")
        close(chance.sum(), 1.0, "sum of the kernel")
        most = max(most, float(logp.detach().exp()[torch.tensor([s in truth for s in following])].sum()))
        weight = normal(len(following), seed=62)
        expected = sum(c * truth[s] for c, s in zip(weight, following, strict=True) if s in truth)
        got = oracle.table_gradient(model, (weight * chance).sum())
        close(got, oracle.table_gradient(model, expected), f"gradient, {case}, state {state}")
    return most


@judges("4.2", "4.1")
@rejects("4.2", ("token_confidence(logits", "(logits / temperature).log_softmax(-1).float("), where="log_passed_over")
@rejects("4.2", ("chosen.amin(-1", "chosen.masked_fill(~scored, -torch.inf).amax(-1"), where="confidence_to_beat")
@rejects("4.2", ("(total / scored.sum(-1).clamp(min=1))", "total"))
def law_order_kernel(alg: Any) -> None:
    """exp(logp + order_logp) is the sampler's transition in every state. It sums to 1, and the tokens alone sum to more."""
    for case, temperature in KERNELS:
        assert check_kernel(alg, tabular(case.length, case.vocab, 17), case, temperature) > 1.2, f"{case}: the tokens alone"


@judges("4.5")
@rejects("4.5", ("unsure & (count > 1)", "unsure & (count > 0)"), (".any(-1, keepdim=True)", ".all(-1, keepdim=True)"))
@rejects("4.5", ("limit.masked_fill(reached, floor)", "limit"), where="threshold_to_beat")
@rejects("4.5", ("else -math.inf", "else 0.0"), where="log_threshold")
def law_threshold_kernel(alg: Any) -> None:
    """exp(logp + order_logp) is the transition of threshold decoding and sums to 1; the tokens alone sum to more."""
    for case, temperature in THRESHOLDS:
        most = check_kernel(alg, tabular(case.length, case.vocab, 17), case, temperature)
        assert (most > 1.2) == (case.threshold > 0), f"{case}: the tokens of the possible sets alone sum to {most} at most"


@judges("4.2")
@rejects("4.2", ("place[:, None] > last[state]", "place[:, None] < last[state]"), where="confidence_to_beat")
def law_order_kernel_on_ties(alg: Any) -> None:
    """Among equal confidences the lower position wins, as in the sampler's own choice, proposal by proposal."""
    for case, temperature in KERNELS:
        check_kernel(alg, tied(case.length, case.vocab), case, temperature)
    model, settings = tied(3, 2), settings_of(kernel(3, 2, 3))
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


@judges("4.5")
@rejects("4.5", ("< log_threshold", "<= log_threshold"))
@rejects("4.5", ("reached = limit >= floor", "reached = limit > floor"), where="threshold_to_beat")
def law_threshold_kernel_on_ties(alg: Any) -> None:
    """A token whose confidence is equal to tau is revealed. Among equal ones below tau the lower position wins."""
    for length, vocab, tau in ((3, 2, 0.5), (3, 2, 0.9), (2, 4, 0.25), (3, 3, 0.6)):
        check_kernel(alg, tied(length, vocab), kernel(length, vocab, length, threshold=tau), 0.7)
    flat = oracle.TabularDenoiser(torch.zeros(27, 3, 2, dtype=torch.float64))
    steps = {path.unmask_step for path in oracle.trajectories(flat, "low_confidence", 1.0, 1, threshold=0.5)}
    assert steps == {(0, 0, 0)}, "the fixture has no confidence that is equal to tau"


EXACT = (
    *(Walk(3, vocab, "low_confidence", 1, 3) for vocab in (2, 3)),
    Walk(4, 2, "low_confidence", 2, 4),
    Walk(4, 2, "low_confidence", 1, 2, eos=1),
)
EXACT_THRESHOLDS = (
    Walk(3, 2, "low_confidence", 1, 3, threshold=0.6),
    Walk(3, 3, "low_confidence", 1, 3, threshold=0.5),
    Walk(4, 2, "low_confidence", 1, 2, eos=1, threshold=0.65),
    Walk(4, 2, "low_confidence", 1, 4, eos=1, threshold=0.6),
)


def check_score(alg: Any, case: Walk, temperature: float) -> None:
    """E[reward grad score] = dJ/dtable and E[grad score] = 0, with order_logp; the tokens alone miss both by more than 0.05."""
    model, rollout, chance, reward = with_entropy(alg, case, temperature)
    plan, truth = alg.METHODS["reinforce"].plan(rollout, seeded()), walk_gradient(case, temperature)
    feature = graph_features(alg, model, rollout, plan, ("logp", "order_logp"), temperature)
    for names in (("logp", "order_logp"), ("logp",)):
        method = dataclasses.replace(alg.METHODS["reinforce"], features=names)
        ll = alg.reduced(method, plan, rollout, feature).sum((0, 2))
        got, mean = (oracle.table_gradient(model, (chance * value * ll).sum()) for value in (reward, 1.0))
        gap, leak = float((got - truth).norm() / truth.norm()), float(mean.norm())
        good = gap < 1e-9 and leak < 1e-9 if "order_logp" in names else gap > 0.05 and leak > 0.05
        assert good, f"{case} at {temperature}, {names}: off by {gap} of the gradient, mean score {leak}"


@judges("4.2", "10.1")
@rejects("4.2", ("probability.clamp", "probability.detach().clamp"), where="log_passed_over")
def law_exact_score_is_the_policy_gradient(alg: Any) -> None:
    """By confidence, logp + order_logp is a score of the sampler, and logp alone is not.

    Also where an EOS decides the reward early, several tokens appear at once, and tokens are drawn at another temperature
    than confidence is measured at.
    """
    for case, temperature in itertools.product(EXACT, (0.7, 1.0)):
        check_score(alg, case, temperature)


@judges("4.5", "10.1")
@rejects("4.5", ("math.log(threshold)", "threshold"), where="log_threshold")
def law_threshold_score_is_the_policy_gradient(alg: Any) -> None:
    """The same with a threshold, where steps differ in the number of tokens that they reveal."""
    for case, temperature in itertools.product(EXACT_THRESHOLDS, (0.7, 1.0)):
        check_score(alg, case, temperature)


@judges("4.2")
@rejects("4.2", ("(log_p.exp() * below)", "(log_p.exp().detach() * below)"), where="log_passed_over")
@rejects("4.2", ("return scored * (total /", "return 0 * scored * (total /"))
def law_mean_score_is_zero_with_the_order_only(alg: Any) -> None:
    """E[grad(logp + order_logp)] is 0 in every state, and E[grad logp] is not: a constant in the reward would leak in."""
    leak = 0.0
    for case, temperature in KERNELS[:3]:
        model, settings = tabular(case.length, case.vocab, 17), settings_of(case, temperature)
        for state, block in open_states(case.vocab, settings):
            logp, order, _ = outcomes(alg, model, state, block, settings)
            chance = (logp + order).exp().detach()
            mean = oracle.table_gradient(model, (chance * (logp + order)).sum())
            close(mean, torch.zeros_like(mean), "mean score")
            leak = max(leak, float(oracle.table_gradient(model, (chance * logp).sum()).norm()))
    assert leak > 0.1, f"mean of the token-only score: {leak}"


@judges("4.2")
@rejects("4.2", ("clamp(min=torch.finfo(probability.dtype).tiny).", ""), where="log_passed_over")
def law_impossible_orders(alg: Any) -> None:
    """A choice that is never made has the log of the smallest number, gradient 0 and probability 0; nothing is nan."""
    table = torch.zeros(16, 2, 3, dtype=torch.float64)
    table[15] = double([[6.0, 5.9, 5.8], [6.0, -9.0, -9.0]])  # every token of position 1 but the first is below position 0
    for dtype in (torch.float64, torch.float32):
        model, settings = oracle.TabularDenoiser(table.to(dtype)), settings_of(kernel(2, 3, 2))
        rollout = rollout_of(alg, [[0, 1]], sampler=settings)
        scored = torch.tensor([[[False, True]]])
        plan = alg.Plan(torch.tensor([[[False] * 3 + [True, True]]]), scored, torch.ones(1, 1), scored.any(-1))
        found = alg.state_features(model, rollout, plan, torch.arange(1), temperature=0.7, names=("logp", "order_logp"))
        close(found["order_logp"], [[0.0, math.log(torch.finfo(dtype).tiny)]], "log F", 1e-6)
        assert torch.equal(oracle.table_gradient(model, found["order_logp"].sum()), torch.zeros_like(model.table)), "gradient"
        both = oracle.table_gradient(model, (found["logp"] + found["order_logp"]).exp().sum())
        assert bool(both.isfinite().all()) and float(both.abs().max()) < 1e-30


@judges("4.5")
@rejects("4.5", ("* scored / count.clamp(min=1)", "* scored"))
def law_threshold_impossible_sets(alg: Any) -> None:
    """Tokens of which one is below tau share the log of the smallest number, with gradient 0; alone it may be."""
    tau, tokens = math.log(0.6), torch.tensor([[True, True, False], [True, True, False], [False, True, False]])
    for dtype in (torch.float64, torch.float32):
        order = (-normal(3, 3, seed=5).abs().to(dtype) * tokens).requires_grad_()
        confidence = torch.tensor([[tau + 0.1, tau - 0.1, 0.0], [tau + 0.1, tau + 0.2, 0.0], [0.0, tau - 0.3, 0.0]])
        got = alg.threshold_logp(order, confidence, tokens, threshold=0.6)
        least = math.log(torch.finfo(dtype).tiny) / 2
        close(got, [[least, least, 0.0], *order[1:].tolist()], "log F", 1e-6)
        assert got.dtype == dtype
        slope = torch.autograd.grad(got.sum(), order)[0]
        close(slope, [[0.0] * 3, [1.0] * 3, [1.0] * 3], "gradient")


@judges("4.2", "4.1")
@rejects("4.2", ('!= "low_confidence', '== "random'), where="_passed_over")
@rejects("4.2", ("1).clamp(min=1)", "1)"))
def law_other_orders_have_no_position_factor(alg: Any) -> None:
    """In random and fixed orders order_logp is 0 and reads nothing, whatever the weights, also where nothing is scored."""
    for order in ("random", "left_to_right", "right_to_left"):
        model, settings = tabular(3, 2, 17), settings_of(Walk(3, 2, order, 1, 3))
        rollout, plan, following = one_step(alg, (2, 2, 1), range(3), 2, settings)
        names = ("logp", "order_logp")
        found = alg.state_features(model, rollout, plan, torch.arange(len(following)), temperature=0.7, names=names)
        close(found["order_logp"], torch.zeros(len(following), 3), order)
    empty = alg.Plan(plan.hidden, torch.zeros_like(plan.scored), plan.weight, plan.valid)
    rollout = dataclasses.replace(rollout, sampler=settings_of(kernel(3, 2, 3)))
    nothing = alg.state_features(model, rollout, empty, torch.arange(len(following)), temperature=0.7, names=names)
    close(nothing["order_logp"], torch.zeros(len(following), 3), "nothing scored")
    gradient = oracle.table_gradient(model, nothing["order_logp"].sum())
    close(gradient, torch.zeros_like(model.table), "nothing scored: gradient")
    log_f, none = torch.ones(6, dtype=torch.float64, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    passed = alg.order_logp(log_f, none, ~none)
    close(passed, torch.zeros(2, 3), "candidates, and nothing scored")
    close(torch.autograd.grad(passed.sum(), log_f)[0], torch.zeros(6), "candidates, and nothing scored: gradient")


@judges("10.1", "4.2", "4.5", "3.2")
@rejects("4.2", ('["order_logp"]', '["order_logp"].detach()'), where="reduced")
def law_egspo_exact_row(alg: Any) -> None:
    """egspo-exact clips a chosen step's ratio of transition probabilities, with and without a threshold."""
    for case, scale in ((EXACT[0], 0.6), (EXACT_THRESHOLDS[0], 0.3)):
        old, paths, chance, _ = walk(case)
        likely = [paths[i] for i in chance.argsort(descending=True)[:8]]
        new = oracle.TabularDenoiser(old.table.detach() + normal(*old.table.shape, seed=69, scale=scale))
        entropy = double([walk_entropy(old, path, 0.7) for path in likely])
        records = {"entropy": entropy}
        rollout = recorded(alg, likely, None, num_generations=4, records=records, sampler=settings_of(case))
        method = methods.with_options(alg.METHODS["egspo-exact"], {"plan.num_states": 2})
        plan = method.plan(rollout, seeded())
        anchor = alg.reduced(method, plan, rollout, features_of(alg, method, old, rollout, plan))
        reward = [reward_of(path.response, None) for path in likely]
        adv = alg.advantages(method, plan, rollout, double(reward))
        feature = features_of(alg, method, new, rollout, plan, graph=True)
        got = oracle.table_gradient(new, alg.method_loss(method, plan, rollout, feature, adv, anchor, None))
        total, ratios = torch.zeros((), dtype=torch.float64), []
        for b, path in enumerate(likely):
            centred = reward[b] - sum(reward[4 * (b // 4) : 4 * (b // 4) + 4]) / 4
            of_step = [0.0] * (max(path.unmask_step) + 1)
            for i, t in enumerate(path.unmask_step):
                of_step[t] += float(entropy[b, i])
            for t in sorted(range(len(of_step)), key=lambda t, e=of_step: -e[t])[:2]:
                state, following = state_of(old, path, t), state_of(old, path, t + 1)
                how = (range(3), "low_confidence", 0.7, 1, case.threshold)
                step = [oracle.transition(model, state, *how).get(following) for model in (new, old)]
                ratios.append(0.0 if step[0] is None else (step[0] / step[1].detach()).item())
                if step[0] is not None:
                    total = total + surrogate(step[0] / step[1].detach(), centred, 0.2, 0.5)
        close(got, oracle.table_gradient(new, total / 8), f"gradient, {case}")
        assert max(ratios) > 1.2 and min(ratios) < 0.9, f"ratios {ratios}"


def share(own: Tensor, best: list[Tensor]) -> Tensor:
    """The log of the share of the first in a softmax with the others."""
    return own - torch.stack([own, *best]).exp().sum().log()


@judges("4.4")
@rejects(
    "4.4",
    ("own - torch.logaddexp(own, rivals)", "torch.logaddexp(own, rivals) - own"),
    ("rivals)) * scored", "rivals))"),
    ("(passed, best)", "(passed, best.detach())"),
    ("torch.finfo(own.dtype).min", "0.0"),
)
def law_position_logp(alg: Any) -> None:
    """On made-up logits it is as by loops: each scored token competes with those passed over; without any it is 0."""
    own, best = normal(4, 5, seed=70).requires_grad_(), normal(5, seed=71, scale=2.0).requires_grad_()
    scored = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0] * 5]).bool()
    passed = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 0], [0] * 5, [0, 0, 0, 0, 1]]).bool()
    rivals, c = [[best[0], best[1]], [best[2], best[3]], [], [best[4]]], normal(4, 5, seed=72)
    zero = own.sum() * 0
    truth = [share(own[s, i], rivals[s]) if scored[s, i] else zero for s, i in itertools.product(range(4), range(5))]
    truth, got = torch.stack(truth).unflatten(0, (4, 5)), alg.position_logp(own, best, scored, passed)
    close(got, truth, "value")
    for name, x in (("own", own), ("best", best)):
        slopes = (torch.autograd.grad((c * value).sum(), x, retain_graph=True)[0] for value in (got, truth))
        close(*slopes, f"gradient in {name}")


def position_logps(model: Any, rollout: Any, plan: Any, k: int, b: int, block_length: int) -> dict[int, Tensor]:
    """The position part of one state's scored positions, from the table; rivals are hidden, in the same block, not scored."""
    hidden, scored = positions(plan.hidden[k, b, 3:]), positions(plan.scored[k, b])
    response = rollout.response[b].tolist()
    logits = model.logits_at(tuple(model.mask_token_id if i in hidden else token for i, token in enumerate(response)))
    block = {i // block_length for i in scored}
    best = [logits[j].max() for j in sorted(hidden - scored) if j // block_length in block]
    return {i: share(logits[i, response[i]], best) for i in sorted(scored)}


@judges("4.4", "4.1")
@rejects("4.4", ("head(h).max(-1).values", "head(h).mean(-1)"), where="_position_logp")
@rejects("4.4", ("keepdim=True) & ~scored", "keepdim=True)"), where="_passed_over")
@rejects(
    "4.4",
    ("logits.gather(", "logits.detach().gather("),
    ("= logits.gather", "= (logits / temperature).gather"),
    where="token_features",
)
def law_position_feature(alg: Any) -> None:
    """By confidence it is as by loops, at temperature 1, and 0 in another order; two passes are one graph."""
    for case in (Walk(4, 2, "low_confidence", 1, 4), Walk(4, 2, "low_confidence", 1, 2), Walk(3, 2, "random", 1, 3)):
        order, block, (model, paths, _, _) = case.order, case.block, walk(case)
        model = oracle.TabularDenoiser(model.table.detach())
        rollout = recorded(alg, paths[::5], None, sampler=settings_of(case))
        plan = alg.replay_plan(rollout, seeded(), num_states=None, min_entropy=0.0)
        how = {"temperature": 0.7, "names": ("logp", "position_logp")}
        c, truth = normal(*plan.scored.shape, seed=73), torch.zeros(plan.scored.shape, dtype=torch.float64)
        for k, b in plan.valid.nonzero().tolist() if order == "low_confidence" else ():
            for i, value in position_logps(model, rollout, plan, k, b, block).items():
                truth = truth.index_put((torch.tensor(k), torch.tensor(b), torch.tensor(i)), value)
        graph = graph_features(alg, model, rollout, plan, how["names"], 0.7)
        close(graph["position_logp"], truth, f"{order}, blocks of {block}")

        def loss(feature: dict, c=c) -> Tensor:
            return ((c * feature["position_logp"]).sum((0, 2)).exp() * feature["logp"].sum((0, 2))).sum()

        expected = oracle.table_gradient(model, loss(graph | {"position_logp": truth}))
        for size in (1, 256):
            alg.two_pass_backward(model, rollout, plan, loss, size=size, **how)
            close(model.table.grad, expected, f"{order}, blocks of {block}: gradient")
            model.zero_grad()
