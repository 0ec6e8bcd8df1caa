"""Hashes of keys in Python integers, one at a time."""

from __future__ import annotations

__all__ = ["GOLDEN", "KEYS", "MASK", "mixed", "seeded_key"]

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
KEYS = [0, 1, -1, 2**40 + 5, 2**63 - 1, -(2**63)]


def mixed(number: int) -> int:
    """The finalizer of MurmurHash3."""
    number ^= number >> 33
    number = number * 0xFF51AFD7ED558CCD & MASK
    number ^= number >> 33
    number = number * 0xC4CEB9FE1A85EC53 & MASK
    return number ^ number >> 33


def seeded_key(key: int, seed: int) -> int:
    """The start of a key's bits."""
    return mixed((key & MASK) ^ mixed((seed + GOLDEN) & MASK))
