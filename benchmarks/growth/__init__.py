"""How costs grow: those of a step, beside the same step by hand, and those of everything around."""

from benchmarks.growth.run import run_growth

__all__ = ["run_growth"]
