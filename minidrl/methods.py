"""Methods: a paper as a record of the choices that algorithms.py offers; the table of them; what a
method does with a rollout; and which of its numbers a run may replace.

To read a method: which states are looked at (plan, refresh), what the ratio is taken of and against
(reduction, normalizer, anchor, temperature), how rewards become advantages (credit, step_value),
what is done with them (objective, extra, kl), and how it is summed (aggregation). To write one:
give these words. If a paper needs a function that algorithms.py does not have, it is one new
function there and one new record here.

A bare name is what its authors' own code computes, quirks included, where there is such code, and
else the paper's formula. What follows a paper against its code, accounts of a paper, or the code of
somebody else has a name that says so (``gdpo-sequence``, ``egspo-accounts``, ``ppo-verl``). What is
not as in its ``source`` is in ``differs``, also where a number is ours (``drpo``, ``gdsd``).
Numbers (clips, temperatures of weights, K) are the published ones where they make sense for a model
of any size; a run's ``method_options`` replace them. ``RENAMED`` has the names that methods had
before.

The loop executes a method in this order: rollout (needs), plan, credit, anchor, features, loss,
update. It reads the fields and knows no method by name.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from functools import partial as P
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minidrl import algorithms as alg
from minidrl.algorithms import Advantage, Entries, Plan, Rollout, Surrogate

# ============================================================================== 1. What a method is


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


# The words that a method may use where it makes a choice by name.
CHOICES = {
    "family": ("main", "variant", "kin", "own"),
    "reduction": alg.LEVELS,
    "normalizer": ("none", "kept_length", "padded_length"),
    "anchor": ("behaviour", "old", "none"),
    "refresh": ("fixed", "paired", "independent", "scheduled"),
    "order": (
        "any",
        "random",
        "low_confidence",
        "left_to_right",
        "right_to_left",
        "entropy",
        "margin",
    ),
    "temperature": ("one", "sampling"),
    "step_value": ("none", "greedy", "sampled", "proposed"),
    "aggregation": alg.AGGREGATIONS,
}
# Records that a method's words ask of the sampler; the entropy is recorded for every method.
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
    """A paper as a record: which of the choices above it makes. No method has code of its own
    outside the table.

    family        main: the papers that this project is about. variant: these papers read in
                  another way, or with a part taken out. kin: related papers. own: this project's
    plan          the masked states: a function of (rollout, generator)
    refresh       fixed: one plan for all updates on a rollout. paired: a new plan an update, all
                  scored by the old weights first; both sides of a ratio share their masks, as in
                  VRPO's antithetic sampling. independent: a new plan an update, the old value kept
                  from its own plan (the ratio is then noise). scheduled: as paired, and the
                  plan is told how far the updates on this rollout have come (``progress``, 0 to 1)
                  and given a generator that is the same for all of them (``schedule``)
    order         the sampler's order that the method is about; another one is refused
    anchor        behaviour: the sampler's own logp (replay plans only). old: scored before the
                  first update. none
    temperature   one: scored at temperature 1. sampling: at the sampler's, as behaviour needs
    reduction     what has a ratio (5.1): a token, a position over all its states, a step, a state,
                  a pair of masks, a sequence
    normalizer    divides ll: none; the tokens that count (kept_length); the padded length L, which
                  some released code does: short answers then get ratios nearer to 1
    credit        rewards to advantages (section 6)
    step_value    what a state is worth before its step: none, or the reward of its completion in
                  one step: greedy, sampled, or with what the sampler drew there (proposed); credit
                  then gives each state an advantage of its own
    objective     the loss of an entry (section 8)
    extra         what else the objective reads: a function of (ll, adv, feature, plan, rollout,
                  normalizer) to its keywords
    kl            a penalty, or None
    features      what the network is asked for; order_logp is added to logp before the reduction;
                  position_logp makes a second ratio of each sequence, whose loss is added
    aggregation   losses to a number (9.1)
    """

    name: str
    family: str = "own"
    source: str
    title: str
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
        """What the sampler must record for this method, beside the entropy."""
        asked = (self.step_value, *self.features, self.plan.func.__name__)
        return tuple(name for word in asked for name in RECORDS.get(word, ()))

    @property
    def has_reference(self) -> bool:
        """True where a penalty (7.2) needs the ll of the reference policy."""
        return self.kl is not None and self.kl.target == "reference"

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
        return self.objective.func.reinforce_on_policy and not self.has_reference and extra


# What methods were called before a bare name meant what its authors' code computes.
RENAMED = {
    # The code of the paper's authors has the bare name, and what had it says what it is.
    "gdpo-released": "gdpo",
    "gdpo": "gdpo-sequence",
    "stabledrl-released": "stabledrl",
    "stabledrl": "stabledrl-sequence",
    "diffu-grpo-released": "diffu-grpo",
    "diffu-grpo": "diffu-grpo-paper",
    "egspo-released": "egspo",
    "egspo": "egspo-accounts",
    "egspo-sa-released": "egspo-sa",
    "egspo-sa": "egspo-sa-accounts",
    # Paper and code have one formula; the bare name has a delta whose boundary can be reached.
    "drpo-released": "drpo-published",
    # The code of somebody else.
    "ppo-released": "ppo-verl",
    "cispo-released": "cispo-verl",
    "dppo-tv-released": "dppo-tv-verl",
    "dppo-kl-released": "dppo-kl-verl",
    "unigrpo": "unigrpo-igpo",
    "bgpo": "bgpo-dare",
}


class Table(dict[str, Method]):
    """The methods by name. A name that is no longer there finds its method; iteration has only
    those of today."""

    def __missing__(self, name: str) -> Method:
        if name not in RENAMED:
            raise KeyError(name)
        return self[RENAMED[name]]


METHODS = Table()


def row(name: str, family: str, *, like: str = "", **words: Any) -> None:
    """Enter a method; what it does not say is as in the method that it is ``like``."""
    if name in METHODS:
        raise ValueError(f"row: got {name!r} twice; allowed one method a name")
    known = vars(METHODS[like]) if like else {}
    METHODS[name] = Method(**{**known, **words, "name": name, "family": family})


# ==================================================================================== 2. The table
#
# A record says what the method does (title), how it differs from its source, the states, the ratio,
# the credit and the objective. A relative says only in what it is not ``like`` another method. What
# neither says: refresh "fixed", order "any", temperature "one", normalizer "none", step_value
# "none", no extra, no KL term, features ("logp",). P is functools.partial.

EVERY_STEP = P(alg.replay_plan, num_states=None, min_entropy=0.0)

# fmt: off

# ------------------------------------------------ 2.1 The papers of this project, and the baselines

# The recorded trajectory. On the first update of an on-policy rollout reinforce, ppo, dppo and drpo
# have one gradient, up to the factor L by which the last three divide: what differs is reuse and
# mismatch. The native setting of the last three is the
# order from left to right, where every token has an exact probability; in other orders they inherit
# the bias of the token-only score.
row("reinforce", "main", source="Williams 1992; Dr. GRPO (arXiv 2503.20783)",
  title="Follows the policy gradient of the recorded trajectory, without a ratio.",
  differs="The score is that of the revealed tokens alone: exact where the order is random or "
  "fixed, biased where positions are chosen by confidence.",
  plan=EVERY_STEP,
  anchor="none", temperature="sampling", reduction="step",
  credit=P(alg.group_mean),
  objective=P(alg.reinforce), aggregation="sequence_mean")
row("ppo", "main", source="PPO (arXiv 1707.06347)",
  title="Clips one ratio for each revealed token.",
  differs="The ratio is that of a token in the state in which it was drawn, which is exact from "
  "left to right. Advantages are centred in the group and not divided by its deviation; there is "
  "no critic.",
  plan=EVERY_STEP,
  anchor="behaviour", temperature="sampling", reduction="token",
  credit=P(alg.group_mean),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="fixed_length")
row("dppo-tv", "main", like="ppo", source="DPPO (arXiv 2602.04879), eq. 12 and 13",
  title="Masks a token whose probability has moved too far (binary total variation).",
  objective=P(alg.dppo, delta=0.15, form="tv"))
row("dppo-kl", "main", like="ppo", source="DPPO (arXiv 2602.04879), eq. 12 and 15",
  title="Masks a token whose binary KL divergence from the sampler's policy is too large.",
  objective=P(alg.dppo, delta=0.05, form="kl"))
row("drpo", "main", like="ppo", source="DRPO (arXiv 2606.09821), eq. 8 as quoted in its code",
  title="Penalises the square of a token's shift of probability, in the place of a mask.",
  differs="delta lies inside (0, 1), where its boundary exists; the authors' value is that of "
  "drpo-published. The ratio is that of a token in the state in which it was drawn.",
  objective=P(alg.drpo, delta=0.15))

# Likelihoods estimated from random masks: an ELBO a sequence, or one look at the whole response
# (mean field).
row("grpo", "main", source="GRPO (arXiv 2402.03300)",
  title="Clips one ratio of ELBOs for each sequence.",
  differs="GRPO has a ratio for each token. Here the likelihood is an ELBO of the sequence, and "
  "its ratio a geometric mean over the tokens, as in GSPO (arXiv 2507.18071). There is no KL term.",
  plan=P(alg.elbo_count_plan, num_states=4, domain="keep", strata=True),
  anchor="old", reduction="sequence", normalizer="kept_length",
  credit=P(alg.group_z_score, ddof=1, eps=0.0001),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="sequence_mean")
row("diffu-grpo", "main", source="code of d1 (dllm-reasoning/d1)",
  title="Clips token ratios of a one-step mean field, with part of the prompt hidden.",
  differs="The loss is the mean over all tokens, here of the global batch and there of a "
  "micro-batch.",
  plan=P(alg.mean_field_plan, p_mask_prompt=0.15),
  anchor="old", refresh="paired", reduction="token", kl=KL("k3", 0.04),
  credit=P(alg.group_mean),
  objective=P(alg.ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="token_mean")
row("gdpo", "main", source="code of GDPO (KevinRojas1499/GDPO)",
  title="Clips one ratio a sequence, of a semi-deterministic Monte Carlo ELBO (SDMC).",
  differs="As the code, which hides floor(t L) tokens and weighs them by 1/t, scores the padding, "
  "raises the ratio to the power 1/L, and draws new masks for each side of a ratio.",
  plan=P(alg.quadrature_plan, num_nodes=3, masks_per_node=1, counts="floor", domain="all"),
  anchor="old", refresh="independent", reduction="sequence", normalizer="padded_length",
  credit=P(alg.group_mean),
  objective=P(alg.ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="sequence_mean")

# Weights instead of ratios. The published code draws new masks for every update and keeps the old
# value of its own masks (``refresh`` independent), so that the weights are noise on the first
# update; ``fixed`` shares the masks, and they are equal. At 256 tokens the noise of a sequence's
# ratio may be dozens of nats (notebook 06), and the weights then say almost nothing about the
# ratio; ``normalizer`` kept_length takes the ratio of token means, as the code does.
row("stabledrl", "main", source="code of StableDRL (JianyuanZhong/StableDRL)",
  title="Weighs answers by clipped, self-normalised ratios of token means.",
  differs="The softmax of the weights runs over the prompt's group; there it runs over the rows of "
  "a call, which is a group in its configs. No block is drawn twice while others last.",
  plan=P(alg.block_plan, num_states=2, block_length=32, p_mask=0.15),
  anchor="old", refresh="independent", reduction="sequence", normalizer="kept_length",
  credit=P(alg.group_mean), extra=P(alg.sandwich, eubo_beta=1.5, omega=0.5),
  objective=P(alg.self_normalized_clip, cap=5.0), aggregation="group_sum")
# Block-wise models: the sampler's ``attention`` must be block_causal. The same choices on plans
# whose blocks share a forward.
row("stabledrl-block", "main", like="stabledrl",
  source="StableDRL (arXiv 2603.06743), by accounts",
  title="Weighs answers of block-wise models, with all blocks in one staircase forward.",
  differs="By accounts of the paper: its code has no staircase. The clean stream attends as the "
  "sampler's cache does, and the score is the sandwich of SPG (arXiv 2510.09541).",
  plan=P(alg.block_elbo_plan, num_states=2, domain="keep", strata=True),
  normalizer="none",
  objective=P(alg.self_normalized_clip, cap=6.0))

# Some steps of the trajectory, and what a state was worth before its step. The score of the
# revealed tokens leaves out that the sampler chose their positions by confidence; egspo-exact does
# not: (4.2), with a threshold (4.5).
row("egspo", "main", source="code of EGSPO (vishnutez/egspo-dllm-rl)",
  title="Clips one ratio for each of the eight steps of highest entropy.",
  differs="As the code: it scores at temperature 1, takes the mean over the ranks and the tokens "
  "of a step, and has a KL term. Steps after the last counted token do not compete, and old values "
  "are in float32.",
  plan=P(alg.entropy_plan, num_states=8, shared=False, weight="token_mean"),
  anchor="old", reduction="step", kl=KL("k3", 0.04),
  credit=P(alg.group_mean),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.5), aggregation="sequence_mean")
row("egspo-sa", "main", like="egspo",
  title="Is egspo with an advantage for each step: reward less that of a greedy completion.",
  step_value="greedy",
  credit=P(alg.stepwise_advantage, lam=0.5, schedule="constant", normalize=True, center="rank"))

# ------------------------------------------------ 2.2 The same papers read otherwise, and ablations

row("diffu-grpo-paper", "variant", like="diffu-grpo", source="d1 (arXiv 2504.12216), eq. 4",
  differs="As the paper, with the mean over a response's tokens and then over responses; the "
  "released code takes it over all tokens of a micro-batch.",
  aggregation="sequence_mean_token_mean")
row("gdpo-sequence", "variant", like="gdpo", source="GDPO (arXiv 2510.08554), by accounts",
  title="Clips the whole sequence's ratio of an SDMC ELBO, with masks shared by its two sides.",
  differs="The paper's body was not read. By accounts the ratio is that of ELBOs of sequences, and "
  "the loss is divided by the length. There is no KL term, as the released beta is 0.",
  plan=P(alg.quadrature_plan, num_nodes=3, masks_per_node=1, counts="bernoulli", domain="keep"),
  refresh="fixed", normalizer="none", aggregation="sequence_mean_token_mean")
row("stabledrl-sequence", "variant", like="stabledrl-block",
  title="Weighs answers by clipped, self-normalised ratios of whole sequences.",
  differs="The paper's body was not read. By accounts its eps is 5, so that a ratio is capped at "
  "6, and its ratio is that of sequences; the ELBO by count is this project's choice, and the "
  "score is the sandwich of SPG (arXiv 2510.09541).",
  plan=P(alg.elbo_count_plan, num_states=2, domain="keep", strata=True))
row("stabledrl-elbo", "variant", like="stabledrl-sequence",
  title="Is stabledrl-sequence with the ELBO alone, and ratios of token means.",
  differs="By accounts eps is 5. The score is the ELBO and not a sandwich of ELBO and EUBO, and "
  "the ratio is that of token means.",
  normalizer="kept_length", extra=None)
row("clip-only", "variant", like="stabledrl-sequence",
  title="Clips the weights of stabledrl-sequence and does not normalise them.",
  differs="An ablation. The weights are divided by N in the place of their sum over the group; the "
  "score is the sandwich of SPG (arXiv 2510.09541).",
  objective=P(alg.truncated_is, floor=0.0, cap=6.0), aggregation="sequence_mean")
row("self-norm-only", "variant", like="stabledrl-sequence",
  title="Normalises the weights of stabledrl-sequence and does not clip them.",
  differs="An ablation. There is no cap; the score is the sandwich of SPG (arXiv 2510.09541).",
  objective=P(alg.self_normalized_clip, cap=math.inf))
row("egspo-accounts", "variant", like="egspo", source="EGSPO (arXiv 2603.12554): accounts, code",
  title="Clips one ratio for each of the four steps of highest entropy.",
  differs="It is scored at the sampling temperature, against the sampler's record, as the sum over "
  "the chosen steps and without a KL term. The score is that of the tokens alone.",
  plan=P(alg.entropy_plan, num_states=4, shared=False, weight="sum"),
  anchor="behaviour", temperature="sampling", kl=None)
row("egspo-sa-accounts", "variant", like="egspo-accounts",
  source="EGSPO-SA (arXiv 2603.12554): accounts, code",
  title="Is egspo-accounts with an advantage for each step, as egspo-sa.",
  step_value="greedy",
  credit=P(alg.stepwise_advantage, lam=0.5, schedule="constant", normalize=True, center="rank"))
row("dppo-topk", "variant", like="ppo", source="DPPO (arXiv 2602.04879), eq. 12, 14 and 16",
  title="Masks a token where the likeliest tokens together have moved too far.",
  extra=P(alg.topk_divergence, form="tv"), features=("logp", "topk_logp"),
  objective=P(alg.dppo, delta=0.15, form=None))
row("dppo-tv-verl", "variant", like="dppo-tv", source="verl's dppo_tv",
  differs="As verl's code: a truncated, detached weight times logp, and the mean over all tokens.",
  objective=P(alg.dppo_released, delta=0.15, form="tv", cap=20.0), aggregation="token_mean")
row("dppo-kl-verl", "variant", like="dppo-kl", source="verl's dppo_kl",
  differs="As verl's code: a truncated, detached weight times logp, and the mean over all tokens.",
  objective=P(alg.dppo_released, delta=0.05, form="kl", cap=20.0), aggregation="token_mean")
row("drpo-published", "variant", like="drpo", source="code of DRPO (Tencent-Hunyuan/UniRL)",
  differs="delta is 12.5, at which no token can reach the boundary. The code clamps the log-ratio "
  "to 20, which is not done here.",
  objective=P(alg.drpo, delta=12.5))
row("ppo-verl", "variant", like="ppo", source="verl's vanilla policy loss",
  title="Clips one ratio for each revealed token, and bad answers from above as well.",
  differs="As verl's code: a dual clip at 3, and the mean over all tokens.",
  objective=P(alg.dual_clip, epsilon_low=0.2, epsilon_high=0.2, bound=3.0),
  aggregation="token_mean")

# ------------------------------------------------------------------------------ 2.3 Related papers

# The recorded trajectory, a ratio a step.
row("replay-grpo", "kin", like="reinforce",
  source="code of d2 (arXiv 2509.21474), TraceRL (arXiv 2509.06949)",
  title="Clips one ratio for each step of the trajectory.",
  differs="It is anchored on the sampler's log-probabilities, with the clip and the z-score of "
  "GRPO. The score is that of the tokens alone.",
  anchor="behaviour",
  credit=P(alg.group_z_score, ddof=1, eps=0.0001),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="fixed_length")
row("trace-block", "kin", like="replay-grpo",
  source="code of TraceRL (arXiv 2509.06949); DiPO (arXiv 2512.22234)",
  title="Is replay-grpo for block-wise models.",
  differs="There is no value network and no KL term. One ratio a step is taken against the "
  "sampler's own log-probabilities.",
  plan=P(alg.block_replay_plan))
row("replay-uniform", "kin", like="reinforce", source="AGRPO (arXiv 2510.04019), by accounts",
  title="Follows the policy gradient on four steps, drawn uniformly.",
  differs="It is unbiased by a weight, the steps that count over those drawn, and lacks AGRPO's "
  "clip. It is a control of egspo-accounts.",
  plan=P(alg.replay_plan, num_states=4, min_entropy=0.0))

# One ratio a revealed token, or one weight.
row("clip-higher", "kin", like="ppo", source="DAPO (arXiv 2503.14476)",
  title="Clips one ratio for each revealed token, wider above than below.",
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.28), aggregation="token_mean")
row("gspo", "kin", like="ppo", source="GSPO (arXiv 2507.18071)",
  title="Clips one ratio a sequence, the geometric mean of those of its tokens.",
  differs="The likelihood of the recorded trajectory takes the place of the sequence's. Advantages "
  "are centred in the group and not divided by its deviation.",
  reduction="sequence", normalizer="kept_length",
  objective=P(alg.ppo_clip, epsilon_low=0.0003, epsilon_high=0.0004), aggregation="sequence_mean")
row("cispo", "kin", like="ppo", source="CISPO (arXiv 2506.13585)",
  title="Clips detached importance weights, so that no token loses its gradient.",
  objective=P(alg.truncated_is, floor=0.0, cap=5.0), aggregation="token_mean")
row("cispo-verl", "kin", like="cispo", source="verl's cispo",
  differs="As verl's code: the weight has a floor as well.",
  objective=P(alg.truncated_is, floor=0.8, cap=1.28))
row("tis", "kin", like="ppo", source="truncated importance sampling, with verl's cap",
  title="Weighs tokens where sampler and policy differ, up to a cap.",
  objective=P(alg.truncated_is, floor=0.0, cap=2.0))
row("spo", "kin", like="ppo", source="SPO (arXiv 2401.16025)",
  title="Penalises the square of a token's ratio less one.",
  objective=P(alg.spo, epsilon=0.2))
row("justgrpo", "kin", like="reinforce",
  source="code of JustGRPO (arXiv 2601.15165), LeapLabTHU/JustGRPO",
  title="Reveals tokens from left to right and follows their exact policy gradient.",
  differs="As its code, whose ratio is always 1, so that there is no clip. Tokens are scored to "
  "the first EOS, and the mean is over all rollouts.",
  order="left_to_right", reduction="token",
  credit=P(alg.group_z_score, ddof=1, eps=0.0001), aggregation="fixed_length")
row("mask-aware", "kin", source="draft code of Mask-Aware PG (arXiv 2607.15200)",
  title="Clips one ratio of the tokens and another of their positions.",
  differs="The code calls itself a draft. It merges the steps into 32 segments and takes 12 of "
  "them, with all later segments as rivals of a position; here all steps are taken, those behind "
  "the first EOS included, with the rivals of the same block.",
  plan=EVERY_STEP,
  anchor="old", reduction="sequence", normalizer="kept_length",
  credit=P(alg.leave_one_out), features=("logp", "position_logp"),
  objective=P(alg.ppo_clip, epsilon_low=3e-4, epsilon_high=4e-4), aggregation="sequence_mean")
row("tracerl", "kin", source="TraceRL (arXiv 2509.06949): accounts, code",
  title="Clips one ratio a token, on steps merged in pairs.",
  differs="There is no value network. Two steps are merged, not eight, and the loss is the mean "
  "over a response's tokens.",
  plan=P(alg.merged_plan, merge=2),
  anchor="old", temperature="sampling", reduction="token", kl=KL("k3", 0.01, target="old"),
  credit=P(alg.group_z_score, ddof=1, eps=0.0001),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2),
  aggregation="sequence_mean_token_mean")
row("mdpo", "kin", source="code of MDPO (arXiv 2508.13148), autonomousvision/mdpo",
  title="Has the prediction of each step verified, and rewards its progress.",
  differs="There are 4 states and not 8 to 16, none after the end of an answer, and the mean is "
  "over responses and positions. The running confidence of its sampler is left out.",
  plan=P(alg.prediction_plan),
  anchor="old", temperature="sampling", reduction="token",
  step_value="proposed", kl=KL("k2", 0.02),
  credit=P(alg.progress_advantage, num_states=4, eps=0.0001),
  objective=P(alg.confident_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="fixed_length")

# Likelihoods from random masks.
row("spg", "kin", like="stabledrl",
  source="code of SPG (arXiv 2510.09541), facebookresearch/SPG",
  title="Raises a lower bound for good answers and lowers a sandwich of bounds for bad ones.",
  differs="As released, with sequences weighted by their length, where the paper has a mean. No "
  "block is drawn twice while others last.",
  anchor="none", refresh="paired",
  objective=P(alg.reinforce), aggregation="length_weighted")
row("wd1", "kin", source="wd1 (arXiv 2507.08838), read in its code (xiaohangt/wd1)",
  title="Weighs answers by a softmax of their advantages, without a ratio.",
  differs="The softmax runs over the prompt's group; in the code it runs over the rows of a call, "
  "which hold one group there.",
  plan=P(alg.mean_field_plan, p_mask_prompt=0.15),
  anchor="none", refresh="paired", reduction="sequence",
  credit=P(alg.softmax_contrast, psi=1.0),
  objective=P(alg.reinforce), aggregation="group_sum")
row("espo", "kin", source="ESPO (arXiv 2512.03759), read in its code (ML-GSAI/ESPO)",
  title="Clips one ratio of ELBOs for each sequence, from masks and their complements.",
  differs="The counts are not stratified over the rows of a call. beta is that of its yaml, 0.01; "
  "its scripts have 0.001 to 0.01.",
  plan=P(alg.complementary_plan, num_states=4, domain="all"),
  anchor="old", refresh="paired", reduction="sequence", normalizer="padded_length",
  credit=P(alg.leave_one_out), kl=KL("k2", 0.01, of="per_token"),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="sequence_mean")
row("gdsd", "kin", source="code of GDSD (arXiv 2605.29398), GaryBall/GDSD",
  title="Regresses log-ratios on advantages.",
  differs="The weights are those of its TLC variant, an ELBO's. Logits are not centred, which "
  "leaves the gradient as it is; the clip is 0.2 and 0.28 in the place of 0.0004; there is no KL "
  "term.",
  plan=P(alg.complementary_plan, num_states=4, domain="all"),
  anchor="old", reduction="pair",
  credit=P(alg.leave_one_out), extra=P(alg.response_length),
  objective=P(alg.regression, psi=1.0, epsilon_low=0.2, epsilon_high=0.28),
  aggregation="sequence_mean")
row("ebpo-block", "kin", source="EBPO (arXiv 2602.08676), eq. 4 and 5",
  title="Clips one ratio of block-wise ELBOs for each sequence, for block-wise models.",
  differs="The report has no numbers: clip and credit are those of a re-implementation (DARE), "
  "which has 16 masks.",
  plan=P(alg.block_elbo_plan, num_states=2, domain="keep", strata=True),
  anchor="old", reduction="sequence",
  credit=P(alg.group_z_score, ddof=1, eps=1e-06),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="sequence_mean")
row("coupled-grpo", "kin", source="DiffuCoder (arXiv 2506.20639) and its code",
  title="Clips token ratios estimated from masks and their complements.",
  differs="As its code, with the mean over the tokens of the global batch; there it is over those "
  "of a micro-batch.",
  plan=P(alg.coupled_plan, low=0.2, high=0.8),
  anchor="old", refresh="paired", reduction="position", kl=KL("k3", 0.01),
  credit=P(alg.leave_one_out),
  objective=P(alg.ppo_clip, epsilon_low=0.5, epsilon_high=0.5), aggregation="token_mean")
row("bgpo-dare", "kin", source="BGPO (arXiv 2510.11683), by accounts and DARE's code",
  title="Replaces the ratio by a bound that is linear for good answers, one mask at a time.",
  differs="Numbers, clips and the padded length are those of a re-implementation (DARE). The "
  "strata are of a response's own draws.",
  plan=P(alg.elbo_count_plan, num_states=16, domain="keep", strata=True),
  anchor="old", reduction="state", normalizer="padded_length",
  credit=P(alg.group_z_score, ddof=1, eps=1e-06),
  objective=P(alg.tangent, epsilon_low=0.2, epsilon_high=0.2, bound=3.0),
  aggregation="length_weighted")
row("unigrpo-igpo", "kin", source="UniGRPO (arXiv 2505.15809) as in facebookresearch/igpo",
  title="Clips token ratios, with more tokens hidden at each update.",
  differs="It follows that code: the paper was not read, and its re-implementations disagree. "
  "Padding is scored.",
  plan=P(alg.scheduled_plan, min_t=0.1, domain="all", progress=0.0),
  anchor="old", refresh="scheduled", reduction="token", kl=KL("k3", 0.01),
  credit=P(alg.group_mean),
  objective=P(alg.ppo_clip, epsilon_low=0.2, epsilon_high=0.2), aggregation="entry_mean")

# -------------------------------------------------------------------------- 2.4 This project's own

row("gdpo-arcs", "own", like="gdpo-sequence",
  source="this project; GDPO (arXiv 2510.08554) by accounts",
  title="Is gdpo-sequence with an ELBO from arcs of a circle.",
  differs="The estimator is unbiased at any length. It takes three calls, as gdpo-sequence does, "
  "and had less noise wherever that was measured.",
  plan=P(alg.arc_plan, num_states=3, domain="keep"))
row("stabledrl-cv", "own", like="stabledrl-elbo",
  source="this project; StableDRL (arXiv 2603.06743) by accounts",
  title="Is stabledrl-elbo with weights from a quieter ELBO.",
  differs="It takes three calls, and a control variate from the rollout's own states (2.12), whose "
  "constants a run reads from its base's folder; without them the plan is that of gdpo-arcs.",
  plan=P(alg.control_variate_plan, num_states=3, domain="keep", constants=None))
row("egspo-exact", "own", like="egspo-accounts",
  source="this project; EGSPO (arXiv 2603.12554): accounts, code",
  title="Is egspo-accounts with the exact kernel of the sampler: the choice of positions counts.",
  differs="The position factor (4.2) is this project's. Tokens and positions are scored against "
  "the old weights, since the sampler records the tokens alone.",
  anchor="old", features=("logp", "order_logp"))

# fmt: on


# ======================================================================== 3. What a method computes


def draw(
    method: Method,
    rollout: Rollout,
    generator: torch.Generator,
    *,
    update: int = 0,
    updates: int = 1,
    schedule: torch.Generator | None = None,
) -> Plan:
    """The method's plan for one of the ``updates`` on a rollout, counted from 0."""
    if method.refresh != "scheduled":
        return method.plan(rollout, generator)
    progress = update / max(1, updates - 1)
    return method.plan(rollout, generator, progress=progress, schedule=schedule)


