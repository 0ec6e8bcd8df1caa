"""Tasks of one job on several machines."""

__all__ = []
