"""How research/benches/orders.py counts: the kind of an answer, the class of a puzzle, the order of writing."""

import pytest

from minidrl.tasks.countdown import Puzzle
from research.benches import orders

PUZZLE = Puzzle((20, 7, 14), 78)


@pytest.mark.parametrize(
    "text, kind",
    {
        "20*7=140-14=126": "miss",  # whatever the task's limits are
        "20-14=6*7=42": "miss",
        "20+7=27-14=78": "bent",
        "20+7=64+14=78": "false",  # the first equation
        "20+7=27-14=77": "false",  # not the target
        "14/7=2+20=78": "bent",
        "20/0=7*14=78": "other",  # other numbers
        "20+7=78": "other",
        "20+7-14=78": "other",
        "": "other",
        "=78": "other",
    }.items(),
)
def test_kinds_of_answer(text, kind):
    assert orders.kind_of(PUZZLE, text, solved=False) == kind
    assert orders.kind_of(PUZZLE, text, solved=True) == "solved"


def test_classes_of_puzzle():
    task = orders.settings_of("low_confidence").task
    classes = {(1, 2, 3, 6): "sums", (9, 2, 3, 4): "differences", (5, 8, 6, 46): "products"}
    for (*numbers, target), name in classes.items():
        assert orders.class_of(Puzzle(tuple(numbers), target), task.max_value) == name
    assert orders.chance(Puzzle((1, 1, 1), 3), task) == 1 / 15  # 1+1=2+1=3


def test_places():
    # Written from right to left: the result first.
    found = orders.places("1+2=3*4=12", list(range(9, -1, -1)))
    assert found["result"] == pytest.approx(0.5 / 9)
    assert found["first operand"] == 1
    assert orders.places("10*6-7", list(range(6))) == {}
