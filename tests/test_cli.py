"""The command line and the settings: what a user types, and the one line that answers a mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import tiny
from minidrl import gradient, methods, oracle
from minidrl.methods import METHODS
from minidrl.run import config, estimators, report, runs, trainer
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
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    return tmp_path


def run(capfd, *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of ``python -m minidrl ARGUMENTS``."""
    capfd.readouterr()
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as exit_:
        status = exit_.code
    return status, *capfd.readouterr()


def refused(capfd, *arguments: object) -> str:
    """The line with which the arguments are refused."""
    status, out, error = run(capfd, *arguments)
    assert status == 2 and out == ""
    assert error.startswith("minidrl: ") and error.count("\n") == 1 and error.endswith("\n")
    return error


# ------------------------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    "--method pppo": "method: got 'pppo'; allowed reinforce,",
    "--stepz 5": "stepz: unknown key (did you mean steps?); allowed model,",
    "--optimizer.learning_rat 5": "optimizer.learning_rat: unknown key (did you mean optimizer.learning_rate?)",
    "--xyzzy=5": "xyzzy: unknown key; allowed",
    "--optimizer.learning_rate .nan": "optimizer.learning_rate: got nan",
    "--optimizer.learning_rate -1e-3": "optimizer.learning_rate: got -0.001",
    "--steps.more 3": "steps.more: got a value below 'steps', which is no section",
    "--sampler.temperature -1": "temperature: got -1.0; allowed 0 (greedy), and numbers from 1e-06",
    "--sampler.temperature 0": "sampler.temperature: got 0; allowed above 0",
    "--sampler.order sideways": "order: got 'sideways'; allowed random, low_confidence, left_to_right",
    "--sampler.block_length 3": "block_length: got 3; allowed a divisor of length = 4",
    "--task.num_numbers 7": "task.num_numbers: got 7; allowed 2, 3, 4",
    "--task.reward kind": "task.reward: got 'kind'; allowed strict,",
    "--task.prompt_format poem": "task.prompt_format: got 'poem'; allowed plain, chat",
    "--task.prompt_format chat": "task.prompt_format: got 'chat'; allowed plain, the tokenizer of /",
    "--compute_dtype bfloat16": "compute_dtype: got 'bfloat16' with dtype stored; allowed weights, or dtype float32",
    "--compute_dtype bfloat16 --dtype float32": "compute_dtype: got 'bfloat16' with one process; allowed weights, or several",
    "--compute_dtype bfloat16 --dtype float32 --rollout_dtype bfloat16": "compute_dtype: got 'bfloat16' with rollout_dtype",
    "--compute_dtype bfloat16 --dtype float32 --lora.rank 2": "compute_dtype: got 'bfloat16' with lora.rank 2; allowed weights",
    "--quantize true": "quantize: got True; allowed with lora.rank from 1",
    "--quantize true --lora.rank 2 --rollout_dtype bfloat16": "quantize: got True; allowed with lora.rank from 1 and without",
    "--gradient_checkpointing true --compile true": "gradient_checkpointing: got True with compile; allowed one of the two",
    "--lora.rank 2 --lora.target_modules [attn_out]": "lora.target_modules: got 'attn_out', which matches no module",
    "--device quantum": "device: got 'quantum'; allowed cpu",
    "--method_options.plan.states 3": "method_options.plan.states: no such option of reinforce; allowed plan.num_states,",
    "--steps [1": "steps: got '[1'; allowed a value in YAML",
    "--model nowhere": "model: got 'nowhere', which holds no config.json",
    "--model=.": "model: got '.', which holds no config.json",
    "--out run.yaml": "out: got 'run.yaml', which is a file",
    "--out base": "out: got 'base', which already holds a run",
    "--out new --resume": "resume: got 'new', which holds no checkpoint",
    "--seed": "seed: no value given; allowed --seed value",
    "stray": "argument 'stray': allowed --key value",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_wrong_setting_is_one_line_and_writes_nothing(arguments, folder, capfd):
    before = sorted(folder.rglob("*"))
    assert MISTAKES[arguments] in refused(capfd, "train", "run.yaml", *arguments.split())
    assert sorted(folder.rglob("*")) == before


