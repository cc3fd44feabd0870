"""Things that a job uses: models, artifacts, data sets and their previews."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from ondevice.api.runfile import RunConfig
from ondevice.core.errors import BusyError, ConfigError
from ondevice.core.registry import methods
from ondevice.data.preview import Preview
from ondevice.data.tasks.looking import FORMS, form_of
from ondevice.data.tasks.templates import TASKS
from ondevice.server import adapters, jobs, schemas, thumbs
from ondevice.server.daemon import Daemon
from ondevice.server.jobs import artifact_folder, dataset_file, locate_task
from ondevice.server.openai import REFUSALS
from ondevice.server.placing import naming
from ondevice.server.routes import AFTER, MOST, After, Id, Limit, Serving, name_next
from ondevice.server.store import MissingError, new_id, not_listed
from ondevice.server.words import for_api, hint_for_api

router = APIRouter(prefix="/v1", tags=["data"])


@router.get("/models", response_model=schemas.ModelList, responses=REFUSALS)
def list_models(
    daemon: Serving,
    request: Request,
    response: Response,
    limit: Limit = MOST,
    after: Annotated[str | None, Query(max_length=200, description=AFTER)] = None,
) -> dict[str, Any]:
    """Return everything that can generate, in OpenAI's format.

    These are models on this machine (folders of the store, the packaged one if it is cached, random
    tiny ones for tests), the adapters, the newest first, each with its model, and artifacts that
    answer with text. `has_more` says whether entries follow: ask again with the last id as `after`."""
    models = _models(daemon)
    begin = 0
    if after is not None:
        ids = [model["id"] for model in models]
        if after not in ids:
            raise not_listed(after)
        begin = ids.index(after) + 1
    page = models[begin : begin + limit]
    more = begin + limit < len(models)
    name_next(page, more, limit, request, response)
    return {"object": "list", "data": page, "has_more": more}


def _models(daemon: Daemon) -> list[dict[str, Any]]:
    """Return everything that can generate."""
    owned = {"object": "model", "owned_by": "ondevice"}
    models = [{**model, **owned, "created": 0} for model in jobs.list_models(daemon.store)]
    for row in adapters.list_adapters(daemon.store, None)[0]:
        about = {
            "id": row["id"],
            "kind": "adapter",
            "bytes": row["bytes"],
            "created": int(row["created_s"]),
        }
        models.append({**about, **owned, "base_model": row["base_model"]})
    for one in jobs.list_artifacts(daemon.store):
        if one["generates"]:
            about = {
                "id": f"{jobs.ARTIFACT}{one['id']}",
                "kind": "artifact",
                "bytes": one["bytes"],
                "created": 0,
            }
            models.append({**about, **owned, "base_model": one["model"]})
    return models


def chosen_method(daemon: Daemon, model: str) -> dict[str, str]:
    """Return the method for a job of this model that names none, and the reason."""
    chosen = daemon.plan_helper("choose", source=jobs.locate_model(daemon.store, model))
    return chosen | {"said": str(hint_for_api(chosen["said"]))}


@router.post("/method", response_model=schemas.Chosen)
async def choose_method(daemon: Serving, body: schemas.MethodRequest) -> dict[str, str]:
    """Return the method for a job that names none: the first by preference that supports the model.

    This is a POST, because a hub id asks the hub."""
    return await daemon.pools.rows.run(chosen_method, daemon, body.model)


@router.get("/models/{model:path}", response_model=schemas.Model, responses=REFUSALS)
def get_model(
    daemon: Serving, model: Annotated[str, Path(min_length=1, max_length=200)]
) -> dict[str, Any]:
    """Return a model, an adapter or an artifact of GET /v1/models."""
    for one in _models(daemon):
        if one["id"] == model:
            return one
    raise MissingError("no such model", received=model, hint="GET /v1/models lists them")


@router.get("/artifacts", response_model=list[schemas.Artifact])
def list_artifacts(daemon: Serving) -> list[dict[str, Any]]:
    """Return the exported programs of the store."""
    return jobs.list_artifacts(daemon.store)


@router.delete("/models/{model}", response_model=schemas.Done, responses=REFUSALS)
def delete_model(daemon: Serving, model: Annotated[str, Path(max_length=200)]) -> dict[str, bool]:
    """Delete a model of the store that no waiting or running job uses."""
    return _delete(daemon, "model", model)


@router.delete("/artifacts/{artifact}", response_model=schemas.Done)
def delete_artifact(daemon: Serving, artifact: Id) -> dict[str, bool]:
    """Delete an exported program that no waiting or running job uses."""
    return _delete(daemon, "artifact", artifact)


@router.get("/settings", response_model=schemas.Settings)
def run_settings() -> dict[str, Any]:
    """Return the JSON schema of a job's `config`, for forms."""
    ordered = sorted(methods(), key=lambda spec: (spec.preference or len(TASKS), spec.name))
    return {
        "run_file": RunConfig.model_json_schema(),
        "tasks": sorted(TASKS),
        "templates": [form_of(TASKS[name]) for name in sorted(TASKS)],
        "formats": [asdict(form) for form in FORMS],
        "methods": [
            {"name": spec.name, "words": spec.words or spec.summary, "trains": spec.trains}
            for spec in ordered
        ],
    }


