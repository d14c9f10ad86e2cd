"""benchmarks/constant_reward.py: the stored courses, of which BENCHMARKS.md tells, are what the code finds."""

import json

import pytest

import tiny

bench = tiny.script("constant_reward")
STORED = [json.loads(line) for line in (tiny.ROOT / "benchmarks" / "results" / "constant_reward.json").read_text().splitlines()]


def test_every_course_is_stored():
    assert [line["seed"] for line in STORED] == list(range(bench.SEEDS))
    assert all(len(line[name]) == bench.STEPS for line in STORED for name in bench.SCORES)


@pytest.mark.parametrize("name", bench.SCORES)
def test_the_stored_courses_are_what_the_code_finds(name):
    found = bench.course(name, seed=1, steps=2)
    assert found == pytest.approx(STORED[1][name][:2], rel=0.02)  # another machine may round a draw otherwise


def test_without_an_update_and_before_the_first_the_scores_do_not_matter():
    assert all(len({line[name][0] for name in bench.SCORES}) == 1 for line in STORED)
