"""OpenAI's fine-tuning jobs: jobs of the daemon that train a model on a file of conversations."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Path as InPath

from ondevice.core.errors import ConfigError
from ondevice.core.registry import method
from ondevice.server import fine_tuning, openai_files
from ondevice.server.adapters import adapters_of
from ondevice.server.daemon import Daemon
from ondevice.server.fine_tuning import FineTuningRequest
from ondevice.server.jobs import with_method
from ondevice.server.openai import REFUSALS
from ondevice.server.queue import Job
from ondevice.server.routes import Serving
from ondevice.server.routes.data import chosen_method
from ondevice.server.routes.jobs import Key, queue_job

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine_tuning"], responses=REFUSALS)
JobId = Annotated[str, InPath(max_length=64, description="An id of GET /v1/fine_tuning/jobs.")]
Limit = Annotated[int, Query(ge=1, le=100, description="Most entries.")]
After = Annotated[str | None, Query(max_length=100, description="Only entries after this id.")]


@router.post("", response_model=fine_tuning.FineTuningJob)
async def create_fine_tuning_job(
    daemon: Serving, body: FineTuningRequest, key: Key = None
) -> dict[str, Any]:
    """Queue a job that trains an adapter on a file of conversations."""
    return await daemon.pools.rows.run(_create, daemon, body, key)


def _create(daemon: Daemon, body: FineTuningRequest, key: str | None) -> dict[str, Any]:
    for file in filter(None, (body.training_file, body.validation_file)):
        openai_files.get(daemon.store, file)
    request = body.job(_start(daemon, body.model))
    named = with_method(request, lambda: chosen_method(daemon, str(request.model))["method"])
    request = request.model_copy(update={"config": named.config})
    name = request.config["method"]["name"]
    if method(name).trains != "adapter":
        raise ConfigError(
            f"method {name} trains the whole model, which the daemon does not serve",
            expected="a method that trains an adapter",
            received=name,
            hint="leave config.method.name out, or use POST /v1/jobs",
        )
    request = fine_tuning.with_rate(request, body.settings().learning_rate_multiplier)
    return _shown(daemon, [queue_job(daemon, request, key)])[0]


def _start(daemon: Daemon, name: str) -> dict[str, Any]:
    """Return the model of a job, and the adapter that it goes on from, for the name of either."""
    row = daemon.store.row("SELECT base_model FROM adapters WHERE id = ?", name)
    if row is None:
        return {"model": name}
    return {"model": row["base_model"], "adapter": name}


@router.get("", response_model=fine_tuning.FineTuningJobList)
def list_fine_tuning_jobs(
    daemon: Serving, limit: Limit = 20, after: After = None
) -> dict[str, Any]:
    """Return the jobs that train a model on conversations, the newest first."""
    rows, more = daemon.store.page(
        "jobs",
        "-number",
        limit,
        after,
        where="json_extract(spec, '$.model') IS NOT NULL AND json_extract(spec, '$.dataset') IN "
        "(SELECT id FROM datasets WHERE format = 'chat')",
        columns="id",
    )
    jobs = [daemon.queue.get(row["id"]) for row in rows]
    return {"data": _shown(daemon, jobs), "has_more": more}


@router.get("/{job}", response_model=fine_tuning.FineTuningJob)
def get_fine_tuning_job(daemon: Serving, job: JobId) -> dict[str, Any]:
    """Return one job; `fine_tuned_model` names its adapter once it has succeeded."""
    return _shown(daemon, [daemon.queue.get(job)])[0]


@router.post("/{job}/cancel", response_model=fine_tuning.FineTuningJob)
def cancel_fine_tuning_job(daemon: Serving, job: JobId) -> dict[str, Any]:
    """Cancel a job for good."""
    return _shown(daemon, [daemon.queue.ask(job, "cancel")])[0]


@router.post("/{job}/pause", response_model=fine_tuning.FineTuningJob)
def pause_fine_tuning_job(daemon: Serving, job: JobId) -> dict[str, Any]:
    """Pause a job, with its state saved."""
    return _shown(daemon, [daemon.queue.ask(job, "pause")])[0]


@router.post("/{job}/resume", response_model=fine_tuning.FineTuningJob)
def resume_fine_tuning_job(daemon: Serving, job: JobId) -> dict[str, Any]:
    """Resume a paused or failed job."""
    return _shown(daemon, [daemon.queue.ask(job, "resume")])[0]


@router.get("/{job}/events", response_model=fine_tuning.FineTuningEventList)
def list_fine_tuning_events(
    daemon: Serving, job: JobId, limit: Limit = 20, after: After = None
) -> dict[str, Any]:
    """Return the events of a job, the newest first."""
    daemon.queue.get(job)
    events, more = fine_tuning.list_events(daemon.store, job, limit, after)
    return {"data": events, "has_more": more}


def _shown(daemon: Daemon, jobs: list[Job]) -> list[dict[str, Any]]:
    adapters = adapters_of(daemon.store, [job.id for job in jobs])
    return [fine_tuning.shown_job(job, adapters.get(job.id, [])) for job in jobs]
