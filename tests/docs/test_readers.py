"""The documentation is short enough to be read, and each command of a tutorial runs or says why it
does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs import documents

MOST_WORDS = 40_000
MOST_WORDS_OF_A_METHOD = 1_500
TUTORIALS = (
    "classify", "chat", "notebook", "phone", "jetson", "mac", "big-model", "fleet", "coming-from",
)  # fmt: skip
NOT_RUN = re.compile(r"^<!-- not run: \S.* -->$")


def words(text: str) -> int:
    """How many words a page has as `wc -w` counts them: bars and rules of tables count too."""
    return len(text.split())


def readers_pages(root: Path) -> list[Path]:
    docs = root / "docs"
    return [page for page in docs.rglob("*.md") if not page.is_relative_to(docs / "results")]


def undecided(text: str) -> list[int]:
    """The lines at which a block begins that neither runs nor says why not."""
    lines = text.splitlines()
    found, inside = [], False
    for number, line in enumerate(lines):
        opens = line.startswith("```") and not inside
        inside = inside != line.startswith("```")
        indented = not inside and re.match(r"    (\$ )?(ondevice|pip|python|make) ", line)
        above = next((one for one in reversed(lines[:number]) if one.strip()), "")
        if indented or (opens and not (documents.MARKER.match(above) or NOT_RUN.match(above))):
            found.append(number + 1)
    return found


def test_the_readers_pages_have_at_most_forty_thousand_words(root: Path) -> None:
    counted = {
        str(page.relative_to(root)): words(page.read_text("utf-8")) for page in readers_pages(root)
    }
    assert sum(counted.values()) <= MOST_WORDS, sorted(counted.items(), key=lambda one: -one[1])


@pytest.mark.parametrize(
    "page", sorted(Path(__file__).parents[2].glob("docs/methods/*.md")), ids=lambda page: page.stem
)
def test_a_methods_page_is_short_and_leads_to_its_results(page: Path) -> None:
    text = page.read_text("utf-8")
    assert words(text) <= MOST_WORDS_OF_A_METHOD
    assert "../results/" in text


@pytest.mark.parametrize("name", TUTORIALS)
def test_each_block_of_a_tutorial_runs_or_says_why_not(root: Path, name: str) -> None:
    text = (root / "docs/tutorials" / f"{name}.md").read_text("utf-8")
    assert undecided(text) == []
    assert documents.blocks(text), "nothing of the tutorial runs"


def test_a_block_without_a_decision_is_found() -> None:
    run = "<!-- run -->\n```console\n$ true\n```\n"
    reason = "<!-- not run: needs a phone -->\n```console\n$ adb\n```\n"
    assert undecided(run + "\n" + reason) == []
    assert undecided("text\n\n```console\n$ true\n```\n") == [3]
    assert undecided("<!-- not run -->\n```console\n$ true\n```\n") == [2]
    assert undecided("text:\n\n    ondevice doctor now\n") == [3]


def test_each_result_file_is_shown_on_a_page(root: Path) -> None:
    folder = root / "benchmarks/results"
    names = {f"{file.parent.relative_to(folder)}" for file in folder.rglob("*/*/*.json")}
    pages = [*(root / "docs/results").glob("*.md"), *root.glob("*/README.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    shown = set(re.findall(r"<!-- results: (\w+/\w+)[\w./-]* -->", text))
    assert sorted(names - shown) == []


def test_the_site_has_three_parts(root: Path) -> None:
    menu = (root / "mkdocs.yml").read_text("utf-8").partition("nav:\n")[2]
    parts = [next(iter(part)) for part in yaml.safe_load("nav:\n" + menu)["nav"]]
    assert parts == ["Home", "Tutorials", "How-to and reference", "Methods and results"]
