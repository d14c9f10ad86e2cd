"""Countdown: splits, generator, solver, verifier and tokenizer, judged by an evaluator of their own.

``judge`` below shares nothing with the verifier: two stacks, of values and of signs, compute an expression from left to right.
"""

import functools
import hashlib
import itertools
import math
import operator
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from minidrl.run import config
from minidrl.tasks import countdown
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import Countdown, Puzzle

BY_SIGN = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
LITERAL = "(?:0|[1-9][0-9]{0,5})"
HARD = Countdown(num_numbers=4, max_number=10, max_value=150, held_out_share=0.2)
WIDE = Countdown(held_out_share=0.3)
APART = Countdown(held_out_share=0.2, pretrain_share=0.35)  # a split of its own for pre-training
PAIRS = Countdown(num_numbers=2, max_number=30, max_value=99, held_out_share=0.5, reward="binary")
TASKS = pytest.mark.parametrize("task", [WIDE, HARD, PAIRS], ids=["three", "four", "two"])


# ------------------------------------------------------------------------------------------------- the independent judge


def judge_expression(text: str):
    tokens = re.findall(f"{LITERAL}|[-+*/()]", text)
    if "".join(tokens) != text:
        return None
    values, signs, due = [], [], True  # whether an operand is due

    def reduce():
        right, left = values.pop(), values.pop()
        values.append(BY_SIGN[signs.pop()](left, right))

    try:
        for token in tokens:
            if due != (token == "(" or token.isdigit()):
                return None
            if token.isdigit():
                values.append(Fraction(token))
                due = False
            elif token == "(":
                signs.append(token)
            elif token == ")":
                while signs[-1] != "(":
                    reduce()
                signs.pop()
            else:
                while signs and signs[-1] != "(" and (signs[-1] in "*/" or token in "+-"):
                    reduce()
                signs.append(token)
                due = True
        while signs:
            reduce()
    except (IndexError, KeyError, ZeroDivisionError):
        return None
    return None if due else (values[0], [int(token) for token in tokens if token.isdigit()])


def judge_running(text: str):
    """Pair by pair: what stands left of each = is one operation on the result before it, and equals what stands right."""
    parts, numbers = text.split("="), []
    for left, right in itertools.pairwise(parts):
        step, result = re.fullmatch(f"({LITERAL})[-+*/]({LITERAL})", left), re.match(f"{LITERAL}(?![0-9])", right)
        claimed = judge_expression(left)
        if not step or not result or claimed is None or claimed[0] != int(result[0]):
            return None
        numbers += [int(step[1])] * (not numbers) + [int(step[2])]
    return (Fraction(int(parts[-1])), numbers) if re.fullmatch(LITERAL, parts[-1]) else None


def judge(text: str):
    """(value, numbers) or None, for a text of any kind and length."""
    if len(text) > 64:
        return None
    return judge_running(text) if "=" in text else judge_expression(text)


def all_runs(numbers: tuple[int, ...], max_value: int) -> dict[str, int]:
    """Every running calculation with its value, from all orders and all operators, in Fractions."""
    found = {}
    for order in set(itertools.permutations(numbers)):
        for signs in itertools.product(BY_SIGN, repeat=len(numbers) - 1):
            value, text = Fraction(order[0]), str(order[0])
            for sign, number in zip(signs, order[1:], strict=True):
                value = BY_SIGN[sign](value, number)
                if value.denominator > 1 or not 0 <= value <= max_value:
                    break
                text += f"{sign}{number}={value}"
            else:
                found[text] = int(value)
    return found


# --------------------------------------------------------------------------------------------- difficulty and the splits


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"num_numbers": 5}, "task.num_numbers: got 5; allowed 2, 3 or 4"),
        ({"max_number": 100}, "task.max_number: got 100; allowed less than or equal to 99"),
        ({"max_number": 9, "max_value": 8}, "task.max_value: got 8; allowed max_number (9) to 999"),
        ({"pretrain_share": 0.7}, "task.pretrain_share: got 0.7; allowed from 0, below 1 - held_out_share (0.3)"),
        ({"reward": "eval"}, "task.reward: got 'eval'; allowed 'strict', 'binary' or 'any_answer'"),
    ],
)
def test_a_wrong_difficulty_is_named_with_what_is_allowed(setting, message):
    with pytest.raises(ValueError) as error:
        config.from_dict(Countdown, setting, "task.")
    assert str(error.value) == message


