"""Compiled SPMD programs of steps: replicated, sharded, offloaded, multi-step."""
