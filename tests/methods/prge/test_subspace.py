"""P-RGE in the subspace of an exact gradient: the factors, the steps against float64, refreshes,
resume and replay."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ondevice.api.export import export  # noqa: E402
from ondevice.api.open import open_artifact  # noqa: E402
from ondevice.api.runfile import RunConfig  # noqa: E402
from ondevice.api.train import train  # noqa: E402
from ondevice.artifact.adapter import load_adapter  # noqa: E402
from ondevice.core.config import ExportConfig  # noqa: E402
from ondevice.core.errors import CheckpointError, ConfigError  # noqa: E402
from ondevice.data.batching import Batch  # noqa: E402
from ondevice.data.examples import Example  # noqa: E402
from ondevice.methods.prge.config import PrgeConfig  # noqa: E402
from ondevice.methods.prge.layout import AdapterLayout  # noqa: E402
from ondevice.methods.prge.program import build_program  # noqa: E402
from ondevice.methods.prge.subspace import gradient_factors, joined, leading_vectors, read_factors  # noqa: E402
from ondevice.methods.prge.subspace_program import SubspaceProgram, at_export  # noqa: E402
from ondevice.methods.prge.torch import PrgeSession  # noqa: E402
from ondevice.models import tiny_model  # noqa: E402
from ondevice.runtime_ops import generator  # noqa: E402
from ondevice.training.replay import read_run, replay  # noqa: E402
from tests.eager_program import computing_in_pytorch  # noqa: E402
from tests.methods.prge.refreshes import hold_two_refreshes  # noqa: E402
from tests.methods.reference import batch  # noqa: E402
from tests.programs import config  # noqa: E402

SEED = 3


def settings(**more: Any) -> PrgeConfig:
    values = {"subspace": "gradient", "rank": 1, "alpha": 2.0, "queries": 2}
    return PrgeConfig(**(values | {"calibration_rows": 5, "refresh_every": 2} | more))


def batch_at(step: int) -> Batch:
    return Batch(*batch(2, seed=step))


def test_leading_vectors_are_the_svd_s() -> None:
    random = torch.Generator().manual_seed(1)
    matrix = (
        torch.randn(21, 17, generator=random)
        * 0.6 ** torch.arange(17)
        @ torch.randn(17, 17, generator=random)
    )
    left, right = leading_vectors(matrix, 4)
    values = torch.linalg.svdvals(matrix.double())
    np.testing.assert_allclose(
        (left.t() @ matrix @ right).numpy(), torch.diag(values[:4]).numpy(), atol=2e-5
    )
    np.testing.assert_allclose((left.t() @ left).numpy(), np.eye(4), atol=1e-6)


def test_a_sum_of_products_is_exact_up_to_its_rank() -> None:
    random = torch.Generator().manual_seed(2)
    parts = [
        (torch.randn(9, 2, generator=random), torch.randn(2, 7, generator=random)) for _ in range(3)
    ]
    whole = sum(a @ b for a, b in parts)
    a, b = joined(parts, 6)
    assert a.shape == (9, 6)
    torch.testing.assert_close(a @ b, whole)
    a, b = joined(parts, 5)
    u, s, v = torch.linalg.svd(whole.double())
    torch.testing.assert_close((a @ b).double(), u[:, :5] * s[:5] @ v[:5], rtol=1e-5, atol=1e-5)
    for rows, columns in ((9, 4), (4, 9)):  # a layer narrower than the rank
        parts = [(torch.randn(rows, 2), torch.randn(2, columns)) for _ in range(4)]
        a, b = joined(parts, 6)
        torch.testing.assert_close(a @ b, sum(a @ b for a, b in parts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_is_the_estimate_in_the_gradient_s_subspace(tmp_path: Path, optimizer: str) -> None:
    """Factors span the plain model's gradient; losses are of W + scale A (R + e Z) C; the update is
    the rule's."""
    session = PrgeSession(
        tiny_model(), settings(optimizer=optimizer, perturbation_scale=1e-2), SEED
    )
    path = session.before_step(0, batch_at, tmp_path)
    assert path == tmp_path / "subspace-00000000.safetensors" and path.is_file()
    plain = tiny_model()
    weights = {
        entry: plain.family.linear(entry.layer, entry.target).weight
        for entry in session.program.linears
    }
    for weight in weights.values():
        weight.requires_grad_(True)
    squares = {entry: torch.zeros(entry.inputs) for entry in weights}
    for entry in weights:

        def add(_: object, inputs: Any, total: torch.Tensor = squares[entry]) -> None:
            total += inputs[0].detach().square().flatten(0, -2).sum(0)

        name = plain.family.linear_name(entry.layer, entry.target)
        plain.model.get_submodule(name).register_forward_pre_hook(add)
    left = 5
    for step in range(3):
        for ids, labels in zip(*(torch.from_numpy(x) for x in batch(2, seed=step)), strict=True):
            if left:
                plain.model(input_ids=ids[None], labels=labels[None]).loss.backward()
                left -= 1
    assert session.subspace is not None
    for entry, factors in session.subspace.factors.items():
        gradient = weights[entry].grad.t()
        u, _, v = torch.linalg.svd(gradient.double())
        assert factors.a.shape[1] == 4  # directions a unit of rank
        for ours, exact in ((factors.a.double(), u[:, :4]), (factors.c.double().t(), v[:4].t())):
            cosines = torch.linalg.svdvals(torch.linalg.qr(ours)[0].t() @ exact)
            assert cosines.min() > 0.999
        # The docstring's scales: the default rate is for them. (Tokens after the last label are not run.)
        passed = (factors.a.square() * squares[entry][:, None]).sum()
        torch.testing.assert_close(passed, 4 * squares[entry].mean(), rtol=5e-3, atol=0.0)
        rows = factors.c @ factors.c.t()
        torch.testing.assert_close(rows, torch.eye(4) * entry.outputs / 4, rtol=1e-4, atol=1e-3)

    ids, labels = batch(2, seed=0)
    before = session.flat().copy()
    result = session.step(ids, labels, 0, 1e-2)
    size = session.program.layout.size
    z = generator.normal(SEED, 0, 0, 2, 0, size)
    for copy, (sign, query) in enumerate([(1, 0), (1, 1), (-1, 0), (-1, 1)]):
        moved = tiny_model()
        for entry, factors in session.subspace.factors.items():
            r = np.diag(sign * 1e-2 * z[query, entry.offset : entry.offset + entry.count])
            change = (
                2.0 * factors.a.double().numpy() @ r @ factors.c.double().numpy()
            )  # alpha / rank = 2
            weight = moved.family.linear(entry.layer, entry.target).weight
            weight.data += torch.from_numpy(change.T).float()
        with torch.no_grad():
            expected = moved.model(
                input_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels)
            ).loss
        assert result.losses[copy] == pytest.approx(expected.item(), rel=1e-5)
    estimate = np.array(result.projected_gradients) @ z.astype(np.float64) / 2
    step = estimate if optimizer == "sgd" else np.sign(estimate)  # Adam's first step is the sign
    np.testing.assert_allclose(
        session.flat()[:size], before[:size] - 1e-2 * step, rtol=2e-4, atol=1e-6
    )


def test_adam_s_second_step_is_torch_s(tmp_path: Path) -> None:
    session = PrgeSession(tiny_model(), settings(optimizer="adam", refresh_every=3), SEED)
    size, reference = (
        session.program.layout.size,
        torch.nn.Parameter(torch.zeros(session.program.layout.size)),
    )
    adam = torch.optim.Adam([reference])
    session.before_step(0, batch_at, tmp_path)
    for step in range(5):
        if step == 3:  # a new subspace begins with moments of 0
            session.before_step(step, batch_at, tmp_path)
            reference.data.zero_()
            adam = torch.optim.Adam([reference])
        result = session.step(*batch(2, seed=step), step, 1e-2 / (step + 1))
        z = torch.from_numpy(generator.normal(SEED, step, 0, 2, 0, size))
        reference.grad = torch.tensor(result.projected_gradients) @ z / 2
        adam.param_groups[0]["lr"] = 1e-2 / (step + 1)
        adam.step()
        np.testing.assert_allclose(
            session.flat()[:size], reference.detach().numpy(), rtol=2e-4, atol=2e-6
        )


def test_adam_in_a_random_subspace_is_torch_s_in_a_session_and_in_a_program() -> None:
    """Its moments never begin anew there, and they begin at 0 beside an adapter that is loaded."""
    config = settings(subspace="random", optimizer="adam", refresh_every=2, rank=4)
    session, seed = PrgeSession(tiny_model(), config, SEED), torch.tensor([SEED])
    program = build_program(
        tiny_model(), config, ExportConfig(lengths_tokens=(12,), generator="op"), SEED
    )
    size = session.program.layout.size
    reference = torch.nn.Parameter(torch.zeros(size))
    adam = torch.optim.Adam([reference], lr=1e-2)
    state = tuple(torch.zeros(number) for number in program.state_shapes.values())
    for step in range(4):
        ids, labels = batch(2, seed=step)
        result = session.step(ids, labels, step, 1e-2)
        z = torch.from_numpy(generator.normal(SEED, step, 0, 2, 0, size))
        numbers = torch.tensor(result.projected_gradients)
        reference.grad = numbers @ z / 2
        adam.step()
        with torch.no_grad():
            losses = program.stepped(
                *map(torch.from_numpy, (ids, labels)),
                state,
                seed,
                torch.tensor([step]),
                torch.zeros(1),
            )[0]
            state = program.update(state, numbers, seed, torch.tensor([step]), torch.tensor([1e-2]))
        np.testing.assert_allclose(result.losses, losses.numpy(), rtol=1e-5)
        for flat in (session.flat()[:size], state[0].numpy()):
            np.testing.assert_allclose(flat, reference.detach().numpy(), rtol=2e-4, atol=2e-6)
    np.testing.assert_array_equal(state[1][: 2 * size].numpy(), session.flat()[size:])
    other = PrgeSession(tiny_model(), config, SEED)
    other.load_adapter(session.adapter())
    assert not other.flat()[size:].any() and np.array_equal(
        other.flat()[:size], session.flat()[:size]
    )
    other.step(*batch(2), 0, 1e-2)


