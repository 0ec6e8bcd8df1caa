"""EstimatorSpec: the return value of a model function."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.hooks.session_run_hook import Session, SessionRunHook
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.resources import checked_folder

if TYPE_CHECKING:
    from jax.typing import ArrayLike

# Scaffold: initialization and custom saving of a training run.


class Saver(Protocol):
    """Saves checkpoints instead of the session; any object with this method works."""

    def save(self, session: Session, /) -> str:
        """Returns the path of the checkpoint."""
        ...


class Scaffold:
    """Runs a function once the variables are initialized, and can replace the saver.

    The other parts of TensorFlow's scaffold are graph operations and don't exist here: the
    Estimator saves checkpoints, writes summaries and checks that variables are initialized.

    Args:
        init_fn: called with this scaffold and the session after the variables are created, unless
            training resumes from a checkpoint.
        saver: an object whose `save(session)` returns the path of the checkpoint.
            `CheckpointSaverHook` calls it instead of the session.

    Raises:
        TypeError: if `init_fn` is not callable, or `saver` has no `save` method.

    Example:
        >>> scaffold = sg.estimator.Scaffold(init_fn=lambda scaffold, session: print("start"))
        >>> scaffold.saver is None
        True

    Source: TF 2.21 monitored_session.py, Scaffold.
    """

    def __init__(
        self,
        init_fn: Callable[[Scaffold, Session], Any] | None = None,
        saver: Saver | None = None,
    ) -> None:
        if init_fn is not None and not callable(init_fn):
            raise TypeError(
                explain(
                    f"init_fn={init_fn!r} is not callable.",
                    expected="a function of the scaffold and the session.",
                    fix="pass lambda scaffold, session: ...",
                )
            )
        if saver is not None and not callable(getattr(saver, "save", None)):
            raise TypeError(
                explain(
                    f"saver={saver!r} has no `save` method.",
                    expected="an object whose save(session) returns a path.",
                    fix="omit saver: the session then saves all variables.",
                )
            )
        self._init_fn = init_fn
        self.saver = saver

    def init_fn(self, session: Session) -> None:
        """Calls the `init_fn` passed to the constructor, if any.

        Args:
            session: the training session.
        """
        if self._init_fn is not None:
            self._init_fn(self, session)


# minimize: optimizer updates of a model function.


@dataclasses.dataclass(frozen=True, eq=False)
class Minimize:
    """Update of some variables by an optimizer. Created by `sg.estimator.minimize`.

    Args:
        optimizer: the Keras optimizer.
        loss: the loss, a scalar.
        variables: the variables to update; None for all trainable ones.

    Example:
        >>> kernel = sg.Variable(1.0)
        >>> op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss=0.5, var_list=[kernel])
        >>> isinstance(op, sg.estimator.Minimize), op.variables[0] is kernel
        (True, True)

    Source: TF 2.21 training/optimizer.py, Optimizer.minimize.
    """

    optimizer: keras.optimizers.Optimizer
    loss: Any
    variables: tuple[Any, ...] | None


def minimize(optimizer: object, loss: object, var_list: Sequence[Any] | None = None) -> Minimize:
    """Creates the `train_op` of an `EstimatorSpec`, as `optimizer.minimize` did in TensorFlow 1.

    Nothing is computed here. The training step differentiates the model function, averages the
    gradients over replicas and applies them.

    Args:
        optimizer: a Keras optimizer, created in the model function.
        loss: a scalar that the model function computed, the mean over the examples; or a function
            without arguments that computes it, which is called immediately.
        var_list: the Keras variables to update; None for all trainable ones that the loss depends
            on.

    Returns:
        The update.

    Raises:
        TypeError: if `optimizer` is not a Keras optimizer.
        ValueError: if `var_list` is empty.

    Example:
        >>> op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss=0.5)
        >>> op.loss, op.variables
        (0.5, None)

    Source: TF 2.21 training/optimizer.py, Optimizer.minimize.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            explain(
                f"minimize received optimizer={optimizer!r} of type {type(optimizer).__name__}.",
                expected="a Keras optimizer.",
                fix="pass keras.optimizers.SGD(0.1), for example.",
            )
        )
    variables = None if var_list is None else tuple(var_list)
    if variables is not None and not variables:
        raise ValueError(
            explain(
                "minimize received an empty var_list.",
                expected="variables to update.",
                fix="omit var_list to update all variables, or build the layers before listing "
                "their variables.",
            )
        )
    compute: Callable[[], Any] | None = loss if callable(loss) else None
    return Minimize(optimizer, loss if compute is None else compute(), variables)


