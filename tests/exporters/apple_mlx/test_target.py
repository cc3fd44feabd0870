"""apple-mlx: the exported functions do what Python's stages do, in Python and in C++; what is
foreign is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from ondevice.api import export as artifacts  # noqa: E402
from ondevice.api.open import open_artifact  # noqa: E402
from ondevice.api.runfile import RunConfig  # noqa: E402
from ondevice.api.verify import verify  # noqa: E402
from ondevice.artifact.adapter import load_adapter  # noqa: E402
from ondevice.artifact.manifest import read_manifest  # noqa: E402
from ondevice.core.errors import ArtifactError, ConfigError, ModelError, VerificationError  # noqa: E402
from ondevice.core.registry import (  # noqa: E402
    method_config,
    open_session,
    target,
)
from ondevice.core.session import MOMENTS  # noqa: E402
from ondevice.exporters.apple_mlx import retarget  # noqa: E402
from ondevice.exporters.apple_mlx.target import AppleMlx  # noqa: E402
from ondevice.methods.mesp.mlx.program import MlxProgramSession  # noqa: E402
from ondevice.methods.mesp.mlx.stages import Stages  # noqa: E402
from ondevice.models import open_model, save_tiny  # noqa: E402

HOST = Path(__file__).resolve().parents[3] / "exporters/apple_mlx/host"
LENGTHS = (16, 24)
LEFT = {"forward": ({"x"}, {"x", "k", "v"}), "backward": ({"g"}, {"g", "g.k", "g.v"})}
"""What a block's lists may leave: the second, if blocks share keys and values."""
KINDS = {
    "qwen2 in 4 bits": ("qwen2", {"tied": False, "layers": 3}, {"bits": 4, "rank": 4}),
    "llama": ("llama", {}, {"rank": 3, "target_modules": ["q_proj", "o_proj", "down_proj"],
                            "optimizer": "sgd", "loss_chunk_tokens": 7}),
    "gemma3_text": ("gemma3_text", {"layers": 3}, {"rank": 2}),
    "gemma4_text": ("gemma4_text", {"layers": 4}, {"rank": 2}),
    "gemma4_text with experts": ("gemma4_text", {"layers": 4, "enable_moe_block": True}, {"rank": 2}),
    "lfm2": ("lfm2", {"layers": 3}, {"rank": 2}),
    "phi3 in 4 bits": ("phi3", {}, {"rank": 2, "bits": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Any:
    """Folder of each kind's model."""
    place = tmp_path_factory.mktemp("mlx_models")
    return {
        name: save_tiny(place / str(i), family, **sizes)
        for i, (name, (family, sizes, _)) in enumerate(KINDS.items())
    }


def run_config(folder: Path, values: dict[str, Any], **more: Any) -> RunConfig:
    settings = {f"method.{name}": value for name, value in values.items()}
    export = {"target": "apple-mlx", "lengths_tokens": list(LENGTHS), "batch_size": 2, **more}
    settings |= {f"export.{name}": value for name, value in export.items()}
    return RunConfig.load(
        None, {"model.source": str(folder), "method.name": "mesp", **settings, "train.seed": 3}
    )


@pytest.fixture(scope="module", params=list(KINDS))
def artifact(request, model, tmp_path_factory) -> Any:
    """An artifact, and the Python session that it is held against."""
    values = KINDS[request.param][2]
    out = tmp_path_factory.mktemp("mlx") / "artifact"
    report = artifacts.export(run_config(model[request.param], values), out)
    assert report.check["ok"] and report.warnings == (retarget.CAVEAT,)
    return out, lambda: open_session(
        open_model(str(model[request.param])), method_config("mesp", values), 3, backend="mlx"
    )


def batches(count: int = 5) -> list[tuple[np.ndarray, np.ndarray]]:
    random, collected = np.random.default_rng(0), []
    for step in range(count):
        ids = random.integers(0, 256, (2, LENGTHS[step % 2]))
        labels = ids.copy()
        labels[:, :3], labels[1, -4 - step :] = -100, -100
        collected.append((ids, labels))
    return collected


def adapters_equal(one: Any, other: Any) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        one.tensors[name].tobytes() == other.tensors[name].tobytes() for name in one.tensors
    )


def test_exported_functions_compute_what_the_python_stages_compute(artifact, monkeypatch) -> None:
    folder, reference = artifact
    expected, session = reference(), open_artifact(folder)
    assert isinstance(session, MlxProgramSession) and session.lengths_tokens == LENGTHS
    wanted = [expected.step(*batch, step, 1e-2) for step, batch in enumerate(batches())]
    evaluated = expected.evaluate(*batches()[1])

    def python(*_: Any) -> Any:
        raise AssertionError("a stage of Python's was called")

    monkeypatch.setattr(Stages, "call", python)
    for step, batch in enumerate(batches()):
        assert session.step(*batch, step, 1e-2).loss == pytest.approx(wanted[step].loss, rel=1e-6)
    np.testing.assert_allclose(session.evaluate(*batches()[1])[0], evaluated[0], rtol=1e-6)
    ours, theirs = session.adapter().tensors, expected.adapter().tensors
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=name)


def test_streamed_weights_match_resident_weights_bit_for_bit_also_after_a_resume(artifact) -> None:
    folder, _ = artifact
    whole, streamed = opened(folder), opened(folder, streamed=True)
    assert streamed.model.weights.table.file and not whole.model.weights.table.file
    for step, batch in enumerate(batches(4)):
        assert whole.step(*batch, step, 1e-2) == streamed.step(*batch, step, 1e-2)
        if step == 1:
            state = streamed.state()
            streamed = opened(folder, streamed=True)
            streamed.load_state(state)
    assert adapters_equal(whole.adapter(), streamed.adapter())


def test_the_manifest_lists_all_inputs_and_outputs_and_every_array_is_freed(artifact) -> None:
    folder, _ = artifact
    manifest, program = read_manifest(folder), json.loads((folder / "program.json").read_text())
    assert manifest.runtime == f"mlx {mx.__version__}" and manifest.caveats == (retarget.CAVEAT,)
    stages = {name.split("#")[0] for name in manifest.program_spec.methods}
    assert (
        stages
        == program["functions"].keys()
        == {path.stem for path in (folder / "functions").iterdir()}
    )
    for stage in stages:  # each trace of a stage has a name, as each length has one of its own
        names = {name for name in manifest.program_spec.methods if name.split("#")[0] == stage}
        assert names in ({stage}, {f"{stage}#{number}" for number in range(len(names))})
    lengths = [
        next(one.shape[1] for one in manifest.program_spec.methods[name].inputs if one.name == "x")
        for name in ("final_norm#0", "final_norm#1")
    ]
    assert sorted(lengths) == list(LENGTHS)
    for length in LENGTHS:
        bucket = program["lengths"][str(length)]
        lists = [(name, one[name]) for one in (bucket, *bucket["others"]) for name in LEFT]
        for name, listed in lists:
            held = {"x"} if name == "forward" else {"x", "g"}
            for call in listed:
                if "update" in call:
                    held -= {f"{call['update']}.dA", f"{call['update']}.dB"}
                    continue
                entry = program["functions"][call["function"]]
                assert {output for output, _ in call["outputs"]} <= set(entry["outputs"])
                held |= {place for _, place in call["outputs"]}
                held -= set(call["free"])
            allowed = LEFT[name] if program["key_layers"] else LEFT[name][:1]
            assert held in allowed, "something is never freed"
    spec, first = manifest.program_spec, load_adapter(folder / "adapter").tensors
    trained = {tensor.name: tensor.shape for tensor in spec.state if tensor.role == "adapter"}
    assert trained == {name: value.shape for name, value in first.items()}
    places = {tensor.first for tensor in spec.state if tensor.role == "adapter"}
    assert all((folder / str(place)).is_file() for place in places) and len(places) == 1
    updates = [counter.name for counter in spec.counters]
    moments = {tensor.name for tensor in spec.state if tensor.role == "optimizer"}
    adamw = manifest.method["optimizer"] == "adamw"
    assert moments == {
        f"{key}/{name}" for name in trained for key in MOMENTS if adamw
    } and updates == ["optimizer_step"]
    text = (folder / "README.md").read_text()
    assert (
        "`functions/`: one `.mlxfn` a stage for the CPU" in text
        and "`functions-gpu/`: for Metal" in text
    )


def test_an_export_on_a_gpu_has_functions_only_for_the_gpu(model, tmp_path, monkeypatch) -> None:
    """All that is chosen by the device is as on a Mac; the operations are still the CPU's, so that
    they run here."""
    gpu = mx.Device(mx.DeviceType.gpu)
    monkeypatch.setattr(mx, "default_device", lambda: gpu)
    out = tmp_path / "artifact"
    report = artifacts.export(run_config(model["llama"], KINDS["llama"][2]), out)
    assert report.check["ok"] and report.warnings == ()
    assert not (out / "functions").exists()
    assert (
        report.program_bytes
        == sum(path.stat().st_size for path in (out / "functions-gpu").iterdir())
        > 0
    )
    text = (out / "README.md").read_text()
    assert "`functions-gpu/`: one `.mlxfn` a stage for Metal" in text and "`functions/`" not in text
    assert read_manifest(out).caveats == ()
    assert open_artifact(out).backend == "mlx-gpu"
    monkeypatch.undo()
    with pytest.raises(ArtifactError) as raised:
        open_artifact(out)
    assert raised.value.expected == "functions"


@pytest.mark.sampled(every=5)
def test_verify_accepts_the_exported_model_and_refuses_another(artifact, model) -> None:
    folder, _ = artifact
    result = verify(folder, steps=3)
    assert result["ok"] and result["backend"] == "mlx-cpu" and result["steps"] == 3
    source = read_manifest(folder).model.source
    other = next(str(path) for path in model.values() if str(path) != source)
    with pytest.raises(ArtifactError) as raised:
        verify(folder, steps=1, model=other)
    assert raised.value.expected == read_manifest(folder).model.sha256


@pytest.mark.sampled(every=5)
def test_a_batch_of_another_shape_is_refused(artifact) -> None:
    session = open_artifact(artifact[0])
    for shape in ((1, 16), (2, 17)):
        ids = np.zeros(shape, dtype=np.int64)
        with pytest.raises(ArtifactError) as raised:
            session.step(ids, ids, 0, 1e-2)
        assert raised.value.received == "{} rows of {} tokens".format(*shape)


def opened(folder: Path, manifest: Any = None, streamed: bool | None = None) -> Any:
    """A session of an artifact whose files are not looked at again where its manifest is given."""
    exporter = AppleMlx(target("apple-mlx"))
    return exporter.open(folder, manifest or read_manifest(folder), streamed)


def damaged(folder: Path, to: Path, name: str, change: Any) -> MlxProgramSession:
    """A session of a copy in which one file is changed; its manifest is not looked at again."""
    shutil.copytree(folder, to)
    manifest = read_manifest(to)
    (to / name).write_bytes(change((to / name).read_bytes()))
    with pytest.raises(ArtifactError):
        read_manifest(to)
    return opened(to, manifest)


@pytest.mark.sampled(every=5)
def test_a_function_of_another_version_of_mlx_is_refused(artifact, tmp_path) -> None:
    def older(data: bytes) -> bytes:
        version = mx.__version__.encode()
        assert (
            data[:8] == len(version).to_bytes(8, "little") and data[8 : 8 + len(version)] == version
        )
        return (6).to_bytes(8, "little") + b"0.25.1" + data[8 + len(version) :]

    with pytest.raises(ArtifactError) as raised:
        damaged(artifact[0], tmp_path / "copy", "functions/project.mlxfn", older)
    assert raised.value.received == "0.25.1" and "project.mlxfn" in raised.value.message


@pytest.mark.sampled(every=5)
def test_a_damaged_function_and_truncated_weights_are_named(artifact, tmp_path) -> None:
    with pytest.raises(ArtifactError) as raised:
        damaged(artifact[0], tmp_path / "one", "functions/project.mlxfn", lambda data: data[:-40])
    assert "project.mlxfn" in raised.value.message
    with pytest.raises(ModelError) as truncated:
        damaged(
            artifact[0],
            tmp_path / "two",
            "weights/block-00001.safetensors",
            lambda data: data[:-10],
        )
    assert "block-00001.safetensors is truncated" in truncated.value.message


def test_an_export_whose_check_fails_is_not_written(model, tmp_path, monkeypatch) -> None:
    from ondevice.exporters.apple_mlx import functions as runtime

    honest = runtime.ImportedFunctions.call

    def wrong(self: Any, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        actual = honest(self, stage, arrays)
        return (
            {name: value * 1.01 for name, value in actual.items()}
            if stage == "project_backward"
            else actual
        )

    monkeypatch.setattr(runtime.ImportedFunctions, "call", wrong)
    with pytest.raises(VerificationError):
        artifacts.export(
            run_config(model["llama"], {"rank": 2, "optimizer": "sgd", "learning_rate": 0.1}),
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_listed(model) -> None:
    values = {"micro_batch_size": 1}
    config = run_config(
        model["llama"], values, quantize="q4", form="stateful", lengths_tokens=[1024]
    )
    problems = target("apple-mlx").check(artifacts.export_jobs(config)[0])
    for word in ("micro_batch_size", "method.bits=4", "functional", "1024"):
        assert any(word in problem for problem in problems), word
    other = RunConfig.load(
        None,
        {"model.source": str(model["llama"]), "method.name": "lora", "export.target": "apple-mlx"},
    )
    with pytest.raises(ConfigError) as raised:
        artifacts.export(other, Path("nowhere"))
    assert "method lora does not export to apple-mlx" in raised.value.message


@pytest.mark.sampled(every=5)
def test_a_file_for_metal_differs_only_in_its_devices(artifact) -> None:
    folder = artifact[0]
    for path in (folder / "functions").iterdir():
        before, after = path.read_bytes(), (folder / "functions-gpu" / path.name).read_bytes()
        tags = retarget.tags(before)
        assert len(before) == len(after) and [(place, name) for place, _, _, name in tags] == [
            (place, name) for place, _, _, name in retarget.tags(after)
        ]
        assert {kind for _, _, kind, _ in tags} <= {retarget.CPU}
        assert {(stream, kind) for _, stream, kind, _ in retarget.tags(after)} <= {
            (-1, retarget.GPU)
        }
        rest = bytearray(after)
        for place, stream, kind, _ in tags:
            rest[place : place + 8] = stream.to_bytes(4, "little", signed=True) + kind.to_bytes(
                4, "little"
            )
        assert bytes(rest) == before
    with pytest.raises(VerificationError):
        retarget.retarget((folder / "functions-gpu/project.mlxfn").read_bytes())


def test_every_operation_of_a_file_is_tagged(tmp_path) -> None:
    """The scan finds what MLX says that the function holds: no operation is left on the old device."""
    kinds: list[str] = []

    def note(actual: dict[str, Any]) -> None:
        if actual["type"] == "primitive":
            kinds.append(actual["name"])

    def f(x: Any, y: Any) -> Any:
        return (
            mx.softmax(x @ y, axis=-1, precise=True) + mx.fast.rms_norm(x, y[0], 1e-6)[:, :3].sum()
        )

    x, y = mx.ones((4, 3)), mx.ones((3, 3))
    mx.export_function(note, f, x, y)
    mx.export_function(str(tmp_path / "f.mlxfn"), f, x, y)
    assert len(kinds) > 5 and len(retarget.tags((tmp_path / "f.mlxfn").read_bytes())) == len(kinds)


def test_the_number_of_an_array_is_not_read_as_an_operation() -> None:
    """Two inputs, of which the first has the number 0x6D50, behind the flags of a file: as MLX
    writes them."""
    numbers = b"\0\0\0\0" + struct.pack("<iiQ", 0, 0, 2) + struct.pack("<QQ", 0x6D50, 0x6D51)
    named = b"\0\0\0\0" + struct.pack("<iiQ", 0, 0, 3) + b"Add"
    assert retarget.tags(numbers) == []
    assert retarget.tags(numbers + named) == [(len(numbers), 0, 0, "Add")]


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Path:
    """The C++ host, built with CMake against the installed MLX."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here")
    place = tmp_path_factory.mktemp("host")
    where = Path(mx.__file__).parent / "share/cmake/MLX"
    if not where.is_dir():
        pytest.skip("this MLX was installed without its headers")
    json_headers = importlib.util.find_spec("nlohmann_json")
    if json_headers is None or not json_headers.submodule_search_locations:
        pytest.skip("nlohmann-json is not installed")
    headers = Path(json_headers.submodule_search_locations[0]) / "include"
    environment = os.environ | {
        "CMAKE_BUILD_PARALLEL_LEVEL": "1",
        "CMAKE_INCLUDE_PATH": str(headers),
    }
    # The headers are most of the work: they are read once for the library, and nothing is written
    # for a debugger.
    soonest = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DCMAKE_UNITY_BUILD=ON")
    for command in (
        ["cmake", "-S", HOST, "-B", place, f"-DMLX_DIR={where}", *soonest],
        ["cmake", "--build", place],
    ):
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return place / "ondevice-mlx-host"


def in_cpp(
    host: Path, folder: Path, place: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    from safetensors.numpy import save_file

    given = [batch for batch in batches(6) if batch[0].shape[1] == LENGTHS[0]]
    save_file(
        {"ids": np.stack([ids for ids, _ in given]), "labels": np.stack([y for _, y in given])},
        place / "batches",
    )
    words = [
        host,
        folder,
        place / "batches",
        place / "adapter",
        "--learning-rate",
        "0.01",
        "--one-task",
        *options,
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    return subprocess.run(
        [*map(str, words)], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("options", [(), ("--stream",)])
def test_the_cpp_host_trains_to_the_same_bits(host, artifact, tmp_path, options) -> None:
    folder, _ = artifact
    done = in_cpp(host, folder, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    session = open_artifact(folder)
    given = [batch for batch in batches(6) if batch[0].shape[1] == LENGTHS[0]]
    losses = [session.step(*batch, step, 1e-2).loss for step, batch in enumerate(given)]
    np.testing.assert_allclose([line["loss"] for line in lines[:-1]], losses, rtol=1e-7)
    nll, count = session.evaluate(*given[-1])
    assert lines[-1]["evaluation"] == pytest.approx(nll.sum() / count.sum(), rel=1e-6)
    assert adapters_equal(load_adapter(tmp_path / "adapter"), session.adapter())
    linked = subprocess.run(["ldd", str(host)], capture_output=True, text=True, check=False).stdout
    assert "libmlx" in linked and "libpython" not in linked


@pytest.mark.slow
@pytest.mark.sampled(every=5)
def test_the_cpp_host_names_what_is_wrong(host, artifact, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artifact[0], copy)
    block = copy / "weights/block-00001.safetensors"
    whole = block.read_bytes()
    block.write_bytes(whole[:-10])
    done = in_cpp(host, copy, tmp_path)
    assert (
        done.returncode == 1
        and "block-00001.safetensors is truncated" in done.stderr
        and not done.stdout
    )
    block.write_bytes(whole)
    program = json.loads((copy / "program.json").read_text())
    (copy / "program.json").write_text(json.dumps(program | {"mlx_version": "0.25.1"}))
    done = in_cpp(host, copy, tmp_path)
    assert (
        done.returncode == 1 and "another version of MLX" in done.stderr and "0.25.1" in done.stderr
    )
    (copy / "program.json").write_text(json.dumps(program)[:-200])
    done = in_cpp(host, copy, tmp_path)
    assert done.returncode == 1 and "column" in done.stderr
    assert not (tmp_path / "adapter").exists()
