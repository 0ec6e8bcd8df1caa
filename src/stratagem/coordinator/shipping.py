"""What is sent to workers once and is known there by a number: functions, and makers of objects."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stratagem.coordinator.packing import Resource, packing
from stratagem.coordinator.per_worker import PerWorkerValues
from stratagem.coordinator.remote_value import RemoteValue
from stratagem.servers import Message

__all__ = ["Call", "Shipment", "Shipments", "inputs_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Shipment:
    """One function, packed.

    Args:
        number: by which workers know it, or what it makes.
        kind: "function"; or "resource" if each worker calls it once and keeps what it returns.
        source: the function; kept, so that no other one takes its identity.
        packed: its bytes.
    """

    number: int
    kind: str
    source: Any
    packed: bytes

    def message(self) -> Message:
        """Returns what a worker is told."""
        return Message(self.kind, {"number": self.number}, [np.frombuffer(self.packed, np.uint8)])


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A function and its arguments.

    Args:
        function: the function.
        resources: what it uses of each worker.
        args: positional arguments.
        kwargs: keyword arguments.
        packed: both as bytes; None if they are not the same for every worker.
    """

    function: Shipment
    resources: tuple[Shipment, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    packed: bytes | None

    def message(self, worker: int, strategy: Any) -> Message:
        """Returns what a worker is told.

        Args:
            worker: its index.
            strategy: the coordinator's.
        """
        packed = self.packed
        if packed is None:
            own = jax.tree.map(
                lambda leaf: _own_value(leaf, worker), (self.args, self.kwargs), is_leaf=_is_remote
            )
            packed = packing().pack(own, strategy)
        # By which the worker knows whether values that it has are still the coordinator's.
        fields = {"number": self.function.number, "num_writes": strategy.serving.num_writes}
        return Message("run", fields, [np.frombuffer(packed, np.uint8)])


class Shipments:
    """Packs each function once.

    Args:
        strategy: the coordinator's.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._functions: dict[int, Shipment] = {}
        self._resources: dict[int, Shipment] = {}

    def function(self, function: Callable[..., Any]) -> Shipment:
        """Returns a function's shipment.

        Args:
            function: the function.

        Raises:
            TypeError: something in it cannot leave this process.
        """
        with self._lock:
            known = self._functions.get(id(function))
            if known is None:
                packed = packing().pack(function, self._strategy)
                known = Shipment(next(self._numbers), "function", function, packed)
                self._functions[id(function)] = known
            return known

    def resource(self, make: Callable[[], Any]) -> Resource:
        """Returns what stands for an object that each worker makes for itself.

        Args:
            make: makes it.

        Raises:
            TypeError: something in it cannot leave this process.
        """
        packed = packing().pack(make, self._strategy)
        with self._lock:
            shipment = Shipment(next(self._numbers), "resource", make, packed)
            self._resources[shipment.number] = shipment
        return Resource(shipment.number)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Call:
        """Returns a call of a function.

        Args:
            function: the function.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            TypeError: something in them cannot leave this process.
        """
        shipment = self.function(function)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_remote)
        resources = [
            self._resources[one.number]
            for leaf in leaves
            for one in (leaf.values if isinstance(leaf, PerWorkerValues) else (leaf,))
            if isinstance(one, Resource)
        ]
        is_same = not any(map(_is_remote, leaves))
        packed = packing().pack((args, kwargs), self._strategy) if is_same else None
        return Call(shipment, tuple(dict.fromkeys(resources)), args, kwargs, packed)


def inputs_of(args: Any, kwargs: Any) -> list[RemoteValue]:
    """Returns the results of other functions among arguments.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_remote)
    every = [
        one
        for leaf in leaves
        for one in (leaf.values if isinstance(leaf, PerWorkerValues) else (leaf,))
    ]
    return [one for one in every if isinstance(one, RemoteValue)]


def _is_remote(leaf: Any) -> bool:
    return isinstance(leaf, PerWorkerValues | RemoteValue | Resource)


def _own_value(leaf: Any, worker: int) -> Any:
    if isinstance(leaf, PerWorkerValues):
        leaf = leaf.values[worker]
    return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf
