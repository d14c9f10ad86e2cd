"""The code of docs/ runs, and has the gradients of minidrl's own loop."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import tiny
from minidrl import loop, methods

DOCS = tiny.ROOT / "docs"
sys.path.insert(0, str(DOCS))  # one script imports the other


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = script("plain_torch")


def refused(method: methods.Method) -> bool:
    return method.step_value != "none" or bool(method.kl and method.kl.target == "reference") or tiny.in_blocks(method.name)


# A method of each kind that the script serves.
SERVED = {(m.plan.func, m.anchor, m.refresh): name for name, m in reversed(methods.METHODS.items()) if not refused(m)}


def moved(model: torch.nn.Module) -> torch.Tensor:
    """A step of length 0.02 against the accumulated gradient, which is returned and cleared."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    gradient = tiny.gradient(model)
    with torch.no_grad():
        for p, grad in zip(model.parameters(), grads, strict=True):
            p -= 0.02 * grad / gradient.norm()
    return gradient


@pytest.mark.parametrize("name", SERVED.values())
def test_the_plain_loop_has_the_gradients_of_the_loop(name, monkeypatch):
    """Of two updates on one rollout, between which the weights move."""
    run = tiny.run_on(monkeypatch, tiny.network(torch.float64), method=name, num_iterations=2)
    experience, begin, found = tiny.experience(run), tiny.weights(run.model), []
    noise = torch.Generator().manual_seed(5)
    seed = int(torch.randint(2**31, (1,), generator=noise))  # both draw from one stream, in one order
    schedule = {"schedule": lambda: torch.Generator().manual_seed(seed)}
    monkeypatch.setattr(loop, "keyed_generator", lambda seed, step, purpose: schedule.get(purpose, lambda: noise)())
    monkeypatch.setattr(loop, "collect", lambda *_: experience)
    monkeypatch.setattr(loop, "optimizer_step", lambda model, *_: found.append(moved(model)) or 0.0)
    loop.take_step(run, 0)

    run.model.load_state_dict(begin)
    noise.manual_seed(5)
    network = plain.Logits(plain.Model(run.model), run.model.mask_token_id, run.model.vocab_size)
    for theirs, update in zip(
        found, plain.prepare(network, run.method, experience.rollout, experience.reward, noise, 2), strict=True
    ):
        plain.backward(network, run.method, experience.rollout, update)
        mine = moved(run.model)
        assert theirs.norm() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9 * float(theirs.norm()))


@pytest.mark.parametrize("name", ["gdpo-sequence", "egspo-accounts"])
def test_the_plain_loop_runs_on_a_rollout_of_another_sampler(name, monkeypatch, capsys):
    made = plain.generate

    def another(*words, **how):
        rollout = made(*words, **how)
        return plain.recorded(vars(rollout) | rollout.records, rollout.num_generations, rollout.sampler)

    monkeypatch.setattr(plain, "generate", another)
    (reward,) = plain.main(name, updates=2, steps=1)
    assert 0 < reward < 1 and capsys.readouterr().out.startswith("step  1   loss ")


@pytest.mark.parametrize("lost", [{"num_generations": 1}, {"sampler": None}, {"unmask_step": None}, {"logp": None}])
def test_what_would_teach_nothing_is_refused(lost, monkeypatch):
    run = tiny.run_on(monkeypatch, tiny.network(), method="ppo")
    rollout, reward = (experience := tiny.experience(run)).rollout, experience.reward
    words = {k: v for k, v in (vars(rollout) | lost).items() if v is not None and k != "response"}
    with pytest.raises(ValueError, match=f"^({'|'.join(lost)}|rollout): "):
        plain.prepare(run.model, run.method, plain.Rollout.of(rollout.response, **words), reward, torch.Generator())


def test_the_code_of_the_commands_page_runs(monkeypatch, capsys):
    monkeypatch.chdir(tiny.ROOT)
    (block,) = re.findall(r"^```python\n(.*?)\n```$", Path("docs/commands.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out.startswith("step 1: solved 0.")


@pytest.mark.filterwarnings("ignore")  # TRL's about transformers, transformers' about torch
def test_trl_applies_the_gradient_of_the_plain_loop(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    trl, found = script("trl_trainer"), []

    class Seen(trl.DiffusionGRPOTrainer):
        def training_step(self, model, *batch):
            state = self.noise.get_state()
            loss = super().training_step(model, *batch)
            applied = tiny.gradient(self.network)
            self.noise.set_state(state)
            rollout, reward = self.rollout(batch[0])
            plain.backward(
                self.network, self.method, rollout, *plain.prepare(self.network, self.method, rollout, reward, self.noise)
            )
            found.append((applied, tiny.gradient(self.network)))
            return loss

    monkeypatch.setattr(trl, "DiffusionGRPOTrainer", Seen)
    assert len(trl.main("gdpo-sequence", steps=1, out=str(tmp_path / "out"))) == 1
    ((applied, mine),) = found
    assert applied.norm() > 0
    torch.testing.assert_close(applied, mine)
