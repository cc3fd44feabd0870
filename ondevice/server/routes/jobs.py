"""Jobs: create, watch, pause, resume, cancel."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from ondevice.api.runfile import RunConfig
from ondevice.server import schemas, thumbs
from ondevice.server.adapters import adapters_of
from ondevice.server.daemon import Daemon
from ondevice.server.events import curve
from ondevice.server.jobs import (
    THUMBS,
    JobRequest,
    JobSpec,
    artifact_folder,
    method_name,
    resolve,
    with_method,
)
from ondevice.server.queue import Job, State
from ondevice.server.routes import MOST, After, Id, Limit, Serving, name_next
from ondevice.server.routes.data import chosen_method
from ondevice.server.service import tail
from ondevice.server.supervisor import remove_job
from ondevice.server.words import for_api

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Chosen by the client, remembered for a day.",
    ),
]
router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
SEND_TIMEOUT_S = 60.0
PING_S = 15


@router.get("", response_model=list[schemas.JobResponse])
def list_jobs(
    daemon: Serving,
    request: Request,
    response: Response,
    state: Annotated[list[State] | None, Query(description="Only jobs in these states.")] = None,
    limit: Limit = MOST,
    after: After = None,
) -> list[schemas.JobResponse]:
    """List jobs: running, then waiting in the order they will run, then ended, the newest first."""
    jobs, more = daemon.queue.page(state or [], limit, after)
    name_next(jobs, more, limit, request, response)
    return _answers(daemon, jobs)


@router.post(
    "",
    status_code=201,
    response_model=schemas.JobResponse,
    responses={200: {"model": schemas.PlanResponse, "description": "The plan of a dry run."}},
)
async def create_job(daemon: Serving, body: JobRequest, key: Key = None) -> Any:
    """Queue a job. With dry_run, return its run file and plan (status 200) and queue nothing.

    The default method is the first that supports the model. A request that is repeated with the
    same `Idempotency-Key`, because its response was lost, returns the job that it made.
    """
    method = body.config.get("method", {})
    names_no_method = body.artifact is None and isinstance(method, dict) and "name" not in method
    asks_helper = body.dry_run or names_no_method or THUMBS in (body.dataset, body.eval_dataset)
    if asks_helper:
        return await daemon.pools.rows.run(_create_job, daemon, body, key)
    return await run_in_threadpool(_create_job, daemon, body, key)


def _create_job(daemon: Daemon, body: JobRequest, key: str | None) -> Any:
    if not body.dry_run:
        return _answer(daemon, queue_job(daemon, body, key))
    with _frozen(daemon, body, keep=False) as frozen:
        spec, config = _resolved(daemon, frozen)
        artifact = None
        if spec.artifact:
            artifact = str(artifact_folder(daemon.store, spec.artifact))
        values = config.model_dump(mode="json")
        plan = daemon.plan_helper("plan", config=values, artifact=artifact)
    plan["notes"] = [for_api(note) for note in plan["notes"]]
    return JSONResponse(schemas.PlanResponse(config=values, plan=plan).model_dump(mode="json"))


def queue_job(daemon: Daemon, body: JobRequest, key: str | None) -> Job:
    """Check a request and queue its job; one that is repeated with its key returns the job it made.

    Raises:
        ConfigError, MissingError: a wrong setting, or a thing that does not exist.
    """
    digest = hashlib.sha256(body.model_dump_json().encode()).hexdigest()
    if key is not None and (made := daemon.queue.made(key, digest)) is not None:
        return made
    remembered = None
    if key is not None:
        remembered = (key, digest)
    with _frozen(daemon, body, keep=True) as frozen:
        spec, _ = _resolved(daemon, frozen)
        return daemon.queue.create(spec.model_dump(mode="json"), body.priority, remembered)


@contextmanager
def _frozen(daemon: Daemon, body: JobRequest, keep: bool) -> Iterator[JobRequest]:
    """Give the request with data sets of the ratings, if it names them."""
    sets = (body.dataset, body.eval_dataset)
    with thumbs.frozen(daemon.store, daemon.check, *sets, keep=keep) as ids:
        yield body.model_copy(update=ids)


def _resolved(daemon: Daemon, body: JobRequest) -> tuple[JobSpec, RunConfig]:
    """Return a job with its method, and its run file."""
    spec = JobSpec.model_validate(body.model_dump(exclude={"priority", "dry_run"}))
    spec = with_method(spec, lambda: chosen_method(daemon, str(spec.model))["method"])
    return spec, resolve(spec, daemon.store, daemon.store.root / "jobs" / "new" / "run")


@router.get("/{job}", response_model=schemas.JobResponse)
def get_job(daemon: Serving, job: Id) -> schemas.JobResponse:
    """Return one job."""
    return _answer(daemon, daemon.queue.get(job))


@router.patch("/{job}", response_model=schemas.JobResponse)
def change_job(daemon: Serving, job: Id, body: schemas.JobPatch) -> schemas.JobResponse:
    """Change a job's priority, window or limits."""
    with daemon.store.transaction():
        spec = daemon.queue.get(job).spec
        changes = body.model_dump(mode="json", exclude_unset=True, exclude={"priority"})
        if changes.get("limits", {}) is None:
            del changes["limits"]
        if "limits" in changes:  # omitted fields keep their value
            changes["limits"] = spec.get("limits", {}) | changes["limits"]
        changed = daemon.queue.change(job, priority=body.priority, spec=spec | changes)
    return _answer(daemon, changed)


