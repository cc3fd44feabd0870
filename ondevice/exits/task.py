"""What an exit carries of the training: the record of its task, its end tokens, a README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write
from ondevice.data.tasks.chat_template import CLOCK
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask, to_text
from ondevice.training.usage import README_NAME, Kind, readme

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


def date_notes(task: TrainedTask | None, templates: Any) -> list[str]:
    """Return a sentence on the date that a frozen template writes; none if it writes no date."""
    if task is None or task.date is None or CLOCK not in json.dumps(templates):
        return []
    return [f"the prompt has the date of the training for ever: {task.date:%Y-%m-%d}"]


def is_plain(task: TrainedTask | None) -> bool:
    """Return True if the training framed its prompts without a chat template."""
    return task is not None and task.framing != "chat template"
