"""Wrapped methods of subclasses of `keras.Model`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from stratagem.keras.training.model_methods import wrapping_methods


class _Base(keras.Model):
    def saved(self) -> list[str]:
        return ["base"]


class _Own(_Base):
    other = "not a function"

    def saved(self) -> list[str]:
        return [*super().saved(), "own"]


def test_a_method_is_wrapped_once_in_each_class_that_has_it() -> None:
    def wrap(method: Callable[..., list[str]]) -> Callable[..., list[str]]:
        @functools.wraps(method)
        def wrapped(self: Any) -> list[str]:
            return [*method(self), "wrapped"]

        return wrapped

    create: Any = wrapping_methods(wrap, "saved", "other", "missing")(keras.Model.__new__)
    models = [create.__func__(cls) for cls in (_Own, _Own, _Base)]
    assert models[0].saved() == models[1].saved() == ["base", "wrapped", "own", "wrapped"]
    assert models[2].saved() == ["base", "wrapped"]
    assert models[0].other == "not a function"
    assert "saved" not in vars(keras.Model)
