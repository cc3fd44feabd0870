"""Programs for a Qualcomm NPU, compiled by QNN and run in its simulator, against float32 eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api import export as artifacts
from ondevice.api.open import open_artifact
from ondevice.api.runfile import RunConfig
from ondevice.api.verify import verify
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig
from ondevice.core.errors import ConfigError, MissingPackageError, VerificationError
from ondevice.core.registry import target as find_target
from ondevice.exporters.android_npu import qnn
from ondevice.exporters.android_npu.target import TOLERANCE, AndroidNpu
from ondevice.exporters.base import beyond, random_batches
from ondevice.exporters.executorch.rewrite import FusedRMSNorm, SigmoidGelu, rewritten
from ondevice.methods.prge import npu
from ondevice.methods.prge.program import build_program
from ondevice.methods.prge.rounding import update_limit
from ondevice.models import load_model, save_tiny
from ondevice.runtime_ops import generator
from tests.program_tables import NPU
from tests.programs import config, marks, needs_qnn, program, report

pytest.importorskip("executorch.exir")
EVERY = [
    pytest.param(name, marks=[*marks(name), *([pytest.mark.slow] if name != "npu" else [])])
    for name in NPU
]
STOCK = {"aten", "dim_order_ops"}
LOSS = {"npu w8": 1e-2, "npu subspace": 5e-3}
"""Largest relative error of a loss where it is not 2e-3. Over two answers there is no sum of
hundreds of logits, where float16's roundings cancel."""


@pytest.fixture
def qnn_extra() -> None:
    needs_qnn()


def smallest(**more: Any) -> RunConfig:
    """The program "npu" with one block, one adapter and one query: what is compiled soonest."""
    least = {"method.queries": 1, "method.target_modules": ["down_proj"], "export.batch_size": 1}
    return config("npu", **{"model.source": config("npu unrolled").model.source, **least, **more})


def eager(name: str):
    """The float32 program in eager PyTorch."""
    settings = config(name)
    return build_program(
        load_model(settings.model.source), settings.method, ExportConfig(), settings.train.seed
    )


@pytest.mark.usefixtures("qnn_extra")
@pytest.mark.parametrize("name", EVERY)
def test_projected_gradients_in_the_simulator_are_those_of_float32(name) -> None:
    result = verify(program(name), directions=12)
    assert result["ok"] and json.dumps(result) and result["backend"] == "qnn-htp-simulator"
    assert result["directions"] == 12 and result["soc"] == config(name).export.soc[0]
    assert result["sign_agreement"] >= 11 / 12 and result["correlation"] > (
        0.9 if name == "npu w8" else 0.99
    )
    assert 0 < result["loss_error"] < LOSS.get(name, 2e-3)
    assert result["update_error"] <= 1  # see `update_limit`
    if name == "npu subspace":  # Adam's: no product of gradients, which may be large
        assert result["adapter_error"] <= 1e-6


@pytest.mark.parametrize("size", [0.0, 1e-2, 1.0, 1e3])
def test_an_update_may_err_by_what_float32_rounds_and_no_more(size) -> None:
    reference, random = eager("npu"), np.random.default_rng(0)
    count, (seed, step) = reference.layout.size, (torch.tensor([4]), torch.tensor([3]))
    adapter = torch.from_numpy(random.normal(0, 0.05, count).astype(np.float32))
    gradients = torch.from_numpy(size * random.normal(size=2).astype(np.float32))
    scalars = (seed, step, torch.tensor([0.05]))
    z = generator.normal(4, 3, 0, 2, 0, count).astype(np.float64)
    change = 0.025 * (gradients.numpy()[:, None] * z).sum(0)
    limit = update_limit(reference, adapter, gradients, *scalars).numpy()
    updated = reference.apply_update(adapter, gradients, *scalars).numpy()
    assert (np.abs(updated - (adapter.numpy() - change)) <= limit).all() and (limit > 0).all()
    if size:
        assert (np.abs(1e-4 * change) > limit).any()


