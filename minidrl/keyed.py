"""Random numbers that repeat: every draw is keyed by (seed, step, purpose).

A run that is resumed therefore repeats the uninterrupted one to the bit, and no two draws of a run
share a stream.
"""

from __future__ import annotations

import hashlib

import torch


def keyed_seed(seed: int, step: int, purpose: str) -> int:
    """A seed of its own for (seed, step, purpose)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()[:7], "big")


def keyed_generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """A CPU generator of its own for (seed, step, purpose)."""
    return torch.Generator().manual_seed(keyed_seed(seed, step, purpose))
