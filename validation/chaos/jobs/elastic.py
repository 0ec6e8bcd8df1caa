"""Lockstep training that goes on with fewer workers: the end is the same up to rounding.

Without dropout, because replicas draw different numbers: a few steps with fewer replicas would
change the weights as much as a lost example.
"""

from __future__ import annotations

from random import Random

from validation.chaos.jobs.lockstep import RunningFit, start_fit
from validation.chaos.sandbox import Sandbox

__all__ = ["Elastic"]

_WORKERS = 3
_OPTIONS = {"workers": _WORKERS, "max-restarts": 12, "rejoin-after-s": 3}


class Elastic:
    """Three workers, of which one or two may be lost and come back."""

    name = "elastic"

    def start(self, sandbox: Sandbox, chance: Random) -> RunningFit:
        """Launches the job."""
        options = _OPTIONS | {"min-workers": chance.choice((1, 2))}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return start_fit(sandbox, chance, _WORKERS, words, is_exact=False)
