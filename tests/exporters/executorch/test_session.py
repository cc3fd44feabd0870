"""The session of any program: what it binds by role, keeps, counts and refuses; the program here is
a few lines, which the runtime executes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.artifact.adapter import Adapter
from ondevice.artifact.manifest import read_manifest, write_manifest
from ondevice.core.errors import ArtifactError, CheckpointError
from ondevice.core.manifest import (
    AdapterEntry,
    Constant,
    Counter,
    GeneratorInfo,
    Manifest,
    ModelInfo,
    ProgramMethod,
    ProgramSpec,
    StateTensor,
    port,
    row_ports,
    token_ports,
)
from ondevice.exporters.executorch.session import ExecutorchSession

torch = pytest.importorskip("torch")
exir: Any = pytest.importorskip("executorch.exir")
save_file: Any = pytest.importorskip("safetensors.numpy").save_file
ENTRY = AdapterEntry(
    linear="model.layers.0.self_attn.q_proj",
    layer=0,
    target="q_proj",
    offset=4,
    rank=2,
    inputs=3,
    outputs=2,
)
A = np.arange(6, dtype=np.float32).reshape(2, 3)


class Step(torch.nn.Module):
    """A program's step whose outputs a test computes by hand."""

    def forward(
        self,
        ids: Any,
        labels: Any,
        vector: Any,
        average: Any,
        position: Any,
        done: Any,
        rate: Any,
        scale: Any,
    ) -> Any:
        losses = torch.cat((position + 0.0, done + 10.0 * scale))
        rows = (labels - ids).sum(1) + scale
        return losses, vector + rate, average + 1.0, rows, ids.sum(1) + 0.0


@cache
def step_program() -> bytes:
    """`Step` lowered for the runtime, once for all tests of this file."""
    rows = torch.zeros(2, 4, 8, dtype=torch.int64)
    counters = torch.zeros(2, 1, dtype=torch.int64)
    # A tensor of its own for each input: one that is given twice is one input.
    inputs = tuple(
        one.clone() for one in (*rows, *torch.zeros(2, 8), *counters, *torch.zeros(2, 1))
    )
    methods = {"train_step": torch.export.export(Step(), inputs)}
    return exir.to_edge_transform_and_lower(methods).to_executorch().buffer


class Watched(ExecutorchSession):
    """Keeps what its program's functions are called with."""

    def __init__(self, *arguments: Any) -> None:
        self.calls: list[tuple[str, list[np.ndarray]]] = []
        super().__init__(*arguments)

    def _run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        self.calls.append((name, [value.copy() for value in inputs]))
        return super()._run(name, *inputs)


def manifest(folder: Path, **changes: Any) -> Manifest:
    """One method for training and evaluation, four copies, a state of two tensors with names of its
    own."""
    state = port("vector", "state", (8,)), port("average", "state", (8,))
    inputs = (
        *token_ports(4, 8),
        *state,
        port("position", "counter", (1,), "int64"),
        port("done", "counter", (1,), "int64"),
        port("learning_rate", "learning_rate", (1,)),
        port("scale", "constant", (1,)),
    )
    outputs = (port("losses", "losses", (2,)), *state, *row_ports(4))
    step = ProgramMethod(
        inputs=inputs,
        outputs=outputs,
        planned_bytes=0,
        ops=("aten::add.out",),
        delegates=0,
        instructions=1,
    )
    program = ProgramSpec(
        methods={"train_step": step},
        state=(
            StateTensor(
                name="vector",
                dtype="float32",
                shape=(8,),
                role="adapter",
                first="first.safetensors",
            ),
            StateTensor(name="average", dtype="float32", shape=(8,), role="optimizer"),
        ),
        counters=(
            Counter(name="position", counts="run_steps"),
            Counter(name="done", counts="updates"),
        ),
        constants=(Constant(name="scale", train=0.5, evaluate=0.0),),
        batch_copies=4,
        evaluates_with="train_step",
        frozen="frozen.safetensors",
        layout=(ENTRY,),
        adapter_size=8,
        rank=2,
        alpha=8.0,
    )
    folder.mkdir(exist_ok=True)
    save_file({"vector": np.full(8, 2.0, np.float32)}, folder / "first.safetensors")
    save_file({f"{ENTRY.linear}.lora_A.weight": A}, folder / "frozen.safetensors")
    (folder / "program.pte").write_bytes(step_program())
    values: dict[str, Any] = {
        "ondevice_version": "0",
        "runtime": "executorch 0",
        "target": "android-cpu",
        "method": {"name": "a method that nobody has"},
        "model": ModelInfo(source="tiny:llama", sha256="0", dims={}),
        "program_spec": program,
        "quantize": "none",
        "loss": "tiled",
        "lengths_tokens": (8,),
        "batch_size": 1,
        "eval_batch_size": 4,
        "generator": GeneratorInfo(distribution="none", lowering="none", seed=9),
        "tokenizer_sha256": "0",
    }
    return Manifest(**{**values, **changes})


