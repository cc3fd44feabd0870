"""One script per table; `python -m benchmarks.NAME --json` ends its output with one JSON object."""
