"""MeSP as an ExecuTorch program: its methods, how it is lowered, and its check against automatic differentiation."""
