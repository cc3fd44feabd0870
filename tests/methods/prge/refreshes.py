"""A run of an exported program over new subspaces, next to eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api.runfile import RunConfig
from ondevice.artifact.files import read_tensors
from ondevice.core.errors import CheckpointError
from ondevice.data.batching import Batch
from ondevice.methods.prge.subspace import read_factors
from ondevice.methods.prge.subspace_program import ProgramSubspace
from ondevice.methods.prge.torch import PrgeSession
from ondevice.models import load_model


def hold_two_refreshes(settings: RunConfig, opened: Callable[[], Any], tmp_path: Path) -> None:
    """Hold a program against eager PyTorch: a run over two refreshes, the second of them with a file
    that is handed in, and its replay.

    Args:
        settings: of the program's export.
        opened: gives a session over the program.
    """
    session = opened()
    method = settings.method.model_copy(update={"factors": None}).for_training()
    eager = PrgeSession(load_model(settings.model.source), method, settings.train.seed)

    def batch_at(step: int) -> Batch:
        ids, labels = np.random.default_rng(step).integers(0, 200, (2, 16)), np.full((2, 16), -100)
        labels[:, -1] = 9, 70
        return Batch(ids, labels)

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    scalars = []
    for step in range(5):
        if step:
            eager.before_step(step, batch_at, theirs)
        if step == 4:
            (theirs / "subspace-00000004.safetensors").replace(ours / "subspace-next.safetensors")
        wrote = session.before_step(step, batch_at, ours)
        assert (wrote is not None) == (step % 2 == 0)
        if step == 0:
            eager.before_replay(0, ours)
        elif (
            step == 2
        ):  # their gradients are one, up to rounding, which the last directions are made of
            leading = [
                read_tensors(folder / "subspace-00000002.safetensors")["0.q_proj.c"][0]
                for folder in (ours, theirs)
            ]
            assert abs(np.dot(*leading)) > 0.999 * np.dot(leading[0], leading[0])
            assert eager.subspace is not None
            eager.subspace.read(step, ours)
        batch = batch_at(step)
        result = session.step(batch.ids, batch.labels, step, 0.02)
        with torch.inference_mode():
            at = eager.program.perturbed(eager._adapter, eager.seed, torch.tensor([step]))
            losses = eager.program.losses(
                torch.from_numpy(batch.ids), torch.from_numpy(batch.labels), at
            )
        np.testing.assert_allclose(result.losses, losses.numpy(), rtol=2e-5)
        eager.apply_update(result.projected_gradients, step, 0.02)
        scalars.append(result.projected_gradients)
    received, wanted = session.adapter(), eager.adapter()
    for name in received.linears:
        (a, b), (c, d) = received.pair(name), wanted.pair(name)
        assert np.abs(d @ c).max() > 1e-3
        np.testing.assert_allclose(b @ a, d @ c, atol=1e-4 * np.abs(d @ c).max())
    replayed = opened()
    for step, gradients in enumerate(scalars):
        replayed.before_replay(step, ours)
        replayed.apply_update(gradients, step, 0.02)
    assert all(
        value.tobytes() == session.state()[name].tobytes()
        for name, value in replayed.state().items()
    )
    alone = session.manifest.model_copy(
        update={"method": {**session.manifest.method, "refresh_every": None}}
    )
    without = SimpleNamespace(manifest=alone, seed=session.seed, state=lambda: state)
    subspace = ProgramSubspace(without)  # type: ignore[arg-type]
    given = ours / "subspace-00000004.safetensors"
    state = subspace.layout.begun(read_factors(given, subspace.layout.small.entries))
    state["adapter"] += 1
    given.replace(ours / "subspace-next.safetensors")
    with pytest.raises(CheckpointError) as error:
        subspace.before_step(1, batch_at, ours)
    assert "method.refresh_every" in error.value.expected
