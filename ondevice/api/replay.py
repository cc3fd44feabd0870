"""Rebuild a run's adapter from its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.api.open import open_artifact
from ondevice.api.runfile import RunConfig
from ondevice.artifact.adapter import load_adapter
from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.core.registry import open_session
from ondevice.models import load_model
from ondevice.training.choices import resolve_device
from ondevice.training.fit import adapter_identity
from ondevice.training.replay import read_run
from ondevice.training.replay import replay as replay_log
from ondevice.training.trained import adapter_folder

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter


def replay(
    log: Path,
    *,
    steps: int | None = None,
    artifact: Path | None = None,
    adapter: Path | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> Adapter | None:
    """Rebuild the adapter of a zeroth-order run from its log: seed and one scalar a query.

    Args:
        log: a run's folder or its `events.jsonl`.
        steps: only the first so many.
        artifact: the program, for a run of `run_artifact`.
        adapter: the adapter that the run started from, if it did.
        warn: called with each reason why the bits may differ from the run's.
    """
    run = read_run(Path(log))
    if adapter is not None:
        adapter = adapter_folder(adapter)
    _check_start(run.header.identity.get("adapter"), adapter)
    if "artifact" in run.header.identity:
        if artifact is None:
            raise ConfigError(
                "the run was made by an exported program",
                expected="--artifact DIR",
                received="no artifact",
            )
        session = open_artifact(artifact)
        if session.manifest.files[session.manifest.program] != run.header.identity.get("artifact"):
            raise ConfigError(
                "the artifact is not the one that made this run",
                hint="use the artifact that was run",
            )
    else:
        # The head of the log has the whole run file; the device too is the run's, for the same bits.
        config = RunConfig.parse(run.header.config, f"{log}: start event")
        device = "cuda" if run.header.backend == "torch-cuda" else "cpu"
        loaded = load_model(
            config.model.source,
            revision=config.model.revision,
            dtype=config.model.dtype,
            device=resolve_device(device),
        )
        session = open_session(loaded, config.method, config.train.seed)
    if adapter is not None:
        session.load_adapter(load_adapter(adapter))
    if run.header.generator_backend not in ("", session.generator_backend):
        warn(
            f"the noise was made by {run.header.generator_backend}, here it is by {session.generator_backend}"
        )
    return replay_log(run, session, steps=steps, warn=warn)


def _check_start(recorded: str | None, adapter: Path | None) -> None:
    """Refuse a replay that does not start where the run started: its adapter would be another one."""
    if recorded is None and adapter is not None:
        raise ConfigError("the run started from no adapter", received=f"--adapter {adapter}")
    if recorded is not None and adapter is None:
        raise ConfigError(
            "the run started from an adapter",
            expected="--adapter DIR, the adapter that it started from",
        )
    if recorded is not None and adapter_identity(adapter)["adapter"] != recorded:
        raise ArtifactError(
            f"{adapter} is not the adapter that the run started from",
            expected=f"SHA-256 {recorded}",
        )
