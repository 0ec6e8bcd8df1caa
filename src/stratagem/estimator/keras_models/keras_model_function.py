"""Model function of a compiled Keras model: copies it with its loss, optimizer and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras
import numpy as np

from stratagem.estimator.exporting.export_output import PredictOutput
from stratagem.estimator.keras_models.keras_batches import (
    inputs_of,
    outputs_by_name,
    split_weights,
    targets_of,
)
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.scaffold import Scaffold
from stratagem.estimator.spec import DEFAULT_SIGNATURE, EstimatorSpec
from stratagem.estimator.train_op import minimize
from stratagem.keras.private.trainers import (
    compile_arguments,
    named_metrics,
    takes_training,
    total_loss,
)
from stratagem.keras.private.variables import flatten_layers
from stratagem.messages import explain

_METRICS = ("metrics", "weighted_metrics")


class _Configured(Protocol):
    """A Keras object."""

    def get_config(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Recipe:
    """Class and config that recreate a Keras object; unlike the object, always picklable."""

    kind: Any
    config: dict[str, Any]

    @classmethod
    def of(cls, instance: _Configured) -> _Recipe:
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
            self._compiled[name] = keras.tree.map_structure(_metric_recipe, arguments[name])
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
        spec: dict[str, Any] = {
            "predictions": predictions,
            "export_outputs": self._exported(predictions),
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
        metrics = self._renamed(named_metrics(model))
        return EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics, **spec)

    def _compile(self, model: keras.Model, *, with_metrics: bool) -> None:
        metrics: dict[str, Any] = {
            name: keras.tree.map_structure(_make_metric, self._compiled[name])
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

    def _renamed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        names = self._metric_names
        if names is None:
            return metrics
        if set(names) != set(metrics):
            raise ValueError(
                explain(
                    f"metric_names_map has the names {sorted(names)}.",
                    expected=f"all metrics of the Keras model: {sorted(metrics)}.",
                    fix="list exactly these names; losses are not included.",
                )
            )
        return {names[name]: metric for name, metric in metrics.items()}

    def _exported(self, predictions: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(self._export_outputs) - set(predictions))
        if unknown:
            raise ValueError(
                explain(
                    f"export_outputs has the unknown names {unknown}.",
                    expected=f"output names of the Keras model: {sorted(predictions)}.",
                    fix="correct the names.",
                )
            )
        outputs = {name: make(predictions[name]) for name, make in self._export_outputs.items()}
        return {DEFAULT_SIGNATURE: PredictOutput(predictions), **outputs}


def _metric_recipe(metric: object) -> Any:
    """Replaces metric objects with recipes; names and functions stay as they are."""
    return _Recipe.of(metric) if isinstance(metric, keras.metrics.Metric) else metric


def _make_metric(recipe: object) -> Any:
    return recipe.make() if isinstance(recipe, _Recipe) else recipe


def _values(variables: list[Any]) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _assign_all(targets: list[Any], values: list[np.ndarray], copy: keras.Model) -> None:
    shapes = [tuple(target.shape) for target in targets]
    if shapes != [value.shape for value in values]:
        raise ValueError(
            explain(
                f"A copy of {copy.name!r} has the variables {[one.path for one in targets]} with "
                f"shapes {shapes}, but the original has {[value.shape for value in values]}.",
                expected="the same variables in the same order.",
                fix="return everything that determines the layers from get_config, or pass a "
                "model that has not been built.",
                code="SG905",
            )
        )
    for target, value in zip(targets, values, strict=True):
        target.assign(value)
