"""Where the variables of a model with a large table are kept: speed, memory, and what travels."""

from benchmarks.placement.run import run_placement

__all__ = ["run_placement"]
