"""Jobs and their plans."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.server.jobs import Limits, Window
from ondevice.server.queue import State
from ondevice.server.schemas.common import ResponseBody


class JobResponse(ResponseBody):
    """A job."""

    id: str
    number: int
    name: str
    state: State
    reason: str
    """The reason of its state."""
    error: dict[str, Any] | None
    """For a failed job: error, message, expected, received, try, exit_code."""
    priority: int
    model: str | None
    artifact: str | None
    method: str | None
    """The training method; None for an artifact, whose program contains it."""
    dataset: str
    eval_dataset: str | None
    adapter: str | None
    config: dict[str, Any]
    window: Window | None
    limits: Limits
    progress: dict[str, Any]
    """step, steps, loss, first_loss, final_loss, tokens_per_s, step_time_s, eta_s, learning_rate,
    peak_memory_bytes, peak_device_bytes, checkpoint_step, backend, evaluation: those that are
    known."""
    created_s: float
    started_s: float | None
    ended_s: float | None
    ran_s: float
    waits_s: float
    """Seconds until a crashed job is tried again; 0 means at once."""
    crashes: int
    attempt: int
    last_event: int
    """Id of the newest event."""
    adapters: list[str]
    """Ids of its adapters."""


class PlanResponse(ResponseBody):
    """The response to a dry run: the run file with all defaults, and memory by part."""

    config: dict[str, Any]
    plan: dict[str, Any]
    """As `ondevice plan --json` prints it: parts_bytes, total_bytes, usable_bytes, fits,
    step_s_estimate, notes, ...; `meaning` explains each part."""


class JobPatch(Documented):
    """The body of PATCH /v1/jobs/ID; omitted fields keep their value."""

    model_config = ConfigDict(extra="forbid")

    priority: int | None = Field(default=None, ge=-1000, le=1000)
    window: Window | None = None
    """null removes the window."""
    limits: Limits | None = None
