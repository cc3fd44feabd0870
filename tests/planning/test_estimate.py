"""Plans against models that exist, and what is said when one does not fit."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from ondevice.core.capabilities import Offloads
from ondevice.core.config import ExportConfig
from ondevice.core.dims import ModelDims
from ondevice.core.errors import ConfigError
from ondevice.core.registry import method, method_config, method_names
from ondevice.data.lengths import RowSizes
from ondevice.methods.step_model import backward_bytes, forward_flops, head_flops
from ondevice.models import tiny_model
from ondevice.planning import devices, estimate, request
from ondevice.planning.devices import Device, find_device
from ondevice.planning.estimate import Plan, plan, weight_bytes
from ondevice.planning.fits import alternatives, does_not_fit, size_text
from ondevice.planning.render import render
from ondevice.planning.runtime import Runtime

SMOLLM = ModelDims("llama", 30, 576, 1536, 9, 3, 64, 49152, True, False, 1e5, 1e-5, 8192)
LLAMA_7B = ModelDims("llama", 32, 4096, 11008, 32, 32, 128, 32000, False, False, 1e4, 1e-5, 4096)
PHONE = find_device("oneplus-12")


def small(usable_mib: int, **changes: object) -> Device:
    return replace(PHONE, name="small", usable_bytes=usable_mib << 20, **changes)


def export(quantize: str = "none", **values: object) -> ExportConfig:
    return ExportConfig.parse({"quantize": quantize, **values})


def smollm(method: str = "prge", device: Device = PHONE, **values: object) -> Plan:
    arguments = {"batch_size": 4, "length_tokens": 64, **values}
    return plan(SMOLLM, method_config(method), device=device, **arguments)  # type: ignore[arg-type]


def text_of(actual: Plan) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=140)
    console.print(render(actual))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", True), ("llama", False), ("qwen2", True), ("gpt2", True), ("gpt2", False)],
)
def test_weights_are_those_of_a_real_model(family: str, tied: bool) -> None:
    loaded = tiny_model(family, tied=tied)
    weights = weight_bytes(loaded.dims)
    assert sum(weights) == sum(value.numel() * 4 for value in loaded.model.parameters())
    assert weights.embedding == loaded.family.embedding.weight.nbytes
    assert (weights.head == 0) == tied
    assert sum(weight_bytes(loaded.dims, "bfloat16")) * 2 == sum(weights)


@pytest.mark.parametrize("tied", [True, False])
def test_q4_weights_are_those_of_the_quantised_modules(tied: bool) -> None:
    from ondevice.nn.quantized import Q4Linear, Q8Embedding

    loaded = tiny_model(tied=tied)
    linears = 0
    for layer in range(loaded.dims.layers):
        for target in loaded.family.linear_targets:
            linears += sum(
                buffer.nbytes for buffer in Q4Linear(loaded.family.linear(layer, target)).buffers()
            )
    table = sum(buffer.nbytes for buffer in Q8Embedding(loaded.family.embedding.weight).buffers())
    weights = weight_bytes(loaded.dims, quantize="q4")
    assert (weights.linears, weights.embedding, weights.head) == (
        linears,
        table,
        0 if tied else table,
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "sizes", [{}, {"layers": 3, "hidden": 128, "intermediate": 384, "kv_heads": 4}]
)
def test_what_backward_keeps_is_what_autograd_saves(sizes: dict[str, int], family: str) -> None:
    import torch

    loaded = tiny_model(family, **sizes)
    loaded.model.requires_grad_(True)
    own = {value.untyped_storage().data_ptr() for value in loaded.model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(4 * 32).reshape(4, 32)
    hidden = loaded.family.embed(ids)
    position = loaded.family.positions(32, hidden.device, hidden.dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in range(loaded.dims.layers):
            hidden = loaded.family.block(layer, hidden, position, None)
    received = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert backward_bytes(loaded.dims, 4, 32, 4) == pytest.approx(received, rel=0.05)


def test_a_plan_of_a_source_loads_only_dimensions() -> None:
    planned = plan("tiny:llama", method_config("prge"), batch_size=2, length_tokens=32)
    assert planned.model == "tiny:llama" and planned.fits
    assert planned.request.dims.hidden == 64
    assert planned.total_bytes == sum(planned.parts.values())
    assert planned.margin_bytes == planned.usable_bytes - planned.total_bytes > 0


@pytest.mark.parametrize("name", method_names())
def test_every_method_can_be_planned(name: str) -> None:
    planned = smollm(name)
    weights = "masters and moments" if method(name).capability(Offloads) else "weights"
    assert {weights, "activations", "logits", "runtime"} <= set(planned.parts)
    assert all(size > 0 for size in planned.parts.values()) and planned.flops > 0
    assert json.loads(json.dumps(planned.to_dict()))["parts_bytes"] == planned.parts


def test_zeroth_order_needs_less_than_first_order() -> None:
    sizes = [smollm(method).total_bytes for method in ("mezo", "lora", "full")]
    assert sizes == sorted(sizes)
    assert (
        smollm("prge", length_tokens=256).total_bytes
        < smollm("full", length_tokens=256).total_bytes
    )


def test_memory_grows_with_batch_length_and_queries() -> None:
    base = smollm().total_bytes
    assert smollm(batch_size=8).total_bytes > base < smollm(length_tokens=128).total_bytes
    fewer = plan(
        SMOLLM, method_config("prge", {"queries": 1}), batch_size=4, length_tokens=64, device=PHONE
    )
    assert fewer.total_bytes < base
    assert smollm(dtype="bfloat16").parts["weights"] * 2 == smollm().parts["weights"]


def test_executorch_packs_linears_for_each_loaded_method() -> None:
    weights = weight_bytes(SMOLLM)
    both, train = smollm(runtime="executorch"), smollm(runtime="executorch", evaluates=False)
    assert train.parts["packed weights"] == weights.linears
    assert (
        both.parts["packed weights"] == 2 * weights.linears and "2 loaded methods" in both.notes[0]
    )
    assert both.parts["weights"] == weights.embedding + weights.vectors
    assert both.file_bytes == sum(weights)
    buckets = smollm(runtime="executorch", export=export(lengths_tokens=(32, 64)))
    assert buckets.parts["packed weights"] == 4 * weights.linears


def test_q4_reads_the_mapped_file_and_packs_nothing() -> None:
    planned = smollm(runtime="executorch", export=export("q4"))
    assert "packed weights" not in planned.parts
    assert (
        planned.parts["weights"] == planned.file_bytes == sum(weight_bytes(SMOLLM, quantize="q4"))
    )
    assert any("ops" in note for note in planned.notes)


def test_an_int4_program_has_the_size_that_was_measured() -> None:
    # 107 MB: SmolLM2-135M with 8da4w linears and an int8 embedding.
    assert sum(weight_bytes(SMOLLM, quantize="8da4w")) == pytest.approx(107e6, rel=0.05)


def test_an_npu_s_program_has_the_size_that_was_measured() -> None:
    # 332 MB: SmolLM2-135M with float16 blocks and a float32 embedding, one method.
    npu = smollm(runtime="executorch", export=export(target="android-npu"))
    assert npu.file_bytes == pytest.approx(332e6, rel=0.03)
    assert (
        npu.parts["packed weights"] == weight_bytes(SMOLLM).linears // 2
        and "NPU's own copy" in npu.notes[0]
    )
    small = smollm(runtime="executorch", export=export("w8", target="android-npu"))
    assert small.parts["packed weights"] == pytest.approx(npu.parts["packed weights"] / 2, rel=0.02)


def test_a_phone_runs_an_app_and_this_machine_python() -> None:
    phone = smollm(runtime="executorch")
    here = smollm(runtime="executorch", device=find_device("this-cpu"))
    assert phone.parts["runtime"] < here.parts["runtime"]


def test_a_plan_that_does_not_fit_is_refused_with_suggestions() -> None:
    planned = plan(
        LLAMA_7B,
        method_config("prge"),
        batch_size=2,
        length_tokens=64,
        runtime="executorch",
        device=PHONE,
    )
    assert not planned.fits and planned.margin_bytes < 0
    error = does_not_fit(planned)
    assert error.exit_code == 8 and "packed weights" in error.message
    assert size_text(planned.total_bytes) == error.received and size_text(
        PHONE.usable_bytes
    ) in str(error.expected)
    assert (
        error.hint
        and error.hint.startswith("--quantize q4 (")
        and "fits" in error.hint
        and "--force" in error.hint
    )


def test_the_first_alternative_fits_if_any_does() -> None:
    planned = smollm("full", device=small(1800))
    options = alternatives(planned)
    assert options[0][1].fits and options[0][0] == "--method prge"
    assert all(other.total_bytes < planned.total_bytes for _, other in options)


def test_changes_are_combined_if_no_single_one_fits() -> None:
    planned = plan(
        LLAMA_7B, method_config("full"), batch_size=8, length_tokens=256, device=small(16000)
    )
    options = alternatives(planned)
    assert options[0][0].count(",") >= 2 and options[0][1].fits
    assert not any(other.fits for _, other in options[1:])


def test_a_plan_that_cannot_shrink_suggests_only_force() -> None:
    method = method_config("prge", {"queries": 1})
    planned = plan(
        SMOLLM, method, batch_size=1, length_tokens=16, dtype="bfloat16", device=small(10)
    )
    assert does_not_fit(planned).hint == "--force to run anyway"


def test_the_table_shows_parts_and_verdict() -> None:
    good, bad = text_of(smollm()), text_of(smollm("full", device=small(1800)))
    assert "activations" in good and "fits, " in good and "does not fit" not in good
    assert "does not fit" in bad and "try --method prge" in bad and "optimizer" in bad


def test_a_long_plan_is_refused_for_wrong_arguments() -> None:
    for wrong in ({"batch_size": 0}, {"length_tokens": 0}, {"runtime": "onnx"}, {"dtype": "int8"}):
        with pytest.raises(ConfigError):
            smollm(**wrong)
    with pytest.raises(ConfigError):
        plan(SMOLLM, method_config("prge"), batch_size=1, length_tokens=8, device="nowhere")


def test_flops_are_two_a_parameter_and_token() -> None:
    linears = weight_bytes(SMOLLM).linears / 4
    assert forward_flops(SMOLLM, 2, 1) == pytest.approx(2 * 2 * linears, rel=0.01)
    four = method("prge").cost()(SMOLLM, method_config("prge"), 1, 64, 0).flops
    one = method("prge").cost()(SMOLLM, method_config("prge", {"queries": 1}), 1, 64, 0).flops
    assert four == pytest.approx(4 * one)
    top = method("prge").cost()(SMOLLM, method_config("prge", {"top_layers": 3}), 1, 64, 0).flops
    assert top < four / 2


def test_this_cpu_is_measured_for_a_step_time_and_not_for_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(devices, "measured_rates", lambda: asked.append(True) or (3e12, 1e15))
    monkeypatch.setattr(request, "product_rate", lambda *sides: 1e12)
    for module in (estimate, request):
        monkeypatch.setattr(module, "runtime_of", lambda method: Runtime(600 << 20, 0.01))
    monkeypatch.setattr(request, "blocks_s", lambda *sizes: None)
    planned = smollm(device=find_device("this-cpu"), memory_limit_bytes=64 << 20)
    assert not planned.fits and planned.request.device.limited and not asked
    assert planned.parts["runtime"] == 600 << 20
    around = request.LOOP_S + 0.01 * SMOLLM.layers
    assert planned.step_s == pytest.approx(planned.flops / 1e12 + around) and asked
    shown = planned.request.device.to_dict()
    assert shown["flops_s"] == {"float32": 3e12} and shown["bandwidth_bytes_s"] == 1e15


def test_blocks_that_were_measured_and_the_labels_of_the_rows_make_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(devices, "measured_rates", lambda: (3e12, 1e15))
    monkeypatch.setattr(request, "product_rate", lambda *sides: 1e12)
    monkeypatch.setattr(
        request, "blocks_s", lambda dims, method, *rows: measured.append(rows) or 0.5
    )
    here = find_device("this-cpu")
    head = 3 * head_flops(SMOLLM, 4, 64) / 1e12
    every = plan(SMOLLM, method_config("mesp"), batch_size=4, length_tokens=64, device=here)
    assert every.step_s == pytest.approx(0.5 + head, rel=1e-3)
    sizes = RowSizes((24,) * 99 + (64,), labels=2.0)
    few = plan(
        SMOLLM, method_config("mesp"), batch_size=4, length_tokens=64, device=here, sizes=sizes
    )
    mean = 24 + (1 - 0.99**4) * 40  # 24 or, in 4 of 100 batches, 64
    assert few.step_s == pytest.approx(0.5 * mean / 32 + head * 4 * 2 / (4 * 64), rel=1e-3)
    assert measured == [(4, 64), (4, 32)]


def test_time_is_bound_by_bandwidth_or_by_products() -> None:
    flops_s = {"float32": 1e12}
    slow_memory, fast_memory = (
        small(9000, listed_rates=(flops_s, bytes_s)) for bytes_s in (1e9, 1e15)
    )
    bound = smollm(device=slow_memory, batch_size=1)
    assert bound.step_s == pytest.approx(sum(weight_bytes(SMOLLM)) / 1e9)
    assert "bandwidth" in bound.step_basis
    computed = smollm(device=fast_memory)
    assert (
        computed.step_s == pytest.approx(computed.flops / 1e12)
        and "products" in computed.step_basis
    )
    assert smollm(device=PHONE).step_s is None
    assert "estimate" in computed.step_basis
