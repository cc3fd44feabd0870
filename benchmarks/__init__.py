"""One script per table; `python -m benchmarks.ROOM.NAME --json` ends its output with one JSON
object."""
