"""The sandbox: each wall against a program that runs at it, and that program again where the wall has a hole.

``ATTACKS`` are programs whose function `attack` returns what it has got hold of: nothing, behind the wall. ``CHEATS`` go
for the verdict. Where no sandbox can be made, all of this is skipped, with what is missing as the reason.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from minidrl.tasks import sandbox, sandboxed

HERE = pytest.mark.skipif(sandbox.refusal() != "", reason=sandbox.refusal())
ALL = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
SECRET = "MINIDRL_TEST_SECRET"


def run(program: str, *tests: str, **limits) -> sandbox.Record:
    """The record of a program with functions `attack` and `f`."""
    return sandbox.run(textwrap.dedent(program), ("attack", "f"), tests or ("assert attack() == []",), **limits)


# ------------------------------------------------------------------------------------------------------------- walls
ATTACKS = {}
ATTACKS["environment"] = """
    import os
    attack = lambda: sorted(set(os.environ) - {"PWD", "LC_CTYPE", "PYTHONHASHSEED"})
"""
ATTACKS["files of others"] = """
    import os, sys
    def attack():
        given = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/sandboxed.py", "/dev/null"]
        given += [sys.base_prefix + "/lib", sys.base_prefix + "/lib64", os.path.realpath(sys.executable)]
        found = []
        for folder, folders, files in os.walk("/"):
            found += [path for name in files if (path := os.path.join(folder, name)) not in given]
            folders[:] = [name for name in folders if os.path.join(folder, name) not in given]
        return found[:5]
"""
ATTACKS["writing outside"] = """
    import os
    def attack():
        done = []
        for path, how in [("/new", os.O_CREAT), ("/dev/new", os.O_CREAT), ("/usr/new", os.O_CREAT), (os.__file__, 0)]:
            try:
                os.close(os.open(path, how | os.O_WRONLY))
                done.append(path)
            except OSError:
                pass
        return done
"""
ATTACKS["network"] = """
    import socket
    def attack(port, name):
        done = []
        for family, address in [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, name)]:
            try:
                socket.socket(family).connect(address)
                done.append(str(address))
            except OSError:
                pass
        return done
"""
ATTACKS["processes and threads"] = """
    import ctypes, os, subprocess, sys, threading, time
    def fork():
        if not os.fork():
            os._exit(0)
    def clone():
        number = {"x86_64": 435, "aarch64": 435}[os.uname().machine]
        arguments = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17)
        found = ctypes.CDLL(None).syscall(number, arguments, 64)
        if found == 0:
            os._exit(0)
        if found < 0:
            raise OSError
    def attack():
        ways = [fork, clone, lambda: threading.Thread(target=int).start()]
        ways += [lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})]
        ways += [lambda: subprocess.run([sys.executable, "-c", ""])]
        done = []
        for number, way in enumerate(ways):
            try:
                way()
                done.append(number)
            except (OSError, RuntimeError):
                pass
        return done
"""
ATTACKS["signals"] = """
    import os
    def attack():
        found = []
        for process in range(1, 70000):
            try:
                os.kill(process, 0)
                found.append(process)
            except PermissionError:
                found.append(process)
            except OSError:
                pass
        return [p for p in found if p not in (os.getpid(), os.getppid())]
"""
ATTACKS["memory"] = """
    def attack():
        held = []
        try:
            while len(held) < 100:
                held.append(bytearray(2**22))
        except MemoryError:
            return []
        return [len(held)]
"""
ATTACKS["memory outside the address space"] = """
    import ctypes, os
    def attack():
        done, calls = [], ctypes.CDLL(None, use_errno=True)
        if hasattr(os, "memfd_create"):
            try:
                os.memfd_create("x")
                done.append("memfd")
            except OSError:
                pass
        done += ["shm"] if calls.shmget(0, 4096, 0o1600) >= 0 else []
        done += ["msg"] if calls.msgget(0, 0o1600) >= 0 else []
        return done
"""
ATTACKS["a large /tmp"] = """
    def attack():
        written = 0
        try:
            for number in range(40):
                with open(f"/tmp/{number}", "wb") as file:
                    written += file.write(bytes(10**6))
        except OSError:
            pass
        return [written] if written > 2**24 else []
"""
ATTACKS["large and many files"] = """
    import os
    def attack():
        written, held = 0, []
        try:
            with open("/tmp/one", "wb", buffering=0) as file:
                for _ in range(4):
                    written += file.write(bytes(10**6))
        except OSError:
            pass
        try:
            while len(held) < 200:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        return [written, len(held)] if written > 2**20 or len(held) > 32 else []
