"""Time to the end of the first step, from `fit` and from the start of the process."""

from benchmarks.first_step.run import run_first_step

__all__ = ["run_first_step"]
