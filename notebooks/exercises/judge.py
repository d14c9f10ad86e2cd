"""Judges the answers to the exercises: `examine("count_form")` in a notebook.

An answer is a function of tensors. It is judged twice.

By its properties    small examples that can be computed by hand. A property that is
                     missed prints one line: which one, on which example, what the
                     answer returned and what it should be.
By the laws          those of tests/laws/ that judge the equation in question. The
                     answer stands in the module where the shipped function stood,
                     rows of the table included, as a mutant does in the tests.

Nothing that an answer does stops the notebook: a missing function, `None`, a wrong
shape or dtype, an exception end in one line.
"""

import contextlib
import functools
import io
import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minidrl.methods import Method

HERE = Path(__file__).resolve().parent
CLONES = [up / "tests" for up in HERE.parents if (up / "tests/laws").is_dir()]
KINDS = {"bool": torch.bool, "int": torch.int64}


class Missed(Exception):
    """A property that the answer lacks, in one line.

    advice: the end of this line where it is not known to fit: what is to be done if
            this property is the first that is missed. One mistake misses several
            properties, and the advice of the later ones is about others.
    """

    def __init__(self, line: str, advice: str = "") -> None:
        super().__init__(f"{line} {advice}".rstrip())
        self.line = line


class Unusable(Exception):
    """The answer cannot be judged: its error, shape or dtype, in one line."""


class Open(Exception):
    """There is no answer yet."""


@dataclass(frozen=True)
class Tensors:
    """A name, a kind and a shape, from "masked bool K B L".

    The kinds are bool, int, float, number and method.

    A capital letter is a size that all tensors of a task share; what is returned may
    have sums of them, as in P+2L. "..." is any shape. The shape of a number says which
    size it is.
    """

    name: str
    kind: str
    shape: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> "Tensors":
        name, kind, *shape = text.split()
        return cls(name, kind, tuple(shape))

    def letters(self) -> str:
        """(K, B, L)"""
        return f"({', '.join(self.shape)}{',' * (len(self.shape) == 1)})"


Adapter = Callable[[ModuleType, Callable], Callable]
Property = tuple[str, Callable[[Callable], str | None]]


@dataclass(frozen=True)
class Task:
    """What an answer takes and returns, and what judges it.

    name       of the function that the reader writes
    tag        of the equation
    place      the function of the module in whose place it is judged
    takes      its arguments, as text for `Tensors`
    returns    what it returns; one text: a tensor, more: a tuple
    adapter    makes of the module and the answer a function called as `place` is
    laws       named laws of the answer, where they are not those of the tag
    """

    name: str
    tag: str
    place: str
    takes: tuple[str, ...]
    returns: tuple[str, ...]
    adapter: Adapter | None
    laws: Callable | None = None
    properties: list[Property] = field(default_factory=list)

    def has(self, title: str) -> Callable:
        """Register an example: a function that raises `Missed`, or returns what an
        `ok` line says."""

        def register(check: Callable) -> Callable:
            self.properties.append((title, check))
            return check

        return register


TASKS: dict[str, Task] = {}


def task(*given: Any, **more: Any) -> Task:
    """A new task under its name."""
    new = Task(*given, **more)
    TASKS[new.name] = new
    return new


# ------------------------------------------------------------------- asking an answer


def asked(task: Task, function: Callable) -> Callable:
    """The answer, refused in one line where it does not return what the task says."""

    @functools.wraps(function)
    def ask(*given: Any) -> Any:
        before = [x.detach().clone() if torch.is_tensor(x) else x for x in given]
        try:
            found = function(*given)
        except (Exception, SystemExit) as error:
            if type(error).__module__ == "torch.utils.checkpoint":
                raise  # how torch ends a recomputation; no error
            told = sizes(task, given)
            told = raised(function, error) + (f", given {told}" if told else "")
            raise Unusable(told) from error
        if found is None:
            raise Open(f"{task.name} returns nothing yet")
        for told, was, now in zip(task.takes, before, given, strict=True):
            if torch.is_tensor(now) and not torch.equal(was, now):
                name = Tensors.read(told).name
                raise Unusable(f"{name} has changed: work on a copy, not in place")
        return checked(task, found, given)

    return ask


def raised(function: Callable, error: BaseException) -> str:
    """What the answer raised, and in which of its lines."""
    trace, code = error.__traceback__, getattr(function, "__code__", None)
    said = " ".join(str(error).split())
    text = f"raised {type(error).__name__}" + (f": {said[:160]}" if said else "")
    while trace is not None:
        own = trace.tb_frame.f_code
        if code is not None and own.co_filename == code.co_filename:
            line = linecache.getline(own.co_filename, trace.tb_lineno).strip()
            text += f" in `{line}`" if line and "` in" not in text else ""
        trace = trace.tb_next
    return text


