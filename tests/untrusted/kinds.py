"""Every kind of file that comes from outside: a whole example, and how a user reads it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.untrusted.mutations import (
    json_document,
    json_lines,
    tensor_header,
    text_lines,
    yaml_document,
    zip_entries,
)
from tests.untrusted.runner import Kind

LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")
ROWS = [{"prompt": f"Question {n}: ß?", "completion": f"answer {n}"} for n in range(12)]
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                  {"role": "assistant", "content": None,
                   "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                  {"role": "tool", "content": "1"}, {"role": "assistant", "content": "Yes"}]},
]  # fmt: skip


# Adapters


def adapter() -> Any:
    from ondevice.artifact.adapter import Adapter

    tensors = {}
    for linear in LINEARS:
        tensors[f"{linear}.lora_A.weight"] = np.ones((2, 8), np.float32)
        tensors[f"{linear}.lora_B.weight"] = np.ones((8, 2), np.float32)
    return Adapter(tensors, 2, 4.0, ("q_proj", "v_proj"), "tiny:llama")


def build_adapter(folder: Path) -> None:
    from ondevice.artifact.adapter import save_adapter

    save_adapter(adapter(), folder / "adapter")


def build_mlx_adapter(folder: Path) -> None:
    from ondevice.artifact.mlx_lm_files import save_mlx_lm_adapter

    save_mlx_lm_adapter(adapter(), folder / "adapter")


def read_adapter(folder: Path) -> None:
    from ondevice.artifact.adapter import load_adapter

    found = load_adapter(folder / "adapter")
    _ = found.linears, found.changes_nothing


# Artifacts and checkpoints


def build_artifact(folder: Path) -> None:
    from ondevice.artifact.manifest import write_manifest
    from ondevice.artifact.weights import WEIGHTS_NAME, write_weights
    from tests.exporters.executorch.test_session import manifest

    written = manifest(folder)
    write_weights(
        folder / WEIGHTS_NAME, {"w": np.ones((4, 4), np.float32), "codes": np.ones(3, np.int8)}
    )
    (folder / "program.json").write_text(
        json.dumps({"format": 1, "dtype": "float32", "functions": {}})
    )
    spec = written.program_spec.model_copy(update={"weights": WEIGHTS_NAME})
    write_manifest(
        written.model_copy(update={"program_spec": spec, "program": "program.json"}), folder
    )


def read_artifact(folder: Path) -> None:
    """Read what every session reads, whatever its runtime."""
    from ondevice.artifact.files import read_tensors
    from ondevice.artifact.manifest import read_manifest
    from ondevice.artifact.weights import MappedWeights
    from ondevice.core.errors import ArtifactError
    from ondevice.core.untrusted import read_object

    found = read_manifest(folder)
    spec = found.program_spec
    for tensor in spec.state:
        if tensor.first is not None:
            read_tensors(folder / tensor.first)
    if spec.weights is not None:
        weights = MappedWeights(folder / spec.weights)
        for name in weights:
            weights.whole(name).sum()
    read_object(folder / found.program, ArtifactError)


def hash_again(folder: Path) -> None:
    """Give every file the hash that the manifest names, as somebody who means harm does."""
    path = folder / "manifest.json"
    try:
        values = json.loads(path.read_bytes())
        for name in values["files"]:
            if (folder / name).is_file():
                values["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        path.write_text(json.dumps(values))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass


IDENTITY = {"method": {"name": "prge", "rank": 2}, "seed": 1}


def build_checkpoints(folder: Path) -> None:
    from ondevice.training.checkpoint import CheckpointStore

    for step in (1, 2):
        state = {
            "adapter": np.ones(6, np.float32),
            "seed": np.array([1]),
            "moment": np.ones((2, 2), np.float16),
        }
        CheckpointStore(folder, IDENTITY, seed=1, backend="torch").save(
            step, state, evaluation={"loss": 1.0}, score=(-1.0,)
        )
    # A checkpoint of two ranks: its second file is a part.
    path = folder / "checkpoint-00000002"
    shutil.copy(path / "state.safetensors", path / "state-00001.safetensors")
    meta = json.loads((path / "meta.json").read_text())
    meta["parts"] = {"state-00001.safetensors": meta["state_sha256"]}
    (path / "meta.json").write_text(json.dumps(meta))


def read_checkpoints(folder: Path) -> None:
    from ondevice.training.checkpoint import CheckpointStore

    store = CheckpointStore(folder, IDENTITY, seed=1, backend="torch")
    store.best()
    found = store.newest(lambda message: None)
    assert found is not None
    for value in found.state.values():
        value.sum()


def state_hash(folder: Path) -> None:
    """Give the state the hash that `meta.json` names."""
    path = folder / "checkpoint-00000002"
    if (path / "state.safetensors").is_file():
        meta = json.loads((path / "meta.json").read_text())
        meta["state_sha256"] = hashlib.sha256((path / "state.safetensors").read_bytes()).hexdigest()
        (path / "meta.json").write_text(json.dumps(meta))


def build_log(folder: Path) -> None:
    from ondevice.training.events import Evaluate, EventLog, Finish, Start, Step, Warning

    values: dict[type, dict[str, Any]] = {
        kind: _example_of(kind) for kind in (Start, Step, Evaluate, Warning, Finish)
    }
    with EventLog(folder / "events.jsonl") as log:
        for kind, fields in values.items():
            log.write(kind(**fields))
            if kind is Step:
                for step in range(1, 4):
                    log.write(kind(**{**fields, "step": step}))


def _example_of(kind: Any) -> dict[str, Any]:
    import dataclasses

    example = {
        "float": 0.5,
        "int": 0,
        "str": "x",
        "bool": False,
        "dict[str, Any]": {"a": 1},
        "tuple": (0.5,),
    }
    found = {}
    for item in dataclasses.fields(kind):
        key = str(item.type).partition(" |")[0]
        key = (
            "tuple"
            if key.startswith("tuple")
            else "dict[str, Any]"
            if key.startswith("dict")
            else key
        )
        found[item.name] = example.get(key, "x")
    return found


def read_events(folder: Path) -> None:
    from ondevice.core.errors import OndeviceError
    from ondevice.server import events as server
    from ondevice.training import events, replay, runs

    content = events.read_log(folder / "events.jsonl")
    _ = content.start, content.steps()
    progress: dict[str, Any] = {}
    for line in (
        (folder / "events.jsonl").read_bytes().splitlines()
        if (folder / "events.jsonl").is_file()
        else ()
    ):
        event = server.parse(line)
        if event is not None:
            server.note(progress, event)
    for read in (lambda: runs.read_run(folder), lambda: replay.read_run(folder)):
        try:
            read()
        except OndeviceError as error:
            str(error).encode()


# Settings


def build_run_file(folder: Path) -> None:
    text = "model: {source: 'tiny:llama', dtype: float32}\ndata:\n  path: rows.jsonl\n  columns: {prompt: q}\n"
    text += (
        "method: {name: mesp, rank: 4, target_modules: [q_proj, v_proj], learning_rate: 0.001}\n"
    )
    text += "train: {steps: 10, batch_size: 2, out: runs/x}\nexport: {target: android-cpu, lengths_tokens: [32]}\n"
    (folder / "run.yaml").write_text(text)


def read_run_file(folder: Path) -> None:
    from ondevice.api.runfile import RunConfig

    RunConfig.load(folder / "run.yaml")


def build_template(folder: Path) -> None:
    text = "prompt: |\n  {premise}\n  Question: {hypothesis}?\nfields: {premise: [premise, a.b]}\nlabel: label\n"
    text += "candidates: {entailment: 'True', contradiction: 'False', neutral: Neither}\nmetric: macro_f1\n"
    (folder / "task.yaml").write_text(text)
    rows = [{"premise": "x", "hypothesis": "y", "label": "neutral", "a": {"b": 1}}] * 3
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_template(folder: Path) -> None:
    from ondevice.data.reading import read_rows

    read_rows(folder / "rows.jsonl", task=str(folder / "task.yaml"))


def build_devices(folder: Path) -> None:
    text = "board: {description: a board, kind: board, memory_gib: 8, usable_fraction: 0.8, rule: measured,\n"
    text += "  bandwidth_gb_s: 102, sustained: 0.5, tflops: {float32: 1.0}}\n"
    (folder / "devices.yaml").write_text(text)


def read_devices(folder: Path) -> None:
    from ondevice.planning.devices import device_table, find_device

    device_table(folder / "devices.yaml")
    find_device("board", folder / "devices.yaml")


# Models


def build_model(folder: Path) -> None:
    from ondevice.models.tiny import save_tiny

    save_tiny(folder / "model", "llama", layers=1, hidden=32, heads=2, kv_heads=1)


def build_sharded(folder: Path) -> None:
    build_model(folder)
    path = folder / "model"
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    from ondevice.core.untrusted import read_header

    names = read_header(path / "model-00001-of-00001.safetensors").tensors
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def read_config(folder: Path) -> None:
    """Read the sizes, and look at the shapes that they give, as a plan does."""
    from ondevice.api.evaluate import network_method
    from ondevice.models.open import dims_and_family
    from ondevice.models.sources.resolve import check_folder, check_weights

    network_method(folder / "model")
    check_folder(folder / "model")
    dims, family = dims_and_family(str(folder / "model"), None)
    check_weights(folder / "model", family.weight_shapes(dims))
    _ = dims.parameters


def read_weights(folder: Path) -> None:
    """Read a model's tensors with each of our own readers."""
    from ondevice.artifact.files import read_tensors
    from ondevice.core.errors import OndeviceError
    from ondevice.methods.mesp.mlx.weights import TensorFile
    from ondevice.methods.mesp.torch.weights import Files
    from ondevice.models.sources.resolve import check_weights

    def each_by_mlx() -> None:
        file = TensorFile(folder / "model" / "model.safetensors")
        for name in file.entries:
            file._place(name)
        file.close()

    for read in (
        lambda: check_weights(folder / "model", {"model.norm.weight": (32,)}),
        lambda: [
            value.sum() for value in read_tensors(folder / "model" / "model.safetensors").values()
        ],
        lambda: [
            value.sum()
            for value in read_tensors(folder / "model" / "model.safetensors", mapped=True).values()
        ],
        lambda: Files(folder / "model").close(),
        each_by_mlx,
    ):
        try:
            read()
        except OndeviceError as error:
            str(error).encode()


