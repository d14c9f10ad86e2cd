"""Published checkpoints: LLaDA against numbers of its released code; the others against transformers' own classes.

``golden/llada_tiny`` is a two-layer LLaDA in the published format and what the released code computes from it; its README
says how it was made. The other checkpoints are made here, with random weights under the published keys.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    ModernBertForMaskedLM,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3ForCausalLM,
)

import tiny
from minidrl import denoiser, sampler
from minidrl.run import checkpoints
from minidrl.tasks import text

HERE = Path(__file__).parent
GOLDEN = HERE / "golden/llada_tiny"
THINKING = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}ab{% endif %}"  # Qwen3's rule
POISON = "raise RuntimeError('code of a checkpoint was run')\n"
TEMPLATE = "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + ' ' + m['content'] + '<|eot_id|>' }}{% endfor %}"
INPUTS = {name: torch.from_numpy(value) for name, value in np.load(GOLDEN / "inputs.npz").items()}
EXPECTED = {name: torch.from_numpy(value) for name, value in np.load(GOLDEN / "expected.npz").items()}


# --------------------------------------------------------------------------------------------------------- checkpoints
def llada_tokenizer(folder: Path, **changes) -> None:
    """As LLaDA publishes it: a tokenizer.json of which no token is marked as the mask, and a template."""
    named = {193: "<|start_header_id|>", 195: "<|eot_id|>", 196: "<|startoftext|>", 197: "<|endoftext|>", 198: "<|mdm_mask|>"}
    words = Tokenizer(models.WordLevel({named.get(i, f"w{i}"): i for i in range(199)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(named.values()))
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "trust_remote_code": True, "chat_template": TEMPLATE}
    config |= {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    write(folder / "tokenizer_config.json", config | changes)


def qwen_tokenizer(folder: Path, mask: str, **config) -> int:
    """As Dream and SDAR publish it: vocab.json, merges.txt and added tokens; returns the id of the mask."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    write(folder / "vocab.json", {token: i for i, token in enumerate([*letters, "ab", "abc"])})
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    added = {len(letters) + 2 + i: token for i, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", mask])}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    decoder = {str(i): {"content": token, **flags} for i, token in added.items()}
    config = {"added_tokens_decoder": decoder, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", **config}
    write(folder / "tokenizer_config.json", config)
    return max(added)


def write(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2))


def randomise(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights large enough that attention is peaked and no norm is 1: mistakes show as differences of order 1."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=noise) * (0.3 if p.ndim == 1 else 2 / p.shape[-1] ** 0.5))
            if "norm" in name:
                p += 1
    return {name: value.clone() for name, value in model.state_dict().items()}


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 48, "vocab_size": 272, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
PUBLISHED = {"rope_theta": 1e6, "rope_scaling": None, "attention_dropout": 0.0, "use_cache": False}
PUBLISHED |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1, "torch_dtype": "bfloat16"}
PUBLISHED |= {"tie_word_embeddings": False}


def llada(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    llada_tokenizer(folder)
    write(folder / "generation_config.json", {"bos_token_id": 196, "eos_token_id": 197})
    for name in ("configuration_llada.py", "modeling_llada.py"):
        (folder / name).write_text(POISON)


CLASSES = {"Dream": Qwen2ForCausalLM, "sdar": Qwen3ForCausalLM, "modernbert": ModernBertForMaskedLM}
CLASSES |= {"a2d-llama": LlamaForCausalLM, "a2d-qwen2": Qwen2ForCausalLM, "a2d-qwen3": Qwen3ForCausalLM}


def published(folder: Path, config: dict) -> None:
    """config.json, code that must not run, and random weights; a tied head is not written."""
    write(folder / "config.json", config)
    (folder / f"modeling_{config['model_type']}.py").write_text(POISON)
    model = reference_class(config)
    weights = randomise(model, 1)
    if config["tie_word_embeddings"]:
        for name in model._tied_weights_keys:
            del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def dream(folder: Path) -> None:
    auto = {"AutoConfig": "modeling_Dream.DreamConfig", "AutoModel": "modeling_Dream.DreamModel"}
    tokenizer = {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": ["modeling_Dream.DreamTokenizer", None]}}
    mask = qwen_tokenizer(folder, "<|mask|>", mask_token="<|mask|>", **tokenizer)
    config = {"model_type": "Dream", "architectures": ["DreamModel"], "auto_map": auto, "mask_token_id": mask, **SHAPE}
    published(folder, {**config, **PUBLISHED, "pad_token_id": 258, "eos_token_id": 258, "bos_token_id": 258})


def sdar(folder: Path, **changes) -> None:
    """Without a mask id in any file, as it happens: only the name of the token says which one it is."""
    qwen_tokenizer(folder, "<|MASK|>", tokenizer_class="Qwen2Tokenizer", pad_token=None)
    config = {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4, **SHAPE, **PUBLISHED, "head_dim": 12}
    config |= {"attention_bias": False, "eos_token_id": 258, "pad_token_id": 258, **changes}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"}, "fuse_cross_entropy": True}
    published(folder, config)


def a2d(folder: Path, base: str = "qwen3", **changes) -> None:
    """As convert.py of ZHZisZZ/dllm and its trainer save it: tied weights, the mask named by the tokenizer only, ends apart."""
    named = {"mask_token": "<|mask|>", "eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"}
    qwen_tokenizer(folder, "<|mask|>", chat_template=THINKING, **named)
    if base == "llama":  # whose tokenizer is one file
        Qwen2Tokenizer.from_pretrained(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))
        for name in ("vocab.json", "merges.txt"):
            (folder / name).unlink()
    config = {"model_type": f"a2d-{base}", "architectures": [f"A2D{base.title()}LMHeadModel"], **SHAPE, **PUBLISHED}
    config |= {**A2D_WORDS[base], "eos_token_id": 260, "tie_word_embeddings": True, **changes}
    published(folder, {key: value for key, value in config.items() if value is not None})


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
A2D_WORDS = {
    "qwen3": {"head_dim": 12, "attention_bias": False},
    "llama": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}, "mlp_bias": False},
    # As transformers 5 writes it, and no architectures, as convert.py may leave it.
    "qwen2": {"rope_theta": None, "architectures": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def modernbert(folder: Path) -> None:
    """The keys of answerdotai/ModernBERT-base; four layers, of which the second and third see four tokens to either side."""
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *named.values()]
    bytes_ = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [], unk_token="[UNK]"))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytes_.add_special_tokens(list(named.values()))
    bytes_.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    config = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "hidden_activation": "gelu", **SHAPE}
    config |= {"num_hidden_layers": 4, "global_attn_every_n_layers": 3, "local_attention": 8, "tie_word_embeddings": True}
    config |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "norm_eps": 1e-5, "layer_norm_eps": 1e-5}
    config |= {"decoder_bias": True, "gradient_checkpointing": False, "position_embedding_type": "absolute"}
    config |= {"bos_token_id": 257, "cls_token_id": 257, "eos_token_id": 258, "sep_token_id": 258, "pad_token_id": 259}
    published(folder, config | {"torch_dtype": "float32"})


