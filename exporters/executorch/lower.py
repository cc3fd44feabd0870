"""From modules to one ExecuTorch program: export, hand the matrix products to XNNPACK, plan memory."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.gemm_configs import LinearConfig, MMConfig
from executorch.backends.xnnpack.partition.config.generic_node_configs import GeluConfig
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.utils.utils import get_input_node, is_param_node
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.exir.schema import KernelCall

from ondevice.core.manifest import Share
from ondevice.core.program import FUSED
from ondevice.exporters.executorch.shortcuts import shortcuts
from ondevice.runtime_ops.graph import deduplicate, edge_compile_config

if TYPE_CHECKING:
    from ondevice.core.manifest import Share
    from ondevice.core.program import ProgramModule

ACCESS = ("get_", "set_")
"""Methods that only copy a buffer: XNNPACK would take only the copy and then refuse an output that
is its input."""


class SharedWeightLinearConfig(LinearConfig):
    """Also takes a linear whose weight is computed, such as a vocabulary tile of the tied
    embedding.

    The weight then stays outside the delegate and goes in as an input: a tied embedding is stored
    once, where XNNPACK's own rule would copy it into the delegate (measured: 538 MB against 654 MB
    for SmolLM2-135M, and a head that is a third faster because its tiles are packed one at a time).
    """

    def _get_weight_deps(self, node: Any, ep: Any, precision: Any) -> tuple[bool, list[Any]]:
        if not is_param_node(ep, get_input_node(node, self.weight_idx)) and "dequant" not in str(
            node.args[1]
        ):
            return True, []
        return super()._get_weight_deps(node, ep, precision)


class ComputedProductConfig(MMConfig):
    """Also takes a product whose second matrix is computed or goes in, as `g W` does in a backward
    pass."""

    def _get_weight_deps(self, node: Any, ep: Any, precision: Any) -> tuple[bool, list[Any]]:
        if precision == ConfigPrecisionType.FP32 and not is_param_node(
            ep, get_input_node(node, self.weight_idx)
        ):
            return True, []
        return super()._get_weight_deps(node, ep, precision)


@dataclass
class Lowered:
    """A finished program and facts about it."""

    buffer: bytes
    planned_bytes: dict[str, int]
    """Memory the runtime plans for each method (the arena), without what delegates take."""
    ops: dict[str, list[str]]
    """Kernels each method needs outside delegates."""
    delegates: dict[str, int]
    """Delegate calls in each method."""
    seconds: float
    partition: dict[str, tuple[Share, ...]]
    """Shares of each method by backend."""
    graph_sizes: dict[str, int] = field(default_factory=dict)
    of_layers: tuple[bytes, ...] = ()
    """The program of the methods that every layer has its own of, with markers in the place of its
    weights; one for each kind of block."""

    def with_layers(self, layers: Lowered) -> Lowered:
        """Join this program and that of the layers' methods as one artifact's; those of the next
        kind of block may follow."""
        both = {
            name: getattr(self, name) | getattr(layers, name)
            for name in ("planned_bytes", "ops", "delegates", "partition", "graph_sizes")
        }
        return Lowered(
            self.buffer,
            seconds=self.seconds + layers.seconds,
            of_layers=(*self.of_layers, layers.buffer),
            **both,
        )


def xnnpack_partitioner(products: bool = False) -> XnnpackPartitioner:
    """Return all of XNNPACK's ops, with the shared-weight rule for linears.

    But for GELU: the lowering drops its `approximate`, so that the tanh form would come out as the
    exact one.

    Args:
        products: also products of two matrices that are both computed or go in.
    """
    ours: dict[Any, Any] = {LinearConfig: SharedWeightLinearConfig}
    if products:
        ours[MMConfig] = ComputedProductConfig
    configs = [
        ours.get(config, config) for config in ALL_PARTITIONER_CONFIGS if config is not GeluConfig
    ]
    return XnnpackPartitioner(configs=configs)


def integer_partitioner() -> XnnpackPartitioner:
    """XNNPACK's linears over dynamically quantised activations."""
    return XnnpackPartitioner(
        configs=[LinearConfig], config_precisions=[ConfigPrecisionType.DYNAMIC_QUANT]
    )


def lower(
    methods: Sequence[ProgramModule], *, buffers: Sequence[str] = (), quantized_fusion: bool = False
) -> Lowered:
    """Export, partition and serialise `methods` into one program.

    Args:
        methods: modules with example inputs; weights that several methods use are stored once.
        buffers: names of mutable buffers that the methods share.
        quantized_fusion: fold torchao's quantised ops (needed for 8da4w).
    """
    started = time.perf_counter()
    logging.getLogger("executorch").setLevel(logging.ERROR)
    with torch.no_grad(), shortcuts(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exported = {
            method.name: deduplicate(
                torch.export.export(method.module.eval(), method.example_inputs(), strict=False)
            )
            for method in methods
        }
        edge = to_edge_transform_and_lower(
            exported,
            partitioner={
                method.name: [] if method.name.startswith(ACCESS) else [xnnpack_partitioner()]
                for method in methods
            },
            compile_config=edge_compile_config(),
        )
        passes: list[Any] = [InitializedMutableBufferPass([*buffers])] if buffers else []
        program = edge.to_executorch(
            ExecutorchBackendConfig(
                passes=passes,
                memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=bool(buffers)),
                do_quant_fusion_and_const_prop=quantized_fusion,
            )
        )
    return lowered(edge, program, methods, started)


