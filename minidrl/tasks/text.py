"""Text to tensors and back: prompts, responses, chats."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from minidrl.sampler import is_end, keep_mask
from minidrl.tasks import Problem

log = logging.getLogger("minidrl")
_warn_once = functools.cache(log.warning)
PAD, MASK, EOS = "[PAD]", "[MASK]", "[EOS]"
OPENING, CLOSING = "<answer>", "</answer>"
END_OF_TURN = re.compile(r"<\|(?:eot_id|im_end|endoftext|end_of_text|EOT)\|>")
_TAG = re.compile("(</?(?:answer|reasoning)>)")
MAX_RESPONSE = 40_000  # characters of a chat's response; a longer one is refused unread


# --------------------------------------------------------------------------------- what tasks share
def check_setting(task: Any, key: str, right: bool, allowed: str) -> None:
    """ValueError, which names the setting, unless it is right."""
    if not right:
        raise ValueError(f"task.{key}: got {getattr(task, key)!r}; allowed {allowed}")


def turn(response: str) -> str:
    """A chat's response up to the end of its turn; "" for one that is too long, or no text."""
    readable = isinstance(response, str) and len(response) <= MAX_RESPONSE
    return END_OF_TURN.split(response)[0] if readable else ""


def between_tags(response: str) -> str | None:
    """The answer of a chat's response, its tags read as a person reads them; None without one.

    It ends with its tag, or with the turn where that is missing. An answer that is given twice
    counts once; of two different ones none does, and it is "".
    """
    pieces = _TAG.split(turn(response))
    found = [text for tag, text in itertools.pairwise(pieces) if tag == OPENING and text.strip()]
    different = {text.strip() for text in found}
    return found[0] if len(different) == 1 else "" if different else None


def final_answer(response: str) -> str:
    """The answer of a chat's response: what its last box holds, else all that the tags do.

    Where the tags hold nothing the last box of the turn counts. "" for no answer.
    """
    answer = between_tags(response)
    if answer is None:
        return last_box(turn(response))
    return last_box(answer) or answer.replace(r"\boxed{}", "").strip()


def last_box(text: str) -> str:
    """What the last \\boxed{ holds up to the brace that closes it, or to the end of the line."""
    _, box, text = text.rpartition("boxed{")
    if not box:
        return ""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[: brace.start()].strip()
    return text.strip().partition("\n")[0].rstrip("> ")


