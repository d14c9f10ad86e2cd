"""A run survives what happens to machines and users: no saved state is lost, and what goes on equals what was never stopped."""

import contextlib
import csv
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from minidrl import __main__ as cli
from minidrl.run import config, files, report, runs, trainer
from minidrl.run.launch import RunError, stop_requests
from minidrl.tasks.countdown import Countdown
from research import controls

ROOT = Path(__file__).parents[1]


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
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    monkeypatch.setattr(report, "write_curve", lambda out: None)  # tested elsewhere, and slow
    write_config(tmp_path, tiny.settings(base, steps=4, num_iterations=1))
    return tmp_path


def write_config(folder: Path, settings, name: str = "run.yaml") -> None:
    (folder / name).write_text(yaml.safe_dump(config.to_dict(settings)))


def command(capfd, *words: object) -> tuple[int, str]:
    """(exit status, the last line of stderr)."""
    capfd.readouterr()
    status = cli.main([str(word) for word in words])
    error = capfd.readouterr().err
    assert "Traceback" not in error
    return status, (error.strip().splitlines() or [""])[-1]


def train(capfd, out: str, *more: str) -> tuple[int, str]:
    return command(capfd, "train", "run.yaml", "--out", out, *more)


def untimed(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Log, summary, settings and the newest checkpoint's tensors."""
    assert untimed(report.read_metrics(one)) == untimed(report.read_metrics(other))
    assert untimed([runs.read_summary(one)]) == untimed([runs.read_summary(other)]) != [{}]
    assert (one / "config.yaml").read_bytes() == (other / "config.yaml").read_bytes()
    newest = [runs.checkpoint_folders(run)[-1] for run in (one, other)]
    assert newest[0].name == newest[1].name
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(path / name) for path in newest)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def at_step(monkeypatch, number: int, happens) -> None:
    """Something happens in the middle of a step."""
    collect = trainer.Learner.collect

    def during(learner, step, clock):
        found = collect(learner, step, clock)
        if step == number:
            happens()
        return found

    monkeypatch.setattr(trainer.Learner, "collect", during)


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write(path, "one")
    files.write(path, b"two")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(files.WriteError, match="a.json cannot be written: .*No space left on device"):
        files.write(path, "three")
    assert path.read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to, lambda part, mine: part.write_bytes(b"cut off")])
def test_a_file_is_never_written_through_a_link_to_another(make, tmp_path):
    """And what an interruption left of our own is replaced."""
    (mine := tmp_path / "mine").write_text("mine")
    make(tmp_path / "a.json.part", mine)
    files.write(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "new" and not (tmp_path / "a.json").is_symlink()
    assert mine.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "mine"]


