"""MeSP in torch: `stages` are the formulas, `model` their order, frozen weights and the head, and
`session` the steps."""