def fraction_of(numbers: tuple[int, ...], target: int) -> float:
    """The documented hash of a puzzle, from 0 to 1."""
    key = ",".join(str(n) for n in sorted(numbers)) + ">" + str(target)
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) / 2**64


def keys_of(puzzles) -> set[tuple[int, ...]]:
    return {(*sorted(p.numbers), p.target) for p in puzzles}


@functools.cache
def every_puzzle() -> set[tuple[int, ...]]:
    """All puzzles of three numbers to 9 with values to 99, from the judge's own enumeration."""
    numbers = itertools.combinations_with_replacement(range(1, 10), 3)
    return {(*n, target) for n in numbers for target in all_runs(n, 99).values() if target}


def test_the_three_splits_are_disjoint_and_together_the_whole_space():
    found = {split: list(APART.puzzles(split)) for split in ("pretrain", "train", "held_out")}
    keys = {split: keys_of(puzzles) for split, puzzles in found.items()}
    assert sum(map(len, found.values())) == len(every_puzzle()) == 2056 and set().union(*keys.values()) == every_puzzle()
    for split, share in (("pretrain", 0.35), ("train", 0.45), ("held_out", 0.2)):
        assert abs(len(keys[split]) - 2056 * share) < 4 * math.sqrt(2056 * share * (1 - share))
        assert keys_of(APART.problems(500, np.random.default_rng(0), split)) <= keys[split]


@pytest.mark.parametrize("split", ["pretrain", "train", "held_out"])
def test_without_a_share_for_pretraining_there_are_the_two_splits_of_old(split):
    """The draws restated: numbers, then a target, again until the hash is in the split, which pre-training shares with RL."""
    rng, expected = np.random.default_rng(11), []
    while len(expected) < 300:
        numbers = tuple(rng.integers(1, 10, 3).tolist())
        targets = sorted({value for value in all_runs(numbers, 99).values() if value})
        target = targets[rng.integers(len(targets))]
        if (fraction_of(numbers, target) < 0.3) == (split == "held_out"):
            expected.append((numbers, target))
    drawn = WIDE.problems(300, np.random.default_rng(11), split)
    assert [(p.numbers, p.target) for p in drawn] == expected
    held_out = {key for key in every_puzzle() if fraction_of(key[:3], key[3]) < 0.3}
    assert keys_of(WIDE.puzzles(split)) == (held_out if split == "held_out" else every_puzzle() - held_out)


@TASKS
def test_puzzles_keep_the_limits_of_the_difficulty(task):
    puzzles = task.problems(600, np.random.default_rng(2)) + task.problems(300, np.random.default_rng(2), "held_out")
    assert all(len(p.numbers) == task.num_numbers for p in puzzles)
    assert {n for p in puzzles for n in p.numbers} == set(range(1, task.max_number + 1))
    assert all(1 <= p.target <= task.max_value for p in puzzles)
    assert all(p.prompt == ",".join(str(n) for n in p.numbers) + ">" + str(p.target) + ":" for p in puzzles)
    assert max(len(p.prompt) for p in puzzles) <= task.prompt_length


def test_a_target_is_any_value_that_a_running_calculation_reaches():
    """All targets of one multiset turn up, and only those; 0 is no target."""
    task = Countdown(num_numbers=2, max_number=2, max_value=99, held_out_share=0.5)
    drawn = task.problems(300, np.random.default_rng(3)) + task.problems(300, np.random.default_rng(3), "held_out")
    by_hand = {(1, 1, 2), (1, 1, 1), (1, 2, 3), (1, 2, 1), (1, 2, 2), (2, 2, 4), (2, 2, 1)}
    assert {(*sorted(p.numbers), p.target) for p in drawn} == by_hand
    assert Countdown().targets((2, 1)) == Countdown().targets((1, 2)) == [1, 2, 3]


