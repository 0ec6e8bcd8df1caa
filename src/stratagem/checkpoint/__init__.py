"""Checkpoints: saving, restoring, retention policies, and saving before preemption."""

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.in_memory import MemoryBackup
from stratagem.checkpoint.latest import checkpoints_iterator, latest_checkpoint
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.objects import LoadStatus
from stratagem.checkpoint.policies import (
    Any,
    KeepEveryHours,
    KeepLatest,
    KeepPolicy,
    Kept,
    Moment,
    RetainedCheckpoint,
    SaveEverySeconds,
    SaveEverySteps,
    SavePolicy,
)
from stratagem.checkpoint.preemption import PreemptionCheckpointHandler
from stratagem.checkpoint.saving import (
    CheckpointOptions,
    CheckpointReader,
    list_variables,
    load_checkpoint,
    load_variable,
)

__all__ = [
    "Any",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "KeepEveryHours",
    "KeepLatest",
    "KeepPolicy",
    "Kept",
    "LoadStatus",
    "MemoryBackup",
    "Moment",
    "PreemptionCheckpointHandler",
    "RetainedCheckpoint",
    "SaveEverySeconds",
    "SaveEverySteps",
    "SavePolicy",
    "checkpoints_iterator",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]
