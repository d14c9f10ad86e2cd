"""Rollout.of and Plan.of: examples written down by hand, with the fields that nobody gave."""

import pytest
import torch

from minidrl import algorithms as alg
from minidrl import oracle
from minidrl.features import features
from minidrl.methods import METHODS, behaviour_anchor

RESPONSE = [[0, 2, 1], [1, 1, 0]]


def test_a_rollout_of_responses_alone():
    made = alg.Rollout.of(RESPONSE)
    assert made.response.tolist() == RESPONSE and made.keep.all() and made.keep.dtype == torch.bool
    assert made.prompt.shape == made.prompt_mask.shape == (2, 0) and made.prompt_mask.dtype == torch.bool
    assert made.prompt.dtype == made.response.dtype == torch.long
    assert made.unmask_step.tolist() == [[-1] * 3] * 2 and made.logp.tolist() == [[0.0] * 3] * 2
    assert made.logp.dtype == torch.get_default_dtype()
    assert (made.num_generations, made.sampler, made.records) == (1, None, {})
    assert made.lengths.tolist() == [3, 3]


def test_a_given_prompt_is_visible_and_not_padding():
    made = alg.Rollout.of(RESPONSE, prompt=[[7, 0], [0, 0]])
    assert made.prompt.tolist() == [[7, 0], [0, 0]] and made.prompt_mask.tolist() == [[True, True]] * 2
    padded = alg.Rollout.of(RESPONSE, prompt=[[7, 0], [0, 0]], prompt_mask=[[0, 1], [1, 1]])
    assert padded.prompt_mask.tolist() == [[False, True], [True, True]] and padded.prompt_mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"response": [0, 1]}, r"response: got \(2,\); allowed two dimensions \(B, L\)"),
        ({"keep": [[True, True, True]]}, r"keep: got \(1, 3\); allowed shape \(2, 3\)"),
        ({"prompt_mask": [[True], [True]]}, r"prompt_mask: got \(2, 1\); allowed shape \(2, 0\)"),
    ],
)
def test_a_rollout_whose_fields_do_not_fit_is_refused(given: dict, message: str):
    with pytest.raises(ValueError, match=message) as error:
        alg.Rollout.of(given.pop("response", RESPONSE), **given)
    assert "\n" not in str(error.value)


def test_a_plan_of_scored_positions_alone():
    scored = [[[True, False, True], [False, False, False]]]
    made = alg.Plan.of(scored)
    assert made.scored.tolist() == made.hidden.tolist() == scored and made.weight.tolist() == [[1.0, 1.0]]
    assert made.valid.tolist() == [[True, False]] and made.network_calls == 1
    assert made.step is None and made.targets is None and made.block_length is None and not made.replay


@pytest.mark.parametrize(
    ("scored", "given", "message"),
    [
        ([[True, False]], {}, r"scored: got \(1, 2\); allowed three dimensions \(K, B, L\)"),
        ([[[True, False]]], {"hidden": [[[True]]]}, r"hidden: got \(1, 1, 1\); allowed shape \(1, 1, 2\)"),
    ],
)
def test_a_plan_whose_fields_do_not_fit_is_refused(scored: list, given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        alg.Plan.of(scored, **given)


def test_made_by_hand_they_are_what_the_library_computes_with():
    """The step scores of two trajectories, against conditionals of the oracle looked up one at a time."""
    model = oracle.TabularDenoiser.random(3, 3, torch.Generator().manual_seed(0))
    step = [[0, 1, 2], [2, 0, 1]]
    hidden = [[[s >= k for s in row] for row in step] for k in range(3)]
    scored = [[[s == k for s in row] for row in step] for k in range(3)]
    rollout = alg.Rollout.of(RESPONSE, unmask_step=step, logp=torch.full((2, 3), -0.5).double(), num_generations=2)
    plan = alg.Plan.of(scored, hidden=hidden, step=torch.arange(3)[:, None].expand(3, 2))
    logp = features(model, rollout, plan, temperature=1.0)["logp"]
    for b, (text, steps) in enumerate(zip(RESPONSE, step, strict=True)):
        for k in range(3):
            i, masked = steps.index(k), frozenset(j for j in range(3) if steps[j] >= k)
            truth = oracle.token_logp(model, tuple(text), masked)[i].item()
            assert abs(logp[k, b, i].item() - truth) < 1e-12
    assert behaviour_anchor(METHODS["trace-block"], plan, rollout).tolist() == [[[-0.5]] * 2] * 3
    allowed = "replay plans scored at the sampling temperature, without order_logp (which the sampler does not record)"
    with pytest.raises(ValueError) as error:
        behaviour_anchor(METHODS["egspo-exact"], plan, rollout)
    assert str(error.value) == f"anchor: egspo-exact asks for behaviour; allowed only for {allowed}"
