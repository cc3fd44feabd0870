"""P-RGE's step as a program: the graphs that torch.export takes, what they keep, and how they compare with eager.

Functional form: the adapter goes in and comes out, so a stock runtime runs it and a restart needs nothing
but the adapter. Stateful form: the adapter is a buffer inside the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ondevice.artifact.manifest import AdapterEntry, Counter, StateTensor, TensorPort, port, row_ports, token_ports
from ondevice.core.errors import ModelError
from ondevice.core.program import Agreement, BuiltProgram, GraphProgram, ProgramModule, TorchProgram
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.step import PrgeProgram
from ondevice.methods.prge.subspace import SubspaceNoise, read_factors
from ondevice.models.traits import check_traits
from ondevice.nn.graph_loss import weight_tiles
from ondevice.nn.program_loss import quantize_model
from ondevice.runtime_ops import graph

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession, Session
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.models import LoadedModel, ModelDims

IN_PROGRAM = (
    "norms", "qk_norm_all", "fused", "rotary", "rotary_width", "windows", "score_scale", "embedding_scale",
    "residual_scale", "logit_scale",
)  # fmt: skip
"""Traits of a block with which programs were held against eager PyTorch."""
CORRELATED = 12
"""Projected gradients at least that a correlation with the model before quantisation is taken over."""
ROUGH_SCALE = 3e-2
"""Perturbation scales from here on are large beside 8-bit activations."""


def problems(config: PrgeConfig, export: ExportConfig, dims: ModelDims) -> list[str]:
    """Return settings that a program does not have."""
    problems = []
    try:
        check_traits(dims, "a program of prge's step", IN_PROGRAM, max(export.lengths_tokens))
    except ModelError as error:
        problems.append(str(error))
    if not (config.batch_signs and config.batch_queries):
        problems.append("an exported step is one forward pass: leave batch_signs and batch_queries on")
    if config.optimizer == "adam":
        problems.append(f"method.optimizer is {config.optimizer}: a prge program has sgd")
    if config.subspace == "gradient" and config.factors is None:
        problems.append(
            "method.subspace is gradient: a program computes none; give method.factors, a subspace-*.safetensors that "
            "a run in PyTorch wrote, or leave subspace out"
        )
    if config.factors is not None and not config.factors.is_file():
        problems.append(f"method.factors: there is no file {config.factors}")
    if export.program == "blocks":
        problems.append("export.program is blocks: a prge program is a whole step, so leave it auto")
    if export.quantize in ("int8", "8da8w"):
        problems.append(f"export.quantize is {export.quantize}: a prge program has none, q4 or 8da4w")
    if export.shared_context:
        problems.append(
            "export.context_tokens goes with export.answers=packed: a whole step has no functions of one block"
        )
    if export.next_token and (export.form != "functional" or export.quantize != "none"):
        problems.append("next_token goes with form functional and float32 weights")
    return problems


def build_program(loaded: LoadedModel, config: PrgeConfig, export: ExportConfig, seed: int) -> PrgeProgram:
    """Return the program to export, which eager runs as reference. Changes `loaded.model` in place (adapters, quantised
    weights).

    Args:
        loaded: a float32 model.
        seed: draws the frozen A.
    """
    export = export.resolved()
    token_loss = quantize_model(loaded.family, export, config.loss_tiles, config.answers)
    noise: Any = noise_op(config, export.generator)
    plain = config.model_copy(update={"subspace": "random", "factors": None})
    layout = AdapterLayout.build(loaded.dims, plain, seed)
    if config.factors is not None:
        small = AdapterLayout.build(loaded.dims, config.model_copy(update={"subspace": "gradient"}), seed, directions=1)
        factors = read_factors(config.factors, small.entries)
        given = {(entry.layer, entry.target): value.a.numpy() for entry, value in factors.items()}
        layout = replace(layout, given_a=given)
        noise = SubspaceNoise(noise, small, layout, factors)
    program = PrgeProgram(loaded.family, layout, plain, noise, token_loss=token_loss)
    program.labelled_tokens = 1 if config.answers else config.labelled_tokens
    program.use_explicit_masks(export.lengths_tokens)
    return program


def noise_op(config: PrgeConfig, generator: str) -> Any:
    """Return the generator as `aten` graph or as this project's `op`."""
    if generator == "aten":
        return graph.aten_normal if config.noise == "gaussian" else graph.aten_rademacher
    from ondevice.runtime_ops import torch_ops

    torch_ops.register()
    return torch.ops.ondevice.normal if config.noise == "gaussian" else torch.ops.ondevice.rademacher


