"""`fit`, `evaluate`, `predict` and `compile` of Keras models under a strategy.

The methods of Keras's JAX trainer open the scope of the model's strategy, and its step functions
are ours.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from stratagem import contexts as stack
from stratagem.config import filters_traceback
from stratagem.contexts import get_strategy, has_strategy
from stratagem.devices.mesh import outside_context_mesh
from stratagem.errors import explain, invalid
from stratagem.execution.replica_context import get_replica_context
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.placement import PlacedBatches
from stratagem.keras.numerics.step_mode import (
    StepMode,
    current_mode,
    example_fraction,
    lockstep_context,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    Functional,
    JAXEpochIterator,
    JAXTrainer,
    Trainer,
    build_for,
    build_metrics,
    compile_arguments,
    flatten_layers,
    has_unbuilt_metrics,
    unpack_x_y_sample_weight,
)
from stratagem.keras.training.active_fit import (
    ReportedTrainFunction,
    acts_on_batches,
    recorded_fit,
    uses_batch_logs,
)
from stratagem.keras.training.datasets import adapted, is_dataset
from stratagem.keras.training.planned_models import strategy_for_plan
from stratagem.keras.training.replica_steps import ReplicaSteps
from stratagem.keras.training.several_processes import check_callbacks, listed, settle_call
from stratagem.keras.training.step_functions import (
    HostBatches,
    PredictFunction,
    StepFunction,
    TrainOrTestFunction,
    logs_wanted,
)
from stratagem.keras.variables.creation import adopt, adopt_new, scope_of
from stratagem.observe.process_writer import current_events
from stratagem.observe.recorder import current_observer, input_mark
from stratagem.resources import changing
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy
    from stratagem.variables.registry import Home

# Steps of `fit` of a model without a strategy, for the observer of a profile.


def observe_steps(model: Any) -> None:
    """Lets the observer, if any, see the steps of a model without a strategy."""
    function = model.train_function
    is_observed = isinstance(function, ObservedTrainFunction)
    if current_observer() is not None and function is not None and not is_observed:
        model.train_function = ObservedTrainFunction(model, function)


def restore_steps(model: Any) -> None:
    """Undoes `observe_steps`."""
    if isinstance(model.train_function, ObservedTrainFunction):
        model.train_function = model.train_function.original


class ObservedTrainFunction:
    """The `train_function` of a model without a strategy, with notes to the observer."""

    def __init__(self, model: Any, original: Callable[..., Any]) -> None:
        self.original = original
        self._model = model

    def __call__(self, state: object, iterator: Iterator[Any]) -> Any:
        """Runs a group of steps, as Keras's own function does."""
        observer = current_observer()
        if observer is None:
            return self.original(state, iterator)
        results: list[Any] = []
        with observer.step(self._model.steps_per_execution, lambda: results[0][0]):
            results.append(self.original(state, _MarkedIterator(iterator)))
        return results[0]


class _MarkedIterator:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with input_mark():
            return next(self._iterator)


_STEP_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "train_function": lambda m, s: _train_or_test(m, s, training=True),
    "test_function": lambda m, s: _train_or_test(m, s, training=False),
    "predict_function": lambda m, s: _predict(m, s),
}


def strategy_of(model: keras.Model) -> Any:
    """Returns the strategy of a model's variables; None without one.

    A model without variables belongs to the current strategy, or to the one in whose scope layers
    were added. Raises ValueError for variables of two strategies, or if only some belong to a
    strategy.
    """
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    homes = [home_of(variable) for variable in variables]
    owners = [home.strategy for home in homes if home is not None]
    current = get_strategy() if has_strategy() else None
    made_in = scope_of(model) if not variables else None
    owner = owners[0] if owners else current or made_in
    if owner is None:
        return None
    for variable, home in zip(variables, homes, strict=True):
        if home is None or home.strategy is not owner:
            raise _foreign(variable, home, owner, optimizer)
    return owner


