"""Models, exported programs, data sets with their previews, and uploads."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.data.rows import RowProblem
from ondevice.server.jobs import TASK_NAME, one_of
from ondevice.server.schemas.common import ResponseBody


class Model(ResponseBody):
    """A model for jobs, or an adapter or artifact that can generate."""

    id: str
    kind: Literal["folder", "package", "random", "adapter", "artifact"]
    bytes: int
    object: Literal["model"] = "model"
    created: int = 0
    """Seconds since 1970; 0 if unknown."""
    owned_by: str = "ondevice"
    base_model: str | None = None
    """Of an adapter."""
    model_type: str | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    vocab_size: int | None = None


class ModelList(ResponseBody):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool = False
    """Whether entries follow; `after` with the last id of `data` asks for them."""


class Artifact(ResponseBody):
    """An exported program that a job can use."""

    id: str
    target: str
    runtime: str
    method: str
    model: str
    generates: bool
    """It answers with text, so GET /v1/models lists it as well."""
    bytes: int


class MethodWords(ResponseBody):
    """A training method in words."""

    name: str
    words: str
    """Its benefit and its cost."""
    trains: Literal["adapter", "all"]
    """An adapter, or all parameters of the model."""


class RowForm(ResponseBody):
    """A format of rows, with the fields that columns can be named for."""

    name: str
    fields: list[str]
    optional: list[str]


class TemplateForm(ResponseBody):
    """A prompt template, with the columns that it reads."""

    name: str
    format: str
    fields: dict[str, list[str]]
    """{field: names of its column}, of which the first that a row has is taken. `label` is the
    answer."""
    labels: list[str]
    """The answers to choose from; empty for generated text, or if each row has its own."""


class Settings(ResponseBody):
    """GET /v1/settings."""

    run_file: dict[str, Any]
    """JSON schema of a run file: sections, and keys with types, limits, defaults and meanings."""
    tasks: list[str]
    """Built-in prompt templates for `data.task`; GET /v1/templates has the store's own."""
    templates: list[TemplateForm]
    """The same, with their fields."""
    formats: list[RowForm]
    """Formats of rows without a template, those of every day first."""
    methods: list[MethodWords]
    """The training methods, those that are chosen by themselves first."""


class Columns(ResponseBody):
    """A file at a first look."""

    columns: list[str]
    rows: list[dict[str, str]]
    """The first rows, each value as a text of at most 300 characters."""
    format: str | None
    """The format that the columns' names fit; None if columns have to be named."""
    suggested: dict[str, dict[str, str]]
    """{format: {field: column}} of the likeliest columns, the likeliest format first."""


class Table(ResponseBody):
    """The rows of a small file."""

    columns: list[str]
    rows: list[dict[str, Any] | str]
    """Objects, or texts for the lines of a .txt file."""


class TableRequest(Documented):
    """The body of POST /v1/tables/write."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=200, pattern=r"[^./\\]\.(csv|tsv|jsonl|xlsx)$")
    """The file's name; its ending says what kind of table to write."""
    like: str | None = Field(default=None, max_length=200)
    """The name of the file that the rows are from: the numbers of an Excel sheet stay numbers."""
    columns: list[str] = Field(min_length=1, max_length=1000)
    rows: list[dict[str, Any]] = Field(max_length=20_000, fail_fast=True)


class Dataset(ResponseBody):
    """Rows in the store."""

    id: str
    name: str
    format: str
    rows: int
    bytes: int
    sha256: str
    problems: list[RowProblem]
    """The first hundred rows that were left out."""
    task: str | None = None
    """The prompt template of the upload, for jobs that name none."""
    columns: dict[str, str] | None = None
    """The file's columns of the format's fields, likewise."""
    created_s: float


class MethodRequest(Documented):
    """The body of POST /v1/method."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=200)
    """A model of GET /v1/models, or a hub id."""


class Chosen(ResponseBody):
    """The method for a job that names none, and the reason."""

    method: str
    said: str


class PreviewRequest(Documented):
    """The body of POST /v1/datasets/ID/preview. A model or an artifact reads the rows."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=one_of("model", "artifact"))

    model: str | None = Field(default=None, max_length=200)
    """A model of GET /v1/models, or a hub id."""
    artifact: str | None = Field(default=None, max_length=200)
    """An artifact, instead of a model."""
    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """A prompt template of the tasks."""
    max_length_tokens: int | None = Field(default=None, ge=8, le=65536)
    """By default, chosen for the rows."""
    column: list[str] | None = Field(default=None, max_length=40)
    """Entries of the form field=column."""
    train_on_prompt: bool = False
    strict_columns: bool = False
    """Refuse rows with a column or key that nothing reads."""
    rows: int = Field(default=3, ge=0, le=50)
    """Examples to decode."""


class Upload(ResponseBody):
    """An unfinished upload."""

    id: str
    kind: Literal["dataset", "model", "artifact", "adapter"]
    name: str
    bytes: int
    received_bytes: int
    created_s: float


class Placed(ResponseBody):
    """The thing in the store that a finished upload has become."""

    kind: Literal["dataset", "model", "artifact", "adapter"]
    id: str
