"""Keras classes and functions of parameter servers, used by `stratagem.keras`."""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import keras
import numpy as np

from stratagem import contexts as stack
from stratagem.contexts import get_strategy
from stratagem.errors import explain, invalid, raise_reported
from stratagem.execution.replica_context import ReplicaContext
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.numerics.optimizer import apply_with_rows
from stratagem.keras.private import count_update, filter_empty_gradients
from stratagem.keras.training.datasets import DatasetCreator
from stratagem.keras.training.step_functions import (
    HostBatches,
    MetricLogs,
    PredictFunction,
    StepFunction,
    TrainOrTestFunction,
    logs_wanted,
)
from stratagem.keras.variables.requests import VariableRequest, current_annotations
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.coordinator.remote_value import RemoteValue, RemoteValueStatus
from stratagem.parameter_server.keras.optimizer import (
    check_known,
    create_slot,
    final_gradients,
    give_to_servers,
    note_built,
    send_all,
    send_gradients,
    with_values,
)
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.keras.variable import (
    KeyedVariable,
    ParameterServerVariable,
    ShardedParameterServerVariable,
    class_of_slot,
)
from stratagem.parameter_server.keras.worker_data import (
    BatchAssigner,
    BatchAssignment,
    WorkerBatches,
    WorkerData,
)
from stratagem.strategies.placement import PlacementRules
from stratagem.strategies.strategy import Strategy
from stratagem.variables.layouts import is_remote

# `fit`, `evaluate` and `predict` on the workers of a parameter-server cluster.
#
# The coordinator reads the data and assigns batches to workers, with a few groups in flight for
# each.


_IN_FLIGHT_PER_WORKER = 3


class _WorkerSteps:
    """Function sent to workers: runs groups of batches of kind "train", "test" or "predict"."""

    def __init__(self, model: keras.Model, kind: str) -> None:
        self._model = model
        self._kind = kind
        self._function: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_function": None}

    def __call__(
        self,
        batches: list[Any] | WorkerBatches,
        weights: Sequence[float] | None = None,
        assignment: BatchAssignment | None = None,
    ) -> Any:
        """Runs the batches as one group of steps and returns the logs or the outputs.

        `weights` are the gradient weights of the batches if workers share them, else None. With an
        `assignment`, `batches` is the `WorkerBatches` to take them from.
        """
        strategy: Any = get_strategy()
        if isinstance(batches, WorkerBatches):
            assert assignment is not None
            batches, weights = batches.take(assignment), assignment.weights
        if weights is not None:
            return self._run_parts(strategy, batches, weights)
        return self._run(strategy, batches)

    def _run_parts(
        self,
        strategy: Strategy,
        batches: list[Any],
        weights: Sequence[float],
    ) -> Any:
        logs = None
        remote = strategy.placement.remote
        for batch, weight in zip(batches, weights, strict=True):
            remote.gradient_weight = weight
            remote.shares_batches = True
            collected = [] if weight else list(remote.variables.collected.values())
            counts = [np.array(variable.storage) for variable in collected]
            try:
                logs = self._run(strategy, [batch])
            finally:
                # Functions that are scheduled later compute whole batches of their own.
                remote.gradient_weight, remote.shares_batches = 1.0, False
                for variable, count in zip(collected, counts, strict=True):
                    variable.storage = count
        return logs

    def _run(self, strategy: Strategy, batches: list[Any]) -> Any:
        if self._function is None:
            if self._kind == "predict":
                self._function = PredictFunction(self._model, strategy)
            else:
                self._function = TrainOrTestFunction(
                    self._model, strategy, training=self._kind == "train"
                )
        iterator = HostBatches(batches, len(batches))
        if self._kind == "predict":
            return self._function((), iterator)[0]
        logs = self._function.last_logs(self._function.run_next(iterator))
        if logs is None:
            return None
        numbers = {
            id(variable): number
            for number, variable in strategy.placement.remote.variables.collected.items()
        }
        return logs[0], [one and _source_of(one[0], one[1], numbers) for one in logs[1]]


# A metric, as other processes know it: its class, and the numbers of its variables.
_Metric = tuple[str, tuple[int, ...]]


def _source_of(
    metric: keras.metrics.Metric, place: int, numbers: Mapping[int, int]
) -> tuple[_Metric, int] | None:
    """Returns a metric with numbers, and a place in its result; None if only this worker has it."""
    own = tuple(numbers[id(one)] for one in metric.variables if id(one) in numbers)
    if own:
        return (type(metric).__qualname__, own), place
    if metric.variables:
        warnings.warn(
            explain(
                f"The metric {metric.name!r} was created in a step on a worker.",
                expected="metrics that the coordinator has, too: this one counts the batches of "
                "this worker alone.",
                fix="create it in `__init__` of the model, or before `fit`.",
            ),
            UserWarning,
            stacklevel=2,
        )
    return None


def _mean_logs(values: Sequence[RemoteValue], weights: Sequence[float]) -> Any:
    """Waits for the logs that workers computed of parts of a batch in a custom step.

    Returns their mean by examples, and their sources.
    """
    parts = [value.fetch() for value in values]
    if parts[0] is None:
        return None

    def mean(*leaves: Any) -> Any:
        if not isinstance(leaves[0], np.ndarray | np.generic):
            return leaves[-1]
        pairs = zip(leaves, weights, strict=True)
        return sum(leaf * np.asarray(weight, leaf.dtype) for leaf, weight in pairs if weight)

    return jax.tree.map(mean, *(own for own, _ in parts)), parts[0][1]


def _joined_outputs(values: Sequence[RemoteValue]) -> Any:
    """Waits for the outputs of one group, and returns them concatenated."""
    parts = [value.fetch() for value in values]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


