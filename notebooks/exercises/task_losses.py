"""The tasks on advantages, weights, steps and losses: notebooks 03, 06, 08, 09."""

import itertools
import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from judge import Missed, demand, fmt, same, task


def double(values: object) -> Tensor:
    """Numbers as float64."""
    return torch.as_tensor(values, dtype=torch.float64)


def slope(loss_of: Callable, ll: Tensor) -> Tensor:
    """The derivative of the summed loss with respect to ll."""
    ll = ll.detach().clone().requires_grad_()
    loss = loss_of(ll)
    if not loss.requires_grad:
        raise Missed("the loss carries no gradient: something was detached on the way")
    (found,) = torch.autograd.grad(loss.sum(), ll, allow_unused=True)
    if found is None:
        raise Missed("the loss does not depend on what the gradient flows through")
    return found


# --------------------------------------------------------- 03 the group mean, the clip


def _group_mean(alg: ModuleType, answer: Callable) -> Callable:
    def group_mean(reward, num_generations):
        alg._groups(reward, num_generations)  # its refusals
        return answer(reward, num_generations)

    return group_mean


group_mean = task(
    "group_mean",
    "6.1",
    "group_mean",
    ("reward float B", "num_generations number"),
    ("adv float B",),
    _group_mean,
)


def _is_divided(got: Tensor, right: Tensor) -> bool:
    """All of `got` is one multiple of what is right, to the size of an epsilon."""
    factor = (got * right).sum() / right.square().sum()
    return factor > 0 and same(got, factor * right, atol=1e-2)


@group_mean.has("each prompt has its own mean")
def _(answer: Callable) -> str:
    reward = double([1, 0, 0, 3, 5, 5, 8, 2])
    group = reward.view(2, 4)
    other = reward.view(4, 2)
    got, advice = answer(reward, 4), "Rows g N to g N + N - 1 answer prompt g; "
    advice += "their means are 1 and 5."
    spread = group.std(1, keepdim=True)
    if _is_divided(got.view(2, 4) * spread, group - group.mean(1, True)):
        advice = "The means are right, but it was divided by the standard deviation."
    demand(
        "rewards 1 0 0 3 and 5 5 8 2, four answers a prompt",
        got,
        [0, -1, -1, 2, 0, 0, 3, -3],
        advice,
        the_mean_is_that_of_the_whole_batch=reward - 3,
        the_groups_are_every_second_row=(other - other.mean(0)).flatten(),
        the_groups_have_B_over_N_members=(other - other.mean(1, True)).flatten(),
        the_mean_is_that_of_the_others_in_the_group=[
            0,
            -4 / 3,
            -4 / 3,
            8 / 3,
            0,
            0,
            4,
            -4,
        ],
    )
    return "1 0 0 3 | 5 5 8 2 gives 0 -1 -1 2 | 0 0 3 -3"


@group_mean.has("no standard deviation")
def _(answer: Callable) -> str:
    reward = double([0, 1, 0, 10])
    demand(
        "rewards 0 1 and 0 10, two answers a prompt",
        answer(reward, 2),
        [-0.5, 0.5, -5, 5],
        "A spread ten times as large counts ten times as much.",
        it_was_divided_by_the_standard_deviation=[-(0.5**0.5), 0.5**0.5] * 2,
        it_was_divided_by_the_deviation_without_correction=[-1, 1, -1, 1],
    )
    return "0 1 | 0 10 gives -0.5 0.5 | -5 5"


