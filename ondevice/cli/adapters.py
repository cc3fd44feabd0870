"""`ondevice fuse` and `ondevice convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.cli import common, flags
from ondevice.cli.common import err, one_of, print_json, show_table, table
from ondevice.core.errors import ConfigError

FORMS = (
    "executorch, gguf, gguf-lora, gguf-pair, mlx, mlx-model, mlx-pair, ollama, peft, safetensors"
    " or vllm"
)
"""The names of `ondevice.exits.form_names`, which a test compares; `--help` reads no folder."""
To = Annotated[str, typer.Option("--to", help=f"Format: {FORMS}.")]
WeightsDtype = Annotated[
    str | None, typer.Option("--dtype", help="Type of the written weights: float16, q8_0, ...")
]


def fuse(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The base model, or an artifact of it: the same as --model. Without it the adapter's.",
        ),
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[ADAPTER]", help="The same as --adapter.")
    ] = None,
    model: flags.Model = None,
    revision: flags.Revision = None,
    dtype: flags.Dtype = None,
    adapter: common.AdapterPath = None,
    target_dir: common.Out = None,
    overwrite: common.Overwrite = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Merge an adapter into its model, and check the result.

    One word is the adapter, or the run that trained it, if it names its base model."""
    source, trained = _model_and_adapter((first, second), model, adapter)
    if target_dir is None:
        raise ConfigError("no folder is given", expected="--out DIR")
    from ondevice.training.fuse import fuse as fuse_model

    with common.stages(quiet or json):
        report = fuse_model(
            source, trained, target_dir, dtype=dtype, revision=revision, overwrite=overwrite
        )
    values = {name: getattr(report, name) for name in report.__dataclass_fields__}
    show_table(values, json)


def _model_and_adapter(
    words: tuple[str | None, ...], model: str | None, adapter: Path | None
) -> tuple[str | None, Path]:
    """Return model and adapter from their flags, otherwise from the words in this order; no model
    if one word is all that is given, or --adapter.

    Raises:
        ConfigError: no adapter is given, or two.
    """
    left = [word for word in words if word is not None]
    if model is None and len(left) + (adapter is not None) > 1:
        model = left.pop(0)
    if adapter is None and left:
        adapter = Path(left.pop(0))
    if left:
        raise ConfigError(
            "the adapter is given twice",
            expected="one adapter",
            received=f"{left[0]} and {adapter}",
        )
    if adapter is None:
        raise ConfigError("no adapter is given", expected="MODEL ADAPTER, or --adapter")
    return model, adapter


def convert(
    first: Annotated[
        Path | None,
        typer.Argument(
            metavar="[ADAPTER]", help="Folder of an adapter (PEFT or mlx-lm) or of a run."
        ),
    ] = None,
    adapter: common.AdapterPath = None,
    to: To = "peft",
    model: flags.Model = None,
    revision: flags.Revision = None,
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="File or folder to write.")
    ] = None,
    dtype: WeightsDtype = None,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Convert an adapter, or base plus adapter, for another program, and check the result."""
    source = one_of(first, adapter, "adapter")
    if source is None:
        raise ConfigError(
            "no adapter is given", expected="--adapter, or an adapter as the first word"
        )
    if target is None:
        raise ConfigError("no output is given", expected="--out PATH")
    from ondevice.exits import convert as convert_source

    with common.stages(quiet or json):
        report = convert_source(
            source,
            to,
            target,
            model=model,
            revision=revision,
            dtype=dtype,
            overwrite=overwrite,
            dry_run=dry_run,
        )
    if json:
        print_json(report.to_dict())
        return
    values = report.to_dict()
    notes = values.pop("notes")
    table(values | {"bytes": common.mebibytes(report.bytes)})
    for note in notes:
        err.print(note, markup=False, soft_wrap=True)
