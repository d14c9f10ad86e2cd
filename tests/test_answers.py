"""The exercises at the end of the notebooks: their cells, their values computed in another way, what wrong answers are told.

`notebooks/answers.py` has each value as arithmetic. Here the same numbers come from the module, from the exact judge, by
enumeration or by a search.
"""

import ast
import contextlib
import dataclasses
import io
import itertools
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch
from test_notebooks import ROOT, nbtools, text_of  # puts notebooks/ on the path
from torch.utils.flop_counter import FlopCounterMode

from answers import ANSWERS  # isort: skip
from minidrl import algorithms as alg
from minidrl import denoiser, methods, oracle
from minidrl.methods import METHODS
from minidrl.run import checkpoints

NOTEBOOKS = {path.name.split("_")[0]: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
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
    assert len(lines) == len(ANSWERS[notebook])
    said = dict(zip(ANSWERS[notebook], lines, strict=True))
    assert all(line == f"exercise {name}: open" for name, line in said.items() if name != exercise)
    return said[exercise].removeprefix(f"exercise {exercise}: ")


# ------------------------------------------------------------------------------------------------------------ the notebooks


def cells_of(notebook: str) -> list[dict]:
    return json.loads(NOTEBOOKS[notebook].read_text(encoding="utf-8"))["cells"]


def asked_in(notebook: str) -> str:
    """The prose with the exercises, or nothing."""
    texts = [text_of(cell["source"]) for cell in cells_of(notebook) if cell["cell_type"] == "markdown"]
    return "".join(text.partition("## Exercises\n")[2] for text in texts)


def exercise_cell(notebook: str) -> dict:
    """The code cell after that prose."""
    cells = cells_of(notebook)
    at = next(k for k, cell in enumerate(cells) if "## Exercises\n" in text_of(cell["source"]))
    return cells[at + 1]


def test_every_notebook_that_asks_has_answers():
    assert {notebook for notebook in NOTEBOOKS if asked_in(notebook)} == {*ANSWERS}
    assert {*ANSWERS} >= {f"{number:02}" for number in range(1, 10)}


@pytest.mark.parametrize("notebook", ANSWERS)
def test_the_numbers_of_the_prose_are_those_of_the_answers(notebook):
    asked = re.findall(r"^(\d+)\. ", asked_in(notebook), flags=re.MULTILINE)
    assert asked == list(dict.fromkeys(exercise.split(",")[0] for exercise in ANSWERS[notebook]))
    assert asked == [str(number + 1) for number in range(len(asked))]


@pytest.mark.parametrize("notebook", ANSWERS)
def test_the_cell_holds_nothing_but_the_readers_dictionary_and_the_call(notebook):
    cell = exercise_cell(notebook)
    body = ast.parse(text_of(cell["source"])).body
    mine = repr(dict.fromkeys(ANSWERS[notebook])).replace('"', "'")
    assert [ast.unparse(node) for node in body] == [
        "from nbtools import exercises",
        f"mine = {mine}",
        f"exercises('{notebook}', mine)",
    ]
    (output,) = cell["outputs"]
    assert text_of(output["text"]).splitlines() == told(notebook, dict.fromkeys(ANSWERS[notebook]))


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


def last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a statement that holds at `low` and not at `high` ceases to."""
    assert holds(low) and not holds(high)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def subsets_with_chance(L: int, smallest: int) -> list[tuple[frozenset[int], float]]:
    """Sets of hidden positions whose size is uniform on smallest..L."""
    return [(M, 1 / (L + 1 - smallest) / math.comb(L, len(M))) for M in oracle.all_subsets(L) if len(M) >= smallest]


@way("00a", "1")
def _():  # eight strata of the count form of 8 tokens: one state of each count
    rollout = alg.Rollout.of(torch.zeros(1, 8, dtype=torch.long))
    plan = alg.elbo_count_plan(rollout, torch.Generator(), num_states=8, domain="all", strata=True)
    return plan.scored.sum(-1).double().mean().item()


@way("00a", "2")
def _():  # all sets, all times
    nodes = zip(*(x.tolist() for x in alg.gauss_legendre(8)), strict=True)
    sizes = [len(M) for M in oracle.all_subsets(8)]
    return sum(w * sum(t**l * (1 - t) ** (8 - l) * -l for l in sizes) for t, w in nodes)


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


@way("00b", "3")
def _():
    return slope(alg.reinforce, 0.05 / 0.5, -1.0) / slope(ppo(1e9), 0.05 / 0.5, -1.0)


def a_of(joint: torch.Tensor) -> list[float]:
    return [x.item() for x in oracle.mean_logp_by_count(oracle.consistent_denoiser(joint), (0, 0, 0))]


@way("01", "1")
def _():
    copies = torch.zeros(2, 2, 2, dtype=torch.float64)
    copies[0, 0, 0] = copies[1, 1, 1] = 0.5
    return 3 * a_of(copies)[2] - sum(a_of(copies))


@way("01", "2, g(0)", "2, fraction")
def _():
    even = [float(sum(bits) % 2 == 0) for bits in itertools.product((0, 1), repeat=3)]
    a = a_of(double(*even).view(2, 2, 2))
    return 3 * a[0], a[1] / sum(a)


@way("01", "3")
def _():
    t, w = alg.gauss_legendre(20)
    return -sum((w / 4 * k / ((k + t) / 4)).sum().item() for k in range(4))


@way("02", "1, count")
def _():
    return oracle.moments((chance, 6 / len(M) * -len(M)) for M, chance in subsets_with_chance(6, 1))[1].item()


@way("02", "1, pair")
def _():
    def Z(size: int) -> float:
        return 7 / size * -size if size else 0.0

    draws = ((chance, (Z(len(M)) + Z(6 - len(M))) / 2) for M, chance in subsets_with_chance(6, 0))
    return oracle.moments(draws)[1].item()


@way("02", "2")
def _():
    a = -torch.arange(1, 101, dtype=torch.float64) / 100
    independent, strata = a.var(correction=0) / 4, a.view(4, 25).var(1, correction=0).sum() / 16
    return (independent / strata).sqrt().item()


@way("02", "3")
def _():
    return float(next(calls for calls in range(4, 100, 4) if (1 / calls) ** 0.5 <= 0.5 * (1 / 4) ** 0.5))


@way("02a", "1")
def _():  # Z = C + s noise, uncorrelated: by bisection on s
    C, noise = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)

    def left(s: float) -> tuple[float, float]:
        Z = C + s * noise
        rest = Z - (Z @ C) / (C @ C) * C
        return (rest.var() / Z.var()).item(), torch.corrcoef(torch.stack([Z, C]))[0, 1].item()

    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle)[0] < 0.25 else (low, middle)
    return left(low)[1]


def of_a_law(q: float) -> float:
    """The second moment of one call whose count is 1, with v = 9, by q, and else 2, with v = 1."""
    return oracle.moments([(q, 3 / (2 * q)), (1 - q, 1 / (2 * (1 - q)))])[1].item() + (3 / 2 + 1 / 2) ** 2


@way("02a", "2, q")
def _():
    return min((of_a_law(q / 1000), q / 1000) for q in range(1, 1000))[1]


@way("02a", "2, factor")
def _():
    return min(of_a_law(q / 1000) for q in range(1, 1000)) / of_a_law(0.5)


@way("02a", "3")
def _():
    joint = oracle.consistent_denoiser(torch.tensor([[0.4, 0.1], [0.1, 0.4]], dtype=torch.float64))
    seen = (oracle.token_logp(joint, (0, 0), M)[0] for M in (frozenset({0}), frozenset({0, 1})))
    return (next(seen) - next(seen)).item()


@way("03", "1")
def _():
    R = double(1, 0, 0, 1, 0, 1, 0, 0)
    return (alg.group_mean(R, 8) / alg.leave_one_out(R, 8)).mean().item()


@way("03", "2, good", "2, bad")
def _():
    return tuple(sum(slope(ppo(5.0), ratio, A) for ratio in (8.0, 0.125)) / 2 / -A for A in (1.0, -1.0))


@way("03", "3")
def _():
    values = (0.7, 0.7 + math.log(3))
    return sum(math.exp(x - y) / 4 for x, y in itertools.product(values, repeat=2))


@way("04", "1")
def _():  # three tokens that are copies; each more adds as much
    joint = torch.zeros(10, 10, 10, dtype=torch.float64)
    for digit in range(10):
        joint[digit, digit, digit] = 0.1
    a = a_of(joint)
    return (sum(a) - 3 * a[2]) / 2 * 15


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


@way("04", "3")
def _():
    return last(lambda ratio: slope(ppo(0.5), ratio, 1.0) != 0, 1.0, 3.0) ** 6


@way("05", "1")
def _():
    def exact(nodes: int) -> bool:
        t, w = alg.gauss_legendre(nodes)
        return all(abs((w * t**k).sum().item() - 1 / (k + 1)) < 1e-12 for k in range(12))  # g has degree 11

    return float(next(nodes for nodes in range(1, 20) if exact(nodes)))


@way("05", "2")
def _():  # the weights from what the rule integrates at 0, 1/2, 1
    powers = numpy.vander([0, 0.5, 1], 3, increasing=True).T
    return float(numpy.linalg.solve(powers, [1, 1 / 2, 1 / 3]) @ [0.1, 0.5, 1])


@way("05", "3")
def _():  # from the covariance of the twelve calls
    def of(times: int) -> float:
        time = torch.arange(12) * times // 12
        same_time, same_call = (time[:, None] == time).double(), torch.eye(12, dtype=torch.float64)
        return (0.98 * same_time + 0.02 * same_call).sum().item() / 144

    return of(3) / of(12)


@way("06", "1")
def _():  # both estimates on a grid of their density
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = (-(x**2) / 2).exp() / (-(x**2) / 2).exp().sum()
    return ((density * (0.5 * x).exp()).sum() * (density * (-0.5 * x).exp()).sum()).item()


@way("06", "2, cap 6", "2, no cap")
def _():
    logs = double(0.5, 1, 3, 12).log().view(1, 4, 1)
    caps = (math.log(6), math.inf)
    return tuple(alg.self_normalized_weights(logs, 4, log_cap=cap).max().item() for cap in caps)


@way("06", "3")
def _():  # the worst mixture of ratios at the floor and at the cap
    share = torch.linspace(0, 1, 100_001, dtype=torch.float64)

    def too_low(floor: float) -> bool:
        mean, square = (share * 6**k + (1 - share) * floor**k for k in (1, 2))
        return (mean**2 / square).min().item() < 0.5

    return last(too_low, 0.01, 6.0)


@way("06", "4")
def _():  # what the clip gives to gradients that stand at a right angle
    def length(ratio: float) -> torch.Tensor:
        ll = double(ratio, ratio).log().view(1, 2, 1).requires_grad_()
        given = ll, torch.zeros_like(ll), double(1, -1).view(1, 2, 1), 2
        loss = alg.ppo_clip(*given, epsilon_low=0.2, epsilon_high=0.2).loss.sum()
        return torch.autograd.grad(loss, ll)[0].norm()

    return (length(2.0) / length(1.0)).item()


@way("07", "1")
def _():
    prompt, blocks = ["x"] * 100, [["y"] * 40 for _ in range(10)]
    rows = [prompt + sum(blocks[:m], []) + ["[MASK]"] * 40 for m in range(10)]
    return sum(map(len, rows)) / len(prompt + 2 * sum(blocks, []))


@way("07", "2")
def _():
    mask = alg.staircase_mask(torch.ones(1, 100, dtype=torch.bool), 400, 40, clean="block")
    return 1 - mask.double().mean().item()


@way("07", "3")
def _():  # what reaches what, through any number of layers
    reach = alg.staircase_mask(torch.ones(1, 2, dtype=torch.bool), 40, 4, clean="block")[0, 0]
    for _ in range(7):
        reach = reach.double() @ reach.double() > 0
    clean, noisy = slice(2 + 3 * 4, 2 + 4 * 4), slice(2 + 40, None)
    return float(reach[noisy, clean].any(1).unflatten(0, (10, 4)).any(1).sum())


@way("08", "1")
def _():  # position 0 is the coin, position 1 what follows; token 0 is heads
    table, mask = torch.full((5**2, 2, 4), -40.0, dtype=torch.float64), 4
    table[oracle.state_index((mask, mask), 5), 0, :2] = 0
    table[oracle.state_index((0, mask), 5), 1] = 0
    table[oracle.state_index((1, mask), 5), 1, 0] = 0
    model = oracle.TabularDenoiser(table)
    mean = 0.0
    for path in oracle.trajectories(model, "left_to_right", 1.0, 1):
        states = ((mask, mask), (path.response[0], mask))
        laws = [model.logits_at(state)[s].log_softmax(-1) for s, state in enumerate(states)]
        kept = max((0, 1), key=lambda s: -(laws[s].exp() * laws[s]).sum().item())
        mean = mean + path.prob.detach() * laws[kept][path.response[kept]]
    return oracle.table_gradient(model, mean)[oracle.state_index((mask, mask), 5), 0, 0].item()


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


def learns(objective: Callable, pi: float) -> bool:
    """Whether a good token of old probability 0.01 still has a gradient."""
    ll = double(pi).log().view(1, 1, 1).requires_grad_()
    anchor = double(0.01).log().view(1, 1, 1)
    return torch.autograd.grad(objective(ll, anchor, torch.ones_like(ll), 1).loss.sum(), ll)[0].item() != 0


@way("09", "1, PPO", "1, DPPO")
def _():
    masks = ppo(0.2), lambda *given: alg.dppo(*given, delta=0.15, form="tv")
    return tuple(last(lambda pi, mask=mask: learns(mask, pi), 0.01, 0.9) for mask in masks)


@way("09", "2")
def _():
    pi, mu = (double(p).log().view(1, 1, 1) for p in (0.3, 0.6))
    loss = alg.drpo(pi.requires_grad_(), mu, -torch.ones_like(mu), 1, delta=0.15).loss.sum()
    return torch.autograd.grad(loss, pi)[0].item() / (0.3 / 0.6)  # -A ratio w, A = -1


@way("09", "3")
def _():
    p = torch.linspace(1e-6, 1 - 1e-6, 1001, dtype=torch.float64)
    return (p[:, None] - p).abs().max().item()


@way("10", "1")
def _():
    own = dataclasses.replace(METHODS["clip-higher"], credit=alg.leave_one_out)
    first = []
    for row in (own, METHODS["reinforce"]):
        ll = torch.linspace(-2, -1, 8, dtype=torch.float64).view(1, 8, 1).requires_grad_()
        adv = row.credit(double(1, 0, 0, 1, 0, 1, 0, 0), 8).view(1, 8, 1)
        first.append(torch.autograd.grad(row.objective(ll, ll.detach(), adv, 8).loss.sum(), ll)[0].flatten())
    return torch.cosine_similarity(*first, dim=0).item()


@way("10", "2")
def _():  # the rows themselves, on two responses whose four log-probabilities are the parameters
    keep = torch.tensor([[True, False, False], [True, True, True]])
    rollout = alg.Rollout.of(torch.zeros(2, 3, dtype=torch.long), keep=keep, num_generations=2)
    plan, first = alg.Plan.of(keep[None]), []
    for row in (METHODS["gspo"], METHODS["reinforce"]):
        logp = torch.linspace(-2, -1, 6, dtype=torch.float64).view(1, 2, 3).requires_grad_()
        anchor = methods.reduced(row, plan, rollout, {"logp": logp.detach()})
        loss = methods.method_loss(row, plan, rollout, {"logp": logp}, double(1, -1), anchor, None)
        first.append(torch.autograd.grad(loss, logp)[0].flatten())
    return torch.cosine_similarity(*first, dim=0).item()


@way("10", "3")
def _():  # the mean over tokens of A times the gradient of their probabilities
    logits, reward = double(0.5, 0.3, 0.2).log().requires_grad_(), double(0, 1, 0)
    p = logits.softmax(0)
    terms = [torch.autograd.grad(p[v], logits, retain_graph=True)[0] for v in range(3)]
    value = p @ reward
    mean = sum(p[v].detach() * (reward[v] - value.detach()) * terms[v] for v in range(3))
    return torch.cosine_similarity(mean, torch.autograd.grad(value, logits)[0], dim=0).item()


def llada(rank: int) -> denoiser.Denoiser:
    """LLaDA-8B with adapters: shapes without values."""
    shape, family, _ = checkpoints.describe("GSAI-ML/LLaDA-8B-Instruct")
    with torch.device("meta"):
        network = denoiser.Denoiser(family.network(shape).to(torch.bfloat16), family).eval()
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    denoiser.add_adapters(network, rank=rank, alpha=2.0 * rank, target_modules=modules, seed=0, base="LLaDA")
    return network


@way("11", "1")
def _():  # AdamW itself says how many numbers it keeps
    small = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(small.parameters())
    small(torch.ones(3)).sum().backward()
    optimizer.step()
    moments = sum(x.shape == small.weight.shape for x in optimizer.state[small.weight].values())
    return sum(p.nbytes for _, p in denoiser.trained(llada(16))) * (2 + moments) / 1e9


@way("11a", "1")
def _():  # torch's own count
    network = llada(128)

    def step(tokens: int) -> int:
        row = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network.model.lm_head(network.encode(row, None)[:, -32:])
        return counter.get_total_flops()

    return 512 * step(200 + 1024) / (128 * step(200 + 256))


@each_exercise
def test_a_value_is_found_in_another_way(notebook, exercise):
    found, known = WAYS[notebook, exercise](), ANSWERS[notebook][exercise].right
    loose = 1e-4 if (notebook, exercise) in (("06", "3"), ("09", "3")) else 1e-9  # on grids
    assert found == pytest.approx(known, abs=loose)
    assert told_of(notebook, exercise, found) == "right"


def test_every_value_has_its_other_way():
    assert [*WAYS] == PAIRS


# -------------------------------------------------------------------------------------------------------------- what is said


@each_exercise
def test_a_right_number_may_be_rounded_to_three_digits(notebook, exercise):
    right = ANSWERS[notebook][exercise].right
    for number in (right, float(f"{right:.3g}")):
        assert told_of(notebook, exercise, number) == "right"


@each_exercise
def test_a_known_mistake_gets_its_own_hint(notebook, exercise):
    answer = ANSWERS[notebook][exercise]
    assert len({hint for _, hint in answer.wrong}) >= 2
    for value, hint in answer.wrong:
        assert hint != answer.hint
        assert told_of(notebook, exercise, value) == f"not yet. {hint}"


@each_exercise
def test_no_two_values_are_taken_for_each_other(notebook, exercise):
    answer = ANSWERS[notebook][exercise]
    values = [answer.right, *(value for value, _ in answer.wrong)]
    for one, other in itertools.combinations(values, 2):
        assert abs(one - other) > 2 * answer.within, (one, other)


@each_exercise
def test_a_wrong_number_is_told_neither_distance_nor_side(notebook, exercise):
    answer = ANSWERS[notebook][exercise]
    known = [answer.right, *(value for value, _ in answer.wrong)]
    far = [x for x in (answer.right + d for d in (1e6, -1e6, 77.7, -77.7, 0.77, -0.77, 0.0123, -0.0123)) if x not in known]
    unknown = [x for x in far if all(abs(x - value) > answer.within for value in known)]
    assert min(unknown) < answer.right < max(unknown)
    assert {told_of(notebook, exercise, number) for number in unknown} == {f"not yet. {answer.hint}"}


@each_exercise
def test_a_hint_is_a_line_that_does_not_contain_the_value(notebook, exercise):
    answer = ANSWERS[notebook][exercise]
    hints = [answer.hint, *(hint for _, hint in answer.wrong)]
    assert all("\n" not in hint and 20 <= len(hint) <= 140 and hint[-1] in ".?" for hint in hints)
    digits = f"{abs(answer.right):.3g}"
    if len(digits.replace(".", "")) >= 3:  # a 1 or a 4 is in many formulas
        assert all(digits not in hint for hint in hints)


class Hostile:
    """A value that cannot be read, compared or printed."""

    def item(self):
        raise RuntimeError("no")

    __float__ = __repr__ = __str__ = __eq__ = __bool__ = item
    __hash__ = None


ASK = "write one number, as 0.5 or 3 / 4"
NO_NUMBERS = {
    "text": ("0.5", f"got text; {ASK}, without quotes"),
    "bytes": (b"0.5", f"got text; {ASK}, without quotes"),
    "empty text": ("", f"got text; {ASK}, without quotes"),
    "nan": (math.nan, f"got nan; {ASK}"),
    "numpy nan": (numpy.float32("nan"), f"got nan; {ASK}"),
    "inf": (-math.inf, f"got -inf; {ASK}"),
    "too large": (10**400, f"got a value of type int; {ASK}"),
    "bool": (True, f"got True; {ASK}"),
    "numpy bool": (numpy.bool_(True), f"got True; {ASK}"),
    "bool tensor": (torch.tensor(True), f"got True; {ASK}"),
    "complex": (1j, f"got a value of type complex; {ASK}"),
    "complex tensor": (torch.tensor(1j), f"got a value of type Tensor; {ASK}"),
    "list": ([0.5], f"got a value of type list; {ASK}"),
    "tuple": ((0.5, 1.0), f"got a value of type tuple; {ASK}"),
    "dots": (..., f"got a value of type ellipsis; {ASK}"),
    "function": (math.sqrt, f"got a value of type builtin_function_or_method; {ASK}"),
    "tensor of two": (torch.ones(2), f"got a value of type Tensor; {ASK}"),
    "empty tensor": (torch.ones(0), f"got a value of type Tensor; {ASK}"),
    "meta tensor": (torch.ones((), device="meta"), f"got a value of type Tensor; {ASK}"),
    "numpy array": (numpy.ones(3), f"got a value of type ndarray; {ASK}"),
    "numpy text": (numpy.str_("0.5"), f"got text; {ASK}, without quotes"),
    "hostile": (Hostile(), f"got a value of type Hostile; {ASK}"),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_gets_one_line_and_the_others_are_judged(name):
    given, line = NO_NUMBERS[name]
    assert told_of("05", "1", given) == line
    right = {exercise: answer.right for exercise, answer in ANSWERS["05"].items()}
    assert told("05", right | {"1": given})[1:] == ["exercise 2: right", "exercise 3: right"]


@pytest.mark.parametrize(
    "six",
    [
        6, 6.0, Fraction(6), Decimal(6), numpy.float32(6), numpy.int64(6), numpy.array(6.0), numpy.array([[6]]),
        torch.tensor(6), torch.tensor([6.0], requires_grad=True), torch.tensor(6.0, dtype=torch.bfloat16),
    ],
    ids=lambda six: type(six).__name__,
)  # fmt: skip
def test_a_number_of_any_kind_is_judged(six):
    assert told_of("05", "1", six) == "right"
    assert told_of("05", "1", six + 1) == f"not yet. {dict(ANSWERS['05']['1'].wrong)[7.0]}"


def test_all_answers_are_judged_whatever_the_others_are():
    assert told("05", {"1": 12, "2": "x", "3": 3.94}) == [
        f"exercise 1: not yet. {dict(ANSWERS['05']['1'].wrong)[12.0]}",
        f"exercise 2: got text; {ASK}, without quotes",
        "exercise 3: right",
    ]


def test_a_missing_exercise_is_open_and_a_strange_one_is_named():
    assert told("05", {1: 6, "4": 0, "3": None}) == [
        "exercise 1: right",
        "exercise 2: open",
        "exercise 3: open",
        'exercise 4: there is none; this notebook has "1", "2", "3"',
    ]
    for mine in (None, [6, 0.5, 4], 6, "6"):
        (line,) = told("05", mine)
        assert line.endswith('; write a dictionary with a number or None for each of "1", "2", "3"')


def test_a_notebook_without_exercises_is_refused():
    with pytest.raises(ValueError, match="notebook: got '5'; allowed 00a, 00b, 01"):
        nbtools.exercises("5", {})


def test_the_values_stand_in_no_notebook():
    """A cell in which a reader types does not show the answer, nor how it is judged."""
    for notebook in ANSWERS:
        text = text_of(exercise_cell(notebook)["source"])
        assert not re.search(r"right|check|hint|answers\b", text) and len(text.splitlines()) == 4
