"""Payloads for workers: functions and resources are sent once, then referred to by number."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.group.transport.wire import Message
from stratagem.messages import explain
from stratagem.parameter_server.coordinator.call_groups import RecentDuration
from stratagem.parameter_server.coordinator.packing import Resource
from stratagem.parameter_server.coordinator.per_worker import PerWorkerValues
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.coordinator.scheduling import scheduling_of
from stratagem.parameter_server.coordinator.structures import leaves_of, map_structure

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


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
                raise ValueError(
                    explain(
                        "schedule received an argument that belongs to another coordinator.",
                        expected="results, per-worker values and datasets of this coordinator.",
                        fix="fetch the value first: args=(value.fetch(),).",
                    )
                )
        num_workers = scheduling_of(self._strategy).coordinator.num_workers
        for leaf in leaves:
            if isinstance(leaf, PerWorkerValues) and len(leaf.values) != num_workers:
                raise ValueError(
                    explain(
                        f"schedule received PerWorkerValues with {len(leaf.values)} values for "
                        f"{num_workers} workers.",
                        expected="one value per worker.",
                        fix="schedule a function on each worker and pass all results.",
                    )
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
