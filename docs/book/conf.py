"""The book: lessons, exercises, pages and the reference of the code as one searchable site. `make book` builds it.

Sphinx with myst-nb shows the notebooks with their stored outputs; nothing is executed. What stands here beside settings is
the net of links: an equation of a lesson, `\\tag{2.6}`, names the function of algorithms.py whose docstring opens with
(2.6); the function's page shows the formula and leads back; each (2.6) in a text leads to the equation.
"""

import ast
import functools
import json
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

project = "minidrl"
author = copyright = "the minidrl developers"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "notebooks/**.md", "notebooks/**.ipynb", "research/*.md", "research/**.ipynb"]
include_patterns += ["tests/golden/llada_tiny/README.md", "tiny_configs/bases/*/README.md"]  # of which lessons 00 and 11 speak
exclude_patterns = ["**/solutions/**", "**/.ipynb_checkpoints/**"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
myst_enable_extensions = ["dollarmath", "amsmath", "html_image"]
myst_heading_anchors = 4
nb_execution_mode = "off"
html_theme = "furo"
html_title = "minidrl"
html_static_path = ["book.css"]
html_css_files = ["book.css"]
html_show_sphinx = False
highlight_language = "none"  # the tables of docstrings
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]

NAMES = "algorithms loop gradient methods oracle sampler"  # the modules of which readers get a reference
FIELDS = ("Source", "Shapes", "Special cases", "Raises")
TAG = r"\((\d+[ab]?\.\d+)\)"
CONTENTS = """

```{{toctree}}
:hidden:
:caption: {caption}
{pages}
```
"""


def lessons() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("[01]*.ipynb"))


def documents(pattern: str) -> list[str]:
    return [str(path.relative_to(ROOT).with_suffix("")) for path in sorted(ROOT.glob(pattern))]


