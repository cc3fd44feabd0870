"""Sources of a model: a folder, the hub, a Python package, a GGUF file, or the memory of a
program."""
