"""Every likelihood estimator and every RL objective of minidrl, in reading order.

A masked diffusion language model predicts all hidden tokens of a text at once. That makes the two things that policy
gradients need, the likelihood of a response and the ratio of two likelihoods, expensive or inexact. The papers of the
field differ in how they estimate them, and in little else. Here each choice is a short pure function, and a paper is a row
of the table ``METHODS`` at the end of the file:

    rollout --credit--> adv
            --plan----> masked states --features--> logp --reduce--> ll --objective(adv, anchor, ref)--> loss per entry
                                                                                     --aggregate-------> loss

Notation (one name for one thing, in every function)

    B = G x N      sequences = prompts x generations, prompt-major (rows g*N .. g*N+N-1 answer prompt g)
    P, L, V        prompt positions, response positions, vocabulary
    K              masked states of a plan: the network is called K times a sequence
    hidden         True = the model sees [MASK] there
    keep           True = the token counts: up to and including the first EOS
    t, l           share of hidden positions, number of hidden positions
    n              number of positions an ELBO is about (its domain)
    logp           log-probability of a token, nats                         (K, B, L)
    ll             reduced log-likelihood, nats                             (K, B, L) token, (K, B, 1) step, (1, B, 1) sequence
    anchor         the ll that a ratio is taken against: of the sampler, or of the weights before the first update
    ratio          exp(ll - anchor)
    adv            advantage, broadcastable to ll; reward (B,)
    beta           weight of the KL term; cap, epsilon_low, epsilon_high    clipping

Conventions. Losses are minimised. All randomness of an estimator lives in its ``Plan`` and comes from an explicit
``torch.Generator`` on the CPU, drawn for the whole global batch; given the plan an estimator is a pure function, so its
expectation is a finite sum that a test can write down. Quantities that papers disagree on (standard deviation or not,
length normaliser, side of a clip, form of a KL) are required keywords. Data arguments that carry a gradient are refused:
there are no stop-gradient flags. Numbers such as (2.3) tag the equations; notebooks and tests use the same tags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# ======================================================================================================== 1. What flows


@dataclass(frozen=True)
class Rollout:
    """What a sampler did, in full: the text, and the order in which its tokens appeared.

    ``unmask_step`` reproduces every state of a sampler that never re-masks: before step s the hidden positions are those
    with ``unmask_step >= s`` and those that were never revealed (-1). ``logp`` are the log-probabilities with which the
    revealed tokens were really drawn: at the sampling temperature, in the state before their step; 0 where nothing was
    revealed. ``records`` holds what the method asked the sampler for: ``entropy (B, L)``, ``one_step (B, T, L)``.
    """

    prompt: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]  # False = left padding
    response: Int[Tensor, "B L"]
    keep: Bool[Tensor, "B L"]
    unmask_step: Int[Tensor, "B L"]
    logp: Float[Tensor, "B L"]
    num_generations: int
    sampler: Any
    records: dict[str, Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of each response that count, the first EOS included."""
        return self.keep.sum(-1)


@dataclass(frozen=True)
class Plan:
    """The K masked states in which an estimator looks at each sequence, and what it reads off there.

    hidden    what the model does not see, prompt included
    scored    the response positions whose log-probability is read (always hidden ones)
    weight    the estimator's weight of a state, 1/K of an average included
    valid     False = padding of a ragged plan: the network is not called for it
    replay    True = the states are those of the recorded trajectory, so that the sampler's own logp can be the anchor
    """

    hidden: Bool[Tensor, "K B T"]
    scored: Bool[Tensor, "K B L"]
    weight: Float[Tensor, "K B"]
    valid: Bool[Tensor, "K B"]
    replay: bool = False

    @property
    def network_calls(self) -> int:
        """Sequences that the network must score, over all states."""
        return int((self.valid & self.scored.any(-1)).sum())


