"""All verbs, and how each of them reports an error."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import typer
import typer.core
import typer.main

from ondevice.cli import common
from ondevice.cli.common import err, print_json
from ondevice.core.errors import (
    INTERRUPTED_EXIT_CODE,
    ConfigError,
    MissingPackageError,
    OndeviceError,
    StorageError,
)
from ondevice.core.method import load_place
from ondevice.core.near import nearest
from ondevice.core.registry import name_methods
from ondevice.core.version import own_version

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
"""Errors of a full, read-only or missing disk; any other OSError is a bug and keeps its traceback."""

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
"""Optional packages, and the extra that brings each: what a user sees where one is not there."""

VERBS = {
    "train": ("runs:train", "Fine-tune in eager PyTorch, or in MLX: any of the methods."),
    "run": ("runs:run", "Fine-tune with an exported program, on this machine."),
    "replay": ("runs:replay", "Rebuild a zeroth-order run's adapter from its log."),
    "eval": ("runs:evaluate", "Compute loss and accuracy of a model or an artifact."),
    "export": ("export:export", "Export the training step as a program for another device."),
    "verify": ("export:verify", "Hold a program against eager PyTorch."),
    "fuse": ("adapters:fuse", "Merge an adapter into its model and check the result."),
    "convert": ("adapters:convert", "Write an adapter, or base plus adapter, for another program."),
    "chat": ("chat:chat", "Talk to a model, or to an artifact in its runtime."),
    "data": ("data:data", "Show decoded examples of a file, and its bad rows."),
    "models": ("models:models", "List the types of models and the models on this disk."),
    "push": ("phone:push", "Put an artifact into the app on a phone."),
    "pull": ("phone:pull", "Bring the app's adapters from the phone."),
    "plan": ("plans:plan", "Show memory by part, and if it fits, before anything is loaded."),
    "doctor": ("plans:doctor", "Run a real kernel in every installed backend."),
    "fleet": ("fleet:app", "Many devices train one adapter and send only numbers."),
    "config": ("configs:app", "The run file: its schema, and what it resolves to."),
    "runs": ("history:app", "The runs on this disk: list, show, compare, plot, remove."),
    "serve": ("serve:app", "The daemon: a queue of jobs, an API and a page."),
    "jobs": ("jobs:app", "The queue of a daemon; a token is read from ONDEVICE_TOKEN."),
}
"""Every verb's place in this package, and its line in the list of verbs."""


class Verbs(MutableMapping[str, Any]):
    """The commands by name, each imported when it is asked for: one verb must not pay for the imports of all."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            made = load_place(f".{VERBS[name][0]}", "ondevice.cli")
            if isinstance(made, typer.Typer):
                made.rich_markup_mode = None  # as the root's
                self._made[name] = typer.main.get_group(made)
            else:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(name)(made)
                self._made[name] = typer.main.get_command(alone)
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
    """The root: it lists its verbs without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Verbs()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in VERBS.items()])


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
    """Run the command line; exits with the code of `ondevice.core.errors`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    common.command_line[:] = arguments
    # Before any verb imports a library that reads them; what the user has set stays.
    if not err.is_terminal or {"-q", "--quiet"} & set(
        arguments
    ):  # a download shows how far it is to whoever looks
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("torch.utils._pytree").setLevel(
        logging.ERROR
    )  # torchao's import warns of its own enums
    try:
        code = app(args=arguments, standalone_mode=False)
    except OndeviceError as error:
        code = _report(error, arguments)
    except typer.Abort:
        code = INTERRUPTED_EXIT_CODE
    except (
        NoArgsIsHelpError
    ) as error:  # a group without a verb: its help, which is no mistake's message
        err.print(error.format_message(), markup=False, soft_wrap=True)
        code = ConfigError.exit_code
    except USAGE_ERRORS as error:
        code = _report(_usage(error), arguments)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:  # a bug keeps its traceback
            raise
        hint = f"pip install 'ondevice-train[{extra}]'"
        code = _report(
            MissingPackageError(f"this needs the package '{error.name}'", hint=hint), arguments
        )
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT_CODE
    except (
        BrokenPipeError
    ):  # `ondevice ... | head`: without this, Python's last flush would print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS:
            raise
        code = _report(StorageError(f"{error.filename or 'a file'}: {error.strerror}"), arguments)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> ConfigError:
    """Return what a mistake in the flags is reported as; of an unknown flag or verb with the one that was meant."""
    hint, message = "`ondevice COMMAND --help` lists the flags", error.format_message()
    unknown, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if unknown and context is not None:
        known = [
            name
            for parameter in context.command.params
            for name in parameter.opts
            if name.startswith("--")
        ]
        # The parser's own guess goes by letters alone: `--lora-rank` would be `--dry-run`.
        message, near = f"no such flag: {unknown}", nearest(unknown, known)
        hint = f"did you mean {near}? {hint}" if near else hint
        if "--set" in known and (keys := _keys_named(unknown.lstrip("-").replace("-", "_"))):
            hint = f"that is a key of the run file: --set {keys[0]}=VALUE"
    return ConfigError(message, hint=hint)


def _keys_named(name: str) -> list[str]:
    """List the run file's keys whose last part is `name`, a method's of any method."""
    from ondevice.api.runfile import RunConfig
    from ondevice.core.registry import methods

    sections = {section: field.annotation for section, field in RunConfig.model_fields.items()}
    keys = [
        f"{section}.{name}"
        for section, kind in sections.items()
        if name in getattr(kind, "model_fields", {})
    ]
    in_method = any(name in spec.config.model_fields for spec in methods())
    return keys + ([f"method.{name}"] if in_method and f"method.{name}" not in keys else [])


def _report(error: OndeviceError, arguments: list[str]) -> int:
    """Print an error, as JSON too where `--json` is among the arguments; return its exit code."""
    name_methods(error)
    values: dict[str, Any] = error.to_dict()
    if (
        "--json" in arguments
    ):  # not from the parser: the error may be that the arguments cannot be parsed
        print_json(values)
    err.print(f"error: {error}", markup=False, soft_wrap=True)
    return error.exit_code
