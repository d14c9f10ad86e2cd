"""The index is read off the sources: nothing is missing, every line is right, and a term is found where it is implemented."""

import ast
import dataclasses
from pathlib import Path

import pytest

import judged
from minidrl import config, index, methods, sampler
from minidrl.__main__ import main
from minidrl.tasks import DEFAULT, TASKS, task_class

ROOT = Path(__file__).parent.parent
KNOWN = index.entries()
COMMAND = "run `python -m minidrl.index`"


def test_the_page_is_current():
    assert index.PAGE.read_text(encoding="utf-8") == index.page(KNOWN), f"docs/index.md is not what the sources say: {COMMAND}"
    assert index.page() == index.page(KNOWN)


def missing(page: str) -> list[str]:
    """The equations and rows without a line of their own in docs/index.md."""
    wanted = [f"| ({tag}) |" for tag, _, _ in judged.equations()]
    wanted += [f"| [`{name}`](../minidrl/methods.py#L" for name in methods.METHODS]
    lines = page.splitlines()
    return [start for start in wanted if sum(line.startswith(start) for line in lines) != 1]


def test_every_equation_and_every_row_is_in_the_page():
    assert missing(index.PAGE.read_text(encoding="utf-8")) == [], COMMAND


@pytest.mark.parametrize("start", ["| (2.6) |", "| [`gdpo`]"])
def test_an_equation_or_a_row_that_is_missing_is_seen(start):
    page = index.page(KNOWN)
    assert len(missing("\n".join(line for line in page.splitlines() if not line.startswith(start)))) == 1


def test_every_line_is_where_the_name_is_defined():
    sources = {}
    for entry in KNOWN:
        lines = sources.setdefault(entry.file, (ROOT / entry.file).read_text(encoding="utf-8").splitlines())
        name, line = entry.name.rpartition(".")[2], lines[entry.line - 1]
        if entry.kind == "row":
            assert line.startswith(f'row("{name}", '), entry
        elif entry.kind != "module":
            assert name in line, entry
        for paragraph in entry.prose:
            for number, text in enumerate(paragraph.lines):
                assert text in lines[paragraph.line - 1 + number], entry


def test_every_row_and_its_functions_are_those_of_the_table():
    rows = {entry.name: entry for entry in KNOWN if entry.kind == "row"}
    assert list(rows) == list(methods.METHODS)
    for name, method in methods.METHODS.items():
        parts = {part: getattr(method, part) for part in index.PARTS}
        assert rows[name].functions == {part: value.func.__name__ for part, value in parts.items() if value}
        assert [paragraph.lines[0] for paragraph in rows[name].prose] == [method.title, method.source, method.differs]


# Query and the name that comes first, with what else must be among the answers.
FOUND = {
    "SDMC": ("quadrature_plan", "gdpo"),
    "unconditional clipping": ("self_normalized_weights", "self_normalized_clip"),
    "Binary-TV mask": ("trust_mask", "dppo-tv"),
    "2606.09821": ("drpo", "drpo"),
    "arXiv:2510.08554": ("gdpo", "quadrature_plan"),
    "8.13": ("drpo", "drpo"),
    "(2.6)": ("quadrature_plan", "quadrature_plan"),
    "gdpo": ("gdpo", "quadrature_plan"),
    "quadrature_plan": ("quadrature_plan", "quadrature_plan"),
    "two pass backward": ("two_pass_backward", "two_pass_backward"),
    "Gauss-Legendre quadrature": ("gauss_legendre", "gauss_legendre"),
    "total variation trust region": ("dppo", "dppo"),
    "group sequence policy optimization": ("ppo_clip", "ppo_clip"),
    "weighted log-likelihood": ("softmax_contrast", "softmax_contrast"),
    "linear lower bound": ("tangent", "tangent"),
    "dynamic sampling": ("Learner.step", "Train"),
    "SUBS parameterization": ("Denoiser.head", "Denoiser.head"),
    "trajectory shrinkage": ("merged_plan", "merged_plan"),
    "step selection by entropy": ("entropy_plan", "entropy_plan"),
}


@pytest.mark.parametrize("query", FOUND)
def test_a_term_is_found_where_it_is_implemented(query):
    hits = [hit.entry.name for hit in index.where(query, KNOWN)]
    first, also = FOUND[query]
    assert hits[0] == first and also in hits and len(hits) <= index.MOST


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_method_is_its_row_and_the_lines_of_its_parts(name):
    hits = [hit.entry for hit in index.where(name, KNOWN)]
    method = methods.METHODS[name]
    assert (hits[0].kind, hits[0].name) == ("row", name)
    named = [entry.name for entry in hits if entry.room == "algorithms"]
    assert {method.plan.func.__name__, method.objective.func.__name__, method.credit.func.__name__} <= set(named)


