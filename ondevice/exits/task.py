"""What an exit carries of the training: the record of its task, its end tokens, a README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import ArtifactError
from ondevice.core.untrusted import Refused, parse_json
from ondevice.data.tasks.trained import (
    TASK_NAME,
    TrainedTask,
    parse_trained_task,
    read_trained_task,
    to_text,
)
from ondevice.gguf.metadata import Metadata
from ondevice.gguf.read import open_gguf
from ondevice.training.usage import README_NAME, Kind, readme

GGUF_KEY = "ondevice.task"
"""Key of a GGUF file that holds the text of `ondevice_task.json`."""
PLAIN = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"
"""The chat template of what was trained without one: the prompt as it is written."""
_KINDS: dict[str, Kind] = {
    "gguf": "gguf",
    "ollama": "gguf",
    "peft": "adapter",
    "safetensors": "model",
    "vllm": "adapter",
}


def write_texts(folder: Path, form: str, task: TrainedTask | None) -> None:
    """Write the record and a README into a form's folder; nothing if the adapter has no record."""
    if task is None:
        return
    atomic_write(folder / TASK_NAME, to_text(task))
    atomic_write(folder / README_NAME, readme(task, _KINDS.get(form, "other")))


def is_plain(task: TrainedTask | None) -> bool:
    """Return True if the training framed its prompts without a chat template."""
    return task is not None and task.framing != "chat template"


def read_task(path: Path) -> TrainedTask | None:
    """Read the record of a folder or of a GGUF file; None if it has none.

    Raises:
        ArtifactError: the record is damaged or of a newer version.
        ModelError: the GGUF file is damaged.
    """
    if path.suffix != ".gguf":
        return read_trained_task(path)
    text: Any = Metadata(open_gguf(path), path).optional(GGUF_KEY)
    if text is None:
        return None
    name = f"{path}: metadata '{GGUF_KEY}'"
    try:
        values = parse_json(text)
        if not isinstance(values, dict):
            raise Refused("not an object")
    except Refused as error:
        raise ArtifactError(name, expected="a task's record", received=str(error)) from None
    return parse_trained_task(values, name)
