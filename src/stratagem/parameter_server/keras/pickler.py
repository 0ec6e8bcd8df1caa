"""Pickling of functions and Keras objects for another process, with variables by name.

Keras pickles a model as a file with all weights, and only if its classes can be imported. Here its
objects are pickled by attributes: compiled functions are omitted, and objects that the other
process already has (variables, a strategy) are sent by name.

Source: Python's pickle module, persistence of external objects; cloudpickle.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from stratagem.keras.private import KerasSaveable, TrackedDict, TrackedList, TrackedSet
from stratagem.messages import explain
from stratagem.optional_libraries import load

__all__ = ["pack_object", "unpack_object"]

_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_CONTAINERS = {tuple, list, dict}
_MAX_DEPTH = 4
_STAYS_HERE = (
    "train_function",
    "test_function",
    "predict_function",
    "_jax_state",
    "_eval_epoch_iterator",
    "history",
)


def pack_object(value: object, name_of: Callable[[Any], tuple[Any, ...] | None]) -> bytes:
    """Returns any object as bytes for `unpack_object`, with functions and classes of the script.

    `name_of` returns an object's name in the other process, or None to pickle it. Raises a
    TypeError if something in it cannot be pickled.
    """
    if _is_plain(value):
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    try:
        pickler = _pickler_class()(file)
        pickler.name_of = name_of
        pickler.dump(value)
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
    return unpickler.load()


@functools.cache
def _pickler_class() -> Any:
    cloudpickle = load(
        "cloudpickle", needed_by="shipping functions to workers", install="stratagem[ray]"
    )

    class Pickler(cloudpickle.Pickler):
        """Pickler that sees every object first."""

        name_of: Callable[[Any], tuple[Any, ...] | None]

        def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
            return self.name_of(obj)

        def reducer_override(self, obj: object) -> Any:
            reduced = _reduced(obj)
            return super().reducer_override(obj) if reduced is None else reduced

    return Pickler


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
    """Returns a pickle reduction of a Keras object; None for all others."""
    # Containers must exist before their tracker, which refers to them.
    if isinstance(obj, TrackedList):
        return _untracked, (type(obj),), dict(vars(obj)), iter(list(obj))
    if isinstance(obj, TrackedDict):
        return _untracked, (type(obj),), dict(vars(obj)), None, iter(list(obj.items()))
    if isinstance(obj, TrackedSet):
        return _untracked_set, (type(obj), list(obj)), dict(vars(obj))
    if isinstance(obj, KerasSaveable):
        state = {**vars(obj)}
        state.update((name, None) for name in _STAYS_HERE if name in state)
        return object.__new__, (type(obj),), state
    return None


def _untracked(kind: type[TrackedList] | type[TrackedDict] | type[TrackedSet]) -> Any:
    new: Callable[..., Any] = kind.__new__
    made = new(kind)
    vars(made)["tracker"] = None
    return made


def _untracked_set(kind: type[TrackedSet], items: list[Any]) -> Any:
    made = _untracked(kind)
    set.update(made, items)
    return made
