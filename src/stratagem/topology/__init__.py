"""Devices of replicas: finding them, grouping them, and the mesh that they form."""

from stratagem.topology.abstract_devices import planned_topology
from stratagem.topology.compilation_cache import use_compilation_cache
from stratagem.topology.devices import find_devices, local_devices
from stratagem.topology.exact_integers import require_exact_integers
from stratagem.topology.mesh import REPLICA_AXIS, SHARD_AXIS, Topology
from stratagem.topology.separate_processes import start_separately

__all__ = [
    "REPLICA_AXIS",
    "SHARD_AXIS",
    "Topology",
    "find_devices",
    "local_devices",
    "planned_topology",
    "require_exact_integers",
    "start_separately",
    "use_compilation_cache",
]
