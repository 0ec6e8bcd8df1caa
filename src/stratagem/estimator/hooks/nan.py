"""NanTensorHook: stops training when the loss becomes NaN."""

from __future__ import annotations

import logging

import numpy as np

from stratagem.errors import explain
from stratagem.estimator.hooks.session_run_hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

_logger = logging.getLogger(__name__)


class NanLossDuringTrainingError(RuntimeError):
    """Raised when the training loss becomes NaN.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     loss = keras.ops.mean(features) * sg.Variable(1.0)
        ...     op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss)
        ...     return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=op)
        >>> data = lambda: (np.float32([np.nan]), None)
        >>> try:
        ...     sg.estimator.Estimator(model_fn).train(
        ...         data, steps=1, hooks=[sg.estimator.NanTensorHook("loss")])
        ... except sg.estimator.NanLossDuringTrainingError as error:
        ...     print(str(error).splitlines()[0])
        The loss became NaN at global step 1.

    Source: TF 2.21 basic_session_run_hooks.py, NanLossDuringTrainingError.
    """


class NanTensorHook(SessionRunHook):
    """Checks the loss for NaN after each step. This makes the loop wait for each step.

    Args:
        loss_tensor: a name or a model function value.
        fail_on_nan_loss: True to raise an error, False to stop training.

    Attributes:
        tensors: a dict from "loss" to `loss_tensor`.

    Raises:
        NanLossDuringTrainingError: in `after_run`, if the loss is NaN.

    Example:
        >>> hook = sg.estimator.NanTensorHook("loss", fail_on_nan_loss=False)

    Source: TF 2.21 basic_session_run_hooks.py, NanTensorHook.
    """

    def __init__(self, loss_tensor: object, fail_on_nan_loss: bool = True) -> None:
        self.tensors = {"loss": loss_tensor}
        self._fails = fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Fetches the loss."""
        return SessionRunArgs(self.tensors)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Raises an error or stops training if the loss is NaN."""
        if not np.any(np.isnan(run_values.results["loss"])):
            return
        step = run_context.session.global_step
        if self._fails:
            raise NanLossDuringTrainingError(
                explain(
                    f"The loss became NaN at global step {step}.",
                    expected="a finite loss.",
                    fix="lower the learning rate, clip gradients, or check features and labels "
                    "for NaN; fail_on_nan_loss=False stops training without an error.",
                    code="SG903",
                )
            )
        _logger.warning("The loss became NaN at global step %d: stopping training.", step)
        run_context.request_stop()
