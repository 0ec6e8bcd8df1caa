"""Model functions as steps of a replica, the variables that they create, and their checkpoints."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import run_on_first
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.saving import CheckpointOptions, load_manifest
from stratagem.checkpoint.storage.files import read_arrays
from stratagem.errors import invalid
from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.spec import (
    EstimatorSpec,
    Minimize,
    ModeKeys,
    ModelFunction,
    as_train_ops,
    naming_values,
)
from stratagem.execution import summary
from stratagem.execution.gradient import value_and_grad
from stratagem.execution.replica_context import get_replica_context
from stratagem.execution.summary.collector import Collector
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope, is_uninitialized
from stratagem.keras.numerics.optimizer import build_in_replica
from stratagem.keras.numerics.step_mode import StepMode, example_fraction, record_loss, step_mode
from stratagem.keras.private import fresh_names
from stratagem.keras.training.step_functions import MetricLogs
from stratagem.keras.variables.creation import Variable
from stratagem.keras.variables.requests import VariableRequest, variables_from
from stratagem.parameter_server.keras.optimizer import give_to_servers, share_name
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    from stratagem.estimator.run_config import RunConfig
    from stratagem.strategies.strategy import Strategy


# Variable store of a model function: reuses variables by creation order across calls.

GLOBAL_STEP = "global_step"

# Store of the model function being called. Eager replicas run in threads, each with a copy.
current_store: contextvars.ContextVar[VariableStore | None] = contextvars.ContextVar(
    "variable_store", default=None
)


class VariableStore:
    """Variables that one model function creates under one strategy.

    Within a mode, variables are identified by creation order. Modes share variables of the same
    path, except those of metrics.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._modes: dict[str, _ModeVariables] = {}
        self._named: dict[str, Any] = {}
        self._strategy = strategy
        with strategy.scope(), variables_from(None):
            self.global_step = Variable(0, trainable=False, name=GLOBAL_STEP, dtype="int32")
        self._named[GLOBAL_STEP] = self.global_step

    @contextlib.contextmanager
    def call(self, mode: str) -> Generator[None]:
        """Reuses or creates the mode's variables inside the `with` block.

        Automatic layer names restart, so paths are the same in every call.
        """
        variables = self._modes.setdefault(mode, _ModeVariables(mode))
        source = _CallVariables(self, variables)
        token = current_store.set(self)
        try:
            with fresh_names(), variables_from(source):
                yield
        finally:
            current_store.reset(token)
        source.end()

    def consistent_reads(self) -> contextlib.AbstractContextManager[None]:
        """Makes reads in the `with` block consistent while other workers train on the servers."""
        if not self._strategy.placement.is_remote:
            return contextlib.nullcontext()
        return self._strategy.placement.remote.variables.caching_reads()

    def is_complete(self, mode: str) -> bool:
        """Returns True once a call of this mode has finished."""
        return mode in self._modes and self._modes[mode].is_complete

    def variables_of(self, mode: str) -> list[Any]:
        """Returns the variables of a mode in creation order."""
        return list(self._modes[mode].variables) if mode in self._modes else []

    def register(self, variable: keras.Variable) -> None:
        """Adds a variable that the model function uses but did not create."""
        if not any(variable is known for known in self._named.values()):
            self._named[self._new_name(variable.path)] = variable

    @property
    def named(self) -> dict[str, Any]:
        """All variables except those of metrics, by path; duplicate paths are numbered."""
        return dict(self._named)

    def find(self, name: str) -> Any:
        """Returns the variable of that name, or None."""
        return self._named.get(name)

    def add(self, name: str, variable: keras.Variable) -> None:
        """Adds a new variable."""
        self._named[name] = variable

    def _new_name(self, path: str) -> str:
        number = 1
        while _name(path, number) in self._named:
            number += 1
        return _name(path, number)


@dataclasses.dataclass
class _ModeVariables:
    """Variables of one mode and the requests that created them."""

    name: str
    requests: list[VariableRequest] = dataclasses.field(default_factory=list[VariableRequest])
    variables: list[Any] = dataclasses.field(default_factory=list[Any])
    is_complete: bool = False


