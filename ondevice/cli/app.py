"""All verbs, and how each of them reports an error."""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Any

import typer

from ondevice.cli import (
    adapters,
    common,
    configs,
    data,
    export,
    fleet,
    history,
    jobs,
    models,
    phone,
    plans,
    runs,
    serve,
)
from ondevice.cli.common import err, print_json
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, ConfigError, MissingPackageError, OndeviceError, StorageError
from ondevice.core.near import nearest
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
    **dict.fromkeys(("torch", "transformers", "peft", "gguf", "tokenizers", "huggingface_hub", "filelock"), "torch"),
    **dict.fromkeys(("executorch", "torchao"), "executorch"),
    **dict.fromkeys(("mlx", "mlx_lm"), "mlx"),
    **dict.fromkeys(("bitsandbytes", "liger_kernel"), "cuda"),
    **dict.fromkeys(("openpyxl", "pyarrow"), "tables"),
    **dict.fromkeys(("fastapi", "uvicorn", "sse_starlette", "starlette", "prometheus_client"), "serve"),
}
"""Optional packages, and the extra that brings each: what a user sees where one is not there."""

app = typer.Typer(
    name="ondevice",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Fine-tune language models where the data lives.",
)
app.command("train")(runs.train)
app.command("run")(runs.run)
app.command("replay")(runs.replay)
app.command("eval")(runs.evaluate)
app.command("export")(export.export)
app.command("verify")(export.verify)
app.command("fuse")(adapters.fuse)
app.command("convert")(adapters.convert)
app.command("chat")(adapters.chat)
app.command("data")(data.data)
app.command("models")(models.models)
app.command("push")(phone.push)
app.command("pull")(phone.pull)
app.command("plan")(plans.plan)
app.command("doctor")(plans.doctor)
app.add_typer(fleet.app, name="fleet")
app.add_typer(configs.app, name="config")
app.add_typer(history.app, name="runs")
app.add_typer(serve.app, name="serve")
app.add_typer(jobs.app, name="jobs")


def version(value: bool) -> None:
    """Print the version and stop."""
    if value:
        typer.echo(own_version())
        raise typer.Exit


@app.callback()
def root(
    show: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version."),
) -> None:
    """Fine-tune language models where the data lives."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with the code of `ondevice.core.errors`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    common.command_line[:] = arguments
    # Before any verb imports a library that reads them; what the user has set stays.
    if not err.is_terminal or {"-q", "--quiet"} & set(arguments):  # a download shows how far it is to whoever looks
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao's import warns of its own enums
    try:
        code = app(args=arguments, standalone_mode=False)
    except OndeviceError as error:
        code = _report(error, arguments)
    except typer.Abort:
        code = INTERRUPTED_EXIT_CODE
    except NoArgsIsHelpError as error:  # a group without a verb: its help, which is no mistake's message
        err.print(error.format_message(), markup=False, soft_wrap=True)
        code = ConfigError.exit_code
    except USAGE_ERRORS as error:
        code = _report(_usage(error), arguments)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:  # a bug keeps its traceback
            raise
        hint = f"pip install 'ondevice-train[{extra}]'"
        code = _report(MissingPackageError(f"this needs the package '{error.name}'", hint=hint), arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # `ondevice ... | head`: without this, Python's last flush would print a traceback
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
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
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
    keys = [f"{section}.{name}" for section, kind in sections.items() if name in getattr(kind, "model_fields", {})]
    in_method = any(name in spec.config.model_fields for spec in methods())
    return keys + ([f"method.{name}"] if in_method and f"method.{name}" not in keys else [])


def _report(error: OndeviceError, arguments: list[str]) -> int:
    """Print an error, as JSON too where `--json` is among the arguments; return its exit code."""
    values: dict[str, Any] = error.to_dict()
    if "--json" in arguments:  # not from the parser: the error may be that the arguments cannot be parsed
        print_json(values)
    err.print(f"error: {error}", markup=False, soft_wrap=True)
    return error.exit_code
