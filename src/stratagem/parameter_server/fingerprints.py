"""FarmHash fingerprints, TensorFlow's hash of strings: for hashed columns, and for keys of tables.

`Fingerprint64` is the same on every machine and in every process, unlike Python's `hash`. It is
implemented here so that ids don't depend on an optional package. The functions compute with Python
numbers for one string, and with arrays of uint64, which wrap around, for strings of one length.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stratagem.errors import explain

_WORD = (1 << 64) - 1
_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_CONCATENATION = 0xC6A4A7935BD1E995
_MOST_STRINGS = 4096  # hashed at once: temporary arrays stay in the processor's cache


@functools.lru_cache(maxsize=1 << 18)
def fingerprint(text: bytes) -> int:
    """Returns the 64-bit fingerprint of a string (FarmHash 1.1, farmhashna::Hash64)."""
    return _hashed(text, len(text))


def fingerprints(strings: np.ndarray) -> np.ndarray:
    """Returns the fingerprints of an array of strings or bytes, with dtype uint64.

    Raises:
        TypeError: the array has an object that is neither.
    """
    buffer, starts, sizes = _joined(strings.reshape(-1))
    found = np.empty(len(sizes), np.uint64)
    for size in np.unique(sizes):
        own = np.flatnonzero(sizes == size)
        for first in range(0, len(own), _MOST_STRINGS):
            some = own[first : first + _MOST_STRINGS]
            found[some] = _hashed(buffer[starts[some][:, None] + np.arange(size)], int(size))
    return found.reshape(strings.shape)


def _joined(strings: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the bytes of all strings, and the start and size of each."""
    if strings.dtype.kind == "U":
        characters = np.ascontiguousarray(strings).view(np.dtype("=u4"))
        if strings.dtype.isnative and characters.size and characters.max() < 128:
            strings = characters.astype(np.uint8).view(f"S{strings.dtype.itemsize // 4}")
    if strings.dtype.kind == "S" and strings.dtype.itemsize:
        width = strings.dtype.itemsize
        buffer = np.ascontiguousarray(strings).view(np.uint8)
        return buffer, np.arange(len(strings)) * width, np.char.str_len(strings)
    texts = [one if isinstance(one, bytes) else _encoded(one) for one in strings.tolist()]
    sizes = np.array([len(one) for one in texts], np.int64)
    return np.frombuffer(b"".join(texts), np.uint8), np.cumsum(sizes) - sizes, sizes


def _encoded(text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"a value of type {type(text).__name__} is no string")
    return text.encode()


def _hashed(text: Any, size: int) -> Any:
    if size <= 16:
        return _up_to_16(text, size)
    multiplier = (_K2 + 2 * size) & _WORD
    if size <= 32:
        a, b = _word(text, 0) * _K1 & _WORD, _word(text, 8)
        c, d = _word(text, size - 8) * multiplier, _word(text, size - 16) * _K2
        return _mix(
            _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, multiplier
        )
    return _up_to_64(text, size, multiplier) if size <= 64 else _long(text, size)


def concatenated_fingerprint(first: int, second: int) -> int:
    """Returns the fingerprint of two fingerprints in order (TensorFlow's FingerprintCat64)."""
    result = first ^ _CONCATENATION
    result ^= _shift_mix(second * _CONCATENATION) * _CONCATENATION & _WORD
    result = _shift_mix(result * _CONCATENATION) * _CONCATENATION
    return _shift_mix(result)


def _word(text: Any, start: int, size: int = 8) -> Any:
    """Returns bytes as one number: of a string, or of each row of a matrix of bytes."""
    if isinstance(text, bytes):
        return int.from_bytes(text[start : start + size], "little")
    part = np.ascontiguousarray(text[:, start : start + size])
    return part.view(f"<u{size}")[:, 0].astype(np.uint64)


def _rotate(value: Any, bits: int) -> Any:
    value &= _WORD
    return (value >> bits | value << (64 - bits)) & _WORD