@router.get("/datasets", response_model=list[schemas.Dataset])
def list_datasets(
    daemon: Serving, request: Request, response: Response, limit: Limit = MOST, after: After = None
) -> list[dict[str, Any]]:
    """Return the data sets, the newest first."""
    rows, more = daemon.store.page("datasets", "-created_s, id", limit, after)
    name_next(rows, more, limit, request, response)
    return [_dataset(daemon, row) for row in rows]


@router.get("/datasets/{dataset}", response_model=schemas.Dataset)
def get_dataset(daemon: Serving, dataset: Id) -> dict[str, Any]:
    """Return one data set."""
    row = daemon.store.row("SELECT * FROM datasets WHERE id = ?", dataset)
    if row is None:
        raise MissingError(f"no such data set: {dataset}", hint="GET /v1/datasets lists them")
    return _dataset(daemon, row)


@router.post("/datasets/{dataset}/preview", response_model=Preview)
async def preview_dataset(
    daemon: Serving, dataset: Id, body: schemas.PreviewRequest
) -> dict[str, Any]:
    """Return rows as the model sees them: lengths, labels, and examples with the trained tokens.

    The data set `thumbs` is the ratings as they are now. This is a POST, because it may fetch a
    model from the hub."""

    def shown() -> dict[str, Any]:
        with thumbs.frozen(daemon.store, daemon.check, dataset, keep=False) as ids:
            return preview_file(daemon, dataset_file(daemon.store, str(ids["dataset"])), body)

    return await daemon.pools.rows.run(shown)


@router.get("/datasets/{dataset}/columns", response_model=schemas.Columns)
async def dataset_columns(daemon: Serving, dataset: Id) -> dict[str, Any]:
    """Return the columns of a data set and its first rows, as the file has them."""

    return await daemon.pools.rows.run(
        lambda: look_at_file(daemon, dataset_file(daemon.store, dataset))
    )


def look_at_file(daemon: Daemon, file: FilePath) -> dict[str, Any]:
    """Look at a file's columns in a helper process."""
    with naming(file, file.name):
        return daemon.data_helper("look", file=str(file))


def preview_file(daemon: Daemon, file: FilePath, body: schemas.PreviewRequest) -> dict[str, Any]:
    """Preview a file's rows in a helper process.

    Raises:
        ConfigError: neither a model nor an artifact is given, or both.
    """
    model = body.model
    artifact = body.artifact
    if (model is None) == (artifact is None):
        raise ConfigError(
            "give a model or an artifact", expected="one of them", received="both or none"
        )
    with naming(file, file.name):
        shown = daemon.plan_helper(
            "preview",
            file=str(file),
            model=None if model is None else jobs.locate_model(daemon.store, model),
            artifact=None if artifact is None else str(artifact_folder(daemon.store, artifact)),
            task=locate_task(daemon.store, body.task),
            columns=body.column,
            max_length_tokens=body.max_length_tokens,
            train_on_prompt=body.train_on_prompt,
            strict_columns=body.strict_columns,
            rows=body.rows,
        )
    problems = [problem | {"file": file.name} for problem in shown["problems"][:100]]
    notes = [for_api(note) for note in shown["notes"]]
    return shown | {"problems": problems, "notes": notes}


@router.delete("/datasets/{dataset}", response_model=schemas.Done)
def delete_dataset(daemon: Serving, dataset: Id) -> dict[str, bool]:
    """Delete a data set that no waiting or running job uses."""
    remove_dataset(daemon, dataset)
    return {"ok": True}


def remove_dataset(daemon: Daemon, dataset: str) -> None:
    """Delete a data set; raise BusyError if a waiting or running job uses it."""
    with daemon.store.transaction(frees=True) as db:
        dataset_file(daemon.store, dataset)
        for kind in ("dataset", "eval_dataset"):
            if job := daemon.queue.needing(kind, dataset):
                raise BusyError(f"job {job} needs the data set", hint="cancel the job first")
        db.execute("DELETE FROM datasets WHERE id = ?", (dataset,))
    daemon.store.discard("datasets", dataset)


def _delete(daemon: Daemon, kind: str, name: str) -> dict[str, bool]:
    """Remove a folder from the store at once; the cleanup of uploads removes what a kill leaves."""
    folder = daemon.store.path(f"{kind}s", name)
    with daemon.store.transaction(frees=True):
        if not folder.is_dir():
            raise MissingError(f"no such {kind}: {name}", hint=f"GET /v1/{kind}s lists them")
        if job := daemon.queue.needing(kind, name):
            raise BusyError(f"job {job} needs the {kind}", hint="cancel the job first")
        doomed = daemon.store.root / "uploads" / f".{new_id(kind)}"
        try:
            os.rename(folder, doomed)
        except OSError as error:
            raise ConfigError(
                f"the {kind} cannot be deleted", received=error.strerror, hint="its owner can"
            ) from None
    doomed.unlink() if doomed.is_symlink() else shutil.rmtree(doomed, ignore_errors=True)
    return {"ok": True}


def _dataset(daemon: Serving, row: Any) -> dict[str, Any]:
    options = jobs.dataset_options(daemon.store, row["id"])
    return {**dict(row), "problems": json.loads(row["problems"]), **options}
