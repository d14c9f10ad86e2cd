"""Every law on its shipped module; every equation has a law; plans touch neither their inputs nor the global generator."""

from functools import partial

import pytest
import torch

import judged
import laws
from minidrl import algorithms
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


def test_every_equation_has_a_law_and_every_law_an_equation():
    tags, told = {tag for tag, _, _ in judged.equations()}, {tag for tags in laws.TAGS.values() for tag in tags}
    wrong = [
        f"{at}: {name} ({tag}) has no law: add one to tests/laws_*.py, under @judges({tag!r})"
        for tag, name, at in judged.equations()
        if tag not in told
    ]
    for name, law in laws.LAWS.items():
        for tag in {*laws.TAGS[name]} - tags:
            where = f"{law.__code__.co_filename}:{law.__code__.co_firstlineno}"
            wrong.append(f"{where}: {name} judges ({tag}), with which no docstring of {', '.join(judged.ROOMS)} opens")
    assert not wrong, "\n" + "\n".join(wrong)


def plans():
    count = {"num_states": 2, "domain": "keep"}
    return {
        "2.1": partial(algorithms.mean_field_plan, p_mask_prompt=0.3),
        "2.2": partial(algorithms.elbo_time_plan, min_t=0.1, **count),
        "2.3": partial(algorithms.elbo_count_plan, strata=True, **count),
        "2.4": partial(algorithms.complementary_plan, **count),
        "2.6": partial(algorithms.quadrature_plan, num_nodes=2, masks_per_node=1, counts="stochastic", domain="keep"),
        "2.7": partial(algorithms.block_plan, num_states=2, block_length=2, p_mask=0.3),
        "2.8": partial(algorithms.block_elbo_plan, strata=True, **count),
        "3.1": partial(algorithms.replay_plan, num_states=2, min_entropy=0.1),
        "3.2": partial(algorithms.entropy_plan, num_states=2, shared=False, weight="sum"),
        "3.3": partial(algorithms.merged_plan, merge=2),
        "3.4": partial(algorithms.prediction_plan),
        "3.5": partial(algorithms.block_replay_plan),
    }


def rollout():
    steps = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [1, 0, 2, 3]])
    settings = Sampler(order="random", temperature=1.0, length=4, block_length=2, tokens_per_step=1)
    entropy = torch.full((3, 4), 0.5, dtype=torch.float64)
    responses = [laws.RESPONSE] * 3
    records = {"entropy": entropy, "one_step": torch.ones(3, 4, 4, dtype=torch.long)}
    return laws.rollout_of(algorithms, responses, laws.KEEPS, unmask_step=steps, records=records, sampler=settings)


def tensors(record):
    fields = {name: value for name, value in vars(record).items() if torch.is_tensor(value)}
    return fields | {f"records.{name}": value for name, value in getattr(record, "records", {}).items()}


@pytest.mark.parametrize("tag", plans())
def test_plans_use_their_own_generator_and_leave_the_rollout_alone(tag):
    make, given = plans()[tag], rollout()
    before, state = {name: value.clone() for name, value in tensors(given).items()}, torch.get_rng_state()
    first, again, other = (make(given, laws.seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in tensors(given).items())
    assert all(torch.equal(value, tensors(again)[name]) for name, value in tensors(first).items())
    if tag not in ("3.2", "3.3", "3.4", "3.5"):  # these choose without chance
        assert not all(torch.equal(value, tensors(other)[name]) for name, value in tensors(first).items())


def test_every_plan_is_listed_above():
    assert set(plans()) == {tag for tag, name, _ in judged.equations() if name.endswith("_plan")}


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_losses_leave_their_inputs_alone(name):
    method = laws.sized(algorithms.METHODS[name])
    drawn, _, _, _, reward = laws.experience(name)
    plan = method.plan(drawn, laws.seeded(44))
    held = [*tensors(drawn).values(), *tensors(plan).values(), reward]
    before, state = [value.clone() for value in held], torch.get_rng_state()
    laws.judged_gradient(algorithms, method, plan, drawn, reward)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
