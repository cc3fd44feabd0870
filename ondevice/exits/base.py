"""A form's interface, request and checked result; the forms by name, without a framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError
from ondevice.core.near import nearest_value
from ondevice.models.text_model import with_text_names

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.data.tasks.trained import TrainedTask


@dataclass(frozen=True)
class Request:
    """A request to write a form.

    Attributes:
        adapter: as it was trained; it changes something.
        folder: of its files.
        model: the base model's source; None if omitted, for a form that needs none.
        revision: of a hub id.
        dtype: of the written weights; empty for a form without a choice, or for the base's own.
        out: its final path, for errors and texts; `Form.write` gets the path to write to.
        task: what the adapter was trained to do; None if its folder has no record.
        text: the base is a checkpoint's language model, if it has one.
        known: what `Form.check` has found out of this request for `Form.write`, by name.
    """

    adapter: Adapter
    folder: Path
    model: str | None
    revision: str | None
    dtype: str
    out: Path
    task: TrainedTask | None = None
    text: bool = False
    known: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Checked:
    """The result of reading a form back. Differences are the largest absolute ones of the logits on
    `fuse.PROMPTS`.

    Attributes:
        from_base: what the exit changes; never 0. None without a model: only the numbers were
            compared then.
        from_adapter: what was written against base plus adapter, both in float32.
        largest: logit, the scale of both.
        kept: fraction of the adapter's change of the weights that rounding left; 1 without
            rounding.
        notes: what the user should know, one sentence each.
    """

    from_base: float | None
    from_adapter: float | None
    largest: float | None
    kept: float = 1.0
    notes: tuple[str, ...] = ()


def takes_all(request: Request) -> None:
    """Check nothing: a form for every model."""


@dataclass(frozen=True)
class Form:
    """A way out.

    Attributes:
        name: as `--to` takes it.
        reader: the program that reads it.
        write: write to a path that does not exist (a file) or is an empty folder, read back,
            compare.
        marker: a file that a folder of this form has; None if the form is one file.
        dtypes: of the written weights, the default first; empty without a choice.
        merged: the full model is written, not only the adapter.
        needs_model: it cannot be written from only the adapter.
        max_rank: the largest rank that the reader takes; None for no limit.
        experts: it takes pairs for experts' matrices.
        check: refuse a model of which there is no such form, from its configuration and tokenizer.
        whole: a checkpoint that also reads images stays whole; else only its language model is
            written, as a model of text.
        rounds: of a form with the adapter next to the base: the type that has the very weights of a
            training on rounded ones, by their rounding (`Adapter.base_weights`).
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
    check: Callable[[Request], None] = takes_all
    whole: bool = False
    rounds: Mapping[str, str] = field(default_factory=dict, hash=False)

    def request(self, request: Request) -> Request:
        """Return the request to this form: an adapter under the names that its base has there."""
        if self.whole:
            return request
        return replace(request, adapter=with_text_names(request.adapter), text=True)


def form_names() -> tuple[str, ...]:
    """List the forms by the names of this package's modules; none of them is imported."""
    package = Path(__file__).parent
    found = [
        path
        for path in sorted(package.glob("*.py"))
        if "\nFORM = " in path.read_text(encoding="utf-8")
    ]
    return tuple(path.stem.replace("_", "-") for path in found)


def form_of(name: str) -> Form:
    """Return the form of that name; ConfigError with all names if the name is unknown."""
    if name not in form_names():
        near = nearest_value(name, form_names())
        raise ConfigError(
            "unknown form",
            expected=", ".join(form_names()),
            received=name,
            hint=near and f"did you mean --to {near}?",
        )
    return importlib.import_module(f"ondevice.exits.{name.replace('-', '_')}").FORM
