"""Payloads for workers: functions and resources are sent once, then referred to by number."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import re
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from stratagem.environment import load
from stratagem.errors import ClosureInputError, OutOfRangeError, explain, invalid
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.variable_client import VariableOnWorkerError
from stratagem.parameter_server.coordinator.remote_value import (
    RemoteValue,
    leaves_of,
    map_structure,
)
from stratagem.strategies.strategy import Strategy

# Interface for pickling between the coordinator and workers.


@dataclasses.dataclass(frozen=True)
class Resource:
    """Reference, by number, to an object that each worker creates and stores."""

    number: int


# Executor of the coordinator process, whose `ClusterCoordinator` schedules steps on workers.

_POLL_S, _SETTLE_POLL_S = 0.05, 60.0


class Scheduling(Lockstep):
    """Executor of the coordinator process.

    `coordinator` is the strategy's `ClusterCoordinator`, None until it is created. `packing`
    pickles functions and values for workers.
    """

    schedules = True

    def __init__(self, strategy: Strategy, packing: Any) -> None:
        super().__init__(strategy)
        self.packing = packing
        self.coordinator: Any = None

    def run(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function in the coordinator process, with a warning."""
        warnings.warn(
            explain(
                "strategy.run was called in the coordinator, so the function runs there.",
                expected="strategy.run in a scheduled function, which runs on a worker.",
                fix="call it in a function passed to ClusterCoordinator.schedule.",
                code="SG611",
            ),
            RuntimeWarning,
            stacklevel=5,  # the caller of `Strategy.run`, which has two decorators
        )
        return super().run(fn, args, kwargs)

    def settle(self) -> None:
        """Waits until all scheduled functions have finished; raises the error of a failed one."""
        if self.coordinator is None:
            return
        variables = self._strategy.placement.remote.variables
        if variables.mode.num_needed > 0:
            # The last gradients may be too few for an update, so their workers would block forever.
            while not self.coordinator.wait(_POLL_S):
                if self.coordinator.num_unfinished < variables.mode.num_needed:
                    variables.client.flush()
        while not self.coordinator.wait(_SETTLE_POLL_S):
            pass

    def close(self) -> None:
        """Stops the workers."""
        if self.coordinator is not None:
            self.coordinator.close()


def scheduling_of(strategy: Strategy) -> Scheduling:
    """Returns the executor of a coordinator's strategy."""
    return cast("Scheduling", strategy.executor)


# Groups of closures that one worker runs after each other: one message there, and one back.
#
# Sending one message costs a coordinator several times as much as starting a short function, so
# short functions travel together.

# Number of answers that a worker keeps, for messages that are sent again. So it gets fewer messages
# than this after one that it has not answered.
MAX_UNANSWERED = 4

# Part of its influence that a long call loses with each later one.
_FORGOTTEN = 0.1
_US = 1e6


@dataclasses.dataclass(frozen=True)
class SentCall:
    """One function call for a worker.

    `function` and `closure` are numbers. `is_rerun` is True if it may have run before. `packed` is
    the pickled arguments.
    """

    function: int
    closure: int
    is_rerun: bool
    packed: Any


@dataclasses.dataclass(frozen=True)
class Ended:
    """Outcome of one call: its pickled result, or its pickled error with `trace`, its traceback.

    `counted` is the metric counts of the function by number.
    """

    packed: Any
    duration_s: float = 0.0
    counted: dict[int, np.ndarray] = dataclasses.field(default_factory=dict[int, np.ndarray])
    trace: str | None = None


class RecentDuration:
    """Duration of a function's calls: the longest, which later calls make count less and less.

    `expected_s` is infinite before the first call has ended.
    """

    def __init__(self) -> None:
        self.expected_s = math.inf

    def note(self, duration_s: float) -> None:
        """Takes the duration of a call, in seconds."""
        before_s = 0.0 if math.isinf(self.expected_s) else (1 - _FORGOTTEN) * self.expected_s
        self.expected_s = max(duration_s, before_s)