def test_held_out_counts_that_do_not_exist_are_named():
    tiny = Countdown(num_numbers=2, max_number=4, held_out_share=0.5)
    every = {(*sorted(n), t) for n in itertools.product(range(1, 5), repeat=2) for t in tiny.targets(n)}
    exist = [key for key in every if tiny.split_of(Puzzle(key[:2], key[2])) == "held_out"]
    assert 0 < len(exist) < len(every) and len(tiny.held_out(len(exist))) == len(exist)
    with pytest.raises(ValueError, match=f"^evaluate.n: got 60; allowed 1 to {len(exist)}, "):
        tiny.held_out(60)


def test_an_empty_split_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(countdown, "MAX_DRAWS", 200)
    nothing = Countdown(num_numbers=2, max_number=1, held_out_share=1e-9)
    with pytest.raises(ValueError, match="^task.held_out_share: got 1e-09; allowed shares that leave held_out puzzles"):
        nothing.problems(1, np.random.default_rng(0), "held_out")
    assert len(nothing.problems(500, np.random.default_rng(0))) == 500  # misses are counted in a row, not in all


# ------------------------------------------------------------------------------------------------ generator and solver


@TASKS
def test_demonstrations_are_true_running_calculations_inside_the_limits(task):
    rng = np.random.default_rng(4)
    puzzles = task.problems(400, rng)
    for puzzle, text in zip(puzzles, task.demonstrate(puzzles, rng, 0.5), strict=True):
        value, numbers = judge_running(text)
        assert Counter(numbers) == Counter(puzzle.numbers)
        assert all(0 <= int(part) <= task.max_value for part in re.findall(r"=(\d+)", text))
        assert task.score(puzzle, text) == (1.0 if value == puzzle.target else 0.1 if task.reward == "strict" else 0.0)


@pytest.mark.parametrize("hit_share", [0.0, 0.2])
def test_hit_share_is_the_share_aimed_at_the_target(hit_share):
    """hits = hit_share + (1 - hit_share) * share of all running calculations that end on the target, summed over puzzles."""
    rng = np.random.default_rng(5)
    puzzles = WIDE.problems(3000, rng)
    texts = WIDE.demonstrate(puzzles, rng, hit_share)
    runs = {numbers: all_runs(numbers, 99) for numbers in {tuple(sorted(p.numbers)) for p in puzzles}}
    ends = [list(runs[tuple(sorted(p.numbers))].values()) for p in puzzles]
    expected = [hit_share + (1 - hit_share) * end.count(p.target) / len(end) for p, end in zip(puzzles, ends, strict=True)]
    hits = sum(judge(text)[0] == p.target for p, text in zip(puzzles, texts, strict=True))
    error = math.sqrt(sum(p * (1 - p) for p in expected))
    assert abs(hits - sum(expected)) <= 5 * error + 1e-6


def test_demonstrations_aim_by_the_share_that_is_due():
    """``hit_share`` before half of the steps are behind, ``late_hit_share`` from then on; both are settings of the task."""
    task, puzzles = Countdown(hit_share=0.0, late_hit_share=1.0), WIDE.problems(50, np.random.default_rng(8))
    for progress, share in ((0.0, 0.0), (0.49, 0.0), (0.5, 1.0), (1.0, 1.0)):
        texts = task.demonstrations(puzzles, np.random.default_rng(9), progress)
        assert texts == task.demonstrate(puzzles, np.random.default_rng(9), share)


# --------------------------------------------------------------------------------------------------------- the verifier

