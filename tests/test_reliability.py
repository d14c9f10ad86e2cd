"""A run survives what happens to machines and users: nothing saved is lost, and what goes on equals what was never stopped."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from minidrl import __main__ as cli
from minidrl.run import checkpoints, config, folders, report
from minidrl.tasks import Verdict
from minidrl.tasks.countdown import Countdown

RESUMED = ("--resume",)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("reliability") / "base")


@pytest.fixture(autouse=True)
def keyboard():
    """Ctrl-C is heard, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(base, tmp_path, monkeypatch) -> Path:
    """A working directory with a config of four steps; rewards are made up, so that each step learns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Countdown, "judge", tiny.varied_judge)
    monkeypatch.setattr(report, "write_curve", lambda out: None)  # tested elsewhere, and slow
    write_config(tmp_path, tiny.settings(base, steps=4, num_iterations=1))
    return tmp_path


def write_config(folder: Path, settings, name: str = "run.yaml") -> None:
    (folder / name).write_text(yaml.safe_dump(config.to_dict(settings)))


def train(capfd, out: str, *more: str) -> tuple[int, str]:
    """(exit status, the last line of stderr)."""
    return command(capfd, "train", "run.yaml", "--out", out, *more)


def command(capfd, *words: str) -> tuple[int, str]:
    capfd.readouterr()
    status = cli.main(list(words))
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return status, (said.strip().splitlines() or [""])[-1]


def at_step(monkeypatch, number: int, happens: Callable[[], object]) -> None:
    """Something happens in the middle of a step, counted from 0, of a training that evaluates at its ends only."""
    per_step, calls, evaluated = tiny.GROUPS * tiny.GENERATIONS, [], 4

    def judge(task, puzzle, response) -> Verdict:
        calls.append(1)
        if len(calls) == evaluated + number * per_step + 1:
            happens()
        return tiny.varied_judge(task, puzzle, response)

    monkeypatch.setattr(Countdown, "judge", judge)


def untimed(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Log, summary, settings, and the tensors of every checkpoint that both have, among them the last."""
    assert untimed(folders.read_metrics(one)) == untimed(folders.read_metrics(other))
    assert untimed([folders.read_summary(one)]) == untimed([folders.read_summary(other)]) != [{}]
    assert (one / "config.yaml").read_bytes() == (other / "config.yaml").read_bytes()
    names = [[path.name for path in folders.checkpoint_folders(run)] for run in (one, other)]
    assert names[0][-1] == names[1][-1]
    for name in set(names[0]) & set(names[1]):
        for file in ("model.safetensors", "optimizer.safetensors"):
            a, b = (load_file(run / name / file) for run in (one, other))
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    folders.write(path, "one")
    folders.write(path, b"two")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="a.json cannot be written: .*No space left on device"):
        folders.write(path, "three")
    assert path.read_text() == "two"


@pytest.mark.parametrize("writer", [folders.folder, folders.into])
def test_no_name_is_given_before_the_bytes_are_on_the_disk(writer, tmp_path, monkeypatch):
    """What a crash of the machine may lose is what was not flushed: every file before its rename, its folder after it."""
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(flushed(handle)) or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda old, new: events.append(("renamed", Path(old).name)) or replace(old, new))
    flushed = lambda handle: ("flushed", Path(os.readlink(f"/proc/self/fd/{handle}")).name)  # noqa: E731
    with writer(tmp_path / "folder") as part:
        for name in ("a", "b"):
            (part / name).write_text(name)
    assert ("flushed", "a") in events and ("flushed", "b") in events
    for number, (what, name) in enumerate(events):
        assert what == "flushed" or ("flushed", name) in events[:number]
    assert events[-1] == ("flushed", tmp_path.name if writer is folders.folder else "folder")


# --------------------------------------------------------------------------------------------------------- going on


