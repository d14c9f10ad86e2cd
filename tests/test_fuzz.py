"""The verifiers on hostile outputs: a sample of `make chaos`, and what the sample would catch."""

import numpy as np
import pytest
import torch

import fuzz
from minidrl.tasks import Verdict, countdown, sandbox, sudoku, text


@pytest.mark.parametrize("name", fuzz.CASES)
def test_two_thousand_hostile_outputs(name):
    """Each reward is earned by many of them: an output that nobody would pay for finds little."""
    found = fuzz.fuzz(name, 2000)
    assert set(found["rewards"]) == {0.0, 0.1, 1.0} and min(found["rewards"].values()) >= 10
    assert sum(found["rewards"].values()) == 2000 and found["slowest_ms"] < 10


@pytest.mark.parametrize("name", fuzz.CASES)
def test_every_task_with_a_tokenizer_is_fuzzed_in_all_three_forms(name):
    forms = {"plain": 0, "chat": 0, "special": 0}
    for case, _ in zip(fuzz.CASES[name](1), range(2000), strict=False):
        forms[case.task.prompt_format] += 1
        forms["special"] += isinstance(case.response, str) and "[PAD]" in case.response
    assert min(forms.values()) > 100 and set(fuzz.CASES) == {"countdown", "sudoku"}


def dropped(tok, responses):
    """As decoding was: special tokens left out."""
    rows = responses.masked_fill(~text.keep_mask(responses, tok.eos_token_id), tok.eos_token_id)
    return tok.batch_decode(rows, skip_special_tokens=True)


def raises(self, problem, response):
    raise ValueError(response)


def generous(self, problem, response):
    return Verdict(1.0, True, {"well_formed": True, "cells": 1.0} if "clues" in vars(problem) else {"well_formed": True})


def slow(self, problem, response):
    return np.sort(np.random.default_rng(0).random(2_000_000)) is None


FAULTS = {
    "decoding drops special tokens": (fuzz, "decode", dropped, AssertionError),
    "a verdict raises": (None, "judge", raises, ValueError),
    "all is solved": (None, "judge", generous, AssertionError),
    "a verdict is slow": (None, "judge", slow, AssertionError),
}


@pytest.mark.parametrize("name", fuzz.CASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, name, monkeypatch):
    where, attribute, wrong, error = FAULTS[fault]
    where = where or {"countdown": countdown.Countdown, "sudoku": sudoku.Sudoku}[name]
    monkeypatch.setattr(where, attribute, wrong)
    with pytest.raises(error):
        fuzz.fuzz(name, 2000)


# ------------------------------------------------------------------------------------------------------------- programs


@pytest.mark.skipif(sandbox.refusal() != "", reason=sandbox.refusal())
def test_two_hundred_programs():
    found = fuzz.fuzz_programs(200)
    assert min(found.values()) >= 50 and sum(found.values()) == 200


@pytest.mark.parametrize("passed", [0, 2])
def test_a_verdict_that_no_program_has_earned_is_found(passed, monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: sandbox.Record(passed, 2, "", 0.0))
    with pytest.raises(AssertionError, match="expected"):
        fuzz.fuzz_programs(30)


# ------------------------------------------------------------------------------------------------------------- decoding


def test_a_special_token_stays_in_the_text_and_the_first_end_ends_it():
    """`5*[PAD]8` was read as `5*8`."""
    tok = countdown.tokenizer()
    ids = {token: tok.convert_tokens_to_ids(token) for token in ("[PAD]", "[MASK]", "[EOS]", *countdown.CHARACTERS)}
    rows = [["5", "*", "[PAD]", "8", "[EOS]", "8"], ["5", "*", "8", "[EOS]", "[EOS]", "[EOS]"], ["[MASK]", "5", *"*8=4"]]
    rows += [["[EOS]", "5", *"*8=4"], ["5", "*", "8", "[PAD]", "[PAD]", "[PAD]"]]
    made = text.decode(tok, torch.tensor([[ids[token] for token in row] for row in rows]))
    assert made == ["5*[PAD]8", "5*8", "[MASK]5*8=4", "", "5*8[PAD][PAD][PAD]"]
    task, puzzle = countdown.Countdown(num_numbers=2), countdown.Puzzle((5, 8), 40)
    assert [task.judge(puzzle, said).solved for said in made] == [False, True, False, False, False]


def test_responses_are_filled_up_with_ends_or_cut():
    tok = countdown.tokenizer()
    end, (one, two) = tok.eos_token_id, tok.convert_tokens_to_ids(["1", "2"])
    made = text.encode_responses(tok, ["1", "12", "121", "1212"], 3)
    assert made.tolist() == [[one, end, end], [one, two, end], [one, two, one], [one, two, one]]


def test_the_longest_prompt_must_fit():
    tok, puzzles = countdown.tokenizer(), [countdown.Puzzle((5, 8), 40), countdown.Puzzle((15, 18), 40)]
    with pytest.raises(ValueError, match="prompt: got 9 tokens; allowed up to 8"):
        text.encode_prompts(tok, puzzles, 8)
