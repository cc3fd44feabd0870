"""The record of a trained task in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.core.errors import ArtifactError
from ondevice.core.untrusted import Refused, parse_json
from ondevice.data.tasks.trained import TrainedTask, parse_trained_task, read_trained_task
from ondevice.gguf.metadata import Metadata
from ondevice.gguf.read import open_gguf

GGUF_KEY = "ondevice.task"
"""Key of a GGUF file that holds the text of `ondevice_task.json`."""


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
