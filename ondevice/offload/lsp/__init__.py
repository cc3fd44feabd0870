"""Full-rank fine-tuning through learned sparse projectors (LSP-Offload): what crosses the bus is P^T G Q."""
