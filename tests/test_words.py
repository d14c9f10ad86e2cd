"""A sentence with given words: its rule, its files and its settings."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from minidrl.run import config
from minidrl.run.cli import main
from minidrl.tasks.words import Request, Words
from research.benches.sentences import row_of
from research.benches.words import kind

WANTED = Request(("rain", "door", "old"))


@pytest.fixture
def task(tmp_path):
    rows = [
        {"words": ["rain", "door", "old"], "answer": "The old man shut the door before the rain."},
        {"words": ["boat", "night", "river"], "answer": "We saw a boat on the river at night."},
    ]
    for name, some in (("test.jsonl", rows[:1]), ("train.jsonl", rows)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, some)))
    return Words(path=str(tmp_path / "test.jsonl"), train_path=str(tmp_path / "train.jsonl"))


@pytest.mark.parametrize(
    ("response", "solved"),
    [
        (" The old man shut the door before the rain came.", True),
        ("The Old man's dog, near a door, likes rain.", True),
        ("Don't open the old door in the rain.", True),
        ("The old man shut the door.", False),  # a word is missing
        ("The older man shut the door before the rain.", False),  # another word
        ("The old man shut the old door before the rain.", False),  # a word twice
        ("The old man shut the door before the rain", False),  # no end
        ("the old man shut the door before the rain.", False),  # no capital letter
        ("The old man shut the door. It was the rain.", False),  # two sentences
        ("Rain, door, old.", False),  # a list
        ("The old dog saw the dog at a door in the rain.", True),  # words of three letters may recur
        ("The old horse saw a horse at a door in the rain.", False),
        ("", False),
    ],
)
def test_the_rule(task, response, solved):
    verdict = task.judge(WANTED, response)
    assert verdict.solved is solved and verdict.reward == float(solved)


def test_marks_say_what_is_missing(task):
    verdict = task.judge(WANTED, "The old man shut the door.")
    assert verdict.marks == {"words": 2 / 3, "sentence": 1.0} and verdict.readable


def test_a_share_of_the_words_is_paid_for_a_sentence_alone(task):
    paid = dataclasses.replace(task, reward="share")
    assert paid.judge(WANTED, "The old man shut the door.").reward == pytest.approx(2 / 3)
    assert paid.judge(WANTED, "the old man shut the door.").reward == 0


def test_what_is_held_out_is_not_trained_on(task):
    (held_out,) = task.held_out(1)
    assert held_out.words == "rain, door, old:"
    drawn = task.problems(20, np.random.default_rng(0), "train")
    assert {problem.key for problem in drawn} == {"boat night river"}
    assert task.demonstrations(drawn[:1], None, 0.0) == [" We saw a boat on the river at night."]
    assert task.judge(drawn[0], drawn[0].answer).solved


@pytest.mark.parametrize("row", [{"words": ["boat"]}, {"words": ["boat"], "answer": None}])
def test_a_row_without_an_answer_teaches_nothing(row, task):
    """null was taught as the word None once."""
    (request,) = task.placed([row], "rows")
    with pytest.raises(ValueError, match="^task.train_path: got .*; allowed a file with an answer in each row; rows row 1"):
        task.demonstrations([request], None, 0.0)


def test_a_row_without_words_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"words": "rain"}')
    with pytest.raises(ValueError, match=r"row 1: words: got 'rain'; allowed a list"):
        Words(path=str(path)).held_out(1)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_the_shipped_configs(kind):
    of = {"sft": config.Pretrain, "rl": config.Train}[kind]
    settings = config.load(of, f"tiny_configs/smollm2_135m_words_{kind}.yaml")
    assert isinstance(settings.task, Words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The old man shut the door.", "a word is missing"),
        ("The old man shut the door before the rain", "no whole sentence"),
        ("The old rain door.", "too short"),
        ("The old man shut the old door before the rain.", "a word stands twice"),
    ],
)
def test_kinds_of_errors(task, text, expected):
    verdict = task.judge(WANTED, text)
    assert kind(WANTED, text, verdict.solved, verdict.readable) == expected


def test_a_row_is_made_of_a_sentence_that_its_rule_accepts(task):
    def tok(text):  # whose tokens are words
        return SimpleNamespace(input_ids=text.split())

    row = row_of("The teacher asked all the children today.", tok, np.random.default_rng(0))
    assert set(row["words"]) < {"teacher", "asked", "children", "today"}
    assert task.judge(Request(tuple(row["words"])), row["answer"]).solved
    assert row_of("They went to bed and slept all day.", tok, np.random.default_rng(0)) is None


def test_a_file_that_is_not_named_is_asked_for():
    with pytest.raises(ValueError, match=r"^task\.path: got '\.', whose ending is another; allowed \.jsonl"):
        Words().held_out(1)


def test_a_file_is_checked_on_the_command_line(task, capfd):
    assert main(["tasks", "words", "--check", task.train_path]) == 0
    assert "2 rows; all can be asked and judged by words" in capfd.readouterr().out
