"""Eager execution of replica functions: op by op, with one thread per replica."""

__all__: list[str] = []
