"""Step functions of `fit`, `evaluate` and `predict`: each call runs a group of steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem import config
from stratagem.devices.finding import placeholder
from stratagem.devices.lockstep import (
    run_together,
    runs_separately,
    wait_until_ready,
)
from stratagem.devices.mesh import Topology, start_lock
from stratagem.errors import raise_reported
from stratagem.execution.programs.elastic import ElasticLockstep, is_on
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.batches import HostBatch, split_again, take_own_part, with_selected_rows
from stratagem.input.placement import MANY_GROUPS, place
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    JAXTrainer,
    get_stateless_scope,
)
from stratagem.keras.training.active_fit import StepEvents
from stratagem.keras.training.replica_steps import ReplicaSteps
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.observe.process_writer import current_events
from stratagem.observe.recorder import input_mark
from stratagem.observe.wait_clock import DataWait, wait_clock
from stratagem.strategies.reduction import of_all
from stratagem.variables.components import aggregate_components, gather_together
from stratagem.variables.distributed import PerReplica, is_per_replica, regroup
from stratagem.variables.registry import home_of, is_on_read

if TYPE_CHECKING:
    from stratagem.execution.tracing.arguments import Arguments
    from stratagem.strategies.strategy import Strategy


class _LogsWanted(threading.local):
    """True in a thread that needs the logs of single batches.

    `is_current` is True if callbacks act on batches: what they see and set is that of one device.
    """

    value = True
    is_current = False


logs_wanted = _LogsWanted()


class HostBatches:
    """Host batches of a data source, `steps_per_epoch` per epoch (None: all).

    `num_passed` batches of the source have been skipped.
    """

    def __init__(self, batches: Iterable[Any], steps_per_epoch: int | None) -> None:
        self._batches = iter(batches)
        self.steps_per_epoch = steps_per_epoch
        self.num_passed: int = getattr(batches, "num_passed", 0)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the next batch in the form that Keras builds a model from."""
        batch = next(self._batches)
        return batch.whole() if isinstance(batch, HostBatch) else with_selected_rows(batch)

    @property
    def source(self) -> Any:
        """The source of the batches."""
        return self._batches

    def take(self, topology: Topology) -> HostBatch:
        """Returns this process's part of the next batch, split by its dataset or else evenly."""
        with DataWait(wait_clock):
            batch = next(self._batches)
        if not isinstance(batch, HostBatch):
            return take_own_part(batch, topology)
        return split_again(batch, topology) if batch.is_undivided else batch


@dataclasses.dataclass
class _Run:
    """Equally shaped batches of a group, and the arguments that have them on the devices."""

    batches: list[HostBatch]
    arguments: Arguments | None = None


class StepFunction:
    """Base of the functions that replace Keras's `train_function` and its siblings."""


