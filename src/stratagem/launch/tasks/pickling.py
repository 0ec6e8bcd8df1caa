"""Pickling by value with cloudpickle, and search for objects that cannot be pickled."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from stratagem.environment import load
from stratagem.errors import explain

_MAX_DEPTH = 8


def dumps(value: object) -> bytes:
    """Pickles an object for another machine, functions and classes of a script by value."""
    return _cloudpickle().dumps(value)


def dumps_without_state(value: object) -> bytes:
    """Pickles like `dumps`; raises TypeError for strategies, models and variables.

    Another process would train a copy of a model, without its strategy, and lose it.
    """
    file = io.BytesIO()
    _stateless_pickler()(file).dump(value)
    return file.getvalue()


def live_kind(value: object) -> Literal["strategy", "state"] | None:
    """Returns "state" for a Keras object with variables of this process; None for others."""
    if hasattr(type(value), "num_replicas_in_sync"):
        return "strategy"
    keras: Any = sys.modules.get("keras")  # not loaded: there is none of its objects
    if keras is None or not hasattr(keras, "Model"):
        return None
    state = (keras.Model, keras.Variable, keras.optimizers.Optimizer, keras.metrics.Metric)
    is_layer = isinstance(value, keras.layers.Layer)
    is_built = is_layer and bool(getattr(value, "variables", ()))
    return "state" if is_built or isinstance(value, state) else None


def find_unpicklable(
    parts: Mapping[str, Any], depth: int = _MAX_DEPTH, pickled: Callable[[object], bytes] = dumps
) -> tuple[str, Any] | None:
    """Returns the innermost part that cannot be pickled, with its description; None without one.

    `parts` are objects by description; `depth` limits the search inside them.
    """
    for name, value in parts.items():
        try:
            pickled(value)
        except Exception:  # noqa: BLE001 - __reduce__ may raise anything
            parts = _parts_of(name, value) if depth and live_kind(value) is None else {}
            return find_unpicklable(parts, depth - 1, pickled) or (name, value)
    return None


def captured_values(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the variables that a callable captures, by description."""
    with contextlib.suppress(TypeError, ValueError):
        captured = inspect.getclosurevars(fn)
        both = {**captured.nonlocals, **captured.globals}
        return {f"Variable {name!r}": value for name, value in both.items()}
    return {}


def _parts_of(name: str, value: object) -> dict[str, Any]:
    if inspect.isfunction(value):
        return {f"{part} of {name}": one for part, one in captured_values(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": one for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return {f"{name}[{index}]": one for index, one in enumerate(value)}
    state: Any = None
    if hasattr(value, "__dict__"):
        with contextlib.suppress(Exception):  # that of an open file raises, since Python 3.12
            state = value.__getstate__()
    if not isinstance(state, dict) or inspect.ismodule(value):
        return {}
    return {f"{name}.{part}": one for part, one in cast("dict[str, Any]", state).items()}


def _cloudpickle() -> Any:
    return load("cloudpickle", needed_by="a function that is sent", install="cloudpickle")


@functools.cache
def _stateless_pickler() -> Any:
    cloudpickle = _cloudpickle()

    class StatelessPickler(cloudpickle.Pickler):
        """Pickler that sees every object first."""

        def reducer_override(self, obj: object) -> Any:
            if live_kind(obj) is not None:
                raise TypeError(
                    explain(
                        f"A {type(obj).__name__} belongs to this process.",
                        expected="a function that creates its strategy and model itself.",
                        fix="create them inside the function.",
                    )
                )
            return super().reducer_override(obj)

    return StatelessPickler
