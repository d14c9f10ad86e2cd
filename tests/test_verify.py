"""The verb verify: passes for trained weights in LLaDA's format, and each of its checks fails for what it is there for."""

import contextlib
import json
import shutil
import weakref
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import test_chat
import test_loading
import tiny
from minidrl import denoiser, sampler
from minidrl.run import checkpoints, memory, trainer, verify
from minidrl.run.cli import main
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import Countdown, tokenizer

BASE = Path(__file__).parents[1] / "tiny_configs/bases/countdown_base"
RECIPE = Path(__file__).parents[1] / "tiny_configs/llada_8b_lora.yaml"
PUZZLE = Countdown().example()
NAMES = ["load", "loss", "answer", "reload", "step", "memory", "adapters"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The shipped base, which has learnt to calculate, as a LLaDA checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    checkpoints.save_as_llada(*checkpoints.load(BASE), folder)
    return folder


@pytest.fixture(scope="module")
def random(tmp_path_factory) -> Path:
    """LLaDA's format with a chat template, and weights that have learnt nothing."""
    folder = tmp_path_factory.mktemp("random")
    test_loading.llada(folder)
    test_chat.letters(folder)
    test_chat.with_positions(folder)
    return folder


def found(source: Path, **words) -> dict[str, verify.Check]:
    return {check.name: check for check in verify.verify(str(source), **words)}


def failed(checks: dict[str, verify.Check]) -> list[str]:
    return [name for name, check in checks.items() if check.status == "FAILED"]


def run(capfd, *arguments: object) -> tuple[int, list[str], str]:
    """(exit status, lines of stdout, stderr) of ``python -m minidrl verify ARGUMENTS``."""
    capfd.readouterr()
    status = main(["verify", *map(str, arguments)])
    out, error = capfd.readouterr()
    return status, out.splitlines(), error


# ------------------------------------------------------------------------------------------------------------- verdicts
def test_trained_weights_in_lladas_format_pass(trained, capfd):
    status, lines, error = run(capfd, trained, "--device", "cpu")
    assert (status, error) == (0, "")
    assert [line.split()[1] for line in lines] == NAMES
    assert [line.split()[0] for line in lines] == ["ok"] * 5 + ["n/a", "ok"]
    says = dict(zip(NAMES, lines, strict=True))
    assert "447,648 weights, float32" in says["load"] and "ln V is 3.14" in says["loss"]
    assert "'7,9,4>64:' -> '7+9=16*4=64'" in says["answer"]
    assert "predicted 0.0" in says["memory"] and ("on a CPU the process grew by 0." in says["memory"]) == Path("/proc").is_dir()
    assert "39 tensors" in says["reload"] and "28 adapters moved" in says["step"] and "95 tensors" in says["adapters"]


def test_random_weights_fail_where_they_must_and_only_there(random, capfd):
    status, lines, error = run(capfd, random, "--device", "cpu")
    assert status == 1 and error == "minidrl: verify: 2 of 7 checks failed: loss, answer\n"
    assert [line.split()[0] for line in lines] == ["ok", "FAILED", "FAILED", "ok", "ok", "n/a", "ok"]
    assert "allowed below 2.65, half of ln V" in lines[1] and "'What is 2+2?' -> '" in lines[2]
    assert "which lacks '4'" in lines[2]


def test_weights_that_do_not_load_are_a_failed_check_and_the_last(trained, tmp_path, capfd):
    shutil.copytree(trained, tmp_path / "broken")
    weights = load_file(trained / "model.safetensors")
    del weights["model.transformer.blocks.2.ff_proj.weight"]
    save_file(weights, tmp_path / "broken/model.safetensors", metadata={"format": "pt"})
    status, lines, error = run(capfd, tmp_path / "broken")
    assert (status, len(lines)) == (1, 1) and error == "minidrl: verify: 1 of 1 checks failed: load\n"
    assert lines[0].startswith("FAILED  load") and "blocks.2.ff_proj.weight" in lines[0]


def test_another_dtype_is_verified_in_it(trained):
    checks = found(trained, dtype="bfloat16")
    assert not failed(checks) and "bfloat16" in checks["load"].said
    half = float(checks["reload"].said.split(" GB")[0].rpartition(" ")[2])
    assert half == pytest.approx(447_648 * 2 / 1e9, abs=0.0005)


def test_block_causal_attention_is_asked_in_its_blocks(tmp_path):
    checkpoints.save(denoiser.build(tiny.SIZES, tokenizer(), 0, block_length=5), tokenizer(), tmp_path)
    assert failed(found(tmp_path)) == ["loss", "answer"]


CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] + ' ' + m['content'] }}<|im_end|>{% endfor %}<|im_start|>assistant "


