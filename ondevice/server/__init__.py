"""The daemon `ondevice serve`: a queue of jobs, one training process a job, an API under /v1 and a page."""