@pytest.mark.usefixtures("qnn_extra")
@pytest.mark.parametrize("name", EVERY)
def test_evaluation_is_the_adapter_itself_on_as_many_rows_as_there_are_copies(name) -> None:
    session, reference = open_artifact(program(name)), eager(name)
    assert session.eval_batch_size == reference.config.copies * session.batch_size
    random = np.random.default_rng(0)
    flat = random.normal(0, 0.05, session.manifest.program_spec.adapter_size).astype(np.float32)
    session.load_state({**session.state(), "adapter": flat})
    ids = random.integers(0, 256, (session.eval_batch_size, session.lengths_tokens[0]))
    labels = np.where(random.random(ids.shape) < 0.5, ids, -100)
    if name == "npu subspace":
        labels = np.where(
            (labels != -100) & (np.arange(ids.shape[1]) == ids.shape[1] - 1), 70, -100
        )
    labels[0] = -100  # a row that only fills
    nll, tokens = session.evaluate(ids, labels)
    with torch.inference_mode(), reference.bound((torch.from_numpy(flat),)):
        expected, counts = reference.evaluate(*map(torch.from_numpy, (ids, labels, flat)))
    np.testing.assert_array_equal(tokens, counts.numpy())
    np.testing.assert_allclose(
        nll, expected.numpy(), rtol=2e-2 if name == "npu w8" else LOSS.get(name, 2e-3)
    )
    np.testing.assert_array_equal(session.flat(), flat)
    assert session.evaluate(ids, labels)[0].tolist() == nll.tolist()
    session.close()


@pytest.mark.usefixtures("qnn_extra")
def test_the_manifest_says_what_runs_where() -> None:
    manifest = read_manifest(program("npu"))
    assert (
        manifest.soc == "SM8650" and manifest.target == "android-npu" and manifest.custom_ops == ()
    )
    assert manifest.program_spec.methods.keys() == {"train_step", "apply_update"}
    step, update = (
        {share.backend: share for share in manifest.partition[name]}
        for name in ("train_step", "apply_update")
    )
    assert (
        step["QnnBackend"].calls == 1
        and step["QnnBackend"].operators > 50
        and step["QnnBackend"].bytes > 10_000
    )
    assert step["XnnpackBackend"].operators > 10 and step["portable"].operators > 10
    assert "QnnBackend" not in update
    kernels = {
        op.split("::")[0] for method in manifest.program_spec.methods.values() for op in method.ops
    }
    assert kernels <= STOCK
    ports = manifest.program_spec.methods["train_step"]
    assert [port.name for port in ports.inputs][-1] == "perturbation_scale"
    assert (
        ports.inputs[0].shape == (8, 16)
        and manifest.batch_size == 2
        and manifest.eval_batch_size == 8
    )
    text = (program("npu") / "README.md").read_text()
    assert "perturbation_scale" in text and "SM8650" in text and "repeat" in text
    assert report("npu").partition == manifest.partition


@pytest.mark.parametrize("name", [name for name in NPU if "method.factors" not in NPU[name][1]])
def test_the_graph_that_is_compiled_has_float32_s_numbers_before_it_is_compiled(name) -> None:
    """Blocks in QNN's forms of norm and GELU, with constants for rotation and mask, and the step
    around them: what the simulator adds is float16."""
    settings, reference, scale = config(name), eager(name), 1e-2
    built = npu.build(
        load_model(settings.model.source), settings.method, settings.export, settings.train.seed
    )
    assert built.blocks is not None and built.finish is not None
    step = built.finish(built.blocks[0])[0].module
    generated = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 200, (settings.export.batch_size, *settings.export.lengths_tokens),
                        generator=generated)  # fmt: skip
    adapter = 0.05 * torch.randn(reference.layout.size, generator=generated)
    scalars = (torch.tensor([4]), torch.tensor([3]), torch.tensor([0.05]))
    rows = ids.repeat(reference.config.copies, 1)
    with torch.inference_mode():
        with rewritten(built.loaded.model, FusedRMSNorm, GELUTanh=SigmoidGelu):
            losses, gradients, updated, nll, tokens = step(
                rows, rows, adapter, *scalars, torch.tensor([scale])
            )
        copies_of = reference.perturbed(adapter, *scalars[:2], scale)
        expected = reference.losses(ids, ids, copies_of)
    torch.testing.assert_close(losses, expected, rtol=2e-5, atol=0)
    wanted = reference.projected_gradients(expected, scale)
    torch.testing.assert_close(gradients, wanted, rtol=1e-2, atol=5e-3)
    assert torch.equal(updated, reference.apply_update(adapter, gradients, *scalars))
    assert tokens.tolist() == [ids.shape[1] - 1] * len(rows)
    assert nll.sum() == pytest.approx(float(expected.sum() * tokens[0] * len(ids)), rel=1e-5)


