"""Every private Keras name that Stratagem uses, each with the reason. Tested on Keras 3.12 to 3.15.

====================================  ==============================================================
name                                  why no public name does
====================================  ==============================================================
stateless_scope.get_stateless_scope   a variable must ask the innermost scope before its own storage
variables.Variable._direct_assign     where an eager assignment ends (overridden in our subclass)
variables.Variable._value             what Keras reads and sets (a property in our subclass)
variables.Variable._maybe_autocast    mixed precision of a value that we read ourselves
variables.Variable._synchronization   Layer.add_weight cannot be told to annotate a variable
variables.Variable._aggregation       likewise
losses.loss.apply_mask                weights of Keras masks, as every Keras loss combines them
losses.loss.squeeze_or_expand...      how Keras aligns weights with values
masking.get_keras_mask                the mask that a layer attached to its output
trainer._get_jax_state                fit hands the state to us through it; ours stays in variables
trainer._aggregate_additional_loss    where regularisation losses enter the total
trainer._loss_tracker                 the metric that fit reports as the loss
trainer._compile_loss                 the metrics that fit reports as the losses of outputs
trainer._call_has_training_arg        whether call takes `training`
trainer._compute_loss                 compute_loss with or without its `training` argument
trainer._flatten_layers               every layer of a model
JAXEpochIterator._get_iterator        fit's batches, before Keras moves them to one device
DataAdapter                           what fit takes from whoever has a kind of data of his own
BatchNormalization._moments           the statistics that synchronisation and padding change
BatchNormalization._reduction_axes    the axes of these statistics
Metric._variables                     whether a metric has state of its own
Optimizer._trainable_variables        what apply() without variables updates
unpack_x_y_sample_weight              batches as Keras's own steps take them apart
====================================  ==============================================================
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.common.masking import get_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

__all__ = [
    "AGGREGATE_ADDITIONAL_LOSS",
    "DataAdapter",
    "GET_ITERATOR",
    "GET_JAX_STATE",
    "JAXEpochIterator",
    "JAXTrainer",
    "MOMENTS",
    "annotate",
    "apply_mask",
    "flatten_layers",
    "get_keras_mask",
    "get_stateless_scope",
    "loss_tracker",
    "output_loss_trackers",
    "own_variables",
    "reduction_axes",
    "squeeze_or_expand_to_same_rank",
    "takes_training",
    "total_loss",
    "trainable_variables",
    "unpack_x_y_sample_weight",
]

# Methods that are replaced, by name.
GET_JAX_STATE = "_get_jax_state"
GET_ITERATOR = "_get_iterator"
AGGREGATE_ADDITIONAL_LOSS = "_aggregate_additional_loss"
MOMENTS = "_moments"


def own_variables(metric: Any) -> list[Any]:
    """Returns the variables that a metric made itself, without those of inner metrics."""
    return list(metric._variables)


def reduction_axes(layer: Any) -> tuple[int, ...]:
    """Returns the axes that batch normalisation averages over."""
    return tuple(layer._reduction_axes)


def annotate(variable: Any, *, synchronization: str, aggregation: str) -> None:
    """Sets the annotations of a variable that exists, for the strategy that it may move to."""
    variable._synchronization = synchronization
    variable._aggregation = aggregation


def flatten_layers(model: Any) -> list[Any]:
    """Returns a model and every layer inside it."""
    return list(model._flatten_layers())


def takes_training(model: Any) -> bool:
    """Tells whether the model's `call` takes `training`."""
    return bool(model._call_has_training_arg)


def total_loss(
    model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
) -> Any:
    """Returns `model.compute_loss(...)`, of overrides without `training` too."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def loss_tracker(model: Any) -> Any:
    """Returns the metric that `fit` reports as the loss."""
    return model._loss_tracker


def output_loss_trackers(model: Any) -> list[Any]:
    """Returns the metrics that report the loss of each output."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def trainable_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)