NOTHING, CLOSE, SOLVED = (0.0, 0.0, 0.1), (0.1, 0.0, 0.1), (1.0, 1.0, 1.0)  # strict, binary, any_answer
TABLE = [
    # solved: running calculations and bare expressions
    ("5,6,8>46", "5*8=40+6=46", SOLVED),
    ("5,6,8>46", "5*8+6", SOLVED),
    ("3,3,8,8>24", "8/(3-8/3)", SOLVED),
    ("2,4,6>3", "2*6/4", SOLVED),
    ("2,3,4>1", "2+3-4", SOLVED),
    ("3,3,5>5", "3-3=0+5=5", SOLVED),
    ("7>7", "7", SOLVED),
    # right numbers, another value
    ("5,6,8>46", "5*6=30+8=38", CLOSE),
    ("2,3,4>20", "2+3*4", CLOSE),
    ("2,3,7>1", "7/2-3", CLOSE),
    ("1,2,5>2", "5/2*1", CLOSE),
    # numbers: each exactly once
    ("5,6,8>46", "5*8=40", NOTHING),
    ("5,6,8>46", "5*8+6+0", NOTHING),
    ("4,4,6>14", "4+4+6", SOLVED),
    ("4,6,6>14", "4+4+6", NOTHING),
    ("1,2>12", "12", NOTHING),
    # equations: true, one operation each, each result carried on
    ("5,6,8>46", "5*8=41+6=46", NOTHING),
    ("5,6,8>46", "5*8=40+6=47", NOTHING),
    ("5,6,8>46", "5*8=40+6", NOTHING),
    ("5,6,8>46", "5*8=40+6=", NOTHING),
    ("5,6,8>46", "5*8+6=46", NOTHING),
    ("5,8>40", "5*8=40", SOLVED),
    ("5,8>40", "5*8+6=40", NOTHING),
    ("5,8>40", "5*8=40+", NOTHING),
    ("5,6,8>46", "5*8=40=40+6=46", NOTHING),
    ("5,6,8>46", "(5*8)=40+6=46", NOTHING),
    ("5,6,8>46", "=5*8=40+6=46", NOTHING),
    ("3,5,9>7", "3-5=-2+9=7", NOTHING),
    ("7>7", "7=7", NOTHING),
    # grammar
    ("5,6,8>46", "5*8+6)", NOTHING),
    ("5,6,8>46", "(5*8+6", NOTHING),
    ("5,6,8>46", "5*8+6+", NOTHING),
    ("5,6,8>46", "5*8 +6", NOTHING),
    ("5,6,8>46", "5*8+6\n", NOTHING),
    ("5,6,8>46", " ", NOTHING),
    ("5,6,8>46", "()", NOTHING),
    ("5,6,8>46", "-6+5*8", NOTHING),
    ("5,6,8>46", "5(8)+6", NOTHING),
    ("5,6,8>46", "05*8+6", NOTHING),
    ("0,7>7", "0+7", SOLVED),
    ("2,3>1", "3//2", NOTHING),
    ("2,3>9", "3**2", NOTHING),
    ("1,2,5>3", "1.5*2", NOTHING),
    ("13,2>15", "1٣+2", NOTHING),
    ("3,5,5>3", "3/(5-5)", NOTHING),
    ("3,5,5>0", "(5-5)/3", SOLVED),
    ("3,0>0", "3/0=0", NOTHING),
    # bounds
    ("999999,1>1000000", "999999+1", SOLVED),
    ("1000000,1>1000001", "1000000+1", NOTHING),
    ("1>32", "1" + "+1" * 31, NOTHING),
    (",".join("1" * 32) + ">32", "+".join("1" * 32), SOLVED),
    (",".join("1" * 33) + ">33", "+".join("1" * 33), NOTHING),
    ("7>7", "9" * 10**6, NOTHING),
]
NOT_A_RESPONSE = ["", None, 46, b"5*8+6", ["5", "*", "8", "+", "6"]]


def puzzle_of(text: str) -> Puzzle:
    numbers, target = text.split(">")
    return Puzzle(tuple(map(int, numbers.split(","))), int(target))


def test_the_table_of_rewards():
    """The table of rewards, under the three names; what is solved does not depend on the name."""
    tasks = [countdown.Countdown(reward=kind) for kind in ("strict", "binary", "any_answer")]
    for text, response, expected in TABLE:
        verdicts = [task.judge(puzzle_of(text), response) for task in tasks]
        assert tuple(verdict.reward for verdict in verdicts) == expected, (text, response[:80])
        assert {verdict.solved for verdict in verdicts} == {expected == SOLVED}
        assert {verdict.marks["well_formed"] for verdict in verdicts} == {expected != NOTHING}
    for response in NOT_A_RESPONSE:
        assert countdown.evaluate(response) is None
        assert {task.score(Puzzle((5, 6, 8), 46), response) for task in tasks} == {0.0}, response


# ------------------------------------------------------------------------------------------------------------- the fuzz

PIECES = [*"0123456789+-*/()=,>:", "**", "//", "==", "1.5", "1.5*2", "007", "87**95**61", "٣", "٤٢", "５", "²", "½", "Ⅷ", "۷"]
PIECES += ["−", "×", "÷", "（", "=", " ", "\n", "\t", "\0", "\x1b", "\u200b", "\ud800", "😀", "e", "_", "[EOS]", "[MASK]"]
PIECES += ["__import__('os')", "<answer>", "0x1", "1e9", "nan", "inf", "(((", ")))", "10", "999999", "1000000"]
UNITS = ["(", ")", "9", "1+", "1/", "-", "1=1", "=", "((1)", "٣", " ", "**", "()", "5*8=40+6=46", "\0", "😀"]
EXTREMES = [
    "1/999999+1/999998+1/999997+1/999996+1/999995+1/999994+1/999993",
    "1/999999-1/999998/(1/999997-1/999996)/(1/999995-1/999994)+1/9",
    "+".join("1" * 32),
    "1/9+" * 15 + "1/9",
    "(" * 32 + ")" * 32,
    "(((((((1/9)/9)/9)/9)/9)/9)/9)+((((((1/9)/9)/9)/9)/9)/9)",
    "*".join(["999999"] * 9),
    "(" * 8 + "1" + ")+1" * 8,
]


def pick(rng: np.random.Generator, items: list):
    return items[int(rng.integers(len(items)))]  # rng.choice would drop a closing NUL character