# What a row's own functions refuse, and when: before a network is loaded or a file is written.
METHOD_MISTAKES = {
    "egspo --method_options.plan.num_states 5": "plan.num_states: got 5; allowed up to the 4 steps of the sampler",
    "egspo-released": "plan.num_states: got 8; allowed up to the 4 steps of the sampler",
    "replay-uniform --sampler.tokens_per_step 2": "plan.num_states: got 4; allowed up to the 2 steps of the sampler",
    "egspo --method_options.plan.num_states 0": "plan.num_states: got 0; allowed integers from 1",
    "egspo --method_options.plan.num_states 2.5": "plan.num_states: got 2.5; allowed integers from 1",
    "egspo --method_options.plan.weight max": "plan.weight: got 'max'; allowed sum, mean, token_mean",
    "gdpo --method_options.plan.num_nodes 0": "plan.num_nodes: got 0; allowed integers from 1",
    "gdpo --method_options.plan.counts odd": "plan.counts: got 'odd'",
    "gdpo --method_options.plan.num_nodes null": "method_options.plan.num_nodes: got None; allowed a value like 3",
    "drpo --method_options.objective.delta 0": "method_options.objective.delta: got 0; allowed above 0",
    "dppo-tv --method_options.objective.delta -0.1": "method_options.objective.delta: got -0.1; allowed above 0",
    "dppo-tv --method_options.objective.form js": "form: got 'js'; allowed tv, kl",
    "reinforce --method_options.plan.min_entropy -1": "plan.min_entropy: got -1; allowed finite numbers from 0",
    "dppo-topk --method_options.plan.min_entropy .inf": "plan.min_entropy: got inf; allowed finite numbers from 0",
    "grpo --method_options.credit.eps -1e-4": "method_options.credit.eps: got -0.0001; allowed finite numbers from 0",
    "spg --method_options.extra.omega 1.5": "method_options.extra.omega: got 1.5; allowed 0 to 1",
    "wd1 --method_options.credit.psi -1": "method_options.credit.psi: got -1; allowed above 0",
    "spo --method_options.objective.epsilon 0": "method_options.objective.epsilon: got 0; allowed above 0",
    "spo --method_options.objective.epsilon .nan": "method_options.objective.epsilon: got nan; allowed above 0",
    "ppo --method_options.objective.epsilon_low -0.2": "method_options.objective.epsilon_low: got -0.2; allowed above 0",
    "ppo-released --method_options.objective.bound 1": "method_options.objective.bound: got 1; allowed above 1",
    "tis --method_options.objective.floor 3": "objective: got floor 3, cap 2.0; allowed 0 <= floor < cap",
    "stabledrl --method_options.objective.cap 0": "method_options.objective.cap: got 0; allowed above 0",
    "egspo-sa --method_options.credit.lam -1": "credit.lam: got -1; allowed from 0",
    "egspo-sa --method_options.credit.schedule cosine": "credit.schedule: got 'cosine'; allowed constant, linear",
    "egspo-sa --method_options.credit leave_one_out": "credit: got 'leave_one_out'; allowed stepwise_advantage, egspo-sa",
    "ppo --method_options.credit median": "method_options.credit: got 'median'; allowed group_mean, leave_one_out,",
    "ppo --method_options.credit leave_one_out --num_generations 1": "num_generations: got 1; allowed from 2 for leave-one-out",
    "ppo --method_options.credit group_z_score --num_generations 1": "credit.ddof: got 1; allowed 0 up to num_generations - 1",
    "grpo --num_generations 1": "credit.ddof: got 1; allowed 0 up to num_generations - 1",
    "grpo --method_options.credit.ddof 3": "credit.ddof: got 3; allowed 0 up to num_generations - 1 = 2",
    "grpo --method_options.kl.beta 0.1": "method_options.kl.beta: got 0.1; allowed with kl.form and kl.beta both",
    "grpo --method_options.aggregation max": "method_options.aggregation: got 'max' for grpo; allowed sequence_mean,",
    "ppo --sampler.temperature 0": "sampler.temperature: got 0; allowed above 0, ppo scores at the sampling temperature",
    "trace-block": "sampler.attention: got 'bidirectional'; allowed block_causal, as trace-block scores all blocks at once",
    "ppo --sampler.attention causal": "attention: got 'causal'; allowed bidirectional, block_causal",
    "ppo --sampler.block_length 3": "block_length: got 3; allowed a divisor of length = 4",
    "ppo --sampler.cache exact": "cache: got 'exact' with attention bidirectional; allowed none, prefix, dual",
    "ppo --filter_groups true --num_generations 1": "filter_groups: got True with num_generations 1; allowed from 2",
}