@group_mean.has("half of the policy gradient with N = 2")
def _(answer: Callable) -> str:
    logits = double([0.0, math.log(3)]).requires_grad_()
    logp, reward = logits.log_softmax(-1), double([1.0, 0.0])
    groups = torch.tensor(list(itertools.product((0, 1), repeat=2)))
    adv = answer(reward[groups].flatten(), 2).view(4, 2)
    chance = logp.detach()[groups].sum(1).exp()
    mean = (chance * (adv * logp[groups]).mean(1)).sum()
    (got,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (truth,) = torch.autograd.grad((logp.exp() * reward).sum(), logits)
    because = "The mean contains the answer itself: (N - 1)/N of the gradient."
    demand(
        "actions of probability 1/4 and 3/4, reward 1 and 0, over all groups of 2",
        got,
        truth / 2,
        because,
    )
    return f"1/4 and 3/4, reward 1 and 0: {fmt(got)}, grad J {fmt(truth)}"


def _clip(alg: ModuleType, answer: Callable) -> Callable:
    def ppo_clip(ll, anchor, adv, num_generations, *, epsilon_low, epsilon_high):
        ratio = alg.log_ratio(ll, anchor).detach().exp()
        above, below = ratio > 1 + epsilon_high, ratio < 1 - epsilon_low
        cut = ((adv > 0) & above) | ((adv < 0) & below)
        given = torch.broadcast_tensors(ll, anchor, adv)
        loss = answer(*given, epsilon_low, epsilon_high)
        return alg._surrogate(loss, cut, (adv < 0) & above)

    return ppo_clip


clip = task(
    "clip",
    "8.2",
    "ppo_clip",
    (
        "ll float ...",
        "anchor float ...",
        "adv float ...",
        "epsilon_low number",
        "epsilon_high number",
    ),
    ("loss float ...",),
    _clip,
)


_GAIN = "the_gain_was_not_turned_into_a_loss"
_UPSIDE_DOWN = "the_ratio_is_upside_down:_it_is_exp_of_ll_less_anchor,_new_over_old"


def _upside_down(answer: Callable) -> bool:
    """At ratio 2, inside its clip, the loss is as large as it should be at 1/2."""
    ll, anchor, adv = double([0.0]), double([-math.log(2)]), double([1.0])
    return same(answer(ll, anchor, adv, 0.8, 2.0).abs(), [0.5])


def _clip_slopes(answer: Callable, ratio: list, adv: list) -> Tensor:
    anchor, ll = double([-1.0] * len(ratio)), double(ratio).log() - 1
    return slope(lambda x: answer(x, anchor, double(adv), 0.2, 0.5), ll)


@clip.has("the value")
def _(answer: Callable) -> str:
    anchor = double([-1.0] * 4)
    ll = anchor + double([2.0, 2.0, 0.5, 0.5]).log()
    demand(
        "ratio 2, 2, 0.5, 0.5, adv = 1 -1 1 -1, clip 0.8 to 1.5, loss",
        answer(ll, anchor, double([1.0, -1.0, 1.0, -1.0]), 0.2, 0.5),
        [-1.5, 2.0, -0.5, 0.8],
        "-min(2, 1.5), -min(-2, -1.5), -min(0.5, 0.8) and -min(-0.5, -0.8).",
        the_sign_is_that_of_a_gain__not_of_a_loss=[1.5, -2.0, 0.5, -0.8],
        **{_UPSIDE_DOWN: [-0.5, 0.8, -1.5, 2.0]},
        the_larger_of_the_two_was_taken=[-2.0, 1.5, -0.8, 0.5],
        the_ratio_was_clipped_whatever_the_sign=[-1.5, 1.5, -0.8, 0.8],
        the_minimum_was_taken_before_adv=[
            *(-1.5, 1.5),
            *(-0.5, 0.5),
        ],
        the_two_epsilons_changed_places=[-1.2, 2.0, -0.5, 0.5],
        nothing_was_clipped=[-2.0, 2.0, -0.5, 0.5],
    )
    return "ratio 2, adv 1, -1: -1.5, 2; ratio 0.5: -0.5, 0.8"


@clip.has("on policy it is REINFORCE")
def _(answer: Callable) -> str:
    demand(
        "ratio 1, adv = 2 and -3, slope in ll",
        _clip_slopes(answer, [1.0, 1.0], [2.0, -3.0]),
        [-2.0, 3.0],
        "-adv ratio, at ratio 1.",
        **{_UPSIDE_DOWN if _upside_down(answer) else _GAIN: [2.0, -3.0]},
    )
    return "ratio 1, adv 2, -3: slopes -2, 3"


@clip.has("beyond the clip the slope is 0, on one side")
def _(answer: Callable) -> str:
    demand(
        "ratio 1.6 with adv 2, ratio 0.4 with adv -2, slope",
        _clip_slopes(answer, [1.6, 0.4], [2.0, -2.0]),
        [0.0, 0.0],
        "Good answers are not pushed beyond 1 + epsilon_high, bad ones not below "
        "1 - epsilon_low.",
        nothing_was_clipped=[-3.2, 0.8],
        the_minimum_was_taken_before_adv=[0.0, 0.8],
        the_clipped_ratio_is_data_and_ll_the_score=[-3.0, 1.6],
    )
    demand(
        "ratio 1.6 with adv -2, ratio 0.7 with adv 2, slope",
        _clip_slopes(answer, [1.6, 0.7], [-2.0, 2.0]),
        [3.2, -1.4],
        "On the other side the ratio passes: the min keeps what is worse.",
        the_clip_acts_whatever_the_sign_of_adv=[0.0, 0.0],
    )
    return "0 at 1.6 (good), 0.4 (bad); 3.2 at 1.6 (bad), -1.4 at 0.7 (good)"


@clip.has("each side has its epsilon")
def _(answer: Callable) -> str:
    demand(
        "clip 0.8 to 1.5, ratio 1.4 with adv 1, ratio 0.7 with adv -1, slope",
        _clip_slopes(answer, [1.4, 0.7], [1.0, -1.0]),
        [-1.4, 0.0],
        "1 - epsilon_low = 0.8 below, 1 + epsilon_high = 1.5 above.",
        the_two_epsilons_changed_places=[0.0, 0.7],
        epsilon_high_is_not_used=[0.0, 0.0],
        epsilon_low_does_not_act=[-1.4, 0.7],
    )
    return "ratio 1.4 passes, 0.7 does not"


# --------------------------------------------------- 06 weights that sum to 1, the loss


def _weights(alg: ModuleType, answer: Callable) -> Callable:
    def self_normalized_weights(log_ratios, num_generations, *, log_cap):
        flat = log_ratios.movedim(1, -1)  # every state and position on its own
        rows = [
            answer(row, num_generations, log_cap)
            for row in flat.reshape(-1, flat.shape[-1])
        ]
        return torch.stack(rows).view(flat.shape).movedim(-1, 1)

    return self_normalized_weights


snis = task(
    "snis",
    "8.3",
    "self_normalized_weights",
    ("log_ratio float B", "num_generations number", "log_cap number"),
    ("weight float B",),
    _weights,
)


@snis.has("capped, then divided by the group's sum")
def _(answer: Callable) -> str:
    log_ratio = double([1.0, 2.0, 10.0, 0.25]).log()
    raw = log_ratio.exp()
    demand(
        "ratios 1 2 10 0.25, cap 5, weights times 8.25",
        8.25 * answer(log_ratio, 4, math.log(5)),
        [1, 2, 5, 0.25],
        "min(ratio, 5) is 1 2 5 0.25, and their sum 8.25.",
        the_cap_does_not_act=8.25 * raw / raw.sum(),
        the_cap_came_after_the_division=8.25 * (raw / raw.sum()).clamp(max=5),
        it_was_not_divided_by_the_sum=8.25 * raw.clamp(max=5),
        it_was_divided_by_N_=8.25 * raw.clamp(max=5) / 4,
        log_cap_was_taken_for_the_cap=8.25
        * raw.clamp(max=math.log(5))
        / raw.clamp(max=math.log(5)).sum(),
    )
    return "ratios 1 2 10 0.25, cap 5: 1 2 5 0.25 over 8.25"


@snis.has("the sum is that of the prompt's group")
def _(answer: Callable) -> str:
    ratio = double([1.0, 3.0, 1.0, 1.0])
    demand(
        "ratios 1 3 and 1 1, two answers a prompt, cap 5",
        answer(ratio.log(), 2, math.log(5)),
        [0.25, 0.75, 0.5, 0.5],
        "Another prompt's ratios must not change these weights.",
        the_sum_is_that_of_all_rows=ratio / 6,
        the_groups_are_every_second_row=[0.5, 0.75, 0.5, 0.25],
    )
    return "1 3 | 1 1: 0.25 0.75 | 0.5 0.5"


def _overflow(weight: Tensor) -> str:
    if weight.isfinite().all() and weight.sum() > 0:
        return "min(ratio, 5) over the sum of the group, at any size of the ratios."
    return (
        "Stay in logarithms: log-ratios of responses reach hundreds of nats, and "
        "exp of them is 0 or infinite."
    )


@snis.has("no overflow")
def _(answer: Callable) -> str:
    given = [[1e4, -1e4, 0.0, 3.0], [-1e4] * 4, [1e4] * 4]
    for values, due in zip(given, [[5, 0, 1, 5], [1] * 4, [1] * 4], strict=True):
        demand(
            f"log-ratios {fmt(values)}, cap 5",
            answer(double(values), 4, math.log(5)),
            double(due) / sum(due),
            _overflow(answer(double(values), 4, math.log(5))),
            the_cap_does_not_act=double(values).softmax(0),
        )
    return "log-ratios of 10,000 nats on either side"


def _stable_loss(alg: ModuleType, answer: Callable) -> Callable:
    def self_normalized_clip(ll, anchor, adv, num_generations, *, cap, score=None):
        alg._check_above("cap", cap, 0)
        cut = alg.log_ratio(ll.detach(), anchor) > math.log(cap)
        given = torch.broadcast_tensors(ll, anchor, adv, ll if score is None else score)
        if ll.shape[0] != 1 or ll.shape[-1] != 1:
            raise ValueError(f"sequence level only, got {tuple(ll.shape)}")
        rows = (x.reshape(-1) for x in given)
        loss = answer(*rows, num_generations, math.log(cap))
        return alg._surrogate(loss.view_as(ll), cut)

    return self_normalized_clip


stable_loss = task(
    "stable_loss",
    "8.4",
    "self_normalized_clip",
    (
        "ll float B",
        "anchor float B",
        "adv float B",
        "score float B",
        "num_generations number",
        "log_cap number",
    ),
    ("loss float B",),
    _stable_loss,
)
_RATIO, _ADV = double([1.0, 2.0, 10.0, 0.25]), double([1.0, -1.0, 0.5, -0.5])


@stable_loss.has("slope -w adv, the capped answer included")
def _(answer: Callable) -> str:
    anchor = double([-3.0, -4.0, -5.0, -6.0])
    ll, log_cap = anchor + _RATIO.log(), math.log(5)
    capped, free = _RATIO.clamp(max=5), ll.clone().requires_grad_()
    shares = (free - anchor).clamp(max=log_cap).softmax(0)
    (flowing,) = torch.autograd.grad(
        (-shares * _ADV * free).sum(), free, retain_graph=True
    )
    (no_score,) = torch.autograd.grad((-shares * _ADV).sum(), free)
    right = -capped / 8.25 * _ADV
    got = slope(lambda x: answer(x, anchor, _ADV, x, 4, log_cap), ll)
    advice = "The slope is -w adv, with w = 1 2 5 0.25 over 8.25."
    if same(got, flowing) or same(got, no_score):
        advice = "Weights are data: detach them. Nothing flows through cap or sum."
    demand(
        "ratios 1 2 10 0.25, adv 1 -1 0.5 -0.5, cap 5, slope in ll times 8.25",
        8.25 * got,
        8.25 * right,
        advice,
        the_gradient_flows_through_the_weights=8.25 * flowing,
        the_score_is_missing_and_the_weights_carry_the_gradient=8.25 * no_score,
        it_was_divided_by_N_as_well=8.25 * right / 4,
        the_sign_is_that_of_a_gain__not_of_a_loss=-8.25 * right,
        the_capped_answer_gets_nothing=8.25 * right * (_RATIO <= 5),
        the_weights_were_not_normalised=-8.25 * capped * _ADV,
    )
    return "-8.25 w adv = -1 2 -2.5 0.125"


@stable_loss.has("the gradient flows through the score")
def _(answer: Callable) -> str:
    anchor = double([-3.0, -4.0, -5.0, -6.0])
    ll, score = anchor + _RATIO.log(), double([-1.0, -2.0, -3.0, -4.0])
    loss = answer(ll, anchor, _ADV, score.requires_grad_(), 4, math.log(5))
    if not loss.requires_grad:
        raise Missed(
            "no gradient flows through `score`: it is not used, or it was detached. "
            "The weights come from ll - anchor, the gradient from the score (5.3)."
        )
    demand(
        "the same with another score, slope in the score times 8.25",
        8.25 * slope(lambda x: answer(ll, anchor, _ADV, x, 4, math.log(5)), score),
        [-1.0, 2.0, -2.5, 0.125],
        "The weights come from ll - anchor, the gradient from the score (5.3).",
    )
    return "weights from ll, gradient from the score"


@stable_loss.has("bounded, whatever a ratio does")
def _(answer: Callable) -> str:
    zero, adv = double([0.0] * 4), double([1.0, -1.5, 0.5, -1.0])
    ll = double([0.1, 27.0, -0.3, -0.2])
    got = slope(lambda x: answer(x, zero, adv, x, 4, 1e9), ll).abs().sum()
    if not got <= 1.5 + 1e-6:
        raise Missed(
            f"log-ratios 0.1 27 -0.3 -0.2, no cap, sum of |slopes|: yours {fmt(got)}, "
            "expected at most max |adv| = 1.5. Weights that sum to 1 cannot exceed it."
        )
    return f"a log-ratio of 27, no cap: sum of |slopes| {fmt(got)} <= 1.5"


# ---------------------------------------------------- 08 steps to learn from, the order


def _top_steps(alg: ModuleType, answer: Callable) -> Callable:
    original = alg.entropy_plan

    def entropy_plan(rollout, generator, *, num_states, shared, weight):
        options = {"num_states": num_states, "shared": shared, "weight": weight}
        plan = original(rollout, generator, **options)
        if shared:
            return plan
        entropy = alg._step_entropy(rollout, alg.num_steps(rollout))
        given = (entropy, alg._last_deciding_step(rollout), num_states)
        steps, valid = answer(*given)
        one = torch.ones_like(given[1], dtype=rollout.logp.dtype)
        mine = alg._replay_states(rollout, steps, valid, one)
        if weight == "sum":
            return mine
        tokens = mine.scored.sum(-1).clamp(min=1) if weight == "token_mean" else 1
        return alg.replace(mine, weight=mine.weight / (num_states * tokens))

    return entropy_plan


top_steps = task(
    "top_steps",
    "3.2",
    "entropy_plan",
    ("entropy float T B", "last int B", "num_states number K"),
    ("steps int K B", "valid bool K B"),
    _top_steps,
)


@top_steps.has("the most uncertain steps first")
def _(answer: Callable) -> str:
    entropy = double([[0.7], [0.1], [0.9], [0.8]])
    demand(
        "entropies 0.7 0.1 0.9 0.8, all decide, K = 3, steps",
        answer(entropy, torch.tensor([3]), 3)[0][:, 0],
        [2, 3, 0],
        "0.9 of step 2, then 0.8 of step 3, then 0.7 of step 0.",
        the_least_uncertain_came_first=[1, 0, 3],
        the_first_steps_were_taken=[0, 1, 2],
        the_entropies_were_sorted__but_the_largest_are_last=[0, 3, 2],
        they_were_put_back_into_order_of_time=[0, 2, 3],
    )
    return "0.7 0.1 0.9 0.8, K = 3: 2 3 0"


@top_steps.has("steps after the decision come last, and are not valid")
def _(answer: Callable) -> str:
    entropy = double([[0.1], [0.2], [0.3], [0.9], [0.8]])
    steps, valid = answer(entropy, torch.tensor([2]), 4)
    demand(
        "entropies 0.1 0.2 0.3 0.9 0.8, last deciding step 2, K = 4, first three",
        steps[:3, 0],
        [2, 1, 0],
        "Steps 3 and 4 come after the reward is decided: they teach nothing.",
        steps_after_the_decision_compete=[3, 4, 2],
        the_last_deciding_step_comes_last=[1, 0, 2],
        the_largest_entropy_that_decides_did_not_come_first=[0, 1, 2],
    )
    demand(
        "the same, valid",
        valid[:, 0].long(),
        [1, 1, 1, 0],
        "Only three steps decide: the fourth place is padding.",
        the_padding_counts_as_a_state=[1, 1, 1, 1],
    )
    return "0.1 0.2 0.3 | 0.9 0.8, K = 4: 2 1 0, and padding"


@top_steps.has("each response has its own steps, ties go to the earlier")
def _(answer: Callable) -> str:
    entropy = double([[0.5, 0.1], [0.2, 0.4], [0.5, 0.3]])
    demand(
        "entropies 0.5 0.2 0.5 and 0.1 0.4 0.3, K = 2, steps of the two rows",
        answer(entropy, torch.tensor([2, 2]), 2)[0].T,
        [[0, 2], [1, 2]],
        "Sort along the steps (dim 0), stable.",
        the_steps_are_shared_by_the_rows=[[0, 2], [0, 2]],
        ties_went_to_the_later_step=[[2, 0], [1, 2]],
    )
    return "0.5 0.2 0.5 | 0.1 0.4 0.3: 0 2 | 1 2"


def _passed_over(alg: ModuleType, answer: Callable) -> Callable:
    def log_passed_over(logits, limit, later, *, temperature):
        return answer(logits, limit[:, 0], later[:, 0], temperature)

    return log_passed_over


passed_over = task(
    "passed_over",
    "4.2",
    "log_passed_over",
    ("logits float R V", "limit float R", "later bool R", "temperature number"),
    ("log_f float R",),
    _passed_over,
)


def _f(
    answer: Callable, p: list, limit: float, later: bool, heat: float = 1.0
) -> Tensor:
    """F of one candidate whose tokens have the probabilities p, times 100."""
    logits = double([p]).log()
    given = (double([limit]).log().float(), torch.tensor([later]), heat)
    return 100 * answer(logits, *given).exp()


@passed_over.has("tokens below the limit, in sum")
def _(answer: Callable) -> str:
    demand(
        "p = 0.5 0.3 0.2, limit log 0.4, 100 F",
        _f(answer, [0.5, 0.3, 0.2], 0.4, False),
        [50.0],
        "The candidate loses if it proposes 0.3 or 0.2: F = 0.5.",
        the_largest_probability_alone_was_taken=[30.0],
        F_is_returned__not_its_logarithm=[100 * math.exp(0.5)],
    )
    demand(
        "p = 0.6 0.3 0.1, limit log 0.4, 100 F",
        _f(answer, [0.6, 0.3, 0.1], 0.4, False),
        [40.0],
        "0.3 + 0.1 stay below.",
        the_tokens_above_the_limit_were_added=[60.0],
        the_largest_one_below_the_limit_was_taken_alone=[30.0],
    )
    return "p = 0.6 0.3 0.1, limit 0.4: F = 0.4"


@passed_over.has("ties")
def _(answer: Callable) -> str:
    got = [_f(answer, [0.5, 0.3, 0.2], 0.3, later) for later in (False, True)]
    demand(
        "p = 0.5 0.3 0.2, limit log 0.3, later False and True, 100 F",
        torch.cat(got),
        [20.0, 50.0],
        "At equal confidence the lower position wins: a later candidate loses the tie. "
        "Compare in float32, as the sampler does (alg.token_confidence).",
        ties_always_lose=[50.0, 50.0],
        ties_never_lose=[20.0, 20.0],
        later_was_taken_the_other_way_round=[50.0, 20.0],
    )
    return "limit 0.3: F = 0.2, and 0.5 for a later position"


@passed_over.has("drawn at the temperature, compared at temperature 1")
def _(answer: Callable) -> str:
    hot = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]
    demand(
        "p = 0.5 0.3 0.2, temperature 0.5, limit log 0.4, 100 F",
        _f(answer, [0.5, 0.3, 0.2], 0.4, False, 0.5),
        [100 * (hot[1] + hot[2])],
        "Tokens are proposed with p^2 = 0.25 0.09 0.04 over 0.38; confidences are "
        "those of p.",
        the_temperature_does_not_act=[50.0],
    )
    demand(
        "p = 0.5 0.3 0.2, temperature 0.5, limit log 0.6, 100 F",
        _f(answer, [0.5, 0.3, 0.2], 0.6, False, 0.5),
        [100.0],
        "All confidences, at temperature 1, are below 0.6.",
        confidences_were_taken_at_the_sampling_temperature=[100 * (hot[1] + hot[2])],
    )
    return "temperature 0.5, limit 0.4: F = 0.3421; limit 0.6: 1"


