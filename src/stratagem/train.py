"""What `tf.train` has for clusters and checkpoints.

Source: TF 2.21 server_lib.py, checkpoint.py, checkpoint_management.py, checkpoint_options.py.
"""

from stratagem.checkpoint import Checkpoint, CheckpointManager, CheckpointOptions
from stratagem.cluster import ClusterSpec
from stratagem.keras import RandomState

__all__ = ["Checkpoint", "CheckpointManager", "CheckpointOptions", "ClusterSpec", "RandomState"]
