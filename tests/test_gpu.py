"""benchmarks/gpu.sh, rehearsed on a CPU at sizes that mean nothing: every stage runs, and writes what it found."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
from minidrl import config, methods, rehearsal

ROOT = Path(__file__).parents[1]
STAGES = ["tests", "base", "run", "sampler", "llada", "shapes", "caches", "memory"]
STAGED = [("tests",), ("base", "run"), ("sampler",), ("llada", "shapes"), ("caches",), ("memory",)]
NUMBER = r"-?\d[\d.e+-]*"
SAYS = {  # what only a stage that did its work prints
    "tests": r"\d+ passed, 3 skipped",
    "base": r'"parameters": \d+',
    "run": r"reinforce, seed 0: [\d.]+% -> [\d.]+% of 2 held-out puzzles",
    "sampler": rf"\| rollout, low_confidence +\| +{NUMBER} \|",
    "llada": rf"\| update +\| +\d+ \| +{NUMBER} \| +{NUMBER} \|",
    "caches": rf"\| low_confidence +\| dual +\| +{NUMBER} \|",
    "shapes": r"peak resident .*: predicted [\d.]+ GB, measured [\d.]+ GB",
    "memory": rf"\| RL step, gdpo +\| +{NUMBER} \|.*\n\| RL step, justgrpo +\| +{NUMBER} \|",
}


def gpu(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    command = ["bash", "benchmarks/gpu.sh", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGED, ids=" ".join)
def test_a_stage_runs_and_writes_what_it_found(stages, tmp_path):
    done = gpu("--device", "cpu", "--tiny", "--out", tmp_path, *stages)
    written = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert done.returncode == 0, done.stderr + "".join(written.values())
    assert written.keys() == set(stages)
    for stage, text in written.items():
        assert text.startswith(f"stage    {stage}\ndate     20") and f"gpu.sh --device cpu --tiny {stage}\n" in text
        assert "\ndevice   CPU, 1 threads\nversions Python 3." in text and "-m minidrl" in text or "benchmarks/" in text
        assert re.search(SAYS[stage], text), text
        assert re.search(r"\nexit status 0 after \d+ s\n$", text)


def test_the_stage_of_all_rows_refuses_none():
    """The orders that rows are about, and blocks: one row that is refused would end the stage."""
    speed = tiny.script("speed")
    for name in methods.METHODS:
        changes = speed.changes_of(name) | speed.blocks_of(name, 18)
        settings = config.load(config.Train, "tiny_configs/countdown_gpu.yaml", changes)
        assert rehearsal.method_of(settings).name == name


def test_a_stage_that_fails_is_reported_and_the_next_goes_on(tmp_path):
    """An interpreter that knows no minidrl: everything fails, and is written down."""
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "asked for $*"\ncase "$*" in *speed.py*) exit 7;; esac\n')
    interpreter.chmod(0o755)
    done = gpu("--device", "cpu", "--out", tmp_path, "sampler", "caches", "llada", PYTHON=str(interpreter))
    written = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "gpu.sh: failed: sampler"
    assert written.keys() == {"sampler", "caches", "llada"}
    assert "exit status 7 after" in written["sampler"] and "--compile" in written["sampler"].split("\n\n")[1]
    assert written["sampler"].count("asked for benchmarks/speed.py") == 1, "what follows a failure is not run"
    assert "exit status 0 after" in written["caches"] and "asked for benchmarks/llada_8b.py --predict" in written["llada"]


def test_a_signal_ends_the_stage_and_what_it_started(tmp_path):
    """What it started would go on beside the next stage, and nobody would write down how it ended."""
    interpreter, alive = tmp_path / "python", tmp_path / "alive"
    interpreter.write_text(f'#!/bin/sh\n[ "$1" != - ] || exit 0\ntouch {alive}\nsleep 60 &\necho $! >{alive}\nwait\n')
    interpreter.chmod(0o755)
    command = ["bash", "benchmarks/gpu.sh", "--device", "cpu", "--out", str(tmp_path), "caches", "memory"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHON": str(interpreter)}, stderr=subprocess.PIPE) as running:
        deadline = time.monotonic() + 60
        while not (alive.exists() and alive.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        running.terminate()
        said = running.communicate(timeout=60)[1].decode()
    assert running.returncode == 143 and re.fullmatch(r"caches: exit status 143 after \d+ s: stopped by a signal\n", said)
    assert (tmp_path / "caches.txt").read_text().endswith(said.removeprefix("caches: "))
    assert not (tmp_path / "memory.txt").exists()
    status = Path(f"/proc/{int(alive.read_text())}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"  # ended, though not yet reaped


def test_all_stages_are_run_where_none_is_named(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexit 0\n")
    interpreter.chmod(0o755)
    done = gpu("--out", tmp_path, "--tiny", PYTHON=str(interpreter))
    assert [line.split(" -> ")[0] for line in done.stdout.splitlines()] == STAGES
    assert {path.stem for path in tmp_path.glob("*.txt")} == set(STAGES)


def test_a_device_that_is_not_there_is_refused(tmp_path):
    done = gpu("--device", "abacus", "--out", tmp_path, "tests")
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("gpu.sh: --device: got abacus; allowed what torch finds here: RuntimeError")


@pytest.mark.parametrize("mistake", [("tset",), ("--out",), ("--devise", "cpu")], ids=" ".join)
def test_a_mistake_is_one_line(mistake):
    done = gpu(*mistake)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"gpu.sh: {'got ' * (mistake[0] != '--out')}{mistake[0]}")