def sizes(task: Task, given: tuple) -> str:
    """The arguments' names with their shapes or values."""
    names = [Tensors.read(told).name for told in task.takes]
    told = [tuple(x.shape) if torch.is_tensor(x) else x for x in given]
    return ", ".join(f"{name} {x}" for name, x in zip(names, told, strict=False))


def checked(task: Task, found: Any, given: tuple) -> Any:
    """What was returned, if it has the shapes and dtypes of the task."""
    bound, floats = measured(task, given)
    wanted = [Tensors.read(text) for text in task.returns]
    several = len(wanted) > 1
    names = ", ".join(one.name for one in wanted)
    if several and not (isinstance(found, tuple | list) and len(found) == len(wanted)):
        got = (
            f"{len(found)} values"
            if isinstance(found, tuple | list)
            else kind_of(found)
        )
        raise Unusable(f"it returned {got}; return {len(wanted)}: {names}")
    for one, x in zip(wanted, found if several else (found,), strict=True):
        if one.kind == "method":
            refuse_other(one, x)
            continue
        refuse_kind(one, x, floats)
        shape = bound[...] if one.shape == ("...",) else sized(one.shape, bound)
        if tuple(x.shape) != shape:
            told = f"{one.name} has the shape {tuple(x.shape)}; it must be "
            told += f"{one.letters()} = " if "..." not in one.shape else ""
            raise Unusable(f"{told}{shape}, given {sizes(task, given)}")
    return found


def measured(task: Task, given: tuple) -> tuple[dict, torch.dtype]:
    """The sizes behind the letters, and the dtype of the first argument of floats."""
    bound, floats = {}, []
    for told, x in zip(map(Tensors.read, task.takes), given, strict=False):
        if told.kind == "number":
            bound |= {letter: x for letter in told.shape}  # a number that is a size
            continue
        floats += [x.dtype] if x.is_floating_point() else []
        if told.shape == ("...",):
            bound[...] = tuple(x.shape)
        else:
            bound |= dict(zip(told.shape, x.shape, strict=True))
    return bound, floats[0] if floats else torch.float64


def sized(shape: tuple[str, ...], bound: dict) -> tuple[int, ...]:
    """P+2L in numbers."""
    terms = [re.findall(r"(\d*)(\w)", size) for size in shape]
    return tuple(sum(int(n or 1) * bound[x] for n, x in term) for term in terms)


def kind_of(x: Any) -> str:
    """How a message names a value."""
    return f"one {type(x).__name__}" if not torch.is_tensor(x) else "one tensor"


def refuse_kind(one: Tensors, x: Any, floats: torch.dtype) -> None:
    """A tensor of the dtype that is due, or one line."""
    if not torch.is_tensor(x):
        raise Unusable(
            f"{one.name} is of type {type(x).__name__}; it must be a torch.Tensor"
        )
    due = KINDS.get(one.kind, floats)
    if x.dtype == due:
        return
    hint = ""
    if one.kind == "bool":
        hint = ": a mask is a comparison, not numbers"
    if one.kind == "float" and not x.is_complex():
        hint = (
            ", as the arguments are: a quotient of integers is float32, see .double()"
        )
    raise Unusable(f"{one.name} is {short(x.dtype)}; it must be {short(due)}{hint}")


def refuse_other(one: Tensors, x: Any) -> None:
    """A row of the table of methods, or one line."""
    if not isinstance(x, Method):
        said = f"{one.name} is of type {type(x).__name__}; "
        said += "it must be a minidrl.methods.Method"
        raise Unusable(f"{said}: return Method(name=.., ..)")


def short(dtype: torch.dtype) -> str:
    """bool for torch.bool."""
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------ words for messages


def fmt(x: Any) -> str:
    """Numbers to four digits; a mask as zeros and ones, a row after the other."""
    if torch.is_tensor(x):
        x = x.detach()
        if x.dtype == torch.bool:
            rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
            return " ".join("".join(str(int(v)) for v in row) for row in rows.tolist())
        x = x.tolist()
    if isinstance(x, list | tuple):
        return " ".join(fmt(v) for v in x)
    if isinstance(x, float):
        return f"{x:.4g}" if abs(x) >= 1e-9 else "0"
    return str(x)


