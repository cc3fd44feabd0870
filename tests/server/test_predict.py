"""What a job has trained answers rows: labels with probabilities, or generated text."""

from __future__ import annotations

import json
from pathlib import Path

from ondevice.data.tasks.trained import TASK_NAME, read_trained_task
from tests.server.running import refused


def test_an_adapter_keeps_its_task_in_the_store_its_download_and_an_upload(
    served, tmp_path: Path
) -> None:
    name = served.job["id"]
    task = read_trained_task(served.daemon.store / "adapters" / name)
    assert task is not None and set(task.labels.values()) == {"no", "yes"}
    served.client.download_adapter(name, tmp_path / "adapter")
    assert read_trained_task(tmp_path / "adapter") == task
    uploaded = served.client.upload("adapter", tmp_path / "adapter")["id"]
    assert read_trained_task(served.daemon.store / "adapters" / uploaded) == task
    (tmp_path / "adapter" / TASK_NAME).write_text(json.dumps({"version": 2}))
    with refused(422) as caught:
        served.client.upload("adapter", tmp_path / "adapter")
    assert TASK_NAME in caught.value.message
