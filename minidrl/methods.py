"""Methods: a paper as a row of the choices that algorithms.py offers; the table; what a row does
with a rollout.

To read a row: which states are looked at (plan, refresh), what the ratio is taken of and against
(reduction, normalizer, anchor, temperature), how rewards become advantages (credit, step_value),
what is done with them (objective, extra, kl), and how it is summed (aggregation). To write one:
give these words. If a paper needs a function that algorithms.py does not have, it is one new
function there and one new row here.

A bare name follows what its ``source`` names (paper, accounts, code). ``-released`` is the official
code, quirks included, held to its own numbers by the tests. What is not as there is in ``differs``.
Numbers (clips, temperatures of weights, K) are the published ones where they make sense for a model
of any size; a run's ``method_options`` replace them.

The trainer executes a row in this order: rollout (needs), plan, credit, anchor, features, loss,
update. It reads the fields and knows no row by name.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from functools import partial as P
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minidrl import algorithms as alg
from minidrl.algorithms import (
    Advantage,
    Entries,
    Plan,
    Rollout,
    Surrogate,
    arc_plan,
    block_elbo_plan,
    block_plan,
    block_replay_plan,
    complementary_plan,
    confident_clip,
    control_variate_plan,
    coupled_plan,
    dppo,
    dppo_released,
    drpo,
    dual_clip,
    elbo_count_plan,
    entropy_plan,
    group_mean,
    group_z_score,
    leave_one_out,
    mean_field_plan,
    merged_plan,
    ppo_clip,
    prediction_plan,
    progress_advantage,
    quadrature_plan,
    regression,
    reinforce,
    replay_plan,
    response_length,
    sandwich,
    scheduled_plan,
    self_normalized_clip,
    softmax_contrast,
    spo,
    stepwise_advantage,
    tangent,
    topk_divergence,
    truncated_is,
)

# ================================================================================= 1. What a row is


class KL(NamedTuple):
    """A KL penalty: form (7.2) or "exact" (the feature kl_ref), and its weight.

    ``of``: the ll of the ratio; the log_likelihood without its normaliser; or per_token, the same
    with the penalty divided by the normaliser afterwards. ``target``: the model
    that the run started from (reference), or the anchor (old).
    """

    form: str
    beta: float
    of: str = "ratio"
    target: str = "reference"


# The words that a row may use where it makes a choice by name.
CHOICES = {
    "reduction": alg.LEVELS,
    "normalizer": ("none", "kept_length", "padded_length"),
    "anchor": ("behaviour", "old", "none"),
    "refresh": ("fixed", "paired", "independent", "scheduled"),
    "order": ("any", "random", "low_confidence", "left_to_right", "right_to_left"),
    "temperature": ("one", "sampling"),
    "step_value": ("none", "greedy", "sampled", "proposed"),
    "aggregation": alg.AGGREGATIONS,
}
# Records that a row's words ask of the sampler; the entropy is recorded for every row.
RECORDS = {
    "none": (),
    "greedy": ("one_step",),
    "sampled": ("one_step_sampled",),
    "proposed": ("one_step_proposed",),
    "topk_logp": ("topk",),
    "control_variate_plan": ("seen_logp",),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A paper as a row: which of the choices above it makes. No method has code of its own outside
    the table.

    plan          the masked states: a function of (rollout, generator)
    refresh       fixed: one plan for all updates on a rollout. paired: a new plan an update, all
                  scored by the old weights first; both sides of a ratio share their masks, as in
                  VRPO's antithetic sampling. independent: a new plan an update, the old value kept
                  from its own plan (the ratio is then noise). scheduled: as paired, and the
                  plan is told how far the updates on this rollout have come (``progress``, 0 to 1)
                  and given a generator that is the same for all of them (``schedule``)
    order         the sampler's order that the row is about; another one is refused
    anchor        behaviour: the sampler's own logp (replay plans only). old: scored before the
                  first update. none
    temperature   one: scored at temperature 1. sampling: at the sampler's, as behaviour needs
    reduction     what has a ratio: a token, a step, a pair of masks, a sequence (5.1)
    normalizer    divides ll: none; the tokens that count (kept_length); the padded length L, which
                  some released code does: short answers then get ratios nearer to 1
    credit        rewards to advantages (section 6)
    step_value    what a state is worth before its step: none, or the reward of its completion in
                  one step, greedy or sampled; credit then gives each state an advantage of its own
    objective     the loss of an entry (section 8)
    extra         what else the objective reads: a function of (ll, adv, feature, plan, rollout,
                  normalizer) to its keywords
    kl            a penalty, or None
    features      what the network is asked for; order_logp is added to logp before the reduction;
                  position_logp makes a second ratio of each sequence, whose loss is added
    aggregation   losses to a number (9.1)
    """

    name: str
    title: str
    source: str
    differs: str
    plan: partial
    refresh: str = "fixed"
    order: str = "any"
    anchor: str
    temperature: str = "one"
    reduction: str
    normalizer: str = "none"
    credit: partial
    step_value: str = "none"
    objective: partial
    extra: partial | None = None
    kl: KL | None = None
    features: tuple[str, ...] = ("logp",)
    aggregation: str

    def __post_init__(self):
        one = {"reduction": ("sequence",)} if "position_logp" in self.features else {}
        for key, allowed in (CHOICES | one).items():
            value = getattr(self, key)
            if value not in allowed:
                kind = "" if isinstance(value, str) else "the strings "  # None is not "none"
                got = f"{key}: got {value!r} for {self.name}"
                raise ValueError(f"{got}; allowed {kind}{', '.join(allowed)}")

    @property
    def needs(self) -> tuple[str, ...]:
        """What the sampler must record for this row, beside the entropy."""
        asked = (self.step_value, *self.features, self.plan.func.__name__)
        return tuple(name for word in asked for name in RECORDS.get(word, ()))

    @property
    def on_record(self) -> bool:
        """True where ratios are taken against the log-probabilities that the sampler recorded, and
        the loss reads nothing else of the record."""
        return self.anchor == "behaviour" and self.features == ("logp",)

    @property
    def linear(self) -> bool:
        """True when the loss is linear in the features: pass 1 of the two-pass backward can be
        skipped."""
        extra = self.extra is None or self.extra.func.linear
        return self.objective.func.linear and self.kl is None and extra

    @property
    def linear_on_policy(self) -> bool:
        """True when the gradient, with the ll itself as anchor, does not depend on the features'
        values."""
        extra = self.extra is None or self.extra.func.linear
        # The slope of a penalty to the old policy at ll = anchor is a constant.
        penalty = self.kl is None or self.kl.target == "old"
        return self.objective.func.reinforce_on_policy and penalty and extra


