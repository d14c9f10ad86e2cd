"""What every notebook uses: `check`, `check_le` and `check_rows` judge equations, `exercises` the reader's answers, `solution`
stands in for code that he has not written, `show` prints shipped source, `mean_interval` says how sure a mean is, `table`,
`draw_plan` and `draw_cube` display rows, plans and all masked states of a text, `style` sets plots.

A check prints both sides, to five digits of the larger, and never the residual: that differs between machines. The stored
outputs can therefore be compared literally.
"""

import ast
import inspect
import itertools
import json
import math
import runpy
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from IPython.display import Markdown, display
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from answers import ANSWERS
from minidrl.algorithms import Plan

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA5599", "#666666"
MOST = 4  # elements of a tensor that a check prints
WIDE = 110  # columns of a check's line: a longer one is broken in two, and the page does not wrap it
CELLS = {"visible": "white", "hidden only": "#cccccc", "hidden and scored": BLUE}  # of a plan's picture


def check(tag: str, a: Any, b: Any, atol: float = 1e-10, *, names: str) -> None:
    """State that equation `tag` holds: max |a - b| <= atol; print both sides.

    names:   what a and b are, as "E[Z] = B"; then the line reads `(2.3)  E[Z] -8.3127   B -8.3127   ok`.
    Shapes:  a and b numbers, sequences or tensors of one shape; a plain number is compared with every element.
    Special: equal infinities agree; NaN agrees with nothing.
    Raises:  AssertionError with the residual; ValueError for unequal shapes, no elements, a bad atol, names that are not
             two, or one object on both sides.
    """
    a, b = _agreeing(tag, a, b, atol)
    print(_line(tag, names, a, b, atol, "="))


def check_le(tag: str, a: Any, b: Any, atol: float = 0.0, *, names: str) -> None:
    """State that inequality `tag` holds: a <= b + atol in every element; atol > 0 allows for rounding at equality.

    A gap is checked with the number on the left: check_le("2.3", 0.1, bias) says that the bias is at least 0.1.

    names:   what a and b are, as "bias <= bound".
    Shapes:  as for `check`.
    Raises:  AssertionError with the largest excess; ValueError for unequal shapes, no elements, a bad atol, or names that
             are not two.
    """
    a, b = _ordered(tag, a, b, atol)
    print(_line(tag, names, a, b, atol, "<="))


def check_rows(names: str, rows: Mapping[tuple[str, str], tuple], atol: float = 1e-10) -> None:
    """Alike statements as one table of values: {(tag, case): (a, b)}, each a number; the columns are named as in "E[Z] = B".

    A row (a, "<=", b) states a <= b + atol, as `check_le` does; a table with such a row prints the sign of each row. The last
    line says how many rows hold, which is all of them: one that does not raises.

    Raises: AssertionError with tag, case and residual, before anything is printed; ValueError as `check` does, and for a
            sign that is neither "=" nor "<=".
    """
    lines, signs = [("", "", *_two_names(names, "="))], [""]
    for (tag, case), sides in rows.items():
        a, sign, b = sides if len(sides) == 3 else (sides[0], "=", sides[1])
        if sign not in ("=", "<="):
            raise ValueError(f"({tag}), {case}: got the sign {sign!r}; allowed = and <=")
        a, b = (_agreeing if sign == "=" else _ordered)(f"{tag}, {case}", a, b, atol)
        if a.numel() != 1:
            raise ValueError(f"({tag}), {case}: got {a.numel()} numbers a side; allowed 1")
        sizes = zip((a, b), _sizes(a, b, sign), strict=True)
        lines.append((f"({tag})", case, *(_digits(side.item(), size, atol) for side, size in sizes)))
        signs.append(sign)
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    for (tag, case, a, b), sign in zip(lines, signs, strict=True):
        between = f"  {sign:2}  " if "<=" in signs else "  "
        print(f"{tag:{widths[0]}}  {case:{widths[1]}}  {a:>{widths[2]}}{between}{b:>{widths[3]}}")
    print(f"all {len(rows)} ok" if len(rows) > 1 else "ok")


