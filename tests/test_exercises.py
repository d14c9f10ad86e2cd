"""The exercises: unanswered, solved, answered wrongly and answered with what cannot be judged; all in one process.

A wrong answer is a solution with one passage replaced. It must get the line that names what it misses.
"""

import ast
import contextlib
import io
import json
import linecache
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
from test_notebooks import RULES, code_cells, text_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "exercises"
sys.path.insert(0, str(FOLDER))  # a notebook's kernel starts in its folder

import judge  # noqa: E402

judge.load()

NOTEBOOKS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.ipynb"))}
KEPT = ("executed_in_order", "no_stored_error", "no_stderr", "png_only", "no_nbval_markers", "short_cells", "plain_python")


def stored(cell: dict) -> str:
    return "".join(text_of(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def defines(cell: dict) -> str:
    """The task that a cell answers, or nothing."""
    body = ast.parse(text_of(cell["source"])).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name in judge.TASKS]
    return names[0] if len(names) == 1 == len(body) else ""


def tasks_of(stem: str) -> list[str]:
    return [name for cell in code_cells(NOTEBOOKS[stem]) if (name := defines(cell))]


TASKS = {name: stem for stem in NOTEBOOKS for name in tasks_of(stem)}


def solution(stem: str) -> str:
    return (FOLDER / "solutions" / f"{stem}.py").read_text(encoding="utf-8")


def run(stem: str, answers: dict[str, str]) -> list[str]:
    """What each code cell of the notebook prints, with these texts in the cells of the answers."""
    space, printed = {"__name__": "__main__"}, []
    for number, cell in enumerate(code_cells(NOTEBOOKS[stem])):
        text = answers.get(defines(cell), text_of(cell["source"]))
        name = f"<{stem}, code cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # as a notebook's kernel does
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, name, "exec"), space)
        printed.append(out.getvalue())
    return printed


def answered(name: str, text: str) -> str:
    """What the notebook says of one answer, after it has run to its end."""
    lines = "".join(run(TASKS[name], {name: text})).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"{name}, equation"))
    later = [at for at, line in enumerate(lines) if at > start and not line.startswith("  ")]
    return "\n".join(lines[start : later[0] if later else None])


# ------------------------------------------------------------------------------------------------------------ as shipped


def test_every_derivation_has_exercises_and_every_exercise_its_solution():
    numbers = {stem[:2] for stem in NOTEBOOKS}
    assert numbers >= {f"{n:02d}" for n in range(1, 10)}
    assert {path.stem for path in (FOLDER / "solutions").glob("*.py")} == {*NOTEBOOKS}
    assert {*TASKS} == {*judge.TASKS}, "a task without a notebook, or a cell without a task"
    for stem in NOTEBOOKS:
        assert (ROOT / "notebooks" / f"{stem}.ipynb").exists(), "named as the notebook that it belongs to"
        assert tasks_of(stem), stem


@pytest.mark.parametrize("stem", NOTEBOOKS)
@pytest.mark.parametrize("rule", KEPT)
def test_exercise_keeps_the_rules_of_notebooks(stem, rule):
    assert RULES[rule](NOTEBOOKS[stem], set()) == []


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_exercise_is_unanswered_and_readable(stem):
    cells = code_cells(NOTEBOOKS[stem])
    for cell in cells:
        assert max(map(len, text_of(cell["source"]).splitlines())) <= 88
        if defines(cell):
            (function,) = ast.parse(text_of(cell["source"])).body
            assert ast.unparse(function.body[-1]) == "...", f"{function.name} is answered: ship it open"
    prose = "\n".join(text_of(cell["source"]) for cell in NOTEBOOKS[stem]["cells"] if cell["cell_type"] == "markdown")
    assert f"solutions/{stem}.py" in prose and f"../notebooks/{stem}.ipynb" in prose
    levels = re.findall(r"<details><summary>Hint (\d): [^<]+</summary>\n\n(?:.+?)\n\n</details>", prose, re.DOTALL)
    assert levels == ["1", "2", "3"] * len(tasks_of(stem)), "three levels of hint for each function"


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_an_unanswered_exercise_runs_to_its_end_and_says_what_is_stored(stem):
    printed = run(stem, {})
    assert printed == [stored(cell) for cell in code_cells(NOTEBOOKS[stem])]
    assert sum("open. Write it in the cell above" in text for text in printed) == len(tasks_of(stem))


# ----------------------------------------------------------------------------------------------------------------- right


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_the_solution_is_right(stem):
    text = "".join(run(stem, dict.fromkeys(tasks_of(stem), solution(stem))))
    assert "  missed" not in text and ": cannot be judged" not in text and ": open." not in text, text
    for name in tasks_of(stem):
        assert re.search(rf"^{name}, equation .*: right$", text, re.MULTILINE), text
        assert re.search(rf"accepted by (all \d+ laws|the law) of \({judge.TASKS[name].tag}\)", text), text


@pytest.mark.parametrize("start", ["torch.arange(K)[:, None] / K", "torch.linspace(0, 1 - 1 / K, K)[:, None]"])
def test_a_start_of_the_interval_in_single_precision_is_no_mistake(start):
    """A quotient of integers is float32, off by 1e-8."""
    text = solution("02_estimators").replace("(torch.arange(K)[:, None] + u) / K", f"{start} + u / K")
    said = answered("strata", text)
    assert start in text and said.splitlines()[0].endswith(": right"), said


# ----------------------------------------------------------------------------------------------------------------- wrong


class Wrong(NamedTuple):
    """A solution in which `old` is `new`, the property that must be missed, and words of its line."""

    name: str
    old: str
    new: str
    title: str
    words: tuple[str, ...]


