"""The old place of what stands in minidrl/run/folders.py; goes when nobody imports it."""

from minidrl.keyed import keyed_generator, keyed_seed  # noqa: F401
from minidrl.run.folders import (  # noqa: F401
    CONFIG,
    METRICS,
    SUMMARY,
    MetricsLog,
    checkpoint_folders,
    has_checkpoint,
    load_checkpoint,
    load_optimizer,
    opened,
    read_summary,
    save_checkpoint,
    write_config,
    write_summary,
)


def complete(state: dict, keys: object, folder: object) -> dict:
    """The state as it is."""
    return state
