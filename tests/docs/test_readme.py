"""README's beginning: what a newcomer sees, copies and believes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs import documents

LATER = ("SST-2", "sst2", "zeroth-order", "NF4", "8da4w", "subspace", "reversible")
"""Words that a newcomer meets only behind a link."""


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text("utf-8")


@pytest.mark.parametrize("word", LATER)
def test_words_of_methods_stand_behind_a_link(readme: str, word: str) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", readme)
    assert word.lower() not in text.lower()


def test_the_readme_is_short(readme: str) -> None:
    assert len(readme.split()) <= 1_500


def test_the_demo_and_two_blocks_come_before_methods_and_papers(readme: str) -> None:
    order = ["ondevice demo", "accuracy on 40 messages", "## Classify my CSV", "ondevice predict runs/tickets",
             "## Chat on my data", "--to ollama", "<!-- results: mesp/trainer -->", "arxiv.org"]  # fmt: skip
    places = [readme.index(words) for words in order]
    assert places == sorted(places)


def test_both_blocks_run_and_bring_their_own_rows(readme: str) -> None:
    blocks = [block.text for block in documents.blocks(readme) if block.kind == "run"]
    assert len(blocks) == 2
    copied = re.findall(r"<!-- run -->\n```bash\n(.*?)```", readme, re.DOTALL)
    assert copied == blocks, "the blocks are copied whole, without prompts and output"
    for text in blocks:
        made = set(re.findall(r"cat > (\S+)", text)) | set(re.findall(r"--out (\S+)", text))
        read = set(re.findall(r"--data (\S+)", text)) | set(re.findall(r"predict \S+ (\S+)", text))
        assert read <= made and made


def test_the_first_command_installs_a_clone_or_the_wheel_of_this_version(
    readme: str, root: Path
) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    commands = re.findall(r"^    (.+)$", readme, re.MULTILINE)
    assert commands[:3] == [
        "python3 -m venv .venv && . .venv/bin/activate",
        "pip install '.[torch]'",
        "ondevice demo",
    ]
    wheel = f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl[torch]"
    assert f"pip install '{wheel}'" in readme and "not on an index" in readme
    assert "https://pytorch.org/get-started/locally/" in readme
