"""What a user mistypes and what a stranger sends: answered by one line that names it and exit status 2; nothing is lost.

``WRONG``, ``FILES`` and ``CHECKPOINTS`` are tables of inputs with a part of the line that must come; ``tests/fuzz_inputs.py``
draws inputs that nobody chose.
"""

import ast
import base64
import contextlib
import json
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import tiny
from minidrl import methods
from minidrl.run import checkpoints, config, files, launch, report, runs, trainer, untrusted
from minidrl.run.cli import main
from minidrl.tasks import chat
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import Countdown, tokenizer
from research import controls, studies

SAMPLER = {"order": "left_to_right", "temperature": 1.0, "length": 4, "block_length": 4, "tokens_per_step": 1}
TASK = {"num_numbers": 2, "held_out_share": 0.3}
RUN = {"model": "base", "task": TASK, "sampler": SAMPLER, "steps": 1, "num_prompts": 2, "num_generations": 3}
RUN |= {"evaluate": {"n": 4}}
BASE = {"task": TASK, "sampler": SAMPLER, "network": tiny.SIZES, "steps": 1, "batch_size": 4, "evaluate": {"n": 4}}
STUDY = {"config": "run.yaml", "methods": ["reinforce"], "rates": [1e-4], "seeds": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    tiny.checkpoint(folder / "base")
    for name, data in {"run": RUN, "base": BASE, "study": STUDY}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    return folder


@pytest.fixture
def here(place, monkeypatch) -> Path:
    """A working directory that a refused command must leave as it was."""
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    yield place
    assert sorted(place.rglob("*")) == before


@pytest.fixture
def folder(place, tmp_path, monkeypatch, blank_curve) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capfd, *words: str) -> str:
    """The one line with which a command is refused."""
    capfd.readouterr()
    try:
        status = main(list(words))
    except SystemExit as exit_:
        status = exit_.code
    out, error = capfd.readouterr()
    assert (status, out) == (2, ""), error
    assert error.startswith("minidrl: ") and error.count("\n") == 1 and error.endswith("\n")
    assert error[:-1].isprintable() and len(error) < launch.LONGEST
    return error


# -------------------------------------------------------------------------------------------------------- command lines
WHOLE = ("steps", "num_prompts", "num_generations", "num_iterations", "micro_batch", "save_every", "seed", "threads")
NETWORK = ("network.hidden_size", "network.num_hidden_layers", "network.num_attention_heads", "network.intermediate_size")
NO_INTEGERS = ("x", "1.5", ".nan", "[1]", "{a:1}", "1e400", "9" * 30, "2020-01-01")
REALS = ("optimizer.learning_rate", "optimizer.beta1", "optimizer.weight_decay", "evaluate.temperature", "lora.alpha")
NO_REALS = ("fast", ".nan", "[1]", "true", "{}")

WRONG = {}
WRONG |= {f"train run.yaml --{key} {value}": f"{key}: got " for key in WHOLE for value in NO_INTEGERS if key != value}
WRONG |= {f"pretrain base.yaml --{key} {value}": f"{key}: got " for key in (*NETWORK, "batch_size") for value in NO_INTEGERS}
WRONG |= {f"memory run.yaml --{key} {value}": f"{key}: got " for key in REALS for value in NO_REALS}
WRONG |= {
    # numbers that do not fit
    "train run.yaml --num_prompts 1000000000": "num_prompts: got 1000000000; allowed up to 349525 with 3 generations",
    "train run.yaml --num_generations 1000000000": "num_generations: got 1000000000; allowed up to 1048576",
    "train run.yaml --num_iterations 1000000000": "num_iterations: got 1000000000; allowed up to 4096",
    "train run.yaml --threads 100000": "threads: got 100000; allowed up to",
    "pretrain base.yaml --threads 100000": "threads: got 100000; allowed up to",
    **dict.fromkeys(
        (f"{verb} run.yaml --sampler.length 1 --sampler.block_length 1" for verb in ("train", "memory")),
        "sampler.length: got 1; allowed from 3, as the shortest response to countdown has",
    ),
    "pretrain base.yaml --sampler.length 2 --sampler.block_length 2": "sampler.length: got 2; allowed from 3",
    "evaluate base --config run.yaml --n 4 --length 2": "sampler.length: got 2; allowed from 3",
    "train run.yaml --task.num_numbers 4 --sampler.length 6 --sampler.block_length 6": "sampler.length: got 6; allowed from 7",
    "train run.yaml --evaluate.n 1000000000": "evaluate.n: got 1000000000; allowed up to 1048576",
    "train run.yaml --evaluate.skip 1000000000": "evaluate.skip: got 1000000000; allowed up to 1048576",
    "train run.yaml --sampler.length 1000000 --sampler.block_length 1000000": "sampler.length: got 1000000; allowed up to",
    "train run.yaml --method grpo --method_options.plan.num_states 1000000": "num_states: got 1000000; allowed up to 174762",
    "train run.yaml --method gdpo --method_options.plan.num_nodes 1000000": "num_nodes: got 1000000; allowed up to 174762",
    "memory run.yaml --sampler.length 1000000 --sampler.block_length 1000000": "sampler.length: got 1000000",
    "pretrain base.yaml --batch_size 1000000000": "batch_size: got 1000000000; allowed up to 1048576",
    "pretrain base.yaml --network.num_hidden_layers 1000000": "network.num_hidden_layers: got 1000000; allowed up to 1024",
    "pretrain base.yaml --network.hidden_size 100000000": "GB predicted at the peak (2 layers of 100000000",
    "pretrain base.yaml --network.intermediate_size 1e12": "memory: got",
    "evaluate base --config run.yaml --n 4 --samples 1000000000": "samples: got '1000000000'; allowed up to 262144",
    "evaluate base --config run.yaml --n 1000000000": "n: got '1000000000'; allowed up to 1048576",
    "evaluate base --config run.yaml --n 36": "evaluate.n: got 36; allowed at most 35, the held-out puzzles",
    "evaluate base --config run.yaml --n 1e3": "n: got '1e3'; allowed integers from 1",
    f"evaluate base --config run.yaml --n {'9' * 5000}": "n: got '9999",
    "evaluate base --config run.yaml --temperature inf": "temperature: got inf; allowed 0 (greedy)",
    "evaluate base --config run.yaml --temperature 1e-320": "temperature: got 1e-320; allowed 0 (greedy), and numbers",
    "train run.yaml --lora.rank 1000000000000": "lora.rank: got 1000000000000; allowed up to 65536",
    "train run.yaml --lora.alpha 1e308": "lora.alpha: got 1e+308; allowed numbers above 0, up to 1e+06",
    "train run.yaml --optimizer.weight_decay .inf": "optimizer.weight_decay: got inf; allowed finite numbers",
    "train run.yaml --. 3": "argument '--.': allowed --key value, a name around each point",
    "train run.yaml --..steps=3": "argument '--..steps': allowed --key value, a name around each point",
    f"train {'x' * 5000}.yaml": "config: got 'xxx",
    f"train run.yaml --out {'x' * 300}": "out: got 'xxx",
    f"evaluate base --config run.yaml --out {'x' * 300}": "out: got 'xxx",
    f"controls {'x' * 5000}": "runs: got 'xxx",
    "evaluate base --config run.yaml --sampler.temperature 0.3": "sampler.temperature: got '0.3'; allowed in its place",
    "evaluate --compare a b --json": "json: got True with --compare; allowed one of them",
    "evaluate --compare a b --out z": "out: got 'z' with --compare",
    "tasks gsm8k --model base": "--model: unknown option",
    "compare study.yaml --ledger curves.csv": "ledger: got 'curves.csv', the name of the curves beside it",
    "compare study.yaml --rates 1.0e-4,1.00000001e-4": "allowed numbers that differ in their first digits",
    # digits of other scripts
    "train run.yaml --steps \uff13": "steps: got '\uff13'; allowed a value of type int",
    "train run.yaml --optimizer.learning_rate \uff11": "optimizer.learning_rate: got '\uff11'; allowed a value of type float",
    "compare study.yaml --rates \uff11": "rates: got ['\uff11']; allowed different numbers",
    "evaluate base --config run.yaml --n 4 --temperature \u0661": "temperature: got '\u0661'; allowed numbers from 0",
    # under their whole names
    "train run.yaml --evaluate.temperature 1e308": "minidrl: evaluate.temperature: got 1e+308; allowed 0 (greedy), and numbers",
    "train run.yaml --method_options.aggregation max": "minidrl: method_options.aggregation: got 'max' for reinforce; allowed",
    "train run.yaml --method egspo-released": "minidrl: method_options.plan.num_states: got 8; allowed up to the 4 steps",
    "train run.yaml --lora.rank 99999": "lora.rank: got 99999; allowed up to 65536",
    "evaluate base --config run.yaml --temperature warm": "temperature: got 'warm'; allowed numbers from 0",
    "memory run.yaml --gpus 9999999999": "gpus: got '9999999999'; allowed up to",
    "compare run.yaml --methods reinforce --seeds 1000000000": "seeds: got 1000000000, 1 in choose: 1000000000 runs",
    "compare run.yaml --methods reinforce --jobs 1000000": "jobs: got '1000000'; allowed up to",
    "compare study.yaml --choose.seeds 1e6 --rates 1e-4,2e-4": "1000000 in choose",
    # words where others are meant
    "train run.yaml --method [1]": "method: got [1]; allowed a value of type str",
    "train run.yaml --method_options [1]": "method_options: got [1]; allowed a value of type dict",
    "train run.yaml --method_options {1:2}": "allowed plan.num_states",
    "train run.yaml --method_options.plan.min_entropy .nan": "method_options.plan.min_entropy: got nan; allowed a number like",
    "train run.yaml --method_options.kl.beta .nan": "method_options.kl.beta: got nan",
    "train run.yaml --task {name:[1]}": "task",
    "train run.yaml --task.name [1]": "task.name: got [1]; allowed text",
    "train run.yaml --task.name chess": "task.name: got 'chess'; allowed countdown",
    "train run.yaml --device meta": "device: got 'meta'; allowed cpu, and cuda where torch finds a GPU",
    "train run.yaml --device cuda:1234": "device: got 'cuda:1234'; allowed cpu, cuda",
    "train run.yaml --device xla": "device: got 'xla'; allowed cpu, cuda",
    "memory run.yaml --device quantum": "device: got 'quantum'; allowed cpu, cuda",
    "verify base --device meta": "device: got 'meta'; allowed cpu, and cuda where torch finds a GPU",
    "verify base --dtype int8": "dtype: got 'int8'; allowed stored, float32, bfloat16",
    "verify base --prompt x": "answer: got None with prompt 'x'",
    "evaluate --compare a.json b.json --n 5": "n: got '5' with --compare; allowed one of them",
    "evaluate --compare a.json b.json --samples x": "samples: got 'x' with --compare; allowed one of them",
    "evaluate base --config run.yaml --temperature 1e308": "temperature: got 1e+308; allowed 0 (greedy), and numbers from",
    "verify base --out nowhere": "out: got 'nowhere'; allowed a folder",
    "verify base --out /proc": "out: got '/proc'; allowed a folder that can be written to",
    "compare study.yaml --methods ppo,ppo": "methods: got ['ppo', 'ppo']; allowed each name once",
    "compare study.yaml --seed 3": "settings.seed: got a value; allowed seeds of the study",
    "verify nowhere": "model: got 'nowhere', which holds no config.json",
    "verify base more": "argument 'more': allowed --key value",
    "train run.yaml --=5": "argument '--=5': allowed --key value",
    "train run.yaml ---steps 5": "argument '---steps': allowed --key value",
    "train run.yaml --. 5": "argument '--.': allowed --key value",
    "train run.yaml --a.b.c.d.e 5": "a: unknown key",
    "train run.yaml --steps &a": "steps: got ",
    "train run.yaml --steps *a": "steps: got '*a'; allowed a value in YAML",
    "train run.yaml --steps !!python/name:os.system": "steps: got '!!python/name:os.system'; allowed a value in YAML",
    f"train run.yaml --steps {'[' * 3000}": "allowed a value in YAML",
    f"train run.yaml --steps {'9' * 5000}": "allowed a value in YAML",
    f"train run.yaml --{'x' * 100000} 5": "unknown key",
    "train run.yaml --model \x1b]0;title\x07": r"model: got '\x1b]0;title\x07'; allowed a value in YAML",
    "train run.yaml --model base\x1b[31m": "model: got ",
    "train run.yaml --model a\u202eb": r"\u202e",
    "train \x1b[2J": r"config: got '\x1b[2J', which is no file",
    "\x1b[2J": r"invalid choice: '\x1b[2J'",
    "methods \x1b[31m": r"methods: got '\x1b[31m'",
    "where \x1b[31m": r"where: got '\x1b[31m'",
    "tasks 5": "task.name: got '5'; allowed countdown, sudoku, code, gsm8k, math500",
    "tasks gsm8k 5": "argument '5': allowed --key value",
    "tasks --json=yes": "--json: unknown option",
    "tasks sudoku --check run.yaml": "tasks: got --check with sudoku, whose problems are generated",
    "tasks gsm8k --check run.yaml": "check: got 'run.yaml', whose ending is another; allowed .jsonl, .json, .parquet files",
    "tasks gsm8k --check nowhere.json": "check: got 'nowhere.json', which is no file",
    "tasks gsm8k --check nowhere.json --task.shot 2": "task.shot: unknown key (did you mean task.shots?)",
    "tasks gsm8k --check nowhere.json --steps 2": "--steps: unknown option",
    "tasks --model base": "model: got 'base' without --check",
    "evaluate": "model: got none; allowed a folder, or --compare A B",
    "evaluate base --config run.yaml --length 0": "length: got '0'; allowed integers from 1",
    "evaluate base --config run.yaml --length 4,many": "length: got 'many'; allowed integers from 1",
    "evaluate base --config run.yaml --length 9999999999": "length: got '9999999999'; allowed up to",
    "evaluate base --config run.yaml --sampler.block_length 3": "block_length: got 3; allowed a divisor of length",
    "evaluate base --config run.yaml --batch 0": "batch: got '0'; allowed integers from 1",
    "evaluate base --config run.yaml --seed -1": "seed: got '-1'; allowed integers from 0",
    "evaluate base --config run.yaml --steps 5": "--steps: unknown option",
    "evaluate base --config run.yaml --out run.yaml": "out: got 'run.yaml', which is there already; allowed another --out",
    "evaluate base --config run.yaml --task gsm8k --task.revision main": "task.revision: got 'main'; allowed a commit",
    "evaluate --compare run.yaml nowhere": "run.yaml",
    "evaluate --compare nowhere run.yaml": "compare: got 'nowhere', which is no file; allowed a file that evaluate --out",
    "evaluate base --compare nowhere nowhere": "model: got 'base' with --compare; allowed one of them",
    "estimators 5": "argument '5': allowed --key value",
    "controls nowhere": "run: got 'nowhere', which holds no summary.json",
    "controls base": "run: got 'base', which holds no summary.json",
    "controls": "the following arguments are required: runs",
    "compare nowhere.yaml": "config: got 'nowhere.yaml', which is no file",
    "compare study.yaml --methods ../up": "methods: got '../up'",
    "compare study.yaml --methods a/b": "methods: got 'a/b'",
    "compare study.yaml --methods ,": "methods: got ['', '']",
    "compare study.yaml --updates [1]": "updates: got [[1]]; allowed different numbers",
    "compare study.yaml --updates 1,1": "updates: got [1, 1]; allowed different numbers",
    "compare study.yaml --rates .nan": "rates: got [nan]; allowed different numbers",
    "compare study.yaml --rates [1]": "rates: got [[1]]; allowed different numbers",
    "compare study.yaml --hours .nan": "hours: got nan; allowed a value of type float",
    "compare study.yaml --equal time": "equal: got 'time'; allowed updates, calls",
    "compare study.yaml --choose 3": "choose: got 3; allowed a section",
    "compare study.yaml --settings 3": "settings: got 3; allowed a section",
    "compare study.yaml --ledger run.yaml --report": "run.yaml line 1: got no column",
    "compare study.yaml --report": "ledger: got 'research/results/ledger.csv', which is no file; allowed ledger.csv and curves.csv",
    "compare study.yaml --ledger nowhere.csv --report": "ledger: got 'nowhere.csv', which is no file",
    "pretrain base.yaml --task.name gsm8k": "task.name: got 'gsm8k', which has no demonstrations",
    # nothing, where it would be taken for the default
    "train run.yaml --out ": "out: got ''; allowed text, or leave it out",
    **{f"evaluate base --{key} ": f"{key}: got ''; allowed" for key in ("config", "task", "length", "out", "seed")},
    **{f"compare study.yaml --{key} ": f"{key}: got ''; allowed" for key in ("methods", "ledger", "out", "seeds")},
    **{f"verify base --{key} ": f"{key}: got ''; allowed" for key in ("prompt", "text", "device", "out")},
    "controls ": "runs: got ''; allowed text",
    "tasks gsm8k --check ": "check: got ''; allowed text",
    "evaluate base --config .": "config: got '.', which is no file",
    "evaluate base --config base/model.safetensors": "base/model.safetensors",
    "evaluate run.yaml --config run.yaml --n 4": "model: got 'run.yaml', which holds no config.json",
}


