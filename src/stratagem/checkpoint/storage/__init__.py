"""Checkpoint files and in-memory snapshots, written here or by a separate process.

Independent of variables; JAX is not loaded before Orbax is called.
"""