@pytest.mark.usefixtures("qnn_extra")
def test_a_wrong_program_is_not_ok(monkeypatch) -> None:
    session, settings = open_artifact(program("npu")), config("npu")
    other = npu.build(
        load_model(settings.model.source), settings.method, settings.export, settings.train.seed
    )
    with torch.no_grad():
        other.loaded.family.head_weight.mul_(3.0)
    session.constants[npu.SCALE] = 1e-2
    result = npu.compare(session, other, random_batches(session, 200, 4), 1e-3)
    assert any("loss error" in expected for expected, _ in beyond(result, TOLERANCE["none"]))
    from ondevice.exporters.android_npu.session import NpuSession

    step = NpuSession.step

    def skewed(self, *arguments):
        answer = step(self, *arguments)
        self._state["adapter"] = self._state["adapter"] + np.float32(1e-5)
        return answer

    monkeypatch.setattr(NpuSession, "step", skewed)
    # What an export does before it is renamed into place; tests of other targets look at the folder.
    exporter, (job,) = AndroidNpu(find_target("android-npu")), artifacts.export_jobs(settings)
    with pytest.raises(VerificationError):
        exporter.check_program(session, exporter.program(job.method), other, job)
    session.close()
    broken = verify(program("npu"), directions=4)
    assert not broken["ok"] and any("update error" in line for line in broken["broken"])


@pytest.mark.usefixtures("qnn_extra")
def test_no_variable_is_needed_and_nothing_is_printed(tmp_path: Path) -> None:
    """A process of its own, with no library path, and a cache whose name is hard."""
    code = (
        "from pathlib import Path\nimport numpy as np, sys\nfrom ondevice.api.open import open_artifact\n"
        "session = open_artifact(Path(sys.argv[1]))\nids = np.ones((2, 16), dtype=np.int64)\n"
        "result = session.step(ids, ids, 0, 1e-3)\nsession.close()\n"
        # QNN brings a C++ runtime of its own; an extension that is loaded after it must keep the
        # system's.
        "import matplotlib.pyplot\nprint(len(result.losses))\n"
    )
    cache = tmp_path / "çache with spaces"
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("LD_LIBRARY_PATH", "QNN_SDK_ROOT")
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(program("npu"))],
        capture_output=True,
        text=True,
        env=clean | {"ONDEVICE_CACHE": str(cache)},
        timeout=250,
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert "Qnn" not in done.stderr and "cpuinfo" not in done.stderr


@pytest.mark.usefixtures("qnn_extra")
def test_loading_the_compiler_changes_nothing_of_pytorch() -> None:
    """ExecuTorch's package turns oneDNN off when it is imported, and with it the bits of every
    later run."""
    code = (
        "import torch\nfrom ondevice.exporters.android_npu import qnn\nbefore = torch.backends.mkldnn.enabled\n"
        "qnn.load_compiler()\nprint(before, torch.backends.mkldnn.enabled)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.usefixtures("qnn_extra")
def test_the_sdk_s_folder_is_made_once_and_repaired(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "ç"))
    root = qnn.sdk_root()
    link = root / "lib" / qnn.HOST
    assert (link / "libQnnHtp.so").is_file() and qnn.sdk_root() == root
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    assert (qnn.sdk_root() / "lib" / qnn.HOST / "libQnnHtp.so").is_file()
    assert [entry.name for entry in link.parent.iterdir()] == [qnn.HOST]