def exercises(notebook: str, mine: Mapping[str, Any]) -> None:
    """Judge the reader's answers to the exercises of a notebook: one line each, open, right, or not yet with a hint.

    The hint is that of the mistake which leads to this number, where `answers.py` knows one. Neither the right value nor
    the distance from it is printed, and whatever an answer is, the others are judged.

    mine:   {exercise: number}, None where there is no answer yet; what `float` takes is a number, text is none.
    Raises: ValueError for a notebook without exercises.
    """
    if notebook not in ANSWERS:
        raise ValueError(f"notebook: got {notebook!r}; allowed {', '.join(ANSWERS)}")
    known, names = ANSWERS[notebook], ", ".join(f'"{name}"' for name in ANSWERS[notebook])
    if not isinstance(mine, Mapping):
        print(f"exercises: got a {type(mine).__name__}; write a dictionary with a number or None for each of {names}")
        return
    given = {str(name): value for name, value in mine.items()}
    for name, answer in known.items():
        number = _number(given.get(name))
        told = "open" if number is None else number if isinstance(number, str) else answer.said(number)
        print(f"exercise {name}: {told}")
    for name in given.keys() - known.keys():
        print(f"exercise {name}: there is none; this notebook has {names}")


def _number(given: Any) -> float | str | None:
    """An answer as a float, None where there is none, or what it is instead, in words."""
    if given is None:
        return None
    kind, ask = type(given).__name__, "write one number, as 0.5 or 3 / 4"
    if isinstance(given, str | bytes):
        return f"got text; {ask}, without quotes"
    try:
        given = given.item() if hasattr(given, "item") else given  # one number of numpy or torch
        if isinstance(given, bool):
            return f"got {given}; {ask}"
        number = float(given)
    except Exception:  # whatever it is, the answers after it are judged
        return f"got a value of type {kind}; {ask}"
    return number if math.isfinite(number) else f"got {number}; {ask}"


def solution(exercise: str, name: str) -> Callable:
    """A function of exercises/solutions: a lesson goes on with it where its reader has left a cell open."""
    return runpy.run_path(str(Path(__file__).parent / "exercises/solutions" / f"{exercise}.py"))[name]


def show(function: Callable) -> None:
    """Display the shipped source of a function or class as Markdown, comments kept, docstrings left out."""
    source = without_docstrings(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    display(Markdown(f"```python\n{source}\n```"))


def draw_plan(ax: Axes, plan: Plan, text: Sequence[str] = (), *, answer: int = 0, title: str = "") -> None:
    """Picture the states in which a plan looks at one response: a row a state, a column a position, prompt first.

    White cells are visible to the network, grey ones hidden, blue ones hidden and scored. At the right is the weight of the
    state, or "no call" where `plan.valid` is False. A black line ends the prompt. Of a staircase plan, thin lines end the
    blocks and orange ones the forwards. A replay plan is labelled with the steps of the trajectory, from 1.

    text:   the token of each position, shown where it is visible or scored; those of the response alone leave the prompt
            out of the picture; none draws the prompt, too, and no tokens.
    answer: which of the plan's B responses.
    Raises: ValueError for a text of another length.
    """
    kind = _kinds(plan, answer)
    prompt, length = kind.shape[1] - plan.scored.shape[-1], plan.scored.shape[-1]
    if len(text) not in (0, length, length + prompt):
        raise ValueError(f"text: got {len(text)} tokens; allowed {length} of the response, {length + prompt} with the prompt")
    if len(text) == length:
        kind, prompt = kind[:, prompt:], 0
    _cells(ax, kind, text)
    _rulers(ax, plan, prompt)
    for k, (weight, called) in enumerate(zip(plan.weight[:, answer], plan.valid[:, answer], strict=True)):
        ax.text(
            prompt + length + 0.3,
            k + 0.5,
            f"{weight:.2f}" if called else "no call",
            va="center",
            fontsize=8,
        )
    ax.text(prompt + length + 0.3, -0.1, "weight", va="bottom", fontsize=8)
    steps = range(1, len(kind) + 1) if plan.step is None else (plan.step[:, answer] + 1).tolist()
    ax.set_yticks([k + 0.5 for k in range(len(kind))], list(steps), fontsize=8)
    ax.set_xticks(sorted({prompt + 0.5, prompt + length - 0.5}), sorted({1, length}), fontsize=8)
    ax.set(
        xlabel="prompt | position" if prompt else "position",
        ylabel="state" if plan.step is None else "state before step",
    )
    ax.set_title(title, fontsize=9, loc="left")
    # One legend for all plans of a figure, with the kinds of cells that occur in them.
    shown = {text.get_text() for legend in ax.figure.legends for text in legend.get_texts()}
    shown |= {name for i, name in enumerate(CELLS) if i in kind}
    for legend in [*ax.figure.legends]:
        legend.remove()
    keys = [Patch(fc=color, ec=GREY, label=name) for name, color in CELLS.items() if name in shown]
    ax.figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8)


def _kinds(plan: Plan, answer: int) -> torch.Tensor:
    """(K, T) of one response: 0 visible, 1 hidden, 2 hidden and scored."""
    kind = plan.hidden[:, answer].long()
    kind[:, kind.shape[1] - plan.scored.shape[-1] :] += plan.scored[:, answer]
    return kind


