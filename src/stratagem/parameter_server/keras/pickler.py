"""Pickling of functions and Keras objects for another process, with variables by name.

Keras pickles a model as a file with all weights, and only if its classes can be imported. Here its
objects are pickled by attributes: compiled functions are omitted, and objects that the other
process already has (variables, a strategy) are sent by name.

Source: Python's pickle module, persistence of external objects; cloudpickle.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax
import keras
import numpy as np

from stratagem.environment import load
from stratagem.errors import explain
from stratagem.keras.private import (
    Functional,
    KerasSaveable,
    TrackedDict,
    TrackedList,
    TrackedSet,
    Tracker,
    blank_object,
    set_referred,
    taken_apart,
)

_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_CONTAINERS = {tuple, list, dict}
_MAX_DEPTH = 4
_NOTHING = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)
# What a script may set after an import, on which results depend.
_SETTINGS_OF_JAX = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)
_STAYS_HERE = (
    "train_function",
    "test_function",
    "predict_function",
    "_jax_state",
    "_eval_epoch_iterator",
    "history",
)


class ProcessSettings:
    """Settings of Keras and JAX in the process that makes it, which another process takes over."""

    def __init__(self) -> None:
        config = keras.config
        self._pid = os.getpid()
        self._of_keras = {
            config.set_floatx: config.floatx(),
            config.set_epsilon: config.epsilon(),
            config.set_image_data_format: config.image_data_format(),
            config.set_dtype_policy: config.dtype_policy(),
        }
        self._of_jax = {name: getattr(jax.config, name) for name in _SETTINGS_OF_JAX}

    def take_over(self) -> None:
        """Sets them in this process, unless it is the one that they are from."""
        if self._pid == os.getpid():
            return
        for set_value, value in self._of_keras.items():
            set_value(value)
        for name, value in self._of_jax.items():
            if getattr(jax.config, name) != value:
                jax.config.update(name, value)


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