def _foreign(
    variable: keras.Variable,
    home: Home | None,
    owner: Strategy,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> ValueError:
    place = f"under {home.strategy}" if home is not None else "outside the scope of a strategy"
    slots = [] if optimizer is None else optimizer.variables
    if optimizer is not None and any(variable is slot for slot in slots):
        fix = (
            f"create the optimizer {optimizer.name!r} in `with strategy.scope():`. Or pass it to "
            "model.compile before it is built, which moves it to the model's strategy."
        )
    else:
        layer = variable.path.rpartition("/")[0] or variable.name
        fix = (
            f"create or build {layer!r} in `with strategy.scope():`. Or move a whole model without "
            "a strategy: sg.compile(model, distribute=strategy, ...)."
        )
    return invalid(
        f"Variable {variable.path!r} was created {place}, but the model runs under {owner}.",
        expected="a model and an optimizer created in the scope of the same strategy.",
        fix=fix,
        code="SG201",
    )


@patches(
    keras.Model,
    "distribute_strategy",
    why="the attribute of TensorFlow's models",
    is_addition=True,
)
def with_default_strategy(_original: object) -> Any:
    """Returns the property `distribute_strategy` of a model."""
    return property(
        lambda self: strategy_of(self) or get_strategy(),
        doc="The strategy that the model belongs to; the default one if none.",
    )


@patches(
    JAXTrainer,
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    why="the call enters the scope of the model's strategy, and takes distributed datasets; "
    "callbacks that save the position in the data need the active fit",
)
def entering_scope(original: Callable[..., Any]) -> Any:
    """Returns `fit`, `evaluate`, `predict` or a form of one batch, in the model's scope."""
    name = original.__name__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def entered(self: keras.Model, *args: object, **kwargs: object) -> Any:
        frame = stack.current_frame()
        if frame is not None and frame.replica is not None:
            raise _in_a_step(f"{type(self).__name__}.{name}")
        strategy = strategy_of(self) or strategy_for_plan(self)
        if any(is_dataset(value) for value in (*args, *kwargs.values())):
            bound = signature.bind_partial(self, *args, **kwargs)
            bound.arguments.update(adapted(strategy or get_strategy(), name, bound.arguments))
            args, kwargs = bound.args[1:], bound.kwargs
        if strategy is None:
            return original(self, *args, **kwargs)
        return under(strategy, self, args, kwargs)

    @outside_context_mesh
    def under(
        strategy: Strategy, self: keras.Model, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bound = signature.bind_partial(self, *args, **kwargs)
        _adopt_metrics(self, strategy)
        check_callbacks(
            name,
            listed(bound.arguments.get("callbacks")),
            spans_processes=strategy.topology.spans_processes,
        )
        wanted = name.endswith("_on_batch") or _needs_batch_logs(
            bound.arguments.get("verbose", "auto"), bound.arguments.get("callbacks")
        )
        if strategy.topology.spans_processes and not name.endswith("_on_batch"):
            wanted = settle_call(bound.arguments, wanted)
            args, kwargs = bound.args[1:], bound.kwargs
        if name == "fit" and strategy.fit_callbacks is not None:
            callbacks = listed(bound.arguments.get("callbacks"))
            bound.arguments["callbacks"] = [*callbacks, *strategy.fit_callbacks()]
            args, kwargs = bound.args[1:], bound.kwargs
        strategy.executor.settle()  # Steps of earlier calls must not count here.
        logs: dict[str, bool] = {}
        if name != "predict":
            acting = map(acts_on_batches, listed(bound.arguments.get("callbacks")))
            logs = {"value": wanted, "is_current": any(acting)}
        with changing(logs_wanted, **logs), strategy.scope():
            return original(self, *args, **kwargs)

    return filters_traceback(recorded_fit(entered) if name == "fit" else entered)


def _in_a_step(method: str) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{method} was called in a function that `run` calls on each replica.",
            expected="a call outside of it: the method splits batches over the replicas, and runs "
            "the model's step on them.",
            fix=f"call {method} with the whole batch in place of strategy.run; or compute in the "
            "function, with model(x), sg.value_and_grad and optimizer.apply.",
            code="SG404",
        )
    )


