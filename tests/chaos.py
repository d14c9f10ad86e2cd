"""Faults against tiny runs, and what is left of them: `python tests/chaos.py`, which is `make chaos`.

A run is ended at a file operation, at a random moment or by a full disk, or its folder is damaged. Then the same command goes
on, with --resume where there is a checkpoint, until the run has finished or the command says why it cannot. What is then on
disk must equal what a run leaves to which nothing happened: weights, optimiser, settings, log and summary, but for seconds.

    equal      it finished, and everything is equal
    refused    one line that names the file, exit status 2, and no whole checkpoint is gone; allowed only where none is left
    LOST       it neither goes on nor may refuse, or a whole checkpoint is gone
    DIFFERENT  it finished with something else
    TRACEBACK  an error that is not one line

Torch is imported once: each attempt is a fork of this process, which has one thread.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # threads do not survive a fork

import safetensors.torch
import yaml

import tiny
from minidrl import __main__ as cli
from minidrl.run import config, files, report, runs, trainer
from minidrl.tasks.countdown import Countdown

ENDED = 77  # exit status of a process that ended itself
COMPARED = ("model.safetensors", "adapter_model.safetensors", "optimizer.safetensors", "config.yaml")
Outcome = tuple[str, str]  # (equal, refused, LOST, ...; what was said or found)


@dataclass(frozen=True)
class Run:
    """A verb with its config file, and the folder in which its runs are made."""

    verb: str
    settings: config.Train | config.Pretrain
    work: Path

    def __post_init__(self):
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "run.yaml").write_text(yaml.safe_dump(config.to_dict(self.settings)))

    def start(self, out: Path) -> int:
        """What a user does, with --resume where there is a checkpoint; the exit status."""
        again = ["--resume"] if runs.has_checkpoint(out) else []
        return cli.main([self.verb, str(self.work / "run.yaml"), "--out", str(out), *again])

    def expected(self) -> dict:
        """What the run leaves to which nothing happens."""
        out = self.work / "expected"
        if not out.exists():
            status, said = forked(lambda: self.start(out))
            assert status == 0, said
        return content(out)


def train(work: Path, **changes) -> Run:
    """Four steps of RL, a checkpoint and an evaluation after two."""
    words = {"steps": 4, "save_every": 2, "num_iterations": 1, "num_prompts": 2, "num_generations": 2}
    words |= {"evaluate": config.Evaluation(n=2, every=2)}
    return Run("train", tiny.settings(tiny.checkpoint(work / "base"), **{**words, **changes}), work)


def pretrain(work: Path) -> Run:
    """Four steps of pre-training, a checkpoint after two."""
    return Run("pretrain", tiny.pretraining(steps=4, save_every=2), work)


# ------------------------------------------------------------------------------------------------------------ in a process
def forked(call: Callable[[], int | None], seconds: float = 60.0) -> tuple[int, str]:
    """(exit status, what was written to stderr) of a call in a process of its own, killed after so many seconds."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                os._exit(call() or 0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        deadline = time.monotonic() + seconds
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
            time.sleep(0.002)
        said.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), said.read()


def last_line(said: str) -> str:
    """Of what was written to stderr."""
    return (said.strip().splitlines() or [""])[-1]


