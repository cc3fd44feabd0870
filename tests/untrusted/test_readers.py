"""Each limit of the readers for what comes from outside, and that nobody reads past them."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ondevice.artifact.files import DamagedError
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import ArtifactError, ConfigError, DataError, ModelError, was_refused
from ondevice.core.untrusted import (
    Refused,
    check_name,
    inside,
    parse_header,
    parse_json,
    read_object,
    read_plain,
)
from ondevice.core.untrusted.yaml_documents import parse_yaml
from ondevice.data import read_rows
from ondevice.data.readers.files import SUFFIXES, Reader, read_records
from ondevice.data.readers.source import Limits, Record, Source
from ondevice.models.sources.resolve import check_folder
from ondevice.training.checkpoint import read_meta
from tests.untrusted.files_of_models import build_sharded
from tests.untrusted.files_of_rows import build_arrow, build_xlsx
from tests.untrusted.files_of_runs import build_artifact, build_checkpoints


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 65 + b"]" * 65, "nested more than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested more than 64"),
        (b"[" + b"[]," * (1 << 20) + b"[]]", "too many lists"),
        (b'{"r": ' + b"9" * 50 + b"}", "too many digits"),
        (b'{"r": ' + b"9" * 5_000 + b"}", "4300"),
        (b'"\\ud800"', "surrogates"),
        (b'{"a": "\xff"}', "decode"),
        (b'"' + b"x" * (16 << 20) + b'"', "larger"),
    ],
    ids=[
        "never ends",
        "lists",
        "objects",
        "count",
        "digits",
        "more digits",
        "half a pair",
        "latin 1",
        "size",
    ],
)
def test_json_beyond_a_limit_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_json(data)
    assert reason in str(caught.value)


def test_json_within_the_limits_is_what_json_reads() -> None:
    value = {"a": [1, 2.5, None, True, "ß😀"], "b": json.loads("[" * 60 + "]" * 60), "c": 10**38}
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("&a [*a]", "alias"),
        ("[" * 5_000, "nested"),
        ("\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]),
         "large"),
        ("\n".join(["m0: &m0 {k: v}",
                    *(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, 10))]),
         "large"),
        ("day: 2001-13-45", "month"),
        ("!!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("- x\n" * 30_000, "values"),
    ],
    ids=["in itself", "deep", "aliases", "merges", "date", "code", "many"],
)  # fmt: skip
def test_yaml_beyond_a_limit_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_yaml(text)
    assert reason in str(caught.value)


def test_yaml_may_use_an_alias() -> None:
    assert parse_yaml("a: &a {k: 1}\nb: {<<: *a, m: [*a, *a]}") == {
        "a": {"k": 1},
        "b": {"k": 1, "m": [{"k": 1}] * 2},
    }


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/../x", "/x", "a//x", "./x", "a\\x", "a\0x", "x\n", 7, None, "x" * 2_000],
)
def test_a_name_that_leads_elsewhere_is_refused(name: object) -> None:
    with pytest.raises(Refused):
        check_name(name)


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "folder" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "folder" / "up").symlink_to("..")
    (tmp_path / "folder" / "within").symlink_to("deep/file")
    assert inside(tmp_path / "folder", "within") == tmp_path / "folder" / "within"
    for name in ("out", "up/secret"):
        with pytest.raises(Refused):
            inside(tmp_path / "folder", name)
    # A folder that is itself reached through a link is its owner's.
    (tmp_path / "alias").symlink_to("folder")
    assert inside(tmp_path / "alias", "deep/file").parent.name == "deep"


def test_the_hubs_cache_links_into_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    (snapshot / "a.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "b.safetensors").symlink_to("../../../blobs/0123")
    inside(snapshot, "a.safetensors")
    with pytest.raises(Refused):
        inside(snapshot, "b.safetensors")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused):
        read_plain(tmp_path / "pipe", 10)
    with pytest.raises(ConfigError):
        read_object(tmp_path / "pipe", ConfigError)


def test_a_batch_that_states_more_bytes_than_can_be_read_is_refused(tmp_path: Path) -> None:
    ipc = pytest.importorskip("pyarrow.ipc")
    build_arrow(stream=True, compression=None)(tmp_path)
    path = tmp_path / "rows.arrow"
    batches = [one for one in ipc.MessageReader.open_stream(path) if one.type == "record batch"]
    for batch in batches:
        own, endless = (size.to_bytes(8, "little") for size in (batch.body.size, 2**63 - 1))
        whole = path.read_bytes()
        path.write_bytes(whole.replace(own, endless))
        with pytest.raises(DataError) as caught:
            list(read_records(path).records)
        assert "rows.arrow" in caught.value.message and "too large" in caught.value.message
        path.write_bytes(whole)


@pytest.mark.parametrize("at_once", [True, False])
def test_rows_that_need_more_memory_than_there_is_are_refused_in_words(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's helper process, which then ends, can tell why."""

    def records() -> Iterator[Record]:
        yield Record(1, {"text": "a"})
        raise MemoryError

    def read(path: Path, limits: Limits) -> Source:
        if at_once:
            raise MemoryError
        return Source("txt", records())

    monkeypatch.setitem(SUFFIXES, ".txt", Reader("txt", (".txt",), read))
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(DataError) as caught:
        list(read_records(tmp_path / "rows.txt").records)
    assert "rows.txt needs more memory" in caught.value.message and was_refused(caught.value)