def test_the_table_is_long_and_covers_every_verb():
    assert len(WRONG) >= 200
    verbs = {
        "pretrain",
        "train",
        "memory",
        "verify",
        "evaluate",
        "compare",
        "controls",
        "estimators",
        "methods",
        "where",
        "tasks",
    }
    assert verbs <= {command.split(" ")[0] for command in WRONG}


@pytest.mark.parametrize("command", WRONG, ids=lambda text: text[:60].encode("unicode_escape").decode())
def test_a_wrong_command_is_one_line_and_writes_nothing(command, here, capfd, monkeypatch):
    monkeypatch.setattr(trainer.checkpoints, "_read_network", lambda *_: pytest.fail("weights were read"))
    assert WRONG[command] in refused(capfd, *command.split(" "))


# ---------------------------------------------------------------------------------------------------------------- files
def laughs(levels: int) -> str:
    """Nine values, nine times those, and so on."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i + 1}: &a{i + 1} [{','.join([f'*a{i}'] * 9)}]" for i in range(levels)]
    return "\n".join(lines)


R = yaml.safe_dump(RUN)
FILES = {
    b"\xff\xfes\x00": "wrong.yaml is no UTF-8 text: byte 0xff at 0",
    b"steps: \x80": "wrong.yaml is no UTF-8 text: byte 0x80 at 7",
    b"steps: 1\x00": "wrong.yaml is no YAML that can be used",
    b"# " + b"x" * 300_000: "wrong.yaml has 300002 bytes; allowed up to 262144",
    b"a: b: c": "wrong.yaml is no YAML",
    b"\t": "wrong.yaml is no YAML",
    b"5": "wrong.yaml holds int; allowed a mapping",
    b"{}": "missing",
    R + "steps: 2\n": "key steps is there twice",
    R + "optimizer: {warmup: 1, warmup: 2}\n": "key warmup is there twice",
    "a: &a [*a]": "an anchor inside itself",
    "a: *nothing": "undefined alias",
    laughs(8): "more than 20000 values once its anchors are resolved",
    "<<: &a {<<: *a}": "is no YAML",
    "steps: " + "[" * 3000: "nested more than 20 levels deep",
    "steps: " + "{a: " * 3000: "nested more than 20 levels deep",
    "steps: " + "9" * 5000: "is no YAML that can be used",
    "steps: !!python/object/apply:os.system ['true']": "could not determine a constructor",
    "? [a, b]\n: 1": "unhashable key",
    "steps: !!timestamp x": "wrong.yaml is no YAML that can be used",
    "steps: !!float ''": "wrong.yaml is no YAML that can be used",
    "steps: !!bool zz": "wrong.yaml is no YAML that can be used",
    "model: \x1b[31m": "special characters are not allowed",
    'model: "\\e[31m"\nsampler: {}': "sampler.order: missing",
    R + "steps: 1:30\n": "twice",
    R.replace("steps: 1", "steps: 1:30"): "steps: got '1:30'; allowed a value of type int",
    R.replace("steps: 1", "steps: 0o8"): "steps: got '0o8'; allowed a value of type int",
    R.replace("steps: 1", "steps: .nan"): "steps: got nan; allowed a value of type int",
    R.replace("steps: 1", "steps: 2020-01-01"): "steps: got '2020-01-01'",
    R.replace("model: base", "model: null"): "model: got None; allowed a value of type str",
    R.replace("model: base", 'model: "\\ud800"'): r"model: got '\ud800'; allowed what can be the name of a file",
    R.replace("model: base", 'model: "a\\0b"'): r"model: got 'a\x00b'; allowed what can be the name of a file",
    R + "method: [1]\n": "method: got [1]; allowed a value of type str",
    R + "method_options: {1: 2}\n": "method_options: got the key 1; allowed plan.num_states",
    R + "lora: {target_modules: [1]}\n": "lora.target_modules: got [1]",
    R + "optimizer: []\n": "optimizer: got []; allowed a section",
    R + "1: 2\n": "1: unknown key",
    R + "? null\n: 2\n": "None: unknown key",
}


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_a_wrong_file_is_one_line_for_every_verb_that_reads_it(content, folder, capfd):
    (folder / "wrong.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    said = refused(capfd, "train", "wrong.yaml")
    assert FILES[content] in said
    assert refused(capfd, "memory", "wrong.yaml") == said
    for verb in ("pretrain", "compare"):
        refused(capfd, verb, "wrong.yaml")


STUDIES = {
    "methods: 3": "methods: got 3; allowed a value of type dict",
    "methods: [[1]]": "methods: got [[1]]; allowed a list of names",
    "methods: {a: 3}": "methods: got 'a': 3; allowed a name",
    "methods: {../../up: {}}": "methods: got '../../up'",
    'methods: {"a\\e[31m": {}}': "methods: got ",
    "methods: []": "methods: got none; allowed at least one",
    "methods: {reinforce: {method: [1]}}": "method: got [1]",
    "methods: {reinforce: {steps: [1]}}": "steps: got [1]",
    "methods: {reinforce: {1: 2}}": "got the key 1",
    "rates: [true]": "rates: got [True]; allowed different numbers",
    "methods: {a: {method: ppo}, b: {method: ppo, task.held_out_share: 0.2}}": "methods: got 'b' with another task than 'a'",
    "methods: {a: {method: ppo}, b: {method: ppo, evaluate.n: 3}}": "methods: got 'b' with another evaluate.n than 'a'",
    "methods: {a: {method: ppo}, b: {method: ppo, model: nowhere}}": "methods: got 'b' with another model than 'a'",
    "methods: [reinforce, reinforce]": "methods: got ['reinforce', 'reinforce']; allowed each name once",
    "settings: {seed: 3}": "settings.seed: got a value; allowed seeds of the study",
    "settings: {optimizer: {learning_rate: 0.1}}": "settings.optimizer.learning_rate: got a value; allowed rates of",
    "settings: {optimizer.learning_rate: 0.1}": "settings.optimizer.learning_rate: got a value; allowed rates of",
    "methods: {reinforce: {num_iterations: 2}}": "methods.reinforce.num_iterations: got a value; allowed updates of",
    'config: "a\\0b"': r"a\x00b'; allowed what can be the name of a file",
    'config: "\\ud800"': r"\ud800'; allowed what can be the name of a file",
    "choose: [1]": "choose: got [1]; allowed a section",
    "settings: [1]": "settings: got [1]; allowed a section",
    "settings: {1: 2}": "got the key 1",
    "rates: []": "rates: got []; allowed different numbers",
    "rates: [[1], {}]": "rates: got [[1], {}]; allowed different numbers",
    "rates: [.nan]": "rates: got [nan]",
    "updates: [[1]]": "updates: got [[1]]",
    "seeds: 100000": "seeds: got 100000, 1 in choose: 100000 runs; allowed up to 10000 runs",
    "config: [1]": "config: got [1]; allowed a value of type str",
    "config: nowhere.yaml": "nowhere.yaml', which is no file",
}


@pytest.mark.parametrize("line", STUDIES)
def test_a_wrong_study_is_one_line(line, folder, capfd):
    data = STUDY | yaml.safe_load(line)
    (folder / "wrong.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    assert STUDIES[line] in refused(capfd, "compare", "wrong.yaml")


NUMBERS = {
    "2e-2": 0.02,
    "2E-2": 0.02,
    "+2e2": 200.0,
    "2.e1": 20.0,
    ".5": 0.5,
    "1_000.5": 1000.5,
    "-3": -3,
    "010": 10,
    "0x1F": 31,
}
NUMBERS |= {
    "0o17": 15,
    "1_000": 1000,
    "1:30": "1:30",
    "1e5x": "1e5x",
    "e5": "e5",
    "2020-01-01": "2020-01-01",
    ".": ".",
}


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_are_those_of_yaml_1_2(text):
    found = untrusted.parsed_yaml(text, "x")
    assert (type(found), found) == (type(NUMBERS[text]), NUMBERS[text])


@pytest.mark.parametrize("text", [*NUMBERS, "yes", "null", "-", "~", "0b1", "1:30:00", "012e4", "\x1b", "=", "<<"])
def test_text_comes_back_as_text_from_a_runs_config(text):
    written = yaml.dump({"model": text}, Dumper=untrusted.Dumper)
    assert untrusted.parsed_yaml(written, "x") == yaml.safe_load(written) == {"model": text}


def test_numbers_in_every_usual_notation_reach_the_settings(here):
    words = {"steps": "1e3", "method": "ppo", "method_options.objective.epsilon_low": "2e-2", "seed": "010"}
    settings = config.load(config.Train, "run.yaml", words)
    assert (settings.steps, settings.seed) == (1000, 10) and type(settings.steps) is int
    row = methods.with_options(methods.METHODS["ppo"], settings.method_options)
    assert row.objective.keywords["epsilon_low"] == 0.02


def test_an_anchor_that_is_small_is_welcome():
    assert untrusted.parsed_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]", "x")["b"] == {"x": 1, "y": 2}


# ---------------------------------------------------------------------------------------------------------- checkpoints
def edited(name: str, **changes):
    def edit(folder: Path) -> None:
        values = json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(values | changes), encoding="utf-8")

    return edit


def raw(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def index_of(names: object):
    """An index instead of the one file, which stays under another name."""

    def edit(folder: Path) -> None:
        os.replace(folder / "model.safetensors", folder / "own.safetensors")
        shutil.copy(folder / "own.safetensors", folder.parent / "outside.safetensors")
        (folder / checkpoints.INDEX).write_text(json.dumps(names), encoding="utf-8")

    return edit


def adapters(**changes):
    def edit(folder: Path) -> None:
        words = {
            "peft_type": "LORA",
            "base_model_name_or_path": "nowhere",
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
        }
        (folder / checkpoints.ADAPTER_CONFIG).write_text(json.dumps(words | changes), encoding="utf-8")

    return edit


def as_integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].view(torch.int32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def replaced(pattern: str, content: str) -> dict:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def sliced(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def steps(step: str, *parts: dict):
    """A tokenizer whose step is these parts, one after the other."""
    return edited("tokenizer.json", **{step: {"type": "Sequence", untrusted.STEPS[step]: list(parts)}})


def template(single: list, ids: list[int] = ()):
    tokens = {"x": {"id": "x", "ids": list(ids), "tokens": ["x"] * len(ids)}}
    words = {"type": "TemplateProcessing", "single": single, "pair": WHOLE_TEXT, "special_tokens": tokens}
    return edited("tokenizer.json", post_processor=words)


def model(**changes):
    def edit(folder: Path) -> None:
        words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        edited("tokenizer.json", model=words | changes)(folder)

    return edit


C, T = "config.json", "tokenizer_config.json"
PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # the library prints a stack, past Python
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(6) + b"a" * 600).decode()}
DOUBLED, GROWS = replaced(".", "aa"), "which makes a text {} times as long with what is before; allowed up to 512"
WHOLE_TEXT = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
TWICE = {"type": "TemplateProcessing", "single": WHOLE_TEXT[:1] * 2, "pair": WHOLE_TEXT, "special_tokens": {}}
CHECKPOINTS = {
    "head_dim 0": (edited(C, head_dim=0), "config.json has head_dim 0; allowed whole numbers 1 to 4096"),
    "head_dim odd": (edited(C, head_dim=3), "heads of size 3; allowed even numbers"),
    "head_dim true": (edited(C, head_dim=True), "head_dim True"),
    "no heads": (edited(C, num_attention_heads=0), "num_attention_heads 0; allowed whole numbers 1 to 4096"),
    "heads in groups": (edited(C, num_key_value_heads=3), "3 key-value heads; allowed divisors of its 2"),
    "a million layers": (edited(C, num_hidden_layers=10**6), "num_hidden_layers 1000000; allowed whole numbers 1 to 1024"),
    "layers -1": (edited(C, num_hidden_layers=-1), "num_hidden_layers -1"),
    "layers 1.5": (edited(C, num_hidden_layers=1.5), "num_hidden_layers 1.5"),
    "many layers": (edited(C, num_hidden_layers=1000, hidden_size=2**20), "weights; allowed the"),
    "a large vocabulary": (edited(C, vocab_size=2**24), "weights; allowed the"),
    "a huge vocabulary": (edited(C, vocab_size=2**40), "vocab_size 1099511627776; allowed whole numbers 1 to"),
    "a list for a string": (edited(C, model_type=["llama"]), "model_type ['llama']; allowed a bidirectional llama"),
    "a mapping for a string": (edited(C, model_type={}), "model_type {}"),
    "a string for a number": (edited(C, hidden_size="32"), "hidden_size '32'"),
    "an activation": (edited(C, hidden_act="os.system"), "hidden_act 'os.system'; allowed silu"),
    "an activation list": (edited(C, hidden_act=["silu"]), "hidden_act ['silu']"),
    "gptq": (
        edited(C, quantization_config={"quant_method": "gptq"}),
        "quantization_config {'quant_method': 'gptq'}; allowed none",
    ),
    "quantisation": (edited(C, quantization_config=[1]), "quantization_config [1]; allowed none"),
    "dtype": (edited(C, dtype="nn"), "dtype 'nn'; allowed float32, bfloat16"),
    "dtype list": (edited(C, torch_dtype=["float32"]), "torch_dtype ['float32']"),
    "eps nan": (edited(C, rms_norm_eps=float("nan")), "rms_norm_eps nan; allowed finite numbers above 0"),
    "rope": (edited(C, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_parameters {"),
    "rope number": (edited(C, rope_parameters=5), "rope_parameters 5"),
    "rope theta": (edited(C, rope_theta="1"), "rope_theta '1'"),
    "mask list": (edited(C, mask_token_id=[1]), "mask_token_id [1]"),
    "mask negative": (edited(C, mask_token_id=-1), "mask_token_id -1"),
    "eos text": (edited(C, eos_token_id="2"), "eos_token_id '2'"),
    "block length": (edited(C, block_length=0), "block_length 0"),
    "block length true": (edited(C, block_length=True), "block_length True"),
    "tie": (edited(C, tie_word_embeddings="no"), "tie_word_embeddings 'no'; allowed true, false"),
    "escape": (edited(C, model_type="\x1b[31m"), r"model_type '\x1b[31m'"),
    "config nothing": (raw(C, b""), "config.json is no JSON"),
    "config a list": (raw(C, b"[]"), "config.json holds list; allowed an object"),
    "config deep": (raw(C, b"[" * 10**6), "config.json is no JSON: nested too deeply"),
    "config bytes": (raw(C, b"\xff\xfe"), "config.json is no UTF-8 text"),
    "config huge": (raw(C, b" " * (5 * 2**20)), "config.json has 5242880 bytes; allowed up to"),
    "config twice": (raw(C, b'{"model_type": "llama", "model_type": "x"}'), "key 'model_type' is there twice; allowed once"),
    "config digits": (raw(C, b'{"model_type": "llama", "x": ' + b"9" * 5000 + b"}"), "config.json is no JSON"),
    "index outside": (
        index_of({"weight_map": {"a": "../outside.safetensors"}}),
        "weight_map {'a': '../outside.safetensors'}; allowed",
    ),
    "index absolute": (index_of({"weight_map": {"a": "/etc/passwd"}}), "weight_map {'a': '/etc/passwd'}"),
    "index hidden": (index_of({"weight_map": {"a": ".own.safetensors"}}), "weight_map"),
    "index pickle": (index_of({"weight_map": {"a": "own.bin"}}), "weight_map"),
    "index list": (index_of([]), "holds list; allowed an object"),
    "index numbers": (index_of({"weight_map": {"a": 5}}), "weight_map {'a': 5}; allowed"),
    "index without": (index_of({}), "gives no weight_map"),
    "index empty": (index_of({"weight_map": {}}), "gives no weight_map"),
    "index escape": (index_of({"weight_map": {"a": "\x1b[31m.safetensors"}}), r"\x1b[31m"),
    "index bare": (index_of({"weight_map": {"a": "own.safetensors"}}), "gives no metadata; allowed an object"),
    "index missing many": (
        index_of({"metadata": {}, "weight_map": {f"w{i}": f"s{i}.safetensors" for i in range(9)}}),
        "which lacks s0.safetensors, s1.safetensors, s2.safetensors and 6 more, named by",
    ),
    "index missing": (index_of({"weight_map": {"a": "b.safetensors"}}), "which lacks b.safetensors"),
    "weights text": (raw("model.safetensors", b"hello"), "cannot be read"),
    "weights header": (raw("model.safetensors", b"\xff" * 8 + b"{}"), "cannot be read"),
    "weights of integers": (as_integers, "model.safetensors has lm_head.weight of dtype I32; allowed F64, F32, F16, BF16"),
    "weights of 1024 layers": (edited(C, num_hidden_layers=1024), "weights; allowed the "),
    "tokenizer text": (raw("tokenizer.json", b"hello"), "tokenizer.json is no JSON"),
    "tokenizer deep": (raw("tokenizer.json", b"[" * 10**5), "tokenizer.json is no JSON: nested too deeply"),
    "tokenizer empty": (raw("tokenizer.json", b"{}"), "cannot be read: tokenizer.json: got "),
    "tokenizer twice": (raw("tokenizer.json", b'{"a": {"b": 1, "b": 2}}'), "is no JSON: key 'b' is there twice; allowed once"),
    "tokenizer doubles": (steps("normalizer", *[DOUBLED] * 40), "has normalizer of 41 parts or more; allowed up to 32"),
    "tokenizer nested": (steps("normalizer", *[{"type": "Sequence", "normalizers": [DOUBLED] * 3}] * 3), GROWS.format(729)),
    "tokenizer between": (steps("normalizer", *[replaced("", "a")] * 10), GROWS.format(1024)),
    "tokenizer content": (
        steps("normalizer", {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 600}),
        "600 times",
    ),
    "tokenizer before": (steps("normalizer", *[{"type": "Prepend", "prepend": "a" * 22}] * 2), GROWS.format(529)),
    "tokenizer bytes": (steps("pre_tokenizer", *[{"type": "ByteLevel"}] * 4), GROWS.format(625)),
    "tokenizer marks": (steps("pre_tokenizer", *[{"type": "Metaspace", "replacement": "_"}] * 10), GROWS.format(1024)),
    "tokenizer charsmap": (edited("tokenizer.json", normalizer=CHARSMAP), GROWS.format(600)),
    "tokenizer decoders": (steps("decoder", *[DOUBLED] * 7), GROWS.format(729)),
    "tokenizer pieces": (
        template([{"SpecialToken": {"id": "x", "type_id": 0}}] * 20_000, [0] * 2000),
        GROWS.format(40_000_000),
    ),
    "tokenizer processors": (steps("post_processor", *[TWICE] * 10), GROWS.format(1024)),
    "tokenizer without type": (edited("tokenizer.json", normalizer={"normalizers": []}), "allowed objects with a type"),
    "tokenizer parts": (edited("tokenizer.json", decoder={"type": "Sequence", "decoders": [1]}), "has decoder with 1; allowed"),
    "tokenizer base64": (edited("tokenizer.json", normalizer={"type": "x", "precompiled_charsmap": "A"}), "allowed base64"),
    "tokenizer word": (model(max_input_chars_per_word=10**9), "max_input_chars_per_word: whole numbers 0 to 1000"),
    "tokenizer vocabulary": (model(vocab=[["a" * 257, 0.0]]), "allowed an object with"),
    "tokenizer fixed": (edited("tokenizer.json", padding={"strategy": {"Fixed": 10**9}}), "has padding {'strategy': {'Fixed'"),
    "tokenizer panic": (edited("tokenizer.json", normalizer=PANICS), "tokenizer.json: got Precompiled: Error("),
    "tokenizer list": (raw(T, b"[]"), "tokenizer_config.json holds list"),
    "tokenizer length": (edited(T, model_max_length="x"), "tokenizer_config.json has model_max_length 'x'; allowed "),
    "tokenizer inputs": (edited(T, model_input_names=["x"]), "model_input_names ['x']; allowed a list of input_ids"),
    "adapters alpha": (adapters(lora_alpha=1e308), "lora_alpha 1e+308; allowed numbers above 0, up to 1e6"),
    "tokenizer token": (edited(T, eos_token=5), "tokenizer_config.json has eos_token 5; allowed Unicode text"),
    "tokenizer padding": (edited(T, pad_token="x"), "with 24 tokens in its tokenizer; allowed up to 23"),
    "tokenizer decoder": (edited(T, added_tokens_decoder={"x": {"content": "a"}}), "added_tokens_decoder"),
    "tokenizer file": (edited(T, tokenizer_file="/etc/passwd"), "tokenizer_file '/etc/passwd'; allowed null"),
    "tokenizer other file": (edited(T, vocab_file="../x"), "vocab_file '../x'; allowed null"),
    "template number": (edited(T, chat_template=5), "chat_template 5; allowed Unicode text"),
    "template bytes": (raw("chat_template.jinja", b"\xff"), "chat_template.jinja is no UTF-8 text"),
    "generation": (edited("generation_config.json", eos_token_id=-1), "generation_config.json has eos_token_id -1"),
    "generation list": (raw("generation_config.json", b"[]"), "generation_config.json holds list"),
    "adapters rank": (adapters(r=0), "adapter_config.json has r 0; allowed whole numbers 1 to 65536"),
    "adapters pattern": (adapters(target_modules="(a+)+$"), "target_modules '(a+)+$'; allowed a list of names of layers"),
    "adapters regex": (adapters(target_modules=["(a+)+$"]), "target_modules ['(a+)+$']"),
    "adapters layers": (adapters(layer_replication=[[0, 10**6]]), "layer_replication [[0, 1000000]]; allowed nothing"),
    "adapters modules": (adapters(modules_to_save=["lm_head"]), "modules_to_save"),
    "adapters type": (adapters(peft_type=["LORA"]), "peft_type ['LORA']; allowed Unicode text"),
    "adapters other": (adapters(peft_type="IA3"), "adapters of type IA3 for 'nowhere'; allowed LORA"),
    "adapters base": (adapters(), "adapters of a base that cannot be loaded"),
    "adapters none": (raw("adapter_config.json", b"{}"), "adapters of type None"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_one_line_before_a_network_is_built(name, folder, capfd, monkeypatch):
    damage, said = CHECKPOINTS[name]
    damage(folder / "base")
    if name == "adapters base":
        pytest.importorskip("peft")
    if not name.startswith(("tokenizer", "weights")):  # those that a library has to read
        for family in checkpoints.FAMILIES.values():
            monkeypatch.setattr(family.network, "from_pretrained", lambda *_, **__: pytest.fail("a network was built"))
    assert said in refused(capfd, "evaluate", "base", "--config", "run.yaml", "--n", "4")


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BEGIN = {"SpecialToken": {"id": "<s>", "type_id": 0}}
MARKED = {"single": [BEGIN, *WHOLE_TEXT[:1], BEGIN], "pair": [BEGIN, WHOLE_TEXT[0], BEGIN, WHOLE_TEXT[1], BEGIN]}
MARKED |= {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}
BLANK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
UNICODE = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(6) + "\ufdfa".encode() * 11).decode()}
PUBLISHED = {  # as the tokenizers of these models say it
    "GPT-2": {"pre_tokenizer": BYTES, "post_processor": BYTES, "decoder": BYTES},
    "Qwen 2": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [sliced("\\p{N}"), BYTES]},
        "post_processor": BYTES,
        "decoder": BYTES,
    },
    "Llama 2": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, BLANK]},
        "post_processor": MARKED,
        "decoder": {"type": "Sequence", "decoders": [BLANK, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    },
    "Llama 3, LLaDA": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [sliced("\\p{N}{1,3}"), BYTES]},
        "post_processor": {"type": "Sequence", "processors": [BYTES, MARKED]},
        "decoder": BYTES,
    },
    "DeepSeek": {
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*[sliced("\\p{L}+")] * 5, {"type": "Digits"}, BYTES]},
    },
    "XLM-R": {
        "normalizer": {"type": "Sequence", "normalizers": [UNICODE, replaced(" {2,}", " ")]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True},
        "post_processor": MARKED,
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True},
    },
    "nothing": dict.fromkeys(untrusted.STEPS),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_steps_of_published_tokenizers_are_welcome(name, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(PUBLISHED[name] | {"model": {"type": "BPE", "vocab": {}}}))
    untrusted.check_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("step, part", [
    *(("normalizer", part) for part in (DOUBLED, replaced("", "abc"), {"type": "ByteLevel"})),
    *(("pre_tokenizer", part) for part in (BYTES | {"add_prefix_space": True}, {"type": "Metaspace", "replacement": "_"})),
])  # fmt: skip
@pytest.mark.parametrize("text", ["ab", "\u00e9\u4e2d \U0001f600"])
def test_no_part_makes_more_of_a_text_than_is_reckoned(text, step, part):
    """Where an expression matches nothing, it does so once more than there are characters."""
    parts = [sliced("."), part] if step == "pre_tokenizer" else [part]
    kind = {"type": "Sequence", untrusted.STEPS[step]: parts}
    made = Tokenizer.from_str(json.dumps(json.loads(tokenizer().backend_tokenizer.to_str()) | {step: kind}))
    words = made.pre_tokenizer.pre_tokenize_str(text) if step == "pre_tokenizer" else [(made.normalizer.normalize_str(text),)]
    assert sum(len(word[0]) for word in words) <= (len(text) + 1) * untrusted._growth(part, step)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 256 * 2**20) for name in ("tokenizer.json", "vocab.json", "merges.txt")),
        *(("model.safetensors.index.json", 64 * 2**20), ("run.yaml", 2**18), ("config.json", 4 * 2**20)),
    ],
)
def test_the_largest_file_that_is_read(name, most, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(most)
        untrusted.check_size(tmp_path / name)
        file.truncate(most + 1)
    with pytest.raises(ValueError, match=f"{name} has {most + 1} bytes; allowed up to {most}$"):
        untrusted.check_size(tmp_path / name)


EDGES = {  # kind -> what it allows, what it does not
    untrusted.NUMBER: ([0, -1, 0.5], [float("nan"), float("inf"), True, "1", None]),
    untrusted.ABOVE_0: ([1, 1e-12], [0, 0.0, -1, float("inf"), True, "1"]),
    untrusted.FROM_0: ([0, 0.0, 1e300], [-1e-12, float("inf"), False]),
    untrusted.SHARE: ([0, 1, 0.5], [-1e-12, 1.001, True]),
    untrusted.BELOW_1: ([0, 0.0, 0.999], [1, 1.0, -1e-12, False]),
    untrusted.ID: ([0, 2**24 - 1], [-1, 2**24, True, 1.0]),
    untrusted.LAYER: (["q_proj", "layers.0.q_proj", "0"], ["", ".q", "(a+)+$", "q proj", "\u00e4", 5, None]),
    untrusted.list_of(untrusted.ID): ([[0], [0, 1]], [[], [0, -1], [-1, 0], 0, "0", {}]),
}
EDGES |= {
    untrusted.NETWORK[name]: ([1, most], [0, most + 1, True, 1.0])
    for name, most in {
        **{"vocab_size": 2**24, "hidden_size": 2**20, "num_hidden_layers": 1024, "num_attention_heads": 4096},
        **{"num_key_value_heads": 4096, "head_dim": 4096, "intermediate_size": 2**22, "max_position_embeddings": 2**30},
    }.items()
}


@pytest.mark.parametrize("kind", EDGES, ids=lambda kind: kind.allowed[:30])
def test_what_a_file_may_hold_at_the_edges(kind):
    good, bad = EDGES[kind]
    assert all(map(kind.good, good)) and not any(map(kind.good, bad))


def test_the_deepest_and_the_widest_yaml():
    deep, wide = (lambda n: f"a: {'[' * n}x{']' * n}"), (lambda n: f"a: [{'x,' * n}]")
    assert untrusted.parsed_yaml(wide(19_997), "x") == {"a": ["x"] * 19_997} and untrusted.parsed_yaml(deep(18), "x")
    with pytest.raises(ValueError, match="nested more than 20 levels deep"):
        untrusted.parsed_yaml(deep(19), "x")
    with pytest.raises(ValueError, match="more than 20000 values"):
        untrusted.parsed_yaml(wide(19_998), "x")


def test_no_weight_is_read_to_check_names_and_sizes(here, monkeypatch):
    """Headers alone: a checkpoint of 16 GB must not be read twice."""
    opened = checkpoints.safe_open
    shape = checkpoints.describe("base")[0]

    class Header:
        def __init__(self, *arguments, **words):
            self.file = opened(*arguments, **words)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            of_file = self.file.get_slice(name)
            asked = {name: staticmethod(getattr(of_file, name)) for name in ("get_shape", "get_dtype")}
            return type("Shape", (), asked)

    monkeypatch.setattr(checkpoints, "safe_open", Header)
    checkpoints._check_size(shape, checkpoints.shards(Path("base")))


# --------------------------------------------------------------------------------------------------- optimiser's state
def tensors(change):
    def edit(folder: Path) -> None:
        found = load_file(folder / "optimizer.safetensors")
        change(found)
        save_file(found, folder / "optimizer.safetensors")

    return edit


HEAD = "model.lm_head.weight/exp_avg"
STATES = {
    "missing": (tensors(lambda t: t.pop(HEAD)), f"{HEAD} of shape missing; allowed shape (23, 32)"),
    "another shape": (tensors(lambda t: t.update({HEAD: torch.zeros(1)})), f"{HEAD} of shape (1,); allowed shape (23, 32)"),
    "another dtype": (
        tensors(lambda t: t.update({HEAD: t[HEAD].bfloat16()})),
        f"{HEAD} of dtype bfloat16; allowed float32, as in this run",
    ),
    "one more": (tensors(lambda t: t.update(x=torch.zeros(1))), "x of shape (1,); allowed no such tensor"),
    "empty": (tensors(lambda t: t.clear()), "of shape missing; allowed shape"),
    "no tensors": (raw("optimizer.safetensors", b"hello"), "optimizer.safetensors cannot be read"),
    "another step": (edited("state.json", step=5), "state.json has step 5; allowed 3, as the folder is named"),
    "no step": (raw("state.json", b"{}"), "state.json has step None; allowed 3"),
    "a list": (raw("state.json", b"[]"), "state.json holds list; allowed an object"),
    "seconds": (edited("state.json", seconds="long"), "state.json has seconds 'long'; allowed finite numbers from 0"),
    "solved": (edited("state.json", solved_before=float("nan")), "state.json has solved_before nan; allowed numbers 0 to 1"),
    "met": (edited("state.json", met=[1]), "state.json has met [1]; allowed a list of text"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_wrong_state_is_refused_before_anything_is_changed(name, tmp_path):
    """With sums that agree: whoever wrote the folder wrote them, too."""
    model = tiny.network()
    optimizer = trainer.make_optimizer(model, config.Optimizer())
    runs.save_checkpoint(tmp_path / "checkpoint-3", model, tokenizer(), optimizer, {"step": 3, "seconds": 1.0})
    for slot in optimizer.state.values():
        slot["exp_avg"].fill_(7)
    damage, said = STATES[name]
    damage(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError) as caught:
        runs.load_optimizer(tmp_path / "checkpoint-3", model, optimizer)
    assert said in str(caught.value) and str(tmp_path) in str(caught.value)
    assert all((slot["exp_avg"] == 7).all() for slot in optimizer.state.values())


def test_a_checkpoint_may_be_moved_to_a_folder_without_a_number(tmp_path):
    for name in ("kept", "best-run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text('{"step": 3}')
        assert runs._counters(tmp_path / name) == {"step": 3}


DAMAGE = {
    "state.json: no step": ("state.json", lambda text: "{}", "has step None"),
    "state.json: no scores": ("state.json", lambda text: text.replace("solved_before", "_"), "has no solved_before"),
    "state.json: no clock": ("state.json", lambda text: text.replace("seconds", "_"), "has no seconds"),
    "metrics.jsonl: no JSON": ("metrics.jsonl", lambda text: text + "zzz\n", "metrics.jsonl line"),
    "metrics.jsonl: twice": (
        "metrics.jsonl",
        lambda text: "".join(line * 2 for line in text.splitlines(keepends=True)),
        "metrics.jsonl: got loss of step 1 after that of step 1; allowed rising steps",
    ),
    "metrics.jsonl: empty": ("metrics.jsonl", lambda text: "", "metrics.jsonl: got no line; allowed those of 2 steps"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_refused_resume_leaves_the_run_as_it_was(damage, folder, capfd, monkeypatch):
    """The settings of the run are written anew only once its checkpoint has been read. Its sums agree with what is there."""
    monkeypatch.setattr(runs.files, "damage", lambda checkpoint: "")
    words = ("train", "run.yaml", "--save_every", "1", "--evaluate.n", "2", "--out", "o")
    assert main([*words, "--steps", "2"]) == 0
    name, change, said = DAMAGE[damage]
    path = folder / "o" / "checkpoint-2" / name
    good = path.read_text()
    path.write_text(change(good))
    before = {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()}
    assert said in refused(capfd, *words, "--steps", "3", "--resume")
    assert {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()} == before
    path.write_text(good)
    assert main([*words, "--steps", "3", "--resume"]) == 0
    assert "steps: 3" in (folder / "o" / "config.yaml").read_text()


def finished(folder: Path) -> list[str]:
    """A run of two steps in o, and the command that goes on with it."""
    words = ["train", "run.yaml", "--save_every", "1", "--evaluate.n", "2", "--out", "o"]
    assert main([*words, "--steps", "2"]) == 0
    return [*words, "--steps", "3", "--resume"]


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_of_which_only_a_damaged_checkpoint_was_set_aside_is_left_as_it_is(resume, folder, capfd):
    """It would start at step 0 again, write over its log, and remove what was set aside."""
    words = ["train", "run.yaml", "--out", "o"]
    assert main(words) == 0
    (folder / "o/checkpoint-1").rename(folder / "o/checkpoint-1.old")
    (folder / "o/checkpoint-1.old/state.json").write_text("{}")
    (folder / "o/summary.json").unlink()
    before = {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()}
    line = refused(capfd, *words, *(["--resume"] if resume else []))
    assert "where o/checkpoint-1.old holds state.json with other bytes than were written; allowed a run with a whole" in line
    assert "o/checkpoint-1', which holds no config.json" in refused(
        capfd, "evaluate", "o/checkpoint-1", "--config", "run.yaml", "--n", "4"
    )
    assert {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()} == before


def test_a_log_whose_last_line_has_no_end_is_gone_on_with(folder, capfd):
    """The next line would stand on the same one, and every later run would find a log that cannot be read."""
    goes_on = finished(folder)
    log = folder / "o/checkpoint-2/metrics.jsonl"
    log.write_text(log.read_text().rstrip("\n"))
    files.write_sums(folder / "o/checkpoint-2")
    assert main(goes_on) == 0
    assert report.read_metrics(folder / "o")[-1]["step"] == report.read_summary(folder / "o")["steps"] == 3


def test_a_checkpoint_whose_weights_are_no_numbers_is_refused_before_a_step(folder, capfd):
    goes_on = finished(folder)
    weights = load_file(folder / "o/checkpoint-2/model.safetensors")
    weights["lm_head.weight"][0, 0] = math.nan
    save_file(weights, folder / "o/checkpoint-2/model.safetensors", {"format": "pt"})
    files.write_sums(folder / "o/checkpoint-2")
    assert "o/checkpoint-2', whose weights model.lm_head.weight are not all finite" in refused(capfd, *goes_on)
    assert not list((folder / "o").glob("failed-*"))


@pytest.mark.parametrize("name", ["curve.png", "summary.json", "metrics.jsonl", "config.yaml"])
def test_a_folder_in_the_place_of_a_runs_file_is_known_before_a_step(name, folder, capfd):
    goes_on = finished(folder)
    (folder / "o" / name).unlink()
    (folder / "o" / name).mkdir()
    assert f"out: got 'o', where {name} is no file; allowed a file of that name, or none" in refused(capfd, *goes_on)
    (folder / "o" / name).rmdir()
    assert main(goes_on) == 0


def test_sums_that_are_none_are_damage(tmp_path):
    for line in ("x", "", "\x1b[2J", "0" * 64 + " a", "0" * 63 + "  a"):
        (tmp_path / "SHA256SUMS").write_text(f"{line}\n")
        assert files.damage(tmp_path) == "holds a SHA256SUMS with a line that is no sum and name"


@pytest.mark.parametrize("command", ["train run.yaml --out o", "memory run.yaml", "evaluate base --config run.yaml --n 4"])
def test_more_positions_than_the_model_was_made_for_are_refused(command, folder, capfd):
    edited(C, max_position_embeddings=8)(folder / "base")
    said = refused(capfd, *command.split())
    assert "sampler.length: got 4 after prompts of " in said and "8 positions" in said
    assert not (folder / "o").exists()


def test_a_backend_that_matplotlib_does_not_know_costs_the_figure_and_not_the_run(folder):
    words = ("-m", "minidrl", "train", "run.yaml", "--out", "o")
    done = python(*words, cwd=folder, env={"MPLBACKEND": "bogus"}, text=True)
    assert done.returncode == 0 and (folder / "o/summary.json").is_file() and not (folder / "o/curve.png").exists()
    assert "minidrl: MPLBACKEND: got 'bogus', which matplotlib does not know; allowed agg" in done.stderr


def test_a_full_disk_behind_the_output_is_named():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "minidrl", "where", "gdpo"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tiny.ROOT)
    assert done.returncode == 2 and done.stderr.startswith("minidrl: stdout: got No space left on device; allowed")


REFUSED_LATE = {
    "train": ("train run.yaml --model other", "prompt: got "),
    "pretrain": ("pretrain base.yaml --network.hidden_size 7", "network.hidden_size: got 7; allowed multiples of 2 x"),
}


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("verb", REFUSED_LATE)
def test_what_only_the_work_refuses_leaves_the_folder_to_the_corrected_command(verb, made, folder, capfd):
    shutil.copytree(tiny.ROOT / "tiny_configs/bases/sudoku_base", folder / "other")
    if made:
        (folder / "o").mkdir()
    wrong, said = REFUSED_LATE[verb]
    assert said in refused(capfd, *wrong.split(), "--out", "o")
    assert (folder / "o").exists() == made
    assert main([*wrong.split()[:2], "--out", "o"]) == 0


@pytest.mark.parametrize("verb", ["train run.yaml", "pretrain base.yaml"])
def test_more_held_out_problems_than_there_are_is_known_before_the_first_step(verb, here, capfd):
    """Not once the steps are done: pre-training evaluates after the last one."""
    assert "evaluate.n: got 5000; allowed at most 35" in refused(capfd, *verb.split(), "--evaluate.n", "5000")
    line = refused(capfd, *verb.split(), "--evaluate.skip", "5000")
    assert "evaluate.skip: got 5000; with it evaluate.n: got 5004; allowed at most 35" in line


NOTED = {  # what is refused after something that a user should know -> a part of the one line
    "train noted.yaml --method grpo --evaluate.n 50": "evaluate.n: got 50; allowed at most 35",
    "evaluate base --config run.yaml --task.name sudoku --sampler.length 16 --sampler.block_length 16 --n 4": "prompt: got ",
    "compare noted.yaml --methods grpo --rates 1e-4,2e-4 --choose.seeds 1e6": "1000000 in choose",
}


@pytest.mark.parametrize("command", NOTED)
def test_what_is_refused_is_one_line_without_the_notes_before_it(command, folder, capfd):
    (folder / "noted.yaml").write_text(yaml.safe_dump(RUN | {"method_options": {"plan.min_entropy": 0.02}}))
    assert NOTED[command] in refused(capfd, *command.split())


def test_a_refused_resume_says_nothing_of_the_checkpoint_that_it_would_have_skipped(folder, capfd):
    goes_on = finished(folder)
    (folder / "o/checkpoint-2/state.json").write_text("{}")
    assert "seed: got 5; allowed 0, with which the run" in refused(capfd, *goes_on, "--seed", "5")
    assert main(goes_on) == 0
    assert capfd.readouterr().err.count("minidrl: skipped: o/checkpoint-2 ") == 1


@pytest.mark.parametrize("raised, told", [
    (None, True),
    *((kind("stopped"), True) for kind in (launch.RunError, KeyboardInterrupt, FloatingPointError)),
    *((kind("refused"), False) for kind in (ValueError, OSError, TypeError)),
])  # fmt: skip
def test_notes_are_told_of_what_was_run_and_not_of_what_is_refused(raised, told, capfd):
    with contextlib.suppress(BaseException), launch.kept_notes():
        launch.note("a note")
        assert capfd.readouterr().err == ""
        if raised is not None:
            raise raised
    assert capfd.readouterr().err == ("minidrl: a note\n" if told else "")
    launch.note("at once")
    assert capfd.readouterr().err == "minidrl: at once\n"


def test_a_file_in_the_place_of_the_controls_is_not_written_over(folder, capfd):
    assert main(["train", "run.yaml", "--out", "o"]) == 0
    path = folder / "o" / "controls.json"
    for content in ("[1]", "{}", '{"base": 2}', "7"):
        path.write_text(content)
        assert "controls.json: got " in refused(capfd, "controls", "o")
        assert path.read_text() == content


@pytest.mark.parametrize("words", ["evaluate base --config run.yaml --n 4", "train run.yaml --out o"])
def test_weights_that_are_no_numbers_are_named(words, folder, capfd):
    path = folder / "base" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    line = refused(capfd, *words.split())
    assert "base" in line and "weights model.lm_head.weight are not all finite" in line
    assert not (folder / "o").exists()


@pytest.mark.parametrize("words", ["evaluate base --config run.yaml --n 4", "train run.yaml --out o", "controls o"])
def test_weights_that_are_finite_and_give_no_finite_numbers_are_named(words, folder, capfd):
    if words.startswith("controls"):
        assert main(["train", "run.yaml", "--out", "o"]) == 0
    path = folder / "base" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][:] = 3e38
    save_file(weights, path, metadata={"format": "pt"})
    line = refused(capfd, *words.split())
    assert "base', with which logits: the model returned NaN or +inf; its largest weight is 3e+38, in model.lm_head.w" in line
    assert (folder / "o").exists() == words.startswith("controls")


# ------------------------------------------------------------------------------------------- rows that an evaluation left
def damaged_rows(**changes):
    return lambda header, row: [header, {"rows": [row | changes], "seconds": 0.1}]


KEPT = {
    "problem outside": damaged_rows(problem=99),
    "problem text": damaged_rows(problem="0"),
    "problem true": damaged_rows(problem=True),
    "sample outside": damaged_rows(sample=5),
    "solved text": damaged_rows(solved="yes"),
    "tokens negative": damaged_rows(tokens=-5),
    "calls missing": damaged_rows(calls=None),
    "marks list": damaged_rows(marks=[]),
    "marks text": damaged_rows(marks={"well_formed": "x"}),
    "marks of another": damaged_rows(marks={"x": 1}),
    "marks beyond 1": damaged_rows(marks={"well_formed": 7}),
    "marks that a result has": damaged_rows(marks={"n": 1}),
    "marks with a control character": damaged_rows(marks={"\x1b[2J": 1}),
    "text number": damaged_rows(text=5),
    "a row twice": lambda header, row: [header, {"rows": [row, row], "seconds": 0.1}],
    "rows an object": lambda header, row: [header, {"rows": {}, "seconds": 0.1}],
    "seconds negative": lambda header, row: [header, {"rows": [row], "seconds": -1}],
    "seconds endless": lambda header, row: [header, {"rows": [row], "seconds": float("inf")}],
    "protocol list": lambda header, row: [header | {"protocol": [1]}],
    "protocol number": lambda header, row: [header | {"protocol": 5}],
    "header list": lambda header, row: [[]],
    "nothing": lambda header, row: [],
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_that_do_not_belong_to_an_evaluation_are_refused_and_kept(name, folder, capfd):
    words = ("evaluate", "base", "--config", "run.yaml", "--n", "2", "--out")
    assert main([*words, "a.json"]) == 0
    (whole,) = json.loads((folder / "a.json").read_text())["evaluations"]
    header = {"protocol": whole["protocol"], "weights": whole["made_by"]["weights"]}
    lines = KEPT[name](header, whole["rows"][0])
    path = folder / f"b.json.{whole['protocol']['length']}.rows"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = path.read_bytes()
    assert path.name in refused(capfd, *words, "b.json")
    assert path.read_bytes() == before and not (folder / "b.json").exists()


@pytest.mark.parametrize("line", ['{"question": "a", "answer": "#### 1", "question": "b"}', '{"x": [{"a": 1, "a": 2}]}'])
def test_a_row_of_data_with_a_key_that_is_there_twice(line, folder, capfd):
    good = '{"question": "a", "answer": "1 #### 1"}'
    (folder / "rows.jsonl").write_text(f"{good}\n{line}\n")
    said = refused(capfd, "tasks", "gsm8k", "--check", "rows.jsonl")
    assert "rows.jsonl row 2 is no JSON: key '" in said and said.endswith("' is there twice; allowed once\n")


def test_controls_of_one_run_by_two_paths_are_refused_before_they_are_measured(folder, capfd, monkeypatch):
    assert main(["train", "run.yaml", "--out", "o"]) == 0
    monkeypatch.setattr(controls, "measure", lambda run: pytest.fail("it was measured"))
    assert "runs: got 'o, o/../o'; allowed each folder once" in refused(capfd, "controls", "o", "o/../o")


def test_a_length_that_is_none_is_no_evaluation(folder, capfd):
    assert main(["evaluate", "base", "--config", "run.yaml", "--n", "2", "--out", "a.json"]) == 0
    data = json.loads((folder / "a.json").read_text())
    data["evaluations"][0]["protocol"]["length"] = [14]
    (folder / "b.json").write_text(json.dumps(data))
    assert "b.json', which holds no evaluation" in refused(capfd, "evaluate", "--compare", "b.json", "b.json")


def test_a_users_file_in_the_place_of_a_lock_stays(folder, capfd):
    (folder / "poetry.lock").write_text("mine")
    refused(capfd, "evaluate", "nowhere", "--config", "run.yaml", "--out", "poetry")
    assert main(["evaluate", "base", "--config", "run.yaml", "--n", "2", "--out", "poetry"]) == 0
    assert (folder / "poetry.lock").exists()


# ------------------------------------------------------------------------------------- pipes, devices, links, other places
def test_what_is_no_file_or_folder_neither_holds_up_a_run_nor_blocks_it(folder, capfd):
    words = ("train", "run.yaml", "--save_every", "1", "--evaluate.n", "2", "--out", "o", "--resume")
    assert main([*words[:-1], "--steps", "2"]) == 0
    out = folder / "o"
    for name in ("config.yaml.part", "metrics.jsonl.part", "curve.png.part"):
        os.mkfifo(out / name)
    (out / "checkpoint-3.part").symlink_to("checkpoint-1")
    os.mkfifo(out / "checkpoint-2.old")
    os.mkfifo(out / "failed-3.part")
    os.mkfifo(out / "checkpoint-3")
    assert main([*words, "--steps", "3"]) == 0
    assert main([*words, "--steps", "4"]) == 0
    assert not list(out.glob("*.old")) and not list(out.glob("*.part")) and (out / "checkpoint-1").is_dir()


USERS = ("checkpoint-1.old", "checkpoint-9.part", "checkpoint-3", "failed-3.part", "files.part")


@pytest.mark.parametrize("name", USERS)
def test_a_file_of_a_users_where_a_run_has_a_folder_is_known_before_a_step_and_stays(name, folder, capfd):
    goes_on = finished(folder)
    (folder / "o" / name).write_text("mine")
    before = {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()}
    assert f"out: got 'o', where {name} is a file; allowed a folder of that name, or none" in refused(capfd, *goes_on)
    assert {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()} == before
    (folder / "o" / name).unlink()
    assert main(goes_on) == 0


BEGUN = {
    "z.json": "evaluate base --config run.yaml --n 2 --out z.json",
    "o/summary.json": "train run.yaml --save_every 1 --evaluate.n 2 --out o --steps 3 --resume",
    "o/curve.png": "train run.yaml --save_every 1 --evaluate.n 2 --out o --steps 3 --resume",
    "o/controls.json": "controls o",
    "led/ledger.csv": "compare study.yaml --jobs 1 --ledger led/ledger.csv --out cells",
    "led/curves.csv": "compare study.yaml --jobs 1 --ledger led/ledger.csv --out cells",
}


@pytest.mark.parametrize("name", BEGUN)
def test_a_folder_where_a_file_would_begin_is_known_before_anything_is_computed(name, folder, capfd, monkeypatch):
    finished(folder)
    mine = folder / f"{name}.part/mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(trainer.sampler, "generate", lambda *_, **__: pytest.fail("something was sampled"))
        assert f"minidrl: {name}.part is a folder; move it away\n" == refused(capfd, *BEGUN[name].split())
    assert mine.read_text() == "mine"
    shutil.rmtree(mine.parent)
    mine.parent.symlink_to(folder / "run.yaml")
    own = (folder / "run.yaml").read_text()
    assert main(BEGUN[name].split()) == 0
    assert (folder / "run.yaml").read_text() == own and not (folder / name).is_symlink() and (folder / name).is_file()


@pytest.mark.parametrize("name", ["SHA256SUMS", "metrics.jsonl", "state.json", "optimizer.safetensors", "config.yaml"])
def test_a_pipe_in_a_checkpoint_is_damage(name, folder, capfd):
    words = ("train", "run.yaml", "--evaluate.n", "2", "--out", "o")
    assert main([*words, "--steps", "2"]) == 0
    path = folder / "o" / "checkpoint-2" / name
    path.unlink()
    os.mkfifo(path)
    assert name in refused(capfd, *words, "--steps", "3", "--resume")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_a_model_is_named(make, name, folder, capfd):
    (folder / "base" / name).unlink(missing_ok=True)
    make(folder / "base" / name)
    assert name in refused(capfd, "evaluate", "base", "--config", "run.yaml", "--n", "2")


def test_a_device_in_the_place_of_the_controls_is_refused(folder, capfd):
    assert main(["train", "run.yaml", "--out", "o"]) == 0
    (folder / "o" / "controls.json").symlink_to("/dev/zero")
    assert "controls.json is no regular file" in refused(capfd, "controls", "o")


def test_a_path_that_goes_up_makes_no_folder_on_its_way(folder, capfd):
    assert main(["train", "run.yaml", "--out", "new/../o"]) == 0
    assert main(["evaluate", "base", "--config", "run.yaml", "--n", "2", "--out", "other/../a.json"]) == 0
    assert (folder / "o" / "summary.json").is_file() and (folder / "a.json").is_file()
    assert not (folder / "new").exists() and not (folder / "other").exists()


def test_two_runs_of_one_name_are_told_apart_and_one_run_counts_once(folder, capfd):
    for place, share in (("a/run", 0.5), ("b/run", 0.1), ("b/other", 0.2)):
        (folder / place).mkdir(parents=True)
        (folder / place / "controls.json").write_text(json.dumps({"base": share}))
    assert main(["controls", "a/run", "b/run"]) == 0
    table = capfd.readouterr().out
    assert "a/run" in table and "50.0" in table and "10.0" in table and "30.0" in table
    assert main(["controls", "a/run", "b/other"]) == 0
    assert capfd.readouterr().out.split("\n")[0].replace(" ", "") == "|solved(%)|run|other|mean|"
    assert "allowed each folder once" in refused(capfd, "controls", "a/run", "a/../a/run")


WRONG_LINES = [
    "", '{"step": 1, "solved": 0.5}', '{"step": 1, "seconds": "x", "solved": 0.5}', '{"step": 1, "seconds": 1, "solved": "x"}',
    '{"step": 1, "seconds": 1, "eval/solved": 7}', '{"step": "a", "seconds": 1, "eval/solved": 1}',
    '{"step": 1, "seconds": 1, "reward": null}', '{"step": 1e400, "seconds": 1}', '{"step": 1, "loss": true}',
]  # fmt: skip


def test_a_log_that_cannot_be_right_reaches_no_ledger(folder, capfd):
    words = ("compare", "study.yaml", "--jobs", "1", "--ledger", "led/ledger.csv", "--out", "cells")
    assert main(list(words)) == 0
    shutil.rmtree(folder / "led")
    (path,) = (folder / "cells").glob("reinforce-*/metrics.jsonl")
    good = path.read_text()
    for line in WRONG_LINES:
        path.write_text(f"{line}\n")
        capfd.readouterr()
        assert main(list(words)) == 2 and "metrics.jsonl" in capfd.readouterr().err, line
        assert not (folder / "led" / "ledger.csv").exists(), line
    path.write_text(good)
    assert main(list(words)) == 0


def test_an_optimiser_that_has_counted_below_zero_or_in_integers_is_refused(tmp_path):
    steps = ["model.model.embed_tokens.weight/step"]
    for change, said in (
        (lambda t: t.update({k: t[k] - 5 for k in steps}), "/step -5; allowed finite numbers from 0"),
        (lambda t: t.update({k: t[k] + math.inf for k in steps}), "/step inf; allowed finite numbers from 0"),
        (lambda t: t.update({HEAD: t[HEAD] * math.nan}), f"{HEAD} with other numbers; allowed finite numbers"),
        (lambda t: t.update({f"{HEAD}_sq": t[f"{HEAD}_sq"] - 1}), f"{HEAD}_sq with other numbers; allowed finite"),
        (lambda t: t.update({HEAD: t[HEAD].int()}), f"{HEAD} of dtype int32; allowed float32"),
    ):
        model = tiny.network()
        optimizer = trainer.make_optimizer(model, config.Optimizer())
        runs.save_checkpoint(tmp_path / "checkpoint-3", model, tokenizer(), optimizer, {"step": 3, "seconds": 1.0})
        tensors(change)(tmp_path / "checkpoint-3")
        with pytest.raises(ValueError, match=said):
            runs.load_optimizer(tmp_path / "checkpoint-3", model, optimizer)


# ------------------------------------------------------------------------------------------------------- chat templates
TURNS = [[{"role": "user", "content": "What is 2+2? <b>&'\""}], [{"role": "user", "content": "ä\n\u2028"}]]
TEMPLATES = {
    "llada": "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + m['content'] | trim + '<|eot_id|>' }}{% endfor %}",
    "qwen": (
        "{%- set ns = namespace(found=false, last=messages|length - 1) %}{%- for m in messages[::-1] %}"
        "{%- if loop.index0 > 3 %}{% break %}{% endif %}{%- set ns.found = true %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ ns.found }}{{ tools }}{{ eos_token }}"
    ),
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ dict(a=1)['a'] }}",
    "generation": "{% for m in messages %}{% generation %} {{ m.content }} {% endgeneration %}{% endfor %}\n",
    "names": "{% set ns = namespace({'a': 1, 'b': 2}, b=3) %}{% set ns.c = 4 %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "indented": "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "macro": "{% macro f(x) %}[{{ x }}]{% endmacro %}  {% for m in messages %}\n  {{ f(m.role) }}\n{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(name):
    tok = tokenizer()
    tok.chat_template = TEMPLATES[name]
    want = tok.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False)
    assert chat.render(TEMPLATES[name], TURNS, dict(tok.special_tokens_map)) == want


BAD_TEMPLATES = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "it took more than 1 s",
    "{{ 9 ** (9 ** 9) }}": "it took more than 1 s",
    "{{ 'x' * 10 ** 10 }}": "needs more than 1024 MiB",
    "{{ 'x' | center(10 ** 10) }}": "needs more than 1024 MiB",
    "{{ 'x' * 10 ** 6 }}": "it wrote 1000000 characters; allowed up to 262144",
    "{% set x = 1 %}": "it renders nothing",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ namespace(__init__=1) }}": "SecurityError",
    "{{ raise_exception('\x1b[31m') }}": "TemplateError",
    "{% include '/etc/passwd' %}": "TypeError",
    "{% for": "TemplateSyntaxError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ messages[7].content.x }}": "UndefinedError",
}


@pytest.mark.parametrize("template", BAD_TEMPLATES)
def test_a_template_that_fails_or_does_not_end_is_one_line(template, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1)
    tok = tokenizer()
    tok.chat_template = template
    with pytest.raises(ValueError) as caught:
        texts.chats(tok, ["What is 2+2?"])
    said = launch.one_line(caught.value)
    assert (
        said.startswith("chat_template: that of the model fails: ") and BAD_TEMPLATES[template] in said and said.isprintable()
    )


@pytest.mark.parametrize("template, line", [
    (None, "task.prompt_format: got 'chat'; allowed plain, the tokenizer of {} has no chat template"),
    ("{{ 1 / 0 }}", "chat_template: that of {} fails: ZeroDivisionError: division by zero; allowed one that renders"),
    ([{"name": "a", "template": "a"}, {"name": "b", "template": "b"}], "'chat' with the templates 'a, b' of {}; allowed one"),
])  # fmt: skip
def test_the_folder_of_a_chat_template_is_named(template, line, folder, capfd):
    edited(T, **({} if template is None else {"chat_template": template}))(folder / "base")
    words = ("train", "run.yaml", "--task.prompt_format", "chat", "--out", "o")
    assert line.format(folder / "base") in refused(capfd, *words)


def test_one_chat_of_several_that_is_too_long_is_refused():
    template, short, long = "{{ messages[0].content }}", [{"content": "a"}], [{"content": "b" * 2**18}]
    assert chat.render(template, [short, long, short], {}) == ["a", "b" * 2**18, "a"]
    long[0]["content"] += "b"
    with pytest.raises(ValueError, match="it wrote 262145 characters; allowed up to 262144"):
        chat.render(template, [short, long, short], {})
    assert chat.render(template, [], {}) == []


def test_a_template_has_ten_seconds_of_its_own_and_ten_minutes_on_a_crowded_machine(monkeypatch):
    def stuck(command, timeout, input, **how):
        assert timeout == 600 and json.loads(input)["seconds"] == 10
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(chat.subprocess, "run", stuck)
    with pytest.raises(ValueError, match="it took more than 10 s or 1024 MiB"):
        chat.render("x", TURNS, {})


def test_a_process_that_cannot_render_says_why(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho one line >&2\necho no library >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(chat.sys, "executable", str(program))
    with pytest.raises(ValueError, match="that of the model fails: no library; allowed"):
        chat.render("x", TURNS, {})


@pytest.mark.parametrize("most", [2**20, resource.RLIM_INFINITY])
def test_a_template_writes_no_file(most, tmp_path):
    """What would escape from the sandbox still could not write, whatever the user's own limit is."""
    program = f"import resource, sys; sys.path.insert(0, {str(Path(chat.__file__).parents[1])!r})\n"
    program += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))\n"
    program += "from minidrl import chat; chat._limit(5); open('x', 'wb', buffering=0).write(b'x')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode != 0 and (tmp_path / "x").read_bytes() == b""


