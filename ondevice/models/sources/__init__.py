"""Where a model comes from: a folder, the hub, a Python package, a GGUF file, or the memory of a program."""
