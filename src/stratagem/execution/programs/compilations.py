"""Counts of the programs that a strategy has compiled, by function name."""

from __future__ import annotations

import collections
import weakref
from typing import Any

__all__ = ["compilations_of", "note_compilation"]

_counts: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def note_compilation(strategy: object, name: str) -> None:
    """Counts a new program of a function."""
    _counts.setdefault(strategy, collections.Counter())[name] += 1


def compilations_of(strategy: object) -> dict[str, int]:
    """Returns the number of programs by function name, in the order of the first ones."""
    return dict(_counts.get(strategy, {}))
