"""The judge on trial: every exact quantity against a second, differently computed one, or a value known by hand.

Laws that take an implementation as an argument are also held against wrong ones, which they must reject.
"""

import ast
import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from minidrl import oracle
from minidrl.oracle import TabularDenoiser

ATOL = 1e-10
GOLDEN = Path(__file__).parent / "golden" / "objectives" / "llada_elbo.json"
CASES = json.loads(GOLDEN.read_text())


def table_model(length: int, vocab_size: int, seed: int = 0, scale: float = 1.0) -> TabularDenoiser:
    """A random table of arbitrary, mutually inconsistent conditionals."""
    return TabularDenoiser.random(length, vocab_size, torch.Generator().manual_seed(seed), scale)


def responses(model: TabularDenoiser) -> list[tuple[int, ...]]:
    """All V^L responses."""
    return list(itertools.product(range(model.mask_token_id), repeat=model.length))


def close(a, b, atol: float = ATOL) -> None:
    """Assert equality of two scalars, lists or tensors to an absolute tolerance."""
    a, b = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (a, b))
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def reward(response: tuple[int, ...]) -> float:
    """A reward without symmetry between positions or tokens, and with a mean that is not zero."""
    return 1.0 + sum((i + 1) * token for i, token in enumerate(response)) + 2.0 * (response[0] == response[-1])


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_only", [False, True])
def test_encode_and_head_equal_plain_lookup_in_every_state(hidden_only):
    table = torch.randn(2**3 if hidden_only else 3**3, 3, 2, generator=torch.Generator().manual_seed(1)).double()
    model = TabularDenoiser(table, hidden_only=hidden_only)
    states = list(itertools.product(range(3), repeat=3))
    tokens = torch.tensor([[7, 0, *state] for state in states])
    h = model.encode(tokens, torch.ones_like(tokens, dtype=torch.bool))
    logits = model.head(h)
    assert h.shape == (27, 5, 2) and logits.shape == (27, 5, model.vocab_size)
    assert not h[:, :2].any()
    assert (logits[..., model.mask_token_id] == -math.inf).all()
    for row, state in enumerate(states):
        close(logits[row, 2:, :2], model.logits_at(state), atol=0)


def test_the_graph_of_the_fast_path_reaches_the_table():
    model = table_model(2, 2)
    tokens = torch.full((1, 2), model.mask_token_id)
    logits = model.head(model.encode(tokens, torch.ones(1, 2, dtype=torch.bool)))
    torch.log_softmax(logits, -1)[0, 0, 1].backward()
    fast, model.table.grad = model.table.grad, None
    oracle.token_logp(model, (1, 0), frozenset({0, 1}))[0].backward()
    assert fast.abs().max() > 0.1
    close(fast, model.table.grad)


def test_a_staircase_is_the_states_of_its_blocks():
    """Block m of each row: what `logits_at` says of [clean before m, noisy m, hidden after it]."""
    model, noise = table_model(4, 2), torch.Generator().manual_seed(4)
    clean, noisy = torch.randint(0, 2, (6, 4), generator=noise), torch.randint(0, 3, (6, 4), generator=noise)
    prompt = torch.zeros(6, 3, dtype=torch.long)
    for size in (1, 2, 4):
        h = model.encode_staircase(prompt, prompt.bool(), clean, noisy, block_length=size, clean_stream="block")
        assert h.shape == (6, 4, 2)
        for row, i in itertools.product(range(6), range(4)):
            start, stop = i // size * size, i // size * size + size
            state = clean[row, :start].tolist() + noisy[row, start:stop].tolist() + [2] * (4 - stop)
            close(h[row, i], model.logits_at(tuple(state))[i], atol=0)


def test_temperature_divides_the_logits():
    model = TabularDenoiser(torch.tensor([0.0, 1.0]).double().expand(3, 1, 2).contiguous())
    expected = -math.log(1 + math.exp(1 / 0.5))
    close(oracle.token_logp(model, (0,), frozenset({0}), temperature=0.5)[0], expected)
    assert oracle.token_logp(model, (0,), frozenset()) == {}


