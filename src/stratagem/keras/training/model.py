"""`fit`, `evaluate`, `predict` and `compile` of Keras models under a strategy.

The methods of Keras's JAX trainer open the scope of the model's strategy, and its step functions
are ours.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import keras

from stratagem import contexts as stack
from stratagem.contexts import get_strategy, has_strategy
from stratagem.devices.context_mesh import outside_context_mesh
from stratagem.execution.context.replica import get_replica_context
from stratagem.keras.numerics.step_mode import (
    StepMode,
    current_mode,
    example_fraction,
    lockstep_context,
)
from stratagem.keras.private.trainers import compile_arguments
from stratagem.keras.training.active_fit import acts_on_batches, uses_batch_logs
from stratagem.keras.training.callback_support import check_callbacks, listed
from stratagem.keras.training.dataset_adapter import adapted, is_dataset
from stratagem.keras.training.observed_steps import observe_steps, restore_steps
from stratagem.keras.training.planned_models import strategy_for_plan
from stratagem.keras.training.several_processes import settle_call
from stratagem.keras.training.step_events import ReportedTrainFunction
from stratagem.keras.training.step_functions import (
    HostBatches,
    PredictFunction,
    StepFunction,
    TrainOrTestFunction,
    logs_wanted,
)
from stratagem.keras.variables.made_in_scope import adopt_new, scope_of
from stratagem.keras.variables.variable_creation import adopt
from stratagem.messages import explain
from stratagem.observe.run_events.process_writer import current_events
from stratagem.tracebacks import filters_traceback
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.keras.private import JAXEpochIterator
    from stratagem.strategies.base.strategy import Strategy
    from stratagem.variables.registry import Home


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
    return ValueError(
        explain(
            f"Variable {variable.path!r} was created {place}, but the model runs under {owner}.",
            expected="a model and an optimizer created in the scope of the same strategy.",
            fix=fix,
            code="SG201",
        )
    )


def with_default_strategy(_original: object) -> Any:
    """Returns the property `distribute_strategy` of a model."""
    return property(
        lambda self: strategy_of(self) or get_strategy(),
        doc="The strategy that the model belongs to; the default one if none.",
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
        previous = logs_wanted.value, logs_wanted.is_current
        if name != "predict":
            acting = map(acts_on_batches, listed(bound.arguments.get("callbacks")))
            logs_wanted.value, logs_wanted.is_current = wanted, any(acting)
        try:
            with strategy.scope():
                return original(self, *args, **kwargs)
        finally:
            logs_wanted.value, logs_wanted.is_current = previous

    return filters_traceback(entered)


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


def state_in_variables(original: Callable[..., Any]) -> Any:
    """Returns the method through which `fit` passes state; ours stays in the variables."""

    def state(self: keras.Model, *args: object, **kwargs: object) -> Any:
        # `fit` calls this in each epoch, while devices wait. It has checked all variables before it
        # entered the scope.
        if has_strategy() or strategy_of(self) is not None:
            return ()
        return original(self, *args, **kwargs)

    return state


def yielding_host_batches(original: Callable[..., Any]) -> Any:
    """Returns the method of an epoch iterator that yields batches, before they are on a device."""

    def batches(self: JAXEpochIterator) -> Any:
        if not has_strategy():
            return original(self)
        return HostBatches(self.data_adapter.get_jax_iterator(), self.steps_per_epoch)

    return batches


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
