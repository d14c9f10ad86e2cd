"""README.md and docs/ show what the module says today."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import laws
import tiny
from minidrl import algorithms as alg
from minidrl import cards, estimators, oracle
from minidrl.__main__ import main
from minidrl.features import features
from test_mutants import MUTANTS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def readme():
    return tiny.script("readme")


def flat(name: str) -> str:
    """A page without its line breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_the_tables_are_current(readme):
    """Both to the letter: the estimators' values are exact."""
    parts = readme.parts()
    for name, table in parts.items():
        page = readme.page_of(name, readme.pages())
        assert readme.between(page.read_text(), name) == table, f"{page.name}: table {name!r} is out of date: run `make pages`"


def test_a_stale_table_is_seen_and_mended(readme):
    page, table = "a\n<!-- methods -->\n| x |\n<!-- /methods -->\nb\n| x |\n", readme.parts()["methods"]
    assert readme.between(page, "methods") != table
    assert readme.between(readme.written(page, "methods", table), "methods") == table
    assert readme.written(page, "methods", "| y |") == page.replace("| x |", "| y |", 1)


def test_a_table_stands_on_one_page(readme, tmp_path):
    pages = [tmp_path / "a.md", tmp_path / "b.md"]
    for text, holders in (("", 0), ("<!-- x -->\n| 1 |\n<!-- /x -->\n", 2)):
        for page in pages:
            page.write_text(text)
        with pytest.raises(ValueError, match=f"got {holders} pages"):
            readme.page_of("x", pages)
    pages[0].write_text("")
    assert readme.page_of("x", pages) == pages[1]


def test_every_marker_is_generated(readme):
    text = "\n".join(page.read_text() for page in readme.pages())
    assert set(re.findall(r"^<!-- /?(\w+) -->$", text, re.MULTILINE)) == set(readme.parts())


def test_the_counts_are_current(readme):
    """ "More than" N equations, laws, mutants, methods: true, and not much less than there is. That no mutant survives is
    what test_mutants asserts."""
    found = {
        "equations": len({tag for tags in laws.TAGS.values() for tag in tags}),
        "laws": len(laws.LAWS),
        "wrong versions": len(MUTANTS),
        "methods as rows of one table": len(readme.map_rows()),
    }
    text = flat("README.md")
    for words, number in found.items():
        (told,) = re.findall(rf"more than (\d+) {words}", text, re.IGNORECASE)
        assert int(told) <= number < 1.3 * int(told), f"README.md: there are {number} {words} now"
    rows = len(cards.method_rows())
    assert f"the {rows - len(readme.map_rows())} rows named `-released`" in flat("docs/methods.md")


def test_the_numbers_of_the_readme_are_those_of_the_results():
    """The means of three seeds, and what the ledger says about claims and about the simplest control."""
    text, results, ledger = flat("README.md"), (ROOT / "docs" / "results.md").read_text(), flat("CLAIMS.md")
    countdown = results.partition("## Block diffusion")[0]
    means = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in countdown.splitlines() if line.startswith("|")}
    for words, label in (
        ("three seeds rise from {} % to", "base, temperature 1"),
        ("% to {} %, self-training", "after RL, temperature 1"),
        ("reaches {} %", "self-training, temperature 1"),
    ):
        assert words.format(means[label]) in text, label
    seconds, solved = re.search(
        r"`make train` took (\d+) s on two quiet cores and ended at ([\d.]+) %", " ".join(results.split())
    ).groups()
    assert f"{seconds} s on two quiet CPU cores" in text and f"to {solved} %" in text
    total, rest = re.search(r"(\d+) claims: (\d+ hold.*?were not run here)", ledger).groups()
    assert f"has {total} claims" in text and rest in text
    value, low, high, verdict = re.search(
        r"RL solves more Countdown puzzles than fine-tuning .*? points: (\S+) \[(\S+), (\S+)\] \| > 0 +\| (.*?) +\|", ledger
    ).groups()
    assert f"{value} points, 95 % interval [{low}, {high}]" in text and verdict == "not distinguishable"


