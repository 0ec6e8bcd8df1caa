"""Private names of Keras's variables, layers and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras.src.initializers import random_initializers

from stratagem.keras.private.access import as_open

if TYPE_CHECKING:
    import keras


def own_variables(metric: keras.metrics.Metric) -> list[Any]:
    """Returns the variables that a metric created itself, without those of inner metrics."""
    return list(as_open(metric)._variables)


def averaged_function(metric: keras.metrics.MeanMetricWrapper) -> Any:
    """Returns the function whose values a metric averages."""
    return as_open(metric)._fn


def averaged(metric: keras.metrics.MeanMetricWrapper, y_true: object, y_pred: object) -> Any:
    """Returns the values that a metric averages: one per example, or one per batch."""
    own = as_open(metric)
    return own._fn(y_true, y_pred, **own._fn_kwargs)


def reduction_axes(layer: keras.layers.BatchNormalization) -> tuple[int, ...]:
    """Returns the axes that batch normalization averages over."""
    return tuple(as_open(layer)._reduction_axes)


def expected_batch_size(layer: keras.layers.RNN) -> int | None:
    """Returns the batch size of a stateful RNN's state, or None if the layer is not built."""
    return as_open(layer)._expected_batch_size


def with_states(layer: object, states: list[Any]) -> Any:
    """Returns a view of a stateful RNN with other states, of any batch size."""
    view = object.__new__(type(layer))
    vars(view).update(vars(layer), states=states, _expected_batch_size=None)
    return view


def compute_fans(shape: tuple[int, ...], initializer: object) -> tuple[float, float]:
    """Returns the fan-in and fan-out of a weight, as an initializer counts them.

    Keras 3.12 derives them from the shape alone.
    """
    axes = {
        name: getattr(initializer, name)
        for name in ("input_axes", "output_axes")
        if hasattr(initializer, name)
    }
    return random_initializers.compute_fans(shape, **axes)


def annotate(variable: keras.Variable, *, synchronization: str, aggregation: str) -> None:
    """Sets the annotations of an existing variable, for a strategy that it may move to."""
    as_open(variable)._synchronization = synchronization
    as_open(variable)._aggregation = aggregation


def autocasts(variable: keras.Variable) -> bool:
    """Returns True if layers may read a variable in their compute dtype."""
    return bool(as_open(variable)._autocast)


def set_path(variable: keras.Variable, path: str) -> None:
    """Sets the path of a variable in its model."""
    as_open(variable)._path = path


def flatten_layers(model: keras.layers.Layer) -> list[Any]:
    """Returns a model and every layer inside it."""
    return list(as_open(model)._flatten_layers())
