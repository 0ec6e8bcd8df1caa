"""Choice of a model's layers: its repeated blocks, or those that an argument names."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import keras

from stratagem.errors import explain
from stratagem.keras.private import flatten_layers, sublayers


def choose_layers(caller: str, model: Any, layers: Any, purpose: str) -> list[Any]:
    """Returns the repeated blocks of a model, or the given layers; `caller` is named in errors."""
    given = [model] if layers is None or isinstance(layers, str) else [model, *layers]
    wrong = [one for one in given if not isinstance(one, keras.layers.Layer)]
    if wrong:
        raise TypeError(
            explain(
                f"{caller} received {wrong[0]!r}.",
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
            raise _not_found(caller, model, "a layer that is not in the model", purpose)
    if not chosen:
        wanted = "no layers" if layers is None else f"layers={layers!r}"
        raise _not_found(caller, model, wanted, purpose)
    return chosen


def _not_found(caller: str, model: Any, received: str, purpose: str) -> ValueError:
    names = [layer.name for layer in flatten_layers(model)][1:9]
    return ValueError(
        explain(
            f"{caller} received {received}, and found nothing to {purpose} in {model.name!r}.",
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