def _adopt_metrics(model: keras.Model, strategy: Strategy) -> None:
    """Moves metrics that were created outside the scope to the strategy of their model."""
    given = compile_arguments(model) if model.compiled else {}
    of_metrics = {key: given.get(key) for key in ("metrics", "weighted_metrics")}
    for variable in [*model.metrics_variables, *_variables_of(of_metrics, strategy)]:
        if home_of(variable) is None:
            adopt(variable, strategy)


def _needs_batch_logs(verbose: object, callbacks: object) -> bool:
    """Returns True if a progress bar or a callback uses the logs of single batches."""
    if not isinstance(callbacks, keras.callbacks.CallbackList) and verbose not in (0, 2):
        return True
    return any(map(uses_batch_logs, listed(callbacks)))


@patches(
    JAXTrainer,
    *("make_train_function", "make_test_function", "make_predict_function"),
    why="the strategy makes the step function",
)
def making_step_function(original: Callable[..., Any]) -> Any:
    """Returns `make_train_function` or its kin, which make the step function of the strategy."""
    attribute = original.__name__.removeprefix("make_")
    make = _STEP_FUNCTIONS[attribute]

    @functools.wraps(original)
    def made(self: keras.Model, force: bool = False) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            restore_steps(self)
            result = original(self, force=force)
            if attribute == "train_function":
                _report_steps(self)
                observe_steps(self)
            return result
        function = getattr(self, attribute)
        if force or not isinstance(function, StepFunction):
            setattr(self, attribute, make(self, strategy))
        function = getattr(self, attribute)
        if isinstance(function, TrainOrTestFunction) and function.events is not None:
            function.events.begin()  # Keras calls make_train_function at the start of each fit.
        return function

    return made


def _train_or_test(model: keras.Model, strategy: Strategy, *, training: bool) -> Any:
    if strategy.executor.schedules:
        remote = strategy.placement.remote
        return remote.keras.train_or_test_function(model, strategy, training=training)
    return TrainOrTestFunction(model, strategy, training=training)


def _predict(model: keras.Model, strategy: Strategy) -> Any:
    if strategy.executor.schedules:
        return strategy.placement.remote.keras.predict_function(model, strategy)
    return PredictFunction(model, strategy)


def _report_steps(model: keras.Model) -> None:
    """Adds step events to a model without a strategy if the run has an event folder."""
    events = current_events()
    if events is None or model.train_function is None:
        return
    open_model: Any = model  # Keras annotates its step function as None.
    if not isinstance(open_model.train_function, ReportedTrainFunction):
        open_model.train_function = ReportedTrainFunction(model, events, open_model.train_function)
    open_model.train_function.events.begin()


