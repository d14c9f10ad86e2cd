"""Method options: the numbers and words of a row that a run may replace. And the precision of float32 products."""

import dataclasses
import shutil

import pytest
import torch

import tiny
from laws import refuses
from minidrl import __main__ as cli
from minidrl import algorithms as alg
from minidrl import methods
from minidrl.methods import with_options
from minidrl.run import config, files, runs, trainer

SHARED = ["aggregation", "refresh", "normalizer", "reduction"]
PENALTY = ["kl.form", "kl.beta", "kl.of", "kl.target"]


def test_an_option_replaces_one_number_and_leaves_the_table_alone():
    grpo, diffu = methods.METHODS["grpo"], methods.METHODS["diffu-grpo"]
    changed = with_options(grpo, {"plan.num_states": 7, "objective.epsilon_high": 0.3, "aggregation": "token_mean"})
    assert changed.plan.keywords == {"num_states": 7, "domain": "keep", "strata": True} and changed.plan.func is grpo.plan.func
    assert changed.objective.keywords == {"epsilon_low": 0.2, "epsilon_high": 0.3}
    assert changed.aggregation == "token_mean" and changed.credit is grpo.credit
    assert grpo.plan.keywords["num_states"] == 4 and grpo.aggregation == "sequence_mean"
    assert with_options(diffu, {"kl.beta": 0}).kl is None
    assert with_options(diffu, {"kl.beta": 0.5}).kl == methods.KL("k3", 0.5)
    assert diffu.kl == methods.KL("k3", 0.04) and with_options(grpo, {}) == grpo
    sandwich = with_options(methods.METHODS["spg"], {"extra.omega": 0.25}).extra
    assert sandwich.keywords == {"eubo_beta": 1.5, "omega": 0.25} and sandwich.func is alg.sandwich


# By extra.form, by the trainer, and by a file beside the base.
SAID_ELSEWHERE = {
    "dppo-topk": ["objective.form"],
    "unigrpo": ["plan.progress"],
    "stabledrl-cv": ["plan.constants"],
}


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_number_of_every_row_can_be_replaced_by_itself(name):
    """And the row is then the row: an option changes what it names and nothing else."""
    row = methods.METHODS[name]
    parts = {part: getattr(row, part) for part in ("plan", "credit", "objective", "extra") if getattr(row, part)}
    options = {f"{part}.{key}": value for part, p in parts.items() for key, value in p.keywords.items()}
    for elsewhere in SAID_ELSEWHERE.get(name, []):
        del options[elsewhere]
    options |= {key: getattr(row, key) for key in SHARED} | (
        {f"kl.{k}": v for k, v in row.kl._asdict().items()} if row.kl else {}
    )
    same = with_options(row, options)
    for field in dataclasses.fields(row):
        now, was = getattr(same, field.name), getattr(row, field.name)
        pair = (now.func, now.keywords) == (was.func, was.keywords) if field.name in parts else now == was
        assert pair, field.name


def test_a_word_that_the_row_says_elsewhere_is_no_option():
    """dppo-topk's divergence has its form in extra: one given to the objective would be ignored."""
    row = methods.METHODS["dppo-topk"]
    refuses(lambda: with_options(row, {"objective.form": "kl"}), "method_options.objective.form", "dppo-topk", "extra.form")
    assert with_options(row, {"extra.form": "kl"}).extra.keywords == {"form": "kl"}


def test_what_is_refused_names_the_key_the_value_and_what_is_allowed():
    grpo = methods.METHODS["grpo"]
    for key in ("reduction", "refresh", "aggregation", "normalizer"):
        refuses(lambda key=key: with_options(grpo, {key: "x"}), key, "'x'", "grpo")
    wrong = {"plan.num_states": "many", "plan.strata": 1, "plan.domain": 3, "objective.epsilon_low": True, "credit.eps": None}
    for key, value in wrong.items():
        refuses(lambda key=key, value=value: with_options(grpo, {key: value}), f"method_options.{key}", repr(value))
    refuses(lambda: with_options(grpo, {"plan.states": 1}), "method_options.plan.states", "grpo", "plan.num_states")
    refuses(lambda: with_options(grpo, {"extra.omega": 1}), "method_options.extra.omega", "grpo")
    for key in ("name", "title", "anchor", "needs.x", "kl", "kl.gamma"):
        refuses(lambda key=key: with_options(grpo, {key: "x"}), f"method_options.{key}", "grpo", "plan.num_states")
    for name, parts in {"grpo": 3, "stabledrl": 4, "egspo-sa": 3, "diffu-grpo": 3}.items():
        row = methods.METHODS[name]
        words = [f"{p}.{key}" for p in ("plan", "credit", "objective", "extra")[:parts] for key in getattr(row, p).keywords]
        words += PENALTY + ["step_value" if name == "egspo-sa" else "credit"] + SHARED
        words += ["anchor"] if name == "egspo-sa" else []
        words += ["plan"] if name == "grpo" else []
        listed = "allowed " + ", ".join(words)
        refuses(lambda row=row: with_options(row, {"nothing": 1}), "method_options.nothing", listed)