def _uniform(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    # Drawn on the CPU in float64: the same plan on every device, and ties between ranks have probability 0.
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(device)


def _random_subset(
    noise: Float[Tensor, "K B L"], domain: Bool[Tensor, "B L"], count: Int[Tensor, "K B"]
) -> Bool[Tensor, "K B L"]:
    # The positions of the `count` smallest noises inside the domain: a uniformly random subset of that size.
    rank = noise.masked_fill(~domain, torch.inf).argsort(-1).argsort(-1)
    return (rank < count[..., None]) & domain


def _after_visible_prompt(rollout: Rollout, masked: Bool[Tensor, "K B L"]) -> Bool[Tensor, "K B T"]:
    # The hidden positions of a state whose prompt is all visible.
    prompt = torch.zeros((*masked.shape[:2], rollout.prompt.shape[1]), dtype=torch.bool, device=masked.device)
    return torch.cat([prompt, masked], -1)


def _response_plan(
    rollout: Rollout, masked: Bool[Tensor, "K B L"], domain: Bool[Tensor, "B L"], weight: Float[Tensor, "K B"]
) -> Plan:
    # Positions outside the domain (after EOS) are hidden in every state and never scored: they carry no information.
    hidden = _after_visible_prompt(rollout, masked | ~domain)
    return Plan(hidden, masked, weight.to(rollout.logp.dtype), masked.any(-1))


def _domain(rollout: Rollout, domain: str) -> Bool[Tensor, "B L"]:
    if domain not in ("keep", "all"):
        raise ValueError(f"plan.domain: got {domain!r}; allowed keep (up to the first EOS), all (padding after EOS included)")
    return rollout.keep if domain == "keep" else torch.ones_like(rollout.keep)


def _check_count(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: got {value!r}; allowed integers from {least}")


# ===================================================================================================== 2. Plans: random masks
#
# The evidence lower bound of a masked diffusion model, in its two equivalent forms:
#
#     B = E_{t ~ U(0,1)} E_{mask ~ Bernoulli(t)} [ 1/t sum_{i hidden} logp_i ]              (time form)
#       = E_{l ~ U{1..n}} E_{mask: l of n}       [ n/l sum_{i hidden} logp_i ]  <=  log p    (count form)
#
# log p here is the likelihood under the sampler that reveals one uniformly random position at a time. It is not the
# likelihood under the confidence-ordered samplers that usually produce rollouts. ELBO-based ratios are surrogates.


def mean_field_plan(rollout: Rollout, generator: torch.Generator, *, p_mask_prompt: float) -> Plan:
    """(2.1) One state, the whole response hidden: ll = sum_i log p(y_i | everything hidden).

    Source: diffu-GRPO (d1, arXiv 2504.12216, section 3.1 and code): one network call; prompt tokens are hidden with
    probability ``p_mask_prompt`` so that several updates on one rollout see different inputs.
    Bias: with p_mask_prompt = 0 this is the ELBO's integrand at t = 1, no bound on log p in general; it ignores every
    dependence between the response's tokens.
    """
    if not 0 <= p_mask_prompt < 1:
        raise ValueError(f"plan.p_mask_prompt: got {p_mask_prompt}; allowed 0 up to, not including, 1")
    drop = _uniform(tuple(rollout.prompt.shape), generator, rollout.prompt.device) < p_mask_prompt
    hidden = torch.cat([drop & rollout.prompt_mask, torch.ones_like(rollout.keep)], -1)[None]
    scored = rollout.keep[None]
    return Plan(hidden, scored, torch.ones_like(scored[..., 0], dtype=rollout.logp.dtype), scored.any(-1))


def elbo_time_plan(rollout: Rollout, generator: torch.Generator, *, num_states: int, domain: str, min_t: float) -> Plan:
    """(2.2) ELBO in its time form: t ~ U(min_t, 1), each position hidden with probability t, weight 1/t.

    Source: LLaDA (arXiv 2502.09992) and its pre-training code, which uses min_t = 1e-3.
    Bias: min_t (B - g(0)) to first order, g(0) = n times the mean logp of a single hidden token; unbiased at min_t = 0,
    where the variance is infinite: a lone hidden token at t -> 0 gets the weight 1/t. Prefer (2.3).
    """
    _check_count("plan.num_states", num_states)
    if not 0 <= min_t < 1:
        raise ValueError(f"plan.min_t: got {min_t}; allowed 0 up to, not including, 1")
    inside = _domain(rollout, domain)
    t = min_t + (1 - min_t) * _uniform((num_states, inside.shape[0]), generator, inside.device)
    masked = (_uniform((num_states, *inside.shape), generator, inside.device) < t[..., None]) & inside
    return _response_plan(rollout, masked, inside, 1 / (num_states * t))


def elbo_count_plan(rollout: Rollout, generator: torch.Generator, *, num_states: int, domain: str, strata: bool) -> Plan:
    """(2.3) ELBO in its count form: l ~ U{1..n} positions hidden, chosen uniformly, weight n/l.

    Source: LLaDA, likelihood evaluation. It is (2.2) with t integrated out: same mean, finite and smaller variance.
    ``strata``: the K counts of a sequence come from K equal strata of (0, 1], one uniform draw in each (floor arithmetic on
    float64, no rounding to even). Still unbiased, because the strata's mixture is uniform; never a larger variance.
    Bias: none, for every K. Equals the exact log-likelihood when the model's conditionals come from one joint distribution.
    """
    _check_count("plan.num_states", num_states)
    inside = _domain(rollout, domain)
    n = inside.sum(-1)
    u = _uniform((num_states, inside.shape[0]), generator, inside.device)
    if strata:
        u = (torch.arange(num_states, device=u.device)[:, None] + u) / num_states
    count = torch.minimum((u * n).floor().long() + 1, n)
    masked = _random_subset(_uniform((num_states, *inside.shape), generator, inside.device), inside, count)
    return _response_plan(rollout, masked, inside, n.double() / (num_states * count))


def complementary_plan(rollout: Rollout, generator: torch.Generator, *, num_states: int, domain: str) -> Plan:
    """(2.4) ELBO from pairs (mask, complement): l ~ U{0..n}, weights (n+1)/l and (n+1)/(n-l), each pair averaged.

    Source: ESPO (arXiv 2512.03759, code); the pairing is coupled sampling of DiffuCoder (arXiv 2506.20639). Every token is
    scored exactly once in a pair. The count must include 0 so that l and n - l have the same law; the weight n+1 repairs
    the mean. Bias: none. Variance: per token never larger than that of two independent masks; for the sequence's sum there
    is no such guarantee: it gains where the mean logp moves steadily with the count, and loses on short irregular models.
    """
    _check_count("plan.num_states", num_states, 2)
    if num_states % 2:
        raise ValueError(f"plan.num_states: got {num_states}; allowed even numbers (pairs of a mask and its complement)")
    inside = _domain(rollout, domain)
    pairs, n = num_states // 2, inside.sum(-1)
    count = (_uniform((pairs, inside.shape[0]), generator, inside.device) * (n + 1)).floor().long().clamp(max=n)
    masked = _random_subset(_uniform((pairs, *inside.shape), generator, inside.device), inside, count)
    both = torch.stack([masked, inside & ~masked], 1).flatten(0, 1)
    return _response_plan(rollout, both, inside, (n + 1).double() / (num_states * both.sum(-1).clamp(min=1)))


# ============================================================================================== 3. Plans: trajectory replay
#
# Denoising is a Markov decision process: the state is the partly hidden text, the action reveals some tokens. For samplers
# whose choice of positions does not depend on the weights (random or fixed order) the log-probability of a step is
# exactly the sum of the revealed tokens' logp, and  grad J = E[ sum_s A_s grad log pi(step s) ]  is the exact policy
# gradient. For confidence-ordered samplers the choice of positions depends on the weights too, and the token-only score
# used here, and in the released code of EGSPO, d2 and TraceRL, is biased: see notebook 03.


def _last_deciding_step(rollout: Rollout) -> Int[Tensor, " B"]:
    # Once every kept token is revealed the reward is decided. Whether that is so can be seen in the state before the step,
    # so later steps have a score of conditional mean zero: leaving them out is exact and saves variance and calls.
    return rollout.unmask_step.masked_fill(~rollout.keep, -1).max(-1).values


def _step_entropy(rollout: Rollout, num_steps: int) -> Float[Tensor, "T B"]:
    if "entropy" not in rollout.records:
        raise ValueError(
            "plan.min_entropy: the rollout holds no record 'entropy'; the method must ask the sampler for it (needs)"
        )
    step = rollout.unmask_step.clamp(min=0)
    entropy = rollout.records["entropy"].masked_fill(rollout.unmask_step < 0, 0)
    return torch.zeros(num_steps, step.shape[0], dtype=entropy.dtype, device=step.device).scatter_add_(0, step.T, entropy.T)


def _choose(
    valid: Bool[Tensor, "T B"], num_states: int, generator: torch.Generator
) -> tuple[Int[Tensor, "K B"], Float[Tensor, " B"]]:
    # num_states of each row's valid steps without replacement, and the factor (how many there were) / (how many were taken).
    noise = _uniform(tuple(valid.shape), generator, valid.device).masked_fill(~valid, torch.inf)
    available = valid.sum(0)
    return noise.argsort(0)[:num_states].sort(0).values, available.double() / available.clamp(min=1, max=num_states)


def replay_plan(rollout: Rollout, generator: torch.Generator, *, num_states: int | None, min_entropy: float) -> Plan:
    """(3.1) The states of the recorded trajectory; each scores the tokens that its step revealed.

    ``num_states`` None: every step up to the one that decides the reward, weight 1. An integer k < T: k steps of each
    trajectory, uniformly without replacement, weight T/k; unbiased, at k/T of the cost.
    ``min_entropy`` > 0 (nats, summed over the step's tokens; needs the record ``entropy``) leaves out the steps whose
    action was all but certain. What is lost is at most 2 max|A| sum of their entropies (per unit of logit gradient), and
    what remains is unbiased where the positions to reveal are known before the draw (random or fixed order).
    Source: policy gradients on the denoising process, e.g. d2, TraceRL, EGSPO. Bias: see above.
    """
    last = _last_deciding_step(rollout)
    steps = torch.arange(int(last.max()) + 1, device=last.device)[:, None].expand(-1, last.shape[0])
    valid = steps <= last
    if min_entropy > 0:
        valid = valid & (_step_entropy(rollout, int(rollout.unmask_step.max()) + 1)[: steps.shape[0]] >= min_entropy)
    scale = torch.ones_like(last, dtype=rollout.logp.dtype)
    if num_states is not None:
        _check_count("plan.num_states", num_states)
        steps, scale = _choose(valid, num_states, generator)
        valid = valid.gather(0, steps)
    return _replay_states(rollout, steps, valid, scale.to(rollout.logp.dtype))


def _replay_states(rollout: Rollout, steps: Int[Tensor, "K B"], valid: Bool[Tensor, "K B"], scale: Float[Tensor, " B"]) -> Plan:
    unmask = rollout.unmask_step[None]
    scored = (unmask == steps[..., None]) & valid[..., None]
    masked = (unmask >= steps[..., None]) | (unmask < 0)
    return Plan(_after_visible_prompt(rollout, masked), scored, scale.expand(steps.shape), valid, replay=True)


# ============================================================================================================ 4. Features
#
# A loss touches the network only through small per-token tensors, its features. Everything after this section is algebra
# on them, and the trainer's two-pass backward needs to know nothing but them. That is why memory does not grow with the
# number of states: the features of all states fit anywhere, the network's activations exist for one micro-batch at a time.
#
# The logits of a state are needed at its scored positions only. With 126k tokens and 256 positions the full logits of one
# sequence take 130 MB in float32, so hidden states are selected before the vocabulary head, never after it.

FEATURES = ("logp", "entropy")


def plan_inputs(rollout: Rollout, plan: Plan, states: Int[Tensor, " S"], mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Network inputs (tokens, attention mask), both (S, P+L), of the flat state numbers k*B + b."""
    row = states % rollout.response.shape[0]
    text = torch.cat([rollout.prompt, rollout.response], 1)[row]
    tokens = text.masked_fill(plan.hidden.flatten(0, 1)[states], mask_token_id)
    return tokens, torch.cat([rollout.prompt_mask, torch.ones_like(rollout.keep)], 1)[row]


def state_features(
    model: Any,
    rollout: Rollout,
    plan: Plan,
    states: Int[Tensor, " S"],
    *,
    temperature: float,
    names: tuple[str, ...] = ("logp",),
) -> dict[str, Float[Tensor, "S L"]]:
    """(4.1) logp_i = log softmax(z_i / temperature)[y_i] and entropy_i, at the scored positions of S states; 0 elsewhere.

    The vocabulary head is applied to the scored rows only. Shapes: S flat state numbers k*B + b, in any order; each row is
    computed on its own, so splitting S into micro-batches changes nothing. Units: nats.
    """
    tokens, attention_mask = plan_inputs(rollout, plan, states, model.mask_token_id)
    scored = plan.scored.flatten(0, 1)[states]
    h = model.encode(tokens, attention_mask)[:, rollout.prompt.shape[1] :][scored]
    log_probs = (model.head(h) / temperature).log_softmax(-1)
    target = rollout.response[states % rollout.response.shape[0]][scored]
    values = {"logp": log_probs.gather(-1, target[:, None])[:, 0]}
    if "entropy" in names:
        # [MASK] has logp -inf and p 0: its term is 0, and must not turn the gradient into nan.
        values["entropy"] = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0)).sum(-1)
    empty = torch.zeros(scored.shape, dtype=log_probs.dtype, device=log_probs.device)
    return {name: empty.masked_scatter(scored, values[name]) for name in names}


def state_chunks(plan: Plan, size: int) -> Iterator[Int[Tensor, " S"]]:
    """The plan's flat state numbers that need the network, in pieces of at most ``size``."""
    needed = (plan.valid & plan.scored.any(-1)).flatten().nonzero()[:, 0]
    yield from needed.split(size) if len(needed) else ()


@torch.no_grad()
def features(
    model: Any, rollout: Rollout, plan: Plan, *, temperature: float, names: tuple[str, ...] = ("logp",), size: int = 256
) -> dict[str, Float[Tensor, "K B L"]]:
    """All features of a plan, without a graph: what anchors, references and the first of two passes need."""
    shape = plan.scored.shape
    out: dict[str, Tensor] = {}
    for states in state_chunks(plan, size):
        for name, value in state_features(model, rollout, plan, states, temperature=temperature, names=names).items():
            flat = out.setdefault(name, torch.zeros((shape[0] * shape[1], shape[2]), dtype=value.dtype, device=value.device))
            flat[states] = value
    return {name: out.get(name, rollout.logp.new_zeros(shape).flatten(0, 1)).unflatten(0, shape[:2]) for name in names}


# ========================================================================================================== 5. Reductions
#
# "The ratio" of a paper is one number a token, a step or a sequence. The choice decides what a clip can see: a token ratio
# clips single words, a sequence ratio keeps or drops a whole response. For a step or a sequence the log-probabilities are
# summed first, so noise adds up as well; the length normaliser exists to keep the exponent small.

LEVELS = ("token", "step", "sequence")


def reduce_logp(
    logp: Float[Tensor, "K B L"], plan: Plan, *, level: str, normalizer: Float[Tensor, " B"] | None
) -> Float[Tensor, "K2 B L2"]:
    """(5.1) From token log-probabilities to the log-likelihoods whose ratio the objective uses.

    token      ll[k,b,i] = logp[k,b,i]                    one ratio a token         (K, B, L)
    step       ll[k,b]   = sum_i logp[k,b,i]              one ratio a denoising step (K, B, 1)
    sequence   ll[b]     = sum_k weight[k,b] sum_i logp   one ratio a response      (1, B, 1); the ELBO of sections 2

    ``normalizer`` (B,) divides ll: None for the log-likelihood itself, the length for the geometric mean per token that
    GSPO-style ratios use. It changes a ratio by the power 1/length, so it is never implied.
    """
    if level not in LEVELS:
        raise ValueError(f"reduction: got {level!r}; allowed {', '.join(LEVELS)}")
    ll = logp * plan.scored
    if level != "token":
        ll = ll.sum(-1, keepdim=True)
    if level == "sequence":
        ll = (ll * plan.weight[..., None]).sum(0, keepdim=True)
    return ll if normalizer is None else ll / normalizer[None, :, None]


def entries(plan: Plan, level: str) -> tuple[Bool[Tensor, "K2 B L2"], Float[Tensor, "K2 B 1"]]:
    """Which entries of ll exist, and the weight with which each enters a sum (a sequence has absorbed its weights)."""
    if level == "sequence":
        present = plan.scored.any(-1).any(0)[None, :, None]
        return present, torch.ones_like(present, dtype=plan.weight.dtype)
    return plan.scored if level == "token" else plan.scored.any(-1, keepdim=True), plan.weight[..., None]


# ============================================================================================================== 6. Credit
#
# Without a value network the only baseline at hand is the other responses to the same prompt. Centring on the group's mean
# is not only variance reduction here: where the score of a trajectory is biased (confidence-ordered samplers, section 3),
# a constant added to all rewards would leak into the gradient, and centring removes most of it.


def _groups(reward: Float[Tensor, " B"], num_generations: int) -> Float[Tensor, "G N"]:
    if reward.requires_grad:
        raise ValueError("reward: carries a gradient; rewards are data, detach them")
    if num_generations < 1 or reward.shape[0] % num_generations:
        raise ValueError(f"num_generations: got {num_generations}; allowed divisors of the {reward.shape[0]} sequences")
    return reward.unflatten(0, (-1, num_generations))


def group_mean(reward: Float[Tensor, " B"], num_generations: int) -> Float[Tensor, " B"]:
    """(6.1) adv = reward - mean of its prompt's group, no standard deviation.

    Source: Dr. GRPO (arXiv 2503.20783); d1, GDPO, StableDRL (code). Gradient: (N-1)/N of the leave-one-out one, because the
    mean contains the sample itself.
    """
    group = _groups(reward, num_generations)
    return (group - group.mean(1, keepdim=True)).flatten()


def group_z_score(reward: Float[Tensor, " B"], num_generations: int, *, ddof: int, eps: float) -> Float[Tensor, " B"]:
    """(6.2) adv = (reward - group mean) / (group std + eps), std with N - ddof in the denominator.

    Source: GRPO (arXiv 2402.03300). A group of equal rewards has advantage 0. Papers and code disagree on ``ddof`` (torch's
    default is 1) and ``eps``: both are required. A group of one has no std: ddof must be below N.
    """
    group = _groups(reward, num_generations)
    if not 0 <= ddof < num_generations:
        raise ValueError(f"credit.ddof: got {ddof}; allowed 0 up to num_generations - 1 = {num_generations - 1}")
    return ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True, correction=ddof) + eps)).flatten()