def _cells(ax: Axes, kind: torch.Tensor, text: Sequence[str]) -> None:
    """The coloured cells, and what is written in them."""
    colors = ListedColormap(list(CELLS.values()))
    ax.pcolormesh(kind, cmap=colors, vmin=0, vmax=2, edgecolors=GREY, linewidth=0.5, clip_on=False)
    for k, i in (kind != 1).nonzero().tolist() if text else ():
        color = "white" if kind[k, i] else "black"
        ax.text(i + 0.5, k + 0.5, text[i], color=color, ha="center", va="center", fontsize=8)
    ax.set_ylim(len(kind), 0)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def _rulers(ax: Axes, plan: Plan, prompt: int) -> None:
    """Where the prompt ends; of a staircase plan also where a block ends, and a forward."""
    if prompt:
        ax.axvline(prompt, color="black", lw=2)
    if plan.block_length is not None:
        for place in range(plan.block_length, plan.scored.shape[-1], plan.block_length):
            ax.axvline(prompt + place, color="black", lw=0.8)
        for state in range(plan.blocks, len(plan.scored), plan.blocks):
            ax.axhline(state, color=ORANGE, lw=2)


def draw_cube(ax: Axes, text: Sequence[str], *, order: Sequence[int] = (), looks: Sequence = (), title: str = "") -> None:
    """Picture the 2^L masked states of a short text: everything hidden on the left, nothing hidden on the right.

    A line reveals one token; a column, a level, has all states that hide l tokens. Cells are coloured as by `draw_plan`: white
    is visible, grey hidden, blue hidden and scored.

    order: positions as a sampler writes them; its path is drawn, and in each state the token that it writes next is scored.
    looks: sets of hidden positions at which an estimator looks and scores all that is hidden.
    """
    length = len(text)
    levels = [list(itertools.combinations(range(length), l)) for l in range(length + 1)]
    place = {frozenset(M): (length - l, (len(level) - 1) / 2 - k) for l, level in enumerate(levels) for k, M in enumerate(level)}
    path = [frozenset(order[k:]) for k in range(len(order) + 1)] if order else []
    scored = {M: M for M in map(frozenset, looks)} | {M: M - after for M, after in itertools.pairwise(path)}
    for before, after in ((M, M - {i}) for M in place for i in M):
        on = (before, after) in itertools.pairwise(path)
        ends = zip(place[before], place[after], strict=True)
        ax.plot(*ends, color=ORANGE if on else "#cccccc", lw=3 if on else 0.8, zorder=1)
    wide, high = 0.19, 0.34
    for M, (x, y) in place.items():
        for i, token in enumerate(text):
            color = BLUE if i in scored.get(M, ()) else "#cccccc" if i in M else "white"
            corner = (x + wide * (i - length / 2), y - high / 2)
            ax.add_patch(Rectangle(corner, wide, high, fc=color, ec=GREY, lw=0.6, zorder=2))
            if i not in M or color == BLUE:
                ink = "white" if color == BLUE else "black"
                ax.text(corner[0] + wide / 2, y, token, color=ink, ha="center", va="center_baseline", fontsize=8, zorder=3)
    tall = max(map(len, levels)) / 2
    ax.set(xlim=(-0.45, length + 0.45), ylim=(-tall, tall), yticks=[], xlabel="$l$, tokens that are hidden")
    ax.set_xticks(range(length + 1), range(length, -1, -1))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=9)


def bands(axes: Sequence[Axes], labels: Sequence[str], colors: Sequence[str]) -> list[float]:
    """Lines for a dot plot, from above: each with its label in its colour, tall enough for it, every other one on grey.

    Returns where on the y axis the middle of each line is. All axes have the same lines; the first has the labels.
    """
    tall = [1 + 0.75 * label.count("\n") for label in labels]
    ends = [sum(tall[:k]) for k in range(len(tall) + 1)]
    middles = [(top + end) / 2 for top, end in zip(ends, ends[1:], strict=False)]
    for ax in axes:
        for k in range(1, len(tall), 2):
            ax.axhspan(ends[k], ends[k + 1], color="0.95", lw=0)
        ax.set_ylim(ends[-1], 0)
        ax.grid(visible=False, axis="y")
    axes[0].set_yticks(middles, labels, fontsize=10)
    for tick, color in zip(axes[0].get_yticklabels(), colors, strict=True):
        tick.set_color(color)
    return middles


