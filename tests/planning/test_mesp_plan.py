"""Weights of MeSP in MLX and inputs in host memory, as they are planned and as they are."""

from __future__ import annotations

import pytest

from ondevice.core.config import ExportConfig
from ondevice.core.dims import ModelDims
from ondevice.core.registry import method_config, open_session
from ondevice.methods.mesp.memory import (
    blocks_memory,
    host_memory,
    memory,
    trained_numbers,
    weights,
)
from ondevice.models import open_model, save_tiny
from ondevice.models.load import tiny_model
from ondevice.nn.packed import PackedLinear
from ondevice.planning.devices import find_device
from ondevice.planning.estimate import plan

QWEN = ModelDims("qwen2", 24, 896, 4864, 14, 2, 64, 151936, True, True, 1e6, 1e-6, 32768)
LLAMA_8B = ModelDims("llama", 32, 4096, 14336, 32, 8, 128, 128256, False, False, 5e5, 1e-5, 1 << 20)


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_in_mlx_are_planned_as_they_are_packed(tmp_path, dtype, item, bits, tied) -> None:
    pytest.importorskip("mlx.core")
    folder = save_tiny(
        tmp_path / "model", "qwen2", 1, tied=tied, hidden=128, intermediate=384, vocab=4000
    )
    files = open_model(str(folder), dtype=dtype)
    session = open_session(files, method_config("mesp", {"bits": bits}), 3, backend="mlx")
    held = session.model.weights
    arrays = {  # a tied head is the embedding's arrays by other names
        id(array): array.nbytes
        for part in (*held.blocks, held.table, held.final)
        for array in part.arrays.values()
    }
    total = sum(arrays.values())
    assert weights(files.dims, session.config, item, "mlx") == pytest.approx(total, rel=1e-3)
    session.close()


def test_weights_and_pairs_in_mlx_are_what_a_step_of_qwen_s_shape_keeps() -> None:
    """311.5 MiB (`benchmarks/results/mesp/memory`); torch on a GPU leaves the table as it is."""
    config = method_config("mesp", {"bits": 4})
    pairs = 4 * trained_numbers(QWEN, config)
    assert weights(QWEN, config, 4, "mlx") + pairs == pytest.approx(311.5 * 2**20, rel=0.01)
    table = QWEN.vocab * QWEN.hidden
    assert weights(QWEN, config, 4) - weights(QWEN, config, 4, "mlx") == pytest.approx(
        table * (4 - 5 / 8), rel=0.1
    )


def test_a_plan_of_8_bits_counts_what_the_packed_model_holds() -> None:
    from tests.methods.mesp.reference import session

    loaded = tiny_model("qwen2", layers=3, tied=False)
    config = method_config("mesp", {"bits": 8})
    planned = weights(loaded.dims, config, 4)
    opened = session(loaded, bits=8)
    held = 0
    for module in opened.loaded.model.modules():
        if isinstance(module, PackedLinear):
            held += module.matrix.largest.nbytes + module.matrix.scale.nbytes
    held += sum(one.nbytes for one in opened.loaded.model.parameters())
    assert planned == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize("micro", [None, 1])
