"""The numbers and words of every method, against those of its source, each with where it stands.

A code, a script or a configuration is named where it has the number; a paper where it gives it. "by accounts": as summaries by
others quote it; docs/papers.md says which papers were not read. "ours": no source gives it, or the method departs from it. A
number that is changed on purpose changes results under the same name.
"""

import math

import pytest

from minidrl.methods import METHODS
from minidrl.run import lookup

EVERY = {"plan.num_states": None, "plan.min_entropy": 0.0}  # every recorded step, whatever its entropy


def clip(low: float, high: float) -> dict[str, float]:
    return {"objective.epsilon_low": low, "objective.epsilon_high": high}


def z_score(eps: float) -> dict[str, float]:
    return {"credit.ddof": 1, "credit.eps": eps}


def masks(count: int) -> dict:
    """Of the ELBO by count, in the kept tokens; ours: strata over the draws of a response."""
    return {"plan.num_states": count, "plan.domain": "keep", "plan.strata": True}


def nodes(counts: str, domain: str) -> dict:
    return {"plan.num_nodes": 3, "plan.masks_per_node": 1, "plan.counts": counts, "plan.domain": domain}


def steps(count: int, weight: str) -> dict:
    return {"plan.num_states": count, "plan.shared": False, "plan.weight": weight}


def penalty(form: str, beta: float, of: str = "ratio", target: str = "reference") -> dict:
    return {"kl.form": form, "kl.beta": beta, "kl.of": of, "kl.target": target}


# GRPO's standard deviation in released code (docs/papers.md): N - 1, torch's default, plus 1e-4.
GRPO = z_score(1e-4)
# DARE, a re-implementation: N - 1, plus verl's 1e-6.
DARE = z_score(1e-6)
# SPG's scripts: beta 1.5 of the EUBO for GSM8K, MATH and Countdown, half of it in the mixture.
SANDWICH = {"extra.eubo_beta": 1.5, "extra.omega": 0.5}
# SPG's and StableDRL's configurations: two draws, blocks of 32, 15 % of what lies before hidden.
BLOCKS = {"plan.num_states": 2, "plan.block_length": 32, "plan.p_mask": 0.15}
# d1's train.yaml: 15 % of the prompt hidden; epsilon 0.5, beta 0.04.
D1 = {"plan.p_mask_prompt": 0.15, **clip(0.5, 0.5), **penalty("k3", 0.04)}
# EGSPO's train.sh: lambda 0.5, divided by 1 + lambda, constant over the steps; its code centres each rank.
LAMBDA = {"credit.lam": 0.5, "credit.schedule": "constant", "credit.normalize": True, "credit.center": "rank"}

