"""Private names of Keras's rematerialization, and of the losses that layers add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from keras.src.backend.jax import core as jax_core

from stratagem.keras.private.access import as_open

if TYPE_CHECKING:
    import keras

__all__ = ["LayerRemat", "ids_of_losses", "jax_core", "remat_mode", "set_remat_mode", "sublayers"]


class LayerRemat(NamedTuple):
    """Rematerialization of a finished layer: the fields of Keras's own, and a policy."""

    policy: Any
    mode: str = "full"
    output_size_threshold: int = 0
    layer_names: tuple[str, ...] = ()


def remat_mode(layer: keras.layers.Layer) -> Any:
    """Returns how a layer is rematerialized: as its RematScope said, a `LayerRemat`, or None."""
    return as_open(layer)._remat_mode


def set_remat_mode(layer: keras.layers.Layer, mode: LayerRemat | None) -> None:
    """Sets how a layer is rematerialized."""
    as_open(layer)._remat_mode = mode


def ids_of_losses(layer: keras.layers.Layer) -> set[int]:
    """Returns the ids of the losses that a layer added in the current scope, to be changed."""
    return as_open(layer)._loss_ids


def sublayers(layer: keras.layers.Layer) -> list[Any]:
    """Returns the layers that a layer calls itself, without those inside them."""
    return list(as_open(layer)._flatten_layers(include_self=False, recursive=False))
