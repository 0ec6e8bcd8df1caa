"""The names of `tf.tpu.experimental`: the TPU's devices, and which of them compute a replica.

Source: TF 2.21 tpu/topology.py, device_assignment.py, tpu_strategy_util.py, tpu_system_metadata.py.
"""

from stratagem.cluster.accelerators import TPUSystemMetadata
from stratagem.devices.device_assignment import DeviceAssignment, DeviceOrderMode
from stratagem.devices.tpu_topology import TPUTopology as Topology
from stratagem.strategies.tpu import initialize_tpu_system, shutdown_tpu_system

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]