def build(loaded: LoadedModel, config: PrgeConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """See `GraphProgram.build`; the longest bucket has the plain names, others carry their length."""
    program = build_program(loaded, config, export, seed)
    adapter, scalars, gradients, losses = ports(program)
    state = AdapterState(program.layout.size) if export.form == "stateful" else None
    modules = []

    def add(name: str, functional: nn.Module, stateful: Any, inputs: tuple, outputs: tuple) -> None:
        """Add one method; the functional form takes the adapter behind the tokens, and gives what changes it last."""
        module = functional if state is None else stateful(program, state)
        modules.append(ProgramModule(name, module, inputs, outputs))

    # Passed in and out unless the program keeps it: Android's API can read and write no buffer of a program.
    passed = () if state is not None else (adapter,)
    for length in export.lengths_tokens:
        suffix = "" if length == max(export.lengths_tokens) else f"_{length}"
        rows, tokens = export.eval_batch_size, token_ports(export.batch_size, length)
        add(f"train_step{suffix}", TrainStep(program), StatefulTrainStep, (*tokens, *passed, *scalars),
            (losses, gradients, *passed))  # fmt: skip
        add(f"evaluate{suffix}", Evaluate(program), StatefulEvaluate, (*token_ports(rows, length), *passed),
            row_ports(rows))  # fmt: skip
    if export.next_token:
        longest, vocab = max(export.lengths_tokens), loaded.dims.vocab
        row = token_ports(1, longest)[0], port("length", "length", (1,), "int64", "tokens")
        logits = port("logits", "logits", (vocab,))
        modules.append(ProgramModule("next_token", NextToken(program), (*row, adapter), (logits,)))
    total = port("sum", "sum", (1,))
    replayed = gradients, *scalars
    add("apply_update", ApplyUpdate(program), StatefulApplyUpdate, (*passed, *replayed), passed or (total,))
    if state is not None:
        modules.append(ProgramModule("get_adapter", GetAdapter(state), (), (adapter,)))
        modules.append(ProgramModule("set_adapter", SetAdapter(state), (adapter,), (total,)))
    return built(program, loaded, tuple(modules), kept="host" if state is None else "program")


def built(program: PrgeProgram, loaded: LoadedModel, modules: tuple[ProgramModule, ...], **more: Any) -> BuiltProgram:
    """Return the state of a program: the adapter, the run's step number, and the frozen A of every layer."""
    config, layout = program.config, program.layout
    names = {entry: loaded.family.linear_name(entry.layer, entry.target) for entry in layout.entries}
    adapter = StateTensor(
        name="adapter", dtype="float32", shape=(layout.size,), role="adapter", kept=more.pop("kept", "host")
    )
    return BuiltProgram(
        eager=program,
        loaded=loaded,
        modules=modules,
        state=(adapter,),
        counters=(Counter(name="step", counts="run_steps"),),
        layout=tuple(
            AdapterEntry(
                linear=names[entry], layer=entry.layer, target=entry.target, offset=entry.offset, rank=entry.rank,
                inputs=entry.inputs, outputs=entry.outputs,
            )
            for entry in layout.entries
        ),
        frozen={
            f"{names[entry]}.lora_A.weight": np.ascontiguousarray(layout.frozen_a(entry).T) for entry in layout.entries
        },
        rank=config.rank,
        alpha=config.alpha,
        noise=config.noise,
        **more,
    )  # fmt: skip


def ports(program: PrgeProgram) -> tuple[TensorPort, tuple[TensorPort, ...], TensorPort, TensorPort]:
    """Return adapter, the three scalars, projected gradients, losses."""
    config = program.config
    rate = port("learning_rate", "learning_rate", (1,))
    return (
        port("adapter", "state", (program.layout.size,)),
        (port("seed", "seed", (1,), "int64"), port("step", "counter", (1,), "int64"), rate),
        port("projected_gradients", "projected_gradients", (config.queries,), unit="nats per unit of perturbation"),
        port("losses", "losses", (config.copies,), unit="nats per labelled token"),
    )


def compare(session: ProgramSession, built: BuiltProgram, batches: Iterable[Batch], learning_rate: float) -> Agreement:
    """Run both sides over `batches`, once free-running and once with the runtime's projected gradients.

    Values: `max_rel_loss_error` free-running, each side following its own projected gradients;
    `max_rel_loss_error_replayed`, the runtime's fed to both sides; `max_abs_adapter_error` and
    `max_abs_adapter_error_free` of the adapter after the steps; `gradient_correlation` of the projected gradients at
    the same adapter (NaN below three directions).
    """
    program: PrgeProgram = built.eager
    seed = torch.tensor([session.seed])
    rate = torch.tensor([learning_rate], dtype=torch.float32)
    free = replayed = torch.from_numpy(session.state()["adapter"])
    free_error = replay_error = 0.0
    pairs: list[tuple[float, float]] = []
    steps = 0
    with torch.inference_mode():
        for number, (ids, labels) in enumerate(batches):
            step = torch.tensor([number])
            tokens = torch.from_numpy(ids), torch.from_numpy(labels)
            result = session.step(ids, labels, number, learning_rate)
            losses, gradients, free = program.train_step(*tokens, free, seed, step, rate)
            free_error = float(np.maximum(free_error, _relative(result.losses, losses)))  # NaN stays NaN
            if number:
                losses = program.losses(*tokens, program.perturbed(replayed, seed, step))
                gradients = program.projected_gradients(losses)
            replay_error = float(np.maximum(replay_error, _relative(result.losses, losses)))
            pairs += zip(result.projected_gradients, gradients.tolist(), strict=True)
            own = torch.tensor(result.projected_gradients, dtype=torch.float32)
            replayed = program.apply_update(replayed, own, seed, step, rate)
            steps += 1
    flat = session.state()["adapter"]
    adapter_error = float(np.abs(flat - replayed.numpy()).max())
    values = {
        "steps": steps,
        "max_rel_loss_error": free_error,
        "max_rel_loss_error_replayed": replay_error,
        "max_abs_adapter_error": adapter_error,
        "max_abs_adapter_error_free": float(np.abs(flat - free.numpy()).max()),
        "gradient_correlation": float(np.corrcoef(np.array(pairs).T)[0, 1]) if len(pairs) > 2 else float("nan"),
    }
    return Agreement(values, {"loss": replay_error, "loss_free": free_error, "update": adapter_error})


def rounding(
    session: ProgramSession, float32: BuiltProgram, config: PrgeConfig, batches: Callable[[int], Iterable[Batch]]
) -> tuple[dict[str, Any], list[str]]:
    """Measure the effect of 8-bit activations on the projected gradients, at the adapter zero: the program against the
    float32 model in eager."""
    correlation = gradient_correlation(session, float32.eager, batches(-(-CORRELATED // config.queries)))
    warnings = []
    if config.perturbation_scale < ROUGH_SCALE:
        warnings.append(
            f"8da4w rounds activations to 8 bits: at perturbation scale {config.perturbation_scale:g} "
            f"the projected gradients correlate {correlation:.2f} with float32's; "
            "use --quantize q4, or a scale of 3e-2 or more"
        )
    return {"gradient_correlation_float32": correlation}, warnings


def gradient_correlation(session: ProgramSession, program: PrgeProgram, batches: Iterable[Batch]) -> float:
    """Correlate the session's projected gradients with those of `program` in eager, at the adapter zero.

    Args:
        program: of the same method and seed; it may be another model, such as the one before quantisation.
    """
    seed, zero = torch.tensor([session.seed]), torch.zeros(program.layout.size)
    session.load_state({"adapter": zero.numpy(), "seed": seed.numpy()})
    received, expected = [], []
    with torch.inference_mode():
        for number, (ids, labels) in enumerate(batches):
            received += session.step(ids, labels, number, 0.0).projected_gradients
            copies_of = program.perturbed(zero, seed, torch.tensor([number]))
            losses = program.losses(torch.from_numpy(ids), torch.from_numpy(labels), copies_of)
            expected += program.projected_gradients(losses).tolist()
    return float(np.corrcoef(received, expected)[0, 1])


def _relative(received: tuple[float, ...], expected: torch.Tensor) -> float:
    reference = expected.double().numpy()
    return float(np.max(np.abs(np.array(received) - reference) / np.maximum(np.abs(reference), 1e-12)))


class TrainStep(nn.Module):
    """The whole step of Algorithm 1: noise, both forwards, losses, projected gradients, update."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.program = program

    def forward(
        self, ids: Tensor, labels: Tensor, adapter: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.program.train_step(ids, labels, adapter, seed, step, learning_rate)


class Evaluate(nn.Module):
    """Row losses under the unperturbed adapter."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, labels: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        return self.program.evaluate(ids, labels, adapter)


class NextToken(nn.Module):
    """Logits of the token behind the first `length` of a row, under the unperturbed adapter."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.program = program
        self.tiles = weight_tiles(program.family.head_weight, program.config.loss_tiles)

    def forward(self, ids: Tensor, length: Tensor, adapter: Tensor) -> Tensor:
        last = self.program.hidden(ids, adapter)[0].index_select(0, length - 1)
        return torch.cat([head(last)[0] for _, head in self.tiles])


class ApplyUpdate(nn.Module):
    """The update alone, from logged projected gradients: replays a run without the model."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.update = program.apply_update

    def forward(
        self, adapter: Tensor, projected_gradients: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor
    ) -> Tensor:
        return self.update(adapter, projected_gradients, seed, step, learning_rate)


class StatefulApplyUpdate(nn.Module):
    """`ApplyUpdate` on the buffer; returns the sum of its elements."""

    state: AdapterState

    def __init__(self, program: PrgeProgram, state: AdapterState) -> None:
        super().__init__()
        self.update, self.state = program.apply_update, state

    def forward(self, projected_gradients: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor) -> Tensor:
        adapter = self.update(self.state.adapter, projected_gradients, seed, step, learning_rate)
        self.state.adapter.copy_(adapter)
        return adapter.sum(dim=0, keepdim=True)


class StatefulTrainStep(nn.Module):
    """`TrainStep` with the adapter as a buffer that the methods of the program share."""

    state: AdapterState

    def __init__(self, program: PrgeProgram, state: AdapterState) -> None:
        super().__init__()
        self.program, self.state = program, state

    def forward(
        self, ids: Tensor, labels: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, gradients, adapter = self.program.train_step(ids, labels, self.state.adapter, seed, step, learning_rate)
        self.state.adapter.copy_(adapter)
        return losses, gradients


class StatefulEvaluate(nn.Module):
    """`Evaluate` on the buffer. It writes the buffer back unchanged: a method that only reads it would have it
    baked in as a constant."""

    state: AdapterState

    def __init__(self, program: PrgeProgram, state: AdapterState) -> None:
        super().__init__()
        self.program, self.state = program, state

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.state.adapter.add_(0.0)
        return self.program.evaluate(ids, labels, self.state.adapter)


class AdapterState(nn.Module):
    """Owner of the shared buffer."""

    adapter: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("adapter", torch.zeros(size))


class GetAdapter(nn.Module):
    """The buffer as an output."""

    state: AdapterState

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self) -> Tensor:
        self.state.adapter.add_(0.0)
        return self.state.adapter.clone()


class SetAdapter(nn.Module):
    """Replaces the buffer; returns the sum of its elements."""

    state: AdapterState

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self, adapter: Tensor) -> Tensor:
        self.state.adapter.copy_(adapter)
        return adapter.sum(dim=0, keepdim=True)


def _open_fixed(loaded: LoadedModel, config: PrgeConfig, seed: int) -> Session:
    """Open a session of fixed shapes, whose steps on a GPU are CUDA graphs."""
    from ondevice.methods.prge.graphed import GraphedPrgeSession

    return GraphedPrgeSession(loaded, config, seed)


EXECUTORCH = GraphProgram(problems, build, compare, rounding, rounded=("8da4w",))
TORCH = TorchProgram(trains_a=lambda config: False, open_fixed=_open_fixed)
