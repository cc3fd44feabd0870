"""Files that are complete or absent: manifests, adapters, checkpoints' tensors."""
