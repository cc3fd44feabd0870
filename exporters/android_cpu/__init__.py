"""Target `android-cpu`: ExecuTorch with XNNPACK, and nothing that a stock runtime lacks unless asked."""

from ondevice.core.target import TargetSpec

TARGET = TargetSpec(
    name="android-cpu",
    package=__name__,
    summary="Android or any CPU, ExecuTorch with XNNPACK",
    kind="executorch",
    runtime="executorch",
    exporter=".target:AndroidCpu",
    placement=".target:placement",
    needs=("torch-cpu", "transformers", "executorch"),
    uses=("compiler", "runtime-ops", "executorch-ops", "adb"),
)
