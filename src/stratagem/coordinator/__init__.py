"""Functions that are scheduled on the workers of a cluster with parameter servers."""

from stratagem.coordinator.closures import Closure, ClosureQueue
from stratagem.coordinator.remote_value import RemoteValue, RemoteValueStatus

__all__ = ["Closure", "ClosureQueue", "RemoteValue", "RemoteValueStatus"]
