"""CLAIMS.md: what its rows name exists, its numbers are those of another path, and its verdicts follow from its numbers."""

import itertools
import json
import math
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

import tiny
from minidrl import algorithms as alg
from minidrl import features as feat
from minidrl import findings, oracle

ROOT = Path(__file__).parents[1]
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").glob("*.py")))
claims = tiny.script("claims")
ROWS = [claim for group in claims.LEDGER.values() for claim in group]
RUN = [claim for claim in ROWS if claim.measure]


@pytest.fixture(scope="module")
def results():
    return claims.measured(claims.LEDGER)


# ------------------------------------------------------------------------------------------------------ what rows name


def unknown(decided_by: str) -> list[str]:
    """The parts of a reference that name nothing in the repository."""
    found = []
    for part in decided_by.split(", "):
        law, command = re.fullmatch(r"`(law_\w+)`", part), re.fullmatch(r"docs/results\.md \(command (\d+)\)", part)
        page = re.fullmatch(r"(docs/\w+\.md)", part)
        file, notebook = (
            re.fullmatch(r"`(?:python )?(\w+/\w+\.py)`", part),
            re.fullmatch(r"notebook (\d\d[a-z]?) \((\d+\.\d+)\)", part),
        )
        known = law and f"\ndef {law[1]}(" in SOURCES
        known = known or command and 1 <= int(command[1]) <= len(claims.RECORDED)
        known = known or (file and (ROOT / file[1]).is_file()) or (page and (ROOT / page[1]).is_file())
        study = re.fullmatch(r"`python -m minidrl compare (studies/\w+\.yaml)`", part)
        known = known or study and (ROOT / study[1]).is_file()
        known = known or notebook and any(rf"\\tag{{{notebook[2]}}}" in text for text in notebooks(notebook[1]))
        found += [] if known else [part]
    return found


def notebooks(number: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob(f"{number}_*.ipynb")]


@pytest.mark.parametrize("claim", RUN, ids=lambda claim: claim.text[:40])
def test_what_a_row_names_exists(claim):
    assert unknown(claim.decided_by) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "`law_of_nothing`",
        "`tests/test_nothing.py`",
        "notebook 05 (99.9)",
        "notebook 99 (50.1)",
        "docs/results.md (command 9)",
        "docs/nothing.md",
        "faith",
    ],
)
def test_a_reference_to_nothing_is_found(wrong):
    assert unknown(f"`law_eubo`, {wrong}") == [wrong]


def test_commands_name_files_and_verbs_that_exist():
    verbs = set(re.findall(r"^python -m minidrl (\w+)", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))
    for words in claims.RECORDED.values():
        assert (ROOT / words["config"]).is_file() and (ROOT / words["where"]).is_file()
        assert re.match(r"python -m minidrl (\w+) ", words["command"])[1] in verbs
        for name in re.findall(r"\S+\.(?:py|ya?ml|json)", words["command"]):
            assert (ROOT / name).is_file(), name


def test_sources_are_papers_that_the_project_cites():
    files = [*(ROOT / "minidrl").glob("*.py"), *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "ERRATA.md"]
    cited = set(re.findall(r"\d{4}\.\d{5}", "\n".join(path.read_text(encoding="utf-8") for path in files)))
    for claim in ROWS:
        assert set(re.findall(r"\d{4}\.\d{5}", claim.source)) <= cited, claim.source
        assert re.search(r"\d{4}\.\d{5}|minidrl", claim.source), claim.text


# ---------------------------------------------------------------------------------------------------- recorded numbers


