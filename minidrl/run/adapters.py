"""Adapters (LoRA, by peft): trained instead of the weights that they are added to.

How they are saved and read stands in checkpoints.py; a network with them switched off is
``denoiser.without_adapters``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minidrl.denoiser import Denoiser


def add_adapters(
    denoiser: Denoiser, *, rank: int, alpha: float, target_modules: list[str], seed: int, base: str
) -> None:
    """LoRA, in place: W x becomes W x + (alpha / rank) B A x; only A and B are trained then.

    A is drawn from a generator of its own, B is 0: nothing has changed yet. Both are float32
    whatever the base is stored in: in bfloat16 an update of 1e-6 would vanish. No dropout: the
    passes of the gradient must see one network. ``target_modules`` are names of linear layers;
    ``base`` is written down for whoever opens the saved adapters. Source: arXiv 2106.09685.
    """
    targeted(denoiser.model, target_modules)  # or refused
    config = peft().LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=target_modules,
        base_model_name_or_path=str(base),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    inject_adapters(denoiser, config, seed)


def inject_adapters(denoiser: Denoiser, config: Any, seed: int) -> None:
    """Adapters by peft's ``config``, drawn from a generator of their own, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        peft().inject_adapter_in_model(config, denoiser.model)
    for p in denoiser.model.parameters():
        if p.requires_grad:  # the adapters, and nothing else
            p.data = p.data.float()


def targeted(model: nn.Module, target_modules: list[str]) -> list[nn.Linear]:
    """The layers that get adapters. ValueError for a target that names no linear layer; peft minds
    only if none of them does."""
    linear = {f".{name}": m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for target in target_modules:
        if not any(name.endswith(f".{target}") for name in linear):
            allowed = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            got = f"{target!r}, which matches no module"
            raise ValueError(f"lora.target_modules: got {got}; allowed {allowed}")
    ends = tuple(f".{target}" for target in target_modules)
    return [layer for name, layer in linear.items() if name.endswith(ends)]


def has_adapters(denoiser: nn.Module) -> bool:
    """True of a network with adapters."""
    return bool(getattr(getattr(denoiser, "model", None), "peft_config", None))


def peft() -> Any:
    """The package, which takes a second to import."""
    import peft

    return peft
