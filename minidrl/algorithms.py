"""Every likelihood estimator and every RL objective of minidrl, in one file.

A masked diffusion language model predicts all hidden tokens of a text at once. That
makes the two things that policy gradients need, the likelihood of a response and the
ratio of two likelihoods, expensive or inexact. The papers of the field differ mostly in
how they estimate these two. Here each choice is a short pure function. A method is a
set of choices, written down in the table ``METHODS`` of methods.py:

    rollout --plan--> masked states --features--> logp --reduce--> ll
    reward, plan --credit--> adv
    ll --objective(adv, anchor, ref)--> loss per entry --aggregate--> loss

How to read. Sections 1 to 10 follow these arrows. In each of them comes first what d1,
GDPO, StableDRL, EGSPO, DPPO and DRPO use, then what related methods use; section 11
holds this project's own research, to which (2.11) to (2.14), (4.2) and (4.5) belong. A
docstring opens with the equation, in the names of the code. ``Source`` says where it
comes from, ``Shapes`` what goes in and comes out, ``Special cases`` how an estimator is
biased, what gradient an objective has, when two functions agree, and what is refused.
The comments inside the functions are the steps of the derivation.

Where to find what, by its usual name and section

    2   one-step likelihood, prompt masking (d1)     mean_field_plan
    2   ELBO over times; over counts                 elbo_time_plan, elbo_count_plan
    2   SDMC: its nodes; its masks (GDPO)            gauss_legendre, quadrature_plan
    2   block-wise masks; states of a block model    block_plan, block_elbo_plan
    2   antithetic, coupled, growing masks           complementary_plan, coupled_plan,
                                                     scheduled_plan
    3   every step of the trajectory, or some by lot replay_plan, block_replay_plan
    3   entropy selection: steps of highest entropy  entropy_plan
    3   merged steps; predictions of each step       merged_plan, prediction_plan
    4   log-probability, entropy, exact KL           token_features
    4   staircase attention                          staircase_mask
    4   choice of positions: exact; of MAPG          order_logp, position_logp
    5   ratio of a token, step, sequence (GSPO's)    reduce_logp
    5   EUBO; sandwich of bounds (SPG)               eubo, sandwich
    6   group mean (Dr. GRPO); z-score (GRPO)        group_mean, group_z_score
    6   stepwise advantage (EGSPO-SA)                stepwise_advantage
    6   leave-one-out; process reward; wd1's weights leave_one_out, progress_advantage,
                                                     softmax_contrast
    7   importance ratio; KL penalty, k1, k2, k3     log_ratio, kl_term
    8   policy gradient without a ratio              reinforce
    8   PPO's clip, and GSPO's                       ppo_clip
    8   self-normalisation (StableDRL)               self_normalized_weights
    8   unconditional clip (StableDRL)               self_normalized_clip
    8   DPPO: divergences; mask; loss                binary_divergence, topk_divergence,
                                                     trust_mask, dppo
    8   DRPO's weight and quadratic penalty          drpo
    8   truncated weights (CISPO); dual clip; SPO    truncated_is, dual_clip, spo
    8   verl's DPPO; MDPO; GDSD; BGPO                dppo_released, confident_clip,
                                                     regression, tangent
    9   means over tokens, responses, groups         aggregate, total_loss
    11  arcs; a control variate; threshold decoding  arc_plan, control_variate_plan,
                                                     threshold_logp

Notation

    B = G x N      sequences = prompts x generations, prompt-major: rows g*N .. g*N+N-1
                   answer prompt g
    P, L, V        prompt positions, response positions, vocabulary
    PL             positions of the network's input, P + L
    T              steps of the sampler
    K              masked states of a plan: the network is called K times a sequence
    hidden         True = the model sees [MASK] there
    keep           True = the token counts: up to and including the first EOS
    t, l           share of hidden positions, number of hidden positions
    n              number of positions an ELBO is about (its domain)
    logp           log-probability of a token, nats                       (K, B, L)
    ll             reduced log-likelihood, nats: (K, B, L) token, (K, B, 1) step,
                   (1, B, 1) sequence
    anchor         the ll that a ratio is taken against: of the sampler (behaviour), or
                   of the weights before the first update (old)
    ratio          exp(ll - anchor)
    adv            advantage, one a response (B,) or one a state (K, B)
    reward         (B,)
    beta           weight of the KL term
    cap, epsilon_low, epsilon_high    clipping

Other letters in a shape belong to their function alone: S states of a call, R positions
that go through the vocabulary head, M of several kinds. Where a function uses a letter
of the list for something else, its docstring says so.

Conventions. Losses are minimised. All randomness of an estimator lives in its ``Plan``
and comes from an explicit ``torch.Generator`` on the CPU, drawn for the whole global
batch. Given the plan, an estimator is a pure function, so its expectation is a finite
sum that a test can write down. What papers disagree on (standard deviation or not,
length normaliser, side of a clip, form of a KL) is a required keyword. Rewards and
anchors that carry a gradient are refused: there are no stop-gradient flags.
Numbers such as (2.3) tag the equations; notebooks and tests use the same tags, and
``python -m minidrl where 2.3`` finds one. "Accounts" of a paper are descriptions by
others: they are named as the source where the paper's own text could not be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

# ======================================================================== 1. What flows
#
# Two records are handed from step to step. A rollout says what the sampler wrote, and
# in which order. A plan says in which masked states an estimator looks at it.


@dataclass(frozen=True)
class Rollout:
    """What a sampler did, in full: the text, and the order in which its tokens
    appeared.

    ``unmask_step`` reproduces every state of a sampler that never re-masks: before step
    s the hidden positions are those with ``unmask_step >= s`` and those that were never
    revealed (-1). ``logp`` are the log-probabilities with which the revealed tokens
    were really drawn: at the sampling temperature, in the state before their step, and
    0 where nothing was revealed. ``records`` holds what else the method asked the
    sampler for: ``entropy`` of the distribution of each token, the ``topk_ids`` and
    ``topk_logp``, texts completed in ``one_step``; ``sampler.generate`` has them all
    (but ``solved``, the verifier's word, which the loop adds).
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

    @classmethod
    def of(
        cls,
        response: Any,
        *,
        prompt: Any = None,
        prompt_mask: Any = None,
        keep: Any = None,
        unmask_step: Any = None,
        logp: Any = None,
        num_generations: int = 1,
        sampler: Any = None,
        records: dict[str, Tensor] | None = None,
    ) -> Rollout:
        """A rollout that no sampler made, around responses (B, L): tensors or lists.

        Without more, there is no prompt, all tokens count, none was revealed by a
        recorded step (unmask_step -1, logp 0), and each response is a group of its own.
        A given prompt is all real tokens unless ``prompt_mask`` says otherwise. A
        field whose shape does not fit the responses raises a ValueError that names it.
        """
        response = torch.as_tensor(response)
        if response.ndim != 2:
            raise _refused("response", tuple(response.shape), "two dimensions (B, L)")
        width = 0 if prompt is None else torch.as_tensor(prompt).shape[-1]
        blank = response.new_zeros(len(response), width)
        never = torch.full_like(response, -1)
        zeros = torch.zeros(response.shape, device=response.device)
        return cls(
            _given("prompt", prompt, blank),
            _given("prompt_mask", prompt_mask, blank == 0),
            response,
            _given("keep", keep, never < 0),
            _given("unmask_step", unmask_step, never),
            _given("logp", logp, zeros),
            num_generations,
            sampler,
            records or {},
        )

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of each response that count, the first EOS included."""
        return self.keep.sum(-1)


@dataclass(frozen=True)
class Plan:
    """The K masked states in which an estimator looks at each sequence, and what it
    reads off there.

    hidden    what the model does not see, prompt included
    scored    the response positions whose log-probability is read (always hidden ones)
    weight    the estimator's weight of a state, 1/K of an average included
    valid     False = padding of a ragged plan: the network is not called for it
    step      replay plans: the step of the recorded trajectory whose state this
              is, from which its tokens were drawn
    targets   the tokens whose log-probability is read; None: those of the response
    block_length   staircase plans: state j M + m reads block m of the M blocks, with
              the earlier ones visible and the later ones hidden; the M states are one
              forward of a block-causal network. None: a state is a forward
    shift     added to the log-likelihood of the sequence: what a control variate knows
              without the network (2.12); None: nothing
    """

    hidden: Bool[Tensor, "K B PL"]
    scored: Bool[Tensor, "K B L"]
    weight: Float[Tensor, "K B"]
    valid: Bool[Tensor, "K B"]
    step: Int[Tensor, "K B"] | None = None
    targets: Int[Tensor, "K B L"] | None = None
    block_length: int | None = None
    shift: Float[Tensor, " B"] | None = None

    @classmethod
    def of(
        cls,
        scored: Any,
        *,
        hidden: Any = None,
        weight: Any = None,
        valid: Any = None,
        **rest: Any,
    ) -> Plan:
        """A plan written down by hand: its K states, each given by the positions it
        scores (K, B, L), tensors or lists.

        Without more, what is scored is hidden and nothing else, the weight of each
        state is 1, and the states that score anything are valid. ``rest`` are step,
        targets, block_length and shift. A field whose shape does not fit the states
        raises a ValueError that names it.
        """
        scored = torch.as_tensor(scored).bool()
        if scored.ndim != 3:
            raise _refused("scored", tuple(scored.shape), "three dimensions (K, B, L)")
        used = scored.any(-1)
        # A given ``hidden`` that is wider than the response begins with the prompt.
        extra = 0 if hidden is None else torch.as_tensor(hidden).shape[-1]
        seen = scored.new_zeros(*used.shape, max(0, extra - scored.shape[-1]))
        return cls(
            _given("hidden", hidden, torch.cat([seen, scored], -1)),
            scored,
            _given("weight", weight, torch.ones(used.shape, device=used.device)),
            _given("valid", valid, used),
            **rest,
        )

    @property
    def replay(self) -> bool:
        """True = these are the tokens that the sampler drew, in the states in which it
        drew them, so that its own logp can be the anchor."""
        return self.step is not None and self.targets is None

    @property
    def blocks(self) -> int:
        """M: states that share a forward."""
        return (
            1
            if self.block_length is None
            else self.scored.shape[-1] // self.block_length
        )

    @property
    def needed(self) -> Bool[Tensor, "J B"]:
        """The forwards that the network must do: of each state, or of each M states of
        a staircase."""
        return (self.valid & self.scored.any(-1)).unflatten(0, (-1, self.blocks)).any(1)

    @property
    def network_calls(self) -> int:
        """Sequences that go through the network, over all states."""
        return int(self.needed.sum())


def _given(field: str, value: Any, default: Tensor) -> Tensor:
    # A field of a rollout or plan made by hand: the default, or a value of its shape.
    if value is None:
        return default
    value = torch.as_tensor(value, device=default.device)
    if value.shape != default.shape:
        allowed = f"shape {tuple(default.shape)}"
        raise _refused(field, tuple(value.shape), allowed)
    return value.bool() if default.dtype == torch.bool else value


def declares(
    *,
    linear: bool = False,
    reinforce_on_policy: bool = False,
    needs_advantage: bool = True,
) -> Callable:
    """What is known of an objective, or of a function that gives it more to read. The
    tests hold each of them to it.

    linear                its loss (or what it adds) is linear in the features: pass 1
                          of the two-pass backward can be skipped
    reinforce_on_policy   where ll equals the anchor, whatever its value, the gradient
                          is that of ``reinforce``, up to a constant: 1/N for weights
                          that sum to 1 in a group, 2 psi / L for ``regression``
    needs_advantage       its gradient is 0 wherever adv is 0
    """

    def mark(function: Callable) -> Callable:
        function.linear = linear
        function.reinforce_on_policy = reinforce_on_policy
        function.needs_advantage = needs_advantage
        return function

    return mark


def _uniform(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> Tensor:
    # Drawn on the CPU in float64: the same plan on every device, and next to no ties
    # between ranks.
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(device)


def _in_strata(u: Float[Tensor, "K *s"]) -> Float[Tensor, "K *s"]:
    # The k-th of K uniform numbers, moved into the k-th of K equal parts of [0, 1).
    part = torch.arange(len(u), device=u.device).view(-1, *(1 for _ in u.shape[1:]))
    return (part + u) / len(u)


def _random_subset(
    noise: Float[Tensor, "*K L"],
    domain: Bool[Tensor, "*#K L"],
    count: Int[Tensor, "*K"],
) -> Bool[Tensor, "*K L"]:
    # The positions of the `count` smallest noises inside the domain: a uniformly random
    # subset of that size. Sorting twice gives each position its rank.
    rank = noise.masked_fill(~domain, torch.inf).argsort(-1).argsort(-1)
    return (rank < count[..., None]) & domain


def _after_visible_prompt(
    rollout: Rollout, masked: Bool[Tensor, "K B L"]
) -> Bool[Tensor, "K B PL"]:
    # The hidden positions of a state whose prompt is all visible.
    prompt = masked.new_zeros(*masked.shape[:2], rollout.prompt.shape[1])
    return torch.cat([prompt, masked], -1)


def _response_plan(
    rollout: Rollout,
    masked: Bool[Tensor, "K B L"],
    domain: Bool[Tensor, "B L"],
    weight: Float[Tensor, "K B"],
) -> Plan:
    # Positions outside the domain (after EOS) are hidden in every state and never
    # scored: they carry no information.
    hidden = _after_visible_prompt(rollout, masked | ~domain)
    return Plan(hidden, masked, weight.to(rollout.logp.dtype), masked.any(-1))


def _domain(rollout: Rollout, domain: str) -> Bool[Tensor, "B L"]:
    # The positions that an estimate is about: with "all", padding after EOS as well.
    if domain not in ("keep", "all"):
        allowed = "keep (up to the first EOS), all (padding after EOS included)"
        raise _refused("plan.domain", domain, allowed)
    return rollout.keep if domain == "keep" else torch.ones_like(rollout.keep)


def _refused(key: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{key}: got {value!r}; allowed {allowed}")


def _check_count(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: got {value!r}; allowed integers from {least}")


# =============================================================== 2. Plans: random masks
#
# The evidence lower bound of a masked diffusion model, in its two equivalent forms:
#
#     ELBO = E_{t ~ U(0,1)} E_{mask ~ Bernoulli(t)} [1/t sum_{i hidden} logp_i]  (time)
#          = E_{l ~ U{1..n}} E_{mask: l of n}       [n/l sum_{i hidden} logp_i]  (count)
#         <= log p
#
# log p here is the likelihood under the sampler that reveals one uniformly random
# position at a time. It is not the likelihood under the confidence-ordered samplers
# that usually produce rollouts. ELBO-based ratios are surrogates.


def mean_field_plan(
    rollout: Rollout, generator: torch.Generator, *, p_mask_prompt: float
) -> Plan:
    """(2.1) One state, the whole response hidden: ll = sum_i log p(y_i | everything
    hidden).

    This is the mean-field approximation by one-step unmasking, a likelihood proxy that
    costs one network call. Random prompt masking hides each prompt token with
    probability ``p_mask_prompt``, so that several updates on one rollout see different
    inputs.

    Source: diffu-GRPO (d1, arXiv 2504.12216, section 3.1 and code).
    Shapes: a plan of K = 1 state.
    Special cases: at p_mask_prompt = 0 this is the ELBO's integrand at t = 1, which is
    no bound on log p in general. It ignores every dependence between the response's
    tokens. A p_mask_prompt outside [0, 1) is refused.
    """
    if not 0 <= p_mask_prompt < 1:
        raise _refused("plan.p_mask_prompt", p_mask_prompt, "0 up to, not including, 1")
    # With nothing of the response to see, the input would be the same in every update.
    # Holes in the prompt make it another one. Padding is not text: it has no holes.
    noise = _uniform(tuple(rollout.prompt.shape), generator, rollout.prompt.device)
    prompt = (noise < p_mask_prompt) & rollout.prompt_mask  # (B, P)
    # t = 1: all of the response is hidden, and every token that counts is read at once.
    hidden = torch.cat([prompt, torch.ones_like(rollout.keep)], -1)[None]  # (1, B, P+L)
    scored = rollout.keep[None]  # (1, B, L)
    # One state stands for itself: no average over states, and 1/t = 1.
    weight = torch.ones_like(scored[..., 0], dtype=rollout.logp.dtype)
    return Plan(hidden, scored, weight, scored.any(-1))


def elbo_time_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_states: int,
    domain: str,
    min_t: float,
) -> Plan:
    """(2.2) ELBO in its time form: t ~ U(min_t, 1), each position hidden with
    probability t, weight 1/t.

    The negative of this evidence lower bound (ELBO) is the pre-training loss of masked
    (absorbing-state) diffusion, a weighted cross-entropy. Each state is a draw of the
    forward process; t, the timestep, is the mask ratio (linear noise schedule). It is a
    double Monte Carlo estimate: timestep sampling, and mask sampling at each timestep.

    Source: LLaDA (arXiv 2502.09992) and its pre-training code, which uses min_t = 1e-3.
    Shapes: a plan of K = num_states states, each with a time of its own.
    Special cases: the bias is min_t (ELBO - g(0)) to first order, where g(0) is n times
    the mean logp of a single hidden token. At min_t = 0 the estimate is unbiased, but
    its variance is infinite: a lone hidden token at t -> 0 gets the weight 1/t. Prefer
    (2.3). A min_t outside [0, 1) is refused.
    """
    _check_count("plan.num_states", num_states)
    if not 0 <= min_t < 1:
        raise _refused("plan.min_t", min_t, "0 up to, not including, 1")
    inside = _domain(rollout, domain)
    # The outer expectation: a time for each state, kept away from 0, where 1/t is
    # infinite.
    u = _uniform((num_states, inside.shape[0]), generator, inside.device)
    t = min_t + (1 - min_t) * u  # (K, B)
    # The inner one, the forward process up to t: each position is hidden by itself with
    # probability t.
    noise = _uniform((num_states, *inside.shape), generator, inside.device)
    masked = (noise < t[..., None]) & inside  # (K, B, L)
    # A position is hidden in a share t of the masks: 1/t makes it count once in the
    # mean. 1/K averages the states.
    return _response_plan(rollout, masked, inside, 1 / (num_states * t))


def elbo_count_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_states: int,
    domain: str,
    strata: bool,
) -> Plan:
    """(2.3) ELBO in its count form: l ~ U{1..n} positions hidden, chosen uniformly,
    weight n/l.

    ``strata`` is stratified sampling: the K counts of a sequence come from K equal
    strata of [0, 1), one uniform draw in each (floor arithmetic on float64, no rounding
    to even).

    Source: LLaDA, likelihood evaluation; one mask for each count, as VRPO (arXiv
    2505.19223) advises.
    Shapes: a plan of K = num_states states, each with a count of its own.
    Special cases: unbiased for every K, with strata too, because their mixture is
    uniform; strata never have a larger variance. The mean is that of (2.2), the
    variance finite and smaller. Law and weight belong together: n/l on the masks of
    (2.2) gives n/(n+1) of the ELBO. (2.2) with t integrated out is another law, l ~
    U{0..n} with the weight (n+1)/l, as in (2.4); here l = 0, which shows nothing, is
    never drawn. The ELBO is that of the any-order autoregressive sampler, and equals
    the exact log-likelihood when the model's conditionals come from one joint
    distribution.
    """
    _check_count("plan.num_states", num_states)
    inside = _domain(rollout, domain)
    n = inside.sum(-1)  # (B,)
    # Strata spread the K counts of a sequence evenly over 1..n, and so take away noise
    # that comes from how many positions are hidden.
    u = _uniform((num_states, inside.shape[0]), generator, inside.device)
    if strata:
        u = _in_strata(u)
    # floor(u n) is uniform on 0..n-1. The minimum is for a u that was rounded up to 1.
    count = torch.minimum((u * n).floor().long() + 1, n)  # (K, B)
    # Given the count, all masks of that size are equally likely.
    noise = _uniform((num_states, *inside.shape), generator, inside.device)
    masked = _random_subset(noise, inside, count)  # (K, B, L)
    # Such a mask holds each position with probability l/n: n/l undoes it.
    return _response_plan(rollout, masked, inside, n.double() / (num_states * count))


# Where the noise of an ELBO comes from. By the law of total variance, with Q times and
# m masks for each,
#
#     Var = Var_t(E[.|t]) / Q + E_t(Var(.|t)) / (Q m)
#
# VRPO (arXiv 2505.19223) concludes: given Q m, take m = 1. How large the parts are
# depends on the model. If what a hidden token costs changes with t and with little
# else, the first grows as L^2, the second as L log L, and in a long response the time
# or count has nearly all of the variance. If one token decides what all others cost,
# most of it is left to the masks at every length. GDPO goes further and draws no time
# at all: the integral over t is one-dimensional and smooth, which is what quadrature is
# for. The price is a bias where g(t) is no polynomial of low degree, for example where
# all the doubt sits at t -> 1 (texts with several modes).


def gauss_legendre(num_nodes: int) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    """(2.5) Nodes t and weights w of Gauss-Legendre quadrature on (0, 1): sum_q w_q
    g(t_q) = integral of g.

    Source: the classical rule; its use for the ELBO's integral over t is GDPO's (2.6).
    Shapes: Q = num_nodes nodes and as many weights, (Q,) each.
    Special cases: exact for polynomials of degree 2Q - 1. The ELBO's integrand g(t) is
    one of degree n - 1 at most, so Q >= n/2 nodes integrate it exactly. Otherwise the
    error is g's 2Q-th derivative somewhere times Q!^4 / ((2Q+1) (2Q)!^3).
    """
    _check_count("plan.num_nodes", num_nodes)
    # The rule is tabulated on (-1, 1), where weights sum to 2: moved to (0, 1).
    x, w = numpy.polynomial.legendre.leggauss(num_nodes)
    return torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)


COUNTS = ("bernoulli", "rounded", "floor")


def quadrature_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_nodes: int,
    masks_per_node: int,
    counts: str,
    domain: str,
) -> Plan:
    """(2.6) Semi-deterministic Monte Carlo ELBO: times t_q from (2.5), only the masks
    are random. K = nodes x masks.

    bernoulli    each position hidden with probability t, weight 1/t: GDPO, by accounts
    rounded      l = round(1 + t (n-1)) positions, weight n/l: the count that a hidden
                 position sees on average
    floor        l = floor(t n) positions, weight 1/t: the released code, whose n is L,
                 padding included (domain "all"), and which draws the masks of the old
                 value apart (refresh "independent"); a node with l = 0 is lost

    The ELBO is a double integral, over times and masks. SDMC is deterministic
    integration (quadrature) over times, and Monte Carlo over masks.

    Source: accounts and code of GDPO (group diffusion policy optimization, arXiv
    2510.08554).
    Shapes: a plan of K = Q m states, Q = num_nodes and m = masks_per_node, the m masks
    of a node one after the other.
    Special cases: the variance is sum_q w_q^2 Var(.|t_q) / m: of the two parts in the
    variance decomposition above, the law of total variance, that of the time is gone.
    With bernoulli the bias is the quadrature error alone (2.5). With floor a constant
    logp is estimated as sum_q w_q floor(t_q n) / (t_q n) of it, which is 0.72 of it at
    n = 8 and three nodes.
    """
    _check_count("plan.masks_per_node", masks_per_node)
    if counts not in COUNTS:
        raise _refused("plan.counts", counts, ", ".join(COUNTS))
    inside = _domain(rollout, domain)
    # The integral over times becomes a sum over fixed nodes. The mean over masks at a
    # node is left to chance: m states share its time and its weight.
    nodes = [x.repeat_interleave(masks_per_node) for x in gauss_legendre(num_nodes)]
    t, w = (x[:, None].to(inside.device) for x in nodes)  # (K, 1)
    w = w / masks_per_node
    noise = _uniform((len(t), *inside.shape), generator, inside.device)  # (K, B, L)
    n = inside.sum(-1)  # (B,)
    if counts == "bernoulli":
        # The integrand of the time form (2.2) as it stands.
        masked, scale = (noise < t[..., None]) & inside, (1 / t).expand(-1, len(n))
    else:
        # The time fixes how many positions are hidden; chance decides only which.
        count, scale = _count_at(t, n, counts)
        masked = _random_subset(noise, inside, count.long())
    return _response_plan(rollout, masked, inside, w * scale)


def _count_at(
    t: Float[Tensor, "K 1"], n: Int[Tensor, " B"], counts: str
) -> tuple[Float[Tensor, "K B"], Float[Tensor, "K B"]]:
    # How many of n positions are hidden at time t, and the weight of their sum.
    if counts == "floor":
        return (t * n).floor(), (1 / t).expand(-1, len(n))
    # A hidden position sees itself hidden, and of the other n - 1 a share t: 1 + t(n-1)
    # on average. Adding 1/2 before the floor rounds that to the nearest count.
    count = (1 + t * (n - 1) + 0.5).floor()
    return count, n / count


def block_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_states: int,
    block_length: int,
    p_mask: float,
) -> Plan:
    """(2.7) States as a block-wise sampler sees them: 1 .. m of the m tokens of one
    block hidden, later blocks all hidden.

    Prompt and earlier blocks are hidden token by token with probability ``p_mask``, and
    every hidden token up to EOS is scored. The blocks of a response's states are drawn
    without replacement while they last. The weight n / (K hidden) makes of each state
    the mean log-probability of a hidden token, times n.

    Source: the released code of SPG (arXiv 2510.09541, block-wise masking) and of
    StableDRL.
    Shapes: a plan of K = num_states states, each with a block of its own.
    Special cases: this is no bound on log p. It weighs the states by how a block-wise
    sampler passes through them. A p_mask outside [0, 1] is refused.
    """
    _check_count("plan.num_states", num_states)
    _check_count("plan.block_length", block_length)
    if not 0 <= p_mask <= 1:
        raise _refused("plan.p_mask", p_mask, "0 to 1")
    keep, device = rollout.keep, rollout.keep.device
    block = torch.arange(keep.shape[1], device=device) // block_length  # (L,)
    # Each state shows the sampler at work on one block, partly written: from one hidden
    # token, just before the block is finished, to all of them, where it begins.
    chosen = _distinct_blocks(rollout, generator, num_states, block_length)  # (K, B, 1)
    inside = keep & (block == chosen)  # (K, B, L)
    u = _uniform(tuple(inside.shape[:2]), generator, device)
    count = (u * inside.sum(-1)).floor().long() + 1  # (K, B)
    noise = _uniform((num_states, *keep.shape), generator, device)
    # The sampler would see all that came before. The code hides a little of it, so that
    # earlier blocks and prompt vary from state to state.
    dropped = _uniform((num_states, *keep.shape), generator, device) < p_mask
    prompt = _uniform((num_states, *rollout.prompt.shape), generator, device) < p_mask
    own = _random_subset(noise, inside, count)
    # What comes later is not written yet.
    earlier, later = (block < chosen) & dropped, block > chosen
    scored = keep & (own | earlier | later)
    # A mean over the hidden tokens, however many there are, scaled up to n tokens.
    weight = rollout.lengths.double() / (num_states * scored.sum(-1))
    hidden = torch.cat([prompt & rollout.prompt_mask, scored | ~keep], -1)
    return Plan(hidden, scored, weight.to(rollout.logp.dtype), scored.any(-1))


def _distinct_blocks(
    rollout: Rollout, generator: torch.Generator, num_states: int, block_length: int
) -> Int[Tensor, "K B 1"]:
    # The block of each state: those that hold kept tokens in a random order, and again
    # from the first where K is larger.
    used = (rollout.lengths - 1) // block_length + 1
    blocks = (rollout.keep.shape[1] - 1) // block_length + 1
    unused = torch.arange(blocks, device=used.device) >= used[:, None]
    noise = _uniform((len(used), blocks), generator, used.device)
    order = noise.masked_fill(unused, torch.inf).argsort(-1)  # unused blocks come last
    turn = torch.arange(num_states, device=used.device) % used[:, None]
    return order.gather(1, turn).T[..., None]


# A block-wise model defines p(y) = prod_m p(block m | prompt, blocks before m). Each
# factor has an ELBO of its own, in states that hide some of block m and all that
# follows. Where attention is block-causal, M such states, one a block, are one forward
# over [prompt; clean response; noisy response]: the staircase mask (4.3).


def block_elbo_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_states: int,
    domain: str,
    strata: bool,
) -> Plan:
    """(2.8) Sum over the sampler's blocks of the ELBO (2.3) of a block given those
    before it: num_states M states, M blocks.

    In each block by itself l ~ U{1..n_m} of its n_m positions are hidden, weight n_m /
    l. The M states of a draw, one for each block, share a forward.

    Source: BD3-LM (arXiv 2503.09573); accounts of StableDRL (arXiv 2603.06743).
    Shapes: a plan of num_states M states and num_states forwards; state j M + m is draw
    j of block m.
    Special cases: unbiased for that sum. The sum is at most log p of the sampler that
    finishes block after block, one random position at a time, except where an EOS cuts
    a block: its tail is hidden in all states, and the sum need not be a bound. One
    block of the whole length is (2.3). Blocks of one token are exact: left to right.
    """
    _check_count("plan.num_states", num_states)
    inside, block = _domain(rollout, domain), block_numbers(rollout)
    number = block.unique()[:, None, None]  # m = 0 .. M - 1, against rows and positions
    own, later = inside & (block == number), block > number  # (M, B, L), (M, 1, L)
    # From here on the count form (2.3), with each block in the place of the response.
    n = own.sum(-1)  # (M, B)
    u = _uniform((num_states, *n.shape), generator, n.device)
    if strata:
        u = _in_strata(u)
    count = torch.minimum((u * n).floor().long() + 1, n)  # (J, M, B)
    noise = _uniform((num_states, *own.shape), generator, n.device)
    masked = _random_subset(noise, own, count).flatten(0, 1)  # (J M, B, L)
    # A block past the end has no positions: count 0, no weight, and nothing scored.
    weight = n.double() / (num_states * count.clamp(min=1))
    plan = _response_plan(rollout, masked, inside, weight.flatten(0, 1))
    # Each factor conditions on the blocks before: those after are hidden, not scored.
    later = later.repeat(num_states, 1, 1).expand_as(masked)
    hidden = plan.hidden | _after_visible_prompt(rollout, later)
    return replace(plan, hidden=hidden, block_length=rollout.sampler.block_length)


def block_numbers(rollout: Rollout) -> Int[Tensor, " L"]:
    """The block of the sampler to which each response position belongs, from 0."""
    place = torch.arange(rollout.response.shape[1], device=rollout.response.device)
    return place // rollout.sampler.block_length


# Kin: ELBOs from masks that are drawn together, of ESPO and coupled-GRPO, and a mask
# that grows from update to update, of UniGRPO.


def complementary_plan(
    rollout: Rollout, generator: torch.Generator, *, num_states: int, domain: str
) -> Plan:
    """(2.4) ELBO from pairs (mask, complement): l ~ U{0..n}, weights (n+1)/l and
    (n+1)/(n-l), each pair averaged.

    Two complementary masks are antithetic: every token is scored exactly once in a
    pair.

    Source: ESPO (ELBO-based sequence-level policy optimization, arXiv 2512.03759,
    code); the pairing is coupled sampling of DiffuCoder (coupled-GRPO, arXiv
    2506.20639; its code is (2.9)).
    Shapes: a plan of K = num_states states, an even number; states 2j and 2j + 1 are a
    pair.
    Special cases: unbiased. The count must include 0 so that l and n - l have the same
    law; the weight n+1 repairs the mean. Per token the variance is never larger than
    that of two independent masks. For the sequence's sum there is no such guarantee: it
    gains where the mean logp moves steadily with the count, and loses on short
    irregular models. An odd num_states is refused.
    """
    _check_count("plan.num_states", num_states, 2)
    if num_states % 2:
        allowed = "even numbers (pairs of a mask and its complement)"
        raise _refused("plan.num_states", num_states, allowed)
    inside = _domain(rollout, domain)
    pairs, n = num_states // 2, inside.sum(-1)
    # 0..n, ends included: then the complement's size n - l has the law of l.
    u = _uniform((pairs, inside.shape[0]), generator, inside.device)
    count = (u * (n + 1)).floor().long()  # (K/2, B)
    noise = _uniform((pairs, *inside.shape), generator, inside.device)
    masked = _random_subset(noise, inside, count)  # (K/2, B, L)
    both = torch.stack([masked, inside & ~masked], 1).flatten(0, 1)  # (K, B, L)
    # l = 0 shows nothing and has 1/(n+1) of the draws: n+1 in the place of n makes up
    # for it. Its own weight multiplies an empty sum and only has to be finite.
    weight = (n + 1).double() / (num_states * both.sum(-1).clamp(min=1))
    return _response_plan(rollout, both, inside, weight)


def coupled_plan(
    rollout: Rollout, generator: torch.Generator, *, low: float, high: float
) -> Plan:
    """(2.9) Three states: everything hidden, a random mask S, its complement.

    Each token is scored twice, with weight 1/2 where everything is hidden and 1/(2r) in
    S, or 1/(2 (1-r)) in the complement. S holds each position with probability r ~
    U(low, high), one r for the batch. To be reduced at the level "position".

    Source: coupled sampling of coupled-GRPO (DiffuCoder, arXiv 2506.20639), paper and
    code: 0.2 to 0.8.
    Shapes: a plan of K = 3 states.
    Special cases: the weights of a token add up to more than 1 (to 9/8 or more with r
    from 0.2 to 0.8), so its ll is an estimate on a larger scale, and a ratio of it a
    power of one. Bounds other than 0 < low <= high < 1 are refused.
    """
    if not 0 < low <= high < 1:
        raise ValueError(f"plan.low: got {low} to {high}; allowed 0 < low <= high < 1")
    # The share of S, the same for the whole batch.
    r = low + (high - low) * float(_uniform((1,), generator, torch.device("cpu")))
    keep = rollout.keep
    chosen = _uniform(tuple(keep.shape), generator, keep.device) < r  # (B, L)
    # Everything hidden scores every token; S and its complement share them out.
    scored = torch.stack([keep, keep & chosen, keep & ~chosen])  # (3, B, L)
    # 1/r and 1/(1-r) undo how likely a token is in S or outside; 1/2 as it is scored
    # twice.
    twice = torch.tensor([1.0, 1 / r, 1 / (1 - r)], dtype=torch.float64)
    weight = twice.to(keep.device)[:, None] / 2
    # Positions behind EOS are masked like all others, and not scored.
    masked = torch.stack([torch.ones_like(keep), chosen, ~chosen])
    hidden = _after_visible_prompt(rollout, masked)
    weight = weight.to(rollout.logp.dtype).expand(-1, len(keep))
    return Plan(hidden, scored, weight, scored.any(-1))


def scheduled_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    min_t: float,
    domain: str,
    progress: float,
    schedule: torch.Generator | None = None,
) -> Plan:
    """(2.10) One mask whose share grows over the updates: t = t_0 + progress (1 - t_0).

    t_0 ~ U(min_t, 1), one for the batch; ``progress`` runs from 0 at the first update
    on a rollout to 1 at the last, where everything is hidden. This is a structured
    noising schedule. t_0 comes from ``schedule``, which is the same for all of these
    updates (None: from ``generator``). Each position of the domain is hidden with
    probability t and, if hidden, scored with weight 1.

    Source: UniGRPO (MMaDA, arXiv 2505.15809) as re-implemented in
    facebookresearch/igpo; the paper's own text was not read.
    Shapes: a plan of K = 1 state.
    Special cases: at progress = 1, with the domain "keep", it is (2.1) with no hole in
    the prompt. The weight is 1 at every t, so that the value is no estimate of the
    ELBO. A min_t outside [0, 1) is refused.
    """
    if not 0 <= min_t < 1:
        raise _refused("plan.min_t", min_t, "0 up to, not including, 1")
    inside = _domain(rollout, domain)
    # All updates on a rollout must agree where their schedule begins, but not on masks.
    u = float(_uniform((1,), schedule or generator, torch.device("cpu")))
    start = min_t + (1 - min_t) * u
    # The updates walk in equal steps from t_0 to 1, so that together they see the
    # response from lightly to fully masked.
    t = start + progress * (1 - start)
    masked = (_uniform(tuple(inside.shape), generator, inside.device) < t) & inside
    # (2.2) would weigh the sum with 1/t; here a hidden token counts once.
    one = torch.ones(1, len(inside), device=inside.device)
    return _response_plan(rollout, masked[None], inside, one)  # masked: (1, B, L)


# ========================================================== 3. Plans: trajectory replay
#
# Denoising is a Markov decision process: the state is the partly hidden text, the
# action reveals some tokens. For samplers whose choice of positions does not depend on
# the weights (random or fixed order) the log-probability of a step is exactly the sum
# of the revealed tokens' logp, and  grad J = E[ sum_s A_s grad log pi(step s) ]  is the
# exact policy gradient. Where positions are chosen by the entropy or the margin of a
# state's predictions, that holds wherever J is differentiable: the choice looks at no
# drawn token, and J jumps where it changes. For confidence-ordered samplers the choice
# of positions depends on the weights and the tokens, and the token-only score of the
# released code of EGSPO, d2 and TraceRL is biased (notebook 03). The missing factor is
# the feature (4.2), for threshold decoding (4.5).


def _last_deciding_step(rollout: Rollout) -> Int[Tensor, " B"]:
    # Once every kept token is revealed the reward is decided. Whether that is so can be
    # seen in the state before the step, so later steps have a score of conditional mean
    # zero: leaving them out is exact and saves variance and calls.
    return rollout.unmask_step.masked_fill(~rollout.keep, -1).max(-1).values


def record(rollout: Rollout, name: str) -> Tensor:
    """What the sampler recorded under a name; ValueError where it did not."""
    if name not in rollout.records:
        wanted = "the method must ask the sampler for it (needs)"
        raise ValueError(f"records: the rollout holds no record {name!r}; {wanted}")
    return rollout.records[name]


def num_steps(rollout: Rollout) -> int:
    """T, the steps of the sampler; without one, those that the trajectory has."""
    if rollout.sampler is None:
        return int(rollout.unmask_step.max()) + 1
    return rollout.sampler.num_steps


def _check_num_states(rollout: Rollout, num_states: int) -> None:
    _check_count("plan.num_states", num_states)
    if num_states > num_steps(rollout):
        allowed = f"up to the {num_steps(rollout)} steps of the sampler"
        raise _refused("plan.num_states", num_states, allowed)


def _step_entropy(rollout: Rollout, num_steps: int) -> Float[Tensor, "T B"]:
    # Summed over the tokens of a step, nats.
    step = rollout.unmask_step.clamp(min=0)
    entropy = record(rollout, "entropy").masked_fill(rollout.unmask_step < 0, 0)
    nothing = entropy.new_zeros(num_steps, step.shape[0])
    return nothing.scatter_add_(0, step.T, entropy.T)


def _choose(
    valid: Bool[Tensor, "T B"], num_states: int, generator: torch.Generator
) -> tuple[Int[Tensor, "K B"], Float[Tensor, " B"]]:
    # num_states of each response's valid steps without replacement, and the factor
    # (how many there were) / (how many were taken).
    noise = _uniform(tuple(valid.shape), generator, valid.device)
    order = noise.masked_fill(~valid, torch.inf).argsort(0)
    available = valid.sum(0)
    taken = available.clamp(min=1, max=num_states)
    return order[:num_states].sort(0).values, available.double() / taken


def replay_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_states: int | None,
    min_entropy: float,
) -> Plan:
    """(3.1) The states of the recorded trajectory; each scores the tokens that its step
    revealed.

    ``num_states`` None takes every step up to the one that decides the reward, with
    weight 1. An integer k takes k of these m steps of each trajectory, uniformly
    without replacement, with weight m/k (all, with weight 1, where m < k).
    ``min_entropy`` > 0 (nats, summed over the step's tokens; needs the record
    ``entropy``) leaves out the steps whose action was all but certain.

    Source: policy gradients of the denoising MDP (Markov decision process: a state is
    the partly hidden text, an action reveals tokens), by trajectory replay, e.g. d2,
    TraceRL, EGSPO.
    Shapes: a plan of K states, K the last deciding step of the batch plus 1, or
    num_states if that is less; ``valid`` is False where a response has fewer.
    Special cases: where the positions to reveal are known before the draw (random or
    fixed order) the score is exact; in confidence order it is biased, as said above.
    num_states keeps the mean of the sum over steps, at k/m of the cost. What
    min_entropy loses is at most 2 max|A| times the sum of the entropies left out (per
    unit of logit gradient); what remains is unbiased in random or fixed order.
    """
    # A ragged table of steps: all that the longest response needs, with those behind a
    # response's own end not valid.
    last = _last_deciding_step(rollout)
    every = torch.arange(int(last.max()) + 1, device=last.device)
    steps = every[:, None].expand(-1, last.shape[0])  # (T', B)
    valid = steps <= last
    # |grad log p| of a step is on average at most twice its entropy: a certain action
    # has almost no gradient, whatever its advantage.
    if min_entropy > 0:
        entropy = _step_entropy(rollout, int(rollout.unmask_step.max()) + 1)
        valid = valid & (entropy[: steps.shape[0]] >= min_entropy)
    scale = torch.ones_like(last, dtype=rollout.logp.dtype)
    # A sum over all m valid steps, estimated from k of them: m/k keeps its mean.
    if num_states is not None:
        _check_num_states(rollout, num_states)
        steps, scale = _choose(valid, num_states, generator)  # (K, B), (B,)
        valid = valid.gather(0, steps)
    return _replay_states(rollout, steps, valid, scale.to(rollout.logp.dtype))


def _replay_states(
    rollout: Rollout,
    steps: Int[Tensor, "K B"],
    valid: Bool[Tensor, "K B"],
    scale: Float[Tensor, " B"],
) -> Plan:
    # Scored is the action of the step; hidden is the state before it: what this step or
    # a later one reveals, and what none did.
    unmask = rollout.unmask_step[None]
    scored = (unmask == steps[..., None]) & valid[..., None]  # (K, B, L)
    masked = (unmask >= steps[..., None]) | (unmask < 0)
    hidden = _after_visible_prompt(rollout, masked)
    return Plan(hidden, scored, scale.expand(steps.shape), valid, step=steps)


# Most steps of a confidence-ordered sampler reveal tokens that were all but certain.
# They cost as many calls as the others and teach nothing: E|grad log p| of a
# categorical is at most twice its entropy (nats, per unit of logit gradient).


def entropy_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_states: int,
    shared: bool,
    weight: str,
) -> Plan:
    """(3.2) The K steps of the trajectory whose actions were most uncertain, in
    decreasing order of entropy.

    Without ``shared`` each trajectory has its own K steps. With it the steps are those
    of highest mean entropy in the batch, the same for all responses. ``weight`` of a
    state: sum = 1; mean = 1/K; token_mean = 1/(K tokens of the step), K also where a
    trajectory has fewer such steps. There is no rescaling by T/K. The rollout must hold
    the record ``entropy``.

    Source: entropy-guided step selection, by the abstract and code of EGSPO (arXiv
    2603.12554); the code selects per trajectory and averages.
    Shapes: a plan of K = num_states states; state 0 is the most uncertain step.
    Special cases: leaving out a fixed set of steps costs at most 2 Gamma max|A| times
    the sum of their expected entropies (nats), where Gamma is the largest gradient of a
    logit: so keep the most uncertain ones. But which steps a trajectory keeps depends
    on its actions: such a selection is biased even where that bound holds. ``shared``
    is all but fixed.
    """
    _check_num_states(rollout, num_states)
    if weight not in ("sum", "mean", "token_mean"):
        raise _refused("plan.weight", weight, "sum, mean, token_mean")
    last = _last_deciding_step(rollout)
    entropy = _step_entropy(rollout, num_steps(rollout))  # (T, B)
    # Steps after the reward is decided do not compete: their gradient has mean 0.
    decided = torch.arange(len(entropy), device=last.device)[:, None] > last
    # One ranking for all: it hardly depends on what a single trajectory did.
    if shared:
        mean = entropy.masked_fill(decided, 0).sum(1, keepdim=True) / len(last)
        entropy = mean.expand_as(entropy)
    # The bound is a sum over what is left out: it is least when the K largest stay.
    ranked = entropy.masked_fill(decided, -torch.inf)
    order = ranked.argsort(dim=0, descending=True, stable=True)[:num_states]  # (K, B)
    one = torch.ones_like(last, dtype=rollout.logp.dtype)
    # A trajectory of fewer than K deciding steps fills up with states that are skipped.
    plan = _replay_states(rollout, order, ~decided.gather(0, order), one)
    if weight == "sum":
        return plan
    tokens = plan.scored.sum(-1).clamp(min=1) if weight == "token_mean" else 1
    return replace(plan, weight=plan.weight / (num_states * tokens))


# The opposite economy: keep all tokens, look at fewer states. Between one state (mean
# field) and T states (exact) lies every compromise; its error is what the tokens of a
# segment tell about each other.


def merged_plan(rollout: Rollout, generator: torch.Generator, *, merge: int) -> Plan:
    """(3.3) The trajectory with every ``merge`` consecutive steps taken for one: fewer
    network calls, a coarser likelihood.

    A segment's tokens are all scored in the state before its first step.

    Source: code of TraceRL (trajectory-aware RL, arXiv 2509.06949: ``merge`` is the
    shrinkage parameter) and of d2 (arXiv 2509.21474, StepMerge).
    Shapes: a plan of K states, one for each segment of ``merge`` steps.
    Special cases: merge = 1 is (3.1), merge = T the mean field (2.1) of the revealed
    tokens; between them it is an estimate of the trajectory's likelihood between mean
    field and exact. It is not a replay, so the sampler's logp is no anchor for it: the
    sampler drew the later tokens of a segment knowing the earlier ones.
    """
    _check_count("plan.merge", merge)
    # Number the segments instead of the steps, and replay them as if they were steps.
    # The floor leaves -1, never revealed, at -1.
    steps = torch.div(rollout.unmask_step, merge, rounding_mode="floor")
    merged = replace(rollout, unmask_step=steps, sampler=None)
    plan = replay_plan(merged, generator, num_states=None, min_entropy=0.0)
    # The tokens were not drawn in these states: without a step, it is no replay.
    return replace(plan, step=None)


def prediction_plan(rollout: Rollout, generator: torch.Generator) -> Plan:
    """(3.4) The states of the trajectory, each with the completion that its step drew:
    all hidden positions are scored, targets from ``one_step_proposed``.

    The weight is L / (number of hidden positions). A completion is a sample: its
    revealed tokens are the step's, the others were drawn beside them and dropped.

    Source: code of MDPO (arXiv 2508.13148).
    Shapes: a plan of K states, as (3.1), with ``targets`` (K, B, L).
    Special cases: the scored text is the completion and not the response, so that each
    state can have a reward of its own (6.5).
    """
    plan = replay_plan(rollout, generator, num_states=None, min_entropy=0.0)
    # The action is the whole completion, not only the part of it that was kept.
    scored = plan.hidden[..., rollout.prompt.shape[1] :] & plan.valid[..., None]
    drawn = record(rollout, "one_step_proposed").transpose(0, 1)  # (T, B, L)
    # Early states complete many tokens and late ones few: each is a mean over its
    # tokens, on the scale of L of them.
    weight = scored.shape[-1] / scored.sum(-1).clamp(min=1).to(plan.weight)
    return replace(plan, scored=scored, targets=drawn[: len(scored)], weight=weight)


def block_replay_plan(rollout: Rollout, generator: torch.Generator) -> Plan:
    """(3.5) The states of (3.1) of a block-wise trajectory as a staircase: the j-th
    steps of all blocks share a forward.

    Source: TraceRL (arXiv 2509.06949, sliced training of block models), DiPO (arXiv
    2512.22234).
    Shapes: a plan of J M states and J forwards, J the steps of a block and M the
    blocks; state j M + m is step j of block m.
    Special cases: the log-probabilities are those of (3.1), for as many forwards as a
    block has steps, instead of one for each step of the response. Its score is exact or
    biased where that of (3.1) is.
    """
    last, width = _last_deciding_step(rollout), rollout.sampler.block_length
    # The steps that filled each block are consecutive: from its first to its final one.
    by_block = rollout.unmask_step.T.unflatten(0, (-1, width))  # (M, W, B)
    first, final = by_block.amin(1), by_block.amax(1)  # (M, B)
    depth = torch.arange(num_steps(rollout) // len(first), device=last.device)  # (J,)
    at_most = torch.arange(len(first), device=last.device)[:, None] * len(depth)
    first = first.where(first >= 0, at_most)  # a block that was never begun
    # In block-causal attention block m sees the finished blocks before it and nothing
    # after: its j-th state does not depend on what the others stand at, so the j-th
    # states of all blocks fit in one forward.
    steps = (first + depth[:, None, None]).flatten(0, 1)  # (J M, B)
    inside = steps <= final.minimum(last).repeat(len(depth), 1)
    one = torch.ones_like(last, dtype=rollout.logp.dtype)
    plan = _replay_states(rollout, steps, inside, one)
    return replace(plan, block_length=rollout.sampler.block_length)


# ========================================================================== 4. Features
#
# A loss touches the network only through small per-token tensors, its features.
# Everything after this section is algebra on them, and the two-pass backward
# needs to know nothing but them. That is why memory does not grow with the number of
# states: the features of all states fit anywhere, the network's activations exist for
# one micro-batch at a time.
#
# The logits of a state are needed at its scored positions only. With 126k tokens and
# 256 positions those of one sequence take 130 MB in float32: hidden states are selected
# before the vocabulary head, never after it, and go through it in parts.


def token_features(
    logits: Float[Tensor, "R V"],
    target: Int[Tensor, " R"],
    *,
    temperature: float,
    names: tuple[str, ...],
    topk_ids: Int[Tensor, "R M"] | None = None,
    reference_logits: Float[Tensor, "R V"] | None = None,
) -> dict[str, Float[Tensor, "R *M"]]:
    """(4.1) logp = log softmax(z / temperature)[target] and its kin, of R hidden
    positions.

    entropy      of softmax(z / temperature)
    topk_logp    log-probabilities of the M tokens ``topk_ids``                  (R, M)
    kl_ref       KL(policy || reference), exact over the vocabulary
    confidence   log softmax(z)[target] at temperature 1, detached: what (4.2) needs
    logit        z[target]: what (4.4) needs

    ``names`` says which of them; logp is always there. z are the network's logits,
    float32 at least, where [MASK] has -inf. All values are in nats.

    Source: LLaDA (arXiv 2502.09992): the logit at a hidden position predicts the token
    that belongs there.
    Shapes: logits (R, V) to values (R,), but topk_logp (R, M); R are the scored
    positions of all states of a call, one after the other.
    Special cases: at the sampling temperature, in a replayed state, logp is the
    sampler's own log-probability of the token.
    """
    log_p = (logits / temperature).log_softmax(-1)  # (R, V)
    values = {"logp": log_p.gather(-1, target[:, None])[:, 0]}  # (R,)
    # How undecided the network is: -E log p over the vocabulary.
    if "entropy" in names:
        values["entropy"] = -_expectation(log_p, log_p)
    # The present probabilities of tokens that the sampler found likeliest (8.8).
    if "topk_logp" in names:
        values["topk_logp"] = log_p.gather(-1, topk_ids)  # (R, M)
    # KL = E (log p - log p_ref), the sum over all tokens and not a sample of it (7.2).
    if "kl_ref" in names:
        log_ref = (reference_logits.detach() / temperature).log_softmax(-1)
        values["kl_ref"] = _expectation(log_p, log_p - log_ref)
    # The sampler compares confidences to choose positions. They enter (4.2) as a bound
    # on what others proposed, which is piecewise constant: no gradient.
    if "confidence" in names:
        confidence = token_confidence(logits).detach()
        values["confidence"] = confidence.gather(-1, target[:, None])[:, 0]
    if "logit" in names:
        values["logit"] = logits.gather(-1, target[:, None])[:, 0]
    return values


def _expectation(
    log_probs: Float[Tensor, "R V"], value: Float[Tensor, "R V"]
) -> Float[Tensor, " R"]:
    # sum_v p_v value_v. [MASK] has p = 0 and logp = -inf: its term is 0, and must not
    # turn the gradient into nan.
    return (log_probs.exp() * value.masked_fill(log_probs == -torch.inf, 0)).sum(-1)


def token_confidence(logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """log softmax at temperature 1, float32: what confidence orders compare."""
    return (logits - logits.logsumexp(-1, keepdim=True)).float()


# A block-causal network reads the states of all M blocks of a response in one forward
# over [prompt; clean response; noisy response], if a mask keeps each noisy block from
# seeing its own answer.


def block_causal(
    block: Int[Tensor, "#S X"], attention_mask: Bool[Tensor, "S X"] | None
) -> Bool[Tensor, "#S 1 X X"]:
    """Block-causal attention. [s, 0, q, k] True: q sees k, a real token of q's own
    block or of an earlier one; ``block`` numbers the tokens' blocks."""
    visible = block[:, None, :] <= block[:, :, None]
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, :]
    return visible[:, None]


