"""Runs notebooks from top to bottom in a clean kernel and writes their outputs back.

    python tools/run_notebooks.py [NOTEBOOK...]

All of notebooks/ by default; `make notebooks` does the same. Progress bars and clock times are left
out, so that a file changes only where its cells or what they show did.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """A copy with new outputs, of the package in this checkout.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.from_dict(notebook)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        startup_timeout=120,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without progress bars, and without what the kernel says of itself."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(arguments: Sequence[str]) -> None:
    for path in [Path(argument) for argument in arguments] or NOTEBOOKS:
        print(f"notebooks: {path.name}", flush=True)
        nbformat.write(tidy(execute(nbformat.read(path, as_version=4), path.parent)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
