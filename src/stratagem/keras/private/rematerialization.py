"""Private names of Keras's rematerialization, and of the losses that layers add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem.keras.private.access import as_open

if TYPE_CHECKING:
    import keras


class LayerRemat(NamedTuple):
    """The way to compute a finished layer: the fields of Keras's own modes, a policy, and a chain.

    With a policy, the whole layer is rematerialized; otherwise the mode of its `keras.RematScope`
    holds. `chain` is the scan that the layer belongs to.
    """

    policy: Any = None
    chain: Any = None
    mode: str | None = None
    output_size_threshold: int = 0
    layer_names: tuple[str, ...] = ()


def remat_mode(layer: keras.layers.Layer) -> Any:
    """Returns how a layer is rematerialized: as its RematScope said, a `LayerRemat`, or None."""
    return as_open(layer)._remat_mode


def set_remat_policy(layer: keras.layers.Layer, policy: Any) -> None:
    """Rematerializes a layer by a policy; None turns all rematerialization of it off."""
    chain = getattr(remat_mode(layer), "chain", None)
    as_open(layer)._remat_mode = (
        None if policy is None and chain is None else LayerRemat(policy, chain)
    )


def set_chain(layer: keras.layers.Layer, chain: Any) -> None:
    """Makes a layer a part of a scan, and leaves its rematerialization as it is."""
    mode = remat_mode(layer)
    if mode is None:
        mode = LayerRemat()
    elif not isinstance(mode, LayerRemat):
        fields = (mode.mode, mode.output_size_threshold, tuple(mode.layer_names or ()))
        mode = LayerRemat(None, None, *fields)
    as_open(layer)._remat_mode = mode._replace(chain=chain)


def ids_of_losses(layer: keras.layers.Layer) -> set[int]:
    """Returns the ids of the losses that a layer added in the current scope, to be changed."""
    return as_open(layer)._loss_ids


def sublayers(layer: keras.layers.Layer) -> list[Any]:
    """Returns the layers that a layer calls itself, without those inside them."""
    return list(as_open(layer)._flatten_layers(include_self=False, recursive=False))
