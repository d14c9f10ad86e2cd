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
from minidrl import methods
from minidrl.run import trainer

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(EXAMPLES))  # one example imports the other
plain, forty = example("plain_torch"), example("forty_lines")
REFUSED = [
    name for name, row in methods.METHODS.items() if row.step_value != "none" or (row.kl and row.kl.target == "reference")
]
SERVED = [name for name in methods.METHODS if name not in REFUSED and not tiny.in_blocks(name)]


UPDATES = 3
PAGE = (EXAMPLES.parent / "docs" / "your_trainer.md").read_text(encoding="utf-8")


def blocks_of(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"^```python\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)


BLOCKS_OF_THE_PAGE = blocks_of(PAGE)


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


@pytest.mark.parametrize("name", SERVED)
def test_forty_lines_have_the_gradient_of_the_trainer(name, monkeypatch):
    """Of the first update on a rollout, by all rows that the longer example serves."""
    learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), method=name, num_iterations=1)
    experience, noise, found = tiny.experience(learner), torch.Generator(), []
    monkeypatch.setattr(learner, "generator", lambda step, purpose: noise)
    monkeypatch.setattr(learner, "collect", lambda *_: experience)
    monkeypatch.setattr(trainer, "optimizer_step", lambda model, *_: found.append(tiny.gradient(model)) or 0.0)
    noise.manual_seed(5)
    learner.step(0)
    learner.model.zero_grad()
    noise.manual_seed(5)
    forty.backward(learner.model, learner.method, experience.rollout, experience.reward, noise)
    (theirs,) = found
    assert theirs.norm() > 0
    torch.testing.assert_close(tiny.gradient(learner.model), theirs, rtol=1e-9, atol=1e-9 * float(theirs.norm()))


def test_forty_lines_are_forty_and_stand_on_the_page(capsys):
    source = (EXAMPLES / "forty_lines.py").read_text(encoding="utf-8")
    assert len([line for line in source.splitlines() if line]) <= 40
    assert BLOCKS_OF_THE_PAGE[0] + "\n" == source
    forty.main("gdpo", steps=1)
    assert 0 < float(re.fullmatch(r"reward (\S+)\n", capsys.readouterr().out)[1]) < 1


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


def without(rollout: plain.Rollout, *names: str) -> plain.Rollout:
    """What `Rollout.of` makes of a rollout when some of its arguments are left out."""
    told = {key: value for key, value in vars(rollout).items() if key not in ("response", *names)}
    return plain.Rollout.of(rollout.response, **told)


def read_by(method: methods.Method, plan: plain.Plan) -> dict[str, str]:
    """The page's table: what a row reads beside prompt and response, and how its absence is refused."""
    found = {"num_generations": "num_generations: got 1; allowed from 2"}
    if plan.replay or method.plan.func is methods.merged_plan:
        found |= {"sampler": "sampler: got None; allowed|order: got None", "unmask_step": "unmask_step: got -1"}
    if method.anchor == "behaviour":
        found["logp"] = "logp: got 0 everywhere"
    if method.plan.func is methods.entropy_plan or "topk_logp" in method.features:
        found["records"] = "records: the rollout holds no record '(entropy|topk_ids)'"
    return found


@pytest.mark.parametrize("name", SERVED)
def test_a_row_reads_what_the_page_says_and_nothing_beside_it(name, monkeypatch):
    """What it reads is refused by name where it is missing; the rest may be left out, all at once."""
    learner, experience = learner_and_experience(monkeypatch, name)
    theirs, found = experience.rollout, []

    def gradient(rollout: plain.Rollout) -> torch.Tensor:
        told = learner.model, learner.method, rollout
        (update,) = plain.prepare(*told, experience.reward, torch.Generator().manual_seed(5))
        plain.backward(*told, update)
        return tiny.gradient(learner.model)

    reads = read_by(learner.method, methods.draw(learner.method, theirs, torch.Generator().manual_seed(5)))
    for field, message in reads.items():
        with pytest.raises(ValueError, match=message):
            gradient(without(theirs, field))
    rest = {"num_generations", "sampler", "unmask_step", "logp", "records"} - reads.keys()
    found = [gradient(theirs), gradient(without(theirs, *rest))]
    assert found[0].norm() > 0
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * float(found[0].norm()))  # without logp: weights in float32