def test_a_row_that_reads_the_samplers_record_may_score_it_anew():
    """One that reads more of the record than the tokens' log-probabilities may not, nor one that reads none."""
    ppo = methods.METHODS["ppo"]
    assert with_options(ppo, {"anchor": "old"}) == dataclasses.replace(ppo, anchor="old")
    assert with_options(ppo, {"anchor": "behaviour"}) == ppo
    for value in ("none", 1, None, ["old"]):
        refuses(lambda value=value: with_options(ppo, {"anchor": value}), "anchor", repr(value), "behaviour, old")
    for name in ("dppo-topk", "reinforce", "grpo"):
        refuses(lambda name=name: with_options(methods.METHODS[name], {"anchor": "old"}), "method_options.anchor", name)


def test_the_number_of_states_may_be_none_which_is_all():
    row = with_options(methods.METHODS["replay-uniform"], {"plan.num_states": None})
    assert row.plan.keywords == {"num_states": None, "min_entropy": 0.0}
    assert with_options(methods.METHODS["reinforce"], {"plan.num_states": 3}).plan.keywords["num_states"] == 3


# ----------------------------------------------------------------------------------------------------------------- plan

ELBO_PLANS = {
    "elbo_time_plan": {"num_states": 3, "domain": "keep", "min_t": 1e-3},
    "elbo_count_plan": {"num_states": 3, "domain": "keep", "strata": True},
    "quadrature_plan": {"num_nodes": 3, "masks_per_node": 1, "counts": "bernoulli", "domain": "keep"},
    "arc_plan": {"num_states": 3, "domain": "keep"},
}


@pytest.mark.parametrize("name", ["gdpo", "gdpo-arcs", "gdpo-released", "grpo"])
@pytest.mark.parametrize("plan", ELBO_PLANS)
def test_an_estimator_of_the_elbo_can_be_chosen(plan, name):
    row = with_options(methods.METHODS[name], {"plan": plan})
    assert (row.plan.func, row.plan.keywords) == (getattr(alg, plan), ELBO_PLANS[plan])
    assert dataclasses.replace(row, plan=methods.METHODS[name].plan) == methods.METHODS[name], "nothing else changes"


def test_gdpo_with_arcs_is_the_row_of_that_name():
    chosen, row = with_options(methods.METHODS["gdpo"], {"plan": "arc_plan"}), methods.METHODS["gdpo-arcs"]
    assert (chosen.plan.func, chosen.plan.keywords) == (row.plan.func, row.plan.keywords)
    told = {name: getattr(row, name) for name in ("name", "title", "source", "differs", "plan", "credit", "objective")}
    assert dataclasses.replace(chosen, **told) == row


def test_the_numbers_of_a_chosen_plan_can_be_given_in_any_order():
    for options in ({"plan": "elbo_time_plan", "plan.min_t": 0.01}, {"plan.min_t": 0.01, "plan": "elbo_time_plan"}):
        assert with_options(methods.METHODS["gdpo"], options).plan.keywords["min_t"] == 0.01
    refuses(lambda: with_options(methods.METHODS["gdpo"], {"plan": "arc_plan", "plan.num_nodes": 2}), "plan.num_nodes", "gdpo")


def test_a_plan_that_is_unknown_or_of_another_kind_is_refused():
    for value in ("replay_plan", 3, None, ["arc_plan"]):
        refuses(lambda value=value: with_options(methods.METHODS["gdpo"], {"plan": value}), "plan", repr(value), "arc_plan")
    for name in ("ppo", "diffu-grpo", "stabledrl", "spg"):  # no ELBO, or an upper bound of the same states
        refuses(lambda name=name: with_options(methods.METHODS[name], {"plan": "arc_plan"}), "method_options.plan", name)


# --------------------------------------------------------------------------------------------------------------- credit

CREDITS = {
    "group_mean": (alg.group_mean, {}),
    "leave_one_out": (alg.leave_one_out, {}),
    "group_z_score": (alg.group_z_score, {"ddof": 1, "eps": 1e-4}),
}


