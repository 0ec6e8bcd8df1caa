"""`sg.scan_layers`: equal layers of a finished model computed by one loop."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from stratagem.keras.numerics.layer_chains import find_chains
from stratagem.keras.numerics.repeated_blocks import choose_layers
from stratagem.keras.private.rematerialization import set_chain


def scan_layers(
    model: keras.layers.Layer, *, layers: str | Sequence[keras.layers.Layer] | None = None
) -> list[keras.layers.Layer]:
    """Makes steps compute equal layers that follow each other by one `jax.lax.scan`.

    The program of a step then has one of these layers, and is traced and compiled faster. Only the
    updates of variables grow with their number. Variables stay as they are, with their names and
    values. Without `layers`, the repeated blocks of the model are taken, such as the decoder layers
    of a KerasHub backbone. Call it before the first step, with or without a strategy, before or
    after `sg.remat`. It is not saved with the model. Layers that are called on their own, as in
    KerasHub's `generate`, are computed on their own.

    Args:
        model: a functional or sequential Keras model, or one that has such a model inside.
        layers: the layers, or a regular expression that is searched in the names of all layers.

    Returns:
        The layers.

    Raises:
        ValueError: the model has no such layers, they are not equal, or they do not follow each
            other.
        TypeError: `model` or an element of `layers` is no layer.

    Example:
        >>> blocks = [keras.layers.MultiHeadAttention(2, 4) for _ in range(3)]
        >>> x = inputs = keras.Input((16, 8))
        >>> for block in blocks:
        ...     x = block(x, x)
        >>> model = keras.Model(inputs, x)
        >>> sg.scan_layers(model) == blocks
        True

    Source: MaxText's scan_layers.
    """
    chosen = choose_layers("scan_layers", model, layers, "scan")
    for chain in find_chains(model, chosen):
        chain.scan_in_calls()
        for layer in chain.layers:
            set_chain(layer, chain)
    return chosen
