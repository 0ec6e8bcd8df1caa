"""Pickling of functions, models and optimizers between the coordinator and workers.

Keras pickles a model as a file with all weights, and only if its classes can be imported. Here its
objects are pickled by attributes: compiled functions are omitted, and objects that the other
process already has are sent by name. These are the strategy and its variables: remote ones are the
same in every process, metrics start from zero on each worker, and seed generators draw other
numbers there.

Source: Python's pickle module, persistence of external objects; cloudpickle.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from stratagem.environment import load
from stratagem.errors import explain
from stratagem.execution.tracing.errors import foreign_variable
from stratagem.keras.private import (
    Functional,
    KerasSaveable,
    TrackedDict,
    TrackedList,
    TrackedSet,
    Tracker,
    autocasts,
    blank_object,
    set_path,
    set_referred,
    taken_apart,
    trainable_variables,
)
from stratagem.keras.variables.requests import annotated
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.client.variable_client import Scalar, Stored, Unplaced
from stratagem.parameter_server.coordinator.shipping import Resource
from stratagem.parameter_server.keras.optimizer import (
    give_to_servers,
    name_on_servers,
    note_undecayed,
    take_built,
)
from stratagem.parameter_server.keras.update_rule import ProcessSettings
from stratagem.parameter_server.keras.variable import (
    KeyedVariable,
    ParameterServerVariable,
    ShardedParameterServerVariable,
    making_slot,
)
from stratagem.strategies.strategy import Strategy
from stratagem.variables.registry import home_of

_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_CONTAINERS = {tuple, list, dict}
_MAX_DEPTH = 4
_NOTHING = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)
_STAYS_HERE = (
    "train_function",
    "test_function",
    "predict_function",
    "_jax_state",
    "_eval_epoch_iterator",
    "history",
)


def pack_object(
    value: object,
    name_of: Callable[[Any], tuple[Any, ...] | None],
    settings: Callable[[], ProcessSettings] | None = None,
) -> bytes:
    """Returns any object as bytes for `unpack_object`, with functions and classes of the script.

    `name_of` returns an object's name in the other process, or None to pickle it. `settings`
    returns those for the other process; plain values need none. Raises a TypeError if something in
    it cannot be pickled.
    """
    if _is_plain(value):
        return _NOTHING + pickle.dumps(value, pickle.HIGHEST_PROTOCOL) + _NOTHING
    file = io.BytesIO()
    try:
        pickler = _pickler_class()(file)
        pickler.name_of = name_of
        pickler.dump(settings() if settings is not None else None)
        pickler.dump(value)
        while pickler.taken_apart:
            parts, pickler.taken_apart = pickler.taken_apart, []
            pickler.dump(parts)
        pickler.dump(None)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            explain(
                f"{value!r} cannot be sent to a worker: {error}",
                expected="a function that refers only to objects that can be pickled: arrays, "
                "models, optimizers, metrics, datasets that can be recreated.",
                fix="create objects such as open files and locks inside the function.",
                code="SG606",
            )
        ) from error
    return file.getvalue()


def unpack_object(data: bytes | memoryview, object_of: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Returns the object of `pack_object`'s bytes, which must come from this cluster.

    `object_of` returns this process's object of a name.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.object_of = object_of
    if (settings := unpickler.load()) is not None:
        settings.take_over()
    value = unpickler.load()
    every: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    while (parts := unpickler.load()) is not None:
        every += parts
    for made, state, _ in every:
        vars(made).update(state)
    for made, _, referred in every:
        set_referred(made, referred)
    return value


@functools.cache
def _pickler_class() -> Any:
    cloudpickle = load(
        "cloudpickle", needed_by="shipping functions to workers", install="stratagem[ray]"
    )

    class Pickler(cloudpickle.Pickler):
        """Pickler that sees every object first.

        Objects of Keras are dumped without attributes, which follow: each layer of a graph refers
        to the next, and a deep one would be too deep for `pickle`.
        """

        name_of: Callable[[Any], tuple[Any, ...] | None]

        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file)
            self.taken_apart: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

        def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
            return self.name_of(obj)

        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, KerasSaveable | Tracker):
                state, referred = taken_apart(obj)
                state.update((name, None) for name in _STAYS_HERE if name in state)
                self.taken_apart.append((obj, state, referred))
                return blank_object, (type(obj), isinstance(obj, Functional))
            if (reduced := _reduced(obj)) is not None:
                return reduced
            reduced = super().reducer_override(obj)
            is_by_value = isinstance(reduced, tuple) and isinstance(obj, type | FunctionType)
            return _registering(obj, reduced) if is_by_value else reduced

    return Pickler


def _registering(obj: Any, reduced: Any) -> Any:
    """Returns the reduction of a class or function that is registered with Keras there too."""
    name = keras.saving.get_registered_name(obj)
    if keras.saving.get_registered_object(name) is not obj or ">" not in name:
        return reduced
    make, args, state, items, pairs, set_state = reduced
    return make, args, (name, set_state, state), items, pairs, _set_and_register


def _set_and_register(made: Any, state: tuple[str, Callable[[Any, Any], Any], Any]) -> None:
    name, set_state, own_state = state
    set_state(made, own_state)
    package, _, own_name = name.partition(">")
    keras.saving.register_keras_serializable(package, own_name)(made)


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves names."""

    object_of: Callable[[tuple[Any, ...]], Any]

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        return self.object_of(pid)


