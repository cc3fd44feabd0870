"""Open a fleet's run file: the session, the rows and the model's source; for servers and
devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import ArtifactError
from ondevice.core.registry import method_config, target
from ondevice.data.tasks.record import label_tokens_of_rows, label_tokens_of_task
from ondevice.data.tasks.task import plain_name
from ondevice.data.tasks.templates import TASKS
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.charter import Charter
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.config import FleetRun
from ondevice.fleet.dates import without_date
from ondevice.models import load_model, load_tokenizer
from ondevice.models.load import artifact_tokenizer
from ondevice.models.sources import hub
from ondevice.models.sources.resolve import PACKAGE_PREFIX, TINY_PREFIX
from ondevice.training.choices import place
from ondevice.training.objective import check_learns, check_rows, objective_of, with_objective
from ondevice.training.rows import (
    OpenedRows,
    RunRows,
    maximum_length,
    read_rows_of,
    vocabulary_of,
)

if TYPE_CHECKING:
    from ondevice.core.method import Placement
    from ondevice.core.session import Session
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.fleet.charter import Charter


def open_run(config: FleetRun) -> tuple[FleetRun, Session, RunRows, Any]:
    """Load the model, read the rows and open the session of a run file.

    Returns:
        the run file with a maximum length, the session, the rows, and the base model's source.

    Raises:
        ConfigError: no rows are named, or a fleet cannot use the method.
        DataError: no row can be used.
    """
    config.check_data()
    opened = OpenedRows(config.data)
    length, _ = maximum_length(config.model, opened, when=config.fleet.date)
    assert length is not None  # noqa: S101  `check_data` has refused a run without rows
    config = _with_objective(config.of_length(length), opened)
    loaded, placement = _load(config)
    config = without_date(config, loaded.tokenizer)
    rows = _read(config, opened, loaded.tokenizer, vocabulary_of(loaded))
    if objective_of(config.train) is None:  # a preference is over the whole vocabulary
        method = config.method.with_answers(lambda: label_tokens_of_rows(rows.train))
        config = config.model_copy(update={"method": method})
    return config, _session(config, loaded, placement), rows, loaded.source


def check_rows_of(config: FleetRun) -> FleetRun:
    """Refuse rows that `open_run` would refuse, without the model's weights; return the run file
    with the objective of the rows.

    Raises:
        ConfigError, DataError: as `open_run`.
    """
    opened = OpenedRows(config.data)
    config = _with_objective(config, opened)
    if objective_of(config.train) is None:
        opened.texts()
        return config
    length, _ = maximum_length(config.model, opened, when=config.fleet.date)
    assert length is not None  # noqa: S101  `check_data` has refused a run without rows
    source = config.model
    _read(config.of_length(length), opened, load_tokenizer(source.source, source.revision))
    return config


def _with_objective(config: FleetRun, opened: OpenedRows) -> FleetRun:
    """Return the run file with the objective that its rows need."""
    placement = place(config.method, config.train, config.model.device)
    train, _ = with_objective(config.train, config.method, placement, opened)
    return config.model_copy(update={"train": train})


def _read(
    config: FleetRun, opened: OpenedRows, tokenizer: Any, vocabulary: int | None = None
) -> RunRows:
    """Read and encode the rows of all devices, and the held-out ones."""
    length = config.data.max_length_tokens
    assert length is not None  # noqa: S101  `of_length` has set it
    rows = read_rows_of(
        opened,
        tokenizer,
        length,
        config.train.seed,
        when=config.fleet.date,
        vocabulary=vocabulary,
        preferences=True,
    )
    check_rows(config.train, rows)
    return rows


def open_task(config: FleetRun) -> tuple[FleetRun, Session, Any]:
    """Open the session of a run file without rows: the label tokens of a loss are those of its
    task.

    Returns:
        the run file, the session, and the base model's source.
    """
    loaded, placement = _load(config)
    config = without_date(config, loaded.tokenizer)
    task = config.data.task
    made = objective_of(config.train)
    if made is not None:
        check_learns(made, config.method, placement, config.data)
        return config, _session(config, loaded, placement), loaded.source

    def answers() -> tuple[tuple[int, ...], str]:
        if task is None:
            return ((), "no task is named")
        return label_tokens_of_task(task, loaded.tokenizer)

    config = config.model_copy(update={"method": config.method.with_answers(answers)})
    return config, _session(config, loaded, placement), loaded.source


def _load(config: FleetRun) -> tuple[Any, Placement]:
    """Load the model of a run file on its device."""
    placement = place(config.method, config.train, config.model.device)
    device = placement.spec.load_device(config.method, placement.device)
    source = config.model
    return load_model(
        source.source, revision=source.revision, dtype=source.dtype, device=device
    ), placement


def _session(config: FleetRun, loaded: Any, placement: Placement) -> Session:
    """Open a run file's method over a loaded model."""
    seed = config.train.seed
    return placement.spec.open_session(
        loaded, config.method, seed, placement.device, placement.backend
    )


