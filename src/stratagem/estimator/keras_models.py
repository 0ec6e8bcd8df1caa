"""model_to_estimator: conversion of a compiled Keras model to an Estimator."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import keras
import numpy as np

from stratagem.errors import check_choice, check_type, invalid
from stratagem.estimator.checks import check_known, check_one_of
from stratagem.estimator.estimator import Estimator
from stratagem.estimator.export import PredictOutput
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.spec import DEFAULT_SIGNATURE, EstimatorSpec, ModeKeys, Scaffold, minimize
from stratagem.keras.private import (
    compile_arguments,
    flatten_layers,
    named_metrics,
    takes_training,
    total_loss,
)

# Conversion of features, labels and outputs between input functions and Keras models.

# Features with these two keys carry weights, as in TensorFlow.
_WEIGHTED = {"features", "sample_weights"}


def split_weights(features: object) -> tuple[Any, Any]:
    """Splits `{"features": x, "sample_weights": w}` into both; weights are None otherwise."""
    if isinstance(features, Mapping) and set(features) == _WEIGHTED:
        return features["features"], features["sample_weights"]
    return features, None


def inputs_of(model: keras.Model, features: object) -> Any:
    """Converts features to the inputs that a model is called with."""
    if not isinstance(features, Mapping):
        return features
    if isinstance(model, keras.Sequential) and len(features) == 1:
        return next(iter(features.values()))  # Keras chooses the input's name itself
    if not hasattr(model, "output_names"):  # inputs of subclassed models are unknown
        return features
    structure = model.input
    if isinstance(structure, Mapping):
        return _chosen(features, "features", list(structure), "inputs")
    names = [tensor.name for tensor in jax.tree.leaves(structure)]
    if not len(names) == len(features) == 1:  # a sole one may have any name
        features = _chosen(features, "features", names, "inputs")
    chosen = list(features.values())
    return chosen if isinstance(structure, Sequence) else chosen[0]


def targets_of(model: keras.Model, outputs: object, targets: object, kind: str) -> Any:
    """Converts labels or weights to the structure of a model's outputs.

    `targets` is an array, a list in output order, a dict by output name, or None.
    """
    if not isinstance(targets, Mapping):
        return targets
    names = output_names(model, outputs)
    if kind == "sample_weights":
        check_known(kind, targets, names)
    if kind == "labels":
        targets = _chosen(targets, kind, names, "outputs")
    chosen = {name: targets.get(name) for name in names}
    if isinstance(outputs, Mapping):
        return chosen
    values = list(chosen.values())
    return values if isinstance(outputs, Sequence) else values[0]


def outputs_by_name(model: keras.Model, outputs: object) -> dict[str, Any]:
    """Returns a model's outputs as a dict of predictions."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return dict(zip(output_names(model, outputs), jax.tree.leaves(outputs), strict=True))


def output_names(model: keras.Model, outputs: object) -> list[str]:
    """Returns the names of a model's outputs."""
    if isinstance(outputs, Mapping):
        return list(outputs)
    if isinstance(model, keras.Sequential):
        return [model.layers[-1].name]
    count = len(jax.tree.leaves(outputs))
    numbered = [f"output_{number}" for number in range(1, count + 1)]
    return list(getattr(model, "output_names", numbered))


def _chosen(values: Mapping[str, Any], kind: str, names: list[str], role: str) -> dict[str, Any]:
    missing = [name for name in names if name not in values]
    if missing:
        raise invalid(
            f"{kind} has the names {sorted(values)} but lacks {missing}.",
            f"all {role} of the Keras model: {names}.",
            "rename them in input_fn, or rename the model's layers.",
        )
    return {name: values[name] for name in names}


# Model function of a compiled Keras model: copies it with its loss, optimizer and metrics.

_METRICS = ("metrics", "weighted_metrics")


@dataclasses.dataclass(frozen=True, eq=False)
class _Recipe:
    """Class and config that recreate a Keras object; unlike the object, always picklable."""

    kind: Any
    config: dict[str, Any]

    @classmethod
    def of(cls, instance: Any) -> _Recipe:
        return cls(type(instance), instance.get_config())

    def make(self) -> Any:
        # from_config modifies the config.
        config = keras.tree.map_structure(lambda leaf: leaf, self.config)
        return self.kind.from_config(config)


