"""Rows of the table in words: the map of all methods, and a card for each.

Nothing here is said of one method by name. A card is put together from the row's components: their
docstrings, where they stand (index.py), and what the trainer does with such a row.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from minidrl import algorithms as alg
from minidrl.algorithms import Rollout
from minidrl.methods import KL, METHODS, Method, numbers
from minidrl.run import index
from minidrl.run.tables import markdown_table
from minidrl.sampler import COMPLETIONS

# --------------------------------------------------------------------------------------- 1. The map

METHOD_COLUMNS = (
    "method",
    "likelihood",
    "ratio",
    "anchor",
    "masks",
    "temperature",
    "objective",
    "advantage",
    "aggregation",
    "KL",
    "source",
)


def method_rows() -> list[dict[str, str]]:
    """The map: every row of ``METHODS`` in the words of its components."""
    return [
        {
            "method": m.name,
            "likelihood": _call(m.plan),
            "ratio": m.reduction
            + _unless("none", m.normalizer, " / ")
            + (" + order" if "order_logp" in m.features else "")
            + (", and of positions" if "position_logp" in m.features else ""),
            "anchor": m.anchor,
            "masks": m.refresh,
            "temperature": m.temperature,
            "objective": _call(m.objective) + (f" with {_call(m.extra)}" if m.extra else ""),
            "advantage": _call(m.credit) + _unless("none", m.step_value, " of completions, "),
            "aggregation": m.aggregation,
            "KL": _penalty(m.kl),
            "source": m.source,
            "title": m.title,
            "differs": m.differs,
            "records": ", ".join(m.needs),
        }
        for m in METHODS.values()
    ]


def _unless(usual: str, word: str, before: str) -> str:
    return "" if word == usual else before + word


def _penalty(kl: KL | None) -> str:
    if kl is None:
        return "none"
    return (
        f"{kl.form}, beta {kl.beta:g}"
        + _unless("ratio", kl.of, ", of ")
        + _unless("reference", kl.target, ", to ")
    )


def _call(component: Any) -> str:
    """partial(replay_plan, num_states=None) as "replay(num_states=None)"."""
    words = ", ".join(f"{key}={value}" for key, value in component.keywords.items())
    return component.func.__name__.removesuffix("_plan") + (f"({words})" if words else "")


def method_table(rows: Sequence[Mapping[str, str]]) -> str:
    """``method_rows`` as Markdown."""
    return markdown_table(rows, METHOD_COLUMNS)


# ------------------------------------------------------------------------------- 2. Fields of a row

_TOLD = ("name", "family", "title", "source", "differs")  # prose; the rest of a row is what it does


def fields(method: Method) -> dict[str, Any]:
    """What a row does, flat: {"plan": "quadrature_plan", "plan.num_nodes": 3, .., "kl.beta": 0.04}.

    A component is the name of its function, and its keywords are fields of their own; so are those
    of a KL term. Two rows with the same fields are the same method.
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(Method):
        name, value = field.name, getattr(method, field.name)
        if name in _TOLD:
            continue
        if isinstance(value, partial):
            flat[name] = value.func.__name__
            flat |= {f"{name}.{key}": word for key, word in value.keywords.items()}
        elif isinstance(value, KL):
            flat |= {f"{name}.{key}": word for key, word in value._asdict().items()}
        else:
            flat[name] = value
    return flat


def settings(method: Method) -> dict[str, Any]:
    """The numbers and words of a row, each under its key in ``--method_options``."""
    options = numbers(method)
    known = fields(method).items()
    return {key: value for key, value in known if key in options or key.startswith("kl.")}


def differences(method: Method, other: Method) -> dict[str, tuple[Any, Any]]:
    """{field: (what ``method`` has there, what ``other`` has)} where the two differ.

    Where the functions of a component differ, it is one field, with its keywords in the words.
    """
    found = {}
    for field in dataclasses.fields(Method):
        if field.name in _TOLD:
            continue
        mine, theirs = getattr(method, field.name), getattr(other, field.name)
        found |= _differences(field.name, mine, theirs)
    return found


def _differences(name: str, mine: Any, theirs: Any) -> dict[str, tuple[Any, Any]]:
    mine_words, their_words = _words(mine), _words(theirs)
    if _kind(mine) != _kind(theirs) or mine_words.keys() != their_words.keys():
        return {name: (mine, theirs)}
    keys = [key for key in mine_words if mine_words[key] != their_words[key]]
    return {f"{name}.{key}" if key else name: (mine_words[key], their_words[key]) for key in keys}


