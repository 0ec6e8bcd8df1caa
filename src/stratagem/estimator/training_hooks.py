"""The hooks of a training, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.checkpoint.together import is_first
from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec

__all__ = ["training_hooks"]


class _SaveAtEnd(SessionRunHook):
    def after_create_session(self, session: Any, coord: Any) -> None:
        session.save_checkpoint()

    def end(self, session: Any) -> None:
        session.save_checkpoint()


def training_hooks(
    spec: EstimatorSpec,
    hooks: Sequence[SessionRunHook],
    config: RunConfig,
    saving_listeners: Sequence[Any],
    model_dir: str,
) -> list[SessionRunHook]:
    chief = list(spec.training_chief_hooks or ()) if is_first() else []
    return [*chief, *hooks, *(spec.training_hooks or ()), _SaveAtEnd()]
