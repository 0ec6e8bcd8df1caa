"""State of callbacks outside of variables, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from stratagem.checkpoint.objects import Stateful
from stratagem.keras.json_values import from_json, to_json

# Attributes that Keras's callbacks carry from epoch to epoch.
_ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        keras.callbacks.EarlyStopping,
        ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("best", "cooldown_counter", "wait")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
    (keras.callbacks.History, ("epoch", "history")),
)


def callback_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Returns the JSON states of callbacks, by class name and number within the class.

    The state is `get_state()` if the callback has it, and selected attributes for Keras's
    callbacks.
    """
    return {name: to_json(_state(callback)) for name, callback in _named(callbacks)}


def set_callback_states(callbacks: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Restores `callback_states`; callbacks without an entry stay unchanged."""
    for name, callback in _named(callbacks):
        if name not in states:
            continue
        state = from_json(states[name])
        if isinstance(callback, Stateful):
            callback.set_state(state)
        else:
            vars(callback).update(state)


def _state(callback: keras.callbacks.Callback) -> Any:
    if isinstance(callback, Stateful):
        return callback.get_state()
    return {name: getattr(callback, name) for name in _attributes(callback)}


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    counts: dict[str, int] = {}
    for callback in callbacks:
        if isinstance(callback, Stateful) or _attributes(callback):
            kind = type(callback).__name__
            counts[kind] = counts.get(kind, 0) + 1
            yield f"{kind} {counts[kind]}", callback


def _attributes(callback: keras.callbacks.Callback) -> list[str]:
    """Returns the attributes to save that exist in this Keras version, after `on_train_begin`."""
    return [
        name
        for kind, names in _ATTRIBUTES
        if isinstance(callback, kind)
        for name in names
        if hasattr(callback, name)
    ]
