"""The task whose answer is a row of the table of methods: notebook 10."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from judge import Missed, fmt, task
from minidrl.algorithms import (
    elbo_count_plan,
    group_mean,
    truncated_is,
)
from minidrl.methods import Method

DRAWN = {
    "paired": "draws new ones for each update",
    "scheduled": "draws new ones for each update, told how far the updates have come",
    "independent": "lets old and new weights see different ones: the ratio is noise "
    "before the weights have moved",
}
WORDS = ("reduction", "normalizer", "anchor", "credit", "objective", "aggregation")


def right_row() -> Method:
    """What the words of the task say."""
    return Method(
        name="my_row",
        title="truncated weights on an ELBO",
        source="the exercise",
        differs="",
        plan=partial(elbo_count_plan, num_states=2, domain="keep", strata=True),
        anchor="old",
        reduction="sequence",
        normalizer="kept_length",
        credit=partial(group_mean),
        objective=partial(truncated_is, floor=0.0, cap=2.0),
        aggregation="sequence_mean",
    )


def loops(published: Any) -> Tensor:
    """The loss of the task, answer by answer; `published` is a laws.Formula."""
    total = 0.0
    for b in published.rows:
        old, new = (published.elbo(m, b) for m in (published.old, published.new))
        n = published.length[b]
        ratio = ((new - old) / n).exp().item()
        published.ratios.append((ratio, published.centred(b)))
        total = total - min(ratio, 2.0) * published.centred(b) * new / n
    return total / 8


@contextmanager
def alone(row: Method):
    """The table with this row and no other, and its formula among those of the laws."""
    import judged
    import laws

    table, laws.FORMULAS["my_row"] = judged.SHIPPED.METHODS, loops
    judged.SHIPPED.METHODS = {"my_row": replace(row, name="my_row")}
    try:
        yield laws, judged.SHIPPED
    finally:
        judged.SHIPPED.METHODS = table
        del laws.FORMULAS["my_row"]


def gradient(row: Method) -> Tensor:
    """Of the row's loss on two prompts with four answers each."""
    with alone(row) as (laws, alg):
        drawn, _, _, _, reward = laws.experience("my_row")
        rollout = alg.Rollout(**vars(drawn))
        plan = row.plan(rollout, laws.seeded(44))
        return laws.judged_gradient(alg, row, plan, rollout, reward)[0].flatten()


def _row_laws(answer: Callable) -> list[tuple[str, Callable]]:
    def in_the_table(name: str) -> Callable:
        def law(_: Any) -> None:
            if answer().refresh != "fixed":  # a law makes one update, on one plan
                raise ValueError("the formula has one plan for all updates")
            with alone(answer()) as (laws, alg):
                laws.LAWS[name](alg)

        return law

    return [
        (name, in_the_table(name))
        for name in ("law_methods", "law_methods_treat_prompts_apart")
    ]


my_row = task(
    "my_row", "10.1", "a row of METHODS", (), ("row method",), None, laws=_row_laws
)


def told(word: Any) -> str:
    """A word of a row as it is written there."""
    if isinstance(word, partial):
        given = [f"{key}={value!r}" for key, value in word.keywords.items()]
        return f"P({', '.join([word.func.__name__, *given])})"
    return repr(word)


@my_row.has("the masked states")
def _(answer: Callable) -> str:
    yours, right = answer().plan, right_row().plan
    if yours.func is not right.func or yours.keywords != right.keywords:
        raise Missed(
            f"the plan: yours {told(yours)}, expected {told(right)}. Two states in "
            "strata of the count form, over the tokens that count."
        )
    return told(yours)


@my_row.has("the same masks for all updates, before and after")
def _(answer: Callable) -> str:
    yours = answer().refresh
    if yours != "fixed":
        raise Missed(
            f"refresh: yours {yours!r}, expected 'fixed'. The masks of a rollout are "
            f"drawn once; {yours!r} {DRAWN[yours]}."
        )
    return "refresh 'fixed'"


@my_row.has("the gradient of the loss")
def _(answer: Callable) -> str:
    yours, right = answer(), right_row()
    truth = gradient(right)
    try:
        got = gradient(yours)
    except ValueError as error:
        raise Missed(f"two prompts with four answers: {error}") from error
    if torch.allclose(got, truth, atol=1e-9):
        return f"two prompts with four answers: norm {fmt(got.norm())}"
    cosine = (got @ truth / (got.norm() * truth.norm())).item()
    said = (
        f"two prompts with four answers, norm of the gradient: yours {fmt(got.norm())}"
    )
    said += f", expected {fmt(truth.norm())}; cosine {fmt(cosine)}. "
    extra = [key for key in ("extra", "kl") if getattr(yours, key) is not None]
    if extra:
        raise Missed(f"{said}The loss has no term for {' and '.join(extra)}.")
    differ = [
        key for key in WORDS if told(getattr(yours, key)) != told(getattr(right, key))
    ]
    for key in differ:
        try:
            mended = gradient(replace(yours, **{key: getattr(right, key)}))
        except ValueError:
            continue
        if torch.allclose(mended, truth, atol=1e-9):
            raise Missed(
                f"{said}The word that is off is {key}: {told(getattr(yours, key))}."
            )
    look_at = ", ".join(differ) or "those outside the table: temperature, features"
    raise Missed(said.rstrip(), f"Words to look at: {look_at}.")
