"""Examination of a machine: versions, devices, limits, settings, the cluster; each with a fix."""

from __future__ import annotations

from stratagem.doctor.examination import examine
from stratagem.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
