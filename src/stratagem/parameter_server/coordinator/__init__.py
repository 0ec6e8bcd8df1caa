"""`ClusterCoordinator`: schedules functions on the workers of a cluster."""
