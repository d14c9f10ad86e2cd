"""Every law rejects the mutants that are listed on it in tests/laws/: one passage of an equation replaced by a mistake."""

import pytest

import judged
import laws

# A wrong result, or an error that the law provokes. NameError, TypeError and the like would mean a broken mutant.
KILLED = (AssertionError, ValueError, RuntimeError)


@pytest.mark.parametrize("mutant", laws.MUTANTS, ids=lambda mutant: f"{mutant.tag or 'helper'}-{mutant.law}")
def test_the_law_kills_the_mutant(mutant):
    assert mutant.new != mutant.old
    wrong, law = judged.mutated(mutant), laws.LAWS[mutant.law]
    kind, _, method = mutant.where.partition(".")
    with pytest.raises(KILLED):
        law(wrong, only=(method,)) if kind == "row" and hasattr(law, "one") else law(wrong)


@pytest.mark.parametrize("name", [law for number, law in enumerate(laws.LAWS) if number % 12 == 0])
def test_the_law_accepts_the_unmutated_source(name):
    """What kills a mutant is its change and nothing else; test_laws.py holds all laws against the shipped modules."""
    laws.LAWS[name](judged.unmutated())


def test_every_law_kills_something():
    killing = {mutant.law for mutant in laws.MUTANTS}
    idle = [f"tests/laws/: {name} kills no mutant: add @rejects(..) to it" for name in laws.LAWS if name not in killing]
    assert not idle, "\n" + "\n".join(idle)
