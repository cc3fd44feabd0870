"""P-RGE's step as a program: which settings it takes, its methods (`modules`) and state, and how it
compares with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

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
from ondevice.methods.prge.graphed import GraphedPrgeSession
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.modules import (
    ApplyUpdate,
    Evaluate,
    GetState,
    KeptState,
    NextToken,
    OnBuffers,
    SetState,
    TrainStep,
)
from ondevice.methods.prge.rounding import update_limit
from ondevice.methods.prge.step import PrgeProgram
from ondevice.methods.prge.subspace import read_factors
from ondevice.methods.prge.subspace_program import (
    ProgramSubspace,
    SubspaceLayout,
    SubspaceProgram,
    at_export,
)
from ondevice.nn.program_loss import quantize_model
from ondevice.runtime_ops import graph, torch_ops

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession, Session, StepResult
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.models import LoadedModel

IN_PROGRAM = (
    "norms", "qk_norm_all", "fused", "rotary", "rotary_width", "windows", "mixers", "score_scale", "embedding_scale",
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
        problems.append(error.reason)
    if dims.experts:
        problems.append(
            f"{dims.family} is a mixture of experts that each token chooses: a whole step is made before "
            f"the tokens are known, and would compute all {dims.experts} of them for each; expected "
            "--method mesp, jetson with --quantize none, or MLX"
        )
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
    noise: Any = graph.aten_normal if config.noise == "gaussian" else graph.aten_rademacher
    if export.generator != "aten":
        noise = torch_ops.noise(config.noise)
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


def build(loaded: LoadedModel, config: PrgeConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """See `GraphProgram.build`; the longest bucket has the plain names, others carry their length."""
    program = build_program(loaded, config, export, seed)
    state, scalars, gradients, losses = ports(program)
    kept = KeptState(program.state_shapes) if export.form == "stateful" else None
    # Passed in and out unless the program keeps it: Android's API can read and write no buffer of a
    # program.
    passed = () if kept else state
    modules = []

    def add(name: str, method: nn.Module, inputs: tuple, outputs: tuple, before: int = 0) -> None:
        """Add one method, which takes the state behind the first `before` inputs."""
        if kept is not None:
            method = OnBuffers(method, kept, before, writes=not isinstance(method, Evaluate))
        modules.append(ProgramModule(name, method, inputs, outputs))

    for length in export.lengths_tokens:
        suffix = "" if length == max(export.lengths_tokens) else f"_{length}"
        tokens = token_ports(export.batch_size, length)
        outputs = (losses, gradients, *passed)
        add(f"train_step{suffix}", TrainStep(program), (*tokens, *passed, *scalars), outputs, 2)
        rows = export.eval_batch_size
        inputs = (*token_ports(rows, length), *passed[:1])
        add(f"evaluate{suffix}", Evaluate(program), inputs, row_ports(rows))
    if export.next_token:
        tokens = token_ports(1, max(export.lengths_tokens))
        inputs = (tokens[0], port("length", "length", (1,), "int64", "tokens"), *passed[:1])
        logits = port("logits", "logits", (loaded.dims.vocab,))
        modules.append(ProgramModule("next_token", NextToken(program), inputs, (logits,)))
    total = port("sum", "sum", (1,))
    inputs = (*passed, gradients, *scalars)
    add("apply_update", ApplyUpdate(program), inputs, passed or (total,))
    if kept is not None:
        for one in state:
            get, put = GetState(kept, one.name), SetState(kept, one.name)
            modules.append(ProgramModule(f"get_{one.name}", get, (), (one,)))
            modules.append(ProgramModule(f"set_{one.name}", put, (one,), (total,)))
    return built(program, loaded, tuple(modules), kept="program" if kept else "host")


def built(
    program: PrgeProgram,
    loaded: LoadedModel,
    modules: tuple[ProgramModule, ...],
    kept: Literal["host", "program"] = "host",
    **more: Any,
) -> BuiltProgram:
    """Return the program with its state, the run's step number, and the frozen A of every layer if
    A is not part of the state."""
    config = program.config
    layout = program.layout
    spans = program.spans if isinstance(program, SubspaceProgram) else None
    rank = spans.rank if spans else config.rank
    state = []
    entries = []
    frozen = {}
    for name, size in program.state_shapes.items():
        role = "adapter" if name == "adapter" else "optimizer"
        state.append(StateTensor(name=name, dtype="float32", shape=(size,), role=role, kept=kept))
    for entry in layout.entries:
        linear = loaded.family.linear_name(entry.layer, entry.target)
        entries.append(
            AdapterEntry(
                linear=linear, layer=entry.layer, target=entry.target, offset=entry.offset,
                rank=rank, inputs=entry.inputs, outputs=entry.outputs,
                a_offset=spans.a_offsets[entry] if spans else None,
            )
        )  # fmt: skip
        if spans is None:
            frozen[f"{linear}.lora_A.weight"] = np.ascontiguousarray(layout.frozen_a(entry).T)
    first = {}
    # If there is no file, the state has the subspace: an artifact's, or that of a calibration.
    if spans is not None and config.factors is not None and config.factors.is_file():
        first = spans.begun(read_factors(config.factors, spans.small.entries))
    return BuiltProgram(
        eager=program,
        loaded=loaded,
        modules=modules,
        state=tuple(state),
        counters=(Counter(name="step", counts="run_steps"),),
        layout=tuple(entries),
        rank=rank,
        alpha=config.alpha * rank / config.rank,
        noise=config.noise,
        first=first,
        frozen=frozen,
        **more,
    )


def ports(
    program: PrgeProgram,
) -> tuple[tuple[TensorPort, ...], tuple[TensorPort, ...], TensorPort, TensorPort]:
    """Return the state, the three scalars, projected gradients, losses."""
    queries = (program.config.queries,)
    copies = (program.config.copies,)
    gradients = "projected_gradients"
    rate = port("learning_rate", "learning_rate", (1,))
    return (
        tuple(port(name, "state", (size,)) for name, size in program.state_shapes.items()),
        (port("seed", "seed", (1,), "int64"), port("step", "counter", (1,), "int64"), rate),
        port(gradients, gradients, queries, unit="nats per unit of perturbation"),
        port("losses", "losses", copies, unit="nats per labelled token"),
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
    `max_abs_adapter_error_free` of the adapter after the steps; `update_error`, the first of these as
    a part of the steps' `update_limit`; `gradient_correlation` of the projected gradients
    at the same adapter (NaN below three directions).
    """
    program: PrgeProgram = built.eager
    free = replayed = state_of(session, program)
    free_error = replay_error = 0.0
    received: list[float] = []
    expected: list[float] = []
    steps = 0
    limit: Tensor | float = 0.0
    with torch.inference_mode():
        for tokens, result, scalars in stepping(session, batches, learning_rate):
            losses, gradients, *free = program.stepped(*tokens, free, *scalars)
            free_error = largest(free_error, relative_errors(result.losses, losses))
            if steps:
                losses, gradients, *_ = program.stepped(*tokens, replayed, *scalars)
            replay_error = largest(replay_error, relative_errors(result.losses, losses))
            received += result.projected_gradients
            expected += gradients.tolist()
            own = torch.tensor(result.projected_gradients, dtype=torch.float32)
            allowed = update_limit(program, replayed[0], own, *scalars)
            # What a step rounded stays in the adapter as it is; Adam's limit is of all steps.
            limit = allowed if program.config.optimizer == "adam" else limit + allowed
            replayed = program.update(replayed, own, *scalars)
            steps += 1
    flat = session.state()["adapter"]
    errors_P = (torch.from_numpy(flat) - replayed[0]).abs()
    update_error = float((errors_P / limit).max())
    values = {
        "steps": steps,
        "max_rel_loss_error": free_error,
        "max_rel_loss_error_replayed": replay_error,
        "max_abs_adapter_error": float(errors_P.max()),
        "update_error": update_error,
        "max_abs_adapter_error_free": float(np.abs(flat - free[0].numpy()).max()),
        "gradient_correlation": correlation(received, expected),
    }
    errors = {"loss": replay_error, "loss_free": free_error, "update": update_error}
    return Agreement(values, errors)


