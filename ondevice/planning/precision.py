"""The precision of a run, if its method may choose: one that the processor has units for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.capabilities import OwnPrecision

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.method import Placement

BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
"""Names of a CPU's bfloat16 instructions in `torch.cpu.get_capabilities`, on x86-64 and on ARM."""


def with_precision(config: RunConfig, placement: Placement) -> tuple[RunConfig, list[str]]:
    """Return the run file with a precision that the machine has units for, and notes on it.

    A precision that the run file or a flag names is kept.
    """
    own = placement.spec.capability(OwnPrecision)
    sentences = list[str]()
    dtype = config.model.dtype
    if own:
        key = own.setting
        dtype = getattr(config.method, key)
        if (
            dtype == "bfloat16"
            and placement.device == "cpu"
            and key not in config.method.model_fields_set
        ):
            if not has_bfloat16_units():
                dtype = "float32"
                sentences.append(
                    f"this CPU has no bfloat16 units: --set method.{key}=bfloat16 asks for it anyway"
                )
            config = config.model_copy(
                update={"method": config.method.model_copy(update={key: dtype})}
            )
    return config, [*placement.precision(dtype), *sentences]


def has_bfloat16_units() -> bool:
    """Return whether this CPU multiplies in bfloat16 itself, by its flags.

    Timing does not tell: on one machine the ratio to float32 was 0.36 to 145 between starts.
    """
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:  # PyTorch before 2.13
        return torch.cpu._is_avx512_bf16_supported()
    flags = capabilities()
    return any(flags.get(name, False) for name in BFLOAT16_UNITS)
