"""Workers of one run that are killed again and again, and join again: what the run loses."""

from benchmarks.survivors.run import run_survivors

__all__ = ["run_survivors"]
