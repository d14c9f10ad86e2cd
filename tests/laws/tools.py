"""What the laws share: numbers, comparisons, tables of probabilities, rollouts of them, and the noise of a plan, all of it."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidrl import methods, oracle
from minidrl.sampler import Sampler, generate


def seeded(seed: int = 0) -> torch.Generator:
    """A CPU generator with a fixed seed."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normally distributed float64 numbers, the same at every call."""
    return scale * torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def double(values: Any) -> Tensor:
    """A float64 tensor of these values; nested lists of them may hold scalar tensors."""
    return torch.as_tensor(values, dtype=torch.float64)


def close(got: Any, expected: Any, what: str = "value", atol: float = 1e-10) -> None:
    """Both have one shape and equal numbers, to atol (relative where they exceed 1). NaN is never right."""
    got, expected = double(got).detach(), double(expected).detach()
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    gap = (got - expected).abs() / expected.abs().clamp(min=1)
    assert bool((gap <= atol).all()), f"{what}: off by {gap.max().item():.3g}"


def refuses(call: Callable[[], Any], *words: str) -> None:
    """The call raises ValueError, in one line that contains all these words (the key, the value)."""
    try:
        call()
    except ValueError as error:
        text = str(error)
        assert "\n" not in text and all(word in text for word in words), f"message {text!r} lacks one of {words}"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} where a ValueError is due: {words}") from error
    else:
        raise AssertionError(f"not refused: {words}")


def frequencies_agree(outcome: Tensor, probability: Tensor, what: str) -> None:
    """The outcomes 0, 1, .. are as frequent as probable, within 5 standard errors; one of probability 0 never occurs."""
    assert int(outcome.min()) >= 0, f"{what}: outcome {int(outcome.min())} is impossible"
    trials = outcome.numel()
    share = torch.bincount(outcome.flatten(), minlength=len(probability)).double() / trials
    assert len(share) == len(probability), f"{what}: outcome {len(share) - 1} is impossible"
    allowed = 5 * (probability * (1 - probability) / trials).sqrt()
    assert bool(((share - probability).abs() <= allowed).all()), f"{what}: shares {share.tolist()}, not {probability.tolist()}"


def mean_is(sample: Tensor, truth: float, what: str) -> None:
    """The sample mean is the truth within 5 standard errors."""
    error = sample.std().item() / math.sqrt(sample.numel())
    assert abs(sample.mean().item() - truth) <= 5 * error + 1e-12, f"{what}: {sample.mean().item()}, not {truth} +- {error}"


@contextmanager
def noise(alg: Any, *values: Tensor) -> Iterator[None]:
    """Hand out these numbers, in this order, wherever the code asks for uniform noise."""
    waiting, original = list(values), alg._uniform

    def scripted(shape: tuple[int, ...], generator: Any, device: Any) -> Tensor:
        assert waiting and tuple(waiting[0].shape) == tuple(shape), f"noise of shape {tuple(shape)} was not expected"
        return waiting.pop(0)

    alg._uniform = scripted
    try:
        yield
        assert not waiting, f"{len(waiting)} draws of noise were not used"
    finally:
        alg._uniform = original


@functools.cache
def tabular(length: int, vocab_size: int, seed: int = 0) -> oracle.TabularDenoiser:
    """A model with arbitrary conditionals. It is shared: do not write to it."""
    return oracle.TabularDenoiser.random(length, vocab_size, seeded(seed))


def rollout_of(alg: Any, responses: list, keep: Any = None, *, num_generations: int = 1, **given: Any) -> Any:
    """A Rollout around these responses. Unless it is given, the prompt is one padding position and two tokens."""
    response = torch.as_tensor(responses)
    rows = response.shape[0]
    fields = {
        "prompt": torch.tensor([[0, 1, 0]]).expand(rows, -1),
        "prompt_mask": torch.tensor([[False, True, True]]).expand(rows, -1),
        "response": response,
        "keep": torch.ones(response.shape, dtype=torch.bool) if keep is None else torch.as_tensor(keep).bool(),
        "unmask_step": torch.full_like(response, -1),
        "logp": torch.zeros(response.shape, dtype=torch.float64),
        "num_generations": num_generations,
        "sampler": None,
    }
    return alg.Rollout(**{**fields, **given})