METHODS: dict[str, Method] = {}


def row(name: str, source: str, title: str, **words: Any) -> None:
    """Enter a method into the table."""
    if name in METHODS:
        raise ValueError(f"row: got {name!r} twice; allowed one row a name")
    METHODS[name] = Method(name=name, source=source, title=title, **words)


# ===================================================================================== 2. The table
#
# A row is a record of six lines: name, source and title; how it differs from its source; the
# states; the ratio; the credit; the objective. What a row does not say: refresh "fixed", order
# "any", temperature "one", normalizer "none", step_value "none", no extra, no KL term, features
# ("logp",). P is functools.partial.

# fmt: off

# The recorded trajectory, with the sampler's own probabilities.
row("reinforce", "Williams 1992; Dr. GRPO (arXiv 2503.20783)", "policy gradient of the trajectory",
  differs="token-only score: exact for random and fixed orders, biased for confidence order",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="none", temperature="sampling", reduction="step",
  credit=P(group_mean),
  objective=P(reinforce), aggregation="sequence_mean")
row("replay-grpo", "code of d2 (arXiv 2509.21474), TraceRL (2509.06949)", "PPO clip on all steps",
  differs="anchored on the sampler's log-probabilities; clip and z-score of GRPO; token-only score",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="step",
  credit=P(group_z_score, ddof=1, eps=0.0001),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="fixed_length")
row("replay-uniform", "AGRPO (arXiv 2510.04019), by accounts", "some steps, drawn uniformly",
  differs="unbiased: weight T/K; without AGRPO's clip; control of egspo; otherwise as reinforce",
  plan=P(replay_plan, num_states=4, min_entropy=0.0),
  anchor="none", temperature="sampling", reduction="step",
  credit=P(group_mean),
  objective=P(reinforce), aggregation="sequence_mean")

# Likelihoods estimated from random masks: an ELBO a sequence, or one look at the whole response
# (mean field).
row("grpo", "GRPO (arXiv 2402.03300)", "GRPO with one ELBO ratio a sequence",
  differs="the likelihood is an ELBO; geometric mean per token as in GSPO (2507.18071); no KL",
  plan=P(elbo_count_plan, num_states=4, domain="keep", strata=True),
  anchor="old", reduction="sequence", normalizer="kept_length",
  credit=P(group_z_score, ddof=1, eps=0.0001),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="sequence_mean")
row("diffu-grpo", "d1 (arXiv 2504.12216), eq. 4", "one-step mean field, prompt masking",
  differs="the paper's per-sequence mean; the released code averages over a micro-batch's tokens",
  plan=P(mean_field_plan, p_mask_prompt=0.15),
  anchor="old", refresh="paired", reduction="token", kl=KL("k3", 0.04),
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="sequence_mean_token_mean")
row("diffu-grpo-released", "d1's code (dllm-reasoning/d1)", "one-step mean field, prompt masking",
  differs="mean over all tokens; here of the global batch, there of the micro-batch",
  plan=P(mean_field_plan, p_mask_prompt=0.15),
  anchor="old", refresh="paired", reduction="token", kl=KL("k3", 0.04),
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="token_mean")
row("gdpo", "GDPO (arXiv 2510.08554), by accounts", "semi-deterministic Monte Carlo ELBO (SDMC)",
  differs="ratio of sequence ELBOs, loss divided by the length; no KL (the released beta is 0)",
  plan=P(quadrature_plan, num_nodes=3, masks_per_node=1, counts="bernoulli", domain="keep"),
  anchor="old", reduction="sequence",
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="sequence_mean_token_mean")
row("gdpo-released", "GDPO's code (KevinRojas1499/GDPO)", "SDMC ELBO, one ratio a sequence",
  differs="floor(t L) hidden, weight 1/t, padding scored, ratio to the power 1/L, masks not shared",
  plan=P(quadrature_plan, num_nodes=3, masks_per_node=1, counts="floor", domain="all"),
  anchor="old", refresh="independent", reduction="sequence", normalizer="padded_length",
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="sequence_mean")
row("gdpo-arcs", "this project; GDPO (arXiv 2510.08554) by accounts", "ELBO from arcs of a circle",
  differs="unbiased at any length; three calls, as gdpo; less noise where measured (elbo_error.md)",
  plan=P(arc_plan, num_states=3, domain="keep"),
  anchor="old", reduction="sequence",
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="sequence_mean_token_mean")

