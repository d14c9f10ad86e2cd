"""Sentences to learn from, written by the causal model itself, and how likely it finds others.

    python -m research.benches.sentences runs/smollm2_135m --out runs/sentences

The model continues a list of plain sentences. What is one sentence of 7 to 12 tokens is kept, and
three of its words become what is asked for (minidrl.tasks.words). So the causal model teaches the
diffusion model that ``convert`` made of it, and no data set is needed. The rows are divided by their
words, so that no three of them stand in two files: two fifths to fine-tune on, two fifths whose
requests are new to RL, and a fifth that is held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minidrl.tasks.words import SENTENCE, in_order

BEGINNING = """Simple sentences about everyday life:
The old dog sleeps in the warm kitchen.
My brother fixed his bicycle before the rain came.
She put fresh flowers on the table.
A farmer sold apples at the market in town.
The teacher asked the children a difficult question.
We saw a small boat on the river at night.
"""
SEQUENCES, NEW = 64, 100  # sequences at once, and tokens that each goes on for
COMMON = set(
    "about after again along also always another around away back because been before began being "
    "could down each even ever every five four from gave goes going good have hers herself himself "
    "into just know like made make many more most much must never next only other ours over said "
    "same seen should some still such than that their them then there these they thing things this "
    "those three through took under until very want wanted well went were what when where which "
    "while will with without would your".split()
)


def causal_model(folder: Path) -> tuple[LlamaForCausalLM, Any]:
    """The causal model whose weights a converted folder holds, and its tokenizer."""
    settings = json.loads((folder / "config.json").read_text())
    ours = ("model_type", "is_causal", "shift", "use_cache")
    causal = LlamaConfig(**{key: value for key, value in settings.items() if key not in ours})
    how = {"config": causal, "dtype": torch.bfloat16, "attn_implementation": "eager"}
    return LlamaForCausalLM.from_pretrained(folder, **how).eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def written(model: LlamaForCausalLM, tok: Any, rounds: int, seed: int) -> list[str]:
    """Whole lines with which the model continues the list, each once."""
    torch.manual_seed(seed)
    asked = tok([BEGINNING] * SEQUENCES, return_tensors="pt")
    how = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": NEW, "use_cache": True}
    lines: dict[str, None] = {}
    for _ in tqdm(range(rounds), desc="sentences"):
        ids = model.generate(**asked, **how, pad_token_id=tok.eos_token_id)
        for text in tok.batch_decode(ids[:, asked.input_ids.shape[1] :]):
            lines.update(dict.fromkeys(text.split("\n")[:-1]))
    return list(lines)


def row_of(sentence: str, tok: Any, rng: np.random.Generator) -> dict[str, Any] | None:
    """What is asked for and answered by a sentence; None for one that does not serve."""
    if not SENTENCE.fullmatch(sentence) or not 7 <= len(tok(sentence).input_ids) <= 12:
        return None
    found = in_order(sentence)
    once = [w for w in found if len(w) > 3 and w not in COMMON and found.count(w) == 1]
    if len(once) < 3 or any(found.count(w) > 1 for w in found if len(w) > 3):
        return None
    return {"words": rng.permutation(once)[:3].tolist(), "answer": sentence}


def nats(model: LlamaForCausalLM, tok: Any, sentences: list[str]) -> list[float]:
    """-log p of each sentence under the causal model, in nats a token, after the list's beginning."""
    before = len(tok(BEGINNING).input_ids)
    means = []
    with torch.inference_mode():
        for sentence in sentences:
            ids = tok(BEGINNING + sentence + "\n", return_tensors="pt").input_ids
            logp = model(ids, logits_to_keep=ids.shape[1] - before + 1).logits[0, :-1].float()
            chosen = logp.log_softmax(-1).gather(1, ids[0, before:, None])
            means.append(-chosen.mean().item())
    return means


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="what `minidrl convert` wrote")
    parser.add_argument("--out", type=Path, required=True, help="a folder for sft.jsonl, rl.jsonl and test.jsonl")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    model, tok = causal_model(args.model)
    rng = np.random.default_rng(args.seed)
    rows = {}
    for sentence in written(model, tok, args.rounds, args.seed):
        if row := row_of(sentence, tok, rng):
            rows.setdefault(tuple(sorted(row["words"])), row)
    files: dict[str, list[dict]] = {"sft": [], "rl": [], "test": []}
    for key, row in rows.items():
        files[("test", "sft", "sft", "rl", "rl")[crc32(" ".join(key).encode()) % 5]].append(row)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, some in files.items():
        text = "".join(json.dumps(row) + "\n" for row in some)
        (args.out / f"{name}.jsonl").write_text(text)
    print(f"{args.out}: " + ", ".join(f"{len(some)} rows in {name}.jsonl" for name, some in files.items()))


if __name__ == "__main__":
    main()
