"""The old place of what stands in minidrl/run/folders.py; goes when nobody imports it."""

from minidrl.run.folders import (  # noqa: F401
    WriteError,
    acquire,
    append,
    damage,
    folder,
    into,
    read_object,
    write,
)


def check_writable(path: object) -> None:
    """Nothing: a write that fails leaves what stood there."""