@passed_over.has("finite where F is 0")
def _(answer: Callable) -> str:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64)
    logits.requires_grad_()
    given = (torch.tensor([-9.0]), torch.tensor([False]), 1.0)
    got = answer(logits, *given)
    if not bool(got.isfinite().all()):
        raise Missed(
            f"no token below the limit, one with logit -inf: log F is {fmt(got)}, "
            "expected a finite number. Clamp F to the smallest positive number before "
            "the log."
        )
    if not bool((got < -80).all()):
        raise Missed(
            f"no token below the limit: log F is {fmt(got)}, expected the log of the "
            f"smallest positive number, {fmt(math.log(torch.finfo(got.dtype).tiny))}. "
            "F sums the tokens below the limit, and there are none."
        )
    (grad,) = torch.autograd.grad(got.sum(), logits)
    if not bool((grad == 0).all()):
        raise Missed(
            f"no token below the limit, one with logit -inf: gradient {fmt(grad)}, "
            "expected 0. A clamp has gradient 0 below its limit, and exp(-inf) is 0."
        )
    return f"log F = {fmt(got)}, gradient 0"


@passed_over.has("the steps of the sampler sum to 1")
def _(answer: Callable) -> str:
    p, total = double([[0.6, 0.4], [0.7, 0.3]]), 0.0
    for i, v in itertools.product((0, 1), repeat=2):
        j = 1 - i
        given = (p[i, v].log().float()[None], torch.tensor([j > i]), 1.0)
        total += p[i, v] * answer(p[j].log()[None], *given)[0].exp()
    demand(
        "two hidden positions, p = 0.6 0.4 and 0.7 0.3, sum over what one step can do",
        total,
        1.0,
        "A step reveals token v at position i if the other proposes something less "
        "confident: p_i(v) F_j. The token factors alone sum to 2.",
    )
    return "p = 0.6 0.4 and 0.7 0.3: sum 1 (tokens alone: 2)"


