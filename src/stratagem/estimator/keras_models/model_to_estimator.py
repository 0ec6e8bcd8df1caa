"""model_to_estimator: conversion of a compiled Keras model to an Estimator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras

from stratagem.estimator.estimator import Estimator
from stratagem.estimator.keras_models.keras_model_function import KerasModelFunction
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.keras.private import flatten_layers
from stratagem.messages import explain

__all__ = ["model_to_estimator"]

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
    state. Before training, `evaluate` and `predict` use these weights. `input_fn` returns features
    and labels as arrays, lists, or dicts by input and output name, in per-replica batches. Weights
    are passed as `{"features": x, "sample_weights": w}`. Predictions are a dict by output name.

    Args:
        keras_model: the model; a subclassed one needs `get_config` and `from_config`.
        keras_model_path: the path of a saved model instead, in any format that Keras loads.
        custom_objects: classes and functions by their names in the model's config.
        model_dir: the folder of checkpoints and summaries; overrides the config's.
        config: a `RunConfig`, which also holds the strategies.
        checkpoint_format: ignored; there is one format.
        use_v2_estimator: ignored; there is one Estimator class.
        metric_names_map: a dict from Keras's names of all metrics to new names.
        export_outputs: a dict from output names to functions of the prediction that return an
            export output, such as `sg.estimator.export.RegressionOutput`.

    Returns:
        The Estimator.

    Raises:
        TypeError: if `keras_model` is not a Keras model.
        ValueError: unless exactly one model is given; if it is not compiled, cannot be copied or
            has custom train, test or predict steps; or the checkpoint format is unknown.

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
    _check_choice(keras_model, keras_model_path, checkpoint_format)
    model: Any = keras_model
    if keras_model_path is not None:
        model = keras.saving.load_model(keras_model_path, custom_objects)
    _check_model(model)
    if model_dir is not None:
        config = (config or RunConfig()).replace(model_dir=os.fspath(model_dir))
    function = _function_of(model, custom_objects, metric_names_map, export_outputs)
    return Estimator(function, config=config)


def _check_choice(model: keras.Model | None, path: object, checkpoint_format: object) -> None:
    if (model is None) == (path is None):
        raise ValueError(
            explain(
                f"model_to_estimator received keras_model={model!r} and keras_model_path={path!r}.",
                expected="exactly one of the two.",
                fix="pass the model or the path of a saved model.",
            )
        )
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
            )
        ) from error
    return function


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    is_own = type(layer).__module__.partition(".")[0] == "keras"
    return is_own and not isinstance(layer, keras.layers.Lambda)
