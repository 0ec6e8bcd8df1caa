"""Private names of Keras in use; `names.py` is the table of them, each with its reason."""

from typing import Any

import keras

from stratagem.errors import explain
from stratagem.keras.private import names

if not names.are_all_there():  # before the imports below, which fail at the first of them
    raise ImportError(
        explain(
            f"Keras {keras.__version__} has no {', '.join(names.missing())}.",
            expected="Keras 3.12 to 3.16, whose private names Stratagem knows.",
            fix="install one of these, or a newer Stratagem.",
        )
    )

from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.data_adapters import (
    ArrayDataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet, Tracker

from stratagem.keras.private.graphs import GraphCall, graph_calls, graph_of, graph_output_ids
from stratagem.keras.private.identities import blank_object, set_referred, taken_apart
from stratagem.keras.private.iterators import (
    array_batches,
    arrays_of,
    batches_taken,
    first_batch,
    goes_on_with_iterator,
    grouped,
    order_number,
    replace_steps,
    restore_steps,
    set_batches_taken,
    set_order_number,
    torch_loader,
)
from stratagem.keras.private.optimizers import (
    clip_gradients,
    config_and_rate,
    count_update,
    decays,
    filter_empty_gradients,
    trainable_variables,
)
from stratagem.keras.private.process_state import (
    fresh_masks,
    fresh_names,
    global_seed_state,
    set_global_seed_state,
)
from stratagem.keras.private.rematerialization import (
    LayerRemat,
    ids_of_losses,
    remat_mode,
    set_chain,
    set_remat_policy,
    sublayers,
)
from stratagem.keras.private.trainers import (
    build_for,
    build_metrics,
    calls_in_thread,
    compile_arguments,
    has_unbuilt_metrics,
    loss_tracker,
    named_metrics,
    output_loss_trackers,
    set_initial_epoch,
    takes_training,
    total_loss,
)
from stratagem.keras.private.variables import (
    annotate,
    autocasts,
    averaged,
    averaged_function,
    compute_fans,
    expected_batch_size,
    flatten_layers,
    own_variables,
    reduction_axes,
    set_path,
    with_states,
)

# Keras 3.16 gave both classes and the module of operations other names.
JAXTrainer: Any = names.find("keras.src.backend.jax.trainer.Trainer")
Trainer: Any = names.find("keras.src.trainers.trainer.BaseTrainer")
jax_core: Any = names.find("keras.src.backend.jax.ops")

__all__ = [
    "ArrayDataAdapter",
    "DataAdapter",
    "Functional",
    "GeneratorDataAdapter",
    "GraphCall",
    "JAXEpochIterator",
    "JAXTrainer",
    "KerasSaveable",
    "LayerRemat",
    "PyDatasetAdapter",
    "TFDatasetAdapter",
    "TrackedDict",
    "TrackedList",
    "TrackedSet",
    "Tracker",
    "Trainer",
    "annotate",
    "apply_mask",
    "array_batches",
    "arrays_of",
    "autocasts",
    "averaged",
    "averaged_function",
    "batches_taken",
    "blank_object",
    "build_for",
    "build_metrics",
    "calls_in_thread",
    "clip_gradients",
    "compile_arguments",
    "compute_fans",
    "config_and_rate",
    "count_update",
    "current_path",
    "decays",
    "expected_batch_size",
    "filter_empty_gradients",
    "first_batch",
    "flatten_layers",
    "fresh_masks",
    "fresh_names",
    "get_keras_mask",
    "get_stateless_scope",
    "global_seed_state",
    "goes_on_with_iterator",
    "graph_calls",
    "graph_of",
    "graph_output_ids",
    "grouped",
    "has_unbuilt_metrics",
    "ids_of_losses",
    "in_symbolic_scope",
    "jax_core",
    "loss_tracker",
    "named_metrics",
    "order_number",
    "output_loss_trackers",
    "own_variables",
    "pythonify_logs",
    "reduction_axes",
    "remat_mode",
    "replace_steps",
    "restore_steps",
    "set_batches_taken",
    "set_chain",
    "set_global_seed_state",
    "set_initial_epoch",
    "set_keras_mask",
    "set_order_number",
    "set_path",
    "set_referred",
    "set_remat_policy",
    "squeeze_or_expand_to_same_rank",
    "sublayers",
    "taken_apart",
    "takes_training",
    "torch_loader",
    "total_loss",
    "trainable_variables",
    "unpack_x_y_sample_weight",
    "with_states",
]