# Weights instead of ratios. The published code draws new masks for every update and keeps the
# old value of its own masks (``refresh`` independent), so that the weights are noise on the
# first update; ``fixed`` shares the masks, and they are equal. At 256 tokens the noise of a
# sequence's ratio may be dozens of nats (notebook 06a), and the weights then say almost nothing
# about the ratio; ``normalizer`` kept_length takes the ratio of token means, as the code does.
row("stabledrl", "StableDRL (arXiv 2603.06743), by accounts", "weights clipped and self-normalised",
  differs="eps = 5, ratio of sequences: by accounts; sandwich of SPG (2510.09541); ELBO by count",
  plan=P(elbo_count_plan, num_states=2, domain="keep", strata=True),
  anchor="old", refresh="independent", reduction="sequence",
  credit=P(group_mean), extra=P(sandwich, eubo_beta=1.5, omega=0.5),
  objective=P(self_normalized_clip, cap=6.0), aggregation="group_sum")
row("stabledrl-released", "StableDRL's code (JianyuanZhong/StableDRL)", "block-wise masks",
  differs="cap 5 on the ratio of token means; there the softmax spans the rows of a call",
  plan=P(block_plan, num_states=2, block_length=32, p_mask=0.15),
  anchor="old", refresh="independent", reduction="sequence", normalizer="kept_length",
  credit=P(group_mean), extra=P(sandwich, eubo_beta=1.5, omega=0.5),
  objective=P(self_normalized_clip, cap=5.0), aggregation="group_sum")
row("stabledrl-elbo", "StableDRL (arXiv 2603.06743), by accounts", "stabledrl on the plain ELBO",
  differs="eps = 5 by accounts; score is the ELBO, not ELBO and EUBO; ratio of per-token means",
  plan=P(elbo_count_plan, num_states=2, domain="keep", strata=True),
  anchor="old", refresh="independent", reduction="sequence", normalizer="kept_length",
  credit=P(group_mean),
  objective=P(self_normalized_clip, cap=6.0), aggregation="group_sum")
row("stabledrl-cv", "this project, on accounts of arXiv 2603.06743", "weights from a quieter ELBO",
  differs="stabledrl-elbo at three calls; control variate from the rollout's own states (2.12)",
  plan=P(control_variate_plan, num_states=3, domain="keep", constants=None),
  anchor="old", refresh="independent", reduction="sequence", normalizer="kept_length",
  credit=P(group_mean),
  objective=P(self_normalized_clip, cap=6.0), aggregation="group_sum")
row("clip-only", "StableDRL (arXiv 2603.06743), by accounts", "ablation: weights clipped only",
  differs="divided by N instead of the sum of the group's weights; surrogate of SPG (2510.09541)",
  plan=P(elbo_count_plan, num_states=2, domain="keep", strata=True),
  anchor="old", refresh="independent", reduction="sequence",
  credit=P(group_mean), extra=P(sandwich, eubo_beta=1.5, omega=0.5),
  objective=P(truncated_is, floor=0.0, cap=6.0), aggregation="sequence_mean")
row("self-norm-only", "StableDRL (arXiv 2603.06743), by accounts", "ablation: weights not clipped",
  differs="no cap; surrogate of SPG (2510.09541)",
  plan=P(elbo_count_plan, num_states=2, domain="keep", strata=True),
  anchor="old", refresh="independent", reduction="sequence",
  credit=P(group_mean), extra=P(sandwich, eubo_beta=1.5, omega=0.5),
  objective=P(self_normalized_clip, cap=math.inf), aggregation="group_sum")
row("spg", "code of SPG (arXiv 2510.09541), facebookresearch/SPG", "sandwiched policy gradient",
  differs="as released (length-weighted; paper: mean), but no block twice while others last",
  plan=P(block_plan, num_states=2, block_length=32, p_mask=0.15),
  anchor="none", refresh="paired", reduction="sequence", normalizer="kept_length",
  credit=P(group_mean), extra=P(sandwich, eubo_beta=1.5, omega=0.5),
  objective=P(reinforce), aggregation="length_weighted")

# Block-wise models: the sampler's ``attention`` must be block_causal. The same choices on plans
# whose blocks share a forward.
row("stabledrl-block", "StableDRL (arXiv 2603.06743), by accounts", "stabledrl on a staircase",
  differs="by accounts, its code has none; clean stream as the cache has it; sandwich of SPG",
  plan=P(block_elbo_plan, num_states=2, domain="keep", strata=True),
  anchor="old", refresh="independent", reduction="sequence",
  credit=P(group_mean), extra=P(sandwich, eubo_beta=1.5, omega=0.5),
  objective=P(self_normalized_clip, cap=6.0), aggregation="group_sum")
row("trace-block", "code of TraceRL (arXiv 2509.06949); DiPO (2512.22234)", "block-wise PPO clip",
  differs="no value network; one ratio a step, against the sampler's own log-probabilities; no KL",
  plan=P(block_replay_plan),
  anchor="behaviour", temperature="sampling", reduction="step",
  credit=P(group_z_score, ddof=1, eps=0.0001),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="fixed_length")