class _CallVariables:
    """Variable source for one call of the model function."""

    def __init__(self, store: VariableStore, mode: _ModeVariables) -> None:
        self._store = store
        self._mode = mode
        self._count = 0
        self._paths: Counter[str] = Counter()

    def existing(self, request: VariableRequest) -> keras.Variable | None:
        mode = self._mode
        if self._count < len(mode.variables):
            known = mode.requests[self._count]
            if (known.shape, known.dtype) != (request.shape, request.dtype):
                raise _different(
                    f"Variable {self._count + 1} of the model function in mode {mode.name!r} is "
                    f"{request.path!r} with shape {request.shape} and dtype {request.dtype}; in an "
                    f"earlier call it was {known.path!r} with shape {known.shape} and dtype "
                    f"{known.dtype}."
                )
            self._count += 1
            return mode.variables[self._count - 1]
        if mode.is_complete:
            raise _different(
                f"The model function created more than the {len(mode.variables)} variables of an "
                f"earlier call in mode {mode.name!r}: {request.path!r} with shape {request.shape}."
            )
        if request.is_summed:
            return None
        self._paths[request.path] += 1
        name = _name(request.path, self._paths[request.path])
        found = self._store.find(name)
        if found is None:
            return None
        if (tuple(found.shape), found.dtype) != (request.shape, request.dtype):
            raise _different(
                f"Variable {name!r} has shape {request.shape} and dtype {request.dtype} in mode "
                f"{mode.name!r}, but shape {tuple(found.shape)} and dtype {found.dtype} in another "
                "mode: different layers need different names."
            )
        self._take(request, found)
        return found

    def add(self, request: VariableRequest, variable: keras.Variable) -> None:
        self._take(request, variable)
        if not request.is_summed:
            self._store.add(_name(request.path, self._paths[request.path]), variable)

    def _take(self, request: VariableRequest, variable: keras.Variable) -> None:
        self._mode.requests.append(request)
        self._mode.variables.append(variable)
        self._count += 1

    def end(self) -> None:
        mode = self._mode
        if self._count < len(mode.variables):
            missing = mode.requests[self._count]
            raise _different(
                f"The model function created {self._count} variables in mode {mode.name!r}, but "
                f"{len(mode.requests)} in an earlier call: {missing.path!r} with shape "
                f"{missing.shape} is missing."
            )
        mode.is_complete = True


def _name(path: str, number: int) -> str:
    """Numbers repeated paths the way checkpoints do."""
    return path if number == 1 else f"{path}#{number}"


def _different(received: str) -> ValueError:
    return invalid(
        received,
        expected="the same variables in the same order in every call of a mode.",
        fix="create layers, optimizers and metrics unconditionally in each call of the model "
        "function; or build them outside it, in the strategy's scope.",
        code="SG901",
    )


# Checkpoints of an Estimator: saving, restoring and reading of variables.

CHECKPOINT_NAME = "model.ckpt"
# TensorFlow's default, more than a year. It disables keeping checkpoints by age.
_NEVER_HOURS = 10_000
# Name of the model function's variables in a checkpoint.
VARIABLES = "variables"


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest checkpoint in an Estimator's folder, or None. Call on every process."""
    manager = CheckpointManager(Checkpoint(), folder, None, checkpoint_name=CHECKPOINT_NAME)
    return manager.latest_checkpoint


