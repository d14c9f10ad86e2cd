"""Method options: the numbers and words of a method that a run may replace. And the precision of float32 products."""

import dataclasses

import pytest
import torch
import yaml

import tiny
from laws import refuses
from minidrl import algorithms as alg
from minidrl import methods
from minidrl.methods import METHODS, with_options
from minidrl.run import config, precheck, train

PARTS = ("plan", "credit", "objective", "extra")
PENALTY = ["kl.form", "kl.beta", "kl.of", "kl.target"]


def test_an_option_replaces_one_number_and_leaves_the_table_alone():
    grpo, diffu = METHODS["grpo"], METHODS["diffu-grpo-paper"]
    changed = with_options(grpo, {"plan.num_states": 7, "objective.epsilon_high": 0.3, "aggregation": "token_mean"})
    assert changed.plan.keywords == {"num_states": 7, "domain": "keep", "strata": True} and changed.plan.func is grpo.plan.func
    assert changed.objective.keywords == {"epsilon_low": 0.2, "epsilon_high": 0.3}
    assert changed.aggregation == "token_mean" and changed.credit is grpo.credit
    assert grpo.plan.keywords["num_states"] == 4 and grpo.aggregation == "sequence_mean"
    assert with_options(diffu, {"kl.beta": 0}).kl is None
    assert with_options(diffu, {"kl.beta": 0.5}).kl == methods.KL("k3", 0.5)
    assert diffu.kl == methods.KL("k3", 0.04) and with_options(grpo, {}) == grpo
    sandwich = with_options(METHODS["spg"], {"extra.omega": 0.25}).extra
    assert sandwich.keywords == {"eubo_beta": 1.5, "omega": 0.25} and sandwich.func is alg.sandwich


@pytest.mark.parametrize("name", METHODS)
def test_a_method_given_its_own_numbers_and_words_is_the_same(name):
    row = METHODS[name]
    options = {key: getattr(row, key.partition(".")[0]).keywords[key.partition(".")[2]] for key in methods.numbers(row)}
    words = [key for key in methods.choices(row) if key not in PARTS]
    options |= {key: getattr(row, key) for key in words} | {
        f"kl.{k}": v for k, v in (row.kl._asdict() if row.kl else {}).items()
    }
    same = with_options(row, options)
    for field in dataclasses.fields(row):
        now, was = getattr(same, field.name), getattr(row, field.name)
        pair = (now.func, now.keywords) == (was.func, was.keywords) if field.name in PARTS and was else now == was
        assert pair, field.name


def test_what_is_decided_elsewhere_is_no_option():
    """dppo-topk's divergence has its form in extra, unigrpo-igpo's plan is told of the updates, stabledrl-cv reads a file."""
    for name, key in {"dppo-topk": "objective.form", "unigrpo-igpo": "plan.progress", "stabledrl-cv": "plan.constants"}.items():
        refuses(lambda name=name, key=key: with_options(METHODS[name], {key: 1}), f"method_options.{key}", name)
    assert with_options(METHODS["dppo-topk"], {"extra.form": "kl"}).extra.keywords == {"form": "kl"}


WRONG = {
    "grpo": {
        "reduction": "x",
        "plan.num_states": "many",
        "plan.strata": 1,
        "plan.domain": 3,
        "objective.epsilon_low": True,
        "objective.epsilon_high": -0.1,
        "credit.eps": float("inf"),
        "credit.ddof": None,
        "plan": "replay_plan",
        "credit": ["group_mean"],
    },
    "ppo": {"anchor": "none", "credit": "median", "plan.min_entropy": float("nan")},
    "spg": {"extra.omega": 1.5, "extra.eubo_beta": 0},
    "egspo-sa-accounts": {"step_value": "proposed", "credit.schedule": 1},
    "diffu-grpo-paper": {"kl.form": "k4", "kl.beta": -0.1, "kl.of": 3, "kl.target": None},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in WRONG.items() for key in keys])
def test_a_wrong_value_is_refused_with_its_key_and_what_is_allowed(name, key):
    value = WRONG[name][key]
    refuses(lambda: with_options(METHODS[name], {key: value}), f"method_options.{key}: got {value!r}; allowed ")


def test_a_key_that_a_method_does_not_have_is_refused_with_those_that_it_has():
    listed = "allowed plan.num_states, plan.domain, plan.strata, credit.ddof, credit.eps, objective.epsilon_low, "
    listed += (
        "objective.epsilon_high, kl.form, kl.beta, kl.of, kl.target, aggregation, refresh, normalizer, reduction, credit, plan"
    )
    for key in ("plan.states", "extra.omega", "name", "anchor", "kl", "kl.gamma", 1):
        refuses(
            lambda key=key: with_options(METHODS["grpo"], {key: "x"}), f"method_options.{key}: no such option of grpo", listed
        )
    lacking = {
        "anchor": ("dppo-topk", "reinforce"),
        "step_value": ("egspo-accounts", "mdpo"),
        "credit": ("egspo-sa-accounts", "mdpo"),
    }
    # A bound of the whole sequence, which would count once for each of its tokens; or items of a token.
    lacking["reduction"] = ("stabledrl", "spg", "dppo-topk")
    # No ELBO, or an upper bound of the same states.
    lacking["plan"] = ("ppo", "diffu-grpo-paper", "stabledrl-sequence", "spg")
    for key, names in lacking.items():
        for name in names:
            refuses(lambda key=key, name=name: with_options(METHODS[name], {key: "x"}), f"method_options.{key}", name)


