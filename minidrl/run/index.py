"""The index: where each equation, term, paper and row stands, read off the sources.

Nothing is kept in a list: what a function implements, its docstring says. The files are parsed, not
imported, so that an answer takes no longer than reading them. ``python -m minidrl.run.index`` writes
docs/index.md, and the line numbers of links in notebooks and docs.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from minidrl.run.tables import markdown_table

PACKAGE = Path(__file__).parent
PAGE = PACKAGE.parent / "docs" / "index.md"
# In this order hits of one rank are shown; a file that is not named here comes after these.
ROOMS = (
    "algorithms",
    "methods",
    "features",
    "gradient",
    "sampler",
    "denoiser",
    "trainer",
    "distributed",
    "memory",
    "config",
    "oracle",
    "estimators",
)
PARTS = ("plan", "credit", "objective", "extra")  # of a row: functions of algorithms.py
MOST = 12  # hits that are shown
MOST_WORDS = 5  # of a query without an answer: so many are tried together
NEAR = 12  # words among which those of a term stand, where they do not stand in a row
SURE = 3  # hits that hold a term come first, so many; then all are weighed word by word
ENOUGH = 0.4  # of a query's weight: what an entry must hold to be an answer
TAG = re.compile(r"\((\d+\.\d+)\) ")
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")

# ------------------------------------------------------------------------------- 1. What there is


class Paragraph(NamedTuple):
    """Some lines of prose, and the number of the first of them in the file."""

    line: int
    lines: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A function, class, module, constant or row: where it stands, and what is said of it."""

    file: str
    line: int
    name: str
    kind: str
    tag: str = ""
    prose: tuple[Paragraph, ...] = ()
    functions: dict[str, str] = field(default_factory=dict)  # of a row: part -> function

    @property
    def place(self) -> str:
        """As an editor opens it."""
        return f"{self.file}:{self.line}"

    @property
    def room(self) -> str:
        """The file's name, without the folder and the suffix."""
        return Path(self.file).stem

    @property
    def title(self) -> str:
        """The first sentence of what is said of it."""
        return sentence(" ".join(self.prose[0].lines)) if self.prose else ""

    @cached_property
    def arxiv(self) -> tuple[str, ...]:
        """The arXiv numbers that it cites."""
        text = " ".join(line for paragraph in self.prose for line in paragraph.lines)
        return tuple(dict.fromkeys(ARXIV.findall(text)))


def sentence(text: str) -> str:
    """The first sentence of a text, on one line."""
    text = " ".join(text.split())
    return re.split(r"(?<=\w\w[.])\s(?=[A-Z`])|(?<=[)\]]\.)\s(?=[A-Z`])", text, maxsplit=1)[0]


@cache
def entries(package: Path = PACKAGE, only: tuple[str, ...] = ("*.py",)) -> list[Entry]:
    """Everything in the sources of a package, in the order of ROOMS and of the lines.

    Not in those that speak of all the others: this file and cards.py.
    """
    found = []
    for path in sorted(path for name in only for path in package.rglob(name)):
        if path.name in ("index.py", "cards.py"):
            continue
        file = path.relative_to(package.parent).as_posix()
        found += _of_file(file, path.read_text(encoding="utf-8"))
    return sorted(found, key=lambda entry: (_room_rank(entry), entry.file, entry.line))


def _room_rank(entry: Entry) -> int:
    return ROOMS.index(entry.room) if entry.room in ROOMS else len(ROOMS)


def _of_file(file: str, source: str) -> Iterator[Entry]:
    tree = ast.parse(source)
    yield Entry(file, 1, Path(file).stem, "module", prose=_prose(tree))
    for node in tree.body:
        if row := _row(node):
            name, texts, functions = row
            yield Entry(file, node.lineno, name, "row", "", texts, functions)
        yield from _definitions(file, node, "")


def _definitions(file: str, node: ast.stmt, inside: str) -> Iterator[Entry]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        tag = TAG.match(ast.get_docstring(node) or "")
        name = inside + node.name
        yield Entry(file, node.lineno, name, kind, tag[1] if tag else "", _prose(node))
        for child in node.body if kind == "class" else ():
            yield from _definitions(file, child, f"{name}.")
    elif isinstance(node, ast.Assign | ast.AnnAssign) and not inside:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield Entry(file, node.lineno, target.id, "constant")


