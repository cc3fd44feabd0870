"""Each choice that a run makes for itself is made once, though the machine measures another thing at every start."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import ondevice
from ondevice.api import train as training
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.torch import SlideformerSession
from ondevice.planning import precision
from ondevice.training.events import FILE_NAME, read_log, read_start
from tests.api.flipped import flip
from tests.cli.command import classes


def run(data: Path, out: Path, steps: int, resume: bool = False, **more: Any) -> Any:
    settings = {
        "model.source": "tiny:llama",
        "model.device": "cpu",
        "data.path": str(data),
        "train.out": str(out),
    }
    return ondevice.train(
        {**settings, "train.steps": steps, "train.batch_size": 2, **more}, resume=resume
    )


@pytest.fixture
def unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose measurements flip between calls; monkeypatch puts them back."""
    monkeypatch.setattr(precision, "has_bfloat16_units", precision.has_bfloat16_units)
    monkeypatch.setattr(SlideformerConfig, "fixed", SlideformerConfig.fixed)
    flip(1)


@pytest.mark.parametrize("method", ["slideformer", "lsp"])
def test_a_resumed_run_computes_in_the_precision_of_its_first_start(
    method, unstable, tmp_path
) -> None:
    data = classes(tmp_path / "rows.jsonl")
    options = {"method.name": method}
    first = read_decided(run, data, tmp_path / "run", 2, **options)
    for steps in (3, 4, 5):
        run(data, tmp_path / "run", steps, resume=True, **options)
        assert read_start(tmp_path / "run" / FILE_NAME).decided == first
    events = [entry.event.kind for entry in read_log(tmp_path / "run" / FILE_NAME).entries]
    assert events.count("step") == 5 and events.count("resume") == 3
    # The same steps without a stop, in the same precision, have the same losses.
    run(data, tmp_path / "straight", 5, **options, **{"method.compute": first["method.compute"]})
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_a_resumed_run_keeps_its_placement(unstable, tmp_path, monkeypatch) -> None:
    windows: list[int] = []
    opened = SlideformerSession.__init__

    def note(self, loaded, config, *rest):
        windows.append((config.window, config.gradient_buffers))
        opened(self, loaded, config, *rest)

    monkeypatch.setattr(SlideformerSession, "__init__", note)
    data = classes(tmp_path / "rows.jsonl")
    for steps in (1, 2, 3, 4):
        run(data, tmp_path / "run", steps, resume=steps > 1, **{"method.name": "slideformer"})
    assert len(windows) == 4 and len(set(windows)) == 1
    decided = read_start(tmp_path / "run" / FILE_NAME).decided
    assert (decided["placement.window"], decided["placement.gradient_buffers"]) == windows[0]


def test_a_placement_that_no_longer_fits_is_decided_again(tmp_path, monkeypatch, caplog) -> None:
    data = classes(tmp_path / "rows.jsonl")
    run(data, tmp_path / "run", 1, **{"method.name": "slideformer"})
    plan_run, fits = training.plan_run, iter((False, True))

    def smaller(*arguments):  # the memory that was free at the first start is not free now
        plan = plan_run(*arguments)
        return plan if next(fits) else replace(plan, usable_bytes=1)

    monkeypatch.setattr(training, "plan_run", smaller)
    result = run(data, tmp_path / "run", 2, resume=True, **{"method.name": "slideformer"})
    assert result.result.steps == 2 and "no longer fits" in caplog.text


def test_a_resumed_run_keeps_its_length_and_its_method(tmp_path, monkeypatch) -> None:
    from ondevice.training import length

    data, lengths = classes(tmp_path / "rows.jsonl"), count(32)
    measure = length.length_of

    def other(*arguments, **options):
        found = measure(*arguments, **options)
        return replace(found, tokens=next(lengths))

    monkeypatch.setattr(length, "length_of", other)
    first = read_decided(run, data, tmp_path / "run", 2, **{"train.schedule": "constant"})
    assert first["data.max_length_tokens"] == 32 and first["method.name"] == "mesp"
    monkeypatch.setattr(
        "ondevice.models.choice.choose_method", lambda *_: ("lora", "method lora: another choice")
    )
    result = run(data, tmp_path / "run", 3, resume=True, **{"train.schedule": "constant"})
    assert result.result.steps == 3


def test_what_the_user_names_is_never_replaced(tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    run(data, tmp_path / "run", 1)
    with pytest.raises(ondevice.OndeviceError) as caught:
        run(data, tmp_path / "run", 2, resume=True, **{"data.max_length_tokens": 99})
    assert "data.max_length_tokens = 99" in caught.value.expected


def read_decided(
    start: Any, data: Path, out: Path, *arguments: Any, **options: Any
) -> dict[str, Any]:
    start(data, out, *arguments, **options)
    head = read_start(out / FILE_NAME)
    assert head is not None
    return head.decided


def losses(out: Path) -> list[float]:
    return [
        entry.event.loss
        for entry in read_log(out / FILE_NAME).entries
        if entry.event.kind == "step"
    ]
