"""Work that lowering a language model repeats or does in vain, left out: the program has the same
bytes.

Every pass over a graph copies it, runs it again and writes its code anew, and a lowering has
hundreds of passes for each of its methods and delegates. These are settings of the libraries'
insides, so a test compares the bytes.
"""

from __future__ import annotations

import functools
import gc
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch._export.utils as export_utils
from executorch.backends.xnnpack import _passes as xnnpack_passes
from executorch.exir._serialize import _dataclass
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.pass_base import ExportPass, PassResult
from executorch.exir.passes.dim_order_ops_registry import MemoryFormatOpsMap
from executorch.exir.passes.legalize_portable_dim_order_pass import LegalizePortableDimOrderPass
from executorch.exir.passes.memory_format_ops_pass import DimOrderOpsRevertPass, MemoryFormatOpsPass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_aten_with_edge_pass import OpReplacePass
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
from executorch.exir.program import _program as edge
from executorch.exir.verification import verifier
from torch._export.passes import replace_view_ops_with_view_copy_ops_pass as views
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.traceback import NodeSource

VISION = (
    "ConvertToUpsampleBilinear2d",
    "ConvertToSDPAPass",  # attention is written out in our programs: each softmax has its mask
    "FuseBatchNormPass",
    "DecomposeBatchNorm",
    "InsertPadQDQPass",
    "Conv1dUnsqueezePass",
    "PReLUReshapePass",
    "ChannelsLastTaggedReshapePass",
)
"""XNNPACK's passes for operations that no program here has. Two of them also export sample networks
to compare with."""
TRACING = (
    "call_operator", "call_getitem", "call_delegate", "call_sym", "call_cond", "call_map", "call_scan", "call_while",
    "call_submodule", "placeholder", "get_attr", "output", "inputs",
)  # fmt: skip
"""Methods by which a pass changes a graph while it is traced."""
VIEWS = ("NormalizeTransposePass", "ReplaceBrokenOpsWithFunctionalOpsPass")
"""Passes that make copies of views, and do nothing in a graph without any; each would trace the
whole graph."""
ABOUT_DIM_ORDER = (DimOrderOpsRevertPass, LegalizePortableDimOrderPass)
TYPES_OF_ARGUMENTS = "_check_tensor_args_matching_op_allowed_dtype"
"""A check of a graph that runs it."""
TRACED_WITH_OTHERS = (ScalarToTensorPass, RemoveMixedTypeOperators)
"""Passes before the operators are replaced, which are traced together with that."""
COLLECT_AFTER = 100_000
"""New objects between two collections; a graph is made of so many that the default of 700 looks at
it all day."""


@contextmanager
def shortcuts() -> Iterator[None]:
    """Within the block, lowering takes about half of its time.

    - Copies of a graph share what never changes once it is made: where nodes came from, and
      finished delegates. torch.fx copies both, deeply, in every pass (measured: the provenance
      alone is a fifth of the time).
    - PyTorch's composite operators are listed once, not at every decomposition.
    - XNNPACK's passes for other kinds of networks are left out.
    - A program is made functional once: with its decompositions, not in a tracing of its own before
      them; and it is not decomposed a second time if nothing is left to decompose.
    - Of PyTorch's composite operators only those of the program are told how to decompose; there
      are some 550.
    - A graph is checked where its edge program is finished, not after each of the passes before,
      and run once for that check, not twice.
    - Code of a graph is written when the graph is called: passes interpret it.
    - A pass that edits a graph traces it again in the end; if it has edited nothing, that is
      left out. So are passes that replace views in a graph that has none, and symbolic numbers:
      shapes are fixed here. So is a tracing for the values' shapes only, which nodes still have.
    - The four passes that make a graph one of ExecuTorch's operators trace it once, not each on
      its own; views become copies in the graph, which the pass behind traces. Passes about the
      order of dimensions trace no graph in which they find nothing to change.
    - Types of the file formats' data classes are resolved once for a class, not for each of its
      objects.
    - The garbage collector looks less often, and not at what was there before.
    """
    transform = xnnpack_passes._transform
    materialize = export_utils._materialize_cpp_cia_ops
    listed: list[bool] = []

    def transform_unless_vision(program: Any, *passes: Any) -> Any:
        wanted = [step for step in passes if type(step).__name__ not in VISION]
        if not wanted:
            return program
        return transform(program, *wanted)

    def materialize_once() -> None:
        if not listed:
            materialize()
            listed.append(True)

    thresholds = gc.get_threshold()
    frozen_here = not gc.get_freeze_count()
    if frozen_here:  # what the caller has frozen stays so
        gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *thresholds[1:])
    try:
        with (
            _functional_and_valid_once(),
            _code_when_called(),
            _traced_when_edited(),
            _traced_once(),
            patch.object(NodeSource, "__deepcopy__", lambda self, memo: self, create=True),
            patch.object(LoweredBackendModule, "__deepcopy__", lambda self, memo: self),
            patch.object(xnnpack_passes, "_transform", transform_unless_vision),
            patch.object(export_utils, "_materialize_cpp_cia_ops", materialize_once),
            patch.object(_dataclass, "get_type_hints", functools.cache(typing.get_type_hints)),
        ):
            yield
    finally:
        gc.set_threshold(*thresholds)
        if frozen_here:
            gc.unfreeze()