def normalizer(method: Method, rollout: Rollout) -> Float[Tensor, " B"]:
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
    """The method's ll: logp, and order_logp where the method asks for it, with its level and
    normaliser; position_logp is an entry of its own, the second of each sequence."""
    # What a step did: the tokens that it revealed and, where it counts, the choice of their places.
    logp = feature["logp"]
    if "order_logp" in method.features:
        logp = logp + feature["order_logp"]
    scale = normalizer(method, rollout).to(logp.dtype)
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
    """The method's credit: (B,), or (K, B) where each state of the plan has a value of its own
    (``step_value``)."""
    if method.step_value == "none":
        return method.credit(reward, rollout.num_generations)
    time = plan.step.to(reward.dtype) / alg.num_steps(rollout)
    return method.credit(reward, rollout.num_generations, step_reward, plan.valid, time)


def completions(method: Method, rollout: Rollout) -> Int[Tensor, "B T L"]:
    """The record of the text that each state would become in one step (``step_value``)."""
    (name,) = RECORDS[method.step_value]
    return alg.record(rollout, name)


def surrogate(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    feature: dict,
    adv: Advantage,
    anchor: Entries | None,
) -> Surrogate:
    """The method's objective on its ll: a loss for each entry."""
    ll = reduced(method, plan, rollout, feature)
    adv = adv.to(ll.dtype)[..., None].expand_as(ll)
    scale = normalizer(method, rollout).to(ll.dtype)
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
    """The method's KL term, entry by entry, without its weight; None where it has none."""
    if method.kl is None:
        return None
    # The exact KL of each scored position is a feature: it is summed over states as logp is.
    if method.kl.form == "exact":
        blank = dict.fromkeys(method.features, torch.zeros_like(feature["kl_ref"]))
        plan = dataclasses.replace(plan, shift=None)  # a control variate is one of log p
        return reduced(method, plan, rollout, blank | {"logp": feature["kl_ref"]})
    # Else k1, k2 or k3 of a difference of two ll, both with the normaliser or both without.
    target = anchor if method.kl.target == "old" else ref
    ll = kl_target(method, plan, rollout, feature)
    kl = alg.kl_term(ll, target, form=method.kl.form)
    if method.kl.of != "per_token":
        return kl
    # per_token: the form is taken of the whole difference, and then divided.
    return kl / normalizer(method, rollout).to(kl.dtype)[..., None]


