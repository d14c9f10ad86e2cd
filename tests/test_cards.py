"""A method's card says what its row does: every line is right, every difference computed, every call counted."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest

import tiny
from minidrl import algorithms as alg
from minidrl import cards, index, methods
from minidrl.__main__ import main
from minidrl.methods import KL, METHODS
from minidrl.tasks.countdown import Countdown

ROOT = Path(__file__).parent.parent
ALGORITHMS = (ROOT / "minidrl" / "algorithms.py").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", METHODS)
def test_a_card_prints_and_its_lines_are_the_definitions(name, capsys):
    assert main(["methods", name]) == 0
    text, method = capsys.readouterr().out, METHODS[name]
    flat = " ".join(text.split())
    assert flat.startswith(f"{name}: {method.title}") and max(map(len, text.splitlines())) <= 100
    assert " ".join(method.source.split()) in flat and method.differs in flat
    told = cards.card(name)
    for step in told["formulas"]:
        file, _, line = step["at"].partition(":")
        assert file == "minidrl/algorithms.py" and ALGORITHMS[int(line) - 1].startswith(f"def {step['function']}(")
        tag = index.TAG.match(getattr(alg, step["function"]).__doc__)
        assert step["tag"] == (tag[1] if tag else "") and step["says"]
        assert f"{tag[0] if tag else ''}{step['function']}, {step['at']}" in flat
    used = {getattr(method, part).func.__name__ for part in index.PARTS if getattr(method, part)}
    assert used <= {step["function"] for step in told["formulas"]}
    assert ("KL" in {step["part"] for step in told["formulas"]}) == (method.kl is not None)


@pytest.mark.parametrize("name", METHODS)
def test_a_card_has_the_parts_that_its_row_has_from_the_masked_states_to_the_loss(name):
    method = METHODS[name]
    there = {
        "position": "position_logp" in method.features,
        "order": "order_logp" in method.features,
        "ratio": method.anchor != "none",
        "extra": method.extra is not None,
        "KL": method.kl is not None,
    }
    parts = ("plan", "position", "order", "reduction", "ratio", "credit", "extra", "objective", "KL", "aggregation", "loss")
    assert [step["part"] for step in cards.card(name)["formulas"]] == [part for part in parts if there.get(part, True)]


LOSSES = {
    "gdpo": "ppo clip, on the ratio of each sequence against the weights before the first update; "
    "log-likelihood from the quadrature plan; advantage by group mean; no KL; summed by ",
    "reinforce": "reinforce, on the log-likelihood of each step; log-likelihood from the replay plan; ",
    "mask-aware": "ppo clip, on the ratio of each sequence against the weights before the first update; "
    "log-likelihood, and apart from it of the positions, from the replay plan",
    "egspo-exact": "ppo clip, on the ratio of each step against the weights before the first update; "
    "log-likelihood and the order from the entropy plan; ",
    "stabledrl-block": "self normalized clip, with sandwich, on the ratio of each sequence against the weights before the "
    "first update; log-likelihood from the block elbo plan",
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_in_words(name):
    assert cards.loss_in_words(METHODS[name]).startswith(LOSSES[name])


def test_a_card_names_what_the_rollout_has_to_record():
    found = {name: cards.card(name)["records"] for name in ("gdpo", "egspo-sa", "mdpo")}
    assert found == {"gdpo": ["entropy"], "egspo-sa": ["entropy", "one_step"], "mdpo": ["entropy", "one_step_proposed"]}


@pytest.mark.parametrize("name", ["gdpo", "stabledrl-released"])
def test_the_text_of_a_card_stands_in_a_column(name):
    lines = cards.card_text(cards.card(name)).splitlines()[1:]
    assert {(line[12], line[13] == " ") for line in lines} == {(" ", False)}


@pytest.mark.parametrize("name", METHODS)
def test_a_card_in_json_is_the_same(name, capsys):
    assert main(["methods", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == cards.card(name)


def test_the_words_of_a_choice_are_those_of_its_docstring():
    told = {step["part"]: step["says"] for step in cards.card("gdpo-released")["formulas"]}
    assert "floor: k = floor(t n) positions, weight 1/t: the released code; a node with k = 0 is lost" in told["plan"]
    assert told["aggregation"] == "sequence_mean: mean_b S_b; each response counts once"
    for level in alg.LEVELS:
        assert cards.choice(alg.reduce_logp, level), level
    for how in alg.AGGREGATIONS:
        assert cards.choice(alg.aggregate, how), how
    for form in ("k1", "k2", "k3"):
        assert cards.choice(alg.kl_term, form), form
    for counts in alg.COUNTS:
        assert cards.choice(alg.quadrature_plan, counts), counts


def test_every_choice_by_name_has_words():
    words = {
        "anchor": cards.ANCHORS,
        "refresh": cards.REFRESH,
        "normalizer": cards.NORMALIZERS,
        "temperature": cards.TEMPERATURES,
    }
    for key, told in words.items():
        assert set(told) == set(methods.CHOICES[key])


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_an_option_with_its_published_value(name):
    method = METHODS[name]
    settings = cards.settings(method)
    numbers = {key: value for key, value in settings.items() if not key.startswith("kl.")}
    assert methods.with_options(method, settings) is not None
    assert cards.fields(methods.with_options(method, settings)) == cards.fields(method)
    assert set(numbers) == set(methods.numbers(method))
    text = " ".join(cards.card_text(cards.card(name)).split())
    assert all(f"{key} " in text for key in settings)


# --------------------------------------------------------------------------------------------------- as X, except


def applied(method: methods.Method, found: dict) -> methods.Method:
    """A row with differences made to it."""
    for key, (value, _) in found.items():
        part, _, word = key.partition(".")
        if word:
            present = getattr(method, part)
            changed = present._replace(**{word: value}) if isinstance(present, KL) else partial(present, **{word: value})
            method = dataclasses.replace(method, **{part: changed})
        else:
            method = dataclasses.replace(method, **{part: value})
    return method


@pytest.mark.parametrize("name", METHODS)
def test_the_differences_applied_to_the_relative_give_the_row(name):
    method = METHODS[name]
    other, found = cards.nearest(method)
    assert other.name != name and found
    assert cards.fields(applied(other, found)) == cards.fields(method)
    for key, (mine, theirs) in found.items():
        reverted = applied(method, {key: (theirs, mine)})
        assert cards.fields(reverted) != cards.fields(method), key
    told = cards.card(name)
    assert told["as"] == other.name and set(told["except"]) == set(found)


def test_no_other_row_is_nearer():
    for method in METHODS.values():
        other, _ = cards.nearest(method)
        mine = cards.fields(method)

        def far(row, mine=mine):
            its = cards.fields(row)
            return sum(mine.get(key, key) != its.get(key, key) for key in mine | its)

        assert far(other) == min(far(row) for row in METHODS.values() if row is not method), method.name


def test_of_rows_that_are_equally_near_a_card_names_the_one_with_the_most_alike_words():
    near = {name: cards.nearest(METHODS[name])[0].name for name in ("gdpo", "ppo-released", "cispo")}
    assert near == {"gdpo": "gdpo-arcs", "ppo-released": "ppo", "cispo": "cispo-released"}


def test_a_difference_by_hand():
    _, found = cards.nearest(METHODS["drpo"])
    assert found == {"objective.delta": (0.15, 12.5)}
    text = " ".join(cards.card_text(cards.card("gdpo-released")).split())
    assert "gdpo except plan.counts floor (bernoulli), plan.domain all (keep), refresh independent (fixed)" in text


# -------------------------------------------------------------------------------------------------- network calls


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_the_calls_are_those_that_the_trainer_counts(name, updates, monkeypatch):
    """Scoring to the call; pass 2, which leaves out states without gradient, at most."""
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    learner = tiny.learner_on(monkeypatch, tiny.network(), method=name, num_iterations=updates)
    drawn, plans = [], learner.plans
    monkeypatch.setattr(learner, "plans", lambda *of: drawn.append(plans(*of)) or drawn[-1])
    row = learner.step(0)
    calls = {plan.network_calls for plan, _ in drawn[0]}
    phases = cards.calls(learner.method)["1 update" if updates == 1 else "n updates"]
    times = {phase: cards.count(term, T=0, K=1, n=updates) for phase, term in phases.items()}
    scored, got = sum(times.values()) - times["pass 2"], row.get("network_calls/scoring", 0)
    assert scored * min(calls) <= got <= scored * max(calls)
    assert 0 < row["network_calls/update"] <= times["pass 2"] * max(calls)


def test_the_terms_are_counted():
    assert cards.count("0", T=8, K=3, n=2) == 0
    assert cards.count("2 (n - 1) K", T=8, K=3, n=4) == 18 and cards.count("T", T=8, K=3, n=1) == 8
    assert cards.total(cards.calls(METHODS["gdpo"])["1 update"]) == "T + K"
    assert cards.total(cards.calls(METHODS["gdpo-released"])["n updates"]) == "T + (2 n + 1) K"


STATES = {"gdpo": "3", "diffu-grpo": "1", "egspo": "4", "grpo": "4", "gdsd": "4", "stabledrl-block": "2", "spg": "2"}
STATES |= {"ppo": "T", "mdpo": "T", "tracerl": "T/2", "trace-block": "steps of a block", "replay-uniform": "4"}


def test_the_states_by_hand():
    assert {name: cards.states(METHODS[name]) for name in STATES} == STATES


# ------------------------------------------------------------------------------------------------------- the verb


@pytest.mark.parametrize(("name", "near"), [("gdpp", "did you mean gdpo"), ("xyzzy", "python -m minidrl methods lists")])
def test_an_unknown_method_is_one_line_with_the_nearest(name, near, capsys):
    assert main(["methods", name]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"minidrl: methods: got {name!r}") and error.count("\n") == 1 and near in error


def test_the_map_names_every_method(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [[m.name, m.title, m.source] for m in METHODS.values()]
    assert main(["methods", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == cards.method_rows()
