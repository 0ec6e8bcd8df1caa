"""Building of a model's metrics and losses from its known outputs.

Keras traces the whole model once more for it, which takes as long as tracing the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from stratagem.contexts import has_strategy
from stratagem.keras.private import Functional, unpack_x_y_sample_weight
from stratagem.keras.private.iterators import first_batch
from stratagem.keras.private.trainers import build_metrics, has_unbuilt_metrics
from stratagem.keras.private.variables import flatten_layers
from stratagem.keras.training.model import strategy_of
from stratagem.keras.training.step_functions import HostBatches

# Their outputs are those of the layers that they were made from.
_CALLS = (keras.Sequential.call, Functional.call)


def building_metrics(original: Callable[..., Any]) -> Any:
    """Returns `_symbolic_build` that does not trace a model whose outputs are known."""

    @functools.wraps(original)
    def build(self: keras.Model, iterator: Any = None, data_batch: Any = None) -> Any:
        outputs = _outputs(self)
        if data_batch is not None and has_strategy():  # Keras 3.16 reads the adapter itself
            data_batch = next(HostBatches([data_batch], None))
        if outputs is None or strategy_of(self) is None or not has_unbuilt_metrics(self):
            return original(self, iterator=iterator, data_batch=data_batch)
        if data_batch is None and (data_batch := first_batch(iterator)) is None:
            return original(self, iterator=iterator)
        x, y, sample_weight = unpack_x_y_sample_weight(keras.tree.map_structure(_spec, data_batch))
        num_examples = keras.tree.flatten(x)[0].shape[0]
        y_pred = keras.tree.map_structure(
            lambda output: keras.KerasTensor((num_examples, *output.shape[1:]), output.dtype),
            outputs,
        )
        build_metrics(self, x, y, y_pred, sample_weight)
        return original(self, data_batch=data_batch)

    return build


def _outputs(model: keras.Model) -> Any:
    """Returns the outputs of a built model whose shapes are known but for the batch, or None."""
    if type(model).call not in _CALLS or not all(layer.built for layer in flatten_layers(model)):
        return None
    outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output
    shapes = [output.shape for output in keras.tree.flatten(outputs)]
    is_known = all(shape and shape[0] is None and None not in shape[1:] for shape in shapes)
    return outputs if is_known else None


def _spec(array: Any) -> keras.KerasTensor | None:
    if array is None:
        return None
    return keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))
