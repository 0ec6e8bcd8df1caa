"""All modules of checks: to import this registers them."""

from tests.gpu import faults, language_models, memory, numerics, processes, strategies, tools

__all__ = ["faults", "language_models", "memory", "numerics", "processes", "strategies", "tools"]