def tokenizer(characters: str) -> Any:
    """Of single characters, [PAD], [MASK] and [EOS], in transformers' own format.

    It pads on the left. A character outside the alphabet becomes [PAD].
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, MASK, EOS, *characters])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    words = {"pad_token": PAD, "mask_token": MASK, "eos_token": EOS, "padding_side": "left"}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, **words, clean_up_tokenization_spaces=False
    )


# ---------------------------------------------------------------------------- prompts and responses


def encode_prompts(
    tok: Any,
    problems: Sequence[Problem],
    width: int,
    device: Any = "cpu",
    prompt_format: str = "plain",
) -> tuple[Tensor, Tensor]:
    """Prompts (G, width), left-padded, and their mask (True = real token).

    In words and in a chat the longest prompt sets the width. ValueError for one that is longer than
    ``width`` or has characters that the tokenizer lacks, and for a tokenizer that names no end
    token.
    """
    for name in ("eos_token", "pad_token"):
        if getattr(tok, f"{name}_id") is None:
            raise ValueError(f"model: got a tokenizer without {name}; allowed one that names it")
    asked = asked_as(tok, problems, prompt_format)
    how = {"add_special_tokens": False, "padding": True}
    if prompt_format == "plain":
        how = {"padding": "max_length", "max_length": width}
    batch = tok(asked, **how)
    if (found := max(map(len, batch.input_ids))) > width:
        if prompt_format != "plain":
            check_lengths(tok, problems, width, prompt_format)
        raise ValueError(f"prompt: got {found} tokens; allowed up to {width}, the task's longest")
    batch = batch.convert_to_tensors("pt")
    prompt, mask = batch.input_ids, batch.attention_mask.bool()
    _check_known(tok, asked, prompt, mask)
    return prompt.to(device), mask.to(device)


def _check_known(tok: Any, texts: list[str], ids: Tensor, mask: Tensor) -> None:
    """A tokenizer with an unknown token reads every character that it lacks as this one."""
    backend = getattr(tok, "backend_tokenizer", None)  # slow tokenizers have none
    name = getattr(getattr(backend, "model", None), "unk_token", None)
    if name is None:
        return
    unknown = tok.convert_tokens_to_ids(name)
    for row in ((ids == unknown) & mask).any(1).nonzero().flatten().tolist():
        letters = dict.fromkeys(texts[row].replace(name, ""))
        if lost := "".join(c for c in letters if unknown in tok(c).input_ids):
            got = f"{texts[row][:60]!r} with {lost[:60]!r}, which the model's tokenizer lacks"
            raise ValueError(f"prompt: got {got}; allowed its own characters")


def check_lengths(tok: Any, problems: Sequence[Problem], width: int, prompt_format: str) -> int:
    """Tokens of the longest prompt; ValueError, which says where it stands, above ``width``."""
    asked = asked_as(tok, problems, prompt_format)
    lengths = [len(row) for row in tok(asked, add_special_tokens=False).input_ids]
    if (longest := max(lengths)) > width:
        place = getattr(problems[lengths.index(longest)], "place", "")
        allowed = f"from {longest}, as {place or 'a prompt'} has"
        raise ValueError(f"task.max_prompt_length: got {width}; allowed {allowed}")
    return longest


def asked_as(tok: Any, problems: Sequence[Problem], prompt_format: str) -> list[str]:
    """Each problem as text: plain, in words, or in a user's turn of a chat, with the beginning of
    the answer's as far as it is given."""
    if prompt_format != "chat":
        name = "prompt" if prompt_format == "plain" else "words"
        return [getattr(problem, name) for problem in problems]
    opened = chats(tok, [problem.instruction for problem in problems])
    return [
        text + getattr(problem, "opening", "")
        for text, problem in zip(opened, problems, strict=True)
    ]


def chats(tok: Any, questions: list[str]) -> list[str]:
    """Each question as a user's turn and the opening of the answer's, by the checkpoint's template.

    transformers renders it, in Jinja's sandbox.
    """
    model = getattr(tok, "name_or_path", "") or "the model"  # the folder that it was read from
    if tok.chat_template is None:
        allowed = f"plain, the tokenizer of {model} has no chat template"
        raise ValueError(f"task.prompt_format: got 'chat'; allowed {allowed}")
    turns = [[{"role": "user", "content": question}] for question in questions]
    words = {"tokenize": False, "add_generation_prompt": True} | getattr(tok, "template_words", {})
    try:
        return tok.apply_chat_template(turns, **words)
    except TemplateError as error:
        raise ValueError(f"chat_template: that of {model} fails: {error}") from None


def encode_responses(tok: Any, texts: list[str], length: int) -> Tensor:
    """Responses (B, length), filled up with [EOS].

    A masked diffusion model learns where a text ends from its padding.
    """
    found = tok(texts, add_special_tokens=False).input_ids
    if max(map(len, found), default=0) > length:
        _warn_once(f"answers longer than sampler.length {length} are taught without their end")
    ids = [row[:length] + [tok.eos_token_id] * (length - len(row)) for row in found]
    return torch.tensor(ids)


def end_ids(tok: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and what generation_config.json names."""
    return list(dict.fromkeys([tok.eos_token_id, *getattr(tok, "more_ends", ())]))


def decode(tok: Any, responses: Tensor) -> list[str]:
    """The text of each response (B, L), up to its first end.

    Other special tokens are part of the text: without its [PAD], ``5*[PAD]8`` would be read as
    ``5*8``, which the model has not said. An id that no token has is written as the mask.
    """
    responses = responses.masked_fill(responses >= len(tok), tok.mask_token_id)
    said = keep_mask(responses, end_ids(tok)) & ~is_end(responses, end_ids(tok))
    lengths = said.sum(1).tolist()
    rows = [row[:length] for row, length in zip(responses.tolist(), lengths, strict=True)]
    return tok.batch_decode(rows, skip_special_tokens=False)
