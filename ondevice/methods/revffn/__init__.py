"""RevFFN: all parameters through reversible blocks; no activation waits for the backward pass."""

from ondevice.core.method import MethodSpec
from ondevice.methods.revffn.config import RevffnConfig

METHOD = MethodSpec(
    name="revffn",
    package=__name__,
    config=RevffnConfig,
    summary="all parameters through reversible blocks",
    keeps="one block's gradients, the optimizer's state, two streams",
    page="revffn.md",
    trains="all",
    order="first",
    sessions={"torch": ".torch:open_session"},
    memory=".memory:MEMORY",
    cost=".cost:step_cost",
    network=".torch:open_network",
)
