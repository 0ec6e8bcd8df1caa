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
ArrayDataAdapter._inputs              the arrays, before Keras copies them to the host
ArrayDataAdapter._get_iterator        the order of their rows
EpochIterator._enumerate_iterator     the numbers of an epoch's steps, which a restart continues
EpochIterator._current_iterator       the iterator, which the next epoch may continue
EpochIterator._steps_seen             number of batches taken from that iterator
CallbackList._async_train             True if batch callbacks run in another thread
CallbackList._async_test              likewise in evaluate
Progbar._last_update                  the time when a progress bar was drawn
python_utils.pythonify_logs           logs as numbers, as fit gives them to callbacks
trainer._symbolic_build               builds the variables of a training step from shapes
backend.compute_output_spec           calls a function with shapes alone
models.functional.Functional          its `call` returns the outputs that it was made from
trainer._initial_epoch                the first epoch of fit, set by a callback
PyDatasetAdapter, TFDatasetAdapter    kinds of data that resume in different ways
ArrayDataAdapter                      likewise
GeneratorDataAdapter                  likewise
TorchDataLoaderAdapter._dataloader    the loader, whose generator has a state
global_state                          the default seed of keras.random, automatic names, masks
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
backend.jax.core.remat                replaced, see docs/design/upstream.md
Operation._remat_mode                 how a finished layer is rematerialized, and computed in a scan
Function._nodes_by_depth              blocks of a model that follow each other, for a scan
Sequential._functional                the graph of a sequential model
Layer._loss_ids                       the owner of a loss, which rematerialization replaces
name_scope.current_path               the path of a variable that is about to be created
naming's object_name_uids             automatic names restart in each call of a model function
====================================  ==============================================================
"""

from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer
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
from keras.src.trainers.trainer import Trainer
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet

from stratagem.keras.private.graphs import (
    GraphCall,
    graph_calls,
    graph_of,
    graph_output_ids,
)
from stratagem.keras.private.iterators import (
    array_batches,
    arrays_of,
    batches_taken,
    first_batch,
    goes_on_with_iterator,
    replace_steps,
    restore_steps,
    set_batches_taken,
    torch_loader,
)
from stratagem.keras.private.optimizers import (
    clip_gradients,
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
    jax_core,
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
    last_drawn_s,
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
    "Trainer",
    "annotate",
    "apply_mask",
    "array_batches",
    "arrays_of",
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
    "fresh_masks",
    "fresh_names",
    "get_keras_mask",
    "get_stateless_scope",
    "global_seed_state",
    "goes_on_with_iterator",
    "graph_calls",
    "graph_of",
    "graph_output_ids",
    "has_unbuilt_metrics",
    "ids_of_losses",
    "in_symbolic_scope",
    "jax_core",
    "last_drawn_s",
    "loss_tracker",
    "named_metrics",
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
    "set_path",
    "set_remat_policy",
    "squeeze_or_expand_to_same_rank",
    "sublayers",
    "takes_training",
    "torch_loader",
    "total_loss",
    "trainable_variables",
    "unpack_x_y_sample_weight",
    "with_states",
]