# ------------------------------------------------------------------------------------------------------------- responses
def test_padding_inside_a_response_is_seen_by_the_verifier():
    tok = tokenizer()
    ids = tok("5*8=40+6=46").input_ids
    shown = [*ids[:2], tok.pad_token_id, *ids[2:], tok.eos_token_id, ids[0]]
    plain = [*ids, tok.eos_token_id, tok.pad_token_id, tok.pad_token_id]
    assert texts.decode(tok, torch.tensor([shown, plain])) == ["5*[PAD]8=40+6=46", "5*8=40+6=46"]


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_a_tokenizer_without_end_or_padding_is_refused(name):
    tok = tokenizer()
    setattr(tok, name, None)
    with pytest.raises(ValueError, match=f"^model: got a tokenizer without {name}"):
        texts.encode_prompts(tok, Countdown().held_out(1), 20)


def test_several_templates_of_which_none_is_the_default_are_refused():
    tok = tokenizer()
    tok.chat_template = {"rag": "{{ messages }}", "tool": "{{ messages }}"}
    with pytest.raises(
        ValueError, match="^task.prompt_format: got 'chat' with the templates 'rag, tool' of the model; allowed"
    ):
        texts.chats(tok, ["What is 2+2?"])


@pytest.mark.parametrize("width", [5, 20])
def test_a_prompt_of_characters_that_the_tokenizer_lacks_is_refused(width):
    """[PAD], which a WordLevel tokenizer reads instead of them, is also what stands before a shorter prompt."""
    asked = [SimpleNamespace(prompt="1,2:"), SimpleNamespace(prompt="1x2é:")]
    assert texts.encode_prompts(tokenizer(), asked[:1], width)[1].sum() == 4
    with pytest.raises(ValueError, match="^prompt: got '1x2é:' with 'xé', which the model's tokenizer lacks"):
        texts.encode_prompts(tokenizer(), asked, width)


