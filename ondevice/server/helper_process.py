"""The process of a `Helper`: one JSON object a line in, one out. `python -m ondevice.server.helper_process PARENT`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ondevice.errors import DataError, OndeviceError, TrainingError
from ondevice.server import generate


def plan(config: dict[str, Any], artifact: str | None) -> dict[str, Any]:
    """Memory by part and time of a step, within the job's memory limit where it has one."""
    from ondevice.api.opening import resolve_device
    from ondevice.api.runfile import RunConfig
    from ondevice.artifact.manifest import read_manifest
    from ondevice.methods.registry import backend_for
    from ondevice.plan.artifacts import plan_artifact
    from ondevice.plan.estimate import plan as estimate
    from ondevice.plan.render import MEANING

    run = RunConfig.parse(config, "job")
    limit = run.train.memory_limit_bytes
    if artifact is not None:
        found = plan_artifact(Path(artifact), read_manifest(Path(artifact)), limit)
    else:
        mlx = backend_for(run.method, run.train.backend) == "mlx"
        found = estimate(
            run.model.source,
            run.method,
            batch_size=run.train.batch_size,
            length_tokens=run.data.max_length_tokens,
            dtype=run.model.dtype,
            runtime="mlx" if mlx else "torch",
            device="this-cpu" if mlx else f"this-{resolve_device(run.model.device)}",
            memory_limit_bytes=limit,
        )
    return found.to_dict() | {"meaning": {part: MEANING.get(part, "") for part in found.parts | found.host_parts}}


def validate(file: str, task: str | None) -> dict[str, Any]:
    """Read every row; format, counts and every bad row with line, field and reason."""
    from ondevice.data import read_rows

    rows = read_rows(file, task=task, allow_empty=True)
    name = Path(file).name
    problems = [problem.to_dict() | {"file": name} for problem in rows.problems]
    return {"format": rows.format, "rows": len(rows.items), "problems": problems}


def preview(
    file: str,
    model: str | None,
    task: str | None,
    max_length_tokens: int,
    train_on_prompt: bool,
    rows: int,
    artifact: str | None = None,
) -> dict[str, Any]:
    """Decoded examples with what is trained on, lengths and labels, by the model's tokenizer or the artifact's own."""
    from ondevice.api.opening import artifact_tokenizer
    from ondevice.data import preview as look
    from ondevice.models import load_tokenizer

    tokenizer = load_tokenizer(str(model)) if artifact is None else artifact_tokenizer(Path(artifact))
    found = look(
        file, tokenizer, task=task, max_length_tokens=max_length_tokens, train_on_prompt=train_on_prompt, rows=rows
    )
    return found.to_dict() | {"file": Path(file).name}


def check_model(folder: str) -> dict[str, Any]:
    """A model's sizes, its tokenizer and the shapes of its weights, all read."""
    from ondevice.models import load_tokenizer, read_dims
    from ondevice.models.load import _dims
    from ondevice.models.source import check_folder, check_weights

    dims = read_dims(folder)
    check_folder(Path(folder))
    check_weights(Path(folder), _dims(folder, None)[1].weight_shapes(dims))
    load_tokenizer(folder)
    return {"layers": dims.layers, "hidden": dims.hidden, "vocab": dims.vocab}


CALLS: dict[str, Callable[..., Any]] = {
    "plan": plan,
    "validate": validate,
    "preview": preview,
    "check_model": check_model,
    "generate": generate.answer,
}


def serve(source: Any, target: Any) -> None:
    """Answer until the other side closes."""
    for line in source:
        question = json.loads(line)
        try:
            answer = {"value": CALLS[question["call"]](**question["arguments"])}
        except OndeviceError as error:
            answer = {"error": error.to_dict()}
        except (ValueError, OSError, RecursionError, UnicodeError) as error:
            problem = DataError(f"{question['call']}: {type(error).__name__}: {error}")
            answer = {"error": problem.to_dict()}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": TrainingError(f"{question['call']} failed: {type(error).__name__}: {error}").to_dict()}
        target.write(json.dumps(answer).encode() + b"\n")
        target.flush()


def end_with(parent: int) -> None:
    """End when the daemon is gone. The kernel's signal for it would come when the thread ends that started us."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(arguments: list[str]) -> int:
    """The process; what libraries print goes to standard error."""
    threading.Thread(target=end_with, args=(int(arguments[0]),), daemon=True).start()
    for name, value in (("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