def test_rows_that_do_not_fit_together_are_refused_in_words_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*_: object) -> Iterator[object]:
        raise MemoryError
        yield

    (tmp_path / "rows.txt").write_text("a")
    monkeypatch.setattr("ondevice.data.reading.Reading.rows", rows)
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "rows.txt")
    assert "rows.txt needs more memory" in caught.value.message and was_refused(caught.value)


def test_a_part_of_a_book_that_states_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    build_xlsx(tmp_path)
    path = tmp_path / "rows.xlsx"
    read_rows(path)
    data = bytearray(path.read_bytes())
    start = data.index(
        b"PK\x01\x02"
    )  # the first entry of the directory; its sizes are at 20 and 24
    data[start + 20 : start + 28] = (3 << 30).to_bytes(4, "little") * 2
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert "more bytes than the file has" in str(caught.value)


def header(entries: dict[str, object], size: int = 16) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header({"a": entry(shape=[2, 3])}), "another size"),
        (header({"a": entry(data_offsets=[0, 32], shape=[8])}), "truncated"),
        (header({"a": entry(data_offsets=[16, 0])}), "another size"),
        (header({"a": entry(shape=[-2, -2])}), "whole numbers"),
        (header({"a": entry(shape=[True, 4])}), "whole numbers"),
        (header({"a": entry(shape=[2**40, 2**40])}), "another size"),
        (header({"a": entry(dtype="F33")}), "unknown dtype"),
        (header({"a": entry(), "b": entry(shape=[1], data_offsets=[8, 12])}), "inside another"),
        (header({"a": [1]}), "no dtype"),
        (header({"__metadata__": {"a": 1}}), "not texts"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "truncated"),
        (b"", "truncated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_that_is_not_in_its_file_is_refused(data: bytes, reason: str) -> None:
    assert parse_header(header({"a": entry()})).tensors["a"].shape == (2, 2)
    with pytest.raises(Refused) as caught:
        parse_header(data)
    assert reason in str(caught.value)


def put(values: dict, path: list, value: object) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value


FIELDS = {
    "program": ["program"],
    "weights": ["program_spec", "weights"],
    "frozen": ["program_spec", "frozen"],
    "first": ["program_spec", "state", 0, "first"],
    "method": ["program_spec", "methods", "train_step", "program"],
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "link", "README.md"])
def test_an_artifact_reads_only_its_own_hashed_files(field: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    build_artifact(folder)
    read_manifest(folder)
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "README.md").write_text("a file that came later")
    values = json.loads((folder / "manifest.json").read_text())
    put(values, FIELDS[field], name)
    (folder / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError) as caught:
        read_manifest(folder, check_files=False)
    assert caught.value.received == name


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "link"])
def test_an_artifact_lists_only_its_own_files(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    build_artifact(folder)
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    values = json.loads((folder / "manifest.json").read_text())
    values["files"][name] = (
        "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
    )
    (folder / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError) as caught:
        read_manifest(folder)
    assert caught.value.received == name


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "link"])
def test_parts_of_checkpoints_and_models_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    build_checkpoints(tmp_path)
    checkpoint = tmp_path / "checkpoint-00000002"
    (checkpoint / "link").symlink_to(tmp_path / "secret")
    meta = json.loads((checkpoint / "meta.json").read_text())
    read_meta(checkpoint)
    (checkpoint / "meta.json").write_text(json.dumps({**meta, "parts": {name: "0"}}))
    with pytest.raises(DamagedError):
        read_meta(checkpoint)

    build_sharded(tmp_path)
    model = tmp_path / "model"
    check_folder(model)
    (model / "link").symlink_to(tmp_path / "secret")
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError):
        check_folder(model)