def test_a_folder_where_a_file_would_begin_is_refused_and_so_is_a_file_where_a_folder_would(tmp_path):
    (tmp_path / "a.json.part").mkdir()
    (tmp_path / "a.json.part/mine").write_text("mine")
    with pytest.raises(files.WriteError, match="a.json cannot be written: .*/a.json.part is a folder; move it away$"):
        files.write(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json.part/mine").read_text() == "mine" and not (tmp_path / "a.json").exists()
    for writer, part, path in ((files.folder, "b.part", tmp_path / "b"), (files.into, "files.part", tmp_path)):
        (tmp_path / part).write_text("mine")
        with pytest.raises(files.WriteError, match=f"{part} is a file; move it away$"), writer(path):
            pytest.fail("there is no folder to fill")
        assert (tmp_path / part).read_text() == "mine"


def test_no_name_is_given_before_the_bytes_are_on_the_disk(tmp_path, monkeypatch):
    """What a crash of the machine may lose is what was not flushed: every file before its rename, its folder after it."""
    events, fsync, replace = [], os.fsync, os.replace

    def flushed(handle):
        events.append(("flushed", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def renamed(old, new):
        events.append(("renamed", Path(old), Path(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    files.write(tmp_path / "file", "x")
    assert events == [
        ("flushed", tmp_path / "file.part"),
        ("renamed", tmp_path / "file.part", tmp_path / "file"),
        ("flushed", tmp_path),
    ]
    for writer in (files.folder, files.into):
        events.clear()
        with writer(tmp_path / "folder") as part:
            for name in ("a", "b"):
                (part / name).write_text(name)
        names = [number for number, event in enumerate(events) if event[0] == "renamed"]
        on_disk = {event[1].name for event in events[: names[0]] if event[0] == "flushed"}
        if writer is files.folder:
            assert on_disk == {"a", "b", files.SUMS, "folder.part"}
        else:
            assert all(("flushed", event[1]) in events[:number] for number, event in enumerate(events) if event[0] == "renamed")
        assert events[-1] == ("flushed", tmp_path if writer is files.folder else tmp_path / "folder")


@pytest.mark.parametrize("writer", [files.folder, files.into])
def test_the_folders_above_a_new_one_are_made(writer, tmp_path):
    with writer(tmp_path / "new" / "folder") as part:
        (part / "a").write_text("a")
    assert (tmp_path / "new" / "folder" / "a").read_text() == "a"


def test_a_run_of_many_checkpoints_leaves_no_file_open(tmp_path):
    made(tmp_path / "folder")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        made(tmp_path / "folder")
        files.write(tmp_path / "file", "x")
    assert len(os.listdir("/proc/self/fd")) == before


def made(path: Path, text: str = "text") -> Path:
    with files.folder(path) as part:
        (part / "a").write_text(text)
        (part / "b").write_text("same")
    return path


def test_a_folder_says_what_is_in_it_in_the_words_of_sha256sum(tmp_path):
    folder = made(tmp_path / "folder")
    digest = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("a", "b")}
    assert (folder / files.SUMS).read_text() == f"{digest['a']}  a\n{digest['b']}  b\n"
    assert files.damage(folder) == ""


@pytest.mark.parametrize("left", [(), ("folder.part", "folder.old")])
def test_a_folder_takes_the_place_of_the_one_before_and_of_what_an_interruption_left(left, tmp_path):
    folder = made(tmp_path / "folder", "one")
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").write_text("x")
    made(folder, "two")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert files.damage(folder) == "" and (folder / "a").read_text() == "two"


def emptied(folder: Path) -> None:
    for name in "ab":
        (folder / name).unlink()
    (folder / files.SUMS).write_text("")


DAMAGES = {
    "holds no SHA256SUMS": lambda folder: (folder / files.SUMS).unlink(),
    "holds a, which SHA256SUMS does not name": lambda folder: (folder / files.SUMS).write_text(""),
    "lacks a": lambda folder: (folder / "a").unlink(),
    "holds a with other bytes than were written": lambda folder: (folder / "a").write_text("tex\0"),
    "holds c, which SHA256SUMS does not name": lambda folder: (folder / "c").write_text("more"),
    "holds an empty SHA256SUMS": lambda folder: (
        [(folder / name).unlink() for name in "ab"] + [(folder / files.SUMS).write_text("")]
    ),
    "cannot be read: 'utf-8' codec": lambda folder: (folder / files.SUMS).write_bytes(b"\xff"),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damage_is_named(said, tmp_path):
    folder = made(tmp_path / "folder")
    DAMAGES[said](folder)
    assert files.damage(folder).startswith(said)


def test_hidden_files_are_nobodys(tmp_path):
    folder = made(tmp_path / "folder")
    (folder / ".DS_Store").write_text("")
    assert files.damage(folder) == ""


def spoil(path: Path) -> Path:
    (path / "a").write_text("spoilt")
    return path


@pytest.mark.parametrize(
    ("left", "text"),
    [
        ({"x-1.part": "new"}, "new"),  # complete, but for its name
        ({"x-1.part": "new", "x-1.old": "old"}, "new"),  # between the two renames
        ({"x-1": "new", "x-1.old": "old"}, "new"),  # only the removal was missing
        ({"x-1": "old", "x-1.part": "new"}, "old"),  # both whole: of one step they are the same
        ({"x-1": "old", "x-1.part": None}, "old"),
        ({"x-1": None, "x-1.part": "new"}, "new"),
        ({"x-1.old": "old", "x-1.part": None}, "old"),
        ({"x-1": None, "x-1.old": "old"}, "old"),
    ],
)
def test_what_an_interruption_left_is_finished_or_removed(left, text, tmp_path):
    """None: damaged. Wherever one was whole, one is."""
    for name, content in left.items():
        made(tmp_path / "made", content or "spoilt soon").rename(tmp_path / name)
        if content is None:
            spoil(tmp_path / name)
    files.settle(tmp_path, "x-*[0-9]")
    assert [path.name for path in tmp_path.iterdir()] == ["x-1"]
    assert files.damage(tmp_path / "x-1") == "" and (tmp_path / "x-1/a").read_text() == text


def test_a_lock_is_asked_for_in_a_folder_that_exists(tmp_path):
    """Not every filelock makes it."""
    path = tmp_path / "new" / "folder" / "x.lock"
    asked = []
    files.acquire(SimpleNamespace(lock_file=str(path), acquire=lambda timeout: asked.append(path.parent.is_dir())), "out", path)
    assert asked == [True]


def test_nothing_else_is_touched_by_that(tmp_path):
    for name in ("x-1", "notes.part", "x-a.part"):
        (tmp_path / name).mkdir()
    for name in ("x-1.old", "x-3.part"):  # no folders: a user's
        (tmp_path / name).write_text("mine")
    spoil(made(tmp_path / "x-2")).rename(tmp_path / "x-2.old")
    before = sorted(tmp_path.rglob("*"))
    files.settle(tmp_path, "x-*[0-9]")
    assert sorted(tmp_path.rglob("*")) == before


# ----------------------------------------------------------------------------------------------------- before and after


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    for way in ((), ("--resume",)):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            at_step(patch, 2, lambda: 1 / 0)
            train(capfd, "parts", "--steps", "4")
        capfd.readouterr()
        assert cli.main(["train", "run.yaml", "--out", "parts", "--steps", "5", *way]) == 2
        assert "steps: got 5; allowed 4, with which the run in parts was started" in capfd.readouterr().err
        assert cli.main(["train", "run.yaml", "--out", "parts", *way]) == 0
        said = "minidrl: parts holds a run that ended before its first checkpoint; it starts at step 0 again\n"
        assert capfd.readouterr().err.count(said) == 1
        assert_equal_runs(folder / "whole", folder / "parts")
        (folder / "parts").rename(folder / f"parts{len(way)}")


@pytest.mark.parametrize("kept", ["metrics.jsonl", "checkpoint-1/state.json"])
def test_what_a_run_has_computed_stays_where_it_is_refused_later(kept, base, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="^later$"), runs.opened(out, tiny.settings(base), resume=False):
        (out / kept).parent.mkdir(exist_ok=True)
        (out / kept).write_text("{}")
        raise ValueError("later")
    assert (out / kept).read_text() == "{}" and (out / "config.yaml").exists()


def test_a_run_without_its_summary_is_completed_and_nothing_is_done_twice(folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    for spoilt in (None, "", "[1]"):
        (folder / "whole").joinpath("summary.json").rename(folder / "summary")
        if spoilt is not None:
            (folder / "whole/summary.json").write_text(spoilt)
        before = (folder / "whole/metrics.jsonl").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "evaluate", None)
            assert train(capfd, "whole", "--resume")[0] == 0
        assert (folder / "whole/metrics.jsonl").read_bytes() == before
        assert (folder / "whole/summary.json").read_bytes() == (folder / "summary").read_bytes()
    assert train(capfd, "whole", "--resume") == (2, "minidrl: steps: got 4; allowed above 4, where the run in whole stands")


@pytest.mark.parametrize("ending", [files.PART, files.OLD])
def test_a_run_goes_on_from_a_checkpoint_whose_renaming_was_interrupted(ending, folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    (folder / "whole/checkpoint-4").rename(folder / f"whole/checkpoint-4{ending}")
    (folder / "whole/summary.json").unlink()
    monkeypatch.setattr(trainer, "evaluate", None)  # nothing is computed again
    assert train(capfd, "whole", "--resume")[0] == 0
    assert [path.name for path in (folder / "whole").glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_damaged_checkpoint_is_skipped_and_said_so(folder, capfd):
    assert train(capfd, "whole", "--save_every", "1")[0] == 0
    assert train(capfd, "parts", "--save_every", "1")[0] == 0
    (folder / "parts/summary.json").unlink()
    (folder / "parts/checkpoint-4/state.json").write_text('{"step": 3}')
    (folder / "parts/checkpoint-3/optimizer.safetensors").write_bytes(b"")
    (folder / "parts/config.yaml").write_text("")
    (folder / "parts/metrics.jsonl").write_text("[1]\n")
    assert cli.main(["train", "run.yaml", "--out", "parts", "--save_every", "1", "--resume"]) == 0
    wrong = "holds {} with other bytes than were written"
    said = (
        f"skipped: parts/checkpoint-4 {wrong.format('state.json')}; parts/checkpoint-3 {wrong.format('optimizer.safetensors')}"
    )
    assert f"minidrl: {said}. The run goes on from parts/checkpoint-2\n" in capfd.readouterr().err
    assert_equal_runs(folder / "whole", folder / "parts")


def test_where_no_checkpoint_is_whole_nothing_is_changed(folder, capfd):
    assert train(capfd, "whole")[0] == 0
    (folder / "whole/checkpoint-4/state.json").write_text("{}")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, line = train(capfd, "whole", "--resume", "--steps", "6")
    assert status == 2
    assert line.startswith("minidrl: resume: got 'whole', where whole/checkpoint-4 holds state.json with other bytes")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_processes_do_not_write_to_one_run(folder, capfd):
    """The second one gets a line; once the first is dead, however it died, its lock is gone."""
    code = "import time; from filelock import FileLock; lock = FileLock('busy/.lock')\nlock.acquire(); print(1, flush=True)\n"
    code += "time.sleep(99)"
    (folder / "busy").mkdir()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        allowed = "another --out, or wait until that has ended"
        line = f"minidrl: out: got 'busy', to which another process is writing; allowed {allowed}"
        assert train(capfd, "busy") == (2, line)
        assert [path.name for path in (folder / "busy").iterdir()] == [".lock"]
        other.send_signal(signal.SIGKILL)
    assert train(capfd, "busy")[0] == 0


def test_a_run_holds_its_lock_to_the_end(folder, capfd, monkeypatch):
    tries = []
    at_step(monkeypatch, 1, lambda: tries.append(train_in_thread(folder / "run.yaml", "run")))
    assert train(capfd, "run")[0] == 0
    assert len(tries) == 1 and "another process is writing" in tries[0]


def train_in_thread(file: Path, out: str) -> str:
    """What a second run in the same folder is told."""
    told = []

    def second() -> None:
        try:
            with runs.opened(Path(out), config.load(config.Train, file), True):
                told.append("let in")
        except ValueError as error:
            told.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    return told[0]


def test_a_refused_run_leaves_its_folder_free_while_the_error_is_at_hand(base, tmp_path):
    """As a notebook keeps it, with all that it refers to."""
    out, settings = tmp_path / "run", tiny.settings(base)
    (out / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(ValueError, match="which already holds a run") as refused, runs.opened(out, settings, resume=False):
        pass
    (out / "checkpoint-1").rmdir()
    with runs.opened(out, settings, resume=False) as checkpoint:
        assert checkpoint is None and refused.tb is not None


def test_a_folder_that_cannot_be_written_to_is_one_line(folder, capfd, monkeypatch):
    (folder / "file").write_text("")
    status, line = train(capfd, "file/run")
    assert status == 2 and line.startswith("minidrl: out: file/run cannot be written to: ")


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(folder, capfd, monkeypatch):
    assert train(capfd, "whole", "--save_every", "1")[0] == 0
    save = runs.save_file

    def full(tensors, path):
        if "checkpoint-3" in str(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_file", full)
        status, line = train(capfd, "parts", "--save_every", "1")
    assert (status, line) == (2, "minidrl: parts/checkpoint-3 cannot be written: [Errno 28] No space left on device")
    assert sorted(path.name for path in Path("parts").glob("checkpoint*")) == ["checkpoint-1", "checkpoint-2"]
    assert train(capfd, "parts", "--save_every", "1", "--resume")[0] == 0
    assert_equal_runs(folder / "whole", folder / "parts")


# ------------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_to_stop_ends_its_step_and_saves(number, status, folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: signal.raise_signal(number))
        said = "minidrl: stopped after 2 of 4 steps; parts/checkpoint-2 is saved; the same command with --resume goes on"
        assert train(capfd, "parts") == (status, said)
    assert signal.getsignal(number) is before
    assert train(capfd, "parts", "--resume")[0] == 0
    assert_equal_runs(folder / "whole", folder / "parts")


def test_a_run_can_be_stopped_before_its_first_step(folder, capfd, monkeypatch):
    assert train(capfd, "whole")[0] == 0
    evaluate = trainer.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", lambda *a, **k: signal.raise_signal(signal.SIGINT) or evaluate(*a, **k))
        assert train(capfd, "parts")[0] == 130
    assert Path("parts/checkpoint-0").is_dir()
    assert train(capfd, "parts", "--resume")[0] == 0
    assert_equal_runs(folder / "whole", folder / "parts")


def test_the_second_time_it_stops_at_once(folder, capfd, monkeypatch):
    at_step(monkeypatch, 1, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    status, line = train(capfd, "run", "--save_every", "1")
    assert (status, line) == (130, "minidrl: interrupted; the same command with --resume goes on")
    assert [path.name for path in Path("run").glob("checkpoint*")] == ["checkpoint-1"]


def test_pretraining_can_be_stopped_too(folder, capfd, monkeypatch):
    write_config(folder, tiny.pretraining(steps=4), "base.yaml")
    assert command(capfd, "pretrain", "base.yaml", "--out", "whole")[0] == 0
    draw, calls = trainer.elbo_loss, []

    def third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return draw(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "elbo_loss", third)
        status, line = command(capfd, "pretrain", "base.yaml", "--out", "parts")
    assert status == 130 and "stopped after 3 of 4 steps; parts/checkpoint-3 is saved" in line
    assert [path.name for path in (folder / "parts").glob("checkpoint-*")] == ["checkpoint-3"]
    assert config.load(config.Pretrain, folder / "parts/config.yaml").save_every == 0
    assert command(capfd, "pretrain", "base.yaml", "--out", "parts", "--resume", "--save_every", "5")[0] == 0
    assert config.load(config.Pretrain, folder / "parts/config.yaml").save_every == 5
    a, b = (load_file(folder / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert untimed(report.read_metrics(folder / "whole")) == untimed(report.read_metrics(folder / "parts"))


def pretraining_begun(folder: Path, workers: int) -> subprocess.Popen:
    """A pre-training in a process group of its own, after its first step."""
    write_config(folder, tiny.pretraining(steps=10**6, workers=workers), "base.yaml")
    words = [sys.executable, "-m", "minidrl", "pretrain", "base.yaml", "--out", "run"]
    quiet = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    told = {"start_new_session": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(words, cwd=folder, env=quiet, **told)
    for line in run.stderr:  # tqdm ends its lines by a carriage return
        if "loss=" in line:
            break
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_a_whole_group_leaves_the_worker_processes_at_work(number, status, tmp_path):
    """Ctrl-C, and a scheduler's SIGTERM, reach them too; the run ends its step and saves, and no process is left."""
    run = pretraining_begun(tmp_path, workers=2)
    os.killpg(run.pid, number)
    said = run.communicate(timeout=60)[1].splitlines()[-1]
    assert run.returncode == status and "is saved; the same command with --resume goes on" in said
    for _ in range(100):
        try:
            os.killpg(run.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process is left")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), ConnectionResetError(104, "reset"), EOFError()],
)
def test_a_worker_process_that_is_killed_ends_the_run_with_what_to_do(error, tmp_path, monkeypatch):
    """What torch was seen to raise when one was; without workers it is none of them."""

    def broken(*_):
        raise error
        yield

    monkeypatch.setattr(trainer, "demonstration_rollouts", broken)
    with pytest.raises(RunError, match="a process that makes demonstrations was ended .* --resume goes on"):
        trainer.pretrain(tiny.pretraining(workers=1), tmp_path / "one")
    with pytest.raises(type(error)):
        trainer.pretrain(tiny.pretraining(), tmp_path / "none")


def test_signals_are_left_alone_where_they_are_ignored_and_outside_the_main_thread():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests() as asked:
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and asked() == 0
    finally:
        signal.signal(signal.SIGINT, before)
    handlers = []

    def elsewhere() -> None:
        with stop_requests():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [before]


@pytest.mark.parametrize("error", [None, OSError("disk full")])
def test_after_a_run_signals_act_as_they_did_before(error):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.suppress(OSError), stop_requests():
        assert all(signal.getsignal(number) is not how for number, how in before.items())
        if error:
            raise error
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_comes_too_late_for_a_run_reaches_the_study_that_started_it(number, capfd):
    with stop_requests() as study:
        with stop_requests() as run:
            assert not run()
            os.kill(os.getpid(), number)
            assert run() == number and not study()
        assert study() == number
    with stop_requests() as alone:
        os.kill(os.getpid(), number)
        assert alone() == number


# -------------------------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"learning_rate": 1e38}, "learning rate 1e\\+38 is too large for an update in float32"),
        ({"learning_rate": 3e37, "weight_decay": 100.0}, "learning rate 3e\\+37 is too large"),
        (
            {"learning_rate": 3e38, "beta1": 0.0, "weight_decay": 1.0},
            "the largest weight is inf after an update at rate 3e\\+38",
        ),
    ],
)
@pytest.mark.parametrize("updates", [1, 2])
def test_weights_that_overflow_stop_the_run_with_a_dump_from_before(optimizer, said, updates, base, folder):
    """Also after the last update of the last step, which no forward follows."""
    settings = tiny.settings(base, steps=1, num_iterations=updates, optimizer=config.Optimizer(**optimizer))
    with pytest.raises(RunError, match=f"^step 0: {said}.*; stopped. {folder / 'run'}/failed-0 holds"):
        trainer.train(settings, folder / "run")
    dump, start = (load_file(path / "model.safetensors") for path in (folder / "run/failed-0", base))
    assert all(torch.equal(dump[key], start[key]) for key in start)
    moments = load_file(folder / "run/failed-0/optimizer.safetensors")
    assert all((value == 0).all() for value in moments.values())
    with pytest.raises(RunError, match=f"^{said}"):
        trainer.repeat_step(folder / "run", folder / "run/failed-0")


@pytest.mark.parametrize("rate", [1e38, 3e38])
def test_so_does_pretraining(rate, folder):
    """A rate that is refused before the update, and one whose update overflows."""
    decay = {"beta1": 0.0, "weight_decay": 1.0} if rate == 3e38 else {}
    fine = tiny.pretraining(steps=1, save_every=1)
    trainer.pretrain(dataclasses.replace(fine, optimizer=config.Optimizer(learning_rate=1e-30)), folder / "start")
    settings = dataclasses.replace(fine, optimizer=config.Optimizer(learning_rate=rate, **decay))
    with pytest.raises(RunError, match=f"^step 0: .* rate {rate:g}.*; stopped. .*failed-0 holds weights".replace("+", "\\+")):
        trainer.pretrain(settings, folder / "run")
    dump, start = (load_file(path / "model.safetensors") for path in (folder / "run/failed-0", folder / "start/checkpoint-1"))
    assert all(torch.allclose(dump[key], start[key], atol=1e-20) for key in start)


def test_usual_rates_cost_no_copy(base, folder, monkeypatch):
    """A copy of weights and optimiser before each step is for runs that need one."""
    monkeypatch.setattr(trainer, "_copied", None)
    trainer.train(tiny.settings(base, steps=1, num_iterations=1), folder / "run")
    assert not trainer.may_overflow(config.Optimizer(learning_rate=1.0, weight_decay=1.0, max_grad_norm=100.0))
    assert trainer.may_overflow(config.Optimizer(learning_rate=1e25))
    assert trainer.may_overflow(config.Optimizer(learning_rate=1.0, weight_decay=3.0))


# ------------------------------------------------------------------------------------------------- compare and controls


def test_a_resumed_comparison_equals_the_uninterrupted_one(folder, capfd, monkeypatch):
    words = ("compare", "run.yaml", "--methods", "reinforce,grpo", "--seeds", "2", "--steps", "2", "--jobs", "1")
    assert command(capfd, *words, "--out", "whole")[0] == 0
    collect, calls = trainer.Learner.collect, []

    def stop_at(number: int) -> None:
        def during(learner, step, clock):
            calls.append(1)
            if len(calls) == number:
                signal.raise_signal(signal.SIGINT)
            return collect(learner, step, clock)

        monkeypatch.setattr(trainer.Learner, "collect", during)

    stop_at(3)  # in the first step of the second run
    status, line = command(capfd, *words, "--out", "parts")
    assert status == 130 and "/checkpoint-1 is saved" in line and line.endswith("; the same command goes on")
    monkeypatch.setattr(trainer.Learner, "collect", collect)
    assert command(capfd, *words, "--out", "parts")[0] == 0
    for name in (f"{method}-1e-3-1-{seed}" for method in ("reinforce", "grpo") for seed in (0, 1)):
        assert_equal_runs(folder / "whole" / name, folder / "parts" / name)
    for name in ("ledger.csv", "curves.csv"):
        whole, parts = (list(csv.DictReader((folder / out / name).read_text().splitlines())) for out in ("whole", "parts"))
        assert untimed(whole) == untimed(parts) and len(whole) == (4 if name == "ledger.csv" else 8)


def test_controls_that_cannot_be_read_are_measured_again(folder, capfd, monkeypatch):
    assert train(capfd, "run")[0] == 0
    assert command(capfd, "controls", "run")[0] == 0
    first = (folder / "run/controls.json").read_bytes()
    (folder / "run/controls.json").write_bytes(first[:40])
    assert command(capfd, "controls", "run")[0] == 0
    assert (folder / "run/controls.json").read_bytes() == first
    assert controls.read(folder / "run") == json.loads(first)


@pytest.mark.parametrize("at", [1, 3, 9, 20])
def test_controls_that_were_interrupted_are_those_that_never_were(at, folder, capfd, monkeypatch):
    """In the first measurement, in the middle, in the self-training and in one of the last."""
    assert train(capfd, "run")[0] == 0
    shutil.copytree("run", "parts")
    assert command(capfd, "controls", "run")[0] == 0
    generate, calls = trainer.sampler.generate, []

    def interrupted(*words, **how):
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return generate(*words, **how)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.sampler, "generate", interrupted)
        assert command(capfd, "controls", "parts") == (130, "minidrl: interrupted; the same command goes on")
    assert len(calls) == at and not list(Path("parts").glob("controls.json*"))
    assert command(capfd, "controls", "parts")[0] == 0
    assert (folder / "parts/controls.json").read_bytes() == (folder / "run/controls.json").read_bytes()


def test_each_control_is_of_the_network_the_temperature_and_the_order_that_its_name_says(base, tmp_path, monkeypatch):
    settings = tiny.settings(base, steps=4)

    def asked(model, tok, given, temperature, samples=1, **changes):
        assert given == settings
        return dict.fromkeys(("solved", "pass@8") if samples == 8 else ("solved",), [model, temperature, samples, changes])

    monkeypatch.setattr(controls, "solved", asked)
    monkeypatch.setattr(controls.config, "of_run", lambda kind, run: settings)
    monkeypatch.setattr(controls.checkpoints, "load", lambda path: (str(Path(path).name), None))
    monkeypatch.setattr(controls, "self_training", lambda given: SimpleNamespace(model="trained"))
    want = {f"base, temperature {t:g}": ["base", t, 1, {}] for t in (0.0, 0.3, 0.5, 0.7, 1.0)}
    orders = {"random", "low_confidence", "left_to_right", "right_to_left"} - {settings.sampler.order}
    want |= {f"base, {o}, temperature {t:g}": ["base", t, 1, {"order": o}] for o in orders for t in (0.0, 1.0)}
    for name, model in {"after RL": "checkpoint-4", "self-training": "trained"}.items():
        want |= {f"{name}, temperature 1": [model, 1.0, 1, {}], f"{name}, greedy": [model, 0.0, 1, {}]}
    want |= {"base, pass@8": ["base", 1.0, 8, {}], "after RL, pass@8": ["checkpoint-4", 1.0, 8, {}]}
    assert controls.measure(tmp_path) == want == json.loads((tmp_path / "controls.json").read_text())


def test_a_pipe_where_a_file_is_being_written_is_replaced(tmp_path):
    os.mkfifo(pipe := tmp_path / "file.part")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # else a wrong writer would wait for one
    files.write(tmp_path / "file", "new")
    os.close(reader)
    assert (tmp_path / "file").is_file() and (tmp_path / "file").read_text() == "new"


def test_what_is_not_there_is_removed_without_a_word(tmp_path):
    files.remove(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    files.remove(tmp_path / "file")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- campaign


def test_a_sample_of_the_campaign_loses_nothing():
    """`make chaos` runs all of it; here some of each kind, in processes that are really ended."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests/chaos.py", "--quick", "--json"], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["wrong"] == []
    assert len(found["rows"]) == 11 and all(row["cases"] > 0 for row in found["rows"])
    assert all(row.get("equal", 0) > 0 or row.get("skipped") for row in found["rows"])
