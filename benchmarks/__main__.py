"""Runs every benchmark that this machine can run, one after the other.

    python -m benchmarks                  all of them
    python -m benchmarks NAME ...         these only, for example prge/step; a room takes all of its own
    python -m benchmarks --list           what there is, and what it needs

Results go to build/bench/<name>.json. A file is a benchmark by its constant `NEEDS`, which says
what the machine must have: `cuda`, a package's name, or a command's. The other files of a room are
what its benchmarks share.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def benchmarks() -> dict[str, tuple[str, ...]]:
    """Name of every benchmark to what it needs, read without importing it."""
    scripts = {
        path.relative_to(FOLDER).with_suffix("").as_posix(): _needs(path)
        for path in FOLDER.glob("*/*.py")
    }
    return {name: needs for name, needs in sorted(scripts.items()) if needs is not None}


def missing(needs: tuple[str, ...]) -> list[str]:
    """Those of `needs` that this machine has not."""
    return [need for need in needs if not _has(need)]


def _needs(path: Path) -> tuple[str, ...] | None:
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "NEEDS" for target in targets):
            return tuple(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return None


def _chosen(name: str, word: str) -> bool:
    return word in (name, name.partition("/")[0])


def _has(need: str) -> bool:
    if need == "cuda":
        if importlib.util.find_spec("torch") is None:
            return False
        import torch

        return torch.cuda.is_available()
    return importlib.util.find_spec(need) is not None or shutil.which(need) is not None


def main(arguments: list[str]) -> int:
    """Run the named benchmarks, or all; returns 1 if one of them failed."""
    known = benchmarks()
    words = [word for word in arguments if word != "--list"]
    if unknown := [word for word in words if not any(_chosen(name, word) for name in known)]:
        print(f"expected one of {', '.join(known)}; received {', '.join(unknown)}", file=sys.stderr)
        return 2
    failed = []
    for name in [name for name in known if not words or any(_chosen(name, word) for word in words)]:
        absent = missing(known[name])
        if "--list" in arguments:
            print(name, f"(needs {', '.join(absent)})" if absent else "")
            continue
        if absent:
            print(f"{name}: not run, this machine has no {', '.join(absent)}")
            continue
        print(f"{name}:", flush=True)
        out = FOLDER.parent / "build" / "bench" / f"{name}.json"
        command = [sys.executable, "-m", f"benchmarks.{name.replace('/', '.')}", "--out", str(out)]
        if subprocess.run(command, cwd=FOLDER.parent, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