def leave_one_out(reward: Float[Tensor, " B"], num_generations: int) -> Float[Tensor, " B"]:
    """(6.3) adv = reward - mean of the other N - 1 rewards of its group.

    Source: RLOO (arXiv 2402.14740). The baseline is independent of the sample, so the policy gradient stays unbiased.
    Equals N/(N-1) times ``group_mean``.
    """
    group = _groups(reward, num_generations)
    if num_generations < 2:
        raise ValueError(
            f"num_generations: got {num_generations}; allowed from 2 for leave-one-out (a group of one has no others)"
        )
    return (num_generations / (num_generations - 1) * (group - group.mean(1, keepdim=True))).flatten()


# ======================================================================================================== 7. Ratios and KL
#
# A ratio of exact likelihoods turns samples of an old policy into samples of the new one. For a diffusion model three things
# can stand in the denominator: the sampler's own log-probability of each revealed token (behaviour), the old weights' estimate
# on the same masks (old, shared), or on other masks (old, independent). Only the first is what importance sampling means; the
# second measures how far the weights moved; the third is the second times the exponential of Monte-Carlo noise.


def log_ratio(ll: Float[Tensor, "*s"], anchor: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """(7.1) log ratio = ll - anchor, nats. The anchor is data.

    Equals 0 where both come from the same weights, plan and precision. With fresh masks for the anchor it is noise even
    then: the ratio's mean exceeds 1 (Jensen) and its tail is log-normal. That is no importance weight of anything.
    """
    if anchor.requires_grad:
        raise ValueError("anchor: carries a gradient; the old log-likelihoods are data, detach them")
    return ll - anchor


def kl_term(ll: Float[Tensor, "*s"], ref: Float[Tensor, "*s"], *, form: str) -> Float[Tensor, "*s"]:
    """(7.2) A penalty whose mean over samples of the policy estimates KL(policy || reference). u = ll - ref.

    k1   u                      value unbiased; gradient of the loss has mean 0 (useless as a loss)
    k2   u^2 / 2                value biased;   gradient is that of KL(policy || reference)
    k3   exp(-u) - 1 + u        value unbiased and >= 0; gradient is that of KL(reference || policy), the other direction

    Source: Schulman's note on KL estimators (2020); k3 in GRPO, k2 in ESPO. The gradients are tested by enumeration.
    """
    if ref.requires_grad:
        raise ValueError("ref: carries a gradient; the reference log-likelihoods are data, detach them")
    u = ll - ref
    if form not in ("k1", "k2", "k3"):
        raise ValueError(f"kl.form: got {form!r}; allowed k1, k2, k3")
    return u if form == "k1" else u.square() / 2 if form == "k2" else torch.expm1(-u) + u


# ========================================================================================================== 8. Objectives
#
# Each returns a loss per entry of ll. Judge it by its gradient: the value of a surrogate means nothing. At ratio 1 all of them
# have the gradient of ``reinforce`` (self-normalised weights: divided by the group size). On a single on-policy update every
# clip is inert, so methods differ only through reuse of a rollout, noise in the ratio, and credit.


def reinforce(ll: Float[Tensor, "*s"], anchor: None, adv: Float[Tensor, "*s"], num_generations: int) -> Float[Tensor, "*s"]:
    """(8.1) loss = -adv ll. Gradient: -adv grad ll.

    Source: REINFORCE (Williams, 1992). Exact for on-policy samples when ll is the log-probability of what was sampled.
    Linear in ll: its coefficients do not depend on the current weights, so the two-pass backward skips its first pass.
    """
    return -adv * ll


def ppo_clip(
    ll: Float[Tensor, "*s"],
    anchor: Float[Tensor, "*s"],
    adv: Float[Tensor, "*s"],
    num_generations: int,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Float[Tensor, "*s"]:
    """(8.2) loss = -min(ratio adv, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) adv).

    Gradient: -adv ratio grad ll, and 0 where adv > 0 and ratio > 1 + epsilon_high, or adv < 0 and ratio < 1 - epsilon_low.
    The clip is conditional: with adv < 0 a large ratio passes, and its coefficient is unbounded.
    Source: PPO (arXiv 1707.06347); GRPO (arXiv 2402.03300); unequal sides: DAPO (arXiv 2503.14476).
    Equals ``reinforce`` in gradient at ratio 1. With sequence reduction and normalizer = length it is GSPO (arXiv 2507.18071).
    """
    ratio = log_ratio(ll, anchor).exp()
    return -torch.minimum(ratio * adv, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * adv)


def self_normalized_weights(
    log_ratios: Float[Tensor, "K B L"], num_generations: int, *, log_cap: float
) -> Float[Tensor, "K B L"]:
    """(8.3) w_j = min(ratio_j, cap) / sum over the prompt's group of min(ratio_i, cap), in log space.

    Source: StableDRL (arXiv 2603.06743): clip whatever the sign of the advantage, then normalise. The released code takes
    the softmax over the rows of one call, which mixes prompts when a call holds several; here it never leaves the group.
    Shapes: sequence level (1, B, 1). Special cases: all ratios equal, or all above the cap: w = 1/N.
    """
    capped = log_ratios.clamp(max=log_cap).unflatten(1, (-1, num_generations))
    return capped.softmax(2).flatten(1, 2)


def self_normalized_clip(
    ll: Float[Tensor, "K B L"],
    anchor: Float[Tensor, "K B L"],
    adv: Float[Tensor, "K B L"],
    num_generations: int,
    *,
    cap: float,
) -> Float[Tensor, "K B L"]:
    """(8.4) loss = -w adv ll, w the detached weights (8.3); to be summed over a group, not averaged.

    Gradient: -w adv grad ll: inside the convex hull of the group's adv grad ll, so bounded by max |adv| |grad ll| whatever
    the ratios. Clipped samples still learn (PPO gives them 0). No gradient flows through the ratio or the normaliser.
    Source: StableDRL: the paper's clip to [1 - eps, 1 + eps] at eps = 5 is the cap 6, because a ratio is positive; the
    released code caps at 5. Sequence level only. Bounds magnitude, not concentration: one weight may still go to 1.
    """
    if cap <= 0:
        raise ValueError(f"objective.cap: got {cap}; allowed above 0")
    weights = self_normalized_weights(log_ratio(ll.detach(), anchor), num_generations, log_cap=math.log(cap))
    return -weights * adv * ll


# ========================================================================================================= 9. Aggregation
#
# How losses per entry become one number decides how much a long response counts. Papers differ, and so does the released code
# of one paper from its text. A normaliser over the micro-batch (common in code) makes the same rollouts give another objective
# when the batch is split differently; none of these do.

AGGREGATIONS = ("sequence_mean", "sequence_mean_token_mean", "token_mean", "fixed_length", "group_sum")


def aggregate(loss: Float[Tensor, "K B L"], plan: Plan, rollout: Rollout, *, level: str, how: str) -> Float[Tensor, ""]:
    """(9.1) One number from the loss per entry. S_b = weighted sum over the entries of sequence b, n_b its kept tokens.

    sequence_mean               mean_b S_b                  each response counts once, as a sum over its entries
    sequence_mean_token_mean    mean_b S_b / n_b            GRPO; long responses weigh less per token
    token_mean                  sum_b S_b / sum_b n_b       DAPO, d1's code; long responses weigh more
    fixed_length                mean_b S_b / L              Dr. GRPO; no length bias
    group_sum                   sum_b S_b / G               self-normalised weights already sum to 1 in a group

    Every normaliser is that of the global batch: it never depends on how the batch was split for memory.
    """
    present, weight = entries(plan, level)
    total = (loss * weight * present).sum((0, 2))
    if how == "sequence_mean":
        return total.mean()
    if how == "sequence_mean_token_mean":
        return (total / rollout.lengths).mean()
    if how == "token_mean":
        return total.sum() / rollout.lengths.sum()
    if how == "fixed_length":
        return total.mean() / rollout.keep.shape[1]
    if how == "group_sum":
        return total.sum() / (total.shape[0] / rollout.num_generations)
    raise ValueError(f"aggregation: got {how!r}; allowed {', '.join(AGGREGATIONS)}")


# ============================================================================================================ 10. Methods
#
# To read a row: which states are looked at (plan, refresh), what the ratio is taken of and against (reduction, normalizer,
# anchor), what is done with it (objective), how rewards become advantages (credit), and how it is summed (aggregation).
# To write one: give these words. If a paper needs a function that is not above, it is one new function and one new row.


class KL(NamedTuple):
    """A KL penalty: form (7.2) and weight. The reference is the model that the run started from."""

    form: str
    beta: float


# The words that a row may use where it makes a choice by name. ``normalizer`` divides ll: by nothing, by the tokens that count,
# or by the padded length L (which some released code does; short answers then get ratios nearer to 1).
CHOICES = {
    "reduction": LEVELS,
    "normalizer": ("none", "kept_length", "padded_length"),
    "anchor": ("behaviour", "old", "none"),
    "refresh": ("fixed", "paired", "independent"),
    "temperature": ("one", "sampling"),
    "aggregation": AGGREGATIONS,
}


@dataclass(frozen=True)
class Method:
    """A paper as a row: which of the choices above it makes. No method has code of its own outside this table.

    refresh       fixed: one plan for all updates on a rollout. paired: a new plan an update, all scored by the old weights
                  first. independent: a new plan an update, the old value kept from its own plan (the ratio is then noise).
    anchor        behaviour: the sampler's own logp (replay plans only). old: scored before the first update. none.
    temperature   one: scored at temperature 1. sampling: at the sampler's temperature, as behaviour anchors require.
    """

    name: str
    title: str
    source: str
    differs: str
    plan: partial
    credit: partial
    objective: partial
    reduction: str
    aggregation: str
    anchor: str
    refresh: str = "fixed"
    normalizer: str = "none"
    temperature: str = "one"
    kl: KL | None = None
    needs: tuple[str, ...] = ()

    def __post_init__(self):
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}: got {getattr(self, key)!r} for {self.name}; allowed {', '.join(allowed)}")

    @property
    def linear(self) -> bool:
        """True when the loss is linear in the features: pass 1 of the two-pass backward can be skipped."""
        return self.objective.func is reinforce and self.kl is None

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(low, high) outside which a ratio counts as clipped; (0, inf) without a clip."""
        words = self.objective.keywords
        if "cap" in words:
            return 0.0, float(words["cap"])
        return 1 - words.get("epsilon_low", 1.0), 1 + words.get("epsilon_high", math.inf)


def reduced(method: Method, plan: Plan, rollout: Rollout, logp: Float[Tensor, "K B L"]) -> Float[Tensor, "K2 B L2"]:
    """The method's ll: ``reduce_logp`` with its level and normaliser."""
    lengths = {"kept_length": rollout.lengths, "padded_length": torch.full_like(rollout.lengths, logp.shape[-1])}
    normalizer = None if method.normalizer == "none" else lengths[method.normalizer].to(logp.dtype)
    return reduce_logp(logp, plan, level=method.reduction, normalizer=normalizer)


def behaviour_anchor(method: Method, plan: Plan, rollout: Rollout) -> Float[Tensor, "K2 B L2"]:
    """The sampler's own log-probabilities as anchor: what was really drawn, in the state in which it was drawn."""
    if not plan.replay or method.temperature != "sampling":
        raise ValueError(
            f"anchor: {method.name} asks for behaviour; allowed only for replay plans scored at the sampling temperature"
        )
    return reduced(method, plan, rollout, rollout.logp.expand(plan.scored.shape))


def method_loss(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    feature: dict[str, Float[Tensor, "K B L"]],
    adv: Float[Tensor, " B"],
    anchor: Float[Tensor, "K2 B L2"] | None,
    ref: Float[Tensor, "K2 B L2"] | None,
) -> Float[Tensor, ""]:
    """(10.1) loss = aggregate(objective(ll, anchor, adv) + beta kl(ll, ref)), for any row of ``METHODS``."""
    ll = reduced(method, plan, rollout, feature["logp"])
    loss = method.objective(ll, anchor, adv.to(ll.dtype)[None, :, None].expand_as(ll), rollout.num_generations)
    if method.kl is not None:
        loss = loss + method.kl.beta * kl_term(ll, ref, form=method.kl.form)
    return aggregate(loss, plan, rollout, level=method.reduction, how=method.aggregation)


@torch.no_grad()
def diagnostics(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    ll: Float[Tensor, "K2 B L2"],
    anchor: Float[Tensor, "K2 B L2"],
    adv: Float[Tensor, " B"],
) -> dict[str, float]:
    """What the ratios look like: spread, clipped share, bypass share, effective sample size (share of the entries).

    Bypass: adv < 0 and ratio above the clip, the entries that PPO's conditional clip lets through with an unbounded
    coefficient. Effective sample size: (sum ratio)^2 / (n sum ratio^2), 1 when all ratios agree.
    """
    present = entries(plan, method.reduction)[0].expand_as(ll)
    logs = log_ratio(ll, anchor)[present]
    sign, ratio = adv[None, :, None].expand_as(ll)[present], logs.exp()
    low, high = method.clip_bounds
    if not len(logs):
        return {}
    clipped = (
        ratio > high if "cap" in method.objective.keywords else ((sign > 0) & (ratio > high)) | ((sign < 0) & (ratio < low))
    )
    values = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_std": ratio.std(correction=0),
        "log_ratio_std": logs.std(correction=0),
        "clip_fraction": clipped.double().mean(),
        "bypass_fraction": ((sign < 0) & (ratio > high)).double().mean(),
        "effective_sample_size": torch.exp(2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)) / len(logs),
    }
    return {name: float(value) for name, value in values.items()}