def hostile(rng: np.random.Generator) -> str:
    """One text: noise of pieces, of the bare alphabet, a true calculation damaged in one or two places, or a huge one."""
    kind = rng.choice(["pieces", "grammar", "damaged", "whole", "huge"], p=[0.25, 0.24, 0.3, 0.2, 0.01])
    if kind == "pieces":
        return "".join(pick(rng, PIECES) for _ in range(rng.integers(0, 24)))
    if kind == "grammar":
        return "".join(pick(rng, [*"12345+-*/()="]) for _ in range(rng.integers(0, 12)))
    if kind == "huge":
        unit = pick(rng, UNITS)
        return unit * (10**6 // len(unit) if rng.random() < 0.5 else int(rng.integers(1, 80)))
    text = pick(rng, pick(rng, WHOLE))
    for _ in range(rng.integers(1, 3) if kind == "damaged" else 0):
        place = int(rng.integers(len(text)))
        text = text[:place] + pick(rng, PIECES) * int(rng.integers(2)) + text[place + int(rng.integers(2)) :]
    return text


FUZZED = Puzzle((2, 3, 6), 12)
WHOLE = [*countdown.running_calculations(FUZZED.numbers, 99).values()]
WHOLE += [["2*6", "6/3+2", "(6-3)*2", "6/(3-2)", "2*3+6", "(2+6)/3*3", "6-2*3", "3*(6-2)", "3/6+2", "2-3-6+6"]]


def test_ten_thousand_hostile_texts():
    """No exception, a reward of the three, and the judge's verdict and value, on 10,000 hostile texts."""
    rng, paid = np.random.default_rng(8), Counter()
    for text in itertools.chain(EXTREMES, (hostile(rng) for _ in range(10_000 - len(EXTREMES)))):
        result = countdown.evaluate(text)
        assert result == judge(text), text[:80]
        right = result is not None and sorted(result[1]) == [2, 3, 6]
        expected = (1.0 if result[0] == 12 else 0.1) if right else 0.0
        assert countdown.Countdown().score(FUZZED, text) == expected, text[:80]
        paid[expected] += 1
    assert set(paid) == {0.0, 0.1, 1.0} and min(paid.values()) >= 100 and sum(paid.values()) == 10_000


# -------------------------------------------------------------------------------------------------------- the tokenizer


def test_the_tokenizer_gives_one_id_a_character_and_the_text_back():
    tok = countdown.tokenizer()
    assert len(tok) == len(set("0123456789+-*/()=,>:")) + 3
    assert (tok.pad_token, tok.mask_token, tok.eos_token) == ("[PAD]", "[MASK]", "[EOS]")
    for text in ("5,6,8>46:", "5*8=40+6=46", "(5*8)+6", "0123456789+-*/()=,>:"):
        ids = tok(text)["input_ids"]
        assert len(ids) == len(text) and len(set(ids)) == len(set(text)) and tok.decode(ids) == text
        assert tok.decode([*ids, tok.eos_token_id, tok.pad_token_id], skip_special_tokens=True) == text
    assert tok("5?")["input_ids"] == [*tok("5")["input_ids"], tok.pad_token_id]


def test_a_special_token_stays_in_the_text_and_the_first_end_ends_it():
    """`5*[PAD]8` was read as `5*8` once."""
    tok = countdown.tokenizer()
    rows = [["5", "*", "[PAD]", "8", "[EOS]", "8"], ["5", "*", "8", "[EOS]", "[EOS]", "[EOS]"], ["[MASK]", "5", *"*8=4"]]
    rows = [tok.convert_tokens_to_ids(row) for row in rows]
    rows.append([len(tok) if i == tok.pad_token_id else i for i in rows[0]])  # which an embedding may have, and no text
    made = texts.decode(tok, torch.tensor(rows))
    assert made == ["5*[PAD]8", "5*8", "[MASK]5*8=4", "5*[MASK]8"]
    task, puzzle = Countdown(num_numbers=2), Puzzle((5, 8), 40)
    assert [task.judge(puzzle, said).solved for said in made] == [False, True, False, False]


def test_responses_are_filled_up_with_ends_or_cut_and_the_longest_prompt_must_fit():
    tok = countdown.tokenizer()
    end, (one, two) = tok.eos_token_id, tok.convert_tokens_to_ids(["1", "2"])
    made = texts.encode_responses(tok, ["1", "12", "121", "1212"], 3)
    assert made.tolist() == [[one, end, end], [one, two, end], [one, two, one], [one, two, one]]
    with pytest.raises(ValueError, match="prompt: got 9 tokens; allowed up to 8"):
        texts.encode_prompts(tok, [Puzzle((5, 8), 40), Puzzle((15, 18), 40)], 8)


# ----------------------------------------------------------------------------------------- the split, and the generator


def test_the_split_is_the_hash_and_its_shares():
    """held_out iff the first 8 bytes of the hash, as a fraction of 2^64, are below the share; numbers in any order.

    pretrain iff they are above 1 less its share; where that is at most 1/2, a step of 2^-53 is the least that can be seen.
    """
    for numbers, target in [((5, 6, 8), 46), ((9, 1, 4), 13), ((7, 3, 7), 70)]:
        share = fraction_of(numbers, target)
        for order in itertools.permutations(numbers):
            puzzle = countdown.Puzzle(order, target)
            assert countdown.Countdown(held_out_share=share).split_of(puzzle) == "train"
            assert countdown.Countdown(held_out_share=math.nextafter(share, 1)).split_of(puzzle) == "held_out"
    for numbers, target in [((9, 1, 4), 13), ((3, 5, 4), 35), ((2, 9, 9), 83)]:
        share, puzzle = 1 - fraction_of(numbers, target), countdown.Puzzle(numbers, target)
        assert countdown.Countdown(held_out_share=1e-9, pretrain_share=share).split_of(puzzle) == "train"
        assert countdown.Countdown(held_out_share=1e-9, pretrain_share=share + 2**-53).split_of(puzzle) == "pretrain"


def test_the_generator_has_every_running_calculation():
    for numbers in [(3, 5, 8), (1, 2, 2), (9, 9, 9)]:
        found = countdown.running_calculations(numbers, 99)
        assert {text: value for value, texts in found.items() for text in texts} == all_runs(numbers, 99)
