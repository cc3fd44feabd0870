"""The Python API; `import ondevice` offers it, and the command line uses nothing else."""
