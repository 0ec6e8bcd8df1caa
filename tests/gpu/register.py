"""All modules of checks: to import this registers them."""

from tests.gpu import faults, memory, numerics, processes, strategies, tools

__all__ = ["faults", "memory", "numerics", "processes", "strategies", "tools"]
