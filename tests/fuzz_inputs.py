"""Random hostile inputs for the command line: what no table has thought of.

    python tests/fuzz_inputs.py --seconds 300 --seed 0

Draws command lines, YAML files and damaged checkpoints, and calls every verb on them in this process. A case is wrong where it
raises, ends with a status other than 0, 1 or 2, writes other than one line with status 2, writes a control character, or takes
more than ``LIMIT`` seconds of CPU time. What is wrong is printed with the seed that repeats it: ``--seed N --count 1``.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

import tiny
from minidrl.run import checkpoints, config
from minidrl.run.cli import main
from test_hostile import BASE, RUN, STUDY

LIMIT, MEMORY = 20, 8 * 2**30
ATOMS = ["", "0", "-1", "1", "2", "1.5", "1e3", "2e-2", "1e400", "-1e-400", ".nan", ".inf", "-.inf", "9" * 40, "9" * 5000]
ATOMS += [
    "null",
    "true",
    "no",
    "~",
    "[]",
    "[1]",
    "[[]]",
    "{}",
    "{a: 1}",
    "{1: 2}",
    "{[1]: 2}",
    "&a [1]",
    "*a",
    "!!set {a}",
    "=",
    "<<",
]
ATOMS += [
    "'",
    '"',
    "\x1b[31m",
    "\x00"[:0] + "\x7f",
    "\u202e",
    "\udcff",
    "ä",
    "\\",
    "a/b",
    "../..",
    "/",
    ".",
    "~root",
    "-",
    "--",
    "|",
]
ATOMS += [
    "2020-01-01",
    "0x",
    "0o9",
    "1_0",
    "1:30",
    "!!binary x",
    "? a",
    "a: b: c",
    "x" * 5000,
    "[" * 500,
    "base",
    "grpo",
    "egspo-sa",
]
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    10**6,
    10**12,
    2**64,
    -(2**70),
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\x1b[31m",
]
VALUES += [
    "../x",
    "/etc/passwd",
    [],
    [1],
    [[]],
    ["a"],
    [None],
    {},
    {"a": 1},
    {"content": "x"},
    {"rope_type": "default"},
    "float32",
    "silu",
]
VERBS = ("train", "pretrain", "memory", "verify", "evaluate", "compare", "controls", "methods", "where", "tasks", "estimators")
OPTIONS = (
    "json",
    "n",
    "samples",
    "temperature",
    "task",
    "config",
    "gpus",
    "methods",
    "rates",
    "updates",
    "seeds",
    "equal",
    "hours",
)
OPTIONS += ("jobs", "ledger", "report", "rehearse", "prompt", "answer", "text", "device", "dtype", "resume")


class TooLong(BaseException):
    """A case that used up its time."""


def keys(data: dict, before: str = "") -> list[str]:
    """Every key of settings, with points."""
    found = []
    for key, value in data.items():
        found += [f"{before}{key}", *(keys(value, f"{before}{key}.") if isinstance(value, dict) else [])]
    return found


def known_keys() -> list[str]:
    words = config.to_dict(config.from_dict(config.Train, RUN)) | config.to_dict(config.from_dict(config.Pretrain, BASE))
    return keys(words) + [
        f"method_options.{name}" for name in ("plan.num_states", "credit", "kl.beta", "kl.form", "aggregation")
    ]


def mutated(draw: random.Random, text: bytes) -> bytes:
    """Some bytes cut, doubled, exchanged or replaced."""
    text = bytearray(text)
    for _ in range(draw.randint(1, 4)):
        i, j = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        how = draw.randrange(5)
        if how == 0:
            del text[i : min(j, i + 20)]
        elif how == 1:
            text[i:i] = draw.choice(ATOMS).encode("utf-8", "surrogateescape")
        elif how == 2:
            text[i:i] = text[i : min(j, i + 200)] * draw.randint(1, 3)
        elif how == 3:
            text[i : i + 1] = bytes([draw.randrange(256)])
        else:
            del text[j:]
    return bytes(text)


def damage(draw: random.Random, folder: Path) -> str:
    """One file of a checkpoint, made worse."""
    path = draw.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    how = draw.randrange(4)
    if path.suffix == ".json" and how < 3:
        values = json.loads(path.read_text(encoding="utf-8"))
        more = [
            *checkpoints.untrusted.CONFIG,
            *checkpoints.untrusted.TOKENIZER,
            *checkpoints.untrusted.OWN,
            "added_tokens",
            "model",
        ]
        for _ in range(draw.randint(1, 3)):
            values[draw.choice([*values, *more])] = draw.choice(VALUES)
        path.write_text(json.dumps(values), encoding="utf-8")
        return f"{path.name}: {str(values)[:1500]}"
    if path.name == "model.safetensors" and how < 3:
        tensors = load_file(path)
        name = draw.choice(sorted(tensors))
        odd = [
            torch.zeros(0),
            torch.zeros(3, 3),
            torch.zeros(2, dtype=torch.int64),
            tensors[name].half(),
            tensors[name] * torch.nan,
        ]
        tensors[draw.choice([name, "x", "model.layers.9.x"])] = draw.choice(odd)
        save_file(tensors, path, metadata=draw.choice([None, {"format": "pt"}, {"format": "\x1b"}]))
        return f"{path.name}: {name}"
    path.write_bytes(mutated(draw, path.read_bytes()))
    return f"{path.name}: bytes"


def case(draw: random.Random, known: list[str]) -> list[str]:
    """A command line, for which files here may have been damaged."""
    kind = draw.randrange(4)
    if kind == 0:  # options
        verb, words = draw.choice(VERBS), []
        if verb in ("train", "memory", "pretrain", "evaluate", "compare", "verify", "controls"):
            plain = {"pretrain": "base.yaml", "compare": "study.yaml", "evaluate": "base", "verify": "base", "controls": "base"}
            words.append(draw.choice([plain.get(verb, "run.yaml")] * 9 + ATOMS))
        for _ in range(draw.randint(0, 3)):
            words += [f"--{draw.choice([*known, *OPTIONS, *ATOMS[:20]])}", draw.choice(ATOMS)]
        return [verb, *words, *(["--config", "run.yaml"] if verb == "evaluate" else [])]
    if kind == 1:  # a file
        name, verb = draw.choice([("run", "train"), ("run", "memory"), ("base", "pretrain"), ("study", "compare")])
        path = Path(f"{name}.yaml")
        if draw.random() < 0.5:
            path.write_bytes(mutated(draw, path.read_bytes()))
        else:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
            for _ in range(draw.randint(1, 3)):
                place = draw.choice([data, *(v for v in data.values() if isinstance(v, dict))])
                place[draw.choice([*place, "lora", "optimizer", "method_options", "methods", 1, None])] = draw.choice(VALUES)
            path.write_text(yaml.safe_dump(data), encoding="utf-8")
        return [verb, str(path), *(["--report"] if verb == "compare" else [])]
    damage(draw, Path("base"))
    end = [["evaluate", "base", "--config", "run.yaml", "--n", "4"], ["memory", "run.yaml"], ["train", "run.yaml"]]
    return draw.choice(end)


def tried(seed: int, work: Path, known: list[str]) -> str:
    """What is wrong with a case; "" if nothing is."""
    draw = random.Random(seed)
    shutil.rmtree(work / "now", ignore_errors=True)
    shutil.copytree(work / "clean", work / "now")
    os.chdir(work / "now")
    words, out, error, wrong = case(draw, known), io.StringIO(), io.StringIO(), ""
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = main(words)
    except SystemExit as exit_:
        status = exit_.code
    except TooLong:
        wrong, status = f"more than {LIMIT} s", None
    except BaseException:
        wrong, status = "Traceback " + " | ".join(traceback.format_exc().splitlines()[-7:]), None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    said = error.getvalue()
    lines = [line for line in said.splitlines() if line.startswith("minidrl: ")]
    if not wrong and status not in (0, 1, 2):
        wrong = f"status {status}"
    if not wrong and status == 2 and (len(lines) != 1 or not lines[0].isprintable()):
        wrong = f"{len(lines)} lines: {said[:300]!r}"
    if not wrong and any(not (c.isprintable() or c in "\n\r") for c in out.getvalue() + said):
        wrong = "a control character"
    return f"seed {seed}: {' '.join(words)[:300]!r}: {wrong}" if wrong else f"ok {status}"


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    asked = parser.parse_args()

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    tally: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as work:
        clean = Path(work) / "clean"
        clean.mkdir()
        tiny.checkpoint(clean / "base")
        for name, data in {"run": RUN, "base": BASE, "study": STUDY}.items():
            (clean / f"{name}.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
        known, seed = known_keys(), asked.seed
        while seed < asked.seed + asked.count and time.process_time() < asked.seconds:
            said = tried(seed, Path(work), known)
            kind = said if said.startswith("ok") else "WRONG"
            tally[kind] = tally.get(kind, 0) + 1
            if kind == "WRONG":
                print(said, flush=True)
            seed += 1
        os.chdir("/")
    print(json.dumps(tally | {"last seed": seed - 1}))
    return 1 if "WRONG" in tally else 0


if __name__ == "__main__":
    sys.exit(run())
