"""The command line: each verb once, the exit status, and the one line that answers what a user really mistypes."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tiny
from minidrl import sampler
from minidrl.methods import METHODS
from minidrl.run import checkpoints, config, launch, lookup
from minidrl.run.cli import main
from minidrl.tasks.countdown import Countdown

TASK = {"num_numbers": 2, "held_out_share": 0.3}
SAMPLER = {"order": "left_to_right", "temperature": 1.0, "length": 4, "block_length": 4, "tokens_per_step": 1}
RUN = {"model": "base", "task": TASK, "sampler": SAMPLER, "steps": 1, "num_prompts": 2, "num_generations": 3}
RUN |= {"evaluate": {"n": 4}}
BASE = {"task": TASK, "sampler": SAMPLER, "network": tiny.SIZES, "steps": 1, "batch_size": 4, "evaluate": {"n": 4}}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("cli") / "base")


@pytest.fixture
def folder(base, tmp_path, monkeypatch) -> Path:
    """The working directory of a user: two configs and the folder of a network."""
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Countdown, "judge", tiny.varied_judge)
    return tmp_path


def run(capfd, *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of ``python -m minidrl ARGUMENTS``."""
    capfd.readouterr()
    status = main([str(a) for a in arguments])
    return status, *capfd.readouterr()


def refused(capfd, *arguments: object) -> str:
    """The line with which the arguments are refused."""
    status, out, error = run(capfd, *arguments)
    assert status == 2 and out == ""
    assert error.startswith("minidrl: ") and error.count("\n") == 1 and error.endswith("\n")
    return error


