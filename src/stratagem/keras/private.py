"""Private names of Keras in use: the table of them, each with its reason, and what is done by them.

Keras 3.12 to 3.16. `missing` finds all that the installed Keras lacks, so that one look at a new
release tells what moved: `python -m tests.architecture.test_private_names` prints it even where the
imports below the table fail.
"""

# ruff: noqa: E402, F401 - imported from here
from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from types import CellType
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras
import numpy as np
from keras import tree
from packaging.version import Version

from stratagem.errors import explain


class PrivateName(NamedTuple):
    """A private name: its path in the newest Keras, the reason, and its path before.

    A Keras older than `since` need not have it.
    """

    path: str
    why: str
    before: str = ""
    since: str = "3.12"


_COMMON, _LAYER = "keras.src.backend.common", "keras.layers.Layer"
_OPTIMIZER, _MODEL = "keras.optimizers.Optimizer", "keras.Model"
_ADAPTERS, _EPOCHS = "keras.src.trainers.data_adapters", "keras.src.trainers.epoch_iterator"
_VARIABLE, _BATCH_NORM = "keras.Variable", "keras.layers.BatchNormalization"
_JAX = "keras.src.backend.jax"

_TABLE: dict[str, tuple[str, ...]] = {
    f"{_COMMON}.stateless_scope.get_stateless_scope": (
        "a variable must ask the innermost scope before its own storage",
    ),
    f"{_COMMON}.symbolic_scope.in_symbolic_scope": (
        "True while Keras infers shapes, which needs no value",
    ),
    f"{_COMMON}.masking.get_keras_mask": ("the mask that a layer attached to its output",),
    f"{_COMMON}.masking.set_keras_mask": ("the same, for rows taken from the output",),
    f"{_COMMON}.name_scope.current_path": ("the path of a variable that is about to be created",),
    f"{_COMMON}.global_state.get_global_attribute": (
        "the default seed of keras.random, masks of tracers, automatic names",
    ),
    f"{_COMMON}.global_state.set_global_attribute": ("the same",),
    "keras.src.random.seed_generator.global_seed_generator": ("the default seed of keras.random",),
    "keras.src.backend.compute_output_spec": ("calls a function with shapes alone",),
    "keras.src.initializers.random_initializers.compute_fans": ("the sizes that scale values",),
    "keras.src.losses.loss.apply_mask": (
        "weights of Keras masks, as every Keras loss combines them",
    ),
    "keras.src.losses.loss.squeeze_or_expand_to_same_rank": ("how Keras aligns weights",),
    "keras.src.saving.keras_saveable.KerasSaveable": ("class of objects pickled as a file",),
    "keras.src.utils.python_utils.pythonify_logs": (
        "logs as numbers, as fit gives them to callbacks",
    ),
    "keras.src.utils.tracking.TrackedDict": ("cannot be unpickled before its tracker",),
    "keras.src.utils.tracking.TrackedList": ("the same",),
    "keras.src.utils.tracking.TrackedSet": ("the same",),
    "keras.src.utils.tracking.Tracker": ("its `stored_ids` differ in another process",),
    f"{_VARIABLE}._direct_assign": ("where an eager assignment ends (overridden in our subclass)",),
    f"{_VARIABLE}._value": ("read and set by Keras (a property in our subclass)",),
    f"{_VARIABLE}._maybe_autocast": ("mixed precision of a value that we read ourselves",),
    f"{_VARIABLE}._path": ("a variable from another process needs its path",),
    f"{_VARIABLE}._autocast": ("likewise its casting by layers",),
    f"{_VARIABLE}._synchronization": ("Layer.add_weight does not annotate variables",),
    f"{_VARIABLE}._aggregation": ("likewise",),
    f"{_OPTIMIZER}._backend_update_step": ("update of state that belongs to no variable",),
    f"{_OPTIMIZER}._clip_gradients": ("gradients are clipped before servers get them",),
    f"{_OPTIMIZER}._filter_empty_gradients": ("warning about variables without a gradient",),
    f"{_OPTIMIZER}._iterations": ("calls of apply, of which several may be one update",),
    f"{_OPTIMIZER}._learning_rate": ("a schedule, which is sent to servers as it is",),
    f"{_OPTIMIZER}._track_variable": ("state of a variable that its next optimizer saves, too",),
    f"{_OPTIMIZER}._trainable_variables": ("the variables that apply() updates by default",),
    f"{_OPTIMIZER}._is_excluded_from_weight_decay": (
        "the variables excluded from weight decay",
        f"{_OPTIMIZER}._use_weight_decay",  # before 3.16
    ),
    f"{_LAYER}._clear_losses": ("called where a layer forgets the losses of an earlier call",),
    f"{_LAYER}._flatten_layers": ("every layer of a model",),
    f"{_LAYER}._loss_ids": ("the owner of a loss, which rematerialization replaces",),
    f"{_LAYER}._remat_mode": ("how a finished layer is rematerialized, and computed in a scan",),
    f"{_LAYER}._call_has_training_arg": ("True if call takes `training`",),
    f"{_BATCH_NORM}._moments": ("the statistics that synchronization and padding change",),
    f"{_BATCH_NORM}._reduction_axes": ("the axes of these statistics",),
    "keras.layers.RNN._expected_batch_size": ("the rows of a stateful layer's state",),
    "keras.metrics.Metric._variables": ("a metric's own state, without inner metrics",),
    "keras.metrics.MeanMetricWrapper._fn": ("the averaged function: per example or per batch",),
    "keras.metrics.MeanMetricWrapper._fn_kwargs": ("the same",),
    "keras.Sequential._functional": ("the graph of a sequential model",),
    "keras.src.models.functional.Functional": (
        "its `call` returns the outputs that it was made from",
    ),
    "keras.src.models.functional.Functional._nodes_by_depth": (
        "blocks of a model that follow each other, for a scan",
    ),
    "keras.src.models.model.inject_functional_model_class": (
        "a class becomes a Functional with its first functional model",
    ),
    "keras.src.ops.function.Function._nodes": (
        "ids of calls in a graph, which differ in another process",
    ),
    "keras.src.ops.function.make_node_key": ("the same",),
    "keras.src.ops.operation.Operation._inbound_nodes": ("the calls of an operation, by number",),
    f"{_MODEL}._aggregate_additional_loss": ("adds regularization losses to the total",),
    f"{_MODEL}._compile_config": ("the arguments of compile, as objects",),
    f"{_MODEL}._compile_loss": ("the metrics that fit reports as the losses of outputs",),
    f"{_MODEL}._compile_metrics": ("the metrics given to compile, by the names that fit reports",),
    f"{_MODEL}._compute_loss": ("compute_loss with or without its `training` argument",),
    f"{_MODEL}._get_jax_state": ("fit passes the state through it; ours stays in variables",),
    f"{_MODEL}._initial_epoch": ("the first epoch of fit, set by a callback",),
    f"{_MODEL}._loss_tracker": ("the metric that fit reports as the loss",),
    f"{_MODEL}._symbolic_build": ("builds the variables of a training step from shapes",),
    f"{_JAX}.trainer.Trainer": (
        "what fit, evaluate and predict are attributes of",
        f"{_JAX}.trainer.JAXTrainer",  # before 3.16
    ),
    "keras.src.trainers.trainer.BaseTrainer": (
        "the owner of compile, with which Keras compares that of a model",
        "keras.src.trainers.trainer.Trainer",  # before 3.16
    ),
    f"{_JAX}.trainer.JAXEpochIterator": ("fit's batches, before Keras puts them on one device",),
    f"{_JAX}.trainer.JAXEpochIterator._get_iterator": ("the same",),
    f"{_JAX}.distribution_lib.list_devices": (
        "the devices of meshes, replaced, see docs/design/upstream.md",
    ),
    f"{_JAX}.ops": ("the owner of `remat`", f"{_JAX}.core"),  # before 3.16
    f"{_JAX}.ops.remat": (
        "replaced, see docs/design/upstream.md",
        f"{_JAX}.core.remat",  # before 3.16
    ),
    f"{_EPOCHS}.EpochIterator._current_iterator": ("the iterator, which the next epoch continues",),
    f"{_EPOCHS}.EpochIterator._enumerate_iterator": (
        "the numbers of an epoch's steps, which a restart continues",
    ),
    f"{_EPOCHS}.EpochIterator._steps_seen": ("number of batches taken from that iterator",),
    f"{_ADAPTERS}.ArrayDataAdapter": ("kinds of data that resume in different ways",),
    f"{_ADAPTERS}.ArrayDataAdapter._get_iterator": ("the order of rows",),
    f"{_ADAPTERS}.ArrayDataAdapter._inputs": ("the arrays, before Keras copies them to the host",),
    f"{_ADAPTERS}.GeneratorDataAdapter": ("kinds of data that resume in different ways",),
    f"{_ADAPTERS}.PyDatasetAdapter": ("the same",),
    f"{_ADAPTERS}.TFDatasetAdapter": ("the same",),
    f"{_ADAPTERS}.TorchDataLoaderAdapter._dataloader": ("the loader, whose generator has a state",),
    f"{_ADAPTERS}.ArrayDataAdapter._epoch": (
        "the seed of the order of the next iterator, which a restart continues",
        "",
        "3.16",  # random numbers of NumPy and Python before
    ),
    f"{_ADAPTERS}.PyDatasetAdapter._epoch": ("the same", "", "3.16"),
    f"{_ADAPTERS}.data_adapter_utils.super_batch_iterator": (
        "steps that Keras scans get their batches stacked, from our adapters too",
        "",
        "3.16",
    ),
    f"{_ADAPTERS}.array_slicing.Sliceable.convert_to_jax_compatible": (
        "batches of arrays of which some are on the host",
    ),
    f"{_ADAPTERS}.array_slicing.convert_to_sliceable": ("the same",),
    f"{_ADAPTERS}.data_adapter.DataAdapter": ("base class of custom kinds of data",),
    f"{_ADAPTERS}.data_adapter_utils.unpack_x_y_sample_weight": (
        "unpacks batches as Keras's own steps do",
    ),
    "keras.callbacks.CallbackList._async_train": (
        "True if batch callbacks run in another thread, in fit",
    ),
}

