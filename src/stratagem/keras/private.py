"""Private Keras names that Stratagem uses, each with the reason. Tested on Keras 3.12 to 3.15.

====================================  ==============================================================
name                                  why no public name will do
====================================  ==============================================================
stateless_scope.get_stateless_scope   a variable must ask the innermost scope before its own storage
symbolic_scope.in_symbolic_scope      True while Keras infers shapes, which needs no value
variables.Variable._direct_assign     where an eager assignment ends (overridden in our subclass)
variables.Variable._value             read and set by Keras (a property in our subclass)
variables.Variable._maybe_autocast    mixed precision of a value that we read ourselves
variables.Variable._path              a variable from another process needs its path
variables.Variable._autocast          likewise its casting by layers
Optimizer._clip_gradients             gradients are clipped before servers get them
Optimizer._backend_update_step        update of state that belongs to no variable
Optimizer._iterations                 likewise
Optimizer._use_weight_decay           the variables excluded from weight decay
Optimizer._filter_empty_gradients     Keras's warning about variables without a gradient
variables.Variable._synchronization   Layer.add_weight does not annotate variables
variables.Variable._aggregation       likewise
losses.loss.apply_mask                weights of Keras masks, as every Keras loss combines them
losses.loss.squeeze_or_expand...      how Keras aligns weights with values
masking.get_keras_mask                the mask that a layer attached to its output
masking.set_keras_mask                the same, for rows taken from the output
trainer._get_jax_state                fit passes the state through it; ours stays in variables
trainer._aggregate_additional_loss    adds regularization losses to the total
trainer._loss_tracker                 the metric that fit reports as the loss
trainer._compile_loss                 the metrics that fit reports as the losses of outputs
trainer._compile_config               the arguments of compile, as objects
trainer._compile_metrics              the metrics given to compile, by the names that fit reports
trainer._call_has_training_arg        True if call takes `training`
trainer._compute_loss                 compute_loss with or without its `training` argument
trainer._flatten_layers               every layer of a model
JAXEpochIterator._get_iterator        fit's batches, before Keras moves them to one device
EpochIterator._enumerate_iterator     the numbers of an epoch's steps, which a restart continues
EpochIterator._current_iterator       the iterator, which the next epoch may continue
EpochIterator._steps_seen             number of batches taken from that iterator
CallbackList._async_train             True if batch callbacks run in another thread
trainer._symbolic_build               builds the variables of a training step from shapes
backend.compute_output_spec           calls a function with shapes alone
models.functional.Functional          its `call` returns the outputs that it was made from
trainer._initial_epoch                the first epoch of fit, set by a callback
PyDatasetAdapter, TFDatasetAdapter    kinds of data that resume in different ways
GeneratorDataAdapter                  likewise
TorchDataLoaderAdapter._dataloader    the loader, whose generator has a state
global_state                          the default seed of keras.random
DataAdapter                           base class of custom kinds of data
BatchNormalization._moments           the statistics that synchronization and padding change
BatchNormalization._reduction_axes    the axes of these statistics
RNN._expected_batch_size              the rows of a stateful layer's state
Metric._variables                     a metric's own state, without inner metrics
MeanMetricWrapper._fn, _fn_kwargs     the averaged function: per example or per batch
Optimizer._trainable_variables        the variables that apply() updates by default
unpack_x_y_sample_weight              unpacks batches as Keras's own steps do
compute_fans                          the sizes that scale initial values
KerasSaveable                         class of objects that Keras pickles as a file
TrackedList, TrackedDict, TrackedSet  they cannot be unpickled before their tracker
name_scope.current_path               the path of a variable that is about to be created
naming's object_name_uids             automatic names restart in each call of a model function
====================================  ==============================================================
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer
from keras.src.initializers import random_initializers
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.data_adapters import (
    GeneratorDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.trainer import Trainer
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet

if TYPE_CHECKING:
    import keras

    from stratagem.variables import StoredVariable


__all__ = [
    "DataAdapter",
    "Functional",
    "GeneratorDataAdapter",
    "JAXEpochIterator",
    "JAXTrainer",
    "KerasSaveable",
    "PyDatasetAdapter",
    "TFDatasetAdapter",
    "TrackedDict",
    "TrackedList",
    "TrackedSet",
    "Trainer",
    "annotate",
    "apply_mask",
    "autocasts",
    "averaged",
    "averaged_function",
    "batches_taken",
    "build_for",
    "build_metrics",
    "calls_in_thread",
    "clip_gradients",
    "compile_arguments",
    "compute_fans",
    "count_update",
    "current_path",
    "decays",
    "expected_batch_size",
    "filter_empty_gradients",
    "first_batch",
    "flatten_layers",
    "fresh_names",
    "get_keras_mask",
    "get_stateless_scope",
    "global_seed_state",
    "has_unbuilt_metrics",
    "goes_on_with_iterator",
    "in_symbolic_scope",
    "loss_tracker",
    "named_metrics",
    "output_loss_trackers",
    "own_variables",
    "reduction_axes",
    "replace_steps",
    "restore_steps",
    "set_batches_taken",
    "set_global_seed_state",
    "set_initial_epoch",
    "set_keras_mask",
    "set_path",
    "squeeze_or_expand_to_same_rank",
    "takes_training",
    "torch_loader",
    "total_loss",
    "trainable_variables",
    "unpack_x_y_sample_weight",
    "with_states",
]


def _open(owner: object) -> Any:
    """Returns an object of Keras as one whose private names may be used."""
    return owner


def own_variables(metric: keras.metrics.Metric) -> list[Any]:
    """Returns the variables that a metric created itself, without those of inner metrics."""
    return list(_open(metric)._variables)


def averaged_function(metric: keras.metrics.MeanMetricWrapper) -> Any:
    """Returns the function whose values a metric averages."""
    return _open(metric)._fn


def averaged(metric: keras.metrics.MeanMetricWrapper, y_true: object, y_pred: object) -> Any:
    """Returns the values that a metric averages: one per example, or one per batch."""
    own = _open(metric)
    return own._fn(y_true, y_pred, **own._fn_kwargs)


def reduction_axes(layer: keras.layers.BatchNormalization) -> tuple[int, ...]:
    """Returns the axes that batch normalization averages over."""
    return tuple(_open(layer)._reduction_axes)


def expected_batch_size(layer: keras.layers.RNN) -> int | None:
    """Returns the batch size of a stateful RNN's state, or None if the layer is not built."""
    return _open(layer)._expected_batch_size


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
    _open(variable)._synchronization = synchronization
    _open(variable)._aggregation = aggregation


