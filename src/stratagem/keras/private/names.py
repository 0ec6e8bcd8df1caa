"""Table of the private names of Keras in use, each with the reason. Keras 3.12 to 3.16.

`missing` finds all that the installed Keras lacks, so that one look at a new release tells what
moved. It imports nothing of Stratagem, which fails then: `python -m validation latest` runs it
as a file.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import pkgutil
from types import CellType
from typing import Any, NamedTuple

import keras
from packaging.version import Version


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
    f"{_OPTIMIZER}._iterations": ("update of state that belongs to no variable",),
    f"{_OPTIMIZER}._learning_rate": ("a schedule, which is sent to servers as it is",),
    f"{_OPTIMIZER}._trainable_variables": ("the variables that apply() updates by default",),
    f"{_OPTIMIZER}._is_excluded_from_weight_decay": (
        "the variables excluded from weight decay",
        f"{_OPTIMIZER}._use_weight_decay",  # before 3.16
    ),
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


def are_all_there() -> bool:
    """Returns True if this Keras has all modules, functions and classes of the table.

    Attributes of classes are not looked for, which takes longer.
    """
    return all(_is_there(one) for one in NAMES if not _is_of_class(one.path))


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