def lower_portable(
    methods: Sequence[ProgramModule],
    *,
    integers: bool = False,
    packed_from_rows: int | None = None,
) -> Lowered:
    """Export and serialise `methods` into one program of the runtime's own kernels; weights are
    stored once.

    Nothing is delegated, unless it is asked for: products read the frozen weights in the mapped
    file, so that all the memory a step takes is the planned arena. Inputs stay where a caller has
    them. Common subexpressions are not merged: a block that is computed again in its backward pass
    is one, and merging the two would keep everything of the forward pass.

    Args:
        methods: modules with example inputs.
        integers: products of constants in 8 bits with activations that are rounded as they come are
            XNNPACK's, and nothing else is.
        packed_from_rows: XNNPACK takes its operators of a method that is given so many hidden states
            or more. A weight that goes in is packed at each call, into memory that all calls share:
            with one row that costs more than the product, and from some ten rows on it saves time.
    """
    import executorch.kernels.quantized  # noqa: F401 - registers the kernels that make packed weights dense

    started = time.perf_counter()
    logging.getLogger("executorch").setLevel(logging.ERROR)
    linear = [
        torch.ops.aten.linear.default
    ]  # its decomposition would copy every weight to transpose it
    partitioners: dict[str, list[Any]] = {
        m.name: [integer_partitioner()] if integers else [] for m in methods
    }
    if packed_from_rows is not None:
        partitioners |= {
            m.name: [xnnpack_partitioner(products=True)]
            for m in methods
            if hidden_rows(m) >= packed_from_rows and not m.name.startswith(FUSED)
        }
    delegated = any(partitioners.values())
    with torch.no_grad(), shortcuts(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        edge = to_edge_transform_and_lower(
            {
                m.name: torch.export.export(m.module.eval(), m.example_inputs(), strict=False)
                for m in methods
            },
            partitioner=partitioners if delegated else None,
            compile_config=EdgeCompileConfig(
                preserve_ops=linear,
                _core_aten_ops_exception_list=linear,
                _check_ir_validity=not delegated,
            ),
        )
        planning = MemoryPlanningPass(alloc_graph_input=False)
        program = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
    return lowered(edge, program, methods, started)


def hidden_rows(method: ProgramModule) -> int:
    """Return how many hidden states a method is given, 0 if none goes in."""
    return max((port.shape[0] for port in method.inputs if port.role == "hidden"), default=0)


def lowered(edge: Any, program: Any, methods: Sequence[ProgramModule], started: float) -> Lowered:
    """Collect the results of lowering a program; `started` is of `time.perf_counter`."""
    plans = {plan.name: plan for plan in program.executorch_program.execution_plan}
    names = [method.name for method in methods]
    return Lowered(
        buffer=program.buffer,
        planned_bytes={name: sum(plans[name].non_const_buffer_sizes) for name in names},
        ops={name: sorted({op_name(op) for op in plans[name].operators}) for name in names},
        delegates={name: len(plans[name].delegates) for name in names},
        seconds=time.perf_counter() - started,
        partition=shares(edge, program, names),
        graph_sizes={
            name: sum(len(chain.instructions) for chain in plans[name].chains) for name in names
        },
    )


def op_name(op: Any) -> str:
    """As the runtime's registry names it."""
    return f"{op.name}.{op.overload}" if op.overload else op.name


PORTABLE = "portable"


def shares(edge: Any, program: Any, names: list[str]) -> dict[str, tuple[Share, ...]]:
    """Return what each backend runs of each method, delegates first.

    Args:
        edge: the lowered `EdgeProgramManager`.
        program: the emitted `ExecutorchProgramManager` of it.
        names: of the methods.
    """
    plans = {plan.name: plan for plan in program.executorch_program.execution_plan}
    constants = sum(len(buffer.storage) for buffer in program.executorch_program.constant_buffer)
    by_method = {}
    for name in names:
        delegates: dict[str, list[Any]] = {}
        for module in get_lowered_backend_modules(edge.exported_program(name).graph_module):
            delegates.setdefault(module.backend_id, []).append(module)
        kernels = sum(
            isinstance(instruction.instr_args, KernelCall)
            for chain in plans[name].chains
            for instruction in chain.instructions
        )
        by_method[name] = (
            *(_of_delegates(backend, modules) for backend, modules in sorted(delegates.items())),
            Share(backend=PORTABLE, calls=kernels, operators=kernels, bytes=constants),
        )
    return by_method


def _of_delegates(backend: str, modules: list[Any]) -> Share:
    operators = 0
    code = 0
    stored = {}
    for module in modules:
        graph = module.original_module.graph
        operators += sum(
            node.op == "call_function" and "getitem" not in str(node.target) for node in graph.nodes
        )
        code += len(module.processed_bytes)
        data = module.named_data_store_output
        if data is not None:
            stored |= {
                key: len(data.buffers[entry.buffer_index]) for key, entry in data.pte_data.items()
            }
    return Share(
        backend=backend, calls=len(modules), operators=operators, bytes=code + sum(stored.values())
    )