def pack_calls(calls: Sequence[SentCall], fields: dict[str, Any]) -> Message:
    """Returns the message that runs calls in this order; `fields` are sent with them."""
    heads = [[one.function, one.closure, one.is_rerun, len(one.packed)] for one in calls]
    return Message("run", {**fields, "calls": heads}, [_joined([one.packed for one in calls])])


def calls_in(message: Message) -> Iterator[SentCall]:
    """Yields the calls of a message of `pack_calls`."""
    parts = _Parts(message.arrays[0])
    for function, closure, is_rerun, num_bytes in message.fields["calls"]:
        yield SentCall(function, closure, is_rerun, parts.take(num_bytes))


def pack_ended(ended: Sequence[Ended], fields: dict[str, Any]) -> Message:
    """Returns the answer to a message of `pack_calls`; it may end with a failed call."""
    heads = [
        [len(one.packed), round(one.duration_s * _US), one.trace, list(one.counted)]
        for one in ended
    ]
    counted = [count for one in ended for count in one.counted.values()]
    packed = _joined([one.packed for one in ended])
    return Message("ran", {**fields, "calls": heads}, [packed, *counted])


def ended_in(message: Message) -> Iterator[Ended]:
    """Yields the outcomes of calls, in their order."""
    packed, *counted = message.arrays
    parts, counts = _Parts(packed), iter(counted)
    for num_bytes, duration_us, trace, numbers in message.fields["calls"]:
        counted = {number: next(counts) for number in numbers}
        yield Ended(parts.take(num_bytes), duration_us / _US, counted, trace)


class _Parts:
    """Reader of bytes that were joined."""

    def __init__(self, joined: np.ndarray) -> None:
        self._left = joined.data

    def take(self, num_bytes: int) -> memoryview:
        """Returns the next bytes, without copying."""
        taken, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return taken


def _joined(parts: Sequence[Any]) -> np.ndarray:
    only = parts[0] if len(parts) == 1 else b"".join(parts)  # one large argument is not copied
    return np.frombuffer(only, np.uint8)


# Values and datasets with one instance per worker.


