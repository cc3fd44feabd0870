"""Files that are written and read back: manifests, adapters, checkpoints' tensors; whole or not there."""
