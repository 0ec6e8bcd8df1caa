"""One running task: its process, exit status, output and function call."""

__all__ = []