# ---------------------------------------------------------- 09 trust mask, DRPO penalty


def _trust_mask(alg: ModuleType, answer: Callable) -> Callable:
    return lambda u, adv, outside: answer(*torch.broadcast_tensors(u, adv, outside))


trust_mask = task(
    "trust_mask",
    "8.9",
    "trust_mask",
    ("log_ratio float ...", "adv float ...", "outside bool ..."),
    ("learns bool ...",),
    _trust_mask,
)


_OR = "what_is_outside_or_moves_away_is_barred:_it_must_be_both"


def _four(answer: Callable) -> tuple[Tensor, Tensor, bool]:
    """Which of four tokens learn, all outside and none; do both show `or` for `and`?"""
    u, adv = double([0.5, -0.5, 0.5, -0.5]), double([1.0, 1.0, -2.0, -2.0])
    outside = torch.ones(4, dtype=torch.bool)
    out, inside = (answer(u, adv, where).long() for where in (outside, ~outside))
    return out, inside, not out.any() and same(inside, [0, 1, 1, 0])


@trust_mask.has("outside, the way out is barred and the way back is open")
def _(answer: Callable) -> str:
    got, _, either = _four(answer)
    demand(
        "log-ratio 0.5 -0.5 0.5 -0.5, adv 1 1 -2 -2, all outside",
        got,
        [0, 1, 1, 0],
        "A good token that has risen is barred, one that has fallen may rise; a "
        "bad one the other way round.",
        **({_OR: [0, 0, 0, 0]} if either else {}),
        everything_outside_is_barred=[0, 0, 0, 0],
        it_is_the_negation=[1, 0, 0, 1],
        the_sign_of_adv_is_not_used=[0, 1, 0, 1],
    )
    return "risen or fallen, good: 0 1; bad: 1 0"


