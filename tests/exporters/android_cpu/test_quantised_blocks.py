"""Block programs over rounded weights: what an export says of them, what a plan leaves out, and
what is refused."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api import export as artifacts
from ondevice.api.open import open_artifact
from ondevice.api.verify import verify
from ondevice.artifact.manifest import read_manifest
from ondevice.artifact.weights import WEIGHTS_NAME, MappedWeights
from ondevice.core.config import ExportConfig
from ondevice.core.errors import ArtifactError, VerificationError
from ondevice.core.program import LayerConstants
from ondevice.core.registry import method_config, target
from ondevice.exporters.executorch.blocks import BlocksSession
from ondevice.methods.mesp.block_functions import LINEAR_FORMS, BlockFunctions
from ondevice.methods.mesp.program import EXECUTORCH
from ondevice.models import load_model
from ondevice.models.load import tiny_model
from ondevice.models.tiny import save_tiny
from tests.methods.reference import batch
from tests.programs import config, model, parameters, program, report

pytest.importorskip("executorch.exir")
INTEGERS = "blocks, 8da8w"
FOUR_BITS = "blocks, 8da4w"


GEMMA = {"layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 32, "global_head_dim": 48}
OF_GEMMA = ["blocks of gemma4_text, q4", "blocks of gemma4_text, 8da8w"]


@pytest.mark.parametrize(
    "name",
    parameters(["blocks, int8", "blocks, q4", "blocks, q4dq", INTEGERS, FOUR_BITS, *OF_GEMMA]),
)
def test_an_export_says_how_near_its_gradients_are(name) -> None:
    check = report(name).check
    for suffix in ("", "_float32"):
        least, median = (check[f"{kind}_gradient_cosine{suffix}"] for kind in ("min", "median"))
        assert 0 < least <= median <= 1 + 1e-9 and check[f"gradient_cosine{suffix}"] <= 1 + 1e-9
    exact = check["gradient_cosine"] > 1 - 1e-8
    assert exact == ("8da" not in name)
    assert check["gradient_cosine_float32"] < 1 - 1e-7, "rounding does not show"


@pytest.mark.parametrize("name", [INTEGERS, FOUR_BITS])
def test_products_of_integers_are_near_and_verify_says_so(name) -> None:
    result = verify(program(name), steps=3)
    assert result["ok"] and 0.99 < result["min_gradient_cosine"] < 1 - 1e-6
    assert 1e-4 < result["max_rel_gradient_error"] < 0.2


def test_products_of_integers_are_those_of_eager_over_the_same_rounding() -> None:
    """A block's functions in eager with the layer's integers in the place of the markers, ops and
    all.

    The gradient is large, because eager's op takes no scale below 1.2e-7, as XNNPACK does.
    """
    settings = config(INTEGERS)
    session = BlocksSession(program(INTEGERS), read_manifest(program(INTEGERS)), stock=True)
    built = EXECUTORCH.build(
        load_model(str(model("two layers"))), settings.method, settings.export, 4
    )
    constants: Any = built.constants_of_layers
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32))
    for name in ("block_forward_2x16", "block_backward_2x16"):
        module: Any = next(one.module for one in built.modules if one.name == name)
        given = {"hidden": x, "gradient": 1e3 * x.flip(0), "counter optimizer_step": torch.zeros(1, dtype=torch.int64),
                 "learning_rate": torch.ones(1)}  # fmt: skip
        for layer in range(2):
            for key, parameter in module.names.items():
                if key in constants.layers[layer]:
                    module.get_parameter(parameter).data = torch.from_numpy(
                        constants.layers[layer][key]
                    )
            ours = list(session._call_block(name, given, layer).values())
            inputs = []
            for port in session.spec.methods[name].inputs:
                if port.role == "frozen":
                    inputs.append(session._frozen_tensors[port.name.format(layer=layer)])
                elif port.role == "state":
                    inputs.append(torch.from_numpy(session._range(port.name, layer)))
                else:
                    inputs.append(
                        given[
                            "counter optimizer_step" if port.role == "counter" else str(port.role)
                        ]
                    )
            with torch.no_grad():
                theirs = module(*inputs)
            for mine, wanted in zip(
                ours, theirs if isinstance(theirs, tuple) else (theirs,), strict=True
            ):
                # A number between two integers may be rounded to the other one.
                assert float((mine - wanted).norm() / wanted.norm()) < 2e-3, name


def test_each_layer_s_program_is_one_with_other_weights(tmp_path) -> None:
    from ondevice.exporters.executorch.layers import write_layers

    spec = read_manifest(program(INTEGERS)).program_spec
    assert {method.program for key, method in spec.methods.items() if key.startswith("block_")} == {
        "layers/{layer}.pte"
    }
    first, second = ((program(INTEGERS) / f"layers/{layer}.pte").read_bytes() for layer in range(2))
    assert len(first) == len(second) and first != second
    weights = MappedWeights(program(INTEGERS) / WEIGHTS_NAME)
    for key in (key for key in weights if ".layers." in key):
        # What the functions in this project's ops read: one orientation, not both.
        assert weights.whole(key).dtype != np.int8 or key.endswith("_proj.weight")
    marker = np.arange(64, dtype=np.int8)
    for content in (b"no marker", marker.tobytes() * 2):
        with pytest.raises(VerificationError) as error:
            write_layers(tmp_path, [content], (), LayerConstants([{"w": marker}], [{"w": marker}]))
        assert error.value.expected == "its bytes once"


def test_functions_of_a_kind_hold_matrices_of_its_own_shapes() -> None:
    """Layers of Gemma 4 differ in heads and MLP, and some compute no keys."""
    loaded = tiny_model("gemma4_text", **GEMMA)
    export = ExportConfig.parse({"lengths_tokens": [16], "quantize": "8da8w"}, "test")
    built = EXECUTORCH.build(loaded, method_config("mesp", {"rank": 2}), export, 0)
    constants: Any = built.constants_of_layers
    assert len(set(built.kinds)) == len(constants.markers) > 1
    for layer, (kind, held) in enumerate(zip(built.kinds, constants.layers, strict=True)):
        shapes = {name: value.shape for name, value in held.items()}
        assert shapes == {name: one.shape for name, one in constants.markers[kind].items()}
        for one in loaded.dims.block_linears(layer).values():
            name = f"{loaded.family.weight_path('{layer}', one.target)}.weight"
            assert shapes.pop(name) == (one.outputs, one.inputs)
            assert shapes.pop(f"{name}_transposed") == (one.inputs, one.outputs)
        assert not shapes
    # What projects the embedding to a layer's input is in the file: no function of one layer reads it.
    assert built.weights["model.per_layer_model_projection.weight.0"].dtype == np.int8


def test_a_layer_s_program_that_is_damaged_is_named(tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(program(INTEGERS), folder)
    path = folder / "layers" / "1.pte"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ArtifactError) as error:
        open_artifact(folder)
    assert "1.pte" in error.value.message
    session = BlocksSession(folder, read_manifest(folder, check_files=False), stock=True)
    before = session.state()["adapter"]
    with pytest.raises(ArtifactError) as error:
        session.step(*batch(2, 16), 0, 1e-2)
    assert "1.pte" in str(error.value)
    assert session.state()["adapter"].tobytes() == before.tobytes()  # it failed in the forward pass


@pytest.mark.parametrize("quantize", ["none", "int8", "q4", "q4dq"])
def test_inputs_are_not_planned_and_one_packed_matrix_is_dense_at_a_time(quantize) -> None:
    from ondevice.exporters.executorch.lower import lower_portable

    sizes: dict[str, Any] = {
        "layers": 1,
        "hidden": 128,
        "heads": 4,
        "kv_heads": 4,
        "intermediate": 512,
    }
    loaded, method = tiny_model("llama", **sizes), method_config("mesp", {"rank": 2})
    export = ExportConfig.parse(
        {"lengths_tokens": [8], "quantize": quantize, "eval_batch_size": 1}, "test"
    )
    modules = [
        one
        for one in EXECUTORCH.build(loaded, method, export, 0).modules
        if one.name == "block_forward_1x8"
    ]
    layer, largest = 4 * (4 * 128 * 128 + 3 * 128 * 512), 4 * 128 * 512
    outside = lower_portable(modules).planned_bytes["block_forward_1x8"]
    dense = 0 if quantize == "none" else largest
    assert outside < dense + layer // 8, "a layer's weights are planned"


@pytest.mark.parametrize("quantize", [name for name in LINEAR_FORMS if name != "none"])
def test_rounded_weights_are_near_and_equal_rows_are_no_trouble(quantize) -> None:
    loaded = tiny_model("llama", layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    loaded.model.get_parameter(name).data[0] = 0.25  # a range of zero
    loaded.model.get_parameter(name).data[1] = 0.0
    before = loaded.model.get_parameter(name).detach().clone()
    BlockFunctions(loaded, method_config("mesp", {}), quantize).weights()
    after, steps = loaded.model.get_parameter(name), 15 if "4" in quantize else 127
    assert float((after - before).abs().max()) <= 1.05 * float(before.abs().max()) / steps
    assert torch.isfinite(after).all() and torch.allclose(after[:2], before[:2], rtol=1e-3)


def test_what_rounds_too_much_is_not_written(monkeypatch) -> None:
    """The program is good, and it is another model's."""
    from ondevice.exporters.android_cpu import target as android

    session, settings = open_artifact(program("blocks, q4")), config("blocks, q4")
    monkeypatch.setattr(android, "LEAST_COSINE_FLOAT32", 1.0)
    (job,) = artifacts.export_jobs(settings)
    loaded = load_model(settings.model.source)
    built = EXECUTORCH.build(loaded, settings.method, settings.export, settings.train.seed)
    with pytest.raises(VerificationError) as caught:
        android.AndroidCpu(target("android-cpu")).check_program(session, EXECUTORCH, built, job)
    assert "cosine" in str(caught.value) and "int8" in str(caught.value.hint)


