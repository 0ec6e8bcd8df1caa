"""Analysis of jaxprs: replication, dependence on rows, unused operations."""

__all__: list[str] = []
