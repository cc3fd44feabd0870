"""Fine-tune language models where the data lives."""
