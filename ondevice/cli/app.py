"""The verbs by name, and the report of their errors."""

from __future__ import annotations

import atexit
import errno
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any

import typer
import typer.core
import typer.main

from ondevice.cli import common
from ondevice.cli.common import check_arguments, discard_output, err, open_streams, print_json
from ondevice.core.errors import (
    INTERRUPTED_EXIT_CODE,
    ConfigError,
    DoesNotFitError,
    MissingPackageError,
    OndeviceError,
    StorageError,
    refused_memory,
    was_refused,
)
from ondevice.core.near import ELSEWHERE, nearest
from ondevice.core.process import own_version
from ondevice.core.registry import methods, name_methods

try:  # newer versions of typer carry click inside
    from typer._click.exceptions import ClickException as USAGE_ERRORS
    from typer._click.exceptions import NoArgsIsHelpError
except ImportError:
    from click.exceptions import ClickException as USAGE_ERRORS
    from click.exceptions import NoArgsIsHelpError

STORAGE_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EFBIG,
)
"""Errors of a full, read-only or missing disk. Any other OSError is a bug with a traceback."""

EXTRAS = {
    **dict.fromkeys(
        ("torch", "transformers", "peft", "gguf", "tokenizers", "huggingface_hub", "filelock"),
        "torch",
    ),
    **dict.fromkeys(("executorch", "torchao"), "executorch"),
    **dict.fromkeys(("mlx", "mlx_lm"), "mlx"),
    **dict.fromkeys(("bitsandbytes", "liger_kernel"), "cuda"),
    **dict.fromkeys(("openpyxl", "pyarrow"), "tables"),
    **dict.fromkeys(
        ("fastapi", "uvicorn", "sse_starlette", "starlette", "prometheus_client"), "serve"
    ),
}
"""The extra that installs each optional package, for the hint if one is missing."""

VERBS = {
    "demo": (
        "demo:demo",
        "Train a small model, and show its labels before and after.",
    ),
    "train": ("runs:train", "Fine-tune a model in PyTorch or MLX, with any method."),
    "run": ("runs:run", "Fine-tune with an exported program on this machine."),
    "replay": ("runs:replay", "Rebuild a zeroth-order run's adapter from its log."),
    "eval": ("runs:evaluate", "Compute loss and accuracy of a model or artifact."),
    "predict": ("predict:predict", "Predict the rows of a file with what was trained."),
    "export": ("export:export", "Export the training step as a program for another device."),
    "verify": ("export:verify", "Compare an exported program with eager PyTorch."),
    "fuse": ("adapters:fuse", "Merge an adapter into its model, and check the result."),
    "convert": ("adapters:convert", "Convert an adapter, or base plus adapter, to another format."),
    "chat": ("chat:chat", "Chat with a model or an artifact."),
    "data": ("data:data", "Check a file of rows: examples, lengths, bad rows."),
    "models": ("models:models", "List supported types of models and models on this disk."),
    "push": ("phone:push", "Copy an artifact to the app on a phone."),
    "pull": ("phone:pull", "Copy the app's adapters from the phone."),
    "plan": ("plans:plan", "Show the memory a run needs, and whether it fits."),
    "doctor": ("plans:doctor", "Check the packages installed here, and which methods can train."),
    "fleet": ("fleet:app", "Train one adapter on many devices, which send only numbers."),
    "config": ("configs:app", "Show the run file's schema, presets and defaults."),
    "runs": ("history:app", "List, show, compare, plot or remove the runs on this disk."),
    "serve": ("serve:app", "Run the daemon: a queue of jobs, an HTTP API and a web page."),
    "jobs": ("jobs:app", "Create, watch and control the jobs of a daemon."),
}
"""Each verb's function or app, `module:name` in this package, and its line in the list."""


class Verbs(MutableMapping[str, Any]):
    """The commands by name. Each is imported when it is needed, so that one does not import all."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, _, made_there = VERBS[name][0].partition(":")
            made = getattr(importlib.import_module(f"ondevice.cli.{module}"), made_there)
            if isinstance(made, typer.Typer):
                made.rich_markup_mode = None  # the same as the root's
                self._made[name] = typer.main.get_group(made)
            else:
                single = typer.Typer(add_completion=False, rich_markup_mode=None)
                single.command(name)(made)
                self._made[name] = typer.main.get_command(single)
            self._made[name].name = name
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class Group(typer.core.TyperGroup):
    """The root command, which lists its verbs without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Verbs()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in VERBS.items()])


