"""Generated and predicted answers, and how people rate them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.server.fields import AT_ONCE
from ondevice.server.jobs import MOST_ROWS, TASK_NAME, one_of
from ondevice.server.schemas.common import ResponseBody


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str = Field(min_length=1, max_length=100_000)


class GenerateRequest(Documented):
    """The body of POST /v1/generate."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=one_of("model", "artifact"))

    model: str | None = Field(default=None, min_length=1, max_length=200)
    """A model of GET /v1/models, or a hub id. Give either a model or an artifact."""
    artifact: str | None = Field(default=None, min_length=1, max_length=200)
    """An artifact of GET /v1/artifacts: its packed weights generate, or its program in its runtime."""
    adapter: str | None = Field(default=None, max_length=64)
    """An adapter of GET /v1/adapters; None for the active one."""
    prompt: str | Annotated[list[Message], AT_ONCE] = Field(
        min_length=1, max_length=100_000, json_schema_extra={"minItems": 1}
    )
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
    left_out_tokens: int
    """Of a row that is too long."""


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
    shortened: int
    """Rows that are too long."""
    labels: list[str]
    """Every label; empty for generated text."""
    accuracy: float | None
    """Share of the rows with labels whose prediction is right; None without labels."""
    correct: int | None
    compared: int
    """Rows with a label that was trained."""
    unseen_labels: dict[str, int]
    """How many rows have each label that was not trained."""
    seconds_s: float


class ThumbRequest(Documented):
    """The body of POST /v1/thumbs."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | Annotated[list[Message], AT_ONCE] = Field(
        min_length=1, max_length=100_000, json_schema_extra={"minItems": 1}
    )
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


class ThumbCounts(ResponseBody):
    """The number of ratings of each kind."""

    up: int
    down: int


class FeedbackRequest(Documented):
    """The body of POST /v1/feedback."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=64)
    """The `id` of a response of /v1/chat/completions or /v1/completions."""
    rating: Literal["up", "down"]
    index: int = Field(default=0, ge=0, lt=128)
    """The choice that is rated."""
