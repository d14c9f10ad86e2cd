"""Countdown in words: the prompt through a chat template, the answer between tags, and a whole run on a LLaDA checkpoint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

import test_loading
import tiny
from minidrl.run import checkpoints, config, memory
from minidrl.run.cli import main
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import Countdown, Puzzle
from minidrl.tasks.mathematics import Question

PUZZLE = Puzzle((5, 6, 8), 46)
TEMPLATE = (
    "<|startoftext|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}: {{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant: {% endif %}"
)


# ----------------------------------------------------------------------------------------------------------- the answer
ANSWERS = {  # response -> strict reward
    "5*8=40, and 40+6=46. <answer>5*8+6</answer>": 1.0,
    "<answer>(5 * 8) + 6</answer> That is it.": 1.0,
    "<answer>\n 5 * 8 = 40 + 6 = 46 \n</answer>": 1.0,
    "<answer>5*8-6</answer>": 0.1,
    "5*8+6": 0.0,
    "<answer>5*8+6": 1.0,
    "<answer>\\boxed{5 \\times 8 + 6}<|eot_id|>": 1.0,
    "5*8+6</answer>": 0.0,
    "</answer>5*8+6<answer>": 0.0,
    "<answer>5*8+6</answer><answer>5*8+6</answer>": 1.0,
    "<answer>5*8-6</answer> no: <answer>5*8+6</answer>": 0.0,
    "<answer><answer>5*8+6</answer></answer>": 1.0,
    "<answer>5*8+6</answer></answer>": 1.0,
    "</answer><answer>5*8+6": 1.0,
    "<Answer>5*8+6</Answer>": 0.0,
    "<answer>5*8+6=46</answer>": 1.0,
    "<answer>5*8+6=47</answer>": 0.0,
    "<answer>5*8+6</answer><|im_end|><answer>5*8-6</answer>": 1.0,
    "<answer>the answer is 5*8+6</answer>": 0.0,
    "<answer>5*8+6+0</answer>": 0.0,
    "<answer></answer>": 0.0,
    "": 0.0,
}


def test_the_answer_is_what_stands_between_the_tags():
    puzzle = Puzzle((5, 6, 8), 46)
    for response, expected in ANSWERS.items():
        assert Countdown(prompt_format="chat").score(puzzle, response) == expected, response
        assert Countdown().score(puzzle, response) == (1.0 if response == "5*8+6" else 0.0), response
    paid = {r: Countdown(prompt_format="chat", reward="any_answer").score(puzzle, r) for r in ANSWERS}
    unread = {"5*8+6", "5*8+6</answer>", "</answer>5*8+6<answer>", "<Answer>5*8+6</Answer>", "<answer></answer>", ""}
    unread |= {"<answer>5*8-6</answer> no: <answer>5*8+6</answer>", "<answer>5*8+6=47</answer>"}
    assert {r for r, value in paid.items() if value == 0} == unread
    blanks = Countdown(num_numbers=2, prompt_format="chat")
    assert blanks.score(Puzzle((44,), 44), "<answer>4 4</answer>") == 0
    assert blanks.score(Puzzle((4, 4), 44), "<answer>4 4</answer>") == 0
    assert blanks.score(Puzzle((1, 2), 12), "<answer>1\u00a02</answer>") == 0


# ----------------------------------------------------------------------------------------------------------- the prompt
def letters(folder: Path, template: str | None = TEMPLATE) -> None:
    """A tokenizer of single characters in LLaDA's files and with its special tokens, for the checkpoint of 199 tokens."""
    special = {193: "<|start_header_id|>", 195: "<|eot_id|>", 196: "<|startoftext|>", 197: "<|endoftext|>", 198: "<|mdm_mask|>"}
    words = {i: chr(32 + i) if i < 95 else f"w{i}" for i in range(199)} | {95: "\n"} | special
    vocab = {word: i for i, word in words.items()}
    raw = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    raw.add_special_tokens(list(special.values()))
    raw.post_processor = processors.TemplateProcessing(single=f"{special[196]} $A", special_tokens=[(special[196], 196)])
    raw.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[196], "eos_token": special[197]}
    named |= {"pad_token": special[197]} | ({"chat_template": template} if template else {})
    test_loading.write(folder / "tokenizer_config.json", named)


def with_positions(folder: Path, most: int = 512) -> None:
    """The 64 positions of a tiny checkpoint are too few for a chat and an answer."""
    config = json.loads((folder / "config.json").read_text())
    named = {"max_sequence_length", "max_position_embeddings"} & config.keys()
    (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(named, most)))