NAMES = tuple(PrivateName(path, *rest) for path, rest in _TABLE.items())


def find(path: str) -> Any:
    """Returns what a name of the table, by its path in the newest Keras, is in this Keras."""
    name = next(one for one in NAMES if one.path == path)
    with contextlib.suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(name.path)
    return pkgutil.resolve_name(name.before)


def missing() -> list[str]:
    """Returns the paths of all names of the table that this Keras lacks."""
    return [one.path for one in NAMES if not _is_there(one)]


def _is_there(name: PrivateName) -> bool:
    # A nightly build of 3.16 is older than 3.16, but has its names.
    if Version(keras.__version__).release < Version(name.since).release:
        return True
    return any(_has(path) for path in (name.path, name.before) if path)


def _is_of_class(path: str) -> bool:
    return path.split(".")[-2][0].isupper()


def _has(path: str) -> bool:
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(path)
        return True
    if not _is_of_class(path):
        return False
    owner, _, attribute = path.rpartition(".")
    try:
        kinds = inspect.getmro(pkgutil.resolve_name(owner))
    except (ImportError, AttributeError):
        return False
    # What only a constructor or another method sets is no attribute of a class.
    return any(_sets(one, attribute) for kind in kinds for one in vars(kind).values())


def _sets(method: Any, attribute: str) -> bool:
    """Returns True if a method, or one that it wraps, sets an attribute."""
    waiting: list[Any] = [method.fset if isinstance(method, property) else method]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        code = getattr(one, "__code__", None)
        if code is None or id(one) in seen:
            continue
        seen.add(id(one))
        steps = dis.get_instructions(code)
        if any(step.opname == "STORE_ATTR" and step.argval == attribute for step in steps):
            return True
        waiting += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
    return False