@pytest.mark.parametrize("arguments", METHOD_MISTAKES)
def test_what_a_method_refuses_is_one_line_before_anything_is_loaded_or_written(arguments, folder, capfd, monkeypatch):
    monkeypatch.setattr(trainer.checkpoints, "load", lambda *_: pytest.fail("a network was loaded"))
    before = sorted(folder.rglob("*"))
    assert METHOD_MISTAKES[arguments] in refused(capfd, "train", "run.yaml", "--method", *arguments.split())
    assert sorted(folder.rglob("*")) == before


# What only the checkpoint can tell: the folder base is bidirectional, base-in-blocks was trained with blocks of 2.
ATTENTION_MISTAKES = {
    "--sampler.attention block_causal": "attention: got 'block_causal' for a bidirectional model; allowed bidirectional",
    "--model base-in-blocks": "attention: got 'bidirectional' for a block-causal model; allowed block_causal, block_length 2",
    "--model base-in-blocks --sampler.attention block_causal": "block_length: got 4; allowed 2, that of the model's attention",
}


@pytest.mark.parametrize("arguments", ATTENTION_MISTAKES)
def test_a_sampler_that_is_not_the_checkpoints_is_one_line_and_writes_nothing(arguments, folder, capfd):
    tiny.blockwise_folder(folder / "base")
    before = sorted(folder.rglob("*"))
    assert ATTENTION_MISTAKES[arguments] in refused(capfd, "train", "run.yaml", *arguments.split())
    assert sorted(folder.rglob("*")) == before


def test_a_block_causal_checkpoint_is_trained_and_evaluated_with_its_own_sampler(folder, capfd):
    tiny.blockwise_folder(folder / "base")
    blocks = ["--sampler.attention", "block_causal", "--sampler.block_length", "2", "--sampler.cache", "exact"]
    for method in ("trace-block", "stabledrl-block", "reinforce"):
        words = ("train", "run.yaml", "--model", "base-in-blocks", "--method", method, "--out", method, *blocks)
        status, _, error = run(capfd, *words)
        assert status == 0 and (folder / method / "summary.json").is_file(), error
    message = refused(capfd, "evaluate", "base-in-blocks", "--config", "run.yaml", "--n", "4")
    assert "attention: got 'bidirectional' for a block-causal model" in message


FORGOTTEN = [("dppo-topk", "topk_logp", "topk"), ("egspo-sa", "greedy", "one_step"), ("mdpo", "proposed", "one_step_proposed")]


@pytest.mark.parametrize(("name", "word", "record"), FORGOTTEN)
def test_a_row_that_forgets_a_record_is_refused(name, word, record, folder, capfd, monkeypatch):
    assert methods.RECORDS[word] == (record,)
    monkeypatch.setitem(methods.RECORDS, word, ())
    message = refused(capfd, "train", "run.yaml", "--method", name)
    assert f"records: the rollout holds no record '{record}" in message and "(needs)" in message


def test_a_rollout_without_a_record_is_refused_by_the_module_itself():
    rollout = tiny.rollout(tiny.tabular(), records=())
    generator = torch.Generator().manual_seed(0)
    for name in ("egspo", "mdpo", "dppo-topk"):
        method = METHODS[name]
        with pytest.raises(ValueError, match="^records: the rollout holds no record '.*; the method must ask the sampler"):
            plan = method.plan(rollout, generator)
            blank = torch.zeros(plan.scored.shape, dtype=torch.float64)
            feature = {"logp": blank, "topk_logp": blank[..., None]}
            adv = torch.zeros(len(rollout.response))
            methods.method_loss(method, plan, rollout, feature, adv, blank, None)


PRETRAIN_MISTAKES = {
    "--task.hit_share 2": "task.hit_share: got 2.0; allowed 0 to 1",
    "--task.late_hit_share=-0.1": "task.late_hit_share: got -0.1; allowed 0 to 1",
    "--hit_share 0.5": "hit_share: unknown key",
    "--device quantum": "device: got 'quantum'; allowed cpu",
    "--model base": "model: unknown key",
}