def test_a_new_subspace_keeps_what_was_learned_and_the_adapter_is_the_model(tmp_path: Path) -> None:
    session = PrgeSession(tiny_model(), settings(optimizer="adam"), SEED)
    ids, labels = batch(3, seed=9)
    for step in range(6):
        before = session.evaluate(ids, labels)[0]
        wrote = session.before_step(step, batch_at, tmp_path)
        assert (wrote is not None) == (step % 2 == 0)
        np.testing.assert_allclose(session.evaluate(ids, labels)[0], before, rtol=1e-5)
        session.step(*batch(2, seed=step), step, 2e-2)
    adapter = session.adapter()
    assert adapter.rank == 12 and adapter.alpha == 24.0  # three subspaces of four directions
    merged = tiny_model()
    for entry in session.program.linears:
        name = session.names[(entry.layer, entry.target)]
        a, b = (adapter.tensors[f"{name}.lora_{x}.weight"] for x in "AB")
        merged.family.linear(entry.layer, entry.target).weight.data += torch.from_numpy(2.0 * b @ a)
    own = session.evaluate(ids, labels)[0]
    other = PrgeSession(merged, settings(), SEED).evaluate(ids, labels)[0]
    np.testing.assert_allclose(own, other, rtol=1e-5)
    assert (
        np.abs(own - PrgeSession(tiny_model(), settings(), SEED).evaluate(ids, labels)[0]).max()
        > 1e-3
    )
    started = PrgeSession(tiny_model(), settings(), SEED)
    started.load_adapter(adapter)
    np.testing.assert_allclose(started.evaluate(ids, labels)[0], own, rtol=1e-5)


def test_a_program_s_state_follows_the_session(tmp_path: Path) -> None:
    """Exported, the subspace is a part of the state: the same losses, numbers, moments and adapter."""
    session = PrgeSession(tiny_model(), settings(answers=(70, 9), optimizer="adam"), SEED)
    path = session.before_step(0, batch_at, tmp_path)
    config = settings(subspace="auto", factors=path, answers=(70, 9), refresh_every=None)
    program = build_program(
        tiny_model(), config, ExportConfig(lengths_tokens=(12,), generator="op"), SEED
    )
    assert (
        isinstance(program, SubspaceProgram) and path is not None and session.subspace is not None
    )
    spans = program.spans
    begun = spans.begun(read_factors(path, spans.small.entries))
    first = [torch.from_numpy(begun[name]) for name in ("adapter", "subspace")]
    state = (*first, torch.zeros(program.state_shapes["moments"]))
    seed, rate = torch.tensor([SEED]), torch.tensor([0.05])
    for step in range(2):  # then the session's moments would begin anew
        ids, labels = batch(2, seed=step)
        labels[:, :-1], labels[:, -1] = -100, (9, 70)
        result = session.step(ids, labels, step, 0.05)
        with torch.inference_mode():
            tokens = torch.from_numpy(ids), torch.from_numpy(labels)
            losses, gradients, *state = program.stepped(
                *tokens, state, seed, torch.tensor([step]), rate
            )
        np.testing.assert_allclose(result.losses, losses.numpy(), rtol=1e-5)
        np.testing.assert_allclose(
            result.projected_gradients, gradients.numpy(), rtol=1e-2, atol=1e-3
        )
    size = spans.small.size
    np.testing.assert_allclose(session.flat()[size:], state[2][:-1].numpy(), rtol=2e-2, atol=1e-4)
    assert state[2][-1] == 2
    adapter = session.adapter()
    for of_r, entry in zip(spans.small.entries, spans.trained.entries, strict=True):
        name = session.names[(entry.layer, entry.target)]
        a, b = (adapter.tensors[f"{name}.lora_{x}.weight"] for x in "AB")
        np.testing.assert_array_equal(spans.a(state[0], entry).numpy(), a)
        np.testing.assert_allclose(spans.b(state[0], entry).numpy().T, b, rtol=5e-3, atol=1e-5)
        assert np.abs(b).max() > 1e-2 and of_r.rank == entry.rank == 4
    small = settings(rank=1, target_modules=("q_proj",))
    wide = PrgeSession(tiny_model(), settings(rank=2, target_modules=("q_proj",)), SEED)
    path = wide.before_step(0, batch_at, tmp_path)
    assert path is not None and wide.subspace is not None
    leading = read_factors(path, AdapterLayout.build(tiny_model().dims, small, SEED).entries)
    for (_, whole), (_, few) in zip(wide.subspace.factors.items(), leading.items(), strict=True):
        torch.testing.assert_close(few.a, whole.a[:, :4])
        torch.testing.assert_close(few.c, whole.c[:4] * 2**0.5)
    with pytest.raises(ConfigError) as error:
        PrgeSession(tiny_model(), config, SEED)
    assert error.value.received == str(config.factors)