@pytest.mark.parametrize("tag", sorted({tag for tag, _, _ in judged.equations()}))
def test_a_tag_is_its_equation(tag):
    (hit,) = index.where(tag, KNOWN)
    assert hit.entry.tag == tag


def test_spellings_and_hyphens_make_no_difference():
    for queries in (
        ("self-normalised weights", "self normalized weight", "SelfNormalized-weights"),
        ("behaviour policy", "Behavior-Policy", "behaviour policies"),
        ("low-confidence remasking", "low confidence remasking", "lowconfidence re-masking"),
        ("Rényi divergence", "renyi divergences"),
    ):
        assert len({tuple(hit.entry.place for hit in index.where(query, KNOWN)[:1]) for query in queries}) == 1, queries


def test_a_word_does_not_match_inside_others():
    """ "tis" is neither in "that is" nor in "statistics"."""
    text = index._Text(index.Paragraph(1, ("that is statistics, k - 1",)), index.plain)
    assert text.phrase(["tis"]) is None and text.phrase(["k1"]) is not None and text.phrase(["thatis"]) is not None


def test_words_that_stand_apart_are_no_answer():
    """Every word of a term stands somewhere in a long docstring: only a short passage that holds them all is a hit."""
    apart = " ".join(["clip", *["word"] * (index.NEAR - 2), "of", "ratio"])
    text = index._Text(index.Paragraph(1, (f"ratio {apart}",)), index.stem)
    assert text.near(["ratio", "clip"]).line == 1 and text.near(["clip", "of", "ratio"]).line == 1
    assert index._Text(index.Paragraph(1, (apart,)), index.stem).near(["ratio", "clip"]) is None
    closer = apart.replace("word ", "", 1)  # NEAR words from the first to the last
    assert index._Text(index.Paragraph(1, (closer,)), index.stem).near(["ratio", "clip"]).line == 1
    found = index._Text(index.Paragraph(7, (apart, "the ratio that", "a clip cuts")), index.stem).near(["clip", "ratio"])
    assert (found.line, found.lines) == (8, ("the ratio that",))
    found = index._Text(index.Paragraph(7, (apart, "ratio that", "a clip cuts")), index.stem).near(["clip", "ratio"])
    assert (found.line, found.lines) == (8, ("ratio that",)), "the passage begins with the line"


def test_a_module_is_no_answer_for_words_near_each_other():
    line = index.Paragraph(1, ("What stands here is near there.",))
    known = [index.Entry("a.py", 1, "a", "module", prose=(line,)), index.Entry("b.py", 1, "b", "function", prose=(line,))]
    hits = index.where("near here", known)
    assert [(hit.entry.name, hit.rank) for hit in hits] == [("b", 3), ("a", 4)]
    assert [hit.entry.name for hit in index.where("stands here", known)] == ["b", "a"]


def said(name: str, *lines: str, kind: str = "function", tag: str = "") -> index.Entry:
    """An entry of a package that is not there, in a file of its own."""
    return index.Entry(f"{name}.py", 1, name, kind, tag, (index.Paragraph(1, lines),))


def test_of_entries_that_hold_the_same_words_equations_come_first_and_modules_and_constants_last():
    line = " ".join(["Alpha", *["word"] * index.NEAR, "gamma."])
    kinds = ("constant", "module", "function", "row")
    known = [*(said(kind, line, kind=kind) for kind in kinds), said("equation", line, tag="1.1")]
    hits = index.where("alpha gamma", known)
    assert {hit.rank for hit in hits} == {4}, "not near each other"
    assert [hit.entry.name for hit in hits] == ["equation", "row", "function", "constant", "module"]


def test_a_term_that_is_cut_elsewhere_comes_after_those_that_are_cut_alike():
    known = [said("c", "First.", "", "Second.", "The form k - 1."), said("b", "The form k - 1."), said("a", "The form k1.")]
    hits = index.where("k1", known)
    assert [(hit.entry.name, hit.rank, hit.late) for hit in hits] == [("a", 1, 0), ("b", 1, 2), ("c", 1, 3)]


def test_the_beginning_of_a_word_is_enough():
    known = [said("a", "Stratified draws of the nodes."), said("b", "Draws of the nodes.")]
    (hit,) = index.where("stratif draws", known)
    assert (hit.entry.name, hit.matched.lines) == ("a", ("Stratified draws of the nodes.",))


def test_what_cites_a_paper_is_told_without_the_rows_that_use_it():
    """These are the answers themselves; after a function that was asked for by name come the rows that use it, six of them."""
    assert "rows:" not in index.answer("2510.08554") and " gdpo " in index.answer("2510.08554")
    rows = {name: [row.name for row in KNOWN if name in row.functions.values()] for name in ("quadrature_plan", "ppo_clip")}
    few, many = rows.values()
    assert 1 < len(few) <= 6 < len(many)
    assert index.answer("quadrature_plan").splitlines()[1] == f"    rows: {', '.join(few)}"
    assert index.answer("ppo_clip").splitlines()[1] == f"    rows: {', '.join(many[:6])} and {len(many) - 6} more"