def table_line(text: str, label: str) -> list[str]:
    """The first row of a Markdown text that begins with a label."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return next(cells[1:] for cells in lines if cells[0] == label)


def test_recorded_numbers_are_those_of_the_page():
    methods = claims.RECORDED["methods"]
    assert {words["where"] for words in claims.RECORDED.values()} == {"docs/results.md"}
    text = (ROOT / "docs" / "results.md").read_text()
    for job, heading in {"countdown": "", "blocks": "## Block diffusion"}.items():
        own = claims.RECORDED[job]
        for label, values in own["solved"].items():
            line = table_line(text[text.index(heading) :], label)
            assert [float(x) for x in line[:-1]] == values and len(values) == len(own["seeds"])
    for label, values in methods["solved"].items():
        written = [x.split(" ")[0] for x in table_line(text.partition("| method | learning rate 3e-4 |")[2], label)[:2]]
        assert written == ["" if x is None else str(x) for x in values.values()], label
    assert float(table_line(text, "base, temperature 1")[0]) == methods["base"]
    flat = " ".join(text.split())
    assert all(words["command"] in flat for words in claims.RECORDED.values())
    assert f"{methods['puzzles']} held-out puzzles" in flat


def test_instability_is_read_as_the_benchmark_writes_it():
    """BENCHMARKS.md, the rewards at the end to two decimals; the reward before is the same for all."""
    assert all(run["updates"] == 1000 for run in claims.instability())
    assert {0, 1, 2} <= {run["seed"] for run in claims.instability()} <= set(range(5))
    text, start = (ROOT / "BENCHMARKS.md").read_text(), 0.44
    for label, method in (("grpo, fresh masks", "grpo, fresh masks"), ("stabledrl, fresh masks", "stabledrl")):
        ends = [float(x) for x in table_line(text, label)[0].split(", ")]
        assert claims.reward_gained(method).value == pytest.approx(statistics.mean(ends) - start, abs=0.02)


def test_a_pair_of_lines_is_decided_by_the_corrected_test():
    """The interval of the ledger leaves 0 out where the page's p, corrected by Holm, is below 0.05, and has the mean inside."""
    decided = {}
    for scale in claims.study.SCALES:
        for a, b, values, _, adjusted in claims.page.paired_lines(claims.instability(), scale):
            found = claims.reward_above(a, b, scale)
            assert (found.low > 0 or found.high < 0) is (adjusted < 0.05), (a, b, scale)
            decided[adjusted < 0.05] = found.value == pytest.approx(statistics.mean(values))
    assert decided == {True: True, False: True}


# ------------------------------------------------------------------------------------------------------- the document


def test_claims_md_is_what_the_generator_writes(results):
    assert (ROOT / "CLAIMS.md").read_text() == claims.document(results)


@pytest.mark.slow
def test_the_number_of_threads_changes_nothing(results):
    torch.set_num_threads(2)
    try:
        fresh = tiny.script("claims")  # its caches are empty
        assert fresh.document(fresh.measured(fresh.LEDGER)) == claims.document(results)
    finally:
        torch.set_num_threads(1)


def test_check_sees_a_stale_file_and_writes_nothing(results, tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "measured", lambda ledger: results)
    path = tmp_path / "CLAIMS.md"
    check = ["--check", "--out", str(path)]
    with pytest.raises(SystemExit, match="not current"):
        claims.main(check)
    assert not path.exists()
    claims.main(["--out", str(path)])
    claims.main(check)
    stale = path.read_text().replace("does not hold", "holds", 1)
    path.write_text(stale)
    with pytest.raises(SystemExit, match="not current"):
        claims.main(check)
    assert path.read_text() == stale


# ------------------------------------------------------------------------------------------------------------ verdicts


def unseen(claim, expected):
    """What is said to happen, not always to happen, is not refuted by one setting."""
    return claims.UNSEEN if claim.can_happen and expected == claims.FAILS else expected


