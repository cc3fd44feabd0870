"""Run files for kinds of devices, each named by its file: `--config phone`."""
