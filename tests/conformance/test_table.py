"""Every claimed pair of method and backend against float32-in-memory PyTorch: losses, updates,
resume, round trip."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api import export as artifacts
from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.core import registry
from ondevice.core.capabilities import Offloads
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config, open_session
from ondevice.core.registry import target as find_target
from ondevice.core.session import Preparing
from ondevice.data.batching import Batch
from ondevice.exporters.base import ExportJob
from ondevice.exporters.cuda.session import TorchProgramSession
from ondevice.generation.sample import PlainSampler
from ondevice.methods.prge.program import build_program
from ondevice.methods.prge.torch import PrgeSession
from ondevice.models import load_model, open_model, save_tiny
from ondevice.models.load import tiny_model
from ondevice.nn.packed import pack_model, unpack_model
from tests.conformance.plain import (
    Plain,
    PlainFirstOrder,
    PlainMezo,
    PlainPrge,
    PlainRevffn,
    PlainSubspace,
)
from tests.conformance.table import (
    ARTIFACTS,
    LEARNING_RATE,
    STEPS,
    TABLE,
    Row,
    answers,
    claims,
    family_of,
)
from tests.exits import table as exits
from tests.methods.reference import batch
from tests.methods.rounding import ALLOWED, HalfRounding, modelled_errors
from tests.program_tables import MODELS
from tests.programs import config, marks, model, needs_qnn, program

SEED = 4
DEFAULTS = {
    "prge": {"queries": 3, "rank": 4},
    "mezo": {"queries": 2, "perturbation_scale": 1e-2},
    "lora": {"rank": 4},
    "lora-fa": {"rank": 4},
    "full": {},
    "slideformer": {"compute": "float32"},
    "lsp": {"compute": "float32", "subspace": 1024},
    "mesp": {"rank": 4},
    "revffn": {"skip_stage1": True},
}
ROWS = [
    pytest.param(
        row,
        id=row.name,
        marks=[*marks(row.program), *([pytest.mark.gpu] if row.backend == "torch-cuda" else [])],
    )
    for row in TABLE
]


def every_second(rows: list[Any]) -> list[Any]:
    """Leave every second row to the nightly job, but for those on a GPU, which it does not have."""
    return [
        pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.nightly])
        if place % 2 and row.values[0].backend != "torch-cuda"
        else row
        for place, row in enumerate(rows)
    ]


def method(row: Row) -> Any:
    if row.program:
        return artifacts.export_jobs(config(row.program))[0].method
    return method_config(row.method, {**DEFAULTS[row.method], **row.settings})


def open_row(row: Row) -> Any:
    """A fresh session of the pair, ready for its first step."""
    session = opened(row)
    if not row.program and isinstance(session, Preparing):
        session.before_step(0, lambda step: Batch(*batch(2, seed=step)), Path(scratch().name))
    return session


def opened(row: Row) -> Any:
    if row.backend == "android-npu":
        needs_qnn()
    if row.program:
        return open_artifact(program(row.program))
    if row.backend in ("mlx-cpu", "apple-mlx"):
        return open_in_mlx(row)
    if row.backend in ARTIFACTS:
        return open_packed(row)
    loaded = tiny_model(row.family, **row.sizes)
    if row.backend == "torch-cuda" and not registry.method(row.method).capability(Offloads):
        loaded.model.cuda()
    session = open_session(loaded, method(row), SEED, row.backend.removeprefix("torch-"))
    assert session.backend == row.backend
    return session


def open_in_mlx(row: Row) -> Any:
    """From files, as MLX reads them; or exported, and opened from there."""
    pytest.importorskip("mlx.core")
    if row.backend == "mlx-cpu":
        return open_session(open_model(str(files(row))), method(row), SEED, backend="mlx")
    return open_artifact(artifact(row))


def open_packed(row: Row) -> Any:
    """Exported, and opened on the CPU."""
    if row.quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    return TorchProgramSession(artifact(row), read_manifest(artifact(row)), "cpu")


@functools.cache
def files(row: Row) -> Path:
    """The row's model as a folder; as an artifact, the same for every test of this file."""
    return save_tiny(Path(scratch().name) / f"model {row.name}", row.family, **row.sizes)


@functools.cache
def artifact(row: Row) -> Path:
    """The row's artifact."""
    export = ExportConfig(
        target=row.backend,
        lengths_tokens=(12, 16),
        batch_size=2,
        check_steps=1,
        quantize=row.quantize,
    )
    kind = {"dtype": "float32"} if row.backend in ARTIFACTS and row.backend != "apple-mlx" else {}
    job = ExportJob(ModelConfig(source=str(files(row)), **kind), method(row), export, SEED)
    out = Path(scratch().name) / f"artifact {row.name}"
    find_target(row.backend).export(job, out)
    return out


