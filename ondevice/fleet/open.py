"""A fleet's run file, opened: the session, the rows and what names the model; the same for servers and devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ArtifactError, FleetError
from ondevice.training.fit import RunRows, read_rows_of

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.fleet.charter import Charter
    from ondevice.fleet.config import FleetRun


def open_run(config: FleetRun) -> tuple[FleetRun, Session, RunRows, Any]:
    """Load the model, read the rows and open the session of a run file.

    Returns:
        the run file with a maximum length, the session, the rows, and what names the base model.

    Raises:
        ConfigError: no rows are named, or the method is none of a fleet's.
        DataError: no row can be used.
    """
    from ondevice.training.length import with_length

    config.check_data()
    if config.data.max_length_tokens is None:
        with_tokens, _ = with_length(config)
        config = config.model_copy(update={"data": with_tokens.data})
    session, loaded = open_session(config)
    assert config.data.max_length_tokens is not None  # noqa: S101  `with_length` has taken it from the rows
    return config, session, read_rows_of(config, loaded.tokenizer, config.data.max_length_tokens), loaded.source


def open_session(config: FleetRun) -> tuple[Session, Any]:
    """Load the model of a run file and open its method over it, in PyTorch; also the loaded model."""
    from ondevice.core.registry import spec_of
    from ondevice.models import load_model
    from ondevice.planning.devices import place

    placement = place(config)
    spec = spec_of(config.method)
    loaded = load_model(
        config.model.source,
        revision=config.model.revision,
        dtype=config.model.dtype,
        device=spec.load_device(config.method, placement.device),
    )
    session = spec.open_session(loaded, config.method, config.train.seed, placement.device, placement.backend)
    return session, loaded


def open_for(charter: Charter, model: str | None = None, artifact: Path | None = None) -> tuple[Session, Any]:
    """Open a session for a fleet that is known by its charter alone; also the tokenizer.

    Args:
        model: the base model under this device's own name for it; the charter's by default.
        artifact: an exported program of the fleet's method, seed and size instead.

    Raises:
        ArtifactError: the model or the program is not the fleet's.
    """
    from ondevice.fleet.config import FleetRun

    if artifact is not None:
        from ondevice.artifact.manifest import read_manifest
        from ondevice.core.registry import target
        from ondevice.models.load import artifact_tokenizer

        manifest = read_manifest(artifact)
        if manifest.model.sha256 != charter.model_sha256:
            raise ArtifactError(
                f"{artifact} is of another base model than the fleet's",
                expected=charter.model_sha256,
                received=manifest.model.sha256,
            )
        return target(manifest.target).open(artifact, manifest), artifact_tokenizer(artifact)
    source = model or charter.model_source
    values = {"model": {"source": source}, "method": charter.method, "train": {"seed": charter.seed}}
    session, loaded = open_session(FleetRun.parse(values, "charter"))
    if loaded.source.sha256 != charter.model_sha256:
        raise FleetError(
            f"{source} is not the fleet's base model",
            expected=charter.model_sha256,
            received=loaded.source.sha256,
            hint="--model names the model of the fleet's charter on this device",
        )
    return session, loaded.tokenizer
