"""`sg.train`: the names of `tf.train` for clusters, checkpoints and the global step.

Source: TF 2.21 server_lib.py, checkpoint.py, checkpoint_management.py, checkpoint_options.py,
checkpoint_utils.py, training_util.py.
"""

from __future__ import annotations

import weakref
from typing import Any

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import checkpoints_iterator, latest_checkpoint
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.saving import (
    CheckpointOptions,
    list_variables,
    load_checkpoint,
    load_variable,
)
from stratagem.cluster.spec import ClusterSpec as ClusterSpec
from stratagem.contexts import get_strategy
from stratagem.estimator.steps import GLOBAL_STEP, current_store
from stratagem.keras.numerics.random_state import RandomState
from stratagem.keras.variables.creation import Variable

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "RandomState",
    "checkpoints_iterator",
    "get_global_step",
    "get_or_create_global_step",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]


# Global step variable: creation and lookup.


_outside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def get_global_step() -> Any:
    """Returns the variable that counts training steps.

    Inside a model function it is the Estimator's step, incremented after each training step.
    Elsewhere it is the one that `get_or_create_global_step` created for the current strategy.

    Returns:
        An int32 variable, or None if there is none.

    Example:
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     print(sg.train.get_global_step())  # none was created
        ...     step = sg.train.get_or_create_global_step()
        ...     print(sg.train.get_global_step() is step)
        None
        True

    Source: TF 2.21 training_util.py, get_global_step.
    """
    store = current_store.get()
    return _outside.get(get_strategy()) if store is None else store.global_step


def get_or_create_global_step() -> Any:
    """Returns the variable that counts training steps, creating it if necessary.

    Returns:
        An int32 variable; inside a model function, the Estimator's.

    Example:
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     step = sg.train.get_or_create_global_step()
        ...     step is sg.train.get_global_step()
        True

    Source: TF 2.21 training_util.py, get_or_create_global_step.
    """
    if get_global_step() is None:
        _outside[get_strategy()] = Variable(0, trainable=False, name=GLOBAL_STEP, dtype="int32")
    return get_global_step()
