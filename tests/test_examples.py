"""The examples do what the trainer does: equal gradients on one batch."""

import importlib.util
import sys
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


def learner_and_experience(monkeypatch, name: str):
    learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), method=name, num_iterations=1)
    return learner, tiny.experience(learner)


@pytest.mark.parametrize("name", SERVED)
def test_the_plain_loop_has_the_gradient_of_the_trainer(name, monkeypatch):
    learner, experience = learner_and_experience(monkeypatch, name)
    noise, clock, found = torch.Generator().manual_seed(5), trainer.Clock(), []
    monkeypatch.setattr(learner, "generator", lambda step, purpose: noise)  # both draw from one stream, in one order
    monkeypatch.setattr(trainer, "optimizer_step", lambda model, *_: found.append(tiny.gradient(model)) or 0.0)
    (plan, adv), *_ = learner.plans(0, experience)
    (anchor,) = learner.anchors(0, [plan], experience.rollout, clock)
    learner.update(experience, plan, adv, anchor, clock)

    noise.manual_seed(5)
    network = plain.Logits(plain.Model(learner.model), learner.model.mask_token_id, learner.model.vocab_size)
    plain.backward(network, learner.method, experience.rollout, experience.reward, noise)
    mine = tiny.gradient(learner.model)
    assert found[0].norm() > 0
    torch.testing.assert_close(mine, found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_plain_loop_leaves_out_it_refuses(name, monkeypatch):
    learner, experience = learner_and_experience(monkeypatch, name)
    with pytest.raises(ValueError, match=f"method: got {name}; allowed here one without"):
        plain.backward(learner.model, learner.method, experience.rollout, experience.reward, torch.Generator())


def test_the_example_runs(monkeypatch, capsys):
    rewards = plain.main("gdpo", steps=1)
    assert len(rewards) == 1 and 0 < rewards[0] < 1 and capsys.readouterr().out.startswith("step  1   loss ")


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
            plain.backward(self.network, self.row, rollout, reward, self.noise)
            found.append((reward, applied, [p.grad.clone() for p in self.network.parameters()]))
            return loss

    monkeypatch.setattr(trl, "DiffusionGRPOTrainer", Seen)
    rewards = trl.main("gdpo", steps=1, out=str(tmp_path / "out"))
    ((reward, applied, mine),) = found
    assert rewards == [pytest.approx(float(reward.mean()), abs=1e-4)] and reward.std() > 0
    assert any(grad.norm() > 0 for grad in mine)
    for theirs, own in zip(applied, mine, strict=True):
        torch.testing.assert_close(theirs, own)