def method_loss(
    method: Method,
    plan: Plan,
    rollout: Rollout,
    feature: dict,
    adv: Advantage,
    anchor: Entries | None,
    ref: Entries | None,
) -> Float[Tensor, ""]:
    """The loss of a method by (10.1): its objective, its KL term, its aggregation."""
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
    # Of the entries that exist: a ragged plan pads.
    ll = reduced(method, plan, rollout, feature)
    present = alg.entries(plan, method.reduction)[0].expand_as(ll)
    logs = alg.log_ratio(ll, anchor)[present]
    ratio = logs.exp()
    if not len(logs):
        return {}
    # What the objective's own clip or mask did to them.
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


# ================================================================== 4. What a run may replace in it

PARTS = ("plan", "credit", "objective", "extra")
# A credit, and an estimator of an ELBO of the tokens that count, may be replaced by one of these.
COMPONENTS = {
    "credit": [P(alg.group_mean), P(alg.leave_one_out), P(alg.group_z_score, ddof=1, eps=1e-4)],
    "plan": [
        P(alg.elbo_time_plan, num_states=3, domain="keep", min_t=1e-3),
        P(alg.elbo_count_plan, num_states=3, domain="keep", strata=True),
        P(alg.quadrature_plan, num_nodes=3, masks_per_node=1, counts="bernoulli", domain="keep"),
        P(alg.arc_plan, num_states=3, domain="keep"),
        P(alg.control_variate_plan, num_states=3, domain="keep", constants=None),
    ],
}
COMPONENTS = {key: {p.func.__name__: p for p in parts} for key, parts in COMPONENTS.items()}
KL_WORDS = {
    "form": ("k1", "k2", "k3", "exact"),
    "of": ("ratio", "log_likelihood", "per_token"),
    "target": ("reference", "old"),
}
# Where a number must lie, if the function that reads it does not say so itself.
ABOVE_0 = ("epsilon_low", "epsilon_high", "eubo_beta", "psi")
FROM_0 = ("eps", "min_entropy", "beta")


