"""The exercises: unanswered, solved, and answered wrongly; each notebook runs in this process.

A wrong answer is a solution with one passage replaced. It must get the line that names what it misses.
"""

import ast
import contextlib
import io
import json
import linecache
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks" / "exercises"
sys.path.insert(0, str(FOLDER))  # a notebook's kernel starts in its folder

import judge  # noqa: E402

judge.load()


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells if cell["cell_type"] == "code"]


NOTEBOOKS = {path.stem: code_cells(path) for path in sorted(FOLDER.glob("*.ipynb"))}


def defines(cell: dict) -> str:
    """The task that a cell answers, or nothing."""
    body = ast.parse(cell["source"]).body
    return body[0].name if len(body) == 1 and getattr(body[0], "name", "") in judge.TASKS else ""


def tasks_of(stem: str) -> list[str]:
    return [name for cell in NOTEBOOKS[stem] if (name := defines(cell))]


TASKS = {name: stem for stem in NOTEBOOKS for name in tasks_of(stem)}


def solution(stem: str) -> str:
    return (FOLDER / "solutions" / f"{stem}.py").read_text(encoding="utf-8")


def run(stem: str, answers: dict[str, str]) -> list[str]:
    """What each code cell of the notebook prints, with these texts in the cells of the answers."""
    space, printed = {"__name__": "__main__"}, []
    for number, cell in enumerate(NOTEBOOKS[stem]):
        text, name = answers.get(defines(cell), cell["source"]), f"<{stem}, code cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # as a notebook's kernel does
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, name, "exec"), space)
        printed.append(out.getvalue())
    return printed


def answered(name: str, text: str) -> str:
    """What the notebook says of one answer, after it has run to its end."""
    said = "".join(run(TASKS[name], {name: text}))
    return re.search(rf"^{name}, equation .*(?:\n  .*)*", said, re.MULTILINE)[0]


def test_every_task_has_its_cell():
    assert {*TASKS} == {*judge.TASKS}


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_an_unanswered_exercise_runs_to_its_end_and_says_what_is_stored(stem):
    printed = run(stem, {})
    stored = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in NOTEBOOKS[stem]]
    assert printed == stored
    assert sum("open. Write it in the cell above" in text for text in printed) == len(tasks_of(stem))


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_the_solution_is_right(stem):
    text = "".join(run(stem, dict.fromkeys(tasks_of(stem), solution(stem))))
    assert "  missed" not in text, text
    for name in tasks_of(stem):
        assert re.search(rf"^{name}, equation .*: right$", text, re.MULTILINE), text
        assert re.search(rf"accepted by (all \d+ laws|the law) of \({judge.TASKS[name].tag}\)", text), text


WRONG = [  # the task; a passage of its solution, and what stands there instead; words of the line that says so
    ("my_row", "num_states=2", "num_states=4", "yours P(elbo_count_plan, num_states=4"),
    ("my_row", 'normalizer="kept_length"', 'normalizer="none"', "off is normalizer: 'none'"),
    ("count_form", ".long() + 1", ".long()", "yours 0 1 2, expected 1 2 3"),
    ("count_form", "(u * n).floor().long() + 1", "(u * (n + 1)).floor().long()", "yours 0 2 3, expected 1 2 3"),
    ("strata", "[:, None] + u)", "[:, None] + u[:1])", "share the draw"),
    ("strata", "[:, None] + u)", "[:, None] + 0.5 + 0 * u)", "not used"),
    ("pairs", "(u * (n + 1))", "(u * n)", "yours 0 1 1 2, expected 0 1 2 3"),
    ("pairs", "keep & ~masked", "~masked", "positions after EOS"),
    ("group_mean", "group.mean(1, keepdim=True)", "group.mean()", "whole batch"),
    ("group_mean", "(-1, num_generations)", "(num_generations, -1)", "B over N members"),
    ("clip", "torch.minimum(ratio * adv, clipped * adv)", "clipped * adv", "whatever"),
    ("clip", "return -torch", "return torch", "yours 2 -3, expected -2 3"),
    ("mean_field", "torch.ones_like(keep)", "keep", "yours 1100, expected 1111"),
    ("mean_field", " & prompt_mask", "", "yours 110, expected 010"),
    ("two_means", "total.sum() / lengths.sum()", "(total / lengths).mean()", "over answers"),
    ("two_means", "(total / lengths).mean()", "total.mean()", "divided by the answers"),
    ("nodes", "(x + 1) / 2", "x", "yours -0.5774 0.5774, expected 0.2113 0.7887"),
    ("nodes", "(x + 1) / 2", "(numpy.arange(num_nodes) + 0.5) / num_nodes", "the middles of Q"),
    ("sdmc", " & keep", "", "yours 1001 1101, expected 1000 1100"),
    ("sdmc", "noise < t", "noise > t", "yours 0110 0010"),
    ("fixed_count", "1 + t[:, None] * (n - 1)", "t[:, None] * n", "yours 1 6 10"),
    ("fixed_count", " + 0.5).floor()", ").round()", "yours 2 2 4, expected 2 3 4"),
    ("snis", ".softmax(1)", ".exp()", "not divided by the sum"),
    ("snis", ".view(-1, num_generations)", ".view(1, -1)", "all rows"),
    ("stable_loss", "ll.detach()", "ll", "flows through the weights"),
    ("stable_loss", "adv * score", "adv * score / num_generations", "divided by N"),
    ("staircase", "[None, :] < noisy", "[None, :] <= noisy", "reads its own answer"),
    ("staircase", "real[:, :P] = prompt_mask", "pass", "prompt token 0 see padding token 0: yours True"),
    ("positions", "[prompt, response, response]", "[prompt, response, response + length]", "yours 4 5, expected 2 3"),
    ("positions", "prompt_mask.sum(-1, keepdim=True) +", "0 * prompt_mask.sum(-1, keepdim=True) +", "starts at 0"),
    ("top_steps", "descending=True", "descending=False", "yours 1 0 3, expected 2 3 0"),
    ("top_steps", "ranked.argsort", "entropy.argsort", "yours 3 4 2"),
    ("passed_over", "(confidence < limit)", "(confidence > limit)", "yours 60, expected 40"),
    ("passed_over", "token_confidence(logits)", "token_confidence(logits / temperature)", "at the sampling temperature"),
    ("trust_mask", "torch.sign(adv) * log_ratio > 0", "log_ratio > 0", "sign of adv is not used"),
    ("trust_mask", "~(outside & away)", "~outside", "everything outside"),
    ("drpo_loss", "adv.abs()", "adv", "yours 2 3, expected 0 -1"),
    ("drpo_loss", " * mu", "", "yours -19, expected 0.8"),
]  # fmt: skip


