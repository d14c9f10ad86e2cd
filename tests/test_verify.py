"""The verb verify: passes for trained weights in LLaDA's format, and each of its checks fails for what it is there for."""

import json
import re
import shutil
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import test_chat
import test_loading
from minidrl import loop
from minidrl.run import checkpoints, verify
from minidrl.run.cli import main

BASE = Path(__file__).parents[1] / "tiny_configs/bases/countdown_base"
NAMES = ["load", "loss", "answer", "reload", "step"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The shipped base, which has learnt to calculate, as a LLaDA checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    checkpoints.save_as_llada(*checkpoints.load(BASE), folder)
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


def test_trained_weights_in_lladas_format_pass(trained, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    status, lines, error = run(capfd, trained, "--device", "cpu")
    assert (status, error) == (0, "") and list(tmp_path.iterdir()) == []
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in NAMES]
    says = dict(zip(NAMES, lines, strict=True))
    assert "447,648 weights, float32" in says["load"] and "ln V is 3.14" in says["loss"]
    assert "'7,9,4>64:' -> '7+9=16*4=64'" in says["answer"] and "39 tensors" in says["reload"]
    assert "28 adapters moved" in says["step"] and "predicted 0.0" in says["step"]


def test_random_weights_fail_where_they_must_and_only_there(tmp_path, capfd):
    """LLaDA's format with a chat template, and weights that have learnt nothing."""
    test_loading.llada(tmp_path)
    test_chat.letters(tmp_path)
    test_chat.with_positions(tmp_path)
    status, lines, error = run(capfd, tmp_path, "--device", "cpu")
    assert status == 1 and error == "minidrl: verify: 2 of 5 checks failed: loss, answer\n"
    assert [line.split()[0] for line in lines] == ["ok", "FAILED", "FAILED", "ok", "ok"]
    assert "allowed below 2.65, half of ln V" in lines[1] and "'What is 2+2?' -> '" in lines[2]


def test_weights_that_do_not_load_are_a_failed_check_and_the_last(trained, tmp_path, capfd):
    shutil.copytree(trained, tmp_path / "broken")
    weights = load_file(trained / "model.safetensors")
    del weights["model.transformer.blocks.2.ff_proj.weight"]
    save_file(weights, tmp_path / "broken/model.safetensors", metadata={"format": "pt"})
    status, lines, error = run(capfd, tmp_path / "broken")
    assert (status, len(lines)) == (1, 1) and error == "minidrl: verify: 1 of 1 checks failed: load\n"
    assert lines[0].startswith("FAILED  load") and "blocks.2.ff_proj.weight" in lines[0]
    assert run(capfd, tmp_path, "--device", "cpu")[2].count("which holds no config.json") == 1


@pytest.mark.parametrize("family", ["sdar", "Dream", "modernbert"])
def test_chats_of_other_families_fail_only_for_what_they_answer(family, tmp_path):
    test_loading.MAKERS[family](tmp_path)
    test_chat.with_positions(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    chat = "{% for m in messages %}<|im_start|>{{ m['role'] + ' ' + m['content'] }}<|im_end|>{% endfor %}<|im_start|>assistant "
    test_loading.write(path, json.loads(path.read_text()) | {"chat_template": chat})
    assert failed(found(tmp_path, dtype="bfloat16")) == ["loss", "answer"]


@pytest.mark.parametrize(
    "change, said", [("a bit", "1 came back different, 0 not at all"), ("the head", "0 .*, 1 not at all: lm_head")]
)
def test_what_a_save_changes_is_found(change, said, trained, monkeypatch):
    save = checkpoints.save

    def careless(model, tok, folder):
        save(model, tok, folder)
        (path,) = Path(folder).glob("*.safetensors")
        weights = load_file(path)
        if change == "a bit":
            weights[max(weights)].view(torch.int32).flatten()[-1:].bitwise_xor_(1)
        else:
            del weights["model.transformer.ff_out.weight"]
        save_file(weights, path, metadata={"format": "pt"})

    monkeypatch.setattr(checkpoints, "save", careless)
    checks = found(trained)
    assert failed(checks) == ["reload"] and re.search(said, checks["reload"].said)


def test_a_step_that_moves_nothing_fails(trained, monkeypatch):
    monkeypatch.setattr(loop, "optimizer_step", lambda *_: 1.0)
    checks = found(trained)
    assert failed(checks) == ["step"] and "28 adapters did not move" in checks["step"].said


def test_there_is_never_more_than_one_network(trained, monkeypatch):
    """A GPU may not hold two."""
    load, seen, alive = checkpoints.load, [], []

    def watched(*words, **more):
        alive.append(sum(w is not None and not w.is_meta for w in (known() for known in seen)))
        model, tok = load(*words, **more)
        seen.append(weakref.ref(model.model.lm_head.weight))
        return model, tok

    monkeypatch.setattr(checkpoints, "load", watched)
    assert not failed(found(trained)) and alive == [0, 0]