def _prose(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> tuple[Paragraph, ...]:
    """The paragraphs of a docstring."""
    text = ast.get_docstring(node, clean=False)
    if text is None:
        return ()
    found, now, first = [], [], node.body[0].lineno
    for number, line in enumerate([*text.split("\n"), ""], first):
        if line.strip():
            now.append(line.strip())
        elif now:
            found.append(Paragraph(number - len(now), tuple(now)))
            now = []
    return tuple(found)


def _row(node: ast.stmt) -> tuple[str, tuple[Paragraph, ...], dict[str, str]] | None:
    """Name, texts and functions of a call ``row(..)`` in the table of methods.py."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        return None
    if call.func.id != "row":
        return None
    name, words = call.args[0], {word.arg: word.value for word in call.keywords}
    said = [words[word] for word in ("title", "source", "differs") if word in words]
    texts = tuple(Paragraph(part.lineno, (part.value,)) for part in said)
    calls = {part: words[part] for part in PARTS if isinstance(words.get(part), ast.Call)}
    return name.value, texts, {part: value.args[0].attr for part, value in calls.items()}


# -------------------------------------------------------------------------------------- 2. Words

_TOKEN = re.compile(r"\d+(?:\.\d+)+|[a-z0-9]+")
_ENDINGS = ("ion", "ing", "ed", "or", "er", "ly", "al", "e")
_LEFT = {"e": 3, "al": 5}  # letters that must be left of a word when its ending goes; else 4
_SMALL = {"a", "an", "and", "as", "by", "for", "in", "of", "on", "or", "the", "to", "with"}


@cache
def plain(word: str) -> str:
    """A word without what two spellings of it differ in: -ise and -ize, our and or, plural s."""
    if len(word) > 4:
        word = re.sub(r"our(?=$|s$|al$|ed$|ing$)", "or", word)
        word = re.sub(r"is(?=(e|es|ed|ing|er|ers|ation|ations)$)", "iz", word)
        word = re.sub(r"^centr(?=e|ing)", "center", word)
    if len(word) < 4:
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    if re.search(r"(ss|x|ch|sh|zz)es$", word):
        return word[:-2]
    return word[:-1] if re.search(r"[^suia]s$", word) else word


@cache
def stem(word: str) -> str:
    """A word without its ending: clip of clipped and clipping, normaliz of normalisation."""
    word = plain(word)
    word = re.sub(r"(?<=i[zf])(ic)?ation$", "", word)
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _LEFT.get(ending, 4):
            word = stem(word[: -len(ending)])
            break
    return re.sub(r"([bdgklmnprt])\1$", r"\1", word)


def tokens(text: str) -> list[str]:
    """The words of a text: no case, no accents, cut at hyphens, underscores and blanks."""
    text = unicodedata.normalize("NFKD", text).lower()
    text = "".join(sign for sign in text if not unicodedata.combining(sign))
    return _TOKEN.findall(re.sub(r"['’]s\b", "", text))


class _Text:
    """A paragraph for searching: its words, each with its line."""

    def __init__(self, paragraph: Paragraph, how: Callable[[str], str]):
        self.paragraph, self.words, self.at = paragraph, [], []
        for number, line in enumerate(paragraph.lines):
            found = [how(word) for word in tokens(line)]
            self.words += found
            self.at += [number] * len(found)
        self.starts, place = {}, 0
        for number, word in enumerate(self.words):
            self.starts[place] = number
            place += len(word)
        self.starts[place] = len(self.words)
        self.joined = "".join(self.words)

    def phrase(self, query: list[str]) -> Paragraph | None:
        """The lines that hold the words in a row, whether or not a blank stands between them."""
        whole, place = "".join(query), -1
        while (place := self.joined.find(whole, place + 1)) >= 0:
            first, end = self.starts.get(place), self.starts.get(place + len(whole))
            if first is not None and end is not None:
                return self._lines(self.at[first], self.at[end - 1])
        return None

    def near(self, query: list[str]) -> Paragraph | None:
        """The line where the shortest passage begins that holds all the words, if it has at most
        NEAR words."""
        wanted = {word for word in query if word not in _SMALL} or {*query}
        last, passages = {}, []
        for end, word in enumerate(self.words):
            if word in wanted:
                last[word] = end
            if len(last) == len(wanted):
                begin = min(last.values())
                passages.append((end - begin, begin))
        length, begin = min(passages, default=(NEAR, 0))
        return self._lines(self.at[begin], self.at[begin]) if length < NEAR else None

    def _lines(self, first: int, last: int) -> Paragraph:
        paragraph = self.paragraph
        return Paragraph(paragraph.line + first, paragraph.lines[first : last + 1])


# ------------------------------------------------------------------------------------- 3. Search


class Hit(NamedTuple):
    """An entry that answers, and the lines of it that do.

    rank    0: it was asked for by name or tag; 1: it holds the phrase; 2: but for endings; 3: all
            the words near each other, which tells nothing of a module; 4: some of the words
    late    0: in its first lines; 1: later; 2 and 3: the same, but cut into words elsewhere (k - 1
            for k1)
    """

    rank: int
    entry: Entry
    matched: Paragraph | None
    late: int = 0


def where(query: str, known: list[Entry] | None = None) -> list[Hit]:
    """What implements a tag, a term, an arXiv number, a function or a row, the best first.

    Raises ValueError, with the nearest words, where nothing does.
    """
    known = entries() if known is None else known
    hits = _tagged(query, known) or _cited(query, known)
    if not hits:
        found = _found(query, known) or _begun(query, known)
        if found and found[0].rank == 0:
            return found[:MOST]
        known_hits = {hit.entry: hit for hit in found}
        weighed = [known_hits.get(e, Hit(4, e, None)) for e in _weighed(query, known)]
        hits = [*dict.fromkeys([*found[:SURE], *weighed, *found])]
    if not hits:
        raise ValueError(
            f"where: got {query!r}, which no docstring holds; {_nearest(query, known)}"
        )
    return hits[:MOST]


def _weighed(query: str, known: list[Entry]) -> list[Entry]:
    """Entries by BM25 (Robertson and Zaragoza, 2009) over their words without endings: rare words
    weigh more; a name counts three times, a first sentence twice. Those with less than ENOUGH of
    the query's weight are left out."""
    asked = {stem(word) for word in tokens(query)} - _SMALL
    bags = [_bag(entry) for entry in known]
    held = Counter(word for bag in bags for word in asked & bag.keys())
    weight = {w: math.log(1 + (len(bags) - held[w] + 0.5) / (held[w] + 0.5)) for w in asked}
    mean = sum(bag.total() for bag in bags) / max(1, len(bags))
    scores = []
    for entry, bag in zip(known, bags, strict=True):
        share = sum(weight[w] for w in asked & bag.keys()) / max(sum(weight.values()), 1e-9)
        flat = 1.2 * (0.7 + 0.3 * bag.total() / mean)
        score = sum(weight[w] * bag[w] * 2.2 / (bag[w] + flat) for w in asked & bag.keys())
        if share >= ENOUGH:
            scores.append((score * share * _PRIOR[_kind_rank(entry)], entry))
    return [entry for _, entry in sorted(scores, key=lambda pair: -pair[0])]


@cache
def _bag(entry: Entry) -> Counter:
    said = [entry.name.rpartition(".")[2]] * 2 + [entry.title, _said(entry)]
    words = (stem(word) for text in said for word in tokens(text))
    return Counter(word for word in words if word not in _SMALL)


def _tagged(query: str, known: list[Entry]) -> list[Hit]:
    tag = re.fullmatch(r"(?:(?:eq\.?|equation|tag) *)?\(?(\d+\.\d+)\)?", query.strip().lower())
    return [Hit(0, entry, None) for entry in known if tag and entry.tag == tag[1]]


def _cited(query: str, known: list[Entry]) -> list[Hit]:
    number = ARXIV.fullmatch(re.sub(r"(?i)arxiv|[:()\s]", "", query))
    cites = [entry for entry in known if number and number[0] in entry.arxiv]
    hits = [Hit(1, entry, _line_of(entry, number[0])) for entry in cites]
    return sorted(hits, key=lambda hit: hit.entry.kind != "row")


def _line_of(entry: Entry, word: str) -> Paragraph | None:
    for paragraph in entry.prose:
        for number, line in enumerate(paragraph.lines):
            if word in line:
                return Paragraph(paragraph.line + number, (line,))
    return None


def _found(query: str, known: list[Entry]) -> list[Hit]:
    asked = tokens(query)
    hits = [hit for entry in known if asked and (hit := _hit(asked, entry))]
    hits.sort(key=lambda hit: (hit.rank, _kind_rank(hit.entry), hit.late))
    named = [hit for hit in hits if hit.rank == 0]
    rows = sorted((hit for hit in named if hit.entry.kind == "row"), key=lambda hit: hit.entry.line)
    used = [name for hit in rows for name in hit.entry.functions.values()]
    sharing = Counter(name for entry in known for name in entry.functions.values())
    used.sort(key=sharing.__getitem__)  # what a row has of its own comes before what most have
    by_name = {entry.name: entry for entry in known if entry.room == "algorithms"}
    parts = [Hit(1, by_name[name], None) for name in used]
    first: dict[Entry, Hit] = {}
    for hit in [*rows, *named, *parts, *hits]:
        first.setdefault(hit.entry, hit)
    return list(first.values())


def _begun(query: str, known: list[Entry]) -> list[Hit]:
    """Hits of the query whose unknown words are taken for beginnings."""
    seen = sorted({word for entry in known for word in tokens(_said(entry))})
    folded, words = {stem(word) for word in seen}, []
    for word in tokens(query):
        longer = [other for other in seen if len(word) > 3 and other.startswith(word)]
        words.append(longer[0] if stem(word) not in folded and longer else word)
    return _found(" ".join(words), known) if words != tokens(query) else []


def _kind_rank(entry: Entry) -> int:
    """Equations before rows, rows before helpers, helpers before modules."""
    return 0 if entry.tag else {"row": 1, "module": 3, "constant": 3}.get(entry.kind, 2)


_PRIOR = (1.3, 1.15, 1.0, 0.6)  # of an entry's weight, by the rank of its kind


def _hit(asked: list[str], entry: Entry) -> Hit | None:
    name = Paragraph(entry.line, (entry.name.rpartition(".")[2],))
    texts = [name, *entry.prose]
    query = [plain(word) for word in asked]
    if _has_a_name(entry) and "".join(query) == _Text(name, plain).joined:
        return Hit(0, entry, None)
    stems = [stem(word) for word in asked]
    if not _may_hold(stems, entry):
        return None
    ways = (
        (plain, query, _Text.phrase, 1),
        (stem, stems, _Text.phrase, 2),
        (stem, stems, _Text.near, 3),
    )
    for how, wanted, kind, rank in ways[:2] if entry.kind == "module" else ways:
        for number, text in enumerate(texts):
            if matched := kind(_Text(text, how), wanted):
                late = (number > 1 or matched.line > text.line + 1) + 2 * (
                    kind is _Text.phrase and not _cut_alike(query, matched)
                )
                return Hit(rank, entry, None if number == 0 else matched, late)
    return None


def _has_a_name(entry: Entry) -> bool:
    """True where its name alone is an answer: a row, a function of algorithms.py, or one whose name
    has several words."""
    if entry.kind == "module" or entry.name.startswith("_") or "." in entry.name:
        return False
    judge = entry.room in ("oracle", "estimators")
    several = len(tokens(entry.name)) > 1 and not judge
    return entry.kind == "row" or entry.room == "algorithms" or several


def _cut_alike(query: list[str], matched: Paragraph) -> bool:
    words = [plain(word) for line in matched.lines for word in tokens(line)]
    return all(stem(word) in map(stem, words) for word in query)


def _may_hold(stems: list[str], entry: Entry) -> bool:
    """False where a search cannot end well: quicker than the search."""
    present = [stem(word) for word in tokens(_said(entry))]
    return {word for word in stems if word not in _SMALL} <= {*present} or (
        "".join(stems) in "".join(present)
    )


def _nearest(query: str, known: list[Entry]) -> str:
    """What to try instead: the words most like those that nothing holds, and where most of the
    others stand together."""
    seen = {word for entry in known for word in tokens(_said(entry))}
    folded = {stem(word) for word in seen}
    asked = [word for word in dict.fromkeys(tokens(query)) if word not in _SMALL]
    held = [word for word in asked if stem(word) in folded]
    lost = [word for word in asked if word not in held]
    like = [w for word in lost for w in difflib.get_close_matches(word, sorted(seen), 3, 0.7)]
    near = [*dict.fromkeys(like), *_parts(held, len(held) - (not lost), known)]
    told = f"near: {', '.join(near)}" if near else "nothing is near"
    return told if lost else f"its words are not all in one place; {told}"


def _parts(words: list[str], size: int, known: list[Entry]) -> list[str]:
    """The most words of these, ``size`` or fewer, that have an answer, and the first answer: two
    choices, those with the fewest answers."""
    for many in range(min(size, MOST_WORDS), 0, -1):
        choices = itertools.combinations(words[:MOST_WORDS], many)
        found = [(part, hits) for part in choices if (hits := _found(" ".join(part), known))]
        rare = [(part, hits) for part, hits in found if many > 1 or len(hits) <= MOST]
        if rare:
            rare.sort(key=lambda one: len(one[1]))
            first = [(part, hits[0].entry) for part, hits in rare[:2]]
            return [f"{' '.join(part)!r} in {e.name} ({e.place})" for part, e in first]
    return []


def _said(entry: Entry) -> str:
    return " ".join([entry.name, *(line for text in entry.prose for line in text.lines)])


def answer(query: str) -> str:
    """``where`` in lines: place, name, first sentence; below it the line that matched."""
    known = entries()
    hits = where(query, known)
    notes = {3: "near each other:", 4: "these have some of them:"}
    note = notes.get(hits[0].rank)
    lines = [f"no docstring has these words in a row; {note}"] if note else []
    for hit in hits:
        entry = hit.entry
        lines.append(f"{entry.place}  {entry.name}  {entry.title}".rstrip())
        if hit.matched and not set(hit.matched.lines) <= set(entry.prose[0].lines[:1]):
            lines.append(f"    {hit.matched.line}: {' '.join(hit.matched.lines)}")
        rows = [row.name for row in known if entry.name in row.functions.values()]
        if hit.rank == 0 and rows:
            more = f" and {len(rows) - 6} more" if len(rows) > 6 else ""
            lines.append(f"    rows: {', '.join(rows[:6])}{more}")
    return "\n".join(lines)


def row_place(name: str) -> str:
    """Where the row of a name stands. Raises ValueError with the nearest names."""
    rows = {e.name: e.place for e in entries(only=("methods.py",)) if e.kind == "row"}
    if name not in rows:
        near = difflib.get_close_matches(name, rows, 4, 0.5)
        raise ValueError(
            f"methods: got {name!r}; did you mean {', '.join(near)}"
            if near
            else f"methods: got {name!r}; allowed a name that python -m minidrl methods lists"
        )
    return rows[name]


def method_list() -> str:
    """Every row of the table: its name, its title, its source."""
    rows = [entry for entry in entries(only=("methods.py",)) if entry.kind == "row"]
    told = [(row.name, *(paragraph.lines[0] for paragraph in row.prose[:2])) for row in rows]
    names = ("method", "title", "source")
    return markdown_table([dict(zip(names, row, strict=True)) for row in told], names)


def functions(known: Iterable[Entry]) -> dict[str, Entry]:
    """The functions and classes of algorithms.py by name."""
    kinds = ("function", "class")
    return {e.name: e for e in known if e.room == "algorithms" and e.kind in kinds}


# --------------------------------------------------------------------------------- 4. docs/index.md

_HEAD = """# Index

Where every equation, every row of the table and every paper stands in the code, written by
`python -m minidrl.run.index`. `python -m minidrl where WORD` finds any term.
"""


def page(known: list[Entry] | None = None) -> str:
    """docs/index.md: equations, rows, papers, each with its lines."""
    known = entries() if known is None else known
    tagged = sorted((e for e in known if e.tag), key=lambda e: [int(n) for n in e.tag.split(".")])
    rows = [entry for entry in known if entry.kind == "row"]
    numbers = sorted({number for entry in known for number in entry.arxiv})
    said = [(e, _cell(e.title.partition(") ")[2])) for e in tagged]
    equations = [f"| ({entry.tag}) | {what} | {_link(entry)} |" for entry, what in said]
    methods = [f"| {_link(e)} | {_cell(e.title)} | {_functions(e)} |" for e in rows]
    cited = [(number, [e for e in known if number in e.arxiv]) for number in numbers]
    papers = [
        f"| {number} | {_links(e for e in found if e.kind == 'row')} | "
        f"{_links(e for e in found if e.kind != 'row')} |"
        for number, found in cited
    ]
    return "\n".join(
        [
            _HEAD,
            *_table("Equations", "tag | what | function", equations),
            *_table("Rows", "row | title | functions", methods),
            *_table("Papers", "arXiv | rows | functions", papers),
        ]
    )


def _table(title: str, columns: str, lines: list[str]) -> list[str]:
    rule = " | ".join("---" for _ in columns.split(" | "))
    return [f"## {title}\n", f"| {columns} |", f"| {rule} |", *lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(entry: Entry) -> str:
    return f"[`{entry.name}`](../{entry.file}#L{entry.line})"


def _links(found: Iterable[Entry]) -> str:
    return ", ".join(_link(entry) for entry in found)


def _functions(row: Entry) -> str:
    return ", ".join(f"`{name}`" for name in row.functions.values())


# ----------------------------------------------------------------- 5. Links of notebooks and docs

LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./(minidrl/[\w/]+\.py)#L\d+\)")


def linked() -> list[Path]:
    """The files that may have such links."""
    root = PACKAGE.parent
    return sorted([*root.glob("notebooks/*.ipynb"), *root.glob("docs/*.md")])


def relinked(text: str, known: Iterable[Entry]) -> str:
    """A text with each link of the form of ``_link`` at the line where that name stands now.

    Raises ValueError for a link to a name that its file does not have.
    """
    places = {(entry.name, entry.file): entry for entry in known}

    def current(match: re.Match) -> str:
        if (match[1], match[2]) not in places:
            raise ValueError(f"link: got {match[0]}; allowed a name that {match[2]} defines")
        return _link(places[match[1], match[2]])

    return LINK.sub(current, text)


# ------------------------------------------------------------------------------- 6. Settings


def settings(kind: str) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The settings of ``Train`` or ``Pretrain``: (section, what it is, [(key, default), ..])."""
    classes = _classes("config.py") | _classes("sampler.py")
    top, sections = classes[kind], []
    plain_keys = []
    for name, hint, default in _fields(top):
        if hint == "Task":
            sections += _task_sections()
        elif hint in classes:
            about = _about(classes[hint])
            keys = [(f"{name}.{key}", value) for key, _, value in _fields(classes[hint])]
            sections.append((name, about, keys))
        else:
            plain_keys.append((name, default))
    return [("", _about(top), plain_keys), *sections]


def _classes(file: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _task_sections() -> list[tuple[str, str, list[tuple[str, str]]]]:
    tree = ast.parse((PACKAGE / "tasks" / "__init__.py").read_text(encoding="utf-8"))
    named = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    default, found = ast.literal_eval(named["DEFAULT"]), []
    for name, place in ast.literal_eval(named["TASKS"]).items():
        module, _, attribute = place.partition(":")
        cls = _classes(Path(*module.split(".")[1:]).with_suffix(".py").as_posix())[attribute]
        keys = [(f"task.{key}", value) for key, _, value in _fields(cls)]
        first = ("task.name", name if name == default else f"{name}, by default {default}")
        about = _about(cls)
        found.append((f"task {name}", about, [first, *keys]))
    return found


def _about(node: ast.ClassDef) -> str:
    return sentence((ast.get_docstring(node) or "").partition("\n\n")[0])


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """(name, annotation, default) of a dataclass; class variables left out."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            yield item.target.id, ast.unparse(item.annotation), _default(item.value)


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "(required)"
    if isinstance(value, ast.Call):  # field(default_factory=..)
        made = value.keywords[0].value
        if not isinstance(made, ast.Lambda):
            return {"dict": "{}", "list": "[]"}.get(ast.unparse(made), "")
        value = made.body
    found: Any = eval(compile(ast.Expression(value), "default", "eval"), {"__builtins__": {}})
    if isinstance(found, list):
        return f"[{','.join(map(str, found))}]"
    return str(found).lower() if isinstance(found, bool) else str(found) or "''"


def settings_help(kind: str) -> str:
    """``settings`` as lines of ``--key default``."""
    lines = ["settings, in the config or as --key value; shown with their defaults:"]
    for section, about, keys in settings(kind):
        lines += ["", f"{section}: {about}" if section else about]
        width = max(len(key) for key, _ in keys)
        lines += [f"  --{key:<{width}}  {value}" for key, value in keys]
    if kind == "Train":
        lines += ["", "a method's numbers: --method_options.KEY value; `methods NAME` lists them"]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for path in linked():
        path.write_text(relinked(path.read_text(encoding="utf-8"), entries()), encoding="utf-8")
