"""The settings of a run: what a file and the command line may say, and the one line that answers a mistake."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from minidrl.methods import METHODS
from minidrl.run import config

SAMPLER = {"order": "left_to_right", "temperature": 1.0, "length": 4, "block_length": 4, "tokens_per_step": 1}
RUN = {"model": "base", "task": {"num_numbers": 2, "held_out_share": 0.3}, "sampler": SAMPLER, "steps": 1}
RUN_BASE = {"task": RUN["task"], "sampler": SAMPLER, "steps": 3}
RUN |= {"method": "reinforce", "method_options": {"plan.min_entropy": 0.02}}
CONFIGS = sorted((Path(__file__).parents[1] / "tiny_configs").glob("*.yaml"))


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "base").mkdir()
    return tmp_path / "run.yaml"


def load(path: Path, **overrides) -> config.Train:
    return config.load(config.Train, path, {key.replace("__", "."): value for key, value in overrides.items()})


# ------------------------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    "stepz 5": "stepz: unknown key (did you mean steps?); allowed model,",
    "steps many": "steps: got 'many'; allowed a valid integer",
    "steps [1": "steps: got '[1'; allowed a value in YAML",
    "steps.more 3": "steps.more: got a value below 'steps', which is no section",
    "optimizer.learning_rate fast": "optimizer.learning_rate: got 'fast'; allowed a valid number",
    "optimizer.schedule linear": "optimizer.schedule: got 'linear'; allowed 'constant' or 'cosine'",
    "task 3": "task: got 3; allowed a section",
    "task.name chess": "task.name: got 'chess'; allowed countdown, sudoku",
    "task.num_numbers 7": "task.num_numbers: got 7; allowed 2, 3 or 4",
    "sampler.block_length 3": "sampler.block_length: got 3; allowed a divisor of length = 4",
    "dtype float16": "dtype: got 'float16'; allowed 'stored', 'float32' or 'bfloat16'",
    "compute_dtype bfloat16": "compute_dtype: got 'bfloat16'; allowed weights, or dtype and rollout_dtype float32",
    "quantize true": "quantize: got True; allowed with lora.rank from 1",
    "device quantum": "device: got 'quantum'; allowed cpu, cuda",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_setting_is_one_line_that_names_it(mistake, path):
    key, _, value = mistake.partition(" ")
    with pytest.raises(ValueError) as caught:
        config.load(config.Train, path, {key: value})
    said = str(caught.value)
    assert said.startswith(MISTAKES[mistake]) and "\n" not in said


BELONG_TOGETHER = {
    "quantize": {"quantize": True, "lora.rank": 2, "rollout_dtype": "bfloat16"},
    "compute_dtype": {"compute_dtype": "bfloat16", "dtype": "float32", "lora.rank": 2},
    "gradient_checkpointing": {"gradient_checkpointing": True, "compile": True},
}


@pytest.mark.parametrize("key", BELONG_TOGETHER)
def test_settings_that_do_not_go_together(key, path):
    with pytest.raises(ValueError, match=f"^{key}: got .*; allowed "):
        config.load(config.Train, path, BELONG_TOGETHER[key])


FILES = {
    "steps: [1": "is no YAML",
    "": "holds NoneType; allowed a mapping",
    "model: base\n": "sampler: missing; it has no default",
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file_is_one_line(text, path):
    path.write_text(text)
    with pytest.raises(ValueError, match=FILES[text]) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_pretraining_has_settings_of_its_own(path):
    path.write_text(yaml.safe_dump(RUN_BASE))
    assert config.load(config.Pretrain, path).task.name == "countdown"
    for key, value, said in (
        ("task.name", "gsm8k", "init: got '' with task gsm8k, which has no alphabet of its own; allowed a checkpoint"),
        ("task.name", "code", "task.name: got 'code', which has no demonstrations"),
        ("network.num_attention_heads", 0, "network.num_attention_heads: got 0; allowed"),
        ("model", "base", "model: unknown key"),
        ("hit_share", 0.5, "hit_share: no key any more; allowed in its place task.hit_share"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            config.load(config.Pretrain, path, {key: value})


# --------------------------------------------------------------------------------------------------------------- values


def test_numbers_in_every_usual_notation(path):
    path.write_text(yaml.safe_dump(RUN | {"method_options": {}}) + "optimizer: {learning_rate: 3e-4, beta2: '0.5'}\n")
    settings = load(path, steps="1e3", optimizer__weight_decay="1E-2", method_options="{plan.min_entropy: 2e-2}")
    assert (settings.optimizer.learning_rate, settings.optimizer.weight_decay) == (3e-4, 1e-2)
    assert (settings.steps, settings.optimizer.beta2) == (1000, 0.5) and isinstance(settings.steps, int)
    assert settings.method_options == {"plan.min_entropy": 0.02}
    assert load(path, optimizer__max_grad_norm=".inf").optimizer.max_grad_norm == float("inf")


def test_a_model_in_a_config_is_relative_to_the_config_and_one_in_an_option_to_the_user(path, monkeypatch):
    (path.parent / "elsewhere").mkdir()
    monkeypatch.chdir(path.parent / "elsewhere")
    assert load(Path("../run.yaml")).model == str(path.parent / "base")
    assert load(Path("../run.yaml"), model="mine").model == "mine"


def test_the_name_of_a_model_on_the_hub_is_no_path(path):
    path.write_text(yaml.safe_dump(RUN | {"model": "GSAI-ML/LLaDA-8B-Instruct"}))
    assert load(path).model == "GSAI-ML/LLaDA-8B-Instruct"
    (path.parent / "GSAI-ML").mkdir()  # then it is a folder beside the config
    assert load(path).model == str(path.parent / "GSAI-ML/LLaDA-8B-Instruct")


def test_a_file_of_a_task_in_an_option_is_relative_to_the_user(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    made = config.load(config.Train, path, {"task.path": "mine.json"})
    assert made.task.path == str(path.parent / "mine.json")


def test_a_run_that_kept_the_name_of_a_file_as_it_was_given_goes_on(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    settings = config.load(config.Train, path, {"task.path": "mine.json"})
    told = config.dumped(settings).replace(settings.task.path, "mine.json")
    (path.parent / "config.yaml").write_text(told)
    config.check_unchanged(settings, path.parent)


def test_files_of_a_task_are_relative_to_the_config(path):
    path.write_text(yaml.safe_dump(RUN | {"task": {"name": "gsm8k", "train_path": "rows.jsonl", "prompt_format": "chat"}}))
    assert load(path).task.train_path == str(path.parent / "rows.jsonl")


def test_another_method_leaves_out_the_options_that_it_does_not_have(path, caplog):
    assert load(path, method="grpo").method_options == {}
    assert "grpo has no plan.min_entropy, which the file sets for reinforce: left out" in caplog.text
    assert load(path).method_options == RUN["method_options"]


def test_another_task_keeps_only_how_a_model_is_asked(path, caplog):
    path.write_text(yaml.safe_dump(RUN | {"task": {"num_numbers": 2, "prompt_format": "chat", "max_prompt_length": 300}}))
    task = load(path, task__name="gsm8k").task
    assert (task.name, task.prompt_format, task.max_prompt_length) == ("gsm8k", "chat", 300)
    assert "num_numbers of the file are settings of countdown: left out for gsm8k" in caplog.text


# ------------------------------------------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_that_ships_is_valid_and_survives_being_written_down(path):
    text = yaml.safe_load(path.read_text())
    kind = config.Pretrain if {"network", "init"} & text.keys() else config.Train
    settings = config.load(kind, path)
    assert (settings.steps, settings.seed) == (text["steps"], text["seed"])
    assert kind is config.Pretrain or settings.method in METHODS
    assert config.from_dict(kind, yaml.safe_load(config.dumped(settings))) == settings


def test_a_changed_run_is_noticed(path):
    settings = load(path)
    (path.parent / "config.yaml").write_text(config.dumped(settings))
    config.check_unchanged(settings, path.parent)
    other = dataclasses.replace(settings, steps=9, seed=1)
    with pytest.raises(ValueError, match="^steps: got 9; allowed 1, with which the run in .* was started$"):
        config.check_unchanged(other, path.parent)
    with pytest.raises(ValueError, match="^seed: got 1; allowed 0"):
        config.check_unchanged(other, path.parent, free=("steps",))
