"""First-order fine-tuning of all parameters with AdamW."""

from ondevice.core.method import MethodSpec
from ondevice.methods.full.config import FullConfig

METHOD = MethodSpec(
    name="full",
    package=__name__,
    config=FullConfig,
    summary="first-order fine-tuning of all parameters",
    keeps="gradients, two moments, activations of all layers",
    page="full.md",
    trains="all",
    order="first",
    preference=4,
    classifies=True,
    sessions={"torch": ".torch:open_session"},
    packs=("torch",),
    memory=".memory:MEMORY",
    cost=".cost:step_cost",
    any_decoder=True,
)