@pytest.mark.parametrize("name", [name for name, row in methods.METHODS.items() if row.step_value == "none"])
@pytest.mark.parametrize("credit", CREDITS)
def test_credit_can_be_chosen(credit, name):
    row = with_options(methods.METHODS[name], {"credit": credit})
    assert (row.credit.func, row.credit.keywords) == CREDITS[credit]
    assert dataclasses.replace(row, credit=methods.METHODS[name].credit) == methods.METHODS[name], "nothing else changes"


def test_the_numbers_of_a_chosen_credit_can_be_given_in_any_order():
    for options in ({"credit": "group_z_score", "credit.ddof": 0}, {"credit.ddof": 0, "credit": "group_z_score"}):
        assert with_options(methods.METHODS["ppo"], options).credit.keywords == {"ddof": 0, "eps": 1e-4}
    refuses(lambda: with_options(methods.METHODS["grpo"], {"credit": "group_mean", "credit.ddof": 0}), "credit.ddof", "grpo")


def test_a_credit_that_is_unknown_or_knows_no_states_is_refused():
    refuses(lambda: with_options(methods.METHODS["ppo"], {"credit": "median"}), "credit", "'median'", ", ".join(CREDITS))
    for value in (3, None, ["group_mean"]):
        refuses(lambda value=value: with_options(methods.METHODS["ppo"], {"credit": value}), "credit", repr(value))
    for name in ("egspo-sa", "egspo-sa-released", "mdpo"):
        function = methods.METHODS[name].credit.func.__name__
        refuses(lambda name=name: with_options(methods.METHODS[name], {"credit": "group_mean"}), "credit", name, function)


# ------------------------------------------------------------------------------------------------------------------- KL


def test_a_row_without_a_kl_term_has_the_two_options_that_give_it_one_and_no_other():
    """What a config sets beside these for another row is left out where grpo is run instead."""
    grpo, diffu = methods.METHODS["grpo"], methods.METHODS["diffu-grpo"]
    assert [key for key in PENALTY if methods.has_option(grpo, key)] == ["kl.form", "kl.beta"]
    assert [key for key in [*PENALTY, "kl.gamma"] if methods.has_option(diffu, key)] == PENALTY
    assert methods.has_option(grpo, "plan.num_states") and not methods.has_option(grpo, "extra.omega")


@pytest.mark.parametrize("name", methods.METHODS)
@pytest.mark.parametrize("form", ["k1", "k2", "k3", "exact"])
def test_a_penalty_can_be_chosen_for_every_row(form, name):
    """The exact one asks for the feature it is made of; taking it off again gives back a row without."""
    base = methods.METHODS[name]
    row = with_options(base, {"kl.form": form, "kl.beta": 0.01, "kl.of": "ratio", "kl.target": "reference"})
    assert row.kl == methods.KL(form, 0.01) and ("kl_ref" in row.features) == (form == "exact")
    assert [f for f in row.features if f != "kl_ref"] == list(base.features) and not row.linear
    bare = with_options(row, {"kl.beta": 0})
    assert bare == dataclasses.replace(base, kl=None)
    assert with_options(row, {"kl.form": "k2"}).features == base.features


def test_a_penalty_needs_its_form_and_its_weight():
    grpo = methods.METHODS["grpo"]
    for key, value in (("beta", 1.0), ("form", "k3"), ("target", "old")):
        refuses(lambda key=key, value=value: with_options(grpo, {f"kl.{key}": value}), f"kl.{key}", repr(value), "both", "grpo")
    for form in ("k4", 3, ["k1"]):
        refuses(
            lambda form=form: with_options(grpo, {"kl.form": form, "kl.beta": 1.0}), "kl.form", repr(form), "k1, k2, k3, exact"
        )
    for beta in (-0.1, "much", True, None, float("nan"), float("inf")):
        refuses(lambda beta=beta: with_options(grpo, {"kl.form": "k3", "kl.beta": beta}), "kl.beta", repr(beta), "from 0")
    assert with_options(grpo, {"kl.form": "k3", "kl.beta": 0}).kl is None