def with_options(method: Method, options: dict[str, Any]) -> Method:
    """The row with some of its numbers replaced: {"plan.num_states": 4, "objective.epsilon_high": 0.3, "kl.beta": 0.0}.

    Keys: a component and one of its keywords (plan, credit, objective, kl), or a choice by name (reduction, normalizer,
    refresh, aggregation). ``kl.beta`` 0 removes the KL term, and with it the reference model.
    Raises ValueError for a key that the method does not have, and for a value of another kind than the present one.
    """
    for key, value in options.items():
        part, _, name = key.partition(".")
        component = getattr(method, part, None)
        if part == "kl" and isinstance(component, KL) and name in KL._fields:
            _check_like(key, value, getattr(component, name))
            method = replace(method, kl=None if (name, value) == ("beta", 0) else component._replace(**{name: value}))
        elif isinstance(component, partial) and name in component.keywords:
            _check_like(key, value, component.keywords[name])
            method = replace(method, **{part: partial(component.func, **{**component.keywords, name: value})})
        elif not name and part in ("aggregation", "refresh", "normalizer", "reduction"):
            method = replace(method, **{part: value})
        else:
            raise ValueError(f"method_options.{key}: no such option of {method.name}; allowed {', '.join(_options(method))}")
    return method


def _check_like(key: str, value: Any, present: Any) -> None:
    # An option keeps its kind: a number stays a number, a word a word. None (every step) may become a number.
    kinds = (str,) if isinstance(present, str) else (bool,) if isinstance(present, bool) else (int, float, type(None))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"method_options.{key}: got {value!r}; allowed a value like {present!r}")


