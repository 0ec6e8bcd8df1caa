"""`sg.embedding.keys`: 64-bit keys of ids and strings, in a form that JAX keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from stratagem.errors import explain
from stratagem.parameter_server.fingerprints import fingerprints


def keys(values: ArrayLike) -> np.ndarray:
    """Converts ids or strings to keys of a `DynamicEmbedding`. Call it in the dataset.

    JAX has no 64-bit integers by default, so a key is a pair of 32-bit numbers.

    Args:
        values: integers of any dtype, which are the keys themselves; or strings or bytes, whose
            keys are TensorFlow's fingerprints (`tf.strings.to_hash_bucket_fast` before the modulo).
            The empty string has the key 0, so that it can be padding.

    Returns:
        Array of dtype uint32 and shape (*values.shape, 2), the low half first. For integers of 64
        bits it may share memory with `values`.

    Raises:
        TypeError: values of another type.

    Example:
        >>> sg.embedding.keys([3, 2**40]).tolist()
        [[3, 0], [0, 256]]
        >>> sg.embedding.keys(["apple", ""]).shape
        (2, 2)

    Source: TF 2.21 string_ops.py, string_to_hash_bucket_fast.
    """
    array = np.asarray(values)
    if not array.size:
        return np.empty((*array.shape, 2), np.uint32)
    if array.dtype.kind in "SUOT":
        array = _of_strings(array)
    elif array.dtype.kind not in "iu":
        raise _not_keys(f"values of dtype {array.dtype}")
    if array.dtype != np.uint64:
        array = array.astype(np.int64, copy=False)
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    halves = np.atleast_1d(little).view(np.dtype("<u4")).reshape(*array.shape, 2)
    return halves.astype(np.uint32, copy=False)


def _of_strings(array: np.ndarray) -> np.ndarray:
    try:
        hashed = fingerprints(array)
    except TypeError as error:
        raise _not_keys(str(error)) from None
    return np.where((array == "") | (array == b""), np.uint64(0), hashed)


def _not_keys(received: str) -> TypeError:
    # Never with a value: ids may be those of persons.
    return TypeError(
        explain(
            f"sg.embedding.keys received {received}.",
            expected="integers, strings or bytes.",
            fix="convert the values before, for example with values.astype(str).",
        )
    )