# Before the imports below, which fail at the first name. Attributes of classes are not looked for,
# which takes longer.
if not all(_is_there(one) for one in NAMES if not _is_of_class(one.path)):
    raise ImportError(
        explain(
            f"Keras {keras.__version__} has no {', '.join(missing())}.",
            expected="Keras 3.12 to 3.16, whose private names Stratagem knows.",
            fix="install one of these, or a newer Stratagem.",
        )
    )

from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.jax import distribution_lib as jax_distribution
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.initializers import random_initializers
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.models.model import inject_functional_model_class
from keras.src.ops.function import Function, make_node_key
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.data_adapters import (
    ArrayDataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
    data_adapter_utils,
)
from keras.src.trainers.data_adapters.array_slicing import Sliceable, convert_to_sliceable
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet, Tracker

# Keras 3.16 gave both classes and the module of operations other names.
JAXTrainer: Any = find("keras.src.backend.jax.trainer.Trainer")
Trainer: Any = find("keras.src.trainers.trainer.BaseTrainer")
jax_core: Any = find("keras.src.backend.jax.ops")


# From 3.14 on, Keras divides an activity regularizer's loss by the batch size.
REGULARIZES_PER_ROW = Version(keras.__version__).release >= (3, 14)


def as_open(owner: object) -> Any:
    """Returns an object of Keras as one whose private names may be used."""
    return owner


