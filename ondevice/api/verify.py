"""Hold an exported program against the same training in eager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.manifest import read_manifest
from ondevice.core.registry import target
from ondevice.data import Batches, pad_id_of, read_dataset
from ondevice.exporters.base import VerifyRequest

if TYPE_CHECKING:
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession


def verify(
    folder: Path,
    *,
    steps: int | None = None,
    data: Path | None = None,
    model: str | None = None,
    directions: int | None = None,
    perturbation_scales: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Run training steps in the runtime and in eager, and compare by the tolerances of the export.

    Args:
        folder: the artifact.
        steps: training steps, for a program without an NPU part; 20 unless given.
        data: rows to train on; a text of ours if not given.
        model: where the model is now, if not where the manifest says.
        directions: projected gradients at least, for an NPU's program; 8 unless given.
        perturbation_scales: the scales to compare at, for an NPU's program; the manifest's unless given.

    Returns:
        `ok`, `backend`, and what the target and the method compare. In PyTorch and MLX: `steps`, `max_rel_loss_error`,
        `max_abs_adapter_error`, `evaluation_error`. For an ExecuTorch program with exact gradients: `steps`,
        `max_rel_gradient_error` (the largest relative one of a tensor), `gradient_cosine` (of all tensors as one
        vector), `min_gradient_cosine` and `median_gradient_cosine` (of tensors), `max_rel_loss_error`,
        `max_abs_adapter_error`. For its zeroth-order one: `steps`, `max_rel_loss_error` (free-running),
        `max_rel_loss_error_replayed` (the runtime's projected gradients fed to both sides), `max_abs_adapter_error`,
        `update_error` (of what float32 rounds), `gradient_correlation`. For an NPU's: `directions`,
        `sign_agreement`, `correlation`, `loss_error`, `adapter_error`, `update_error`, `perturbation_scale`, against
        float32; with several scales, `scales` lists them all.

    Raises:
        ArtifactError: if the model is not the one that was exported.
        ConfigError: an argument that does not go with the program.
    """
    manifest = read_manifest(folder)

    def rows(session: ProgramSession, tokenizer: Any, count: int) -> Iterator[Batch]:
        assert data is not None  # noqa: S101 - else nobody asks
        dataset = read_dataset(
            data, tokenizer, task=manifest.task, max_length_tokens=max(manifest.lengths_tokens)
        )
        source = Batches(
            dataset, session.batch_size, session.lengths_tokens, session.seed, pad_id_of(tokenizer)
        )
        yield from ((np.asarray(b.ids), np.asarray(b.labels)) for b in map(source.at, range(count)))

    request = VerifyRequest(
        steps, directions, tuple(perturbation_scales), model, rows if data is not None else None
    )
    return target(manifest.target).verify(Path(folder), manifest, request)