class _BatchScheduler(StepFunction):
    """Schedules groups of batches from Keras's iterator on workers."""

    def __init__(self, model: keras.Model, strategy: Strategy, kind: str) -> None:
        if model.run_eagerly:
            raise invalid(
                "The model has run_eagerly=True under a ParameterServerStrategy.",
                expected="compiled steps, which run on workers.",
                fix="debug the model under sg.OneDeviceStrategy, or without a strategy.",
                code="SG411",
            )
        self._model = model
        self._coordinator = ClusterCoordinator(strategy)
        self._kind = kind
        self._step = _WorkerSteps(model, kind)
        self._variable_client = strategy.placement.remote.variables
        is_synchronous = strategy.placement.remote.is_synchronous
        self._shares = kind == "train" and is_synchronous
        self._is_in_order = is_synchronous or self._coordinator.num_workers == 1
        # Functions that wait for the result of a group.
        self._groups: collections.deque[Callable[[], Any]] = collections.deque()
        self._outstanding: dict[int, collections.deque[RemoteValue]] = collections.defaultdict(
            collections.deque
        )
        self._source: Any = None

    def begin(self, iterator: Iterator[Any]) -> bool:
        """Discards leftovers of an interrupted call; returns True for a new iterator."""
        if self._source is iterator:
            return False
        self._source = iterator
        self._groups.clear()
        return True

    @contextlib.contextmanager
    def raised_once(self) -> Generator[None]:
        """Drops all groups after an error in a `with` block, so that none is raised twice."""
        try:
            yield
        except StopIteration:
            raise
        except Exception:
            self._groups.clear()
            with contextlib.suppress(Exception):
                self._coordinator.strategy.executor.settle()
            raise

    @property
    def num_in_flight(self) -> int:
        """Limit on groups in flight."""
        return _IN_FLIGHT_PER_WORKER * self._coordinator.num_workers

    def schedule_next(self, iterator: Iterator[Any]) -> None:
        """Schedules the next group of host batches; may raise the error of an earlier group."""
        raise_reported()
        if isinstance(iterator, HostBatches) and isinstance(iterator.source, BatchAssigner):
            self._groups.append(self._schedule_assigned(iterator.source))
            return
        batches: list[Any] = []
        for _ in range(self._model.steps_per_execution):
            try:
                batches.append(jax.tree.map(_plain, next(iterator)))
            except StopIteration:
                break
        if not batches:
            raise StopIteration
        if self._shares:
            self._share(batches)
        else:
            self._groups.append(self._coordinator.schedule(self._step, args=(batches,)).fetch)

    def _schedule_assigned(self, source: BatchAssigner) -> Callable[[], Any]:
        """Schedules a worker's next batches from its own data; returns what waits for them."""
        values: list[RemoteValue] = []
        assignments = source.take(self._model.steps_per_execution, self._load_of)
        for assignment in assignments:
            arguments = {"batches": source.source, "assignment": assignment}
            value = self._coordinator.schedule(
                self._step, kwargs=arguments, worker=assignment.worker
            )
            self._outstanding[assignment.worker].append(value)
            values.append(value)
        weights = [assignment.weights[-1] for assignment in assignments if assignment.weights]
        if weights:
            return functools.partial(_mean_logs, values, weights)
        if len(values) == 1 or self._kind != "predict":
            return values[-1].fetch
        return functools.partial(_joined_outputs, values)

    def _load_of(self, worker: int) -> int:
        """Returns the number of outstanding groups of a worker; 0 if order matters."""
        outstanding = self._outstanding[worker]
        while outstanding and (
            outstanding[0].status is RemoteValueStatus.READY or outstanding[0].error
        ):
            outstanding.popleft()
        return len(outstanding) if self._kind == "train" else 0

    def _share(self, batches: list[Any]) -> None:
        """Splits each batch into as many parts as one update needs; servers sum them."""
        num_needed = self._variable_client.mode.num_needed  # fewer after a worker is lost for good
        shared = [shares_of(batch, num_needed) for batch in batches]
        # With backup workers, any free worker takes the next part, so that none falls behind.
        present = self._coordinator.present_workers
        is_fixed = num_needed == len(present)
        values = [
            self._coordinator.schedule(
                self._step,
                args=([parts[own][0] for parts in shared], [parts[own][1] for parts in shared]),
                worker=present[own] if is_fixed else None,
            )
            for own in range(num_needed)
        ]
        weights = [part[1] for part in shared[-1]]
        self._groups.append(functools.partial(_mean_logs, values, weights))

    def finish(self) -> Any:
        """Waits for all groups, raising errors; returns the last result, or None without groups."""
        last = self._groups[-1] if self._groups else None
        self._groups.clear()
        self._coordinator.strategy.executor.settle()
        return None if last is None else last()