WRONG = [
    Wrong(
        "my_row", "num_states=2", "num_states=4", "the masked states", ("yours P(elbo_count_plan, num_states=4", "expected P")
    ),
    Wrong(
        "my_row", 'normalizer="kept_length"', 'normalizer="none"', "the gradient of the loss", ("off is normalizer: 'none'",)
    ),
    Wrong(
        "my_row", "cap=2.0", "cap=1.1", "the gradient of the loss", ("off is objective: P(truncated_is, floor=0.0, cap=1.1)",)
    ),
    Wrong("my_row", '"sequence_mean"', '"group_sum"', "the gradient of the loss", ("cosine 1.", "aggregation: 'group_sum'")),
    Wrong(
        "my_row",
        'anchor="old"',
        'anchor="old", refresh="independent"',
        "the same masks for all updates, before and after",
        ("yours 'independent'", "before the weights have moved"),
    ),
    Wrong(
        "my_row",
        'anchor="old"',
        'anchor="old", refresh="paired"',
        "the same masks for all updates, before and after",
        ("'paired' draws new ones for each update",),
    ),
    Wrong(
        "my_row", 'anchor="old"', 'anchor="behaviour"', "the gradient of the loss", ("two prompts with four answers: anchor",)
    ),
    Wrong("count_form", ".long() + 1", ".long()", "every count from 1 to n", ("yours 0 1 2, expected 1 2 3", "1 is missing")),
    Wrong(
        "count_form",
        "(u * n).floor().long() + 1",
        "(u * (n + 1)).floor().long()",
        "every count from 1 to n",
        ("yours 0 2 3, expected 1 2 3", "from 0 to n"),
    ),
    Wrong(
        "count_form",
        "rank < count[..., None]",
        "(noise < u[..., None]) & keep",
        "every count from 1 to n",
        ("yours 0 1 3, expected 1 2 3", "the time form"),
    ),
    Wrong(
        "count_form",
        "rank < count[..., None]",
        "(noise < (count / n)[..., None]) & keep",
        "every count from 1 to n",
        ("yours 0 3 3, expected 1 2 3", "l over n, which hides l only on average"),
    ),
    Wrong("count_form", "(u * n)", "((1 - u) * n)", "every count from 1 to n", ("yours 3 2 1", "1 less u")),
    Wrong(
        "count_form",
        "noise.masked_fill",
        "torch.rand_like(noise).masked_fill",
        "hides kept positions only",
        ("two different masks", "Draw nothing"),
    ),
    Wrong(
        "count_form",
        "keep.sum(-1)",
        "0 * keep.sum(-1) + keep.shape[1]",
        "every count from 1 to n",
        ("yours 1 3 4", "n is L"),
    ),
    Wrong("count_form", "(len(u) * count)", "count", "weight n / (K l)", ("yours 3 1.5 1, expected 1.5 0.75 0.5", "1/K")),
    Wrong(
        "count_form",
        ".argsort(-1).argsort(-1)",
        ".argsort(-1)",
        "the smallest noises, as in the example",
        ("yours 1010 0010", "argsort was taken once"),
    ),
    Wrong(
        "count_form",
        "noise.masked_fill",
        "(-noise).masked_fill",
        "the smallest noises, as in the example",
        ("yours 1010 1000", "largest noises"),
    ),
    Wrong(
        "count_form",
        "masked_fill(~keep, torch.inf).argsort(-1).argsort(-1)\n    masked = rank < count[..., None]",
        "argsort(-1).argsort(-1)\n    masked = (rank < count[..., None]) & keep",
        "hides kept positions only",
        ("expected 3 3", "takes no place"),
    ),
    Wrong("count_form", "masked_fill(~keep, torch.inf)", "clone()", "hides kept positions only", ("yours 111111",)),
    Wrong(
        "strata",
        "[:, None] + u)",
        "[:, None] + u[:1])",
        "every state and row has its own draw",
        ("0.55 0.65", "share the draw"),
    ),
    Wrong(
        "strata",
        "[:, None] + u)",
        "[:, None] + 0.5 + 0 * u)",
        "state k draws in the k-th of K intervals",
        ("0.125", "not used"),
    ),
    Wrong("strata", "(torch.arange(K)[:, None] + u) / K", "u", "the mean stays, the variance falls", ("are independent",)),
    Wrong("pairs", "(u * (n + 1))", "(u * n)", "counts from 0 to n", ("yours 0 1 1 2, expected 0 1 2 3", "multiplied by n")),
    Wrong("pairs", "keep & ~masked", "~masked", "each kept position once in a pair", ("0110 1001", "positions after EOS")),
    Wrong("pairs", ".clamp(min=1)", "", "weight (n + 1) / (K l)", ("inf", "clamp l to 1")),
    Wrong(
        "pairs",
        "rank < count[..., None]",
        "noise < u[..., None]",
        "counts from 0 to n",
        ("yours 0 1 3 3, expected 0 1 2 3", "as in the time form"),
    ),
    Wrong(
        "pairs",
        "rank < count[..., None]",
        "noise < (count / n)[..., None]",
        "counts from 0 to n",
        ("yours 0 0 3 3, expected 0 1 2 3", "only on average"),
    ),
    Wrong(
        "pairs",
        ".argsort(-1).argsort(-1)",
        ".argsort(-1)",
        "each kept position once in a pair",
        ("yours 1010 0010, expected 0110 0100. Hide", "argsort was taken once"),
    ),
    Wrong(
        "pairs",
        "noise.masked_fill",
        "(-noise).masked_fill",
        "each kept position once in a pair",
        ("yours 1010 1000", "largest noises"),
    ),
    Wrong(
        "pairs",
        "noise.masked_fill(~keep, torch.inf)",
        "noise",
        "each kept position once in a pair",
        ("yours 0100 0000", "noise of the last position counts"),
    ),
    Wrong("pairs", "(n + 1).double()", "n.double()", "the mean is the ELBO", ("yours -1.811, expected -2.415", "n over l")),
    Wrong("group_mean", "group.mean(1, keepdim=True)", "group.mean()", "each prompt has its own mean", ("whole batch",)),
    Wrong(
        "group_mean",
        "(group - group.mean(1, keepdim=True))",
        "((group - group.mean(1, keepdim=True)) / group.std(1, keepdim=True))",
        "no standard deviation",
        ("yours -0.7071 0.7071 -0.7071 0.7071, expected -0.5 0.5 -5 5", "standard deviation"),
    ),
    Wrong(
        "group_mean", "(-1, num_generations)", "(num_generations, -1)", "each prompt has its own mean", ("B over N members",)
    ),
    Wrong(
        "clip",
        "torch.minimum(ratio * adv, clipped * adv)",
        "clipped * adv",
        "beyond the clip the slope is 0, on one side",
        ("whatever",),
    ),
    Wrong(
        "clip",
        "torch.minimum(ratio * adv, clipped * adv)",
        "torch.minimum(ratio, clipped) * adv",
        "the value",
        ("yours -1.5 1.5 -0.5 0.5, expected -1.5 2 -0.5 0.8", "before adv"),
    ),
    Wrong("clip", "return -torch", "return torch", "on policy it is REINFORCE", ("yours 2 -3, expected -2 3", "gain")),
    Wrong(
        "clip", "(ll - anchor)", "(anchor - ll)", "the value", ("yours -0.5 0.8 -1.5 2", "upside down: it is exp of ll less")
    ),
    Wrong("clip", "(ll - anchor)", "(anchor - ll)", "on policy it is REINFORCE", ("yours 2 -3, expected -2 3", "upside down")),
    Wrong(
        "clip",
        "clamp(1 - epsilon_low, 1 + epsilon_high)",
        "clamp(1 - epsilon_high, 1 + epsilon_low)",
        "each side has its epsilon",
        ("changed places",),
    ),
    Wrong(
        "clip",
        "clamp(1 - epsilon_low, 1 + epsilon_high)",
        "clamp(1 - epsilon_high, 1 + epsilon_low)",
        "the value",
        ("yours -1.2 2 -0.5 0.5", "changed places"),
    ),
    *(
        Wrong(
            "group_mean",
            "(group - group.mean(1, keepdim=True))",
            f"((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True{more}))",
            "each prompt has its own mean",
            ("The means are right, but it was divided by the standard deviation",),
        )
        for more in (")", ") + 1e-4", ", correction=0)")
    ),
    Wrong(
        "mean_field",
        "torch.ones_like(keep)",
        "keep",
        "the whole response is hidden",
        ("yours 1100, expected 1111", "tell the length"),
    ),
    Wrong(
        "mean_field",
        " & prompt_mask",
        "",
        "prompt tokens are hidden where noise < p",
        ("yours 110, expected 010", "padding is hidden"),
    ),
    Wrong(
        "mean_field",
        "return hidden, keep",
        "return hidden, torch.ones_like(keep)",
        "kept tokens are scored",
        ("after EOS is scored",),
    ),
    Wrong(
        "mean_field",
        "(noise < p)",
        "(noise[:1] < p)",
        "each row has noise of its own",
        ("yours 110 110, expected 110 011", "the mask of the first row serves all rows"),
    ),
    Wrong(
        "two_means",
        "total.sum() / lengths.sum()",
        "(total / lengths).mean()",
        "token mean: all tokens count alike",
        ("yours 0", "over answers"),
    ),
    Wrong(
        "two_means",
        "(total / lengths).mean()",
        "total.mean()",
        "mean over answers: all answers count alike",
        ("yours 4", "divided by the answers"),
    ),
    Wrong(
        "two_means",
        "(total / lengths).mean()",
        "(total / lengths).mean().detach()",
        "what a token of each answer weighs",
        ("no gradient",),
    ),
    Wrong("nodes", "(x + 1) / 2", "x", "nodes in (0, 1)", ("yours -0.5774 0.5774, expected 0.2113 0.7887", "minus 1 to 1")),
    Wrong("nodes", "(x + 1) / 2", "(numpy.arange(num_nodes) + 0.5) / num_nodes", "nodes in (0, 1)", ("the middles of Q",)),
    Wrong("nodes", "(w / 2)", "(w)", "weights sum to 1", ("yours 0.5556 0.8889 0.5556", "minus 1 to 1")),
    Wrong("nodes", "(w / 2)", "(0 * w + 1 / num_nodes)", "weights sum to 1", ("all weights are equal",)),
    Wrong("sdmc", " & keep", "", "hidden where noise < t", ("yours 1001 1101, expected 1000 1100", "after EOS")),
    Wrong("sdmc", "noise < t", "noise > t", "hidden where noise < t", ("yours 0110 0010", "turned round")),
    Wrong("sdmc", "(w / t)", "(w / t / len(t))", "weight w / t", ("yours 1.25 0.3125, expected 2.5 0.625", "over K")),
    Wrong(
        "fixed_count",
        "1 + t[:, None] * (n - 1)",
        "t[:, None] * n",
        "what a hidden position sees on average",
        ("yours 1 6 10", "t n"),
    ),
    Wrong("fixed_count", " + 0.5).floor()", ").round()", "halves are rounded up", ("yours 2 2 4, expected 2 3 4", "even")),
    Wrong(
        "fixed_count",
        "n.double() / count",
        "(1 / t)[:, None].expand(count.shape)",
        "scale n / count",
        ("yours 10 2", "1 over t"),
    ),
    Wrong("snis", ".softmax(1)", ".exp()", "capped, then divided by the group's sum", ("not divided by the sum",)),
    Wrong("snis", ".view(-1, num_generations)", ".view(1, -1)", "the sum is that of the prompt's group", ("all rows",)),
    Wrong(
        "snis",
        ".softmax(1)",
        ".exp().div(capped.exp().sum(1, keepdim=True))",
        "no overflow",
        ("yours 0 0 0 0", "Stay in logarithms"),
    ),
    Wrong("snis", ".clamp(max=log_cap)", "", "capped, then divided by the group's sum", ("the cap does not act",)),
    Wrong("stable_loss", "ll.detach()", "ll", "slope -w adv, the capped answer included", ("flows through the weights",)),
    Wrong(
        "stable_loss",
        "adv * score",
        "adv * score / num_generations",
        "slope -w adv, the capped answer included",
        ("divided by N",),
    ),
    Wrong("stable_loss", "adv * score", "adv * ll", "the gradient flows through the score", ("`score`: it is not used",)),
    Wrong("stable_loss", "return -weight", "return weight", "slope -w adv, the capped answer included", ("gain",)),
    Wrong(
        "staircase",
        "[None, :] < noisy",
        "[None, :] <= noisy",
        "noisy tokens see clean ones of earlier blocks only",
        ("reads its own answer",),
    ),
    Wrong(
        "staircase",
        "block[None, :] <= block[:, None]",
        "block[None, :] >= block[:, None]",
        "clean tokens see their own block and earlier ones",
        ("clean token 0 (block 0) see clean token 2 (block 1): yours True, expected False",),
    ),
    Wrong(
        "staircase",
        "real[:, :P] = prompt_mask",
        "pass",
        "padding is seen by no one",
        ("prompt token 0 see padding token 0: yours True", "mask its column"),
    ),
    Wrong(
        "staircase",
        "noisy[None, :] == noisy",
        "noisy[None, :] <= noisy",
        "noisy tokens see their own noisy block",
        ("b_k == b_q",),
    ),
    Wrong(
        "staircase",
        "    clean_rows = torch.cat(",
        "    block[:P] = torch.arange(-P, 0)\n    clean_rows = torch.cat(",
        "all see the prompt, and the prompt sees itself alone",
        ("yours 100, expected 111", "the prompt is causal"),
    ),
    Wrong(
        "staircase",
        "return torch.cat([clean_rows, noisy_rows]) &",
        "return torch.cat([clean_rows, noisy_rows]).mT &",
        "not the right table transposed or in another order",
        ("rows and columns are exchanged", "the query is the row"),
    ),
    Wrong(
        "staircase",
        "    return torch.cat([clean_rows, noisy_rows]) & real[:, None, :]",
        "    sees = torch.cat([clean_rows, noisy_rows]) & real[:, None, :]\n"
        "    order = [*range(P), *range(P + length, P + 2 * length), *range(P, P + length)]\n"
        "    return sees[:, order][:, :, order]",
        "not the right table transposed or in another order",
        ("the order is prompt, noisy, clean", "Here it is prompt, clean, noisy"),
    ),
    Wrong(
        "positions",
        "(prompt_mask.long().cumsum(-1) - 1)",
        "(torch.ones_like(prompt_mask).long().cumsum(-1) - 1)",
        "real tokens are counted, padding is not",
        ("yours 1 2",),
    ),
    Wrong(
        "positions",
        "[prompt, response, response]",
        "[prompt, response, response + length]",
        "a noisy token stands where its clean one stands",
        ("yours 4 5, expected 2 3", "go on"),
    ),
    Wrong(
        "positions",
        "prompt_mask.sum(-1, keepdim=True) +",
        "0 * prompt_mask.sum(-1, keepdim=True) +",
        "real tokens are counted, padding is not",
        ("starts at 0",),
    ),
    Wrong(
        "top_steps",
        "descending=True",
        "descending=False",
        "the most uncertain steps first",
        ("yours 1 0 3, expected 2 3 0", "least uncertain"),
    ),
    Wrong(
        "top_steps",
        "ranked.argsort",
        "entropy.argsort",
        "steps after the decision come last, and are not valid",
        ("yours 3 4 2", "compete"),
    ),
    Wrong(
        "top_steps",
        "~decided.gather(0, steps)",
        "steps >= 0",
        "steps after the decision come last, and are not valid",
        ("yours 1 1 1 1", "padding"),
    ),
    Wrong(
        "top_steps",
        "ranked.argsort(dim=0, descending=True, stable=True)",
        "(len(ranked) - 1 - ranked.flip(0).argsort(dim=0, descending=True, stable=True))",
        "each response has its own steps, ties go to the earlier",
        ("yours 2 0 1 2, expected 0 2 1 2", "later"),
    ),
    Wrong(
        "passed_over",
        "(confidence < limit)",
        "(confidence > limit)",
        "tokens below the limit, in sum",
        ("yours 60, expected 40", "above the limit"),
    ),
    Wrong(
        "passed_over",
        "token_confidence(logits)",
        "token_confidence(logits / temperature)",
        "drawn at the temperature, compared at temperature 1",
        ("at the sampling temperature",),
    ),
    Wrong("passed_over", " & later)", ")", "ties", ("yours 50 50, expected 20 50", "always lose")),
    Wrong(
        "passed_over",
        "(confidence < limit)",
        "(confidence > limit)",
        "finite where F is 0",
        ("log F is 0, expected the log of the smallest positive number, -708.4",),
    ),
    Wrong("passed_over", ".clamp(min=torch.finfo(F.dtype).tiny)", "", "finite where F is 0", ("log F is -inf", "Clamp")),
    Wrong(
        "trust_mask",
        "torch.sign(adv) * log_ratio > 0",
        "log_ratio > 0",
        "outside, the way out is barred and the way back is open",
        ("sign of adv is not used",),
    ),
    Wrong(
        "trust_mask",
        "~(outside & away)",
        "~outside",
        "outside, the way out is barred and the way back is open",
        ("everything outside",),
    ),
    Wrong("trust_mask", "~(outside & away)", "~away", "inside, all learn", ("yours 0 1 1 0", "outside is not used")),
    *(
        Wrong("trust_mask", "outside & away", "outside | away", title, ("outside or moves away is barred",))
        for title in ("outside, the way out is barred and the way back is open", "inside, all learn")
    ),
    *(
        Wrong("drpo_loss", "(ratio - 1)", "mu * (ratio - 1)", title, ("mu stands there squared",))
        for title in ("0 at the boundary, turned back beyond", "the same for bad answers, mirrored", "rare tokens have room")
    ),
    Wrong("drpo_loss", "adv.abs()", "adv", "the same for bad answers, mirrored", ("yours 2 3, expected 0 -1", "modulus")),
    Wrong("drpo_loss", " * mu", "", "rare tokens have room", ("yours -19, expected 0.8", "SPO")),
    Wrong("drpo_loss", "mu * ", "", "0 at the boundary, turned back beyond", ("yours 1 -0.25 -1.5 -4", "mu is missing")),
    Wrong("drpo_loss", "(2 * delta)", "delta", "0 at the boundary, turned back beyond", ("yours 1 0 -1 -3", "1 half")),
    Wrong("drpo_loss", "- penalty", "+ penalty", "0 at the boundary, turned back beyond", ("yours 1 1.5 2 3", "reward")),
]


