"""Tracing of replica functions into jaxprs of one replica."""

__all__: list[str] = []
