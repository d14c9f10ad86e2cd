"""Who imports whom: the core, which is read, knows nothing of a run; a run knows nothing of our own research."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "minidrl"


def imported(path: Path) -> set[str]:
    """The modules that a file imports, `minidrl.run` for `from minidrl import run` too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_core_imports_no_run_and_a_run_no_research():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        run = PACKAGE / "run" in path.parents
        shut = ("research",) if run or path.name == "__main__.py" else ("minidrl.run", "research")
        wrong += [f"{path.relative_to(PACKAGE.parent)} imports {name}" for name in imported(path) if name.startswith(shut)]
    assert not wrong, "\n".join(wrong)