PUBLISHED = {
    "reinforce": EVERY,
    "replay-grpo": EVERY | GRPO | clip(0.2, 0.2),  # GRPO's clip; TraceRL's configuration has 0.2, too
    "replay-uniform": {**EVERY, "plan.num_states": 4},  # ours: as many as egspo-accounts
    "grpo": masks(4) | GRPO | clip(0.2, 0.2),  # the clip of the paper; masks: ours
    "diffu-grpo-paper": D1,
    "diffu-grpo": D1,
    # Three nodes: gauss-3 of its sbatch file; its train.yaml: d1's clip, beta 0.
    "gdpo-sequence": nodes("bernoulli", "keep") | clip(0.5, 0.5),
    "gdpo": nodes("floor", "all") | clip(0.5, 0.5),
    "gdpo-arcs": {
        "plan.num_states": 3,
        "plan.domain": "keep",
        **clip(0.5, 0.5),
    },  # ours: the calls and the clip of gdpo-sequence
    # By accounts: eps 5, so that a ratio is capped at 1 + 5. Its code: ais_clip_iw 5. Two masks: n_t of both codes.
    "stabledrl-sequence": masks(2) | {"objective.cap": 1 + 5.0} | SANDWICH,
    "stabledrl": BLOCKS | {"objective.cap": 5.0} | SANDWICH,
    "stabledrl-elbo": masks(2) | {"objective.cap": 1 + 5.0},
    "stabledrl-cv": {"plan.num_states": 3, "plan.domain": "keep", "objective.cap": 1 + 5.0},  # ours, but for the cap
    "clip-only": masks(2) | {"objective.floor": 0.0, "objective.cap": 1 + 5.0} | SANDWICH,  # 1 - 5 bounds no ratio
    "self-norm-only": masks(2) | {"objective.cap": math.inf} | SANDWICH,
    "stabledrl-block": masks(2) | {"objective.cap": 1 + 5.0} | SANDWICH,
    "spg": BLOCKS | SANDWICH,
    "trace-block": GRPO | clip(0.2, 0.2),  # TraceRL's configuration
    # EGSPO's train.sh: eight steps, clip 0.2 and 0.5, beta 0.04; four of them, summed, without the KL term: ours.
    "egspo-accounts": steps(4, "sum") | clip(0.2, 0.5),
    "egspo-sa-accounts": steps(4, "sum") | LAMBDA | clip(0.2, 0.5),
    "egspo-exact": steps(4, "sum") | clip(0.2, 0.5),
    "egspo": steps(8, "token_mean") | clip(0.2, 0.5) | penalty("k3", 0.04),
    "egspo-sa": steps(8, "token_mean") | LAMBDA | clip(0.2, 0.5) | penalty("k3", 0.04),
    "ppo": EVERY | clip(0.2, 0.2),  # the paper
    "ppo-verl": EVERY | clip(0.2, 0.2) | {"objective.bound": 3.0},  # verl's defaults: clip_ratio 0.2, clip_ratio_c 3
    "clip-higher": EVERY | clip(0.2, 0.28),  # the paper of DAPO
    "gspo": EVERY | clip(3e-4, 4e-4),  # the paper of GSPO
    "cispo": EVERY | {"objective.floor": 0.0, "objective.cap": 5.0},  # trl's epsilon_high 5, there a bound of the weight itself
    "cispo-verl": EVERY | {"objective.floor": 1 - 0.2, "objective.cap": 1 + 0.28},  # verl: 1 -+ its two widths, here DAPO's
    "tis": EVERY | {"objective.floor": 0.0, "objective.cap": 2.0},  # verl's default of its correction of rollouts
    "spo": EVERY | {"objective.epsilon": 0.2},  # the paper
    # DPPO's paper and verl's scripts: 0.15 for the shift, 0.05 for the divergence; 20 is one of verl's truncations.
    "dppo-tv": EVERY | {"objective.delta": 0.15, "objective.form": "tv"},
    "dppo-kl": EVERY | {"objective.delta": 0.05, "objective.form": "kl"},
    "dppo-topk": EVERY | {"objective.delta": 0.15, "extra.form": "tv"},
    "dppo-tv-verl": EVERY | {"objective.delta": 0.15, "objective.form": "tv", "objective.cap": 20.0},
    "dppo-kl-verl": EVERY | {"objective.delta": 0.05, "objective.form": "kl", "objective.cap": 20.0},
    "drpo": EVERY | {"objective.delta": 0.15},  # ours: DPPO's, so that the two have one boundary
    "drpo-published": EVERY | {"objective.delta": 12.5},  # UniRL's recipe
    # dLLM-RL's configuration for LLaDA: clip 0.2, beta 0.01; eight steps merged there, two here.
    "tracerl": {"plan.merge": 2} | GRPO | clip(0.2, 0.2) | penalty("k3", 0.01, target="old"),
    # mdpo's scripts: clip 0.2, beta 0 to 0.02; eight to sixteen of 128 steps there, four here.
    "mdpo": {"credit.num_states": 4, "credit.eps": 1e-4} | clip(0.2, 0.2) | penalty("k2", 0.02),
    # GDSD's demo: psi 1, two masks and their complements; its yaml clips at 4e-4 on both sides, the widths are ours.
    "gdsd": {"plan.num_states": 2 * 2, "plan.domain": "all", "objective.psi": 1.0} | clip(0.2, 0.28),
    "wd1": {"plan.p_mask_prompt": 0.15, "credit.psi": 1.0},  # its code: d1's masks, no number beside the advantage
    "justgrpo": EVERY | GRPO,
    # ESPO's yaml: two masks and their complements, epsilon 0.2, beta 0.01.
    "espo": {"plan.num_states": 2 * 2, "plan.domain": "all"} | clip(0.2, 0.2) | penalty("k2", 0.01, of="per_token"),
    "ebpo-block": masks(2) | DARE | clip(0.2, 0.2),  # DARE's credit and clip
    # ml-diffucoder's recipe: epsilon 0.5, beta 0.01; its trainer draws the share of masks in [0.2, 0.8].
    "coupled-grpo": {"plan.low": 0.2, "plan.high": 0.8, **clip(0.5, 0.5), **penalty("k3", 0.01)},
    "bgpo-dare": masks(16) | DARE | clip(0.2, 0.2) | {"objective.bound": 3.0},  # by accounts n_t = 16; DARE: dual clip at 3
    # igpo's trainer: t from 0.1; dLLM-RL's configuration of random masking: epsilon 0.2, beta 0.01.
    "unigrpo-igpo": {"plan.min_t": 0.1, "plan.domain": "all"} | clip(0.2, 0.2) | penalty("k3", 0.01),
    "mask-aware": EVERY | clip(3e-4, 4e-4),  # its draft code
}


@pytest.mark.parametrize("name", [*METHODS, *(PUBLISHED.keys() - METHODS.keys())])
def test_the_numbers_and_words_of_a_method_are_those_of_its_source(name):
    assert name in PUBLISHED, f"{name}: write its numbers into PUBLISHED, each with the place where it stands"
    assert lookup.settings(METHODS[name]) == PUBLISHED[name]
