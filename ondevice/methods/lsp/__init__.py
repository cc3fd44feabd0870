"""LSP-Offload: all parameters over a slow bus, through sparse projections."""

from ondevice.core.method import MethodSpec
from ondevice.methods.lsp.config import LspConfig

METHOD = MethodSpec(
    name="lsp",
    package=__name__,
    config=LspConfig,
    summary="all parameters over a slow bus; gradients cross it in a subspace",
    keeps="weights and projectors on the GPU; 8 bytes for each number of the subspaces in host memory",
    page="lsp.md",
    trains="all",
    order="first",
    classifies=True,
    sessions={"torch": ".torch:open_session"},
    memory=".memory:MEMORY",
    cost=".memory:step_cost",
    offloads=True,
    precision="compute",
    ranks=True,
    lanes=".planner:lanes",
    advise=".planner:recommend",
)
