"""A 64-bit hash of keys, the same on every machine and in every process."""

from __future__ import annotations

import numpy as np

__all__ = ["mix64"]

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def mix64(numbers: np.ndarray) -> np.ndarray:
    """Returns the hash of each uint64. Distinct numbers have distinct hashes.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014),
    with the constants of Stafford's variant 13, as in `java.util.SplittableRandom`.
    """
    mixed = numbers.copy()
    for shift, factor in zip(_SHIFTS, (_FIRST, _SECOND), strict=False):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _SHIFTS[-1]
    return mixed
