"""Print entries of requirements/dev.txt, for pip.

python requirements/pinned.py NAME...         these packages with their hashes
python requirements/pinned.py --report FILE   the packages of pip's `--report` with their hashes
python requirements/pinned.py --versions      every package without its hashes, as constraints
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PINS = Path(__file__).parent / "dev.txt"


def entries() -> dict[str, str]:
    """Return the lines of each pinned package by name."""
    matches = re.finditer(r"^([\w.-]+)==(?:.*\\\n)*.*\n", PINS.read_text(), re.MULTILINE)
    return {match[1]: match[0] for match in matches}


def main(words: list[str]) -> int:
    """Print the entries; return 1 and name the packages that have none."""
    pins = entries()
    names = words
    if words[:1] == ["--versions"]:
        print("\n".join(text.splitlines()[0].rstrip(" \\") for text in pins.values()))
        return 0
    if words[:1] == ["--report"]:
        items = json.loads(Path(words[1]).read_text())["install"]
        names = [re.sub(r"[-_.]+", "-", item["metadata"]["name"].lower()) for item in items]
        names = [name for name in names if name != "ondevice-train"]
    missing = [name for name in names if name not in pins]
    if missing:
        print(f"{PINS}: no hashes of {', '.join(missing)}; try: make pins", file=sys.stderr)
        return 1
    print("".join(pins[name] for name in names), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
