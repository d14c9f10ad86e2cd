"""The study of noise in the ratio: its lines, its runs, what a weight says, and the page made of them."""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch

import tiny
from minidrl import algorithms as alg

signal, study = tiny.script("weight_signal"), tiny.script("instability")

# ------------------------------------------------------------------------------------------------- what a weight says


@pytest.mark.parametrize("length, states", [(6, 1), (6, 2), (7, 3), (12, 8)])
def test_the_noise_is_that_of_the_shipped_plan(length, states):
    """Responses of the model, 40,000 plans: a token has the mean a(l) and the deviation abs(a(l)) over the positions."""
    copies, noise = 40_000, torch.Generator().manual_seed(1)
    blank = torch.zeros(copies, 0, dtype=torch.long)
    response, keep = torch.zeros(copies, length, dtype=torch.long), torch.ones(copies, length, dtype=torch.bool)
    rollout = alg.Rollout(blank, blank.bool(), response, keep, response, torch.zeros(copies, length).double(), 1, None)
    plan = alg.elbo_count_plan(rollout, noise, num_states=states, domain="keep", strata=True)
    offset = torch.linspace(-1, 1, length, dtype=torch.float64)
    offset /= offset.square().mean().sqrt()  # deviation 1 over the positions of a response
    count = plan.scored.sum(-1)
    a = -(0.2 + 1.8 * (count / length) ** 2)
    logp = torch.where(plan.scored, (a[..., None] * (1 + offset)), 0.0)
    ll = alg.reduce_logp(logp, plan, level="sequence", normalizer=None)
    assert float(ll.var()) == pytest.approx(signal.estimator_variance(signal.solved(length), states), rel=0.03)
    assert float(ll.mean()) == pytest.approx(sum(signal.solved(length)), abs=5 * float(ll.std()) / 200)


def test_all_tokens_hidden_leave_no_choice_of_a_mask():
    """With the log-probability -1 everywhere the counts matter no more, and one token is always hidden alone."""
    assert signal.estimator_variance([-1.0], 1) == 0.0
    two = signal.estimator_variance([-1.0, -1.0], 1)  # l = 1: (2 / 1)^2 1 (2 - 1) / (2 - 1) = 4; l = 2: 0
    assert two == pytest.approx(2.0)


@pytest.mark.parametrize("length, states", [(6, 4), (7, 2), (256, 8)])
def test_strata_share_the_counts_out(length, states):
    parts = [signal.stratum(length, states, k) for k in range(states)]
    assert [sum(part) for part in parts] == pytest.approx([1.0] * states)
    assert [sum(column) / states for column in zip(*parts, strict=True)] == pytest.approx([1 / length] * length)


@pytest.mark.parametrize(
    "delta, spread, edge", [(1.0, 0.0, 1.8), (2.5, 0.0, -3.0), (1.0, 4.0, 1.8), (0.5, 0.7, 0.0), (1.0, 76.0, 1.8)]
)
def test_the_area_under_the_curve_by_simulation(delta, spread, edge):
    noise = torch.Generator().manual_seed(2)
    good, bad = (sign * delta + spread * torch.randn(400_000, generator=noise).double() for sign in (1, -1))
    good, bad = good.clamp(max=edge), bad.clamp(max=edge)
    found = float((good > bad).double().mean() + (good == bad).double().mean() / 2)
    assert signal.auc(delta, spread, edge) == pytest.approx(found, abs=0.003)


def test_weights_without_noise_are_those_of_the_objective():
    """Against (8.3): the group's other log-ratios are 0."""
    logs = torch.tensor([2.5] + [0.0] * (signal.GROUP - 1), dtype=torch.float64)
    right = alg.self_normalized_weights(logs[None, :, None], signal.GROUP, log_cap=math.log(signal.CAP))[0, 0, 0]
    still = torch.zeros(1, signal.GROUP, dtype=torch.float64)
    for delta, divisor in ((2.5, 1.0), (5.0, 2.0)):
        found = signal.weights(still, delta, 0.0, 0.0, divisor)  # each response in turn the one that moved
        assert found.tolist() == [pytest.approx([float(right)] * signal.GROUP)]


