"""Sessions that run a training program: eager PyTorch and ExecuTorch."""
