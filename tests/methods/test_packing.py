"""Rows packed into one sequence give the step of the same rows padded: losses, gradients, projected gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.capabilities import Packs
from ondevice.core.errors import ConfigError, Need
from ondevice.core.registry import method_config, methods, name_methods, spec_of
from ondevice.core.session import IGNORE
from ondevice.data.batching import Batches, pack_examples, pad_examples
from ondevice.data.examples import Dataset, Example, Item
from ondevice.models.load import tiny_model

LENGTHS = (5, 17, 2, 9, 12, 3, 7)
ROOM = 24


def example(length: int, seed: int) -> Example:
    ids = np.random.default_rng(seed).integers(1, 250, length).tolist()
    return Example(tuple(ids), (IGNORE,) * (length // 3) + tuple(ids[length // 3 :]))


EXAMPLES = [example(length, seed) for seed, length in enumerate(LENGTHS)]
CASES = [
    ("mesp", "llama", {}),
    ("mesp", "llama", {"micro_batch_size": 1}),
    ("mesp", "gemma3_text", {}),  # windows of 12 tokens, two rotary bases
    ("mesp", "lfm2", {}),  # convolutions that end where a row begins
    ("lora", "lfm2", {}),
    ("mesp", "lfm2_moe", {}),
    ("lora", "lfm2_moe", {}),
    ("mesp", "granitemoe", {}),
    ("mesp", "qwen3_5_text", {}),  # a delta rule's state begins again where a row begins
    ("lora", "qwen3_5_text", {}),
    ("mesp", "gemma4_text", {}),  # keys and values that later layers read
    ("lora", "gemma4_text", {}),
    ("lora", "llama", {}),
    ("lora", "gemma3_text", {}),
    ("lora-fa", "llama", {"micro_batch_size": 2}),
    ("full", "llama", {}),
    ("full", "gpt2", {}),  # learned positions
    ("prge", "llama", {"subspace": "random", "optimizer": "sgd", "top_layers": 1}),
    ("prge", "gemma3_text", {"subspace": "random", "optimizer": "sgd", "batch_queries": False}),
    ("mezo", "llama", {}),
]


def stepped(
    name: str,
    family: str,
    settings: dict[str, Any],
    packed: bool,
    device: str = "cpu",
    dtype: Any = None,
) -> tuple[Any, dict[str, np.ndarray]]:
    """One step's result and the gradients, as far as the method has them."""
    config = method_config(name, settings)
    loaded = tiny_model(family, layers=4 if family == "gemma4_text" else 2)
    loaded.model.to(device, dtype)
    session = spec_of(config).open_session(loaded, config, 3, device)
    if packed:
        batch = pack_examples(EXAMPLES, ROOM, 0)
        assert batch.position_ids is not None and batch.ids.shape == (3, 24)
        result = session.packed_step(batch.ids, batch.labels, batch.position_ids, 0, 1e-3)
    else:
        batch = pad_examples(EXAMPLES, max(LENGTHS), 0)
        result = session.step(batch.ids, batch.labels, 0, 1e-3)
    state = session.state()
    moments = {
        key: 10 * value for key, value in state.items() if key.startswith("exp_avg/")
    }  # AdamW's first: 0.1 g
    return result, moments or {
        key: value for key, value in state.items() if value.dtype.kind == "f"
    }


def assert_the_step_is_that_of_the_rows(
    name: str, family: str, settings: dict[str, Any], device: str
) -> None:
    (ours, gradients), (theirs, exact) = (
        stepped(name, family, settings, packed, device) for packed in (True, False)
    )
    assert ours.loss == pytest.approx(theirs.loss, rel=2e-6)
    largest = max(map(abs, theirs.projected_gradients), default=0.0)
    assert ours.projected_gradients == pytest.approx(theirs.projected_gradients, abs=3e-3 * largest)
    if (
        theirs.projected_gradients
    ):  # what is left of the rounding of two nearly equal losses moves the weights
        return
    assert set(gradients) == set(exact) and any(
        np.abs(value).max() > 1e-4 for value in exact.values()
    )
    for key, value in exact.items():
        assert np.abs(gradients[key] - value).max() <= 1e-5 * max(
            1.0, float(np.abs(value).max())
        ), key


@pytest.mark.parametrize(("name", "family", "settings"), CASES)
def test_a_packed_step_is_the_step_of_the_rows(
    name: str, family: str, settings: dict[str, Any]
) -> None:
    assert_the_step_is_that_of_the_rows(name, family, settings, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "family", "settings"), CASES)
def test_a_packed_step_is_the_step_of_the_rows_on_cuda(
    name: str, family: str, settings: dict[str, Any]
) -> None:
    with full_precision():
        assert_the_step_is_that_of_the_rows(name, family, settings, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "family"), [("mesp", "llama"), ("lora", "llama"), ("full", "gpt2")]
)
def test_a_packed_step_in_bfloat16_errs_no_more_than_the_rows(name: str, family: str) -> None:
    """The fused kernels of a GPU, which keep rows apart by a mask or by their lengths, are those of half precision."""
    wrong = {}
    _, exact = stepped(name, family, {}, packed=False)
    for packed in (True, False):
        _, gradients = stepped(name, family, {}, packed, "cuda", torch.bfloat16)
        errors = [np.abs(gradients[key] - value).max() / np.abs(value).max() for key, value in exact.items()
                  if np.abs(value).max() > 1e-4]  # fmt: skip
        wrong[packed] = float(np.median(errors))
    assert 0 < wrong[False] < 0.2 and wrong[True] <= 1.5 * wrong[False], wrong


@contextmanager
def full_precision() -> Iterator[None]:
    """Float32 products of whole float32 inputs."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_rows_of_a_step_stay_the_same_and_no_label_crosses_a_row() -> None:
    dataset = Dataset([Item(one) for one in EXAMPLES], max_length_tokens=ROOM)
    plain, packing = (Batches(dataset, 4, None, 7, 0, packing) for packing in (False, True))
    for step in range(4):
        assert plain.rows_at(step) == packing.rows_at(step)
        batch = packing.at(step)
        wanted = sorted(EXAMPLES[row].ids for row in packing.rows_at(step))
        assert sorted(tuple(map(int, ids)) for ids, _ in batch.rows()) == wanted
        assert batch.position_ids is not None and batch.ids.shape[1] <= ROOM
        assert (batch.labels[batch.position_ids == 0] == IGNORE).all()
        trained = sum(EXAMPLES[row].trained_tokens for row in packing.rows_at(step))
        assert int((batch.labels[:, 1:] != IGNORE).sum()) == trained
    alone = replace(dataset, items=dataset.items[:1])
    assert Batches(alone, 1, None, 0, 0, True).at(0).ids.shape == (1, 8)


def test_a_method_that_does_not_pack_says_why_and_which_do() -> None:
    refused = [spec for spec in methods() if not spec.capability(Packs)]
    assert refused
    for spec in refused:
        with pytest.raises(ConfigError) as error:
            spec.check_packing("torch", whole=False)
        name_methods(error.value)
        assert "mesp" in error.value.methods and spec.name not in error.value.methods
    mesp = spec_of(method_config("mesp"))
    mesp.check_packing("torch", whole=False)
    for backend, whole in (("mlx", False), ("torch", True)):
        with pytest.raises(ConfigError) as error:
            mesp.check_packing(backend, whole=whole)
        assert error.value.needs is Need.PACKS