# ------------------------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    # the verb and its options
    "": "Missing command",
    "dance": "No such command 'dance'",
    "train": "Missing argument 'CONFIG'",
    "evaluate base --config run.yaml --sample 3": "--sample: unknown option",
    "evaluate base --config run.yaml --n 4 --device quantum": "device: got 'quantum'; allowed cpu, and cuda",
    "evaluate": "model: got none; allowed a folder, or --compare A B",
    "evaluate base --config run.yaml --sampler.temperature 0.3": "sampler.temperature: got '0.3'; allowed in its place --temp",
    "train run.yaml --seed": "seed: no value given; allowed --seed value",
    # files and folders
    "train nowhere.yaml": "config: got 'nowhere.yaml', which is no file",
    "train run.yaml --model nowhere": "model: got 'nowhere', which holds no config.json",
    "evaluate gpt --config run.yaml --n 4": "model: got 'gpt' with model_type 'gpt2'; allowed llama, llada",
    "train run.yaml --out run.yaml": "out: got 'run.yaml', which is a file",
    "tasks gsm8k --check nowhere.json": "check: got 'nowhere.json', which is no file",
    # settings (tests/test_config.py has many)
    "train run.yaml --stepz=5": "stepz: unknown key (did you mean steps?); allowed model,",
    "train run.yaml --compute_dtype bfloat16 --dtype float32": "compute_dtype: got 'bfloat16' with one process",
    "pretrain base.yaml --init base": "network: got sizes; allowed none beside init, which has its own",
    "pretrain base.yaml --stop_after 2": "stop_after: got 2; allowed up to 1, that of steps",
    "train run.yaml --task.prompt_format chat": "task.prompt_format: got 'chat'; allowed plain, the tokenizer of ",
    # methods and their options
    "train run.yaml --method pppo": "method: got 'pppo'; allowed reinforce,",
    "train run.yaml --method egspo --method_options.plan.num_states 5": "plan.num_states: got 5; allowed up to the 4 steps",
    "train run.yaml --method grpo --num_generations 1": "credit.ddof: got 1; allowed 0 up to num_generations - 1",
    "train run.yaml --method ppo --method_options.refresh scheduled": "got 'scheduled'; allowed fixed, paired, independent\n",
    "train run.yaml --sampler.attention block_causal": "attention: got 'block_causal' for a bidirectional model; allowed bi",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_loaded_or_written(arguments, folder, capfd, monkeypatch):
    (folder / "gpt").mkdir()
    (folder / "gpt/config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr(sampler, "generate", lambda *_, **__: pytest.fail("a rollout was made"))
    before = sorted(folder.rglob("*"))
    assert MISTAKES[arguments] in refused(capfd, *arguments.split())
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_the_process_exits_with_status_2(tmp_path):
    words = [sys.executable, "-m", "minidrl", "train", "nowhere.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("minidrl: config: got 'nowhere.yaml', which is no file") and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------- statuses 1, 130


def test_a_run_that_has_to_stop_exits_with_status_1(folder, capfd):
    status, out, error = run(capfd, "train", "run.yaml", "--out", "new", "--steps", "2", "--optimizer.learning_rate", "1e30")
    last = error.splitlines()[-1]
    assert status == 1 and out == "" and "Traceback" not in error
    assert last.startswith("minidrl: step 1: logits: the model returned NaN")


@pytest.mark.parametrize(("raised", "status", "said"), [
    (KeyboardInterrupt(), 130, "interrupted; with --resume it goes on from a checkpoint"),
    (launch.Interrupted("stopped after 3", signal.SIGTERM), 143, "stopped after 3; with --resume it goes on from a checkpoint"),
])  # fmt: skip
def test_an_interrupted_run_says_how_to_go_on(raised, status, said, folder, capfd, monkeypatch):
    def stop(*_):
        raise raised

    monkeypatch.setattr("minidrl.run.train.train", stop)
    assert run(capfd, "train", "run.yaml") == (status, "", f"minidrl: {said}\n")


def test_only_the_first_process_says_what_all_of_them_have_to_say(monkeypatch, capfd):
    for key, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    assert run(capfd, "methods", "zzzz") == (2, "", "")


# ---------------------------------------------------------------------------------------------------------------- verbs


def test_help_lists_the_verbs_and_the_settings(capfd):
    status, out, error = run(capfd, "--help")
    assert (status, error) == (0, "") and "pretrain" in out and "evaluate" in out
    status, out, error = run(capfd, "train", "--help")
    assert (status, error) == (0, "")
    for key in ("--resume", "--sampler.length: int", "--optimizer.learning_rate: PositiveFloat = 3e-4", "--task.KEY"):
        assert key in out


def test_overrides_in_both_spellings_reach_the_settings(folder, capfd):
    words = ["--seed", "3", "--optimizer.learning_rate=3e-4", "--method=grpo", "--method_options.plan.num_states", "2"]
    status, out, _ = run(capfd, "train", "run.yaml", "--out", "new", *words, "--evaluate.temperature=0.5")
    assert status == 0 and out.startswith("grpo, seed 3: ") and "at temperature 0.5, 1 steps" in out
    settings = config.load(config.Train, "new/config.yaml")
    assert (settings.seed, settings.optimizer.learning_rate, settings.method) == (3, 3e-4, "grpo")
    assert settings.method_options == {"plan.num_states": 2} and settings.evaluate.temperature == 0.5
    assert settings.num_prompts == RUN["num_prompts"], "the file's other values stay"


def test_a_remark_is_one_line_on_stderr(folder, capfd):
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN | {"method_options": {"plan.min_entropy": 0.02}}))
    status, out, error = run(capfd, "memory", "run.yaml", "--method", "grpo")
    said = "grpo has no plan.min_entropy, which the file sets for reinforce: left out"
    assert (status, error) == (0, f"minidrl: method_options: {said}\n")


