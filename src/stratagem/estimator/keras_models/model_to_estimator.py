"""model_to_estimator: conversion of a compiled Keras model to an Estimator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras

from stratagem.estimator.estimator import Estimator
from stratagem.estimator.keras_models.keras_model_function import KerasModelFunction
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.keras.private.variables import flatten_layers
from stratagem.messages import explain

_STEPS = ("train_step", "test_step", "predict_step")


def model_to_estimator(
    keras_model: keras.Model | None = None,
    keras_model_path: str | os.PathLike[str] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    checkpoint_format: Literal["checkpoint", "saver"] | None = None,
    use_v2_estimator: bool = False,
    metric_names_map: Mapping[str, str] | None = None,
    export_outputs: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Estimator:
    """Converts a compiled Keras model to an Estimator.

    The Estimator trains copies of the model, which start from its current weights and optimizer
    state, as do `evaluate` and `predict` before training. `input_fn` returns per-replica batches:
    arrays, lists, or dicts by input and output name. To pass weights, return
    `{"features": x, "sample_weights": w}` as features. Predictions are a dict by output name.

    Args:
        keras_model: the model; a subclassed one needs `get_config` and `from_config`.
        keras_model_path: the path of a saved model instead, in any format that Keras loads.
        custom_objects: classes and functions by their names in the model's config.
        model_dir: the folder of checkpoints and summaries; overrides the config's.
        config: a `RunConfig`, which also holds the strategies.
        checkpoint_format: "checkpoint", "saver" or None; anything else is a ValueError. Ignored.
        use_v2_estimator: ignored; there is one Estimator class.
        metric_names_map: a dict from Keras's names of all metrics to new names.
        export_outputs: functions from a prediction to an `sg.estimator.export` output, by name.

    Returns:
        The Estimator.

    Raises:
        TypeError: if `keras_model` is not a Keras model.
        ValueError: unless exactly one model is given: compiled, copyable, with Keras's own steps.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="sum")])
        >>> model.compile("sgd", "mse", metrics=["mae"])
        >>> data = lambda: (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
        >>> estimator = sg.estimator.model_to_estimator(model).train(data, steps=2)
        >>> sorted(estimator.evaluate(data, steps=1))
        ['global_step', 'loss', 'mae']

    Source: tensorflow/estimator keras_lib.py, model_to_estimator.
    """
    del use_v2_estimator
    model = _compiled_model(keras_model, keras_model_path, custom_objects, checkpoint_format)
    function = _function_of(model, custom_objects, metric_names_map, export_outputs)
    return Estimator(function, config=_config_in(model_dir, config))


def _config_in(
    model_dir: str | os.PathLike[str] | None, config: RunConfig | None
) -> RunConfig | None:
    if model_dir is None:
        return config
    return (config or RunConfig()).replace(model_dir=os.fspath(model_dir))


def _compiled_model(
    model: keras.Model | None,
    path: str | os.PathLike[str] | None,
    custom_objects: Mapping[str, Any] | None,
    checkpoint_format: object,
) -> keras.Model:
    """Returns the given model, or loads the saved one."""
    if (model is None) == (path is None):
        raise ValueError(
            explain(
                f"model_to_estimator received keras_model={model!r} and keras_model_path={path!r}.",
                expected="exactly one of the two.",
                fix="pass the model or the path of a saved model.",
            )
        )
    _check_format(checkpoint_format)
    found: Any = model if path is None else keras.saving.load_model(path, custom_objects)
    _check_model(found)
    return found


def _check_format(checkpoint_format: object) -> None:
    if checkpoint_format not in (None, "checkpoint", "saver"):
        raise ValueError(
            explain(
                f"checkpoint_format={checkpoint_format!r} is unknown.",
                expected='None, "checkpoint" or "saver".',
                fix="omit it: all of them have the same effect.",
            )
        )


def _check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            explain(
                f"keras_model={model!r} is of type {type(model).__name__}.",
                expected="a Keras model.",
                fix="pass keras_model_path=... for a saved one.",
            )
        )
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            explain(
                f"The Keras model {model.name!r} is not compiled.",
                expected="a model with an optimizer and losses.",
                fix="call model.compile(optimizer, loss) before model_to_estimator.",
            )
        )
    custom = [
        name for name in _STEPS if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if custom:
        raise ValueError(
            explain(
                f"The Keras model {model.name!r} overrides {custom}; an Estimator never calls it.",
                expected="a model with Keras's own steps; it may override compute_loss.",
                fix="rewrite the steps as a model function, or train with fit.",
                code="SG905",
            )
        )


def _function_of(
    model: keras.Model,
    custom_objects: Mapping[str, Any] | None,
    metric_names: Mapping[str, str] | None,
    export_outputs: Mapping[str, Callable[[Any], Any]] | None,
) -> KerasModelFunction:
    """Creates the model function, and a test copy unless all layers are Keras's own."""
    try:
        function = KerasModelFunction(model, custom_objects, metric_names, export_outputs)
        if not all(map(_is_of_keras, flatten_layers(model))):
            function.copy()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            explain(
                f"The Keras model {model.name!r} of class {type(model).__name__} cannot be copied: "
                f"{error}",
                expected="a subclassed model with working `get_config` and `from_config`.",
                fix="return the arguments of __init__ from get_config, and list custom layers in "
                "custom_objects.",
                code="SG905",
            )
        ) from error
    return function


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    is_own = type(layer).__module__.partition(".")[0] == "keras"
    return is_own and not isinstance(layer, keras.layers.Lambda)
