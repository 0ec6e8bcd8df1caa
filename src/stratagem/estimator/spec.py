"""EstimatorSpec: the return value of a model function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.estimator.argument_checks import check_instances
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.scaffold import Scaffold
from stratagem.estimator.train_op import Minimize
from stratagem.messages import explain

if TYPE_CHECKING:
    from jax.typing import ArrayLike


DEFAULT_SIGNATURE = "serving_default"

_REQUIRED = {
    ModeKeys.TRAIN: ("train_op", "loss"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}
_HOOKS = ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks")


@dataclasses.dataclass(frozen=True, eq=False)
class EstimatorSpec:
    """Losses, predictions, metrics and updates of a model function in one mode.

    TRAIN needs `loss` and `train_op`, EVAL needs `loss`, PREDICT needs `predictions`. Values may
    be JAX tracers.

    Args:
        mode: the mode that the model function was called with.
        predictions: an array or a dict of arrays, shape (batch, ...).
        loss: a scalar, the mean over the examples.
        train_op: the result of `sg.estimator.minimize`, a Keras optimizer that minimizes `loss`,
            or a list of these.
        eval_metric_ops: a dict from names to Keras metrics that the model function has updated.
        export_outputs: a dict from signature names to `ExportOutput` objects. A single one also
            becomes "serving_default".
        training_chief_hooks: training hooks for the chief only.
        training_hooks: training hooks for every process.
        scaffold: one-time initialization before training.
        evaluation_hooks: evaluation hooks.
        prediction_hooks: prediction hooks.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if the mode is unknown, an argument that the mode needs is missing, the loss is
            not a scalar, or several export outputs are given without a default.

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
        checked: dict[str, Any] = {
            "predictions": _checked_predictions(self.predictions, self.mode),
            "loss": _checked_loss(self.loss),
            "eval_metric_ops": _checked_metrics(self.eval_metric_ops),
            "export_outputs": _checked_outputs(self.export_outputs),
        }
        _check_train_op(self.train_op)
        if self.scaffold is not None and not isinstance(self.scaffold, Scaffold):
            raise _wrong_type("scaffold", self.scaffold, "a Scaffold")
        for name in _HOOKS:
            checked[name] = check_instances(name, getattr(self, name), SessionRunHook)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _check_mode(self) -> None:
        if self.mode not in _REQUIRED:
            raise ValueError(
                explain(
                    f"mode={self.mode!r} is unknown.",
                    expected=f"one of {list(_REQUIRED)}.",
                    fix="pass the mode that the model function was called with.",
                )
            )
        for name in _REQUIRED[self.mode]:
            if getattr(self, name) is None:
                raise ValueError(
                    explain(
                        f"The EstimatorSpec for mode {self.mode!r} has no {name}.",
                        expected=f"the arguments {list(_REQUIRED[self.mode])}.",
                        fix=f"pass {name}=... when mode is {self.mode!r}.",
                    )
                )


def _checked_predictions(predictions: object, mode: str) -> Any:
    if predictions is None and mode != ModeKeys.PREDICT:
        return {}
    named = predictions if isinstance(predictions, Mapping) else {"predictions": predictions}
    for name, value in named.items():
        if not _is_array(value):
            raise _wrong_type(f"predictions[{name!r}]", value, "an array")
    return dict(predictions) if isinstance(predictions, Mapping) else predictions


def _checked_loss(loss: object) -> Any:
    if loss is None:
        return None
    if not _is_array(loss):
        raise _wrong_type("loss", loss, "a scalar")
    if np.prod(np.shape(loss)) != 1:
        raise ValueError(
            explain(
                f"loss has shape {np.shape(loss)}.",
                expected="a scalar, the mean over the examples.",
                fix="average it with keras.ops.mean(loss).",
            )
        )
    return jnp.reshape(loss, ())


def _check_train_op(train_op: object) -> None:
    updates = train_op if isinstance(train_op, list | tuple) else [train_op]
    if train_op is not None and not updates:
        raise _wrong_type("train_op", train_op, "an update")
    for update in updates:
        if update is not None and not isinstance(update, keras.optimizers.Optimizer | Minimize):
            raise _wrong_type(
                "train_op", update, "the result of sg.estimator.minimize or a Keras optimizer"
            )


def _checked_metrics(metrics: object) -> dict[str, Any]:
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


def _checked_outputs(outputs: object) -> dict[str, Any] | None:
    if outputs is None:
        return None
    if not isinstance(outputs, Mapping):
        raise _wrong_type("export_outputs", outputs, "a dict from signatures to outputs")
    if len(outputs) > 1 and DEFAULT_SIGNATURE not in outputs:
        raise ValueError(
            explain(
                f"export_outputs has the signatures {sorted(outputs)} without a default.",
                expected=f"an output named {DEFAULT_SIGNATURE!r}.",
                fix=f"add one of them again under the name {DEFAULT_SIGNATURE!r}.",
            )
        )
    (single,) = outputs.values() if len(outputs) == 1 else [None]
    return {DEFAULT_SIGNATURE: single} | dict(outputs) if outputs else {}


def _is_array(value: object) -> TypeGuard[ArrayLike]:
    if isinstance(value, str | bytes) or value is None:
        return False
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float)


def _wrong_type(name: str, value: object, expected: str) -> TypeError:
    return TypeError(
        explain(
            f"EstimatorSpec received {name}={value!r} of type {type(value).__name__}.",
            expected=f"{expected}.",
            fix=f"correct {name} in the model function.",
        )
    )