@functools.cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory()


def round_weights(plain: Any, row: Row) -> None:
    """Give a reference the weights of a packed model, made dense."""
    loaded = tiny_model(row.family, **row.sizes)
    pack_model(loaded.family, row.quantize)
    unpack_model(loaded.family)
    rounded = loaded.model.state_dict()
    model = plain.reference.model if isinstance(plain, PlainPrge) else plain.model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(rounded[name])
    if isinstance(plain, PlainPrge):
        held = plain.reference
        held.base = {entry: held._weight(entry).detach().clone() for entry in held.base}


def round_to_file(plain: Any, session: Any) -> None:
    """Give a reference the weights on the grids of a block program's file: 8 bits with a scale a
    row, or 4 bits."""
    with torch.no_grad():
        for name, parameter in in_file(plain, session):
            weight = parameter.numpy()
            scales = session.weights.whole(f"{name}_scale").astype(np.float64)
            if f"{name}_min" in session.weights:
                mins = session.weights.whole(f"{name}_min").astype(np.float64)
                if f"{name}_top" in session.weights:
                    tops = session.weights.whole(f"{name}_top").astype(np.float32)
                    # In float16, as a function makes them.
                    scales = np.float16(np.float32(scales) * (tops[:, :1] / np.float32(255)))
                    mins = np.float16(np.float32(mins) * (tops[:, 1:] / np.float32(127)))
                scales, mins = scales.astype(np.float64), mins.astype(np.float64)[..., None]
                groups = weight.reshape(*mins.shape[:2], -1)
                levels = ((groups - mins) / scales[..., None]).round().clip(0, 15)
                rounded = (levels * scales[..., None] + mins).reshape(weight.shape)
            else:
                rounded = (weight / scales[:, None]).round().clip(-127, 127) * scales[:, None]
            parameter.copy_(torch.from_numpy(rounded))