@pytest.mark.parametrize("own, others, divisor", [(0.7, 0.3, 1.0), (90.0, 60.0, 1.0), (90.0, 60.0, 256.0)])
def test_each_response_is_in_turn_the_one_that_moved(own, others, divisor):
    """Against (8.3), one response at a time; where nothing moved, the mean weight is that of equals, whatever the noise."""
    normal = torch.randn(5, signal.GROUP, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = signal.weights(normal, 1.5, own, others, divisor)
    for j in range(signal.GROUP):
        logs = others * normal
        logs[:, j] = 1.5 + own * normal[:, j]
        given = (logs / divisor).flatten()[None, :, None], signal.GROUP
        right = alg.self_normalized_weights(*given, log_cap=math.log(signal.CAP)).unflatten(1, normal.shape)[0, :, j, 0]
        assert found[:, j].tolist() == pytest.approx(right.tolist(), abs=1e-12)
    assert float(signal.weights(normal, 0.0, others, others, divisor).mean()) == pytest.approx(1 / signal.GROUP, abs=1e-12)


def test_shared_masks_are_silent_where_nothing_changed():
    assert signal.deviation(64, 2, "shared", 0.0) == 0.0 < signal.deviation(64, 2, "fresh", 0.0)
    one, two = (signal.deviation(64, 2, "shared", d) for d in (1.0, -2.0))
    assert two == pytest.approx(2 * one)
    # An update that doubles every log-probability moves the ELBO by itself: the noise is that of the estimate.
    whole = signal.deviation(64, 2, "shared", sum(signal.solved(64)))
    assert math.sqrt(2) * whole == pytest.approx(signal.deviation(64, 2, "fresh", 0.0))


def test_the_stored_signal_is_what_the_code_finds():
    lines = [json.loads(line) for line in (study.RESULTS / "weight_signal.json").read_text().splitlines()]
    cases = list(itertools.product(signal.DRIFTS, signal.SCALES, signal.MASKS, signal.LENGTHS, signal.STATES))
    assert [(r["drift"], r["scale"], r["masks"], r["length"], r["states"]) for r in lines] == cases
    fresh = signal.measured(lengths=(12,), states=(1, 2), groups=2048)
    for line in fresh:
        old = next(r for r in lines if all(r[key] == line[key] for key in ("drift", "scale", "masks", "length", "states")))
        assert [old["deviation"], old["auc"], old["at_cap"]] == pytest.approx(
            [line["deviation"], line["auc"], line["at_cap"]], rel=1e-4
        )
        assert old["mean_weight"] == pytest.approx(line["mean_weight"], abs=0.008)  # 2,048 groups


# ------------------------------------------------------------------------------------------------- the lines and the runs


@pytest.fixture(scope="module")
def weak_base():
    """A base after two steps: the rehearsal is about the run, not about what it starts from."""
    return study.base(steps=2).state_dict()


SANDWICHED = ("stabledrl, two states", "spg")
TWO_STATES = (*SANDWICHED, "stabledrl, two states, no sandwich", "grpo, two states")


def test_lines_differ_in_the_ratio_alone():
    for scale, divisor in study.SCALES.items():
        for name, row in study.rows(scale).items():
            assert row.normalizer == divisor and row.credit.func is alg.group_mean and row.kl is None, name
            assert row.plan.func is alg.mean_field_plan or row.plan.keywords["num_states"] == 1 + (name in TWO_STATES), name
    caps = {name: row.objective.keywords["cap"] for name, row in study.rows("sequence").items() if name.startswith("stabledrl")}
    assert caps["stabledrl"] == 6.0 == 1 + 5
    assert [caps[f"stabledrl, epsilon {x}"] for x in (1, 100, 1000)] == [2.0, 101.0, 1001.0]


def test_lines_with_two_states_are_the_published_rows():
    """The row stabledrl, and SPG's but for the length of a block and new masks for each update, which its code draws."""
    lines, table = study.rows("sequence"), study.methods.METHODS
    assert lines["stabledrl, two states"] == table["stabledrl"]
    assert lines["stabledrl, two states, no sandwich"] == replace(table["stabledrl"], extra=None)
    spg, row = study.rows("token mean")["spg"], table["spg"]
    for part in ("objective", "extra", "credit", "aggregation", "anchor", "reduction", "normalizer", "kl"):
        assert getattr(spg, part) == getattr(row, part), part
    assert spg.plan.func is row.plan.func and spg.refresh == "independent"
    assert spg.plan.keywords == row.plan.keywords | {"block_length": study.LENGTH} and spg.extra.func is alg.sandwich


def test_grpo_with_two_states_is_grpo_but_for_the_states():
    """Its control with one state differs from it in nothing else."""
    for scale in study.SCALES:
        one, two = study.rows(scale)["grpo, fresh masks"], study.rows(scale)["grpo, two states"]
        assert replace(two, plan=one.plan) == one
        assert two.plan.func is one.plan.func and two.plan.keywords == one.plan.keywords | {"num_states": 2}


@pytest.mark.parametrize("name", ["stabledrl", *SANDWICHED])
def test_the_sandwich_acts_with_two_states_alone(name, weak_base):
    """The gradient of a line with its sandwich, and of the same line without: equal with one state."""
    model = study.denoiser.build(study.SIZES, study.Alphabet(), 0).double().eval()
    model.load_state_dict(weak_base)
    line = study.rows("token mean")[name]
    rollout, reward = study.collect(model, 0, 0)
    plan = line.plan(rollout, torch.Generator().manual_seed(0))
    anchor = study.methods.reduced(line, plan, rollout, study.feat.features(model, rollout, plan, temperature=1.0))
    found = []
    for row in (line, replace(line, extra=None)):
        adv = study.methods.advantages(row, plan, rollout, reward)
        loss = study.methods.method_loss(row, plan, rollout, study.graph(model, rollout, plan), adv, anchor, None)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    difference = float((found[0] - found[1]).norm() / found[1].norm())
    assert (difference < 1e-9) is (name == "stabledrl") and (difference > 0.01) is (name != "stabledrl")


def one_update(name: str, start: dict) -> list:
    """Plans and anchors of the updates on the first rollout, and the weights they began with."""
    model = study.denoiser.build(study.SIZES, study.Alphabet(), 0).double().eval()
    model.load_state_dict(start)
    method, optimizer = study.rows("token mean")[name], study.trainer.make_optimizer(model, study.OPTIMIZER)
    rollout, reward = study.collect(model, 0, 0)
    return [
        (plan, feature, anchor) for plan, feature, anchor, *_ in study.updates(model, method, rollout, reward, optimizer, 0, 0)
    ]


@pytest.mark.parametrize(
    "name, plans, still",
    [
        ("grpo, fresh masks", 4, False),
        ("grpo, shared masks", 4, True),
        ("grpo, one plan", 1, True),
        ("grpo, mean field", 1, True),
        ("grpo, mean field, prompt masking", 4, False),
    ],
)
def test_masks_are_fresh_shared_or_kept(name, plans, still, weak_base):
    """How many plans the updates on a rollout have, and whether the first log-ratio is exactly 0."""
    seen = one_update(name, weak_base)
    assert len({tuple(plan.hidden.flatten().tolist()) for plan, *_ in seen}) == plans
    plan, feature, anchor = seen[0]
    ll = alg.reduce_logp(feature["logp"], plan, level="sequence", normalizer=torch.full((64,), float(study.LENGTH)))
    assert bool(((ll - anchor).abs() < 1e-12).all()) is still


def test_a_study_is_resumed_and_never_repeated(tmp_path, weak_base, capsys):
    path, names = tmp_path / "instability.json", ["grpo, fresh masks", "stabledrl, epsilon 100"]
    study.study(path, names[:1], ["token mean"], 1, 4, weak_base)
    before = path.read_text()
    study.study(path, names, ["token mean", "sequence"], 1, 4, weak_base)
    found = study.stored(path)
    assert path.read_text().startswith(before)
    wanted = {(scale, name, 0) for name in names for scale in ("token mean", "sequence")}
    assert len(found) == 4 and {(r["scale"], r["method"], r["seed"]) for r in found} == wanted
    assert study.missing(found, names, ["token mean", "sequence"], 1) == []
    assert study.missing(found, names, ["sequence"], 2) == [("sequence", name, 1) for name in names]
    for r in found:
        assert r["updates"] == 4 and r["stopped"] is None and 0 < r["reward"][0] < 1
        assert r["norm_max"] == max(r["norm"]) > 0 < r["spread"][0]
    mean = {r["scale"]: r["spread"][0] for r in found if r["method"] == names[0]}
    assert (
        mean["sequence"] > 5 * mean["token mean"]
    )  # the first rollouts are the same, the ratio of one is that of the other ^ 12


# ---------------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def page():
    return tiny.script("instability_page")


def a_run(name: str, seed: int, reward: list[float], scale: str = "token mean", norm: tuple = (1.0, 5.0, 2.0)) -> dict:
    """A run of a hundred updates at each of three given rewards, every reward ten times: a mean of ten updates each."""
    curves = {key: [0.5] * 30 for key in ("spread", "bypass", "ess")}
    curves |= {"reward": [x for x in reward for _ in range(10)], "norm": [x for x in norm for _ in range(10)]}
    facts = {"method": name, "scale": scale, "seed": seed, "updates": 300, "stopped": None, "every": 10}
    return facts | {"final_reward": reward[-1], "norm_max": max(norm)} | curves


def test_a_line_of_the_table_by_hand(page):
    runs = [a_run("stabledrl", 0, [0.4, 0.9, 0.8]), a_run("stabledrl", 3, [0.5, 0.6, 0.4], norm=(7.0, 1.0, 1.0))]
    row = page.table_row("stabledrl", runs)
    half = 12.7062 * 0.2  # Student's t at 1 degree of freedom times s / sqrt(2), with s = 0.4 / sqrt(2)
    assert row["seeds"] == "0, 3" and row["reward at the end"] == f"0.600 [{0.6 - half:.3f}, {0.6 + half:.3f}]"
    assert row["gained"].startswith("0.150 [") and row["runs that end below their start"] == "1 of 2"
    assert row["below the peak"] == "0.150" and row["largest gradient norm"] == "7 in updates 1 to 10"


def test_a_peak_is_as_long_as_the_end():
    """By hand: ten updates at 1.0 among 0.5 lift the mean of a hundred by 0.05; a hundred at 0.9 are a peak of 0.9."""
    run = a_run("stabledrl", 0, [0.5, 0.5, 0.5])
    assert study.fallen(run) == 0.0
    run["reward"][12] = 1.0
    assert study.fallen(run) == pytest.approx(0.05)
    assert study.fallen(a_run("stabledrl", 0, [0.4, 0.9, 0.7])) == pytest.approx(0.2)
    assert study.fallen(a_run("stabledrl", 0, [0.4, 0.6, 0.9])) == 0.0
    assert study.fallen(run | {"reward": [0.2, 0.6]}) == 0.0  # stopped after twenty updates: all of it is the end


@pytest.mark.parametrize(
    "ends, word",
    [
        ([[0.5, 0.6, 0.4]] * 2, "collapses: every run"),
        ([[0.5, 0.6, 0.4], [0.5, 0.6, 0.6]], "collapses in 1 of 2"),
        ([[0.5, 0.9, 0.7]] * 2, "falls back"),
        ([[0.5, 0.9, 0.7], [0.5, 0.6, 0.6]], "1 of 2 runs end more"),
        ([[0.5, 0.6, 0.6]] * 2, "no run ends more"),
    ],
)
def test_words_follow_from_the_numbers(ends, word, page):
    assert word in page.verdict_of([a_run("stabledrl", seed, reward) for seed, reward in enumerate(ends)])


def test_pairs_are_paired_by_seed_and_corrected(page):
    """StableDRL is 0.1, 0.2, 0.3 above GRPO on the seeds that both have; a second pair doubles the smaller p at least."""
    ends = {"grpo, fresh masks": [0.5, 0.6, 0.1, 0.9], "stabledrl": [0.6, 0.8, 0.4], "clip-only": [0.6, 0.8, 0.4]}
    results = [a_run(name, seed, [0.4, 0.5, x]) for name, values in ends.items() for seed, x in enumerate(values)]
    first, second = page.differences(results, "token mean")
    assert (first["pair"], first["seeds"], first["mean"]) == ("stabledrl - grpo, fresh masks", 3, pytest.approx(0.2))
    # t = 0.2 / (0.1 / sqrt(3)) = 2 sqrt(3); two degrees of freedom: p = 1 - t / sqrt(2 + t^2)
    p = 1 - 2 * math.sqrt(3) / math.sqrt(14)
    assert float(first["p"]) == pytest.approx(p, abs=5e-4) and first["adjusted"] == pytest.approx(2 * p)
    assert (second["pair"], second["adjusted"]) == ("stabledrl - clip-only", 1.0)
    assert page.differences(results, "sequence") == []


TWO_LINES = {  # three seeds each
    "grpo, fresh masks": [0.30, 0.31, 0.29],
    "grpo, two states": [0.80, 0.82, 0.81],
    "stabledrl": [0.60, 0.62, 0.61],
    "stabledrl, two states, no sandwich": [0.61, 0.60, 0.62],
    "stabledrl, two states": [0.90, 0.89, 0.91],
}


def two_lines(left_out: str = "") -> list[dict]:
    names = [name for name in TWO_LINES if name != left_out]
    runs = [(name, scale, seed, x) for name in names for scale in study.SCALES for seed, x in enumerate(TWO_LINES[name])]
    return [a_run(name, seed, [0.4, 0.5, x], scale) for name, scale, seed, x in runs]


def test_what_a_second_state_does_is_judged_by_its_numbers(page):
    """By hand: 0.51 for GRPO, nothing for StableDRL (0.01, -0.02, 0.01), 0.29 for the sandwich, -0.20 for the cure."""
    text = " ".join(page.two_states(two_lines()).split())
    assert "**GRPO** ends at 0.810 [" in text and "with two states, at 0.300 [" in text
    assert "Of its runs with two, 0 of 3 and 0 of 3 end below their start" in text
    found = {row["pair"]: row for row in page.differences(two_lines(), "sequence", page.TWO_PAIRS)}
    assert [row["mean"] for row in found.values()] == pytest.approx([0.51, 0.0, 0.29, -0.2])
    assert [row["adjusted"] < 0.05 for row in found.values()] == [True, False, True, True]
    assert text.count("(undecided, Holm p = ") == 2 and text.count("(Holm p = ") == 6  # one and three of four, two scales
    smallest = min(found.values(), key=lambda row: float(row["p"]))
    assert smallest["adjusted"] == pytest.approx(4 * float(smallest["p"]), rel=0.05)  # among these four, not all pairs


@pytest.mark.parametrize("name", TWO_LINES)
def test_without_one_of_its_lines_nothing_is_said_of_two_states(name, page):
    assert page.two_states(two_lines(name)) == ""


def test_the_links_of_the_argument_are_counted_over_all_noisy_lines(page):
    """One grows and rises, one grows and ends below its start, one falls; the fourth is not noisy."""
    made = {
        "stabledrl": ([0.3, 0.6], [0.4, 0.5, 0.6]),
        "clip-only": ([0.3, 0.6], [0.4, 0.6, 0.3]),
        "grpo, fresh masks": ([0.6, 0.3], [0.4, 0.5, 0.6]),
        "grpo, shared masks": ([0.1, 0.6], [0.4, 0.5, 0.6]),
    }
    results = []
    for name, ((first, last), reward) in made.items():
        results.append(a_run(name, 0, reward) | {"spread": [first] * 15 + [last] * 15})
    text = " ".join(page.chain(results).split())
    assert "of the 3 lines that have a ratio whose spread is above 0.2 nats in the first hundred updates" in text
    assert (
        "it grows in 2, in 2 of them in every run, `grpo, " not in text and "it grows in 2, in 2 of them in every run." in text
    )
    assert "of these 2, 1 with a run that ends below its start, of the 1 others 0." in text
    assert "1 lines have a run that ends below its start. Of these `clip-only` on the token mean rises first." in text
    assert "5 to 5 times the largest of the first hundred updates. The largest of all follow it, in 0 of 1 runs" in text
    assert "those of `stabledrl` on the token mean reach 5 to 5 times" in text
    assert "| 0 | 1 | 5 | 201 to 210 | 2 | 0.60 | 0.30 |" in text and "| stabledrl | 0.30 | 50 % |" in text


def test_a_fall_follows_the_best_hundred(page):
    """By hand: best at 0.9 in updates 101 to 200; ten updates at 0.85 are no fall of 0.1, and one of 0.05 none until 0.7."""
    run = a_run("stabledrl", 0, [0.4, 0.9, 0.7], norm=(1.0, 4.0, 9.0))
    run["reward"][15] = 0.85
    run["reward"][3], run["norm"][20] = 0.1, 6.0
    assert page.fall(run) == page.fall(run, 0.06) == 20 and page.fall(run, 0.04) == 15 and page.fall(run, 0.3) is None
    assert page.norms(run) == (1.0, 4.0, 9.0) and page.rises_and_falls([run])
    assert not page.rises_and_falls([run, a_run("stabledrl", 1, [0.4, 0.5, 0.3])])
    assert not page.rises_and_falls([a_run("stabledrl", 1, [0.4, 0.5, 0.6])])


def test_the_trained_model_has_the_noise_that_the_notebook_prints(page):
    printed = (page.ROOT / "notebooks" / "06_stabledrl.ipynb").read_text(encoding="utf-8")
    for states, told in page.TRAINED.items():
        assert f"ELBO, K = {states}" + " " * 31 + told in printed
    for name, (told, size) in page.TRAINED_MEANS.items():
        assert f"{name:41s} {told}" in printed and f"cap 5: {name}: {size} of 8" in printed


def test_lines_with_a_clip_of_the_norm_differ_in_it_alone(page, weak_base):
    """In the method nothing differs, in the optimiser the bound of the norm; an update is another one."""
    lines, names = study.rows("sequence"), [name for name in study.rows("sequence") if name.endswith(study.CLIPPED)]
    assert len(names) == 2
    moved = {}
    for name in names:
        plain = name.removesuffix(study.CLIPPED)
        assert lines[name] == lines[plain] and study.optimizer_of(plain) == study.OPTIMIZER
        assert study.optimizer_of(name) == replace(study.OPTIMIZER, max_grad_norm=0.2)
        for line in (name, plain):
            model = study.denoiser.build(study.SIZES, study.Alphabet(), 0).double().eval()
            model.load_state_dict(weak_base)
            found = study.run(line, "sequence", model, 0, 4)
            moved[line] = torch.cat([p.detach().flatten() for p in model.parameters()]), found["norm"]
        assert moved[name][1][0] == moved[plain][1][0] > 0.2 and not torch.equal(moved[name][0], moved[plain][0])


def test_a_dual_clip_drops_bad_answers_with_large_ratios_and_no_others():
    """The weight of an answer in the update: as with GRPO's clip but for those whose ratio is above 3."""
    rows, logs = study.rows("sequence"), torch.tensor([-2.0, 0.0, 1.0, 1.2, 5.0], dtype=torch.float64)
    assert math.exp(1.0) < study.BOUND < math.exp(1.2)
    for name in ("grpo, fresh masks", "grpo, mean field, prompt masking"):
        weights = {}
        for line, sign in itertools.product((name, name + study.DUAL), (1.0, -1.0)):
            ll = logs.clone().requires_grad_()
            rows[line].objective(ll, torch.zeros(5).double(), torch.full((5,), sign).double(), 5).loss.sum().backward()
            weights[line, sign] = ll.grad
        assert torch.equal(weights[name, 1.0], weights[name + study.DUAL, 1.0])
        plain, dual = weights[name, -1.0], weights[name + study.DUAL, -1.0]
        assert torch.equal(plain[:3], dual[:3]) and (plain[3:] > 3).all() and (dual[3:] == 0).all()
        assert replace(rows[name + study.DUAL], objective=rows[name].objective) == rows[name]


def test_without_a_clip_every_answer_counts_by_its_ratio():
    rows, logs = study.rows("sequence"), torch.tensor([-2.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    for name in ("grpo, fresh masks", "grpo, mean field, prompt masking"):
        for sign in (1.0, -1.0):
            ll, adv = logs.clone().requires_grad_(), torch.full((4,), sign, dtype=torch.float64)
            rows[name + study.FREE].objective(ll, torch.zeros(4).double(), adv, 4).loss.sum().backward()
            assert torch.allclose(ll.grad, -sign * logs.exp(), rtol=1e-12)
        assert replace(rows[name + study.FREE], objective=rows[name].objective) == rows[name]


def test_each_half_of_the_dual_clip_drops_large_ratios_of_one_sign_alone():
    """Good answers above 1.2, bad ones above 3; all others count by their ratio."""
    rows, logs = study.rows("sequence"), torch.tensor([-2.0, 0.0, 1.0, 1.2, 5.0], dtype=torch.float64)
    for name in ("grpo, fresh masks", "grpo, mean field, prompt masking"):
        for half, side, kept in ((study.GOOD, 1.0, 2), (study.BAD, -1.0, 3)):
            for sign in (1.0, -1.0):
                ll, adv = logs.clone().requires_grad_(), torch.full((5,), sign, dtype=torch.float64)
                rows[name + half].objective(ll, torch.zeros(5).double(), adv, 5).loss.sum().backward()
                expected = logs.exp() * (torch.arange(5) < kept) if sign == side else logs.exp()
                assert torch.allclose(-sign * ll.grad, expected, rtol=1e-12)
            assert replace(rows[name + half], objective=rows[name].objective) == rows[name]


def test_halves_of_the_dual_clip_have_a_table_of_their_own(page):
    ends = {study.FREE: [0.4, 0.4], study.GOOD: [0.3, 0.2], study.BAD: [0.6, 0.9], study.DUAL: [0.7, 0.9]}
    lines = {name + what: ends[what] for name in ("grpo, fresh masks", "grpo, mean field, prompt masking") for what in ends}
    results = [
        a_run(n, seed, [0.5, 0.5, e[seed]], scale) for scale in study.SCALES for n, e in lines.items() for seed in (0, 1)
    ]
    said = " ".join(page.further_clips(results).split())
    assert said.startswith("## Whose large ratios?")
    for pair, gap in {
        "grpo, fresh masks, good clipped - grpo, fresh masks, no clip": "-0.150",
        "grpo, fresh masks, bad clipped - grpo, fresh masks, no clip": "0.350",
        "grpo, fresh masks, dual clip - grpo, fresh masks, bad clipped": "0.050",
    }.items():
        assert len(re.findall(rf"\| {pair} +\| [^|]+\| +{gap} \[", said)) == 2


def test_further_clips_have_a_table_of_their_own_and_no_pair_elsewhere(page):
    ends = {"": [0.4, 0.6, 0.5], study.CLIPPED: [0.4, 0.6, 0.3], study.DUAL: [0.4, 0.6, 0.9], study.FREE: [0.4, 0.4, 0.45]}
    lines = {name + what: ends[what] for name in ("grpo, fresh masks", "grpo, mean field, prompt masking") for what in ends}
    lines |= {"stabledrl": [0.4, 0.5, 0.7], "stabledrl, mean field, prompt masking": [0.4, 0.5, 0.8]}
    results = [a_run(name, seed, end, scale) for scale in study.SCALES for name, end in lines.items() for seed in (0, 1)]
    said = " ".join(page.further_clips(results).split())
    assert (said.count("Of 8 runs 8 collapse"), said.count("Of 8 runs 0 collapse")) == (1, 2)
    for pair, gap in {
        "grpo, fresh masks, norm 0.2 - grpo, fresh masks": "-0.200",
        "grpo, fresh masks, dual clip - grpo, fresh masks": "0.400",
        "grpo, fresh masks, no clip - grpo, fresh masks": "-0.050",
        "stabledrl - grpo, fresh masks, dual clip": "-0.200",
        "stabledrl, mean field, prompt masking - grpo, mean field, prompt masking, dual clip": "-0.100",
    }.items():
        assert len(re.findall(rf"\| {pair} +\| [^|]+\| +{gap} \[", said)) == 2
    assert page.further_clips([r for r in results if not r["method"].endswith(study.DUAL)]) == ""
    assert not any(line.endswith(study.LATER) for pair in (*page.PAIRS, *page.TWO_PAIRS) for line in pair)
    argument = page.chain(study.stored(study.RESULTS / "instability.json"))
    assert not any(clip in argument for clip in study.LATER)


def test_what_is_not_run_is_said(page):
    """Once for all tables; a line at one scale only with the scale; a line without a ratio has no scale to miss."""
    results = [a_run(name, seed, [0.4, 0.5, 0.6]) for seed in (0, 1) for name in ("stabledrl", "spg")]
    said = page.not_run(results)
    assert said.startswith("Not run: ") and "; stabledrl (ratio of the sequence)." in said
    assert "reinforce; " in said and "spg" not in said
    assert "clip-only; " in said and said.count(";") == len(study.rows("sequence")) - 2
    assert "clip-only" not in page.section(results, "token mean")
    lines = [(name, scale) for scale in study.SCALES for name in study.rows(scale) if name not in page.NO_SCALE]
    lines += [(name, "sequence") for name in page.NO_SCALE]
    everything = [a_run(name, 0, [0.4, 0.5, 0.6], scale) for name, scale in lines]
    assert page.not_run(everything) == ""


PAGES = ("instability.md", "instability_measured.md")


@pytest.mark.parametrize("stale", PAGES)
def test_both_pages_are_what_the_stored_numbers_give(stale, page, tmp_path):
    page.main(["--check"])
    for name in PAGES:
        text = (page.ROOT / "docs" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("0.506", "0.606", 1) if name == stale else text, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"{stale} is not current"):
        page.main(["--check", "--out", str(tmp_path)])


def tables_of(text: str) -> list[list[list[str]]]:
    """Of each table of a page its rows below the rule, as cells."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] for lines in blocks]


def test_the_short_page_is_short(page):
    """1,400 words (with a letter or a digit), three tables of eleven rows and six columns, the question before the first."""
    text = (page.ROOT / "docs" / "instability.md").read_text(encoding="utf-8")
    assert sum(any(c.isalnum() for c in word) for word in text.split()) <= 1400
    found = tables_of(text)
    assert len(found) <= 3 and all(len(rows) <= 11 and len(rows[0]) <= 6 for rows in found)
    assert text.index("what helps?") < text.index("## The words") < text.index("\n|")
    assert max(map(len, text.splitlines())) <= 141


def test_the_short_tables_are_rows_of_the_long_ones(page):
    """Each reward and each difference of the short page stands in the measured one, and the rewards of runs average to it."""
    short, long = ((page.ROOT / "docs" / name).read_text(encoding="utf-8") for name in PAGES)
    _, rewards, compared = tables_of(short)
    for row in rewards:
        assert all(cell in long for cell in row[2:4]), row
    for row in compared:
        assert all(cell in long for cell in (row[1], row[3])), row
    runs = tables_of(long)[-2:]
    for row in rewards:
        for rows, told in zip(runs, row[2:4], strict=True):
            ends = [list(map(float, line[1:])) for line in rows if line[0] == row[0].strip("`")]
            assert bool(ends) is bool(told) and all(sum(x) / 5 == pytest.approx(float(told[:5]), abs=1e-3) for x in ends), row


def test_the_short_tables_follow_from_the_numbers(page):
    """By hand: a pair that differs by 0.3 in every run is told apart, one of equal means is undecided; one line collapses."""
    ends = {"grpo, fresh masks": [0.30, 0.31, 0.29], "stabledrl": [0.60, 0.62, 0.61], "clip-only": [0.61, 0.60, 0.62]}
    results = [
        a_run(n, seed, [0.4, 0.5, x], scale) for n, y in ends.items() for scale in study.SCALES for seed, x in enumerate(y)
    ]
    rewards, compared = (
        dict((r[0], r[1:]) for r in tables_of(make(results))[0]) for make in (page.reward_table, page.compared_table)
    )
    assert rewards["`grpo, fresh masks`"][-1] == "3/3, 3/3" and rewards["`stabledrl`"][-1] == "0/3, 0/3"
    assert rewards["`reinforce`"][1:] == ["", "", ""]
    assert "undecided" not in compared["`stabledrl` - `grpo`, fresh masks"][1]
    assert compared["`stabledrl` - cut alone"][1] == "1, undecided" and compared["`stabledrl` - no ratio"] == [""] * 4


def test_the_measured_page_has_every_run(page):
    """Each line at each scale, a number a seed; and the sections that other pages link to."""
    text = (page.ROOT / "docs" / "instability_measured.md").read_text(encoding="utf-8")
    results = study.stored(study.RESULTS / "instability.json")
    for scale, rows in zip(study.SCALES, tables_of(text)[-2:], strict=True):
        lines = [name for name in study.rows(scale) if study.of_line(results, scale, name)]
        assert [row[0] for row in rows] == lines and all(len(row) == 6 and all(row) for row in rows)
    words = ("What was run", "What follows", "The argument, link by link", "Two masked states")
    words += ("A further clip", "Whose large ratios?", "How much a weight says")
    heads = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert heads == [*words, *(f"Ratio of the {scale}" for scale in study.SCALES), "Run by run"]


def test_the_config_of_full_size_has_what_the_page_recommends(page):
    settings = study.config.load(study.config.Train, page.ROOT / "tiny_configs" / "llada_8b_full.yaml")
    assert (
        settings.method_options == {"normalizer": "kept_length", "refresh": "paired"}
        and settings.sampler.length == page.PUBLISHED
    )
    lines = study.stored(study.RESULTS / "weight_signal.json")
    states = study.methods.METHODS[settings.method].plan.keywords["num_states"]
    before, after = (
        page.case(lines, drift="1 nat a response", length=256, states=states, scale=scale, masks=masks)
        for scale, masks in (("sequence", "fresh"), ("token mean", "shared"))
    )
    assert before["auc"] < 0.51 and before["at_cap"] + before["nothing"] > 0.95
    assert after["auc"] > 0.99 and after["at_cap"] == after["nothing"] == 0
