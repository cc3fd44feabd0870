"""The documentation is true: its examples run, its links lead somewhere, its tables are the
measured ones."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import tables
from tests.docs.prose import is_ours
from tests.sampling import ALL
from tests.warm import Warm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


documents = _load("documents")
DOCUMENTS = tables.documents(ROOT)
FOLDERS = ("exporters", "runtime_ops", "ondevice", "android_app", "benchmarks", "examples")
MARKDOWN = sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))
EVERY_MARKDOWN = list(dict.fromkeys([*DOCUMENTS, *filter(is_ours, MARKDOWN)]))
TESTED = [path for path in DOCUMENTS if documents.blocks(path.read_text())]
TRIED_ELSEWHERE = {
    "docs/tutorials/chat.md": "README.md",
    "docs/tutorials/phone.md": "tests/cli/test_artifacts.py",
}
"""Pages whose commands a run of every change tries elsewhere: `train` on chats, `chat` and `convert
--to ollama`; `export`, `run`, `push` and `verify` of a program. Their flags are held against the
parsers on every change (test_reference.py); the nightly job runs the pages, with the packaged
model."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run(
    document: Path, folder: Path, *options: str, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run a document's blocks in `folder`, with the checkout's examples/ in it and `ondevice` on
    the path."""
    if (ROOT / "examples").is_dir():
        (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join(
        [str(Path(python).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return subprocess.run(
        [str(python), str(HERE / "run_document.py"), *options, str(document)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(
            path, id=name(path), marks=[pytest.mark.nightly] * (name(path) in TRIED_ELSEWHERE)
        )
        for path in TESTED
    ],
)
def test_the_examples_of_a_page_run(document: Path, tmp_path: Path, warm: Warm) -> None:
    options = () if ALL else ("--tiny",)
    done = run(document, tmp_path, *options, python=warm.python)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("document", EVERY_MARKDOWN, ids=name)
def test_relative_links_resolve(document: Path) -> None:
    assert documents.broken_links(document, ROOT) == []


@pytest.mark.parametrize("document", EVERY_MARKDOWN, ids=name)
def test_a_page_has_no_marks_of_a_merge(document: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", document.read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", EVERY_MARKDOWN, ids=name)
def test_the_tests_that_a_page_names_are_in_the_files_that_it_links_to(document: Path) -> None:
    for test, file in re.findall(r"\[`(test_\w+)`\]\(([^)]+\.py)\)", document.read_text()):
        assert f"def {test}(" in (document.parent / file).read_text(), f"{file} has no {test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_tables_are_the_measured_ones(document: Path) -> None:
    text = document.read_text()
    assert text == tables.update(text, ROOT / "benchmarks/results"), "try: make docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_make_goals_exist(document: Path) -> None:
    goals = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = re.findall(
        r"```.*?```|`[^`\n]+`|^    .+$", document.read_text(), re.DOTALL | re.MULTILINE
    )
    named = {goal for part in code for goal in re.findall(r"\bmake ([a-z][a-z-]*)", part)}
    assert named - goals == set()


def test_readme_names_the_test_command() -> None:
    assert "make test" in (ROOT / "README.md").read_text()


# The tools themselves


def test_python_blocks_share_a_namespace_and_console_blocks_the_folder(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- test -->\n```python\nx = 1\n```\n\n"
        "```python\nraise SystemExit('not marked, so not run')\n```\n\n"
        "<!-- run -->\n\n```console\n"
        "$ printf two > file \\\n  && printf more >> file\nthis is output\n$ test -s file\n"
        "$ cat > here <<'END'\n$ a\nb\nEND\n$ grep -q b here\n```\n"
        "<!-- test -->\n```python\nassert x == 1 and open('file').read() == 'twomore'\n```\n"
    )
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- test -->\n```python\nx = 1\nassert x == 2\n```\n", 'page.md", line 4'),
        ("<!-- run -->\n```console\n$ false\n$ true\n```\n", "page.md:3: exit status 1"),
        ("<!-- run -->\n```console\n$ false | true\n```\n", "page.md:3: exit status 1"),
        ("<!-- test -->\nno block\n", "line 1: <!-- test --> expects a block of python below it"),
        (
            "<!-- test -->\n```console\n$ true\n```\n",
            "line 1: <!-- test --> expects a block of python below it",
        ),
    ],
)
def test_a_wrong_example_fails(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run(page, tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_tiny_model_and_few_steps_replace_the_packaged_model_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run -->\n```console\n$ echo train tiny:llama --steps 30\n```\n"
        "<!-- run -->\n```console\n$ echo train package:x \\\n    --steps 30\n```\n"
    )
    said = []
    for options in ((), ("--tiny",)):
        (folder := tmp_path / f"with {len(options)}").mkdir()
        said.append(run(page, folder, *options).stdout.split())
    assert [[word for word in words if word.isdigit() or ":" in word[:8]] for words in said] == [
        ["tiny:llama", "30", "package:x", "30"],
        ["tiny:llama", "30", "tiny:llama", "2"],
    ]


def test_broken_links_of_a_page_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, `code` and more\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md) [b](other.md#a-heading-code-and-more) [c](#top)\n"
        "[d](https://example.org/x) ![e](gone.png)\n"
        "[f](other.md#no-heading) [g](../outside.md) `[not a link](nowhere)`\n```\n[nor](this)\n```\n"
    )
    assert documents.broken_links(page, tmp_path) == [
        "gone.png",
        "other.md#no-heading",
        "../outside.md",
    ]