class KerasModelFunction:
    """Copies a compiled Keras model in each call; `metric_names` renames its metrics."""

    gives_values = True

    def __init__(
        self,
        model: keras.Model,
        custom_objects: Mapping[str, Any] | None,
        metric_names: Mapping[str, str] | None,
        export_outputs: Mapping[str, Callable[[Any], Any]] | None,
    ) -> None:
        optimizer: Any = model.optimizer
        layers = {type(layer).__name__: type(layer) for layer in flatten_layers(model)}
        self._objects = {**layers, **(custom_objects or {})}
        self._metric_names = None if metric_names is None else dict(metric_names)
        self._export_outputs = dict(export_outputs or {})
        self._model = _Recipe.of(model)
        self._optimizer = _Recipe.of(optimizer)
        # The optimizer is left out: unpickling its variables would initialize JAX in a worker
        # before the processes have connected.
        arguments = compile_arguments(model)
        self._compiled = {name: arguments[name] for name in ("loss", "loss_weights")}
        for name in _METRICS:
            # Names and functions stay as they are.
            self._compiled[name] = keras.tree.map_structure(
                lambda one: _Recipe.of(one) if isinstance(one, keras.metrics.Metric) else one,
                arguments[name],
            )
        self._weights = _values(model.variables)
        self._slots = _values(optimizer.variables) if optimizer.built else []

    def copy(self) -> Any:
        """Returns an uncompiled copy of the model with new variables."""
        with keras.saving.custom_object_scope(self._objects):
            return self._model.make()

    def __call__(self, features: object, labels: object, mode: str) -> EstimatorSpec:
        """Builds the copy's step for a mode."""
        features, weights = split_weights(features)
        model = self.copy()
        if mode != ModeKeys.PREDICT:
            with keras.saving.custom_object_scope(self._objects):
                self._compile(model, with_metrics=mode == ModeKeys.EVAL)
        x = inputs_of(model, features)
        is_training = mode == ModeKeys.TRAIN
        outputs = model(x, training=is_training) if takes_training(model) else model(x)
        predictions = outputs_by_name(model, outputs)
        check_known("export_outputs", self._export_outputs, predictions)
        exported = {name: make(predictions[name]) for name, make in self._export_outputs.items()}
        spec: dict[str, Any] = {
            "predictions": predictions,
            "export_outputs": {DEFAULT_SIGNATURE: PredictOutput(predictions), **exported},
            "scaffold": Scaffold(lambda scaffold, session: self._start(model)),
        }
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, **spec)
        y = targets_of(model, outputs, labels, "labels")
        weights = targets_of(model, outputs, weights, "sample_weights")
        loss = total_loss(model, x, y, outputs, weights, training=is_training)
        if is_training:
            train_op = minimize(model.optimizer, loss, model.trainable_variables)
            return EstimatorSpec(mode, loss=loss, train_op=train_op, **spec)
        model.compute_metrics(x, y, outputs, weights)
        metrics, names = named_metrics(model), self._metric_names
        if names is None:
            return EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics, **spec)
        if set(names) != set(metrics):
            raise ValueError(
                f"metric_names_map has the names {sorted(names)}, but the Keras model has the "
                f"metrics {sorted(metrics)}: list exactly these."
            )
        renamed = {names[name]: metric for name, metric in metrics.items()}
        return EstimatorSpec(mode, loss=loss, eval_metric_ops=renamed, **spec)

    def _compile(self, model: keras.Model, *, with_metrics: bool) -> None:
        metrics: dict[str, Any] = {
            name: keras.tree.map_structure(
                lambda one: one.make() if isinstance(one, _Recipe) else one, self._compiled[name]
            )
            for name in _METRICS
            if with_metrics
        }
        # Bypasses overrides of compile, which may take other arguments.
        keras.Model.compile(
            model,
            optimizer=self._optimizer.make(),
            loss=self._compiled["loss"],
            loss_weights=self._compiled["loss_weights"],
            auto_scale_loss=False,  # a scaling optimizer already scales
            **metrics,
        )

    def _start(self, copy: keras.Model) -> None:
        """Sets the variables of a copy to the original model's values."""
        targets = list(copy.variables)
        if self._weights:
            _assign_all(targets, self._weights, copy)
        if self._slots and copy.optimizer is not None and copy.optimizer.built:
            _assign_all(list(copy.optimizer.variables), self._slots, copy)


def _values(variables: list[Any]) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _assign_all(targets: list[Any], values: list[np.ndarray], copy: keras.Model) -> None:
    shapes = [tuple(target.shape) for target in targets]
    if shapes != [value.shape for value in values]:
        raise invalid(
            f"A copy of {copy.name!r} has the variables {[one.path for one in targets]} with "
            f"shapes {shapes}, but the original has {[value.shape for value in values]}.",
            expected="the same variables in the same order.",
            fix="return everything that determines the layers from get_config, or pass a "
            "model that has not been built.",
            code="SG905",
        )
    for target, value in zip(targets, values, strict=True):
        target.assign(value)


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
    check_one_of("model_to_estimator", keras_model=keras_model, keras_model_path=keras_model_path)
    formats = (None, "checkpoint", "saver")
    check_choice("model_to_estimator", formats, checkpoint_format=checkpoint_format)
    model: Any = keras_model
    if keras_model_path is not None:
        model = keras.saving.load_model(keras_model_path, custom_objects)
    check_type("keras_model", model, keras.Model, "a Keras model")
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            f"The Keras model {model.name!r} is not compiled: call model.compile(optimizer, loss)."
        )
    custom = [
        name for name in _STEPS if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if custom:
        raise invalid(
            f"The Keras model {model.name!r} overrides {custom}; an Estimator never calls it.",
            expected="a model with Keras's own steps; it may override compute_loss.",
            fix="rewrite the steps as a model function, or train with fit.",
            code="SG905",
        )
    try:
        function = KerasModelFunction(model, custom_objects, metric_names_map, export_outputs)
        if not all(map(_is_of_keras, flatten_layers(model))):
            function.copy()  # a test
    except (NotImplementedError, TypeError, ValueError) as error:
        raise invalid(
            f"The Keras model {model.name!r} of class {type(model).__name__} cannot be copied: "
            f"{error}",
            expected="a subclassed model with working `get_config` and `from_config`.",
            fix="return the arguments of __init__ from get_config, and list custom layers in "
            "custom_objects.",
            code="SG905",
        ) from error
    if model_dir is not None:
        config = (config or RunConfig()).replace(model_dir=os.fspath(model_dir))
    return Estimator(function, config=config)


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    is_own = type(layer).__module__.partition(".")[0] == "keras"
    return is_own and not isinstance(layer, keras.layers.Lambda)
