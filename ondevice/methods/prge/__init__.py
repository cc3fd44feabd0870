"""P-RGE: zeroth-order LoRA-FA, all queries and both signs in one forward pass."""

from ondevice.core.method import MethodSpec
from ondevice.methods.prge.config import PrgeConfig

METHOD = MethodSpec(
    name="prge",
    package=__name__,
    config=PrgeConfig,
    summary="zeroth-order LoRA-FA, all random directions in one forward pass",
    keeps="one copy of B",
    page="prge.md",
    trains="adapter",
    order="zeroth",
    preference=3,
    sessions={"torch": ".torch:open_session"},
    packs=("torch",),
    memory=".memory:MEMORY",
    cost=".cost:step_cost",
    programs={"executorch": ".program:EXECUTORCH", "qnn": ".npu:QNN", "torch": ".program:TORCH"},
    replayable=True,
    for_training=PrgeConfig.for_training,
    schedule=lambda config: config.default_schedule,
    any_decoder=True,
)