@pytest.fixture
def without_laws(monkeypatch):
    """The examples alone: they are what helps, and the laws take a second a task."""
    monkeypatch.setattr(judge, "by_the_laws", lambda one, ask, missed: ["  missed  laws"])


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.name}: {wrong.new}"[:60])
def test_a_wrong_answer_gets_the_line_that_helps(wrong, without_laws):
    text = solution(TASKS[wrong.name])
    assert text.count(wrong.old) == 1 and wrong.old != wrong.new
    said = answered(wrong.name, text.replace(wrong.old, wrong.new))
    assert "not yet right" in said.splitlines()[0]
    (line,) = [line for line in said.splitlines() if line.startswith(f"  missed  {wrong.title}: ")]
    assert all(word in line for word in wrong.words), line


class Astray(NamedTuple):
    """A solution with one passage replaced, and the advice of a later line, which is about another mistake."""

    name: str
    old: str
    new: str
    advice: str


ASTRAY = [
    Astray("count_form", ".long() + 1", ".long()", "without the last position"),
    Astray(
        "count_form",
        "noise.masked_fill(~keep, torch.inf).argsort(-1).argsort(-1)\n    masked = rank < count[..., None]",
        "(noise * keep).argsort(-1).argsort(-1)\n    masked = (rank < count[..., None]) & keep",
        "1 is missing",
    ),
    Astray("strata", "torch.arange(K)", "(1 + torch.arange(K))", "One shared draw"),
    Astray("pairs", "(u * (n + 1)).floor().long()", "(u * n + 1).floor().long()", "stack on a new axis"),
    Astray("pairs", "rank < count[..., None]", "noise < u[..., None]", "stack on a new axis"),
    Astray("clip", "(ll - anchor)", "(anchor - ll)", "gain was not turned"),
    Astray("group_mean", "group.mean(1, keepdim=True)", "group.mean()", "A spread ten times"),
    Astray("clip", "torch.minimum(ratio * adv, clipped * adv)", "torch.minimum(ratio, clipped) * adv", "whatever the sign"),
    Astray("staircase", "[clean_rows, noisy_rows]) &", "[clean_rows, noisy_rows]).mT &", "reads its own answer"),
]


