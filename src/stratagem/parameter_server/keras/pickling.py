"""Pickling of functions, models and optimizers between the coordinator and workers.

The strategy's variables are sent by name: remote ones are the same in every process, metrics start
from zero on each worker, and seed generators draw other numbers there.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import keras
import numpy as np

from stratagem.execution.tracing.errors import foreign_variable
from stratagem.keras.private import autocasts, set_path, trainable_variables
from stratagem.keras.variables.requests import annotated
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.client.variable_client import Stored, Unplaced
from stratagem.parameter_server.coordinator.shipping import Resource
from stratagem.parameter_server.keras.optimizer import (
    give_to_servers,
    name_on_servers,
    note_undecayed,
    take_built,
)
from stratagem.parameter_server.keras.pickler import ProcessSettings, pack_object, unpack_object
from stratagem.parameter_server.keras.variable import (
    KeyedVariable,
    ParameterServerVariable,
    ShardedParameterServerVariable,
    making_slot,
)
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.parameter_server.client.variable_client import Scalar
    from stratagem.strategies.strategy import Strategy


_NUMBER = "_stratagem_number"


class KerasPacking:
    """Pickles references to Keras objects; see `parameter_server.coordinator.shipping`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._own: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def pack(self, value: object, strategy: Strategy) -> bytes:
        """Returns an object as bytes."""
        # Variables of unbuilt optimizers; their scalars on the servers are unknown.
        of_unbuilt: set[int] = set()
        settings = ProcessSettings if strategy.executor.schedules else None  # not of results
        return pack_object(value, lambda one: self._name_of(one, strategy, of_unbuilt), settings)

    def unpack(self, data: bytes | memoryview, strategy: Strategy) -> Any:
        """Returns the object that was packed."""
        return unpack_object(data, lambda name: self._object_of(name, strategy))

    def take_built(self, strategy: Strategy) -> list[tuple[int, list[str]]]:
        """Returns the optimizers that a worker has built since the last call."""
        return [
            (vars(one)[_NUMBER], [variable.place.name for variable in trainable_variables(one)])
            for one in take_built(strategy)
            if _NUMBER in vars(one)
        ]

    def collected(self, number: int) -> Any:
        """Returns the coordinator's variable that a worker has a partial count of."""
        return self._own.get(number)

    def build(self, number: int, names: list[str], strategy: Strategy) -> None:
        """Builds the coordinator's own optimizer like a worker's copy."""
        optimizer = self._own.get(number)
        if optimizer is None or optimizer.built:
            return
        with strategy.scope(), keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build([strategy.placement.remote.variables.named[name] for name in names])
        give_to_servers(optimizer)

    def _number_of(self, value: object) -> int:
        number = vars(value).get(_NUMBER)
        if number is None:
            number = next(self._numbers)
            object.__setattr__(value, _NUMBER, number)
            self._own[number] = value
        return number

    def _name_of(self, value: object, strategy: Strategy, of_unbuilt: set[int]) -> Any:
        if value is strategy:
            return ("strategy",)
        if isinstance(value, Resource):
            return ("resource", value.number)
        if isinstance(value, DistributedVariable):
            return self._name_of_variable(value, strategy, of_unbuilt)
        if isinstance(value, keras.optimizers.Optimizer):
            self._number_of(value)
            if strategy.executor.schedules:  # its name is sent along
                name_on_servers(value, strategy.placement.remote.variables)
            if value.built:
                give_to_servers(value)
            else:
                note_undecayed(value, strategy)
                of_unbuilt.update(id(variable) for variable in value.variables)
        return None  # sent by its attributes

    def _name_of_variable(
        self, value: DistributedVariable, strategy: Strategy, of_unbuilt: set[int]
    ) -> Any:
        home = home_of(value)
        if home is None:
            return None
        if home.strategy is not strategy:
            raise foreign_variable(value, home.strategy, strategy)
        if not strategy.executor.schedules:  # a worker's result
            return ("value", np.asarray(value.value))
        if isinstance(value, ParameterServerVariable):
            if id(value) not in of_unbuilt:
                strategy.placement.remote.variables.place(value)
            placement = strategy.placement.remote.variables.placement_of(value)
            return ("served", _described(value), value.place, value.has_rows, placement)
        if value.synchronization == "on_read":
            return ("collected", _described(value), self._number_of(value))
        initial = np.asarray(value.value)
        return ("seed", _described(value), self._number_of(value), initial)

    def _object_of(self, name: tuple[Any, ...], strategy: Strategy) -> Any:
        kind, *fields = name
        if kind == "strategy":
            return strategy
        if kind == "value":
            return fields[0]
        if kind == "resource":
            return strategy.placement.remote.variables.resources[fields[0]]
        if kind == "served":
            return _served(strategy, *fields)
        described, number, *initial = fields
        known = (
            strategy.placement.remote.variables.collected
            if kind == "collected"
            else strategy.placement.remote.variables.seeds
        )
        if number not in known:
            with annotated(is_worker_local=True):
                known[number] = _made(strategy, described, initial[0] if initial else None)
        return known[number]


# Shared by all coordinators and workers of this process, because it numbers objects.
KERAS_PACKING = KerasPacking()


def _described(variable: keras.Variable) -> dict[str, Any]:
    return {
        "shape": tuple(variable.shape),
        "dtype": variable.dtype,
        "trainable": variable.trainable,
        "autocast": autocasts(variable),
        "aggregation": variable.aggregation,
        "synchronization": variable.synchronization,
        "name": variable.name,
        "path": variable.path,
        "regularizer": variable.regularizer,
        "constraint": variable.constraint,
    }


def _made(strategy: Strategy, described: dict[str, Any], value: object) -> Any:
    """Creates a variable in this process like one of another process."""
    arguments = dict(described)
    path, regularizer = arguments.pop("path"), arguments.pop("regularizer")
    constraint = arguments.pop("constraint")
    shape, dtype = arguments.pop("shape"), arguments.pop("dtype")

    def start(*_: object, **__: object) -> Any:  # not called if the servers have the value
        return jnp.zeros(shape, dtype) if value is None else jnp.asarray(value)

    with strategy.scope():
        made = keras.Variable(start, shape=shape, dtype=dtype, **arguments)
    set_path(made, path)
    made.regularizer, made.constraint = regularizer, constraint
    return made


def _served(
    strategy: Strategy,
    described: dict[str, Any],
    place: Stored | Scalar | Unplaced | None,
    has_rows: bool,
    placement: ShardLayout | None,
) -> Any:
    variable_client = strategy.placement.remote.variables
    name = described["path"] if isinstance(place, Unplaced) else repr(place)
    known = variable_client.known.get(name)
    if known is None:
        if placement is not None:
            variable_client.client.know(placement)
        with making_slot(name, _class_of(place, placement)):
            known = _made(strategy, described, None)
        known.place, known.has_rows = place, has_rows
        variable_client.known[name] = known
        known.find_shards()
        if isinstance(known, ShardedParameterServerVariable):
            variable_client.known.update((repr(shard.place), shard) for shard in known)
    known.trainable, known.regularizer = described["trainable"], described["regularizer"]
    return known


def _class_of(place: object, placement: ShardLayout | None) -> type[ParameterServerVariable]:
    """Returns the class of a variable; a slot has the layout of its variable."""
    if placement is None:
        return ParameterServerVariable
    if placement.is_keyed:
        return KeyedVariable
    is_split = placement.is_split and place == Stored(placement.name)
    return ShardedParameterServerVariable if is_split else ParameterServerVariable