READERS = {
    "json.load", "json.loads", "yaml.load", "yaml.safe_load", "safetensors.deserialize", "safetensors.safe_open",
    "pickle.load", "pickle.loads", "np.load", "torch.load",
}  # fmt: skip
OWN = {
    "ondevice/artifact/pairs.py": "a header that `save` gave in the lines before",
    "ondevice/cli/daemon.py": "the daemon's own answers",
    "ondevice/core/untrusted/__init__.py": "the one place",
    "ondevice/gguf/write_tokenizer.py": "the rules of a tokenizer that is loaded",
    "ondevice/exits/gguf_text.py": "the rules of a tokenizer that is loaded",
    "ondevice/exits/llama_cpp.py": "a child process of ours",
    "ondevice/exits/mlx_model.py": "files that were written in the lines before",
    "ondevice/exits/vllm.py": "a file that was written in the lines before",
    "ondevice/fleet/asking.py": "a socket of this machine and user",
    "ondevice/fleet/averaging/apps.py": "the server's own database",
    "ondevice/fleet/simulated.py": "the server's own database",
    "ondevice/data/tasks/literal.py": "a tokenizer that was loaded",
    "ondevice/generation/token_bytes.py": "a tokenizer that was loaded",
    "ondevice/fleet/engine.py": "the simulation's own values",
    "ondevice/fleet/link.py": "settings that the parent process passes",
    "ondevice/fleet/plot.py": "the server's own database",
    "ondevice/fleet/status.py": "the server's own database",
    "ondevice/models/families/any_dims.py": "a configuration that was parsed, as a key of a cache",
    "ondevice/models/packed.py": "weights whose header was checked",
    "ondevice/planning/doctor.py": "a process that this one started",
    "ondevice/server/client.py": "answers of the daemon that the user named",
    "ondevice/server/conversions.py": "the daemon's own database",
    "ondevice/server/daemon.py": "the daemon's own folder",
    "ondevice/server/events.py": "the daemon's own database",
    "ondevice/server/engine/engine.py": "a process that this one started",
    "ondevice/server/engine/model.py": "a model that the daemon packed",
    "ondevice/server/engine/process.py": "the process that started this one",
    "ondevice/server/helper.py": "a process that this one started",
    "ondevice/server/helper_process.py": "the process that started this one",
    "ondevice/server/jobs.py": "the daemon's own folder",
    "ondevice/server/queue.py": "the daemon's own database",
    "ondevice/server/routes/data.py": "the daemon's own database",
    "ondevice/server/thumbs.py": "the daemon's own database",
    "ondevice/server/transport.py": "answers of the daemon that the user named",
    "ondevice/server/worker.py": "the daemon's own folder",
    "ondevice/server/worker_process.py": "the daemon's own folder",
    "ondevice/training/benchmark.py": "answers that were written in the lines before",
    "runtime_ops/generator.py": "a file of the package",
    "runtime_ops/golden.py": "a file of the package",
    "ondevice/server/fine_tuning.py": "values that are checked already, and the daemon's own database",
}
"""Files that read what this program wrote itself, and what that is."""


def test_everything_else_reads_through_the_one_room(root: Path) -> None:
    found: dict[str, set[str]] = {}
    for room in ("ondevice", "exporters", "runtime_ops"):
        for path in (root / room).rglob("*.py"):
            if path.is_relative_to(root / "ondevice/exporters") or path.is_relative_to(
                root / "ondevice/runtime_ops"
            ):
                continue
            source = path.read_text(encoding="utf-8")
            if not any(f"{reader}(" in source for reader in READERS):
                continue  # parsing all files takes 4 CPU seconds
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and (call := ast.unparse(node.func)) in READERS:
                    found.setdefault(str(path.relative_to(root)), set()).add(call)
    beyond = {file: calls for file, calls in found.items() if file not in OWN}
    assert not beyond, "read these through ondevice.core.untrusted"
