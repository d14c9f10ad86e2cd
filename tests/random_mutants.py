"""Random mistakes in every file of the package, and the tests that notice them.

    python tests/random_mutants.py minidrl/run/trainer.py --count 100 --seed 0     # draw, run; continues where it was stopped
    python tests/random_mutants.py --report > docs/...                          # the table and the list of survivors

A mutant is one place of a file changed: an operator, a constant, a condition, the order of two arguments, a statement left out.
Which tests execute which lines is measured once, and kept beside the results; a mutant meets the tests that execute its line,
the cheapest first, until one fails. Nothing is imported anew for it: pytest collects once, and a fork per mutant puts the wrong
code into the functions that are there. Where the line runs while modules are imported, the fork imports the package itself.
"""

import argparse
import ast
import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import inspect
import itertools
import json
import math
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path.cwd()  # of the project; the tests are in tests/, the package is the folder of the file
SKIPPED = ("tests/test_mutants.py", "tests/test_random_mutants.py", "tests/test_notebooks.py")  # other mutants; notebooks
PATIENCE = 20.0  # seconds that a test may take, besides four times what it takes without a mutant
EACH = sys.maxsize  # how many of the parameters of a test
BUDGET = math.inf  # seconds for all tests of a mutant
STARTUP = "from random_mutants import start_subprocess; start_subprocess()\n"

# ------------------------------------------------------------------------------------------------------------- the places

COMPARISONS = {
    **{ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE)},
    **{ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)},
    **{ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)},
}
ARITHMETIC = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult},
    **{ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
}
PAIRS = (("min", "max"), ("any", "all"), ("amin", "amax"))
SWAPPED = {old: new for pair in PAIRS for old, new in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One place of a file, and what stands there instead; ``start`` and ``stop`` count bytes."""

    file: str
    function: str  # "" at the top of the module
    lines: tuple[int, ...]  # those of its statement, or of the head of a compound one
    start: int
    stop: int
    old: str
    new: str
    before: str  # the same with what stands around it
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.start}:{self.new}"


def changes(node: ast.AST) -> list[ast.AST]:
    """What may stand in the place of a node."""

    def with_fields(**fields) -> ast.AST:
        return type(node)(**{**dict(ast.iter_fields(node)), **fields})

    def shifted(index: ast.AST) -> list[ast.AST]:
        return [ast.BinOp(index, step, ast.Constant(1)) for step in (ast.Add(), ast.Sub())]

    found: list[ast.AST] = []
    match node:
        case ast.Compare(ops=ops):
            each = ((i, new) for i, op in enumerate(ops) for new in COMPARISONS[type(op)])
            found = [with_fields(ops=[*ops[:i], new(), *ops[i + 1 :]]) for i, new in each]
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            found = [with_fields(op=ARITHMETIC[type(op)]())]
        case ast.BoolOp(op=op):
            found = [with_fields(op=ast.Or() if isinstance(op, ast.And) else ast.And())]
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()):
            found = [node.operand]
        case ast.Constant(value=bool(value)):
            found = [ast.Constant(not value)]
        case ast.Constant(value=int(value) | float(value)):
            found = [ast.Constant(value + 1), ast.Constant(value - 1)]
        case ast.Call(func=func, args=args):
            if len(args) == 2 and not any(isinstance(arg, ast.Starred) for arg in args):
                found.append(with_fields(args=args[::-1]))
            if isinstance(func, ast.Name) and func.id in SWAPPED:
                found.append(with_fields(func=ast.Name(SWAPPED[func.id])))
            if isinstance(func, ast.Attribute) and func.attr in SWAPPED:
                found.append(with_fields(func=ast.Attribute(func.value, SWAPPED[func.attr])))
            if isinstance(func, ast.Attribute) and func.attr == "detach":
                found.append(func.value)
        case ast.Expr(value=value) if not isinstance(value, ast.Constant | ast.Yield | ast.YieldFrom):
            found = [ast.Pass()]
        case ast.AugAssign():
            found = [ast.Pass()]
    if getattr(node, "is_index", False) and isinstance(node, ast.Name | ast.Attribute | ast.BinOp):
        found += shifted(node)
    return found


def _words_of_errors(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The assignments that only build the message of the ``raise`` that ends a block."""
    if not isinstance(body[-1], ast.Raise):
        return
    read = {name.id for name in ast.walk(body[-1]) if isinstance(name, ast.Name)}
    for statement in reversed(body[:-1]):
        if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
            return
        if statement.targets[0].id in read:
            yield statement


def _spared(tree: ast.Module) -> set[int]:
    """The nodes that are left alone, with all that is inside: annotations, messages, ``__all__``."""
    spared: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Raise):
            spared.append(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            spared.append(node)
        spared += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list) and body and isinstance(node, ast.If | ast.ExceptHandler):
                spared += _words_of_errors(body)
    return {id(node) for node in spared if node is not None}


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.AST], str, ast.stmt]]:
    """(node, what may stand there, function, statement) for all places of a module, in reading order."""
    spared = _spared(tree)

    def visit(node: ast.AST, function: str, statement: ast.stmt | None):
        if id(node) in spared:
            return
        statement = node if isinstance(node, ast.stmt) else statement
        if isinstance(node, ast.Subscript):
            inside = node.slice
            for index in [inside.lower, inside.upper] if isinstance(inside, ast.Slice) else [inside]:
                if index is not None:
                    index.is_index = True
        if found := changes(node):
            yield node, found, function, statement
        tests = [*getattr(node, "ifs", ()), getattr(node, "test", None)]
        for test in tests:
            if test is not None and not isinstance(test, ast.UnaryOp):  # without its `not`, that is negated already
                yield test, [ast.UnaryOp(ast.Not(), test)], function, statement
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        inner = f"{function}.{node.name}".lstrip(".") if named else function
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inner if name == "body" else function, statement)

    for node in tree.body:
        yield from visit(node, "", None)