def staircase_mask(
    prompt_mask: Bool[Tensor, "S P"], length: int, block_length: int, *, clean: str
) -> Bool[Tensor, "S 1 X X"]:
    """(4.3) Staircase attention. [s, 0, q, k] True: q sees k, in [prompt; clean
    response; noisy response]. b counts blocks.

        clean q,  clean k     b_k <= b_q (clean "block"), or k <= q (clean "causal")
        noisy q,  clean k     b_k < b_q: the stairs. With <= a noisy block would read
                              its own answer
        noisy q,  noisy k     b_k == b_q
        clean q,  noisy k     never

    It is the mask of a dual-stream input. The prompt sees itself from both sides, and
    nothing else; all of the response sees it. Padding of the prompt is seen by no one;
    its own rows are of no use, and finite. What the clean stream sees has to be what it
    saw when the sampler computed its cache.

    Source: BD3-LM, arXiv 2503.09573 ([noisy; clean] there; the order is immaterial
    where positions are right) and the code of TraceRL, arXiv 2509.06949, which cuts the
    prompt into blocks too, have the stream "block". Accounts of StableDRL, arXiv
    2603.06743, have "causal"; the paper itself was not read, and its released code has
    no staircase.
    Shapes: S states, X = P + 2 L tokens each.
    Special cases: rows without padding have P^2 + 2 L P + L (L + block_length) pairs
    (clean "block"). Blocks that do not divide the response, and an unknown clean
    stream, raise a ValueError.
    """
    if block_length < 1 or length % block_length:
        allowed = f"divisors of the response's length {length}"
        raise _refused("block_length", block_length, allowed)
    if clean not in ("block", "causal"):
        raise _refused("clean stream", clean, "'block', 'causal'")
    prompt_length, device = prompt_mask.shape[1], prompt_mask.device
    # Number the clean text by blocks. The prompt comes first as a whole: its tokens see
    # each other, and all of the response sees them.
    place = torch.arange(-prompt_length, length, device=device)
    place = place.clamp(min=-1)  # the prompt is one block, the one before 0
    block = place.div(block_length, rounding_mode="floor")  # (P+L,)
    rank, noisy = block if clean == "block" else place, block[prompt_length:]
    # Clean on clean: the finished text as the sampler's cache has it.
    context = rank[None, :] <= rank[:, None]  # (P+L, P+L)
    # Noisy on clean: block m is predicted from the finished blocks before it, strictly.
    stairs = block[None, :] < noisy[:, None]  # (L, P+L)
    # Noisy on noisy: its own hidden and visible positions, of this state alone.
    diagonal = noisy[None, :] == noisy[:, None]  # (L, L)
    # Clean on noisy: never, since finished text was computed without masks.
    upper = torch.cat([context, context.new_zeros(len(block), length)], 1)
    pattern = torch.cat([upper, torch.cat([stairs, diagonal], 1)])  # (X, X)
    real = pad(prompt_mask, (0, 2 * length), value=True)  # (S, X)
    return (pattern & real[:, None, :])[:, None]


