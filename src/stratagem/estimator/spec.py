"""What a model function returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.scaffold import Scaffold
from stratagem.messages import explain

__all__ = ["DEFAULT_SIGNATURE", "EstimatorSpec", "RecordedUpdate"]

DEFAULT_SIGNATURE = "serving_default"

_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
_HOOKS = ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks")


@runtime_checkable
class RecordedUpdate(Protocol):
    """What `sg.estimator.minimize` returns: which loss an optimizer is to make smaller."""

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer."""
        ...

    @property
    def loss(self) -> Any:
        """The loss to differentiate."""
        ...

    @property
    def variables(self) -> Any:
        """The variables to update; None for all that can be trained."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class EstimatorSpec:
    """What a model function has made for a mode: losses, predictions, metrics, the update.

    TRAIN needs `loss` and `train_op`, EVAL `loss`, PREDICT `predictions`. Values may be those of a
    trace.

    Args:
        mode: the mode that the model function was called with.
        predictions: an array, or a dict of arrays, with a row an example.
        loss: the mean over the examples, a scalar.
        train_op: what `sg.estimator.minimize` returns, or a Keras optimizer, which then makes
            `loss` smaller; or a list of these.
        eval_metric_ops: name to Keras metric, which the model function has updated.
        export_outputs: signature to what it gives. Without one of the name "serving_default", a
            single one is also that.
        training_chief_hooks: hooks of training on the chief.
        training_hooks: hooks of training on each process.
        scaffold: what to do once before training.
        evaluation_hooks: hooks of evaluation.
        prediction_hooks: hooks of prediction.

    Raises:
        TypeError: a part of another type.
        ValueError: an unknown mode, a part missing that the mode needs, a loss that is no scalar,
            or several export outputs none of which is the default.

    Example:
        >>> spec = sg.estimator.EstimatorSpec("eval", loss=0.5)
        >>> spec.predictions, spec.training_hooks
        ({}, ())

    Source: tensorflow/estimator model_fn.py, EstimatorSpec.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Mapping[str, Any] | None = None
    export_outputs: Mapping[str, Any] | None = None
    training_chief_hooks: Sequence[SessionRunHook] | None = None
    training_hooks: Sequence[SessionRunHook] | None = None
    scaffold: Scaffold | None = None
    evaluation_hooks: Sequence[SessionRunHook] | None = None
    prediction_hooks: Sequence[SessionRunHook] | None = None

    def __post_init__(self) -> None:
        self._check_mode()
        checked = {
            "predictions": _checked_predictions(self.predictions, self.mode),
            "loss": _checked_loss(self.loss),
            "eval_metric_ops": _checked_metrics(self.eval_metric_ops),
            "export_outputs": _checked_outputs(self.export_outputs),
        }
        _check_train_op(self.train_op)
        if self.scaffold is not None and not isinstance(self.scaffold, Scaffold):
            raise _wrong_type("scaffold", self.scaffold, "a Scaffold")
        checked |= {name: _checked_hooks(name, getattr(self, name)) for name in _HOOKS}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _check_mode(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(
                explain(
                    f"mode={self.mode!r} is unknown.",
                    expected=f"one of {list(_MODES)}.",
                    fix="pass on the mode that the model function was called with.",
                )
            )
        if self.mode == ModeKeys.TRAIN:
            self._require("train_op")
        if self.mode in (ModeKeys.TRAIN, ModeKeys.EVAL):
            self._require("loss")
        if self.mode == ModeKeys.PREDICT:
            self._require("predictions")

    def _require(self, name: str) -> None:
        if getattr(self, name) is None:
            raise ValueError(
                explain(
                    f"The EstimatorSpec for mode {self.mode!r} has no {name}.",
                    expected="loss and train_op for training, loss for evaluation, predictions "
                    "for prediction.",
                    fix=f"pass {name}=... where mode is {self.mode!r}.",
                )
            )


def _checked_predictions(predictions: Any, mode: str) -> Any:
    if predictions is None and mode != ModeKeys.PREDICT:
        return {}
    named = predictions if isinstance(predictions, Mapping) else {"predictions": predictions}
    for name, value in named.items():
        if not _is_array(value):
            raise _wrong_type(f"predictions[{name!r}]", value, "an array")
    return dict(predictions) if isinstance(predictions, Mapping) else predictions


def _checked_loss(loss: Any) -> Any:
    if loss is None:
        return None
    if not _is_array(loss):
        raise _wrong_type("loss", loss, "a scalar")
    if np.prod(np.shape(loss)) != 1:
        raise ValueError(
            explain(
                f"loss has shape {np.shape(loss)}.",
                expected="a scalar: the mean over the examples.",
                fix="average it: keras.ops.mean(loss).",
            )
        )
    return jnp.reshape(loss, ())


def _check_train_op(train_op: Any) -> None:
    updates = train_op if isinstance(train_op, list | tuple) else [train_op]
    if train_op is not None and not updates:
        raise _wrong_type("train_op", train_op, "an update")
    for update in updates:
        if update is not None and not isinstance(
            update, keras.optimizers.Optimizer | RecordedUpdate
        ):
            raise _wrong_type(
                "train_op", update, "what sg.estimator.minimize returns, or a Keras optimizer"
            )


def _checked_metrics(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise _wrong_type("eval_metric_ops", metrics, "a dict from names to Keras metrics")
    for name, metric in metrics.items():
        if not isinstance(metric, keras.metrics.Metric):
            raise _wrong_type(
                f"eval_metric_ops[{name!r}]", metric, "a Keras metric that was updated"
            )
    return dict(metrics)


def _checked_outputs(outputs: Any) -> dict[str, Any] | None:
    if outputs is None:
        return None
    if not isinstance(outputs, Mapping):
        raise _wrong_type("export_outputs", outputs, "a dict from signatures to outputs")
    if len(outputs) > 1 and DEFAULT_SIGNATURE not in outputs:
        raise ValueError(
            explain(
                f"export_outputs has the signatures {sorted(outputs)}, and none is the default.",
                expected=f"one of several outputs to be {DEFAULT_SIGNATURE!r}.",
                fix=f"give one of them the name {DEFAULT_SIGNATURE!r}, too.",
            )
        )
    (single,) = outputs.values() if len(outputs) == 1 else [None]
    return {DEFAULT_SIGNATURE: single} | dict(outputs) if outputs else {}


def _checked_hooks(name: str, hooks: Any) -> tuple[SessionRunHook, ...]:
    if hooks is None:
        return ()
    if not isinstance(hooks, list | tuple):
        raise _wrong_type(name, hooks, "a list of SessionRunHook objects")
    for hook in hooks:
        if not isinstance(hook, SessionRunHook):
            raise _wrong_type(name, hook, "SessionRunHook objects in it")
    return tuple(hooks)


def _is_array(value: Any) -> bool:
    if isinstance(value, str | bytes) or value is None:
        return False
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float)


def _wrong_type(name: str, value: Any, expected: str) -> TypeError:
    return TypeError(
        explain(
            f"{name} of the EstimatorSpec is {value!r}, of type {type(value).__name__}.",
            expected=f"{expected}.",
            fix=f"correct {name} in the model function.",
        )
    )
