"""Replica functions of `fit`, `evaluate` and `predict`: one step on one replica."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from stratagem.execution.gradient import value_and_grad
from stratagem.execution.replica_context import ReplicaContext, get_replica_context
from stratagem.execution.tracing.functionalize import current_scope, on_global_model
from stratagem.keras.numerics.layers import true_rows
from stratagem.keras.numerics.metrics import results_of_all_replicas
from stratagem.keras.numerics.step_mode import (
    StepMode,
    StepTerms,
    calling_layers,
    current_mode,
    example_fraction,
    following,
    in_step,
    lockstep_context,
    record_loss,
    shares_batches,
    step_mode,
    terms_of,
    terms_of_step,
)
from stratagem.keras.private import (
    REGULARIZES_PER_ROW,
    flatten_layers,
    fresh_masks,
    ids_of_losses,
    loss_tracker,
    output_loss_trackers,
    takes_training,
    total_loss,
    unpack_x_y_sample_weight,
)
from stratagem.variables.layouts import is_remote

if TYPE_CHECKING:
    from jax.typing import ArrayLike


class ReplicaSteps:
    """Replica functions of one compiled Keras model."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._terms: dict[tuple[str, Any], StepTerms] = {}
        # For each array in the logs of the last step: its metric, and its place in the result; or
        # None if it is no result.
        self.sources_of_logs: list[tuple[keras.metrics.Metric, int] | None] = []

    @property
    def model(self) -> keras.Model:
        """The model."""
        return self._model

    def _overrides(self, *names: str) -> bool:
        return any(
            getattr(type(self._model), name) is not getattr(keras.Model, name) for name in names
        )

    @contextlib.contextmanager
    def _counted_over_replicas(self, step: str) -> Generator[None]:
        context = get_replica_context()
        trains = step == "train_step"
        has_islands = context is not None and context.strategy.islands is not None
        trains_apart = trains and has_islands
        mode = StepMode.MEAN if self._overrides(step, "compute_loss") else StepMode.SHARE
        trackers = output_loss_trackers(self._model)
        weights = contextlib.nullcontext() if trains_apart else on_global_model()
        remote = None if context is None else context.strategy.placement.remote
        shares = remote is not None and remote.shares_batches and trains
        counted = step_mode(mode, trackers, trains_apart=trains_apart, shares_batches=shares)
        with fresh_masks(), weights, counted, _regularizers_of_true_rows(self._model):
            yield

    def train(self, data: object) -> Any:
        """Runs a training step on this replica's part of a batch, local arrays as `fit` takes them.

        Returns logs of a custom `train_step` or `compute_metrics`, averaged over replicas; None for
        Keras's own.
        """
        return self._run("train_step", self._any_train, data)

    def test(self, data: object) -> Any:
        """Runs an evaluation step on this replica's part of a batch. Returns logs like `train`."""
        return self._run("test_step", self._any_test, data)

    def _run(self, name: str, step: Callable[[Any], Any], data: object) -> Any:
        def fresh_step(data: Any) -> Any:
            # Keras finds the owner of an added loss by its `id`. `stateless_call` forgets those of
            # earlier traces layer by layer, and drops a new loss that has got the id of an old one.
            for layer in flatten_layers(model):
                ids_of_losses(layer).clear()
            return step(data)

        model = self._model
        with self._counted_over_replicas(name):
            terms = self._terms_of(name, fresh_step, data)
            with following(terms):
                result = fresh_step(data)
            if current_mode() is StepMode.SHARE and any(map(_adds_losses, flatten_layers(model))):
                with in_step(mode=StepMode.MEAN):
                    self._terms_of(name, fresh_step, data, is_own=False)
            return result

    def _terms_of(
        self, name: str, step: Callable[[Any], Any], data: object, *, is_own: bool = True
    ) -> StepTerms | None:
        """Returns which numbers of a step of one's own are sums over rows; None for Keras's own.

        Of Keras's own step, only warns if layers add such sums to its losses.
        """
        context = get_replica_context()
        assert context is not None
        has_part = context.num_replicas_in_sync > 1 or shares_batches()
        has_part = has_part and context.strategy.islands is None
        if current_mode() is not StepMode.MEAN or not has_part or not context.batch.size:
            return None
        # The assignments of a layer that is built in the analysis would be lost.
        is_built = all(layer.built for layer in flatten_layers(self._model))
        key = name, jax.tree.structure(data)  # a step may compute other numbers without weights
        if key not in self._terms:
            if not is_built or context.strategy.variables.uninitialized():
                return None
            terms = terms_of_step(step, data, context)
            self._terms[key] = terms if is_own else StepTerms(has_mixed=terms.has_sums)
        self._terms[key].warn(f"{type(self._model).__name__}.{name}", context)
        return self._terms[key]

    def _any_train(self, data: Any) -> Any:
        if self._overrides("train_step"):
            return self._own_step("train_step", data, with_optimizer=True)
        return self._train(*unpack_x_y_sample_weight(data))

    def _any_test(self, data: Any) -> Any:
        if self._overrides("test_step"):
            return self._own_step("test_step", data, with_optimizer=False)
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        with _trainable_as_before(self._model):
            y_pred = self._call(x, training=False)
        loss = total_loss(self._model, x, y, y_pred, sample_weight, training=False)
        return self._update_metrics(loss, x, y, y_pred, sample_weight)

    def predict(self, data: object) -> Any:
        """Runs a prediction step on this replica's part of a batch and returns the outputs."""
        model = self._model
        if not self._overrides("predict_step"):
            with on_global_model(), _trainable_as_before(model):
                return self._call(unpack_x_y_sample_weight(data)[0], training=False)
        if not _takes_state(model.predict_step):
            return model.predict_step(data)
        state = [_values(model.trainable_variables), _values(model.non_trainable_variables)]
        outputs, non_trainable = model.predict_step(tuple(state), data)
        _assign(model.non_trainable_variables, non_trainable)
        return outputs

    def _call(self, x: object, *, training: bool) -> Any:
        kwargs = {"training": training} if takes_training(self._model) else {}
        with calling_layers():
            return self._model(x, **kwargs)

    def _train(self, x: object, y: object, sample_weight: object) -> Any:
        model = self._model

        def scaled_loss() -> Any:
            y_pred = self._call(x, training=True)
            loss = total_loss(model, x, y, y_pred, sample_weight, training=True)
            return model.optimizer.scale_loss(loss), (loss, y_pred)

        with _trainable_as_before(model):
            variables = model.trainable_variables
            (_, (loss, y_pred)), grads = (
                value_and_grad(scaled_loss, variables, has_aux=True)
                if variables
                else (scaled_loss(), [])
            )
        # Keras passes the optimizer zeros, not None, for variables that the loss does not use.
        filled = [
            jnp.zeros(variable.shape, variable.dtype) if grad is None else grad
            for grad, variable in zip(grads, model.trainable_variables, strict=True)
        ]
        if filled:
            model.optimizer.apply(filled, model.trainable_variables)
        return self._update_metrics(loss, x, y, y_pred, sample_weight)

    def _update_metrics(
        self, loss: ArrayLike, x: object, y: object, y_pred: object, sample_weight: object
    ) -> Any:
        """Updates metrics; returns logs of a custom `compute_metrics`, else None."""
        context = get_replica_context()
        assert context is not None
        if (tracker := loss_tracker(self._model)) is not None:
            record_loss(tracker, terms_of([loss], context)[0], context)
        if not self._overrides("compute_metrics"):
            self._model.compute_metrics(x, y, y_pred, sample_weight)
            return None
        with results_of_all_replicas() as results:
            logs = self._model.compute_metrics(x, y, y_pred, sample_weight)
        return self._reported(logs, results)

    def _own_step(self, step: str, data: object, *, with_optimizer: bool) -> Any:
        """Runs a custom step: `step(state, data)` as in Keras on JAX, or `step(data)`.

        The state holds this replica's values; without it the step uses the variables directly.
        """
        model, method = self._model, getattr(self._model, step)
        with results_of_all_replicas() as results:
            if not _takes_state(method):
                return self._reported(method(data), results)
            groups = [model.trainable_variables, model.non_trainable_variables]
            if with_optimizer:
                groups.append(model.optimizer.variables)
            groups.append(model.metrics_variables)
            logs, state = method(tuple(_values(group) for group in groups), data)
            for group, values in zip(groups, state, strict=True):
                _assign(group, values)
            return self._reported(logs, results)

    def _reported(self, logs: Mapping[str, object], results: dict[int, Any]) -> Any:
        """Averages logs over replicas, except metric results, which are already global."""
        context = get_replica_context()
        assert context is not None
        leaves, structure = jax.tree.flatten(dict(logs))
        found = [results.get(id(leaf)) for leaf in leaves]
        sources = [
            one and (one[1], one[2]) if one and one[0] is leaf else None
            for one, leaf in zip(found, leaves, strict=True)
        ]
        self.sources_of_logs = sources
        own = [
            leaf
            for leaf, source in zip(leaves, sources, strict=True)
            if isinstance(leaf, jax.Array) and source is None
        ]
        floats = [
            leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.astype("float32")
            for leaf in own
        ]
        averages = iter([_average(term, context) for term in terms_of(floats, context)])
        are_own = {id(leaf) for leaf in own}
        return structure.unflatten(
            [next(averages) if id(leaf) in are_own else leaf for leaf in leaves]
        )