def test_choices_by_name():
    ppo, sa = METHODS["ppo"], METHODS["egspo-sa-accounts"]
    assert with_options(ppo, {"anchor": "old"}) == dataclasses.replace(ppo, anchor="old")
    drawn = with_options(sa, {"step_value": "sampled"})
    assert drawn.step_value == "sampled" and drawn.needs == ("one_step_sampled",)
    all_steps = with_options(METHODS["replay-uniform"], {"plan.num_states": None})
    assert all_steps.plan.keywords == {"num_states": None, "min_entropy": 0.0}


@pytest.mark.parametrize("name", ["gdpo-sequence", "gdpo-arcs", "gdpo", "grpo", "ppo"])
def test_an_estimator_of_the_elbo_or_a_credit_is_chosen_whole_and_its_numbers_in_any_order(name):
    row = METHODS[name]
    for part, words in methods.COMPONENTS.items():
        for word in words if part in methods.choices(row) else ():
            chosen = with_options(row, {part: word})
            assert getattr(chosen, part).func is getattr(alg, word)
            assert dataclasses.replace(chosen, **{part: getattr(row, part)}) == row, "nothing else changes"
    assert with_options(row, {"credit.ddof": 0, "credit": "group_z_score"}).credit.keywords == {"ddof": 0, "eps": 1e-4}
    refuses(lambda: with_options(row, {"credit": "group_mean", "credit.ddof": 0}), "credit.ddof", name)


def test_gdpo_with_arcs_is_the_method_of_that_name():
    chosen, row = with_options(METHODS["gdpo-sequence"], {"plan": "arc_plan"}), METHODS["gdpo-arcs"]
    assert (chosen.plan.func, chosen.plan.keywords) == (row.plan.func, row.plan.keywords)
    told = {name: getattr(row, name) for name in ("name", "family", "title", "source", "differs", "plan")}
    assert dataclasses.replace(chosen, **told) == row


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("egspo-exact", "order", "entropy"), ("mask-aware", "order", "margin"), ("egspo-exact", "top_p", 0.9)],
)
def test_the_choice_of_positions_is_not_scored_where_it_is_another(name, key, value):
    settings = tiny.settings("base", method=name, sampler=tiny.sampler_of("egspo-exact", **{key: value}))
    refuses(lambda: precheck.method_of(settings), f"sampler.{key}", repr(value), name)
    settings = dataclasses.replace(settings, method_options={"plan.num_states": 3})
    assert precheck.method_of(dataclasses.replace(settings, method="egspo-accounts")).anchor == "behaviour"


def test_masks_of_its_own_are_for_an_old_value_of_the_same_tokens():
    """Else the ratio of a token that the old value's masks show is its probability, less than 1 whatever the weights are."""
    for name, words in {"unigrpo-igpo": {}, "grpo": {"reduction": "step"}, "espo": {"reduction": "token"}}.items():
        settings = tiny.settings("base", method=name, method_options={**words, "refresh": "independent"})
        refuses(lambda settings=settings: precheck.method_of(settings), "method_options.refresh", "'independent'", "paired")
    for name in ("grpo", "diffu-grpo", "coupled-grpo", "tracerl", "gdsd"):
        settings = tiny.settings("base", method=name, method_options={"refresh": "independent"})
        assert precheck.method_of(settings).refresh == "independent"


# ------------------------------------------------------------------------------------------------------------------- KL


def test_a_penalty_can_be_given_to_every_method_and_taken_off():
    """The exact one asks for the feature it is made of."""
    for base in METHODS.values():
        for form in methods.KL_WORDS["form"]:
            row = with_options(base, {"kl.form": form, "kl.beta": 0.01, "kl.of": "ratio", "kl.target": "reference"})
            assert row.kl == methods.KL(form, 0.01) and ("kl_ref" in row.features) == (form == "exact")
            assert [f for f in row.features if f != "kl_ref"] == list(base.features) and not row.linear
            assert with_options(row, {"kl.beta": 0}) == dataclasses.replace(base, kl=None)
            assert with_options(row, {"kl.form": "k2"}).features == base.features


