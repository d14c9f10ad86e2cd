"""The judge: exact values for models small enough to enumerate.

Likelihoods, ELBOs, sampler distributions, policy gradients: each is a finite sum written as a plain
loop over Python tuples, of values that `logits_at` reads. (`encode` and its like only let the fast
code ask the same table.) Nothing of the package is imported, so that this module and the fast code
cannot share a mistake. Autograd flows
from every result to the model's table of logits; `table_gradient` reads it off.

Conventions
    L, V       number of response positions; number of ordinary tokens 0 .. V-1. The mask token
               [MASK] has id V.
    state      a tuple of L tokens; [MASK] where a position is hidden from the model.
    response   a tuple of L ordinary tokens.
    hidden     a frozenset of positions that show [MASK].
    ll_i(M)    log p(response_i | response outside M), the log-probability of token i when exactly
               the set M is hidden.
    S(M)       the sum of ll_i(M) over i in M.
    units      log-likelihoods are natural logarithms (nats) per sequence; probabilities are plain.
    dtype      float64, whatever the dtype of the table.
    cost       counted in token log-probabilities read from the table.

What the numbers do and do not say. The ELBO is a lower bound on the likelihood under the sampler
that reveals one position at a time in uniformly random order. It is no bound for the
confidence-ordered sampler, of whose responses only `response_distribution` knows the chances.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

State = tuple[int, ...]
ORDERS = ("random", "low_confidence", "left_to_right", "right_to_left", "entropy", "margin")


# ---------------------------------- The model: a table that holds one row of logits for every state
def state_index(digits: Iterable[int], base: int) -> int:
    """Row of a state in the table: sum_i digits_i * base**i, so position 0 is the fastest digit."""
    return sum(int(digit) * base**i for i, digit in enumerate(digits))


class TabularDenoiser(torch.nn.Module):
    """A masked denoiser with arbitrary conditionals: the logits of every state are free parameters.

        p(x_i = v | state) = softmax(table[row(state), i])[v]
        row(state) = sum_i state_i (V+1)^i,   [MASK] = V

    Nothing forces the conditionals of different states to come from one joint distribution, and
    those of a trained network do not. `consistent_denoiser` builds the special case in which they
    do. The prompt plays no role.

    Args:
        table: logits, shape ((V+1)**L, L, V). With `hidden_only`, shape (2**L, L, V): the logits
            depend on which positions are hidden but not on the visible tokens, row = sum_i hidden_i
            2^i. An `nn.Parameter` is kept as it is; another tensor is copied into a new parameter.
            Logits of visible positions exist but are never read.
        hidden_only: which of the two shapes `table` has.

    Attributes: `table`; `length` = L; `mask_token_id` = V; `vocab_size` = V+1; `base`, the number
    of values of a digit.
    """

    def __init__(self, table: Tensor, hidden_only: bool = False):
        super().__init__()
        kept = isinstance(table, torch.nn.Parameter)
        if table.requires_grad and not kept:  # the copy would cut its graph
            allowed = "an nn.Parameter or a tensor without grad"
            raise ValueError(f"table: got a tensor that requires grad; allowed {allowed}")
        rows, self.length, self.mask_token_id = table.shape
        self.vocab_size = self.mask_token_id + 1
        self.base = 2 if hidden_only else self.vocab_size
        if rows != self.base**self.length:
            allowed = f"{self.base}**{self.length} = {self.base**self.length}"
            raise ValueError(f"table: got {rows} rows; allowed {allowed}")
        self.table = table if kept else torch.nn.Parameter(table.clone())

    @classmethod
    def random(
        cls,
        length: int,
        vocab_size: int,
        generator: torch.Generator,
        scale: float = 1.0,
    ) -> "TabularDenoiser":
        """Independent N(0, scale^2) logits for `vocab_size` ordinary tokens, beside the mask."""
        shape = ((vocab_size + 1) ** length, length, vocab_size)
        return cls(scale * torch.randn(shape, generator=generator, dtype=torch.float64))

    @classmethod
    def from_hidden_table(cls, table: Tensor) -> "TabularDenoiser":
        """Logits (2**L, L, V) of the hidden pattern alone; row = sum_i hidden_i 2^i."""
        return cls(table, hidden_only=True)

    def logits_at(self, state: State) -> Tensor:
        """Logits (L, V) of one state, float64, by look-up: the only access of the judge itself."""
        full = self.base == self.vocab_size
        digits = state if full else [token == self.mask_token_id for token in state]
        return self.table[state_index(digits, self.base)].double()

    def encode(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """The logits of many states as "hidden states" of the network interface, without a loop.

        The last L of the T columns of `tokens` (N, T) are the state. What stands before it, a
        prompt, and the attention mask play no role. Returns (N, T, V), zeros at the prompt.
        """
        mask, start = self.mask_token_id, tokens.shape[1] - self.length
        state = tokens[:, start:].long()
        digits = state if self.base == self.vocab_size else (state == mask).long()
        places = self.base ** torch.arange(self.length, device=state.device)
        response = self.table[(digits * places).sum(-1)]
        prompt = response.new_zeros(len(tokens), start, mask)
        return torch.cat([prompt, response], dim=1)

    def encode_staircase(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        clean: Tensor,
        noisy: Tensor,
        *,
        block_length: int,
        clean_stream: str,
    ) -> Tensor:
        """What a block-causal network's staircase stands for, block by block: (N, L, V).

        Block m of the result comes from the state [clean blocks before m, noisy block m, [MASK]
        after it]. ``prompt``, ``prompt_mask`` and ``clean_stream`` play no role.
        """
        blocks = []
        for start in range(0, self.length, block_length):
            stop = start + block_length
            hidden = torch.full_like(noisy[:, stop:], self.mask_token_id)
            state = torch.cat([clean[:, :start], noisy[:, start:stop], hidden], dim=1)
            seen = torch.ones_like(state, dtype=torch.bool)
            blocks.append(self.encode(state, seen)[:, start:stop])
        return torch.cat(blocks, dim=1)

    def head(self, h: Tensor) -> Tensor:
        """Features (..., V) to logits (..., V+1), float32 at least: the last, [MASK], is -inf."""
        logits = h if h.dtype == torch.float64 else h.float()
        return torch.cat([logits, torch.full_like(logits[..., :1], -math.inf)], dim=-1)


def consistent_denoiser(joint: Tensor) -> TabularDenoiser:
    """The denoiser whose conditionals are those of one joint distribution:

        p(x_i | x_visible) = P(x_i, x_visible) / P(x_visible)

    For this model the chain rule gives every order of revelation the same likelihood, so the ELBO
    is tight: elbo(y) = any_order_log_likelihood(y) = log P(y).

    Args:
        joint: P up to a constant factor, shape (V,) * L, entries >= 0. Zeros are allowed: they
            become logits of -inf. States of probability zero, and visible positions, get uniform
            logits.

    Returns:
        A float64 model. The joint is data: no gradient reaches it. Cost (V+1)^L marginals.
    """
    size, length = joint.shape[0], joint.dim()
    table = torch.zeros((size + 1) ** length, length, size, dtype=torch.float64)
    for state in itertools.product(range(size + 1), repeat=length):
        # P of every way to fill in the hidden positions of this state.
        evidence = joint.double()[tuple(slice(None) if token == size else token for token in state)]
        hidden = [i for i, token in enumerate(state) if token == size]
        for axis, i in enumerate(hidden):
            # The visible axes are gone: the k-th hidden position is axis k of the evidence.
            marginal = evidence.movedim(axis, 0).reshape(size, -1).sum(1)
            if marginal.sum() > 0:
                table[state_index(state, size + 1), i] = marginal.log()
    return TabularDenoiser(table)


# ----------------------- Likelihoods and their bounds, by enumeration of the masks or of the orders
def subsets_of_size(n: int, k: int) -> list[frozenset[int]]:
    """All C(n, k) subsets of {0, .., n-1} that have k elements, in lexicographic order."""
    return [frozenset(chosen) for chosen in itertools.combinations(range(n), k)]


def all_subsets(n: int) -> list[frozenset[int]]:
    """All 2^n subsets of {0, .., n-1}, smaller ones first, the empty set included."""
    return [chosen for k in range(n + 1) for chosen in subsets_of_size(n, k)]


def log_softmax(logits: Tensor) -> Tensor:
    """z - log sum exp z over the last axis, written out.

    The gradient of torch.log_softmax opens a thread pool even for a handful of numbers: on a busy
    machine each of the many thousand calls made here would wait for it, and a sum of seconds would
    take minutes.
    """
    return logits - torch.logsumexp(logits, dim=-1, keepdim=True)


def token_logp(
    model: TabularDenoiser, response: State, hidden: frozenset[int], temperature: float = 1.0
) -> dict[int, Tensor]:
    """Log-probability of every hidden token of a response, given its visible tokens:

        ll_i(hidden) = log softmax(logits_i / temperature)[response_i]        for i in hidden

    Returns:
        {position: scalar}, nats, positions in ascending order; empty when nothing is hidden.
    """
    mask = model.mask_token_id
    state = tuple(mask if i in hidden else token for i, token in enumerate(response))
    logp = log_softmax(model.logits_at(state) / temperature)
    return {i: logp[i, response[i]] for i in sorted(hidden)}


def mean_logp_by_count(model: TabularDenoiser, response: State) -> list[Tensor]:
    """Mean log-probability of a hidden token at each number of hidden tokens:

        a(l) = mean over |M| = l of S(M) / l,       l = 1 .. L

    Returns:
        [a(1), .., a(L)]: entry l-1 belongs to l hidden tokens. Nats per token. Cost 2^L L.
    """
    means = []
    for count in range(1, model.length + 1):
        masks = subsets_of_size(model.length, count)
        total = sum(sum(token_logp(model, response, hidden).values()) for hidden in masks)
        means.append(total / (count * len(masks)))
    return means


def elbo(model: TabularDenoiser, response: State) -> Tensor:
    """Evidence lower bound of a response in its count form:

        B = E_{l ~ U{1..L}} E_{|M| = l} [ (L / l) S(M) ] = sum_l a(l)  <=  any_order_log_likelihood

    Equals the integral of `elbo_integrand` over t in [0, 1], the 1/t form of the same bound, and
    the mean over the orders of revelation of log prod_j p(y_s(j) | y_s(1), .., y_s(j-1)). Equality
    with the log-likelihood holds iff all orders give the response the same probability.

    Source: LLaDA, arXiv 2502.09992, eq. 6; LLaDA 1.5, arXiv 2505.19223, eqs. 14-15. Nats.
    Cost 2^L L.
    """
    return sum(mean_logp_by_count(model, response))


def elbo_integrand(model: TabularDenoiser, response: State, t: float) -> Tensor:
    """Expected integrand of the 1/t form of the ELBO, each token hidden with probability t:

        g(t) = E[ S(M) / t ] = sum over non-empty M of t^(|M|-1) (1-t)^(L-|M|) S(M)
        B = integral of g over [0, 1]

    The 1/t cancels against the probability that anything is hidden, so g is a polynomial of degree
    L-1, finite at 0. Its Bernstein coefficients are L a(l):

        g(t) = L sum_j C(L-1, j) t^j (1-t)^(L-1-j) a(j+1)

    hence g(0) = L a(1) and g(1) = L a(L), the one-step mean-field score. Nats. Cost 2^L L.
    """
    total = torch.zeros((), dtype=torch.float64)
    for hidden in all_subsets(model.length)[1:]:
        weight = t ** (len(hidden) - 1) * (1 - t) ** (model.length - len(hidden))
        if weight > 0:  # a set of probability zero does not count, even where S is -inf
            total = total + weight * sum(token_logp(model, response, hidden).values())
    return total


def any_order_log_likelihood(
    model: TabularDenoiser, response: State, temperature: float = 1.0
) -> Tensor:
    """Exact log-likelihood under the sampler that reveals one random hidden position at a time:

        p_AO(y) = mean over orders s of prod_j p(y_s(j) | y_s(1), .., y_s(j-1))

    by dynamic programming over hidden sets, since orders share their states:

        P({}) = 1,     P(M) = 1/|M| sum_{i in M} exp(ll_i(M)) P(M without i),     p_AO = P({0..L-1})

    It is the response distribution of `trajectories(model, "random", temperature,
    tokens_per_step=1)`.

    Returns:
        Scalar, nats; -inf for an impossible response. Cost 2^L L instead of the L! L of a sum over
        the orders.
    """
    log_p = {frozenset(): torch.zeros((), dtype=torch.float64)}
    for hidden in all_subsets(model.length)[1:]:
        # From this set one of its positions is revealed, each with the same chance.
        logp = token_logp(model, response, hidden, temperature)
        routes = torch.stack([logp[i] + log_p[hidden - {i}] for i in logp])
        log_p[hidden] = torch.logsumexp(routes, dim=0) - math.log(len(hidden))
    return log_p[frozenset(range(model.length))]


# -------------------------------------------- The sampler: its exact distribution over trajectories
@dataclass(frozen=True)
class Trajectory:
    """One outcome of the sampler.

    unmask_step: the step, counted from 0 through all blocks, at which each token was revealed; -1 =
    never revealed.
    """

    prob: Tensor  # a float64 scalar that is differentiable in the table
    response: State
    unmask_step: State


def policy(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """The probabilities (L, V) from which tokens are drawn: softmax(logits / temperature), at
    temperature 0 softmax(logits). With a top_p they are those of the nucleus, the fewest likeliest
    tokens that together have this probability."""
    probs = log_softmax(logits / (temperature or 1.0)).exp()
    if top_p == 1:
        return probs
    # The likeliest tokens, one after the other, until they have the mass; the others get none.
    kept = torch.zeros_like(probs)
    for i, row in enumerate(probs.tolist()):
        mass = 0.0
        for v in sorted(range(len(row)), key=lambda v: -row[v]):
            if mass < top_p:
                kept[i, v], mass = 1.0, mass + row[v]
    return probs * kept / (probs * kept).sum(-1, keepdim=True)


def proposals(
    model: TabularDenoiser,
    state: State,
    positions: Iterable[int],
    temperature: float,
    top_p: float = 1.0,
) -> list[tuple[dict[int, int], Tensor]]:
    """All joint draws of tokens at `positions`, each from its `policy`.

    Returns:
        [({position: token}, probability)]. At temperature 0 the one greedy draw with probability 1,
        ties to the lower token. Draws of probability exactly 0 are left out. Cost V^len(positions).
    """
    positions, logits = list(positions), model.logits_at(state)
    tokens, one = range(model.mask_token_id), torch.ones((), dtype=torch.float64)
    if temperature == 0:
        greedy = {i: max(tokens, key=lambda v: (logits[i, v].item(), -v)) for i in positions}
        return [(greedy, one)]
    # Positions draw independently of each other: the chance of a joint draw is a product.
    probs, draws = policy(logits, temperature, top_p), []
    for drawn in itertools.product(tokens, repeat=len(positions)):
        pairs = dict(zip(positions, drawn, strict=True))
        prob = math.prod((probs[i, v] for i, v in pairs.items()), start=one)
        if prob.item() > 0:
            draws.append((pairs, prob))
    return draws


def most_confident(logits: Tensor, proposed: dict[int, int], n: int) -> list[int]:
    """The n positions that keep their proposal under low-confidence remasking.

    The confidence of a proposal is its log-probability at temperature 1, whatever the sampling
    temperature, rounded to float32 so that models of either precision decide alike. Equal
    confidences go to the lower position.

    `logits` (L, V) are not divided by any temperature; `proposed` is {position: token}.
    """
    logp = log_softmax(logits.detach()).float()
    ranked = sorted(sorted(proposed), key=lambda i: -logp[i, proposed[i]].item())  # stable
    return ranked[:n]


def at_least(logits: Tensor, proposed: dict[int, int], threshold: float) -> list[int]:
    """The positions that keep their proposal in threshold decoding, ascending.

    Those whose confidence (as in `most_confident`, rounded as there) is at least the logarithm of
    the threshold; where there is none, the most confident.
    """
    logp = log_softmax(logits.detach()).float()
    floor = torch.tensor(threshold, dtype=torch.float64).log().float()
    kept = [i for i in sorted(proposed) if logp[i, proposed[i]] >= floor]
    return kept or most_confident(logits, proposed, 1)


def surest(probs: Tensor, hidden: Iterable[int], order: str, n: int) -> list[int]:
    """The n hidden positions of lowest entropy, or of the widest margin between their two largest
    probabilities, rounded to float32; equal ones go to the lower position. `probs` (L, V)."""

    def sure(row: list[float]) -> float:
        if order == "entropy":
            return sum(p * math.log(p) for p in row if p > 0)
        first, second = sorted(row, reverse=True)[:2]
        return first - second

    found = torch.tensor([sure(row) for row in probs.tolist()], dtype=torch.float64).float()
    return sorted(sorted(hidden), key=lambda i: -found[i].item())[:n]  # stable


def transition(
    model: TabularDenoiser,
    state: State,
    block: Iterable[int],
    order: str,
    temperature: float,
    tokens_per_step: int,
    threshold: float | None = None,
    top_p: float = 1.0,
) -> dict[State, Tensor]:
    """Exact distribution of the next state: `tokens_per_step` = n of m hidden tokens are revealed.

    The m are the hidden positions of `block`. With p their `policy`, p1 = softmax(logits), x the
    new tokens and U the positions they go to:

        random           P(next) = 1 / C(m, n) prod_{j in U} p_j(x_j)
        left_to_right    P(next) = prod_{j in U} p_j(x_j),  U the n lowest hidden positions
        right_to_left    the same with the n highest hidden positions
        low_confidence   tokens are proposed at all m positions, each from p_j, and U are the n
                         proposals of highest p1
        entropy, margin  P(next) = prod_{j in U} p_j(x_j),  U the n hidden positions that are
                         `surest` by p: a function of the state, so that the gradient is that of
                         the tokens alone wherever U does not jump

    For low_confidence this function adds up all V^m proposals and merges those that reveal the same
    tokens at the same positions. Where no two confidences are equal, the sum has the closed form

        P(next) = prod_{j in U} p_j(x_j) prod_{j hidden, not in U} sum_v p_j(v) [ p1_j(v) < c ],
        c = min_{i in U} p1_i(x_i)

    so the choice of positions depends on the model too. Its indicator is piecewise constant in the
    table: the gradient is that of the token probabilities, right almost everywhere, while the
    probability itself jumps where two confidences cross.

    With a threshold (low_confidence, n = 1) the proposals that are kept are those of `at_least`:
    any number of them from 1 to m.

    Source: remasking "random" and "low_confidence" of LLaDA, arXiv 2502.09992, and its released
    sampler (ML-GSAI/LLaDA, generate.py); the closed form is derived here and checked in the tests.
    Threshold: Fast-dLLM, arXiv 2505.22618. Entropy and margin: Dream, arXiv 2508.15487, and its
    released sampler (DreamLM/Dream, generation_utils.py).

    Returns:
        {next state: probability}, probabilities sum to 1. Cost V^m (low_confidence), C(m, n) V^n
        (random), V^n.
    """
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}; allowed {', '.join(ORDERS)}")
    hidden = [i for i in block if state[i] == model.mask_token_id]
    kernel: dict[State, Tensor] = {}

    # Several draws may lead to one next state: their chances add up.
    def add(chosen: Iterable[int], proposed: dict[int, int], prob: Tensor) -> None:
        shown = tuple(proposed[i] if i in chosen else token for i, token in enumerate(state))
        kernel[shown] = kernel[shown] + prob if shown in kernel else prob

    # The positions depend on what was drawn: every hidden position proposes a token first.
    if order == "low_confidence":
        logits = model.logits_at(state)
        for proposed, prob in proposals(model, state, hidden, temperature, top_p):
            if threshold is None:
                add(most_confident(logits, proposed, tokens_per_step), proposed, prob)
            else:
                add(at_least(logits, proposed, threshold), proposed, prob)
        return kernel
    # In all other orders the positions come first, and tokens are drawn at these alone.
    choices = list(itertools.combinations(hidden, tokens_per_step))
    if order == "left_to_right":
        choices = choices[:1]  # in lexicographic order: the first holds the lowest positions
    if order == "right_to_left":
        choices = choices[-1:]
    if order in ("entropy", "margin"):
        probs = policy(model.logits_at(state), temperature, top_p)
        choices = [surest(probs, hidden, order, tokens_per_step)]
    for chosen in choices:
        for proposed, prob in proposals(model, state, chosen, temperature, top_p):
            add(chosen, proposed, prob / len(choices))
    return kernel


def trajectories(
    model: TabularDenoiser,
    order: str,
    temperature: float,
    tokens_per_step: int,
    block_length: int | None = None,
    eos_token_id: int | None = None,
    threshold: float | None = None,
    top_p: float = 1.0,
) -> list[Trajectory]:
    """Every trajectory of the block-wise sampler, with P(tau) = prod_s transition_s.

    Blocks of `block_length` positions are completed from left to right, each in block_length /
    tokens_per_step steps of `transition`; with a threshold, each in as many as it takes. All
    randomness is summed over, by brute-force enumeration: proposals, random positions, and the tie
    rule. A trajectory is known by its response and its unmask_step; the state before step s hides
    the positions whose unmask_step is -1 or >= s.

    Args:
        order: one of ORDERS.
        temperature: sampling temperature; 0 = greedy tokens.
        block_length: a divisor of L; None = L, a single block.
        eos_token_id: None = no stopping rule. Otherwise, once a completed block holds this token,
            later blocks are never revealed: the response is filled with the token and unmask_step
            is -1 there.
        threshold: that of threshold decoding, with low_confidence and one token a step; None = not.
        top_p: tokens are drawn from the nucleus of this probability; 1 = from all.

    Returns:
        Trajectories of positive probability, which sum to 1. Cost of the order of the number of
        trajectories: at most L! V^L for "random" with one token a step.
    """
    block_length = model.length if block_length is None else block_length
    for key, size, whole in (
        ("block_length", block_length, model.length),
        ("tokens_per_step", tokens_per_step, block_length),
    ):
        if whole % size:
            raise ValueError(f"{key}: got {size}; allowed divisors of {whole}")
    mask, one = model.mask_token_id, torch.ones((), dtype=torch.float64)
    how = (order, temperature, tokens_per_step, threshold, top_p)
    # All paths begin with everything hidden, and each step makes them one transition longer.
    paths = [((mask,) * model.length, (-1,) * model.length, one)]
    for step in range(model.length // tokens_per_step):
        start = step * tokens_per_step // block_length * block_length
        block = range(start, start + block_length)
        kernels: dict[State, dict[State, Tensor]] = {}
        longer = []
        for state, unmask_step, prob in paths:
            # A path rests where an earlier block holds the end, or (with a threshold) where its
            # block is finished already.
            if eos_token_id in state[:start] or mask not in state[start : block.stop]:
                longer.append((state, unmask_step, prob))
                continue
            if state not in kernels:  # many paths meet in one state
                kernels[state] = transition(model, state, block, *how)
            for shown, factor in kernels[state].items():
                own = max(unmask_step) + 1  # the path's own count: blocks differ in length
                changes = zip(state, shown, unmask_step, strict=True)
                steps = tuple(own if a != b else s for a, b, s in changes)
                longer.append((shown, steps, prob * factor))
        paths = longer

    def filled(state: State) -> State:  # what was never revealed is EOS
        return tuple(eos_token_id if token == mask else token for token in state)

    return [Trajectory(prob, filled(state), steps) for state, steps, prob in paths]


def response_distribution(trajectories: Iterable[Trajectory]) -> dict[State, Tensor]:
    """{response: sum of P(tau) over the trajectories that end in it}, differentiable."""
    total: dict[State, Tensor] = {}
    for trajectory in trajectories:
        total[trajectory.response] = total.get(trajectory.response, 0.0) + trajectory.prob
    return total


# --------------------------------------------------------------------------------- Policy gradients
def expected_reward(trajectories: Iterable[Trajectory], reward: Callable[[State], float]) -> Tensor:
    """J = sum_tau P(tau) reward(response), a scalar that is differentiable in the table."""
    terms = (tau.prob * reward(tau.response) for tau in trajectories)
    return sum(terms, start=torch.zeros((), dtype=torch.float64))


def table_gradient(model: TabularDenoiser, value: Tensor) -> Tensor:
    """d value / d table, in its shape and dtype; zeros where the value does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(model.table)
    how = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    return torch.autograd.grad(value, model.table, **how)[0]