@pytest.mark.parametrize("claim", RUN, ids=lambda claim: claim.text[:40])
def test_verdicts_follow_from_the_numbers(claim):
    sign, bound = claim.criterion.split()
    good, bad = float(bound) + (1 if ">" in sign else -1), float(bound) - (1 if ">" in sign else -1)
    low, high = sorted((good, bad))
    for cases, between in ((True, claims.FAILS), (False, claims.UNDECIDED)):
        for ends, expected in (((good, good), claims.HOLDS), ((bad, bad), claims.FAILS), ((low, high), between)):
            found = claims.Found(statistics.mean(ends), *ends, cases)
            assert claims.row(claim, found)["verdict"] == unseen(claim, expected)
    edge = claims.Found(*[float(bound)] * 3, cases=True)
    assert claims.verdict(edge, claim.criterion) == (claims.HOLDS if "=" in sign else claims.FAILS)


def test_opposite_numbers_turn_the_ledger_round(results):
    """Every number mirrored at its bound: what held does not hold, and what did not decide still does not."""

    def mirrored(claim, found):
        if found is None:
            return claim, None
        bound = float(claim.criterion.split()[1])
        value, high, low = (2 * bound - x for x in (found.value, found.low, found.high))
        return claim, replace(found, value=value, low=low, high=high)

    other = {claims.HOLDS: claims.FAILS, claims.FAILS: claims.HOLDS, claims.UNSEEN: claims.HOLDS}
    checked = 0
    for claim, found in itertools.chain(*results.values()):
        before, after = claims.row(claim, found)["verdict"], claims.row(*mirrored(claim, found))["verdict"]
        on_one_side = found is not None and not found.low <= float(claim.criterion.split()[1]) <= found.high
        checked += on_one_side
        assert after == unseen(claim, other[before]) if on_one_side else before not in other or found.cases
    assert checked > 20


def test_no_verdict_is_typed_in():
    words = {claims.HOLDS, claims.FAILS, claims.UNSEEN, claims.UNDECIDED, claims.NOT_RUN}
    for claim in ROWS:
        assert words.isdisjoint({claim.source, claim.decided_by, claim.seeds, claim.number, claim.criterion})
        assert claim.measure is None or claim.decided_by and claim.seeds and claim.criterion.split()[0] in claims.SIGNS
    assert claims.verdict(None, "") == claims.NOT_RUN


def test_only_sentences_about_what_goes_wrong_can_be_unseen():
    """A better method, or a bound, is a sentence that a number refutes."""
    bad = ("collapses", "falls back", "spread further", "gradients grow")
    assert all(claim.can_happen == any(word in claim.text for word in bad) or "StableDRL rises" in claim.text for claim in ROWS)


def test_a_study_that_was_looked_at_before_pays_for_it():
    """GDPO's lead over diffu-GRPO: p after Holm times three looks is above 0.05, so that the interval has to contain 0."""
    pair, level = ("likelihoods", ("gdpo", 1), ("diffu-grpo", 1), claims.after), claims.LOOKS["likelihoods"]
    every = findings.pairs(list(claims.of_study("likelihoods").values()))
    (once,) = (found for found in every if {found.a.method, found.b.method} == {"gdpo", "diffu-grpo"})
    assert once.p < 0.05 < level * once.p
    found = claims.difference(*pair)
    assert found.low < 0 < found.value


def test_what_is_no_number_is_no_verdict():
    for values in ([math.nan], [1.0, math.nan]):
        with pytest.raises(ValueError, match="found: got"):
            claims.cases(values)


# ----------------------------------------------------------------------------------------------------------- intervals


def test_intervals_cover_what_they_should():
    """95 of 100, by simulation: seeds of a normal variable, two evaluations of puzzles, a share."""
    noise, hits, n = random.Random(0), {"runs": 0, "points": 0, "share": 0}, 2000
    for _ in range(n):
        found = claims.runs([noise.gauss(3.0, 2.0) for _ in range(3)])
        hits["runs"] += found.low <= 3 <= found.high
        a, b = (100 / 512 * sum(noise.random() < p for _ in range(512)) for p in (0.3, 0.2))
        found = claims.percent_difference(a, b, 512)
        hits["points"] += found.low <= 10 <= found.high
        found = claims.share(sum(noise.random() < 0.1 for _ in range(200)), 200)
        hits["share"] += found.low <= 0.1 <= found.high
    assert all(0.93 < count / n < 0.975 for count in hits.values()), hits