@pytest.mark.parametrize("wrong", ASTRAY, ids=lambda wrong: f"{wrong.name}: {wrong.advice}")
def test_one_mistake_gets_no_advice_about_another(wrong, without_laws):
    """Of several lines the first says what is to be done; a later one only if it recognises its own mistake."""
    text = solution(TASKS[wrong.name])
    assert text.count(wrong.old) == 1
    said = answered(wrong.name, text.replace(wrong.old, wrong.new))
    assert said.count("  missed  ") >= 3 and wrong.advice not in said, said


def test_the_first_line_keeps_its_advice_and_a_later_one_what_it_recognises(without_laws):
    one = judge.Task("f", "0.0", "f", (), ("x float 1",), None)
    x = judge.torch.ones(1)
    one.has("a")(lambda ask: judge.demand("A", x, [2.0], "Do this.", it_is_one=[3.0]))
    one.has("b")(lambda ask: judge.demand("B", x, [2.0], "Do that.", it_is_one=[3.0]))
    one.has("c")(lambda ask: judge.demand("C", x, [2.0], "Do that too.", it_is_one=[1.0]))
    assert judge.verdict(one, lambda: x)[1:4] == [
        "  missed  a: A: yours 1, expected 2. Do this.",
        "  missed  b: B: yours 1, expected 2.",
        "  missed  c: C: yours 1, expected 2. Do that too. It looks as if it is one.",
    ]


