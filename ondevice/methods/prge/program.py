"""P-RGE's step as a program: which settings it takes, its methods (`modules`) and state, and how it
compares with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ondevice.core.errors import ModelError
from ondevice.core.manifest import (
    AdapterEntry,
    Counter,
    StateTensor,
    TensorPort,
    port,
    row_ports,
    token_ports,
)
from ondevice.core.program import Agreement, BuiltProgram, GraphProgram, ProgramModule, TorchProgram
from ondevice.core.traits import check_traits
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.modules import (
    ApplyUpdate,
    Evaluate,
    GetState,
    KeptState,
    NextToken,
    SetState,
    StatefulApplyUpdate,
    StatefulEvaluate,
    StatefulTrainStep,
    TrainStep,
)
from ondevice.methods.prge.step import PrgeProgram
from ondevice.methods.prge.subspace import read_factors
from ondevice.methods.prge.subspace_program import (
    ProgramSubspace,
    SubspaceLayout,
    SubspaceProgram,
    at_export,
)
from ondevice.nn.program_loss import quantize_model
from ondevice.runtime_ops import graph

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession, Session
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.models import LoadedModel

IN_PROGRAM = (
    "norms", "qk_norm_all", "fused", "rotary", "rotary_width", "windows", "score_scale", "embedding_scale",
    "residual_scale", "logit_scale", "norm_offset", "activation",
)  # fmt: skip
"""Traits of a block with which programs were held against eager PyTorch."""
CORRELATED = 12
"""Projected gradients at least that a correlation with the model before quantisation is taken over.
"""
ROUGH_SCALE = 3e-2
"""Perturbation scales from here on are large compared with 8-bit activations."""


def problems(config: PrgeConfig, export: ExportConfig, dims: ModelDims) -> list[str]:
    """Return settings that a program does not have."""
    problems = []
    try:
        check_traits(dims, "a program of prge's step", IN_PROGRAM, max(export.lengths_tokens))
    except ModelError as error:
        problems.append(str(error))
    if not (config.batch_signs and config.batch_queries):
        problems.append(
            "an exported step is one forward pass: leave batch_signs and batch_queries on"
        )
    if config.subspace == "gradient" and config.factors is None:
        problems.append(
            "method.subspace is gradient: a program computes none; leave subspace out and give rows of the task "
            "(--data), or method.factors, a subspace-*.safetensors that a run in PyTorch wrote"
        )
    if config.factors is not None and not config.factors.is_file():
        problems.append(f"method.factors: there is no file {config.factors}")
    if export.quantize in ("int8", "8da8w"):
        problems.append(
            f"export.quantize is {export.quantize}: a prge program has none, q4 or 8da4w"
        )
    if export.shared_context:
        problems.append(
            "export.context_tokens goes with export.answers=packed: a whole step has no functions of one block"
        )
    if export.next_token and (export.form != "functional" or export.quantize != "none"):
        problems.append("next_token goes with form functional and float32 weights")
    return problems


def build_program(
    loaded: LoadedModel, config: PrgeConfig, export: ExportConfig, seed: int
) -> PrgeProgram:
    """Return the program to export, which eager runs as reference. Changes `loaded.model` in place
    (adapters, quantised weights).

    Args:
        loaded: a float32 model.
        seed: draws the frozen A.
    """
    export = export.resolved()
    token_loss = quantize_model(loaded.family, export, config.loss_tiles, config.answers)
    noise: Any = noise_op(config, export.generator)
    config = config.for_program()
    if config.factors is not None:
        program: PrgeProgram = SubspaceProgram(
            loaded.family, SubspaceLayout(loaded.dims, config, seed), config, noise, token_loss
        )
    else:
        layout = AdapterLayout.build(loaded.dims, config, seed)
        program = PrgeProgram(loaded.family, layout, config, noise, token_loss=token_loss)
    program.labelled_tokens = 1 if config.answers else config.labelled_tokens
    program.use_explicit_masks(export.lengths_tokens)
    return program


def noise_op(config: PrgeConfig, generator: str) -> Any:
    """Return the generator as `aten` graph or as this project's `op`."""
    if generator == "aten":
        return graph.aten_normal if config.noise == "gaussian" else graph.aten_rademacher
    from ondevice.runtime_ops import torch_ops

    torch_ops.register()
    return (
        torch.ops.ondevice.normal if config.noise == "gaussian" else torch.ops.ondevice.rademacher
    )


