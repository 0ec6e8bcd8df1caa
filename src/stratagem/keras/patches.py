"""Every attribute of Keras that is replaced on import, with the reason.

The keys are headings of `docs/design/upstream.md`, which says what change of Keras would make the
replacements unnecessary. Each function gets the original and returns the replacement.
"""

from __future__ import annotations

import keras

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
from stratagem.keras.patch import Patch as Patch
from stratagem.keras.private import JAXTrainer, jax_core
from stratagem.keras.training import metric_logs, model
from stratagem.keras.training_patches import TRAINING_PATCHES
from stratagem.keras.variables import (
    explicit_placement,
    made_in_scope,
    optimizer_slots,
    planned_meshes,
    variable_creation,
)

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
