"""Types of GGUF files: what is read, what is refused by name, what is written and how it is mixed."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest

from ondevice.core.errors import MissingPackageError, ModelError
from ondevice.exits.gguf import ROUNDINGS
from ondevice.gguf import quants
from ondevice.gguf.quants import K_QUANTS, check_writer, ggml_type, quantised, rounded, types_of
from ondevice.models import load_model, read_dims, tiny_model
from ondevice.models.sources.gguf import convert_gguf
from tests.cli.command import CommandLine, write_rows
from tests.gguf.writing import write_gguf

SIZES = {"hidden": 256, "heads": 4, "kv_heads": 4, "intermediate": 256, "vocab": 320}
UNREADABLE = ("Q8_1", "Q8_K", "Q1_0")
ROWS = [{"prompt": "ab", "completion": " c"}, {"prompt": "cd", "completion": " e"}]


def test_every_type_is_read_or_refused() -> None:
    from gguf import GGML_QUANT_SIZES

    refused = {kind.name for kind in GGML_QUANT_SIZES if not quants._is_readable(kind)}
    assert refused == {*UNREADABLE, "I8", "I16", "I32", "I64", "F64"}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_types_are_refused_before_a_weight_is_written(kind: str, tmp_path: Path) -> None:
    last = [*["F32"] * 13, kind]  # 14 matrices in two layers
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES), last)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ModelError) as caught:
        convert_gguf(path, out)
    assert caught.value.received == kind and "blk.1.ffn_down" in caught.value.message
    assert not (out / "model.safetensors").exists()


@pytest.mark.usefixtures("own_cache")
def test_a_type_newer_than_the_package_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES), "Q6_K")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (14,)
    struct.pack_into("<I", data, at, 999)
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_dims(str(path))
    assert caught.value.received == "type 999" and "gguf" in str(caught.value.hint)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", ["Q4_K", "IQ3_S", "TQ1_0"])
def test_rows_of_incomplete_blocks_are_refused(kind: str, tmp_path: Path) -> None:
    """The type of a matrix of 64 columns is made one of blocks of 256."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES | {"hidden": 64}), "Q8_0")
    data = bytearray(path.read_bytes())
    name = b"blk.1.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    struct.pack_into("<I", data, at, int(ggml_type(kind)))
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    assert "tiny.gguf" in caught.value.message and caught.value.received


@pytest.mark.usefixtures("own_cache")
def test_a_k_quant_is_trained_and_asked_by_the_command(tmp_path: Path, capsys) -> None:
    kinds = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ2_0"]
    model = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES), kinds)
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    run, command = tmp_path / "run", CommandLine(capsys)
    done = command("train", model, "--data", data, "--out", run, "--method", "mesp", "--steps", 1)
    assert done.code == 0, done.err
    answers = tmp_path / "answers.jsonl"
    done = command("predict", run, data, "--out", answers, "--json")
    assert done.code == 0 and done.json["predicted"] == 2