def stepping(
    session: ProgramSession, batches: Iterable[Batch], learning_rate: float
) -> Iterator[tuple[tuple[Tensor, Tensor], StepResult, tuple[Tensor, Tensor, Tensor]]]:
    """Step the session on each batch; yield ids and labels, the result, and the scalars (seed,
    step, learning rate) as eager takes them."""
    seed = torch.tensor([session.seed])
    rate = torch.tensor([learning_rate], dtype=torch.float32)
    for number, (ids, labels) in enumerate(batches):
        result = session.step(ids, labels, number, learning_rate)
        yield (
            (torch.from_numpy(ids), torch.from_numpy(labels)),
            result,
            (seed, torch.tensor([number]), rate),
        )


def largest(before: float, errors: np.ndarray) -> float:
    """Return the largest error so far; NaN stays NaN."""
    return float(np.maximum(before, errors.max()))


def correlation(received: Sequence[float], expected: Sequence[float]) -> float:
    """Correlate projected gradients; NaN below three."""
    if len(received) < 3:
        return float("nan")
    return float(np.corrcoef(received, expected)[0, 1])


def rounding(
    session: ProgramSession,
    float32: BuiltProgram,
    config: PrgeConfig,
    batches: Callable[[int], Iterable[Batch]],
) -> tuple[dict[str, Any], list[str]]:
    """Measure the effect of 8-bit activations on the projected gradients: the program against the
    float32 model in eager."""
    agreed = gradient_correlation(session, float32.eager, batches(-(-CORRELATED // config.queries)))
    warnings = []
    if config.perturbation_scale < ROUGH_SCALE:
        warnings.append(
            f"8da4w rounds activations to 8 bits: at perturbation scale {config.perturbation_scale:g} "
            f"the projected gradients correlate {agreed:.2f} with float32's; "
            "use --quantize q4, or a scale of 3e-2 or more"
        )
    return {"gradient_correlation_float32": agreed}, warnings


def gradient_correlation(
    session: ProgramSession, program: PrgeProgram, batches: Iterable[Batch]
) -> float:
    """Correlate the session's projected gradients with those of `program` in eager: at the adapter
    zero, or where the session stands if A is a part of it.

    Args:
        program: of the same method and seed; it may be another model, such as the one before
            quantisation.
    """
    if program.config.factors is None:
        zero = np.zeros(program.layout.size, np.float32)
        session.load_state({**session.state(), "adapter": zero})
    first = state_of(session, program)
    received = []
    expected = []
    with torch.inference_mode():
        for tokens, result, scalars in stepping(session, batches, 0.0):
            received += result.projected_gradients
            expected += program.stepped(*tokens, first, *scalars)[1].tolist()
    return correlation(received, expected)


def relative_errors(received: tuple[float, ...], expected: Tensor) -> np.ndarray:
    reference = expected.double().numpy()
    return np.abs(np.array(received) - reference) / np.maximum(np.abs(reference), 1e-12)


def _open_fixed(loaded: LoadedModel, config: PrgeConfig, seed: int) -> Session:
    """Open a session of fixed shapes, whose steps on a GPU are CUDA graphs."""
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