def test_pretrain_train_resume_evaluate(folder, capfd):
    """The whole way, on the folders that the verbs themselves have written."""
    status, out, _ = run(capfd, "pretrain", "base.yaml", "--out", "fresh")
    assert status == 0 and json.loads(out)["held_out"]["n"] == 4
    status, _, error = run(capfd, "evaluate", "fresh", "--n", "4", "--out", "fresh.json")
    [found] = json.loads((folder / "fresh.json").read_text())["evaluations"]
    assert (status, error) == (0, "") and found["protocol"]["length"] == 4  # of base.yaml
    status, out, _ = run(capfd, "train", "run.yaml", "--model", "fresh")
    assert status == 0 and "curve in runs/run/curve.png" in out and (folder / "runs/run/curve.png").stat().st_size > 1000
    assert "allowed above 1" in refused(capfd, "train", "run.yaml", "--model", "fresh", "--resume")
    line = refused(capfd, "train", "run.yaml", "--model", "fresh", "--resume", "--steps", "2", "--seed", "1")
    assert "seed: got 1; allowed 0, with which the run in runs/run" in line
    line = refused(capfd, "train", "run.yaml", "--model", "fresh", "--resume", "--steps", "2", "--evaluate.n", "5")
    assert "evaluate.n: got 5; allowed 4, with which the run" in line, "before and after are of one test"
    status, _, _ = run(capfd, "train", "run.yaml", "--model", "fresh", "--resume", "--steps", "2")
    assert status == 0 and json.loads((folder / "runs/run/summary.json").read_text())["steps"] == 2
    words = ["evaluate", "runs/run/checkpoint-2", "--n", "4"]
    status, out, error = run(capfd, *words, "--samples", "2", "--temperature", "0.5", "--out", "a.json")
    [found] = json.loads((folder / "a.json").read_text())["evaluations"]
    assert (status, error) == (0, "") and "pass@2 " in out and found["made_by"]["model"] == "runs/run/checkpoint-2"
    assert found["result"]["pass@2"] >= found["result"]["solved"] >= 0 and found["protocol"]["temperature"] == 0.5
    status, out, _ = run(capfd, *words, "--dtype", "bfloat16", "--out", "b.json")
    assert status == 0 and out.startswith("solved ") and out.endswith(" on 4 held-out problems\n")
    assert json.loads((folder / "b.json").read_text())["evaluations"][0]["made_by"]["dtype"] == "bfloat16"


def test_a_block_causal_checkpoint_is_trained_and_evaluated_with_its_own_sampler(folder, capfd):
    tiny.blockwise_folder(folder / "base")
    line = refused(capfd, "evaluate", "base-in-blocks", "--config", "run.yaml", "--n", "4")
    assert "attention: got 'bidirectional' for a block-causal model; allowed block_causal, block_length 2" in line
    blocks = ["--sampler.attention", "block_causal", "--sampler.block_length", "2", "--sampler.cache", "exact"]
    words = ("train", "run.yaml", "--model", "base-in-blocks", "--method", "stabledrl-block", "--out", "new", *blocks)
    status, _, error = run(capfd, *words)
    assert status == 0 and (folder / "new/summary.json").is_file(), error


def test_memory_is_told_before_anything_is_loaded(folder, capfd, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda *_: pytest.fail("a network was loaded"))
    (folder / "base/model.safetensors").unlink()
    status, out, error = run(capfd, "memory", "run.yaml", "--gradient_checkpointing", "true")
    assert (status, error) == (0, "") and out.splitlines()[-1].startswith("peak ")


def test_methods_are_listed_and_explained(capfd):
    status, out, _ = run(capfd, "methods", "--all")
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == list(METHODS)
    status, out, _ = run(capfd, "methods")
    assert status == 0 and "gdpo" in out and "stabledrl" in out
    status, out, _ = run(capfd, "methods", "gdpo-sequence")
    assert status == 0 and METHODS["gdpo-sequence"].source in out and "(2.6)" in out and "plan.num_nodes" in out
    assert lookup.settings(METHODS["gdpo-sequence"])["plan.num_nodes"] == 3


def test_where_finds_an_equation_a_paper_and_a_term(capfd):
    for words, name in {"2.3": "elbo_count_plan", "2510.08554": "quadrature_plan", "entropy selection": "entropy_plan"}.items():
        status, out, _ = run(capfd, "where", *words.split())
        assert status == 0 and out.split()[1] == name
    status, _, err = run(capfd, "where", "nonsense")
    assert status == 2 and "'nonsense', which stands in no docstring" in err


def test_tasks_are_listed(capfd):
    status, out, _ = run(capfd, "tasks")
    assert status == 0 and [line.split()[0] for line in out.splitlines()][:2] == ["countdown", "sudoku"]
    assert run(capfd, "tasks", "sudoku")[1] == "".join(line + "\n" for line in out.splitlines() if "sudoku" in line[:8])
