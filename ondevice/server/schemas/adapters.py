"""Adapters, what they were trained to do, and their conversions."""

from __future__ import annotations

from typing import Any, Literal

from ondevice.server.schemas.common import ErrorResponse, ResponseBody


class Adapter(ResponseBody):
    """An adapter of the store."""

    id: str
    name: str
    job: str | None
    """The job that trained it; None for an uploaded one."""
    base_model: str
    rank: int
    bytes: int
    sha256: str
    """Of adapter_model.safetensors."""
    created_s: float
    active: bool


class Active(ResponseBody):
    """The active adapter; None for the base model."""

    active: str | None


class TaskResponse(ResponseBody):
    """GET /v1/adapters/ID/task."""

    format: str
    task: str | None
    """The prompt template, if one renders the rows."""
    inputs: dict[str, str]
    """{field: column} that a row to predict needs."""
    labels: list[str]
    """Empty for generated text."""
    generates: bool
    """True if an answer is generated, not chosen."""
    max_length_tokens: int


class ExitForm(ResponseBody):
    """A format that an adapter can be converted to."""

    name: str
    reader: str
    """The program that reads the format."""
    dtypes: list[str]
    """Types of the written weights, the default first; empty without a choice."""
    merged: bool
    """True if the model is written too, not only the adapter."""
    needs_model: bool
    folder: bool
    """True for a folder, which is downloaded as a zip."""


class Conversion(ResponseBody):
    """A conversion of an adapter for another program."""

    id: str
    adapter: str
    to: str
    """A format of GET /v1/forms."""
    model: str | None
    dtype: str | None
    state: Literal["waiting", "running", "done", "failed"]
    stage: str
    """The present stage."""
    error: ErrorResponse | None
    """Why it failed."""
    report: dict[str, Any] | None
    """The figures of the check, as `ondevice convert --json` prints them, without paths."""
    file: str | None
    """Name of the file to download, once it is done."""
    bytes: int | None
    created_s: float