# Some steps of the trajectory, and what a state was worth before its step. The score of the
# revealed tokens leaves out that the sampler chose their positions by confidence; egspo-exact
# does not: (4.2), with a threshold (4.5).
row("egspo", "EGSPO (arXiv 2603.12554): accounts, code", "PPO clip on the most uncertain steps",
  differs="scored at the sampling temperature; sum over the chosen steps; token-only score; no KL",
  plan=P(entropy_plan, num_states=4, shared=False, weight="sum"),
  anchor="behaviour", temperature="sampling", reduction="step",
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.5), aggregation="sequence_mean")
row("egspo-sa", "EGSPO-SA (arXiv 2603.12554): accounts, code", "egspo with stepwise advantages",
  differs="scored at the sampling temperature; sum over the chosen steps; token-only score; no KL",
  plan=P(entropy_plan, num_states=4, shared=False, weight="sum"),
  anchor="behaviour", temperature="sampling", reduction="step", step_value="greedy",
  credit=P(stepwise_advantage, lam=0.5, schedule="constant", normalize=True, center="rank"),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.5), aggregation="sequence_mean")
row("egspo-exact", "EGSPO (arXiv 2603.12554): accounts, code", "egspo, exact kernel of the sampler",
  differs="position factor (4.2) is minidrl's; tokens and positions, against the old weights",
  plan=P(entropy_plan, num_states=4, shared=False, weight="sum"),
  anchor="old", temperature="sampling", reduction="step",
  credit=P(group_mean), features=("logp", "order_logp"),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.5), aggregation="sequence_mean")
row("egspo-released", "EGSPO's code (vishnutez/egspo-dllm-rl)", "PPO clip on uncertain steps",
  differs="temperature 1, mean over ranks and tokens of a step, KL; deciding steps; float32 anchor",
  plan=P(entropy_plan, num_states=8, shared=False, weight="token_mean"),
  anchor="old", reduction="step", kl=KL("k3", 0.04),
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.5), aggregation="sequence_mean")
row("egspo-sa-released", "EGSPO's code (vishnutez/egspo-dllm-rl)", "egspo, stepwise advantages",
  differs="temperature 1, mean over ranks and tokens of a step, KL; deciding steps; float32 anchor",
  plan=P(entropy_plan, num_states=8, shared=False, weight="token_mean"),
  anchor="old", reduction="step", step_value="greedy", kl=KL("k3", 0.04),
  credit=P(stepwise_advantage, lam=0.5, schedule="constant", normalize=True, center="rank"),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.5), aggregation="sequence_mean")

# Trust regions: one ratio a revealed token, anchored on what the sampler saw. Their native
# setting is left-to-right order (``sampler.order``), where every token has an exact
# probability; elsewhere they inherit the bias of the token-only score. On the first update of
# an on-policy rollout all of them have the gradient of reinforce: what differs is reuse and
# mismatch.
row("ppo", "PPO (arXiv 1707.06347)", "one clipped ratio a revealed token",
  differs="the token's probability when drawn: exact from left to right; centred, no critic",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="fixed_length")
row("ppo-released", "verl's vanilla policy loss", "one clipped ratio a revealed token",
  differs="dual clip at 3, token mean",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(dual_clip, epsilon_low=0.2, epsilon_high=0.2, bound=3.0), aggregation="token_mean")
row("clip-higher", "DAPO (arXiv 2503.14476)", "PPO with a wider clip above",
  differs="the token's probability in the state in which it was drawn: exact from left to right",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.28), aggregation="token_mean")
row("gspo", "GSPO (arXiv 2507.18071)", "one ratio a sequence, geometric mean of revealed tokens",
  differs="the likelihood of the recorded trajectory in the place of the sequence's",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="sequence", normalizer="kept_length",
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.0003, epsilon_high=0.0004), aggregation="sequence_mean")
row("cispo", "CISPO (arXiv 2506.13585)", "clipped importance weights, no gradient lost",
  differs="the token's probability in the state in which it was drawn: exact from left to right",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(truncated_is, floor=0.0, cap=5.0), aggregation="token_mean")
row("cispo-released", "verl's cispo", "clipped importance weights, no gradient lost",
  differs="the weight has a floor as well",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(truncated_is, floor=0.8, cap=1.28), aggregation="token_mean")
row("tis", "truncated importance sampling, verl's cap", "weights where sampler and policy differ",
  differs="the token's probability in the state in which it was drawn: exact from left to right",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(truncated_is, floor=0.0, cap=2.0), aggregation="fixed_length")
row("spo", "SPO (arXiv 2401.16025)", "quadratic penalty on the ratio",
  differs="the token's probability in the state in which it was drawn: exact from left to right",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(spo, epsilon=0.2), aggregation="fixed_length")
row("dppo-tv", "DPPO (arXiv 2602.04879), eq. 12, 13", "mask by the token's shift: Binary-TV",
  differs="the token's probability in the state in which it was drawn: exact from left to right",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(dppo, delta=0.15, form="tv"), aggregation="fixed_length")
row("dppo-kl", "DPPO (arXiv 2602.04879), eq. 12, 15", "mask by the token's binary KL divergence",
  differs="the token's probability in the state in which it was drawn: exact from left to right",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(dppo, delta=0.05, form="kl"), aggregation="fixed_length")
row("dppo-topk", "DPPO (arXiv 2602.04879), eq. 12, 14, 16", "mask by the likeliest tokens: Top-K",
  differs="the token's probability in the state in which it was drawn: exact from left to right",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean), extra=P(topk_divergence, form="tv"), features=("logp", "topk_logp"),
  objective=P(dppo, delta=0.15, form=None), aggregation="fixed_length")
row("dppo-tv-released", "verl's dppo_tv", "mask by the token's shift of probability",
  differs="truncated, detached weight times logp; token mean",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(dppo_released, delta=0.15, form="tv", cap=20.0), aggregation="token_mean")