def test_a_penalty_needs_its_form_and_its_weight():
    """What a config sets beside these for another method is left out where grpo is run instead."""
    grpo, diffu = METHODS["grpo"], METHODS["diffu-grpo-paper"]
    assert [key for key in PENALTY if methods.has_option(grpo, key)] == ["kl.form", "kl.beta"]
    assert [key for key in [*PENALTY, "kl.gamma"] if methods.has_option(diffu, key)] == PENALTY
    assert methods.has_option(grpo, "plan.num_states") and not methods.has_option(grpo, "extra.omega")
    for key, value in (("beta", 1.0), ("form", "k3"), ("target", "old")):
        refuses(lambda key=key, value=value: with_options(grpo, {f"kl.{key}": value}), f"kl.{key}", repr(value), "both", "grpo")
    assert with_options(grpo, {"kl.form": "k3", "kl.beta": 0}).kl is None


def test_a_penalty_against_the_old_policy_is_one_of_ratios():
    """Its ll under the ratio's normaliser is all that is known of the old policy."""
    grpo, old = METHODS["grpo"], {"kl.form": "k3", "kl.beta": 0.1, "kl.target": "old"}
    assert with_options(grpo, old).kl == methods.KL("k3", 0.1, target="old")
    refuses(lambda: with_options(grpo, {**old, "kl.form": "exact"}), "kl.target", "'old'", "exact", "reference")
    refuses(lambda: with_options(grpo, {**old, "kl.of": "log_likelihood"}), "kl.of", "log_likelihood", "ratio")
    refuses(lambda: with_options(METHODS["reinforce"], old), "kl.target", "'old'", "none", "reference")
    exact = {"kl.form": "exact", "kl.beta": 0.1, "kl.of": "log_likelihood"}
    refuses(lambda: with_options(grpo, exact), "kl.of", "exact", "ratio")
    free = with_options(grpo, {"kl.form": "k2", "kl.beta": 0.1, "kl.of": "log_likelihood"})
    assert free.kl == methods.KL("k2", 0.1, of="log_likelihood")


# ------------------------------------------------------------------------------------------- precision of float32 products


@pytest.fixture
def precision():
    """What torch has set, which is of the whole process; as it was afterwards."""
    before = torch.get_float32_matmul_precision()
    yield torch.get_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_a_run_has_its_own_precision_and_the_next_one_does_not_inherit_it(tmp_path, precision):
    settings = tiny.settings(tiny.checkpoint(tmp_path / "base"))
    for wanted in ("high", "highest", "high", None):
        train.start(dataclasses.replace(settings, **({"matmul_precision": wanted} if wanted else {})))
        assert precision() == (wanted or "highest")


# ---------------------------------------------------------------------------------------------------------------- names

GONE = {old: new for old, new in methods.RENAMED.items() if old not in METHODS}
OTHER = {old: new for old, new in methods.RENAMED.items() if old in METHODS}  # another method has the name today


def test_an_old_name_still_finds_its_method_and_is_not_listed():
    assert all(METHODS[old] is METHODS[new] for old, new in GONE.items())
    assert GONE.keys().isdisjoint([*METHODS]) and set(methods.RENAMED.values()) <= set(METHODS)
    with pytest.raises(KeyError):
        METHODS["gdpp"]


@pytest.mark.parametrize("old", methods.RENAMED)
def test_a_run_from_before_goes_on_with_its_method(old, tmp_path, caplog):
    """Its config.yaml has no mark; that of a run of today has, and says what it means."""
    settings, run, own = tiny.settings("base"), tmp_path / "config.yaml", tmp_path / "own.yaml"
    (tmp_path / "metrics.jsonl").touch(), config._remark.cache_clear()
    before = config.to_dict(settings) | {"method": old, "method_options": {}}
    for path in (run, own):
        path.write_text(yaml.safe_dump(before))
    assert config.of_run(config.Train, tmp_path).method == methods.RENAMED[old]
    assert config.load(config.Train, run).method == methods.RENAMED[old]
    assert f"what was called {old} is now {methods.RENAMED[old]}" in caplog.text
    caplog.clear(), config._remark.cache_clear()
    today = GONE.get(old, old)
    assert config.load(config.Train, own).method == config.load(config.Train, own, {"method": old}).method == today
    assert old in caplog.text and methods.RENAMED[old] in caplog.text, "a remark says which method that is, and which it was"
    run.write_text(config.dumped(dataclasses.replace(settings, method=today, method_options={})))
    caplog.clear(), config._remark.cache_clear()
    assert config.load(config.Train, run).method == config.of_run(config.Train, tmp_path).method == today
    assert not caplog.text


def test_no_run_continues_as_another_method(tmp_path):
    """The same file that started it, whose name has another meaning now, is refused."""
    for old, new in OTHER.items():
        settings = tiny.settings("base", method=old, method_options={})
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict(settings)))
        refuses(lambda settings=settings: config.check_unchanged(settings, tmp_path), "method", repr(old), repr(new))
