"""SlideFormer: all parameters of a model larger than the accelerator; layers slide through it."""

from ondevice.core.method import MethodSpec
from ondevice.methods.slideformer.config import SlideformerConfig

METHOD = MethodSpec(
    name="slideformer",
    package=__name__,
    config=SlideformerConfig,
    summary="all parameters; layers slide through the accelerator, the host updates",
    keeps="12 bytes a parameter in host memory; a window of layers on the GPU",
    page="slideformer.md",
    trains="all",
    order="first",
    classifies=True,
    sessions={"torch": ".torch:open_session"},
    memory=".memory:MEMORY",
    cost=".memory:step_cost",
    offloads=True,
    precision="compute",
    ranks=True,
    lanes=".auto:lanes",
    resolve=".auto:resolve_request",
)
