"""What lesson 12 shows of a real model: one text through it, its attention, and the course of its loss.

    python -m research.benches.real_lesson runs/smollm2_135m runs/smollm2_135m_words_sft runs/sentences/test.jsonl

The first folder is what ``convert --shift`` wrote, the second what ``pretrain`` made of it. In all three readings the state
before a token predicts it: of the causal model, which sees what stands before; of the same weights without the causal mask;
and of the fine-tuned ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidrl.denoiser import Denoiser
from minidrl.run import checkpoints
from minidrl.tasks import rows

OUT = Path("research/results/real_lesson.json")
TEXTS = (  # what stands before the hidden word, the word, and what stands after it
    ("Every morning the", " dog", " barks at the mailman."),
    ("Yesterday the", " doctor", " gave the sick child some medicine."),
    ("My brother kicked the", " ball", " into the goal."),
    ("She put the flowers in a", " vase", " of fresh water."),
)
SENTENCES = 24  # held out, of which each token but the first is hidden once


@torch.inference_mode()
def seen(net: Denoiser, page: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(log-probability of each next token, attention of each layer as the mean of its heads), of N rows of T tokens."""
    net.model.set_attn_implementation("eager")  # the one that returns its attention
    net.model.config.is_causal = causal
    out = net.model(page, output_attentions=True)
    banned = torch.arange(net.vocab_size) == net.mask_token_id
    logp = out.logits.float().masked_fill(banned, -torch.inf).log_softmax(-1)
    return logp, torch.stack(out.attentions, 1).mean(2)  # (N, T, V), (N, layers, T, T)


def hidden(ids: list[int], places: list[int], mask: int) -> Tensor:
    """A row for each place, with the token there hidden."""
    page = torch.tensor([ids]).repeat(len(places), 1)
    page[range(len(places)), places] = mask
    return page


def guesses(net: Denoiser, tok: Any, causal: bool) -> list[dict]:
    """Of each text the five likeliest tokens for the hidden word, and the probability of the word itself."""
    found = []
    for before, word, after in TEXTS:
        place = len(tok(before).input_ids)
        ids = tok(before + word + after).input_ids
        logp, _ = seen(net, hidden(ids, [place], tok.mask_token_id), causal)
        top = logp[0, place - 1].exp().topk(5)
        tokens = [tok.decode(i) for i in top.indices.tolist()]
        own = logp[0, place - 1, ids[place]].exp().item()
        found.append({"tokens": tokens, "p": _short(top.values), "p of the word": round(own, 5)})
    return found


def nats(net: Denoiser, tok: Any, causal: bool, sentences: list[str]) -> float:
    """-log p of a hidden token, the mean over all but the first of each sentence."""
    total, count = 0.0, 0
    for sentence in sentences:
        ids = tok(sentence).input_ids
        places = list(range(1, len(ids)))
        logp, _ = seen(net, hidden(ids, places, tok.mask_token_id), causal)
        total -= logp[range(len(places)), range(len(places)), ids[1:]].sum().item()  # place - 1
        count += len(places)
    return round(total / count, 4)


def to_the_right(net: Denoiser, tok: Any, sentences: list[str]) -> Tensor:
    """Of each layer the share of attention that goes to later tokens, the mean over whole sentences."""
    shares = []
    for sentence in sentences:
        _, attention = seen(net, torch.tensor([tok(sentence).input_ids]), causal=False)
        shares.append(attention[0].triu(1).sum(-1)[:, :-1].mean(-1))  # the last token has none
    return torch.stack(shares).mean(0)


def attentions(net: Denoiser, tok: Any, causal: bool) -> list[Tensor]:
    """Attention in each text with its word hidden: (layers, T, T)."""
    pages = [hidden(tok("".join(text)).input_ids, [len(tok(text[0]).input_ids)], tok.mask_token_id) for text in TEXTS]
    return [seen(net, page, causal)[1][0] for page in pages]


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def _short(x: Tensor) -> list:
    return [_short(part) for part in x] if x.ndim > 1 else [round(value, 4) for value in x.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("converted", "tuned", "sentences"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--random", type=Path, help="a run of the same config from weights drawn anew")
    args = parser.parse_args()
    sentences = [row["answer"] for row in rows.of_file("sentences", str(args.sentences))[:SENTENCES]]
    readings = {"causal": (args.converted, True), "mask removed": (args.converted, False), "fine-tuned": (args.tuned, False)}
    result: dict[str, Any] = {"guesses": {}, "nats": {}, "to the right": {}, "sentences": len(sentences)}
    attention = {}
    for name, (folder, causal) in readings.items():
        net, tok = checkpoints.load(folder, "cpu", torch.float32)
        result["guesses"][name] = guesses(net, tok, causal)
        result["nats"][name] = nats(net, tok, causal, sentences)
        attention[name] = attentions(net, tok, causal)
        if not causal:
            shares = to_the_right(net, tok, sentences[:8])
            result["to the right"][name] = _short(shares)
    layer = int(shares.argmax())  # of the fine-tuned model
    result["texts"], result["layer"] = TEXTS, layer + 1
    result["tokens"] = [[tok.decode(i) for i in tok("".join(text)).input_ids] for text in TEXTS]
    result["attention"] = {name: [_short(one[layer]) for one in each] for name, each in attention.items()}
    result["losses"] = {"causal start": losses(args.tuned)}
    if args.random:
        result["losses"]["random start"] = losses(args.random)
    OUT.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("guesses", "nats", "to the right", "layer")}, indent=1))


if __name__ == "__main__":
    main()
