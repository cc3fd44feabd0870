"""P-RGE: zeroth-order LoRA-FA fine-tuning with only forward passes (Gao et al., 2024)."""
