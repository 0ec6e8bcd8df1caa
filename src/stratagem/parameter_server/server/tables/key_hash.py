"""Hash of 64-bit keys, and streams of bits that depend on a key and a seed."""

from __future__ import annotations

import numpy as np

_BUCKET_BITS = 12
# Enough that each of up to hundreds of servers has about the same number of keys, and few enough to
# move one at a time to another server.
BUCKET_COUNT = 1 << _BUCKET_BITS

# Increment of SplitMix64: the odd number next to 2**64 divided by the golden ratio.
GOLDEN = 0x9E3779B97F4A7C15

_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
_MASK = 2**64 - 1


def mix64(numbers: np.ndarray) -> np.ndarray:
    """Returns 64 mixed bits for each uint64: a bijection in which each bit depends on all.

    Source: finalizer of MurmurHash3.
    """
    mixed = numbers ^ (numbers >> _SHIFT)
    mixed *= _FIRST
    mixed ^= mixed >> _SHIFT
    mixed *= _SECOND
    mixed ^= mixed >> _SHIFT
    return mixed


def buckets_of(keys: np.ndarray) -> np.ndarray:
    """Returns the bucket of each key: the upper bits of its hash."""
    return (mix64(keys.view(np.uint64)) >> np.uint64(64 - _BUCKET_BITS)).astype(np.intp)


def seeded(keys: np.ndarray, seed: int) -> np.ndarray:
    """Returns 64 mixed bits for each int64 key, which depend on a seed."""
    start = np.array([(seed + GOLDEN) & _MASK], np.uint64)
    return mix64(keys.view(np.uint64) ^ mix64(start))