def reference_class(config: dict) -> torch.nn.Module:
    """The class of transformers that the family is made of, with eager attention; its masks are given in full."""
    kind = CLASSES[config["model_type"]]
    words = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "auto_map")}
    model = kind(kind.config_class.from_dict(words | {"pad_token_id": None}))
    model.set_attn_implementation("eager")
    return model.eval()


def reference(folder: Path) -> torch.nn.Module:
    model = reference_class(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    tied = {head: weights[embedding] for head, embedding in model._tied_weights_keys.items() if head not in weights}
    model.load_state_dict(weights | tied)
    return model


MAKERS = {"llama": tiny.checkpoint, "llada": llada, "Dream": dream, "sdar": sdar, "modernbert": modernbert}
A2D = {f"a2d-{base}": partial(a2d, base=base) for base in ("llama", "qwen2", "qwen3")}
MAKERS |= A2D


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MAKERS}
    for name, folder in made.items():
        MAKERS[name](folder)
    return made


@pytest.fixture
def folder(folders, tmp_path) -> Callable[[str], Path]:
    """A copy of a checkpoint that a test may damage."""
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


each_family = pytest.mark.parametrize("family", MAKERS)


def others(model: denoiser.Denoiser) -> Tensor:
    """Every token but [MASK], whose logit is minus infinity here and a number in the released code."""
    return torch.arange(model.vocab_size) != model.mask_token_id


