"""Every law on its shipped module; every equation has a law; plans touch neither their inputs nor the global generator."""

import inspect
from functools import partial

import pytest
import torch

import judged
import laws
from minidrl import methods
from minidrl.sampler import Sampler


@pytest.mark.parametrize("name", laws.LAWS)
def test_law_holds(name):
    laws.LAWS[name](judged.SHIPPED)


def test_no_tag_is_used_twice():
    first, twice = {}, []
    for tag, name, at in judged.equations():
        if first.setdefault(tag, at) != at:
            twice.append(f"{at}: ({tag}) opens the docstring of {name} and that at {first[tag]}: give one another number")
    assert not twice, "\n" + "\n".join(twice)


def test_every_equation_has_a_law_and_two_mutants_and_every_plan_its_words():
    wrong = []
    for tag, name, at in judged.equations():
        number, needs = sum(mutant.tag == tag for mutant in laws.MUTANTS), []
        if not any(tag in tags for tags in laws.TAGS.values()):
            needs.append(f"a law in tests/laws/ under @judges({tag!r})")
        if number < 2:
            needs.append(f"{2 - number} more mutants, @rejects({tag!r}, (passage, mistake), ..) on its law")
        if name.endswith("_plan") and unknown(name):
            needs.append(f"a value for {', '.join(unknown(name))} in WORDS of tests/test_laws.py")
        if needs:
            wrong.append(f"{at}: {name} ({tag}) needs {'; '.join(needs)}")
    assert not wrong, "\n" + "\n".join(wrong)


# What the plans are given below, beside the words of the first method that has them: what suits the rollout below, and the
# words of a plan that no method has.
WORDS = {
    "num_states": 2,
    "domain": "keep",
    "min_t": 0.1,
    "block_length": 2,
    "min_entropy": 0.1,
    "constants": laws.normal(2, 57).abs(),
}
PLANS = [name for _, name, _ in judged.equations() if name.endswith("_plan")]


def words_of(name):
    """The keywords of a plan with their values, as far as they are known."""
    wanted = [p.name for p in inspect.signature(getattr(judged.SHIPPED, name)).parameters.values() if p.kind == p.KEYWORD_ONLY]
    known = next((m.plan.keywords for m in methods.METHODS.values() if m.plan.func.__name__ == name), {}) | WORDS
    return {word: known[word] for word in wanted if word in known}


def unknown(name):
    keywords = inspect.signature(getattr(judged.SHIPPED, name)).parameters.values()
    needed = [word.name for word in keywords if word.kind == word.KEYWORD_ONLY and word.default is word.empty]
    return [word for word in needed if word not in words_of(name)]


def rollout():
    steps = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [1, 0, 2, 3]])
    settings = Sampler(order="random", temperature=1.0, length=4, block_length=2, tokens_per_step=1)
    entropy = torch.full((3, 4), 0.5, dtype=torch.float64)
    responses = [laws.RESPONSE] * 3
    records = {"entropy": entropy, "one_step_proposed": torch.ones(3, 4, 4, dtype=torch.long)}
    records |= {"seen_logp": -laws.normal(3, 4, 4).abs(), "solved": torch.tensor([True, False, True])}
    return laws.rollout_of(judged.SHIPPED, responses, laws.KEEPS, unmask_step=steps, records=records, sampler=settings)


def tensors(record):
    fields = {name: value for name, value in vars(record).items() if torch.is_tensor(value)}
    return fields | {f"records.{name}": value for name, value in getattr(record, "records", {}).items()}


@pytest.mark.parametrize("name", [name for name in PLANS if not unknown(name)])
def test_plans_use_their_own_generator_and_leave_the_rollout_alone(name):
    make, given, generator = partial(getattr(judged.SHIPPED, name), **words_of(name)), rollout(), laws.seeded(1)
    before, state = {name: value.clone() for name, value in tensors(given).items()}, torch.get_rng_state()
    first, again, other = make(given, generator), make(given, laws.seeded(1)), make(given, laws.seeded(2))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert all(torch.equal(value, before[name]) for name, value in tensors(given).items()), "the rollout was changed"
    assert all(torch.equal(value, tensors(again)[name]) for name, value in tensors(first).items()), "another plan from one seed"
    same = all(torch.equal(value, tensors(other)[name]) for name, value in tensors(first).items())
    drew = not torch.equal(generator.get_state(), laws.seeded(1).get_state())
    assert same != drew, "it draws noise that changes nothing" if same else "it depends on more than its noise"


@pytest.mark.parametrize("name", judged.SHIPPED.METHODS)
def test_losses_leave_their_inputs_alone(name):
    method = laws.sized(judged.SHIPPED.METHODS[name])
    drawn, _, _, _, reward = laws.experience(name)
    plan = method.plan(drawn, laws.seeded(44))
    held = [*tensors(drawn).values(), *tensors(plan).values(), reward]
    before, state = [value.clone() for value in held], torch.get_rng_state()
    laws.judged_gradient(judged.SHIPPED, method, plan, drawn, reward)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