def _head(statement: ast.stmt) -> tuple[int, ...]:
    """Its lines; of a compound statement those before its body."""
    body = getattr(statement, "body", None)
    stop = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno
    return tuple(range(statement.lineno, stop + 1))


def all_mutants(file: str, source: str) -> list[list[Mutant]]:
    """Per place of a file, the mutants there."""
    tree, raw = ast.parse(source), source.encode()
    starts = [0, *(i + 1 for i, byte in enumerate(raw) if byte == ord("\n"))]
    found = []
    for node, news, function, statement in places(tree):
        start, stop = (starts[row - 1] + at for row, at in _span(node))
        first, last = (starts[row - 1] + at for row, at in _span(statement))
        here = []
        for new in news:
            text = ast.unparse(ast.fix_missing_locations(new))
            text = text if isinstance(new, ast.Pass | ast.Constant) else f"({text})"
            words = [raw[max(first, start - 40) : start].decode(errors="ignore"), raw[start:stop].decode()]
            words.append(raw[stop : min(last, stop + 40)].decode(errors="ignore"))
            before, after = (" ".join(f"{words[0]}{x}{words[2]}".split()) for x in (words[1], text))
            here.append(Mutant(file, function, _head(statement), start, stop, words[1], text, before, after))
        found += [here] if here else []
    return found


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the mutant in it, on as many lines: tracebacks and the map of lines stay true."""
    raw, breaks = source.encode(), "\n" * mutant.old.count("\n")
    text = mutant.new[:-1] + breaks + mutant.new[-1] if mutant.new.endswith(")") else mutant.new + breaks
    return (raw[: mutant.start] + text.encode() + raw[mutant.stop :]).decode()


def drawn(file: str, source: str, seed: int) -> Iterator[Mutant]:
    """All mutants of a file in a random order: every place once before any is visited again.

    What is no program, or the same one, is left out.
    """
    rng, found = random.Random(f"{seed} {file}"), all_mutants(file, source)
    rng.shuffle(found)
    for here in found:
        rng.shuffle(here)
    most = max(map(len, found), default=0)
    same = ast.dump(ast.parse(source))
    for mutant in [here[turn] for turn in range(most) for here in found if turn < len(here)]:
        with contextlib.suppress(SyntaxError, ValueError):
            if ast.dump(ast.parse(mutated(source, mutant))) != same:
                yield mutant


# ------------------------------------------------------------------------------------------- which test executes which line


class Tracer:
    """The executed lines of a folder, separately for "" (while modules are imported), each test, each fixture."""

    def __init__(self, folder: Path, context: str = ""):
        import coverage  # every installation of the tests has it: nbval needs it

        self.coverage = coverage.Coverage(data_file=None, source=[str(folder)], config_file=False, messages=False)
        self.coverage.start()
        self.enter(context)

    def enter(self, context: str) -> None:
        self.context = os.environ["RANDOM_MUTANTS_CONTEXT"] = context
        self.coverage.switch_context(context)

    def lines(self) -> dict[str, dict[str, list[int]]]:
        """context -> file -> lines."""
        self.coverage.stop()
        data, found = self.coverage.get_data(), {}
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    found.setdefault(context, {}).setdefault(os.path.relpath(file, ROOT), []).append(line)
        return found


class Few:
    """A pytest plugin: of a test with many parameters, EACH of them, evenly spaced."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        alike: dict[str, list] = {}
        for item in items:
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = set()
        for same in alike.values():
            kept |= {same[i * len(same) // EACH] for i in range(EACH)} if len(same) > EACH else {*same}
        items[:] = [item for item in items if item in kept]


class Measure:
    """A pytest plugin: durations of the tests that pass, and the lines that each and its fixtures execute."""

    def __init__(self, tracer: Tracer, package: str):
        self.tracer, self.package = tracer, package
        self.tests, self.fixtures, self.failed, self.shared, self.item = {}, {}, [], {}, ""

    def pytest_collection_finish(self):
        found = [value for value in gc.get_objects() if type(value) is functools._lru_cache_wrapper]
        self.caches = [value for value in found if f"{value.__module__}.".startswith(f"{self.package}.")]

    def pytest_runtest_protocol(self, item):
        for cached in self.caches:  # what one test has cached would not be executed by the next one
            cached.cache_clear()
        self.tracer.enter(item.nodeid)
        self.item = item.nodeid
        known = item._fixtureinfo.name2fixturedefs
        self.fixtures[item.nodeid] = [self.name(known[name][-1]) for name in item.fixturenames if name in known]

    @staticmethod
    def name(fixture) -> str:
        return f"fixture {fixture.baseid}::{fixture.argname}"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        outer, started, name = self.tracer.context, time.perf_counter(), self.name(fixturedef)
        self.tracer.enter(name)
        yield
        self.tracer.enter(outer)
        if fixturedef.scope != "function":  # each test that uses it has to pay for it, not the first one alone
            self.shared[name] = time.perf_counter() - started
            self.tests[self.item] = self.tests.get(self.item, 0.0) - self.shared[name]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed:
            self.tests[report.nodeid] = self.tests.get(report.nodeid, 0.0) + report.duration


def measure(package: str, test_file: str) -> dict:
    """Run a test file once with a tracer; its map: which test executes what, and how long it takes."""
    tracer = Tracer(ROOT / package)
    plugin = Measure(tracer, package)
    with tempfile.TemporaryDirectory() as folder:
        startup(Path(folder), {"RANDOM_MUTANTS_TRACED": str(ROOT / package), "RANDOM_MUTANTS_LINES": folder})
        pytest.main([*OPTIONS, test_file], plugins=[Few(), plugin])
        found = [tracer.lines(), *map(written, Path(folder).glob("*.json"))]
    lines: dict[str, dict[str, set[int]]] = {}
    for context, files in (pair for part in found for pair in part.items()):
        for file, numbers in files.items():
            lines.setdefault(context, {}).setdefault(file, set()).update(numbers)
    tests = {}
    for name in plugin.tests.keys() - plugin.failed:
        merged: dict[str, set[int]] = {}
        for context in [name, *plugin.fixtures[name]]:
            for file, numbers in lines.get(context, {}).items():
                merged.setdefault(file, set()).update(numbers)
        seconds = plugin.tests[name] + sum(plugin.shared.get(fixture, 0) for fixture in plugin.fixtures[name])
        tests[name] = {"seconds": round(seconds, 3), "lines": {f: sorted(n) for f, n in merged.items()}}
    imported = {file: sorted(numbers) for file, numbers in lines.get("", {}).items()}
    states = {file: digest([ROOT / file]) for file in [test_file, *package_files(package)]}
    words = {"imported": imported, "failed": sorted({*plugin.failed}), "collected": sorted(plugin.fixtures)}
    return {"tests": tests, "states": states, **words}


def written(path: Path) -> dict:
    """The lines of a subprocess; none of one that was ended, or that may write no file, as a sandbox may not."""
    text = path.read_text()
    return json.loads(text) if text.endswith("}") else {}


def startup(folder: Path, words: dict[str, str]) -> None:
    """Every Python that a test starts runs ``start_subprocess`` first, told by the environment what to do."""
    (folder / "sitecustomize.py").write_text(STARTUP)
    os.environ.update(words, PYTHONPATH=f"{folder}{os.pathsep}{Path(__file__).parent}")


def start_subprocess() -> None:
    """Called by a process that a test has started: trace it, or put the mutant into it."""
    import atexit

    if folder := os.environ.get("RANDOM_MUTANTS_TRACED"):
        tracer = Tracer(Path(folder), os.environ["RANDOM_MUTANTS_CONTEXT"])
        to = Path(os.environ["RANDOM_MUTANTS_LINES"]) / f"{os.getpid()}.json"
        atexit.register(lambda: to.write_text(json.dumps(tracer.lines())))
    if file := os.environ.get("RANDOM_MUTANTS_FILE"):
        import_instead(Path(file), Path(os.environ["RANDOM_MUTANTS_SOURCE"]).read_text())


# --------------------------------------------------------------------------------------------------------- one mutant, a fork

OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


def import_instead(path: Path, source: str) -> None:
    """From now on, whoever imports that file gets this source, whatever loader it uses; no compiled file is read or written."""
    data, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(self, name):
        return source.encode() if Path(name) == path else data(self, name)

    def path_stats(self, name):
        if Path(name) == path:
            raise OSError("no compiled file of a mutant")
        return stats(self, name)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = get_data, path_stats


class Child:
    """A pytest plugin: runs the chosen tests, tells the parent which one fails, and ends there and then."""

    def __init__(self, pipe: int, chosen: dict[str, float], known: set[str]):
        self.pipe, self.chosen, self.known = pipe, chosen, known

    def say(self, kind: str, name: str) -> None:
        os.write(self.pipe, f"{kind} {name}\n".encode())
        if kind != "runs":
            os._exit(0)

    def order(self, items: list) -> list:
        """The chosen tests and those that the map does not know, by cost; tests that share a costly fixture stay together."""
        costs = {item: self.chosen[item.nodeid] for item in items if item.nodeid in self.chosen}
        costs |= {item: 0.0 for item in items if item.nodeid not in self.known}
        groups: dict[object, float] = {}
        for item, cost in costs.items():
            groups[self.group(item)] = groups.get(self.group(item), 0.0) + cost
        return sorted(costs, key=lambda item: (groups[self.group(item)], str(self.group(item)), costs[item]))

    @staticmethod
    def group(item) -> object:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        return item.fspath if any(found[-1].scope == "module" for found in fixtures) else item.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.say("failed", f"import of {report.nodeid}")

    def pytest_collection_modifyitems(self, items):
        items[:] = self.order(items)

    def pytest_runtest_protocol(self, item):
        self.say("runs", item.nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.say("failed", report.nodeid)

    def pytest_sessionfinish(self):
        self.say("survived", "")


def forked(costs: dict[str, float]) -> tuple[int | None, str]:
    """In the child the end of a pipe to write to; in the parent None, and what became of the child."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        os.close(reader)
        return writer, ""
    os.close(writer)
    running, said, stop = "import", b"", time.perf_counter() + BUDGET
    try:
        while True:
            patience = PATIENCE + 4 * costs.get(running, PATIENCE)
            if not select.select([reader], [], [], patience)[0]:
                return None, f"time: {running}"
            said += (more := os.read(reader, 65536))
            *lines, said = said.split(b"\n")
            for line in lines:
                kind, _, name = line.decode().partition(" ")
                if kind != "runs":
                    return None, name or kind
                running = name
                if time.perf_counter() > stop:
                    return None, "unfinished"
            if not more:
                return None, f"end of the process: {running}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with all that the tests have started
        os.waitpid(child, 0)
        os.close(reader)


def functions(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module and of its classes."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from [inner] if inner.co_flags & inspect.CO_OPTIMIZED else functions(inner)


class Campaign:
    """The mutants of one file that are still to be tried, what is known of the tests, and where the results go."""

    def __init__(self, file: str, facts: dict, todo: list[Mutant], out: Path, folder: Path, again: bool):
        self.file, self.facts, self.todo, self.out, self.folder = file, facts, todo, out, folder
        self.path, self.source = ROOT / file, (ROOT / file).read_text()
        self.functions = list(functions(compile(self.source, str(self.path), "exec")))
        self.imported = set(facts["imported"].get(file, ()))
        self.tests = {name: test for name, test in facts["tests"].items()}
        self.known, self.kills = set(facts["collected"]), Counter()
        self.hash, self.again, self.started = code_digest(self.path), again, time.time()

    def costs(self, mutant: Mutant | None) -> dict[str, float]:
        """The tests that execute the line; where it runs at import, those of the module and of the modules that import it."""
        if mutant is None:
            found = self.tests
        elif self.at_import(mutant):
            files = {self.file, *importers(self.file)}
            found = [name for name, test in self.tests.items() if files & test["lines"].keys()]
        else:
            lines = set(mutant.lines)
            found = [name for name, test in self.tests.items() if lines & set(test["lines"].get(self.file, ()))]
        return {name: (self.tests[name]["seconds"] + 0.01) / (1 + self.kills[name]) for name in found}

    def at_import(self, mutant: Mutant) -> bool:
        return not mutant.function or bool(self.imported & set(mutant.lines))

    def swapped(self, mutant: Mutant) -> tuple[str, CodeType] | None:
        """The one function that the mutant changes, by its name, and its new code; None if that is not all."""
        old, new = self.functions, list(functions(compile(mutated(self.source, mutant), str(self.path), "exec")))
        names = Counter(code.co_qualname for code in old)
        differ = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
        simple = len(old) == len(new) and len(differ) == 1 and not self.at_import(mutant)
        if not simple or names[differ[0][0].co_qualname] > 1 or differ[0][0].co_freevars != differ[0][1].co_freevars:
            return None
        return differ[0][0].co_qualname, differ[0][1]

    def prepare(self, mutant: Mutant | None) -> None:
        """In a fork: what the processes need to know that the tests start."""
        (self.folder / "source.py").write_text(mutated(self.source, mutant) if mutant else self.source)
        startup(self.folder, {"RANDOM_MUTANTS_FILE": str(self.path), "RANDOM_MUTANTS_SOURCE": f"{self.folder}/source.py"})

    def note(self, mutant: Mutant, by: str, tests: int, seconds: float) -> None:
        self.kills[by] += 1
        words = {key: getattr(mutant, key) for key in ("key", "file", "function", "before", "after")}
        words |= {"line": mutant.lines[0], "by": by, "tests": tests, "seconds": round(seconds, 2)}
        words |= {"hash": self.hash, "at": time.time()}
        with self.out.open("a") as out:
            out.write(json.dumps(words) + "\n")
        print(f"{mutant.file}:{mutant.lines[0]}: {mutant.before} -> {mutant.after}: {by} ({seconds:.1f} s)", file=CONSOLE)

    def left(self) -> list[Mutant]:
        """What has no result yet, or has survived earlier than this campaign if that is asked for."""
        rows = {row["key"]: row for row in results(self.out) if row["hash"] == self.hash}
        again = {key for key, row in rows.items() if self.again and row["by"] in LIVED and row.get("at", 0) < self.started}
        return [mutant for mutant in self.todo if mutant.key not in rows or mutant.key in again]

    def run(self) -> None:
        """Those that change one function meet tests that are collected already; for the others all is imported anew."""
        options = [*OPTIONS, f"--basetemp={self.folder}/base"]
        quick = {mutant: change for mutant in self.left() if (change := self.swapped(mutant))}
        if quick and (server := os.fork()) == 0:
            pytest.main([*options, *self.facts["files"]], plugins=[Few(), Server(self, quick)])
            os._exit(0)
        if quick:
            os.waitpid(server, 0)
        for mutant in self.left():
            started, costs = time.perf_counter(), self.costs(mutant)
            pipe, by = forked(costs)
            if pipe is not None:
                self.prepare(mutant)
                import_instead(self.path, mutated(self.source, mutant))
                files = {name.partition("::")[0] for name in costs} | {*changed(self.facts)}
                child = Child(pipe, costs, self.known)
                if files:
                    pytest.main([*options, *sorted(files)], plugins=[Few(), child])
                child.say("failed" if files else "survived", "collection" if files else "")
            self.note(mutant, by, len(costs), time.perf_counter() - started)


class Server:
    """A pytest plugin: when all tests are collected, a fork per mutant, which goes on as if nothing had been."""

    def __init__(self, campaign: Campaign, quick: dict):
        self.campaign, self.quick = campaign, quick

    def pytest_runtestloop(self, session):
        here, found = self.campaign, {}
        for value in gc.get_objects():
            if type(value) is FunctionType and value.__code__.co_filename == str(here.path):
                found.setdefault(value.__code__.co_qualname, []).append(value)
        gc.freeze()
        for mutant, (name, code) in self.quick.items():
            if name not in found:
                continue
            started, costs = time.perf_counter(), here.costs(mutant)
            pipe, by = forked(costs)
            if pipe is not None:
                here.prepare(mutant)
                for function in found[name]:
                    function.__code__ = code
                child = Child(pipe, costs, here.known)
                session.config.pluginmanager.register(child)
                session.items[:] = child.order(session.items)
                return None
            here.note(mutant, by, len(costs), time.perf_counter() - started)
        return True


# --------------------------------------------------------------------------------------------------------- files and reports


def digest(paths: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:12]


def code_digest(path: Path) -> str:
    """Of a program: comments, docstrings and the place of line breaks do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def results(out: Path) -> list[dict]:
    """One row a mutant: the last that was written of it."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return list({(row["key"], row["hash"]): row for row in rows}.values())


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: Path) -> set[str]:
    """What a file imports, anywhere: modules, and names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers(file: str) -> list[str]:
    """The files of the package that import this one."""
    everything = package_files(file.partition("/")[0])
    return [name for name in everything if module_name(file) in imports(ROOT / name)]


def package_files(package: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))


def import_others(package: str) -> None:
    """Everything that is not ours and that the package and its tests import: once, before any fork."""
    ours = {package, *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    for name in sorted(set().union(*(imports(path) for path in [*ROOT.glob("tests/*.py"), *(ROOT / package).rglob("*.py")]))):
        if name.partition(".")[0] not in ours:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ:
        for plugin in importlib.metadata.entry_points(group="pytest11"):
            plugin.load()


def changed(facts: dict) -> list[str]:
    """The test files that are not those of the map: what is new there is run for every mutant."""
    return [name for name, state in facts["files"].items() if state != digest([ROOT / name])]


def known_facts(file: str, folder: Path, test_files: list[str]) -> dict:
    """The maps of the test files as one; a map is measured where there is none, or if the mutated file has changed since."""
    facts: dict = {"tests": {}, "imported": {}, "collected": [], "failed": [], "files": {}}
    for name in test_files:
        at, state = folder / f"{Path(name).stem}.json", digest([ROOT / file])
        found = json.loads(at.read_text()) if at.exists() else {"states": {}}
        if found["states"].get(file) != state:
            print(f"which lines does {name} execute?", file=CONSOLE)
            found = in_a_fork(lambda name=name: measure(file.partition("/")[0], name), at)
        facts["tests"] |= found["tests"]
        facts["collected"] += found["collected"]
        facts["failed"] += found["failed"]
        facts["files"][name] = found["states"][name]
        for path, lines in found["imported"].items():
            facts["imported"][path] = sorted({*facts["imported"].get(path, ()), *lines})
    return facts


def in_a_fork(make, at: Path) -> dict:
    if (child := os.fork()) == 0:
        at.write_text(json.dumps(make()))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(at.read_text())


JUDGED = ROOT / "tests" / "mutants_judged.json"  # what a reader said of the survivors
LIVED = ("survived", "unfinished")
NAMED = ("file", "function", "before", "after")


def judgements() -> dict[tuple[str, ...], dict]:
    rows = json.loads(JUDGED.read_text()) if JUDGED.exists() else []
    return {tuple(row[word] for word in NAMED): row for row in rows}


def report(out: Path) -> Iterator[str]:
    """A table of the files, then every survivor with its judgement; results of another state of a file do not count."""
    judged, files, total = judgements(), {}, Counter()
    for row in results(out):
        if (ROOT / row["file"]).exists() and row["hash"] == code_digest(ROOT / row["file"]):
            files.setdefault(row["file"], []).append(row)
    lived = {file: [row for row in rows if row["by"] in LIVED] for file, rows in sorted(files.items())}
    said = {
        row["key"]: judged.get(tuple(row[k] for k in ("file", "function", "before", "after")))
        for x in lived.values()
        for row in x
    }
    yield "| file | drawn | killed | of these by time | equivalent | true survivors | open |"
    yield "| --- " + "| ---: " * 6 + "|"
    for file, survivors in lived.items():
        kinds = Counter(kind(said[row["key"]]) for row in survivors)
        slow, drawn_ = sum(row["by"].startswith("time") for row in files[file]), len(files[file])
        numbers = {"drawn": drawn_, "killed": drawn_ - len(survivors), "time": slow} | {name: kinds[name] for name in KINDS}
        total.update(numbers)
        yield f"| {file} | " + " | ".join(map(str, numbers.values())) + " |"
    yield "| all | " + " | ".join(map(str, total.values())) + " |\n"
    for file, survivors in lived.items():
        for row in sorted(survivors, key=lambda row: row["line"]):
            change = f"``{row['before']}`` → ``{row['after']}``"
            why = (said[row["key"]] or {"why": "no test of those tried has failed; not judged"})["why"]
            yield f"- {file}, {row['function'] or 'top of the module'}: {change}. {kind(said[row['key']])}: {why}"


KINDS = ("equivalent", "true survivor", "open")


def kind(judgement: dict | None) -> str:
    return "open" if judgement is None else "equivalent" if judgement["equivalent"] else "true survivor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--count", type=int, default=100, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("research/benchmarks/results/random_mutants.jsonl"))
    parser.add_argument("--tests", nargs="*", help="test files; all but a few if none is named")
    parser.add_argument("--each", type=int, default=EACH, help="of a test with many parameters, so many of them")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds granted to each test on top")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all tests of a mutant; then: unfinished")
    parser.add_argument("--again", action="store_true", help="try the survivors among them once more")
    parser.add_argument("--report", action="store_true", help="print the table and the survivors")
    words = parser.parse_args()
    globals().update(EACH=words.each, PATIENCE=words.patience, BUDGET=words.budget)
    if words.report:
        print(*report(words.out), sep="\n")
        return
    words.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONDONTWRITEBYTECODE="1")
    sys.path.insert(0, str(ROOT))
    package = words.files[0].partition("/")[0]
    import_others(package)
    maps = words.out.with_suffix(".maps")
    maps.mkdir(exist_ok=True)
    test_files = sorted({str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py")} - {*SKIPPED})
    silence(words.out.with_suffix(".log"))
    for file in words.files:
        facts = known_facts(file, maps, words.tests or test_files)
        print(f"{file}: {len(facts['tests'])} tests; left out, since they fail: {facts['failed']}", file=CONSOLE)
        mutants = list(itertools.islice(drawn(file, (ROOT / file).read_text(), words.seed), words.count))
        with tempfile.TemporaryDirectory() as folder:
            Campaign(file, facts, mutants, words.out, Path(folder), words.again).run()


CONSOLE = sys.stdout


def silence(log: Path) -> None:
    """What pytest and the tests print goes to a file; CONSOLE is what was the output."""
    global CONSOLE
    CONSOLE = os.fdopen(os.dup(1), "w", buffering=1)
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(to, 1)
    os.dup2(to, 2)


if __name__ == "__main__":
    main()