def repeated(alg: Any, response: tuple, keep: tuple, rows: int) -> Any:
    """A Rollout with the same response in every row."""
    return rollout_of(alg, [response] * rows, [keep] * rows)


def subset_number(masks: Tensor) -> Tensor:
    """The number sum_i mask_i 2^i of each mask."""
    return (masks * 2 ** torch.arange(masks.shape[-1])).sum(-1)


@functools.cache
def subset_scores(model: oracle.TabularDenoiser, response: tuple, domain: frozenset) -> Tensor:
    """S(M), the summed log-probability of the positions M, with everything outside the domain hidden too; NaN for other M."""
    scores = torch.full((2**model.length,), math.nan, dtype=torch.float64)
    outside = frozenset(range(model.length)) - domain
    for chosen in oracle.all_subsets(model.length):
        if chosen <= domain:
            logp = oracle.token_logp(model, response, chosen | outside)
            scores[sum(2**i for i in chosen)] = sum(logp[i].item() for i in chosen)
    return scores


def elbo_on(model: oracle.TabularDenoiser, response: tuple, domain: frozenset) -> float:
    """The ELBO of a domain: the sum over l = 1..n of the mean of S(M) / l over its subsets M of size l."""
    scores, total = subset_scores(model, response, domain), 0.0
    for count in range(1, len(domain) + 1):
        values = [scores[sum(2**i for i in chosen)].item() for chosen in itertools.combinations(sorted(domain), count)]
        total += sum(values) / (count * len(values))
    return total


def positions(mask: Any) -> frozenset:
    """The positions at which a row of booleans is True."""
    return frozenset(i for i, flag in enumerate(list(mask)) if flag)


def scored_values(plan: Any, scores: Tensor) -> Tensor:
    """The estimate of every row, sum_k weight_k S(scored_k), in the law's own arithmetic."""
    drawn = scores[subset_number(plan.scored)]
    return torch.where(plan.scored.any(-1), plan.weight * drawn, torch.zeros_like(drawn)).sum(0)


def ll_of(alg: Any, model: Any, rollout: Any, plan: Any, level: str = "sequence", temperature: float = 1.0) -> Tensor:
    """The log-likelihood that the code under judgement makes of a plan, without a normaliser."""
    logp = alg.features(model, rollout, plan, temperature=temperature)["logp"]
    return alg.reduce_logp(logp, plan, level=level, normalizer=None)


def every_state(plan: Any) -> Tensor:
    """All flat numbers k B + b of a plan's states, with the states of one staircase forward side by side."""
    states, rows, length = plan.scored.shape
    blocks = 1 if plan.block_length is None else length // plan.block_length
    return torch.arange(states * rows).view(-1, blocks, rows).transpose(1, 2).flatten()


def graph_features(alg: Any, model: Any, rollout: Any, plan: Any, names: tuple, temperature: float, **more: Any) -> dict:
    """The features (K, B, L, ..) of all states, with their graph."""
    states = every_state(plan)
    found = alg.state_features(model, rollout, plan, states, temperature=temperature, names=names, **more)
    return {name: value[states.argsort()].unflatten(0, plan.valid.shape) for name, value in found.items()}


def graph_logp(alg: Any, model: Any, rollout: Any, plan: Any, temperature: float = 1.0) -> Tensor:
    """The token log-probabilities (K, B, L) of all states, with their graph."""
    return graph_features(alg, model, rollout, plan, ("logp",), temperature)["logp"]


def midpoints(cells: int) -> list[float]:
    """The middle of each of `cells` equal parts of (0, 1)."""
    return [(cell + 0.5) / cells for cell in range(cells)]


def all_orders(length: int) -> list[list[float]]:
    """Noise that puts the positions into every order, one list an order."""
    return [[(rank + 0.5) / length for rank in order] for order in itertools.permutations(range(length))]


