"""The engine behind the routes that ask a model: one queue, one process, answers in parts."""
