"""Adapters: exact when off, the only thing that is trained, saved for peft; checkpointed layers; 4 bits; runs with them."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

import test_chat
import test_loading
import tiny
from minidrl import denoiser, loop
from minidrl.run import adapters, checkpoints, config, report, train
from minidrl.run.cli import main
from minidrl.tasks.countdown import Countdown, tokenizer

ALL = config.Lora().target_modules
NARROW = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
IDS = torch.randint(3, 20, (3, 9), generator=torch.Generator().manual_seed(4))


@pytest.fixture(autouse=True)
def varied_rewards(monkeypatch):
    monkeypatch.setattr(Countdown, "judge", tiny.varied_judge)
    monkeypatch.setattr(report, "write_curve", lambda out: None)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def llada(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llada")
    test_loading.llada(folder)
    test_chat.letters(folder)  # the words of its own tokenizer are no characters of a puzzle
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(raw | {"post_processor": None}))  # a puzzle has no token to begin with
    return folder


def adapted(dtype: torch.dtype = torch.float32, seed: int = 0, move: bool = True, **changes) -> denoiser.Denoiser:
    """A tiny network with adapters that are no longer 0."""
    model = tiny.network(dtype)
    adapters.add_adapters(model, **{**NARROW, **changes}, seed=seed, base="somewhere")
    return moved(model) if move else model


def moved(model: denoiser.Denoiser) -> denoiser.Denoiser:
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, p in denoiser.trained(model):
            p.copy_(0.3 * torch.randn(p.shape, generator=noise))
    return model


def logits(model: denoiser.Denoiser, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model.head(model.encode(ids, None))


def finite(model: denoiser.Denoiser, ids: torch.Tensor = IDS) -> torch.Tensor:
    z = logits(model, ids)
    return z.masked_fill(z == -torch.inf, 0)


# ----------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_adapters_change_nothing_and_are_float32(dtype):
    model = adapted(dtype, move=False)
    assert torch.equal(logits(model), logits(tiny.network(dtype)))
    assert {p.dtype for _, p in denoiser.trained(model)} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {dtype}


def test_adapters_depend_on_the_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = [p for _, p in denoiser.trained(adapted(seed=1, move=False))]
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    again, other = ([p for _, p in denoiser.trained(adapted(seed=seed, move=False))] for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_that_are_off_leave_exactly_the_base(dtype):
    model = adapted(dtype)
    reference, expected = denoiser.without_adapters(model), logits(tiny.network(dtype))
    assert torch.equal(logits(reference), expected)
    assert not torch.equal(logits(model), expected)  # on again after the call
    assert [name for name, _ in denoiser.trained(model)] == [name for name, _ in denoiser.trained(adapted(dtype))]


def gradients(model: denoiser.Denoiser, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and len(a) > 0
    assert all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize("targets", [["q_proj", "attn_out"], ["proj"]])
def test_a_target_that_matches_no_module_is_refused(targets):
    with pytest.raises(
        ValueError, match=f"lora.target_modules: got '{targets[-1]}', which matches no module; allowed q_proj,.*"
    ):
        adapted(target_modules=targets)


# -------------------------------------------------------------------------------------------------------- saving, peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_peft_opens_a_saved_adapter_with_the_same_logits(tmp_path):
    model = adapted()
    checkpoints.save(model, tokenizer(), tmp_path)
    opened = peft.PeftModel.from_pretrained(tiny.network().model, tmp_path)
    h = opened.base_model.model.model(input_ids=IDS, use_cache=False).last_hidden_state
    z = opened.base_model.model.lm_head(h)
    assert torch.equal(z.masked_fill(logits(model) == -torch.inf, 0), finite(model))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "somewhere"
    assert not (tmp_path / "model.safetensors").exists() and not (tmp_path / "config.json").exists()


TARGETS = {"llada": ALL, "modernbert": ["Wqkv", "Wi"], "a2d-qwen3": ALL}


@pytest.mark.parametrize("family", test_loading.MAKERS)
def test_merged_adapters_are_weights_of_the_released_class(family, tmp_path, capsys):
    """By the verb, from a run; against the run's own logits, and for transformers' families in transformers' own class."""
    base, out = tmp_path / "base", tmp_path / "merged"
    base.mkdir()
    test_loading.MAKERS[family](base)
    model, tok = checkpoints.load(base)
    targets = TARGETS.get(family, NARROW["target_modules"])
    adapters.add_adapters(model, **NARROW | {"target_modules": targets}, seed=0, base=base)
    checkpoints.save(moved(model), tok, tmp_path / "run/checkpoint-12")
    (tmp_path / "run/checkpoint-9").mkdir()  # an older one
    files = {path.name for path in (tmp_path / "run/checkpoint-12").iterdir()}
    assert "tokenizer_config.json" in files and "config.json" not in files, "it would seem to be a base"
    assert main(["merge", str(tmp_path / "run"), str(out)]) == 0
    assert "checkpoint-12 with its adapters added" in capsys.readouterr().out
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    assert after.keys() == before.keys()
    merged, _ = checkpoints.load(out)
    ids, mask = test_loading.batch(model)
    z = model.head(model.encode(ids, mask))[mask]
    others = test_loading.others(model)
    torch.testing.assert_close(merged.head(merged.encode(ids, mask))[mask][:, others], z[:, others], atol=1e-4, rtol=0)
    if family in test_loading.A2D:
        sees = test_loading.additive(mask[:, None, None].expand(-1, 1, 14, -1))
        theirs = test_loading.reference(out)(input_ids=ids, attention_mask=sees).logits[mask]
        torch.testing.assert_close(theirs[:, others], z[:, others], atol=1e-4, rtol=0)
    assert main(["merge", str(base), str(tmp_path / "other")]) == 2 and "holds no adapters" in capsys.readouterr().err