def autocasts(variable: keras.Variable) -> bool:
    """Returns True if layers may read a variable in their compute dtype."""
    return bool(_open(variable)._autocast)


def set_path(variable: keras.Variable, path: str) -> None:
    """Sets the path of a variable in its model."""
    _open(variable)._path = path


def flatten_layers(model: keras.layers.Layer) -> list[Any]:
    """Returns a model and every layer inside it."""
    return list(_open(model)._flatten_layers())


def build_for(model: keras.Model, batch: object) -> None:
    """Creates the variables of a training step: of layers, the optimizer and metrics.

    `batch` needs only the shape and dtype of each array.
    """
    _open(model)._symbolic_build(data_batch=batch)


def has_unbuilt_metrics(model: keras.Model) -> bool:
    """Returns True if metrics or losses given to `compile` have no variables yet."""
    compiled = _open(model)._compile_metrics, _open(model)._compile_loss
    return any(one is not None and not one.built for one in compiled)


def build_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Creates the variables of metrics and losses from specs of a batch and its outputs."""
    weights = {"sample_weight": sample_weight}
    if (metrics := _open(model)._compile_metrics) is not None and not metrics.built:
        compute_output_spec(model.compute_metrics, x, y, y_pred, **weights)
    if (loss := _open(model)._compile_loss) is not None and not loss.built:
        compute_output_spec(_open(model)._compute_loss, x, y, y_pred, **weights, training=False)


def first_batch(epoch_iterator: Any) -> Any:
    """Returns the next batch of an epoch iterator, which must be reset afterward; None if empty."""
    for _, _, batches in epoch_iterator:
        return batches[0] if isinstance(batches, list | tuple) else next(batches)
    return None


def takes_training(model: keras.Model) -> bool:
    """Returns True if the model's `call` takes `training`."""
    return bool(_open(model)._call_has_training_arg)


