"""Compiled SPMD programs of steps: replicated, sharded, offloaded, multi-step."""

__all__: list[str] = []
