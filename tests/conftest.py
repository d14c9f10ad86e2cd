"""Shape checking of the modules of equations and features under pytest, and the fixtures that all tests share."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import beartype
import pytest
import torch
from jaxtyping import AbstractArray, install_import_hook


def names_a_shape(hint: Any) -> bool:
    """True for a jaxtyping annotation, also inside `X | None`, `dict[str, X]` or `tuple[X, ...]`."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(names_a_shape(part) for part in get_args(hint))


def shapes_only(function: Callable) -> Callable:
    """beartype, restricted to annotations that name a shape.

    The other annotations are left to the function: a wrong string or number must reach the ValueError that the
    docstring promises, and an int where a float is annotated is welcome.
    """
    hints = function.__annotations__
    function.__annotations__ = {name: hint if names_a_shape(hint) else Any for name, hint in hints.items()}
    return beartype.beartype(function)


# The tensors of the tests are tiny: a second thread costs more to wake than it computes, many times more on a busy machine.
torch.set_num_threads(1)

# The hook acts at import, and pytest reads this file before any test module imports the package.
install_import_hook(["minidrl.algorithms", "minidrl.features", "minidrl.methods"], f"{__name__}.{shapes_only.__name__}")


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU generator with a fixed seed, new for each test: the only randomness a test may use."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def blank_curve(monkeypatch) -> None:
    """Runs write an empty picture: what is drawn has tests of its own, and takes longer than a tiny run."""
    from matplotlib.figure import Figure

    from minidrl.run import report

    monkeypatch.setattr(report, "draw_curve", lambda rows: Figure(figsize=(1, 1)))