@contextmanager
def _functional_and_valid_once() -> Iterator[None]:
    build = edge._gen_edge_manager_for_partitioners
    decompose = ExportedProgram.run_decompositions
    validate = ExportedProgram._validate
    trace = exported_program._decompose_and_get_gm_with_new_signature_constants

    def decompose_if_any(program: Any, table: Any = None, *more: Any, **options: Any) -> Any:
        # A table of PyTorch's own equals {} until it is first read.
        if type(table) is dict and not table:
            return program
        decomposed = getattr(
            program, "decomposed", False
        )  # then a tracing changes the table's content, and no more
        if decomposed and not any(node.target in table for node in program.graph.nodes):
            return program
        result: Any = decompose(program, table, *more, **options)
        result.decomposed = True
        return result

    def trace_own(program: Any, *, cia_to_decomp: dict[Any, Any], **options: Any) -> Any:
        own = {node.target for node in program.graph.nodes}
        kept = export_utils._special_op_to_preserve_cia
        few = {op: call for op, call in cia_to_decomp.items() if op in own or call is kept}
        return trace(program, cia_to_decomp=few, **options)

    def build_and_validate(*arguments: Any, **options: Any) -> Any:
        with (
            patch.object(ExportedProgram, "run_decompositions", decompose_if_any),
            patch.object(ExportedProgram, "_validate", lambda self: None),
            patch.object(
                exported_program, "_decompose_and_get_gm_with_new_signature_constants", trace_own
            ),
        ):
            manager = build(*arguments, **options)
        # The manager has just run each graph for the types of its operators.
        with patch.object(verifier, TYPES_OF_ARGUMENTS, lambda module: None):
            for program in manager._edge_programs.values():
                validate(program)
        return manager

    with patch.object(edge, "_gen_edge_manager_for_partitioners", build_and_validate):
        yield


@contextmanager
def _code_when_called() -> Iterator[None]:
    write = GraphModule.recompile

    def write_when_called(module: Any) -> None:
        def forward(self: Any, *arguments: Any, **options: Any) -> Any:
            write(self)
            return type(self).forward(self, *arguments, **options)

        if isinstance(module.graph._codegen, _PyTreeCodeGen):
            module._in_spec, module._out_spec = module.graph._codegen.pytree_info[1:]
        type(module).forward = forward

    def code(module: Any) -> str:
        write(module)
        return module._code

    with (
        patch.object(GraphModule, "recompile", write_when_called),
        patch.object(GraphModule, "code", property(code)),
        # ExecuTorch writes graphs into logs that nobody reads.
        patch.object(GraphModule, "__str__", object.__repr__),
        patch.object(GraphModule, "print_readable", lambda module, *_, **__: ""),
    ):
        yield


