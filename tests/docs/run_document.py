"""Runs the tested blocks of one document, in order, in the current folder; the first that fails
ends it.

python run_document.py [--tiny] DOCUMENT.md

With --tiny a command trains a tiny model for two steps where it names the packaged one, of which a
step takes seconds and a conversion ten.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from documents import blocks


def with_tiny_model(text: str) -> str:
    """Return a block of commands with `tiny:llama --steps 2` where it names a packaged model."""
    if "package:" not in text:
        return text
    return re.sub(r"package:[\w-]+", "tiny:llama", re.sub(r"--steps \d+", "--steps 2", text))


def main(document: str, tiny: bool = False) -> int:
    """The status of the first command that fails, or 0; an exception in Python code passes
    through."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(Path(document).read_text()):
        print(f"--- {document}:{block.line}", flush=True)
        if block.kind == "test":
            # Empty lines before the code make the line numbers of a traceback those of the
            # document.
            exec(compile("\n" * (block.line - 1) + block.text, document, "exec"), namespace)
            continue
        done = subprocess.run(
            [
                "bash",
                "-euo",
                "pipefail",
                "-c",
                with_tiny_model(block.text) if tiny else block.text,
            ],
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            print(f"{document}:{block.line}: exit status {done.returncode}", file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.path.pop(0)
    sys.exit(main(sys.argv[-1], sys.argv[1] == "--tiny"))
