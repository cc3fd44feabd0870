"""Sessions that run a training program: ExecuTorch, MLX and PyTorch."""
