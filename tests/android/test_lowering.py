"""tools/java: class files of newer Java come out as Java 8, and do the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.android.test_apk import APP, needs_tools, run

pytestmark = pytest.mark.slow

SAMPLE = Path(__file__).with_name("Sample.java")
RECORD = "public record Point(int x, int y) {}"


@pytest.fixture(scope="module")
def lower() -> list[str]:
    """The command of the tool, compiled."""
    needs_tools()
    sys.path.insert(0, str(APP))
    try:
        from tools import dex, fetch

        fetch.chain()
        return [str(part) for part in [*dex.tools(), "Lower"]]
    finally:
        sys.path.remove(str(APP))


def jar(folder: Path, name: str, source: str) -> Path:
    folder.mkdir()
    (folder / f"{name}.java").write_text(source, encoding="utf-8")
    run(
        "javac",
        "-encoding",
        "UTF-8",
        "--release",
        "17",
        "-d",
        folder / "classes",
        folder / f"{name}.java",
    )
    run("jar", "--create", "--file", folder / "in.jar", "-C", folder / "classes", ".")
    return folder / "in.jar"


def test_the_lowered_program_does_the_same(lower: list[str], tmp_path: Path) -> None:
    before = jar(tmp_path / "sample", "Sample", SAMPLE.read_text("utf-8"))
    after = tmp_path / "out.jar"
    run(*lower, before, after)
    java = ("java", "-Dstdout.encoding=UTF-8", "-Xverify:all", "-cp")
    expected = run(*java, before, "Sample")
    assert "both 43" in expected and "inner 4" in expected
    assert run(*java, after, "Sample") == expected
    names = [
        name
        for name in run("jar", "--list", "--file", after).splitlines()
        if name.endswith(".class")
    ]
    said = run("javap", "-v", "-p", "-cp", after, *(name.removesuffix(".class") for name in names))
    assert said.count("major version: 52") == len(names) > 8
    for left in ("invokedynamic", "NestMembers", "NestHost"):
        assert left in run("javap", "-v", "-p", "-cp", before, "Sample", "Sample$Inner")
        assert left not in said


def test_what_android_8_cannot_run_is_refused_by_name(lower: list[str], tmp_path: Path) -> None:
    before = jar(tmp_path / "point", "Point", RECORD)
    done = subprocess.run(
        [*lower, str(before), str(tmp_path / "out.jar")],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode != 0
    assert "Point holds a record, which Android 8 cannot run" in done.stderr
    assert not (tmp_path / "out.jar").exists()
