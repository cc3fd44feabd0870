"""The interface of a form: its request, and the result of its check; the forms by name. It loads no framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter


@dataclass(frozen=True)
class Request:
    """A request to write a form.

    Attributes:
        adapter: as it was trained; it changes something.
        folder: where it lies.
        model: the base model's source; None where none is given and the form needs none.
        revision: of a hub id.
        dtype: of the written weights; empty for a form without a choice, or for the base's own.
        out: the place that it will have, for errors and texts. What is written goes where `Form.write` is told.
    """

    adapter: Adapter
    folder: Path
    model: str | None
    revision: str | None
    dtype: str
    out: Path


@dataclass(frozen=True)
class Checked:
    """The result of reading a form back. Differences are the largest absolute ones of the logits on `fuse.PROMPTS`.

    Attributes:
        from_base: what the exit changes; never 0. None where no model was given, and only the numbers were compared.
        from_adapter: what was written against base plus adapter, both in float32.
        largest: logit, the scale of both.
        kept: share of the adapter's change of the weights that rounding left; 1 where nothing is rounded.
        notes: what the user should know, one sentence each.
    """

    from_base: float | None
    from_adapter: float | None
    largest: float | None
    kept: float = 1.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """A way out.

    Attributes:
        name: as `--to` takes it.
        reader: the program that reads it.
        write: write to a path that does not exist (a file) or is an empty folder, read back, compare.
        marker: a file that a folder of this form has; None where the form is one file.
        dtypes: of the written weights, the default first; empty where there is no choice.
        merged: the whole model leaves, not the adapter alone.
        needs_model: it cannot be written from the adapter alone.
        max_rank: the largest rank that the reader takes; None for no limit.
        experts: it takes pairs beside experts' matrices.
    """

    name: str
    reader: str
    write: Callable[[Request, Path], Checked]
    marker: str | None
    dtypes: tuple[str, ...] = ()
    merged: bool = False
    needs_model: bool = True
    max_rank: int | None = None
    experts: bool = False


def form_names() -> tuple[str, ...]:
    """List the forms: the modules of this package that set `FORM`, by the file's name; none of them is imported."""
    package = Path(__file__).parent
    found = [
        path
        for path in sorted(package.glob("*.py"))
        if "\nFORM = " in path.read_text(encoding="utf-8")
    ]
    return tuple(path.stem.replace("_", "-") for path in found)


def form_of(name: str) -> Form:
    """Return the form of that name; ConfigError with all names if there is none."""
    if name not in form_names():
        raise ConfigError("unknown form", expected=", ".join(form_names()), received=name)
    return importlib.import_module(f"ondevice.exits.{name.replace('-', '_')}").FORM