def test_the_file_of_integers_with_four_bits_is_that_of_q4() -> None:
    """One copy of a matrix serves both orientations, in this project's ops and in stock kernels."""
    folder = program(FOUR_BITS)
    assert not (folder / "layers").exists()
    files = [(path / WEIGHTS_NAME) for path in (folder, program("blocks, q4"))]
    assert files[0].read_bytes() == files[1].read_bytes()
    methods = read_manifest(folder).program_spec.methods
    for name in ("block_forward_2x16", "block_backward_2x16"):
        ours, stock = (
            [port for port in methods[one].inputs if port.role == "frozen"]
            for one in (f"fused_{name}", name)
        )
        assert ours == stock and any(port.dtype == "uint8" for port in ours)


def test_a_weight_has_four_and_a_half_bits_with_scales_in_8() -> None:
    """And 32 for each row."""
    functions = BlockFunctions(tiny_model("llama", layers=1), method_config("mesp", {}), "q4dq")
    weights = functions.weights()
    for one in functions.dims.block_linears(0).values():
        name = functions.loaded.family.linear_name(0, one.target) + ".weight"
        parts = [weights[f"{name}{part}"] for part in ("", "_scale", "_min", "_top")]
        ports = {port.name.format(layer=0): port for port in functions.frozen(0)}
        for part, value in zip(("", "_scale", "_min", "_top"), parts):
            port = ports[f"{name}{part}"]
            assert (port.shape, port.dtype) == (value.shape, str(value.dtype))
        assert 8 * sum(part.nbytes for part in parts) == one.outputs * (4.5 * one.inputs + 32)


