"""All modules of checks: to import this registers them."""

from validation.gpu import faults, language_models, memory, numerics, processes, strategies, tools

__all__ = ["faults", "language_models", "memory", "numerics", "processes", "strategies", "tools"]