def test_groups_that_are_none_are_refused(monkeypatch):
    """A number that does not divide; the responses of two prompts in turn, which would be compared with each other."""
    learner, experience = learner_and_experience(monkeypatch, "gdpo")
    rollout, told = experience.rollout, (experience.reward, torch.Generator())
    in_turn = torch.arange(tiny.GROUPS * tiny.GENERATIONS).view(tiny.GROUPS, -1).T.flatten()
    wrong = {
        "num_generations: got 5; allowed from 2, divisors of the 12 responses": {"num_generations": 5},
        "prompt: got several in a group of 4; allowed one": {"prompt": rollout.prompt[in_turn]},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            plain.prepare(learner.model, learner.method, dataclasses.replace(rollout, **change), *told)


def test_several_processes_are_refused(monkeypatch):
    learner, experience = learner_and_experience(monkeypatch, "gdpo")
    monkeypatch.setattr(plain, "num_processes", lambda: 2)
    with pytest.raises(ValueError, match="processes: got 2; allowed 1"):
        plain.prepare(learner.model, learner.method, experience.rollout, experience.reward, torch.Generator())


COMPARED = [name for name in REFUSED if methods.METHODS[name].step_value == "none"]


def compared(method, rollout, network, reference, update, ll_of=methods.kl_target) -> torch.Tensor:
    """The page's paragraph on a KL to a reference: what `backward` becomes. Returns the loss."""
    plan, exact = update.plan, method.kl.form == "exact"
    how, ref = {"names": method.features, "temperature": plain.temperature(method, rollout)}, None
    if not exact:
        ref = ll_of(method, plan, rollout, plain.features(reference, rollout, plan, **how))

    def loss_of(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return methods.method_loss(method, plan, rollout, found, update.adv, update.anchor, ref)

    how |= {"reference": reference} if exact else {}
    return plain.two_pass_backward(network, rollout, plan, loss_of, **how).loss


@pytest.mark.parametrize("name", [*COMPARED, "exact"])
def test_a_reference_as_on_the_page_has_the_gradient_of_the_trainer(name, monkeypatch):
    """Of the first update on a rollout, with a reference that is not the policy."""
    words = {"method": name, "num_iterations": 1}
    if name == "exact":
        words = {"method": "gdpo", "num_iterations": 1, "method_options": {"kl.form": "exact", "kl.beta": 0.5}}
    learner = tiny.learner_on(monkeypatch, tiny.network(torch.float64), **words)
    tiny.perturb(learner.reference, 0.3)
    experience, found = tiny.experience(learner), []
    noise = torch.Generator().manual_seed(5)
    seed = int(torch.randint(2**31, (1,), generator=noise))
    streams = {"schedule": lambda: torch.Generator().manual_seed(seed)}
    monkeypatch.setattr(learner, "generator", lambda step, purpose: streams.get(purpose, lambda: noise)())
    monkeypatch.setattr(learner, "collect", lambda *_: experience)
    monkeypatch.setattr(trainer, "optimizer_step", lambda model, *_: found.append(tiny.gradient(model)) or 0.0)
    learner.step(0)

    noise.manual_seed(5)
    bare, told = methods.with_options(learner.method, {"kl.beta": 0.0}), (experience.reward, noise)
    (update,) = plain.prepare(learner.model, bare, experience.rollout, *told)
    assert float(compared(learner.method, experience.rollout, learner.model, learner.reference, update)) != 0
    mine = tiny.gradient(learner.model)
    plain.backward(learner.model, bare, experience.rollout, update)
    torch.testing.assert_close(mine, found[0], rtol=1e-9, atol=1e-9 * float(found[0].norm()))
    assert (tiny.gradient(learner.model) - mine).norm() > 1e-4 * mine.norm()  # of the KL


@pytest.mark.parametrize("name", COMPARED)
def test_a_reference_that_is_the_policy_costs_nothing(name, monkeypatch):
    """With equal rewards the loss is 0; with `reduced` in the place of `kl_target` that of espo is not."""
    learner, experience = learner_and_experience(monkeypatch, name)
    method, rollout, model = learner.method, experience.rollout, learner.model
    bare = methods.with_options(method, {"kl.beta": 0.0})
    told = torch.ones_like(experience.reward), torch.Generator().manual_seed(5)
    (update,) = plain.prepare(model, bare, rollout, *told)
    assert float(compared(method, rollout, model, model, update)) == pytest.approx(0, abs=1e-12)
    wrong = float(compared(method, rollout, model, model, update, methods.reduced))
    assert wrong == pytest.approx(0.1 if name == "espo" else 0, abs=0.05 if name == "espo" else 1e-12)


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


NUMBERS = {"Six": 6, "Seven": 7, "Eight": 8, "Nine": 9}


def foreign(blocks: list[str], source: str) -> list[str]:
    """Python of a page that is no part of the source, whatever its indentation."""
    assert blocks
    return [block for block in blocks if not any(textwrap.indent(block, " " * n) + "\n" in source for n in (0, 4, 8))]


def test_the_code_on_the_page_is_that_of_the_example():
    """But for its first block, which is the forty lines."""
    source = (EXAMPLES / "plain_torch.py").read_text(encoding="utf-8")
    assert foreign(BLOCKS_OF_THE_PAGE[1:], source) == []
    assert foreign(blocks_of(PAGE.replace("zip(plans, advs, anchors", "zip(plans, anchors, advs"))[1:], source) != []


def test_the_code_on_the_page_runs_by_itself(capsys):
    """Its blocks, one after the other, define all that they use."""
    names = {"__file__": str(EXAMPLES / "plain_torch.py"), "__name__": "page"}
    exec("\n\n\n".join(BLOCKS_OF_THE_PAGE[1:]), names)
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
