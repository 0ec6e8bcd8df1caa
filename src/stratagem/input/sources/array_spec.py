"""`ArraySpec`: shape and dtype of batches with an open batch size."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array; None stands for an unknown size.

    `ShapeDtypeStruct` of JAX 0.12 and later rejects None.

    Args:
        shape: size of each axis, or None.
        dtype: dtype of the elements.

    Example:
        >>> sg.input.Dataset(np.zeros((5, 2), "float32"), batch_size=2).element_spec
        ArraySpec(shape=(None, 2), dtype=dtype('float32'))

    Source: TF 2.21 framework/tensor.py, TensorSpec.
    """

    shape: tuple[int | None, ...]
    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


def spec_of(batch: object) -> Any:
    """Returns the `ArraySpec`s of a batch, with None as batch size."""

    def spec(leaf: Any) -> ArraySpec:
        array = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
        return ArraySpec((None, *tuple(array.shape)[1:]), np.asarray(array[:0]).dtype)

    return jax.tree.map(spec, batch)
