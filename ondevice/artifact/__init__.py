"""What is written and read back: manifests, adapters, atomic files."""