def _shift_mix(value: Any) -> Any:
    value &= _WORD
    return value ^ value >> 47


def _mix(first: Any, second: Any, multiplier: Any) -> Any:
    a = _shift_mix(((first ^ second) & _WORD) * multiplier)
    return _shift_mix(((second & _WORD) ^ a) * multiplier) * multiplier & _WORD


def _up_to_16(text: Any, size: int) -> Any:
    multiplier = _K2 + 2 * size
    if size >= 8:
        a, b = _word(text, 0) + _K2, _word(text, size - 8)
        return _mix(_rotate(b, 37) * multiplier + a, (_rotate(a, 25) + b) * multiplier, multiplier)
    if size >= 4:
        return _mix(size + (_word(text, 0, 4) << 3), _word(text, size - 4, 4), multiplier)
    if size == 0:
        return _K2
    first = _word(text, 0, 1) + (_word(text, size >> 1, 1) << 8)
    last = size + (_word(text, size - 1, 1) << 2)
    return _shift_mix(first * _K2 ^ last * _K0) * _K2 & _WORD


def _up_to_64(text: Any, size: int, multiplier: int) -> Any:
    a, b = _word(text, 0) * _K2 & _WORD, _word(text, 8)
    c, d = _word(text, size - 8) * multiplier, _word(text, size - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _mix(y, a + _rotate(b + _K2, 18) + c, multiplier)
    e, f = _word(text, 16) * multiplier, _word(text, 24)
    g = (y + _word(text, size - 32)) * multiplier
    h = (z + _word(text, size - 24)) * multiplier
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, multiplier)


def _long(text: Any, size: int) -> Any:
    """Hashes over 64 bytes: 56 bytes of state, 64 bytes per round, the last 64 twice."""
    x = y = 81
    y = (y * _K1 + 113) & _WORD
    z = _shift_mix(y * _K2 + 113) * _K2 & _WORD
    v = w = (0, 0)
    x = ((x * _K2 & _WORD) + _word(text, 0)) & _WORD
    for start in range(0, (size - 1) // 64 * 64, 64):
        x = _rotate(x + y + v[0] + _word(text, start + 8), 37) * _K1 & _WORD
        y = _rotate(y + v[1] + _word(text, start + 48), 42) * _K1 & _WORD
        x ^= w[1]
        y += v[0] + _word(text, start + 40)
        z = _rotate(z + w[0], 33) * _K1 & _WORD
        v = _weak(text, start, v[1] * _K1, x + w[0])
        w = _weak(text, start + 32, z + w[1], y + _word(text, start + 16))
        z, x = x, z
    multiplier, start, left = _K1 + ((z & 0xFF) << 1), size - 64, (size - 1) & 63
    w = (w[0] + left, w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x = _rotate(x + y + v[0] + _word(text, start + 8), 37) * multiplier & _WORD
    y = _rotate(y + v[1] + _word(text, start + 48), 42) * multiplier & _WORD
    x ^= w[1] * 9 & _WORD
    y += v[0] * 9 + _word(text, start + 40)
    z = _rotate(z + w[0], 33) * multiplier & _WORD
    v = _weak(text, start, v[1] * multiplier, x + w[0])
    w = _weak(text, start + 32, z + w[1], y + _word(text, start + 16))
    z, x = x, z
    return _mix(
        _mix(v[0], w[0], multiplier) + _shift_mix(y) * _K0 + z,
        _mix(v[1], w[1], multiplier) + x,
        multiplier,
    )


def _weak(text: Any, start: int, a: Any, b: Any) -> tuple[Any, Any]:
    first, second, third, fourth = (_word(text, start + offset) for offset in (0, 8, 16, 24))
    a += first
    total = a + second + third
    b = _rotate(b + a + fourth, 21) + _rotate(total, 44)
    return (total + fourth) & _WORD, (b + a) & _WORD


# `sg.embedding.keys`: 64-bit keys of ids and strings, in a form that JAX keeps.


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
