"""How long an array takes to another process of this machine, beside calls of a Ray actor."""

from benchmarks.transport.run import run_transport

__all__ = ["run_transport"]
