"""MeSP's step as a program: the graphs that torch.export takes, what they keep, and how they compare with autodiff."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ondevice.artifact.manifest import Counter, StateTensor, port, row_ports, token_ports
from ondevice.core.errors import OndeviceError
from ondevice.core.program import BuiltProgram, GraphProgram, ProgramModule, TorchProgram
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.methods.mesp import blocks
from ondevice.methods.mesp.agreement import compare, rounding
from ondevice.methods.mesp.block_functions import LINEAR_FORMS
from ondevice.methods.mesp.lora import IN_BLOCKS, check_family
from ondevice.methods.mesp.torch.program import MespProgram

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel


def problems(
    config: MespConfig, export: ExportConfig, dims: ModelDims, known: tuple[str, ...] = IN_BLOCKS
) -> list[str]:
    """Return settings that a program does not have; `known` are traits of a block that its functions do."""
    problems = []
    whole = export.program == "whole"
    try:
        what = "a program of a whole step" if whole else "a block program"
        check_family(dims, () if whole else known, what, max(export.lengths_tokens))
        dims.adapted(config)
    except OndeviceError as error:
        problems.append(str(error))
    kept = tuple(LINEAR_FORMS) if export.program != "whole" else ("none",)
    if export.quantize not in kept:
        form = "program that is one whole step" if export.program == "whole" else "block program"
        problems.append(
            f"export.quantize is {export.quantize}: a mesp {form} has {' or '.join(kept)}"
        )
    for name, value, wanted in (
        ("export.form", export.form, "functional"),
        ("method.weight_placement", config.weight_placement, "resident"),
        ("method.bits", config.bits, None),
    ):
        if value != wanted:
            problems.append(f"{name} is {value}: a mesp program has {name}={wanted}")
    if export.loss not in ("auto", "tiled") or export.generator == "op":
        problems.append(
            "a mesp program needs no ops of this project: export.loss tiled, export.generator auto or aten"
        )
    if export.shared_context and (export.program == "whole" or export.quantize == "8da8w"):
        problems.append(
            "export.context_tokens goes with a block program whose weights are none, int8 or q4, or with answers=packed"
        )
    if export.shared_context and (beyond := dims.traits.beyond()):
        problems.append(
            f"export.context_tokens is for blocks like Llama's, this one has {', '.join(beyond)}"
        )
    if export.shared_context and export.shared_context > dims.max_positions:
        problems.append(
            f"export.context_tokens is {export.context_tokens}: the model takes {dims.max_positions}"
        )
    if config.max_grad_norm is not None:
        problems.append(
            "a mesp program updates each block as its gradients are known: method.max_grad_norm=null"
        )
    if config.loss == "answers" or config.answers:
        problems.append("method.loss is answers: a mesp program computes over the vocabulary")
    if config.micro_batch_size is not None and config.micro_batch_size < export.batch_size:
        problems.append(
            "a mesp program computes all rows of a batch at once: method.micro_batch_size=null"
        )
    return problems


def build(loaded: LoadedModel, config: MespConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """See `GraphProgram.build`: functions of one block, or the whole step in one."""
    builder = blocks.build if export.program in ("auto", "blocks") else build_whole
    return builder(loaded, config, export, seed)


def build_whole(
    loaded: LoadedModel, config: MespConfig, export: ExportConfig, seed: int
) -> BuiltProgram:
    """Build a step as one method a bucket; the longest bucket has the plain names, others carry their length."""
    program = MespProgram(loaded, config, export.lengths_tokens)
    vectors = ("adapter", *program.moments)
    state = tuple(port(name, "state", (program.layout.size,)) for name in vectors)
    scalars = (
        port(OPTIMIZER_STEP, "counter", (1,), "int64"),
        port("learning_rate", "learning_rate", (1,)),
    )
    loss = port("loss", "losses", (1,), unit="nats per labelled token")
    modules = []
    for length in export.lengths_tokens:
        suffix = "" if length == max(export.lengths_tokens) else f"_{length}"
        tokens = token_ports(export.batch_size, length)
        modules.append(
            ProgramModule(
                f"train_step{suffix}",
                TrainStep(program),
                (*tokens, *state, *scalars),
                (loss, *state),
            )
        )
        # The adapter alone: an evaluation needs no moments, and each vector would be one more copy in memory.
        rows = export.eval_batch_size
        modules.append(
            ProgramModule(
                f"evaluate{suffix}",
                Evaluate(program),
                (*token_ports(rows, length), state[0]),
                row_ports(rows),
            )
        )
    if export.next_token:
        row = (
            token_ports(1, max(export.lengths_tokens))[0],
            port("length", "length", (1,), "int64", "tokens"),
        )
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
        counters=(Counter(name=OPTIMIZER_STEP, counts="updates"),),
        layout=tuple(map(blocks.layout_entry, program.layout.entries)),
        first={"adapter": program.initial(seed)},
        rank=config.rank,
        alpha=config.alpha,
        kernels="portable",
    )  # fmt: skip


class TrainStep(nn.Module):
    """The whole step: loss, exact gradients, SGD's or AdamW's update."""

    def __init__(self, program: MespProgram) -> None:
        super().__init__()
        self.program = program

    def forward(
        self, ids: Tensor, labels: Tensor, adapter: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
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
        problems.append(
            "the artifact holds the weights: leave weight_placement and bits out, and use --quantize nf4"
        )
    return problems


EXECUTORCH = GraphProgram(
    problems,
    build,
    compare,
    rounding,
    rounded=("int8", "q4", "8da8w"),
    uses_ops=lambda export: False,
)
TORCH = TorchProgram(_torch_problems)
