"""The examples do what the trainer does: equal gradients on one batch."""

import dataclasses
import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import tiny
from minidrl import methods, trainer

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(EXAMPLES))  # one example imports the other
plain = example("plain_torch")
REFUSED = [
    name for name, row in methods.METHODS.items() if row.step_value != "none" or (row.kl and row.kl.target == "reference")
]
SERVED = [name for name in methods.METHODS if name not in REFUSED and not tiny.in_blocks(name)]


UPDATES = 3


def learner_and_experience(monkeypatch, name: str):
    learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), method=name, num_iterations=UPDATES)
    return learner, tiny.experience(learner)


def move(model: torch.nn.Module) -> torch.Tensor:
    """A step of length 0.02 against the accumulated gradient, which is returned and cleared."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    gradient = tiny.gradient(model)
    with torch.no_grad():
        for p, grad in zip(model.parameters(), found, strict=True):
            p -= 0.02 * grad / gradient.norm()
    return gradient


def spread(network, method, rollout, update) -> float:
    """Largest distance of a log-ratio from 0; 0 for a row without an anchor."""
    how = {"names": method.features, "temperature": plain.temperature(method, rollout)}
    if update.anchor is None:
        return 0.0
    ll = methods.reduced(method, update.plan, rollout, plain.features(network, rollout, update.plan, **how))
    return float((ll - update.anchor).abs().max())


@pytest.mark.parametrize("name", SERVED)
def test_the_plain_loop_has_the_gradients_of_the_trainer(name, monkeypatch):
    """Of three updates on one rollout, between which the weights move; the ratio is 1 at most at the first of them."""
    learner, experience = learner_and_experience(monkeypatch, name)
    method, rollout, found = learner.method, experience.rollout, []
    begin = tiny.weights(learner.model)
    noise = torch.Generator().manual_seed(5)
    seed = int(torch.randint(2**31, (1,), generator=noise))  # both draw from one stream, in one order
    streams = {"schedule": lambda: torch.Generator().manual_seed(seed)}
    monkeypatch.setattr(learner, "generator", lambda step, purpose: streams.get(purpose, lambda: noise)())
    monkeypatch.setattr(learner, "collect", lambda *_: experience)
    monkeypatch.setattr(trainer, "optimizer_step", lambda model, *_: found.append(move(model)) or 0.0)
    learner.step(0)
    assert len(found) == UPDATES and all(gradient.norm() > 0 for gradient in found)

    learner.model.load_state_dict(begin)
    noise.manual_seed(5)
    network = plain.Logits(plain.Model(learner.model), learner.model.mask_token_id, learner.model.vocab_size)
    mine, far = [], []
    for update in plain.prepare(network, method, rollout, experience.reward, noise, UPDATES):
        far.append(spread(network, method, rollout, update))
        plain.backward(network, method, rollout, update)
        mine.append(move(learner.model))
    for own, theirs in zip(mine, found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-9 * float(theirs.norm()))
    if method.anchor != "none":
        assert far[1] > 1e-3 and far[2] > 1e-3
        assert far[0] < 1e-9 or method.refresh == "independent" or method.temperature != "sampling"


def test_an_anchor_of_the_moment_would_have_ratios_of_one(monkeypatch):
    """What repeating both halves for every update would do: a clip would never act."""
    learner, experience = learner_and_experience(monkeypatch, "gdpo")
    told = learner.model, learner.method, experience.rollout
    kept = plain.prepare(*told, experience.reward, torch.Generator().manual_seed(5), 2)
    plain.backward(*told, kept[0])
    move(learner.model)
    (anew,) = plain.prepare(*told, experience.reward, torch.Generator().manual_seed(6))
    assert spread(*told, anew) < 1e-9 < 1e-3 < spread(*told, kept[1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_plain_loop_leaves_out_it_refuses(name, monkeypatch):
    learner, experience = learner_and_experience(monkeypatch, name)
    with pytest.raises(ValueError, match=f"method: got {name}; allowed here one without"):
        plain.prepare(learner.model, learner.method, experience.rollout, experience.reward, torch.Generator())


BLOCKS = [name for name in methods.METHODS if tiny.in_blocks(name) and name not in REFUSED]


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_in_blocks_need_a_network_for_them(name, monkeypatch):
    """The adapter has no encode_staircase: refused before the first forward."""
    learner, experience = learner_and_experience(monkeypatch, name)
    network = plain.Logits(plain.Model(learner.model), learner.model.mask_token_id, learner.model.vocab_size)
    with pytest.raises(ValueError, match=f"network: got one without encode_staircase; {name} is about block diffusion"):
        plain.prepare(network, learner.method, experience.rollout, experience.reward, torch.Generator())


def test_a_row_about_another_order_is_refused(monkeypatch):
    learner, experience = learner_and_experience(monkeypatch, "justgrpo")
    at_random = dataclasses.replace(experience.rollout.sampler, order="random")
    for settings, order in ((at_random, "random"), (None, "None")):
        rollout = dataclasses.replace(experience.rollout, sampler=settings)
        with pytest.raises(ValueError, match=f"order: got {order}; allowed left_to_right, which justgrpo is about"):
            plain.prepare(learner.model, learner.method, rollout, experience.reward, torch.Generator())


@pytest.mark.parametrize("name", ["gdpo", "reinforce", "ppo", "egspo", "egspo-exact"])
def test_a_rollout_of_another_sampler_has_the_same_gradient(name, monkeypatch):
    """`recorded` on what a sampler wrote down; of `gdpo` it needs no step, no log-probability and no settings."""
    learner, experience = learner_and_experience(monkeypatch, name)
    theirs, method = experience.rollout, learner.method
    made = {key: value for key, value in vars(theirs).items() if isinstance(value, torch.Tensor)}
    own = plain.recorded(made | {"entropy": theirs.records["entropy"]}, theirs.num_generations, theirs.sampler)
    if name == "gdpo":
        bare = {key: made[key] for key in ("prompt", "prompt_mask", "keep")}
        own = plain.Rollout.of(theirs.response, num_generations=theirs.num_generations, **bare)
    found = []
    for rollout in (theirs, own):
        (update,) = plain.prepare(learner.model, method, rollout, experience.reward, torch.Generator().manual_seed(5))
        plain.backward(learner.model, method, rollout, update)
        found.append(tiny.gradient(learner.model))
    assert found[0].norm() > 0
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * float(found[0].norm()))  # bare: weights in float32


@pytest.mark.parametrize("name", ["gdpo", "egspo"])
def test_the_example_runs(name, capsys):
    """Also with a row that reads the entropy of the rollout."""
    rewards = plain.main(name, updates=2, steps=1)
    assert len(rewards) == 1 and 0 < rewards[0] < 1 and capsys.readouterr().out.startswith("step  1   loss ")


PAGE = (EXAMPLES.parent / "docs" / "your_trainer.md").read_text(encoding="utf-8")
NUMBERS = {"Six": 6, "Seven": 7, "Eight": 8, "Nine": 9}


def foreign(page: str, source: str) -> list[str]:
    """Python of a page that is no part of the source, whatever its indentation."""
    blocks = re.findall(r"^```python\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    return [block for block in blocks if not any(textwrap.indent(block, " " * n) + "\n" in source for n in (0, 4, 8))]


def test_the_code_on_the_page_is_that_of_the_example():
    source = (EXAMPLES / "plain_torch.py").read_text(encoding="utf-8")
    assert foreign(PAGE, source) == []
    assert foreign(PAGE.replace("zip(plans, advs, anchors", "zip(plans, anchors, advs"), source) != []


def test_the_code_on_the_page_runs_by_itself(capsys):
    """Its blocks, one after the other, define all that they use."""
    blocks = re.findall(r"^```python\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
    names = {"__file__": str(EXAMPLES / "plain_torch.py"), "__name__": "page"}
    exec("\n\n\n".join(blocks), names)
    assert len(names["main"]("reinforce", 1, 1)) == 1 and "step  1" in capsys.readouterr().out


def test_the_functions_that_the_page_counts():
    (number,) = re.findall(r"(\w+) functions are\nenough", PAGE)
    named = re.findall(r"`(\w+)\.(\w+)`", "".join(line for line in PAGE.splitlines() if line.startswith("|")))
    assert len(set(named)) == NUMBERS[number]
    assert all(callable(getattr(importlib.import_module(f"minidrl.{module}"), function)) for module, function in named)
    used = (EXAMPLES / "plain_torch.py").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{function}\(", used) for _, function in named)


@pytest.mark.filterwarnings("ignore")  # those of TRL about transformers, of transformers about torch
def test_trl_applies_the_gradient_of_the_plain_loop(tmp_path, monkeypatch):
    """On the rollout that TRL's trainer made, from its own rewards; a group without a difference teaches nothing."""
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    trl, found = example("trl_trainer"), []

    class Seen(trl.DiffusionGRPOTrainer):
        def training_step(self, model, *batch):
            state = self.noise.get_state()
            loss = super().training_step(model, *batch)
            applied = [p.grad.clone() for p in self.network.parameters()]
            self.noise.set_state(state)
            rollout, reward = self.rollout(batch[0])
            model.zero_grad()
            plain.backward(self.network, self.row, rollout, *plain.prepare(self.network, self.row, rollout, reward, self.noise))
            found.append((reward, applied, [p.grad.clone() for p in self.network.parameters()]))
            return loss

    monkeypatch.setattr(trl, "DiffusionGRPOTrainer", Seen)
    rewards = trl.main("gdpo", steps=1, out=str(tmp_path / "out"))
    ((reward, applied, mine),) = found
    assert rewards == [pytest.approx(float(reward.mean()), abs=1e-4)] and reward.std() > 0
    assert any(grad.norm() > 0 for grad in mine)
    for theirs, own in zip(applied, mine, strict=True):
        torch.testing.assert_close(theirs, own)
