"""Faults by kind: processes, network, disk, memory, clock and strangers."""

from __future__ import annotations

from validation.chaos.faults import clock, crash_points, disk, memory, network, processes, strangers

__all__ = ["KINDS"]

KINDS = (
    *processes.KINDS,
    *network.KINDS,
    *disk.KINDS,
    *memory.KINDS,
    *clock.KINDS,
    *crash_points.KINDS,
    *strangers.KINDS,
)
