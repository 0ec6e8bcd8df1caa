"""fit, evaluate and predict on the workers of a cluster with parameter servers.

The coordinator reads the data and deals batches out; a few are under way for each worker.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import jax

from stratagem.background_errors import raise_reported
from stratagem.context import get_strategy
from stratagem.coordinator import ClusterCoordinator, RemoteValue
from stratagem.keras.metric_logs import MetricLogs
from stratagem.keras.step_functions import (
    HostBatches,
    PredictFunction,
    TrainOrTestFunction,
    logs_wanted,
)
from stratagem.messages import explain

__all__ = ["ServedPredictFunction", "ServedTrainOrTestFunction"]

_IN_FLIGHT_PER_WORKER = 3


class _OnWorker:
    """Runs groups of batches, on the worker that it is sent to.

    Args:
        model: the Keras model.
        kind: "train", "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model = model
        self._kind = kind
        self._function: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_function": None}

    def __call__(self, batches: list[Any]) -> Any:
        """Runs the batches as one group of steps and returns the logs, or the outputs."""
        if self._function is None:
            strategy = get_strategy()
            if self._kind == "predict":
                self._function = PredictFunction(self._model, strategy)
            else:
                self._function = TrainOrTestFunction(
                    self._model, strategy, training=self._kind == "train"
                )
        if self._kind == "predict":
            return self._function((), iter(batches))[0]
        return self._function.last_logs(self._function.run_next(iter(batches)))


class _Dealer:
    """Takes groups of batches from Keras's iterator and schedules them.

    Args:
        model: the Keras model.
        strategy: its strategy.
        kind: "train", "test" or "predict".
    """

    def __init__(self, model: Any, strategy: Any, kind: str) -> None:
        if model.run_eagerly:
            raise ValueError(
                explain(
                    "run_eagerly=True was asked for under a ParameterServerStrategy.",
                    expected="compiled steps: they run on workers.",
                    fix="debug the model under sg.OneDeviceStrategy, or without a strategy.",
                )
            )
        self._model = model
        self._coordinator = ClusterCoordinator(strategy)
        self._step = _OnWorker(model, kind)
        self._under_way: collections.deque[RemoteValue] = collections.deque()

    @property
    def num_in_flight(self) -> int:
        """How many groups may be under way."""
        return _IN_FLIGHT_PER_WORKER * self._coordinator.num_workers

    def deal(self, iterator: Iterator[Any]) -> None:
        """Schedules the next group of batches.

        Args:
            iterator: Keras's iterator over host batches.

        Raises:
            StopIteration: the data has ended. Otherwise the error of an earlier group.
        """
        raise_reported()
        batches: list[Any] = []
        for _ in range(self._model.steps_per_execution):
            try:
                batches.append(jax.tree.map(_plain, next(iterator)))
            except StopIteration:
                break
        if not batches:
            raise StopIteration
        self._under_way.append(self._coordinator.schedule(self._step, args=(batches,)))

    def finish(self) -> Any:
        """Waits for all groups and returns what the last one returned; None if there was none.

        Raises:
            BaseException: the error of one.
        """
        last = self._under_way[-1] if self._under_way else None
        self._under_way.clear()
        self._coordinator.join()
        return None if last is None else last.fetch()


class ServedTrainOrTestFunction(_Dealer):
    """A model's `train_function` or `test_function`.

    Args:
        model: the Keras model.
        strategy: its strategy.
        training: which of the two.

    Raises:
        ValueError: a model that runs eagerly.
    """

    events: Any = None

    def __init__(self, model: Any, strategy: Any, *, training: bool) -> None:
        super().__init__(model, strategy, "train" if training else "test")
        self._num_states = 4 if training else 3
        self.metric_logs = MetricLogs(model, strategy, before=self._settle)
        self._own_logs: dict[str, Any] = {}
        self._told_last: dict[str, Any] = {}

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Schedules a group of steps; the logs are those of the groups that have ended."""
        self.deal(iterator)
        while len(self._under_way) > self.num_in_flight:
            self._own_logs = self._under_way.popleft().fetch() or {}
        if not isinstance(iterator, HostBatches):  # one batch, whose logs are asked for
            self._settle()
        logs = self.metric_logs.so_far() if logs_wanted.value else self.metric_logs.placeholder()
        self._told_last = self._with_own(logs)
        return self._told_last, tuple([] for _ in range(self._num_states))

    def _settle(self) -> None:
        """Waits for all groups; the last logs told are then those of the last group.

        Keras takes what a step of the model's own returned last for the logs of the epoch.
        """
        self._own_logs = self.finish() or self._own_logs
        if self._own_logs:
            logs = self._with_own(self.metric_logs.so_far())
            self._told_last.clear()
            self._told_last.update(logs)

    def _with_own(self, logs: dict[str, Any]) -> dict[str, Any]:
        """What a step of the model's own calls by a metric's name is that metric's result."""
        if not self._own_logs:
            return dict(logs)
        return {name: logs.get(name, value) for name, value in self._own_logs.items()}


class ServedPredictFunction(_Dealer):
    """A model's `predict_function`.

    Args:
        model: the Keras model.
        strategy: its strategy.

    Raises:
        ValueError: a model that runs eagerly.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy, "predict")
        self._source: Any = None
        self._num_left: int | None = None

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Returns the outputs of the next group of steps; those after it are under way."""
        if self._source is not iterator:
            self._source, self._num_left = iterator, _num_groups(iterator, self._model)
            self._under_way.clear()
        while len(self._under_way) < self.num_in_flight and self._num_left != 0:
            try:
                self.deal(iterator)
            except StopIteration:
                self._num_left = 0
                break
            if self._num_left is not None:
                self._num_left -= 1
        if not self._under_way:
            raise StopIteration
        return self._under_way.popleft().fetch(), ([], [])


def _num_groups(iterator: Any, model: Any) -> int | None:
    steps = iterator.steps_per_epoch if isinstance(iterator, HostBatches) else 1
    return None if steps is None else -(-steps // model.steps_per_execution)


def _plain(leaf: Any) -> Any:
    return leaf if leaf is None else jax.device_get(leaf)