def test_a_penalty_against_the_old_policy_is_one_of_ratios():
    """Its ll under the ratio's normaliser is all that is known of the old policy."""
    old = {"kl.form": "k3", "kl.beta": 0.1, "kl.target": "old"}
    assert with_options(methods.METHODS["grpo"], old).kl == methods.KL("k3", 0.1, target="old")
    refuses(
        lambda: with_options(methods.METHODS["grpo"], {**old, "kl.form": "exact"}), "kl.target", "'old'", "exact", "reference"
    )
    refuses(
        lambda: with_options(methods.METHODS["grpo"], {**old, "kl.of": "log_likelihood"}), "kl.of", "log_likelihood", "ratio"
    )
    refuses(lambda: with_options(methods.METHODS["reinforce"], old), "kl.target", "'old'", "none", "reference")
    exact = {"kl.form": "exact", "kl.beta": 0.1, "kl.of": "log_likelihood"}
    refuses(lambda: with_options(methods.METHODS["grpo"], exact), "kl.of", "exact", "ratio")
    free = with_options(methods.METHODS["grpo"], {"kl.form": "k2", "kl.beta": 0.1, "kl.of": "log_likelihood"})
    assert free.kl == methods.KL("k2", 0.1, of="log_likelihood")


def test_values_from_sampled_completions():
    """The sampler is then asked for them; rows whose states have no values have no such option."""
    row = methods.METHODS["egspo-sa"]
    drawn = with_options(row, {"step_value": "sampled"})
    assert drawn.step_value == "sampled" and drawn.needs == ("one_step_sampled",)
    assert with_options(row, {"step_value": "greedy"}) == row
    refuses(lambda: with_options(row, {"step_value": "none"}), "step_value", "'none'", "greedy, sampled")
    for name in ("egspo", "mdpo"):
        refuses(
            lambda name=name: with_options(methods.METHODS[name], {"step_value": "sampled"}), "method_options.step_value", name
        )
    refuses(lambda: with_options(row, {"step_value": "proposed"}), "step_value", "'proposed'", "greedy, sampled")


# ------------------------------------------------------------------------------------------- precision of float32 products


@pytest.fixture
def precision():
    """What torch has set, which is of the whole process; as it was afterwards."""
    before = torch.get_float32_matmul_precision()
    yield torch.get_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def pretraining(**changes) -> config.Pretrain:
    words = {"task": tiny.TASK, "network": config.Network(**tiny.SIZES), "evaluate": config.Evaluation(n=4)}
    words["sampler"] = dataclasses.replace(tiny.SAMPLER, length=8, block_length=8)
    return config.Pretrain(**{**words, "steps": 1, "batch_size": 4, **changes})


def test_a_run_has_its_own_precision_and_the_next_one_does_not_inherit_it(tmp_path, precision):
    base = tiny.checkpoint(tmp_path / "base")
    starts = {
        "train": lambda **key: trainer.Learner(tiny.settings(base, **key)),
        "pretrain": lambda **key: trainer.pretrain(pretraining(**key), tmp_path / f"run-{len(list(tmp_path.iterdir()))}"),
    }
    for start in starts.values():
        for wanted in ("high", "highest"):
            start(matmul_precision=wanted)
            assert precision() == wanted
        start(matmul_precision="high")
        start()
        assert precision() == "highest", "the default"


@pytest.mark.parametrize("kind", [tiny.settings, pretraining], ids=["train", "pretrain"])
def test_another_precision_is_refused(kind):
    for value in ("medium", "tf32", ""):
        refuses(lambda value=value: kind(matmul_precision=value), "matmul_precision", repr(value), "highest, high")


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_on_the_command_line_that_is_one_line_and_status_2(verb, tmp_path, capsys):
    recipe = {"train": "countdown_cpu", "pretrain": "countdown_base"}[verb]
    path = tiny.ROOT / "tiny_configs" / f"{recipe}.yaml"
    assert cli.main([verb, str(path), "--matmul_precision", "medium", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "minidrl: matmul_precision: got 'medium'; allowed highest, high\n"
    assert not (tmp_path / "run").exists()


def test_the_recipes_for_a_gpu_use_its_tensor_cores_for_float32_and_the_others_do_not():
    for path in (tiny.ROOT / "tiny_configs").glob("*.yaml"):
        kind = config.Pretrain if path.stem.endswith("_base") else config.Train
        wanted = "high" if path.stem.startswith(("llada_8b", "a2d_06b", "countdown_gpu")) else "highest"
        assert config.load(kind, path).matmul_precision == wanted, path.stem


def test_a_run_goes_on_with_the_precision_it_began_with(tmp_path):
    with runs.opened(tmp_path / "run", tiny.settings(), False), files.folder(tmp_path / "run/checkpoint-1") as part:
        shutil.copy(tmp_path / "run/config.yaml", part)

    def resumed():
        with runs.opened(tmp_path / "run", tiny.settings(matmul_precision="high"), True):
            pass

    refuses(resumed, "matmul_precision", "'high'", "'highest'")