class _GroupedStepFunction(StepFunction):
    """Runs groups of steps from Keras's iterator and has the next group on the devices early.

    `step` is the replica function of one batch.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, step: Callable[[Any], Any]) -> None:
        self._model = model
        self._strategy = strategy
        self._step = step
        is_elastic = isinstance(strategy.executor, ElasticLockstep)
        self._execution = (ElasticLockstep if is_elastic else Lockstep)(strategy)
        self._source: Any = None
        self._waiting: collections.deque[list[_Run] | Exception] = collections.deque()
        self._num_groups = 0
        self._num_placed = 0

    def run_next(self, iterator: Iterator[Any]) -> list[tuple[list[HostBatch], Any]]:
        """Runs the next group of steps. Raises StopIteration at the end of the data.

        Returns one pair per run of equally shaped batches: the batches and their result.
        """
        raise_reported()
        if not isinstance(iterator, HostBatches):  # one batch, perhaps in the middle of an epoch
            return self._run_group(self._read(iterator))
        if self._source is not iterator:
            self._source = iterator
            self._waiting.clear()
            self._num_groups = self._num_passed(iterator)
        group = self._waiting.popleft() if self._waiting else self._read(iterator)
        if isinstance(group, Exception):
            raise group
        self._num_groups += 1
        puts_first = self._puts_first()
        if puts_first:
            self._place(group)
            self._place_ahead(iterator)
        results = self._run_group(group)
        del group  # Its arrays on the devices are freed as soon as the steps are done.
        if puts_first:
            self._read_ahead(iterator, 2)
        else:
            self._place_ahead(iterator)
        return results

    def _puts_first(self) -> bool:
        """Returns True if the next group is transferred before this one runs.

        A transfer to a GPU waits for all programs that were started before it, as its memory may
        be theirs. After this group, it would begin when the device is idle. On CPU it would delay
        the group.
        """
        is_elastic = isinstance(self._execution, ElasticLockstep)
        return self._strategy.topology.platform != "cpu" and not is_elastic

    def _place_ahead(self, iterator: HostBatches) -> None:
        """Reads and transfers the next group."""
        self._read_ahead(iterator, 1)
        if not self._waiting or isinstance(self._waiting[0], Exception):
            return
        try:
            self._place(self._waiting[0])
        except Exception as error:  # noqa: BLE001 - raised when that group is asked for
            self._waiting[0] = error

    def _run_group(self, group: list[_Run]) -> list[Any]:
        if not group:
            raise StopIteration
        self._place(group)
        return [result for run in group for result in self._run(run)]

    def _place(self, group: list[_Run]) -> None:
        """Transfers a group of steps to the devices, unless it is there."""
        left = [run for run in group if run.arguments is None]
        if self._is_eager() or not left:
            return
        with input_mark():
            for run in left:
                placed = place(
                    run.batches,
                    self._strategy.topology,
                    is_repeated=self._num_placed >= MANY_GROUPS,
                )
                run.arguments = batch_arguments(placed)
                self._num_placed += 1

    def compile_ahead(self, batch: Any) -> None:
        """Compiles the step for batches such as this one, in a process that has not joined yet."""
        host = HostBatches([batch], None).take(self._strategy.topology)
        assert isinstance(self._execution, ElasticLockstep)
        self._execution.compile_ahead(self._step, host)

    def _num_passed(self, iterator: HostBatches) -> int:
        """Returns the number of groups skipped by an iterator that starts midway."""
        return iterator.num_passed // self._model.steps_per_execution

    def _read_ahead(self, iterator: HostBatches, count: int) -> None:
        """Reads groups until `count` wait, at most up to the end of this epoch or of the data."""
        while len(self._waiting) < count and self._may_read(iterator):
            try:
                self._waiting.append(self._read(iterator))
            except Exception as error:  # noqa: BLE001 - raised when that group is asked for
                self._waiting.append(error)

    def _may_read(self, iterator: HostBatches) -> bool:
        """Returns True if this epoch needs another group: others may read the next epoch."""
        last = self._waiting[-1] if self._waiting else None
        if self._is_eager() or isinstance(last, Exception) or last == []:
            return False
        if iterator.steps_per_epoch is None:
            return True
        groups_per_epoch = -(-iterator.steps_per_epoch // self._model.steps_per_execution)
        return (self._num_groups + len(self._waiting)) % groups_per_epoch != 0

    def _is_eager(self) -> bool:
        return bool(self._model.run_eagerly) or config.runs_eagerly()

    def _read(self, iterator: Iterator[Any]) -> list[_Run]:
        """Reads the batches of the next group; none at the end of the data."""
        with input_mark():
            return self._read_group(iterator)

    def _read_group(self, iterator: Iterator[Any]) -> list[_Run]:
        topology = self._strategy.topology
        batches: list[HostBatch] = []
        for _ in range(self._model.steps_per_execution):
            try:
                batches.append(
                    iterator.take(topology)
                    if isinstance(iterator, HostBatches)
                    else take_own_part(next(iterator), topology)
                )
            except StopIteration:
                break
        if self._is_eager():
            return [_Run([batch]) for batch in batches]
        runs: list[_Run] = []
        for batch in batches:
            if runs and runs[-1].batches[0].signature == batch.signature:
                runs[-1].batches.append(batch)
            else:
                runs.append(_Run([batch]))
        return runs

    def _run(self, run: _Run) -> list[tuple[list[HostBatch], Any]]:
        if run.arguments is None:  # more than one batch if they were read before this was eager
            return [([batch], self._run_eagerly(batch)) for batch in run.batches]
        result = self._execution.run_batches(self._step, run.batches, run.arguments)
        return [(run.batches, result)]

    def _run_eagerly(self, batch: HostBatch) -> Any:
        parts = with_selected_rows(batch.parts(self._strategy.topology.num_local_replicas))
        data = regroup(parts, self._strategy.topology)
        was_eager = config.runs_eagerly()
        config.run_eagerly(True)
        try:
            return self._strategy.run(self._step, args=(data,))
        finally:
            config.run_eagerly(was_eager)


class TrainOrTestFunction(_GroupedStepFunction):
    """A model's `train_function` or `test_function`."""

    def __init__(self, model: keras.Model, strategy: Strategy, *, training: bool) -> None:
        steps = self._steps = ReplicaSteps(model)
        super().__init__(model, strategy, steps.train if training else steps.test)
        self._num_states = 4 if training else 3
        self.metric_logs = MetricLogs(model, strategy)
        writer = current_events() if training else None
        self.events = None if writer is None else StepEvents(model, writer)

    def __call__(self, state: object, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Runs a group of steps. Variables hold the state, so the returned state is empty."""

        def call() -> tuple[int, Any]:
            results = self.run_next(iterator)
            return sum(len(batches) for batches, _ in results), results[-1]

        batches, result = call()[1] if self.events is None else self.events.run(call)
        logs = _last_logs(batches, result)
        # A wait for results that other processes take part in must not hide in a conversion.
        is_alone = not self._strategy.topology.spans_processes
        are_real = logs_wanted.value or (logs is not None and is_alone)
        if logs is not None:  # logs of a custom step
            logs = dict(logs)
        elif logs_wanted.value:
            is_for_bar = isinstance(iterator, HostBatches) and not logs_wanted.is_current
            logs = self.metric_logs.for_bar() if is_for_bar else self.metric_logs.current()
        else:
            logs = self.metric_logs.placeholder()
        self._report(logs, are_real=are_real)
        return logs, tuple([] for _ in range(self._num_states))

    def compile_ahead(self, batch: Any) -> None:
        """Compiles the step and its logs, in a process that has not joined yet."""
        super().compile_ahead(batch)
        self.metric_logs.compile_ahead()

    def _report(self, logs: Any, *, are_real: bool) -> None:
        """Records logs every few seconds; reading those of several processes takes all of them."""
        if self.events is not None and are_real:
            self.events.report(lambda: logs)
        elif self.events is not None and not self._strategy.topology.spans_processes:
            self.events.report(self.metric_logs.current)

    def last_logs(self, results: list[tuple[list[HostBatch], Any]]) -> Any:
        """Returns logs of the last step and their sources; None for Keras's steps."""
        logs = _last_logs(*results[-1])
        return None if logs is None else (logs, self._steps.sources_of_logs)


class PredictFunction(_GroupedStepFunction):
    """A model's `predict_function`."""

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        super().__init__(model, strategy, ReplicaSteps(model).predict)

    def __call__(self, state: object, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Runs a group of steps and returns their outputs without padding rows."""
        runs = self.run_next(iterator)
        outputs = [self._joined(batches, result) for batches, result in runs]
        if len(outputs) > 1:
            outputs = [jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)]
        return outputs[0], ([], [])

    def _joined(self, batches: list[HostBatch], result: Any) -> Any:
        """Returns rows of all steps and replicas; runs the steps again if members were lost."""
        while True:
            topology = self._strategy.topology
            leaves = jax.tree.leaves(result, is_leaf=is_per_replica)
            is_whole = all(is_on(one, topology) for one in leaves if isinstance(one, PerReplica))
            if not isinstance(self._execution, ElasticLockstep) or is_whole:
                if isinstance(self._execution, ElasticLockstep):
                    batches = [split_again(batch, topology) for batch in batches]
                join = functools.partial(self._join, batches=batches)
                joined = jax.tree.map(join, result, is_leaf=is_per_replica)
                if self._strategy.topology is topology:
                    return joined
            result = self._execution.run_batches(self._step, batches, None)

    def _join(self, leaf: PerReplica | jax.Array | np.ndarray, batches: list[HostBatch]) -> Any:
        """Returns rows of all steps and replicas in data order, on every process."""
        if not isinstance(leaf, PerReplica):
            steps = [*map(np.asarray, leaf if len(batches) > 1 else leaf[None])]
            if batches[0].lengths is not None:
                steps = [step[: batches[0].num_examples] for step in steps]
            return np.concatenate(steps)
        whole = of_all(leaf, self._strategy.num_replicas_in_sync)
        if whole.stacked is None:  # parts of eager replicas
            return np.concatenate([np.asarray(part) for part in whole.components])
        array = np.asarray(whole.stacked)  # axes: replicas, perhaps steps
        steps = np.swapaxes(array, 0, 1) if len(batches) > 1 else array[None]
        lengths = batches[0].all_lengths
        if lengths is None:
            return steps.reshape((-1, *steps.shape[3:]))
        return np.concatenate([step[i, :n] for step in steps for i, n in enumerate(lengths)])


def _last_logs(batches: list[HostBatch], result: object) -> Any:
    if result is None:
        return None
    return jax.tree.map(lambda leaf: _last(leaf, len(batches)), result, is_leaf=is_per_replica)


def _last(leaf: object, num_steps: int) -> Any:
    """Returns the last step's log value from one replica; all replicas have the same."""
    if isinstance(leaf, PerReplica):
        leaf = leaf.components[0]
    return leaf[-1] if num_steps > 1 and isinstance(leaf, jax.Array) else leaf


# Results of all metrics of a model in one program, per batch and at the end of an epoch.


# A progress bar is drawn 20 times a second. The results of each step would cost the MLP of the
# benchmarks 13 % on two CPU devices.
_BAR_INTERVAL_S = 0.05


@patches(
    JAXTrainer,
    "get_metrics_result",
    why="one program computes all results, and one collective combines them",
)
def results_at_once(original: Callable[..., Any]) -> Any:
    """Returns `get_metrics_result` of a model that computes all results in one program."""

    @functools.wraps(original)
    def results(self: keras.Model) -> Any:
        is_traced = isinstance(jnp.zeros(()), Tracer)
        if is_traced or get_stateless_scope() is not None:  # Inside a step or inside `_results`.
            return original(self)
        logs = _logs_of(self)
        for one in logs:  # the steps of either function may be under way
            one.settle()
        if logs and type(self).get_metrics_result is results:
            return logs[0].so_far()
        # One exchange between processes instead of one for each variable of each metric.
        variables = [one for one in self.metrics_variables if isinstance(one, DistributedVariable)]
        asking = [variable for variable in variables if variable.asks_all_processes()]
        gather_together([(variable.whole, variable.storage) for variable in asking])
        return original(self)

    return results


def _logs_of(model: keras.Model) -> list[MetricLogs]:
    """Returns the `MetricLogs` of a model's step functions."""
    functions = (model.train_function, model.test_function)
    found = [getattr(function, "metric_logs", None) for function in functions]
    return [logs for logs in found if logs is not None]


class MetricLogs:
    """Results of a model's metrics over all replicas.

    `before` is called before results are read; it waits for steps in flight.
    """

    def __init__(
        self, model: Any, strategy: Strategy, before: Callable[[], None] | None = None
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._before = before
        self._program: Any = None
        self._variables: list[Any] = []
        self._names: list[str] | None = None
        self._of_bar: dict[str, Any] = {}
        self._of_bar_s = 0.0

    def current(self) -> dict[str, Any]:
        """Returns the metric results after `before`, without waiting for the devices."""
        self.settle()
        return self.so_far()

    def settle(self) -> None:
        """Calls `before`. Keras asks for the results of each epoch, and resets the metrics then."""
        self._of_bar = {}
        if self._before is not None:
            self._before()

    def for_bar(self) -> dict[str, Any]:
        """Returns results of this epoch that are no older than what a progress bar shows."""
        topology, now_s = self._strategy.topology, time.monotonic()
        # Several processes have to compute them at once, and their clocks differ.
        if topology.spans_processes or not self._of_bar or now_s - self._of_bar_s > _BAR_INTERVAL_S:
            self._of_bar, self._of_bar_s = self.so_far(), now_s
        return self._of_bar

    def so_far(self) -> dict[str, Any]:
        """Returns the metric results of the completed steps."""
        stored = self._stored()
        if self._strategy.topology.is_abstract:  # Abstract variables have no values.
            shapes = jax.eval_shape(self._program, stored)
            return jax.tree.map(lambda one: placeholder(one.shape, one.dtype), dict(shapes))
        if not self._strategy.topology.spans_processes:
            with start_lock:
                return dict(self._program(stored))
        if runs_separately():
            return dict(self._program(self._of_members()))

        def start() -> tuple[Any, Any]:
            results = self._program(stored)
            return results, jax.tree.leaves(results)

        results = run_together("metrics", start, platform=self._strategy.topology.platform)
        wait_until_ready(results)
        # A metric's result may be a dict or another structure.
        return jax.tree.map(lambda value: value.addressable_data(0), dict(results))

    def _of_members(self) -> list[Any]:
        """Returns all components in an elastic group, which each process has after a step."""
        asking = [one for one in self._variables if is_on_read(one)]
        gather_together([(variable.whole, variable.storage) for variable in asking])
        return [
            variable.whole.gathered if is_on_read(variable) else _own(variable)
            for variable in self._variables
        ]

    def compile_ahead(self) -> None:
        """Compiles the program of results, in a process that has not joined its group yet."""
        self._stored()
        count = self._strategy.topology.num_replicas
        stored = [
            np.zeros((count, *variable.shape), variable.dtype)
            if is_on_read(variable)
            else _own(variable)
            for variable in self._variables
        ]
        self._names = list(self._program(stored))

    def _stored(self) -> list[Any]:
        """Returns the values of all variables of metrics, for the program of their results."""
        variables = self._model.metrics_variables
        if self._program is None or [id(v) for v in variables] != [id(v) for v in self._variables]:
            self._variables, self._names = variables, None
            several = self._strategy.topology.spans_processes and not runs_separately()
            copied = self._strategy.topology.replicated if several else None
            self._program = jax.jit(self._results, out_shardings=copied)
        return [variable.storage if home_of(variable) else variable.value for variable in variables]

    def placeholder(self) -> dict[str, Any]:
        """Returns metric names with zeros, for logs of which Keras uses only the names."""
        if self._names is None:
            # One metric may report several names; only its result shows them.
            self._names = list(self.so_far())
        return dict.fromkeys(self._names, 0.0)

    def _results(self, stored: list[Any]) -> Any:
        mapping: list[tuple[Any, Any]] = []
        for variable, value in zip(self._variables, stored, strict=True):
            if is_on_read(variable):
                home = home_of(variable)
                assert home is not None
                value = aggregate_components(value, home.aggregation, variable.path)
            mapping.append((variable, value))
        with keras.StatelessScope(mapping):
            return self._model.get_metrics_result()


def _own(variable: Any) -> Any:
    """Returns a value that is the same on all processes, as this one has it."""
    return variable.storage.addressable_data(0) if home_of(variable) else variable.value