@contextmanager
def _traced_when_edited() -> Iterator[None]:
    trace = ExportPass.call

    def trace_if_edited(step: Any, module: Any) -> Any:
        kind = type(step)
        before = getattr(module.graph, "traced", None)
        if kind.__name__ == "SymToTensorPass" or (
            kind.__name__ in VIEWS and not _has_views(module)
        ):
            return PassResult(module, False)
        if kind is ExportPass and _is_typed(module):
            # The caller empties the module that it has handed in.
            same = GraphModule(module, module.graph)
            same.meta = module.meta.copy()
            return PassResult(same, True)
        if isinstance(step, ABOUT_DIM_ORDER) and not _changes_dim_order(step, module):
            return PassResult(module, False)
        edits = all(
            getattr(kind, name, None) is getattr(ExportPass, name, None) for name in TRACING
        )
        if edits and before is not None and before == _content(module):
            return PassResult(module, True)
        result = trace(step, module)
        result.graph_module.graph.traced = _content(result.graph_module)
        return result

    with patch.object(ExportPass, "call", trace_if_edited):
        yield


class _WithoutDimOrder(ScalarToTensorPass, RemoveMixedTypeOperators, OpReplacePass):
    """Each operator goes from one pass to the next, as their calls of `super()` have it."""


class _WithDimOrder(
    ScalarToTensorPass, RemoveMixedTypeOperators, OpReplacePass, MemoryFormatOpsPass
):
    """The same with the pass behind them."""


@contextmanager
def _traced_once() -> Iterator[None]:
    generate, passes = edge._generate_edge_program, edge._get_aten_to_edge_passes

    def passes_before(config: Any) -> Any:
        before, after = passes(config)
        # The manager that has listed them has wrapped them.
        kinds = [type(getattr(step, "__wrapped__", step)) for step in before]
        left = [step for step, kind in zip(before, kinds) if kind not in TRACED_WITH_OTHERS]
        return left, after

    def generate_once(config: Any, program: Any, *arguments: Any, **options: Any) -> Any:
        # Its decomposition has traced it.
        program.graph.traced = _content(program.graph_module)
        kind = _WithoutDimOrder if config._skip_dim_order else _WithDimOrder
        with (
            patch.object(edge, "_get_aten_to_edge_passes", passes_before),
            patch.object(edge, "OpReplacePass", kind),
            patch.object(edge, "MemoryFormatOpsPass", lambda: lambda it: PassResult(it, False)),
            patch.object(edge, "ReplaceViewOpsWithViewCopyOpsPass", lambda: _copy_views),
        ):
            return generate(config, program, *arguments, **options)

    with patch.object(edge, "_generate_edge_program", generate_once):
        yield


def _copy_views(module: Any) -> PassResult | None:
    if any(isinstance(inner, GraphModule) for inner in module.children()):
        return views.ReplaceViewOpsWithViewCopyOpsPass()(module)
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            functional = views._NON_FUNCTIONAL_OPS_TO_FUNCTIONAL_OPS.get(node.target)
            node.target = (
                functional or views.get_view_copy_of_view_op(node.target._schema) or node.target
            )
    return PassResult(module, True)


def _changes_dim_order(step: Any, module: Any) -> bool:
    """Return True if one of the two passes about the order of dimensions has something to do."""
    for node in module.graph.nodes:
        if isinstance(step, DimOrderOpsRevertPass) and node.target in MemoryFormatOpsMap:
            return True
        if (
            isinstance(step, LegalizePortableDimOrderPass)
            and node.target in step._target_ops
            and (value := node.args[0].meta["val"]).dim_order() != tuple(range(value.dim()))
        ):
            return True
    return any(isinstance(inner, GraphModule) for inner in module.children())


def _is_typed(module: Any) -> bool:
    """Return True if each value of a graph, which holds no other graph, is described: its tensors'
    formats, too, which out variants are allocated by."""
    calls = [node.meta for node in module.graph.nodes if node.op == "call_function"]
    return all("val" in meta and "tensor_meta" in meta for meta in calls) and not any(
        isinstance(inner, GraphModule) for inner in module.children()
    )


def _has_views(module: Any) -> bool:
    return any(getattr(node.target, "is_view", False) for node in module.graph.nodes) or any(
        _has_views(inner) for inner in module.children() if isinstance(inner, GraphModule)
    )


def _content(module: Any) -> list[tuple[Any, ...]] | None:
    """Return what a tracing reads of a graph; None of one that holds others."""
    if any(isinstance(inner, GraphModule) for inner in module.children()):
        return None
    return [
        (
            node,
            node.op,
            node.target,
            node.args,
            node.kwargs,
            node.op == "placeholder" and id(node.meta.get("val")),
        )
        for node in module.graph.nodes
    ]