@trust_mask.has("inside, all learn")
def _(answer: Callable) -> str:
    _, got, either = _four(answer)
    demand(
        "the same, none outside",
        got,
        [1, 1, 1, 1],
        "Inside its trust region nothing is barred.",
        **({_OR: [0, 1, 1, 0]} if either else {}),
        outside_is_not_used=[0, 1, 1, 0],
    )
    return "1 1 1 1"


@trust_mask.has("adv = 0 and ratio = 1 are not barred")
def _(answer: Callable) -> str:
    demand(
        "log-ratio 0.5 and 0, adv 0 and 1, outside",
        answer(
            double([0.5, 0.0]), double([0.0, 1.0]), torch.tensor([True, True])
        ).long(),
        [1, 1],
        "Only what moves further away is barred: sign(adv) log-ratio > 0.",
    )
    return "1 1"


def _drpo(alg: ModuleType, answer: Callable) -> Callable:
    def drpo(ll, anchor, adv, num_generations, *, delta):
        alg._check_above("delta", delta, 0)
        alg.log_ratio(ll, anchor)  # its refusals
        ll, anchor, adv = torch.broadcast_tensors(ll, anchor, adv)
        turned = torch.sign(adv) * (ll.detach().exp() - anchor.exp()) > delta
        return alg._surrogate(answer(ll, anchor, adv, delta), turned)

    return drpo