@pytest.mark.parametrize(("family", "lead"), [("sdar", 0), ("sdar", 1), ("Dream", 0)])
def test_chats_of_other_families_of_any_length_fail_only_for_what_they_answer(family, lead, tmp_path):
    """Random weights, whose answer is not the known one. SDAR's prompts: of two lengths, at most one is whole blocks."""
    test_loading.MAKERS[family](tmp_path)
    test_chat.with_positions(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    test_loading.write(path, json.loads(path.read_text()) | {"chat_template": "~" * lead + CHAT})
    checks = found(tmp_path)
    assert failed(checks) == ["loss", "answer"] and "which lacks '4'" in checks["answer"].said
    assert "adapters moved, " in checks["step"].said


def test_a_prompt_that_is_not_whole_blocks_is_said(tmp_path, monkeypatch):
    test_loading.sdar(tmp_path)  # blocks of 4, and a token for each letter
    model, tok = checkpoints.load(tmp_path)
    monkeypatch.setattr(verify, "decode", lambda *_: ["4"])
    for prompt, end in (("2+2=", "with '4'"), ("1+1+2=", "with '4'; of the prompt's blocks of 4 the first has 2 tokens")):
        said = verify._answer(model, tok, verify.QUESTIONS["words"]._replace(prompt=prompt))
        assert said == f"{prompt!r} -> '4', {end}"


MISTAKES = {
    "no folder": (["nowhere/at/all"], "holds no config.json"),
    "a dtype": (["--dtype", "float16"], "dtype: got 'float16'; allowed 'stored', 'float32' or 'bfloat16'"),
    "a device": (["--device", "abacus"], "device: got 'abacus'; allowed cpu, cuda, cuda:0 and so on"),
    "a prompt alone": (["--prompt", "5,5,2>20:"], "answer: got None with prompt '5,5,2>20:'; allowed both or none"),
    "an answer alone": (["--answer", "4"], "answer: got '4' with prompt None; allowed both or none"),
    "an empty answer": (["--prompt", "5,5,2>20:", "--answer", ""], "answer: got '' with prompt '5,5,2>20:'; allowed both or none"),
    "a short text": (["--text", "5*8=40"], "text: got '5*8=40', 6 tokens; allowed from 8"),
    "no such folder": (["--out", "nowhere/at/all"], "out: got 'nowhere/at/all'; allowed a folder"),
    "an option": (["--xyzzy", "5"], "No such option: --xyzzy"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(name, trained, capfd):
    arguments, message = MISTAKES[name]
    status, lines, error = run(capfd, *([trained] if arguments[0].startswith("--") else []), *arguments)
    assert status == 2 and message in error and error.count("\n") == 1
    assert all(line.startswith("ok      load") for line in lines)


# --------------------------------------------------------------------------------------------------------------- answer
def test_a_question_of_ones_own(trained):
    assert not failed(found(trained, prompt="5,5,2>20:", answer="20"))
    assert failed(found(trained, prompt="5,5,2>20:", answer="21")) == ["answer"]


@pytest.mark.parametrize(("reply", "good"), [("64", True), ("7*64=9", True), ("(64)", True), ("640", False), ("164", False)])
def test_an_answer_is_a_whole_word(reply, good, trained, monkeypatch):
    model, tok = checkpoints.load(trained)
    monkeypatch.setattr(verify, "decode", lambda *_: [reply])
    if good:
        assert repr(reply) in verify._answer(model, tok, PUZZLE)
    else:
        with pytest.raises(verify.Failed, match=f"'{reply}', which lacks '64'"):
            verify._answer(model, tok, PUZZLE)


def test_a_question_gets_no_special_tokens(trained, monkeypatch):
    """A template has written those that it wants; a tokenizer may add some to every text."""
    model, tok = checkpoints.load(trained)
    asked = []
    call = type(tok).__call__
    monkeypatch.setattr(type(tok), "__call__", lambda self, *a, **words: asked.append(words) or call(self, *a, **words))
    verify._answer(model, tok, PUZZLE)
    assert [words["add_special_tokens"] for words in asked] == [False]


def test_a_question_goes_through_the_chat_template(trained):
    """The template completes the puzzle: without it, and without the opening of the answer, there is nothing to solve."""
    model, tok = checkpoints.load(trained)
    asked = PUZZLE._replace(prompt="7,9,4")
    with pytest.raises(verify.Failed):
        verify._answer(model, tok, asked)
    tok.chat_template = "{% for m in messages %}{{ m['content'] }}>64{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    assert "'7,9,4' -> '7+9=16*4=64'" in verify._answer(model, tok, asked)


def test_the_kind_of_model_decides_what_is_asked(random, trained):
    asked = {}
    for name, folder in (("chat", random), ("countdown", trained)):
        tok = checkpoints.load(folder)[1]
        asked[name] = verify._question(tok, None, None, None)
    tok = checkpoints.load(random)[1]
    tok.chat_template = None
    assert asked | {"words": verify._question(tok, None, None, None)} == verify.QUESTIONS | {"countdown": PUZZLE}
    other = verify._question(checkpoints.load(trained)[1], "a", "b", "other words")
    assert (other.prompt, other.answer, other.text, other.before) == ("a", "b", "other words", "")


# --------------------------------------------------------------------------------------------------------------- reload
def test_a_bit_is_a_difference():
    def one(**changes):
        made = torch.nn.Linear(2, 2)
        made.weight.data = torch.tensor([[0.0, 1.0], [torch.nan, 2.0]])
        for name, value in changes.items():
            setattr(made, name, torch.nn.Parameter(value) if value is not None else None)
        return made

    bias, marks = torch.zeros(2), verify.marks
    weight = one().weight.detach()
    assert marks(one(bias=bias)) == marks(one(bias=bias)) and verify._same(weight, weight.clone())
    for changed in (torch.where(weight == 0, -0.0, weight), weight.T, weight.nextafter(torch.tensor(9.0)), weight.bfloat16()):
        other = marks(one(bias=bias, weight=changed))
        assert other.keys() == marks(one(bias=bias)).keys() and other != marks(one(bias=bias))
        assert not verify._same(weight, changed)
    halves = [torch.zeros(2, 2, dtype=kind) for kind in (torch.float16, torch.bfloat16)]
    assert not verify._same(*halves) and marks(one(weight=halves[0])) != marks(one(weight=halves[1])), "another dtype"
    assert marks(one(bias=None)).keys() == {"weight"}


DAMAGES = {
    "a bit": lambda weights, name: weights[name].view(torch.int32).flatten()[-1:].bitwise_xor_(1),
    "missing": lambda weights, name: weights.pop(name),
    "dtype": lambda weights, name: weights.update({name: weights[name].bfloat16()}),
    "shape": lambda weights, name: weights.update({name: weights[name][None]}),
    "extra": lambda weights, name: weights.update({"model.transformer.more": weights[name].clone()}),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shards", [1, 4])
def test_a_written_shard_is_compared_tensor_by_tensor(damage, shards, trained, tmp_path, monkeypatch):
    """In whichever of the files it is."""
    write = partial(checkpoints.save_torch_state_dict, max_shard_size=2 * 10**6 // shards)
    monkeypatch.setattr(checkpoints, "save_torch_state_dict", write)
    model, tok = checkpoints.load(trained)
    checkpoints.save(model, tok, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shards > 1) and verify.differing(model, tmp_path) == []
    path = files[-1]
    weights = load_file(path)
    name = max(weights)
    DAMAGES[damage](weights, name)
    save_file(weights, path, metadata={"format": "pt"})
    wrong = "model.transformer.more" if damage == "extra" else checkpoints.own_name(name, model.family)
    assert verify.differing(model, tmp_path) == [wrong]


def test_a_tensor_in_two_files_and_a_file_that_is_not_there_are_found(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(
        checkpoints, "save_torch_state_dict", partial(checkpoints.save_torch_state_dict, max_shard_size=500_000)
    )
    model, tok = checkpoints.load(trained)
    checkpoints.save(model, tok, tmp_path)
    first, *_, last = sorted(tmp_path.glob("*.safetensors"))
    kept, more = load_file(last), load_file(first)
    name = min(more)
    save_file(kept | {name: more[name]}, last, metadata={"format": "pt"})
    assert verify.differing(model, tmp_path) == [checkpoints.own_name(name, model.family)]
    last.unlink()
    with pytest.raises(ValueError, match=f"lacks {last.name}"):
        verify.differing(model, tmp_path)


@pytest.mark.parametrize("what", ["config.json", "tokenizer.json"])
def test_a_file_of_minidrls_own_format_is_read_again(what, tmp_path, monkeypatch):
    """There are no files that were loaded to compare it with."""
    save = checkpoints.save
    save(*checkpoints.load(BASE), tmp_path)

    def careless(model, tok, folder):
        save(model, tok, folder)
        path = Path(folder) / what
        if path.exists() and not denoiser.has_adapters(model):
            words = json.loads(path.read_text())
            if what == "config.json":
                words["intermediate_size"] += 2
            else:
                words["model"]["vocab"]["new"] = len(words["model"]["vocab"])
            path.write_text(json.dumps(words))

    monkeypatch.setattr(checkpoints, "save", careless)
    checks = found(tmp_path)
    said = {"config.json": "config.json describes another network", "tokenizer.json": "the tokenizer came back different"}
    assert failed(checks) == ["reload"] and checks["reload"].said == said[what]


@pytest.mark.parametrize("check", ["reload", "adapters"])
def test_a_changed_weight_is_found(check, trained, monkeypatch):
    save = checkpoints.save

    def careless(model, tok, folder):
        save(model, tok, folder)
        if denoiser.has_adapters(model) == (check == "adapters"):
            (path,) = Path(folder).glob("*.safetensors")
            weights = load_file(path)
            weights[max(weights)].flatten()[0] += 1
            save_file(weights, path, metadata={"format": "pt"})

    monkeypatch.setattr(checkpoints, "save", careless)
    checks = found(trained)
    assert failed(checks) == [check] and "1 tensors came back different" in checks[check].said


def test_a_changed_file_is_found(trained, monkeypatch):
    save = checkpoints.save

    def careless(model, tok, folder):
        save(model, tok, folder)
        path = Path(folder) / "config.json"
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 10001.0}))

    monkeypatch.setattr(checkpoints, "save", careless)
    checks = found(trained)
    assert failed(checks) == ["reload"] and checks["reload"].said == "config.json changed"


def test_a_full_disk_is_said_before_anything_is_written(trained, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 0))
    checks = found(trained)
    assert failed(checks) == ["reload", "adapters"] and "0.0 GB free" in checks["reload"].said


def test_a_shard_needs_its_bytes_and_a_twentieth(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    for free, enough in ((105, True), (104, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(10**9, 10**9, free))
        with contextlib.nullcontext() if enough else pytest.raises(verify.Failed, match="--out names another folder"):
            with verify._folder(str(tmp_path), 100):
                pass


def test_bytes_are_those_of_each_dtype():
    assert verify._bytes([("a", torch.zeros(3)), ("b", torch.zeros(5, dtype=torch.bfloat16))]) == 22


def test_nothing_is_left_behind(trained, tmp_path):
    assert not failed(found(trained, out=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------- step
def test_a_step_without_a_gradient_fails(trained, monkeypatch):
    """Weights may move all the same, by decay or by an old moment."""
    step = trainer.optimizer_step
    monkeypatch.setattr(trainer, "optimizer_step", lambda *words: 0 * step(*words))
    checks = found(trained)
    assert failed(checks) == ["step"] and checks["step"].said.startswith("gradient norm 0; 0 adapters did not move")


def test_a_step_that_moves_nothing_fails(trained, monkeypatch):
    monkeypatch.setattr(trainer, "optimizer_step", lambda *_: 1.0)
    checks = found(trained)
    assert failed(checks) == ["step"] and "28 adapters did not move" in checks["step"].said


def test_a_step_in_which_one_layer_gets_no_gradient_fails(trained, monkeypatch):
    step = trainer.optimizer_step

    def forgetful(model, *words):
        dict(model.named_parameters())["model.model.layers.1.mlp.up_proj.lora_B.default.weight"].grad = None
        return step(model, *words)

    monkeypatch.setattr(trainer, "optimizer_step", forgetful)
    checks = found(trained)
    assert (
        failed(checks) == ["step"] and "1 adapters did not move: model.model.layers.1.mlp.up_proj.lora_B" in checks["step"].said
    )


@pytest.mark.parametrize("answer", ["20", "21"])
def test_the_first_network_is_gone_before_the_second_comes(answer, trained, monkeypatch):
    """No machine has to hold two, and a GPU's counter would count both; a check that failed must not keep one alive."""
    load, seen, alive = checkpoints.load, [], []

    def watched(*words, **more):
        alive.append([network() is not None for network in seen])
        model, tok = load(*words, **more)
        seen.append(weakref.ref(model.model.lm_head.weight))
        return model, tok

    monkeypatch.setattr(checkpoints, "load", watched)
    assert failed(found(trained, prompt="5,5,2>20:", answer=answer)) == ([] if answer == "20" else ["answer"])
    assert alive == [[], [False], *2 * [[False, False]]], "for load, for step, and for the adapters, which load their base"


def test_memory_that_runs_out_is_a_failed_check(trained, monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1.90 GiB.")

    monkeypatch.setattr(trainer.distributed, "generate", out_of_memory)
    checks = found(trained)
    assert failed(checks) == ["step"] and checks["step"].said == "CUDA out of memory. Tried to allocate 1.90 GiB."
    assert all(checks[name].said == "there was no step" and checks[name].status == "n/a" for name in ("memory", "adapters"))


def test_a_mistake_of_the_program_is_raised(trained, monkeypatch):
    monkeypatch.setattr(denoiser, "probe_loss", lambda *_: [].pop())
    with pytest.raises(IndexError):
        found(trained)


@pytest.mark.parametrize(
    ("share", "extra", "status"), [(1.1, 9e7, "ok"), (0.9, -9e7, "ok"), (1.2, 1e8, "FAILED"), (0.8, -1e8, "FAILED")]
)
def test_memory_is_compared_with_the_prediction(share, extra, status, trained, monkeypatch):
    """A GPU's counter, made up; 15 % of the prediction and what libraries take are allowed."""
    settings = _settings_of_the_step(trained)
    predicted = memory.peak(memory.predicted_memory(settings))
    monkeypatch.setattr(memory, "measured", lambda _: share * predicted + extra)
    check = verify._checked("memory", lambda: verify._memory(settings, {"learner": None}))
    assert check.status == status
    assert f"predicted {predicted / 1e9:.3f} GB at its peak, measured {(share * predicted + extra) / 1e9:.3f} GB" in check.said


def _settings_of_the_step(folder: Path):
    model, tok = checkpoints.load(folder)
    plain = verify._settings(str(folder), "cpu", "stored")
    return verify._fitted(plain, model, tok, PUZZLE)


def test_the_step_has_room_for_its_prompts(random):
    """The width of a chat is that of the checkpoint's own tokens, and every puzzle of the task fits."""
    model, tok = checkpoints.load(random)
    settings = verify._fitted(verify._settings(str(random), "cpu", "stored"), model, tok, verify.QUESTIONS["chat"])
    puzzles = settings.task.held_out(200)
    ids, _ = texts.encode_prompts(tok, puzzles, settings.task.prompt_length, prompt_format="chat")
    assert settings.task.prompt_length - 16 <= ids.shape[1] <= settings.task.prompt_length


# --------------------------------------------------------------------------------------------------------------- format
def test_lladas_format_is_the_same_network(trained):
    ours, _ = checkpoints.load(BASE)
    theirs, tok = checkpoints.load(trained)
    assert theirs.family is checkpoints.FAMILIES["llada"] and verify.marks(ours) == verify.marks(theirs)
    ids = torch.randint(3, 23, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs.head(theirs.encode(ids, None)), ours.head(ours.encode(ids, None)), rtol=0, atol=0)
    assert (tok.mask_token_id, tok.eos_token_id, tok.pad_token_id) == (1, 2, 0)
    golden, made = (json.loads((folder / "config.json").read_text()) for folder in (test_loading.GOLDEN, trained))
    assert made.keys() <= golden.keys() | {"torch_dtype"}, "no key that the published config lacks"
    assert load_file(trained / "model.safetensors").keys() >= {
        "model.transformer.wte.weight",
        "model.transformer.ff_out.weight",
    }


def test_fewer_key_heads_are_written_as_such(tmp_path):
    made = denoiser.build(tiny.SIZES, tokenizer(), 0)
    shape = type(made.model.config)(**{**made.model.config.to_dict(), "num_key_value_heads": 1})
    shape._attn_implementation = "sdpa"
    checkpoints.save_as_llada(denoiser.Denoiser(type(made.model)(shape)), tokenizer(), tmp_path)
    assert checkpoints.load(tmp_path)[0].model.config.num_key_value_heads == 1


def test_the_sampler_of_the_step_is_that_of_the_recipe(trained):
    """And its method, rate, groups and recomputed layers; smaller in what makes a step long."""
    settings, recipe = _settings_of_the_step(trained), yaml.safe_load(RECIPE.read_text())
    assert (
        (settings.method, settings.gradient_checkpointing)
        == (recipe["method"], recipe["gradient_checkpointing"])
        == ("gdpo", True)
    )
    assert settings.optimizer.learning_rate == recipe["optimizer"]["learning_rate"]
    assert settings.num_prompts == recipe["num_prompts"] and settings.num_generations < recipe["num_generations"]
    assert settings.lora.alpha / settings.lora.rank == 2 and settings.num_iterations == 2, "the first update moves no A"
    s = settings.sampler
    assert isinstance(s, sampler.Sampler) and (s.order, s.temperature, s.length) == ("low_confidence", 0.9, 12)