def _kind(value: Any) -> Any:
    return value.func if isinstance(value, partial) else type(value)


def _words(value: Any) -> dict[str, Any]:
    if isinstance(value, partial):
        return value.keywords
    return value._asdict() if isinstance(value, KL) else {"": value}


def nearest(method: Method) -> tuple[Method, dict[str, tuple[Any, Any]]]:
    """The row with the fewest fields that differ, and these; of several, the most alike by name."""
    mine = fields(method)

    def distance(other: Method) -> tuple[int, float]:
        theirs, absent = fields(other), object()
        keys = [k for k in mine | theirs if mine.get(k, absent) != theirs.get(k, absent)]
        words = [f"{m.name} {m.title} {m.source}" for m in (method, other)]
        return len(keys), -difflib.SequenceMatcher(None, *words).ratio()

    others = [other for other in METHODS.values() if other.name != method.name]
    best = min(others, key=distance)
    return best, differences(method, best)


# ------------------------------------------------------------------------ 3. What it says of itself


def first_sentence(function: Callable) -> str:
    """The first sentence of a docstring, without its tag."""
    text = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return index.TAG.sub("", index.sentence(text), count=1)


def choice(function: Callable, word: str) -> str:
    """What a docstring says of a word that it explains on a line of its own."""
    lines = (inspect.getdoc(function) or "").splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(rf"{re.escape(word)}\s{{2,}}\S", line)]
    if not starts:
        return ""
    first = starts[0]
    text = [lines[first][len(word) :]]
    for line in lines[first + 1 :]:
        if not re.match(r"\s{4,}\S", line):
            break
        text.append(line)
    text = [re.sub(r"\s{2,}(?!=)", "; ", re.sub(r"\s+=", " =", part.strip())) for part in text]
    return " ".join(text)


def _formulas(method: Method) -> list[tuple[str, Callable, str]]:
    """(part, function, what it is here) along the way from masked states to the loss."""
    words = [word for word in method.plan.keywords.values() if isinstance(word, str)]
    told = [f"{word}: {choice(method.plan.func, word)}" for word in words]
    told = [first_sentence(method.plan.func), *(text for text in told if not text.endswith(": "))]
    steps = [("plan", method.plan.func, " ".join(told))]
    told = choice(alg.reduce_logp, method.reduction)
    steps.append(("reduction", alg.reduce_logp, f"{method.reduction}: {told}"))
    if "order_logp" in method.features:
        steps.insert(1, ("order", alg.order_logp, first_sentence(alg.order_logp)))
    if "position_logp" in method.features:
        steps.insert(1, ("position", alg.position_logp, first_sentence(alg.position_logp)))
    if method.anchor != "none":
        steps.append(("ratio", alg.log_ratio, first_sentence(alg.log_ratio)))
    parts = {"credit": method.credit, "extra": method.extra, "objective": method.objective}
    steps += [(k, part.func, first_sentence(part.func)) for k, part in parts.items() if part]
    if method.kl:
        exact = method.kl.form == "exact"
        function = alg.token_features if exact else alg.kl_term
        word = "kl_ref" if exact else method.kl.form
        steps.append(("KL", function, f"{word}: {choice(function, word)}"))
    told = choice(alg.aggregate, method.aggregation)
    steps.append(("aggregation", alg.aggregate, f"{method.aggregation}: {told}"))
    return [*steps, ("loss", alg.total_loss, first_sentence(alg.total_loss))]


# What the words of a row mean, where no function stands for them.
ANCHORS = {
    "behaviour": "the sampler's own log-probabilities",
    "old": "the weights before the first update",
    "none": "nothing: no ratio",
}
REFRESH = {
    "fixed": "one plan for all updates on a rollout",
    "paired": "a new plan an update; the old weights score the same one",
    "independent": "a new plan an update; the old weights score one of their own",
    "scheduled": "as a schedule over the updates says; the old weights score the same ones",
}
ORDERS = {"any": "any order of the sampler"}
TEMPERATURES = {"one": "scored at temperature 1", "sampling": "scored at that of the sampler"}
NORMALIZERS = {
    "none": "",
    "kept_length": ", divided by the tokens that count",
    "padded_length": ", divided by the padded length",
}