# ------------------------------------------------------------------------------------------------- files that runs wrote
def test_files_of_a_run_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="metrics.jsonl is no UTF-8"):
        report.read_metrics(tmp_path)
    (tmp_path / "summary.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="summary.json: got .*allowed is a JSON object"):
        report.read_summary(tmp_path)
    summary = {"method": "m", "seed": 0, "steps": 1, "seconds": 1.0, "solved_before": 0.1, "solved_after": 0.2}
    for key, value in {"solved_after": "x", "solved_before": float("nan"), "seconds": -1, "steps": 1.5}.items():
        (tmp_path / "summary.json").write_text(json.dumps(summary | {key: value}))
        with pytest.raises(ValueError, match=f"summary.json has {key} .*; allowed "):
            report.read_summary(tmp_path)
    (tmp_path / "controls.json").write_text('{"base": "x"}')
    with pytest.raises(ValueError, match="controls.json: got .*allowed a share from 0 to 1"):
        controls.table([tmp_path])
    for content in (b"\xff", b"a\x00b\nc", b"study\n" + b"x" * 10**6):
        (tmp_path / "ledger.csv").write_bytes(content)
        with pytest.raises(ValueError, match="ledger.csv"):
            studies.Ledger(tmp_path / "ledger.csv").rows("s")


# ----------------------------------------------------------------------------------------------------- the process itself
class PanicException(BaseException):
    """As pyo3 raises it where Rust code panics."""


@pytest.mark.parametrize("error, line", [
    (TypeError("TextEncodeInput must be Union[...]"), "text: got some that is no Unicode text"),
    (Exception("WordLevel error: Missing [UNK]"), "tokenizer.json: got files with which the tokenizers library breaks off"),
    (PanicException("no entry\nfound"), "tokenizer.json: got files with which the tokenizers library breaks off (no entry"),
])  # fmt: skip
def test_what_the_tokenizers_library_raises_is_one_line(error, line, here, capfd, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: (_ for _ in ()).throw(error))
    assert line in refused(capfd, "verify", "base")


def test_other_errors_of_a_type_are_not_hidden(here, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: (_ for _ in ()).throw(TypeError("a mistake of ours")))
    with pytest.raises(TypeError, match="a mistake of ours"):
        main(["verify", "base"])


def test_control_characters_do_not_reach_a_terminal():
    assert launch.shown("a\x1b[31m\x07\u202e\x9b\nä") == "a\\x1b[31m\\x07\\u202e\\x9b\nä"
    assert launch.one_line("a\n\tb\x1b") == "a b\\x1b"
    assert len(launch.one_line("x" * 10**6)) < launch.LONGEST


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "MINIDRL_WAIT"])
def test_a_wrong_environment_is_one_line(name, here, capfd, monkeypatch):
    for key, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", name: "\x1bmany"}.items():
        monkeypatch.setenv(key, value)
    assert f"{name}: got '\\x1bmany' in the environment; allowed integers" in refused(capfd, "train", "run.yaml")


