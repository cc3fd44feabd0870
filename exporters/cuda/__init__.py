"""Artifacts that run in PyTorch on an NVIDIA GPU: weights packed beforehand, the method, pins and a launcher."""