def loss_in_words(method: Method) -> str:
    """The loss of a row as a sentence, from the names of its components."""
    what = "log-likelihood" if method.anchor == "none" else "ratio"
    order = " and the order" if "order_logp" in method.features else ""
    order += ", and apart from it of the positions," if "position_logp" in method.features else ""
    score = f", with {_name(method.extra)}" if method.extra else ""
    kl, against = method.kl, f" against {ANCHORS[method.anchor]}"
    target = {"reference": "the reference", "old": ANCHORS["old"]}
    parts = [
        f"{_name(method.objective)}{score}, on the {what} of each {method.reduction}"
        + ("" if method.anchor == "none" else against),
        f"log-likelihood{order} from the {_name(method.plan)} plan{NORMALIZERS[method.normalizer]}",
        f"advantage by {_name(method.credit)}"
        + _unless("none", method.step_value, " of one-step completions, "),
        f"plus {kl.beta:g} x {kl.form} KL to {target[kl.target]}" if kl else "no KL",
        f"summed by {method.aggregation}",
    ]
    return "; ".join(parts)


def _name(component: partial) -> str:
    return component.func.__name__.removesuffix("_plan").replace("_", " ")


# --------------------------------------------------------------------------------- 4. Network calls


def _drawn(method: Method, length: int, blocks: int) -> int:
    """Forwards of the row's plan on a made-up response of ``length`` tokens, one a step."""
    sampler = SimpleNamespace(
        num_steps=length, block_length=length // blocks, order="left_to_right", length=length
    )
    rows = 2
    ids, logp = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length)
    every_step = ids[:, None].expand(-1, length, -1)
    records = {"entropy": logp} | dict.fromkeys(COMPLETIONS, every_step)
    steps, prompt = torch.arange(length).expand(rows, -1), ids[:, :1]
    made = Rollout(prompt, prompt == 0, ids, ids == 0, steps, logp, rows, sampler, records)
    plan = method.plan(made, torch.Generator().manual_seed(0))
    return len(plan.valid) // plan.blocks


def states(method: Method) -> str:
    """K, the forwards of a plan: a number, or a share of the sampler's T steps or a block's."""
    found = [_drawn(method, 32, 4), _drawn(method, 64, 4), _drawn(method, 64, 8)]
    for symbol, sizes in (("", (1, 1, 1)), ("T", (32, 64, 64)), ("steps of a block", (8, 16, 8))):
        shares = {size / k for size, k in zip(sizes, found, strict=True)}
        if len(shares) == 1:
            share = shares.pop()
            if not symbol:
                return str(found[0])
            return symbol if share == 1 else f"{symbol}/{share:g}"
    return f"{found[0]} for T = 32 in 4 blocks"


def calls(method: Method) -> dict[str, dict[str, str]]:
    """Forwards a response costs at one update a rollout, and at n > 1, phase by phase.

    Of a response that never ends early; K of them a plan (``states``). As the trainer does it in
    two passes (``one_pass`` leaves pass 1 out): passes that it skips are 0; pass 2 leaves out
    states whose gradient is 0, so that K is the most.
    """
    return {"1 update": _calls(method, "1"), "n updates": _calls(method, "n")}


def _calls(method: Method, n: str) -> dict[str, str]:
    one, twice = n == "1", "kl_ref" in method.features
    own = method.anchor == "old" and method.refresh != "independent"
    others = "0" if one else "(n - 1) K"
    old = {"independent": "K", "paired": others, "scheduled": others}.get(method.refresh, "0")
    reference = method.kl is not None and method.kl.target == "reference"
    if method.linear:
        first = "0"
    elif method.on_record and not reference:
        first = "0" if one else "(n - 1) K"
    elif one and own and method.linear_on_policy:
        first = "0"
    else:
        first = _times(n, twice)
    compared = reference and method.kl.form != "exact"
    return {
        "rollout": "T",
        "old weights": old if method.anchor == "old" else "0",
        "pass 1": first,
        "reference": _times(n, False) if compared else "0",
        "pass 2": _times(n, twice),
    }


def _times(n: str, twice: bool) -> str:
    return " ".join(word for word in ("2" if twice else "", "" if n == "1" else n, "K") if word)


def count(term: str, *, T: int, K: int, n: int) -> int:
    """A term of ``calls`` as a number."""
    value = 1
    for factor in re.findall(r"\(n - 1\)|\w+", term):
        known = {"T": T, "K": K, "n": n, "(n - 1)": n - 1}
        value *= known[factor] if factor in known else int(factor)
    return value


# -------------------------------------------------------------------------------------- 5. The card