@pytest.fixture
def without_laws(monkeypatch):
    """The examples alone: they are what helps, and the laws take a second a task."""
    monkeypatch.setattr(judge, "by_the_laws", lambda one, ask, missed: ["  missed  laws"])


@pytest.mark.parametrize(("name", "old", "new", "words"), WRONG)
def test_a_wrong_answer_gets_the_line_that_helps(name, old, new, words, without_laws):
    text = solution(TASKS[name])
    assert text.count(old) == 1
    said = answered(name, text.replace(old, new)).splitlines()
    assert "not yet right" in said[0]
    assert any(line.startswith("  missed  ") and words in line for line in said), said


def test_a_law_sees_what_the_small_examples_do_not():
    text = solution("01_masked_diffusion")
    text += "\n\nright = count_form\n\n\ndef count_form(*given):\n    return right(*given) if len(given[0]) < 100 else 1 / 0\n"
    said = answered("count_form", text)
    assert "missed  accepted by" in said and "raised ZeroDivisionError: division by zero" in said, said


@pytest.mark.parametrize("name", [tasks_of(stem)[0] for stem in NOTEBOOKS if tasks_of(stem)])
def test_what_cannot_be_judged_ends_in_one_line(name):
    takes = ", ".join(judge.Tensors.read(text).name for text in judge.TASKS[name].takes)
    head = f"def {name}({takes}):\n    "
    said = {
        "": "open. No function",
        f"{name} = 3": "it is of type int, not a function",
        f"{head}...": "open. Write it in the cell above",
        f"{head}return 1 / 0": "cannot be judged. raised ZeroDivisionError: division by zero in `return 1 / 0`",
        f"def {name}(a, b, c, d, e, f, g):\n    return 1": "cannot be judged. raised TypeError",
    }
    for text, words in said.items():
        line = answered(name, text)
        assert f": {words}" in line and "\n" not in line, line


def test_an_answer_of_another_shape_or_dtype_is_told_so():
    text = solution("01_masked_diffusion")
    for change, words in {
        "masked[None]": "masked has the shape (1,",
        "masked.to(__import__('torch').complex64)": "masked is complex64; it must be ",
        "masked.tolist()": "masked is of type ",
    }.items():
        body = f"    masked, weight = right(*given)\n    return {change}, weight\n"
        wrapped = f"{text}\n\nright = count_form\n\n\ndef count_form(*given):\n{body}"
        assert f"cannot be judged. {words}" in answered("count_form", wrapped)
    in_place = text.replace("noise.masked_fill(", "noise.masked_fill_(")
    assert answered("count_form", in_place).endswith("cannot be judged. noise has changed: work on a copy, not in place")


MISSED = [  # a passage of the solution of 00b, what stands there instead, words of the line that says so
    ("-(adv", "(adv", "against the policy gradient"),
    ("    optimizer.zero_grad()\n", "", "zero_grad"),
    ("group.mean(1, keepdim=True)", "group.mean()", "not over the batch"),
    ("group - group.mean(1, keepdim=True)", "group", "Is the mean of the group subtracted?"),
    (".mean()\n    opt", ".sum()\n    opt", "192 times too long"),
    ("    optimizer.step()\n", "", "did not move"),
    ("rollout.reward", "rollout.rewards", "raised AttributeError"),
]


def update_of(old: str = "", new: str = ""):
    text = solution("00b_policy_gradient")
    assert old in text
    space: dict = {}
    exec(text.replace(old, new), space)
    return space["update"]


@pytest.mark.parametrize(("old", "new", "words"), MISSED)
def test_a_wrong_update_is_told_what_it_misses_before_anything_is_trained(old, new, words):
    import practice

    assert words in practice.missed(update_of(old, new))


@pytest.mark.slow
def test_the_right_update_makes_the_curve_rise(capsys):
    import practice

    practice.practise(update_of())
    assert "update: right" in capsys.readouterr().out
