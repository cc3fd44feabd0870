"""The wheel holds everything, the checkout holds nothing but what belongs there, and the tools
agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.bare import Bare, build, build_wheel

TOP_LEVEL = {
    "pyproject.toml", "ondevice", "exporters", "runtime_ops", "android_app", "tests", "README.md",
    "benchmarks", "docs", "examples", "requirements", "Makefile", "LICENSE", ".ci", ".gitignore",
    ".pre-commit-config.yaml", ".github", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md",
    "mkdocs.yml", "develop",
}  # fmt: skip
PACKAGED = {
    ".py",
    ".typed",
    ".md",
    ".json",
    ".cpp",
    ".h",
    ".cu",
    ".swift",
    ".html",
    ".css",
    ".js",
    ".svg",
    ".txt",
    ".csv",
}


@pytest.fixture(scope="session")
def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(root, tmp_path_factory.mktemp("wheel"))


def sources(root: Path) -> set[str]:
    """Every file below ondevice/, its two links followed, that an installed package needs."""
    collected = set()
    for folder, place in (
        ("ondevice", ""),
        ("exporters", "ondevice/"),
        ("runtime_ops", "ondevice/"),
    ):
        for path in (root / folder).rglob("*"):
            if path.is_file() and path.suffix in PACKAGED and "__pycache__" not in path.parts:
                collected.add(place + path.relative_to(root).as_posix())
    return collected


def test_wheel_holds_every_source_and_nothing_else(wheel: Path, root: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert sources(root) - names == set()
    assert {name for name in names if not name.startswith("ondevice/")} == set()
    assert "ondevice/exporters/__init__.py" in names
    assert "ondevice/runtime_ops/__init__.py" in names
    assert {
        name for name in names if "__pycache__" in name or name.endswith((".so", ".pte"))
    } == set()


def test_installed_wheel_imports_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import ondevice, ondevice.exporters, ondevice.runtime_ops\n"
        "print(ondevice.__file__, ondevice.exporters.__file__, ondevice.runtime_ops.__file__, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(tmp_path)) for line in done.stdout.split())


@pytest.fixture(scope="module")
def bare(wheel: Path, project: dict, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return build(
        tmp_path_factory.mktemp("bare") / "site", wheel, project["project"]["dependencies"]
    )


@pytest.mark.parametrize(
    "command",
    ["train tiny:llama --data rows.jsonl", "eval tiny:llama --data rows.jsonl", "chat tiny:llama --prompt hi",
     "data rows.jsonl --model tiny:llama", "export tiny:llama --out program"],
)  # fmt: skip
def test_a_bare_wheel_names_the_missing_extra(command: str, bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "a", "label": "no"}\n{"text": "b", "label": "yes"}\n'
    )
    done = bare(*command.split(), cwd=tmp_path)
    assert done.returncode in (2, 10) and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"pip install 'ondevice-train\[(torch|executorch)\]'", done.stderr)


def test_a_bare_wheel_names_the_missing_extra_of_commands_that_follow_a_run(
    bare: Bare, tmp_path: Path
) -> None:
    """Of a replay, and of the demo's commands over an exported program."""
    import ondevice

    rows = [{"text": "a", "label": "no"}, {"text": "b", "label": "yes"}]
    method = {"method.name": "prge", "method.subspace": "random", "method.queries": 1}
    settings = {
        "model.source": "tiny:llama",
        **method,
        "train.steps": 1,
        "train.out": str(tmp_path / "run"),
    }
    ondevice.train(settings, rows=rows)
    program, adapter = tmp_path / "a program", tmp_path / "run" / "adapter"
    values = {
        "model.source": "tiny:llama",
        **method,
        "export.target": "cuda-server",
        "export.lengths_tokens": [16],
    }
    ondevice.export(ondevice.RunConfig.load(None, values), program)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data, out = ("--data", "rows.jsonl"), ("--out", tmp_path / "again")
    for command in (("replay", tmp_path / "run", *out), ("verify", program), ("run", program, *data, *out),
                    ("eval", program, *data, "--adapter", adapter), ("fuse", "tiny:llama", adapter, *out),
                    ("convert", adapter, "--to", "safetensors", *out)):  # fmt: skip
        done = bare(*command, cwd=tmp_path)
        assert done.returncode == 10 and "Traceback" not in done.stderr, (command, done.stderr)
        assert re.search(r"pip install 'ondevice-train\[(torch|cuda)\]'", done.stderr), done.stderr
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan tiny:llama", "a step (estimate"),
        ("data rows.jsonl", "classification"),
        ("config show --model tiny:llama", "name: mesp"),
        ("runs list .", ""),
        ("train --help", "--epochs"),
        ("--version", "0."),
    ],
)
def test_a_bare_wheel_does_what_needs_no_framework(
    command: str, words: str, bare: Bare, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "a", "label": "no"}\n{"text": "b", "label": "yes"}\n'
    )
    done = bare(*command.split(), cwd=tmp_path)
    assert done.returncode == 0 and words in done.stdout, done.stderr


