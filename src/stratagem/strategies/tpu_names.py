"""Names of `tf.tpu` for programs that train on TPUs.

TPUs need no set-up of their own: JAX starts them, and `sg.TPUStrategy` joins their hosts. What
TensorFlow's name has besides, such as `tf.tpu.experimental.embedding`, is about tables on the
hardware of one generation, for which JAX has nothing.

Source: TF 2.21 tpu/__init__.py.
"""

from stratagem.devices.device_assignment import DeviceAssignment
from stratagem.devices.tpu_topology import TPUTopology as Topology
from stratagem.strategies import tpu_experimental as experimental  # noqa: F401 - unlisted
from stratagem.strategies.tpu import initialize_tpu_system, shutdown_tpu_system

__all__ = ["DeviceAssignment", "Topology", "initialize_tpu_system", "shutdown_tpu_system"]
