"""Execute notebooks in place: python notebooks/execute.py notebooks/*.ipynb

The result depends on the notebook and the installed packages only: no times, no Python version. A notebook that fails
is left as it was; the error is printed and the exit status is 1.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}  # of the running environment


def executed(path: Path, timeout: int) -> str:
    """The text of the notebook at `path` after a run in a new kernel, without what varies from run to run."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = {"kernelspec": KERNELSPEC}
    NotebookClient(
        notebook,
        kernel_name=KERNELSPEC["name"],
        timeout=timeout,
        record_timing=False,
        coalesce_streams=True,  # how stdout is cut into messages depends on timing
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def main(argv: list[str] | None = None) -> int:
    """Execute each notebook named on the command line; 0 when all of them ran."""
    parser = argparse.ArgumentParser(description="Execute notebooks in place.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--timeout", type=int, default=120, help="seconds allowed for one cell (default 120)")
    args = parser.parse_args(argv)
    failed = 0
    for path in args.notebooks:
        start = time.perf_counter()
        try:
            text = executed(path, args.timeout)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path}: failed\n{error}", file=sys.stderr)
            failed = 1
            continue
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)  # an interrupted run never leaves half a notebook
        print(f"{path}: {time.perf_counter() - start:.1f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
