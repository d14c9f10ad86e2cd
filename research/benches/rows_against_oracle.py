"""Each method's update against the true policy gradient: `python -m research.benches.rows_against_oracle`.

The model is a table of random conditional distributions that can be enumerated (`minidrl.oracle`): 4 positions, 3 tokens, of
which one ends the text; the verifier accepts texts with exactly two ones. A draw is a rollout of 4 prompts x 8 responses, the
row's plan for the first of 8 updates on it, and the update direction g, minus the gradient of the row's loss. The truth G is
the gradient of the expected reward, by enumeration. All draws of a table are computed at once by the shipped functions.

    cosine    c = E<g, G> / (E<g, g'> <G, G>)^(1/2); a primed vector is of another draw, so that noise biases no mean

Results go to research/results/rows_against_oracle.json, and what is there is not measured again. --rehearse: a few draws of
one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import methods, oracle, sampler
from minidrl.keyed import keyed_generator, keyed_seed
from research import stats
from research.ledger import STORED
from research.tables import markdown

RESULTS = Path(__file__).parents[1] / "results" / "rows_against_oracle.json"
LENGTH, TOKENS, END, BLOCK = 4, 3, 2, 2  # positions, ordinary tokens, the one that ends a text, positions of a block
PROMPTS, GENERATIONS, UPDATES = 4, 8, 8
EACH = PROMPTS * GENERATIONS  # responses of a draw
TABLES, DRAWS = 8, 128
PARTS = 8  # of the draws, for the jackknife
SETTLED = 0.3  # a Monte Carlo error of a cosine from which on it is not given
CONTROL = "control"
BATCH_WIDE = (alg.coupled_plan, alg.scheduled_plan)  # one random number for a whole batch: drawn for each rollout by itself

# ================================================================================================== many tables at once


@dataclass(frozen=True)
class Tables:
    """A table of logits for each draw as one network: (D, (V+1)^L, L, V); the prompt's one token is the number of the draw."""

    table: Tensor

    @property
    def mask_token_id(self) -> int:
        return self.table.shape[-1]

    @property
    def vocab_size(self) -> int:
        return self.mask_token_id + 1

    def encode(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(N, T, V): the logits of a state as its hidden states, as `oracle.TabularDenoiser` has them."""
        _, states, length, size = self.table.shape
        places = self.vocab_size ** torch.arange(length)
        number = (tokens[:, -length:] * places).sum(-1) + states * tokens[:, 0]
        logits = self.table.flatten(0, 1).index_select(0, number)
        return torch.cat([logits.new_zeros(len(tokens), tokens.shape[1] - length, size), logits], 1)

    def encode_staircase(self, prompt, prompt_mask, clean, noisy, *, block_length: int, clean_stream: str) -> Tensor:
        """(N, L, V): block m from the state [clean blocks before m, noisy block m, [MASK] after it]."""
        blocks = []
        for start in range(0, LENGTH, block_length):
            stop = start + block_length
            hidden = torch.full_like(noisy[:, stop:], self.mask_token_id)
            state = torch.cat([prompt, clean[:, :start], noisy[:, start:stop], hidden], 1)
            blocks.append(self.encode(state, None)[:, prompt.shape[1] + start : prompt.shape[1] + stop])
        return torch.cat(blocks, 1)

    head = oracle.TabularDenoiser.head


class Truth:
    """Expected reward of a sampler and its gradient, for many tables at once.

    By dynamic programming over the states, from the full texts back: value(state) = sum over the next states of P(next | state)
    value(next), with the kernel of `oracle.transition`, which judges it.
    """

    def __init__(self, order: str, block_length: int):
        self.order, self.final = order, []  # final: the values of the states that end a text
        place: dict[oracle.State, int] = {}  # in the vector of values
        states, levels = list(itertools.product(range(TOKENS + 1), repeat=LENGTH)), []
        for hidden in range(LENGTH + 1):
            for state in (state for state in states if state.count(TOKENS) == hidden):
                if not hidden or END in state[: start_of(state, block_length)]:
                    place[state] = len(place)
                    self.final.append(accepted_text(state))
                elif in_turn(state, block_length):
                    levels += [[]] if len(levels) < hidden else []
                    levels[-1].append(state)
        place |= {state: len(place) + i for i, state in enumerate(itertools.chain(*levels))}
        self.levels = [self._indices(level, block_length, place) for level in levels]

    @staticmethod
    def _indices(level: list[oracle.State], block_length: int, place: dict) -> tuple[Tensor, Tensor, Tensor]:
        # S states: their rows of the table (S, 1); the m positions that may be revealed (S, m); where each leads (S, m, V).
        rows = [[oracle.state_index(state, TOKENS + 1)] for state in level]
        block = [candidates(state, block_length) for state in level]
        nexts = [
            [[place[shown(state, i, v)] for v in range(TOKENS)] for i in own] for state, own in zip(level, block, strict=True)
        ]
        return torch.tensor(rows), torch.tensor(block), torch.tensor(nexts)

    def value(self, table: Tensor) -> Tensor:
        """J (D,), differentiable in the tables (D, (V+1)^L, L, V)."""
        logp = table.log_softmax(-1)
        value = torch.tensor(self.final, dtype=table.dtype).expand(len(table), -1)
        for rows, block, nexts in self.levels:
            value = torch.cat([value, self._level(logp[:, rows, block], nexts, value)], 1)
        return value[:, -1]

    def _level(self, logp: Tensor, nexts: Tensor, value: Tensor) -> Tensor:
        # logp (D, S, m, V) of the m candidates of S states; nexts (S, m, V): where each reveals.
        if self.order == "low_confidence":
            return self._confident(logp, nexts, value)
        mean = (logp.exp() * value[:, nexts]).sum(-1)
        chosen = {"random": slice(None), "left_to_right": slice(0, 1), "right_to_left": slice(-1, None)}[self.order]
        return mean[..., chosen].mean(-1)

    def _confident(self, logp: Tensor, nexts: Tensor, value: Tensor) -> Tensor:
        m = logp.shape[2]
        drawn = torch.tensor(list(itertools.product(range(TOKENS), repeat=m)))
        proposed = logp[:, :, torch.arange(m), drawn]  # (D, S, V^m, m)
        winner = proposed.detach().float().argmax(-1, keepdim=True)
        after = nexts[:, torch.arange(m), drawn].expand(proposed.shape).gather(-1, winner)[..., 0]
        reached = value.gather(1, after.flatten(1)).view(after.shape)
        return (proposed.sum(-1).exp() * reached).sum(-1)

    def gradient(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """(J (D,), dJ/dtable as vectors (D, P))."""
        table = table.detach().requires_grad_()
        value = self.value(table)
        return value.detach(), torch.autograd.grad(value.sum(), table)[0].flatten(1)


def start_of(state: oracle.State, block_length: int) -> int:
    """Where the first block begins that is not finished; the length, if all are."""
    return state.index(TOKENS) // block_length * block_length if TOKENS in state else LENGTH


def in_turn(state: oracle.State, block_length: int) -> bool:
    """Blocks after the one that is being written are hidden."""
    return set(state[start_of(state, block_length) + block_length :]) <= {TOKENS}


def candidates(state: oracle.State, block_length: int) -> list[int]:
    """The hidden positions of the block that is being written."""
    start = start_of(state, block_length)
    return [i for i in range(start, start + block_length) if state[i] == TOKENS]


def shown(state: oracle.State, position: int, token: int) -> oracle.State:
    """The state with one more token."""
    return (*state[:position], token, *state[position + 1 :])


def accepted_text(text: Iterable[int]) -> float:
    """The verifier: 1 for exactly two ones up to the end of the text."""
    kept = list(itertools.takewhile(lambda token: token != END, text))
    return float(kept.count(1) == 2)


def accepted(response: Tensor) -> Tensor:
    """The same of many texts (*n, L)."""
    kept = (response == END).cumsum(-1) == 0
    return (((response == 1) & kept).sum(-1) == 2).double()


# ================================================================================================== a row's updates


def base_table(number: int) -> oracle.TabularDenoiser:
    """Standard normal logits; that of the end is lower by 1, so that texts have some length."""
    model = oracle.TabularDenoiser.random(LENGTH, TOKENS, keyed_generator(number, 0, "table"))
    with torch.no_grad():
        model.table[..., END] -= 1
    return model


def method_of(name: str) -> methods.Method:
    """The row; one that chooses among the steps, or the states, of a trajectory keeps 2 of the 4 here."""
    row = methods.METHODS["reinforce" if name == CONTROL else name]
    chooses = row.plan.func in (alg.entropy_plan, alg.replay_plan) and row.plan.keywords["num_states"] is not None
    half = {"plan.num_states": LENGTH // 2} if chooses else {}
    half |= {"credit.num_states": LENGTH // 2} if row.credit.func is alg.progress_advantage else {}
    return methods.with_options(row, half)


def orders_of(name: str) -> tuple[str, ...]:
    """The row's own order, if it is about one."""
    own = method_of(name).order
    return ("random", "low_confidence") if own == "any" else (own,)


def key_of(name: str, order: str) -> str:
    """Where the results of a method by one sampler are stored."""
    return f"{STORED.get(name, name)}, {order}"


def block_of(name: str) -> int:
    """Block length of the sampler: a staircase is about blocks, every other row has one block."""
    return BLOCK if method_of(name).plan.func in (alg.block_elbo_plan, alg.block_replay_plan) else LENGTH


def collect(model: oracle.TabularDenoiser, order: str, block_length: int, draws: int, number: int) -> alg.Rollout:
    """The rollouts of all draws as one; the prompt is the number of the draw, as padding, so that no plan hides it."""
    words = {"length": LENGTH, "block_length": block_length, "tokens_per_step": 1}
    settings = sampler.Sampler(order=order, temperature=1.0, **words)
    prompt = torch.arange(draws).repeat_interleave(PROMPTS)[:, None]
    how = {"eos_token_id": END, "num_generations": GENERATIONS, "records": ["entropy", "one_step", "one_step_proposed", "topk"]}
    noise = keyed_generator(number, block_length, f"rollout {order}")
    return sampler.generate(model, prompt, torch.zeros_like(prompt).bool(), settings, generator=noise, **how)


def part(rollout: alg.Rollout, rows: slice) -> alg.Rollout:
    """Some of the rows of a rollout."""
    tensors = {name: value[rows] for name, value in vars(rollout).items() if torch.is_tensor(value)}
    records = {name: value[rows] for name, value in rollout.records.items()}
    return dataclasses.replace(rollout, **tensors, records=records)


def draw_plan(row: methods.Method, rollout: alg.Rollout, seed: int, update: int, updates: int) -> alg.Plan:
    """The row's plan for an update; where a plan has one random number for all of a batch, each draw has its own."""
    if row.plan.func not in BATCH_WIDE:
        return methods.draw(row, rollout, keyed_generator(seed, update, "plan"), update=update, updates=updates)
    noise, parts = keyed_generator(seed, update, "plan"), []
    for draw in range(len(rollout.response) // EACH):
        schedule = keyed_generator(seed, draw, "schedule")
        told = {"update": update, "updates": updates, "schedule": schedule}
        parts.append(methods.draw(row, part(rollout, slice(draw * EACH, (draw + 1) * EACH)), noise, **told))
    names = ("hidden", "scored", "weight", "valid")
    return dataclasses.replace(parts[0], **{name: torch.cat([getattr(p, name) for p in parts], 1) for name in names})


def scored(row: methods.Method, model, rollout: alg.Rollout, plan: alg.Plan) -> dict[str, Tensor]:
    """What an ll is made of, without a graph: for anchors and references."""
    names = tuple(name for name in row.features if name in ("logp", "order_logp", "position_logp"))
    return feat.features(model, rollout, plan, temperature=1.0, names=names, size=1 << 20)


def advantages(row: methods.Method, plan: alg.Plan, rollout: alg.Rollout, reward: Tensor) -> Tensor:
    """The row's credit; states that have a value are completed in one step, and the completions judged."""
    values = None
    if row.step_value != "none":
        record = accepted(methods.completions(row, rollout)).T
        values = record.gather(0, plan.step)
    return methods.advantages(row, plan, rollout, reward, values)


def losses(row, plan: alg.Plan, rollout: alg.Rollout, feature: dict, adv: Tensor, anchor, ref) -> Tensor:
    """`methods.method_loss` of each draw by itself: (D,). Groups never mix; what mixes a batch is the aggregation."""
    loss = methods.surrogate(row, plan, rollout, feature, adv, anchor).loss
    kl = methods.penalty(row, plan, rollout, feature, anchor, ref)
    loss = loss if kl is None else loss + row.kl.beta * kl
    first = part(rollout, slice(EACH))

    def total(loss: Tensor, scored: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
        mine = alg.Plan(hidden=scored, scored=scored, weight=weight, valid=scored.any(-1))
        own = dataclasses.replace(first, keep=keep)
        return alg.aggregate(loss, mine, own, level=row.reduction, how=row.aggregation)

    by_draw = [x.unflatten(1, (-1, EACH)) for x in (loss, plan.scored, plan.weight)]
    return torch.func.vmap(total, in_dims=(1, 1, 1, 0))(*by_draw, rollout.keep.unflatten(0, (-1, EACH)))


class Updates:
    """The updates of a row on the rollouts of all draws, as the trainer makes them; each draw may have weights of its own."""

    def __init__(self, row: methods.Method, base: oracle.TabularDenoiser, rollout: alg.Rollout, reward: Tensor, seed: int):
        self.row, self.base, self.rollout, self.reward, self.seed = row, base, rollout, reward, seed
        self.draws = len(reward) // EACH
        self.table = base.table.detach().repeat(self.draws, 1, 1, 1)
        self.old = None  # the old value on masks of its own, for all updates
        if row.refresh == "independent":
            own = methods.draw(row, rollout, keyed_generator(seed, 0, "plan of the old value"))
            self.old = methods.reduced(row, own, rollout, scored(row, base, rollout, own))

    def direction(self, update: int, updates: int) -> Tensor:
        """g (D, P): minus the gradient of the row's loss at the present weights."""
        row, rollout = self.row, self.rollout
        plan = draw_plan(row, rollout, self.seed, 0 if row.refresh == "fixed" else update, updates)
        anchor = ref = None
        if row.anchor == "behaviour":
            anchor = methods.behaviour_anchor(row, plan, rollout)
        elif row.anchor == "old":
            anchor = self.old
            if anchor is None:
                anchor = methods.reduced(row, plan, rollout, scored(row, self.base, rollout, plan))
        if row.kl and row.kl.target == "reference":  # which is the base, too
            ref = methods.kl_target(row, plan, rollout, scored(row, self.base, rollout, plan))
        table = self.table.requires_grad_()
        how = {"temperature": 1.0, "names": row.features, "size": plan.valid.numel(), "graph": True}
        feature = feat.features(Tables(table), rollout, plan, **how)
        loss = losses(row, plan, rollout, feature, advantages(row, plan, rollout, self.reward), anchor, ref)
        self.table = table.detach()
        return -torch.autograd.grad(loss.sum(), table)[0].flatten(1)


# ================================================================================================== against the truth


@dataclass(frozen=True)
class Sums:
    """What the estimates need of some of the draws of g and G: how many, the sums, and the sums of the products."""

    n: Tensor
    g: Tensor
    truth: Tensor
    products: Tensor  # of g and g, g and G, G and G

    @classmethod
    def by_part(cls, g: Tensor, truth: Tensor) -> Sums:
        """Of each of PARTS parts of the draws (D, P); D is a multiple of PARTS."""
        each = len(g) // PARTS
        products = torch.stack([(g * g).sum(1), (g * truth).sum(1), (truth * truth).sum(1)], 1)
        g, truth, products = (x.unflatten(0, (PARTS, -1)).sum(1) for x in (g, truth, products))
        return cls(torch.full((PARTS,), float(each)), g, truth, products)

    def over(self, parts: Tensor) -> Sums:
        """Of the parts together."""
        return Sums(*(x[parts].sum(0) for x in vars(self).values()))


def against(draws: Sums) -> float:
    """Cosine of E g and E G. No product of a draw with itself enters the products of the means.

    The mean of <g_i, G_j> over i != j is <E g, E G> without bias, where |mean g|^2 is too large by tr Var g / D. Not a number
    where the mean of g cannot be told from 0.
    """
    total = torch.stack([draws.g @ draws.g, draws.g @ draws.truth, draws.truth @ draws.truth])
    gg, both, exact = ((total - draws.products) / (draws.n * (draws.n - 1))).tolist()
    if not min(gg, exact) > 1e-30:
        return math.nan
    return both / math.sqrt(gg * exact)


def with_error(g: Tensor, truth: Tensor) -> dict[str, float]:
    """The cosine, and its Monte Carlo error: the jackknife over parts of the draws."""
    sums, every = Sums.by_part(g, truth), torch.arange(PARTS)
    without = [against(sums.over(every[every != i])) for i in range(PARTS)]
    mean = statistics.fmean(without)
    error = math.sqrt((PARTS - 1) / PARTS * sum((x - mean) ** 2 for x in without))
    return {"cosine": against(sums.over(every)), "error": error}


def control_direction(number: int) -> tuple[Tensor, Tensor]:
    """An order of the P weights, and a sign for each: reinforce in other weights is as noisy, and points elsewhere."""
    size, noise = (TOKENS + 1) ** LENGTH * LENGTH * TOKENS, keyed_generator(number, 0, "control")
    return torch.randperm(size, generator=noise), 2.0 * torch.randint(2, (size,), generator=noise) - 1


def measure(name: str, order: str, number: int, data: tuple, truth: Truth) -> dict:
    """The cosine of a row's first update on one table."""
    base, rollout, reward = data
    run = Updates(method_of(name), base, rollout, reward, keyed_seed(number, 0, f"{name} {order}"))
    place, sign = control_direction(number) if name == CONTROL else (slice(None), 1.0)
    exact = truth.gradient(run.table[:1])[1]
    g = sign * run.direction(0, UPDATES)[:, place]
    return with_error(g, exact.expand_as(g))


def checked_truth(model: oracle.TabularDenoiser, order: str, block_length: int) -> Truth:
    """The fast truth, once it has agreed with the judge on this table."""
    truth = Truth(order, block_length)
    exact = oracle.policy_gradient(model, order, 1.0, 1, accepted_text, block_length, END)
    torch.testing.assert_close(truth.gradient(model.table[None])[1][0], exact.flatten(), rtol=1e-9, atol=1e-12)
    return truth


def one_table(number: int, names: Iterable[str], draws: int, check: bool = True) -> dict[str, dict]:
    """All rows on one table: {"name, order": what `measure` finds}."""
    model, data, truths, found = base_table(number), {}, {}, {}
    for name in names:
        for order in orders_of(name):
            kind = (order, block_of(name))
            if kind not in data:
                rollout = collect(model, *kind, draws, number)
                data[kind] = model, rollout, accepted(rollout.response)
                truths[kind] = checked_truth(model, *kind) if check else Truth(*kind)
            found[key_of(name, order)] = measure(name, order, number, data[kind], truths[kind])
    return found


# ================================================================================================== runs and rehearsal


def rounded(value):
    """Five digits are more than the draws support; a number that is none becomes null."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    return float(f"{value:.5g}") if math.isfinite(value) else None


def settings(draws: int) -> dict:
    """What the stored numbers depend on, beside the code."""
    sizes = {"positions": LENGTH, "tokens": TOKENS, "block": BLOCK, "prompts": PROMPTS, "generations": GENERATIONS}
    return sizes | {"updates": UPDATES, "draws": draws}


def names() -> list[str]:
    """All rows, and the control."""
    return [*methods.METHODS, CONTROL]


def run(count: int, draws: int, path: Path) -> dict:
    """All rows on ``count`` tables; what is in the file is not repeated."""
    done = json.loads(path.read_text()) if path.exists() else {"settings": settings(draws), "seconds": {}, "tables": {}}
    if done["settings"] != settings(draws):
        raise SystemExit(f"{path.name}: got results of {done['settings']}; allowed those of {settings(draws)}, or no file")
    for number in range(count):
        table = done["tables"].setdefault(str(number), {})
        missing = [name for name in names() if any(key_of(name, order) not in table for order in orders_of(name))]
        if missing:
            started = time.process_time()
            table |= rounded(one_table(number, missing, draws))
            seconds = time.process_time() - started
            done["seconds"][str(number)] = round(done["seconds"].get(str(number), 0) + seconds, 1)
            path.write_text(json.dumps(done, indent=1) + "\n")
            print(f"table {number}: {len(missing)} rows, {seconds:.0f} s of CPU time", flush=True)
    return done


def rehearsal(draws: int = 24) -> dict[str, dict]:
    """A few draws of one table: every row is measured, none well."""
    return one_table(0, names(), draws, check=False)


# ============================================================================================ what was stored


def cosines(tables: list[dict], name: str, order: str) -> list[float | None]:
    """Table by table; None where the draws do not settle it: a mean update that is all but 0."""
    found = [table[key_of(name, order)] for table in tables]
    settled = [row["error"] is not None and row["error"] < SETTLED for row in found]
    return [row["cosine"] if good else None for row, good in zip(found, settled, strict=True)]


def line(tables: list[dict], name: str, order: str) -> dict:
    """The mean cosine of a method by one sampler, with Student's 95 % interval over the tables."""
    found = cosines(tables, name, order)
    none = f"none in {found.count(None)}"
    shown = none if None in found else "{:.2f} [{:.2f}, {:.2f}]".format(*stats.mean_interval(found))
    return {"method": name, "order": order, "cosine": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--rehearse", action="store_true", help="few draws of one table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rehearse:
        found = rehearsal()
        for key, row in found.items():
            print(f"{key}: {row['cosine']:.2f} +- {row['error']:.2f}")
        return
    tables = list(run(TABLES, DRAWS, RESULTS)["tables"].values())
    print(markdown(pd.DataFrame(line(tables, name, order) for name in names() for order in orders_of(name))))


if __name__ == "__main__":
    main()
