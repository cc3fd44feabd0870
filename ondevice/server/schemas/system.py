"""The machine, its figures, and sessions of the page."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ondevice.server.queue import State
from ondevice.server.schemas.common import ResponseBody


class Health(ResponseBody):
    """GET /v1/health."""

    status: Literal["ok", "failing"]
    version: str
    token_needed: bool


class Gpu(ResponseBody):
    """A CUDA device."""

    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class System(ResponseBody):
    """GET /v1/system."""

    time_s: float
    cores: int
    load: float
    memory_total_bytes: int
    memory_available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    disk_total_bytes: int
    disk_free_bytes: int
    temperatures_c: dict[str, float]
    """By sensor; empty if the machine reports none."""
    power_w: dict[str, float]
    """By rail; empty if the machine reports none."""
    gpus: list[Gpu]
    memory_limit_by: Literal["cgroup", "watch"]
    """Who enforces a job's memory limit: the kernel, or the daemon, several times a second."""


class RunningFigures(ResponseBody):
    """The running job."""

    job: str
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    memory_bytes: int
    peak_memory_bytes: int


class AnswersFigures(ResponseBody):
    """Requests to the model."""

    waiting: int
    running: int


class MetricsResponse(ResponseBody):
    """GET /v1/metrics."""

    uptime_s: float
    jobs: dict[State, int]
    event_streams: int
    answers: AnswersFigures
    requests: int
    running: RunningFigures | None


class SessionRequest(BaseModel):
    """The body of POST /v1/session."""

    model_config = ConfigDict(extra="forbid")
    token: str = Field(min_length=1, max_length=200)


class SessionKey(ResponseBody):
    """The page's half of a session; the cookie is the other one."""

    key: str = Field(description="Sent as the header `X-Ondevice-Key`, or as `?key=` of a link.")