def numbers(method: Method) -> list[str]:
    """The keywords of the components that are options.

    Not those that something else decides: a word that is None, and what a plan is told. The number
    of states may be None, which is every step.
    """
    parts = {part: getattr(method, part) for part in PARTS if getattr(method, part)}
    words = {f"{part}.{name}": p.keywords[name] for part, p in parts.items() for name in p.keywords}
    given = [k for k, value in words.items() if value is not None or k == "plan.num_states"]
    return [key for key in given if key != "plan.progress"]


def choices(method: Method) -> dict[str, tuple[str, ...]]:
    """The options that are a choice by name, each with the words that this method may use."""
    found = {k: CHOICES[k] for k in ("aggregation", "refresh", "normalizer", "reduction")}
    if "progress" not in method.plan.keywords:
        found["refresh"] = tuple(word for word in found["refresh"] if word != "scheduled")
    if method.step_value == "none":
        found["credit"] = tuple(COMPONENTS["credit"])
    # An advantage for each state has no place at a level without states; and what else an objective
    # reads, as the bound of a sequence, is of the method's own level.
    if method.step_value != "none" or method.extra:
        del found["reduction"]
    if method.step_value in ("greedy", "sampled"):
        found["step_value"] = ("greedy", "sampled")
    if method.on_record:
        found["anchor"] = ("behaviour", "old")
    # A method that takes more from its states, as an upper bound, keeps its own.
    if method.plan.func.__name__ in COMPONENTS["plan"] and method.extra is None:
        found["plan"] = tuple(COMPONENTS["plan"])
    return found


