"""The daemon's jobs as OpenAI's clients see them: requests, jobs and events of fine-tuning."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.core.errors import ConfigError
from ondevice.core.registry import method
from ondevice.server.fields import at_most
from ondevice.server.jobs import JobRequest, method_name
from ondevice.server.queue import Job
from ondevice.server.schemas import ResponseBody
from ondevice.server.store import Store

Auto = Literal["auto"]
Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
STATUS: dict[str, Status] = {
    "queued": "queued",
    "running": "running",
    "pausing": "running",
    "paused": "queued",
    "cancelling": "running",
    "cancelled": "cancelled",
    "failed": "failed",
    "done": "succeeded",
}


class Hyperparameters(Documented):
    """Settings of the training; "auto" is the daemon's default."""

    model_config = ConfigDict(extra="forbid")

    n_epochs: Auto | Annotated[float, Field(gt=0, le=10_000)] = "auto"
    """Passes over the rows."""
    batch_size: Auto | Annotated[int, Field(ge=1, le=65_536)] = "auto"
    """Rows a step."""
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=1e6)] = "auto"
    """Times the learning rate that the method has by default."""


class Supervised(Documented):
    """Settings of supervised training."""

    model_config = ConfigDict(extra="forbid")

    hyperparameters: Hyperparameters = Hyperparameters()


class Method(Documented):
    """The kind of training."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(
        default="supervised", max_length=64, json_schema_extra={"enum": ["supervised"]}
    )
    """Only supervised."""
    supervised: Supervised = Supervised()


class FineTuningRequest(Documented):
    """The body of POST /v1/fine_tuning/jobs."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200)
    """A model of GET /v1/models, a hub id, or an adapter to go on from."""
    training_file: str = Field(max_length=64)
    """A file of GET /v1/files."""
    validation_file: str | None = Field(default=None, max_length=64)
    """Conversations that are only evaluated."""
    hyperparameters: Hyperparameters | None = None
    """The older place of `method.supervised.hyperparameters`."""
    method: Method | None = None
    suffix: str | None = Field(default=None, max_length=64)
    """The job's name."""
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(default=None, max_length=16)
    """Texts of the client, which the job returns."""
    integrations: list[Any] | None = Field(default=None, json_schema_extra={"maxItems": 0})
    """Not supported."""
    config: dict[str, Any] = {}
    """Sections of a run file, as for POST /v1/jobs; not in OpenAI's API."""

    def job(self, start: dict[str, Any]) -> JobRequest:
        """Return the daemon's request.

        Args:
            start: `model`, and `adapter` if training goes on from one.

        Raises:
            ConfigError: an unsupported kind of training, or a setting that is given twice.
        """
        if self.method is not None and self.method.type != "supervised":
            raise ConfigError(
                "'method.type' is not supported", expected="supervised", received=self.method.type,
                hint="leave 'method' out: rows are trained on as answers",
            )  # fmt: skip
        if self.integrations:
            raise ConfigError("'integrations' is not supported", expected="none")
        return JobRequest(
            **start,
            name=self.suffix or "",
            dataset=self.training_file,
            eval_dataset=self.validation_file,
            config=self._config(),
            metadata=self.metadata or {},
        )

    def settings(self) -> Hyperparameters:
        """Return the settings from either place."""
        if self.method is not None and "supervised" in self.method.model_fields_set:
            return self.method.supervised.hyperparameters
        return self.hyperparameters or Hyperparameters()

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(json.dumps(self.config))
        settings = self.settings()
        train = {"epochs": settings.n_epochs, "batch_size": settings.batch_size, "seed": self.seed}
        for name, value in train.items():
            if value in ("auto", None):
                continue
            section = config.setdefault("train", {})
            if not isinstance(section, dict) or name in section:
                raise ConfigError(f"'train.{name}' is given twice", expected="one of them")
            section[name] = value
        return config


def with_rate(body: JobRequest, multiplier: Auto | float) -> JobRequest:
    """Return a job, whose method is known, with the multiple of its method's learning rate."""
    if multiplier == "auto":
        return body
    section = body.config["method"]
    if "learning_rate" in section:
        raise ConfigError("'method.learning_rate' is given twice", expected="one of them")
    rate = _default_rate(section["name"]) * multiplier
    config = {**body.config, "method": {**section, "learning_rate": rate}}
    return body.model_copy(update={"config": config})


def _default_rate(name: str) -> float:
    field = method(name).config.model_fields.get("learning_rate")
    if field is None or not isinstance(field.default, float):
        raise ConfigError(
            f"method {name} has no learning rate by default",
            expected="config.method.learning_rate, in place of learning_rate_multiplier",
        )
    return field.default


class ShownHyperparameters(ResponseBody):
    """The settings of a job."""

    n_epochs: Auto | float
    batch_size: Auto | int
    learning_rate_multiplier: Auto | float