row("dppo-kl-released", "verl's dppo_kl", "mask by the token's binary KL divergence",
  differs="truncated, detached weight times logp; token mean",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(dppo_released, delta=0.05, form="kl", cap=20.0), aggregation="token_mean")
row("drpo", "DRPO (arXiv 2606.09821), eq. 8 quoted in its code", "quadratic penalty on the shift",
  differs="delta inside (0, 1), where its boundary exists; the authors' value is drpo-released",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(drpo, delta=0.15), aggregation="fixed_length")
row("drpo-released", "Tencent-Hunyuan/UniRL, delta = 12.5", "quadratic penalty on the shift",
  differs="at this delta no token can reach the boundary; the code clamps the log ratio to 20",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(group_mean),
  objective=P(drpo, delta=12.5), aggregation="fixed_length")

# Papers from outside the families above.
row("tracerl", "TraceRL (arXiv 2509.06949): accounts, code", "PPO clip on tokens, steps merged",
  differs="without its value network; mean over a response's tokens; merge 2, not 8",
  plan=P(merged_plan, merge=2),
  anchor="old", temperature="sampling", reduction="token", kl=KL("k3", 0.01, target="old"),
  credit=P(group_z_score, ddof=1, eps=0.0001),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="sequence_mean_token_mean")
row("mdpo", "code of MDPO (arXiv 2508.13148), autonomousvision/mdpo", "each step's text verified",
  differs="4 states, not 8 to 16; none after the end; mean over responses and positions; no RCR",
  plan=P(prediction_plan),
  anchor="old", temperature="sampling", reduction="token",
  step_value="proposed", kl=KL("k2", 0.02),
  credit=P(progress_advantage, num_states=4, eps=0.0001),
  objective=P(confident_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="fixed_length")
row("gdsd", "code of GDSD (arXiv 2605.29398), GaryBall/GDSD", "log-ratios regressed on advantages",
  differs="ELBO weights (TLC); logits uncentred, same gradient; clip 0.2, 0.28, not 0.0004; no KL",
  plan=P(complementary_plan, num_states=4, domain="all"),
  anchor="old", reduction="pair",
  credit=P(leave_one_out), extra=P(response_length),
  objective=P(regression, psi=1.0, epsilon_low=0.2, epsilon_high=0.28), aggregation="sequence_mean")

row("wd1", "wd1 (arXiv 2507.08838), read in its code (xiaohangt/wd1)", "softmax weights, no ratio",
  differs="softmax over the prompt's group; the code's is over the rows of a call, there a group",
  plan=P(mean_field_plan, p_mask_prompt=0.15),
  anchor="none", refresh="paired", reduction="sequence",
  credit=P(softmax_contrast, psi=1.0),
  objective=P(reinforce), aggregation="group_sum")

row("justgrpo", "code of JustGRPO (arXiv 2601.15165), LeapLabTHU/JustGRPO", "left-to-right tokens",
  differs="as its code, whose ratio is 1: no clip; scored to the first EOS, over all rollouts",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  order="left_to_right", anchor="none", temperature="sampling", reduction="token",
  credit=P(group_z_score, ddof=1, eps=0.0001),
  objective=P(reinforce), aggregation="fixed_length")

row("espo", "ESPO (arXiv 2512.03759), read in its code (ML-GSAI/ESPO)", "one ELBO ratio a sequence",
  differs="counts are not stratified over the rows of a call; beta as in its yaml (0.001 to 0.01)",
  plan=P(complementary_plan, num_states=4, domain="all"),
  anchor="old", refresh="paired", reduction="sequence", normalizer="padded_length",
  credit=P(leave_one_out), kl=KL("k2", 0.01, of="per_token"),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="sequence_mean")

row("ebpo-block", "EBPO (arXiv 2602.08676), eq. 4 and 5", "one block-ELBO ratio a sequence",
  differs="the report has no numbers: clip, credit as in a re-implementation (DARE, 16 masks)",
  plan=P(block_elbo_plan, num_states=2, domain="keep", strata=True),
  anchor="old", reduction="sequence",
  credit=P(group_z_score, ddof=1, eps=1e-06),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="sequence_mean")

row("coupled-grpo", "DiffuCoder (arXiv 2506.20639) and its code", "token ratios of coupled masks",
  differs="as its code, with the token mean over the global batch, there over the micro-batch",
  plan=P(coupled_plan, low=0.2, high=0.8),
  anchor="old", refresh="paired", reduction="position", kl=KL("k3", 0.01),
  credit=P(leave_one_out),
  objective=P(ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="token_mean")

row("bgpo", "BGPO (arXiv 2510.11683), by accounts and DARE's code", "linear bound of the ratio",
  differs="numbers, clips and padded length as in a re-implementation (DARE); strata a response",
  plan=P(elbo_count_plan, num_states=16, domain="keep", strata=True),
  anchor="old", reduction="state", normalizer="padded_length",
  credit=P(group_z_score, ddof=1, eps=1e-06),
  objective=P(tangent, epsilon_low=0.2, epsilon_high=0.2, bound=3.0), aggregation="length_weighted")

row("unigrpo", "UniGRPO (arXiv 2505.15809) as in facebookresearch/igpo", "masks grow each update",
  differs="by that code: the paper was not read, its re-implementations disagree; padding scored",
  plan=P(scheduled_plan, min_t=0.1, domain="all", progress=0.0),
  anchor="old", refresh="scheduled", reduction="token", kl=KL("k3", 0.01),
  credit=P(group_mean),
  objective=P(ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="entry_mean")

row("mask-aware", "draft code of Mask-Aware PG (arXiv 2607.15200)", "clips tokens, positions",
  differs="draft code; 12 of 32 merged segments there; here all steps, past EOS, rivals by block",
  plan=P(replay_plan, num_states=None, min_entropy=0.0),
  anchor="old", reduction="sequence", normalizer="kept_length",
  credit=P(leave_one_out), features=("logp", "position_logp"),
  objective=P(ppo_clip, epsilon_low=3e-4, epsilon_high=4e-4), aggregation="sequence_mean")

# fmt: on


# =========================================================================== 3. What a row computes


def draw(
    method: Method,
    rollout: Rollout,
    generator: torch.Generator,
    *,
    update: int = 0,
    updates: int = 1,
    schedule: torch.Generator | None = None,
) -> Plan:
    """The row's plan for one of the ``updates`` on a rollout, counted from 0."""
    if method.refresh != "scheduled":
        return method.plan(rollout, generator)
    progress = update / max(1, updates - 1)
    return method.plan(rollout, generator, progress=progress, schedule=schedule)


def normalizer(method: Method, plan: Plan, rollout: Rollout) -> Float[Tensor, "*K B"]:
    """What divides the method's ll; ones where nothing does."""
    lengths = {
        "none": torch.ones_like(rollout.lengths),
        "kept_length": rollout.lengths,
        "padded_length": torch.full_like(rollout.lengths, rollout.keep.shape[1]),
    }
    return lengths[method.normalizer].to(rollout.logp.dtype)


def reduced(
    method: Method, plan: Plan, rollout: Rollout, feature: dict[str, Tensor]
) -> Float[Tensor, "K2 B L2"]:
    """The method's ll: logp, and order_logp where the row asks for it, with its level and
    normaliser; position_logp is an entry of its own, the second of each sequence."""
    logp = feature["logp"]
    if "order_logp" in method.features:
        logp = logp + feature["order_logp"]
    scale = normalizer(method, plan, rollout).to(logp.dtype)
    parts = [logp, feature["position_logp"]] if "position_logp" in method.features else [logp]
    how = {"level": method.reduction, "normalizer": scale}
    return torch.cat([alg.reduce_logp(part, plan, **how) for part in parts])


def behaviour_anchor(method: Method, plan: Plan, rollout: Rollout) -> Float[Tensor, "K2 B L2"]:
    """The sampler's own log-probabilities, those of the behaviour policy, as anchor: what was
    really drawn, in the state in which it was."""
    if not plan.replay or method.temperature != "sampling" or "order_logp" in method.features:
        allowed = "replay plans scored at the sampling temperature, "
        allowed += "without order_logp (which the sampler does not record)"
        raise ValueError(f"anchor: {method.name} asks for behaviour; allowed only for {allowed}")
    return reduced(method, plan, rollout, {"logp": rollout.logp.expand(plan.scored.shape)})


def kl_target(
    method: Method, plan: Plan, rollout: Rollout, feature: dict[str, Tensor]
) -> Float[Tensor, "K2 B L2"]:
    """The ll that the KL term compares: of the policy or of the reference, whichever these features
    are of."""
    plain = dataclasses.replace(method, normalizer="none")
    return reduced(method if method.kl.of == "ratio" else plain, plan, rollout, feature)


def advantages(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    reward: Float[Tensor, " B"],
    step_reward: Float[Tensor, "K B"] | None = None,
) -> Advantage:
    """The row's credit: (B,), or (K, B) where each state of the plan has a value of its own
    (``step_value``)."""
    if method.step_value == "none":
        return method.credit(reward, rollout.num_generations)
    time = plan.step.to(reward.dtype) / alg.num_steps(rollout)
    return method.credit(reward, rollout.num_generations, step_reward, plan.valid, time)


def completions(method: Method, rollout: Rollout) -> Tensor:
    """The record (B, T, L) of the text that each state would become in one step (``step_value``)."""
    words = {"greedy": "one_step", "sampled": "one_step_sampled", "proposed": "one_step_proposed"}
    return alg.record(rollout, words[method.step_value])


def surrogate(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    feature: dict,
    adv: Advantage,
    anchor: Entries | None,
) -> Surrogate:
    """The row's objective on its ll: a loss for each entry."""
    ll = reduced(method, plan, rollout, feature)
    adv = adv.to(ll.dtype)[..., None].expand_as(ll)
    scale = normalizer(method, plan, rollout).to(ll.dtype)
    extra = method.extra(ll, adv, feature, plan, rollout, scale) if method.extra else {}
    return method.objective(ll, anchor, adv, rollout.num_generations, **extra)


def penalty(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    feature: dict,
    anchor: Entries | None,
    ref: Entries | None,
) -> Entries | None:
    """The row's KL term, entry by entry, without its weight; None for a row without one."""
    if method.kl is None:
        return None
    if method.kl.form == "exact":
        blank = dict.fromkeys(method.features, torch.zeros_like(feature["kl_ref"]))
        return reduced(method, plan, rollout, blank | {"logp": feature["kl_ref"]})
    target = anchor if method.kl.target == "old" else ref
    ll = kl_target(method, plan, rollout, feature)
    kl = alg.kl_term(ll, target, form=method.kl.form)
    if method.kl.of != "per_token":
        return kl
    return kl / normalizer(method, plan, rollout).to(kl.dtype)[..., None]


def method_loss(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    feature: dict,
    adv: Advantage,
    anchor: Entries | None,
    ref: Entries | None,
) -> Float[Tensor, ""]:
    """The loss of a row by (10.1): its objective, its KL term, its aggregation."""
    loss = surrogate(method, plan, rollout, feature, adv, anchor).loss
    kl = penalty(method, plan, rollout, feature, anchor, ref)
    beta = method.kl.beta if method.kl else 0.0
    how = {"level": method.reduction, "how": method.aggregation}
    return alg.total_loss(loss, kl, plan, rollout, beta=beta, **how)


@torch.no_grad()
def ratio_diagnostics(
    method: Method, plan: Plan, rollout: Rollout, feature: dict, anchor: Entries, adv: Advantage
) -> dict[str, float]:
    """What the ratios look like: spread, clipped share, bypass share, effective sample size (share
    of entries).

    clip_fraction, bypass_fraction: what the objective says of its entries (``Surrogate``).
    Effective sample size (ESS): (sum ratio)^2 / (n sum ratio^2), 1 when all ratios agree.
    """
    ll = reduced(method, plan, rollout, feature)
    present = alg.entries(plan, method.reduction)[0].expand_as(ll)
    logs = alg.log_ratio(ll, anchor)[present]
    ratio = logs.exp()
    if not len(logs):
        return {}
    _, cut, bypass = surrogate(method, plan, rollout, feature, adv, anchor)
    values = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_std": ratio.std(correction=0),
        "log_ratio_std": logs.std(correction=0),
        "clip_fraction": cut[present].double().mean(),
        "bypass_fraction": bypass[present].double().mean(),
        "effective_sample_size": torch.exp(2 * logs.logsumexp(0) - (2 * logs).logsumexp(0))
        / len(logs),
    }
    return {name: float(value) for name, value in values.items()}


# =================================================================================== 4. Its options

_PARTS = ("plan", "credit", "objective", "extra")
_WORDS = ("aggregation", "refresh", "normalizer", "reduction")
_CREDITS = {"group_mean": {}, "leave_one_out": {}, "group_z_score": {"ddof": 1, "eps": 1e-4}}
# ELBO estimators with three states, of the tokens that count: a row with one may have another.
_PLANS = {
    "elbo_time_plan": {"num_states": 3, "min_t": 1e-3},
    "elbo_count_plan": {"num_states": 3, "strata": True},
    "quadrature_plan": {"num_nodes": 3, "masks_per_node": 1, "counts": "bernoulli"},
    "arc_plan": {"num_states": 3},
    "control_variate_plan": {"num_states": 3, "constants": None},
}
_KL_WORDS = {
    "form": ("k1", "k2", "k3", "exact"),
    "of": ("ratio", "log_likelihood", "per_token"),
    "target": ("reference", "old"),
}
# Below these (or on them) an option has no meaning, and the objective would not always say so.
_ABOVE = dict.fromkeys(("delta", "epsilon", "epsilon_low", "epsilon_high", "cap", "eubo_beta"), 0)
_ABOVE |= {"bound": 1, "psi": 0}
_FROM = {"min_entropy": (0, math.inf), "eps": (0, math.inf), "omega": (0, 1)}  # inf itself is out
_NUM_STATES = "plan.num_states"  # may be None, which is every step


def with_options(method: Method, options: dict[str, Any]) -> Method:
    """The row with some of its numbers replaced: {"plan.num_states": 4, "kl.beta": 0.0, "refresh":
    "fixed"}.

    Keys: a component and one of its keywords (plan, credit, objective, extra, kl), or a choice by
    name (reduction, normalizer, refresh, aggregation, and credit: group_mean, leave_one_out,
    group_z_score; where states have values of their own, step_value: greedy, sampled; where ratios
    are taken against the sampler's record, anchor: behaviour, or old to score it anew; where the
    plan estimates an ELBO, plan: elbo_time_plan, elbo_count_plan, quadrature_plan, arc_plan,
    control_variate_plan, which is how estimators are compared in a row that stays as it is).
    ``kl.beta`` 0 removes the KL term, and with it the reference model; ``kl.form`` and ``kl.beta``
    together give a row the term that it lacks. Raises ValueError for a key that the method does not
    have, and for a value of another kind than the present.
    """
    if wrong := [key for key in options if not isinstance(key, str)]:
        allowed = ", ".join(_options(method))
        raise ValueError(f"method_options: got the key {wrong[0]!r}; allowed {allowed}")
    kl = {key.removeprefix("kl."): value for key, value in options.items() if key.startswith("kl.")}
    rest = {key: value for key, value in options.items() if not key.startswith("kl.")}
    # A credit or a plan is chosen before its numbers are given.
    for key in sorted(rest, key=lambda key: "." in key):
        method = _with_option(method, key, rest[key])
    return _with_kl(method, kl) if kl else method


def has_option(method: Method, key: str) -> bool:
    """True where ``key`` names an option of this row (its value may still be refused)."""
    kl_given = method.kl is not None or key in ("kl.form", "kl.beta")
    return key in _options(method) and (kl_given or not key.startswith("kl."))


def _with_option(method: Method, key: str, value: Any) -> Method:
    part, _, name = key.partition(".")
    if key == "credit":
        return dataclasses.replace(method, credit=_credit(method, value))
    if key == "plan" and _has_elbo(method):
        if value not in tuple(_PLANS):
            got = f"method_options.plan: got {value!r}"
            raise ValueError(f"{got}; allowed {', '.join(_PLANS)}")
        plan = partial(getattr(alg, value), **_PLANS[value], domain="keep")
        return dataclasses.replace(method, plan=plan)
    if allowed := _choices_of(method).get(key):
        if value not in allowed:
            got = f"method_options.{key}: got {value!r}"
            raise ValueError(f"{got}; allowed {', '.join(allowed)}")
        return dataclasses.replace(method, **{key: value})
    if key in _WORDS:
        return dataclasses.replace(method, **{part: value})
    if key not in numbers(method):
        allowed = ", ".join(_options(method))
        raise ValueError(
            f"method_options.{key}: no such option of {method.name}; allowed {allowed}"
        )
    component = getattr(method, part)
    _check_like(key, value, component.keywords[name])
    return dataclasses.replace(method, **{part: partial(component, **{name: value})})


def _choices_of(method: Method) -> dict[str, tuple[str, ...]]:
    # By name as _WORDS, and not in every row.
    found = {}
    if method.step_value in ("greedy", "sampled"):
        found["step_value"] = ("greedy", "sampled")
    if method.on_record:
        found["anchor"] = ("behaviour", "old")
    return found


def _has_elbo(method: Method) -> bool:
    # Of these plans; a row that takes more from its states, as an upper bound, keeps its own.
    return method.plan.func.__name__ in _PLANS and method.extra is None


def _credit(method: Method, name: Any) -> partial:
    if method.step_value != "none":
        now = method.credit.func.__name__
        allowed = f"{now}, {method.name} gives each state a value of its own"
        raise ValueError(f"method_options.credit: got {name!r}; allowed {allowed}")
    if name not in tuple(_CREDITS):  # a list cannot be looked up
        raise ValueError(f"method_options.credit: got {name!r}; allowed {', '.join(_CREDITS)}")
    return partial(getattr(alg, name), **_CREDITS[name])


def _with_kl(method: Method, given: dict[str, Any]) -> Method:
    """The row with another KL term, a new one, or none (beta 0)."""
    for name, value in given.items():
        if name not in KL._fields:
            allowed = ", ".join(_options(method))
            what = f"method_options.kl.{name}: no such option of {method.name}"
            raise ValueError(f"{what}; allowed {allowed}")
        if name in _KL_WORDS and value not in _KL_WORDS[name]:
            raise ValueError(
                f"method_options.kl.{name}: got {value!r}; allowed {', '.join(_KL_WORDS[name])}"
            )
        if name == "beta" and (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 <= value < math.inf
        ):
            raise ValueError(f"method_options.kl.beta: got {value!r}; allowed numbers from 0")
    if method.kl is None and not {"form", "beta"} <= given.keys():
        name, value = next(iter(given.items()))
        allowed = f"with kl.form and kl.beta both, {method.name} has no KL term"
        raise ValueError(f"method_options.kl.{name}: got {value!r}; allowed {allowed}")
    kl = KL(**{**(method.kl._asdict() if method.kl else {}), **given})
    features = tuple(name for name in method.features if name != "kl_ref")
    if kl.beta == 0:
        return dataclasses.replace(method, kl=None, features=features)
    _check_kl(method, kl)
    return dataclasses.replace(
        method, kl=kl, features=features + (("kl_ref",) if kl.form == "exact" else ())
    )


def _check_kl(method: Method, kl: KL) -> None:
    # The old policy is present as the ll of the ratio only: not as a network, not under another
    # normaliser.
    if kl.of != "ratio" and (kl.form == "exact" or kl.target == "old"):
        got = f"{kl.of!r} with form {kl.form}, target {kl.target}"
        raise ValueError(f"method_options.kl.of: got {got}; allowed ratio")
    if kl.target == "old" and (kl.form == "exact" or method.anchor == "none"):
        got = f"'old' with form {kl.form}, anchor {method.anchor}"
        raise ValueError(f"method_options.kl.target: got {got}; allowed reference")


def _check_like(key: str, value: Any, present: Any) -> None:
    # An option keeps its kind: a number stays a number, a word a word. The number of states may be
    # None, which is every step.
    kinds = (type(present),) if isinstance(present, str | bool) else (int, float)
    kinds += (type(None),) if key == _NUM_STATES else ()
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"method_options.{key}: got {value!r}; allowed a value like {present!r}")
    low = _ABOVE.get(key.partition(".")[2])
    if low is not None and not value > low:
        raise ValueError(f"method_options.{key}: got {value!r}; allowed above {low}")
    first, last = _FROM.get(key.partition(".")[2], (None, math.inf))
    if first is not None and value == value and not (first <= value <= last and value < math.inf):
        allowed = f"{first} to {last}" if last < math.inf else f"finite numbers from {first}"
        raise ValueError(f"method_options.{key}: got {value!r}; allowed {allowed}")
    if value != value:  # nan: every comparison with it is false, a filter by it lets all pass
        raise ValueError(f"method_options.{key}: got nan; allowed a number like {present!r}")


def numbers(method: Method) -> list[str]:
    """The keywords of the components that are options.

    Not those that something else decides: a word that is None, and what a plan is told.
    """
    parts = {part: getattr(method, part) for part in _PARTS if getattr(method, part)}
    words = {f"{part}.{name}": p.keywords[name] for part, p in parts.items() for name in p.keywords}
    given = [key for key, value in words.items() if value is not None or key == _NUM_STATES]
    return [key for key in given if key != "plan.progress"]


def _options(method: Method) -> list[str]:
    other = {"none": ["credit"], "proposed": []}
    words = other.get(method.step_value, ["step_value"]) + list(_WORDS)
    words += ["anchor"] if method.on_record else []
    words += ["plan"] if _has_elbo(method) else []
    return numbers(method) + [f"kl.{name}" for name in KL._fields] + words
