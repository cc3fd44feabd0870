"""The training loop and what it leaves in a run's folder: events, checkpoints, evaluations."""
