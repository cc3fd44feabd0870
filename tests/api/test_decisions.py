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
from ondevice.api import resolve
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.torch import SlideformerSession
from ondevice.training import choices
from ondevice.training.choices import place
from ondevice.training.events import FILE_NAME, read_log, read_start
from ondevice.training.identity import with_decisions
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
    monkeypatch.setattr(choices, "has_bfloat16_units", choices.has_bfloat16_units)
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
    plan_run, fits = resolve.plan_run, iter((False, True))

    def smaller(*arguments):  # the memory that was free at the first start is not free now
        plan = plan_run(*arguments)
        return plan if next(fits) else replace(plan, usable_bytes=1)

    monkeypatch.setattr(resolve, "plan_run", smaller)
    result = run(data, tmp_path / "run", 2, resume=True, **{"method.name": "slideformer"})
    assert result.result.steps == 2 and "no longer fits" in caplog.text


def test_a_resumed_run_keeps_its_length_and_its_method(tmp_path, monkeypatch) -> None:
    from ondevice.training import rows

    data, lengths = classes(tmp_path / "rows.jsonl"), count(32)
    measure = rows.length_of

    def other(*arguments, **options):
        found = measure(*arguments, **options)
        return replace(found, tokens=next(lengths))

    monkeypatch.setattr(rows, "length_of", other)
    first = read_decided(run, data, tmp_path / "run", 2, **{"train.schedule": "constant"})
    assert first["data.max_length_tokens"] == 32 and first["method.name"] == "mesp"
    monkeypatch.setattr(
        "ondevice.models.choice.choose_method", lambda *_: ("lora", "method lora: another choice")
    )
    result = run(data, tmp_path / "run", 3, resume=True, **{"train.schedule": "constant"})
    assert result.result.steps == 3


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of each session that is opened, on a machine that gets and loses Triton."""
    from ondevice.methods.mesp.torch import model

    asked: list[str] = []
    choose = model.choose

    def note(name: str, device: str) -> Any:
        asked.append(name)
        return choose("torch", device)

    monkeypatch.setattr(model, "choose", note)
    return asked


def test_a_resumed_run_keeps_its_kernels(kernels, tmp_path, monkeypatch) -> None:
    data = classes(tmp_path / "rows.jsonl")
    for steps in (1, 2, 3):
        monkeypatch.setattr(choices, "has_triton", lambda device, now=steps > 1: now)
        run(data, tmp_path / "run", steps, resume=steps > 1)
    assert kernels == ["torch"] * 3
    assert read_start(tmp_path / "run" / FILE_NAME).decided["placement.kernels"] == "torch"


def test_kernels_that_are_gone_are_chosen_again_and_said(
    kernels, tmp_path, monkeypatch, caplog
) -> None:
    data = classes(tmp_path / "rows.jsonl")
    monkeypatch.setattr(choices, "has_triton", lambda device: True)
    run(data, tmp_path / "run", 1)
    monkeypatch.setattr(choices, "has_triton", lambda device: False)
    run(data, tmp_path / "run", 2, resume=True)
    assert kernels == ["triton", "torch"]
    assert "which cannot be used here" in caplog.text


def test_a_resumed_run_computes_with_as_many_threads(tmp_path, monkeypatch) -> None:
    import torch

    for name in choices.NAMED_THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(choices, "cores", lambda: 4)
    data, before = classes(tmp_path / "rows.jsonl"), torch.get_num_threads()
    try:
        for steps, threads in ((1, 2), (2, 3), (3, 1)):
            torch.set_num_threads(threads)
            run(data, tmp_path / "run", steps, resume=steps > 1)
            assert torch.get_num_threads() == threads, "the caller's number is put back"
    finally:
        torch.set_num_threads(before)
    resumed = [
        entry.event.changed
        for entry in read_log(tmp_path / "run" / FILE_NAME).entries
        if entry.event.kind == "resume"
    ]
    assert len(resumed) == 2
    assert not any("environment.threads" in changed for changed in resumed)


def test_threads_that_the_user_names_or_that_have_no_cores_stay(tmp_path, monkeypatch) -> None:
    import torch

    config = ondevice.RunConfig.load(None, {"model.source": "tiny:llama"})
    placement = place(config.method, config.train, "auto")
    before = torch.get_num_threads()
    monkeypatch.setattr(choices, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with choices.threads(placement, {"threads": before + 1}) as taken:
        assert taken == {"threads": before}
    for name in choices.NAMED_THREADS:
        monkeypatch.delenv(name, raising=False)
    with choices.threads(placement, {"threads": 5}) as taken:
        assert taken == {"threads": before}


def test_a_run_that_began_on_the_processor_stays_there(tmp_path, monkeypatch) -> None:
    import torch

    data = classes(tmp_path / "rows.jsonl")
    first = read_decided(run, data, tmp_path / "run", 1, **{"model.device": "auto"})
    assert (first["model.device"], first["train.backend"]) == ("cpu", "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ondevice.RunConfig.load(None, {"model.source": "tiny:llama"})
    resumed = with_decisions(config, choices.usable(first, config))
    for run_file, device in ((config, "cuda"), (resumed, "cpu")):
        sections = run_file.method, run_file.train, run_file.model.device
        assert place(*sections).device == device


def test_a_run_whose_gpu_is_gone_goes_on_and_says_so(caplog) -> None:
    config = ondevice.RunConfig.load(None, {"model.source": "tiny:llama"})
    kept = choices.usable({"model.device": "cuda", "train.backend": "torch"}, config)
    assert kept == {"train.backend": "torch"}
    assert "this run began with model.device cuda" in caplog.text


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
