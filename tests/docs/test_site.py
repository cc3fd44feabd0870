"""The documentation builds as a site, with search and without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mkdocs", reason="the dev extra is not installed")

OFFLINE = """
import socket, sys
def refuse(*_): raise OSError("a build must not reach for the network")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(sys.argv[1:])
"""


def test_the_site_builds_without_a_network(root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        OFFLINE,
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    assert any("patience" in page["text"] for page in index["docs"])
    first = (tmp_path / "site" / "index.html").read_text()
    assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://(?!127)', first), (
        "a page fetches from elsewhere"
    )


def test_every_page_is_in_the_site_s_menu(root: Path) -> None:
    named = re.findall(r": (\S+\.md)$", (root / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages)


def test_workflows_call_what_there_is(root: Path) -> None:
    goals = set(
        re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", (root / "Makefile").read_text(), re.MULTILINE)
    )
    files = sorted((root / ".github/workflows").glob("*.yml"))
    assert [path.stem for path in files] == ["check", "nightly", "release"]
    for path in files:
        jobs = yaml.safe_load(path.read_text())["jobs"]
        runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        called = {
            goal
            for run in runs
            for line in re.findall(r"^make (.+)$", run, re.MULTILINE)
            for goal in line.partition(" ARGS=")[0].split()
        }
        assert called <= goals, called - goals
    publish = yaml.safe_load((root / ".github/workflows/release.yml").read_text())["jobs"][
        "publish"
    ]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"


def test_the_citation_and_the_changelog_name_the_version(root: Path) -> None:
    import tomllib

    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert str(yaml.safe_load((root / "CITATION.cff").read_text())["version"]) == version
    assert f"\n## {version}\n" in (root / "CHANGELOG.md").read_text()
