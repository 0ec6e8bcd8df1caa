"""Batches of an input function as a Keras model takes them, and its outputs by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras

from stratagem.messages import explain

__all__ = ["inputs_of", "output_names", "outputs_by_name", "split_weights", "targets_of"]

# The one form of features that carries weights, as in TensorFlow.
_WEIGHTED = {"features", "sample_weights"}


def split_weights(features: Any) -> tuple[Any, Any]:
    """Returns features and the weights of the examples, which travel among them.

    Args:
        features: a dict of `features` and `sample_weights`, or features alone.

    Returns:
        Both; None for weights that there are not.

    Source: tensorflow/estimator keras_lib.py, _extract_sample_weight_tensors.
    """
    if isinstance(features, Mapping) and set(features) == _WEIGHTED:
        return features["features"], features["sample_weights"]
    return features, None


def inputs_of(model: keras.Model, features: Any) -> Any:
    """Returns features as a model is called with them.

    Args:
        model: the Keras model.
        features: an array, a list of them in the order of the inputs, or a dict by their names,
            which may hold more than the model takes.

    Raises:
        ValueError: a dict without an input of the model.

    Source: tensorflow/estimator keras_lib.py, _convert_estimator_io_to_keras.
    """
    if not isinstance(features, Mapping):
        return features
    if isinstance(model, keras.Sequential) and len(features) == 1:
        return next(iter(features.values()))  # whatever name Keras has found for its input
    if not hasattr(model, "output_names"):  # subclassed, and so no more is known of its inputs
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


def targets_of(model: keras.Model, outputs: Any, given: Any, what: str) -> Any:
    """Returns labels, or weights, in the structure of a model's outputs.

    Args:
        model: the Keras model.
        outputs: what it returned.
        given: an array, a list in the order of the outputs, or a dict by their names; None for
            none. Labels of all outputs are needed, and weights of any.
        what: "labels" or "sample_weights".

    Raises:
        ValueError: a dict with other names than those of the outputs.
    """
    if not isinstance(given, Mapping):
        return given
    names = output_names(model, outputs)
    unknown = sorted(set(given) - set(names)) if what == "sample_weights" else []
    if unknown:
        raise ValueError(
            explain(
                f"sample_weights has the names {unknown}.",
                expected=f"names of outputs, of {names}.",
                fix="correct them; examples of an output without weights count 1.",
            )
        )
    if what == "labels":
        given = _chosen(given, what, names, "outputs")
    chosen = {name: given.get(name) for name in names}
    if isinstance(outputs, Mapping):
        return chosen
    values = list(chosen.values())
    return values if isinstance(outputs, Sequence) else values[0]


def outputs_by_name(model: keras.Model, outputs: Any) -> dict[str, Any]:
    """Returns what a model returned as the predictions of a model function.

    Args:
        model: the Keras model.
        outputs: an array, or a structure of them.
    """
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return dict(zip(output_names(model, outputs), jax.tree.leaves(outputs), strict=True))


def output_names(model: keras.Model, outputs: Any) -> list[str]:
    """Returns the names of a model's outputs.

    Args:
        model: the Keras model.
        outputs: what it returned, or as many objects.

    Returns:
        The keys of a dict; of other models the names of the layers that make the outputs; of
        subclassed ones `output_1` and so on.
    """
    if isinstance(outputs, Mapping):
        return list(outputs)
    if isinstance(model, keras.Sequential):
        return [model.layers[-1].name]
    count = len(jax.tree.leaves(outputs))
    numbered = [f"output_{number}" for number in range(1, count + 1)]
    return list(getattr(model, "output_names", numbered))


def _chosen(given: Mapping[str, Any], what: str, names: list[str], kind: str) -> dict[str, Any]:
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(
            explain(
                f"{what} has the names {sorted(given)}, and not {missing}.",
                expected=f"all {kind} of the Keras model: {names}.",
                fix="rename them in input_fn, or the layers of the model.",
            )
        )
    return {name: given[name] for name in names}
