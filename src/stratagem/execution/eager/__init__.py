"""Eager execution: a thread per replica, op by op."""

__all__: list[str] = []
