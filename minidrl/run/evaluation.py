"""The old place of minidrl/run/evaluate.py; goes when the command line imports that one."""

from typing import Any

from minidrl.run.evaluate import compare, opened, record, with_length, write  # noqa: F401


def evaluate(*words: Any, batch: int = 128, **more: Any) -> dict[str, Any]:
    """``record``, which says micro_batch."""
    return record(*words, micro_batch=batch, **more)