def test_every_task_has_three_wrong_answers():
    for name in judge.TASKS:
        assert sum(wrong.name == name for wrong in WRONG) >= 3, name


# ------------------------------------------------------------------------------------------------------- cannot be judged


def arguments(name: str) -> str:
    return ", ".join(judge.Tensors.read(text).name for text in judge.TASKS[name].takes)


def changing(name: str, change: str) -> str:
    """The solution, its first tensor changed after the fact."""
    several = len(judge.TASKS[name].returns) > 1
    first = "found[0]" if several else "found"
    back = f"({change.format(first)}, *found[1:])" if several else change.format(first)
    text = f"{solution(TASKS[name])}\n\nright = {name}\n\n\ndef {name}(*given):\n    found = right(*given)\n    return {back}\n"
    return text


@pytest.mark.parametrize("name", judge.TASKS)
def test_what_cannot_be_judged_ends_in_one_line(name):
    told = f"{name}, equation ({judge.TASKS[name].tag}), as {judge.TASKS[name].place}: "
    first = judge.Tensors.read(judge.TASKS[name].returns[0]).name
    head = f"def {name}({arguments(name)}):\n    "
    said = {
        "": "open. No function",
        f"{name} = None": "open. No function",
        f"{name} = 3": "it is of type int, not a function",
        f"{head}...": "open. Write it in the cell above",
        f"{head}pass": "open. Write it in the cell above",
        f"{head}return 1 / 0": "cannot be judged. raised ZeroDivisionError: division by zero in `return 1 / 0`",
        f"{head}return undefined": "cannot be judged. raised NameError: name 'undefined' is not defined in `return undefined`",
        f"{head}raise SystemExit": "cannot be judged. raised SystemExit in `raise SystemExit`",
        f"def {name}(a, b, c, d, e, f, g):\n    return 1": "cannot be judged. raised TypeError",
    }
    if name != "my_row":
        said |= of_tensors(name, first)
    for text, words in said.items():
        line = answered(name, text)
        assert line.startswith(told + words) and "\n" not in line, line


