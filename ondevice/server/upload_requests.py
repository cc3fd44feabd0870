"""Bodies of requests about uploads, and errors of uploads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError, DataError
from ondevice.server.fields import at_most
from ondevice.server.jobs import TASK_NAME
from ondevice.server.store import ID

Kind = Literal["dataset", "model", "artifact", "adapter"]
GIB = 1 << 30
LIMITS: dict[Kind, int] = {
    "dataset": 2 * GIB,
    "model": 64 * GIB,
    "artifact": 64 * GIB,
    "adapter": 4 * GIB,
}
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".xlsx", ".parquet", ".txt")
MOST_COLUMNS = 40
Columns = Annotated[dict[str, str], Field(max_length=MOST_COLUMNS), at_most(MOST_COLUMNS)]
_ENDINGS = "|".join(suffix.removeprefix(".") for suffix in ROW_SUFFIXES)
_NAMES: dict[Kind, str] = {
    "dataset": rf"[^./]\.({_ENDINGS})$",
    "model": f"^{ID.pattern}$",
    "artifact": f"^{ID.pattern}$",
    "adapter": ".",
}


class UploadRequest(StrictConfig):
    """The body of POST /v1/uploads."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "properties": {
                        "kind": {"const": kind},
                        "name": {"pattern": pattern},
                        "bytes": {"maximum": LIMITS[kind]},
                    }
                }
                for kind, pattern in _NAMES.items()
            ]
        }
    )

    kind: Kind
    """Rows as a file; a model, an artifact or an adapter as a zip of its folder."""

    name: str = Field(min_length=1, max_length=200)
    """A data set's file name, a model's or artifact's id, or an adapter's title."""

    bytes: int = Field(ge=1, le=64 * GIB)
    """Size of the file."""

    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the file; anything else is refused."""

    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """For rows: a prompt template; None infers the format from the keys."""

    columns: Columns = {}
    """For rows: the file's columns of fields with other names."""

    skip_bad_rows: bool = False
    """For rows: leave out bad ones instead of refusing the file."""


class IncompleteError(ConfigError):
    """Parts of an upload are missing, or do not belong to it."""


class FinishRequest(StrictConfig):
    """The body of POST /v1/uploads/ID/finish, if rows are read in another way than was first said."""

    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """A prompt template."""

    columns: Columns | None = None
    """The file's columns of fields with other names."""

    skip_bad_rows: bool | None = None
    """Leave out bad rows instead of refusing the file."""


class BadRowsError(DataError):
    """Unusable rows; `problems` has file, line, field and reason of the first of `count`."""

    def __init__(self, name: str, problems: list[dict[str, Any]], count: int) -> None:
        first = problems[0]
        field = ""
        if first["field"]:
            field = f" '{first['field']}':"
        super().__init__(
            f"{name}, line {first['line']}:{field} {first['reason']}",
            expected="only usable rows",
            received=f"{count} bad rows",
            hint="correct them, or upload with skip_bad_rows",
        )
        self.problems = problems
