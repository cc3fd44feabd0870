"""Target `android-cpu`: ExecuTorch with XNNPACK, and nothing that a stock runtime lacks unless
asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.target import PlaceWeights, TargetSpec

if TYPE_CHECKING:
    from ondevice.exporters.android_cpu.target import AndroidCpu


def exporter() -> type[AndroidCpu]:
    """Return the target's code."""
    from ondevice.exporters.android_cpu.target import AndroidCpu

    return AndroidCpu


def placement() -> PlaceWeights:
    """Return where a program's weights are."""
    from ondevice.exporters.android_cpu.target import placement

    return placement


TARGET = TargetSpec(
    name="android-cpu",
    summary="Android or any CPU, ExecuTorch with XNNPACK",
    kind="executorch",
    runtime="executorch",
    exporter=exporter,
    placement=placement,
    needs=("torch-cpu", "transformers", "executorch"),
    uses=("compiler", "runtime-ops", "executorch-ops", "adb"),
)
