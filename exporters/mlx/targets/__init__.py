"""Targets that run MLX programs."""
