"""How values of several replicas are combined."""

from stratagem.collectives import host
from stratagem.collectives.communicator import Communicator, MeshCommunicator, SoleCommunicator
from stratagem.collectives.packing import NO_PACKING, WITHIN_PROCESS, Packing, packing_for

__all__ = [
    "Communicator",
    "MeshCommunicator",
    "NO_PACKING",
    "Packing",
    "SoleCommunicator",
    "WITHIN_PROCESS",
    "host",
    "packing_for",
]
