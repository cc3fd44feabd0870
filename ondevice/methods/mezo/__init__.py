"""MeZO: zeroth-order training of all parameters, in place."""

from ondevice.core.method import MethodSpec
from ondevice.methods.mezo.config import MezoConfig

METHOD = MethodSpec(
    name="mezo",
    package=__name__,
    config=MezoConfig,
    summary="zeroth-order training of all parameters, in place",
    keeps="nothing",
    page="mezo.md",
    trains="all",
    order="zeroth",
    classifies=True,
    sessions={"torch": ".torch:open_session"},
    packs=("torch",),
    memory=".memory:MEMORY",
    cost=".cost:step_cost",
    replayable=True,
    any_decoder=True,
)
