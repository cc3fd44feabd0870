"""Reads what the tests of the documentation need from Markdown: tested blocks, links, headings.

Tested are the blocks that follow a marker line:

    <!-- test -->      a ```python block; those of one file share a namespace, in order
    <!-- run -->       a ```console block: its lines that begin with `$ ` (all, if none does) go to bash
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MARKER = re.compile(r"^<!-- (test|run) -->$")
FENCE = re.compile(r"^```(\w*)$")
LANGUAGE = {"test": ("python",), "run": ("console", "bash", "sh")}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """One tested block: its marker, its text, and the line the text begins at (1-based)."""

    kind: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """Every tested block in order.

    Raises:
        ValueError: a marker is not followed by a block of its language, which would silently not be
            tested.
    """
    lines, actual, inside = text.splitlines(), [], False
    for index, line in enumerate(lines):
        if line.startswith("```"):
            inside = not inside
        marker = None if inside else MARKER.match(line)
        if marker is None:
            continue
        start = index + 1
        while start < len(lines) and not lines[start].strip():
            start += 1
        fence = FENCE.match(lines[start]) if start < len(lines) else None
        if fence is None or fence[1] not in LANGUAGE[marker[1]]:
            wanted = " or ".join(LANGUAGE[marker[1]])
            raise ValueError(
                f"line {index + 1}: <!-- {marker[1]} --> expects a block of {wanted} below it"
            )
        end = lines.index("```", start + 1)
        body = lines[start + 1 : end]
        if marker[1] == "run":
            body = commands(body)
        actual.append(Block(marker[1], "\n".join(body) + "\n", start + 2))
    return actual


def commands(lines: list[str]) -> list[str]:
    """The commands of a console block: without the `$ ` and without the output shown below them.

    A here-document goes on to its end.
    """
    if not any(line.startswith("$ ") for line in lines):
        return lines
    kept: list[str] = []
    continued = False
    end = ""
    for line in lines:
        if end:
            kept.append(line)
            end = "" if line == end else end
        elif continued or line.startswith("$ "):
            kept.append(line if continued else line[2:])
            continued = line.endswith("\\")
            here = re.search(r"<<'(\w+)'$", line)
            end = here[1] if here else ""
    return kept


def prose(text: str) -> str:
    """`text` without code blocks and inline code."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def links(text: str) -> list[str]:
    """The targets of all links and images outside code."""
    return LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """The anchors that the headings of a document have on GitHub, and explicit `id="..."`s."""
    body = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    collected: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", body, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        slug, count = words.replace(" ", "-"), 1
        while slug in collected:
            slug, count = f"{words.replace(' ', '-')}-{count}", count + 1
        collected.add(slug)
    return collected | set(re.findall(r'id="([^"]+)"', body))


def broken_links(path: Path, root: Path) -> list[str]:
    """The relative links of a document that lead nowhere, or out of the checkout."""
    broken = []
    for target in links(path.read_text()):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path.resolve()
        missing_anchor = (
            anchor
            and file.suffix == ".md"
            and file.is_file()
            and anchor not in anchors(file.read_text())
        )
        if not file.is_relative_to(root.resolve()) or not file.exists() or missing_anchor:
            broken.append(target)
    return broken
