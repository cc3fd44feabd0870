"""The bodies of requests and responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.server.jobs import MOST_ROWS, TASK_NAME, Limits, Window
from ondevice.server.queue import State


class ResponseBody(Documented):
    """The base of all responses."""


class RowProblem(ResponseBody):
    """A row that cannot be used."""

    file: str
    line: int
    """From 1; 0 if no single line is at fault."""
    field: str
    reason: str


class ErrorResponse(ResponseBody):
    """The body of a response with a status of 400 or more."""

    error: str
    """Class of the error; see the reference of errors."""
    message: str
    expected: Any = None
    received: Any = None
    hint: str | None = None
    problems: list[RowProblem] | None = None
    """The first hundred bad rows of a data set."""


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


class MetricsResponse(ResponseBody):
    """GET /v1/metrics."""

    uptime_s: float
    jobs: dict[State, int]
    event_streams: int
    requests: int
    running: RunningFigures | None


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
    bytes: int


class Settings(ResponseBody):
    """GET /v1/settings."""

    run_file: dict[str, Any]
    """JSON schema of a run file: sections, and keys with types, limits, defaults and meanings."""
    tasks: list[str]
    """Prompt templates for `data.task`."""


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


class Segment(ResponseBody):
    """A segment of a decoded example."""

    text: str
    trained: bool
    """True if its tokens are trained on."""


class MethodRequest(Documented):
    """The body of POST /v1/method."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=200)
    """A model of GET /v1/models, or a hub id."""


class PreviewRequest(Documented):
    """The body of POST /v1/datasets/ID/preview. A model or an artifact reads the rows."""

    model_config = ConfigDict(extra="forbid")

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


class PreviewResponse(ResponseBody):
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
    """Role of each example of preferences: chosen, rejected, thumbs up, thumbs down."""

    notes: list[str]
    """How the file was read: separator, sheet, columns, length, conversations, ends of replies."""

    unread: dict[str, int]
    """Columns and keys of turns that nothing reads, with the number of rows or turns."""

    example_unread: list[list[str]]
    """The parts of each example's row that nothing reads."""


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


class Chosen(ResponseBody):
    """The method for a job that names none, and the reason."""

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
    """A model of GET /v1/models, or a hub id. Give either a model or an artifact."""
    artifact: str | None = Field(default=None, min_length=1, max_length=200)
    """An artifact of GET /v1/artifacts for PyTorch, whose packed weights generate."""
    adapter: str | None = Field(default=None, max_length=64)
    """An adapter of GET /v1/adapters; None for the active one."""
    prompt: str | list[Message] = Field(min_length=1, max_length=100_000)
    """A text to continue, or a chat to reply to."""
    max_new_tokens: int = Field(default=64, ge=1, le=1024)
    temperature: float = Field(default=0.0, ge=0, le=10)
    seed: int = Field(default=0, ge=0, lt=2**31)


class GenerateResponse(ResponseBody):
    """The replies of the base model and of the adapter."""

    base: str
    adapted: str | None
    """None without an adapter."""
    adapter: str | None


class PredictRequest(Documented):
    """The body of POST /v1/predict."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200)
    """An adapter, model or artifact of GET /v1/models. An adapter is used with its base model."""
    rows: list[dict[str, Any] | Annotated[str, Field(max_length=100_000)]] = Field(
        min_length=1, max_length=MOST_ROWS
    )
    """Rows with the columns of the training's files; a text is a row's only column. A row needs no
    label; labels are compared with the predictions."""
    adapter: str | None = Field(default=None, max_length=64)
    """An adapter for a model or an artifact in `model`."""
    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """A task of GET /v1/settings, for what does not record its own."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096)
    """Most tokens of a generated answer; by default twice the longest answer of the training."""


class PredictedRow(ResponseBody):
    """The prediction for a row."""

    index: int
    """From 0."""
    prediction: str | float | None
    """The label's text, a number, or the generated text; None if the row cannot be predicted."""
    probability: float | None
    """Of the label; None for generated text."""
    probabilities: dict[str, float]
    """Of every label; empty for generated text."""
    reason: str | None
    """Why the row cannot be predicted."""
    is_cut: bool
    """The generated text reached its most tokens."""


class NotPredicted(ResponseBody):
    """A row that cannot be predicted."""

    row: int
    """From 1."""
    reason: str | None


class PredictResponse(ResponseBody):
    """POST /v1/predict."""

    object: Literal["list"] = "list"
    model: str
    format: str
    data: list[PredictedRow]
    rows: int
    predicted: int
    not_predicted: list[NotPredicted]
    cut: int
    """Generated texts that reached their most tokens."""
    labels: list[str]
    """Every label; empty for generated text."""
    accuracy: float | None
    """Share of the rows with labels whose prediction is right; None without labels."""
    correct: int | None
    compared: int
    """Rows with a label."""
    seconds_s: float


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


class ThumbRequest(Documented):
    """The body of POST /v1/thumbs."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[Message] = Field(min_length=1, max_length=100_000)
    """The prompt: a text that was continued, or a conversation up to its last user turn."""
    answer: str = Field(min_length=1, max_length=100_000)
    liked: bool
    """True for thumbs up."""
    model: str = Field(min_length=1, max_length=200)
    """The base model of the reply."""
    adapter: str | None = Field(default=None, max_length=64)
    """The adapter of the reply; None for only the base model."""


class Thumb(ResponseBody):
    """A rated reply."""

    id: str
    prompt: str | list[Message]
    answer: str
    liked: bool
    model: str
    adapter: str | None
    created_s: float


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


class SessionRequest(BaseModel):
    """The body of POST /v1/session."""

    model_config = ConfigDict(extra="forbid")
    token: str = Field(min_length=1, max_length=200)


class SessionKey(ResponseBody):
    """The page's half of a session; the cookie is the other one."""

    key: str = Field(description="Sent as the header `X-Ondevice-Key`, or as `?key=` of a link.")


class Done(ResponseBody):
    """It is done."""

    ok: Literal[True] = True
