"""RevFFN: full-parameter fine-tuning through reversible blocks."""