def read_tokenizer(folder: Path) -> None:
    from ondevice.models.open import read_tokenizer as read

    read(folder / "model")("a text")


def read_index(folder: Path) -> None:
    from ondevice.models.sources.resolve import check_folder

    check_folder(folder / "model")


def build_record(folder: Path) -> None:
    from ondevice.models.sources.cache import write_record

    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 10)
    write_record(folder, "package:x", {"file": "x.gguf", "conversion": 2})


def read_record(folder: Path) -> None:
    from ondevice.models.sources.cache import read_record as read

    read(folder, full=True)


def build_gguf(folder: Path) -> None:
    from ondevice.models.tiny import tiny_model
    from tests.models.conftest import _write_gguf

    model = tiny_model(
        "llama", layers=1, hidden=32, heads=2, kv_heads=1, intermediate=32, vocab=270
    )
    _write_gguf(folder / "tiny.gguf", model, "Q8_0")


def read_gguf(folder: Path) -> None:
    from ondevice.models.sources.gguf import convert_gguf, read_gguf_dims

    read_gguf_dims(folder / "tiny.gguf")
    out = folder / "converted"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    convert_gguf(folder / "tiny.gguf", out)


def build_gguf_adapter(folder: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for side, shape in (("a", (2, 8)), ("b", (8, 2))):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{side}", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf_adapter(folder: Path) -> None:
    """Nobody reads adapters in this form; a user may name one as a model."""
    from ondevice.core.errors import OndeviceError
    from ondevice.models.sources.gguf import read_gguf_dims

    try:
        read_gguf_dims(folder / "tiny.gguf")
    except OndeviceError as error:
        str(error).encode()


# Rows


def write_lines(name: str, rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows)) and None
    )