# --- likelihoods and bounds ------------------------------------------------------------------------------------------


def of_orders(model, response, temperature=1.0) -> torch.Tensor:
    """The log-likelihood in each order of revelation: a second opinion, L! L to compute."""

    def logp(order, j):
        return oracle.token_logp(model, response, frozenset(order[j:]), temperature)[order[j]]

    places = range(len(response))
    return torch.stack([sum(logp(order, j) for j in places) for order in itertools.permutations(places)])


@pytest.mark.parametrize("length", [1, 4])
def test_elbo_by_count_equals_permutation_mean_and_time_integral(length):
    """All three with one gradient."""
    model = table_model(length, 3, seed=length)
    response = tuple(i % 3 for i in range(length))
    nodes, weights = np.polynomial.legendre.leggauss(4)  # exact for the polynomial of degree L-1
    integral = sum(w / 2 * oracle.elbo_integrand(model, response, (x + 1) / 2) for x, w in zip(nodes, weights, strict=True))
    value = oracle.elbo(model, response)
    gradient = oracle.table_gradient(model, value)
    assert gradient.abs().max() > 0.1
    for other in (of_orders(model, response).mean(), integral):
        close(other, value)
        close(oracle.table_gradient(model, other), gradient)


def test_integrand_is_the_bernstein_polynomial_of_the_counts():
    model, response, length = table_model(5, 2), (1, 0, 0, 1, 1), 5
    a = oracle.mean_logp_by_count(model, response)
    close(oracle.elbo_integrand(model, response, 0.0), length * a[0])
    close(oracle.elbo_integrand(model, response, 1.0), length * a[-1])
    for t in (0.1, 0.37, 0.8):
        binomial = [math.comb(length - 1, j) * t**j * (1 - t) ** (length - 1 - j) for j in range(length)]
        close(oracle.elbo_integrand(model, response, t), length * sum(p * x for p, x in zip(binomial, a, strict=True)))


def test_any_order_programme_equals_permutation_sum_with_its_gradient():
    model, response = table_model(4, 3), (2, 0, 1, 1)
    for temperature in (1.0, 0.6):
        fast = oracle.any_order_log_likelihood(model, response, temperature)
        slow = of_orders(model, response, temperature).logsumexp(0) - math.log(24)
        close(fast, slow)
        close(oracle.table_gradient(model, fast), oracle.table_gradient(model, slow))


def test_any_order_likelihoods_sum_to_one_and_the_elbo_is_below_each():
    model = table_model(4, 2, scale=2.0)
    log_p = {y: oracle.any_order_log_likelihood(model, y).item() for y in responses(model)}
    close(sum(math.exp(x) for x in log_p.values()), 1.0)
    gaps = [x - oracle.elbo(model, y).item() for y, x in log_p.items()]
    assert min(gaps) > 1e-3  # strict: no two orders of a random table agree