def close(got: Tensor, want: Tensor, atol: float = 3e-5) -> None:
    # Two implementations in float32, which sum in an order that depends on the processor: 1.4e-5 was met.
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


# --------------------------------------------------------------------------------------------------- LLaDA, golden data
@pytest.fixture(scope="module")
def golden(folders) -> denoiser.Denoiser:
    return checkpoints.load(folders["llada"])[0]


@pytest.mark.parametrize("case", ["full", "left", "right"])
def test_llada_logits_equal_the_released_codes(golden, case):
    """At the real positions: what the released code computes at padding is no one's business."""
    ids = INPUTS["ids" if case == "full" else f"ids_{case}"]
    mask = None if case == "full" else INPUTS[f"attention_mask_{case}"].bool()
    h, real = golden.encode(ids, mask), torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    close(golden.model.lm_head(h)[real], EXPECTED[f"logits_{case}"][real])
    logits = golden.head(h)[real]
    close(logits[:, others(golden)], EXPECTED[f"logits_{case}"][real][:, others(golden)])
    assert (logits[:, ~others(golden)] == -torch.inf).all()


@pytest.mark.parametrize("case", ["staircase", "staircase_left"])
def test_llada_honours_a_mask_of_its_own_for_every_query(golden, case):
    """The body under a boolean 4-D mask, which is how a staircase of blocks or a packed batch reaches it."""
    visible = INPUTS["staircase"].bool()[None, None]
    ids, real = INPUTS["ids"], torch.ones_like(INPUTS["ids"], dtype=torch.bool)
    if case == "staircase_left":
        ids, real = INPUTS["ids_left"], INPUTS["attention_mask_left"].bool()
        visible = visible & real[:, None, None, :]
    logits = golden.model(input_ids=ids, attention_mask=visible.expand(len(ids), 1, -1, -1), use_cache=False).logits
    close(logits[real], EXPECTED[f"logits_{case}"][real])


def test_llada_gradients_equal_the_released_codes(folders):
    """Under the released code's distribution, in which [MASK] keeps a share of the probability."""
    model, hidden = checkpoints.load(folders["llada"])[0], INPUTS["ids"] == 198
    logits = model.model.lm_head(model.encode(INPUTS["ids"], None))
    logp = logits.log_softmax(-1).gather(-1, INPUTS["targets"][..., None])[..., 0].masked_fill(~hidden, 0)
    close(logp, EXPECTED["logp_target"])
    loss = -logp[hidden].mean()
    close(loss, EXPECTED["ce_masked"].reshape(()))
    loss.backward()
    names = checkpoints.FAMILIES["llada"]
    norms = {checkpoints.stored_name(name, names): p.grad.norm() for name, p in model.model.named_parameters()}
    want = {name.removeprefix("grad_norm/"): value for name, value in EXPECTED.items() if name.startswith("grad_norm/")}
    assert norms.keys() == want.keys() and len(want) == 21
    for name in want:
        torch.testing.assert_close(norms[name], want[name].reshape(()), rtol=1e-5, atol=1e-6, msg=name)


CASES = {"a": ("gen_prompt", 1, 8), "b": ("gen_prompt", 2, 16), "c": ("gen_prompt_left", 2, 8)}