class PerWorkerValues:
    """One value per worker: a scheduled function gets the value of the worker that runs it.

    Args:
        values: one `RemoteValue` per worker, in the order of the workers.

    Raises:
        ValueError: an element is not a `RemoteValue`.

    Example:
        >>> results = [sg.coordinator.RemoteValue() for _ in range(2)]  # schedule(fn, worker=index)
        >>> sg.coordinator.PerWorkerValues(results)
        PerWorkerValues(2 workers)

    Source: TF 2.21 values.py, PerWorkerValues.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue | Resource):
                raise invalid(
                    f"PerWorkerValues received an element of type {type(value).__name__}.",
                    expected="one RemoteValue per worker.",
                    fix="schedule a function on each worker and pass the list of results.",
                )
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({len(self.values)} workers)"


class PerWorkerIterator(PerWorkerValues):
    """One iterator per worker, created by `iter(per_worker_dataset)`.

    Only scheduled functions can call `next` on it.

    Raises:
        NotImplementedError: `next` is called in the coordinator.

    Source: TF 2.21 cluster_coordinator.py, PerWorkerDistributedIterator.
    """

    def __iter__(self) -> PerWorkerIterator:
        """Returns itself."""
        return self

    def __next__(self) -> NoReturn:
        """Raises NotImplementedError: the batches are on the workers."""
        raise NotImplementedError(
            explain(
                "next() was called in the coordinator on the iterator of a per-worker dataset.",
                expected="next() in a scheduled function, which runs on a worker.",
                fix="pass the iterator to a scheduled function: "
                "coordinator.schedule(step, args=(iterator,)).",
                code="SG611",
            )
        )


class PerWorkerDataset:
    """A dataset with an independent copy on each worker. Created by `create_per_worker_dataset`.

    Args:
        make_iterators: returns references to new iterators, one per worker.
    """

    def __init__(self, make_iterators: Callable[[], Sequence[Resource]]) -> None:
        self._make_iterators = make_iterators

    def __iter__(self) -> PerWorkerIterator:
        """Returns an iterator for each worker, as an argument for scheduled functions."""
        return PerWorkerIterator(self._make_iterators())


# Shared by all coordinators, so that a foreign resource is never mistaken for an own one.
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Shipment:
    """A pickled function.

    `kind` is "function", or "resource" if each worker calls it once and stores the result. `number`
    identifies the function or its result on workers. `source` is the function itself; the reference
    prevents reuse of its id. `duration` is that of its calls.
    """

    number: int
    kind: str
    source: Any
    packed: bytes
    duration: RecentDuration = dataclasses.field(default_factory=RecentDuration)

    def message(self) -> Message:
        """Returns the message that sends it to a worker."""
        return Message(self.kind, {"number": self.number}, [np.frombuffer(self.packed, np.uint8)])


@dataclasses.dataclass(frozen=True, eq=False)
class ShippedCall:
    """A function call for a worker.

    `resources` are the shipments that the worker needs first, and `inputs` the results of other
    functions among the arguments. `packed` is the pickled arguments, or None if they differ by
    worker.
    """

    function: Shipment
    resources: tuple[Shipment, ...]
    inputs: tuple[RemoteValue, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    packed: bytes | None

    def packed_for(self, worker: int, strategy: Strategy) -> bytes:
        """Returns the pickled arguments for a worker."""
        if self.packed is not None:
            return self.packed
        own = map_structure(
            lambda leaf: _own_value(leaf, worker), (self.args, self.kwargs), _is_remote
        )
        return scheduling_of(strategy).packing.pack(own, strategy)


class Shipments:
    """Pickles each function once and numbers it."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._packing = scheduling_of(strategy).packing
        self._lock = threading.Lock()
        self._functions: dict[Any, Shipment] = {}
        self._resources: dict[int, Shipment] = {}

    def function(self, function: Callable[..., Any]) -> Shipment:
        """Returns a function's shipment; raises a TypeError if it cannot be pickled."""
        key = _identity(function)
        with self._lock:
            known = self._functions.get(key)
            if known is None:
                packed = self._packing.pack(function, self._strategy)
                known = Shipment(next(_numbers), "function", function, packed)
                self._functions[key] = known
            return known

    def resource(self, make: Callable[[], Any]) -> Resource:
        """Returns a reference to an object that each worker creates by calling `make`.

        Raises a TypeError if `make` cannot be pickled.
        """
        packed = self._packing.pack(make, self._strategy)
        with self._lock:
            shipment = Shipment(next(_numbers), "resource", make, packed)
            self._resources[shipment.number] = shipment
        return Resource(shipment.number)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShippedCall:
        """Returns a call of a function.

        Raises:
            TypeError: something in it cannot be pickled.
            ValueError: an argument belongs to another coordinator, or does not have one value per
                worker.
        """
        leaves = [leaf for leaf in leaves_of((args, kwargs), _is_remote) if _is_remote(leaf)]
        remote = _each(leaves)
        self._check(leaves, remote)
        shipment = self.function(function)
        resources = [self._resources[one.number] for one in remote if isinstance(one, Resource)]
        inputs = tuple(one for one in remote if isinstance(one, RemoteValue))
        is_same = not leaves
        packed = self._packing.pack((args, kwargs), self._strategy) if is_same else None
        return ShippedCall(shipment, tuple(dict.fromkeys(resources)), inputs, args, kwargs, packed)

    def _check(self, leaves: list[Any], remote: list[Any]) -> None:
        for one in remote:
            if isinstance(one, RemoteValue):
                is_own = one.owner in (None, self)
            else:
                is_own = one.number in self._resources
            if not is_own:
                raise invalid(
                    "schedule received an argument that belongs to another coordinator.",
                    expected="results, per-worker values and datasets of this coordinator.",
                    fix="fetch the value first: args=(value.fetch(),).",
                )
        num_workers = scheduling_of(self._strategy).coordinator.num_workers
        for leaf in leaves:
            if isinstance(leaf, PerWorkerValues) and len(leaf.values) != num_workers:
                raise invalid(
                    f"schedule received PerWorkerValues with {len(leaf.values)} values for "
                    f"{num_workers} workers.",
                    expected="one value per worker.",
                    fix="schedule a function on each worker and pass all results.",
                )


