"""Train models larger than the accelerator: layers, gradients and states use host and disk too."""
