"""`ClusterCoordinator`: schedules functions on the workers of a cluster."""

__all__: list[str] = []
