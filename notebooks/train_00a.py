"""Train the model of notebook 00a by its own lines, and store it for 00b: `python notebooks/train_00a.py`, a minute or so."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from nbtools import lines_of

STORED = Path(__file__).parent / "model_00a.safetensors"
IMPORTS = """
import math
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from dataclasses import replace
from minidrl.tasks.countdown import Countdown
"""
NAMES = "task VOCAB PAD P AIMED ID to_ids to_text demonstrations turned Layer Transformer hidden_logp hide minus_elbo learn STEPS"


def notebook() -> dict:
    """What the lines of 00a define that its model needs."""
    found: dict = {}
    exec(IMPORTS + lines_of("00a_build_a_model.ipynb", *NAMES.split()), found)
    return found


def trained(found: dict) -> torch.nn.Module:
    """The model, from the seed of 00a."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = found["Transformer"]()
    found["learn"](model, found["STEPS"])
    return model


if __name__ == "__main__":
    save_file(trained(notebook()).state_dict(), STORED)
