"""What an exit carries of the training: the record of its task, its end tokens, a README."""

from __future__ import annotations

from pathlib import Path

from ondevice.artifact.files import atomic_write
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


def is_plain(task: TrainedTask | None) -> bool:
    """Return True if the training framed its prompts without a chat template."""
    return task is not None and task.framing != "chat template"