@pytest.mark.parametrize("case", CASES)
def test_llada_greedy_trajectories_equal_the_released_codes(golden, case):
    """Every state of its generate.py, low-confidence remasking at temperature 0, from all masked to the text."""
    name, tokens_per_step, block_length = CASES[case]
    words = {"temperature": 0.0, "length": 16, "block_length": block_length, "tokens_per_step": tokens_per_step}
    prompt, mask = INPUTS[name], torch.ones_like(INPUTS[name], dtype=torch.bool)
    mask = INPUTS["gen_prompt_left_mask"].bool() if case == "c" else mask
    settings = sampler.Sampler(order="low_confidence", **words)
    made = sampler.generate(golden, prompt, mask, settings, eos_token_id=None, generator=None)
    states = torch.stack([sampler.state_before(made, step, 198) for step in range(made.sampler.num_steps + 1)])
    assert torch.equal(states, EXPECTED[f"gen_{case}_trajectory"].long())


def test_llada_in_bfloat16_is_as_near_as_bfloat16_is(folders):
    """0.15 is the golden data's bound: the released code's own bfloat16 is 0.073 away from its float32."""
    model, _ = checkpoints.load(folders["llada"], dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    logits = model.head(model.encode(INPUTS["ids"], None))
    assert logits.dtype == torch.float32
    close(logits[..., others(model)], EXPECTED["logits_full_bf16"][..., others(model)], atol=0.15)


# --------------------------------------------------------------------------------------------------------- Dream, SDAR
def batch(model: denoiser.Denoiser) -> tuple[Tensor, Tensor]:
    """Three rows of 14 tokens, padded on the left by 0, 5 and 3."""
    tokens = torch.randint(0, 250, (3, 14), generator=torch.Generator().manual_seed(4)) % model.vocab_size
    tokens[:, 8::2] = model.mask_token_id
    return tokens, torch.arange(14) >= torch.tensor([[0], [5], [3]])


def additive(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)


def test_dream_predicts_token_i_from_position_i(folders):
    """Released code: full attention, then logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)."""
    model, _ = checkpoints.load(folders["Dream"])
    tokens, mask = batch(model)
    raw = reference(folders["Dream"])(input_ids=tokens, attention_mask=additive(torch.ones(3, 1, 14, 14) > 0)).logits
    logits = model.head(model.encode(tokens, None))
    close(logits[..., others(model)], torch.cat([raw[:, :1], raw[:, :-1]], 1)[..., others(model)])
    assert (logits[:, 1:] - raw[:, 1:])[..., others(model)].abs().max() > 1, "the shift is visible"

    visible = (mask[:, None, None, :] & mask[:, None, :, None]) | torch.eye(14, dtype=torch.bool)
    position = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 1)
    raw = reference(folders["Dream"])(input_ids=tokens, attention_mask=additive(visible), position_ids=position).logits
    after_first = mask & (mask.long().cumsum(-1) > 1)
    want = torch.cat([raw[:, :1], raw[:, :-1]], 1)[after_first]
    close(model.head(model.encode(tokens, mask))[after_first][:, others(model)], want[:, others(model)])


@pytest.mark.parametrize("family, size", [*(("sdar", size) for size in (1, 3, 4, 14)), *((family, 4) for family in A2D)])
def test_a_block_sees_itself_and_the_earlier_ones(family, size, tmp_path):
    """SDAR's code: the mask of whole blocks, counted from the first token. A text that is not gets padding in front of it, as
    in dllm's sampler for bd3lm."""
    MAKERS[family](tmp_path, block_size=size)
    model, _ = checkpoints.load(tmp_path)
    tokens, mask = batch(model)
    for row, start in enumerate((~mask).sum(1).tolist()):
        text = tokens[row : row + 1, start:]
        raw = released_sdar(tmp_path, text, size)
        for got in (model.encode(tokens, mask)[row, start:], model.encode(text, None)[0]):
            close(model.head(got)[..., others(model)], raw[..., others(model)])