def build_json(folder: Path) -> None:
    (folder / "rows.json").write_text(json.dumps({"version": 1, "data": ROWS}, indent=1))


def build_csv(folder: Path) -> None:
    lines = ["text;label", *(f'"a ""quoted"" text {n}";{n % 2}' for n in range(12))]
    (folder / "rows.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())


def build_text(folder: Path) -> None:
    (folder / "rows.txt").write_text("A line.\n\nAnother ß.\n")


def build_xlsx(folder: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    sheet: Any = book.active
    for row in (["prompt", "completion"], *([one["prompt"], one["completion"]] for one in ROWS)):
        sheet.append(row)
    book.create_sheet("more").append([1, 2.5, None, True])
    book.save(folder / "rows.xlsx")
    # Without the time of its making: the same mutations are the same files in every run.
    with zipfile.ZipFile(folder / "rows.xlsx") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "rows.xlsx", "w") as archive:
        for name, content in files.items():
            fixed = re.sub(rb"\d{4}-\d\d-\d\dT[\d:]+Z", b"2026-01-01T00:00:00Z", content)
            archive.writestr(zipfile.ZipInfo(name), fixed)


def xlsx_member(draw: Any, data: bytes) -> bytes:
    """Change the bytes of one of the files inside, and pack all again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    chosen = draw.choice(list(files))
    from tests.untrusted.mutations import flip_bytes

    files[chosen] = flip_bytes(draw, files[chosen])
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()


def table() -> Any:
    import pyarrow as pa

    count = 24
    return pa.table({
        "text": ["abc", "de", None, "ßü"] * 6, "label": list(range(count)), "score": [0.5] * count,
        "messages": [[{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y"}]
                     for n in range(count)],
        "kind": pa.array(["a", "b", "a", None] * 6).dictionary_encode(), "flag": [True, False] * 12,
        "tags": pa.array([["a", "b"], [], None, ["c"]] * 6, pa.large_list(pa.large_string())),
        "pair": pa.array([[1, 2]] * count, pa.list_(pa.int32(), 2)), "at": pa.array([0] * count, pa.timestamp("us")),
        "price": pa.array([1] * count, pa.decimal128(5, 2)), "view": pa.array(["a" * 20, "b"] * 12, pa.string_view()),
        "nothing": pa.nulls(count), "map": pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int32())),
    })  # fmt: skip


def build_arrow(*, stream: bool, compression: str | None) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        from pyarrow import ipc

        rows, options = table(), ipc.IpcWriteOptions(compression=compression)
        new = ipc.new_stream if stream else ipc.new_file
        with new(folder / "rows.arrow", rows.schema, options=options) as writer:
            writer.write_table(rows, max_chunksize=10)

    return build


def build_parquet(folder: Path) -> None:
    import pyarrow.parquet as parquet

    rows = table().drop_columns(["view", "nothing"])
    parquet.write_table(rows, folder / "rows.parquet", row_group_size=10, compression="snappy")


def build_saved(folder: Path) -> None:
    (folder / "rows").mkdir()
    (folder / "rows" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        (folder / "rows" / split).mkdir()
        write_lines("a.jsonl", ROWS[:3])(folder / "rows" / split)


def read_data(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from ondevice.data.readers.records import read_records
        from ondevice.data.reading import read_rows

        for _ in read_records(folder / name).records:
            pass
        read_rows(folder / name)

    return read


# Uploads and fleets


def build_zip(folder: Path) -> None:
    build_adapter(folder)
    with zipfile.ZipFile(folder / "upload.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((folder / "adapter").iterdir()):
            archive.write(path, f"adapter/{path.name}")
    shutil.rmtree(folder / "adapter")


def read_zip(folder: Path) -> None:
    from ondevice.artifact.adapter import load_adapter
    from ondevice.server.unpack import unpack

    target = folder / "unpacked"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    unpack(folder / "upload.zip", target, limit_bytes=64 << 20)
    outside = [
        path
        for path in target.rglob("*")
        if not Path(os.path.realpath(path)).is_relative_to(target)
    ]
    assert not outside, outside
    load_adapter(target)


def build_messages(folder: Path) -> None:
    from ondevice.fleet.averaging.arrays import to_bytes
    from ondevice.fleet.carry import Parcel, files_of
    from ondevice.fleet.frozen import Frozen
    from tests.fleet.test_messages import VECTORS

    for message, _ in VECTORS:
        (folder / f"{type(message).__name__}.message").write_bytes(message.to_bytes())
    (file,) = files_of(Parcel(b'{"a": 1}', 3, [b"event"], b"task"))
    (folder / "parcel.message").write_bytes(file)
    (folder / "frozen.message").write_bytes(
        Frozen("subspace-00000001.safetensors", b"x").to_bytes()
    )
    (folder / "arrays.message").write_bytes(to_bytes({"a": np.ones(4, np.float32)}))


def read_messages(folder: Path) -> None:
    """Read each message, and each as every other kind of message."""
    from ondevice.core.errors import OndeviceError
    from ondevice.fleet.averaging.arrays import from_bytes
    from ondevice.fleet.carry import parcel_of
    from ondevice.fleet.frozen import Frozen
    from ondevice.fleet.messages import Answer, Outcome, Refresh, Task, read_event

    kinds = (Task, Answer, Outcome, Refresh, Frozen)
    for path in folder.glob("*.message"):
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for read in (*(kind.from_bytes for kind in kinds), read_event, parcel_of, from_bytes):
            try:
                read(data)
            except OndeviceError as error:
                str(error).encode()


def build_fleet_log(folder: Path) -> None:
    from ondevice.fleet.log import log_bytes
    from ondevice.fleet.messages import HASH_BYTES, Group, Outcome
    from ondevice.fleet.numbers import Numbers
    from tests.fleet.fleets import charter

    head = charter()
    event = Outcome(
        head.id, 0, bytes(HASH_BYTES), bytes(HASH_BYTES), (Group(0, Numbers((1, 2), -30)),)
    )
    (folder / "fleet.fleetlog").write_bytes(log_bytes(head, [event.to_bytes()]))


def read_fleet_log(folder: Path) -> None:
    from ondevice.core.errors import OndeviceError
    from ondevice.fleet.log import replay
    from ondevice.fleet.store import read_file

    log = read_file(folder / "fleet.fleetlog")
    try:
        replay(log)
    except OndeviceError as error:  # the example's hashes are made up
        str(error).encode()


def build_charter(folder: Path) -> None:
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.fleet.averaging.rules import Averaging
    from tests.fleet.fleets import charter

    (folder / "charter.json").write_bytes(charter().to_bytes())
    common = {
        name: getattr(charter(), name)
        for name in ("model_source", "model_sha256", "method", "data", "seed")
    }
    first_order = AdapterCharter(**common, learning_rate=0.1, local_steps=2, averaging=Averaging())
    (folder / "adapters.json").write_bytes(first_order.to_bytes())


def read_charter(folder: Path) -> None:
    from ondevice.core.errors import OndeviceError
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.fleet.charter import Charter

    for kind, name in ((Charter, "charter.json"), (AdapterCharter, "adapters.json")):
        path = folder / name
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        try:
            _ = kind.from_bytes(data).id
        except OndeviceError as error:
            str(error).encode()


def build_seat(folder: Path) -> None:
    seat = {
        "data": "rows.jsonl",
        "host": "127.0.0.1",
        "port": 9092,
        "insecure": True,
        "columns": {"text": "t"},
    }
    (folder / "fleets").mkdir()
    (folder / "fleets" / "mine.json").write_text(json.dumps(seat))


def read_seat(folder: Path) -> None:
    from ondevice.core.config import StrictConfig
    from ondevice.core.errors import ConfigError
    from ondevice.core.untrusted import read_object
    from ondevice.server.fleets import Seat

    kind: type[StrictConfig] = Seat
    try:
        kind.parse(read_object(folder / "fleets" / "mine.json", ConfigError), "a seat")
    except FileNotFoundError:
        pass  # there is no seat


CONFIG = (json_document,)
TENSORS = (tensor_header,)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("adapter", build_adapter, read_adapter,
             {"adapter/adapter_config.json": CONFIG, "adapter/adapter_model.safetensors": TENSORS}),
        Kind("mlx adapter", build_mlx_adapter, read_adapter,
             {"adapter/adapter_config.json": CONFIG, "adapter/adapters.safetensors": TENSORS}),
        Kind("manifest", build_artifact, read_artifact, {"manifest.json": CONFIG}),
        Kind("artifact's files", build_artifact, read_artifact,
             {"first.safetensors": TENSORS, "weights.safetensors": TENSORS, "program.json": CONFIG}, hash_again),
        Kind("checkpoint meta", build_checkpoints, read_checkpoints, {"checkpoint-00000002/meta.json": CONFIG}),
        Kind("checkpoint state", build_checkpoints, read_checkpoints,
             {"checkpoint-00000002/state.safetensors": TENSORS}, state_hash),
        Kind("events", build_log, read_events, {"events.jsonl": (json_lines, text_lines)}),
        Kind("run file", build_run_file, read_run_file, {"run.yaml": (yaml_document, text_lines)}),
        Kind("template", build_template, read_template, {"task.yaml": (yaml_document,), "rows.jsonl": (json_lines,)}),
        Kind("device file", build_devices, read_devices, {"devices.yaml": (yaml_document,)}),
        Kind("config.json", build_model, read_config, {"model/config.json": CONFIG}),
        Kind("model weights", build_model, read_weights, {"model/model.safetensors": TENSORS}),
        Kind("tokenizer", build_model, read_tokenizer,
             {"model/tokenizer.json": CONFIG, "model/tokenizer_config.json": CONFIG}),
        Kind("weights index", build_sharded, read_index, {"model/model.safetensors.index.json": CONFIG}),
        Kind("cache record", build_record, read_record, {"ondevice-model.json": CONFIG}),
        Kind("gguf", build_gguf, read_gguf, {"tiny.gguf": ()}),
        Kind("gguf adapter", build_gguf_adapter, read_gguf_adapter, {"tiny.gguf": ()}),
        Kind("jsonl", write_lines("rows.jsonl", ROWS), read_data("rows.jsonl"),
             {"rows.jsonl": (json_lines, text_lines)}),
        Kind("chats", write_lines("rows.jsonl", CHATS), read_data("rows.jsonl"), {"rows.jsonl": (json_lines,)}),
        Kind("json", build_json, read_data("rows.json"), {"rows.json": (json_document, text_lines)}),
        Kind("csv", build_csv, read_data("rows.csv"), {"rows.csv": (text_lines,)}),
        Kind("txt", build_text, read_data("rows.txt"), {"rows.txt": (text_lines,)}),
        Kind("xlsx", build_xlsx, read_data("rows.xlsx"), {"rows.xlsx": (xlsx_member,)}),
        Kind("parquet", build_parquet, read_data("rows.parquet"), {"rows.parquet": ()}),
        Kind("arrow", build_arrow(stream=False, compression=None), read_data("rows.arrow"), {"rows.arrow": ()}),
        Kind("arrow stream", build_arrow(stream=True, compression=None), read_data("rows.arrow"), {"rows.arrow": ()}),
        Kind("arrow lz4", build_arrow(stream=False, compression="lz4"), read_data("rows.arrow"), {"rows.arrow": ()}),
        Kind("saved data set", build_saved, read_data("rows"), {"rows/dataset_dict.json": CONFIG}),
        Kind("zip upload", build_zip, read_zip, {"upload.zip": (zip_entries,)}),
        Kind("fleet messages", build_messages, read_messages,
             {f"{name}.message": () for name in
              ("Task", "Answer", "Outcome", "Refresh", "parcel", "frozen", "arrays")}),
        Kind("fleet log", build_fleet_log, read_fleet_log, {"fleet.fleetlog": ()}),
        Kind("charter", build_charter, read_charter, {"charter.json": CONFIG, "adapters.json": CONFIG}),
        Kind("seat", build_seat, read_seat, {"fleets/mine.json": CONFIG}),
    )
}  # fmt: skip