@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_whose_partner_never_comes_says_what_to_do(rank, agent, here, capfd, monkeypatch):
    """With a store of its own, and with that of torchrun, which is there before the processes are."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "MINIDRL_WAIT": "1"}
    told |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": str(agent)}
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
    for key, value in told.items():
        monkeypatch.setenv(key, value)
    line = refused(capfd, "train", "run.yaml", "--out", "o")
    assert f"WORLD_SIZE: got 2 processes that did not meet at 127.0.0.1:{port}: " in line
    assert "allowed all of them started, on every node with the same address, within MINIDRL_WAIT (1) seconds" in line
    del store


def test_a_process_whose_partner_dies_says_so_in_one_line(folder):
    """What was saved is kept: the one that is left ends with status 1, and without a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = str(tiny.ROOT)
    words = [sys.executable, "-m", "minidrl", "train", "run.yaml", "--steps", "100000", "--save_every", "1", "--out", "o"]
    started = [
        subprocess.Popen(words, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, cwd=folder, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        until = time.monotonic() + 120
        while not list((folder / "o").glob("checkpoint-[1-9]*")) and time.monotonic() < until:
            time.sleep(0.2)
        started[1].kill()
        error = started[0].communicate(timeout=60)[1]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert started[0].returncode == 1 and "Traceback" not in error, error
    line = error.strip().splitlines()[-1]
    assert line.startswith("minidrl: a connection to another process of this run broke: "), error
    assert line.endswith("; the same command with --resume goes on")


def test_the_numbers_of_processes_that_the_environment_tells(monkeypatch):
    def told(**words: str) -> tuple[int, int]:
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(key, raising=False)
        for key, value in words.items():
            monkeypatch.setenv(key, value)
        return launch.launched_processes(), launch.launched_rank()

    assert told() == told(RANK="1", WORLD_SIZE="2") == (1, 0), "without torchrun"
    for size, rank in ((1, 0), (2, 1), (999_999, 999_998)):
        assert told(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(size)) == (size, rank)
    for wrong in ("0", "1000000", "-1", ""):
        with pytest.raises(launch.LocalError, match=f"^WORLD_SIZE: got '{wrong}' in .*; allowed integers from 1 to 999,999$"):
            told(RANK="0", LOCAL_RANK="0", WORLD_SIZE=wrong)
    for wrong in ("1000000", "-1"):
        with pytest.raises(launch.LocalError, match=f"^RANK: got '{wrong}' in the environment; allowed integers from 0 to"):
            told(RANK=wrong, LOCAL_RANK="0", WORLD_SIZE="2")


def python(*words: str, **changes) -> subprocess.CompletedProcess:
    without = changes.pop("without", ())
    environment = {key: value for key, value in os.environ.items() if key not in without}
    environment |= {"PYTHONPATH": str(tiny.ROOT)} | changes.pop("env", {})
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, **changes)


def test_without_docstrings_a_verb_works_or_says_why_not(tmp_path):
    done = python("-OO", "-m", "minidrl", "train", "run.yaml", cwd=tmp_path)
    said = b"minidrl: python -OO: got train, which needs transformers; allowed python and python -O"
    assert (done.returncode, done.stdout) == (2, b"") and done.stderr.startswith(said) and done.stderr.count(b"\n") == 1
    done = python("-OO", "-m", "minidrl", "where", "wd1", cwd=tmp_path)
    assert done.returncode == 0 and b"minidrl/methods.py:" in done.stdout


def imported_at_the_top(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


SOURCES = sorted((tiny.ROOT / "minidrl").rglob("*.py"))


def test_only_what_draws_needs_matplotlib():
    for path in SOURCES:
        names = {name.split(".")[0] for name in imported_at_the_top(path)}
        assert "matplotlib" not in names or path.name == "figures.py", path
        assert "research.figures" not in imported_at_the_top(path), path


def test_training_without_matplotlib_ends_with_a_line_and_no_figure(folder, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["train", "run.yaml", "--out", "new"]) == 0
    out, error = capfd.readouterr()
    assert "minidrl: matplotlib is missing: no figure is drawn" in error and "no new/curve.png" in out
    assert json.loads((folder / "new/summary.json").read_text())["steps"] == 1


def test_every_text_file_is_opened_as_utf_8():
    """The locale is not asked: what one machine writes, another reads."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name in ("read_text", "write_text") and path.name != "memory.py":  # whose files are the kernel's
                assert any(word.arg == "encoding" for word in node.keywords), f"{path}:{node.lineno}"


def test_a_run_elsewhere_without_a_home_in_another_locale(folder, tmp_path_factory):
    elsewhere, out = tmp_path_factory.mktemp("elsewhere"), folder / "new"
    language = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": "/proc/nowhere", "OMP_NUM_THREADS": "1"}
    words = ("-m", "minidrl", "train", str(folder / "run.yaml"), "--out", str(out))
    done = python(
        *words, cwd=elsewhere, env=language, without=("LANG", "LC_CTYPE", "MPLCONFIGDIR", "XDG_CACHE_HOME", "HF_HOME")
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert b"Traceback" not in done.stderr and (out / "curve.png").is_file()
    assert list(elsewhere.iterdir()) == []


def test_a_name_that_the_locale_does_not_write_in_utf_8_is_refused_before_the_run(here, capfd, monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode("latin-1"))
    assert "out: got 'läuft'; allowed ASCII, or any name under a locale of UTF-8" in refused(
        capfd, "train", "run.yaml", "--out", "läuft"
    )


def test_evaluate_finds_the_shipped_config_from_any_folder(place, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(tiny.ROOT / "tiny_configs/bases/countdown_base"), "--n", "2", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["n"] == 2
