"""Targets jetson and cuda-server: what they write, what they refuse, and that nothing wrong is
written."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.errors import ArtifactError, ConfigError, VerificationError
from ondevice.core.registry import method_config
from ondevice.core.registry import target as find_target
from ondevice.exporters.base import ExportJob
from ondevice.exporters.cuda import pins
from ondevice.exporters.cuda import target as checking
from ondevice.exporters.cuda.session import TorchProgramSession
from ondevice.models import save_tiny

TARGETS = {
    "jetson": ("requirements-jetpack6.txt", "requirements-jetpack7.txt"),
    "cuda-server": ("requirements.txt",),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("source") / "model", "llama"))


def job(
    source: str, target: str = "jetson", method: str = "prge", values: Any = None, **more: Any
) -> ExportJob:
    export = {
        "lengths_tokens": (12, 16),
        "batch_size": 2,
        "check_steps": 2,
        "quantize": "nf4",
        "target": target,
    }
    outer = {key: more.pop(key) for key in ("memory_limit_bytes", "overwrite") if key in more}
    model = ModelConfig(source=source, **({"dtype": more.pop("dtype")} if "dtype" in more else {}))
    settings = values or (
        {"queries": 2, "rank": 4} if method == "prge" else {"rank": 4} if method != "mezo" else {}
    )
    return ExportJob(
        model, method_config(method, settings), ExportConfig.parse({**export, **more}), 3, **outer
    )


def run(source: str, out: Path, **more: Any) -> Any:
    given = job(source, **more)
    return find_target(given.export.target).export(given, out)


@pytest.mark.parametrize("target", TARGETS)
def test_everything_that_a_board_needs_is_written(source, tmp_path, target) -> None:
    report = run(source, tmp_path / "a", target=target)
    manifest = read_manifest(tmp_path / "a")  # checks every file's hash
    expected = {
        "README.md",
        "program.json",
        "run.sh",
        "model/config.json",
        "model/model.safetensors",
        *TARGETS[target],
    }
    assert expected <= manifest.files.keys() and any(
        name.startswith("tokenizer/") for name in manifest.files
    )
    assert (
        manifest.runtime.startswith("torch ")
        and manifest.target == target
        and manifest.quantize == "nf4"
    )
    assert sorted(manifest.program_spec.methods) == ["train_step", "train_step_12"]
    assert [port.shape for port in manifest.program_spec.methods["train_step"].inputs] == [
        (2, 16),
        (2, 16),
    ]
    assert (
        manifest.check == report.check
        and report.check["ok"]
        and report.check["max_rel_loss_error"] == 0
    )
    program = json.loads((tmp_path / "a" / "program.json").read_text())
    assert program["dtype"] == "bfloat16" and program["method"]["name"] == "prge"
    assert program["weights_sha256"] == manifest.files["model/model.safetensors"]
    assert bool(manifest.caveats) == (target == "jetson")
    text = (tmp_path / "a" / "README.md").read_text()
    assert all(name in text for name in TARGETS[target]) and f"doctor --target {target}" in text
    assert manifest.program_spec.adapter_size == exported_size(tmp_path / "a")


def exported_size(folder: Path) -> int:
    adapter = TorchProgramSession(folder, read_manifest(folder)).adapter()
    return sum(value.size for name, value in adapter.tensors.items() if ".lora_B." in name)


def test_4_bits_are_a_seventh_of_float32(source, tmp_path) -> None:
    sizes = {}
    for quantize in ("none", "int8", "nf4"):
        run(source, tmp_path / quantize, quantize=quantize, dtype="float32")
        session = TorchProgramSession(tmp_path / quantize, read_manifest(tmp_path / quantize))
        linear: Any = session.loaded.family.linear(0, "up_proj")
        tensors = {"weight": linear.weight} if quantize == "none" else linear.matrix.tensors()
        sizes[quantize] = sum(
            t.nbytes for name, t in tensors.items() if "map" not in name and "state" not in name
        )
    assert 3.5 < sizes["none"] / sizes["int8"] < 4 and 7 < sizes["none"] / sizes["nf4"] < 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "mezo"}, "method mezo does not export to jetson"),
        ({"quantize": "q4"}, "quantize q4 is for phones"),
        (
            {"form": "stateful", "loss": "op"},
            "form stateful is for ExecuTorch programs.*|.*loss op",
        ),
        ({"method": "mesp", "values": {"bits": 4}}, "use --quantize nf4"),
        (
            {"method": "mesp", "values": {"weight_placement": "streamed"}},
            "the artifact holds the weights",
        ),
        ({"lengths_tokens": (8, 100000)}, "exceeds the model's"),
        ({"values": {"top_layers": 9}}, "top_layers is 9"),
    ],
)
def test_what_cannot_be_exported_is_said_before_weights_are_loaded(
    source, monkeypatch, changes, words
) -> None:
    from ondevice.exporters.cuda import target

    monkeypatch.setattr(
        target, "load_text_model", lambda *a, **k: pytest.fail("weights were loaded")
    )
    given = job(source, **changes)
    problems = find_target("jetson").check(given)
    assert re.search(words, " ".join(problems)), problems
    with pytest.raises(ConfigError):
        find_target("jetson").export(given, Path("/nowhere/a"))


def test_other_families_and_missing_models_are_problems(tmp_path) -> None:
    gpt2 = str(save_tiny(tmp_path / "gpt2", "gpt2"))
    assert "gpt2 has no layers that this target packs" in find_target("jetson").check(job(gpt2))[0]
    assert (
        "/no/such/model"
        in find_target("cuda-server").check(job("/no/such/model", "cuda-server"))[0]
    )


def test_a_phone_s_target_refuses_nf4(source) -> None:
    assert "nf4" in " ".join(find_target("android-cpu").check(job(source, "android-cpu")))


@pytest.mark.parametrize("wrong", ["other noise", "other weights"])
def test_an_artifact_that_does_something_else_is_not_written(
    source, tmp_path, monkeypatch, wrong
) -> None:
    opened = TorchProgramSession._open

    def broken(self: Any) -> Any:
        if wrong == "other noise":
            self.config = self.config.model_copy(update={"noise": "rademacher"})
        else:
            self.loaded.family.linear(1, "down_proj").matrix.weight[0] ^= 1
        return opened(self)

    monkeypatch.setattr(TorchProgramSession, "_open", broken)
    with pytest.raises(VerificationError):
        run(source, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_replaced_only_if_asked(source, tmp_path) -> None:
    run(source, tmp_path / "a")
    with pytest.raises(ArtifactError) as raised:
        run(source, tmp_path / "a", method="lora")
    assert "--overwrite" in str(raised.value.hint)
    run(source, tmp_path / "a", method="lora", overwrite=True)
    assert read_manifest(tmp_path / "a").method["name"] == "lora"


def test_losses_that_are_no_numbers_do_not_pass() -> None:
    assert not checking._relative([float("nan")], [1.0]) <= 1.0


@pytest.mark.parametrize(("limit", "given"), [(None, "6GiB"), (2 << 30, "2147483648")])
def test_the_launcher_runs_where_it_lies_and_passes_its_limit(
    source, tmp_path, limit, given
) -> None:
    run(source, tmp_path / "some where", memory_limit_bytes=limit)
    fake = tmp_path / "bin" / "ondevice"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}

    def launched(*words: str, **more: str) -> list[str]:
        command = [str(tmp_path / "some where" / "run.sh"), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment | more, check=True, cwd="/"
        )
        return done.stdout.splitlines()

    folder = str(tmp_path / "some where")
    assert launched("--data", "my rows.jsonl") == [
        "run",
        folder,
        "--memory-limit",
        given,
        "--data",
        "my rows.jsonl",
    ]
    assert launched("--memory-limit", "1GiB") == ["run", folder, "--memory-limit", "1GiB"]
    assert launched(ONDEVICE_MEMORY_LIMIT="3GiB")[2:4] == ["--memory-limit", "3GiB"]


def test_every_pin_is_a_version_that_this_project_is_tested_with(root: Path) -> None:
    locked = dict(
        re.findall(
            r"^([\w.-]+)==([\w.+]+)", (root / "requirements/dev.txt").read_text(), re.MULTILINE
        )
    )
    named = {name.lower(): version for name, version in locked.items()}
    for name, version in (
        pins.PYTHON | {"torch": pins.TORCH, "bitsandbytes": pins.BITSANDBYTES}
    ).items():
        assert named[name.lower()] == version, name


@pytest.mark.parametrize("target", TARGETS)
def test_every_line_of_a_requirements_file_is_a_pin_or_a_comment(target) -> None:
    for name, text in find_target(target).data.requirements.items():
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert lines and all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines), name
        torch = [line for line in lines if line.startswith(("torch==", "bitsandbytes=="))]
        assert len(torch) == (0 if name.endswith("jetpack6.txt") else 2)
