"""MeSP in torch: `stages` are the formulas, `model` their order, `loss` the head, `weights` where
frozen weights are, `session` the steps, `program` a step as one function for an inference
runtime."""
