"""Rates of a machine, measured (`calibrate`) or assumed; importing this loads no framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Rates of a machine: operations, bytes and parameters a second; a rate that is not needed is None.

    A simulated bus (`bus_limit_gb_per_s`) is in those of the copies.
    """

    flops_s: float
    h2d_bytes_s: float | None
    d2h_bytes_s: float | None
    parameters_s: float
    disk_bytes_s: float | None