def test_a_share_of_nothing_is_not_above_nothing():
    assert claims.verdict(claims.share(0, 200), "<= 0") == claims.UNDECIDED
    assert claims.share(0, 10).high == pytest.approx(0.2775, abs=1e-4)  # Wilson's limit, as tabulated


# ------------------------------------------------------------------------------------------- numbers, by another path


def printed(number: str, pattern: str) -> list[float]:
    """Numbers that a notebook has printed."""
    cells = json.loads(notebooks(number)[0])["cells"]
    outputs = ["".join(out.get("text", "")) for cell in cells if cell["cell_type"] == "code" for out in cell["outputs"]]
    return [float(x) for x in re.search(pattern, "\n".join(outputs)).groups()]


def test_variances_are_those_of_the_notebooks():
    (random_table,) = printed("02", r"shares: ([\d.]+) and")
    assert claims.share_of_first(claims.count_and_mask(0)) == pytest.approx(random_table, abs=0.005)
    small, long = printed("02", r"share of the count, by L: \{6: ([\d.]+), .*256: ([\d.]+)\}")
    assert claims.share_of_first(claims.count_and_mask_solved(6)) == pytest.approx(small, abs=0.0006)
    assert claims.share_of_first(claims.count_and_mask_solved(256)) == pytest.approx(long, abs=0.0006)
    (quadrature,) = printed("05a", r"nodes, Bernoulli, at 256 tokens: ([\d.]+) of the error of independent counts")
    assert claims.quadrature_error_solved(256) == pytest.approx(quadrature, abs=0.0006)


@pytest.mark.parametrize("length", [4, 6])
def test_solved_variances_are_those_of_all_masks(length):
    """The solved model and the key token as denoisers: what every mask gives, count by count."""
    a, size = claims.solved(length), 2**length
    own, key = (torch.zeros(size, length, 2, dtype=torch.float64) for _ in range(2))
    own[:, 1::2, 1] = key[::2, :, 1] = -60.0  # certain of token 0
    for row in range(1, size):
        p = math.exp(2 * a[row.bit_count() - 1])
        own[row, ::2] = torch.tensor([p, 1 - p], dtype=torch.float64).log()
    key[1::2] = torch.tensor([math.exp(-1), 1 - math.exp(-1)], dtype=torch.float64).log()
    for table, found in ((own, claims.count_and_mask_solved(length)), (key, claims.count_and_mask_key_token(length))):
        total = claims.hidden_sums(oracle.TabularDenoiser.from_hidden_table(table), (0,) * length)
        given = [[length / l * s for m, s in total.items() if len(m) == l] for l in range(1, length + 1)]
        parts = statistics.pvariance(map(statistics.mean, given)), statistics.mean(map(statistics.pvariance, given))
        assert found == pytest.approx(parts, rel=1e-9)
    x, w = numpy.polynomial.legendre.leggauss(3)
    total = claims.hidden_sums(oracle.TabularDenoiser.from_hidden_table(own), (0,) * length)
    variance = 0.0
    for t, weight in zip((x + 1) / 2, w / 2, strict=True):
        chance = torch.tensor([t ** len(m) * (1 - t) ** (length - len(m)) for m in total], dtype=torch.float64)
        variance += weight**2 * claims.variance(chance, torch.tensor(list(total.values()), dtype=torch.float64) / t)
    independent = sum(claims.count_and_mask_solved(length)) / 3
    assert claims.quadrature_error_solved(length) == pytest.approx(math.sqrt(variance / independent), rel=1e-9)
    assert claims.share_of_first(claims.count_and_mask_key_token(length)) == pytest.approx(1 / 3)


