"""`sg.remat`: rematerialization of a model that is already built."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import keras

from stratagem.keras.numerics.remat_policies import parse_policy
from stratagem.keras.private import LayerRemat, flatten_layers, set_remat_mode, sublayers
from stratagem.messages import explain

__all__ = ["remat"]


def remat(
    model: keras.layers.Layer,
    policy: str | Callable[..., Any] | None = "full",
    *,
    layers: str | Sequence[keras.layers.Layer] | None = None,
) -> list[keras.layers.Layer]:
    """Makes layers of a finished model recompute their activations in the backward pass.

    Activation memory then grows with the inputs of these layers, not with all results inside them;
    a step computes them once more. Without `layers`, the repeated blocks of the model are taken,
    such as the decoder layers of a KerasHub backbone. Call it before the first step, with or
    without a strategy. It is not saved with the model. `keras.RematScope` does the same for
    models whose layers you create yourself.

    Args:
        model: a Keras model or layer.
        policy: "full" saves the inputs of each layer only. "dots" also saves products with
            weights. "offload" and "offload_dots" keep what these two save in pinned host memory.
            A policy of `jax.checkpoint_policies` is taken, too. None turns rematerialization off.
        layers: the layers, or a regular expression that is searched in the names of all layers.

    Returns:
        The layers.

    Raises:
        ValueError: an unknown policy, or the model has no such layers.
        TypeError: `model` or an element of `layers` is no layer.

    Example:
        >>> blocks = [keras.layers.MultiHeadAttention(2, 4) for _ in range(3)]
        >>> x = inputs = keras.Input((16, 8))
        >>> for block in blocks:
        ...     x = block(x, x)
        >>> model = keras.Model(inputs, x)
        >>> sg.remat(model) == blocks
        True

    Source: keras.RematScope; jax.checkpoint_policies.
    """
    parsed = parse_policy(policy)
    chosen = _chosen(model, layers)
    for layer in chosen:
        set_remat_mode(layer, None if parsed is None else LayerRemat(parsed))
    return chosen


def _chosen(model: Any, layers: Any) -> list[Any]:
    given = [model] if layers is None or isinstance(layers, str) else [model, *layers]
    wrong = [one for one in given if not isinstance(one, keras.layers.Layer)]
    if wrong:
        raise TypeError(
            explain(
                f"remat received {wrong[0]!r}.",
                expected="a Keras model or layer.",
                fix="pass the model, and layers=[...] to choose some of its layers.",
            )
        )
    if layers is None:
        chosen = _blocks(model)
    elif isinstance(layers, str):
        chosen = [one for one in flatten_layers(model) if re.search(layers, one.name)]
    else:
        inside = set(map(id, flatten_layers(model)))
        chosen = [one for one in layers if id(one) in inside]
        if len(chosen) < len(layers):
            raise _not_found(model, "a layer that is not in the model")
    if not chosen:
        wanted = "no layers" if layers is None else f"layers={layers!r}"
        raise _not_found(model, wanted)
    return chosen


def _not_found(model: Any, received: str) -> ValueError:
    names = [layer.name for layer in flatten_layers(model)][1:9]
    return ValueError(
        explain(
            f"remat received {received}, and found nothing to recompute in {model.name!r}.",
            expected="two or more blocks of one class, each made of layers; or layers of the "
            f"model, such as {', '.join(names)}.",
            fix="pass layers=: layers of the model, or a regular expression for their names.",
        )
    )


def _blocks(layer: keras.layers.Layer) -> list[Any]:
    """Returns the outermost repeated layers that are made of layers with weights."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for one in sublayers(layer):
        groups[_kind(one)].append(one)
    found: list[Any] = []
    for group in groups.values():
        inside = [block for one in group for block in _blocks(one)]
        if isinstance(group[0], keras.Model) and inside:
            found += inside
        elif len(group) > 1 and any(one.weights for one in sublayers(group[0])):
            found += group
        else:
            found += inside
    return found


def _kind(layer: keras.layers.Layer) -> Any:
    """Returns the class of a layer, and for a model also the shapes of its weights."""
    if not isinstance(layer, keras.Model):
        return type(layer)
    return type(layer), tuple(tuple(weight.shape) for weight in layer.weights)
