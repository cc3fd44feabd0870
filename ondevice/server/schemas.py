"""The bodies of requests and answers: the models behind the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.server.jobs import TASK_NAME, Limits, Window
from ondevice.server.queue import State


class Answer(Documented):
    """The base of all answers."""


class RowProblem(Answer):
    """A row that cannot be used."""

    file: str
    line: int
    """From 1; 0 when no single line is at fault."""
    field: str
    reason: str


class ErrorAnswer(Answer):
    """Every answer from 400 on."""

    error: str
    """The kind of error; those of `ondevice` are in the reference of errors."""
    message: str
    expected: Any = None
    received: Any = None
    hint: str | None = None
    problems: list[RowProblem] | None = None
    """Bad rows of a data set, the first hundred."""


class Health(Answer):
    """GET /v1/health."""

    status: Literal["ok", "failing"]
    version: str
    token_needed: bool


class Gpu(Answer):
    """A CUDA device."""

    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class System(Answer):
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
    """By sensor; empty where the machine has none."""
    power_w: dict[str, float]
    """By rail; empty where the machine has none."""
    gpus: list[Gpu]
    memory_limit_by: Literal["cgroup", "watch"]
    """Who keeps a job's memory limit: the kernel, or the daemon that looks several times a second."""


class RunningFigures(Answer):
    """The job that runs."""

    job: str
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    memory_bytes: int
    peak_memory_bytes: int


class MetricsAnswer(Answer):
    """GET /v1/metrics."""

    uptime_s: float
    jobs: dict[State, int]
    event_streams: int
    requests: int
    running: RunningFigures | None


class Model(Answer):
    """A model that a job can name, or an adapter or an artifact that can be asked."""

    id: str
    kind: Literal["folder", "package", "random", "adapter", "artifact"]
    bytes: int
    object: Literal["model"] = "model"
    created: int = 0
    """Seconds since 1970; 0 where it is not known."""
    owned_by: str = "ondevice"
    base_model: str | None = None
    """Of an adapter."""
    model_type: str | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    vocab_size: int | None = None


class ModelList(Answer):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Artifact(Answer):
    """An exported program that a job can name."""

    id: str
    target: str
    runtime: str
    method: str
    model: str
    bytes: int


class Settings(Answer):
    """GET /v1/settings."""

    run_file: dict[str, Any]
    """JSON schema of a run file: the sections, their keys with types, limits, defaults and meaning."""
    tasks: list[str]
    """Prompt templates that `data.task` can name."""


class Dataset(Answer):
    """Rows in the store."""

    id: str
    name: str
    format: str
    rows: int
    bytes: int
    sha256: str
    problems: list[RowProblem]
    """Rows that were left out, the first hundred."""
    task: str | None = None
    """The prompt template that they were uploaded with; a job that names none takes it."""
    columns: dict[str, str] | None = None
    """Likewise, the file's columns of the format's fields."""
    created_s: float


class Segment(Answer):
    """A stretch of a decoded example."""

    text: str
    trained: bool
    """True if its tokens are trained on."""


class MethodRequest(Documented):
    """The body of POST /v1/method."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=200)
    """A model of GET /v1/models, or a hub id."""


class PreviewRequest(Documented):
    """The body of POST /v1/datasets/ID/preview: a model or an artifact reads the rows."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(default=None, max_length=200)
    """A model of GET /v1/models, or a hub id."""
    artifact: str | None = Field(default=None, max_length=200)
    """An artifact, in place of a model."""
    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """A prompt template of the tasks."""
    max_length_tokens: int | None = Field(default=None, ge=8, le=65536)
    """Taken from the rows if left out."""
    column: list[str] | None = Field(default=None, max_length=40)
    """Entries of the form field=column."""
    train_on_prompt: bool = False
    strict_columns: bool = False
    """Refuse rows with a column or a key that nothing reads."""
    rows: int = Field(default=3, ge=0, le=50)
    """Examples to decode."""


class PreviewAnswer(Answer):
    """GET /v1/datasets/ID/preview."""

    file: str
    format: str
    task: str | None
    template: str
    rows: int
    sequences: int
    max_length_tokens: int
    truncated: int
    too_long: int
    lengths_tokens: dict[str, int]
    trained_tokens: int
    suggested_max_length_tokens: int | None
    labels: dict[str, int]
    examples: list[list[Segment]]
    problems: list[RowProblem]
    example_names: list[str]
    """The role of each example, where rows are preferences: chosen, rejected, thumbs up, thumbs down."""

    notes: list[str]
    """How the file was understood: a separator, a sheet, columns, the length, conversations, what ends an answer."""

    unread: dict[str, int]
    """Columns of the file and keys of turns that nothing reads, with how many rows or turns have them."""

    example_unread: list[list[str]]
    """Of each example, what of its row nothing reads."""


class Upload(Answer):
    """An upload that has not been finished."""

    id: str
    kind: Literal["dataset", "model", "artifact", "adapter"]
    name: str
    bytes: int
    received_bytes: int
    created_s: float


class Placed(Answer):
    """The thing in the store that a finished upload became."""

    kind: Literal["dataset", "model", "artifact", "adapter"]
    id: str