@pytest.mark.usefixtures("qnn_extra")
def test_every_reason_is_listed_at_once(tmp_path) -> None:
    wrong = config(
        "npu",
        **{
            "export.soc": ["SM8650", "SM1"],
            "export.lengths_tokens": [16, 24],
            "export.form": "stateful",
            "export.quantize": "q4",
        },
    )
    jobs = artifacts.export_jobs(wrong)
    assert [job.export.soc for job in jobs] == [("SM8650",), ("SM1",)]
    problems = " ".join(find_target("android-npu").check(jobs[1]))
    for word in (
        "soc SM1 is not known",
        "one length",
        "use functional",
        "expected none or w8",
        "generator",
    ):
        assert word in problems, word
    with pytest.raises(ConfigError) as error:
        artifacts.export_each(wrong, tmp_path / "never")
    assert "SM1" in str(error.value)
    with pytest.raises(ConfigError) as error:
        artifacts.export(config("npu", **{"export.soc": ["SM8650", "SM8550"]}), tmp_path / "never")
    assert "chips" in str(error.value)


@pytest.mark.usefixtures("qnn_extra")
def test_widths_that_qnn_computes_wrongly_are_refused() -> None:
    narrow = config("npu", **{"model.source": config("functional").model.source})
    (problem,) = find_target("android-npu").check(artifacts.export_jobs(narrow)[0])
    assert "64 inputs" in problem and "q_proj" in problem and "down_proj" not in problem


@pytest.mark.usefixtures("qnn_extra")
def test_narrow_norms_are_refused(tmp_path) -> None:
    """Over 32 numbers QNN's norm gave losses that eager PyTorch does not."""
    folder = save_tiny(tmp_path / "m", "qwen3", hidden=64, heads=2, kv_heads=1, head_dim=32)
    (job,) = artifacts.export_jobs(config("npu qwen3", **{"model.source": str(folder)}))
    problems = find_target("android-npu").check(job)
    assert any("norms of 64 numbers or more: heads have 32" in problem for problem in problems)


def test_all_chips_are_those_with_float16() -> None:
    every = artifacts.export_jobs(config("npu", **{"export.soc": ["all"]}))
    socs = [job.export.soc[0] for job in every]
    assert (
        socs[0] == "SM8450"
        and "SM8850" in socs
        and "SM8350" not in socs
        and len(set(socs)) == len(socs) >= 6
    )


@pytest.mark.usefixtures("qnn_extra")
def test_several_chips_give_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled here; `npu unrolled` is for a chip other than the first."""
    exported: list[Any] = []
    kind = type(find_target("android-npu"))
    monkeypatch.setattr(
        kind, "export", lambda self, job, out: exported.append((job.export.soc, out))
    )
    chips = ("SM8450", "SM8850")
    artifacts.export_each(smallest(**{"export.soc": list(chips)}), tmp_path / "out")
    assert exported == [((chip,), tmp_path / "out" / chip) for chip in chips]


def test_without_the_extra_one_command_and_the_licence_are_named(monkeypatch) -> None:
    def absent(name: str) -> str:
        from importlib.metadata import PackageNotFoundError, version

        if name == qnn.PACKAGE:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(qnn, "version", absent)
    monkeypatch.setattr(qnn.platform, "system", lambda: "Linux")
    monkeypatch.setattr(qnn.platform, "machine", lambda: "x86_64")
    (problem,) = find_target("android-npu").check(artifacts.export_jobs(config("npu"))[0])
    assert "pip install 'ondevice-train[qnn]'" in problem and "Qualcomm AI Stack License" in problem
    with pytest.raises(MissingPackageError) as error:
        qnn.package_folder()
    assert "qnn" in str(error.value)
    monkeypatch.setattr(qnn, "version", lambda name: "2.7.0")
    assert "2.7.0" in str(qnn.problem()) and "2.5.0" in str(qnn.problem())
    monkeypatch.setattr(qnn.platform, "machine", lambda: "arm64")
    assert "x86-64" in str(qnn.problem())


def test_arguments_of_the_other_kind_of_program_are_refused() -> None:
    with pytest.raises(ConfigError):
        verify(program("functional"), directions=8)
    needs_qnn()
    with pytest.raises(ConfigError):
        verify(program("npu"), steps=3)


def test_the_npu_has_a_perturbation_scale_of_its_own_unless_one_is_set() -> None:
    scales = [
        artifacts.export_jobs(settings)[0].method.perturbation_scale
        for settings in (
            config("npu"),
            config("npu", **{"method.perturbation_scale": 0.01}),
            config("functional"),
        )
    ]
    assert scales == [3e-2, 1e-2, 1e-2]
