"""How soon a killed training goes on, beside PyTorch's elastic launcher, and what a run loses."""

from benchmarks.recovery.run import run_recovery

__all__ = ["run_recovery"]
