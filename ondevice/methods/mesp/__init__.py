"""MeSP: exact LoRA gradients from hand-derived backward passes, a block at a time."""

from ondevice.core.method import MethodSpec
from ondevice.core.registry import metal
from ondevice.methods.mesp.config import MespConfig

METHOD = MethodSpec(
    name="mesp",
    package=__name__,
    config=MespConfig,
    summary="exact LoRA gradients from hand-derived backward passes, a block at a time",
    keeps="A, B, two moments or none, one block's activations",
    page="mesp.md",
    trains="adapter",
    order="first",
    preference=1,
    sessions={"torch": ".torch.session:open_session", "mlx": ".mlx.session:open_session"},
    knows_block=lambda dims: (
        dims.gated and not (dims.experts and metal())
    ),  # MLX would be taken there, and has none
    packs=("torch",),
    memory=".memory:MEMORY",
    cost="ondevice.methods.step_model:adapter_step_cost",
    programs={
        "executorch": ".program:EXECUTORCH",
        "qnn": ".npu:QNN",
        "torch": ".program:TORCH",
        "mlx": ".mlx.program:STAGES",
    },
    quantises=lambda config: config.bits is not None,
    any_decoder="tried",
    reads_files=lambda config: config.weight_placement == "streamed",
)