def test_the_doctor_of_a_bare_wheel_fails_because_nothing_can_train(
    bare: Bare, tmp_path: Path
) -> None:
    done = bare("doctor", "--json", cwd=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert (
        done.returncode == 10
        and not checks["training"]["ok"]
        and "[torch]" in checks["training"]["fix"]
    )


def test_files_on_the_path_that_are_not_installed_are_recognised(
    bare: Bare, tmp_path: Path
) -> None:
    shutil.copytree(bare.site, tmp_path / "site", symlinks=True)
    for path in (tmp_path / "site").glob("ondevice_train-*.dist-info"):
        shutil.rmtree(path)
    done = Bare(tmp_path / "site")("--version", cwd=tmp_path)
    assert done.returncode == 10 and "metadata of ondevice-train is missing" in done.stderr


def test_wheel_metadata_names_license_python_and_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    assert "Name: ondevice-train\n" in text
    assert "License-Expression: Apache-2.0\n" in text
    assert set(re.findall(r"Requires-Python: (.+)", text)) == {"<3.14,>=3.11"}
    extras = set(re.findall(r"Provides-Extra: (.+)", text))
    assert {"executorch", "qnn", "mlx", "cuda", "serve", "dev"} <= extras
    entry = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert re.search(r"^ondevice = ondevice\.cli", entry, re.MULTILINE)


def test_core_dependencies_are_light(project: dict) -> None:
    core = {re.split(r"[<>=\[; ]", line)[0].lower() for line in project["project"]["dependencies"]}
    assert core.isdisjoint(
        {"torch", "transformers", "mlx", "executorch", "peft", "bitsandbytes", "fastapi"}
    )


def test_every_development_dependency_is_pinned(project: dict, root: Path) -> None:
    pins = re.findall(r"^([a-z0-9-]+)==", (root / "requirements/dev.txt").read_text(), re.MULTILINE)
    wanted, queue, seen = set(), ["dev"], set()
    extras = project["project"]["optional-dependencies"]
    lines = list(project["project"]["dependencies"])
    while queue:
        if (extra := queue.pop()) in seen:
            continue
        seen.add(extra)
        for line in extras[extra]:
            if line.startswith("ondevice-train["):
                queue += line.split("[")[1].rstrip("]").split(",")
            else:
                lines.append(line)
    wanted = {re.split(r"[<>=\[; ]", line)[0].lower().replace(".", "-") for line in lines}
    assert wanted - set(pins) == set()
    assert len(pins) == len(set(pins))


def test_nothing_else_at_the_top(root: Path) -> None:
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, cwd=root, check=True
    ).stdout
    assert {line.split("/")[0] for line in listed.splitlines()} - TOP_LEVEL == set()


def test_the_links_are_relative(root: Path) -> None:
    for name in ("exporters", "runtime_ops"):
        link = root / "ondevice" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