def has_option(method: Method, key: str) -> bool:
    """True where ``key`` names an option of this method (its value may still be refused)."""
    penalty = KL._fields if method.kl else ("form", "beta")
    return key in (*numbers(method), *choices(method), *(f"kl.{name}" for name in penalty))


def with_options(method: Method, options: dict[str, Any]) -> Method:
    """The method with some of its numbers and words replaced: {"plan.num_states": 4, "kl.beta":
    0.0, "refresh": "fixed"}.

    Keys: a component and one of its keywords (``numbers``), a choice by name (``choices``), and the
    fields of a KL term. ``kl.beta`` 0 removes the term, and with it the reference model;
    ``kl.form`` and ``kl.beta`` together give a method the one that it lacks. ValueError for a key
    that the method does not have, and for a value of another kind than the present one.
    """
    penalty = {}
    for key in sorted(options, key=lambda key: "." in str(key)):  # a component before its numbers
        value, (part, _, name) = options[key], str(key).partition(".")
        if key in (words := choices(method)):
            _check(key, value, words[key])
            chosen = COMPONENTS[key][value] if key in COMPONENTS else value
            method = dataclasses.replace(method, **{key: chosen})
        elif key in numbers(method):
            component = getattr(method, part)
            _check(key, value, component.keywords[name])
            method = dataclasses.replace(method, **{part: partial(component, **{name: value})})
        elif part == "kl" and name in KL._fields:
            _check(key, value, KL_WORDS.get(name, 0.01))
            penalty[name] = value
        else:
            keys = [*numbers(method), *(f"kl.{name}" for name in KL._fields), *words]
            what = f"method_options.{key}: no such option of {method.name}"
            raise ValueError(f"{what}; allowed {', '.join(keys)}")
    return _with_penalty(method, penalty) if penalty else method


