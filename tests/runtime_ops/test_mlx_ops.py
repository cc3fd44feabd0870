"""The generator in MLX: golden values, ranges, exported functions, refusals."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ondevice.core.errors import ConfigError
from ondevice.runtime_ops import generator

mx = pytest.importorskip("mlx.core")
mlx_ops = pytest.importorskip("ondevice.runtime_ops.mlx_ops")
KINDS = [("normal", 1e-6), ("rademacher", 0.0)]


def word(value: int):
    """int64 [1] with these 64 bits."""
    return mx.array(np.array([value & generator.MASK64], dtype=np.uint64).view(np.int64))


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
@pytest.mark.parametrize("arrays", [False, True])
def test_mlx_gives_the_golden_values(kind, tolerance, arrays):
    for case in generator.read_golden():
        seed, step = (word(case[k]) if arrays else case[k] for k in ("seed", "step"))
        counters = [case[k] for k in ("tensor", "queries", "start", "count")]
        values = mlx_ops.draw(kind, seed, step, *counters)
        assert values.dtype == mx.float32 and values.shape == (case["queries"], case["count"])
        np.testing.assert_allclose(np.array(values), case[kind], rtol=0, atol=tolerance)


def test_keys_and_words_have_the_golden_bits():
    for case in generator.read_golden():
        keys = mlx_ops._keys(
            case["seed"], case["step"], case["tensor"], case["queries"], case["start"], 2
        )
        assert f"{int(np.array(keys)[-1, 0]):016x}" == case["last_key"]
        words = np.array(mlx_ops._words(keys, case["start"], case["start"] + 2))[-1]
        assert [f"{int(value):016x}" for value in words] == case["last_words"]


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
@pytest.mark.parametrize(
    ("start", "count"), [(0, 0), (0, 1), (1, 511), (63, 130), (2**33 + 7, 1001), (2**53 + 1, 4)]
)
def test_ranges_of_negative_seeds(kind, tolerance, start, count):
    expected = getattr(generator, kind)(-5, 9, 1, 3, start, count)
    np.testing.assert_allclose(
        np.array(mlx_ops.draw(kind, -5, 9, 1, 3, start, count)), expected, rtol=0, atol=tolerance
    )
    assert mlx_ops.draw(kind, -5, 9, 1, 0, start, count).shape == (0, count)


def test_normals_stay_close_over_many_and_are_never_nan():
    values = np.array(mlx_ops.normal(8, 8, 0, 1, 0, 1 << 20))
    assert np.abs(values - generator.normal(8, 8, 0, 1, 0, 1 << 20)).max() <= 1e-6


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
def test_seed_and_step_may_be_inputs_of_an_exported_function(tmp_path, kind, tolerance):
    path = str(tmp_path / "draw.mlxfn")
    mx.export_function(
        path, lambda seed, step: mlx_ops.draw(kind, seed, step, 2, 2, 5, 70), word(0), word(0)
    )
    imported = mx.import_function(path)
    for seed, step in ((2**63 - 1, 7), (-1, 20_000)):
        (values,) = imported(word(seed), word(step))
        expected = getattr(generator, kind)(seed, step, 2, 2, 5, 70)
        np.testing.assert_allclose(np.array(values), expected, rtol=0, atol=tolerance)


def test_another_kind_of_noise_and_wrong_counters_are_refused():
    same = mx.array_equal(
        mlx_ops.draw("gaussian", 1, 2, 0, 1, 0, 9), mlx_ops.normal(1, 2, 0, 1, 0, 9)
    )
    assert same.item()
    with pytest.raises(ConfigError) as raised:
        mlx_ops.draw("uniform", 1, 2, 0, 1, 0, 9)
    assert "uniform" in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        mlx_ops.normal(1, 2, 0, 1, -1, 9)
    assert "start -1" in str(raised.value.received)
    for wrong in (mx.array([1]), mx.array([1, 2], dtype=mx.int64), mx.array(1, dtype=mx.int64)):
        with pytest.raises(ConfigError) as raised:
            mlx_ops.rademacher(wrong, 2, 0, 1, 0, 9)
        assert raised.value.expected == "int64 or uint64 [1]"


def test_loads_no_torch(tmp_path):
    program = "import sys, ondevice.runtime_ops.mlx_ops\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=120)


def test_without_mlx_the_package_is_named(tmp_path):
    program = "import sys\nsys.modules['mlx.core'] = None\nimport ondevice.runtime_ops.mlx_ops"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert (
        done.returncode == 1
        and "MissingPackageError" in done.stderr
        and "ondevice-train[mlx]" in done.stderr
    )