def test_inputs_on_the_host_are_the_buffers_that_a_step_takes(micro) -> None:
    """Of all blocks but the last, whose input stays; buffers are whole pages."""
    from ondevice.offload.device import round_up
    from tests.methods.mesp.reference import rows, session

    settings = {"activations": "host", "micro_batch_size": micro}
    opened = session(tiny_model("qwen2", layers=5), **settings)
    opened.step(*rows(3, 40, 0), 0, 1e-3)
    planned = host_memory(opened.loaded.dims, opened.config, 3, 40)
    host = opened.model.inputs.host
    assert len(host) == 4 and {buffer.nbytes for buffer in host} == {
        round_up(sum(planned.values()) // 4)
    }


def test_a_row_of_524288_tokens_waits_in_133_gb_of_host_memory() -> None:
    config = method_config("mesp", {"bits": 4, "activations": "host"})
    assert host_memory(LLAMA_8B, config, 1, 524_288, 2) == {
        "inputs on the host": 31 * 524_288 * 4096 * 2
    }
    assert memory(LLAMA_8B, config, 1, 524_288, 2)["block inputs"] == 3 * 524_288 * 4096 * 2
    assert host_memory(LLAMA_8B, method_config("mesp", {}), 1, 524_288, 2) == {}


def test_a_plan_counts_mlx_s_weights_as_they_are_packed() -> None:
    config = method_config("mesp", {"bits": 4})
    planned = plan(QWEN, config, batch_size=1, length_tokens=256, runtime="mlx", device="this-cpu")
    kept = planned.parts["weights"] + planned.parts["adapter"]
    assert kept == pytest.approx(311.5 * 2**20, rel=0.01)


def test_a_plan_lists_the_inputs_on_the_host_next_to_the_accelerators_parts() -> None:
    options = {"batch_size": 1, "length_tokens": 524_288, "dtype": "bfloat16"}
    config = method_config("mesp", {"bits": 4, "activations": "host"})
    planned = plan(LLAMA_8B, config, device="h200", **options)
    assert (
        planned.host_parts["inputs on the host"] == 31 * 524_288 * 4096 * 2
        and "inputs on the host" not in planned.parts
    )
    assert "pinned host memory" in " ".join(planned.notes) and planned.host_usable_bytes is None
    on_cpu = plan(LLAMA_8B, config, device=find_device("this-cpu"), **options)
    assert (
        on_cpu.parts["inputs on the host"] == planned.host_parts["inputs on the host"]
        and not on_cpu.host_parts
    )
    usual = plan(LLAMA_8B, method_config("mesp", {"bits": 4}), device="h200", **options)
    assert usual.host_parts == {} and "tokenizer" in usual.parts


SMOLLM = ModelDims("llama", 30, 576, 1536, 9, 3, 64, 49152, True, False, 1e5, 1e-5, 8192)
PLANNED = {"int8": (15_948_288, 18_248_272), "8da8w": (16_164_864, 18_248_272)}
"""Bytes that an export of SmolLM2-135M at 128 tokens planned: `embed`, `block_forward` and `block_backward`; and
`head_sums` and `head_gradient`."""


@pytest.mark.parametrize("quantize", PLANNED)
def test_the_plan_of_a_block_program_has_its_arenas(quantize) -> None:
    parts = blocks_memory(SMOLLM, method_config("mesp", {}), 1, 128, quantize)
    assert (parts["activations"], parts["head tiles"]) == pytest.approx(PLANNED[quantize], rel=0.15)
    assert (
        parts["block inputs"] == 30 * 128 * 576 * 4 and parts["optimizer"] == 2 * parts["adapter"]
    )
    one_layer = sum(inputs * outputs for inputs, outputs in SMOLLM.linear_shapes.values())
    assert parts["packed weights"] == (2 * one_layer if quantize == "8da8w" else 0)


def test_a_plan_of_a_program_says_which_form_it_has() -> None:
    method, files = method_config("mesp", {}), {}
    for quantize in ("none", "int8", "q4", "8da8w"):
        export = ExportConfig.parse({"lengths_tokens": [128], "quantize": quantize}, "test")
        planned = plan(
            SMOLLM, method, batch_size=1, length_tokens=128, export=export, runtime="executorch"
        )
        notes = " ".join(planned.notes)
        assert "mapped" in notes and "ops" not in notes
        files[quantize] = planned.file_bytes
    assert files["none"] > files["8da8w"] > files["int8"] > files["q4"] > files["none"] / 8


@pytest.mark.parametrize(
    ("gib", "recompute"),
    [
        (80, "none"),
        (24, (32, 25, 1)),
        (21, (32, 2, 0)),
        (20.5, (19, 0, 0)),
        (18, "all"),
        (4, "all"),
    ],
)
def test_recompute_auto_keeps_what_the_memory_has_room_for(gib, recompute) -> None:
    config = method_config("mesp", {})
    device = find_device("h100").within(int(gib * 2**30))
    planned = plan(
        LLAMA_8B, config, batch_size=1, length_tokens=2048, dtype="bfloat16", device=device
    )
    chosen = planned.request.method.recompute
    assert chosen == recompute
    assert any("method.recompute" in note for note in planned.notes)
    kept = planned.parts.get("kept of the forward pass", 0)
    assert (kept == 0) == (chosen == "all")
    assert planned.fits or chosen == "all"


def test_a_recompute_setting_that_is_given_stays_and_is_planned() -> None:
    shape = {"batch_size": 2, "length_tokens": 512, "dtype": "bfloat16", "device": "h100"}
    sizes = {}
    for recompute in ("all", (4, 2, 1), "none"):
        planned = plan(QWEN, method_config("mesp", {"recompute": recompute}), **shape)
        assert planned.request.method.recompute == recompute
        sizes[recompute] = planned.parts.get("kept of the forward pass", 0)
    attention = 1024 * (14 * 64 * 2 + 14 * 4)
    mlp = 1024 * 2 * 4864 * 2
    projections = 1024 * (896 + 2 * 128 + 896) * 2
    assert sizes["all"] == 0 and sizes["none"] == 24 * (attention + mlp + projections)
    assert sizes[4, 2, 1] == 4 * attention + 2 * mlp + projections


def test_recompute_auto_computes_all_again_on_a_cpu() -> None:
    planned = plan(QWEN, method_config("mesp", {}), batch_size=1, length_tokens=64)
    assert planned.request.method.recompute == "all"
