"""Ends training whose loss is not a number any more."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from stratagem.estimator.hooks.session_run_hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.messages import explain

__all__ = ["NanLossDuringTrainingError", "NanTensorHook"]

_logger = logging.getLogger(__name__)


class NanLossDuringTrainingError(RuntimeError):
    """The loss became NaN.

    Source: TF 2.21 basic_session_run_hooks.py, NanLossDuringTrainingError.
    """


class NanTensorHook(SessionRunHook):
    """Looks after each step whether the loss is NaN, which makes the loop wait for each step.

    Args:
        loss_tensor: a name, or a value of the model function.
        fail_on_nan_loss: raise an error; otherwise training ends as if it were over.

    Attributes:
        tensors: the loss, under the name "loss".

    Raises:
        NanLossDuringTrainingError: in `after_run`, where the loss is NaN.

    Example:
        >>> hook = sg.estimator.NanTensorHook("loss", fail_on_nan_loss=False)

    Source: TF 2.21 basic_session_run_hooks.py, NanTensorHook.
    """

    def __init__(self, loss_tensor: Any, fail_on_nan_loss: bool = True) -> None:
        self.tensors = {"loss": loss_tensor}
        self._fails = fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Asks for the loss.

        Args:
            run_context: the step.

        Returns:
            The fetches.
        """
        return SessionRunArgs(self.tensors)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Fails, or asks for the end, where the loss is NaN.

        Args:
            run_context: the step.
            run_values: the loss.

        Raises:
            NanLossDuringTrainingError: it is, and that was asked for.
        """
        if not np.any(np.isnan(run_values.results["loss"])):
            return
        step = run_context.session.global_step
        if self._fails:
            raise NanLossDuringTrainingError(
                explain(
                    f"The loss became NaN during training, at global step {step}.",
                    expected="a number.",
                    fix="lower the learning rate, clip gradients, or see whether features or "
                    "labels are NaN; fail_on_nan_loss=False ends training without an error.",
                )
            )
        _logger.warning("The loss became NaN at global step %d: training ends.", step)
        run_context.request_stop()
