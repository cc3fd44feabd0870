"""Shares of a program by backend."""

from __future__ import annotations

from typing import Any

from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from executorch.exir.schema import KernelCall

from ondevice.core.manifest import Share

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
