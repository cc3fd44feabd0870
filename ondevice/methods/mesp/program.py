"""MeSP's step as a program: the graphs that torch.export takes, what they keep, and how they compare with autodiff."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ondevice.artifact.manifest import Counter, StateTensor, port, row_ports, token_ports
from ondevice.core.errors import OndeviceError
from ondevice.core.program import Agreement, BuiltProgram, GraphProgram, ProgramModule, TorchProgram
from ondevice.methods.mesp import blocks
from ondevice.methods.mesp.blocks import STEP
from ondevice.methods.mesp.lora import check_family
from ondevice.methods.mesp.torch.program import MespProgram
from ondevice.methods.mesp.torch.reference import reference_session

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.session import MespSession
    from ondevice.models import LoadedModel, ModelDims

PROBE_SCALE = 0.02
"""Of the B matrices at which gradients are compared: at zero, those of A are zero."""


def problems(config: MespConfig, export: ExportConfig, dims: ModelDims) -> list[str]:
    """Settings that a program does not have."""
    problems = []
    try:
        check_family(dims)
    except OndeviceError as error:
        problems.append(str(error))
    for name, value, wanted in (
        ("export.quantize", export.quantize, "none"),
        ("export.form", export.form, "functional"),
        ("method.weight_placement", config.weight_placement, "resident"),
        ("method.bits", config.bits, None),
    ):
        if value != wanted:
            problems.append(f"{name} is {value}: a mesp program has {name}={wanted}")
    if export.loss not in ("auto", "tiled") or export.generator == "op":
        problems.append("a mesp program needs no ops of this project: export.loss tiled, export.generator auto or aten")
    if config.micro_batch_size is not None and config.micro_batch_size < export.batch_size:
        problems.append("a mesp program computes all rows of a batch at once: method.micro_batch_size=null")
    return problems


def build(loaded: LoadedModel, config: MespConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """See `GraphProgram.build`: functions of one block, or the whole step in one."""
    form = blocks.build if export.program in ("auto", "blocks") else build_whole
    return form(loaded, config, export, seed)


def build_whole(loaded: LoadedModel, config: MespConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """One method is a whole step; the longest bucket has the plain names, others carry their length."""
    program = MespProgram(loaded, config, export.lengths_tokens)
    vectors = ("adapter", *program.moments)
    state = tuple(port(name, "state", (program.layout.size,)) for name in vectors)
    scalars = port(STEP, "counter", (1,), "int64"), port("learning_rate", "learning_rate", (1,))
    loss = port("loss", "losses", (1,), unit="nats per labelled token")
    modules = []
    for length in export.lengths_tokens:
        suffix = "" if length == max(export.lengths_tokens) else f"_{length}"
        tokens = token_ports(export.batch_size, length)
        modules.append(
            ProgramModule(f"train_step{suffix}", TrainStep(program), (*tokens, *state, *scalars), (loss, *state))
        )
        rows = export.eval_batch_size
        modules.append(
            ProgramModule(
                f"evaluate{suffix}", Evaluate(program), (*token_ports(rows, length), state[0]), row_ports(rows)
            )
        )
    if export.next_token:
        row = token_ports(1, max(export.lengths_tokens))[0], port("length", "length", (1,), "int64", "tokens")
        logits = port("logits", "logits", (program.dims.vocab,))
        modules.append(ProgramModule("next_token", NextToken(program), (*row, state[0]), (logits,)))
    return BuiltProgram(
        eager=program,
        loaded=loaded,
        modules=tuple(modules),
        state=tuple(
            StateTensor(
                name=vector.name, dtype=vector.dtype, shape=vector.shape, role="optimizer" if number else "adapter"
            )
            for number, vector in enumerate(state)
        ),
        counters=(Counter(name=STEP, counts="updates"),),
        layout=tuple(map(blocks.layout_entry, program.layout.entries)),
        first={"adapter": program.initial(seed)},
        rank=config.rank,
        alpha=config.alpha,
        kernels="portable",
    )  # fmt: skip


def compare(session: ProgramSession, built: BuiltProgram, batches: Iterable[Batch], learning_rate: float) -> Agreement:
    """Gradients at an adapter that is not zero, against autograd's; then the steps from the beginning.

    Values: `gradient_error`, the largest relative error ||ours - theirs|| / ||theirs|| of a tensor's gradient;
    `max_rel_loss_error` over the steps, each side following its own updates; `max_abs_adapter_error` after them.
    """
    config: MespConfig = built.eager.config
    autodiff = config.model_copy(update={"micro_batch_size": None, "bits": None})
    batches, start = list(batches), session.state()
    gradient = gradient_error(
        session, reference_session(built.loaded, autodiff, session.seed, "cpu"), built, *batches[0]
    )
    session.load_state(start)
    eager, losses = reference_session(built.loaded, autodiff, session.seed, "cpu"), [0.0]
    for number, (ids, labels) in enumerate(batches):
        ours, theirs = (side.step(ids, labels, number, learning_rate).loss for side in (session, eager))
        losses.append(abs(ours - theirs) / abs(theirs))
    adapter, expected = session.adapter(), eager.adapter()
    assert adapter is not None  # noqa: S101 - the program has one
    errors = [float(np.abs(adapter.tensors[name] - value).max()) for name, value in expected.tensors.items()]
    values: dict[str, Any] = {
        "steps": len(batches),
        "gradient_error": gradient,
        "max_rel_loss_error": float(np.max(losses)),
        "max_abs_adapter_error": float(np.max(errors)),
    }
    return Agreement(values, {"gradient": gradient, "loss_free": values["max_rel_loss_error"]})


def gradient_error(
    session: ProgramSession, eager: MespSession, built: BuiltProgram, ids: np.ndarray, labels: np.ndarray
) -> float:
    """The program's gradients against `eager`'s, at random B; both sessions are somewhere else afterwards."""
    adapter, random = eager.adapter(), np.random.default_rng(0)
    for name, value in adapter.tensors.items():
        if ".lora_B." in name:
            value[:] = PROBE_SCALE * random.standard_normal(value.shape)
    session.load_adapter(adapter)
    eager.load_adapter(adapter)
    theirs: dict[str, np.ndarray] = {}

    def keep(parameters: Any, ga: torch.Tensor, gb: torch.Tensor) -> None:
        theirs[parameters.a_name], theirs[parameters.b_name] = ga.double().numpy(), gb.double().numpy()

    eager.optimizer.apply = keep
    eager.step(ids, labels, 0, 0.0)
    ours = gradients(session, built.eager, ids, labels)
    least = 1e-4 * max(float(np.linalg.norm(value)) for value in theirs.values())
    return max(
        float(np.linalg.norm(ours[name] - value)) / max(float(np.linalg.norm(value)), least)
        for name, value in theirs.items()
    )


def gradients(
    session: ProgramSession, program: MespProgram, ids: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """A step's gradients at the session's adapter, float64 by PEFT's names, read from what the step changes.

    SGD at rate 1 leaves the adapter less its gradient; AdamW's first moment after one step is the gradient times
    1 - beta1.
    """
    config, before = program.config, session.state()
    fresh = {name: np.zeros_like(before[name]) for name in (*program.moments, STEP)}
    session.load_state(before | fresh)
    session.step(ids, labels, 0, 0.0 if program.moments else 1.0)
    after = session.state()
    if program.moments:
        flat = after["exp_avg"].astype(np.float64) / (1.0 - config.beta1)
    else:
        flat = before["adapter"].astype(np.float64) * (1.0 - config.weight_decay) - after["adapter"]
    return program.layout.to_tensors(flat)


class TrainStep(nn.Module):
    """The whole step: loss, exact gradients, SGD's or AdamW's update."""

    def __init__(self, program: MespProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, labels: Tensor, adapter: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *moments, step, rate = rest
        return self.program.train_step(ids, labels, adapter, tuple(moments), step, rate)


class Evaluate(nn.Module):
    """Row losses under the adapter."""

    def __init__(self, program: MespProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, labels: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        return self.program.evaluate(ids, labels, adapter)


class NextToken(nn.Module):
    """Logits of the token behind the first `length` of a row."""

    def __init__(self, program: MespProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, length: Tensor, adapter: Tensor) -> Tensor:
        return self.program.next_token(ids, length, adapter)


def _torch_problems(config: MespConfig) -> list[str]:
    problems = []
    if config.weight_placement != "resident" or config.bits is not None:
        problems.append("the artifact holds the weights: leave weight_placement and bits out, and use --quantize nf4")
    return problems


EXECUTORCH = GraphProgram(problems, build, compare)
TORCH = TorchProgram(_torch_problems)
