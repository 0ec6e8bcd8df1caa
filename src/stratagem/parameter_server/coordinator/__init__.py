"""Functions scheduled on the workers of a cluster, by `ClusterCoordinator`."""

__all__: list[str] = []
