"""Training methods: one folder each, found through `registry.py`."""
