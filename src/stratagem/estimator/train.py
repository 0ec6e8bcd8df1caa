"""`sg.train`: the names of `tf.train` for clusters, checkpoints and the global step.

Source: TF 2.21 server_lib.py, checkpoint.py, checkpoint_management.py, checkpoint_options.py,
checkpoint_utils.py, training_util.py.
"""

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import checkpoints_iterator, latest_checkpoint
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.reader import list_variables, load_checkpoint, load_variable
from stratagem.checkpoint.saving import CheckpointOptions
from stratagem.cluster.spec import ClusterSpec
from stratagem.estimator.global_step import get_global_step, get_or_create_global_step
from stratagem.keras.numerics.random_state import RandomState

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "ClusterSpec",
    "RandomState",
    "checkpoints_iterator",
    "get_global_step",
    "get_or_create_global_step",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]
