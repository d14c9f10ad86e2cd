"""Reading the golden files and comparing with them; the tests are in test_golden*.py."""

import json
from pathlib import Path

import pytest
import torch

import laws
from laws import double
from minidrl import algorithms as alg

FOLDER = Path(__file__).parent / "golden" / "objectives"


def cases(family, start=""):
    """The cases of a file whose name begins with `start`, as parameters with readable ids."""
    found = [case for case in json.loads((FOLDER / f"{family}.json").read_text()) if case["name"].startswith(start)]
    assert found, f"{family}: no case {start}"
    return pytest.mark.parametrize("case", found, ids=lambda case: case["name"])


def same(got, expected, what="value"):
    got, expected = double(got).detach(), double(expected)
    assert got.shape == expected.shape, what
    error = ((got - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= 1e-8, f"{what}: error {error:.3g}"


def one_prompt(keep, response=None):
    """A rollout with the rows of one prompt, and the plan that scores the kept tokens with everything hidden."""
    keep = torch.tensor(keep).bool()
    responses = torch.zeros(keep.shape, dtype=torch.long) if response is None else response
    rollout = laws.rollout_of(alg, responses, keep, num_generations=len(keep))
    return rollout, alg.mean_field_plan(rollout, laws.seeded(), p_mask_prompt=0.0)


def sequence_rollout(rows, length):
    """Rows without padding, for losses on one number per sequence."""
    return one_prompt([[1] * length] * rows)