def test_what_is_there_is_not_overwritten_and_what_is_not_there_is_not_resumed(folder, capfd, monkeypatch):
    assert train(capfd, "run")[0] == 0
    assert train(capfd, "run.yaml/run")[1].startswith("minidrl: out: run.yaml/run cannot be written to: ")
    monkeypatch.setattr(checkpoints, "load", None)  # it is refused before anything is loaded
    allowed = "allowed another --out, or --resume to continue it"
    assert train(capfd, "run") == (2, f"minidrl: out: got 'run', which already holds a run or other files; {allowed}")
    status, line = train(capfd, "run", *RESUMED, "--steps", "9", "--seed", "7")
    assert status == 2 and line.startswith("minidrl: seed: got 7; allowed 0, with which the run in run/checkpoint-")
    said = "minidrl: resume: got 'nothing', which holds no checkpoint; allowed the folder of a run"
    assert train(capfd, "nothing", *RESUMED) == (2, said)
    (folder / "mine").mkdir()
    (folder / "mine/notes.txt").write_text("mine")
    assert train(capfd, "mine") == (
        2,
        "minidrl: out: got 'mine', which already holds a run or other files; allowed another --out",
    )


def test_the_steps_are_kept_whatever_the_last_evaluation_meets(folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 4, lambda: 1 / 0)
        train(capfd, "parts")
    assert train(capfd, "parts", *RESUMED)[0] == 0
    assert_equal_runs(folder / "whole", folder / "parts")


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 2, lambda: 1 / 0)
        train(capfd, "parts")
    assert "steps: got 5; allowed 4, with which the run in parts was started" in train(capfd, "parts", "--steps", "5")[1]
    assert train(capfd, "parts")[0] == 0
    assert_equal_runs(folder / "whole", folder / "parts")


