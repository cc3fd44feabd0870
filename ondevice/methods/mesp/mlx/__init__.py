"""MeSP in MLX: pure functions (`stages`), the order in which they run (`schedule`), and who runs them (`machine`)."""
