"""How the cost of a step grows with its variables and replicas, beside the same step by hand."""

from benchmarks.growth.run import run_growth

__all__ = ["run_growth"]