class Interval(NamedTuple):
    """A mean and the limits of its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean and Student's 95 % interval of what the values, taken as independent draws, estimate."""
    from scipy.stats import t

    mean, n = statistics.fmean(values), len(values)
    half = t.ppf(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Display rows with the same keys as a table; columns of numbers are aligned to the right."""

    def number(text: str) -> bool:
        try:
            return math.isfinite(float(text.split(" [")[0]))
        except ValueError:
            return False

    columns = [[name, *(str(row[name]) for row in rows)] for name in rows[0]]
    lines = [[] for _ in range(len(rows) + 2)]
    for column in columns:
        right, width = all(map(number, column[1:])), max(3, *map(len, column))
        cells = [text.rjust(width) if right else text.ljust(width) for text in column]
        cells.insert(1, "-" * (width - 1) + (":" if right else "-"))
        for line, cell in zip(lines, cells, strict=True):
            line.append(cell)
    display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines)))


def lines_of(notebook: str, *names: str) -> str:
    """The top-level lines of a notebook beside this file that define these names, in its order: code that two notebooks share.

    Raises: ValueError for a name that the notebook does not define at the top level of a cell.
    """
    cells = json.loads((Path(__file__).parent / notebook).read_text(encoding="utf-8"))["cells"]
    parts, left = [], set(names)
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        for node in ast.parse(source).body:
            if wanted := _defined(node) & set(names):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                parts.append("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
                left -= wanted
    if left:
        raise ValueError(f"names: got {', '.join(sorted(left))}; allowed what {notebook} defines")
    return "\n".join(parts)


def _defined(node: ast.stmt) -> set[str]:
    """The names that a definition or an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    names = [name for name in ast.walk(node) if isinstance(name, ast.Name)] if isinstance(node, ast.Assign) else []
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


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


def _agreeing(tag: str, a: Any, b: Any, atol: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides, if they agree."""
    if a is b and not isinstance(a, int | float):
        raise ValueError(f"({tag}): got one object on both sides; allowed two that were computed apart")
    a, b = _pair(tag, a, b, atol)
    residual = torch.where(a == b, torch.zeros_like(a), (a - b).abs())  # inf - inf is NaN although they agree
    worst = residual.max().item()  # NaN if any element is NaN
    if not worst <= atol:
        raise AssertionError(f"({tag}) fails: max |a-b| = {worst:.3e} > {atol:g}")
    return a, b


def _ordered(tag: str, a: Any, b: Any, atol: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides, if the left is at most the right."""
    a, b = _pair(tag, a, b, atol)
    if not bool((a <= b + atol).all()):
        raise AssertionError(f"({tag}) fails: max (a-b) = {(a - b).max().item():.3e} > {atol:g}")
    return a, b


def _line(tag: str, names: str, a: torch.Tensor, b: torch.Tensor, atol: float, sign: str) -> str:
    """Both sides with their names."""
    sizes = _sizes(a, b, sign)
    left, right = _two_names(names, sign)
    between = "   " if sign == "=" else f"   {sign}   "
    one = f"({tag})  {left} {_values(a, sizes[0], atol)}"
    other = f"{right} {_values(b, sizes[1], atol)}   ok"
    if len(one + between + other) > WIDE:
        between = "\n" + " " * len(f"({tag})") + (between[1:] if sign != "=" else "  ")
    return one + between + other


def _sizes(a: torch.Tensor, b: torch.Tensor, sign: str) -> list[float]:
    """What the digits of both sides go by: the larger side where they are equal, each its own where they are not."""
    sizes = [max((abs(x) for x in side.flatten().tolist() if math.isfinite(x)), default=0.0) for side in (a, b)]
    return [max(sizes)] * 2 if sign == "=" else sizes


def _two_names(names: str, sign: str) -> list[str]:
    """What stands on both sides of a check."""
    sides = [name.strip() for name in names.split(f" {sign} ")]
    if len(sides) != 2 or not all(sides):
        raise ValueError(f"names: got {names!r}; allowed 'one {sign} another'")
    return sides


def _values(x: torch.Tensor, size: float, atol: float) -> str:
    """A number, or the first MOST of several and how many there are."""
    flat = x.flatten()
    if bool((flat == flat[0]).all()):
        return _digits(flat[0].item(), size, atol)
    shown = ", ".join(_digits(value, size, atol) for value in flat[:MOST].tolist())
    return f"[{shown}, ... {len(flat)} values]" if len(flat) > MOST else f"[{shown}]"


def _digits(value: float, size: float, atol: float) -> str:
    """Five digits of a number of the given size; what is below the tolerance, or is rounding in float64, is 0."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) <= max(atol, 1e-12):
        return "0"
    if size < 1e-4:
        return f"{value:.3e}"
    text = f"{value:,.{max(0, 4 - math.floor(math.log10(size)))}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


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
