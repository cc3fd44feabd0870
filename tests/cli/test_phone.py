"""`ondevice push` and `pull`: the real commands, archives and checks; only `adb` and the phone are played."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.files import atomic_write
from tests.cli.command import CommandLine
from tests.programs import program

pytest.importorskip("executorch.exir")


@pytest.fixture
def phone(tmp_path: Path, monkeypatch) -> Path:
    """A phone with the app, and its `adb` first on the path."""
    disk, tools = tmp_path / "phone", tmp_path / "tools"
    (disk / "app").mkdir(parents=True)
    (disk / "devices").write_text("R3CN\tdevice\n")
    tools.mkdir()
    script = Path(__file__).with_name("fake_adb.py")
    words = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"  # a path in #! may have no space
    (tools / "adb").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (tools / "adb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("PHONE", str(disk))
    return disk


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "name", ["functional", "blocks", "blocks, q4", "blocks, 8da8w", "blocks, 8da4w"]
)
def test_an_artifact_arrives_whole_and_replaces_the_one_of_its_name(
    ondevice: CommandLine, phone: Path, name: str
) -> None:
    models = phone / "app" / "files" / "models"
    (models / "tiny").mkdir(parents=True)
    (models / "tiny" / "old.txt").write_text("old")
    done = ondevice("push", program(name), "--name", "tiny", "--json")
    assert done.code == 0 and done.json["place"] == "org.ondevice.app/files/models/tiny"
    assert done.json["phone"] == "R3CN" and done.json["import_by_hand"] is False
    assert digests(models / "tiny") == digests(program(name))
    assert [path.name for path in models.iterdir()] == ["tiny"]
    assert done.json["bytes"] == sum(
        path.stat().st_size for path in program(name).rglob("*") if path.is_file()
    )


def test_the_folder_s_name_becomes_one_that_a_shell_can_take(
    ondevice: CommandLine, phone: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "mein Modell; $(x) ü"
    shutil.copytree(program("functional"), odd)
    assert ondevice("push", odd).code == 0
    assert [path.name for path in (phone / "app" / "files" / "models").iterdir()] == [
        "mein-Modell-x"
    ]
    wrong = ondevice("push", odd, "--name", "a/../b", "--json")
    assert wrong.code == 2 and wrong.json["received"] == "a/../b"


@pytest.mark.parametrize(
    ("state", "text", "word"),
    [
        ("devices", "", "no phone is connected"),
        ("devices", "R3CN\tunauthorized\n", "unauthorized"),
        ("devices", "A\tdevice\nB\tdevice\n", "--serial"),
        ("uninstalled", "", "not installed on the phone"),
        ("full", "", "No space left"),
    ],
)
def test_a_phone_that_cannot_is_named_with_what_to_do(
    ondevice: CommandLine, phone: Path, state, text, word
) -> None:
    (phone / state).write_text(text)
    done = ondevice("push", program("functional"))
    assert done.code == 13 and word in done.err and "try:" in done.err
    assert not list((phone / "app").rglob("program.pte"))


def test_an_artifact_that_changes_on_the_way_is_not_kept(
    ondevice: CommandLine, phone: Path
) -> None:
    models = phone / "app" / "files" / "models"
    assert ondevice("push", program("functional"), "--name", "m").code == 0
    (phone / "corrupts").touch()
    before = digests(models / "m") | {"program.pte": ""}
    done = ondevice("push", program("functional"), "--name", "m")
    assert done.code == 5 and "program.pte did not arrive whole" in done.err
    assert [path.name for path in models.iterdir()] == ["m"]
    assert (digests(models / "m") | {"program.pte": ""}) == before


def test_a_chosen_phone_is_used(ondevice: CommandLine, phone: Path) -> None:
    (phone / "devices").write_text("A\tdevice\nB\tdevice\n")
    assert ondevice("push", program("functional"), "--serial", "B", "--json").json["phone"] == "B"
    assert ondevice("push", program("functional"), "--serial", "C").code == 13


def test_a_release_build_gets_a_zip_to_import(
    ondevice: CommandLine, phone: Path, tmp_path: Path
) -> None:
    (phone / "release").touch()
    done = ondevice("push", program("functional"), "--name", "m", "--json")
    assert done.json["import_by_hand"] is True and done.json["place"] == "/sdcard/Download/m.zip"
    with zipfile.ZipFile(phone / "sdcard" / "Download" / "m.zip") as archive:
        archive.extractall(tmp_path / "there")
    assert digests(tmp_path / "there") == digests(program("functional"))
    assert "share" in ondevice("pull", "--out", tmp_path / "x").err


def test_adapters_come_back_as_they_were_saved(
    ondevice: CommandLine, phone: Path, tmp_path: Path
) -> None:
    session = open_artifact(program("functional"))
    flat = (
        np.random.default_rng(0)
        .normal(size=session.manifest.program_spec.adapter_size)
        .astype(np.float32)
    )
    session.load_state({"adapter": flat, "seed": np.array([session.seed])})
    there = phone / "app" / "files" / "adapters" / "tiny" / "après"
    save_adapter(session.adapter(), there)
    atomic_write(there.parent / "history.json", "[]")
    out = tmp_path / "from phone"
    done = ondevice("pull", "--out", out, "--json")
    assert done.json == {"adapters": [str(out / "tiny" / "après")]}
    back = load_adapter(out / "tiny" / "après")
    assert all(
        np.array_equal(back.tensors[name], value)
        for name, value in session.adapter().tensors.items()
    )
    assert ondevice("pull", "--out", out).code == 0  # its own folder may be replaced
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep")
    assert ondevice("pull", "--out", tmp_path / "mine").code == 11
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep"
    (there / "adapter_model.safetensors").write_bytes(b"damaged")
    assert ondevice("pull", "--out", out).code == 5
    assert load_adapter(out / "tiny" / "après").tensors.keys() == back.tensors.keys()


def test_without_adapters_or_adb_it_says_so(
    ondevice: CommandLine, phone: Path, monkeypatch
) -> None:
    done = ondevice("pull")
    assert done.code == 13 and "no adapters" in done.err
    monkeypatch.setenv("PATH", str(phone))
    absent = ondevice("push", program("functional"), "--json")
    assert (
        absent.code == 10
        and "adb" in absent.json["message"]
        and "apt-get install adb" in absent.json["try"]
    )