def count_noise(cells: int, length: int, states: int) -> tuple[Tensor, Tensor]:
    """Noise (K, R) of counts and (K, R, L) of positions: every pair of a cell and an order is one row, the same in all states.

    That is enough for an expectation, in which the states add up.
    """
    draws = list(itertools.product(midpoints(cells), all_orders(length)))
    u, order = double([u for u, _ in draws]), double([order for _, order in draws])
    return u.expand(states, -1), order.expand(states, -1, -1)


def joint_noise(cells: int, length: int, states: int) -> tuple[Tensor, Tensor]:
    """The same with every combination of independent states as a row, as variances need it."""
    draws = list(itertools.product(itertools.product(midpoints(cells), all_orders(length)), repeat=states))
    u = double([[draw[k][0] for draw in draws] for k in range(states)])
    return u, double([[draw[k][1] for draw in draws] for k in range(states)])


def variance(values: Tensor) -> float:
    """The variance of equally likely values."""
    return (values - values.mean()).square().mean().item()


RESPONSE, MODEL = (1, 0, 2, 1), (4, 3)


KEEPS = ((1, 1, 1, 1), (1, 1, 1, 0), (1, 0, 0, 0))  # n = 4, 3, 1


class Walk(NamedTuple):
    """A small sampler whose trajectories are enumerated: sizes of its table, order, tokens a step, blocks, EOS, threshold."""

    length: int
    vocab: int
    order: str
    tokens: int
    block: int
    eos: int | None = None
    threshold: float | None = None


WALKS = (
    Walk(3, 2, "random", 1, 3),
    Walk(4, 2, "random", 2, 4, eos=1),
    Walk(4, 2, "random", 1, 2, eos=1),
    Walk(4, 2, "left_to_right", 1, 2, eos=1),
    Walk(4, 2, "left_to_right", 2, 4),
    Walk(3, 2, "right_to_left", 1, 3, eos=1),
    Walk(4, 2, "entropy", 1, 4, eos=1),
    Walk(3, 3, "margin", 1, 3),
)


def keep_of(response: tuple, eos: int | None) -> list[int]:
    """1 for the positions up to and including the first EOS, 0 behind it."""
    end = response.index(eos) if eos in response else len(response) - 1
    return [int(i <= end) for i in range(len(response))]


def reward_of(response: tuple, eos: int | None) -> float:
    """An arbitrary reward that depends on the kept tokens only."""
    kept = [token for token, flag in zip(response, keep_of(response, eos), strict=True) if flag]
    return math.sin(1.0 + sum((i + 2) * (token + 1.5) for i, token in enumerate(kept)))


def recorded(alg: Any, paths: list, eos: int | None, **given: Any) -> Any:
    """A Rollout whose rows are these trajectories."""
    steps = torch.tensor([path.unmask_step for path in paths])
    keep = [keep_of(path.response, eos) for path in paths]
    return rollout_of(alg, [path.response for path in paths], keep, unmask_step=steps, **given)


@functools.cache
def walk(case: Walk, temperature: float = 0.7) -> tuple[oracle.TabularDenoiser, list, Tensor, Tensor]:
    """The model, every trajectory, the probability of each, and its reward."""
    model = tabular(case.length, case.vocab, 11)
    paths = oracle.trajectories(model, case.order, temperature, *case[3:])
    chance = torch.stack([path.prob.detach() for path in paths])
    return model, paths, chance, double([reward_of(path.response, case.eos) for path in paths])


@functools.cache
def walk_gradient(case: Walk, temperature: float = 0.7) -> Tensor:
    """The exact policy gradient of that sampler."""
    model, reward = tabular(case.length, case.vocab, 11), lambda y: reward_of(y, case.eos)
    return oracle.policy_gradient(model, case.order, temperature, case.tokens, reward, *case[4:])


def settings_of(case: Walk, temperature: float = 0.7) -> Sampler:
    """The sampler of the trajectories."""
    sizes = {"length": case.length, "block_length": case.block, "tokens_per_step": case.tokens}
    return Sampler(order=case.order, temperature=temperature, threshold=case.threshold, **sizes)