def _options(method: Method) -> list[str]:
    words = [f"{p}.{name}" for p in ("plan", "credit", "objective") for name in getattr(method, p).keywords]
    return words + (["kl.form", "kl.beta"] if method.kl else []) + ["aggregation", "refresh", "normalizer", "reduction"]


_MEAN = partial(group_mean)
_Z_SCORE = partial(group_z_score, ddof=1, eps=1e-4)
_CLIP = partial(ppo_clip, epsilon_low=0.2, epsilon_high=0.2)

_ROWS = (
    Method(
        name="reinforce",
        title="exact policy gradient of the denoising trajectory",
        source="Williams 1992, on the denoising process; baseline of Dr. GRPO (arXiv 2503.20783)",
        differs="token-only score: exact for random and fixed orders, biased for confidence order",
        plan=partial(replay_plan, num_states=None, min_entropy=0.0),
        credit=_MEAN,
        objective=partial(reinforce),
        reduction="step",
        aggregation="sequence_mean",
        anchor="none",
        temperature="sampling",
        needs=("entropy",),
    ),
    Method(
        name="replay-grpo",
        title="PPO clip on every step of the recorded trajectory",
        source="per-step ratios of d2 (arXiv 2509.21474) and TraceRL (arXiv 2509.06949); clip and z-score of GRPO",
        differs="anchored on the sampler's own log-probabilities; token-only score as in reinforce",
        plan=partial(replay_plan, num_states=None, min_entropy=0.0),
        credit=_Z_SCORE,
        objective=_CLIP,
        reduction="step",
        aggregation="fixed_length",
        anchor="behaviour",
        temperature="sampling",
        needs=("entropy",),
    ),
    Method(
        name="grpo",
        title="GRPO with one ELBO ratio a sequence",
        source="GRPO (arXiv 2402.03300) on the count-form ELBO; per-token geometric mean as in GSPO (arXiv 2507.18071)",
        differs="the likelihood is an ELBO; old and new share their masks; no KL term",
        plan=partial(elbo_count_plan, num_states=4, domain="keep", strata=True),
        credit=_Z_SCORE,
        objective=_CLIP,
        reduction="sequence",
        aggregation="sequence_mean",
        anchor="old",
        normalizer="kept_length",
    ),
    Method(
        name="diffu-grpo",
        title="one-step mean field, token ratios, prompt masking",
        source="d1 (arXiv 2504.12216), section 3 and eq. 4",
        differs="the released code averages over all tokens of a micro-batch; this is the paper's per-sequence mean",
        plan=partial(mean_field_plan, p_mask_prompt=0.15),
        credit=_MEAN,
        objective=partial(ppo_clip, epsilon_low=0.5, epsilon_high=0.5),
        reduction="token",
        aggregation="sequence_mean_token_mean",
        anchor="old",
        refresh="paired",
        kl=KL("k3", 0.04),
    ),
    Method(
        name="stabledrl-elbo",
        title="unconditional clip and self-normalised weights, on the plain ELBO",
        source="StableDRL (arXiv 2603.06743), eps = 5",
        differs="score surrogate is the plain ELBO, not the sandwich of ELBO and EUBO; weights never mix prompts",
        plan=partial(elbo_count_plan, num_states=2, domain="keep", strata=True),
        credit=_MEAN,
        objective=partial(self_normalized_clip, cap=6.0),
        reduction="sequence",
        aggregation="group_sum",
        anchor="old",
        refresh="independent",
        normalizer="kept_length",
    ),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}

# The estimators of log p that `python -m minidrl estimators` judges, at equal numbers of network calls.
ESTIMATORS: dict[str, Callable[..., Plan]] = {
    "mean field": lambda rollout, generator, num_states: mean_field_plan(rollout, generator, p_mask_prompt=0.0),
    "ELBO, time": partial(elbo_time_plan, domain="keep", min_t=1e-3),
    "ELBO, count": partial(elbo_count_plan, domain="keep", strata=False),
    "ELBO, count, strata": partial(elbo_count_plan, domain="keep", strata=True),
    "ELBO, complementary": partial(complementary_plan, domain="keep"),
}
ESTIMATOR_CALLS = {"mean field": (1,), "ELBO, complementary": (2, 4)}