def test_the_words_that_do_stand_together_are_told_where_the_query_has_no_answer():
    known = [said("a", "Alpha beta."), said("b", "Gamma.")]
    with pytest.raises(ValueError, match=r"which no docstring holds; near: 'alpha beta' in a \(a.py:1\)$"):
        index.where("alpha gamma xyzzyx beta", known)


def test_words_that_stand_nowhere_together_have_answers_that_say_so(capsys):
    """Rare words weigh more than common ones; what holds little of the query is no answer."""
    assert main(["where", "low-confidence", "trust", "region"]) == 0
    head, first = capsys.readouterr().out.splitlines()[:2]
    assert head.endswith("these have some of them:") and " trust_mask " in first
    for words, name in (("coupled staircase", "complementary_plan"), ("sandwiched bound", "eubo")):
        hits = index.where(words, KNOWN)
        assert hits[0].rank == 4 and name in [hit.entry.name for hit in hits]


def test_the_line_that_matched_is_printed(capsys):
    assert main(["where", "coupled", "sampling"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("minidrl/algorithms.py:") and "  complementary_plan  (2.4) ELBO from pairs" in first
    number, _, text = second.strip().partition(": ")
    assert "coupled sampling" in text
    assert (ROOT / "minidrl" / "algorithms.py").read_text().splitlines()[int(number) - 1].strip() == text


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["quadrture"], "near: quadrature"),
        (["gdpp"], "gdpo"),
        (["stratfied", "sampling"], "near: stratified"),
        (["xyzzyx"], "nothing is near"),
        (["xyzzyx", "ratio", "of", "plugh"], "got 'xyzzyx ratio of plugh'"),
        (["--", "?"], "holds"),
    ],
)
def test_an_unknown_word_is_one_line_with_the_nearest(words, near, capsys):
    assert main(["where", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("minidrl: where: got ") and error.count("\n") == 1 and near in error


def test_no_room_is_imported():
    """An answer is due within a second: index.py may import what is at hand, and tables.py."""
    tree = ast.parse((ROOT / "minidrl" / "index.py").read_text())
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in froms if name.startswith("minidrl")} == {"minidrl.tables"}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not {"torch", "numpy", "transformers"} & {name.partition(".")[0] for name in names | froms}


# ------------------------------------------------------------------------------------------- the keys that --help lists


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def expected(kind: type) -> dict[str, str]:
    """{key: default} from the classes themselves."""
    made = sampler.Sampler(order="random", temperature=1.0, length=8, block_length=8, tokens_per_step=1)
    settings, keys = kind(sampler=made), {}
    required = [f.name for f in dataclasses.fields(made) if f.default is dataclasses.MISSING]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not dataclasses.is_dataclass(value):
            keys[field.name] = shown(value)
            continue
        for inner in dataclasses.fields(value):
            keys[f"{field.name}.{inner.name}"] = shown(getattr(value, inner.name))
    keys |= {f"sampler.{name}": "(required)" for name in required}
    return keys | {"task.name": DEFAULT}


def sections(lines: list[list[str]]) -> list[dict[str, str]]:
    """The keys that are listed with their defaults, in a dictionary of its own from each task.name on."""
    found: list[dict[str, str]] = [{}]
    for key, value, *_ in lines:
        found += [{}] * (key == "--task.name")
        found[-1] = found[-1] | {key.removeprefix("--"): value}
    return found


@pytest.mark.parametrize("kind", [config.Train, config.Pretrain])
def test_help_lists_every_key_with_its_default(kind, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([kind.__name__.lower(), "--help"])
    out, error = capsys.readouterr()
    assert stopped.value.code == 0 and error == ""
    lines = [line.split() for line in out.splitlines() if line.startswith("  --") and "default runs" not in line]
    first, *tasks = sections([line for line in lines if line[0] not in ("--out", "--resume")])
    assert [found["task.name"].rstrip(",") for found in tasks] == [*TASKS]
    last = {key: value for key, value in tasks[-1].items() if not key.startswith("task.")}  # the sections after the tasks
    assert first | tasks[0] | last == expected(kind)
    for name, found in zip(TASKS, tasks, strict=True):
        keys = {f"task.{f.name}": shown(getattr(task_class(name)(), f.name)) for f in dataclasses.fields(task_class(name))}
        assert {key: value for key, value in found.items() if key.startswith("task.") and key != "task.name"} == keys


def test_the_numbers_of_a_method_are_mentioned_where_there_is_a_method():
    line = "a method's numbers: --method_options.KEY value; `methods NAME` lists them"
    assert index.settings_help("Train").endswith(f"\n\n{line}") and line not in index.settings_help("Pretrain")
