"""Installation of every patch of Keras, on import."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras

from stratagem.checkpoint.deferred_restore import set_keras
from stratagem.errors import explain
from stratagem.execution.summary import collector
from stratagem.keras.callbacks.joining_fit import JoiningFit
from stratagem.keras.numerics import (
    batch_normalization,
    compressed_gradients,
    embedding,
    local_weights,
    losses,
    metrics,
    optimizer,
    pooling,
    random,
    rematerialization,
    scanned_layers,
    stateful_rnn,
)
from stratagem.keras.numerics.random_state import RandomState
from stratagem.keras.private import (
    ArrayDataAdapter,
    JAXEpochIterator,
    JAXTrainer,
    Trainer,
    flatten_layers,
    get_stateless_scope,
    in_symbolic_scope,
    jax_core,
)
from stratagem.keras.training import active_fit, device_data, metric_logs, model, several_processes
from stratagem.keras.training import generate_stream as generation
from stratagem.keras.training import metric_logs as late_logs
from stratagem.keras.training import model as metric_build
from stratagem.keras.training.model_methods import wrapping_methods
from stratagem.keras.variables import optimizer_slots, planned_meshes, variable_creation
from stratagem.keras.variables import stored_value as explicit_placement
from stratagem.keras.variables import variable_creation as made_in_scope
from stratagem.strategies.base.logical_devices import set_shape_inference
from stratagem.strategies.base.strategy import DefaultStrategy
from stratagem.strategies.elastic_admission import ElasticAdmission

# `Patch`: one replaced attribute of Keras.


@dataclasses.dataclass(frozen=True)
class Patch:
    """A replacement of `name` of a class or module of Keras."""

    owner: Any
    name: str
    replace: Callable[[Any], Any]
    reason: str
    is_addition: bool = False  # Keras has no such attribute

    @property
    def is_lost(self) -> bool:
        """True if this Keras lacks the attribute."""
        return not self.is_addition and not hasattr(self.owner, self.name)

    @property
    def full_name(self) -> str:
        """The owner's name and the attribute's."""
        return f"{self.owner.__name__}.{self.name}"

    def install(self) -> None:
        """Replaces the attribute."""
        setattr(self.owner, self.name, self.replace(getattr(self.owner, self.name, None)))


# Replaced attributes of Keras's training, with the reason of each; the rest is in `patches.py`.

# KerasHub's, which write several files.
_SAVING_METHODS = ("export_to_transformers", "save_task_weights", "save_to_preset")

# By heading. Where a name stands twice, the second replacement wraps the first.
TRAINING_PATCHES: dict[str, tuple[Patch, ...]] = {
    "A distribution that supplies the step functions": (
        *(
            Patch(
                JAXTrainer,
                name,
                model.entering_scope,
                "the call enters the scope of the model's strategy, and takes distributed datasets",
            )
            for name in (
                "fit",
                "evaluate",
                "predict",
                "train_on_batch",
                "test_on_batch",
                "predict_on_batch",
            )
        ),
        *(
            Patch(
                JAXTrainer, name, model.making_step_function, "the strategy makes the step function"
            )
            for name in ("make_train_function", "make_test_function", "make_predict_function")
        ),
        Patch(
            Trainer,
            "_symbolic_build",
            metric_build.building_metrics,
            "metrics are built without tracing the model once more",
        ),
        Patch(
            Trainer,  # Keras compares with its `compile` to see if a model overrides it
            "compile",
            model.compiling_in_scope,
            "optimizers and metrics given by name are created in the scope of the model's strategy",
        ),
        Patch(
            JAXTrainer,
            "_get_jax_state",
            model.state_in_variables,
            "state stays in the variables between steps",
        ),
        Patch(
            JAXEpochIterator,
            "_get_iterator",
            model.yielding_host_batches,
            "batches are split over replicas before they are on a device",
        ),
        Patch(
            ArrayDataAdapter,
            "get_jax_iterator",
            device_data.selecting_on_device,
            "arrays on an accelerator stay there",
        ),
        Patch(
            keras.Model,
            "distribute_strategy",
            model.with_default_strategy,
            "the attribute of TensorFlow's models",
            is_addition=True,
        ),
    ),
    "A hook for the state of a generate function": (
        Patch(
            keras.Model,
            "__new__",
            wrapping_methods(generation.generating_with_shards, "make_generate_function"),
            "models of KerasHub generate with weights where they are stored",
        ),
    ),
    "A writer process for files": (
        *(
            Patch(
                keras.Model,
                name,
                several_processes.saved_once,
                "the chief writes, and all processes return when the file is complete",
            )
            for name in ("save", "save_weights", "export")
        ),
        *(
            Patch(module, name, several_processes.saved_once, "the same for functions")
            for module, name in (
                (keras.saving, "save_model"),
                (keras.saving, "save_weights"),
                (keras.models, "save_model"),
            )
        ),
        Patch(
            keras.Model,
            "__new__",
            wrapping_methods(several_processes.saved_once, *_SAVING_METHODS),
            "the same for presets and exports of models of KerasHub",
        ),
    ),
    "The epoch iterator as an attribute of the model": (
        Patch(
            JAXTrainer,
            "fit",
            active_fit.recorded_fit,
            "callbacks that save the position in the data need the active iterator",
        ),
        Patch(JAXEpochIterator, "__init__", active_fit.recorded_iterator, "the same"),
    ),
    "An order of callbacks": (
        Patch(
            keras.callbacks.CallbackList,
            "__init__",
            active_fit.ordering_callbacks,
            "a backup is written after the other callbacks, whose state it holds",
        ),
    ),
    "Logs that are read when they are used": (
        *(
            Patch(
                keras.callbacks.CallbackList,
                name,
                late_logs.sharing_late_logs,
                "a callback that uses no logs does not wait for the step",
            )
            for name in ("on_train_batch_end", "on_test_batch_end")
        ),
        Patch(
            keras.callbacks.ProgbarLogger,
            "_update_progbar",
            late_logs.reading_when_drawn,
            "a progress bar waits only for the steps for which it is drawn",
        ),
    ),
}


# Every attribute of Keras that is replaced on import, with the reason.
#
# The keys are headings of `docs/design/upstream.md`, which says what change of Keras would make the
# replacements unnecessary. Each function gets the original and returns the replacement.

_Layer, _Metric, _Optimizer = keras.layers.Layer, keras.metrics.Metric, keras.optimizers.Optimizer
_LossScale = keras.optimizers.LossScaleOptimizer
_BatchNorm, _Seeds = keras.layers.BatchNormalization, keras.random.SeedGenerator

# By heading. Where a name stands twice, the second replacement wraps the first.
PATCHES: dict[str, tuple[Patch, ...]] = {
    "A hook for the creation of variables": (
        Patch(
            keras.Variable,
            "__new__",
            variable_creation.create_variable,
            "layers, metrics and optimizers create distributed variables in a scope",
        ),
        Patch(
            _Seeds,
            "__init__",
            random.worker_local,
            "the seed of a worker is not stored on parameter servers",
        ),
        Patch(
            _Metric,
            "add_variable",
            metrics.created_once,
            "an initial value counts once, not once per replica",
        ),
        Patch(
            keras.layers.Embedding,
            "build",
            embedding.building_table,
            "strategies recognize a table before it has a value",
        ),
        Patch(
            _Optimizer,
            "add_variable_from_reference",
            optimizer_slots.slot_of_variable,
            "a slot is stored where its variable is",
        ),
        Patch(
            _Layer,
            "__new__",
            made_in_scope.created_in_scope,
            "a model created in a scope and built outside belongs to the strategy",
        ),
        *(
            Patch(
                cls, name, made_in_scope.in_scope_until_built, "the same, when the model is built"
            )
            for cls, name in (
                (_Layer, "__call__"),
                (keras.Model, "build"),
                (keras.Sequential, "build"),
            )
        ),
        Patch(
            _Layer,
            "add_weight",
            made_in_scope.in_scope_of_layer,
            "weights that quantize and enable_lora add belong to the layer's strategy",
        ),
        Patch(
            _Optimizer,
            "build",
            made_in_scope.adopting,
            "an optimizer created outside belongs to the strategy of its variables",
        ),
        Patch(
            _Optimizer,
            "build",
            compressed_gradients.with_state,
            "errors of compressed gradients are state of the optimizer",
        ),
        Patch(
            _Optimizer,
            "build",
            local_weights.with_local_copies,
            "replicas that train apart have weights of their own",
        ),
        Patch(
            _Optimizer,
            "load_own_variables",
            compressed_gradients.loading_without_state,
            "a file without these errors leaves them at zero",
        ),
        *(
            Patch(
                _Optimizer,
                name,
                made_in_scope.in_scope_of_slot,
                "slots added later belong to the strategy of their variables",
            )
            for name in ("add_variable", "add_variable_from_reference")
        ),
    ),
    "The device that keras.device names": (
        Patch(
            keras,
            "device",
            explicit_placement.noted_device,
            "a variable created in keras.device is stored there, or an error says why not",
        ),
    ),
    "A fold-in for seed generators": (
        Patch(
            _Seeds,
            "next",
            random.replica_seed,
            "replicas draw different numbers, which follow from one seed",
        ),
    ),
    "Hooks around a metric's update and result": (
        Patch(
            _Metric,
            "__new__",
            metrics.wrapping_class,
            "update_state counts true examples; result combines all replicas",
        ),
        Patch(
            JAXTrainer,
            "get_metrics_result",
            metric_logs.results_at_once,
            "one program computes all results, and one collective combines them",
        ),
    ),
    "The denominator of a loss": (
        Patch(
            keras.losses.Loss,
            "__call__",
            losses.replica_loss,
            "the mean of a loss is over the examples of all replicas, without padding",
        ),
        Patch(
            JAXTrainer,
            "_aggregate_additional_loss",
            model.sharing_additional_losses,
            "each replica takes its share of the losses of layers",
        ),
    ),
    "Moments of batch normalization": (
        Patch(
            _BatchNorm,
            "__init__",
            batch_normalization.taking_synchronized,
            "synchronized=True, which Keras rejects on JAX",
        ),
        Patch(
            _BatchNorm,
            "call",
            batch_normalization.normalizing_true_rows,
            "padding leaves the statistics unchanged; inference uses those of all replicas",
        ),
        Patch(
            _BatchNorm,
            "_moments",
            batch_normalization.moments_of_replicas,
            "mean and variance over true examples, of all replicas if synchronized",
        ),
    ),
    "Annotations in Layer.add_weight": (
        Patch(
            _BatchNorm,
            "build",
            batch_normalization.annotating_statistics,
            "moving statistics are ON_READ with MEAN",
        ),
    ),
    "A row lookup as an operation": (
        Patch(
            keras.layers.Embedding,
            "call",
            embedding.looking_up_rows,
            "the gradient of a table is rows",
        ),
    ),
    "Gradient of max pooling on CPU": (
        *(
            Patch(cls, "call", pooling.fast_on_cpu, "XLA's gradient of max pooling is slow on CPU")
            for cls in (
                keras.layers.MaxPooling1D,
                keras.layers.MaxPooling2D,
                keras.layers.MaxPooling3D,
            )
        ),
    ),
    "State rows of stateful RNNs": (
        Patch(
            keras.layers.RNN,
            "call",
            stateful_rnn.replica_rnn,
            "each replica starts with the state rows of its own examples",
        ),
    ),
    "A hook between gradients and their update": (
        *(
            Patch(
                cls,
                name,
                replace,
                "gradients are summed over replicas, then clipped and applied once",
            )
            for cls in (_Optimizer, _LossScale)
            for name, replace in (
                ("apply", optimizer.applying_sums),
                ("stateless_apply", optimizer.stateless_with_sums),
            )
        ),
    ),
    "Rematerialization of whole layers": (
        Patch(
            jax_core,
            "remat",
            rematerialization.rematerialized_function,
            "arguments such as training=True stay Python values, and writes are kept",
        ),
        Patch(
            _Layer,
            "rematerialized_call",
            rematerialization.rematerialized_layer,
            "a layer is recomputed once, not once more for each layer around it",
        ),
        Patch(
            _Layer,
            "rematerialized_call",
            scanned_layers.scanned_layer,
            "the first layer of a scan computes all of them",
        ),
    ),
    "Devices of a mesh": (
        Patch(
            keras.distribution,
            "list_devices",
            planned_meshes.listing_planned_devices,
            "a planned script sees the devices that it is planned for",
        ),
        Patch(
            keras.distribution.DeviceMesh,
            "__init__",
            planned_meshes.made_of_planned_devices,
            "the same for a mesh of all devices",
        ),
    ),
    **TRAINING_PATCHES,
}


def install() -> None:
    """Fills the slots of lower packages and installs `PATCHES`."""
    assert DefaultStrategy
    set_shape_inference(in_symbolic_scope)
    collector.set_shape_inference(in_symbolic_scope)
    ElasticAdmission.callback, ElasticAdmission.random_state = JoiningFit, RandomState
    set_keras(flatten_layers, get_stateless_scope, in_symbolic_scope)
    patches = list(itertools.chain(*PATCHES.values()))
    if lost := [patch.full_name for patch in patches if patch.is_lost]:
        raise ImportError(
            explain(
                f"Keras {keras.__version__} has no {', '.join(lost)}, which Stratagem replaces.",
                expected="Keras 3.12 to 3.16.",
                fix="install one of these, or a newer Stratagem.",
            )
        )
    for patch in patches:
        patch.install()