@contextlib.contextmanager
def operations(out: Path, at: int) -> Iterator[list[str]]:
    """The file operations below ``out`` that follow, in order; the process ends before the one with number ``at``."""
    seen: list[str] = []

    def count(what: str, path: object) -> None:
        if str(path).startswith(str(out)):
            if len(seen) == at:
                os._exit(ENDED)
            seen.append(f"{what} {path}")

    changes = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}

    def audit(event: str, arguments: tuple) -> None:
        if event in changes or (event == "open" and arguments[1] not in ("r", "rb", None)):
            count(event, arguments[0])

    fsync, save = os.fsync, safetensors.torch.serialize_file  # of which Python's audit does not hear

    def counted_fsync(handle: int) -> None:
        count("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def counted_save(tensors: dict, path: object, *more, **words) -> None:
        count("serialize", path)
        save(tensors, path, *more, **words)

    sys.addaudithook(audit)
    os.fsync, safetensors.torch.serialize_file = counted_fsync, counted_save
    yield seen


# ------------------------------------------------------------------------------------------------------------ what is left
def content(out: Path) -> dict:
    """What a finished run left, but for seconds."""
    untimed = lambda row: {key: value for key, value in row.items() if not key.startswith("seconds")}  # noqa: E731
    found: dict = {"metrics": [untimed(row) for row in report.read_metrics(out)], "summary": untimed(runs.read_summary(out))}
    found |= {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.name in COMPARED}
    return found | {"curve.png": (out / "curve.png").is_file()}


def finished(run: Run, out: Path, may_refuse: bool = False) -> Outcome:
    """Go on until the run has finished, or says why it cannot."""
    whole = [path for path in runs.checkpoint_folders(out) if not files.damage(path)]
    if not runs.read_summary(out):
        status, said = forked(lambda: run.start(out))
        line = last_line(said)
        if "Traceback" in said:
            return "TRACEBACK", said.strip()[-400:]
        if status == 2 and line.startswith("minidrl: ") and may_refuse and not any(map(files.damage, whole)):
            return "refused", line
        if status:
            return "LOST", f"status {status}: {line}"
    expected, found = run.expected(), content(out)
    spoilt = tuple(path.name + "/" for path in runs.checkpoint_folders(out)[:-1] if files.damage(path))  # they may stay so
    keys = [key for key in sorted(expected.keys() | found.keys()) if expected.get(key) != found.get(key)]
    keys = [key for key in keys if not key.startswith(spoilt)]
    return ("DIFFERENT", ", ".join(keys)) if keys else ("equal", "")


# --------------------------------------------------------------------------------------------------------------- the faults
def crashes(run: Run, begin: Callable[[Run, Path], None], every: int = 1) -> Iterator[Outcome]:
    """What is left after ``begin`` ended at each file operation of its continuation."""
    run.expected()
    begin(run, run.work / "counted")
    with tempfile.NamedTemporaryFile("w+") as told:

        def counted() -> None:
            with operations(run.work / "counted", -1) as seen:
                run.start(run.work / "counted")
            Path(told.name).write_text("\n".join(seen))

        forked(counted)
        done = Path(told.name).read_text().splitlines()
    for number in range(every // 2, len(done), every):
        out = run.work / f"crash-{number}"
        begin(run, out)

        def ended(number: int = number, out: Path = out) -> None:
            with operations(out, number):
                run.start(out)

        forked(ended)
        outcome, said = finished(run, out)
        yield outcome, f"before {done[number].replace(str(run.work), '')}: {said}"
        shutil.rmtree(out)
    shutil.rmtree(run.work / "counted")


def fresh(run: Run, out: Path) -> None:
    """Nothing has begun."""


def after_step_3(run: Run, out: Path) -> None:
    """Killed as the fourth step began, between two checkpoints."""

    def killed() -> None:
        step = trainer.optimizer_step
        calls: list[int] = []

        def fourth(*arguments) -> float:
            calls.append(1)
            return step(*arguments) if len(calls) < 4 else os._exit(ENDED)

        trainer.optimizer_step = fourth
        run.start(out)

    forked(killed)


def without_summary(run: Run, out: Path) -> None:
    """All is done but the summary."""
    shutil.copytree(run.work / "expected", out)
    (out / "summary.json").unlink()


def without_newest(run: Run, out: Path) -> None:
    """The newest checkpoint is damaged: the run goes on from the one before, and replaces it."""
    without_summary(run, out)
    newest = runs.checkpoint_folders(out)[-1]
    (newest / "state.json").write_text("{}")


def kills(run: Run, count: int, seed: int = 0) -> Iterator[Outcome]:
    """SIGKILL at random moments, one to three in a run."""
    rng, started = random.Random(seed), time.monotonic()
    run.expected()
    took, done, number = time.monotonic() - started, 0, 0
    while done < count:
        out, number = run.work / f"kill-{number}", number + 1
        moments = [rng.uniform(0, took) for _ in range(min(rng.randint(1, 3), count - done))]
        for moment in moments:
            if not runs.read_summary(out):
                forked(lambda out=out: run.start(out), seconds=moment)
        done += len(moments)
        outcome, said = finished(run, out)
        yield outcome, f"killed after {moments} s: {said}"
        shutil.rmtree(out)


TWINS = {"checkpoint-2": "checkpoint-4", "checkpoint-4": "checkpoint-2"}


def _swap(path: Path) -> None:
    # With its twin in the other checkpoint; a file without one becomes something else.
    twin = path.parents[1] / TWINS.get(path.parent.name, "") / path.name
    if path.parent.name not in TWINS or not twin.is_file():
        path.write_text("[1]\n")
        return
    mine, other = path.read_bytes(), twin.read_bytes()
    path.write_bytes(other)
    twin.write_bytes(mine)


def _zero_tail(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "zero-tailed": _zero_tail,
    "removed": lambda path: path.unlink(),
    "swapped": _swap,
}


def damages(run: Run, every: int = 1) -> Iterator[Outcome]:
    """Each file of a run damaged in each way, in one checkpoint and in both; all is done but the summary."""
    run.expected()
    done = run.work / "expected"
    names = sorted(path.relative_to(done) for path in done.rglob("*") if path.is_file())
    cases = [(name, how, places(name, how)) for name in names for how in DAMAGES]
    cases = [(name, how, folders) for name, how, several in cases for folders in several]
    for name, how, folders in cases[::every]:
        out = run.work / "damaged"
        shutil.copytree(done, out)
        if name.name != "summary.json":
            (out / "summary.json").unlink()
        for folder in folders:
            DAMAGES[how](out / folder / name.name)
        lost = all(map(files.damage, runs.checkpoint_folders(out)))
        outcome, said = finished(run, out, may_refuse=lost)
        yield outcome, f"{name} {how}{' in both' * (len(folders) > 1)}: {said}"
        shutil.rmtree(out)


def places(name: Path, how: str) -> list[tuple[str, ...]]:
    """The folders in which a file is damaged at the same time."""
    if not name.parts[0].startswith("checkpoint-"):
        return [(str(name.parent),)]
    both = [("checkpoint-2", "checkpoint-4")] if name.parts[0] == "checkpoint-4" and how != "swapped" else []
    return [(name.parts[0],), *both]


def full_disks(run: Run, count: int) -> Iterator[Outcome]:
    """A disk that fills up: one line, no half checkpoint; once there is room, the run goes on."""
    run.expected()
    size = sum(path.stat().st_size for path in (run.work / "expected").rglob("*") if path.is_file()) // 1024
    for kilobytes in range(8, size, max(1, size // count)):
        with disk(run.work / "disk", kilobytes) as mounted:
            if not mounted:
                yield "skipped", "no disk of a given size can be mounted here"
                return
            out = run.work / "disk/run"
            status, said = forked(lambda out=out: run.start(out))
            line = last_line(said)
            left = [str(path) for path in out.rglob("*.part")] if out.exists() else []
            enlarge(run.work / "disk")
            outcome, found = finished(run, out)
        if "Traceback" in said:
            outcome, found = "TRACEBACK", said.strip()[-400:]
        elif status and (status != 2 or "cannot be written" not in line or left):
            outcome, found = "LOST", f"status {status}, {line} {left}"
        yield outcome, f"{kilobytes} kB, {line}: {found}"


def read_only(run: Run) -> Iterator[Outcome]:
    """A folder that cannot be written to, for a new run and for one to be completed; then it can."""
    run.expected()
    for begin in (fresh, without_summary):
        with disk(run.work / "disk", 65536) as mounted:
            if not mounted:
                yield "skipped", "no disk of a given size can be mounted here"
                return
            out = run.work / "disk/run"
            begin(run, out)
            os.system(f"mount -o remount,ro '{run.work / 'disk'}'")
            status, said = forked(lambda out=out: run.start(out))
            os.system(f"mount -o remount,rw '{run.work / 'disk'}'")
            outcome, found = finished(run, out)
        line = last_line(said)
        if status != 2 or "cannot be written" not in line or "Traceback" in said:
            outcome, found = "LOST", f"status {status}"
        yield outcome, f"{begin.__name__}, {line}: {found}"


def two_writers(run: Run, count: int) -> Iterator[Outcome]:
    """Two processes start the same run in the same folder: one of them makes it, and one is told."""
    run.expected()
    for number in range(count):
        out = run.work / f"two-{number}"
        second = os.fork()
        if second == 0:
            os._exit(forked(lambda out=out: run.start(out))[0])
        statuses = sorted((forked(lambda out=out: run.start(out))[0], os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])))
        outcome, said = finished(run, out) if statuses == [0, 2] else ("LOST", f"statuses {statuses}")
        yield outcome, said
        shutil.rmtree(out)


@contextlib.contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[bool]:
    """A file system of a size; False where this user may not mount one."""
    folder.mkdir(exist_ok=True)
    mounted = os.system(f"mount -t tmpfs -o size={kilobytes}k tmpfs '{folder}' 2>/dev/null") == 0
    try:
        yield mounted
    finally:
        if mounted:
            os.system(f"umount -l '{folder}'")


def enlarge(folder: Path) -> None:
    """Room is made."""
    os.system(f"mount -o remount,size=64m '{folder}'")


# ------------------------------------------------------------------------------------------------------------- the campaign
def campaign(work: Path, quick: bool) -> Iterator[tuple[str, Iterator[Outcome]]]:
    """(name, outcomes) of each kind of fault; ``quick``: a sample of each."""
    rl, base, lora = train(work / "rl"), pretrain(work / "base"), train(work / "lora", lora=config.Lora(rank=2, alpha=4.0))
    some, last, few = (91, 12, 1) if quick else (1, 1, 12)
    yield "crash in a fresh run", crashes(rl, fresh, some)
    yield "crash in a resumed run", crashes(rl, after_step_3, some)
    yield "crash while a finished run is completed", crashes(rl, without_summary, last)
    yield "crash while a damaged checkpoint is replaced", crashes(rl, without_newest, some)
    yield "crash in pre-training", crashes(base, fresh, some)
    yield "crash in pre-training, resumed", crashes(base, after_step_3, some)
    if not quick:
        yield "crash with adapters", crashes(lora, fresh, 4)
    yield "SIGKILL at random", kills(rl, 1 if quick else 50)
    yield "files damaged", damages(rl, 120 if quick else 1)
    yield "disk full", full_disks(rl, few)
    yield "read-only folder", read_only(rl)
    yield "two writers", two_writers(rl, few)


def main(argv: list[str] | None = None) -> int:
    """Print a line a kind of fault, then what went wrong; 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of each kind")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    wrong, rows = [], []
    Countdown.score = tiny.varied_score  # a network of random weights solves nothing, and would learn nothing
    with tempfile.TemporaryDirectory() as folder:
        for name, outcomes in campaign(Path(folder), arguments.quick):
            started, found = time.monotonic(), collections.Counter()
            for outcome, said in outcomes:
                found[outcome] += 1
                if outcome not in ("equal", "refused", "skipped"):
                    wrong.append(f"{name}: {outcome}: {said}")
            rows.append({"fault": name, "cases": found.total(), **found, "seconds": round(time.monotonic() - started)})
            if not arguments.json:
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(json.dumps({"rows": rows, "wrong": wrong}) if arguments.json else "\n".join(wrong) or "nothing was lost")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
