"""What every notebook uses: `check` and `check_le` judge an equation, `show` prints shipped source, `style` sets plots.

A cell prints the bound that was met, never the residual: rounding differs between machines, a verdict does not. The
stored outputs can therefore be compared literally.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import matplotlib
import torch
from IPython.display import Markdown, display

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA5599", "#666666"


def check(tag: str, a: Any, b: Any, atol: float = 1e-10) -> None:
    """State that equation `tag` holds: max |a - b| <= atol.

    Shapes:  a and b numbers, sequences or tensors of one shape; a plain number is compared with every element.
    Special: equal infinities agree; NaN agrees with nothing.
    Raises:  AssertionError with the residual; ValueError for unequal shapes, no elements, or a bad atol.
    """
    a, b = _pair(tag, a, b, atol)
    residual = torch.where(a == b, torch.zeros_like(a), (a - b).abs())  # inf - inf is NaN although they agree
    worst = residual.max().item()  # NaN if any element is NaN
    if not worst <= atol:
        raise AssertionError(f"({tag}) fails: max |a-b| = {worst:.3e} > {atol:g}")
    print(f"ok ({tag}): |a-b| <= {atol:g}")


def check_le(tag: str, a: Any, b: Any, atol: float = 0.0) -> None:
    """State that inequality `tag` holds: a <= b + atol in every element; atol > 0 allows for rounding at equality.

    A gap is checked with the number on the left: check_le("2.3", 0.1, bias) says that the bias is at least 0.1.

    Shapes:  as for `check`.
    Raises:  AssertionError with the largest excess; ValueError for unequal shapes, no elements, or a bad atol.
    """
    a, b = _pair(tag, a, b, atol)
    if not bool((a <= b + atol).all()):
        raise AssertionError(f"({tag}) fails: max (a-b) = {(a - b).max().item():.3e} > {atol:g}")
    print(f"ok ({tag}): a <= b" + (f" + {atol:g}" if atol else ""))


def show(function: Callable) -> None:
    """Display the shipped source of a function or class as Markdown, comments kept, docstrings left out."""
    source = without_docstrings(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    display(Markdown(f"```python\n{source}\n```"))


def without_docstrings(source: str) -> str:
    """`source` without its docstrings and the blank lines after them; all other lines as they are.

    A body that consists of a docstring only keeps it.
    """
    lines, drop = source.splitlines(), set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if ast.get_docstring(node) is None or len(node.body) == 1:
            continue
        end = node.body[0].end_lineno
        while end < len(lines) and not lines[end].strip():
            end += 1
        drop.update(range(node.body[0].lineno - 1, end))
    return "\n".join(line for number, line in enumerate(lines) if number not in drop)


def style() -> None:
    """Set small, quiet figures (about 400 x 250 pixels, PNG) for the rest of the notebook."""
    matplotlib.rcParams.update(
        {
            "figure.figsize": (4.0, 2.5),
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "axes.prop_cycle": matplotlib.cycler(color=[BLUE, ORANGE, GREEN, PURPLE, GREY]),
            "lines.linewidth": 1.6,
            "legend.frameon": False,
        }
    )


def _pair(tag: str, a: Any, b: Any, atol: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides in float64 and of one shape."""
    if not 0 <= atol < float("inf"):
        raise ValueError(f"atol: got {atol}; allowed are finite numbers >= 0")
    one_number = isinstance(a, int | float) or isinstance(b, int | float)
    a, b = (_tensor(side) for side in (a, b))
    if a.shape != b.shape and not one_number:
        raise ValueError(f"({tag}): shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    a, b = torch.broadcast_tensors(a, b)
    if a.numel() == 0:
        raise ValueError(f"({tag}): nothing to compare, shape {tuple(a.shape)}")
    return a, b


def _tensor(side: Any) -> torch.Tensor:
    """A float64 copy on the CPU; a list may hold numbers or tensors of one shape."""
    if isinstance(side, list | tuple):
        return torch.stack([_tensor(part) for part in side]) if side else torch.empty(0, dtype=torch.float64)
    side = side.detach() if isinstance(side, torch.Tensor) else side
    return torch.as_tensor(side, dtype=torch.float64, device="cpu")  # by default a Python float would become float32
