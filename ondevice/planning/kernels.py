"""One real computation for each backend, run by `doctor` in separate processes.

    python -m ondevice.planning.kernels NAME

ends with one line of JSON: {"detail": "..."} if the result is right, else {"error": "...",
"fix": "..."}. A crash is a failed check, too. A package that imports may still crash at its first
kernel, so each check computes something and compares the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from ondevice.core.errors import OndeviceError
from ondevice.runtime_ops.build import load_executorch_ops


class WrongResult(Exception):
    """A kernel ran and gave a wrong result."""


def _expect_close(name: str, received: object, expected: object, tolerance: float) -> float:
    import numpy as np

    difference = np.abs(
        np.asarray(received, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
    )
    error = float(difference.max() / np.abs(np.asarray(expected)).max())
    if not error <= tolerance:
        raise WrongResult(f"{name}: relative error {error:.3g}, expected at most {tolerance:g}")
    return error


def torch_cpu() -> str:
    """Compare a float32 matrix product on the CPU, and its gradient, with numpy in float64."""
    import numpy as np
    import torch

    random = np.random.default_rng(0)
    a, b = (random.standard_normal((96, 96), dtype=np.float32) for _ in range(2))
    x = torch.from_numpy(a).requires_grad_(True)
    y = x @ torch.from_numpy(b)
    y.sum().backward()
    error = _expect_close("matrix product", y.detach().numpy(), a.astype(np.float64) @ b, 1e-4)
    if x.grad is None:
        raise WrongResult("backward gave no gradient")
    expected = np.broadcast_to(b.astype(np.float64).sum(1), a.shape)
    _expect_close("gradient", x.grad.numpy(), expected, 1e-4)
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, matmul error {error:.1e}"


def torch_cuda() -> str:
    """Compare a bfloat16 matrix product and a float32 reduction on the first GPU with numpy."""
    import numpy as np
    import torch

    random = np.random.default_rng(0)
    a, b = (random.standard_normal((128, 128), dtype=np.float32) for _ in range(2))
    x, y = (torch.from_numpy(value).to("cuda", torch.bfloat16) for value in (a, b))
    exact = x.float().cpu().numpy().astype(np.float64) @ y.float().cpu().numpy()
    _expect_close("bfloat16 matrix product", (x @ y).float().cpu().numpy(), exact, 2e-2)
    _expect_close("sum", torch.from_numpy(a).cuda().sum().item(), a.astype(np.float64).sum(), 1e-3)
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return f"{name}, CUDA {torch.version.cuda}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _first_output(program: Any, inputs: list[Any]) -> Any:
    """Run an exported program in ExecuTorch's runtime."""
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(program.buffer)  # which the method reads
    method = loaded.load_method("forward")
    if method is None:
        raise WrongResult("the runtime does not load the program")
    return method.execute(inputs)[0].numpy()


def executorch() -> str:
    """Lower two linear layers to XNNPACK, run the program, and compare with eager PyTorch."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).eval()
    x = torch.randn(4, 32)
    exported = torch.export.export(model, (x,))
    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    program = edge.to_executorch()
    delegates = len(program.executorch_program.execution_plan[0].delegates)
    if delegates == 0:
        raise WrongResult("XNNPACK took nothing of the program")
    received = _first_output(program, [x])
    error = _expect_close("program", received, model(x).detach().numpy(), 1e-4)
    return (
        f"executorch {version('executorch')}, {delegates} XNNPACK delegate ran, error {error:.1e}"
    )


def runtime_ops() -> str:
    """Compile this project's ops, load them into PyTorch, compare the generator with numpy's."""
    import torch

    from ondevice.runtime_ops import generator, torch_ops

    torch_ops.register()
    seed = torch.tensor([7])
    step = torch.tensor([3])
    received = torch.ops.ondevice.normal(seed, step, 0, 2, 10, 1000).numpy()
    error = _expect_close(
        "ondevice::normal", received, generator.normal(7, 3, 0, 2, 10, 1000), 1e-5
    )
    signs = torch.ops.ondevice.rademacher(seed, step, 0, 2, 64, 512).numpy()
    _expect_close("ondevice::rademacher", signs, generator.rademacher(7, 3, 0, 2, 64, 512), 0.0)
    return f"generator backend {torch_ops.generator_backend()}, error {error:.1e}"


def executorch_ops() -> str:
    """Compile this project's kernels for ExecuTorch, and run a program that needs one of them."""
    import torch
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    from ondevice.runtime_ops import generator, torch_ops

    class Noise(torch.nn.Module):
        def forward(self, seed: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            return torch.ops.ondevice.normal(seed, step, 0, 2, 10, 500)

    load_executorch_ops()
    torch_ops.register()
    names = {
        name
        for name in Runtime.get().operator_registry.operator_names
        if name.startswith("ondevice::")
    }
    inputs = torch.tensor([7]), torch.tensor([3])
    program = to_edge_transform_and_lower(torch.export.export(Noise(), inputs)).to_executorch()
    received = _first_output(program, list(inputs))
    error = _expect_close("ondevice::normal", received, generator.normal(7, 3, 0, 2, 10, 500), 1e-5)
    return (
        f"{len(names)} kernels registered, ondevice::normal ran in the runtime, error {error:.1e}"
    )


def qnn() -> str:
    """Compile two linear layers for a Snapdragon 8 Gen 3's NPU and run them in QNN's simulator."""
    import torch

    from ondevice.exporters.android_npu import qnn as libraries

    libraries.load_compiler()
    with libraries.quiet():
        from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
        from executorch.backends.qualcomm.utils import utils

        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
        ).eval()
        x = torch.randn(4, 32)
        spec = utils.generate_qnn_executorch_compiler_spec(
            QcomChipset.SM8650, utils.generate_htp_compiler_spec(use_fp16=True)
        )
        program = utils.to_edge_transform_and_lower_to_qnn(model, (x,), spec).to_executorch()
        received = _first_output(program, [x])
    error = _expect_close("NPU program", received, model(x).detach().numpy(), 1e-2)
    return (
        f"onnxruntime-qnn {libraries.VERSION}: compiled for SM8650 and ran in the simulator, "
        f"error {error:.1e}"
    )


