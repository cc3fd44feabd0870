"""Print the version to release, and write its section of CHANGELOG.md to a file.

    python .ci/release.py notes.md

Fails if pyproject.toml and CITATION.cff name different versions, if the changelog has no section of
this version, or if it has entries that are not part of it (under "Unreleased").
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release(root: Path) -> tuple[str, str]:
    """Return the version and its notes.

    Raises:
        ValueError: the files disagree; the text says how.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        raise ValueError(f"CITATION.cff does not name version {version}, as pyproject.toml does")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\S+).*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE))
    if version not in sections:
        raise ValueError(f"CHANGELOG.md has no section '## {version}'")
    if sections.get("Unreleased", "").strip():
        raise ValueError(f"CHANGELOG.md has entries under Unreleased; move them to '## {version}'")
    return version, sections[version].strip() + "\n"


if __name__ == "__main__":
    try:
        number, notes = release(ROOT)
    except ValueError as error:
        print(f"release: {error}", file=sys.stderr)
        sys.exit(1)
    Path(sys.argv[1]).write_text(notes, encoding="utf-8")
    print(number)