def test_elbo_is_tight_and_orders_agree_on_a_consistent_joint():
    joint = torch.rand(3, 3, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model = oracle.consistent_denoiser(7.0 * joint)  # the scale is free
    for response in responses(model)[::5]:
        log_p = (joint[response] / joint.sum()).log()
        close(oracle.elbo(model, response), log_p)
        close(oracle.any_order_log_likelihood(model, response), log_p)
        close(of_orders(model, response), log_p.expand(24))


def test_copy_distribution_pays_once():
    """All tokens equal, two modes: any visible token tells the rest, so a(l) = 0 for l < L and a(L) = -ln 2."""
    joint = torch.zeros(2, 2, 2, 2)
    joint[0, 0, 0, 0] = joint[1, 1, 1, 1] = 0.5
    model = oracle.consistent_denoiser(joint)
    close(torch.stack(oracle.mean_logp_by_count(model, (1, 1, 1, 1))), [0.0, 0.0, 0.0, -math.log(2)])
    assert oracle.any_order_log_likelihood(model, (1, 1, 0, 1)).item() == -math.inf
    assert oracle.elbo(model, (1, 1, 0, 1)).item() == -math.inf
    distribution = oracle.response_distribution(oracle.trajectories(model, "random", 1.0, 1))
    assert set(distribution) == {(0, 0, 0, 0), (1, 1, 1, 1)}
    # Two tokens at once from a full mask are independent: half of the mass leaves the support.
    half = oracle.response_distribution(oracle.trajectories(model, "left_to_right", 1.0, 2))
    close(half[(0, 0, 0, 0)] + half[(1, 1, 1, 1)], 0.5)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_counts_and_elbo(case):
    inputs, outputs = case["inputs"], case["outputs"]
    model = TabularDenoiser.from_hidden_table(torch.tensor(inputs["table"], dtype=torch.float64))
    response = tuple(inputs["x"])
    close(torch.stack(oracle.mean_logp_by_count(model, response)), outputs["mean_logp_by_count"])
    close(oracle.elbo(model, response), outputs["exact_elbo"])
    sample = []
    for mask in inputs["masks"]:
        hidden = frozenset(i for i, flag in enumerate(mask) if flag)
        sample.append(model.length / len(hidden) * sum(oracle.token_logp(model, response, hidden).values()))
    close(sum(sample) / len(sample), outputs["estimate"], atol=1e-8)


# --- the sampler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_step, block_length, eos_token_id", [(1, 4, None), (1, 2, 1), (2, 2, None)])
@pytest.mark.parametrize("order", oracle.ORDERS)
def test_trajectories_are_a_distribution_with_valid_steps(order, tokens_per_step, block_length, eos_token_id):
    model = table_model(4, 2)
    taus = oracle.trajectories(model, order, 0.7, tokens_per_step, block_length, eos_token_id)
    close(sum(tau.prob for tau in taus), 1.0)
    assert len({(tau.response, tau.unmask_step) for tau in taus}) == len(taus)
    close(sum(oracle.response_distribution(taus).values()), 1.0)
    for tau in taus:
        stopped = eos_token_id is not None and block_length == 2 and eos_token_id in tau.response[:2]
        last = 2 if stopped else 4
        assert tau.unmask_step[last:] == (-1,) * (4 - last) and tau.response[last:] == (1,) * (4 - last)
        shown = sorted(tau.unmask_step[:last])
        assert shown == [i // tokens_per_step for i in range(last)]
        if block_length == 2 and not stopped:
            assert max(tau.unmask_step[:2]) < min(tau.unmask_step[2:])
        if order == "left_to_right":
            assert list(tau.unmask_step[:last]) == shown


def test_left_to_right_is_the_autoregressive_product():
    model = table_model(3, 2)
    for tau in oracle.trajectories(model, "left_to_right", 0.8, 1):
        steps = [oracle.token_logp(model, tau.response, frozenset(range(i, 3)), 0.8)[i] for i in range(3)]
        close(tau.prob, sum(steps).exp())
        assert tau.unmask_step == (0, 1, 2)


def test_all_at_once_makes_every_order_the_mean_field_product():
    model, everything = table_model(3, 2), frozenset(range(3))
    for order in oracle.ORDERS:
        for tau in oracle.trajectories(model, order, 1.0, 3):
            close(tau.prob, sum(oracle.token_logp(model, tau.response, everything).values()).exp())


def test_greedy_decoding_is_deterministic():
    model = table_model(4, 3)
    for order in ("low_confidence", "left_to_right"):
        (tau,) = oracle.trajectories(model, order, 0.0, 1)
        close(tau.prob, 1.0)
        assert not oracle.policy_gradient(model, order, 0.0, 1, reward).any()
        for i, step in enumerate(tau.unmask_step):
            hidden = oracle.hidden_before(tau, step)
            state = tuple(model.mask_token_id if j in hidden else token for j, token in enumerate(tau.response))
            assert tau.response[i] == int(model.logits_at(state)[i].argmax())
    by_chance = oracle.trajectories(model, "random", 0.0, 1)
    close(torch.stack([tau.prob for tau in by_chance]), [1 / 24] * 24)


def law_ties_go_to_the_lower_position() -> None:
    """Confidences that are equal in float32 make low_confidence left_to_right; greedy tokens tie to the lower id."""
    table = torch.zeros(8, 3, 2, dtype=torch.float64)
    table[:, 1:] = 1e-12 * torch.arange(2)  # more confident than position 0, but not after rounding
    model = TabularDenoiser.from_hidden_table(table)
    for tokens_per_step in (1, 3):
        left = oracle.trajectories(model, "left_to_right", 1.0, tokens_per_step)
        confident = {
            (t.response, t.unmask_step): t.prob for t in oracle.trajectories(model, "low_confidence", 1.0, tokens_per_step)
        }
        assert set(confident) == {(t.response, t.unmask_step) for t in left}
        for tau in left:
            close(confident[tau.response, tau.unmask_step], tau.prob)
    (tau,) = oracle.trajectories(TabularDenoiser.from_hidden_table(torch.zeros(4, 2, 2)), "low_confidence", 0.0, 1)
    assert tau.response == (0, 0) and tau.unmask_step == (0, 1)


def low_confidence_closed_form(model, state, block, shown, temperature):
    """prod over revealed of p_j(x_j), times prod over the rest of P(a proposal less confident than all revealed)."""
    logits = model.logits_at(state)
    p, p1 = torch.softmax(logits / temperature, -1), torch.softmax(logits, -1)
    revealed = [i for i in range(model.length) if shown[i] != state[i]]
    waiting = [i for i in block if shown[i] == model.mask_token_id]
    worst = min(p1[i, shown[i]].item() for i in revealed)
    prob = math.prod(p[i, shown[i]] for i in revealed)
    for i in waiting:
        prob = prob * sum((p[i, v] for v in range(model.mask_token_id) if p1[i, v].item() < worst), start=0.0)
    return prob


def law_low_confidence_transition_has_its_closed_form() -> None:
    """All next states of several states, block by block, away from temperature 1, with the gradient."""
    model, mask = table_model(4, 3, seed=3), 3
    plans = [((mask,) * 4, range(4), 2), ((mask,) * 4, range(2), 1), ((mask, 1, mask, mask), range(4), 1)]
    for state, block, tokens_per_step in plans:
        kernel = oracle.transition(model, state, block, "low_confidence", 0.5, tokens_per_step)
        close(sum(kernel.values()), 1.0)
        for shown, prob in kernel.items():
            expected = low_confidence_closed_form(model, state, block, shown, 0.5)
            close(prob, expected)
            close(oracle.table_gradient(model, prob), oracle.table_gradient(model, expected))


def ranked(logits, proposed, n, temperature=1.0, argmax=False, tie=1, dtype=torch.float32):
    """`most_confident`, with room for mistakes."""
    logp = torch.log_softmax(logits / temperature, -1).to(dtype)
    sure = {i: (logp[i].max() if argmax else logp[i, token]).item() for i, token in proposed.items()}
    return sorted(proposed, key=lambda i: (-sure[i], tie * i))[:n]


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (law_low_confidence_transition_has_its_closed_form, partial(ranked, temperature=0.5)),
        (law_low_confidence_transition_has_its_closed_form, partial(ranked, argmax=True)),
        (law_ties_go_to_the_lower_position, partial(ranked, tie=-1)),
        (law_ties_go_to_the_lower_position, partial(ranked, dtype=torch.float64)),
    ],
)
def test_positions_are_chosen_by_confidence(monkeypatch, law, wrong):
    law()
    monkeypatch.setattr(oracle, "most_confident", ranked)
    law()
    monkeypatch.setattr(oracle, "most_confident", wrong)
    with pytest.raises(AssertionError):
        law()