@router.delete("/{job}", response_model=schemas.Done)
def delete_job(daemon: Serving, job: Id) -> dict[str, bool]:
    """Delete an ended job with its log, events and checkpoints; its adapters stay."""
    remove_job(daemon.store, daemon.queue, job)
    return {"ok": True}


@router.post("/{job}/pause", response_model=schemas.JobResponse)
def pause_job(daemon: Serving, job: Id) -> schemas.JobResponse:
    """Pause a job: it ends the current step and saves its state."""
    return _answer(daemon, daemon.queue.ask(job, "pause"))


@router.post("/{job}/resume", response_model=schemas.JobResponse)
def resume_job(daemon: Serving, job: Id) -> schemas.JobResponse:
    """Let a paused or failed job go on from its last checkpoint."""
    return _answer(daemon, daemon.queue.ask(job, "resume"))


@router.post("/{job}/cancel", response_model=schemas.JobResponse)
def cancel_job(daemon: Serving, job: Id) -> schemas.JobResponse:
    """Cancel a job for good."""
    return _answer(daemon, daemon.queue.ask(job, "cancel"))


@router.get(
    "/{job}/events",
    response_class=EventSourceResponse,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Events with ids from 1, without gaps.",
        }
    },
)
async def job_events(
    daemon: Serving,
    job: Id,
    after: Annotated[int, Query(ge=0, lt=2**53, description="Only events with larger ids.")] = 0,
    follow: Annotated[bool, Query(description="Wait for more until the job ends.")] = True,
    last_event_id: Annotated[
        str | None, Header(description="Like `after`; a browser sends it.")
    ] = None,
) -> EventSourceResponse:
    """Return the job's events (server-sent events), from the start or after an id, until the job
    ends.

    Their fields are in the reference of events; an event `job` reports a new state. After `resume`
    the steps from its `step` on are run again. An id that the job has not reached yet, which only a
    power cut can cause, starts at the first event.
    """
    daemon.queue.get(job)
    text = (last_event_id or "").strip()
    last = after
    if text.isascii() and text.isdigit() and len(text) < 16:
        last = int(text)
    if last > daemon.store.last_event(job):
        last = 0
    return EventSourceResponse(
        daemon.hub.read(job, last, follow=follow),
        ping=PING_S,
        send_timeout=SEND_TIMEOUT_S,
        sep="\n",
    )


@router.get(
    "/{job}/log",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "The end of the log."}},
)
def job_log(
    daemon: Serving,
    job: Id,
    bytes: Annotated[int, Query(ge=1, le=1 << 20, description="Most bytes to return.")] = 1 << 16,
) -> PlainTextResponse:
    """Return the last part of the job's log."""
    daemon.queue.get(job)
    return PlainTextResponse(tail(daemon.store.path("jobs", job) / "worker.log", bytes))


@router.get("/{job}/metrics", response_model=list[dict[str, Any]])
def job_metrics(
    daemon: Serving,
    job: Id,
    points: Annotated[int, Query(ge=2, le=5000, description="Steps at most.")] = 500,
) -> list[dict[str, Any]]:
    """Return the curve for plots: steps and evaluations of the run, evenly thinned out."""
    daemon.queue.get(job)
    return curve(daemon.store, job, points)


def _answer(daemon: Serving, job: Job) -> schemas.JobResponse:
    return _answers(daemon, [job])[0]


def _answers(daemon: Daemon, jobs: Sequence[Job]) -> list[schemas.JobResponse]:
    """Build the responses about jobs from their rows and their adapters."""
    adapters = adapters_of(daemon.store, [job.id for job in jobs])
    responses = []
    for job in jobs:
        row = {
            key: getattr(job, key) for key in schemas.JobResponse.model_fields if hasattr(job, key)
        }
        sources = {
            key: job.spec.get(key)
            for key in ("model", "artifact", "dataset", "eval_dataset", "adapter")
        }
        settings = {key: job.spec.get(key) for key in ("config", "window", "limits")}
        method = None
        if not job.spec.get("artifact"):
            method = method_name(job.spec.get("config") or {})
        more = {
            "name": job.spec.get("name", ""),
            "method": method,
            "adapters": adapters.get(job.id, []),
        }
        more["waits_s"] = daemon.queue.waits_s(job)
        responses.append(schemas.JobResponse.model_validate(row | sources | settings | more))
    return responses