def test_what_one_nat_does_to_a_weight_by_arithmetic():
    """Noise of sd s >> 1: each ratio is at the cap or nothing by a coin. 2 nats carry a share 2 phi(0) / s of the responses
    across, and the cap is worth E[1 / (1 + Bin(15, 1/2))] = (1 - 2^-16) / 8. Without noise: e / (e + 15) - 1 / (1 + 15 e)."""
    a, length = claims.solved(256), 256
    halves = statistics.mean(statistics.pvariance(part) for part in (a[:128], a[128:]))
    s = math.sqrt(2 * (length**2 * halves + claims.count_and_mask_solved(length)[1]) / 2)
    assert s == pytest.approx(75.9, abs=0.1)
    gain = 2 / (s * math.sqrt(2 * math.pi)) * (1 - 2**-16) / 8
    found = claims.weight_of_one_nat()
    assert found.value == pytest.approx(gain / (math.e / (math.e + 15) - 1 / (1 + 15 * math.e)), rel=0.1)
    assert found.low < found.value < found.high < 0.05


def test_variances_are_those_of_the_shipped_plans():
    """20,000 draws of each plan: three calls by count and by quadrature, two by count and by a pair."""
    model, rollout = claims.table(1), claims.rollout_of([claims.text_of(1)] * 20_000)

    def std(plan):
        logp = feat.features(model, rollout, plan, temperature=1.0, size=1 << 16)["logp"]
        return float(alg.reduce_logp(logp, plan, level="sequence", normalizer=None).std())

    noise = torch.Generator().manual_seed(0)
    count = {k: std(alg.elbo_count_plan(rollout, noise, num_states=k, domain="keep", strata=False)) for k in (2, 3)}
    pairs = alg.complementary_plan(rollout, noise, num_states=2, domain="keep")
    pair = std(pairs)
    logp = feat.features(model, rollout, pairs, temperature=1.0, size=1 << 16)["logp"]
    single = float((2 * pairs.weight[..., None] * logp)[0].sum(-1).std())  # the first of each pair, whose weight is a half
    words = {"num_nodes": 3, "masks_per_node": 1, "counts": "bernoulli", "domain": "keep"}
    assert claims.pairs_over_the_count_form(1) == pytest.approx((pair / count[2]) ** 2, rel=0.05)
    assert claims.pairs_over_singles(1) == pytest.approx(2 * (pair / single) ** 2, rel=0.05)
    assert claims.quadrature_error(1) == pytest.approx(std(alg.quadrature_plan(rollout, noise, **words)) / count[3], rel=0.05)


@pytest.mark.parametrize("seed", [0, 5])
def test_spreading_calls_is_the_law_of_total_variance(seed):
    count, mask = claims.count_and_mask(seed)
    assert claims.spread_over_times(seed) == pytest.approx((count + mask / 2) / (count / 2 + mask / 2), rel=1e-9)