def in_file(plain: Any, session: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weights of what the file has rounded; it has each layer's part of Gemma 4's
    embeddings for layers by itself, and each expert of a mixture."""
    for name, parameter in plain.model.named_parameters():
        if f"{name}_scale" in session.weights:
            yield name, parameter
        if f"{name}.0_scale" in session.weights:
            axis = 1 if "embed_tokens" in name else 0
            for layer, part in enumerate(parameter.chunk(session.spec.layers, axis)):
                yield f"{name}.{layer}", part
        if ".experts." in name:
            for expert, part in enumerate(parameter):
                own = name.replace(".experts.", f".experts.{expert}.")
                if f"{own}_scale" in session.weights:
                    yield own, part


def reference(row: Row, session: Any) -> Plain:
    """The method in memory, at the same start, over the same weights."""
    plain = in_memory(row, session)
    if row.program.startswith("blocks"):
        round_to_file(plain, session)
    if row.quantize != "none":
        round_weights(plain, row)
    return plain


def in_memory(row: Row, session: Any) -> Plain:
    """The method in memory, at the same start."""
    family, sizes = row.family, row.sizes
    if row.program == "q4":
        return EagerProgram(row)
    if row.method == "prge" and row.program and config(row.program).method.factors is not None:
        return EagerSubspace(row)
    if row.program:
        source = next(
            name for name in MODELS if str(model(name)) == config(row.program).model.source
        )
        sizes = dict(MODELS[source])
        family = sizes.pop("family")
    if "optimizer" in row.settings and row.method == "prge":
        return PlainSubspace(method(row), SEED, family, sizes, session.state())
    if row.method == "prge":
        return PlainPrge(method(row), SEED, family, sizes)
    if row.method == "mezo":
        return PlainMezo(method(row), SEED, family, sizes)
    start = trained(session)
    if row.method == "revffn":
        return PlainRevffn(method(row), start, family, sizes)
    return PlainFirstOrder(method(row), start, family, sizes)


class EagerProgram:
    """A quantised program in eager PyTorch, with the same rounded weights."""

    def __init__(self, row: Row) -> None:
        settings = config(row.program)
        self.program = build_program(
            load_model(settings.model.source), settings.method, settings.export, SEED
        )
        self.seed, self.flat = torch.tensor([SEED]), torch.zeros(self.program.layout.size)

    @torch.no_grad()
    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, number = (torch.from_numpy(ids), torch.from_numpy(labels)), torch.tensor([step])
        losses = self.program.losses(*tokens, self.program.perturbed(self.flat, self.seed, number))
        return losses.numpy(), self.program.projected_gradients(losses).numpy()

    @torch.no_grad()
    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None:
        number, rate = torch.tensor([step]), torch.tensor([learning_rate])
        given = torch.from_numpy(gradients.astype(np.float32))
        self.flat = self.program.apply_update(self.flat, given, self.seed, number, rate)

    def trained(self) -> dict[str, np.ndarray]:
        family = self.program.family
        keys = [(entry.layer, entry.target) for entry in self.program.layout.entries]
        return self.program.layout.to_tensors(
            self.flat.numpy(), {key: family.linear_name(*key) for key in keys}
        )


class EagerSubspace:
    """A session in PyTorch in the subspace that the program begins in."""

    def __init__(self, row: Row) -> None:
        own = method(row).model_copy(update={"factors": None, "refresh_every": None}).for_training()
        self.session = PrgeSession(load_model(config(row.program).model.source), own, SEED)
        self.session.before_replay(0, method(row).factors.parent)

    @torch.no_grad()
    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        program, tokens = self.session.program, (torch.from_numpy(ids), torch.from_numpy(labels))
        at = program.perturbed(self.session._adapter, self.session.seed, torch.tensor([step]))
        losses = program.losses(*tokens, at)
        return losses.numpy(), program.projected_gradients(losses).numpy()

    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None:
        self.session.apply_update(tuple(gradients.tolist()), step, learning_rate)

    def trained(self) -> dict[str, np.ndarray]:
        """The adapter with room for earlier subspaces, which is three times its own directions."""
        room = {"A": ((0, 48), (0, 0)), "B": ((0, 0), (0, 48))}
        tensors = self.session.adapter().tensors
        return {
            name: np.pad(value, room["A" if "lora_A" in name else "B"])
            for name, value in tensors.items()
        }


def batches(session: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    rows, lengths = session.batch_size or 2, session.lengths_tokens or (12, 16)
    given = [batch(rows, lengths[step % len(lengths)], seed=step) for step in range(STEPS)]
    answers = session.manifest.method.get("answers") if hasattr(session, "manifest") else ()
    for step, (_, labels) in enumerate(given):
        if answers:  # a row has one
            last = (labels != -100).cumsum(1).argmax(1)
            labels[:] = -100
            labels[np.arange(rows), last] = np.random.default_rng(step).choice(answers, rows)
    return given


@pytest.mark.nightly
@pytest.mark.parametrize(
    "row",
    [
        row
        for row in ROWS
        if (row.values[0].method, row.values[0].backend) == ("mesp", "android-npu")
    ],
)
def test_limits_of_mesp_on_the_npu_are_float16_s(row) -> None:
    """The model: each operation of a block errs by a unit roundoff of float16, drawn anew, and the
    steps follow their own updates. Limits are at most six times what that makes of losses and A, B,
    and no loss is held to less than the model."""
    session = open_row(row)
    rate = LEARNING_RATE[row.method]

    def steps() -> dict[str, np.ndarray]:
        plain = in_memory(row, session)
        losses = []
        for step, (ids, labels) in enumerate(batches(session)):
            losses.append(plain.step(ids, labels, step)[0])
            plain.apply(np.array([]), step, rate)
        return {"losses": np.concatenate(losses)} | {
            n: v.copy() for n, v in plain.trained().items()
        }

    def errors(values: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, float]:
        found = {n: float(np.abs(values[n] - wanted).max()) for n, wanted in exact.items()}
        relative = np.abs(values["losses"] / exact["losses"] - 1.0)
        return found | {"losses": float(relative.max())}

    vocab = 260
    _, modelled = modelled_errors(steps, errors, lambda seed: HalfRounding(seed, vocab))
    loss = modelled.pop("losses")
    assert loss <= row.loss_error <= ALLOWED * loss
    assert row.adapter_error <= ALLOWED * max(modelled.values())


def trained(session: Any) -> dict[str, np.ndarray]:
    adapter = session.adapter()
    if adapter is not None:
        return adapter.tensors
    if hasattr(session, "engine"):
        session.engine.flush()
        return {name: value.numpy() for name, value in session.engine.store.masters().items()}
    return {name: session.state()[name] for name in session.parameters}


def compared(name: str, value: np.ndarray) -> np.ndarray:
    """A trained tensor without GPT-2's bias of the keys (the middle of `c_attn.bias`): it adds the
    same to every score of a query, so that its gradient is rounding alone, and AdamW makes whole
    steps of that."""
    third = len(value) // 3
    return np.delete(value, slice(third, 2 * third)) if name.endswith("c_attn.bias") else value


@pytest.mark.parametrize("row", ROWS)
def test_losses_and_updates_match_the_reference(row) -> None:
    session = open_row(row)
    expected, rate = reference(row, session), LEARNING_RATE[row.method]
    for step, (ids, labels) in enumerate(batches(session)):
        losses, gradients = expected.step(ids, labels, step)
        result = session.step(ids, labels, step, rate)
        np.testing.assert_allclose(result.losses, losses, rtol=row.loss_error)
        received = np.array(result.projected_gradients)
        if received.size:
            np.testing.assert_allclose(
                received, gradients, atol=row.gradient_error * np.abs(gradients).max()
            )
        expected.apply(
            received, step, rate
        )  # the same scalars on both sides: rounding does not add up
    ours, theirs = trained(session), expected.trained()
    assert ours.keys() == theirs.keys()
    for name in ours:
        received, wanted = compared(name, ours[name]), compared(name, theirs[name])
        np.testing.assert_allclose(received, wanted, atol=row.adapter_error, err_msg=name)
    assert any(np.abs(value).max() > 0 for name, value in ours.items() if "lora_A" not in name)


@pytest.mark.parametrize("row", [row for row in ROWS if answers(row.values[0])])
def test_answers_are_greedy_tokens_of_the_reference(row) -> None:
    """Behind a prompt that is read in chunks, over the weights and the adapter of a step."""
    session = open_row(row)
    expected, rate = reference(row, session), 10 * LEARNING_RATE[row.method]
    for step, (ids, labels) in enumerate(batches(session)[:2]):
        session.step(ids, labels, step, rate)
    adapter = session.adapter()
    for name, value in adapter.tensors.items():
        expected.leaves[name].data = torch.from_numpy(value).double()
    prompt = list(b"A prompt of thirty-seven tokens, not 32.")[:37]
    count = min(20, session.spec.context_tokens - len(prompt))
    (found,) = session.answer_prompt(prompt, [PlainSampler(0.0)], count)
    with torch.no_grad():
        options = (torch.tensor([prompt + found]),), {"use_cache": False}
        logits = torch.func.functional_call(expected.model, expected._weights(), *options).logits
    wanted = logits[0, -len(found) - 1 : -1]
    assert wanted.argmax(-1).tolist() == found


@pytest.mark.parametrize("row", every_second(ROWS))
def test_a_resumed_run_matches_an_uninterrupted_run_bit_for_bit(row) -> None:
    straight, first, second = open_row(row), open_row(row), open_row(row)
    rate, half = LEARNING_RATE[row.method], STEPS // 2
    given = batches(straight)
    results = [straight.step(*given[step], step, rate) for step in range(STEPS)]
    for step in range(half):
        assert first.step(*given[step], step, rate) == results[step]
    second.load_state({name: value.copy() for name, value in first.state().items()})
    for step in range(half, STEPS):
        assert second.step(*given[step], step, rate) == results[step]
    ours, theirs = straight.state(), second.state()
    assert ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == theirs[name].tobytes() for name in ours
    )


@pytest.mark.parametrize(
    "row",
    every_second(
        [row for row in ROWS if row.values[0].method in ("prge", "lora", "lora-fa", "mesp")]
    ),
)
def test_the_adapter_goes_through_a_file(row, tmp_path) -> None:
    session, other = open_row(row), open_row(row)
    given = batches(session)
    for step, (ids, labels) in enumerate(given):
        session.step(ids, labels, step, LEARNING_RATE[row.method])
    save_adapter(session.adapter(), tmp_path / "adapter")
    other.load_adapter(load_adapter(tmp_path / "adapter"))
    rows = session.eval_batch_size or 2
    ids, labels = batch(rows, given[0][0].shape[1], seed=99)
    (ours, count), (theirs, same) = session.evaluate(ids, labels), other.evaluate(ids, labels)
    assert (
        ours.tobytes() == theirs.tobytes() and count.tolist() == same.tolist() and count.min() > 0
    )
    assert trained(other).keys() == trained(session).keys()


def test_every_method_and_target_is_in_the_table() -> None:
    from ondevice.core.registry import method_names, target_names

    assert {pair[0] for pair in claims()} == {*method_names()}
    assert {pair[1] for pair in claims()} - {"torch-cpu", "torch-cuda", "mlx-cpu"} == {
        *target_names()
    }


@pytest.mark.parametrize("family", ["gemma4_text", "lfm2", "qwen3_5_text"])
def test_blocks_known_by_hand_run_in_torch_mlx_android_and_slideformer_and_are_read_from_gguf(
    family: str,
) -> None:
    rows = {(row.method, row.backend) for row in TABLE if row.claimed and family_of(row) == family}
    assert rows >= {
        ("mesp", "torch-cpu"),
        ("mesp", "mlx-cpu"),
        ("mesp", "apple-mlx"),
        ("mesp", "android-cpu"),
        ("slideformer", "torch-cpu"),
    }
    assert family in (*exits.FAMILIES, *exits.MORE)
    assert "gguf" in exits.READERS and ("gguf", family) not in exits.WITHOUT
