"""The ELBO errors of elbo_error.py for responses of 256 positions: `python -m research.benches.long_text --out out.json`.

No puzzle has so long an answer. A character-level masked diffusion LM is therefore trained on English that every Python brings
along, the docstrings of its standard library, and continues 32 characters of a docstring that it has not met by 256. There is
nothing to solve, hence one verdict. Half an hour of one thread; `--rehearse`: seconds, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import string
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from minidrl import sampler
from minidrl.run import config
from minidrl.run.pretrain import pretrain
from minidrl.tasks import Verdict, countdown
from research.benches import elbo_error

ALPHABET = " " + string.ascii_letters + string.digits + string.punctuation
PROMPT, LENGTH = 32, 256


@functools.lru_cache
def docstrings(shortest: int) -> tuple[str, ...]:
    """Those of the standard library's modules with at least so many characters, in ASCII, runs of blanks made one blank."""
    found, folder = set(), Path(sysconfig.get_path("stdlib"))
    for path in sorted(p for pattern in ("*.py", "*/*.py") for p in folder.glob(pattern)):
        if "packages" in path.parent.name or "test" in path.parent.name:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(" ".join((ast.get_docstring(node) or "").split()))
    return tuple(sorted(text for text in found if len(text) >= shortest and set(text) <= set(ALPHABET)))


class Passage(NamedTuple):
    """The beginning, and what follows it."""

    prompt: str
    rest: str

    key = property(lambda self: self.prompt + self.rest)


@dataclass(frozen=True)
class Docstrings:
    """The ``length`` characters that follow ``PROMPT`` of them, anywhere in a docstring; one docstring in ten is kept back."""

    name: ClassVar[str] = "docstrings"
    about: ClassVar[str] = "docstrings of Python's standard library, continued; nothing is judged"
    prompt_format: ClassVar[str] = "plain"
    prompt_length: ClassVar[int] = PROMPT
    length: int = LENGTH

    def problems(self, count: int, rng: np.random.Generator, split: str = "train") -> list[Passage]:
        """Windows, uniform over all places of all docstrings of the split."""
        every = docstrings(PROMPT + self.length)
        texts = [text for text in every if (zlib.crc32(text.encode()) % 10 == 0) == (split != "pretrain")]
        places = np.array([len(text) - PROMPT - self.length + 1 for text in texts])
        found = []
        for i in rng.choice(len(texts), count, p=places / places.sum()):
            begin = int(rng.integers(places[i]))
            window = texts[i][begin : begin + PROMPT + self.length]
            found.append(Passage(window[:PROMPT], window[PROMPT:]))
        return found

    def held_out(self, count: int) -> list[Passage]:
        return self.problems(count, np.random.default_rng(0), "held_out")

    def demonstrations(self, problems: Sequence[Passage], rng: np.random.Generator, progress: float) -> list[str]:
        return [passage.rest for passage in problems]

    def tokenizer(self) -> Any:
        return countdown.tokenizer(ALPHABET)

    def judge(self, problem: Passage, response: str) -> Verdict:
        return Verdict(0.0, False, {"well_formed": False})


def pretrained(given: argparse.Namespace, how: sampler.Sampler) -> None:
    """Train the base, into ``given.base``."""
    sizes = config.Network(hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
    rate = config.Optimizer(learning_rate=2e-3, warmup=100, schedule="cosine", weight_decay=0.01)
    words = {"task": Docstrings(how.length), "network": sizes, "optimizer": rate, "sampler": how, "threads": 1}
    words |= {"steps": given.steps, "batch_size": 32, "evaluate": config.Evaluation(n=4), "compile": not given.rehearse}
    pretrain(config.Pretrain(**words), given.base)


def main(words: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("runs/docstrings_base"), help="trained if it is not there")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--responses", type=int, default=16, help="of each order, each to a prompt of its own")
    parser.add_argument("--masks", type=int, default=8, help="of each count")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--tables", type=Path, help="made if it is not there, else read")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(words)
    if given.rehearse:
        given.steps, given.responses, given.masks = 2, 3, 4
    given.complete, given.puzzles, given.generations = 0, given.responses, 1
    torch.set_num_threads(1)
    length = 20 if given.rehearse else LENGTH
    how = sampler.Sampler(length=length, block_length=length, order="random", temperature=1.0, tokens_per_step=1)
    if not (given.base / "summary.json").exists():
        pretrained(given, how)
    settings = config.Train(model=str(given.base), task=Docstrings(length), sampler=how, method="reinforce")
    draws, found = elbo_error.tables_of(settings, given)
    facts = {"base": given.base.name, "python": sys.version.split()[0], "length": length, "draws": draws}
    return elbo_error.report(elbo_error.judged(found, facts, verdicts=False), given.out)


if __name__ == "__main__":
    main()
