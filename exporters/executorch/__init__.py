"""ExecuTorch programs that hold a whole training step."""
