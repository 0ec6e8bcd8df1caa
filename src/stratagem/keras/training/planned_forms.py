"""Models that compute in another form while they are planned: recomputed, or in mixed precision."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import keras

from stratagem.keras.numerics.rematerialization import remat
from stratagem.keras.private import flatten_layers, remat_mode


def repeated_blocks(model: keras.Model) -> list[Any]:
    """Returns the blocks that `sg.remat` would recompute; none if the model recomputes already."""
    if any(remat_mode(layer) is not None for layer in flatten_layers(model)):
        return []
    try:
        return remat(model, None)
    except ValueError:
        return []


def is_float32(model: keras.Model) -> bool:
    """Returns True if all layers with weights compute in float32."""
    layers = [layer for layer in flatten_layers(model) if layer.weights]
    return all(layer.dtype_policy.name == "float32" for layer in layers)


@contextlib.contextmanager
def computing_as(
    model: keras.Model, policy: str | None, precision: str | None = None
) -> Generator[None]:
    """Recomputes blocks and sets the precision inside a `with` block; None leaves it as it is."""
    before = [(layer, layer.dtype_policy) for layer in flatten_layers(model)]
    if policy is not None:
        remat(model, policy)
    try:
        for layer, old in before:
            if precision is not None and old.name == "float32":
                layer.dtype_policy = precision
        yield
    finally:
        for layer, old in before:
            if precision is not None and old.name == "float32":
                layer.dtype_policy = old
        if policy is not None:
            remat(model, None)
