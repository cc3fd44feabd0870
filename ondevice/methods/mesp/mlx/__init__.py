"""MeSP in MLX: pure functions (`stages`), their order as data (`instructions`), who interprets it
(`model`), where frozen weights are (`weights`), and the steps (`session`)."""
