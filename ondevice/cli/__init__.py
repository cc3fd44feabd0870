"""The command line: one file a verb, and no logic of its own."""