@pytest.fixture(scope="module")
def llada(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llada")
    test_loading.llada(folder)
    letters(folder)
    with_positions(folder)
    return folder


def test_a_prompt_is_a_turn_of_the_checkpoints_template(llada):
    _, tok = checkpoints.load(llada)
    puzzles = [PUZZLE, Puzzle((5, 6, 80), 46)]
    ids, mask = texts.encode_prompts(tok, puzzles, 400, prompt_format="chat")
    assert ids.shape[1] == int(mask[1].sum()), "as wide as the longest"
    assert mask.long().diff(dim=1).min() == 0 and not mask[0, 0], "padded on the left"
    for puzzle, row, real in zip(puzzles, ids, mask, strict=True):
        text = f"<|startoftext|><|start_header_id|>user: {puzzle.instruction}<|eot_id|><|start_header_id|>assistant: "
        assert tok.decode(row[real]) == text
    assert all(part in PUZZLE.instruction for part in ("5, 6, 8", "46", "<answer>", "</answer>"))


def test_the_beginning_of_an_answer_that_a_wording_gives_stands_after_the_template(llada):
    _, tok = checkpoints.load(llada)
    asked = [Question("", "", "", "1+1?", opening="<reasoning>"), Question("", "", "", "1+1?")]
    ids, mask = texts.encode_prompts(tok, asked, 400, prompt_format="chat")
    opened, plain = (tok.decode(row[real]) for row, real in zip(ids, mask, strict=True))
    assert opened == f"{plain}<reasoning>"
    assert texts.check_lengths(tok, asked, 400, "chat") == mask.sum(1).max()


def test_a_prompt_that_is_too_long_is_refused(llada):
    _, tok = checkpoints.load(llada)
    longest = len(tok(texts.chats(tok, [PUZZLE.instruction])[0], add_special_tokens=False).input_ids)
    assert texts.encode_prompts(tok, [PUZZLE], longest, prompt_format="chat")[0].shape == (1, longest)
    with pytest.raises(ValueError, match=f"task.max_prompt_length: got {longest - 1}; allowed from {longest}"):
        texts.encode_prompts(tok, [PUZZLE], longest - 1, prompt_format="chat")


def test_a_template_that_fails_or_is_missing_is_one_line(llada, tmp_path):
    shutil.copytree(llada, tmp_path, dirs_exist_ok=True)
    letters(tmp_path, template="{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="^chat_template: that of .* fails: no such role$"):
        texts.encode_prompts(checkpoints.load(tmp_path)[1], [PUZZLE], 400, prompt_format="chat")
    letters(tmp_path, template=None)
    with pytest.raises(ValueError, match="task.prompt_format: got 'chat'; allowed plain, .* no chat template"):
        texts.encode_prompts(checkpoints.load(tmp_path)[1], [PUZZLE], 400, prompt_format="chat")


# --------------------------------------------------------------------------------------------------------------- a run
RUN = {
    "dtype": "bfloat16",
    "lora": {"rank": 4, "alpha": 8},
    "gradient_checkpointing": True,
    "task": {"num_numbers": 2, "prompt_format": "chat", "max_prompt_length": 300},
    "sampler": {"order": "low_confidence", "temperature": 0.9, "length": 16, "block_length": 8, "tokens_per_step": 4},
    "method": "diffu-grpo-paper",
    "steps": 2,
    "num_prompts": 2,
    "num_generations": 3,
    "num_iterations": 2,
    "micro_batch": 3,
    "evaluate": {"n": 2},
}


def test_a_run_from_a_llada_checkpoint_to_an_evaluated_adapter(llada, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Countdown, "judge", tiny.varied_judge)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"model": str(llada)}))
    assert main(["memory", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("peak ")
    assert main(["train", str(path), "--out", str(tmp_path / "out")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] and all(np.isfinite(row.get("loss", 0)) for row in rows)
    assert rows[-2]["kl"] > 0, "the adapters have left the base"
    checkpoint = tmp_path / "out/checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    words = ["--config", str(path), "--n", "2", "--temperature", "0.9"]
    capsys.readouterr()
    assert main(["evaluate", str(checkpoint), *words]) == 0
    assert capsys.readouterr().out.endswith(" on 2 held-out problems\n")
    how = json.loads((checkpoint / "adapter_config.json").read_text())
    (checkpoint / "adapter_config.json").write_text(json.dumps(how | {"init_lora_weights": "pissa"}))
    assert main(["evaluate", str(checkpoint), *words]) == 2
    assert "adapters that began as 'pissa', which changed the base" in capsys.readouterr().err
    (checkpoint / "adapter_config.json").write_text("{}")
    assert main(["evaluate", str(checkpoint), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "adapters of type None for 'None'; allowed LORA" in error


CONFIGS = sorted((Path(__file__).parents[1] / "tiny_configs").glob("llada_8b*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_8b_config_is_the_published_recipe_and_fits_its_gpu(path):
    settings = config.load(config.Train, path)
    assert settings.model == "GSAI-ML/LLaDA-8B-Instruct"
    s = settings.sampler
    assert (s.length, s.num_steps, s.block_length, s.temperature, s.order) == (256, 128, 32, 0.9, "low_confidence")
    gigabytes, gpus = {"llada_8b_lora_24gb": (24, 1), "llada_8b_lora": (48, 1), "llada_8b_full": (80, 8)}[path.stem]
    room = 0.9 * gigabytes * 1e9  # a tenth for what is not predicted: context, workspaces, fragments
    assert 0.25 * room < memory.peak(memory.predicted_memory(settings, gpus)) < room
