"""EstimatorSpec: the return value of a model function, and the calls of model functions."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.errors import check_choice, check_type, invalid
from stratagem.estimator.checks import check_instances, check_known
from stratagem.estimator.hooks import SessionRunHook

if TYPE_CHECKING:
    from stratagem.estimator.loops import Session


class ModeKeys:
    """Values of the `mode` argument of a model function.

    Example:
        >>> sg.estimator.ModeKeys.PREDICT
        'infer'

    Source: tensorflow/estimator mode_keys.py, ModeKeys.
    """

    TRAIN: Final = "train"
    EVAL: Final = "eval"
    PREDICT: Final = "infer"


# Named values of a model function, which hooks can fetch.


_names: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "named_values", default=None
)


@contextlib.contextmanager
def naming_values() -> Generator[dict[str, Any]]:
    """Collects the values passed to `identity` inside the `with` block, by name."""
    values: dict[str, Any] = {}
    token = _names.set(values)
    try:
        yield values
    finally:
        _names.reset(token)


def identity(value: object, name: str) -> Any:
    """Names a value of a model function so that hooks can fetch it.

    A hook receives the example-weighted average over replicas for a floating-point scalar, and
    the first replica's value for anything else.

    Args:
        value: an array.
        name: the name to fetch it by. A later value replaces an earlier one of the same name.

    Returns:
        `value`, unchanged.

    Raises:
        ValueError: if `name` is "loss" or "global_step", which the loop defines.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     norm = sg.estimator.identity(keras.ops.norm(features), name="norm")
        >>> hook = sg.estimator.LoggingTensorHook(["loss", "norm"], every_n_iter=100)

    Source: TF 2.21 array_ops.py, identity.
    """
    if name in ("loss", "global_step"):
        raise ValueError(f"identity received name={name!r}, which the loop sets: choose another.")
    values = _names.get()
    if values is not None:
        values[name] = value
    return value


# Scaffold: initialization and custom saving of a training run.


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
        TypeError: if `saver` has no `save` method.

    Example:
        >>> scaffold = sg.estimator.Scaffold(init_fn=lambda scaffold, session: print("start"))
        >>> scaffold.saver is None
        True

    Source: TF 2.21 monitored_session.py, Scaffold.
    """

    def __init__(
        self,
        init_fn: Callable[[Scaffold, Session], Any] | None = None,
        saver: Any = None,
    ) -> None:
        if saver is not None:  # now, and not minutes of training later
            wanted = "an object whose save(session) returns a path, or None"
            check_type("saver", saver, lambda one: callable(getattr(one, "save", None)), wanted)
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

    Example:
        >>> op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss=0.5)
        >>> op.loss, op.variables
        (0.5, None)

    Source: TF 2.21 training/optimizer.py, Optimizer.minimize.
    """
    check_type("optimizer", optimizer, keras.optimizers.Optimizer, "a Keras optimizer")
    variables = None if var_list is None else tuple(var_list)
    return Minimize(optimizer, loss() if callable(loss) else loss, variables)


def as_train_ops(train_op: object, loss: object) -> list[Minimize]:
    """Returns the `train_op` of an `EstimatorSpec` as a list of updates."""
    ops: list[Any] = list(train_op) if isinstance(train_op, list | tuple) else [train_op]
    return [op if isinstance(op, Minimize) else minimize(op, loss) for op in ops]


# Optimizers, from names, objects or functions.

OptimizerLike = str | keras.optimizers.Optimizer | Callable[[], keras.optimizers.Optimizer]

_BY_NAME: dict[str, Any] = {
    "Adagrad": keras.optimizers.Adagrad,
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "RMSProp": keras.optimizers.RMSprop,
    "SGD": keras.optimizers.SGD,
}


def optimizer_factory(
    optimizer: OptimizerLike, learning_rate: float | None = None
) -> Callable[[], keras.optimizers.Optimizer]:
    """Returns a function that creates a new optimizer; `learning_rate` applies to names only."""
    if isinstance(optimizer, str) and optimizer in _BY_NAME:
        arguments = {} if learning_rate is None else {"learning_rate": learning_rate}
        return functools.partial(_BY_NAME[optimizer], **arguments)
    # An optimizer's variables belong to one strategy, so each call gets a copy.
    if isinstance(optimizer, keras.optimizers.Optimizer):
        kind, config = type(optimizer), _without_names(optimizer.get_config())
        return lambda: kind.from_config(dict(config))
    wanted = f"one of {sorted(_BY_NAME)}, a Keras optimizer, or a function that makes one"
    check_type("optimizer", optimizer, callable, wanted, error=ValueError)
    return optimizer  # pyright: ignore[reportReturnType]


def _without_names(config: dict[str, Any]) -> dict[str, Any]:
    """Removes names, which number objects, so that checkpoints fit copies of an optimizer."""
    return {
        key: _without_names(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "name"
    }


# EstimatorSpec: the return value of a model function.

DEFAULT_SIGNATURE = "serving_default"

_REQUIRED = {
    ModeKeys.TRAIN: ("train_op", "loss"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}
_ARRAY = jax.Array | np.ndarray | np.generic | int | float
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
        check_choice("EstimatorSpec", _REQUIRED, mode=self.mode)
        for name in _REQUIRED[self.mode]:
            if getattr(self, name) is None:
                raise ValueError(
                    f"The EstimatorSpec for mode {self.mode!r} has no {name}: pass it."
                )
        check_type("loss", self.loss, _ARRAY | None, "a scalar")
        if self.loss is not None and np.size(self.loss) != 1:
            raise invalid(
                f"loss has shape {np.shape(self.loss)}.",
                "a scalar, the mean over the examples.",
                "average it with keras.ops.mean(loss).",
            )
        check_type("scaffold", self.scaffold, Scaffold | None, "a Scaffold")
        metrics, outputs = self.eval_metric_ops, self.export_outputs
        given = {} if self.predictions is None else self.predictions
        for name, value in (given if isinstance(given, Mapping) else {"": given}).items():
            check_type(f"predictions[{name!r}]", value, _ARRAY, "an array")
        wanted = "a dict from names to Keras metrics"
        check_type("eval_metric_ops", metrics, Mapping | None, wanted)
        check_type("export_outputs", outputs, Mapping | None, "a dict from signatures to outputs")
        if outputs and DEFAULT_SIGNATURE not in outputs:
            if len(outputs) > 1:
                raise ValueError(
                    f"export_outputs has the signatures {sorted(outputs)} without a default: add "
                    f"one of them again under the name {DEFAULT_SIGNATURE!r}."
                )
            outputs = {DEFAULT_SIGNATURE: next(iter(outputs.values())), **outputs}
        checked: dict[str, Any] = {
            "predictions": dict(given) if isinstance(given, Mapping) else given,
            "loss": None if self.loss is None else jnp.reshape(self.loss, ()),
            "eval_metric_ops": dict(metrics or {}),
            "export_outputs": None if outputs is None else dict(outputs),
        }
        for name, metric in checked["eval_metric_ops"].items():
            wanted = "a Keras metric that was updated"
            check_type(f"eval_metric_ops[{name!r}]", metric, keras.metrics.Metric, wanted)
        several = isinstance(self.train_op, list | tuple) and self.train_op
        for update in several or [self.train_op]:
            wanted = "the result of sg.estimator.minimize or a Keras optimizer"
            check_type("train_op", update, keras.optimizers.Optimizer | Minimize | None, wanted)
        for name in _HOOKS:
            checked[name] = check_instances(name, getattr(self, name), SessionRunHook)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


# Validated calls of a user's model function.

_KNOWN = ("features", "labels", "mode", "params", "config")


class ModelFunction:
    """Calls a model function with the arguments it takes, by name."""

    def __init__(
        self, function: Callable[..., Any], params: Mapping[str, Any] | None, config: object
    ) -> None:
        wanted = "a function of features, labels, mode, params and config"
        check_type("model_fn", function, callable, wanted, error=ValueError)
        self.function = function
        self._params = params
        self._config = config
        self._takes = arguments_of(function)
        self._require("features", "are always passed")
        if params is not None:
            self._require("params", "the Estimator received")
        check_known("The arguments of model_fn", self._takes, _KNOWN)

    def __call__(self, features: object, labels: object, mode: str) -> EstimatorSpec:
        """Calls the function and checks its result; `labels` is None if there are none."""
        if labels is not None:
            self._require("labels", "input_fn returns")
        values = (features, labels, mode, self._params, self._config)
        known: dict[str, Any] = dict(zip(_KNOWN, values, strict=True))
        spec = self.function(**{name: known[name] for name in self._takes})
        wanted = "an sg.estimator.EstimatorSpec"
        check_type("The result of model_fn", spec, EstimatorSpec, wanted, error=ValueError)
        return spec

    def _require(self, name: str, why: str) -> None:
        if name not in self._takes:
            raise invalid(
                f"model_fn takes {list(self._takes)} but not `{name}`, which {why}.",
                f"an argument named `{name}`.",
                "write def model_fn(features, labels, mode, params).",
            )


def arguments_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a function's arguments that `functools.partial` has not bound."""
    bound = getattr(function, "keywords", {})
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(one.name for one in parameters if one.kind in kinds and one.name not in bound)
