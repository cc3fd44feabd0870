"""Target `android-npu`: the blocks on a Qualcomm NPU through QNN, everything else in float32 on the
CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.target import PlaceWeights, TargetSpec

if TYPE_CHECKING:
    from ondevice.exporters.android_npu.target import AndroidNpu

SOCS = {
    "SM8450": "Snapdragon 8 Gen 1",
    "SM8475": "Snapdragon 8+ Gen 1",
    "SM8550": "Snapdragon 8 Gen 2",
    "SM8650": "Snapdragon 8 Gen 3",
    "SM8750": "Snapdragon 8 Elite",
    "SM8845": "Snapdragon 8 Gen 5",
    "SM8850": "Snapdragon 8 Elite Gen 5",
}
"""Phone chips whose NPU computes in float16."""
PERTURBATION_SCALE = 3e-2
"""The default here, three times the method's: float16 leaves an error of some 0.01 in the
difference of two losses, which a larger step makes small next to it (docs/results/android.md has the curve).
"""


def exporter() -> type[AndroidNpu]:
    """Return the target's code."""
    from ondevice.exporters.android_npu.target import AndroidNpu

    return AndroidNpu


def placement() -> PlaceWeights:
    """Return where a program's weights are."""
    from ondevice.exporters.android_npu.target import placement

    return placement


TARGET = TargetSpec(
    name="android-npu",
    summary="Android with a Qualcomm NPU, through QNN",
    kind="qnn",
    runtime="executorch",
    exporter=exporter,
    placement=placement,
    socs=SOCS,
    perturbation_scale=PERTURBATION_SCALE,
    needs=("torch-cpu", "transformers", "executorch", "qnn"),
    uses=("adb",),
)