def as_train_ops(train_op: object, loss: object) -> list[Minimize]:
    """Returns the `train_op` of an `EstimatorSpec` as a list of updates."""
    ops: list[Any] = list(train_op) if isinstance(train_op, list | tuple) else [train_op]
    return [op if isinstance(op, Minimize) else minimize(op, loss) for op in ops]


# Validation of the arguments of Estimator and its methods.

_T = TypeVar("_T")


def check_members(cls: type, base: type) -> None:
    """Raises ValueError if a subclass overrides a member of Estimator other than `__init__`."""
    members = {name for one in base.__mro__ for name in vars(one) if not name.startswith("__")}
    overridden = sorted(
        {name for one in cls.__mro__[: cls.__mro__.index(base)] for name in vars(one)} & members
    )
    if overridden:
        raise ValueError(
            explain(
                f"{cls.__name__} overrides the Estimator members {overridden}.",
                expected="a subclass that only calls Estimator.__init__ with its model_fn.",
                fix="move the code into the model function, a hook, or a function that calls the "
                "Estimator.",
            )
        )


def require_config(config: object) -> RunConfig:
    """Returns the config, or a default RunConfig for None."""
    if config is None:
        return RunConfig()
    if not isinstance(config, RunConfig):
        raise TypeError(
            explain(
                f"config={config!r} is of type {type(config).__name__}.",
                expected="an sg.estimator.RunConfig or None.",
                fix="pass sg.estimator.RunConfig(...); put model parameters into params.",
            )
        )
    return config


def resolve_model_dir(model_dir: str | os.PathLike[str] | None, config: RunConfig) -> str | None:
    """Returns the folder of the argument or the config, or None; an evaluator must have one."""
    if model_dir is None and config.model_dir is None and config.task_type == "evaluator":
        raise ValueError(
            explain(
                "The evaluator task has no model_dir.",
                expected="the training folder, shared by all tasks.",
                fix="pass the same model_dir to the Estimator in every task.",
            )
        )
    if model_dir is None:
        return config.model_dir
    folder = checked_folder("model_dir", model_dir)
    if config.model_dir is not None and config.model_dir != folder:
        raise ValueError(
            explain(
                f"model_dir={folder!r} differs from the config's model_dir={config.model_dir!r}.",
                expected="a single folder.",
                fix="set model_dir in only one of the two.",
            )
        )
    return folder


def last_step_function(steps: int | None, max_steps: int | None) -> Callable[[int], int | None]:
    """Returns a function from the first global step of a run to its last, or None if unlimited."""
    if steps is not None and max_steps is not None:
        raise ValueError(
            explain(
                f"steps={steps} and max_steps={max_steps} are both set.",
                expected="at most one of them.",
                fix="pass steps for a number of additional steps, or max_steps for a global step.",
            )
        )
    return lambda start: max_steps if steps is None else start + steps


def check_instances(name: str, values: object, kind: type[_T]) -> tuple[_T, ...]:
    """Returns a list or tuple of instances of a class as a tuple; an empty one for None."""
    items = () if values is None else values
    if not isinstance(items, list | tuple) or not all(isinstance(item, kind) for item in items):
        raise TypeError(
            explain(
                f"{name}={values!r} is not a list of {kind.__name__} objects.",
                expected=f"a list or tuple of {kind.__name__} objects, or None.",
                fix=f"derive their classes from sg.estimator.{kind.__name__}.",
            )
        )
    return tuple(items)


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