"""
ATTACKS["new namespaces"] = """
    import ctypes
    attack = lambda: ["user"] if ctypes.CDLL(None).unshare(0x10000000) == 0 else []
"""
ATTACKS["the judge"] = """
    import ctypes, os
    def attack():
        done, calls = [], ctypes.CDLL(None)
        for process in range(1, 10):
            done += ["trace"] if calls.ptrace(16, process, 0, 0) == 0 and process != os.getpid() else []
        return done + [path for path in ("/proc/1/environ", "/proc/self/mem", "/proc") if os.path.exists(path)]
"""


def without(*words: str):
    """A command line that lacks these words."""
    return lambda line: [word for word in line if word not in words]


def instead(word: str, *others: str):
    """A command line with other words in the place of one."""
    return lambda line: [new for old in line for new in (others if old == word else (old,))]


def no_filter(line: list[str]) -> list[str]:
    place = line.index("--seccomp")
    return line[:place] + line[place + 2 :]


def more(*words: str):
    """A command line with more words, before the last wall."""
    return lambda line: line[: line.index("--remount-ro")] + [*words] + line[line.index("--remount-ro") :]


def limits_without(name: str):
    """The script inside without one of its limits."""

    def holed(line: list[str], folder: Path) -> list[str]:
        source = Path(sandboxed.__file__).read_text(encoding="utf-8")
        holed, count = re.subn(rf" +resource\.{name}:.*\n", "", source)
        assert count == 1
        (folder / "holed.py").write_text(holed, encoding="utf-8")
        return [str(folder / "holed.py") if word == sandboxed.__file__ else word for word in line]

    return holed


HOLES = {
    "environment": without("--clearenv"),
    "files of others": more("--ro-bind", str(Path(__file__).parent), "/host"),
    "writing outside": lambda line: line[: line.index("--remount-ro")] + line[line.index("--remount-ro") + 2 :],
    "network": instead("--unshare-all", *(word for word in ALL if word != "--unshare-net")),
    "processes and threads": no_filter,
    "signals": instead("--unshare-all", *(word for word in ALL if word != "--unshare-pid")),
    "memory": limits_without("RLIMIT_AS"),
    "memory outside the address space": no_filter,
    "a large /tmp": instead(str(sandbox.TMP_BYTES), str(2**26)),
    "large and many files": limits_without("RLIMIT_FSIZE"),
    "new namespaces": no_filter,
    "the judge": more("--ro-bind", "/proc", "/proc"),
}


@pytest.fixture
def asked(monkeypatch):
    """The test of each attack; for the network, of two servers that listen in this process."""
    monkeypatch.setenv(SECRET, "1")
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as unix:
        name = f"\0minidrl-{os.getpid()}"
        unix.bind(name)
        unix.listen()
        network = f"assert attack({inet.getsockname()[1]}, {name!r}) == []"
        yield lambda attack: network if attack == "network" else "assert attack() == []"


@HERE
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wall_holds(attack, asked):
    record = run(ATTACKS[attack], asked(attack))
    assert (record.passed, record.reason) == (1, "")


@HERE
@pytest.mark.parametrize("attack", HOLES)
def test_the_attack_gets_through_a_hole(attack, asked, monkeypatch, tmp_path):
    """What no attack gets through may be no wall of ours."""
    whole, hole = sandbox.command, HOLES[attack]
    two = hole.__code__.co_argcount == 2
    monkeypatch.setattr(sandbox, "command", lambda *words: hole(whole(*words), *([tmp_path] if two else [])))
    record = run(ATTACKS[attack], asked(attack))
    assert (record.passed, record.reason) == (0, "AssertionError: "), "the attack finds nothing where there is something"


@HERE
def test_no_new_privileges_and_no_capabilities():
    """39 and 23 of prctl(2): no_new_privs is set, and no capability is left to drop."""
    program = """
        import ctypes
        prctl = ctypes.CDLL(None).prctl
        attack = lambda: [prctl(39, 0, 0, 0, 0), sum(prctl(23, capability, 0, 0, 0) > 0 for capability in range(41))]
    """
    assert run(program, "assert attack() == [1, 0]").passed == 1


BOMBS = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "endless loop that takes no signal": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda x: f(x)",
    "memory in the program": "x = []\nwhile True: x.append(bytearray(10**6))",
    "a long answer": "f = lambda x: 'x' * 10**7",
    "a deep answer": "def f(x):\n    for _ in range(10**5): x = [x]\n    return x",
    "output without end": "while True: print('[0, true, \"\"]' * 1000)",
}


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process that has just ended
            yield path.read_bytes()


@HERE
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends_in_its_limits_and_leaves_nothing(bomb, monkeypatch):
    whole, mark = sandbox.command, f"--mark-{os.getpid()}"
    monkeypatch.setattr(sandbox, "command", lambda *words: [*whole(*words), mark])
    started = time.monotonic()
    record = run(BOMBS[bomb], "assert f(2) == 4", "assert f(3) == 9", seconds=1)
    assert record.passed == 0 and record.reason != "" and time.monotonic() - started < sandbox.START + 5
    time.sleep(0.5)
    assert not [line for line in command_lines() if mark.encode() in line]


@HERE
def test_who_only_sleeps_is_ended_by_the_clock(monkeypatch):
    monkeypatch.setattr(sandbox, "START", 4)
    program = "import time\nf = lambda x: 4 if x == 2 else time.sleep(1000)"
    record = run(program, "assert f(2) == 4", "assert f(3) == 9", seconds=1)
    assert (record.passed, record.reason) == (1, "the time on the clock was up")


@HERE
def test_tests_are_held_in_the_same_walls():
    """A test is a file's, not ours: it cannot leave its sandbox either, and has its own limit."""
    for test in ("while True: pass", "import os; os.fork()", "open('/new', 'w')", "import os; os._exit(0)"):
        assert run("f = int", test, seconds=1).passed == 0
    secret = f"import os\nassert {SECRET!r} not in os.environ and not os.path.exists({str(Path(__file__).parent)!r})"
    assert run("f = int", secret).passed == 1