def _identity(function: Callable[..., Any]) -> Any:
    """Returns a function's cache key; each access of a method creates a new object."""
    if isinstance(function, types.MethodType):
        name = function.__func__.__name__
        if getattr(function.__self__, name, None) == function:
            return id(function.__self__), name
    return id(function)


def _each(leaves: list[Any]) -> list[Any]:
    """Expands per-worker values into their elements."""
    return [
        one
        for leaf in leaves
        for one in (leaf.values if isinstance(leaf, PerWorkerValues) else (leaf,))
    ]


def _is_remote(leaf: object) -> bool:
    return isinstance(leaf, PerWorkerValues | RemoteValue | Resource)


def _own_value(leaf: object, worker: int) -> Any:
    if isinstance(leaf, PerWorkerValues):
        leaf = leaf.values[worker]
    return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf


# Errors of scheduled functions: serialized by workers, raised by the coordinator.


_ADDRESS = re.compile(r"0x[0-9a-f]+")


class DatasetVariableError(ClosureInputError, ValueError):
    """Raised for a variable that a dataset function creates on a worker."""


class WorkerReport:
    """Traceback of an error on a worker, attached to the error as a note.

    Identical errors of several workers share one note, which lists the workers. `trace` is the text
    of the traceback.
    """

    def __init__(self, error: BaseException, worker: int, trace: str) -> None:
        self._error = error
        self._trace = trace
        self._workers = [worker]
        self._note = self._text()
        error.add_note(self._note)
        vars(error)["worker_report"] = self

    def merge(self, other: WorkerReport) -> None:
        """Adds the workers of another report to the note, if both describe the same error."""
        if self._key() != other._key():
            return
        self._workers = sorted({*self._workers, *other._workers})
        notes = self._error.__notes__
        place = notes.index(self._note)
        self._note = notes[place] = self._text()

    def _key(self) -> tuple[type, str]:
        return type(self._error), _ADDRESS.sub("0x", self._trace)

    def _text(self) -> str:
        *others, last = map(str, self._workers)
        named = f"workers {', '.join(others)} and {last}" if others else f"worker {last}"
        return f"Raised on {named}:\n{self._trace}"


def merge_reports(first: BaseException, later: BaseException) -> None:
    """Adds a later error's workers to the note of the first one, if the errors are the same."""
    reports = [vars(error).get("worker_report") for error in (first, later)]
    if isinstance(reports[0], WorkerReport) and isinstance(reports[1], WorkerReport):
        reports[0].merge(reports[1])


def failed_message(error: BaseException, *, is_input: bool = False) -> Message:
    """Returns the message that sends an error to the coordinator.

    An error that cannot be pickled, or would end the coordinator, becomes a RuntimeError with its
    text. `is_input` marks errors from creating an input of functions, such as a dataset.
    """
    trace = "".join(traceback.format_exception(error))
    if is_input:
        error = _input_error(error)
    elif isinstance(error, StopIteration | StopAsyncIteration):  # would end the caller's loop
        error = OutOfRangeError(
            explain(
                f"A scheduled function raised {type(error).__name__}: its dataset is exhausted.",
                expected="at most as many next() calls as the worker's dataset has batches.",
                fix="schedule fewer functions, repeat the dataset, or catch StopIteration in the "
                "function.",
                code="SG605",
            )
        )
    cloudpickle = load("cloudpickle", needed_by="a worker", install="stratagem[ray]")
    in_words = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        pickled = cloudpickle.dumps(error if isinstance(error, Exception) else in_words)
        pickle.loads(pickled)  # noqa: S301 - made in the line before
    except Exception:  # noqa: BLE001 - its class cannot be pickled
        pickled = cloudpickle.dumps(in_words)
    return Message("failed", {"trace": trace}, [np.frombuffer(pickled, np.uint8)])


def _input_error(error: BaseException) -> ClosureInputError:
    kind = DatasetVariableError if isinstance(error, VariableOnWorkerError) else ClosureInputError
    return kind(
        explain(
            f"A worker could not create its dataset or other per-worker object: {error!r}",
            expected="a dataset function that succeeds on every worker.",
            fix="see the worker's traceback below.",
            code="SG604",
        )
    )