def test_a_program_moves_every_matrix_by_its_own_numbers(tmp_path: Path) -> None:
    """With ranges of R that share bits with their beginnings."""
    square: dict[str, Any] = {"rank": 16, "target_modules": ("q_proj", "o_proj")}
    session = PrgeSession(tiny_model(), settings(**square), SEED)
    path = session.before_step(0, batch_at, tmp_path)
    assert path is not None
    config = settings(**square, subspace="auto", factors=path, refresh_every=None)
    program = build_program(tiny_model(), config, ExportConfig(lengths_tokens=(12,)), SEED)
    assert isinstance(program, SubspaceProgram)
    spans = program.spans
    assert any(of_r.offset & of_r.count for of_r, _ in spans.pairs)
    begun = spans.begun(read_factors(path, spans.small.entries))
    first = [torch.from_numpy(begun[name]) for name in ("adapter", "subspace")]
    numbers, scalars = torch.tensor([0.5, -0.3]), (torch.tensor([SEED]), torch.tensor([2]))
    moved, _ = program.update(first, numbers, *scalars, torch.tensor([0.1]))
    z = generator.normal(SEED, 2, 0, 2, 0, spans.small.size)
    change = -0.1 * (0.5 * z[0] - 0.3 * z[1]) / 2
    for of_r, entry in spans.pairs:
        own = torch.from_numpy(change[of_r.offset :][: of_r.count])
        expected = own[:, None] * spans.c(first[1], entry)
        torch.testing.assert_close(
            spans.b(moved, entry)[: entry.rank], expected, rtol=1e-4, atol=1e-6
        )
        assert expected.abs().max() > 1e-3


def test_a_program_takes_new_subspaces_as_eager_does(tmp_path: Path) -> None:
    """Its functions in PyTorch; `tests/exporters/android_cpu/test_programs.py` has them lowered."""
    pytest.importorskip("executorch.exir")
    asked = config("subspace, answers")
    with computing_in_pytorch():
        path = export(asked, tmp_path / "program").path
        hold_two_refreshes(asked, lambda: open_artifact(path), tmp_path)


def test_an_export_begins_in_the_subspace_of_its_rows() -> None:
    """Its first state is the session's subspace of the same rows, and the model is as it was."""
    rows = [
        Example(tuple(ids), tuple(labels))
        for ids, labels in zip(*(x.tolist() for x in batch(4, seed=0)))
    ]
    dataset = SimpleNamespace(items=[SimpleNamespace(example=row) for row in rows])
    config, loaded = settings(subspace="auto", calibration_rows=4), tiny_model()
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    found = at_export(loaded, config, dataset, SEED)  # type: ignore[arg-type]
    assert found is not None
    after = loaded.model.state_dict()
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in after
    )
    recorded, state = found
    program = build_program(
        loaded, recorded, ExportConfig(lengths_tokens=(12,), generator="op"), SEED
    )
    assert isinstance(program, SubspaceProgram) and program.config.optimizer == "adam"
    exact = gradient_factors(
        PrgeSession(tiny_model(), settings(), SEED).program,
        ((torch.tensor([row.ids]), torch.tensor([row.labels])) for row in rows),
    )
    for value, entry in zip(exact.values(), program.spans.trained.entries, strict=True):
        a = program.spans.a(torch.from_numpy(state["adapter"]), entry)[: entry.rank].t()
        cosines = (a * value.a).sum(0).abs() / (a.norm(dim=0) * value.a.norm(dim=0))
        assert (
            cosines[0] > 0.999
            and not program.spans.b(torch.from_numpy(state["adapter"]), entry).any()
        )
    assert at_export(tiny_model(), settings(subspace="random"), dataset, SEED) is None  # type: ignore[arg-type]