# Variables, layers and metrics.


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


# Optimizers.


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return list(as_open(optimizer)._trainable_variables)


def config_and_rate(optimizer: keras.optimizers.Optimizer) -> tuple[dict[str, Any], Any]:
    """Returns an optimizer's config, and its schedule or function of learning rates, or None.

    Without the config of the schedule: only its class may know how to make it, and may not be
    able to.
    """
    rate = as_open(optimizer)._learning_rate
    if not callable(rate) or hasattr(rate, "assign"):
        return dict(optimizer.get_config()), None
    view: Any = object.__new__(type(optimizer))
    view.__dict__.update(vars(optimizer), _learning_rate=0.0)
    return dict(view.get_config()), rate


def clip_gradients(optimizer: keras.optimizers.Optimizer, grads: list[Any]) -> list[Any]:
    """Returns gradients clipped as the optimizer's arguments say."""
    return list(as_open(optimizer)._clip_gradients(grads))


def count_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Updates the optimizer state that belongs to no variable, such as its counter."""
    as_open(optimizer)._backend_update_step([], [], optimizer.learning_rate)
    as_open(optimizer)._iterations.assign_add(1)


def num_calls(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the variable that counts calls of `apply`; gradients of several may be one update."""
    return as_open(optimizer)._iterations


def track(optimizer: keras.optimizers.Optimizer, variables: Iterable[Any]) -> None:
    """Makes existing variables those of an optimizer, with paths like its others."""
    scope = num_calls(optimizer).path.rpartition("/")[0]
    for variable in variables:
        set_path(variable, f"{scope}/{variable.name}")
        as_open(optimizer)._track_variable(variable)


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Returns True if an optimizer's weight decay applies to a variable."""
    own = as_open(optimizer)
    # Keras 3.16 answers `_use_weight_decay` only for the variables of a built optimizer.
    if hasattr(own, "_is_excluded_from_weight_decay"):
        return not own._is_excluded_from_weight_decay(variable)
    return bool(own._use_weight_decay(variable))