def test_the_surest_state():
    """By entropy and by margin of the nucleus, worked out by hand: three positions, two of which have one token above all."""
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.6, 0.2, 0.1, 0.1], [0.55, 0.45, 0.0, 0.0]]).double()
    assert oracle.surest(probs, range(3), "entropy", 1) == [2]  # 0.688 nats, against 0.693 and 1.089
    assert oracle.surest(probs, range(3), "margin", 2) == [1, 2]  # 0.4, 0.1, 0
    assert oracle.surest(torch.full((3, 4), 0.25), [1, 2], "margin", 1) == [1], "ties go to the lower position"


def test_a_nucleus_by_hand():
    """Of probabilities 0.5, 0.3, 0.15, 0.05: three for 0.9, two for 0.8, and always one."""
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64).log()
    close(oracle.policy(logits, 1.0, 0.9)[0], [0.15 / 0.95, 0.5 / 0.95, 0.0, 0.3 / 0.95])
    close(oracle.policy(logits, 0.0, 0.79)[0], [0.0, 0.625, 0.0, 0.375])
    close(oracle.policy(2 * logits, 2.0, 0.01)[0], [0.0, 1.0, 0.0, 0.0])


# --- policy gradients ------------------------------------------------------------------------------------------------


def directional_difference(model: TabularDenoiser, value, direction: torch.Tensor, h: float = 1e-3) -> float:
    """Five-point central difference of value() along a direction of the table; error of order h^4."""
    start, total = model.table.detach().clone(), 0.0
    with torch.no_grad():
        for multiple, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
            model.table.copy_(start + multiple * h * direction)
            total += weight * value().item()
        model.table.copy_(start)
    return total / (12 * h)


