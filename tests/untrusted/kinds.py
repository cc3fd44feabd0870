"""Every kind of file that comes from outside, and the changes that are made to it knowingly."""

from __future__ import annotations

from tests.untrusted.files_of_fleets import (
    build_charter,
    build_fleet_log,
    build_messages,
    build_seat,
    build_zip,
    read_charter,
    read_fleet_log,
    read_messages,
    read_seat,
    read_zip,
)
from tests.untrusted.files_of_models import (
    build_gguf,
    build_gguf_adapter,
    build_model,
    build_record,
    build_sharded,
    read_config,
    read_gguf,
    read_gguf_adapter,
    read_index,
    read_record,
    read_tokenizer,
    read_weights,
)
from tests.untrusted.files_of_rows import (
    CHATS,
    ROWS,
    build_arrow,
    build_csv,
    build_json,
    build_parquet,
    build_saved,
    build_text,
    build_xlsx,
    read_data,
    write_lines,
    xlsx_member,
)
from tests.untrusted.files_of_runs import (
    build_adapter,
    build_artifact,
    build_checkpoints,
    build_devices,
    build_log,
    build_mlx_adapter,
    build_run_file,
    build_template,
    hash_again,
    read_adapter,
    read_artifact,
    read_checkpoints,
    read_devices,
    read_events,
    read_run_file,
    read_template,
    state_hash,
)
from tests.untrusted.mutations import (
    json_document,
    json_lines,
    tensor_header,
    text_lines,
    yaml_document,
    zip_entries,
)
from tests.untrusted.runner import Kind

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
              ("Task", "TaskReply", "Outcome", "Refresh", "parcel", "frozen", "arrays")}),
        Kind("fleet log", build_fleet_log, read_fleet_log, {"fleet.fleetlog": ()}),
        Kind("charter", build_charter, read_charter, {"charter.json": CONFIG, "adapters.json": CONFIG}),
        Kind("seat", build_seat, read_seat, {"fleets/mine.json": CONFIG}),
    )
}  # fmt: skip
