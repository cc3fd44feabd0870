"""Prompt templates of one's own: how a row becomes a prompt, stored by name for jobs and uploads.

    templates/NAME.yaml    the keys of `ondevice.data.tasks.custom`, written as JSON, which is YAML

A template never changes: a job that is resumed must read its rows as before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from ondevice.artifact.files import atomic_write, storage_errors
from ondevice.core.errors import BusyError, ConfigError, DataError
from ondevice.core.untrusted import read_object
from ondevice.core.untrusted.yaml_documents import read_yaml
from ondevice.data.tasks.custom import Template, load_task, read_task
from ondevice.data.tasks.looking import form_of
from ondevice.data.tasks.task import Task, plain_name
from ondevice.data.tasks.templates import TASKS
from ondevice.server.jobs import OPTIONS, locate_task
from ondevice.server.store import MissingError, Store

MOST = 1000
"""Templates of a store."""
MOST_ITEMS = 1000
"""Fields, labels or candidates of one template."""


class TemplateRequest(Template):
    """The body of POST /v1/templates: how a row becomes a prompt, and its possible answers."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")
    """What jobs and uploads call it in `task`."""

    prompt: str = Field(min_length=1, max_length=100_000)
    """The text before the answer; `{name}` stands for the column of that name."""

    @model_validator(mode="before")
    @classmethod
    def check_sizes(cls, values: Any) -> Any:
        """Refuse a large template before each of its items is read."""
        for name, value in dict(values).items():
            if isinstance(value, (dict, list)) and len(value) > MOST_ITEMS:
                raise ValueError(f"'{name[:100]}' has more than {MOST_ITEMS} items")
        return values


def create(store: Store, request: TemplateRequest) -> dict[str, Any]:
    """Store a template, and return its fields.

    Raises:
        BusyError: the name is taken.
        ConfigError: its settings exclude each other.
    """
    if plain_name(request.name) in TASKS or _path(store, request.name).exists():
        raise BusyError(
            f"there is a template {request.name} already",
            expected="a new name; a template never changes",
            received=request.name,
            hint="choose another name",
        )
    if len(list_templates(store)) >= MOST:
        raise BusyError("there are too many templates", hint="delete one first")
    text = json.dumps(request.model_dump(exclude_defaults=True), ensure_ascii=False, indent=2)
    task = read_task(text, request.name)
    path = _path(store, request.name)
    with storage_errors(path):
        atomic_write(path, text + "\n")
    return _form(task, request)


def _form(task: Task, template: Template) -> dict[str, Any]:
    candidates = template.candidates
    labels: list[str] = []
    if isinstance(candidates, dict):
        labels = list(candidates.values())
    elif isinstance(candidates, tuple):
        labels = list(candidates)
    return form_of(task) | {"labels": labels}


def list_templates(store: Store) -> list[dict[str, Any]]:
    """Return the fields of the store's templates, by name."""
    found = []
    for path in sorted((store.root / "templates").glob("*.yaml")):
        try:
            template = Template.parse(read_yaml(path, yaml.BaseLoader), path.name)
            found.append(_form(load_task(path), template) | {"name": path.stem})
        except (ConfigError, OSError, ValueError):  # put there by hand
            continue
    return found


def remove(store: Store, name: str) -> None:
    """Delete a template that no data set and no waiting or running job uses.

    Raises:
        BusyError: one uses it.
        MissingError: the template does not exist.
    """
    path = _path(store, name)
    if locate_task(store, name) == name:
        raise MissingError(f"no such template: {name}", hint="GET /v1/templates lists them")
    for folder in (store.root / "datasets").iterdir():
        if _is_used(folder / OPTIONS, name):
            raise BusyError(
                f"data set {folder.name} is read by it", hint="delete the data set first"
            )
    job = store.row(
        "SELECT id FROM jobs WHERE state NOT IN ('cancelled', 'failed', 'done') "
        "AND json_extract(spec, '$.config.data.task') = ?", name,
    )  # fmt: skip
    if job:
        raise BusyError(f"job {job['id']} needs the template", hint="cancel the job first")
    with storage_errors(path):
        os.remove(path)


def _is_used(options: Path, name: str) -> bool:
    try:
        return read_object(options, DataError).get("task") == name
    except (OSError, DataError):
        return False


def _path(store: Store, name: str) -> Path:
    return store.path("templates", name).with_name(f"{name}.yaml")