@patches(
    Trainer,  # Keras compares with its `compile` to see if a model overrides it
    "compile",
    why="optimizers and metrics given by name are created in the scope of the model's strategy",
)
def compiling_in_scope(original: Callable[..., Any]) -> Any:
    """Returns `compile` that can be called outside the scope in which a model was created.

    An optimizer given by name creates variables when the model is compiled; objects have created
    theirs before, outside the scope, and move.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compiled(self: keras.Model, *args: object, **kwargs: object) -> Any:
        homes = [home_of(variable) for variable in self.variables]
        strategy = next((home.strategy for home in homes if home is not None), None)
        if strategy is None and not homes:
            strategy = scope_of(self)
        if has_strategy():
            strategy = get_strategy()
        if strategy is None:
            return original(self, *args, **kwargs)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        adopt_new(_variables_of(given, strategy), strategy)
        if strategy.executor.steps_per_call is not None and "steps_per_execution" not in given:
            kwargs["steps_per_execution"] = strategy.executor.steps_per_call
        with contextlib.nullcontext() if has_strategy() else strategy.scope():
            return original(self, *args, **kwargs)

    return compiled


@patches(JAXTrainer, "_get_jax_state", why="state stays in the variables between steps")
def state_in_variables(original: Callable[..., Any]) -> Any:
    """Returns the method through which `fit` passes state; ours stays in the variables."""

    def state(self: keras.Model, *args: object, **kwargs: object) -> Any:
        # `fit` calls this in each epoch, while devices wait. It has checked all variables before it
        # entered the scope.
        if has_strategy() or strategy_of(self) is not None:
            return ()
        return original(self, *args, **kwargs)

    return state


@patches(
    JAXEpochIterator,
    "_get_iterator",
    why="batches are split over replicas before they are on a device",
)
def yielding_host_batches(original: Callable[..., Any]) -> Any:
    """Returns the method of an epoch iterator that yields batches, before they are on a device."""

    def batches(self: JAXEpochIterator) -> Any:
        if not has_strategy():
            return original(self)
        return HostBatches(self.data_adapter.get_jax_iterator(), self.steps_per_epoch)

    return batches


@patches(
    JAXTrainer,
    "_aggregate_additional_loss",
    why="each replica takes its share of the losses of layers",
)
def sharing_additional_losses(original: Callable[..., Any]) -> Any:
    """Returns the method that adds the losses of layers, a share of them in each replica."""

    def aggregate(self: keras.Model, loss: object) -> Any:
        total: Any = original(self, loss)
        if get_replica_context() is None or current_mode() is not StepMode.SHARE:
            return total
        context = lockstep_context()
        if context is None:  # the only replica
            return total
        return total * example_fraction(context, total.dtype)

    return aggregate


def compile(model: keras.Model, *, distribute: Strategy | None = None, **arguments: Any) -> None:
    """Moves a model to a strategy and compiles it.

    Replaces `model.compile(distribute=...)` of TensorFlow 1.11.

    Args:
        model: a Keras model without a strategy, or of the same one.
        distribute: the strategy; None compiles without moving the model.
        **arguments: arguments of `keras.Model.compile`.

    Raises:
        ValueError: the model belongs to another strategy.

    Example:
        >>> model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        >>> sg.compile(model, distribute=sg.MirroredStrategy(["cpu:0", "cpu:1"]), loss="mse")
        >>> model.distribute_strategy.num_replicas_in_sync
        2

    Source: TF 1.11 keras/engine/training.py, Model.compile.
    """
    if distribute is None:
        model.compile(**arguments)
        return
    for variable in [*model.variables, *_variables_of(arguments, distribute)]:
        home = home_of(variable)
        if home is None:
            adopt(variable, distribute)
        elif home.strategy is not distribute:
            raise _foreign(variable, home, distribute)
    with distribute.scope():
        model.compile(**arguments)


def _is_built(owner: keras.optimizers.Optimizer | keras.metrics.Metric) -> bool:
    return isinstance(owner, keras.optimizers.Optimizer) and owner.built


def _variables_of(arguments: dict[str, Any], strategy: Strategy) -> list[Any]:
    """Returns the variables of the optimizers and metrics in the arguments of `compile`.

    Without those of built optimizers for servers, which make slots beside their variables.
    """
    owners = [
        leaf
        for leaf in jax.tree.leaves(arguments)
        if isinstance(leaf, keras.optimizers.Optimizer | keras.metrics.Metric)
        and not (strategy.placement.is_remote and _is_built(leaf))
    ]
    return [variable for owner in owners for variable in owner.variables]


# Building of a model's metrics and losses from its known outputs.
#
# Keras traces the whole model once more for it, which takes as long as tracing the step.

# Their outputs are those of the layers that they were made from.
_CALLS = (keras.Sequential.call, Functional.call)


@patches(Trainer, "_symbolic_build", why="metrics are built without tracing the model once more")
def building_metrics(original: Callable[..., Any]) -> Any:
    """Returns `_symbolic_build` that does not trace a model whose outputs are known."""

    @functools.wraps(original)
    def build(self: keras.Model, iterator: Any = None, data_batch: Any = None) -> Any:
        outputs = _outputs(self)
        if data_batch is not None and has_strategy():  # Keras 3.16 reads the adapter itself
            data_batch = next(HostBatches([data_batch], None))
        if outputs is None or strategy_of(self) is None or not has_unbuilt_metrics(self):
            return original(self, iterator=iterator, data_batch=data_batch)
        if data_batch is None and (data_batch := first_batch(iterator)) is None:
            return original(self, iterator=iterator)
        x, y, sample_weight = unpack_x_y_sample_weight(keras.tree.map_structure(_spec, data_batch))
        sizes = [one.shape[0] for one in keras.tree.flatten(x) if one is not None]
        if not sizes:  # Keras names the input that is required
            return original(self, data_batch=data_batch)
        num_examples = sizes[0]
        y_pred = keras.tree.map_structure(
            lambda output: keras.KerasTensor((num_examples, *output.shape[1:]), output.dtype),
            outputs,
        )
        build_metrics(self, x, y, y_pred, sample_weight)
        return original(self, data_batch=data_batch)

    return build


def first_batch(epoch_iterator: Any) -> Any:
    """Returns the next batch of an epoch iterator, which must be reset afterward; None if empty."""
    for _, _, batches in epoch_iterator:
        return batches[0] if isinstance(batches, list | tuple) else next(batches)
    return None


def _outputs(model: keras.Model) -> Any:
    """Returns the outputs of a built model whose shapes are known but for the batch, or None."""
    if type(model).call not in _CALLS or not all(layer.built for layer in flatten_layers(model)):
        return None
    outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output
    shapes = [output.shape for output in keras.tree.flatten(outputs)]
    is_known = all(shape and shape[0] is None and None not in shape[1:] for shape in shapes)
    return outputs if is_known else None


def _spec(array: Any) -> keras.KerasTensor | None:
    if array is None:
        return None
    return keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))


# Lowering of a model's training step from shapes, without the actual devices.


def lower_training_step(model: keras.Model, batch: Sequence[object], *, num_steps: int = 1) -> Any:
    """Lowers a model's training step for its strategy's devices, from shapes alone.

    Under a `CompileOnlyStrategy` no device is needed. Nothing is computed or transferred.

    Args:
        model: a compiled Keras model that belongs to a strategy.
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays or `jax.ShapeDtypeStruct`s, of
            the global batch size.
        num_steps: steps per call, as `steps_per_execution`.

    Returns:
        The result of `jax.jit(...).lower`. Its `.compile()` returns the program, whose `as_text()`,
        `memory_analysis()` and `cost_analysis()` describe one device.

    Raises:
        ValueError: the model has no strategy, or the batch size is not a multiple of the replicas.

    Source: JAX, ahead-of-time lowering and compilation.
    """
    strategy = strategy_of(model)
    if strategy is None:
        raise invalid(
            f"Model {model.name!r} belongs to no strategy.",
            expected="a model created in the scope of the strategy to lower it for.",
            fix="create it in `with strategy.scope():`, or call sg.compile(model, "
            "distribute=strategy, ...).",
        )
    shapes = jax.tree.map(_shape_of, tuple(batch))
    arguments = batch_arguments(_split(shapes, strategy.num_replicas_in_sync))
    with strategy.scope():
        build_for(model, shapes)
        return strategy.executor.lower(
            ReplicaSteps(model).train, arguments, strategy.topology, num_steps
        )


def _shape_of(array: object) -> jax.ShapeDtypeStruct:
    if not isinstance(array, jax.ShapeDtypeStruct | jax.Array):
        array = np.asarray(array)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _split(shapes: object, num_replicas: int) -> PlacedBatches:
    """Returns the shapes of a batch on the devices, with equal parts for all replicas."""
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda leaf: leaf is None)
    arrays = [leaf for leaf in leaves if leaf is not None]
    sizes = {array.shape[0] if array.shape else 0 for array in arrays}
    total = min(sizes, default=0)
    if len(sizes) != 1 or total % num_replicas or not total:
        raise invalid(
            f"The batch has arrays of shapes {[array.shape for array in arrays]}, which do "
            f"not split evenly over {num_replicas} replicas.",
            expected="arrays of the same leading size, a multiple of the replicas.",
            fix="choose a batch size that is a multiple of the number of replicas.",
            code="SG306",
        )
    size = total // num_replicas
    rows = (num_replicas, size) if num_replicas > 1 else (size,)
    return PlacedBatches(
        structure=structure,
        is_array=tuple(leaf is not None for leaf in leaves),
        arrays=[jax.ShapeDtypeStruct((*rows, *a.shape[1:]), a.dtype) for a in arrays],
        num_replicas=num_replicas,
        num_steps=1,
        size=size,
        lengths=None,
        local_lengths=(size,) * num_replicas,
        signature=None,
    )