def same(got: Tensor, expected: Any, atol: float = 1e-6) -> bool:
    """Equal numbers; NaN is never right.

    The examples have numbers of order 1, and their mistakes miss by more than 1e-3; a
    quotient of integers in an answer, which is float32, is no mistake.
    """
    expected = torch.as_tensor(expected, dtype=got.dtype)
    if got.dtype in (torch.bool, torch.int64):
        return bool((got == expected).all())
    gap = torch.where(got == expected, 0.0, (got.detach() - expected).abs())
    return bool((gap <= atol).all())


def demand(
    example: str, got: Tensor, expected: Any, because: str, **mistakes: Any
) -> None:
    """`got` is `expected`, or one line; with the mistake that would explain it.

    because:  the advice, which stays on a later line if a mistake is recognised there.
    mistakes: words with _ for a blank and __ for a comma, and what the answer would be
              with that mistake.
    """
    if same(got, expected):
        return
    expected = torch.as_tensor(expected, dtype=got.dtype)
    line = f"{example}: yours {fmt(got)}, expected {fmt(expected)}."
    for words, wrong in mistakes.items():
        if same(got, wrong):
            words = words.replace("__", ", ").replace("_", " ").strip()
            raise Missed(f"{line} {because} It looks as if {words}.")
    raise Missed(line, because)


# ---------------------------------------------------------------------------- verdicts


def examine(name: str) -> None:
    """Judge the function of this name that the notebook defines, and print the verdict.

    One line a property, `ok` or `missed`, and one for the laws of its equation.
    """
    function = sys._getframe(1).f_globals.get(name)
    try:
        load()
    except ModuleNotFoundError as error:
        if CLONES:
            print(f"the exercises need {error.name}: pip install -r requirements.txt")
        else:
            print("tests/laws/ is the judge: open this in a clone of the project")
        return
    for line in verdict(TASKS[name], function):
        print(line)


def verdict(one: Task, function: Any) -> list[str]:
    """The lines that `examine` prints."""
    head = f"{name_of(one)}: "
    if function is None:
        return [f"{head}open. No function {one.name} is defined above"]
    if not callable(function):
        return [f"{head}it is of type {type(function).__name__}, not a function"]
    ask, lines, missed = asked(one, function), [], 0
    try:
        for title, check in one.properties:
            try:
                said = check(ask)
                lines.append(f"  ok      {title}" + (f": {said}" if said else ""))
            except Missed as error:
                lines.append(f"  missed  {title}: {error.line if missed else error}")
                missed += 1
    except Open:
        return [f"{head}open. Write it in the cell above, then run both cells again"]
    except Unusable as error:
        return [f"{head}cannot be judged. {error}", *lines]
    lines += by_the_laws(one, ask, missed)
    done = not missed and lines[-1].startswith("  ok")
    return [head + ("right" if done else "not yet right"), *lines]


def name_of(one: Task) -> str:
    """The answer and what it stands for."""
    return f"{one.name}, equation ({one.tag}), as {one.place}"


def by_the_laws(one: Task, ask: Callable, missed: int) -> list[str]:
    """How many laws accept the answer; then, where no property has said what is wrong,
    each law that does not hold, what it says, and what it found."""
    failed, says, held = {}, {}, 0
    for name, law, alg in judging(one, ask):
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # what the answer prints
                law(alg)
            held += 1
        except Exception as error:
            failed[name] = " ".join(str(error).split()) or type(error).__name__
            says[name] = " ".join((law.__doc__ or "").partition("\n\n")[0].split())
    if not failed:
        all_of = f"all {held} laws" if held > 1 else "the law"
        return [f"  ok      accepted by {all_of} of ({one.tag})"]
    told = f"accepted by {held} of {held + len(failed)} laws of ({one.tag})"
    lines = [f"  missed  {told}"]
    for name, text in failed.items() if not missed else ():
        lines += [f"          {name}: {says[name]}", f"            found: {text[:200]}"]
    return lines


def judging(one: Task, ask: Callable) -> list[tuple[str, Callable, Any]]:
    """The laws of the task's equation, and what they judge: the module with the answer
    in it."""
    import judged
    import laws

    def make(module: ModuleType) -> Callable:
        original = getattr(module, one.place)
        return functools.wraps(original)(one.adapter(module, ask))

    if one.laws:
        return [(name, law, judged.SHIPPED) for name, law in one.laws(ask)]
    alg = judged.replaced({one.place: make})
    named = [name for name, tags in laws.TAGS.items() if one.tag in tags]
    return [(name, laws.LAWS[name], alg) for name in named]


def load() -> None:
    """The laws of tests/ and the tasks beside this file."""
    if TASKS:
        return
    for folder in (HERE, *CLONES[:1]):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import laws  # noqa: F401
    import task_losses  # noqa: F401
    import task_masks  # noqa: F401
    import task_rows  # noqa: F401