def test_four_bits_without_this_projects_ops_are_refused_by_name(monkeypatch) -> None:
    from ondevice.methods.mesp import program as mesp

    def found(name: str, **settings: str) -> str:
        (job,) = artifacts.export_jobs(config(name, **settings))
        return "; ".join(target("android-cpu").check(job))

    four = {"export.quantize": "8da4w"}
    assert "export.kernels is stock" in found("blocks, q4", **four, **{"export.kernels": "stock"})
    assert "blocks of qwen2_moe" in found("blocks of qwen2_moe, q4", **four)
    assert "8da4w" not in found("blocks, q4", **four)
    monkeypatch.setattr(mesp, "has_compiler", lambda: False)
    assert "no C++ compiler" in found("blocks, q4", **four)


def test_widths_of_every_layer_are_groups_of_rounded_weights(tmp_path) -> None:
    """Layers of Gemma 4 have heads of two widths, and a branch behind the MLP."""
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 24, "global_head_dim": 48}
    for name, own, expected in (
        ("heads", sizes, "heads 48"),
        ("inputs", {**sizes, "head_dim": 32, "hidden_size_per_layer_input": 24}, "layer_input 24"),
    ):
        folder = save_tiny(tmp_path / name, "gemma4_text", **own)
        settings = config("blocks of gemma4_text, q4", **{"model.source": str(folder)})
        (problem,) = target("android-cpu").check(artifacts.export_jobs(settings)[0])
        assert "multiples of 32" in problem and expected in problem


def test_forms_that_a_program_does_not_have_are_named() -> None:
    for name, settings in (
        ("blocks", {"export.quantize": "w8"}),
        ("functional", {"export.quantize": "8da8w"}),
    ):
        problems = target("android-cpu").check(artifacts.export_jobs(config(name, **settings))[0])
        assert any(
            f"export.quantize is {settings['export.quantize']}" in problem for problem in problems
        ), problems