def released_sdar(folder: Path, text: Tensor, size: int) -> Tensor:
    """Logits (T, V) of one text by transformers' class: filled up to whole blocks on the left, where no one looks."""
    missing, length = -text.shape[1] % size, text.shape[1] + -text.shape[1] % size
    sees = [[k // size <= q // size and (k >= missing or k == q) for k in range(length)] for q in range(length)]
    filled = F.pad(text, (missing, 0), value=7)
    with torch.no_grad():
        return reference(folder)(input_ids=filled, attention_mask=additive(torch.tensor(sees))[None, None]).logits[0, missing:]


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_sdar_writes_after_prompts_of_any_length(folders, cache):
    """A token's recorded probability is that of a forward without cache or batch, of the prompt and the blocks so far."""
    model, _ = checkpoints.load(folders["sdar"])
    prompt = batch(model)[0][:, :7]
    mask = torch.arange(7) >= torch.tensor([[0], [3], [5]])
    words = {"order": "low_confidence", "temperature": 0.7, "length": 8, "block_length": 4, "tokens_per_step": 2}
    settings = sampler.Sampler(**words, attention="block_causal", cache=cache)
    noise = torch.Generator().manual_seed(3)
    out = sampler.generate(model, prompt, mask, settings, eos_token_id=None, num_generations=2, generator=noise)
    for step in range(settings.num_steps):
        state = sampler.state_before(out, step, model.mask_token_id)
        for row, now in enumerate(out.unmask_step == step):
            text = state[row : row + 1, : 7 + (step // 2 + 1) * 4][:, (~out.prompt_mask[row]).sum() :]
            logits = released_sdar(folders["sdar"], text, 4)[-4:].masked_fill(~others(model), -torch.inf)
            logp = (logits / 0.7).log_softmax(-1)
            place = now.nonzero()[:, 0]
            close(out.logp[row, place], logp[place % 4, out.response[row, place]], atol=1e-4)
    assert (out.unmask_step >= 0).all() and out.logp.min() < -1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", [*A2D, "modernbert"])
def test_a2d_and_encoders_see_everything_but_padding(folders, family, padded):
    """Released code: a mask of padding only, no shift. There positions count padding, too, which turns no distance."""
    model, _ = checkpoints.load(folders[family])
    tokens, mask = batch(model)
    real = mask if padded else torch.ones_like(mask)
    sees = real.long() if family == "modernbert" else additive(real[:, None, None, :].expand(-1, 1, 14, -1))
    raw = reference(folders[family])(input_ids=tokens, attention_mask=sees).logits
    logits = model.head(model.encode(tokens, mask if padded else None))
    close(logits[real][:, others(model)], raw[real][:, others(model)], atol=1e-4)
    assert (logits[..., model.mask_token_id] == -torch.inf).all()


def test_a2d_opens_its_chats_without_thinking(folders):
    """The template is told enable_thinking false, as in the released code; other families' are told nothing."""
    _, tokenizer = checkpoints.load(folders["a2d-qwen3"])
    assert text.chats(tokenizer, ["abc"]) == ["abcab"]
    _, other = checkpoints.load(folders["sdar"])
    other.chat_template = tokenizer.chat_template
    assert text.chats(other, ["abc"]) == ["abc"]


# -------------------------------------------------------------------------------------------------------- every family
@each_family
def test_padding_on_either_side_changes_nothing(folders, family):
    model, _ = checkpoints.load(folders[family], dtype=torch.float64)
    tokens, _ = batch(model)
    alone = model.head(model.encode(tokens[:, 5:], None))
    for left, right in ((5, 0), (3, 2), (0, 5)):
        padded = F.pad(tokens[:, 5:], (left, right), value=7)
        mask = F.pad(torch.ones_like(tokens[:, 5:], dtype=torch.bool), (left, right))
        got = model.head(model.encode(padded, mask))[:, left : left + 9]
        torch.testing.assert_close(got, alone, atol=1e-4, rtol=0)  # the norms compute in float32


@each_family
def test_ids_and_template_are_the_files(folders, family):
    model, tokenizer = checkpoints.load(folders[family])
    ids = {
        "llada": (198, 197, 197),
        "Dream": (261, 258, 258),
        "sdar": (261, 258, 258),
        "modernbert": (260, 258, 259),
        "llama": (1, 2, 0),
    }
    ids = ids.get(family, (261, 260, 258))
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == ids
    assert model.mask_token_id == ids[0] and tokenizer.padding_side == "left" and not model.training
    text = {"llada": "w5 w7 <|mdm_mask|>", "modernbert": "ab[MASK]", "llama": "0+[MASK]", "sdar": "abcab<|MASK|>"}.get(
        family, "abcab<|mask|>"
    )
    found = {"llada": [5, 7, 198], "modernbert": [64, 65, 260], "llama": [3, 13, 1]}.get(family, [257, 256, 261])
    assert tokenizer(text).input_ids == found
    if family == "llada":
        chat = tokenizer.apply_chat_template([{"role": "w1", "content": "w2"}], return_dict=False)
        assert chat == [193, 1, 2, 195]


@each_family
def test_a_network_goes_back_in_the_format_it_came_in(folders, family, tmp_path):
    """Raw tensors, file by file; config.json and the tokenizer byte for byte; and no code beside them."""
    source, again = folders[family], tmp_path / "again"
    model, tokenizer = checkpoints.load(source)
    checkpoints.save(model, tokenizer, again)
    before, after = (load_file(path / "model.safetensors") for path in (source, again))
    assert before.keys() == after.keys() and len(before) >= 20
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    files = {path.name for path in source.iterdir() if path.suffix != ".py"}
    assert files == {path.name for path in again.iterdir()}
    same = files - {"model.safetensors"} if family != "llama" else {"tokenizer.json"}
    assert all((source / name).read_bytes() == (again / name).read_bytes() for name in same)
    first, second = tiny.weights(model), tiny.weights(checkpoints.load(again)[0])
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


HEADS = {"llada": "model.transformer.ff_out.weight", "modernbert": "decoder.weight"}
EMBEDDINGS = {"llada": "model.transformer.wte.weight", "modernbert": "model.embeddings.tok_embeddings.weight"}


@each_family
def test_a_head_stays_what_the_file_holds_whatever_the_config_calls_it(family, folders, tmp_path):
    """Two weights where config.json says one."""
    path = Path(shutil.copytree(folders[family], tmp_path / "made"))
    head, embedding = HEADS.get(family, "lm_head.weight"), EMBEDDINGS.get(family, "model.embed_tokens.weight")
    stored = load_file(path / "model.safetensors")
    stored[head] = stored[embedding].flip(0).contiguous()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config(**{"weight_tying" if family == "llada" else "tie_word_embeddings": True})(path)
    model, tok = checkpoints.load(path)
    checkpoints.save(model, tok, tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again/model.safetensors")[head], stored[head])
    first, second = tiny.weights(model), tiny.weights(checkpoints.load(tmp_path / "again")[0])
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("fast, asked", [(True, None), (False, None), (False, "bfloat16"), (True, "float32")])
def test_the_stored_dtype_if_the_cpu_has_it_unless_another_is_asked(fast, asked, folder, monkeypatch, caplog):
    path, dtype = folder("llada"), getattr(torch, asked or ("bfloat16" if fast else "float32"))
    weights(lambda w: w.update({name: value.bfloat16() for name, value in w.items()}))(path)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model, tokenizer = checkpoints.load(path, dtype=asked and getattr(torch, asked))
    assert {p.dtype for p in model.parameters()} == {dtype}
    slow = [f"{path}: computed in float32, as this CPU has no bfloat16 of its own"]
    assert [record.message for record in caplog.records] == (slow if not fast and not asked else [])
    checkpoints.save(model, tokenizer, path / "again")
    assert {value.dtype for value in load_file(path / "again/model.safetensors").values()} == {dtype}


def shard(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    save_torch_state_dict(weights, path, max_shard_size="50KB")


@each_family
def test_shards_are_read_through_their_index(folder, folders, family):
    shard(path := folder(family))
    assert len(list(path.glob("*.safetensors"))) >= 2 and (path / checkpoints.INDEX).is_file()
    whole, parts = (tiny.weights(checkpoints.load(place)[0]) for place in (folders[family], path))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


# ------------------------------------------------------------------------------------------------------------ refusals
def config(**changes) -> Callable[[Path], None]:
    """Edits config.json; a value None removes the key."""

    def edit(path: Path) -> None:
        values = json.loads((path / "config.json").read_text()) | changes
        write(path / "config.json", {key: value for key, value in values.items() if value is not None})

    return edit


def weights(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return edit


def lose_a_shard(path: Path) -> None:
    shard(path)
    sorted(path.glob("*.safetensors"))[1].unlink()


def truncate(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])


Q = "model.transformer.blocks.1.q_proj.weight"
BROKEN = {
    "a weight is missing": ("llada", weights(lambda w: w.pop(Q)), rf"missing_keys.*\['{Q}'\]"),
    "half a file": ("llama", truncate, "cannot be read.*not fully covered"),
    "no JSON": ("llama", lambda path: (path / "config.json").write_text("{"), "config.json holds no JSON object"),
    "causal": ("llama", config(is_causal=True), "with is_causal True; allowed for llama is False"),
    "a shard is missing": ("llada", lose_a_shard, r"cannot be read: .*model-00002-of-\d+\.safetensors"),
    "a mixture of experts": ("llada", config(architectures=["LLaDAMoEModelLM"]), r"allowed for llada is \['LLaDAM"),
    "a family nobody knows": (
        "llada",
        config(model_type="llada3"),
        "'llada3'; allowed llama, llada, Dream, sdar, a2d-llama, a2d-qwen2, a2d-qwen3, modernbert$",
    ),
    "a size is missing": ("llada", config(d_model=None), "cannot be read: config.json gives no d_model"),
    "a mask beyond the tokens": ("llada", config(mask_token_id=500), "mask_token_id 500; allowed the id of one of its.* 199"),
    "a vocabulary below the tokenizer": ("sdar", config(vocab_size=261, mask_token_id=5), "262 tokens in its tok.*of 261"),
    "two masks": ("Dream", config(mask_token_id=3), "mask_token_id 3; allowed 261, as its tokenizer says"),
    "no tokenizer": ("llada", lambda path: (path / "tokenizer.json").unlink(), "cannot be read.*tokenizer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_one_line_that_names_it(name, folder, capfd):
    family, damage, message = BROKEN[name]
    damage(path := folder(family))
    with pytest.raises(ValueError, match=f"^(model|block_length): got .*{path}.*{message}") as caught:
        checkpoints.load(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@each_family
def test_weights_that_a_library_leaves_at_random_are_found(folders, family, monkeypatch):
    """What several versions of transformers did: everything is reported as read, one tensor is not."""
    network = checkpoints.FAMILIES[family].network
    own = "model.layers.1.mlp." + ("Wo.weight" if family == "modernbert" else "down_proj.weight")
    read = network.from_pretrained

    def careless(*arguments, **words):
        model, info = read(*arguments, **words)
        torch.nn.init.normal_(model.get_parameter(own))
        return model, info

    monkeypatch.setattr(network, "from_pretrained", careless)
    name = checkpoints.stored_name(own, checkpoints.FAMILIES[family])
    with pytest.raises(ValueError, match=f"of which transformers did not read {name}$"):
        checkpoints.load(folders[family])


# ----------------------------------------------------------------------------------------------------------------- hub
def test_a_name_of_the_hub_brings_weights_and_files_but_no_code(folders, monkeypatch):
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folders["llada"])

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    model, _ = checkpoints.load("GSAI-ML/LLaDA-8B-Instruct")
    assert model.mask_token_id == 198
    [(name, patterns)] = asked
    assert name == "GSAI-ML/LLaDA-8B-Instruct"
    assert {"config.json", "tokenizer.json", "*.safetensors", checkpoints.INDEX} <= set(patterns)
    assert not [p for p in patterns if p.endswith((".py", ".bin", ".pt")) or p == "*"]


@pytest.mark.parametrize("source", ["runs/nothing", "nothing"])
def test_a_path_is_not_looked_for_on_the_hub(source, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints, "snapshot_download", lambda *_, **__: pytest.fail("a path was sent to the Hub"))
    with pytest.raises(ValueError, match="holds no config.json"):
        checkpoints.load(source)