def mlx() -> str:
    """Compare a float32 matrix product and a gradient on MLX's default device with numpy."""
    import mlx.core as mx
    import numpy as np

    random = np.random.default_rng(0)
    a, b = (random.standard_normal((64, 64), dtype=np.float32) for _ in range(2))
    y = mx.array(a) @ mx.array(b)
    error = _expect_close("matrix product", np.array(y), a.astype(np.float64) @ b, 1e-2)
    gradient = mx.grad(lambda x: (x * x).sum())(mx.array(a))
    _expect_close("gradient", np.array(gradient), 2 * a, 1e-5)
    return f"mlx {version('mlx')} on {mx.default_device()}, error {error:.1e}"


def bitsandbytes() -> str:
    """Quantise to NF4, dequantise, and run a 4-bit linear, on the CPU and the GPU if any."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn.modules import LinearNF4

    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        torch.manual_seed(0)
        weight = torch.randn(64, 128, device=device)
        packed, state = functional.quantize_4bit(weight, quant_type="nf4")
        back = functional.dequantize_4bit(packed, state)
        _expect_close(f"NF4 on {device}", back.float().cpu().numpy(), weight.cpu().numpy(), 0.2)
        linear = LinearNF4(128, 64, bias=False, compute_dtype=torch.float32)
        linear.weight.data.copy_(weight.cpu())
        x = torch.randn(3, 128, device=device)
        y = linear.to(device)(x)
        _expect_close(
            f"LinearNF4 on {device}",
            y.float().cpu().numpy(),
            (x @ back.float().t()).cpu().numpy(),
            3e-2,
        )
    return f"bitsandbytes {version('bitsandbytes')}, NF4 kernel ran on {' and '.join(devices)}"


def unified_memory() -> str:
    """Take 256 MiB on the GPU and see whether the CPU's free memory falls: then both share it."""
    import psutil
    import torch

    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")  # the context
    torch.cuda.synchronize()
    before = psutil.virtual_memory().available
    size = 256 << 20
    taken = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    fell = before - psutil.virtual_memory().available
    if int(taken[-1]) != 1:
        raise WrongResult("memory of the GPU does not hold what was written")
    free, total = (value / 2**30 for value in torch.cuda.mem_get_info())
    if not getattr(properties, "is_integrated", False):
        return f"{properties.name} has {total:.1f} GiB of its own, {free:.1f} free"
    if fell < size // 2:
        raise WrongResult(f"256 MiB on the GPU took {fell / 2**20:.0f} MiB of the shared memory")
    return f"{properties.name} and the CPU share {total:.1f} GiB, {free:.1f} free"


def peft() -> str:
    """Wrap a linear layer with LoRA: unchanged at B = 0, changed by B, the same when merged."""
    import peft as library
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("proj", torch.nn.Linear(16, 8))
    x = torch.randn(2, 16)
    before = model(x).detach()
    wrapped = library.get_peft_model(model, library.LoraConfig(r=4, target_modules=["proj"]))
    _expect_close("B = 0", wrapped(x).detach().numpy(), before.numpy(), 1e-6)
    for name, value in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(value)
    trained = wrapped(x).detach()
    if torch.allclose(trained, before):
        raise WrongResult("the adapter changes nothing")
    _expect_close("merged", wrapped.merge_and_unload()(x).detach().numpy(), trained.numpy(), 1e-4)
    return f"peft {version('peft')}, adapter applied and merged"


def transformers() -> str:
    """Build a tiny Llama and run it forward and backward."""
    import torch
    import transformers as library

    config = library.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        vocab_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(config)
    ids = torch.arange(8)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if not bool(torch.isfinite(loss)):
        raise WrongResult("the loss is not finite")
    return f"transformers {library.__version__}, a Llama ran forward and backward"


KERNELS: dict[str, Callable[[], str]] = {
    "torch-cpu": torch_cpu,
    "torch-cuda": torch_cuda,
    "transformers": transformers,
    "peft": peft,
    "executorch": executorch,
    "runtime-ops": runtime_ops,
    "executorch-ops": executorch_ops,
    "qnn": qnn,
    "mlx": mlx,
    "unified-memory": unified_memory,
    "bitsandbytes": bitsandbytes,
}


def main(arguments: list[str]) -> int:
    """Run the named kernel and print its result as a line of JSON; 0 if it is right."""
    try:
        answer = {"detail": KERNELS[arguments[0]]()}
    except OndeviceError as error:
        answer = {"error": error.message, "fix": error.hint}
    except Exception as error:  # any exception is the finding
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
    if "detail" in answer:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
