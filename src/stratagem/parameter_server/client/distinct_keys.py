"""Equal keys among those of a lookup, found by hashing in time that no table's size changes."""

from __future__ import annotations

import numpy as np

# The hash table has this many entries or more for each key.
_ENTRIES_PER_KEY = 2
# Multipliers of two hashes: Knuth's, and that of rrmxmx, an independent one.
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def representatives(keys: np.ndarray) -> np.ndarray:
    """Returns for each key the position of one key of equal value, the same for all equal keys.

    `keys` has shape (k,) and dtype int64, of any value; the result has dtype int32.

    Each key writes its position to a hash table. A key that reads the position of a different one
    tries a second hash, and then the few that are left are sorted.
    """
    positions = np.arange(len(keys), dtype=np.int32)
    if not len(keys):
        return positions
    bits = (_ENTRIES_PER_KEY * len(keys) - 1).bit_length()
    shift = np.uint64(64 - bits)
    table = np.empty(1 << bits, np.int32)
    found = _winners(table, _hashed(keys, shift), positions)
    left = np.flatnonzero(keys[found] != keys)
    if not len(left):
        return found
    own = keys[left]
    again = _winners(table, _hashed_again(own, shift), left.astype(np.int32))
    found[left] = again
    is_other = keys[again] != own
    left = left[is_other]
    if len(left):
        found[left] = left[_first_of_equal(own[is_other])]
    return found


def _winners(table: np.ndarray, entries: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the position that was written last to each one's entry."""
    table[entries] = positions
    return table[entries]


def _hashed(keys: np.ndarray, shift: np.uint64) -> np.ndarray:
    return ((keys.view(np.uint64) * _FIRST) >> shift).view(np.int64)


def _hashed_again(keys: np.ndarray, shift: np.uint64) -> np.ndarray:
    mixed = keys.view(np.uint64)
    return (((mixed ^ (mixed >> _HALF)) * _SECOND) >> shift).view(np.int64)


def _first_of_equal(keys: np.ndarray) -> np.ndarray:
    """Returns the position of the first equal key, for each key, by sorting."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.ones(len(keys), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    firsts = np.empty(len(keys), np.intp)
    firsts[order] = order[is_first][np.cumsum(is_first) - 1]
    return firsts
