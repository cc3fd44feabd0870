"""The documentation builds as a site, with search and without a network."""

from __future__ import annotations

import importlib.util
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


def test_every_page_is_in_the_menu_of_the_site(root: Path) -> None:
    named = re.findall(r": (\S+\.md)$", (root / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages)


def test_workflows_call_goals_that_exist(root: Path) -> None:
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
            for line in re.findall(r"^ *make (.+)$", run, re.MULTILINE)
            for goal in line.partition(" ARGS=")[0].split()
        }
        assert called <= goals, called - goals
    publish = yaml.safe_load((root / ".github/workflows/release.yml").read_text())["jobs"][
        "publish"
    ]
    assert publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == {"build", "tag"}


def test_a_release_has_the_app_that_make_apk_builds_and_its_hash(root: Path) -> None:
    jobs = yaml.safe_load((root / ".github/workflows/release.yml").read_text())["jobs"]
    built = "\n".join(step.get("run", "") for step in jobs["apk"]["steps"])
    assert "make apk\n" in built
    apk = (root / "android_app" / "build_apk.py").read_text()
    assert "ondevice-debug.apk" in apk
    assert 'cp android_app/build/ondevice-debug.apk "apk/ondevice-$VERSION.apk"' in built
    assert 'sha256sum "ondevice-$VERSION.apk" > "ondevice-$VERSION.apk.sha256"' in built
    assert jobs["apk"]["steps"][-1]["with"] == {"name": "apk", "path": "apk"}
    assert "apk" in jobs["tag"]["needs"]
    (release,) = [step["run"] for step in jobs["tag"]["steps"] if "run" in step]
    assert "dist/* apk/*" in release


def test_each_action_of_a_workflow_is_pinned_by_its_commit(root: Path) -> None:
    uses = [
        line
        for path in (root / ".github/workflows").glob("*.yml")
        for line in re.findall(r"uses: (.+)", path.read_text())
    ]
    assert len(uses) > 20
    assert not [line for line in uses if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", line)]


def test_contributing_names_each_job_of_a_change(root: Path) -> None:
    jobs = yaml.safe_load((root / ".github/workflows/check.yml").read_text())["jobs"]
    text = (root / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(jobs)


def test_a_release_takes_its_notes_from_the_changelog_and_refuses_what_disagrees(
    root: Path, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("release", root / ".ci/release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.3\n")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## Unreleased\n\n## 1.2.3\n\n- New.\n\n## 1.2.2\n\n- Old.\n"
    )
    assert module.release(tmp_path) == ("1.2.3", "- New.\n")
    changelog.write_text("## Unreleased\n\n- More.\n\n## 1.2.3\n\n- New.\n")
    with pytest.raises(ValueError):
        module.release(tmp_path)
    changelog.write_text("## 1.2.2\n\n- Old.\n")
    with pytest.raises(ValueError):
        module.release(tmp_path)
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.2\n")
    with pytest.raises(ValueError):
        module.release(tmp_path)


def test_every_pinned_package_has_hashes_and_the_environment_has_no_other(root: Path) -> None:
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    pins = set()
    for name in ("dev", "fleet"):
        text = (root / f"requirements/{name}.txt").read_text()
        entries = re.findall(r"^([\w.-]+)==(?:.*\\\n)*.*$", text, re.MULTILINE)
        whole = re.findall(r"^[\w.-]+==(?:.*\\\n)*.*$", text, re.MULTILINE)
        assert len(entries) > 60
        assert not [entry for entry in whole if "--hash=sha256:" not in entry]
        assert "://" not in text
        pins |= set(entries) if name == "dev" else set()
    pending = [Requirement("ondevice-train[dev]")]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name.lower())
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                lines = requires(requirement.name) or []
            except PackageNotFoundError:
                continue
            for line in map(Requirement, lines):
                if line.marker is None or line.marker.evaluate({"extra": extra}):
                    pending.append(line)
    assert {name for name, _ in seen} - {"ondevice-train"} - pins == set()


def test_the_citation_and_the_changelog_name_the_version(root: Path) -> None:
    import tomllib

    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert str(yaml.safe_load((root / "CITATION.cff").read_text())["version"]) == version
    assert f"\n## {version}\n" in (root / "CHANGELOG.md").read_text()
