"""RevFFN: all parameters through reversible blocks; no activation waits for the backward pass."""

from ondevice.core.method import MethodSpec, Option
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
    options=(
        Option(
            "--skip-stage1", "skip_stage1", bool, "Train everything from the first step (Table 3)"
        ),
        Option("--stage1-only", "stage1_only", bool, "Train the adapters only (Table 3)"),
    ),
    network=".torch:open_network",
)