def replay_gradient(alg: Any, model: Any, rollout: Any, plan: Any, weight: Tensor, temperature: float = 0.7) -> Tensor:
    """The gradient in the table of the sum over the rows of weight times log-likelihood."""
    logp = graph_logp(alg, model, rollout, plan, temperature)
    ll = alg.reduce_logp(logp, plan, level="sequence", normalizer=None)
    return oracle.table_gradient(model, (weight * ll[0, :, 0]).sum())


def walk_entropy(model: Any, path: oracle.Trajectory, temperature: float) -> list[float]:
    """The entropy of the distribution that each token was drawn from; 7 for a token that was not drawn."""
    values = []
    for i, step in enumerate(path.unmask_step):
        hidden = oracle.hidden_before(path, step)
        state = tuple(model.mask_token_id if j in hidden else token for j, token in enumerate(path.response))
        p = (model.logits_at(state)[i].detach() / temperature).softmax(-1)
        values.append(float(-(p * p.log()).sum()) if step >= 0 else 7.0)
    return values


def loose_plan(alg: Any) -> tuple[Any, Any, Tensor]:
    """A rollout of two prompts with two responses each, a plan with unequal weights and an empty state, and numbers for it."""
    scored = torch.rand(3, 4, 5, generator=seeded(15)) < 0.5
    scored[1, 2] = False
    weight = torch.rand(3, 4, generator=seeded(16), dtype=torch.float64) + 0.5
    keep = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    rollout = rollout_of(alg, torch.ones(4, 5, dtype=torch.long), keep, num_generations=2)
    hidden = torch.cat([torch.zeros(3, 4, 3, dtype=torch.bool), scored], -1)
    return rollout, alg.Plan(hidden, scored, weight, scored.any(-1)), normal(3, 4, 5, seed=17)


def coefficients(loss: Callable[[Tensor], Tensor], ll: Tensor) -> Tensor:
    """The gradient in ll of the summed loss, for a function that returns a loss or an objective's Surrogate."""
    ll = ll.detach().clone().requires_grad_()
    value = loss(ll)
    return torch.autograd.grad(getattr(value, "loss", value).sum(), ll)[0]


@functools.cache
def models() -> tuple[oracle.TabularDenoiser, oracle.TabularDenoiser, oracle.TabularDenoiser]:
    """The old, the new and the reference model."""
    old = oracle.TabularDenoiser.random(4, 3, seeded(40))
    new = oracle.TabularDenoiser(old.table.detach() + normal(*old.table.shape, seed=292, scale=1.8))
    return old, new, oracle.TabularDenoiser(old.table.detach() + normal(*old.table.shape, seed=43, scale=0.5))


def experience(name: str = "") -> tuple[Any, oracle.TabularDenoiser, oracle.TabularDenoiser, oracle.TabularDenoiser, Tensor]:
    """Two prompts with four responses each of an old model; the old, the new and the reference model; and the rewards.

    The rollout suits the method of that name: one block of two steps, or two blocks of two steps for a plan on a staircase; in
    the method's own order, if it is about one, else in random order, or by confidence where positions have a ratio.
    """
    reward = double([1.0, 0.0, 0.3, 0.0, 0.2, 2.0, 0.5, 1.0])
    method = methods.METHODS.get(name)
    if method is None:
        return _drawn(4, "random"), *models(), reward
    staircase = method.plan.func.__name__ in ("block_elbo_plan", "block_replay_plan")
    return (
        _drawn(2 if staircase else 4, "low_confidence" if "position_logp" in method.features else "random"),
        *models(),
        reward,
    )