drpo_loss = task(
    "drpo_loss",
    "8.13",
    "drpo",
    ("ll float ...", "anchor float ...", "adv float ...", "delta number"),
    ("loss float ...",),
    _drpo,
)


def _w(answer: Callable, mu: list, pi: list, adv: list) -> Tensor:
    """What multiplies -adv ratio in the slope, delta = 0.15."""
    mu, pi, adv = double(mu), double(pi), double(adv)
    got = slope(lambda x: answer(x, mu.log(), adv, 0.15), pi.log())
    return got / (-adv * pi / mu)


@drpo_loss.has("on policy it is REINFORCE")
def _(answer: Callable) -> str:
    anchor, adv = double([0.5, 0.01]).log(), double([1.0, -2.0])
    demand(
        "mu = pi = 0.5 and 0.01, adv 1 and -2, slope",
        slope(lambda x: answer(x, anchor, adv, 0.15), anchor),
        [-1.0, 2.0],
        "The penalty is quadratic: at ratio 1 its slope is 0.",
        the_gain_was_not_turned_into_a_loss=[1.0, -2.0],
    )
    return "slopes -1, 2"


@drpo_loss.has("0 at the boundary, turned back beyond")
def _(answer: Callable) -> str:
    demand(
        "mu = 0.4, delta = 0.15, adv = 1, pi = 0.4 0.475 0.55 0.7, weight w",
        _w(answer, [0.4] * 4, [0.4, 0.475, 0.55, 0.7], [1.0] * 4),
        [1.0, 0.5, 0.0, -1.0],
        "w = 1 - (pi - mu) / delta, a straight line in pi.",
        there_is_no_penalty=[1.0] * 4,
        the_factor_1_half_is_missing=[1.0, 0.0, -1.0, -3.0],
        mu_is_missing_in_the_penalty=[1.0, -0.25, -1.5, -4.0],
        mu_stands_there_squared=[1.0, 0.8, 0.6, 0.2],
        the_penalty_is_a_reward=[1.0, 1.5, 2.0, 3.0],
    )
    return "mu 0.4, delta 0.15, pi 0.4 0.475 0.55 0.7: w = 1 0.5 0 -1"


