"""Exact LoRA gradients in little memory, by a backward pass written by hand (MeSP)."""