@functools.cache
def _drawn(block_length: int, order: str) -> Any:
    old, _, _ = models()
    sizes = {"length": 4, "block_length": block_length, "tokens_per_step": block_length // 2}
    settings = Sampler(order=order, temperature=0.8, **sizes)
    prompt, mask = torch.tensor([[0, 1, 0], [2, 0, 1]]), torch.tensor([[False, True, True], [True, True, True]])
    how = {"eos_token_id": 2, "num_generations": 4, "records": ["entropy", "one_step", "one_step_proposed"]}
    seed = 47 if order == "random" else 65  # both have answers beyond every clip
    drawn = generate(old, prompt, mask, settings, generator=seeded(seed), **how)
    drawn.records.update(likeliest(old, drawn, 1))
    return drawn


def likeliest(model: oracle.TabularDenoiser, rollout: Any, count: int) -> dict[str, Tensor]:
    """The records topk_ids and topk_logp by the oracle, of the distribution that each token was drawn from."""
    shape = (*rollout.response.shape, count)
    ids, logp = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.float64)
    for b, i in (rollout.unmask_step >= 0).nonzero().tolist():
        hidden = (rollout.unmask_step[b] >= rollout.unmask_step[b, i]) | (rollout.unmask_step[b] < 0)
        state = [model.mask_token_id if hidden[j] else int(rollout.response[b, j]) for j in range(shape[1])]
        best = (model.logits_at(tuple(state))[i] / rollout.sampler.temperature).log_softmax(-1).detach().topk(count)
        ids[b, i], logp[b, i] = best.indices, best.values
    return {"topk_ids": ids, "topk_logp": logp}


def features_of(
    alg: Any, method: Any, model: Any, rollout: Any, plan: Any, graph: bool = False, **more: Any
) -> dict[str, Tensor]:
    """The method's features at its temperature, with their graph if that is asked for."""
    drawn_at = rollout.sampler.temperature if rollout.sampler else 1.0
    temperature = drawn_at if method.temperature == "sampling" else 1.0
    if graph:
        return graph_features(alg, model, rollout, plan, method.features, temperature, **more)
    return alg.features(model, rollout, plan, temperature=temperature, names=method.features, **more)


def token_logps(model: Any, rollout: Any, plan: Any, k: int, b: int, temperature: float) -> dict[int, Tensor]:
    """The log-probability of each scored position of one state, by the oracle."""
    response, hidden = tuple(rollout.response[b].tolist()), positions(plan.hidden[k, b, rollout.prompt.shape[1] :])
    logp = oracle.token_logp(model, response, hidden, temperature)
    return {i: logp[i] for i in sorted(positions(plan.scored[k, b]))}


def surrogate(ratio: Tensor, adv: float, low: float, high: float) -> Tensor:
    """PPO's loss by its gradient: -adv ratio where the clip lets it through, and 0 elsewhere."""
    if (adv > 0 and ratio.item() > 1 + high) or (adv < 0 and ratio.item() < 1 - low):
        return 0 * ratio
    return -adv * ratio


def with_entropy(alg: Any, case: Walk, temperature: float = 0.7) -> tuple:
    """The model, a rollout of every trajectory with the entropies of its tokens, the probability of each, and its reward."""
    model, paths, chance, reward = walk(case, temperature)
    entropy = double([walk_entropy(model, path, temperature) for path in paths])
    records, settings = {"entropy": entropy}, settings_of(case, temperature)
    return model, recorded(alg, paths, case.eos, records=records, sampler=settings), chance, reward


def state_of(model: Any, path: Any, step: int) -> tuple:
    """The state of a trajectory before one of its steps."""
    hidden = oracle.hidden_before(path, step)
    return tuple(model.mask_token_id if i in hidden else token for i, token in enumerate(path.response))


class Watched:
    """A model that remembers how many sequences each call of its body had, and how many rows each call of its head."""

    def __init__(self, model: Any) -> None:
        self.model, self.sequences, self.rows = model, [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def encode(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        self.sequences.append(len(tokens))
        return self.model.encode(tokens, attention_mask)

    def head(self, h: Tensor) -> Tensor:
        self.rows.append(h.shape[:-1].numel())
        return self.model.head(h)


def of(function: Callable, **words: Any) -> Callable:
    """The objective with these numbers."""
    return functools.partial(function, **words)