def test_a_run_without_its_summary_is_completed_and_nothing_is_done_twice(folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    summary, metrics = Path("whole/summary.json").read_bytes(), Path("whole/metrics.jsonl").read_bytes()
    Path("whole/summary.json").write_text("")
    monkeypatch.setattr(Countdown, "judge", None)
    assert train(capfd, "whole", *RESUMED)[0] == 0
    assert (Path("whole/summary.json").read_bytes(), Path("whole/metrics.jsonl").read_bytes()) == (summary, metrics)


HALF = lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # noqa: E731
DAMAGES = {"model.safetensors": HALF, "optimizer.safetensors": HALF, "state.json": HALF, "config.yaml": Path.unlink}


@pytest.mark.parametrize("file", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_is_taken(file, folder, capfd):
    if not (done := folder.parent / "damaged").exists():
        assert train(capfd, str(done), "--save_every", "2")[0] == 0
    shutil.copytree(done, "parts")
    Path("parts/summary.json").unlink()
    DAMAGES[file](Path("parts/checkpoint-4") / file)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, line = train(capfd, "parts", "--save_every", "2", *RESUMED)
    assert status == 2 and "parts/checkpoint-4" in line
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree("parts/checkpoint-4")
    assert train(capfd, "parts", "--save_every", "2", *RESUMED)[0] == 0
    assert_equal_runs(done, folder / "parts")


def test_two_processes_do_not_write_to_one_run(folder, capfd, monkeypatch):
    told = []

    def second() -> None:
        with pytest.raises(
            ValueError, match="run', to which another process is writing; allowed another --out, or wait for it$"
        ):
            with folders.opened(Path("run"), config.load(config.Train, folder / "run.yaml"), True):
                pass
        told.append("no")

    def elsewhere() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    at_step(monkeypatch, 1, elsewhere)
    assert train(capfd, "run")[0] == 0 and told == ["no"]


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(folder, capfd, monkeypatch):
    assert train(capfd, "whole", "--save_every", "1")[0] == 0
    save = folders.save_file

    def full(tensors, path):
        if "checkpoint-3" in str(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "save_file", full)
        status, line = train(capfd, "parts", "--save_every", "1")
    assert status == 2 and line.startswith("minidrl: parts/checkpoint-3 cannot be written: [Errno 28] No space left")
    assert sorted(path.name for path in Path("parts").glob("checkpoint*")) == ["checkpoint-1", "checkpoint-2"]
    assert train(capfd, "parts", "--save_every", "1", *RESUMED)[0] == 0
    assert_equal_runs(folder / "whole", folder / "parts")


# ---------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(number, status, folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: signal.raise_signal(number))
        got, line = train(capfd, "parts")
    assert got == status and "stopped after 2 of 4 steps; parts/checkpoint-2 is saved; with --resume it goes on" in line
    assert signal.getsignal(number) is before
    assert train(capfd, "parts", *RESUMED)[0] == 0
    assert_equal_runs(folder / "whole", folder / "parts")


def test_the_second_time_it_stops_at_once(folder, capfd, monkeypatch):
    at_step(monkeypatch, 1, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    status, line = train(capfd, "run", "--save_every", "1")
    assert (status, line) == (130, "minidrl: interrupted; with --resume it goes on from a checkpoint")
    assert [path.name for path in Path("run").glob("checkpoint*")] == ["checkpoint-1"]


@pytest.mark.slow
def test_a_signal_to_a_whole_group_leaves_the_worker_processes_at_work(tmp_path):
    """Ctrl-C reaches them too, even while they start; the run ends its step and saves, and no process is left."""
    write_config(tmp_path, tiny.pretraining(steps=10**6, workers=2), "base.yaml")
    words = [sys.executable, "-m", "minidrl", "pretrain", "base.yaml", "--out", "run"]
    quiet = {**os.environ, "PYTHONPATH": str(tiny.ROOT), "PYTHONUNBUFFERED": "1"}
    told = {"start_new_session": True, "stdout": subprocess.DEVNULL, "text": True}
    run = subprocess.Popen(words, cwd=tmp_path, env=quiet, stderr=subprocess.PIPE, **told)
    children, deadline = Path(f"/proc/{run.pid}/task/{run.pid}/children"), time.monotonic() + 120
    while len(children.read_text().split()) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # until both workers are there, beside Python's own tracker of shared memory
    os.killpg(run.pid, signal.SIGINT)
    said = run.communicate(timeout=180)[1].splitlines()[-1]
    assert run.returncode == 130 and "is saved; with --resume it goes on from a checkpoint" in said
    for _ in range(100):
        try:
            os.killpg(run.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process is left")


# ------------------------------------------------------------------------------------------------------------- kill -9


@contextlib.contextmanager
def counted(out: Path, done: list[str], kill_at: int = -1) -> Iterator[None]:
    """File operations below ``out``, in order; before the one with number ``kill_at`` the process is gone."""
    changes = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}

    def audit(event: str, words: tuple) -> None:
        what = event in changes or (event == "open" and words[1] not in ("r", "rb", None))
        if what and str(words[0]).startswith(out.name):
            if len(done) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(f"{event} {words[1] if event == 'os.rename' else words[0]}")

    sys.addaudithook(audit)
    yield


def forked(call: Callable[[], object]) -> int:
    """The exit status of a call in a process of its own."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os._exit(call() or 0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_of_ten_points_loses_nothing(folder):
    words = ["train", "run.yaml", "--save_every", "2", "--out"]
    assert forked(lambda: cli.main([*words, "whole"])) == 0

    def start(out: str, kill_at: int = -1) -> list[str]:
        """The file operations of a run, as far as it came."""

        def run() -> None:
            done = []
            with counted(folder / out, done, kill_at):
                cli.main([*words, out])
            Path("done").write_text(json.dumps(done))

        status = forked(run)
        assert status == (0 if kill_at < 0 else -signal.SIGKILL)
        return json.loads(Path("done").read_text())

    done = start("counted")
    saved = re.compile(r"os.rename \S+/(checkpoint-\d+)$")
    assert {match[1] for match in map(saved.match, done) if match} >= {"checkpoint-2"} and len(done) > 30
    renames = [number for number, line in enumerate(done) if line.startswith("os.rename")]
    for point in sorted({*renames[-6:], *range(0, len(done), len(done) // 4)})[:10]:
        out = f"killed-{point}"
        start(out, point)
        due = {match[1] for match in map(saved.match, done[:point]) if match}
        again = RESUMED if folders.checkpoint_folders(folder / out) else ()
        assert bool(due) <= bool(again)
        assert forked(lambda out=out, again=again: cli.main([*words, out, *again])) == 0, done[point]
        assert {path.name for path in folders.checkpoint_folders(folder / out)} >= due
        assert_equal_runs(folder / "whole", folder / out)
