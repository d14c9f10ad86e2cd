"""The exercises at the end of the lessons: some values computed by the module, and what right and wrong numbers are told.

`notebooks/answers.py` has each value as arithmetic, with its derivation.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from minidrl import algorithms as alg
from minidrl import oracle
from minidrl.methods import METHODS

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
sys.path.insert(0, str(FOLDER))

import nbtools  # noqa: E402
from answers import ANSWERS  # noqa: E402

PAIRS = [(notebook, exercise) for notebook, all_of in ANSWERS.items() for exercise in all_of]
each_exercise = pytest.mark.parametrize(("notebook", "exercise"), PAIRS, ids=lambda text: text)


def told(notebook: str, mine: object) -> list[str]:
    """The lines that a reader sees."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        nbtools.exercises(notebook, mine)
    return out.getvalue().splitlines()


def told_of(notebook: str, exercise: str, given: object) -> str:
    """What is said of one answer; the others are open, and said to be."""
    lines = told(notebook, dict.fromkeys(ANSWERS[notebook]) | {exercise: given})
    said = dict(zip(ANSWERS[notebook], lines, strict=True))
    assert all(line == f"exercise {name}: open" for name, line in said.items() if name != exercise)
    return said[exercise].removeprefix(f"exercise {exercise}: ")