def total_loss(
    model: keras.Model,
    x: object,
    y: object,
    y_pred: object,
    sample_weight: object,
    *,
    training: bool,
) -> Any:
    """Returns `model.compute_loss(...)`, including overrides without `training`."""
    return _open(model)._compute_loss(x, y, y_pred, sample_weight, training=training)


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric that `fit` reports as the loss."""
    return _open(model)._loss_tracker


def output_loss_trackers(model: keras.Model) -> list[Any]:
    """Returns the metrics that report the loss of each output."""
    compiled = _open(model)._compile_loss
    return [] if compiled is None else list(compiled.metrics)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of `compile`, as the original objects."""
    return dict(_open(model)._compile_config.config)


def named_metrics(model: keras.Model) -> dict[str, Any]:
    """Returns a model's metrics except losses, by the names that `fit` reports."""
    compiled = _open(model)._compile_metrics
    losses = [loss_tracker(model), *output_loss_trackers(model)]
    named = {} if compiled is None else dict(zip(compiled.result(), compiled.metrics, strict=True))
    for metric in model.metrics:
        if metric is not compiled and not any(metric is loss for loss in losses):
            named[metric.name] = metric
    return named


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return list(_open(optimizer)._trainable_variables)


def clip_gradients(optimizer: keras.optimizers.Optimizer, grads: list[Any]) -> list[Any]:
    """Returns gradients clipped as the optimizer's arguments say."""
    return list(_open(optimizer)._clip_gradients(grads))


def count_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Updates the optimizer state that belongs to no variable, such as its counter."""
    _open(optimizer)._backend_update_step([], [], optimizer.learning_rate)
    _open(optimizer)._iterations.assign_add(1)


def decays(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | StoredVariable
) -> bool:
    """Returns True if an optimizer's weight decay applies to a variable."""
    return bool(_open(optimizer)._use_weight_decay(variable))


def filter_empty_gradients(
    optimizer: keras.optimizers.Optimizer, grads: list[Any], variables: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients that are not None and their variables; warns about the others."""
    present, of_variables = _open(optimizer)._filter_empty_gradients(grads, variables)
    return list(present), list(of_variables)


def replace_steps(iterator: JAXEpochIterator, make: Callable[[Callable[[], Any]], Any]) -> None:
    """Replaces the generator of steps of one epoch iterator.

    `make` gets Keras's own generator function and returns the generator.
    """
    original = _open(iterator)._enumerate_iterator
    _open(iterator)._enumerate_iterator = lambda: make(original)


def restore_steps(iterator: object) -> None:
    """Restores Keras's own generator of steps on an epoch iterator."""
    vars(iterator).pop("_enumerate_iterator", None)


def goes_on_with_iterator(iterator: JAXEpochIterator) -> bool:
    """Returns True if the next epoch continues with the iterator of this one."""
    return iterator.steps_per_epoch is not None and _open(iterator)._current_iterator is not None


def batches_taken(iterator: JAXEpochIterator) -> int:
    """Returns the number of batches taken from the current iterator of an epoch iterator."""
    return int(_open(iterator)._steps_seen)


def set_batches_taken(iterator: JAXEpochIterator, count: int) -> None:
    """Sets the number of batches taken from the current iterator of an epoch iterator."""
    _open(iterator)._steps_seen = count


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets the first epoch of the active `fit`; None restores its `initial_epoch`."""
    _open(model)._initial_epoch = epoch


def calls_in_thread(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns True if batch callbacks run in another thread, concurrently with `fit`."""
    return _open(callbacks)._async_train


def torch_loader(adapter: object) -> Any:
    """Returns the DataLoader of a data adapter, or None for other adapters."""
    return vars(adapter)["_dataloader"] if isinstance(adapter, TorchDataLoaderAdapter) else None


_NAME_COUNTS = "object_name_uids"


@contextlib.contextmanager
def fresh_names() -> Generator[None]:
    """Restarts automatic names of layers and other objects; restores the counters afterwards."""
    before = global_state.get_global_attribute(_NAME_COUNTS)
    global_state.set_global_attribute(_NAME_COUNTS, defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAME_COUNTS, before)


_GLOBAL_SEED_GENERATOR = "global_seed_generator"


def global_seed_state() -> list[int] | None:
    """Returns the default seed of `keras.random`, or None before its first use."""
    generator = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state.value).tolist()


def set_global_seed_state(state: list[int] | None) -> None:
    """Sets the default seed of `keras.random` to a result of `global_seed_state`."""
    if state is None:
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, None)
    else:
        generator = global_seed_generator()
        generator.state.assign(np.asarray(state, generator.state.dtype))