class JobError(ResponseBody):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningJob(ResponseBody):
    """A job in OpenAI's form."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    """The adapter, as a model for POST /v1/chat/completions and POST /v1/predict."""
    organization_id: str = "ondevice"
    status: Status
    """A paused job is queued."""
    error: JobError | None
    training_file: str
    validation_file: str | None
    result_files: list[str] = []
    trained_tokens: int | None = None
    hyperparameters: ShownHyperparameters
    method: dict[str, Any]
    seed: int
    metadata: dict[str, str]
    integrations: list[Any] = []
    user_provided_suffix: str | None


class FineTuningJobList(ResponseBody):
    """GET /v1/fine_tuning/jobs."""

    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool = False


class FineTuningEvent(ResponseBody):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]
    """The daemon's event."""


class FineTuningEventList(ResponseBody):
    """GET /v1/fine_tuning/jobs/ID/events."""

    object: Literal["list"] = "list"
    data: list[FineTuningEvent]
    has_more: bool = False


def shown_job(job: Job, adapters: list[str]) -> dict[str, Any]:
    """Return a job in OpenAI's form; `adapters` are its own."""
    spec = job.spec
    config = spec.get("config") or {}
    train = config.get("train", {})
    settings = {
        "n_epochs": train.get("epochs", "auto"),
        "batch_size": train.get("batch_size", "auto"),
        "learning_rate_multiplier": _multiplier(config),
    }
    status = STATUS[job.state]
    error = None
    if status == "failed":
        failure = job.error or {}
        error = {
            "code": str(failure.get("error", "failed")),
            "message": str(failure.get("message") or job.reason),
        }
    fine_tuned = None
    if status == "succeeded" and adapters:
        fine_tuned = job.id
        if job.id not in adapters:  # the last adapter was deleted, the best one stays
            fine_tuned = adapters[0]
    eta_s = job.progress.get("eta_s")
    begun = job.started_s or job.created_s
    return {
        "id": job.id,
        "created_at": int(job.created_s),
        "finished_at": None if job.ended_s is None else int(job.ended_s),
        "estimated_finish": int(begun + job.ran_s + eta_s) if status == "running" and eta_s else None,
        "model": spec.get("adapter") or spec.get("model") or "",
        "fine_tuned_model": fine_tuned,
        "status": status,
        "error": error,
        "training_file": spec["dataset"],
        "validation_file": spec.get("eval_dataset"),
        "hyperparameters": settings,
        "method": {"type": "supervised", "supervised": {"hyperparameters": settings}},
        "seed": train.get("seed", 0),
        "metadata": spec.get("metadata") or {},
        "user_provided_suffix": spec.get("name") or None,
    }  # fmt: skip


def _multiplier(config: dict[str, Any]) -> Auto | float:
    section = config.get("method")
    if not isinstance(section, dict) or "learning_rate" not in section:
        return "auto"
    try:
        return float(f"{section['learning_rate'] / _default_rate(method_name(config)):.6g}")
    except (ConfigError, TypeError):
        return "auto"


def list_events(
    store: Store, job: str, limit: int, after: str | None
) -> tuple[list[dict[str, Any]], bool]:
    """Return a page of a job's events, the newest first, and whether there are older ones.

    Raises:
        ConfigError: `after` is not an event of this job.
    """
    last = store.last_event(job) + 1
    if after is not None:
        prefix, _, number = after.rpartition("-")
        if prefix != f"{job}-event" or not (number.isascii() and number.isdigit()):
            raise ConfigError("'after' is not an event of this job", received=after)
        last = min(last, int(number[:15]))
    query = "SELECT id, data FROM events WHERE job = ? AND id < ? ORDER BY id DESC LIMIT ?"
    rows = store.rows(query, job, last, limit + 1)
    events = [_shown_event(job, row["id"], json.loads(row["data"])) for row in rows[:limit]]
    return events, len(rows) > limit


def _shown_event(job: str, number: int, event: dict[str, Any]) -> dict[str, Any]:
    kind = event["event"]
    level = {"error": "error", "warning": "warn"}.get(kind, "info")
    return {
        "id": f"{job}-event-{number}",
        "created_at": int(event.get("time_s", 0)),
        "level": level,
        "message": _sentence(kind, event),
        "type": "metrics" if kind in ("step", "evaluate") else "message",
        "data": event,
    }


def _sentence(kind: str, event: dict[str, Any]) -> str:
    if kind == "job":
        return ": ".join(filter(None, (f"The job is {event['state']}", event.get("reason"))))
    if kind == "step":
        return f"Step {event['step'] + 1}: training loss {event['loss']:.4g}"
    if kind == "evaluate":
        return f"Evaluation after {event['step']} steps: loss {event['loss']:.4g}"
    if kind == "checkpoint":
        return f"A checkpoint was written after {event['step']} steps"
    if kind == "finish":
        return f"Trained {event['steps']} steps, final loss {event['final_loss']:.4g}"
    if kind == "error":
        return str(event["error"].get("message", "failed"))
    return str(event.get("message") or f"Event {kind}")