def test_a_step_and_an_evaluation_are_bound_by_role(tmp_path: Path) -> None:
    session = Watched(tmp_path, manifest(tmp_path))
    ids = np.arange(8).reshape(1, 8)
    result = session.step(ids, ids + 1, 7, 0.25)
    (name, values) = session.calls.pop()
    assert name == "train_step" and result.loss == 6.0 and result.projected_gradients == ()
    assert values[0].tolist() == ids.tolist() * 4 and values[1].tolist() == (ids + 1).tolist() * 4
    assert values[2].tolist() == [2.0] * 8 and values[3].tolist() == [0.0] * 8
    assert [value.tolist() for value in values[4:]] == [[7], [0], [0.25], [0.5]]

    assert session.step(ids, ids, 9, 0.5).losses == (9.0, 6.0)
    assert [value.tolist() for value in session.calls.pop()[1][4:6]] == [[9], [1]]
    state = session.state()
    assert state.keys() == {"vector", "average", "seed", "done"} and state["done"].tolist() == [2]
    assert state["vector"].tolist() == [2.75] * 8 and state["average"].tolist() == [2.0] * 8

    rows = np.arange(32).reshape(4, 8)
    losses, tokens = session.evaluate(rows, rows + np.arange(4)[:, None])
    assert losses.tolist() == [0.0, 8.0, 16.0, 24.0] and tokens.tolist() == rows.sum(1).tolist()
    values = session.calls.pop()[1]
    assert [value.tolist() for value in values[6:]] == [
        [0.0],
        [0.0],
    ]  # the rate and the constant of an evaluation
    assert session.state()["vector"].tolist() == state["vector"].tolist()


def test_its_state_goes_out_and_in_and_another_s_is_refused(tmp_path: Path) -> None:
    session, ids = ExecutorchSession(tmp_path, manifest(tmp_path)), np.zeros((1, 8), np.int64)
    session.step(ids, ids, 0, 0.25)
    state = session.state()
    session.restart()
    assert session.state()["vector"].tolist() == [2.0] * 8 and session.state()["done"].tolist() == [
        0
    ]
    session.load_state(state)
    assert all(value.tolist() == state[name].tolist() for name, value in session.state().items())
    for lacking in state:
        with pytest.raises(CheckpointError) as error:
            session.load_state({name: value for name, value in state.items() if name != lacking})
        assert lacking in str(error.value)


def test_the_frozen_a_is_the_file_s(tmp_path: Path) -> None:
    session = ExecutorchSession(tmp_path, manifest(tmp_path))
    given = session.adapter()
    names = f"{ENTRY.linear}.lora_A.weight", f"{ENTRY.linear}.lora_B.weight"
    assert (
        given.tensors[names[0]].tolist() == A.tolist()
        and given.target_modules == ("q_proj",)
        and given.alpha == 8.0
    )
    b = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)

    def changed(a: np.ndarray = A, **more: Any) -> Adapter:
        values = {"rank": 2, "alpha": 8.0, "target_modules": ("q_proj",), "base_model": "", **more}
        return Adapter({names[0]: a, names[1]: b}, **values)

    session.load_adapter(changed(A + np.float32(5e-7)))
    assert session.flat()[4:].tolist() == [1.0, 3.0, 2.0, 4.0]  # B is kept transposed
    for adapter, word in (
        (changed(A + np.float32(1e-5)), ENTRY.linear),
        (changed(alpha=4.0), "alpha"),
        (changed(rank=3), "rank"),
        (changed(A[:, :2]), names[0]),
    ):
        with pytest.raises(ArtifactError) as error:
            session.load_adapter(adapter)
        assert word in str(error.value)


def test_an_artifact_of_the_old_schema_says_what_to_do(tmp_path: Path) -> None:
    write_manifest(manifest(tmp_path), tmp_path)
    assert read_manifest(tmp_path).program_spec.layout == (ENTRY,)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(ArtifactError) as error:
        read_manifest(tmp_path)
    assert "export the model again" in str(error.value)


@pytest.mark.parametrize(
    "change", [{"counters": ()}, {"state": ()}, {"frozen": None}, {"adapter_size": 7}]
)
def test_a_program_whose_ports_nobody_feeds_is_no_manifest(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    values = manifest(tmp_path).program_spec.model_dump()
    with pytest.raises(ValueError, match=r"no counter|no state|need a file|adapter_size"):
        ProgramSpec.model_validate(values | change)
