"""The program of `--to executorch` follows its record: labels with the model's own numbers, and chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.api.predict import predict
from ondevice.api.trained_chat import TrainedChat
from ondevice.core.errors import ConfigError
from ondevice.exits import convert
from tests.exits.conftest import Case
from tests.exits.test_task import CLASSES, with_task

ROWS = [{"text": text} for text in ("one", "another row", "the third", "ü🙂")]


def test_labels_of_a_program_are_those_of_the_model(cases: dict[str, Case], tmp_path: Path) -> None:
    pytest.importorskip("executorch.exir")
    case = cases["llama"]
    task = CLASSES.model_copy(update={"labels": {"a": "yes", "b": "no, never"}, "prompt": ""})
    adapter = with_task(case, tmp_path / "adapter", task)
    out = tmp_path / "program"
    convert(adapter, "executorch", out, model=str(case.model), dtype="float32")
    wanted = predict(adapter, ROWS, model=str(case.model))
    found = predict(out, ROWS)
    assert found.labels == wanted.labels == ("yes", "no, never")
    assert found.texts == wanted.texts
    for one, other in zip(found, wanted, strict=True):
        assert one.probability == pytest.approx(other.probability, abs=1e-4)
    chat = TrainedChat(str(out))
    (reply,) = chat.stream([{"role": "user", "content": "one"}])
    assert reply == f"{wanted[0].prediction} ({wanted[0].probability:.4f})"
    with pytest.raises(ConfigError):
        predict(out, ROWS, adapter=adapter)
