"""An export's refusals; nothing is written then."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ondevice.api import export as artifacts
from ondevice.api.verify import verify
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig
from ondevice.core.errors import ArtifactError, ConfigError, StorageError, VerificationError
from ondevice.core.registry import target
from ondevice.exporters.executorch import lower as lowering
from ondevice.exporters.executorch import target as export_target
from ondevice.exporters.executorch.session import ExecutorchSession
from ondevice.models.tiny import save_tiny
from tests.programs import config, program

pytest.importorskip("executorch.exir")


@pytest.fixture
def finished(monkeypatch) -> Path:
    """Every lowering gives the program of `functional`, whatever was authored."""
    folder = program("functional")
    manifest = read_manifest(folder)

    def lower(methods, **options) -> lowering.Lowered:
        listed = {method.name: manifest.program_spec.methods[method.name] for method in methods}
        return lowering.Lowered(
            (folder / manifest.program).read_bytes(),
            {name: method.planned_bytes for name, method in listed.items()},
            {name: list(method.ops) for name, method in listed.items()},
            {name: method.delegates for name, method in listed.items()},
            1.0,
            manifest.partition,
            {name: method.instructions for name, method in listed.items()},
        )

    monkeypatch.setattr(lowering, "lower", lower)
    return folder


def test_the_right_program_is_written(finished, tmp_path) -> None:
    report = artifacts.export(config("functional"), tmp_path / "a")
    assert (
        read_manifest(tmp_path / "a").files == read_manifest(finished).files
        and report.check["steps"] == 3
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method.perturbation_scale", 0.02),
        ("method.alpha", 32.0),
        ("method.noise", "rademacher"),
        ("train.seed", 5),
    ],
)
def test_a_program_that_is_not_what_eager_does_is_not_written(
    finished, tmp_path, key, value
) -> None:
    """The lowered program is one for other settings than those that eager PyTorch runs."""
    with pytest.raises(VerificationError):
        artifacts.export(config("functional", **{key: value}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_survives_a_failed_check(finished, tmp_path) -> None:
    artifacts.export(config("functional"), tmp_path / "a")
    before = read_manifest(tmp_path / "a")
    with pytest.raises(VerificationError):
        artifacts.export(
            config("functional", **{"method.alpha": 32.0}), tmp_path / "a", overwrite=True
        )
    assert read_manifest(tmp_path / "a") == before and [
        path.name for path in tmp_path.iterdir()
    ] == ["a"]


def test_a_folder_is_replaced_only_if_asked_and_only_if_it_is_an_artifact(
    finished, tmp_path
) -> None:
    artifacts.export(config("functional"), tmp_path / "a")
    with pytest.raises(ArtifactError):
        artifacts.export(config("functional"), tmp_path / "a")
    artifacts.export(config("functional"), tmp_path / "a", overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ArtifactError):
        artifacts.export(config("functional"), tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError):
        artifacts.export(config("functional"), tmp_path / "file", overwrite=True)


def test_a_full_disk_leaves_nothing(finished, tmp_path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # the program has 700 kB
    try:
        with pytest.raises(StorageError):
            artifacts.export(config("functional"), tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_verify_notices_another_model(tmp_path) -> None:
    other = save_tiny(
        tmp_path / "other", "llama", 1, layers=1, hidden=32, heads=2, kv_heads=1, vocab=4001
    )
    with pytest.raises(ArtifactError) as error:
        verify(program("functional"), steps=1, model=str(other))
    assert error.value.expected != error.value.received is not None


def test_verify_notices_a_program_that_is_wrong(tmp_path) -> None:
    """A manifest that claims another alpha is what a wrong program looks like."""
    shutil.copytree(program("functional"), tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    path.write_text(path.read_text().replace('"alpha": 16.0', '"alpha": 64.0'))
    result = verify(tmp_path / "a", steps=2)
    assert not result["ok"] and result["max_rel_loss_error_replayed"] > 1e-4


@pytest.mark.parametrize("first", [0, 1])
def test_verify_notices_losses_that_are_no_numbers(first, monkeypatch) -> None:
    """NaN compares as neither small nor large; it must not pass for small."""
    step = ExecutorchSession.step

    def broken(session, ids, labels, number, rate):
        result = step(session, ids, labels, number, rate)
        return (
            replace(result, losses=(float("nan"),) * len(result.losses))
            if number == first
            else result
        )

    monkeypatch.setattr(ExecutorchSession, "step", broken)
    assert verify(program("functional"), steps=2)["ok"] is False


def test_verify_notices_an_update_beyond_what_float32_rounds(monkeypatch) -> None:
    """The last update is nearly 1e-5 off, which no loss shows and a fixed limit allowed."""
    folder = program("functional")
    step = ExecutorchSession.step

    def skewed(session, ids, labels, number, rate):
        result = step(session, ids, labels, number, rate)
        if number == 1:
            session._state["adapter"] = session._state["adapter"] + np.float32(9e-6)
        return result

    monkeypatch.setattr(ExecutorchSession, "step", skewed)
    result = verify(folder, steps=2)
    assert not result["ok"] and result["update_error"] > 1
    assert result["max_rel_loss_error_replayed"] <= 1e-5 and result["max_abs_adapter_error"] <= 1e-5


def test_all_problems_are_listed_before_weights_are_loaded(monkeypatch) -> None:
    def load_model(*args: object, **options: object) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr(export_target, "load_text_model", load_model)
    settings = config(
        "q4",
        **{"method.batch_signs": False, "method.top_layers": 3, "export.lengths_tokens": [8, 1024]},
    )
    problems = target("android-cpu").check(artifacts.export_jobs(settings)[0])
    assert len(problems) == 3 and all(
        word in " ".join(problems) for word in ("batch_signs", "top_layers is 3", "1024")
    )
    baseline = config("q4").model_copy(
        update={"method": config("q4", method={"name": "mezo"}).method}
    )
    assert (
        "mezo does not export" in target("android-cpu").check(artifacts.export_jobs(baseline)[0])[0]
    )
    missing = config("q4", **{"model.source": "/no/such/model"})
    assert "/no/such/model" in target("android-cpu").check(artifacts.export_jobs(missing)[0])[-1]


def test_a_target_that_is_none_lists_the_targets() -> None:
    with pytest.raises(ConfigError) as error:
        target("iphone")
    assert error.value.received == "iphone" and "android-cpu" in error.value.expected


@pytest.mark.parametrize("value", ["torchao-int4", "int4wo", "8da2w"])
def test_a_quantisation_that_xnnpack_gets_wrong_is_not_offered(value) -> None:
    """Torchao's weight-only programs are silently wrong under XNNPACK; the error lists what is
    sound."""
    with pytest.raises(ConfigError) as caught:
        ExportConfig.parse({"quantize": value})
    assert "quantize" in caught.value.message
    assert caught.value.expected == "'none', 'int8', 'q4', 'q4dq', '8da4w', '8da8w', 'w8' or 'nf4'"


@pytest.mark.parametrize("lengths", [[], [4], [16, 16]])
def test_buckets_are_checked(lengths) -> None:
    with pytest.raises(ConfigError, match="lengths_tokens"):
        ExportConfig.parse({"lengths_tokens": lengths})
