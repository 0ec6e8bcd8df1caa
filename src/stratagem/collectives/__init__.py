"""How values of several replicas are combined."""

from stratagem.collectives import host
from stratagem.collectives.communicator import Communicator, MeshCommunicator, SoleCommunicator
from stratagem.collectives.packing import (
    BETWEEN_PROCESSES,
    NO_PACKING,
    WITHIN_PROCESS,
    Packing,
)

__all__ = [
    "BETWEEN_PROCESSES",
    "Communicator",
    "MeshCommunicator",
    "NO_PACKING",
    "Packing",
    "SoleCommunicator",
    "WITHIN_PROCESS",
    "host",
]
