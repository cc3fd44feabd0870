"""One file per ExecuTorch target."""