def filter_empty_gradients(
    optimizer: keras.optimizers.Optimizer, grads: list[Any], variables: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients that are not None and their variables; warns about the others."""
    present, of_variables = as_open(optimizer)._filter_empty_gradients(grads, variables)
    return list(present), list(of_variables)


# Models in training.


def build_for(model: keras.Model, batch: object) -> None:
    """Creates the variables of a training step: of layers, the optimizer and metrics.

    `batch` needs only the shape and dtype of each array.
    """
    as_open(model)._symbolic_build(data_batch=batch)


def has_unbuilt_metrics(model: keras.Model) -> bool:
    """Returns True if metrics or losses given to `compile` have no variables yet."""
    compiled = as_open(model)._compile_metrics, as_open(model)._compile_loss
    return any(one is not None and not one.built for one in compiled)


def build_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Creates the variables of metrics and losses from specs of a batch and its outputs."""
    weights = {"sample_weight": sample_weight}
    if (metrics := as_open(model)._compile_metrics) is not None and not metrics.built:
        compute_output_spec(model.compute_metrics, x, y, y_pred, **weights)
    if (loss := as_open(model)._compile_loss) is not None and not loss.built:
        compute_output_spec(as_open(model)._compute_loss, x, y, y_pred, **weights, training=False)


def takes_training(model: keras.Model) -> bool:
    """Returns True if the model's `call` takes `training`."""
    return bool(as_open(model)._call_has_training_arg)


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
    return as_open(model)._compute_loss(x, y, y_pred, sample_weight, training=training)


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric that `fit` reports as the loss."""
    return as_open(model)._loss_tracker


def output_loss_trackers(model: keras.Model) -> list[Any]:
    """Returns the metrics that report the loss of each output."""
    compiled = as_open(model)._compile_loss
    return [] if compiled is None else list(compiled.metrics)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of `compile`, as the original objects."""
    return dict(as_open(model)._compile_config.config)


def named_metrics(model: keras.Model) -> dict[str, Any]:
    """Returns a model's metrics except losses, by the names that `fit` reports."""
    compiled = as_open(model)._compile_metrics
    losses = [loss_tracker(model), *output_loss_trackers(model)]
    named = {} if compiled is None else dict(zip(compiled.result(), compiled.metrics, strict=True))
    for metric in model.metrics:
        if metric is not compiled and not any(metric is loss for loss in losses):
            named[metric.name] = metric
    return named


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets the first epoch of the active `fit`; None restores its `initial_epoch`."""
    as_open(model)._initial_epoch = epoch


def calls_in_thread(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns True if batch callbacks run in another thread, concurrently with `fit`."""
    return as_open(callbacks)._async_train


# Epoch iterators and data adapters.


def replace_steps(iterator: JAXEpochIterator, make: Callable[[Callable[[], Any]], Any]) -> None:
    """Replaces the generator of steps of one epoch iterator.

    `make` gets Keras's own generator function and returns the generator.
    """
    original = as_open(iterator)._enumerate_iterator
    as_open(iterator)._enumerate_iterator = lambda: make(original)


def restore_steps(iterator: object) -> None:
    """Restores Keras's own generator of steps on an epoch iterator."""
    vars(iterator).pop("_enumerate_iterator", None)


def goes_on_with_iterator(iterator: JAXEpochIterator) -> bool:
    """Returns True if the next epoch continues with the iterator of this one."""
    return iterator.steps_per_epoch is not None and as_open(iterator)._current_iterator is not None


def batches_taken(iterator: JAXEpochIterator) -> int:
    """Returns the number of batches taken from the current iterator of an epoch iterator."""
    return int(as_open(iterator)._steps_seen)


def set_batches_taken(iterator: JAXEpochIterator, count: int) -> None:
    """Sets the number of batches taken from the current iterator of an epoch iterator."""
    as_open(iterator)._steps_seen = count


def grouped(batches: Iterator[Any], size: int | None) -> Iterator[Any]:
    """Yields batches in the groups that Keras 3.16 scans; the batches themselves without a size.

    Older ones never ask for groups.
    """
    if not size:
        return batches
    return as_open(data_adapter_utils).super_batch_iterator(batches, size, stack_fn=jnp.stack)


def order_number(adapter: object) -> int | None:
    """Returns the number that determines the order of an adapter's next iterator.

    None before Keras 3.16, where random numbers do.
    """
    return getattr(as_open(adapter), "_epoch", None)


def set_order_number(adapter: object, number: int | None) -> None:
    """Sets the number that determines the order, if there is one."""
    if number is not None and order_number(adapter) is not None:
        as_open(adapter)._epoch = number


def torch_loader(adapter: object) -> Any:
    """Returns the DataLoader of a data adapter, or None for other adapters."""
    return vars(adapter)["_dataloader"] if isinstance(adapter, TorchDataLoaderAdapter) else None


def arrays_of(adapter: ArrayDataAdapter) -> Any:
    """Returns the arrays of a data adapter, in the structure of its batches."""
    return as_open(adapter)._inputs


def array_batches(adapter: ArrayDataAdapter, columns: list[Any]) -> Iterator[Any]:
    """Yields batches of other forms of a data adapter's arrays, in Keras's order.

    `columns` has one for each array that is present. Arrays among them become what Keras makes of
    them, and batches of all others are selected by their `__getitem__`.
    """
    remaining = iter(columns)

    def as_source(array: Any) -> Any:
        column = next(remaining)
        return convert_to_sliceable(array, target_backend="jax") if column is array else column

    def select(source: Any, indices: Any) -> Any:
        rows = source[indices]
        return source.convert_to_jax_compatible(rows) if isinstance(source, Sliceable) else rows

    structure = tree.map_structure(as_source, arrays_of(adapter), none_is_leaf=False)
    return as_open(adapter)._get_iterator(select, structure)


# Graphs of layers.


class GraphCall(NamedTuple):
    """One call in the graph of a functional model; `args` and `kwargs` hold KerasTensors."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]

    @property
    def tensors(self) -> list[Any]:
        """The KerasTensors that the call takes, in the order of its arguments."""
        leaves: list[Any] = keras.tree.flatten((self.args, self.kwargs))
        return [one for one in leaves if isinstance(one, keras.KerasTensor)]


def graph_of(layer: keras.layers.Layer) -> Any:
    """Returns the functional model that computes a layer; None if it is computed by Python code."""
    if isinstance(layer, keras.Sequential):
        layer = as_open(layer)._functional
    return layer if isinstance(layer, Functional) else None


def graph_calls(graph: Any) -> list[GraphCall]:
    """Returns all calls in a graph, in the order of computation."""
    by_depth = as_open(graph)._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [
        GraphCall(node.operation, node.arguments.args, node.arguments.kwargs, [*node.outputs])
        for node in nodes
        if not node.is_input
    ]


# Rematerialization, and the losses that layers add.


def remat_mode(layer: keras.layers.Layer) -> Any:
    """Returns how a layer is rematerialized: as its RematScope said, a `LayerRemat`, or None."""
    return as_open(layer)._remat_mode


def set_remat_mode(layer: keras.layers.Layer, mode: Any) -> None:
    """Sets how a layer is rematerialized."""
    as_open(layer)._remat_mode = mode


def ids_of_losses(layer: keras.layers.Layer) -> set[int]:
    """Returns the ids of the losses that a layer added in the current scope, to be changed."""
    return as_open(layer)._loss_ids


def sublayers(layer: keras.layers.Layer) -> list[Any]:
    """Returns the layers that a layer calls itself, without those inside them."""
    return list(as_open(layer)._flatten_layers(include_self=False, recursive=False))


# State of a process: automatic names, masks and the default seed.


_NAME_COUNTS = "object_name_uids"


def fresh_names() -> contextlib.AbstractContextManager[None]:
    """Restarts automatic names of layers and other objects; restores the counters afterwards."""
    return _with_global(_NAME_COUNTS, defaultdict(int))


_MASKS = "_keras_mask_dict"


def fresh_masks() -> contextlib.AbstractContextManager[None]:
    """Forgets the masks of tracers of earlier traces; restores those of other tensors afterwards.

    Keras finds a tracer's mask by its `id`, and drops it in the thread that collects the tracer. In
    another thread than its own, it stays, for the next tracer with that id.
    """
    return _with_global(_MASKS, None)


@contextlib.contextmanager
def _with_global(name: str, value: object) -> Generator[None]:
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


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


# What Keras keeps by the ids of objects, or changes in a class with its first object.
#
# An object that comes from another process has neither: its parts have other ids there, and its
# class may have made no object yet.


def taken_apart(obj: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the attributes of an object, and the objects whose ids are in some of them."""
    state = {**vars(obj)}
    referred: dict[str, Any] = {}
    if isinstance(obj, Tracker):
        stored = state.pop("stored_ids")
        referred["stored_ids"] = {
            name: [one for one in store if id(one) in stored[name]]
            for name, (_, store) in obj.config.items()
        }
    if isinstance(obj, Function) and "_nodes" in state:
        keys = state.pop("_nodes")
        calls = [
            (operation, number)
            for operation in obj.operations
            for number in range(len(as_open(operation)._inbound_nodes))
        ]
        referred["_nodes"] = [call for call in calls if make_node_key(*call) in keys]
    if isinstance(obj, keras.optimizers.Optimizer):
        referred.update(_of_variables(obj, state))
    if isinstance(obj, keras.layers.Layer):
        state["_loss_ids"] = set()  # of losses of an earlier call
        for name, code in _codes_of_new_layer().items():
            if getattr(state.get(name), "__code__", None) is code:
                del state[name]  # a new object has its own
    return state, referred


@functools.cache
def _codes_of_new_layer() -> dict[str, Any]:
    """Returns the code of the functions that Keras gives each layer, by attribute."""
    attributes = vars(keras.layers.Layer())
    return {name: value.__code__ for name, value in attributes.items() if inspect.isfunction(value)}


def _of_variables(optimizer: Any, state: dict[str, Any]) -> dict[str, list[tuple[int, Any]]]:
    """Returns the variables behind the ids in each table of an optimizer."""
    known = {id(one): one for one in (*state["_trainable_variables"], *optimizer.variables)}
    tables = {
        name: value
        for name, value in state.items()
        if isinstance(value, dict | set) and value and all(type(key) is int for key in value)
    }
    return {
        name: [(key, known[key]) for key in table if key in known] for name, table in tables.items()
    }


def set_referred(made: object, referred: dict[str, Any]) -> None:
    """Sets what an object of another process has by ids."""
    for name, objects in referred.items():
        if isinstance(made, Tracker):
            made.stored_ids = {store: set(map(id, own)) for store, own in objects.items()}
        elif isinstance(made, Function):
            vars(made)[name] = {make_node_key(*call) for call in objects}
        else:  # a table of an optimizer
            _set_keys(vars(made)[name], dict(objects))


def _set_keys(table: Any, variables: dict[int, Any]) -> None:
    """Replaces ids of another process by those of this one's variables, without tracking."""
    if isinstance(table, set):
        set.clear(table)
        set.update(table, map(id, variables.values()))
        return
    values = {id(variables[key]): value for key, value in table.items() if key in variables}
    dict.clear(table)
    dict.update(table, values)


def blank_object(kind: type[KerasSaveable | Tracker], is_functional: bool) -> Any:
    """Returns an object without attributes, for which everything else happens as for a new one.

    A class of the user becomes one of functional models with its first functional model.
    """
    if is_functional and not issubclass(kind, Functional):
        inject_functional_model_class(kind)
    for base in (keras.Model, keras.layers.Layer, keras.metrics.Metric):
        if issubclass(kind, base):
            return base.__new__(kind)
    return object.__new__(kind)
