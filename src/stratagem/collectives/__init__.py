"""How values of several replicas are combined."""

from stratagem.collectives.communicator import Communicator, MeshCommunicator, SoleCommunicator

__all__ = ["Communicator", "MeshCommunicator", "SoleCommunicator"]