@pytest.mark.parametrize("notebook", ANSWERS)
def test_the_lesson_asks_what_is_answered_and_is_stored_open(notebook):
    (path,) = FOLDER.glob(f"{notebook}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    at = next(k for k, cell in enumerate(cells) if f'exercises("{notebook}"' in "".join(cell["source"]))
    asked = re.findall(r"^(\d+)\. ", "".join(cells[at - 1]["source"]).partition("## Exercises")[2], re.MULTILINE)
    assert asked == list(dict.fromkeys(exercise.split(",")[0] for exercise in ANSWERS[notebook]))
    (output,) = cells[at]["outputs"]
    assert "".join(output["text"]).splitlines() == told(notebook, dict.fromkeys(ANSWERS[notebook]))


# ----------------------------------------------------------------------------------------------------------- in another way

WAYS: dict[tuple[str, str], Callable[[], float]] = {}


def way(notebook: str, *exercises: str) -> Callable:
    """Register a function that computes the right values of these exercises: a number, or a tuple of them."""

    def register(function: Callable) -> Callable:
        for k, exercise in enumerate(exercises):
            several = len(exercises) > 1
            WAYS[notebook, exercise] = (lambda k=k: function()[k]) if several else function
        return function

    return register


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slope(objective: Callable, ratio: float, adv: float) -> float:
    """d loss / d ll of one token at this ratio to a probability of 1."""
    ll = double(ratio).log().view(1, 1, 1).requires_grad_()
    loss = objective(ll, torch.zeros_like(ll), torch.full_like(ll, adv), 1).loss.sum()
    return torch.autograd.grad(loss, ll)[0].item()


def ppo(epsilon: float) -> Callable:
    return lambda *given: alg.ppo_clip(*given, epsilon_low=epsilon, epsilon_high=epsilon)


@way("00a", "1")
def _():  # eight strata of the count form of 8 tokens: one state of each count
    rollout = alg.Rollout.of(torch.zeros(1, 8, dtype=torch.long))
    plan = alg.elbo_count_plan(rollout, torch.Generator(), num_states=8, domain="all", strata=True)
    return plan.scored.sum(-1).double().mean().item()


@way("00a", "3")
def _():
    model = oracle.consistent_denoiser(torch.eye(2, dtype=torch.float64))
    law = oracle.transition(model, (2, 2), range(2), "random", 1.0, 2)
    return (law[0, 0] + law[1, 1]).item()


@way("00b", "1")
def _():
    return alg.group_mean(double(1, 0.1, 0.1, 0), 4)[0].item()


@way("00b", "2")
def _():
    return slope(ppo(0.2), 1.5, -2.0) / 1.5  # by the ratio


def a_of(joint: torch.Tensor) -> list[float]:
    return [x.item() for x in oracle.mean_logp_by_count(oracle.consistent_denoiser(joint), (0, 0, 0))]


@way("01", "1")
def _():
    copies = torch.zeros(2, 2, 2, dtype=torch.float64)
    copies[0, 0, 0] = copies[1, 1, 1] = 0.5
    return 3 * a_of(copies)[2] - sum(a_of(copies))


@way("03", "1")
def _():
    R = double(1, 0, 0, 1, 0, 1, 0, 0)
    return (alg.group_mean(R, 8) / alg.leave_one_out(R, 8)).mean().item()


@way("03", "2, good", "2, bad")
def _():
    return tuple(sum(slope(ppo(5.0), ratio, A) for ratio in (8.0, 0.125)) / 2 / -A for A in (1.0, -1.0))


def token_weights(how: str) -> torch.Tensor:
    """Of the first token of answers of 10 and 30 tokens."""
    keep = torch.arange(30) < torch.tensor([[10], [30]])
    rollout = alg.Rollout.of(torch.zeros(2, 30, dtype=torch.long), keep=keep)
    loss = torch.ones(1, 2, 30, dtype=torch.float64, requires_grad=True)
    alg.aggregate(loss, alg.Plan.of(keep[None]), rollout, level="token", how=how).backward()
    return loss.grad[0, :, 0]


@way("04", "2, paper", "2, released")
def _():
    weights = [token_weights(how) for how in ("sequence_mean_token_mean", "token_mean")]
    return tuple((short / long).item() for short, long in weights)


@way("05", "1")
def _():
    def exact(nodes: int) -> bool:
        t, w = alg.gauss_legendre(nodes)
        return all(abs((w * t**k).sum().item() - 1 / (k + 1)) < 1e-12 for k in range(12))  # g has degree 11

    return float(next(nodes for nodes in range(1, 20) if exact(nodes)))


@way("06", "2, cap 6", "2, no cap")
def _():
    logs = double(0.5, 1, 3, 12).log().view(1, 4, 1)
    caps = (math.log(6), math.inf)
    return tuple(alg.self_normalized_weights(logs, 4, log_cap=cap).max().item() for cap in caps)


@way("07", "2")
def _():
    mask = alg.staircase_mask(torch.ones(1, 100, dtype=torch.bool), 400, 40, clean="block")
    return 1 - mask.double().mean().item()


@way("08", "2")
def _():
    r_hat, valid = double(0, 1, 0, 0)[None], torch.ones(1, 4, dtype=torch.bool)
    words = {"lam": 0.5, "schedule": "constant", "normalize": True, "center": "rank"}
    adv = alg.stepwise_advantage(double(1, 0, 0, 0), 4, r_hat, valid, 0 * r_hat, **words)
    return adv[0, 1].item()


@way("08", "3")
def _():
    table = torch.zeros(4**3, 3, 3, dtype=torch.float64)
    table[oracle.state_index((3, 3, 3), 4)] = double(0.5, 0.3, 0.2, 0.6, 0.3, 0.1, 0.7, 0.2, 0.1).view(3, 3).log()
    model = oracle.TabularDenoiser(table)
    return oracle.transition(model, (3, 3, 3), range(3), "low_confidence", 1.0, 1)[0, 3, 3].item()


@way("09", "2")
def _():
    pi, mu = (double(p).log().view(1, 1, 1) for p in (0.3, 0.6))
    loss = alg.drpo(pi.requires_grad_(), mu, -torch.ones_like(mu), 1, delta=0.15).loss.sum()
    return torch.autograd.grad(loss, pi)[0].item() / (0.3 / 0.6)  # -A ratio w, A = -1


@way("10", "1")
def _():
    own = dataclasses.replace(METHODS["clip-higher"], credit=alg.leave_one_out)
    first = []
    for row in (own, METHODS["reinforce"]):
        ll = torch.linspace(-2, -1, 8, dtype=torch.float64).view(1, 8, 1).requires_grad_()
        adv = row.credit(double(1, 0, 0, 1, 0, 1, 0, 0), 8).view(1, 8, 1)
        first.append(torch.autograd.grad(row.objective(ll, ll.detach(), adv, 8).loss.sum(), ll)[0].flatten())
    return torch.cosine_similarity(*first, dim=0).item()


@pytest.mark.parametrize(("notebook", "exercise"), WAYS, ids=lambda text: text)
def test_a_value_is_found_in_another_way(notebook, exercise):
    found = WAYS[notebook, exercise]()
    assert found == pytest.approx(ANSWERS[notebook][exercise].right, abs=1e-9)
    assert told_of(notebook, exercise, found) == "right"


# -------------------------------------------------------------------------------------------------------------- what is said


@each_exercise
def test_each_number_gets_what_is_meant_for_it(notebook, exercise):
    answer = ANSWERS[notebook][exercise]
    for number in (answer.right, float(f"{answer.right:.3g}")):  # three digits are enough
        assert told_of(notebook, exercise, number) == "right"
    for value, hint in answer.wrong:
        assert told_of(notebook, exercise, value) == f"not yet. {hint}"
    known = [answer.right, *(value for value, _ in answer.wrong)]
    assert all(abs(one - other) > 2 * answer.within for one, other in itertools.combinations(known, 2))
    for unknown in (answer.right + 1e6, answer.right - 1e6):  # neither distance nor side is told
        assert told_of(notebook, exercise, unknown) == f"not yet. {answer.hint}"


@pytest.mark.parametrize("six", [6, numpy.float32(6), numpy.array([[6]]), torch.tensor([6.0], requires_grad=True)])
def test_a_number_of_any_kind_is_judged(six):
    assert told_of("05", "1", six) == "right"


@pytest.mark.parametrize("given", ["0.5", math.nan, True, torch.ones(2)])
def test_what_is_no_number_gets_one_line_and_the_others_are_judged(given):
    right = {exercise: answer.right for exercise, answer in ANSWERS["05"].items()}
    first, *others = told("05", right | {"1": given})
    assert first.startswith("exercise 1: got ") and "write one number, as 0.5 or 3 / 4" in first
    assert others == ["exercise 2: right", "exercise 3: right"]


def test_a_missing_exercise_is_open_and_a_strange_one_is_named():
    assert told("05", {1: 6, "4": 0, "3": None}) == [
        "exercise 1: right",
        "exercise 2: open",
        "exercise 3: open",
        'exercise 4: there is none; this notebook has "1", "2", "3"',
    ]
    (line,) = told("05", [6, 0.5, 4])
    assert line.endswith('; write a dictionary with a number or None for each of "1", "2", "3"')