def card(name: str) -> dict[str, Any]:
    """Everything that can be said of a row, as plain data."""
    at = index.row_place(name)
    method = METHODS[name]
    other, found = nearest(method)
    entries = index.functions(index.entries(only=("algorithms.py",)))
    chain = []
    for part, function, says in _formulas(method):
        entry = entries[function.__name__]
        told = {"part": part, "tag": entry.tag, "function": entry.name, "at": entry.place}
        chain.append(told | {"says": says})
    return {
        "method": method.name,
        "title": method.title,
        "source": method.source,
        "at": at,
        "differs": method.differs,
        "loss": loss_in_words(method),
        "formulas": chain,
        "anchor": ANCHORS[method.anchor],
        "masks": REFRESH[method.refresh],
        "temperature": TEMPERATURES[method.temperature],
        "order": ORDERS.get(method.order, f"{method.order}, and no other"),
        "settings": {key: _plain(value) for key, value in settings(method).items()},
        "states": states(method),
        "calls": calls(method),
        "records": ["entropy", *(need for need in method.needs if need != "entropy")],
        "as": other.name,
        "except": {key: [_plain(mine), _plain(its)] for key, (mine, its) in found.items()},
    }


def _plain(value: Any) -> Any:
    """Of a component its name and keywords in words; a number stays a number."""
    if isinstance(value, partial):
        words = ", ".join(f"{key}={word}" for key, word in value.keywords.items())
        return value.func.__name__ + (f"({words})" if words else "")
    if isinstance(value, KL):
        return _penalty(value)
    if value == float("inf"):
        return ".inf"  # as YAML has it
    return list(value) if isinstance(value, tuple) else value


def _say(value: Any) -> str:
    if isinstance(value, list):
        return " + ".join(map(str, value))
    return "none" if value is None else str(value)


def card_text(told: Mapping[str, Any]) -> str:
    """``card`` in lines."""
    options = {k: "null" if v is None else _say(v) for k, v in told["settings"].items()}
    changes = [f"{k} {_say(mine)} ({_say(its)})" for k, (mine, its) in told["except"].items()]
    parts = [
        ("source", f"{told['source']}; {told['at']}"),
        ("differs", told["differs"]),
        ("loss", told["loss"]),
        *((step["part"], _formula(step)) for step in told["formulas"]),
        ("anchor", told["anchor"]),
        ("masks", told["masks"]),
        ("temperature", told["temperature"]),
        ("order", told["order"]),
        ("settings", ", ".join(f"{key} {value}" for key, value in options.items()) or "none"),
        ("calls", f"forwards of a plan K = {told['states']}, steps of the sampler T"),
        *(("", f"{when}: {_sum(phases)}") for when, phases in told["calls"].items()),
        ("records", ", ".join(told["records"])),
        ("as", f"{told['as']} except {', '.join(changes) or 'nothing'}"),
    ]
    return "\n".join([f"{told['method']}: {told['title']}", *(_part(*part) for part in parts)])


def _part(name: str, text: str) -> str:
    """A part of a card, its lines below each other."""
    how = {"initial_indent": f"{name:<12} ", "subsequent_indent": " " * 13}
    whole = {"break_on_hyphens": False, "break_long_words": False}
    first, *rest = text.split("\n")
    lines = [textwrap.fill(first, 100, **how, **whole)]
    how["initial_indent"] = how["subsequent_indent"]
    return "\n".join([*lines, *(textwrap.fill(line, 100, **how, **whole) for line in rest)])


def _formula(step: Mapping[str, str]) -> str:
    tag = f"({step['tag']}) " if step["tag"] else ""
    return f"{tag}{step['function']}, {step['at']}\n{step['says']}"


def _sum(phases: Mapping[str, str]) -> str:
    shown = [
        f"{phase} {'skipped' if term == '0' else term}"
        for phase, term in phases.items()
        if term != "0" or phase == "pass 1"
    ]
    return f"{', '.join(shown)}; in all {total(phases)}"


def total(phases: Mapping[str, str]) -> str:
    """The sum of the terms of ``calls``."""
    first, second = (sum(count(term, T=0, K=1, n=n) for term in phases.values()) for n in (1, 2))
    slope, rest = second - first, 2 * first - second
    per = f"{'' if slope == 1 else slope} n".strip()
    if not slope:
        factor = "" if rest == 1 else f"{rest} "
    else:
        sign = "+" if rest > 0 else "-"
        factor = f"({per} {sign} {abs(rest)}) " if rest else f"{per} "
    return f"T + {factor}K"
