"""Analyses of jaxprs: replication, dependence on rows, retracing."""

__all__: list[str] = []
