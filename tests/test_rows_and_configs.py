"""Every row of the table on every config that ships: accepted, or refused for the one reason that a config can give."""

from pathlib import Path

import pytest
import yaml

from minidrl import checkpoints, config, controls, rehearsal
from minidrl.__main__ import main
from minidrl.methods import METHODS, has_option
from minidrl.tasks.sudoku import Sudoku

FOLDER = Path(__file__).parents[1] / "tiny_configs"
FILES = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
TRAINING = {name: data for name, data in FILES.items() if "model" in data}
# Rows whose states share a forward, all blocks of them: of a network without blocks there is no such forward.
STAIRCASES = {name for name in METHODS if name.endswith("-block")}
NO_BLOCKS = "sampler.attention: got 'bidirectional'; allowed block_causal, as {} scores all blocks at once"


def in_blocks(data: dict) -> bool:
    return data["sampler"].get("attention") == "block_causal"


def chosen(file: str, name: str) -> config.Train:
    return config.load(config.Train, FOLDER / file, {"method": name})


def test_what_ships_is_what_is_tried():
    assert len(TRAINING) >= 7 and {in_blocks(data) for data in TRAINING.values()} == {True, False}
    assert all("network" in data for name, data in FILES.items() if name not in TRAINING), "the others are for pretrain"
    assert STAIRCASES <= set(METHODS)


@pytest.mark.parametrize("file", TRAINING)
@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_accepted_or_needs_blocks_or_an_order_that_the_config_does_not_have(name, file):
    settings = chosen(file, name)
    if name in STAIRCASES and not in_blocks(TRAINING[file]):
        with pytest.raises(ValueError) as error:
            rehearsal.method_of(settings)
        assert str(error.value) == NO_BLOCKS.format(name)
    elif METHODS[name].order not in ("any", settings.sampler.order):
        with pytest.raises(ValueError) as error:
            rehearsal.method_of(settings)
        allowed = f"allowed {METHODS[name].order}, which {name} is about"
        assert str(error.value) == f"sampler.order: got {settings.sampler.order!r}; {allowed}"
    else:
        assert rehearsal.method_of(settings).name == name


@pytest.mark.parametrize("name", [name for name in FILES if name not in TRAINING])
def test_the_configs_of_bases_are_accepted(name):
    settings = config.load(config.Pretrain, FOLDER / name)
    shares = [key for key in vars(settings.task) if key.endswith("hit_share")]
    assert shares and set(shares) <= set(FILES[name]["task"]) and all(0 < getattr(settings.task, share) < 1 for share in shares)


@pytest.mark.parametrize("name", TRAINING)
def test_a_run_and_its_base_have_the_same_puzzles_in_the_same_splits(name):
    """Else RL would train on puzzles that its base has seen as its own, or be judged on them."""
    base = FOLDER / f"{Path(TRAINING[name]['model']).name}.yaml"
    if not base.is_file():
        assert name.startswith(("llada_8b", "a2d_06b")), "whose networks were not trained here"
        return
    of_base, of_run = config.load(config.Pretrain, base).task, config.load(config.Train, FOLDER / name).task
    splits = ("num_numbers", "max_number", "max_value", "max_target", "held_out_share", "pretrain_share")
    splits = {"countdown": splits, "sudoku": ("cut",)}[of_run.name]
    assert [getattr(of_base, key) for key in splits] == [getattr(of_run, key) for key in splits]


def test_the_larger_bed_shares_no_puzzle_and_its_run_draws_fewer_than_there_are():
    run = config.load(config.Train, FOLDER / "countdown20_cpu.yaml")
    sizes = {split: len({puzzle.key for puzzle in run.task.puzzles(split)}) for split in ("pretrain", "train", "held_out")}
    assert sum(sizes.values()) == 14_912 and min(sizes.values()) > 2000
    assert 0.5 < run.steps * run.num_prompts / sizes["train"] < 1
    card = (Path(run.model) / "README.md").read_text()
    told = "{pretrain:,} for pre-training, {train:,} for RL, {held_out:,} held out"
    assert told.format(**sizes) in card


def test_the_base_of_the_larger_bed_is_small_and_solves_what_it_has_never_met():
    """Its card says 29.5 % of 512 with its best decoder; of 128 the standard error is 4 points."""
    run = config.load(config.Train, FOLDER / "countdown20_cpu.yaml", {"evaluate.n": 128})
    assert (Path(run.model) / "model.safetensors").stat().st_size < 4_000_000
    assert controls.solved(*checkpoints.load(run.model), run, 0.0, order="right_to_left")["solved"] > 0.17


# --------------------------------------------------------------------------------------- options of a row that is not run


