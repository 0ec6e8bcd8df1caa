"""Collectives over replicas: all-reduce algorithms, gradient packing, and host-side exchange."""

from stratagem.devices.collectives import host
from stratagem.devices.collectives.all_reduce import (
    AllReduce,
    ChosenAllReduce,
    GatheredAllReduce,
    is_sum_over_replicas,
    mean_of,
)
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.choice import Algorithm, Choice
from stratagem.devices.collectives.measurement import MeasuredChoice, measured_choice
from stratagem.devices.collectives.packing import (
    NO_PACKING,
    WITHIN_PROCESS,
    NumberedPacks,
    SizedPacks,
    packing_for,
)
from stratagem.execution.communicator import Communicator, MeshCommunicator, SoleCommunicator
from stratagem.strategies.base.explanation import explain

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
