"""GGUF files: their names, keys, tensors and tokenizers, read and written."""