def staircase_positions(
    prompt_mask: Bool[Tensor, "S P"], length: int
) -> Int[Tensor, "S X"]:
    """Positions for ``staircase_mask``: real tokens are counted, and noisy token i
    stands where clean token i stands."""
    prompt = (prompt_mask.long().cumsum(-1) - 1).clamp(min=0)
    place = torch.arange(length, device=prompt_mask.device)
    response = prompt_mask.sum(-1, keepdim=True) + place
    return torch.cat([prompt, response, response], 1)


# Kin: a term for the choice of positions, of Mask-Aware Policy Gradients.


def position_logp(
    own: Float[Tensor, "S L"],
    best: Float[Tensor, " R"],
    scored: Bool[Tensor, "S L"],
    passed: Bool[Tensor, "S L"],
) -> Float[Tensor, "S L"]:
    """(4.4) log of the share of each scored position i in a softmax with those passed
    over: s_i - log(exp s_i + sum_j exp c_j).

    s_i, ``own``, is the logit of the token placed. c_j, ``best``, is the largest logit
    of each of the R candidates ``passed`` over, in order. Both are at temperature 1 and
    carry a gradient. Tokens of one step do not compete.

    Source: Mask-Aware Policy Gradients (arXiv 2607.15200), as in the draft of its code;
    there all hidden positions compete, later blocks included, and a step is a segment
    of four. A related term is that of DCoLT (arXiv 2505.10446), a Plackett-Luce order
    term from a learned head.
    Shapes: S states of L positions, R candidates among them; out (S, L), 0 where
    nothing is scored.
    Special cases: 0 where no candidate was passed over. It is not the law of this
    sampler, whose choice is deterministic given the tokens proposed; (4.2) is.
    """
    # Each position is represented by its largest logit. Those that are no candidates
    # add exp(log 0) = 0 to the sum; the most negative number in place of -inf keeps the
    # gradient from becoming nan.
    nothing = own.new_full(own.shape, torch.finfo(own.dtype).min)  # log 0, but finite
    rivals = nothing.masked_scatter(passed, best).logsumexp(-1, keepdim=True)  # (S, 1)
    # The log of a softmax over two: the position itself, and all its rivals together.
    return (own - torch.logaddexp(own, rivals)) * scored


