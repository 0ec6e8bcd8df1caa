"""Conversion of features, labels and outputs between input functions and Keras models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras

from stratagem.messages import explain

# Features with these two keys carry weights, as in TensorFlow.
_WEIGHTED = {"features", "sample_weights"}


def split_weights(features: object) -> tuple[Any, Any]:
    """Splits `{"features": x, "sample_weights": w}` into both; weights are None otherwise."""
    if isinstance(features, Mapping) and set(features) == _WEIGHTED:
        return features["features"], features["sample_weights"]
    return features, None


def inputs_of(model: keras.Model, features: object) -> Any:
    """Converts features to the inputs that a model is called with."""
    if not isinstance(features, Mapping):
        return features
    if isinstance(model, keras.Sequential) and len(features) == 1:
        return next(iter(features.values()))  # Keras chooses the input's name itself
    if not hasattr(model, "output_names"):  # inputs of subclassed models are unknown
        return features
    structure = model.input
    if isinstance(structure, Mapping):
        return _chosen(features, "features", list(structure), "inputs")
    names = [tensor.name for tensor in jax.tree.leaves(structure)]
    if len(names) == len(features) == 1:
        chosen = list(features.values())
    else:
        chosen = list(_chosen(features, "features", names, "inputs").values())
    return chosen if isinstance(structure, Sequence) else chosen[0]


def targets_of(model: keras.Model, outputs: object, targets: object, kind: str) -> Any:
    """Converts labels or weights to the structure of a model's outputs.

    `targets` is an array, a list in output order, a dict by output name, or None.
    """
    if not isinstance(targets, Mapping):
        return targets
    names = output_names(model, outputs)
    unknown = sorted(set(targets) - set(names)) if kind == "sample_weights" else []
    if unknown:
        raise ValueError(
            explain(
                f"sample_weights has the unknown names {unknown}.",
                expected=f"output names from {names}.",
                fix="correct the names; outputs without weights use 1.",
            )
        )
    if kind == "labels":
        targets = _chosen(targets, kind, names, "outputs")
    chosen = {name: targets.get(name) for name in names}
    if isinstance(outputs, Mapping):
        return chosen
    values = list(chosen.values())
    return values if isinstance(outputs, Sequence) else values[0]


def outputs_by_name(model: keras.Model, outputs: object) -> dict[str, Any]:
    """Returns a model's outputs as a dict of predictions."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return dict(zip(output_names(model, outputs), jax.tree.leaves(outputs), strict=True))


def output_names(model: keras.Model, outputs: object) -> list[str]:
    """Returns the names of a model's outputs."""
    if isinstance(outputs, Mapping):
        return list(outputs)
    if isinstance(model, keras.Sequential):
        return [model.layers[-1].name]
    count = len(jax.tree.leaves(outputs))
    numbered = [f"output_{number}" for number in range(1, count + 1)]
    return list(getattr(model, "output_names", numbered))


def _chosen(values: Mapping[str, Any], kind: str, names: list[str], role: str) -> dict[str, Any]:
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(
            explain(
                f"{kind} has the names {sorted(values)} but lacks {missing}.",
                expected=f"all {role} of the Keras model: {names}.",
                fix="rename them in input_fn, or rename the model's layers.",
            )
        )
    return {name: values[name] for name in names}
