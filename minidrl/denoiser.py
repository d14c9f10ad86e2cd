"""The network: transformers' own Llama made bidirectional, from 0.3 M parameters on a laptop upwards.

A masked diffusion language model needs no architecture of its own. It is a Llama without the causal mask that predicts,
at every [MASK], the token that belongs there (in place: the logit at position i scores token i, no shift).
"""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


class Denoiser(nn.Module):
    """A bidirectional transformer in the two calls that sampler, estimators and pre-training share.

    ``encode`` runs the network body; ``head`` turns hidden states into logits. They are separate so that the vocabulary
    head is applied to the needed positions only: at 126k tokens it is the logits, not the body, that fill a GPU.
    """

    def __init__(self, model: LlamaForCausalLM):
        super().__init__()
        self.model = model
        self.mask_token_id: int = model.config.mask_token_id
        self.vocab_size: int = model.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    def encode(self, tokens: Int[Tensor, "N T"], attention_mask: Bool[Tensor, "N T"] | None) -> Float[Tensor, "N T D"]:
        """Hidden states of every position; ``attention_mask`` False marks padding, None says that there is none.

        Positions count real tokens only. Attention depends on their differences, so this changes nothing in exact arithmetic;
        but the rotary tables are float32, and a shift by the padding would be visible in the digits of a ratio.
        """
        position = None if attention_mask is None else (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        body = self.model.model
        return body(input_ids=tokens, attention_mask=attention_mask, position_ids=position, use_cache=False).last_hidden_state

    def head(self, h: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Logits in float32 at least. [MASK] gets -inf: a denoiser never answers with the question."""
        logits = self.model.lm_head(h)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        banned = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(banned, -torch.inf)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def compiled(denoiser: Denoiser) -> Denoiser:
    """The same network (shared weights) whose body runs through torch.compile; the first call of a shape takes seconds."""
    other = copy.copy(denoiser)
    other.__dict__["encode"] = torch.compile(denoiser.encode)
    return other


def build(sizes: dict, tokenizer: PreTrainedTokenizerBase, seed: int) -> Denoiser:
    """A freshly initialised network. ``sizes``: hidden_size, num_hidden_layers, num_attention_heads, intermediate_size.

    ``pad_token_id`` stays None: as ``padding_idx`` it would silently freeze one embedding row. Initialisation draws from a
    forked generator, so that the caller's global random state is untouched.
    """
    if sizes["hidden_size"] % (2 * sizes["num_attention_heads"]):
        raise ValueError(
            f"network.hidden_size: got {sizes['hidden_size']}; "
            f"allowed multiples of 2 x num_attention_heads ({sizes['num_attention_heads']})"
        )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **{key: sizes[key] for key in SIZES},
        num_key_value_heads=sizes["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
        is_causal=False,  # the bidirectional switch of transformers >= 5.2
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU as well
        return Denoiser(LlamaForCausalLM(config))


def save(denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Network (safetensors) and tokenizer, in transformers' own format; nothing of minidrl is needed to read them."""
    with _quiet():
        denoiser.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Denoiser, PreTrainedTokenizerBase]:
    """(denoiser, tokenizer) of a folder written by ``save``.

    Raises ValueError in one line when the folder is no such checkpoint, or when a weight is missing: transformers would
    only warn and leave it random.
    """
    folder = Path(folder)
    _check_config(folder)
    try:
        with _quiet():
            model, info = LlamaForCausalLM.from_pretrained(
                folder, attn_implementation="sdpa", output_loading_info=True, ignore_mismatched_sizes=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, RuntimeError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"model: got {str(folder)!r}, which cannot be read: {' '.join(str(error).split())}") from None
    wrong = {
        key: sorted(map(str, info[key]))[:3] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]
    }
    if wrong:
        raise ValueError(f"model: got {str(folder)!r}, whose weights do not match its config: {wrong}")
    return Denoiser(model.to(device)).eval(), tokenizer


@contextlib.contextmanager
def _quiet():
    """Without transformers' progress bars and reports: what they say is either of no interest or raised as one line."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model: got {str(folder)!r}, which holds no config.json; allowed a folder written by pretrain or train"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"model: got {str(folder)!r}, whose config.json is no JSON: {error}") from None
    config = config if isinstance(config, dict) else {}
    if config.get("model_type") != "llama" or config.get("is_causal") is not False or "mask_token_id" not in config:
        raise ValueError(
            f"model: got {str(folder)!r} with model_type {config.get('model_type')!r}; "
            "allowed a bidirectional llama (is_causal false) with a mask_token_id"
        )
