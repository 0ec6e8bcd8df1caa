"""JobsClient of a cluster: submitted, run, followed and ended."""

__all__ = []