def equations() -> dict[str, tuple[str, str]]:
    """Of each tagged equation the page that states it first, and its formula in LaTeX."""
    found: dict[str, tuple[str, str]] = {}
    for path in lessons():
        cells = json.loads(path.read_text())["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for formula in re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL):
            for tag in re.findall(r"\\tag\{(.+?)\}", formula):
                page = str(path.relative_to(ROOT).with_suffix(""))
                found.setdefault(tag, (page, re.sub(r"\\tag\{.+?\}", "", formula).strip()))
    return found


def tagged_functions() -> dict[str, str]:
    """Of each tag the function or class of algorithms.py whose docstring opens with it."""
    tree = ast.parse((ROOT / "minidrl/algorithms.py").read_text())
    named = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"]
    tags = ((node.name, re.match(TAG, ast.get_docstring(node) or "")) for node in named)
    return {match[1]: name for name, match in tags if match}


EQUATIONS, FUNCTIONS = equations(), tagged_functions()


def before_reading(app: Sphinx, page: str, source: list[str]) -> None:
    """The front page gets the table of contents; cells that Jupyter folds are folded here too."""
    if page == root_doc:
        groups = {
            "Lessons": ["notebooks/README", *documents("notebooks/[01]*.ipynb")],
            "Exercises": ["notebooks/exercises/README", *documents("notebooks/exercises/*.ipynb")],
            "Pages": documents("docs/*.md") + ["CONTRIBUTING"],
            "Research": [
                "research/README",
                *documents("research/notebooks/*.ipynb"),
                "tests/golden/llada_tiny/README",
                *documents("tiny_configs/bases/*/README.md"),
            ],
            "Code": documents("docs/book/*.md"),
        }
        source[0] += "".join(CONTENTS.format(caption=name, pages="\n".join(pages)) for name, pages in groups.items())
    elif app.env.doc2path(page).suffix == ".ipynb":
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                tags = cell["metadata"].setdefault("tags", [])
                tags += ["hide-input"] * ("hide-input" not in tags)
            if cell["cell_type"] == "markdown":
                cell["source"] = re.sub(r"(?<=\()([^()\s]*)#([^()\s]+)(?=\))", github_anchor, "".join(cell["source"]))
        source[0] = json.dumps(notebook)


def github_anchor(link: re.Match) -> str:
    """Jupyter's anchor of a heading, #What-it-weighs,-and-what-fits, as Markdown pages make it."""
    return f"{link[1]}#{re.sub(r'[^a-z0-9-]', '', link[2].lower())}"


def reference_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """A docstring as reStructuredText: its formula as lessons write it, tables as they stand, the headings as fields."""
    if not name.startswith("minidrl."):
        return
    result: list[str] = []
    opening = re.match(TAG, lines[0]) if lines else None
    if opening and opening[1] in EQUATIONS:
        result += [".. math::", "", *(f"   {line}" for line in EQUATIONS[opening[1]][1].splitlines()), ""]
        result += [f"Derived in the lessons, :ref:`({opening[1]}) <eq-{opening[1]}>`.", ""]
    field = table = False
    for line in lines:
        heading = next((word for word in FIELDS if line.startswith(word + ":")), None)
        if not line.strip():
            field = field and bool(result) and result[-1].startswith((":", " "))
            result.append("")
        elif heading:
            result += ["", f":{heading}:{escaped(line[len(heading) + 1 :])}"]
            field, table = True, False
        elif line.startswith("    ") or aligned(line):
            result += [] if table else ["", "::", ""]
            result.append(f"    {line}")
            table = True
            continue
        elif table and line.startswith("  "):
            result.append(f"    {line}")
            continue
        else:
            result.append(("   " if field else "") + escaped(line.strip()))
        if table and line.strip():
            result.insert(len(result) - 1, "")
        table = table and not line.strip()
    lines[:] = result


def plain_default(app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, result: str | None):
    """A field's default that a function makes: Sphinx can't read `<factory>`, and would leave the signature without links."""
    return signature and signature.replace("<factory>", "{}"), result


def aligned(line: str) -> bool:
    """A line of a table of two columns: a word, three spaces or more, its meaning."""
    return bool(re.match(r"\S.{0,30}?\s{3,}\S", line))


def escaped(text: str) -> str:
    """The characters that reStructuredText would take for its own, outside of code; a tag becomes a link."""
    parts = re.split(r"(``.+?``)", text)
    plain = (re.sub(r"([*|`_\\])", r"\\\1", part) for part in parts[::2])
    linked = [re.sub(TAG, equation_role, part) for part in plain]
    return "".join(a + b for a, b in zip(linked, [*parts[1::2], ""], strict=True))


def equation_role(tag: re.Match) -> str:
    return f":ref:`{tag[0]} <eq-{tag[1]}>`" if tag[1] in EQUATIONS else tag[0]


class Links(SphinxTransform):
    """The links of a page that Markdown does not know: tags of equations, and functions of a module."""

    default_priority = 600  # after Markdown's own, before the table of contents is made

    def apply(self, **_: object) -> None:
        page = self.env.docname
        for block in list(self.document.findall(nodes.math_block)):
            if "\\tag" in block.astext():  # Sphinx would put it into an environment that has no tags
                block["no-wrap"], block[:] = True, [nodes.Text(rf"\[{block.astext()}\]")]
            for tag in re.findall(r"\\tag\{(.+?)\}", block.astext()):
                if EQUATIONS.get(tag, ("",))[0] == page:
                    self.anchor(block, tag)
        for node in list(self.document.findall(addnodes.download_reference)):
            module = re.search(r"minidrl/(\w+)\.py$", node["reftarget"])
            if module and module[1] in NAMES.split():
                node.replace_self(self.to_code(module[1], node))
        for text in list(self.document.findall(nodes.Text)):
            inside = (nodes.literal, nodes.literal_block, nodes.reference, nodes.math, nodes.math_block, nodes.title)
            if re.search(TAG, text) and not any(isinstance(parent, inside) for parent in parents(text)):
                text.parent.replace(text, self.to_equations(text))

    def anchor(self, block: nodes.math_block, tag: str) -> None:
        """The equation can be led to, and leads to its function."""
        page, domain = self.env.docname, self.env.domains.standard_domain
        block["ids"].append(f"eq-{tag}")
        domain.anonlabels[f"eq-{tag}"] = page, f"eq-{tag}"
        domain.labels[f"eq-{tag}"] = page, f"eq-{tag}", f"({tag})"
        if tag in FUNCTIONS:
            line = nodes.paragraph(classes=["in-code"])
            name = FUNCTIONS[tag]
            line += [nodes.Text("in code: "), self.pending("py", "obj", f"minidrl.algorithms.{name}", name, True)]
            block.parent.insert(block.parent.index(block) + 1, line)

    def to_code(self, module: str, node: nodes.Element) -> nodes.Node:
        name = node.astext()
        known = re.search(rf"^(?:def|class) {re.escape(name)}\b|^{re.escape(name)}\b.* = ", code(module), re.MULTILINE)
        target = f"minidrl.{module}.{name}" if known and name.isidentifier() else f"minidrl.{module}"
        return self.pending("py", "obj" if target.count(".") == 2 else "mod", target, name, True)

    def to_equations(self, text: nodes.Text) -> list[nodes.Node]:
        parts = re.split(TAG, text)
        made: list[nodes.Node] = [nodes.Text(parts[0])]
        for tag, rest in zip(parts[1::2], parts[2::2], strict=True):
            known = tag in EQUATIONS
            made += [self.pending("std", "ref", f"eq-{tag}", f"({tag})") if known else nodes.Text(f"({tag})"), nodes.Text(rest)]
        return made

    def pending(self, domain: str, kind: str, target: str, text: str, literal: bool = False) -> nodes.Node:
        node = addnodes.pending_xref(
            "", refdomain=domain, reftype=kind, reftarget=target, refexplicit=True, refwarn=False, refdoc=self.env.docname
        )
        node += nodes.literal(text, text) if literal else nodes.inline(text, text)
        return node


def parents(node: nodes.Node):
    while node.parent is not None:
        node = node.parent
        yield node


@functools.cache
def code(module: str) -> str:
    return (ROOT / "minidrl" / f"{module}.py").read_text()


def setup(app: Sphinx) -> None:
    app.connect("source-read", before_reading)
    app.connect("autodoc-process-docstring", reference_text)
    app.connect("autodoc-process-signature", plain_default)
    app.add_transform(Links)
