"""Full-parameter fine-tuning of models larger than the accelerator (SlideFormer)."""
