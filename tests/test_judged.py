"""The modules under judgement as one: what is read, what is written, how a mutant is found and what a stale one says."""

import ast
import sys

import pytest

import judged
from mutant import Mutant

ALGORITHMS = judged.ROOM["minidrl.algorithms"]


def stale(*words: str, **row: str) -> str:
    given = {"tag": "", "old": "x", "new": "y", "law": "law_methods", **row}
    with pytest.raises(judged.Stale) as caught:
        judged.located(Mutant(**given))
    assert all(word in str(caught.value) for word in ("tests/test_judged.py:", *words)), caught.value


def test_what_is_shipped_is_the_modules_themselves():
    for room in judged.ROOM.values():
        for name in room.names:
            if "." not in name:
                assert getattr(judged.SHIPPED, name) is getattr(room.module, name), name
    with pytest.raises(AttributeError, match="judged.ROOMS"):
        judged.SHIPPED.nothing_of_the_kind  # noqa: B018


def test_a_mutant_is_seen_by_the_rooms_that_import_it_and_by_nobody_else():
    one = judged.mutated(Mutant("8.1", "_surrogate(-adv *", "_surrogate(adv *", "law_reinforce_gradient"))
    first, *later = one._modules
    importing = [module for module in later if "reinforce" in vars(module)]
    assert importing and all(module.reinforce is first.reinforce for module in importing)
    assert all(module.alg is first for module in later if "alg" in vars(module))
    assert one.reinforce is first.reinforce is not ALGORITHMS.module.reinforce
    assert all(room.module is sys.modules[room.name] for room in judged.ROOM.values()), "what was patched is put back"


def test_a_function_of_another_s_making_is_seen_by_rooms_and_rows():
    mine = lambda ll, anchor, adv, num_generations: None  # noqa: E731
    one = judged.replaced({"reinforce": lambda module: mine})
    first, *later = one._modules
    importing = [module for module in later if "reinforce" in vars(module)]
    assert importing and all(module.reinforce is mine for module in [first, *importing])
    assert one.METHODS["reinforce"].objective.func is mine is not ALGORITHMS.module.reinforce
    with pytest.raises(LookupError, match="nothing_of_the_kind is defined in none of minidrl.algorithms"):
        judged.replaced({"nothing_of_the_kind": lambda module: mine})


def test_what_is_written_reaches_the_rooms_that_import_it():
    one = judged.mutated(Mutant("8.1", "_surrogate(-adv *", "_surrogate(adv *", "law_reinforce_gradient"))
    one.reinforce = other = object()
    seen = [module.reinforce for module in one._modules if "reinforce" in vars(module)]
    assert len(seen) > 1 and all(value is other for value in seen) and judged.SHIPPED.reinforce is not other


def test_a_row_of_the_table_is_a_place():
    mutant = Mutant("10.1", "cap=6.0", "cap=5.0", "law_clips_of_the_rows", where="row.stabledrl")
    room, definition, _ = judged.located(mutant)
    assert (room.name, definition.name) == ("minidrl.methods", "row.stabledrl")
    caps = {name: row.objective.keywords.get("cap") for name, row in judged.mutated(mutant).METHODS.items()}
    assert (caps["stabledrl"], caps["stabledrl-block"]) == (5.0, 6.0), "the passage of this row, and of no other"
    stale("is not in row.gdpo (minidrl/methods.py:", tag="10.1", old="cap=6.0", where="row.gdpo")
    stale("no where='row.nothing'", "mend where, or drop", where="row.nothing")


def test_line_breaks_do_not_matter():
    for old in ("return ll\n        - anchor", "return ll-anchor"):
        room, definition, _ = judged.located(Mutant("7.1", old, "return ll", "law_log_ratio"))
        assert (room, definition.name) == (ALGORITHMS, "log_ratio")
    broken = "def f(a):\n    x = (\n        a\n        + 1\n    )\n    return (\n        x, a,\n    )\n"
    bare = judged._unwrapped(broken)
    assert ast.dump(ast.parse(bare)) == ast.dump(ast.parse(broken)) and "(" not in bare.replace("f(a)", "")
    assert bare.count("\n") == broken.count("\n")


def test_a_stale_mutant_says_where_it_is_and_what_to_do():
    stale("is not in log_ratio (minidrl/", "write it as it is now, or drop", "return 7", tag="7.1", old="return 7")
    stale("times in log_ratio", "write more of it", tag="7.1", old="anchor")
    stale("no function whose docstring opens with (77.1)", "mend where, or drop", tag="77.1")
    stale("no where='nothing'", "mend where, or drop", where="nothing")
    stale("no where for a mutant without a tag")
