"""Files that are there whole or not at all, whatever ends the process or the machine.

    a file     is written as NAME.part, flushed to the disk, and renamed; a rename is atomic, and
               lasts once the folder that holds the name is flushed, too
    a folder   is filled as NAME.part and ends with SHA256SUMS, which says what is in it
               (``sha256sum -c SHA256SUMS`` repeats the check). The folder that it replaces is
               NAME.old until the new one has its name

What an interruption left is therefore known by its name and its sums: ``settle`` finishes or
removes it. What nobody here makes under such a name, a folder for a file or a file for a folder, is
a user's: it is refused, and stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from minidrl.run.launch import one_line

SUMS = "SHA256SUMS"
PART, OLD = ".part", ".old"
_LINE = re.compile("[0-9a-f]{64}  .+")


class WriteError(OSError):
    """A file could not be written; the message names it. What stood there before still does."""


def write(path: Path, content: str | bytes) -> None:
    """The file as a whole; WriteError leaves it as it was."""
    part = _beside(path, PART)
    with _writing(path):
        check_writable(path)
        remove(part)  # a link or a pipe, too: to write through it would be to write elsewhere
        try:
            with part.open("xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            sync(part)
            os.replace(part, path)
            sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def check_writable(path: Path) -> None:
    """ValueError for a folder where ``write`` would put a file's beginning."""
    part = _beside(path, PART)
    if part.is_dir() and not part.is_symlink():
        raise ValueError(f"{part} is a folder; move it away")


def acquire(lock: FileLock, key: str, path: Path) -> None:
    """For this process alone; the kernel lets it go when the process ends, however it does.

    ValueError where another process has it; WriteError where its folder cannot be written to.
    """
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        got = f"{str(path)!r}, to which another process is writing"
        allowed = f"another --{key}, or wait until that has ended"
        raise ValueError(f"{key}: got {got}; allowed {allowed}") from None
    except OSError as error:
        raise WriteError(f"{key}: {path} cannot be written to: {one_line(error)}") from None


def read_object(path: Path) -> dict:
    """The JSON object of a file; empty if there is no file, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def append(path: Path, line: str) -> None:
    """A line at the end of a file; what is not flushed yet may go with the machine."""
    with _writing(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A folder to fill; at the end of the block it stands whole under its name, with its sums.

    WriteError leaves the folder that had the name, and removes the unfinished one.
    """
    part = _beside(path, PART)
    with _filled(path, part):
        yield part
        write_sums(part)
        _put(part, path)


@contextlib.contextmanager
def into(path: Path) -> Iterator[Path]:
    """A folder to fill, whose files then replace those of the same names in ``path``, each whole.

    For a folder that holds other things as well, and whose readers know when it is complete.
    """
    part = path / f"files{PART}"
    with _filled(path, part):
        yield part
        for file in sorted(part.iterdir()):
            sync(file)
            os.replace(file, path / file.name)
        sync(path)


@contextlib.contextmanager
def _filled(path: Path, part: Path) -> Iterator[None]:
    # An empty ``part`` to fill; what still has that name at the end was not finished, or is empty.
    with _writing(path):
        if is_plain(part):
            raise ValueError(f"{part} is a file; move it away")
        remove(part)
        try:
            part.mkdir(parents=True)
            yield
        finally:
            remove(part)


def is_plain(path: Path) -> bool:
    """True of a file that is no link to one: where a folder should be, a user's."""
    return path.is_file() and not path.is_symlink()


def remove(path: Path) -> None:
    """Whatever has the name, if anything does: a folder with all in it, a link without what it
    points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damage(path: Path) -> str:
    """What is wrong with a folder that ``folder`` wrote, in words; "" if it is whole.

    Hidden files are nobody's.
    """
    if not path.is_dir():
        return "is no folder"
    try:
        if (path / SUMS).exists() and not (path / SUMS).is_file():
            return f"holds a {SUMS} that is no file"
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
        if not all(map(_LINE.fullmatch, lines)):
            return f"holds a {SUMS} with a line that is no sum and name"
        told = {name: total for total, _, name in (line.partition("  ") for line in lines)}
        present = _sums(path)
    except FileNotFoundError:
        return f"holds no {SUMS}"
    except (OSError, ValueError) as error:
        return f"cannot be read: {one_line(error)}"
    for name in sorted(told | present):
        if name not in present:
            return f"lacks {name}"
        if name not in told:
            return f"holds {name}, which {SUMS} does not name"
        if told[name] != present[name]:
            return f"holds {name} with other bytes than were written"
    return "" if told else f"holds an empty {SUMS}"


def settle(parent: Path, pattern: str) -> None:
    """Put in place what was complete when a write was interrupted, and remove what was not.

    ``pattern``: the folders' names, as in Path.glob. The last whole one of a name is never removed.
    """
    for part in sorted(parent.glob(pattern + PART)):
        path = part.with_name(part.name.removesuffix(PART))
        if is_plain(part):
            continue
        if not part.is_symlink() and not damage(part) and damage(path):
            _put(part, path)
        else:
            remove(part)
    for old in sorted(parent.glob(pattern + OLD)):
        path = old.with_name(old.name.removesuffix(OLD))
        if is_plain(old):
            continue
        if not damage(path):
            remove(old)
        elif not old.is_symlink() and not damage(old):
            remove(path)
            os.replace(old, path)


def write_sums(path: Path) -> None:
    """SHA256SUMS of a folder, after its files have reached the disk; it is the last one to."""
    for file in _files(path):
        sync(file)
    lines = (f"{total}  {name}\n" for name, total in _sums(path).items())
    (path / SUMS).write_text("".join(lines), encoding="utf-8")
    sync(path / SUMS)
    sync(path)


def _put(part: Path, path: Path) -> None:
    # No moment is without a whole folder: the old one, under one name or another, or the new one.
    old = _beside(path, OLD)
    if path.exists():
        remove(old)
        os.replace(path, old)
    os.replace(part, path)
    sync(path.parent)
    remove(old)


def _files(path: Path) -> list[Path]:
    found = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != SUMS)
    return [file for file in found if not file.name.startswith(".")]


def _sums(path: Path) -> dict[str, str]:
    sums = {}
    for file in _files(path):
        with file.open("rb") as opened:
            total = hashlib.file_digest(opened, "sha256").hexdigest()
        sums[file.relative_to(path).as_posix()] = total
    return sums


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    # The libraries that write weights and tokenizers raise exceptions of their own for a full disk.
    try:
        yield
    except Exception as error:
        raise WriteError(f"{path} cannot be written: {one_line(error)}") from error
