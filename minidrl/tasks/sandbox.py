"""Programs of a stranger, run and judged under bubblewrap; no bubblewrap, no run.

A program and its tests run in a sandbox each (``sandboxed`` says why), joined by two pipes. A
sandbox has fresh namespaces of every kind, no capabilities and no environment, and of the files the
interpreter and the system's libraries, read-only, and a /tmp of ``TMP_BYTES`` (``command``). CPU
time, address space, file size and open files are limited (``sandboxed.limit``).

A filter of system calls refuses processes and threads, so that a limit of the process is one of the
sandbox. It holds for root, whom RLIMIT_NPROC does not bind. It also refuses what would hold memory
outside the address space, look into other processes, or make namespaces. It is no list of what is
allowed: the kernel's remaining calls, and its faults, are within reach.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from minidrl.tasks import sandboxed

CLOCK = 5  # times as many seconds on the clock, on a crowded machine
TMP_BYTES = 2**24
START = 20  # seconds on the clock for the start of both sandboxes
NEEDS = (
    "needs bubblewrap 0.7 or newer with user namespaces and seccomp, on Linux (x86_64, aarch64): "
    "apt install bubblewrap"
)

# Numbers of the system calls that are refused: x86_64, aarch64 (None: it has no such call).
REFUSED = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
X32 = 0x40000000  # a second set of numbers for the calls of x86_64


class Record(NamedTuple):
    """How many of the tests passed; ``reason``: the first failure, "" where there is none."""

    passed: int
    total: int
    reason: str


def run(
    program: str,
    names: tuple[str, ...],
    tests: tuple[str, ...],
    setup: str = "",
    seconds: int = 2,
    megabytes: int = 256,
) -> Record:
    """How a program stands to tests of its functions ``names``.

    ``tests``: Python code each; a test passes if it raises nothing. ``setup`` runs before them.
    ``seconds`` are of CPU time, of the program and of the tests each; on the clock all may take
    ``CLOCK`` times as many and ``START``. Raises OSError where no sandbox starts: no verdict.
    """
    job = {"program": program, "names": names, "setup": setup, "tests": tests}
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as complaints:
        asked.write(json.dumps(job).encode())
        asked.seek(0)
        said, late = _both(asked, complaints, str(seconds), str(megabytes))
        if not said:
            complaints.seek(0)
            lines = complaints.read(1000).decode(errors="replace").splitlines() or ["nothing"]
            raise OSError(f"task code: {NEEDS}; it said: {lines[0]}")
    verdicts = said[1:]
    passed = sum(right for _, right, _ in verdicts)
    reasons = [why for _, right, why in verdicts if not right]
    ended = "the time on the clock was up" if late else "the tests ended before their verdict"
    return Record(passed, len(tests), "" if passed == len(tests) else (reasons or [ended])[0])


def _both(
    asked: BinaryIO, complaints: BinaryIO, seconds: str, megabytes: str
) -> tuple[list[Any], bool]:
    """The judge's messages, "ready" first, and whether the clock ended it."""
    pipes = to_candidate, to_judge = os.pipe(), os.pipe()
    running: list[subprocess.Popen] = []

    def start(role: str, stdin: Any, stdout: int, *pipes: int) -> None:
        with tempfile.TemporaryFile(buffering=0) as filter_:
            filter_.write(call_filter(platform.machine()))
            filter_.seek(0)
            line = command(filter_.fileno(), role, seconds, megabytes, *map(str, pipes))
            options = {"stdin": stdin, "stdout": stdout, "stderr": complaints}
            options |= {"pass_fds": (filter_.fileno(), *pipes), "start_new_session": True}
            running.append(subprocess.Popen(line, **options))

    try:
        try:
            start("candidate", to_candidate[0], to_judge[1])
            start("judge", asked, subprocess.PIPE, to_candidate[1], to_judge[0])
        finally:
            for end in itertools.chain(*pipes):
                os.close(end)
        try:
            said, late = running[-1].communicate(timeout=START + CLOCK * int(seconds))[0], False
        except subprocess.TimeoutExpired as error:
            said, late = error.output or b"", True
        return [json.loads(line) for line in said[: said.rfind(b"\n") + 1].splitlines()], late
    finally:
        for process in running:
            _kill(process)


def _kill(process: subprocess.Popen) -> None:
    # bubblewrap's first process goes with it (--die-with-parent), and with that its namespace; the
    # group: one that is killed so early that its child has not asked for that yet.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


# ---------------------------------------------------------------------------------------- the walls
def command(filter_: int, *arguments: str) -> list[str]:
    """The command line of one sandbox; ``filter_``: an open file with ``call_filter``."""
    prefix, python = Path(sys.base_prefix), Path(sys._base_executable).resolve()
    read = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    read += [str(prefix / "lib"), str(prefix / "lib64")]
    walls = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    walls += ["--hostname", "sandbox", "--cap-drop", "ALL", "--new-session", "--die-with-parent"]
    walls += ["--clearenv", "--setenv", "PYTHONHASHSEED", "0"]  # the same order of a set each time
    walls += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    walls += [word for path in dict.fromkeys(read) for word in ("--ro-bind-try", path, path)]
    walls += ["--ro-bind", str(python), str(python), "--dev-bind", "/dev/null", "/dev/null"]
    walls += ["--ro-bind", sandboxed.__file__, "/sandboxed.py", "--remount-ro", "/"]
    walls += ["--chdir", "/tmp", "--seccomp", str(filter_)]
    return ["bwrap", *walls, str(python), "-sSPB", "/sandboxed.py", *arguments]


def call_filter(machine: str) -> bytes:
    """A classic BPF program for seccomp (linux/filter.h, linux/seccomp.h).

    EPERM for the calls in ``REFUSED`` and for x32's; the end of the process for another machine's.
    """
    column = list(AUDIT).index(machine)
    numbers = [both[column] for both in REFUSED.values() if both[column] is not None]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    count = len(numbers)
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT[machine]), (answer, 0, 0, 0x80000000)]
    program += [(load, 0, 0, 0), (at_least, count + 1, 0, X32)]
    program += [(equal, count - i, 0, number) for i, number in enumerate(numbers)]
    program += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050001)]
    return b"".join(struct.pack("HBBI", *line) for line in program)


@functools.cache
def refusal() -> str:
    """ "" where programs can be run here, else one line that says what is missing.

    By trial: a program that is right and one that is wrong.
    """
    linux = sys.platform == "linux" and platform.machine() in AUDIT
    if not linux or shutil.which("bwrap") is None:
        return f"task code: {NEEDS}"
    try:
        found = [run(f"f = lambda: {n}", ("f",), ("assert f() == 1",)).passed for n in (1, 2)]
    except OSError as error:
        return str(error)
    return "" if found == [1, 0] else f"task code: {NEEDS}; a trial gave {found} for [1, 0]"
