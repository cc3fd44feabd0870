"""The memory of a run and the time of a step, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ondevice.api.inputs import Rows, read_inputs
from ondevice.core.config import StrictConfig
from ondevice.core.registry import naming_methods
from ondevice.planning.estimate import Plan, plan_run
from ondevice.planning.estimate import plan as plan_sizes
from ondevice.training.choices import place
from ondevice.training.objective import with_objective
from ondevice.training.rows import OpenedRows, maximum_length

if TYPE_CHECKING:
    from ondevice.api.inputs import Model, Run
    from ondevice.api.runfile import RunConfig
    from ondevice.core.dims import ModelDims
    from ondevice.models import LoadedModel


@overload
def plan(
    config: Model | Run | None = None,
    rows: Rows | None = None,
    *,
    eval_rows: Rows | None = None,
    model: Model | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Plan: ...


@overload
def plan(
    config: str | ModelDims,
    rows: StrictConfig,
    *,
    batch_size: int,
    length_tokens: int,
    **settings: Any,
) -> Plan: ...


@naming_methods()
def plan(
    config: Any = None,
    rows: Any = None,
    *,
    eval_rows: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Plan:
    """Estimate memory by part and time of a training step; no weights are loaded.

    It takes what `train` takes: `plan(model, rows, method="lora", batch_size=8)`. Rows decide the
    maximum length, as they do for `train`; without them it is `max_length`, or 128 tokens.

    With `length_tokens` it takes a model's source or dimensions, and a method's settings in place
    of the rows: `plan("tiny:llama", ondevice.method_config("mesp"), batch_size=1,
    length_tokens=64)`. `dtype`, `export`, `runtime`, `device`, `device_file`, `revision`,
    `evaluates`, `memory_limit_bytes`, `rates` and `world` are those of
    `ondevice.planning.estimate.plan`.

    Args:
        config: a model, a model's source, a run, a run file's path, or settings by dotted key.
        rows, eval_rows: as for `train`.
        model: the model, if `config` is a run.
        tokenizer: of a model of transformers.
        settings: by plain name or dotted key.

    Raises:
        ConfigError: a setting, the device or the model's type is wrong.
        DataError: no row can be used.
        ModelError: the model cannot be found or read.
    """
    if "length_tokens" in settings:
        named = {"model_source": config if model is None else model, "method_config": rows}
        return plan_sizes(**{**named, **settings})
    settings.setdefault("out", Path("runs/default"))  # nothing is written
    inputs = read_inputs(
        config, rows, settings, eval_rows=eval_rows, model=model, tokenizer=tokenizer
    )
    run = inputs.config
    return planned(run, OpenedRows(run.data, inputs.rows, inputs.eval_rows), inputs.loaded)


def planned(run: RunConfig, opened: OpenedRows, loaded: LoadedModel | None = None) -> Plan:
    """Plan a run on this machine; its rows decide the objective and the maximum length.

    Raises:
        OndeviceError: as `plan`.
    """
    placement = place(run.method, run.train, run.model.device)
    if opened.rows is not None or run.data.path is not None:
        train, _ = with_objective(run.train, run.method, placement, opened)
        run = run.model_copy(update={"train": train})
    dims = loaded and loaded.dims
    length, _ = maximum_length(
        run.model,
        opened,
        loaded,
        fits=lambda tokens: plan_run(run.of_length(tokens), placement, dims).fits,
    )
    return plan_run(run.of_length(length), placement, dims, sizes=opened.sizes)
