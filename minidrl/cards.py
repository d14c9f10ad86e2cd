"""The map of the methods: every row of the table in the words of its components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minidrl.methods import KL, METHODS
from minidrl.tables import markdown_table

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
)


METHOD_COLUMNS += ("KL", "source")


def method_rows() -> list[dict[str, str]]:
    """The map: every row of ``METHODS`` in the words of its components."""
    return [
        {
            "method": m.name,
            "likelihood": _call(m.plan),
            "ratio": m.reduction
            + _unless("none", m.normalizer, " / ")
            + (" + order" if "order_logp" in m.features else ""),
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
