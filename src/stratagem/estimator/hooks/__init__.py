"""Hooks: code that runs on the host between the steps of an Estimator."""

from stratagem.estimator.hooks.checkpoint_saver import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    check_listeners,
)
from stratagem.estimator.hooks.final_ops import FeedFnHook, FinalOpsHook
from stratagem.estimator.hooks.global_step_waiter import GlobalStepWaiterHook
from stratagem.estimator.hooks.logging_tensor import LoggingTensorHook
from stratagem.estimator.hooks.nan import NanLossDuringTrainingError, NanTensorHook
from stratagem.estimator.hooks.profiler import ProfilerHook
from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.step_counter import StepCounterHook
from stratagem.estimator.hooks.stop_at_step import StopAtStepHook
from stratagem.estimator.hooks.summary_saver import SummarySaverHook
from stratagem.estimator.hooks.timers import (
    AgreedTimer,
    NeverTriggerTimer,
    SecondOrStepTimer,
    Timer,
)

__all__ = [
    "AgreedTimer",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "NeverTriggerTimer",
    "ProfilerHook",
    "SecondOrStepTimer",
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "Timer",
    "check_listeners",
]
