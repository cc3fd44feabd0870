"""LoRA's and LoRA-FA's step over packed weights: it stays PyTorch's."""

from ondevice.core.program import TorchProgram

TORCH = TorchProgram(trains_a=lambda config: config.trains_a)