def _with_penalty(method: Method, given: dict[str, Any]) -> Method:
    """The method with another KL term, a new one, or none (beta 0)."""
    if method.kl is None and not {"form", "beta"} <= given.keys():
        name, value = next(iter(given.items()))
        allowed = f"with kl.form and kl.beta both, {method.name} has no KL term"
        raise _refused(f"kl.{name}", value, allowed)
    kl = KL(**(method.kl._asdict() if method.kl else {}) | given)
    # The old policy is present as the ll of the ratio only: not as a network, and not under another
    # normaliser.
    if kl.of != "ratio" and (kl.form == "exact" or kl.target == "old"):
        raise _refused("kl.of", kl.of, f"ratio with form {kl.form}, target {kl.target}")
    if kl.target == "old" and (kl.form == "exact" or method.anchor == "none"):
        allowed = f"reference with form {kl.form}, anchor {method.anchor}"
        raise _refused("kl.target", kl.target, allowed)
    features = tuple(name for name in method.features if name != "kl_ref")
    features += ("kl_ref",) if kl.form == "exact" and kl.beta else ()
    return dataclasses.replace(method, kl=kl if kl.beta else None, features=features)


def _check(key: str, value: Any, present: Any) -> None:
    """A choice is one of its words; any other option keeps its kind, and a number its bounds."""
    name = key.rpartition(".")[2]
    if isinstance(present, tuple):
        right, allowed = value in present, ", ".join(present)
    elif key == "plan.num_states" and value is None:
        return
    elif isinstance(present, str | bool):
        right, allowed = type(value) is type(present), f"a value like {present!r}"
    elif type(value) not in (int, float) or math.isnan(value):
        right, allowed = False, f"a value like {present!r}"
    elif name == "omega":
        right, allowed = 0 <= value <= 1, "0 to 1"
    elif name in FROM_0:
        right, allowed = 0 <= value < math.inf, "finite numbers from 0"
    else:
        right, allowed = value > 0 or name not in ABOVE_0, "above 0"
    if not right:
        raise _refused(key, value, allowed)


def _refused(key: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"method_options.{key}: got {value!r}; allowed {allowed}")