def saved(base: Path, folder: Path) -> Path:
    model, tok = checkpoints.load(base)
    adapters.add_adapters(model, **NARROW, seed=0, base=base)
    checkpoints.save(model, tok, folder)
    return folder


def test_an_adapter_whose_base_is_gone_is_refused_in_one_line(base, tmp_path):
    folder = saved(base, tmp_path)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match="^model: got .*gone") as error:
        checkpoints.load(folder)
    assert "\n" not in str(error.value)


def test_adapters_of_another_network_are_refused(base, llada, tmp_path):
    folder = saved(llada, tmp_path)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    with pytest.raises(ValueError, match="whose adapters do not fit the network"):
        checkpoints.load(folder)


# -------------------------------------------------------------------------------------------------------- checkpointing
@pytest.mark.parametrize("lora", [False, True])
def test_checkpointed_layers_give_the_same_gradient_to_the_bit(lora):
    def make() -> denoiser.Denoiser:
        return adapted() if lora else tiny.network()

    plain, recomputed = make(), make()
    denoiser.checkpoint_activations(recomputed)
    loss = [lambda m=m: finite(m).square().sum() for m in (plain, recomputed)]
    assert_same(gradients(plain, loss[0]), gradients(recomputed, loss[1]))


# --------------------------------------------------------------------------------------------------------------- 4 bits
def test_a_base_in_4_bits_is_near_the_base_and_its_adapters_learn(tmp_path):
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    whole = denoiser.build(sizes, tokenizer(), 0)
    checkpoints.save(whole, tokenizer(), tmp_path)
    model, _ = checkpoints.load(tmp_path, "cpu", torch.bfloat16, quantize=True)
    assert {p.dtype for name, p in model.named_parameters() if "proj" in name} == {torch.uint8}
    assert 0 < (finite(model) - finite(whole)).abs().mean() < 0.2 * finite(whole).std()
    adapters.add_adapters(model, **NARROW, seed=0, base=tmp_path)
    finite(moved(model)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for _, p in denoiser.trained(model))


# ----------------------------------------------------------------------------------------------------------------- runs
def settings(base: Path, **changes) -> config.Train:
    words = {"lora": config.Lora(**NARROW), "gradient_checkpointing": True}
    return tiny.settings(base, **{**words, **changes})


WITH_KL = {"kl.form": "k3", "kl.beta": 0.5}


@pytest.mark.parametrize("options", [WITH_KL, {"kl.form": "exact", "kl.beta": 0.5}], ids=["k3", "exact"])
def test_the_reference_of_a_run_with_adapters_equals_a_second_copy(options, base, monkeypatch):
    changes = {"method": "grpo", "method_options": options}
    run = train.start(settings(base, **changes))
    assert run.reference.model is run.model.model  # no second copy
    expected = [loop.take_step(run, step) for step in range(2)]
    copied = train.start(settings(base, **changes))
    copied.reference = checkpoints.load(base)[0]
    rows = [loop.take_step(copied, step) for step in range(2)]
    assert [row["kl"] for row in rows] == [row["kl"] for row in expected] and expected[1]["kl"] > 0
    assert_same(tiny.weights(run.model), tiny.weights(copied.model))


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(base, tmp_path):
    changes = {"dtype": "bfloat16", "steps": 4, "save_every": 2, "method": "replay-grpo"}
    train.train(settings(base, **changes), tmp_path / "whole")
    train.train(settings(base, **changes | {"steps": 2}), tmp_path / "parts")
    train.train(settings(base, **changes), tmp_path / "parts", resume=True)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        whole, parts = ((tmp_path / out / "checkpoint-4" / name).read_bytes() for out in ("whole", "parts"))
        assert whole == parts


def test_a_folder_of_adapters_is_no_base_of_a_run(base, tmp_path):
    with pytest.raises(ValueError, match="which holds adapters; allowed a base"):
        train.start(settings(saved(base, tmp_path)))