class ModelCheckpoints:
    """Saves and restores a store's variables; `is_initial` until they are restored or trained."""

    def __init__(self, store: VariableStore, folder: str, config: RunConfig) -> None:
        self._store = store
        self._folder = folder
        self._config = config
        self._values: tuple[str | None, int] = (None, 0)
        self.is_initial = True

    def save(self) -> str:
        """Saves all variables unless a checkpoint has these values. Call on every process."""
        path, count = self._values
        name = f"{CHECKPOINT_NAME}-{int(self._store.global_step)}"
        next_path, is_all = Path(self._folder, name).absolute(), count == len(self._store.named)
        if path is not None and is_all and Path(path).absolute() == next_path:
            return path
        hours = self._config.keep_checkpoint_every_n_hours
        manager = CheckpointManager(
            self._checkpoint(),
            self._folder,
            self._config.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=hours if hours < _NEVER_HOURS else None,
            checkpoint_name=CHECKPOINT_NAME,
            step_counter=self._store.global_step,
        )
        with self._store.consistent_reads():
            path = manager.save(check_interval=False)
        assert path is not None
        self._values = (path, len(self._store.named))
        return path

    def restore(self, path: str) -> None:
        """Restores all variables unless they already have these values. Call on every process."""
        count = len(self._store.named)
        if self._values == (path, count):
            return
        # Each replica gets its own component of an on-read variable back.
        status = self._checkpoint().read(path, CheckpointOptions(restore_components=True))
        status.expect_partial()  # evaluation has no optimizer
        self._values = (path, count)
        self.is_initial = False

    def forget(self) -> None:
        """Marks the variables as changed since the last checkpoint."""
        self._values = (None, 0)
        self.is_initial = False

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(**{VARIABLES: self._store.named})


def read_names(path: str) -> list[str]:
    """Returns the sorted names of a checkpoint's variables. Call on every process."""
    return sorted(run_on_first("Estimator.get_variable_names", lambda: _entries(path)[2]))


def read_values(path: str) -> dict[str, Any]:
    """Returns the values of a checkpoint's variables by name."""
    manifest, item, _ = _entries(path)
    # In one read: array by array, 400 variables take seven times as long.
    return dict(read_arrays(Path(path), manifest, [item])[item])


def read_variable(path: str, name: str) -> Any:
    """Returns the value of one variable in a checkpoint."""
    manifest, item, names = _entries(path)
    wanted = name.removesuffix(":0")
    if wanted not in names:
        raise invalid(
            f"{path} contains no variable named {name!r}.",
            f"one of {sorted(names)}.",
            "correct the name; get_variable_names() lists all names.",
        )
    return read_arrays(Path(path), manifest, {item: [wanted]})[item][wanted]


def _entries(path: str) -> tuple[dict[str, Any], str, list[str]]:
    """Returns a checkpoint's manifest, the item that holds the variables, and their names."""
    manifest = load_manifest(Path(path))
    item = manifest["objects"][VARIABLES]["item"]
    return manifest, item, [entry["path"] for entry in manifest["items"][item]]


# Steps of a model function.


def spec_hooks(spec: EstimatorSpec, mode: str) -> tuple[SessionRunHook, ...]:
    """Returns a spec's hooks for a mode, the chief's hooks last."""
    if mode == ModeKeys.TRAIN:
        return (*(spec.training_hooks or ()), *(spec.training_chief_hooks or ()))
    hooks = spec.evaluation_hooks if mode == ModeKeys.EVAL else spec.prediction_hooks
    return tuple(hooks or ())


def tensors_of(hook: SessionRunHook) -> Mapping[str, Any]:
    """Returns the values that a hook of a spec holds, by tag, as `LoggingTensorHook` does."""
    tensors = getattr(hook, "tensors", None)
    return tensors if isinstance(tensors, Mapping) else {}