# ======================================================================== 5. Reductions
#
# "The ratio" of a paper is one number a token, a step or a sequence. The choice decides
# what a clip can see: a token ratio clips single words, a sequence ratio keeps or drops
# a whole response. For a step or a sequence the log-probabilities are summed first, so
# noise adds up as well; the length normaliser exists to keep the exponent small.

LEVELS = ("token", "position", "step", "state", "pair", "sequence")
# A number for each entry of ll, in one of the shapes of (5.1); (2, B, 1) where a
# sequence has a second ratio, that of its positions (4.4).
Entries = Float[Tensor, "*s"]
Advantage = Float[Tensor, "*K B"]


def reduce_logp(
    logp: Float[Tensor, "K B L"],
    plan: Plan,
    *,
    level: str,
    normalizer: Float[Tensor, " B"] | None,
) -> Float[Tensor, "K2 B L2"]:
    """(5.1) From token log-probabilities to the log-likelihoods whose ratio the
    objective uses.

    token      ll[k,b,i] = logp[k,b,i]                   a ratio a token     (K, B, L)
    position   ll[b,i]   = sum_k weight[k,b] logp        of all its states   (1, B, L)
    step       ll[k,b]   = sum_i logp[k,b,i]             a denoising step    (K, B, 1)
    state      ll[k,b]   = K weight[k,b] sum_i logp,
                           the estimate of state k alone
                           where weights hold 1/K        a mask              (K, B, 1)
    pair       ll[j,b]   = that of states 2j and
                           2j + 1 alone, see (2.4)       a mask pair       (K/2, B, 1)
    sequence   ll[b]     = sum_k weight[k,b] sum_i logp,
                           and the plan's shift          a response          (1, B, 1)

    This is what makes a token-level, step-level or sequence-level importance ratio: at
    "sequence" the whole response is one sequence-level action, as in ESPO.

    Source: what each paper calls its ratio, e.g. GSPO (arXiv 2507.18071) that of the
    sequence, divided by its length.
    Shapes: logp (K, B, L) to the shape in the table. ``normalizer`` (B,) divides ll,
    length normalisation: None for the log-likelihood itself, the length for the
    geometric mean per token.
    Special cases: a normaliser changes a ratio by the power 1/length, so it is never
    implied. An unknown level is refused, and pairs of an odd number of states.
    """
    if level not in LEVELS:
        raise _refused("reduction", level, ", ".join(LEVELS))
    ll = logp * plan.scored  # visible tokens have no log-probability: they add nothing
    # Tokens of one state were drawn, or are judged, independently given the state:
    # their log-probabilities add up.
    if level not in ("token", "position"):
        ll = ll.sum(-1, keepdim=True)  # (K, B, 1)
    # A sum over states is the estimator of the plan, and takes its weights. A single
    # token or step is an action of its own: its weight waits until losses are added.
    if level not in ("token", "step"):
        parts = _parts(plan, level)
        # Weights hold the 1/K of an average. For estimates from parts of the states it
        # has to be the average over each part alone: times the number of parts.
        ll = parts * (ll * plan.weight[..., None]).unflatten(0, (parts, -1)).sum(1)
    if plan.shift is not None and level == "sequence":
        ll = ll + plan.shift[:, None]
    return ll if normalizer is None else ll / normalizer[..., None]