def _is_plain(value: object, depth: int = 0) -> bool:
    """Returns True if nothing in a value is sent by name, as for most arguments and results."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind in _CONTAINERS and depth < _MAX_DEPTH:  # A list may contain itself.
        container: Any = value
        parts = [*container, *container.values()] if kind is dict else container
        return all([_is_plain(part, depth + 1) for part in parts])  # noqa: C419 - half the time
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return not value.dtype.hasobject
    return False


def _reduced(obj: object) -> Any:
    """Returns a pickle reduction of an object that `pickle` alone gets wrong; None for others."""
    # Containers must exist before their tracker, which refers to them.
    if isinstance(obj, TrackedList):
        return _untracked, (type(obj),), dict(vars(obj)), iter(list(obj))
    if isinstance(obj, TrackedDict):
        return _untracked, (type(obj),), dict(vars(obj)), None, iter(list(obj.items()))
    if isinstance(obj, TrackedSet):
        return _untracked_set, (type(obj), list(obj)), dict(vars(obj))
    if not isinstance(obj, type) and _answers_for_all(type(obj)):
        return _set_without_asking(obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
    return None


def _answers_for_all(kind: type) -> bool:
    """Returns True if a new object of a class may recurse when it is asked for `__setstate__`.

    As Keras's preprocessing layers have it: their `__getattr__` needs an attribute of the object.
    """
    return (
        hasattr(kind, "__getattr__")
        and not hasattr(kind, "__setstate__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
    )


def _set_without_asking(reduced: Any) -> Any:
    """Returns a reduction whose state is set without asking the new object how."""
    if isinstance(reduced, str) or len(reduced) < 3 or reduced[2] is None:
        return reduced
    return (*reduced, *[None] * (5 - len(reduced)), _set_attributes)


def _set_attributes(made: object, state: Any) -> None:
    attributes, in_slots = state if isinstance(state, tuple) else (state, None)
    for name, value in {**(attributes or {}), **(in_slots or {})}.items():
        object.__setattr__(made, name, value)


def _untracked(kind: type[TrackedList] | type[TrackedDict] | type[TrackedSet]) -> Any:
    new: Callable[..., Any] = kind.__new__
    made = new(kind)
    vars(made)["tracker"] = None
    return made


def _untracked_set(kind: type[TrackedSet], items: list[Any]) -> Any:
    made = _untracked(kind)
    set.update(made, items)
    return made


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
