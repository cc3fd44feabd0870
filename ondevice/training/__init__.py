"""The training loop and the content of a run's folder: events, checkpoints, evaluations."""
