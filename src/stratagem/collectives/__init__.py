"""Collectives over replicas: all-reduce algorithms, gradient packing, and host-side exchange."""

from stratagem.collectives import host
from stratagem.collectives.all_reduce import (
    AllReduce,
    ChosenAllReduce,
    GatheredAllReduce,
    is_sum_over_replicas,
    mean_of,
)
from stratagem.collectives.axis import ReplicaAxis
from stratagem.collectives.choice import Algorithm, Choice
from stratagem.collectives.communicator import Communicator, MeshCommunicator, SoleCommunicator
from stratagem.collectives.explanation import explain
from stratagem.collectives.measurement import MeasuredChoice, measured_choice
from stratagem.collectives.packing import (
    NO_PACKING,
    WITHIN_PROCESS,
    NumberedPacks,
    SizedPacks,
    packing_for,
)

__all__ = [
    "Algorithm",
    "AllReduce",
    "Choice",
    "ChosenAllReduce",
    "Communicator",
    "GatheredAllReduce",
    "MeasuredChoice",
    "MeshCommunicator",
    "NO_PACKING",
    "NumberedPacks",
    "ReplicaAxis",
    "SizedPacks",
    "SoleCommunicator",
    "WITHIN_PROCESS",
    "explain",
    "host",
    "is_sum_over_replicas",
    "mean_of",
    "measured_choice",
    "packing_for",
]
