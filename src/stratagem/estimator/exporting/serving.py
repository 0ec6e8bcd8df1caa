"""ServingInputReceiver: inputs of an exported model and the features computed from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras

from stratagem.errors import explain

# TensorFlow's name for a single unnamed input.
_SOLE_INPUT = "input"


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """Shape and dtype of one input; None in the shape means any size."""

    shape: tuple[int | None, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class ServingInputReceiver:
    """Inputs of an exported model, and the features that the model function gets from them.

    Inputs are `keras.Input`, `keras.KerasTensor` or `jax.ShapeDtypeStruct` objects. Features may
    be computed from the first two with Keras operations and layers.

    Args:
        features: the features for `model_fn`: the inputs or values computed from them, in the
            structure that `input_fn` returns.
        receiver_tensors: a dict of inputs by name, or a single input, named "input".
        receiver_tensors_alternatives: must be None.

    Raises:
        NotImplementedError: if alternatives are set.
        TypeError: if an input has another type.

    Example:
        >>> pixels = keras.Input((28, 28), dtype="uint8", name="pixels")
        >>> features = keras.ops.cast(pixels, "float32") / 255.0
        >>> receiver = sg.estimator.export.ServingInputReceiver(features, {"pixels": pixels})
        >>> receiver.inputs["pixels"].shape
        (None, 28, 28)

    Source: tensorflow/estimator export.py, ServingInputReceiver.
    """

    features: Any
    receiver_tensors: Any
    receiver_tensors_alternatives: Any = None

    def __post_init__(self) -> None:
        if self.receiver_tensors_alternatives:
            raise NotImplementedError(
                explain(
                    "receiver_tensors_alternatives are not supported.",
                    expected="None: an export has one set of inputs.",
                    fix="export once per set of inputs.",
                )
            )
        for value in jax.tree.leaves((self.features, self._named)):
            if not isinstance(value, keras.KerasTensor | jax.ShapeDtypeStruct):
                raise TypeError(
                    explain(
                        f"ServingInputReceiver received {value!r} of type {type(value).__name__}.",
                        expected="keras.Input(...) or jax.ShapeDtypeStruct(...), without values.",
                        fix='pass {"x": keras.Input((4,), dtype="float32")}, for example.',
                    )
                )

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """Inputs by name."""
        return {
            name: InputSpec(tuple(one.shape), keras.backend.standardize_dtype(one.dtype))
            for name, one in self._named.items()
        }

    @property
    def _named(self) -> dict[str, Any]:
        inputs = self.receiver_tensors
        return dict(inputs) if isinstance(inputs, Mapping) else {_SOLE_INPUT: inputs}

    def features_of(self, values: Mapping[str, Any]) -> Any:
        """Computes the features from input values.

        Args:
            values: arrays by input name.

        Returns:
            The features, in the structure of `features`.

        Raises:
            ValueError: if a feature is neither an input nor computed from inputs.
        """
        of_input = {id(one): values[name] for name, one in self._named.items()}
        features, structure = jax.tree.flatten(self.features)
        computed = [one for one in features if id(one) not in of_input]
        found = dict(of_input)
        if computed:
            found |= zip(map(id, computed), self._compute(computed, values), strict=True)
        return jax.tree.unflatten(structure, [found[id(one)] for one in features])

    def _compute(self, features: list[Any], values: Mapping[str, Any]) -> list[Any]:
        named = self._named
        are_symbolic = all(
            isinstance(one, keras.KerasTensor) for one in (*named.values(), *features)
        )
        try:
            if not are_symbolic:
                raise ValueError("a feature is not an input.")
            function = keras.Function(list(named.values()), features)
        except ValueError as error:
            raise ValueError(
                explain(
                    f"Features cannot be computed from the receiver_tensors: {error}",
                    expected="features that are receiver_tensors or Keras operations on them.",
                    fix="use the objects of receiver_tensors in features.",
                )
            ) from error
        outputs: list[Any] = jax.tree.leaves(function([values[name] for name in named]))
        return outputs


def build_raw_serving_input_receiver_fn(
    features: object, default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a `serving_input_receiver_fn` for features that are served unchanged.

    Args:
        features: a `keras.Input`, `jax.ShapeDtypeStruct` or array, or a dict of them. Only shapes
            and dtypes matter. Axis 0 is the batch.
        default_batch_size: the only batch size that the export accepts; None for any.

    Returns:
        A function without arguments.

    Example:
        >>> receiver_fn = sg.estimator.export.build_raw_serving_input_receiver_fn(
        ...     {"x": jax.ShapeDtypeStruct((1, 4), "float32")}
        ... )
        >>> receiver_fn().inputs["x"].shape
        (None, 4)

    Source: tensorflow/estimator export.py, build_raw_serving_input_receiver_fn.
    """

    def receiver() -> ServingInputReceiver:
        specs = jax.tree.map(
            lambda one: keras.KerasTensor((default_batch_size, *one.shape[1:]), one.dtype),
            features,
        )
        return ServingInputReceiver(specs, specs)

    return receiver