# ------------------------------------------------------------------------------------------------------- the verdict
CHEATS = {}
CHEATS["leaves in the call"] = """
import os
f = lambda x: os._exit(0)
"""
CHEATS["equal to everything"] = """
class A:
    __eq__ = lambda self, other: True
f = lambda x: A()
"""
CHEATS["a list equal to everything"] = """
class A(list):
    __eq__ = lambda self, other: True
f = lambda x: A()
"""
CHEATS["prints the marker"] = """
import os
print('PASSED', flush=True)
os._exit(1)
"""
CHEATS["prints verdicts"] = """
import os
for number in range(20):
    try:
        os.write(number, b'PASSED\\n"ready"\\n[0, true, ""]\\n[1, true, ""]\\n')
    except OSError:
        pass
f = lambda x: None
"""
CHEATS["patches the error"] = """
import builtins, os, sys
for name in ("AssertionError", "Exception", "BaseException"):
    setattr(builtins, name, type(name, (), {}))
sys.excepthook = lambda *_: os._exit(0)
f = lambda x: None
"""
CHEATS["looks for the tests"] = """
import gc
def f(x):
    spaces = [found for found in gc.get_objects() if isinstance(found, dict)]
    values = [value for space in spaces for value in list(space.values())]
    tables = [value for value in values if isinstance(value, dict) and {*value} == {2, 3}]
    return tables[0][x] if tables else None
"""
CHEATS["swaps the harness"] = """
import os, sys
for name in ("answered", "packed", "send", "receive"):
    setattr(sys.modules["__main__"], name, lambda *_: ["value", True])
sys.excepthook = lambda *_: os._exit(0)
f = lambda x: None
"""
SQUARE = ("assert f(2) == EXPECTED[2]", "assert f(3) == EXPECTED[3]")
SETUP = "EXPECTED = {2: 4, 3: 9}"


def square(program: str) -> sandbox.Record:
    return sandbox.run(program, ("f",), SQUARE, setup=SETUP, seconds=1)


@HERE
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_nothing(cheat):
    record = square(CHEATS[cheat])
    assert (record.passed, record.total) == (0, 2) and record.reason


@HERE
def test_what_is_right_passes_and_each_test_counts():
    assert square("f = lambda x: x * x")[:3] == (2, 2, "")
    assert square("f = lambda x: 4")[:3] == (1, 2, "AssertionError: ")
    assert square("f = lambda x: x * x if x < 3 else 1 / 0")[:3] == (1, 2, "ZeroDivisionError: division by zero")
    assert square("import os\nf = lambda x: 4 if x == 2 else os._exit(0)")[:3] == (1, 2, "Ended: the program has ended")
    assert square("f = lambda x: 4 if x == 2 else [0 for _ in iter(int, 1)]").passed == 1
    assert square("g = lambda x: x * x")[:2] == (0, 2)
    assert square("f = lambda x: x * x\nraise ValueError('no')")[:3] == (0, 2, "ValueError: no")
    assert square("def f(x) return x")[:2] == (0, 2) and square("")[:2] == (0, 2)
    assert square("\0")[:2] == square("\ud800")[:2] == square("(" * 10**4)[:2] == (0, 2)