class ModelStep:
    """Step of a model function in one mode; `spec` is its result from the last trace."""

    mode: str

    def __init__(self, function: ModelFunction, store: VariableStore, strategy: Strategy) -> None:
        self._function = function
        self.store = store
        self.strategy = strategy
        self.spec: EstimatorSpec | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the spec, which holds tracers."""
        return {**vars(self), "spec": None}

    def step(self, features: object, labels: object) -> Any:
        """Runs in replica context; `labels` is None if there are none."""
        raise NotImplementedError

    def prepare(self, batch: tuple[Any, Any]) -> EstimatorSpec:
        """Traces the step, which creates its variables, without running it."""
        arguments = flatten_arguments(batch, {}, num_replicas=self.strategy.num_replicas_in_sync)
        with self.strategy.scope():
            executor: Any = self.strategy.executor
            executor.program(self.step, arguments)
        assert self.spec is not None
        return self.spec

    def reset(self) -> None:
        """Resets what the steps of a loop accumulate. Call after `prepare`."""

    def run(self, batch: tuple[Any, Any]) -> Any:
        """Runs the step on all replicas."""
        return self.strategy.run(self.step, args=batch)

    def call(
        self,
        features: object,
        labels: object,
        extra: Callable[[EstimatorSpec], Any] = lambda spec: None,
    ) -> tuple[dict[str, Any], Any]:
        """Calls the model function once, then `extra` with its spec; returns values and extra."""
        with self.store.call(self.mode), naming_values() as named:
            spec = self._function(features, labels, self.mode)
            computed = extra(spec)
        self.spec = spec
        values = {
            "loss": spec.loss,
            "named": dict(named),
            # Tensors given as names are looked up when they are fetched.
            "held": [
                {name: value for name, value in one.items() if isinstance(value, jax.Array)}
                for one in map(tensors_of, spec_hooks(spec, self.mode))
            ],
        }
        return values, computed


def reported(values: object) -> Any:
    """Averages floating-point scalars over replicas, as hooks see them. Call in replica context."""
    context = get_replica_context()
    assert context is not None

    def average(value: object) -> Any:
        array = jnp.asarray(value)
        is_average = array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.floating)
        if not is_average or context.num_replicas_in_sync == 1:
            return array
        return context.all_reduce("sum", array * example_fraction(context, array.dtype))

    return jax.tree.map(average, values)


# Prediction step: predictions as rows in input order.


class PredictionStep(ModelStep):
    """Computes `spec.predictions` on each replica."""

    mode = ModeKeys.PREDICT

    def step(self, features: object, labels: object) -> Any:
        """Returns this replica's predictions and values for hooks."""
        with step_mode(StepMode.MEAN):
            values, _ = self.call(features, None)
            assert self.spec is not None
            named = {key: values[key] for key in ("named", "held")}
            return {**reported(named), "predictions": self.spec.predictions}


def select_keys(predictions: object, keys: str | Sequence[str] | None) -> list[str] | None:
    """Returns the names of the predictions to return; None if they are not a dict."""
    if keys is None:
        return list(predictions) if isinstance(predictions, Mapping) else None
    wanted = [keys] if isinstance(keys, str) else list(keys)
    known = list(predictions) if isinstance(predictions, Mapping) else []
    if not wanted or not set(wanted) <= set(known):
        raise invalid(
            f"predict_keys={wanted} is empty or contains unknown names.",
            f"one or more of {known}, the names of the predictions.",
            "correct the names, or omit predict_keys for all predictions.",
        )
    return [key for key in known if key in wanted]


def prediction_batches(
    strategy: Strategy, predictions: Any, keys: list[str] | None
) -> Iterator[Any]:
    """Yields each replica's predictions as NumPy arrays, without padding rows."""
    wanted = predictions if keys is None else {key: predictions[key] for key in keys}
    leaves, structure = jax.tree.flatten(wanted, is_leaf=lambda leaf: hasattr(leaf, "components"))
    for parts in zip(*map(strategy.local_results, leaves), strict=True):
        batch = [np.asarray(part) for part in parts]
        if any(part.ndim == 0 or len(part) for part in batch):  # skips replicas without examples
            yield jax.tree.unflatten(structure, batch)


def split_examples(batch: object) -> Iterator[Any]:
    """Yields the rows of a batch."""
    leaves = jax.tree.leaves(batch)
    lengths = {len(leaf) if leaf.ndim else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"Predictions of a batch have the shapes {[leaf.shape for leaf in leaves]}, not one "
            "row per example: pass yield_single_examples=False to get whole batches."
        )
    for row in range(len(leaves[0])):
        yield jax.tree.map(lambda leaf, row=row: leaf[row], batch)


# Evaluation step: metrics and average loss over a dataset.


