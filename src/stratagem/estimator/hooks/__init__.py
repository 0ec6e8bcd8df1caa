"""Hooks: code that runs on the host between the steps of an Estimator."""

from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

__all__ = [
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
]
