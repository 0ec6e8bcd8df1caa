"""Collectives over replicas: all-reduce algorithms, gradient packing, and host-side exchange."""

from stratagem.devices.collectives.all_reduce import AllReduce as AllReduce
from stratagem.devices.collectives.all_reduce import ChosenAllReduce as ChosenAllReduce
from stratagem.devices.collectives.all_reduce import GatheredAllReduce as GatheredAllReduce
from stratagem.devices.collectives.all_reduce import is_sum_over_replicas as is_sum_over_replicas
from stratagem.devices.collectives.all_reduce import mean_of as mean_of
from stratagem.devices.collectives.axis import ReplicaAxis as ReplicaAxis
from stratagem.devices.collectives.choice import Algorithm as Algorithm
from stratagem.devices.collectives.choice import Choice as Choice
from stratagem.devices.collectives.measurement import MeasuredChoice as MeasuredChoice
from stratagem.devices.collectives.measurement import measured_choice as measured_choice
from stratagem.devices.collectives.packing import NO_PACKING as NO_PACKING
from stratagem.devices.collectives.packing import WITHIN_PROCESS as WITHIN_PROCESS
from stratagem.devices.collectives.packing import NumberedPacks as NumberedPacks
from stratagem.devices.collectives.packing import SizedPacks as SizedPacks
from stratagem.devices.collectives.packing import packing_for as packing_for
from stratagem.execution.communicator import Communicator as Communicator
from stratagem.execution.communicator import MeshCommunicator as MeshCommunicator
from stratagem.execution.communicator import SoleCommunicator as SoleCommunicator
from stratagem.strategies.base.explanation import explain as explain