class RemoteTrainOrTestFunction(_BatchScheduler):
    """A model's `train_function` or `test_function` on workers; refuses eager models."""

    events: Any = None

    def __init__(self, model: keras.Model, strategy: Strategy, *, training: bool) -> None:
        super().__init__(model, strategy, "train" if training else "test")
        self._num_states = 4 if training else 3
        self.metric_logs = MetricLogs(model, strategy, before=self._settle)
        self._own_logs: tuple[dict[str, Any], list[tuple[_Metric, int] | None]] | None = None
        self._results = _ResultsOfMetrics(model)
        self._result_logs = MetricLogs(self._results, strategy)
        self._last_logs: dict[str, Any] = {}
        self._is_settled = True

    def __call__(self, state: object, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Schedules a group of steps; returns the logs of the groups that have ended."""
        self.begin(iterator)
        self._is_settled = False
        with self.raised_once():
            self.schedule_next(iterator)
            while len(self._groups) > self.num_in_flight:
                self._own_logs = self._groups.popleft()()
        is_single = not isinstance(iterator, HostBatches)  # a single batch, with logs needed now
        # Workers that take turns are ahead of the callbacks by a few batches.
        if is_single or (self._is_in_order and logs_wanted.is_current):
            self._settle()
        logs = self.metric_logs.so_far() if logs_wanted.value else self.metric_logs.placeholder()
        self._last_logs = self._with_own(logs)
        return self._last_logs, tuple([] for _ in range(self._num_states))

    def _settle(self) -> None:
        """Waits for all groups, and updates the returned logs to those of the last group.

        Keras uses the last result of a custom step as the logs of the epoch.
        """
        if self._is_settled:
            return
        self._own_logs = self.finish() or self._own_logs
        self._is_settled = True
        if self._own_logs:
            logs = self._with_own(self.metric_logs.so_far())
            self._last_logs.clear()
            self._last_logs.update(logs)

    def _with_own(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns the logs of a custom step, with metric results over all workers and steps."""
        if self._own_logs is None:
            return dict(logs)
        own, sources = self._own_logs
        leaves, structure = jax.tree.flatten(own)
        names = [source and self._results.name_of(*source) for source in sources]
        results = self._result_logs.so_far() if any(names) else {}
        return structure.unflatten(
            results[name] if name else leaf for leaf, name in zip(leaves, names, strict=True)
        )


class _ResultsOfMetrics:
    """Results of those of a model's metrics that the logs of its custom steps have."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._metrics: dict[_Metric, keras.metrics.Metric | None] = {}

    @property
    def metrics_variables(self) -> list[Any]:
        """Variables of these metrics."""
        return [variable for one in self._metrics.values() if one for variable in one.variables]

    def name_of(self, key: _Metric, place: int) -> str | None:
        """Returns the name of an array of a metric's result; None if the model has no such one."""
        if key not in self._metrics:
            self._metrics[key] = self._found(key)
        return None if self._metrics[key] is None else f"{list(self._metrics).index(key)}/{place}"

    def _found(self, key: _Metric) -> keras.metrics.Metric | None:
        kind, numbers = key
        own = {id(KERAS_PACKING.collected(number)) for number in numbers}
        metrics = [*self._model.metrics]
        for metric in metrics:  # those that others contain are added meanwhile
            metrics += getattr(metric, "metrics", [])
            if type(metric).__qualname__ == kind and own == set(map(id, metric.variables)):
                return metric
        return None

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the arrays of the results."""
        return {
            f"{number}/{place}": leaf
            for number, metric in enumerate(self._metrics.values())
            if metric is not None
            for place, leaf in enumerate(jax.tree.leaves(metric.result()))
        }


class RemotePredictFunction(_BatchScheduler):
    """A model's `predict_function` on workers; refuses eager models."""

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        super().__init__(model, strategy, "predict")
        self._num_left: int | None = None

    def __call__(self, state: object, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Returns the outputs of the next group of steps, with later groups in flight."""
        if self.begin(iterator):
            self._num_left = _num_groups(iterator, self._model)
        with self.raised_once():
            while len(self._groups) < self.num_in_flight and self._num_left != 0:
                try:
                    self.schedule_next(iterator)
                except StopIteration:
                    self._num_left = 0
                    break
                if self._num_left is not None:
                    self._num_left -= 1
            if not self._groups:
                raise StopIteration
            return self._groups.popleft()(), ([], [])


def _num_groups(iterator: Iterator[Any], model: keras.Model) -> int | None:
    steps = iterator.steps_per_epoch if isinstance(iterator, HostBatches) else 1
    return None if steps is None else -(-steps // model.steps_per_execution)


def shares_of(batch: object, num_workers: int) -> list[tuple[Any, float]]:
    """Splits a batch of arrays of shape (rows, ...) over workers.

    Returns each worker's rows and its fraction of the batch. With more workers than rows, some get
    a row of weight 0, because the servers wait for all.
    """
    rows = len(next(leaf for leaf in jax.tree.leaves(batch) if leaf is not None))
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(rows), num_workers)])
    shares: list[tuple[Any, float]] = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        own = slice(start, end) if end > start else slice(0, 1)
        part = jax.tree.map(lambda leaf, own=own: leaf[own], batch)
        shares.append((part, float(end - start) / rows))
    return shares


def _plain(leaf: object) -> Any:
    return leaf if leaf is None else jax.device_get(leaf)


# Optimizer updates of models with both remote and local variables.


def apply_in_parts(
    apply: Callable[[Any, list[Any], Any], Any],
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[Any],
    context: ReplicaContext,
) -> None:
    """Applies gradients in a replica function: remote variables on the servers, others here.

    `apply` is that method of the optimizer's class; `grads` are summed over replicas. Raises a
    NotImplementedError if the optimizer needs whole tables.
    """
    _require_rows_suffice(optimizer)
    scope = current_scope()
    assert scope is not None
    check_known(optimizer, variables)
    grads, variables = filter_empty_gradients(optimizer, grads, variables)
    grads = final_gradients(optimizer, grads, variables)
    pairs = list(zip(grads, variables, strict=True))
    remote = [pair for pair in pairs if is_remote(pair[1])]
    own = [pair for pair in pairs if not is_remote(pair[1])]
    if remote:
        scope.outermost.prepare(functools.partial(give_to_servers, optimizer))
        sent, variables = (list(column) for column in zip(*remote, strict=True))
        send_all(optimizer, sent, variables, scope.outermost)
    with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
        if not own:
            count_update(optimizer)
            return
        # Keras divides by the loss scale again; clipping twice is harmless.
        scale = optimizer.loss_scale_factor or 1.0
        grads = [with_values(grad, lambda value: value * scale) for grad, _ in own]
        apply_with_rows(apply, optimizer, grads, [variable for _, variable in own])


def _require_rows_suffice(optimizer: keras.optimizers.Optimizer) -> None:
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not (is_scaling or optimizer.use_ema or optimizer.gradient_accumulation_steps):
        return
    raise NotImplementedError(
        explain(
            f"{optimizer.name} uses averaged variables (EMA), gradient accumulation or dynamic "
            "loss scaling, but some of its variables are on parameter servers.",
            expected="use_ema=False, no gradient_accumulation_steps and no LossScaleOptimizer: "
            "servers update only the rows that have gradients.",
            fix="omit these, or choose another place for the tables.",
            code="SG609",
        )
    )


class ServerKeras:
    """`placement.remote.keras`: what `stratagem.keras` asks of a strategy with remote state.

    The class of a new variable, slots, updates, the step functions of `fit`, and data that workers
    read. `keras` does not import parameter servers.
    """

    create_slot = staticmethod(create_slot)
    note_built = staticmethod(note_built)
    send_gradients = staticmethod(send_gradients)
    apply_in_parts = staticmethod(apply_in_parts)
    train_or_test_function = RemoteTrainOrTestFunction
    predict_function = RemotePredictFunction

    def variable_class(
        self, request: VariableRequest, strategy: Strategy
    ) -> type[DistributedVariable]:
        """Returns the class of a new variable."""
        if (kind := class_of_slot()) is not None:
            return kind
        placement = strategy.placement
        if current_annotations().keyed_table is not None:
            if not placement.is_remote:  # the rule that matches its path is in use
                cast("PlacementRules", placement).is_on_servers(request)
            return KeyedVariable
        if not placement.is_remote:
            # A counter or a learning rate stays in this process, which sends it to the servers.
            is_local = request.has_components or request.is_slot
            if is_local or not (request.trainable or request.shape):
                return DistributedVariable
            if not cast("PlacementRules", placement).is_on_servers(request):
                return DistributedVariable
        is_split = placement.remote.variables.splits(request.path, request.shape, request.dtype)
        return ShardedParameterServerVariable if is_split else ParameterServerVariable

    def worker_data(
        self,
        strategy: Strategy,
        creator: DatasetCreator,
        name: str,
        steps: object,
        *,
        is_training: bool,
    ) -> WorkerData:
        """Returns data created by workers; a synchronous training step takes a batch of each."""
        adds_up = is_training and strategy.placement.remote.is_synchronous
        return WorkerData(strategy, creator, name, steps, adds_up=adds_up)
