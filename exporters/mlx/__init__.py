"""Programs for MLX: one exported function a stage, the order in which they run, and the weights block by block."""
