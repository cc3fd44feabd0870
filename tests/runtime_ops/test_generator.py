"""The numpy reference: golden values, positions, and statistics of the streams."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy  # `stats` is imported at its first use, by one worker
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.core.errors import ConfigError
from ondevice.runtime_ops import generator, golden
from ondevice.runtime_ops.generator import normal, rademacher, read_golden, stream_key, words

INT64 = st.integers(min_value=0, max_value=2**63 - 1)


def test_published_splitmix64_values():
    # The reference output of SplitMix64 from state 1234567.
    assert [int(w) for w in words(1234567, 0, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_golden_values_are_reproduced_exactly_for_words_and_signs_and_closely_for_normals():
    assert json.loads(generator.GOLDEN_PATH.read_text())["scheme"] == generator.SCHEME
    for fresh, stored in zip(generator.golden(), read_golden(), strict=True):
        normals, stored_normals = fresh.pop("normal"), stored.pop("normal")
        assert fresh == stored
        np.testing.assert_allclose(normals, stored_normals, rtol=0, atol=1e-6)


def test_golden_values_of_the_other_ops_are_those_of_their_definitions():
    stored = golden.read_ops()
    for fresh, kept in zip(golden.ops(), stored, strict=True):
        np.testing.assert_allclose(fresh.pop("out"), kept.pop("out"), rtol=1e-6, atol=1e-6)
        assert fresh == kept


@settings(max_examples=50, deadline=None)
@given(
    INT64,
    INT64,
    st.integers(0, 1000),
    st.integers(0, 2**40),
    st.integers(0, 200),
    st.sampled_from([normal, rademacher]),
)
def test_any_range_is_a_window_of_the_stream(seed, step, tensor, start, count, form):
    low = max(0, start - 7)
    whole = form(seed, step, tensor, 2, low, count + 20)
    np.testing.assert_array_equal(
        form(seed, step, tensor, 2, start, count), whole[:, start - low :][:, :count]
    )


def test_scalar_and_vector_forms_of_the_mix_agree():
    values = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    mixed = generator.mix(np.array(values, dtype=np.uint64))
    assert [int(v) for v in mixed] == [generator.mix_int(v) for v in values]


def test_a_noise_s_name_means_an_op():
    names = ("gaussian", "normal", "rademacher")
    assert [generator.noise_kind(name) for name in names] == ["normal", "normal", "rademacher"]
    with pytest.raises(ConfigError) as error:
        generator.noise_kind("uniform")
    assert error.value.received == "uniform"


@pytest.mark.parametrize("form", [normal, rademacher])
def test_empty_ranges_give_empty_arrays(form):
    assert form(1, 2, 3, 2, 5, 0).shape == (2, 0)


COUNT = 1 << 20


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    return normal(20_261_121, 5, 2, 1, 0, COUNT)[0].astype(np.float64)


def test_moments_of_the_normals(normals):
    assert abs(normals.mean()) < 4.5 / np.sqrt(COUNT)
    assert abs(normals.var() - 1) < 4.5 * np.sqrt(2 / COUNT)
    assert abs((normals**3).mean()) < 4.5 * np.sqrt(15 / COUNT)
    assert abs((normals**4).mean() - 3) < 4.5 * np.sqrt(96 / COUNT)
    assert np.isfinite(normals).all()
    assert 4.5 < np.abs(normals).max() < 6.8


def test_quantiles_of_the_normals(normals):
    edges = scipy.stats.norm.ppf(np.linspace(0, 1, 257))
    observed = np.histogram(normals, edges)[0]
    assert scipy.stats.chisquare(observed).pvalue > 1e-4
    assert scipy.stats.kstest(normals[::7], "norm").pvalue > 1e-4


def test_bits_and_bytes_of_the_words_are_uniform():
    word = words(stream_key(3, 1, 4, 1), 0, 1 << 17)
    ones = np.unpackbits(word.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=0, dtype=np.int64)
    z = (ones - len(word) / 2) / np.sqrt(len(word) / 4)
    assert np.abs(z).max() < 4.8
    for byte in range(8):
        observed = np.bincount(word.view(np.uint8).reshape(-1, 8)[:, byte], minlength=256)
        assert scipy.stats.chisquare(observed).pvalue > 1e-5


def test_one_flipped_input_bit_flips_half_of_the_key():
    rng = np.random.default_rng(0)
    for argument in range(4):
        flips = []
        for _ in range(500):
            base = [int(v) for v in rng.integers(0, 2**62, 4)]
            other = list(base)
            other[argument] ^= 1 << int(rng.integers(0, 62))
            flips.append((stream_key(*base) ^ stream_key(*other)).bit_count())
        assert abs(np.mean(flips) - 32) < 4.5 * 4 / np.sqrt(500)


@pytest.mark.parametrize("form", [normal, rademacher])
def test_neighbouring_streams_are_uncorrelated(form):
    count = 1 << 17
    base = form(9, 9, 9, 3, 0, count)
    others = {
        "seed": form(10, 9, 9, 1, 0, count)[0],
        "step": form(9, 10, 9, 1, 0, count)[0],
        "tensor": form(9, 9, 10, 1, 0, count)[0],
        "query": base[1],
        "second query": base[2],
        "swapped counters": form(10, 8, 9, 1, 0, count)[0],
        "element": form(9, 9, 9, 1, 1, count)[0],
    }
    for name, other in others.items():
        for power in (1, 2) if form is normal else (1,):
            a, b = base[0].astype(np.float64) ** power, other.astype(np.float64) ** power
            correlation = np.corrcoef(a, b)[0, 1]
            assert abs(correlation) < 4.8 / np.sqrt(count), f"{name}, power {power}: {correlation}"


@pytest.mark.parametrize("form", [normal, rademacher])
def test_lags_are_uncorrelated(form):
    count = 1 << 17
    values = form(77, 0, 0, 1, 0, count + 128)[0].astype(np.float64)
    for lag in (1, 2, 3, 4, 31, 32, 63, 64, 65, 127, 128):
        assert abs((values[:count] * values[lag : lag + count]).mean()) < 4.8 / np.sqrt(count), lag


def test_runs_of_the_signs():
    signs = rademacher(5, 5, 5, 1, 0, COUNT)[0]
    assert abs(signs.mean()) < 4.5 / np.sqrt(COUNT)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    nibbles = ((signs.reshape(-1, 8) < 0) @ (1 << np.arange(8))).astype(np.int64)
    assert scipy.stats.chisquare(np.bincount(nibbles, minlength=256)).pvalue > 1e-4
