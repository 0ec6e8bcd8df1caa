"""What an exported model takes: names, shapes and dtypes, and how features are made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras

from stratagem.messages import explain

__all__ = [
    "InputSpec",
    "ServingInputReceiver",
    "build_raw_serving_input_receiver_fn",
]

# What TensorFlow calls an input that has no name.
_SOLE_INPUT = "input"


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One input of an exported model.

    Args:
        shape: with None where any size is taken.
        dtype: its dtype.
    """

    shape: tuple[int | None, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class ServingInputReceiver:
    """What an exported model takes, and what of it the model function gets.

    Inputs are told by `keras.Input`, `keras.KerasTensor` or `jax.ShapeDtypeStruct`. Features may be
    computed from inputs of the first two kinds with Keras operations and layers.

    Args:
        features: what `model_fn` gets: the inputs, or what was computed of them, in the structure
            that `input_fn` gives.
        receiver_tensors: the inputs by name, or a single one, which is called "input".
        receiver_tensors_alternatives: None.

    Raises:
        NotImplementedError: alternatives.
        TypeError: an input of another kind.

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
                    "receiver_tensors_alternatives are given.",
                    expected="None: an export has one set of inputs.",
                    fix="export once more for the other inputs.",
                )
            )
        for value in jax.tree.leaves((self.features, self._named)):
            if not isinstance(value, keras.KerasTensor | jax.ShapeDtypeStruct):
                raise TypeError(
                    explain(
                        f"A ServingInputReceiver got {value!r} of type {type(value).__name__}.",
                        expected="keras.Input(...) or jax.ShapeDtypeStruct(...): shapes and "
                        "dtypes, no values.",
                        fix='pass {"x": keras.Input((4,), dtype="float32")}, for example.',
                    )
                )

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """The inputs by name."""
        return {
            name: InputSpec(tuple(one.shape), keras.backend.standardize_dtype(one.dtype))
            for name, one in self._named.items()
        }

    @property
    def _named(self) -> dict[str, Any]:
        given = self.receiver_tensors
        return dict(given) if isinstance(given, Mapping) else {_SOLE_INPUT: given}

    def features_of(self, values: Mapping[str, Any]) -> Any:
        """Returns the features for values of the inputs.

        Args:
            values: arrays by the name of the input.

        Raises:
            ValueError: a feature that is no input, and was not computed from any.
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
                raise ValueError("a feature is no input.")
            function = keras.Function(list(named.values()), features)
        except ValueError as error:
            raise ValueError(
                explain(
                    f"Features cannot be computed from the receiver_tensors: {error}",
                    expected="features that are receiver_tensors, or made of them with Keras.",
                    fix="use the objects of receiver_tensors in features.",
                )
            ) from error
        outputs: list[Any] = jax.tree.leaves(function([values[name] for name in named]))
        return outputs


def build_raw_serving_input_receiver_fn(
    features: Any, default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a `serving_input_receiver_fn` for features that are served as they are.

    Args:
        features: a dict from names to `keras.Input`, `jax.ShapeDtypeStruct` or arrays, or a single
            one; of arrays shape and dtype are taken. The first axis is the batch.
        default_batch_size: the only size of a batch that the export takes; None for any.

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