class EvaluationStep(ModelStep):
    """Updates a model function's metrics on each replica and averages the loss over examples."""

    mode = ModeKeys.EVAL

    def __init__(self, function: ModelFunction, store: VariableStore, strategy: Strategy) -> None:
        super().__init__(function, store, strategy)
        self._metrics: dict[str, keras.metrics.Metric] = {}
        self._logs = MetricLogs(self, self.strategy)

    def step(self, features: object, labels: object) -> Any:
        """Updates the metrics and returns values for hooks."""
        with step_mode(StepMode.MEAN):
            values, loss = self.call(features, labels, _record_loss)
            assert self.spec is not None
            metrics = dict(self.spec.eval_metric_ops or {})
            if "loss" in metrics:
                raise ValueError(
                    'eval_metric_ops contains a metric named "loss", which is the average of the '
                    "spec's loss: rename it."
                )
            self._metrics = {**metrics, "loss": loss}
            return reported(values)

    def reset(self) -> None:
        """Resets all metrics."""
        with self.strategy.scope():
            for metric in self._metrics.values():
                metric.reset_state()

    def results(self) -> dict[str, Any]:
        """Returns the current metrics over all replicas."""
        return self._logs.so_far()

    # `MetricLogs` reads these two members of a model.

    @property
    def metrics_variables(self) -> list[Any]:
        """Variables of all metrics."""
        return [variable for metric in self._metrics.values() for variable in metric.variables]

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the results of all metrics; a metric with several results adds each of them."""
        results: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            result = metric.result()
            results |= result if isinstance(result, dict) else {name: result}
        return results


def _record_loss(spec: EstimatorSpec) -> keras.metrics.Mean:
    tracker = keras.metrics.Mean(name="loss")
    context = get_replica_context()
    assert context is not None
    if context.num_examples is None:
        tracker.update_state(spec.loss)
    else:
        record_loss(tracker, spec.loss, context)
    return tracker


# Training step: gradients of a model function, applied by its optimizers.


@dataclasses.dataclass(frozen=True)
class _UpdatePlan:
    """Variables, losses and optimizers of a model function's updates, from its first call.

    `variables[i]` and `optimizers[i]` belong to update i; `losses` groups updates by loss.
    """

    variables: list[list[Any]]
    losses: list[list[int]]
    optimizers: list[Any]


class TrainingStep(ModelStep):
    """Computes `spec.train_op` on each replica, with gradients averaged over replicas.

    The model function runs inside the differentiated function. Each of several losses is
    differentiated in a separate call from the same state; only the call for the first update's
    loss keeps its assignments and summaries.
    """

    mode = ModeKeys.TRAIN
    _plan: _UpdatePlan | None = None

    def prepare(self, batch: tuple[Any, Any]) -> EstimatorSpec:
        """Traces the step and places its variables on parameter servers, if any."""
        spec = super().prepare(batch)
        if self.strategy.placement.is_remote:
            assert self._plan is not None
            self.strategy.placement.remote.variables.place(self.store.global_step)
            for optimizer in self._plan.optimizers:
                give_to_servers(optimizer)
        return spec

    def step(self, features: object, labels: object) -> Any:
        """Makes one update and returns values for hooks."""
        with step_mode(StepMode.MEAN):
            if self._plan is None or not self.store.is_complete(self.mode):
                self._plan = self._find_plan(features, labels)
            if any(is_uninitialized(one) for one in self.store.variables_of(self.mode)):
                return {}  # the step is traced again, with initialized variables
            return self._train(self._plan, features, labels)

    def _find_plan(self, features: object, labels: object) -> _UpdatePlan:
        """Calls the model function once to find its updates, and drops its assignments."""
        outer = current_scope()
        assert outer is not None
        plans: list[_UpdatePlan] = []

        def plan(spec: EstimatorSpec) -> None:
            ops = as_train_ops(spec.train_op, spec.loss)
            trainable = self._trainable(scope)
            variables = [trainable if op.variables is None else list(op.variables) for op in ops]
            plans.append(_UpdatePlan(variables, _by_loss(ops), [op.optimizer for op in ops]))
            _build(ops, plans[0], self.strategy)

        with Collector(), ReplicaScope(outer.get_current_value) as scope:
            self.call(features, labels, plan)
        return plans[0]

    def _trainable(self, scope: ReplicaScope) -> list[Any]:
        """Returns the trainable variables that the model function created or read."""
        created = self.store.variables_of(self.mode)
        known = {id(variable) for variable in created}
        used: list[Any] = [
            variable
            for variable in self.strategy.variables.live()
            if id(variable) in scope.read_ids and id(variable) not in known
        ]
        for variable in used:
            home = home_of(variable)
            if variable is self.store.global_step or home is None:
                continue
            if not (home.kind is VariableKind.ON_READ and home.aggregation.name == "SUM"):
                self.store.register(variable)  # all but those of metrics
        return _distinct(variable for variable in [*created, *used] if variable.trainable)

    def _train(self, plan: _UpdatePlan, features: object, labels: object) -> Any:
        outer = current_scope()
        assert outer is not None
        grads: dict[int, list[Any]] = {}
        for group in plan.losses[1:]:
            with Collector(), ReplicaScope(outer.get_current_value):
                grads |= self._gradients(plan, group, features, labels)[0]
        first_grads, ops, values = self._gradients(plan, plan.losses[0], features, labels)
        grads |= first_grads
        for index, op in enumerate(ops):
            pairs = [
                (grad, variable)
                for grad, variable in zip(grads[index], plan.variables[index], strict=True)
                if grad is not None
            ]
            if not pairs:
                raise invalid(
                    f"The loss of {op.optimizer.name!r} depends on none of the variables "
                    f"{[variable.path for variable in plan.variables[index]]}.",
                    "a loss computed from trainable variables.",
                    "compute the loss from a layer's output, or pass other variables.",
                )
            op.optimizer.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        self.store.global_step.assign_add(1)  # other workers may have counted, too
        values = reported(values)
        summary.scalar("loss", values["loss"])
        return values

    def _gradients(
        self, plan: _UpdatePlan, group: list[int], features: object, labels: object
    ) -> tuple[dict[int, list[Any]], list[Minimize], Any]:
        """Returns the gradients of one loss by update, the updates, and the call's values."""
        found: list[list[Minimize]] = []

        def scaled_loss() -> Any:
            def build(spec: EstimatorSpec) -> list[Minimize]:
                ops = as_train_ops(spec.train_op, spec.loss)
                _build(ops, plan, self.strategy)
                return ops

            values, ops = self.call(features, labels, build)
            found.append(ops)
            op = ops[group[0]]
            return op.optimizer.scale_loss(jnp.reshape(op.loss, ())), values

        variables = _distinct(variable for op in group for variable in plan.variables[op])
        (_, values), grads = value_and_grad(scaled_loss, variables, has_aux=True)
        by_id = {id(v): grad for v, grad in zip(variables, grads, strict=True)}
        of_ops = {op: [by_id[id(variable)] for variable in plan.variables[op]] for op in group}
        return of_ops, found[-1], values


def _distinct(variables: Iterable[keras.Variable]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _by_loss(ops: list[Minimize]) -> list[list[int]]:
    """Groups updates by loss; an optimizer with loss scaling gets a group to itself."""
    groups: dict[tuple[int, Any], list[int]] = {}
    for index, op in enumerate(ops):
        scales = hasattr(op.optimizer, "inner_optimizer") or op.optimizer.loss_scale_factor
        groups.setdefault((id(op.loss), id(op.optimizer) if scales else None), []).append(index)
    return list(groups.values())


def _build(ops: list[Minimize], plan: _UpdatePlan, strategy: Strategy) -> None:
    """Builds the optimizers inside the model function call that created them."""
    for op, first in zip(ops, plan.optimizers, strict=True):
        same = [index for index, other in enumerate(ops) if other.optimizer is op.optimizer]
        if not op.optimizer.built:
            if strategy.placement.is_remote:
                share_name(op.optimizer, first, strategy.placement.remote.variables)
            targets = _distinct(variable for index in same for variable in plan.variables[index])
            build_in_replica(op.optimizer, targets, strategy)