def _adds_losses(layer: keras.layers.Layer) -> bool:
    # A regularizer of activities is averaged by rows in any case (docs/concepts/exactness.md).
    return bool(ids_of_losses(layer)) and layer.activity_regularizer is None


def _takes_state(step: Callable[..., Any]) -> bool:
    """Returns True if a custom step takes the state as an argument, as Keras's do on JAX."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    required = [one for one in parameters if one.kind in kinds and one.default is one.empty]
    takes_any = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
    return takes_any or len(required) > 1


@contextlib.contextmanager
def _trainable_as_before(model: keras.Model) -> Generator[None]:
    """Drops assignments of layers to trainable variables, as Keras's own steps do.

    `keras.layers.SpectralNormalization` assigns the kernel of the layer that it wraps.
    """
    variables = model.trainable_variables
    before = _values(variables)
    yield
    scope = current_scope()
    assert scope is not None
    for variable, value in zip(variables, before, strict=True):
        if id(variable) not in scope.writes:
            continue
        if is_remote(variable):  # a value that is written would replace the servers' update
            scope.withdraw(variable)
        else:
            scope.add_update((variable, value))


def _values(variables: list[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def _assign(variables: list[Any], values: Iterable[object]) -> None:
    for variable, value in zip(variables, values, strict=True):
        if value is not variable.value:
            variable.assign(value)


def _average(value: jax.Array, context: ReplicaContext) -> Any:
    return context.all_reduce("sum", value * example_fraction(context, value.dtype))


@contextlib.contextmanager
def _regularizers_of_true_rows(model: keras.Model) -> Generator[None]:
    """Makes activity regularizers use the examples of all replicas during a step.

    Eager replicas take turns within a step; the last one to leave restores the regularizer.
    """
    layers = [layer for layer in flatten_layers(model) if layer.activity_regularizer is not None]
    if lockstep_context() is None:
        layers = []
    for layer in layers:
        if not isinstance(layer.activity_regularizer, _TrueRowsRegularizer):
            layer.activity_regularizer = _TrueRowsRegularizer(layer.activity_regularizer)
        layer.activity_regularizer.num_users += 1
    try:
        yield
    finally:
        for layer in layers:
            layer.activity_regularizer.num_users -= 1
            if not layer.activity_regularizer.num_users:
                layer.activity_regularizer = layer.activity_regularizer.original


class _TrueRowsRegularizer:
    """Activity regularizer whose mean over true examples matches a single device."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.num_users = 0

    def __call__(self, output: jax.Array) -> Any:
        context = lockstep_context()
        assert context is not None
        loss = self.original(true_rows(output, context))
        if not REGULARIZES_PER_ROW:
            fraction = example_fraction(context, loss.dtype)
            return loss / jnp.where(fraction == 0, 1, fraction)  # no rows, no loss
        if not context.batch.is_padded or not context.batch.has_examples:
            return loss
        # Keras divides by the padded rows.
        num_examples = jnp.maximum(jnp.asarray(context.num_examples, loss.dtype), 1)
        return loss * ((context.batch.size or 0) / num_examples)
