"""Memory that a plan states for a device that is not here, beside what one really takes."""

from benchmarks.plan.run import run_plan

__all__ = ["run_plan"]
