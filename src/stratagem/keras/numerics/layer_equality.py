"""Comparison of layers: equal ones compute the same function of their inputs and variables."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from stratagem.keras.private.rematerialization import sublayers

_PLAIN = bool | int | float | str | None
_STATE_OF_SEEDS = "seed"  # an initial value, which a variable holds


def find_difference(first: keras.layers.Layer, second: keras.layers.Layer) -> str | None:
    """Returns the respect in which two layers differ; None for equal ones."""
    if type(first) is not type(second):
        return f"their classes, {type(first).__name__} and {type(second).__name__}"
    found = _compared(_facts(first), _facts(second))
    if found is not None:
        return found
    inner = sublayers(first), sublayers(second)
    if len(inner[0]) != len(inner[1]):
        return f"the number of their layers, {len(inner[0])} and {len(inner[1])}"
    for one, other in zip(*inner, strict=True):
        difference = find_difference(one, other)
        if difference is not None:
            return f"{one.name!r} and {other.name!r}, in {difference}"
    return None


def _compared(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    for key in (*first, *(key for key in second if key not in first)):
        one, other = first.get(key), second.get(key)
        if not _are_same(one, other):
            return f"{key}: {one!r} and {other!r}"
    return None


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _facts(layer: keras.layers.Layer) -> dict[str, Any]:
    variables = [(tuple(one.shape), str(one.dtype), one.trainable) for one in layer.variables]
    return {
        "trainable": layer.trainable,
        "compute_dtype": layer.compute_dtype,
        **_config(layer),
        **_attributes(layer),
        "variables": variables,
    }


def _config(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns the configuration that a class returns itself.

    Keras's own one for custom classes has all arguments, also those that only choose names.
    """
    if type(layer).get_config is keras.layers.Layer.get_config or isinstance(layer, keras.Model):
        return {}
    try:
        return _without_names(layer.get_config())
    except (NotImplementedError, AttributeError):  # KerasHub's Llama reads names it has not set
        return {}


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: _without_names(value)
            for key, value in config.items()
            if key not in ("name", "build_config", _STATE_OF_SEEDS)
            and not str(key).endswith("_initializer")
        }
    return [_without_names(one) for one in config] if isinstance(config, list | tuple) else config


def _attributes(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns the plain values that a layer of this class has set."""
    return {
        name: value
        for name, value in vars(layer).items()
        if name not in _names_of_all_layers() and name != _STATE_OF_SEEDS and _is_plain(value)
    }


@functools.cache
def _names_of_all_layers() -> frozenset[str]:
    layers = (keras.layers.Layer(), keras.Model(), keras.Sequential())
    return frozenset(name for layer in layers for name in vars(layer))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN | np.ndarray)
