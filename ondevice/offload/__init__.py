"""Training of models larger than the accelerator: layers, gradients and states spread over host and disk."""