def test_a_limit_of_labelled_tokens_gives_the_same_loss_or_none() -> None:
    config = PrgeConfig(rank=4, queries=1, labelled_tokens=2)
    program = build_program(
        tiny_model(), config, ExportConfig(lengths_tokens=(12,), generator="op"), SEED
    )
    ids = torch.from_numpy(batch(3)[0])
    labels = torch.where(torch.arange(12) < 9, -100, ids)
    hidden = program.hidden(ids, torch.zeros(program.state_size))
    assert not torch.isfinite(program.row_nll(hidden, labels)[0]).any()
    labels[0, -2:] = -100
    labels[1, -1] = -100  # one, two and three: no more than two a row in all
    nll, count = program.row_nll(hidden, labels)
    program.labelled_tokens = None
    expected, whole = program.row_nll(hidden, labels)
    torch.testing.assert_close(nll, expected)
    assert count.tolist() == whole.tolist() == [1, 2, 3]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    lines = [
        json.dumps({"prompt": f"row {i} ", "completion": "yes" if i % 2 else "no"})
        for i in range(12)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(rows: Path, out: Path, steps: int, resume: bool = False, **more: Any) -> Any:
    subspace = {"calibration_rows": 3, "refresh_every": 2}
    kept = {"checkpoint_every": 3, "schedule": "constant"}
    values = {
        "model": {"source": "tiny:llama"},
        "data": {"path": str(rows)},
        "method": {"name": "prge", "rank": 2, "queries": 2} | subspace | more,
        "train": {"steps": steps, "batch_size": 2, "out": str(out)} | kept,
    }
    return train(RunConfig.parse(values), resume=resume, force=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_resumes_and_replays_to_the_same_bits(
    rows: Path, tmp_path: Path, optimizer: str
) -> None:
    whole = run(rows, tmp_path / "whole", 5, optimizer=optimizer)
    run(rows, tmp_path / "cut", 3, optimizer=optimizer)
    cut = run(rows, tmp_path / "cut", 5, resume=True, optimizer=optimizer)
    expected, resumed = load_adapter(whole.adapter), load_adapter(cut.adapter)
    assert all(
        np.array_equal(value, resumed.tensors[name]) for name, value in expected.tensors.items()
    )
    log = read_run(tmp_path / "whole")
    config = RunConfig.parse(log.header.config)
    assert config.method.subspace == "gradient" and config.method.optimizer == optimizer
    session = PrgeSession(tiny_model(), config.method, log.header.seed)
    replayed = replay(log, session)
    assert replayed is not None
    assert all(
        np.array_equal(value, replayed.tensors[name]) for name, value in expected.tensors.items()
    )
    second = tmp_path / "whole" / "subspace-00000002.safetensors"
    second.write_bytes((tmp_path / "whole" / "subspace-00000000.safetensors").read_bytes())
    with pytest.raises(CheckpointError) as error:
        replay(log, PrgeSession(tiny_model(), config.method, log.header.seed))
    second.unlink()
    assert second.name in str(error.value)
    with pytest.raises(CheckpointError) as error:
        replay(log, PrgeSession(tiny_model(), config.method, log.header.seed))
    assert second.name in str(error.value)


def test_the_paper_s_settings_are_one_flag(rows: Path, tmp_path: Path) -> None:
    done = run(rows, tmp_path / "paper", 2, paper=True)
    assert load_adapter(done.adapter).rank == 2
    head = read_run(tmp_path / "paper").header.config
    chosen = {
        key: head["method"][key] for key in ("subspace", "optimizer", "loss", "learning_rate")
    }
    paper = {"subspace": "random", "optimizer": "sgd", "loss": "vocabulary"}
    assert chosen == {**paper, "learning_rate": 5e-3}
    model, method = {"source": "tiny:llama"}, {"name": "prge", "subspace": "gradient"}
    with pytest.raises(ConfigError, match="paper sets subspace to random"):
        RunConfig.parse({"model": model, "method": method | {"paper": True}})
    with pytest.raises(ConfigError, match="top_layers goes with subspace random"):
        RunConfig.parse({"model": model, "method": method | {"top_layers": 1}})