@HERE
def test_after_the_end_of_the_program_nothing_passes():
    """Not even a test that would not have asked it, nor one that expects an error."""
    tests = ("f(1)", "assert True", "try: f(1)\nexcept OSError: pass")
    assert sandbox.run("import os\nf = lambda x: os._exit(0)", ("f",), tests).passed == 0
    assert sandbox.run("def f(x): raise OSError", ("f",), tests[2:]).passed == 1


# -------------------------------------------------------------------------------------------------------- plain data
PLAIN = [None, True, 0, -1, 10**300, 1.5, float("inf"), "", "\ud800\0\n", b"\xff", 1j, [], (), set(), frozenset({1}), {}]
PLAIN += [2**63, -(2**63), [1, (2, [3])], {"a": [1], (1, 2): {3}, None: b""}, {frozenset({(1, "x")})}]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back_with_its_types(value):
    def typed(x):
        inner = sorted(map(repr, map(typed, x))) if isinstance(x, set | frozenset) else x
        inner = [typed(y) for y in x] if isinstance(x, list | tuple) else inner
        inner = [(typed(k), typed(v)) for k, v in x.items()] if isinstance(x, dict) else inner
        return type(x), inner

    back = sandboxed.unpacked(json.loads(json.dumps(sandboxed.packed(value))))
    assert back == value and typed(back) == typed(value)


@HERE
def test_values_and_errors_cross_as_the_program_made_them():
    program = """
        from collections import Counter
        from math import factorial
        def f(x): return x
        def attack(kind):
            if kind == "own": raise type("Own", (KeyError,), {})("mine")
            return {"counter": Counter("aab"), "large": factorial(2000)}[kind]
    """
    tests = [f"assert repr(f({value!r})) == repr({value!r})" for value in PLAIN if value != float("inf")]
    tests += ["assert attack('counter') == {'a': 2, 'b': 1}", "import math; assert attack('large') == math.factorial(2000)"]
    tests += ["try: attack('own')\nexcept KeyError as error: assert 'mine' in str(error)\nelse: assert False"]
    assert run(program, *tests)[:3] == (len(tests), len(tests), "")
    assert run(program, "assert f([1]) == (1,)", "assert f(print)", "assert f(iter([]))").passed == 0
    for text in ('["set", ["list"]]', "[[]]", '["bytes", "x"]'):
        with pytest.raises((TypeError, ValueError, KeyError)):
            sandboxed.unpacked(json.loads(text))


# --------------------------------------------------------------------------------------------------------- refusals
@pytest.fixture
def unknown():
    """No answer of an earlier trial, and none kept for later ones."""
    sandbox.refusal.cache_clear()
    yield
    sandbox.refusal.cache_clear()


def test_without_bubblewrap_it_says_what_to_install(monkeypatch, unknown):
    monkeypatch.setenv("PATH", "")
    assert sandbox.refusal() == f"task code: {sandbox.NEEDS}"
    assert "apt install bubblewrap" in sandbox.NEEDS
    with pytest.raises(OSError):
        run("attack = list")


def test_a_bubblewrap_that_does_not_work_is_refused(monkeypatch, tmp_path, unknown):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2; exit 1\n", encoding="utf-8")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert sandbox.refusal() == f"task code: {sandbox.NEEDS}; it said: bwrap: No permissions"


def test_where_bubblewrap_works_no_wall_is_left_untested(unknown):
    """A sandbox that always fails would have all its tests skipped."""
    words = ["bwrap", "--unshare-all", "--cap-drop", "ALL", "--ro-bind", "/", "/", "--size", "4096", "--tmpfs", "/tmp"]
    with tempfile.TemporaryFile(buffering=0) as filter_:
        filter_.write(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # every call is allowed
        filter_.seek(0)
        trial = [*words, "--seccomp", str(filter_.fileno()), "true"]
        if shutil.which("bwrap") is None or subprocess.run(trial, pass_fds=[filter_.fileno()], capture_output=True).returncode:
            pytest.skip("bubblewrap cannot be used here")
    assert sandbox.refusal() == ""


# ---------------------------------------------------------------------------------------------------- the call filter
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_the_kernels_headers(machine):
    if not (header := Path(HEADERS[machine])).exists():
        pytest.skip(f"{header} is not here: apt install linux-libc-dev")
    defined = dict(re.findall(r"#define __NR\w*?_(?:3264_)?(\w+) (\d+)", header.read_text(encoding="utf-8")))
    column = list(sandbox.AUDIT).index(machine)
    for name, numbers in sandbox.REFUSED.items():
        expected = defined.get(name)
        assert numbers[column] == (int(expected) if expected else None) or name in UNKNOWN and not expected, name


UNKNOWN = {"memfd_secret"}  # newer than some headers