@pytest.mark.parametrize("length", [8, 256])
def test_floor_counts_by_arithmetic(length):
    x, w = numpy.polynomial.legendre.leggauss(3)
    t = (x + 1) / 2
    assert claims.lost_by_floor_counts(length) == pytest.approx(1 - float((w / 2 * (t * length // 1) / (t * length)).sum()))


def test_the_eubo_by_loops():
    """Over all masks: sum_i log(sum_M 1[i in M] P(M) (L / |M|) p_i(M)^beta) / beta, against the exact log p."""
    below, masks = 0, [m for m in oracle.all_subsets(3) if m]
    for seed in range(40):
        model, response = claims.table(1000 + seed, 3, 3), list(itertools.product(range(3), repeat=3))[seed % 27]
        logp = {m: oracle.token_logp(model, response, m) for m in masks}
        inner = [sum(logp[m][i].exp().item() ** 1.5 / len(m) / math.comb(3, len(m)) for m in masks if i in m) for i in range(3)]
        below += sum(math.log(x) for x in inner) / 1.5 < oracle.any_order_log_likelihood(model, response).item()
    assert claims.eubo_below_log_p(models=40).value == below / 40 > 0


@pytest.mark.parametrize("seed", [0, 3])
def test_the_error_of_the_token_score_by_the_oracle(seed):
    w = claims.walks(seed, "low_confidence")
    paths = oracle.trajectories(w.model, "low_confidence", 1.0, 1)
    mean = oracle.expected_reward(paths, claims.accepted).item()
    score = oracle.score_expectation(paths, lambda path: oracle.token_score(w.model, path), lambda y: claims.accepted(y) - mean)
    error = oracle.table_gradient(w.model, score) - w.gradient
    assert claims.gradient_error(seed, "low_confidence") == pytest.approx(float(error.norm() / w.gradient.norm()), rel=1e-9)


def test_the_line_and_the_mask_by_hand():
    """DRPO's w = 1 - sign(adv) (pi - mu) / delta; at 12.5 its smallest value is that of the widest move on the grid."""
    pi, mu, adv = claims.tokens_on_a_grid()
    assert claims.weights("drpo", pi, mu, adv).tolist() == pytest.approx((1 - adv * (pi - mu) / 0.15).tolist(), abs=1e-6)
    assert claims.smallest_weight("drpo-released").value == pytest.approx(1 - float((pi - mu).abs().max()) / 12.5, abs=1e-6)


def test_where_tokens_settle_is_what_the_notebook_prints():
    """Notebook 09 prints start, mu +- delta, no region, PPO, SPO, DPPO, DRPO, DRPO 12.5, at first with momentum."""
    outputs = [out for cell in json.loads(notebooks("09")[0])["cells"] for out in cell.get("outputs", [])]
    lines = [line for out in outputs for line in "".join(out.get("text", "")).splitlines()]
    for mu, sign in ((0.02, 1.0), (0.5, 1.0), (0.5, -1.0), (0.95, -1.0)):
        start = f"{mu:.2f}  {sign:+.0f} "
        line = next(line.removeprefix(start) for line in lines if line.startswith(start))
        target, *_, dppo, drpo, _ = map(float, line.split())
        assert claims.settle("dppo-tv", mu, sign) == pytest.approx(abs(dppo - target), abs=0.002)
        assert claims.settle("drpo", mu, sign) == pytest.approx(abs(drpo - target), abs=0.002)


def test_what_the_clip_lets_through_grows_with_the_ratio():
    """One bad response of ratio e^x is the update, over N; normalised, it is the response alone: weight 1 at most."""
    g, adv = claims.group_gradients(), claims.GROUP_ADV
    alone = adv[1].abs() * g[1].norm() / (adv.abs() * g.norm(dim=1)).max()
    found = claims.step_over_bound("grpo", (20.0,)).value
    assert found == pytest.approx(float(alone) * math.exp(20) / 4, rel=1e-6)
    assert claims.step_over_bound("stabledrl", (30.0,)).value < float(alone) + 1


@torch.no_grad()
def test_fresh_masks_by_all_pairs():
    """Every pair of masks, one for the old value and one for the new."""
    model, masks, means = claims.table(0, 3, 3), [m for m in oracle.all_subsets(3) if m], []
    chance = [1 / 3 / math.comb(3, len(m)) for m in masks]
    for response in itertools.product(range(3), repeat=3):
        value = [3 / len(m) * sum(oracle.token_logp(model, response, m).values()).item() for m in masks]
        pairs = itertools.product(zip(chance, value, strict=True), repeat=2)
        means.append(sum(p * q * math.exp(a - b) for (p, a), (q, b) in pairs))
    found = claims.mean_ratio_of_fresh_masks()
    assert (found.value, found.low, found.high) == pytest.approx((statistics.median(means), min(means), max(means)))
