"""The daemon `ondevice serve`: a queue of jobs, one training process per job, an API and a page."""