def policy_gradient(
    model: TabularDenoiser,
    order: str,
    temperature: float,
    tokens_per_step: int,
    reward: Callable[[State], float],
    block_length: int | None = None,
    eos_token_id: int | None = None,
    threshold: float | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """The exact policy gradient dJ/dtable of a sampler: no score function is involved.

    Where positions are chosen by confidence, entropy or margin, J jumps where two of these cross,
    and where one crosses the threshold; between the crossings this is its derivative. Greedy
    decoding has a constant J and therefore zero gradient.

    Arguments and cost as `trajectories`.
    """
    words = (order, temperature, tokens_per_step, block_length, eos_token_id, threshold, top_p)
    outcomes = trajectories(model, *words)
    return table_gradient(model, expected_reward(outcomes, reward))


def hidden_before(trajectory: Trajectory, step: int) -> frozenset[int]:
    """The hidden positions before a step: those with unmask_step = -1 or unmask_step >= step."""
    return frozenset(i for i, s in enumerate(trajectory.unmask_step) if s == -1 or s >= step)


# --------------------------------------------------------------------------------------- Estimators
def moments(draws: Iterable[tuple[float | Tensor, float | Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean and variance of an estimator by enumeration of its plan:

        mean = sum p value,      variance = sum p (value - mean)^2

    `draws` are (probability, value) of every outcome; ValueError where they are not all, and the
    probabilities do not sum to 1. Values may be tensors of one shape, such as gradients. Mean and
    variance are elementwise, float64 and differentiable, the variance being that of one draw.
    """
    columns = zip(*draws, strict=True)
    prob, value = (
        torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in column]) for column in columns
    )
    total = prob.sum().item()
    if not abs(total - 1) <= 1e-6:
        raise ValueError(f"draws: got probabilities that sum to {total}; allowed 1")
    mean = torch.tensordot(prob, value, 1)
    return mean, torch.tensordot(prob, (value - mean) ** 2, 1)
