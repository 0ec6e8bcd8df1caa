"""Replaced attributes of Keras's training, with the reason of each; the rest is in `patches.py`."""

from __future__ import annotations

import keras

from stratagem.keras.patch import Patch
from stratagem.keras.private import ArrayDataAdapter, JAXEpochIterator, JAXTrainer, Trainer
from stratagem.keras.training import (
    active_fit,
    device_data,
    generation,
    late_logs,
    metric_build,
    model,
    several_processes,
)
from stratagem.keras.training.model_methods import wrapping_methods

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