def _parts(plan: Plan, level: str) -> int:
    # How many estimates of their own the K states make.
    states = len(plan.scored)
    if level == "pair" and states % 2:
        raise _refused("reduction", "pair", f"others: {states} states make no pairs")
    return {"state": states, "pair": states // 2}.get(level, 1)


def entries(
    plan: Plan, level: str
) -> tuple[Bool[Tensor, "K2 B L2"], Float[Tensor, "K2 B 1"]]:
    """Which entries of ll exist, and the weight with which each enters a sum (a
    sequence has absorbed its weights). Two ratios of a sequence share them."""
    whole = level in ("token", "position")
    present = plan.scored if whole else plan.scored.any(-1, keepdim=True)
    if level in ("token", "step"):
        return present, plan.weight[..., None]
    parts = _parts(plan, level)
    present = present.unflatten(0, (parts, -1)).any(1)
    weight = torch.ones_like(plan.weight[:parts, :, None])
    # The losses of single states are averaged; those of pairs are added up.
    return present, weight / parts if level == "state" else weight


# What should be lowered for a bad answer? Lowering a lower bound does not lower the
# likelihood below it. SPG therefore raises the ELBO of good answers and lowers an upper
# bound of bad ones. The bound it derives (from a Renyi divergence) drops constants,
# without gradient: the value of this "evidence upper bound" is no bound. A soft maximum
# over states remains: the gradient goes to the states in which the token was likely. A
# large beta leaves it to the likeliest one; beta -> 0 shares it by weight alone, while
# the value diverges.


def eubo(
    logp: Float[Tensor, "K B L"], plan: Plan, *, beta: float
) -> Float[Tensor, "1 B 1"]:
    """(5.2) ll_b = n/(beta h) sum_i log sum_k weight_k 1[i hidden in k] p_ik^beta over
    the h positions hidden in some state.

    Source: code of SPG (arXiv 2510.09541), "evidence upper bound"; weight = 1/(K t) as
    in the plans of section 2.
    Shapes: logp (K, B, L) to one number for each sequence (1, B, 1). beta is the
    exponent here, not the weight of a KL term.
    Special cases: it is no upper bound. The inequality behind it, the Renyi variational
    bound (from a Renyi divergence), holds up to a constant, and a mean of K states
    inside the logarithm is biased down (Jensen): it may lie below the ELBO of the same
    states. n is the sum of weight times hidden tokens: the length of the domain, where
    weights are those of counts. Gradient: every position that is hidden somewhere has
    the same total coefficient n/h, whatever its probability. Its states share that in
    proportion to weight_k p_ik^beta: more goes to those in which the token was
    likelier.
    """
    seen = plan.scored.any(0)  # (B, L): hidden in one state or more
    # log of weight_k p_ik^beta, with log 0 for the states that show the token. Where
    # all of them do, zeros stand in, so that no gradient becomes nan.
    terms = beta * logp + plan.weight[..., None].log()  # (K, B, L)
    terms = terms.masked_fill(~plan.scored, -torch.inf).masked_fill(~seen, 0)
    # The log of the weighted sum over states of p^beta, for each token; the ELBO has
    # the weighted sum of the log instead.
    total = terms.logsumexp(0).masked_fill(~seen, 0).sum(-1)  # (B,)
    # 1/beta brings the power back to the scale of log p; then a mean over the h tokens
    # that were seen, on the scale of the n there are.
    mean = total / beta / seen.sum(-1).clamp(min=1)
    n = (plan.weight * plan.scored.sum(-1)).sum(0)  # sum_k n/(K l_k) l_k
    return (n * mean)[None, :, None]


@declares()
def sandwich(
    ll: Entries,
    adv: Entries,
    feature: dict,
    plan: Plan,
    rollout,
    normalizer: Tensor,
    *,
    eubo_beta: float,
    omega: float,
) -> dict[str, Tensor]:
    """(5.3) score = ELBO where adv > 0, omega EUBO + (1 - omega) ELBO elsewhere: what
    the gradient flows through. (8.1), (8.4) and (8.5) take it in the place of ll.

    A lower bound is safe to raise and, so the argument goes, an upper bound is what to
    lower for negative samples, those with adv < 0 (but see (5.2)). The EUBO gets ll's
    normaliser.

    Source: SPG's code, sandwiched policy gradient; the code of StableDRL, which keeps
    its ELBO in the ratio.
    Shapes: sequence level; the score has the shape of ll (1, B, 1).
    Special cases: at omega = 0 the score is the ELBO for all.
    """
    upper = eubo(feature["logp"], plan, beta=eubo_beta) / normalizer[:, None]
    # Raise the bound below for a good answer; for a bad one lower a mixture of both.
    return {"score": torch.where(adv > 0, ll, omega * upper + (1 - omega) * ll)}


# ============================================================================ 6. Credit
#
# Without a value network the only baseline at hand is the other responses to the same
# prompt. Centring on the group's mean is not only variance reduction here: where the
# score of a trajectory is biased (confidence-ordered samplers, section 3), a constant
# added to all rewards would leak into the gradient, and centring removes most of it.


def _groups(reward: Float[Tensor, " B"], num_generations: int) -> Float[Tensor, "G N"]:
    # A row for each prompt: the rewards of its responses.
    if reward.requires_grad:
        raise ValueError("reward: carries a gradient; rewards are data, detach them")
    if num_generations < 1 or reward.shape[0] % num_generations:
        allowed = f"divisors of the {reward.shape[0]} sequences"
        raise _refused("num_generations", num_generations, allowed)
    return reward.unflatten(0, (-1, num_generations))


def _average(
    group: Float[Tensor, "*s N"], present: Bool[Tensor, "*s N"] | None = None
) -> Float[Tensor, "*s 1"]:
    # The mean over those present: exactly c where all are c, so that a group of equal
    # rewards is silent. A rounded mean of eight times 0.1 would leave each -7e-9.
    present = torch.ones_like(group) if present is None else present
    first, count = group[..., :1], present.sum(-1, keepdim=True).clamp(min=1)
    return first + ((group - first) * present).sum(-1, keepdim=True) / count


def group_mean(
    reward: Float[Tensor, " B"], num_generations: int
) -> Float[Tensor, " B"]:
    """(6.1) adv = reward - mean of its prompt's group, no standard deviation.

    This is the group-relative advantage. The group's mean is the baseline: variance
    reduction without a value network (critic). Without the standard deviation there is
    no question-level difficulty bias.

    Source: Dr. GRPO (arXiv 2503.20783); d1, GDPO, StableDRL (code).
    Shapes: one number a response, (B,) to (B,).
    Special cases: the gradient is (N-1)/N of the leave-one-out one (6.3), because the
    mean contains the sample itself. A group of equal rewards has exactly 0.
    """
    # What the other answers to the same prompt got says how hard the prompt is: only
    # the difference is owed to this answer.
    group = _groups(reward, num_generations)  # (G, N)
    return (group - _average(group)).flatten()


def group_z_score(
    reward: Float[Tensor, " B"], num_generations: int, *, ddof: int, eps: float
) -> Float[Tensor, " B"]:
    """(6.2) adv = (reward - group mean) / (group std + eps), std with N - ddof in the
    denominator.

    Source: the group-relative advantage of GRPO (group relative policy optimization,
    arXiv 2402.03300): reward normalisation by the standard deviation, ``scale_rewards``
    of TRL. Papers and code disagree on ``ddof`` (torch's default is 1) and ``eps``:
    both are required.
    Shapes: one number a response, (B,) to (B,).
    Special cases: a group of equal rewards has advantage 0, with eps above 0. A group
    of one has no std: a ddof of N or more is refused.
    """
    group = _groups(reward, num_generations)  # (G, N)
    if not 0 <= ddof < num_generations:
        allowed = f"0 up to num_generations - 1 = {num_generations - 1}"
        raise _refused("credit.ddof", ddof, allowed)
    # Every prompt gets the same scale: one that is solved once in eight counts as much
    # as one that is solved every other time.
    std = group.std(1, keepdim=True, correction=ddof)  # (G, 1)
    return ((group - _average(group)) / (std + eps)).flatten()


# One reward for the whole trajectory credits every step alike, although many of them
# changed nothing. The network offers an estimate of what a state was worth before its
# step: the argmax of all hidden positions at once, which the rollout's forward has
# computed anyway. It is exact at the last step if the completion is drawn instead of
# maximised; the greedy one is off by at most (range of rewards) (1 - probability of the
# greedy completion). It is a baseline, not a critic: differences of consecutive values
# would telescope, these do not.

SCHEDULES = ("constant", "linear")


def stepwise_advantage(
    reward: Float[Tensor, " B"],
    num_generations: int,
    step_reward: Float[Tensor, "K B"],
    valid: Bool[Tensor, "K B"],
    time: Float[Tensor, "K B"],
    *,
    lam: float,
    schedule: str,
    normalize: bool,
    center: str,
) -> Float[Tensor, "K B"]:
    """(6.4) adv_k = R_k - mean of R_k over the group,  R_k = ((1 + lam_k) reward -
    lam_k step_reward_k) / (1 + lam_k).

    ``step_reward`` is the reward of the text that the state before step k would become
    in one step (one-step denoising; the completion reward): an estimate of the state's
    value at no network call, where attention is bidirectional. lam_k = lam with
    ``schedule`` constant; lam_k = lam time with linear, where time = step / T.
    ``normalize`` false leaves the division out. Groups are centred rank by rank
    (members may stand at different steps there), over the valid ones. With ``center``
    reward only the reward is centred, and lam (reward - step_reward) is not.

    Source: code and accounts of EGSPO-SA (2603.12554).
    Shapes: one number for each state (K, B).
    Special cases: the completion reward is a control variate with coefficient lam/(1 +
    lam). Normalised, exact samplers stay unbiased for any lam where rank k is the same
    step for all; each trajectory's own most uncertain steps are not. Without the
    division the gradient of step k counts 1 + lam_k times: with a constant lam that is
    a scale, while the linear schedule then weighs late steps more, which is another
    direction. With the linear schedule, normalised, rewards that are all equal leave a
    trace where the members of a group stand at different steps. lam = 0 gives
    ``group_mean`` in the states that all members of the group have. Other words and
    lam < 0 are refused.
    """
    if schedule not in SCHEDULES:
        raise _refused("credit.schedule", schedule, ", ".join(SCHEDULES))
    if center not in ("rank", "reward"):
        raise _refused("credit.center", center, "rank, reward")
    if lam < 0:
        raise _refused("credit.lam", lam, "from 0")
    # What the state was worth before its step is no merit of the step: take off a share
    # of it, with the linear schedule more in late steps.
    lam_k = lam * time if schedule == "linear" else torch.full_like(time, lam)
    # reward + lam (reward - value): the final reward and the gain over the state. The
    # division leaves the reward's own coefficient at 1.
    total = 1 + lam_k if normalize else torch.ones_like(lam_k)
    R_k = ((1 + lam_k) * reward - lam_k * step_reward) / total  # (K, B)
    base = R_k if center == "rank" else reward / total  # whose mean is taken off
    # The baseline of (6.1), for each rank k by itself: responses that have fewer states
    # are absent from its mean.
    group, present = (x.unflatten(1, (-1, num_generations)) for x in (base, valid))
    return R_k - _average(group, present).expand_as(group).flatten(1, 2)


# Kin: leave-one-out, the process reward of MDPO, and the softmax weights of wd1.


def leave_one_out(
    reward: Float[Tensor, " B"], num_generations: int
) -> Float[Tensor, " B"]:
    """(6.3) adv = reward - mean of the other N - 1 rewards of its group.

    Source: the leave-one-out baseline of RLOO (arXiv 2402.14740).
    Shapes: one number a response, (B,) to (B,).
    Special cases: the baseline is independent of the sample, so the policy gradient
    stays unbiased. It equals N/(N-1) times ``group_mean``. A group of one is refused.
    """
    group = _groups(reward, num_generations)  # (G, N)
    if num_generations < 2:
        allowed = "from 2 for leave-one-out, which needs others"
        raise _refused("num_generations", num_generations, allowed)
    # r - mean of the others = r - (N mean - r)/(N - 1) = N/(N - 1) (r - mean).
    scale = num_generations / (num_generations - 1)
    return (scale * (group - _average(group))).flatten()


def progress_advantage(
    reward: Float[Tensor, " B"],
    num_generations: int,
    step_reward: Float[Tensor, "K B"],
    valid: Bool[Tensor, "K B"],
    time: Float[Tensor, "K B"],
    *,
    num_states: int,
    eps: float,
) -> Float[Tensor, "K B"]:
    """(6.5) A_k = (r_k - r_{k-1} + 1) + mean of the later rewards, z-scored over the
    group state by state; the others are 0.

    A process reward: r_k is the reward of the completion of state k in one step. After
    the last state there is the final ``reward`` only, which is its own where the step
    took its tokens from that completion. Only the ``num_states`` states of a group with
    the largest sum of |A| keep theirs.

    Source: MDPO (arXiv 2508.13148), code.
    Shapes: one number for each state (K, B).
    Special cases: without a KL term a state with advantage 0 costs the update no call.
    """
    rewards = step_reward * valid
    # What follows a state: how many states, and their mean reward. Nothing follows the
    # last one but the verdict on the finished text.
    following = _from_here_on(valid.to(reward.dtype)) - valid.to(reward.dtype)  # (K, B)
    later = (_from_here_on(rewards) - rewards) / following.clamp(min=1)
    later = torch.where(following > 0, later, reward)
    # What the step itself gained over the completion before it; the first gains all
    # of its reward. (The 1 is the code's; the z-score removes it.)
    before = torch.cat([torch.zeros_like(step_reward[:1]), step_reward[:-1]])
    value = (step_reward - before) + 1 + later
    # Compare with the same state of the prompt's other responses (6.2), by the standard
    # deviation with N - 1.
    value, present = (x.unflatten(1, (-1, num_generations)) for x in (value, valid))
    gap = (value - _average(value, present)) * present  # (K, G, N)
    others = (present.sum(2, keepdim=True) - 1).clamp(min=1)
    variance = gap.square().sum(2, keepdim=True) / others
    score = gap / (variance.sqrt() + eps)
    # Only the states whose advantages are largest, over the group, are worth a call.
    told = score.abs().sum(2, keepdim=True)  # how much a state tells about its group
    rank = told.argsort(dim=0, descending=True, stable=True).argsort(0)  # (K, G, 1)
    return (score * (rank < num_states)).flatten(1, 2)


def _from_here_on(x: Float[Tensor, "K B"]) -> Float[Tensor, "K B"]:
    # The sum over a state and all later ones.
    return x.flip(0).cumsum(0).flip(0)


def softmax_contrast(
    reward: Float[Tensor, " B"], num_generations: int, *, psi: float
) -> Float[Tensor, " B"]:
    """(6.6) adv = softmax(psi A) - softmax(-psi A) over the group, A = reward - mean.

    These are the weights of wd1, exponential in the advantage: what the best
    KL-regularised policy would give the samples, minus what the worst would, which
    pushes negative samples down. The loss is a weighted log-likelihood, ratio-free:
    (8.1), to be added up over the group ("group_sum").

    Source: wd1, weighted policy optimization (arXiv 2507.08838), read in its code,
    which has psi = 1.
    Shapes: one number a response, (B,) to (B,).
    Special cases: they sum to 0 in each group. For small A they are 2 psi A / N, and
    for large A they saturate.
    """
    group = _groups(reward, num_generations)
    # The policy that gains most reward for its KL distance weighs samples with
    # exp(psi A); the one that loses most, with exp(-psi A).
    logits = psi * (group - _average(group))  # (G, N)
    return (logits.softmax(1) - (-logits).softmax(1)).flatten()


# ===================================================================== 7. Ratios and KL
#
# A ratio of exact likelihoods turns samples of an old policy into samples of the new
# one. For a diffusion model three things can stand in the denominator: the sampler's
# own log-probability of each revealed token (behaviour), the old weights' estimate on
# the same masks (old, shared), or on other masks (old, independent). Only the first is
# what importance sampling means; the second measures how far the weights moved; the
# third is the second times the exponential of Monte-Carlo noise. With noise of standard
# deviation s in each of the two, a ratio at equal weights has mean exp(s^2), variance
# exp(2 s^2) (exp(2 s^2) - 1).


def log_ratio(
    ll: Float[Tensor, "*s"], anchor: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """(7.1) log ratio = ll - anchor, nats. The anchor is data.

    exp of it is the likelihood ratio. It is the importance ratio where ll and anchor
    are the log-probabilities of the whole action, and the anchor is the behaviour
    policy's: it then corrects for the staleness of off-policy samples, or for the
    train-inference mismatch between sampler and trainer. In random or fixed order the
    choice of positions cancels, and replayed tokens are enough. In confidence order the
    choice depends on the weights, and a ratio of tokens without (4.2) is no importance
    ratio.

    Source: PPO's ratio (arXiv 1707.06347); what stands in the denominator is each
    paper's choice.
    Special cases: 0 where both come from the same weights, plan and precision. With
    fresh masks for the anchor it is noise even then: the ratio's mean exceeds 1
    (Jensen) and its tail is log-normal. That is no importance weight of anything. An
    anchor with a gradient is refused.
    """
    if anchor.requires_grad:
        raise ValueError("anchor: carries a gradient; old values are data, detach them")
    # In logs, in which a small change of a small likelihood is not lost. The anchor is
    # fixed: only ll moves with the weights.
    return ll - anchor


def kl_term(
    ll: Float[Tensor, "*s"], ref: Float[Tensor, "*s"], *, form: str
) -> Float[Tensor, "*s"]:
    """(7.2) A penalty whose mean over samples of the policy estimates KL(policy ||
    reference), the KL to a reference model or to the old policy. u = ll - ref.

    k1   u                 value unbiased; the gradient's mean is 0: useless as a loss
    k2   u^2 / 2           value biased; gradient that of KL(policy || reference), the
                           reverse KL
    k3   exp(-u) - 1 + u   value unbiased and >= 0; gradient that of the other
                           direction, KL(reference || policy), the forward KL

    Source: Schulman's note on KL estimators (2020); k3 in GRPO, k2 in ESPO.
    Special cases: 0 where policy and reference agree. The gradients in the table are
    means over samples of the policy; they are tested by enumeration. A ref with a
    gradient, and another form, are refused.
    """
    if ref.requires_grad:
        raise ValueError("ref: carries a gradient; its values are data, detach them")
    u = ll - ref  # log policy - log reference: its mean under the policy is the KL
    if form not in ("k1", "k2", "k3"):
        raise _refused("kl.form", form, "k1, k2, k3")
    if form == "k1":
        return u
    # k2: the gradient is u grad ll, the score times log-ratio, which is grad KL. k3 is
    # k1 with exp(-u) - 1 added, of mean 0 under the policy, and is never negative.
    # expm1 keeps small u exact.
    return u.square() / 2 if form == "k2" else torch.expm1(-u) + u


# ======================================================================== 8. Objectives
#
# Each returns a loss per entry of ll, and which entries its clip or mask cut. ll,
# anchor and adv have one shape, of any level where a docstring names none. Judge an
# objective by its gradient: the value of a surrogate means nothing. On a single
# on-policy update every clip is inert: with one plan, credit and score (5.3),
# objectives differ only through reuse of a rollout and noise in the ratio.
# confident_clip is the exception: it weighs tokens even then.
#
# What multiplies -adv grad ll, at ratio r (pi and mu: the token's probability now and
# in the sampler; s: the sign of adv):
#
#     reinforce              1
#     ppo_clip               r, but 0 for s (r - 1) > epsilon   ratio, hard edge
#     self_normalized_clip   min(r, cap) / sum over the group   N times it: 1 on policy
#     dppo                   r, but 0 for s (pi - mu) > delta   probability, hard edge
#                            (form "tv"; others have a divergence for the shift)
#     drpo                   r (1 - s (pi - mu) / delta)        probability, turns back
#     truncated_is           clip(r, floor, cap)                never 0
#     dual_clip              as ppo_clip, and 0 for s < 0, r > bound
#     spo                    r (1 - s (r - 1) / epsilon)        ratio, turns back
#
# confident_clip, regression, tangent and dppo_released have factors of more than r:
# see there.


class Surrogate(NamedTuple):
    """What an objective returns, each of the shape of ll.

    loss     to be weighted and added up by (9.1)
    cut      True where clip or mask act: the gradient is 0, a weight stops at its cap,
             or a penalty turns it back
    bypass   True where adv < 0 and the ratio is above a clip that lets it through, with
             a coefficient that grows with the ratio
    """

    loss: Entries
    cut: Bool[Tensor, "*s"]
    bypass: Bool[Tensor, "*s"]


def _surrogate(
    loss: Entries,
    cut: Bool[Tensor, "*s"] | None = None,
    bypass: Bool[Tensor, "*s"] | None = None,
) -> Surrogate:
    never = torch.zeros_like(loss, dtype=torch.bool)
    cut, bypass = (never if where is None else where for where in (cut, bypass))
    return Surrogate(loss, cut, bypass)


def _check_above(name: str, value: float, least: float) -> None:
    if not value > least:
        raise ValueError(f"objective.{name}: got {value}; allowed above {least}")


@declares(linear=True, reinforce_on_policy=True)
def reinforce(
    ll: Entries,
    anchor: Entries | None,
    adv: Entries,
    num_generations: int,
    *,
    score: Entries | None = None,
) -> Surrogate:
    """(8.1) loss = -adv ll, or -adv score where the method scores something else (5.3).

    This is the score-function estimator of the policy gradient.

    Source: REINFORCE (Williams, 1992).
    Shapes: the anchor is not read, and may be None.
    Special cases: the gradient is -adv grad ll. It is exact for on-policy samples when
    ll is the log-probability of what was sampled. The loss is linear in ll: its
    coefficients do not depend on the current weights, so the two-pass backward skips
    its first pass.
    """
    # grad E[reward] = E[adv grad log p]: no ratio, since the samples are taken to be
    # the present policy's.
    return _surrogate(-adv * (ll if score is None else score))


@declares(reinforce_on_policy=True)
def ppo_clip(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """(8.2) loss = -min(ratio adv, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) adv).

    Source: the clipped surrogate objective of PPO (proximal policy optimization, arXiv
    1707.06347); GRPO (arXiv 2402.03300); unequal sides, asymmetric clipping:
    clip-higher, decoupled clip of DAPO (arXiv 2503.14476).
    Shapes: with sequence reduction and normalizer = length it is GSPO (group
    sequence policy optimization, arXiv 2507.18071).
    Special cases: the gradient is -adv ratio grad ll, and 0 where adv > 0 and ratio > 1
    + epsilon_high, or adv < 0 and ratio < 1 - epsilon_low. The clipping is conditional:
    with adv < 0 a large ratio passes, and its coefficient is unbounded. Equals
    ``reinforce`` in gradient at ratio 1. A log-ratio above 88 overflows in float32, and
    the run stops.
    """
    # ratio adv has the policy gradient of samples from the anchor's policy.
    ratio = log_ratio(ll, anchor).exp()
    # The clipped one is constant outside the interval. The minimum takes it only where
    # it is the more pessimistic: where the ratio has moved far in the way adv wants.
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    above, below = ratio > 1 + epsilon_high, ratio < 1 - epsilon_low
    cut = ((adv > 0) & above) | ((adv < 0) & below)
    loss = -torch.minimum(ratio * adv, clipped * adv)
    # A bad answer that became likelier moved the wrong way: it passes, at any size.
    return _surrogate(loss, cut, (adv < 0) & above)


def self_normalized_weights(
    log_ratios: Entries, num_generations: int, *, log_cap: float
) -> Entries:
    """(8.3) w_j = min(ratio_j, cap) / sum over the prompt's group of min(ratio_i, cap).

    This is self-normalised importance sampling (SNIS) with clipped weights, in log
    space.

    Source: abstract and code of StableDRL (arXiv 2603.06743), unconditional clipping
    and self-normalisation; the formula by accounts. The code takes the softmax over the
    rows of one call, which mixes prompts when a call holds several; here it never
    leaves the group.
    Shapes: sequence level, (1, B, 1) to (1, B, 1).
    Special cases: where all ratios are equal, or all above the cap, w = 1/N.
    """
    # Every ratio is capped, whatever the sign of its advantage. A softmax of logs is
    # the quotient of (8.3), and does not overflow where a ratio would.
    capped = log_ratios.clamp(max=log_cap).unflatten(1, (-1, num_generations))
    return capped.softmax(2).flatten(1, 2)  # softmax over N of (1, G, N, 1)


@declares(reinforce_on_policy=True)
def self_normalized_clip(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    cap: float,
    score: Entries | None = None,
) -> Surrogate:
    """(8.4) loss = -w adv score, w the detached weights (8.3), score = ll or (5.3).

    Source: as (8.3), unconditional clipping: by accounts of the paper to [1 - eps, 1 +
    eps] with eps = 5, which is the cap 6, as a ratio is positive; the released code
    caps at 5.
    Shapes: sequence level only, (1, B, 1); to be summed over a group, not averaged.
    Special cases: the gradient is -w adv grad score, over the group a convex
    combination, so bounded by max |adv| |grad score| whatever the ratios: they make no
    gradient spikes. Clipped samples still learn (PPO gives them 0). No gradient flows
    through ratio or normaliser. cap = inf is self-normalised importance sampling, where
    one outlier takes all the weight. The cap bounds magnitude, not concentration: one
    weight may still go to 1. Fresh masks in long responses can make the log-ratios of
    sequences noise of dozens of nats: half of the weights are then capped, the others
    nothing, and what the policy changed hardly shows in them (notebook 06). Those of
    token means spread less. A cap of 0 or less is refused.
    """
    _check_above("cap", cap, 0)
    # Importance weights of samples from the anchor's policy. They are data: the
    # gradient is that of a weighted log-likelihood, and flows through the score alone.
    log_ratios, log_cap = log_ratio(ll.detach(), anchor), math.log(cap)
    weights = self_normalized_weights(log_ratios, num_generations, log_cap=log_cap)
    # A weighted mean over the group in place of 1/N sum: the weights sum to 1, so a
    # factor that all ratios of a group share cancels.
    loss = -weights * adv * (ll if score is None else score)
    return _surrogate(loss, log_ratios > log_cap)


# Trust regions by divergence. mu = exp(anchor) is the probability with which the
# sampler drew the token, pi = exp(ll) the present one. A ratio clip allows a shift |pi
# - mu| of epsilon mu: next to nothing for a rare token, far too much for a likely one.
# A bound on the divergence allows every token the same shift. These objectives need
# true token probabilities of the sampler: replay plans, token level, the sampling
# temperature, behaviour anchors.


def _divergence(
    mu: Float[Tensor, "*s M"], pi: Float[Tensor, "*s M"], form: str
) -> Float[Tensor, "*s"]:
    # Of two distributions over the last axis. Probabilities of 0, which certain tokens
    # leave for the rest, stay finite.
    if form not in ("tv", "kl"):
        raise _refused("form", form, "tv, kl")
    if form == "tv":
        return (pi - mu).abs().sum(-1) / 2
    tiny = torch.finfo(pi.dtype).tiny
    return torch.special.xlogy(mu, mu.clamp(min=tiny) / pi.clamp(min=tiny)).sum(-1)


def binary_divergence(ll: Entries, anchor: Entries, *, form: str) -> Entries:
    """(8.7) Divergence of (mu, 1 - mu) and (pi, 1 - pi): the token against all others.

    tv   |pi - mu|, binary total variation
    kl   mu log(mu/pi) + (1 - mu) log((1 - mu)/(1 - pi)), binary KL, nats

    Source: DPPO (arXiv 2602.04879, eq. 13 and 15), Binary-TV and Binary-KL.
    Shapes: token level, (K, B, L).
    Special cases: detached, no gradient. Both are at most the divergence of the full
    distributions (data processing), and may be far below: of 1,000 equally likely
    tokens let half double and half vanish, then TV is 0.5 and the binary TV of every
    token 0.001. tv <= sqrt(kl / 2) (Pinsker). Another form is refused.
    """
    # All other tokens are taken for one. expm1 keeps 1 - p exact where p is almost 1.
    token = torch.stack([ll.detach().exp(), -torch.expm1(ll.detach())], -1)  # (.., 2)
    drawn = torch.stack([anchor.exp(), -torch.expm1(anchor)], -1)
    return _divergence(drawn, token, form)


@declares()
def topk_divergence(
    ll: Entries,
    adv: Entries,
    feature: dict,
    plan: Plan,
    rollout: Rollout,
    normalizer: Tensor,
    *,
    form: str,
) -> dict[str, Tensor]:
    """(8.8) Divergence over the sampler's M likeliest tokens, the drawn one, and the
    rest.

    tv   sum |pi_a - mu_a| / 2          kl   sum mu_a log(mu_a / pi_a), nats

    Source: DPPO (arXiv 2602.04879), eq. 14 and 16: Top-K TV and Top-K KL.
    Shapes: token level, (K, B, L). The rollout must hold the records ``topk_ids`` and
    ``topk_logp``.
    Special cases: detached, no gradient. Its value is between (8.7) and the full
    divergence. Where the drawn token is not among the M it is an item of its own (the
    released code puts it in place of the M-th). Another form is refused.
    """
    # The items: M listed tokens, the drawn one if it is not listed, and all others.
    listed = (record(rollout, "topk_ids") == rollout.response[..., None]).any(-1)
    drawn = (~listed).expand(ll.shape)[..., None]  # counts on its own where not listed
    # mu: as the sampler recorded them. pi: the same tokens under the present weights.
    log_mu = record(rollout, "topk_logp").expand_as(feature["topk_logp"])
    mu = _with_rest(log_mu, rollout.logp.expand_as(ll), drawn)  # (K, B, L, M+2)
    pi = _with_rest(feature["topk_logp"].detach(), feature["logp"].detach(), drawn)
    return {"divergence": _divergence(mu, pi, form)}


def _with_rest(
    topk_logp: Float[Tensor, "K B L M"],
    logp: Float[Tensor, "K B L"],
    own: Bool[Tensor, "K B L 1"],
) -> Float[Tensor, "K B L M2"]:
    # Probabilities of the M tokens, of the drawn one (0 where it is among them), of the
    # rest.
    p = torch.cat([topk_logp.exp(), logp[..., None].exp() * own], -1)
    return torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1).clamp(min=0)


def trust_mask(
    log_ratios: Entries, adv: Entries, outside: Bool[Tensor, "*s"]
) -> Bool[Tensor, "*s"]:
    """(8.9) False where the policy is outside its trust region and would move further
    away.

    That is adv > 0 with ratio > 1, or adv < 0 with ratio < 1: an asymmetric mask, the
    way back is never barred.

    Source: DPPO (arXiv 2602.04879, eq. 12). With ``outside`` from (8.7) it is DPPO's
    Binary-TV mask or Binary-KL mask, from (8.8) its Top-K mask.
    Special cases: PPO's clip is the case outside = |ratio - 1| > epsilon.
    """
    # adv says which way the update pushes, log ratio where the policy stands.
    return ~(outside & (torch.sign(adv) * log_ratios > 0))


@declares(reinforce_on_policy=True)
def dppo(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    delta: float,
    form: str | None,
    divergence: Entries | None = None,
) -> Surrogate:
    """(8.10) loss = -ratio adv M, M the detached mask (8.9) with outside = divergence >
    delta.

    The divergence is (8.7) of this form, or (8.8) where the method supplies it; form is
    then None.

    Source: DPPO, divergence proximal policy optimization (divergence PPO, arXiv
    2602.04879, eq. 12): the trust region as a mask.
    Shapes: token level, replay plans.
    Special cases: the gradient is -adv ratio M grad ll. With form tv, a total variation
    trust region, it is PPO's with epsilon = delta / mu for each token. A delta of 0 or
    less is refused, and a form beside a divergence.
    """
    _check_above("delta", delta, 0)
    # How far the distribution at this position has moved since the token was drawn.
    if divergence is None:
        divergence = binary_divergence(ll, anchor, form=form)
    elif form is not None:
        raise _refused("objective.form", form, "None: the row has extra.form")
    u = log_ratio(ll, anchor)
    # The mask takes the clip's place, and is data: only the ratio has a gradient.
    inside = trust_mask(u.detach(), adv, divergence > delta)
    return _surrogate(-u.exp() * adv * inside, ~inside)


@declares(reinforce_on_policy=True)
def drpo(
    ll: Entries, anchor: Entries, adv: Entries, num_generations: int, *, delta: float
) -> Surrogate:
    """(8.13) loss = -(ratio adv - |adv| mu (ratio - 1)^2 / (2 delta)).

    Source: DRPO, Divergence Regularized Policy Optimization (arXiv 2606.09821, eq. 8
    and 9 as its code quotes them): a smooth, advantage-weighted quadratic regularizer
    in place of the mask, a smooth penalty for a hard edge.
    Shapes: token level, replay plans.
    Special cases: the gradient is -adv ratio w grad ll, w = 1 - sign(adv) (pi - mu) /
    delta: a straight line in pi, 1 on policy, 0 at the boundary mu + sign(adv) delta of
    DPPO-tv, corrective beyond. It is SPO (8.12) with epsilon = delta / mu for each
    token, and penalises, in expectation, the squared distance of the distributions.
    |w - 1| <= 1/delta; the coefficient ratio w has no bound (1/mu). The boundary is a
    probability only if mu <= 1 - delta (adv > 0) or mu >= delta (adv < 0): never for
    delta >= 1. At delta = 12.5, that of the authors' code, w stays within 0.92 and 1.08
    and nothing is ever turned back. A delta of 0 or less is refused.
    """
    _check_above("delta", delta, 0)
    ratio, mu, pi = log_ratio(ll, anchor).exp(), anchor.exp(), ll.detach().exp()
    # mu (ratio - 1)^2 = (pi - mu)^2 / mu: with the token drawn with probability mu, its
    # mean is the sum of (pi - mu)^2. |adv| makes the boundary the same for every adv.
    penalty = adv.abs() * mu * (ratio - 1).square() / (2 * delta)
    # Cut means here: beyond the boundary, where the weight has changed its sign.
    return _surrogate(-(ratio * adv - penalty), torch.sign(adv) * (pi - mu) > delta)


# Kin: other ways to weigh, to clip and to penalise, and two objectives that are built
# otherwise: a regression (GDSD) and a bound of the ratio (BGPO).


@declares(reinforce_on_policy=True)
def truncated_is(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    floor: float,
    cap: float,
    score: Entries | None = None,
) -> Surrogate:
    """(8.5) loss = -w adv score, w = clip(ratio, floor, cap) detached.

    Source: truncated importance sampling (TIS: floor 0, cap 2 to 5); CISPO (arXiv
    2506.13585, cap 1 + epsilon_high; verl's code has the floor 1 - epsilon_low as
    well); StableDRL's clip without its normaliser.
    Special cases: the gradient is -w adv grad score; it is never cut to 0, and w is at
    most cap. cap = inf, floor = 0 gives the gradient of ratio adv. Other bounds than 0
    <= floor < cap are refused.
    """
    if not 0 <= floor < cap:
        got = f"floor {floor}, cap {cap}"
        raise ValueError(f"objective: got {got}; allowed 0 <= floor < cap")
    # The weight of a sample from another policy, cut to bound its variance. As data it
    # multiplies the gradient, and a cut weight still teaches; PPO's clip would silence
    # the sample.
    ratio = log_ratio(ll.detach(), anchor).exp()
    loss = -ratio.clamp(floor, cap) * adv * (ll if score is None else score)
    return _surrogate(loss, (ratio > cap) | (ratio < floor))


@declares(reinforce_on_policy=True)
def dual_clip(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    epsilon_low: float,
    epsilon_high: float,
    bound: float,
) -> Surrogate:
    """(8.6) PPO's loss (8.2), where adv < 0 at most -bound adv.

    Source: dual-clip PPO (arXiv 1912.09729); verl's default with bound 3.
    Special cases: the gradient is that of (8.2), and 0 where adv < 0 and ratio > bound:
    the bypass of the conditional clip ends at bound. A bound of 1 or less is refused.
    """
    _check_above("bound", bound, 1)
    clips = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high}
    loss, cut, bypass = ppo_clip(ll, anchor, adv, num_generations, **clips)
    # The loss of a bad answer grows with its ratio without end. Beyond the bound it is
    # a constant, and no longer pulls.
    beyond = (adv < 0) & (log_ratio(ll, anchor).exp() > bound)
    loss = torch.where(adv < 0, torch.minimum(loss, -bound * adv), loss)
    return _surrogate(loss, cut | beyond, bypass & ~beyond)


@declares(reinforce_on_policy=True)
def dppo_released(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    delta: float,
    form: str,
    cap: float,
) -> Surrogate:
    """(8.11) loss = -w adv ll, w = min(ratio, cap) M detached.

    Source: verl (dppo_tv, dppo_kl), cap 20.
    Shapes: token level, replay plans.
    Special cases: its value is another than that of (8.10), its gradient the same below
    the cap. A delta of 0 or less is refused.
    """
    _check_above("delta", delta, 0)
    # grad ratio = ratio grad ll: a detached ratio times ll has the gradient of (8.10),
    # and the cap bounds it without silencing the token.
    u = log_ratio(ll.detach(), anchor)
    inside = trust_mask(u, adv, binary_divergence(ll, anchor, form=form) > delta)
    weights = u.exp().clamp(max=cap) * inside
    return _surrogate(-weights * adv * ll, ~inside | (u.exp() > cap))


@declares(reinforce_on_policy=True)
def spo(
    ll: Entries, anchor: Entries, adv: Entries, num_generations: int, *, epsilon: float
) -> Surrogate:
    """(8.12) loss = -(ratio adv - |adv| (ratio - 1)^2 / (2 epsilon)).

    Source: SPO, simple policy optimization (arXiv 2401.16025).
    Special cases: the gradient is -adv ratio w grad ll, w = 1 - sign(adv) (ratio - 1) /
    epsilon: a straight line in the ratio, 0 at 1 + sign(adv) epsilon, corrective
    beyond. It is unbounded: w = -494 for a token that went from 0.0001 to 0.01 (epsilon
    0.2). It penalises, in expectation, the chi-square divergence. An epsilon of 0 or
    less is refused.
    """
    _check_above("epsilon", epsilon, 0)
    ratio = log_ratio(ll, anchor).exp()
    # A parabola in the ratio whose top is at PPO's boundary: instead of letting go
    # there, the gradient fades before it and pulls back beyond.
    penalty = adv.abs() * (ratio - 1).square() / (2 * epsilon)
    return _surrogate(-(ratio * adv - penalty), torch.sign(adv) * (ratio - 1) > epsilon)


@declares()
def confident_clip(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """(8.14) PPO's loss (8.2), each token weighted by exp(anchor): its old probability.

    Source: code of MDPO (arXiv 2508.13148): predicted tokens weighted by confidence.
    Shapes: token level.
    Special cases: on policy the gradient is that of ``reinforce`` times the token's
    probability, so that it is not the policy gradient.
    """
    clips = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high}
    loss, cut, bypass = ppo_clip(ll, anchor, adv, num_generations, **clips)
    # A completion (3.4) also holds guesses that were dropped: the less likely a token
    # was, the less it counts.
    return Surrogate(anchor.exp() * loss, cut, bypass)


@declares(linear=True)
def response_length(
    ll, adv, feature, plan: Plan, rollout: Rollout, normalizer
) -> dict[str, int]:
    """The padded length L, for objectives that need it."""
    return {"length": rollout.keep.shape[1]}


@declares(reinforce_on_policy=True, needs_advantage=False)
def regression(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    psi: float,
    epsilon_low: float,
    epsilon_high: float,
    length: int,
) -> Surrogate:
    """(8.15) loss = (clip(u, log(1 - epsilon_low), log(1 + epsilon_high)) / L - psi
    adv)^2.

    This is a regression of the log-ratio on the advantage, u = ll - anchor of one mask
    pair. The best KL-regularised policy has u / L = psi adv - log(Z) / L, Z = mean
    exp(psi L adv) >= 1; the code drops Z.

    Source: code of GDSD (arXiv 2605.29398).
    Shapes: level "pair", (K/2, B, 1).
    Special cases: on policy the gradient is -2 psi adv grad ll / L. It is 0 where u of
    the whole response is beyond the clip, although it is divided by L later.
    """
    u = log_ratio(ll, anchor)
    # No sample is weighed: the log-ratio of each position is drawn towards psi adv, and
    # at an advantage of 0 back to the anchor.
    low, high = math.log(1 - epsilon_low), math.log(1 + epsilon_high)
    loss = (u.clamp(low, high) / length - psi * adv).square()
    return _surrogate(loss, (u < low) | (u > high))


@declares(reinforce_on_policy=True)
def tangent(
    ll: Entries,
    anchor: Entries,
    adv: Entries,
    num_generations: int,
    *,
    epsilon_low: float,
    epsilon_high: float,
    bound: float,
) -> Surrogate:
    """(8.16) PPO's dual clip (8.6) of a bound on adv ratio that is a mean over masks.

    d = ll - anchor of one mask. In the place of the ratio stands 1 + d where adv > 0
    (the tangent of exp, its first-order Taylor expansion), exp(d) elsewhere (Jensen's
    inequality). The mean over the masks, taken outside, is a lower bound of adv
    exp(mean d): each term has one mask and can be back-propagated by itself, at
    constant memory (memory-efficient).

    Source: by accounts BGPO, boundary-guided policy optimization (arXiv 2510.11683);
    clip and dual clip as in a re-implementation (DARE), its own code was not read.
    Shapes: levels "state" (K, B, 1) and "pair" (K/2, B, 1).
    Special cases: value and gradient are those of the ratio on policy. A bound of 1 or
    less is refused.
    """
    _check_above("bound", bound, 1)
    d = log_ratio(ll, anchor)
    # adv exp(mean d) couples all masks of a response. For adv > 0 exp lies above its
    # tangent at 0; for adv < 0 exp(mean d) <= mean exp(d). Either way adv times the
    # stand-in, averaged over masks, is at most adv times the ratio.
    ratio = torch.where(adv > 0, 1 + d, d.exp())
    # From here on (8.6), with the stand-in for the ratio.
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    above, below = ratio > 1 + epsilon_high, ratio < 1 - epsilon_low
    beyond = (adv < 0) & (ratio > bound)
    cut = ((adv > 0) & above) | ((adv < 0) & below) | beyond
    loss = -torch.minimum(ratio * adv, clipped * adv)
    loss = torch.where(adv < 0, torch.minimum(loss, -bound * adv), loss)
    return _surrogate(loss, cut, (adv < 0) & above & ~beyond)


# ======================================================================= 9. Aggregation
#
# How losses per entry become one number decides how much a long response counts. Papers
# differ, and so does the released code of one paper from its text. A normaliser over
# the micro-batch (common in code) makes the same rollouts give another objective when
# the batch is split differently; none of these do.

AGGREGATIONS = (
    "sequence_mean",
    "sequence_mean_token_mean",
    "token_mean",
    "fixed_length",
    "length_weighted",
    "group_sum",
    "entry_mean",
)


def aggregate(
    loss: Float[Tensor, "K B L"], plan: Plan, rollout: Rollout, *, level: str, how: str
) -> Float[Tensor, ""]:
    """(9.1) One number from the loss per entry. S_b = weighted sum over the entries of
    sequence b, n_b its kept tokens.

    sequence_mean              mean_b S_b                  each response counts once
    sequence_mean_token_mean   mean_b S_b / n_b            GRPO; long ones weigh less
    token_mean                 sum_b S_b / sum_b n_b       DAPO, d1's code
    fixed_length               mean_b S_b / L              Dr. GRPO; no length bias
    length_weighted            sum_b n_b S_b / sum_b n_b   SPG; S_b a mean over tokens
    group_sum                  sum_b S_b / G               weights sum to 1 in a group
    entry_mean                 sum_b S_b / number of entries

    Source: the papers in the table. token_mean is DAPO's token-level policy gradient
    loss, the token-mean loss; TRL's ``loss_type`` makes the same choice.
    Shapes: the loss has the shape of ll at this level; out is a single number.
    Special cases: every normaliser is that of the global batch, so that it never
    depends on how the batch was split for memory. Where all responses have the same
    length, the first five differ by constants only. An unknown word is refused.
    """
    # Entries that do not exist (visible positions, padding states) must not count, and
    # those that do carry the weights that ll has not absorbed.
    present, weight = entries(plan, level)
    total = (loss * weight * present).sum((0, 2))  # S_b: (B,)
    means = {
        "sequence_mean": total.mean(),
        # Each token of a long response counts less, each response the same.
        "sequence_mean_token_mean": (total / rollout.lengths).mean(),
        # Each token counts the same, so a long response counts more.
        "token_mean": total.sum() / rollout.lengths.sum(),
        # Each token counts the same, by a number that no response can change.
        "fixed_length": total.mean() / rollout.keep.shape[1],
        "length_weighted": (total * rollout.lengths).sum() / rollout.lengths.sum(),
        # The weights of (8.3) average over a group already: only prompts are left.
        "group_sum": total.sum() / (total.shape[0] / rollout.num_generations),
        "entry_mean": total.sum() / present.expand_as(loss).sum().clamp(min=1),
    }
    if how not in means:
        raise _refused("aggregation", how, ", ".join(AGGREGATIONS))
    return means[how]


# ============================================================= 10. The loss of a method


def total_loss(
    surrogate: Entries,
    penalty: Entries | None,
    plan: Plan,
    rollout: Rollout,
    *,
    beta: float,
    level: str,
    how: str,
) -> Float[Tensor, ""]:
    """(10.1) loss = aggregate(surrogate + beta penalty), for any method of the table.

    ``surrogate`` is the loss of an objective of section 8. ``penalty`` is (7.2), or the
    exact KL of (4.1) reduced by (5.1).

    Source: the common form of all methods; they are written down in minidrl/methods.py.
    Shapes: surrogate and penalty have the shape of ll; out is a single number.
    Special cases: without a penalty (None) it is the aggregated surrogate.
    """
    # The penalty joins entry by entry: what weighs a token or a response in the
    # surrogate weighs its KL in the same way.
    loss = surrogate if penalty is None else surrogate + beta * penalty
    return aggregate(loss, plan, rollout, level=level, how=how)


# ====================================================== 11. This project's own research
#
# First, ELBOs from masks that share as few positions as possible.


def arc_plan(
    rollout: Rollout, generator: torch.Generator, *, num_states: int, domain: str
) -> Plan:
    """(2.11) ELBO from K arcs of one random circle: counts in strata as in (2.3), the
    positions of a state follow those of the state before it.

    A random permutation puts the n positions on a circle. State k hides the l_k of them
    that begin where state k - 1 ends, weight n / (K l_k).

    Source: this project.
    Shapes: a plan of K = num_states states.
    Special cases: unbiased for every K. The arcs' lengths say nothing of the
    permutation, and a rotation of a uniform one is uniform: each state alone is a state
    of (2.3), and only their joint law differs. All positions are hidden equally often,
    or once more. Two states overlap in max(0, l_1 + l_2 - n) positions, never more than
    the l_1 l_2 / n of independent ones, so that for log-probabilities that depend on
    the position alone their covariance is at most 0, and the variance at most that of
    ``strata``. For other models, and for three states or more, there is no such
    guarantee.
    """
    _check_count("plan.num_states", num_states)
    inside = _domain(rollout, domain)
    # Counts and weights are those of (2.3) with strata.
    n = inside.sum(-1)  # (B,)
    u = _in_strata(_uniform((num_states, len(n)), generator, inside.device))
    count = torch.minimum((u * n).floor().long() + 1, n)  # (K, B)
    # The masks are not drawn by themselves: each hides what the last ones left visible,
    # until all positions have had their turn.
    masked = _arcs(generator, inside, count)  # (K, B, L)
    return _response_plan(rollout, masked, inside, n.double() / (num_states * count))


def _arcs(
    generator: torch.Generator, inside: Bool[Tensor, "B L"], count: Int[Tensor, "K B"]
) -> Bool[Tensor, "K B L"]:
    # State k: the count_k positions after those of state k - 1 on a random circle.
    noise = _uniform(tuple(inside.shape), generator, inside.device)
    place = noise.masked_fill(~inside, torch.inf).argsort(-1).argsort(-1)
    start = count.cumsum(0) - count
    n = inside.sum(-1, keepdim=True)
    return ((place - start[..., None]) % n < count[..., None]) & inside


# Next, what the rollout knows already. A sampler that reveals token after token has
# evaluated the network in nested states, at every hidden position. Once the response is
# written, seen[t, i] = log p of its token i before step t can be read off, without a
# call. None of it is the ELBO, but all of it moves with the ELBO's terms: a control
# variate. Any function of it with a known mean may be taken off an estimate, and its
# mean added again. The price is that it depends on constants, fitted on other
# responses, and that it is a constant to the gradient: a ratio whose two sides share
# their masks loses it. It acts where each side has masks of its own (``refresh``
# independent).


class Visited(NamedTuple):
    """What the states of the trajectory say of the n positions that count; 0 elsewhere.

    first      (B, L)        seen[0, i], everything hidden
    at_reveal  (B, L)        seen[r_i, i], r_i the step that reveals i
    lowest     (B, L)        the least seen[t, i] up to r_i
    effects    (4, B, L, L)  A+, A-, C+, C-. Above and below 0 apart: d_ij =
                             seen[r_j + 1, i] - seen[r_j, i] for r_j < r_i, what
                             revealing j did to i; and d_ji, for j revealed after i.
                             Conditionals of one joint distribution would have d
                             symmetric (pointwise mutual information)
    """

    first: Tensor
    at_reveal: Tensor
    lowest: Tensor
    effects: Tensor


def visited(rollout: Rollout, inside: Bool[Tensor, "B L"]) -> Visited:
    """Read the record ``seen_logp (B, T, L)`` at the positions ``inside``; float64."""
    seen = record(rollout, "seen_logp").double()  # (B, T, L)
    steps, length = seen.shape[1:]
    step = rollout.unmask_step.clamp(min=0)  # r_i: (B, L)
    at_reveal = seen.gather(1, step[:, None])[:, 0]  # (B, L)
    # After its reveal a token is visible and has no log p: leave these steps out.
    later = torch.arange(steps, device=step.device)[:, None] > step[:, None]
    lowest = seen.masked_fill(later, torch.inf).amin(1)
    # What step r_j changed at every other position i: seen after it minus seen before.
    place = step[..., None].expand(-1, -1, length)  # [b, j, i]
    after = seen.gather(1, (place + 1).clamp(max=steps - 1))
    # Only positions i that were still hidden then, r_j < r_i, have both values.
    earlier = (step[..., None] < step[:, None]) & inside[..., None] & inside[:, None]
    of_j = torch.where(earlier, after - seen.gather(1, place), 0.0)  # [b, j, i]
    d = of_j.transpose(1, 2)  # [b, i, j]
    # Each entry [b, i, j] is what j did to i, or, in the last two, what i did to j.
    parts = [d.clamp(min=0), d.clamp(max=0), of_j.clamp(min=0), of_j.clamp(max=0)]
    first, at_reveal, lowest = (x * inside for x in (seen[:, 0], at_reveal, lowest))
    return Visited(first, at_reveal, lowest, torch.stack(parts))


def control_variate_plan(
    rollout: Rollout,
    generator: torch.Generator,
    *,
    num_states: int,
    domain: str,
    constants: Float[Tensor, "2 57"] | None,
) -> Plan:
    """(2.12) ELBO from arcs (2.11), their counts drawn from q (2.14), with a control
    variate H (2.13) from the states that the rollout has visited:

        ll = c + 1/K sum_k 1/(n q(l_k)) [n/l_k sum_{i in M_k} logp_i - H(M_k) + E H - c]

    ``constants`` are those of unsolved and of solved responses: 20 of H, 30 of q, and 7
    of c, which is linear in sums over the visited states (``centre_terms``). They are
    read with the records ``seen_logp`` and ``solved``. The part without logp is
    ``Plan.shift``.

    Source: this project.
    Shapes: a plan of K = num_states states, with a shift (B,).
    Special cases: unbiased, whatever H, c and q > 0 are, if they are fixed before the
    masks are drawn (q needs constants of 0 or more, some above 0): the mean of 1/(n q)
    [.] over counts from q is that over uniform counts. Constants that were fitted on
    other responses cost variance, never bias; how much they save has no guarantee. None
    means no control variate and uniform counts, which is ``arc_plan``.
    """
    if constants is None:
        return arc_plan(rollout, generator, num_states=num_states, domain=domain)
    _check_count("plan.num_states", num_states)
    inside = _domain(rollout, domain)
    n, known = inside.sum(-1), visited(rollout, inside)
    # All that is fixed before a mask is drawn: the constants, by the verdict on the
    # response, and with them q, H and c.
    own = constants.to(n.device)[record(rollout, "solved").long()]  # (B, 57)
    of_terms, of_law, of_centre = own.split([20, 30, 7], -1)
    q = law_of_counts(known, inside, of_law)  # (B, L)
    # Counts by inverting the distribution function of q at strata of [0, 1).
    u = _in_strata(_uniform((num_states, len(n)), generator, inside.device))
    count = torch.minimum((q.cumsum(-1) <= u[..., None]).sum(-1) + 1, n)  # (K, B)
    masked = _arcs(generator, inside, count)  # (K, B, L)
    # 1/(n q) turns counts from q into uniform ones. Of logp it leaves 1/(K q l).
    chance = q.expand(num_states, -1, -1).gather(2, count[..., None] - 1)[..., 0]
    plan = _response_plan(rollout, masked, inside, 1 / (num_states * chance * count))
    # H - E H has mean 0. Taken off, it carries away the noise that it shares with the
    # estimate.
    guess = surrogate_terms(known, masked, inside) - surrogate_means(known, inside)
    guess = (guess * of_terms).sum(-1)  # (K, B)
    # The weights 1/(n q) vary, too: their noise multiplies what is left, so that a
    # guess c of its mean is taken off first and added outside.
    centre = (centre_terms(known, n) * of_centre).sum(-1)  # (B,)
    shift = centre - ((guess + centre) / (num_states * n * chance)).sum(0)
    return replace(plan, shift=shift.to(rollout.logp.dtype))


def surrogate_terms(
    known: Visited, masked: Bool[Tensor, "K B L"], inside: Bool[Tensor, "B L"]
) -> Float[Tensor, "K B 20"]:
    """(2.13) The terms of H(M) = n/l sum over i in M of h(M, i), a guess of the ELBO's
    n/l sum of log p, linear in 20 constants:

        h(M, i) = u first_i + v at_reveal_i + sum_s z_s sum_{j visible} effects_s,ij
                  + w_1 x + w_2 x^2,        x = l/n;  u, v, z_s quadratic in x

    Source: this project.
    Shapes: masks (K, B, L) to terms (K, B, 20), in the order (1, x, x^2) times the six
    sums, then n x, n x^2.
    Special cases: H is nothing but a guess; what it misses costs variance, never bias
    (2.12).
    """
    hidden, shown = masked.double(), (~masked).double()
    # Six sums over the hidden positions: their log p where all is hidden, that at their
    # reveal, and for each kind of effect what the visible positions did to them.
    sums = [(hidden * known.first).sum(-1), (hidden * known.at_reveal).sum(-1)]  # (K,B)
    sums += list(torch.einsum("kbi,sbij,kbj->skb", hidden, known.effects, shown))
    # n/l = 1/x scales a sum over l positions up to n, as in (2.3). How much each sum
    # says depends on how much is hidden: a quadratic in x.
    n = inside.sum(-1).double()
    x = hidden.sum(-1) / n
    every = [s / x * x**power for s in sums for power in range(3)]
    return torch.stack([*every, n * x, n * x**2], -1)


def surrogate_means(
    known: Visited, inside: Bool[Tensor, "B L"]
) -> Float[Tensor, "B 20"]:
    """Their means under (2.3), closed: given l and i in M, another position is visible
    with probability (n - l)/(n - 1)."""
    n = inside.sum(-1, keepdim=True).double()  # (B, 1)
    count = torch.arange(1, inside.shape[1] + 1, device=n.device)
    exists, x = count <= n, count / n  # (B, L): a column for each l
    pairs = (n - count) / (n - 1).clamp(min=1)
    # Given l, each position is hidden with probability l/n = x, which the factor 1/x of
    # the terms undoes: a sum over all positions, or over all pairs times their chance.
    ones = torch.ones_like(x)
    sums = [known.first.sum(-1, keepdim=True) * ones]
    sums += [known.at_reveal.sum(-1, keepdim=True) * ones]
    sums += [total[:, None] * pairs for total in known.effects.sum((2, 3))]
    every = [s * x**power for s in sums for power in range(3)] + [n * x, n * x**2]
    # And the mean over l ~ U{1..n}.
    return torch.stack([(v * exists).sum(-1) / n[:, 0] for v in every], -1)


def law_of_counts(
    known: Visited, inside: Bool[Tensor, "B L"], constants: Float[Tensor, "B 30"]
) -> Float[Tensor, "B L"]:
    """(2.14) q(l) in proportion to the root of v(l), the predicted mean square of
    Z - H over the masks of l positions, 3 % of its mean added; 0 beyond n.

        v(M) = (n/l)^2 sum_{i in M} sum_f (a_f + b_f x + c_f (1 - x)^4) scale_f,i

    Z is the state's ELBO estimate n/l sum of log p. There are ten scales of a position:
    0.01, first^2, at_reveal^2, lowest^2, -first, -at_reveal, mean squares over j of its
    effects (all, those below 0, C-), and (sum of C-)^2 / n.

    Source: this project.
    Shapes: constants (B, 30) to a law of l = 1..L for each sequence (B, L).
    Special cases: this is importance sampling of counts; q > 0 keeps it unbiased. v is
    linear in the mask: its mean given l has each i with share l/n.
    """
    n = inside.sum(-1, keepdim=True).double()  # (B, 1)
    # Ten guesses of how far off H is at a position. Larger effects, larger errors.
    both, last = known.effects.sum(0), known.effects[3]
    squares = [(m**2).sum(-1) / n for m in (both, both.clamp(max=0), last)]
    scale = [inside * 0.01, known.first**2, known.at_reveal**2, known.lowest**2]
    scale += [-known.first, -known.at_reveal, *squares, last.sum(-1) ** 2 / n]
    total = torch.stack([s.sum(-1) for s in scale], -1)[:, None]  # (B, 1, 10)
    # Mean over the masks of l positions: (n/l)^2 times the share l/n is 1/x.
    count = torch.arange(1, inside.shape[1] + 1, device=n.device)
    x = (count / n).clamp(max=1)[..., None]  # (B, L, 1)
    terms = torch.cat([total / x, total / x * x, total / x * (1 - x) ** 4], -1)
    v = (terms * constants[:, None]).sum(-1) * (count <= n)  # (B, L)
    # The variance of an importance-weighted mean is least with a law in proportion to
    # the root of the mean square. The 3 % keep each q(l), by which is divided, above 0.
    q = (v + 0.03 * v.sum(-1, keepdim=True) / n).sqrt() * (count <= n)
    return q / q.sum(-1, keepdim=True)


def centre_terms(known: Visited, n: Int[Tensor, " B"]) -> Float[Tensor, "B 7"]:
    """What c of (2.12) is linear in: 1, n, and sums of at_reveal, first, lowest, A+ and
    A-."""
    above, below = known.effects[:2].sum((2, 3))
    sums = [x.sum(-1) for x in (known.at_reveal, known.first, known.lowest)]
    return torch.stack([torch.ones_like(above), n.double(), *sums, above, below], -1)


# Last, the choice of positions. A confidence-ordered sampler makes two draws in a step:
# a token for every hidden position of the block, and with them the positions that are
# revealed. The score of the tokens alone leaves the second out. It needs no model of
# its own: which positions win is a function of the tokens that were proposed, and those
# that lost are summed out, one by one.


def confidence_to_beat(
    confidence: Float[Tensor, "S L"],
    scored: Bool[Tensor, "S L"],
    passed: Bool[Tensor, "S L"],
) -> tuple[Float[Tensor, "R 1"], Bool[Tensor, "R 1"]]:
    """What each of the R candidates ``passed`` over stayed below: (the lowest chosen
    confidence, whether a tie also loses).

    ``confidence``: of the chosen tokens, at the positions ``scored``. On ties the lower
    position wins, as in the sampler.
    """
    # The sampler takes the most confident proposals: a candidate lost if it is below
    # the weakest of them.
    chosen = confidence.masked_fill(~scored, torch.inf)
    lowest = chosen.amin(-1, keepdim=True)  # (S, 1)
    # Level with the weakest, it lost if it stands after the last position that has this
    # confidence.
    position = torch.arange(scored.shape[1], device=scored.device)
    last = position.where(chosen == lowest, -1).amax(-1, keepdim=True)
    state, place = passed.nonzero(as_tuple=True)  # (R,), (R,)
    return lowest[state], place[:, None] > last[state]


def log_threshold(threshold: float) -> float:
    """log tau as a float32 number, as which confidences are compared; tau = 0: -inf."""
    return float(numpy.float32(math.log(threshold))) if threshold else -math.inf


def threshold_to_beat(
    limit: Float[Tensor, "R 1"], later: Bool[Tensor, "R 1"], *, threshold: float
) -> tuple[Float[Tensor, "R 1"], Bool[Tensor, "R 1"]]:
    """The same in threshold decoding (4.5), from ``confidence_to_beat``: tau, at which
    a candidate is no longer passed over, where the lowest chosen one reached it."""
    floor = log_threshold(threshold)
    reached = limit >= floor
    return limit.masked_fill(reached, floor), later & ~reached


def log_passed_over(
    logits: Float[Tensor, "R V"],
    limit: Float[Tensor, "R 1"],
    later: Bool[Tensor, "R 1"],
    *,
    temperature: float,
) -> Float[Tensor, " R"]:
    """log F_j of (4.2): F_j = sum of p_j(v) over the tokens v whose confidence is below
    ``limit`` (or equal, if ``later``).

    p is at the sampling temperature, confidence at temperature 1 as float32 logarithm.
    Where F_j is 0, it is the logarithm of the smallest number, with gradient 0.
    """
    mine, log_p = token_confidence(logits), (logits / temperature).log_softmax(-1)
    # The proposal of j is not known any more. Sum over all that would have lost.
    below = (mine < limit) | ((mine == limit) & later)  # (R, V)
    probability = (log_p.exp() * below).sum(-1)  # (R,)
    return probability.clamp(min=torch.finfo(probability.dtype).tiny).log()


def order_logp(
    log_f: Float[Tensor, " R"], scored: Bool[Tensor, "S L"], passed: Bool[Tensor, "S L"]
) -> Float[Tensor, "S L"]:
    """(4.2) log-probability that the low-confidence sampler chose the scored positions,
    given the tokens drawn there: log prod_j F_j over the candidates j of a state.

    A candidate j was passed over because its own proposal was less confident than every
    chosen token, which has probability F_j. The sum stands in equal shares on the
    state's scored tokens. ``log_f`` are those of the R candidates ``passed`` over, in
    order.

    Source: minidrl's own. Order terms of other samplers: DCoLT (arXiv 2505.10446),
    Plackett-Luce from a learned head, the law of its own sampler; Mask-Aware Policy
    Gradients (arXiv 2607.15200, code Haran71/mask-aware-policy-gradients), a softmax
    over logits (4.4), a model of the choice. Neither is the law of this sampler.
    Shapes: S states of L positions, R candidates among them; out (S, L), 0 where
    nothing is scored.
    Special cases: with (4.1) it makes the exact kernel of the sampler: its score is the
    policy gradient wherever J is differentiable. J jumps where two confidences cross;
    there F_j may become 0. If it is left out, the score's mean is not 0 (bias). It
    costs no network call, only the vocabulary head at the candidates, and with centred
    rewards it makes the gradient noisier.
    """
    # Proposals are drawn independently, one a position: the probability that all of
    # them lost is a product, its log a sum over the candidates of each state.
    state, _ = passed.nonzero(as_tuple=True)
    total = log_f.new_zeros(len(scored)).index_add(0, state, log_f)  # (S,)
    # Reductions add up tokens: equal shares make the sum over a state's tokens right.
    return scored * (total / scored.sum(-1).clamp(min=1))[:, None]


# Threshold decoding reveals every proposal of confidence tau or more, and at least the
# most confident. The set is again a function of independent draws, one a position, so
# the kernel factorises in the same way; only what the others stayed below changes.


def threshold_logp(
    order: Float[Tensor, "S L"],
    confidence: Float[Tensor, "S L"],
    scored: Bool[Tensor, "S L"],
    *,
    threshold: float,
) -> Float[Tensor, "S L"]:
    """(4.5) log-probability that threshold decoding chose the scored positions U, given
    the tokens drawn there: its selection factor.

        P(U, y_U) = prod_{i in U} p_i(y_i) prod_{j hidden in the block, not in U} F_j
        F_j = P(c_j < tau)           if c_i >= tau for all i in U
        F_j = P(j is beaten by i)    if U = {i} and c_i < tau, as in (4.2)
        P = 0                        if U has several positions and some c_i < tau

    ``order`` is (4.2) of these F_j (``threshold_to_beat``). What is left to say here is
    the third case, which other weights than the sampler's may bring. ``confidence`` is
    that of the scored tokens.

    Source: the sampler is that of Fast-dLLM (arXiv 2505.22618), the factor minidrl's
    own.
    Shapes: S states of L positions, (S, L) to (S, L).
    Special cases: the third case has the log of the smallest number, with gradient 0.
    Its score is the policy gradient wherever J is differentiable; J jumps where a
    confidence crosses tau or another one.
    """
    # Several positions at once were all above tau. If one of them no longer is, these
    # weights would never have chosen this set.
    count = scored.sum(-1, keepdim=True)  # (S, 1)
    unsure = (scored & (confidence < log_threshold(threshold))).any(-1, keepdim=True)
    nothing = math.log(torch.finfo(order.dtype).tiny) * scored / count.clamp(min=1)
    return torch.where(unsure & (count > 1), nothing.to(order.dtype), order)
