"""First-order LoRA and LoRA-FA: the baselines that zeroth-order training is measured against."""