BLOCKS = dict(block_length=2, eos_token_id=1)
DIFFERENCES = [(order, n, more) for order in oracle.ORDERS for n, more in ((1, BLOCKS), (2, dict()))]
DIFFERENCES += [("low_confidence", 1, dict(block_length=2, threshold=0.6))]


@pytest.mark.parametrize(("order", "tokens_per_step", "settings"), DIFFERENCES)
def test_policy_gradient_equals_finite_differences(order, tokens_per_step, settings):
    model, generator = table_model(4, 2, seed=5), torch.Generator().manual_seed(9)
    gradient = oracle.policy_gradient(model, order, 0.8, tokens_per_step, reward, **settings)

    def objective():
        return oracle.expected_reward(oracle.trajectories(model, order, 0.8, tokens_per_step, **settings), reward)

    for _ in range(2):
        direction = torch.randn(model.table.shape, generator=generator, dtype=torch.float64) / 10
        expected = directional_difference(model, objective, direction)
        assert abs(expected) > 1e-3
        close((gradient * direction).sum(), expected)


def test_expected_reward_by_hand():
    """One token with p = (1/4, 3/4): dJ/dlogits of the masked state is p_0 p_1 (-1, +1), and 0 in other states."""
    p = torch.tensor([0.25, 0.75]).double()
    model = TabularDenoiser(p.log().expand(3, 1, 2).contiguous())
    close(oracle.expected_reward(oracle.trajectories(model, "random", 1.0, 1), lambda y: float(y[0])), 0.75)
    gradient = oracle.policy_gradient(model, "random", 1.0, 1, lambda y: float(y[0]))
    close(gradient[:, 0], [[0.0, 0.0], [0.0, 0.0], [-0.1875, 0.1875]])


# --- errors and independence -----------------------------------------------------------------------------------------

MODEL = table_model(2, 2)
ERRORS = [
    ("table", lambda: TabularDenoiser(torch.zeros(8, 2, 2))),
    ("table", lambda: TabularDenoiser(MODEL.table * 2)),
    ("order", lambda: oracle.trajectories(MODEL, "confidence", 1.0, 1)),
    ("block_length", lambda: oracle.trajectories(table_model(3, 1), "random", 1.0, 1, block_length=2)),
]


@pytest.mark.parametrize(("key", "call"), ERRORS)
def test_user_errors_are_one_line_and_name_the_key(key, call):
    with pytest.raises(ValueError, match=rf"^{key}: got .*; allowed [^\n]*$"):
        call()


def test_the_oracle_imports_nothing_of_the_package():
    modules = set()
    for node in ast.walk(ast.parse(Path(oracle.__file__).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            modules.add(node.module.split(".")[0])
    assert "torch" in modules
    assert modules - {"torch"} <= set(sys.stdlib_module_names) - {"importlib"}