def of_tensors(name: str, first: str) -> dict[str, str]:
    return {
        changing(name, "{}[None]"): f"cannot be judged. {first} has the shape (1,",
        changing(name, "{}.to(__import__('torch').complex64)"): f"cannot be judged. {first} is complex64; it must be ",
        changing(name, "{}.tolist()"): f"cannot be judged. {first} is of type ",
    }


def test_an_answer_in_single_precision_is_told_where_it_comes_from():
    said = answered("count_form", solution("01_masked_diffusion").replace("n.double()", "n"))
    assert said.endswith(
        "weight is float32; it must be float64, as the arguments are: a quotient of integers is float32, see .double()"
    )


def test_an_answer_with_too_few_values_is_told_how_many():
    said = answered("count_form", changing("count_form", "{}").replace("return (found[0], *found[1:])", "return found[0]"))
    assert said.endswith("cannot be judged. it returned one tensor; return 2: masked, weight")


def test_an_answer_that_writes_into_its_arguments_is_told_so():
    text = solution("01_masked_diffusion").replace("noise.masked_fill(", "noise.masked_fill_(")
    assert answered("count_form", text).endswith("cannot be judged. noise has changed: work on a copy, not in place")


def test_an_answer_that_raises_in_a_law_only_is_told_by_the_law():
    """The examples are small: what is wrong at another size is seen by the laws, and the notebook goes on."""
    text = changing("count_form", "{} if len(given[0]) < 100 else 1 / 0")
    said = answered("count_form", text).splitlines()
    assert said[0].endswith("not yet right") and "missed" not in "".join(said[1:7])
    told = [line for line in said if line.startswith("            found: ")]
    assert told and all("raised ZeroDivisionError: division by zero" in line for line in told), said


@pytest.mark.parametrize("cloned", [False, True])
def test_what_the_judge_lacks_is_named(cloned, tmp_path, monkeypatch, capsys):
    def load():
        raise ModuleNotFoundError(name="laws")

    monkeypatch.setattr(judge, "load", load)
    if not cloned:
        monkeypatch.setattr(judge, "HERE", tmp_path / "exercises")
    judge.examine("anything")
    told = "the exercises need laws: pip install" if cloned else "open this in a clone of the project"
    assert told in capsys.readouterr().out


def test_laws_are_named_only_where_no_property_has_said_what_is_wrong():
    def law_sum(alg):
        """The sum is 1."""
        raise AssertionError("it is 2")

    one = types.SimpleNamespace(laws=lambda ask: [("law_sum", law_sum)], tag="1.1")
    assert judge.by_the_laws(one, None, 1) == ["  missed  accepted by 0 of 1 laws of (1.1)"]
    first, says, found = judge.by_the_laws(one, None, 0)
    assert says.split(": ")[1] == "The sum is 1." and found.strip() == "found: it is 2"