app = typer.Typer(
    name="ondevice",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Fine-tune language models where the data lives.",
)


def version(value: bool) -> None:
    """Print the version and stop."""
    if value:
        typer.echo(own_version())
        raise typer.Exit


@app.callback()
def root(
    show: bool = typer.Option(
        False, "--version", callback=version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Fine-tune language models where the data lives."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line, and exit with a code of `ondevice.core.errors`."""
    if arguments is None:
        arguments = sys.argv[1:]
    open_streams()
    common.command_line[:] = arguments
    # Defaults for libraries that the verbs import later; the user's own settings stay.
    if not err.is_terminal or {"-q", "--quiet"} & set(arguments):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The import of torchao warns of its own enums.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    try:
        check_arguments(arguments)
        code = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except OndeviceError as error:
        code = _report(error, arguments)
    except typer.Abort:
        code = INTERRUPTED_EXIT_CODE
    except NoArgsIsHelpError as error:  # a group without a verb prints its help
        err.print(error.format_message(), markup=False, soft_wrap=True)
        code = ConfigError.exit_code
    except USAGE_ERRORS as error:
        code = _report(_usage(error), arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        discard_output()
        code = 1
    except Exception as error:
        known = _of_the_machine(error)
        if known is None:  # a bug keeps its traceback
            raise
        code = _report(known, arguments)
    sys.exit(code if isinstance(code, int) else 0)


def _of_the_machine(error: Exception) -> OndeviceError | None:
    """Return the error for a package, memory or disk that is missing; None for any other."""
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is not None:
            hint = f"pip install 'ondevice-train[{extra}]'"
            return MissingPackageError(f"this needs the package '{error.name}'", hint=hint)
    if was_refused(error):
        # Libraries that could not be loaded whole print tracebacks of their own at the exit.
        atexit.register(os._exit, DoesNotFitError.exit_code)
        return refused_memory(error)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        if error.filename is None:
            discard_output()
        name = error.filename or "a file or standard output"
        return StorageError(f"{name}: {error.strerror}")
    return None


def _usage(error: Any) -> ConfigError:
    """Return the error for a mistake in the flags. For an unknown flag it suggests a near one."""
    hint = "`ondevice COMMAND --help` lists the flags"
    message = error.format_message()
    unknown = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    if unknown and context is not None:
        names = [name for parameter in context.command.params for name in parameter.opts]
        known = [name for name in names if name.startswith("--")]
        message = f"no such flag: {unknown}"
        # The parser's own guess compares only letters: `--lora-rank` would become `--dry-run`.
        if near := nearest(unknown, known):
            hint = f"did you mean {near}? {hint}"
        name = unknown.lstrip("-").replace("-", "_")
        if "--set" in known and (keys := _keys_named(name)):
            hint = f"that is a key of the run file: --set {keys[0]}=VALUE"
        elif "--set" in known and not near and (keys := _keys_named(ELSEWHERE.get(name, ""))):
            bits = re.search(r"(\d)bit", name)
            hint = f"did you mean --set {keys[0]}={bits[1] if bits else 'VALUE'}? {hint}"
    return ConfigError(message, hint=hint)


def _keys_named(name: str) -> list[str]:
    """List the run file's keys whose last part is `name`; a key of any method counts."""
    from ondevice.api.runfile import RunConfig  # loads pydantic, which the list of verbs must not

    keys = []
    for section, field in RunConfig.model_fields.items():
        if name in getattr(field.annotation, "model_fields", {}):
            keys.append(f"{section}.{name}")
    if any(name in spec.config.model_fields for spec in methods()):
        keys.append(f"method.{name}")
    return keys


def _report(error: OndeviceError, arguments: list[str]) -> int:
    """Print an error, also as JSON with `--json`, and return its exit code."""
    name_methods(error)
    with suppress(OSError):  # the status says it, if no stream takes a word
        if "--json" in arguments:  # not from the parser, which may have raised the error
            print_json(error.to_dict())
    with suppress(OSError):
        err.print(f"error: {error}", markup=False, soft_wrap=True)
    return error.exit_code