def open_for(
    charter: Charter | AdapterCharter, model: str | None = None, artifact: Path | None = None
) -> tuple[Session, Any]:
    """Open a session for a fleet from its charter; also return the tokenizer.

    Args:
        model: the base model under this device's own name for it; the charter's by default.
        artifact: an exported program of the fleet's method, seed and size instead.

    Raises:
        ArtifactError: the model or the program is not the fleet's.
    """
    if artifact is not None:
        manifest = read_manifest(artifact)
        if manifest.model.sha256 != charter.model_sha256:
            raise ArtifactError(
                f"{artifact} is of another base model than the fleet's",
                expected=charter.model_sha256,
                received=manifest.model.sha256,
            )
        return target(manifest.target).open(artifact, manifest), artifact_tokenizer(artifact)
    source = model or charter.model_source
    values = {
        "model": {"source": source},
        "method": charter.method,
        "train": {"seed": charter.seed},
    }
    config = FleetRun.parse(values, "charter")
    loaded, placement = _load(config)
    if loaded.source.sha256 != charter.model_sha256:
        raise Refusal(
            Code.MODEL,
            f"{source} is not the fleet's base model",
            expected=charter.model_sha256,
            received=loaded.source.sha256,
            hint="--model names the model of the fleet's charter on this device",
        )
    return _session(config, loaded, placement), loaded.tokenizer


def check_method(charter: Charter | AdapterCharter) -> None:
    """Check that a charter's method reads no file of this device.

    Raises:
        ConfigError: these are not settings of a method.
        Refusal: one of them is a path.
    """
    method = method_config(str(charter.method.get("name")), charter.method)
    paths = sorted(name for name, value in method if isinstance(value, Path))
    if paths:
        raise Refusal(
            Code.NAME,
            f"the charter names a file of this device: method.{paths[0]}",
            expected="no path",
        )


def public_source(charter: Charter | AdapterCharter) -> str:
    """Return the base model that a charter names, for a device whose owner names none.

    A charter comes from another machine, so it may name only public models, not a folder or file
    here.

    Raises:
        Refusal: it names a path.
    """
    source = charter.model_source
    if source.startswith((PACKAGE_PREFIX, TINY_PREFIX)):
        return source
    if hub.HUB_ID.fullmatch(source):
        return str(
            hub.fetch_snapshot(source, None)
        )  # even if a folder of this device has the same name
    raise Refusal(
        Code.NAME,
        "a device does not open the charter's base model by itself",
        expected="a hub id, package:NAME or tiny:FAMILY",
        received=source[:200],
        hint="--model names the fleet's model on this device",
    )


def task_of(charter: Charter | AdapterCharter, own: str | None) -> str | None:
    """Return the task of a device's rows: its owner's, or else the charter's, which is a known
    name.

    Raises:
        Refusal: the charter's is a file, or unknown.
    """
    task = charter.data.get("task")
    if own is not None or task is None:
        return own
    if not isinstance(task, str) or plain_name(task) not in TASKS:
        raise Refusal(
            Code.NAME,
            "a device does not read its rows by the charter's task",
            expected=", ".join(TASKS),
            received=str(task)[:200],
            hint="--task names this device's task, or a template of its own",
        )
    return task