def test_predicted_memory_is_what_the_command_prints(capsys):
    """docs/llada_8b.md: config, weights, GPUs, peak."""
    text = (ROOT / "docs" / "llada_8b.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `((?:llada_8b|a2d)_\w+\.yaml)` \|.*\| (\d) \| ([\d.]+) GB \|$", text, re.MULTILINE)
    assert len(rows) == len(list((ROOT / "tiny_configs").glob("*b_*.yaml")))
    for config, gpus, peak in rows:
        assert main(["memory", str(ROOT / "tiny_configs" / config), "--gpus", gpus, "--json"]) == 0
        assert f"{json.loads(capsys.readouterr().out)['peak'] / 1e9:.1f}" == peak, config
    assert f"{rows[0][2]} GB at the peak" in text


def test_every_command_is_documented(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs = re.search(r"\{([\w,]+)\}", capsys.readouterr().out).group(1).split(",")
    page = (ROOT / "docs" / "commands.md").read_text()
    assert set(verbs) == set(re.findall(r"^python -m minidrl (\w+)", page, re.MULTILINE))


def test_nothing_is_left_to_fill_in(readme):
    assert all("@@" not in page.read_text() for page in readme.pages())


def shown_by() -> list[str]:
    """The tests that ERRATA.md names."""
    text = (ROOT / "ERRATA.md").read_text(encoding="utf-8")
    return re.findall(r"`(law_\w+|\w+\.py::test_\w+|tests/\w+\.py|benchmarks/\w+\.py)`", text)


def test_errata_names_tests_that_exist():
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py")}
    everything = "\n".join(sources.values())
    named = shown_by()
    assert len(named) > 60
    for name in named:
        file, _, test = name.partition("::")
        if name.startswith("law_"):
            assert f"def {name}(" in everything, name
        elif test:
            assert f"def {test}(" in sources[file], name
        else:
            assert (ROOT / name).is_file(), name


def test_the_spread_of_the_time_form_is_that_of_the_enumeration():
    """Its tail is too heavy for draws: every mask, and a quadrature in log t, give what the page says for 1, 2 and 4 calls."""
    model = oracle.TabularDenoiser.random(6, 3, torch.Generator().manual_seed(0))
    rollout = estimators._copies(tuple(i % 3 for i in range(6)), 2**6)
    hidden = torch.tensor(list(itertools.product((False, True), repeat=6)))
    plan = alg.elbo_count_plan(rollout, torch.Generator(), num_states=1, domain="keep", strata=False)
    ones = torch.ones(1, 2**6)
    plan = dataclasses.replace(plan, hidden=hidden[None], scored=hidden[None], weight=ones.double(), valid=ones.bool())
    found = features(model, rollout, plan, temperature=1.0)["logp"][0].sum(-1)
    nodes, weights = (torch.tensor(values) for values in np.polynomial.legendre.leggauss(2000))
    t = 1e-3 ** ((1 - nodes) / 2)
    density = t * math.log(1e3) * weights / 2 / (1 - 1e-3)
    probability = t[:, None] ** hidden.sum(-1) * (1 - t[:, None]) ** (~hidden).sum(-1) * density[:, None]
    mean, square = ((probability * (found / t[:, None]) ** power).sum() for power in (1, 2))
    std = math.sqrt(square - mean**2)
    page = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8").partition("<!-- /estimators -->")[0]
    shown = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| ELBO, time ")]
    assert [(row[2], row[5]) for row in shown] == [("1", f"{std:.2f}"), ("2", f"{std / 2**0.5:.2f}"), ("4", f"{std / 2:.2f}")]
    assert f"where {std / 2**0.5:.2f} and {std / 2:.2f} are exact" in flat("docs/estimators.md")