@pytest.mark.parametrize("file", TRAINING)
@pytest.mark.parametrize("name", METHODS)
def test_options_that_a_row_lacks_are_left_out_in_one_line_that_names_them(name, file, capfd):
    data = TRAINING[file]
    own, options = data.get("method", "reinforce"), data.get("method_options", {})
    kept = {key: value for key, value in options.items() if name == own or has_option(METHODS[name], key)}
    left = [key for key in options if key not in kept]
    assert chosen(file, name).method_options == kept
    said = f"minidrl: method_options: {name} has no {', '.join(left)}, which the file sets for {own}: left out\n"
    assert capfd.readouterr() == ("", said if left else "")


def test_some_are_left_out():
    """Else the test above sees nothing."""
    lacking = [(file, name) for file, data in TRAINING.items() for name in METHODS for key in data.get("method_options", {})
               if not has_option(METHODS[name], key)]  # fmt: skip
    assert len(lacking) > 10


@pytest.fixture
def run(tmp_path) -> Path:
    """A config with two options of its row; there is no model, and none is needed to be refused."""
    data = TRAINING["countdown_cpu.yaml"] | {"method": "egspo", "device": "cpu", "model": str(tmp_path / "nowhere")}
    data["method_options"] = {"plan.num_states": 2, "plan.shared": True}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_both_are_named(run, capfd):
    settings = config.load(config.Train, run, {"method": "ppo-released"})
    assert settings.method_options == {"plan.num_states": 2}
    assert capfd.readouterr().err == (
        "minidrl: method_options: ppo-released has no plan.shared, which the file sets for egspo: left out\n"
    )
    assert config.load(config.Train, run, {"method": "gspo", "seed": 3}).method_options == {"plan.num_states": 2}
    capfd.readouterr()
    assert config.load(config.Train, run, {"method": "tracerl"}).method_options == {}
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "tracerl has no plan.num_states, plan.shared, which the file sets for egspo" in said


def test_the_row_of_the_file_keeps_its_options_without_a_word(run, capfd):
    wanted = {"plan.num_states": 2, "plan.shared": True}
    assert config.load(config.Train, run).method_options == wanted
    assert config.load(config.Train, run, {"method": "egspo"}).method_options == wanted
    assert capfd.readouterr().err == ""


def test_only_the_first_process_says_so(run, capfd, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert config.load(config.Train, run, {"method": "tracerl"}).method_options == {}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("key", ["plan.shared", "plan.num_states", "objective.cap", "nonsense"])
def test_an_option_of_the_command_line_that_the_row_lacks_is_refused(key, run, capfd):
    before = sorted(run.parent.rglob("*"))
    words = ["train", str(run), "--out", str(run.parent / "out"), "--method", "tracerl", f"--method_options.{key}", "3"]
    assert main(words) == 2
    (refusal,) = capfd.readouterr().err.splitlines()  # without the note of what the file sets
    assert refusal.startswith(f"minidrl: method_options.{key}: no such option of tracerl; allowed plan.merge")
    assert sorted(run.parent.rglob("*")) == before


def test_options_given_whole_replace_those_of_the_file(run, capfd):
    """Then nothing is left out: what is given and does not fit is a mistake."""
    assert main(["memory", str(run), "--method", "tracerl", "--method_options", "{plan.shared: true}"]) == 2
    assert capfd.readouterr().err.startswith("minidrl: method_options.plan.shared: no such option of tracerl; allowed ")


def test_a_file_whose_own_row_lacks_an_option_is_refused(run, capfd):
    run.write_text(run.read_text().replace("plan.shared", "plan.shred"))
    assert main(["memory", str(run)]) == 2
    assert capfd.readouterr().err.startswith("minidrl: method_options.plan.shred: no such option of egspo; allowed ")


# ------------------------------------------------------------------------------------------------------ another task


def test_another_task_takes_over_how_the_model_is_asked_and_nothing_else(capfd):
    file = FOLDER / "a2d_06b_24gb.yaml"
    found = config.load(config.Train, file, {"task.name": "sudoku", "task.min_clues": 7, "task.max_clues": 9}).task
    assert found == Sudoku(min_clues=7, max_clues=9, prompt_format="chat", max_prompt_length=256)
    said = "minidrl: task: num_numbers, max_number, max_value, held_out_share of the file are settings of countdown: left out"
    assert capfd.readouterr().err == f"{said} for sudoku\n"


def test_the_files_own_task_keeps_its_settings(capfd):
    file = FOLDER / "a2d_06b_24gb.yaml"
    assert config.load(config.Train, file, {"task.name": "countdown"}) == config.load(config.Train, file)
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match="^task.name: got 'chess'; allowed countdown, sudoku"):
        config.load(config.Train, file, {"task.name": "chess"})


@pytest.mark.parametrize("kind, key, most", [
    (config.Network, "num_hidden_layers", 1024),
    (config.Lora, "rank", 65536),
])  # fmt: skip
def test_a_bound_is_allowed_and_one_more_is_not(kind, key, most):
    assert getattr(kind(**{key: most}), key) == most
    with pytest.raises(ValueError, match=f"{key}: got {most + 1}; allowed up to {most}$"):
        kind(**{key: most + 1})