class JobAnswer(Answer):
    """A job."""

    id: str
    number: int
    name: str
    state: State
    reason: str
    """Why it is in this state."""
    error: dict[str, Any] | None
    """For a failed job: error, message, expected, received, try, exit_code."""
    priority: int
    model: str | None
    artifact: str | None
    method: str | None
    """The training method; None for an artifact, whose program has one."""
    dataset: str
    eval_dataset: str | None
    adapter: str | None
    config: dict[str, Any]
    window: Window | None
    limits: Limits
    progress: dict[str, Any]
    """step, steps, loss, first_loss, final_loss, tokens_per_s, step_time_s, eta_s, learning_rate, peak_memory_bytes,
    peak_device_bytes, checkpoint_step, backend, evaluation: those that are known yet."""
    created_s: float
    started_s: float | None
    ended_s: float | None
    ran_s: float
    waits_s: float
    """Seconds until a job that crashed is tried again; 0 for at once."""
    crashes: int
    attempt: int
    last_event: int
    """Id of its newest event."""
    adapters: list[str]
    """Adapters that it made."""


class PlanAnswer(Answer):
    """The answer to a dry run: the run file with every default, and memory by part."""

    config: dict[str, Any]
    plan: dict[str, Any]
    """As `ondevice plan --json` prints it: parts_bytes, total_bytes, usable_bytes, fits, step_s_estimate, notes, ...;
    `meaning` says of each part what it is."""


class JobPatch(Documented):
    """The body of PATCH /v1/jobs/ID; what is not named stays."""

    model_config = ConfigDict(extra="forbid")

    priority: int | None = Field(default=None, ge=-1000, le=1000)
    window: Window | None = None
    """null takes the window away."""
    limits: Limits | None = None


class Adapter(Answer):
    """An adapter of the store."""

    id: str
    name: str
    job: str | None
    """The job that made it; None for an uploaded one."""
    base_model: str
    rank: int
    bytes: int
    sha256: str
    """Of adapter_model.safetensors."""
    created_s: float
    active: bool


class Active(Answer):
    """Which adapter is in use; None for the base model."""

    active: str | None


class Chosen(Answer):
    """The method of a job that names none, and why."""

    method: str
    said: str


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str = Field(min_length=1, max_length=100_000)


class GenerateRequest(Documented):
    """The body of POST /v1/generate."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(default=None, min_length=1, max_length=200)
    """A model of GET /v1/models, or a hub id. A question is for a model or an artifact."""
    artifact: str | None = Field(default=None, min_length=1, max_length=200)
    """An artifact of GET /v1/artifacts that PyTorch runs: its own weights, packed as they are, answer."""
    adapter: str | None = Field(default=None, max_length=64)
    """An adapter of GET /v1/adapters; None for the one that is active."""
    prompt: str | list[Message] = Field(min_length=1, max_length=100_000)
    """Text to continue, or a chat to answer."""
    max_new_tokens: int = Field(default=64, ge=1, le=1024)
    temperature: float = Field(default=0.0, ge=0, le=10)
    seed: int = Field(default=0, ge=0, lt=2**31)


class GenerateAnswer(Answer):
    """The base model's answer, and the adapter's."""

    base: str
    adapted: str | None
    """None where no adapter is named and none is active."""
    adapter: str | None


class ThumbRequest(Documented):
    """The body of POST /v1/thumbs."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[Message] = Field(min_length=1, max_length=100_000)
    """The prompt: a text that was continued, or a conversation up to its last question."""
    answer: str = Field(min_length=1, max_length=100_000)
    liked: bool
    """True is thumbs up."""
    model: str = Field(min_length=1, max_length=200)
    """The base model that answered."""
    adapter: str | None = Field(default=None, max_length=64)
    """The adapter it answered with; None for the base model alone."""


class Thumb(Answer):
    """A judged answer."""

    id: str
    prompt: str | list[Message]
    answer: str
    liked: bool
    model: str
    adapter: str | None
    created_s: float


class ExitForm(Answer):
    """A form that an adapter can leave in."""

    name: str
    reader: str
    """The program that reads it."""
    dtypes: list[str]
    """Of the written weights, the default first; empty where there is no choice."""
    merged: bool
    """The whole model leaves, not the adapter alone."""
    needs_model: bool
    folder: bool
    """True where a folder was made, which is downloaded as a zip."""


class Conversion(Answer):
    """An adapter on its way to another program."""

    id: str
    adapter: str
    to: str
    """A form of GET /v1/forms."""
    model: str | None
    dtype: str | None
    state: Literal["waiting", "running", "done", "failed"]
    stage: str
    """The stage that runs."""
    error: ErrorAnswer | None
    """Why it failed."""
    report: dict[str, Any] | None
    """The figures of reading it back, as `ondevice convert --json` prints it, without paths."""
    file: str | None
    """The name of what can be downloaded, once it is done."""
    bytes: int | None
    created_s: float


class SessionRequest(BaseModel):
    """The body of POST /v1/session."""

    model_config = ConfigDict(extra="forbid")
    token: str = Field(min_length=1, max_length=200)


class SessionKey(Answer):
    """The page's half of a session; the cookie is the other one."""

    key: str = Field(description="Sent as the header `X-Ondevice-Key`, or as `?key=` of a link.")


class Done(Answer):
    """It is done."""

    ok: Literal[True] = True
