"""Full-parameter fine-tuning with near-native speed over a slow bus (LSP-Offload): learned sparse projectors."""