@drpo_loss.has("the same for bad answers, mirrored")
def _(answer: Callable) -> str:
    demand(
        "mu = 0.6, delta = 0.15, adv = -2, pi = 0.45 and 0.3, weight w",
        _w(answer, [0.6, 0.6], [0.45, 0.3], [-2.0, -2.0]),
        [0.0, -1.0],
        "The penalty has |adv|: with adv it would push a bad token further away.",
        the_penalty_has_adv_in_the_place_of_its_modulus=[2.0, 3.0],
        the_size_of_adv_is_missing_in_the_penalty=[0.5, 0.0],
        mu_stands_there_squared=[0.4, -0.2],
    )
    return "pi 0.45 0.3: w = 0 -1"


@drpo_loss.has("rare tokens have room")
def _(answer: Callable) -> str:
    demand(
        "mu = 0.01, pi = 0.04, adv = 1, delta = 0.15, weight w",
        _w(answer, [0.01], [0.04], [1.0]),
        [0.8],
        "A shift of 0.03 is a fifth of delta, although the ratio is 4.",
        mu_is_missing_in_the_penalty__which_is_that_of_SPO_=[-19.0],
        mu_stands_there_squared=[1 - 0.0003 / 0.15],
        pi_stands_in_the_place_of_mu__with_its_gradient=[
            1 - (0.04 * 9 / 0.3 + 0.04 * 3 * 4 / 0.15) / 4
        ],
    )
    return "mu 0.01, pi 0.04: w = 0.8 (SPO: -19)"