def build(loaded: LoadedModel, config: PrgeConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """See `GraphProgram.build`; the longest bucket has the plain names, others carry their length."""
    program = build_program(loaded, config, export, seed)
    state, scalars, gradients, losses = ports(program)
    kept = KeptState(program.state_shapes) if export.form == "stateful" else None
    modules = []

    def add(name: str, functional: nn.Module, stateful: Any, inputs: tuple, outputs: tuple) -> None:
        """Add one method; the functional form takes the state behind the tokens, and gives what
        changes it last."""
        module = functional if kept is None else stateful(program, kept)
        modules.append(ProgramModule(name, module, inputs, outputs))

    # Passed in and out unless the program keeps it: Android's API can read and write no buffer of a
    # program.
    passed, adapter = ((), ()) if kept is not None else (state, state[:1])
    for length in export.lengths_tokens:
        suffix = "" if length == max(export.lengths_tokens) else f"_{length}"
        rows, tokens = export.eval_batch_size, token_ports(export.batch_size, length)
        add(f"train_step{suffix}", TrainStep(program), StatefulTrainStep, (*tokens, *passed, *scalars),
            (losses, gradients, *passed))  # fmt: skip
        add(f"evaluate{suffix}", Evaluate(program), StatefulEvaluate, (*token_ports(rows, length), *adapter),
            row_ports(rows))  # fmt: skip
    if export.next_token:
        longest, vocab = max(export.lengths_tokens), loaded.dims.vocab
        row = token_ports(1, longest)[0], port("length", "length", (1,), "int64", "tokens")
        logits = port("logits", "logits", (vocab,))
        modules.append(ProgramModule("next_token", NextToken(program), (*row, *adapter), (logits,)))
    total = port("sum", "sum", (1,))
    replayed = gradients, *scalars
    add(
        "apply_update",
        ApplyUpdate(program),
        StatefulApplyUpdate,
        (*passed, *replayed),
        passed or (total,),
    )
    if kept is not None:
        for one in state:
            modules.append(ProgramModule(f"get_{one.name}", GetState(kept, one.name), (), (one,)))
            modules.append(
                ProgramModule(f"set_{one.name}", SetState(kept, one.name), (one,), (total,))
            )
    return built(program, loaded, tuple(modules), kept="host" if kept is None else "program")


def built(
    program: PrgeProgram, loaded: LoadedModel, modules: tuple[ProgramModule, ...], **more: Any
) -> BuiltProgram:
    """Return the state of a program, the run's step number, and the frozen A of every layer where A
    is no state."""
    config, layout, where = program.config, program.layout, more.pop("kept", "host")
    names = {
        entry: loaded.family.linear_name(entry.layer, entry.target) for entry in layout.entries
    }
    state = tuple(
        StateTensor(
            name=name,
            dtype="float32",
            shape=(size,),
            role="optimizer" if number else "adapter",
            kept=where,
        )
        for number, (name, size) in enumerate(program.state_shapes.items())
    )
    rank, spans = config.rank, program.spans if isinstance(program, SubspaceProgram) else None
    if spans is None:
        more["frozen"] = {
            f"{names[entry]}.lora_A.weight": np.ascontiguousarray(layout.frozen_a(entry).T)
            for entry in layout.entries
        }
    else:
        rank = spans.rank
        if (
            config.factors is not None and config.factors.is_file()
        ):  # else the state has it: an artifact's, or that of a calibration
            more["first"] = spans.begun(read_factors(config.factors, spans.small.entries))
    return BuiltProgram(
        eager=program,
        loaded=loaded,
        modules=modules,
        state=state,
        counters=(Counter(name="step", counts="run_steps"),),
        layout=tuple(
            AdapterEntry(
                linear=names[entry], layer=entry.layer, target=entry.target, offset=entry.offset,
                rank=entry.rank if spans is None else rank, inputs=entry.inputs, outputs=entry.outputs,
                a_offset=None if spans is None else spans.a_offsets[entry],
            )
            for entry in layout.entries
        ),
        rank=rank,
        alpha=config.alpha * rank / config.rank,
        noise=config.noise,
        **more,
    )  # fmt: skip


def ports(
    program: PrgeProgram,
) -> tuple[tuple[TensorPort, ...], tuple[TensorPort, ...], TensorPort, TensorPort]:
    """Return the state, the three scalars, projected gradients, losses."""
    config = program.config
    rate = port("learning_rate", "learning_rate", (1,))
    return (
        tuple(port(name, "state", (size,)) for name, size in program.state_shapes.items()),
        (port("seed", "seed", (1,), "int64"), port("step", "counter", (1,), "int64"), rate),
        port(
            "projected_gradients",
            "projected_gradients",
            (config.queries,),
            unit="nats per unit of perturbation",
        ),
        port("losses", "losses", (config.copies,), unit="nats per labelled token"),
    )


def state_of(session: ProgramSession, program: PrgeProgram) -> tuple[Tensor, ...]:
    """Return the state of a session as eager takes it."""
    state = session.state()
    return tuple(torch.from_numpy(state[name]) for name in program.state_shapes)


def compare(
    session: ProgramSession, built: BuiltProgram, batches: Iterable[Batch], learning_rate: float
) -> Agreement:
    """Run both sides over `batches`, once free-running and once with the runtime's projected
    gradients.

    Values: `max_rel_loss_error` free-running, each side following its own projected gradients;
    `max_rel_loss_error_replayed`, the runtime's fed to both sides; `max_abs_adapter_error` and
    `max_abs_adapter_error_free` of the adapter after the steps; `gradient_correlation` of the
    projected gradients at the same adapter (NaN below three directions).
    """
    program: PrgeProgram = built.eager
    seed = torch.tensor([session.seed])
    rate = torch.tensor([learning_rate], dtype=torch.float32)
    free = replayed = state_of(session, program)
    free_error = replay_error = 0.0
    pairs: list[tuple[float, float]] = []
    steps = 0
    with torch.inference_mode():
        for number, (ids, labels) in enumerate(batches):
            step = torch.tensor([number])
            tokens = torch.from_numpy(ids), torch.from_numpy(labels)
            result = session.step(ids, labels, number, learning_rate)
            losses, gradients, *free = program.stepped(*tokens, free, seed, step, rate)
            free_error = float(
                np.maximum(free_error, _relative(result.losses, losses))
            )  # NaN stays NaN
            if number:
                losses, gradients, *_ = program.stepped(*tokens, replayed, seed, step, rate)
            replay_error = float(np.maximum(replay_error, _relative(result.losses, losses)))
            pairs += zip(result.projected_gradients, gradients.tolist(), strict=True)
            own = torch.tensor(result.projected_gradients, dtype=torch.float32)
            replayed = program.update(replayed, own, seed, step, rate)
            steps += 1
    flat = session.state()["adapter"]
    adapter_error = float(np.abs(flat - replayed[0].numpy()).max())
    values = {
        "steps": steps,
        "max_rel_loss_error": free_error,
        "max_rel_loss_error_replayed": replay_error,
        "max_abs_adapter_error": adapter_error,
        "max_abs_adapter_error_free": float(np.abs(flat - free[0].numpy()).max()),
        "gradient_correlation": float(np.corrcoef(np.array(pairs).T)[0, 1])
        if len(pairs) > 2
        else float("nan"),
    }
    return Agreement(
        values, {"loss": replay_error, "loss_free": free_error, "update": adapter_error}
    )


def rounding(
    session: ProgramSession,
    float32: BuiltProgram,
    config: PrgeConfig,
    batches: Callable[[int], Iterable[Batch]],
) -> tuple[dict[str, Any], list[str]]:
    """Measure the effect of 8-bit activations on the projected gradients: the program against the
    float32 model in eager."""
    correlation = gradient_correlation(
        session, float32.eager, batches(-(-CORRELATED // config.queries))
    )
    warnings = []
    if config.perturbation_scale < ROUGH_SCALE:
        warnings.append(
            f"8da4w rounds activations to 8 bits: at perturbation scale {config.perturbation_scale:g} "
            f"the projected gradients correlate {correlation:.2f} with float32's; "
            "use --quantize q4, or a scale of 3e-2 or more"
        )
    return {"gradient_correlation_float32": correlation}, warnings


def gradient_correlation(
    session: ProgramSession, program: PrgeProgram, batches: Iterable[Batch]
) -> float:
    """Correlate the session's projected gradients with those of `program` in eager: at the adapter
    zero, or where the session stands if A is a part of it.

    Args:
        program: of the same method and seed; it may be another model, such as the one before
            quantisation.
    """
    seed, rate = torch.tensor([session.seed]), torch.zeros(1)
    if program.config.factors is None:
        session.load_state(
            {**session.state(), "adapter": np.zeros(program.layout.size, np.float32)}
        )
    first = state_of(session, program)
    received, expected = [], []
    with torch.inference_mode():
        for number, (ids, labels) in enumerate(batches):
            received += session.step(ids, labels, number, 0.0).projected_gradients
            tokens = torch.from_numpy(ids), torch.from_numpy(labels)
            expected += program.stepped(*tokens, first, seed, torch.tensor([number]), rate)[
                1
            ].tolist()
    return float(np.corrcoef(received, expected)[0, 1])


def _relative(received: tuple[float, ...], expected: torch.Tensor) -> float:
    reference = expected.double().numpy()
    return float(
        np.max(np.abs(np.array(received) - reference) / np.maximum(np.abs(reference), 1e-12))
    )


def _open_fixed(loaded: LoadedModel, config: PrgeConfig, seed: int) -> Session:
    """Open a session of fixed shapes, whose steps on a GPU are CUDA graphs."""
    from ondevice.methods.prge.graphed import GraphedPrgeSession

    return GraphedPrgeSession(loaded, config, seed)


EXECUTORCH = GraphProgram(
    problems,
    build,
    compare,
    rounding,
    rounded=("8da4w",),
    calibrate=at_export,
    refresh=ProgramSubspace,
)
TORCH = TorchProgram(trains_a=lambda config: False, open_fixed=_open_fixed)
