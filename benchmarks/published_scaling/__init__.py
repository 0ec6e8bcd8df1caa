"""Scaling that the planner predicts, beside published measurements."""

from benchmarks.published_scaling.run import run_published_scaling

__all__ = ["run_published_scaling"]