def spreads() -> dict[str, np.ndarray]:
    """Numbers of many kinds, float32 [64, 512]."""
    rng = np.random.default_rng(0)
    shape = (64, 512)
    normal = rng.normal(size=shape)
    values = {
        "normal": normal,
        "small": normal * 1e-4,
        "heavy": rng.standard_t(2, size=shape),
        "sparse": normal * (rng.random(shape) < 0.03),
        "outliers": np.where(rng.random(shape) < 0.01, 50.0, normal),
        "positive": np.abs(normal) + 1,
        "constant": np.full(shape, -0.37),
        "zero": np.zeros(shape),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q5_0", "q5_1", *K_QUANTS])
def test_a_type_rounds_no_more_than_it_may(dtype: str) -> None:
    import torch

    pytest.importorskip("xllamacpp")
    for name, value in spreads().items():
        back = rounded(value, dtype)
        excess = ROUNDINGS[dtype].excess(torch.from_numpy(back), torch.from_numpy(value))
        assert excess is None, (name, excess)
        # Rows that have changed places are seen.
        if name in ("normal", "heavy", "positive") and dtype != "q4_k":
            moved = torch.from_numpy(np.roll(value, 1, axis=0))
            assert ROUNDINGS[dtype].excess(torch.from_numpy(back), moved) is not None, name


@pytest.mark.parametrize("dtype", K_QUANTS)
def test_the_package_reads_what_llama_cpp_reads(dtype: str) -> None:
    """llama.cpp's own way back, from the same library, gives the same numbers."""
    xllamacpp = pytest.importorskip("xllamacpp")
    value = spreads()["heavy"]
    stored = quantised(value, dtype)
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    function = getattr(library, f"dequantize_row_{dtype.replace('k', 'K')}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    found = np.empty_like(value)
    function(stored.ctypes.data, found.ctypes.data, value.size)
    np.testing.assert_array_equal(found, rounded(value, dtype))


@pytest.mark.parametrize("dtype", K_QUANTS)
def test_threads_and_dimensions_change_no_bit(dtype: str, monkeypatch) -> None:
    pytest.importorskip("xllamacpp")
    value = spreads()["normal"].reshape(4, 16, 512)
    whole = quantised(value, dtype)
    assert whole.shape[:2] == (4, 16)
    monkeypatch.setattr(quants, "_CHUNK_NUMBERS", 1)
    np.testing.assert_array_equal(quantised(value, dtype), whole)
    np.testing.assert_array_equal(quantised(value[1], dtype), whole[1])


def test_without_llama_cpp_a_mixture_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(quants, "_ggml_quantize", lambda: None)
    check_writer("q4_0")
    with pytest.raises(MissingPackageError) as caught:
        check_writer("q5_k_m")
    assert "q5_k_m" in caught.value.message and "xllamacpp" in str(caught.value)
    with pytest.raises(MissingPackageError):
        quantised(np.zeros((1, 256), np.float32), "q4_k")


def test_a_mixture_has_the_types_of_llama_quantize() -> None:
    """Layers 0, 3, 6 and 7 of 8 are finer: ends of an eighth, and every third between."""
    shapes = {"token_embd.weight": (320, 256), "output_norm.weight": (256,)}
    for layer in range(8):
        for part in ("attn_q", "attn_v", "ffn_down", "ffn_gate_inp"):
            shapes[f"blk.{layer}.{part}.weight"] = (256, 256)
    types = types_of(shapes, "q4_k_m")
    finer = {name for name, kind in types.items() if kind == "q6_k"}
    assert finer == {"token_embd.weight"} | {
        f"blk.{layer}.{part}.weight" for layer in (0, 3, 6, 7) for part in ("attn_v", "ffn_down")
    }
    assert types["blk.0.attn_q.weight"] == "q4_k"
    assert types["blk.0.ffn_gate_inp.weight"] == types["output_norm.weight"] == "float32"
    untied = types_of(shapes | {"output.weight": (320, 256)}, "q5_k_m")
    assert (untied["output.weight"], untied["token_embd.weight"]) == ("q6_k", "q5_k")
    narrow = types_of({name: (256, 288) for name in shapes}, "q4_k_m")
    assert (narrow["blk.1.attn_v.weight"], narrow["blk.0.attn_v.weight"]) == ("q5_0", "q8_0")
    assert {*types_of({name: (256, 40) for name in shapes}, "q4_k_m").values()} == {
        "float16", "float32"
    }  # fmt: skip
    fused = {f"blk.{layer}.attn_qkv.weight": (256, 256) for layer in range(8)}
    per_layer = types_of(fused | {"per_layer_token_embd.weight": (320, 256)}, "q4_k_m")
    assert [name for name, kind in per_layer.items() if kind == "q4_k"] == [
        f"blk.{layer}.attn_qkv.weight" for layer in (1, 2, 4, 5)
    ]
    experts = shapes | {f"blk.{at}.ffn_down_exps.weight": (8, 256, 256) for at in range(8)}
    experts |= {f"blk.{at}.attn_output.weight": (256, 256) for at in range(8)}
    mixed = types_of(experts, "q4_k_m")
    assert mixed["blk.1.attn_v.weight"] == "q8_0" and mixed["blk.1.attn_output.weight"] == "q5_k"
    assert (mixed["blk.0.ffn_down_exps.weight"], mixed["blk.1.ffn_down_exps.weight"]) == (
        "q6_k", "q4_k"
    )  # fmt: skip
    simple = types_of(shapes, "q4_0")
    assert (simple["token_embd.weight"], simple["blk.0.attn_v.weight"]) == ("q8_0", "q4_0")