@pytest.mark.parametrize("arguments", PRETRAIN_MISTAKES)
def test_a_wrong_setting_of_pretraining_is_one_line_and_writes_nothing(arguments, folder, capfd):
    before = sorted(folder.rglob("*"))
    assert PRETRAIN_MISTAKES[arguments] in refused(capfd, "pretrain", "base.yaml", *arguments.split())
    assert sorted(folder.rglob("*")) == before


FILES = {
    "steps: [1": "is no YAML",
    "- 1\n- 2\n": "holds list; allowed a mapping",
    "": "holds NoneType; allowed a mapping",
    "model: base\n": "sampler: missing; it has no default",
    "model: base\nsampler: {order: random}\n": "sampler.temperature: missing; it has no default",
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file_is_one_line(text, folder, capfd):
    (folder / "wrong.yaml").write_text(text)
    assert FILES[text] in refused(capfd, "train", "wrong.yaml")


OTHER_MISTAKES = {
    "train nowhere.yaml": "config: got 'nowhere.yaml', which is no file",
    "train": "the following arguments are required: config",
    "dance": "invalid choice: 'dance'",
    "": "the following arguments are required: verb",
    "evaluate base --config run.yaml --n 0": "n: got '0'; allowed integers from 1",
    "evaluate base --config run.yaml --n many": "n: got 'many'; allowed integers from 1",
    "evaluate base --config run.yaml --n 100": "evaluate.n: got 100; allowed at most",
    "evaluate base --config run.yaml --temperature -1": "temperature: got '-1'; allowed numbers from 0",
    "evaluate base --config run.yaml --temperature nan": "temperature: got nan; allowed 0 (greedy)",
    "evaluate base --config run.yaml --seed 100000000000000001": "seed: got '100000000000000001'; allowed up to",
    "evaluate base --config run.yaml --seed 100000000000000000 --temperature -1": "temperature: got '-1'; allowed",
    "evaluate base --config run.yaml --samples 0": "samples: got '0'; allowed integers from 1",
    "evaluate base --config run.yaml --task chess": "task.name: got 'chess'; allowed countdown",
    "evaluate base --config run.yaml --sample 3": "--sample: unknown option",
    "evaluate base --config nowhere.yaml": "config: got 'nowhere.yaml', which is no file",
    "evaluate nowhere --config run.yaml --n 4": "model: got 'nowhere', which holds no config.json",
    "evaluate gpt --config run.yaml --n 4": "model: got 'gpt' with model_type 'gpt2'; allowed a bidirectional llama",
    "memory nowhere.yaml": "config: got 'nowhere.yaml', which is no file",
    "memory run.yaml --gpus 0": "gpus: got '0'; allowed integers from 1",
    "memory run.yaml --model nowhere": "model: got 'nowhere', which holds no config.json",
    "memory run.yaml --lora.rank 2 --lora.target_modules [head]": "lora.target_modules: got 'head', which matches no module",
    "methods --jsn": "--jsn",
    "estimators --n 3": "--n: unknown option",
    "compare run.yaml --methods reinforce,pppo --out all": "method: got 'pppo'; allowed reinforce",
    "compare run.yaml --methods reinforce,egspo-released --out all": "plan.num_states: got 8; allowed up to the 4 steps",
    "compare run.yaml --methods reinforce --seeds 0 --out all": "seeds: got 0; allowed from 1",
    "compare run.yaml": "methods: run.yaml names none; allowed the file of a study, or --methods with that of a run",
    "compare run.yaml --methods reinforce --jobs 0": "jobs: got '0'; allowed integers from 1",
    "compare run.yaml --methods reinforce --rates much": "rates: got ['much']; allowed different numbers, each above 0",
}


@pytest.mark.parametrize("arguments", OTHER_MISTAKES)
def test_a_wrong_command_is_one_line_and_writes_nothing(arguments, folder, capfd):
    (folder / "gpt").mkdir()
    (folder / "gpt/config.json").write_text('{"model_type": "gpt2"}')
    before = sorted(folder.rglob("*"))
    assert OTHER_MISTAKES[arguments] in refused(capfd, *arguments.split())
    assert sorted(folder.rglob("*")) == before


def test_an_error_of_the_system_is_one_line(folder, capfd, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "save_file", full)
    status, _, error = run(capfd, "train", "run.yaml", "--out", "new")
    assert (
        status == 2
        and error.splitlines()[-1] == "minidrl: new/checkpoint-1 cannot be written: [Errno 28] No space left on device"
    )


def test_the_process_exits_with_status_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "minidrl", "train", "nowhere.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("minidrl: config: got 'nowhere.yaml', which is no file") and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------ overrides


def test_overrides_in_both_spellings_reach_the_settings(folder, capfd):
    words = ["--seed", "3", "--optimizer.learning_rate=3e-4", "--method=grpo", "--method_options.plan.num_states", "2"]
    status, out, _ = run(capfd, "train", "run.yaml", "--out", "new", *words, "--evaluate.temperature=0.5")
    assert status == 0 and out.startswith("grpo, seed 3: ") and "at temperature 0.5, 1 steps" in out
    settings = config.load(config.Train, "new/config.yaml")
    assert (settings.seed, settings.optimizer.learning_rate, settings.method) == (3, 3e-4, "grpo")
    assert settings.method_options == {"plan.num_states": 2} and settings.evaluate.temperature == 0.5
    assert settings.num_prompts == RUN["num_prompts"], "the file's other values stay"


def test_memory_is_told_before_anything_is_loaded(folder, capfd, monkeypatch):
    monkeypatch.setattr(trainer.checkpoints, "load", lambda *_: pytest.fail("a network was loaded"))
    (folder / "base/model.safetensors").unlink()
    status, out, error = run(capfd, "memory", "run.yaml", "--gradient_checkpointing", "true")
    assert (status, error) == (0, "") and out.splitlines()[-1].startswith("peak ")
    status, out, _ = run(capfd, "memory", "run.yaml", "--json")
    parts = json.loads(out)
    weights = 4 * tiny.network().num_parameters()
    assert status == 0 and (parts["weights"], parts["optimizer"]) == (weights, 2 * weights)


def test_out_of_memory_is_status_2(folder, capfd, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 23.6 GiB")

    monkeypatch.setattr(gradient, "second_pass", full)
    status, _, error = run(capfd, "train", "run.yaml", "--out", "new")
    assert status == 2 and error.splitlines()[-1].startswith("minidrl: micro_batch: got 128, out of memory in the update")


# ---------------------------------------------------------------------------------------------------------------- verbs


def test_pretrain_train_resume_evaluate(folder, capfd):
    """The whole way, on the folders that the verbs themselves have written."""
    status, out, _ = run(capfd, "pretrain", "base.yaml", "--out", "fresh")
    assert status == 0 and json.loads(out)["held_out"]["n"] == 4
    status, out, _ = run(capfd, "train", "run.yaml", "--model", "fresh", "--out", "new")
    assert status == 0 and "curve in new/curve.png" in out and (folder / "new/curve.png").stat().st_size > 1000
    assert "allowed above 1" in refused(capfd, "train", "run.yaml", "--model", "fresh", "--out", "new", "--resume")
    status, _, _ = run(capfd, "train", "run.yaml", "--model", "fresh", "--out", "new", "--resume", "--steps", "2")
    assert status == 0 and json.loads((folder / "new/summary.json").read_text())["steps"] == 2
    words = ["evaluate", "new/checkpoint-2", "--config", "run.yaml", "--n", "4"]
    status, out, error = run(capfd, *words, "--samples", "2", "--temperature", "0.5", "--json")
    assert status == 0 and error == ""
    scores = json.loads(out)
    found = {"model", "temperature", "length", "solved", "well_formed", "n", "pass@2", "low", "high"}
    assert scores.keys() == found | {"tokens", "calls", "seconds"}
    assert (scores["model"], scores["temperature"], scores["n"]) == ("new/checkpoint-2", 0.5, 4)
    assert scores["pass@2"] >= scores["solved"] >= 0
    status, out, _ = run(capfd, *words)
    assert status == 0 and out.startswith("solved ") and out.endswith(" on 4 held-out problems\n")


def test_out_defaults_to_a_folder_named_like_the_config(folder, capfd):
    assert run(capfd, "train", "run.yaml")[0] == 0
    assert (folder / "runs/run/summary.json").is_file()


def test_a_run_that_has_to_stop_exits_with_status_1(folder, capfd):
    status, out, error = run(capfd, "train", "run.yaml", "--out", "new", "--steps", "2", "--optimizer.learning_rate", "1e30")
    last = error.splitlines()[-1]
    assert status == 1 and out == "" and "Traceback" not in error
    assert last.startswith("minidrl: step 1: logits: the model returned NaN") and "new/failed-1 holds weights" in last


def test_logits_that_are_nan_from_the_start_are_those_of_a_wrong_model(folder, capfd, monkeypatch):
    def broken(*_, **__):
        raise FloatingPointError("logits: the model returned NaN or +inf")

    monkeypatch.setattr(trainer.sampler, "generate", broken)
    for words in (["train", "run.yaml", "--out", "new"], ["evaluate", "base", "--config", "run.yaml", "--n", "4"]):
        status, out, error = run(capfd, *words)
        assert (status, out, error.count("\n")) == (2, "", 1) and not (folder / "new").exists()
        assert "base', with which logits: the model returned NaN or +inf; its largest weight is " in error


def test_compare_does_what_is_missing_and_refuses_cells_with_other_settings(folder, capfd, monkeypatch):
    words = ["compare", "run.yaml", "--methods", "reinforce,grpo", "--seeds", "2", "--out", "all", "--jobs", "1"]
    status, table, _ = run(capfd, *words)
    assert status == 0
    cells = {path.name for path in (folder / "all").iterdir() if path.is_dir()}
    assert cells == {f"{name}-3e-4-1-{seed}" for name in ("reinforce", "grpo") for seed in (0, 1)}
    assert "| reinforce" in table and "| grpo" in table and "not distinguishable" in table
    assert "all/run-1.png" in table.splitlines() and (folder / "all/run-1.png").is_file()
    monkeypatch.setattr(trainer, "train", lambda *_: pytest.fail("a cell of the ledger is not repeated"))
    assert run(capfd, *words)[:2] == (0, table)
    assert run(capfd, *words, "--report")[:2] == (0, table)
    message = "cell: got reinforce-3e-4-1-0 with other settings than in all/ledger.csv"
    assert message in refused(capfd, *words, "--steps", "3")


def test_compare_reads_the_file_of_a_study(folder, capfd):
    (folder / "small.yaml").write_text("config: run.yaml\nmethods: [reinforce]\nrates: [1e-4, 3e-4]\nseeds: 2\n")
    status, out, _ = run(capfd, "compare", "small.yaml", "--rehearse", "--jobs", "1", "--out", "tried")
    assert status == 0 and "| reinforce" in out and (folder / "tried/ledger.csv").is_file()
    assert not (folder / "results").exists(), "a rehearsal leaves the ledger alone"


def test_compare_continues_an_interrupted_run(folder, capfd):
    words = "compare run.yaml --methods reinforce --seeds 1 --out all --steps 3 --save_every 1 --jobs 1".split()
    step = trainer.Learner.step

    def interrupted(learner, number):
        if number == 2:
            raise KeyboardInterrupt
        return step(learner, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Learner, "step", interrupted)
        assert run(capfd, *words)[0] == 130
    assert run(capfd, *words)[0] == 0
    rows = report.read_metrics(folder / "all/reinforce-3e-4-1-0")
    assert [row["step"] for row in rows if "reward" in row] == [1, 2, 3]


def test_estimators_in_json(capfd):
    status, out, error = run(capfd, "estimators", "--json")
    rows = json.loads(out)
    assert status == 0 and error == "" and len(rows) > 3
    assert all(row.keys() == set(estimators.ESTIMATOR_COLUMNS) for row in rows)
    model, response = oracle.TabularDenoiser.random(6, 3, torch.Generator().manual_seed(0)), (0, 1, 2, 0, 1, 2)
    gap = {
        "random order": oracle.any_order_log_likelihood(model, response) - oracle.elbo(model, response),
        "random order in blocks of 3": oracle.block_log_likelihood(model, response, 3) - oracle.block_elbo(model, response, 3),
    }
    for row in rows:  # each against the exact values of its own sampler
        assert row["bias to ELBO"] - row["bias to log p"] == pytest.approx(gap[row["sampler"]].item(), abs=1e-9)
        assert ("blocks" in row["sampler"]) == (row["estimator"] == "block ELBO")
    unbiased = [row for row in rows if row["estimator"] in ("block ELBO", "ELBO, count", "ELBO, complementary")]
    assert len(unbiased) == 8
    assert all(abs(row["bias to ELBO"]) <= 1e-9 for row in unbiased)


def test_help_is_no_mistake(capfd):
    status, out, error = run(capfd, "--help")
    assert status == 0 and error == "" and "pretrain" in out and "compare" in out
